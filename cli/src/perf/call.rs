//! The call of an operation.

use fusewire::{Collective, Communicator, Norm, ReduceOp, Result};

use super::buffers::Buffers;
use super::operation::{EPSILON, Kind, ROOT};

/// Returns the collective of a kind: the send of a [`Kind::SendRecv`], and `None` for fused norms,
/// whose operands [`norm`] returns.
pub(crate) fn collective<'a>(
    comm: &Communicator,
    kind: Kind,
    op: ReduceOp,
    buffers: &'a Buffers,
) -> Option<Collective<'a>> {
    let (output, input) = (&buffers.output, &buffers.input);
    let (counts, ranks) = (buffers.counts.as_slice(), comm.size());
    Some(match kind {
        Kind::AllReduce => Collective::all_reduce(output, input, op),
        Kind::ReduceScatter => Collective::reduce_scatter(output, input, op),
        Kind::AllGather => Collective::all_gather(output, input),
        Kind::AllGatherV => Collective::all_gather_v(output, input, counts),
        Kind::Broadcast => Collective::broadcast(output, ROOT),
        Kind::Reduce => Collective::reduce(output, input, ROOT, op),
        Kind::Scatter => Collective::scatter(output, input, ROOT),
        Kind::Gather => Collective::gather(output, input, ROOT),
        Kind::AllToAll => Collective::all_to_all(output, input, ranks),
        Kind::AllToAllV => {
            let (receive, send) = counts.split_at(ranks as usize);
            Collective::all_to_all_v(output, input, receive, send)
        }
        Kind::SendRecv => Collective::send(input, (comm.rank() + 1) % ranks),
        Kind::Barrier => Collective::barrier(),
        Kind::AllReduceNorm | Kind::ReduceScatterNorm => return None,
    })
}

/// Returns the arguments of the fused norm.
pub(crate) fn norm(buffers: &Buffers) -> Norm<'_> {
    let Buffers {
        input,
        output,
        residual,
        weight,
        ..
    } = buffers;
    Norm::rms(output, input, weight, EPSILON).with_residual(residual)
}

/// Runs one call. If `enqueue` is true, only enqueues the call.
pub(crate) fn call(
    comm: &Communicator,
    kind: Kind,
    op: ReduceOp,
    buffers: &Buffers,
    enqueue: bool,
) -> Result<()> {
    let issue = |collective| match enqueue {
        true => comm.enqueue(collective).map(drop),
        false => comm.execute(collective),
    };
    let Some(collective) = collective(comm, kind, op, buffers) else {
        let norm = norm(buffers);
        return match (kind == Kind::ReduceScatterNorm, enqueue) {
            (true, true) => comm.reduce_scatter_norm_async(&norm).map(drop),
            (true, false) => comm.reduce_scatter_norm(&norm),
            (false, true) => comm.all_reduce_norm_async(&norm).map(drop),
            (false, false) => comm.all_reduce_norm(&norm),
        };
    };
    if kind != Kind::SendRecv {
        return issue(collective);
    }
    let previous = (comm.rank() + comm.size() - 1) % comm.size();
    let recv = Collective::recv(&buffers.output, previous);
    // Odd ranks receive first, so that a ring of any number of ranks completes for any message
    // size.
    let [first, second] = match comm.rank().is_multiple_of(2) {
        true => [collective, recv],
        false => [recv, collective],
    };
    issue(first)?;
    issue(second)
}
