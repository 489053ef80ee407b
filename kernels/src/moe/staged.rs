//! Dispatch and combine of many tokens, through staging of a bounded size.
//!
//! Each block sends its tokens in *rounds* of [`MoeShape::staging`] tokens. All ranks know the
//! tokens of all ranks from the announcements, so block b of every rank takes part in as many
//! rounds as block b of the rank with the most tokens needs.
//!
//! In dispatch, block b sends the rows of its tokens to block b of every rank, and raises
//! [`ROWS`](super::ROWS); the receiver copies the rows to the result, and keeps their headers. In
//! combine, block b writes the results of the rows that it has received in the same round of
//! dispatch, and raises [`RESULTS`](super::RESULTS). For both, a rank has a region for the even
//! rounds of each block, and one for the odd rounds.
//!
//! - **Who may overwrite what:** a rank overwrites its rows of round r at a peer in round r + 2,
//!   and likewise its results,
//! - **after having acquired** the peer's signal [`ROWS`](super::ROWS) of round r + 1, or
//!   [`RESULTS`](super::RESULTS) for results. The rows and results of the last two rounds: the
//!   peer's signal [`COUNTS`](super::COUNTS) of the next dispatch, or [`AGAIN`](super::AGAIN) of
//!   the next combine without a dispatch between them,
//! - **released by** the peer, after the launch in which it has copied the rows or added the
//!   results.
//!
//! Each rank takes part in each round, even if it has no tokens left.

use fusewire_device::session::{Aborted, Session};
use fusewire_device::{Group, Machine};

use super::arrived::{Arrived, place_of};
use super::dispatch::{Description, Dispatch};
use super::routing::Own;
use super::shape::{MoeFlags, NONE, ORIGIN};
use super::{ANNOUNCEMENT, CAPACITY};

impl<'a> Dispatch<'a> {
    /// Describes the result, as far as the announcements determine it, and computes the number of
    /// rounds. All lanes of the block together.
    ///
    /// # Errors
    /// [`Aborted`] if the announced rows exceed the capacity.
    #[inline(always)]
    #[track_caller]
    pub(super) fn describe_staged<M: Machine>(
        &self,
        s: &Session<M>,
        own: &Own<'a>,
    ) -> Result<(), Aborted> {
        let (block, shape) = (s.block(), &self.shape);
        let arrived = &Arrived::new(s, self.shape, &self.rows, *own, 0)?;
        // SAFETY: the precondition of the kernel.
        let meta = &unsafe { Description::new(s, self.shape, self.meta)? };
        let (_, ranks, blocks) = place_of(s);
        let (is_expert_major, writes) =
            (shape.flags.has(MoeFlags::EXPERT_MAJOR), block.index() == 0);
        let (mut first, mut start) = (0, 0u64);
        // All lanes stay in the loop, because of the scan.
        while first < ranks {
            let rank = first + block.rank() as usize;
            first += block.size() as usize;
            let total = if rank < ranks {
                arrived.total(rank as u32)
            } else {
                0
            };
            let (before, all) = block.exclusive_sum(u64::from(total));
            if rank < ranks {
                let origin = own.origin(rank as u32);
                let before = (start + before) as u32;
                origin.set(0, arrived.tokens(rank as u32));
                let (first, _) = arrived.announced_of_block(rank as u32);
                origin.set(1, before.wrapping_add(first));
                origin.set(ORIGIN, 0);
                if writes && !is_expert_major {
                    let end = before.wrapping_add(total);
                    meta.words.set(meta.layout.offsets_at + rank + 1, end);
                }
            }
            start += all;
        }
        let capacity = u64::from(shape.capacity);
        s.ensure(start <= capacity, CAPACITY, start, capacity)?;
        if is_expert_major {
            self.place_experts(s, arrived, own, meta)?;
        } else {
            if writes {
                self.count_ranks(s, arrived, meta);
                if block.is_leader() {
                    meta.words.set(meta.layout.offsets_at, 0);
                }
            }
            // Marks the rows after the last one as unused.
            let k = shape.k();
            let first = meta.layout.ids_at + start as usize * k;
            for item in block.elements((shape.capacity as usize).saturating_sub(start as usize) * k)
            {
                meta.words.set(first + item, NONE);
            }
        }
        block.sync();
        // One round without rows also proves that the peers have read the announcements.
        let (mut most, mut rank) = (1, 0);
        while rank < ranks {
            let rounds = shape.rounds(own.origin(rank as u32).get(0) as usize, blocks);
            most = if rounds > most { rounds } else { most };
            rank += 1;
        }
        if block.is_leader() {
            own.set_rounds(most);
            own.set_round(0);
        }
        Ok(())
    }

    /// Writes the number of rows for each rank in a round. All lanes of the block together.
    #[inline(always)]
    #[track_caller]
    pub(super) fn send_counts<M: Machine>(
        &self,
        s: &Session<M>,
        own: &Own<'a>,
        (first, last): (usize, usize),
        region: usize,
    ) {
        let (block, k) = (s.block(), self.shape.k());
        let (slots, items, warp) = (own.slots(), (last - first) * k, block.warp());
        let (lane, lanes) = match M::LANES {
            1 => (0, 1),
            _ => (warp.rank() as usize, warp.size() as usize),
        };
        for rank in block.elements_of_warp(s.ranks() as usize) {
            let (mut count, mut item) = (0, 0);
            // All lanes stay in the loop, because of the ballot.
            while item < items {
                let at = first * k + item + lane;
                let is_row =
                    item + lane < items && slots.get(at) != NONE && own.rank(at) == rank as u32;
                count += match M::LANES {
                    1 => u32::from(is_row),
                    _ => warp.ballot(is_row).count_ones(),
                };
                item += lanes;
            }
            if warp.is_leader()
                && let Some(peer) = s.peer(rank as u32)
            {
                self.rows.at(peer).store(s, region, [count]);
            }
        }
    }

    /// Keeps the headers of the rows of a round. In rank-major order, also copies the rows to the
    /// result. All lanes of the block together.
    #[inline(always)]
    pub(super) fn keep<M: Machine>(
        &self,
        s: &Session<M>,
        arrived: &Arrived<'_>,
        own: &Own<'a>,
        meta: &Description<'a>,
        round: usize,
    ) {
        let (block, shape) = (s.block(), &self.shape);
        let (warp, k, words) = (block.warp(), shape.k(), shape.header_words());
        for rank in 0..s.ranks() {
            let (origin, (first, count)) = (own.origin(rank), arrived.of_block(rank));
            if block.is_leader() {
                let end = (first + count) as u32;
                origin.set(ORIGIN + round + 1, end);
                let (_, announced) = arrived.announced_of_block(rank);
                let is_last = round + 1 == own.rounds();
                if end > announced || is_last && end < announced {
                    s.fault(ANNOUNCEMENT, u64::from(rank), u64::from(end));
                }
            }
            for slot in block.elements_of_warp(count) {
                let (header, slot) = (arrived.header(rank, first + slot), first + slot);
                let row = own.kept_index(rank, slot);
                let kept = own.kept(row);
                for word in warp.elements_of_group(words) {
                    kept.set(word, header.get(word));
                }
                if !shape.flags.has(MoeFlags::EXPERT_MAJOR) && row < shape.capacity as usize {
                    self.copy_row(warp, arrived.row(rank, slot), row);
                    for k_of in warp.elements_of_group(k) {
                        let selection = arrived.selection(rank, slot, k_of);
                        let expert = arrived.expert_here(selection.place);
                        meta.set_selection(row * k + k_of, expert, selection.weight);
                        if k_of == 0 {
                            meta.set_source(row, rank, selection.token);
                        }
                    }
                }
            }
        }
    }
}
