//! Work put on a stream, or into the graph while it is captured.

use core::ffi::c_void;
use std::sync::{Arc, Mutex};

use super::Stream;
use crate::cpu::HostFn;
use crate::gpu::device::InFlightGuard;
use crate::gpu::driver::{CaptureStatus, RawEvent, RawGraph};
use crate::gpu::in_flight::{Copy, InFlight, HostCall, WorkKind};
use crate::gpu::graph::{self, GraphExec, Logged};
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
    /// A closure that puts work on the stream itself, called at once.
    Call(HostFn),
    /// Copies, one behind the other.
    Copies(Arc<[Copy]>),
    /// A graph.
    Graph(GraphExec),
}

impl Stream {
    /// Puts work behind all work of the stream, or into the graph while it is captured; its number (0 then).
    /// `sticky`: its failure is reported by the next [`Stream::synchronize`].
    pub(crate) fn enqueue(&self, task: Task, sticky: bool) -> Result<u64> {
        self.enqueue_in(self.capture_status()?, task, sticky)
    }

    /// As [`Stream::enqueue`], where the driver has just said whether the stream is captured.
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
        // Before the work: what is in flight must be known to be.
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

    /// Puts work on the stream. What fails without being refused ([`WorkKind::Failed`]) keeps its position in the order.
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
                // SAFETY: the work keeps the value alive until the stream has come past it.
                unsafe { driver.host_function(raw, HostCall::run, data)? };
                WorkKind::Host(call)
            }
            // What fails half-way may have put work on the stream all the same.
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
                    // SAFETY: what the graph holds was checked as it was captured, and it keeps alive what it needs.
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
            // SAFETY: `keep` has both ranges mapped until the copy is done.
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
                // First: a graph must not hold what nothing keeps alive.
                let keep = Box::new((launch.keep.clone(), launch.owner.clone()));
                graph::retain(gpu, raw_graph, keep)?;
                launch.issue(driver, self.inner.raw)?;
                if let Some(owner) = launch.owner {
                    graph::log_node(gpu, capture, Logged::Launch(owner, launch.info));
                }
            }
            Task::Host(call) => {
                let call = Arc::new(HostCall {
                    call,
                    error: Mutex::default(),
                });
                let data = Arc::as_ptr(&call).cast_mut().cast::<c_void>();
                graph::retain(gpu, raw_graph, Box::new(Arc::clone(&call)))?;
                // SAFETY: the graph keeps the value alive.
                unsafe { driver.host_function(self.inner.raw, HostCall::run, data)? };
                graph::log_node(gpu, capture, Logged::Host(call));
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

    /// Records work that was just put on the stream; its number.
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
