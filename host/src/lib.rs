//! Host library of Fusewire: devices, communicators, planning.
//!
//! ```
//! use fusewire::{DType, Options, ReduceOp, run_threads};
//!
//! // Four ranks as threads of this process. Ranks in processes call Communicator::from_env.
//! let results = run_threads(4, &Options::default(), |comm| {
//!     let x = comm.alloc(DType::F32, 3)?; // memory in a window: reduced without a copy
//!     x.copy_from(&[comm.rank() as f32; 3])?;
//!     comm.all_reduce(&x, ReduceOp::Sum)?;
//!     x.to_vec::<f32>()
//! });
//! for result in results {
//!     assert_eq!(result?, [6.0; 3]);
//! }
//! # Ok::<(), fusewire::Error>(())
//! ```
//!
//! # Errors
//! A call with invalid arguments returns an error before any data moves. Every wait has a timeout:
//! if a rank dies, stops, or calls a different operation, every other rank gets an error that names
//! the operation, its sequence number and the rank to blame ([`Failure`]). All later calls of the
//! communicator return the same error.
//!
//! # Thread safety
//! A [`Communicator`] may be used from several threads, but all ranks must issue its operations in
//! the same order.

mod algorithm;
pub mod backend;
pub mod bootstrap;
mod collective;
mod comm;
pub mod cpu;
mod deferred;
mod device;
mod digest;
mod error;
pub mod gpu;
mod gpus;
mod memory;
mod options;
mod plan;

mod stream;
mod tensor;
#[doc(hidden)]
pub mod testing;
mod usage;
mod user_kernels;

pub use self::collective::{Collective, Counts, Op, Operands};
#[cfg(feature = "cuda")]
pub use fusewire_driver::cuda;
#[cfg(any(feature = "cuda", feature = "hip"))]
pub use fusewire_driver::environment;
#[cfg(feature = "hip")]
pub use fusewire_driver::hip;
pub(crate) use fusewire_driver::{descriptor, process};
pub use fusewire_net as transport;
pub use fusewire_store as store;

pub use self::algorithm::Algorithm;
pub use self::comm::{
    AllGatherP, Batch, Candidate, Communicator, Dispatched, FlightRecord, HookArguments,
    HookBuffer, HookHandle, InitHandle, KernelLaunch, LaunchAttributes, MAX_SIZE, Members,
    MicroBatch, MissingRanks, Moe, MoeConfig, MoeInfo, MoeLayout, MoeMode, MoePayload, MoeReceived,
    MoeResults, MoeScales, MoeScalesLayout, Norm, P2pKind, P2pOp, PreparedKernel, Queue,
    ReadyFlags, ReconfigureOptions, RecordState, Registration, ReplayArguments, ReplayEdge,
    ScaleLayout, SignalUpdate, VocabParallel, Window, WindowAccess, WindowOptions, Work,
    WorkStatus, new_comm, run_threads, run_threads_each, run_threads_on, run_threads_with,
};
pub use self::device::{Device, isa};
pub use self::error::{Activity, EndReason, Error, Failure, Result};
pub use self::gpu::driver::StreamPriority;
pub use self::gpus::open as open_gpu;
pub use self::options::{CallOptions, Determinism, InterHost, Options, ReduceOp};
pub use self::plan::Plan;
pub use self::stream::{Event, Graph, GraphExec, Stream, Ticket};
pub use self::tensor::{Input, Output, Tensor};
pub use fusewire_device::call::Operation;
pub use fusewire_device::element::ReductionCode;
pub use fusewire_device::layout::FailureKind;
pub use fusewire_device::native::Isa;
pub use fusewire_device::window::{Compare, DeviceWindow};
pub use fusewire_device::{Bf16, DType, E4m3, E5m2, Element, F16, F32Index};
