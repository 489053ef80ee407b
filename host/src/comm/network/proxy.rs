//! The proxy of a process: takes the requests of its ranks' kernels and sends them to the proxies
//! of other processes, and executes theirs.
//!
//! A thread that holds the lock makes progress: the proxy's own thread, or a kernel that waits.
//! While kernels drive the proxy, its thread sleeps and does not poll the sockets, so no arrival
//! wakes it. It polls them again at most about two [`PAUSE`]s after the last call of [`drive`].
//!
//! For the entries of a ring, see [`fusewire_device::net`]. For the windows of a rank:
//!
//! - **Who may overwrite what:** the proxy writes them, for requests of other processes,
//! - **after having acquired** the request, which the rank's endpoint, while it is open, permits;
//! - **released by** the close of the endpoint: after a failure of the communicator, before the
//!   rank returns it ([`Attached::after_failure`]); or, after an end without a failure, when the
//!   other ranks have left or [`LINGER`] has passed.
//!
//! # Failures
//! If a process is lost, its ranks are marked as dead in the workspaces of the ranks of this
//! process, whose waits then fail and name them. A rank that has detected a failure sends its
//! failure record to all ranks of other processes.

use core::net::IpAddr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError, Weak};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::{ABORT, CommConst};
use fusewire_device::net::{Action, Request, Requests, STAGING};
use fusewire_driver::descriptor::{WakeFd, entry, poll};
use fusewire_net::Url;
use fusewire_net::mesh::{Event, Local, Mesh, MeshRequest, Operation, RefusalCause};

use super::endpoint::{Endpoint, ProgressWords, RemoteRank};
use super::ring::{Ring, RingConfig};
use crate::comm::Inner;
use crate::comm::windows::Windows;
use crate::comm::words::BY_HOST;
use crate::memory::Memory;
use crate::{Error, Result};

/// Number of entries of a ring.
const DEPTH: usize = 256;

/// Staging memory of a block.
const STAGING_BYTES: usize = 64 << 10;

/// Time for which the thread sleeps while kernels drive the proxy.
const PAUSE: Duration = Duration::from_millis(1);

/// Longest sleep of the thread. After it, the thread checks for failures.
const TICK: Duration = Duration::from_millis(20);

/// Minimum time between two notices of a rank's changed progress. The progress is also sent before
/// each signal.
const REFRESH: Duration = Duration::from_millis(20);

/// Maximum time for which ranks that have not left can still access the memory of a rank that has
/// left, after its communicator has been dropped.
const LINGER: Duration = Duration::from_secs(30);

/// Time for which [`Attached::await_others`] waits.
const AWAIT_TIME: Duration = Duration::from_secs(1);

/// Time in which a proxy that ends sends what is left.
const FLUSH_TIME: Duration = Duration::from_secs(1);

/// Distinguishes proxies of one process: the address on which it listens, and in tests the host
/// that it stands for.
type Key = (IpAddr, Option<(u64, u32)>);

/// The proxy of a process.
#[derive(Debug)]
pub(in crate::comm) struct Proxy {
    shared: Arc<Shared>,
    url: Url,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Number of calls of [`drive`].
    turns: AtomicU64,
    /// Set when a kernel has appended a request and might not wait afterwards.
    has_new: AtomicBool,
    stop: AtomicBool,
    wake: WakeFd,
}

#[derive(Debug)]
struct State {
    mesh: Mesh,
    served: HashMap<u64, Served>,
    events: Vec<Event>,
    /// Communicators that must be stopped, and the reasons.
    reports: Vec<(Weak<Inner>, Report)>,
    /// References to this proxy to drop, which is only possible without the lock.
    unused: Vec<Arc<Proxy>>,
}

/// Reason to stop a communicator.
#[derive(Debug)]
enum Report {
    /// The rank with this number can no longer be reached, so a request to it has no answer.
    Lost(u32),
    /// A request cannot be executed.
    Refused(String),
}

/// A rank whose requests the proxy executes.
#[derive(Debug)]
struct Served {
    number: u64,
    endpoint: Arc<Endpoint>,
    requests: Requests,
    inner: Weak<Inner>,
    /// Ranks of other processes, by rank.
    remotes: Vec<Option<RemoteRank>>,
    /// All requests with smaller numbers have been executed.
    completed: u64,
    /// For each taken request from number `completed` on: true if it has been executed.
    pending: VecDeque<bool>,
    /// Addresses of the results of updates, by the numbers of the requests.
    results: HashMap<u64, WindowAddr>,
    /// Progress that was last sent to each rank.
    sent_progress: Vec<ProgressWords>,
    refreshed: Instant,
    /// Deadline and error of the first request that a rank did not answer because it has left or
    /// failed. If no other failure has stopped this rank by the deadline, the error does.
    unanswered: Option<(Instant, String)>,
    has_failed: bool,
    /// Set once the communicator has been dropped: the time at which the endpoint closes.
    lingers_until: Option<Instant>,
    /// Keeps the proxy alive from then on.
    keeps: Option<Arc<Proxy>>,
}

impl core::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Endpoint")
            .field("rank", &self.rank)
            .finish_non_exhaustive()
    }
}

impl Proxy {
    /// Returns the proxy of this process, which lives as long as a communicator uses it.
    pub(in crate::comm) fn of_process(key: Key) -> Result<Arc<Self>> {
        static PROXIES: Mutex<Option<HashMap<Key, Weak<Proxy>>>> = Mutex::new(None);
        let mut proxies = PROXIES.lock().unwrap_or_else(PoisonError::into_inner);
        let proxies = proxies.get_or_insert_default();
        if let Some(proxy) = proxies.get(&key).and_then(Weak::upgrade) {
            return Ok(proxy);
        }
        proxies.retain(|_, proxy| proxy.strong_count() > 0);
        let proxy = Arc::new(Self::start(key.0)?);
        proxies.insert(key, Arc::downgrade(&proxy));
        Ok(proxy)
    }

    fn start(address: IpAddr) -> Result<Self> {
        let failed = |error: std::io::Error| {
            Error::launch(format!("the network's proxy cannot be started ({error})"))
        };
        let mesh = Mesh::new(address).map_err(Error::from)?;
        let url = mesh.url().clone();
        let shared = Arc::new(Shared {
            state: Mutex::new(State {
                mesh,
                served: HashMap::new(),
                events: Vec::new(),
                reports: Vec::new(),
                unused: Vec::new(),
            }),
            turns: AtomicU64::new(0),
            has_new: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            wake: WakeFd::new().map_err(failed)?,
        });
        let of_thread = Arc::clone(&shared);
        let thread = thread::Builder::new().name("fusewire-proxy".to_owned());
        let thread = thread.spawn(move || of_thread.run()).map_err(failed)?;
        Ok(Self {
            shared,
            url,
            thread: Mutex::new(Some(thread)),
        })
    }

    /// Returns the URL of the proxy.
    pub(in crate::comm) fn url(&self) -> &Url {
        &self.url
    }

    /// Returns how this process reaches endpoint `endpoint` of `rank`, at the proxy with this URL.
    pub(in crate::comm) fn remote(&self, rank: u32, url: &Url, endpoint: u64) -> RemoteRank {
        let mut state = self.shared.lock();
        let peer = state.mesh.peer(url);
        // Reports the loss of earlier connections to the communicators that have used them.
        state.step();
        RemoteRank {
            rank,
            peer,
            endpoint,
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.wake.wake();
        let thread = self.thread.lock();
        let thread = thread.unwrap_or_else(PoisonError::into_inner).take();
        // The thread may drop the last communicator. It cannot join itself.
        if let Some(thread) = thread.filter(|it| it.thread().id() != thread::current().id())
            && thread.join().is_err()
        {
            tracing::warn!("the thread of the network's proxy panicked");
        }
    }
}

/// Lets the proxy at this address make progress, unless another thread does so already.
///
/// # Safety
/// `agent` must be the address of a live [`Shared`].
unsafe extern "C" fn drive(agent: u64, is_new: bool) {
    // SAFETY: the caller guarantees that the address is valid.
    let shared = unsafe { &*(agent as *const Shared) };
    shared.turns.fetch_add(1, Ordering::Relaxed);
    if is_new {
        shared.has_new.store(true, Ordering::SeqCst);
    }
    // If another thread holds the lock, it may have read this ring before the new request. It
    // checks `has_new` after it has released the lock, and then reads the rings again. The loop is
    // limited, so that requests of other kernels do not keep this kernel here.
    for _ in 0..4 {
        let mut state = match shared.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        shared.has_new.store(false, Ordering::SeqCst);
        state.step();
        let must_deliver = !state.reports.is_empty() || !state.unused.is_empty();
        drop(state);
        if must_deliver {
            shared.wake.wake();
        }
        if !shared.has_new.load(Ordering::SeqCst) {
            return;
        }
    }
    shared.wake.wake();
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent after every statement, so a poisoned lock is harmless.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the proxy's thread.
    fn run(&self) {
        let descriptor = self.lock().mesh.descriptor();
        let mut seen = 0;
        while !self.stop.load(Ordering::SeqCst) {
            let turns = self.turns.load(Ordering::Relaxed);
            if turns != seen {
                seen = turns;
                let mut entries = [entry(self.wake.raw(), libc::POLLIN)];
                self.sleep(&mut entries, PAUSE);
                self.deliver();
                continue;
            }
            let mut entries = [
                entry(self.wake.raw(), libc::POLLIN),
                entry(descriptor, libc::POLLIN),
            ];
            self.sleep(&mut entries, TICK);
            if self.turns.load(Ordering::Relaxed) == seen {
                // Releases the lock after each step, so that kernels can take it.
                for _ in 0..16 {
                    self.has_new.store(false, Ordering::SeqCst);
                    let is_busy = self.lock().step();
                    if !is_busy && !self.has_new.load(Ordering::SeqCst) {
                        break;
                    }
                }
            }
            self.deliver();
        }
        let ended = Instant::now();
        loop {
            let mut state = self.lock();
            let is_busy = state.step();
            if state.mesh.is_flushed() || ended.elapsed() > FLUSH_TIME {
                return;
            }
            drop(state);
            if !is_busy {
                thread::sleep(PAUSE);
            }
        }
    }

    fn sleep(&self, entries: &mut [libc::pollfd], time: Duration) {
        if let Err(error) = poll(entries, Some(time)) {
            tracing::debug!(%error, "the network's proxy cannot wait");
            thread::sleep(PAUSE);
        }
        self.wake.clear();
    }

    /// Stops communicators whose requests cannot be executed. Only the proxy's thread calls this,
    /// not [`drive`], because it calls hooks of the program.
    fn deliver(&self) {
        let mut state = self.lock();
        let reports = core::mem::take(&mut state.reports);
        let unused = core::mem::take(&mut state.unused);
        drop(state);
        drop(unused);
        for (inner, report) in reports {
            let Some(inner) = inner.upgrade() else {
                continue;
            };
            match report {
                Report::Lost(rank) => inner.fail_for_lost(rank),
                Report::Refused(reason) => inner.fail_for(inner.group.error(reason)),
            }
        }
    }
}

impl State {
    /// Closes an endpoint, after which its memory is no longer accessed.
    fn close(&mut self, number: u64) {
        self.mesh.close(number);
        let ended = self.served.remove(&number);
        self.unused.extend(ended.and_then(|served| served.keeps));
    }

    /// Makes progress. Returns true if there was something to do.
    fn step(&mut self) -> bool {
        let now = Instant::now();
        let mut ended = None;
        for served in self.served.values_mut() {
            served.advance(&mut self.mesh, &mut self.reports, now);
            if let Some(limit) = served.lingers_until
                && (limit <= now || served.is_alone(&self.mesh))
            {
                ended = Some(served.number);
            }
        }
        if let Some(number) = ended {
            self.close(number);
        }
        let is_busy = self.mesh.poll(&mut self.events);
        for event in self.events.drain(..) {
            match event {
                Event::Completed {
                    sender,
                    number,
                    value,
                } => {
                    if let Some(served) = self.served.get_mut(&sender) {
                        served.complete(number, value);
                    }
                }
                Event::Refused {
                    sender,
                    number,
                    endpoint,
                    cause,
                } => {
                    if let Some(served) = self.served.get_mut(&sender) {
                        served.refused(number, endpoint, cause, now, &mut self.reports);
                    }
                }
                Event::Lost { peer, reason } => {
                    for served in self.served.values() {
                        let lost = served.remotes.iter().flatten();
                        for remote in lost.filter(|remote| remote.peer == peer) {
                            served.endpoint.lose(remote.rank, &reason);
                        }
                    }
                }
            }
        }
        is_busy
    }
}

impl Served {
    /// Handles a request for `endpoint` that was not executed.
    fn refused(
        &mut self,
        number: u64,
        endpoint: u64,
        cause: RefusalCause,
        now: Instant,
        reports: &mut Vec<(Weak<Inner>, Report)>,
    ) {
        let mut remotes = self.remotes.iter().flatten();
        let Some(remote) = remotes.find(|remote| remote.endpoint == endpoint) else {
            return;
        };
        let rank = remote.rank;
        let report = match cause {
            RefusalCause::Lost(reason) => {
                self.endpoint.lose(rank, &reason);
                Report::Lost(rank)
            }
            RefusalCause::Range => Report::Refused(format!(
                "rank {rank} has refused network request {number}: the range is not in a window, \
                 or the word is not aligned"
            )),
            RefusalCause::Closed => {
                // A failure record or a notice of that rank usually follows and gives the reason.
                let reason = format!(
                    "rank {rank} does not answer network request {number}: it has left the \
                     communicator, or has failed"
                );
                self.unanswered.get_or_insert((now + AWAIT_TIME, reason));
                return;
            }
        };
        reports.push((self.inner.clone(), report));
    }

    /// Returns true if all ranks of connected processes have left.
    fn is_alone(&self, mesh: &Mesh) -> bool {
        let mut connected = self.remotes.iter().flatten();
        connected
            .all(|remote| !mesh.is_connected(remote.peer) || self.endpoint.is_gone(remote.rank))
    }

    /// Takes requests from the ring and posts them.
    fn advance(&mut self, mesh: &mut Mesh, reports: &mut Vec<(Weak<Inner>, Report)>, now: Instant) {
        if self.has_failed || self.endpoint.abort_word() != 0 {
            return self.after_failure(mesh);
        }
        loop {
            let number = self.completed + self.pending.len() as u64;
            let Some(request) = self.requests.take(number) else {
                break;
            };
            if self.endpoint.abort_word() != 0 {
                return self.after_failure(mesh);
            }
            self.pending.push_back(false);
            let posted = match request {
                Ok(request) => self.post(mesh, number, &request, reports).ok_or_else(|| {
                    format!("network request {number} for memory that does not exist: {request:?}")
                }),
                Err(words) => Err(format!("network request {number} is invalid: {words:x?}")),
            };
            if let Err(reason) = posted {
                reports.push((self.inner.clone(), Report::Refused(reason)));
            }
        }
        if let Some((_, reason)) = self.unanswered.take_if(|(limit, _)| *limit <= now) {
            reports.push((self.inner.clone(), Report::Refused(reason)));
        }
        if now.saturating_duration_since(self.refreshed) > REFRESH {
            self.refreshed = now;
            for index in 0..self.remotes.len() {
                let remote = self.remotes[index].filter(|remote| mesh.is_connected(remote.peer));
                if let Some(remote) = remote {
                    self.send_progress(mesh, remote);
                }
            }
        }
    }

    /// Sends the progress of this rank to a rank of another process, if it has changed.
    fn send_progress(&mut self, mesh: &mut Mesh, remote: RemoteRank) {
        let (notice, words) = self.endpoint.progress();
        let sent_progress = &mut self.sent_progress[remote.rank as usize];
        if *sent_progress != words {
            *sent_progress = words;
            mesh.notify(remote.peer, self.number, remote.endpoint, &notice);
        }
    }

    /// Posts a request. Returns `None` if a rank or range does not exist.
    fn post(
        &mut self,
        mesh: &mut Mesh,
        number: u64,
        request: &Request,
        reports: &mut Vec<(Weak<Inner>, Report)>,
    ) -> Option<()> {
        let Some(remote) = *self.remotes.get(request.peer as usize)? else {
            let value = self.update(request)?;
            self.results.insert(number, request.local);
            self.complete(number, Some(value));
            return Some(());
        };
        let (endpoint, bytes) = (&self.endpoint, request.bytes);
        let own = |addr: WindowAddr| endpoint.windows.range(addr, endpoint.rank, bytes);
        // Parts of a window have the same size on all ranks.
        own(request.remote)?;
        let local = || {
            let start = match request.local.window() {
                STAGING => endpoint.ring.staging(request.local, bytes),
                _ => own(request.local),
            };
            Some(Local {
                address: request.local.0,
                start: start?,
            })
        };
        let bytes = usize::try_from(bytes).ok()?;
        let [first, second] = request.value;
        let operation = match request.action {
            Action::Put => Operation::Put {
                local: local()?,
                bytes,
            },
            Action::Get => Operation::Get {
                local: local()?,
                bytes,
            },
            Action::Store if bytes <= 16 => Operation::Store {
                values: request.value,
                bytes,
            },
            Action::Store => return None,
            Action::Signal => Operation::Signal(first),
            Action::FetchAdd => Operation::Add(first),
            Action::CompareSwap => Operation::Swap(first, second),
        };
        if matches!(operation, Operation::Add(_) | Operation::Swap(..)) {
            self.endpoint.ring.result(request.local)?;
            self.results.insert(number, request.local);
        }
        if matches!(operation, Operation::Signal(_)) {
            // A signal must not overtake the progress of the kernel that sends it.
            self.send_progress(mesh, remote);
        }
        if self.endpoint.reason_of_loss(remote.rank).is_some() {
            // Earlier requests may be missing there, so later ones must not be executed, even if
            // the process can be reached again.
            let cause = RefusalCause::Lost(String::new());
            match operation {
                Operation::Put { .. } | Operation::Store { .. } | Operation::Signal(_) => {
                    self.complete(number, None);
                }
                _ => self.refused(number, remote.endpoint, cause, self.refreshed, reports),
            }
            return Some(());
        }
        let request = MeshRequest {
            sender: self.number,
            number,
            endpoint: remote.endpoint,
            address: request.remote.0,
            operation,
        };
        // SAFETY: the range is in the ring's staging memory, which lives as long as the endpoint is
        // served, or in a window: see the implementation of `mesh::Endpoint`.
        unsafe { mesh.post(remote.peer, request) };
        Some(())
    }

    /// Updates a cell of a rank that is reachable by load and store, and returns the previous
    /// value. In a communicator with a network, these updates are requests, too. Returns `None` for
    /// another action, or if the cell or the result does not exist.
    fn update(&self, request: &Request) -> Option<u64> {
        let cell = self
            .endpoint
            .windows
            .range(request.remote, request.peer, 8)?;
        self.endpoint.ring.result(request.local)?;
        let cell = cell.cast::<u64>();
        if !cell.is_aligned() {
            return None;
        }
        // SAFETY: the word is aligned, and lies in memory that is mapped as long as its window
        // lives, which outlives this request. Cells are only accessed atomically.
        let cell = unsafe { AtomicU64::from_ptr(cell) };
        let [first, second] = request.value;
        match request.action {
            Action::FetchAdd => Some(cell.fetch_add(first, Ordering::AcqRel)),
            Action::CompareSwap => {
                let swapped =
                    cell.compare_exchange(first, second, Ordering::AcqRel, Ordering::Acquire);
                Some(swapped.unwrap_or_else(|before| before))
            }
            _ => None,
        }
    }

    /// Notes that a request has been executed.
    fn complete(&mut self, number: u64, value: Option<u64>) {
        if let (Some(value), Some(addr)) = (value, self.results.remove(&number))
            && let Some(result) = self.endpoint.ring.result(addr)
        {
            // SAFETY: `Ring::result` has checked the address that the request names.
            unsafe { Requests::store_result(result, number, value) };
        }
        let index = number.checked_sub(self.completed);
        if let Some(pending) = index.and_then(|index| self.pending.get_mut(index as usize)) {
            *pending = true;
        }
        let before = self.completed;
        while self.pending.front() == Some(&true) {
            self.pending.pop_front();
            self.completed += 1;
        }
        if self.completed != before {
            self.requests.complete(self.completed);
        }
    }

    /// Notifies the ranks of connected processes that this rank has left.
    fn leave(&mut self, mesh: &mut Mesh) {
        for index in 0..self.remotes.len() {
            let remote = self.remotes[index].filter(|remote| mesh.is_connected(remote.peer));
            if let Some(remote) = remote {
                // Sent first, so that waits do not count this rank as missing in launches that it
                // has completed.
                self.send_progress(mesh, remote);
                let notice = Endpoint::departure();
                mesh.notify(remote.peer, self.number, remote.endpoint, &notice);
            }
        }
    }

    /// Closes the endpoint, and stops the ranks of other processes if this rank has detected the
    /// failure.
    fn after_failure(&mut self, mesh: &mut Mesh) {
        let word = self.endpoint.abort_word();
        if word == 0 || core::mem::replace(&mut self.has_failed, true) {
            return;
        }
        mesh.close(self.number);
        if word & BY_HOST != 0 {
            // The host stopped this rank only: for the others, it has left the communicator.
            return self.leave(mesh);
        }
        if word != ABORT | u64::from(self.endpoint.rank) {
            return;
        }
        let notice = self.endpoint.failure();
        for remote in self.remotes.iter().flatten() {
            mesh.notify(remote.peer, self.number, remote.endpoint, &notice);
        }
    }
}

/// Connections of a rank to the ranks of other processes.
pub(in crate::comm) struct NetworkParts {
    pub(in crate::comm) proxy: Arc<Proxy>,
    /// Number of this rank's endpoint.
    pub(in crate::comm) endpoint: u64,
    pub(in crate::comm) remotes: Vec<RemoteRank>,
}

/// A rank that a proxy serves.
pub(in crate::comm) struct Attached {
    proxy: Arc<Proxy>,
    number: u64,
    endpoint: Arc<Endpoint>,
    /// Number of ranks.
    size: u32,
    remotes: Vec<RemoteRank>,
}

impl Attached {
    /// Opens the endpoint of a rank with these constants. Its requests are executed from
    /// [`Attached::serve`] on.
    pub(in crate::comm) fn new(
        parts: NetworkParts,
        constants: &CommConst,
        (blocks, lanes): (u32, u32),
        windows: &Arc<Windows>,
        workspace: Memory,
    ) -> Self {
        let NetworkParts {
            proxy,
            endpoint: number,
            remotes,
        } = parts;
        let ring = Ring::new(RingConfig {
            blocks,
            lanes,
            depth: DEPTH,
            staging_bytes: STAGING_BYTES,
            drive: (drive as *const () as u64, Arc::as_ptr(&proxy.shared) as u64),
        });
        let endpoint = Endpoint::new(ring, constants, Arc::clone(windows), workspace, &remotes);
        let endpoint = Arc::new(endpoint);
        proxy
            .shared
            .lock()
            .mesh
            .open(number, Arc::clone(&endpoint) as _);
        let shared = Arc::downgrade(&proxy.shared);
        windows.on_end(move |id| {
            if let Some(shared) = shared.upgrade() {
                let is_in = |address| WindowAddr(address).window() as usize == id;
                shared.lock().mesh.forget(number, &is_in);
            }
        });
        Self {
            proxy,
            number,
            endpoint,
            size: constants.size,
            remotes,
        }
    }

    /// Begins to execute the requests.
    pub(super) fn serve(&self, inner: Weak<Inner>) {
        let mut by_rank = vec![None; self.size as usize];
        for remote in &self.remotes {
            by_rank[remote.rank as usize] = Some(*remote);
        }
        let served = Served {
            number: self.number,
            endpoint: Arc::clone(&self.endpoint),
            requests: self.endpoint.ring.requests(),
            inner,
            sent_progress: vec![ProgressWords::default(); by_rank.len()],
            remotes: by_rank,
            completed: 0,
            pending: VecDeque::new(),
            results: HashMap::new(),
            refreshed: Instant::now(),
            unanswered: None,
            has_failed: false,
            lingers_until: None,
            keeps: None,
        };
        self.proxy.shared.lock().served.insert(self.number, served);
    }

    /// Returns the address of the context for kernels.
    pub(super) fn context(&self) -> u64 {
        self.endpoint.ring.context()
    }

    /// Closes the endpoint after a failure, so that nothing is written to the rank's memory any
    /// more, and stops the ranks of other processes if this rank has detected the failure.
    pub(super) fn after_failure(&self) {
        let mut state = self.proxy.shared.lock();
        let State { served, mesh, .. } = &mut *state;
        if let Some(served) = served.get_mut(&self.number) {
            served.after_failure(mesh);
        }
        state.step();
    }

    /// Stores a word in the memory of a rank of another process. Later requests to that rank are
    /// executed after it.
    pub(super) fn store(&self, rank: u32, addr: WindowAddr, value: u64) {
        let mut state = self.proxy.shared.lock();
        let remote = self.remotes.iter().find(|remote| remote.rank == rank);
        let Some(remote) = remote.filter(|_| self.endpoint.abort_word() == 0) else {
            return;
        };
        let request = MeshRequest {
            sender: self.number,
            // Nothing waits for its completion.
            number: u64::MAX,
            endpoint: remote.endpoint,
            address: addr.0,
            operation: Operation::Store {
                values: [value, 0],
                bytes: 8,
            },
        };
        // SAFETY: a store has no range of this rank's memory.
        unsafe { state.mesh.post(remote.peer, request) };
        state.step();
    }

    /// Notifies the ranks of connected processes that this rank has left without a failure. They
    /// can access its memory until they have left, too, but at most [`LINGER`] after this value is
    /// dropped.
    pub(super) fn leave(&self) {
        if !self.endpoint.leave() {
            return;
        }
        let mut state = self.proxy.shared.lock();
        let State { served, mesh, .. } = &mut *state;
        if let Some(served) = served.get_mut(&self.number) {
            served.leave(mesh);
        }
        state.step();
    }

    /// Waits up to [`AWAIT_TIME`] until the ranks of connected processes have left, too, because
    /// this process cannot answer their gets after it has exited.
    pub(super) fn await_others(&self) {
        let started = Instant::now();
        while started.elapsed() < AWAIT_TIME {
            let mut state = self.proxy.shared.lock();
            state.step();
            let served = state.served.get(&self.number);
            let is_over = served.is_none_or(|served| served.is_alone(&state.mesh));
            drop(state);
            if is_over {
                return;
            }
            thread::sleep(PAUSE);
        }
    }

    /// Returns the reason why `rank` can no longer be reached, unless it has left.
    pub(super) fn reason_of_loss(&self, rank: u32) -> Option<String> {
        self.endpoint.reason_of_loss(rank)
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let mut state = self.proxy.shared.lock();
        match state.served.get_mut(&self.number) {
            Some(served) if served.endpoint.has_left() => {
                served.lingers_until = Some(Instant::now() + LINGER);
                served.keeps = Some(Arc::clone(&self.proxy));
                // Closes it if no rank needs it any more.
                state.step();
                let must_deliver = !state.unused.is_empty();
                drop(state);
                if must_deliver {
                    self.proxy.shared.wake.wake();
                }
            }
            _ => state.close(self.number),
        }
    }
}
