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
//! - [`toolchain`] finds compilers and tools.
//! - [`project`] reads the kernel crate's manifest: dependencies and settings.
//! - [`mod@compile`] compiles a kernel crate to images.
//! - [`host`] compiles a kernel crate for the host and reads its list of kernels.
//! - [`verify`] has the rules for images. Each rule is a function from an [`Image`] to violations.
//! - [`native`] has the rules for native code.
//! - [`controls`] has kernels that break one rule each.
//! - [`code_objects`] disassembles and checks the AMD images that the host library includes.
//! - [`portable`] writes the images that the host library includes, and compares them with new
//!   builds.
//! - [`install`] writes images to the folder where the host library finds them.
//! - [`sources`] hashes the inputs of images.
//! - [`divergence`] analyzes the control flow of compiler output, and [`text`] parses compiler
//!   output.

pub mod code_objects;
pub mod compile;
pub mod controls;
pub mod divergence;
mod edit;
mod error;
mod files;
pub mod findings;
pub mod host;
pub mod image;
pub mod install;
pub mod lines;
pub mod native;
mod options;
pub mod portable;
mod process;
pub mod project;
mod recipe;
pub mod sources;
mod target;
pub mod text;
mod tokens;
pub mod toolchain;
mod unroll;
pub mod verify;
mod violation;
mod waits;

pub use self::compile::{Compilation, compile};
pub use self::error::{Error, Result};
pub use self::image::Image;
pub use self::install::install_images;
pub use self::options::Options;
pub use self::project::Project;
pub use self::target::{Target, Vendor};
pub use self::toolchain::Toolchain;
