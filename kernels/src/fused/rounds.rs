//! Rounds of a fused norm: the rows that a rank reduces, and their targets.
//!
//! Protocol: that of [`crate::exchange`], with three outputs instead of one. In the two-shot route,
//! peers write a rank's rows, their sums with the residual and their scales. If one of these
//! outputs is in no window, the rank receives all three in staging.
//!
//! - **Who may overwrite what:** a rank reads what peers wrote into its outputs or its staging, and
//!   overwrites its input, after a round;
//! - **after having acquired** every peer's done signal of that round;
//! - **released by** each peer after its last read of the input and its last write of the outputs.
//!
//! On all ranks, the block that reads a row is the one that writes it, and it reads all elements
//! before it writes the first. So in the two-shot route, the output may be the input.

use core::marker::PhantomData;

use fusewire_device::bulk::{self, Tables};
use fusewire_device::comm::WindowAddr;
use fusewire_device::mem::{self, Policy};
use fusewire_device::session::Session;
use fusewire_device::{Aborted, Element, Group, Machine};

use super::row::{Norm, Targets};
use super::spec::Route;
use super::sum::PulledRows;
use crate::exchange::{Body, CHUNKED, Memory, Part, Round, TARGET_STAGED, Words, word};

impl<T: Element<Acc = f32>> Norm<T> {
    /// Returns the bytes of a row of the output.
    #[inline(always)]
    fn out_bytes(&self) -> usize {
        self.spec().out_bytes(self.hidden(), size_of::<T>())
    }

    /// Returns the bytes of a row of the sums with the residual, or 0 if they are not wanted.
    #[inline(always)]
    fn kept_bytes(&self) -> usize {
        if self.keeps() {
            self.spec().residual_bytes(self.hidden(), size_of::<T>())
        } else {
            0
        }
    }

    /// Returns the number of computed scales of a row.
    #[inline(always)]
    fn groups(&self) -> usize {
        self.spec().scales(self.hidden())
    }

    /// Returns the strides of this rank's scales: from row to row, and from group to group.
    #[inline(always)]
    fn strides(&self) -> (u32, u32) {
        let stride = self.arguments().stride as u64;
        self.spec().strides(self.hidden(), stride)
    }

    /// Returns the offsets in staging of the three outputs.
    #[inline(always)]
    fn staged(&self) -> [usize; 3] {
        let chunk = self.arguments().chunk;
        let kept = (chunk * self.out_bytes()).next_multiple_of(16);
        let scales = (kept + chunk * self.kept_bytes()).next_multiple_of(16);
        [0, kept, scales]
    }

    /// Returns true if peers write this rank's outputs into staging.
    #[inline(always)]
    fn is_staged(&self) -> bool {
        let lacks = |addr: WindowAddr, bytes: usize| bytes > 0 && !addr.is_some();
        let arguments = self.arguments();
        self.spec().route() == Route::TwoShot
            && (!arguments.out_at.is_some()
                || lacks(arguments.kept_at, self.kept_bytes())
                || lacks(arguments.scales_at, self.groups()))
    }

    /// Sets target `index` to this rank's outputs from row `row` on.
    #[inline(always)]
    pub(super) fn set_own_target(&self, targets: Targets, index: u32, row: usize) {
        let (arguments, strides) = (self.arguments(), self.strides());
        let scale = row * strides.0 as usize * self.spec().scale_bytes();
        targets.set(
            index,
            arguments.out.wrapping_add(row * self.out_bytes()),
            arguments.kept.wrapping_add(row * self.kept_bytes()),
            arguments.scales.wrapping_add(scale),
            strides,
        );
    }

    /// Sets target `index` to a part of `rank`'s outputs. Returns false after a failure, which is
    /// recorded.
    #[inline(always)]
    fn set_target<M: Machine>(
        &self,
        session: &Session<M>,
        targets: Targets,
        (index, rank): (u32, u32),
        part: Part,
    ) -> bool {
        if rank == session.rank() || part.len() == 0 {
            self.set_own_target(targets, index, part.start());
            return true;
        }
        let staged = session.word(rank, word::FLAGS) & TARGET_STAGED != 0;
        let (row, strides) = if staged {
            (part.first(), (self.groups() as u32, 1))
        } else {
            (part.start(), self.strides())
        };
        let (out, kept, spec) = (self.out_bytes(), self.kept_bytes(), self.spec());
        let scale = row * strides.0 as usize * spec.scale_bytes();
        let scales = spec.scale_span(self.hidden(), part.len(), strides);
        let (Some(out), Some(kept), Some(scales)) = (
            target(session, rank, 0, row * out, part.len() * out),
            target(session, rank, 1, row * kept, part.len() * kept),
            target(session, rank, 2, scale, scales),
        ) else {
            return false;
        };
        targets.set(index, out, kept, scales, strides);
        true
    }

    /// Copies what peers wrote into staging, which `done` has acquired, to the outputs. This rank
    /// has written its own rows to the outputs. All lanes together.
    #[inline(always)]
    fn unstage<M: Machine>(&self, session: &Session<M>, memory: &Memory, round: Round) {
        let block = session.block();
        let staging = session.comm().own(session.comm().workspace().staging_out);
        let [out, kept, scales] = self.staged();
        let rows = |to: *mut u8, from: usize, bytes: usize, part: Part| {
            // SAFETY: the part is within the norm's rows, which the output has, and within a chunk,
            // for which staging has room (both by `Norm::new`).
            unsafe {
                bulk::copy_staged(
                    block,
                    to.wrapping_add(part.start() * bytes),
                    staging.wrapping_add(from + part.first() * bytes),
                    part.len() * bytes,
                    Policy::Cached,
                );
            }
        };
        let mut shard = 0;
        while shard < memory.layout().shards {
            if shard != session.rank() {
                let part = memory.part(block, round, shard);
                rows(self.arguments().out, out, self.out_bytes(), part);
                rows(self.arguments().kept, kept, self.kept_bytes(), part);
                self.unstage_scales(session, staging.wrapping_add(scales), part);
            }
            shard += 1;
        }
        block.sync();
    }

    /// Copies the scales of a part from `staged`, where they are row-major, to this rank's scales.
    /// All lanes together.
    #[inline(always)]
    fn unstage_scales<M: Machine>(&self, session: &Session<M>, staged: *const u8, part: Part) {
        let (groups, strides) = (self.groups(), self.strides());
        let bytes = self.spec().scale_bytes();
        let mut row = 0;
        while row < part.len() {
            for group in session.block().elements_of_block(groups) {
                let from = staged.wrapping_add(((part.first() + row) * groups + group) * bytes);
                let at = (part.start() + row) * strides.0 as usize + group * strides.1 as usize;
                let to = self.arguments().scales.wrapping_add(at * bytes);
                // SAFETY: a scale of a row of the part, as in `unstage`; each goes to one lane.
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

impl<M: Machine, T: Element<Acc = f32>> Body<M> for Norm<T> {
    #[inline(always)]
    fn words(&self, session: &Session<M>) -> Words {
        // The leader has written the arguments before this barrier.
        session.block().sync();
        if !self.is_staged() {
            let arguments = self.arguments();
            return Words {
                extra: [
                    arguments.out_at.0,
                    arguments.kept_at.0,
                    arguments.scales_at.0,
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
    fn round(
        &self,
        session: &mut Session<M>,
        memory: &Memory,
        round: Round,
    ) -> Result<(), Aborted> {
        let block = session.block();
        let (me, ranks) = (session.rank(), session.ranks());
        let (shard, source, count) = match self.spec().route() {
            Route::OneShot => (0, 0, 1),
            Route::TwoShot => (me, 0, ranks),
            Route::ReduceScatter => (0, me, 1),
        };
        let part = memory.part(block, round, shard);
        // SAFETY: a kernel with a norm uses the start of shared memory only for these tables and
        // the targets, which follow them. There are as many targets as ranks, or one; each is set
        // by one lane, and the block synchronizes before it reads them.
        let (tables, targets) =
            unsafe { (Tables::new(block, ranks), Targets::new(block, ranks, count)) };
        memory.fill_sources(session, tables, part, source)?;
        let mut failed = false;
        for index in block.elements_of_block(count as usize) {
            let index = index as u32;
            let rank = if count == 1 { me } else { index };
            failed |= !self.set_target(session, targets, (index, rank), part);
        }
        session.settle(!block.any(failed))?;
        let sums = PulledRows::<T> {
            tables,
            ranks,
            element: PhantomData,
        };
        // SAFETY: the exchange has the norm's rows (`Norm::new`), so this rank has those of the
        // part. `Memory` has checked the sources, and `set_target` the targets, against buffers or
        // windows. Until the done signals, no other block or rank accesses this part of them.
        let done = unsafe { self.each_row(block, targets, &sums, part.start(), part.len()) };
        session.settle(done)
    }

    #[inline(always)]
    fn finish(&self, session: &Session<M>, memory: &Memory, round: Round) {
        if self.is_staged() {
            self.unstage(session, memory, round);
        }
    }
}

/// Returns the address of `length` bytes from byte `start` of output `which` of `rank`: null if
/// there are none, and `None` after a failure, which is recorded. Not a closure: on AMD GPUs, a
/// reference in a closure would keep the session in local memory.
#[inline(always)]
fn target<M: Machine>(
    session: &Session<M>,
    rank: u32,
    which: usize,
    start: usize,
    length: usize,
) -> Option<*mut u8> {
    if length == 0 {
        return Some(core::ptr::null_mut());
    }
    let addr = WindowAddr(session.word(rank, word::EXTRA + which));
    let inside = WindowAddr::new(addr.window(), addr.offset().wrapping_add(start as u64));
    session.ctx().resolve(inside, rank, length as u64)
}
