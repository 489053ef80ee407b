//! Implements [`Backend`] for the handle of an external library.

use core::ffi::c_void;
use std::sync::{Arc, Mutex};

use fusewire_backend_abi::{FusewireCall, REDUCE_NONE};
use fusewire_device::DType;
use fusewire_device::call::Operation;
use fusewire_device::element::ReductionCode;

use super::handle::{External, lacks, nanoseconds};
use super::library::text;
use crate::Result;
use crate::backend::{Backend, CallArgs, backend_error, compose};
use crate::collective::{Op, Operands};
use crate::options::ReduceOp;

/// Converts the arguments of a call to the C struct that the table's functions take.
fn call_of(op: &Op, reduce: ReduceOp, args: &CallArgs) -> FusewireCall {
    FusewireCall {
        struct_bytes: size_of::<FusewireCall>() as u32,
        dtype: op.dtype().map_or(0, |dtype| dtype as u32),
        reduction: op.reduction().map_or(REDUCE_NONE, |code| code as u32),
        reserved: 0,
        factor: match reduce {
            ReduceOp::PreMulSum(factor) => factor,
            _ => 0.0,
        },
        timeout_ns: nanoseconds(args.timeout),
        stream: args.stream,
    }
}

impl Backend for External {
    fn name(&self) -> &str {
        &self.name
    }

    fn version(&self) -> String {
        let table = &self.library.table;
        // SAFETY: `version` takes no arguments. By the table's rules, the returned text lives as
        // long as the process.
        let version = table.version.map(|version| unsafe { text(version()) });
        // SAFETY: by the table's rules, the name lives as long as the process.
        let name = unsafe { text(table.name) };
        format!("{name} {}", version.unwrap_or_default())
    }

    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn supports(&self, op: &Op) -> bool {
        let table = &self.library.table;
        let Some(supports) = table.supports else {
            return false;
        };
        let dtype = op.dtype().unwrap_or(DType::F32) as u32;
        let has = |operation: Operation, reduction: u32| {
            // SAFETY: the handle is live, and `supports` may be called at any time.
            unsafe { supports(self.handle, operation as u32, dtype, reduction) == 1 }
        };
        let moves = |operation| has(operation, REDUCE_NONE);
        let messages = || moves(Operation::Send) && moves(Operation::Recv);
        match *op {
            Op::AllReduce { reduction, .. }
            | Op::Reduce { reduction, .. }
            | Op::ReduceScatter { reduction, .. } => has(op.operation(), reduction as u32),
            Op::AllGather { .. } | Op::Broadcast { .. } | Op::Send { .. } | Op::Recv { .. } => {
                moves(op.operation())
            }
            Op::AllToAll { .. }
            | Op::AllToAllV { .. }
            | Op::AllGatherV { .. }
            | Op::Scatter { .. }
            | Op::Gather { .. } => match self.is_native(op) {
                true => moves(op.operation()),
                false => messages(),
            },
            Op::Barrier => {
                table.barrier.is_some() || has(Operation::AllReduce, ReductionCode::Sum as u32)
            }
            Op::AllGatherWithFlags { .. }
            | Op::ReduceScatterOnArrival { .. }
            | Op::AllReduceNorm { .. }
            | Op::ReduceScatterNorm { .. }
            | Op::VocabParallel { .. } => false,
        }
    }

    fn is_bitwise(&self) -> bool {
        // SAFETY: the handle is live, and `is_bitwise` may be called at any time.
        let bitwise = |function: unsafe extern "C" fn(_) -> i32| unsafe { function(self.handle) };
        self.library.table.is_bitwise.map(bitwise) == Some(1)
    }

    fn group_start(&self) -> Result<()> {
        let function = self.library.table.group_start;
        let function = function.ok_or_else(|| lacks(&self.name, "group_start"))?;
        // SAFETY: handle and error are live.
        self.call("group_start", |handle, error| unsafe {
            function(handle, error)
        })
    }

    fn group_end(&self) -> Result<()> {
        let function = self.library.table.group_end;
        let function = function.ok_or_else(|| lacks(&self.name, "group_end"))?;
        // SAFETY: handle and error are live. The callers of `execute` guarantee that the
        // buffers are valid until the group has completed.
        self.call("group_end", |handle, error| unsafe {
            function(handle, error)
        })
    }

    unsafe fn execute(&self, op: &Op, operands: &Operands<'_>, args: &CallArgs) -> Result<()> {
        if !self.is_native(op) {
            if *op == Op::Barrier {
                if args.stream != 0 {
                    return Err(lacks(&self.name, "barrier"));
                }
                // SAFETY: without a stream, calls work on host memory and block.
                return unsafe { compose::barrier(self, args) };
            }
            // SAFETY: this method and the function have the same preconditions.
            return unsafe { compose::by_messages(self, op, operands, args) };
        }
        let from = operands.input().as_ptr().cast();
        let to: *mut c_void = operands.output().as_mut_ptr().cast();
        let (outputs, inputs) = operands.host_counts();
        let given = call_of(op, operands.reduction(), args);
        let call = &raw const given;
        let table = &self.library.table;
        macro_rules! forward {
            ($function:ident($($arg:expr),*)) => {{
                let function = table.$function;
                let function = function.ok_or_else(|| lacks(&self.name, stringify!($function)))?;
                self.call(stringify!($function), |handle, error| {
                    // SAFETY: the caller of this method guarantees valid buffers. Handle, call and
                    // error are live.
                    unsafe { function(handle, $($arg,)* call, error) }
                })
            }};
        }
        match *op {
            Op::AllReduce { count, .. } => forward!(all_reduce(from, to, count as u64)),
            Op::Reduce { count, root, .. } => forward!(reduce(from, to, count as u64, root)),
            Op::ReduceScatter { count, .. } => forward!(reduce_scatter(from, to, count as u64)),
            Op::Broadcast { count, root, .. } => forward!(broadcast(to, count as u64, root)),
            Op::AllGather { count, .. } => forward!(all_gather(from, to, count as u64)),
            Op::AllGatherV { .. } => {
                self.lengths(op.name(), outputs)?;
                forward!(all_gather_v(from, to, outputs.as_ptr()))
            }
            Op::Scatter { count, root, .. } => forward!(scatter(from, to, count as u64, root)),
            Op::Gather { count, root, .. } => forward!(gather(from, to, count as u64, root)),
            Op::AllToAll { count, .. } => forward!(all_to_all(from, to, count as u64)),
            Op::AllToAllV { .. } => {
                self.lengths(op.name(), outputs)?;
                self.lengths(op.name(), inputs)?;
                forward!(all_to_all_v(from, inputs.as_ptr(), to, outputs.as_ptr()))
            }
            Op::Send { count, peer, .. } => forward!(send(from, count as u64, peer)),
            Op::Recv { count, peer, .. } => forward!(recv(to, count as u64, peer)),
            Op::Barrier => forward!(barrier()),
            Op::AllGatherWithFlags { .. }
            | Op::ReduceScatterOnArrival { .. }
            | Op::AllReduceNorm { .. }
            | Op::ReduceScatterNorm { .. }
            | Op::VocabParallel { .. } => Err(lacks(&self.name, op.name())),
        }
    }

    unsafe fn register(&self, at: *mut u8, bytes: usize) -> Result<u64> {
        let mut registration = 0;
        if let Some(function) = self.library.table.register_memory {
            let out = &raw mut registration;
            self.call("register", |handle, error| {
                // SAFETY: the caller guarantees that the memory stays valid until it is
                // deregistered. Handle, result and error are live.
                unsafe { function(handle, at.cast(), bytes as u64, out, error) }
            })?;
        }
        Ok(registration)
    }

    fn deregister(&self, registration: u64) -> Result<()> {
        let Some(function) = self.library.table.deregister_memory else {
            return Ok(());
        };
        self.call("deregister", |handle, error| {
            // SAFETY: handle and error are live. The library checks the registration number.
            unsafe { function(handle, registration, error) }
        })
    }

    fn split(&self, ranks: &[u32]) -> Result<Option<Arc<dyn Backend>>> {
        let Some(function) = self.library.table.split else {
            return Ok(None);
        };
        if ranks.is_empty() {
            // Ranks that join no new communicator do not call the library.
            return Ok(None);
        }
        let Some(rank) = ranks.iter().position(|rank| *rank == self.rank) else {
            return Err(backend_error(
                &self.name,
                "split",
                "the list lacks this rank",
            ));
        };
        let mut part = core::ptr::null_mut();
        let (at, count, out) = (ranks.as_ptr(), ranks.len() as u32, &raw mut part);
        self.call("split", |handle, error| {
            // SAFETY: list, result, handle and error are live.
            unsafe { function(handle, at, count, out, error) }
        })?;
        if part.is_null() {
            return Ok(None);
        }
        Ok(Some(Arc::new(Self {
            name: self.name.clone(),
            library: self.library,
            handle: part,
            rank: rank as u32,
            size: count,
            calls: Mutex::default(),
            store: Arc::clone(&self.store),
        })))
    }

    fn abort(&self) {
        if let Some(abort) = self.library.table.abort {
            // SAFETY: the handle is live, and `abort` may be called at any time.
            unsafe { abort(self.handle) };
        }
    }

    fn async_error(&self) -> Result<()> {
        let Some(function) = self.library.table.async_error else {
            return Ok(());
        };
        // SAFETY: handle and error are live.
        self.call("async_error", |handle, error| unsafe {
            function(handle, error)
        })
    }
}

impl External {
    /// Returns false if the table lacks the function of an operation that others can replace.
    fn is_native(&self, op: &Op) -> bool {
        let table = &self.library.table;
        match op {
            Op::AllToAll { .. } => table.all_to_all.is_some(),
            Op::AllToAllV { .. } => table.all_to_all_v.is_some(),
            Op::AllGatherV { .. } => table.all_gather_v.is_some(),
            Op::Scatter { .. } => table.scatter.is_some(),
            Op::Gather { .. } => table.gather.is_some(),
            Op::Barrier => table.barrier.is_some(),
            _ => true,
        }
    }

    /// Checks that there is one count per rank, because the library reads this number of counts.
    fn lengths(&self, operation: &'static str, counts: &[u64]) -> Result<()> {
        if counts.len() == self.size as usize {
            return Ok(());
        }
        let detail = format!("{} counts for {} ranks", counts.len(), self.size);
        Err(backend_error(&self.name, operation, detail))
    }
}
