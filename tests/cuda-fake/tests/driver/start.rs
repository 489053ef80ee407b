//! Tests initialisation, devices, contexts, injected failures and reports.

use core::ptr::null_mut;

use cudarc::driver::sys;

use crate::support::*;

driver_test! {
    /// All calls fail before `cuInit`. Calls that need a context fail without a current context.
    order_of_the_start() {
        let mut count = 0;
        fails!(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&raw mut count));
        fails!(CUDA_ERROR_INVALID_VALUE, cuInit(1));
        ok!(cuInit(0));
        ok!(cuDeviceGetCount(&raw mut count));
        assert_eq!(count, 1);
        let mut address = 0;
        fails!(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc_v2(&raw mut address, 64));
        start();
        ok!(cuMemAlloc_v2(&raw mut address, 64));
        std::thread::spawn(move || {
            let mut other = 0;
            fails!(CUDA_ERROR_INVALID_CONTEXT, cuMemAlloc_v2(&raw mut other, 64));
        })
        .join()
        .unwrap();
    }
}

driver_test! {
    no_device("DEVICES" = "0") {
        fails!(CUDA_ERROR_NO_DEVICE, cuInit(0));
    }
}

driver_test! {
    two_devices("DEVICES" = "2") {
        ok!(cuInit(0));
        let mut device = 7;
        ok!(cuDeviceGet(&raw mut device, 1));
        fails!(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&raw mut device, 2));
        let uuid = |device| {
            let mut uuid = sys::CUuuid { bytes: [0; 16] };
            ok!(cuDeviceGetUuid_v2(&raw mut uuid, device));
            uuid.bytes
        };
        assert_ne!(uuid(0), uuid(1));
        let mut can = 0;
        ok!(cuDeviceCanAccessPeer(&raw mut can, 0, 1));
        assert_eq!(can, 1);
        let atomics = sys::CUdevice_P2PAttribute::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED;
        let mut has = 0;
        ok!(cuDeviceGetP2PAttribute(&raw mut has, atomics, 1, 0));
        assert_eq!(has, 1);
        fails!(
            CUDA_ERROR_INVALID_DEVICE,
            cuDeviceGetP2PAttribute(&raw mut has, atomics, 1, 1)
        );
        let attribute = |attribute| {
            let mut value = -1;
            ok!(cuDeviceGetAttribute(&raw mut value, attribute, 1));
            value
        };
        use sys::CUdevice_attribute::*;
        assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR), 9);
        assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT), 132);
        assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_WARP_SIZE), 32);
        assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH), 1);
        assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN), 227 << 10);
        assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED), 1);
        assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED), 1);
        assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED), 0);
        assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED), 0);
        assert_eq!(attribute(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH), 1);
        let (mut free, mut total) = (0, 0);
        start();
        ok!(cuMemGetInfo_v2(&raw mut free, &raw mut total));
        assert!(free == total && total > 140 << 30);
    }
}

driver_test! {
    /// Releasing the last reference destroys the context and all its objects.
    primary_context() {
        let context = start();
        let mut again = null_mut();
        ok!(cuDevicePrimaryCtxRetain(&raw mut again, 0));
        assert_eq!(context, again);
        let (stream, _block) = (stream(), block(64));
        ok!(cuDevicePrimaryCtxRelease_v2(0));
        ok!(cuStreamSynchronize(stream));
        assert_eq!(live(c"all"), 2);
        ok!(cuDevicePrimaryCtxRelease_v2(0));
        fails!(CUDA_ERROR_CONTEXT_IS_DESTROYED, cuStreamSynchronize(stream));
        assert_eq!((live(c"all"), live(c"context")), (0, 0));
        fails!(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease_v2(0));
        fails!(CUDA_ERROR_INVALID_CONTEXT, cuCtxSetCurrent(context));
        start();
        fails!(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(stream));
    }
}

driver_test! {
    /// A handle that does not exist, or that refers to another kind of object, is rejected.
    foreign_handles() {
        start();
        let wild = 0xdead_beef_usize;
        fails!(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(wild as _));
        fails!(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(wild as _));
        fails!(CUDA_ERROR_INVALID_HANDLE, cuModuleUnload(wild as _));
        fails!(CUDA_ERROR_INVALID_HANDLE, cuGraphLaunch(wild as _, null_mut()));
        fails!(CUDA_ERROR_INVALID_VALUE, cuGraphDestroy(wild as _));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemRelease(wild as _));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(wild as _));
        let stream = stream();
        fails!(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(stream.cast()));
        ok!(cuStreamDestroy_v2(stream));
        fails!(CUDA_ERROR_INVALID_HANDLE, cuStreamDestroy_v2(stream));
    }
}

driver_test! {
    injected_failures("FAIL" = "cuMemAlloc_v2:2=2,cuStreamCreate=999") {
        start();
        let (mut address, mut stream) = (0, null_mut());
        ok!(cuMemAlloc_v2(&raw mut address, 64));
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&raw mut address, 64));
        ok!(cuMemAlloc_v2(&raw mut address, 64));
        fails!(CUDA_ERROR_UNKNOWN, cuStreamCreate(&raw mut stream, 1));
        ok!(cuStreamCreate(&raw mut stream, 1));
        fail(c"cuStreamSynchronize", 1, CUDA_ERROR_LAUNCH_FAILED);
        fails!(CUDA_ERROR_LAUNCH_FAILED, cuStreamSynchronize(stream));
        ok!(cuStreamSynchronize(stream));
        assert_eq!((calls(c"cuMemAlloc_v2"), live(c"block")), (3, 2));
        assert_eq!(calls(c"cuMemFree_v2"), 0);
    }
}

driver_test! {
    error_texts() {
        let mut name = core::ptr::null();
        ok!(cuGetErrorName(CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, &raw mut name));
        // SAFETY: the driver returned a pointer to a static C string.
        let name = unsafe { core::ffi::CStr::from_ptr(name) };
        assert_eq!(name, c"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE");
        // The fake's name of a code equals the name of cudarc's constant.
        for code in [
            CUDA_SUCCESS,
            CUDA_ERROR_INVALID_PTX,
            CUDA_ERROR_STREAM_CAPTURE_UNJOINED,
            CUDA_ERROR_CAPTURED_EVENT,
            CUDA_ERROR_ILLEGAL_ADDRESS,
        ] {
            let mut text = core::ptr::null();
            ok!(cuGetErrorName(code, &raw mut text));
            // SAFETY: the driver returned a pointer to a static C string.
            let text = unsafe { core::ffi::CStr::from_ptr(text) };
            assert_eq!(text.to_str().unwrap(), format!("{code:?}"));
        }
    }
}

/// The report is available at run time and written at exit.
#[test]
fn reports() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("report-%p");
    let name = concat!(module_path!(), "::reports");
    let output = run_child(name, &[("REPORT", path.to_str().unwrap())], || {
        start();
        stream();
        let report = report();
        assert!(report.contains("\"cuStreamCreate\":1"), "{report}");
        assert!(report.contains("\"stream\":1"), "{report}");
        assert!(!report.contains("cuMemAlloc"), "{report}");
    });
    let Some(output) = output else { return };
    assert!(output.status.success(), "{output:?}");
    let mut files = std::fs::read_dir(folder.path()).unwrap();
    let file = files.next().unwrap().unwrap();
    let report: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(file.path()).unwrap()).unwrap();
    assert_eq!(report["calls"]["cuInit"], 1);
    assert_eq!(report["live"]["stream"], 1);
    assert_eq!(report["live"]["event"], 0);
    assert!(
        file.file_name()
            .to_str()
            .unwrap()
            .ends_with(&report["pid"].to_string())
    );
}

driver_test! {
    /// Each thread has a stack of contexts. Peer access can be enabled only once.
    stacks_and_peers("DEVICES" = "2") {
        let first = start();
        let (mut second, mut current, mut device) = (null_mut(), null_mut(), -1);
        ok!(cuDevicePrimaryCtxRetain(&raw mut second, 1));
        ok!(cuCtxPushCurrent_v2(second));
        ok!(cuCtxGetDevice(&raw mut device));
        assert_eq!(device, 1);
        fails!(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, cuCtxDisablePeerAccess(first));
        ok!(cuCtxEnablePeerAccess(first, 0));
        fails!(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, cuCtxEnablePeerAccess(first, 0));
        ok!(cuCtxDisablePeerAccess(first));
        ok!(cuCtxPopCurrent_v2(&raw mut current));
        assert_eq!(current, second);
        ok!(cuCtxGetDevice(&raw mut device));
        assert_eq!(device, 0);
        ok!(cuCtxSetCurrent(null_mut()));
        fails!(CUDA_ERROR_INVALID_CONTEXT, cuCtxGetDevice(&raw mut device));
        ok!(cuCtxGetCurrent(&raw mut current));
        assert!(current.is_null());
    }
}
