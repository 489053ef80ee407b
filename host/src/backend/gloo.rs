//! Gloo: collectives between hosts over TCP, on CPU memory.
//!
//! Gloo has no average, no scaled sum and no reduce_scatter, so this module composes these
//! operations. Gloo reduces in a ring, so the order in which an element's contributions are added
//! depends on the element's index. The results are bitwise identical on all ranks, but may differ
//! from a reduction in rank order.

use core::time::Duration;
use std::sync::{Arc, Mutex, PoisonError};

use fusewire_device::element::{Number, ReductionCode};
use fusewire_device::{Bf16, DType, Element, F16};
use fusewire_gloo_sys as sys;

use super::interface::device;
use super::{Backend, CallArgs, ONLY_KERNELS, Reach, Setup, backend_error, compose};
use crate::Result;
use crate::collective::{Op, Operands};
use crate::options::{Options, ReduceOp};
use crate::store::Store;

const NAME: &str = "gloo";

/// Communicator that uses Gloo.
#[derive(Debug)]
pub(crate) struct Gloo {
    context: sys::Context,
    /// Messages of the open group, if a group is open.
    group: Mutex<Option<Vec<Message>>>,
}

/// Type of the elements and timeout of a call.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GlooCall {
    pub(crate) dtype: DType,
    pub(crate) timeout: Duration,
}

impl GlooCall {
    /// Creates the arguments of a call on the elements of `op`.
    pub(crate) fn new(op: &Op, args: &CallArgs) -> Self {
        Self {
            dtype: op.dtype().unwrap_or(DType::U8),
            timeout: args.timeout,
        }
    }

    /// Returns the size of `count` elements in bytes.
    pub(crate) const fn bytes(&self, count: usize) -> usize {
        count * self.dtype.size()
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Message {
    pub(crate) is_send: bool,
    pub(crate) at: usize,
    pub(crate) bytes: usize,
    pub(crate) peer: u32,
    pub(crate) timeout: Duration,
}

impl Message {
    /// Creates the message of a send.
    pub(crate) fn send(op: &Op, from: *const u8, peer: u32, args: &CallArgs) -> Self {
        Self {
            is_send: true,
            at: from as usize,
            bytes: op.bytes(),
            peer,
            timeout: args.timeout,
        }
    }

    /// Creates the message of a receive.
    pub(crate) fn recv(op: &Op, to: *mut u8, peer: u32, args: &CallArgs) -> Self {
        Self {
            is_send: false,
            ..Self::send(op, to, peer, args)
        }
    }
}

/// Implements Gloo's rendezvous interface on the communicator's store.
struct Rendezvous {
    store: Arc<dyn Store>,
    timeout: Duration,
}

impl sys::Rendezvous for Rendezvous {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.store
            .set(key, value)
            .map_err(|error| error.to_string())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, String> {
        self.store
            .get(key, self.timeout)
            .map_err(|error| error.to_string())
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<(), String> {
        self.store
            .wait(keys, timeout.min(self.timeout))
            .map_err(|error| error.to_string())
    }
}

pub(crate) fn create(setup: &Setup) -> Result<Arc<dyn Backend>> {
    if setup.device.is_gpu() {
        return Err(backend_error(
            "gloo",
            "create",
            format!(
                "it works on host memory, not on {}: use nccl or rccl there, or device cpu",
                setup.device
            ),
        ));
    }
    Ok(Arc::new(Gloo::connect(
        setup.rank,
        setup.size,
        Arc::clone(&setup.store),
        &setup.options,
        setup.reach,
    )?))
}

/// Returns Gloo's type for a reduction of `dtype`. Gloo has no u32. i32 is used instead, because
/// sums, products and bit operations give the same bits for both types.
pub(crate) const fn data_type(dtype: DType, code: ReductionCode) -> Option<sys::DataType> {
    Some(match dtype {
        DType::U32 if !matches!(code, ReductionCode::Min | ReductionCode::Max) => {
            sys::DataType::I32
        }
        DType::F32 => sys::DataType::F32,
        DType::F64 => sys::DataType::F64,
        DType::F16 => sys::DataType::F16,
        DType::Bf16 => sys::DataType::Bf16,
        DType::I8 => sys::DataType::I8,
        DType::U8 => sys::DataType::U8,
        DType::I32 => sys::DataType::I32,
        DType::I64 => sys::DataType::I64,
        DType::U64 => sys::DataType::U64,
        _ => return None,
    })
}

/// Returns Gloo's reduction for `code`. An average becomes a sum followed by a local division. A
/// scaled sum becomes a sum preceded by a local multiplication.
const fn reduction(code: ReductionCode) -> sys::ReduceOp {
    match code {
        ReductionCode::Product => sys::ReduceOp::Product,
        ReductionCode::Min => sys::ReduceOp::Min,
        ReductionCode::Max => sys::ReduceOp::Max,
        ReductionCode::BitAnd => sys::ReduceOp::BitAnd,
        ReductionCode::BitOr => sys::ReduceOp::BitOr,
        ReductionCode::BitXor => sys::ReduceOp::BitXor,
        _ => sys::ReduceOp::Sum,
    }
}

/// Multiplies `count` elements at `from` by a factor, or divides them by the number of ranks, and
/// stores the results at `to`.
///
/// # Safety
/// `from` is readable and `to` is writable for `count` elements of `dtype`. `from` and `to` may be
/// equal.
pub(crate) unsafe fn scale(from: *const u8, to: *mut u8, count: usize, dtype: DType, by: Scale) {
    macro_rules! each {
        ($t:ty) => {
            for at in 0..count {
                // SAFETY: `at < count`, and both buffers hold `count` elements of this type.
                unsafe {
                    let value = from.cast::<$t>().add(at).read();
                    let scaled = match by {
                        Scale::Times(op) => {
                            let factor = Number::from_scalar(op.scalar(dtype));
                            value.widen().mul(factor)
                        }
                        Scale::Over(ranks) => value.widen().div_count(ranks),
                    };
                    to.cast::<$t>()
                        .add(at)
                        .write(<$t as Element>::narrow(scaled));
                }
            }
        };
    }
    match dtype {
        DType::F32 => each!(f32),
        DType::F64 => each!(f64),
        DType::F16 => each!(F16),
        DType::Bf16 => each!(Bf16),
        DType::I8 => each!(i8),
        DType::U8 => each!(u8),
        DType::I32 => each!(i32),
        DType::U32 => each!(u32),
        DType::I64 => each!(i64),
        DType::U64 => each!(u64),
        _ => {}
    }
}

#[derive(Clone, Copy)]
pub(crate) enum Scale {
    Times(ReduceOp),
    Over(u32),
}

impl Gloo {
    /// Connects rank `rank` with the other `size - 1` ranks. The rendezvous uses `store`.
    pub(crate) fn connect(
        rank: u32,
        size: u32,
        store: Arc<dyn Store>,
        options: &Options,
        reach: Reach,
    ) -> Result<Self> {
        let (device, timeout) = (device(&options.hints, reach), options.timeout);
        let store = Box::new(Rendezvous { store, timeout });
        let context = sys::Context::new(rank as usize, size as usize, timeout, &device, store)
            .map_err(|error| {
                let at = format!(
                    "{error} (listening at {device:?}; set TORCHCOMM_GLOO_HOSTNAME or \
                     TORCHCOMM_GLOO_INTERFACE to choose another address)"
                );
                backend_error(NAME, "init", at)
            })?;
        Ok(Self {
            context,
            group: Mutex::default(),
        })
    }

    fn failed(&self, operation: &'static str, error: &sys::Error) -> crate::Error {
        backend_error(NAME, operation, error.to_string())
    }

    fn call(args: &GlooCall) -> sys::Call {
        sys::Call::new().timeout(args.timeout)
    }

    /// Returns a copy of the input, multiplied by this rank's factor, if the reduction is a scaled
    /// sum.
    ///
    /// # Safety
    /// `from` holds `count` elements.
    unsafe fn scaled(
        from: *const u8,
        count: usize,
        op: ReduceOp,
        args: &GlooCall,
    ) -> Option<Vec<u8>> {
        if !matches!(op, ReduceOp::PreMulSum(_)) {
            return None;
        }
        let mut copy = vec![0u64; args.bytes(count).div_ceil(8)];
        let at = copy.as_mut_ptr().cast::<u8>();
        // SAFETY: `from` holds `count` elements. The copy has the same size and is aligned for
        // every type.
        unsafe { scale(from, at, count, args.dtype, Scale::Times(op)) };
        Some(bytemuck::cast_slice(&copy).to_vec())
    }

    /// Divides the elements by the number of ranks if the reduction is an average.
    ///
    /// # Safety
    /// `to` holds `count` elements.
    unsafe fn divided(&self, to: *mut u8, count: usize, op: ReduceOp, args: &GlooCall) {
        if op == ReduceOp::Average {
            // SAFETY: `to` holds `count` elements, and `scale` permits equal input and output.
            unsafe { scale(to, to, count, args.dtype, Scale::Over(self.size())) };
        }
    }

    fn types(
        operation: &'static str,
        op: ReduceOp,
        args: &GlooCall,
    ) -> Result<(sys::DataType, sys::ReduceOp)> {
        let dtype = data_type(args.dtype, op.code()).ok_or_else(|| {
            backend_error(
                NAME,
                operation,
                format!("no {} of {}", op.code().name(), args.dtype.name()),
            )
        })?;
        Ok((dtype, reduction(op.code())))
    }

    fn message(&self, message: Message, operation: &'static str) -> Result<()> {
        let mut group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(messages) = &mut *group {
            messages.push(message);
            return Ok(());
        }
        drop(group);
        self.exchange(&[message], operation)
    }

    /// Sends and receives all `messages` at once.
    pub(crate) fn exchange(&self, messages: &[Message], operation: &'static str) -> Result<()> {
        let Some(timeout) = messages.iter().map(|message| message.timeout).max() else {
            return Ok(());
        };
        let transfers: Vec<sys::Transfer> = messages
            .iter()
            .map(|message| {
                let (bytes, peer, tag) = (message.bytes, message.peer as usize, 0);
                if message.is_send {
                    sys::Transfer::Send {
                        data: message.at as *const u8,
                        bytes,
                        peer,
                        tag,
                    }
                } else {
                    sys::Transfer::Recv {
                        data: message.at as *mut u8,
                        bytes,
                        peer,
                        tag,
                    }
                }
            })
            .collect();
        // SAFETY: the callers of `execute` guarantee that the buffers are valid until the
        // group has completed.
        unsafe {
            self.context
                .batch(&transfers, sys::Call::new().timeout(timeout))
                .map_err(|error| self.failed(operation, &error))
        }
    }
}

impl Gloo {
    /// Reduces `count` elements and stores the result on every rank.
    ///
    /// # Safety
    /// `from` is readable and `to` writable for `count` elements. They may be equal.
    pub(crate) unsafe fn all_reduce(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        args: &GlooCall,
    ) -> Result<()> {
        let (dtype, reduction) = Self::types("all_reduce", op, args)?;
        // SAFETY: the preconditions of this method include those of `Context::allreduce`,
        // and the scaled copy has the size of `from`.
        unsafe {
            let scaled = Self::scaled(from, count, op, args);
            let input = scaled.as_ref().map_or(from, |copy| copy.as_ptr());
            self.context
                .allreduce(input, to, count, dtype, reduction, Self::call(args))
                .map_err(|error| self.failed("all_reduce", &error))?;
            self.divided(to, count, op, args);
        }
        Ok(())
    }

    /// Reduces `count` elements to `root`.
    ///
    /// # Safety
    /// The preconditions of [`Gloo::all_reduce`]. Only the root uses `to`.
    pub(crate) unsafe fn reduce(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        root: u32,
        args: &GlooCall,
    ) -> Result<()> {
        let (dtype, reduction) = Self::types("reduce", op, args)?;
        // Gloo writes intermediate sums to the output of every rank. The caller's output must
        // change only on the root.
        let mut scratch = vec![0u64; args.bytes(count).div_ceil(8)];
        let is_root = root == self.rank();
        let target = if is_root {
            to
        } else {
            scratch.as_mut_ptr().cast()
        };
        // SAFETY: the preconditions of this method include those of `Context::reduce`, and
        // the scratch buffer has the size of the output.
        unsafe {
            let scaled = Self::scaled(from, count, op, args);
            let input = scaled.as_ref().map_or(from, |copy| copy.as_ptr());
            let call = Self::call(args);
            self.context
                .reduce(input, target, count, dtype, reduction, root as usize, call)
                .map_err(|error| self.failed("reduce", &error))?;
            if is_root {
                self.divided(to, count, op, args);
            }
        }
        Ok(())
    }

    /// Copies `count` elements of the root's `buffer` to the `buffer` of every rank.
    ///
    /// # Safety
    /// `buffer` is readable and writable for `count` elements.
    pub(crate) unsafe fn broadcast(
        &self,
        buffer: *mut u8,
        count: usize,
        root: u32,
        args: &GlooCall,
    ) -> Result<()> {
        // SAFETY: the preconditions of this method include those of `Context::broadcast`.
        unsafe {
            self.context
                .broadcast(buffer, args.bytes(count), root as usize, Self::call(args))
                .map_err(|error| self.failed("broadcast", &error))
        }
    }

    /// Copies `count` elements of every rank r to row r of `to`.
    ///
    /// # Safety
    /// `from` is readable for `count` elements, and `to` is writable for one row per rank.
    pub(crate) unsafe fn all_gather(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        args: &GlooCall,
    ) -> Result<()> {
        // SAFETY: the preconditions of this method include those of `Context::allgather`.
        unsafe {
            self.context
                .allgather(from, to, args.bytes(count), Self::call(args))
                .map_err(|error| self.failed("all_gather", &error))
        }
    }

    /// Reduces row r of every rank's `from` and stores the result in `to` of rank r.
    ///
    /// # Safety
    /// `from` is readable for one row of `count` elements per rank, and `to` writable for one row.
    pub(crate) unsafe fn reduce_scatter(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        args: &GlooCall,
    ) -> Result<()> {
        let ranks = self.size() as usize;
        let Some(total) = count.checked_mul(ranks) else {
            return Err(backend_error(NAME, "reduce_scatter", "too many elements"));
        };
        // Gloo has no reduce_scatter, so this method reduces all rows and copies this rank's row.
        let mut all = vec![0u64; args.bytes(total).div_ceil(8)];
        let at = all.as_mut_ptr().cast::<u8>();
        // SAFETY: `all` holds all rows, and this rank's row has the output's size.
        unsafe {
            self.all_reduce(from, at, total, op, args)?;
            let row = at.add(args.bytes(count) * self.rank() as usize);
            core::ptr::copy_nonoverlapping(row, to, args.bytes(count));
        }
        Ok(())
    }

    /// Sends row r of `from` to each rank r, which stores it as row s of `to` if this rank is s.
    ///
    /// # Safety
    /// `from` is readable and `to` is writable for one row of `count` elements per rank. They do
    /// not overlap.
    pub(crate) unsafe fn all_to_all(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        args: &GlooCall,
    ) -> Result<()> {
        // SAFETY: the preconditions of this method include those of `Context::alltoall`.
        unsafe {
            self.context
                .alltoall(from, to, args.bytes(count), Self::call(args))
                .map_err(|error| self.failed("all_to_all", &error))
        }
    }

    pub(crate) fn barrier(&self, timeout: Duration) -> Result<()> {
        self.context
            .barrier(sys::Call::new().timeout(timeout))
            .map_err(|error| self.failed("barrier", &error))
    }
}

impl Backend for Gloo {
    fn name(&self) -> &str {
        NAME
    }

    fn version(&self) -> String {
        "0.0 (Debian's libgloo)".to_owned()
    }

    fn rank(&self) -> u32 {
        self.context.rank() as u32
    }

    fn size(&self) -> u32 {
        self.context.size() as u32
    }

    fn supports(&self, op: &Op) -> bool {
        if op.is_fused() {
            return false;
        }
        match (op.dtype(), op.reduction()) {
            (Some(dtype), Some(code)) => data_type(dtype, code).is_some() && code.supports(dtype),
            _ => true,
        }
    }

    fn group_start(&self) -> Result<()> {
        let mut group = self.group.lock().unwrap_or_else(PoisonError::into_inner);
        if group.is_some() {
            return Err(backend_error(
                NAME,
                "group_start",
                "a group is open already",
            ));
        }
        *group = Some(Vec::new());
        Ok(())
    }

    fn group_end(&self) -> Result<()> {
        let messages = self
            .group
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .unwrap_or_default();
        self.exchange(&messages, "group_end")
    }

    unsafe fn execute(&self, op: &Op, operands: &Operands<'_>, args: &CallArgs) -> Result<()> {
        let (from, to) = (operands.input().as_ptr(), operands.output().as_mut_ptr());
        let (reduce, call) = (operands.reduction(), GlooCall::new(op, args));
        // SAFETY: the preconditions of `Backend::execute` include those of the methods, of Gloo's
        // function and of `by_messages`.
        unsafe {
            match *op {
                Op::AllReduce { count, .. } => self.all_reduce(from, to, count, reduce, &call),
                Op::Reduce { count, root, .. } => self.reduce(from, to, count, reduce, root, &call),
                Op::ReduceScatter { count, .. } => {
                    self.reduce_scatter(from, to, count, reduce, &call)
                }
                Op::Broadcast { count, root, .. } => self.broadcast(to, count, root, &call),
                Op::AllGather { count, .. } => self.all_gather(from, to, count, &call),
                Op::AllToAll { count, .. } => self.all_to_all(from, to, count, &call),
                Op::AllToAllV { .. }
                | Op::AllGatherV { .. }
                | Op::Scatter { .. }
                | Op::Gather { .. } => compose::by_messages(self, op, operands, args),
                Op::Send { peer, .. } => self.message(Message::send(op, from, peer, args), "send"),
                Op::Recv { peer, .. } => self.message(Message::recv(op, to, peer, args), "recv"),
                Op::Barrier => self.barrier(args.timeout),
                Op::AllGatherWithFlags { .. }
                | Op::ReduceScatterOnArrival { .. }
                | Op::AllReduceNorm { .. }
                | Op::ReduceScatterNorm { .. }
                | Op::VocabParallel { .. } => Err(backend_error(NAME, op.name(), ONLY_KERNELS)),
            }
        }
    }

    fn abort(&self) {
        self.context.abort();
    }
}
