//! Registry of backends by name.

use core::fmt;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::setup::{Factory, Setup};
use super::{Backend, ccl, external};
use crate::{Error, Result};

#[derive(Default)]
struct Table(BTreeMap<String, Factory>);

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

fn table() -> MutexGuard<'static, Table> {
    static TABLE: OnceLock<Mutex<Table>> = OnceLock::new();
    TABLE
        .get_or_init(|| Mutex::new(built_in()))
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// Returns the backends that are compiled into this build.
fn built_in() -> Table {
    let mut table = Table::default();
    // The factory opens the library when a communicator is created.
    for (name, kind) in ccl::NAMES {
        let factory: Factory = Arc::new(move |setup| ccl::create(name, kind, setup));
        table.0.insert(name.to_owned(), factory);
    }
    #[cfg(feature = "gloo")]
    table
        .0
        .insert("gloo".to_owned(), Arc::new(super::gloo::create));
    table
}

/// Names of all known backends, including those that are not compiled into this build.
const KNOWN: [&str; 6] = ["fusewire", "nccl", "ncclx", "rccl", "rcclx", "gloo"];

/// Registers a backend under `name` in this process. [`crate::new_comm`] calls `factory` to create
/// a communicator of this backend.
///
/// # Errors
/// [`Error::InvalidArgument`] if the name is empty or already registered.
pub fn register_backend(name: &str, factory: Factory) -> Result<()> {
    let refuse = |detail: String| Error::InvalidArgument {
        operation: "register_backend",
        detail,
    };
    if name.is_empty() || name == "fusewire" {
        return Err(refuse(format!("\"{name}\" cannot be a backend's name")));
    }
    let mut table = table();
    if table.0.contains_key(name) {
        return Err(refuse(format!("a backend \"{name}\" exists already")));
    }
    table.0.insert(name.to_owned(), factory);
    Ok(())
}

/// Registers the shared library at `path` as backend `name` in this process. [`crate::new_comm`]
/// opens the library when it creates the first communicator of this backend.
///
/// # Safety
/// Opening the library runs its code. If it exports the table of `fusewire-backend-abi`, it must
/// follow the rules of that crate.
///
/// # Errors
/// The errors of [`register_backend`].
pub unsafe fn register_external_backend(name: &str, path: impl Into<PathBuf>) -> Result<()> {
    let (owned, path) = (name.to_owned(), path.into());
    register_backend(
        name,
        Arc::new(move |setup| external::create(&owned, &path, setup)),
    )
}

/// Returns the names of the backends that [`crate::new_comm`] can create here: `fusewire`, the
/// backends of this build, and the registered backends. The library of a listed backend may not be
/// installed. Backends whose library is named only by an environment variable
/// ([`register_external_backend`]) are not listed.
pub fn backend_names() -> Vec<String> {
    let mut names = vec!["fusewire".to_owned()];
    names.extend(table().0.keys().cloned());
    names
}

/// Returns true if [`crate::new_comm`] knows a backend of that name. The library of the backend may
/// not be installed.
pub fn is_backend(name: &str) -> bool {
    check_name(name).is_ok()
}

/// Returns an error if `name` is not the name of a known backend.
pub(crate) fn check_name(name: &str) -> Result<()> {
    if name == "fusewire" || table().0.contains_key(name) {
        return Ok(());
    }
    if external::path_of_environment(name).is_some() {
        return Ok(());
    }
    let [own, torchcomms] = external::variables(name);
    let library = format!("{own} or {torchcomms} can give the path of a library");
    let detail = if KNOWN.contains(&name) {
        format!(
            "backend \"{name}\" is not in this build; it has {} (build with --features {name}; \
                {library})",
            backend_names().join(", ")
        )
    } else {
        format!(
            "no backend is named \"{name}\"; this build has {}; {library}",
            backend_names().join(", ")
        )
    };
    Err(Error::InvalidArgument {
        operation: "new_comm",
        detail,
    })
}

/// Creates this rank's part of a communicator of backend `name`.
pub(crate) fn create(name: &str, setup: &Setup) -> Result<Arc<dyn Backend>> {
    check_name(name)?;
    let factory = table().0.get(name).map(Arc::clone);
    match (factory, external::path_of_environment(name)) {
        (Some(factory), _) => factory(setup),
        (None, Some(path)) => external::create(name, &path, setup),
        (None, None) => Err(Error::InvalidArgument {
            operation: "new_comm",
            detail: format!("backend \"{name}\" has no factory"),
        }),
    }
}
