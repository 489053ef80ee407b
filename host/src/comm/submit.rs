//! From a checked call to a launch: on the caller's thread, on a stream, or into a graph.

use core::any::Any;
use core::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use fusewire_device::arch::SHARED_BYTES;
use fusewire_device::native::{Kernel, KernelInfo};
use fusewire_device::session::{Call, Operation};

use super::work::Work;
use super::{Communicator, Inner};
use crate::cpu::{BlockOrder, Event, Grid, Item, Launch, LaunchOwner, MAX_PARAM_BYTES};
use crate::tensor::Tensor;
use crate::{Error, Result};

/// A kernel instance with its parameters, ready to run.
pub(super) struct Prepared<'a> {
    entry: fusewire_device::native::NativeEntry,
    params: [u64; 20],
    bytes: usize,
    tensors: [Option<&'a Tensor>; 3],
    /// Whether a pointer among the parameters belongs to the caller's call only.
    borrowed: bool,
}

impl<'a> Prepared<'a> {
    /// Binds `params` to `kernel`. The tensors are kept alive as long as the launch; `borrowed` says that
    /// other memory is used, which lives as long as the call only.
    #[inline]
    pub(super) fn new<P: Copy>(
        comm: &Communicator,
        kernel: &Kernel<P>,
        params: P,
        tensors: [Option<&'a Tensor>; 3],
        borrowed: bool,
    ) -> Self {
        Self::from_parts(comm, kernel.info(), params, tensors, borrowed)
    }

    /// As [`Prepared::new`], for a kernel whose parameter struct has the layout of `P`.
    #[inline]
    pub(super) fn from_parts<P: Copy>(
        comm: &Communicator,
        kernel: &KernelInfo,
        params: P,
        tensors: [Option<&'a Tensor>; 3],
        borrowed: bool,
    ) -> Self {
        const { assert!(size_of::<P>() <= 160 && align_of::<P>() <= 8) };
        let mut words = [0u64; 20];
        // SAFETY: the parameters fit, by the assertion above.
        unsafe { words.as_mut_ptr().cast::<P>().write(params) };
        Self {
            entry: kernel
                .native
                .entry(comm.inner.isa, comm.inner.options.lanes),
            params: words,
            bytes: size_of::<P>(),
            tensors,
            borrowed,
        }
    }
}

impl LaunchOwner for Inner {
    fn before(&self) -> Result<()> {
        Ok(())
    }

    fn after(&self) -> Result<()> {
        self.check()
    }
}

impl Communicator {
    /// Runs a prepared kernel and waits for its end.
    pub(super) fn run(&self, prepared: &Prepared<'_>) -> Result<()> {
        self.inner.check()?;
        self.chain()?;
        if self.inner.options.lanes == 1 && self.inner.options.blocks == 1 {
            // SAFETY: the parameters belong to the entry (`Prepared::new`); their pointers are
            // valid during this call.
            let direct = || unsafe {
                crate::cpu::run_single(prepared.entry, prepared.params.as_ptr().cast())?;
                self.inner.check()
            };
            if prepared.borrowed && self.stream.is_capturing() {
                return Err(capture_of_slices());
            }
            return self.stream.run_or_enqueue(direct, || self.node(prepared));
        }
        if prepared.borrowed && self.stream.is_capturing() {
            return Err(capture_of_slices());
        }
        let launch = self.launch_of(prepared)?;
        self.stream.run(&launch)
    }

    /// Enqueues a prepared kernel.
    pub(super) fn enqueue(&self, prepared: &Prepared<'_>) -> Result<Work> {
        self.inner.check()?;
        self.chain()?;
        let ticket = self
            .stream
            .enqueue(Item::Launch(self.launch_of(prepared)?))?;
        Ok(Work::new(self.stream.clone(), ticket))
    }

    fn node(&self, prepared: &Prepared<'_>) -> crate::cpu::Node {
        // One block of one lane is within every limit.
        match self.launch_of(prepared) {
            Ok(launch) => crate::cpu::Node::Launch(launch),
            Err(error) => crate::cpu::Node::Host(Arc::new(move || Err(error.clone()))),
        }
    }

    fn launch_of(&self, prepared: &Prepared<'_>) -> Result<Launch> {
        const { assert!(MAX_PARAM_BYTES >= 160) };
        let options = &self.inner.options;
        let order = if options.blocks > 1 {
            BlockOrder::Concurrent
        } else {
            BlockOrder::Sequential
        };
        let grid = Grid {
            blocks: options.blocks,
            lanes: options.lanes,
            shared_bytes: SHARED_BYTES as u32,
            order,
        };
        let params = &bytemuck::bytes_of(&prepared.params)[..prepared.bytes];
        let keep = prepared
            .tensors
            .map(|tensor| tensor.map(|tensor| tensor.keep() as Arc<dyn Any + Send + Sync>));
        // SAFETY: the parameters belong to the entry; tensors are kept alive, and for memory
        // without a tensor the caller waits, or has promised (captures).
        let launch = unsafe { Launch::new(prepared.entry, params, grid)? };
        Ok(launch.owned_by(Arc::clone(&self.inner) as _).keeping(keep))
    }

    /// Makes this launch follow the communicator's last one, where that was on another stream.
    fn chain(&self) -> Result<()> {
        let id = self.stream.id();
        if self.inner.last_stream.load(Ordering::Relaxed) == id || self.stream.is_capturing() {
            return Ok(());
        }
        let mut last = self
            .inner
            .order
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((stream, event)) = &*last
            && stream.id() != id
            && !stream.is_capturing()
        {
            stream.record(event)?;
            self.stream.wait_event(event)?;
        }
        *last = Some((self.stream.clone(), Event::new()));
        self.inner.last_stream.store(id, Ordering::Relaxed);
        Ok(())
    }

    /// The call word of a kernel of the user's: `agreed` is whatever must be equal on all ranks. Ranks
    /// that launch with different words are told so.
    pub fn call_word(&self, operation: Operation, agreed: u64) -> u64 {
        Call::new(operation, 0, 0, 0, 0xffff, agreed).0
    }

    /// Launches a kernel of the user's on the communicator's stream and waits for its end. The kernel's first
    /// argument is [`Communicator::constants`]; `tensors` are kept alive as long as the launch (a graph may replay it).
    ///
    /// # Safety
    /// `params` must hold valid pointers, and the kernel must follow the rules between ranks.
    ///
    /// # Errors
    /// The communicator's failure; [`Error::InvalidArgument`] for more than 160 bytes of parameters.
    pub unsafe fn launch<P: Copy>(
        &self,
        kernel: &Kernel<P>,
        params: P,
        tensors: [Option<&Tensor>; 3],
    ) -> Result<()> {
        self.run(&Prepared::new(self, kernel, params, tensors, false))
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
        self.enqueue(&Prepared::new(self, kernel, params, tensors, false))
    }
}

/// The error for a bad argument of `operation`.
pub(super) fn invalid(operation: &'static str, detail: String) -> Error {
    Error::InvalidArgument { operation, detail }
}

fn capture_of_slices() -> Error {
    Error::CaptureState {
        detail: "a graph outlives the call: operations on slices can't be captured: use tensors, and for \
                 all_reduce_rms_norm its _async form"
            .to_owned(),
    }
}
