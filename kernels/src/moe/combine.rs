//! Combine: returns results to the ranks of their tokens, and sums them.

use fusewire_device::session::{Aborted, Session, Unvoted};
use fusewire_device::{Element, Group, In, InOut, Machine, Out, Team, Window};

use crate::chunk;

use super::dispatch::Arrived;
use super::mask::Mask;
use super::memory::Memory;
use super::routing::Own;
use super::shape::{MoeFlags, MoeShape, local_of};
use super::{COMBINED, DISPATCHED, ENTRY, ORDER, RESULTS, RETURNED, SELECTION_INDEX, SUMMABLE};

/// Elements that a lane adds at once.
const CHUNK: usize = 8;
/// Elements that the lane of a one-lane block adds at once.
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
    pub(super) missing: Out<'a, u32>,
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
        own: (InOut<u32>, InOut<u32>),
    ) -> Result<(), Aborted> {
        // SAFETY: the precondition of this function.
        let own = unsafe { Own::new(s, self.shape, own)? };
        let mask = own.mask();
        let mut step = own.step();
        if self.shape.flags.has(MoeFlags::SEND) {
            let may_send = step == DISPATCHED || step == COMBINED;
            s.ensure(may_send, ORDER, u64::from(step), 0)?;
            if step == COMBINED {
                // No signal proves yet that the peers have read the results of the last combine.
                self.rows.raise_present(s, ENTRY, Team::World, mask);
                self.rows.wait_present(s, ENTRY, Team::World, mask)?;
            }
            self.send(s, &own)?;
            self.results.raise_present(s, RESULTS, Team::World, mask);
            step = RETURNED;
        }
        if self.shape.flags.has(MoeFlags::WAIT) {
            s.ensure(step == RETURNED, ORDER, u64::from(step), 0)?;
            self.results.wait_present(s, RESULTS, Team::World, mask)?;
            step = SUMMABLE;
        }
        if self.shape.flags.has(MoeFlags::RECEIVE) {
            s.ensure(step == SUMMABLE, ORDER, u64::from(step), 0)?;
            // SAFETY: the precondition of this function.
            unsafe { self.receive(s, own)? };
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
        let arrived = Arrived::new(s, self.shape, &self.rows, own.mask())?;
        let first = first_result(shape, own.mask(), s.rank());
        let warp = s.block().warp();
        for (rank, selection) in arrived.selections_of_warp(s.block()) {
            let row = if shape.flags.has(MoeFlags::EXPERT_MAJOR) {
                let expert = local_of(selection.place) as usize;
                if selection.index >= arrived.selections(rank, expert) {
                    s.fault(SELECTION_INDEX, u64::from(rank), u64::from(selection.index));
                    continue;
                }
                let base = own.bases(rank).get(expert);
                base.wrapping_add(selection.index) as usize
            } else {
                (rank as usize * most + selection.slot) * k + selection.k
            };
            let Some(peer) = s.peer(rank) else {
                continue;
            };
            let item = selection.token as usize * k + selection.k;
            // A token that does not exist, from a false header, is out of range.
            let item = match item < shape.results_of_rank() {
                true => first + item,
                false => usize::MAX / hidden.max(1),
            };
            let target = item.wrapping_mul(hidden);
            let target = self.results.at(peer).slice(target, hidden);
            target.write(s, warp, self.y.slice(row.wrapping_mul(hidden), hidden));
        }
        Ok(())
    }

    /// Adds the results, after they have arrived. All lanes of the block together.
    ///
    /// # Safety
    /// On a GPU, the output must be aligned to 16 bytes.
    #[inline(always)]
    #[track_caller]
    unsafe fn receive<M: Machine>(&self, s: &Session<M>, own: Own<'_>) -> Result<(), Aborted> {
        let (shape, block) = (&self.shape, s.block());
        let (hidden, k) = (shape.hidden as usize, shape.k());
        let tokens = self.ids.len() / k;
        let most = shape.max_tokens as usize;
        let tokens = if tokens < most { tokens } else { most };
        // SAFETY: the precondition of the kernel; the lanes only read.
        let (ids, weights) = unsafe {
            (
                Memory::read_only(s, self.ids, tokens * k)?,
                Memory::read_only(s, self.weights, tokens * k)?,
            )
        };
        let out = self.out.require(s, tokens * hidden)?;
        let results = self.results.local(s)?.elements().as_in();
        let (first, last) = block.slice(tokens, 1);
        let regions = match own.mask().is_used() {
            true => s.ranks() as usize,
            false => 1,
        };
        let count = regions * shape.results_of_rank() * hidden;
        let sum = Sum {
            ids,
            weights,
            results: results.slice(0, count),
            out,
            own,
            shape: *shape,
            me: s.rank(),
            ranks: s.ranks(),
            k,
            hidden,
        };
        if own.mask().is_used() {
            let missing = self.missing.require(s, tokens)?;
            for token in block.elements_of_block(last - first) {
                missing.set(first + token, sum.missing(first + token));
            }
        }
        if sum.results.len() == count {
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
                    // `chunks` is not 0 if there is a chunk, but the compiler cannot tell.
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

/// Returns the number of the first result that `rank` writes.
#[inline(always)]
fn first_result(shape: &MoeShape, mask: Mask<'_>, rank: u32) -> usize {
    match mask.is_used() {
        true => rank as usize * shape.results_of_rank(),
        false => 0,
    }
}

/// The sums of the results of each token.
struct Sum<'a, T> {
    ids: Memory<'a, i32>,
    weights: Memory<'a, f32>,
    results: In<'a, T>,
    out: Out<'a, T>,
    own: Own<'a>,
    shape: MoeShape,
    me: u32,
    ranks: u32,
    k: usize,
    hidden: usize,
}

impl<T: Element<Acc = f32>> Sum<'_, T> {
    /// Returns the selections of a token whose expert is on a masked rank, as bits.
    #[inline(always)]
    fn missing(&self, token: usize) -> u32 {
        let mut bits = 0;
        for k in 0..self.k {
            let item = token * self.k + k;
            if self.ids.get(item) >= 0 && self.own.mask().has(self.own.rank(item)) {
                bits |= 1 << (k & 31);
            }
        }
        bits
    }

    /// Returns true if selection `item` has a result, and the number of this result. Without one,
    /// the number is that of memory which no masked rank writes.
    #[inline(always)]
    fn result(&self, item: usize) -> (bool, usize) {
        let is_selected = self.ids.get(item) >= 0;
        let mask = self.own.mask();
        if !mask.is_used() {
            return (is_selected, item);
        }
        let rank = self.own.rank(item);
        let has_result = is_selected && rank < self.ranks && !mask.has(rank);
        let rank = if has_result { rank } else { self.me };
        (has_result, first_result(&self.shape, mask, rank) + item)
    }

    /// Writes elements `[at, at + N)` of a token.
    ///
    /// # Safety
    /// The token and the elements must exist, and no other lane may write them. With several lanes,
    /// the memory must be aligned to 16 bytes.
    #[inline(always)]
    unsafe fn chunk<M: Machine, const N: usize>(&self, token: usize, at: usize) {
        let (mut item, end) = (token * self.k, (token + 1) * self.k);
        let mut sum = [0.0f32; N];
        if M::LANES == 1 {
            while item < end {
                if self.result(item).0 {
                    // SAFETY: the precondition of this function.
                    unsafe { self.load::<M, N>(item, at) }.add_to(&mut sum);
                }
                item += 1;
            }
        } else {
            // The loads of four results are in flight together, so they do not depend on the ids.
            while item + 4 <= end {
                // SAFETY: as above.
                unsafe {
                    let first = self.load::<M, N>(item, at);
                    let second = self.load::<M, N>(item + 1, at);
                    let third = self.load::<M, N>(item + 2, at);
                    let fourth = self.load::<M, N>(item + 3, at);
                    first.add_to(&mut sum);
                    second.add_to(&mut sum);
                    third.add_to(&mut sum);
                    fourth.add_to(&mut sum);
                }
                item += 4;
            }
            while item < end {
                // SAFETY: as above.
                unsafe { self.load::<M, N>(item, at) }.add_to(&mut sum);
                item += 1;
            }
        }
        // SAFETY: the output has the elements of the token.
        unsafe {
            let to = self.out.as_ptr().add(token * self.hidden + at);
            chunk::write::<M, T, N>(to, chunk::narrow(sum));
        }
    }

    /// Loads elements `[at, at + N)` of the result of selection `item`.
    ///
    /// # Safety
    /// As [`Sum::chunk`], for the selection's token.
    #[inline(always)]
    unsafe fn load<M: Machine, const N: usize>(&self, item: usize, at: usize) -> Weighted<T, N> {
        let (is_selected, result) = self.result(item);
        Weighted {
            is_selected,
            weight: self.weights.get(item),
            // SAFETY: the results have `hidden` elements for each selection of a token that exists,
            // in each region. The wait for the results has acquired them.
            values: unsafe {
                let from = self.results.as_ptr().add(result * self.hidden + at);
                chunk::read::<M, T, N>(from)
            },
        }
    }
}

/// A part of the result of a selection. If the selection has no expert, the values are unspecified.
struct Weighted<T, const N: usize> {
    is_selected: bool,
    weight: f32,
    values: [T; N],
}

impl<T: Element<Acc = f32>, const N: usize> Weighted<T, N> {
    #[inline(always)]
    fn add_to(self, sum: &mut [f32; N]) {
        if self.is_selected {
            let values = chunk::widen(self.values);
            for i in 0..N {
                sum[i] += self.weight * values[i];
            }
        }
    }
}
