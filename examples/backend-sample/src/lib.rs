//! A sample backend: a shared library that Fusewire loads at run time.
//!
//! The backend sends data by TCP between the processes (or threads) of one host. It is complete and
//! small, but not fast. Use it as a template.
//!
//! # Usage
//! ```sh
//! cargo build --release -p fusewire-backend-sample
//! export FUSEWIRE_BACKEND_PATH_SAMPLE=$PWD/target/release/libfusewire_backend_sample.so
//! ```
//! If this variable is set, `fusewire::new_comm("sample", ...)` creates communicators with this
//! backend in any program. The program need not depend on this crate. Instead of setting the
//! variable, a program can call `fusewire::backend::register_external_backend("sample", path)`.
//!
//! # Writing a backend
//! 1. Depend on `fusewire-backend-abi` and build a `cdylib`. In C or C++, include
//!    `fusewire_backend.h` and build a shared library. No other part of Fusewire is needed.
//! 2. Export `fusewire_backend_v1`, which returns a static table (`entry.rs`). The table contains a
//!    magic number, a version, its size, a name, and functions. Fifteen functions are mandatory
//!    (`version` to `recv`, and `abort`). Functions that the host can compose from others
//!    (`all_to_all`, `gather`, `barrier`, ...) may be null.
//! 3. In `create`, find the other ranks through the store (`mesh.rs`): every rank sets its own key
//!    and waits for the keys of the other ranks, with the remaining timeout. Pointers in the
//!    setup, except the store, are not valid after `create` returns.
//! 4. In `supports`, return 1 only for operations, types and reductions that are implemented
//!    (`reduce.rs`). For all others, the host returns an error. Return 1 from `is_bitwise` only if
//!    the reduction adds the ranks' values in rank order.
//! 5. Return from every call when its timeout expires, and soon after another thread calls
//!    `abort`. In this crate, `exchange.rs` polls with the remaining time, and `abort` shuts the
//!    streams down, which wakes this rank and its peers.
//! 6. Transfer the messages of a group concurrently. Two ranks that both send before they receive
//!    would deadlock.
//! 7. Catch every panic or exception at the C interface, and return a code and a message
//!    (`entry.rs`).
//! 8. After a failure, fail all further calls, because a message may have been transferred only in
//!    part (`handle.rs`).
#![allow(rustdoc::private_intra_doc_links)]

mod entry;
mod exchange;
mod failure;
mod handle;
mod mesh;
mod reduce;
mod store;

pub use self::entry::fusewire_backend_v1;
