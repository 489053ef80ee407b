//! The HIP runtime library, which is opened on first use, and the table of the functions that this
//! crate calls.

use core::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use core::fmt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::bindings::{
    Prop, hipDeviceptr_t, hipError_t, hipEvent_t, hipFunction_t, hipGraph_t, hipGraphExec_t,
    hipGraphNode_t, hipHostFn_t, hipIpcMemHandle_t, hipModule_t, hipStream_t, hipUUID,
    hipUserObject_t,
};
use crate::{Error, Result};

/// Name of the library in errors.
pub(super) const LIBRARY: &str = "HIP";

macro_rules! functions {
    ($($name:ident($($argument:ty),* $(,)?) -> $result:ty;)*) => {
        /// Pointers to the functions of the library. Each field has the name of its function.
        #[allow(non_snake_case)]
        pub(super) struct Functions {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            /// Looks up all functions. The error names the first missing function.
            fn resolve(library: &Library) -> Result<Self> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the function type is the prototype in `hip_runtime_api.h`. Builds
                        // with the feature `hip-prototypes` compare the type with the prototype
                        // that bindgen generated.
                        unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                            .map(|symbol| *symbol)
                            .map_err(|_| missing(stringify!($name)))?
                    },)*
                })
            }
        }

        #[cfg(feature = "hip-prototypes")]
        mod prototypes {
            use super::*;
            $(const _: unsafe extern "C" fn($($argument),*) -> $result = cubecl_hip_sys::$name;)*
        }
    };
}

functions! {
    hipInit(c_uint) -> hipError_t;
    hipGetDeviceCount(*mut c_int) -> hipError_t;
    hipRuntimeGetVersion(*mut c_int) -> hipError_t;
    hipGetDevice(*mut c_int) -> hipError_t;
    hipSetDevice(c_int) -> hipError_t;
    hipDeviceCanAccessPeer(*mut c_int, c_int, c_int) -> hipError_t;
    hipDeviceEnablePeerAccess(c_int, c_uint) -> hipError_t;
    hipDeviceGetStreamPriorityRange(*mut c_int, *mut c_int) -> hipError_t;
    hipDeviceGetAttribute(*mut c_int, c_uint, c_int) -> hipError_t;
    hipDeviceGetP2PAttribute(*mut c_int, c_uint, c_int, c_int) -> hipError_t;
    hipDeviceGetName(*mut c_char, c_int, c_int) -> hipError_t;
    hipDeviceGetUuid(*mut hipUUID, c_int) -> hipError_t;
    hipDeviceTotalMem(*mut usize, c_int) -> hipError_t;
    hipGetDevicePropertiesR0600(*mut Prop, c_int) -> hipError_t;
    hipGetErrorName(hipError_t) -> *const c_char;
    hipGetErrorString(hipError_t) -> *const c_char;
    hipGetLastError() -> hipError_t;
    hipMalloc(*mut *mut c_void, usize) -> hipError_t;
    hipExtMallocWithFlags(*mut *mut c_void, usize, c_uint) -> hipError_t;
    hipFree(*mut c_void) -> hipError_t;
    hipMemGetAddressRange(*mut hipDeviceptr_t, *mut usize, hipDeviceptr_t) -> hipError_t;
    hipIpcGetMemHandle(*mut hipIpcMemHandle_t, *mut c_void) -> hipError_t;
    hipIpcOpenMemHandle(*mut *mut c_void, hipIpcMemHandle_t, c_uint) -> hipError_t;
    hipIpcCloseMemHandle(*mut c_void) -> hipError_t;
    hipHostMalloc(*mut *mut c_void, usize, c_uint) -> hipError_t;
    hipHostFree(*mut c_void) -> hipError_t;
    hipHostGetDevicePointer(*mut *mut c_void, *mut c_void, c_uint) -> hipError_t;
    hipMemcpyAsync(*mut c_void, *const c_void, usize, c_uint, hipStream_t) -> hipError_t;
    hipMemsetAsync(*mut c_void, c_int, usize, hipStream_t) -> hipError_t;
    hipModuleLoadData(*mut hipModule_t, *const c_void) -> hipError_t;
    hipModuleGetFunction(*mut hipFunction_t, hipModule_t, *const c_char) -> hipError_t;
    hipFuncGetAttribute(*mut c_int, c_uint, hipFunction_t) -> hipError_t;
    hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
        *mut c_int, hipFunction_t, c_int, usize,
    ) -> hipError_t;
    hipModuleLaunchKernel(
        hipFunction_t, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, hipStream_t,
        *mut *mut c_void, *mut *mut c_void,
    ) -> hipError_t;
    hipModuleLaunchCooperativeKernel(
        hipFunction_t, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, hipStream_t,
        *mut *mut c_void,
    ) -> hipError_t;
    hipStreamCreateWithPriority(*mut hipStream_t, c_uint, c_int) -> hipError_t;
    hipStreamDestroy(hipStream_t) -> hipError_t;
    hipStreamGetFlags(hipStream_t, *mut c_uint) -> hipError_t;
    hipStreamQuery(hipStream_t) -> hipError_t;
    hipStreamSynchronize(hipStream_t) -> hipError_t;
    hipStreamWaitEvent(hipStream_t, hipEvent_t, c_uint) -> hipError_t;
    hipStreamWaitValue32(hipStream_t, *mut c_void, u32, c_uint, u32) -> hipError_t;
    hipStreamWriteValue32(hipStream_t, *mut c_void, u32, c_uint) -> hipError_t;
    hipLaunchHostFunc(hipStream_t, hipHostFn_t, *mut c_void) -> hipError_t;
    hipEventCreateWithFlags(*mut hipEvent_t, c_uint) -> hipError_t;
    hipEventDestroy(hipEvent_t) -> hipError_t;
    hipEventRecord(hipEvent_t, hipStream_t) -> hipError_t;
    hipEventQuery(hipEvent_t) -> hipError_t;
    hipEventElapsedTime(*mut f32, hipEvent_t, hipEvent_t) -> hipError_t;
    hipStreamBeginCapture(hipStream_t, c_uint) -> hipError_t;
    hipStreamEndCapture(hipStream_t, *mut hipGraph_t) -> hipError_t;
    hipStreamIsCapturing(hipStream_t, *mut c_uint) -> hipError_t;
    hipStreamGetCaptureInfo_v2(
        hipStream_t, *mut c_uint, *mut c_ulonglong, *mut hipGraph_t, *mut *const hipGraphNode_t,
        *mut usize,
    ) -> hipError_t;
    hipThreadExchangeStreamCaptureMode(*mut c_uint) -> hipError_t;
    hipUserObjectCreate(
        *mut hipUserObject_t, *mut c_void, hipHostFn_t, c_uint, c_uint,
    ) -> hipError_t;
    hipUserObjectRelease(hipUserObject_t, c_uint) -> hipError_t;
    hipGraphRetainUserObject(hipGraph_t, hipUserObject_t, c_uint, c_uint) -> hipError_t;
    hipGraphGetNodes(hipGraph_t, *mut hipGraphNode_t, *mut usize) -> hipError_t;
    hipGraphInstantiateWithFlags(*mut hipGraphExec_t, hipGraph_t, c_ulonglong) -> hipError_t;
    hipGraphLaunch(hipGraphExec_t, hipStream_t) -> hipError_t;
    hipGraphDestroy(hipGraph_t) -> hipError_t;
    hipGraphExecDestroy(hipGraphExec_t) -> hipError_t;
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Functions").finish_non_exhaustive()
    }
}

fn missing(call: &'static str) -> Error {
    Error::Driver {
        library: LIBRARY,
        call,
        detail: "the HIP runtime (libamdhip64.so) lacks the function; ROCm 6.0 or newer is \
                 needed"
            .to_owned(),
    }
}

/// Sonames of the library. Runtime packages contain only the names with a version.
const NAMES: [&str; 3] = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"];

/// Returns the functions of the HIP runtime. The runtime is never unloaded, because it starts
/// threads.
///
/// # Errors
/// `Error::NoDevice` if the runtime is not installed, `Error::Driver` if the runtime lacks a
/// function.
pub(super) fn functions() -> Result<&'static Functions> {
    static FUNCTIONS: OnceLock<Result<Functions>> = OnceLock::new();
    FUNCTIONS
        .get_or_init(|| open(&NAMES, &folders()))
        .as_ref()
        .map_err(Clone::clone)
}

/// Returns the folders from the environment variables of ROCm, followed by the default folder.
fn folders() -> Vec<PathBuf> {
    ["ROCM_PATH", "HIP_PATH"]
        .into_iter()
        .filter_map(std::env::var_os)
        .map(PathBuf::from)
        .chain([PathBuf::from("/opt/rocm")])
        .map(|root| root.join("lib"))
        .collect()
}

/// Opens the runtime. A runtime that the process has already loaded, such as the runtime that
/// PyTorch ships, has priority, because two runtimes in one process do not share memory and
/// streams. Otherwise the runtime is searched for in `folders` and then in the search path of the
/// loader.
fn open(names: &[&str], folders: &[PathBuf]) -> Result<Functions> {
    let mut tried = Vec::new();
    let loaded = names
        .iter()
        .map(|name| (PathBuf::from(name), libc::RTLD_NOLOAD));
    let here = folders
        .iter()
        .flat_map(|folder| names.iter().map(|name| (folder.join(name), 0)));
    let searched = names.iter().map(|name| (PathBuf::from(name), 0));
    for (path, flag) in loaded.chain(here).chain(searched) {
        if path.is_absolute() && !path.exists() {
            continue;
        }
        match load(&path, flag) {
            Ok(library) => {
                let functions = Functions::resolve(&library)?;
                core::mem::forget(library); // never unloaded: `functions` points into it
                return Ok(functions);
            }
            Err(reason) if flag == 0 => tried.push(reason),
            Err(_) => {}
        }
    }
    Err(absent(&tried))
}

fn load(path: &Path, flag: c_int) -> core::result::Result<Library, String> {
    // SAFETY: loading a library runs its initialisers. The initialisers of the HIP runtime have no
    // preconditions.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL | flag) }.map_err(|error| {
        let reason = core::error::Error::source(&error)
            .map_or_else(String::new, |source| format!(": {source}"));
        format!("{}: {error}{reason}", path.display())
    })
}

/// Creates the error for a missing runtime. Includes the reason if a library exists but cannot be
/// loaded.
fn absent(tried: &[String]) -> Error {
    let reasons = tried
        .iter()
        .filter(|reason| !reason.contains("No such file"))
        .map(|reason| format!("; {reason}"))
        .collect::<String>();
    Error::NoDevice {
        device: "hip".to_owned(),
        detail: format!(
            "no HIP runtime (libamdhip64.so not found); install ROCm 6.0 or newer, or set \
             ROCM_PATH{reasons}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_library_is_said_so() {
        let error = open(&["libfusewire-no-such-hip.so"], &[]).unwrap_err();
        let Error::NoDevice { device, detail } = &error else {
            panic!("{error}");
        };
        assert_eq!(device, "hip");
        assert!(
            detail.starts_with("no HIP runtime (libamdhip64.so not found); "),
            "{detail}"
        );
        assert!(!detail.contains("libfusewire-no-such-hip"), "{detail}");
    }

    #[test]
    fn an_absent_symbol_is_named() {
        // libc is loaded in every process and does not have the functions of HIP.
        let error = open(&["libc.so.6"], &[]).unwrap_err();
        let Error::Driver {
            library,
            call,
            detail,
        } = &error
        else {
            panic!("{error}");
        };
        assert_eq!((*library, *call), ("HIP", "hipInit"));
        assert!(detail.contains("ROCm 6.0"), "{detail}");
    }

    #[test]
    fn a_library_that_does_not_load_gives_its_reason() {
        let folder = std::env::temp_dir().join(format!("fusewire-hip-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("libfusewire-bad-hip.so"), b"not a library").unwrap();
        let error = open(&["libfusewire-bad-hip.so"], core::slice::from_ref(&folder)).unwrap_err();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(matches!(error, Error::NoDevice { .. }));
        let text = error.to_string();
        assert!(text.contains("libfusewire-bad-hip.so: "), "{text}");
    }
}
