//! Operations with a length for each rank, bound to their kernels.

use super::NO_ROOT;
use super::checks::{apart, at_most, length, same_type, within};
use std::sync::Arc;

use crate::Result;
use crate::comm::Communicator;
use crate::comm::handoff::{Address, Counts, hand_off};
use crate::comm::observe::OpInfo;
use crate::comm::submit::PreparedOp;
use crate::gpu::{Scratch, Upload};
use crate::tensor::{Input, Output, Tensor};
use fusewire_device::args::RawBuffer;
use fusewire_device::session::Operation;
use fusewire_kernels::vector::{ALL_GATHER_V, ALL_TO_ALL_V, AllGatherVParams, AllToAllVParams};

impl Communicator {
    pub(in crate::comm) fn prepare_all_gather_v<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        counts: Option<&[u64]>,
        counts_tensor: Option<&'a Tensor>,
    ) -> Result<PreparedOp<'a>> {
        let name = "all_gather_v";
        same_type(name, output, input)?;
        let mut total = output.count;
        if let Some(counts) = counts {
            total = self.total(name, "counts", counts)?;
            length(name, "output", output.count, total)?;
            let rank = self.rank() as usize;
            length(name, "input", input.count, counts[rank] as usize)?;
            let before: u64 = counts[..rank].iter().sum();
            within(name, output, input, before as usize)?;
        } else if let Some(tensor) = counts_tensor {
            length(name, "counts", tensor.len(), self.size() as usize)?;
        }
        let size = input.dtype.size();
        let plan = self.plan_rows(Operation::AllGatherV, total, input.dtype, 1, None);
        let agreed = counts
            .unwrap_or_default()
            .iter()
            .fold(total as u64, |hash, count| {
                (hash ^ count)
                    .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                    .rotate_left(23)
            });
        let call = self.call(&plan, Some(input.dtype), None, NO_ROOT, agreed);
        let op_info = OpInfo {
            call,
            input_count: input.count as u64,
            output_count: output.count as u64,
        };
        let tensors = [output.tensor, input.tensor, counts_tensor];
        let borrowed = tensors.iter().any(Option::is_none);
        if let Some(backend) = self.backend_for(&plan, input.dtype)? {
            let (from, to) = (Address::of(input), Address::of_output(output));
            let counts = Counts::new(name, counts, counts_tensor.is_some())?;
            let (sends, holds) = (input.count as u64, output.count as u64);
            let run = hand_off(
                backend,
                self.call_args(input.dtype),
                move |backend, args| {
                    let counts = counts.read();
                    let own = counts[backend.rank() as usize];
                    if own != sends || counts.iter().sum::<u64>() > holds {
                        return Err(Counts::changed(backend.name(), name));
                    }
                    // SAFETY: the arguments were checked; the memory is kept alive (`PreparedOp`).
                    unsafe { backend.all_gather_v(from.get(), to.get(), &counts, args) }
                },
            );
            return Ok(PreparedOp::hand_off(run, tensors, borrowed, op_info));
        }
        let words = self.device_words(counts.unwrap_or_default(), counts_tensor)?;
        let params = AllGatherVParams {
            header: self.header(call, 0),
            source: input.raw_bytes(),
            target: output.as_input().raw_bytes(),
            counts: self.one_each(words.at),
            exchange: self.exchange_of(&plan, (input, false), None, output.count * size),
        };
        let prepared = PreparedOp::new(self, &ALL_GATHER_V, params, tensors, borrowed, op_info);
        Ok(words.kept_by(prepared))
    }

    pub(in crate::comm) fn prepare_all_to_all_v<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        splits: Option<(&[u64], &[u64])>,
        splits_tensor: Option<&'a Tensor>,
    ) -> Result<PreparedOp<'a>> {
        let name = "all_to_all_v";
        same_type(name, output, input)?;
        if let Some((output_splits, input_splits)) = splits {
            let sent = self.total(name, "input splits", input_splits)?;
            let received = self.total(name, "output splits", output_splits)?;
            at_most(name, "input", sent, input.count)?;
            at_most(name, "output", received, output.count)?;
        }
        apart(name, output, input, None)?;
        let size = input.dtype.size();
        let rows = u64::from(self.size());
        let plan = self.plan_rows(Operation::AllToAllV, 0, input.dtype, rows, None);
        let call = self.call(&plan, Some(input.dtype), None, NO_ROOT, 0);
        let op_info = OpInfo {
            call,
            input_count: input.count as u64,
            output_count: output.count as u64,
        };
        let tensors = [output.tensor, input.tensor, splits_tensor];
        let borrowed = tensors.iter().any(Option::is_none);
        if let Some(backend) = self.backend_for(&plan, input.dtype)? {
            let (from, to) = (Address::of(input), Address::of_output(output));
            let (outputs, inputs) = splits.unzip();
            let sends = Counts::new(name, inputs, splits_tensor.is_some())?;
            let receives = Counts::new(name, outputs, splits_tensor.is_some())?;
            let (has, holds) = (input.count as u64, output.count as u64);
            let run = hand_off(
                backend,
                self.call_args(input.dtype),
                move |backend, args| {
                    let (sends, receives) = (sends.read(), receives.read());
                    if sends.iter().sum::<u64>() > has || receives.iter().sum::<u64>() > holds {
                        return Err(Counts::changed(backend.name(), name));
                    }
                    // SAFETY: as for all_gather_v.
                    unsafe { backend.all_to_all_v(from.get(), &sends, to.get(), &receives, args) }
                },
            );
            return Ok(PreparedOp::hand_off(run, tensors, borrowed, op_info));
        }
        let (outputs, inputs) = splits.unwrap_or_default();
        let words = match splits_tensor {
            Some(tensor) => self.device_words(&[], Some(tensor))?,
            None if self.inner.on_gpu.is_some() => {
                self.device_words(&[outputs, inputs].concat(), None)?
            }
            None => DeviceWords::here(outputs),
        };
        let receive_counts = words.at;
        let send_counts = if splits_tensor.is_some() || self.inner.on_gpu.is_some() {
            words.at.wrapping_add(self.size() as usize)
        } else {
            inputs.as_ptr()
        };
        let params = AllToAllVParams {
            header: self.header(call, 0),
            source: input.raw_bytes(),
            target: output.as_input().raw_bytes(),
            send_counts: self.one_each(send_counts),
            receive_counts: self.one_each(receive_counts),
            exchange: self.exchange_of(&plan, (input, false), None, output.count * size),
        };
        let prepared = PreparedOp::new(self, &ALL_TO_ALL_V, params, tensors, borrowed, op_info);
        Ok(words.kept_by(prepared))
    }

    /// Returns a count for each rank as parameters of a kernel.
    fn one_each(&self, at: *const u64) -> RawBuffer {
        RawBuffer {
            at: at.cast_mut().cast(),
            len: u64::from(self.size()),
        }
    }

    /// Words where kernels of the communicator's device read them: those of `tensor`, else a copy
    /// of `words` where the device does not reach the host's memory.
    fn device_words(&self, words: &[u64], tensor: Option<&Tensor>) -> Result<DeviceWords> {
        if let Some(tensor) = tensor {
            return Ok(DeviceWords {
                at: tensor.as_ptr().cast_const().cast(),
                copy: None,
            });
        }
        let Some(on_gpu) = &self.inner.on_gpu else {
            return Ok(DeviceWords::here(words));
        };
        let bytes = bytemuck::cast_slice(words);
        let (copy, upload) = self.table_on_gpu(on_gpu.gpu(), bytes)?;
        Ok(DeviceWords {
            at: copy.address() as *const u64,
            copy: Some((copy, upload)),
        })
    }
}

/// Words that a kernel reads.
struct DeviceWords {
    at: *const u64,
    copy: Option<(Scratch, Option<Upload>)>,
}

impl DeviceWords {
    /// Words that the device reads where they are.
    fn here(words: &[u64]) -> Self {
        Self {
            at: words.as_ptr(),
            copy: None,
        }
    }

    /// Has a copy live as long as the launch.
    fn kept_by(self, prepared: PreparedOp<'_>) -> PreparedOp<'_> {
        match self.copy {
            Some((copy, upload)) => prepared.keeping(Arc::new(copy)).uploading(upload),
            None => prepared,
        }
    }
}
