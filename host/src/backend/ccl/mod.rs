//! Backends that use NCCL, NCCLX, RCCL or RCCLX. The library is opened at run time.
//!
//! All four libraries have NCCL's C interface, which this adapter calls directly. Operations that a
//! library lacks (all_gather_v, scatter, gather, and all_to_all in old versions) are composed from
//! grouped sends and receives. The timeout limits a whole call on the CPU, but only the enqueueing
//! of a call on a GPU. After the timeout, a thread aborts the library's communicator, which makes
//! the call return.

mod create;
mod guard;
mod map;

use core::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fusewire_ccl_sys::sys::{ncclFloat32, ncclInProgress, ncclSuccess};
use fusewire_ccl_sys::{Comm, Kind, Memory, RedOp, Stream};
use fusewire_device::DType;

pub use self::create::adopt_nccl;
pub(super) use self::create::{NAMES, create};
use self::guard::Guard;
use super::{Backend, CallArgs, ONLY_KERNELS, backend_error, compose};
use crate::collective::{Op, Operands};
use crate::{Error, Result};

/// Communicator of one of the four libraries.
#[derive(Debug)]
struct Ccl {
    comm: Arc<Comm>,
    guard: Guard,
    /// Messages of the open group, if a group is open.
    group: Mutex<Option<Vec<Message>>>,
    /// Element that a barrier reduces, if the library cannot access host memory.
    word: OnceLock<Memory>,
    /// Timeout of the calls that have no [`CallArgs`].
    timeout: core::time::Duration,
}

/// Send or receive.
#[derive(Clone, Copy, Debug)]
struct Message {
    is_send: bool,
    at: usize,
    count: usize,
    dtype: i32,
    peer: u32,
    args: CallArgs,
}

const fn stream(args: &CallArgs) -> Stream {
    args.stream as Stream
}

impl Ccl {
    fn new(comm: Comm, timeout: core::time::Duration) -> Result<Self> {
        let comm = Arc::new(comm);
        let guard = Guard::new(Arc::clone(&comm))
            .map_err(|error| backend_error(name_of(&comm), "init", error.to_string()))?;
        Ok(Self {
            comm,
            guard,
            group: Mutex::default(),
            word: OnceLock::new(),
            timeout,
        })
    }

    fn group(&self) -> MutexGuard<'_, Option<Vec<Message>>> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn refused(&self, operation: &'static str, detail: impl Into<String>) -> Error {
        backend_error(self.name(), operation, detail)
    }

    /// Runs a library call with a timeout. After a failure, aborts the library's communicator, so
    /// that its peers do not wait for this rank.
    fn call<R>(
        &self,
        operation: &'static str,
        timeout: core::time::Duration,
        call: impl FnOnce(&Comm) -> fusewire_ccl_sys::Result<R>,
    ) -> Result<R> {
        let (result, expired) = self.guard.during(timeout, || call(&self.comm));
        if expired {
            let said = result
                .err()
                .map_or(String::new(), |error| format!(" ({error})"));
            let detail = format!("timed out after {timeout:?}; the communicator was aborted{said}");
            return Err(self.refused(operation, detail));
        }
        result.map_err(|error| {
            if self.guard.was_aborted() {
                let detail = format!("the communicator was aborted ({error})");
                return self.refused(operation, detail);
            }
            if matches!(error, fusewire_ccl_sys::Error::Call(_)) {
                self.guard.abort();
            }
            self.refused(operation, error.to_string())
        })
    }

    /// Runs a library call that reduces, with a timeout. Passes the library's type and reduction to
    /// `call`.
    fn reduction(
        &self,
        op: &Op,
        operands: &Operands<'_>,
        args: &CallArgs,
        call: impl FnOnce(&Comm, i32, RedOp) -> fusewire_ccl_sys::Result<()>,
    ) -> Result<()> {
        let (dtype, reduce) = (self.data_type(op)?, operands.reduction());
        if !self.supports(op) {
            let of = op.dtype().map_or("elements", DType::name);
            return Err(self.refused(op.name(), format!("no {} of {of}", reduce.code().name())));
        }
        self.call(op.name(), args.timeout, |comm| {
            if let Some(reduction) = map::reduction(reduce.code()) {
                return call(comm, dtype, reduction);
            }
            let scalar = map::scalar(reduce, op.dtype().unwrap_or(DType::F32));
            // SAFETY: `scalar` has eight readable bytes, is aligned to eight bytes, and starts with
            // an element of `dtype`. The factor is one element of `dtype`, and stays valid until
            // the operation is complete, like the other operands of `execute`.
            let red = unsafe {
                match operands.factor() {
                    Some(factor) => comm.pre_mul_sum_on_device(factor.as_ptr().cast(), dtype)?,
                    None => comm.pre_mul_sum((&raw const scalar).cast(), dtype)?,
                }
            };
            let called = call(comm, dtype, red);
            // The library keeps the data that its enqueued calls need, so the reduction can be
            // freed now. After an abort, `destroy_op` returns an error without calling the library.
            let freed = comm.destroy_op(red);
            called.and(freed)
        })
    }

    /// Runs a library call that moves elements, with a timeout. Passes the library's type to
    /// `call`.
    fn movement(
        &self,
        op: &Op,
        args: &CallArgs,
        call: impl FnOnce(&Comm, i32) -> fusewire_ccl_sys::Result<()>,
    ) -> Result<()> {
        let dtype = self.data_type(op)?;
        self.call(op.name(), args.timeout, |comm| call(comm, dtype))
    }

    fn message(&self, message: Message) -> Result<()> {
        if let Some(messages) = &mut *self.group() {
            messages.push(message);
            return Ok(());
        }
        let operation = if message.is_send { "send" } else { "recv" };
        self.call(operation, message.args.timeout, |comm| {
            // SAFETY: the callers of `execute` guarantee that the buffers are valid until
            // the operation completes.
            unsafe { Self::issue(comm, &message) }
        })
    }

    /// # Safety
    /// The message's buffer is valid until the stream has completed the operation.
    unsafe fn issue(comm: &Comm, message: &Message) -> fusewire_ccl_sys::Result<()> {
        let Message {
            at,
            count,
            dtype,
            args,
            ..
        } = *message;
        let (peer, stream) = (message.peer as usize, stream(&args));
        // SAFETY: the caller guarantees that the message's buffer is valid. The message's stream is
        // live.
        unsafe {
            if message.is_send {
                comm.send(at as *const c_void, count, dtype, peer, stream)
            } else {
                comm.recv(at as *mut c_void, count, dtype, peer, stream)
            }
        }
    }

    /// Returns the library's type of the operation's elements.
    fn data_type(&self, op: &Op) -> Result<i32> {
        let Some(dtype) = op.dtype() else {
            return Ok(ncclFloat32);
        };
        map::data_type(&self.comm.library(), dtype)
            .ok_or_else(|| self.refused(op.name(), format!("no {}", dtype.name())))
    }

    /// Reduces one element, which completes only after all ranks have called this method.
    fn barrier(&self, args: &CallArgs) -> Result<()> {
        let library = self.comm.library();
        let mut host = [0f32];
        let word: *mut c_void = if library.uses_host_memory() {
            host.as_mut_ptr().cast()
        } else if let Some(memory) = self.word.get() {
            memory.as_ptr()
        } else {
            // The memory need not be initialized, because the barrier ignores the sum.
            let memory = Memory::new(library, size_of::<f32>())
                .map_err(|error| self.refused("barrier", error.to_string()))?;
            self.word.get_or_init(|| memory).as_ptr()
        };
        // SAFETY: `word` points to one f32 in memory that the library can access, and all_reduce
        // may run in place. If the f32 is in host memory, the call blocks, so the f32 outlives the
        // operation.
        self.call("barrier", args.timeout, |comm| unsafe {
            comm.all_reduce(word, word, 1, ncclFloat32, RedOp::SUM, stream(args))
        })
    }
}

/// Returns the name of the backend that uses the library of `comm`.
fn name_of(comm: &Comm) -> &'static str {
    match comm.library().kind() {
        Kind::Nccl => "nccl",
        Kind::Ncclx => "ncclx",
        Kind::Rccl => "rccl",
        Kind::Rcclx => "rcclx",
    }
}

impl Backend for Ccl {
    fn name(&self) -> &str {
        name_of(&self.comm)
    }

    fn version(&self) -> String {
        self.comm.library().version().to_string()
    }

    fn rank(&self) -> u32 {
        self.comm.rank() as u32
    }

    fn size(&self) -> u32 {
        self.comm.count() as u32
    }

    fn supports(&self, op: &Op) -> bool {
        if op.is_fused() {
            return false;
        }
        match (op.dtype(), op.reduction()) {
            (Some(dtype), Some(code)) => map::reduces(&self.comm.library(), dtype, code),
            _ => true,
        }
    }

    fn reads_factor(&self) -> bool {
        true
    }

    fn group_start(&self) -> Result<()> {
        let mut group = self.group();
        if group.is_some() {
            return Err(self.refused("group_start", "a group is open already"));
        }
        *group = Some(Vec::new());
        Ok(())
    }

    /// In the library, a group belongs to one thread. This method therefore starts the library's
    /// group, issues all messages and ends the group.
    fn group_end(&self) -> Result<()> {
        let messages = self.group().take().unwrap_or_default();
        let Some(timeout) = messages.iter().map(|message| message.args.timeout).max() else {
            return Ok(());
        };
        self.call("group_end", timeout, |comm| {
            let group = comm.library().group()?;
            for message in &messages {
                // SAFETY: the callers of `execute` guarantee that the buffers are valid
                // until the group has completed.
                unsafe { Self::issue(comm, message)? };
            }
            group.end()
        })
    }

    unsafe fn execute(&self, op: &Op, operands: &Operands<'_>, args: &CallArgs) -> Result<()> {
        let from = operands.input().as_ptr().cast();
        let to = operands.output().as_mut_ptr().cast();
        let stream = stream(args);
        // SAFETY (of all calls of the library): the preconditions of `Backend::execute` include
        // those of the function of the same name.
        match *op {
            Op::AllReduce { count, .. } => {
                // SAFETY: as above.
                self.reduction(op, operands, args, |comm, dtype, red| unsafe {
                    comm.all_reduce(from, to, count, dtype, red, stream)
                })
            }
            Op::Reduce { count, root, .. } => {
                let root = root as usize;
                let to = match root == self.comm.rank() {
                    true => to,
                    // The library accepts a null output there.
                    false => core::ptr::null_mut(),
                };
                // SAFETY: as above.
                self.reduction(op, operands, args, |comm, dtype, red| unsafe {
                    comm.reduce(from, to, count, dtype, red, root, stream)
                })
            }
            Op::ReduceScatter { count, .. } => {
                // SAFETY: as above.
                self.reduction(op, operands, args, |comm, dtype, red| unsafe {
                    comm.reduce_scatter(from, to, count, dtype, red, stream)
                })
            }
            Op::Broadcast { count, root, .. } => {
                // SAFETY: as above.
                self.movement(op, args, |comm, dtype| unsafe {
                    comm.broadcast(from, to, count, dtype, root as usize, stream)
                })
            }
            Op::AllGather { count, .. } => {
                // SAFETY: as above.
                self.movement(op, args, |comm, dtype| unsafe {
                    comm.all_gather(from, to, count, dtype, stream)
                })
            }
            Op::AllToAll { count, .. } if self.comm.library().features().has("ncclAlltoAll") => {
                // SAFETY: as above.
                self.movement(op, args, |comm, dtype| unsafe {
                    comm.all_to_all(from, to, count, dtype, stream)
                })
            }
            Op::AllToAll { .. }
            | Op::AllToAllV { .. }
            | Op::AllGatherV { .. }
            | Op::Scatter { .. }
            | Op::Gather { .. } => {
                // SAFETY: this method and the function have the same preconditions.
                unsafe { compose::by_messages(self, op, operands, args) }
            }
            Op::Send { count, peer, .. } => self.message(Message {
                is_send: true,
                at: from as usize,
                count,
                dtype: self.data_type(op)?,
                peer,
                args: *args,
            }),
            Op::Recv { count, peer, .. } => self.message(Message {
                is_send: false,
                at: to as usize,
                count,
                dtype: self.data_type(op)?,
                peer,
                args: *args,
            }),
            Op::Barrier => self.barrier(args),
            Op::AllGatherWithFlags { .. }
            | Op::ReduceScatterOnArrival { .. }
            | Op::AllReduceNorm { .. }
            | Op::ReduceScatterNorm { .. }
            | Op::VocabParallel { .. } => Err(self.refused(op.name(), ONLY_KERNELS)),
        }
    }

    unsafe fn register(&self, at: *mut u8, bytes: usize) -> Result<u64> {
        if !self.comm.library().features().has("ncclCommRegister") {
            return Ok(0);
        }
        // SAFETY: the caller of `Backend::register` guarantees that the memory stays valid until it
        // is deregistered.
        self.call("register", self.timeout, |comm| unsafe {
            comm.register(at.cast(), bytes)
        })
        .map(|handle| handle as u64)
    }

    fn deregister(&self, handle: u64) -> Result<()> {
        if handle == 0 {
            return Ok(());
        }
        // SAFETY: `handle` is a result of `register`, and the caller deregisters it only once.
        self.call("deregister", self.timeout, |comm| unsafe {
            comm.deregister(handle as *mut c_void)
        })
    }

    fn split(&self, ranks: &[u32]) -> Result<Option<Arc<dyn Backend>>> {
        if !self.comm.library().features().has("ncclCommSplit") {
            return Ok(None);
        }
        let key = ranks.iter().position(|rank| *rank == self.rank());
        let colour = ranks.iter().min().map(|least| *least as usize);
        let (Some(key), colour) = (key.or(colour.is_none().then_some(0)), colour) else {
            return Err(self.refused("split", "the list lacks this rank"));
        };
        let part = self.call("split", self.timeout, |comm| {
            comm.split(colour, key as core::ffi::c_int)
        })?;
        let Some(part) = part else {
            return Ok(None);
        };
        Ok(Some(Arc::new(Self::new(part, self.timeout)?)))
    }

    fn abort(&self) {
        self.guard.abort();
    }

    fn async_error(&self) -> Result<()> {
        let error = match self.comm.async_error() {
            Ok(code) if code == ncclSuccess || code == ncclInProgress => return Ok(()),
            _ if self.guard.was_aborted() => "the communicator was aborted".to_owned(),
            Ok(code) => {
                let text = self.comm.library().error_text(code);
                format!("the library reports {text} (code {code})")
            }
            Err(error) => error.to_string(),
        };
        Err(self.refused("async_error", error))
    }
}
