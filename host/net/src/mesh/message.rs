//! Messages of a mesh. All integers are little endian. A message is a head of [`BYTES`] bytes and,
//! for some kinds, a payload of [`Head::length`] bytes.
//!
//! A connection carries the requests of the process that opened it, and in the other direction the
//! answers to them. Get, add and swap are answered in order. Put, store and signal have no answer,
//! except that the receiver refuses those that it cannot execute, unless the endpoint is closed. A
//! notice is never answered or refused.

/// Bytes of a head.
pub(super) const BYTES: usize = 64;

/// Maximum payload of a notice.
pub(super) const MAX_NOTICE: usize = 1024;

const MAGIC: u32 = u32::from_le_bytes(*b"FWM1");

/// Kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Writes the payload.
    Put,
    /// Writes the first bytes of the values.
    Store,
    /// Stores the first value as one word, with release order.
    Signal,
    /// Asks for bytes.
    Get,
    /// Adds the first value to a word, and asks for the value before.
    Add,
    /// Replaces a word that is equal to the first value by the second, and asks for the value
    /// before.
    Swap,
    /// Delivers the payload to the endpoint.
    Notice,
    /// Answers a get: the payload.
    Data,
    /// Answers an add or swap: the first value.
    Value,
    /// Refuses a get, add or swap, in place of the answer.
    NoAnswer,
    /// Refuses a put, store or signal.
    Refused,
}

const KINDS: [Kind; 11] = [
    Kind::Put,
    Kind::Store,
    Kind::Signal,
    Kind::Get,
    Kind::Add,
    Kind::Swap,
    Kind::Notice,
    Kind::Data,
    Kind::Value,
    Kind::NoAnswer,
    Kind::Refused,
];

impl Kind {
    /// Returns true for a request that is answered.
    pub(super) const fn is_answered(self) -> bool {
        matches!(self, Self::Get | Self::Add | Self::Swap)
    }

    const fn is_answer(self) -> bool {
        matches!(
            self,
            Self::Data | Self::Value | Self::NoAnswer | Self::Refused
        )
    }
}

/// Head of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Head {
    pub(super) kind: Kind,
    /// The endpoint that the message is for.
    pub(super) endpoint: u64,
    /// Address in the memory of that endpoint.
    pub(super) address: u64,
    /// Bytes of the payload, of the values of a store, or to get.
    pub(super) length: u64,
    pub(super) values: [u64; 2],
    /// The endpoint that sends the request.
    pub(super) sender: u64,
    /// Number of the request at its sender.
    pub(super) number: u64,
}

impl Head {
    pub(super) fn to_bytes(self) -> [u8; BYTES] {
        let kind = KINDS.iter().position(|kind| *kind == self.kind);
        let first = u64::from(MAGIC) | (kind.unwrap_or_default() as u64) << 32;
        let [low, high] = self.values;
        let words = [
            first,
            self.endpoint,
            self.address,
            self.length,
            low,
            high,
            self.sender,
            self.number,
        ];
        let mut bytes = [0; BYTES];
        for (to, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(words) {
            *to = word.to_le_bytes();
        }
        bytes
    }

    /// Decodes a request, or an answer if `answers` is true.
    pub(super) fn from_bytes(bytes: &[u8; BYTES], answers: bool) -> Option<Self> {
        let word = |at: usize| u64::from_le_bytes(bytes.as_chunks::<8>().0[at]);
        let kind = *KINDS.get((word(0) >> 32) as usize)?;
        let head = Self {
            kind,
            endpoint: word(1),
            address: word(2),
            length: word(3),
            values: [word(4), word(5)],
            sender: word(6),
            number: word(7),
        };
        let is_valid = word(0) as u32 == MAGIC
            && kind.is_answer() == answers
            && match kind {
                Kind::Store => head.length <= 16,
                Kind::Notice => head.length <= MAX_NOTICE as u64,
                Kind::Signal | Kind::Add | Kind::Swap => head.length == 8,
                _ => true,
            };
        is_valid.then_some(head)
    }
}
