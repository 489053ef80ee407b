//! Calls around which hooks are called.

use fusewire_device::DType;
use fusewire_device::call::{Call, Operation};
use fusewire_device::element::ReductionCode;

use super::{HookArguments, HookBuffer, OpInfo};
use crate::algorithm::Algorithm;
use crate::collective::{Collective, Op};
use crate::comm::Communicator;
use crate::comm::p2p::{P2pKind, P2pOp};
use crate::tensor::{Input, Tensor, TensorUse};
use crate::{Result, Work};

/// A call as its hooks see it.
pub(crate) struct HookedCall<'a> {
    pub(crate) name: &'static str,
    pub(crate) op_info: OpInfo,
    /// Number in the flight recorder.
    pub(crate) record_id: Option<u64>,
    pub(crate) is_captured: bool,
    pub(crate) buffers: Buffers<'a>,
}

/// Buffers of a call.
#[derive(Default)]
pub(crate) struct Buffers<'a> {
    inputs: Vec<HookBuffer<'a>>,
    outputs: Vec<HookBuffer<'a>>,
    ops: &'a [P2pOp],
}

/// Arguments of an operation, from which [`Buffers`] are made only if there are hooks.
#[derive(Clone, Copy)]
pub(crate) enum Arguments<'a> {
    /// The tensors of the prepared operation.
    Tensors,
    Collective(&'a Collective<'a>),
    Batch(&'a [P2pOp]),
    Fused(&'a dyn FusedBuffers),
}

/// Buffers of an operation with a builder of its own.
pub(crate) trait FusedBuffers {
    /// Returns the inputs and the outputs.
    fn buffers(&self) -> [Vec<Input<'_>>; 2];
}

impl<'a> Buffers<'a> {
    pub(crate) fn of_tensors(
        inputs: impl IntoIterator<Item = &'a Tensor>,
        outputs: impl IntoIterator<Item = &'a Tensor>,
    ) -> Self {
        let buffer = |tensor: &'a Tensor| HookBuffer::new(tensor.into(), tensor.device());
        Self {
            inputs: inputs.into_iter().map(buffer).collect(),
            outputs: outputs.into_iter().map(buffer).collect(),
            ops: &[],
        }
    }

    fn of_memory(comm: &Communicator, [inputs, outputs]: [Vec<Input<'a>>; 2]) -> Self {
        let list = |list: Vec<Input<'a>>| {
            let buffers = list.into_iter();
            buffers
                .map(|memory| HookBuffer::new(memory, comm.device()))
                .collect()
        };
        Self {
            inputs: list(inputs),
            outputs: list(outputs),
            ops: &[],
        }
    }

    /// Returns the buffers of an operation. `tensors` are those of the prepared operation.
    pub(crate) fn of_operation(
        comm: &Communicator,
        arguments: Arguments<'a>,
        tensors: impl Iterator<Item = TensorUse<'a>>,
    ) -> Self {
        match arguments {
            Arguments::Tensors => {
                let [mut inputs, mut outputs] = [const { Vec::new() }; 2];
                for used in tensors {
                    match used {
                        TensorUse::Read(tensor) => inputs.push(tensor),
                        TensorUse::Write(tensor) => outputs.push(tensor),
                        TensorUse::Unordered(_) => {}
                    }
                }
                Self::of_tensors(inputs, outputs)
            }
            Arguments::Collective(Collective { op, operands }) => {
                // The root of a broadcast only reads its buffer, and other ranks only write theirs.
                let (reads, writes) = match *op {
                    Op::Broadcast { root, .. } => (root == comm.rank(), root != comm.rank()),
                    _ => (true, true),
                };
                let list = |is_used: bool, buffer: Input<'a>| {
                    let is_used = is_used && !buffer.as_ptr().is_null();
                    is_used.then_some(buffer).into_iter().collect()
                };
                let inputs = list(reads, operands.input);
                let outputs = list(writes, operands.output.as_input());
                Self::of_memory(comm, [inputs, outputs])
            }
            Arguments::Fused(fused) => Self::of_memory(comm, fused.buffers()),
            Arguments::Batch(ops) => {
                let of = |kind| {
                    let ops = ops.iter().filter(move |op| op.kind == kind);
                    ops.map(|op| &op.tensor)
                };
                Self {
                    ops,
                    ..Self::of_tensors(of(P2pKind::Send), of(P2pKind::Recv))
                }
            }
        }
    }
}

/// Results of calls, as post-hooks see them.
pub(crate) trait HookResult {
    const IS_ASYNC: bool = false;

    fn work(&self) -> Option<&Work> {
        None
    }

    fn new_comm(&self) -> Option<&Communicator> {
        None
    }
}

impl HookResult for () {}

impl HookResult for Work {
    const IS_ASYNC: bool = true;

    fn work(&self) -> Option<&Work> {
        Some(self)
    }
}

impl HookResult for Communicator {
    fn new_comm(&self) -> Option<&Communicator> {
        Some(self)
    }
}

impl HookResult for Option<Communicator> {
    fn new_comm(&self) -> Option<&Communicator> {
        self.as_ref()
    }
}

/// Returns the name of the function that runs an operation on buffers that are no lists.
pub(crate) const fn function_name(operation: Operation) -> &'static str {
    match operation {
        Operation::AllGather => "all_gather_single",
        Operation::AllGatherV => "all_gather_v_single",
        Operation::ReduceScatter => "reduce_scatter_single",
        Operation::Scatter => "scatter_single",
        Operation::Gather => "gather_single",
        Operation::AllToAll => "all_to_all_single",
        Operation::AllToAllV => "all_to_all_v_single",
        Operation::Batch => "batch_op_issue",
        _ => operation.name(),
    }
}

impl Communicator {
    /// Returns true if hooks may have to be called for a call that is made now.
    #[inline]
    pub(in crate::comm) fn is_hooked(&self) -> bool {
        self.inner.observer.hooks.has_call_hooks() && !self.is_inside_call
    }

    /// Runs `body`, and calls hooks around it if there are any. The communicator that `body` gets
    /// calls no hooks.
    pub(in crate::comm) fn hooked<'a, R: HookResult>(
        &self,
        name: &'static str,
        op: Option<Op>,
        buffers: impl FnOnce() -> Buffers<'a>,
        body: impl FnOnce(&Self) -> Result<R>,
    ) -> Result<R> {
        if !self.is_hooked() {
            return body(self);
        }
        let no_operation = Call::new(Operation::None, 0, 0, self.algorithm as u8, 0xffff, 0);
        let buffers = buffers();
        let count = |list: &[HookBuffer<'_>]| list.iter().map(|buffer| buffer.len() as u64).sum();
        let op_info = OpInfo {
            call: op
                .map_or(no_operation, |op| op.call(self.algorithm, self.tag))
                .0,
            input_count: count(&buffers.inputs),
            output_count: count(&buffers.outputs),
        };
        let call = HookedCall {
            name,
            op_info,
            record_id: None,
            is_captured: self.stream.is_capturing(),
            buffers,
        };
        let inside = Self {
            is_inside_call: true,
            ..self.clone()
        };
        self.call_hooks(&call, || body(&inside))
    }

    /// Runs `body` and calls hooks around it.
    pub(in crate::comm) fn call_hooks<R: HookResult>(
        &self,
        call: &HookedCall<'_>,
        body: impl FnOnce() -> Result<R>,
    ) -> Result<R> {
        let hooks = self.inner.observer.hooks.current();
        let word = call.op_info.call();
        // Other operations use the bits of type, reduction or root for something else.
        let (operation, is_batch) = (word.operation(), word.operation() == Operation::Batch);
        let is_typed = !matches!(operation, Operation::Barrier | Operation::None) && !is_batch;
        let is_user = operation == Operation::User;
        let arguments = HookArguments {
            comm: self,
            name: call.name,
            operation,
            id: hooks.id,
            record_id: call.record_id,
            dtype: DType::from_code(word.dtype()).filter(|_| is_typed && !is_user),
            reduction: ReductionCode::ALL
                .into_iter()
                .find(|code| *code as u8 == word.reduction() && !is_user),
            peer: (word.root() != 0xffff && !is_batch).then(|| word.root()),
            input_count: call.op_info.input_count,
            output_count: call.op_info.output_count,
            inputs: &call.buffers.inputs,
            outputs: &call.buffers.outputs,
            ops: call.buffers.ops,
            timeout: self.inner.group.timeout(self.timeout_ns),
            algorithm: Algorithm::from_code(word.algorithm())
                .filter(|_| !is_user)
                .unwrap_or(self.algorithm),
            is_async: R::IS_ASYNC,
            is_captured: call.is_captured,
            work: None,
            new_comm: None,
            error: None,
        };
        let result = hooks.before(&arguments).and_then(|()| body());
        if let (Err(_), Some(id)) = (&result, call.record_id) {
            self.inner.observer.recorder.refuse(id);
        }
        let after = hooks.after(&HookArguments {
            work: result.as_ref().ok().and_then(R::work),
            new_comm: result.as_ref().ok().and_then(R::new_comm),
            error: result.as_ref().err(),
            ..arguments
        });
        if let Err(error) = after {
            // The call has had its effect.
            tracing::error!("{error}");
        }
        result
    }
}
