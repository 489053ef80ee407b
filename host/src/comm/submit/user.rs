//! User kernels on a communicator's stream.

use std::sync::Arc;

use fusewire_device::call::{Call, Operation};
use fusewire_device::native::Kernel;

use super::prepared_op::PreparedOp;
use crate::Result;
use crate::comm::attributes::LaunchAttributes;
use crate::comm::observe::OpInfo;
use crate::comm::{Communicator, Work};
use crate::cpu::report_faults;
use crate::tensor::Tensor;

/// Call of a user kernel for the recorder and for hooks.
const USER: OpInfo = OpInfo {
    call: Call::new(Operation::User, 0, 0, 0, 0xffff, 0).0,
    input_count: 0,
    output_count: 0,
};

impl Communicator {
    /// Enables reports of invalid memory accesses for kernels on the CPU.
    fn expect_faults(&self) {
        if self.inner.executor.on_gpu.is_none() {
            report_faults();
        }
    }

    /// Enqueues a kernel that has no session, by its parameters. The launch, and a graph that
    /// contains it, keep `tensors` alive. [`Communicator::kernel`] launches kernels with a session.
    ///
    /// `attributes` is the shape: a kernel that only computes may have more blocks than the
    /// communicator's operations, on which all ranks have agreed. The default has the
    /// communicator's shape. [`LaunchAttributes`] describes which attributes have an effect on the
    /// CPU.
    ///
    /// A kernel that communicates takes [`Communicator::constants`] and a call word
    /// ([`Call::new`]) as parameters.
    ///
    /// # Safety
    /// `params` must hold valid pointers, and memory that `tensors` do not keep alive must live
    /// until the work is complete. The kernel must follow the rules between ranks, and blocks
    /// beyond `comm.options().blocks` must not access the communicator. With
    /// [`LaunchAttributes::dependent`], the kernel must access neither the communicator nor a
    /// result of the previous kernel before its own dependency wait.
    ///
    /// # Errors
    /// The communicator's failure; [`Error::Launch`](crate::Error::Launch) for a shape that the
    /// device does not support. Nothing was launched then, and the communicator can still be used.
    /// More than 256 bytes of parameters do not compile.
    pub unsafe fn launch_raw<P: Copy>(
        &self,
        kernel: &Kernel<P>,
        params: P,
        tensors: &[&Tensor],
        attributes: LaunchAttributes,
    ) -> Result<Work> {
        let blocks = match attributes.blocks {
            0 => self.inner.group.options.blocks,
            blocks => blocks,
        };
        attributes.check(kernel.info().name, blocks)?;
        self.expect_faults();
        let kept: Vec<Tensor> = tensors.iter().copied().cloned().collect();
        let prepared = PreparedOp::new(self, kernel, params, [None; 3], false, USER);
        let mut prepared = prepared.keeping(Arc::new(kept));
        if attributes != LaunchAttributes::default() {
            prepared = prepared.shaped(attributes);
        }
        self.submit(&prepared)
    }
}
