//! Keys with which a peer addresses registered memory.

use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::{Error, Result};
use fusewire_driver::SegmentDescriptor;

/// Key of a registered [`Memory`](super::Memory) in another process. A process that has the key can
/// read and write the whole memory over a connection to its owner, until the owner drops the
/// memory.
///
/// Send keys to the peer out of band, as bytes or text. A key contains 64 random bits. Each access
/// is checked against these bits and the size of the memory; over RDMA, only the first access is,
/// and the device checks later ones against its own 32-bit key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteKey {
    pub(super) id: u64,
    pub(super) bytes: u64,
    pub(super) segment: Option<SegmentDescriptor>,
}

/// A range of remote memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteBuffer {
    /// The memory.
    pub key: RemoteKey,
    /// First byte, counted from the start of the memory.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl RemoteKey {
    /// Length in bytes of the result of [`RemoteKey::to_bytes`].
    pub const ENCODED_BYTES: usize = 24 + SegmentDescriptor::ENCODED_BYTES;

    const MAGIC: [u8; 4] = *b"FWK1";
    const TEXT_PREFIX: &'static str = "fwk1-";

    /// Returns the size of the memory in bytes, as its owner published it.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the range of `len` bytes that starts at byte `offset`. The range is checked when it
    /// is accessed.
    pub fn range(self, offset: u64, len: u64) -> RemoteBuffer {
        RemoteBuffer {
            key: self,
            offset,
            len,
        }
    }

    /// Returns a range that covers the whole memory.
    pub fn whole(self) -> RemoteBuffer {
        self.range(0, self.bytes)
    }

    /// Encodes the key as bytes, little endian.
    pub fn to_bytes(&self) -> [u8; Self::ENCODED_BYTES] {
        let mut bytes = [0; Self::ENCODED_BYTES];
        bytes[0..4].copy_from_slice(&Self::MAGIC);
        bytes[8..16].copy_from_slice(&self.id.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.bytes.to_le_bytes());
        if let Some(segment) = &self.segment {
            bytes[4] = 1;
            bytes[24..].copy_from_slice(&segment.to_bytes());
        }
        bytes
    }

    /// Decodes the result of [`RemoteKey::to_bytes`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the bytes are not a valid key.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let invalid = || Error::InvalidArgument {
            operation: "remote key",
            detail: format!(
                "these {} bytes are not a remote key of this version",
                bytes.len()
            ),
        };
        let bytes: &[u8; Self::ENCODED_BYTES] = bytes.try_into().map_err(|_| invalid())?;
        let segment = match bytes[4..8] {
            [0, 0, 0, 0] => None,
            [1, 0, 0, 0] => Some(SegmentDescriptor::from_bytes(&bytes[24..])?),
            _ => return Err(invalid()),
        };
        if bytes[0..4] != Self::MAGIC || (segment.is_none() && bytes[24..].iter().any(|b| *b != 0))
        {
            return Err(invalid());
        }
        Ok(Self {
            id: super::wire::u64_at(bytes, 8),
            bytes: super::wire::u64_at(bytes, 16),
            segment,
        })
    }
}

impl fmt::Display for RemoteKey {
    /// Formats the key as one word of letters, digits and a dash.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::TEXT_PREFIX)?;
        let bytes = self.to_bytes();
        // If the memory is in no segment, the bytes of the descriptor are zero, and the text omits
        // them.
        let used = if self.segment.is_some() {
            &bytes[..]
        } else {
            &bytes[..24]
        };
        used[4..]
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for RemoteKey {
    type Err = Error;

    /// Parses the result of `to_string`.
    fn from_str(text: &str) -> Result<Self> {
        let mut bytes = [0; Self::ENCODED_BYTES];
        bytes[0..4].copy_from_slice(&Self::MAGIC);
        let digits = text
            .strip_prefix(Self::TEXT_PREFIX)
            .filter(|digits| matches!(digits.len(), 40 | 120) && digits.is_ascii());
        let read = digits.and_then(|digits| {
            for (byte, at) in bytes[4..].iter_mut().zip((0..digits.len()).step_by(2)) {
                *byte = u8::from_str_radix(&digits[at..at + 2], 16).ok()?;
            }
            Some(())
        });
        read.ok_or_else(|| Error::InvalidArgument {
            operation: "remote key",
            detail: format!("a text of {} bytes is not a remote key", text.len()),
        })?;
        Self::from_bytes(&bytes)
    }
}

/// Serializes the key as its text.
impl Serialize for RemoteKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> core::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Parses the text of the key.
impl<'de> Deserialize<'de> for RemoteKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> core::result::Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_bytes_and_text_and_others_are_refused() {
        let plain = RemoteKey {
            id: u64::MAX - 3,
            bytes: 1 << 40,
            segment: None,
        };
        let shared = RemoteKey {
            segment: Some(SegmentDescriptor {
                pid: 7,
                fd: 8,
                bytes: 9,
                inode: 10,
                start_time: 11,
            }),
            ..plain
        };
        for key in [plain, shared] {
            assert_eq!(RemoteKey::from_bytes(&key.to_bytes()).unwrap(), key);
            let text = key.to_string();
            assert_eq!(text.parse::<RemoteKey>().unwrap(), key);
            assert!(text[..text.len() - 2].parse::<RemoteKey>().is_err());
            for at in [0, 5] {
                let mut bytes = key.to_bytes();
                bytes[at] ^= 0x40;
                assert!(RemoteKey::from_bytes(&bytes).is_err());
            }
        }
        assert_eq!(plain.to_string().len(), 45);
        for text in ["", "fwk1-", "fwk1-\u{e9}", &"x".repeat(45)] {
            assert!(text.parse::<RemoteKey>().is_err());
        }
    }
}
