//! Work in progress.

pub mod bootstrap;
pub mod cpu;
pub mod store;

mod error;

pub use error::{Error, Result};
