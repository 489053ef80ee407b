//! Memory of the model checkers: every access resolves through a table of the tool's atomics
//! and cells.
//!
//! A model registers ranges of real addresses ([`Model::register`]); an access inside one goes
//! to the tool, 8 bytes a word. An access outside goes to plain memory: what only one thread
//! touches (epochs, progress) need not cost interleavings.
//!
//! An operation whose scope does not cover the peers of a range ([`Kind::Peer`]) is demoted to
//! relaxed, so a scope that is too narrow fails the model.

use std::cell::RefCell;
use std::rc::Rc;
use std::vec::Vec;

use super::prim::{AtomicU64, Ordering};

/// What a range holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Words that other ranks access: signals, packets, credits.
    Peer,
    /// Payload: any race is an error of the model (loom).
    Data,
}

enum Word {
    Atomic(AtomicU64),
    #[cfg(loom)]
    Cell(loom::cell::UnsafeCell<u64>),
}

struct Region {
    start: usize,
    kind: Kind,
    words: Vec<Word>,
}

std::thread_local! {
    static TABLE: RefCell<Vec<Rc<Region>>> = const { RefCell::new(Vec::new()) };
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
    /// An empty table for the execution that starts.
    pub fn new() -> Self {
        TABLE.with_borrow_mut(Vec::clear);
        Self(())
    }

    /// Puts `[start, start + bytes)` under the tool; the words start as zero.
    pub fn register(&self, start: *const u8, bytes: usize, kind: Kind) {
        assert_eq!(start as usize % 8, 0, "a modelled range is 8-byte aligned");
        let words = (0..bytes.div_ceil(8))
            .map(|_| match kind {
                #[cfg(loom)]
                Kind::Data => Word::Cell(loom::cell::UnsafeCell::new(0)),
                _ => Word::Atomic(AtomicU64::new(0)),
            })
            .collect();
        let region = Rc::new(Region {
            start: start as usize,
            kind,
            words,
        });
        TABLE.with_borrow_mut(|table| table.push(region));
    }
}

impl Drop for Model {
    fn drop(&mut self) {
        TABLE.with_borrow_mut(Vec::clear);
    }
}

fn find(at: usize) -> Option<(Rc<Region>, usize)> {
    TABLE.with_borrow(|table| {
        table.iter().find_map(|region| {
            let offset = at.checked_sub(region.start)?;
            (offset < region.words.len() * 8).then(|| (Rc::clone(region), offset / 8))
        })
    })
}

fn read_word(region: &Region, index: usize) -> u64 {
    match &region.words[index] {
        Word::Atomic(word) => word.load(Ordering::Relaxed),
        #[cfg(loom)]
        // SAFETY: loom checks that nobody writes meanwhile.
        Word::Cell(cell) => cell.with(|at| unsafe { *at }),
    }
}

fn write_word(region: &Region, index: usize, value: u64) {
    match &region.words[index] {
        Word::Atomic(word) => word.store(value, Ordering::Relaxed),
        #[cfg(loom)]
        // SAFETY: loom checks that nobody accesses the cell meanwhile.
        Word::Cell(cell) => cell.with_mut(|at| unsafe { *at = value }),
    }
}

/// The functions of [`crate::mem`], resolved through the table.
pub mod access {
    use super::{Kind, Ordering, Region, Word, find, read_word, write_word};
    use crate::mem::{Order, Policy, Scope, native};

    fn demote(region: &Region, order: Order, scope: Scope) -> Order {
        if region.kind == Kind::Peer && scope != Scope::System {
            Order::Relaxed
        } else {
            order
        }
    }

    fn atomic(region: &Region, index: usize) -> &super::AtomicU64 {
        match &region.words[index] {
            Word::Atomic(word) => word,
            #[cfg(loom)]
            Word::Cell(_) => panic!("a synchronising access to payload"),
        }
    }

    fn loads(order: Order) -> Ordering {
        if order == Order::Relaxed {
            Ordering::Relaxed
        } else {
            Ordering::Acquire
        }
    }

    fn stores(order: Order) -> Ordering {
        if order == Order::Relaxed {
            Ordering::Relaxed
        } else {
            Ordering::Release
        }
    }

    /// See the CPU's function of this name.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn load_u64(at: *const u64, order: Order, scope: Scope) -> u64 {
        match find(at as usize) {
            Some((region, index)) => {
                atomic(&region, index).load(loads(demote(&region, order, scope)))
            }
            // SAFETY: the caller's promise.
            None => unsafe { native::load_u64(at, order, scope) },
        }
    }

    /// See the CPU's function of this name.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn store_u64(at: *mut u64, value: u64, order: Order, scope: Scope) {
        match find(at as usize) {
            Some((region, index)) => {
                atomic(&region, index).store(value, stores(demote(&region, order, scope)));
            }
            // SAFETY: the caller's promise.
            None => unsafe { native::store_u64(at, value, order, scope) },
        }
    }

    fn update(
        at: *mut u64,
        order: Order,
        scope: Scope,
        new: impl Fn(u64) -> Option<u64>,
    ) -> Option<u64> {
        let (region, index) = find(at as usize)?;
        let success = match demote(&region, order, scope) {
            Order::Relaxed => Ordering::Relaxed,
            _ => Ordering::AcqRel,
        };
        Some(
            match atomic(&region, index).fetch_update(success, Ordering::Acquire, new) {
                Ok(before) | Err(before) => before,
            },
        )
    }

    /// See the CPU's function of this name.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn fetch_add_u64(at: *mut u64, value: u64, order: Order, scope: Scope) -> u64 {
        update(at, order, scope, |old| Some(old.wrapping_add(value)))
            // SAFETY: the caller's promise.
            .unwrap_or_else(|| unsafe { native::fetch_add_u64(at, value, order, scope) })
    }

    /// See the CPU's function of this name.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn exchange_u64(at: *mut u64, value: u64, order: Order, scope: Scope) -> u64 {
        update(at, order, scope, |_| Some(value))
            // SAFETY: the caller's promise.
            .unwrap_or_else(|| unsafe { native::exchange_u64(at, value, order, scope) })
    }

    /// See the CPU's function of this name.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn compare_exchange_u64(
        at: *mut u64,
        expected: u64,
        new: u64,
        order: Order,
        scope: Scope,
    ) -> u64 {
        update(at, order, scope, |old| (old == expected).then_some(new)).unwrap_or_else(|| {
            // SAFETY: the caller's promise.
            unsafe { native::compare_exchange_u64(at, expected, new, order, scope) }
        })
    }

    pub use crate::mem::native::{
        compare_exchange_u32, drain, exchange_u32, fetch_add_u32, load_u32, prefetch_write, store_u32,
    };

    /// See the CPU's function of this name.
    pub fn fence(order: Order, scope: Scope) {
        if scope != Scope::System {
            return;
        }
        let ordering = match order {
            Order::Relaxed => return,
            Order::Acquire => Ordering::Acquire,
            Order::Release => Ordering::Release,
            Order::AcqRel => Ordering::AcqRel,
        };
        #[cfg(loom)]
        loom::sync::atomic::fence(ordering);
        #[cfg(shuttle)]
        shuttle::sync::atomic::fence(ordering);
    }

    /// See the CPU's function of this name; here without any ordering, as on a GPU.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn load_packets(at: *const u64) -> [u64; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            [
                load_u64(at, Order::Relaxed, Scope::System),
                load_u64(at.add(1), Order::Relaxed, Scope::System),
            ]
        }
    }

    /// See the CPU's function of this name; here without any ordering, as on a GPU.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn store_packets(at: *mut u64, packets: [u64; 2]) {
        // SAFETY: the caller's promise.
        unsafe {
            store_u64(at, packets[0], Order::Relaxed, Scope::System);
            store_u64(at.add(1), packets[1], Order::Relaxed, Scope::System);
        }
    }

    /// See the CPU's function of this name.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) {
        let mut done = 0;
        while done < bytes {
            let source = from as usize + done;
            let target = to as usize + done;
            let step = (8 - source % 8).min(8 - target % 8).min(bytes - done);
            let mut word = [0u8; 8];
            match find(source) {
                Some((region, index)) => {
                    let all = read_word(&region, index).to_le_bytes();
                    word[..step].copy_from_slice(&all[source % 8..source % 8 + step]);
                }
                None => {
                    for (i, byte) in word[..step].iter_mut().enumerate() {
                        // SAFETY: the caller's promise.
                        *byte = unsafe { *from.add(done + i) };
                    }
                }
            }
            match find(target) {
                Some((region, index)) => {
                    let mut all = if step == 8 {
                        [0; 8]
                    } else {
                        read_word(&region, index).to_le_bytes()
                    };
                    all[target % 8..target % 8 + step].copy_from_slice(&word[..step]);
                    write_word(&region, index, u64::from_le_bytes(all));
                }
                None => {
                    for (i, byte) in word[..step].iter().enumerate() {
                        // SAFETY: the caller's promise.
                        unsafe { *to.add(done + i) = *byte };
                    }
                }
            }
            done += step;
        }
    }

    /// See the CPU's function of this name.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn read<T: Copy>(at: *const T) -> T {
        let mut out = core::mem::MaybeUninit::<T>::uninit();
        // SAFETY: the caller's promise; every byte of `out` is written.
        unsafe {
            copy(out.as_mut_ptr().cast(), at.cast(), size_of::<T>());
            out.assume_init()
        }
    }

    /// See the CPU's function of this name.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn write<T: Copy>(at: *mut T, value: T) {
        // SAFETY: the caller's promise.
        unsafe { copy(at.cast(), (&raw const value).cast(), size_of::<T>()) }
    }

    /// See the CPU's function of this name.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn read_16(at: *const u8, _policy: Policy) -> [u64; 2] {
        // SAFETY: the caller's promise.
        unsafe { read(at.cast()) }
    }

    /// See the CPU's function of this name.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn write_16(at: *mut u8, value: [u64; 2], _policy: Policy) {
        // SAFETY: the caller's promise.
        unsafe { write(at.cast(), value) }
    }
}
