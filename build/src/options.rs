//! Options of a compilation.

use crate::host::Family;

/// Options of a compilation.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Enables rustc's jump threading, which clones barriers into divergent branches. Only a
    /// negative control of the verifier sets it.
    #[doc(hidden)]
    pub jump_threading: bool,
    /// Families of kernels. Each family gets its own image, and the kernels outside all families
    /// share one more image. If empty, one image holds all kernels.
    pub families: Vec<Family>,
    /// Exports the grid form of every kernel, `NAME__grid`, instead of `NAME`. Tests launch grid
    /// forms to run all ranks in a multi-rank grid.
    #[doc(hidden)]
    pub multi_rank_grid: bool,
    /// Compiles kernels whose waits have no bounds, to measure the cost of bounded waits.
    #[doc(hidden)]
    pub unbounded: bool,
}

impl Options {
    /// Returns the suffix that these options append to the package's name in the names of files and
    /// folders.
    pub fn suffix(&self) -> String {
        let parts = [
            (self.jump_threading, "-threaded"),
            (self.multi_rank_grid, "-multi-rank-grid"),
            (self.unbounded, "-unbounded"),
            (!self.families.is_empty(), "-families"),
        ];
        let set = parts.into_iter().filter(|(is, _)| *is);
        set.map(|(_, name)| name).collect()
    }
}
