//! Slices on a GPU: a blocking call copies them to device memory, and its results back.

use super::Communicator;
use super::submit::{capture_of_slices, invalid};
use crate::Result;
use crate::tensor::{Input, Output, Tensor};

/// Device memory in place of a slice.
#[derive(Debug)]
pub(super) struct BounceBuffer {
    tensor: Tensor,
    home: *mut u8,
}

impl BounceBuffer {
    /// The memory to use: the bounce one, or the argument's own.
    pub(super) fn output<'a>(bounce: &'a Option<Self>, own: Output<'a>) -> Output<'a> {
        bounce
            .as_ref()
            .map_or(own, |bounce| Output::from(&bounce.tensor))
    }

    /// As [`BounceBuffer::output`].
    pub(super) fn input<'a>(bounce: &'a Option<Self>, own: Input<'a>) -> Input<'a> {
        bounce
            .as_ref()
            .map_or(own, |bounce| Input::from(&bounce.tensor))
    }

    /// Copies a result back to the slice.
    pub(super) fn copy_back(self) -> Result<()> {
        let bytes = self.tensor.len() * self.tensor.dtype().size();
        // SAFETY: the slice is the caller's argument, exclusively borrowed, of as many bytes.
        let home = unsafe { core::slice::from_raw_parts_mut(self.home, bytes) };
        let (memory, offset) = self.tensor.memory();
        // SAFETY: the operation has ended, and nobody else has the tensor.
        unsafe { memory.read(offset, home) }
    }
}

impl Communicator {
    /// Device memory with the elements of `slice`, where it is one and the communicator's device cannot reach it.
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
        // SAFETY: the slice is readable for as many bytes.
        let values = unsafe { core::slice::from_raw_parts(slice.ptr, bytes) };
        let (memory, offset) = tensor.memory();
        // SAFETY: nobody else has the tensor.
        unsafe { memory.write(offset, values)? };
        Ok(BounceBuffer {
            tensor,
            home: slice.ptr.cast_mut(),
        })
    }

    /// Refuses a slice where the device cannot reach it.
    pub(super) fn refuse_slice(&self, operation: &'static str, argument: &Input<'_>) -> Result<()> {
        if self.inner.device.is_gpu() && argument.is_slice {
            return Err(invalid(
                operation,
                format!(
                    "a slice is memory of the host's, which {} does not reach: use tensors",
                    self.inner.device
                ),
            ));
        }
        Ok(())
    }
}
