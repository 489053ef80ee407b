//! NVML functions that report the fabric.

use core::ffi::{CStr, c_char, c_int, c_uint};

use super::device::bus_id;
use crate::core::record;
use crate::core::settings::{settings, variable};

const SUCCESS: c_int = 0;
/// `NVML_ERROR_INVALID_ARGUMENT`.
const INVALID: c_int = 2;
/// `NVML_ERROR_NOT_FOUND`.
const NOT_FOUND: c_int = 6;
/// `NVML_ERROR_ARGUMENT_VERSION_MISMATCH`.
const VERSION_MISMATCH: c_int = 25;

/// `nvmlGpuFabricInfo_v2_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct FabricInfo {
    version: c_uint,
    cluster: [u8; 16],
    status: c_int,
    clique: c_uint,
    state: u8,
    health: c_uint,
}

/// `nvmlGpuFabricInfo_v2`.
const VERSION: c_uint = 0x0200_0024;

const _: () = assert!(size_of::<FabricInfo>() == (VERSION & 0xff_ffff) as usize);

/// Parses `FUSEWIRE_CUDA_FAKE_NVML`: `STATE:STATUS:CLUSTER:CLIQUE`, the cluster in 32 hexadecimal
/// digits.
fn fabric_info() -> Option<FabricInfo> {
    let text = variable("NVML")?;
    let mut parts = text.split(':');
    let state = parts.next()?.parse().ok()?;
    let status = parts.next()?.parse().ok()?;
    let cluster = u128::from_str_radix(parts.next()?, 16).ok()?;
    Some(FabricInfo {
        version: VERSION,
        cluster: cluster.to_be_bytes(),
        status,
        clique: parts.next()?.parse().ok()?,
        state,
        health: 0,
    })
}

/// Counts a call. Returns the code of the injected failure, or 0 if none is injected.
fn enter(name: &'static str) -> c_int {
    record::enter(name).err().unwrap_or(0) as c_int
}

/// `nvmlInit_v2` of `nvml.h`.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub extern "C" fn nvmlInit_v2() -> c_int {
    enter("nvmlInit_v2")
}

/// `nvmlDeviceGetHandleByPciBusId_v2` of `nvml.h`. A handle is the device's ordinal plus 1.
///
/// # Safety
/// The requirements of `nvml.h`.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(
    bus: *const c_char,
    device: *mut usize,
) -> c_int {
    let code = enter("nvmlDeviceGetHandleByPciBusId_v2");
    if code != SUCCESS {
        return code;
    }
    if bus.is_null() || device.is_null() {
        return INVALID;
    }
    // SAFETY: `bus` is not null, and `nvml.h` requires a C string.
    let bus = unsafe { CStr::from_ptr(bus) };
    let found = (0..settings().devices).find(|device| bus.to_bytes() == bus_id(*device).as_bytes());
    let Some(found) = found else {
        return NOT_FOUND;
    };
    // SAFETY: `device` is not null, and `nvml.h` requires it to be writable.
    unsafe { device.write(found as usize + 1) };
    SUCCESS
}

/// `nvmlDeviceGetGpuFabricInfoV` of `nvml.h`, with version 2 of the structure.
///
/// # Safety
/// The requirements of `nvml.h`.
#[cfg_attr(feature = "exports", unsafe(no_mangle))]
#[allow(unreachable_pub)]
pub unsafe extern "C" fn nvmlDeviceGetGpuFabricInfoV(
    device: usize,
    info: *mut FabricInfo,
) -> c_int {
    let code = enter("nvmlDeviceGetGpuFabricInfoV");
    if code != SUCCESS {
        return code;
    }
    if info.is_null() || device == 0 || device > settings().devices as usize {
        return INVALID;
    }
    // SAFETY: `info` is not null (checked above), and every version of the structure starts with
    // its version number.
    if unsafe { info.cast::<c_uint>().read() } != VERSION {
        return VERSION_MISMATCH;
    }
    let none = FabricInfo {
        version: VERSION,
        cluster: [0; 16],
        status: SUCCESS,
        clique: 0,
        // `NVML_GPU_FABRIC_STATE_NOT_SUPPORTED`.
        state: 0,
        health: 0,
    };
    // SAFETY: `info` is not null and its version is 2 (both checked above), so `nvml.h` requires a
    // writable structure with the layout of `FabricInfo`.
    unsafe { info.write(fabric_info().unwrap_or(none)) };
    SUCCESS
}

/// Returns the address of the function `name`, if this module defines it.
pub(super) fn address(name: &str) -> Option<*const ()> {
    match name {
        "nvmlInit_v2" => Some(nvmlInit_v2 as *const ()),
        "nvmlDeviceGetHandleByPciBusId_v2" => Some(nvmlDeviceGetHandleByPciBusId_v2 as *const ()),
        "nvmlDeviceGetGpuFabricInfoV" => Some(nvmlDeviceGetGpuFabricInfoV as *const ()),
        _ => None,
    }
}
