//! Send, recv and barrier, bound to their kernels.

use super::NO_ROOT;
use crate::Result;
use crate::comm::Communicator;
use crate::comm::submit::Prepared;
use crate::options::Algorithm;
use crate::tensor::{Input, Output};
use fusewire_device::DType;
use fusewire_device::session::{Call, Operation};
use fusewire_kernels::barrier::{BARRIER, BarrierParams};
use fusewire_kernels::point::{RECV, RecvParams, SEND, SendParams};

impl Communicator {
    pub(super) fn prepare_send<'a>(&self, input: &Input<'a>, peer: u32) -> Result<Prepared<'a>> {
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

    pub(super) fn prepare_recv<'a>(&self, output: &Output<'a>, peer: u32) -> Result<Prepared<'a>> {
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
    pub(super) fn point_call(&self, operation: Operation, dtype: DType, peer: u32) -> u64 {
        let algorithm = Algorithm::Channel as u8;
        let both = Call::new(Operation::Send, dtype as u8, 0, algorithm, 0, 0).fingerprint();
        let own = Call::new(operation, dtype as u8, 0, algorithm, peer as u16, 0).0;
        own & !0xffff | both
    }

    pub(super) fn prepare_barrier(&self) -> Prepared<'static> {
        let plan = self.plan_rows(Operation::Barrier, 0, DType::U8, 1, None);
        let params = BarrierParams {
            constants: self.constants(),
            call: self.call(&plan, None, None, NO_ROOT, 0),
            timeout_ns: self.timeout_ns,
        };
        Prepared::new(self, &BARRIER, params, [None; 3], false)
    }
}
