//! Multicast objects.

use core::ffi::{c_int, c_uint, c_ulonglong};

use super::{export, get, put};
use crate::api::vmm::known_handles;
use crate::core::context::{self, ready};
use crate::core::multicast;
use crate::status::{Result, Status};

/// `CUmulticastObjectProp`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct ObjectProp {
    devices: c_uint,
    bytes: usize,
    handle_types: c_ulonglong,
    flags: c_ulonglong,
}

const _: () = assert!(size_of::<ObjectProp>() == 32);

/// Reads and checks the properties of a multicast object.
fn properties(out: *const ObjectProp) -> Result<ObjectProp> {
    ready()?;
    multicast::supported()?;
    let wanted = get(out)?;
    if wanted.flags != 0 || wanted.devices == 0 {
        return Err(Status::InvalidValue);
    }
    let handles = u32::try_from(wanted.handle_types).or(Err(Status::InvalidValue))?;
    known_handles(handles)?;
    Ok(wanted)
}

export! {
    fn cuMulticastGetGranularity(bytes: *mut usize, prop: *const ObjectProp, option: c_uint) {
        properties(prop)?;
        if option > 1 {
            return Err(Status::InvalidValue);
        }
        put(bytes, multicast::granularity(option == 1) as usize)
    }

    fn cuMulticastCreate(handle: *mut u64, prop: *const ObjectProp) {
        let wanted = properties(prop)?;
        if handle.is_null() {
            return Err(Status::InvalidValue);
        }
        let handles = wanted.handle_types as u32;
        let made = multicast::create(wanted.bytes as u64, wanted.devices, handles)?;
        put(handle, made as u64)
    }

    fn cuMulticastAddDevice(handle: u64, device: c_int) {
        let device = context::device(device)?;
        multicast::join(handle as usize, device)
    }

    fn cuMulticastBindMem(
        handle: u64,
        offset: usize,
        memory: u64,
        memory_offset: usize,
        bytes: usize,
        flags: c_ulonglong,
    ) {
        ready()?;
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        let (memory, memory_offset) = (memory as usize, memory_offset as u64);
        let (handle, offset, bytes) = (handle as usize, offset as u64, bytes as u64);
        multicast::bind_allocation(handle, offset, memory, memory_offset, bytes)
    }

    fn cuMulticastBindAddr(
        handle: u64,
        offset: usize,
        address: u64,
        bytes: usize,
        flags: c_ulonglong,
    ) {
        ready()?;
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        multicast::bind_address(handle as usize, offset as u64, address, bytes as u64)
    }

    fn cuMulticastUnbind(handle: u64, device: c_int, offset: usize, bytes: usize) {
        let device = context::device(device)?;
        multicast::unbind(handle as usize, device, offset as u64, bytes as u64)
    }
}
