//! Operations that a backend carries out: checked here, run by it on the stream.

use std::sync::Arc;

use fusewire_device::DType;

use super::Communicator;
use super::submit::invalid;
use crate::backend::{Backend, CallArgs, backend_error};
use crate::cpu::HostFn;
use crate::options::Algorithm;
use crate::plan::Plan;
use crate::tensor::{Input, Output};
use crate::{Error, Result};

/// An address in a closure that runs on a stream's thread.
#[derive(Clone, Copy)]
pub(super) struct Address(usize);

impl Address {
    pub(super) fn of(input: &Input<'_>) -> Self {
        Self(input.ptr as usize)
    }

    pub(super) fn of_output(output: &Output<'_>) -> Self {
        Self(output.ptr as usize)
    }

    pub(super) fn get(self) -> *mut u8 {
        self.0 as *mut u8
    }
}

/// Counts that a closure uses: a copy, or an address in device memory that each replay reads again.
pub(super) enum Counts {
    Copied(Vec<u64>),
    InPlace(usize, usize),
}

impl Counts {
    /// `counts`: `None` where they are in a GPU's memory, which the host would have to wait for.
    pub(super) fn new(
        operation: &'static str,
        counts: Option<&[u64]>,
        in_place: bool,
    ) -> Result<Self> {
        let Some(counts) = counts else {
            return Err(invalid(
                operation,
                "the library takes counts from the host: use the form with slices of counts"
                    .to_owned(),
            ));
        };
        Ok(if in_place {
            Self::InPlace(counts.as_ptr() as usize, counts.len())
        } else {
            Self::Copied(counts.to_vec())
        })
    }

    pub(super) fn read(&self) -> Vec<u64> {
        match self {
            Self::Copied(counts) => counts.clone(),
            Self::InPlace(at, count) => (0..*count)
                // SAFETY: the tensor with the counts is kept alive as long as the closure.
                .map(|index| unsafe { (*at as *const u64).add(index).read_volatile() })
                .collect(),
        }
    }

    /// The error for counts that changed beyond the buffers since the call.
    pub(super) fn changed(backend: &str, operation: &'static str) -> Error {
        backend_error(
            backend,
            operation,
            "the counts add up to more elements than the buffers hold",
        )
    }
}

/// A closure that calls the backend.
pub(super) fn hand_off(
    backend: Arc<dyn Backend>,
    args: CallArgs,
    run: impl Fn(&dyn Backend, &CallArgs) -> Result<()> + Send + Sync + 'static,
) -> HostFn {
    Arc::new(move || {
        run(&*backend, &args)?;
        backend.async_error()
    })
}

impl Communicator {
    /// The backend that carries out what was planned, if there is one and it can.
    pub(super) fn backend_for(
        &self,
        plan: &Plan,
        dtype: DType,
    ) -> Result<Option<Arc<dyn Backend>>> {
        let Some(backend) = &self.inner.backend else {
            return Ok(None);
        };
        debug_assert_eq!(plan.algorithm, Algorithm::HandOff);
        if backend.supports(plan.operation, dtype, plan.reduction) {
            return Ok(Some(Arc::clone(backend)));
        }
        let reduction = plan
            .reduction
            .map_or(String::new(), |code| format!(" with {}", code.name()));
        Err(backend_error(
            backend.name(),
            plan.operation.name(),
            format!(
                "the library ({}) has no {} of {}{reduction}",
                backend.version(),
                plan.operation.name(),
                dtype.name()
            ),
        ))
    }

    /// What a call of the backend takes.
    pub(super) fn call_args(&self, dtype: DType) -> CallArgs {
        let timeout = if self.timeout_ns == 0 {
            self.inner.options.timeout
        } else {
            core::time::Duration::from_nanos(self.timeout_ns)
        };
        CallArgs {
            stream: self.stream.as_raw() as u64,
            ..CallArgs::new(dtype, timeout)
        }
    }
}
