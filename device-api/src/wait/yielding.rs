//! Chooses how often a wait polls on an oversubscribed CPU before it yields the core.
//!
//! If the awaited rank runs on another core, it answers within a microsecond, and polling is best.
//! If it needs this core, the wait must yield. The time that `sched_yield` takes distinguishes the
//! two cases:
//!
//! | time | cause | polls of the next waits |
//! |---|---|---|
//! | less than 0.5 us | no other thread wanted the core | all |
//! | 0.5 to 300 us | another thread ran briefly: probably a waiting rank | fewer each time |
//! | more than 300 us | another thread computed for its time slice | all |

use super::WaitContext;

#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu", loom, shuttle))]
impl WaitContext {
    /// Returns the number of polls before a wait yields the core.
    #[inline(always)]
    pub(super) fn spins(&self) -> u32 {
        self.comm.constants().spins
    }

    #[inline(always)]
    pub(super) fn nap(&self, round: u32) {
        crate::arch::nap(round);
    }
}

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu", loom, shuttle)))]
mod cpu {
    use super::WaitContext;
    use crate::arch;
    use crate::mem::{self, Order, Scope};

    /// Upper bound of the duration of a `sched_yield` that does not switch threads.
    const ALONE_NS: u64 = 500;
    /// More than the default 4,000 polls of another rank (about 90 us), less than a time slice.
    const BUSY_NS: u64 = 300_000;
    /// Number of bits by which each exchange of the core shifts the number of polls right.
    const STEP: u64 = 3;
    /// Greatest number of bits by which the number of polls is shifted right.
    const MOST: u64 = 12;

    /// Returns the number of exchanges after the system has given the core back in `elapsed`
    /// nanoseconds.
    const fn next(exchanges: u64, elapsed: u64) -> u64 {
        match elapsed {
            ALONE_NS..=BUSY_NS => exchanges.saturating_add(1),
            _ => 0,
        }
    }

    /// Returns the number of polls after `exchanges` exchanges, of at most `most`.
    const fn polls(most: u32, exchanges: u64) -> u32 {
        let bits = exchanges.saturating_mul(STEP);
        most >> if bits < MOST { bits } else { MOST }
    }

    impl WaitContext {
        /// Returns the number of polls before a wait yields the core.
        #[inline(always)]
        pub(in crate::wait) fn spins(&self) -> u32 {
            polls(self.comm.constants().spins, self.exchanges())
        }

        /// Yields the core, and counts the exchange if another thread has run for a short time.
        #[inline(always)]
        pub(in crate::wait) fn nap(&self, round: u32) {
            let before = arch::clock_ns();
            arch::nap(round);
            if round >= arch::YIELDS {
                // This nap was a sleep. Its duration does not depend on other threads.
                return;
            }
            let elapsed = arch::clock_ns().wrapping_sub(before);
            self.set_exchanges(next(self.exchanges(), elapsed));
        }

        /// Returns the number of successive yields after which another thread has run for a short
        /// time.
        #[inline(always)]
        fn exchanges(&self) -> u64 {
            let state = Self::block_state(&self.comm, self.block);
            // SAFETY: a word of this block's state, which its lanes access atomically.
            unsafe {
                let word = &raw const (*state).exchanges;
                mem::load_u64(word, Order::Relaxed, Scope::Device)
            }
        }

        #[inline(always)]
        fn set_exchanges(&self, value: u64) {
            let state = Self::block_state(&self.comm, self.block);
            // SAFETY: as above.
            unsafe {
                let word = &raw mut (*state).exchanges;
                mem::store_u64(word, value, Order::Relaxed, Scope::Device);
            }
        }
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_rank_polls_less_only_while_others_give_the_core_back() {
            assert_eq!(polls(4000, 0), 4000);
            let mut exchanges = 0;
            let mut last = 4000;
            for _ in 0..4 {
                exchanges = next(exchanges, 2_000);
                assert!(polls(4000, exchanges) < last);
                last = polls(4000, exchanges);
            }
            assert_eq!(last, 0);
            assert_eq!(polls(4000, u64::MAX), 0);
            assert_eq!(polls(4000, next(exchanges, 200)), 4000, "alone");
            assert_eq!(
                polls(4000, next(exchanges, 3_000_000)),
                4000,
                "a time slice"
            );
        }
    }
}
