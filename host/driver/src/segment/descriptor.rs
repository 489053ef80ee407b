//! The descriptor with which a rank publishes its symmetric memory to its peers.

use crate::{Error, Result};

/// The values that a peer needs to map a segment. Ranks exchange descriptors through the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentDescriptor {
    /// Id of the process that created the segment.
    pub pid: u32,
    /// File descriptor of the memory file in process `pid`.
    pub fd: u32,
    /// Requested size in bytes.
    pub bytes: u64,
    /// Inode of the memory file.
    pub inode: u64,
    /// Start time of process `pid` in clock ticks since boot. Distinguishes the process from a
    /// later process with the same id.
    pub start_time: u64,
}

impl SegmentDescriptor {
    /// Length in bytes of the result of [`SegmentDescriptor::to_bytes`].
    pub const ENCODED_BYTES: usize = 40;

    const MAGIC: u32 = 0x4653_4731; // "FSG1"

    /// Encodes the descriptor in little-endian byte order.
    pub fn to_bytes(&self) -> [u8; Self::ENCODED_BYTES] {
        let mut bytes = [0; Self::ENCODED_BYTES];
        bytes[0..4].copy_from_slice(&Self::MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.pid.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.fd.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.inode.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.start_time.to_le_bytes());
        bytes
    }

    /// Decodes the result of [`SegmentDescriptor::to_bytes`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the bytes are not an encoded descriptor.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let valid = bytes.len() == Self::ENCODED_BYTES
            && u32_at(bytes, 0) == Self::MAGIC
            && u32_at(bytes, 12) == 0;
        if !valid {
            return Err(Error::InvalidArgument {
                operation: "segment descriptor",
                detail: format!("these {} bytes are not a segment descriptor", bytes.len()),
            });
        }
        Ok(Self {
            pid: u32_at(bytes, 4),
            fd: u32_at(bytes, 8),
            bytes: u64_at(bytes, 16),
            inode: u64_at(bytes, 24),
            start_time: u64_at(bytes, 32),
        })
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut array = [0; 4];
    array.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(array)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut array = [0; 8];
    array.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(array)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_survive_their_bytes_and_others_are_refused() {
        let descriptor = SegmentDescriptor {
            pid: 1,
            fd: 2,
            bytes: 1 << 40,
            inode: 4,
            start_time: u64::MAX,
        };
        let bytes = descriptor.to_bytes();
        assert_eq!(SegmentDescriptor::from_bytes(&bytes).unwrap(), descriptor);
        for bad in [&bytes[..39], &[], &[0; 40]] {
            assert!(SegmentDescriptor::from_bytes(bad).is_err());
        }
    }
}
