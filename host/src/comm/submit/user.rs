//! User kernels on a communicator's stream.

use fusewire_device::native::Kernel;
use fusewire_device::session::{Call, Operation};

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
        if self.inner.on_gpu.is_none() {
            report_faults();
        }
    }

    /// Returns the call word of a user kernel. `agreed` is a value that must be equal on all ranks:
    /// ranks that launch with different words get an error.
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
    /// `params` must hold valid pointers, and the kernel must follow the synchronization rules
    /// between ranks.
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

    /// Enqueues a user kernel with its own launch shape. A kernel that computes may use more blocks
    /// than the communicator's operations. Only the first `Options::blocks` blocks may communicate.
    ///
    /// # Safety
    /// The requirements of [`Communicator::launch_async`]. Blocks beyond `Options::blocks` must not
    /// access the communicator's state. With [`LaunchAttributes::dependent`], the kernel must not
    /// access the communicator's state or the results of the previous kernel before its dependency
    /// wait.
    ///
    /// # Errors
    /// The errors of [`Communicator::launch`]; [`Error::Launch`](crate::Error::Launch) for a
    /// cluster size that does not divide the number of blocks, and for a shape that the device does
    /// not support, such as a cooperative launch that is too large. Nothing is launched in these
    /// cases, and the communicator remains usable. [`LaunchAttributes`] describes the attributes on
    /// the CPU.
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

    /// Enqueues [`Communicator::launch`] without waiting for it.
    ///
    /// # Safety
    /// The requirements of [`Communicator::launch`]. Memory that `tensors` do not keep alive must
    /// live until the work has completed.
    ///
    /// # Errors
    /// The errors of [`Communicator::launch`].
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
