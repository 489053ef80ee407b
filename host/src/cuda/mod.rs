//! NVIDIA GPUs: [`Driver`](crate::gpu::driver::Driver) over the CUDA driver library, which is
//! opened at run time.
//!
//! Nothing of CUDA is linked and no toolkit is needed: `libcuda.so.1` comes with the driver. The
//! types and constants are cudarc's (`cudarc::driver::sys`). The functions are called through a
//! table of this module, whose signatures tests compare with cudarc's at compile time. There are
//! two reasons: a missing symbol is an error here and a panic in cudarc, and a result code that
//! cudarc does not know is a number here and undefined behaviour in cudarc.
//! result code that cudarc does not know is a number here and undefined behaviour there.
//!
//! # Symbols
//!
//! All symbols are looked up by these names when the library is opened. They are required (driver
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
//! These symbols are optional. A feature that needs a missing one is skipped, or fails with an
//! error that names the symbol and the CUDA version:
//!
//! | since CUDA | symbols | without them |
//! |---|---|---|
//! | 11.3 | `cuStreamGetCaptureInfo_v2` | used only if `cuStreamGetCaptureInfo_v3` is absent |
//! | 11.7 | `cuStreamWaitValue32_v2` `cuStreamWriteValue32_v2` | streams cannot wait for memory words |
//! | 12.1 | `cuMulticastCreate` `cuMulticastAddDevice` `cuMulticastBindMem` `cuMulticastUnbind` `cuMulticastGetGranularity` | no multicast objects |
//! | 12.3 | `cuStreamGetCaptureInfo_v3` | `cuStreamGetCaptureInfo_v2` |
//! | 12.4 | `cuFuncLoad` `cuModuleGetFunctionCount` `cuModuleEnumerateFunctions` | a kernel is loaded when it is looked up, not with its module |
//! | 12.4 | `cuFuncGetParamInfo` | offsets of parameters are unknown |
//!
//! # Captures
//!
//! CUDA forbids many calls on a thread that captures a stream, and in global mode on all threads of
//! the process. This module makes such calls in the thread's relaxed mode, and then restores the
//! mode: an allocation, a module load or an event query neither fails nor invalidates a capture of
//! other code.
//!
//! # Hardware queues
//!
//! Streams share a few hardware queues (8 by default), and kernels of two streams in one queue
//! start in sequence. If the first waits for the second, as with ranks of one process, they
//! deadlock. See [`ENVIRONMENT`].

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
