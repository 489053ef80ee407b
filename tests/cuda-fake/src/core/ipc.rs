//! IPC handles: 64 bytes that name a process and the memory file that it has open.

use super::backing::Backing;
use super::handoff::{self, BYTES};
use super::memory::{self, Kind};
use crate::status::{Result, Status};

const MAGIC: u64 = 0x4655_5345_4950_4331; // "FUSEIPC1"

/// The handle of the block that an address lies in.
pub(crate) fn export(address: u64) -> Result<[u8; BYTES]> {
    let region = memory::find(address).ok_or(Status::InvalidValue)?;
    let (Kind::Block, Some(backing)) = (&region.kind, &region.backing) else {
        return Err(Status::InvalidValue);
    };
    let [pid, fd, inode] = handoff::name(&backing.file);
    Ok(handoff::pack(&[MAGIC, pid, fd, inode, region.requested]))
}

/// Maps the block of a handle; gives its beginning.
pub(crate) fn open(handle: &[u8; BYTES], device: u32, context: usize) -> Result<u64> {
    let [magic, pid, fd, inode, requested, ..] = handoff::unpack(handle);
    if magic != MAGIC {
        return Err(Status::InvalidValue);
    }
    if pid == u64::from(std::process::id()) {
        // A process does not open what it exported itself.
        return Err(Status::InvalidContext);
    }
    let file = handoff::open([pid, fd, inode]).ok_or(Status::InvalidHandle)?;
    let backing = Backing::adopt(file).ok_or(Status::InvalidHandle)?;
    if requested > backing.bytes {
        return Err(Status::InvalidHandle);
    }
    memory::open_block(backing, requested, device, context)
}
