//! Copies between host and device that do not wait for other streams. Each copy uses a page-locked
//! buffer and a stream that belong to the driver object.

use core::ffi::{c_uint, c_void};

use cudarc::driver::sys;

use super::context::{Cuda, RelaxedCapture};
use super::library::Library;
use super::{memory, stream};
use crate::Result;
use crate::environment::DeviceStreams;
use crate::gpu::{CopyDriver, RawStream, StreamPriority};

/// Size of the page-locked buffer in bytes. Longer copies are split into pieces.
const BYTES: usize = 1 << 20;

/// A piece's address in the page-locked buffer and its device address are equal modulo this number,
/// so that aligned words are not torn.
const ALIGNMENT: usize = 16;

/// A stream and a page-locked buffer, used by one copy at a time.
#[derive(Debug)]
pub(super) struct Staging {
    stream: usize,
    host: usize,
}

impl Staging {
    /// Creates the stream and the buffer in the current context. Adds the stream to `streams`.
    pub(super) fn new(library: &Library, streams: &DeviceStreams) -> Result<Self> {
        // Highest priority, because aborts use this stream while kernels of other streams wait.
        let stream = stream::create(library, streams, StreamPriority::Highest)?;
        match memory::host(library, BYTES, sys::CU_MEMHOSTALLOC_PORTABLE as c_uint) {
            Ok(host) => Ok(Self {
                stream: stream.0,
                host: host.addr(),
            }),
            Err(error) => {
                // SAFETY: the stream was created above and has not been used. A second error is
                // ignored, because the first error is returned.
                let _ = unsafe { (library.cuStreamDestroy_v2)(stream.0 as sys::CUstream) };
                Err(error)
            }
        }
    }

    /// Returns the stream.
    pub(super) const fn stream(&self) -> sys::CUstream {
        self.stream as sys::CUstream
    }

    /// Returns the address in the buffer for a piece at device address `device`, and the maximum
    /// length of the piece in bytes.
    const fn buffer(&self, device: u64) -> (*mut u8, usize) {
        let skip = device as usize % ALIGNMENT;
        ((self.host + skip) as *mut u8, BYTES - ALIGNMENT)
    }

    /// Waits for the stream.
    pub(super) fn wait(&self, library: &Library) -> Result<()> {
        // SAFETY: the stream is live, because a `Staging` never destroys its stream.
        library.check("cuStreamSynchronize", unsafe {
            (library.cuStreamSynchronize)(self.stream())
        })
    }
}

impl CopyDriver for Cuda {
    /// Enqueues a copy on a stream.
    ///
    /// # Safety
    /// The preconditions of [`Driver::copy`](crate::gpu::Driver::copy).
    unsafe fn copy(&self, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let library = self.enter()?;
        // SAFETY: the caller guarantees that both ranges stay mapped until the copy is complete.
        library.check("cuMemcpyAsync", unsafe {
            (library.cuMemcpyAsync)(to, from, bytes as usize, stream::raw(stream))
        })
    }

    /// Copies `from` to device address `to` and blocks until the copy is complete.
    ///
    /// # Safety
    /// The device memory must be mapped, and no concurrent access may race with the copy.
    unsafe fn write(&self, to: u64, from: &[u8]) -> Result<()> {
        let library = self.relaxed()?;
        let staging = self.staging();
        let (mut to, mut rest) = (to, from);
        while !rest.is_empty() {
            let (buffer, most) = staging.buffer(to);
            let (piece, later) = rest.split_at(rest.len().min(most));
            // SAFETY: `piece` fits into `buffer`. The lock gives exclusive access to `buffer`, and
            // no copy is in progress.
            unsafe { core::ptr::copy_nonoverlapping(piece.as_ptr(), buffer, piece.len()) };
            // SAFETY: the buffer is never freed. The caller guarantees that the device memory stays
            // mapped until the wait below has returned.
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

    /// Copies `to.len()` bytes from device address `from` and blocks until the copy is complete.
    ///
    /// # Safety
    /// The preconditions of [`Cuda::write`].
    unsafe fn read(&self, to: &mut [u8], from: u64) -> Result<()> {
        let library = self.relaxed()?;
        let staging = self.staging();
        let (mut rest, mut from) = (to, from);
        while !rest.is_empty() {
            let (buffer, most) = staging.buffer(from);
            let (piece, later) = rest.split_at_mut(rest.len().min(most));
            // SAFETY: the buffer is never freed. The caller guarantees that the device memory stays
            // mapped until the wait below has returned.
            library.check("cuMemcpyDtoHAsync", unsafe {
                (library.cuMemcpyDtoHAsync_v2)(
                    buffer.cast::<c_void>(),
                    from,
                    piece.len(),
                    staging.stream(),
                )
            })?;
            staging.wait(&library)?;
            // SAFETY: the copy is complete, and the lock gives exclusive access to the buffer.
            unsafe { core::ptr::copy_nonoverlapping(buffer, piece.as_mut_ptr(), piece.len()) };
            from += piece.len() as u64;
            rest = later;
        }
        Ok(())
    }
}

impl Cuda {
    /// Calls `work` with the stream of the driver object, then waits for the stream.
    pub(super) fn on_own_stream(
        &self,
        library: &RelaxedCapture,
        work: impl FnOnce(sys::CUstream) -> Result<()>,
    ) -> Result<()> {
        let staging = self.staging();
        work(staging.stream())?;
        staging.wait(library)
    }

    /// Locks the stream and the buffer for this thread.
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
