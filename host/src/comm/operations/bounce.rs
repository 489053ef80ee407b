//! Bounce buffers: device memory to which blocking calls on a GPU copy slices, and from which they
//! copy the results back.

use super::Lifetime;
use crate::Result;
use crate::collective::{Collective, Op, Operands};
use crate::comm::Communicator;
use crate::comm::observe::{Arguments, function_name};
use crate::comm::submit::{capture_of_borrowed, invalid};
use crate::tensor::{Input, Output, Tensor};

/// Device memory that an operation uses in place of a slice.
#[derive(Debug)]
struct BounceBuffer {
    tensor: Tensor,
    slice: *mut u8,
}

impl BounceBuffer {
    /// Returns the bounce buffer as the operation's output, or `own` if there is none.
    fn output<'a>(bounce: &'a Option<Self>, own: Output<'a>) -> Output<'a> {
        bounce
            .as_ref()
            .map_or(own, |bounce| Output::from(&bounce.tensor))
    }

    /// Returns the bounce buffer as the operation's input, or `own` if there is none.
    fn input<'a>(bounce: &'a Option<Self>, own: Input<'a>) -> Input<'a> {
        bounce
            .as_ref()
            .map_or(own, |bounce| Input::from(&bounce.tensor))
    }

    /// Copies the result back to the slice.
    fn copy_back(self) -> Result<()> {
        let bytes = self.tensor.len() * self.tensor.dtype().size();
        // SAFETY: `slice` is the address of the caller's argument of this many bytes, which the
        // blocking call borrows exclusively.
        let slice = unsafe { core::slice::from_raw_parts_mut(self.slice, bytes) };
        let (memory, offset) = self.tensor.memory();
        // SAFETY: the operation has ended, and no other value refers to the tensor's memory.
        unsafe { memory.read(offset, slice) }
    }
}

impl Communicator {
    /// Returns true if an operand is a slice, and the communicator's device cannot access it.
    #[inline]
    pub(super) fn needs_bounce_buffers(&self, operands: &Operands<'_>) -> bool {
        self.inner.group.device.is_gpu() && (operands.output.is_slice || operands.input.is_slice)
    }

    /// Runs a checked collective on copies of its slices.
    #[cold]
    pub(super) fn execute_bounced(&self, collective: Collective<'_>) -> Result<()> {
        let Collective { op, operands } = collective;
        let Operands { output, input, .. } = operands;
        let bounced = |slice: &Input<'_>| match slice.is_slice {
            true => self.new_bounce_buffer(&op, slice).map(Some),
            false => Ok(None),
        };
        // An empty slice may begin where another operand begins.
        let in_place = output.is_slice
            && input.is_slice
            && (output.count, output.dtype) == (input.count, input.dtype)
            && core::ptr::eq(output.ptr, input.ptr);
        let for_output = bounced(&output.as_input())?;
        let for_input = match in_place {
            true => None,
            false => bounced(&input)?,
        };
        let output = BounceBuffer::output(&for_output, output);
        let input = match in_place {
            true => output.as_input(),
            false => BounceBuffer::input(&for_input, input),
        };
        let operands = Operands {
            output,
            input,
            ..operands
        };
        let collective = Collective::new(op, operands);
        self.bind(&collective, Lifetime::Call, |prepared| {
            self.run_with(prepared, Arguments::Collective(&collective))
        })?;
        for_output.map_or(Ok(()), BounceBuffer::copy_back)
    }

    fn new_bounce_buffer(&self, op: &Op, slice: &Input<'_>) -> Result<BounceBuffer> {
        if self.stream().is_capturing() {
            return Err(capture_of_borrowed(function_name(op.operation())));
        }
        let tensor = self.tensor(slice.dtype, slice.count)?;
        let bytes = slice.count * slice.dtype.size();
        // SAFETY: `slice` borrows `bytes` readable bytes.
        let values = unsafe { core::slice::from_raw_parts(slice.ptr, bytes) };
        let (memory, offset) = tensor.memory();
        // SAFETY: the tensor was just allocated, so no other value refers to its memory.
        unsafe { memory.write(offset, values)? };
        Ok(BounceBuffer {
            tensor,
            slice: slice.ptr.cast_mut(),
        })
    }

    /// Fails if `argument` is a slice that the device cannot access, or a tensor of another device.
    pub(in crate::comm) fn refuse_slice(
        &self,
        operation: &'static str,
        argument: &Input<'_>,
    ) -> Result<()> {
        if self.inner.group.device.is_gpu() && argument.is_slice {
            return Err(invalid(
                operation,
                format!(
                    "a slice is host memory, which {} cannot access: use tensors",
                    self.inner.group.device
                ),
            ));
        }
        match argument.tensor {
            Some(tensor) => self.check_device(operation, tensor),
            None => Ok(()),
        }
    }
}
