//! Operations whose counts differ by rank and live in device memory: all_gather_v and all_to_all_v.
//! Protocol: rounds, as in the other movements; a rank with nothing to send or receive takes part
//! in every round, so no credit is needed for zero counts.
//!
//! With its ready signal a rank sends each peer the address and the length of that peer's data; the
//! peer compares the length with what it expects, so splits that disagree are a mismatch, not
//! corruption.

use fusewire_device::bulk;
use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::FailureKind;
use fusewire_device::mem::{self, Policy};
use fusewire_device::session::Session;
use fusewire_device::{Aborted, Block, Group, Machine, kernel, wait};

use crate::exchange::{CHUNKED, word};
use crate::{ALIGNMENT, policy};

/// Counts of the parts of a buffer, one a rank, in device memory.
#[derive(Clone, Copy)]
struct Counts(*const u64);

impl Counts {
    #[inline(always)]
    fn of(self, rank: u32) -> usize {
        // SAFETY: promised to the kernel: one count a rank.
        unsafe { mem::read(self.0.wrapping_add(rank as usize)) as usize }
    }

    /// Elements before the part of `rank`.
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

    /// The first sum of parts that is more than `capacity` elements.
    #[inline(always)]
    fn beyond(self, ranks: u32, capacity: usize) -> Option<usize> {
        let mut sum = 0usize;
        let mut rank = 0;
        while rank < ranks {
            // No part of the sum is more than the capacity, so only the last addition can wrap.
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

/// One rank's side of a vector operation: part p of the input is for rank p, part p of
/// the output from rank p. all_gather_v has the same part for everyone.
#[derive(Clone, Copy)]
struct Vector {
    size: usize,
    source: *const u8,
    source_at: WindowAddr,
    /// Elements that there are in the input.
    source_count: usize,
    send: Counts,
    /// True if there is one part for all instead of one for each.
    same: bool,
    target: *mut u8,
    /// Elements that there are in the output.
    target_count: usize,
    receive: Counts,
    chunk: usize,
}

impl Vector {
    /// Offset and length, in elements, of what goes to `rank`.
    #[inline(always)]
    fn outgoing(&self, me: u32, rank: u32) -> (usize, usize) {
        if self.same {
            (0, self.send.of(me))
        } else {
            (self.send.before(rank), self.send.of(rank))
        }
    }

    /// # Safety
    /// As the kernels below promise.
    #[inline(always)]
    unsafe fn run<M: Machine>(&self, session: &mut Session<M>, policy: Policy) -> bool {
        let block = session.block();
        let (me, ranks) = (session.comm().rank(), session.comm().size());
        // Counts may have changed since the host saw them: in a graph, or by a kernel before this
        // one.
        let sent_beyond = if self.same {
            let own = self.send.of(me);
            (own > self.source_count).then_some(own)
        } else {
            self.send.beyond(ranks, self.source_count)
        };
        let beyond = match sent_beyond {
            Some(sum) => Some((self.source_count, sum)),
            None => self
                .receive
                .beyond(ranks, self.target_count)
                .map(|sum| (self.target_count, sum)),
        };
        if let Some((capacity, sum)) = beyond {
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
            return false;
        }
        let workspace = *session.comm().workspace();
        let staged = !self.source_at.is_some();
        let rows = if self.same { 1 } else { ranks };
        let stride = self.chunk.div_ceil(ALIGNMENT) * ALIGNMENT;
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
                    let (first, last) = part(block, length, start, self.chunk, true);
                    // SAFETY: within the caller's part, and within staging.
                    unsafe {
                        bulk::copy(
                            block,
                            staging.add((row as usize * stride + first) * self.size),
                            self.source.add((offset + start + first) * self.size),
                            (last - first) * self.size,
                            Policy::Cached,
                        );
                    }
                }
            }
            let words = |peer: u32| {
                let (offset, length) = self.outgoing(me, peer);
                let addr = if staged {
                    let row = if self.same { 0 } else { peer as usize };
                    WindowAddr::new(0, workspace.staging_in + (row * stride * self.size) as u64)
                } else {
                    let at = self.source_at.offset() + (offset * self.size) as u64;
                    WindowAddr::new(self.source_at.window(), at)
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
                        // As above.
                        block.sync();
                        return false;
                    }
                }
            }
            let window = if chunked { self.chunk } else { all_longest };
            let mut to = 0;
            for rank in 0..ranks {
                let length = self.receive.of(rank);
                let (first, last) = part(block, length, start, window, chunked);
                let bytes = (last - first) * self.size;
                let target = self.target.wrapping_add((to + start + first) * self.size);
                to += length;
                if bytes == 0 {
                    continue;
                }
                let theirs_staged = session.word(rank, word::FLAGS) & CHUNKED != 0;
                let from = if rank == me {
                    let (offset, _) = self.outgoing(me, me);
                    Some(
                        self.source
                            .wrapping_add((offset + start + first) * self.size),
                    )
                } else {
                    let index = if theirs_staged { first } else { start + first };
                    let addr = WindowAddr(session.word(rank, word::SOURCE));
                    let offset = addr.offset().wrapping_add((index * self.size) as u64);
                    let inside = WindowAddr::new(addr.window(), offset);
                    let staging = workspace.staging_out + (first * self.size) as u64;
                    session.pull(inside, rank, bytes as u64, staging)
                };
                let Some(from) = from else {
                    block.sync();
                    return false;
                };
                if !core::ptr::eq(target, from) {
                    // SAFETY: the source was checked against its window; the target is the
                    // caller's.
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

/// The part that this block handles of the elements `[start, start + window)` of `length`, relative
/// to `start`. Blocks may be rounds apart: in staging each keeps its area, however short the rest
/// is.
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

/// Runs all_gather_v: `counts[rank]` units of every rank, one after the other, to every rank's
/// output.
///
/// # Safety
/// `counts` one count a rank, the same on all ranks; the
/// buffers valid for `source_count` and `target_count` units, which counts that are greater do not
/// exceed: they fail; `chunk` units (a multiple of [`crate::ALIGNMENT`]) must fit staging.
#[kernel]
pub unsafe fn all_gather_v(
    session: &mut Session<impl Machine>,
    size: u64,
    source: *const u8,
    source_at: u64,
    source_count: u64,
    target: *mut u8,
    target_count: u64,
    counts: *const u64,
    chunk: u64,
    hint: u32,
) -> Result<(), Aborted> {
    let vector = Vector {
        size: size as usize,
        source,
        source_at: WindowAddr(source_at),
        source_count: source_count as usize,
        send: Counts(counts),
        same: true,
        target,
        target_count: target_count as usize,
        receive: Counts(counts),
        chunk: chunk as usize,
    };
    // SAFETY: the caller's promise.
    let done = unsafe { vector.run(session, policy(hint)) };
    session.settle(done)
}

/// Runs all_to_all_v: `send_counts[p]` units to rank p, `receive_counts[p]` units from rank p, both
/// in rank order without gaps.
///
/// # Safety
/// One count a rank in both arrays, the buffers valid for
/// `source_count` and `target_count` units, which counts that are greater do not exceed: they fail;
/// `chunk` units times the number of ranks (a multiple of [`crate::ALIGNMENT`]) must fit staging.
#[kernel]
pub unsafe fn all_to_all_v(
    session: &mut Session<impl Machine>,
    size: u64,
    source: *const u8,
    source_at: u64,
    source_count: u64,
    target: *mut u8,
    target_count: u64,
    send_counts: *const u64,
    receive_counts: *const u64,
    chunk: u64,
    hint: u32,
) -> Result<(), Aborted> {
    let vector = Vector {
        size: size as usize,
        source,
        source_at: WindowAddr(source_at),
        source_count: source_count as usize,
        send: Counts(send_counts),
        same: false,
        target,
        target_count: target_count as usize,
        receive: Counts(receive_counts),
        chunk: chunk as usize,
    };
    // SAFETY: the caller's promise.
    let done = unsafe { vector.run(session, policy(hint)) };
    session.settle(done)
}
