//! The table of a store: keys, values and the operations on them, without waits or I/O.

use std::collections::HashMap;

/// Estimated overhead of an entry in bytes, in addition to its key and its value.
pub(super) const ENTRY_BYTES: usize = 64;

/// A map from keys to values. Keys are bytes, because C++ peers may use keys that are not UTF-8.
#[derive(Debug, Default)]
pub(super) struct Table {
    values: HashMap<Vec<u8>, Vec<u8>>,
    /// Estimated memory of all entries in bytes. An entry takes the length of its key, the length
    /// of its value, and [`ENTRY_BYTES`].
    bytes: usize,
}

impl Table {
    pub(super) fn get(&self, key: &[u8]) -> Option<&[u8]> {
        self.values.get(key).map(Vec::as_slice)
    }

    pub(super) fn contains(&self, key: &[u8]) -> bool {
        self.values.contains_key(key)
    }

    pub(super) fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns the estimated memory of all entries, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &[u8]> {
        self.values.keys().map(Vec::as_slice)
    }

    /// Returns the keys that are valid UTF-8, sorted.
    pub(super) fn text_keys(&self) -> Vec<String> {
        let text = |key: &[u8]| core::str::from_utf8(key).ok().map(str::to_owned);
        let mut keys: Vec<_> = self.keys().filter_map(text).collect();
        keys.sort_unstable();
        keys
    }

    pub(super) fn set(&mut self, key: &[u8], value: &[u8]) {
        self.bytes += value.len();
        match self.values.insert(key.to_vec(), value.to_vec()) {
            Some(old) => self.bytes -= old.len(),
            None => self.bytes += key.len() + ENTRY_BYTES,
        }
    }

    pub(super) fn append(&mut self, key: &[u8], value: &[u8]) {
        self.bytes += value.len();
        let entry = self.values.entry(key.to_vec()).or_insert_with(|| {
            self.bytes += key.len() + ENTRY_BYTES;
            Vec::new()
        });
        entry.extend_from_slice(value);
    }

    pub(super) fn delete(&mut self, key: &[u8]) -> bool {
        let removed = self.values.remove(key);
        if let Some(value) = &removed {
            self.bytes -= key.len() + value.len() + ENTRY_BYTES;
        }
        removed.is_some()
    }

    /// Adds `amount` to the counter at `key` and returns the new count. Fails if the present value
    /// is not a number or the new count overflows.
    pub(super) fn add(&mut self, key: &[u8], amount: i64) -> Result<i64, String> {
        let sum = self.sum(key, amount)?;
        self.set(key, sum.to_string().as_bytes());
        Ok(sum)
    }

    /// Returns the count that [`Table::add`] would store.
    pub(super) fn sum(&self, key: &[u8], amount: i64) -> Result<i64, String> {
        let present = match self.get(key) {
            None => 0,
            Some(text) => core::str::from_utf8(text)
                .ok()
                .and_then(|text| text.trim().parse::<i64>().ok())
                .ok_or_else(|| "the value that is there is no decimal number".to_owned())?,
        };
        present
            .checked_add(amount)
            .ok_or_else(|| format!("{present} + {amount} is more than 64 bits hold"))
    }

    /// Stores `desired` if [`Table::compare`] succeeds. Returns the value that answers the request,
    /// and true if `desired` was stored.
    pub(super) fn compare_set(
        &mut self,
        key: &[u8],
        expected: &[u8],
        desired: &[u8],
    ) -> (Vec<u8>, bool) {
        match self.compare(key, expected) {
            Ok(()) => {
                self.set(key, desired);
                (desired.to_vec(), true)
            }
            Err(answer) => (answer, false),
        }
    }

    /// Succeeds if [`Table::compare_set`] would store its value. Otherwise returns the value that
    /// answers the request.
    pub(super) fn compare(&self, key: &[u8], expected: &[u8]) -> Result<(), Vec<u8>> {
        match self.get(key) {
            None if expected.is_empty() => Ok(()),
            None => Err(expected.to_vec()),
            Some(present) if present == expected => Ok(()),
            Some(present) => Err(present.to_vec()),
        }
    }
}
