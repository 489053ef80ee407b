//! Measurements in one process: embeds all batches repeatedly and records the times.

use core::time::Duration;
use std::time::Instant;

use anyhow::{Result, ensure};
use fusewire::{Communicator, ReduceOp};
use serde::{Deserialize, Serialize};

use crate::{Batch, Encoder, FusedJoin, Join, SingleProcess, UnfusedJoin};

/// Results of one variant: fused, unfused or single process.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Outcome {
    /// Embedding of each sentence, in order.
    pub embeddings: Vec<Vec<f32>>,
    /// Number of rounds whose embeddings are not bitwise identical to those of the first round.
    pub changed: usize,
    /// Seconds per batch, one value per round. With several ranks, each value is the slowest
    /// rank's.
    pub seconds: Vec<f64>,
    /// Part of `seconds` that was spent in joins (reduction, residual and norm), including waits
    /// for other ranks.
    pub joins: Vec<f64>,
}

/// Results of one rank.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct RankResults {
    /// Results with reduction, residual and norm in one launch.
    pub fused: Outcome,
    /// Results with reduction, residual and norm in sequence.
    pub unfused: Outcome,
}

/// Runs the whole model in this process, without Fusewire: one warm-up round, then `rounds` timed
/// rounds.
///
/// # Errors
/// Returns errors of the encoder.
pub fn alone(encoder: &Encoder, batches: &[Batch], rounds: usize) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    for _ in 0..=rounds {
        let mut round = Round::default();
        for batch in batches {
            round.embed(encoder, batch, &SingleProcess, &Duration::default)?;
        }
        outcome.add(round, None)?;
    }
    Ok(outcome)
}

/// Runs this rank's part of the model. Fused and unfused rounds alternate, so that other load on
/// the machine affects both variants.
///
/// # Errors
/// Returns errors of the encoder and of the communicator.
pub fn rank(
    comm: &Communicator,
    encoder: &Encoder,
    batches: &[Batch],
    rounds: usize,
) -> Result<RankResults> {
    let (fused, unfused) = (FusedJoin::new(comm), UnfusedJoin::new(comm));
    let mut results = RankResults::default();
    let mut once = |fuse: bool| {
        let mut round = Round::default();
        for batch in batches {
            comm.barrier()?;
            if fuse {
                round.embed(encoder, batch, &fused, &|| fused.take_time())?;
            } else {
                round.embed(encoder, batch, &unfused, &|| unfused.take_time())?;
            }
        }
        let outcome = if fuse {
            &mut results.fused
        } else {
            &mut results.unfused
        };
        outcome.add(round, Some(comm))
    };
    for round in 0..=rounds {
        once(round % 2 == 0)?;
        once(round % 2 != 0)?;
    }
    Ok(results)
}

/// One round over all batches.
#[derive(Default)]
struct Round {
    embeddings: Vec<Vec<f32>>,
    /// Seconds of each batch.
    seconds: Vec<f64>,
    joins: Vec<f64>,
}

impl Round {
    fn embed(
        &mut self,
        encoder: &Encoder,
        batch: &Batch,
        join: &dyn Join,
        joins: &dyn Fn() -> Duration,
    ) -> Result<()> {
        let started = Instant::now();
        // On a GPU, `to_vec2` also waits until the embeddings are in host memory.
        let embeddings = encoder.embed(batch, join)?.to_vec2::<f32>()?;
        self.seconds.push(started.elapsed().as_secs_f64());
        self.joins.push(joins().as_secs_f64());
        self.embeddings.extend(embeddings);
        Ok(())
    }
}

impl Outcome {
    /// Adds a round. Drops the times of the first round, which warms up caches and allocators.
    fn add(&mut self, mut round: Round, comm: Option<&Communicator>) -> Result<()> {
        if self.embeddings.is_empty() {
            self.embeddings = round.embeddings;
            return Ok(());
        }
        let bits = |rows: &[Vec<f32>]| -> Vec<u32> {
            rows.iter().flatten().map(|value| value.to_bits()).collect()
        };
        self.changed += usize::from(bits(&round.embeddings) != bits(&self.embeddings));
        if let Some(comm) = comm {
            comm.all_reduce(&mut round.seconds, ReduceOp::Max)?;
            comm.all_reduce(&mut round.joins, ReduceOp::Max)?;
        }
        let mean = |seconds: &[f64]| seconds.iter().sum::<f64>() / seconds.len() as f64;
        self.seconds.push(mean(&round.seconds));
        self.joins.push(mean(&round.joins));
        Ok(())
    }
}

/// Returns the greatest difference between elements of two sets of embeddings, or NaN if any
/// element is NaN.
///
/// # Errors
/// Fails if the sets differ in size.
pub fn difference(a: &[Vec<f32>], b: &[Vec<f32>]) -> Result<f32> {
    ensure!(
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.len() == b.len()),
        "{} embeddings against {}, or of other lengths",
        a.len(),
        b.len()
    );
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    Ok(pairs.map(|(a, b)| (a - b).abs()).fold(0.0, |most, next| {
        if next > most || next.is_nan() {
            next
        } else {
            most
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_greatest_difference_is_found_and_a_nan_stays() {
        let a = vec![vec![1.0, 2.0], vec![3.0, 4.0]];
        assert_eq!(difference(&a, &a).unwrap(), 0.0);
        let b = vec![vec![1.0, 2.5], vec![2.0, 4.0]];
        assert_eq!(difference(&a, &b).unwrap(), 1.0);
        let nan = vec![vec![f32::NAN, 2.5], vec![2.0, 4.0]];
        assert!(difference(&a, &nan).unwrap().is_nan());
        assert!(difference(&a, &a[..1]).is_err());
    }
}
