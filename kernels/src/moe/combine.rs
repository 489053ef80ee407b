//! Combine: returns results to the ranks of their tokens, and sums them.

use core::marker::PhantomData;

use fusewire_device::element::E4m3;
use fusewire_device::group::slice;
use fusewire_device::mem;
use fusewire_device::session::{Aborted, Session, Unvoted};
use fusewire_device::{Element, Group, In, InOut, Machine, Out, Rank, Remote, Team, Window};

use crate::chunk;

use super::arrived::Arrived;
use super::fp8::Quantizer;
use super::mask::Mask;
use super::memory::Memory;
use super::routing::Own;
use super::shape::{GROUP, MoeFlags, MoeShape, local_of, with_element};
use super::{
    AGAIN, COMBINED, DISPATCHED, ORDER, RESULTS, RETURNED, SELECTION_INDEX, SUMMABLE, TOKENS,
};

/// Elements that a lane adds at once.
const CHUNK: usize = 8;
/// Elements of results in fp8 that a lane adds at once: 16 bytes.
const UNIT: usize = 16;
/// Elements that the lane of a one-lane block adds at once.
const LONG: usize = 64;

/// A launch of combine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Combine<'a> {
    pub(super) shape: MoeShape,
    pub(super) rows: Window<'a, u32>,
    pub(super) results: Window<'a, u32>,
    pub(super) y: In<'a, u32>,
    pub(super) ids: In<'a, i32>,
    pub(super) weights: In<'a, f32>,
    pub(super) out: Out<'a, u32>,
    pub(super) missing: Out<'a, u32>,
}

impl<'a> Combine<'a> {
    /// Runs the halves that the flags name.
    ///
    /// # Safety
    /// As [`super::moe_combine`].
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn run<M: Machine>(
        &self,
        s: &Session<M>,
        own: (InOut<'a, u32>, InOut<'a, u32>),
    ) -> Result<(), Aborted> {
        // SAFETY: the precondition of this function.
        let own = unsafe { Own::new(s, self.shape, own)? };
        let (flags, is_staged) = (self.shape.flags, self.shape.is_staged());
        let (mask, mut step) = (own.mask(), own.step());
        let is_next = is_staged && !flags.has(MoeFlags::FIRST);
        let round = if is_next { own.round() } else { 0 };
        let rounds = if is_staged { own.rounds() } else { 1 };
        if is_next && step == COMBINED && round == rounds {
            return Ok(()); // All rounds are complete; launches are enqueued for `max_tokens`.
        }
        if flags.has(MoeFlags::SEND) {
            let may_send = match is_next {
                true => step == RETURNED,
                false => step == DISPATCHED || step == COMBINED,
            };
            s.ensure(may_send, ORDER, u64::from(step), 0)?;
            if step == COMBINED {
                // No signal proves yet that the peers have read the results of the last combine.
                self.results.raise_present(s, AGAIN, Team::World, mask);
                self.results.wait_present(s, AGAIN, Team::World, mask)?;
            }
            // SAFETY: the precondition of this function.
            unsafe { self.send(s, &own, round)? };
            self.results.raise_present(s, RESULTS, Team::World, mask);
            step = RETURNED;
        }
        if flags.has(MoeFlags::WAIT) {
            s.ensure(step == RETURNED, ORDER, u64::from(step), 0)?;
            self.results.wait_present(s, RESULTS, Team::World, mask)?;
            step = SUMMABLE;
        }
        if flags.has(MoeFlags::RECEIVE) {
            s.ensure(step == SUMMABLE, ORDER, u64::from(step), 0)?;
            // SAFETY: the precondition of this function.
            unsafe { self.receive(s, own, round)? };
            step = if round + 1 < rounds {
                RETURNED
            } else {
                COMBINED
            };
        }
        if s.block().is_leader() {
            own.set_step(step);
            if is_staged {
                own.set_round(round + 1);
            }
        }
        Ok(())
    }

    /// Writes the results of the rows that this block has received. All lanes of the block
    /// together.
    ///
    /// # Safety
    /// On a GPU, the results must be aligned to 16 bytes.
    #[inline(always)]
    #[track_caller]
    unsafe fn send<M: Machine>(
        &self,
        s: &Session<M>,
        own: &Own<'a>,
        round: usize,
    ) -> Result<(), Aborted> {
        let (shape, block, k) = (&self.shape, s.block(), self.shape.k());
        let (is_staged, most) = (shape.is_staged(), shape.max_tokens as usize);
        let arrived = Arrived::new(s, self.shape, &self.rows, *own, round)?.kept();
        // The index of the first result that this rank may write at a peer, and their number.
        let (first, count) = match is_staged {
            true => (self.region(s, round), shape.results_of_round()),
            false => {
                let first = first_result(shape, own.mask(), s.rank());
                (first, shape.results_of_rank())
            }
        };
        for (rank, selection) in arrived.selections_of_warp(block) {
            let row = if shape.flags.has(MoeFlags::EXPERT_MAJOR) {
                let expert = local_of(selection.place) as usize;
                let mut is_wrong = selection.index >= arrived.selections(rank, expert);
                if M::LANES != 1 && shape.flags.has(MoeFlags::FP8_RESULTS) {
                    // Even if a peer changes the number meanwhile, all lanes quantize, or none.
                    is_wrong = block.warp().any(is_wrong);
                }
                if is_wrong {
                    s.fault(SELECTION_INDEX, u64::from(rank), u64::from(selection.index));
                    continue;
                }
                let base = own.bases(rank).get(expert);
                base.wrapping_add(selection.index) as usize
            } else {
                let row = match is_staged {
                    true => own.kept_index(rank, selection.slot),
                    false => rank as usize * most + selection.slot,
                };
                row.wrapping_mul(k) + selection.k
            };
            let Some(peer) = s.peer(rank) else {
                continue;
            };
            let mut token = selection.token as usize;
            if is_staged {
                let tokens = own.origin(rank).get(0) as usize;
                let part = slice(tokens, 1, block.index() as usize, block.count() as usize);
                token = token.wrapping_sub(shape.tokens_of_round(part, round).0);
            }
            // A token that does not exist, from a false header, is out of range.
            let item = match token < count / k {
                true => first + token * k + selection.k,
                false => usize::MAX,
            };
            // SAFETY: the precondition of this function.
            unsafe { self.send_result(s, own, self.target(peer, item), row) };
        }
        Ok(())
    }

    /// Returns the index of the first result of this block in a round.
    #[inline(always)]
    fn region<M: Machine>(&self, s: &Session<M>, round: usize) -> usize {
        let region = 2 * s.block().index() as usize + round % 2;
        region * self.shape.results_of_round()
    }

    /// Returns the range of result `item` at a rank.
    #[inline(always)]
    fn target(&self, peer: Rank, item: usize) -> Remote<'a, u32> {
        let words = self.shape.result as usize;
        // A result that does not exist is out of range.
        let first = match item {
            usize::MAX => usize::MAX,
            item => item.wrapping_mul(words),
        };
        self.results.at(peer).slice(first, words)
    }

    /// Writes the result in row `row` of `y`. All lanes of the warp together.
    ///
    /// # Safety
    /// On a GPU, the results must be aligned to 16 bytes.
    #[inline(always)]
    #[track_caller]
    unsafe fn send_result<M: Machine>(
        &self,
        s: &Session<M>,
        own: &Own<'_>,
        target: Remote<u32>,
        row: usize,
    ) {
        let (shape, block) = (&self.shape, s.block());
        let (words, warp) = (shape.input_words(), block.warp());
        let mut y = self.y.slice(row.wrapping_mul(words), words);
        if shape.flags.has(MoeFlags::FP8_RESULTS) {
            let quantizer = Quantizer {
                source: y,
                row: words,
                target: own.result(block),
                stride: shape.result as usize,
                payload: shape.hidden as usize / 4,
                is_ue8m0: false,
            };
            with_element!(shape.flags, T => {
                // SAFETY: the precondition of this function.
                unsafe { quantizer.run::<M, T>((block.machine(), warp), 1) };
            });
            warp.publish();
            y = own.result_to_send(block);
        }
        target.write(s, warp, y);
        if shape.flags.has(MoeFlags::FP8_RESULTS) {
            warp.sync(); // Before the lanes overwrite the result.
        }
    }

    /// Adds the results, after they have arrived. All lanes of the block together.
    ///
    /// # Safety
    /// On a GPU, the output must be aligned to 16 bytes.
    #[inline(always)]
    #[track_caller]
    unsafe fn receive<M: Machine>(
        &self,
        s: &Session<M>,
        own: Own<'a>,
        round: usize,
    ) -> Result<(), Aborted> {
        let (shape, block) = (&self.shape, s.block());
        let sum = self.sum(s, own)?;
        let mut tokens = block.slice(sum.tokens, 1);
        let regions = match own.mask().is_used() {
            true => s.ranks() as usize,
            false => 1,
        };
        let mut results = (0, regions * shape.results_of_rank());
        if shape.is_staged() {
            tokens = shape.tokens_of_round(tokens, round);
            results = (self.region(s, round), shape.results_of_round());
        }
        if own.mask().is_used() {
            let missing = self.missing.require(s, sum.tokens)?;
            for token in block.elements_of_block(tokens.1 - tokens.0) {
                missing.set(tokens.0 + token, sum.missing(tokens.0 + token));
            }
        }
        // SAFETY: the precondition of this function; the wait for the results has acquired them.
        unsafe { sum.run(s, tokens, results) };
        s.vote(Unvoted::new(()))
    }

    /// Checks the sizes of the arguments of the half that receives.
    ///
    /// # Errors
    /// [`Aborted`] on all lanes.
    #[inline(always)]
    #[track_caller]
    fn sum<M: Machine>(&self, s: &Session<M>, own: Own<'a>) -> Result<Sum<'a>, Aborted> {
        let (k, most) = (self.shape.k(), self.shape.max_tokens as usize);
        let tokens = self.ids.len() / k;
        let tokens = if tokens < most { tokens } else { most };
        let dispatched = own.tokens();
        let is_same = tokens == dispatched;
        s.ensure(is_same, TOKENS, dispatched as u64, tokens as u64)?;
        // SAFETY: the precondition of the kernel; the lanes only read.
        let (ids, weights) = unsafe {
            (
                Memory::read_only(s, self.ids, tokens * k)?,
                Memory::read_only(s, self.weights, tokens * k)?,
            )
        };
        Ok(Sum {
            ids,
            weights,
            results: self.results.local(s)?.elements().as_in(),
            out: self.out.require(s, tokens * self.shape.input_words())?,
            own,
            shape: self.shape,
            me: s.rank(),
            ranks: s.ranks(),
            tokens,
            base: 0,
        })
    }
}

/// Returns the index of the first result that `rank` writes.
#[inline(always)]
fn first_result(shape: &MoeShape, mask: Mask<'_>, rank: u32) -> usize {
    match mask.is_used() {
        true => rank as usize * shape.results_of_rank(),
        false => 0,
    }
}

/// The sums of the results of each token.
#[derive(Clone, Copy)]
struct Sum<'a> {
    ids: Memory<'a, i32>,
    weights: Memory<'a, f32>,
    /// The results of this rank's tokens, as words.
    results: In<'a, u32>,
    out: Out<'a, u32>,
    own: Own<'a>,
    shape: MoeShape,
    me: u32,
    ranks: u32,
    /// Number of tokens.
    tokens: usize,
    /// Index of the selection whose result comes first in `results`.
    base: usize,
}

impl Sum<'_> {
    /// Writes the sums of tokens `first .. last`. The results are `count` from `region` on; with
    /// staging, the first one is that of the first selection of token `first`. All lanes of the
    /// block together.
    ///
    /// # Safety
    /// The results must have been acquired. On a GPU, the output must be aligned to 16 bytes.
    #[inline(always)]
    unsafe fn run<M: Machine>(
        self,
        s: &Session<M>,
        tokens: (usize, usize),
        (region, count): (usize, usize),
    ) {
        let words = self.shape.result as usize;
        let results = self.results.slice(region * words, count * words);
        let base = match self.shape.is_staged() {
            true => tokens.0 * self.shape.k(),
            false => 0,
        };
        if results.len() < count * words {
            return; // An error has been recorded.
        }
        let sum = Self {
            results,
            base,
            ..self
        };
        with_element!(self.shape.flags, T => {
            // SAFETY: the precondition of this function; the number of results was checked.
            unsafe {
                if self.shape.flags.has(MoeFlags::FP8_RESULTS) {
                    sum.add::<M, T, Fp8, UNIT>(s, tokens);
                } else {
                    sum.add::<M, T, Same<T>, CHUNK>(s, tokens);
                }
            }
        });
    }

    /// Writes the sums of tokens `first .. last`, `N` elements at a time. All lanes of the block
    /// together.
    ///
    /// # Safety
    /// As [`Sum::run`].
    #[inline(always)]
    unsafe fn add<M: Machine, T: Element<Acc = f32>, R: Form, const N: usize>(
        self,
        s: &Session<M>,
        (first, last): (usize, usize),
    ) {
        let hidden = self.shape.hidden as usize;
        if M::LANES == 1 {
            for token in first..last {
                let mut at = 0;
                while at + LONG <= hidden {
                    // SAFETY: the token and the elements exist. There is one lane.
                    unsafe { self.chunk::<M, T, R, LONG>(token, at) };
                    at += LONG;
                }
                while at + N <= hidden {
                    // SAFETY: as above.
                    unsafe { self.chunk::<M, T, R, N>(token, at) };
                    at += N;
                }
            }
            return;
        }
        let chunks = hidden / N;
        for chunk in s.block().elements_of_block((last - first) * chunks) {
            // `chunks` is not 0 if there is a chunk, but the compiler cannot tell.
            let divisor = if chunks == 0 { 1 } else { chunks };
            let (token, at) = (first + chunk / divisor, chunk % divisor * N);
            // SAFETY: the token and the elements exist; each chunk goes to one lane.
            unsafe { self.chunk::<M, T, R, N>(token, at) };
        }
    }

    /// Returns the selections of a token whose expert is on a masked rank, as bits.
    #[inline(always)]
    fn missing(&self, token: usize) -> u32 {
        let (mut bits, top_k) = (0, self.shape.k());
        for k in 0..top_k {
            let item = token * top_k + k;
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
            return (is_selected, item - self.base);
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
    unsafe fn chunk<M: Machine, T: Element<Acc = f32>, R: Form, const N: usize>(
        &self,
        token: usize,
        at: usize,
    ) {
        let k = self.shape.k();
        let (mut item, end) = (token * k, (token + 1) * k);
        let mut sum = [0.0f32; N];
        if M::LANES == 1 {
            while item < end {
                if self.result(item).0 {
                    // SAFETY: the precondition of this function.
                    unsafe { self.load::<M, R, N>(item, at) }.add_to(&mut sum);
                }
                item += 1;
            }
        } else {
            // The loads of four results are in flight together, so they do not depend on the ids.
            // After the last selection, the last result is loaded again, but not added.
            while item < end {
                let last = end - 1;
                let clamped = |item: usize| if item < last { item } else { last };
                // SAFETY: as above.
                unsafe {
                    let first = self.load::<M, R, N>(item, at);
                    let second = self.load::<M, R, N>(clamped(item + 1), at);
                    let third = self.load::<M, R, N>(clamped(item + 2), at);
                    let fourth = self.load::<M, R, N>(clamped(item + 3), at);
                    first.add_to(&mut sum);
                    second.only_if(item + 1 < end).add_to(&mut sum);
                    third.only_if(item + 2 < end).add_to(&mut sum);
                    fourth.only_if(item + 3 < end).add_to(&mut sum);
                }
                item += 4;
            }
        }
        // SAFETY: the output has the elements of the token.
        unsafe {
            let to = self.out.as_ptr().cast::<T>();
            let to = to.add(token * self.shape.hidden as usize + at);
            chunk::write::<M, T, N>(to, chunk::narrow(sum));
        }
    }

    /// Loads elements `[at, at + N)` of the result of selection `item`.
    ///
    /// # Safety
    /// As [`Sum::chunk`], for the selection's token.
    #[inline(always)]
    unsafe fn load<M: Machine, R: Form, const N: usize>(
        &self,
        item: usize,
        at: usize,
    ) -> Weighted<R::Element, N> {
        let (is_selected, result) = self.result(item);
        let from = self.results.as_ptr();
        Weighted {
            is_selected,
            weight: self.weights.get(item),
            // SAFETY: the results have `hidden` elements for each selection of a token that exists,
            // in each region. The wait for the results has acquired them.
            scale: unsafe {
                R::scale(
                    from.add(result * self.shape.result as usize),
                    &self.shape,
                    at,
                )
            },
            // SAFETY: as above.
            values: unsafe {
                let from = from.add(result * self.shape.result as usize);
                chunk::read::<M, R::Element, N>(from.cast::<R::Element>().add(at))
            },
        }
    }
}

/// Form in which results arrive.
trait Form {
    /// Type of the elements.
    type Element: Element<Acc = f32>;

    /// Returns the scale of element `at` of a result.
    ///
    /// # Safety
    /// `result` must be valid for a result, and nothing may write it.
    unsafe fn scale(result: *const u32, shape: &MoeShape, at: usize) -> f32;
}

/// Results in the type of the tokens.
struct Same<T>(PhantomData<T>);

impl<T: Element<Acc = f32>> Form for Same<T> {
    type Element = T;

    #[inline(always)]
    unsafe fn scale(_result: *const u32, _shape: &MoeShape, _at: usize) -> f32 {
        1.0
    }
}

/// Results in fp8, with a scale for each group.
struct Fp8;

impl Form for Fp8 {
    type Element = E4m3;

    #[inline(always)]
    unsafe fn scale(result: *const u32, shape: &MoeShape, at: usize) -> f32 {
        let word = shape.hidden as usize / 4 + at / GROUP;
        // SAFETY: the precondition of this function: the scales follow the payload.
        f32::from_bits(unsafe { mem::read(result.add(word)) })
    }
}

/// A part of the result of a selection. If the selection has no expert, the values are unspecified.
struct Weighted<T, const N: usize> {
    is_selected: bool,
    weight: f32,
    scale: f32,
    values: [T; N],
}

impl<T: Element<Acc = f32>, const N: usize> Weighted<T, N> {
    /// Returns the same part if `exists` is true, and otherwise one that is not added.
    #[inline(always)]
    fn only_if(self, exists: bool) -> Self {
        let is_selected = self.is_selected && exists;
        Self {
            is_selected,
            ..self
        }
    }

    #[inline(always)]
    fn add_to(self, sum: &mut [f32; N]) {
        if self.is_selected {
            let values = chunk::widen(self.values);
            for i in 0..N {
                sum[i] += self.weight * (values[i] * self.scale);
            }
        }
    }
}
