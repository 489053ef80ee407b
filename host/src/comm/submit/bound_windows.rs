//! Operations that refer to windows, and the end of those windows.
//!
//! A bound operation has numbers of windows: in the addresses of its buffers, or in the windows
//! that the caller passed. Until the operation is submitted, a hook or another thread may end a
//! window, and a later window may get its number. An operation whose buffer is in the window is
//! then submitted without window addresses: it goes through staging, as an operation on memory in
//! no window does. An operation on the window itself fails.
//!
//! - **Who may overwrite what:** [`Windows::remove`](crate::comm::windows::Windows::remove)
//!   overwrites the entry of a window and unmaps its memory.
//! - **After having acquired** the completion of the all_reduce that follows
//!   [`Communicator::retire_windows`] on this rank. It comes after every launch of any rank that
//!   refers to the window, because each rank submits such a launch in the order of its streams
//!   before that all_reduce, and all ranks run the operations of a communicator in the same order.
//! - **Released by** the launches, which end before the all_reduce begins.
//!
//! Before the all_reduce, the rank sets the flag of the window ([`EndFlag`]), and changes the
//! version of its windows. A launch reads the version (for its buffers) or the flags (of passed
//! windows), and is before the all_reduce for one of the following reasons. Addresses that a kernel
//! takes as values are not checked: a launch with one must not be concurrent with the end of its
//! window.
//!
//! - A thread that runs the launch directly has taken the stream. It has then read that the window
//!   has not ended, and that the last launch was on this stream. If the all_reduce had taken the
//!   stream first, the thread would have acquired the change. If the order of launches had
//!   continued on another stream, `change_stream` would have cleared `last_stream` before it
//!   recorded an event on this stream, and the thread would have acquired the cleared value by
//!   taking the stream. Otherwise the event follows the launch.
//! - A thread that runs a launch on a passed window directly, although the last launch was on
//!   another stream, holds a [`Submission`] until the launch has ended.
//! - A thread that enqueues it holds a [`Submission`], and has read under it that the window has
//!   not ended. `retire_windows`, after both changes, waits until there is no submission. All of
//!   these accesses are sequentially consistent, so the thread sees the change, or
//!   `retire_windows` waits for it. If the order of launches has continued on another stream in the
//!   meantime, the thread makes that stream wait for the launch before its submission ends.
//! - In a capture, the thread marks the windows under the lock that also protects their retirement.
//!   The number of a marked window is not used again. Nothing orders replays with the end of the
//!   window, so the graphs keep its memory.

use core::sync::atomic::{AtomicUsize, Ordering, fence};
use core::time::Duration;
use std::thread;
use std::time::Instant;

use fusewire_device::call::Operation;
use fusewire_device::comm::WindowAddr;

use super::invalid;
use super::prepared_op::{BoundWindows, OpWindows, PreparedOp};
use crate::comm::Communicator;
use crate::comm::windows::{EndFlag, MAX_ADDRESSES, WindowNumbers};
use crate::stream::Event;
use crate::{Error, Result};

/// Interval at which `retire_windows` checks whether all submissions have ended.
const NAP: Duration = Duration::from_micros(50);

/// An operation on windows that this thread is submitting.
struct Submission<'a>(&'a AtomicUsize);

impl Drop for Submission<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl<'a> PreparedOp<'a> {
    /// Notes which parameters are window addresses: those at the byte offsets `fields`. `version`
    /// is the version of the windows from before the addresses were resolved.
    #[inline]
    pub(in crate::comm) fn note_windows(&mut self, version: usize, fields: &'static [usize]) {
        debug_assert!(fields.len() <= MAX_ADDRESSES);
        let has_address = |field: &usize| WindowAddr(self.params[field / 8]).is_some();
        if fields.iter().any(has_address) {
            self.windows = OpWindows::Buffers(BoundWindows { version, fields });
        }
    }

    /// Returns the operation without window addresses.
    #[cold]
    fn staged(&self) -> Self {
        let mut staged = self.clone();
        if let OpWindows::Buffers(windows) = &self.windows {
            for field in windows.fields {
                staged.params[field / 8] = WindowAddr::NONE.0;
            }
        }
        staged.windows = OpWindows::None;
        staged
    }

    /// Fails if one of the windows that the caller passed was freed.
    #[inline]
    pub(in crate::comm) fn check_windows(&self) -> Result<()> {
        match &self.windows {
            OpWindows::Passed(flags) if flags.iter().any(EndFlag::is_set) => Err(freed(self)),
            _ => Ok(()),
        }
    }

    fn window_numbers(&self) -> WindowNumbers<'_> {
        match &self.windows {
            OpWindows::None if self.op_info.call().operation() == Operation::User => {
                WindowNumbers::Any(&[])
            }
            OpWindows::None => WindowNumbers::NONE,
            OpWindows::Passed(flags) => WindowNumbers::Any(flags),
            OpWindows::Buffers(windows) => {
                let fields = windows.fields.iter();
                let addresses = fields.map(|field| WindowAddr(self.params[field / 8]));
                let bound = addresses.filter(|addr| addr.is_some()).collect();
                WindowNumbers::Bound(windows.version, bound)
            }
        }
    }
}

#[cold]
fn freed(prepared: &PreparedOp<'_>) -> Error {
    invalid(prepared.function_name(), "the window was freed".to_owned())
}

/// Passes `prepared` without window addresses to `run`. Not inlined, so that the copy takes no
/// space on the stack of the usual path.
#[cold]
#[inline(never)]
fn run_staged<R>(prepared: &PreparedOp<'_>, run: impl FnOnce(&PreparedOp<'_>) -> R) -> R {
    run(&prepared.staged())
}

impl Communicator {
    /// Passes `prepared` to `run` on this thread, which has taken the stream; without window
    /// addresses, if the windows of its buffers may end before the operation.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if a window that the caller passed was freed. `run` was
    /// not called then.
    #[inline(always)]
    pub(super) fn with_windows_now<R>(
        &self,
        prepared: &PreparedOp<'_>,
        run: impl FnOnce(&PreparedOp<'_>) -> R,
    ) -> Result<R> {
        let _submission = match &prepared.windows {
            OpWindows::None => None,
            OpWindows::Buffers(windows) if self.are_valid(windows) => None,
            OpWindows::Buffers(_) => return Ok(run_staged(prepared, run)),
            OpWindows::Passed(_) => self.check_passed(prepared)?,
        };
        Ok(run(prepared))
    }

    /// Checks windows that the caller passed, on the thread that has taken the stream. Returns the
    /// submission under which the thread must run the operation, if the stream alone does not
    /// order it before the end of the windows.
    fn check_passed(&self, prepared: &PreparedOp<'_>) -> Result<Option<Submission<'_>>> {
        let is_last = self.is_last_stream();
        let submission = (!is_last).then(|| self.begin_submission());
        prepared.check_windows()?;
        Ok(submission)
    }

    /// Calls `enqueue`, which enqueues `prepared` on the stream; without window addresses, if the
    /// windows of its buffers may end before the operation.
    ///
    /// # Errors
    /// Those of [`Communicator::with_windows_now`], and of `enqueue`.
    #[inline]
    pub(super) fn with_windows_queued<R>(
        &self,
        prepared: &PreparedOp<'_>,
        enqueue: impl FnOnce(&PreparedOp<'_>) -> Result<R>,
    ) -> Result<R> {
        match &prepared.windows {
            OpWindows::None => enqueue(prepared),
            _ => self.enqueue_with_windows(prepared, enqueue),
        }
    }

    fn enqueue_with_windows<R>(
        &self,
        prepared: &PreparedOp<'_>,
        enqueue: impl FnOnce(&PreparedOp<'_>) -> Result<R>,
    ) -> Result<R> {
        let submission = self.begin_submission();
        if let OpWindows::Buffers(windows) = &prepared.windows
            && !self.are_valid(windows)
        {
            drop(submission);
            return enqueue(&prepared.staged());
        }
        prepared.check_windows()?;
        let enqueued = enqueue(prepared)?;
        // `change_stream` clears `last_stream` before it records an event on this stream. If this
        // thread does not see that, the event follows the launch.
        fence(Ordering::SeqCst);
        if self.inner.executor.last_stream.load(Ordering::SeqCst) != self.stream.id() {
            self.precede_last_launch();
        }
        Ok(enqueued)
    }

    fn begin_submission(&self) -> Submission<'_> {
        let submissions = &self.inner.executor.submissions;
        submissions.fetch_add(1, Ordering::SeqCst);
        Submission(submissions)
    }

    /// Returns true if the windows have not changed, and this stream is that of the last launch.
    #[inline]
    fn are_valid(&self, windows: &BoundWindows) -> bool {
        self.inner.windows.version() == windows.version && self.is_last_stream()
    }

    /// Returns true if this stream is that of the last launch.
    #[inline]
    fn is_last_stream(&self) -> bool {
        self.inner.executor.last_stream.load(Ordering::Acquire) == self.stream.id()
    }

    /// Makes the launches after the communicator's last one follow the work of this stream. If the
    /// stream of the last launch cannot wait now, blocks until the work is complete.
    #[cold]
    fn precede_last_launch(&self) {
        let last = self.inner.executor.lock_order();
        let stream = last.as_ref().map(|(stream, _)| stream.clone());
        let event = Event::new();
        let is_ordered = stream.as_ref().is_none_or(|stream| {
            // A wait in a capture would become a part of the graph.
            let can_wait = || stream.recording().is_ok_and(|of| !of.is_some());
            stream.id() == self.stream.id()
                || (can_wait() && stream.wait_stream(&self.stream, &event).is_ok())
        });
        drop(last);
        // Dropped after the lock, as in `change_stream`.
        drop(stream);
        if !is_ordered && self.stream.record(&event).is_ok() {
            event.synchronize();
        }
    }

    /// Marks the windows to which the graph will refer, and passes `prepared` to `capture`, without
    /// window addresses if a window of its buffers may have ended.
    ///
    /// # Errors
    /// Those of [`Communicator::with_windows_now`], and of `capture`.
    pub(super) fn with_windows_captured<R>(
        &self,
        prepared: &PreparedOp<'_>,
        capture: impl FnOnce(&PreparedOp<'_>) -> Result<R>,
    ) -> Result<R> {
        let windows = &self.inner.windows;
        // Before the windows are marked, so that those which end later find it.
        let of_graphs = windows.for_graph();
        let is_noted = windows.note_capture(&prepared.window_numbers());
        let prepared = match &prepared.windows {
            _ if is_noted => prepared.clone(),
            OpWindows::Passed(_) => return Err(freed(prepared)),
            OpWindows::Buffers(_) | OpWindows::None => prepared.staged(),
        };
        capture(&prepared.keeping(of_graphs))
    }

    /// Retires windows: operations that are bound from now on do not find them. Operations that are
    /// bound already precede the next operation of this thread, go through staging, or fail.
    ///
    /// # Errors
    /// [`Error::Communicator`] if another thread does not end the submission of an operation
    /// within the timeout.
    pub(in crate::comm) fn retire_windows(&self, ids: &[usize]) -> Result<()> {
        let order = self.inner.executor.lock_order();
        for id in ids {
            self.inner.windows.retire(*id);
        }
        drop(order);
        fence(Ordering::SeqCst);
        let (started, timeout) = (Instant::now(), self.timeout());
        while self.inner.executor.submissions.load(Ordering::SeqCst) > 0 {
            self.inner.executor.look();
            self.inner.check()?;
            if started.elapsed() > timeout {
                return Err(self.inner.group.error(format!(
                    "a window cannot end, because another thread has been submitting an operation \
                     on this communicator for {:.3} s",
                    timeout.as_secs_f64()
                )));
            }
            thread::sleep(NAP);
        }
        Ok(())
    }
}
