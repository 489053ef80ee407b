//! Implements [`Backend`] for the handle of an external library.

use std::sync::{Arc, Mutex};

use fusewire_backend_abi::{FusewireCall, REDUCE_NONE};
use fusewire_device::DType;
use fusewire_device::element::ReductionCode;
use fusewire_device::session::Operation;

use super::handle::{External, lacks, nanoseconds};
use super::library::text;
use crate::Result;
use crate::backend::{Backend, CallArgs, backend_error, compose};
use crate::options::ReduceOp;

/// Converts `args` and `op` to the C struct that the table's functions take.
fn call_of(args: &CallArgs, op: Option<ReduceOp>) -> FusewireCall {
    FusewireCall {
        struct_bytes: size_of::<FusewireCall>() as u32,
        dtype: args.dtype as u32,
        reduction: op.map_or(REDUCE_NONE, |op| op.code() as u32),
        reserved: 0,
        factor: match op {
            Some(ReduceOp::PreMulSum(factor)) => factor,
            _ => 0.0,
        },
        timeout_ns: nanoseconds(args.timeout),
        stream: args.stream,
    }
}

/// Calls a function of the table. If the function is null, evaluates the expression after `else`,
/// which composes the operation from other operations. Without `else`, returns an error.
macro_rules! forward {
    ($self:ident.$function:ident($($arg:expr),*), $args:expr, $op:expr) => {
        match $self.library.table.$function {
            Some(function) => {
                let given = call_of($args, $op);
                $self.call(stringify!($function), |handle, error| {
                    // SAFETY: the caller of the trait method guarantees valid buffers. Handle, call
                    // and error are live.
                    unsafe { function(handle, $($arg,)* &raw const given, error) }
                })
            }
            None => Err(lacks(&$self.name, stringify!($function))),
        }
    };
    ($self:ident.$function:ident($($arg:expr),*), $args:expr, else $composed:expr) => {
        if $self.library.table.$function.is_some() {
            forward!($self.$function($($arg),*), $args, None)
        } else {
            // SAFETY: the composition has the same preconditions as the trait method.
            unsafe { $composed }
        }
    };
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

    fn supports(
        &self,
        operation: Operation,
        dtype: DType,
        reduction: Option<ReductionCode>,
    ) -> bool {
        let table = &self.library.table;
        let Some(supports) = table.supports else {
            return false;
        };
        let has = |operation: Operation, dtype: DType, reduction: u32| {
            // SAFETY: the handle is live, and `supports` may be called at any time.
            unsafe { supports(self.handle, operation as u32, dtype as u32, reduction) == 1 }
        };
        let own = |there: bool| {
            if there {
                has(operation, dtype, REDUCE_NONE)
            } else {
                has(Operation::Send, dtype, REDUCE_NONE) && has(Operation::Recv, dtype, REDUCE_NONE)
            }
        };
        match operation {
            Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter => has(
                operation,
                dtype,
                reduction.map_or(REDUCE_NONE, |code| code as u32),
            ),
            Operation::AllGather | Operation::Broadcast | Operation::Send | Operation::Recv => {
                has(operation, dtype, REDUCE_NONE)
            }
            Operation::AllToAll => own(table.all_to_all.is_some()),
            Operation::AllToAllV => own(table.all_to_all_v.is_some()),
            Operation::AllGatherV => own(table.all_gather_v.is_some()),
            Operation::Scatter => own(table.scatter.is_some()),
            Operation::Gather => own(table.gather.is_some()),
            Operation::Barrier => {
                table.barrier.is_some()
                    || has(Operation::AllReduce, DType::F32, ReductionCode::Sum as u32)
            }
            _ => false,
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
        // SAFETY: handle and error are live. The callers of `send` and `recv` guarantee that the
        // buffers are valid until the group has completed.
        self.call("group_end", |handle, error| unsafe {
            function(handle, error)
        })
    }

    unsafe fn all_reduce(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        args: &CallArgs,
    ) -> Result<()> {
        forward!(
            self.all_reduce(from.cast(), to.cast(), count as u64),
            args,
            Some(op)
        )
    }

    unsafe fn reduce(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        root: u32,
        args: &CallArgs,
    ) -> Result<()> {
        forward!(
            self.reduce(from.cast(), to.cast(), count as u64, root),
            args,
            Some(op)
        )
    }

    unsafe fn broadcast(
        &self,
        buffer: *mut u8,
        count: usize,
        root: u32,
        args: &CallArgs,
    ) -> Result<()> {
        forward!(
            self.broadcast(buffer.cast(), count as u64, root),
            args,
            None
        )
    }

    unsafe fn all_gather(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        args: &CallArgs,
    ) -> Result<()> {
        forward!(
            self.all_gather(from.cast(), to.cast(), count as u64),
            args,
            None
        )
    }

    unsafe fn reduce_scatter(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        op: ReduceOp,
        args: &CallArgs,
    ) -> Result<()> {
        forward!(
            self.reduce_scatter(from.cast(), to.cast(), count as u64),
            args,
            Some(op)
        )
    }

    unsafe fn send(&self, from: *const u8, count: usize, peer: u32, args: &CallArgs) -> Result<()> {
        forward!(self.send(from.cast(), count as u64, peer), args, None)
    }

    unsafe fn recv(&self, to: *mut u8, count: usize, peer: u32, args: &CallArgs) -> Result<()> {
        forward!(self.recv(to.cast(), count as u64, peer), args, None)
    }

    unsafe fn all_to_all(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        args: &CallArgs,
    ) -> Result<()> {
        forward!(
            self.all_to_all(from.cast(), to.cast(), count as u64),
            args,
            else compose::all_to_all(self, from, to, count, args)
        )
    }

    unsafe fn all_to_all_v(
        &self,
        from: *const u8,
        from_counts: &[u64],
        to: *mut u8,
        to_counts: &[u64],
        args: &CallArgs,
    ) -> Result<()> {
        self.lengths("all_to_all_v", from_counts)?;
        self.lengths("all_to_all_v", to_counts)?;
        forward!(
            self.all_to_all_v(from.cast(), from_counts.as_ptr(), to.cast(), to_counts.as_ptr()),
            args,
            else compose::all_to_all_v(self, from, from_counts, to, to_counts, args)
        )
    }

    unsafe fn all_gather_v(
        &self,
        from: *const u8,
        to: *mut u8,
        counts: &[u64],
        args: &CallArgs,
    ) -> Result<()> {
        self.lengths("all_gather_v", counts)?;
        forward!(
            self.all_gather_v(from.cast(), to.cast(), counts.as_ptr()),
            args,
            else compose::all_gather_v(self, from, to, counts, args)
        )
    }

    unsafe fn scatter(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        root: u32,
        args: &CallArgs,
    ) -> Result<()> {
        forward!(
            self.scatter(from.cast(), to.cast(), count as u64, root),
            args,
            else compose::scatter(self, from, to, count, root, args)
        )
    }

    unsafe fn gather(
        &self,
        from: *const u8,
        to: *mut u8,
        count: usize,
        root: u32,
        args: &CallArgs,
    ) -> Result<()> {
        forward!(
            self.gather(from.cast(), to.cast(), count as u64, root),
            args,
            else compose::gather(self, from, to, count, root, args)
        )
    }

    fn barrier(&self, args: &CallArgs) -> Result<()> {
        let Some(function) = self.library.table.barrier else {
            return compose::barrier(self, args);
        };
        let given = call_of(args, None);
        self.call("barrier", |handle, error| {
            // SAFETY: handle, call and error are live.
            unsafe { function(handle, &raw const given, error) }
        })
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
    /// Checks that there is one count per rank, because the library reads this number of counts.
    fn lengths(&self, operation: &'static str, counts: &[u64]) -> Result<()> {
        if counts.len() == self.size as usize {
            return Ok(());
        }
        let detail = format!("{} counts for {} ranks", counts.len(), self.size);
        Err(backend_error(&self.name, operation, detail))
    }
}
