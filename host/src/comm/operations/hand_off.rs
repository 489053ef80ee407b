//! Collectives that a backend executes.

use std::sync::Arc;

use fusewire_device::DType;
use fusewire_device::element::scalar_at;

use crate::Result;
use crate::backend::{Backend, CallArgs, backend_error};
use crate::collective::{Collective, Counts, Op, Operands};
use crate::comm::Communicator;
use crate::comm::observe::OpInfo;
use crate::comm::submit::{PreparedOp, invalid};
use crate::cpu::HostFn;
use crate::options::ReduceOp;
use crate::tensor::{Input, Output, Tensor};

/// A collective that a closure on a stream's thread passes to the backend, once or (in a graph)
/// several times.
pub(super) struct BackendCall {
    backend: Arc<dyn Backend>,
    args: CallArgs,
    op: Op,
    reduce: ReduceOp,
    /// Factor of a scaled sum in device memory, read at each call.
    factor: Option<Tensor>,
    input: Buffer,
    output: Buffer,
    /// Row lengths of the output and of the input.
    counts: [RowCounts; 2],
}

/// Address and number of elements of a buffer.
#[derive(Clone, Copy)]
struct Buffer {
    at: usize,
    len: usize,
}

/// Row lengths, read at each call.
enum RowCounts {
    Copied(Vec<u64>),
    /// A tensor in CPU memory.
    InTensor(Tensor),
}

impl RowCounts {
    fn new(operation: &'static str, counts: Counts<'_>) -> Result<Self> {
        match counts {
            Counts::None => Ok(Self::Copied(Vec::new())),
            Counts::Host(counts) => Ok(Self::Copied(counts.to_vec())),
            Counts::Device(tensor) if tensor.device().is_gpu() => Err(invalid(
                operation,
                "the library takes counts from the host: pass slices of counts".to_owned(),
            )),
            Counts::Device(tensor) => Ok(Self::InTensor(tensor.clone())),
        }
    }

    fn read(&self) -> Vec<u64> {
        match self {
            Self::Copied(counts) => counts.clone(),
            Self::InTensor(tensor) => {
                let at = tensor.as_ptr().cast::<u64>();
                (0..tensor.len())
                    // SAFETY: `Communicator::readable_counts` has checked that the tensor has
                    // aligned elements of u64 in CPU memory.
                    .map(|index| unsafe { at.add(index).read_volatile() })
                    .collect()
            }
        }
    }
}

impl BackendCall {
    fn run(&self) -> Result<()> {
        let [outputs, inputs] = self.counts.each_ref().map(RowCounts::read);
        self.check_counts(&outputs, &inputs)?;
        let dtype = self.op.dtype().unwrap_or(DType::U8);
        let (from, to) = (self.input.at as *const u8, self.output.at as *mut u8);
        // SAFETY: `Communicator::check_operands` has checked the buffers against the operation, and
        // the launch keeps them alive (`PreparedOp`).
        let operands = unsafe {
            Operands::new(
                Output::from_raw(to, self.output.len, dtype),
                Input::from_raw(from, self.input.len, dtype),
            )
        };
        let mut operands = operands
            .with_reduction(self.reduction()?)
            .with_splits(&outputs, &inputs);
        if self.backend.reads_factor() {
            operands.factor = self.factor.as_ref();
        }
        if matches!(self.op, Op::AllToAll { .. }) && self.input.at == self.output.at {
            self.all_to_all_in_place(operands)?;
        } else {
            // SAFETY: see `operands` above. The only overlap that `check_operands` allows and the
            // trait forbids is that of an in-place all_to_all, which the other branch handles.
            unsafe { self.backend.execute(&self.op, &operands, &self.args)? };
        }
        self.backend.async_error()
    }

    /// Returns the reduction, with the factor in memory, if there is one and the backend does not
    /// read it.
    fn reduction(&self) -> Result<ReduceOp> {
        let factor = match &self.factor {
            Some(factor) if !self.backend.reads_factor() => factor,
            _ => return Ok(self.reduce),
        };
        let dtype = factor.dtype();
        // SAFETY: `check_operands` has compared the tensor's type and its one element, which is in
        // CPU memory (`check_supported`). The launch orders accesses to the tensor.
        let word = unsafe { scalar_at(dtype, factor.as_ptr()) };
        let value = match dtype {
            DType::U64 => word as f64,
            _ if dtype.is_integer() => word as i64 as f64,
            _ => f64::from_bits(word),
        };
        let reduce = ReduceOp::PreMulSum(value);
        if dtype.is_integer() && reduce.scalar(dtype) != word {
            return Err(backend_error(
                self.backend.name(),
                self.op.name(),
                format!("takes the factor as an f64, which {value} does not fit"),
            ));
        }
        Ok(reduce)
    }

    /// Fails if the lengths exceed the buffers; a tensor of lengths may have changed since the call
    /// was checked.
    fn check_counts(&self, output: &[u64], input: &[u64]) -> Result<()> {
        let (sends, holds) = (self.input.len as u64, self.output.len as u64);
        let total = |counts: &[u64]| {
            let add = |sum: u64, count: &u64| sum.checked_add(*count);
            counts.iter().try_fold(0, add).unwrap_or(u64::MAX)
        };
        let fits = match self.op {
            Op::AllGatherV { .. } => {
                total(output) <= holds && output[self.backend.rank() as usize] == sends
            }
            Op::AllToAllV { .. } => total(output) <= holds && total(input) <= sends,
            _ => true,
        };
        if fits {
            return Ok(());
        }
        Err(backend_error(
            self.backend.name(),
            self.op.name(),
            "the counts add up to more elements than the buffers hold",
        ))
    }

    /// Runs an in-place all_to_all, which backends do not support, through a copy of the input.
    fn all_to_all_in_place(&self, operands: Operands<'_>) -> Result<()> {
        let dtype = operands.input.dtype;
        let bytes = operands.input.count * dtype.size();
        // SAFETY: the input is readable, because the launch keeps it alive.
        let bytes = unsafe { core::slice::from_raw_parts(operands.input.ptr, bytes) };
        let mut copy = vec![0u64; bytes.len().div_ceil(8)];
        bytemuck::cast_slice_mut(&mut copy)[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: `copy` holds the input, is aligned for every type, and outlives the call, which
        // blocks on the CPU.
        let input = unsafe { Input::from_raw(copy.as_ptr().cast(), self.input.len, dtype) };
        let operands = Operands { input, ..operands };
        // SAFETY: as in `run`; the buffers do not overlap now.
        unsafe { self.backend.execute(&self.op, &operands, &self.args) }
    }
}

impl Communicator {
    /// Binds a collective to a call of the backend.
    pub(super) fn bind_backend<'a>(
        &self,
        backend: &Arc<dyn Backend>,
        collective: &Collective<'a>,
        info: OpInfo,
    ) -> Result<PreparedOp<'a>> {
        let Collective { op, operands } = collective;
        let [outputs, inputs] = operands.counts;
        let counts = [
            RowCounts::new(op.name(), outputs)?,
            RowCounts::new(op.name(), inputs)?,
        ];
        let call = BackendCall {
            backend: Arc::clone(backend),
            args: self.call_args(),
            op: *op,
            reduce: operands.reduce,
            factor: operands.factor.cloned(),
            input: Buffer {
                at: operands.input.ptr as usize,
                len: operands.input.count,
            },
            output: Buffer {
                at: operands.output.ptr as usize,
                len: operands.output.count,
            },
            counts,
        };
        let run: HostFn = Arc::new(move || call.run());
        let borrowed = operands.is_borrowed();
        let prepared = PreparedOp::hand_off(run, operands.tensors(), borrowed, info);
        Ok(match inputs.tensor() {
            Some(inputs) => prepared.also_reading(inputs),
            None => prepared,
        })
    }

    /// Fails if the backend cannot execute a checked collective.
    pub(in crate::comm) fn check_supported(
        &self,
        backend: &dyn Backend,
        collective: &Collective<'_>,
    ) -> Result<()> {
        let Collective { op, operands } = collective;
        let all_to_all = matches!(op, Op::AllToAll { .. });
        if all_to_all && operands.is_in_place() && self.device().is_gpu() && op.count() > 0 {
            return Err(invalid(
                op.name(),
                "a library cannot run it in place on a GPU: use an output of its own".to_owned(),
            ));
        }
        if operands.factor.is_some() && self.device().is_gpu() && !backend.reads_factor() {
            return Err(invalid(
                op.name(),
                format!(
                    "backend {} takes the factor from the host: pass it in the reduction",
                    backend.name()
                ),
            ));
        }
        if backend.supports(op) {
            return Ok(());
        }
        let (dtype, code) = (op.dtype(), op.reduction());
        let dtype = dtype.map_or(String::new(), |dtype| format!(" of {}", dtype.name()));
        let reduction = code.map_or(String::new(), |code| format!(" with {}", code.name()));
        Err(backend_error(
            backend.name(),
            op.name(),
            format!(
                "the library ({}) has no {}{dtype}{reduction}",
                backend.version(),
                op.name(),
            ),
        ))
    }

    /// Returns the arguments of every call of the backend.
    pub(in crate::comm) fn call_args(&self) -> CallArgs {
        CallArgs {
            stream: self.stream.as_raw() as u64,
            ..CallArgs::new(self.timeout())
        }
    }
}
