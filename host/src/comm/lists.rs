//! Operations on lists of tensors: torchcomms' forms without `_single`.
//!
//! A list whose tensors lie one behind the other in memory (the chunks of one tensor) is used where
//! it lies; any other list goes through one contiguous copy.

use std::sync::Arc;

use fusewire_device::DType;

use super::submit::{PreparedOp, invalid};
use super::{Communicator, Work};
use crate::Result;
use crate::cpu::HostFn;
use crate::gpu::Copy;
use crate::options::ReduceOp;
use crate::stream::Task;
use crate::tensor::{Input, Output, Tensor};

/// A list of tensors as one row after the other.
struct Rows {
    /// The contiguous memory.
    whole: Tensor,
    /// The tensors, where they lie elsewhere.
    parts: Option<Vec<Tensor>>,
}

impl Rows {
    /// The rows of `list`, which has a tensor of `dtype` for each of `ranks` ranks.
    fn new(
        operation: &'static str,
        what: &str,
        list: &[Tensor],
        ranks: u32,
        dtype: DType,
    ) -> Result<Self> {
        if list.len() != ranks as usize {
            return Err(invalid(
                operation,
                format!("{} {what} for {ranks} ranks", list.len()),
            ));
        }
        if let Some(other) = list.iter().find(|tensor| tensor.dtype() != dtype) {
            return Err(invalid(
                operation,
                format!("{what} of {} and of {}", other.dtype().name(), dtype.name()),
            ));
        }
        if let Some(whole) = Tensor::joined(list) {
            return Ok(Self { whole, parts: None });
        }
        let count = list.iter().map(Tensor::len).sum();
        Ok(Self {
            whole: Tensor::on_device(list[0].device(), dtype, count)?,
            parts: Some(list.to_vec()),
        })
    }

    /// Copies the tensors into the contiguous memory, where they are not there.
    fn pack(&self) -> Step {
        self.each(|whole, part| (whole, part))
    }

    /// Copies the contiguous memory into the tensors.
    fn unpack(&self) -> Step {
        self.each(|whole, part| (part, whole))
    }

    /// A copy for each part: to the first address that `order` gives, from the second.
    fn each(&self, order: impl Fn(u64, u64) -> (u64, u64)) -> Step {
        let parts = self.parts.as_ref()?;
        let mut at = self.whole.as_ptr() as u64;
        let copies = parts.iter().map(|part| {
            let bytes = (part.len() * part.dtype().size()) as u64;
            let (to, from) = order(at, part.as_ptr() as u64);
            at += bytes;
            Copy {
                to,
                from,
                bytes,
                keep: [self.whole.keep(), part.keep()],
            }
        });
        Some(copies.collect())
    }
}

/// Checks that all tensors of a list have as many elements as ranks' rows need.
fn rows_of(operation: &'static str, what: &str, list: &[Tensor], count: usize) -> Result<()> {
    match list.iter().position(|tensor| tensor.len() != count) {
        None => Ok(()),
        Some(rank) => Err(invalid(
            operation,
            format!(
                "{what} {rank} has {} elements; {count} are needed",
                list[rank].len()
            ),
        )),
    }
}

/// A step before or after the operation itself.
type Step = Option<Arc<[Copy]>>;

/// Defines the blocking and the asynchronous form of an operation on lists.
macro_rules! list_forms {
    (
        $(#[$doc:meta])*
        $name:ident, $name_async:ident => $steps:ident($($arg:ident: $ty:ty),*)
    ) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// [`crate::Error::InvalidArgument`] before anything moves; the communicator's first
        /// failure.
        pub fn $name(&self, $($arg: $ty),*) -> Result<()> {
            self.$steps($($arg,)* &mut |comm, before, prepared, after| {
                comm.step_now(before)?;
                comm.run(&prepared)?;
                comm.step_now(after)?;
                Ok(None)
            }).map(drop)
        }

        #[doc = concat!("As [`Communicator::", stringify!($name), "`], enqueued on the \
            communicator's stream.")]
        ///
        /// # Errors
        /// As there; a failure while running is the [`Work`]'s.
        pub fn $name_async(&self, $($arg: $ty),*) -> Result<Work> {
            let work = self.$steps($($arg,)* &mut |comm, before, prepared, after| {
                comm.step_later(before, None)?;
                let work = comm.enqueue(&prepared)?;
                Ok(Some(comm.step_later(after, Some(&work))?.unwrap_or(work)))
            })?;
            work.ok_or_else(|| invalid(stringify!($name), "nothing was enqueued".to_owned()))
        }
    };
}

/// How an operation with its steps is issued: now, or later.
type Issue<'i> = dyn FnMut(&Communicator, Step, PreparedOp<'_>, Step) -> Result<Option<Work>> + 'i;

impl Communicator {
    list_forms!(
        /// Collects every rank's `input` in `outputs[r]`.
        all_gather, all_gather_async => list_all_gather(outputs: &[Tensor], input: &Tensor)
    );

    list_forms!(
        /// As [`Communicator::all_gather`], where ranks contribute different lengths: `outputs[r]`
        /// has that of rank r, on every rank.
        all_gather_v, all_gather_v_async => list_all_gather_v(outputs: &[Tensor], input: &Tensor)
    );

    list_forms!(
        /// Reduces `inputs[r]` of every rank to rank r's `output`.
        reduce_scatter, reduce_scatter_async => list_reduce_scatter(
            output: &Tensor, inputs: &[Tensor], op: ReduceOp
        )
    );

    list_forms!(
        /// As [`Communicator::reduce_scatter`], where `inputs[r]` has another length for each r
        /// (the same on all ranks).
        reduce_scatter_v, reduce_scatter_v_async => list_reduce_scatter_v(
            output: &Tensor, inputs: &[Tensor], op: ReduceOp
        )
    );

    list_forms!(
        /// Sends `inputs[r]` to rank r and receives `outputs[r]` from it; the lengths are those of
        /// each pair of ranks.
        all_to_all, all_to_all_async => list_all_to_all(outputs: &[Tensor], inputs: &[Tensor])
    );

    list_forms!(
        /// Sends the root's `inputs[r]` to rank r's `output`. Elsewhere `inputs` is empty.
        scatter, scatter_async => list_scatter(output: &Tensor, inputs: &[Tensor], root: u32)
    );

    list_forms!(
        /// Collects every rank's `input` in the root's `outputs[r]`. Elsewhere `outputs` is empty.
        gather, gather_async => list_gather(outputs: &[Tensor], input: &Tensor, root: u32)
    );

    fn step_now(&self, step: Step) -> Result<()> {
        let Some(step) = step else { return Ok(()) };
        let recording = self.stream().recording()?;
        self.chain(&recording)?;
        let task = Task::Copies(step);
        if recording.is_some() {
            return self.stream().enqueue_in(recording, task).map(drop);
        }
        self.stream()
            .run_or_enqueue(recording, || task.execute(), || Ok(task.clone()))
    }

    /// The step gives the failure of the operation that it follows, so that its work stands for
    /// both.
    fn step_later(&self, step: Step, follows: Option<&Work>) -> Result<Option<Work>> {
        let Some(step) = step else { return Ok(None) };
        let recording = self.stream().recording()?;
        self.chain(&recording)?;
        if self.stream().device().is_gpu() {
            let ticket = self.stream().enqueue_in(recording, Task::Copies(step))?;
            return Ok(Some(Work::following(
                self.stream().clone(),
                ticket,
                follows.cloned(),
            )));
        }
        let (inner, follows) = (Arc::clone(&self.inner), follows.cloned());
        let task = Task::Copies(step);
        let checked: HostFn = Arc::new(move || {
            inner.check()?;
            // In stream order: it has ended. (In a graph the first failure ends the replay.)
            follows.as_ref().and_then(Work::result).unwrap_or(Ok(()))?;
            task.execute()
        });
        let ticket = self.stream().enqueue(Task::Host(checked))?;
        Ok(Some(Work::new(self.stream().clone(), ticket)))
    }

    fn list_all_gather(
        &self,
        outputs: &[Tensor],
        input: &Tensor,
        issue: &mut Issue<'_>,
    ) -> Result<Option<Work>> {
        rows_of("all_gather", "output", outputs, input.len())?;
        self.list_all_gather_v(outputs, input, issue)
    }

    fn list_all_gather_v(
        &self,
        outputs: &[Tensor],
        input: &Tensor,
        issue: &mut Issue<'_>,
    ) -> Result<Option<Work>> {
        let rows = Rows::new(
            "all_gather_v",
            "outputs",
            outputs,
            self.size(),
            input.dtype(),
        )?;
        let (output, source) = (Output::from(&rows.whole), Input::from(input));
        let equal = outputs.iter().all(|row| row.len() == input.len());
        if equal {
            let prepared = self.prepare_all_gather(&output, &source)?;
            return issue(self, None, prepared, rows.unpack());
        }
        let counts: Arc<[u64]> = outputs.iter().map(|row| row.len() as u64).collect();
        let prepared = self.prepare_all_gather_v(&output, &source, Some(&counts), None)?;
        let prepared = prepared.owning(Arc::new(Arc::clone(&counts)));
        issue(self, None, prepared, rows.unpack())
    }

    fn list_reduce_scatter(
        &self,
        output: &Tensor,
        inputs: &[Tensor],
        op: ReduceOp,
        issue: &mut Issue<'_>,
    ) -> Result<Option<Work>> {
        rows_of("reduce_scatter", "input", inputs, output.len())?;
        let rows = Rows::new(
            "reduce_scatter",
            "inputs",
            inputs,
            self.size(),
            output.dtype(),
        )?;
        let (source, target) = (Input::from(&rows.whole), Output::from(output));
        let prepared = self.prepare_reduce_scatter(&target, &source, op)?;
        issue(self, rows.pack(), prepared, None)
    }

    fn list_reduce_scatter_v(
        &self,
        output: &Tensor,
        inputs: &[Tensor],
        op: ReduceOp,
        issue: &mut Issue<'_>,
    ) -> Result<Option<Work>> {
        let name = "reduce_scatter_v";
        if inputs.len() != self.size() as usize {
            return Err(invalid(
                name,
                format!("{} inputs for {} ranks", inputs.len(), self.size()),
            ));
        }
        let own = &inputs[self.rank() as usize];
        if own.len() != output.len() {
            return Err(invalid(
                name,
                format!(
                    "input {} has {} elements, the output {}",
                    self.rank(),
                    own.len(),
                    output.len()
                ),
            ));
        }
        if inputs.iter().all(|input| input.len() == output.len()) {
            return self.list_reduce_scatter(output, inputs, op, issue);
        }
        // A reduction to each rank in turn: as many bytes as there are, whatever the lengths.
        for input in inputs {
            if input.dtype() != output.dtype() {
                return Err(invalid(name, "types differ".to_owned()));
            }
        }
        let mut last = None;
        for (root, input) in (0..).zip(inputs) {
            let target = if root == self.rank() { output } else { input };
            let (target, source) = (Output::from(target), Input::from(input));
            let prepared = self.prepare_reduce(&target, &source, root, op)?;
            last = issue(self, None, prepared, None)?;
        }
        Ok(last)
    }

    fn list_all_to_all(
        &self,
        outputs: &[Tensor],
        inputs: &[Tensor],
        issue: &mut Issue<'_>,
    ) -> Result<Option<Work>> {
        let name = "all_to_all";
        let Some(dtype) = inputs.first().map(Tensor::dtype) else {
            return Err(invalid(name, "0 inputs".to_owned()));
        };
        let sources = Rows::new(name, "inputs", inputs, self.size(), dtype)?;
        let targets = Rows::new(name, "outputs", outputs, self.size(), dtype)?;
        let counts = |list: &[Tensor]| -> Vec<u64> {
            list.iter().map(|tensor| tensor.len() as u64).collect()
        };
        let (sends, receives) = (counts(inputs), counts(outputs));
        let (source, target) = (Input::from(&sources.whole), Output::from(&targets.whole));
        let prepared =
            self.prepare_all_to_all_v(&target, &source, Some((&receives, &sends)), None)?;
        let prepared = prepared.owning(Arc::new((sends, receives)));
        issue(self, sources.pack(), prepared, targets.unpack())
    }

    fn list_scatter(
        &self,
        output: &Tensor,
        inputs: &[Tensor],
        root: u32,
        issue: &mut Issue<'_>,
    ) -> Result<Option<Work>> {
        if root != self.rank() {
            let (target, nothing) = (Output::from(output), Tensor::new(output.dtype(), 0)?);
            let prepared = self.prepare_scatter(&target, &Input::from(&nothing), root)?;
            return issue(self, None, prepared, None);
        }
        rows_of("scatter", "input", inputs, output.len())?;
        let rows = Rows::new("scatter", "inputs", inputs, self.size(), output.dtype())?;
        let (source, target) = (Input::from(&rows.whole), Output::from(output));
        let prepared = self.prepare_scatter(&target, &source, root)?;
        issue(self, rows.pack(), prepared, None)
    }

    fn list_gather(
        &self,
        outputs: &[Tensor],
        input: &Tensor,
        root: u32,
        issue: &mut Issue<'_>,
    ) -> Result<Option<Work>> {
        let source = Input::from(input);
        if root != self.rank() {
            let nothing = Tensor::new(input.dtype(), 0)?;
            let prepared = self.prepare_gather(&Output::from(&nothing), &source, root)?;
            return issue(self, None, prepared, None);
        }
        rows_of("gather", "output", outputs, input.len())?;
        let rows = Rows::new("gather", "outputs", outputs, self.size(), input.dtype())?;
        let prepared = self.prepare_gather(&Output::from(&rows.whole), &source, root)?;
        issue(self, None, prepared, rows.unpack())
    }
}
