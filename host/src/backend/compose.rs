//! Composes the operations that a library lacks from sends and receives in a group.

use fusewire_device::DType;
use fusewire_device::element::ReductionCode;

use super::{Backend, CallArgs, backend_error};
use crate::Result;
use crate::collective::{Op, Operands};
use crate::options::ReduceOp;
use crate::tensor::{Input, Output};

/// A row: the offset of its first byte, and the number of elements.
type Row = (usize, usize);

/// Executes an all_gather_v, scatter, gather, all_to_all or all_to_all_v by sends and receives of
/// `backend`.
///
/// # Safety
/// The preconditions of [`Backend::execute`].
///
/// # Errors
/// The errors of [`Backend::execute`], and [`crate::Error::Backend`] for other operations.
pub unsafe fn by_messages<B: Backend + ?Sized>(
    backend: &B,
    op: &Op,
    operands: &Operands<'_>,
    args: &CallArgs,
) -> Result<()> {
    let (rank, ranks) = (backend.rank(), backend.size() as usize);
    let refused = || {
        let detail = "it cannot be composed of sends and receives";
        backend_error(backend.name(), op.name(), detail)
    };
    let dtype = op.dtype().ok_or_else(refused)?;
    let size = dtype.size();
    let equal = |count: usize| (0..ranks).map(move |row| (row * count * size, count));
    let of = |counts: &[u64]| {
        let mut at = 0;
        let rows = counts.iter().map(|count| {
            let row = (at, *count as usize);
            at += row.1 * size;
            row
        });
        rows.collect::<Vec<Row>>()
    };
    let none = || vec![(0, 0); ranks];
    let only = |root: u32, count: usize| {
        let mut rows = none();
        rows[root as usize].1 = count;
        rows
    };
    let (counts, inputs) = operands.host_counts();
    // Rows that are sent to each rank, and rows that are received from it.
    let (sent, received) = match *op {
        Op::AllToAll { count, .. } => (equal(count).collect(), equal(count).collect()),
        Op::AllToAllV { .. } => (of(inputs), of(counts)),
        Op::AllGatherV { .. } => (vec![(0, operands.input.count); ranks], of(counts)),
        Op::Scatter { count, root, .. } if root == rank => {
            (equal(count).collect(), only(root, count))
        }
        Op::Scatter { count, root, .. } => (none(), only(root, count)),
        Op::Gather { count, root, .. } if root == rank => {
            (only(root, count), equal(count).collect())
        }
        Op::Gather { count, root, .. } => (only(root, count), none()),
        _ => return Err(refused()),
    };
    if sent.iter().chain(&received).all(|(_, count)| *count == 0) {
        return Ok(());
    }
    let (from, to) = (operands.input.ptr, operands.output.ptr);
    let own = rank as usize;
    // In place, this rank's row is where it belongs.
    let may_be_in_place = !matches!(op, Op::AllToAll { .. } | Op::AllToAllV { .. });
    let in_place = may_be_in_place
        && core::ptr::eq(
            from.wrapping_add(sent[own].0),
            to.wrapping_add(received[own].0),
        );
    backend.group_start()?;
    let messages = (0u32..).zip(sent.into_iter().zip(received)).try_for_each(
        |(peer, ((sent_at, sent), (received_at, received)))| {
            if in_place && peer == rank {
                return Ok(());
            }
            if sent > 0 {
                // SAFETY: the row lies within the input, which holds all rows.
                let row = unsafe { Input::from_raw(from.wrapping_add(sent_at), sent, dtype) };
                let count = sent;
                let op = Op::Send { count, dtype, peer };
                // SAFETY: the row is valid as long as the input.
                unsafe { backend.execute(&op, &Operands::of_input(row), args)? };
            }
            if received > 0 {
                // SAFETY: the row lies within the output, which holds all rows.
                let row =
                    unsafe { Output::from_raw(to.wrapping_add(received_at), received, dtype) };
                let count = received;
                let op = Op::Recv { count, dtype, peer };
                // SAFETY: the row is valid as long as the output.
                unsafe { backend.execute(&op, &Operands::of_output(row), args)? };
            }
            Ok(())
        },
    );
    let ended = backend.group_end();
    messages.and(ended)
}

/// Executes a barrier as an all_reduce of one element in host memory.
///
/// # Safety
/// The backend accesses host memory, and blocks until the operation is complete.
///
/// # Errors
/// The errors of [`Backend::execute`].
pub unsafe fn barrier<B: Backend + ?Sized>(backend: &B, args: &CallArgs) -> Result<()> {
    let (count, dtype, reduction) = (1, DType::F32, ReductionCode::Sum);
    let op = Op::AllReduce {
        count,
        dtype,
        reduction,
    };
    let mut word = [0f32];
    let operands = Operands::in_place(&mut word).with_reduction(ReduceOp::Sum);
    // SAFETY: the operands are one f32 in host memory, which the backend accesses by the
    // precondition. The element outlives the call, which blocks.
    unsafe { backend.execute(&op, &operands, args) }
}
