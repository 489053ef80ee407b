//! A pool of small pieces of device memory for tables of launches, so that a program in steady
//! state does not allocate.

use core::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::device::Gpu;
use super::driver::{HostMemory, MemoryKind, RawMemory};
use crate::Result;

/// The free pieces.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: Mutex<Vec<Piece>>,
}

/// Device memory, with page-locked memory of the same size if the piece is filled by streams.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Binary logarithm of the size.
    class: u32,
    raw: RawMemory,
    mirror: Option<HostMemory>,
}

// SAFETY: a piece has one owner at a time, the pool or a `Scratch`, and its addresses are valid on
// all threads.
unsafe impl Send for Piece {}

/// Device memory that returns to the pool when it is dropped. Its initial contents are unspecified.
pub(crate) struct Scratch {
    gpu: Arc<Gpu>,
    piece: Piece,
}

// SAFETY: no method that takes `&self` accesses the mirror. `filled_by_stream` writes it before the
// value is shared, and afterwards only the device reads it.
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
    /// Ensures that the pool has `pieces` free pieces with mirrors of each size up to `greatest`
    /// bytes.
    pub(crate) fn fill_pool(self: &Arc<Self>, greatest: usize, pieces: usize) -> Result<()> {
        let mut bytes = 1 << LEAST;
        while bytes <= greatest {
            // Takes all pieces before returning the first, so that they are distinct.
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
    /// Takes at least `bytes` bytes, aligned to 256.
    pub(crate) fn take(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        Self::take_like(gpu, bytes, false)
    }

    /// Takes a piece of at least `bytes` bytes, preferably a free one that has a mirror if
    /// `mirrored`, or none otherwise.
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
        // SAFETY: the piece has at least `bytes.len()` bytes, and this value is its only owner.
        unsafe { gpu.driver().write(scratch.address(), bytes)? };
        Ok(scratch)
    }

    /// Takes a piece and prepares a copy of `bytes` to it, which a stream makes. The value must
    /// live until everything on the stream that uses the piece has ended.
    pub(crate) fn filled_by_stream(gpu: &Arc<Gpu>, bytes: &[u8]) -> Result<(Self, Upload)> {
        let mut scratch = Self::take_like(gpu, bytes.len(), true)?;
        let mirror = scratch.mirror()?;
        // SAFETY: the mirror is as large as the piece, which has at least `bytes.len()` bytes. No
        // earlier copy from it is in progress, because a piece returns to the pool only after its
        // stream has used it.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), mirror.host, bytes.len()) };
        let upload = Upload {
            to: scratch.address(),
            from: mirror.host as u64,
            bytes: bytes.len() as u64,
        };
        Ok((scratch, upload))
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
        // Must not call the driver, because this may run in one of its callbacks.
        self.gpu
            .pool
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(self.piece);
    }
}
