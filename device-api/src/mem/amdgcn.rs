//! Words and packets on AMD: the shim's atomics in the global address space, because this compiler
//! has no inline assembly there, and core's atomics know neither narrower scopes nor that address
//! space.

use super::gpu::pair;
use super::{Order, Scope};

pub use super::gpu::{copy, drain, read, read_16, write, write_16};
pub(crate) use super::gpu::{read_shared, write_shared};

/// The shim's function for an order and a scope.
macro_rules! scoped {
    ($order:expr, $scope:expr, $relaxed:tt, $ordered:tt, $arguments:tt) => {
        match ($order, $scope) {
            (Order::Relaxed, Scope::Block) => scoped!(@ $relaxed, 2, $arguments),
            (Order::Relaxed, Scope::Device) => scoped!(@ $relaxed, 1, $arguments),
            (Order::Relaxed, Scope::System) => scoped!(@ $relaxed, 0, $arguments),
            (_, Scope::Block) => scoped!(@ $ordered, 2, $arguments),
            (_, Scope::Device) => scoped!(@ $ordered, 1, $arguments),
            (_, Scope::System) => scoped!(@ $ordered, 0, $arguments),
        }
    };
    ($order:expr, $scope:expr, $relaxed:tt, $acquire:tt, $release:tt, $both:tt, $arguments:tt) => {
        match $order {
            Order::Acquire => scoped!($order, $scope, $relaxed, $acquire, $arguments),
            Order::Release => scoped!($order, $scope, $relaxed, $release, $arguments),
            _ => scoped!($order, $scope, $relaxed, $both, $arguments),
        }
    };
    (@ [$system:ident $agent:ident $workgroup:ident], 0, ($($argument:expr),*)) => {
        $system($($argument),*)
    };
    (@ [$system:ident $agent:ident $workgroup:ident], 1, ($($argument:expr),*)) => {
        $agent($($argument),*)
    };
    (@ [$system:ident $agent:ident $workgroup:ident], 2, ($($argument:expr),*)) => {
        $workgroup($($argument),*)
    };
}

macro_rules! words {
    (
        $int:ty,
        $load:ident $load_relaxed:tt $load_acquire:tt,
        $store:ident $store_relaxed:tt $store_release:tt,
        $add:ident $add_relaxed:tt $add_acquire:tt $add_release:tt $add_both:tt,
        $exchange:ident $exchange_relaxed:tt $exchange_acquire:tt $exchange_release:tt
        $exchange_both:tt,
        $cas:ident $cas_relaxed:tt $cas_acquire:tt $cas_release:tt $cas_both:tt
    ) => {
        words!(@load $int, $load_relaxed $load_acquire);
        words!(@store $int, $store_relaxed $store_release);
        words!(@update $int, $add_relaxed $add_acquire $add_release $add_both);
        words!(@update $int, $exchange_relaxed $exchange_acquire $exchange_release $exchange_both);
        words!(@cas $int, $cas_relaxed $cas_acquire $cas_release $cas_both);

        /// Loads atomically. [`Order::Release`] and [`Order::AcqRel`] mean acquire.
        ///
        /// # Safety
        /// `at` must be valid, aligned and in global memory; racing accesses must be atomic.
        #[inline(always)]
        pub unsafe fn $load(at: *const $int, order: Order, scope: Scope) -> $int {
            // SAFETY: the precondition of this function.
            unsafe { scoped!(order, scope, $load_relaxed, $load_acquire, (at)) }
        }

        /// Stores atomically. [`Order::Acquire`] and [`Order::AcqRel`] mean release.
        ///
        /// # Safety
        /// `at` must be valid, aligned and in global memory; racing accesses must be atomic.
        #[inline(always)]
        pub unsafe fn $store(at: *mut $int, value: $int, order: Order, scope: Scope) {
            // SAFETY: the precondition of this function.
            unsafe { scoped!(order, scope, $store_relaxed, $store_release, (at, value)) }
        }

        /// Adds, wrapping, and returns the value before.
        ///
        /// # Safety
        /// `at` must be valid, aligned and in global memory; racing accesses must be atomic.
        #[inline(always)]
        pub unsafe fn $add(at: *mut $int, value: $int, order: Order, scope: Scope) -> $int {
            // SAFETY: the precondition of this function.
            unsafe {
                scoped!(order, scope, $add_relaxed, $add_acquire, $add_release, $add_both, (at,
                    value))
            }
        }

        /// Replaces the value and returns the one before.
        ///
        /// # Safety
        /// `at` must be valid, aligned and in global memory; racing accesses must be atomic.
        #[inline(always)]
        pub unsafe fn $exchange(at: *mut $int, value: $int, order: Order, scope: Scope) -> $int {
            // SAFETY: the precondition of this function.
            unsafe {
                scoped!(order, scope, $exchange_relaxed, $exchange_acquire, $exchange_release,
                    $exchange_both, (at, value))
            }
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
            // SAFETY: the precondition of this function.
            unsafe {
                scoped!(order, scope, $cas_relaxed, $cas_acquire, $cas_release, $cas_both, (at,
                    expected, new))
            }
        }
    };
    // Defined in the shim with these signatures.
    (@load $int:ty, $([$($name:ident)*])*) => {
        unsafe extern "unadjusted" { $($(fn $name(at: *const $int) -> $int;)*)* }
    };
    (@store $int:ty, $([$($name:ident)*])*) => {
        unsafe extern "unadjusted" { $($(fn $name(at: *mut $int, value: $int);)*)* }
    };
    (@update $int:ty, $([$($name:ident)*])*) => {
        unsafe extern "unadjusted" { $($(fn $name(at: *mut $int, value: $int) -> $int;)*)* }
    };
    (@cas $int:ty, $([$($name:ident)*])*) => {
        unsafe extern "unadjusted" {
            $($(fn $name(at: *mut $int, expected: $int, new: $int) -> $int;)*)*
        }
    };
}

words!(
    u32,
    load_u32
        [fusewire_load_32_relaxed fusewire_load_32_relaxed_agent fusewire_load_32_relaxed_workgroup]
        [fusewire_load_32_acquire fusewire_load_32_acquire_agent
         fusewire_load_32_acquire_workgroup],
    store_u32
        [fusewire_store_32_relaxed fusewire_store_32_relaxed_agent
         fusewire_store_32_relaxed_workgroup]
        [fusewire_store_32_release fusewire_store_32_release_agent
         fusewire_store_32_release_workgroup],
    fetch_add_u32
        [fusewire_add_32_relaxed fusewire_add_32_relaxed_agent fusewire_add_32_relaxed_workgroup]
        [fusewire_add_32_acquire fusewire_add_32_acquire_agent fusewire_add_32_acquire_workgroup]
        [fusewire_add_32_release fusewire_add_32_release_agent fusewire_add_32_release_workgroup]
        [fusewire_add_32_acq_rel fusewire_add_32_acq_rel_agent fusewire_add_32_acq_rel_workgroup],
    exchange_u32
        [fusewire_exchange_32_relaxed fusewire_exchange_32_relaxed_agent
         fusewire_exchange_32_relaxed_workgroup]
        [fusewire_exchange_32_acquire fusewire_exchange_32_acquire_agent
         fusewire_exchange_32_acquire_workgroup]
        [fusewire_exchange_32_release fusewire_exchange_32_release_agent
         fusewire_exchange_32_release_workgroup]
        [fusewire_exchange_32_acq_rel fusewire_exchange_32_acq_rel_agent
         fusewire_exchange_32_acq_rel_workgroup],
    compare_exchange_u32
        [fusewire_cas_32_relaxed fusewire_cas_32_relaxed_agent fusewire_cas_32_relaxed_workgroup]
        [fusewire_cas_32_acquire fusewire_cas_32_acquire_agent fusewire_cas_32_acquire_workgroup]
        [fusewire_cas_32_release fusewire_cas_32_release_agent fusewire_cas_32_release_workgroup]
        [fusewire_cas_32_acq_rel fusewire_cas_32_acq_rel_agent fusewire_cas_32_acq_rel_workgroup]
);
words!(
    u64,
    load_u64
        [fusewire_load_64_relaxed fusewire_load_64_relaxed_agent fusewire_load_64_relaxed_workgroup]
        [fusewire_load_64_acquire fusewire_load_64_acquire_agent
         fusewire_load_64_acquire_workgroup],
    store_u64
        [fusewire_store_64_relaxed fusewire_store_64_relaxed_agent
         fusewire_store_64_relaxed_workgroup]
        [fusewire_store_64_release fusewire_store_64_release_agent
         fusewire_store_64_release_workgroup],
    fetch_add_u64
        [fusewire_add_64_relaxed fusewire_add_64_relaxed_agent fusewire_add_64_relaxed_workgroup]
        [fusewire_add_64_acquire fusewire_add_64_acquire_agent fusewire_add_64_acquire_workgroup]
        [fusewire_add_64_release fusewire_add_64_release_agent fusewire_add_64_release_workgroup]
        [fusewire_add_64_acq_rel fusewire_add_64_acq_rel_agent fusewire_add_64_acq_rel_workgroup],
    exchange_u64
        [fusewire_exchange_64_relaxed fusewire_exchange_64_relaxed_agent
         fusewire_exchange_64_relaxed_workgroup]
        [fusewire_exchange_64_acquire fusewire_exchange_64_acquire_agent
         fusewire_exchange_64_acquire_workgroup]
        [fusewire_exchange_64_release fusewire_exchange_64_release_agent
         fusewire_exchange_64_release_workgroup]
        [fusewire_exchange_64_acq_rel fusewire_exchange_64_acq_rel_agent
         fusewire_exchange_64_acq_rel_workgroup],
    compare_exchange_u64
        [fusewire_cas_64_relaxed fusewire_cas_64_relaxed_agent fusewire_cas_64_relaxed_workgroup]
        [fusewire_cas_64_acquire fusewire_cas_64_acquire_agent fusewire_cas_64_acquire_workgroup]
        [fusewire_cas_64_release fusewire_cas_64_release_agent fusewire_cas_64_release_workgroup]
        [fusewire_cas_64_acq_rel fusewire_cas_64_acq_rel_agent fusewire_cas_64_acq_rel_workgroup]
);

unsafe extern "unadjusted" {
    safe fn fusewire_fence_acquire();
    safe fn fusewire_fence_acquire_agent();
    safe fn fusewire_fence_acquire_workgroup();
    safe fn fusewire_fence_release();
    safe fn fusewire_fence_release_agent();
    safe fn fusewire_fence_release_workgroup();
    safe fn fusewire_fence_acq_rel();
    safe fn fusewire_fence_acq_rel_agent();
    safe fn fusewire_fence_acq_rel_workgroup();
    safe fn fusewire_complete();
    fn fusewire_load_packets(at: *const u64) -> u128;
}

/// Executes a fence. [`Order::Relaxed`] does nothing.
#[inline(always)]
pub fn fence(order: Order, scope: Scope) {
    match (order, scope) {
        (Order::Relaxed, _) => {}
        (Order::Acquire, Scope::Block) => fusewire_fence_acquire_workgroup(),
        (Order::Acquire, Scope::Device) => fusewire_fence_acquire_agent(),
        (Order::Acquire, Scope::System) => fusewire_fence_acquire(),
        (Order::Release, Scope::Block) => fusewire_fence_release_workgroup(),
        (Order::Release, Scope::Device) => fusewire_fence_release_agent(),
        (Order::Release, Scope::System) => fusewire_fence_release(),
        (Order::AcqRel, Scope::Block) => fusewire_fence_acq_rel_workgroup(),
        (Order::AcqRel, Scope::Device) => fusewire_fence_acq_rel_agent(),
        (Order::AcqRel, Scope::System) => fusewire_fence_acq_rel(),
    }
}

/// Waits until the writes of this wave have reached the cache that the waves of a block share. A
/// write-back by another wave of the block covers them after a barrier.
#[inline(always)]
pub fn complete() {
    fusewire_complete();
}

/// Reads two packets of 8 bytes in one access; each is atomic by itself, without ordering.
///
/// # Safety
/// `at` must be valid for 16 bytes, 16-byte aligned and in global memory; racing accesses must be
/// packet accesses.
#[inline(always)]
pub unsafe fn load_packets(at: *const u64) -> [u64; 2] {
    // SAFETY: the precondition of this function.
    pair(unsafe { fusewire_load_packets(at) })
}

/// Writes two packets of 8 bytes; each is atomic by itself, without ordering. Two accesses: a
/// vector store at system scope exists only as a volatile one, which waits for its completion.
///
/// # Safety
/// `at` must be valid for 16 bytes, 16-byte aligned and in global memory; racing accesses must be
/// packet accesses.
#[inline(always)]
pub unsafe fn store_packets(at: *mut u64, packets: [u64; 2]) {
    // SAFETY: the precondition of this function.
    unsafe {
        store_u64(at, packets[0], Order::Relaxed, Scope::System);
        store_u64(at.add(1), packets[1], Order::Relaxed, Scope::System);
    }
}
