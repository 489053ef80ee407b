//! NVIDIA GPUs: [`Driver`](crate::gpu::driver::Driver) over the CUDA driver library, which is
//! opened at run time.
//!
//! Nothing of CUDA's is linked and no tool kit is needed: `libcuda.so.1` comes with the driver. The
//! types and constants are cudarc's (`cudarc::driver::sys`); the functions are called through a
//! table of this module's own, whose signatures the compiler compares with cudarc's (in tests).
//! That is for two reasons: a symbol that is absent is an error here and a panic there, and a
//! result code that cudarc does not know is a number here and undefined behaviour there.
//!
//! # Symbols
//!
//! Looked up by these names, all at once, when the library is opened. Each must be there (driver
//! 525, CUDA 12.0):
//!
//! | subject | symbols |
//! |---|---|
//! | start | `cuInit` `cuDriverGetVersion` `cuGetErrorName` `cuGetErrorString` |
//! | devices | `cuDeviceGet` `cuDeviceGetCount` `cuDeviceGetName` `cuDeviceGetUuid_v2` `cuDeviceGetPCIBusId` `cuDeviceTotalMem_v2` `cuDeviceGetAttribute` |
//! | contexts | `cuDevicePrimaryCtxRetain` `cuCtxGetCurrent` `cuCtxSetCurrent` `cuThreadExchangeStreamCaptureMode` |
//! | virtual memory | `cuMemGetAllocationGranularity` `cuMemCreate` `cuMemRelease` `cuMemAddressReserve` `cuMemAddressFree` `cuMemMap` `cuMemUnmap` `cuMemSetAccess` `cuMemExportToShareableHandle` `cuMemImportFromShareableHandle` `cuMemRetainAllocationHandle` `cuMemGetAllocationPropertiesFromHandle` |
//! | memory | `cuMemAlloc_v2` `cuMemFree_v2` `cuMemGetInfo_v2` `cuMemGetAddressRange_v2` `cuIpcGetMemHandle` `cuIpcOpenMemHandle_v2` `cuIpcCloseMemHandle` `cuMemHostAlloc` `cuMemFreeHost` `cuMemHostGetDevicePointer_v2` |
//! | copies | `cuMemcpyAsync` `cuMemcpyHtoDAsync_v2` `cuMemcpyDtoHAsync_v2` `cuMemsetD8Async` |
//! | modules | `cuModuleLoadDataEx` `cuModuleUnload` `cuModuleGetFunction` `cuFuncGetAttribute` `cuFuncSetAttribute` `cuOccupancyMaxActiveBlocksPerMultiprocessor` `cuLaunchKernel` `cuLaunchKernelEx` |
//! | streams | `cuStreamCreate` `cuStreamDestroy_v2` `cuStreamQuery` `cuStreamSynchronize` `cuStreamWaitEvent` `cuLaunchHostFunc` |
//! | events | `cuEventCreate` `cuEventDestroy_v2` `cuEventRecord` `cuEventQuery` `cuEventElapsedTime` |
//! | graphs | `cuStreamBeginCapture_v2` `cuStreamEndCapture` `cuUserObjectCreate` `cuUserObjectRelease` `cuGraphRetainUserObject` `cuGraphGetNodes` `cuGraphInstantiateWithFlags` `cuGraphUpload` `cuGraphLaunch` `cuGraphDestroy` `cuGraphExecDestroy` |
//!
//! These may be absent; what needs them then does without, or is an error that names the symbol and
//! the version:
//!
//! | since CUDA | symbols | without them |
//! |---|---|---|
//! | 11.3 | `cuStreamGetCaptureInfo_v2` | asked only where `cuStreamGetCaptureInfo_v3` is absent |
//! | 11.7 | `cuStreamWaitValue32_v2` `cuStreamWriteValue32_v2` | no waiting for words on streams |
//! | 12.1 | `cuMulticastCreate` `cuMulticastAddDevice` `cuMulticastBindMem` `cuMulticastUnbind` `cuMulticastGetGranularity` | no multicast objects |
//! | 12.3 | `cuStreamGetCaptureInfo_v3` | `cuStreamGetCaptureInfo_v2` |
//! | 12.4 | `cuFuncLoad` `cuModuleGetFunctionCount` `cuModuleEnumerateFunctions` | a kernel is loaded when it is asked for, not with its module |
//! | 12.4 | `cuFuncGetParamInfo` | offsets of parameters are not known |
//!
//! # Captures
//!
//! CUDA forbids many calls on a thread that captures a stream, and in global mode on all threads of
//! the process. Whatever this module calls that might be forbidden it calls with the thread's mode
//! exchanged for relaxed, and puts the mode back: an allocation, a module load or an event query
//! here neither fails nor breaks a capture of somebody else's.
//!
//! # Hardware queues
//!
//! Streams share a few hardware queues (8, where nothing else is said), and kernels of two streams
//! in one queue start one after the other. Where the first waits for the second, as ranks of one
//! process do, both wait for ever. See [`ENVIRONMENT`].

mod capture;
mod context;
mod device;
mod domain;
mod driver;
mod error;
mod event;
mod foreign;
mod library;
mod memory;
mod module;
mod multicast;
mod open;
mod staging;
mod stream;
mod virtual_memory;

#[cfg(test)]
mod tests;

pub use self::open::{ENVIRONMENT, devices, open, prepare_environment};
