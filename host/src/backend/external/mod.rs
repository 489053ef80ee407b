//! Backends of other people: shared libraries that are opened at run time.
//!
//! A library exports the table of [`fusewire_backend_abi`], where the rules stand. Its name comes
//! from the environment (`FUSEWIRE_BACKEND_PATH_<NAME>` or `TORCHCOMMS_BACKEND_LIB_PATH_<NAME>`, in
//! upper case; what is neither letter nor digit becomes `_`), or from
//! [`register_external_backend`]. A library is opened once in a process, with `RTLD_NOW` and
//! `RTLD_LOCAL`, and never closed: it may have threads, and handles outlive whoever opened it.

mod adapter;
mod handle;
mod library;
mod store;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use self::handle::External;
use super::{Backend, Setup, register_backend};
use crate::Result;

/// Adds the shared library at `path` as a backend that [`crate::new_comm`] makes under `name`, in
/// this process. The library is opened when the first communicator is made.
///
/// # Errors
/// As [`register_backend`].
pub fn register_external_backend(name: &str, path: impl Into<PathBuf>) -> Result<()> {
    let (owned, path) = (name.to_owned(), path.into());
    register_backend(name, Arc::new(move |setup| create(&owned, &path, setup)))
}

/// The path that the environment gives for backend `name`, and the variable that does.
pub(super) fn path_of_environment(name: &str) -> Option<PathBuf> {
    variables(name)
        .into_iter()
        .find_map(|variable| std::env::var_os(variable).filter(|path| !path.is_empty()))
        .map(PathBuf::from)
}

/// The variables that can name the library of backend `name`.
pub(super) fn variables(name: &str) -> [String; 2] {
    let name = name
        .to_ascii_uppercase()
        .replace(|letter: char| !letter.is_ascii_alphanumeric(), "_");
    [
        format!("FUSEWIRE_BACKEND_PATH_{name}"),
        format!("TORCHCOMMS_BACKEND_LIB_PATH_{name}"),
    ]
}

/// Makes the part of a communicator that the library at `path` plays as backend `name`.
pub(super) fn create(name: &str, path: &Path, setup: &Setup) -> Result<Arc<dyn Backend>> {
    let library = library::open(name, path)?;
    Ok(Arc::new(External::create(name, library, setup)?))
}
