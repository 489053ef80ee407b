//! Registration of memory of all ranks as a window, and its removal.

use std::sync::{Mutex, MutexGuard, PoisonError};

use fusewire_device::DType;

use crate::comm::Communicator;
use crate::options::ReduceOp;
use crate::stream::Stream;
use crate::tensor::Tensor;
use crate::{Error, Result};

/// A registered tensor, from [`Communicator::tensor_register`]. Dropping the value does not end the
/// registration.
#[derive(Debug)]
pub struct Registration {
    window: Option<usize>,
    handle: u64,
    /// Communicator that the tensor is registered with.
    identity: u64,
    /// The tensor, until the registration ends.
    tensor: Mutex<Option<Tensor>>,
}

impl Registration {
    fn lock(&self) -> MutexGuard<'_, Option<Tensor>> {
        self.tensor.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Communicator {
    /// Registers `tensor`, which has the same type and length on all ranks, so that collectives
    /// work on it without a copy. All ranks must call this together. The registration lasts until
    /// [`Communicator::tensor_deregister`].
    ///
    /// # Errors
    /// The errors of [`Communicator::new_window`].
    pub fn tensor_register(&self, tensor: &Tensor) -> Result<Registration> {
        self.inner.check()?;
        if let Some(backend) = &self.inner.executor.backend {
            let bytes = tensor.len() * tensor.dtype().size();
            // SAFETY: the registration keeps the tensor alive.
            let handle = unsafe { backend.register(tensor.as_ptr(), bytes)? };
            return Ok(Registration {
                window: None,
                handle,
                identity: self.inner.group.identity,
                tensor: Mutex::new(Some(tensor.clone())),
            });
        }
        let args = WindowArgs {
            dtype: tensor.dtype(),
            len: tensor.len(),
            numbers: [0; 4],
        };
        self.outside_capture()?
            .agree_on_window(&args, Some(tensor), PeerAccess::Read)?;
        let call = self.host_call("tensor_register");
        let windows = call.add_windows(Ok(vec![tensor.memory()]), &[args.bytes()]);
        let windows = call.agreed(windows)?;
        let id = windows.id(0);
        windows.publish();
        self.keep_owner(id, tensor);
        Ok(Registration {
            window: Some(id),
            handle: 0,
            identity: self.inner.group.identity,
            tensor: Mutex::new(Some(tensor.clone())),
        })
    }

    /// Ends a registration. All ranks must call this together. Waits until no operation of any rank
    /// uses the memory.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the registration belongs to another communicator or has ended;
    /// [`Error::CaptureState`] while the communicator's stream is capturing. The call has no effect
    /// then, and can be repeated with a registration that has not ended. The communicator's
    /// failure: peers may then still use the memory, and it stays registered. Any other error of
    /// this call fails the communicator, because the other ranks may have ended the registration.
    pub fn tensor_deregister(&self, registration: &Registration) -> Result<()> {
        let refused = |detail: &str| {
            Err(Error::InvalidArgument {
                operation: "tensor_deregister",
                detail: detail.to_owned(),
            })
        };
        if registration.identity != self.inner.group.identity {
            return refused("the tensor is registered with another communicator");
        }
        // Taken first, so that a concurrent call does not end another window of the same number.
        let Some(tensor) = registration.lock().take() else {
            return refused("the registration has already ended");
        };
        let ended = match (&self.inner.executor.backend, registration.window) {
            (Some(backend), _) => backend.deregister(registration.handle),
            (None, Some(id)) => self.end_windows(&[id]),
            (None, None) => Ok(()),
        };
        if ended.is_err() {
            *registration.lock() = Some(tensor);
        }
        ended
    }

    /// Returns this communicator, on a new stream if its own is capturing, for operations that the
    /// graph must not contain.
    pub(in crate::comm) fn outside_capture(&self) -> Result<Self> {
        match self.stream().is_capturing() {
            true => Ok(self.on(&Stream::on_device(self.device())?)),
            false => Ok(self.clone()),
        }
    }

    /// Compares the words `mine`, which must be equal on all ranks, and returns the words `local`
    /// of each rank. `describe` formats `mine` for a message. All ranks must call this together.
    pub(in crate::comm) fn agree<const N: usize>(
        &self,
        operation: &str,
        local: [u64; N],
        mine: &[u64],
        describe: impl Fn(&[u64]) -> String,
    ) -> Result<Vec<[u64; N]>> {
        let sent = [mine, &local].concat();
        let mut all = vec![0u64; sent.len() * self.size() as usize];
        self.all_gather_single(&mut all, sent.as_slice())?;
        let mut locals = Vec::new();
        for (rank, words) in all.chunks(sent.len()).enumerate() {
            let (theirs, local) = words.split_at(mine.len());
            let mut words = [0; N];
            words.copy_from_slice(local);
            locals.push(words);
            if theirs != mine {
                return Err(self.inner.group.error(format!(
                    "{operation}: rank {rank} passes {}, rank {} {}: they must be equal",
                    describe(theirs),
                    self.rank(),
                    describe(mine)
                )));
            }
        }
        Ok(locals)
    }

    /// Compares the arguments of a new window, and checks that every rank can use the memory of the
    /// others. A rank that could not allocate its tensor passes `None`. All ranks must call this
    /// together.
    pub(super) fn agree_on_window(
        &self,
        args: &WindowArgs,
        tensor: Option<&Tensor>,
        access: PeerAccess,
    ) -> Result<()> {
        let [signals, counters, barriers, cells] = args.numbers.map(u64::from);
        let mine = [
            args.dtype as u64,
            args.len as u64,
            signals,
            counters,
            barriers,
            cells,
        ];
        // The kind of memory may differ between ranks.
        let coarse = tensor.is_some_and(|tensor| self.is_coarse(&tensor.memory().0));
        let all = self.agree("a window", [u64::from(coarse)], &mine, |words| {
            format!(
                "{} {} with {} signals, {} counters, {} barriers and {} cells",
                words[1],
                dtype_name(words[0]),
                words[2],
                words[3],
                words[4],
                words[5]
            )
        })?;
        if cells > 0 {
            self.check_atomics()?;
        }
        let coarse = all.iter().position(|[coarse]| *coarse != 0);
        if let (PeerAccess::Write, Some(rank)) = (access, coarse) {
            return Err(Error::InvalidArgument {
                operation: "new_window",
                detail: format!(
                    "the tensor of rank {rank} was allocated outside Fusewire and may be \
                     coarse-grained memory, in which the owner's GPU may read stale values after a \
                     peer's put; allocate it with Communicator::alloc or alloc_window"
                ),
            });
        }
        Ok(())
    }

    /// Keeps foreign memory of `tensor` alive as long as window `id`.
    pub(super) fn keep_owner(&self, id: usize, tensor: &Tensor) {
        if let Some(owner) = tensor.foreign_owner() {
            self.inner.windows.keep_owner(id, owner);
        }
    }

    /// Fails while the stream is capturing, because a graph cannot contain the end of a window.
    pub(super) fn check_window_can_end(&self) -> Result<()> {
        match self.stream().recording()?.is_some() {
            true => Err(Error::CaptureState {
                detail: "a window cannot end while its communicator's stream is capturing"
                    .to_owned(),
            }),
            false => Ok(()),
        }
    }

    /// Ends windows once no rank uses them.
    pub(super) fn end_windows(&self, ids: &[usize]) -> Result<()> {
        self.check_window_can_end()?;
        // No rank removes a window before all ranks have entered the barrier, so a rank whose
        // barrier is refused can repeat the call.
        self.barrier()?;
        // Stops the communicator, because the other ranks may have removed the windows, and the
        // numbers of later windows would then differ.
        self.try_end_windows(ids)
            .inspect_err(|error| self.inner.stop(error.clone()))
    }

    /// Ends windows after a barrier.
    fn try_end_windows(&self, ids: &[usize]) -> Result<()> {
        // A hook of the barrier, or another thread, may have enqueued operations on the memory.
        // None of them is left after the second barrier, which follows them on every rank.
        self.retire_windows(ids)?;
        // This is also the second barrier. It agrees on the numbers that no graph has.
        let windows = &self.inner.windows;
        let captured = ids.iter().map(|id| u32::from(windows.is_captured(*id)));
        let mut captured: Vec<u32> = captured.collect();
        self.all_reduce(&mut captured, ReduceOp::Max)?;
        for (id, captured) in ids.iter().zip(captured) {
            windows.remove(*id, captured == 0);
        }
        Ok(())
    }
}

/// Arguments of a new window, which must be equal on all ranks.
pub(super) struct WindowArgs {
    pub(super) dtype: DType,
    pub(super) len: usize,
    /// Numbers of signals, counters, barriers and cells.
    pub(super) numbers: [u32; 4],
}

impl WindowArgs {
    /// Returns the bytes of each rank's part.
    pub(super) fn bytes(&self) -> u64 {
        // A rank cannot allocate a part whose size overflows, and passes its error.
        (self.len as u64).saturating_mul(self.dtype.size() as u64)
    }
}

/// Accesses of peers to a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerAccess {
    /// Collectives read inputs, and write results if the owner's memory permits it.
    Read,
    /// Puts and signals write the window.
    Write,
}

/// Returns the name of the element type with this code.
pub(super) fn dtype_name(code: u64) -> &'static str {
    DType::from_code(code as u8).map_or("unknown", DType::name)
}
