//! The operations: arguments are checked before anything moves, then bound to a kernel.
//!
//! Every operation has a blocking form, which takes slices or tensors, and an asynchronous form
//! (`_async`), which takes tensors and keeps them alive. Names and argument order are torchcomms':
//! `_single` means one contiguous buffer of rank-ordered rows.

use fusewire_device::comm::Place;
use fusewire_device::session::{Call, Operation};
use fusewire_device::{DType, packet};
use fusewire_kernels::all_reduce::AllReducePacketParams;
use fusewire_kernels::barrier::{BARRIER, BarrierParams};
use fusewire_kernels::movement::{
    ALL_GATHER, ALL_TO_ALL, AllGatherParams, AllToAllParams, BROADCAST, BroadcastParams, GATHER,
    GatherParams, SCATTER, ScatterParams,
};
use fusewire_kernels::point::{RECV, RecvParams, SEND, SendParams};
use fusewire_kernels::vector::{ALL_GATHER_V, ALL_TO_ALL_V, AllGatherVParams, AllToAllVParams};

use super::instances;
use super::submit::{Prepared, invalid};
use super::{Communicator, Work};
use crate::Result;
use crate::options::{Algorithm, ReduceOp};
use crate::plan::{Plan, plan};
use crate::tensor::{Input, Output, Tensor};

/// Root of an operation that has none.
const NO_ROOT: u16 = 0xffff;

/// From this many bytes on that a rank writes, results pass by its caches. Local: no other rank has
/// to agree.
const STREAMING_BYTES: usize = 4 << 20;

/// Defines an operation's two forms over one preparation.
macro_rules! forms {
    (
        $(#[$doc:meta])*
        $name:ident, $name_async:ident => $prepare:ident(
            out [$($output:ident)?], in [$($input:ident)?] $(, $arg:ident: $ty:ty)*
        )
    ) => {
        $(#[$doc])*
        ///
        /// # Errors
        /// [`crate::Error::InvalidArgument`] before anything moves; the communicator's first failure.
        pub fn $name<'a>(
            &self,
            $($output: impl Into<Output<'a>>,)?
            $($input: impl Into<Input<'a>>,)?
            $($arg: $ty,)*
        ) -> Result<()> {
            $(let $output = $output.into();)?
            $(let $input = $input.into();)?
            self.run(&self.$prepare($(&$output,)? $(&$input,)? $($arg,)*)?)
        }

        #[doc = concat!("As [`Communicator::", stringify!($name), "`], enqueued on the communicator's stream.")]
        ///
        /// # Errors
        /// As there; a failure while running is the [`Work`]'s.
        pub fn $name_async(
            &self,
            $($output: &Tensor,)?
            $($input: &Tensor,)?
            $($arg: $ty,)*
        ) -> Result<Work> {
            $(let $output = Output::from($output);)?
            $(let $input = Input::from($input);)?
            self.enqueue(&self.$prepare($(&$output,)? $(&$input,)? $($arg,)*)?)
        }
    };
}

/// Binds a kernel that only moves bytes.
macro_rules! movement {
    (
        $comm:expr, $operation:expr, $kernel:expr, $params:ident, $output:expr, $input:expr,
        { count: $count:expr, rows: $rows:expr, root: $root:expr, staged: $staged:expr, written: $written:expr }
    ) => {{
        let (comm, output, input) = ($comm, $output, $input);
        let count = $count;
        let size = input.dtype.size();
        let plan = comm.plan_rows($operation, count, input.dtype, $rows, None);
        let params = $params {
            constants: comm.constants(),
            call: comm.call(&plan, Some(input.dtype), None, $root, count as u64),
            count: count as u64,
            size: size as u64,
            timeout_ns: comm.timeout_ns,
            source: input.ptr,
            source_at: comm.place_of(input.ptr, input.count * size, $staged),
            target: output.ptr,
            chunk: plan.chunk,
            hint: hint($written * size),
        };
        let borrowed = output.tensor.is_none() || input.tensor.is_none();
        Ok(Prepared::new(
            comm,
            &$kernel,
            params,
            [output.tensor, input.tensor, None],
            borrowed,
        ))
    }};
}

impl Communicator {
    forms!(
        /// Reduces every rank's `buffer` element by element; every rank gets the result, in place.
        all_reduce, all_reduce_async => prepare_all_reduce_in_place(
            out [buffer], in [], op: ReduceOp
        )
    );

    forms!(
        /// As [`Communicator::all_reduce`], from `input` to `output` of the same length.
        all_reduce_into, all_reduce_into_async => prepare_all_reduce(
            out [output], in [input], op: ReduceOp
        )
    );

    forms!(
        /// Reduces every rank's `buffer`; the root gets the result in place, the others keep theirs.
        reduce, reduce_async => prepare_reduce_in_place(
            out [buffer], in [], root: u32, op: ReduceOp
        )
    );

    forms!(
        /// As [`Communicator::reduce`], from `input` to `output`, which is used on the root only (elsewhere
        /// it may be empty).
        reduce_into, reduce_into_async => prepare_reduce(
            out [output], in [input], root: u32, op: ReduceOp
        )
    );

    forms!(
        /// Reduces row r of every rank's `input` (as many rows as ranks, each as long as `output`) to rank r.
        reduce_scatter_single, reduce_scatter_single_async => prepare_reduce_scatter(
            out [output], in [input], op: ReduceOp
        )
    );

    forms!(
        /// Collects every rank's `input` as row r of `output`, which has as many rows as ranks.
        all_gather_single, all_gather_single_async => prepare_all_gather(
            out [output], in [input]
        )
    );

    forms!(
        /// Copies the root's `buffer` to every rank's.
        broadcast, broadcast_async => prepare_broadcast(
            out [buffer], in [], root: u32
        )
    );

    forms!(
        /// Sends row r of the root's `input` to rank r's `output`. Elsewhere `input` may be empty.
        scatter_single, scatter_single_async => prepare_scatter(
            out [output], in [input], root: u32
        )
    );

    forms!(
        /// Collects every rank's `input` as row r of the root's `output`. Elsewhere `output` may be empty.
        gather_single, gather_single_async => prepare_gather(
            out [output], in [input], root: u32
        )
    );

    forms!(
        /// Sends row r of `input` to rank r, where it becomes row (this rank) of `output`.
        all_to_all_single, all_to_all_single_async => prepare_all_to_all(
            out [output], in [input]
        )
    );

    forms!(
        /// Sends `input` to `peer`, which must receive as many elements of the same type. Returns when
        /// the data is on its way.
        send, send_async => prepare_send(
            out [], in [input], peer: u32
        )
    );

    forms!(
        /// Receives from `peer` into `output`.
        recv, recv_async => prepare_recv(
            out [output], in [], peer: u32
        )
    );

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// The communicator's first failure.
    pub fn barrier(&self) -> Result<()> {
        self.run(&self.prepare_barrier())
    }

    /// As [`Communicator::barrier`], enqueued on the communicator's stream.
    ///
    /// # Errors
    /// As there; a failure while running is the [`Work`]'s.
    pub fn barrier_async(&self) -> Result<Work> {
        self.enqueue(&self.prepare_barrier())
    }

    /// Collects `counts[r]` elements of every rank, one after the other, in every rank's `output`.
    /// `counts` are equal on all ranks; this rank's `input` has `counts[rank]` elements.
    ///
    /// # Errors
    /// As [`Communicator::all_gather_single`].
    pub fn all_gather_v_single<'a>(
        &self,
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        counts: &[u64],
    ) -> Result<()> {
        let (output, input) = (output.into(), input.into());
        self.run(&self.prepare_all_gather_v(&output, &input, counts, None)?)
    }

    /// As [`Communicator::all_gather_v_single`], enqueued; `counts` is a tensor of u64 in device memory.
    ///
    /// # Errors
    /// As there.
    pub fn all_gather_v_single_async(
        &self,
        output: &Tensor,
        input: &Tensor,
        counts: &Tensor,
    ) -> Result<Work> {
        let slice = device_counts("all_gather_v_single", counts)?;
        let (output, input) = (output.into(), input.into());
        self.enqueue(&self.prepare_all_gather_v(&output, &input, slice, Some(counts))?)
    }

    /// Sends `input_splits[r]` elements to rank r and receives `output_splits[r]` from it; parts lie one
    /// after the other in rank order. The splits must agree between sender and receiver: another count
    /// is a mismatch on both.
    ///
    /// # Errors
    /// As [`Communicator::all_to_all_single`].
    pub fn all_to_all_v_single<'a>(
        &self,
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        output_splits: &[u64],
        input_splits: &[u64],
    ) -> Result<()> {
        let (output, input) = (output.into(), input.into());
        let prepared =
            self.prepare_all_to_all_v(&output, &input, output_splits, input_splits, None)?;
        self.run(&prepared)
    }

    /// As [`Communicator::all_to_all_v_single`], enqueued; the splits are one tensor of u64 in device memory,
    /// the output's first, then the input's. A replayed graph reads them anew each time; values that leave
    /// the tensors they were captured with are the caller's mistake.
    ///
    /// # Errors
    /// As there.
    pub fn all_to_all_v_single_async(
        &self,
        output: &Tensor,
        input: &Tensor,
        splits: &Tensor,
    ) -> Result<Work> {
        let slice = device_counts("all_to_all_v_single", splits)?;
        let ranks = self.size() as usize;
        if slice.len() != 2 * ranks {
            return Err(invalid(
                "all_to_all_v_single",
                format!(
                    "{} splits for {ranks} ranks; twice as many are needed",
                    slice.len()
                ),
            ));
        }
        let (outputs, inputs) = slice.split_at(ranks);
        let (output, input) = (output.into(), input.into());
        self.enqueue(&self.prepare_all_to_all_v(&output, &input, outputs, inputs, Some(splits))?)
    }

    /// What an operation over `count` elements of `dtype` (a row's, where there are rows) will do.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] where the type does not have the reduction.
    pub fn plan(
        &self,
        operation: Operation,
        count: usize,
        dtype: DType,
        op: Option<ReduceOp>,
    ) -> Result<Plan> {
        if let Some(op) = op {
            reducible(operation.name(), dtype, op)?;
        }
        let rows = match operation {
            Operation::ReduceScatter
            | Operation::AllToAll
            | Operation::AllToAllV
            | Operation::Scatter => self.size(),
            _ => 1,
        };
        Ok(self.plan_rows(operation, count, dtype, u64::from(rows), op))
    }

    fn plan_rows(
        &self,
        operation: Operation,
        count: usize,
        dtype: DType,
        rows: u64,
        op: Option<ReduceOp>,
    ) -> Plan {
        let reduction = op.map(|op| (dtype, op.code()));
        let size = dtype.size() as u64;
        plan(
            self.options(),
            operation,
            count as u64,
            size,
            rows,
            reduction,
        )
    }

    fn call(
        &self,
        plan: &Plan,
        dtype: Option<DType>,
        op: Option<ReduceOp>,
        root: u16,
        agreed: u64,
    ) -> u64 {
        let dtype = dtype.map_or(0, |dtype| dtype as u8);
        let op = op.map_or(0, |op| op.code() as u8);
        Call::new(
            plan.operation,
            dtype,
            op,
            plan.algorithm as u8,
            root,
            agreed,
        )
        .0
    }

    /// The place of memory, or none where it must be staged.
    fn place_of(&self, at: *const u8, bytes: usize, staged: bool) -> u64 {
        if staged {
            Place::NONE.0
        } else {
            self.inner.windows.place(at, bytes).0
        }
    }

    fn prepare_all_reduce_in_place<'a>(
        &self,
        buffer: &Output<'a>,
        op: ReduceOp,
    ) -> Result<Prepared<'a>> {
        self.prepare_all_reduce(buffer, &buffer.as_input(), op)
    }

    fn prepare_all_reduce<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        op: ReduceOp,
    ) -> Result<Prepared<'a>> {
        let name = "all_reduce";
        same_type(name, output, input)?;
        length(name, "output", output.count, input.count)?;
        reducible(name, input.dtype, op)?;
        apart(name, output, input, Some(0))?;
        let dtype = input.dtype;
        let plan = self.plan_rows(Operation::AllReduce, input.count, dtype, 1, Some(op));
        let call = self.call(&plan, Some(dtype), Some(op), NO_ROOT, input.count as u64);
        let tensors = [output.tensor, input.tensor, None];
        let borrowed = output.tensor.is_none() || input.tensor.is_none();
        if plan.algorithm == Algorithm::Packet
            && let Some(kernel) = instances::all_reduce_packet(dtype, op)
        {
            debug_assert!(
                input.count * dtype.size()
                    <= packet::capacity(self.inner.constants.pad.packet_slot) as usize
            );
            let params = AllReducePacketParams {
                constants: self.constants(),
                call,
                count: input.count as u64,
                timeout_ns: self.timeout_ns,
                source: input.ptr,
                target: output.ptr,
            };
            return Ok(Prepared::new(self, &kernel, params, tensors, borrowed));
        }
        let in_place = core::ptr::eq(input.ptr, output.ptr);
        let staged = plan.algorithm == Algorithm::Signal && in_place;
        let arguments = Arguments {
            call,
            plan,
            staged,
            output,
            input,
            op,
            count: input.count,
        };
        Ok(if plan.algorithm == Algorithm::Signal {
            self.reduction(arguments, instances::all_reduce_signal)
        } else {
            self.reduction(arguments, instances::reduce_shards)
        })
    }

    fn prepare_reduce_in_place<'a>(
        &self,
        buffer: &Output<'a>,
        root: u32,
        op: ReduceOp,
    ) -> Result<Prepared<'a>> {
        self.prepare_reduce(buffer, &buffer.as_input(), root, op)
    }

    fn prepare_reduce<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        root: u32,
        op: ReduceOp,
    ) -> Result<Prepared<'a>> {
        let name = "reduce";
        self.rank_of(name, "root", root)?;
        if root == self.rank() {
            same_type(name, output, input)?;
            length(name, "output", output.count, input.count)?;
            apart(name, output, input, Some(0))?;
        }
        reducible(name, input.dtype, op)?;
        let dtype = input.dtype;
        let plan = self.plan_rows(Operation::Reduce, input.count, dtype, 1, Some(op));
        let call = self.call(
            &plan,
            Some(dtype),
            Some(op),
            root as u16,
            input.count as u64,
        );
        let arguments = Arguments {
            call,
            plan,
            staged: false,
            output,
            input,
            op,
            count: input.count,
        };
        Ok(self.reduction(arguments, instances::reduce_shards))
    }

    fn prepare_reduce_scatter<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        op: ReduceOp,
    ) -> Result<Prepared<'a>> {
        let name = "reduce_scatter";
        same_type(name, output, input)?;
        self.rows(name, "input", input.count, output.count)?;
        reducible(name, input.dtype, op)?;
        apart(
            name,
            output,
            input,
            Some(self.rank() as usize * output.count),
        )?;
        let (dtype, count) = (input.dtype, output.count);
        let rows = u64::from(self.size());
        let plan = self.plan_rows(Operation::ReduceScatter, count, dtype, rows, Some(op));
        let call = self.call(&plan, Some(dtype), Some(op), NO_ROOT, count as u64);
        let arguments = Arguments {
            call,
            plan,
            staged: false,
            output,
            input,
            op,
            count,
        };
        Ok(self.reduction(arguments, instances::reduce_scatter))
    }

    /// Binds a kernel of the rounds family that reduces.
    fn reduction<'a>(
        &self,
        arguments: Arguments<'_, 'a>,
        select: instances::Select,
    ) -> Prepared<'a> {
        let Arguments {
            call,
            plan,
            staged,
            output,
            input,
            op,
            count,
        } = arguments;
        let size = input.dtype.size();
        let (kernel, params) = select(
            input.dtype,
            op,
            instances::Reduction {
                constants: self.constants(),
                call,
                count: count as u64,
                timeout_ns: self.timeout_ns,
                source: input.ptr,
                source_at: self.place_of(input.ptr, input.count * size, staged),
                target: output.ptr,
                target_at: self.place_of(output.ptr, output.count * size, false),
                scalar: op.scalar(input.dtype),
                chunk: plan.chunk,
                hint: hint(count * size),
            },
        );
        let borrowed = output.tensor.is_none() || input.tensor.is_none();
        Prepared::from_parts(
            self,
            kernel,
            params,
            [output.tensor, input.tensor, None],
            borrowed,
        )
    }

    fn prepare_all_gather<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
    ) -> Result<Prepared<'a>> {
        let name = "all_gather";
        same_type(name, output, input)?;
        self.rows(name, "output", output.count, input.count)?;
        within(name, output, input, self.rank() as usize * input.count)?;
        movement!(self, Operation::AllGather, ALL_GATHER, AllGatherParams, output, input, {
            count: input.count, rows: 1, root: NO_ROOT, staged: false, written: output.count
        })
    }

    fn prepare_broadcast<'a>(&self, buffer: &Output<'a>, root: u32) -> Result<Prepared<'a>> {
        self.rank_of("broadcast", "root", root)?;
        let input = &buffer.as_input();
        movement!(self, Operation::Broadcast, BROADCAST, BroadcastParams, buffer, input, {
            count: input.count, rows: 1, root: root as u16, staged: false, written: input.count
        })
    }

    fn prepare_scatter<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        root: u32,
    ) -> Result<Prepared<'a>> {
        let name = "scatter";
        self.rank_of(name, "root", root)?;
        if root == self.rank() {
            same_type(name, output, input)?;
            self.rows(name, "input", input.count, output.count)?;
            apart(name, output, input, Some(root as usize * output.count))?;
        }
        let input = &Input {
            dtype: output.dtype,
            ..*input
        };
        let rows = u64::from(self.size());
        movement!(self, Operation::Scatter, SCATTER, ScatterParams, output, input, {
            count: output.count, rows: rows, root: root as u16, staged: false, written: output.count
        })
    }

    fn prepare_gather<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        root: u32,
    ) -> Result<Prepared<'a>> {
        let name = "gather";
        self.rank_of(name, "root", root)?;
        if root == self.rank() {
            same_type(name, output, input)?;
            self.rows(name, "output", output.count, input.count)?;
            within(name, output, input, root as usize * input.count)?;
        }
        movement!(self, Operation::Gather, GATHER, GatherParams, output, input, {
            count: input.count, rows: 1, root: root as u16, staged: false, written: output.count
        })
    }

    fn prepare_all_to_all<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
    ) -> Result<Prepared<'a>> {
        let name = "all_to_all";
        same_type(name, output, input)?;
        length(name, "output", output.count, input.count)?;
        let ranks = self.size() as usize;
        if !input.count.is_multiple_of(ranks) {
            return Err(invalid(
                name,
                format!("{} elements are no multiple of {ranks} ranks", input.count),
            ));
        }
        apart(name, output, input, Some(0))?;
        // In place a row would be overwritten before its peer has read it.
        let staged = core::ptr::eq(input.ptr, output.ptr);
        let rows = u64::from(self.size());
        movement!(self, Operation::AllToAll, ALL_TO_ALL, AllToAllParams, output, input, {
            count: input.count / ranks, rows: rows, root: NO_ROOT, staged: staged, written: output.count
        })
    }

    fn prepare_all_gather_v<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        counts: &[u64],
        counts_tensor: Option<&'a Tensor>,
    ) -> Result<Prepared<'a>> {
        let name = "all_gather_v";
        same_type(name, output, input)?;
        let total = self.total(name, "counts", counts)?;
        length(name, "output", output.count, total)?;
        let rank = self.rank() as usize;
        length(name, "input", input.count, counts[rank] as usize)?;
        let before: u64 = counts[..rank].iter().sum();
        within(name, output, input, before as usize)?;
        let size = input.dtype.size();
        let plan = self.plan_rows(Operation::AllGatherV, total, input.dtype, 1, None);
        let agreed = counts.iter().fold(total as u64, |hash, count| {
            (hash ^ count)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(23)
        });
        let params = AllGatherVParams {
            constants: self.constants(),
            call: self.call(&plan, Some(input.dtype), None, NO_ROOT, agreed),
            size: size as u64,
            timeout_ns: self.timeout_ns,
            source: input.ptr,
            source_at: self.place_of(input.ptr, input.count * size, false),
            target: output.ptr,
            counts: counts.as_ptr(),
            chunk: plan.chunk,
            hint: hint(output.count * size),
        };
        let tensors = [output.tensor, input.tensor, counts_tensor];
        let borrowed = tensors.iter().any(Option::is_none);
        Ok(Prepared::new(
            self,
            &ALL_GATHER_V,
            params,
            tensors,
            borrowed,
        ))
    }

    fn prepare_all_to_all_v<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        output_splits: &[u64],
        input_splits: &[u64],
        splits_tensor: Option<&'a Tensor>,
    ) -> Result<Prepared<'a>> {
        let name = "all_to_all_v";
        same_type(name, output, input)?;
        let sent = self.total(name, "input splits", input_splits)?;
        let received = self.total(name, "output splits", output_splits)?;
        at_most(name, "input", sent, input.count)?;
        at_most(name, "output", received, output.count)?;
        apart(name, output, input, None)?;
        let size = input.dtype.size();
        let rows = u64::from(self.size());
        let plan = self.plan_rows(Operation::AllToAllV, 0, input.dtype, rows, None);
        let params = AllToAllVParams {
            constants: self.constants(),
            call: self.call(&plan, Some(input.dtype), None, NO_ROOT, 0),
            size: size as u64,
            timeout_ns: self.timeout_ns,
            source: input.ptr,
            source_at: self.place_of(input.ptr, input.count * size, false),
            target: output.ptr,
            send_counts: input_splits.as_ptr(),
            receive_counts: output_splits.as_ptr(),
            chunk: plan.chunk,
            hint: hint(output.count * size),
        };
        let tensors = [output.tensor, input.tensor, splits_tensor];
        let borrowed = tensors.iter().any(Option::is_none);
        Ok(Prepared::new(
            self,
            &ALL_TO_ALL_V,
            params,
            tensors,
            borrowed,
        ))
    }

    fn prepare_send<'a>(&self, input: &Input<'a>, peer: u32) -> Result<Prepared<'a>> {
        self.peer_of("send", peer)?;
        let bytes = (input.count * input.dtype.size()) as u64;
        let params = SendParams {
            constants: self.constants(),
            call: self.point_call(Operation::Send, input.dtype, peer),
            bytes,
            timeout_ns: self.timeout_ns,
            source: input.ptr,
        };
        let borrowed = input.tensor.is_none();
        Ok(Prepared::new(
            self,
            &SEND,
            params,
            [input.tensor, None, None],
            borrowed,
        ))
    }

    fn prepare_recv<'a>(&self, output: &Output<'a>, peer: u32) -> Result<Prepared<'a>> {
        self.peer_of("recv", peer)?;
        let bytes = (output.count * output.dtype.size()) as u64;
        let params = RecvParams {
            constants: self.constants(),
            call: self.point_call(Operation::Recv, output.dtype, peer),
            bytes,
            timeout_ns: self.timeout_ns,
            target: output.ptr,
        };
        let borrowed = output.tensor.is_none();
        Ok(Prepared::new(
            self,
            &RECV,
            params,
            [output.tensor, None, None],
            borrowed,
        ))
    }

    /// A call of a send or receive: both sides have the same fingerprint.
    fn point_call(&self, operation: Operation, dtype: DType, peer: u32) -> u64 {
        let algorithm = Algorithm::Channel as u8;
        let both = Call::new(Operation::Send, dtype as u8, 0, algorithm, 0, 0).fingerprint();
        let own = Call::new(operation, dtype as u8, 0, algorithm, peer as u16, 0).0;
        own & !0xffff | both
    }

    fn prepare_barrier(&self) -> Prepared<'static> {
        let plan = self.plan_rows(Operation::Barrier, 0, DType::U8, 1, None);
        let params = BarrierParams {
            constants: self.constants(),
            call: self.call(&plan, None, None, NO_ROOT, 0),
            timeout_ns: self.timeout_ns,
        };
        Prepared::new(self, &BARRIER, params, [None; 3], false)
    }

    fn rank_of(&self, operation: &'static str, what: &str, rank: u32) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        Err(invalid(
            operation,
            format!("{what} {rank}; ranks are 0 to {}", self.size() - 1),
        ))
    }

    fn peer_of(&self, operation: &'static str, peer: u32) -> Result<()> {
        self.rank_of(operation, "peer", peer)?;
        if peer == self.rank() {
            return Err(invalid(
                operation,
                format!("peer {peer} is this rank itself; copy instead"),
            ));
        }
        Ok(())
    }

    fn rows(&self, operation: &'static str, what: &str, count: usize, row: usize) -> Result<()> {
        let needed = row.checked_mul(self.size() as usize);
        if needed == Some(count) {
            return Ok(());
        }
        Err(invalid(
            operation,
            format!(
                "{what} has {count} elements; {} rows of {row} are needed",
                self.size()
            ),
        ))
    }

    fn total(&self, operation: &'static str, what: &str, counts: &[u64]) -> Result<usize> {
        if counts.len() != self.size() as usize {
            return Err(invalid(
                operation,
                format!("{} {what} for {} ranks", counts.len(), self.size()),
            ));
        }
        counts
            .iter()
            .try_fold(0u64, |sum, count| sum.checked_add(*count))
            .and_then(|sum| usize::try_from(sum).ok())
            .ok_or_else(|| invalid(operation, format!("the sum of the {what} overflows")))
    }
}

/// What the reductions over rounds have in common.
struct Arguments<'b, 'a> {
    call: u64,
    plan: Plan,
    staged: bool,
    output: &'b Output<'a>,
    input: &'b Input<'a>,
    op: ReduceOp,
    count: usize,
}

/// The counts in a tensor of u64; they lie in CPU memory, so their sums are checked at the call.
fn device_counts<'a>(operation: &'static str, counts: &'a Tensor) -> Result<&'a [u64]> {
    if counts.dtype() != DType::U64 || !(counts.as_ptr() as usize).is_multiple_of(8) {
        return Err(invalid(
            operation,
            "counts are a tensor of u64, aligned to 8 bytes".to_owned(),
        ));
    }
    // SAFETY: the tensor holds this many aligned u64.
    Ok(unsafe { core::slice::from_raw_parts(counts.as_ptr().cast(), counts.len()) })
}

fn hint(bytes: usize) -> u32 {
    u32::from(bytes >= STREAMING_BYTES)
}

fn same_type(operation: &'static str, output: &Output<'_>, input: &Input<'_>) -> Result<()> {
    if output.dtype == input.dtype {
        return Ok(());
    }
    Err(invalid(
        operation,
        format!(
            "output is {}, input is {}",
            output.dtype.name(),
            input.dtype.name()
        ),
    ))
}

fn length(operation: &'static str, what: &str, count: usize, needed: usize) -> Result<()> {
    if count == needed {
        return Ok(());
    }
    Err(invalid(
        operation,
        format!("{what} has {count} elements; {needed} are needed"),
    ))
}

fn at_most(operation: &'static str, what: &str, needed: usize, count: usize) -> Result<()> {
    if needed <= count {
        return Ok(());
    }
    Err(invalid(
        operation,
        format!("{what} has {count} elements; the splits need {needed}"),
    ))
}

fn reducible(operation: &'static str, dtype: DType, op: ReduceOp) -> Result<()> {
    if op.code().supports(dtype) {
        return Ok(());
    }
    Err(invalid(
        operation,
        format!(
            "elements of {} have no reduction {}",
            dtype.name(),
            op.code().name()
        ),
    ))
}

/// Output and input must not overlap, but for the place where the operation works in place:
/// `in_place` elements into the input.
fn apart(
    operation: &'static str,
    output: &Output<'_>,
    input: &Input<'_>,
    in_place: Option<usize>,
) -> Result<()> {
    let size = input.dtype.size();
    let (from, to) = (input.ptr as usize, output.ptr as usize);
    if in_place.is_some_and(|at| to == from.wrapping_add(at * size)) {
        return Ok(());
    }
    if to < from + input.count * size && from < to + output.count * size {
        return Err(overlap(operation));
    }
    Ok(())
}

/// As [`apart`], where the input may lie in the output, `at` elements in.
fn within(
    operation: &'static str,
    output: &Output<'_>,
    input: &Input<'_>,
    at: usize,
) -> Result<()> {
    if input.ptr as usize == (output.ptr as usize).wrapping_add(at * input.dtype.size()) {
        return Ok(());
    }
    apart(operation, output, input, None)
}

fn overlap(operation: &'static str) -> crate::Error {
    invalid(
        operation,
        "output and input overlap in a way that the operation cannot work in place with".to_owned(),
    )
}
