//! Work in flight: what it keeps alive, and whom its end concerns.

use core::any::Any;
use core::ffi::c_void;
use core::panic::AssertUnwindSafe;
use std::collections::VecDeque;
use std::panic;
use std::sync::{Arc, Mutex, PoisonError};

use super::device::{Gpu, InFlightGuard};
use super::driver::{Driver, RawEvent, RawStream};
use super::graph::Exec;
use crate::cpu::{HostFn, Keep, LaunchInfo, LaunchOwner, message};
use crate::{Error, Result};

/// A copy from device memory to device memory.
pub(crate) struct Copy {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: u64,
    /// Keeps both alive.
    #[expect(dead_code, reason = "keeps memory alive")]
    pub(crate) keep: [Arc<dyn Any + Send + Sync>; 2],
}

/// A closure that the driver calls, and what it gave last.
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
        // SAFETY: the value is kept alive by whatever is in flight, or by the graph.
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

/// What is in flight.
pub(super) enum WorkKind {
    Launch(Option<Arc<dyn LaunchOwner>>, u64, LaunchInfo, Keep),
    Graph(Arc<Exec>, u64, Vec<u64>),
    Host(Arc<HostCall>),
    Call(HostFn, Option<Error>),
    Copies(Arc<[Copy]>, Option<Error>),
    /// What was put on the stream before the failure may still use what is kept.
    Failed(Error, Keep),
}

/// Work in flight.
pub(super) struct InFlight {
    pub(super) number: u64,
    /// Recorded behind the work, unless that failed for the reason beside.
    pub(super) event: RawEvent,
    pub(super) unrecorded: Option<Error>,
    pub(super) sticky: bool,
    pub(super) kind: WorkKind,
    pub(super) _guard: InFlightGuard,
}

impl InFlight {
    /// Reports to the owners that the work has ended, or was `lost` with the device. Returns the
    /// result, and a list to be used again.
    pub(super) fn settle(kind: WorkKind, lost: Option<Error>) -> (Result<()>, Option<Vec<u64>>) {
        let ran = lost.is_none();
        let mut words = None;
        // Owners call hooks of the user's.
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

/// What was in flight when its stream came to its end, and the stream itself where it is to be destroyed then.
pub(super) struct DeferredRelease {
    pub(super) in_flight: VecDeque<InFlight>,
    pub(super) stream: Option<RawStream>,
}

impl DeferredRelease {
    /// Finds out what has ended; whether that is all.
    pub(super) fn poll(&mut self, gpu: &Gpu) -> bool {
        let driver = gpu.driver();
        while !self.in_flight.is_empty() {
            // Work without an event has ended when work behind it has; where there is none, nobody knows when, and its
            // memory is given up rather than freed too early.
            let behind = self.in_flight.iter().find(|it| it.unrecorded.is_none());
            let lost = match behind.map(|work| driver.query_event(work.event)) {
                None | Some(Ok(false)) => return false,
                Some(Ok(true)) => None,
                Some(Err(error)) => Some(error),
            };
            let Some(work) = self.in_flight.pop_front() else {
                break;
            };
            let (result, _) = InFlight::settle(work.kind, lost);
            if let Err(error) = result {
                tracing::warn!(%error, "work of a stream that was dropped has failed");
            }
            // SAFETY: an event of that stream, which nobody else has.
            let _ = unsafe { driver.destroy_event(work.event) };
        }
        if let Some(stream) = self.stream.take() {
            end_stream(driver, stream);
        }
        true
    }
}

/// Destroys a stream that this crate has made, and nobody uses any more.
pub(super) fn end_stream(driver: &dyn Driver, stream: RawStream) {
    // SAFETY: the last handle of a stream that `create_stream` gave.
    if let Err(error) = unsafe { driver.destroy_stream(stream) } {
        tracing::warn!(%error, "a stream could not be destroyed");
    }
}
