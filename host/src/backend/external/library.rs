//! Opens the shared libraries of external backends. Each library exports a table of functions,
//! which is checked before any function in it is called.

use core::ffi::{CStr, c_char};
use core::mem::offset_of;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use fusewire_backend_abi::{
    ABI_MAJOR, ABI_MINOR, ENTRY_SYMBOL, EntryFn, FusewireBackendTable as Table, MAGIC,
    TABLE_BYTES_1_0,
};
use libloading::os::unix::{Library as Opened, RTLD_LOCAL, RTLD_NOW};

use crate::Result;
use crate::backend::backend_error;

/// A library whose table was checked. The library stays open until the process ends.
#[derive(Debug)]
pub(super) struct Library {
    pub(super) path: PathBuf,
    /// Copy of the library's table, in the layout of this build. Functions that an older library
    /// lacks are null.
    pub(super) table: Table,
}

/// Returns the library at `path`. The first call for a path opens the library.
pub(super) fn open(name: &str, path: &Path) -> Result<&'static Library> {
    static OPEN: Mutex<BTreeMap<PathBuf, &'static Library>> = Mutex::new(BTreeMap::new());
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(library) = open.get(path) {
        return Ok(*library);
    }
    let table = load(path).map_err(|detail| {
        let detail = format!("{}: {detail}", path.display());
        backend_error(name, "load", detail)
    })?;
    // The value is never freed, because the library is never closed.
    let library: &'static Library = Box::leak(Box::new(Library {
        path: path.to_owned(),
        table,
    }));
    open.insert(path.to_owned(), library);
    Ok(library)
}

fn load(path: &Path) -> Result<Table, String> {
    // SAFETY: opening a library runs its initializers. The user who gives the path of the library
    // is responsible for them.
    let opened = unsafe { Opened::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| format!("cannot be opened: {error}"))?;
    // The library is never closed, even if its table is refused, because its initializers may have
    // started threads or registered callbacks.
    let opened = core::mem::ManuallyDrop::new(opened);
    // SAFETY: the symbol's name includes the table's version, so the symbol has this type.
    let entry = unsafe { opened.get::<EntryFn>(ENTRY_SYMBOL.as_bytes()) }.map_err(|error| {
        format!(
            "has no symbol {ENTRY_SYMBOL}, so it is not a backend for this Fusewire (which takes \
             version {ABI_MAJOR} of the table): {error}"
        )
    })?;
    // SAFETY: the entry function has no arguments and no preconditions.
    let table = unsafe { entry() };
    // SAFETY: by the table's rules, the table lives as long as the process, and has the size that
    // it states.
    unsafe { judge(table) }
}

/// Checks the magic number, version, size and required functions of a table, and copies the table.
///
/// # Safety
/// `table` is null or readable for 24 bytes. If these bytes are the start of a table of this major
/// version, `table` is readable for `struct_bytes` bytes.
unsafe fn judge(table: *const Table) -> Result<Table, String> {
    if table.is_null() {
        return Err(format!("{ENTRY_SYMBOL} returned null instead of a table"));
    }
    if !table.is_aligned() {
        return Err(format!("the table at {table:p} is not aligned"));
    }
    // SAFETY: the field is in the first 24 bytes.
    let magic = unsafe { (&raw const (*table).magic).read() };
    if magic != MAGIC {
        return Err(format!(
            "the table's magic is {magic:#018x}, expected {MAGIC:#018x}: this is not a table of a \
             Fusewire backend"
        ));
    }
    // SAFETY: the field is in the first 24 bytes.
    let major = unsafe { (&raw const (*table).abi_major).read() };
    // SAFETY: the field is in the first 24 bytes.
    let minor = unsafe { (&raw const (*table).abi_minor).read() };
    if major != ABI_MAJOR {
        return Err(format!(
            "the table has version {major}.{minor}, expected {ABI_MAJOR}.x (this Fusewire has \
             {ABI_MAJOR}.{ABI_MINOR}): build the backend against its fusewire_backend.h"
        ));
    }
    // SAFETY: the field is in the first 24 bytes.
    let bytes = unsafe { (&raw const (*table).struct_bytes).read() };
    if bytes < TABLE_BYTES_1_0 {
        return Err(format!(
            "the table of version {major}.{minor} has {bytes} bytes, expected at least \
             {TABLE_BYTES_1_0}"
        ));
    }
    let mut copy = core::mem::MaybeUninit::<Table>::zeroed();
    let known = (bytes as usize).min(size_of::<Table>());
    // SAFETY: `known` is at most `bytes`, for which the table is readable, and at most the size of
    // the copy, for which the copy is writable.
    unsafe { core::ptr::copy_nonoverlapping(table.cast::<u8>(), copy.as_mut_ptr().cast(), known) };
    // SAFETY: the fields are integers, pointers and optional functions, for which zero is a valid
    // value.
    let copy = unsafe { copy.assume_init() };
    let missing = missing(&copy);
    if !missing.is_empty() {
        return Err(format!("the table lacks {}", missing.join(", ")));
    }
    Ok(copy)
}

/// Returns the required functions that the table lacks.
fn missing(table: &Table) -> Vec<&'static str> {
    macro_rules! missing {
        ($($name:ident)*) => {
            [$((stringify!($name), table.$name.is_none())),*]
        };
    }
    missing!(version create destroy supports is_bitwise group_start group_end all_reduce reduce
        broadcast all_gather reduce_scatter send recv abort)
    .into_iter()
    .filter_map(|(name, missing)| missing.then_some(name))
    .collect()
}

/// Returns the text at `at`, or an empty string if `at` is null.
///
/// # Safety
/// `at` is null or a valid string that ends with a zero byte.
pub(super) unsafe fn text(at: *const c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: `at` is not null (checked above), so the caller guarantees that it is a string that
    // ends with a zero byte.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
}

// The first 24 bytes must include all fields that `judge` reads before it knows the size.
const _: () = assert!(offset_of!(Table, struct_bytes) + size_of::<u32>() <= 24);
