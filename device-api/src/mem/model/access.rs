//! The functions of [`crate::mem`], resolved through the model's table.

use core::panic::Location;

use super::{Atomic, Fault, Kind, Ordering, Word, WordRef, broken, find, order_at};
use crate::mem::{Order, Policy, Scope, native};

fn effective(scope: Scope) -> Scope {
    if broken(Fault::NarrowScope) {
        Scope::Device
    } else {
        scope
    }
}

#[track_caller]
fn demote(found: &WordRef, order: Order, scope: Scope) -> Order {
    let order = order_at(Location::caller(), order);
    if found.kind == Kind::Peer && effective(scope) != Scope::System {
        Order::Relaxed
    } else {
        order
    }
}

/// Returns the atomic of a word, or the value that it is forged to have.
fn atomic(found: &WordRef) -> Result<&Atomic, u64> {
    match found.word() {
        Word::Atomic(word) => Ok(word),
        Word::Forged(value) => Err(*value),
        #[cfg(loom)]
        Word::Cell(_) => panic!("a synchronising access to payload"),
    }
}

fn loads(order: Order) -> Ordering {
    if order == Order::Relaxed || broken(Fault::RelaxedLoads) || broken(Fault::NoAcquire) {
        Ordering::Relaxed
    } else {
        Ordering::Acquire
    }
}

fn stores(order: Order) -> Ordering {
    if order == Order::Relaxed || broken(Fault::RelaxedStores) || broken(Fault::NoRelease) {
        Ordering::Relaxed
    } else {
        Ordering::Release
    }
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
#[track_caller]
pub unsafe fn load_u64(at: *const u64, order: Order, scope: Scope) -> u64 {
    match find(at as usize) {
        Some(found) => {
            let order = demote(&found, order, scope);
            atomic(&found).map_or_else(|forged| forged, |word| word.get().load(loads(order)))
        }
        // SAFETY: the precondition of this function.
        None => unsafe { native::load_u64(at, order, scope) },
    }
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
#[track_caller]
pub unsafe fn store_u64(at: *mut u64, value: u64, order: Order, scope: Scope) {
    match find(at as usize) {
        Some(found) => {
            if let Ok(word) = atomic(&found) {
                word.get()
                    .store(value, stores(demote(&found, order, scope)));
            }
        }
        // SAFETY: the precondition of this function.
        None => unsafe { native::store_u64(at, value, order, scope) },
    }
}

/// Executes a read-modify-write: relaxed, or acquire and release, by `order` and `scope`.
#[track_caller]
fn update(
    at: *mut u64,
    order: Order,
    scope: Scope,
    access: impl Fn(&super::AtomicU64, Ordering) -> u64,
) -> Option<u64> {
    let found = find(at as usize)?;
    let ordering = updates(demote(&found, order, scope));
    Some(atomic(&found).map_or_else(|forged| forged, |word| access(word.get(), ordering)))
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
#[track_caller]
pub unsafe fn fetch_add_u64(at: *mut u64, value: u64, order: Order, scope: Scope) -> u64 {
    update(at, order, scope, |word, ordering| {
        word.fetch_add(value, ordering)
    })
    // SAFETY: the precondition of this function.
    .unwrap_or_else(|| unsafe { native::fetch_add_u64(at, value, order, scope) })
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
#[track_caller]
pub unsafe fn exchange_u64(at: *mut u64, value: u64, order: Order, scope: Scope) -> u64 {
    update(at, order, scope, |word, ordering| {
        word.swap(value, ordering)
    })
    // SAFETY: the precondition of this function.
    .unwrap_or_else(|| unsafe { native::exchange_u64(at, value, order, scope) })
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
#[track_caller]
pub unsafe fn compare_exchange_u64(
    at: *mut u64,
    expected: u64,
    new: u64,
    order: Order,
    scope: Scope,
) -> u64 {
    update(at, order, scope, |word, ordering| {
        let failure = if ordering == Ordering::Relaxed {
            Ordering::Relaxed
        } else {
            Ordering::Acquire
        };
        match word.compare_exchange(expected, new, ordering, failure) {
            Ok(before) | Err(before) => before,
        }
    })
    // SAFETY: the precondition of this function.
    .unwrap_or_else(|| unsafe { native::compare_exchange_u64(at, expected, new, order, scope) })
}

pub use crate::mem::native::{drain, exchange_u32, prefetch_write};

/// Returns the bit offset, in a word of the table, of the half at `at`.
fn half(at: usize) -> u32 {
    (at % 8) as u32 * 8
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
#[track_caller]
pub unsafe fn load_u32(at: *const u32, order: Order, scope: Scope) -> u32 {
    match find(at as usize) {
        Some(found) => {
            let order = demote(&found, order, scope);
            let all =
                atomic(&found).map_or_else(|forged| forged, |word| word.get().load(loads(order)));
            (all >> half(at as usize)) as u32
        }
        // SAFETY: the precondition of this function.
        None => unsafe { native::load_u32(at, order, scope) },
    }
}

/// Changes half of a word of the table, and returns the value before. A concurrent store to the
/// other half is ordered with this one, unlike in real memory: a model in which that matters keeps
/// its 32-bit words in different words of the table.
#[track_caller]
fn update_u32(
    at: *mut u32,
    order: Order,
    scope: Scope,
    ordering: impl Fn(Order) -> Ordering,
    change: impl Fn(u32) -> u32,
) -> Option<u32> {
    let found = find(at as usize)?;
    let half = half(at as usize);
    let ordering = ordering(demote(&found, order, scope));
    Some(match atomic(&found) {
        Err(forged) => (forged >> half) as u32,
        Ok(word) => {
            let mut before = word.get().load(Ordering::Relaxed);
            loop {
                let old = (before >> half) as u32;
                let other = before & !(u64::from(u32::MAX) << half);
                let all = other | u64::from(change(old)) << half;
                match word
                    .get()
                    .compare_exchange(before, all, ordering, Ordering::Relaxed)
                {
                    Ok(_) => break old,
                    Err(now) => before = now,
                }
            }
        }
    })
}

fn updates(order: Order) -> Ordering {
    if order == Order::Relaxed || broken(Fault::RelaxedUpdates) {
        Ordering::Relaxed
    } else {
        Ordering::AcqRel
    }
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
#[track_caller]
pub unsafe fn store_u32(at: *mut u32, value: u32, order: Order, scope: Scope) {
    if update_u32(at, order, scope, stores, |_| value).is_none() {
        // SAFETY: the precondition of this function.
        unsafe { native::store_u32(at, value, order, scope) };
    }
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
#[track_caller]
pub unsafe fn fetch_add_u32(at: *mut u32, value: u32, order: Order, scope: Scope) -> u32 {
    let add = |before: u32| before.wrapping_add(value);
    update_u32(at, order, scope, updates, add)
        // SAFETY: the precondition of this function.
        .unwrap_or_else(|| unsafe { native::fetch_add_u32(at, value, order, scope) })
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
#[track_caller]
pub unsafe fn compare_exchange_u32(
    at: *mut u32,
    expected: u32,
    new: u32,
    order: Order,
    scope: Scope,
) -> u32 {
    let swap = |before| if before == expected { new } else { before };
    update_u32(at, order, scope, updates, swap)
        // SAFETY: the precondition of this function.
        .unwrap_or_else(|| unsafe { native::compare_exchange_u32(at, expected, new, order, scope) })
}

/// Does what the function of this name in `mem::native` does.
#[track_caller]
pub fn fence(order: Order, scope: Scope) {
    let order = order_at(Location::caller(), order);
    let missing = broken(Fault::NoFences)
        || match order {
            Order::Release => broken(Fault::NoReleaseFences) || broken(Fault::NoRelease),
            Order::Acquire => broken(Fault::NoAcquireFences) || broken(Fault::NoAcquire),
            _ => false,
        };
    if effective(scope) != Scope::System || missing {
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

/// Does what the function of this name does on AMD, for blocks whose barrier is not cumulative.
#[track_caller]
pub fn complete() {
    fence(Order::Release, Scope::System);
}

/// Does what the function of this name in `mem::native` does, without ordering, as on a GPU.
///
/// # Safety
/// As for that function.
pub unsafe fn load_packets(at: *const u64) -> [u64; 2] {
    // SAFETY: the precondition of this function.
    unsafe {
        [
            load_u64(at, Order::Relaxed, Scope::System),
            load_u64(at.add(1), Order::Relaxed, Scope::System),
        ]
    }
}

/// Does what the function of this name in `mem::native` does, without ordering, as on a GPU.
///
/// # Safety
/// As for that function.
pub unsafe fn store_packets(at: *mut u64, packets: [u64; 2]) {
    // SAFETY: the precondition of this function.
    unsafe {
        store_u64(at, packets[0], Order::Relaxed, Scope::System);
        store_u64(at.add(1), packets[1], Order::Relaxed, Scope::System);
    }
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
pub unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) {
    let mut done = 0;
    while done < bytes {
        let source = from as usize + done;
        let target = to as usize + done;
        let step = (8 - source % 8).min(8 - target % 8).min(bytes - done);
        let mut word = [0u8; 8];
        match find(source) {
            Some(found) => {
                let all = found.read().to_le_bytes();
                word[..step].copy_from_slice(&all[source % 8..source % 8 + step]);
            }
            None => {
                for (i, byte) in word[..step].iter_mut().enumerate() {
                    // SAFETY: the precondition of this function.
                    *byte = unsafe { *from.add(done + i) };
                }
            }
        }
        match find(target) {
            Some(found) => {
                let mut all = if step == 8 {
                    [0; 8]
                } else {
                    found.read().to_le_bytes()
                };
                all[target % 8..target % 8 + step].copy_from_slice(&word[..step]);
                found.write(u64::from_le_bytes(all));
            }
            None => {
                for (i, byte) in word[..step].iter().enumerate() {
                    // SAFETY: the precondition of this function.
                    unsafe { *to.add(done + i) = *byte };
                }
            }
        }
        done += step;
    }
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
pub unsafe fn read<T: Copy>(at: *const T) -> T {
    let mut out = core::mem::MaybeUninit::<T>::uninit();
    // SAFETY: valid by the precondition; every byte of `out` is written.
    unsafe {
        copy(out.as_mut_ptr().cast(), at.cast(), size_of::<T>());
        out.assume_init()
    }
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
pub unsafe fn write<T: Copy>(at: *mut T, value: T) {
    // SAFETY: the precondition of this function.
    unsafe { copy(at.cast(), (&raw const value).cast(), size_of::<T>()) }
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
pub unsafe fn read_16(at: *const u8, _policy: Policy) -> [u64; 2] {
    // SAFETY: the precondition of this function.
    unsafe { read(at.cast()) }
}

/// Does what the function of this name in `mem::native` does.
///
/// # Safety
/// As for that function.
pub unsafe fn write_16(at: *mut u8, value: [u64; 2], _policy: Policy) {
    // SAFETY: the precondition of this function.
    unsafe { write(at.cast(), value) }
}
