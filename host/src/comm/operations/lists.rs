//! Collectives on lists of tensors, torchcomms' forms without `_single`.
//!
//! A list whose tensors are contiguous in memory is used in place. Any other list goes through one
//! contiguous copy.

use core::slice::from_ref;
use std::sync::Arc;

use fusewire_device::DType;
use fusewire_device::call::{Call, Operation};

use crate::Result;
use crate::collective::{Collective, Op, Operands};
use crate::comm::observe::{Buffers, HookResult};
use crate::comm::submit::invalid;
use crate::comm::{Communicator, Work};
use crate::cpu::HostFn;
use crate::gpu::Copy;
use crate::options::ReduceOp;
use crate::stream::{Command, Recording, Ticket};
use crate::tensor::{Tensor, TensorUse};
use crate::usage::AccessList;

/// Names the copies in messages.
const COPY: Call = Call::new(Operation::User, 0, 0, 0, 0xffff, 0);

/// A list of tensors as contiguous rows.
struct Rows {
    /// The contiguous memory.
    whole: Tensor,
    /// The tensors, if they are not in the contiguous memory.
    parts: Option<Vec<Tensor>>,
}

impl Rows {
    /// Creates the rows of `list`, which must have a tensor of `dtype` for each of `ranks` ranks.
    fn new(
        comm: &Communicator,
        operation: &'static str,
        what: &str,
        list: &[&Tensor],
        dtype: DType,
    ) -> Result<Self> {
        if list.len() != comm.size() as usize {
            return Err(invalid(
                operation,
                format!("{} {what} for {} ranks", list.len(), comm.size()),
            ));
        }
        list.iter()
            .try_for_each(|tensor| comm.check_device(operation, tensor))?;
        if let Some(other) = list.iter().find(|tensor| tensor.dtype() != dtype) {
            return Err(invalid(
                operation,
                format!("{what} of {} and of {}", other.dtype().name(), dtype.name()),
            ));
        }
        if let Some(whole) = Tensor::joined(list) {
            return Ok(Self { whole, parts: None });
        }
        let count = list.iter().map(|tensor| tensor.len()).sum();
        Ok(Self {
            whole: Tensor::on_device(list[0].device(), dtype, count)?,
            parts: Some(list.iter().copied().cloned().collect()),
        })
    }

    /// Returns the copies of the tensors to the contiguous memory.
    fn pack(&self) -> Step {
        self.each(true, |whole, part| (whole, part))
    }

    /// Returns the copies from the contiguous memory to the tensors.
    fn unpack(&self) -> Step {
        self.each(false, |whole, part| (part, whole))
    }

    /// Returns a copy for each tensor, to the contiguous memory if `packs` is true. `order` gets
    /// the address in the contiguous memory and that of the tensor, and returns the target and the
    /// source.
    fn each(&self, packs: bool, order: impl Fn(u64, u64) -> (u64, u64)) -> Step {
        let parts = self.parts.as_ref()?;
        let mut at = self.whole.as_ptr() as u64;
        let used = |writes: bool| match writes {
            true => TensorUse::Write,
            false => TensorUse::Read,
        };
        let uses = parts.iter().map(used(!packs));
        let uses = uses.chain([used(packs)(&self.whole)]);
        let accesses = AccessList::Shared(TensorUse::accesses(uses).to_arc());
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
        Some(CopyStep {
            copies: copies.collect(),
            accesses,
        })
    }
}

/// Checks that all tensors of a list have `count` elements.
fn rows_of(operation: &'static str, what: &str, list: &[&Tensor], count: usize) -> Result<()> {
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

/// Copies before or after the collectives.
#[derive(Clone)]
struct CopyStep {
    copies: Arc<[Copy]>,
    accesses: AccessList<'static>,
}

type Step = Option<CopyStep>;

/// Collectives on contiguous tensors that implement one operation on lists.
pub(in crate::comm) struct ListCollective<'a> {
    /// The call, for hooks.
    name: &'static str,
    op: Op,
    outputs: Vec<&'a Tensor>,
    inputs: Vec<&'a Tensor>,
    /// Copies of the inputs to contiguous memory.
    before: Step,
    parts: Vec<Part>,
    /// Row lengths of the output and of the input, if the operation has them.
    splits: (Vec<u64>, Vec<u64>),
    /// Copies of the outputs from contiguous memory.
    after: Step,
}

struct Part {
    op: Op,
    reduce: ReduceOp,
    output: Option<Tensor>,
    input: Option<Tensor>,
}

impl Part {
    fn new(op: Op, output: &Tensor, input: &Tensor) -> Self {
        Self {
            op,
            reduce: ReduceOp::Sum,
            output: Some(output.clone()),
            input: Some(input.clone()),
        }
    }
}

impl<'a> ListCollective<'a> {
    fn new(name: &'static str, outputs: &[&'a Tensor], inputs: &[&'a Tensor], part: Part) -> Self {
        Self {
            name,
            op: part.op,
            outputs: outputs.to_vec(),
            inputs: inputs.to_vec(),
            before: None,
            parts: vec![part],
            splits: Default::default(),
            after: None,
        }
    }

    fn collectives(&self) -> impl Iterator<Item = Collective<'_>> {
        self.parts.iter().map(|part| {
            let operands = match (&part.output, &part.input) {
                (Some(output), Some(input)) => Operands::new(output, input),
                (Some(output), None) => Operands::of_output(output),
                (None, Some(input)) => Operands::of_input(input),
                (None, None) => Operands::none(),
            };
            let operands = operands.with_reduction(part.reduce);
            let (outputs, inputs) = (self.splits.0.as_slice(), self.splits.1.as_slice());
            Collective::new(part.op, operands.with_splits(outputs, inputs))
        })
    }
}

impl Communicator {
    /// Runs the steps and collectives of an operation on lists.
    pub(in crate::comm) fn execute_list(&self, list: ListCollective<'_>) -> Result<()> {
        self.check_list(&list)?;
        self.hooked_list(&list, |comm| {
            comm.step_now(list.before.clone())?;
            for collective in list.collectives() {
                comm.execute(collective)?;
            }
            comm.step_now(list.after.clone())
        })
    }

    /// Enqueues the steps and collectives of an operation on lists.
    pub(in crate::comm) fn enqueue_list(&self, list: ListCollective<'_>) -> Result<Work> {
        self.check_list(&list)?;
        self.hooked_list(&list, |comm| {
            comm.step_later(list.before.clone(), None)?;
            let mut last = None;
            for collective in list.collectives() {
                last = Some(comm.enqueue(collective)?);
            }
            let after = comm.step_later(list.after.clone(), last.as_ref())?;
            Ok(after.or(last).expect("a list has at least one collective"))
        })
    }

    fn hooked_list<R: HookResult>(
        &self,
        list: &ListCollective<'_>,
        body: impl FnOnce(&Self) -> Result<R>,
    ) -> Result<R> {
        let buffers =
            || Buffers::of_tensors(list.inputs.iter().copied(), list.outputs.iter().copied());
        self.hooked(list.name, Some(list.op), buffers, body)
    }

    /// Checks all collectives before anything is copied.
    fn check_list(&self, list: &ListCollective<'_>) -> Result<()> {
        list.collectives()
            .try_for_each(|mut collective| self.check_collective(&mut collective))
    }

    fn step_now(&self, step: Step) -> Result<()> {
        let Some(step) = step else { return Ok(()) };
        let recording = self.stream().recording()?;
        self.chain(&recording)?;
        let command = self.stream().copy_command(step.copies);
        if recording.is_some() {
            self.stream().note_accesses(recording, &step.accesses)?;
            return self.stream().enqueue_in(recording, command).map(drop);
        }
        let uses = self.uses(&step.accesses, COPY);
        self.stream().run_ordered(
            recording,
            uses,
            || command.execute(),
            |push| push(command.clone()),
        )
    }

    /// Enqueues a step. The result of its work includes the failure of the operation `follows`.
    fn step_later(&self, step: Step, follows: Option<&Work>) -> Result<Option<Work>> {
        let Some(step) = step else { return Ok(None) };
        let recording = self.stream().recording()?;
        self.chain(&recording)?;
        if self.stream().device().is_gpu() {
            let ticket = self.enqueue_step(
                recording,
                &step.accesses,
                self.stream().copy_command(step.copies),
            )?;
            return Ok(Some(Work::following(
                self.stream().clone(),
                ticket,
                follows.cloned(),
            )));
        }
        let (inner, follows) = (Arc::clone(&self.inner), follows.cloned());
        let command = self.stream().copy_command(step.copies);
        let checked: HostFn = Arc::new(move || {
            inner.check()?;
            // The operation has ended, because the stream runs its work in order. In a graph, the
            // first failure ends the replay.
            follows.as_ref().and_then(Work::result).unwrap_or(Ok(()))?;
            command.execute()
        });
        let ticket = self.enqueue_step(
            recording,
            &step.accesses,
            self.stream().host_command(checked),
        )?;
        Ok(Some(Work::new(self.stream().clone(), ticket)))
    }

    fn enqueue_step(
        &self,
        recording: Recording,
        accesses: &AccessList<'_>,
        command: Command,
    ) -> Result<Ticket> {
        if recording.is_some() {
            self.stream().note_accesses(recording, accesses)?;
            return self.stream().enqueue_in(recording, command);
        }
        let uses = self.uses(accesses, COPY);
        self.stream()
            .enqueue_ordered(recording, uses, |push| push(command))
    }

    pub(in crate::comm) fn list_all_gather<'a>(
        &self,
        outputs: &[&'a Tensor],
        input: &'a Tensor,
    ) -> Result<ListCollective<'a>> {
        rows_of("all_gather", "output", outputs, input.len())?;
        self.list_gathered("all_gather", outputs, input)
    }

    pub(in crate::comm) fn list_all_gather_v<'a>(
        &self,
        outputs: &[&'a Tensor],
        input: &'a Tensor,
    ) -> Result<ListCollective<'a>> {
        self.list_gathered("all_gather_v", outputs, input)
    }

    fn list_gathered<'a>(
        &self,
        name: &'static str,
        outputs: &[&'a Tensor],
        input: &'a Tensor,
    ) -> Result<ListCollective<'a>> {
        let dtype = input.dtype();
        let rows = Rows::new(self, name, "outputs", outputs, dtype)?;
        let after = rows.unpack();
        if outputs.iter().all(|row| row.len() == input.len()) {
            let count = input.len();
            let part = Part::new(Op::AllGather { count, dtype }, &rows.whole, input);
            return Ok(ListCollective {
                after,
                ..ListCollective::new(name, outputs, from_ref(&input), part)
            });
        }
        let counts = lengths(outputs);
        let op = Op::AllGatherV {
            count: rows.whole.len(),
            dtype,
            digest: Op::digest(&counts),
        };
        let part = Part::new(op, &rows.whole, input);
        Ok(ListCollective {
            splits: (counts, Vec::new()),
            after,
            ..ListCollective::new(name, outputs, from_ref(&input), part)
        })
    }

    pub(in crate::comm) fn list_reduce_scatter<'a>(
        &self,
        output: &'a Tensor,
        inputs: &[&'a Tensor],
        reduce: ReduceOp,
    ) -> Result<ListCollective<'a>> {
        let (name, dtype) = ("reduce_scatter", output.dtype());
        rows_of(name, "input", inputs, output.len())?;
        let rows = Rows::new(self, name, "inputs", inputs, dtype)?;
        let op = Op::ReduceScatter {
            count: output.len(),
            dtype,
            reduction: reduce.code(),
        };
        let part = Part {
            reduce,
            ..Part::new(op, output, &rows.whole)
        };
        Ok(ListCollective {
            before: rows.pack(),
            ..ListCollective::new(name, from_ref(&output), inputs, part)
        })
    }

    pub(in crate::comm) fn list_reduce_scatter_v<'a>(
        &self,
        output: &'a Tensor,
        inputs: &[&'a Tensor],
        reduce: ReduceOp,
    ) -> Result<ListCollective<'a>> {
        let (name, dtype) = ("reduce_scatter_v", output.dtype());
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
            return Ok(ListCollective {
                name,
                ..self.list_reduce_scatter(output, inputs, reduce)?
            });
        }
        if inputs.iter().any(|input| input.dtype() != dtype) {
            return Err(invalid(name, "types differ".to_owned()));
        }
        // A reduction to each rank in turn moves no more bytes than the inputs have.
        let parts = (0..).zip(inputs).map(|(root, input)| {
            let op = Op::Reduce {
                count: input.len(),
                dtype,
                reduction: reduce.code(),
                root,
            };
            let target = if root == self.rank() { output } else { input };
            Part {
                reduce,
                ..Part::new(op, target, input)
            }
        });
        let op = Op::ReduceScatter {
            count: output.len(),
            dtype,
            reduction: reduce.code(),
        };
        Ok(ListCollective {
            name,
            op,
            outputs: vec![output],
            inputs: inputs.to_vec(),
            before: None,
            parts: parts.collect(),
            splits: Default::default(),
            after: None,
        })
    }

    pub(in crate::comm) fn list_all_to_all<'a>(
        &self,
        outputs: &[&'a Tensor],
        inputs: &[&'a Tensor],
    ) -> Result<ListCollective<'a>> {
        let name = "all_to_all";
        let Some(dtype) = inputs.first().map(|input| input.dtype()) else {
            return Err(invalid(name, "0 inputs".to_owned()));
        };
        let sources = Rows::new(self, name, "inputs", inputs, dtype)?;
        let targets = Rows::new(self, name, "outputs", outputs, dtype)?;
        let part = Part::new(Op::AllToAllV { dtype }, &targets.whole, &sources.whole);
        Ok(ListCollective {
            before: sources.pack(),
            splits: (lengths(outputs), lengths(inputs)),
            after: targets.unpack(),
            ..ListCollective::new(name, outputs, inputs, part)
        })
    }

    pub(in crate::comm) fn list_scatter<'a>(
        &self,
        output: &'a Tensor,
        inputs: &[&'a Tensor],
        root: u32,
    ) -> Result<ListCollective<'a>> {
        let (name, count, dtype) = ("scatter", output.len(), output.dtype());
        let op = Op::Scatter { count, dtype, root };
        if root != self.rank() {
            let part = Part {
                op,
                reduce: ReduceOp::Sum,
                output: Some(output.clone()),
                input: None,
            };
            return Ok(ListCollective::new(name, from_ref(&output), &[], part));
        }
        rows_of(name, "input", inputs, count)?;
        let rows = Rows::new(self, name, "inputs", inputs, dtype)?;
        let part = Part::new(op, output, &rows.whole);
        Ok(ListCollective {
            before: rows.pack(),
            ..ListCollective::new(name, from_ref(&output), inputs, part)
        })
    }

    pub(in crate::comm) fn list_gather<'a>(
        &self,
        outputs: &[&'a Tensor],
        input: &'a Tensor,
        root: u32,
    ) -> Result<ListCollective<'a>> {
        let (name, count, dtype) = ("gather", input.len(), input.dtype());
        let op = Op::Gather { count, dtype, root };
        if root != self.rank() {
            let part = Part {
                op,
                reduce: ReduceOp::Sum,
                output: None,
                input: Some(input.clone()),
            };
            return Ok(ListCollective::new(name, &[], from_ref(&input), part));
        }
        rows_of(name, "output", outputs, count)?;
        let rows = Rows::new(self, name, "outputs", outputs, dtype)?;
        let part = Part::new(op, &rows.whole, input);
        Ok(ListCollective {
            after: rows.unpack(),
            ..ListCollective::new(name, outputs, from_ref(&input), part)
        })
    }
}

/// Returns the length of each tensor.
fn lengths(list: &[&Tensor]) -> Vec<u64> {
    list.iter().map(|tensor| tensor.len() as u64).collect()
}
