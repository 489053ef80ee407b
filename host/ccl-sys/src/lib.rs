//! NCCL, NCCLX, RCCL and RCCLX through one table of symbols, opened at run time.
//!
//! Three layers: [`sys`] holds the raw types and the table, [`result`] turns codes into errors, and
//! [`Library`] and [`Comm`] are the safe types. Nothing is linked: a program built with this crate
//! starts on a machine without any of the four libraries.
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
mod features;
mod library;
mod locate;
mod optional;
mod version;

pub use comm::{Comm, RedOp, Stream};
pub use features::Features;
pub use library::{Group, Library};
pub use locate::Kind;
pub use optional::Memory;
pub use result::{Error, Failure, Result};
pub use version::Version;
