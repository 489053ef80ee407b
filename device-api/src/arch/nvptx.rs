//! NVIDIA.

/// Lanes that run in lock step.
pub const WARP: u32 = 32;

// Defined in `shims/nvptx.ll` with these signatures. `safe`: they access no memory, and a lane that
// does not call them can only prevent progress.
unsafe extern "unadjusted" {
    safe fn fusewire_match_any_32(value: u32) -> u64;
    safe fn fusewire_match_any_64(value: u64) -> u64;
}

/// Returns the lanes of the warp whose lower `bits` bits of `value` equal this lane's, bit i for
/// lane i. `bits` is 32 or 64. All lanes of the warp call this together.
#[inline(always)]
pub(crate) fn match_any(value: u64, bits: u32) -> u64 {
    if bits == 32 {
        fusewire_match_any_32(value as u32)
    } else {
        fusewire_match_any_64(value)
    }
}

/// See [`super::await_dependency`].
#[cfg(target_feature = "sm_90")]
#[inline(always)]
pub(super) fn await_dependency() {
    // SAFETY: no operand; does nothing where the launch is not a dependent one. Memory is
    // clobbered: no access moves before it.
    unsafe { core::arch::asm!("griddepcontrol.wait;", options(nostack)) };
}

/// See [`super::allow_dependents`].
#[cfg(target_feature = "sm_90")]
#[inline(always)]
pub(super) fn allow_dependents() {
    // SAFETY: no operand; does nothing where nothing depends on this launch.
    unsafe { core::arch::asm!("griddepcontrol.launch_dependents;", options(nostack)) };
}
