//! all_gather and reduce_scatter that overlap with a consumer or a producer stream.

use core::ffi::{c_int, c_void};

use fusewire::{ReadyFlags, Stream, Work};

use crate::call::{Call, operate};
use crate::comm::FusewireComm;
use crate::error::{Outcome, argument, give, guard};
use crate::handle::{destroy, live};
use crate::types::{VersionedStruct, dtype, read, reduction};
use crate::work::FusewireWork;

/// `fusewire_overlap`: a collective that overlaps with a consumer or a producer stream.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireOverlap {
    /// Size of this struct in bytes, as the program was compiled with it.
    pub struct_size: usize,
    /// Type of the elements.
    pub dtype: u32,
    /// Reduction; 0 for all_gather.
    pub op: u32,
    /// A tile is complete when its word is at least this value; 0 for all_gather.
    pub target: u32,
    /// Must be 0.
    pub flags: u32,
    /// Number of elements of each rank.
    pub count: u64,
    /// Number of elements of a chunk or tile.
    pub chunk: u64,
    /// This rank's input.
    pub input: *const c_void,
    /// This rank's output.
    pub output: *mut c_void,
    /// Ready flags, one word per chunk or tile.
    pub ready_flags: *const FusewireReadyFlags,
}

// SAFETY: all fields are integers, floats or pointers, for which every bit pattern is valid. The
// struct is `repr(C)`, and its first field is the `usize` `struct_size`.
unsafe impl VersionedStruct for FusewireOverlap {
    const NAME: &'static str = "fusewire_overlap";
    const FIRST: usize = 64;
}

const _: () = assert!(size_of::<FusewireOverlap>() >= FusewireOverlap::FIRST);

/// Ready flags or arrival counters, one word per chunk or tile: the type `fusewire_ready_flags`.
#[derive(Debug)]
pub struct FusewireReadyFlags(ReadyFlags);

/// Returns the flags of a handle.
///
/// # Safety
/// `flags` is null or a handle that lives as long as the result is used.
unsafe fn flags_of<'a>(
    operation: &str,
    flags: *const FusewireReadyFlags,
) -> Outcome<&'a ReadyFlags> {
    // SAFETY: the caller passes null or a live handle.
    Ok(&unsafe { live(operation, "the ready flags are", flags)? }.0)
}

/// Returns the stream of the handle `comm`. The message of an error names the function `operation`
/// and its argument `role`.
///
/// # Safety
/// `comm` is null or a handle that lives as long as the result is used.
unsafe fn stream_of<'a>(
    operation: &str,
    role: &str,
    comm: *const FusewireComm,
) -> Outcome<&'a Stream> {
    // SAFETY: the caller passes null or a live handle.
    let handle = unsafe { live(operation, &format!("the {role} is"), comm)? };
    Ok(handle.comm.stream())
}

fn index_of(operation: &str, index: u64) -> Outcome<usize> {
    usize::try_from(index).map_err(|_| argument(operation, format!("word {index} does not exist")))
}

/// Allocates `count` zeroed words in memory of the communicator's device.
///
/// # Safety
/// `comm` is null or a live handle; `flags` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_ready_flags_create(
    comm: *const FusewireComm,
    count: u64,
    flags: *mut *mut FusewireReadyFlags,
) -> c_int {
    const NAME: &str = "fusewire_ready_flags_create";
    guard(|| {
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "flags", flags, core::ptr::null_mut())? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        let count = usize::try_from(count)
            .ok()
            .filter(|count| *count <= u32::MAX as usize)
            .ok_or_else(|| argument(NAME, format!("{count} words; 2^32 - 1 are possible")))?;
        let made = Box::new(FusewireReadyFlags(handle.comm.ready_flags(count)?));
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "flags", flags, Box::into_raw(made)) }
    })
}

/// Destroys a handle. Operations and graphs that use the words keep the memory.
///
/// # Safety
/// `flags` is null or a live handle that is not used any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_ready_flags_destroy(flags: *mut FusewireReadyFlags) -> c_int {
    // SAFETY: the caller passes null or a handle that nothing uses any more.
    unsafe { destroy(flags) }
}

/// Stores in `words` the device address of the first word.
///
/// # Safety
/// `flags` is null or a live handle; `words` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_ready_flags_words(
    flags: *const FusewireReadyFlags,
    words: *mut *mut u32,
) -> c_int {
    const NAME: &str = "fusewire_ready_flags_words";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { flags_of(NAME, flags)? };
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "words", words, held.as_ptr()) }
    })
}

/// Blocks this thread until chunk `index` has arrived. CPU only.
///
/// # Safety
/// `flags` is null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_ready_flags_wait(
    flags: *const FusewireReadyFlags,
    index: u64,
) -> c_int {
    const NAME: &str = "fusewire_ready_flags_wait";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { flags_of(NAME, flags)? };
        Ok(held.wait(index_of(NAME, index)?)?)
    })
}

/// Adds `count` to the word of tile `index`, with release semantics for this thread's writes to the
/// tile. CPU only.
///
/// # Safety
/// `flags` is null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_ready_flags_add(
    flags: *const FusewireReadyFlags,
    index: u64,
    count: u32,
) -> c_int {
    const NAME: &str = "fusewire_ready_flags_add";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { flags_of(NAME, flags)? };
        Ok(held.add(index_of(NAME, index)?, count)?)
    })
}

/// Makes work that is enqueued on the stream of `consumer` after this call wait for chunk `index`.
///
/// # Safety
/// `flags` and `consumer` are null or live handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_ready_flags_stream_wait(
    flags: *const FusewireReadyFlags,
    consumer: *const FusewireComm,
    index: u64,
) -> c_int {
    const NAME: &str = "fusewire_ready_flags_stream_wait";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { flags_of(NAME, flags)? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let stream = unsafe { stream_of(NAME, "consumer", consumer)? };
        held.stream_wait(stream, index_of(NAME, index)?)?;
        Ok(())
    })
}

/// Enqueues a write of `value` to the word of tile `index` on the stream of `producer`, after the
/// earlier work of this stream.
///
/// # Safety
/// `flags` and `producer` are null or live handles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_ready_flags_stream_write(
    flags: *const FusewireReadyFlags,
    producer: *const FusewireComm,
    index: u64,
    value: u32,
) -> c_int {
    const NAME: &str = "fusewire_ready_flags_stream_write";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let held = unsafe { flags_of(NAME, flags)? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let stream = unsafe { stream_of(NAME, "producer", producer)? };
        held.stream_write(stream, index_of(NAME, index)?, value)?;
        Ok(())
    })
}

/// Checked arguments of an overlapped all_gather or reduce_scatter.
struct Arguments<'a> {
    compute: &'a Stream,
    flags: &'a ReadyFlags,
    overlap: FusewireOverlap,
    chunk: usize,
}

/// Reads the arguments of an operation and enqueues the operation through `run`.
///
/// # Safety
/// The preconditions of [`fusewire_all_gather_with_flags`].
unsafe fn overlapped(
    name: &'static str,
    comm: *const FusewireComm,
    (role, compute): (&str, *const FusewireComm),
    overlap: *const FusewireOverlap,
    work: *mut *mut FusewireWork,
    run: impl FnOnce(&Call<'_>, &Arguments<'_>) -> Outcome<Work>,
) -> c_int {
    let body = |call: &Call<'_>| {
        // SAFETY: the caller passes null or a struct that is readable for `struct_size` bytes.
        let overlap = unsafe { read(name, overlap)? };
        if overlap.flags != 0 {
            let flags = overlap.flags;
            return Err(argument(name, format!("flags {flags:#x} are unknown")));
        }
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let flags = unsafe { flags_of(name, overlap.ready_flags)? };
        let arguments = Arguments {
            // SAFETY: the caller passes null or a handle that stays alive during the call.
            compute: unsafe { stream_of(name, role, compute)? },
            flags,
            // A size that exceeds `usize` becomes `usize::MAX`, which the operation refuses.
            chunk: usize::try_from(overlap.chunk).unwrap_or(usize::MAX),
            overlap,
        };
        run(call, &arguments).map(Some)
    };
    // SAFETY: the preconditions of `operate` are also preconditions of this function.
    unsafe { operate(name, comm, Some(work), body) }
}

/// Enqueues an all_gather that sets the ready flag of each chunk when the chunk has arrived.
///
/// # Safety
/// Handles are null or live. `overlap` is null or readable for its `struct_size` bytes. Its buffers
/// and flags stay valid until the work is done and every graph that contains it is destroyed.
/// `work` is null or writable. The flags order the accesses to the chunks or tiles.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_gather_with_flags(
    comm: *const FusewireComm,
    consumer: *const FusewireComm,
    overlap: *const FusewireOverlap,
    work: *mut *mut FusewireWork,
) -> c_int {
    let body = |call: &Call<'_>, given: &Arguments<'_>| {
        let name = call.name();
        let FusewireOverlap {
            op,
            target,
            count,
            input,
            output,
            ..
        } = given.overlap;
        if op != 0 || target != 0 {
            return Err(argument(
                name,
                "op and target are for fusewire_reduce_scatter_on_arrival: set them to 0",
            ));
        }
        let element = dtype(name, "dtype", given.overlap.dtype)?;
        let input = call.tensor("input", input, Some(count), element)?;
        let output = call.tensor("output", output, call.rows(count), element)?;
        let comm = &call.handle.comm;
        // SAFETY: the caller orders the accesses to chunks and tiles by the flags.
        Ok(unsafe {
            comm.all_gather_with_flags_async(
                given.compute,
                &output,
                &input,
                given.flags,
                given.chunk,
            )
        }?)
    };
    // SAFETY: the preconditions of `overlapped` are also preconditions of this function.
    unsafe {
        overlapped(
            "fusewire_all_gather_with_flags",
            comm,
            ("consumer", consumer),
            overlap,
            work,
            body,
        )
    }
}

/// Enqueues a reduce_scatter that waits for the arrival counter of each tile.
///
/// # Safety
/// The preconditions of [`fusewire_all_gather_with_flags`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_reduce_scatter_on_arrival(
    comm: *const FusewireComm,
    producer: *const FusewireComm,
    overlap: *const FusewireOverlap,
    work: *mut *mut FusewireWork,
) -> c_int {
    let body = |call: &Call<'_>, given: &Arguments<'_>| {
        let name = call.name();
        let FusewireOverlap {
            op,
            target,
            count,
            input,
            output,
            ..
        } = given.overlap;
        let element = dtype(name, "dtype", given.overlap.dtype)?;
        let op = reduction(name, op)?;
        let input = call.tensor("input", input, call.rows(count), element)?;
        let output = call.tensor("output", output, Some(count), element)?;
        let comm = &call.handle.comm;
        // SAFETY: the caller orders the accesses to chunks and tiles by the flags.
        Ok(unsafe {
            comm.reduce_scatter_on_arrival_async(
                given.compute,
                &output,
                &input,
                given.flags,
                given.chunk,
                target,
                op,
            )
        }?)
    };
    // SAFETY: the preconditions of `overlapped` are also preconditions of this function.
    unsafe {
        overlapped(
            "fusewire_reduce_scatter_on_arrival",
            comm,
            ("producer", producer),
            overlap,
            work,
            body,
        )
    }
}
