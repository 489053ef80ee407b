//! Records every call as one JSON object per line.

use core::ffi::c_char;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::comm::Comm;

static RECORDS: Mutex<String> = Mutex::new(String::new());

thread_local! {
    static THREAD: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

/// Records a call. Fields that do not apply to the call are -1.
pub(crate) fn call(name: &str, comm: Option<&Comm>, depth: u32, fields: &[(&str, i64)]) {
    let known = ["count", "dtype", "op", "root", "peer", "in_place"];
    let value = |field: &str| {
        let found = fields.iter().find(|(name, _)| *name == field);
        found.map_or(-1, |(_, value)| *value)
    };
    let mut line = format!("{{\"name\":\"{name}\",\"depth\":{depth}");
    let identity = comm.map_or([-1; 3], |comm| {
        [
            comm.shared.id as i64,
            comm.rank as i64,
            comm.shared.count as i64,
        ]
    });
    let fixed = ["comm", "rank", "ranks"].into_iter().zip(identity);
    let own = known.into_iter().map(|field| (field, value(field)));
    let others = fields
        .iter()
        .copied()
        .filter(|(field, _)| !known.contains(field));
    let thread = THREAD.with(|thread| *thread as i64);
    for (field, value) in fixed.chain(own).chain(others).chain([("thread", thread)]) {
        line += &format!(",\"{field}\":{value}");
    }
    line += "}\n";
    RECORDS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push_str(&line);
}

/// Moves the records into `buffer` if they fit. Returns the length of the records in bytes.
///
/// # Safety
/// `buffer` must be null or have `len` writable bytes.
pub(crate) unsafe fn take(buffer: *mut c_char, len: usize) -> usize {
    let mut records = RECORDS.lock().unwrap_or_else(PoisonError::into_inner);
    let need = records.len();
    if need <= len && !buffer.is_null() {
        // SAFETY: `buffer` is not null (checked above), so the caller guarantees `len` writable
        // bytes, and `need <= len`.
        unsafe { core::ptr::copy_nonoverlapping(records.as_ptr(), buffer.cast(), need) };
        records.clear();
    }
    need
}
