//! Virtual memory management.

use core::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};

use super::{export, get, put};
use crate::core::backing::{Backing, GRANULARITY};
use crate::core::context::{self, ready};
use crate::core::handles::{ALLOCATIONS, MULTICASTS};
use crate::core::settings::settings;
use crate::core::{handoff, memory, multicast};
use crate::status::{Result, Status};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const DESCRIPTOR: u32 = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
const FABRIC: u32 = 8;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: u32 = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const DEVICE: u32 = 1;

/// `CUmemLocation`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct Location {
    kind: u32,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AllocationProp {
    kind: u32,
    handle_types: u32,
    location: Location,
    windows: *mut c_void,
    compression: u8,
    rdma: u8,
    usage: u16,
    reserved: [u8; 4],
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct AccessDesc {
    location: Location,
    flags: u32,
}

const _: () = assert!(size_of::<AllocationProp>() == 32 && size_of::<AccessDesc>() == 12);

/// Reads and checks the properties of an allocation. Returns the device and the handle types.
fn properties(out: *const AllocationProp) -> Result<(u32, u32)> {
    let wanted = get(out)?;
    if wanted.kind != PINNED || wanted.location.kind != DEVICE || wanted.compression > 1 {
        return Err(Status::InvalidValue);
    }
    let device = context::device(wanted.location.id)?;
    known_handles(wanted.handle_types)?;
    Ok((device, wanted.handle_types))
}

/// Returns an error if `types` contains a handle type that the devices do not support.
pub(super) fn known_handles(types: u32) -> Result<()> {
    let mut offered = 0;
    if settings().descriptors {
        offered |= DESCRIPTOR;
    }
    if settings().fabric.is_some() {
        offered |= FABRIC;
    }
    if types & !(DESCRIPTOR | FABRIC | 6) != 0 {
        return Err(Status::InvalidValue);
    }
    if types & !offered != 0 {
        return Err(Status::NotSupported);
    }
    Ok(())
}

export! {
    fn cuMemGetAllocationGranularity(
        bytes: *mut usize,
        prop: *const AllocationProp,
        option: c_uint,
    ) {
        ready()?;
        properties(prop)?;
        if option > 1 {
            return Err(Status::InvalidValue);
        }
        put(bytes, GRANULARITY as usize)
    }

    fn cuMemCreate(
        handle: *mut u64,
        bytes: usize,
        prop: *const AllocationProp,
        flags: c_ulonglong,
    ) {
        ready()?;
        let (device, handles) = properties(prop)?;
        let bytes = bytes as u64;
        if handle.is_null() || flags != 0 || bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(Status::InvalidValue);
        }
        let made = memory::create(Backing::new(bytes, device, handles)?);
        put(handle, made as u64)
    }

    fn cuMemRelease(handle: u64) {
        ready()?;
        memory::release(handle as usize).or_else(|_| multicast::release(handle as usize))
    }

    fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) {
        ready()?;
        if handle.is_null() {
            return Err(Status::InvalidValue);
        }
        put(handle, memory::retain(address as u64)? as u64)
    }

    fn cuMemGetAllocationPropertiesFromHandle(prop: *mut AllocationProp, handle: u64) {
        ready()?;
        let allocation = ALLOCATIONS.get(handle as usize).ok_or(Status::InvalidValue)?;
        put(prop, AllocationProp {
            kind: PINNED,
            handle_types: allocation.backing.handles,
            location: Location { kind: DEVICE, id: allocation.backing.device as c_int },
            windows: core::ptr::null_mut(),
            compression: 0,
            rdma: 0,
            usage: 0,
            reserved: [0; 4],
        })
    }

    fn cuMemAddressReserve(
        out: *mut u64,
        bytes: usize,
        alignment: usize,
        _hint: u64,
        flags: c_ulonglong,
    ) {
        ready()?;
        if out.is_null() || flags != 0 {
            return Err(Status::InvalidValue);
        }
        put(out, memory::reserve(bytes as u64, alignment as u64)?)
    }

    fn cuMemAddressFree(address: u64, bytes: usize) {
        ready()?;
        memory::unreserve(address, bytes as u64)
    }

    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) {
        ready()?;
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        memory::map(address, bytes as u64, offset as u64, handle as usize)
    }

    fn cuMemUnmap(address: u64, bytes: usize) {
        ready()?;
        memory::unmap(address, bytes as u64)
    }

    fn cuMemSetAccess(address: u64, bytes: usize, descriptions: *const AccessDesc, count: usize) {
        ready()?;
        if count == 0 {
            return Err(Status::InvalidValue);
        }
        for at in 0..count {
            // SAFETY: `at < count`, and `cuda.h` requires an array of `count` descriptions.
            let description = get(unsafe { descriptions.add(at) })?;
            if description.location.kind != DEVICE {
                return Err(Status::InvalidValue);
            }
            let device = context::device(description.location.id)?;
            memory::set_access(address, bytes as u64, device, description.flags)?;
        }
        Ok(())
    }

    fn cuMemGetAccess(flags: *mut c_ulonglong, location: *const Location, address: u64) {
        ready()?;
        let location = get(location)?;
        let device = context::device(location.id)?;
        put(flags, memory::access(address, device)?.into())
    }

    fn cuMemExportToShareableHandle(
        shareable: *mut c_void,
        handle: u64,
        kind: c_uint,
        flags: c_ulonglong,
    ) {
        ready()?;
        let allocation = ALLOCATIONS.get(handle as usize);
        let object = MULTICASTS.get(handle as usize);
        let (file, handles) = match (&allocation, &object) {
            (Some(allocation), _) => (&allocation.backing.file, allocation.backing.handles),
            (None, Some(object)) => (&object.file, object.handles),
            (None, None) => return Err(Status::InvalidValue),
        };
        known_handles(kind)?;
        if shareable.is_null() || flags != 0 || handles & kind == 0 {
            return Err(Status::InvalidValue);
        }
        if kind == FABRIC {
            return put(shareable.cast(), handoff::export_to_fabric(file)?);
        }
        let copy = file.try_clone().or(Err(Status::OperatingSystem))?;
        put(shareable.cast::<c_int>(), copy.into_raw_fd())
    }

    fn cuMemImportFromShareableHandle(handle: *mut u64, shareable: *mut c_void, kind: c_uint) {
        ready()?;
        if handle.is_null() || !matches!(kind, DESCRIPTOR | FABRIC) {
            return Err(Status::InvalidValue);
        }
        let fd = if kind == FABRIC {
            handoff::import_from_fabric(&get(shareable.cast_const().cast())?)?
        } else {
            let fd = shareable as usize as c_int;
            // SAFETY: `F_GETFD` accesses no memory and accepts any descriptor number.
            if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
                return Err(Status::InvalidValue);
            }
            // SAFETY: the `fcntl` call above found the descriptor open, and `cuda.h` requires that
            // it stays open during the call.
            let copy = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned();
            copy.or(Err(Status::OperatingSystem))?
        };
        if let Some(object) = multicast::adopt(&fd, kind)? {
            return put(handle, object as u64);
        }
        let backing = Backing::adopt(fd).ok_or(Status::InvalidValue)?;
        if backing.handles & kind == 0 {
            return Err(Status::InvalidValue);
        }
        put(handle, memory::create(backing) as u64)
    }
}
