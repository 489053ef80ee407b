//! Enqueues work on a stream or captures it into a graph.

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
pub(crate) enum Command {
    /// A kernel.
    Launch(Launch),
    /// A closure that a graph may replay.
    Host(HostFn),
    /// A closure that is called immediately and itself enqueues work on the driver's stream.
    Call(HostFn),
    /// Copies, executed in order.
    Copies(Arc<[Copy]>),
    /// A replay of a graph.
    Graph(GraphExec),
}

impl Stream {
    /// Enqueues an operation, or captures it while the stream is capturing. Returns the number of
    /// the operation, or 0 if it was captured. If `sticky` is true, the next
    /// [`Stream::synchronize`] reports a failure of the operation. `status` is the capture status,
    /// which the caller has queried.
    pub(crate) fn enqueue_in(
        &self,
        status: CaptureStatus,
        command: Command,
        sticky: bool,
    ) -> Result<u64> {
        if let Some((capture, graph)) = Self::capture(status)? {
            self.capture_command(command, capture, graph)?;
            return Ok(0);
        }
        self.poll();
        // Creates the event before the work is enqueued. If creating the event failed afterwards,
        // the enqueued work could not be tracked.
        let spare = self.state().events.pop();
        let event = match spare {
            Some(event) => event,
            None => self.inner.gpu.driver().create_event(false)?,
        };
        let (guard, _launching) = self.inner.gpu.launch();
        match self.issue(command) {
            Ok(kind) => Ok(self.track(event, kind, sticky, guard)),
            Err(error) => {
                self.state().events.push(event);
                Err(error)
            }
        }
    }

    /// Enqueues work on the stream. If a call fails after part of the work may have been enqueued,
    /// returns a kind that contains the error, so that the failed operation is tracked like any
    /// other.
    fn issue(&self, command: Command) -> Result<WorkKind> {
        let driver = self.inner.gpu.driver();
        let raw = self.inner.raw;
        Ok(match command {
            Command::Launch(launch) => {
                let word = match &launch.owner {
                    Some(owner) => match owner.before(&launch.info) {
                        Ok(word) => word,
                        Err(error) => return Ok(WorkKind::Failed(error, launch.keep)),
                    },
                    None => 0,
                };
                let issued = self
                    .enqueueing()
                    .and_then(|_no_capture| launch.issue(driver, raw));
                if let Err(error) = issued {
                    if let Some(owner) = &launch.owner {
                        let _ = owner.after(word, &launch.info, false);
                    }
                    return Ok(WorkKind::Failed(error, launch.keep));
                }
                WorkKind::Launch(launch.owner, word, launch.info, launch.keep)
            }
            Command::Host(call) => {
                let call = Arc::new(HostCall {
                    call,
                    error: Mutex::default(),
                });
                let data = Arc::as_ptr(&call).cast_mut().cast::<c_void>();
                let _no_capture = self.enqueueing()?;
                // SAFETY: `WorkKind::Host` keeps `call`, to which `data` points, alive until the
                // stream has executed the function.
                unsafe { driver.host_function(raw, HostCall::run, data)? };
                WorkKind::Host(call)
            }
            // If the closure fails, part of its work may already be enqueued, so the operation is
            // tracked.
            Command::Call(call) => {
                let failed = call().err();
                WorkKind::Call(call, failed)
            }
            Command::Copies(copies) => {
                let failed = self.copy_all(&copies).err();
                WorkKind::Copies(copies, failed)
            }
            Command::Graph(exec) => {
                if !Arc::ptr_eq(&exec.inner.gpu, &self.inner.gpu) {
                    return Err(graph::other_device());
                }
                let mut words = self.state().words.pop().unwrap_or_default();
                let (number, admitted) = exec.inner.admit(&mut words);
                let launched = admitted.and_then(|()| {
                    let _no_capture = self.enqueueing()?;
                    // SAFETY: the code that captured the work guarantees that the requirements of
                    // the work hold at every replay (`Launch::new`), and the graph retains the
                    // memory that the work uses.
                    let launched = unsafe { driver.launch_graph(exec.inner.raw, raw) };
                    launched.map_err(Error::from).inspect_err(|_| {
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
        let _no_capture = self.enqueueing()?;
        for copy in copies.iter().filter(|copy| copy.bytes > 0) {
            // SAFETY: `copy.keep` keeps both ranges mapped until the copy is complete.
            unsafe {
                self.inner
                    .gpu
                    .driver()
                    .copy(copy.to, copy.from, copy.bytes, self.inner.raw)?;
            }
        }
        Ok(())
    }

    fn capture_command(&self, command: Command, capture: u64, raw_graph: RawGraph) -> Result<()> {
        let gpu = &self.inner.gpu;
        let driver = gpu.driver();
        match command {
            Command::Launch(launch) => {
                // Retains the memory before the launch is captured. In the opposite order, a
                // failure to retain would leave a launch in the graph whose memory can be freed.
                let keep = Box::new((launch.keep.clone(), launch.owner.clone()));
                graph::retain(gpu, raw_graph, keep)?;
                launch.issue(driver, self.inner.raw)?;
                if let Some(owner) = launch.owner {
                    graph::log_node(gpu, capture, LoggedNode::Launch(owner, launch.info));
                }
            }
            Command::Host(call) => {
                let call = Arc::new(HostCall {
                    call,
                    error: Mutex::default(),
                });
                let data = Arc::as_ptr(&call).cast_mut().cast::<c_void>();
                graph::retain(gpu, raw_graph, Box::new(Arc::clone(&call)))?;
                // SAFETY: the graph retains `call`, to which `data` points, until the graph and all
                // its instances are destroyed.
                unsafe { driver.host_function(self.inner.raw, HostCall::run, data)? };
                graph::log_node(gpu, capture, LoggedNode::Host(call));
            }
            Command::Call(call) => {
                graph::retain(gpu, raw_graph, Box::new(Arc::clone(&call)))?;
                call()?;
            }
            Command::Copies(copies) => {
                graph::retain(gpu, raw_graph, Box::new(Arc::clone(&copies)))?;
                self.copy_all(&copies)?;
            }
            Command::Graph(_) => {
                return Err(Error::capture(
                    "a graph cannot be captured into another one on a GPU; capture its work itself",
                ));
            }
        }
        Ok(())
    }

    /// Adds work that was just enqueued to the list of work in flight. Returns the number of the
    /// operation.
    fn track(&self, event: RawEvent, kind: WorkKind, sticky: bool, guard: InFlightGuard) -> u64 {
        let recorded = self.enqueueing().and_then(|_no_capture| {
            let driver = self.inner.gpu.driver();
            Ok(driver.record_event(event, self.inner.raw)?)
        });
        let mut state = self.state();
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

    /// Creates events in advance, so that `count` operations can be in flight without creating
    /// another event.
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
