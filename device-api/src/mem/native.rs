//! Memory of the CPU: core's atomics, plain payload, streaming stores.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence as core_fence};

use super::{Order, Policy, Scope};

/// Panics in debug builds if `at` is not a multiple of `alignment`: a GPU would stop the kernel.
#[inline(always)]
#[track_caller]
fn check_aligned<T>(at: *const T, alignment: usize) {
    debug_assert!(
        at.addr().is_multiple_of(alignment),
        "an access at address {at:p}, which must be aligned to {alignment} bytes"
    );
}

#[inline(always)]
const fn load_ordering(order: Order) -> Ordering {
    match order {
        Order::Relaxed => Ordering::Relaxed,
        _ => Ordering::Acquire,
    }
}

#[inline(always)]
const fn store_ordering(order: Order) -> Ordering {
    match order {
        Order::Relaxed => Ordering::Relaxed,
        _ => Ordering::Release,
    }
}

#[inline(always)]
const fn both(order: Order) -> Ordering {
    match order {
        Order::Relaxed => Ordering::Relaxed,
        Order::Acquire => Ordering::Acquire,
        Order::Release => Ordering::Release,
        Order::AcqRel => Ordering::AcqRel,
    }
}

macro_rules! words {
    ($int:ty, $atomic:ty, $load:ident, $store:ident, $add:ident, $exchange:ident, $cas:ident) => {
        /// Loads atomically. [`Order::Release`] and [`Order::AcqRel`] mean acquire.
        ///
        /// # Safety
        /// `at` must be valid and aligned; racing accesses must be atomic.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $load(at: *const $int, order: Order, _scope: Scope) -> $int {
            check_aligned(at, size_of::<$int>());
            // SAFETY: the precondition of this function.
            unsafe { <$atomic>::from_ptr(at.cast_mut()) }.load(load_ordering(order))
        }

        /// Stores atomically. [`Order::Acquire`] and [`Order::AcqRel`] mean release.
        ///
        /// # Safety
        /// `at` must be valid and aligned; racing accesses must be atomic.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $store(at: *mut $int, value: $int, order: Order, _scope: Scope) {
            check_aligned(at, size_of::<$int>());
            // SAFETY: the precondition of this function.
            unsafe { <$atomic>::from_ptr(at) }.store(value, store_ordering(order));
        }

        /// Adds, wrapping, and returns the value before.
        ///
        /// # Safety
        /// `at` must be valid and aligned; racing accesses must be atomic.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $add(at: *mut $int, value: $int, order: Order, _scope: Scope) -> $int {
            check_aligned(at, size_of::<$int>());
            // SAFETY: the precondition of this function.
            unsafe { <$atomic>::from_ptr(at) }.fetch_add(value, both(order))
        }

        /// Replaces the value and returns the one before.
        ///
        /// # Safety
        /// `at` must be valid and aligned; racing accesses must be atomic.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $exchange(at: *mut $int, value: $int, order: Order, _scope: Scope) -> $int {
            check_aligned(at, size_of::<$int>());
            // SAFETY: the precondition of this function.
            unsafe { <$atomic>::from_ptr(at) }.swap(value, both(order))
        }

        /// Replaces `expected` by `new` and returns the value before, which is `expected` on
        /// success.
        ///
        /// # Safety
        /// `at` must be valid and aligned; racing accesses must be atomic.
        #[inline(always)]
        #[track_caller]
        pub unsafe fn $cas(
            at: *mut $int,
            expected: $int,
            new: $int,
            order: Order,
            _scope: Scope,
        ) -> $int {
            check_aligned(at, size_of::<$int>());
            // SAFETY: the precondition of this function.
            let word = unsafe { <$atomic>::from_ptr(at) };
            match word.compare_exchange(expected, new, both(order), load_ordering(order)) {
                Ok(before) | Err(before) => before,
            }
        }
    };
}

words!(
    u32,
    AtomicU32,
    load_u32,
    store_u32,
    fetch_add_u32,
    exchange_u32,
    compare_exchange_u32
);
words!(
    u64,
    AtomicU64,
    load_u64,
    store_u64,
    fetch_add_u64,
    exchange_u64,
    compare_exchange_u64
);

/// Executes a fence. [`Order::Relaxed`] does nothing.
#[inline(always)]
pub fn fence(order: Order, _scope: Scope) {
    if order != Order::Relaxed {
        core_fence(both(order));
    }
}

/// Does nothing: a barrier covers the writes of all lanes.
#[inline(always)]
pub fn complete() {}

/// Reads two packets of 8 bytes; each is atomic by itself, with acquire ordering where that is
/// free (CPU) and none on a GPU.
///
/// # Safety
/// `at` must be valid for 16 bytes and 16-byte aligned; racing accesses must be packet accesses.
#[inline(always)]
pub unsafe fn load_packets(at: *const u64) -> [u64; 2] {
    // SAFETY: the precondition of this function.
    unsafe {
        [
            load_u64(at, Order::Acquire, Scope::System),
            load_u64(at.add(1), Order::Acquire, Scope::System),
        ]
    }
}

/// Writes two packets of 8 bytes; each is atomic by itself.
///
/// # Safety
/// `at` must be valid for 16 bytes and 16-byte aligned; racing accesses must be packet accesses.
#[inline(always)]
pub unsafe fn store_packets(at: *mut u64, packets: [u64; 2]) {
    // SAFETY: the precondition of this function.
    unsafe {
        store_u64(at, packets[0], Order::Release, Scope::System);
        store_u64(at.add(1), packets[1], Order::Release, Scope::System);
    }
}

/// Reads payload; any alignment.
///
/// # Safety
/// `at` must be valid for `size_of::<T>()` bytes, and nothing may write them meanwhile.
#[inline(always)]
pub unsafe fn read<T: Copy>(at: *const T) -> T {
    // SAFETY: the precondition of this function.
    unsafe { at.read_unaligned() }
}

/// Writes payload; any alignment.
///
/// # Safety
/// `at` must be valid for `size_of::<T>()` bytes, and nothing else may access them meanwhile.
#[inline(always)]
pub unsafe fn write<T: Copy>(at: *mut T, value: T) {
    // SAFETY: the precondition of this function.
    unsafe { at.write_unaligned(value) }
}

/// Reads 16 bytes of payload in one access.
///
/// # Safety
/// As [`read`]; `at` must be 16-byte aligned.
#[inline(always)]
#[track_caller]
pub unsafe fn read_16(at: *const u8, _policy: Policy) -> [u64; 2] {
    check_aligned(at, 16);
    // SAFETY: the precondition of this function.
    unsafe { at.cast::<[u64; 2]>().read_unaligned() }
}

/// Writes 16 bytes of payload in one access. With [`Policy::Streaming`] the bytes bypass the
/// caches; [`drain`] must follow before they are published.
///
/// # Safety
/// As [`write()`]; `at` must be 16-byte aligned.
#[inline(always)]
#[track_caller]
pub unsafe fn write_16(at: *mut u8, value: [u64; 2], policy: Policy) {
    check_aligned(at, 16);
    #[cfg(target_arch = "x86_64")]
    if policy == Policy::Streaming {
        use core::arch::x86_64::{__m128i, _mm_stream_si128};
        // SAFETY: the precondition of this function; [u64; 2] and __m128i have one size and no
        // invalid bits.
        unsafe {
            _mm_stream_si128(
                at.cast::<__m128i>(),
                core::mem::transmute::<[u64; 2], __m128i>(value),
            );
        }
        return;
    }
    let _ = policy;
    // SAFETY: the precondition of this function.
    unsafe { at.cast::<[u64; 2]>().write_unaligned(value) }
}

/// Copies payload between ranges that do not overlap; any alignment.
///
/// # Safety
/// Both ranges must be valid, and nothing else may write the source or access the target.
#[inline(always)]
pub unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: the precondition of this function.
    unsafe { core::ptr::copy_nonoverlapping(from, to, bytes) }
}

/// Copies payload between ranges that do not overlap, of which other threads of this process may
/// access one: the target of a put, which its rank reads, or the source of a get, which its rank
/// writes. Concurrent loads return old or new bytes. Any alignment.
///
/// The block of instructions is opaque to the compiler, so its accesses are not data races in
/// Rust's memory model. ThreadSanitizer does not see them and gets the other form.
///
/// # Safety
/// Both ranges must be valid.
#[cfg(all(target_arch = "x86_64", not(tsan)))]
#[inline(always)]
pub unsafe fn copy_shared(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: every access is below `bytes`; the instructions change only the target and the
    // registers that they name.
    unsafe {
        core::arch::asm!(
            "cmp {left}, 64",
            "jb 3f",
            "2:",
            "movups {a}, [{from}]",
            "movups {b}, [{from} + 16]",
            "movups {c}, [{from} + 32]",
            "movups {d}, [{from} + 48]",
            "prefetchw [{to} + 512]",
            "movups [{to}], {a}",
            "movups [{to} + 16], {b}",
            "movups [{to} + 32], {c}",
            "movups [{to} + 48], {d}",
            "add {from}, 64",
            "add {to}, 64",
            "sub {left}, 64",
            "cmp {left}, 64",
            "jae 2b",
            "3:",
            "cmp {left}, 8",
            "jb 5f",
            "4:",
            "mov {word}, [{from}]",
            "mov [{to}], {word}",
            "add {from}, 8",
            "add {to}, 8",
            "sub {left}, 8",
            "cmp {left}, 8",
            "jae 4b",
            "5:",
            "test {left}, {left}",
            "jz 7f",
            "6:",
            "mov {word:l}, [{from}]",
            "mov [{to}], {word:l}",
            "inc {from}",
            "inc {to}",
            "dec {left}",
            "jnz 6b",
            "7:",
            to = inout(reg) to => _,
            from = inout(reg) from => _,
            left = inout(reg) bytes => _,
            word = out(reg) _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack),
        );
    }
}

/// Copies payload between ranges that do not overlap, of which other threads of this process may
/// access one by atomic operations.
///
/// # Safety
/// Both ranges must be valid.
#[cfg(not(all(target_arch = "x86_64", not(tsan))))]
#[inline(always)]
pub unsafe fn copy_shared(to: *mut u8, from: *const u8, bytes: usize) {
    use core::sync::atomic::AtomicU8;
    let are_words = (to as usize | from as usize).is_multiple_of(8);
    let words = if are_words { bytes / 8 } else { 0 };
    for index in 0..words {
        // SAFETY: `index < bytes / 8`, and both addresses are aligned.
        unsafe {
            let word = load_u64(from.cast::<u64>().add(index), Order::Relaxed, Scope::System);
            store_u64(
                to.cast::<u64>().add(index),
                word,
                Order::Relaxed,
                Scope::System,
            );
        }
    }
    for index in 8 * words..bytes {
        // SAFETY: `index < bytes`.
        unsafe {
            let byte = AtomicU8::from_ptr(from.cast_mut().add(index)).load(Ordering::Relaxed);
            AtomicU8::from_ptr(to.add(index)).store(byte, Ordering::Relaxed);
        }
    }
}

/// Orders streaming stores before everything that follows.
#[inline(always)]
pub fn drain() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of every x86-64 CPU.
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
}

/// Prefetches the line at `at` for writing. A core commits its stores in order, so that otherwise
/// each store to a line that another core holds waits for that line alone. Any address is allowed.
#[inline(always)]
pub fn prefetch_write(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not fault and changes no memory.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) at, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

#[cfg(all(test, debug_assertions, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    #[repr(align(16))]
    struct Line([u64; 4]);

    /// Returns an address `offset` bytes after a multiple of 16.
    fn address(line: &mut Line, offset: usize) -> *mut u8 {
        line.0.as_mut_ptr().cast::<u8>().wrapping_add(offset)
    }

    #[test]
    #[should_panic(expected = "must be aligned to 16 bytes")]
    fn a_vector_read_needs_16_bytes() {
        let mut line = Line([0; 4]);
        // SAFETY: valid bytes; the alignment is what is tested.
        unsafe { read_16(address(&mut line, 8), Policy::Cached) };
    }

    #[test]
    #[should_panic(expected = "must be aligned to 16 bytes")]
    fn a_vector_write_needs_16_bytes() {
        let mut line = Line([0; 4]);
        // SAFETY: as above.
        unsafe { write_16(address(&mut line, 8), [0; 2], Policy::Cached) };
    }

    #[test]
    #[should_panic(expected = "must be aligned to 8 bytes")]
    fn an_atomic_needs_its_size() {
        let mut line = Line([0; 4]);
        // SAFETY: as above.
        unsafe {
            fetch_add_u64(
                address(&mut line, 4).cast(),
                1,
                Order::Relaxed,
                Scope::System,
            )
        };
    }

    #[test]
    fn aligned_accesses_are_allowed() {
        let mut line = Line([7; 4]);
        // SAFETY: valid and aligned.
        unsafe {
            assert_eq!(read_16(address(&mut line, 16), Policy::Cached), [7, 7]);
            let at = address(&mut line, 4).cast();
            assert_eq!(fetch_add_u32(at, 1, Order::Relaxed, Scope::System), 0);
        }
    }
}
