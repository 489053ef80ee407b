//! Operations with window addresses, and the end of those windows.
//!
//! A window address is resolved when an operation is bound. Until the operation is submitted, a
//! hook or another thread may end the window, and a later window may get its number. Then the
//! operation is submitted without window addresses: it goes through staging, as an operation on
//! memory in no window does.
//!
//! - **Who may overwrite what:** [`Windows::remove`](crate::comm::windows::Windows::remove)
//!   overwrites the entry of a window and unmaps its memory.
//! - **After having acquired** the completion of the all_reduce that follows
//!   [`Communicator::retire_windows`] on this rank. It comes after every launch of any rank that
//!   has an address in the window, because each rank submits such a launch in the order of its
//!   streams before that all_reduce, and all ranks run the operations of a communicator in the same
//!   order.
//! - **Released by** the launches, which end before the all_reduce begins.
//!
//! A launch with window addresses is before the all_reduce for one of these reasons:
//!
//! - A thread that runs the launch directly has taken the stream. It has then read that the version
//!   of the windows is unchanged, and that the last launch was on this stream. If the all_reduce
//!   had taken the stream first, the thread would have acquired the new version. If the order of
//!   launches had continued on another stream, `change_stream` would have cleared `last_stream`
//!   before it recorded an event on this stream, and the thread would have acquired the cleared
//!   value by taking the stream. Otherwise the event follows the launch.
//! - A thread that enqueues it holds a [`Submission`], and has read an unchanged version under it.
//!   `retire_windows` changes the version, then waits until there is no submission. Both are
//!   sequentially consistent, so the thread sees the change, or `retire_windows` waits for it. If
//!   the order of launches has continued on another stream in the meantime, the thread makes that
//!   stream wait for the launch before its submission ends.
//! - In a capture, the thread marks the windows under the lock that also protects their retirement.
//!   The number of a marked window is not used again. Nothing orders replays with the end of the
//!   window, so the graphs keep its memory.

use core::sync::atomic::{AtomicUsize, Ordering, fence};
use core::time::Duration;
use std::thread;
use std::time::Instant;

use fusewire_device::call::Operation;
use fusewire_device::comm::WindowAddr;

use super::prepared_op::{BoundWindows, PreparedOp};
use crate::Result;
use crate::comm::Communicator;
use crate::comm::windows::{MAX_ADDRESSES, WindowNumbers};
use crate::stream::Event;

/// Interval at which `retire_windows` checks whether all submissions have ended.
const NAP: Duration = Duration::from_micros(50);

/// An operation with window addresses that this thread is enqueuing.
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
            self.windows = Some(BoundWindows { version, fields });
        }
    }

    /// Returns the operation without window addresses.
    #[cold]
    fn staged(&self) -> Self {
        let mut staged = self.clone();
        for field in self.windows.iter().flat_map(|windows| windows.fields) {
            staged.params[field / 8] = WindowAddr::NONE.0;
        }
        staged.windows = None;
        staged
    }

    fn window_numbers(&self) -> WindowNumbers {
        let takes_windows = matches!(
            self.op_info.call().operation(),
            Operation::User
                | Operation::Put
                | Operation::Get
                | Operation::Signal
                | Operation::WaitSignal
        );
        match &self.windows {
            _ if takes_windows => WindowNumbers::Any,
            None => WindowNumbers::NONE,
            Some(windows) => {
                let fields = windows.fields.iter();
                let addresses = fields.map(|field| WindowAddr(self.params[field / 8]));
                let bound = addresses.filter(|addr| addr.is_some()).collect();
                WindowNumbers::Bound(windows.version, bound)
            }
        }
    }
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
    /// addresses, if the windows may end before the operation.
    #[inline(always)]
    pub(super) fn with_windows_now<R>(
        &self,
        prepared: &PreparedOp<'_>,
        run: impl FnOnce(&PreparedOp<'_>) -> R,
    ) -> R {
        match &prepared.windows {
            Some(windows) if !self.are_valid(windows) => run_staged(prepared, run),
            _ => run(prepared),
        }
    }

    /// Calls `enqueue`, which enqueues `prepared` on the stream; without window addresses, if the
    /// windows may end before the operation.
    #[inline]
    pub(super) fn with_windows_queued<R>(
        &self,
        prepared: &PreparedOp<'_>,
        enqueue: impl FnOnce(&PreparedOp<'_>) -> Result<R>,
    ) -> Result<R> {
        match &prepared.windows {
            Some(windows) => self.enqueue_bound(prepared, windows, enqueue),
            None => enqueue(prepared),
        }
    }

    fn enqueue_bound<R>(
        &self,
        prepared: &PreparedOp<'_>,
        windows: &BoundWindows,
        enqueue: impl FnOnce(&PreparedOp<'_>) -> Result<R>,
    ) -> Result<R> {
        let submissions = &self.inner.executor.submissions;
        submissions.fetch_add(1, Ordering::SeqCst);
        let submission = Submission(submissions);
        if !self.are_valid(windows) {
            drop(submission);
            return enqueue(&prepared.staged());
        }
        let enqueued = enqueue(prepared)?;
        // `change_stream` clears `last_stream` before it records an event on this stream. If this
        // thread does not see that, the event follows the launch.
        fence(Ordering::SeqCst);
        if self.inner.executor.last_stream.load(Ordering::SeqCst) != self.stream.id() {
            self.precede_last_launch();
        }
        Ok(enqueued)
    }

    /// Returns true if the windows have not changed, and this stream is that of the last launch.
    #[inline]
    fn are_valid(&self, windows: &BoundWindows) -> bool {
        self.inner.windows.version() == windows.version
            && self.inner.executor.last_stream.load(Ordering::Acquire) == self.stream.id()
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
    /// window addresses if a window may have ended.
    pub(super) fn with_windows_captured<R>(
        &self,
        prepared: &PreparedOp<'_>,
        capture: impl FnOnce(&PreparedOp<'_>) -> R,
    ) -> R {
        let windows = &self.inner.windows;
        // Before the windows are marked, so that those which end later find it.
        let of_graphs = windows.for_graph();
        let prepared = match windows.note_capture(&prepared.window_numbers()) {
            true => prepared.clone(),
            false => prepared.staged(),
        };
        capture(&prepared.keeping(of_graphs))
    }

    /// Retires windows: operations that are bound from now on do not find them. Operations that are
    /// bound already precede the next operation of this thread, or go through staging.
    ///
    /// # Errors
    /// [`crate::Error::Communicator`] if another thread does not end the submission of an operation
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
                    "a window cannot end, because another thread has been enqueuing an operation \
                     on this communicator for {:.3} s",
                    timeout.as_secs_f64()
                )));
            }
            thread::sleep(NAP);
        }
        Ok(())
    }
}
