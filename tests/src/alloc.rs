//! An allocator that counts, per thread.

use core::alloc::{GlobalAlloc, Layout};
use core::cell::Cell;
use std::alloc::System;

thread_local! {
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator; counts what each thread asks of it. A test binary names it as its
/// `#[global_allocator]`.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountingAllocator;

/// Allocations, reallocations and frees of this thread so far.
pub fn calls() -> u64 {
    CALLS.with(Cell::get)
}

fn count() {
    // A thread that is ending has no counter any more, and nobody asks.
    let _ = CALLS.try_with(|calls| calls.set(calls.get() + 1));
}

// SAFETY: everything is passed on to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count();
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}
