//! The wire format of PyTorch's `TCPStore` (torch/csrc/distributed/c10d, `TCPStoreBackend.hpp`).
//!
//! A request is one byte of [`Query`] and its arguments; integers are in the byte order of the
//! machine, a string or vector is a 64-bit length and its bytes. The first request of a connection
//! is [`Query::Validate`] with [`VALIDATION_MAGIC`]. Everything a peer claims about a length is
//! checked against a limit before any memory is reserved for it.

/// What the first request of a connection carries.
pub(super) const VALIDATION_MAGIC: u32 = 0x3C85_F7CE;

/// Longest value that is accepted from a peer, in bytes.
pub(super) const MAX_VALUE_BYTES: u64 = 64 << 20;

/// Longest key that is accepted from a peer, in bytes.
pub(super) const MAX_KEY_BYTES: u64 = 8 << 10;

/// Most keys in one request.
pub(super) const MAX_KEYS: u64 = 128 << 10;

/// Longest request: a few values and their keys.
pub(super) const MAX_REQUEST_BYTES: usize = 3 * (MAX_VALUE_BYTES as usize) + (1 << 20);

/// Answer to [`Query::Check`]: all keys exist.
pub(super) const CHECK_READY: u8 = 0;
/// Answer to [`Query::Check`]: a key is missing.
pub(super) const CHECK_NOT_READY: u8 = 1;
/// Answer to [`Query::Wait`]: all keys exist.
pub(super) const STOP_WAITING: u8 = 0;
/// Answer to [`Query::CancelWait`].
pub(super) const WAIT_CANCELED: u8 = 1;

/// Kinds of requests, by their number on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Query {
    Validate = 0,
    Set = 1,
    CompareSet = 2,
    Get = 3,
    Add = 4,
    Check = 5,
    Wait = 6,
    KeyCount = 7,
    DeleteKey = 8,
    Append = 9,
    MultiGet = 10,
    MultiSet = 11,
    CancelWait = 12,
    Ping = 13,
}

impl Query {
    fn from_wire(byte: u8) -> Option<Self> {
        Some(match byte {
            0 => Self::Validate,
            1 => Self::Set,
            2 => Self::CompareSet,
            3 => Self::Get,
            4 => Self::Add,
            5 => Self::Check,
            6 => Self::Wait,
            7 => Self::KeyCount,
            8 => Self::DeleteKey,
            9 => Self::Append,
            10 => Self::MultiGet,
            11 => Self::MultiSet,
            12 => Self::CancelWait,
            13 => Self::Ping,
            _ => return None,
        })
    }
}

/// A request as the server sees it, borrowed from the receive buffer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Request<'a> {
    Validate(u32),
    Set(&'a [u8], &'a [u8]),
    CompareSet(&'a [u8], &'a [u8], &'a [u8]),
    Get(&'a [u8]),
    Add(&'a [u8], i64),
    Check(Vec<&'a [u8]>),
    Wait(Vec<&'a [u8]>),
    KeyCount,
    DeleteKey(&'a [u8]),
    Append(&'a [u8], &'a [u8]),
    MultiGet(Vec<&'a [u8]>),
    MultiSet(Vec<(&'a [u8], &'a [u8])>),
    CancelWait,
    Ping(u32),
}

/// Why a request could not be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unread {
    /// More bytes have to arrive.
    Incomplete,
    /// The peer does not speak the protocol, or goes beyond a limit.
    Invalid(String),
}

/// Reads the request at the start of `bytes`; returns it and its length.
pub(super) fn parse(bytes: &[u8]) -> Result<(Request<'_>, usize), Unread> {
    let mut reader = Reader { bytes, at: 0 };
    let [byte] = reader.array()?;
    let query = Query::from_wire(byte)
        .ok_or_else(|| Unread::Invalid(format!("request of unknown kind {byte}")))?;
    let request = match query {
        Query::Validate => Request::Validate(u32::from_ne_bytes(reader.array()?)),
        Query::Set => Request::Set(reader.key()?, reader.value()?),
        Query::CompareSet => Request::CompareSet(reader.key()?, reader.value()?, reader.value()?),
        Query::Get => Request::Get(reader.key()?),
        Query::Add => Request::Add(reader.key()?, i64::from_ne_bytes(reader.array()?)),
        Query::Check => Request::Check(reader.list(Reader::key)?),
        Query::Wait => Request::Wait(reader.list(Reader::key)?),
        Query::KeyCount => Request::KeyCount,
        Query::DeleteKey => Request::DeleteKey(reader.key()?),
        Query::Append => Request::Append(reader.key()?, reader.value()?),
        Query::MultiGet => Request::MultiGet(reader.list(Reader::key)?),
        Query::MultiSet => {
            Request::MultiSet(reader.list(|reader| Ok((reader.key()?, reader.value()?)))?)
        }
        Query::CancelWait => Request::CancelWait,
        Query::Ping => Request::Ping(u32::from_ne_bytes(reader.array()?)),
    };
    Ok((request, reader.at))
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], Unread> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..len).ok_or(Unread::Incomplete)?;
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Unread> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn counted(&mut self, limit: u64, what: &str) -> Result<u64, Unread> {
        let count = u64::from_ne_bytes(self.array()?);
        if count > limit {
            return Err(Unread::Invalid(format!(
                "{what} of {count}, the limit is {limit}"
            )));
        }
        Ok(count)
    }

    fn key(&mut self) -> Result<&'a [u8], Unread> {
        let len = self.counted(MAX_KEY_BYTES, "key length")?;
        self.take(len as usize)
    }

    fn value(&mut self) -> Result<&'a [u8], Unread> {
        let len = self.counted(MAX_VALUE_BYTES, "value length")?;
        self.take(len as usize)
    }

    fn list<T>(
        &mut self,
        mut item: impl FnMut(&mut Self) -> Result<T, Unread>,
    ) -> Result<Vec<T>, Unread> {
        let count = self.counted(MAX_KEYS, "number of keys")?;
        // Nothing is reserved ahead: the list grows only as its bytes are there.
        (0..count).map(|_| item(self)).collect()
    }
}

/// A request or an answer under construction.
#[derive(Debug, Default)]
pub(super) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(super) fn query(query: Query) -> Self {
        Self {
            bytes: vec![query as u8],
        }
    }

    /// Begins a further request in the same message.
    pub(super) fn then(mut self, query: Query) -> Self {
        self.bytes.push(query as u8);
        self
    }

    pub(super) fn u8(mut self, value: u8) -> Self {
        self.bytes.push(value);
        self
    }

    pub(super) fn u32(mut self, value: u32) -> Self {
        self.bytes.extend_from_slice(&value.to_ne_bytes());
        self
    }

    pub(super) fn i64(mut self, value: i64) -> Self {
        self.bytes.extend_from_slice(&value.to_ne_bytes());
        self
    }

    pub(super) fn u64(mut self, value: u64) -> Self {
        self.bytes.extend_from_slice(&value.to_ne_bytes());
        self
    }

    /// A length and the bytes themselves.
    pub(super) fn vector(self, bytes: &[u8]) -> Self {
        let mut writer = self.u64(bytes.len() as u64);
        writer.bytes.extend_from_slice(bytes);
        writer
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_survive_the_wire_and_every_prefix_is_incomplete() {
        let bytes = Writer::query(Query::CompareSet)
            .vector(b"key")
            .vector(b"")
            .vector(b"value")
            .finish();
        for cut in 0..bytes.len() {
            assert_eq!(parse(&bytes[..cut]), Err(Unread::Incomplete));
        }
        let expected = Request::CompareSet(b"key", b"", b"value");
        assert_eq!(parse(&bytes), Ok((expected, bytes.len())));
    }

    #[test]
    fn set_has_pytorchs_bytes() {
        let bytes = Writer::query(Query::Set)
            .vector(b"/k")
            .vector(b"v")
            .finish();
        assert_eq!(
            bytes,
            [
                1, 2, 0, 0, 0, 0, 0, 0, 0, b'/', b'k', 1, 0, 0, 0, 0, 0, 0, 0, b'v'
            ]
        );
    }

    #[test]
    fn lengths_beyond_the_limit_are_refused_before_their_bytes_arrive() {
        let long_key = Writer::query(Query::Get).u64(MAX_KEY_BYTES + 1).finish();
        let long_value = Writer::query(Query::Set)
            .vector(b"k")
            .u64(u64::MAX)
            .finish();
        let many_keys = Writer::query(Query::Wait).u64(MAX_KEYS + 1).finish();
        let unknown = vec![77];
        for bytes in [long_key, long_value, many_keys, unknown] {
            assert!(
                matches!(parse(&bytes), Err(Unread::Invalid(_))),
                "{bytes:?}"
            );
        }
    }
}
