//! One send or receive of a batch.

use crate::collective::Collective;
use crate::tensor::{Tensor, TensorUse};
use crate::usage::AccessList;

/// Direction of a [`P2pOp`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum P2pKind {
    /// Sends to the peer.
    Send,
    /// Receives from the peer.
    Recv,
}

/// One operation of a [`Batch`](super::Batch).
#[derive(Clone, Debug)]
pub struct P2pOp {
    /// Direction: send or receive.
    pub kind: P2pKind,
    /// Tensor that is sent, or that is received into.
    pub tensor: Tensor,
    /// The other rank. It may be this rank if the batch has matching sends and receives.
    pub peer: u32,
}

impl P2pOp {
    pub(super) fn accesses(ops: &[Self]) -> AccessList<'_> {
        let uses = ops.iter().map(|op| match op.kind {
            P2pKind::Send => TensorUse::Read(&op.tensor),
            P2pKind::Recv => TensorUse::Write(&op.tensor),
        });
        TensorUse::accesses(uses)
    }

    pub(super) fn collective(&self) -> Collective<'_> {
        match self.kind {
            P2pKind::Send => Collective::send(&self.tensor, self.peer),
            P2pKind::Recv => Collective::recv(&self.tensor, self.peer),
        }
    }
}
