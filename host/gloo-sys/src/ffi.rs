//! The interface between Rust and C++. `cxx` generates the code of both sides.

use core::panic::AssertUnwindSafe;
use core::time::Duration;
use std::panic::catch_unwind;

use cxx::{CxxString, CxxVector};

use crate::reduction::reduce_into;
use crate::rendezvous::Rendezvous;

#[cxx::bridge(namespace = "fusewire_gloo")]
mod bridge {
    /// Arguments that every operation takes.
    struct Call {
        tag: u32,
        timeout_ms: u64,
    }

    /// One message of a batch.
    struct Message {
        send: bool,
        address: usize,
        bytes: usize,
        peer: i32,
        tag: u32,
    }

    extern "Rust" {
        type StoreBox;
        fn set(self: &StoreBox, key: &str, value: &[u8]) -> Result<()>;
        fn get(self: &StoreBox, key: &str) -> Result<Vec<u8>>;
        fn wait(self: &StoreBox, keys: &CxxVector<CxxString>, timeout_ms: u64) -> Result<()>;

        unsafe fn reduce_into(
            dtype: u8,
            op: u8,
            out: *mut u8,
            a: *const u8,
            b: *const u8,
            count: usize,
        );
    }

    unsafe extern "C++" {
        include!("fusewire-gloo-sys/cpp/bridge.h");

        type Bridge;

        fn connect(
            rank: i32,
            size: i32,
            timeout_ms: u64,
            kind: u8,
            target: &str,
            store: &StoreBox,
        ) -> Result<UniquePtr<Bridge>>;

        #[allow(clippy::too_many_arguments)] // the shape of the C++ method
        unsafe fn allreduce(
            self: &Bridge,
            input: *const u8,
            output: *mut u8,
            count: usize,
            element: usize,
            dtype: u8,
            op: u8,
            call: &Call,
        ) -> Result<()>;
        #[allow(clippy::too_many_arguments)] // the shape of the C++ method
        unsafe fn reduce(
            self: &Bridge,
            input: *const u8,
            output: *mut u8,
            count: usize,
            element: usize,
            dtype: u8,
            op: u8,
            root: i32,
            call: &Call,
        ) -> Result<()>;
        unsafe fn allgather(
            self: &Bridge,
            output: *mut u8,
            bytes: usize,
            call: &Call,
        ) -> Result<()>;
        unsafe fn allgatherv(
            self: &Bridge,
            output: *mut u8,
            counts: &[usize],
            call: &Call,
        ) -> Result<()>;
        unsafe fn alltoall(
            self: &Bridge,
            input: *const u8,
            output: *mut u8,
            bytes: usize,
            call: &Call,
        ) -> Result<()>;
        unsafe fn alltoallv(
            self: &Bridge,
            input: *const u8,
            sent: &[i64],
            output: *mut u8,
            received: &[i64],
            call: &Call,
        ) -> Result<()>;
        unsafe fn broadcast(
            self: &Bridge,
            buffer: *mut u8,
            bytes: usize,
            root: i32,
            call: &Call,
        ) -> Result<()>;
        unsafe fn scatter(
            self: &Bridge,
            input: *const u8,
            output: *mut u8,
            bytes: usize,
            root: i32,
            call: &Call,
        ) -> Result<()>;
        unsafe fn gather(
            self: &Bridge,
            input: *const u8,
            output: *mut u8,
            bytes: usize,
            root: i32,
            call: &Call,
        ) -> Result<()>;
        fn barrier(self: &Bridge, call: &Call) -> Result<()>;
        unsafe fn batch(self: &Bridge, messages: &[Message], prefix: u8, call: &Call)
        -> Result<()>;
        fn abort(self: &Bridge) -> Result<()>;
    }
}

pub(crate) use bridge::{Bridge, Call, Message, connect};

/// The caller's rendezvous, which C++ code calls. A panic of the rendezvous is converted to an
/// error, because a panic must not unwind into C++.
pub(crate) struct StoreBox(pub(crate) Box<dyn Rendezvous>);

impl StoreBox {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        caught("set", || self.0.set(key, value))
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, String> {
        caught("get", || self.0.get(key))
    }

    fn wait(&self, keys: &CxxVector<CxxString>, timeout_ms: u64) -> Result<(), String> {
        let keys: Vec<_> = keys.iter().map(|key| key.to_string_lossy()).collect();
        let keys: Vec<&str> = keys.iter().map(AsRef::as_ref).collect();
        caught("wait", || {
            self.0.wait(&keys, Duration::from_millis(timeout_ms))
        })
    }
}

fn caught<T>(name: &str, call: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    // After a panic the connection attempt ends, and nothing uses the value any more.
    catch_unwind(AssertUnwindSafe(call))
        .unwrap_or_else(|_| Err(format!("the rendezvous panicked in {name}")))
}
