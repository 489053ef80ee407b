//! A logit and its column in one word, ordered as sampling orders them; a row's maximum and sum in
//! another.

/// Orders by logit, then by the lower column: a greater key wins. NaN is less than all numbers, -0
/// less than +0. No key is [`NONE`], as there are fewer than 2^32 - 1 columns.
#[inline(always)]
pub(super) fn key(sortable: u32, column: u32) -> u64 {
    u64::from(sortable) << 32 | u64::from(!column)
}

/// Value less than every key.
pub(super) const NONE: u64 = 0;

/// The upper half of a key: of a NaN 0, of -inf 0x7fffff.
#[inline(always)]
pub(super) fn sortable(logit: f32) -> u32 {
    let bits = logit.to_bits();
    let negative = ((bits as i32) >> 31) as u32;
    let ordered = bits ^ (negative | 1 << 31);
    if logit.is_nan() { 0 } else { ordered }
}

/// The logit of a key's upper half; one NaN for all.
#[inline(always)]
pub(super) fn logit(sortable: u32) -> f32 {
    let negative = (!((sortable as i32) >> 31)) as u32;
    let bits = sortable ^ (negative | 1 << 31);
    f32::from_bits(if sortable == 0 { NAN } else { bits })
}

/// The column of a key; all ones of [`NONE`].
#[inline(always)]
pub(super) fn column(key: u64) -> u32 {
    !(key as u32)
}

/// The quiet NaN that is written.
const NAN: u32 = 0x7fc0_0000;

/// The greatest logit of a row (NaN left out; -inf of none), and the sum of exp(logit - [`base`])
/// over it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Partial {
    pub(super) greatest: f32,
    pub(super) sum: f32,
}

impl Partial {
    #[inline(always)]
    pub(super) fn word(self) -> u64 {
        u64::from(self.greatest.to_bits()) << 32 | u64::from(self.sum.to_bits())
    }

    #[inline(always)]
    pub(super) fn from_word(word: u64) -> Self {
        Self {
            greatest: f32::from_bits((word >> 32) as u32),
            sum: f32::from_bits(word as u32),
        }
    }
}

/// Returns the value to subtract from logits before their exponential, if `greatest` is the
/// greatest one: `greatest`, or 0 if it is infinite, so that no infinity is taken from itself.
#[inline(always)]
pub(super) fn base(greatest: f32) -> f32 {
    if greatest.abs() == f32::INFINITY {
        0.0
    } else {
        greatest
    }
}

/// The logarithm of the sum of exponentials, of a sum to [`base`]; one NaN for all.
#[inline(always)]
pub(super) fn log_sum_exp(base: f32, sum: f32) -> f32 {
    let out = base + fusewire_device::math::log(sum);
    if out.is_nan() {
        f32::from_bits(NAN)
    } else {
        out
    }
}
