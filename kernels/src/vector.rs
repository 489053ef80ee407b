//! Operations whose counts differ by rank and live in device memory: all_gather_v and all_to_all_v.
//! Protocol: rounds (`exchange`). A rank with nothing to send or receive takes part in every round,
//! so no credit is needed for zero counts.
//!
//! With its ready signal, a rank sends each peer the address and the length of that peer's data.
//! The peer compares the length with the one that it expects, so counts that disagree are reported
//! and corrupt nothing.

use fusewire_device::bulk;
use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::FailureKind;
use fusewire_device::mem::Policy;
use fusewire_device::session::Session;
use fusewire_device::{Aborted, Block, Group, In, Machine, Out, kernel, wait};

use crate::exchange::{CHUNKED, word};
use crate::{ALIGNMENT, Exchange};

/// Counts of the parts of a buffer, one for each rank, in device memory.
#[derive(Clone, Copy)]
struct Counts<'a>(In<'a, u64>);

impl Counts<'_> {
    #[inline(always)]
    fn of(self, rank: u32) -> usize {
        self.0.get(rank as usize) as usize
    }

    /// Returns the number of elements before the part of `rank`.
    #[inline(always)]
    fn before(self, rank: u32) -> usize {
        let mut sum = 0;
        let mut other = 0;
        while other < rank {
            sum += self.of(other);
            other += 1;
        }
        sum
    }

    /// Returns the first prefix sum of the counts that exceeds `capacity`.
    #[inline(always)]
    fn beyond(self, ranks: u32, capacity: usize) -> Option<usize> {
        let mut sum = 0usize;
        let mut rank = 0;
        while rank < ranks {
            // Sums before this one are at most the capacity, so only this addition can wrap.
            sum = sum.saturating_add(self.of(rank));
            if sum > capacity {
                return Some(sum);
            }
            rank += 1;
        }
        None
    }

    #[inline(always)]
    fn longest(self, ranks: u32) -> usize {
        let mut longest = 0;
        let mut rank = 0;
        while rank < ranks {
            longest = if self.of(rank) > longest {
                self.of(rank)
            } else {
                longest
            };
            rank += 1;
        }
        longest
    }
}

/// One rank's side of a vector operation: part p of the input is for rank p, part p of the output
/// from rank p.
#[derive(Clone, Copy)]
struct Vector<'a> {
    source: In<'a, u8>,
    send: Counts<'a>,
    /// True if the input is one part for all ranks, as in all_gather_v.
    same: bool,
    target: Out<'a, u8>,
    receive: Counts<'a>,
    exchange: Exchange,
}

impl Vector<'_> {
    /// Returns the bytes of an element.
    #[inline(always)]
    fn size(&self) -> usize {
        self.exchange.size as usize
    }

    /// Returns the offset and the length, in elements, of the data for `rank`.
    #[inline(always)]
    fn outgoing(&self, me: u32, rank: u32) -> (usize, usize) {
        if self.same {
            (0, self.send.of(me))
        } else {
            (self.send.before(rank), self.send.of(rank))
        }
    }

    /// Returns true if the counts fit the buffers; otherwise records a failure. The counts may have
    /// changed since the host checked them, in a graph or by an earlier kernel.
    #[inline(always)]
    fn check<M: Machine>(&self, session: &Session<M>) -> bool {
        let (block, me, ranks) = (session.block(), session.rank(), session.ranks());
        let log = self.exchange.size.trailing_zeros();
        let sources = self.source.len().wrapping_shr(log);
        let targets = self.target.len().wrapping_shr(log);
        let sent_beyond = if self.same {
            let own = self.send.of(me);
            (own > sources).then_some(own)
        } else {
            self.send.beyond(ranks, sources)
        };
        let beyond = match sent_beyond {
            Some(sum) => Some((sources, sum)),
            None => self
                .receive
                .beyond(ranks, targets)
                .map(|sum| (targets, sum)),
        };
        let Some((capacity, sum)) = beyond else {
            return true;
        };
        if block.is_leader() {
            session.ctx().fail(
                FailureKind::Counts,
                wait::WaitKind::Ready,
                me,
                me,
                capacity as u64,
                sum as u64,
                0,
            );
        }
        // The lanes that did not record the failure return together with the one that did.
        block.sync();
        false
    }

    /// Runs the operation. Returns false after a failure.
    ///
    /// # Safety
    /// As the kernels of this module.
    #[inline(always)]
    unsafe fn run<M: Machine>(&self, session: &mut Session<M>) -> bool {
        let block = session.block();
        let (me, ranks) = (session.rank(), session.ranks());
        if !self.check(session) {
            return false;
        }
        let (size, chunk) = (self.size(), self.exchange.chunk as usize);
        let workspace = *session.comm().workspace();
        let source_at = self.exchange.source_at;
        let staged = !source_at.is_some();
        let rows = if self.same { 1 } else { ranks };
        let stride = chunk.div_ceil(ALIGNMENT) * ALIGNMENT;
        let longest = self.send.longest(ranks);
        let mut all_longest = 0;
        let mut chunked = staged;
        let mut first_round = true;
        let mut start = 0;
        loop {
            if staged {
                let staging = session.comm().own(workspace.staging_in);
                for row in 0..rows {
                    let (offset, length) = self.outgoing(me, row);
                    let (first, last) = part(block, length, start, chunk, true);
                    let from = self.source.as_ptr();
                    // SAFETY: `check` has compared the counts with the input; a chunk of each row
                    // fits staging by the precondition.
                    unsafe {
                        bulk::copy(
                            block,
                            staging.add((row as usize * stride + first) * size),
                            from.add((offset + start + first) * size),
                            (last - first) * size,
                            Policy::Cached,
                        );
                    }
                }
            }
            let words = |peer: u32| {
                let (offset, length) = self.outgoing(me, peer);
                let addr = if staged {
                    let row = if self.same { 0 } else { peer as usize };
                    WindowAddr::new(0, workspace.staging_in + (row * stride * size) as u64)
                } else {
                    let at = source_at.offset() + (offset * size) as u64;
                    WindowAddr::new(source_at.window(), at)
                };
                let flags = if staged { CHUNKED } else { 0 };
                let mut words = [0; 7];
                words[word::SOURCE] = addr.0;
                words[word::FLAGS] = flags;
                words[word::COUNT] = length as u64;
                words[word::LONGEST] = longest as u64;
                words
            };
            if session.ready(words).is_err() {
                return false;
            }
            if first_round {
                first_round = false;
                for rank in 0..ranks {
                    chunked |= session.word(rank, word::FLAGS) & CHUNKED != 0;
                    let theirs = session.word(rank, word::LONGEST) as usize;
                    all_longest = if theirs > all_longest {
                        theirs
                    } else {
                        all_longest
                    };
                    let sent = session.word(rank, word::COUNT) as usize;
                    let expected = self.receive.of(rank);
                    if sent != expected {
                        if block.is_leader() {
                            session.ctx().fail(
                                FailureKind::Mismatch,
                                wait::WaitKind::Ready,
                                rank,
                                rank,
                                expected as u64,
                                sent as u64,
                                0,
                            );
                        }
                        // As in `check`.
                        block.sync();
                        session.abandon();
                        return false;
                    }
                }
            }
            let window = if chunked { chunk } else { all_longest };
            let mut to = 0;
            for rank in 0..ranks {
                let length = self.receive.of(rank);
                let (first, last) = part(block, length, start, window, chunked);
                let bytes = (last - first) * size;
                let target = (to + start + first) * size;
                let target = self.target.as_ptr().wrapping_add(target);
                to += length;
                if bytes == 0 {
                    continue;
                }
                let theirs_staged = session.word(rank, word::FLAGS) & CHUNKED != 0;
                let from = if rank == me {
                    let (offset, _) = self.outgoing(me, me);
                    let byte = (offset + start + first) * size;
                    Some(self.source.as_ptr().wrapping_add(byte))
                } else {
                    let index = if theirs_staged { first } else { start + first };
                    let addr = WindowAddr(session.word(rank, word::SOURCE));
                    let offset = addr.offset().wrapping_add((index * size) as u64);
                    let inside = WindowAddr::new(addr.window(), offset);
                    let staging = workspace.staging_out + (first * size) as u64;
                    session.pull(inside, rank, bytes as u64, staging)
                };
                let Some(from) = from else {
                    block.sync();
                    session.abandon();
                    return false;
                };
                if !core::ptr::eq(target, from) {
                    let policy = self.exchange.policy();
                    // SAFETY: the source was checked against its window, and `check` has compared
                    // the counts with the output.
                    unsafe { bulk::copy(block, target, from, bytes, policy) };
                }
            }
            block.sync();
            if session.done().is_err() {
                return false;
            }
            start += window;
            if start >= all_longest {
                return true;
            }
        }
    }
}

/// Returns the part that this block handles of the elements `[start, start + window)` of `length`,
/// relative to `start`. Blocks may be in different rounds: each keeps its area of staging, even in
/// a short last round.
#[inline(always)]
fn part<M: Machine>(
    block: Block<M>,
    length: usize,
    start: usize,
    window: usize,
    chunked: bool,
) -> (usize, usize) {
    let rest = length.saturating_sub(start);
    let length = if rest < window { rest } else { window };
    let cut = if chunked && block.count() > 1 {
        window
    } else {
        length
    };
    let (first, last) = block.slice(cut, ALIGNMENT);
    let clip = |at: usize| if at < length { at } else { length };
    (clip(first), clip(last))
}

/// Runs all_gather_v: `counts[rank]` units of every rank, in rank order without gaps, to every
/// rank's output. The launch fails if the counts exceed the buffers.
///
/// # Safety
/// `exchange` must have the window address of the input and the size of a unit, a power of two. A
/// chunk (for all_to_all_v, of each rank) must fit staging. During the launch, nothing else may
/// write the input or the counts, or access the output.
#[kernel]
pub unsafe fn all_gather_v(
    session: &mut Session<impl Machine>,
    source: In<u8>,
    target: Out<u8>,
    counts: In<u64>,
    #[words(6)] exchange: Exchange,
) -> Result<(), Aborted> {
    let counts = counts.require(session, session.ranks() as usize)?;
    let vector = Vector {
        source,
        send: Counts(counts),
        same: true,
        target,
        receive: Counts(counts),
        exchange,
    };
    // SAFETY: the precondition of this function.
    let moved = unsafe { vector.run(session) };
    session.settle(moved)
}

/// Runs all_to_all_v: `send_counts[p]` units to rank p, `receive_counts[p]` units from rank p, both
/// in rank order without gaps. The launch fails if the counts exceed the buffers.
///
/// # Safety
/// As [`all_gather_v`].
#[kernel]
pub unsafe fn all_to_all_v(
    session: &mut Session<impl Machine>,
    source: In<u8>,
    target: Out<u8>,
    send_counts: In<u64>,
    receive_counts: In<u64>,
    #[words(6)] exchange: Exchange,
) -> Result<(), Aborted> {
    let ranks = session.ranks() as usize;
    let vector = Vector {
        source,
        send: Counts(send_counts.require(session, ranks)?),
        same: false,
        target,
        receive: Counts(receive_counts.require(session, ranks)?),
        exchange,
    };
    // SAFETY: the precondition of this function.
    let moved = unsafe { vector.run(session) };
    session.settle(moved)
}
