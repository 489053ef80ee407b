//! Batches: sends and receives that run concurrently.

use std::sync::Arc;

use fusewire_device::call::{Call, Operation};
use fusewire_kernels::batch::{BATCH, BatchOp, BatchParams, NONE, kind};

use super::observe::{Arguments, OpInfo};
use super::on_gpu::OnGpu;
use super::p2p::{P2pKind, P2pOp};
use super::submit::{PreparedOp, invalid};
use super::{Communicator, Work};
#[cfg(feature = "gloo")]
use fusewire_device::DType;

use crate::Result;
use crate::algorithm::Algorithm;
#[cfg(feature = "gloo")]
use crate::collective::Op;
use crate::tensor::Tensor;
use crate::usage::AccessList;

/// A send or receive of raw memory.
#[cfg(feature = "gloo")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawMessage {
    pub(crate) kind: P2pKind,
    pub(crate) at: usize,
    pub(crate) bytes: usize,
    pub(crate) peer: u32,
}

/// Sends and receives that are collected, then issued together. Messages to and from different
/// peers are not ordered, so no pattern (ring, all-to-all) can deadlock, regardless of the sizes.
/// Messages between the same two ranks keep the order of the calls.
///
/// Created by [`Communicator::batch_op_create`].
#[derive(Debug)]
pub struct Batch {
    comm: Communicator,
    ops: Vec<P2pOp>,
}

/// Device memory of a batch: its operations and their progress.
struct Table {
    ops: Box<[BatchOp]>,
    /// Accessed only by the kernel.
    progress: Box<[core::cell::UnsafeCell<u64>]>,
    /// Keeps the memory of the operations allocated.
    _tensors: Vec<Tensor>,
}

// SAFETY: the operations are only read, and only one launch at a time accesses the progress,
// because the communicator's launches are ordered.
unsafe impl Sync for Table {}
// SAFETY: see `Sync`; the pointers in the operations are not tied to a thread.
unsafe impl Send for Table {}

impl Communicator {
    /// Creates an empty batch.
    pub fn batch_op_create(&self) -> Batch {
        Batch {
            comm: self.clone(),
            ops: Vec::new(),
        }
    }
}

impl Batch {
    /// Adds a send of `tensor` to `peer`.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for a rank out of range, or a tensor of another device.
    pub fn send(&mut self, tensor: &Tensor, peer: u32) -> Result<()> {
        self.add(P2pKind::Send, tensor, peer)
    }

    /// Adds a receive from `peer` into `tensor`.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] for a rank out of range, or a tensor of another device.
    pub fn recv(&mut self, tensor: &Tensor, peer: u32) -> Result<()> {
        self.add(P2pKind::Recv, tensor, peer)
    }

    fn add(&mut self, kind: P2pKind, tensor: &Tensor, peer: u32) -> Result<()> {
        if peer >= self.comm.size() {
            return Err(invalid(
                "batch",
                format!("peer {peer}; ranks are 0 to {}", self.comm.size() - 1),
            ));
        }
        self.comm.check_device("batch", tensor)?;
        self.ops.push(P2pOp {
            kind,
            tensor: tensor.clone(),
            peer,
        });
        Ok(())
    }

    /// Returns the operations that have been added since the last issue.
    pub fn ops(&self) -> &[P2pOp] {
        &self.ops
    }

    /// Runs the batch and waits until it has completed. The batch is empty afterwards.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] if sends and receives of this rank to itself do not match,
    /// or if an operation receives into memory that another one uses; the communicator's first
    /// failure.
    pub fn issue(&mut self) -> Result<()> {
        let ops = core::mem::take(&mut self.ops);
        if ops.is_empty() {
            return self.comm.failure().map_or(Ok(()), Err);
        }
        let prepared = self.comm.prepare_batch(&ops)?;
        self.comm.run_with(&prepared, Arguments::Batch(&ops))
    }

    /// Enqueues the batch on the communicator's stream. The batch is empty afterwards.
    ///
    /// # Errors
    /// The errors of [`Batch::issue`]. The [`Work`] reports a failure while the batch runs.
    pub fn issue_async(&mut self) -> Result<Work> {
        let ops = core::mem::take(&mut self.ops);
        let prepared = self.comm.prepare_batch(&ops)?;
        self.comm.submit_with(&prepared, Arguments::Batch(&ops))
    }
}

/// Checks that no operation uses memory into which another one receives: they run concurrently.
fn check_apart(ops: &[P2pOp]) -> Result<()> {
    let used = ops.iter().filter(|op| !op.tensor.is_empty()).map(|op| {
        let (start, tensor) = (op.tensor.as_ptr() as usize, &op.tensor);
        (start, start + tensor.len() * tensor.dtype().size(), op)
    });
    let mut used: Vec<_> = used.collect();
    used.sort_by_key(|(start, ..)| *start);
    // The ends of the memory so far that is used, and that is received into.
    let (mut used_to, mut received_to) = (0, 0);
    for (start, end, op) in used {
        let limit = match op.kind {
            P2pKind::Send => received_to,
            P2pKind::Recv => used_to,
        };
        if start < limit {
            let kind = match op.kind {
                P2pKind::Send => "the memory that is sent to",
                P2pKind::Recv => "the memory for a receive from",
            };
            let detail = format!(
                "{kind} rank {} overlaps that of another operation, of which at least one receives",
                op.peer
            );
            return Err(invalid("batch", detail));
        }
        used_to = used_to.max(end);
        if op.kind == P2pKind::Recv {
            received_to = received_to.max(end);
        }
    }
    Ok(())
}

impl Communicator {
    fn prepare_batch(&self, ops: &[P2pOp]) -> Result<PreparedOp<'static>> {
        check_apart(ops)?;
        let bytes = |ops: &[P2pOp], wanted: P2pKind| -> u64 {
            ops.iter()
                .filter(|op| op.kind == wanted)
                .map(|op| op.tensor.len() as u64)
                .sum()
        };
        let algorithm = Algorithm::Channel as u8;
        let call = Call::new(Operation::Batch, 0, 0, algorithm, self.rank() as u16, 0).0;
        let op_info = OpInfo {
            call,
            input_count: bytes(ops, P2pKind::Send),
            output_count: bytes(ops, P2pKind::Recv),
        };
        let mut table = self.matched(ops)?;
        if let Some(backend) = &self.inner.executor.backend {
            for op in ops.iter().filter(|op| !op.tensor.is_empty()) {
                self.check_supported(&**backend, &op.collective())?;
            }
            return Ok(self.hand_off_batch(ops.to_vec(), op_info));
        }
        for at in 0..table.len() {
            let op = table[at];
            let before = table[..at]
                .iter()
                .rposition(|other| other.kind == op.kind && other.peer == op.peer);
            table[at].after = before.map_or(NONE, |before| before as u32);
        }
        let accesses = AccessList::Shared(P2pOp::accesses(ops).to_arc());
        let tensors = ops.iter().map(|op| op.tensor.clone()).collect();
        let prepared = self.batch_of(table, tensors, call, op_info)?;
        Ok(prepared.accessing(&accesses))
    }

    /// Sends and receives raw memory concurrently. No message may be empty or have this rank as its
    /// peer.
    ///
    /// # Safety
    /// Memory that is sent must be readable, and memory that is received into writable, during the
    /// call.
    #[cfg(feature = "gloo")]
    pub(crate) unsafe fn exchange_raw(&self, messages: &[RawMessage]) -> Result<()> {
        let mut table: Vec<BatchOp> = Vec::with_capacity(messages.len());
        for message in messages {
            let (count, dtype, peer) = (message.bytes, DType::U8, message.peer);
            let (kind, op) = match message.kind {
                P2pKind::Send => (kind::SEND, Op::Send { count, dtype, peer }),
                P2pKind::Recv => (kind::RECV, Op::Recv { count, dtype, peer }),
            };
            let call = op.call(Algorithm::Channel, self.tag);
            let before = table
                .iter()
                .rposition(|other| other.kind == kind && other.peer == message.peer);
            table.push(BatchOp {
                kind,
                peer: message.peer,
                after: before.map_or(NONE, |before| before as u32),
                unused: 0,
                fingerprint: call.fingerprint(),
                bytes: message.bytes as u64,
                at: message.at as u64,
                to: 0,
            });
        }
        let algorithm = Algorithm::Channel as u8;
        let call = Call::new(Operation::Batch, 0, 0, algorithm, self.rank() as u16, 0).0;
        let op_info = OpInfo {
            call,
            ..OpInfo::default()
        };
        self.run(&self.batch_of(table, Vec::new(), call, op_info)?)
    }

    fn batch_of(
        &self,
        table: Vec<BatchOp>,
        tensors: Vec<Tensor>,
        call: u64,
        op_info: OpInfo,
    ) -> Result<PreparedOp<'static>> {
        let words = table.len() * self.inner.group.options.blocks as usize;
        if let Some(on_gpu) = &self.inner.executor.on_gpu {
            return self.batch_on_gpu(on_gpu, table, words, tensors, call, op_info);
        }
        let table = Arc::new(Table {
            progress: (0..words).map(|_| core::cell::UnsafeCell::new(0)).collect(),
            ops: table.into(),
            _tensors: tensors,
        });
        let params = BatchParams {
            header: self.header(call, table.ops.len() as u64),
            ops: table.ops.as_ptr(),
            progress: table.progress.as_ptr().cast_mut().cast(),
        };
        Ok(PreparedOp::new(self, &BATCH, params, [None; 3], false, op_info).keeping(table))
    }

    /// Like [`Communicator::batch_of`], with the table in device memory: the operations, then the
    /// zeroed progress.
    fn batch_on_gpu(
        &self,
        on_gpu: &OnGpu,
        table: Vec<BatchOp>,
        words: usize,
        tensors: Vec<Tensor>,
        call: u64,
        op_info: OpInfo,
    ) -> Result<PreparedOp<'static>> {
        let count = table.len() as u64;
        let ops: &[u8] = bytemuck::cast_slice(&table);
        let mut bytes = ops.to_vec();
        bytes.resize(ops.len() + 8 * words, 0);
        let (scratch, upload) = self.table_on_gpu(on_gpu.gpu(), &bytes)?;
        let at = scratch.address();
        let params = BatchParams {
            header: self.header(call, count),
            ops: at as *const BatchOp,
            progress: (at + ops.len() as u64) as *mut u64,
        };
        let prepared = PreparedOp::new(self, &BATCH, params, [None; 3], false, op_info);
        Ok(prepared
            .keeping(Arc::new((scratch, tensors)))
            .uploading(upload))
    }

    /// Returns the operations in the kernel's format. A send of this rank to itself becomes a copy
    /// to the matching receive.
    fn matched(&self, ops: &[P2pOp]) -> Result<Vec<BatchOp>> {
        let own = |wanted: P2pKind| {
            ops.iter()
                .filter(move |op| op.kind == wanted && op.peer == self.rank())
        };
        if own(P2pKind::Send).count() != own(P2pKind::Recv).count() {
            return Err(invalid(
                "batch",
                format!(
                    "{} sends of this rank to itself, {} receives: each needs its other side",
                    own(P2pKind::Send).count(),
                    own(P2pKind::Recv).count()
                ),
            ));
        }
        let mut table = Vec::with_capacity(ops.len());
        for (sent, received) in own(P2pKind::Send).zip(own(P2pKind::Recv)) {
            let (from, to) = (&sent.tensor, &received.tensor);
            if from.dtype() != to.dtype() || from.len() != to.len() {
                return Err(invalid(
                    "batch",
                    format!(
                        "{} elements of {} are sent to this rank itself, which receives {} of {}",
                        from.len(),
                        from.dtype().name(),
                        to.len(),
                        to.dtype().name()
                    ),
                ));
            }
            table.push(BatchOp {
                kind: kind::COPY,
                peer: self.rank(),
                after: NONE,
                unused: 0,
                fingerprint: 0,
                bytes: (from.len() * from.dtype().size()) as u64,
                at: from.as_ptr() as u64,
                to: to.as_ptr() as u64,
            });
        }
        for op in ops.iter().filter(|op| op.peer != self.rank()) {
            let dtype = op.tensor.dtype();
            let call = op.collective().op.call(Algorithm::Channel, self.tag);
            table.push(BatchOp {
                kind: match op.kind {
                    P2pKind::Send => kind::SEND,
                    P2pKind::Recv => kind::RECV,
                },
                peer: op.peer,
                after: NONE,
                unused: 0,
                fingerprint: call.fingerprint(),
                bytes: (op.tensor.len() * dtype.size()) as u64,
                at: op.tensor.as_ptr() as u64,
                to: 0,
            });
        }
        Ok(table)
    }

    fn hand_off_batch(&self, ops: Vec<P2pOp>, op_info: OpInfo) -> PreparedOp<'static> {
        let backend = self.inner.executor.backend.clone();
        let args = self.call_args();
        let accesses = AccessList::Shared(P2pOp::accesses(&ops).to_arc());
        let run = Arc::new(move || {
            let Some(backend) = &backend else {
                return Ok(());
            };
            backend.group_start()?;
            let calls = ops.iter().filter(|op| !op.tensor.is_empty());
            let ran = calls.map(P2pOp::collective).try_for_each(|call| {
                // SAFETY: the closure keeps the tensors alive.
                unsafe { backend.execute(&call.op, &call.operands, &args) }
            });
            ran.and(backend.group_end())
        });
        PreparedOp::hand_off(run, [None; 3], false, op_info).accessing(&accesses)
    }
}
