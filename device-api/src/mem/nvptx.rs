//! Words and packets on NVIDIA: inline assembly, because before LLVM 23 every atomic
//! read-modify-write but compare-exchange loses its ordering and its scope.
//!
//! Never `pure`: nothing here may be moved, merged or dropped.

use core::arch::asm;

use super::{Order, Scope};

pub use super::gpu::{copy, drain, read, read_16, write, write_16};
pub(crate) use super::gpu::{read_shared, write_shared};

/// One instruction on a word in global memory: `$name` with its scope put between `$before` and
/// `$after`.
macro_rules! scoped {
    ($scope:expr, $before:literal, $after:expr, $($operands:tt)*) => {
        match $scope {
            Scope::Block => scoped!(@ ".cta", $before, $after, $($operands)*),
            Scope::Device => scoped!(@ ".gpu", $before, $after, $($operands)*),
            Scope::System => scoped!(@ ".sys", $before, $after, $($operands)*),
        }
    };
    (@ $scope:literal, $before:literal, $after:expr, $($operands:tt)*) => {
        asm!(
            concat!(
                "{{ .reg .b64 global; cvta.to.global.u64 global, {at}; ",
                $before, $scope, $after,
                " }}"
            ),
            $($operands)*
            options(nostack)
        )
    };
}

macro_rules! words {
    (
        $int:ty, $bits:literal, $class:ident,
        $load:ident, $store:ident, $add:ident, $exchange:ident, $cas:ident
    ) => {
        /// Loads atomically. [`Order::Release`] and [`Order::AcqRel`] mean acquire.
        ///
        /// # Safety
        /// `at` must be valid, aligned and in global memory; racing accesses must be atomic.
        #[inline(always)]
        pub unsafe fn $load(at: *const $int, order: Order, scope: Scope) -> $int {
            let value: $int;
            // SAFETY: valid by the precondition; every path writes `value`.
            unsafe {
                if order == Order::Relaxed {
                    scoped!(scope, "ld.relaxed", concat!(".global.u", $bits, " {value}, [global];"),
                        at = in(reg64) at, value = out($class) value,);
                } else {
                    scoped!(scope, "ld.acquire", concat!(".global.u", $bits, " {value}, [global];"),
                        at = in(reg64) at, value = out($class) value,);
                }
            }
            value
        }

        /// Stores atomically. [`Order::Acquire`] and [`Order::AcqRel`] mean release.
        ///
        /// # Safety
        /// `at` must be valid, aligned and in global memory; racing accesses must be atomic.
        #[inline(always)]
        pub unsafe fn $store(at: *mut $int, value: $int, order: Order, scope: Scope) {
            // SAFETY: the precondition of this function.
            unsafe {
                if order == Order::Relaxed {
                    scoped!(scope, "st.relaxed", concat!(".global.u", $bits, " [global], {value};"),
                        at = in(reg64) at, value = in($class) value,);
                } else {
                    scoped!(scope, "st.release", concat!(".global.u", $bits, " [global], {value};"),
                        at = in(reg64) at, value = in($class) value,);
                }
            }
        }

        /// Adds, wrapping, and returns the value before.
        ///
        /// # Safety
        /// `at` must be valid, aligned and in global memory; racing accesses must be atomic.
        #[inline(always)]
        pub unsafe fn $add(at: *mut $int, value: $int, order: Order, scope: Scope) -> $int {
            let before: $int;
            // SAFETY: valid by the precondition; every path writes `before`.
            unsafe {
                if order == Order::Relaxed {
                    scoped!(scope, "atom.relaxed",
                        concat!(".global.add.u", $bits, " {before}, [global], {value};"),
                        at = in(reg64) at, value = in($class) value, before = out($class) before,);
                } else if order == Order::Acquire {
                    scoped!(scope, "atom.acquire",
                        concat!(".global.add.u", $bits, " {before}, [global], {value};"),
                        at = in(reg64) at, value = in($class) value, before = out($class) before,);
                } else if order == Order::Release {
                    scoped!(scope, "atom.release",
                        concat!(".global.add.u", $bits, " {before}, [global], {value};"),
                        at = in(reg64) at, value = in($class) value, before = out($class) before,);
                } else {
                    scoped!(scope, "atom.acq_rel",
                        concat!(".global.add.u", $bits, " {before}, [global], {value};"),
                        at = in(reg64) at, value = in($class) value, before = out($class) before,);
                }
            }
            before
        }

        /// Replaces the value and returns the one before.
        ///
        /// # Safety
        /// `at` must be valid, aligned and in global memory; racing accesses must be atomic.
        #[inline(always)]
        pub unsafe fn $exchange(at: *mut $int, value: $int, order: Order, scope: Scope) -> $int {
            let before: $int;
            // SAFETY: valid by the precondition; every path writes `before`.
            unsafe {
                if order == Order::Relaxed {
                    scoped!(scope, "atom.relaxed",
                        concat!(".global.exch.b", $bits, " {before}, [global], {value};"),
                        at = in(reg64) at, value = in($class) value, before = out($class) before,);
                } else if order == Order::Acquire {
                    scoped!(scope, "atom.acquire",
                        concat!(".global.exch.b", $bits, " {before}, [global], {value};"),
                        at = in(reg64) at, value = in($class) value, before = out($class) before,);
                } else if order == Order::Release {
                    scoped!(scope, "atom.release",
                        concat!(".global.exch.b", $bits, " {before}, [global], {value};"),
                        at = in(reg64) at, value = in($class) value, before = out($class) before,);
                } else {
                    scoped!(scope, "atom.acq_rel",
                        concat!(".global.exch.b", $bits, " {before}, [global], {value};"),
                        at = in(reg64) at, value = in($class) value, before = out($class) before,);
                }
            }
            before
        }

        /// Replaces `expected` by `new` and returns the value before, which is `expected` on
        /// success.
        ///
        /// # Safety
        /// `at` must be valid, aligned and in global memory; racing accesses must be atomic.
        #[inline(always)]
        pub unsafe fn $cas(
            at: *mut $int,
            expected: $int,
            new: $int,
            order: Order,
            scope: Scope,
        ) -> $int {
            let before: $int;
            // SAFETY: valid by the precondition; every path writes `before`.
            unsafe {
                if order == Order::Relaxed {
                    scoped!(scope, "atom.relaxed",
                        concat!(".global.cas.b", $bits, " {before}, [global], {expected}, {new};"),
                        at = in(reg64) at, expected = in($class) expected, new = in($class) new,
                        before = out($class) before,);
                } else if order == Order::Acquire {
                    scoped!(scope, "atom.acquire",
                        concat!(".global.cas.b", $bits, " {before}, [global], {expected}, {new};"),
                        at = in(reg64) at, expected = in($class) expected, new = in($class) new,
                        before = out($class) before,);
                } else if order == Order::Release {
                    scoped!(scope, "atom.release",
                        concat!(".global.cas.b", $bits, " {before}, [global], {expected}, {new};"),
                        at = in(reg64) at, expected = in($class) expected, new = in($class) new,
                        before = out($class) before,);
                } else {
                    scoped!(scope, "atom.acq_rel",
                        concat!(".global.cas.b", $bits, " {before}, [global], {expected}, {new};"),
                        at = in(reg64) at, expected = in($class) expected, new = in($class) new,
                        before = out($class) before,);
                }
            }
            before
        }
    };
}

words!(
    u32,
    "32",
    reg32,
    load_u32,
    store_u32,
    fetch_add_u32,
    exchange_u32,
    compare_exchange_u32
);
words!(
    u64,
    "64",
    reg64,
    load_u64,
    store_u64,
    fetch_add_u64,
    exchange_u64,
    compare_exchange_u64
);

/// Executes a fence. [`Order::Relaxed`] does nothing; every other order is both acquire and
/// release.
#[inline(always)]
pub fn fence(order: Order, scope: Scope) {
    if order == Order::Relaxed {
        return;
    }
    // SAFETY: a fence has no precondition.
    unsafe {
        match scope {
            Scope::Block => asm!("fence.acq_rel.cta;", options(nostack)),
            Scope::Device => asm!("fence.acq_rel.gpu;", options(nostack)),
            Scope::System => asm!("fence.acq_rel.sys;", options(nostack)),
        }
    }
}

/// Does nothing: a barrier covers the writes of all lanes.
#[inline(always)]
pub fn complete() {}

/// Reads two packets of 8 bytes in one access; each is atomic by itself, without ordering.
///
/// # Safety
/// `at` must be valid for 16 bytes, 16-byte aligned and in global memory; racing accesses must be
/// packet accesses.
#[inline(always)]
pub unsafe fn load_packets(at: *const u64) -> [u64; 2] {
    let (low, high): (u64, u64);
    // SAFETY: the precondition of this function.
    unsafe {
        asm!(
            "{{ .reg .b64 global; cvta.to.global.u64 global, {at}; \
             ld.relaxed.sys.global.v2.u64 {{{low}, {high}}}, [global]; }}",
            at = in(reg64) at,
            low = out(reg64) low,
            high = out(reg64) high,
            options(nostack)
        );
    }
    [low, high]
}

/// Writes two packets of 8 bytes in one access; each is atomic by itself, without ordering.
///
/// # Safety
/// `at` must be valid for 16 bytes, 16-byte aligned and in global memory; racing accesses must be
/// packet accesses.
#[inline(always)]
pub unsafe fn store_packets(at: *mut u64, packets: [u64; 2]) {
    // SAFETY: the precondition of this function.
    unsafe {
        asm!(
            "{{ .reg .b64 global; cvta.to.global.u64 global, {at}; \
             st.relaxed.sys.global.v2.u64 [global], {{{low}, {high}}}; }}",
            at = in(reg64) at,
            low = in(reg64) packets[0],
            high = in(reg64) packets[1],
            options(nostack)
        );
    }
}
