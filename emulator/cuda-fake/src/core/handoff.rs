//! 64-byte handles to memory files of other processes: IPC handles and fabric handles.

use core::hash::{Hash, Hasher};
use std::fs::{File, OpenOptions};
use std::hash::DefaultHasher;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use super::settings::settings;
use crate::status::{Result, Status};

/// Size of a handle in bytes.
pub(crate) const BYTES: usize = 64;

const FABRIC: u64 = 0x4655_5345_4641_4231; // "FUSEFAB1"

/// Packs words into a handle.
pub(crate) fn pack(words: &[u64]) -> [u8; BYTES] {
    let mut bytes = [0; BYTES];
    for (target, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
        target.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

/// Unpacks the words of a handle.
pub(crate) fn unpack(handle: &[u8; BYTES]) -> [u64; BYTES / 8] {
    let (parts, _) = handle.as_chunks::<8>();
    core::array::from_fn(|index| u64::from_le_bytes(parts[index]))
}

/// Returns the process id, the descriptor and the inode that identify an open file of this process.
pub(crate) fn name(file: &File) -> [u64; 3] {
    [
        u64::from(std::process::id()),
        file.as_raw_fd() as u64,
        file.metadata().map_or(0, |data| data.ino()),
    ]
}

/// Opens the file that `pid`, `fd` and `inode` identify. Returns `None` if the process has closed
/// the file.
pub(crate) fn open([pid, fd, inode]: [u64; 3]) -> Option<OwnedFd> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/proc/{pid}/fd/{fd}"))
        .ok()?;
    // The inode is compared only after the file is open. Before that, the process could close its
    // file and reuse the descriptor number.
    (file.metadata().ok()?.ino() == inode).then(|| file.into())
}

/// Returns a number that identifies the fabric of the devices, or `None` if the devices have no
/// fabric.
fn fabric() -> Option<u64> {
    let name = settings().fabric.as_ref()?;
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    Some(hasher.finish())
}

/// Returns the fabric handle of a file.
pub(crate) fn export_to_fabric(file: &File) -> Result<[u8; BYTES]> {
    let fabric = fabric().ok_or(Status::NotSupported)?;
    let [pid, fd, inode] = name(file);
    Ok(pack(&[FABRIC, fabric, pid, fd, inode]))
}

/// Opens the file of a fabric handle. Fails if the handle is from another fabric.
pub(crate) fn import_from_fabric(handle: &[u8; BYTES]) -> Result<OwnedFd> {
    let own = fabric().ok_or(Status::NotSupported)?;
    let [magic, fabric, pid, fd, inode, ..] = unpack(handle);
    if magic != FABRIC {
        return Err(Status::InvalidValue);
    }
    if fabric != own {
        return Err(Status::NotPermitted);
    }
    open([pid, fd, inode]).ok_or(Status::InvalidHandle)
}
