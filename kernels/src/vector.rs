//! Operations whose counts differ by rank and live in device memory: all_gather_v and all_to_all_v.
//! Protocol: rounds (`exchange`). A rank with nothing to send or receive takes part in every round,
//! so no credit is needed for zero counts.
//!
//! With its ready signal, a rank sends each peer the address and the length of that peer's data.
//! The peer compares the length with the one that it expects, so counts that disagree are reported
//! and corrupt nothing.

use fusewire_device::arch;
use fusewire_device::bulk::{self, Tables};
use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::FailureKind;
use fusewire_device::mem::Policy;
use fusewire_device::session::Session;
use fusewire_device::{Aborted, Block, Group, In, Machine, Out, kernel, wait};

use crate::exchange::{CHUNKED, word};
use crate::fused::MAX_RANKS;
use crate::{ALIGNMENT, Exchange};

/// The parts of a buffer, one for each rank, in rank order without gaps.
///
/// The counts lie in memory that a put of a peer may write during the launch. Each block reads them
/// once and keeps the offsets of the parts in its shared memory, so that all lanes use the values
/// that were compared with the buffer.
#[derive(Clone, Copy)]
struct Parts {
    /// The offset of each rank's part, and the end of the last part, in elements.
    offsets: *mut u64,
    ranks: u32,
}

impl Parts {
    /// Returns the bytes of shared memory for the parts of `ranks` ranks.
    const fn bytes(ranks: u32) -> usize {
        (ranks as usize + 1) * size_of::<u64>()
    }

    /// Reads `counts`, which has one element for each rank. `at` is the number of [`Parts`] before
    /// this one in the shared memory. All lanes of the block together.
    ///
    /// # Safety
    /// Nothing else may use this part of the shared memory.
    #[inline(always)]
    unsafe fn read<M: Machine>(session: &Session<M>, counts: In<u64>, at: usize) -> Self {
        let (block, ranks) = (session.block(), session.ranks());
        let offsets = block.shared().wrapping_add(at * Self::bytes(ranks)).cast();
        let parts = Self { offsets, ranks };
        // All counts at once, because each may be a memory round trip.
        for rank in block.elements_of_block(ranks as usize) {
            parts.set(rank as u32, counts.get(rank));
        }
        block.sync();
        if block.is_leader() {
            let mut end = 0u64;
            let mut rank = 0;
            while rank < ranks {
                let count = parts.get(rank);
                parts.set(rank, end);
                // A sum that would overflow saturates, and `Vector::check` then refuses the parts.
                end = end.saturating_add(count);
                rank += 1;
            }
            parts.set(ranks, end);
        }
        block.sync();
        parts
    }

    #[inline(always)]
    fn set(self, index: u32, offset: u64) {
        // SAFETY: `index <= ranks`; one lane writes an entry before each barrier of `read`.
        unsafe { self.offsets.add(index as usize).write(offset) };
    }

    #[inline(always)]
    fn get(self, index: u32) -> u64 {
        // SAFETY: `index <= ranks`; the entry was written before a barrier of `read`.
        unsafe { self.offsets.add(index as usize).read() }
    }

    /// Returns the offset of the part of `rank`, or the end of all parts for the number of ranks.
    #[inline(always)]
    fn offset(self, rank: u32) -> usize {
        self.get(rank) as usize
    }

    /// Returns the number of elements of the part of `rank`.
    #[inline(always)]
    fn count(self, rank: u32) -> usize {
        self.offset(rank + 1) - self.offset(rank)
    }

    /// Returns the number of elements of all parts.
    #[inline(always)]
    fn total(self) -> usize {
        self.offset(self.ranks)
    }

    /// Returns the number of elements of the longest part.
    #[inline(always)]
    fn longest(self) -> usize {
        let mut longest = 0;
        let mut rank = 0;
        while rank < self.ranks {
            let count = self.count(rank);
            longest = if count > longest { count } else { longest };
            rank += 1;
        }
        longest
    }
}

/// Returns the offset in shared memory of the tables for the copies. They follow the parts of the
/// input and of the output.
const fn tables_at(ranks: u32) -> usize {
    2 * Parts::bytes(ranks)
}

const _: () = {
    let used = tables_at(MAX_RANKS) + Tables::bytes(MAX_RANKS);
    assert!(used <= arch::SHARED_BYTES - arch::RESERVED_BYTES);
};

/// One rank's side of a vector operation: part p of the input is for rank p, part p of the output
/// from rank p.
#[derive(Clone, Copy)]
struct Vector<'a> {
    source: In<'a, u8>,
    send: Parts,
    /// True if the input is one part for all ranks, as in all_gather_v.
    same: bool,
    target: Out<'a, u8>,
    receive: Parts,
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
            (0, self.send.count(me))
        } else {
            (self.send.offset(rank), self.send.count(rank))
        }
    }

    /// Returns true if the parts fit the buffers; otherwise records a failure. The counts may have
    /// changed since the host checked them, in a graph or by an earlier kernel.
    #[inline(always)]
    fn check<M: Machine>(&self, session: &Session<M>) -> bool {
        let (block, me) = (session.block(), session.rank());
        let log = self.exchange.size.trailing_zeros();
        let sources = self.source.len().wrapping_shr(log);
        let targets = self.target.len().wrapping_shr(log);
        let sent = if self.same {
            self.send.count(me)
        } else {
            self.send.total()
        };
        let received = self.receive.total();
        let (capacity, sum) = if sent > sources {
            (sources, sent)
        } else {
            (targets, received)
        };
        if sum <= capacity {
            return true;
        }
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
        let longest = self.send.longest();
        let mut all_longest = 0;
        let mut chunked = staged;
        let mut first_round = true;
        let mut start = 0;
        // SAFETY: the tables follow the parts, and nothing else uses their memory.
        let tables = unsafe { Tables::new_at(block, ranks, tables_at(ranks)) };
        loop {
            if staged {
                let staging = session.comm().own(workspace.staging_in);
                for row in block.elements_of_block(rows as usize) {
                    let (offset, length) = self.outgoing(me, row as u32);
                    let (first, last) = part(block, length, start, chunk, true);
                    let from = (offset + start + first) * size;
                    let from = self.source.as_ptr().wrapping_add(from);
                    let to = staging.wrapping_add((row * stride + first) * size);
                    tables.set_source(row as u32, from, ((last - first) * size) as u64);
                    tables.set_target(row as u32, to);
                }
                block.sync();
                // SAFETY: the lanes have set an entry for each row, and passed a barrier. `check`
                // has compared the counts with the input; a chunk of each row fits staging by the
                // precondition.
                unsafe { bulk::copy_rows(block, tables, rows, Policy::Cached) };
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
                    let expected = self.receive.count(rank);
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
            let mut failed = false;
            for rank in block.elements_of_block(ranks as usize) {
                let rank = rank as u32;
                let (to, length) = (self.receive.offset(rank), self.receive.count(rank));
                let (first, last) = part(block, length, start, window, chunked);
                let bytes = (last - first) * size;
                let target = (to + start + first) * size;
                let target = self.target.as_ptr().wrapping_add(target);
                let from = if bytes == 0 {
                    Some(target.cast_const())
                } else if rank == me {
                    let (offset, _) = self.outgoing(me, me);
                    let byte = (offset + start + first) * size;
                    Some(self.source.as_ptr().wrapping_add(byte))
                } else {
                    let theirs_staged = session.word(rank, word::FLAGS) & CHUNKED != 0;
                    let index = if theirs_staged { first } else { start + first };
                    let addr = WindowAddr(session.word(rank, word::SOURCE));
                    let offset = addr.offset().wrapping_add((index * size) as u64);
                    let inside = WindowAddr::new(addr.window(), offset);
                    let copy = (rank as usize * stride + first) * size;
                    let staging = workspace.staging_out + copy as u64;
                    session.fetch(inside, rank, bytes as u64, staging)
                };
                match from {
                    Some(from) => tables.set_source(rank, from, bytes as u64),
                    None => failed = true,
                }
                tables.set_target(rank, target);
            }
            if block.any(failed) || !session.fetched() {
                session.abandon();
                return false;
            }
            // SAFETY: the lanes have set an entry for each rank, and passed a barrier. The sources
            // were checked against their windows, and `check` has compared the counts with the
            // output.
            unsafe { bulk::copy_rows(block, tables, ranks, self.exchange.policy()) };
            block.sync();
            // SAFETY: since the round was opened, the block has written only this rank's output,
            // which peers do not read.
            if unsafe { session.done_after(false) }.is_err() {
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
/// write the input, or access the output.
#[kernel]
pub unsafe fn all_gather_v(
    session: &mut Session<impl Machine>,
    source: In<u8>,
    target: Out<u8>,
    counts: In<u64>,
    #[words(6)] exchange: Exchange,
) -> Result<(), Aborted> {
    let counts = counts.require(session, session.ranks() as usize)?;
    // SAFETY: nothing else in this kernel uses shared memory.
    let parts = unsafe { Parts::read(session, counts, 0) };
    let vector = Vector {
        source,
        send: parts,
        same: true,
        target,
        receive: parts,
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
    let send = send_counts.require(session, ranks)?;
    let receive = receive_counts.require(session, ranks)?;
    // SAFETY: nothing else in this kernel uses shared memory; the two tables are disjoint.
    let [send, receive] = unsafe {
        [
            Parts::read(session, send, 0),
            Parts::read(session, receive, 1),
        ]
    };
    let vector = Vector {
        source,
        send,
        same: false,
        target,
        receive,
        exchange,
    };
    // SAFETY: the precondition of this function.
    let moved = unsafe { vector.run(session) };
    session.settle(moved)
}
