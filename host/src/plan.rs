//! Plans: the choice of an algorithm for an operation.
//!
//! A plan is a pure function of values that are equal on all ranks (operation, count, type,
//! reduction, number of ranks, agreed options), so all ranks choose the same plan without
//! communication. The window that holds a buffer, and the buffer's offset and alignment, may differ
//! between ranks. The plan therefore does not depend on them; the kernels exchange them.

use core::fmt;

use fusewire_device::DType;
use fusewire_device::element::ReductionCode;
use fusewire_device::multimem;
use fusewire_device::packet;
use fusewire_device::session::Operation;

use crate::backend::Route;
use crate::options::{Algorithm, Determinism, Options};

/// Plan of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The operation.
    pub operation: Operation,
    /// Algorithm of the operation; never [`Algorithm::Auto`].
    pub algorithm: Algorithm,
    /// Number of blocks of the launch.
    pub blocks: u32,
    /// Number of elements of each row that one round copies through staging, if a rank's memory is
    /// in no window.
    pub chunk: u64,
    /// True if the results are bitwise identical on every rank, for any algorithm, batching and
    /// number of lanes.
    pub bitwise: bool,
    /// The reduction, if the operation has one.
    pub reduction: Option<ReductionCode>,
    /// Route through the backend's levels, if the backend is hierarchical.
    pub route: Option<Route>,
}

impl Plan {
    /// Returns the reason for the choice of the algorithm.
    pub const fn reason(&self) -> &'static str {
        match self.algorithm {
            Algorithm::Packet => "small: one hop, data and flag arrive together",
            Algorithm::Signal => "one hop: every rank reads every input",
            Algorithm::TwoShot => "large: each rank reduces one part, then gathers the others",
            Algorithm::Pull => "no reduction: each rank reads what it needs from its peers",
            Algorithm::Channel => "two ranks: slots of a ring with flow control",
            Algorithm::HandOff => "the communicator was made with this backend",
            Algorithm::Nvls => "multicast: the switch adds and copies",
            Algorithm::Auto => "not planned yet",
        }
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.algorithm == Algorithm::HandOff {
            let promise = if self.bitwise {
                "same bits on every rank"
            } else {
                "the library chooses the order of the reduction: bits may differ between runs and \
                 from other routes"
            };
            let name = self.operation.name();
            return match self.route {
                Some(Route { hosts, way }) => write!(f, "{name}: {hosts} hosts: {way}, {promise}"),
                None => write!(
                    f,
                    "{name}: handed off to the communicator's backend, {promise}"
                ),
            };
        }
        write!(
            f,
            "{}: {} ({}), {} block(s), staged in chunks of {} elements, {}",
            self.operation.name(),
            self.algorithm,
            self.reason(),
            self.blocks,
            self.chunk,
            if self.bitwise {
                "same bits on every rank"
            } else {
                "bits may differ between runs and from other algorithms"
            }
        )
    }
}

/// Maximum size in bytes of all_reduce by packets, if the packet slots are large enough. Measured
/// with two ranks on two cores. Above this size, writing all data to the packet slots of the peers
/// costs more than the second signal that the other algorithms need. Those algorithms read and
/// write user memory in place. For staged memory a slightly higher limit would be faster.
const PACKET_BYTES: u64 = 1 << 10;

/// Limit that replaces [`PACKET_BYTES`] if there are more ranks than cores. Measured with four
/// ranks on two cores: the second signal of the other algorithms costs a second context switch,
/// which takes microseconds.
const OVERSUBSCRIBED_PACKET_BYTES: u64 = 4 << 10;

/// Maximum size in bytes of one-shot all_reduce with signals, for types and reductions without
/// packets. Larger calls use two-shot, which works in place without staging.
const ONE_SHOT_BYTES: u64 = 4 << 10;

/// Maximum size in bytes of all_reduce by packets on GPUs. Not measured: MSCCL++ and NCCL stop
/// using packets at 16 to 64 KiB on Hopper.
const GPU_PACKET_BYTES: u64 = 32 << 10;

/// Maximum size in bytes of one-shot all_reduce on 8 GPUs. The limit is twice as high for 4 GPUs
/// and four times as high for 2. Not measured: taken from vLLM's thresholds.
const GPU_ONE_SHOT_BYTES: u64 = 256 << 10;

/// Maximum number of staging bytes that one round uses, summed over all rows. The limit keeps the
/// data of a round in a core's cache.
const ROUND_BYTES: u64 = 512 << 10;

/// Returns true if kernels specialized for `dtype` and `reduction` exist. Packet kernels exist only
/// for these combinations.
pub(crate) const fn has_instance(dtype: DType, reduction: ReductionCode) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::Bf16)
        && matches!(
            reduction,
            ReductionCode::Sum | ReductionCode::Average | ReductionCode::Max
        )
}

/// Properties of the machine that are equal on all ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    /// True if there are more ranks than cores.
    pub(crate) oversubscribed: bool,
    /// True if not all ranks reach each other by load and store.
    pub(crate) split: bool,
    /// True if multicast reaches every window.
    pub(crate) multicast: bool,
    /// True if kernels run on GPUs.
    pub(crate) gpu: bool,
}

impl Machine {
    /// Returns the maximum size in bytes of all_reduce by packets.
    const fn packet_bytes(self) -> u64 {
        match self {
            // A round of requests costs more than packets of any size.
            Self { split: true, .. } => u64::MAX,
            Self { gpu: true, .. } => GPU_PACKET_BYTES,
            Self {
                oversubscribed: true,
                ..
            } => OVERSUBSCRIBED_PACKET_BYTES,
            Self { .. } => PACKET_BYTES,
        }
    }

    /// Returns the maximum size in bytes of one-shot all_reduce.
    const fn one_shot_bytes(self, ranks: u32) -> u64 {
        match self.gpu {
            true if ranks <= 2 => 4 * GPU_ONE_SHOT_BYTES,
            true if ranks <= 4 => 2 * GPU_ONE_SHOT_BYTES,
            true => GPU_ONE_SHOT_BYTES,
            false => ONE_SHOT_BYTES,
        }
    }
}

/// Plans an operation. If the operation copies through staging, it stages `rows` rows of `count`
/// elements of `size` bytes.
#[expect(clippy::too_many_arguments, reason = "inputs of a plan")]
pub(crate) fn plan(
    options: &Options,
    wanted: Algorithm,
    machine: Machine,
    ranks: u32,
    operation: Operation,
    count: u64,
    size: u64,
    rows: u64,
    reduction: Option<(DType, ReductionCode)>,
) -> Plan {
    let alignment = fusewire_kernels::ALIGNMENT as u64;
    // Each rank copies the parts of all ranks that only a network reaches.
    let rows = if machine.split {
        rows.max(u64::from(ranks))
    } else {
        rows
    };
    let capacity = options
        .staging_bytes
        .min(ROUND_BYTES.max(rows * size * alignment));
    let chunk = (capacity / (rows * size).max(1) / alignment * alignment).max(alignment);
    let algorithm = if by_multicast(
        options, wanted, machine, ranks, operation, count, size, reduction,
    ) {
        Algorithm::Nvls
    } else {
        algorithm(
            options, wanted, machine, ranks, operation, count, size, reduction,
        )
    };
    Plan {
        operation,
        algorithm,
        blocks: options.blocks,
        chunk,
        bitwise: algorithm != Algorithm::Nvls || reduction.is_none(),
        reduction: reduction.map(|(_, code)| code),
        route: None,
    }
}

/// Returns true if the plan uses multicast. [`Determinism::Bitwise`] excludes multicast (see
/// [`Determinism::refuses`]). With [`Algorithm::Auto`], only all_reduce by sum or average uses
/// multicast, and only if the alternative is two-shot. With multicast, reduce_scatter and
/// all_gather would move as many bytes into or out of each rank as without it, and minimum and
/// maximum would no longer be guaranteed to propagate NaN.
#[expect(clippy::too_many_arguments, reason = "inputs of a plan")]
fn by_multicast(
    options: &Options,
    wanted: Algorithm,
    machine: Machine,
    ranks: u32,
    operation: Operation,
    count: u64,
    size: u64,
    reduction: Option<(DType, ReductionCode)>,
) -> bool {
    let known =
        reduction.is_some_and(|(dtype, code)| multimem::combine(dtype, code as u8).is_some());
    let possible = match operation {
        Operation::AllReduce | Operation::ReduceScatter => known,
        Operation::AllGather => true,
        _ => false,
    };
    if !possible || options.determinism != Determinism::Any || machine.split {
        return false;
    }
    if wanted != Algorithm::Auto {
        return wanted == Algorithm::Nvls;
    }
    let adds = reduction
        .is_some_and(|(_, code)| matches!(code, ReductionCode::Sum | ReductionCode::Average));
    let otherwise = || {
        algorithm(
            options, wanted, machine, ranks, operation, count, size, reduction,
        )
    };
    machine.multicast
        && operation == Operation::AllReduce
        && adds
        && otherwise() == Algorithm::TwoShot
}

/// Returns the plan of an operation that a backend carries out.
pub(crate) const fn hand_off(
    operation: Operation,
    reduction: Option<ReductionCode>,
    bitwise: bool,
    route: Option<Route>,
) -> Plan {
    Plan {
        operation,
        algorithm: Algorithm::HandOff,
        blocks: 0,
        chunk: 0,
        bitwise,
        reduction,
        route,
    }
}

#[expect(clippy::too_many_arguments, reason = "inputs of a plan")]
fn algorithm(
    options: &Options,
    wanted: Algorithm,
    machine: Machine,
    ranks: u32,
    operation: Operation,
    count: u64,
    size: u64,
    reduction: Option<(DType, ReductionCode)>,
) -> Algorithm {
    match operation {
        Operation::AllReduce => {}
        Operation::Reduce if machine.split => return Algorithm::Signal,
        Operation::Reduce => return Algorithm::TwoShot,
        Operation::ReduceScatter
        | Operation::AllReduceNorm
        | Operation::ReduceScatterNorm
        | Operation::ReduceScatterOnArrival
        | Operation::Barrier => return Algorithm::Signal,
        Operation::Send | Operation::Recv => return Algorithm::Channel,
        Operation::VocabParallel => return Algorithm::Packet,
        _ => return Algorithm::Pull,
    }
    let packets = reduction.is_some_and(|(dtype, code)| has_instance(dtype, code))
        && count * size <= packet::capacity(options.packet_slot(ranks));
    match wanted {
        Algorithm::Packet if packets => Algorithm::Packet,
        Algorithm::Signal => Algorithm::Signal,
        Algorithm::TwoShot if !machine.split => Algorithm::TwoShot,
        _ if packets && count * size <= machine.packet_bytes() => Algorithm::Packet,
        // Two-shot writes to other ranks' outputs.
        _ if machine.split => Algorithm::Signal,
        _ if count * size <= machine.one_shot_bytes(ranks) => Algorithm::Signal,
        _ => Algorithm::TwoShot,
    }
}

/// Chooses the algorithm of a fused norm over `rows` rows of `row` bytes: packets for small inputs
/// if each block's rows fit a packet slot, one-shot for few rows or few bytes, otherwise two-shot,
/// which divides the arithmetic among the ranks.
pub(crate) fn norm(
    options: &Options,
    wanted: Algorithm,
    machine: Machine,
    ranks: u32,
    rows: u64,
    row: u64,
) -> Algorithm {
    let block = rows.div_ceil(u64::from(options.blocks.max(1)));
    let packets = block * row <= packet::capacity(options.packet_slot(ranks));
    match wanted {
        Algorithm::Packet if packets => Algorithm::Packet,
        Algorithm::Signal => Algorithm::Signal,
        Algorithm::TwoShot => Algorithm::TwoShot,
        _ if packets && rows * row <= machine.packet_bytes() => Algorithm::Packet,
        _ if rows < u64::from(ranks) || rows * row <= machine.one_shot_bytes(ranks) => {
            Algorithm::Signal
        }
        _ => Algorithm::TwoShot,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LARGE: u64 = 1 << 20;

    fn chosen(
        determinism: Determinism,
        wanted: Algorithm,
        multicast: bool,
        operation: Operation,
        count: u64,
        op: Option<ReductionCode>,
    ) -> Algorithm {
        let options = Options {
            determinism,
            ..Options::default()
        };
        let machine = Machine {
            split: false,
            oversubscribed: false,
            multicast,
            gpu: false,
        };
        let reduction = op.map(|op| (DType::Bf16, op));
        plan(
            &options, wanted, machine, 2, operation, count, 2, 1, reduction,
        )
        .algorithm
    }

    #[test]
    fn multicast_is_taken_where_it_exists_and_bits_may_differ() {
        let auto = |determinism, multicast, operation, count, op| {
            chosen(
                determinism,
                Algorithm::Auto,
                multicast,
                operation,
                count,
                op,
            )
        };
        let sum = Some(ReductionCode::Sum);
        let all = Operation::AllReduce;
        assert_eq!(
            auto(Determinism::Any, true, all, LARGE, sum),
            Algorithm::Nvls
        );
        let average = Some(ReductionCode::Average);
        assert_eq!(
            auto(Determinism::Any, true, all, LARGE, average),
            Algorithm::Nvls
        );
        // Multicast is excluded for bitwise results and for windows that multicast does not reach.
        assert_eq!(
            auto(Determinism::Bitwise, true, all, LARGE, sum),
            Algorithm::TwoShot
        );
        assert_eq!(
            auto(Determinism::Any, false, all, LARGE, sum),
            Algorithm::TwoShot
        );
        // Multicast is not used for small messages, for a maximum (NaN), or for operations that
        // gain nothing.
        assert_eq!(
            auto(Determinism::Any, true, all, 64, sum),
            Algorithm::Packet
        );
        let max = Some(ReductionCode::Max);
        assert_eq!(
            auto(Determinism::Any, true, all, LARGE, max),
            Algorithm::TwoShot
        );
        let scatter = Operation::ReduceScatter;
        assert_eq!(
            auto(Determinism::Any, true, scatter, LARGE, sum),
            Algorithm::Signal
        );
        let gather = Operation::AllGather;
        assert_eq!(
            auto(Determinism::Any, true, gather, LARGE, None),
            Algorithm::Pull
        );
    }

    #[test]
    fn multicast_that_is_asked_for() {
        for multicast in [false, true] {
            let asked = |determinism, operation, op| {
                let wanted = Algorithm::Nvls;
                chosen(determinism, wanted, multicast, operation, 64, op)
            };
            let max = Some(ReductionCode::Max);
            for operation in [Operation::AllReduce, Operation::ReduceScatter] {
                assert_eq!(asked(Determinism::Any, operation, max), Algorithm::Nvls);
                assert_ne!(asked(Determinism::Bitwise, operation, max), Algorithm::Nvls);
                let product = Some(ReductionCode::Product);
                assert_ne!(asked(Determinism::Any, operation, product), Algorithm::Nvls);
            }
            let gather = Operation::AllGather;
            assert_eq!(asked(Determinism::Any, gather, None), Algorithm::Nvls);
            let other = Operation::AllToAll;
            assert_eq!(asked(Determinism::Any, other, None), Algorithm::Pull);
        }
    }
}
