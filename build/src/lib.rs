//! Finds a device tool chain, compiles kernel crates for NVIDIA and AMD GPUs, and verifies the
//! images.
//!
//! ```no_run
//! use fusewire_build::{Options, Project, Target, Toolchain, compile, verify, Image};
//!
//! # fn main() -> fusewire_build::Result<()> {
//! let toolchain = Toolchain::find()?; // the error lists missing tools
//! let project = Project::named("fusewire-kernels")?;
//! let compiled = compile(&toolchain, &project, Target::Sm90, &Options::default())?;
//! let image = Image::read(&compiled, None)?;
//! for violation in verify::check(&image) {
//!     println!("{violation}");
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Requirements
//! Building this crate requires only stable Rust. Compiling kernels requires
//! Debian's `rustc-web cargo-web rust-web-src llvm-22 lld-22`, or rustup's nightly with `rust-src`
//! and `llvm-tools`; see [`toolchain`].
//!
//! # Modules
//! - [`toolchain`]: finding compilers and tools;
//! - [`project`]: the kernel crate, its dependencies and its settings;
//! - [`mod@compile`]: compiling a crate to images;
//! - [`host`]: the kernel crate compiled for the host: its list of kernels and its native code;
//! - [`verify`]: the rules, each a function from an [`Image`] to violations;
//! - [`portable`]: the images that the host library includes, and their comparison with new builds;
//! - [`sources`]: hashes of the inputs of images;
//! - [`native`]: the rules for native code;
//! - [`controls`]: kernels that break one rule each;
//! - [`divergence`], [`text`]: analysis and parsing of compiler output.

pub mod compile;
pub mod controls;
pub mod divergence;
mod edit;
mod error;
mod files;
pub mod findings;
pub mod host;
pub mod image;
pub mod lines;
pub mod native;
pub mod portable;
mod process;
pub mod project;
mod recipe;
pub mod sources;
mod target;
pub mod text;
mod tokens;
pub mod toolchain;
pub mod verify;

pub use self::compile::{Compilation, Options, compile};
pub use self::error::{Error, Result};
pub use self::image::Image;
pub use self::project::Project;
pub use self::target::{Target, Vendor};
pub use self::toolchain::Toolchain;
