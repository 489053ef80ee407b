//! Types and constants of `hip_runtime_api.h` in ROCm 6 and 7.
//!
//! With the feature `hip-prototypes` the types come from the crate `cubecl-hip-sys`, which bindgen
//! generated from AMD's headers. In such a build the compiler checks every prototype and every call
//! of this module against that crate, and tests compare constants and layouts. Ordinary builds do
//! not use `cubecl-hip-sys` for two reasons: the wrappers of the crate abort the process if a
//! symbol is missing, and the crate builds only with the ROCm versions that it lists.

#![allow(non_camel_case_types)]

use core::ffi::{c_int, c_uint};

#[cfg(feature = "hip-prototypes")]
pub(super) use cubecl_hip_sys::{
    hipDeviceptr_t, hipError_t, hipEvent_t, hipFunction_t, hipGraph_t, hipGraphExec_t,
    hipGraphNode_t, hipHostFn_t, hipIpcMemHandle_t, hipModule_t, hipStream_t, hipUUID,
    hipUserObject_t,
};

/// Structure that `hipGetDevicePropertiesR0600` fills. This module uses only the size of the
/// structure and the field `gcnArchName`.
#[cfg(feature = "hip-prototypes")]
pub(super) type Prop = cubecl_hip_sys::hipDeviceProp_tR0600;

#[cfg(not(feature = "hip-prototypes"))]
mod types {
    use core::ffi::{c_char, c_uint, c_void};

    macro_rules! handles {
        ($($opaque:ident $name:ident;)*) => {$(
            #[repr(C)]
            #[derive(Debug)]
            pub(in crate::hip) struct $opaque {
                _opaque: [u8; 0],
            }
            pub(in crate::hip) type $name = *mut $opaque;
        )*};
    }

    handles! {
        ihipStream_t hipStream_t;
        ihipEvent_t hipEvent_t;
        ihipModule_t hipModule_t;
        ihipModuleSymbol_t hipFunction_t;
        ihipGraph hipGraph_t;
        hipGraphNode hipGraphNode_t;
        hipGraphExec hipGraphExec_t;
        hipUserObject hipUserObject_t;
    }

    pub(in crate::hip) type hipError_t = c_uint;
    pub(in crate::hip) type hipDeviceptr_t = *mut c_void;
    pub(in crate::hip) type hipHostFn_t = Option<unsafe extern "C" fn(*mut c_void)>;

    #[repr(C)]
    #[derive(Clone, Copy)]
    pub(in crate::hip) struct hipIpcMemHandle_t {
        pub(in crate::hip) reserved: [c_char; 64],
    }

    #[repr(C)]
    #[derive(Clone, Copy)]
    pub(in crate::hip) struct hipUUID {
        pub(in crate::hip) bytes: [c_char; 16],
    }

    /// Opaque stand-in for `hipDeviceProp_tR0600`, with a size of [`super::PROP_BYTES`].
    #[repr(C)]
    pub(in crate::hip) struct Prop {
        _opaque: [u64; super::PROP_BYTES / 8],
    }
}

#[cfg(not(feature = "hip-prototypes"))]
pub(super) use self::types::{
    Prop, hipDeviceptr_t, hipError_t, hipEvent_t, hipFunction_t, hipGraph_t, hipGraphExec_t,
    hipGraphNode_t, hipHostFn_t, hipIpcMemHandle_t, hipModule_t, hipStream_t, hipUUID,
    hipUserObject_t,
};

/// Size of `hipDeviceProp_tR0600`. The size has not changed since ROCm 6.0, because new members
/// replace reserved words.
pub(super) const PROP_BYTES: usize = 1472;
/// Offset of `gcnArchName` in `hipDeviceProp_tR0600`.
pub(super) const PROP_ARCHITECTURE: usize = 1160;
/// Size of `gcnArchName`.
pub(super) const PROP_ARCHITECTURE_BYTES: usize = 256;

macro_rules! constants {
    ($($name:ident: $type:ty = $value:literal, $theirs:ident;)*) => {
        $(pub(super) const $name: $type = $value;)*

        #[cfg(all(test, feature = "hip-prototypes"))]
        mod constant_tests {
            #[test]
            fn constants_are_those_of_the_headers() {
                $(assert_eq!(
                    i128::from(super::$name),
                    i128::from(cubecl_hip_sys::$theirs),
                    stringify!($name),
                );)*
            }
        }
    };
}

constants! {
    SUCCESS: hipError_t = 0, hipError_t_hipSuccess;
    ERROR_OUT_OF_MEMORY: hipError_t = 2, hipError_t_hipErrorOutOfMemory;
    ERROR_NOT_INITIALIZED: hipError_t = 3, hipError_t_hipErrorNotInitialized;
    ERROR_INVALID_CONFIGURATION: hipError_t = 9, hipError_t_hipErrorInvalidConfiguration;
    ERROR_INVALID_DEVICE_POINTER: hipError_t = 17, hipError_t_hipErrorInvalidDevicePointer;
    ERROR_INSUFFICIENT_DRIVER: hipError_t = 35, hipError_t_hipErrorInsufficientDriver;
    ERROR_NO_DEVICE: hipError_t = 100, hipError_t_hipErrorNoDevice;
    ERROR_INVALID_DEVICE: hipError_t = 101, hipError_t_hipErrorInvalidDevice;
    ERROR_INVALID_IMAGE: hipError_t = 200, hipError_t_hipErrorInvalidImage;
    ERROR_INVALID_CONTEXT: hipError_t = 201, hipError_t_hipErrorInvalidContext;
    ERROR_NO_BINARY: hipError_t = 209, hipError_t_hipErrorNoBinaryForGpu;
    ERROR_SHARED_OBJECT: hipError_t = 303, hipError_t_hipErrorSharedObjectInitFailed;
    ERROR_NOT_FOUND: hipError_t = 500, hipError_t_hipErrorNotFound;
    ERROR_NOT_READY: hipError_t = 600, hipError_t_hipErrorNotReady;
    ERROR_ILLEGAL_ADDRESS: hipError_t = 700, hipError_t_hipErrorIllegalAddress;
    ERROR_PEER_ACCESS_ALREADY_ENABLED: hipError_t = 704,
        hipError_t_hipErrorPeerAccessAlreadyEnabled;
    ERROR_LAUNCH_FAILURE: hipError_t = 719, hipError_t_hipErrorLaunchFailure;
    ERROR_COOPERATIVE_TOO_LARGE: hipError_t = 720, hipError_t_hipErrorCooperativeLaunchTooLarge;
    ERROR_CAPTURE_UNSUPPORTED: hipError_t = 900, hipError_t_hipErrorStreamCaptureUnsupported;
    ERROR_CAPTURE_INVALIDATED: hipError_t = 901, hipError_t_hipErrorStreamCaptureInvalidated;
    ERROR_CAPTURE_UNJOINED: hipError_t = 904, hipError_t_hipErrorStreamCaptureUnjoined;
    ERROR_CAPTURE_IMPLICIT: hipError_t = 906, hipError_t_hipErrorStreamCaptureImplicit;
    ERROR_CAPTURE_WRONG_THREAD: hipError_t = 908, hipError_t_hipErrorStreamCaptureWrongThread;
    ATTRIBUTE_COOPERATIVE: c_uint = 10, hipDeviceAttribute_t_hipDeviceAttributeCooperativeLaunch;
    ATTRIBUTE_MAX_THREADS: c_uint = 56, hipDeviceAttribute_t_hipDeviceAttributeMaxThreadsPerBlock;
    ATTRIBUTE_MULTIPROCESSORS: c_uint = 63,
        hipDeviceAttribute_t_hipDeviceAttributeMultiprocessorCount;
    ATTRIBUTE_PCI_BUS: c_uint = 67, hipDeviceAttribute_t_hipDeviceAttributePciBusId;
    ATTRIBUTE_PCI_DEVICE: c_uint = 68, hipDeviceAttribute_t_hipDeviceAttributePciDeviceId;
    ATTRIBUTE_PCI_DOMAIN: c_uint = 69, hipDeviceAttribute_t_hipDeviceAttributePciDomainID;
    ATTRIBUTE_SHARED_BYTES: c_uint = 74,
        hipDeviceAttribute_t_hipDeviceAttributeMaxSharedMemoryPerBlock;
    ATTRIBUTE_WARP: c_uint = 87, hipDeviceAttribute_t_hipDeviceAttributeWarpSize;
    P2P_NATIVE_ATOMICS: c_uint = 2, hipDeviceP2PAttr_hipDevP2PAttrNativeAtomicSupported;
    FUNCTION_MAX_THREADS: c_uint = 0,
        hipFunction_attribute_HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK;
    FUNCTION_SHARED_BYTES: c_uint = 1, hipFunction_attribute_HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
    FUNCTION_LOCAL_BYTES: c_uint = 3, hipFunction_attribute_HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES;
    FUNCTION_REGISTERS: c_uint = 4, hipFunction_attribute_HIP_FUNC_ATTRIBUTE_NUM_REGS;
    MALLOC_UNCACHED: c_uint = 3, hipDeviceMallocUncached;
    HOST_PORTABLE: c_uint = 1, hipHostMallocPortable;
    HOST_MAPPED: c_uint = 2, hipHostMallocMapped;
    HOST_COHERENT: c_uint = 0x4000_0000, hipHostMallocCoherent;
    IPC_LAZY_PEER_ACCESS: c_uint = 1, hipIpcMemLazyEnablePeerAccess;
    STREAM_NON_BLOCKING: c_uint = 1, hipStreamNonBlocking;
    STREAM_WAIT_VALUE_GTE: c_uint = 0, hipStreamWaitValueGte;
    EVENT_DEFAULT: c_uint = 0, hipEventDefault;
    EVENT_DISABLE_TIMING: c_uint = 2, hipEventDisableTiming;
    COPY_HOST_TO_DEVICE: c_uint = 1, hipMemcpyKind_hipMemcpyHostToDevice;
    COPY_DEVICE_TO_HOST: c_uint = 2, hipMemcpyKind_hipMemcpyDeviceToHost;
    COPY_DEFAULT: c_uint = 4, hipMemcpyKind_hipMemcpyDefault;
    CAPTURE_THREAD_LOCAL: c_uint = 1, hipStreamCaptureMode_hipStreamCaptureModeThreadLocal;
    CAPTURE_RELAXED: c_uint = 2, hipStreamCaptureMode_hipStreamCaptureModeRelaxed;
    CAPTURE_STATUS_NONE: c_uint = 0, hipStreamCaptureStatus_hipStreamCaptureStatusNone;
    CAPTURE_STATUS_ACTIVE: c_uint = 1, hipStreamCaptureStatus_hipStreamCaptureStatusActive;
    USER_OBJECT_NO_SYNC: c_uint = 1, hipUserObjectFlags_hipUserObjectNoDestructorSync;
    USER_OBJECT_MOVE: c_uint = 1, hipUserObjectRetainFlags_hipGraphUserObjectMove;
}

/// Type of device numbers and attribute values: C's `int`.
pub(super) type Int = c_int;

#[cfg(all(test, feature = "hip-prototypes"))]
mod tests {
    use core::mem::{offset_of, size_of};

    use super::*;

    #[test]
    fn layout_of_the_device_properties() {
        assert_eq!(size_of::<Prop>(), PROP_BYTES);
        assert_eq!(offset_of!(Prop, gcnArchName), PROP_ARCHITECTURE);
        assert_eq!(size_of_val(&[0_u8; PROP_ARCHITECTURE_BYTES]), 256);
        assert_eq!(size_of::<hipIpcMemHandle_t>(), crate::gpu::HANDLE_BYTES);
    }
}
