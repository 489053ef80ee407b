//! Medians and their confidence intervals.

/// A median and the bounds of a range around it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Spread {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// Returns the median and the quartiles, or NaN if there are no samples.
pub(crate) fn quartiles(samples: &[f64]) -> Spread {
    let sorted = sorted(samples);
    Spread {
        median: quantile(&sorted, 0.5),
        low: quantile(&sorted, 0.25),
        high: quantile(&sorted, 0.75),
    }
}

/// Returns the median and its distribution-free 95 % confidence interval from order statistics. For
/// fewer than 6 samples, no such interval exists, so the function returns the range of all samples.
pub(crate) fn interval(samples: &[f64]) -> Spread {
    let sorted = sorted(samples);
    let count = sorted.len();
    // The probability that the median is outside the samples k..count - k is twice the probability
    // of fewer than k heads in `count` tosses of a fair coin.
    let mut k = 0;
    let mut each = 0.5_f64.powi(count as i32);
    let mut below = each;
    while below <= 0.025 && k + 1 < count.div_ceil(2) {
        k += 1;
        each *= (count - k + 1) as f64 / k as f64;
        below += each;
    }
    let first = k.saturating_sub(1);
    Spread {
        median: quantile(&sorted, 0.5),
        low: sorted.get(first).copied().unwrap_or(f64::NAN),
        high: sorted
            .get(count.wrapping_sub(first + 1))
            .copied()
            .unwrap_or(f64::NAN),
    }
}

fn sorted(samples: &[f64]) -> Vec<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
}

/// Returns a quantile, with linear interpolation between samples.
fn quantile(sorted: &[f64], part: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let at = part * last as f64;
    let (below, above) = (sorted[at.floor() as usize], sorted[at.ceil() as usize]);
    below + (above - below) * at.fract()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quartiles_lie_between_samples() {
        let spread = quartiles(&[4.0, 1.0, 3.0, 2.0, 5.0]);
        assert_eq!((spread.low, spread.median, spread.high), (2.0, 3.0, 4.0));
        assert_eq!(quartiles(&[1.0, 2.0]).median, 1.5);
        assert!(quartiles(&[]).median.is_nan());
    }

    #[test]
    fn the_interval_is_that_of_the_sign_test() {
        let samples = |count: u32| (1..=count).map(f64::from).collect::<Vec<f64>>();
        // Values from tables of the sign test: the 6th and 15th of 20 samples, the 2nd and 9th of
        // 10, and the first and last of 6.
        for (count, low, high) in [
            (20, 6.0, 15.0),
            (10, 2.0, 9.0),
            (6, 1.0, 6.0),
            (3, 1.0, 3.0),
        ] {
            let spread = interval(&samples(count));
            assert_eq!((spread.low, spread.high), (low, high), "{count}");
        }
        assert!(interval(&[]).low.is_nan());
    }
}
