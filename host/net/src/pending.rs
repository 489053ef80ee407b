//! Handle of a write or read in progress.

use core::fmt;
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Poll, Waker};
use core::time::Duration;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crate::Result;

/// A write or read in progress. It completes at the latest when its timeout expires. Dropping the
/// handle does not cancel the operation, which keeps its memory alive until it has completed.
///
/// `Pending` is also a [`Future`] for any executor.
#[derive(Clone)]
#[must_use = "errors of the operation are reported here"]
pub struct Pending {
    slot: Arc<Slot>,
}

#[derive(Default)]
struct Slot {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    result: Option<Result<()>>,
    waker: Option<Waker>,
}

impl Pending {
    /// Creates the handle of an operation that has not completed.
    pub fn unfinished() -> Self {
        Self {
            slot: Arc::default(),
        }
    }

    /// Creates the handle of an operation that has completed with `result`.
    pub fn finished(result: Result<()>) -> Self {
        let pending = Self::unfinished();
        pending.lock().result = Some(result);
        pending
    }

    /// Completes the operation with `result`. Called by providers. A second call has no effect.
    pub fn finish(&self, result: Result<()>) {
        let mut state = self.lock();
        if state.result.is_some() {
            return;
        }
        state.result = Some(result);
        let waker = state.waker.take();
        drop(state);
        self.slot.ended.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Returns true if the operation has completed, with or without an error.
    pub fn is_done(&self) -> bool {
        self.lock().result.is_some()
    }

    /// Waits until the operation has completed.
    ///
    /// # Errors
    /// [`Error::Call`](crate::Error::Call) with the operation's failure.
    pub fn wait(&self) -> Result<()> {
        let mut state = self.lock();
        loop {
            if let Some(result) = &state.result {
                return result.clone();
            }
            state = self
                .slot
                .ended
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits until the operation has completed, but at most for `timeout`. Returns `None` after the
    /// timeout; the operation continues.
    pub fn wait_timeout(&self, timeout: Duration) -> Option<Result<()>> {
        let start = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(result) = &state.result {
                return Some(result.clone());
            }
            let left = timeout.checked_sub(start.elapsed())?;
            state = self
                .slot
                .ended
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent after every statement, so a poisoned lock is harmless.
        self.slot
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Future for Pending {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.lock();
        match &state.result {
            Some(result) => Poll::Ready(result.clone()),
            None => {
                state.waker = Some(context.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending")
            .field("result", &self.lock().result)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use std::task::Wake;
    use std::thread::{self, Thread};

    use super::*;

    struct UnparkWaker(Thread);

    impl Wake for UnparkWaker {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    #[test]
    fn an_end_wakes_waiters_and_the_future() {
        let pending = Pending::unfinished();
        assert!(!pending.is_done());
        assert!(pending.wait_timeout(Duration::from_millis(1)).is_none());
        let ends = pending.clone();
        let mut future = pending.clone();
        let waker = Waker::from(Arc::new(UnparkWaker(thread::current())));
        let mut context = Context::from_waker(&waker);
        assert!(Pin::new(&mut future).poll(&mut context).is_pending());
        let thread = thread::spawn(move || ends.finish(Ok(())));
        while Pin::new(&mut future).poll(&mut context).is_pending() {
            thread::park_timeout(Duration::from_secs(10));
        }
        pending.wait().unwrap();
        thread.join().unwrap();
    }
}
