//! Exported C functions. They check arguments, call `core`, and convert the results to result
//! codes.
//!
//! Callers must meet the requirements of `cuda.h` on pointer arguments. The `SAFETY` comments rely
//! on these requirements.

// Only the exported functions call this module.
#[cfg_attr(not(feature = "exports"), allow(dead_code))]
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

use core::ffi::c_void;
use core::panic::AssertUnwindSafe;
use core::ptr::NonNull;
use std::panic::catch_unwind;
use std::sync::Arc;

use crate::core::context::{Context, current, in_callback};
use crate::core::handles::Table;
use crate::core::record;
use crate::status::{Result, SUCCESS, Status};

/// Defines C functions, and the function `address`, which returns their addresses by name. Each C
/// function counts its calls, returns injected failures, and fails if a host callback calls it.
macro_rules! export {
    ($(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "` of `cuda.h`.")]
            ///
            /// # Safety
            /// The requirements of `cuda.h`.
            #[cfg_attr(feature = "exports", unsafe(no_mangle))]
            #[allow(unreachable_pub, clippy::too_many_arguments)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> u32 {
                $crate::api::answer(stringify!($name), move || $body)
            }
        )*

        /// Returns the address of the function `name`, if this module defines it.
        pub(super) fn address(name: &str) -> Option<*const ()> {
            match name {
                $(stringify!($name) => Some($name as *const ()),)*
                _ => None,
            }
        }
    };
}
pub(crate) use export;

/// Returns the address of a function of the driver library or of NVML.
pub(crate) fn find(name: &str) -> Option<NonNull<c_void>> {
    let text = match name {
        "cuGetErrorName" => Some(device::cuGetErrorName as *const ()),
        "cuGetErrorString" => Some(device::cuGetErrorString as *const ()),
        _ => None,
    };
    let address = text
        .or_else(|| device::address(name))
        .or_else(|| graph::address(name))
        .or_else(|| memory::address(name))
        .or_else(|| module::address(name))
        .or_else(|| multicast::address(name))
        .or_else(|| nvml::address(name))
        .or_else(|| stream::address(name))
        .or_else(|| vmm::address(name))?;
    NonNull::new(address.cast_mut().cast())
}

/// Runs the body of an exported function and returns its result code.
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

/// Writes a result through a pointer argument.
fn put<T>(out: *mut T, value: T) -> Result<()> {
    if out.is_null() {
        return Err(Status::InvalidValue);
    }
    // SAFETY: the pointer is not null (checked above), and `cuda.h` requires it to be writable.
    unsafe { out.write_unaligned(value) };
    Ok(())
}

/// Writes a result through an optional pointer argument.
fn put_if<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: the pointer is not null (checked above), and `cuda.h` requires it to be writable.
        unsafe { out.write_unaligned(value) };
    }
}

/// Reads through a pointer argument.
fn get<T: Copy>(out: *const T) -> Result<T> {
    if out.is_null() {
        return Err(Status::InvalidValue);
    }
    // SAFETY: the pointer is not null (checked above), and `cuda.h` requires it to be readable.
    Ok(unsafe { out.read_unaligned() })
}

/// Returns the current context and the object that `handle` identifies.
fn with<T>(table: &Table<T>, handle: usize) -> Result<(Arc<Context>, Arc<T>)> {
    let context = current()?;
    let object = table.get(handle).ok_or(Status::InvalidHandle)?;
    Ok((context, object))
}
