//! NVIDIA from sm_90 on: `multimem` instructions, which are of PTX 8.1 (`.acc::f32` of 8.2).

use core::arch::asm;
use core::hint::unreachable_unchecked;

use super::Combine;
use crate::comm::{Comm, WindowAddr};
use crate::element::{DType, Element, Number};
use crate::layout::MAX_WINDOWS;

/// The same bytes of every rank's part of a window. See [`crate::multimem`].
#[derive(Clone, Copy, Debug)]
pub struct Multicast {
    address: u64,
}

/// Loads 16 bytes into four registers by one multicast instruction.
macro_rules! load {
    ($at:expr, $what:literal) => {{
        let (a, b, c, d): (u32, u32, u32, u32);
        // SAFETY: the precondition of `load_reduce`.
        unsafe {
            asm!(
                concat!(
                    "{{ .reg .b64 global; cvta.to.global.u64 global, {at}; ",
                    "multimem.ld_reduce.relaxed.sys.global.", $what,
                    " {{{a}, {b}, {c}, {d}}}, [global]; }}"
                ),
                at = in(reg64) $at,
                a = out(reg32) a,
                b = out(reg32) b,
                c = out(reg32) c,
                d = out(reg32) d,
                options(nostack)
            );
        }
        [
            u64::from(b) << 32 | u64::from(a),
            u64::from(d) << 32 | u64::from(c),
        ]
    }};
}

impl Multicast {
    /// Returns the multicast address of the `bytes` bytes of every rank at `addr`, or `None` where
    /// the window does not exist, the range leaves it, or the host has given it no multicast
    /// address.
    #[inline(always)]
    pub fn of(comm: &Comm, addr: WindowAddr, bytes: u64) -> Option<Self> {
        if addr.window() as usize >= MAX_WINDOWS {
            return None;
        }
        let (window, _) = comm.window(addr.window());
        // SAFETY: the table has MAX_WINDOWS entries.
        let size = unsafe { (&raw const (*window).bytes).read() };
        // SAFETY: as above.
        let base = unsafe { (&raw const (*window).multicast).read() };
        let fits = addr.offset() <= size && bytes <= size - addr.offset();
        (fits && base != 0).then(|| Self {
            address: base + addr.offset(),
        })
    }

    /// Returns the address for `multimem` instructions, or `None` if this machine has no such
    /// instructions. For code that issues them by itself.
    #[inline(always)]
    pub const fn address(self) -> Option<u64> {
        Some(self.address)
    }

    /// Returns the reduction of all ranks' 16 bytes at byte `byte`: elements of type `T`. Relaxed,
    /// system scope.
    ///
    /// # Safety
    /// `byte + 16` must be within what [`Multicast::of`] was asked for, `addr` plus `byte` a
    /// multiple of 16; `T` and `combine` must be a result of [`super::combine`]. Nothing may write
    /// the bytes meanwhile: every rank's ready signal has been acquired, and
    /// [`fence()`](super::fence) called since.
    #[inline(always)]
    pub unsafe fn load_reduce<T: Element<Acc: Number>>(
        self,
        byte: usize,
        combine: Combine,
    ) -> [u64; 2] {
        let at = self.address + byte as u64;
        match (T::DTYPE, combine) {
            (DType::F32, Combine::Add) => load!(at, "add.v4.f32"),
            (DType::F16, Combine::Add) => load!(at, "add.acc::f32.v4.f16x2"),
            (DType::F16, Combine::Min) => load!(at, "min.v4.f16x2"),
            (DType::F16, Combine::Max) => load!(at, "max.v4.f16x2"),
            (DType::Bf16, Combine::Add) => load!(at, "add.acc::f32.v4.bf16x2"),
            (DType::Bf16, Combine::Min) => load!(at, "min.v4.bf16x2"),
            (DType::Bf16, Combine::Max) => load!(at, "max.v4.bf16x2"),
            // SAFETY: `super::combine` returns no other pair, and the pair is its result by the
            // precondition.
            _ => unsafe { unreachable_unchecked() },
        }
    }

    /// Stores 16 bytes at byte `byte` of every rank. Relaxed, system scope.
    ///
    /// # Safety
    /// As [`Multicast::load_reduce`]; nothing else may access the bytes until a done signal of this
    /// rank that follows a [`fence()`](super::fence).
    #[inline(always)]
    pub unsafe fn store(self, byte: usize, value: [u64; 2]) {
        // SAFETY: the precondition makes the store valid. The type of the instruction does not
        // matter, because it stores bits.
        unsafe {
            asm!(
                "{{ .reg .b64 global; cvta.to.global.u64 global, {at}; \
                 multimem.st.relaxed.sys.global.v4.f32 [global], {{{a}, {b}, {c}, {d}}}; }}",
                at = in(reg64) self.address + byte as u64,
                a = in(reg32) value[0] as u32,
                b = in(reg32) (value[0] >> 32) as u32,
                c = in(reg32) value[1] as u32,
                d = in(reg32) (value[1] >> 32) as u32,
                options(nostack)
            );
        }
    }
}
