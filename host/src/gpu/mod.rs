//! GPU devices: memory, streams, events, graphs and kernels. The driver library is opened at run
//! time.
//!
//! [`driver::Driver`] is the interface to the driver library. All other code in this module works
//! with any [`driver::Driver`], CUDA or HIP.

mod device;
mod event;
mod graph;
pub mod images;
mod in_flight;
mod launch;
mod memory;
pub mod module;
pub(crate) mod multi_rank_grid;
mod multicast;
mod scratch;
mod share;
mod stream;

pub(crate) use self::device::{HostLine, Residency};
pub use fusewire_driver::Error as DriverError;
pub use fusewire_driver::gpu as driver;

pub use self::device::{Gpu, LoadedModule};
pub(crate) use self::event::Event;
pub(crate) use self::graph::{Graph, GraphExec};
pub(crate) use self::launch::{GridMember, Kernel, Launch};
pub(crate) use self::memory::{Memory, MemoryDescriptor, Offer};
pub(crate) use self::multicast::Multicast;
pub(crate) use self::scratch::{Scratch, Upload};
pub(crate) use self::stream::{Command, Copy, Stream};
