//! A pool of small pieces of device memory for the tables that kernels read. Reusing the pieces
//! avoids allocations in the steady state of a program.

use core::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::device::Gpu;
use super::driver::{HostMemory, MemoryKind, RawMemory};
use crate::Result;

/// The pieces that no [`Scratch`] owns.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: Mutex<Vec<Piece>>,
}

/// A piece of device memory. A piece that is filled by a copy on a stream also has a mirror:
/// page-locked memory of the same size.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Binary logarithm of the size.
    class: u32,
    raw: RawMemory,
    mirror: Option<HostMemory>,
}

// SAFETY: a piece has one owner at a time, either the pool or a `Scratch`. Device addresses and
// page-locked memory are valid on all threads.
unsafe impl Send for Piece {}

/// Device memory that returns to the pool when it is dropped. Its initial contents are unspecified.
pub(crate) struct Scratch {
    gpu: Arc<Gpu>,
    piece: Piece,
}

// SAFETY: no method that takes `&self` accesses the mirror. `filled_by_stream` writes the mirror
// before it returns the `Scratch`. Afterwards only the device reads the mirror.
unsafe impl Sync for Scratch {}

/// A copy from page-locked memory that a launch enqueues before its kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Upload {
    pub(crate) to: u64,
    pub(crate) from: u64,
    pub(crate) bytes: u64,
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scratch")
            .field("bytes", &(1u64 << self.piece.class))
            .finish_non_exhaustive()
    }
}

impl Gpu {
    /// Fills the pool until it contains, for each size class up to `greatest` bytes, at least
    /// `pieces` free pieces with mirrors.
    pub(crate) fn fill_pool(self: &Arc<Self>, greatest: usize, pieces: usize) -> Result<()> {
        let mut bytes = 1 << LEAST;
        while bytes <= greatest {
            // Takes all pieces before it returns any of them to the pool. Otherwise the same piece
            // would be taken repeatedly.
            let mut taken = Vec::with_capacity(pieces);
            for _ in 0..pieces {
                let mut scratch = Scratch::take_like(self, bytes, true)?;
                scratch.mirror()?;
                taken.push(scratch);
            }
            drop(taken);
            bytes *= 2;
        }
        Ok(())
    }
}

/// Binary logarithm of the smallest piece, 256 bytes.
const LEAST: u32 = 8;

impl Scratch {
    /// Takes a piece of at least `bytes` bytes, aligned to 256 bytes.
    pub(crate) fn take(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        Self::take_like(gpu, bytes, false)
    }

    /// Takes a piece of at least `bytes` bytes. Prefers free pieces with a mirror if `mirrored` is
    /// true, and free pieces without a mirror otherwise.
    fn take_like(gpu: &Arc<Gpu>, bytes: usize, mirrored: bool) -> Result<Self> {
        let class = (bytes.max(1).next_power_of_two().trailing_zeros()).max(LEAST);
        let found = {
            let mut free = gpu.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
            let fits = |piece: &Piece| piece.class == class;
            let at = free
                .iter()
                .rposition(|piece| fits(piece) && piece.mirror.is_some() == mirrored)
                .or_else(|| free.iter().rposition(fits));
            at.map(|at| free.swap_remove(at))
        };
        let piece = match found {
            Some(piece) => piece,
            None => Piece {
                class,
                raw: gpu.driver().allocate(1 << class, MemoryKind::Private)?,
                mirror: None,
            },
        };
        Ok(Self {
            gpu: Arc::clone(gpu),
            piece,
        })
    }

    /// Takes a piece and copies `bytes` to it. Blocks until the copy is complete.
    pub(crate) fn holding(gpu: &Arc<Gpu>, bytes: &[u8]) -> Result<Self> {
        let scratch = Self::take(gpu, bytes.len())?;
        // SAFETY: no kernel has the piece's address yet.
        unsafe { scratch.write(0, bytes)? };
        Ok(scratch)
    }

    /// Takes a piece and copies `bytes` to its mirror. A stream must then copy the mirror to the
    /// piece; the returned [`Upload`] describes this copy. The [`Scratch`] must live until all work
    /// that uses the piece is complete.
    pub(crate) fn filled_by_stream(gpu: &Arc<Gpu>, bytes: &[u8]) -> Result<(Self, Upload)> {
        let mut scratch = Self::take_like(gpu, bytes.len(), true)?;
        let mirror = scratch.mirror()?;
        // SAFETY: the mirror is as large as the piece, and the piece has at least `bytes.len()`
        // bytes. No earlier copy from the mirror is in progress, because a piece returns to the
        // pool only after all work that uses it is complete.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), mirror.host, bytes.len()) };
        let upload = Upload {
            to: scratch.address(),
            from: mirror.host as u64,
            bytes: bytes.len() as u64,
        };
        Ok((scratch, upload))
    }

    /// Copies `bytes` to the piece, `offset` bytes from its start. Blocks until the copy is
    /// complete.
    ///
    /// # Safety
    /// A kernel that reads these bytes meanwhile must accept each aligned group of eight as it was
    /// before or after.
    ///
    /// # Panics
    /// Panics if the bytes do not fit.
    pub(crate) unsafe fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        assert!(offset + bytes.len() as u64 <= 1 << self.piece.class);
        // SAFETY: the bytes are within the piece; the rest is the caller's.
        unsafe { Ok(self.gpu.driver().write(self.address() + offset, bytes)?) }
    }

    /// Returns the piece's page-locked mirror. Allocates it on the first call.
    fn mirror(&mut self) -> Result<HostMemory> {
        if let Some(mirror) = self.piece.mirror {
            return Ok(mirror);
        }
        let mirror = self.gpu.driver().allocate_host(1 << self.piece.class)?;
        self.piece.mirror = Some(mirror);
        Ok(mirror)
    }

    /// Returns the device address.
    pub(crate) fn address(&self) -> u64 {
        self.piece.raw.address
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // Does not call the driver, because this function may run in a callback of the driver.
        self.gpu
            .pool
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(self.piece);
    }
}
