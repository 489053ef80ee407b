//! A bridge to [Gloo](https://github.com/pytorch/gloo), the collectives that PyTorch uses on CPUs:
//! all ranks of a group, connected over TCP, and every collective over host memory.
//!
//! Everything here stands behind the feature `gloo`, which is off by default. With it, the crate
//! needs a C++17 compiler and an installed Gloo: Debian's `libgloo-dev` (0.0~git20220518, the
//! version that it is tested with) or another prefix named by the environment variable `GLOO_ROOT`.
//! Without it, the crate is empty, and builds everywhere.
//!
//! # From nothing to a sum
//!
//! Each rank needs its number, the size of the group, and an address where the ranks find each
//! other: a `Rendezvous`, which stores a few hundred bytes for each rank. Here it is a map shared
//! by threads; between processes it would be a file or a TCP store.
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
//!         self.0.0.lock().unwrap().get(key).cloned().ok_or_else(|| "not there".to_owned())
//!     }
//!
//!     fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), String> {
//!         let map = self.0.0.lock().unwrap();
//!         let missing =
//!             |map: &mut HashMap<_, _>| !keys.iter().all(|key| map.contains_key(*key));
//!         let (_map, waited) = self.0.1.wait_timeout_while(map, timeout, missing).unwrap();
//!         if waited.timed_out() { Err(format!("not all of {keys:?} came")) } else { Ok(()) }
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
//!             // SAFETY: `data` is four elements of this thread, which lives through the call.
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
//! # What to know
//!
//! - Every operation ends by its time-out, which covers the whole operation. The error names the
//!   operation and, where it is known, the rank that is late.
//! - The first error of a rank closes its connections, so that the others fail soon; then the
//!   context is done. `Context::abort` does the same from another thread.
//! - Sizes must agree between ranks. Where they do not, the operation times out: the length of each
//!   message is part of what matches it. (Plain Gloo takes the process down.) The length enters as
//!   16 bits of a hash, so one wrong length in 65,536 still does.
//! - Reductions have the same bits on all ranks, but no fixed order of summation.
//! - There is no reduce-scatter and no average: compose them.
//! - Gloo sets no signal handlers. A process in which `SIGPIPE` is not ignored can be killed by a
//!   peer's death; Rust's and Python's runtimes ignore it.

#[cfg(feature = "gloo")]
mod collectives;
#[cfg(feature = "gloo")]
mod context;
#[cfg(feature = "gloo")]
mod error;
#[cfg(feature = "gloo")]
#[allow(unreachable_pub, clippy::undocumented_unsafe_blocks)] // in what cxx generates
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
