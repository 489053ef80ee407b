//! all_gather_v, reduce_scatter_v and all_to_all_v: collectives whose number of elements differs
//! between the ranks.

use core::ffi::c_void;

use fusewire::{Collective, DType, Tensor};

use crate::error::{Outcome, argument};
use crate::operations::{Call, operation};
use crate::types::{dtype, reduction};

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

operation!(
    /// Copies the input of rank r, which has `counts[r]` elements, to every rank's output. The
    /// parts of the output are contiguous, in rank order.
    fusewire_all_gather_v, fusewire_all_gather_v_async(
        input: *const c_void, output: *mut c_void, counts: *const u64, element: u32
    ) |call| {
        let element = dtype(call.name(), "dtype", element)?;
        // SAFETY: the caller passes null or one number per rank.
        let counts = unsafe { per_rank(call, "counts", counts)? };
        let own = counts[call.handle.comm.rank() as usize];
        let input = call.view("input", input, Some(own), element)?;
        let output = call.view("output", output, sum(counts), element)?;
        call.issue(Collective::all_gather_v(output.output(), input.input(), counts))
    }
);

operation!(
    /// Reduces part r of every rank's input, which has `counts[r]` elements, and stores the result
    /// on rank r. The parts of the input are contiguous, in rank order.
    fusewire_reduce_scatter_v, fusewire_reduce_scatter_v_async(
        input: *const c_void, output: *mut c_void, counts: *const u64, element: u32, op: u32
    ) |call| {
        let element = dtype(call.name(), "dtype", element)?;
        let op = reduction(call.name(), op)?;
        // SAFETY: the caller passes null or one number per rank.
        let counts = unsafe { per_rank(call, "counts", counts)? };
        let comm = &call.handle.comm;
        let input = call.tensor("input", input, sum(counts), element)?;
        let own = counts[comm.rank() as usize];
        let output = call.tensor("output", output, Some(own), element)?;
        let mut end = 0;
        let part = |count: &u64| {
            let start = end;
            end += *count as usize;
            input.slice(start, *count as usize)
        };
        let parts = counts.iter().map(part).collect::<Result<Vec<_>, _>>()?;
        call.choose(
            || comm.reduce_scatter_v(&output, &parts, op),
            || comm.reduce_scatter_v_async(&output, &parts, op),
        )
    }
);

operation!(
    /// Sends `input_splits[r]` elements to rank r, and receives `output_splits[r]` elements from
    /// it. The parts of both buffers are contiguous, in rank order.
    fusewire_all_to_all_v, fusewire_all_to_all_v_async(
        input: *const c_void,
        input_splits: *const u64,
        output: *mut c_void,
        output_splits: *const u64,
        element: u32
    ) |call| {
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
);

operation!(
    /// Runs [`fusewire_all_gather_v`] with counts in device memory, which the operation reads when
    /// it runs.
    fusewire_all_gather_v_device, fusewire_all_gather_v_device_async(
        input: *const c_void,
        input_count: u64,
        output: *mut c_void,
        output_count: u64,
        counts: *const u64,
        element: u32
    ) |call| {
        let element = dtype(call.name(), "dtype", element)?;
        let input = call.view("input", input, Some(input_count), element)?;
        let output = call.view("output", output, Some(output_count), element)?;
        let counts = on_device(call, "counts", counts)?;
        call.issue(Collective::all_gather_v(output.output(), input.input(), &counts))
    }
);

operation!(
    /// Runs [`fusewire_all_to_all_v`] with splits in device memory, which the operation reads when
    /// it runs.
    fusewire_all_to_all_v_device, fusewire_all_to_all_v_device_async(
        input: *const c_void,
        input_count: u64,
        input_splits: *const u64,
        output: *mut c_void,
        output_count: u64,
        output_splits: *const u64,
        element: u32
    ) |call| {
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
);
