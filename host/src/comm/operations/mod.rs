//! The path of a [`Collective`] to a launch: check, plan, bind, submit.
//!
//! | step | function | sees |
//! |---|---|---|
//! | check | [`Communicator::check_collective`] | operation and buffers |
//! | plan | [`Communicator::plan`] | the operation and values that all ranks agree on |
//! | bind | [`Communicator::bind`] | the values above, and the kernels or the backend |
//! | submit | [`Communicator::run`], [`Communicator::submit`] | a [`PreparedOp`] |

mod bind;
mod bounce;
mod check;
mod hand_off;
mod instances;
mod lists;
mod overlap;

use crate::Result;
use crate::backend::{ONLY_KERNELS, backend_error};
use crate::collective::{Collective, Op};
use crate::comm::observe::Arguments;
use crate::comm::submit::{PreparedOp, invalid};
use crate::comm::{Communicator, Work};
use crate::plan::{Agreed, Machine, Plan, plan, plan_of_backend};

/// Lifetime of the memory that a prepared operation uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lifetime {
    /// The memory lives as long as the call, which blocks.
    Call,
    /// The memory lives as long as the launch and every graph that contains it.
    Launch,
}

impl Communicator {
    /// Runs a collective and returns when its result is available.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] before any data moves; the communicator's first failure.
    pub fn execute(&self, mut collective: Collective<'_>) -> Result<()> {
        self.check_collective(&mut collective)?;
        if self.needs_bounce_buffers(&collective.operands) {
            return self.execute_bounced(collective);
        }
        self.bind(&collective, Lifetime::Call, |prepared| {
            self.run_with(prepared, Arguments::Collective(&collective))
        })
    }

    /// Enqueues a collective on the communicator's stream. All buffers must be tensors: the launch,
    /// and any graph that contains it, keeps them allocated.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] before any data moves; the communicator's first failure.
    /// The [`Work`] reports a failure of the operation while it runs.
    pub fn enqueue(&self, mut collective: Collective<'_>) -> Result<Work> {
        self.check_collective(&mut collective)?;
        if collective.operands.is_borrowed() {
            return Err(invalid(
                collective.op.name(),
                "an enqueued operation outlives the call, so it takes tensors, not slices or raw \
                 addresses"
                    .to_owned(),
            ));
        }
        self.bind(&collective, Lifetime::Launch, |prepared| {
            self.submit_with(prepared, Arguments::Collective(&collective))
        })
    }

    /// Checks a collective and binds it to a kernel or to a call of the backend.
    pub(super) fn prepare<'a>(&self, mut collective: Collective<'a>) -> Result<PreparedOp<'a>> {
        self.check_collective(&mut collective)?;
        self.bind(&collective, Lifetime::Launch, |prepared| {
            Ok(prepared.clone())
        })
    }

    /// Checks a collective, and drops the buffers that it does not use on this rank.
    #[inline]
    fn check_collective(&self, collective: &mut Collective<'_>) -> Result<()> {
        collective.operands.drop_unused(&collective.op, self.rank());
        self.check_operands(&mut collective.op, &collective.operands)?;
        if collective.op.is_fused() {
            return Err(invalid(
                collective.op.name(),
                "has other operands than a collective: use the method of this name".to_owned(),
            ));
        }
        if let Some(backend) = &self.inner.executor.backend {
            self.check_supported(&**backend, collective)?;
        }
        Ok(())
    }

    /// Refuses a fused operation if the communicator has a backend.
    pub(super) fn refuse_backend(&self, op: &Op, advice: &str) -> Result<()> {
        let Some(backend) = &self.inner.executor.backend else {
            return Ok(());
        };
        let detail = format!("{ONLY_KERNELS}: {advice}");
        Err(backend_error(backend.name(), op.name(), detail))
    }

    /// Returns the plan of an operation, which is the same on all ranks.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] if the type does not support the reduction;
    /// [`crate::Error::Backend`] for a fused operation if the communicator has a backend.
    pub fn plan(&self, op: &Op) -> Result<Plan> {
        if let (Some(dtype), Some(code)) = (op.dtype(), op.reduction()) {
            check::supports_reduction(op.name(), dtype, code)?;
        }
        if op.is_fused() {
            self.refuse_backend(op, "use separate operations")?;
        }
        Ok(self.plan_checked(op))
    }

    /// Returns the plan of an operation whose type supports the reduction.
    #[inline]
    fn plan_checked(&self, op: &Op) -> Plan {
        match &self.inner.executor.backend {
            Some(backend) => plan_of_backend(op, &**backend),
            None => plan(op, &self.agreed()),
        }
    }

    /// Returns the values that all ranks of the communicator agree on.
    #[inline]
    pub(super) fn agreed(&self) -> Agreed<'_> {
        let inner = &*self.inner;
        Agreed {
            options: &inner.group.options,
            wanted: self.algorithm,
            ranks: inner.group.size,
            machine: Machine {
                oversubscribed: inner.group.oversubscribed,
                split: inner.executor.is_split(),
                multicast: inner.windows.have_multicast(),
                gpu: inner.group.device.is_gpu(),
            },
        }
    }
}
