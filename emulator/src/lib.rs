//! Emulator of PTX: executes kernels that are compiled for NVIDIA GPUs on the CPU, on one or
//! several emulated devices. Tests use it to run compiled kernels without a GPU.
//!
//! The emulator parses PTX as LLVM and nvcc write it, and executes it instruction by instruction. A
//! block has warps of 32 lanes, and each lane has its own program counter. An invalid access, a
//! barrier in divergent code or a lane that is missing from a mask ends the launch with an error.
//! The error names the instruction and the thread.
//!
//! | type | purpose |
//! |---|---|
//! | [`Module`] | PTX text with its kernels and variables |
//! | [`Gpus`], [`Buffer`], [`Kernel`] | devices with memory, and launches, in safe code |
//! | [`Machine`], [`Memory`], [`LoadedModule`], [`Launch`] | launches on memory of the program, for a driver |
//! | [`StreamOperation`] | waits and writes of streams, which order launches |
//! | [`Config`] | scheduler, clock, capacity of the devices, limits for launches without progress |
//! | [`Error`] | an error of a module or of a launch |
//!
//! # Example
//!
//! The kernel `add_index` has 64 threads and writes 64 elements. A third block writes after the end
//! of the buffer, which is an error:
//!
//! ```
//! use std::sync::Arc;
//!
//! use fusewire_emulator::{Error, FaultKind, Gpus, Kernel, Module};
//!
//! const PTX: &str = "
//! .version 8.3
//! .target sm_90
//! .address_size 64
//!
//! .visible .entry add_index(.param .u64 out, .param .u32 start)
//! {
//!     .reg .b32 %r<6>;
//!     .reg .b64 %d<3>;
//!     ld.param.u64 %d0, [out];
//!     ld.param.u32 %r0, [start];
//!     mov.u32 %r1, %ctaid.x;
//!     mov.u32 %r2, %ntid.x;
//!     mov.u32 %r3, %tid.x;
//!     mad.lo.u32 %r4, %r1, %r2, %r3;
//!     add.u32 %r5, %r0, %r4;
//!     mul.wide.u32 %d1, %r4, 4;
//!     add.u64 %d2, %d0, %d1;
//!     st.global.u32 [%d2], %r5;
//!     ret;
//! }
//! ";
//!
//! let module = Arc::new(Module::parse(PTX)?);
//! let gpus = Gpus::default();
//! let out = gpus.allocate(0, 64 * 4);
//! let add_index = Kernel::new(&module, "add_index")
//!     .device(0)
//!     .blocks(2)
//!     .threads(32)
//!     .arg(&out)
//!     .arg(7_u32);
//! gpus.run(&[add_index.clone()])?;
//! assert_eq!(out.read_u32(), (7..71).collect::<Vec<u32>>());
//!
//! let Err(Error::Fault(fault)) = gpus.run(&[add_index.blocks(3)]) else {
//!     panic!("the third block has no memory");
//! };
//! assert_eq!(fault.kind, FaultKind::IllegalAddress);
//! assert_eq!((fault.site.block, fault.site.thread), (2, 0));
//! assert_eq!(fault.site.instruction, "st.global.u32 [%d2], %r5;");
//! # Ok::<(), Error>(())
//! ```
//!
//! The text of this error, where the address differs between runs:
//!
//! ```text
//! kernel add_index, device 0, block 2, thread 0, PTX line 19 `st.global.u32 [%d2], %r5;`:
//! writes 4 bytes at 0x5568d5c90500: no memory of this address is accessible to device 0
//! ```
//!
//! # Kernels that communicate
//!
//! [`Gpus::run`] executes launches concurrently. Their threads may wait for each other through
//! global memory. This kernel writes a number to another device and waits for a number from that
//! device:
//!
//! ```
//! use std::sync::Arc;
//!
//! use fusewire_emulator::{Config, Gpus, Kernel, Module, Scheduler};
//!
//! const PTX: &str = "
//! .version 8.3
//! .target sm_90
//! .address_size 64
//!
//! .visible .entry exchange(.param .u64 own, .param .u64 peer, .param .u32 value)
//! {
//!     .reg .pred %p<1>;
//!     .reg .b32 %r<2>;
//!     .reg .b64 %d<2>;
//!     ld.param.u64 %d0, [own];
//!     ld.param.u64 %d1, [peer];
//!     ld.param.u32 %r0, [value];
//!     st.release.sys.global.u32 [%d1], %r0;
//! wait:
//!     ld.acquire.sys.global.u32 %r1, [%d0];
//!     setp.eq.u32 %p0, %r1, 0;
//!     @%p0 bra wait;
//!     ret;
//! }
//! ";
//!
//! let module = Arc::new(Module::parse(PTX)?);
//! for seed in 0..10 {
//!     let gpus = Gpus::new(Config {
//!         scheduler: Scheduler::Random(seed),
//!         ..Config::default()
//!     });
//!     let (a, b) = (gpus.allocate(0, 4), gpus.allocate(1, 4));
//!     let exchange = Kernel::new(&module, "exchange");
//!     gpus.run(&[
//!         exchange.clone().device(0).arg(&a).arg(&b).arg(1_u32),
//!         exchange.clone().device(1).arg(&b).arg(&a).arg(2_u32),
//!     ])?;
//!     assert_eq!((a.read_u32(), b.read_u32()), (vec![2], vec![1]));
//! }
//! # Ok::<(), fusewire_emulator::Error>(())
//! ```
//!
//! If a value never arrives, [`run`](Gpus::run) returns [`Error::Hang`], which lists the events
//! that the threads wait for:
//!
//! ```text
//! a launch makes no progress
//!   kernel exchange, device 0, block 0, thread 0, PTX line 16
//!   `ld.acquire.sys.global.u32 %r1, [%d0];`: waits for a change of the 4 bytes at 0x5568d5c96f00
//!   in memory of device 0, whose value is 0x0
//! ```
//!
//! # Execution
//!
//! - **Modules**: [`Module::parse`] reads the declarations. The first launch of a kernel decodes
//!   its body. An instruction that the emulator does not support is an error with its name and
//!   line. [`Module::decode_all`] finds such instructions at once.
//! - **Memory**: Global memory is memory of the process, which the emulator accesses with atomic
//!   operations. The host and other processes may access it while kernels are running.
//! - **Memory model**: By default, races, reads of uninitialized shared memory, and writes of
//!   memory that `ld.global.nc` reads are errors. With [`MemoryModel::Weak`], loads may return
//!   older values, as PTX's memory consistency model permits.
//!
//! # Limits
//!
//! - Each thread executes its instructions in program order. Races of kernels with the host and
//!   with other processes are not reported.
//! - Textures, tensor instructions, `cp.async`, `mbarrier`, clusters, 128-bit atomics and functions
//!   of the CUDA driver such as `vprintf` are not supported.
//! - `griddepcontrol` has no effect. `%clock` counts the instructions of all launches.

mod alu;
mod arena;
mod atomic;
mod block;
mod decode;
mod error;
mod float;
mod launch;
mod liveness;
mod machine;
mod memory;
mod module;
mod program;
mod ptx;
mod random;
mod report;
mod row;
mod shadow;
mod stream;
mod trips;
mod warp;

pub use arena::{Arg, Buffer, Gpus, Kernel, Multicast};
pub use error::{Error, Fault, FaultKind, Hang, Result, Site};
pub use launch::{Counts, Launch};
pub use machine::{Config, IdleTime, Machine, Scheduler};
pub use memory::{Memory, Range, Replica};
pub use module::{Entry, KernelParam, LoadedModule, Module};
pub use shadow::{LaunchOrder, Mark, MemoryModel};
pub use stream::{Comparison, StreamOperation};
pub use trips::{Bytes, Route, Step, Steps, Trips};
