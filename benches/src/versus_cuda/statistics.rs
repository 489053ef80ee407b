//! Medians, and distribution-free confidence intervals of medians.

/// Returns the median; `None` if there are no values.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        length if length % 2 == 1 => Some(sorted[middle]),
        _ => Some((sorted[middle - 1] + sorted[middle]) / 2.0),
    }
}

/// A median with a confidence interval of at least 95 %.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub(crate) struct Interval {
    pub(crate) median: f64,
    pub(crate) low: f64,
    pub(crate) high: f64,
}

/// Returns the interval from the k-th smallest to the k-th largest of n values. k is the greatest
/// number such that a binomial (n, 1/2) variable is below k with a probability of at most 2.5 %.
/// Returns `None` for fewer than six values, because then no such k exists.
pub(crate) fn interval(values: &[f64]) -> Option<Interval> {
    let k = order(values.len())?;
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    Some(Interval {
        median: median(values)?,
        low: sorted[k - 1],
        high: sorted[sorted.len() - k],
    })
}

/// Returns the k of [`interval`].
fn order(count: usize) -> Option<usize> {
    let mut term = 0.5_f64.powi(i32::try_from(count).ok()?);
    let mut below = 0.0;
    let mut k = 0;
    while k < count {
        below += term;
        if below > 0.025 {
            break;
        }
        term *= (count - k) as f64 / (k + 1) as f64;
        k += 1;
    }
    (k > 0).then_some(k)
}

/// Returns the interval of the ratios `over / under` per round. A disturbance that affects a whole
/// round affects both sides and cancels out.
pub(crate) fn ratio(over: &[f64], under: &[f64]) -> Option<Interval> {
    let pairs = over.iter().zip(under);
    interval(&pairs.map(|(over, under)| over / under).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn orders_are_those_of_the_tables() {
        // Critical values of the two-sided sign test at 5 %.
        for (count, k) in [
            (6, 1),
            (8, 1),
            (9, 2),
            (11, 2),
            (12, 3),
            (15, 4),
            (20, 6),
            (25, 8),
            (50, 18),
        ] {
            assert_eq!(order(count), Some(k), "{count}");
        }
        assert_eq!(order(5), None);
        assert_eq!(order(0), None);
    }

    #[test]
    fn intervals_cover() {
        // The interval should cover the median for about 98.8 % of 2,000 samples of 11 values from
        // a skewed distribution whose median is 1.
        let mut state = 1_u64;
        let mut uniform = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        let mut covered = 0;
        for _ in 0..2000 {
            let sample: Vec<f64> = (0..11).map(|_| (2.0 * uniform()).powi(3)).collect();
            let found = interval(&sample).expect("eleven values");
            assert!(found.low <= found.median && found.median <= found.high);
            covered += usize::from(found.low <= 1.0 && 1.0 <= found.high);
        }
        assert!((1950..=1995).contains(&covered), "{covered}");
    }

    #[test]
    fn ratios_are_by_round() {
        let over = [2.0, 4.0, 8.0, 2.0, 4.0, 8.0];
        let under = [1.0, 2.0, 4.0, 1.0, 2.0, 4.0];
        let found = ratio(&over, &under).expect("six");
        assert_eq!((found.low, found.median, found.high), (2.0, 2.0, 2.0));
    }
}
