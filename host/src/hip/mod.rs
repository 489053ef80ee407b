//! AMD GPUs, by the HIP run time of ROCm 6 or 7 (`libamdhip64.so`), opened when it is first needed.
//!
//! None of this has been executed on a GPU yet: prototypes, constants and layouts are compared with
//! AMD's headers by the feature `hip-prototypes`, the order of calls is tested with a fake of the
//! library, and the rest was reviewed against HIP's documentation and source:
//!
//! | function | rule | how it is kept |
//! |---|---|---|
//! | every launch, `hipFuncGetAttribute` | the stream's GPU must be the thread's current one | `hipSetDevice` comes first in every method |
//! | every function | the thread's latest error stays for `hipGetLastError` | taken out after each of our errors |
//! | `hipMalloc`, `hipFree`, ... | forbidden on a thread whose capture mode is not relaxed, and then invalidates the capture | relaxed mode around each such call |
//! | `hipMemcpy`, `hipMemset`, `hipDeviceSynchronize` | invalidate every capture of the process | never called |
//! | `hipExtMallocWithFlags` | memory that is polled while it is written needs `hipDeviceMallocUncached` | so is all shared memory |
//! | `hipIpcGetMemHandle` | a handle of an address within an allocation opens at that address | the base is exported, with the offset beside it |
//! | `hipIpcOpenMemHandle` | flags must be `hipIpcMemLazyEnablePeerAccess`; not in the process that made the handle | so it is; the error says to use the address |
//! | `hipFree`, `hipIpcCloseMemHandle`, `hipHostFree` | wait for the device | as the trait allows; nothing else waits |
//! | `hipHostMalloc` | coherent without fences only with `hipHostMallocCoherent` | portable, mapped and coherent |
//! | `hipMemcpyAsync` | asynchronous for page-locked memory only | copies go through a page-locked buffer |
//! | `hipModuleLoadData` | has no length: reads as far as the image's headers say, and keeps the pointer | headers are checked; the image is kept |
//! | `hipModuleGetFunction` | `hipErrorNotFound` | is `None` |
//! | `hipModuleLaunchKernel` | grid in blocks; less than 2^32 threads; block at most as compiled | checked, the last by HIP |
//! | `hipModuleLaunchCooperativeKernel` | `hipErrorCooperativeLaunchTooLarge` where blocks would not be resident together | an error with a hint |
//! | the same, on a captured stream | run at once by some run times | the graph must have grown, else an error |
//! | `hipStreamQuery`, `hipEventQuery` | `hipErrorNotReady` | is `false` |
//! | `hipStreamWaitValue32` | by the command processor for memory of `hipMallocSignalMemory`, else by a small kernel; captures up to the run time | called with all bits of the mask; what it says is passed on |
//! | `hipStreamBeginCapture` | thread-local: ends on its thread | as the trait says; the error has a hint |
//! | `hipStreamEndCapture` | leaves the graph undefined after an error | not looked at |
//! | `hipUserObjectCreate` | flags must be `hipUserObjectNoDestructorSync` | so they are; the one reference moves to the graph |
//! | `hipGraphInstantiateWithFlags` | clones the graph, with its user objects | nothing else keeps them |
//!
//! AMD GPUs have no clusters, no multicast, and no launch that begins before the kernel before it
//! has ended: the first are refused, a dependent launch is an ordinary one. Memory goes to other
//! processes by IPC handles.

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

/// The GPU of that number, opened once in a process.
///
/// # Errors
/// `Error::NoDevice` where there is no HIP run time or no such GPU, `Error::Driver` where the run
/// time is too old or refuses something.
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

/// What is known of every GPU that the process sees: at least one.
///
/// # Errors
/// As [`open`].
pub fn devices() -> Result<Vec<Properties>> {
    let functions = library::functions()?;
    (0..device::count(functions)?)
        .map(|ordinal| properties::of(functions, ordinal.cast_signed()))
        .collect()
}
