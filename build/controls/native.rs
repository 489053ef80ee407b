//! Negative controls of the verifier for native code. Each entry, except those of `clean_reduce`,
//! breaks one rule, and that rule must report the entry.
#![allow(non_snake_case, clippy::missing_safety_doc)]

use std::hint::black_box;

#[inline(always)]
fn sum(to: &mut [f32], from: &[f32]) {
    for (a, b) in to.iter_mut().zip(from) {
        *a += *b;
    }
}

#[unsafe(no_mangle)]
#[target_feature(enable = "avx2")]
pub unsafe fn clean_reduce__avx2(to: &mut [f32], from: &[f32]) {
    sum(to, from);
}

#[unsafe(no_mangle)]
#[target_feature(enable = "avx512f")]
pub unsafe fn clean_reduce__avx512(to: &mut [f32], from: &[f32]) {
    sum(to, from);
}

/// Lacks the target feature that the variant `avx512` in its name requires.
#[unsafe(no_mangle)]
pub unsafe fn narrow_reduce__avx512(to: &mut [f32], from: &[f32]) {
    sum(to, from);
}

#[inline(never)]
fn helper(to: &mut [f32], from: &[f32]) {
    sum(to, from);
}

/// Calls a helper that is not inlined, so the helper is compiled without the target features.
#[unsafe(no_mangle)]
#[target_feature(enable = "avx2")]
pub unsafe fn fallback_reduce__avx2(to: &mut [f32], from: &[f32]) {
    sum(to, from);
    helper(to, from);
}

#[inline(never)]
fn peek(value: f32) -> f32 {
    black_box(value)
}

/// Calls a function in its hot loop.
#[unsafe(no_mangle)]
#[target_feature(enable = "avx2")]
pub unsafe fn calling_reduce__avx2(to: &mut [f32], from: &[f32]) {
    for (a, b) in to.chunks_exact_mut(8).zip(from.chunks_exact(8)) {
        for i in 0..8 {
            a[i] += b[i];
        }
        peek(a[0]);
    }
}

/// Computes an FMA, which rounds once instead of twice.
#[unsafe(no_mangle)]
#[target_feature(enable = "avx2,fma")]
pub unsafe fn fused_reduce__avx2(to: &mut [f32], from: &[f32]) {
    for (a, b) in to.iter_mut().zip(from) {
        *a = b.mul_add(0.5, *a);
    }
}

fn main() {
    let entries: [unsafe fn(&mut [f32], &[f32]); 6] = [
        clean_reduce__avx2,
        clean_reduce__avx512,
        narrow_reduce__avx512,
        fallback_reduce__avx2,
        calling_reduce__avx2,
        fused_reduce__avx2,
    ];
    black_box(entries);
}
