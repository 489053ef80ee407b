//! Reductions, bound to their kernels.

use super::NO_ROOT;
use super::checks::{apart, length, reducible, same_type};
use crate::Result;
use crate::comm::Communicator;
use crate::comm::handoff::{Address, hand_off};
use crate::comm::instances;
use crate::comm::observe::OpInfo;
use crate::comm::submit::PreparedOp;
use crate::options::{Algorithm, ReduceOp};
use crate::plan::Plan;
use crate::tensor::{Input, Output};
use fusewire_device::packet;
use fusewire_device::session::Operation;
use fusewire_kernels::Exchange;
use fusewire_kernels::all_reduce::{
    AllReducePacketParams, ReductionParams, select_all_reduce_packet,
};

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

impl Communicator {
    pub(in crate::comm) fn prepare_all_reduce_in_place<'a>(
        &self,
        buffer: &Output<'a>,
        op: ReduceOp,
    ) -> Result<PreparedOp<'a>> {
        self.prepare_all_reduce(buffer, &buffer.as_input(), op)
    }

    pub(in crate::comm) fn prepare_all_reduce<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        op: ReduceOp,
    ) -> Result<PreparedOp<'a>> {
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
        let op_info = OpInfo {
            call,
            input_count: input.count as u64,
            output_count: output.count as u64,
        };
        if let Some(backend) = self.backend_for(&plan, dtype)? {
            let (from, to, count) = (Address::of(input), Address::of_output(output), input.count);
            let run = hand_off(backend, self.call_args(dtype), move |backend, args| {
                // SAFETY: the arguments were checked; the memory is kept alive (`PreparedOp`).
                unsafe { backend.all_reduce(from.get(), to.get(), count, op, args) }
            });
            return Ok(PreparedOp::hand_off(run, tensors, borrowed, op_info));
        }
        if plan.algorithm == Algorithm::Packet
            && let Some(kernel) = select_all_reduce_packet(dtype, op.code())
        {
            debug_assert!(
                input.count * dtype.size()
                    <= packet::capacity(self.inner.constants.workspace.packet_slot) as usize
            );
            let params = AllReducePacketParams {
                header: self.header(call, input.count as u64),
                source: input.raw(),
                target: output.as_input().raw(),
            };
            return Ok(PreparedOp::new(
                self, kernel, params, tensors, borrowed, op_info,
            ));
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
        Ok(match plan.algorithm {
            Algorithm::Nvls => self.reduction(arguments, instances::all_reduce_nvls),
            Algorithm::Signal => self.reduction(arguments, instances::all_reduce_signal),
            _ => self.reduction(arguments, instances::reduce_shards),
        })
    }

    pub(in crate::comm) fn prepare_reduce_in_place<'a>(
        &self,
        buffer: &Output<'a>,
        root: u32,
        op: ReduceOp,
    ) -> Result<PreparedOp<'a>> {
        self.prepare_reduce(buffer, &buffer.as_input(), root, op)
    }

    pub(in crate::comm) fn prepare_reduce<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        root: u32,
        op: ReduceOp,
    ) -> Result<PreparedOp<'a>> {
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
        if let Some(backend) = self.backend_for(&plan, dtype)? {
            let (from, to, count) = (Address::of(input), Address::of_output(output), input.count);
            let run = hand_off(backend, self.call_args(dtype), move |backend, args| {
                // SAFETY: as for all_reduce.
                unsafe { backend.reduce(from.get(), to.get(), count, op, root, args) }
            });
            return Ok(PreparedOp::hand_off(
                run,
                [output.tensor, input.tensor, None],
                output.tensor.is_none() || input.tensor.is_none(),
                OpInfo {
                    call,
                    input_count: count as u64,
                    output_count: output.count as u64,
                },
            ));
        }
        let one_shot = plan.algorithm == Algorithm::Signal;
        let arguments = Arguments {
            call,
            plan,
            staged: one_shot && core::ptr::eq(input.ptr, output.ptr),
            output,
            input,
            op,
            count: input.count,
        };
        Ok(match one_shot {
            true => self.reduction(arguments, instances::all_reduce_signal),
            false => self.reduction(arguments, instances::reduce_shards),
        })
    }

    pub(in crate::comm) fn prepare_reduce_scatter<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        op: ReduceOp,
    ) -> Result<PreparedOp<'a>> {
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
        if let Some(backend) = self.backend_for(&plan, dtype)? {
            let (from, to) = (Address::of(input), Address::of_output(output));
            let run = hand_off(backend, self.call_args(dtype), move |backend, args| {
                // SAFETY: as for all_reduce.
                unsafe { backend.reduce_scatter(from.get(), to.get(), count, op, args) }
            });
            return Ok(PreparedOp::hand_off(
                run,
                [output.tensor, input.tensor, None],
                output.tensor.is_none() || input.tensor.is_none(),
                OpInfo {
                    call,
                    input_count: input.count as u64,
                    output_count: count as u64,
                },
            ));
        }
        let arguments = Arguments {
            call,
            plan,
            staged: false,
            output,
            input,
            op,
            count,
        };
        Ok(if plan.algorithm == Algorithm::Nvls {
            self.reduction(arguments, instances::reduce_scatter_nvls)
        } else {
            self.reduction(arguments, instances::reduce_scatter)
        })
    }

    /// Binds a kernel of the rounds family that reduces.
    fn reduction<'a>(
        &self,
        arguments: Arguments<'_, 'a>,
        select: instances::Select,
    ) -> PreparedOp<'a> {
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
        let written = count * size;
        let exchange = self.exchange_of(&plan, (input, staged), Some(output), written);
        let params = ReductionParams {
            header: self.header(call, count as u64),
            source: input.raw_bytes(),
            target: output.as_input().raw_bytes(),
            exchange: Exchange {
                scalar: op.scalar(input.dtype),
                ..exchange
            },
        };
        let borrowed = output.tensor.is_none() || input.tensor.is_none();
        PreparedOp::new(
            self,
            select(input.dtype, op),
            params,
            [output.tensor, input.tensor, None],
            borrowed,
            OpInfo {
                call,
                input_count: input.count as u64,
                output_count: output.count as u64,
            },
        )
    }
}
