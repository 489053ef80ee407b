//! A sample backend: a shared library that Fusewire loads at run time.
//!
//! It sends data by TCP between the processes (or threads) of one host. It is small, complete and
//! not fast; use it as a template.
//!
//! # Usage
//! ```sh
//! cargo build --release -p fusewire-backend-sample
//! export FUSEWIRE_BACKEND_PATH_SAMPLE=$PWD/target/release/libfusewire_backend_sample.so
//! ```
//! Then `fusewire::new_comm("sample", ...)` creates communicators with this backend in any program,
//! without a dependency on this crate. `fusewire::backend::register_external_backend("sample",
//! path)` does the same without the variable.
//!
//! # Writing a backend
//! 1. Depend on `fusewire-backend-abi` and build a `cdylib`. In C or C++, include
//!    `fusewire_backend.h` and build a shared library. No other part of Fusewire is needed.
//! 2. Export `fusewire_backend_v1`, which returns a static table (`entry.rs`): magic, version, its
//!    size, a name, and functions. Fifteen are mandatory (`version` to `recv`, `abort`). Functions
//!    that your library lacks and that the host can compose (`all_to_all`, `gather`, `barrier`,
//!    ...) may be null.
//! 3. In `create`, find the other ranks through the store (`mesh.rs`): every rank sets its own key
//!    and waits for the keys of the others, with the remaining time-out. Of the setup, keep only
//!    the store.
//! 4. In `supports`, return 1 only for operations, types and reductions that are implemented
//!    (`reduce.rs`): the host refuses all others with a message. Return 1 from `is_bitwise` only if
//!    ranks are reduced in rank order.
//! 5. Return from every call at its time-out, and soon after `abort`, which another thread calls
//!    (`exchange.rs` polls with the remaining time; `abort` shuts the streams down, which wakes
//!    this rank and its peers).
//! 6. Transfer the messages of a group concurrently. Two ranks that both send before they receive
//!    would deadlock.
//! 7. Catch every panic or exception at the C interface, and return a code and a message
//!    (`entry.rs`).
//! 8. After a failure, fail all further calls: a message may be transferred in part (`handle.rs`).
#![allow(rustdoc::private_intra_doc_links)]

mod entry;
mod exchange;
mod failure;
mod handle;
mod mesh;
mod reduce;
mod store;

pub use self::entry::fusewire_backend_v1;
