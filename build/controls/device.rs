//! Negative controls of the verifier. Each kernel breaks one rule, and that rule must report the
//! kernel. Exceptions: the `clean` kernels break no rule, and `control_threaded` breaks a rule only
//! if it is compiled with jump threading.
//!
//! `fusewire-build check` writes this file into a separate crate and compiles it.
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

/// Lanes per block. Loops over elements advance by this stride.
const LANES: usize = 256;

/// Breaks no rule: copies 16 bytes per access, enters barriers only in uniform code, and rounds the
/// product before the addition.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_clean(
    to: *mut u128,
    from: *const u128,
    n: u32,
    x: *mut f32,
) {
    let mut i = control_lane() as usize;
    while i < n as usize {
        // SAFETY: the kernel is never run; the verifier only reads its compiled code.
        unsafe { *to.add(i) = *from.add(i) };
        i += LANES;
    }
    control_barrier();
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe { *x = *x * *x + *x };
}

/// Uses an atomic of `core`. For NVIDIA, LLVM before 23 drops the atomic's ordering and scope.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_unscoped(word: *mut u32) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe { AtomicU32::from_ptr(word) }.fetch_add(1, Ordering::AcqRel);
}

/// Synchronises with a device-scope load, which does not synchronise with peer GPUs.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_narrow_scope(word: *mut u32, out: *mut u32) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe { *out = control_narrow_load(word) };
}

/// Copies 4 bytes per access.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_scalar_copy(to: *mut u32, from: *const u32, n: u32) {
    let mut i = control_lane() as usize;
    while i < n as usize {
        // SAFETY: the kernel is never run; the verifier only reads its compiled code.
        unsafe { *to.add(i) = *from.add(i) };
        i += LANES;
    }
}

/// Indexes a local array with a run-time index, so the array is placed in local memory.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_local_array(x: *mut u32, at: *const u32, n: u32) {
    let mut table = [0u32; 48];
    let mut i = 0;
    while i < n as usize {
        // SAFETY: the kernel is never run; the verifier only reads its compiled code.
        unsafe { *table.as_mut_ptr().add(*at.add(i) as usize % 48) += i as u32 };
        i += 1;
    }
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe { *x = *table.as_ptr().add(*at as usize % 48) };
}

/// Indexes a slice, so the compiler emits a bounds check that can panic.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_panic(x: *mut u32, count: u64, index: u64) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    let slice = unsafe { core::slice::from_raw_parts_mut(x, count as usize) };
    slice[index as usize] = 3;
}

/// Enters a barrier in a branch that only one lane takes.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_divergent_barrier(x: *mut u32) {
    if control_lane() == 0 {
        control_barrier();
        // SAFETY: the kernel is never run; the verifier only reads its compiled code.
        unsafe { *x += 1 };
    }
}

/// Enters a barrier in a loop whose trip count differs between lanes.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_divergent_loop(x: *mut u32) {
    let mut left = control_lane();
    while left > 0 {
        control_barrier();
        left -= 1;
    }
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe { *x = left };
}

/// Returns early on some lanes, while the others enter a barrier.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_early_return(x: *mut u32, last: u32) {
    if control_lane() > last {
        return;
    }
    control_barrier();
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe { *x = last };
}

/// Breaks no rule in the source. Jump threading in MIR clones the barrier into both sides of a
/// divergent branch.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_threaded(x: *mut u32) {
    let leader = control_lane() == 0;
    let shared = control_shared();
    if leader {
        // SAFETY: the kernel is never run; the verifier only reads its compiled code.
        unsafe { shared.write_volatile(*x) };
    }
    control_barrier();
    if leader {
        // SAFETY: the kernel is never run; the verifier only reads its compiled code.
        unsafe { *x = shared.read_volatile() + 1 };
    }
}

/// Multiplies and adds with fast-math flags, which permit contraction into an FMA.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_fast_math(x: *mut f32) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe {
        let value = *x;
        *x = core::intrinsics::fadd_fast(core::intrinsics::fmul_fast(value, *x.add(1)), value);
    }
}

/// Computes an explicit FMA, which rounds once instead of twice.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_fused(x: *mut f32) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe { *x = core::intrinsics::fmaf32(*x, *x.add(1), *x.add(2)) };
}

/// Uses the hardware's approximate reciprocal.
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_approximation(x: *mut f32) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe { *x = control_reciprocal(*x) };
}

/// Reads memory that peers may write. The read goes through a `&u32` parameter, so it compiles to a
/// non-coherent load.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_reference(flag: &u32, out: *mut u32) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe { *out = *flag };
}

/// Breaks no rule: each `multimem` instruction accesses 16 bytes, and alias fences surround them.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_multicast_clean(from: u64, to: u64) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
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

/// Accesses only 4 bytes per `multimem` instruction.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_multicast_scalar(from: u64, to: u64) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
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

/// Lacks the alias fences that order a `multimem` access with accesses through the unicast address.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90"))]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_multicast_unfenced(to: u64) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
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

/// Enters a barrier, and is not inlined, so that lanes of one warp may call it at different places.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn control_called_barrier(value: u32) -> u32 {
    control_barrier();
    value + control_lane()
}

/// Indexes a local array with a run-time index, and is not inlined.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn control_called_array(at: *const u32, n: u32) -> u32 {
    let mut table = [0u32; 48];
    for i in 0..n as usize {
        // SAFETY: the kernel is never run; the verifier only reads its compiled code.
        unsafe { *table.as_mut_ptr().add(*at.add(i) as usize % 48) += i as u32 };
    }
    // SAFETY: as above.
    unsafe { *table.as_ptr().add(n as usize % 48) }
}

/// Calls functions that are not inlined and break a rule.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_calls(x: *mut u32, at: *const u32, n: u32) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe { *x = control_called_barrier(n) + control_called_array(at, n) };
}

/// Has more instructions than its budget.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_size(x: *mut u32, n: u32) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe { *x = (*x ^ n).wrapping_mul(0x9e37_79b9) ^ (*x).rotate_left(n) };
}

/// Has a longer chain of dependent loads than its budget.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_chain(x: *const *const *const u32, out: *mut u32) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe { *out = ***x };
}

/// Has more alias fences than its budget.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn control_fences() {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe {
        core::arch::asm!("fence.proxy.alias;", "fence.proxy.alias;", "fence.proxy.alias;");
    }
}

/// Has no budget.
#[cfg(target_arch = "nvptx64")]
#[unsafe(no_mangle)]
pub unsafe extern "gpu-kernel" fn unlimited_control(x: *mut u32) {
    // SAFETY: the kernel is never run; the verifier only reads its compiled code.
    unsafe { *x += 1 };
}
