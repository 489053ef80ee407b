//! State of a communicator on one rank, and its operations.

use core::time::Duration;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fusewire_backend_abi as abi;

use crate::exchange::Exchange;
use crate::failure::{Failure, Result};
use crate::mesh::Mesh;
use crate::reduce;
use crate::store::Store;

/// State of a communicator, to which the C handle points.
#[derive(Debug)]
pub(crate) struct Handle {
    mesh: Mesh,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Depth of nested open groups.
    groups: u32,
    /// Messages of the open group.
    grouped: Exchange,
    timeout: Duration,
    /// First failure. After a failure, a stream may be in the middle of a message, so all further
    /// calls fail.
    broken: Option<Failure>,
}

/// Arguments that all operations share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    dtype: u32,
    reduction: u32,
    element: usize,
    timeout: Duration,
}

impl Call {
    pub(crate) fn new(call: &abi::FusewireCall) -> Result<Self> {
        let element = reduce::size_of_dtype(call.dtype);
        let element = element
            .ok_or_else(|| Failure::invalid(format!("no type has number {}", call.dtype)))?;
        Ok(Self {
            dtype: call.dtype,
            reduction: call.reduction,
            element,
            timeout: Duration::from_nanos(call.timeout_ns),
        })
    }

    /// Returns the size of a row of `count` elements in bytes. Fails if the size of `rows` rows
    /// overflows.
    fn bytes(&self, count: u64, rows: u32) -> Result<usize> {
        let all = u128::from(count) * u128::from(rows) * self.element as u128;
        if all > isize::MAX as u128 {
            return Err(Failure::invalid(format!("{count} elements are too many")));
        }
        Ok(count as usize * self.element)
    }

    fn reducible(&self) -> Result<()> {
        if reduce::has(self.dtype, self.reduction) {
            return Ok(());
        }
        let (dtype, reduction) = (self.dtype, self.reduction);
        Err(Failure::new(
            abi::CODE_UNSUPPORTED,
            format!("type {dtype} has no reduction {reduction} here"),
        ))
    }
}

impl Handle {
    pub(crate) fn connect(
        rank: u32,
        size: u32,
        store: &Store<'_>,
        timeout: Duration,
    ) -> Result<Self> {
        if rank >= size {
            return Err(Failure::invalid(format!("rank {rank} of {size}")));
        }
        Ok(Self {
            mesh: Mesh::connect(rank, size, store, Instant::now() + timeout)?,
            state: Mutex::default(),
        })
    }

    pub(crate) fn abort(&self) {
        self.mesh.abort();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn size(&self) -> u32 {
        self.mesh.size()
    }

    /// Returns all ranks except this one.
    fn others(&self) -> impl Iterator<Item = u32> {
        let own = self.mesh.rank;
        (0..self.size()).filter(move |rank| *rank != own)
    }

    fn root(&self, root: u32) -> Result<()> {
        if root < self.size() {
            return Ok(());
        }
        Err(Failure::invalid(format!("there is no rank {root}")))
    }

    /// Returns an error inside a group, where collectives are not allowed, and after an earlier
    /// failure.
    fn start(&self) -> Result<()> {
        let state = self.state();
        if let Some(broken) = &state.broken {
            return Err(broken.clone());
        }
        if state.groups > 0 {
            return Err(Failure::invalid(
                "only send and recv may be called in a group",
            ));
        }
        Ok(())
    }

    /// Transfers messages. If the transfer fails, aborts the communicator on all ranks.
    ///
    /// # Safety
    /// The caller must meet the requirements of [`Exchange::run`].
    unsafe fn run(&self, exchange: Exchange, timeout: Duration) -> Result<()> {
        // SAFETY: this function has the same safety requirements as `Exchange::run`.
        let ran = unsafe { exchange.run(&self.mesh, timeout) };
        if let Err(failure) = &ran {
            self.state().broken.get_or_insert_with(|| failure.clone());
            self.mesh.abort();
        }
        ran
    }

    pub(crate) fn group_start(&self) -> Result<()> {
        let mut state = self.state();
        if let Some(broken) = &state.broken {
            return Err(broken.clone());
        }
        state.groups += 1;
        Ok(())
    }

    pub(crate) fn group_end(&self) -> Result<()> {
        let (exchange, timeout) = {
            let mut state = self.state();
            if state.groups == 0 {
                return Err(Failure::invalid("no group was started"));
            }
            state.groups -= 1;
            if let Some(broken) = state.broken.clone() {
                state.grouped = Exchange::default();
                return Err(broken);
            }
            if state.groups > 0 {
                return Ok(());
            }
            let timeout = core::mem::take(&mut state.timeout);
            (core::mem::take(&mut state.grouped), timeout)
        };
        // SAFETY: the host keeps the buffers of a group's calls valid until `group_end` returns
        // (rule "Groups").
        unsafe { self.run(exchange, timeout) }
    }

    /// Transfers one message, or adds it to the open group.
    fn point(
        &self,
        count: u64,
        peer: u32,
        call: &Call,
        add: impl FnOnce(&mut Exchange, usize),
    ) -> Result<()> {
        self.root(peer)?;
        let bytes = call.bytes(count, 1)?;
        {
            let mut state = self.state();
            if let Some(broken) = &state.broken {
                return Err(broken.clone());
            }
            if state.groups > 0 {
                add(&mut state.grouped, bytes);
                state.timeout = state.timeout.max(call.timeout);
                return Ok(());
            }
        }
        if peer == self.mesh.rank {
            return Err(Failure::invalid("a rank sends to itself in a group only"));
        }
        let mut exchange = Exchange::default();
        add(&mut exchange, bytes);
        // SAFETY: `add` made the only message, from the buffer of `send` or `recv`, whose callers
        // guarantee that the buffer is valid.
        unsafe { self.run(exchange, call.timeout) }
    }

    /// # Safety
    /// The caller must meet the requirements of the table's function of the same name.
    pub(crate) unsafe fn send(
        &self,
        from: *const u8,
        count: u64,
        peer: u32,
        call: &Call,
    ) -> Result<()> {
        self.point(count, peer, call, |exchange, bytes| {
            exchange.send(peer, from, bytes)
        })
    }

    /// # Safety
    /// The caller must meet the requirements of the table's function of the same name.
    pub(crate) unsafe fn recv(
        &self,
        to: *mut u8,
        count: u64,
        peer: u32,
        call: &Call,
    ) -> Result<()> {
        self.point(count, peer, call, |exchange, bytes| {
            exchange.recv(peer, to, bytes)
        })
    }

    /// # Safety
    /// The caller must meet the requirements of the table's function of the same name.
    pub(crate) unsafe fn broadcast(
        &self,
        buffer: *mut u8,
        count: u64,
        root: u32,
        call: &Call,
    ) -> Result<()> {
        self.start()?;
        self.root(root)?;
        let bytes = call.bytes(count, 1)?;
        let mut exchange = Exchange::default();
        if root == self.mesh.rank {
            self.others()
                .for_each(|peer| exchange.send(peer, buffer, bytes));
        } else {
            exchange.recv(root, buffer, bytes);
        }
        // SAFETY: the messages cover the `count` elements of `buffer`, which the caller guarantees
        // to be valid.
        unsafe { self.run(exchange, call.timeout) }
    }

    /// # Safety
    /// The caller must meet the requirements of the table's function of the same name.
    pub(crate) unsafe fn all_gather(
        &self,
        from: *const u8,
        to: *mut u8,
        count: u64,
        call: &Call,
    ) -> Result<()> {
        self.start()?;
        let row = call.bytes(count, self.size())?;
        let mut exchange = Exchange::default();
        for peer in 0..self.size() {
            exchange.send(peer, from, row);
            exchange.recv(peer, to.wrapping_add(row * peer as usize), row);
        }
        // SAFETY: the caller guarantees that `from` has one row and `to` has one row per rank. If
        // the call is in place, this rank's row is copied onto itself.
        unsafe { self.run(exchange, call.timeout) }
    }

    /// Sends `part(p)` of the input to every receiving rank p. Returns the reduction of the parts
    /// that arrive on this rank.
    ///
    /// # Safety
    /// `from` must be readable in `part(p)` for every receiving rank p.
    unsafe fn reduce_rows(
        &self,
        from: *const u8,
        part: impl Fn(u32) -> core::ops::Range<usize>,
        receives: impl Fn(u32) -> bool,
        call: &Call,
    ) -> Result<Vec<u8>> {
        let own = if receives(self.mesh.rank) {
            part(self.mesh.rank).len()
        } else {
            0
        };
        let mut rows: Vec<Vec<u8>> = (0..self.size()).map(|_| vec![0u8; own]).collect();
        let mut exchange = Exchange::default();
        for peer in (0..self.size()).filter(|peer| receives(*peer)) {
            let part = part(peer);
            exchange.send(peer, from.wrapping_add(part.start), part.len());
        }
        if receives(self.mesh.rank) {
            for (peer, row) in rows.iter_mut().enumerate() {
                exchange.recv(peer as u32, row.as_mut_ptr(), row.len());
            }
        }
        // SAFETY: the sources are parts of `from`, which the caller guarantees to be readable. The
        // targets are `rows`, which live until the end of this function.
        unsafe { self.run(exchange, call.timeout)? };
        reduce::reduce(call.dtype, call.reduction, &mut rows);
        Ok(rows.swap_remove(0))
    }

    /// # Safety
    /// The caller must meet the requirements of the table's function of the same name.
    pub(crate) unsafe fn all_reduce(
        &self,
        from: *const u8,
        to: *mut u8,
        count: u64,
        call: &Call,
    ) -> Result<()> {
        self.start()?;
        call.reducible()?;
        call.bytes(count, 1)?;
        let started = Instant::now();
        let edge = |rank: u32| {
            let elements = u128::from(count) * u128::from(rank) / u128::from(self.size());
            elements as usize * call.element
        };
        let shard = |rank: u32| edge(rank)..edge(rank + 1);
        // SAFETY: the shards are ranges of the input's `count` elements, which the caller
        // guarantees to be readable.
        let reduced = unsafe { self.reduce_rows(from, shard, |_| true, call)? };
        let mut exchange = Exchange::default();
        for peer in 0..self.size() {
            exchange.send(peer, reduced.as_ptr(), reduced.len());
            let shard = shard(peer);
            exchange.recv(peer, to.wrapping_add(shard.start), shard.len());
        }
        let left = call.timeout.saturating_sub(started.elapsed());
        // SAFETY: the source is `reduced`, which outlives the exchange. The targets are ranges of
        // the output's `count` elements, which the caller guarantees to be writable.
        unsafe { self.run(exchange, left) }
    }

    /// # Safety
    /// The caller must meet the requirements of the table's function of the same name.
    pub(crate) unsafe fn reduce(
        &self,
        from: *const u8,
        to: *mut u8,
        count: u64,
        root: u32,
        call: &Call,
    ) -> Result<()> {
        self.start()?;
        self.root(root)?;
        call.reducible()?;
        let bytes = call.bytes(count, self.size())?;
        // SAFETY: the caller guarantees that `from` has `bytes` readable bytes.
        let reduced = unsafe { self.reduce_rows(from, |_| 0..bytes, |rank| rank == root, call)? };
        if root == self.mesh.rank && bytes > 0 {
            // SAFETY: on the root, the caller guarantees that `to` has `bytes` writable bytes.
            // `reduced` has the same size and is a separate allocation.
            unsafe { core::ptr::copy_nonoverlapping(reduced.as_ptr(), to, bytes) };
        }
        Ok(())
    }

    /// # Safety
    /// The caller must meet the requirements of the table's function of the same name.
    pub(crate) unsafe fn reduce_scatter(
        &self,
        from: *const u8,
        to: *mut u8,
        count: u64,
        call: &Call,
    ) -> Result<()> {
        self.start()?;
        call.reducible()?;
        let row = call.bytes(count, self.size())?;
        let part = |rank: u32| row * rank as usize..row * (rank as usize + 1);
        // SAFETY: the caller guarantees that `from` has one row per rank, so every part is
        // readable.
        let reduced = unsafe { self.reduce_rows(from, part, |_| true, call)? };
        if row > 0 {
            // SAFETY: the caller guarantees that `to` has `row` writable bytes. `reduced` has the
            // same size and is a separate allocation.
            unsafe { core::ptr::copy_nonoverlapping(reduced.as_ptr(), to, row) };
        }
        Ok(())
    }
}
