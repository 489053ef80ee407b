//! Collectives, send and receive, in blocking and enqueued form.

use core::ffi::{c_int, c_void};

use fusewire::{Collective, DType, Error, ReduceOp, Tensor, Work};

use crate::comm::FusewireComm;
use crate::error::{Outcome, guard};
use crate::memory::{Buffer, View};
use crate::types::{dtype, reduction};
use crate::work::{FusewireWork, hand_out};

/// A call of an operation: its name, its communicator and its form.
pub(crate) struct Call<'a> {
    name: &'static str,
    pub(crate) handle: &'a FusewireComm,
    enqueued: bool,
}

impl Call<'_> {
    /// Checks a buffer of `count` elements and adopts it, for operations that only take tensors.
    /// Fails if the call blocks while the stream is capturing: the graph would use the buffer after
    /// the call.
    pub(crate) fn tensor(
        &self,
        what: &str,
        at: *const c_void,
        count: Option<u64>,
        dtype: DType,
    ) -> Outcome<Tensor> {
        if !self.enqueued && self.handle.comm.stream().is_capturing() {
            let name = self.name;
            return Err(Error::CaptureState {
                detail: format!(
                    "a graph outlives the call, so {name} cannot be captured: use {name}_async"
                ),
            }
            .into());
        }
        Buffer::new(self.name, what, at, count, dtype)?.tensor(self.handle)
    }

    /// Checks a buffer of `count` elements.
    pub(crate) fn view(
        &self,
        what: &str,
        at: *const c_void,
        count: Option<u64>,
        dtype: DType,
    ) -> Outcome<View> {
        Buffer::new(self.name, what, at, count, dtype)?.view(self.handle, self.enqueued)
    }

    /// Returns the number of elements of a buffer that has one row of `count` elements per rank, or
    /// `None` if the number overflows.
    pub(crate) fn rows(&self, count: u64) -> Option<u64> {
        count.checked_mul(u64::from(self.handle.comm.size()))
    }

    /// Returns `count` if this rank is `root`, otherwise 0, because the operation does not use the
    /// buffer on other ranks. The operation checks `root`.
    fn at_root(&self, root: u32, count: Option<u64>) -> Option<u64> {
        if self.handle.comm.rank() == root {
            count
        } else {
            Some(0)
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Returns true if the call is of the `_async` form.
    pub(crate) fn is_enqueued(&self) -> bool {
        self.enqueued
    }

    /// Runs the function of the call's form.
    pub(crate) fn choose(
        &self,
        run: impl FnOnce() -> fusewire::Result<()>,
        enqueue: impl FnOnce() -> fusewire::Result<Work>,
    ) -> Outcome<Option<Work>> {
        if self.enqueued {
            return Ok(Some(enqueue()?));
        }
        run()?;
        Ok(None)
    }

    /// Runs or enqueues a collective, as the call's form says.
    pub(crate) fn issue(&self, collective: Collective<'_>) -> Outcome<Option<Work>> {
        let comm = &self.handle.comm;
        if self.enqueued {
            return Ok(Some(comm.enqueue(collective)?));
        }
        comm.execute(collective)?;
        Ok(None)
    }
}

/// Runs an operation of the communicator `comm`. If the operation was enqueued, stores its work
/// handle in `work`.
///
/// # Safety
/// `comm` is null or a live handle; `work` is null or writable.
pub(crate) unsafe fn operate(
    name: &'static str,
    comm: *const FusewireComm,
    work: Option<*mut *mut FusewireWork>,
    run: impl FnOnce(&Call<'_>) -> Outcome<Option<Work>>,
) -> c_int {
    guard(|| {
        let to = work.unwrap_or(core::ptr::null_mut());
        if !to.is_null() {
            // SAFETY: `to` is not null, so the caller guarantees that it is writable.
            unsafe { to.write(core::ptr::null_mut()) };
        }
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(name, comm)? };
        let call = Call {
            name,
            handle,
            enqueued: work.is_some(),
        };
        if let Some(enqueued) = run(&call)? {
            // SAFETY: the caller passes null or a writable `work`.
            unsafe { hand_out(enqueued, to) };
        }
        Ok(())
    })
}

/// Defines the C functions of an operation: blocking and enqueued.
macro_rules! operation {
    (
        $(#[$doc:meta])*
        $name:ident, $name_async:ident ($($arg:ident: $ty:ty),*) |$call:ident| $body:block
    ) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// Handles are null or live. Arrays and structs are null or readable. The buffers are valid
        /// memory of the communicator's device until the call returns.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            comm: *const $crate::comm::FusewireComm,
            $($arg: $ty),*
        ) -> core::ffi::c_int {
            let run = |$call: &$crate::operations::Call<'_>| $body;
            // SAFETY: the preconditions of `operate` are also preconditions of this function.
            unsafe { $crate::operations::operate(stringify!($name), comm, None, run) }
        }

        #[doc = concat!("Enqueues [`", stringify!($name), "`] on the handle's stream.")]
        ///
        /// # Safety
        /// Handles are null or live. Arrays and structs are null or readable. The buffers are valid
        /// memory of the communicator's device until the work is done and every graph that contains
        /// it is destroyed. `work` is null or writable.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name_async(
            comm: *const $crate::comm::FusewireComm,
            $($arg: $ty,)*
            work: *mut *mut $crate::work::FusewireWork,
        ) -> core::ffi::c_int {
            let run = |$call: &$crate::operations::Call<'_>| $body;
            // SAFETY: the preconditions of `operate` are also preconditions of this function.
            unsafe { $crate::operations::operate(stringify!($name_async), comm, Some(work), run) }
        }
    };
}
pub(crate) use operation;

operation!(
    /// Reduces every rank's input and stores the result on every rank.
    fusewire_all_reduce, fusewire_all_reduce_async(
        input: *const c_void, output: *mut c_void, count: u64, element: u32, op: u32
    ) |call| {
        let element = dtype(call.name, "dtype", element)?;
        let op = reduction(call.name, op)?;
        let input = call.view("input", input, Some(count), element)?;
        let output = call.view("output", output, Some(count), element)?;
        call.issue(Collective::all_reduce(output.output(), input.input(), op))
    }
);

operation!(
    /// Multiplies every rank's input by that rank's factor, and stores the sum on every rank.
    fusewire_all_reduce_premul_sum, fusewire_all_reduce_premul_sum_async(
        input: *const c_void, output: *mut c_void, count: u64, element: u32, factor: f64
    ) |call| {
        let element = dtype(call.name, "dtype", element)?;
        let input = call.view("input", input, Some(count), element)?;
        let output = call.view("output", output, Some(count), element)?;
        let op = ReduceOp::PreMulSum(factor);
        call.issue(Collective::all_reduce(output.output(), input.input(), op))
    }
);

operation!(
    /// Reduces every rank's input and stores the result on the root.
    fusewire_reduce, fusewire_reduce_async(
        input: *const c_void, output: *mut c_void, count: u64, element: u32, op: u32, root: u32
    ) |call| {
        let element = dtype(call.name, "dtype", element)?;
        let op = reduction(call.name, op)?;
        let input = call.view("input", input, Some(count), element)?;
        let output = call.view("output", output, call.at_root(root, Some(count)), element)?;
        call.issue(Collective::reduce(output.output(), input.input(), root, op))
    }
);

operation!(
    /// Multiplies every rank's input by that rank's factor, and stores the sum on the root.
    fusewire_reduce_premul_sum, fusewire_reduce_premul_sum_async(
        input: *const c_void, output: *mut c_void, count: u64, element: u32, factor: f64, root: u32
    ) |call| {
        let element = dtype(call.name, "dtype", element)?;
        let input = call.view("input", input, Some(count), element)?;
        let output = call.view("output", output, call.at_root(root, Some(count)), element)?;
        let op = ReduceOp::PreMulSum(factor);
        call.issue(Collective::reduce(output.output(), input.input(), root, op))
    }
);

operation!(
    /// Reduces row r of every rank's input and stores the result on rank r.
    fusewire_reduce_scatter, fusewire_reduce_scatter_async(
        input: *const c_void, output: *mut c_void, count: u64, element: u32, op: u32
    ) |call| {
        let element = dtype(call.name, "dtype", element)?;
        let op = reduction(call.name, op)?;
        let input = call.view("input", input, call.rows(count), element)?;
        let output = call.view("output", output, Some(count), element)?;
        call.issue(Collective::reduce_scatter(output.output(), input.input(), op))
    }
);

operation!(
    /// Multiplies every rank's input by that rank's factor, and stores the sum of row r on rank r.
    fusewire_reduce_scatter_premul_sum, fusewire_reduce_scatter_premul_sum_async(
        input: *const c_void, output: *mut c_void, count: u64, element: u32, factor: f64
    ) |call| {
        let element = dtype(call.name, "dtype", element)?;
        let input = call.view("input", input, call.rows(count), element)?;
        let output = call.view("output", output, Some(count), element)?;
        let op = ReduceOp::PreMulSum(factor);
        call.issue(Collective::reduce_scatter(output.output(), input.input(), op))
    }
);

operation!(
    /// Copies the input of rank r to row r of every rank's output.
    fusewire_all_gather, fusewire_all_gather_async(
        input: *const c_void, output: *mut c_void, count: u64, element: u32
    ) |call| {
        let element = dtype(call.name, "dtype", element)?;
        let input = call.view("input", input, Some(count), element)?;
        let output = call.view("output", output, call.rows(count), element)?;
        call.issue(Collective::all_gather(output.output(), input.input()))
    }
);

operation!(
    /// Copies row r of the input of rank s to row s of the output of rank r.
    fusewire_all_to_all, fusewire_all_to_all_async(
        input: *const c_void, output: *mut c_void, count: u64, element: u32
    ) |call| {
        let element = dtype(call.name, "dtype", element)?;
        let input = call.view("input", input, call.rows(count), element)?;
        let output = call.view("output", output, call.rows(count), element)?;
        let ranks = call.handle.comm.size();
        call.issue(Collective::all_to_all(output.output(), input.input(), ranks))
    }
);

operation!(
    /// Copies the root's buffer to the buffer of every rank.
    fusewire_broadcast, fusewire_broadcast_async(
        buffer: *mut c_void, count: u64, element: u32, root: u32
    ) |call| {
        let element = dtype(call.name, "dtype", element)?;
        let buffer = call.view("buffer", buffer, Some(count), element)?;
        call.issue(Collective::broadcast(buffer.output(), root))
    }
);

operation!(
    /// Copies row r of the root's input to the output of rank r.
    fusewire_scatter, fusewire_scatter_async(
        input: *const c_void, output: *mut c_void, count: u64, element: u32, root: u32
    ) |call| {
        let element = dtype(call.name, "dtype", element)?;
        let input = call.view("input", input, call.at_root(root, call.rows(count)), element)?;
        let output = call.view("output", output, Some(count), element)?;
        call.issue(Collective::scatter(output.output(), input.input(), root))
    }
);

operation!(
    /// Copies the input of rank r to row r of the root's output.
    fusewire_gather, fusewire_gather_async(
        input: *const c_void, output: *mut c_void, count: u64, element: u32, root: u32
    ) |call| {
        let element = dtype(call.name, "dtype", element)?;
        let input = call.view("input", input, Some(count), element)?;
        let output = call.view("output", output, call.at_root(root, call.rows(count)), element)?;
        call.issue(Collective::gather(output.output(), input.input(), root))
    }
);

operation!(
    /// Sends `count` elements to `peer`, which must receive the same number of elements of the same
    /// type.
    fusewire_send, fusewire_send_async(
        input: *const c_void, count: u64, element: u32, peer: u32
    ) |call| {
        let element = dtype(call.name, "dtype", element)?;
        let input = call.view("input", input, Some(count), element)?;
        call.issue(Collective::send(input.input(), peer))
    }
);

operation!(
    /// Receives `count` elements from `peer`.
    fusewire_recv, fusewire_recv_async(
        output: *mut c_void, count: u64, element: u32, peer: u32
    ) |call| {
        let element = dtype(call.name, "dtype", element)?;
        let output = call.view("output", output, Some(count), element)?;
        call.issue(Collective::recv(output.output(), peer))
    }
);

operation!(
    /// Returns when every rank has called this function.
    fusewire_barrier, fusewire_barrier_async() |call| {
        call.issue(Collective::barrier())
    }
);
