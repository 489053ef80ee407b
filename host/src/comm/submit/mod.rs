//! Submission of checked calls: on the caller's thread, on a stream, or into a graph.

mod bound_windows;
mod command;
mod owner;
mod prepared_op;
#[cfg(test)]
mod tests;
mod user;

use core::sync::atomic::Ordering;

use fusewire_device::call::Call;
use fusewire_device::layout::FailureKind;
use fusewire_device::native::NativeEntry;
use tracing::span::EnteredSpan;

pub(super) use self::prepared_op::PreparedOp;

use self::prepared_op::Entry;
use super::Communicator;
use super::observe::{Arguments, Buffers, HookResult, HookedCall, OpInfo};
use super::work::Work;
use crate::cpu::RunningKernel;
use crate::stream::{Command, Event, Recording, Stream, Ticket};
use crate::tensor::TensorUse;
use crate::usage::{AccessList, Flagged, Name, User, Uses};
use crate::{Error, Result};

impl Communicator {
    /// Runs a prepared operation and waits until it has completed.
    #[inline]
    pub(super) fn run(&self, prepared: &PreparedOp<'_>) -> Result<()> {
        self.run_with(prepared, Arguments::Tensors)
    }

    /// Runs a prepared operation like [`Communicator::run`]. Hooks get `arguments`.
    // Not inlined into the callers, with `run_accessing` and `run_single` inlined: otherwise a
    // barrier of one rank takes 10 percent longer.
    #[inline(never)]
    pub(super) fn run_with(
        &self,
        prepared: &PreparedOp<'_>,
        arguments: Arguments<'_>,
    ) -> Result<()> {
        prepared.with_accesses(|accesses| self.run_accessing(prepared, accesses, arguments))
    }

    /// Runs a prepared operation like [`Communicator::run_with`], with accesses that it does
    /// not list.
    #[inline(always)]
    pub(super) fn run_accessing(
        &self,
        prepared: &PreparedOp<'_>,
        accesses: &AccessList<'_>,
        arguments: Arguments<'_>,
    ) -> Result<()> {
        let is_traced = tracing::enabled!(target: "fusewire::operation", tracing::Level::TRACE);
        let _span = is_traced.then(|| span_of(&prepared.op_info));
        self.inner.check_call(&prepared.op_info)?;
        // Read once, because on a GPU it is a call of the driver.
        let recording = self.stream.recording()?;
        self.chain(&recording)?;
        if recording.is_some() {
            if prepared.borrowed {
                return Err(capture_of_borrowed(prepared.function_name()));
            }
            return self.capture(prepared, accesses, recording, arguments, drop);
        }
        let recorder = &self.inner.observer.recorder;
        if !self.is_hooked() {
            if let Some(entry) = self.single(prepared) {
                return self.stream.run_ordered(
                    recording,
                    self.uses(accesses, prepared.op_info.call()),
                    || {
                        let open = recorder.open(&prepared.op_info);
                        let result = self.run_single(prepared, entry);
                        recorder.close(&open, result.is_ok());
                        result
                    },
                    |push| {
                        let id = recorder.issue(&prepared.op_info, false);
                        self.push(prepared, id, push)
                    },
                );
            }
            let id = recorder.issue(&prepared.op_info, false);
            return self
                .run_numbered(prepared, accesses, recording, id)
                .inspect_err(|_| recorder.refuse(id));
        }
        self.run_hooked(prepared, accesses, recording, arguments)
    }

    #[cold]
    fn run_hooked(
        &self,
        prepared: &PreparedOp<'_>,
        accesses: &AccessList<'_>,
        recording: Recording,
        arguments: Arguments<'_>,
    ) -> Result<()> {
        let id = self.inner.observer.recorder.issue(&prepared.op_info, false);
        let call = self.hooked_call(prepared, arguments, Some(id));
        self.call_hooks(&call, || {
            // A hook may have used another stream.
            self.chain(&recording)?;
            self.run_numbered(prepared, accesses, recording, id)
        })
    }

    /// Adds a prepared operation to the graph that the stream is capturing.
    fn capture<R: HookResult>(
        &self,
        prepared: &PreparedOp<'_>,
        accesses: &AccessList<'_>,
        recording: Recording,
        arguments: Arguments<'_>,
        result: impl FnOnce(Ticket) -> R,
    ) -> Result<R> {
        let capture = || {
            self.with_windows_captured(prepared, |prepared| {
                self.stream.note_accesses(recording, accesses)?;
                let command = self.command(prepared, 0)?;
                self.stream.enqueue_in(recording, command).map(result)
            })
        };
        if !self.is_hooked() {
            return capture();
        }
        self.call_hooks(&self.hooked_call(prepared, arguments, None), capture)
    }

    /// Returns the call of an operation for hooks. It is captured if it has no number in the flight
    /// recorder.
    fn hooked_call<'b>(
        &self,
        prepared: &'b PreparedOp<'_>,
        arguments: Arguments<'b>,
        record_id: Option<u64>,
    ) -> HookedCall<'b> {
        let tensors = prepared.tensors.iter().flatten().copied();
        HookedCall {
            name: prepared.function_name(),
            op_info: prepared.op_info,
            record_id,
            is_captured: record_id.is_none(),
            buffers: Buffers::of_operation(self, arguments, tensors),
        }
    }

    /// Returns the entry of a kernel of one block of one lane, which can run on this thread.
    #[inline]
    fn single(&self, prepared: &PreparedOp<'_>) -> Option<NativeEntry> {
        match prepared.entry {
            Entry::Native(entry)
                if self.inner.group.options.testing.lanes == 1
                    && self.inner.group.options.blocks == 1 =>
            {
                Some(entry)
            }
            _ => None,
        }
    }

    /// Returns the name and the rank of an operation's kernel, for messages.
    #[inline]
    fn running(&self, prepared: &PreparedOp<'_>) -> RunningKernel {
        RunningKernel {
            name: prepared.name,
            rank: self.inner.group.rank,
        }
    }

    #[inline(always)]
    fn run_single(&self, prepared: &PreparedOp<'_>, entry: NativeEntry) -> Result<()> {
        crate::cpu::check_float_environment()?;
        let ran = self.with_windows_now(prepared, |prepared| {
            let (kernel, params) = (self.running(prepared), prepared.params.as_ptr().cast());
            // SAFETY: the parameters belong to the entry (`PreparedOp::new`); their pointers are
            // valid during this call.
            unsafe { crate::cpu::run_single(kernel, entry, params) }
        })?;
        if let Err(error) = ran {
            // Fails the other ranks now, which would otherwise wait for this rank until their
            // timeout.
            self.inner.abort_for(FailureKind::Stopped);
            return Err(error);
        }
        self.inner.check_launch()
    }

    fn run_numbered(
        &self,
        prepared: &PreparedOp<'_>,
        accesses: &AccessList<'_>,
        recording: Recording,
        id: u64,
    ) -> Result<()> {
        let uses = self.uses(accesses, prepared.op_info.call());
        if let Some(entry) = self.single(prepared) {
            let direct = || {
                self.inner.observer.recorder.start_at_once(id);
                let result = self.run_single(prepared, entry);
                self.inner.observer.recorder.end(id, result.is_ok());
                result
            };
            return self.stream.run_ordered(recording, uses, direct, |push| {
                self.push(prepared, id, push)
            });
        }
        let direct =
            || self.with_windows_now(prepared, |prepared| self.command(prepared, id)?.execute())?;
        self.stream.run_ordered(recording, uses, direct, |push| {
            self.push(prepared, id, push)
        })
    }

    /// Passes the command of a prepared operation to `push`, which enqueues it on the stream.
    fn push(
        &self,
        prepared: &PreparedOp<'_>,
        id: u64,
        push: &dyn Fn(Command) -> Result<Ticket>,
    ) -> Result<Ticket> {
        self.with_windows_queued(prepared, |prepared| push(self.command(prepared, id)?))
    }

    /// Enqueues a prepared operation.
    pub(super) fn submit(&self, prepared: &PreparedOp<'_>) -> Result<Work> {
        self.submit_with(prepared, Arguments::Tensors)
    }

    /// Enqueues a prepared operation. Hooks get `arguments`.
    pub(super) fn submit_with(
        &self,
        prepared: &PreparedOp<'_>,
        arguments: Arguments<'_>,
    ) -> Result<Work> {
        self.submit_flagged(prepared, arguments, None)
    }

    /// Enqueues a prepared operation. Flags order its accesses to the tensor in `flagged` with the
    /// work of a stream. In a graph, nothing else orders them.
    pub(super) fn submit_flagged(
        &self,
        prepared: &PreparedOp<'_>,
        arguments: Arguments<'_>,
        flagged: Option<(TensorUse<'_>, &Stream)>,
    ) -> Result<Work> {
        self.inner.check_call(&prepared.op_info)?;
        let recording = self.stream.recording()?;
        self.chain(&recording)?;
        if recording.is_some() {
            let work = |ticket| Work::new(self.stream.clone(), ticket);
            return prepared.with_accesses(|accesses| {
                self.capture(prepared, accesses, recording, arguments, work)
            });
        }
        let recorder = &self.inner.observer.recorder;
        let id = recorder.issue(&prepared.op_info, false);
        let enqueue = || {
            let ticket = prepared.with_accesses(|accesses| {
                let enqueue =
                    |push: &dyn Fn(Command) -> Result<Ticket>| self.push(prepared, id, push);
                let call = prepared.op_info.call();
                let Some((operand, compute)) = flagged else {
                    let uses = self.uses(accesses, call);
                    return self.stream.enqueue_ordered(recording, uses, enqueue);
                };
                let mut all = accesses.clone();
                operand.add_to(&mut all);
                let operand = TensorUse::accesses([operand]);
                let flagged = Flagged::new(&operand, compute.source());
                let uses = Uses {
                    flagged: flagged.as_ref(),
                    ..self.uses(&all, call)
                };
                self.stream.enqueue_ordered(recording, uses, enqueue)
            })?;
            Ok(Work::new(self.stream.clone(), ticket))
        };
        if !self.is_hooked() {
            return enqueue().inspect_err(|_| recorder.refuse(id));
        }
        let call = self.hooked_call(prepared, arguments, Some(id));
        self.call_hooks(&call, || {
            // A hook may have used another stream.
            self.chain(&recording)?;
            enqueue()
        })
    }

    /// Returns the accesses of an operation of this rank.
    #[inline(always)]
    pub(super) fn uses<'b>(&self, accesses: &'b AccessList<'b>, call: Call) -> Uses<'b> {
        Uses {
            accesses,
            user: match accesses.is_empty() {
                true => User::NOBODY,
                false => self.user(),
            },
            operation: Name::Call(call),
            flagged: None,
        }
    }

    /// Returns the user of tensors that an operation of this rank has.
    #[inline]
    fn user(&self) -> User {
        let inner = &*self.inner;
        self.stream
            .user()
            .as_rank(inner.group.memory_id, inner.group.rank)
    }

    /// Makes this launch follow the communicator's last one, if that was on another stream and this
    /// one is not captured.
    #[inline]
    pub(super) fn chain(&self, recording: &Recording) -> Result<()> {
        let id = self.stream.id();
        if self.inner.executor.last_stream.load(Ordering::Acquire) == id {
            return Ok(());
        }
        self.change_stream(id, recording)
    }

    /// Makes this launch follow the last one, which was on another stream.
    #[cold]
    fn change_stream(&self, id: usize, recording: &Recording) -> Result<()> {
        if let Some(on_gpu) = &self.inner.executor.on_gpu {
            on_gpu.check_stream(&self.stream, self.inner.group.options.blocks)?;
        }
        if recording.is_some() {
            return Ok(());
        }
        let mut last = self.inner.executor.lock_order();
        // Before the event is recorded: `bound_windows` explains the order. No other thread sees
        // the new stream before that stream waits for the event.
        let last_stream = &self.inner.executor.last_stream;
        last_stream.store(0, Ordering::SeqCst);
        let mut event = Event::new();
        if let Some((stream, last)) = &*last
            && stream.id() != id
        {
            self.stream.wait_stream(stream, last)?;
            // A wait refers to the previous record of the event, so the next record may reuse it.
            event = last.clone();
        }
        let before = last.replace((self.stream.clone(), event));
        last_stream.store(id, Ordering::Release);
        drop(last);
        // Dropped after the lock: dropping the last handle of a stream waits for its work, which
        // may need the lock.
        drop(before);
        Ok(())
    }
}

#[cold]
fn span_of(op_info: &OpInfo) -> EnteredSpan {
    tracing::trace_span!(
        target: "fusewire::operation",
        "operation",
        name = op_info.call().operation().name(),
        count = op_info.input_count,
    )
    .entered()
}

/// Returns the error for a bad argument of `operation`.
pub(super) fn invalid(operation: &'static str, detail: String) -> Error {
    Error::InvalidArgument { operation, detail }
}

/// Returns the error for the capture of a blocking call that uses memory which lives only as long
/// as the call.
#[cold]
pub(super) fn capture_of_borrowed(function: &str) -> Error {
    Error::CaptureState {
        detail: format!(
            "a graph outlives the call, so {function} cannot be captured with slices or addresses: \
             use tensors and the _async form of the function"
        ),
    }
}
