//! Copies between host and device beside whatever runs: a stream of the driver's own and
//! page-locked memory.

use core::ffi::{c_uint, c_void};

use cudarc::driver::sys;

use super::context::{Cuda, RelaxedCapture};
use super::library::Library;
use super::{memory, stream};
use crate::Result;

/// Bytes of the page-locked memory; longer copies go in pieces.
const BYTES: usize = 1 << 20;

/// A piece lies in the page-locked memory at the same address modulo this as in the device's, so
/// that aligned words stay whole.
const ALIGNMENT: usize = 16;

/// The stream and the page-locked memory, for one copy at a time.
#[derive(Debug)]
pub(super) struct Staging {
    stream: usize,
    host: usize,
}

impl Staging {
    /// Creates both, in the current context.
    pub(super) fn new(library: &Library) -> Result<Self> {
        let stream = stream::create(library)?;
        match memory::host(library, BYTES, sys::CU_MEMHOSTALLOC_PORTABLE as c_uint) {
            Ok(host) => Ok(Self {
                stream: stream.0,
                host: host.addr(),
            }),
            Err(error) => {
                // SAFETY: created above, and not used yet; the error that counts is the other.
                let _ = unsafe { (library.cuStreamDestroy_v2)(stream.0 as sys::CUstream) };
                Err(error)
            }
        }
    }

    /// The stream.
    pub(super) const fn stream(&self) -> sys::CUstream {
        self.stream as sys::CUstream
    }

    /// Where a piece for (or from) this device address lies, and how many bytes it has at most.
    const fn buffer(&self, device: u64) -> (*mut u8, usize) {
        let skip = device as usize % ALIGNMENT;
        ((self.host + skip) as *mut u8, BYTES - ALIGNMENT)
    }

    /// Waits for the stream.
    pub(super) fn wait(&self, library: &Library) -> Result<()> {
        // SAFETY: the stream lives as long as this value.
        library.check("cuStreamSynchronize", unsafe {
            (library.cuStreamSynchronize)(self.stream())
        })
    }
}

impl Cuda {
    /// The calls of `work` on the driver's own stream, and a wait for it.
    pub(super) fn on_own_stream(
        &self,
        library: &RelaxedCapture,
        work: impl FnOnce(sys::CUstream) -> Result<()>,
    ) -> Result<()> {
        let staging = self.staging();
        work(staging.stream())?;
        staging.wait(library)
    }

    /// Copies to the device and waits.
    ///
    /// # Safety
    /// The device memory is mapped, and nobody else uses it in a way that races with this.
    pub(super) unsafe fn write(&self, to: u64, from: &[u8]) -> Result<()> {
        let library = self.relaxed()?;
        let staging = self.staging();
        let (mut to, mut rest) = (to, from);
        while !rest.is_empty() {
            let (buffer, most) = staging.buffer(to);
            let (piece, later) = rest.split_at(rest.len().min(most));
            // SAFETY: `piece` fits behind `buffer`, which the lock makes ours; no copy is under
            // way.
            unsafe { core::ptr::copy_nonoverlapping(piece.as_ptr(), buffer, piece.len()) };
            // SAFETY: both ranges are mapped (the device's by this function's requirement) until
            // the wait below.
            library.check("cuMemcpyHtoDAsync", unsafe {
                (library.cuMemcpyHtoDAsync_v2)(
                    to,
                    buffer as *const c_void,
                    piece.len(),
                    staging.stream(),
                )
            })?;
            staging.wait(&library)?;
            to += piece.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// Copies from the device and waits.
    ///
    /// # Safety
    /// As [`Cuda::write`].
    pub(super) unsafe fn read(&self, to: &mut [u8], from: u64) -> Result<()> {
        let library = self.relaxed()?;
        let staging = self.staging();
        let (mut rest, mut from) = (to, from);
        while !rest.is_empty() {
            let (buffer, most) = staging.buffer(from);
            let (piece, later) = rest.split_at_mut(rest.len().min(most));
            // SAFETY: both ranges are mapped (the device's by this function's requirement) until
            // the wait below.
            library.check("cuMemcpyDtoHAsync", unsafe {
                (library.cuMemcpyDtoHAsync_v2)(
                    buffer.cast::<c_void>(),
                    from,
                    piece.len(),
                    staging.stream(),
                )
            })?;
            staging.wait(&library)?;
            // SAFETY: the copy is done, and the lock makes the page-locked memory ours.
            unsafe { core::ptr::copy_nonoverlapping(buffer, piece.as_mut_ptr(), piece.len()) };
            from += piece.len() as u64;
            rest = later;
        }
        Ok(())
    }

    /// The stream and memory, for this thread.
    fn staging(&self) -> std::sync::MutexGuard<'_, Staging> {
        self.staging
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_keep_their_alignment_and_fit() {
        let staging = Staging {
            stream: 0,
            host: 0x10_0000,
        };
        for device in [0_u64, 1, 7, 8, 15, 16, 0x7f00_0000_0009] {
            let (buffer, most) = staging.buffer(device);
            assert_eq!(buffer.addr() % ALIGNMENT, device as usize % ALIGNMENT);
            assert!(buffer.addr() + most <= staging.host + BYTES);
        }
    }
}
