//! Tests mappings, blocks and copies.

use core::ptr::null_mut;
use std::os::unix::process::ExitStatusExt;

use cudarc::driver::sys::{self, CUmemAccess_flags, CUmemAllocationHandleType};

use crate::support::*;

/// Granularity of physical memory in bytes.
const GRANULARITY: usize = 2 << 20;

const DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Returns the properties of memory on device 0 that can be exported as `handles`.
pub(crate) fn properties(handles: CUmemAllocationHandleType) -> sys::CUmemAllocationProp {
    // SAFETY: zero is a valid value of every field.
    let mut properties: sys::CUmemAllocationProp = unsafe { core::mem::zeroed() };
    properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.requestedHandleTypes = handles;
    properties.location.type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties
}

fn create(handles: CUmemAllocationHandleType) -> u64 {
    let mut handle = 0;
    ok!(cuMemCreate(
        &raw mut handle,
        GRANULARITY,
        &properties(handles),
        0
    ));
    handle
}

fn reserve(bytes: usize) -> u64 {
    let mut address = 0;
    ok!(cuMemAddressReserve(&raw mut address, bytes, 0, 0, 0));
    address
}

fn allow(address: u64, bytes: usize, flags: CUmemAccess_flags) {
    let description = sys::CUmemAccessDesc {
        location: properties(DESCRIPTOR).location,
        flags,
    };
    ok!(cuMemSetAccess(address, bytes, &description, 1));
}

/// Maps an allocation for reading and writing. Returns its address.
pub(crate) fn map(handle: u64) -> u64 {
    let address = reserve(GRANULARITY);
    ok!(cuMemMap(address, GRANULARITY, 0, handle, 0));
    allow(
        address,
        GRANULARITY,
        CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    );
    address
}

driver_test! {
    /// Creates, exports, imports, maps and frees an allocation. The imported handle maps the same
    /// memory.
    life_of_a_mapping() {
        start();
        let mut granularity = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        ok!(cuMemGetAllocationGranularity(&raw mut granularity, &properties(DESCRIPTOR), minimum));
        assert_eq!(granularity, GRANULARITY);
        let handle = create(DESCRIPTOR);
        let mut fd = -1;
        ok!(cuMemExportToShareableHandle((&raw mut fd).cast(), handle, DESCRIPTOR, 0));
        let mut twin = 0;
        ok!(cuMemImportFromShareableHandle(&raw mut twin, fd as usize as _, DESCRIPTOR));
        let (first, second) = (map(handle), map(twin));
        ok!(cuMemRelease(handle));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemRelease(handle));
        write(first, &[1, 2, 3]);
        assert_eq!(read(second, 3), [1, 2, 3]);
        let mut retained = 0;
        ok!(cuMemRetainAllocationHandle(&raw mut retained, second as _));
        assert_eq!(retained, twin);
        ok!(cuMemRelease(retained));
        let mut found = properties(CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE);
        ok!(cuMemGetAllocationPropertiesFromHandle(&raw mut found, twin));
        assert_eq!(found.requestedHandleTypes, DESCRIPTOR);
        ok!(cuMemRelease(twin));
        for address in [first, second] {
            fails!(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(address, GRANULARITY));
            ok!(cuMemUnmap(address, GRANULARITY));
            fails!(CUDA_ERROR_INVALID_VALUE, cuMemUnmap(address, GRANULARITY));
            ok!(cuMemAddressFree(address, GRANULARITY));
        }
        assert_eq!(live(c"all"), 0);
    }
}

driver_test! {
    shapes_that_are_refused() {
        start();
        let mut handle = 0;
        let prop = properties(DESCRIPTOR);
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemCreate(&raw mut handle, 4096, &prop, 0));
        let fabric = properties(CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC);
        fails!(CUDA_ERROR_NOT_SUPPORTED, cuMemCreate(&raw mut handle, GRANULARITY, &fabric, 0));
        let mut far = prop;
        far.location.id = 1;
        fails!(CUDA_ERROR_INVALID_DEVICE, cuMemCreate(&raw mut handle, GRANULARITY, &far, 0));
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuMemCreate(&raw mut handle, 1 << 40, &prop, 0));
        let mut address = 0;
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemAddressReserve(&raw mut address, 4096, 0, 0, 0));

        let handle = create(DESCRIPTOR);
        let address = reserve(2 * GRANULARITY);
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemMap(address + 4096, GRANULARITY, 0, handle, 0));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemMap(address, 2 * GRANULARITY, 0, handle, 0));
        let beyond = address + 2 * GRANULARITY as u64;
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemMap(beyond, GRANULARITY, 0, handle, 0));
        ok!(cuMemMap(address, GRANULARITY, 0, handle, 0));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemMap(address, GRANULARITY, 0, handle, 0));
        let description = sys::CUmemAccessDesc {
            location: prop.location,
            flags: CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemSetAccess(address, 2 * GRANULARITY, &description, 1));
        ok!(cuMemMap(address + GRANULARITY as u64, GRANULARITY, 0, handle, 0));
        ok!(cuMemSetAccess(address, 2 * GRANULARITY, &description, 1));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemAddressFree(address, GRANULARITY));
        ok!(cuMemUnmap(address, 2 * GRANULARITY));

        let private = create(CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE);
        let mut fd = -1;
        let out = (&raw mut fd).cast();
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemExportToShareableHandle(out, private, DESCRIPTOR, 0));
        let mut twin = 0;
        // The null pointer means descriptor 0, standard input, which is not a memory file.
        fails!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemImportFromShareableHandle(&raw mut twin, null_mut(), DESCRIPTOR)
        );
        fails!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemImportFromShareableHandle(&raw mut twin, 9999 as _, DESCRIPTOR)
        );
    }
}

driver_test! {
    /// An access to mapped memory without access rights causes a sticky error. With access rights
    /// the access succeeds.
    access_is_needed() {
        start();
        let handle = create(DESCRIPTOR);
        let good = map(handle);
        let address = reserve(GRANULARITY);
        ok!(cuMemMap(address, GRANULARITY, 0, handle, 0));
        write(good, &[5]);
        let stream = stream();
        let host = [7u64];
        ok!(cuMemcpyHtoDAsync_v2(good, host.as_ptr().cast(), 8, stream));
        ok!(cuStreamSynchronize(stream));
        allow(address, GRANULARITY, CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ);
        assert_eq!(read(address, 1), [7]);
        ok!(cuMemcpyHtoDAsync_v2(address, host.as_ptr().cast(), 8, stream));
        fails!(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
        fails!(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
        let mut block = 0;
        fails!(CUDA_ERROR_ILLEGAL_ADDRESS, cuMemAlloc_v2(&raw mut block, 64));
    }
}

driver_test! {
    blocks("MEMORY" = "1048576") {
        start();
        let address = block(100);
        let (mut base, mut bytes) = (0, 0);
        ok!(cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, address + 64));
        assert_eq!((base, bytes), (address, 100));
        assert_eq!(read(address, 1), [0xcbcb_cbcb_cbcb_cbcb], "new memory is not zero");
        ok!(cuMemsetD8_v2(address, 3, 8));
        assert_eq!(read(address, 1), [0x0303_0303_0303_0303]);
        let host = [0u8; 104];
        ok!(cuMemcpyHtoD_v2(address, host.as_ptr().cast(), 100));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(address, host.as_ptr().cast(), 101));
        let somewhere = host.as_ptr() as u64;
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD_v2(somewhere, host.as_ptr().cast(), 8));
        fails!(
            CUDA_ERROR_NOT_FOUND,
            cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, somewhere)
        );
        let mut more = 0;
        fails!(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc_v2(&raw mut more, 1 << 20));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(address + 8));
        ok!(cuMemFree_v2(address));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(address));
        ok!(cuMemAlloc_v2(&raw mut more, 1 << 20));
        ok!(cuMemFree_v2(more));
        assert_eq!(live(c"all"), 0);
    }
}

driver_test! {
    host_memory() {
        start();
        let mut host = null_mut();
        ok!(cuMemHostAlloc(&raw mut host, 64, 2));
        let mut device = 0;
        ok!(cuMemHostGetDevicePointer_v2(&raw mut device, host, 0));
        let pageable = (&raw const device).cast_mut().cast();
        let mut nothing = 0;
        fails!(
            CUDA_ERROR_INVALID_VALUE,
            cuMemHostGetDevicePointer_v2(&raw mut nothing, pageable, 0)
        );
        write(device, &[11]);
        // SAFETY: `host` has at least one word, and no running work uses `host`.
        assert_eq!(unsafe { host.cast::<u64>().read() }, 11);
        let kind = |address| {
            let mut kind = 0u32;
            let attribute = sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
            let code = code!(cuPointerGetAttribute((&raw mut kind).cast(), attribute, address));
            (code, kind)
        };
        assert_eq!(kind(device), (CUDA_SUCCESS, 1));
        assert_eq!(kind(block(64)), (CUDA_SUCCESS, 2));
        assert_eq!(kind(pageable as u64).0, CUDA_ERROR_INVALID_VALUE);
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemFree_v2(device));
        ok!(cuMemFreeHost(host));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(host));
    }
}

driver_test! {
    /// An asynchronous copy reads pageable memory before the call returns, and page-locked memory
    /// in stream order.
    when_a_copy_reads() {
        start();
        let (stream, target) = (stream(), block(16));
        let mut pinned = null_mut();
        ok!(cuMemHostAlloc(&raw mut pinned, 8, 0));
        let pinned = pinned.cast::<u64>();
        let mut pageable = 1u64;
        // SAFETY: the words are in host memory of this test, and no running work uses them.
        unsafe { pinned.write(1) };
        let switch = Switch::new();
        switch.block(stream);
        ok!(cuMemcpyHtoDAsync_v2(target, (&raw const pageable).cast(), 8, stream));
        ok!(cuMemcpyHtoDAsync_v2(target + 8, pinned.cast(), 8, stream));
        pageable += 1;
        // SAFETY: the words are in host memory of this test, and the copy cannot access them before
        // the switch is opened.
        unsafe { pinned.write(pageable) };
        switch.open();
        ok!(cuStreamSynchronize(stream));
        assert_eq!(read(target, 2), [1, 2]);
    }
}

/// With `FUSEWIRE_CUDA_FAKE_GUARD=1`, host accesses to device memory crash and device accesses
/// succeed.
#[test]
fn guarded_memory() {
    let name = concat!(module_path!(), "::guarded_memory");
    let output = run_child(name, &[("GUARD", "1")], || {
        start();
        let address = block(64);
        write(address, &[3]);
        assert_eq!(read(address, 1), [3]);
        println!("the device may");
        // SAFETY: `address` is mapped in this process. The guard removes access rights, so the read
        // raises SIGSEGV, which the test expects.
        let word = unsafe { (address as *const u64).read_volatile() };
        println!("the host may: {word}");
    });
    let Some(output) = output else { return };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        text.contains("the device may") && !text.contains("the host may"),
        "{text}"
    );
    assert_eq!(output.status.signal(), Some(libc::SIGSEGV), "{output:?}");
}

driver_test! {
    /// Registers user memory, and ends the registration.
    registered_memory() {
        start();
        let mut words = [1u64, 2];
        let out = words.as_mut_ptr().cast();
        let mut device = 0;
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemHostGetDevicePointer_v2(&raw mut device, out, 0));
        ok!(cuMemHostRegister_v2(out, 16, 0));
        fails!(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister_v2(out, 8, 0));
        ok!(cuMemHostGetDevicePointer_v2(&raw mut device, out, 0));
        let target = block(16);
        ok!(cuMemcpyDtoD_v2(target, device, 16));
        assert_eq!(read(target, 2), [1, 2]);
        ok!(cuMemHostUnregister(out));
        fails!(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(out));
        fails!(CUDA_ERROR_INVALID_VALUE, cuMemcpyDtoD_v2(target, device, 16));
    }
}
