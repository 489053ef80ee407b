//! Chooses the route of an operation, as a pure function of values that are equal on all ranks.
//!
//! The thresholds are estimates for a network that is slower than host memory. They were not
//! measured on such a network. A test with two network namespaces on one machine with two cores
//! shows no gain from the hierarchy: with four ranks and 64 MiB, Gloo over all ranks took 249 ms,
//! the routes of `levels` took 347 ms, and the route in rank order took 478 ms (best of three).

use crate::backend::gloo::data_type;
use crate::collective::Op;

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

/// Properties of the communicator that [`choose`] depends on.
pub(super) struct Topology {
    pub(super) bitwise: bool,
    /// True if all hosts have the same number of ranks.
    pub(super) even: bool,
    /// True if every host has one rank.
    pub(super) alone: bool,
}

pub(super) fn choose(op: &Op, topology: &Topology) -> HierarchyRoute {
    let Topology {
        bitwise,
        even,
        alone,
    } = *topology;
    let bytes = op.bytes();
    if let (Some(dtype), Some(code)) = (op.dtype(), op.reduction()) {
        // The module `ordered` reduces without Gloo, so it also serves types and reductions that
        // Gloo lacks.
        if bitwise || data_type(dtype, code).is_none() {
            return match op {
                Op::ReduceScatter { .. } => HierarchyRoute::Ordered,
                _ if bytes <= GATHERED_BYTES => HierarchyRoute::Gathered,
                _ => HierarchyRoute::Ordered,
            };
        }
    }
    match op {
        Op::AllReduce { .. } | Op::Reduce { .. } | Op::Broadcast { .. } if alone => {
            HierarchyRoute::Flat
        }
        Op::AllReduce { .. } if even && bytes >= SHARDS_BYTES => HierarchyRoute::Shards,
        Op::AllReduce { .. } | Op::Reduce { .. } | Op::Broadcast { .. } => HierarchyRoute::Leaders,
        // Gloo has no reduce_scatter, so the flat route would reduce all rows on all ranks.
        Op::ReduceScatter { .. } if even && !alone => HierarchyRoute::Shards,
        Op::ReduceScatter { .. } => HierarchyRoute::Ordered,
        Op::AllGather { .. } if even && !alone && bytes >= ROW_BYTES => HierarchyRoute::Shards,
        Op::AllGather { .. } | Op::Barrier => HierarchyRoute::Flat,
        _ => HierarchyRoute::Messages,
    }
}

impl HierarchyRoute {
    /// Returns the steps of the route, and the reason for its choice.
    pub(super) const fn why(self, op: &Op) -> &'static str {
        match self {
            Self::Gathered => {
                "gloo gathers all inputs, every rank reduces them in rank order (one exchange, for \
                 small messages)"
            }
            Self::Ordered => {
                "ranks exchange shards (kernels on each host, gloo between hosts), each reduces \
                 its own in rank order"
            }
            Self::Shards => match op {
                Op::AllGather { .. } => {
                    "each rank gathers from its peers by gloo, then kernels on each host (all \
                     hosts have equally many ranks)"
                }
                Op::ReduceScatter { .. } => {
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
    use fusewire_device::DType;
    use fusewire_device::element::ReductionCode;

    const DTYPE: DType = DType::F32;
    const SUM: ReductionCode = ReductionCode::Sum;

    fn all_reduce(bytes: usize) -> Op {
        Op::AllReduce {
            count: bytes / DTYPE.size(),
            dtype: DTYPE,
            reduction: SUM,
        }
    }

    fn route(op: &Op, bitwise: bool, even: bool) -> HierarchyRoute {
        let topology = Topology {
            bitwise,
            even,
            alone: false,
        };
        choose(op, &topology)
    }

    #[test]
    fn bits_are_only_promised_by_routes_in_rank_order() {
        for bytes in [0, 4, GATHERED_BYTES + 4, 1 << 26] {
            let (count, dtype, reduction) = (bytes / 4, DTYPE, SUM);
            let reduce = Op::Reduce {
                count,
                dtype,
                reduction,
                root: 0,
            };
            let scatter = Op::ReduceScatter {
                count,
                dtype,
                reduction,
            };
            for op in [all_reduce(bytes), reduce, scatter] {
                for even in [false, true] {
                    let route = route(&op, true, even);
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
        let large = all_reduce(1 << 26);
        assert_eq!(route(&large, false, true), HierarchyRoute::Shards);
        assert_eq!(route(&large, false, false), HierarchyRoute::Leaders);
        assert_eq!(route(&all_reduce(64), false, true), HierarchyRoute::Leaders);
        let (count, dtype) = (1 << 24, DTYPE);
        let gather = Op::AllGather { count, dtype };
        assert_eq!(route(&gather, true, false), HierarchyRoute::Flat);
    }
}
