//! Tests multicast objects, and the exchange of objects and memory over a fabric.

use core::fmt::Write as _;
use std::process::Command;

use cudarc::driver::sys::{self, CUmemAllocationHandleType, CUmulticastGranularity_flags};

use crate::memory::{map, properties};
use crate::support::*;

const GRANULARITY: usize = 2 << 20;

const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;

fn team(devices: u32, handles: CUmemAllocationHandleType) -> sys::CUmulticastObjectProp {
    sys::CUmulticastObjectProp {
        numDevices: devices,
        size: GRANULARITY,
        handleTypes: handles.0.into(),
        flags: 0,
    }
}

/// Creates a multicast object for two devices.
fn create(handles: CUmemAllocationHandleType) -> u64 {
    let mut object = 0;
    ok!(cuMulticastCreate(&raw mut object, &team(2, handles)));
    object
}

/// Allocates memory of a device.
fn memory(device: i32, handles: CUmemAllocationHandleType) -> u64 {
    let mut wanted = properties(handles);
    wanted.location.id = device;
    let mut handle = 0;
    ok!(cuMemCreate(&raw mut handle, GRANULARITY, &wanted, 0));
    handle
}

driver_test! {
    /// Creates, imports, binds, maps and frees an object through two handles.
    life_of_an_object("DEVICES" = "2", "MULTICAST" = "1") {
        start();
        let minimum = CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_MINIMUM;
        let recommended = CUmulticastGranularity_flags::CU_MULTICAST_GRANULARITY_RECOMMENDED;
        let (mut least, mut best) = (0, 0);
        ok!(cuMulticastGetGranularity(&raw mut least, &team(2, DESCRIPTOR), minimum));
        ok!(cuMulticastGetGranularity(&raw mut best, &team(2, DESCRIPTOR), recommended));
        assert!(least == GRANULARITY && best > least);
        let first = create(DESCRIPTOR);
        let mut fd = -1;
        ok!(cuMemExportToShareableHandle((&raw mut fd).cast(), first, DESCRIPTOR, 0));
        let mut second = 0;
        ok!(cuMemImportFromShareableHandle(&raw mut second, fd as usize as _, DESCRIPTOR));
        let (here, there) = (memory(0, DESCRIPTOR), memory(1, DESCRIPTOR));

        // Binding and mapping fail until all devices have joined.
        ok!(cuMulticastAddDevice(first, 0));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMulticastAddDevice(second, 0));
        fails!(CUDA_ERROR_ILLEGAL_STATE, cuMulticastBindMem(first, 0, here, 0, GRANULARITY, 0));
        let mut address = 0;
        ok!(cuMemAddressReserve(&raw mut address, GRANULARITY, 0, 0, 0));
        fails!(CUDA_ERROR_ILLEGAL_STATE, cuMemMap(address, GRANULARITY, 0, first, 0));
        ok!(cuMulticastAddDevice(second, 1));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMulticastAddDevice(second, 1));

        ok!(cuMulticastBindMem(first, 0, here, 0, GRANULARITY, 0));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMulticastBindMem(first, 0, here, 0, GRANULARITY, 0));
        fails!(
            CUDA_ERROR_INVALID_VALUE,
            cuMulticastBindMem(second, 0, there, 0, 2 * GRANULARITY, 0)
        );
        fails!(
            CUDA_ERROR_INVALID_VALUE,
            cuMulticastBindMem(second, 0, there, 4096, GRANULARITY, 0)
        );
        let at = map(there);
        ok!(cuMulticastBindAddr(second, 0, at, GRANULARITY, 0));
        assert_eq!((live(c"multicast"), live(c"binding")), (2, 2));

        // The object's address can be mapped, but not accessed.
        ok!(cuMemMap(address, GRANULARITY, 0, first, 0));
        let mut word = 0u64;
        let out = (&raw mut word).cast();
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoH_v2(out, address, 8));
        ok!(cuMemUnmap(address, GRANULARITY));
        ok!(cuMemAddressFree(address, GRANULARITY));

        fails!(CUDA_ERROR_INVALID_VALUE, cuMulticastUnbind(first, 1, 0, GRANULARITY));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMulticastUnbind(first, 0, 0, 2 * GRANULARITY));
        ok!(cuMulticastUnbind(first, 0, 0, GRANULARITY));
        assert_eq!(live(c"binding"), 1);
        // Releasing the last reference removes the bindings.
        ok!(cuMemRelease(second));
        ok!(cuMemRelease(first));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemRelease(first));
        assert_eq!((live(c"multicast"), live(c"binding")), (0, 0));
        ok!(cuMemUnmap(at, GRANULARITY));
        ok!(cuMemAddressFree(at, GRANULARITY));
        ok!(cuMemRelease(here));
        ok!(cuMemRelease(there));
        assert_eq!(live(c"all"), 0);
    }
}

driver_test! {
    /// A device that has not joined cannot bind memory. A device cannot join an object that already
    /// has all its devices.
    devices_outside_of_the_team("DEVICES" = "3", "MULTICAST" = "1") {
        start();
        let object = create(DESCRIPTOR);
        ok!(cuMulticastAddDevice(object, 0));
        ok!(cuMulticastAddDevice(object, 2));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMulticastAddDevice(object, 1));
        fails!(CUDA_ERROR_INVALID_DEVICE, cuMulticastAddDevice(object, 3));
        let memory = memory(1, DESCRIPTOR);
        let mut other = 0;
        fails!(CUDA_ERROR_INVALID_DEVICE, cuMulticastBindMem(object, 0, memory, 0, GRANULARITY, 0));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMulticastAddDevice(memory, 0));
        fails!(CUDA_ERROR_NOT_SUPPORTED, cuMulticastCreate(&raw mut other, &team(2, FABRIC)));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMulticastCreate(&raw mut other, &team(0, DESCRIPTOR)));
    }
}

driver_test! {
    devices_without_multicast("DEVICES" = "2") {
        start();
        let mut object = 0;
        fails!(CUDA_ERROR_NOT_SUPPORTED, cuMulticastCreate(&raw mut object, &team(2, DESCRIPTOR)));
        fails!(CUDA_ERROR_NOT_SUPPORTED, cuMulticastAddDevice(object, 0));
    }
}

/// Environment variable with the handles for the other process.
const GIVEN: &str = "CUDA_FAKE_GIVEN";

const OVER_THE_FABRIC: &str = concat!(module_path!(), "::over_the_fabric");

type Handle = [u8; 64];

fn import(handle: &mut Handle) -> (sys::CUresult, u64) {
    let mut imported = 0;
    let out = handle.as_mut_ptr().cast();
    let code = code!(cuMemImportFromShareableHandle(
        &raw mut imported,
        out,
        FABRIC
    ));
    (code, imported)
}

fn export(handle: u64) -> Handle {
    let mut fabric = [0; 64];
    ok!(cuMemExportToShareableHandle(
        fabric.as_mut_ptr().cast(),
        handle,
        FABRIC,
        0
    ));
    fabric
}

driver_test! {
    /// Only processes of the same fabric can import a fabric handle. The import fails after the
    /// exporter has released the memory or object.
    over_the_fabric("DEVICES" = "2", "MULTICAST" = "1", "FABRIC" = "a") {
        start();
        let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED;
        let mut has = 0;
        ok!(cuDeviceGetAttribute(&raw mut has, attribute, 0));
        assert_eq!(has, 1);
        if let Ok(given) = std::env::var(GIVEN) {
            let mut handles: Vec<Handle> = given
                .split(',')
                .map(|text| {
                    let byte = |at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).unwrap();
                    core::array::from_fn(byte)
                })
                .collect();
            if std::env::var("FUSEWIRE_CUDA_FAKE_FABRIC").unwrap() != "a" {
                assert_eq!(import(&mut handles[0]).0, CUDA_ERROR_NOT_PERMITTED);
                return;
            }
            let (code, memory) = import(&mut handles[0]);
            assert_eq!(code, CUDA_SUCCESS);
            let address = map(memory);
            assert_eq!(read(address, 1), [41]);
            write(address, &[42]);
            assert_eq!(import(&mut handles[1]).0, CUDA_ERROR_INVALID_HANDLE);
            let (code, object) = import(&mut handles[2]);
            assert_eq!(code, CUDA_SUCCESS);
            ok!(cuMulticastAddDevice(object, 1));
            handles[0][0] ^= 1;
            assert_eq!(import(&mut handles[0]).0, CUDA_ERROR_INVALID_VALUE);
            return;
        }
        let (kept, released, object) = (memory(0, FABRIC), memory(0, FABRIC), create(FABRIC));
        let plain = memory(0, DESCRIPTOR);
        let mut none = [0u8; 64];
        let out = none.as_mut_ptr().cast();
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemExportToShareableHandle(out, plain, FABRIC, 0));
        let mut text = String::new();
        for handle in [kept, released, object] {
            for byte in export(handle) {
                write!(text, "{byte:02x}").unwrap();
            }
            text.push(',');
        }
        ok!(cuMemRelease(released));
        ok!(cuMulticastAddDevice(object, 0));
        let address = map(kept);
        write(address, &[41]);
        let name = OVER_THE_FABRIC.split_once("::").unwrap().1;
        for fabric in ["b", "a"] {
            let output = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", name, "--nocapture", "--test-threads=1"])
                .env(GIVEN, text.trim_end_matches(','))
                .env("FUSEWIRE_CUDA_FAKE_FABRIC", fabric)
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{said}");
        }
        assert_eq!(read(address, 1), [42]);
        // The other process has added the last device to the object, so binding succeeds.
        ok!(cuMulticastBindMem(object, 0, kept, 0, GRANULARITY, 0));
    }
}
