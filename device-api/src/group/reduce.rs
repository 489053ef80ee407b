//! Reductions, scans and other exchanges of values between the lanes of a warp or a block.
//!
//! All lanes of the warp or block call these functions together. The order in which values are
//! combined depends only on the number of lanes and warps, so a sum of floats has the same bits in
//! every run. Warps and blocks of other sizes round differently: a CPU has one lane, NVIDIA 32
//! lanes in a warp, AMD 64. For a float result with the same bits on all of them, define the order
//! of the additions yourself, as the fused norms of the library do.
//!
//! Every lane gets the same bits if `combine` gives the same bits for both orders of its arguments.
//! Of floats, [`Ordered::max`](crate::element::Ordered::max) and `Ordered::min` do so except for
//! the bits of a NaN; `f32::max` does not for zeros of different signs.

use core::marker::PhantomData;

use super::{Block, Group, Machine, Warp};
use crate::arch::MAX_WARPS;
use crate::element::Number;
use crate::shared_cache;

mod sealed {
    pub trait Sealed {
        /// True if a value has 64 bits.
        const IS_WIDE: bool;
        fn to_word(self) -> u64;
        fn from_word(word: u64) -> Self;
    }
}

/// A number that lanes exchange: u32, i32, u64, i64, f32 or f64.
pub trait LaneValue: Number + sealed::Sealed {}

macro_rules! lane_values {
    ($($ty:ty, $wide:literal, $to:expr, $from:expr;)*) => {$(
        impl sealed::Sealed for $ty {
            const IS_WIDE: bool = $wide;
            #[inline(always)]
            fn to_word(self) -> u64 {
                $to(self)
            }
            #[inline(always)]
            fn from_word(word: u64) -> Self {
                $from(word)
            }
        }
        impl LaneValue for $ty {}
    )*};
}

lane_values! {
    u32, false, u64::from, |word| word as u32;
    i32, false, |value| value as u32 as u64, |word| word as u32 as i32;
    f32, false, |value| u64::from(f32::to_bits(value)), |word| f32::from_bits(word as u32);
    u64, true, |value| value, |word| word;
    i64, true, |value| value as u64, |word| word as i64;
    f64, true, f64::to_bits, f64::from_bits;
}

impl<M: Machine> Warp<M> {
    /// Returns the value of lane `from`, which is less than the size of the warp.
    #[inline(always)]
    #[track_caller]
    pub fn shuffle<T: LaneValue>(self, value: T, from: u32) -> T {
        let word = value.to_word();
        let mut out = u64::from(self.0.shuffle(word as u32, from));
        if T::IS_WIDE {
            out |= u64::from(self.0.shuffle((word >> 32) as u32, from)) << 32;
        }
        T::from_word(out)
    }

    /// Returns the value of the lane whose index differs by `mask` (exclusive or).
    #[inline(always)]
    #[track_caller]
    pub fn shuffle_xor<T: LaneValue>(self, value: T, mask: u32) -> T {
        let word = value.to_word();
        let mut out = u64::from(self.0.shuffle_xor(word as u32, mask));
        if T::IS_WIDE {
            out |= u64::from(self.0.shuffle_xor((word >> 32) as u32, mask)) << 32;
        }
        T::from_word(out)
    }

    /// Returns in every lane `combine` over the values of all lanes, such as
    /// `warp.reduce(x, u32::max)`. `combine` must be commutative, and associative except for the
    /// rounding of floats.
    #[inline(always)]
    #[track_caller]
    pub fn reduce<T: LaneValue>(self, value: T, combine: impl Fn(T, T) -> T) -> T {
        let mut acc = value;
        let mut mask = 1;
        while mask < self.size() {
            acc = combine(acc, self.shuffle_xor(acc, mask));
            mask *= 2;
        }
        acc
    }

    /// Returns in every lane the sum of the values of all lanes. Integers wrap.
    #[inline(always)]
    #[track_caller]
    pub fn sum<T: LaneValue>(self, value: T) -> T {
        self.reduce(value, T::add)
    }

    /// Returns `combine` over the values of the lanes up to this one, in their order (an inclusive
    /// scan). `combine` must be associative, except for the rounding of floats.
    #[inline(always)]
    #[track_caller]
    pub fn inclusive_scan<T: LaneValue>(self, value: T, combine: impl Fn(T, T) -> T) -> T {
        let lane = self.rank();
        let mut acc = value;
        let mut step = 1;
        while step < self.size() {
            let from = if lane >= step { lane - step } else { lane };
            let before = self.shuffle(acc, from);
            if lane >= step {
                acc = combine(before, acc);
            }
            step *= 2;
        }
        acc
    }

    /// Returns the sum of the values of the lanes before this one, and the sum of all. Integers
    /// wrap. Floats are added in another order than by [`Warp::sum`].
    #[inline(always)]
    #[track_caller]
    pub fn exclusive_sum<T: LaneValue>(self, value: T) -> (T, T) {
        let lane = self.rank();
        let through = self.inclusive_scan(value, T::add);
        let before = self.shuffle(through, lane.saturating_sub(1));
        let total = self.shuffle(through, self.size() - 1);
        (if lane == 0 { T::ZERO } else { before }, total)
    }

    /// Returns the lanes of the warp that have the same value as this one, bit i for lane i. Floats
    /// are compared by their bits. Takes one instruction on NVIDIA, and elsewhere a ballot for each
    /// bit of the type.
    #[inline(always)]
    #[track_caller]
    pub fn match_any<T: LaneValue>(self, value: T) -> u64 {
        let bits = if T::IS_WIDE { 64 } else { 32 };
        self.0.match_any(value.to_word(), bits)
    }

    /// Returns true in one of the lanes that pass true: the first. Returns false in all lanes if
    /// none does.
    #[inline(always)]
    #[track_caller]
    pub fn elect(self, is_candidate: bool) -> bool {
        let candidates = self.ballot(is_candidate);
        is_candidate && candidates.trailing_zeros() == self.rank()
    }
}

impl<M: Machine> Block<M> {
    /// Returns in every lane `combine` over the values of all lanes, such as
    /// `block.reduce(x, u32::max)`. `combine` must be commutative, and associative except for the
    /// rounding of floats. Two barriers.
    #[inline(always)]
    #[track_caller]
    pub fn reduce<T: LaneValue>(self, value: T, combine: impl Fn(T, T) -> T) -> T {
        if M::LANES == 1 {
            return value;
        }
        let of_warp = self.warp().reduce(value, &combine);
        self.fold_warps(of_warp, self.warp().is_leader(), |partials| {
            let mut all = partials.of(0);
            let mut warp = 1;
            while warp < self.warps() {
                all = combine(all, partials.of(warp));
                warp += 1;
            }
            all
        })
    }

    /// Returns in every lane the sum of the values of all lanes. Integers wrap. Two barriers.
    #[inline(always)]
    #[track_caller]
    pub fn sum<T: LaneValue>(self, value: T) -> T {
        self.reduce(value, T::add)
    }

    /// Returns `combine` over the values of the lanes up to this one, in their order (an inclusive
    /// scan). `combine` must be associative, except for the rounding of floats. Two barriers.
    #[inline(always)]
    #[track_caller]
    pub fn inclusive_scan<T: LaneValue>(self, value: T, combine: impl Fn(T, T) -> T) -> T {
        if M::LANES == 1 {
            return value;
        }
        let through = self.warp().inclusive_scan(value, &combine);
        self.fold_warps(through, self.is_last_of_warp(), |partials| {
            let index = self.warp_index();
            if index == 0 {
                return through;
            }
            let mut before = partials.of(0);
            let mut warp = 1;
            while warp < index {
                before = combine(before, partials.of(warp));
                warp += 1;
            }
            combine(before, through)
        })
    }

    /// Returns the sum of the values of the lanes before this one, and the sum of all. Integers
    /// wrap. Floats are added in another order than by [`Block::sum`]. Two barriers.
    #[inline(always)]
    #[track_caller]
    pub fn exclusive_sum<T: LaneValue>(self, value: T) -> (T, T) {
        if M::LANES == 1 {
            return (T::ZERO, value);
        }
        let (before, total) = self.warp().exclusive_sum(value);
        self.fold_warps(total, self.warp().is_leader(), |partials| {
            let (mut first, mut all) = (T::ZERO, T::ZERO);
            let mut warp = 0;
            while warp < self.warps() {
                let of_warp = partials.of(warp);
                first = if warp < self.warp_index() {
                    first.add(of_warp)
                } else {
                    first
                };
                all = all.add(of_warp);
                warp += 1;
            }
            (first.add(before), all)
        })
    }

    #[inline(always)]
    fn is_last_of_warp(self) -> bool {
        self.warp().rank() + 1 == self.warp().size()
    }

    /// Writes `value` of one lane of each warp, and returns what `fold` makes of these values,
    /// given by the index of their warp.
    #[inline(always)]
    #[track_caller]
    fn fold_warps<T: LaneValue, R>(
        self,
        value: T,
        is_writer: bool,
        fold: impl FnOnce(Partials<T>) -> R,
    ) -> R {
        let partials = Partials {
            words: shared_cache::partials(self.shared()),
            value: PhantomData,
        };
        if is_writer {
            // SAFETY: within the words that are reserved for this function; the warps write
            // different ones. Lanes read them after the next barrier, and have read them before
            // the one after it.
            unsafe { partials.at(self.warp_index()).write(value.to_word()) };
        }
        self.sync();
        let out = fold(partials);
        self.sync();
        out
    }
}

/// A value of each warp, in the memory that is shared by the block.
#[derive(Clone, Copy)]
struct Partials<T> {
    words: *mut u64,
    value: PhantomData<T>,
}

impl<T: LaneValue> Partials<T> {
    #[inline(always)]
    fn at(self, warp: u32) -> *mut u64 {
        self.words.wrapping_add(warp as usize % MAX_WARPS)
    }

    /// Returns the value of a warp. After the barrier.
    #[inline(always)]
    fn of(self, warp: u32) -> T {
        // SAFETY: written before the barrier, and not overwritten before the next one.
        T::from_word(unsafe { self.at(warp).read() })
    }
}
