//! IPC handles: 64 bytes that identify a process and one of its open memory files.

use super::backing::Backing;
use super::handoff::{self, BYTES};
use super::memory::{self, Kind};
use crate::status::{Result, Status};

const MAGIC: u64 = 0x4655_5345_4950_4331; // "FUSEIPC1"

/// Returns the IPC handle of the block that contains an address.
pub(crate) fn export(address: u64) -> Result<[u8; BYTES]> {
    let region = memory::find(address).ok_or(Status::InvalidValue)?;
    let (Kind::Block, Some(backing)) = (&region.kind, &region.backing) else {
        return Err(Status::InvalidValue);
    };
    let [pid, fd, inode] = handoff::name(&backing.file);
    Ok(handoff::pack(&[MAGIC, pid, fd, inode, region.requested]))
}

/// Maps the block that an IPC handle identifies. Returns the address of the mapping.
pub(crate) fn open(handle: &[u8; BYTES], device: u32, context: usize) -> Result<u64> {
    let [magic, pid, fd, inode, requested, ..] = handoff::unpack(handle);
    if magic != MAGIC {
        return Err(Status::InvalidValue);
    }
    if pid == u64::from(std::process::id()) {
        // The driver refuses to open a handle in the process that exported it.
        return Err(Status::InvalidContext);
    }
    let file = handoff::open([pid, fd, inode]).ok_or(Status::InvalidHandle)?;
    let backing = Backing::adopt(file).ok_or(Status::InvalidHandle)?;
    if requested > backing.bytes {
        return Err(Status::InvalidHandle);
    }
    memory::open_block(backing, requested, device, context)
}
