//! An operation bound to its kernel, ready to run.

use core::any::Any;
use std::sync::Arc;

use fusewire_device::call::Operation;
use fusewire_device::native::{Kernel, KernelInfo, NativeEntry};

use crate::comm::Communicator;
use crate::comm::attributes::LaunchAttributes;
use crate::comm::observe::{OpInfo, function_name};
use crate::comm::windows::EndFlag;
use crate::cpu::HostFn;
use crate::gpu::Upload;
use crate::plan::PlannedGrid;
use crate::tensor::{Tensor, TensorUse};
use crate::usage::{AccessList, SharedAccess};

/// Maximum number of 8-byte words of a kernel's parameters.
pub(super) const PARAM_WORDS: usize = 32;

/// Code that a prepared operation runs.
#[derive(Clone, Copy)]
pub(super) enum Entry {
    /// Native entry of a kernel.
    Native(NativeEntry),
    /// Description of a GPU kernel, which is looked up at the launch.
    Gpu(KernelInfo),
    /// Call of a backend.
    HandOff,
}

/// The window addresses among the parameters of an operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct BoundWindows {
    /// Version of the windows before the addresses were resolved.
    pub(super) version: usize,
    /// Byte offsets of the addresses in the parameters.
    pub(super) fields: &'static [usize],
}

/// The windows of an operation. They may end until it is submitted.
#[derive(Clone, Debug)]
pub(super) enum OpWindows {
    /// No window, or only addresses that the caller passed as values.
    None,
    /// Windows that the operation can do without: those in which its buffers are.
    Buffers(BoundWindows),
    /// Windows that the caller passed.
    Passed(Arc<[EndFlag]>),
}

/// An operation with its arguments, ready to run. It has no heap allocations for its parameters, so
/// it can be built in place on the caller's stack.
#[derive(Clone)]
pub(in crate::comm) struct PreparedOp<'a> {
    /// Code to run.
    pub(super) entry: Entry,
    /// Name of the kernel; empty for a call of a backend.
    pub(in crate::comm) name: &'static str,
    /// The kernel's parameters.
    pub(super) params: [u64; PARAM_WORDS],
    pub(super) bytes: usize,
    /// Call of a backend.
    pub(super) hand_off: Option<HostFn>,
    pub(super) op_info: OpInfo,
    pub(super) windows: OpWindows,
    /// Tensors that the launch keeps alive.
    pub(in crate::comm) tensors: [Option<TensorUse<'a>>; 3],
    /// Accesses to tensors, if they are not those of `tensors`.
    accesses: Option<Arc<[SharedAccess]>>,
    /// Other values that the launch keeps alive.
    pub(super) table: Option<Arc<dyn Any + Send + Sync>>,
    /// Set if a parameter points to memory that lives only as long as the caller's call.
    pub(super) borrowed: bool,
    /// Launch shape, if it is not the communicator's.
    pub(super) attributes: Option<LaunchAttributes>,
    /// Maximum numbers of blocks and threads per block that the plan uses on a GPU.
    pub(super) grid: PlannedGrid,
    /// Table that the stream copies to the GPU before the launch.
    pub(super) upload: Option<Upload>,
}

impl<'a> PreparedOp<'a> {
    /// Binds `params` to `kernel`. The launch keeps the tensors alive. `borrowed` states that the
    /// operation uses other memory, which lives only as long as the call.
    #[inline(always)]
    pub(in crate::comm) fn new<P: Copy>(
        comm: &Communicator,
        kernel: &Kernel<P>,
        params: P,
        tensors: [Option<TensorUse<'a>>; 3],
        borrowed: bool,
        op_info: OpInfo,
    ) -> Self {
        let kernel = kernel.info();
        const { assert!(size_of::<P>() <= 8 * PARAM_WORDS && align_of::<P>() <= 8) };
        let mut words = [0u64; PARAM_WORDS];
        // SAFETY: the parameters fit the size and the alignment of the words, by the assertion
        // above.
        unsafe { words.as_mut_ptr().cast::<P>().write(params) };
        let entry = if comm.inner.executor.on_gpu.is_none() {
            let lanes = comm.inner.group.options.testing.lanes;
            Entry::Native(kernel.native.entry(comm.inner.executor.isa, lanes))
        } else {
            Entry::Gpu(*kernel)
        };
        Self {
            entry,
            name: kernel.name,
            params: words,
            bytes: size_of::<P>(),
            hand_off: None,
            windows: OpWindows::None,
            op_info,
            tensors,
            accesses: None,
            table: None,
            borrowed,
            attributes: None,
            grid: PlannedGrid::ALL,
            upload: None,
        }
    }

    /// Passes to `call` the accesses to tensors that must be ordered with those of other operations
    /// and of the host. Does not return the list, because a move would copy its unused bytes.
    #[inline(always)]
    pub(super) fn with_accesses<R>(&self, call: impl FnOnce(&AccessList<'_>) -> R) -> R {
        let mut accesses = AccessList::new();
        if let Some(listed) = &self.accesses {
            accesses = AccessList::Shared(Arc::clone(listed));
        } else {
            // By reference: a copy of the array would wait for the stores that have just made it.
            for tensor in self.tensors.iter().flatten() {
                tensor.add_to(&mut accesses);
            }
        }
        call(&accesses)
    }

    /// Sets the accesses to tensors that the launch keeps alive in another way than by `tensors`.
    pub(in crate::comm) fn accessing(mut self, accesses: &AccessList<'_>) -> Self {
        self.accesses = Some(accesses.to_arc());
        self
    }

    /// Returns the name of the function that runs the operation; for a user kernel, the name of the
    /// kernel.
    pub(super) fn function_name(&self) -> &'static str {
        match self.op_info.call().operation() {
            Operation::User => self.name,
            operation => function_name(operation),
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

    /// Sets the windows that the caller passed.
    pub(in crate::comm) fn taking(mut self, windows: Arc<[EndFlag]>) -> Self {
        self.windows = OpWindows::Passed(windows);
        self
    }

    /// Adds a tensor that the launch reads and keeps alive.
    pub(in crate::comm) fn also_reading(self, tensor: &Tensor) -> Self {
        let accesses = self.with_accesses(|accesses| {
            let mut accesses = accesses.clone();
            TensorUse::Read(tensor).add_to(&mut accesses);
            accesses.to_arc()
        });
        let mut with = self.keeping(tensor.keep());
        with.accesses = Some(accesses);
        with
    }

    /// Marks the operation as one that uses memory of the caller, so that it cannot be captured.
    pub(in crate::comm) fn borrowing(mut self) -> Self {
        self.borrowed = true;
        self
    }

    /// Sets the shape of the launch.
    pub(in crate::comm) fn shaped(mut self, attributes: LaunchAttributes) -> Self {
        self.attributes = Some(attributes);
        self
    }

    /// Sets the maximum numbers of blocks and threads, of which a GPU uses as many as it has.
    #[inline(always)]
    pub(in crate::comm) fn planned(mut self, grid: PlannedGrid) -> Self {
        self.grid = grid;
        self
    }

    /// Adds a copy that the stream makes before the launch.
    pub(in crate::comm) fn uploading(mut self, upload: Option<Upload>) -> Self {
        self.upload = upload;
        self
    }

    /// Keeps `table` alive as long as the launch, and declares that all memory of the launch is now
    /// kept alive.
    pub(in crate::comm) fn owning(mut self, table: Arc<dyn Any + Send + Sync>) -> Self {
        self.borrowed = false;
        self.keeping(table)
    }

    /// Removes the tensors, which the caller must keep alive by [`PreparedOp::owning`].
    pub(in crate::comm) fn detached(self) -> PreparedOp<'static> {
        let accesses = self.with_accesses(|accesses| accesses.to_arc());
        PreparedOp {
            entry: self.entry,
            name: self.name,
            params: self.params,
            bytes: self.bytes,
            hand_off: self.hand_off,
            windows: self.windows,
            op_info: self.op_info,
            tensors: [None; 3],
            accesses: Some(accesses),
            table: self.table,
            borrowed: self.borrowed,
            attributes: self.attributes,
            grid: self.grid,
            upload: self.upload,
        }
    }

    /// Creates a call of a backend. Replays call `run` again.
    pub(in crate::comm) fn hand_off(
        run: HostFn,
        tensors: [Option<TensorUse<'a>>; 3],
        borrowed: bool,
        op_info: OpInfo,
    ) -> Self {
        Self {
            entry: Entry::HandOff,
            name: "",
            params: [0; PARAM_WORDS],
            bytes: 0,
            hand_off: Some(run),
            windows: OpWindows::None,
            op_info,
            tensors,
            accesses: None,
            table: None,
            borrowed,
            attributes: None,
            grid: PlannedGrid::ALL,
            upload: None,
        }
    }
}
