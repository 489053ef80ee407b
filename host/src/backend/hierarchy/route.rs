//! Chooses the route of an operation, as a pure function of values that are equal on all ranks.
//!
//! The thresholds are estimates for a network that is slower than host memory. They were not
//! measured on such a network. A test with two network namespaces on one machine with two cores
//! shows no gain from the hierarchy: with four ranks and 64 MiB, Gloo over all ranks took 249 ms,
//! the routes of `levels` took 347 ms, and the route in rank order took 478 ms (best of three).

use fusewire_device::DType;
use fusewire_device::element::ReductionCode;
use fusewire_device::session::Operation;

use crate::backend::gloo::data_type;

/// Maximum input size in bytes for which an ordered reduction gathers all inputs on every rank.
/// Gathering takes one exchange over the network instead of two, but each rank receives the whole
/// input of every other rank. Estimated.
pub(super) const GATHERED_BYTES: usize = 4 << 10;

/// Minimum size in bytes for all_reduce by shards. For smaller sizes, the three steps with shards
/// cost more than an exchange of all data by one rank of each host. Estimated.
pub(super) const SHARDS_BYTES: usize = 64 << 10;

/// Minimum size in bytes of a row for all_gather by shards. For smaller rows, one Gloo operation
/// over all ranks is faster than the steps with shards. Estimated.
pub(super) const ROW_BYTES: usize = 16 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HierarchyRoute {
    /// Every rank gathers all inputs and reduces them in rank order.
    Gathered,
    /// Ranks exchange shards, each rank reduces one shard in rank order, and the ranks gather the
    /// results.
    Ordered,
    /// Each rank of a host exchanges its shard with its peers.
    Shards,
    /// One rank of each host exchanges all data.
    Leaders,
    /// One Gloo operation over all ranks.
    Flat,
    /// Messages within a host use local channels; messages between hosts use Gloo.
    Messages,
}

/// Inputs of [`choose`].
pub(super) struct RouteParams {
    pub(super) operation: Operation,
    pub(super) reduction: Option<(DType, ReductionCode)>,
    /// Size of the data in bytes. For operations on rows: size of one row in bytes.
    pub(super) bytes: usize,
    pub(super) bitwise: bool,
    /// True if all hosts have the same number of ranks.
    pub(super) even: bool,
    /// True if every host has one rank.
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
        // The module `ordered` reduces without Gloo, so it also serves types and reductions that
        // Gloo lacks.
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
        // Gloo has no reduce_scatter, so the flat route would reduce all rows on all ranks.
        Operation::ReduceScatter if even && !alone => HierarchyRoute::Shards,
        Operation::ReduceScatter => HierarchyRoute::Ordered,
        Operation::AllGather if even && !alone && bytes >= ROW_BYTES => HierarchyRoute::Shards,
        Operation::AllGather | Operation::Barrier => HierarchyRoute::Flat,
        _ => HierarchyRoute::Messages,
    }
}

impl HierarchyRoute {
    /// Returns the steps of the route, and the reason for its choice.
    pub(super) const fn why(self, operation: Operation) -> &'static str {
        match self {
            Self::Gathered => {
                "gloo gathers all inputs, every rank reduces them in rank order (one exchange, for \
                 small messages)"
            }
            Self::Ordered => {
                "ranks exchange shards (kernels on each host, gloo between hosts), each reduces \
                 its own in rank order"
            }
            Self::Shards => match operation {
                Operation::AllGather => {
                    "each rank gathers from its peers by gloo, then kernels on each host (all \
                     hosts have equally many ranks)"
                }
                Operation::ReduceScatter => {
                    "kernels reduce on each host, each rank exchanges with its peers by gloo (all \
                     hosts have equally many ranks)"
                }
                _ => {
                    "kernels reduce_scatter on each host, each rank all_reduces its shard with its \
                     peers by gloo, kernels all_gather on each host (large messages, and all hosts \
                     have equally many ranks)"
                }
            },
            Self::Leaders => {
                "kernels on each host, gloo between one rank of each (small messages, or hosts \
                 with different numbers of ranks)"
            }
            Self::Flat => "gloo over all ranks (kernels on a host gain nothing)",
            Self::Messages => "messages: channels within a host, gloo between hosts",
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
