//! Opening a library and judging its table, before anything in it is called.

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

/// A library whose table was judged; it stays open until the process ends.
#[derive(Debug)]
pub(super) struct Library {
    pub(super) path: PathBuf,
    /// A copy as this build knows the table; what an older library does not have is null.
    pub(super) table: Table,
}

/// The library at `path`, opened the first time.
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
    // Never freed, as the library is never closed.
    let library: &'static Library = Box::leak(Box::new(Library {
        path: path.to_owned(),
        table,
    }));
    open.insert(path.to_owned(), library);
    Ok(library)
}

fn load(path: &Path) -> Result<Table, String> {
    // SAFETY: whoever names the library answers for what it does when it is opened.
    let opened = unsafe { Opened::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| format!("cannot be opened: {error}"))?;
    // Never closed, also where it is refused: its initialisers may have left something behind.
    let opened = core::mem::ManuallyDrop::new(opened);
    // SAFETY: a library with a symbol of this name gives it this type: its version is part of the
    // name.
    let entry = unsafe { opened.get::<EntryFn>(ENTRY_SYMBOL.as_bytes()) }.map_err(|error| {
        format!(
            "has no symbol {ENTRY_SYMBOL}, so it is no backend for this Fusewire (which takes \
             version {ABI_MAJOR} of the table): {error}"
        )
    })?;
    // SAFETY: the entry takes nothing.
    let table = unsafe { entry() };
    // SAFETY: the table lives as long as the process, and has the bytes that it says (the rules).
    unsafe { judge(table) }
}

/// Refuses a table that is none, or of another version, or that lacks something; else copies it.
///
/// # Safety
/// `table` is null, or readable for its first 24 bytes, and where these are those of a table of
/// this major version, for as many as it says.
unsafe fn judge(table: *const Table) -> Result<Table, String> {
    if table.is_null() {
        return Err(format!("{ENTRY_SYMBOL} gives no table (null)"));
    }
    if !table.is_aligned() {
        return Err(format!("the table at {table:p} is not aligned"));
    }
    // SAFETY: within the first 24 bytes.
    let magic = unsafe { (&raw const (*table).magic).read() };
    if magic != MAGIC {
        return Err(format!(
            "the table's magic is {magic:#018x}, expected {MAGIC:#018x}: this is no table of a \
             Fusewire backend"
        ));
    }
    // SAFETY: as above.
    let major = unsafe { (&raw const (*table).abi_major).read() };
    // SAFETY: as above.
    let minor = unsafe { (&raw const (*table).abi_minor).read() };
    if major != ABI_MAJOR {
        return Err(format!(
            "the table has version {major}.{minor}, expected {ABI_MAJOR}.x (this Fusewire has \
             {ABI_MAJOR}.{ABI_MINOR}): build the backend against its fusewire_backend.h"
        ));
    }
    // SAFETY: as above.
    let bytes = unsafe { (&raw const (*table).struct_bytes).read() };
    if bytes < TABLE_BYTES_1_0 {
        return Err(format!(
            "the table of version {major}.{minor} has {bytes} bytes, expected at least \
             {TABLE_BYTES_1_0}"
        ));
    }
    let mut copy = core::mem::MaybeUninit::<Table>::zeroed();
    let known = (bytes as usize).min(size_of::<Table>());
    // SAFETY: readable for `bytes` (the caller's promise), writable for the size of the copy.
    unsafe { core::ptr::copy_nonoverlapping(table.cast::<u8>(), copy.as_mut_ptr().cast(), known) };
    // SAFETY: integers, pointers and functions that may be null: all zeros are a value of each.
    let copy = unsafe { copy.assume_init() };
    let missing = missing(&copy);
    if !missing.is_empty() {
        return Err(format!("the table lacks {}", missing.join(", ")));
    }
    Ok(copy)
}

/// The functions that every backend has and this one does not.
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

/// The text at `at`; nothing where it is null.
///
/// # Safety
/// `at` is null or ends with a zero byte.
pub(super) unsafe fn text(at: *const c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
}

// What is read before the size is known.
const _: () = assert!(offset_of!(Table, struct_bytes) + size_of::<u32>() <= 24);
