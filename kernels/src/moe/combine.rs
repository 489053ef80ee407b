//! Combine: results to the ranks of their tokens.

use fusewire_device::session::{Aborted, Session, Unvoted};
use fusewire_device::{Element, Group, In, InOut, Machine, Out, Team, Window};

use crate::chunk;

use super::dispatch::Arrived;
use super::routing::Own;
use super::shape::{MoeFlags, MoeShape, local_of};
use super::{COMBINED, DISPATCHED, ENTRY, ORDER, RESULTS, RETURNED};

/// Elements that a lane adds at once.
const CHUNK: usize = 8;
/// Elements that a block of one lane adds at once.
const LONG: usize = 64;

/// A launch of combine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Combine<'a, T> {
    pub(super) shape: MoeShape,
    pub(super) rows: Window<'a, u32>,
    pub(super) results: Window<'a, T>,
    pub(super) y: In<'a, T>,
    pub(super) ids: In<'a, i32>,
    pub(super) weights: In<'a, f32>,
    pub(super) out: Out<'a, T>,
}

impl<T: Element<Acc = f32>> Combine<'_, T> {
    /// Runs the halves that the flags name.
    ///
    /// # Safety
    /// As [`super::moe_combine`].
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn run<M: Machine>(
        &self,
        s: &Session<M>,
        own: InOut<u32>,
    ) -> Result<(), Aborted> {
        let own = Own::new(s, self.shape, own)?;
        let mut step = own.step();
        if self.shape.flags.has(MoeFlags::SEND) {
            let may_send = step == DISPATCHED || step == COMBINED;
            s.ensure(may_send, ORDER, u64::from(step), 0)?;
            if step == COMBINED {
                // Nothing has told that the peers have read the results of the last combine.
                self.rows.raise_all(s, ENTRY, Team::World);
                self.rows.wait_all(s, ENTRY, Team::World)?;
            }
            self.send(s, &own)?;
            self.results.raise_all(s, RESULTS, Team::World);
            step = RETURNED;
        }
        if self.shape.flags.has(MoeFlags::RECEIVE) {
            s.ensure(step == RETURNED, ORDER, u64::from(step), 0)?;
            // SAFETY: the precondition of this function.
            unsafe { self.receive(s)? };
            step = COMBINED;
        }
        if s.block().is_leader() {
            own.set_step(step);
        }
        Ok(())
    }

    /// Writes the results of the rows that this block has received. All lanes of the block
    /// together.
    #[inline(always)]
    #[track_caller]
    fn send<M: Machine>(&self, s: &Session<M>, own: &Own<'_>) -> Result<(), Aborted> {
        let shape = &self.shape;
        let (hidden, k, most) = (shape.hidden as usize, shape.k(), shape.max_tokens as usize);
        let arrived = Arrived::local(s, self.shape, &self.rows)?;
        arrived.each_selection(s, |warp, rank, selection| {
            let row = if shape.flags.has(MoeFlags::EXPERT_MAJOR) {
                let first = own.bases(rank).get(local_of(selection.place) as usize);
                first.wrapping_add(selection.index) as usize
            } else {
                (rank as usize * most + selection.slot) * k + selection.k
            };
            let Some(peer) = s.peer(rank) else {
                return;
            };
            let target = (selection.token as usize * k + selection.k).wrapping_mul(hidden);
            let target = self.results.at(peer).slice(target, hidden);
            target.write(s, warp, self.y.slice(row.wrapping_mul(hidden), hidden));
        });
        Ok(())
    }

    /// Waits for the results, and adds them. All lanes of the block together.
    ///
    /// # Safety
    /// On a GPU, the output must be aligned to 16 bytes.
    #[inline(always)]
    #[track_caller]
    unsafe fn receive<M: Machine>(&self, s: &Session<M>) -> Result<(), Aborted> {
        let (shape, block) = (&self.shape, s.block());
        let (hidden, k) = (shape.hidden as usize, shape.k());
        let tokens = self.ids.len() / k;
        let most = shape.max_tokens as usize;
        let tokens = if tokens < most { tokens } else { most };
        let ids = self.ids.require(s, tokens * k)?;
        let weights = self.weights.require(s, tokens * k)?;
        let out = self.out.require(s, tokens * hidden)?;
        let results = self.results.wait_all(s, RESULTS, Team::World)?;
        let (first, last) = block.slice(tokens, 1);
        let sum = Sum {
            ids,
            weights,
            results: results.slice(0, tokens * k * hidden),
            out,
            k,
            hidden,
        };
        if sum.results.len() == tokens * k * hidden {
            if M::LANES == 1 {
                for token in first..last {
                    let mut at = 0;
                    while at + LONG <= hidden {
                        // SAFETY: the token and the elements exist. There is one lane.
                        unsafe { sum.chunk::<M, LONG>(token, at) };
                        at += LONG;
                    }
                    while at + CHUNK <= hidden {
                        // SAFETY: as above.
                        unsafe { sum.chunk::<M, CHUNK>(token, at) };
                        at += CHUNK;
                    }
                }
            } else {
                let chunks = hidden / CHUNK;
                for chunk in block.elements_of_block((last - first) * chunks) {
                    // `chunks` is not 0 where there is a chunk, which the compiler does not see.
                    let divisor = if chunks == 0 { 1 } else { chunks };
                    let (token, at) = (first + chunk / divisor, chunk % divisor * CHUNK);
                    // SAFETY: the token and the elements exist; each chunk goes to one lane.
                    unsafe { sum.chunk::<M, CHUNK>(token, at) };
                }
            }
        }
        s.vote(Unvoted::new(()))
    }
}

/// The sums of the results of each token.
struct Sum<'a, T> {
    ids: In<'a, i32>,
    weights: In<'a, f32>,
    results: In<'a, T>,
    out: Out<'a, T>,
    k: usize,
    hidden: usize,
}

impl<T: Element<Acc = f32>> Sum<'_, T> {
    /// Writes elements `[at, at + N)` of a token.
    ///
    /// # Safety
    /// The token and the elements must exist, and no other lane may write them. With several lanes,
    /// the memory must be aligned to 16 bytes.
    #[inline(always)]
    unsafe fn chunk<M: Machine, const N: usize>(&self, token: usize, at: usize) {
        let mut sum = [0.0f32; N];
        for item in token * self.k..(token + 1) * self.k {
            if self.ids.get(item) < 0 {
                continue;
            }
            let weight = self.weights.get(item);
            // SAFETY: the results have `hidden` elements for each item of a token that exists. The
            // wait for the results has acquired them.
            let values = unsafe {
                let from = self.results.as_ptr().add(item * self.hidden + at);
                chunk::widen(chunk::read::<M, T, N>(from))
            };
            for i in 0..N {
                sum[i] += weight * values[i];
            }
        }
        // SAFETY: the output has the elements of the token.
        unsafe {
            let to = self.out.as_ptr().add(token * self.hidden + at);
            chunk::write::<M, T, N>(to, chunk::narrow(sum));
        }
    }
}
