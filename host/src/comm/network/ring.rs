//! The ring of requests, the results and the staging memory of a rank, which its kernels and the
//! agent share.

use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::{NetContext, NetCounters, NetEntry};
use fusewire_device::net::{RESULT_BYTES, RESULTS, Requests, STAGING};

/// Sizes of a ring.
#[derive(Clone, Copy, Debug)]
pub(super) struct RingConfig {
    pub(super) blocks: u32,
    /// Lanes of a block.
    pub(super) lanes: u32,
    /// Number of entries: a power of two.
    pub(super) depth: usize,
    /// Bytes of staging memory of a block.
    pub(super) staging_bytes: usize,
    /// Address of the function that waiting lanes call so that the agent executes requests, and its
    /// argument. Zeros if the agent provides none.
    pub(super) drive: (u64, u64),
}

/// Memory that the kernels of a rank share with the agent.
#[derive(Debug)]
pub(super) struct Ring {
    context: *mut NetContext,
    entries: *mut [NetEntry],
    counters: *mut NetCounters,
    staging: *mut [u64],
    results: *mut [[u64; RESULT_BYTES as usize / 8]],
}

// SAFETY: kernels and the agent access the memory at these addresses by atomic operations, or in
// the order of the ring's protocol.
unsafe impl Send for Ring {}
// SAFETY: see `Send`.
unsafe impl Sync for Ring {}

impl Ring {
    pub(super) fn new(config: RingConfig) -> Self {
        let RingConfig {
            blocks,
            lanes,
            depth,
            staging_bytes,
            drive: (drive, agent),
        } = config;
        let words = blocks as usize * staging_bytes / 8;
        let all_lanes = blocks as usize * lanes as usize;
        let entries = Box::into_raw(bytemuck::allocation::zeroed_slice_box(depth));
        let counters = Box::into_raw(bytemuck::allocation::zeroed_box());
        let staging = Box::into_raw(bytemuck::allocation::zeroed_slice_box(words));
        let results = Box::into_raw(bytemuck::allocation::zeroed_slice_box(all_lanes));
        let context = NetContext {
            entries: entries.cast::<NetEntry>() as u64,
            depth: depth as u64,
            counters: counters as u64,
            staging: staging.cast::<u8>() as u64,
            staging_bytes: staging_bytes as u64,
            results: results.cast::<u8>() as u64,
            lanes: u64::from(lanes),
            drive,
            agent,
        };
        Self {
            context: Box::into_raw(Box::new(context)),
            entries,
            counters,
            staging,
            results,
        }
    }

    /// Returns the address of the context for kernels.
    pub(super) fn context(&self) -> u64 {
        self.context as u64
    }

    pub(super) fn requests(&self) -> Requests {
        // SAFETY: the context is valid as long as this value, and is never written.
        unsafe { Requests::new(self.context.read()) }
    }

    /// Returns the address of `bytes` bytes of the staging memory, or `None` if they are not in it.
    pub(super) fn staging(&self, addr: WindowAddr, bytes: u64) -> Option<*mut u8> {
        let (offset, all) = (addr.offset(), 8 * self.staging.len() as u64);
        let fits = addr.window() == STAGING && offset <= all && bytes <= all - offset;
        fits.then(|| self.staging.cast::<u8>().wrapping_add(offset as usize))
    }

    /// Returns the address of the result of a lane.
    pub(super) fn result(&self, addr: WindowAddr) -> Option<*mut u64> {
        let (index, rest) = (addr.offset() / RESULT_BYTES, addr.offset() % RESULT_BYTES);
        let exists = addr.window() == RESULTS && rest == 0 && index < self.results.len() as u64;
        exists.then(|| {
            let result = self.results.cast::<[u64; RESULT_BYTES as usize / 8]>();
            result.wrapping_add(index as usize).cast()
        })
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: `new` made the pointers from boxes. The agent and the kernels keep the ring alive
        // while they use it.
        unsafe {
            drop(Box::from_raw(self.context));
            drop(Box::from_raw(self.entries));
            drop(Box::from_raw(self.counters));
            drop(Box::from_raw(self.staging));
            drop(Box::from_raw(self.results));
        }
    }
}
