//! Hierarchical operations, which have separate steps within each host and between hosts. The
//! module [`super`] defines the term *peers*. Reductions combine the ranks of each host first, and
//! then the hosts in Gloo's order. [`crate::Determinism::Any`] allows this order.

use fusewire_device::DType;

use super::ordered::fold;
use super::{Backend, Clock, Gloo, Hierarchy, NAME, backend_error, scratch};
use crate::Result;
use crate::backend::gloo::{Message, Scale, scale};
use crate::options::ReduceOp;
use crate::tensor::{Input, Output};

/// Returns the reduction to use within a host. An average becomes a sum, which
/// [`Hierarchy::finish`] divides later.
const fn first(op: ReduceOp) -> ReduceOp {
    match op {
        ReduceOp::Average => ReduceOp::Sum,
        other => other,
    }
}

/// Returns the reduction to use between hosts. A scaled sum becomes a sum, because the step within
/// the host has applied the factors.
const fn then(op: ReduceOp) -> ReduceOp {
    match op {
        ReduceOp::Average | ReduceOp::PreMulSum(_) => ReduceOp::Sum,
        other => other,
    }
}

const fn input<'a>(at: *const u8, count: usize, dtype: DType) -> Input<'a> {
    // SAFETY: the callers of `input` keep the memory valid as long as they use the result.
    unsafe { Input::from_raw(at, count, dtype) }
}

const fn output<'a>(at: *mut u8, count: usize, dtype: DType) -> Output<'a> {
    // SAFETY: the callers of `output` keep the memory valid as long as they use the result.
    unsafe { Output::from_raw(at, count, dtype) }
}

impl Hierarchy {
    fn peers(&self, operation: &'static str) -> Result<&Gloo> {
        let none = || backend_error(NAME, operation, "this rank has no peers on other hosts");
        self.peers.as_ref().ok_or_else(none)
    }

    /// Divides the elements by the number of ranks if the reduction is an average.
    ///
    /// # Safety
    /// `to` is writable for `count` elements.
    unsafe fn finish(&self, to: *mut u8, count: usize, op: ReduceOp, clock: &Clock) {
        if op == ReduceOp::Average {
            // SAFETY: the caller passes `count` writable elements, and `scale` permits equal input
            // and output.
            unsafe { scale(to, to, count, clock.args.dtype, Scale::Over(self.size())) };
        }
    }

    /// Runs reduce_scatter on each host, then all_reduce of each shard between peers, then
    /// all_gather on each host. Requires the same number of ranks on all hosts.
    ///
    /// # Safety
    /// The preconditions of [`Backend::all_reduce`].
    pub(super) unsafe fn all_reduce_shards(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        clock: &Clock,
    ) -> Result<()> {
        let name = "all_reduce";
        let (here, dtype) = (self.here() as usize, clock.args.dtype);
        let each = count / here;
        let body = each * here;
        let shard = to.wrapping_add(clock.bytes(each * self.own().local as usize));
        // The remainder lies after the shards, and has fewer elements than the host has ranks. If
        // the operation runs in place, the remainder must not be overwritten before it is read.
        self.local(clock)
            .reduce_scatter_single(
                output(shard, each, dtype),
                input(from, body, dtype),
                first(op),
            )
            .map_err(self.here_failed(name))?;
        // SAFETY: the shard lies within the output.
        unsafe {
            self.peers(name)?
                .all_reduce(shard, shard, each, then(op), &clock.args())
                .map_err(self.peers_failed(name))?;
            self.finish(shard, each, op, clock);
        }
        self.local(clock)
            .all_gather_single(output(to, body, dtype), input(shard, each, dtype))
            .map_err(self.here_failed(name))?;
        if body == count {
            return Ok(());
        }
        let rest = clock.bytes(body);
        // SAFETY: the remainder lies within both buffers. `Gloo::all_reduce` also divides averages,
        // so `finish` is not needed here.
        unsafe {
            let (from, to) = (from.add(rest), to.add(rest));
            self.all
                .all_reduce(from, to, count - body, op, &clock.args())
                .map_err(self.between_failed(name))
        }
    }

    /// Reduces to the first rank of each host, then runs all_reduce between these first ranks, then
    /// broadcasts on each host.
    ///
    /// # Safety
    /// The preconditions of [`Backend::all_reduce`].
    pub(super) unsafe fn all_reduce_leaders(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        clock: &Clock,
    ) -> Result<()> {
        let name = "all_reduce";
        let dtype = clock.args.dtype;
        self.local(clock)
            .reduce_into(
                output(to, count, dtype),
                input(from, count, dtype),
                0,
                first(op),
            )
            .map_err(self.here_failed(name))?;
        if self.own().local == 0 {
            // SAFETY: `to` holds `count` elements by the preconditions.
            unsafe {
                self.peers(name)?
                    .all_reduce(to, to, count, then(op), &clock.args())
                    .map_err(self.peers_failed(name))?;
                self.finish(to, count, op, clock);
            }
        }
        self.local(clock)
            .broadcast(output(to, count, dtype), 0)
            .map_err(self.here_failed(name))
    }

    /// Returns the leader of each host, as a local rank: the rank that exchanges data with other
    /// hosts in a call with this root.
    fn leader(&self, root: u32) -> u32 {
        if self.is_even() {
            self.coordinates[root as usize].local
        } else {
            0
        }
    }

    /// Reduces to the leader of each host, then to the leader of the root's host. If this leader is
    /// not the root, it then sends the result to the root.
    ///
    /// # Safety
    /// The preconditions of [`Backend::reduce`].
    pub(super) unsafe fn reduce_leaders(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        root: u32,
        clock: &Clock,
    ) -> Result<()> {
        let name = "reduce";
        let dtype = clock.args.dtype;
        let (own, target, leader) = (
            self.own(),
            self.coordinates[root as usize],
            self.leader(root),
        );
        let is_leader = own.local == leader;
        let mut own_sum = scratch(if is_leader && root != self.rank {
            clock.bytes(count)
        } else {
            0
        });
        let sum = if root == self.rank {
            to
        } else {
            own_sum.as_mut_ptr().cast()
        };
        let kept = if is_leader { count } else { 0 };
        self.local(clock)
            .reduce_into(
                output(sum, kept, dtype),
                input(from, count, dtype),
                leader,
                first(op),
            )
            .map_err(self.here_failed(name))?;
        if is_leader {
            // SAFETY: `sum` points to `count` elements, because this rank is the leader.
            unsafe {
                self.peers(name)?
                    .reduce(sum, sum, count, then(op), target.host, &clock.args())
                    .map_err(self.peers_failed(name))?;
                if own.host == target.host {
                    self.finish(sum, count, op, clock);
                }
            }
        }
        if own.host != target.host || leader == target.local || count == 0 {
            return Ok(());
        }
        let other = self.hosts[target.host as usize][leader as usize];
        let (is_send, at, peer) = match () {
            () if is_leader => (true, sum, root),
            () if self.rank == root => (false, to, other),
            () => return Ok(()),
        };
        let args = clock.args();
        let message = Message {
            is_send,
            at: at as usize,
            bytes: args.bytes(count),
            peer,
            timeout: args.timeout,
        };
        self.exchange(&[message], name)
    }

    /// Broadcasts from the leader of the root's host to the leaders of the other hosts, then on
    /// each host.
    ///
    /// # Safety
    /// The preconditions of [`Backend::broadcast`].
    pub(super) unsafe fn broadcast_leaders(
        &self,
        buffer: *mut u8,
        count: usize,
        root: u32,
        clock: &Clock,
    ) -> Result<()> {
        let name = "broadcast";
        let dtype = clock.args.dtype;
        let (own, source, leader) = (
            self.own(),
            self.coordinates[root as usize],
            self.leader(root),
        );
        let within = |root: u32| {
            self.local(clock)
                .broadcast(output(buffer, count, dtype), root)
                .map_err(self.here_failed(name))
        };
        let is_source = own.host == source.host;
        // If the root is not the leader of its host, the leader must receive the data before it
        // sends the data to the other hosts.
        if is_source && leader != source.local {
            within(source.local)?;
        }
        if own.local == leader {
            // SAFETY: `buffer` holds `count` elements by the preconditions.
            unsafe {
                self.peers(name)?
                    .broadcast(buffer, count, source.host, &clock.args())
                    .map_err(self.peers_failed(name))?;
            }
        }
        if is_source && leader != source.local {
            return Ok(());
        }
        within(leader)
    }

    /// Runs all_gather between peers, then on each host. Requires the same number of ranks on all
    /// hosts.
    ///
    /// # Safety
    /// The preconditions of [`Backend::all_gather`].
    pub(super) unsafe fn all_gather_shards(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        clock: &Clock,
    ) -> Result<()> {
        let name = "all_gather";
        let (bytes, dtype, hosts) = (clock.bytes(count), clock.args.dtype, self.hosts.len());
        let here = self.here() as usize;
        let mut column = scratch(bytes * hosts);
        let column_at = column.as_mut_ptr().cast::<u8>();
        // SAFETY: `from` holds one row, and the column holds one row for each host.
        unsafe {
            self.peers(name)?
                .all_gather(from, column_at, count, &clock.args())
                .map_err(self.peers_failed(name))?;
        }
        let mut all = scratch(bytes * hosts * here);
        let at = all.as_mut_ptr().cast::<u8>();
        let (rows, row) = (hosts * here * count, hosts * count);
        self.local(clock)
            .all_gather_single(output(at, rows, dtype), input(column_at, row, dtype))
            .map_err(self.here_failed(name))?;
        for (rank, own) in self.coordinates.iter().enumerate() {
            let row = own.local as usize * hosts + own.host as usize;
            // SAFETY: both buffers hold one row for each rank.
            unsafe {
                core::ptr::copy_nonoverlapping(at.add(row * bytes), to.add(rank * bytes), bytes);
            }
        }
        Ok(())
    }

    /// Runs reduce_scatter on each host. Each rank then holds its host's partial results for itself
    /// and its peers. The peers exchange these rows, and each rank reduces the rows that it
    /// receives. Requires the same number of ranks on all hosts.
    ///
    /// # Safety
    /// The preconditions of [`Backend::reduce_scatter`].
    pub(super) unsafe fn reduce_scatter_shards(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        clock: &Clock,
    ) -> Result<()> {
        let name = "reduce_scatter";
        let (bytes, dtype, hosts) = (clock.bytes(count), clock.args.dtype, self.hosts.len());
        // Rows of `from`, sorted so that the rows of peers are adjacent.
        let mut sorted = scratch(bytes * self.coordinates.len());
        let at = sorted.as_mut_ptr().cast::<u8>();
        for (rank, own) in self.coordinates.iter().enumerate() {
            let row = own.local as usize * hosts + own.host as usize;
            // SAFETY: both buffers hold one row for each rank.
            unsafe {
                core::ptr::copy_nonoverlapping(from.add(rank * bytes), at.add(row * bytes), bytes);
            }
        }
        let (mut partial, mut received) = (scratch(bytes * hosts), scratch(bytes * hosts));
        let (partial_at, received_at) = (
            partial.as_mut_ptr().cast::<u8>(),
            received.as_mut_ptr().cast::<u8>(),
        );
        let rows = count * self.coordinates.len();
        self.local(clock)
            .reduce_scatter_single(
                output(partial_at, count * hosts, dtype),
                input(at, rows, dtype),
                first(op),
            )
            .map_err(self.here_failed(name))?;
        // SAFETY: both buffers hold one row for each host.
        unsafe {
            self.peers(name)?
                .all_to_all(partial_at, received_at, count, &clock.args())
                .map_err(self.peers_failed(name))?;
            let rows: Vec<_> = (0..hosts)
                .map(|host| received_at.add(host * bytes).cast_const())
                .collect();
            fold(&rows, &vec![0; hosts], to, count, dtype, then(op));
            self.finish(to, count, op, clock);
        }
        Ok(())
    }
}
