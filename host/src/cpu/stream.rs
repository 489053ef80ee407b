//! Streams: queues of work that runs in order.

use core::cell::Cell;
use core::fmt;
use core::panic::AssertUnwindSafe;
use core::ptr;
use core::sync::atomic::Ordering;
use core::time::Duration;
use std::panic;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use super::command::Command;
use super::event::CpuEvent;
use super::graph::{Branch, Capture, CpuGraph, CpuGraphExec, current_replay};
use super::launch::{Launch, message};
use super::queue::{CAPTURE, DIRECT, Entry, Report, Shared, State, UNIT};
use crate::usage::{AccessList, DirectUse, InUse, Name, PendingWork, User, Uses, WorkSource};
use crate::{Error, Result, deferred};

/// Identifies an operation. A ticket is valid only for the stream on which the operation was
/// enqueued. The ticket of a captured operation counts as complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct CpuTicket {
    seq: u64,
}

impl CpuTicket {
    /// The ticket of work that is already complete.
    pub(crate) const DONE: Self = Self { seq: 0 };
}

/// A queue of work that runs in order. Clones refer to the same stream.
///
/// Enqueued work runs on a worker thread, which starts with the first enqueued operation. A
/// blocking call on an idle stream runs on the caller's thread. If an operation fails, later
/// operations still run. The error is the result of the [`CpuTicket`] of the operation, and the
/// next [`CpuStream::synchronize`] returns the first error. Dropping the last clone waits until the
/// queued work is complete, unless the drop happens on a worker thread.
#[derive(Clone, Debug)]
pub struct CpuStream {
    handle: Arc<Handle>,
}

impl Default for CpuStream {
    fn default() -> Self {
        Self::new()
    }
}

struct Handle {
    shared: Arc<Shared>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.fmt(f)
    }
}

thread_local! {
    /// The stream whose work this thread is executing, or null.
    static CURRENT: Cell<*const Shared> = const { Cell::new(ptr::null()) };
    /// The stream whose worker this thread is, or null.
    static WORKER_OF: Cell<*const Shared> = const { Cell::new(ptr::null()) };
}

/// Returns true if this thread is executing work of a stream.
#[inline]
pub(crate) fn is_in_work() -> bool {
    !CURRENT.get().is_null()
}

/// Returns `user`, which is this thread, with the work that the thread is executing.
#[inline]
pub(crate) fn executing(user: User) -> User {
    match is_in_work() {
        true => replaying(user.in_work(true)),
        false => user,
    }
}

/// Returns `user`, which is this thread, with the replay that the thread is executing, or for which
/// it is calling hooks.
#[cold]
pub(crate) fn replaying(user: User) -> User {
    match current_replay() {
        Some(replay) => user.inside(replay.outermost),
        None => user,
    }
}

/// Makes `call` when this thread has ended the work that it is executing, or now if there is none.
pub(crate) fn call_after_work(call: impl FnOnce() + 'static) {
    // On the thread of a branch, the work belongs to a replay, which goes on.
    let is_on_branch = current_replay().is_some_and(|replay| replay.is_on_branch);
    let is_of_branch = is_on_branch && WORKER_OF.get() == CURRENT.get();
    match is_in_work() && !is_of_branch {
        true => deferred::push(call),
        false => call(),
    }
}

/// Calls [`after_work`] when dropped, also if the work panics.
pub(crate) struct AfterWork;

impl Drop for AfterWork {
    #[inline]
    fn drop(&mut self) {
        after_work();
    }
}

/// Makes the calls of [`call_after_work`] that are due, unless the thread executes other work. The
/// thread must hold no other access.
#[inline]
fn after_work() {
    if deferred::is_due() && !is_in_work() {
        deferred::run();
    }
}

/// Returns true if this thread is executing work of the stream.
pub(super) fn is_current(shared: &Shared) -> bool {
    ptr::eq(CURRENT.get(), shared)
}

impl CpuStream {
    /// Creates an idle stream.
    pub fn new() -> Self {
        Self {
            handle: Arc::new(Handle {
                shared: Arc::default(),
                worker: Mutex::default(),
            }),
        }
    }

    fn shared(&self) -> &Shared {
        &self.handle.shared
    }

    /// Returns an identifier that is equal for clones of one stream and distinct otherwise.
    pub(crate) fn id(&self) -> usize {
        Arc::as_ptr(&self.handle) as usize
    }

    /// Enqueues a command, or captures it while the stream is capturing.
    ///
    /// # Errors
    /// [`Error::Launch`] if the worker thread cannot be started. If the work fails, its error is
    /// the result of the ticket.
    pub fn enqueue(&self, command: Command) -> Result<CpuTicket> {
        match command {
            Command::Record(event) => self.record(&event),
            Command::Wait(event) => self.wait_event(&event),
            Command::Graph(graph) => self.enqueue_replay(&graph, false),
            command => self.push(command, Report::Sticky),
        }
    }

    /// Enqueues a replay, ordered with other accesses to the tensors of the graph.
    /// If `waits` is true, the caller waits for it.
    fn enqueue_replay(&self, graph: &CpuGraphExec, waits: bool) -> Result<CpuTicket> {
        let accesses = graph.accesses();
        let command = Command::Graph(graph.clone());
        let report = match waits {
            true => Report::TicketOnly,
            false => Report::Sticky,
        };
        if self.is_capturing() {
            self.note_accesses(&accesses);
            return self.push_if(Some(true), command, report);
        }
        let uses = Uses {
            accesses: &accesses,
            user: self.replay_user(graph),
            operation: Name::Text("graph"),
            flagged: None,
        };
        let held = InUse::begin_enqueue(uses, waits, |work| self.wait_work(work))?;
        let ticket = self.push_if(Some(false), command, report)?;
        held.enqueued(&self.work(ticket));
        Ok(ticket)
    }

    fn replay_user(&self, graph: &CpuGraphExec) -> User {
        let user = executing(User::this_thread());
        user.as_replay(graph.id()).on_stream(self.source_id())
    }

    /// Runs a replay like [`CpuStream::run`], ordered with other accesses to the tensors
    /// of the graph.
    pub(super) fn run_replay(&self, graph: &CpuGraphExec) -> Result<()> {
        let _after_work = AfterWork;
        while !self.is_capturing() {
            let (accesses, user) = (graph.accesses(), self.replay_user(graph));
            let held = InUse::begin(&accesses, user, Name::Text("graph"))?;
            if let Some(result) = self.try_direct(|| graph.execute()) {
                return result;
            }
            drop(held);
            if !self.retries_direct(&accesses, user)? {
                break;
            }
        }
        // Nothing is held now: the work before this may need the tensors.
        let ticket = self.enqueue_replay(graph, true)?;
        self.wait(ticket, None)
    }

    /// Enqueues work. If `sticky` is true, the next synchronisation reports its failure.
    /// `is_capturing` is the capture state that the caller has seen.
    ///
    /// # Errors
    /// [`Error::CaptureState`] if another thread has begun or ended a capture since then: the
    /// caller would wait for work that a replay runs later, or the other way round.
    pub(crate) fn enqueue_if(
        &self,
        command: Command,
        is_capturing: bool,
        sticky: bool,
    ) -> Result<CpuTicket> {
        let report = match sticky {
            true => Report::Sticky,
            false => Report::TicketOnly,
        };
        self.push_if(Some(is_capturing), command, report)
    }

    /// Returns the [`source_id`](crate::usage::source_id) of the stream.
    #[inline]
    pub(crate) fn source_id(&self) -> usize {
        Arc::as_ptr(&self.handle.shared) as usize
    }

    /// Returns the operation that `ticket` identifies.
    pub(crate) fn work(&self, ticket: CpuTicket) -> PendingWork {
        PendingWork {
            source: self.source(),
            number: ticket.seq,
        }
    }

    /// Makes all later work of the stream wait for the operation `ticket` of `source`. If the
    /// operation fails, the next synchronization of this stream reports its failure too.
    pub(crate) fn wait_ticket(&self, source: &Self, ticket: CpuTicket) -> Result<()> {
        let work = source.work(ticket);
        let wait = Command::host(move || {
            work.source.wait(work.number);
            work.source.result(work.number)
        });
        self.enqueue(wait).map(drop)
    }

    /// Makes all later work of the stream wait for all work that is in the queue of `source`.
    pub(crate) fn wait_issued(&self, source: &Self) -> Result<()> {
        let number = source.shared().lock().next - 1;
        if source.shared().completed.load(Ordering::Acquire) >= number {
            return Ok(());
        }
        self.wait_work(&PendingWork {
            source: source.source(),
            number,
        })
    }

    /// Makes all later work of the stream wait for `work`.
    pub(crate) fn wait_work(&self, work: &PendingWork) -> Result<()> {
        let work = work.clone();
        let wait = Command::host(move || {
            work.source.wait(work.number);
            Ok(())
        });
        self.enqueue(wait).map(drop)
    }

    /// Adds accesses to those of the graph that the stream is capturing. Does nothing if the stream
    /// is not capturing.
    pub(crate) fn note_accesses(&self, accesses: &AccessList<'_>) {
        let capture = self.shared().active_capture(&mut self.shared().lock());
        if let Some(capture) = capture {
            capture.note_accesses(accesses);
        }
    }

    /// Runs a launch after all work of the stream and blocks until the launch is complete. While
    /// the stream is capturing, the launch is captured instead.
    ///
    /// On an idle stream the launch runs on the calling thread, and `run` itself neither allocates
    /// nor makes a system call.
    ///
    /// # Errors
    /// The error of the launch. [`CpuStream::synchronize`] does not report it again.
    pub fn run(&self, launch: &Launch) -> Result<()> {
        match self.try_direct(|| launch.execute()) {
            Some(result) => result,
            None => {
                self.refuse_from_own_work("a blocking call")?;
                let ticket = self.push(Command::Launch(launch.clone()), Report::TicketOnly)?;
                self.wait(ticket, None)
            }
        }
    }

    /// Records `event` after all work enqueued so far.
    ///
    /// # Errors
    /// The errors of [`CpuStream::enqueue`].
    pub fn record(&self, event: &CpuEvent) -> Result<CpuTicket> {
        if self.try_direct(|| event.complete(event.issue())).is_some() {
            return Ok(CpuTicket::DONE);
        }
        self.push(Command::Record(event.clone()), Report::Sticky)
    }

    /// Makes all later work of the stream wait for the latest record of `event`. If the record
    /// belongs to a capture, the stream joins that capture.
    ///
    /// # Errors
    /// The errors of [`CpuStream::enqueue`].
    pub fn wait_event(&self, event: &CpuEvent) -> Result<CpuTicket> {
        let done = || event.capture().is_none() && event.query();
        if self.try_direct(done) == Some(true) {
            return Ok(CpuTicket::DONE);
        }
        self.push(Command::Wait(event.clone()), Report::Sticky)
    }

    /// Blocks until all work of the stream is complete.
    ///
    /// # Errors
    /// The first failure of enqueued work since the last call; [`Error::CaptureState`] while the
    /// stream is capturing.
    pub fn synchronize(&self) -> Result<()> {
        if self.is_capturing() {
            return Err(Error::capture("a capturing stream cannot be synchronized"));
        }
        self.refuse_from_own_work("synchronize")?;
        let flags = self.shared().flags.load(Ordering::Acquire);
        if flags & DIRECT != 0 {
            // Another thread is running work of this stream directly. An empty operation in the
            // queue completes after that work.
            let nothing = Command::host(|| Ok(()));
            let ticket = self.push_if(Some(false), nothing, Report::TicketOnly)?;
            self.wait(ticket, None)?;
        } else if flags >= UNIT {
            let last = CpuTicket {
                seq: self.shared().lock().next - 1,
            };
            self.shared().wait_complete(last.seq, None);
        }
        self.shared().lock().sticky.take().map_or(Ok(()), Err)
    }

    /// Returns true if all work of the stream is complete.
    pub fn is_idle(&self) -> bool {
        self.shared().flags.load(Ordering::Acquire) & !CAPTURE == 0
    }

    /// Returns true if the operation is complete, whether it succeeded or failed.
    pub fn is_complete(&self, ticket: CpuTicket) -> bool {
        self.shared().completed.load(Ordering::Acquire) >= ticket.seq
    }

    /// Returns true if the operation has started or is complete.
    pub fn is_started(&self, ticket: CpuTicket) -> bool {
        self.is_complete(ticket) || self.shared().is_started(ticket.seq)
    }

    /// Returns the result of the operation, or `None` while it is not complete.
    pub fn result(&self, ticket: CpuTicket) -> Option<Result<()>> {
        self.is_complete(ticket)
            .then(|| self.shared().lock().result(ticket.seq))
    }

    /// Blocks until the operation is complete and returns its result. Waits indefinitely if
    /// `timeout` is `None`.
    ///
    /// # Errors
    /// The operation's failure, or [`Error::StreamTimeout`].
    pub fn wait(&self, ticket: CpuTicket, timeout: Option<Duration>) -> Result<()> {
        if !self.is_complete(ticket) {
            self.refuse_from_own_work("wait")?;
            if !self.shared().wait_complete(ticket.seq, timeout) {
                let seconds = timeout.unwrap_or_default().as_secs_f64();
                return Err(Error::StreamTimeout { seconds });
            }
        }
        if ticket == CpuTicket::DONE {
            return Ok(());
        }
        self.shared().lock().result(ticket.seq)
    }

    /// Starts a capture. Later work of this stream is recorded and does not run.
    ///
    /// # Errors
    /// [`Error::CaptureState`] if the stream is already capturing.
    pub fn begin_capture(&self) -> Result<()> {
        let mut state = self.shared().lock();
        if self.shared().active_capture(&mut state).is_some() {
            return Err(Error::capture("begin: this stream is capturing already"));
        }
        self.set_capture(&mut state, Capture::begin(), Origin::Here)
    }

    /// Makes the stream a part of a capture. Work that another thread is running directly has no
    /// number. An empty operation in the queue completes after it, so that
    /// [`CpuStream::wait_issued`] waits for this work.
    fn set_capture(&self, state: &mut State, capture: Arc<Capture>, origin: Origin) -> Result<()> {
        let shared = self.shared();
        shared.set_capture(state, capture, origin);
        if shared.flags.load(Ordering::Acquire) & DIRECT == 0 {
            return Ok(());
        }
        let nothing = Command::host(|| Ok(()));
        let issued = self.issue(state, nothing, Report::TicketOnly);
        issued
            .map(drop)
            .inspect_err(|_| shared.clear_capture(state))
    }

    /// Ends the capture and returns the recorded graph. Streams that joined the capture leave it.
    ///
    /// # Errors
    /// [`Error::CaptureState`] if the stream is not capturing, or if it joined a capture that
    /// another stream began.
    pub fn end_capture(&self) -> Result<CpuGraph> {
        let mut state = self.shared().lock();
        let Some(capture) = self.shared().active_capture(&mut state) else {
            return Err(Error::capture("end: this stream is not capturing"));
        };
        if state.origin == Origin::Elsewhere {
            return Err(Error::capture(
                "end: this stream joined a capture that another stream began; end it there",
            ));
        }
        self.shared().clear_capture(&mut state);
        drop(state);
        capture
            .end()
            .ok_or_else(|| Error::capture("end: this capture has ended already"))
    }

    /// Returns true if the stream is capturing.
    pub fn is_capturing(&self) -> bool {
        self.shared().flags.load(Ordering::Acquire) & CAPTURE != 0
            && self
                .shared()
                .active_capture(&mut self.shared().lock())
                .is_some()
    }

    /// Runs `work` on the calling thread if the stream is idle and not capturing. Otherwise returns
    /// `None` without running it.
    #[inline]
    pub(crate) fn try_direct<R>(&self, work: impl FnOnce() -> R) -> Option<R> {
        let _running = self.take()?;
        Some(work())
    }

    /// Takes the stream if it is idle and not capturing.
    #[inline]
    fn take(&self) -> Option<Direct<'_>> {
        let shared = self.shared();
        shared
            .flags
            .compare_exchange(0, DIRECT, Ordering::AcqRel, Ordering::Relaxed)
            .ok()?;
        Some(Direct {
            shared,
            outer: CURRENT.replace(shared),
        })
    }

    /// Takes the stream for a direct operation and begins its accesses, if the stream is idle and
    /// not capturing and favors all allocations.
    #[inline(always)]
    pub(crate) fn take_favored(&self, uses: Uses<'_>) -> Option<Taken<'_>> {
        let (shared, source) = (self.shared(), self.source_id());
        let is_empty = uses.accesses.is_empty();
        if !is_empty && !shared.direct_use.publish(uses.accesses, uses.user, source) {
            return None;
        }
        let published = Published((!is_empty).then_some(&shared.direct_use));
        let _running = self.take()?;
        let is_favored = DirectUse::is_favored(uses.accesses, source);
        is_favored.then_some(Taken {
            published,
            _running,
        })
    }

    /// Takes the stream for a direct operation, and begins its accesses in another way than by
    /// [`CpuStream::take_favored`]. They end with the value in `held`.
    #[cold]
    pub(crate) fn take_unfavored<'a>(
        &'a self,
        uses: Uses<'a>,
        held: &mut Option<Unfavored<'a>>,
    ) -> Result<Option<Taken<'a>>> {
        if uses.accesses.is_empty() {
            return Ok(None);
        }
        let in_use = InUse::begin(uses.accesses, uses.user, uses.operation)?;
        *held = Some(Unfavored(in_use, FavorLater(self, uses.accesses)));
        let taken = self.take().map(|_running| Taken {
            published: Published(None),
            _running,
        });
        if taken.is_none() {
            *held = None;
        }
        Ok(taken)
    }

    /// Returns true if a blocking operation must run on the calling thread, which executes other
    /// work and could not take the stream. Then the work of the stream has ended.
    ///
    /// If the operation were enqueued, it would have to wait for conflicting work that has not
    /// started, which may wait for the work that this thread executes.
    #[cold]
    pub(crate) fn retries_direct(&self, accesses: &AccessList<'_>, user: User) -> Result<bool> {
        self.refuse_from_own_work("a blocking call")?;
        if accesses.is_empty() || !user.is_in_work() {
            return Ok(false);
        }
        let ticket = self.push_if(Some(false), Command::host(|| Ok(())), Report::TicketOnly)?;
        self.wait(ticket, None)?;
        Ok(true)
    }

    /// Returns the source of the stream's work.
    pub(crate) fn source(&self) -> Arc<dyn WorkSource> {
        Arc::clone(&self.handle.shared) as Arc<dyn WorkSource>
    }

    /// Captures `command` if the stream is capturing, and queues it otherwise. If the stream is not
    /// capturing and `command` waits for a record that belongs to a capture, the stream joins that
    /// capture.
    fn push(&self, command: Command, report: Report) -> Result<CpuTicket> {
        self.push_if(None, command, report)
    }

    /// Like [`CpuStream::push`], if the stream is capturing or not as expected.
    fn push_if(
        &self,
        capturing: Option<bool>,
        command: Command,
        report: Report,
    ) -> Result<CpuTicket> {
        let shared = self.shared();
        let mut state = shared.lock();
        let is_capturing = shared.active_capture(&mut state).is_some();
        if capturing.is_some_and(|expected| expected != is_capturing) {
            return Err(Error::capture(
                "another thread began or ended a capture on the stream during the call",
            ));
        }
        if let Command::Wait(event) = &command
            && shared.active_capture(&mut state).is_none()
            && let Some(capture) = event.capture()
        {
            return self
                .set_capture(&mut state, capture, Origin::Elsewhere)
                .map(|()| CpuTicket::DONE);
        }
        if let Some(capture) = shared.active_capture(&mut state) {
            let branch = state.branch.clone();
            drop(state);
            return Self::capture(&capture, branch, command).map(|()| CpuTicket::DONE);
        }
        self.issue(&mut state, command, report)
    }

    /// Adds a command to the queue.
    fn issue(&self, state: &mut State, command: Command, report: Report) -> Result<CpuTicket> {
        self.start_worker()?;
        let shared = self.shared();
        let (seq, record) = (state.next, command.issue());
        state.next += 1;
        state.queue.push_back(Entry {
            seq,
            command,
            record,
            report,
        });
        shared.flags.fetch_add(UNIT, Ordering::AcqRel);
        if state.worker_waits {
            shared.work.notify_one();
        }
        Ok(CpuTicket { seq })
    }

    fn capture(capture: &Arc<Capture>, branch: Option<Branch>, command: Command) -> Result<()> {
        match &command {
            Command::Record(event) => event.set_capture(capture),
            // In a capture without branches, the order of the commands already implies this
            // dependency.
            Command::Wait(event)
                if !capture.is_branched()
                    && event
                        .capture()
                        .is_some_and(|other| Arc::ptr_eq(&other, capture)) =>
            {
                return Ok(());
            }
            _ => {}
        }
        capture.push(match branch {
            Some(branch) => branch.command(command),
            None => command,
        })
    }

    /// Starts a branch of the capture. The branch consists of all work that this stream records
    /// after this call. A replay runs the branch on a separate thread, concurrently with the rest
    /// of the graph. Only events order the work of the branch relative to the work outside the
    /// branch. A replay is complete only after all branches are complete. A replay of a graph
    /// without branches runs all work sequentially. Does nothing if the stream is not capturing.
    pub fn branch(&self) {
        let mut state = self.shared().lock();
        if let Some(capture) = self.shared().active_capture(&mut state)
            && state.branch.is_none()
        {
            state.branch = Some(capture.add_branch());
        }
    }

    /// Returns the identifier of the stream's capture, or `None` if the stream is not capturing.
    /// The identifier is unique among active captures.
    pub(crate) fn capture_number(&self) -> Option<u64> {
        let mut state = self.shared().lock();
        let capture = self.shared().active_capture(&mut state)?;
        Some(Arc::as_ptr(&capture) as u64)
    }

    fn start_worker(&self) -> Result<()> {
        let mut worker = self
            .handle
            .worker
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if worker.is_none() {
            let shared = Arc::clone(&self.handle.shared);
            let thread = thread::Builder::new()
                .name("fusewire-stream".to_owned())
                .spawn(move || work(&shared))
                .map_err(|error| {
                    Error::launch(format!("the stream's thread cannot be started ({error})"))
                })?;
            *worker = Some(thread);
        }
        Ok(())
    }

    /// Fails if this thread is executing work of the stream. A wait for the stream would then never
    /// return.
    pub(crate) fn refuse_from_own_work(&self, call: &str) -> Result<()> {
        if ptr::eq(CURRENT.get(), self.shared()) && !self.is_capturing() {
            return Err(Error::launch(format!(
                "{call} on a stream from within its own work"
            )));
        }
        Ok(())
    }
}

/// The origin of a stream's capture: the stream itself or another stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Origin {
    #[default]
    Here,
    Elsewhere,
}

/// Guard of a direct operation. Dropping it ends the published accesses and clears [`DIRECT`].
pub(crate) struct Taken<'a> {
    #[cfg_attr(not(test), expect(dead_code))]
    published: Published<'a>,
    _running: Direct<'a>,
}

#[cfg(test)]
impl Taken<'_> {
    pub(super) fn is_favored(&self) -> bool {
        self.published.0.is_some()
    }
}

/// Accesses of a direct operation. After their end, the stream favors the allocations.
pub(crate) struct Unfavored<'a>(
    #[expect(dead_code)] InUse<'a>,
    #[expect(dead_code)] FavorLater<'a>,
);

struct FavorLater<'a>(&'a CpuStream, &'a AccessList<'a>);

impl Drop for FavorLater<'_> {
    fn drop(&mut self) {
        let Self(stream, accesses) = self;
        accesses.begin_favor(&stream.shared().direct_use, || stream.source());
    }
}

struct Published<'a>(Option<&'a DirectUse>);

impl Drop for Published<'_> {
    #[inline]
    fn drop(&mut self) {
        if let Some(published) = self.0 {
            published.withdraw();
        }
    }
}

/// Guard that a calling thread holds while it runs work of the stream directly. Dropping the guard
/// clears [`DIRECT`].
struct Direct<'a> {
    shared: &'a Shared,
    outer: *const Shared,
}

impl Drop for Direct<'_> {
    fn drop(&mut self) {
        CURRENT.set(self.outer);
        let flags = self.shared.flags.fetch_and(!DIRECT, Ordering::AcqRel);
        if flags >= UNIT {
            // Work was queued while this thread ran work directly. Taking the lock before the
            // notification ensures that the worker either sees the cleared flag or is already
            // waiting for the notification.
            drop(self.shared.lock());
            self.shared.work.notify_one();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closing = true;
        let capture = self
            .shared
            .active_capture(&mut state)
            .filter(|_| state.origin == Origin::Here);
        drop(state);
        self.shared.work.notify_one();
        if let Some(capture) = capture {
            // Streams that joined the capture leave it at their next call.
            capture.end();
        }
        let worker = self
            .worker
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        // A worker thread cannot join itself. It must not join another worker either, because the
        // other worker may wait for events of this worker's stream. If a worker thread drops the
        // stream, the stream's worker is detached and stops when its queue is empty.
        let worker_of = WORKER_OF.try_with(Cell::get);
        let on_worker = worker_of.map_or(true, |stream| !stream.is_null());
        if let Some(worker) = worker
            && !on_worker
            && worker.join().is_err()
        {
            tracing::warn!("the thread of a stream panicked");
        }
    }
}

/// Runs a stream's queue until the stream is closed and the queue is empty.
fn work(shared: &Arc<Shared>) {
    WORKER_OF.set(Arc::as_ptr(shared));
    CURRENT.set(Arc::as_ptr(shared));
    while let Some(entry) = shared.next_entry() {
        let Entry {
            seq,
            command,
            record,
            report,
        } = entry;
        // The closure also drops the command, so its resources are released before it counts as
        // complete.
        let call = AssertUnwindSafe(move || {
            let command = command;
            command.execute_issued(record)
        });
        let result = panic::catch_unwind(call).unwrap_or_else(|panic| {
            Err(Error::launch(format!(
                "work of the stream panicked: {}",
                message(&*panic)
            )))
        });
        shared.complete(seq, report, result);
        // This thread does not wait then for work that has not started, of this stream or others.
        deferred::run();
    }
}
