//! The operations: arguments are checked before anything moves, then bound to a kernel.
//!
//! Every operation has a blocking form, which takes slices or tensors, and an asynchronous form
//! (`_async`), which takes tensors and keeps them alive. Names and argument order are torchcomms':
//! `_single` means one contiguous buffer of rank-ordered rows.

mod checks;
mod movement;
mod overlap;
mod point;
mod reduce;
mod vector;

use crate::Result;
use crate::comm::bounce::BounceBuffer;
use crate::comm::submit::invalid;
use crate::comm::{Communicator, Work};
use crate::cpu::last_level_bytes;
use crate::options::ReduceOp;
use crate::plan::{Machine, Plan, hand_off, plan};
use crate::tensor::{Input, Output, Tensor};
use checks::{device_counts, reducible};
use fusewire_device::DType;
use fusewire_device::comm::WindowAddr;
use fusewire_device::session::{Call, Operation};
use fusewire_kernels::Exchange;

/// Root of an operation that has none.
const NO_ROOT: u16 = 0xffff;

/// From here on staged results pass by the caches.
const STAGED_STREAMING_BYTES: usize = 4 << 20;

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
        /// [`crate::Error::InvalidArgument`] before anything moves; the communicator's first
        /// failure.
        pub fn $name<'a>(
            &self,
            $($output: impl Into<Output<'a>>,)?
            $($input: impl Into<Input<'a>>,)?
            $($arg: $ty,)*
        ) -> Result<()> {
            $(
                let $output = $output.into();
                let bounce = self.bounce_buffer(&$output.as_input())?;
                let $output = BounceBuffer::output(&bounce, $output);
            )?
            $(
                let $input = $input.into();
                let input_bounce = self.bounce_buffer(&$input)?;
                let $input = BounceBuffer::input(&input_bounce, $input);
            )?
            self.run(&self.$prepare($(&$output,)? $(&$input,)? $($arg,)*)?)?;
            $(
                let _ = &$output;
                if let Some(bounce) = bounce {
                    bounce.copy_back()?;
                }
            )?
            Ok(())
        }

        #[doc = concat!("As [`Communicator::", stringify!($name), "`], enqueued on the \
            communicator's stream.")]
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
        /// Reduces every rank's `buffer`; the root gets the result in place, the others keep
        /// theirs.
        reduce, reduce_async => prepare_reduce_in_place(
            out [buffer], in [], root: u32, op: ReduceOp
        )
    );

    forms!(
        /// As [`Communicator::reduce`], from `input` to `output`, which is used on the root only
        /// (elsewhere it may be empty).
        reduce_into, reduce_into_async => prepare_reduce(
            out [output], in [input], root: u32, op: ReduceOp
        )
    );

    forms!(
        /// Reduces row r of every rank's `input` (as many rows as ranks, each as long as `output`)
        /// to rank r.
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
        /// Collects every rank's `input` as row r of the root's `output`. Elsewhere `output` may be
        /// empty.
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
        /// Sends `input` to `peer`, which must receive as many elements of the same type. Returns
        /// when the data is on its way.
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
        let (bounce, input_bounce) = (
            self.bounce_buffer(&output.as_input())?,
            self.bounce_buffer(&input)?,
        );
        let output = BounceBuffer::output(&bounce, output);
        let input = BounceBuffer::input(&input_bounce, input);
        self.run(&self.prepare_all_gather_v(&output, &input, Some(counts), None)?)?;
        bounce.map_or(Ok(()), BounceBuffer::copy_back)
    }

    /// As [`Communicator::all_gather_v_single`], enqueued; `counts` is a tensor of u64 in device
    /// memory.
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

    /// Sends `input_splits[r]` elements to rank r and receives `output_splits[r]` from it; parts
    /// lie one after the other in rank order. The splits must agree between sender and receiver:
    /// another count is a mismatch on both.
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
        let (bounce, input_bounce) = (
            self.bounce_buffer(&output.as_input())?,
            self.bounce_buffer(&input)?,
        );
        let output = BounceBuffer::output(&bounce, output);
        let input = BounceBuffer::input(&input_bounce, input);
        let splits = Some((output_splits, input_splits));
        self.run(&self.prepare_all_to_all_v(&output, &input, splits, None)?)?;
        bounce.map_or(Ok(()), BounceBuffer::copy_back)
    }

    /// As [`Communicator::all_to_all_v_single`], enqueued; the splits are one tensor of u64 in
    /// device memory, the output's first, then the input's. A replayed graph reads them anew each
    /// time; splits that add up to more than a tensor holds fail before anything moves (on a GPU,
    /// whose memory the call does not read, in the kernel).
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
        if splits.len() != 2 * ranks {
            return Err(invalid(
                "all_to_all_v_single",
                format!(
                    "{} splits for {ranks} ranks; twice as many are needed",
                    splits.len()
                ),
            ));
        }
        let slices = slice.map(|slice| slice.split_at(ranks));
        let (output, input) = (output.into(), input.into());
        self.enqueue(&self.prepare_all_to_all_v(&output, &input, slices, Some(splits))?)
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

    /// What all ranks know of the machine.
    pub(super) fn machine(&self) -> Machine {
        Machine {
            oversubscribed: self.inner.oversubscribed,
            split: self.inner.is_split(),
            multicast: self.inner.windows.have_multicast(),
            gpu: self.inner.device.is_gpu(),
        }
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
        if let Some(backend) = &self.inner.backend {
            let bitwise = reduction.is_none() || backend.is_bitwise();
            let code = op.map(ReduceOp::code);
            let route = backend.route(operation, dtype, code, count);
            return hand_off(operation, code, bitwise, route);
        }
        let size = dtype.size() as u64;
        plan(
            self.options(),
            self.algorithm,
            self.machine(),
            self.size(),
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

    /// Returns the arguments of a kernel of the signal family. The input is staged if it is in no
    /// window, or if `staged` is true. `output` is given if peers write it. Each rank writes
    /// `written` bytes of results.
    fn exchange_of(
        &self,
        plan: &Plan,
        (input, staged): (&Input<'_>, bool),
        output: Option<&Output<'_>>,
        written: usize,
    ) -> Exchange {
        let size = input.dtype.size();
        let addr = |at: *const u8, count: usize| WindowAddr(self.inner.addr_of(at, count * size));
        let source_at = match staged {
            true => WindowAddr::NONE,
            false => addr(input.ptr, input.count),
        };
        let target_at = output.map_or(WindowAddr::NONE, |output| addr(output.ptr, output.count));
        let copied = !source_at.is_some() || output.is_some() && !target_at.is_some();
        Exchange {
            source_at,
            target_at,
            scalar: 0,
            chunk: plan.chunk,
            size: size as u32,
            policy: self.policy(written, copied),
        }
    }

    /// Returns the cache policy for results of `bytes` bytes a rank: 1 if they bypass the caches.
    /// Results that are copied bypass them if they are larger than a core's cache, because lines
    /// that another core has read must be fetched back before they can be written. Others bypass
    /// them if the results of all ranks are larger than half of the last-level cache; the other
    /// half has the inputs. Ranks need not agree.
    fn policy(&self, bytes: usize, copied: bool) -> u32 {
        let all = (bytes as u64).saturating_mul(u64::from(self.size()));
        let cached = if copied {
            bytes < STAGED_STREAMING_BYTES
        } else {
            all <= last_level_bytes() / 2
        };
        u32::from(!cached)
    }
}
