//! An operation bound to its kernel, ready to run.

use core::any::Any;
use std::sync::Arc;

use fusewire_device::native::{Kernel, KernelInfo, NativeEntry};

use crate::comm::Communicator;
use crate::comm::attributes::LaunchAttributes;
use crate::comm::observe::OpInfo;
use crate::cpu::HostFn;
use crate::gpu::Upload;
use crate::tensor::Tensor;

/// Most 8-byte words of a kernel's parameters.
pub(super) const PARAM_WORDS: usize = 32;

/// What a prepared operation runs.
#[derive(Clone, Copy)]
pub(super) enum Entry {
    /// A kernel's native entry.
    Native(NativeEntry),
    /// A kernel of a GPU, by its description: it is looked up at the launch.
    Gpu(KernelInfo),
    /// A call of a backend.
    HandOff,
}

/// An operation with its arguments, ready to run: flat, so that it is built where it is used.
pub(in crate::comm) struct PreparedOp<'a> {
    /// What runs.
    pub(super) entry: Entry,
    /// Name of the kernel; empty for a call of a backend.
    pub(super) name: &'static str,
    /// The kernel's parameters.
    pub(super) params: [u64; PARAM_WORDS],
    pub(super) bytes: usize,
    /// A call of a backend.
    pub(super) hand_off: Option<HostFn>,
    pub(super) op_info: OpInfo,
    pub(super) tensors: [Option<&'a Tensor>; 3],
    /// What else lives as long as the launch.
    pub(super) table: Option<Arc<dyn Any + Send + Sync>>,
    /// Whether a pointer among the parameters belongs to the caller's call only.
    pub(super) borrowed: bool,
    /// The launch's own shape.
    pub(super) attributes: Option<LaunchAttributes>,
    /// A table that the stream copies to a GPU first.
    pub(super) upload: Option<Upload>,
}

impl<'a> PreparedOp<'a> {
    /// Binds `params` to `kernel`. The tensors are kept alive as long as the launch; `borrowed`
    /// says that other memory is used, which lives as long as the call only.
    #[inline(always)]
    pub(in crate::comm) fn new<P: Copy>(
        comm: &Communicator,
        kernel: &Kernel<P>,
        params: P,
        tensors: [Option<&'a Tensor>; 3],
        borrowed: bool,
        op_info: OpInfo,
    ) -> Self {
        let kernel = kernel.info();
        const { assert!(size_of::<P>() <= 8 * PARAM_WORDS && align_of::<P>() <= 8) };
        let mut words = [0u64; PARAM_WORDS];
        // SAFETY: the parameters fit, by the assertion above.
        unsafe { words.as_mut_ptr().cast::<P>().write(params) };
        let entry = if comm.inner.on_gpu.is_none() {
            let lanes = comm.inner.options.testing.lanes;
            Entry::Native(kernel.native.entry(comm.inner.isa, lanes))
        } else {
            Entry::Gpu(*kernel)
        };
        Self {
            entry,
            name: kernel.name,
            params: words,
            bytes: size_of::<P>(),
            hand_off: None,
            op_info,
            tensors,
            table: None,
            borrowed,
            attributes: None,
            upload: None,
        }
    }

    /// Keeps `table` alive as long as the launch.
    pub(in crate::comm) fn keeping(mut self, table: Arc<dyn Any + Send + Sync>) -> Self {
        self.table = Some(match self.table.take() {
            Some(before) => Arc::new((before, table)),
            None => table,
        });
        self
    }

    /// Marks the operation as one that uses memory of the caller, so that it cannot be captured.
    pub(in crate::comm) fn borrowing(mut self) -> Self {
        self.borrowed = true;
        self
    }

    /// Gives the launch a shape of its own.
    pub(in crate::comm) fn shaped(mut self, attributes: LaunchAttributes) -> Self {
        self.attributes = Some(attributes);
        self
    }

    /// Has the stream make a copy before the launch.
    pub(in crate::comm) fn uploading(mut self, upload: Option<Upload>) -> Self {
        self.upload = upload;
        self
    }

    /// As [`PreparedOp::keeping`], where with it all memory that the launch uses is kept alive.
    pub(in crate::comm) fn owning(mut self, table: Arc<dyn Any + Send + Sync>) -> Self {
        self.borrowed = false;
        self.keeping(table)
    }

    /// The same without its tensors, which the caller keeps alive by [`PreparedOp::owning`].
    pub(in crate::comm) fn detached(self) -> PreparedOp<'static> {
        PreparedOp {
            entry: self.entry,
            name: self.name,
            params: self.params,
            bytes: self.bytes,
            hand_off: self.hand_off,
            op_info: self.op_info,
            tensors: [None; 3],
            table: self.table,
            borrowed: self.borrowed,
            attributes: self.attributes,
            upload: self.upload,
        }
    }

    /// A call of a backend; `run` may be called more than once (replays).
    pub(in crate::comm) fn hand_off(
        run: HostFn,
        tensors: [Option<&'a Tensor>; 3],
        borrowed: bool,
        op_info: OpInfo,
    ) -> Self {
        Self {
            entry: Entry::HandOff,
            name: "",
            params: [0; PARAM_WORDS],
            bytes: 0,
            hand_off: Some(run),
            op_info,
            tensors,
            table: None,
            borrowed,
            attributes: None,
            upload: None,
        }
    }
}
