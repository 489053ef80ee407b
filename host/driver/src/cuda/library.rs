//! The CUDA driver library. Each process opens the library and looks up its symbols once.

use core::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

use cudarc::driver::sys;

use super::error::{self, describe};
use super::symbols::Symbols;
use crate::{Error, Result};

/// Oldest supported driver version: CUDA 12.0, driver 525.
pub(super) const OLDEST: c_int = 12_000;

/// Soname of the driver library.
const SONAME: &str = "libcuda.so.1";

/// A function of the driver library that older drivers lack.
#[derive(Debug)]
pub(super) struct OptionalFunction<F> {
    function: Option<F>,
    name: &'static str,
    since: &'static str,
}

impl<F: Copy> OptionalFunction<F> {
    /// Returns the function, if the driver has it.
    pub(super) const fn find(&self) -> Option<F> {
        self.function
    }

    /// Returns the function. If the driver lacks the function, the error names the function and the
    /// CUDA version that introduced it.
    pub(super) fn need(&self) -> Result<F> {
        self.function.ok_or_else(|| Error::Driver {
            library: "CUDA",
            call: self.name,
            detail: format!(
                "this driver lacks the function, which CUDA {} introduced: install a newer \
                    driver",
                self.since
            ),
        })
    }
}

macro_rules! symbols {
    (
        text { $($text:ident($($text_type:ty),*);)* }
        required { $($name:ident($($type:ty),* $(,)?);)* }
        newer { $($later:ident, $since:literal, ($($later_type:ty),* $(,)?);)* }
    ) => {
        /// The functions of the library. They return an integer instead of cudarc's enumeration,
        /// because a driver may return result codes that the bindings do not know.
        #[expect(non_snake_case, reason = "the names of the library")]
        #[derive(Debug)]
        pub(super) struct Library {
            $(pub(super) $text: unsafe extern "C" fn($($text_type),*) -> c_int,)*
            $(pub(super) $name: unsafe extern "C" fn($($type),*) -> c_int,)*
            $(
                pub(super) $later:
                    OptionalFunction<unsafe extern "C" fn($($later_type),*) -> c_int>,
            )*
            /// Keeps the function pointers valid.
            _symbols: Symbols,
        }

        // The signatures above must equal the signatures of cudarc's bindings. Only test builds
        // compare them: if another crate (candle) makes cudarc link the driver, the bindings are
        // `extern` functions with another ABI, and the comparison would not compile.
        $(#[cfg(test)] const _: unsafe fn($($type),*) -> sys::CUresult = sys::$name;)*
        $(#[cfg(test)] const _: unsafe fn($($later_type),*) -> sys::CUresult = sys::$later;)*

        impl Library {
            /// Required symbols.
            #[cfg(test)]
            pub(super) const REQUIRED: &[&str] = &[$(stringify!($text),)* $(stringify!($name),)*];
            /// Optional symbols.
            #[cfg(test)]
            pub(super) const NEWER: &[&str] = &[$(stringify!($later),)*];

            /// Looks up all symbols.
            fn from_symbols(symbols: Symbols) -> Result<Self> {
                Ok(Self {
                    $($text: symbol(&symbols, stringify!($text))?,)*
                    $($name: symbol(&symbols, stringify!($name))?,)*
                    $($later: OptionalFunction {
                        function: symbol(&symbols, stringify!($later)).ok(),
                        name: stringify!($later),
                        since: $since,
                    },)*
                    _symbols: symbols,
                })
            }
        }
    };
}

symbols! {
    // The first argument of these functions is a `CUresult`, which this module passes as an
    // integer.
    text {
        cuGetErrorName(c_int, *mut *const c_char);
        cuGetErrorString(c_int, *mut *const c_char);
    }
    required {
        cuInit(c_uint);
        cuDriverGetVersion(*mut c_int);
        cuDeviceGet(*mut sys::CUdevice, c_int);
        cuDeviceGetCount(*mut c_int);
        cuDeviceGetName(*mut c_char, c_int, sys::CUdevice);
        cuDeviceGetUuid_v2(*mut sys::CUuuid, sys::CUdevice);
        cuDeviceGetPCIBusId(*mut c_char, c_int, sys::CUdevice);
        cuDeviceTotalMem_v2(*mut usize, sys::CUdevice);
        cuDeviceGetAttribute(*mut c_int, sys::CUdevice_attribute, sys::CUdevice);
        cuDeviceGetP2PAttribute(
            *mut c_int,
            sys::CUdevice_P2PAttribute,
            sys::CUdevice,
            sys::CUdevice,
        );

        cuDevicePrimaryCtxRetain(*mut sys::CUcontext, sys::CUdevice);
        cuCtxGetCurrent(*mut sys::CUcontext);
        cuCtxPushCurrent_v2(sys::CUcontext);
        cuCtxPopCurrent_v2(*mut sys::CUcontext);
        cuCtxGetStreamPriorityRange(*mut c_int, *mut c_int);
        cuCtxEnablePeerAccess(sys::CUcontext, c_uint);
        cuDeviceCanAccessPeer(*mut c_int, sys::CUdevice, sys::CUdevice);
        cuThreadExchangeStreamCaptureMode(*mut sys::CUstreamCaptureMode);

        cuMemGetAllocationGranularity(
            *mut usize,
            *const sys::CUmemAllocationProp,
            sys::CUmemAllocationGranularity_flags,
        );
        cuMemCreate(
            *mut sys::CUmemGenericAllocationHandle,
            usize,
            *const sys::CUmemAllocationProp,
            c_ulonglong,
        );
        cuMemRelease(sys::CUmemGenericAllocationHandle);
        cuMemAddressReserve(*mut sys::CUdeviceptr, usize, usize, sys::CUdeviceptr, c_ulonglong);
        cuMemAddressFree(sys::CUdeviceptr, usize);
        cuMemMap(
            sys::CUdeviceptr,
            usize,
            usize,
            sys::CUmemGenericAllocationHandle,
            c_ulonglong,
        );
        cuMemUnmap(sys::CUdeviceptr, usize);
        cuMemSetAccess(sys::CUdeviceptr, usize, *const sys::CUmemAccessDesc, usize);
        cuMemExportToShareableHandle(
            *mut c_void,
            sys::CUmemGenericAllocationHandle,
            sys::CUmemAllocationHandleType,
            c_ulonglong,
        );
        cuMemImportFromShareableHandle(
            *mut sys::CUmemGenericAllocationHandle,
            *mut c_void,
            sys::CUmemAllocationHandleType,
        );
        cuMemRetainAllocationHandle(*mut sys::CUmemGenericAllocationHandle, *mut c_void);
        cuMemGetAllocationPropertiesFromHandle(
            *mut sys::CUmemAllocationProp,
            sys::CUmemGenericAllocationHandle,
        );

        cuMemAlloc_v2(*mut sys::CUdeviceptr, usize);
        cuMemFree_v2(sys::CUdeviceptr);
        cuMemGetInfo_v2(*mut usize, *mut usize);
        cuMemGetAddressRange_v2(*mut sys::CUdeviceptr, *mut usize, sys::CUdeviceptr);
        cuIpcGetMemHandle(*mut sys::CUipcMemHandle, sys::CUdeviceptr);
        cuIpcOpenMemHandle_v2(*mut sys::CUdeviceptr, sys::CUipcMemHandle, c_uint);
        cuIpcCloseMemHandle(sys::CUdeviceptr);
        cuMemHostAlloc(*mut *mut c_void, usize, c_uint);
        cuMemFreeHost(*mut c_void);
        cuMemHostGetDevicePointer_v2(*mut sys::CUdeviceptr, *mut c_void, c_uint);

        cuMemcpyAsync(sys::CUdeviceptr, sys::CUdeviceptr, usize, sys::CUstream);
        cuMemcpyHtoDAsync_v2(sys::CUdeviceptr, *const c_void, usize, sys::CUstream);
        cuMemcpyDtoHAsync_v2(*mut c_void, sys::CUdeviceptr, usize, sys::CUstream);
        cuMemsetD8Async(sys::CUdeviceptr, u8, usize, sys::CUstream);

        cuModuleLoadDataEx(
            *mut sys::CUmodule,
            *const c_void,
            c_uint,
            *mut sys::CUjit_option,
            *mut *mut c_void,
        );
        cuModuleUnload(sys::CUmodule);
        cuModuleGetFunction(*mut sys::CUfunction, sys::CUmodule, *const c_char);
        cuFuncGetAttribute(*mut c_int, sys::CUfunction_attribute, sys::CUfunction);
        cuFuncSetAttribute(sys::CUfunction, sys::CUfunction_attribute, c_int);
        cuOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, sys::CUfunction, c_int, usize);
        cuLaunchKernel(
            sys::CUfunction,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            c_uint,
            sys::CUstream,
            *mut *mut c_void,
            *mut *mut c_void,
        );
        cuLaunchKernelEx(
            *const sys::CUlaunchConfig,
            sys::CUfunction,
            *mut *mut c_void,
            *mut *mut c_void,
        );

        cuStreamCreateWithPriority(*mut sys::CUstream, c_uint, c_int);
        cuStreamDestroy_v2(sys::CUstream);
        cuStreamGetFlags(sys::CUstream, *mut c_uint);
        cuStreamQuery(sys::CUstream);
        cuStreamSynchronize(sys::CUstream);
        cuStreamWaitEvent(sys::CUstream, sys::CUevent, c_uint);
        cuLaunchHostFunc(sys::CUstream, sys::CUhostFn, *mut c_void);

        cuEventCreate(*mut sys::CUevent, c_uint);
        cuEventDestroy_v2(sys::CUevent);
        cuEventRecord(sys::CUevent, sys::CUstream);
        cuEventQuery(sys::CUevent);
        cuEventElapsedTime(*mut f32, sys::CUevent, sys::CUevent);

        cuStreamBeginCapture_v2(sys::CUstream, sys::CUstreamCaptureMode);
        cuStreamEndCapture(sys::CUstream, *mut sys::CUgraph);
        cuUserObjectCreate(*mut sys::CUuserObject, *mut c_void, sys::CUhostFn, c_uint, c_uint);
        cuUserObjectRelease(sys::CUuserObject, c_uint);
        cuGraphRetainUserObject(sys::CUgraph, sys::CUuserObject, c_uint, c_uint);
        cuGraphGetNodes(sys::CUgraph, *mut sys::CUgraphNode, *mut usize);
        cuGraphInstantiateWithFlags(*mut sys::CUgraphExec, sys::CUgraph, c_ulonglong);
        cuGraphUpload(sys::CUgraphExec, sys::CUstream);
        cuGraphLaunch(sys::CUgraphExec, sys::CUstream);
        cuGraphDestroy(sys::CUgraph);
        cuGraphExecDestroy(sys::CUgraphExec);
    }
    newer {
        cuStreamGetCaptureInfo_v2, "11.3", (
            sys::CUstream,
            *mut sys::CUstreamCaptureStatus,
            *mut sys::cuuint64_t,
            *mut sys::CUgraph,
            *mut *const sys::CUgraphNode,
            *mut usize,
        );
        cuStreamGetCaptureInfo_v3, "12.3", (
            sys::CUstream,
            *mut sys::CUstreamCaptureStatus,
            *mut sys::cuuint64_t,
            *mut sys::CUgraph,
            *mut *const sys::CUgraphNode,
            *mut *const sys::CUgraphEdgeData,
            *mut usize,
        );
        cuStreamWaitValue32_v2, "11.7", (sys::CUstream, sys::CUdeviceptr, sys::cuuint32_t, c_uint);
        cuStreamWriteValue32_v2, "11.7", (sys::CUstream, sys::CUdeviceptr, sys::cuuint32_t, c_uint);
        cuMulticastCreate, "12.1", (
            *mut sys::CUmemGenericAllocationHandle,
            *const sys::CUmulticastObjectProp,
        );
        cuMulticastAddDevice, "12.1", (sys::CUmemGenericAllocationHandle, sys::CUdevice);
        cuMulticastBindMem, "12.1", (
            sys::CUmemGenericAllocationHandle,
            usize,
            sys::CUmemGenericAllocationHandle,
            usize,
            usize,
            c_ulonglong,
        );
        cuMulticastUnbind, "12.1", (sys::CUmemGenericAllocationHandle, sys::CUdevice, usize, usize);
        cuMulticastGetGranularity, "12.1", (
            *mut usize,
            *const sys::CUmulticastObjectProp,
            sys::CUmulticastGranularity_flags,
        );
        cuStreamGetGreenCtx, "12.4", (sys::CUstream, *mut sys::CUgreenCtx);
        cuGreenCtxGetDevResource, "12.4", (
            sys::CUgreenCtx,
            *mut sys::CUdevResource,
            sys::CUdevResourceType,
        );
        cuFuncLoad, "12.4", (sys::CUfunction);
        cuModuleGetFunctionCount, "12.4", (*mut c_uint, sys::CUmodule);
        cuModuleEnumerateFunctions, "12.4", (*mut sys::CUfunction, c_uint, sys::CUmodule);
        cuFuncGetParamInfo, "12.4", (sys::CUfunction, usize, *mut usize, *mut usize);
    }
}

/// Looks up the function `name`.
fn symbol<F: Copy>(symbols: &Symbols, name: &'static str) -> Result<F> {
    // SAFETY: only the macro above calls `symbol`, and the macro passes the function type that
    // belongs to `name`.
    unsafe { symbols.get::<F>(name) }.map_err(|error| Error::Driver {
        library: "CUDA",
        call: name,
        detail: format!(
            "this driver lacks the function ({error}); install driver 525 (CUDA 12.0) or newer; \
             NVLS on Hopper and later GPUs needs driver 535 (CUDA 12.2)"
        ),
    })
}

impl Library {
    /// Returns the library. The first call opens and initialises it.
    ///
    /// # Errors
    /// `Error::NoDevice` if there is no driver or no device, or if the driver is older than
    /// [`OLDEST`]; `Error::Driver` if a required symbol is missing or if a call fails.
    pub(super) fn open() -> Result<&'static Self> {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        let library = match LIBRARY.get() {
            Some(library) => library,
            None => {
                let names = [SONAME, "libcuda.so"];
                let found = Self::from_symbols(Symbols::open(&names).map_err(not_found)?)?;
                LIBRARY.get_or_init(|| found)
            }
        };
        library.initialise()?;
        Ok(library)
    }

    /// Opens the library `name` without initialising it.
    #[cfg(test)]
    pub(super) fn open_file(name: &str) -> Result<Self> {
        Self::from_symbols(Symbols::open_object(&[name]).map_err(not_found)?)
    }

    /// Initialises the library and checks the driver version. May be called more than once.
    fn initialise(&self) -> Result<()> {
        // SAFETY: the function takes only flags, which must be 0.
        let code = unsafe { (self.cuInit)(0) };
        if code != error::SUCCESS {
            return Err(no_device(format!(
                "the driver fails to initialise: cuInit: {}",
                describe(code, self.text(code))
            )));
        }
        let version = self.version()?;
        if version < OLDEST {
            return Err(no_device(format!(
                "the driver supports CUDA {}.{} only; install driver 525 (CUDA 12.0) or newer",
                version / 1000,
                version % 1000 / 10
            )));
        }
        Ok(())
    }

    /// Returns the CUDA version that the driver supports, such as 12040 for 12.4.
    pub(super) fn version(&self) -> Result<c_int> {
        let mut version = 0;
        // SAFETY: `version` is writable.
        self.check("cuDriverGetVersion", unsafe {
            (self.cuDriverGetVersion)(&raw mut version)
        })?;
        Ok(version)
    }

    /// Returns the name and the description of a result code, if the driver knows the code.
    pub(super) fn text(&self, code: c_int) -> Option<(String, String)> {
        let ask = |function: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int| {
            let mut text = core::ptr::null();
            // SAFETY: the function accepts any number, and `text` is writable.
            let known = unsafe { function(code, &raw mut text) } == error::SUCCESS;
            if !known || text.is_null() {
                return None;
            }
            // SAFETY: the text is a zero-terminated string in static data of the library, which is
            // never unloaded.
            let text = unsafe { CStr::from_ptr(text) };
            Some(text.to_string_lossy().into_owned())
        };
        let name = ask(self.cuGetErrorName)?;
        Some((name, ask(self.cuGetErrorString).unwrap_or_default()))
    }

    /// Returns an error that names the function `call` if `code` is not `CUDA_SUCCESS`.
    pub(super) fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        if code == error::SUCCESS {
            Ok(())
        } else {
            Err(self.failed(call, code))
        }
    }

    /// Creates the error for the function `call`, which returned `code`.
    #[cold]
    pub(super) fn failed(&self, call: &'static str, code: c_int) -> Error {
        error::driver(call, describe(code, self.text(code)))
    }
}

/// Creates the error for a missing device.
pub(super) fn no_device(detail: String) -> Error {
    Error::NoDevice {
        device: "cuda".to_owned(),
        detail,
    }
}

/// Creates the error for a driver library that cannot be opened for the reason `broken`, or that
/// does not exist.
fn not_found(broken: Option<String>) -> Error {
    let what = broken.unwrap_or_else(|| format!("{SONAME} not found"));
    no_device(format!(
        "no CUDA driver ({what}); install NVIDIA's driver, or in a container start it with the \
         NVIDIA runtime (--gpus all); LD_LIBRARY_PATH may name another folder of the library"
    ))
}
