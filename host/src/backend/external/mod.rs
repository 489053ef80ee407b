//! External backends: shared libraries that are opened at run time.
//!
//! A library exports the table of [`fusewire_backend_abi`], which documents the rules. The
//! environment gives its path (`FUSEWIRE_BACKEND_PATH_<NAME>` or
//! `TORCHCOMMS_BACKEND_LIB_PATH_<NAME>`, with the name in upper case and other characters than
//! letters and digits replaced by `_`), or [`register_external_backend`] does. A library is opened
//! once per process, with `RTLD_NOW` and `RTLD_LOCAL`, and never closed, because it may have
//! threads, and handles may outlive the code that opened it.

mod adapter;
mod handle;
mod library;
mod store;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use self::handle::External;
use super::{Backend, Setup, register_backend};
use crate::Result;

/// Registers the shared library at `path` as a backend that [`crate::new_comm`] creates under
/// `name`, in this process. The library is opened when the first communicator is created.
///
/// # Errors
/// The errors of [`register_backend`].
pub fn register_external_backend(name: &str, path: impl Into<PathBuf>) -> Result<()> {
    let (owned, path) = (name.to_owned(), path.into());
    register_backend(name, Arc::new(move |setup| create(&owned, &path, setup)))
}

/// Returns the path that the environment gives for backend `name`, and the name of the variable.
pub(super) fn path_of_environment(name: &str) -> Option<PathBuf> {
    variables(name)
        .into_iter()
        .find_map(|variable| std::env::var_os(variable).filter(|path| !path.is_empty()))
        .map(PathBuf::from)
}

/// Returns the variables that can name the library of backend `name`.
pub(super) fn variables(name: &str) -> [String; 2] {
    let name = name
        .to_ascii_uppercase()
        .replace(|letter: char| !letter.is_ascii_alphanumeric(), "_");
    [
        format!("FUSEWIRE_BACKEND_PATH_{name}"),
        format!("TORCHCOMMS_BACKEND_LIB_PATH_{name}"),
    ]
}

/// Creates this rank's part of a communicator with the library at `path` as backend `name`.
pub(super) fn create(name: &str, path: &Path, setup: &Setup) -> Result<Arc<dyn Backend>> {
    let library = library::open(name, path)?;
    Ok(Arc::new(External::create(name, library, setup)?))
}
