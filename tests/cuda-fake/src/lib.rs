//! Executing fake of the CUDA driver library, for tests without a GPU.
//!
//! The shared object exports the C functions of `libcuda.so.1` that Fusewire's CUDA device calls,
//! and executes them. Device memory consists of memory files. Kernels run their native entries,
//! with a thread for each block. Streams and graphs are those of [`fusewire::cpu`]. The fake
//! enforces rules of the driver that a test without a GPU could violate unnoticed: handles,
//! contexts, access to mapped memory, captures, callbacks, launch shapes.
//!
//! [`install`] links it into a folder for the `LD_LIBRARY_PATH` of a child process. [`stand_in`]
//! creates images that it can load; it can also load images of `fusewire-build`, of which it reads
//! only the declarations.
//!
//! | variable | meaning |
//! |---|---|
//! | `FUSEWIRE_CUDA_FAKE_DEVICES` | number of devices (1); 0: `cuInit` finds no device |
//! | `FUSEWIRE_CUDA_FAKE_SM` | compute capability times ten (90) |
//! | `FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS` | multiprocessors of a device (132) |
//! | `FUSEWIRE_CUDA_FAKE_MEMORY` | bytes of a device's memory (an H200's) |
//! | `FUSEWIRE_CUDA_FAKE_DRIVER` | version of the driver (12080) |
//! | `FUSEWIRE_CUDA_FAKE_DESCRIPTORS=0` | memory cannot be exported as a file descriptor |
//! | `FUSEWIRE_CUDA_FAKE_FABRIC=NAME` | processes with the same name can exchange fabric handles |
//! | `FUSEWIRE_CUDA_FAKE_NVML=STATE:STATUS:CLUSTER:CLIQUE` | fabric info of NVML (not supported) |
//! | `FUSEWIRE_CUDA_FAKE_HOST` | number of the host (0), which is part of the devices' UUIDs |
//! | `FUSEWIRE_CUDA_FAKE_MULTICAST=1` | the devices support multicast objects |
//! | `FUSEWIRE_CUDA_FAKE_POISON=0` | new memory is zero, instead of filled with 0xcb |
//! | `FUSEWIRE_CUDA_FAKE_GUARD=1` | host accesses to device memory crash while devices are idle |
//! | `FUSEWIRE_CUDA_FAKE_FAIL=NAME:NTH=CODE,..` | the n-th call of a function fails with a code |
//! | `FUSEWIRE_CUDA_FAKE_REPORT=PATH` | writes calls by name and live handles as JSON at exit |
//!
//! Tests control the fake at run time through exported functions. `fusewireCudaFakeFail` makes a
//! call fail. `fusewireCudaFakeCalls`, `fusewireCudaFakeLive` and `fusewireCudaFakeReport` return
//! calls and live handles. `fusewireCudaFakeLaunchCount` counts launches by entry;
//! `fusewireCudaFakeLaunches` returns shape and attributes of a kernel's launches.
//!
//! An entry `NAME__grid` is the grid form of the kernel `NAME` (images of
//! `fusewire-build build --multi-rank-grid`): it runs the blocks of all ranks, each with its rank's
//! parameters.
//!
//! Multicast objects follow the driver's rules, but have no switch: native kernels (`multimem` of
//! `fusewire-device`) access the members of a window through their own addresses, and an access to
//! the object's address fails. Fabric handles work between processes of one machine, which can
//! claim to be on several hosts.
//!
//! Limits: the fake reads only the declarations of a kernel's PTX, not its code. A block has one
//! lane. A kernel that accesses freed memory crashes the process.

#![allow(non_snake_case)] // the names of cuda.h

mod api;
mod core;
mod install;
mod status;

pub use self::core::image::{stand_in, stand_in_multi_rank_grid};
pub use self::core::kernel::register;
pub use self::install::{NAMES, install, library};
