//! Where a row's sum over the ranks comes from: the ranks' memory, or their packets.

use fusewire_device::bulk::Tables;
use fusewire_device::packet::{PAIR_DATA, Slots};
use fusewire_device::session::Session;
use fusewire_device::{Element, Machine};

use super::chunk;

/// The rows of all ranks, added in rank order in f32.
pub(super) trait Sums<M: Machine> {
    /// Whether [`Sums::sum`] can fail.
    const WAITS: bool;

    /// Elements `[at, at + N)` behind the first row, summed. `None` after a failure, which is recorded.
    ///
    /// # Safety
    /// The elements are in all ranks' rows.
    unsafe fn sum<const N: usize>(&self, at: usize) -> Option<[f32; N]>;
}

/// Rows that lie in memory: a table of where each rank's first one is.
pub(super) struct Pulled<T> {
    pub(super) tables: Tables,
    pub(super) ranks: u32,
    pub(super) element: core::marker::PhantomData<T>,
}

impl<M: Machine, T: Element<Acc = f32>> Sums<M> for Pulled<T> {
    const WAITS: bool = false;

    #[inline(always)]
    unsafe fn sum<const N: usize>(&self, at: usize) -> Option<[f32; N]> {
        let load = |rank: u32| {
            let from = self.tables.source(rank).cast::<T>().wrapping_add(at);
            // SAFETY: the caller's promise.
            unsafe { chunk::read::<M, T, N>(from) }
        };
        let mut sum = chunk::widen(load(0));
        let mut rank = 1;
        if M::LANES != 1 {
            // With the one in front of them, four loads are under way at once.
            while rank + 3 <= self.ranks {
                let next = [load(rank), load(rank + 1), load(rank + 2)];
                for values in next {
                    add(&mut sum, values);
                }
                rank += 3;
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

/// Rows that arrive as packets of several lanes; this rank's own lie in memory.
pub(super) struct Arriving<'a, M, T> {
    pub(super) session: &'a Session<M>,
    pub(super) slots: &'a Slots,
    pub(super) own: *const T,
}

impl<M: Machine, T: Element<Acc = f32>> Sums<M> for Arriving<'_, M, T> {
    const WAITS: bool = true;

    #[inline(always)]
    unsafe fn sum<const N: usize>(&self, at: usize) -> Option<[f32; N]> {
        // SAFETY: the caller's promise.
        let own = unsafe { chunk::read::<M, T, N>(self.own.wrapping_add(at)) };
        let unit = 1 + at * size_of::<T>() / PAIR_DATA;
        if size_of::<T>() == 2 {
            self.received::<N, 2>(own, unit)
        } else {
            self.received::<N, 4>(own, unit)
        }
    }
}

/// Ranks whose packets are under way at once.
const AT_ONCE: u32 = 4;

impl<M: Machine, T: Element<Acc = f32>> Arriving<'_, M, T> {
    /// The sum of `N` elements, which are `U` units from `unit` on.
    #[inline(always)]
    fn received<const N: usize, const U: usize>(
        &self,
        own: [T; N],
        unit: usize,
    ) -> Option<[f32; N]> {
        let ranks = self.session.comm().size();
        let me = self.session.comm().rank();
        let mut sum = [0.0; N];
        let mut rank = 0;
        while rank < ranks {
            let last = ranks - 1;
            let nth = |i: u32| if rank + i < last { rank + i } else { last };
            let peek = |i: u32| {
                let rank = nth(i);
                let (units, there) = self.slots.peek_pairs::<M, U>(self.session, rank, unit);
                (units, there || rank == me)
            };
            let seen = [peek(0), peek(1), peek(2), peek(3)];
            if seen[0].1 & seen[1].1 & seen[2].1 & seen[3].1 {
                for i in 0..AT_ONCE {
                    if rank + i < ranks {
                        fold(&mut sum, rank + i, me, own, seen[i as usize].0);
                    }
                }
                rank += AT_ONCE;
            } else {
                let units = if rank == me {
                    [0; U]
                } else {
                    self.slots.receive_pairs::<M, U>(self.session, rank, unit)?
                };
                fold(&mut sum, rank, me, own, units);
                rank += 1;
            }
        }
        Some(sum)
    }
}

/// Adds what `rank` sent (this rank's own, where it is that) to the sum; the first one is the sum.
#[inline(always)]
fn fold<T: Element<Acc = f32>, const N: usize, const U: usize>(
    sum: &mut [f32; N],
    rank: u32,
    me: u32,
    own: [T; N],
    units: [u64; U],
) {
    let per = PAIR_DATA / size_of::<T>();
    for i in 0..N {
        let sent = T::from_bits(units[i / per] >> (i % per * size_of::<T>() * 8));
        let next = if rank == me { own[i] } else { sent }.widen();
        sum[i] = if rank == 0 { next } else { sum[i] + next };
    }
}
