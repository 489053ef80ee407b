//! Collectives over values of any `serde` type.
//!
//! A value is sent as MessagePack, preceded by the name of its type. Received data is never
//! executed, and objects larger than [`crate::Options::max_object_bytes`] are not received. A rank
//! that cannot encode its value still takes part, so that every rank gets an error that names it.

use core::any::type_name;

use rmp::Marker;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Communicator;
use crate::{Error, Result};

/// Size that a rank sends if it could not encode its value.
const REFUSED: u64 = u64::MAX;

impl Communicator {
    /// Returns every rank's object, in rank order, on every rank.
    ///
    /// # Errors
    /// [`Error::Object`] on all ranks if an object is too large or cannot be encoded, and on a rank
    /// that cannot decode an object as a `T`; the communicator's failure.
    pub fn all_gather_object<T: Serialize + DeserializeOwned>(&self, object: &T) -> Result<Vec<T>> {
        let name = "all_gather_object";
        let mine = self.encode(name, object);
        let sizes = self.sizes(name, &mine)?;
        let mine = mine?;
        let mut all = vec![0u8; sizes.iter().sum::<u64>() as usize];
        self.all_gather_v_single(&mut all, &mine, &sizes)?;
        self.decode_all(name, &all, &sizes)
    }

    /// Returns every rank's object, in rank order, on `root`; `None` on other ranks.
    ///
    /// # Errors
    /// The errors of [`Communicator::all_gather_object`].
    pub fn gather_object<T: Serialize + DeserializeOwned>(
        &self,
        object: &T,
        root: u32,
    ) -> Result<Option<Vec<T>>> {
        let name = "gather_object";
        self.root_of(name, root)?;
        let mine = self.encode(name, object);
        let sizes = self.sizes(name, &mine)?;
        let mine = mine?;
        let is_root = root == self.rank();
        let mut sends = vec![0; self.size() as usize];
        sends[root as usize] = mine.len() as u64;
        let receives = if is_root {
            sizes.clone()
        } else {
            vec![0; self.size() as usize]
        };
        let mut all = vec![0u8; receives.iter().sum::<u64>() as usize];
        self.all_to_all_v_single(&mut all, &mine, &receives, &sends)?;
        if !is_root {
            return Ok(None);
        }
        self.decode_all(name, &all, &sizes).map(Some)
    }

    /// Replaces every rank's `objects` by the root's. The previous lengths may differ.
    ///
    /// # Errors
    /// The errors of [`Communicator::all_gather_object`].
    pub fn broadcast_object_list<T: Serialize + DeserializeOwned>(
        &self,
        objects: &mut Vec<T>,
        root: u32,
    ) -> Result<()> {
        let name = "broadcast_object_list";
        self.root_of(name, root)?;
        let is_root = root == self.rank();
        let mine = if is_root {
            self.encode(name, objects)
        } else {
            Ok(Vec::new())
        };
        let mut size = [mine.as_ref().map_or(REFUSED, |bytes| bytes.len() as u64)];
        self.broadcast(&mut size, root)?;
        let mut bytes = mine?;
        self.check_size(name, root, size[0])?;
        bytes.resize(size[0] as usize, 0);
        self.broadcast(&mut bytes, root)?;
        if !is_root {
            *objects = decode(name, root, &bytes)?;
        }
        Ok(())
    }

    /// Returns object r of the root's `objects` on rank r. On other ranks `objects` is ignored.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the root does not pass one object per rank (the other ranks
    /// get an [`Error::Object`]); and the errors of [`Communicator::all_gather_object`].
    pub fn scatter_object_list<T: Serialize + DeserializeOwned>(
        &self,
        objects: &[T],
        root: u32,
    ) -> Result<T> {
        let name = "scatter_object_list";
        self.root_of(name, root)?;
        let is_root = root == self.rank();
        let ranks = self.size() as usize;
        let encoded = if !is_root {
            Ok(Vec::new())
        } else if objects.len() == ranks {
            objects
                .iter()
                .map(|object| self.encode(name, object))
                .collect::<Result<Vec<_>>>()
        } else {
            Err(Error::InvalidArgument {
                operation: name,
                detail: format!("{} objects for {ranks} ranks", objects.len()),
            })
        };
        let mut sizes = vec![REFUSED; ranks];
        if let (true, Ok(encoded)) = (is_root, &encoded) {
            sizes = encoded.iter().map(|bytes| bytes.len() as u64).collect();
        }
        self.broadcast(&mut sizes, root)?;
        let encoded = encoded?;
        for size in &sizes {
            self.check_size(name, root, *size)?;
        }
        let sends = if is_root {
            sizes.clone()
        } else {
            vec![0; ranks]
        };
        let mut receives = vec![0; ranks];
        receives[root as usize] = sizes[self.rank() as usize];
        let mut bytes = vec![0u8; receives[root as usize] as usize];
        let input = encoded.concat();
        self.all_to_all_v_single(&mut bytes, &input, &receives, &sends)?;
        decode(name, root, &bytes)
    }

    /// Sends `objects` to `peer`, which receives them with [`Communicator::recv_object_list`].
    ///
    /// # Errors
    /// [`Error::Object`] if they are too large; and the errors of [`Communicator::send`].
    pub fn send_object_list<T: Serialize>(&self, objects: &[T], peer: u32) -> Result<()> {
        let name = "send_object_list";
        let encoded = self.encode(name, &objects);
        let size = encoded.as_ref().map_or(REFUSED, |bytes| bytes.len() as u64);
        self.send(&[size], peer)?;
        self.send(&encoded?, peer)
    }

    /// Receives the objects that `peer` sends with [`Communicator::send_object_list`].
    ///
    /// # Errors
    /// [`Error::Object`] if they are too large or cannot be decoded as `T`; and the errors of
    /// [`Communicator::recv`].
    pub fn recv_object_list<T: DeserializeOwned>(&self, peer: u32) -> Result<Vec<T>> {
        let name = "recv_object_list";
        let mut size = [0u64];
        self.recv(&mut size, peer)?;
        self.check_size(name, peer, size[0])?;
        let mut bytes = vec![0u8; size[0] as usize];
        self.recv(&mut bytes, peer)?;
        decode(name, peer, &bytes)
    }

    fn root_of(&self, operation: &'static str, root: u32) -> Result<()> {
        if root < self.size() {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            operation,
            detail: format!("root {root}; ranks are 0 to {}", self.size() - 1),
        })
    }

    fn encode<T: Serialize + ?Sized>(
        &self,
        operation: &'static str,
        object: &T,
    ) -> Result<Vec<u8>> {
        let wrong = |detail: String| Error::Object {
            operation,
            rank: self.rank(),
            detail,
        };
        let name = type_name::<T>().as_bytes();
        let name = &name[..name.len().min(512)];
        let mut bytes = (name.len() as u32).to_le_bytes().to_vec();
        bytes.extend(name);
        rmp_serde::encode::write(&mut bytes, object)
            .map_err(|error| wrong(format!("it cannot be encoded: {error}")))?;
        let limit = self.inner.group.options.max_object_bytes;
        if bytes.len() as u64 > limit {
            return Err(wrong(format!(
                "it has {} bytes; the limit is {limit} (Options::max_object_bytes)",
                bytes.len()
            )));
        }
        Ok(bytes)
    }

    /// Returns the encoded size of every rank's object. Fails on all ranks if one of them is
    /// refused.
    fn sizes(&self, operation: &'static str, mine: &Result<Vec<u8>>) -> Result<Vec<u64>> {
        let size = mine.as_ref().map_or(REFUSED, |bytes| bytes.len() as u64);
        let mut sizes = vec![0u64; self.size() as usize];
        self.all_gather_single(&mut sizes, &[size])?;
        if let Err(error) = mine {
            return Err(error.clone());
        }
        for (rank, size) in (0..).zip(&sizes) {
            self.check_size(operation, rank, *size)?;
        }
        Ok(sizes)
    }

    fn check_size(&self, operation: &'static str, rank: u32, size: u64) -> Result<()> {
        let limit = self.inner.group.options.max_object_bytes;
        if size <= limit && size != REFUSED {
            return Ok(());
        }
        let detail = if size == REFUSED {
            "that rank could not encode it, or it is too large; see its error".to_owned()
        } else {
            format!("it has {size} bytes; the limit is {limit} (Options::max_object_bytes)")
        };
        Err(Error::Object {
            operation,
            rank,
            detail,
        })
    }

    fn decode_all<T: DeserializeOwned>(
        &self,
        operation: &'static str,
        all: &[u8],
        sizes: &[u64],
    ) -> Result<Vec<T>> {
        let mut rest = all;
        let mut objects = Vec::with_capacity(sizes.len());
        for (rank, size) in (0..).zip(sizes) {
            let (bytes, after) = rest.split_at(*size as usize);
            objects.push(decode(operation, rank, bytes)?);
            rest = after;
        }
        Ok(objects)
    }
}

/// Decodes an object of `rank`.
fn decode<T: DeserializeOwned>(operation: &'static str, rank: u32, bytes: &[u8]) -> Result<T> {
    let wrong = |detail: String| Error::Object {
        operation,
        rank,
        detail,
    };
    let (length, rest) = bytes
        .split_first_chunk::<4>()
        .ok_or_else(|| wrong("it has no header".to_owned()))?;
    let (name, body) = rest
        .split_at_checked(u32::from_le_bytes(*length) as usize)
        .ok_or_else(|| wrong("its header is longer than itself".to_owned()))?;
    if is_too_deep(body) {
        return Err(wrong(format!(
            "its values are nested more than {MAX_DEPTH} deep, which could overflow the stack of \
             the rank that decodes it"
        )));
    }
    rmp_serde::from_slice(body).map_err(|error| {
        wrong(format!(
            "that rank sent a `{}`, which is no `{}` ({error})",
            String::from_utf8_lossy(name),
            type_name::<T>()
        ))
    })
}

/// Most levels of lists, maps and enum variants in an object. The decoder recurses once per level.
const MAX_DEPTH: usize = 512;

/// Returns true if the values of a MessagePack object are nested more than [`MAX_DEPTH`] deep.
/// Bytes that are no MessagePack are not too deep; the decoder refuses them.
fn is_too_deep(mut bytes: &[u8]) -> bool {
    // Values that are still missing on each level.
    let mut missing: Vec<u64> = vec![1];
    while let Some(left) = missing.last_mut() {
        if *left == 0 {
            missing.pop();
            continue;
        }
        *left -= 1;
        if missing.len() > MAX_DEPTH {
            return true;
        }
        let Some((values, after)) = skip_value(bytes) else {
            return false;
        };
        bytes = after;
        missing.push(values);
    }
    false
}

/// Skips the first value of `bytes`, except the values inside it. Returns the number of those, and
/// the rest of the bytes.
fn skip_value(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (first, rest) = bytes.split_first()?;
    let number = |size: usize| {
        let (number, rest) = rest.split_at_checked(size)?;
        let number = number
            .iter()
            .fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        Some((number, rest))
    };
    let payload = |size: u64, rest: &'_ [u8]| rest.len().checked_sub(usize::try_from(size).ok()?);
    let (values, size, rest) = match Marker::from_u8(*first) {
        Marker::FixPos(_) | Marker::FixNeg(_) | Marker::Null | Marker::Reserved => (0, 0, rest),
        Marker::True | Marker::False => (0, 0, rest),
        Marker::U8 | Marker::I8 => (0, 1, rest),
        Marker::U16 | Marker::I16 => (0, 2, rest),
        Marker::U32 | Marker::I32 | Marker::F32 => (0, 4, rest),
        Marker::U64 | Marker::I64 | Marker::F64 => (0, 8, rest),
        Marker::FixStr(size) => (0, u64::from(size), rest),
        Marker::Str8 | Marker::Bin8 => number(1).map(|(size, rest)| (0, size, rest))?,
        Marker::Str16 | Marker::Bin16 => number(2).map(|(size, rest)| (0, size, rest))?,
        Marker::Str32 | Marker::Bin32 => number(4).map(|(size, rest)| (0, size, rest))?,
        // The type of an extension precedes its bytes.
        Marker::FixExt1 => (0, 2, rest),
        Marker::FixExt2 => (0, 3, rest),
        Marker::FixExt4 => (0, 5, rest),
        Marker::FixExt8 => (0, 9, rest),
        Marker::FixExt16 => (0, 17, rest),
        Marker::Ext8 => number(1).map(|(size, rest)| (0, size + 1, rest))?,
        Marker::Ext16 => number(2).map(|(size, rest)| (0, size + 1, rest))?,
        Marker::Ext32 => number(4).map(|(size, rest)| (0, size + 1, rest))?,
        Marker::FixArray(count) => (u64::from(count), 0, rest),
        Marker::Array16 => number(2).map(|(count, rest)| (count, 0, rest))?,
        Marker::Array32 => number(4).map(|(count, rest)| (count, 0, rest))?,
        Marker::FixMap(count) => (2 * u64::from(count), 0, rest),
        Marker::Map16 => number(2).map(|(count, rest)| (2 * count, 0, rest))?,
        Marker::Map32 => number(4).map(|(count, rest)| (2 * count, 0, rest))?,
    };
    let left = payload(size, rest)?;
    Some((values, &rest[rest.len() - left..]))
}
