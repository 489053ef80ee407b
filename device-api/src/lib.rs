//! The API for authors of Fusewire kernels.
//!
//! A kernel is one Rust function. The same body compiles to PTX for NVIDIA, to AMDGCN for AMD, and
//! to native code for the CPU:
//!
//! ```
//! use fusewire_device::{Aborted, In, InOut, Machine, Session, kernel};
//!
//! /// Multiplies the numbers of `x` by those of `factors`, in place. Every rank returns when all
//! /// have finished.
//! #[kernel]
//! pub fn scale(
//!     s: &mut Session<impl Machine>,
//!     x: InOut<f32>,
//!     #[agreed] factors: In<f32>,
//! ) -> Result<(), Aborted> {
//!     for i in s.block().elements(x.len()) {
//!         x.set(i, x.get(i) * factors.get(i));
//!     }
//!     s.barrier()
//! }
//! # fn main() {}
//! ```
//!
//! # Modules
//! - [`group`]: [`Block`], [`Warp`], [`Thread`], and the functions that their lanes call together.
//! - [`call`]: the operation of a launch as one word, which ranks compare.
//! - [`args`]: memory of this rank as arguments of a kernel, with checked accesses.
//! - [`mem`]: the only place that touches memory which another rank can write.
//! - [`layout`]: the communicator's metadata, as plain data in device memory.
//! - [`multimem`]: one address for the same bytes of every rank.
//! - [`comm`]: a communicator as a kernel sees it: ranks, windows, [`comm::PeerPtr`].
//! - [`wait`]: bounded, abortable waits and the failure record.
//! - [`session`]: one launch on a communicator: epochs, busy word, progress; signals and barriers.
//! - [`packet`]: data and flag in one atomic unit.
//! - [`channel`]: a ring with credits between two ranks.
//! - [`net`]: put, get, signal and updates of cells to any rank.
//! - [`window`]: a window with signals, counters, barriers and cells of its own; [`Window`] as an
//!   argument of a kernel; [`Queue`], batches of rows between blocks.
//! - [`element`]: number formats and reductions.
//! - [`math`]: exponential and logarithm with the same bits everywhere.
//! - [`bulk`]: copies and reductions over ranges.
//! - [`multi_rank_grid`]: for tests, all ranks in a multi-rank grid on one GPU.
//!
//! # Memory model
//! Data reaches a peer by one of three idioms only: a signal (write the data, then
//! [`session::Session::ready`], [`session::Session::done`] or [`Remote::signal`]), a packet, or a
//! barrier built from signals. A barrier between the lanes of a block publishes nothing to another
//! rank.
#![no_std]
#![cfg_attr(
    any(target_arch = "nvptx64", target_arch = "amdgpu"),
    feature(abi_unadjusted),
    allow(internal_features)
)]
#![cfg_attr(target_arch = "nvptx64", feature(asm_experimental_arch))]

extern crate self as fusewire_device;

#[cfg(any(loom, shuttle))]
extern crate std;

pub mod arch;
pub mod args;
pub mod bulk;
pub mod call;
pub mod channel;
pub mod comm;
mod context;
pub mod element;
mod faults;
pub mod group;
pub mod layout;
pub mod math;
pub mod mem;
pub mod multi_rank_grid;
pub mod multimem;
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub mod native;
pub mod net;
pub mod packet;
pub mod session;
mod shared_cache;
pub mod wait;
pub mod window;

pub use self::args::{In, InOut, Out, Shared};
pub use self::comm::{Comm, PeerPtr, Rank, Team};
pub use self::element::{Bf16, DType, E4m3, E5m2, Element, F16, F32Index};
pub use self::group::{Block, Group, Machine, Thread, Warp};
pub use self::session::{Aborted, Session, Unvoted};
pub use self::window::{Local, Queue, Received, Remote, Scratch, Window};
pub use fusewire_device_macros::kernel;

#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    arch::trap()
}
