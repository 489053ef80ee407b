//! A global allocator that counts the allocator calls of each thread.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::Cell;
use std::alloc::System;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// The system allocator with a counter of calls per thread. A test binary installs it as its
/// `#[global_allocator]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

/// Returns the number of allocations, reallocations and frees of this thread so far.
pub fn calls() -> u64 {
    CALLS.with(Cell::get)
}

fn count() {
    // `try_with` fails while the thread-locals of this thread are destroyed. Calls made in that
    // phase are not counted.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: every method passes its arguments to `System`, which is a correct allocator, and returns
// its result.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller guarantees that `layout` has a nonzero size, as `GlobalAlloc`
        // requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller guarantees that `layout` has a nonzero size, as `GlobalAlloc`
        // requires.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: `System` allocated `at` with `layout`, because every method of this allocator
        // calls `System`. The caller guarantees a valid `size`, as `GlobalAlloc` requires.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: `System` allocated `at` with `layout`, because every method of this allocator
        // calls `System`.
        unsafe { System.dealloc(at, layout) }
    }
}
