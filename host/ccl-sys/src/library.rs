//! An opened library.
//!
//! Libraries are opened with `RTLD_LOCAL | RTLD_NOW`: each has its own table, and NCCL and RCCL,
//! whose symbols have the same names, do not see each other. `RTLD_DEEPBIND` is not used: it would
//! also hide interposed allocators and sanitisers from the library. It would matter only where the
//! program itself links one of the libraries. `dlmopen` is not used: a second link map gets a
//! second CUDA runtime and driver, which share no context with ours.

use core::ffi::c_int;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library as Object, RTLD_LOCAL, RTLD_NOW};

use crate::sys::{NCCL_UNIQUE_ID_BYTES, Table, find, ncclConfig_t, ncclUniqueId};
use crate::{Comm, Error, Features, Kind, Result, Version, result};

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) table: Table,
    pub(crate) version: Version,
    path: String,
    features: Features,
    host_memory: bool,
}

/// An opened library. Copies share one table. A library is never unloaded: it leaves threads,
/// driver callbacks and thread-local destructors behind that run its code later.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    pub(crate) inner: &'static Inner,
    kind: Kind,
}

/// Opened libraries by the loader's handle, which is the same for one file under any name, and by
/// whether AMD's own names count.
static OPENED: Mutex<Vec<(usize, bool, &'static Inner)>> = Mutex::new(Vec::new());

impl Library {
    /// Opens a library: `path`, else the variable `FUSEWIRE_<KIND>_PATH`, else
    /// `TORCHCOMMS_BACKEND_LIB_PATH_<KIND>`, else the usual sonames.
    ///
    /// # Errors
    /// [`Error::Open`] with each path tried and the loader's text, [`Error::Symbol`] when a required
    /// symbol is absent, [`Error::Call`] when the version cannot be read.
    pub fn open(kind: Kind, path: Option<&Path>) -> Result<Self> {
        let mut tried = Vec::new();
        for candidate in kind.candidates(path) {
            // SAFETY: initialisers of a library run; the caller named a communication library.
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

    /// Which library was asked for.
    pub const fn kind(&self) -> Kind {
        self.kind
    }

    /// The name or path it was first opened by.
    pub fn path(&self) -> &str {
        &self.inner.path
    }

    /// The version it reported when it was opened.
    pub const fn version(&self) -> Version {
        self.inner.version
    }

    /// Its optional functions.
    pub const fn features(&self) -> &'static Features {
        &self.inner.features
    }

    /// The library's text for a result code.
    pub fn error_text(&self, code: c_int) -> String {
        result::code_text(&self.inner.table, code)
    }

    /// Whether it works on host memory: only a fake for tests says so, by
    /// `fusewireCclFakeHostMemory`.
    pub const fn uses_host_memory(&self) -> bool {
        self.inner.host_memory
    }

    /// The raw functions.
    pub const fn as_raw(&self) -> &'static Table {
        &self.inner.table
    }

    /// A configuration with nothing set, in a layout this library reads.
    pub const fn config(&self) -> ncclConfig_t {
        ncclConfig_t::new(self.inner.version)
    }

    /// A new id for the ranks of one communicator.
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

    /// Joins a communicator of `count` ranks as `rank`, on the thread's current device. Blocks
    /// until every rank joins. Not inside a group: the handle would be written only at its end.
    ///
    /// # Errors
    /// [`Error::Call`], among them a machine without a device.
    pub fn init_rank(&self, count: usize, id: ncclUniqueId, rank: usize) -> Result<Comm> {
        let (count, rank) = (
            int("ncclCommInitRank", count)?,
            int("ncclCommInitRank", rank)?,
        );
        let mut raw = core::ptr::null_mut();
        // SAFETY: `raw` is writable and outlives the call, which blocks.
        let code = unsafe { (self.inner.table.comm_init_rank)(&raw mut raw, count, id, rank) };
        self.check("ncclCommInitRank", code)?;
        // SAFETY: `raw` is a new communicator of this library, owned by nobody else.
        unsafe { Comm::from_raw(*self, raw) }
    }

    /// Opens a group of calls; [`Group::end`] starts them together.
    ///
    /// # Errors
    /// [`Error::Call`].
    pub fn group(&self) -> Result<Group> {
        // SAFETY: takes nothing.
        let code = unsafe { (self.inner.table.group_start)() };
        self.check("ncclGroupStart", code)?;
        Ok(Group {
            library: *self,
            open: true,
            thread: core::marker::PhantomData,
        })
    }

    fn check(&self, operation: &'static str, code: c_int) -> Result<()> {
        result::check(&self.inner.table, operation, code)
    }
}

/// An open group of this thread. Dropping it ends the group and ignores the result.
#[derive(Debug)]
#[must_use]
pub struct Group {
    library: Library,
    open: bool,
    /// Groups belong to a thread.
    thread: core::marker::PhantomData<*const ()>,
}

impl Group {
    /// Ends the group: its calls start.
    ///
    /// # Errors
    /// [`Error::Call`] with the first failure of its calls.
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

/// A count, rank or root as a C `int`.
pub(crate) fn int(operation: &'static str, value: usize) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| Error::Argument {
        operation,
        reason: "does not fit a C int",
    })
}

/// Reads the table of a library just opened, or finds that of an earlier opening.
fn adopt(object: Object, path: String, rccl: bool) -> Result<&'static Inner> {
    let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
    let handle = object.into_raw();
    let earlier = |(known, own, _): &&(usize, bool, _)| *known == handle as usize && *own == rccl;
    if let Some((_, _, inner)) = opened.iter().find(earlier) {
        return Ok(inner);
    }
    // SAFETY: `handle` came from `into_raw` just now.
    let object = core::mem::ManuallyDrop::new(unsafe { Object::from_raw(handle) });
    let lacks = |symbol| Error::Symbol {
        path: path.clone(),
        symbol,
    };
    const VERSION: &str = "ncclGetVersion";
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> c_int;
    // SAFETY: the signature of nccl.h.
    let get_version: GetVersion =
        unsafe { find(&object, VERSION) }.ok_or_else(|| lacks(VERSION))?;
    let mut code = 0;
    // SAFETY: `code` is writable.
    let answer = unsafe { get_version(&raw mut code) };
    let version = Version::new(code);
    // SAFETY: the symbols are those of nccl.h, and the object is never unloaded (ManuallyDrop).
    let table = unsafe { Table::load(&object, version, rccl) }.map_err(lacks)?;
    result::check(&table, VERSION, answer)?;
    // SAFETY: the fake's own function, which takes nothing.
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
