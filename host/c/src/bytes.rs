//! Collectives of byte strings, whose size differs between the ranks: the object collectives with
//! `serde_bytes::ByteBuf` as the type of the objects.

use core::ffi::{c_int, c_void};

use fusewire::Communicator;
use serde_bytes::{ByteBuf, Bytes};

use crate::comm::FusewireComm;
use crate::error::{Outcome, argument, give, guard};
use crate::handle::{destroy, live};

/// Byte strings of an operation's result: the type `fusewire_bytes`.
#[derive(Debug)]
pub struct FusewireBytes(Vec<ByteBuf>);

/// Returns the string of `size` bytes at `at`.
///
/// # Safety
/// `at` is null, or readable for `size` bytes as long as the result is used.
unsafe fn string<'a>(
    operation: &str,
    what: &str,
    at: *const c_void,
    size: u64,
) -> Outcome<&'a Bytes> {
    let fits = usize::try_from(size)
        .ok()
        .filter(|size| isize::try_from(*size).is_ok());
    let Some(count) = fits else {
        let detail = format!("{what} of {size} bytes is larger than memory");
        return Err(argument(operation, detail));
    };
    if count == 0 {
        return Ok(Bytes::new(&[]));
    }
    if at.is_null() {
        return Err(argument(operation, format!("{what} is NULL")));
    }
    // SAFETY: `at` is not null (checked above), and `count` is at most `isize::MAX`. The caller
    // guarantees `count` readable bytes.
    Ok(Bytes::new(unsafe {
        core::slice::from_raw_parts(at.cast(), count)
    }))
}

/// Runs an operation and stores the strings that it returns in `bytes`. Stores null if it returns
/// none.
///
/// # Safety
/// `comm` is null or a live handle; `bytes` is null or writable.
unsafe fn receive(
    name: &'static str,
    comm: *const FusewireComm,
    bytes: *mut *mut FusewireBytes,
    run: impl FnOnce(&Communicator) -> Outcome<Option<Vec<ByteBuf>>>,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(name, "bytes", bytes, core::ptr::null_mut())? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(name, comm)? };
        let Some(strings) = run(&handle.comm)? else {
            return Ok(());
        };
        let made = Box::into_raw(Box::new(FusewireBytes(strings)));
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(name, "bytes", bytes, made) }
    })
}

/// Returns every rank's string on every rank.
///
/// # Safety
/// `comm` is null or a live handle; `data` is null or readable for `size` bytes; `bytes` is null or
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_gather_bytes(
    comm: *const FusewireComm,
    data: *const c_void,
    size: u64,
    bytes: *mut *mut FusewireBytes,
) -> c_int {
    const NAME: &str = "fusewire_all_gather_bytes";
    let run = |comm: &Communicator| {
        // SAFETY: the caller passes null or `size` readable bytes.
        let own = unsafe { string(NAME, "data", data, size)? };
        Ok(Some(comm.all_gather_object(&ByteBuf::from(own.to_vec()))?))
    };
    // SAFETY: the preconditions of `receive` are also preconditions of this function.
    unsafe { receive(NAME, comm, bytes, run) }
}

/// Returns every rank's string on the root. Stores null on other ranks.
///
/// # Safety
/// The preconditions of [`fusewire_all_gather_bytes`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_gather_bytes(
    comm: *const FusewireComm,
    data: *const c_void,
    size: u64,
    root: u32,
    bytes: *mut *mut FusewireBytes,
) -> c_int {
    const NAME: &str = "fusewire_gather_bytes";
    let run = |comm: &Communicator| {
        // SAFETY: the caller passes null or `size` readable bytes.
        let own = unsafe { string(NAME, "data", data, size)? };
        Ok(comm.gather_object(&ByteBuf::from(own.to_vec()), root)?)
    };
    // SAFETY: the preconditions of `receive` are also preconditions of this function.
    unsafe { receive(NAME, comm, bytes, run) }
}

/// Returns the root's string on every rank.
///
/// # Safety
/// The preconditions of [`fusewire_all_gather_bytes`]. `data` is not read on other ranks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_broadcast_bytes(
    comm: *const FusewireComm,
    data: *const c_void,
    size: u64,
    root: u32,
    bytes: *mut *mut FusewireBytes,
) -> c_int {
    const NAME: &str = "fusewire_broadcast_bytes";
    let run = |comm: &Communicator| {
        let mut strings = Vec::new();
        if comm.rank() == root {
            // SAFETY: the caller passes null or `size` readable bytes.
            let own = unsafe { string(NAME, "data", data, size)? };
            strings.push(ByteBuf::from(own.to_vec()));
        }
        comm.broadcast_object_list(&mut strings, root)?;
        Ok(Some(strings))
    };
    // SAFETY: the preconditions of `receive` are also preconditions of this function.
    unsafe { receive(NAME, comm, bytes, run) }
}

/// Returns string r of the root on rank r.
///
/// # Safety
/// `comm` is null or a live handle; `bytes` is null or writable. On the root, `data` and `sizes`
/// are null or have one element per rank, and each address is null or readable for its size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_scatter_bytes(
    comm: *const FusewireComm,
    data: *const *const c_void,
    sizes: *const u64,
    root: u32,
    bytes: *mut *mut FusewireBytes,
) -> c_int {
    const NAME: &str = "fusewire_scatter_bytes";
    let run = |comm: &Communicator| {
        let mut strings = Vec::new();
        if comm.rank() == root {
            for (what, is_null) in [("data", data.is_null()), ("sizes", sizes.is_null())] {
                if is_null {
                    return Err(argument(NAME, format!("{what} is NULL")));
                }
            }
            for rank in 0..comm.size() as usize {
                // SAFETY: both arrays are not null (checked above); the caller guarantees one
                // element per rank.
                let (at, size) = unsafe { (data.add(rank).read(), sizes.add(rank).read()) };
                // SAFETY: the caller passes null or `size` readable bytes.
                let own = unsafe { string(NAME, &format!("data[{rank}]"), at, size)? };
                strings.push(ByteBuf::from(own.to_vec()));
            }
        }
        Ok(Some(vec![comm.scatter_object_list(&strings, root)?]))
    };
    // SAFETY: the preconditions of `receive` are also preconditions of this function.
    unsafe { receive(NAME, comm, bytes, run) }
}

/// Sends a string to `peer`.
///
/// # Safety
/// `comm` is null or a live handle; `data` is null or readable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_send_bytes(
    comm: *const FusewireComm,
    data: *const c_void,
    size: u64,
    peer: u32,
) -> c_int {
    const NAME: &str = "fusewire_send_bytes";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        // SAFETY: the caller passes null or `size` readable bytes.
        let own = unsafe { string(NAME, "data", data, size)? };
        Ok(handle.comm.send_object_list(&[own], peer)?)
    })
}

/// Receives the string that `peer` sends.
///
/// # Safety
/// `comm` is null or a live handle; `bytes` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_recv_bytes(
    comm: *const FusewireComm,
    peer: u32,
    bytes: *mut *mut FusewireBytes,
) -> c_int {
    let run = |comm: &Communicator| Ok(Some(comm.recv_object_list(peer)?));
    // SAFETY: the preconditions of `receive` are also preconditions of this function.
    unsafe { receive("fusewire_recv_bytes", comm, bytes, run) }
}

/// Returns the strings of a handle.
///
/// # Safety
/// `bytes` is null or a handle that lives as long as the result is used.
unsafe fn strings_of<'a>(operation: &str, bytes: *const FusewireBytes) -> Outcome<&'a [ByteBuf]> {
    // SAFETY: the caller passes null or a live handle.
    Ok(&unsafe { live(operation, "the bytes are", bytes)? }.0)
}

/// Stores the number of strings in `count`.
///
/// # Safety
/// `bytes` is null or a live handle; `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_bytes_count(
    bytes: *const FusewireBytes,
    count: *mut u64,
) -> c_int {
    const NAME: &str = "fusewire_bytes_count";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let strings = unsafe { strings_of(NAME, bytes)? };
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "count", count, strings.len() as u64) }
    })
}

/// Stores the address and the size of string `index`.
///
/// # Safety
/// `bytes` is null or a live handle; `data` and `size` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_bytes_part(
    bytes: *const FusewireBytes,
    index: u64,
    data: *mut *const c_void,
    size: *mut u64,
) -> c_int {
    const NAME: &str = "fusewire_bytes_part";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let strings = unsafe { strings_of(NAME, bytes)? };
        let part = usize::try_from(index)
            .ok()
            .and_then(|at| strings.get(at))
            .ok_or_else(|| argument(NAME, format!("part {index} of {}", strings.len())))?;
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "data", data, part.as_ptr().cast())? };
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "size", size, part.len() as u64) }
    })
}

/// Destroys the strings.
///
/// # Safety
/// `bytes` is null or a live handle that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_bytes_destroy(bytes: *mut FusewireBytes) -> c_int {
    // SAFETY: the caller passes null or a handle that nothing uses any more.
    unsafe { destroy(bytes) }
}
