//! Constants of communicators: the addresses that a kernel gets through them.

use bytemuck::Pod;
use fusewire_device::layout::{CONST_MAGIC, CommConst, LAYOUT_VERSION, MAX_WINDOWS, WindowConst};

use super::memory::{self, Location};
use super::settings::settings;

/// Reads a value from device memory. Returns `None` if the address is not in device memory that the
/// device can access. Call this function only while device work is running.
fn read<T: Pod>(address: u64, device: u32) -> Option<T> {
    let bytes = size_of::<T>() as u64;
    let aligned = address.is_multiple_of(align_of::<T>() as u64);
    if !aligned || memory::check(address, bytes, device, false) != Ok(Location::Device) {
        return None;
    }
    // SAFETY: the address is aligned, and `check` found `bytes` readable bytes at it. `T` permits
    // any bytes.
    Some(unsafe { (address as *const T).read_volatile() })
}

/// Describes the first workspace or window that a kernel on `device` could not access through the
/// constants at `address`. Returns `None` if there is none, or if the address is not the address of
/// constants.
pub(crate) fn fault(address: u64, device: u32) -> Option<String> {
    if settings().devices < 2 || read::<u64>(address, device)? != CONST_MAGIC {
        return None;
    }
    let constants: CommConst = read(address, device)?;
    // Data may begin with the same bytes as constants.
    if constants.version != LAYOUT_VERSION || constants.bytes != size_of::<CommConst>() as u32 {
        return None;
    }
    let members = u64::from(constants.team_size);
    let fault_of = |what: String, at: u64| {
        let part: u64 = read(at, device)?;
        memory::faults(part, device).then(|| {
            format!(
                "{what} at {part:#x} is memory of another device to which device {device} has no \
                 access"
            )
        })
    };
    for member in 0..members {
        let what = format!("the workspace of rank {member} of the team");
        if let Some(fault) = fault_of(what, constants.workspaces + 8 * member) {
            return Some(fault);
        }
    }
    let table = MAX_WINDOWS as u64 * constants.window_stride;
    if memory::check(constants.windows, table, device, false) != Ok(Location::Device) {
        return Some("the table of windows is not in device memory".to_owned());
    }
    for window in 0..MAX_WINDOWS as u64 {
        let entry = constants.windows + window * constants.window_stride;
        // SAFETY: `check` found the whole table readable. Its entries are aligned, and
        // `WindowConst` permits any bytes.
        if unsafe { (entry as *const WindowConst).read_volatile() }.bytes == 0 {
            continue;
        }
        let parts = entry + size_of::<WindowConst>() as u64;
        for member in 0..members {
            let what = format!("the part of rank {member} of the team of window {window}");
            if let Some(fault) = fault_of(what, parts + 8 * member) {
                return Some(fault);
            }
        }
    }
    None
}
