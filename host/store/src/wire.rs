//! The wire format of PyTorch's `TCPStore` (torch/csrc/distributed/c10d, `TCPStoreBackend.hpp`).
//!
//! A request is one byte (the number of a [`Query`]) followed by its arguments. Integers are in the
//! byte order of the machine. A string or vector is a 64-bit length followed by its bytes. Every
//! length from a peer is checked against a limit before any memory is reserved for it.
//!
//! Requests have two numberings ([`Dialect`]). Since PyTorch 2.1 the first request of a connection
//! is [`Query::Validate`] with [`VALIDATION_MAGIC`]. Earlier versions have no `Validate`, and their
//! numbers of the requests below `DELETE_KEY` are smaller by one. [`dialect`] distinguishes the
//! numberings by the first bytes: in the old numbering, 0 is `SET`, and the magic number after it
//! would belong to a key length that exceeds every limit.

/// Argument of [`Query::Validate`], the first request of a connection.
pub(super) const VALIDATION_MAGIC: u32 = 0x3C85_F7CE;

/// Maximum length in bytes of a value that is accepted from a peer.
pub(super) const MAX_VALUE_BYTES: u64 = 64 << 20;

/// Maximum length in bytes of a key that is accepted from a peer.
pub(super) const MAX_KEY_BYTES: u64 = 8 << 10;

/// Maximum number of keys in one request.
pub(super) const MAX_KEYS: u64 = 128 << 10;

/// Maximum length of a request in bytes: three values and 1 MiB for keys and lengths.
pub(super) const MAX_REQUEST_BYTES: usize = 3 * (MAX_VALUE_BYTES as usize) + (1 << 20);

/// Answer to [`Query::Check`]: all keys exist.
pub(super) const CHECK_READY: u8 = 0;
/// Answer to [`Query::Check`]: at least one key is missing.
pub(super) const CHECK_NOT_READY: u8 = 1;
/// Answer to [`Query::Wait`]: all keys exist.
pub(super) const STOP_WAITING: u8 = 0;
/// Answer to [`Query::CancelWait`].
pub(super) const WAIT_CANCELED: u8 = 1;

/// Kinds of requests. The value of a variant is its number in the current dialect.
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
    QueuePush = 14,
    QueuePop = 15,
    QueueLen = 16,
    ListKeys = 17,
    Barrier = 18,
}

/// The numbering of requests on the wire.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Dialect {
    /// PyTorch before 2.1: no validation, no ping.
    Legacy,
    /// PyTorch since 2.1.
    #[default]
    Current,
}

impl Query {
    fn from_wire(byte: u8, dialect: Dialect) -> Option<Self> {
        let byte = match (dialect, byte) {
            (Dialect::Current, byte) => byte,
            (Dialect::Legacy, 0..=6) => byte + 1,
            // 7 is WATCH_KEY, which PyTorch has removed.
            (Dialect::Legacy, 8..=12) => byte,
            (Dialect::Legacy, _) => return None,
        };
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
            14 => Self::QueuePush,
            15 => Self::QueuePop,
            16 => Self::QueueLen,
            17 => Self::ListKeys,
            18 => Self::Barrier,
            _ => return None,
        })
    }

    fn number(self, dialect: Dialect) -> u8 {
        let number = self as u8;
        match dialect {
            Dialect::Legacy if number <= Self::KeyCount as u8 => number.saturating_sub(1),
            _ => number,
        }
    }
}

/// A parsed request, borrowed from the receive buffer of the server.
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
    QueuePush(&'a [u8], &'a [u8]),
    QueuePop(&'a [u8]),
    QueueLen(&'a [u8]),
    ListKeys,
    Barrier(&'a [u8], i64),
}

/// The reason why a request could not be parsed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RequestError {
    /// The request is not complete; more bytes must arrive.
    Incomplete,
    /// The peer does not follow the protocol, or a length exceeds a limit.
    Invalid(String),
}

/// Returns the dialect of a client, given the first bytes that the client sent.
pub(super) fn dialect(bytes: &[u8]) -> Result<Dialect, RequestError> {
    match bytes.split_first() {
        None => Err(RequestError::Incomplete),
        Some((0, rest)) => match rest.first_chunk() {
            None => Err(RequestError::Incomplete),
            Some(magic) if u32::from_ne_bytes(*magic) == VALIDATION_MAGIC => Ok(Dialect::Current),
            Some(_) => Ok(Dialect::Legacy),
        },
        Some(_) => Ok(Dialect::Legacy),
    }
}

/// Parses the request at the start of `bytes`. Returns the request and its length in bytes.
pub(super) fn parse(bytes: &[u8], dialect: Dialect) -> Result<(Request<'_>, usize), RequestError> {
    let mut reader = Reader { bytes, at: 0 };
    let [byte] = reader.array()?;
    let query = Query::from_wire(byte, dialect).ok_or_else(|| {
        RequestError::Invalid(format!(
            "request of unknown kind {byte}: no store client, or one of a newer PyTorch than \
                 this server knows"
        ))
    })?;
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
        Query::QueuePush => Request::QueuePush(reader.key()?, reader.value()?),
        Query::QueuePop => Request::QueuePop(reader.key()?),
        Query::QueueLen => Request::QueueLen(reader.key()?),
        Query::ListKeys => Request::ListKeys,
        Query::Barrier => Request::Barrier(reader.key()?, i64::from_ne_bytes(reader.array()?)),
    };
    Ok((request, reader.at))
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, len: usize) -> Result<&'a [u8], RequestError> {
        let rest = &self.bytes[self.at..];
        let taken = rest.get(..len).ok_or(RequestError::Incomplete)?;
        self.at += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], RequestError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    fn counted(&mut self, limit: u64, what: &str) -> Result<u64, RequestError> {
        let count = u64::from_ne_bytes(self.array()?);
        if count > limit {
            return Err(RequestError::Invalid(format!(
                "{what} of {count}, the limit is {limit}"
            )));
        }
        Ok(count)
    }

    fn key(&mut self) -> Result<&'a [u8], RequestError> {
        let len = self.counted(MAX_KEY_BYTES, "key length")?;
        self.take(len as usize)
    }

    fn value(&mut self) -> Result<&'a [u8], RequestError> {
        let len = self.counted(MAX_VALUE_BYTES, "value length")?;
        self.take(len as usize)
    }

    fn list<T>(
        &mut self,
        mut item: impl FnMut(&mut Self) -> Result<T, RequestError>,
    ) -> Result<Vec<T>, RequestError> {
        let count = self.counted(MAX_KEYS, "number of keys")?;
        // The list grows only as its items are parsed, so a false count reserves no memory.
        (0..count).map(|_| item(self)).collect()
    }
}

/// Builds requests or an answer.
#[derive(Debug, Default)]
pub(super) struct Writer {
    bytes: Vec<u8>,
    dialect: Dialect,
}

impl Writer {
    /// Returns an empty writer of requests in the numbering of `dialect`.
    pub(super) fn to(dialect: Dialect) -> Self {
        Self {
            bytes: Vec::new(),
            dialect,
        }
    }

    /// Begins a request, after the requests already written.
    pub(super) fn then(mut self, query: Query) -> Self {
        self.bytes.push(query.number(self.dialect));
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

    /// Writes the length of `bytes`, then `bytes`.
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

    const C: Dialect = Dialect::Current;

    fn query(query: Query) -> Writer {
        Writer::to(C).then(query)
    }

    #[test]
    fn requests_survive_the_wire_and_every_prefix_is_incomplete() {
        let bytes = query(Query::CompareSet)
            .vector(b"key")
            .vector(b"")
            .vector(b"value")
            .finish();
        for cut in 0..bytes.len() {
            assert_eq!(parse(&bytes[..cut], C), Err(RequestError::Incomplete));
        }
        let expected = Request::CompareSet(b"key", b"", b"value");
        assert_eq!(parse(&bytes, C), Ok((expected, bytes.len())));
    }

    #[test]
    fn lengths_beyond_the_limit_are_refused_before_their_bytes_arrive() {
        let long_key = query(Query::Get).u64(MAX_KEY_BYTES + 1).finish();
        let long_value = query(Query::Set).vector(b"k").u64(u64::MAX).finish();
        let many_keys = query(Query::Wait).u64(MAX_KEYS + 1).finish();
        let long_push = query(Query::QueuePush).vector(b"k").u64(1 << 40).finish();
        let unknown = vec![77];
        for bytes in [long_key, long_value, many_keys, long_push, unknown] {
            assert!(
                matches!(parse(&bytes, C), Err(RequestError::Invalid(_))),
                "{bytes:?}"
            );
        }
    }

    #[test]
    fn the_first_bytes_identify_the_dialect() {
        let current = query(Query::Validate).u32(VALIDATION_MAGIC).finish();
        assert_eq!(dialect(&current), Ok(Dialect::Current));
        for cut in 0..5 {
            assert_eq!(dialect(&current[..cut]), Err(RequestError::Incomplete));
        }
        let set = Writer::to(Dialect::Legacy).then(Query::Set).vector(b"k");
        assert_eq!(dialect(&set.vector(b"v").finish()), Ok(Dialect::Legacy));
        assert_eq!(dialect(&[6]), Ok(Dialect::Legacy));
        // A legacy server parses the new greeting as a key that is too long, and closes the
        // connection.
        assert!(matches!(
            parse(&[&current[..], &[13, 0, 0, 0]].concat(), Dialect::Legacy),
            Err(RequestError::Invalid(_))
        ));
    }

    /// Compares one request of each kind with the bytes that PyTorch 1.13 and 2.x send
    /// (little-endian).
    #[test]
    #[cfg(target_endian = "little")]
    fn requests_have_pytorchs_bytes() {
        let k = [2, 0, 0, 0, 0, 0, 0, 0, b'/', b'k'];
        let v = [1, 0, 0, 0, 0, 0, 0, 0, b'v'];
        let one = [1, 0, 0, 0, 0, 0, 0, 0];
        // Query, its number in PyTorch 1.13, its number in 2.x, writer of its arguments, bytes of
        // its arguments.
        type Case = (Query, Option<u8>, u8, fn(Writer) -> Writer, Vec<Vec<u8>>);
        let key: fn(Writer) -> Writer = |w| w.vector(b"/k");
        let pair: fn(Writer) -> Writer = |w| w.vector(b"/k").vector(b"v");
        let keys: fn(Writer) -> Writer = |w| w.u64(1).vector(b"/k");
        let (k, v, one) = (k.to_vec(), v.to_vec(), one.to_vec());
        let cases: Vec<Case> = vec![
            (
                Query::Validate,
                None,
                0,
                |w| w.u32(VALIDATION_MAGIC),
                vec![vec![0xCE, 0xF7, 0x85, 0x3C]],
            ),
            (Query::Set, Some(0), 1, pair, vec![k.clone(), v.clone()]),
            (
                Query::CompareSet,
                Some(1),
                2,
                |w| w.vector(b"/k").vector(b"v").vector(b"v"),
                vec![k.clone(), v.clone(), v.clone()],
            ),
            (Query::Get, Some(2), 3, key, vec![k.clone()]),
            (
                Query::Add,
                Some(3),
                4,
                |w| w.vector(b"/k").i64(-1),
                vec![k.clone(), vec![0xFF; 8]],
            ),
            (Query::Check, Some(4), 5, keys, vec![one.clone(), k.clone()]),
            (Query::Wait, Some(5), 6, keys, vec![one.clone(), k.clone()]),
            (Query::KeyCount, Some(6), 7, |w| w, vec![]),
            (Query::DeleteKey, Some(8), 8, key, vec![k.clone()]),
            (Query::Append, Some(9), 9, pair, vec![k.clone(), v.clone()]),
            (
                Query::MultiGet,
                Some(10),
                10,
                keys,
                vec![one.clone(), k.clone()],
            ),
            (
                Query::MultiSet,
                Some(11),
                11,
                |w| w.u64(1).vector(b"/k").vector(b"v"),
                vec![one, k.clone(), v.clone()],
            ),
            (Query::CancelWait, Some(12), 12, |w| w, vec![]),
            (
                Query::Ping,
                None,
                13,
                |w| w.u32(0x0403_0201),
                vec![vec![1, 2, 3, 4]],
            ),
            (Query::QueuePush, None, 14, pair, vec![k.clone(), v]),
            (Query::QueuePop, None, 15, key, vec![k.clone()]),
            (Query::QueueLen, None, 16, key, vec![k.clone()]),
            (Query::ListKeys, None, 17, |w| w, vec![]),
            (
                Query::Barrier,
                None,
                18,
                |w| w.vector(b"/k").i64(3),
                vec![k, vec![3, 0, 0, 0, 0, 0, 0, 0]],
            ),
        ];
        for (query, legacy, current, write, arguments) in cases {
            let arguments = arguments.concat();
            for (dialect, number) in [(Dialect::Legacy, legacy), (C, Some(current))] {
                let Some(number) = number else { continue };
                let golden = [vec![number], arguments.clone()].concat();
                assert_eq!(write(Writer::to(dialect).then(query)).finish(), golden);
                let (_, length) = parse(&golden, dialect).unwrap();
                assert_eq!(length, golden.len(), "{query:?}");
            }
        }
        assert!(matches!(
            parse(&[7], Dialect::Legacy),
            Err(RequestError::Invalid(_))
        ));
    }
}
