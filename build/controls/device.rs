//! Negative controls of the verifier: each kernel breaks one rule on purpose and must be caught by it.
//! Only `control_clean` is right.
//!
//! `fusewire-build check` writes this file into a crate of its own and compiles it on the spot.
#![no_std]
#![feature(abi_gpu_kernel, abi_unadjusted, core_intrinsics, link_llvm_intrinsics)]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch))]
#![allow(internal_features, improper_gpu_kernel_arg, clippy::missing_safety_doc)]

use core::sync::atomic::{AtomicU32, Ordering};

unsafe extern "unadjusted" {
    safe fn control_lane() -> u32;
    safe fn control_barrier();
    safe fn control_shared() -> *mut u32;
    safe fn control_reciprocal(value: f32) -> f32;
    fn control_narrow_load(at: *mut u32) -> u32;
    safe fn fusewire_panic() -> !;
}

/// Lanes a block, for strides.
const LANES: usize = 256;

/// Copies by 16 bytes, synchronises in uniform code, multiplies and adds separately.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_clean(
    to: *mut u128,
    from: *const u128,
    n: u32,
    x: *mut f32,
) {
    let mut i = control_lane() as usize;
    while i < n as usize {
        // SAFETY: compiled and read by the verifier, never run.
        unsafe { *to.add(i) = *from.add(i) };
        i += LANES;
    }
    control_barrier();
    // SAFETY: compiled and read by the verifier, never run.
    unsafe { *x = *x * *x + *x };
}

/// Core's atomic: on NVIDIA it loses ordering and scope before LLVM 23.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_unscoped(word: *mut u32) {
    // SAFETY: compiled and read by the verifier, never run.
    unsafe { AtomicU32::from_ptr(word) }.fetch_add(1, Ordering::AcqRel);
}

/// A synchronising load that does not reach a peer.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_narrow_scope(word: *mut u32, out: *mut u32) {
    // SAFETY: compiled and read by the verifier, never run.
    unsafe { *out = control_narrow_load(word) };
}

/// A copy by 4 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_scalar_copy(to: *mut u32, from: *const u32, n: u32) {
    let mut i = control_lane() as usize;
    while i < n as usize {
        // SAFETY: compiled and read by the verifier, never run.
        unsafe { *to.add(i) = *from.add(i) };
        i += LANES;
    }
}

/// An array indexed at run time.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_local_array(x: *mut u32, at: *const u32, n: u32) {
    let mut table = [0u32; 48];
    let mut i = 0;
    while i < n as usize {
        // SAFETY: compiled and read by the verifier, never run.
        unsafe { *table.as_mut_ptr().add(*at.add(i) as usize % 48) += i as u32 };
        i += 1;
    }
    // SAFETY: compiled and read by the verifier, never run.
    unsafe { *x = *table.as_ptr().add(*at as usize % 48) };
}

/// A bounds check.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_panic(x: *mut u32, count: u64, index: u64) {
    // SAFETY: compiled and read by the verifier, never run.
    let slice = unsafe { core::slice::from_raw_parts_mut(x, count as usize) };
    slice[index as usize] = 3;
}

/// A barrier that one lane reaches.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_divergent_barrier(x: *mut u32) {
    if control_lane() == 0 {
        control_barrier();
        // SAFETY: compiled and read by the verifier, never run.
        unsafe { *x += 1 };
    }
}

/// A barrier in a loop that each lane leaves when it likes.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_divergent_loop(x: *mut u32) {
    let mut left = control_lane();
    while left > 0 {
        control_barrier();
        left -= 1;
    }
    // SAFETY: compiled and read by the verifier, never run.
    unsafe { *x = left };
}

/// Right in the source; jump threading in MIR clones the barrier into both ways.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_threaded(x: *mut u32) {
    let leader = control_lane() == 0;
    let shared = control_shared();
    if leader {
        // SAFETY: compiled and read by the verifier, never run.
        unsafe { shared.write_volatile(*x) };
    }
    control_barrier();
    if leader {
        // SAFETY: compiled and read by the verifier, never run.
        unsafe { *x = shared.read_volatile() + 1 };
    }
}

/// A product and a sum that may be contracted.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_fast_math(x: *mut f32) {
    // SAFETY: compiled and read by the verifier, never run.
    unsafe {
        let value = *x;
        *x = core::intrinsics::fadd_fast(core::intrinsics::fmul_fast(value, *x.add(1)), value);
    }
}

/// A fused multiplication and addition.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_fused(x: *mut f32) {
    // SAFETY: compiled and read by the verifier, never run.
    unsafe { *x = core::intrinsics::fmaf32(*x, *x.add(1), *x.add(2)) };
}

/// The hardware's reciprocal.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_approximation(x: *mut f32) {
    // SAFETY: compiled and read by the verifier, never run.
    unsafe { *x = control_reciprocal(*x) };
}

/// A reference to what another may write.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_reference(flag: &u32, out: *mut u32) {
    // SAFETY: compiled and read by the verifier, never run.
    unsafe { *out = *flag };
}

/// 16 bytes at once between alias fences.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_multicast_clean(from: u64, to: u64) {
    // SAFETY: compiled and read by the verifier, never run.
    unsafe {
        core::arch::asm!(
            "fence.proxy.alias;",
            "{{ .reg .b32 a, b, c, d;",
            "multimem.ld_reduce.relaxed.sys.global.add.acc::f32.v4.bf16x2 {{a, b, c, d}}, \
                [{from}];",
            "multimem.st.relaxed.sys.global.v4.f32 [{to}], {{a, b, c, d}}; }}",
            "fence.proxy.alias;",
            from = in(reg64) from,
            to = in(reg64) to,
        );
    }
}

/// 4 bytes at once.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_multicast_scalar(from: u64, to: u64) {
    // SAFETY: compiled and read by the verifier, never run.
    unsafe {
        core::arch::asm!(
            "fence.proxy.alias;",
            "{{ .reg .f32 a;",
            "multimem.ld_reduce.relaxed.sys.global.add.f32 a, [{from}];",
            "multimem.st.relaxed.sys.global.f32 [{to}], a; }}",
            "fence.proxy.alias;",
            from = in(reg64) from,
            to = in(reg64) to,
        );
    }
}

/// Nothing orders it with accesses by the ordinary address.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_multicast_unfenced(to: u64) {
    // SAFETY: compiled and read by the verifier, never run.
    unsafe {
        core::arch::asm!(
            "{{ .reg .b32 a; mov.b32 a, 0;",
            "multimem.st.relaxed.sys.global.v4.f32 [{to}], {{a, a, a, a}}; }}",
            to = in(reg64) to,
        );
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    fusewire_panic()
}
