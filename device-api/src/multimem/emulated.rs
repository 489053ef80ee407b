//! The CPU: every rank's part is mapped, so a load visits all of them, in rank order.

use super::Combine;
use crate::bulk::{pack, unpack};
use crate::comm::{Comm, WindowAddr};
use crate::element::{Element, Number, Ordered};
use crate::mem::{self, Policy};

/// The same bytes of every rank's part of a window. See [`crate::multimem`].
#[derive(Clone, Copy, Debug)]
pub struct Multicast {
    /// Addresses of the parts of all ranks.
    parts: *const u64,
    offset: usize,
    ranks: u32,
}

impl Multicast {
    /// Returns the multicast address of the `bytes` bytes of every rank at `addr`, or `None` if the
    /// window does not exist, the range leaves it, or a rank's part is not mapped.
    #[inline(always)]
    pub fn of(comm: &Comm, addr: WindowAddr, bytes: u64) -> Option<Self> {
        let mut rank = 0;
        while rank < comm.size() {
            comm.resolve(addr, rank, bytes)?;
            rank += 1;
        }
        Some(Self {
            parts: comm.window(addr.window()).1,
            offset: addr.offset() as usize,
            ranks: comm.size(),
        })
    }

    /// Returns the address for `multimem` instructions, or `None` if this machine has no such
    /// instructions. For code that issues them by itself.
    #[inline(always)]
    pub const fn address(self) -> Option<u64> {
        None
    }

    #[inline(always)]
    fn part(self, rank: u32, byte: usize) -> *mut u8 {
        // SAFETY: `of` has resolved the window on every rank by load and store, so all ranks are in
        // the team, and the table has an entry for each.
        let base = unsafe { self.parts.wrapping_add(rank as usize).read() };
        (base as *mut u8).wrapping_add(self.offset + byte)
    }

    /// Returns the reduction of all ranks' 16 bytes at byte `byte`: elements of type `T`.
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
        let mut acc = [T::Acc::ZERO; 16];
        let mut rank = 0;
        while rank < self.ranks {
            // SAFETY: within the rank's part, and not written meanwhile, by the precondition.
            let pair = unsafe { mem::read_16(self.part(rank, byte), Policy::Cached) };
            for i in 0..16 / size_of::<T>() {
                let next = unpack::<T>(pair, i).widen();
                acc[i] = match combine {
                    _ if rank == 0 => next,
                    Combine::Add => acc[i].add(next),
                    Combine::Min => acc[i].min(next),
                    Combine::Max => acc[i].max(next),
                };
            }
            rank += 1;
        }
        let mut out = [0; 2];
        for i in 0..16 / size_of::<T>() {
            pack(&mut out, i, T::narrow(acc[i]));
        }
        out
    }

    /// Stores 16 bytes at byte `byte` of every rank.
    ///
    /// # Safety
    /// As [`Multicast::load_reduce`]; nothing else may access the bytes until a done signal of this
    /// rank that follows a [`fence()`](super::fence).
    #[inline(always)]
    pub unsafe fn store(self, byte: usize, value: [u64; 2]) {
        let mut rank = 0;
        while rank < self.ranks {
            // SAFETY: within the rank's part, and not accessed meanwhile, by the precondition.
            unsafe { mem::write_16(self.part(rank, byte), value, Policy::Cached) };
            rank += 1;
        }
    }
}
