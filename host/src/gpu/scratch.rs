//! Small pieces of device memory for tables of launches: taken from a pool, so that a steady program allocates none.

use core::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::device::Gpu;
use super::driver::{HostMemory, MemoryKind, RawMemory};
use crate::Result;

/// Pieces that are free.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: Mutex<Vec<Piece>>,
}

/// Device memory, with as much page-locked memory beside it where it has been filled by a stream.
#[derive(Clone, Copy, Debug)]
struct Piece {
    /// Logarithm of the size.
    class: u32,
    raw: RawMemory,
    mirror: Option<HostMemory>,
}

// SAFETY: a piece has one owner at a time, the pool or a `Scratch`; its memory belongs to no thread.
unsafe impl Send for Piece {}

/// Device memory that goes back to the pool when it is dropped. Its bytes are whatever was there before.
pub(crate) struct Scratch {
    gpu: Arc<Gpu>,
    piece: Piece,
}

// SAFETY: the mirror is written before the value is shared, and only read by the device afterwards.
unsafe impl Sync for Scratch {}

/// A copy from page-locked memory, to be made on the stream before what reads the target.
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
    /// Makes sure that the pool has `pieces` free pieces of each size up to `greatest` bytes, which streams can fill.
    pub(crate) fn fill_pool(self: &Arc<Self>, greatest: usize, pieces: usize) -> Result<()> {
        let mut bytes = 1 << LEAST;
        while bytes <= greatest {
            // All are taken before the first goes back.
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

/// The least piece: 256 bytes.
const LEAST: u32 = 8;

impl Scratch {
    /// `bytes` bytes at least, aligned to 256.
    pub(crate) fn take(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        Self::take_like(gpu, bytes, false)
    }

    /// As [`Scratch::take`]; of the free pieces rather one with a mirror, or without.
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

    /// As [`Scratch::take`], holding `bytes`, for which it waits.
    pub(crate) fn holding(gpu: &Arc<Gpu>, bytes: &[u8]) -> Result<Self> {
        let scratch = Self::take(gpu, bytes.len())?;
        // SAFETY: the piece is this value's and large enough.
        unsafe { gpu.driver().write(scratch.address(), bytes)? };
        Ok(scratch)
    }

    /// As [`Scratch::take`], holding `bytes` once the stream has made the copy. The value must live until whatever is on
    /// the stream behind the copy has ended.
    pub(crate) fn filled_by_stream(gpu: &Arc<Gpu>, bytes: &[u8]) -> Result<(Self, Upload)> {
        let mut scratch = Self::take_like(gpu, bytes.len(), true)?;
        let mirror = scratch.mirror()?;
        // SAFETY: page-locked memory of this value's, as large as the piece; no copy from it is under way, or the piece
        // would not have come back to the pool.
        unsafe { core::ptr::copy_nonoverlapping(bytes.as_ptr(), mirror.host, bytes.len()) };
        let upload = Upload {
            to: scratch.address(),
            from: mirror.host as u64,
            bytes: bytes.len() as u64,
        };
        Ok((scratch, upload))
    }

    /// The page-locked memory beside the piece.
    fn mirror(&mut self) -> Result<HostMemory> {
        if let Some(mirror) = self.piece.mirror {
            return Ok(mirror);
        }
        let mirror = self.gpu.driver().allocate_host(1 << self.piece.class)?;
        self.piece.mirror = Some(mirror);
        Ok(mirror)
    }

    /// Device address.
    pub(crate) fn address(&self) -> u64 {
        self.piece.raw.address
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // No call of the driver: this may be one of its callbacks.
        self.gpu
            .pool
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(self.piece);
    }
}
