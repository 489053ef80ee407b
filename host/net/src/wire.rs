//! Wire protocol of a link. All integers are little endian. All messages have a fixed size, so
//! neither side allocates memory of a size that its peer sends.
//!
//! A connection carries the requests of the side that opened the connection, and the answers to
//! these requests in the same order:
//!
//! - The side that accepted the connection sends a [`Challenge`]. The other side sends a [`Hello`].
//!   The answer is [`Welcome`].
//! - Any number of [`Request`]s follow. The payload of a write or store follows its request.
//! - Every write, store and read is completed by an [`Answer`] of kind `Done` or `Refused`. For a
//!   read, any number of `Data` answers come first, each followed by its payload.
//!
//! If the [`Hello`] and the [`Welcome`] announce queue pairs, writes and reads use these, and the
//! connection carries only the following messages:
//!
//! - A request `Resolve` asks for the registration of a memory region. The answer is `Region` or
//!   `Refused`.
//! - An answer `Revoke`, which belongs to no request, reports that a memory region is no longer
//!   registered. The other side confirms it with the request `Revoked` after its last access. This
//!   request has no answer.

use super::url::{Nonce, PeerId, fill_random};
use super::verbs::QueueAddress;
use fusewire_driver::SegmentDescriptor;

const MAGIC: [u8; 8] = *b"FSWTRANS";

/// Version of this protocol. Both sides must use the same version.
pub(super) const VERSION: u32 = 2;

/// Maximum length of one piece of a read's data.
pub(super) const MAX_DATA_BYTES: u64 = 256 << 10;

/// First message of the side that accepted a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Challenge {
    pub(super) version: u32,
    /// Random bytes, to which the proof of the [`Hello`] is bound, so that nobody can replay it.
    pub(super) random: [u8; 16],
}

impl Challenge {
    pub(super) const BYTES: usize = 32;

    /// Creates a challenge of this version.
    pub(super) fn new() -> crate::Result<Self> {
        let mut random = [0; 16];
        fill_random(&mut random)?;
        Ok(Self {
            version: VERSION,
            random,
        })
    }

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        bytes[16..32].copy_from_slice(&self.random);
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        (bytes[0..8] == MAGIC).then(|| Self {
            version: u32_at(bytes, 8),
            random: id_at(bytes, 16),
        })
    }
}

/// Answer to a [`Challenge`]. It proves that its sender knows the secret of the URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    /// Number of the side that opened the connection.
    pub(super) from: PeerId,
    /// Random bytes, to which the proof of the [`Welcome`] is bound.
    pub(super) challenge: [u8; 16],
    /// Queue pair of the side that opened the connection, if the link uses queue pairs.
    pub(super) queue: Option<QueueAddress>,
}

impl Hello {
    pub(super) const BYTES: usize = Self::PROOF_AT + Nonce::PROOF_BYTES;

    const PROOF_AT: usize = 48 + QUEUE_BYTES;

    /// Encodes the answer to `challenge` for the side whose URL has the secret `to`.
    pub(super) fn to_bytes(self, to: Nonce, challenge: &Challenge) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[16..32].copy_from_slice(&self.from.0);
        bytes[32..48].copy_from_slice(&self.challenge);
        bytes[48..Self::PROOF_AT].copy_from_slice(&queue_to_bytes(self.queue));
        let message = [
            b"hello",
            &challenge.to_bytes()[..],
            &bytes[..Self::PROOF_AT],
        ];
        let proof = to.prove(&message);
        bytes[Self::PROOF_AT..].copy_from_slice(&proof);
        bytes
    }

    /// Decodes the answer to `challenge`. Returns `None` if its sender does not know the secret
    /// `own`.
    pub(super) fn from_bytes(
        bytes: &[u8; Self::BYTES],
        own: Nonce,
        challenge: &Challenge,
    ) -> Option<Self> {
        let (message, proof) = bytes.split_at(Self::PROOF_AT);
        let proven = [b"hello", &challenge.to_bytes()[..], message];
        let is_peer = bytes[0..8] == MAGIC && own.verify(&proven, proof);
        is_peer.then(|| Self {
            from: PeerId(id_at(bytes, 16)),
            challenge: id_at(bytes, 32),
            queue: queue_at(bytes, 48),
        })
    }
}

/// Answer to a [`Hello`]. It proves that its sender knows the secret, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Welcome {
    /// Descriptor of the doorbell for notifications, if the doorbell is in shared memory.
    pub(super) bell: Option<SegmentDescriptor>,
    /// Queue pair of the side that accepted the connection, if the link uses queue pairs.
    pub(super) queue: Option<QueueAddress>,
}

impl Welcome {
    pub(super) const BYTES: usize = Self::PROOF_AT + Nonce::PROOF_BYTES;

    const QUEUE_AT: usize = 16 + SegmentDescriptor::ENCODED_BYTES;

    const PROOF_AT: usize = Self::QUEUE_AT + QUEUE_BYTES;

    /// Encodes the answer to `hello` of the side whose URL has the secret `own`.
    pub(super) fn to_bytes(self, own: Nonce, hello: &Hello) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        if let Some(bell) = self.bell {
            bytes[12] = 1;
            bytes[16..Self::QUEUE_AT].copy_from_slice(&bell.to_bytes());
        }
        bytes[Self::QUEUE_AT..Self::PROOF_AT].copy_from_slice(&queue_to_bytes(self.queue));
        let message = [b"welcome", &hello.challenge[..], &bytes[..Self::PROOF_AT]];
        let proof = own.prove(&message);
        bytes[Self::PROOF_AT..].copy_from_slice(&proof);
        bytes
    }

    /// Decodes the answer to `hello`. Returns `None` if its sender does not know the secret `peer`.
    pub(super) fn from_bytes(
        bytes: &[u8; Self::BYTES],
        peer: Nonce,
        hello: &Hello,
    ) -> Option<Self> {
        let (message, proof) = bytes.split_at(Self::PROOF_AT);
        if bytes[0..8] != MAGIC || !peer.verify(&[b"welcome", &hello.challenge, message], proof) {
            return None;
        }
        let bell = match bytes[12] {
            0 => None,
            _ => Some(SegmentDescriptor::from_bytes(&bytes[16..Self::QUEUE_AT]).ok()?),
        };
        Some(Self {
            bell,
            queue: queue_at(bytes, Self::QUEUE_AT),
        })
    }
}

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verb {
    Write {
        notify: bool,
    },
    /// Stores a word of 8 bytes by one store instruction, after all earlier writes.
    Store,
    Read,
    /// Asks for the registration of the memory.
    Resolve,
    /// Confirms that the memory is no longer accessed.
    Revoked,
}

impl Verb {
    /// Returns true if the payload follows the request.
    pub(super) fn has_payload(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Store)
    }
}

/// Request for a write, a store or a read. The payload of a write or store follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) verb: Verb,
    pub(super) id: u64,
    pub(super) key: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
}

impl Request {
    pub(super) const BYTES: usize = 40;

    pub(super) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..4].copy_from_slice(b"FWRQ");
        bytes[4] = match self.verb {
            Verb::Write { notify: false } => 1,
            Verb::Write { notify: true } => 2,
            Verb::Read => 3,
            Verb::Resolve => 4,
            Verb::Revoked => 5,
            Verb::Store => 6,
        };
        for (at, value) in [
            (8, self.id),
            (16, self.key),
            (24, self.offset),
            (32, self.len),
        ] {
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let verb = match &bytes[0..8] {
            b"FWRQ\x01\0\0\0" => Verb::Write { notify: false },
            b"FWRQ\x02\0\0\0" => Verb::Write { notify: true },
            b"FWRQ\x03\0\0\0" => Verb::Read,
            b"FWRQ\x04\0\0\0" => Verb::Resolve,
            b"FWRQ\x05\0\0\0" => Verb::Revoked,
            b"FWRQ\x06\0\0\0" => Verb::Store,
            _ => return None,
        };
        Some(Self {
            verb,
            id: u64_at(bytes, 8),
            key: u64_at(bytes, 16),
            offset: u64_at(bytes, 24),
            len: u64_at(bytes, 32),
        })
    }
}

/// Reason why the owner of the memory refuses a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// No memory is registered under the key, or the memory has been deregistered.
    Key,
    /// The range exceeds the memory.
    Range,
    /// The address of the word is not a multiple of 8.
    Alignment,
    /// The memory is on a GPU, which the owner's CPU cannot access.
    Device,
    /// The owner's device cannot register the memory.
    Registration,
}

/// Registration of a memory with the device of its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemoteRegion {
    pub(super) address: u64,
    pub(super) key: u32,
    pub(super) len: u64,
}

impl Refusal {
    pub(super) fn describe(self) -> &'static str {
        match self {
            Self::Key => {
                "the peer has registered no memory under this key; it was dropped, or the key \
                 belongs to another process"
            }
            Self::Range => "the range exceeds the registered memory",
            Self::Device => "the memory is on a GPU; only the provider Verbs accesses it",
            Self::Alignment => {
                "the address of the word is not a multiple of 8 in the peer's memory"
            }
            Self::Registration => {
                "the peer's RDMA device cannot register the memory; raise the peer's limit of \
                 locked memory (ulimit -l)"
            }
        }
    }
}

/// Answer to a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Done,
    Refused(Refusal),
    /// The given number of bytes of a read's data follows this answer.
    Data(u64),
    /// Registration of the memory.
    Region(RemoteRegion),
    /// The memory whose key is the id is no longer registered.
    Revoke,
}

impl Answer {
    pub(super) const BYTES: usize = 40;

    pub(super) fn to_bytes(self, id: u64) -> [u8; Self::BYTES] {
        let (kind, len) = match self {
            Self::Done => (1, 0),
            Self::Refused(Refusal::Key) => (2, 0),
            Self::Refused(Refusal::Range) => (3, 0),
            Self::Refused(Refusal::Registration) => (5, 0),
            Self::Refused(Refusal::Alignment) => (8, 0),
            Self::Refused(Refusal::Device) => (9, 0),
            Self::Data(len) => (4, len),
            Self::Region(region) => (6, region.len),
            Self::Revoke => (7, 0),
        };
        let mut bytes = [0; Self::BYTES];
        bytes[0..4].copy_from_slice(b"FWAN");
        bytes[4] = kind;
        bytes[8..16].copy_from_slice(&id.to_le_bytes());
        bytes[16..24].copy_from_slice(&len.to_le_bytes());
        if let Self::Region(region) = self {
            bytes[24..32].copy_from_slice(&region.address.to_le_bytes());
            bytes[32..36].copy_from_slice(&region.key.to_le_bytes());
        }
        bytes
    }

    /// Decodes an answer and the id of its request.
    pub(super) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<(Self, u64)> {
        let len = u64_at(bytes, 16);
        let answer = match &bytes[0..8] {
            b"FWAN\x01\0\0\0" => Self::Done,
            b"FWAN\x02\0\0\0" => Self::Refused(Refusal::Key),
            b"FWAN\x03\0\0\0" => Self::Refused(Refusal::Range),
            b"FWAN\x04\0\0\0" if len <= MAX_DATA_BYTES => Self::Data(len),
            b"FWAN\x05\0\0\0" => Self::Refused(Refusal::Registration),
            b"FWAN\x06\0\0\0" => Self::Region(RemoteRegion {
                address: u64_at(bytes, 24),
                key: u32_at(bytes, 32),
                len,
            }),
            b"FWAN\x07\0\0\0" => Self::Revoke,
            b"FWAN\x08\0\0\0" => Self::Refused(Refusal::Alignment),
            b"FWAN\x09\0\0\0" => Self::Refused(Refusal::Device),
            _ => return None,
        };
        Some((answer, u64_at(bytes, 8)))
    }
}

/// Length of an encoded [`Option<QueueAddress>`], of which the first byte is 1 for `Some`.
const QUEUE_BYTES: usize = 4 + QueueAddress::BYTES;

fn queue_to_bytes(queue: Option<QueueAddress>) -> [u8; QUEUE_BYTES] {
    let mut bytes = [0; QUEUE_BYTES];
    if let Some(queue) = queue {
        bytes[0] = 1;
        bytes[4..].copy_from_slice(&queue.to_bytes());
    }
    bytes
}

fn queue_at(bytes: &[u8], at: usize) -> Option<QueueAddress> {
    let mut array = [0; QueueAddress::BYTES];
    array.copy_from_slice(&bytes[at + 4..at + QUEUE_BYTES]);
    (bytes[at] == 1).then(|| QueueAddress::from_bytes(&array))
}

fn id_at(bytes: &[u8], at: usize) -> [u8; 16] {
    let mut array = [0; 16];
    array.copy_from_slice(&bytes[at..at + 16]);
    array
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut array = [0; 4];
    array.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(array)
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut array = [0; 8];
    array.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(array)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_wire_and_garbage_is_none() {
        let (nonce, other) = (Nonce([7; 16]), Nonce([8; 16]));
        let random = [2; 16];
        let asked = Challenge {
            version: VERSION,
            random,
        };
        assert_eq!(Challenge::from_bytes(&asked.to_bytes()), Some(asked));
        let hello = Hello {
            from: Nonce([9; 16]).peer_id(),
            challenge: [5; 16],
            queue: Some(QueueAddress::from_bytes(&[3; QueueAddress::BYTES])),
        };
        let bytes = hello.to_bytes(nonce, &asked);
        assert_eq!(Hello::from_bytes(&bytes, nonce, &asked), Some(hello));
        assert_eq!(Hello::from_bytes(&bytes, other, &asked), None);
        // A message that answers another challenge is a replay.
        let another = Challenge {
            random: [1; 16],
            ..asked
        };
        assert_eq!(Hello::from_bytes(&bytes, nonce, &another), None);
        assert!(!bytes.windows(16).any(|bytes| *bytes == nonce.0));
        let welcome = Welcome {
            bell: None,
            queue: hello.queue,
        };
        let answer = welcome.to_bytes(nonce, &hello);
        assert_eq!(Welcome::from_bytes(&answer, nonce, &hello), Some(welcome));
        assert_eq!(Welcome::from_bytes(&answer, other, &hello), None);
        // An answer to another message is a replay.
        let challenge = [6; 16];
        let another = Hello { challenge, ..hello };
        assert_eq!(Welcome::from_bytes(&answer, nonce, &another), None);
        for at in 0..Hello::BYTES {
            let mut bytes = bytes;
            bytes[at] ^= 1;
            assert_eq!(Hello::from_bytes(&bytes, nonce, &asked), None, "{at}");
        }
        for at in 0..Welcome::BYTES {
            let mut answer = answer;
            answer[at] ^= 1;
            assert_eq!(Welcome::from_bytes(&answer, nonce, &hello), None, "{at}");
        }
        for verb in [
            Verb::Write { notify: false },
            Verb::Write { notify: true },
            Verb::Read,
            Verb::Resolve,
            Verb::Revoked,
            Verb::Store,
        ] {
            let request = Request {
                verb,
                id: 1,
                key: u64::MAX,
                offset: 3,
                len: 4,
            };
            let mut bytes = request.to_bytes();
            assert_eq!(Request::from_bytes(&bytes), Some(request));
            bytes[4] = 9;
            assert_eq!(Request::from_bytes(&bytes), None);
        }
        for answer in [
            Answer::Done,
            Answer::Refused(Refusal::Key),
            Answer::Refused(Refusal::Range),
            Answer::Refused(Refusal::Registration),
            Answer::Refused(Refusal::Alignment),
            Answer::Refused(Refusal::Device),
            Answer::Data(MAX_DATA_BYTES),
            Answer::Region(RemoteRegion {
                address: u64::MAX - 5,
                key: 7,
                len: 1 << 50,
            }),
            Answer::Revoke,
        ] {
            assert_eq!(Answer::from_bytes(&answer.to_bytes(5)), Some((answer, 5)));
        }
        let long = Answer::Data(MAX_DATA_BYTES + 1).to_bytes(5);
        assert_eq!(Answer::from_bytes(&long), None);
    }
}
