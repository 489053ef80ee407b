//! The call of an operation, and its algorithm.

use fusewire::{Collective, Communicator, Norm, Op, ReduceOp, Result};

use super::buffers::Buffers;
use super::operation::{EPSILON, Kind, ROOT};

/// Returns the collective of a kind: the send of a [`Kind::SendRecv`], and `None` for fused norms,
/// whose operands [`norm`] returns, and for mixtures of experts, which are no collectives.
fn collective<'a>(
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
        Kind::AllReduceNorm
        | Kind::ReduceScatterNorm
        | Kind::MoeDispatch(_)
        | Kind::MoeCombine(_) => return None,
    })
}

/// Returns the arguments of the fused norm.
fn norm(buffers: &Buffers) -> Norm<'_> {
    let Buffers {
        input,
        output,
        residual,
        weight,
        ..
    } = buffers;
    Norm::rms(output, input, weight, EPSILON).with_residual(residual)
}

/// Returns the name of the algorithm. The operations of a mixture of experts have only one, which
/// has no name.
pub(crate) fn algorithm(
    comm: &Communicator,
    kind: Kind,
    op: ReduceOp,
    buffers: &Buffers,
) -> Result<&'static str> {
    if buffers.experts.is_some() {
        return Ok("none");
    }
    let algorithm = match collective(comm, kind, op, buffers) {
        Some(collective) => comm.plan(collective.op())?.algorithm,
        None if kind == Kind::ReduceScatterNorm => {
            let hidden = buffers.weight.len();
            let op = Op::ReduceScatterNorm {
                rows: buffers.output.len() / hidden,
                hidden,
                dtype: buffers.output.dtype(),
                digest: 0,
            };
            comm.plan(&op)?.algorithm
        }
        None => comm.plan_norm(&norm(buffers))?,
    };
    Ok(algorithm.name())
}

/// Runs one call. If `enqueue` is true, only enqueues the call.
pub(crate) fn call(
    comm: &Communicator,
    kind: Kind,
    op: ReduceOp,
    buffers: &Buffers,
    enqueue: bool,
) -> Result<()> {
    if let Some(experts) = &buffers.experts {
        return match kind {
            Kind::MoeCombine(_) => experts.combine(&buffers.output, enqueue),
            _ => experts.dispatch(&buffers.input, enqueue),
        };
    }
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
