//! An executing fake of the CUDA driver library, for tests without a GPU.
//!
//! The shared object exports the C functions of `libcuda.so.1` that Fusewire's CUDA device calls, and executes
//! them: device memory is memory files, kernels are their native entries, each block on a thread of its own,
//! streams and graphs are those of [`fusewire::cpu`]. Rules of the driver that a test without a GPU could break
//! unseen are enforced: handles, contexts, access to mapped memory, captures, callbacks, shapes of launches.
//!
//! [`install`] places it where a child process with `LD_LIBRARY_PATH` finds it. [`stand_in`] writes images that
//! it can load; images that `fusewire-build` made work as well, for only their declarations are read.
//!
//! | variable | meaning |
//! |---|---|
//! | `FUSEWIRE_CUDA_FAKE_DEVICES` | number of devices (1); 0: `cuInit` says that there is none |
//! | `FUSEWIRE_CUDA_FAKE_SM` | compute capability, ten times (90) |
//! | `FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS` | multiprocessors of a device (132) |
//! | `FUSEWIRE_CUDA_FAKE_MEMORY` | bytes of a device's memory (an H200's) |
//! | `FUSEWIRE_CUDA_FAKE_DRIVER` | version of the driver (12080) |
//! | `FUSEWIRE_CUDA_FAKE_DESCRIPTORS=0` | memory cannot be exported as a file descriptor |
//! | `FUSEWIRE_CUDA_FAKE_FABRIC=NAME` | memory can be exported as a fabric handle, to processes with the same name |
//! | `FUSEWIRE_CUDA_FAKE_NVML=STATE:STATUS:CLUSTER:CLIQUE` | what the management library says of every device's fabric (not supported) |
//! | `FUSEWIRE_CUDA_FAKE_HOST` | a number in the identities of the devices (0), so that those of two hosts differ |
//! | `FUSEWIRE_CUDA_FAKE_MULTICAST=1` | the devices can be parts of multicast objects |
//! | `FUSEWIRE_CUDA_FAKE_POISON=0` | new memory is zero; else it is filled with 0xcb |
//! | `FUSEWIRE_CUDA_FAKE_GUARD=1` | the host's accesses to device memory crash while no device works |
//! | `FUSEWIRE_CUDA_FAKE_FAIL=NAME:NTH=CODE,..` | the n-th call of a function fails with a code |
//! | `FUSEWIRE_CUDA_FAKE_REPORT=PATH` | calls by name and live handles, as JSON, when the process ends |
//!
//! The exported functions `fusewireCudaFakeCalls`, `fusewireCudaFakeLive`, `fusewireCudaFakeReport` and
//! `fusewireCudaFakeFail` do the last two while the process runs; `fusewireCudaFakeLaunchCount` counts launches by entry,
//! `fusewireCudaFakeLaunches` returns the shape and attributes of a kernel's launches.
//!
//! An entry `NAME__grid` is the grid form of the kernel `NAME` (images of `fusewire-build build --multi-rank-grid`): it runs the
//! blocks of all ranks, each with its rank's parameters.
//!
//! Multicast objects have all of the driver's rules and nothing of the switch: kernels of the host (`multimem` of
//! `fusewire-device`) reach the parts of a window by their own addresses, and nothing can touch the object's. Fabric handles
//! go between processes of one machine, which may say that they are on several hosts.
//!
//! What it does not see: what a kernel's PTX does (only the declarations are read), threads of a block (a block has
//! one lane), kernels that follow an address which was freed (the process crashes then).

#![allow(non_snake_case)] // the names of cuda.h

mod api;
mod core;
mod install;
mod status;

pub use self::core::image::{stand_in, stand_in_multi_rank_grid};
pub use self::core::kernel::register;
pub use self::install::{NAMES, install, library};
