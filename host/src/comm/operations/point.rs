//! Send, recv and barrier, bound to their kernels.

use super::NO_ROOT;
use crate::Result;
use crate::comm::Communicator;
use crate::comm::handoff::{Address, hand_off};
use crate::comm::observe::OpInfo;
use crate::comm::submit::PreparedOp;
use crate::options::Algorithm;
use crate::tensor::{Input, Output};
use fusewire_device::DType;
use fusewire_device::session::{Call, Operation};
use fusewire_kernels::barrier::{BARRIER, BarrierParams};
use fusewire_kernels::point::{RECV, RecvParams, SEND, SendParams};

impl Communicator {
    pub(in crate::comm) fn prepare_send<'a>(
        &self,
        input: &Input<'a>,
        peer: u32,
    ) -> Result<PreparedOp<'a>> {
        self.peer_of("send", peer)?;
        let bytes = (input.count * input.dtype.size()) as u64;
        let call = self.point_call(Operation::Send, input.dtype, peer);
        let borrowed = input.tensor.is_none();
        let tensors = [input.tensor, None, None];
        let op_info = OpInfo {
            call,
            input_count: input.count as u64,
            output_count: 0,
        };
        if let Some(backend) = self.inner.backend.clone() {
            let (at, count) = (Address::of(input), input.count);
            let run = hand_off(
                backend,
                self.call_args(input.dtype),
                move |backend, args| {
                    // SAFETY: the memory is kept alive (`PreparedOp`).
                    unsafe { backend.send(at.get(), count, peer, args) }
                },
            );
            return Ok(PreparedOp::hand_off(run, tensors, borrowed, op_info));
        }
        let params = SendParams {
            header: self.header(call, bytes),
            source: input.raw_bytes(),
        };
        Ok(PreparedOp::new(
            self, &SEND, params, tensors, borrowed, op_info,
        ))
    }

    pub(in crate::comm) fn prepare_recv<'a>(
        &self,
        output: &Output<'a>,
        peer: u32,
    ) -> Result<PreparedOp<'a>> {
        self.peer_of("recv", peer)?;
        let bytes = (output.count * output.dtype.size()) as u64;
        let call = self.point_call(Operation::Recv, output.dtype, peer);
        let borrowed = output.tensor.is_none();
        let tensors = [output.tensor, None, None];
        let op_info = OpInfo {
            call,
            input_count: 0,
            output_count: output.count as u64,
        };
        if let Some(backend) = self.inner.backend.clone() {
            let (at, count) = (Address::of_output(output), output.count);
            let run = hand_off(
                backend,
                self.call_args(output.dtype),
                move |backend, args| {
                    // SAFETY: the memory is kept alive (`PreparedOp`).
                    unsafe { backend.recv(at.get(), count, peer, args) }
                },
            );
            return Ok(PreparedOp::hand_off(run, tensors, borrowed, op_info));
        }
        let params = RecvParams {
            header: self.header(call, bytes),
            target: output.as_input().raw_bytes(),
        };
        Ok(PreparedOp::new(
            self, &RECV, params, tensors, borrowed, op_info,
        ))
    }

    /// A call of a send or receive: both sides have the same fingerprint.
    pub(in crate::comm) fn point_call(&self, operation: Operation, dtype: DType, peer: u32) -> u64 {
        let algorithm = Algorithm::Channel as u8;
        let both = Call::new(Operation::Send, dtype as u8, 0, algorithm, 0, 0).fingerprint();
        let own = Call::new(operation, dtype as u8, 0, algorithm, peer as u16, 0).0;
        own & !0xffff | both
    }

    pub(in crate::comm) fn prepare_barrier(&self) -> PreparedOp<'static> {
        let plan = self.plan_rows(Operation::Barrier, 0, DType::U8, 1, None);
        let call = self.call(&plan, None, None, NO_ROOT, 0);
        let op_info = OpInfo {
            call,
            ..OpInfo::default()
        };
        if let Some(backend) = self.inner.backend.clone() {
            let run = hand_off(backend, self.call_args(DType::U8), |backend, args| {
                backend.barrier(args)
            });
            return PreparedOp::hand_off(run, [None; 3], false, op_info);
        }
        let params = BarrierParams {
            header: self.header(call, 0),
        };
        PreparedOp::new(self, &BARRIER, params, [None; 3], false, op_info)
    }
}
