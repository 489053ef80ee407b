//! Implements [`Driver`] for AMD GPUs with the HIP runtime of ROCm 6 or 7 (`libamdhip64.so`). The
//! runtime library is opened when it is first needed.
//!
//! This module has not been executed on a GPU yet. The feature `hip-prototypes` compares
//! prototypes, constants and layouts with AMD's headers. Tests run this module with a fake library
//! that checks the sequence of calls. The following rules come from the documentation and the
//! source of HIP:
//!
//! | function | rule | implementation |
//! |---|---|---|
//! | every launch, `hipFuncGetAttribute` | the stream's GPU must be the thread's current device | every method calls `hipSetDevice` before such a call and restores the previous device afterwards |
//! | every function | stores the thread's latest error for `hipGetLastError` | every method clears the stored error after a failed call |
//! | `hipMalloc`, `hipFree`, ... | forbidden during a capture on a thread whose capture mode is not relaxed; a forbidden call invalidates the capture | called in relaxed mode |
//! | `hipMemcpy`, `hipMemset`, `hipDeviceSynchronize` | invalidate every capture of the process | never called |
//! | `hipExtMallocWithFlags` | memory that is polled while it is written needs `hipDeviceMallocUncached` | used for all shared memory |
//! | `hipIpcGetMemHandle` | a handle for an address inside an allocation maps the memory from that address, not from the base | exports a handle for the base, and the offset of the address |
//! | `hipDeviceEnablePeerAccess` | needed before kernels access memory of another GPU at the owner's address | called when ranks of one process exchange memory; `hipErrorPeerAccessAlreadyEnabled` is success |
//! | `hipIpcOpenMemHandle` | flags must be `hipIpcMemLazyEnablePeerAccess`; fails in the process that created the handle | passes this flag; the error message recommends using the address itself |
//! | `hipFree`, `hipIpcCloseMemHandle`, `hipHostFree` | wait for the device | the `Driver` trait permits these waits; no other method waits for the whole device |
//! | `hipHostMalloc` | coherent without fences only with `hipHostMallocCoherent` | portable, mapped and coherent |
//! | `hipMemcpyAsync` | asynchronous only for page-locked memory | copies use a page-locked buffer |
//! | `hipModuleLoadData` | takes no length but reads the bytes that the image's headers describe; keeps the pointer | headers are checked; the image is kept alive |
//! | `hipModuleGetFunction` | returns `hipErrorNotFound` for an unknown kernel | returns `None` |
//! | `hipModuleLaunchKernel` | the grid is given in blocks; fewer than 2^32 threads in total; blocks no larger than the kernel was compiled for | this module checks the number of threads; HIP checks the size of the blocks |
//! | `hipModuleLaunchCooperativeKernel` | `hipErrorCooperativeLaunchTooLarge` if the blocks cannot be resident together | an error with a hint |
//! | `hipModuleLaunchCooperativeKernel` on a capturing stream | some runtimes run the kernel immediately | returns an error if the graph got no new node |
//! | `hipStreamQuery`, `hipEventQuery` | return `hipErrorNotReady` while work is pending | returns `false` |
//! | `hipStreamWaitValue32` | the command processor waits if the memory was allocated with `hipMallocSignalMemory`, otherwise a small kernel waits; some runtimes cannot capture the wait | called with a full mask; errors are returned |
//! | `hipStreamIsCapturing` on the null stream | returns `hipErrorStreamCaptureImplicit` while a blocking stream is capturing | work on the null stream is refused before any other call |
//! | `hipStreamBeginCapture` | a thread-local capture must end on the thread that began it | documented in the `Driver` trait; the error has a hint |
//! | `hipStreamEndCapture` | leaves the graph handle undefined after an error | the handle is not read after an error |
//! | `hipUserObjectCreate` | flags must be `hipUserObjectNoDestructorSync` | uses this flag; the only reference moves to the graph |
//! | `hipGraphInstantiateWithFlags` | the clone of the graph also refers to the user objects | this module keeps no reference to a user object |
//!
//! AMD GPUs have no clusters, no multicast objects and no dependent launches. A launch with
//! clusters and the creation of a multicast object return errors. A dependent launch is executed as
//! an ordinary launch. Memory is shared with other processes by IPC handles.

mod bindings;
mod device;
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
mod hardware_queue_tests;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use self::device::Hip;
use crate::Result;
use crate::gpu::{Driver, Properties};

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
