//! Reductions in rank order with Fusewire's rounding. The results are bitwise identical to those of
//! the kernels on one host.

use core::ops::Range;

use fusewire_device::element::{Ordered, Reduction, WithReduction, dispatch};
use fusewire_device::{DType, Element};

use super::{Backend, Clock, Hierarchy, Message, scratch};
use crate::Result;
use crate::options::ReduceOp;

/// Number of elements that are reduced at a time. Their accumulators fit in the L1 cache.
const BLOCK: usize = 512;

impl Hierarchy {
    /// Gathers the inputs of all ranks on every rank. Then `root`, or every rank if `root` is
    /// `None`, reduces the inputs.
    ///
    /// # Safety
    /// The preconditions of [`Backend::all_reduce`] and [`Backend::reduce`].
    pub(super) unsafe fn reduce_gathered(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        root: Option<u32>,
        clock: &Clock,
    ) -> Result<()> {
        let name = if root.is_some() {
            "reduce"
        } else {
            "all_reduce"
        };
        let bytes = clock.bytes(count);
        let scalars = self.scalars(op, name, clock)?;
        let mut rows = scratch(bytes * self.size() as usize);
        let all = rows.as_mut_ptr().cast::<u8>();
        // SAFETY: `from` holds `count` elements by the preconditions, and `rows` holds one input
        // per rank.
        unsafe {
            self.all
                .all_gather(from, all, count, &clock.args())
                .map_err(self.between_failed(name))?;
            if root.is_none_or(|root| root == self.rank) {
                let rows: Vec<_> = rows_of(all, bytes, scalars.len());
                fold(&rows, &scalars, to, count, clock.args.dtype, op);
            }
        }
        Ok(())
    }

    /// Reduces one shard of the inputs on each rank, then gathers the reduced shards on all ranks.
    ///
    /// # Safety
    /// The preconditions of [`Backend::all_reduce`].
    pub(super) unsafe fn all_reduce_ordered(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        clock: &Clock,
    ) -> Result<()> {
        let shards = self.shards(count);
        let own = shards[self.rank as usize].clone();
        let target = to.wrapping_add(clock.bytes(own.start));
        // SAFETY: every shard lies within the buffers. If the operation runs in place, `reduce_own`
        // writes this rank's shard only after it has sent all other shards.
        unsafe { self.reduce_own(from, target, &shards, op, "all_reduce", clock)? };
        let others = (0..self.size()).filter(|peer| *peer != self.rank);
        let messages = others.flat_map(|peer| {
            let theirs = &shards[peer as usize];
            let target = |shard: &Range<usize>| to.wrapping_add(clock.bytes(shard.start));
            [
                message(true, target(&own), own.len(), peer, clock),
                message(false, target(theirs), theirs.len(), peer, clock),
            ]
        });
        let messages: Vec<_> = messages.filter(|message| message.bytes > 0).collect();
        self.exchange(&messages, "all_reduce")
    }

    /// Reduces one shard of the inputs on each rank, then gathers the reduced shards on the root.
    ///
    /// # Safety
    /// The preconditions of [`Backend::reduce`].
    pub(super) unsafe fn reduce_ordered(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        root: u32,
        clock: &Clock,
    ) -> Result<()> {
        let shards = self.shards(count);
        let own = shards[self.rank as usize].clone();
        if root == self.rank {
            let target = to.wrapping_add(clock.bytes(own.start));
            // SAFETY: every shard lies within the buffers. If the operation runs in place,
            // `reduce_own` writes this rank's shard only after it has sent all other shards.
            unsafe { self.reduce_own(from, target, &shards, op, "reduce", clock)? };
            let others = (0..self.size()).filter(|peer| *peer != self.rank);
            let messages = others.map(|peer| {
                let shard = &shards[peer as usize];
                let target = to.wrapping_add(clock.bytes(shard.start));
                message(false, target, shard.len(), peer, clock)
            });
            let messages: Vec<_> = messages.filter(|message| message.bytes > 0).collect();
            return self.exchange(&messages, "reduce");
        }
        let mut reduced = scratch(clock.bytes(own.len()));
        let target = reduced.as_mut_ptr().cast::<u8>();
        // SAFETY: every shard lies within `from`, and the scratch buffer has the size of this
        // rank's shard.
        unsafe { self.reduce_own(from, target, &shards, op, "reduce", clock)? };
        if own.is_empty() {
            return Ok(());
        }
        self.exchange(&[message(true, target, own.len(), root, clock)], "reduce")
    }

    /// Reduces row r of the inputs on each rank r.
    ///
    /// # Safety
    /// The preconditions of [`Backend::reduce_scatter`].
    pub(super) unsafe fn reduce_scatter_ordered(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        clock: &Clock,
    ) -> Result<()> {
        let rows: Vec<_> = (0..self.size() as usize)
            .map(|row| row * count..(row + 1) * count)
            .collect();
        // SAFETY: by the preconditions, `from` holds one row per rank and `to` holds one row.
        unsafe { self.reduce_own(from, to, &rows, op, "reduce_scatter", clock) }
    }

    /// Sends to each other rank that rank's shard of `from`, and reduces this rank's shard of all
    /// inputs to `to`.
    ///
    /// # Safety
    /// `from` is readable for all shards, and `to` is writable for this rank's shard. `to` may be
    /// this rank's shard of `from`.
    unsafe fn reduce_own(
        &self,
        from: *const u8,
        to: *mut u8,
        shards: &[Range<usize>],
        op: ReduceOp,
        name: &'static str,
        clock: &Clock,
    ) -> Result<()> {
        let scalars = self.scalars(op, name, clock)?;
        let own = &shards[self.rank as usize];
        let bytes = clock.bytes(own.len());
        let mut received = scratch(bytes * shards.len());
        let at = received.as_mut_ptr().cast::<u8>();
        let others = (0..self.size()).filter(|peer| *peer != self.rank);
        let messages = others.flat_map(|peer| {
            let theirs = &shards[peer as usize];
            let sent = from.wrapping_add(clock.bytes(theirs.start)).cast_mut();
            let row = at.wrapping_add(bytes * peer as usize);
            [
                message(true, sent, theirs.len(), peer, clock),
                message(false, row, own.len(), peer, clock),
            ]
        });
        let messages: Vec<_> = messages.filter(|message| message.bytes > 0).collect();
        self.exchange(&messages, name)?;
        let mut rows = rows_of(at, bytes, shards.len());
        rows[self.rank as usize] = from.wrapping_add(clock.bytes(own.start));
        // SAFETY: every row and the caller's `to` hold `own.len()` elements.
        unsafe { fold(&rows, &scalars, to, own.len(), clock.args.dtype, op) };
        Ok(())
    }

    /// Returns the result of [`ReduceOp::scalar`] for each rank. For a scaled sum, this is the
    /// rank's factor, and the ranks exchange their factors.
    fn scalars(&self, op: ReduceOp, name: &'static str, clock: &Clock) -> Result<Vec<u64>> {
        let own = op.scalar(clock.args.dtype);
        let mut scalars = vec![own; self.size() as usize];
        if matches!(op, ReduceOp::PreMulSum(_)) {
            let mut args = clock.args();
            args.dtype = DType::U64;
            let at = scalars.as_mut_ptr().cast();
            // SAFETY: `own` is one u64, and `scalars` holds one u64 per rank.
            unsafe {
                self.all
                    .all_gather((&raw const own).cast(), at, 1, &args)
                    .map_err(self.between_failed(name))?;
            }
        }
        Ok(scalars)
    }

    /// Divides `count` elements among the ranks. The last shards may be shorter or empty.
    fn shards(&self, count: usize) -> Vec<Range<usize>> {
        let size = self.size() as usize;
        // A multiple of 64 elements keeps shards from sharing cache lines.
        let each = count.div_ceil(size).next_multiple_of(64);
        (0..size)
            .map(|rank| (rank * each).min(count)..((rank + 1) * each).min(count))
            .collect()
    }
}

fn message(is_send: bool, at: *mut u8, count: usize, peer: u32, clock: &Clock) -> Message {
    let args = clock.args();
    Message {
        is_send,
        at: at as usize,
        bytes: args.bytes(count),
        peer,
        timeout: args.timeout,
    }
}

fn rows_of(at: *mut u8, bytes: usize, count: usize) -> Vec<*const u8> {
    (0..count)
        .map(|row| at.wrapping_add(row * bytes).cast_const())
        .collect()
}

/// Reduces `rows`, each of `count` elements, in the order of the list, and stores the result in
/// `to`.
///
/// # Safety
/// Every row is readable and `to` is writable for `count` elements, and all are aligned. `to` may
/// be one of the rows. There is one scalar per row.
pub(super) unsafe fn fold(
    rows: &[*const u8],
    scalars: &[u64],
    to: *mut u8,
    count: usize,
    dtype: DType,
    op: ReduceOp,
) {
    let fold = Fold {
        rows,
        scalars,
        to,
        count,
    };
    let code = op.code() as u8;
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the CPU supports AVX2 (checked above). The caller of `fold` guarantees the
        // preconditions of `fold`.
        unsafe { fold_avx2(fold, dtype, code) };
        return;
    }
    let _ = dispatch(dtype as u8, code, fold);
}

/// Runs `fold`, compiled for AVX2 registers. The results are bitwise identical to those without
/// AVX2, because the compiler does not contract multiplications and additions.
///
/// # Safety
/// The CPU supports AVX2, and the preconditions of [`fold`] hold.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn fold_avx2(fold: Fold<'_>, dtype: DType, code: u8) {
    let _ = dispatch(dtype as u8, code, fold);
}

/// Arguments of [`fold`] that meet its preconditions.
struct Fold<'a> {
    rows: &'a [*const u8],
    scalars: &'a [u64],
    to: *mut u8,
    count: usize,
}

impl WithReduction for Fold<'_> {
    type Output = ();

    #[inline(always)]
    fn run<T: Element, O: Reduction<T>>(self) {
        let mut totals = [T::Acc::ZERO; BLOCK];
        let ranks = self.rows.len() as u32;
        for start in (0..self.count).step_by(BLOCK) {
            let totals = &mut totals[..BLOCK.min(self.count - start)];
            for (row, (from, scalar)) in self.rows.iter().zip(self.scalars).enumerate() {
                let from = from.cast::<T>().wrapping_add(start);
                for (index, total) in totals.iter_mut().enumerate() {
                    // SAFETY: `index < count`, and `fold` requires rows of `count` readable
                    // elements.
                    let value = O::lift(unsafe { from.add(index).read() }, *scalar);
                    *total = if row == 0 {
                        value
                    } else {
                        O::combine(*total, value)
                    };
                }
            }
            let to = self.to.cast::<T>().wrapping_add(start);
            for (index, total) in totals.iter().enumerate() {
                // SAFETY: `index < count`, and `fold` requires `count` writable elements; all rows
                // of this block have been read.
                unsafe { to.add(index).write(O::finish(*total, ranks)) };
            }
        }
    }
}
