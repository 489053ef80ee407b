//! Handles of objects. A handle is never reused, so a use after free always fails.

use core::sync::atomic::{AtomicUsize, Ordering};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use super::capture::EventRecord;
use super::context::Context;
use super::graph::{Exec, Graph, UserObject};
use super::kernel::{Function, Module};
use super::lock;
use super::memory::Allocation;
use super::multicast::Object;
use super::stream::Stream;

/// Value of the first handle. It is a non-canonical address, so dereferencing a handle crashes.
const FIRST: usize = 0xf5_0000_0000_0000;

static NEXT: AtomicUsize = AtomicUsize::new(1);

/// Returns a new handle.
pub(crate) fn fresh() -> usize {
    FIRST + (NEXT.fetch_add(1, Ordering::Relaxed) << 4)
}

/// Live objects of one kind.
#[derive(Debug)]
pub(crate) struct Table<T> {
    entries: Mutex<BTreeMap<usize, Arc<T>>>,
}

impl<T> Table<T> {
    const fn new() -> Self {
        Self {
            entries: Mutex::new(BTreeMap::new()),
        }
    }

    /// Inserts an object. Returns its new handle.
    pub(crate) fn insert(&self, object: Arc<T>) -> usize {
        let handle = fresh();
        self.insert_as(handle, object);
        handle
    }

    /// Inserts an object with a given handle.
    pub(crate) fn insert_as(&self, handle: usize, object: Arc<T>) {
        lock(&self.entries).insert(handle, object);
    }

    pub(crate) fn get(&self, handle: usize) -> Option<Arc<T>> {
        lock(&self.entries).get(&handle).cloned()
    }

    pub(crate) fn remove(&self, handle: usize) -> Option<Arc<T>> {
        lock(&self.entries).remove(&handle)
    }

    /// Returns all objects that satisfy a condition.
    pub(crate) fn select(&self, wanted: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let entries = lock(&self.entries);
        entries
            .values()
            .filter(|object| wanted(object))
            .cloned()
            .collect()
    }

    /// Removes and returns all objects that satisfy a condition.
    pub(crate) fn take(&self, wanted: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut entries = lock(&self.entries);
        let taken: Vec<usize> = entries
            .iter()
            .filter(|(_, object)| wanted(object))
            .map(|(handle, _)| *handle)
            .collect();
        taken
            .iter()
            .filter_map(|handle| entries.remove(handle))
            .collect()
    }

    pub(crate) fn len(&self) -> usize {
        lock(&self.entries).len()
    }
}

pub(crate) static CONTEXTS: Table<Context> = Table::new();
pub(crate) static STREAMS: Table<Stream> = Table::new();
pub(crate) static EVENTS: Table<EventRecord> = Table::new();
pub(crate) static MODULES: Table<Module> = Table::new();
pub(crate) static FUNCTIONS: Table<Function> = Table::new();
pub(crate) static GRAPHS: Table<Graph> = Table::new();
pub(crate) static EXECS: Table<Exec> = Table::new();
pub(crate) static USER_OBJECTS: Table<UserObject> = Table::new();
pub(crate) static ALLOCATIONS: Table<Allocation> = Table::new();
pub(crate) static MULTICASTS: Table<Object> = Table::new();
