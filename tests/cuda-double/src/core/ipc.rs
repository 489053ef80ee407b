//! IPC handles: 64 bytes that name a process and the memory file that it has open.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;

use super::backing::Backing;
use super::memory::{self, Kind};
use crate::status::{Result, Status};

/// Bytes of a handle.
pub(crate) const BYTES: usize = 64;

const MAGIC: u64 = 0x4655_5345_4950_4331; // "FUSEIPC1"

/// The handle of the block that an address lies in.
pub(crate) fn export(address: u64) -> Result<[u8; BYTES]> {
    let region = memory::find(address).ok_or(Status::InvalidValue)?;
    let (Kind::Block, Some(backing)) = (&region.kind, &region.backing) else {
        return Err(Status::InvalidValue);
    };
    let words = [
        MAGIC,
        u64::from(std::process::id()),
        backing.file.as_raw_fd() as u64,
        backing.inode(),
        region.requested,
    ];
    let mut bytes = [0; BYTES];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    Ok(bytes)
}

/// Maps the block of a handle; gives its beginning.
pub(crate) fn open(handle: &[u8; BYTES], device: u32, context: usize) -> Result<u64> {
    let mut words = [0u64; BYTES / 8];
    for (word, place) in words.iter_mut().zip(handle.chunks_exact(8)) {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(place);
        *word = u64::from_le_bytes(bytes);
    }
    let [magic, pid, fd, inode, requested, ..] = words;
    if magic != MAGIC {
        return Err(Status::InvalidValue);
    }
    if pid == u64::from(std::process::id()) {
        // A process does not open what it exported itself.
        return Err(Status::InvalidContext);
    }
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(format!("/proc/{pid}/fd/{fd}"))
        .or(Err(Status::InvalidHandle))?;
    // Through the opened file, which no reuse of the number can change any more.
    let backing = Backing::adopt(file.into()).ok_or(Status::InvalidHandle)?;
    if backing.inode() != inode || requested > backing.bytes {
        return Err(Status::InvalidHandle);
    }
    memory::open_block(backing, requested, device, context)
}
