//! A network for tests: it carries out the requests of kernels ([`fusewire_device::net`]) between
//! ranks of one host, whose windows kernels then do not reach by load and store.
//!
//! A thread for each rank takes the requests, delays them at random, and carries them out in random
//! order, except that a signal follows the requests that it covers and the signals of its block to
//! its peer before it. A kernel that passes tests on this network relies on nothing that a real one
//! does not give.
//!
//! Collectives reach the other ranks' workspaces by load and store all the same.

use core::ptr;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::{Arc, Weak};
use std::thread;

use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::{NetContext, NetCounters, NetEntry};
use fusewire_device::net::{Action, Request, Requests, STAGING};

use super::Inner;
use crate::{Error, Result};

/// Entries of the ring. Few, so that tests fill it.
const DEPTH: usize = 16;
/// Staging memory of a block. Little, so that tests use it several times in a launch.
const STAGING_BYTES: usize = 256;
/// Greatest delay of a request, in turns of the thread.
const DELAY: u64 = 8;
/// Time for which the thread sleeps when there is nothing to do.
const IDLE: Duration = Duration::from_micros(20);

/// The memory that a rank's kernels and its thread share.
#[derive(Debug)]
pub(super) struct TestNetwork {
    context: *mut NetContext,
    entries: *mut [NetEntry],
    counters: *mut NetCounters,
    staging: *mut [[u64; STAGING_BYTES / 8]],
}

// SAFETY: kernels and the thread access the memory at these addresses by atomic operations, or in
// the order of the ring's protocol.
unsafe impl Send for TestNetwork {}
// SAFETY: as above.
unsafe impl Sync for TestNetwork {}

impl TestNetwork {
    pub(super) fn new(blocks: u32) -> Self {
        let entries = Box::into_raw(bytemuck::allocation::zeroed_slice_box(DEPTH));
        let counters = Box::into_raw(bytemuck::allocation::zeroed_box());
        let staging = Box::into_raw(bytemuck::allocation::zeroed_slice_box(blocks as usize));
        let context = NetContext {
            entries: entries.cast::<NetEntry>() as u64,
            depth: DEPTH as u64,
            counters: counters as u64,
            staging: staging.cast::<u8>() as u64,
            staging_bytes: STAGING_BYTES as u64,
        };
        Self {
            context: Box::into_raw(Box::new(context)),
            entries,
            counters,
            staging,
        }
    }

    /// Returns the address of the context for kernels.
    pub(super) fn context(&self) -> u64 {
        self.context as u64
    }

    fn requests(&self) -> Requests {
        // SAFETY: the context is valid as long as this value, and nobody writes it.
        unsafe { Requests::new(self.context.read()) }
    }

    /// Returns the address of `bytes` bytes at `offset` of the staging memory.
    fn staging(&self, offset: u64, bytes: u64) -> Option<*mut u8> {
        let all = (self.staging.len() * STAGING_BYTES) as u64;
        let fits = offset <= all && bytes <= all - offset;
        fits.then(|| self.staging.cast::<u8>().wrapping_add(offset as usize))
    }
}

impl Drop for TestNetwork {
    fn drop(&mut self) {
        // SAFETY: `new` has made the pointers from boxes. The thread and the kernels keep the
        // communicator alive while they use them.
        unsafe {
            drop(Box::from_raw(self.context));
            drop(Box::from_raw(self.entries));
            drop(Box::from_raw(self.counters));
            drop(Box::from_raw(self.staging));
        }
    }
}

/// Starts the thread of a rank. It ends with the communicator.
pub(super) fn start(inner: &Arc<Inner>, seed: u64) -> Result<()> {
    let weak = Arc::downgrade(inner);
    let mut agent = Agent {
        random: seed
            .wrapping_add(u64::from(inner.rank) + 1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            | 1,
        turn: 0,
        taken: 0,
        pending: Vec::new(),
    };
    thread::Builder::new()
        .name("fusewire-network".to_owned())
        .spawn(move || {
            while let Some(is_busy) = agent.turn(&weak) {
                match is_busy {
                    true => thread::yield_now(),
                    false => thread::sleep(IDLE),
                }
            }
        })
        .map(drop)
        .map_err(|error| Error::launch(format!("the network's thread cannot be started ({error})")))
}

/// A request that has not been carried out.
struct Pending {
    number: u64,
    request: Request,
    due: u64,
}

struct Agent {
    random: u64,
    turn: u64,
    /// Number of the next request to take.
    taken: u64,
    pending: Vec<Pending>,
}

impl Agent {
    /// Takes new requests and carries out some. Returns whether there were any; `None` once the
    /// communicator is gone.
    fn turn(&mut self, weak: &Weak<Inner>) -> Option<bool> {
        let inner = weak.upgrade()?;
        let network = inner.network.as_ref()?;
        let requests = network.requests();
        if inner.abort_word() != 0 {
            // Nothing lands after a failure.
            self.pending.clear();
            return Some(false);
        }
        self.turn += 1;
        while let Some(request) = requests.take(self.taken) {
            let number = self.taken;
            self.taken += 1;
            match request {
                Ok(request) => {
                    let due = self.turn + self.below(DELAY);
                    self.pending.push(Pending {
                        number,
                        request,
                        due,
                    });
                }
                Err(words) => tracing::error!(?words, "no request"),
            }
        }
        let is_busy = !self.pending.is_empty();
        // A signal that is due takes what it waits for with it, at once.
        let due: Vec<usize> = (0..self.pending.len())
            .filter(|index| self.pending[*index].due <= self.turn)
            .collect();
        for index in due {
            if self.pending[index].request.action == Action::Signal {
                for before in 0..index {
                    if self.covers(index, before) {
                        self.pending[before].due = self.turn;
                    }
                }
            }
        }
        while let Some(index) = self.choose() {
            let Pending { request, .. } = self.pending.remove(index);
            if carry_out(&inner, network, &request).is_none() {
                tracing::error!(?request, "a request for memory that does not exist");
            }
        }
        let first = self.pending.iter().map(|pending| pending.number).min();
        requests.complete(first.unwrap_or(self.taken));
        Some(is_busy)
    }

    /// Chooses one of the requests that are due and need not wait for another one, at random.
    fn choose(&mut self) -> Option<usize> {
        let ready: Vec<usize> = (0..self.pending.len())
            .filter(|index| self.pending[*index].due <= self.turn)
            .filter(|index| !(0..*index).any(|before| self.covers(*index, before)))
            .collect();
        if ready.is_empty() {
            return None;
        }
        Some(ready[self.below(ready.len() as u64) as usize])
    }

    /// Returns true if `index` is a signal that must not overtake `before`, a request before it.
    fn covers(&self, index: usize, before: usize) -> bool {
        let (signal, before) = (&self.pending[index], &self.pending[before]);
        let (this, that) = (&signal.request, &before.request);
        let in_order = that.action == Action::Signal || before.number >= this.after;
        this.action == Action::Signal
            && (this.block, this.peer) == (that.block, that.peer)
            && in_order
    }

    fn below(&mut self, count: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) % count
    }
}

/// Carries out a request. `None` if a range does not exist.
fn carry_out(inner: &Inner, network: &TestNetwork, request: &Request) -> Option<()> {
    let bytes = request.bytes;
    let window = |addr: WindowAddr, rank| inner.windows.range(addr, rank, bytes);
    let remote = window(request.remote, request.peer)?;
    let local = || match request.local.window() {
        STAGING => network.staging(request.local.offset(), bytes),
        _ => window(request.local, inner.rank),
    };
    // SAFETY: the ranges lie in memory that is mapped as long as its window lives, which is longer
    // than this request. The kernels' protocols order these accesses with others.
    unsafe {
        match request.action {
            Action::Put => ptr::copy(local()?, remote, bytes as usize),
            Action::Get => ptr::copy(remote, local()?, bytes as usize),
            Action::Store => {
                let value: [u8; 16] = bytemuck::cast(request.value);
                ptr::copy_nonoverlapping(
                    value.get(..bytes as usize)?.as_ptr(),
                    remote,
                    bytes as usize,
                );
            }
            Action::Signal => {
                let word = remote.cast::<u64>();
                if !word.is_aligned() || bytes != 8 {
                    return None;
                }
                AtomicU64::from_ptr(word).store(request.value[0], Ordering::Release);
            }
        }
    }
    Some(())
}
