//! The shared object of the fake CUDA driver, [`fusewire_cuda_fake`], with the kernels of this
//! workspace.
//!
//! [`install`] fills a folder with links to the shared object. A child process that has the folder
//! in its `LD_LIBRARY_PATH` loads the fake. It can load images of `fusewire-build`. [`stand_in`]
//! creates images for native execution: they have declarations, but no code.

mod install;

pub use fusewire_cuda_fake::testing::{
    kernels_of, register, stand_in, stand_in_multi_rank_grid, stand_in_of,
};

pub use self::install::{NAMES, install, library};

// Links the kernels of these crates, so that the fake finds their native entries.
use {seeded_bugs as _, vocab_argmax as _};
