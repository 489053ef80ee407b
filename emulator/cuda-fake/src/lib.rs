//! A fake of the CUDA driver library that executes calls and kernels, for tests without a GPU.
//!
//! The shared object exports the C functions of `libcuda.so.1` that Fusewire's CUDA device calls,
//! and executes them. Device memory is backed by memory files. [`fusewire::cpu`] implements streams
//! and graphs. The fake enforces the rules of the driver about handles, contexts, access to mapped
//! memory, captures, callbacks and launch shapes, so tests without a GPU find violations.
//!
//! `FUSEWIRE_FAKE_GPU` selects the execution of kernels. With `native`, the default, a kernel runs
//! as its native entry, with one thread per block. With `ptx`, [`fusewire_emulator`] executes the
//! PTX of the loaded image, with all warps and lanes of the launch.
//!
//! [`install`] fills a folder with links to the shared object. A child process that has the folder
//! in its `LD_LIBRARY_PATH` loads the fake. It can load images of `fusewire-build`. [`stand_in`]
//! creates images for native execution: they have declarations, but no code.
//!
//! | variable | meaning (default in parentheses) |
//! |---|---|
//! | `FUSEWIRE_FAKE_GPU` | `ptx`: the emulator executes images; `native`: native entries (native) |
//! | `FUSEWIRE_CUDA_FAKE_SCHEDULER` | `random:SEED` or `starve:DEVICE:BLOCK`, `*` for all (`round-robin`) |
//! | `FUSEWIRE_CUDA_FAKE_MEMORY_MODEL` | memory model: `unchecked`, `weak` (`checked`) |
//! | `FUSEWIRE_CUDA_FAKE_PATCH=FILE:LINE` | replaces a line of the kernel that the file is named after |
//! | `FUSEWIRE_CUDA_FAKE_HANG` | seconds after which emulated launches without progress fail (300) |
//! | `FUSEWIRE_CUDA_FAKE_TRIPS=1` | emulated launches count dependent loads and fences |
//! | `FUSEWIRE_CUDA_FAKE_THREADS` | maximum number of threads of a block (1024) |
//! | `FUSEWIRE_CUDA_FAKE_DEVICES` | number of devices (1); 0: `cuInit` finds no device |
//! | `FUSEWIRE_CUDA_FAKE_SM` | compute capability times ten (90) |
//! | `FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS` | number of SMs of a device (132) |
//! | `FUSEWIRE_CUDA_FAKE_MEMORY` | size of a device's memory in bytes (the size of an H200) |
//! | `FUSEWIRE_CUDA_FAKE_DRIVER` | version of the driver (12080) |
//! | `FUSEWIRE_CUDA_FAKE_DESCRIPTORS=0` | memory cannot be exported as a file descriptor |
//! | `FUSEWIRE_CUDA_FAKE_FABRIC=NAME` | processes with the same name can exchange fabric handles |
//! | `FUSEWIRE_CUDA_FAKE_NVML=STATE:STATUS:CLUSTER:CLIQUE` | fabric info of NVML (not supported) |
//! | `FUSEWIRE_CUDA_FAKE_HOST` | number of the host (0), which is part of the devices' UUIDs |
//! | `FUSEWIRE_CUDA_FAKE_MULTICAST=1` | the devices support multicast objects |
//! | `FUSEWIRE_CUDA_FAKE_ATOMICS=0` | the devices have no native atomics for each other's memory |
//! | `FUSEWIRE_CUDA_FAKE_PEER_ACCESS=0` | no device can access memory of another device |
//! | `FUSEWIRE_CUDA_FAKE_POISON=0` | new memory is zeroed instead of filled with 0xcb |
//! | `FUSEWIRE_CUDA_FAKE_GUARD=1` | host accesses to device memory crash while devices are idle |
//! | `FUSEWIRE_CUDA_FAKE_FAIL=NAME:NTH=CODE,..` | the n-th call of a function fails with a code |
//! | `FUSEWIRE_CUDA_FAKE_KERNELS=PATH` | shared object with further kernels ([`stand_in_of`]) |
//! | `CUDA_DEVICE_MAX_CONNECTIONS` | number of hardware queues per priority (8) |
//! | `FUSEWIRE_CUDA_FAKE_REPORT=PATH` | path of a JSON report that is written at exit |
//!
//! Tests control the fake at run time through exported functions. `fusewireCudaFakeFail` makes a
//! call fail. `fusewireCudaFakeCalls`, `fusewireCudaFakeLive` and `fusewireCudaFakeReport` return
//! the numbers of calls and of live handles. `fusewireCudaFakeLaunchCount` counts launches by
//! entry. `fusewireCudaFakeGreenStream` creates a stream that may use only a part of the SMs.
//! `fusewireCudaFakeLaunches` returns the shapes and attributes of a kernel's launches,
//! `fusewireCudaFakeExecuted` the lines of a kernel that the emulator has executed, and
//! `fusewireCudaFakeTrips` their dependent loads and fences.
//!
//! An entry `NAME__grid` is the grid form of the kernel `NAME` (images of `fusewire-build build
//! --multi-rank-grid`). It runs the blocks of all ranks, and each block gets the parameters of its
//! rank.
//!
//! Multicast objects follow the driver's rules. Native kernels (`multimem` of `fusewire-device`)
//! access the memory of each rank through the unicast address of that memory. An access to the
//! object's address fails. In emulated kernels, `multimem` instructions access the object's
//! address, and all other accesses to it fail. Fabric handles work between processes of one
//! machine. Settings can make these processes appear to be on several hosts.
//!
//! A fault of an emulated kernel becomes an error of its context: 700 (illegal address), 716
//! (misaligned address), 715 (`trap`), or 719 (all other errors, including races and launches
//! without progress). The fake prints the text of the error to stderr. It names the kernel,
//! device, block, thread and instruction.
//!
//! The fake reports the register counts of ptxas for the library's kernels, so their occupancy
//! equals that on a GPU. Streams share hardware queues: if there are more streams
//! of one priority than queues, work of some streams waits for work of others.
//!
//! A kernel that gets the constants of a communicator may access the workspaces and windows of all
//! its ranks. Before the kernel runs, the fake checks that the device has access to them: memory of
//! `cuMemAlloc` on another device needs `cuCtxEnablePeerAccess`, virtual memory needs
//! `cuMemSetAccess` for this device.
//!
//! Limits of native execution: the fake ignores the PTX code of a kernel and reads only its
//! declarations. A block has one lane. A kernel that accesses freed memory crashes the process.
//!
//! Limits of emulation: those of [`fusewire_emulator`]. One machine executes all launches of a
//! process, so only one of its threads executes instructions at a time. `griddepcontrol` has no
//! effect, because launches of a stream complete in order.

#![allow(non_snake_case)] // the names of cuda.h

mod api;
mod core;
mod install;
mod status;

pub use self::core::image::{stand_in, stand_in_multi_rank_grid};
pub use self::core::kernel::{kernels_of, register};
pub use self::core::shared_object::stand_in_of;
pub use self::install::{NAMES, install, library};
