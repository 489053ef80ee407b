//! Operations in flight. An operation keeps resources alive, and its owner is notified when the
//! operation is complete.

use core::any::Any;
use core::ffi::c_void;
use core::panic::AssertUnwindSafe;
use core::sync::atomic::Ordering;
use std::collections::VecDeque;
use std::panic;
use std::sync::{Arc, Mutex, PoisonError};

use super::device::{Gpu, InFlightGuard};
use super::driver::{Driver, RawEvent, RawStream};
use super::graph::Exec;
use super::stream::{Progress, settling};
use crate::cpu::{HostFn, KeepAlive, LaunchInfo, LaunchOwner, message};
use crate::{Error, Result};

/// A copy within device memory.
pub(crate) struct Copy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: u64,
    /// Keeps the source and the target alive.
    #[expect(dead_code, reason = "keeps memory alive")]
    pub(crate) keep: [Arc<dyn Any + Send + Sync>; 2],
}

/// A closure that the driver calls. `error` stores the first error that the closure returned since
/// the last call of [`HostCall::take_error`].
pub(super) struct HostCall {
    pub(super) call: HostFn,
    pub(super) error: Mutex<Option<Error>>,
}

impl HostCall {
    pub(super) fn take_error(&self) -> Option<Error> {
        self.error
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
    }

    pub(super) unsafe extern "C" fn run(data: *mut c_void) {
        // SAFETY: `data` is the address of a `HostCall` in an `Arc`. The `InFlight` entry or the
        // graph keeps this `Arc` alive until the driver has made the call.
        let this = unsafe { &*data.cast::<Self>() };
        let result =
            panic::catch_unwind(AssertUnwindSafe(|| (this.call)())).unwrap_or_else(|panic| {
                Err(Error::launch(format!(
                    "work of the stream panicked: {}",
                    message(&*panic)
                )))
            });
        if let Err(error) = result {
            this.error
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert(error);
        }
    }
}

/// The kind of an operation in flight, with the values that the operation keeps alive.
pub(super) enum WorkKind {
    Launch(Option<Arc<dyn LaunchOwner>>, u64, LaunchInfo, KeepAlive),
    Graph(Arc<Exec>, u64, Vec<u64>),
    Host(Arc<HostCall>),
    Call(HostFn, Option<Error>),
    Copies(Arc<[Copy]>, Option<Error>),
    /// The operation failed. Work that it enqueued before the failure may still use the memory in
    /// the [`KeepAlive`].
    Failed(Error, KeepAlive),
}

/// An operation in flight.
pub(super) struct InFlight {
    pub(super) number: u64,
    /// The event that was recorded after the operation. If recording failed, `unrecorded` contains
    /// the error.
    pub(super) event: RawEvent,
    pub(super) unrecorded: Option<Error>,
    pub(super) sticky: bool,
    pub(super) kind: WorkKind,
    pub(super) _guard: InFlightGuard,
}

impl InFlight {
    /// Notifies the owners that the work is complete. If the device was lost, `lost` is the
    /// driver's error, which becomes the result of the work. Returns the result and, for a graph,
    /// the list of words for reuse.
    pub(super) fn settle(kind: WorkKind, lost: Option<Error>) -> (Result<()>, Option<Vec<u64>>) {
        let ran = lost.is_none();
        let mut words = None;
        // An owner may call user hooks, which may panic.
        let result = panic::catch_unwind(AssertUnwindSafe(|| match kind {
            WorkKind::Launch(owner, word, info, keep) => {
                let after = owner.map_or(Ok(()), |owner| owner.after(word, &info, ran));
                drop(keep);
                after
            }
            WorkKind::Graph(exec, number, list) => {
                let after = exec.settle(number, &list, ran);
                words = Some(list);
                after
            }
            WorkKind::Host(call) => call.take_error().map_or(Ok(()), Err),
            WorkKind::Call(call, failed) => {
                drop(call);
                failed.map_or(Ok(()), Err)
            }
            WorkKind::Copies(copies, failed) => {
                drop(copies);
                failed.map_or(Ok(()), Err)
            }
            WorkKind::Failed(error, keep) => {
                drop(keep);
                Err(error)
            }
        }));
        let result = result.unwrap_or_else(|panic| {
            Err(Error::launch(format!(
                "a callback at the end of the stream's work panicked: {}",
                message(&*panic)
            )))
        });
        (lost.map_or(result, Err), words)
    }
}

/// Work that was in flight when its stream was dropped. `stream` is the stream to destroy after the
/// work is complete, or `None` if this crate did not create the stream.
pub(super) struct DeferredRelease {
    pub(super) in_flight: VecDeque<InFlight>,
    pub(super) progress: Arc<Progress>,
    pub(super) stream: Option<RawStream>,
}

impl DeferredRelease {
    /// Releases the resources of completed work. Returns true if all of the work is complete.
    pub(super) fn poll(&mut self, gpu: &Gpu) -> bool {
        let driver = gpu.driver();
        while !self.in_flight.is_empty() {
            // Work without a recorded event is complete when a later event of the stream is
            // complete. If no later event exists, the completion of the work cannot be detected,
            // and the memory of the work is leaked, because the work may still use it.
            let later = self.in_flight.iter().find(|it| it.unrecorded.is_none());
            let lost = match later.map(|work| driver.query_event(work.event)) {
                None => {
                    // Threads must not wait for work whose end cannot be detected.
                    self.progress.completed.store(u64::MAX, Ordering::Release);
                    return false;
                }
                Some(Ok(false)) => return false,
                Some(Ok(true)) => None,
                Some(Err(error)) => Some(Error::from(error)),
            };
            let Some(work) = self.in_flight.pop_front() else {
                break;
            };
            let stream = self.progress.stream();
            let (result, _) = settling(stream, || InFlight::settle(work.kind, lost));
            self.progress
                .completed
                .fetch_max(work.number, Ordering::Release);
            if let Err(error) = result {
                tracing::warn!(%error, "work of a stream that was dropped has failed");
            }
            // SAFETY: `create_event` returned the event. The entry that was just removed from the
            // queue was the only owner of the event.
            let _ = unsafe { driver.destroy_event(work.event) };
        }
        if let Some(stream) = self.stream.take() {
            end_stream(driver, stream);
        }
        true
    }
}

/// Destroys a stream that `create_stream` returned and that is not used any more.
pub(super) fn end_stream(driver: &dyn Driver, stream: RawStream) {
    // SAFETY: both callers pass a stream that `create_stream` returned (`Inner::owned`), after the
    // last handle of the stream was dropped.
    if let Err(error) = unsafe { driver.destroy_stream(stream) } {
        tracing::warn!(%error, "a stream could not be destroyed");
    }
}
