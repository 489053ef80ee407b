//! Descriptors of device memory, which ranks exchange through the store.

use std::process;
use std::sync::OnceLock;

use super::wire::Wire;

/// The values that a peer needs to map a rank's device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryDescriptor {
    pub(crate) pid: u32,
    pub(crate) start_time: u64,
    pub(crate) bytes: u64,
    /// UUID of the GPU that owns the memory.
    pub(crate) uuid: [u8; 16],
    /// True if the GPU that owns the memory supports multicast objects.
    pub(crate) multicast: bool,
    /// Random number that distinguishes the process from processes with the same id on other hosts
    /// or in other containers.
    pub(super) process: u64,
    pub(super) mapped: u64,
    pub(super) id: u64,
    pub(super) wire: Wire,
}

/// Returns a random number, which is generated once per process. The number and the process id
/// together identify this process across hosts and containers.
pub(super) fn own_process() -> u64 {
    static NUMBER: OnceLock<u64> = OnceLock::new();
    *NUMBER.get_or_init(|| {
        let mut bytes = [0; 8];
        // If the system provides no random numbers, uses the start time of the process instead.
        match getrandom::fill(&mut bytes) {
            Ok(()) => u64::from_le_bytes(bytes),
            Err(_) => crate::process::start_time(process::id()).unwrap_or_default(),
        }
    })
}

impl MemoryDescriptor {
    const MAGIC: u32 = 0x4644_4732; // "FDG2"

    /// Returns whether processes on other hosts of the NVLink domain can map the memory.
    pub(crate) const fn is_for_other_hosts(&self) -> bool {
        matches!(self.wire, Wire::Fabric(_))
    }

    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(176);
        bytes.extend(Self::MAGIC.to_le_bytes());
        bytes.extend(self.pid.to_le_bytes());
        for word in [self.start_time, self.bytes, self.mapped, self.id] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(self.process.to_le_bytes());
        bytes.extend(self.uuid);
        bytes.push(u8::from(self.multicast));
        bytes.extend(self.wire.to_bytes());
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        if u32::from_le_bytes(*magic) != Self::MAGIC {
            return None;
        }
        let (pid, rest) = rest.split_first_chunk::<4>()?;
        let word = |rest: &mut &[u8]| {
            let (word, after) = rest.split_first_chunk::<8>()?;
            *rest = after;
            Some(u64::from_le_bytes(*word))
        };
        let mut rest = rest;
        let (start_time, size) = (word(&mut rest)?, word(&mut rest)?);
        let (mapped, id) = (word(&mut rest)?, word(&mut rest)?);
        let process = word(&mut rest)?;
        let (uuid, rest) = rest.split_first_chunk::<16>()?;
        let (multicast, rest) = rest.split_first()?;
        let multicast = match multicast {
            0 => false,
            1 => true,
            _ => return None,
        };
        let wire = Wire::from_bytes(rest)?;
        Some(Self {
            pid: u32::from_le_bytes(*pid),
            start_time,
            bytes: size,
            uuid: *uuid,
            multicast,
            process,
            mapped,
            id,
            wire,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::driver::HANDLE_BYTES;
    use crate::gpu::share::Token;

    #[test]
    fn descriptors_survive_their_bytes_and_others_are_none() {
        let mut token = vec![0u8; Token::ENCODED_BYTES];
        token[..4].copy_from_slice(b"FDT1");
        token[4] = 1;
        let token = Token::from_bytes(&token).expect("a token");
        for wire in [
            Wire::Descriptor(token),
            Wire::Fabric([7; HANDLE_BYTES]),
            Wire::Ipc([9; HANDLE_BYTES], 4096),
        ] {
            let descriptor = MemoryDescriptor {
                pid: 1,
                start_time: 2,
                bytes: 3,
                uuid: [4; 16],
                multicast: true,
                process: 7,
                mapped: 5,
                id: 6,
                wire,
            };
            let bytes = descriptor.to_bytes();
            assert_eq!(MemoryDescriptor::from_bytes(&bytes), Some(descriptor));
            for length in 0..bytes.len() {
                assert_eq!(MemoryDescriptor::from_bytes(&bytes[..length]), None);
            }
            let longer = [bytes.as_slice(), &[0]].concat();
            assert_eq!(MemoryDescriptor::from_bytes(&longer), None);
            let mut other = bytes;
            other[0] ^= 1;
            assert_eq!(MemoryDescriptor::from_bytes(&other), None);
        }
    }
}
