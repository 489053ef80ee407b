//! Vector loops of the bare program and of the memory bandwidth measurement.

/// Maximum number of ranks.
pub(crate) const MAX: usize = 16;

/// Sums `sources` element by element, in order, into every target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sum<'a> {
    pub(crate) sources: &'a [*const f32],
    pub(crate) targets: &'a [*mut f32],
    pub(crate) count: usize,
    /// Selects non-temporal stores.
    pub(crate) streaming: bool,
}

impl Sum<'_> {
    /// Computes the sums.
    ///
    /// # Safety
    /// There must be 1 to [`MAX`] sources. Sources must be readable and targets writable for
    /// `count` elements, and their addresses must be multiples of 64.
    #[inline]
    pub(crate) unsafe fn run(self) {
        debug_assert!(!self.sources.is_empty() && self.sources.len() <= MAX);
        // SAFETY: each function is called only if its instruction set was detected. The caller
        // guarantees the pointers and their alignment.
        unsafe {
            let mut done = 0;
            #[cfg(target_arch = "x86_64")]
            if std::arch::is_x86_feature_detected!("avx512f") {
                done = self.count / 64 * 64;
                match (self.sources.len(), self.streaming) {
                    (2, false) => x86::wide::<2, false>(self, done),
                    (2, true) => x86::wide::<2, true>(self, done),
                    (4, false) => x86::wide::<4, false>(self, done),
                    (4, true) => x86::wide::<4, true>(self, done),
                    (_, false) => x86::wide::<0, false>(self, done),
                    (_, true) => x86::wide::<0, true>(self, done),
                }
            } else if std::arch::is_x86_feature_detected!("avx") {
                done = self.count / 32 * 32;
                match self.streaming {
                    false => x86::narrow::<false>(self, done),
                    true => x86::narrow::<true>(self, done),
                }
            }
            for i in done..self.count {
                let mut sum = self.sources[0].add(i).read();
                for source in &self.sources[1..] {
                    sum += source.add(i).read();
                }
                for target in self.targets {
                    target.add(i).write(sum);
                }
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use core::arch::x86_64::*;

    use super::Sum;

    /// Sums the first `count` elements, where `count` is a multiple of 64. `P` is the number of
    /// sources, or 0 if that number is not known at compile time.
    ///
    /// # Safety
    /// The requirements of [`Sum::run`], and `count <= sum.count`.
    #[target_feature(enable = "avx512f")]
    pub(super) unsafe fn wide<const P: usize, const STREAMING: bool>(sum: Sum<'_>, count: usize) {
        let sources = if P == 0 {
            sum.sources
        } else {
            &sum.sources[..P]
        };
        let targets = if P == 0 || sum.targets.len() != P {
            sum.targets
        } else {
            &sum.targets[..P]
        };
        for i in (0..count).step_by(64) {
            // SAFETY: `i` and `count` are multiples of the step, so all vectors starting at `i` are
            // within `count <= sum.count` elements. The caller guarantees that the addresses are
            // multiples of 64, so the accesses are aligned.
            unsafe {
                let mut acc = [0, 16, 32, 48].map(|part| _mm512_load_ps(sources[0].add(i + part)));
                for source in &sources[1..] {
                    for part in 0..4 {
                        let next = _mm512_load_ps(source.add(i + part * 16));
                        acc[part] = _mm512_add_ps(acc[part], next);
                    }
                }
                for target in targets {
                    for part in 0..4 {
                        let to = target.add(i + part * 16);
                        if STREAMING {
                            _mm512_stream_ps(to, acc[part]);
                        } else {
                            _mm512_store_ps(to, acc[part]);
                        }
                    }
                }
            }
        }
        if STREAMING {
            _mm_sfence();
        }
    }

    /// Sums the first `count` elements, where `count` is a multiple of 32.
    ///
    /// # Safety
    /// The requirements of [`Sum::run`], and `count <= sum.count`.
    #[target_feature(enable = "avx")]
    pub(super) unsafe fn narrow<const STREAMING: bool>(sum: Sum<'_>, count: usize) {
        for i in (0..count).step_by(32) {
            // SAFETY: `i` and `count` are multiples of the step, so all vectors starting at `i` are
            // within `count <= sum.count` elements. The caller guarantees that the addresses are
            // multiples of 64, so the accesses are aligned.
            unsafe {
                let first = sum.sources[0];
                let mut acc = [0, 8, 16, 24].map(|part| _mm256_load_ps(first.add(i + part)));
                for source in &sum.sources[1..] {
                    for part in 0..4 {
                        let next = _mm256_load_ps(source.add(i + part * 8));
                        acc[part] = _mm256_add_ps(acc[part], next);
                    }
                }
                for target in sum.targets {
                    for part in 0..4 {
                        let to = target.add(i + part * 8);
                        if STREAMING {
                            _mm256_stream_ps(to, acc[part]);
                        } else {
                            _mm256_store_ps(to, acc[part]);
                        }
                    }
                }
            }
        }
        if STREAMING {
            _mm_sfence();
        }
    }
}

/// Adds `from` to `to`, with the widest vectors that the CPU supports.
pub(crate) fn add(from: &[f32], to: &mut [f32]) {
    #[inline(always)]
    fn body(from: &[f32], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to += from;
        }
    }
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn wide(from: &[f32], to: &mut [f32]) {
        body(from, to);
    }
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: AVX-512F was detected above.
        unsafe { wide(from, to) };
        return;
    }
    body(from, to);
}
