//! Operations that only move bytes, bound to their kernels.

use super::NO_ROOT;
use super::checks::{apart, length, same_type, within};
use crate::Result;
use crate::backend::{Backend, CallArgs};
use crate::comm::Communicator;
use crate::comm::handoff::{Address, hand_off};
use crate::comm::observe::OpInfo;
use crate::comm::submit::{PreparedOp, invalid};
use crate::options::Algorithm;
use crate::plan::Plan;
use crate::tensor::{Input, Output};
use fusewire_device::session::Operation;
use fusewire_kernels::movement::{
    ALL_GATHER, ALL_TO_ALL, BROADCAST, GATHER, MovementParams, SCATTER,
};
use fusewire_kernels::nvls::ALL_GATHER_NVLS;

/// Binds a kernel that only moves bytes.
macro_rules! movement {
    (
        $comm:expr, $operation:expr, $kernel:expr, $output:expr, $input:expr,
        {
            count: $count:expr, rows: $rows:expr, root: $root:expr, staged: $staged:expr,
            written: $written:expr
        },
        $backend:ident($from:ident, $to:ident, $elements:ident, $args:ident) => $handed:expr
    ) => {{
        let (comm, output, input) = ($comm, $output, $input);
        let count = $count;
        let plan = comm.plan_rows($operation, count, input.dtype, $rows, None);
        let call = comm.call(&plan, Some(input.dtype), None, $root, count as u64);
        let tensors = [output.tensor, input.tensor, None];
        let borrowed = output.tensor.is_none() || input.tensor.is_none();
        let op_info = OpInfo {
            call,
            input_count: input.count as u64,
            output_count: output.count as u64,
        };
        if let Some(backend) = comm.backend_for(&plan, input.dtype)? {
            let (from, to) = (Address::of(input), Address::of_output(output));
            let run = hand_off(
                backend,
                comm.call_args(input.dtype),
                move |$backend, $args| {
                    let ($from, $to, $elements) = (from.get(), to.get(), count);
                    // SAFETY: the arguments were checked; the memory is kept alive (`PreparedOp`).
                    unsafe { $handed }
                },
            );
            return Ok(PreparedOp::hand_off(run, tensors, borrowed, op_info));
        }
        let written = $written * input.dtype.size();
        let params = MovementParams {
            header: comm.header(call, count as u64),
            source: input.raw_bytes(),
            target: output.as_input().raw_bytes(),
            exchange: comm.exchange_of(&plan, (input, $staged), None, written),
        };
        Ok(PreparedOp::new(
            comm, &$kernel, params, tensors, borrowed, op_info,
        ))
    }};
}

/// All_to_all by a backend; in place the rows go through memory of their own.
///
/// # Safety
/// As [`Backend::all_to_all`], but for the overlap.
unsafe fn all_to_all(
    backend: &dyn Backend,
    from: *const u8,
    to: *mut u8,
    count: usize,
    args: &CallArgs,
) -> Result<()> {
    if !core::ptr::eq(from, to) {
        // SAFETY: the caller's promise.
        return unsafe { backend.all_to_all(from, to, count, args) };
    }
    if args.stream != 0 {
        return Err(invalid(
            "all_to_all",
            "in place, by a library on a GPU: use an output of its own".to_owned(),
        ));
    }
    let bytes = args.bytes(count) * backend.size() as usize;
    // SAFETY: the rows are readable.
    let copy = unsafe { core::slice::from_raw_parts(from, bytes) }.to_vec();
    // SAFETY: the copy lives during the call, which blocks (the CPU's way).
    unsafe { backend.all_to_all(copy.as_ptr(), to, count, args) }
}

impl Communicator {
    pub(in crate::comm) fn prepare_all_gather<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
    ) -> Result<PreparedOp<'a>> {
        let name = "all_gather";
        same_type(name, output, input)?;
        self.rows(name, "output", output.count, input.count)?;
        within(name, output, input, self.rank() as usize * input.count)?;
        let plan = self.plan_rows(Operation::AllGather, input.count, input.dtype, 1, None);
        if plan.algorithm == Algorithm::Nvls {
            return Ok(self.all_gather_by_multicast(output, input, &plan));
        }
        movement!(self, Operation::AllGather, ALL_GATHER, output, input, {
            count: input.count, rows: 1, root: NO_ROOT, staged: false, written: output.count
        }, backend(from, to, count, args) => backend.all_gather(from, to, count, args))
    }

    fn all_gather_by_multicast<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        plan: &Plan,
    ) -> PreparedOp<'a> {
        let call = self.call(plan, Some(input.dtype), None, NO_ROOT, input.count as u64);
        let written = output.count * input.dtype.size();
        let params = MovementParams {
            header: self.header(call, input.count as u64),
            source: input.raw_bytes(),
            target: output.as_input().raw_bytes(),
            exchange: self.exchange_of(plan, (input, false), Some(output), written),
        };
        PreparedOp::new(
            self,
            &ALL_GATHER_NVLS,
            params,
            [output.tensor, input.tensor, None],
            output.tensor.is_none() || input.tensor.is_none(),
            OpInfo {
                call,
                input_count: input.count as u64,
                output_count: output.count as u64,
            },
        )
    }

    pub(in crate::comm) fn prepare_broadcast<'a>(
        &self,
        buffer: &Output<'a>,
        root: u32,
    ) -> Result<PreparedOp<'a>> {
        self.rank_of("broadcast", "root", root)?;
        let input = &buffer.as_input();
        movement!(self, Operation::Broadcast, BROADCAST, buffer, input, {
            count: input.count, rows: 1, root: root as u16, staged: false, written: input.count
        }, backend(_from, to, count, args) => backend.broadcast(to, count, root, args))
    }

    pub(in crate::comm) fn prepare_scatter<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        root: u32,
    ) -> Result<PreparedOp<'a>> {
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
        movement!(self, Operation::Scatter, SCATTER, output, input, {
            count: output.count, rows: rows, root: root as u16, staged: false, written: output.count
        }, backend(from, to, count, args) => backend.scatter(from, to, count, root, args))
    }

    pub(in crate::comm) fn prepare_gather<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        root: u32,
    ) -> Result<PreparedOp<'a>> {
        let name = "gather";
        self.rank_of(name, "root", root)?;
        if root == self.rank() {
            same_type(name, output, input)?;
            self.rows(name, "output", output.count, input.count)?;
            within(name, output, input, root as usize * input.count)?;
        }
        movement!(self, Operation::Gather, GATHER, output, input, {
            count: input.count, rows: 1, root: root as u16, staged: false, written: output.count
        }, backend(from, to, count, args) => backend.gather(from, to, count, root, args))
    }

    pub(in crate::comm) fn prepare_all_to_all<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
    ) -> Result<PreparedOp<'a>> {
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
        movement!(self, Operation::AllToAll, ALL_TO_ALL, output, input, {
            count: input.count / ranks, rows: rows, root: NO_ROOT, staged: staged,
            written: output.count
        }, backend(from, to, count, args) => all_to_all(backend, from, to, count, args))
    }
}
