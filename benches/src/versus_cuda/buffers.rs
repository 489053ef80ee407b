//! Device memory that the ranks of the baseline share.

use core::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

use anyhow::{Result, ensure};
use fusewire::gpu::Gpu;
use fusewire::gpu::driver::{HostMemory, MemoryKind, RawMemory};

use super::entries::{SIGNAL_PAD_BYTES, VECTOR};

/// Size of a packet unit in bytes, and number of units per vector.
const UNIT: usize = 16;
const PLANES: usize = 2;
/// Number of vectors in a group, whose units are contiguous in a packet buffer.
const GROUP: usize = 32;

/// Device memory, freed on drop. All kernels that use it must have completed by then.
#[derive(Debug)]
struct Memory {
    gpu: Arc<Gpu>,
    raw: RawMemory,
}

impl Memory {
    /// Allocates zeroed memory.
    fn new(gpu: &Arc<Gpu>, bytes: usize) -> Result<Self> {
        Ok(Self {
            gpu: Arc::clone(gpu),
            raw: gpu
                .driver()
                .allocate(bytes.max(VECTOR) as u64, MemoryKind::Shared)?,
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `allocate` returned the memory. Only the ranks' threads used it, and they have
        // waited for their streams and ended.
        if let Err(error) = unsafe { self.gpu.driver().release(self.raw) } {
            eprintln!(
                "{} bytes of device memory could not be freed: {error}",
                self.raw.bytes
            );
        }
    }
}

/// One allocation per rank, all of the same size.
#[derive(Debug)]
pub(crate) struct Peers(Vec<Memory>);

impl Peers {
    pub(crate) fn new(gpu: &Arc<Gpu>, ranks: usize, bytes: usize) -> Result<Self> {
        let each = (0..ranks).map(|_| Memory::new(gpu, bytes));
        Ok(Self(each.collect::<Result<_>>()?))
    }

    /// Returns the addresses of the allocations, by rank.
    pub(crate) fn addresses(&self) -> Vec<u64> {
        self.0.iter().map(|memory| memory.raw.address).collect()
    }
}

/// Returns the packet capacity that a block needs if `vectors` vectors are distributed over the
/// threads of `blocks` blocks. The capacity is in vectors and a multiple of [`GROUP`].
pub(crate) fn capacity(vectors: usize, blocks: usize, threads: usize) -> usize {
    let turns = vectors.div_ceil(blocks * threads).max(1);
    (turns * threads).next_multiple_of(GROUP)
}

/// Returns the size of a rank's packet buffer in bytes. For each block and each of the `parts`
/// exchanges of a launch (1 in one-shot kernels, 2 in two-shot kernels), the buffer has two halves
/// that are used alternately.
pub(crate) fn packet_bytes(blocks: usize, parts: usize, ranks: usize, capacity: usize) -> usize {
    blocks * 2 * parts * ranks * PLANES * UNIT * capacity
}

/// Signal pads and packet buffers of one kernel family. Each family counts its exchanges
/// separately.
#[derive(Debug)]
pub(crate) struct Packets {
    pub(crate) pads: Peers,
    pub(crate) buffers: Peers,
    pub(crate) capacity: u32,
}

impl Packets {
    pub(crate) fn new(
        gpu: &Arc<Gpu>,
        ranks: usize,
        blocks: usize,
        parts: usize,
        capacity: usize,
    ) -> Result<Self> {
        ensure!(
            capacity.is_multiple_of(GROUP) && u32::try_from(capacity).is_ok(),
            "{capacity} vectors for a block: not whole groups"
        );
        Ok(Self {
            pads: Peers::new(gpu, ranks, SIGNAL_PAD_BYTES)?,
            buffers: Peers::new(gpu, ranks, packet_bytes(blocks, parts, ranks, capacity))?,
            capacity: capacity as u32,
        })
    }
}

/// A word of page-locked host memory that kernels poll.
#[derive(Debug)]
pub(crate) struct Latch {
    gpu: Arc<Gpu>,
    memory: HostMemory,
}

// SAFETY: until the memory is freed, it is only accessed as an atomic word, from any thread.
unsafe impl Send for Latch {}
// SAFETY: `open` and `address` need no exclusive access, because the word is atomic.
unsafe impl Sync for Latch {}

impl Latch {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self> {
        Ok(Self {
            gpu: Arc::clone(gpu),
            memory: gpu.driver().allocate_host(64)?,
        })
    }

    /// Returns the word's device address.
    pub(crate) fn address(&self) -> u64 {
        self.memory.device
    }

    /// Releases the kernels that wait for `turn`.
    pub(crate) fn open(&self, turn: u32) {
        // SAFETY: the memory has 64 bytes, is aligned by the allocation and lives as long as
        // `self`. Kernels only read it.
        let word = unsafe { AtomicU32::from_ptr(self.memory.host.cast::<u32>()) };
        word.store(turn, Ordering::Release);
    }
}

impl Drop for Latch {
    fn drop(&mut self) {
        // SAFETY: `allocate_host` returned the memory, and the ranks have waited for their streams,
        // so no kernel reads it any more.
        if let Err(error) = unsafe { self.gpu.driver().release_host(self.memory) } {
            eprintln!("page-locked memory could not be freed: {error}");
        }
    }
}

/// All device memory of the baseline.
#[derive(Debug)]
pub(crate) struct Buffers {
    pub(crate) latch: Latch,
    /// Signal pads of the kernels with barriers.
    pub(crate) pads: Peers,
    pub(crate) scratches: Peers,
    pub(crate) one_shot: Packets,
    pub(crate) two_shot: Packets,
    pub(crate) norm: Packets,
    pub(crate) ping_pong: Peers,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the offset of the last unit that a launch uses, computed as in
    /// `Exchange::unit_offset` of `cuda/packets.cuh`.
    fn last(blocks: usize, parts: usize, ranks: usize, capacity: usize, local: usize) -> usize {
        let group =
            ((((blocks - 1) * 2 + 1) * parts) + parts - 1) * (capacity / GROUP) + local / GROUP;
        group * ranks * PLANES * GROUP + local % GROUP + ((ranks - 1) * PLANES + 1) * GROUP
    }

    #[test]
    fn what_a_block_sends_fits() {
        for (vectors, blocks, threads) in [
            (1, 16, 512),
            (16_384, 16, 512),
            (16_385, 16, 512),
            (5, 64, 32),
        ] {
            for (parts, ranks) in [(1, 2), (2, 8)] {
                let capacity = capacity(vectors, blocks, threads);
                let turns = vectors.div_ceil(blocks * threads);
                let local = turns * threads - 1;
                assert!(local < capacity);
                let bytes = packet_bytes(blocks, parts, ranks, capacity);
                assert!((last(blocks, parts, ranks, capacity, local) + 1) * UNIT <= bytes);
                let full = last(blocks, parts, ranks, capacity, capacity - 1);
                assert_eq!((full + 1) * UNIT, bytes, "and none is spared");
            }
        }
    }

    #[test]
    fn constants_are_those_of_the_source() {
        let packets = include_str!("../../cuda/packets.cuh");
        for line in [
            format!("constexpr int PLANES = {PLANES};"),
            format!("constexpr int GROUP = {GROUP};"),
        ] {
            assert!(packets.contains(&line), "{line}");
        }
    }
}
