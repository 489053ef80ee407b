//! Batches: sends and receives that run concurrently.

use core::ffi::{c_int, c_void};

use crate::call::{Body, Call, operate};
use crate::comm::FusewireComm;
use crate::error::{Outcome, argument};
use crate::types::{VersionedStruct, dtype, numbers as n, read, struct_size};
use crate::work::FusewireWork;

/// `fusewire_p2p`: a send or receive of a batch.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireP2p {
    /// Size of this struct in bytes, as the program was compiled with it.
    pub struct_size: usize,
    /// Direction: send or receive.
    pub kind: u32,
    /// The other rank.
    pub peer: u32,
    /// Memory that is sent, or that is received into.
    pub buffer: *mut c_void,
    /// Number of elements.
    pub count: u64,
    /// Type of the elements.
    pub dtype: u32,
}

// SAFETY: all fields are integers, floats or pointers, for which every bit pattern is valid. The
// struct is `repr(C)`, and its first field is the `usize` `struct_size`.
unsafe impl VersionedStruct for FusewireP2p {
    const NAME: &'static str = "fusewire_p2p";
    const FIRST: usize = 40;
}

const _: () = assert!(size_of::<FusewireP2p>() >= FusewireP2p::FIRST);

/// Reads `count` operations. The `struct_size` of the first one is the distance between adjacent
/// operations, and the others must be equal to it.
///
/// # Safety
/// `ops` is null, or readable for `count` structs of the size that the first field has.
unsafe fn read_ops(
    call: &Call<'_>,
    ops: *const FusewireP2p,
    count: u32,
) -> Outcome<Vec<FusewireP2p>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the caller passes null or at least one operation.
    let stride = unsafe { struct_size(call.name(), ops)? };
    let read_op = |index: usize| {
        let at = ops.wrapping_byte_add(index * stride);
        // The first field, at the offset 0, is a `usize`.
        let own = at.cast::<usize>();
        // SAFETY: operation `index < count` begins `index * stride` bytes after the first one. The
        // caller guarantees `count` operations. The read does not need an alignment.
        let size = unsafe { own.read_unaligned() };
        if size != stride {
            let detail = format!(
                "ops[{index}].struct_size is {size}, ops[0].struct_size is {stride}: set both to \
                 sizeof(fusewire_p2p)"
            );
            return Err(argument(call.name(), detail));
        }
        // SAFETY: the operation has `stride` bytes, and its first field is `stride` (checked
        // above).
        unsafe { read(call.name(), at) }
    };
    (0..count as usize).map(read_op).collect()
}

/// Returns the body of [`fusewire_batch`].
///
/// # Safety
/// Handles and arrays are null or valid until the returned function has run.
unsafe fn run_batch(ops: *const FusewireP2p, count: u32) -> impl Body {
    move |call: &Call<'_>| {
        // SAFETY: the caller passes null or an array of `count` structs.
        let ops = unsafe { read_ops(call, ops, count)? };
        let mut batch = call.handle.comm.batch_op_create();
        for (index, op) in ops.iter().enumerate() {
            let field = |name: &str| format!("ops[{index}].{name}");
            let element = dtype(call.name(), &field("dtype"), op.dtype)?;
            let buffer = call.tensor(&field("buffer"), op.buffer, Some(op.count), element)?;
            match op.kind {
                n::FUSEWIRE_P2P_SEND => batch.send(&buffer, op.peer)?,
                n::FUSEWIRE_P2P_RECV => batch.recv(&buffer, op.peer)?,
                other => {
                    return Err(argument(
                        call.name(),
                        format!(
                            "{} {other} is neither FUSEWIRE_P2P_SEND nor FUSEWIRE_P2P_RECV",
                            field("kind")
                        ),
                    ));
                }
            }
        }
        if call.is_enqueued() {
            return Ok(Some(batch.issue_async()?));
        }
        batch.issue()?;
        Ok(None)
    }
}

/// Runs sends and receives concurrently.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_batch(
    comm: *const FusewireComm,
    ops: *const FusewireP2p,
    count: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe { operate("fusewire_batch", comm, None, run_batch(ops, count)) }
}

/// Enqueues [`fusewire_batch`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_batch_async(
    comm: *const FusewireComm,
    ops: *const FusewireP2p,
    count: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_batch_async",
            comm,
            Some(work),
            run_batch(ops, count),
        )
    }
}
