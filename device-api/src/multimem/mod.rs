//! Multicast: one address for the same bytes of every rank's part of a window (NVLink SHARP).
//!
//! A load through it gives the reduction of all ranks' bytes, computed by the switch; a store
//! through it reaches all ranks. [`Multicast`] is such an address, for any machine:
//!
//! | machine | implementation |
//! |---|---|
//! | NVIDIA from sm_90 on | `multimem.ld_reduce` and `multimem.st`, 16 bytes at once, where the host has bound the window to a multicast object |
//! | CPU | an emulation through the table of the peers' addresses: ranks in order, small floats in f32 |
//! | others | none: [`Multicast::of`] gives `None`, and a kernel takes its ordinary way |
//!
//! # Order
//! Both instructions are relaxed with system scope: they neither publish nor acquire. What orders
//! them are the signals of a round ([`crate::session`]), with one addition. A multicast address is
//! a second *virtual* address of memory that other accesses reach by its ordinary address, and PTX
//! orders accesses of one location by different addresses only if a proxy fence of kind *alias*
//! lies on the path of causality between them. So a kernel calls [`fence()`] after the ready
//! signals and before its first access by multicast, and again after its last one and before the
//! done signals:
//!
//! ```text
//! a peer's plain store -> its ready -> this rank's acquire -> fence -> ld_reduce
//! st -> fence -> this rank's done -> the peer's acquire -> its plain load
//! ```
//!
//! Each lane can call it before and after its own accesses. The library's kernels execute fewer
//! fences: only the lanes that acquire and release the signals call it, because the path of every
//! lane leads through them and a barrier of the block.
//!
//! # Bits
//! The switch chooses the order of its additions, and returns a sum of f16 or bf16 rounded to that
//! type. The treatment of NaN by `min` and `max` is not specified either. See the host's
//! `Determinism`.

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
mod emulated;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
mod nvptx;
#[cfg(any(
    target_arch = "amdgpu",
    all(target_arch = "nvptx64", not(target_feature = "sm_90"))
))]
mod unsupported;

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub use self::emulated::Multicast;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
pub use self::nvptx::Multicast;
#[cfg(any(
    target_arch = "amdgpu",
    all(target_arch = "nvptx64", not(target_feature = "sm_90"))
))]
pub use self::unsupported::Multicast;

use crate::arch;
use crate::element::{DType, Element, ReductionCode};
use crate::group::Machine;
use crate::session::Session;
use crate::window::Window;

/// Bytes of one access.
pub const BYTES: usize = 16;

/// Orders accesses by multicast addresses with those by the ordinary addresses of the same bytes,
/// if this lane is on the path of causality between them: see [the module](self). Does nothing on
/// machines where all accesses are by ordinary addresses.
#[inline(always)]
pub fn fence() {
    arch::alias_fence();
}

/// Combination of the ranks' elements by a load through a multicast address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Combine {
    /// Sum; of f16 and bf16 accumulated in f32 and rounded once.
    Add,
    /// Minimum; f16 and bf16 only.
    Min,
    /// Maximum; f16 and bf16 only.
    Max,
}

/// Returns the combination for elements of `dtype` and the reduction with code `reduction`, or
/// `None` where the instruction does not exist (minimum and maximum of f32 among them). An average
/// is a sum that the kernel divides.
#[inline(always)]
pub const fn combine(dtype: DType, reduction: u8) -> Option<Combine> {
    const SUM: u8 = ReductionCode::Sum as u8;
    const AVERAGE: u8 = ReductionCode::Average as u8;
    const MIN: u8 = ReductionCode::Min as u8;
    const MAX: u8 = ReductionCode::Max as u8;
    match (dtype, reduction) {
        (DType::F32 | DType::F16 | DType::Bf16, SUM | AVERAGE) => Some(Combine::Add),
        (DType::F16 | DType::Bf16, MIN) => Some(Combine::Min),
        (DType::F16 | DType::Bf16, MAX) => Some(Combine::Max),
        _ => None,
    }
}

impl<T: Element> Window<'_, T> {
    /// Returns the multicast address of elements `first .. first + len` of every rank's part, or
    /// `None` if the window has none. A range that is not within the part is recorded as an error.
    /// Any lane by itself.
    ///
    /// [`crate::multimem`] says which signals and fences order accesses by multicast.
    #[inline(always)]
    pub fn multicast<M: Machine>(
        &self,
        s: &Session<M>,
        first: usize,
        len: usize,
    ) -> Option<Multicast> {
        let addr = self.addr(s, first, len)?;
        Multicast::of(s.comm(), addr, len as u64 * size_of::<T>() as u64)
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[test]
    fn what_the_instruction_set_has() {
        for dtype in DType::ALL {
            for reduction in ReductionCode::ALL {
                let small = matches!(dtype, DType::F16 | DType::Bf16);
                let expected = match reduction {
                    ReductionCode::Sum | ReductionCode::Average if small || dtype == DType::F32 => {
                        Some(Combine::Add)
                    }
                    ReductionCode::Min if small => Some(Combine::Min),
                    ReductionCode::Max if small => Some(Combine::Max),
                    _ => None,
                };
                assert_eq!(combine(dtype, reduction as u8), expected);
            }
        }
    }
}
