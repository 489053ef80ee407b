//! Initialization that the first operations would otherwise do.

use fusewire_device::native::Kernel;

use super::Communicator;
use crate::Result;

/// Number of operations in flight on a stream for which events are created in advance.
const IN_FLIGHT: usize = 64;

/// Number of pieces of device memory for tables of launches that are allocated in advance, for each
/// size up to the greatest.
const PIECES: usize = 2;
const GREATEST_PIECE: usize = 8 << 10;

impl Communicator {
    /// Does the one-time work of the first operations now: loads the kernels, creates the events of
    /// this value's stream and the small pieces of device memory that launches take from pools, and
    /// runs a barrier of all ranks on the device. Afterwards captures, launches and replays on that
    /// stream load nothing and allocate no device memory; only more than 64 operations in flight at
    /// once create further events. All ranks must call this together, like
    /// [`Communicator::barrier`]. A second call is a barrier.
    ///
    /// [`Communicator::warm_up_kernel`] loads user kernels.
    ///
    /// # Errors
    /// [`crate::Error::CaptureState`] if the stream is capturing; errors of the GPU's driver; the
    /// communicator's first failure.
    pub fn warm_up(&self) -> Result<()> {
        if self.stream.is_capturing() {
            return Err(crate::Error::CaptureState {
                detail: "warm_up runs a barrier at once: call it before the capture begins"
                    .to_owned(),
            });
        }
        self.inner.check()?;
        if let Some(on_gpu) = &self.inner.executor.on_gpu {
            let gpu = on_gpu.gpu();
            gpu.sweep();
            gpu.load()?;
            gpu.fill_pool(GREATEST_PIECE, PIECES)?;
            self.stream.prime(IN_FLIGHT)?;
        }
        self.barrier()
    }

    /// Loads the image of a user kernel, which otherwise its first launch or capture would do. Not
    /// collective. Does nothing on the CPU.
    ///
    /// # Errors
    /// [`crate::Error::Image`] if no image of its crate is found; errors of the GPU's driver.
    pub fn warm_up_kernel<P: Copy>(&self, kernel: &Kernel<P>) -> Result<()> {
        match &self.inner.executor.on_gpu {
            Some(on_gpu) => on_gpu.gpu().kernel(kernel.info()).map(drop),
            None => Ok(()),
        }
    }
}
