//! The system interfaces under Fusewire: the driver libraries of GPUs, opened at run time, and
//! shared memory between the processes of a host.
//!
//! - [`gpu::Driver`] is the interface to a driver library. `cuda` and `hip` implement it; each is
//!   enabled by the feature of the same name.
//! - [`Segment`] is memory of the CPU that several processes map.
//! - [`process`] and [`descriptor`] query other processes and wait for file descriptors.
//!
//! Handles are plain integers that nothing owns. The crate `fusewire` wraps them in types that own
//! memory, streams, events and graphs. This crate does not depend on communicators.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod descriptor;
#[cfg(any(feature = "cuda", feature = "hip"))]
pub mod environment;
mod error;
pub mod gpu;
#[cfg(feature = "hip")]
pub mod hip;
pub mod process;
mod segment;

pub use self::error::{Error, Result};
pub use self::segment::{Segment, SegmentDescriptor};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
mod readme {}
