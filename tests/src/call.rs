//! Calls one operation on given tensors. [`crate::rank`] and [`crate::grid`] share this code.

use crate::device::tensor;
use fusewire::{Communicator, DType, Input, Norm, Operation, Output, Result, Tensor, Work};

use crate::cases::Case;
use crate::oracle;

/// The tensors of a call. Tensors that the operation does not use are empty.
#[derive(Clone, Debug)]
pub struct Buffers {
    /// The output.
    pub output: Tensor,
    /// The input.
    pub input: Tensor,
    /// The residual that the fused norm reads.
    pub residual: Tensor,
    /// The weight of the fused norm.
    pub weight: Tensor,
    /// The residual that the fused norm writes.
    pub residual_out: Tensor,
}

/// Calls the blocking form of `case` on `buffers`. If `by_address` is true, passes raw addresses
/// instead of tensors, as calls on slices do.
///
/// # Errors
/// Returns the operation's error.
pub fn blocking(
    comm: &Communicator,
    case: &Case,
    buffers: &Buffers,
    by_address: bool,
) -> Result<()> {
    let (ranks, rank) = (comm.size(), comm.rank());
    let root = case.root % ranks;
    let output = |tensor| output_of(tensor, by_address);
    let input = |tensor| input_of(tensor, by_address);
    let op = oracle::reduction(case, rank);
    let (out, from) = (output(&buffers.output), input(&buffers.input));
    match case.operation {
        Operation::AllReduce if case.in_place => comm.all_reduce(out, op),
        Operation::AllReduce => comm.all_reduce_into(out, from, op),
        Operation::Reduce if case.in_place => comm.reduce(out, root, op),
        Operation::Reduce => comm.reduce_into(out, from, root, op),
        Operation::ReduceScatter => comm.reduce_scatter_single(out, from, op),
        Operation::AllGather => comm.all_gather_single(out, from),
        Operation::AllGatherV => comm.all_gather_v_single(out, from, &oracle::counts(case, ranks)),
        Operation::Broadcast => comm.broadcast(out, root),
        Operation::Scatter => comm.scatter_single(out, from, root),
        Operation::Gather => comm.gather_single(out, from, root),
        Operation::AllToAll => comm.all_to_all_single(out, from),
        Operation::AllToAllV => {
            let (receive, send) = oracle::splits_of(case, ranks, rank);
            comm.all_to_all_v_single(out, from, &receive, &send)
        }
        Operation::Send => {
            let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            if rank.is_multiple_of(2) {
                comm.send(from, next)?;
                comm.recv(out, previous)
            } else {
                comm.recv(out, previous)?;
                comm.send(from, next)
            }
        }
        Operation::Barrier => comm.barrier(),
        Operation::AllReduceNorm => {
            let epsilon = oracle::EPSILON;
            let norm = Norm::rms(out, from, input(&buffers.weight), epsilon)
                .with_residual(input(&buffers.residual));
            let norm = if case.root == 0 {
                norm.with_residual_out(output(&buffers.residual_out))
            } else {
                norm
            };
            comm.all_reduce_norm(&norm)
        }
        other => panic!("{other:?} has no cases"),
    }
}

/// Enqueues the asynchronous form of `case`.
///
/// # Errors
/// Returns the operation's error.
pub fn enqueue(comm: &Communicator, case: &Case, buffers: &Buffers) -> Result<Vec<Work>> {
    let (ranks, rank) = (comm.size(), comm.rank());
    let root = case.root % ranks;
    let (out, from) = (&buffers.output, &buffers.input);
    let op = oracle::reduction(case, rank);
    let words = |words: &[u64]| {
        let tensor = tensor(DType::U64, words.len())?;
        tensor.copy_from(words)?;
        Ok::<_, fusewire::Error>(tensor)
    };
    Ok(vec![match case.operation {
        Operation::AllReduce if case.in_place => comm.all_reduce_async(out, op)?,
        Operation::AllReduce => comm.all_reduce_into_async(out, from, op)?,
        Operation::Reduce if case.in_place => comm.reduce_async(out, root, op)?,
        Operation::Reduce => comm.reduce_into_async(out, from, root, op)?,
        Operation::ReduceScatter => comm.reduce_scatter_single_async(out, from, op)?,
        Operation::AllGather => comm.all_gather_single_async(out, from)?,
        Operation::AllGatherV => {
            let counts = words(&oracle::counts(case, ranks))?;
            comm.all_gather_v_single_async(out, from, &counts)?
        }
        Operation::Broadcast => comm.broadcast_async(out, root)?,
        Operation::Scatter => comm.scatter_single_async(out, from, root)?,
        Operation::Gather => comm.gather_single_async(out, from, root)?,
        Operation::AllToAll => comm.all_to_all_single_async(out, from)?,
        Operation::AllToAllV => {
            let (receive, send) = oracle::splits_of(case, ranks, rank);
            let (receive, send) = (words(&receive)?, words(&send)?);
            comm.all_to_all_v_single_async(out, from, &receive, &send)?
        }
        Operation::Send => {
            let (next, previous) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
            return Ok(if rank.is_multiple_of(2) {
                vec![
                    comm.send_async(from, next)?,
                    comm.recv_async(out, previous)?,
                ]
            } else {
                vec![
                    comm.recv_async(out, previous)?,
                    comm.send_async(from, next)?,
                ]
            });
        }
        Operation::Barrier => comm.barrier_async()?,
        Operation::AllReduceNorm => {
            let (residual, weight) = (&buffers.residual, &buffers.weight);
            let residual_out = &buffers.residual_out;
            let epsilon = oracle::EPSILON;
            let norm = Norm::rms(out, from, weight, epsilon).with_residual(residual);
            let norm = if case.root == 0 {
                norm.with_residual_out(residual_out)
            } else {
                norm
            };
            comm.all_reduce_norm_async(&norm)?
        }
        other => panic!("{other:?} has no cases"),
    }])
}

fn output_of(tensor: &Tensor, by_address: bool) -> Output<'_> {
    if by_address {
        // SAFETY: the tensor keeps its memory alive, and only the blocking call accesses the memory
        // until it returns.
        unsafe { Output::from_raw(tensor.as_ptr(), tensor.len(), tensor.dtype()) }
    } else {
        tensor.into()
    }
}

fn input_of(tensor: &Tensor, by_address: bool) -> Input<'_> {
    if by_address {
        // SAFETY: the tensor keeps its memory readable until the blocking call returns. Until then,
        // only that call may write the memory, and only if it is in place.
        unsafe { Input::from_raw(tensor.as_ptr(), tensor.len(), tensor.dtype()) }
    } else {
        tensor.into()
    }
}
