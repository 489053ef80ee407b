//! What one process does: embeds all batches, again and again, and takes the time.

use core::time::Duration;
use std::time::Instant;

use anyhow::{Result, ensure};
use fusewire::{Communicator, ReduceOp};
use serde::{Deserialize, Serialize};

use crate::{Batch, Encoder, FusedJoin, Join, SingleProcess, UnfusedJoin};

/// What a way to embed has given.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct Outcome {
    /// Of each sentence, in their order.
    pub embeddings: Vec<Vec<f32>>,
    /// Rounds whose embeddings had other bits than the first one's.
    pub changed: usize,
    /// Seconds a batch, of each round; over ranks that of the slowest.
    pub seconds: Vec<f64>,
    /// Of these, in the joins: reduction, residual and norm, with waiting for the others.
    pub joins: Vec<f64>,
}

/// Results of a rank.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub struct RankResults {
    /// One launch for reduction, residual and norm.
    pub fused: Outcome,
    /// One after the other.
    pub unfused: Outcome,
}

/// The whole model in this process, without Fusewire: one round that is not timed, then `rounds`.
///
/// # Errors
/// The encoder's.
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

/// This rank's part of the model, both ways in turn, so that what else the machine does hits both.
///
/// # Errors
/// The encoder's; the communicator's.
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

/// All batches once.
#[derive(Default)]
struct Round {
    embeddings: Vec<Vec<f32>>,
    /// Of each batch.
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
        // Ends when the embeddings are in the host's memory, also on a GPU.
        let embeddings = encoder.embed(batch, join)?.to_vec2::<f32>()?;
        self.seconds.push(started.elapsed().as_secs_f64());
        self.joins.push(joins().as_secs_f64());
        self.embeddings.extend(embeddings);
        Ok(())
    }
}

impl Outcome {
    /// The first round is for caches and allocators: its time does not count.
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
            comm.all_reduce(round.seconds.as_mut_slice(), ReduceOp::Max)?;
            comm.all_reduce(round.joins.as_mut_slice(), ReduceOp::Max)?;
        }
        let mean = |seconds: &[f64]| seconds.iter().sum::<f64>() / seconds.len() as f64;
        self.seconds.push(mean(&round.seconds));
        self.joins.push(mean(&round.joins));
        Ok(())
    }
}

/// The greatest difference of two sets of embeddings, element by element. A NaN anywhere is a NaN.
///
/// # Errors
/// Where they have not as many.
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
