//! Calls of operations: their common arguments, in blocking and enqueued form.

use core::ffi::{c_int, c_void};

use fusewire::{Collective, DType, Error, Tensor, Work};

use crate::comm::FusewireComm;
use crate::error::{Outcome, guard};
use crate::memory::{Buffer, View};
use crate::work::{FusewireWork, hand_out};

/// The function that runs or enqueues an operation.
pub(crate) trait Body: FnOnce(&Call<'_>) -> Outcome<Option<Work>> {}

impl<F: FnOnce(&Call<'_>) -> Outcome<Option<Work>>> Body for F {}

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
    pub(crate) fn at_root(&self, root: u32, count: Option<u64>) -> Option<u64> {
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
    run: impl Body,
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
