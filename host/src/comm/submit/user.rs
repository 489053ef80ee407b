//! Kernels of the user's on a communicator's stream.

use fusewire_device::native::Kernel;
use fusewire_device::session::{Call, Operation};

use super::prepared_op::PreparedOp;
use crate::Result;
use crate::comm::attributes::LaunchAttributes;
use crate::comm::observe::OpInfo;
use crate::comm::{Communicator, Work};
use crate::cpu::report_faults;
use crate::tensor::Tensor;

/// The call as recorder and hooks report it for a kernel of the user.
const USER: OpInfo = OpInfo {
    call: Call::new(Operation::User, 0, 0, 0, 0xffff, 0).0,
    input_count: 0,
    output_count: 0,
};

impl Communicator {
    /// Has invalid accesses of kernels on the CPU reported.
    fn expect_faults(&self) {
        if self.inner.on_gpu.is_none() {
            report_faults();
        }
    }

    /// The call word of a kernel of the user's: `agreed` is whatever must be equal on all ranks.
    /// Ranks that launch with different words get an error.
    pub fn call_word(&self, operation: Operation, agreed: u64) -> u64 {
        Call::new(operation, 0, 0, 0, 0xffff, agreed).0
    }

    /// Launches a user kernel on the communicator's stream and waits until it has completed. The
    /// tensors in `tensors` stay allocated until the launch has completed or, for a captured
    /// launch, as long as the graph exists.
    ///
    /// A kernel that communicates takes [`Communicator::constants`] and a call word
    /// ([`Communicator::call_word`]) as parameters. Other kernels need neither.
    ///
    /// # Safety
    /// `params` must hold valid pointers, and the kernel must follow the rules between ranks.
    ///
    /// # Errors
    /// The communicator's failure. More than 256 bytes of parameters do not compile.
    pub unsafe fn launch<P: Copy>(
        &self,
        kernel: &Kernel<P>,
        params: P,
        tensors: [Option<&Tensor>; 3],
    ) -> Result<()> {
        self.expect_faults();
        self.run(&PreparedOp::new(self, kernel, params, tensors, false, USER))
    }

    /// As [`Communicator::launch_async`], with a shape of its own: a kernel that computes may take
    /// more blocks than the communicator's operations, which all ranks have agreed on. Blocks that
    /// take part in communication are the first `Options::blocks`.
    ///
    /// # Safety
    /// As there; blocks beyond `Options::blocks` touch nothing of the communicator's. With
    /// [`LaunchAttributes::dependent`], nothing of the communicator's, and no result of the kernel
    /// before, is touched before the kernel's own dependency wait.
    ///
    /// # Errors
    /// As there; [`Error::Launch`](crate::Error::Launch) for a cluster that does not divide the
    /// blocks, and for a shape that the device has no room for or does not know, such as a
    /// cooperative one that is too large: nothing was launched then, and the communicator can still
    /// be used. What the CPU makes of attributes: see [`LaunchAttributes`].
    pub unsafe fn launch_shaped<P: Copy>(
        &self,
        kernel: &Kernel<P>,
        params: P,
        tensors: [Option<&Tensor>; 3],
        attributes: LaunchAttributes,
    ) -> Result<Work> {
        let blocks = match attributes.blocks {
            0 => self.inner.options.blocks,
            blocks => blocks,
        };
        attributes.check(kernel.info().name, blocks)?;
        self.expect_faults();
        let mut prepared = PreparedOp::new(self, kernel, params, tensors, false, USER);
        prepared.attributes = Some(attributes);
        self.submit(&prepared)
    }

    /// As [`Communicator::launch`], without waiting.
    ///
    /// # Safety
    /// As there; what `tensors` do not keep alive must live until the work is done.
    ///
    /// # Errors
    /// As there.
    pub unsafe fn launch_async<P: Copy>(
        &self,
        kernel: &Kernel<P>,
        params: P,
        tensors: [Option<&Tensor>; 3],
    ) -> Result<Work> {
        self.expect_faults();
        self.submit(&PreparedOp::new(self, kernel, params, tensors, false, USER))
    }
}
