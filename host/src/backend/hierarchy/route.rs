//! Which way an operation takes: a pure function of what is equal on all ranks.
//!
//! The byte counts are estimates for a network that is slower than a host's memory. Two namespaces
//! of one machine with two cores, where the cable is memory too, show no difference: there, for
//! four ranks and 64 MiB, Gloo over all ranks took 249 ms, levels 347 ms, rank order 478 ms (best
//! of three).

use fusewire_device::DType;
use fusewire_device::element::ReductionCode;
use fusewire_device::session::Operation;

use crate::backend::gloo::data_type;

/// All inputs go to every rank up to this many bytes of one, where reductions are ordered: one
/// exchange instead of two, which cost a time over the network each, for as many times the bytes as
/// there are ranks. An estimate.
pub(super) const GATHERED_BYTES: usize = 4 << 10;

/// By shards from this many bytes on: below, the three steps of small shards cost more than one
/// rank's carrying everything between the hosts. An estimate.
pub(super) const SHARDS_BYTES: usize = 64 << 10;

/// Rows of an all_gather go by shards from this many bytes on: below, one operation of Gloo's over
/// all ranks is less than three steps. An estimate.
pub(super) const ROW_BYTES: usize = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HierarchyRoute {
    /// Everybody gets all inputs and reduces them in rank order.
    Gathered,
    /// Shards are exchanged, reduced in rank order, gathered.
    Ordered,
    /// Each rank of a host carries its shard to its peers.
    Shards,
    /// One rank of a host carries everything.
    Leaders,
    /// Gloo over all ranks.
    Flat,
    /// Messages: between ranks of a host by its channels, else by Gloo.
    Messages,
}

/// What the choice depends on.
pub(super) struct RouteParams {
    pub(super) operation: Operation,
    pub(super) reduction: Option<(DType, ReductionCode)>,
    /// Of a row, where there are rows.
    pub(super) bytes: usize,
    pub(super) bitwise: bool,
    /// Whether all hosts have equally many ranks.
    pub(super) even: bool,
    /// Whether every host has one rank.
    pub(super) alone: bool,
}

pub(super) fn choose(params: &RouteParams) -> HierarchyRoute {
    let RouteParams {
        operation,
        bytes,
        even,
        alone,
        ..
    } = *params;
    if let Some((dtype, code)) = params.reduction {
        // What Gloo cannot reduce is reduced here.
        if params.bitwise || data_type(dtype, code).is_none() {
            return match operation {
                Operation::ReduceScatter => HierarchyRoute::Ordered,
                _ if bytes <= GATHERED_BYTES => HierarchyRoute::Gathered,
                _ => HierarchyRoute::Ordered,
            };
        }
    }
    match operation {
        Operation::AllReduce | Operation::Reduce | Operation::Broadcast if alone => {
            HierarchyRoute::Flat
        }
        Operation::AllReduce if even && bytes >= SHARDS_BYTES => HierarchyRoute::Shards,
        Operation::AllReduce | Operation::Reduce | Operation::Broadcast => HierarchyRoute::Leaders,
        // Gloo has none: its way would be to reduce all rows everywhere.
        Operation::ReduceScatter if even && !alone => HierarchyRoute::Shards,
        Operation::ReduceScatter => HierarchyRoute::Ordered,
        Operation::AllGather if even && !alone && bytes >= ROW_BYTES => HierarchyRoute::Shards,
        Operation::AllGather | Operation::Barrier => HierarchyRoute::Flat,
        _ => HierarchyRoute::Messages,
    }
}

impl HierarchyRoute {
    /// What happens, and why so.
    pub(super) const fn why(self, operation: Operation) -> &'static str {
        match self {
            Self::Gathered => {
                "gloo gathers all inputs, every rank reduces them in rank order (one exchange, for \
                    few bytes)"
            }
            Self::Ordered => {
                "ranks exchange shards (kernels on each host, gloo between), each reduces its own \
                    in rank order"
            }
            Self::Shards => match operation {
                Operation::AllGather => {
                    "each rank gathers from its peers by gloo, then kernels on each host (equally \
                        many ranks each)"
                }
                Operation::ReduceScatter => {
                    "kernels reduce on each host, each rank exchanges with its peers by gloo \
                        (equally many ranks each)"
                }
                _ => {
                    "kernels reduce_scatter on each host, each rank all_reduces its shard with its \
                        peers by gloo, \
                     kernels all_gather on each host (many bytes, equally many ranks each)"
                }
            },
            Self::Leaders => {
                "kernels on each host, gloo between one rank of each (few bytes, or hosts with \
                    unequally many ranks)"
            }
            Self::Flat => "gloo over all ranks (nothing to gain on a host)",
            Self::Messages => "messages: channels between ranks of a host, else gloo",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUM: Option<(DType, ReductionCode)> = Some((DType::F32, ReductionCode::Sum));

    fn route(operation: Operation, bytes: usize, bitwise: bool, even: bool) -> HierarchyRoute {
        choose(&RouteParams {
            operation,
            reduction: match operation {
                Operation::AllReduce | Operation::Reduce | Operation::ReduceScatter => SUM,
                _ => None,
            },
            bytes,
            bitwise,
            even,
            alone: false,
        })
    }

    #[test]
    fn bits_are_only_promised_by_ways_in_rank_order() {
        use Operation::{AllReduce, Reduce, ReduceScatter};
        for operation in [AllReduce, Reduce, ReduceScatter] {
            for bytes in [0, 4, GATHERED_BYTES + 4, 1 << 26] {
                for even in [false, true] {
                    let route = route(operation, bytes, true, even);
                    assert!(
                        matches!(route, HierarchyRoute::Gathered | HierarchyRoute::Ordered),
                        "{route:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn shards_need_hosts_of_one_size() {
        let large = 1 << 26;
        assert_eq!(
            route(Operation::AllReduce, large, false, true),
            HierarchyRoute::Shards
        );
        assert_eq!(
            route(Operation::AllReduce, large, false, false),
            HierarchyRoute::Leaders
        );
        assert_eq!(
            route(Operation::AllReduce, 64, false, true),
            HierarchyRoute::Leaders
        );
        assert_eq!(
            route(Operation::AllGather, large, true, false),
            HierarchyRoute::Flat
        );
    }
}
