//! Implements [`Driver`](crate::gpu::Driver) for NVIDIA GPUs with the CUDA driver library,
//! which is opened at run time.
//!
//! The crate does not link against CUDA and does not need a toolkit, because `libcuda.so.1` is
//! installed with the driver. The types and constants come from `cudarc::driver::sys`. The
//! functions are called through a table of function pointers, `Library`. Test builds compare the
//! signatures in the table with cudarc's signatures at compile time. The table has two advantages
//! over cudarc's functions. A missing symbol is reported as an error, whereas cudarc panics. A
//! result code that cudarc does not know stays an integer, whereas cudarc would convert it to an
//! invalid enum value, which is undefined behaviour.
//!
//! # Symbols
//!
//! All symbols are looked up when the library is opened. The following symbols are required (driver
//! 525, CUDA 12.0):
//!
//! | subject | symbols |
//! |---|---|
//! | start | `cuInit` `cuDriverGetVersion` `cuGetErrorName` `cuGetErrorString` |
//! | devices | `cuDeviceGet` `cuDeviceGetCount` `cuDeviceGetName` `cuDeviceGetUuid_v2` `cuDeviceGetPCIBusId` `cuDeviceTotalMem_v2` `cuDeviceGetAttribute` `cuDeviceGetP2PAttribute` `cuDeviceCanAccessPeer` |
//! | contexts | `cuDevicePrimaryCtxRetain` `cuCtxGetCurrent` `cuCtxPushCurrent_v2` `cuCtxPopCurrent_v2` `cuCtxGetStreamPriorityRange` `cuCtxEnablePeerAccess` `cuThreadExchangeStreamCaptureMode` |
//! | virtual memory | `cuMemGetAllocationGranularity` `cuMemCreate` `cuMemRelease` `cuMemAddressReserve` `cuMemAddressFree` `cuMemMap` `cuMemUnmap` `cuMemSetAccess` `cuMemExportToShareableHandle` `cuMemImportFromShareableHandle` `cuMemRetainAllocationHandle` `cuMemGetAllocationPropertiesFromHandle` |
//! | memory | `cuMemAlloc_v2` `cuMemFree_v2` `cuMemGetInfo_v2` `cuMemGetAddressRange_v2` `cuIpcGetMemHandle` `cuIpcOpenMemHandle_v2` `cuIpcCloseMemHandle` `cuMemHostAlloc` `cuMemFreeHost` `cuMemHostGetDevicePointer_v2` |
//! | copies | `cuMemcpyAsync` `cuMemcpyHtoDAsync_v2` `cuMemcpyDtoHAsync_v2` `cuMemsetD8Async` |
//! | modules | `cuModuleLoadDataEx` `cuModuleUnload` `cuModuleGetFunction` `cuFuncGetAttribute` `cuFuncSetAttribute` `cuOccupancyMaxActiveBlocksPerMultiprocessor` `cuLaunchKernel` `cuLaunchKernelEx` |
//! | streams | `cuStreamCreateWithPriority` `cuStreamDestroy_v2` `cuStreamGetFlags` `cuStreamQuery` `cuStreamSynchronize` `cuStreamWaitEvent` `cuLaunchHostFunc` |
//! | events | `cuEventCreate` `cuEventDestroy_v2` `cuEventRecord` `cuEventQuery` `cuEventElapsedTime` |
//! | graphs | `cuStreamBeginCapture_v2` `cuStreamEndCapture` `cuUserObjectCreate` `cuUserObjectRelease` `cuGraphRetainUserObject` `cuGraphGetNodes` `cuGraphInstantiateWithFlags` `cuGraphUpload` `cuGraphLaunch` `cuGraphDestroy` `cuGraphExecDestroy` |
//!
//! The following symbols are optional. A feature that needs a missing symbol is skipped or fails
//! with an error that names the symbol and the CUDA version:
//!
//! | since CUDA | symbols | without them |
//! |---|---|---|
//! | 11.3 | `cuStreamGetCaptureInfo_v2` | queries of the capture status fail, unless `cuStreamGetCaptureInfo_v3` exists |
//! | 11.7 | `cuStreamWaitValue32_v2` `cuStreamWriteValue32_v2` | streams can neither wait for words in memory nor write them |
//! | 12.1 | `cuMulticastCreate` `cuMulticastAddDevice` `cuMulticastBindMem` `cuMulticastUnbind` `cuMulticastGetGranularity` | no multicast objects |
//! | 12.3 | `cuStreamGetCaptureInfo_v3` | `cuStreamGetCaptureInfo_v2` is called instead |
//! | 12.4 | `cuFuncLoad` `cuModuleGetFunctionCount` `cuModuleEnumerateFunctions` | a kernel is loaded when it is looked up, not with its module |
//! | 12.4 | `cuStreamGetGreenCtx` `cuGreenCtxGetDevResource` | the SMs of a green context are not checked |
//! | 12.4 | `cuFuncGetParamInfo` | the offsets of kernel parameters are unknown |
//!
//! # Captures
//!
//! During a stream capture, CUDA forbids many calls on the capturing thread, and in global mode on
//! all threads of the process. This module switches the calling thread to relaxed mode for such
//! calls and then restores the previous mode. As a result, an allocation, a module load or an event
//! query neither fails nor invalidates a capture that other code has begun.

mod capture;
mod context;
mod device;
mod domain;
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
mod symbols;
mod virtual_memory;

#[cfg(test)]
mod tests;

pub use self::open::{devices, open};
pub use self::symbols::{Lookup, replace_library};
