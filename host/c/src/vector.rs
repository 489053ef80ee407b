//! all_gather_v and all_to_all_v: collectives whose number of elements differs between the ranks.

use core::ffi::{c_int, c_void};

use fusewire::{Collective, DType, Tensor};

use crate::call::{Body, Call, operate};
use crate::comm::FusewireComm;
use crate::error::{Outcome, argument};
use crate::types::dtype;
use crate::work::FusewireWork;

/// Returns the numbers at `at`, one per rank.
///
/// # Safety
/// `at` is null, or readable for one number per rank as long as the result is used.
unsafe fn per_rank<'a>(call: &Call<'_>, what: &str, at: *const u64) -> Outcome<&'a [u64]> {
    if at.is_null() {
        return Err(argument(call.name(), format!("{what} is NULL")));
    }
    if !at.is_aligned() {
        let detail = format!("{what} is at {at:p}, not aligned to uint64_t");
        return Err(argument(call.name(), detail));
    }
    let ranks = call.handle.comm.size() as usize;
    // SAFETY: `at` is neither null nor unaligned (checked above); the caller guarantees one
    // readable number per rank.
    Ok(unsafe { core::slice::from_raw_parts(at, ranks) })
}

/// Returns the numbers at `at` in device memory, one per rank.
fn on_device(call: &Call<'_>, what: &str, at: *const u64) -> Outcome<Tensor> {
    call.tensor(what, at.cast(), call.rows(1), DType::U64)
}

/// Returns the sum of the numbers, or `None` if it overflows.
fn sum(numbers: &[u64]) -> Option<u64> {
    numbers
        .iter()
        .try_fold(0u64, |sum, number| sum.checked_add(*number))
}

/// Returns the body of [`fusewire_all_gather_v`].
///
/// # Safety
/// Handles and arrays are null or valid until the returned function has run.
unsafe fn all_gather_v(
    input: *const c_void,
    output: *mut c_void,
    counts: *const u64,
    element: u32,
) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        // SAFETY: the caller passes null or one number per rank.
        let counts = unsafe { per_rank(call, "counts", counts)? };
        let own = counts[call.handle.comm.rank() as usize];
        let input = call.view("input", input, Some(own), element)?;
        let output = call.view("output", output, sum(counts), element)?;
        call.issue(Collective::all_gather_v(
            output.output(),
            input.input(),
            counts,
        ))
    }
}

/// Copies the input of rank r, which has `counts[r]` elements, to every rank's output. The
/// parts of the output are contiguous, in rank order.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_gather_v(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    counts: *const u64,
    element: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_gather_v",
            comm,
            None,
            all_gather_v(input, output, counts, element),
        )
    }
}

/// Enqueues [`fusewire_all_gather_v`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_gather_v_async(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    counts: *const u64,
    element: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_gather_v_async",
            comm,
            Some(work),
            all_gather_v(input, output, counts, element),
        )
    }
}

/// Returns the body of [`fusewire_all_to_all_v`].
///
/// # Safety
/// Handles and arrays are null or valid until the returned function has run.
unsafe fn all_to_all_v(
    input: *const c_void,
    input_splits: *const u64,
    output: *mut c_void,
    output_splits: *const u64,
    element: u32,
) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        // SAFETY: the caller passes null or one number per rank.
        let input_splits = unsafe { per_rank(call, "input_splits", input_splits)? };
        // SAFETY: the caller passes null or one number per rank.
        let output_splits = unsafe { per_rank(call, "output_splits", output_splits)? };
        let input = call.view("input", input, sum(input_splits), element)?;
        let output = call.view("output", output, sum(output_splits), element)?;
        call.issue(Collective::all_to_all_v(
            output.output(),
            input.input(),
            output_splits,
            input_splits,
        ))
    }
}

/// Sends `input_splits[r]` elements to rank r, and receives `output_splits[r]` elements from
/// it. The parts of both buffers are contiguous, in rank order.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_to_all_v(
    comm: *const FusewireComm,
    input: *const c_void,
    input_splits: *const u64,
    output: *mut c_void,
    output_splits: *const u64,
    element: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_to_all_v",
            comm,
            None,
            all_to_all_v(input, input_splits, output, output_splits, element),
        )
    }
}

/// Enqueues [`fusewire_all_to_all_v`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_to_all_v_async(
    comm: *const FusewireComm,
    input: *const c_void,
    input_splits: *const u64,
    output: *mut c_void,
    output_splits: *const u64,
    element: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_to_all_v_async",
            comm,
            Some(work),
            all_to_all_v(input, input_splits, output, output_splits, element),
        )
    }
}

/// Returns the body of [`fusewire_all_gather_v_device`].
fn all_gather_v_device(
    input: *const c_void,
    input_count: u64,
    output: *mut c_void,
    output_count: u64,
    counts: *const u64,
    element: u32,
) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let input = call.view("input", input, Some(input_count), element)?;
        let output = call.view("output", output, Some(output_count), element)?;
        let counts = on_device(call, "counts", counts)?;
        call.issue(Collective::all_gather_v(
            output.output(),
            input.input(),
            &counts,
        ))
    }
}

/// Runs [`fusewire_all_gather_v`] with counts in device memory, which the operation reads when
/// it runs.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_gather_v_device(
    comm: *const FusewireComm,
    input: *const c_void,
    input_count: u64,
    output: *mut c_void,
    output_count: u64,
    counts: *const u64,
    element: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_gather_v_device",
            comm,
            None,
            all_gather_v_device(input, input_count, output, output_count, counts, element),
        )
    }
}

/// Enqueues [`fusewire_all_gather_v_device`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_gather_v_device_async(
    comm: *const FusewireComm,
    input: *const c_void,
    input_count: u64,
    output: *mut c_void,
    output_count: u64,
    counts: *const u64,
    element: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_gather_v_device_async",
            comm,
            Some(work),
            all_gather_v_device(input, input_count, output, output_count, counts, element),
        )
    }
}

/// Returns the body of [`fusewire_all_to_all_v_device`].
fn all_to_all_v_device(
    input: *const c_void,
    input_count: u64,
    input_splits: *const u64,
    output: *mut c_void,
    output_count: u64,
    output_splits: *const u64,
    element: u32,
) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let input = call.view("input", input, Some(input_count), element)?;
        let output = call.view("output", output, Some(output_count), element)?;
        let input_splits = on_device(call, "input_splits", input_splits)?;
        let output_splits = on_device(call, "output_splits", output_splits)?;
        call.issue(Collective::all_to_all_v(
            output.output(),
            input.input(),
            &output_splits,
            &input_splits,
        ))
    }
}

/// Runs [`fusewire_all_to_all_v`] with splits in device memory, which the operation reads when
/// it runs.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_to_all_v_device(
    comm: *const FusewireComm,
    input: *const c_void,
    input_count: u64,
    input_splits: *const u64,
    output: *mut c_void,
    output_count: u64,
    output_splits: *const u64,
    element: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_to_all_v_device",
            comm,
            None,
            all_to_all_v_device(
                input,
                input_count,
                input_splits,
                output,
                output_count,
                output_splits,
                element,
            ),
        )
    }
}

/// Enqueues [`fusewire_all_to_all_v_device`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_to_all_v_device_async(
    comm: *const FusewireComm,
    input: *const c_void,
    input_count: u64,
    input_splits: *const u64,
    output: *mut c_void,
    output_count: u64,
    output_splits: *const u64,
    element: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_to_all_v_device_async",
            comm,
            Some(work),
            all_to_all_v_device(
                input,
                input_count,
                input_splits,
                output,
                output_count,
                output_splits,
                element,
            ),
        )
    }
}
