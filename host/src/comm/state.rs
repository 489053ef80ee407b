//! State of a communicator (alive, failed, aborted, finalized) and the watchdog.

use core::mem::offset_of;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::sync::{Arc, OnceLock};
use std::thread;

use fusewire_device::call::{Call, Operation};
use fusewire_device::comm::{Comm, WindowAddr};
use fusewire_device::layout::{ABORT, BLOCKS_AT, BlockState, FailureKind, FailureRecord, Progress};
use fusewire_device::mem::{self, Order, Scope};
use fusewire_device::wait;

use super::observe::{Buffers, OpInfo, path_of_environment};
use super::words::{ABORT_AT, BY_HOST, FAILURE_AT};
use super::{Communicator, Inner};
use crate::algorithm::Algorithm;
use crate::error::{Activity, Failure};
use crate::options::warn_user;
use crate::{EndReason, Error, Result, process};

/// The end of a communicator.
#[derive(Default)]
pub(super) struct Status {
    /// The first failure.
    pub(super) failure: OnceLock<Error>,
    pub(super) finalized: AtomicBool,
    /// Set while [`Communicator::finalize`] waits for pending work. It returns a failure, so the
    /// watchdog does not end the process.
    is_finalizing: AtomicBool,
    /// True if a drop without [`Communicator::finalize`] is a mistake that the user must see: if
    /// [`new_comm`](super::new_comm) created the communicator, or one that it was split from.
    pub(super) must_finalize: AtomicBool,
    /// Set once [`Communicator::reconfigure`] has replaced this communicator.
    pub(super) replaced: OnceLock<Error>,
    /// Set once the watchdog was started.
    is_watched: AtomicBool,
    /// Set if the watchdog detected the failure, and no call was refused yet.
    is_unnoticed: AtomicBool,
    /// Number of calls of [`Communicator::abort`] on this rank.
    aborts: AtomicU64,
}

/// Polling interval of the watchdog.
const WATCHDOG: Duration = Duration::from_millis(100);

impl Communicator {
    /// Returns the failure of this communicator, if it has failed.
    pub fn failure(&self) -> Option<Error> {
        self.inner.executor.look();
        self.inner.check().err()
    }

    /// Aborts the communicator; callable from any thread. Every operation that waits, on each rank
    /// that is reachable by load and store or by the proxy, returns an error within milliseconds.
    /// Later calls and
    /// replays return the same error. A second call does nothing, except that every call ends a
    /// [`Communicator::reconfigure`] of this communicator in which this rank waits.
    pub fn abort(&self) {
        self.inner.status.aborts.fetch_add(1, Ordering::Relaxed);
        self.inner.abort();
    }

    /// Returns true if the communicator has failed or was aborted.
    pub fn is_aborted(&self) -> bool {
        self.inner.executor.look();
        self.inner.executor.abort_word() != 0
            && !self.inner.status.finalized.load(Ordering::Acquire)
    }

    /// Returns true if [`Communicator::abort`] reaches waiting ranks, as it does on all backends of
    /// this crate.
    pub fn is_abort_supported(&self) -> bool {
        true
    }

    /// Waits for all work on this value's stream and on the stream of the communicator's last
    /// launch, then ends the communicator on this rank: later calls return an error. Not
    /// collective: memory that peers have mapped remains valid. Ranks of other hosts can access
    /// this rank's memory until they have ended the communicator, too, at most until 30 s after
    /// this rank has dropped its last handle, or until this process exits. The call waits up to 1 s
    /// for these ranks to end the communicator. A second call does nothing.
    ///
    /// # Errors
    /// The failure of the communicator, or of work on these streams that was not waited for.
    pub fn finalize(&self) -> Result<()> {
        if self.inner.status.finalized.load(Ordering::Acquire) {
            return Ok(());
        }
        self.hooked("finalize", None, Buffers::default, |_| self.end())
    }

    fn end(&self) -> Result<()> {
        self.inner
            .status
            .is_finalizing
            .store(true, Ordering::Release);
        let last = self
            .inner
            .executor
            .lock_order()
            .as_ref()
            .map(|(stream, _)| stream.clone());
        let mut ended = self.stream.synchronize();
        if let Some(stream) = last.filter(|stream| stream.id() != self.stream.id()) {
            ended = ended.and(stream.synchronize());
        }
        ended = ended.and(self.inner.check());
        // Set only now: if the work fails, abort hooks and the flight record must report it.
        if self.inner.status.finalized.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        if ended.is_ok() {
            self.inner.leave();
            if let Some(network) = &self.inner.executor.network {
                network.await_others();
            }
        }
        self.inner.stop(Error::Ended {
            name: self.inner.group.full_name.clone(),
            reason: EndReason::Finalized,
            detail: "it was finalized on this rank; make a new one".to_owned(),
        });
        ended
    }
}

impl Inner {
    /// Returns this rank's failure as an error, if it has one.
    #[inline]
    pub(super) fn check(&self) -> Result<()> {
        let abort = self.executor.abort_word();
        if abort == 0 {
            return Ok(());
        }
        Err(self.fail(abort))
    }

    /// Like [`Inner::check`], before the operation `op_info`. Records the first refused call in the
    /// flight recorder; otherwise the record would suggest that this rank never made the call.
    #[inline]
    pub(super) fn check_call(&self, op_info: &OpInfo) -> Result<()> {
        let abort = self.executor.abort_word();
        if abort == 0 {
            return match self.executor.is_split() {
                true => self.check_network(op_info.call()),
                false => Ok(()),
            };
        }
        let is_first = self.status.failure.get().is_none()
            || self.status.is_unnoticed.swap(false, Ordering::Relaxed);
        if is_first && !self.status.finalized.load(Ordering::Acquire) {
            self.observer.recorder.issue(op_info, false);
        }
        Err(self.fail(abort))
    }

    /// Refuses an operation whose kernel writes to other ranks' memory, if not all ranks are
    /// reachable by load and store. All ranks reach the same result.
    #[cold]
    fn check_network(&self, call: Call) -> Result<()> {
        let operation = call.operation();
        let is_served = call.algorithm() == Algorithm::Packet as u8
            || operation.is_collective() && !operation.is_fused()
            || matches!(
                operation,
                Operation::Send | Operation::Recv | Operation::Batch
            )
            || operation.is_one_sided();
        if is_served {
            return Ok(());
        }
        let (first, members) = (
            self.executor.constants.team_first,
            self.executor.constants.team_size,
        );
        let advice = match operation {
            Operation::AllReduceNorm => "; use packets, and rows that fit a packet slot",
            _ => "",
        };
        Err(Error::InvalidArgument {
            operation: operation.name(),
            detail: format!(
                "needs all ranks to reach each other by load and store; rank {} reaches only ranks \
                 {first} to {}, and the others by a network{advice}",
                self.group.rank,
                first + members - 1,
            ),
        })
    }

    /// Like [`Inner::check`], after a launch. If another thread has claimed the failure record but
    /// not yet set this rank's abort word, waits for the word.
    #[inline]
    pub(super) fn check_launch(&self) -> Result<()> {
        if let Some(at) = self.executor.workspace.word(FAILURE_AT) {
            // SAFETY: the workspace starts with a CommState, whose failure record starts with a
            // state word that is only accessed atomically.
            let claimed = unsafe { mem::load_u64(at, Order::Relaxed, Scope::System) };
            if claimed != 0 {
                self.await_abort();
            }
        }
        self.check()
    }

    #[cold]
    fn await_abort(&self) {
        let started = std::time::Instant::now();
        while self.executor.abort_word() == 0 && started.elapsed() < Duration::from_secs(1) {
            thread::yield_now();
        }
    }

    #[cold]
    fn fail(&self, abort: u64) -> Error {
        // Before the failure is returned: no other process writes to this rank's memory afterwards.
        if let Some(network) = &self.executor.network {
            network.after_failure(self);
        }
        if let Some(error) = self.status.replaced.get() {
            return error.clone();
        }
        if let Some(error) = self.status.failure.get() {
            return error.clone();
        }
        let mut first = false;
        let error = self
            .status
            .failure
            .get_or_init(|| {
                first = true;
                self.read_failure(abort as u32)
            })
            .clone();
        if first && !self.status.finalized.load(Ordering::Acquire) {
            tracing::error!("{error}");
            self.leave_grid(&error);
            self.observer.hooks.abort(&error);
            self.dump_on_failure();
        }
        error
    }

    /// Returns the rank whose failure record all ranks of this team report. Returns `None` if no
    /// abort word in memory of ranks names a record.
    ///
    /// If ranks fail concurrently, their abort words may name different records. Every failing rank
    /// writes the abort word of the team's first rank before the other words, and only a word that
    /// is 0. Therefore, if any word is set, the first rank's word is set and keeps its value.
    ///
    /// On a GPU, the word that kernels wrote to host memory may differ from the words in device
    /// memory, which are authoritative.
    fn agreed_reporter(&self) -> Option<u32> {
        let first = self.executor.workspaces[self.executor.constants.team_first as usize].as_ref();
        let first = first.unwrap_or(&self.executor.workspace);
        // The host of the first rank may have stopped its own communicator earlier, for example by
        // `finalize`. Its word then names no record.
        [first, &self.executor.workspace]
            .map(|workspace| workspace.load(ABORT_AT))
            .into_iter()
            .find(|word| *word != 0 && word & BY_HOST == 0)
            .map(|word| word as u32)
    }

    /// Returns the failure record of `reporter`, and its rank. The record of a rank of another
    /// process arrives by the network. If it has not arrived, returns that of the rank that this
    /// rank's abort word names, or that of this rank.
    fn record_of(&self, reporter: u32) -> Result<(u32, FailureRecord)> {
        let last = self.executor.workspaces.len() as u32 - 1;
        let named = self.executor.workspace.load(ABORT_AT) as u32;
        for rank in [reporter, named.min(last), self.executor.constants.rank] {
            let mut record: FailureRecord = bytemuck::Zeroable::zeroed();
            // The abort word is written after the record's state becomes 2, so the record is
            // complete.
            let (memory, _, at) = self.executor.view(rank);
            let _ = memory.load(at);
            // SAFETY: the record lies within this memory, and a complete record is not written
            // again.
            unsafe { memory.read(at, bytemuck::bytes_of_mut(&mut record))? };
            if record.state == 2 || !self.executor.is_split() {
                return Ok((rank, record));
            }
        }
        Ok((reporter, bytemuck::Zeroable::zeroed()))
    }

    fn read_failure(&self, reporter: u32) -> Error {
        let reporter = self.agreed_reporter().unwrap_or(reporter);
        let reporter = reporter.min(self.executor.workspaces.len() as u32 - 1);
        let (reporter, record) = match self.record_of(reporter) {
            Ok(found) => found,
            Err(error) => return error,
        };
        let size = self.executor.workspaces.len() as u32;
        let mut failure = Failure::decode(&self.group.full_name, reporter, size, &record);
        if matches!(failure.kind, FailureKind::Abort | FailureKind::Stopped)
            && let Some(error) = self.grid_failure()
        {
            // No kernel failed: a rank did not join the multi-rank grid, or joined with another
            // launch.
            return error;
        }
        failure.progress = self.progress();
        if failure.kind == FailureKind::Dead {
            failure.detail = self.detail_of_end(failure.rank);
        }
        failure.into_error()
    }

    /// Returns what this rank knows about the end of `rank`, unless its process has ended.
    fn detail_of_end(&self, rank: u32) -> Option<String> {
        let network = self.executor.network.as_ref();
        if let Some(reason) = network.and_then(|network| network.reason_of_loss(rank)) {
            return Some(format!("rank {rank} can no longer be reached: {reason}"));
        }
        match self.group.processes.get(rank as usize) {
            Some(Some((pid, start))) if process::has_ended(*pid, *start) => None,
            Some(Some(_)) => Some(format!(
                "rank {rank} has left the communicator: it called finalize, or dropped its last \
                 handle, for example because its thread returned or panicked"
            )),
            // A process on another host.
            Some(None) => Some(format!(
                "rank {rank} has left the communicator, its process has ended, or it can no longer \
                 be reached"
            )),
            None => None,
        }
    }

    /// Returns the activity of every rank, from the progress words.
    pub(super) fn progress(&self) -> Vec<Activity> {
        // Every workspace has a progress line for block 0, whose words are accessed atomically.
        let size = self.executor.workspaces.len() as u32;
        (0..size)
            .map(|rank| {
                let (memory, at, _) = self.executor.view(rank);
                let call = memory.load(at + offset_of!(Progress, call) as u64);
                let count = memory.load(at + offset_of!(Progress, count) as u64);
                Activity::from_progress(call, call >> 40, count & 0xffff_ffff_ffff, size)
            })
            .collect()
    }

    /// Returns the number of calls of [`Communicator::abort`] on this rank.
    pub(super) fn aborts(&self) -> u64 {
        self.status.aborts.load(Ordering::Relaxed)
    }

    /// Stops the communicator on all reachable ranks at the program's request.
    pub(super) fn abort(&self) {
        self.abort_for(FailureKind::Abort);
    }

    /// Stops the communicator on all reachable ranks.
    pub(super) fn abort_for(&self, kind: FailureKind) {
        if self.executor.abort_word_on_device() == 0 {
            if self.executor.on_gpu.is_some() {
                self.abort_on_gpu(kind);
            } else {
                // SAFETY: the constants live as long as `self`, and every rank's workspace is
                // mapped.
                let comm = unsafe { Comm::new(&raw const *self.executor.constants) };
                wait::abort(&comm, kind);
            }
        }
        // Reports the failure before the calls that the abort unblocks report theirs.
        let _ = self.check();
        if let Some(backend) = &self.executor.backend {
            backend.abort();
        }
    }

    /// Stops the communicator on all reachable ranks, for a reason that this rank returns.
    pub(super) fn fail_for(&self, reason: Error) {
        if self.executor.abort_word() == 0 && self.status.failure.set(reason.clone()).is_ok() {
            self.abort_for(FailureKind::Stopped);
            if !self.status.finalized.load(Ordering::Acquire) {
                tracing::error!("{reason}");
                self.observer.hooks.abort(&reason);
                self.dump_on_failure();
            }
        }
    }

    /// Stops the communicator on all reachable ranks, because `rank` can no longer be reached.
    pub(super) fn fail_for_lost(&self, rank: u32) {
        if self.executor.abort_word() == 0 {
            // SAFETY: the constants live as long as `self`, and the workspaces of this rank's team
            // are mapped.
            let comm = unsafe { Comm::new(&raw const *self.executor.constants) };
            wait::blame(&comm, FailureKind::Dead, wait::WaitKind::Network, rank);
        }
        let _ = self.check();
    }

    /// Like [`wait::abort`], by copies: writes this rank's record, then every rank's abort word.
    fn abort_on_gpu(&self, kind: FailureKind) {
        let rank = self.executor.constants.rank;
        let mine = self.executor.constants.workspace.progress;
        let [call, count] = [
            self.executor
                .workspace
                .load(mine + offset_of!(Progress, call) as u64),
            self.executor
                .workspace
                .load(mine + offset_of!(Progress, count) as u64),
        ];
        let finished = self
            .executor
            .workspace
            .load(BLOCKS_AT + offset_of!(BlockState, sequence) as u64);
        let mut record: FailureRecord = bytemuck::Zeroable::zeroed();
        record.state = 2;
        record.kind = kind as u64;
        record.sequence = wait::sequence_of(call, finished);
        record.call = Call::from_progress(call).0;
        record.count = count & 0xffff_ffff_ffff;
        record.wait_kind = wait::WaitKind::Launch as u64;
        record.awaited = u64::from(rank);
        record.blamed = u64::from(rank);
        record.blamed_sequence = record.sequence;
        record.blamed_call = record.call;
        record.blamed_count = count;
        record.generation = self.executor.constants.generation;
        // Keeps a record that a kernel has already claimed.
        if self.executor.workspace.load(FAILURE_AT) == 0 {
            // SAFETY: the record lies within the workspace. A record that a kernel writes
            // concurrently is replaced by that of the abort.
            let written = unsafe {
                self.executor
                    .workspace
                    .write(FAILURE_AT, bytemuck::bytes_of(&record))
            };
            if let Err(error) = written {
                tracing::warn!(%error, "the record of an abort could not be written");
            }
        }
        let word = ABORT | u64::from(rank);
        // The first rank's word is written first: see `agreed_reporter`.
        for workspace in self.executor.workspaces.iter().flatten() {
            workspace.compare_exchange(ABORT_AT, 0, word);
        }
        if let Some(on_gpu) = &self.executor.on_gpu {
            on_gpu.set_abort_word(word);
        }
    }

    /// Fails the communicator because its backend has failed. Every later call returns `error`.
    pub(super) fn poison(&self, error: &Error) {
        self.stop(error.clone());
        if let Some(backend) = &self.executor.backend {
            // Peers that wait for this rank fail now instead of at their timeout.
            backend.abort();
        }
    }

    /// Stops the communicator on this rank, for a reason that the host stores.
    pub(super) fn stop(&self, reason: Error) {
        if self.executor.abort_word_on_device() != 0 {
            // The first failure is kept.
            let _ = self.check();
            return;
        }
        let first = self.status.failure.set(reason.clone()).is_ok();
        let word = ABORT | BY_HOST | u64::from(self.executor.constants.rank);
        self.executor.workspace.compare_exchange(ABORT_AT, 0, word);
        if let Some(network) = &self.executor.network {
            network.after_failure(self);
        }
        if let Some(on_gpu) = &self.executor.on_gpu {
            on_gpu.set_abort_word(word);
        }
        if first && !self.status.finalized.load(Ordering::Acquire) {
            tracing::error!("{reason}");
            self.leave_grid(&reason);
            self.observer.hooks.abort(&reason);
            self.dump_on_failure();
        }
    }

    /// Starts the watchdog if the failure of the communicator has an effect even if this rank makes
    /// no call: it ends the process, calls abort hooks, or writes the flight record.
    pub(super) fn watch(this: &Arc<Self>) {
        let options = &this.group.options;
        let ends_process = options.abort_process_on_timeout_or_error.unwrap_or(false)
            && !options.enable_reconfigure;
        let is_wanted = ends_process
            || this.observer.hooks.has_abort_hooks()
            || path_of_environment(this.group.rank).is_some();
        if !is_wanted || this.status.is_watched.swap(true, Ordering::AcqRel) {
            return;
        }
        let weak = Arc::downgrade(this);
        let spawned = thread::Builder::new()
            .name("fusewire-watchdog".to_owned())
            .spawn(move || {
                let mut was_stopped = false;
                loop {
                    thread::sleep(WATCHDOG);
                    let Some(inner) = weak.upgrade() else {
                        return;
                    };
                    if inner.status.finalized.load(Ordering::Acquire) {
                        return;
                    }
                    inner.executor.look();
                    if let Some(backend) = &inner.executor.backend
                        && inner.executor.abort_word() == 0
                        && let Err(error) = backend.async_error()
                    {
                        inner.poison(&error);
                    }
                    let is_stopped = inner.executor.abort_word() != 0;
                    // A rank in a call has an interval to find the failure on its own thread.
                    if is_stopped && was_stopped {
                        inner.report_failure(ends_process);
                        return;
                    }
                    was_stopped = is_stopped;
                }
            });
        if let Err(error) = spawned {
            tracing::warn!(%error, "the watchdog got no thread: only a call detects a failure");
        }
    }

    /// Detects the failure, which calls the abort hooks and writes the flight record, and ends the
    /// process if `ends_process` is true.
    fn report_failure(&self, ends_process: bool) {
        if self.status.failure.get().is_none() {
            self.status.is_unnoticed.store(true, Ordering::Relaxed);
        }
        let Err(error) = self.check() else { return };
        if !ends_process || self.status.is_finalizing.load(Ordering::Acquire) {
            return;
        }
        eprintln!(
            "fusewire: rank {} of \"{}\": {error}\nfusewire: ending the process \
             (abort_process_on_timeout_or_error, TORCHCOMM_ABORT_ON_ERROR)",
            self.group.rank, self.group.full_name
        );
        std::process::abort();
    }
}

impl Inner {
    /// Returns the window address of memory for collectives, which use windows only if all ranks
    /// reach them by load and store.
    pub(super) fn addr_of(&self, at: *const u8, bytes: usize) -> u64 {
        match self.executor.is_split() {
            true => WindowAddr::NONE.0,
            false => self.windows.addr_of(at, bytes).0,
        }
    }

    /// Returns the window address of memory that peers write, as [`Inner::addr_of`] does, or none
    /// if the results go through staging.
    pub(super) fn target_addr_of(&self, at: *const u8, bytes: usize) -> u64 {
        match self.executor.is_split() {
            true => WindowAddr::NONE.0,
            false => self.windows.target_addr_of(at, bytes).0,
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if !self.status.finalized.load(Ordering::Acquire) && self.executor.abort_word() == 0 {
            self.leave();
            let text = format!(
                "communicator \"{}\" was dropped on rank {} without finalize(); its resources are \
                 freed",
                self.group.full_name, self.group.rank
            );
            match self.status.must_finalize.load(Ordering::Relaxed) {
                true => warn_user(&text),
                false => tracing::warn!("{text}"),
            }
        }
        if let Some(network) = &self.executor.network
            && self.executor.abort_word() != 0
        {
            network.after_failure(self);
        }
        if let Some(backend) = &self.executor.backend
            && !self.status.finalized.load(Ordering::Acquire)
        {
            backend.abort();
        }
    }
}
