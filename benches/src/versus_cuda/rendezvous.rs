//! A rendezvous of the ranks' threads: a barrier and an exchange of values. A rank that fails
//! releases the waits of all other ranks.

use core::time::Duration;
use std::sync::{Condvar, Mutex, PoisonError};

use anyhow::{Result, bail};

/// Error of a rank whose wait was released because another rank failed.
pub(crate) const FREED: &str = "another rank has failed";

#[derive(Debug, Default)]
struct State {
    arrived: usize,
    round: u64,
    failed: bool,
    values: Vec<u64>,
}

/// Timeout of a wait. It is long enough for a rank to compute and compare hundreds of MiB, and for
/// a stuck kernel to be detected.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A barrier of threads that a failing rank can release.
#[derive(Debug)]
pub(crate) struct Rendezvous {
    ranks: usize,
    state: Mutex<State>,
    changed: Condvar,
}

impl Rendezvous {
    pub(crate) fn new(ranks: usize) -> Self {
        Self {
            ranks,
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Waits for all ranks.
    pub(crate) fn wait(&self) -> Result<()> {
        self.exchange(0, 0).map(drop)
    }

    /// Waits until all ranks have called this method. Returns their values by rank.
    pub(crate) fn exchange(&self, rank: usize, value: u64) -> Result<Vec<u64>> {
        let values = self.turn(|values, ranks| {
            values.resize(ranks, 0);
            values[rank] = value;
        })?;
        // Waits again, so that no rank writes its next value before all ranks have read these
        // values.
        self.turn(|_, _| {})?;
        Ok(values)
    }

    /// Returns the greatest of all ranks' values.
    pub(crate) fn greatest(&self, rank: usize, value: f64) -> Result<f64> {
        let all = self.exchange(rank, value.to_bits())?;
        Ok(all.into_iter().map(f64::from_bits).fold(f64::MIN, f64::max))
    }

    fn turn(&self, deposit: impl FnOnce(&mut Vec<u64>, usize)) -> Result<Vec<u64>> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        deposit(&mut state.values, self.ranks);
        state.arrived += 1;
        if state.arrived == self.ranks {
            state.arrived = 0;
            state.round += 1;
            self.changed.notify_all();
        } else {
            let round = state.round;
            while state.round == round && !state.failed {
                let waited = self.changed.wait_timeout(state, TIMEOUT);
                let (now, time) = waited.unwrap_or_else(PoisonError::into_inner);
                state = now;
                if time.timed_out() && state.round == round {
                    state.failed = true;
                    self.changed.notify_all();
                    bail!("a rank has not come within {} s", TIMEOUT.as_secs());
                }
            }
        }
        if state.failed {
            bail!(FREED);
        }
        Ok(state.values.clone())
    }

    /// Releases all current and later waits with an error.
    pub(crate) fn fail(&self) {
        self.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .failed = true;
        self.changed.notify_all();
    }
}

/// Fails the rendezvous on drop, that is, after a panic or an error, unless
/// [`RendezvousGuard::end`] was called.
#[derive(Debug)]
pub(crate) struct RendezvousGuard<'a> {
    rendezvous: &'a Rendezvous,
    ended: bool,
}

impl<'a> RendezvousGuard<'a> {
    pub(crate) fn new(rendezvous: &'a Rendezvous) -> Self {
        Self {
            rendezvous,
            ended: false,
        }
    }

    pub(crate) fn end(mut self) {
        self.ended = true;
    }
}

impl Drop for RendezvousGuard<'_> {
    fn drop(&mut self) {
        if !self.ended {
            self.rendezvous.fail();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[test]
    fn values_are_those_of_the_round() {
        let rendezvous = Rendezvous::new(4);
        thread::scope(|scope| {
            for rank in 0..4 {
                let rendezvous = &rendezvous;
                scope.spawn(move || {
                    for round in 0..200_u64 {
                        let all = rendezvous.exchange(rank, round * 4 + rank as u64);
                        let expected: Vec<u64> = (0..4).map(|other| round * 4 + other).collect();
                        assert_eq!(all.expect("no rank fails"), expected);
                    }
                    let most = rendezvous.greatest(rank, rank as f64 / 2.0);
                    assert_eq!(most.expect("no rank fails"), 1.5);
                });
            }
        });
    }

    #[test]
    fn a_rank_that_fails_frees_the_others() {
        let rendezvous = Rendezvous::new(3);
        thread::scope(|scope| {
            let others: Vec<_> = (0..2)
                .map(|_| {
                    scope.spawn(|| {
                        let attendance = RendezvousGuard::new(&rendezvous);
                        let result = rendezvous.wait();
                        attendance.end();
                        result
                    })
                })
                .collect();
            drop(RendezvousGuard::new(&rendezvous));
            for other in others {
                let error = other.join().expect("no panic").expect_err("one has failed");
                assert!(error.to_string().contains("another rank"), "{error}");
            }
        });
        assert!(rendezvous.wait().is_err(), "later too");
    }
}
