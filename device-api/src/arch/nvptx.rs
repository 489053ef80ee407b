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

/// Returns the value of a binary16, which is exact. The PTX ISA does not say which NaN results from
/// a NaN.
#[inline(always)]
pub(crate) fn half_to_f32(half: u16) -> f32 {
    let value: f32;
    // SAFETY: arithmetic on registers.
    unsafe {
        core::arch::asm!(
            "cvt.f32.f16 {value}, {half};",
            value = out(reg32) value,
            half = in(reg16) half,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    value
}

/// Rounds to binary16, ties to even. Values beyond the range become infinities. The PTX ISA does
/// not say which NaN results from a NaN. GPUs return 0x7fff: on an H100, all 2^32 values have the
/// bits of the function in `element/float.rs`.
#[inline(always)]
pub(crate) fn half_from_f32(value: f32) -> u16 {
    let half: u16;
    // SAFETY: arithmetic on registers.
    unsafe {
        core::arch::asm!(
            "cvt.rn.f16.f32 {half}, {value};",
            half = out(reg16) half,
            value = in(reg32) value,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    half
}

/// Rounds to bfloat16, ties to even. A NaN becomes 0x7fff, as for binary16, and all 2^32 values
/// have been compared in the same way.
#[inline(always)]
pub(crate) fn bf16_from_f32(value: f32) -> u16 {
    let bits: u16;
    // SAFETY: arithmetic on registers.
    unsafe {
        core::arch::asm!(
            "cvt.rn.bf16.f32 {bits}, {value};",
            bits = out(reg16) bits,
            value = in(reg32) value,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    bits
}

/// Rounds to fp8 E4M3, ties to even. The PTX ISA says of `cvt.rn.satfinite` to `.e4m3x2` that a NaN
/// becomes 0x7f, and that a magnitude beyond the largest finite value, which includes infinities,
/// becomes that value with the sign of the input. These are the results of the function in
/// `element/float.rs`. The instruction for E5M2 saturates infinities, which the library does not.
#[cfg(target_feature = "sm_90")]
#[inline(always)]
pub(crate) fn e4m3_from_f32(value: f32) -> u8 {
    let pair: u16;
    // SAFETY: arithmetic on registers.
    unsafe {
        core::arch::asm!(
            "cvt.rn.satfinite.e4m3x2.f32 {pair}, {zero}, {value};",
            pair = out(reg16) pair,
            zero = in(reg32) 0.0_f32,
            value = in(reg32) value,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    pair as u8
}

/// See [`super::await_dependency`].
#[cfg(target_feature = "sm_90")]
#[inline(always)]
pub(super) fn await_dependency() {
    // SAFETY: no operand; does nothing where the launch is not a dependent one. Memory is
    // clobbered: no access moves before it.
    unsafe { core::arch::asm!("griddepcontrol.wait;", options(nostack)) };
}

/// Returns `value`, and hides from the compiler where it comes from: what is computed from it stays
/// after this call. Without this, a test of a loaded value may move to the load, and wait for it.
#[inline(always)]
pub(crate) fn used_here(value: u64) -> u64 {
    let same: u64;
    // SAFETY: a copy of a register.
    unsafe {
        core::arch::asm!(
            "mov.u64 {same}, {value};",
            same = out(reg64) same,
            value = in(reg64) value,
            options(nomem, nostack, preserves_flags)
        );
    }
    same
}

/// See [`super::alias_fence`].
#[cfg(target_feature = "sm_90")]
#[inline(always)]
pub(super) fn alias_fence() {
    // SAFETY: a fence has no precondition.
    unsafe { core::arch::asm!("fence.proxy.alias;", options(nostack)) };
}

/// See [`super::allow_dependents`].
#[cfg(target_feature = "sm_90")]
#[inline(always)]
pub(super) fn allow_dependents() {
    // SAFETY: no operand; does nothing where nothing depends on this launch.
    unsafe { core::arch::asm!("griddepcontrol.launch_dependents;", options(nostack)) };
}
