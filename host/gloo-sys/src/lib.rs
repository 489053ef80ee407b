//! A bridge to [Gloo](https://github.com/pytorch/gloo), the library of collectives that PyTorch
//! uses on CPUs. Gloo connects all ranks of a group over TCP, and its collectives work on host
//! memory.
//!
//! Everything in this crate requires the feature `gloo`, which is off by default. With the feature,
//! the crate needs a C++17 compiler and an installed Gloo: either Debian's `libgloo-dev` (the tests
//! use version 0.0~git20220518) or an installation whose prefix is given by the environment
//! variable `GLOO_ROOT`. Without the feature, the crate is empty and builds everywhere.
//!
//! # Example
//!
//! Each rank needs its number, the size of the group, and a `Rendezvous` through which the ranks
//! exchange addresses. The rendezvous stores a few hundred bytes for each rank. In this example it
//! is a map that threads share; between processes it would be a file or a TCP store.
#![cfg_attr(feature = "gloo", doc = "```")]
#![cfg_attr(not(feature = "gloo"), doc = "```ignore")]
//! use std::collections::HashMap;
//! use std::sync::{Arc, Condvar, Mutex};
//! use std::time::Duration;
//!
//! use fusewire_gloo_sys::{Call, Context, DataType, ReduceOp, Rendezvous, TcpOptions};
//!
//! #[derive(Clone, Default)]
//! struct Map(Arc<(Mutex<HashMap<String, Vec<u8>>>, Condvar)>);
//!
//! impl Rendezvous for Map {
//!     fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
//!         self.0.0.lock().unwrap().insert(key.to_owned(), value.to_vec());
//!         self.0.1.notify_all();
//!         Ok(())
//!     }
//!
//!     fn get(&self, key: &str) -> Result<Vec<u8>, String> {
//!         self.0.0.lock().unwrap().get(key).cloned().ok_or_else(|| "no such key".to_owned())
//!     }
//!
//!     fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), String> {
//!         let map = self.0.0.lock().unwrap();
//!         let missing =
//!             |map: &mut HashMap<_, _>| !keys.iter().all(|key| map.contains_key(*key));
//!         let (_map, waited) = self.0.1.wait_timeout_while(map, timeout, missing).unwrap();
//!         if waited.timed_out() { Err(format!("some of {keys:?} are missing")) } else { Ok(()) }
//!     }
//! }
//!
//! let map = Map::default();
//! std::thread::scope(|scope| {
//!     for rank in 0..2 {
//!         let store = Box::new(map.clone());
//!         scope.spawn(move || {
//!             let timeout = Duration::from_secs(20);
//!             let context =
//!                 Context::new(rank, 2, timeout, &TcpOptions::loopback(), store).unwrap();
//!             let mut sum = [rank as f32 + 1.0; 4];
//!             let data = sum.as_mut_ptr().cast::<u8>();
//! // SAFETY: `data` points to four elements of this thread's stack, valid during the call.
//!             unsafe {
//!                 context.allreduce(data, data, 4, DataType::F32, ReduceOp::Sum, Call::new())
//!             }
//!             .unwrap();
//!             assert_eq!(sum, [3.0; 4]);
//!             context.barrier(Call::new().timeout(Duration::from_secs(5))).unwrap();
//!             context.close();
//!         });
//!     }
//! });
//! ```
//!
//! # Guarantees and limits
//!
//! - Every operation returns within its timeout, which covers the whole operation. The error names
//!   the operation and, if known, the late rank.
//! - The first error of a rank closes all connections of the rank, so that the other ranks fail
//!   soon. The context cannot be used afterwards. `Context::abort` does the same from another
//!   thread.
//! - Sizes must agree between ranks. If they do not, the operation times out, because the length of
//!   each message is part of its matching key. (Plain Gloo ends the process.) The key contains a
//!   16-bit hash of the length, so one wrong length in 65,536 still ends the process.
//! - Results of reductions are bitwise identical on all ranks, but the order of summation is not
//!   fixed.
//! - There is no reduce-scatter and no average: compose them from other operations.
//! - Gloo sets no signal handlers. A peer's death can kill a process that does not ignore
//!   `SIGPIPE`; the runtimes of Rust and Python ignore it.

#[cfg(feature = "gloo")]
mod collectives;
#[cfg(feature = "gloo")]
mod context;
#[cfg(feature = "gloo")]
mod error;
#[cfg(feature = "gloo")]
#[allow(unreachable_pub, clippy::undocumented_unsafe_blocks)] // in the code that cxx generates
mod ffi;
#[cfg(feature = "gloo")]
mod p2p;
#[cfg(feature = "gloo")]
mod reduction;
#[cfg(feature = "gloo")]
mod rendezvous;

#[cfg(feature = "gloo")]
pub use crate::{
    context::{Call, Context, TcpOptions},
    error::Error,
    p2p::Transfer,
    reduction::{DataType, ReduceOp},
    rendezvous::Rendezvous,
};
