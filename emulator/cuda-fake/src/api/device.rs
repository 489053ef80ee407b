//! Initialisation, devices and contexts.

use core::ffi::{c_char, c_int, c_uint};
use std::sync::Arc;

use super::{export, put, put_if};
use crate::core::context::{self, current, current_or_none, ready};
use crate::core::handles::CONTEXTS;
use crate::core::kernel::{
    MAX_THREADS, RESIDENT, SHARED_MOST, SHARED_MULTIPROCESSOR, SHARED_USUAL,
};
use crate::core::settings::settings;
use crate::core::{capture, lock};
use crate::status::{Result, SUCCESS, Status, describe};

/// Writes `text` with a terminating zero byte, truncated to `bytes`.
///
/// # Safety
/// `buffer` must be null or have `bytes` writable bytes.
pub(super) unsafe fn write_text(buffer: *mut c_char, bytes: usize, text: &str) {
    if buffer.is_null() || bytes == 0 {
        return;
    }
    let length = text.len().min(bytes - 1);
    // SAFETY: `buffer` is not null (checked above), so the caller guarantees `bytes` writable
    // bytes. `length` is less than `bytes` and at most the length of `text`.
    unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), length) };
    // SAFETY: `length < bytes`, so the terminating byte is within the buffer.
    unsafe { buffer.add(length).write(0) };
}

/// Writes a pointer to the name or the description of a result code.
fn put_text(code: u32, out: *mut *const c_char, description: bool) -> u32 {
    match describe(code) {
        Some((name, text)) => {
            put_if(out, if description { text } else { name }.as_ptr());
            SUCCESS
        }
        None => {
            put_if(out, core::ptr::null());
            Status::InvalidValue as u32
        }
    }
}

/// `cuGetErrorName` of `cuda.h`. Callbacks may call it.
///
/// # Safety
/// The requirements of `cuda.h`.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn cuGetErrorName(code: u32, out: *mut *const c_char) -> u32 {
    put_text(code, out, false)
}

/// `cuGetErrorString` of `cuda.h`. Callbacks may call it.
///
/// # Safety
/// The requirements of `cuda.h`.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn cuGetErrorString(code: u32, out: *mut *const c_char) -> u32 {
    put_text(code, out, true)
}

/// Returns the PCI bus id of a device.
pub(super) fn bus_id(device: u32) -> String {
    format!("0000:{:02X}:00.0", 0x10 + device)
}

/// Returns an attribute of a device by its number in `cuda.h`. Attributes that do not depend on the
/// settings have the values of an H200.
fn attribute(number: u32, device: u32) -> Result<i32> {
    let settings = settings();
    let value = match number {
        1 => MAX_THREADS,
        2 | 3 => 1024,
        4 => 64,
        5 => i32::MAX as u32,
        6 | 7 => 65_535,
        8 => SHARED_USUAL,
        9 => 65_536,
        10 => 32,
        12 | 82 => 65_536,
        13 => 1_980_000,
        16 => settings.multiprocessors,
        19 | 31 | 41 | 78..=80 | 83 | 89..=91 | 95 | 99 | 115 | 116 => 1,
        32 => 1,
        33 => 0x10 + device,
        36 => 3_201_000,
        37 => 6144,
        38 => 60 << 20,
        39 => RESIDENT.0,
        40 => 3,
        75 => settings.capability / 10,
        76 => settings.capability % 10,
        81 => SHARED_MULTIPROCESSOR,
        92..=94 | 121..=123 => 1,
        97 => SHARED_MOST,
        // Virtual memory management and the export of its memory as file descriptors.
        102 => 1,
        103 => u32::from(settings.descriptors),
        106 => RESIDENT.1,
        110 => 1,
        111 => 1024,
        119 => 1,
        // Clusters.
        120 => u32::from(settings.capability >= 90),
        125 => 1,
        // Fabric handles and multicast.
        128 => u32::from(settings.fabric.is_some()),
        132 => u32::from(settings.multicast),
        // The fake does not support any other feature, such as DMA buffers (124).
        11 | 14..=134 => 0,
        _ => return Err(Status::InvalidValue),
    };
    Ok(value as i32)
}

export! {
    fn cuInit(flags: c_uint) {
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        context::initialize()
    }

    fn cuDriverGetVersion(version: *mut c_int) {
        put(version, settings().driver as c_int)
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        ready()?;
        put(count, settings().devices as c_int)
    }

    fn cuDeviceGet(out: *mut c_int, ordinal: c_int) {
        let device = context::device(ordinal)?;
        put(out, device as c_int)
    }

    fn cuDeviceGetName(name: *mut c_char, bytes: c_int, device: c_int) {
        context::device(device)?;
        if name.is_null() || bytes <= 0 {
            return Err(Status::InvalidValue);
        }
        // SAFETY: `cuda.h` requires `bytes` writable bytes at `name`.
        unsafe { write_text(name, bytes as usize, "NVIDIA H200 (fake)") };
        Ok(())
    }

    fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) {
        put_uuid(uuid, device)
    }

    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) {
        put_uuid(uuid, device)
    }

    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        context::device(device)?;
        put(bytes, settings().memory_bytes as usize)
    }

    fn cuDeviceGetAttribute(value: *mut c_int, number: c_uint, device: c_int) {
        let device = context::device(device)?;
        put(value, attribute(number, device)?)
    }

    fn cuDeviceGetP2PAttribute(
        value: *mut c_int,
        number: c_uint,
        device: c_int,
        peer: c_int,
    ) {
        if context::device(device)? == context::device(peer)? {
            return Err(Status::InvalidDevice);
        }
        let attribute = match number {
            // Performance rank.
            1 => 0,
            // Access, and access to arrays.
            2 | 4 => c_int::from(settings().peer_access),
            // Native atomics.
            3 => c_int::from(settings().atomics),
            _ => return Err(Status::InvalidValue),
        };
        put(value, attribute)
    }

    fn cuDeviceGetPCIBusId(text: *mut c_char, bytes: c_int, device: c_int) {
        let device = context::device(device)?;
        if text.is_null() || bytes <= 0 {
            return Err(Status::InvalidValue);
        }
        // SAFETY: `cuda.h` requires `bytes` writable bytes at `text`.
        unsafe { write_text(text, bytes as usize, &bus_id(device)) };
        Ok(())
    }

    fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        let different = context::device(device)? != context::device(peer)?;
        put(can, c_int::from(different && settings().peer_access))
    }

    fn cuDevicePrimaryCtxRetain(out: *mut usize, device: c_int) {
        let device = context::device(device)?;
        if out.is_null() {
            return Err(Status::InvalidValue);
        }
        put(out, context::retain_primary(device))
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let device = context::device(device)?;
        context::release_primary(device)
    }

    fn cuDevicePrimaryCtxReset_v2(device: c_int) {
        let device = context::device(device)?;
        context::reset_primary(device);
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) {
        let (set, lives) = context::primary_state(context::device(device)?);
        put(flags, set)?;
        put(active, c_int::from(lives))
    }

    fn cuDevicePrimaryCtxSetFlags_v2(device: c_int, flags: c_uint) {
        context::set_primary_flags(context::device(device)?, flags);
        Ok(())
    }

    fn cuCtxSetCurrent(handle: usize) {
        context::set_current(handle)
    }

    fn cuCtxGetCurrent(out: *mut usize) {
        ready()?;
        let current = current_or_none()?;
        put(out, current.map_or(0, |context| context.handle))
    }

    fn cuCtxPushCurrent_v2(handle: usize) {
        context::push(handle)
    }

    fn cuCtxPopCurrent_v2(out: *mut usize) {
        let popped = context::pop()?;
        put_if(out, popped);
        Ok(())
    }

    fn cuCtxGetDevice(out: *mut c_int) {
        let context = current()?;
        put(out, context.device as c_int)
    }

    fn cuCtxGetApiVersion(handle: usize, version: *mut c_uint) {
        ready()?;
        if handle != 0 && CONTEXTS.get(handle).is_none() {
            return Err(Status::InvalidContext);
        }
        put(version, 3020)
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        current()?;
        put_if(least, 0);
        put_if(greatest, -5);
        Ok(())
    }

    fn cuCtxSynchronize() {
        let context = current()?;
        capture::observes_context(context.handle)?;
        context.synchronize()
    }

    fn cuCtxEnablePeerAccess(peer: usize, flags: c_uint) {
        let context = current()?;
        let other = CONTEXTS.get(peer).ok_or(Status::InvalidContext)?;
        if flags != 0 {
            return Err(Status::InvalidValue);
        }
        if Arc::ptr_eq(&context, &other) {
            return Err(Status::InvalidDevice);
        }
        if !settings().peer_access {
            return Err(Status::PeerAccessUnsupported);
        }
        let mut peers = lock(&context.peers);
        if peers.contains(&peer) {
            return Err(Status::PeerAccessAlreadyEnabled);
        }
        peers.push(peer);
        Ok(())
    }

    fn cuCtxDisablePeerAccess(peer: usize) {
        let context = current()?;
        let mut peers = lock(&context.peers);
        let at = peers.iter().position(|other| *other == peer);
        peers.remove(at.ok_or(Status::PeerAccessNotEnabled)?);
        Ok(())
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) {
        ready()?;
        let before = capture::exchange_mode(super::get(mode)?)?;
        put(mode, before)
    }
}

fn put_uuid(uuid: *mut [u8; 16], device: c_int) -> Result<()> {
    let device = context::device(device)?;
    put(uuid, context::uuid(device))
}
