//! Work that is enqueued on a stream, or captured into a graph.

use core::ffi::c_void;
use std::sync::{Arc, Mutex};

use super::Stream;
use crate::cpu::HostFn;
use crate::gpu::device::InFlightGuard;
use crate::gpu::driver::{CaptureStatus, RawEvent, RawGraph};
use crate::gpu::graph::{self, GraphExec, LoggedNode};
use crate::gpu::in_flight::{Copy, HostCall, InFlight, WorkKind};
use crate::gpu::launch::Launch;
use crate::{Error, Result};

/// Work for a stream.
#[derive(Clone)]
#[expect(
    clippy::large_enum_variant,
    reason = "a boxed launch would allocate at each call"
)]
pub(crate) enum Task {
    /// A kernel.
    Launch(Launch),
    /// A closure that a graph may replay.
    Host(HostFn),
    /// A closure that enqueues work on the stream itself, called immediately.
    Call(HostFn),
    /// Copies, in order.
    Copies(Arc<[Copy]>),
    /// A graph.
    Graph(GraphExec),
}

impl Stream {
    /// Enqueues an operation, or captures it while the stream is capturing. Returns its number (0
    /// if captured). If `sticky`, the next [`Stream::synchronize`] reports its failure.
    pub(crate) fn enqueue(&self, task: Task, sticky: bool) -> Result<u64> {
        self.enqueue_in(self.capture_status()?, task, sticky)
    }

    /// Enqueues an operation like [`Stream::enqueue`], with the capture status that the caller has
    /// queried.
    pub(crate) fn enqueue_in(
        &self,
        status: CaptureStatus,
        task: Task,
        sticky: bool,
    ) -> Result<u64> {
        if let Some((capture, graph)) = Self::capture(status)? {
            self.capture_task(task, capture, graph)?;
            return Ok(0);
        }
        self.poll();
        // The event is created before the work is enqueued, because work in flight must be tracked.
        let spare = self.state().events.pop();
        let event = match spare {
            Some(event) => event,
            None => self.inner.gpu.driver().create_event(false)?,
        };
        let (guard, _launching) = self.inner.gpu.launch();
        match self.issue(task) {
            Ok(kind) => Ok(self.track(event, kind, sticky, guard)),
            Err(error) => {
                self.state().events.push(event);
                Err(error)
            }
        }
    }

    /// Enqueues work on the stream. A failure that is not a refusal becomes [`WorkKind::Failed`],
    /// which keeps its position in the order.
    fn issue(&self, task: Task) -> Result<WorkKind> {
        let driver = self.inner.gpu.driver();
        let raw = self.inner.raw;
        Ok(match task {
            Task::Launch(launch) => {
                let word = match &launch.owner {
                    Some(owner) => match owner.before(&launch.info) {
                        Ok(word) => word,
                        Err(error) => return Ok(WorkKind::Failed(error, launch.keep)),
                    },
                    None => 0,
                };
                if let Err(error) = launch.issue(driver, raw) {
                    if let Some(owner) = &launch.owner {
                        let _ = owner.after(word, &launch.info, false);
                    }
                    return Ok(WorkKind::Failed(error, launch.keep));
                }
                WorkKind::Launch(launch.owner, word, launch.info, launch.keep)
            }
            Task::Host(call) => {
                let call = Arc::new(HostCall {
                    call,
                    error: Mutex::default(),
                });
                let data = Arc::as_ptr(&call).cast_mut().cast::<c_void>();
                // SAFETY: `WorkKind::Host` keeps `call` alive until the stream has executed the
                // function.
                unsafe { driver.host_function(raw, HostCall::run, data)? };
                WorkKind::Host(call)
            }
            // After a partial failure, part of the work may be on the stream, so it is tracked.
            Task::Call(call) => {
                let failed = call().err();
                WorkKind::Call(call, failed)
            }
            Task::Copies(copies) => {
                let failed = self.copy_all(&copies).err();
                WorkKind::Copies(copies, failed)
            }
            Task::Graph(exec) => {
                if !Arc::ptr_eq(&exec.inner.gpu, &self.inner.gpu) {
                    return Err(graph::other_device());
                }
                let mut words = self.state().words.pop().unwrap_or_default();
                let (number, admitted) = exec.inner.admit(&mut words);
                let launched = admitted.and_then(|()| {
                    // SAFETY: `capture_task` captured only work whose requirements its enqueuer
                    // guarantees for every replay, and the graph retains the memory of that work.
                    let launched = unsafe { driver.launch_graph(exec.inner.raw, raw) };
                    launched.inspect_err(|_| {
                        let _ = exec.inner.settle(number, &words, false);
                    })
                });
                if let Err(error) = launched {
                    self.state().words.push(words);
                    return Ok(WorkKind::Failed(error, Default::default()));
                }
                WorkKind::Graph(exec.inner, number, words)
            }
        })
    }

    fn copy_all(&self, copies: &[Copy]) -> Result<()> {
        for copy in copies.iter().filter(|copy| copy.bytes > 0) {
            // SAFETY: `keep` keeps both ranges mapped until the copy is complete.
            unsafe {
                self.inner
                    .gpu
                    .driver()
                    .copy(copy.to, copy.from, copy.bytes, self.inner.raw)?;
            }
        }
        Ok(())
    }

    fn capture_task(&self, task: Task, capture: u64, raw_graph: RawGraph) -> Result<()> {
        let gpu = &self.inner.gpu;
        let driver = gpu.driver();
        match task {
            Task::Launch(launch) => {
                // Retained before the launch is captured, so that the graph never contains a launch
                // whose memory nothing keeps alive.
                let keep = Box::new((launch.keep.clone(), launch.owner.clone()));
                graph::retain(gpu, raw_graph, keep)?;
                launch.issue(driver, self.inner.raw)?;
                if let Some(owner) = launch.owner {
                    graph::log_node(gpu, capture, LoggedNode::Launch(owner, launch.info));
                }
            }
            Task::Host(call) => {
                let call = Arc::new(HostCall {
                    call,
                    error: Mutex::default(),
                });
                let data = Arc::as_ptr(&call).cast_mut().cast::<c_void>();
                graph::retain(gpu, raw_graph, Box::new(Arc::clone(&call)))?;
                // SAFETY: the graph, which retains `call`, keeps it alive until its last replay.
                unsafe { driver.host_function(self.inner.raw, HostCall::run, data)? };
                graph::log_node(gpu, capture, LoggedNode::Host(call));
            }
            Task::Call(call) => {
                graph::retain(gpu, raw_graph, Box::new(Arc::clone(&call)))?;
                call()?;
            }
            Task::Copies(copies) => {
                graph::retain(gpu, raw_graph, Box::new(Arc::clone(&copies)))?;
                self.copy_all(&copies)?;
            }
            Task::Graph(_) => {
                return Err(Error::capture(
                    "a graph cannot be captured into another one on a GPU; capture its work itself",
                ));
            }
        }
        Ok(())
    }

    /// Tracks work that was just enqueued. Returns its number.
    fn track(&self, event: RawEvent, kind: WorkKind, sticky: bool, guard: InFlightGuard) -> u64 {
        let mut state = self.state();
        let recorded = self.inner.gpu.driver().record_event(event, self.inner.raw);
        state.issued += 1;
        let number = state.issued;
        state.in_flight.push_back(InFlight {
            number,
            event,
            unrecorded: recorded.err(),
            sticky,
            kind,
            _guard: guard,
        });
        number
    }

    /// Creates the events that `count` operations in flight use.
    pub(crate) fn prime(&self, count: usize) -> Result<()> {
        self.poll();
        let missing = {
            let mut state = self.state();
            state.in_flight.reserve(count);
            count.saturating_sub(state.events.len() + state.in_flight.len())
        };
        for _ in 0..missing {
            let event = self.inner.gpu.driver().create_event(false)?;
            self.state().events.push(event);
        }
        Ok(())
    }
}
