//! Reduce_scatter that transfers bf16.

use std::sync::Arc;

use fusewire_device::DType;
use fusewire_device::call::{Call, Operation};
use fusewire_kernels::quantize::{QUANTIZE, QuantizeParams, SUM_ROWS, SumRowsParams};

use super::observe::{Buffers, OpInfo};
use super::submit::{PreparedOp, invalid};
use super::{Communicator, Work};
use crate::Result;
use crate::collective::Collective;
use crate::options::ReduceOp;
use crate::tensor::{Tensor, TensorUse};
use crate::usage::AccessList;

impl Communicator {
    /// Reduces row r of every rank's `input` to rank r's `output`, both f32, and transfers bf16.
    /// Every input is rounded to bf16 stochastically: up with a probability equal to the fraction
    /// that is cut off, so that the expected sum is exact. The rounded values are summed in f32 in
    /// rank order. `seed` should differ from call to call, and ranks may pass different seeds. The
    /// random numbers of a rank depend only on its seed, its rank and the index, so results are
    /// reproducible.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for types other than f32, reductions other than sum and
    /// average, or lengths that do not match; the communicator's first failure.
    pub fn reduce_scatter_quantized(
        &self,
        output: &Tensor,
        input: &Tensor,
        op: ReduceOp,
        seed: u64,
    ) -> Result<()> {
        let steps = self.quantized_steps(output, input, op, seed)?;
        let buffers = || Buffers::of_tensors([input], [output]);
        self.hooked("reduce_scatter_quantized", None, buffers, |comm| {
            steps.iter().try_for_each(|prepared| comm.run(prepared))
        })
    }

    /// Enqueues [`Communicator::reduce_scatter_quantized`]. A graph replays it with the same seed.
    ///
    /// # Errors
    /// The errors of [`Communicator::reduce_scatter_quantized`]. The [`Work`] reports a failure
    /// while it runs.
    pub fn reduce_scatter_quantized_async(
        &self,
        output: &Tensor,
        input: &Tensor,
        op: ReduceOp,
        seed: u64,
    ) -> Result<Work> {
        let [first, second, third] = self.quantized_steps(output, input, op, seed)?;
        let buffers = || Buffers::of_tensors([input], [output]);
        self.hooked("reduce_scatter_quantized", None, buffers, |comm| {
            // The results are combined on the host, because a host function on a GPU stream must
            // not call the driver.
            let first = comm.submit(&first)?;
            let second = comm.submit(&second)?.behind(first);
            Ok(comm.submit(&third)?.behind(second))
        })
    }

    fn quantized_steps(
        &self,
        output: &Tensor,
        input: &Tensor,
        op: ReduceOp,
        seed: u64,
    ) -> Result<[PreparedOp<'static>; 3]> {
        let name = "reduce_scatter_quantized";
        if input.dtype() != DType::F32 || output.dtype() != DType::F32 {
            return Err(invalid(
                name,
                format!(
                    "input of {}, output of {}; both are f32",
                    input.dtype().name(),
                    output.dtype().name()
                ),
            ));
        }
        let divisor = match op {
            ReduceOp::Sum => 1.0,
            ReduceOp::Average => self.size() as f32,
            other => {
                return Err(invalid(
                    name,
                    format!("{}; sum and average are possible", other.code().name()),
                ));
            }
        };
        let needed = output.len().checked_mul(self.size() as usize);
        if needed != Some(input.len()) {
            return Err(invalid(
                name,
                format!(
                    "input has {} elements; {} rows of {} are needed",
                    input.len(),
                    self.size(),
                    output.len()
                ),
            ));
        }
        if input.len() > u32::MAX as usize {
            return Err(invalid(
                name,
                format!("{} elements; {} at most", input.len(), u32::MAX),
            ));
        }
        let sent = self.tensor(DType::Bf16, input.len())?;
        let received = self.tensor(DType::Bf16, input.len())?;
        // Each pair of rank and seed has its own stream of random numbers.
        let mixed = (seed ^ u64::from(self.rank()) << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let keep = |tensors: [&Tensor; 2]| Arc::new(tensors.map(Tensor::clone));
        let local = OpInfo {
            call: Call::new(Operation::User, 0, 0, 0, 0xffff, 0).0,
            input_count: input.len() as u64,
            output_count: output.len() as u64,
        };
        let quantize = PreparedOp::new(
            self,
            &QUANTIZE,
            QuantizeParams {
                source: input.as_ptr().cast(),
                target: sent.as_ptr().cast(),
                count: input.len() as u64,
                seed: (mixed >> 32) as u32,
            },
            [None; 3],
            false,
            local,
        )
        .keeping(keep([input, &sent]))
        .accessing(&accesses(&sent, input));
        let exchange = self
            .prepare(Collective::all_to_all(&received, &sent, self.size()))?
            .detached()
            .owning(keep([&sent, &received]));
        let sum = PreparedOp::new(
            self,
            &SUM_ROWS,
            SumRowsParams {
                source: received.as_ptr().cast(),
                target: output.as_ptr().cast(),
                rows: self.size(),
                count: output.len() as u64,
                divisor,
            },
            [None; 3],
            false,
            local,
        )
        .keeping(keep([output, &received]))
        .accessing(&accesses(output, &received));
        Ok([quantize, exchange, sum])
    }
}

fn accesses<'a>(output: &'a Tensor, input: &'a Tensor) -> AccessList<'a> {
    TensorUse::accesses([TensorUse::Write(output), TensorUse::Read(input)])
}
