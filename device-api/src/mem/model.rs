//! Memory of the model checkers: every access resolves through a table of the tool's atomics
//! and cells.
//!
//! A model registers ranges of real addresses ([`Model::register`]); an access inside one goes
//! to the tool, 8 bytes a word. An access outside goes to plain memory: what only one thread
//! touches (epochs, progress) need not cost interleavings.
//!
//! An operation whose scope does not cover the peers of a range ([`Kind::Peer`]) is demoted to
//! relaxed, so a scope that is too narrow fails the model. A plain access stays plain: loom reports
//! it if it races with any other access that writes, atomic or not.
//!
//! Negative controls break the memory and not the protocol's source: [`inject`] weakens what the
//! source asks for, [`Model::alias`] lays one range over another, [`Model::forge`] makes loads
//! return a wrong value.

pub mod access;

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::vec::Vec;

use super::Order;
use super::prim::{AtomicU64, Ordering};

/// Contents of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Words that other ranks access: signals, packets, credits.
    Peer,
    /// Words that only this rank's own device accesses: any scope of the device covers them.
    Own,
    /// Payload: plain accesses only; any race is an error of the model (loom).
    Data,
}

/// Fault that a negative control injects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Release stores are relaxed.
    RelaxedStores,
    /// Acquire loads are relaxed.
    RelaxedLoads,
    /// Release stores are relaxed, release fences do nothing.
    NoRelease,
    /// Acquire loads are relaxed, acquire fences do nothing.
    NoAcquire,
    /// Fences do nothing.
    NoFences,
    /// Release fences do nothing.
    NoReleaseFences,
    /// Acquire fences do nothing.
    NoAcquireFences,
    /// Read-modify-writes are relaxed.
    RelaxedUpdates,
    /// System scope is only the device's.
    NarrowScope,
    /// The operations at this place of the source are relaxed.
    Weakened(Site),
}

/// Place of a memory operation in the source.
pub type Site = core::panic::Location<'static>;

/// Returns the places of the operations on registered memory that ask for an order, and that this
/// thread has executed.
pub fn sites() -> Vec<Site> {
    SITES.with_borrow(|sites| sites.iter().copied().collect())
}

/// Returns the order that the operation at `site` has, and records the place.
fn order_at(site: &'static Site, order: Order) -> Order {
    if order == Order::Relaxed || broken(Fault::Weakened(*site)) {
        return Order::Relaxed;
    }
    SITES.with_borrow_mut(|sites| sites.insert(*site));
    order
}

/// An atomic that also takes plain accesses, which the tool checks.
struct Atomic(core::cell::UnsafeCell<AtomicU64>);

impl Atomic {
    fn new() -> Self {
        Self(core::cell::UnsafeCell::new(AtomicU64::new(0)))
    }

    fn get(&self) -> &AtomicU64 {
        // SAFETY: a model's threads take turns on one system thread, and `write` holds its
        // exclusive reference only during one assignment.
        unsafe { &*self.0.get() }
    }

    fn read(&self) -> u64 {
        #[cfg(loom)]
        {
            step();
            // SAFETY: loom checks that no thread writes concurrently.
            unsafe { self.get().unsync_load() }
        }
        #[cfg(shuttle)]
        self.get().load(Ordering::Relaxed)
    }

    fn write(&self, value: u64) {
        #[cfg(loom)]
        {
            step();
            // SAFETY: as in `get`; loom checks that no thread accesses the word concurrently.
            unsafe { (*self.0.get()).with_mut(|word| *word = value) };
        }
        #[cfg(shuttle)]
        self.get().store(value, Ordering::Relaxed);
    }
}

/// Advances this thread's clock in loom's happens-before order. Plain accesses of an atomic do not
/// advance it, so one after a release would count as one before it.
#[cfg(loom)]
fn step() {
    STEP.with_borrow(|cell| {
        if let Some(cell) = cell {
            cell.with(|_| ());
        }
    });
}

enum Word {
    Atomic(Atomic),
    #[cfg(loom)]
    Cell(loom::cell::UnsafeCell<u64>),
    Forged(u64),
}

struct Region {
    start: usize,
    words: usize,
    kind: Kind,
    content: Rc<[Word]>,
}

std::thread_local! {
    static TABLE: RefCell<Vec<Region>> = const { RefCell::new(Vec::new()) };
    static FAULT: Cell<Option<Fault>> = const { Cell::new(None) };
    static SITES: RefCell<BTreeSet<Site>> = const { RefCell::new(BTreeSet::new()) };
    static TICK: Cell<u64> = const { Cell::new(0) };
    static NOW: Cell<u64> = const { Cell::new(0) };
}

#[cfg(loom)]
std::thread_local! {
    /// A cell that all threads read and none writes.
    static STEP: RefCell<Option<loom::cell::UnsafeCell<()>>> = const { RefCell::new(None) };
}

/// Injects a fault into all later executions of this thread; `None` removes it.
pub fn inject(fault: Option<Fault>) {
    FAULT.set(fault);
}

fn broken(fault: Fault) -> bool {
    FAULT.get() == Some(fault)
}

/// Sets the increment of the clock for each time it is read. 0, the initial value, means that no
/// time passes: waits neither compare progress nor expire.
pub fn set_tick(nanoseconds: u64) {
    TICK.set(nanoseconds);
}

/// The model's clock.
pub(crate) fn clock_ns() -> u64 {
    NOW.set(NOW.get() + TICK.get());
    NOW.get()
}

/// The ranges of one execution; dropping it empties the table.
pub struct Model(());

impl core::fmt::Debug for Model {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Model")
    }
}

impl Default for Model {
    fn default() -> Self {
        Self::new()
    }
}

impl Model {
    /// Creates an empty table for the execution that starts.
    pub fn new() -> Self {
        TABLE.with_borrow_mut(Vec::clear);
        NOW.set(0);
        #[cfg(loom)]
        STEP.set(Some(loom::cell::UnsafeCell::new(())));
        Self(())
    }

    /// Registers `[start, start + bytes)` with the tool; the words start as zero.
    ///
    /// # Panics
    /// If the range is not aligned to words.
    pub fn register(&self, start: *const u8, bytes: usize, kind: Kind) {
        let words = bytes.div_ceil(8);
        let content = (0..words)
            .map(|_| match kind {
                #[cfg(loom)]
                Kind::Data => Word::Cell(loom::cell::UnsafeCell::new(0)),
                _ => Word::Atomic(Atomic::new()),
            })
            .collect();
        self.add(start, words, kind, content);
    }

    /// Lays `[start, start + bytes)` over the registered range that begins at `onto` and is at
    /// least as long: both addresses refer to the same words. Hides what was registered there
    /// before.
    ///
    /// # Panics
    /// If nothing is registered at `onto`.
    pub fn alias(&self, start: *const u8, bytes: usize, onto: *const u8) {
        let found = TABLE.with_borrow(|table| {
            table
                .iter()
                .find(|region| region.start == onto as usize)
                .map(|region| (region.kind, Rc::clone(&region.content)))
        });
        let (kind, content) = found.expect("a registered range");
        self.add(start, bytes.div_ceil(8), kind, content);
    }

    /// Makes every load from the word at `at` return `value`, whatever is stored there.
    pub fn forge(&self, at: *const u8, value: u64) {
        self.add(at, 1, Kind::Peer, Rc::new([Word::Forged(value)]));
    }

    fn add(&self, start: *const u8, words: usize, kind: Kind, content: Rc<[Word]>) {
        assert_eq!(start as usize % 8, 0, "a modelled range is 8-byte aligned");
        let region = Region {
            start: start as usize,
            words,
            kind,
            content,
        };
        // The newest region is found first.
        TABLE.with_borrow_mut(|table| table.insert(0, region));
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        TABLE.with_borrow_mut(Vec::clear);
    }
}

/// A word of the table.
struct WordRef {
    kind: Kind,
    content: Rc<[Word]>,
    index: usize,
}

impl WordRef {
    fn word(&self) -> &Word {
        &self.content[self.index]
    }

    fn read(&self) -> u64 {
        match self.word() {
            Word::Atomic(word) => word.read(),
            Word::Forged(value) => *value,
            #[cfg(loom)]
            // SAFETY: loom checks that no thread writes concurrently.
            Word::Cell(cell) => cell.with(|at| unsafe { *at }),
        }
    }

    fn write(&self, value: u64) {
        match self.word() {
            Word::Atomic(word) => word.write(value),
            Word::Forged(_) => {}
            #[cfg(loom)]
            // SAFETY: loom checks that no thread accesses the cell concurrently.
            Word::Cell(cell) => cell.with_mut(|at| unsafe { *at = value }),
        }
    }
}

fn find(at: usize) -> Option<WordRef> {
    TABLE.with_borrow(|table| {
        table.iter().find_map(|region| {
            let offset = at.checked_sub(region.start)?;
            (offset < region.words * 8).then(|| WordRef {
                kind: region.kind,
                content: Rc::clone(&region.content),
                index: offset / 8,
            })
        })
    })
}
