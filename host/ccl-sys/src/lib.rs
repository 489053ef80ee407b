//! NCCL, NCCLX, RCCL and RCCLX, opened at run time through one table of symbols.
//!
//! The crate has three layers: [`sys`] holds the raw types and the table, [`result`] converts codes
//! to errors, and [`Library`] and [`Comm`] are the safe types. The crate links none of the four
//! libraries, so a program that uses the crate starts on machines without them.
//!
//! ```no_run
//! use fusewire_ccl_sys::{Kind, Library};
//!
//! let library = Library::open(Kind::Nccl, None)?;
//! println!("{} {}: {}", library.kind(), library.version(), library.features());
//! let id = library.unique_id()?;
//! let comm = library.init_rank(1, id, 0)?;
//! assert_eq!(comm.count(), 1);
//! # Ok::<(), fusewire_ccl_sys::Error>(())
//! ```

pub mod result;
pub mod sys;

mod comm;
mod config;
mod features;
mod library;
mod locate;
mod optional;
mod version;

pub use comm::{Comm, RedOp, Stream};
pub use config::Config;
pub use features::Features;
pub use library::{Group, Library};
pub use locate::Kind;
pub use optional::Memory;
pub use result::{Error, Failure, Result};
pub use version::Version;
