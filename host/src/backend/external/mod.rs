//! External backends: shared libraries that are opened at run time.
//!
//! A library exports a table of functions. The crate [`fusewire_backend_abi`] defines the table and
//! documents its rules. The library's path is given by [`super::register_external_backend`] or by
//! an environment variable: `FUSEWIRE_BACKEND_PATH_<NAME>` or
//! `TORCHCOMMS_BACKEND_LIB_PATH_<NAME>`, where `<NAME>` is the backend's name in upper case, with
//! `_` for every character that is not a letter or digit. A library is opened once per process,
//! with `RTLD_NOW` and `RTLD_LOCAL`. It is never closed, because the library's threads may still
//! run, and handles of the library may outlive the code that opened it.

mod adapter;
mod handle;
mod library;
mod store;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use self::handle::External;
use super::Backend;
use super::setup::Setup;
use crate::Result;

/// Returns the path that the environment gives for backend `name`.
pub(super) fn path_of_environment(name: &str) -> Option<PathBuf> {
    variables(name)
        .into_iter()
        .find_map(|variable| std::env::var_os(variable).filter(|path| !path.is_empty()))
        .map(PathBuf::from)
}

/// Returns the environment variables that can give the path of the library of backend `name`.
pub(super) fn variables(name: &str) -> [String; 2] {
    let name = name
        .to_ascii_uppercase()
        .replace(|letter: char| !letter.is_ascii_alphanumeric(), "_");
    [
        format!("FUSEWIRE_BACKEND_PATH_{name}"),
        format!("TORCHCOMMS_BACKEND_LIB_PATH_{name}"),
    ]
}

/// Creates this rank's part of a communicator of backend `name`, which the library at `path`
/// implements.
pub(super) fn create(name: &str, path: &Path, setup: &Setup) -> Result<Arc<dyn Backend>> {
    let library = library::open(name, path)?;
    Ok(Arc::new(External::create(name, library, setup)?))
}
