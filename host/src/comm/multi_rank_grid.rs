//! Communicators whose ranks share a GPU in a multi-rank grid ([`GridMode::MultiRankGrid`]): checks
//! of the requirements, creation of the grid, and selection of the launches for it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use fusewire_device::call::Operation;
use fusewire_device::native::KernelInfo;

use super::Inner;
use super::config::CommConfig;
use super::group::random;
use super::on_gpu::THREADS;
use crate::gpu::multi_rank_grid::{MultiRankGrid, MultiRankGridOptions};
use crate::memory::MemoryDescriptor;
use crate::options::testing::GridMode;
use crate::{Error, Result};

/// Kernel families of the library that all ranks launch together: each rank launches the same
/// kernels in the same order.
const GRID_FAMILIES: [&str; 8] = [
    "all_reduce",
    "barrier",
    "fused",
    "movement",
    "nvls",
    "reduction",
    "vector",
    "vocab",
];

/// Returns true if a launch of `kernel` for `operation` is combined with those of all ranks. Other
/// kernels are launched separately, even in this mode: kernels between two ranks (send, recv,
/// batches, windows), kernels that wait for no peer (quantize), kernels that wait for a consumer or
/// producer, which may be enqueued after another rank's launch (overlap), and user kernels, because
/// the library does not know which ranks launch them.
pub(super) fn is_grid_launch(kernel: &KernelInfo, operation: Operation) -> bool {
    operation != Operation::User
        && kernel.module.starts_with("fusewire_kernels::")
        && GRID_FAMILIES.contains(&kernel.family())
}

/// Grids of this process, by the number that rank 0 broadcasts.
static GRIDS: Mutex<Option<HashMap<u64, Weak<MultiRankGrid>>>> = Mutex::new(None);

/// Kinds of rank 0's broadcast in the rendezvous: the number of the grid, or the reason for its
/// absence.
const NUMBER: u8 = b'#';
const REASON: u8 = b'!';

/// Key of the broadcast.
pub(super) const KEY: &str = "grid";

impl CommConfig {
    fn is_multi_rank_grid(&self) -> bool {
        self.options.testing.grid_mode == GridMode::MultiRankGrid
    }

    fn no_grid(&self, detail: &str) -> Error {
        Error::Communicator {
            name: self.name.clone(),
            detail: format!(
                "a multi-rank grid (Options::grid_mode) is for ranks that are threads of one \
                 process and share one GPU: {detail}"
            ),
        }
    }

    /// Refuses backends and devices that do not support a multi-rank grid. Needs no communication.
    pub(super) fn check_multi_rank_grid(&self, backend: Option<&str>) -> Result<()> {
        if !self.is_multi_rank_grid() {
            return Ok(());
        }
        if let Some(backend) = backend {
            return Err(self.no_grid(&format!("backend {backend} launches its kernels itself")));
        }
        if !self.device.is_gpu() {
            return Err(self.no_grid("the device is the CPU, where every block has a thread"));
        }
        Ok(())
    }

    /// Refuses ranks on several hosts.
    pub(super) fn check_multi_rank_grid_over(&self, (rank, host): &(u32, String)) -> Result<()> {
        if self.is_multi_rank_grid() {
            return Err(self.no_grid(&format!(
                "rank {rank} is on another host ({host}) than rank {}",
                self.rank
            )));
        }
        Ok(())
    }

    /// Refuses ranks that are not on one GPU and in one process. All ranks compare the same peer
    /// info. Loads the image, and refuses ranks whose [`field@crate::Options::blocks`] are not
    /// resident together in one grid. Returns the greatest number of blocks of a rank that are.
    pub(super) fn check_multi_rank_grid_of<'a>(
        &self,
        infos: impl Iterator<Item = &'a MemoryDescriptor>,
    ) -> Result<u32> {
        if !self.is_multi_rank_grid() {
            return Ok(u32::MAX);
        }
        let mut first = None;
        for (rank, info) in infos.enumerate() {
            let (process, uuid) = (info.process(), info.uuid());
            let (first_process, first_uuid) = *first.get_or_insert((process, uuid));
            if process != first_process {
                return Err(self.no_grid(&format!(
                    "rank 0 is in process {}, rank {rank} in process {}; start the ranks as \
                     threads, or choose GridMode::Separate",
                    first_process.0, process.0
                )));
            }
            if uuid != first_uuid {
                return Err(self.no_grid(&format!(
                    "rank {rank} is on another GPU than rank 0; give all ranks the same device, \
                     or choose GridMode::Separate"
                )));
            }
        }
        let gpu = crate::gpus::open(self.device)?;
        let threads = match self.options.threads {
            0 => THREADS,
            threads => threads,
        };
        let image = gpu.multi_rank_grid(&grid_kernels())?;
        image.resident_blocks(&gpu, self.options.blocks, threads, self.size)
    }

    /// Returns the grid of these ranks. Rank 0 creates it and broadcasts its number.
    pub(super) fn grid(&self) -> Result<Option<Arc<MultiRankGrid>>> {
        if !self.is_multi_rank_grid() {
            return Ok(None);
        }
        let mut made = None;
        let said = self
            .rendezvous()
            .broadcast(KEY, || match self.make_grid() {
                Ok((number, grid)) => {
                    made = Some(Ok(grid));
                    said(NUMBER, &number.to_le_bytes())
                }
                Err(error) => {
                    let reason = said(REASON, error.to_string().as_bytes());
                    made = Some(Err(error));
                    reason
                }
            })?;
        if let Some(made) = made {
            return made.map(Some);
        }
        let number = match said.split_first() {
            Some((&NUMBER, number)) => number.try_into().ok().map(u64::from_le_bytes),
            Some((&REASON, reason)) => {
                let reason = String::from_utf8_lossy(reason);
                return Err(self.no_grid(&format!("rank 0 could not prepare it: {reason}")));
            }
            _ => None,
        };
        let grid = number.and_then(|number| {
            let grids = GRIDS.lock().unwrap_or_else(PoisonError::into_inner);
            grids.as_ref()?.get(&number)?.upgrade()
        });
        match grid {
            Some(grid) => Ok(Some(grid)),
            None => Err(self.no_grid("rank 0 has gone, or is in another process")),
        }
    }

    fn make_grid(&self) -> Result<(u64, Arc<MultiRankGrid>)> {
        let gpu = crate::gpus::open(self.device)?;
        let image = gpu.multi_rank_grid(&grid_kernels())?;
        let options = MultiRankGridOptions {
            timeout: self.options.timeout,
            ..MultiRankGridOptions::new(self.size)
        };
        let grid = Arc::new(MultiRankGrid::on(&gpu, image.module(), options)?);
        let number = random()?;
        let mut grids = GRIDS.lock().unwrap_or_else(PoisonError::into_inner);
        let grids = grids.get_or_insert_default();
        grids.retain(|_, grid| grid.strong_count() > 0);
        grids.insert(number, Arc::downgrade(&grid));
        Ok((number, grid))
    }
}

fn said(kind: u8, what: &[u8]) -> Vec<u8> {
    [&[kind], what].concat()
}

/// Returns the library's kernels that a multi-rank grid may launch.
fn grid_kernels() -> Vec<&'static KernelInfo> {
    let all = fusewire_kernels::KERNELS.iter().copied().flatten();
    all.filter(|kernel| GRID_FAMILIES.contains(&kernel.family()))
        .collect()
}

impl Inner {
    /// Returns the error that broke the grid, if it is broken.
    pub(super) fn grid_failure(&self) -> Option<Error> {
        self.executor.grid()?.failure()
    }

    /// Reports this rank's failure to the ranks that wait for it in the grid.
    pub(super) fn leave_grid(&self, error: &Error) {
        if let Some(grid) = self.executor.grid() {
            grid.fail(error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Families that ranks launch separately.
    const SEPARATE_FAMILIES: [&str; 7] = [
        "batch",
        "moe",
        "one_sided",
        "overlap",
        "point",
        "quantize",
        "window",
    ];

    #[test]
    fn every_family_is_launched_as_a_grid_or_separately() {
        for kernel in fusewire_kernels::KERNELS.iter().copied().flatten() {
            let family = kernel.family();
            assert!(
                GRID_FAMILIES.contains(&family) != SEPARATE_FAMILIES.contains(&family),
                "{family} must be in GRID_FAMILIES, if all ranks launch it together, or in \
                 SEPARATE_FAMILIES"
            );
            assert_eq!(
                is_grid_launch(kernel, Operation::AllReduce),
                GRID_FAMILIES.contains(&family)
            );
            assert!(!is_grid_launch(kernel, Operation::User));
        }
    }
}
