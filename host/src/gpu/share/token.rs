//! Tokens. A token identifies a published descriptor and authorizes a process to fetch the
//! descriptor.

use core::fmt;
use core::hint::black_box;

use crate::{Error, Result};

/// Random bytes, used as the random part of a socket name or as a secret.
pub(super) type Random = [u8; 16];

/// Identifies a published descriptor on a host. Every process of the host that has the token can
/// fetch the descriptor, so tokens must be exchanged over a trusted channel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Token {
    /// Process that published the descriptor.
    pub(super) pid: u32,
    /// Start time of process `pid` in clock ticks since boot.
    pub(super) start_time: u64,
    /// Random part of the name of the process's server socket.
    pub(super) socket: Random,
    /// Secret of the descriptor. Only processes with the token know it.
    pub(super) secret: Random,
}

impl Token {
    /// Length of [`Token::to_bytes`].
    pub(crate) const ENCODED_BYTES: usize = 48;

    const MAGIC: [u8; 4] = *b"FDT1";

    /// Encodes the token in little endian.
    pub(crate) fn to_bytes(self) -> [u8; Self::ENCODED_BYTES] {
        let mut bytes = [0; Self::ENCODED_BYTES];
        bytes[0..4].copy_from_slice(&Self::MAGIC);
        bytes[4..8].copy_from_slice(&self.pid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.start_time.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.socket);
        bytes[32..48].copy_from_slice(&self.secret);
        bytes
    }

    /// Decodes the result of [`Token::to_bytes`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the bytes are not an encoded token.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let parsed = <&[u8; Self::ENCODED_BYTES]>::try_from(bytes)
            .ok()
            .filter(|bytes| bytes.starts_with(&Self::MAGIC))
            .map(|bytes| Self {
                pid: u32::from_le_bytes(part(bytes, 4)),
                start_time: u64::from_le_bytes(part(bytes, 8)),
                socket: part(bytes, 16),
                secret: part(bytes, 32),
            })
            // Accepts only positive process ids, because some system calls treat 0 as the calling
            // process.
            .filter(|token| token.pid > 0 && i32::try_from(token.pid).is_ok());
        parsed.ok_or_else(|| Error::InvalidArgument {
            operation: "descriptor token",
            detail: format!(
                "these {} bytes are no token of a shared descriptor of this version",
                bytes.len()
            ),
        })
    }

    /// Returns the name of the server socket in the abstract namespace.
    pub(super) fn socket_name(&self) -> String {
        socket_name(&self.socket)
    }
}

impl fmt::Debug for Token {
    /// Formats the token without its secret.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Token")
            .field("pid", &self.pid)
            .field("start_time", &self.start_time)
            .field("socket", &self.socket_name())
            .finish_non_exhaustive()
    }
}

/// Returns the abstract-namespace name of the socket whose random part is `id`.
pub(super) fn socket_name(id: &Random) -> String {
    use core::fmt::Write;
    id.iter()
        .fold("fusewire-share-".to_owned(), |mut name, byte| {
            // Writing to a string never fails.
            let _ = write!(name, "{byte:02x}");
            name
        })
}

/// Compares two secrets in constant time.
pub(super) fn same(a: &Random, b: &Random) -> bool {
    let difference = a
        .iter()
        .zip(b)
        .fold(0, |difference, (a, b)| black_box(difference | (a ^ b)));
    black_box(difference) == 0
}

/// Returns the `N` bytes that start at byte `at`.
fn part<const N: usize>(bytes: &[u8; Token::ENCODED_BYTES], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_their_bytes_and_others_are_refused() {
        let token = Token {
            pid: i32::MAX as u32,
            start_time: u64::MAX - 1,
            socket: [0xA5; 16],
            secret: core::array::from_fn(|at| at as u8),
        };
        let bytes = token.to_bytes();
        assert_eq!(Token::from_bytes(&bytes).unwrap(), token);
        let mut changed = bytes;
        changed[47] ^= 1;
        assert_ne!(Token::from_bytes(&changed).unwrap(), token);

        let with_pid = |pid: u32| Token { pid, ..token }.to_bytes();
        let mut other_magic = bytes;
        other_magic[3] ^= 1;
        let longer = [&bytes[..], &[0]].concat();
        let bad: [&[u8]; 7] = [
            &[],
            &bytes[..47],
            &longer,
            &[0; Token::ENCODED_BYTES],
            &other_magic,
            &with_pid(0),
            &with_pid(1 << 31),
        ];
        for bytes in bad {
            assert!(Token::from_bytes(bytes).is_err(), "{bytes:?}");
        }
    }

    #[test]
    fn secrets_differ_by_any_bit_and_are_not_printed() {
        let secret = [0x5A; 16];
        assert!(same(&secret, &{ secret }));
        for bit in 0..128 {
            let mut other = secret;
            other[bit / 8] ^= 1 << (bit % 8);
            assert!(!same(&secret, &other));
        }
        let token = Token {
            pid: 1,
            start_time: 2,
            socket: [0x11; 16],
            secret: [0xEE; 16],
        };
        let text = format!("{token:?}");
        assert!(
            text.contains("fusewire-share-1111") && !text.contains("ee"),
            "{text}"
        );
        assert!(!text.contains("238"), "{text}");
    }
}
