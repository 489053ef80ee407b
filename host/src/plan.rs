//! Plans: which algorithm an operation takes.
//!
//! A plan is a pure function of what must be equal on all ranks (operation, count, type, reduction,
//! number of ranks, agreed options), so all ranks choose alike without a word. Whether memory lies
//! in a window, its offset and its alignment are local facts, which kernels exchange themselves.

use core::fmt;

use fusewire_device::DType;
use fusewire_device::element::ReductionCode;
use fusewire_device::multimem;
use fusewire_device::packet;
use fusewire_device::session::Operation;

use crate::backend::Route;
use crate::options::{Algorithm, Determinism, Options};

/// What an operation will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The operation.
    pub operation: Operation,
    /// How it is carried out; never [`Algorithm::Auto`].
    pub algorithm: Algorithm,
    /// Blocks of the launch.
    pub blocks: u32,
    /// Elements of each row that go through staging in one round, where a rank's memory is in no
    /// window.
    pub chunk: u64,
    /// Whether every rank gets the same bits for every algorithm, batch and lane count.
    pub bitwise: bool,
    /// The reduction, where there is one.
    pub reduction: Option<ReductionCode>,
    /// The way through the backend, where that has several.
    pub route: Option<Route>,
}

impl Plan {
    /// Why the algorithm was taken.
    pub const fn reason(&self) -> &'static str {
        match self.algorithm {
            Algorithm::Packet => "small: one hop, data and flag arrive together",
            Algorithm::Signal => "one hop: every rank reads every input",
            Algorithm::TwoShot => "large: each rank reduces a part, which the others take",
            Algorithm::Pull => "moves bytes: each rank takes what it needs",
            Algorithm::Channel => "two ranks: chunks through a credited ring",
            Algorithm::HandOff => "the communicator was made with this backend",
            Algorithm::Nvls => "by multicast: the switch adds and copies",
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
                "the library reduces in an order of its own: bits may differ between runs and from \
                    other routes"
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

/// All_reduce by packets up to this many bytes, where they fit the slots. Measured with two ranks
/// on two cores: beyond, carrying all data to the peers' slots costs more than the second signal of
/// the other algorithms, which read and write user memory in place; staged memory loses a little.
const PACKET_BYTES: u64 = 1 << 10;

/// The same where ranks share cores, measured with four on two: there a second signal is a second
/// switch between ranks, microseconds.
const OVERSUBSCRIBED_PACKET_BYTES: u64 = 4 << 10;

/// One-shot all_reduce by signal up to this many bytes, for types and reductions without packets;
/// two-shot beyond, which needs no staging to work in place.
const ONE_SHOT_BYTES: u64 = 4 << 10;

/// All_reduce by packets on GPUs up to this many bytes. Not measured: MSCCL++ and NCCL leave
/// packets at 16 to 64 KiB on Hopper.
const GPU_PACKET_BYTES: u64 = 32 << 10;

/// One-shot all_reduce on 8 GPUs up to this many bytes; twice as many on 4, four times on 2. Not
/// measured: vLLM's thresholds.
const GPU_ONE_SHOT_BYTES: u64 = 256 << 10;

/// Bytes of staging that one round uses, rows and all: what stays in a core's cache.
const ROUND_BYTES: u64 = 512 << 10;

/// Whether the frequent instances (packets among them) exist for this type and reduction.
pub(crate) const fn has_instance(dtype: DType, reduction: ReductionCode) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::Bf16)
        && matches!(
            reduction,
            ReductionCode::Sum | ReductionCode::Average | ReductionCode::Max
        )
}

/// What all ranks know of the machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Machine {
    /// There are more ranks than cores.
    pub(crate) oversubscribed: bool,
    /// Multicast reaches every window.
    pub(crate) multicast: bool,
    /// Kernels run on GPUs.
    pub(crate) gpu: bool,
}

impl Machine {
    /// All_reduce by packets up to this many bytes.
    const fn packet_bytes(self) -> u64 {
        match self {
            Self { gpu: true, .. } => GPU_PACKET_BYTES,
            Self {
                oversubscribed: true,
                ..
            } => OVERSUBSCRIBED_PACKET_BYTES,
            Self { .. } => PACKET_BYTES,
        }
    }

    /// All_reduce in one shot up to this many bytes.
    const fn one_shot_bytes(self, ranks: u32) -> u64 {
        match self.gpu {
            true if ranks <= 2 => 4 * GPU_ONE_SHOT_BYTES,
            true if ranks <= 4 => 2 * GPU_ONE_SHOT_BYTES,
            true => GPU_ONE_SHOT_BYTES,
            false => ONE_SHOT_BYTES,
        }
    }
}

/// Plans an operation over rows of `count` elements of `size` bytes, `rows` of them staged.
#[expect(clippy::too_many_arguments, reason = "what a plan depends on")]
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

/// Whether an operation goes by multicast. Never under [`Determinism::Bitwise`] (see
/// [`Determinism::refuses`]). Where the caller leaves the choice, only all_reduce by sum or
/// average, and only where it would else take two shots: reduce_scatter and all_gather move as many
/// bytes out of or into each rank as without multicast, and minimum and maximum would lose what
/// they promise of NaN.
#[expect(clippy::too_many_arguments, reason = "what a plan depends on")]
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
    if !possible || options.determinism != Determinism::Any {
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

/// The plan of an operation that a backend carries out.
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

#[expect(clippy::too_many_arguments, reason = "what a plan depends on")]
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
        && count * size <= packet::capacity(options.packet_slot_bytes);
    match wanted {
        Algorithm::Packet if packets => Algorithm::Packet,
        Algorithm::Signal => Algorithm::Signal,
        Algorithm::TwoShot => Algorithm::TwoShot,
        _ if packets && count * size <= machine.packet_bytes() => Algorithm::Packet,
        _ if count * size <= machine.one_shot_bytes(ranks) => Algorithm::Signal,
        _ => Algorithm::TwoShot,
    }
}

/// How a fused norm of `rows` rows of `row` bytes reduces: by packets where each block's rows fit
/// the slots, else one shot of few rows, else two, which takes each rank's part of the arithmetic
/// from the others.
pub(crate) fn norm(
    options: &Options,
    wanted: Algorithm,
    machine: Machine,
    ranks: u32,
    rows: u64,
    row: u64,
) -> Algorithm {
    let block = rows.div_ceil(u64::from(options.blocks.max(1)));
    let packets = block * row <= packet::capacity(options.packet_slot_bytes);
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
        // No promise may be broken, no window be out of reach.
        assert_eq!(
            auto(Determinism::Bitwise, true, all, LARGE, sum),
            Algorithm::TwoShot
        );
        assert_eq!(
            auto(Determinism::Any, false, all, LARGE, sum),
            Algorithm::TwoShot
        );
        // Small messages, NaN in a maximum, and what gains nothing.
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
