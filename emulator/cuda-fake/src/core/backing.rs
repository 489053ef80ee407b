//! Device memory, backed by memory files.

use core::ptr;
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Mutex;

use super::lock;
use super::settings::{POISON, settings};
use crate::status::{Result, Status};

/// Granularity of physical memory in bytes.
pub(crate) const GRANULARITY: u64 = 2 << 20;

/// Maximum number of bytes to poison at the start of an allocation.
const MAX_POISONED: u64 = 16 << 20;

const NAME: &str = "fusewire-cuda-fake";

/// Physical memory of a device.
#[derive(Debug)]
pub(crate) struct Backing {
    pub(crate) file: File,
    pub(crate) bytes: u64,
    pub(crate) device: u32,
    /// Bit set of the handle types that the memory can be exported as.
    pub(crate) handles: u32,
    /// True if this process created the memory. Imported memory does not count as used memory of
    /// the device.
    made: bool,
}

/// Number of bytes in use on each device.
static USED: Mutex<BTreeMap<u32, u64>> = Mutex::new(BTreeMap::new());

/// Returns the bytes of a device's memory that this process uses.
pub(crate) fn used(device: u32) -> u64 {
    lock(&USED).get(&device).copied().unwrap_or(0)
}

impl Drop for Backing {
    fn drop(&mut self) {
        if self.made
            && let Some(used) = lock(&USED).get_mut(&self.device)
        {
            *used -= self.bytes;
        }
    }
}

impl Backing {
    /// Allocates memory and fills it with [`POISON`], unless the settings disable poisoning.
    pub(crate) fn new(bytes: u64, device: u32, handles: u32) -> Result<Self> {
        {
            let mut used = lock(&USED);
            let used = used.entry(device).or_default();
            let total = used.checked_add(bytes).ok_or(Status::OutOfMemory)?;
            if total > settings().memory_bytes {
                return Err(Status::OutOfMemory);
            }
            *used = total;
        }
        let made = Self::create(bytes, device, handles);
        if made.is_err()
            && let Some(used) = lock(&USED).get_mut(&device)
        {
            *used -= bytes;
        }
        made
    }

    fn create(bytes: u64, device: u32, handles: u32) -> Result<Self> {
        let name = CString::new(format!("{NAME} {device} {handles}")).or(Err(Status::Unknown))?;
        // SAFETY: `name` is a live C string.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(Status::OperatingSystem);
        }
        // SAFETY: `memfd_create` has just returned `fd`, so it is open and has no other owner.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        file.set_len(bytes).or(Err(Status::OutOfMemory))?;
        if settings().poison {
            let chunk = vec![POISON; (1 << 20).min(bytes as usize)];
            let mut at = 0;
            while at < bytes.min(MAX_POISONED) {
                let part = chunk.len().min((bytes - at) as usize);
                file.write_all_at(&chunk[..part], at)
                    .or(Err(Status::OutOfMemory))?;
                at += part as u64;
            }
        }
        Ok(Self {
            file,
            bytes,
            device,
            handles,
            made: true,
        })
    }

    /// Adopts the memory of a descriptor that this or another process exported. Returns `None` if
    /// the descriptor does not refer to device memory.
    pub(crate) fn adopt(fd: OwnedFd) -> Option<Self> {
        let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok()?;
        let (device, handles) = attributes(&link)?;
        let file = File::from(fd);
        let bytes = file.metadata().ok()?.size();
        Some(Self {
            file,
            bytes,
            device,
            handles,
            made: false,
        })
    }

    /// Returns the memory file's inode number, which is unique on the host.
    pub(crate) fn inode(&self) -> u64 {
        self.file.metadata().map_or(0, |data| data.ino())
    }

    /// Maps the first `bytes` bytes of this memory. The mapping starts at `fixed_at`, or at an
    /// address that the OS selects.
    pub(crate) fn map(&self, fixed_at: Option<u64>, bytes: u64, protection: i32) -> Result<u64> {
        let (hint, fixed) = fixed_at.map_or((ptr::null_mut(), 0), |fixed_at| {
            (fixed_at as *mut libc::c_void, libc::MAP_FIXED)
        });
        // SAFETY: a mapping without a fixed address replaces no other mapping. A fixed address is
        // in an unused part of a reservation of the fake, because the callers check this.
        let address = unsafe {
            libc::mmap(
                hint,
                bytes as usize,
                protection,
                libc::MAP_SHARED | fixed,
                self.file.as_raw_fd(),
                0,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(Status::OutOfMemory);
        }
        Ok(address as u64)
    }
}

/// Parses the device and the handle types from the link target of a memory file's descriptor, such
/// as `/memfd:NAME 0 1 (deleted)`.
fn attributes(link: &Path) -> Option<(u32, u32)> {
    let text = link.to_str()?.strip_prefix("/memfd:")?;
    let mut parts = text.strip_prefix(NAME)?.split_whitespace();
    let device = parts.next()?.parse().ok()?;
    let handles = parts.next()?.parse().ok()?;
    Some((device, handles))
}

/// Reserves a range of addresses without access rights, at `fixed_at` or at an address that the OS
/// selects.
pub(crate) fn reserve(fixed_at: Option<u64>, bytes: u64) -> Result<u64> {
    let (hint, fixed) = fixed_at.map_or((ptr::null_mut(), 0), |fixed_at| {
        (fixed_at as *mut libc::c_void, libc::MAP_FIXED)
    });
    // SAFETY: a mapping without a fixed address replaces no other mapping. At a fixed address, the
    // new mapping replaces a mapping of the fake, which the caller intends to remove.
    let address = unsafe {
        libc::mmap(
            hint,
            bytes as usize,
            libc::PROT_NONE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed,
            -1,
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(Status::OutOfMemory);
    }
    Ok(address as u64)
}

/// Unmaps a range of addresses.
pub(crate) fn unmap(address: u64, bytes: u64) {
    // SAFETY: the callers pass ranges that the fake has mapped and does not use after this call.
    unsafe { libc::munmap(address as *mut libc::c_void, bytes as usize) };
}

/// Sets the protection of a mapped range.
pub(crate) fn protect(address: u64, bytes: u64, protection: i32) -> Result<()> {
    // SAFETY: the callers pass ranges that the fake has mapped.
    let code = unsafe { libc::mprotect(address as *mut libc::c_void, bytes as usize, protection) };
    if code == 0 {
        Ok(())
    } else {
        Err(Status::OperatingSystem)
    }
}
