//! A backend of your own: a shared library that Fusewire loads at run time.
//!
//! This one moves data by TCP between the processes (or threads) of one host. It is small, complete, and
//! not fast; take it as the frame of yours.
//!
//! # Using it
//! ```sh
//! cargo build --release -p fusewire-backend-sample
//! export FUSEWIRE_BACKEND_PATH_SAMPLE=$PWD/target/release/libfusewire_backend_sample.so
//! ```
//! Then `fusewire::new_comm("sample", ...)` makes communicators of it in any program, which knows nothing of
//! this crate. `fusewire::backend::register_external_backend("sample", path)` does the same without a variable.
//!
//! # Writing one's own
//! 1. Depend on `fusewire-backend-abi` and build a `cdylib`; or, in C or C++, include `fusewire_backend.h` and build
//!    a shared library. Nothing else of Fusewire is needed.
//! 2. Export `fusewire_backend_v1`, which gives a static table (`entry.rs`): magic, version, its own size, a name,
//!    and functions. Fifteen of them are needed (`version` to `recv`, `abort`); leave null what your library lacks
//!    and the host can compose (`all_to_all`, `gather`, `barrier`, ...).
//! 3. In `create`, find the other ranks through the store (`mesh.rs`): every rank sets a key of its own, and waits for
//!    those of the others. Give what the waits have left of the time-out; keep nothing of the setup but the store.
//! 4. Say in `supports` what you really have (`reduce.rs`): the host then refuses the rest with a message instead
//!    of calling you. Say 1 in `is_bitwise` only if ranks are reduced in rank order.
//! 5. End every call: at its time-out, and soon after `abort`, which comes from another thread (`exchange.rs` polls
//!    with the time that is left; `abort` shuts the streams down, which wakes this rank and its peers).
//! 6. Let messages of a group move at once. Whoever sends first and receives then deadlocks with its like.
//! 7. Catch every panic or exception at the border, and leave a code and a message instead (`entry.rs`).
//! 8. After a failure stay broken: half a message may be on its way (`handle.rs`).
#![allow(rustdoc::private_intra_doc_links)]

mod entry;
mod exchange;
mod failure;
mod handle;
mod mesh;
mod reduce;
mod store;

pub use self::entry::fusewire_backend_v1;
