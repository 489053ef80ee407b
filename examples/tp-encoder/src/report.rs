//! Comparison of the results, and the printed report.

use core::fmt::Write;

use anyhow::{Context, Result};

use crate::measure::{Outcome, RankResults, difference};
use crate::statistics::{interval, quartiles};

/// Greatest accepted difference between an element of a rank's embedding and the corresponding
/// element of the single process.
pub const TOLERANCE: f32 = 1e-5;
/// Number of printed sentence pairs.
const PAIRS: usize = 4;

/// The report, and the detected errors.
#[derive(Debug)]
pub struct Report {
    /// Text to print.
    pub text: String,
    /// Detected errors. Empty if all results are correct.
    pub wrong: Vec<String>,
}

/// Compares the results of `ranks` with those of the single process, which ran before and after the
/// ranks.
///
/// # Errors
/// Fails if embeddings are missing.
pub fn report(alone: &[Outcome], ranks: &[RankResults], sentences: &[String]) -> Result<Report> {
    let reference = alone
        .first()
        .context("no single process has reported a result")?;
    let first = ranks.first().context("no rank has reported a result")?;
    let mut wrong = Vec::new();
    let mut text = format!(
        "{:<32}{:>9}{:>20}{:>9}{:>10}{:>12}\n",
        "ms per batch", "median", "quartiles", "fastest", "in joins", "difference"
    );
    let seconds: Vec<f64> = alone
        .iter()
        .flat_map(|outcome| outcome.seconds.clone())
        .collect();
    row(&mut text, "single process", &seconds, None, None)?;
    for (name, of) in VARIANTS {
        let mut most = 0.0_f32;
        for (rank, results) in ranks.iter().enumerate() {
            let outcome = of(results);
            let apart = difference(&reference.embeddings, &outcome.embeddings)
                .with_context(|| format!("rank {rank}, {name}"))?;
            if apart > TOLERANCE || apart.is_nan() {
                wrong.push(format!(
                    "rank {rank}, {name}: embeddings differ from the single process's by \
                        {apart:e}; {TOLERANCE:e} is allowed"
                ));
            }
            if outcome.changed > 0 || bits(outcome) != bits(of(first)) {
                wrong.push(format!(
                    "rank {rank}, {name}: embeddings have other bits than rank 0's, or not the \
                        same in all rounds"
                ));
            }
            most = if apart > most || apart.is_nan() {
                apart
            } else {
                most
            };
        }
        let name = format!("{} ranks, {name}", ranks.len());
        let outcome = of(first);
        row(
            &mut text,
            &name,
            &outcome.seconds,
            Some(&outcome.joins),
            Some(most),
        )?;
    }
    for (what, of) in PARTS {
        let ratios: Vec<f64> = of(&first.fused)
            .iter()
            .zip(of(&first.unfused))
            .map(|(fused, unfused)| fused / unfused)
            .collect();
        let ratio = interval(&ratios);
        writeln!(
            text,
            "fused / unfused, {what}: {:.3} (median of {} rounds; 95% interval {:.3} to {:.3})",
            ratio.median,
            ratios.len(),
            ratio.low,
            ratio.high
        )?;
    }
    if wrong.is_empty() {
        writeln!(
            text,
            "embeddings: within {TOLERANCE:e} of the single process, and the same bits on all \
                ranks and in all rounds"
        )?;
    }
    closest(&mut text, &first.fused.embeddings, sentences)?;
    Ok(Report { text, wrong })
}

/// Name of a variant, and the field with its results.
type Variant = (&'static str, fn(&RankResults) -> &Outcome);
const VARIANTS: [Variant; 2] = [
    ("all_reduce, add, norm", |results| &results.unfused),
    ("fused", |results| &results.fused),
];

/// Name of a part of the time, and the field with its values.
type TimePart = (&'static str, fn(&Outcome) -> &[f64]);
const PARTS: [TimePart; 2] = [
    ("whole batch", |outcome| &outcome.seconds),
    ("joins alone", |outcome| &outcome.joins),
];

fn row(
    text: &mut String,
    name: &str,
    seconds: &[f64],
    joins: Option<&[f64]>,
    apart: Option<f32>,
) -> Result<()> {
    let spread = quartiles(seconds);
    let milliseconds = |seconds: f64| format!("{:.2}", 1e3 * seconds);
    let between = format!(
        "{} to {}",
        milliseconds(spread.low),
        milliseconds(spread.high)
    );
    let joins = joins.map_or_else(
        || "-".to_owned(),
        |joins| milliseconds(quartiles(joins).median),
    );
    let apart = apart.map_or_else(|| "-".to_owned(), |apart| format!("{apart:.1e}"));
    let median = milliseconds(spread.median);
    let fastest = milliseconds(seconds.iter().copied().fold(f64::INFINITY, f64::min));
    writeln!(
        text,
        "{name:<32}{median:>9}{between:>20}{fastest:>9}{joins:>10}{apart:>12}"
    )?;
    Ok(())
}

fn bits(outcome: &Outcome) -> Vec<u32> {
    let values = outcome.embeddings.iter().flatten();
    values.map(|value| value.to_bits()).collect()
}

/// Appends the most similar pairs of sentences. Embeddings have length 1, so their similarity is
/// the dot product.
fn closest(text: &mut String, embeddings: &[Vec<f32>], sentences: &[String]) -> Result<()> {
    let mut pairs = Vec::new();
    for (at, a) in embeddings.iter().enumerate() {
        for (other, b) in embeddings.iter().enumerate().skip(at + 1) {
            let cosine: f32 = a.iter().zip(b).map(|(a, b)| a * b).sum();
            pairs.push((cosine, at, other));
        }
    }
    pairs.sort_by(|a, b| b.0.total_cmp(&a.0));
    if !pairs.is_empty() {
        writeln!(text, "the closest sentences:")?;
    }
    for (cosine, a, b) in pairs.into_iter().take(PAIRS) {
        writeln!(text, "  {cosine:.2}  {} | {}", sentences[a], sentences[b])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(values: &[f32]) -> Outcome {
        Outcome {
            embeddings: vec![values.to_vec(), vec![0.6, 0.8]],
            changed: 0,
            seconds: vec![0.002, 0.002],
            joins: vec![0.001, 0.001],
        }
    }

    fn results(fused: &[f32], unfused: &[f32]) -> RankResults {
        RankResults {
            fused: outcome(fused),
            unfused: outcome(unfused),
        }
    }

    #[test]
    fn what_differs_is_wrong() {
        let alone = [outcome(&[1.0, 0.0])];
        let sentences = ["a".to_owned(), "b".to_owned()];
        let near = results(&[1.0, 1e-6], &[1.0, 0.0]);
        let good = report(&alone, &[near.clone(), near.clone()], &sentences).unwrap();
        assert!(good.wrong.is_empty(), "{:?}", good.wrong);
        assert!(
            good.text.contains("1.0e-6") && good.text.contains("0.60  a | b"),
            "{}",
            good.text
        );

        let far = results(&[1.0, 0.0], &[1.0, 2e-5]);
        let bad = report(&alone, &[far.clone(), far], &sentences).unwrap();
        assert_eq!(bad.wrong.len(), 2, "{:?}", bad.wrong);
        let nan = results(&[f32::NAN, 0.0], &[1.0, 0.0]);
        assert_eq!(report(&alone, &[nan], &sentences).unwrap().wrong.len(), 1);
        let other = results(&[1.0, 2e-6], &[1.0, 0.0]);
        let bad = report(&alone, &[near.clone(), other], &sentences).unwrap();
        assert!(bad.wrong[0].contains("other bits"), "{:?}", bad.wrong);
        let mut changed = near;
        changed.unfused.changed = 1;
        assert_eq!(
            report(&alone, &[changed], &sentences).unwrap().wrong.len(),
            1
        );
    }
}
