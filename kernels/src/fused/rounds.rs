//! The rounds of a fused norm: whose rows a rank reduces, and where they go.
//!
//! Protocol: that of [`crate::exchange`], with three outputs instead of one. In the two-shot route
//! peers write a rank's rows, their sums with the residual and their scales; a rank that has one of
//! them in no window takes all three in staging.
//!
//! - **Who may overwrite what:** a rank reads what peers wrote into its outputs or its staging, and
//!   overwrites its input, after a round;
//! - **after having acquired** every peer's done signal of that round;
//! - **released by** each peer after its last read of the input and its last write of the outputs.
//!
//! A row is read by the very block that writes it, on all ranks, and all its elements are read
//! before the first is written; so the rows may be written over the input in the two-shot route.

use fusewire_device::bulk::{self, Tables};
use fusewire_device::comm::WindowAddr;
use fusewire_device::mem::{self, Policy};
use fusewire_device::session::Session;
use fusewire_device::{Block, Element, Group, Machine};

use super::row::{Norm, Targets};
use super::spec::Route;
use super::sum::PulledRows;
use crate::exchange::{Body, CHUNKED, Memory, Round, TARGET_STAGED, Words, word};

/// Work of a round.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounds<T> {
    pub(super) norm: Norm<T>,
}

impl<T: Element> Rounds<T> {
    fn out_bytes(&self) -> usize {
        self.norm.spec().out_bytes(self.norm.hidden, size_of::<T>())
    }

    fn kept_bytes(&self) -> usize {
        if self.norm.keeps() {
            self.norm
                .spec()
                .residual_bytes(self.norm.hidden, size_of::<T>())
        } else {
            0
        }
    }

    fn groups(&self) -> usize {
        self.norm.spec().scales(self.norm.hidden)
    }

    /// Where the three parts of staging begin.
    fn staged(&self) -> [usize; 3] {
        let kept = (self.norm.arguments().chunk * self.out_bytes()).next_multiple_of(16);
        let scales = (kept + self.norm.arguments().chunk * self.kept_bytes()).next_multiple_of(16);
        [0, kept, scales]
    }

    /// Distances of this rank's own scales: from row to row, and from group to group.
    fn strides(&self) -> (u32, u32) {
        if self.norm.spec().is_column_major() {
            (1, self.norm.arguments().stride as u32)
        } else {
            (self.groups() as u32, 1)
        }
    }

    /// Whether peers write this rank's rows into staging.
    fn is_staged(&self) -> bool {
        let lacks = |addr: WindowAddr, bytes: usize| bytes > 0 && !addr.is_some();
        self.norm.spec().route() == Route::TwoShot
            && (!self.norm.arguments().out_at.is_some()
                || lacks(self.norm.arguments().kept_at, self.kept_bytes())
                || lacks(self.norm.arguments().scales_at, self.groups()))
    }

    /// Fills entry `index` of the targets: `rank`'s rows `[first, first + length)` of the round.
    /// False after a failure.
    #[inline(always)]
    fn aim<M: Machine>(
        &self,
        session: &Session<M>,
        targets: Targets,
        (index, rank): (u32, u32),
        round: Round,
        (first, length): (usize, usize),
    ) -> bool {
        let bytes = self.norm.spec().scale_bytes();
        let row = round.start + first;
        if rank == session.comm().rank() || length == 0 {
            let strides = self.strides();
            targets.set(
                index,
                self.norm
                    .arguments()
                    .out
                    .wrapping_add(row * self.out_bytes()),
                self.norm
                    .arguments()
                    .kept
                    .wrapping_add(row * self.kept_bytes()),
                self.norm
                    .arguments()
                    .scales
                    .wrapping_add(row * strides.0 as usize * bytes),
                strides,
            );
            return true;
        }
        let staged = session.word(rank, word::FLAGS) & TARGET_STAGED != 0;
        let (row, strides) = if staged {
            (first, (self.groups() as u32, 1))
        } else {
            (row, self.strides())
        };
        let at = |which: usize, start: usize, length: usize| {
            if length == 0 {
                return Some(core::ptr::null_mut());
            }
            let addr = WindowAddr(session.word(rank, word::EXTRA + which));
            let inside = WindowAddr::new(addr.window(), addr.offset().wrapping_add(start as u64));
            bulk::resolve(session.comm(), session.ctx(), inside, rank, length as u64)
        };
        let (out, kept) = (self.out_bytes(), self.kept_bytes());
        let groups = self.groups();
        let span = if groups == 0 {
            0
        } else {
            (length - 1) * strides.0 as usize + (groups - 1) * strides.1 as usize + 1
        };
        let (Some(out), Some(kept), Some(scales)) = (
            at(0, row * out, length * out),
            at(1, row * kept, length * kept),
            at(2, row * strides.0 as usize * bytes, span * bytes),
        ) else {
            return false;
        };
        targets.set(index, out, kept, scales, strides);
        true
    }
}

impl<M: Machine, T: Element<Acc = f32>> Body<M> for Rounds<T> {
    #[inline(always)]
    fn words(&self, session: &Session<M>) -> Words {
        session.block().sync();
        if !self.is_staged() {
            return Words {
                extra: [
                    self.norm.arguments().out_at.0,
                    self.norm.arguments().kept_at.0,
                    self.norm.arguments().scales_at.0,
                ],
                flags: 0,
            };
        }
        let base = session.comm().workspace().staging_out;
        let [out, kept, scales] = self.staged();
        let addr = |at: usize| WindowAddr::new(0, base + at as u64).0;
        Words {
            extra: [addr(out), addr(kept), addr(scales)],
            flags: TARGET_STAGED | CHUNKED,
        }
    }

    #[inline(always)]
    unsafe fn round(&self, session: &mut Session<M>, memory: &Memory, round: Round) -> bool {
        // SAFETY: the caller's promise.
        unsafe { self.reduce_rows(session, memory, round) }
    }

    #[inline(always)]
    unsafe fn finish(&self, session: &Session<M>, memory: &Memory, round: Round) {
        if self.is_staged() {
            // SAFETY: the caller's promise.
            unsafe { self.unstage(session, memory, round) };
        }
    }
}

impl<T: Element<Acc = f32>> Rounds<T> {
    /// # Safety
    /// As [`Body::round`].
    #[inline(always)]
    unsafe fn reduce_rows<M: Machine>(
        &self,
        session: &Session<M>,
        memory: &Memory,
        round: Round,
    ) -> bool {
        let block = session.block();
        // SAFETY: the kernels of this module leave these bytes to the tables.
        let tables = unsafe { Tables::new(block, session.ranks()) };
        let (me, ranks) = (session.comm().rank(), session.comm().size());
        let route = self.norm.spec().route();
        let shard = if route == Route::TwoShot { me } else { 0 };
        let source = if route == Route::ReduceScatter { me } else { 0 };
        let (first, last) = memory.part(block, round, shard);
        let length = last - first;
        if !memory.fill_sources(session, tables, round, source as usize, first, length) {
            return false;
        }
        let count = if route == Route::TwoShot { ranks } else { 1 };
        let targets = Targets::new(block, ranks, count);
        let mut failed = false;
        for index in block.elements_of_block(count as usize) {
            let index = index as u32;
            let rank = if route == Route::TwoShot { index } else { me };
            failed |= !self.aim(session, targets, (index, rank), round, (first, length));
        }
        if block.any(failed) {
            return false;
        }
        block.sync();
        let sums = PulledRows::<T> {
            tables,
            ranks,
            element: core::marker::PhantomData,
        };
        let mut row = 0;
        while row < length {
            let residual = round.start + first + row;
            // SAFETY: rows of the caller's buffers, and of memory that was checked against its
            // window.
            unsafe {
                let Some(reduced) = self.norm.reduce(block, targets, &sums, row, residual) else {
                    return false;
                };
                self.norm.write(block, targets, &reduced, row);
            }
            row += 1;
        }
        block.sync();
        true
    }

    /// Copies what peers wrote into staging to where it belongs; this rank wrote its own rows there
    /// itself.
    ///
    /// # Safety
    /// Every peer's done signal of the round has been acquired; the rest as [`Body::round`].
    #[inline(always)]
    unsafe fn unstage<M: Machine>(&self, session: &Session<M>, memory: &Memory, round: Round) {
        let block: Block<M> = session.block();
        let staging = session.comm().own(session.comm().workspace().staging_out);
        let parts = self.staged();
        let rows = |to: *mut u8, part: usize, bytes: usize, first: usize, length: usize| {
            // SAFETY: within staging, and within the caller's output.
            unsafe {
                bulk::copy(
                    block,
                    to.wrapping_add((round.start + first) * bytes),
                    staging.wrapping_add(part + first * bytes),
                    length * bytes,
                    Policy::Cached,
                );
            }
        };
        let mut shard = 0;
        while shard < memory.shards {
            if shard != session.comm().rank() {
                let (first, last) = memory.part(block, round, shard);
                let length = last - first;
                rows(
                    self.norm.arguments().out,
                    parts[0],
                    self.out_bytes(),
                    first,
                    length,
                );
                rows(
                    self.norm.arguments().kept,
                    parts[1],
                    self.kept_bytes(),
                    first,
                    length,
                );
                // SAFETY: as above.
                unsafe {
                    self.unstage_scales(
                        block,
                        staging.wrapping_add(parts[2]),
                        round,
                        first,
                        length,
                    );
                }
            }
            shard += 1;
        }
        block.sync();
    }

    /// # Safety
    /// As [`Rounds::unstage`].
    #[inline(always)]
    unsafe fn unstage_scales<M: Machine>(
        &self,
        block: Block<M>,
        staged: *const u8,
        round: Round,
        first: usize,
        length: usize,
    ) {
        let groups = self.groups();
        let bytes = self.norm.spec().scale_bytes();
        let strides = self.strides();
        let mut row = 0;
        while row < length {
            for group in block.elements_of_block(groups) {
                let from = staged.wrapping_add(((first + row) * groups + group) * bytes);
                let at =
                    (round.start + first + row) * strides.0 as usize + group * strides.1 as usize;
                let to = self.norm.arguments().scales.wrapping_add(at * bytes);
                // SAFETY: within staging, and within the caller's scales.
                unsafe {
                    if bytes == 1 {
                        mem::write(to, mem::read(from));
                    } else {
                        mem::write(to.cast::<u32>(), mem::read(from.cast::<u32>()));
                    }
                }
            }
            row += 1;
        }
    }
}
