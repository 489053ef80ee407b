//! Launches of kernels.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use crate::block::Shared;
use crate::error::{Error, Result};
use crate::memory::{Memory, View};
use crate::module::LoadedModule;
use crate::program::Program;
use crate::row::LANES;
use crate::shadow::{Cells, Shadow};
use crate::trips::{BlockTrips, Trips};
use crate::warp::Warp;

/// A launch of a kernel.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Name of the kernel.
    pub kernel: String,
    /// Number of the device.
    pub device: u32,
    /// Number of blocks in each dimension.
    pub blocks: [u32; 3],
    /// Number of threads of a block in each dimension.
    pub threads: [u32; 3],
    /// Size of the dynamic shared memory of a block in bytes.
    pub dynamic_shared: u32,
    /// Bytes of all parameters, at their offsets.
    pub params: Vec<u8>,
    /// Share of the device that a resident block uses, in the unit of
    /// [`Config::capacity`](crate::Config::capacity).
    pub cost: u32,
}

/// Counts of a completed launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of instructions that warps have executed.
    pub instructions: u64,
    /// The longest chain of loads and fences, with [`Config::trips`](crate::Config::trips).
    pub trips: Option<Box<Trips>>,
}

/// The result of a launch or of an operation, for the thread that waits for it.
#[derive(Debug)]
pub(crate) struct Ticket<T> {
    result: Mutex<Option<Result<T>>>,
    done: Condvar,
}

impl<T> Default for Ticket<T> {
    fn default() -> Self {
        Self {
            result: Mutex::default(),
            done: Condvar::default(),
        }
    }
}

impl<T: Clone> Ticket<T> {
    pub(crate) fn finish(&self, result: Result<T>) {
        *self.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        self.done.notify_all();
    }

    /// Returns the result, or `None` if the launch or operation has not completed.
    pub(crate) fn result(&self) -> Option<Result<T>> {
        self.result
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// A launch that is running.
#[derive(Debug)]
pub(crate) struct Grid {
    pub(crate) program: Arc<Program>,
    pub(crate) module: Arc<LoadedModule>,
    /// Number of the launch in this process.
    pub(crate) id: u64,
    pub(crate) device: u32,
    pub(crate) blocks: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_shared: u32,
    pub(crate) params: Vec<u8>,
    pub(crate) cost: u32,
    pub(crate) view: View,
    /// Blocks that are not resident yet.
    pub(crate) waiting: VecDeque<u64>,
    pub(crate) resident: Vec<Block>,
    pub(crate) counts: Counts,
    pub(crate) ticket: Arc<Ticket<Counts>>,
}

impl Grid {
    /// Checks a launch.
    pub(crate) fn new(
        launch: &Launch,
        module: &Arc<LoadedModule>,
        memory: &Arc<dyn Memory>,
        id: u64,
    ) -> Result<Self> {
        let program = module.module().program(&launch.kernel)?;
        let Some(entry) = module.module().entry(&launch.kernel) else {
            return Err(Error::launch(
                &launch.kernel,
                "the module has no such kernel",
            ));
        };
        let error = |detail: String| Err(Error::launch(&launch.kernel, detail));
        let product = |sizes: [u32; 3]| {
            sizes
                .iter()
                .try_fold(1u64, |all, size| all.checked_mul(u64::from(*size)))
        };
        let (Some(blocks @ 1..), Some(threads @ 1..)) =
            (product(launch.blocks), product(launch.threads))
        else {
            return error(format!(
                "a launch needs at least one block and one thread: {:?} blocks, {:?} threads",
                launch.blocks, launch.threads
            ));
        };
        let most = match entry.max_threads {
            0 => 1024,
            threads => threads.min(1024),
        };
        if threads > u64::from(most) {
            return error(format!(
                "{threads} threads of a block; at most {most} are allowed"
            ));
        }
        let bytes = entry.param_bytes();
        if launch.params.len() != bytes {
            return error(format!(
                "{} bytes of parameters; the kernel has {bytes}",
                launch.params.len()
            ));
        }
        Ok(Self {
            program,
            id,
            device: launch.device,
            blocks: launch.blocks,
            block: launch.threads,
            dynamic_shared: launch.dynamic_shared,
            params: launch.params.clone(),
            cost: launch.cost,
            view: View::new(Arc::clone(memory), launch.device, module.ranges()),
            waiting: (0..blocks).collect(),
            resident: Vec::new(),
            counts: Counts::default(),
            ticket: Arc::default(),
            module: Arc::clone(module),
        })
    }

    /// Returns the number of threads of a block.
    pub(crate) fn threads(&self) -> u32 {
        self.block.iter().product()
    }

    /// Returns true if all blocks have completed.
    pub(crate) fn is_complete(&self) -> bool {
        self.waiting.is_empty() && self.resident.is_empty()
    }
}

/// Fills shared memory, whose initial contents are undefined.
const POISON: u8 = 0xcb;

/// A resident block.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) shared: Shared,
    pub(crate) warps: Vec<Warp>,
    /// The paths of values, with [`Config::trips`](crate::Config::trips).
    pub(crate) trips: Option<Box<BlockTrips>>,
}

impl Block {
    /// Creates block `number` of a grid.
    pub(crate) fn new(grid: &Grid, number: u64, shadow: Option<&mut Shadow>) -> Self {
        let threads = grid.threads();
        let [x, y, _] = grid.blocks.map(u64::from);
        let bytes = grid.program.shared_bytes as usize + grid.dynamic_shared as usize;
        let mut warps: Vec<Warp> = (0..threads.div_ceil(32))
            .map(|warp| Warp::new(&grid.program, warp, (threads - warp * 32).min(32)))
            .collect();
        if let Some(shadow) = shadow {
            let agents = shadow.admit(&grid.program, grid.id, grid.device, number, threads);
            for (warp, agents) in warps.iter_mut().zip(agents.chunks(LANES)) {
                warp.agents = agents.to_vec();
            }
        }
        Self {
            shared: Shared {
                bytes: vec![POISON; bytes],
                barriers: Default::default(),
                live: warps.iter().map(|warp| warp.live).collect(),
                threads,
                all: threads,
                cells: Cells::default(),
                number,
                coordinates: [
                    (number % x) as u32,
                    (number / x % y) as u32,
                    (number / x / y) as u32,
                ],
            },
            warps,
            trips: None,
        }
    }
}
