//! NVIDIA GPUs for tests of communication kernels, without hardware: a fake of the CUDA driver.
//!
//! [`install`] replaces the CUDA driver library of this process. [`fusewire`] then finds as many
//! GPUs as the settings say. Their launches execute the PTX of the library and of kernel crates,
//! with all warps and lanes, on [`fusewire_emulator`]. Races, reads of uninitialised memory,
//! invalid accesses and divergent barriers are errors of the launch.
//!
//! ```no_run
//! use fusewire::{DType, Device, Options, ReduceOp, run_threads_each};
//!
//! let mut settings = fusewire_cuda_fake::Settings::default();
//! settings.devices = 4;
//! fusewire_cuda_fake::install(&settings)?;
//!
//! let mut options = Options::default();
//! options.blocks = 2;
//! options.threads = 64; // the emulator executes small blocks faster
//! let ranks = run_threads_each(Device::Cuda, "fusewire", 4, &options, |comm| {
//!     let x = comm.tensor(DType::F32, 100)?;
//!     x.copy_from(&[1.0_f32; 100])?;
//!     comm.all_reduce(&x, ReduceOp::Sum)?;
//!     x.to_vec::<f32>()
//! });
//! for sums in ranks {
//!     assert_eq!(sums?, [4.0; 100]);
//! }
//! # Ok::<(), fusewire::Error>(())
//! ```
//!
//! The guide `docs/emulator.md` in the repository shows a test of a kernel crate.
//!
//! # The fake
//!
//! The crate implements the C functions of `libcuda.so.1` and of NVML that Fusewire calls. Device
//! memory is backed by memory files. [`fusewire::cpu`] implements streams and graphs. The fake
//! enforces the rules of the driver about handles, contexts, access to mapped memory, captures,
//! callbacks and launch shapes, so tests without a GPU find violations.
//!
//! With [`Execution::Native`], a kernel runs as its native entry instead of its PTX, with one
//! thread per block.
//!
//! # Environment variables
//!
//! These variables have priority over [`Settings`]. A variable with a wrong value makes [`install`]
//! fail.
//!
//! | variable | setting, or meaning (default in parentheses) |
//! |---|---|
//! | `FUSEWIRE_FAKE_GPU` | [`Settings::execution`]: `ptx` or `native` (`native` in the shared object) |
//! | `FUSEWIRE_CUDA_FAKE_DEVICES` | [`Settings::devices`] |
//! | `FUSEWIRE_CUDA_FAKE_SM` | [`Settings::capability`] |
//! | `FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS` | [`Settings::multiprocessors`] |
//! | `FUSEWIRE_CUDA_FAKE_THREADS` | [`Settings::max_threads`] |
//! | `FUSEWIRE_CUDA_FAKE_MEMORY` | [`Settings::memory_bytes`] |
//! | `FUSEWIRE_CUDA_FAKE_MULTICAST` | [`Settings::multicast`]: 0 or 1 |
//! | `FUSEWIRE_CUDA_FAKE_SCHEDULER` | [`Settings::scheduler`]: `round-robin` (the default of the shared object), `random:SEED` or `starve:DEVICE:BLOCK`, `*` for all |
//! | `FUSEWIRE_CUDA_FAKE_MEMORY_MODEL` | [`Settings::memory_model`]: `unchecked`, `checked` (the default of the shared object) or `weak` |
//! | `FUSEWIRE_CUDA_FAKE_HANG` | [`Settings::hang_after`], in seconds |
//! | `FUSEWIRE_CUDA_FAKE_TRIPS` | [`Settings::trips`]: 0 or 1 |
//! | `CUDA_DEVICE_MAX_CONNECTIONS` | number of hardware queues per priority (8) |
//!
//! The tests of Fusewire also use these:
//!
//! | variable | meaning (default in parentheses) |
//! |---|---|
//! | `FUSEWIRE_CUDA_FAKE_PATCH=FILE:LINE` | replaces a line of the kernel that the file is named after |
//! | `FUSEWIRE_CUDA_FAKE_DRIVER` | version of the driver (12080) |
//! | `FUSEWIRE_CUDA_FAKE_DESCRIPTORS=0` | memory cannot be exported as a file descriptor |
//! | `FUSEWIRE_CUDA_FAKE_FABRIC=NAME` | processes with the same name can exchange fabric handles |
//! | `FUSEWIRE_CUDA_FAKE_NVML=STATE:STATUS:CLUSTER:CLIQUE` | fabric info of NVML (not supported) |
//! | `FUSEWIRE_CUDA_FAKE_HOST` | number of the host (0), which is part of the devices' UUIDs |
//! | `FUSEWIRE_CUDA_FAKE_ATOMICS=0` | the devices have no native atomics for each other's memory |
//! | `FUSEWIRE_CUDA_FAKE_PEER_ACCESS=0` | the devices report no peer access and refuse to enable it |
//! | `FUSEWIRE_CUDA_FAKE_POISON=0` | new memory is zeroed instead of filled with 0xcb |
//! | `FUSEWIRE_CUDA_FAKE_GUARD=1` | host accesses to device memory crash while devices are idle |
//! | `FUSEWIRE_CUDA_FAKE_FAIL=NAME:NTH=CODE,..` | the n-th call of a function fails with a code |
//! | `FUSEWIRE_CUDA_FAKE_KERNELS=PATH` | shared object with further kernels, for native execution |
//! | `FUSEWIRE_CUDA_FAKE_REPORT=PATH` | path of a JSON report that is written at exit |
//!
//! # Shared object
//!
//! With the feature `exports`, a shared object of this crate has the functions under their names in
//! `libcuda.so.1`, and can replace the driver of any process. The repository builds one in
//! `tests/cuda-fake`. Tests control it at run time through further exported functions.
//! `fusewireCudaFakeFail` makes a call fail. `fusewireCudaFakeCalls`, `fusewireCudaFakeLive` and
//! `fusewireCudaFakeReport` return the numbers of calls and of live handles.
//! `fusewireCudaFakeLaunchCount` counts launches by entry. `fusewireCudaFakeGreenStream` creates a
//! stream that may use only a part of the SMs. `fusewireCudaFakeLaunches` returns the shapes and
//! attributes of a kernel's launches, `fusewireCudaFakeExecuted` the lines of a kernel that the
//! emulator has executed, and `fusewireCudaFakeTrips` their dependent loads and fences.
//!
//! # Behaviour
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
//! # Limits
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
mod status;

use std::collections::BTreeMap;
use std::sync::Mutex;

pub use fusewire_emulator as emulator;
pub use fusewire_emulator::{MemoryModel, Scheduler};

pub use self::core::settings::{Execution, Settings};

/// Replaces the CUDA driver library of this process with the fake.
///
/// The first call installs the fake, for the rest of the process. A later call with equal settings
/// does nothing. As on a real GPU, all calls on a device fail after an error of a launch, so a test
/// that expects an error needs a program of its own (a file in `tests/`).
///
/// # Errors
/// [`fusewire::Error::InvalidArgument`] if no device can have the settings, if an environment
/// variable has a wrong value, or if the process has already looked for the CUDA driver library or
/// has installed the fake with other settings.
pub fn install(settings: &Settings) -> fusewire::Result<()> {
    static INSTALLED: Mutex<Option<Settings>> = Mutex::new(None);
    let refused = |detail: String| fusewire::Error::InvalidArgument {
        operation: "fusewire_cuda_fake::install",
        detail,
    };
    let mut installed = self::core::lock(&INSTALLED);
    match &*installed {
        Some(first) if first == settings => return Ok(()),
        Some(_) => {
            return Err(refused(
                "this process has already installed the fake with other settings; use the same \
                 settings in all tests of a program"
                    .to_owned(),
            ));
        }
        None => {}
    }
    self::core::settings::set(settings.clone()).map_err(refused)?;
    // SAFETY: the functions of `api` have the prototypes of `cuda.h` and `nvml.h`, and implement
    // them as far as their documentation says; they return an error for everything else.
    unsafe { fusewire::cuda::replace_library(api::find) }.map_err(|_| {
        refused(
            "this process has already looked for the CUDA driver library; install the fake before \
             the first use of a CUDA device"
                .to_owned(),
        )
    })?;
    *installed = Some(settings.clone());
    Ok(())
}

/// Returns the errors of all emulated launches since the last call, oldest first, at most 1024. The
/// failed launch returns a CUDA error, which does not contain these texts.
///
/// ```no_run
/// use fusewire_cuda_fake::emulator::{Error, FaultKind};
///
/// for error in fusewire_cuda_fake::take_faults() {
///     assert!(!matches!(error, Error::Fault(fault) if fault.kind == FaultKind::Race));
/// }
/// ```
pub fn take_faults() -> Vec<emulator::Error> {
    self::core::emulated::take_faults()
}

/// Returns the number of launches of a kernel since the process started, in all tests together. A
/// launch in a graph counts once, when it is captured.
pub fn launch_count(kernel: &str) -> u64 {
    self::core::record::launch_count(kernel)
}

/// Returns the trips of the last launch of a kernel on each device, by the number of the device:
/// its dependent round trips to memory. Empty unless [`Settings::trips`] is set.
pub fn trips(kernel: &str) -> BTreeMap<u32, emulator::Trips> {
    self::core::emulated::trips(kernel)
}

/// Images for native execution. Not a stable interface.
#[doc(hidden)]
pub mod testing {
    pub use crate::core::image::{stand_in, stand_in_multi_rank_grid};
    pub use crate::core::kernel::{kernels_of, register};
    pub use crate::core::shared_object::stand_in_of;
}
