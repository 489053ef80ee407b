//! NVIDIA.

/// Lanes that run in lock step.
pub const WARP: u32 = 32;

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
