//! Bounce buffers: device memory to which blocking calls on a GPU copy slices, and from which they
//! copy the results back.

use super::Communicator;
use super::submit::{capture_of_slices, invalid};
use crate::Result;
use crate::tensor::{Input, Output, Tensor};

/// Device memory that an operation uses in place of a slice.
#[derive(Debug)]
pub(super) struct BounceBuffer {
    tensor: Tensor,
    slice: *mut u8,
}

impl BounceBuffer {
    /// Returns the bounce buffer as the operation's output, or `own` if there is none.
    pub(super) fn output<'a>(bounce: &'a Option<Self>, own: Output<'a>) -> Output<'a> {
        bounce
            .as_ref()
            .map_or(own, |bounce| Output::from(&bounce.tensor))
    }

    /// Returns the bounce buffer as the operation's input, or `own` if there is none.
    pub(super) fn input<'a>(bounce: &'a Option<Self>, own: Input<'a>) -> Input<'a> {
        bounce
            .as_ref()
            .map_or(own, |bounce| Input::from(&bounce.tensor))
    }

    /// Copies the result back to the slice.
    pub(super) fn copy_back(self) -> Result<()> {
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
    /// Returns device memory with the elements of `slice`, or `None` if `slice` is a tensor or the
    /// communicator's device can access it.
    #[inline]
    pub(super) fn bounce_buffer(&self, slice: &Input<'_>) -> Result<Option<BounceBuffer>> {
        if !self.inner.device.is_gpu() || !slice.is_slice {
            return Ok(None);
        }
        self.new_bounce_buffer(slice).map(Some)
    }

    #[cold]
    fn new_bounce_buffer(&self, slice: &Input<'_>) -> Result<BounceBuffer> {
        if self.stream().is_capturing() {
            return Err(capture_of_slices());
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

    /// Fails if `argument` is a slice that the device cannot access.
    pub(super) fn refuse_slice(&self, operation: &'static str, argument: &Input<'_>) -> Result<()> {
        if self.inner.device.is_gpu() && argument.is_slice {
            return Err(invalid(
                operation,
                format!(
                    "a slice is host memory, which {} cannot access: use tensors",
                    self.inner.device
                ),
            ));
        }
        Ok(())
    }
}
