//! Sources of a row's sum over the ranks: memory of the ranks, or their packets.

use fusewire_device::bulk::Tables;
use fusewire_device::layout::BLOCK_WORDS;
use fusewire_device::packet::{PAIR_DATA, Slots};
use fusewire_device::session::Session;
use fusewire_device::{Element, Machine};

use super::stripe::{CHUNK, PARTIALS, Stripe};
use crate::chunk;

/// The rows of all ranks, which are added in rank order in f32.
pub(super) trait Sums<M: Machine> {
    /// True if [`Sums::sum`] waits, and can fail.
    const WAITS: bool;

    /// Returns the sum of elements `[at, at + N)` of the rows. `None` after a failure, which is
    /// recorded.
    ///
    /// # Safety
    /// All ranks' rows must have the elements.
    unsafe fn sum<const N: usize>(&self, at: usize) -> Option<[f32; N]>;

    /// Completes a table in shared memory, of which this block has the entries of its stripe, with
    /// those of the other blocks of the row. Returns false after a failure, which is recorded. All
    /// lanes together; a barrier is between the last write of the table and its reads.
    ///
    /// # Safety
    /// `table` must be memory of this block for the entries of the exchange. The block must have
    /// written those of its stripe, and passed a barrier. Each exchange must be made once a launch
    /// if rows have several stripes.
    #[inline(always)]
    unsafe fn complete(&self, _stripe: Stripe, _exchange: Exchange, _table: *mut u32) -> bool {
        true
    }
}

/// An exchange between the blocks of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exchange {
    /// Partials of the values, or of their squares.
    Sum = 0,
    /// Partials of the squares of the differences from the mean.
    Squares = 1,
    /// The greatest magnitude of each stripe.
    Greatest = 2,
}

const _: () = assert!(BLOCK_WORDS == 3 * PARTIALS);

/// Rows in memory: a table of the address of each rank's first row.
pub(super) struct PulledRows<T> {
    pub(super) tables: Tables,
    pub(super) ranks: u32,
    pub(super) element: core::marker::PhantomData<T>,
}

impl<M: Machine, T: Element<Acc = f32>> Sums<M> for PulledRows<T> {
    const WAITS: bool = false;

    #[inline(always)]
    unsafe fn sum<const N: usize>(&self, at: usize) -> Option<[f32; N]> {
        let load = |rank: u32| {
            let from = self.tables.source(rank).cast::<T>().wrapping_add(at);
            // SAFETY: the rows at the address of each rank have the elements.
            unsafe { chunk::read::<M, T, N>(from) }
        };
        let mut sum = chunk::widen(load(0));
        let mut rank = 1;
        if M::LANES != 1 {
            // With the preceding load, three loads are in flight; more would spill registers.
            while rank + 2 <= self.ranks {
                let next = [load(rank), load(rank + 1)];
                add(&mut sum, next[0]);
                add(&mut sum, next[1]);
                rank += 2;
            }
        }
        while rank < self.ranks {
            add(&mut sum, load(rank));
            rank += 1;
        }
        Some(sum)
    }
}

#[inline(always)]
fn add<T: Element<Acc = f32>, const N: usize>(sum: &mut [f32; N], values: [T; N]) {
    for i in 0..N {
        sum[i] += values[i].widen();
    }
}

/// Stripes of rows that arrive as packets of several lanes, including those of this rank.
pub(super) struct PacketRows<'a, M, T> {
    /// The block's stripe of the rows, in shared memory. The block has written it, and passed a
    /// barrier.
    pub(super) stripe: *const Stripe,
    pub(super) session: &'a Session<M>,
    pub(super) slots: &'a Slots,
    pub(super) element: core::marker::PhantomData<T>,
}

impl<M: Machine, T: Element<Acc = f32>> Sums<M> for PacketRows<'_, M, T> {
    const WAITS: bool = true;

    #[inline(always)]
    unsafe fn sum<const N: usize>(&self, at: usize) -> Option<[f32; N]> {
        // SAFETY: the field's description.
        let stripe = unsafe { self.stripe.read() };
        let at = stripe.position((at / CHUNK) as u32) as usize * CHUNK;
        let unit = 1 + at * size_of::<T>() / PAIR_DATA;
        // SAFETY: all streams have the elements, and therefore their units.
        unsafe {
            if size_of::<T>() == 2 {
                self.received::<N, 2>(unit)
            } else {
                self.received::<N, 4>(unit)
            }
        }
    }

    #[inline(always)]
    unsafe fn complete(&self, stripe: Stripe, exchange: Exchange, table: *mut u32) -> bool {
        if stripe.bits == 0 {
            return true;
        }
        let (session, block) = (self.session, self.session.block());
        let first = block.index() - stripe.index;
        // Binary logarithm of the entries of a stripe.
        let each = match exchange {
            Exchange::Greatest => 0,
            Exchange::Sum | Exchange::Squares => PARTIALS.ilog2() - stripe.bits,
        };
        let (own, base) = (stripe.index as usize, exchange as usize * PARTIALS);
        let entries = (stripe.count() as usize) << each;
        // A lane for each entry of this stripe and each other block.
        for pair in block.elements_of_block(entries - (1 << each)) {
            let entry = (own << each) + (pair & ((1 << each) - 1));
            let to = first + (stripe.index ^ (1 + (pair >> each) as u32));
            // SAFETY: an entry of this block's stripe, which it has written before a barrier. The
            // launch has all blocks of the row (`Stripe::of_block`). There are as many words as
            // entries in all exchanges.
            unsafe { session.send_block_word(to, base + entry, table.add(entry).read()) };
        }
        let mut failed = false;
        for entry in block.elements_of_block(entries) {
            let from = entry >> each;
            if from == own || failed {
                continue;
            }
            // SAFETY: as above. The block `from` of the row sends this word; only this lane
            // receives it, and only this exchange has it.
            let value = unsafe { session.receive_block_word(first + from as u32, base + entry) };
            match value.ok() {
                // SAFETY: an entry of the table, which no other lane accesses before the barrier.
                Some(value) => unsafe { table.add(entry).write(value) },
                None => failed = true,
            }
        }
        // The vote is a barrier, too.
        !block.any(failed)
    }
}

impl<M: Machine, T: Element<Acc = f32>> PacketRows<'_, M, T> {
    /// Returns the sum of `N` elements, which are `U` units from `unit` on.
    ///
    /// # Safety
    /// All streams must have the units.
    #[inline(always)]
    unsafe fn received<const N: usize, const U: usize>(&self, unit: usize) -> Option<[f32; N]> {
        let ranks = self.session.comm().size();
        let mut sum = [0.0; N];
        let mut rank = 0;
        while rank < ranks {
            let last = ranks - 1;
            let peek = |i: u32| {
                let rank = if rank + i < last { rank + i } else { last };
                // SAFETY: `rank < ranks`; its stream has the units.
                unsafe { self.slots.peek_pairs::<U>(self.session.comm(), rank, unit) }
            };
            // As many units in flight as registers can hold.
            let (there, taken) = if U == 2 && ranks - rank >= 4 {
                let seen = [peek(0), peek(1), peek(2), peek(3)];
                let there = seen[0].1 & seen[1].1 & seen[2].1 & seen[3].1;
                if there {
                    fold::<T, N, U>(&mut sum, rank, ranks, seen[0].0);
                    fold::<T, N, U>(&mut sum, rank + 1, ranks, seen[1].0);
                    fold::<T, N, U>(&mut sum, rank + 2, ranks, seen[2].0);
                    fold::<T, N, U>(&mut sum, rank + 3, ranks, seen[3].0);
                }
                (there, 4)
            } else {
                let seen = [peek(0), peek(1)];
                let there = seen[0].1 & seen[1].1;
                if there {
                    fold::<T, N, U>(&mut sum, rank, ranks, seen[0].0);
                    fold::<T, N, U>(&mut sum, rank + 1, ranks, seen[1].0);
                }
                (there, 2)
            };
            if there {
                rank += taken;
            } else {
                // SAFETY: `rank < ranks`; its stream has the units.
                let units = unsafe { self.slots.receive_pairs::<M, U>(self.session, rank, unit) };
                let units = units.ok()?;
                fold::<T, N, U>(&mut sum, rank, ranks, units);
                rank += 1;
            }
        }
        Some(sum)
    }
}

/// Adds the elements of `rank` to the sum, if there is such a rank. Those of rank 0 begin the sum.
#[inline(always)]
fn fold<T: Element<Acc = f32>, const N: usize, const U: usize>(
    sum: &mut [f32; N],
    rank: u32,
    ranks: u32,
    units: [u64; U],
) {
    if rank >= ranks {
        return;
    }
    let per = PAIR_DATA / size_of::<T>();
    for i in 0..N {
        let next = T::from_bits(units[i / per] >> (i % per * size_of::<T>() * 8)).widen();
        sum[i] = if rank == 0 { next } else { sum[i] + next };
    }
}
