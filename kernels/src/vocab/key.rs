//! Keys: a logit and its column in one word. Partial results: a row's maximum and sum in one word.

/// Returns the key of a logit, given as [`sortable`], and its column. A key is greater if its logit
/// is greater, or if the logits are equal and its column is lower. NaN is less than all numbers,
/// and -0 less than +0. No key is [`NONE`], because there are fewer than 2^32 - 1 columns.
#[inline(always)]
pub(super) fn key(sortable: u32, column: u32) -> u64 {
    u64::from(sortable) << 32 | u64::from(!column)
}

/// Value less than every key.
pub(super) const NONE: u64 = 0;

/// Returns the upper half of a key: 0 for a NaN, 0x7fffff for -inf.
#[inline(always)]
pub(super) fn sortable(logit: f32) -> u32 {
    let bits = logit.to_bits();
    let negative = ((bits as i32) >> 31) as u32;
    let ordered = bits ^ (negative | 1 << 31);
    if logit.is_nan() { 0 } else { ordered }
}

/// Returns the logit of a key's upper half; the same NaN for every NaN.
#[inline(always)]
pub(super) fn logit(sortable: u32) -> f32 {
    let negative = (!((sortable as i32) >> 31)) as u32;
    let bits = sortable ^ (negative | 1 << 31);
    f32::from_bits(if sortable == 0 { NAN } else { bits })
}

/// Returns the column of a key; all ones for [`NONE`].
#[inline(always)]
pub(super) fn column(key: u64) -> u32 {
    !(key as u32)
}

/// Bits of the NaN that is written for every NaN.
const NAN: u32 = 0x7fc0_0000;

/// The greatest logit of a row except for NaNs (-inf if there is none), and the sum of
/// exp(logit - [`base`]) over the row.
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
/// greatest one: `greatest`, or 0 if it is infinite, because inf - inf is NaN.
#[inline(always)]
pub(super) fn base(greatest: f32) -> f32 {
    if greatest.abs() == f32::INFINITY {
        0.0
    } else {
        greatest
    }
}

/// Returns the logarithm of the sum of exponentials, given the sum relative to `base`; the same NaN
/// for every NaN.
#[inline(always)]
pub(super) fn log_sum_exp(base: f32, sum: f32) -> f32 {
    let out = base + fusewire_device::math::log(sum);
    if out.is_nan() {
        f32::from_bits(NAN)
    } else {
        out
    }
}
