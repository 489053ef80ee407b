//! Everything that a first call would do once, done before.

use fusewire_device::native::Kernel;

use super::Communicator;
use crate::Result;

/// Operations in flight on a stream for which events are made beforehand.
const IN_FLIGHT: usize = 64;

/// Pieces of device memory for tables of launches that are made beforehand, of each size up to the
/// greatest.
const PIECES: usize = 2;
const GREATEST_PIECE: usize = 8 << 10;

impl Communicator {
    /// Does now what the first operations would do once: loads the kernels, makes the events of
    /// this value's stream and the small pieces of device memory that launches take from pools, and
    /// runs a barrier of all ranks on the device. After it captures, launches and replays on that
    /// stream load nothing and allocate no device memory; more than 64 operations in flight at once
    /// make further events. All ranks together, like [`Communicator::barrier`]; a second call is a
    /// barrier.
    ///
    /// Kernels of crates of the user's are loaded by [`Communicator::warm_up_kernel`].
    ///
    /// # Errors
    /// [`crate::Error::CaptureState`] while the stream is capturing; what a GPU's driver says;
    /// the communicator's first failure.
    pub fn warm_up(&self) -> Result<()> {
        if self.stream.is_capturing() {
            return Err(crate::Error::CaptureState {
                detail: "warm_up runs a barrier at once: call it before the capture begins"
                    .to_owned(),
            });
        }
        self.inner.check()?;
        if let Some(on_gpu) = &self.inner.on_gpu {
            let gpu = on_gpu.gpu();
            gpu.sweep();
            gpu.load()?;
            gpu.fill_pool(GREATEST_PIECE, PIECES)?;
            self.stream.prime(IN_FLIGHT)?;
        }
        self.barrier()
    }

    /// Loads the image of a kernel of the user's, which its first launch or capture would do else.
    /// Not collective; nothing happens on the CPU.
    ///
    /// # Errors
    /// [`crate::Error::Image`] when no image of its crate is found; what a GPU's driver says.
    pub fn warm_up_kernel<P: Copy>(&self, kernel: &Kernel<P>) -> Result<()> {
        match &self.inner.on_gpu {
            Some(on_gpu) => on_gpu.gpu().kernel(kernel.info()).map(drop),
            None => Ok(()),
        }
    }
}
