//! Collectives, send and receive, in blocking and enqueued form.

use core::ffi::{c_int, c_void};

use fusewire::{Collective, ReduceOp};

use crate::call::{Body, Call, operate};
use crate::comm::FusewireComm;
use crate::types::{dtype, reduction};
use crate::work::FusewireWork;

/// Returns the body of [`fusewire_all_reduce`].
fn all_reduce(
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    op: u32,
) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let op = reduction(call.name(), op)?;
        let input = call.view("input", input, Some(count), element)?;
        let output = call.view("output", output, Some(count), element)?;
        call.issue(Collective::all_reduce(output.output(), input.input(), op))
    }
}

/// Reduces every rank's input and stores the result on every rank.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_reduce(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    op: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_reduce",
            comm,
            None,
            all_reduce(input, output, count, element, op),
        )
    }
}

/// Enqueues [`fusewire_all_reduce`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_reduce_async(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    op: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_reduce_async",
            comm,
            Some(work),
            all_reduce(input, output, count, element, op),
        )
    }
}

/// Returns the body of [`fusewire_all_reduce_premul_sum`].
fn all_reduce_premul_sum(
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    factor: f64,
) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let input = call.view("input", input, Some(count), element)?;
        let output = call.view("output", output, Some(count), element)?;
        let op = ReduceOp::PreMulSum(factor);
        call.issue(Collective::all_reduce(output.output(), input.input(), op))
    }
}

/// Multiplies every rank's input by that rank's factor, and stores the sum on every rank.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_reduce_premul_sum(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    factor: f64,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_reduce_premul_sum",
            comm,
            None,
            all_reduce_premul_sum(input, output, count, element, factor),
        )
    }
}

/// Enqueues [`fusewire_all_reduce_premul_sum`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_reduce_premul_sum_async(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    factor: f64,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_reduce_premul_sum_async",
            comm,
            Some(work),
            all_reduce_premul_sum(input, output, count, element, factor),
        )
    }
}

/// Returns the body of [`fusewire_reduce`].
fn reduce(
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    op: u32,
    root: u32,
) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let op = reduction(call.name(), op)?;
        let input = call.view("input", input, Some(count), element)?;
        let output = call.view("output", output, call.at_root(root, Some(count)), element)?;
        call.issue(Collective::reduce(output.output(), input.input(), root, op))
    }
}

/// Reduces every rank's input and stores the result on the root.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_reduce(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    op: u32,
    root: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_reduce",
            comm,
            None,
            reduce(input, output, count, element, op, root),
        )
    }
}

/// Enqueues [`fusewire_reduce`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_reduce_async(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    op: u32,
    root: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_reduce_async",
            comm,
            Some(work),
            reduce(input, output, count, element, op, root),
        )
    }
}

/// Returns the body of [`fusewire_reduce_premul_sum`].
fn reduce_premul_sum(
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    factor: f64,
    root: u32,
) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let input = call.view("input", input, Some(count), element)?;
        let output = call.view("output", output, call.at_root(root, Some(count)), element)?;
        let op = ReduceOp::PreMulSum(factor);
        call.issue(Collective::reduce(output.output(), input.input(), root, op))
    }
}

/// Multiplies every rank's input by that rank's factor, and stores the sum on the root.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_reduce_premul_sum(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    factor: f64,
    root: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_reduce_premul_sum",
            comm,
            None,
            reduce_premul_sum(input, output, count, element, factor, root),
        )
    }
}

/// Enqueues [`fusewire_reduce_premul_sum`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_reduce_premul_sum_async(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    factor: f64,
    root: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_reduce_premul_sum_async",
            comm,
            Some(work),
            reduce_premul_sum(input, output, count, element, factor, root),
        )
    }
}

/// Returns the body of [`fusewire_reduce_scatter`].
fn reduce_scatter(
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    op: u32,
) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let op = reduction(call.name(), op)?;
        let input = call.view("input", input, call.rows(count), element)?;
        let output = call.view("output", output, Some(count), element)?;
        call.issue(Collective::reduce_scatter(
            output.output(),
            input.input(),
            op,
        ))
    }
}

/// Reduces row r of every rank's input and stores the result on rank r.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_reduce_scatter(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    op: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_reduce_scatter",
            comm,
            None,
            reduce_scatter(input, output, count, element, op),
        )
    }
}

/// Enqueues [`fusewire_reduce_scatter`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_reduce_scatter_async(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    op: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_reduce_scatter_async",
            comm,
            Some(work),
            reduce_scatter(input, output, count, element, op),
        )
    }
}

/// Returns the body of [`fusewire_reduce_scatter_premul_sum`].
fn reduce_scatter_premul_sum(
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    factor: f64,
) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let input = call.view("input", input, call.rows(count), element)?;
        let output = call.view("output", output, Some(count), element)?;
        let op = ReduceOp::PreMulSum(factor);
        call.issue(Collective::reduce_scatter(
            output.output(),
            input.input(),
            op,
        ))
    }
}

/// Multiplies every rank's input by that rank's factor, and stores the sum of row r on rank r.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_reduce_scatter_premul_sum(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    factor: f64,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_reduce_scatter_premul_sum",
            comm,
            None,
            reduce_scatter_premul_sum(input, output, count, element, factor),
        )
    }
}

/// Enqueues [`fusewire_reduce_scatter_premul_sum`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_reduce_scatter_premul_sum_async(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    factor: f64,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_reduce_scatter_premul_sum_async",
            comm,
            Some(work),
            reduce_scatter_premul_sum(input, output, count, element, factor),
        )
    }
}

/// Returns the body of [`fusewire_all_gather`].
fn all_gather(input: *const c_void, output: *mut c_void, count: u64, element: u32) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let input = call.view("input", input, Some(count), element)?;
        let output = call.view("output", output, call.rows(count), element)?;
        call.issue(Collective::all_gather(output.output(), input.input()))
    }
}

/// Copies the input of rank r to row r of every rank's output.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_gather(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_gather",
            comm,
            None,
            all_gather(input, output, count, element),
        )
    }
}

/// Enqueues [`fusewire_all_gather`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_gather_async(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_gather_async",
            comm,
            Some(work),
            all_gather(input, output, count, element),
        )
    }
}

/// Returns the body of [`fusewire_all_to_all`].
fn all_to_all(input: *const c_void, output: *mut c_void, count: u64, element: u32) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let input = call.view("input", input, call.rows(count), element)?;
        let output = call.view("output", output, call.rows(count), element)?;
        let ranks = call.handle.comm.size();
        call.issue(Collective::all_to_all(
            output.output(),
            input.input(),
            ranks,
        ))
    }
}

/// Copies row r of the input of rank s to row s of the output of rank r.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_to_all(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_to_all",
            comm,
            None,
            all_to_all(input, output, count, element),
        )
    }
}

/// Enqueues [`fusewire_all_to_all`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_to_all_async(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_all_to_all_async",
            comm,
            Some(work),
            all_to_all(input, output, count, element),
        )
    }
}

/// Returns the body of [`fusewire_broadcast`].
fn broadcast(buffer: *mut c_void, count: u64, element: u32, root: u32) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let buffer = call.view("buffer", buffer, Some(count), element)?;
        call.issue(Collective::broadcast(buffer.output(), root))
    }
}

/// Copies the root's buffer to the buffer of every rank.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_broadcast(
    comm: *const FusewireComm,
    buffer: *mut c_void,
    count: u64,
    element: u32,
    root: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_broadcast",
            comm,
            None,
            broadcast(buffer, count, element, root),
        )
    }
}

/// Enqueues [`fusewire_broadcast`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_broadcast_async(
    comm: *const FusewireComm,
    buffer: *mut c_void,
    count: u64,
    element: u32,
    root: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_broadcast_async",
            comm,
            Some(work),
            broadcast(buffer, count, element, root),
        )
    }
}

/// Returns the body of [`fusewire_scatter`].
fn scatter(
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    root: u32,
) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let input = call.view(
            "input",
            input,
            call.at_root(root, call.rows(count)),
            element,
        )?;
        let output = call.view("output", output, Some(count), element)?;
        call.issue(Collective::scatter(output.output(), input.input(), root))
    }
}

/// Copies row r of the root's input to the output of rank r.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_scatter(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    root: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_scatter",
            comm,
            None,
            scatter(input, output, count, element, root),
        )
    }
}

/// Enqueues [`fusewire_scatter`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_scatter_async(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    root: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_scatter_async",
            comm,
            Some(work),
            scatter(input, output, count, element, root),
        )
    }
}

/// Returns the body of [`fusewire_gather`].
fn gather(
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    root: u32,
) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let input = call.view("input", input, Some(count), element)?;
        let output = call.view(
            "output",
            output,
            call.at_root(root, call.rows(count)),
            element,
        )?;
        call.issue(Collective::gather(output.output(), input.input(), root))
    }
}

/// Copies the input of rank r to row r of the root's output.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_gather(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    root: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_gather",
            comm,
            None,
            gather(input, output, count, element, root),
        )
    }
}

/// Enqueues [`fusewire_gather`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_gather_async(
    comm: *const FusewireComm,
    input: *const c_void,
    output: *mut c_void,
    count: u64,
    element: u32,
    root: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_gather_async",
            comm,
            Some(work),
            gather(input, output, count, element, root),
        )
    }
}

/// Returns the body of [`fusewire_send`].
fn send(input: *const c_void, count: u64, element: u32, peer: u32) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let input = call.view("input", input, Some(count), element)?;
        call.issue(Collective::send(input.input(), peer))
    }
}

/// Sends `count` elements to `peer`, which must receive the same number of elements of the same
/// type.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_send(
    comm: *const FusewireComm,
    input: *const c_void,
    count: u64,
    element: u32,
    peer: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_send",
            comm,
            None,
            send(input, count, element, peer),
        )
    }
}

/// Enqueues [`fusewire_send`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_send_async(
    comm: *const FusewireComm,
    input: *const c_void,
    count: u64,
    element: u32,
    peer: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_send_async",
            comm,
            Some(work),
            send(input, count, element, peer),
        )
    }
}

/// Returns the body of [`fusewire_recv`].
fn recv(output: *mut c_void, count: u64, element: u32, peer: u32) -> impl Body {
    move |call: &Call<'_>| {
        let element = dtype(call.name(), "dtype", element)?;
        let output = call.view("output", output, Some(count), element)?;
        call.issue(Collective::recv(output.output(), peer))
    }
}

/// Receives `count` elements from `peer`.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_recv(
    comm: *const FusewireComm,
    output: *mut c_void,
    count: u64,
    element: u32,
    peer: u32,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_recv",
            comm,
            None,
            recv(output, count, element, peer),
        )
    }
}

/// Enqueues [`fusewire_recv`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_recv_async(
    comm: *const FusewireComm,
    output: *mut c_void,
    count: u64,
    element: u32,
    peer: u32,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe {
        operate(
            "fusewire_recv_async",
            comm,
            Some(work),
            recv(output, count, element, peer),
        )
    }
}

/// Returns the body of [`fusewire_barrier`].
fn barrier() -> impl Body {
    move |call: &Call<'_>| call.issue(Collective::barrier())
}

/// Returns when every rank has called this function.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_barrier(comm: *const FusewireComm) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe { operate("fusewire_barrier", comm, None, barrier()) }
}

/// Enqueues [`fusewire_barrier`] on the handle's stream.
///
/// # Safety
/// The requirements of an operation in the [documentation of the crate](crate#safety).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_barrier_async(
    comm: *const FusewireComm,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of the called functions are also preconditions of this function.
    unsafe { operate("fusewire_barrier_async", comm, Some(work), barrier()) }
}
