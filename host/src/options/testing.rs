//! Options for tests of the library and of kernels.

/// Options that programs in production leave alone: `Options::testing`.
#[derive(Clone, Copy, Debug)]
pub struct TestOptions {
    /// Number of lanes of a block on the CPU: 1 in production, 32, 64 or 128 in tests, where every
    /// lane is a thread. Agreed.
    pub lanes: u32,
    /// Number of lanes of a warp on the CPU: a power of two up to 64, which divides the block into
    /// 1 to 8 warps. 0 selects one warp of all lanes of the block, or warps of 64 lanes if the
    /// block has more. Agreed.
    pub warp: u32,
    /// Number of polls before a wait yields the core. The default depends on the number of cores
    /// and ranks.
    pub spins: Option<u32>,
    /// First epoch number, less than 2^47, for tests of wrap-around. Agreed.
    pub first_epoch: u64,
    /// Grid mode of launches by ranks that share a GPU. Agreed.
    pub grid_mode: GridMode,
    /// Network that connects the ranks on the CPU. Agreed.
    pub network: Option<TestNetwork>,
    /// Number of successive ranks that count as one host, also if they are on the same one. Hosts
    /// are connected as real ones are. Agreed.
    pub ranks_per_host: Option<u32>,
    /// Treats GPU memory that other code allocated as coarse-grained, as it is on AMD GPUs.
    pub coarse_memory: bool,
}

impl Default for TestOptions {
    fn default() -> Self {
        Self {
            lanes: 1,
            warp: 0,
            spins: None,
            first_epoch: 0,
            grid_mode: GridMode::Separate,
            network: None,
            ranks_per_host: None,
            coarse_memory: false,
        }
    }
}

/// A network for tests: kernels reach ranks of other teams by requests, which are delayed and
/// reordered, and not by load and store.
#[derive(Clone, Copy, Debug)]
pub struct TestNetwork {
    /// Number of successive ranks that reach each other by load and store. Agreed.
    pub team: u32,
    /// Seed of the delays and the order of requests.
    pub seed: u64,
}

/// Determines whether ranks that share a GPU launch separate grids or one common grid.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GridMode {
    /// Each rank launches its own grids, as if it had a GPU to itself. Creating the communicator
    /// checks that the blocks of all ranks fit on the GPU at the same time. The GPU may still run
    /// the grids in sequence.
    #[default]
    Separate,
    /// The blocks of all ranks run in one grid, in which all blocks are resident at the same time.
    /// For tests and sanitizers. The ranks must be threads of one process and share one GPU. The
    /// image `fusewire-kernels-multi-rank-grid` must exist (`fusewire-build build
    /// --multi-rank-grid`).
    ///
    /// A collective is launched when all ranks have called it. Every call blocks until then,
    /// including the `_async` forms. All ranks must call the collectives of all their communicators
    /// in the same order. Operations that only some ranks launch (send, recv, batches, windows,
    /// user kernels) run as with [`GridMode::Separate`]. Collectives cannot be captured.
    MultiRankGrid,
}
