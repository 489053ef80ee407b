//! AMD GPUs through the HIP runtime of ROCm 6 or 7 (`libamdhip64.so`), opened when it is first
//! needed.
//!
//! This module has not been executed on a GPU yet. The feature `hip-prototypes` compares
//! prototypes, constants and layouts with AMD's headers. Tests with a fake of the library check the
//! order of the calls. The following rules come from the documentation and the source of HIP:
//!
//! | function | rule | implementation |
//! |---|---|---|
//! | every launch, `hipFuncGetAttribute` | the stream's GPU must be the thread's current device | every method calls `hipSetDevice` first |
//! | every function | the thread's latest error is kept for `hipGetLastError` | cleared after each error of this module |
//! | `hipMalloc`, `hipFree`, ... | forbidden on a thread whose capture mode is not relaxed, where they invalidate the capture | called in relaxed mode |
//! | `hipMemcpy`, `hipMemset`, `hipDeviceSynchronize` | invalidate every capture of the process | never called |
//! | `hipExtMallocWithFlags` | memory that is polled while it is written needs `hipDeviceMallocUncached` | used for all shared memory |
//! | `hipIpcGetMemHandle` | a handle of an address within an allocation opens at that address | exports the base and the offset |
//! | `hipIpcOpenMemHandle` | flags must be `hipIpcMemLazyEnablePeerAccess`; not in the process that created the handle | uses these flags; the error says to use the address |
//! | `hipFree`, `hipIpcCloseMemHandle`, `hipHostFree` | wait for the device | the `Driver` trait permits these waits; no other method waits |
//! | `hipHostMalloc` | coherent without fences only with `hipHostMallocCoherent` | portable, mapped and coherent |
//! | `hipMemcpyAsync` | asynchronous only for page-locked memory | copies use a page-locked buffer |
//! | `hipModuleLoadData` | has no length: reads as many bytes as the image's headers say, and keeps the pointer | headers are checked; the image is kept |
//! | `hipModuleGetFunction` | returns `hipErrorNotFound` for an unknown kernel | returns `None` |
//! | `hipModuleLaunchKernel` | grid in blocks; less than 2^32 threads; block at most as compiled | grid and number of threads are checked here; HIP checks the block |
//! | `hipModuleLaunchCooperativeKernel` | `hipErrorCooperativeLaunchTooLarge` if the blocks cannot be resident together | an error with a hint |
//! | `hipModuleLaunchCooperativeKernel` on a capturing stream | some runtimes run the kernel immediately | returns an error unless the graph has grown |
//! | `hipStreamQuery`, `hipEventQuery` | return `hipErrorNotReady` while work is pending | returns `false` |
//! | `hipStreamWaitValue32` | the command processor waits if the memory was allocated with `hipMallocSignalMemory`, otherwise a small kernel waits; some runtimes cannot capture the wait | called with a full mask; errors are returned |
//! | `hipStreamBeginCapture` | thread-local: must end on its thread | documented in the trait; the error has a hint |
//! | `hipStreamEndCapture` | leaves the graph undefined after an error | the graph is not read |
//! | `hipUserObjectCreate` | flags must be `hipUserObjectNoDestructorSync` | uses this flag; the only reference moves to the graph |
//! | `hipGraphInstantiateWithFlags` | clones the graph with its user objects | no other reference is kept |
//!
//! AMD GPUs have no clusters, no multicast objects and no dependent launches. A launch with
//! clusters and the creation of a multicast object return errors. A dependent launch is executed as
//! an ordinary launch. Memory is shared with other processes by IPC handles.

mod bindings;
mod device;
mod driver;
mod error;
mod graphs;
mod library;
mod memory;
mod metadata;
mod modules;
mod properties;
mod streams;

#[cfg(test)]
mod fake;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use self::device::Hip;
use crate::Result;
use crate::gpu::driver::{Driver, Properties};

/// Opens the GPU with index `ordinal`. All calls with the same `ordinal` return the same driver.
///
/// # Errors
/// `Error::NoDevice` if there is no HIP runtime or no such GPU, `Error::Driver` if the runtime is
/// too old or a call fails.
pub fn open(ordinal: u32) -> Result<Arc<dyn Driver>> {
    static OPENED: Mutex<BTreeMap<u32, Arc<Hip>>> = Mutex::new(BTreeMap::new());
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(hip) = opened.get(&ordinal) {
        return Ok(Arc::clone(hip) as Arc<dyn Driver>);
    }
    let hip = Arc::new(Hip::open(library::functions()?, ordinal)?);
    opened.insert(ordinal, Arc::clone(&hip));
    Ok(hip)
}

/// Returns the properties of all GPUs that are visible to the process. The result is not empty.
///
/// # Errors
/// The errors of [`open`].
pub fn devices() -> Result<Vec<Properties>> {
    let functions = library::functions()?;
    (0..device::count(functions)?)
        .map(|ordinal| properties::of(functions, ordinal.cast_signed()))
        .collect()
}
