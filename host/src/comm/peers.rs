//! A thread that observes events that the waits of kernels cannot detect.
//!
//! It waits for the exit of other ranks' processes and marks these ranks as dead in their
//! communicators, so that waits for them need not last until the timeout. It also warns of kernels
//! on the CPU that run for longer than three times the timeout. Such a kernel may poll memory
//! without the waits of a session, and would otherwise hang without a message.
//!
//! A mark alone does not fail the communicator: a rank that has completed its part may exit at any
//! time. A wait that finds the awaited rank marked polls once more, and fails if the awaited value
//! is still missing, because it can no longer arrive.

use core::mem::offset_of;
use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::thread;

use fusewire_device::layout::{CommState, WorkspaceLayout};

use super::observe::Recorder;
use super::{Inner, nanoseconds};
use crate::memory::Memory;
use crate::{Activity, process};

/// Longest time between two checks of the communicators.
const SWEEP: Duration = Duration::from_secs(1);

/// Polling interval for processes for which the system provides no descriptor.
const LOOK: Duration = Duration::from_millis(20);

/// A process, and the communicators with a rank in it.
struct WatchedProcess {
    /// Becomes readable once the process has ended; `None` if the system has no such descriptors.
    descriptor: Option<OwnedFd>,
    interests: Vec<(Weak<Inner>, u32)>,
}

/// Launches of a communicator. Holds no strong reference to the communicator, so that this thread
/// never drops it.
struct WatchedLaunches {
    communicator: Weak<Inner>,
    name: String,
    rank: u32,
    recorder: Arc<Recorder>,
    timeout: Duration,
    /// Longest timeout of a call in nanoseconds, or 0 if no call had a longer one than the
    /// communicator's.
    longest_timeout_ns: Arc<AtomicU64>,
    /// Number of the last operation that was reported.
    reported: u64,
}

#[derive(Default)]
struct State {
    /// By process id and start time.
    processes: HashMap<(u32, u64), WatchedProcess>,
    /// Communicators on the CPU, whose long launches are reported.
    communicators: Vec<WatchedLaunches>,
    /// Wakes the thread; `Some` while the thread runs.
    wake: Option<OwnedFd>,
}

fn state() -> MutexGuard<'static, State> {
    static STATE: OnceLock<Mutex<State>> = OnceLock::new();
    STATE
        .get_or_init(Mutex::default)
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// Starts to mark the dead processes of a communicator and to report its long launches.
pub(super) fn watch(inner: &Arc<Inner>) {
    let own = std::process::id();
    let mut state = state();
    // The recorder does not have the running times of GPU kernels and backend calls.
    let mut added = inner.executor.on_gpu.is_none() && inner.executor.backend.is_none();
    if added {
        state.communicators.push(WatchedLaunches {
            communicator: Arc::downgrade(inner),
            name: inner.group.full_name.clone(),
            rank: inner.group.rank,
            recorder: Arc::clone(&inner.observer.recorder),
            timeout: inner.group.options.timeout,
            longest_timeout_ns: Arc::clone(&inner.executor.longest_timeout_ns),
            reported: 0,
        });
    }
    for (rank, key) in (0..).zip(&inner.group.processes) {
        // The end of a process on another host is detected by timeouts only.
        let Some(key) = key.as_ref().filter(|key| key.0 != own) else {
            continue;
        };
        let watched = state
            .processes
            .entry(*key)
            .or_insert_with(|| WatchedProcess {
                descriptor: process::descriptor(key.0),
                interests: Vec::new(),
            });
        watched.interests.push((Arc::downgrade(inner), rank));
        added = true;
    }
    if !added {
        return;
    }
    match &state.wake {
        Some(wake) => notify(wake),
        None => start(&mut state),
    }
}

fn start(state: &mut State) {
    // SAFETY: no preconditions.
    let wake = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if wake < 0 {
        let error = io::Error::last_os_error();
        tracing::warn!(%error, "deaths of peers are noticed by timeouts only");
        return;
    }
    // SAFETY: a new descriptor, which has no other owner.
    state.wake = Some(unsafe { OwnedFd::from_raw_fd(wake) });
    let spawned = thread::Builder::new()
        .name("fusewire-peers".to_owned())
        .spawn(work);
    if let Err(error) = spawned {
        state.wake = None;
        tracing::warn!(%error, "deaths of peers are noticed by timeouts only");
    }
}

fn notify(wake: &OwnedFd) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: `one` is eight readable bytes. If the counter is full, the thread wakes as well.
    unsafe { libc::write(wake.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}

fn work() {
    loop {
        let (mut polled, keys, timeout) = {
            let mut state = state();
            for watched in state.processes.values_mut() {
                watched
                    .interests
                    .retain(|(inner, _)| inner.strong_count() > 0);
            }
            state
                .processes
                .retain(|_, watched| !watched.interests.is_empty());
            state
                .communicators
                .retain(|launches| launches.communicator.strong_count() > 0);
            let is_idle = state.processes.is_empty() && state.communicators.is_empty();
            let Some(wake) = state.wake.as_ref().filter(|_| !is_idle) else {
                state.wake = None;
                return;
            };
            let entry = |fd: i32| libc::pollfd {
                fd,
                events: libc::POLLIN,
                revents: 0,
            };
            let mut polled = vec![entry(wake.as_raw_fd())];
            let mut keys = Vec::new();
            let mut timeout = SWEEP;
            for (key, watched) in &state.processes {
                let descriptor = watched.descriptor.as_ref();
                if descriptor.is_none() {
                    timeout = LOOK;
                }
                // `poll` ignores negative descriptors.
                polled.push(entry(descriptor.map_or(-1, |fd| fd.as_raw_fd())));
                keys.push(*key);
            }
            (polled, keys, timeout)
        };
        let milliseconds = timeout.as_millis() as i32;
        // SAFETY: `polled` holds as many entries as passed. Descriptors stay open, because only
        // this thread closes them.
        unsafe {
            libc::poll(
                polled.as_mut_ptr(),
                polled.len() as libc::nfds_t,
                milliseconds,
            )
        };
        if polled[0].revents != 0 {
            let mut drained = [0u8; 8];
            // SAFETY: `drained` is eight writable bytes.
            unsafe { libc::read(polled[0].fd, drained.as_mut_ptr().cast(), drained.len()) };
        }
        let messages: Vec<String> = state()
            .communicators
            .iter_mut()
            .filter_map(WatchedLaunches::report)
            .collect();
        for message in messages {
            crate::store::notice::warn(message);
        }
        for (entry, key) in polled[1..].iter().zip(keys) {
            let ended = entry.revents != 0 || (entry.fd < 0 && process::has_ended(key.0, key.1));
            if !ended {
                continue;
            }
            let watched = state().processes.remove(&key);
            for (inner, rank) in watched.into_iter().flat_map(|watched| watched.interests) {
                if let Some(inner) = inner.upgrade() {
                    inner.mark(&inner.executor.workspace, rank);
                }
            }
        }
    }
}

impl WatchedLaunches {
    /// Returns a warning if a launch has run for longer than any of its waits can last.
    fn report(&mut self) -> Option<String> {
        let of_calls = Duration::from_nanos(self.longest_timeout_ns.load(Ordering::Relaxed));
        let timeout = self.timeout.max(of_calls);
        // The longest wait is the one for another block: three times the timeout.
        let limit = timeout.saturating_mul(3).saturating_add(SWEEP);
        let long = self.recorder.running(limit, self.reported)?;
        self.reported = long.id;
        let activity = Activity::new(long.op_info.call, long.sequence, 0);
        Some(format!(
            "communicator \"{}\": rank {} has been in {} #{} for {:.1} s, and a wait of a session \
             ends after {:.1} s: the kernel polls memory by itself, computes, or was stopped; to \
             wait for another rank, call the waits of the session, of windows or of queues, which \
             end and name the late rank",
            self.name,
            self.rank,
            activity.name(),
            long.sequence,
            long.elapsed.as_secs_f64(),
            timeout.as_secs_f64(),
        ))
    }
}

impl Inner {
    /// Returns true if `rank` has left this communicator, or its process has ended.
    pub(super) fn is_marked(&self, rank: u32) -> bool {
        let word = self.executor.constants.workspace.dead + u64::from(rank / 64) * 8;
        self.executor.workspace.load(word) >> (rank % 64) & 1 == 1
    }

    /// Marks this rank as departed at each peer, so that a wait for it fails early instead of at
    /// the timeout.
    pub(super) fn leave(&self) {
        if self.executor.backend.is_some() {
            return;
        }
        // Copies replace whole words of GPU memory. If a rank of another process leaves at the same
        // time, its copy may overwrite this rank's bit, and the second pass sets the bit again.
        let passes = 1 + u32::from(self.executor.on_gpu.is_some());
        for _ in 0..passes {
            for (rank, workspace) in (0..).zip(&self.executor.workspaces) {
                // The memory of a rank that has left may be gone, and it waits for nothing.
                let is_peer = rank != self.group.rank && !self.is_marked(rank);
                if let Some(workspace) = workspace
                    && is_peer
                    && self.executor.reaches(rank)
                {
                    self.mark(workspace, self.group.rank);
                }
            }
        }
        if let Some(network) = &self.executor.network {
            network.leave();
        }
    }

    /// Sets the timeout of calls that have none. Zero selects that of the options.
    pub(super) fn set_timeout(&self, timeout: Duration) {
        let timeout_ns = self.call_timeout(timeout);
        self.group.timeout_ns.store(timeout_ns, Ordering::Relaxed);
    }

    /// Returns the timeout of a call in nanoseconds. 0, which stands for the communicator's
    /// timeout, remains 0.
    pub(super) fn call_timeout(&self, timeout: Duration) -> u64 {
        if timeout.is_zero() {
            return 0;
        }
        let ns = nanoseconds(timeout);
        if timeout > self.group.options.timeout {
            self.executor
                .longest_timeout_ns
                .fetch_max(ns, Ordering::Relaxed);
        }
        ns
    }

    /// Marks `rank` as dead in the workspace of a rank. In GPU memory, another process that changes
    /// the same word at the same time may undo the mark.
    fn mark(&self, workspace: &Memory, rank: u32) {
        // `Memory::compare_exchange` is not atomic in GPU memory.
        static ON_GPU: Mutex<()> = Mutex::new(());
        let on_gpu = self.executor.on_gpu.as_ref();
        let _lock = on_gpu.map(|_| ON_GPU.lock().unwrap_or_else(PoisonError::into_inner));
        mark_dead(workspace, &self.executor.constants.workspace, rank);
    }
}

/// Marks `rank` as dead in a workspace. Returns false if it was marked before.
pub(super) fn mark_dead(workspace: &Memory, layout: &WorkspaceLayout, rank: u32) -> bool {
    let word = layout.dead + u64::from(rank / 64) * 8;
    let is_new = update(workspace, word, |seen| seen | 1 << (rank % 64));
    // The count changes only after the bit is set.
    if is_new {
        update(workspace, offset_of!(CommState, dead) as u64, |dead| {
            dead + 1
        });
    }
    is_new
}

/// Changes a word. Returns false if it has the new value already.
fn update(memory: &Memory, word: u64, change: impl Fn(u64) -> u64) -> bool {
    let mut seen = memory.load(word);
    while change(seen) != seen {
        let before = memory.compare_exchange(word, seen, change(seen));
        if before == seen {
            return true;
        }
        seen = before;
    }
    false
}
