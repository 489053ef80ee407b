//! An opened library.
//!
//! Libraries are opened with `RTLD_LOCAL | RTLD_NOW`. Each library has its own table, so NCCL and
//! RCCL do not interfere although their symbols have the same names. `RTLD_DEEPBIND` is not used,
//! because it would also hide interposed allocators and sanitizers from the library, and it would
//! only make a difference if the program itself links one of the libraries. `dlmopen` is not used,
//! because a second link map loads a second CUDA runtime and driver, which share no context with
//! those of the program.

use core::ffi::c_int;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library as Object, RTLD_LOCAL, RTLD_NOW};

use crate::sys::{NCCL_UNIQUE_ID_BYTES, Table, find, ncclConfig_t, ncclUniqueId};
use crate::{Error, Features, Kind, Result, Version, result};

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) table: Table,
    pub(crate) version: Version,
    path: String,
    features: Features,
    host_memory: bool,
}

/// An opened library. Copies share one table. A library is never unloaded, because its threads,
/// driver callbacks and thread-local destructors may still run its code.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    pub(crate) inner: &'static Inner,
    kind: Kind,
}

/// Opened libraries. The key consists of the loader's handle, which is the same for all names of a
/// file, and a flag that is true if AMD's function names are used.
static OPENED: Mutex<Vec<(usize, bool, &'static Inner)>> = Mutex::new(Vec::new());

impl Library {
    /// Opens a library. The candidates are `path`, or else the path in the environment variable
    /// `FUSEWIRE_<KIND>_PATH`, or else the path in `TORCHCOMMS_BACKEND_LIB_PATH_<KIND>`, or else
    /// the usual sonames.
    ///
    /// # Errors
    /// [`Error::Open`] with each tried path and the loader's message, [`Error::Symbol`] if a
    /// required symbol is absent, [`Error::Call`] if the version cannot be read.
    pub fn open(kind: Kind, path: Option<&Path>) -> Result<Self> {
        let mut tried = Vec::new();
        for candidate in kind.candidates(path) {
            // SAFETY: the caller has named a communication library, whose initialisers have no
            // preconditions.
            match unsafe { Object::open(Some(&candidate), RTLD_LOCAL | RTLD_NOW) } {
                Ok(object) => {
                    let inner = adopt(object, candidate.display().to_string(), kind.is_rccl())?;
                    return Ok(Self { inner, kind });
                }
                Err(error) => tried.push(format!("{}: {error}", candidate.display())),
            }
        }
        Err(Error::Open {
            kind,
            tried,
            install: kind.install(),
        })
    }

    /// Returns the kind of the library that the caller requested.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the name or path under which the library was first opened.
    pub fn path(&self) -> &str {
        &self.inner.path
    }

    /// Returns the version that the library reported when it was opened.
    pub const fn version(&self) -> Version {
        self.inner.version
    }

    /// Returns the optional functions of the library.
    pub const fn features(&self) -> &'static Features {
        &self.inner.features
    }

    /// Returns the library's message for a result code.
    pub fn error_text(&self, code: c_int) -> String {
        result::code_text(&self.inner.table, code)
    }

    /// Returns true if the library works on host memory. Only the fake library of the tests does,
    /// which exports the symbol `fusewireCclFakeHostMemory`.
    pub const fn uses_host_memory(&self) -> bool {
        self.inner.host_memory
    }

    /// Returns the raw functions.
    pub const fn as_raw(&self) -> &'static Table {
        &self.inner.table
    }

    /// Returns a configuration with no member set, in a layout that this library can read.
    pub const fn config(&self) -> ncclConfig_t {
        ncclConfig_t::new(self.inner.version)
    }

    /// Creates an id for the ranks of one communicator.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn unique_id(&self) -> Result<ncclUniqueId> {
        let mut id = ncclUniqueId {
            internal: [0; NCCL_UNIQUE_ID_BYTES],
        };
        // SAFETY: `id` is writable.
        let code = unsafe { (self.inner.table.get_unique_id)(&raw mut id) };
        self.check("ncclGetUniqueId", code)?;
        Ok(id)
    }

    /// Opens a group of calls. [`Group::end`] starts the calls together.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn group(&self) -> Result<Group> {
        // SAFETY: the function has no arguments and no preconditions.
        let code = unsafe { (self.inner.table.group_start)() };
        self.check("ncclGroupStart", code)?;
        Ok(Group {
            library: *self,
            open: true,
            thread: core::marker::PhantomData,
        })
    }

    pub(crate) fn check(&self, operation: &'static str, code: c_int) -> Result<()> {
        result::check(&self.inner.table, operation, code)
    }
}

/// An open group of this thread. Dropping the group ends it and ignores the result.
#[derive(Debug)]
#[must_use]
pub struct Group {
    library: Library,
    open: bool,
    /// Makes the type `!Send`, because a group belongs to the thread that opened it.
    thread: core::marker::PhantomData<*const ()>,
}

impl Group {
    /// Ends the group and starts its calls.
    ///
    /// # Errors
    /// [`Error::Call`] with the first failure of the group's calls.
    pub fn end(mut self) -> Result<()> {
        self.open = false;
        // SAFETY: this thread opened the group.
        let code = unsafe { (self.library.inner.table.group_end)() };
        self.library.check("ncclGroupEnd", code)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.open {
            // SAFETY: this thread opened the group and has not ended it.
            let _ = unsafe { (self.library.inner.table.group_end)() };
        }
    }
}

/// Converts a count, rank or root to a C `int`.
pub(crate) fn int(operation: &'static str, value: usize) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| Error::Argument {
        operation,
        reason: "exceeds the range of a C int",
    })
}

/// Loads the table of a newly opened library. If the library was opened before, returns the
/// existing table.
fn adopt(object: Object, path: String, rccl: bool) -> Result<&'static Inner> {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let handle = object.into_raw();
    let earlier = |(known, own, _): &&(usize, bool, _)| *known == handle as usize && *own == rccl;
    if let Some((_, _, inner)) = opened.iter().find(earlier) {
        return Ok(inner);
    }
    // SAFETY: `handle` is the result of `into_raw`.
    let object = core::mem::ManuallyDrop::new(unsafe { Object::from_raw(handle) });
    let lacks = |symbol| Error::Symbol {
        path: path.clone(),
        symbol,
    };
    const VERSION: &str = "ncclGetVersion";
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: `GetVersion` has the signature in nccl.h.
    let get_version: GetVersion =
        unsafe { find(&object, VERSION) }.ok_or_else(|| lacks(VERSION))?;
    let mut code = 0;
    // SAFETY: `code` is writable.
    let answer = unsafe { get_version(&raw mut code) };
    let version = Version::new(code);
    // SAFETY: the symbols have the signatures of nccl.h, and the object is never unloaded
    // (`ManuallyDrop`).
    let table = unsafe { Table::load(&object, version, rccl) }.map_err(lacks)?;
    result::check(&table, VERSION, answer)?;
    // SAFETY: the fake's function has no arguments and returns an int.
    let host_memory = unsafe {
        find::<unsafe extern "C" fn() -> c_int>(&object, "fusewireCclFakeHostMemory")
            .is_some_and(|says| says() == 1)
    };
    let features = Features::of(&table);
    let inner = Box::leak(Box::new(Inner {
        table,
        version,
        path,
        features,
        host_memory,
    }));
    opened.push((handle as usize, rccl, inner));
    Ok(inner)
}
