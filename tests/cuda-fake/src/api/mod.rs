//! The exported C functions: arguments checked and turned into the core's terms, results into codes.

mod control;
mod device;
mod graph;
mod memory;
mod module;
mod multicast;
mod nvml;
mod stream;
#[cfg(test)]
mod tests;
mod vmm;

use core::panic::AssertUnwindSafe;
use std::panic::catch_unwind;
use std::sync::Arc;

use crate::core::context::{Context, current, in_callback};
use crate::core::handles::Table;
use crate::core::record;
use crate::status::{Result, SUCCESS, Status};

/// Exports functions: each is counted, can be made to fail, and is refused within a callback.
macro_rules! export {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "`: see `cuda.h`.\n\n# Safety\nAs `cuda.h` says.")]
        #[unsafe(no_mangle)]
        #[allow(unreachable_pub, clippy::too_many_arguments)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> u32 {
            $crate::api::answer(stringify!($name), move || $body)
        }
    )*};
}
pub(crate) use export;

/// Runs a function's body; gives its code.
fn answer(name: &'static str, body: impl FnOnce() -> Result<()>) -> u32 {
    if let Err(code) = record::enter(name) {
        return code;
    }
    if in_callback() {
        return Status::NotPermitted as u32;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(status)) => status as u32,
        Err(_) => Status::Unknown as u32,
    }
}

/// Writes through a pointer of the caller.
fn put<T>(out: *mut T, value: T) -> Result<()> {
    if out.is_null() {
        return Err(Status::InvalidValue);
    }
    // SAFETY: not null; the caller of the C function promises that it is writable.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Writes through a pointer of the caller, if there is one.
fn put_if<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: as in `put`.
        unsafe { out.write_unaligned(value) };
    }
}

/// Reads through a pointer of the caller.
fn get<T: Copy>(out: *const T) -> Result<T> {
    if out.is_null() {
        return Err(Status::InvalidValue);
    }
    // SAFETY: not null; the caller of the C function promises that it is readable.
    Ok(unsafe { out.read_unaligned() })
}

/// The current context, and an object by its handle.
fn with<T>(table: &Table<T>, handle: usize) -> Result<(Arc<Context>, Arc<T>)> {
    let context = current()?;
    let object = table.get(handle).ok_or(Status::InvalidHandle)?;
    Ok((context, object))
}
