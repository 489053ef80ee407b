//! The table behind a store: keys, values, and the operations on them, without waiting or I/O.

use std::collections::HashMap;

/// Keys and values. Keys are bytes, because C++ peers are not bound to UTF-8.
#[derive(Debug, Default)]
pub(super) struct Table {
    values: HashMap<Vec<u8>, Vec<u8>>,
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

    pub(super) fn set(&mut self, key: &[u8], value: &[u8]) {
        self.values.insert(key.to_vec(), value.to_vec());
    }

    pub(super) fn append(&mut self, key: &[u8], value: &[u8]) {
        self.values
            .entry(key.to_vec())
            .or_default()
            .extend_from_slice(value);
    }

    pub(super) fn delete(&mut self, key: &[u8]) -> bool {
        self.values.remove(key).is_some()
    }

    /// The new sum, or what is wrong with the value that is there.
    pub(super) fn add(&mut self, key: &[u8], amount: i64) -> Result<i64, String> {
        let sum = self.sum(key, amount)?;
        self.set(key, sum.to_string().as_bytes());
        Ok(sum)
    }

    /// What [`Table::add`] would make.
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

    /// The answer, and whether `desired` was stored.
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

    /// Whether [`Table::compare_set`] would store; else its answer.
    pub(super) fn compare(&self, key: &[u8], expected: &[u8]) -> Result<(), Vec<u8>> {
        match self.get(key) {
            None if expected.is_empty() => Ok(()),
            None => Err(expected.to_vec()),
            Some(present) if present == expected => Ok(()),
            Some(present) => Err(present.to_vec()),
        }
    }
}
