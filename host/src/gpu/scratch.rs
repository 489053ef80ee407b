//! Small pieces of device memory for tables of launches: taken from a pool, so that a steady program allocates none.

use core::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::device::Gpu;
use super::driver::{MemoryKind, RawMemory};
use crate::Result;

/// Pieces that are free, by the logarithm of their size.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: Mutex<Vec<(u32, RawMemory)>>,
}

/// Device memory that goes back to the pool when it is dropped. Its bytes are whatever was there before.
pub(crate) struct Scratch {
    gpu: Arc<Gpu>,
    class: u32,
    raw: RawMemory,
}

impl fmt::Debug for Scratch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scratch")
            .field("bytes", &(1u64 << self.class))
            .finish_non_exhaustive()
    }
}

impl Gpu {
    /// Makes sure that the pool has `pieces` free pieces of each size up to `greatest` bytes.
    pub(crate) fn fill_pool(self: &Arc<Self>, greatest: usize, pieces: usize) -> Result<()> {
        let mut bytes = 1 << LEAST;
        while bytes <= greatest {
            // All are taken before the first goes back.
            let taken: Vec<_> = (0..pieces)
                .map(|_| Scratch::take(self, bytes))
                .collect::<Result<_>>()?;
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
        let class = (bytes.max(1).next_power_of_two().trailing_zeros()).max(LEAST);
        let found = {
            let mut free = gpu.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
            let at = free.iter().rposition(|(other, _)| *other == class);
            at.map(|at| free.swap_remove(at).1)
        };
        let raw = match found {
            Some(raw) => raw,
            None => gpu.driver().allocate(1 << class, MemoryKind::Private)?,
        };
        Ok(Self {
            gpu: Arc::clone(gpu),
            class,
            raw,
        })
    }

    /// As [`Scratch::take`], holding `bytes`.
    pub(crate) fn holding(gpu: &Arc<Gpu>, bytes: &[u8]) -> Result<Self> {
        let scratch = Self::take(gpu, bytes.len())?;
        // SAFETY: the piece is this value's and large enough.
        unsafe { gpu.driver().write(scratch.raw.address, bytes)? };
        Ok(scratch)
    }

    /// Device address.
    pub(crate) fn address(&self) -> u64 {
        self.raw.address
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
            .push((self.class, self.raw));
    }
}
