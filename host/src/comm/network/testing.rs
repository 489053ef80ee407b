//! A network for tests: it executes the requests of kernels ([`fusewire_device::net`]) between
//! ranks of one host whose kernels do not reach each other's windows by load and store.
//!
//! A thread for each rank takes the requests, delays them at random, and executes them in random
//! order. Only a signal stays after the requests that it covers, and after earlier signals of its
//! block to the same peer. A kernel that passes tests on this network relies on no ordering that a
//! real network does not provide.
//!
//! The thread also updates the [`Mirror`]s of this rank at ranks of other teams: it sends its
//! progress before it executes signals, and its failure record before it stops these ranks.

use core::mem::offset_of;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;

use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::{ABORT, FailureRecord, Mirror};
use fusewire_device::net::{Action, Request, Requests, STAGING};

use super::Network;
use super::ring::{Ring, RingConfig};
use crate::comm::Inner;
use crate::comm::words::{ABORT_AT, BY_HOST, FAILURE_AT};
use crate::{Error, Result};

/// Number of entries of the ring; small, so that tests fill it.
const DEPTH: usize = 16;
/// Staging memory of a block; small, so that tests use it several times in a launch.
const STAGING_BYTES: usize = 256;
/// Upper bound of the delay of a request, in turns of the thread (exclusive).
const DELAY: u64 = 8;
/// Upper bound of the thread's yields between the load and the store of an update of a cell
/// (exclusive).
const PAUSE: u64 = 4;
/// Number of bytes at the start of a put that are copied one by one.
const TORN: usize = 512;
/// Time that the thread sleeps when it is idle.
const IDLE: Duration = Duration::from_micros(20);

/// The ring of a rank, and whether it has stopped the ranks of other teams.
#[derive(Debug)]
pub(in crate::comm) struct TestNetwork {
    ring: Ring,
    /// Set once the ranks of other teams know of a failure of this rank.
    has_stopped_others: AtomicBool,
}

impl TestNetwork {
    pub(in crate::comm) fn new(blocks: u32, lanes: u32) -> Self {
        Self {
            ring: Ring::new(RingConfig {
                blocks,
                lanes,
                depth: DEPTH,
                staging_bytes: STAGING_BYTES,
                drive: (0, 0),
            }),
            has_stopped_others: AtomicBool::new(false),
        }
    }

    /// Returns the address of the context for kernels.
    pub(super) fn context(&self) -> u64 {
        self.ring.context()
    }

    /// Stops the ranks of other teams, once, if this rank has detected a failure.
    pub(super) fn stop_others(&self, inner: &Inner) {
        let word = inner.executor.abort_word();
        let is_own = word & BY_HOST == 0 && word == ABORT | u64::from(inner.group.rank);
        if !is_own || self.has_stopped_others.swap(true, Ordering::Relaxed) {
            return;
        }
        let record: [u64; size_of::<FailureRecord>() / 8] = core::array::from_fn(|index| {
            inner.executor.workspace.load(FAILURE_AT + 8 * index as u64)
        });
        inner.mirror(offset_of!(Mirror, failure), &record);
        for rank in inner.other_teams() {
            if let Some(abort) = inner.word_of(rank, ABORT_AT) {
                let _ = abort.compare_exchange(0, word, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }
}

impl Inner {
    /// Returns the ranks that are not reachable by load and store.
    fn other_teams(&self) -> impl Iterator<Item = u32> {
        (0..self.executor.constants.size).filter(|rank| !self.executor.reaches(*rank))
    }

    /// Returns a word of `rank`'s workspace.
    fn word_of(&self, rank: u32, offset: u64) -> Option<&AtomicU64> {
        let at = self.windows.range(WindowAddr::new(0, offset), rank, 8)?;
        // SAFETY: a word of a workspace, which is mapped as long as the communicator lives, and
        // whose words hosts access atomically.
        Some(unsafe { AtomicU64::from_ptr(at.cast()) })
    }

    /// Writes words of this rank's mirrors at the ranks of other teams. Writes the first word last,
    /// like a kernel writes its progress, so a reader that sees it also sees the others.
    fn mirror(&self, offset: usize, words: &[u64]) {
        let mirror = self.executor.constants.workspace.mirrors
            + u64::from(self.group.rank) * size_of::<Mirror>() as u64
            + offset as u64;
        for rank in self.other_teams() {
            for (index, word) in words.iter().enumerate().rev() {
                if let Some(to) = self.word_of(rank, mirror + 8 * index as u64) {
                    to.store(*word, Ordering::Release);
                }
            }
        }
    }
}

/// Starts the thread of a rank. It ends with the communicator.
pub(super) fn start(inner: &Arc<Inner>, seed: u64) -> Result<()> {
    let weak = Arc::downgrade(inner);
    let mut agent = Agent {
        random: seed
            .wrapping_add(u64::from(inner.group.rank) + 1)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            | 1,
        turn: 0,
        taken: 0,
        pending: Vec::new(),
        progress: [0; 8],
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

/// A request that has not been executed.
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
    /// Progress that was last sent to the other teams.
    progress: [u64; 8],
}

impl Agent {
    /// Takes new requests and executes those that are due. Returns true if requests were pending,
    /// and `None` once the communicator has been dropped.
    fn turn(&mut self, weak: &Weak<Inner>) -> Option<bool> {
        let inner = weak.upgrade()?;
        let Some(Network::Test(network)) = &inner.executor.network else {
            return None;
        };
        let requests = network.ring.requests();
        if inner.executor.abort_word() != 0 {
            // No data may arrive after a failure.
            self.pending.clear();
            network.stop_others(&inner);
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
        // Sent after the requests were taken, because a signal must not overtake the progress of
        // the kernel that sent it.
        self.send_progress(&inner);
        let is_busy = !self.pending.is_empty();
        // The requests that a due signal covers become due at once.
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
            let Pending {
                number, request, ..
            } = self.pending.remove(index);
            let done = match request.action {
                Action::FetchAdd | Action::CompareSwap => {
                    let pause = self.below(PAUSE);
                    update(&inner, network, &request, number, pause)
                }
                _ => carry_out(&inner, network, &request),
            };
            if done.is_none() {
                tracing::error!(?request, "a request for memory that does not exist");
            }
        }
        let first = self.pending.iter().map(|pending| pending.number).min();
        requests.complete(first.unwrap_or(self.taken));
        Some(is_busy)
    }

    /// Sends the progress of this rank to the ranks of other teams, if it has changed.
    fn send_progress(&mut self, inner: &Inner) {
        let at = inner.executor.constants.workspace.progress;
        let progress: [u64; 8] =
            core::array::from_fn(|word| inner.executor.workspace.load(at + 8 * word as u64));
        if progress != self.progress {
            self.progress = progress;
            inner.mirror(offset_of!(Mirror, progress), &progress);
        }
    }

    /// Chooses, at random, one of the requests that are due and need not wait for another request.
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

    /// Returns true if `index` is a signal that must not overtake the earlier request `before`.
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

/// Locks of the proxies that update the cells of the ranks of this process. Ranks may share a lock.
static PROXIES: [Mutex<()>; 64] = [const { Mutex::new(()) }; 64];

/// Updates a cell as the owner's proxy, and stores the result of request `number`. Returns `None`
/// if the cell or the result does not exist.
///
/// The update is a load and a store, with `pause` yields between them. A concurrent update without
/// the proxy's lock, such as a native one, would be lost. Ranks in different processes have no
/// common lock, so on this network cells work only between ranks of one process.
fn update(
    inner: &Inner,
    network: &TestNetwork,
    request: &Request,
    number: u64,
    pause: u64,
) -> Option<()> {
    let word = inner.windows.range(request.remote, request.peer, 8)?;
    let result = network.ring.result(request.local)?;
    let word = word.cast::<u64>();
    if !word.is_aligned() {
        return None;
    }
    // SAFETY: the word is aligned, and lies in memory that is mapped as long as its window lives,
    // which outlives this request. Cells are only accessed atomically.
    let cell = unsafe { AtomicU64::from_ptr(word) };
    let owner = inner.executor.constants.id ^ u64::from(request.peer);
    let proxy = &PROXIES[owner as usize % PROXIES.len()];
    let guard = proxy.lock().unwrap_or_else(PoisonError::into_inner);
    let before = cell.load(Ordering::Acquire);
    for _ in 0..pause {
        thread::yield_now();
    }
    let [first, second] = request.value;
    match request.action {
        Action::CompareSwap if before == first => cell.store(second, Ordering::Release),
        Action::CompareSwap => {}
        _ => cell.store(before.wrapping_add(first), Ordering::Release),
    }
    drop(guard);
    // SAFETY: `Ring::result` has checked the address that the request names.
    unsafe { Requests::store_result(result, number, before) };
    Some(())
}

/// Copies `bytes` bytes in an order in which a receiver that reads the target before the signal
/// finds flags without their data.
///
/// # Safety
/// The requirements of [`ptr::copy`].
unsafe fn put(to: *mut u8, from: *const u8, bytes: usize) {
    let torn = bytes.min(TORN);
    // SAFETY: the caller guarantees that both ranges are valid for `bytes` bytes, and every access
    // is within the ranges.
    unsafe {
        ptr::copy(from.add(torn), to.add(torn), bytes - torn);
        // Copies the second half of each 8-byte word first, which contains the flags of packets.
        for half in [4, 0] {
            for index in (0..torn).rev().filter(|index| index & 4 == half) {
                to.add(index).write_volatile(from.add(index).read());
            }
            thread::yield_now();
        }
    }
}

/// Executes a request that does not update a cell. Returns `None` if a range does not exist.
fn carry_out(inner: &Inner, network: &TestNetwork, request: &Request) -> Option<()> {
    let bytes = request.bytes;
    let window = |addr: WindowAddr, rank| inner.windows.range(addr, rank, bytes);
    let remote = window(request.remote, request.peer)?;
    let local = || match request.local.window() {
        STAGING => network.ring.staging(request.local, bytes),
        _ => window(request.local, inner.group.rank),
    };
    // SAFETY: `Windows::range` checked that the ranges lie in memory that is mapped as long as its
    // window lives, which outlives this request. The kernels' protocols order these accesses with
    // others.
    unsafe {
        match request.action {
            Action::Put => put(remote, local()?, bytes as usize),
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
            Action::FetchAdd | Action::CompareSwap => return None,
        }
    }
    Some(())
}
