//! Plans: the choice of an algorithm for an operation.
//!
//! A plan is a pure function of values that are equal on all ranks (operation, count, type,
//! reduction, number of ranks, agreed options), so all ranks choose the same plan without
//! communication. The window that holds a buffer, and the buffer's offset and alignment, may differ
//! between ranks. The plan therefore does not depend on them; the kernels exchange them.

use core::fmt;

use fusewire_device::DType;
use fusewire_device::call::Operation;
use fusewire_device::element::ReductionCode;
use fusewire_device::layout::LINE;
use fusewire_device::multimem;
use fusewire_device::packet;
use fusewire_kernels::fused::{MOST_STRIPE_BITS, first_stripe, shared_row};

use crate::algorithm::Algorithm;
use crate::backend::{Backend, Route};
use crate::collective::Op;
use crate::options::{Determinism, Options};

/// Maximum numbers of blocks and of threads per block of a launch on a GPU. Equal on all ranks,
/// like the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlannedGrid {
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    /// True if the launch can have [`field@Options::large_blocks`].
    pub(crate) is_large: bool,
}

impl PlannedGrid {
    /// Uses as many as the communicator has for launches that are not large.
    pub(crate) const ALL: Self = Self {
        blocks: u32::MAX,
        threads: u32::MAX,
        is_large: false,
    };

    /// Least number of threads: the warps other than the first copy the communicator's constants
    /// while the first enters.
    const LEAST_THREADS: u32 = 128;

    /// Returns the grid for `parts` parts, of which each block takes at least one, and `lanes`
    /// lanes per part.
    fn of(parts: u64, lanes: u64) -> Self {
        let threads = lanes
            .next_power_of_two()
            .max(u64::from(Self::LEAST_THREADS));
        Self {
            blocks: u32::try_from(parts.max(1)).unwrap_or(u32::MAX),
            threads: u32::try_from(threads).unwrap_or(u32::MAX),
            is_large: false,
        }
    }
}

/// Plan of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The operation.
    pub operation: Operation,
    /// Algorithm of the operation; never [`Algorithm::Auto`].
    pub algorithm: Algorithm,
    /// Maximum number of blocks of the launch, and the number of blocks on the CPU.
    pub blocks: u32,
    /// Maximum numbers of blocks and threads per block on a GPU.
    pub(crate) grid: PlannedGrid,
    /// Binary logarithm of the number of blocks that share a row of a norm.
    pub(crate) stripe_bits: u32,
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
    /// True if the kernels reach some ranks by requests to a network.
    pub by_network: bool,
}

impl Plan {
    /// Returns the reason for the choice of the algorithm.
    pub const fn reason(&self) -> &'static str {
        match self.algorithm {
            Algorithm::Packet => "small: one hop, data and flag arrive together",
            Algorithm::PacketTwoShot => {
                "medium: each rank reduces one part; data and flag arrive together"
            }
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
            "{}: {} ({}){}, {} block(s), staged in chunks of {} elements, {}",
            self.operation.name(),
            self.algorithm,
            self.reason(),
            if self.by_network {
                " over the network"
            } else {
                ""
            },
            self.blocks.min(self.grid.blocks),
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

/// Maximum size in bytes of all_reduce and of a fused norm by packets in one shot on more than 4
/// GPUs, on 3 or 4, and on 2. A packet has twice the bytes of its data. With P GPUs, a GPU receives
/// 2 (P - 1) S bytes in one shot, and 4 (P - 1) / P S in two, which wait 2.0 us longer with 8 GPUs,
/// and at least 1.4 us with 4 (docs/performance.md). At 370 GB/s the difference takes as long at 69
/// KiB with 8 GPUs, and at 169 KiB with 4. With 2 there is no difference, and the two signals of
/// the other algorithms cost less from 512 KiB on. Not measured over NVLink.
const GPU_PACKET_BYTES: [u64; 3] = [64 << 10, 128 << 10, 512 << 10];

/// Maximum size in bytes of all_reduce by packets in two shots on more than 2 GPUs. Two-shot with
/// signals moves half the bytes, and waits 2.4 us longer with 8 GPUs: as much as the other half of
/// the bytes takes at 490 KiB, at 370 GB/s. Not measured over NVLink.
const GPU_PACKET_TWO_SHOT_BYTES: u64 = 512 << 10;

/// Maximum size in bytes of all_reduce by packets in two shots where multicast is possible. Not
/// measured.
const NVLS_BYTES: u64 = 128 << 10;

/// Maximum size in bytes of one-shot all_reduce on more than 4 GPUs, on 3 or 4, and on 2. Two-shot
/// has the same signals, and also awaits that its results have reached the peers, in about 0.8 us.
/// With P GPUs, a GPU receives (P - 1) S bytes in one-shot, and 2 (P - 1) / P S in two-shot. At 350
/// GB/s the difference takes 0.8 us at 52 KiB with 8 GPUs, and at 182 KiB with 4. With 2 there is
/// no difference. Not measured over NVLink.
const GPU_ONE_SHOT_BYTES: [u64; 3] = [48 << 10, 128 << 10, 1 << 20];

/// Like [`GPU_ONE_SHOT_BYTES`], for fused norms. Higher, because a row is the work of one block,
/// and two-shot gives a GPU fewer rows. Not measured over NVLink.
const GPU_NORM_BYTES: [u64; 3] = [256 << 10, 512 << 10, 1 << 20];

/// Maximum number of staging bytes that one round uses on the CPU, summed over all rows. The limit
/// keeps the data of a round in a core's cache. On a GPU a round costs about 10 us, whatever its
/// size, so that rounds use all of staging.
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
    /// Returns the maximum size in bytes of all_reduce, or of a norm, by packets in one shot.
    const fn packet_bytes(self, ranks: u32) -> u64 {
        match self {
            // A round of requests costs more than packets of any size.
            Self { split: true, .. } => u64::MAX,
            Self { gpu: true, .. } => by_gpus(ranks, GPU_PACKET_BYTES),
            Self {
                oversubscribed: true,
                ..
            } => OVERSUBSCRIBED_PACKET_BYTES,
            Self { .. } => PACKET_BYTES,
        }
    }

    /// Returns the maximum size in bytes of one-shot all_reduce, or of a one-shot norm. `gpus` has
    /// the limits of GPUs.
    const fn one_shot_bytes(self, ranks: u32, gpus: [u64; 3]) -> u64 {
        match self.gpu {
            true => by_gpus(ranks, gpus),
            false => ONE_SHOT_BYTES,
        }
    }

    /// Returns the maximum size in bytes of all_reduce by packets in two shots.
    const fn packet_two_shot_bytes(self, ranks: u32) -> u64 {
        match self {
            Self {
                split: false,
                gpu: true,
                ..
            } if ranks > 2 => GPU_PACKET_TWO_SHOT_BYTES,
            _ => 0,
        }
    }
}

/// Returns the limit for `ranks` GPUs. `limits` has those of more than 4, of 3 or 4, and of 2.
const fn by_gpus(ranks: u32, limits: [u64; 3]) -> u64 {
    let [many, few, two] = limits;
    match ranks {
        0..=2 => two,
        3 | 4 => few,
        _ => many,
    }
}

/// Values that all ranks of a communicator agree on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Agreed<'a> {
    pub(crate) options: &'a Options,
    /// Algorithm that the call or the communicator asks for.
    pub(crate) wanted: Algorithm,
    /// Number of ranks.
    pub(crate) ranks: u32,
    pub(crate) machine: Machine,
}

/// Plans an operation.
pub(crate) fn plan(op: &Op, agreed: &Agreed<'_>) -> Plan {
    let (options, machine, ranks) = (agreed.options, agreed.machine, agreed.ranks);
    let alignment = fusewire_kernels::ALIGNMENT as u64;
    let size = op.dtype().map_or(1, DType::size) as u64;
    // With a network, each rank also copies the parts of all ranks that only the network reaches.
    let rows = u64::from(if machine.split {
        ranks
    } else {
        op.staged_rows(ranks)
    });
    let round = match machine.gpu {
        true => options.staging_bytes,
        false => ROUND_BYTES,
    };
    let capacity = options
        .staging_bytes
        .min(round.max(rows * size * alignment));
    let chunk = (capacity / (rows * size).max(1) / alignment * alignment).max(alignment);
    let without_multicast = algorithm(op, agreed);
    let algorithm = if uses_multicast(op, agreed, without_multicast) {
        Algorithm::Nvls
    } else {
        without_multicast
    };
    let reduction = op.reduction();
    let grid = grid(op, agreed, algorithm);
    Plan {
        operation: op.operation(),
        algorithm,
        blocks: match grid.is_large {
            true => options.large_blocks,
            false => options.blocks,
        },
        grid,
        stripe_bits: stripe_bits(op, agreed, algorithm),
        chunk,
        bitwise: algorithm != Algorithm::Nvls || reduction.is_none(),
        reduction,
        route: None,
        by_network: machine.split,
    }
}

/// Bytes of a message that a block sends as packets, if the message has fewer than all blocks could
/// send. Measured on one H100 with two ranks: less adds packets without data, more adds iterations
/// (`benches/results/gpu`).
const PACKET_PART: u64 = 1 << 10;

/// Returns the grid of an operation on a GPU. A small message has few blocks, and blocks without
/// work for all threads have fewer of them, because every warp of a block costs time, also if it
/// has nothing to do.
fn grid(op: &Op, agreed: &Agreed<'_>, algorithm: Algorithm) -> PlannedGrid {
    if !agreed.machine.gpu {
        return PlannedGrid::ALL;
    }
    match *op {
        Op::AllReduce { .. } if algorithm == Algorithm::Packet => {
            let most = agreed.options.blocks.max(1);
            let few = (op.bytes() as u64).div_ceil(PACKET_PART);
            let few = u32::try_from(few).unwrap_or(most).clamp(1, most);
            let room = packet::capacity(agreed.options.packet_slot(agreed.ranks));
            let blocks = if part_bytes(op, few) <= room {
                few
            } else {
                most
            };
            // The header, and 8 bytes for each lane.
            let lanes = 1 + part_bytes(op, blocks).div_ceil(packet::PAIR_DATA as u64);
            PlannedGrid::of(u64::from(blocks), lanes)
        }
        // 8 bytes of each rank's part for each lane.
        Op::AllReduce { .. } if algorithm == Algorithm::PacketTwoShot => {
            let blocks = agreed.options.blocks;
            let shard = shard_bytes(part_bytes(op, blocks), agreed.ranks);
            PlannedGrid::of(u64::from(blocks), shard / packet::PAIR_DATA as u64)
        }
        // A block per stripe, and a lane for the header and each packet of the first stripe, which
        // is the longest.
        Op::AllReduceNorm { rows, hidden, .. } if algorithm == Algorithm::Packet => {
            let bits = stripe_bits(op, agreed, algorithm);
            let stripe = first_stripe(hidden, bits) as u64;
            let size = op.dtype().map_or(1, DType::size) as u64;
            let lanes = 1 + stripe * size / packet::PAIR_DATA as u64;
            let least = PlannedGrid::of((rows as u64) << bits, 1);
            let threads = u32::try_from(lanes.next_multiple_of(64)).unwrap_or(u32::MAX);
            PlannedGrid {
                threads: threads.max(least.threads),
                ..least
            }
        }
        // A block per row.
        Op::AllReduceNorm { rows, .. } => {
            let rows = match algorithm {
                Algorithm::TwoShot => (rows as u64).div_ceil(u64::from(agreed.ranks)),
                _ => rows as u64,
            };
            PlannedGrid::of(rows, u64::from(u32::MAX))
        }
        _ => PlannedGrid {
            is_large: is_large(op, algorithm),
            ..PlannedGrid::ALL
        },
    }
}

/// Least size in bytes of an operation with more blocks. Not measured.
const LARGE_BYTES: u64 = 4 << 20;

/// Returns true if an operation can have more blocks than others, because it is large. Its size
/// must be equal on all ranks. Packets and channels have places for fewer blocks.
fn is_large(op: &Op, algorithm: Algorithm) -> bool {
    let moves = matches!(
        op,
        Op::AllReduce { .. }
            | Op::Reduce { .. }
            | Op::ReduceScatter { .. }
            | Op::Broadcast { .. }
            | Op::AllGather { .. }
            | Op::Scatter { .. }
            | Op::Gather { .. }
            | Op::AllToAll { .. }
    );
    let packets = matches!(algorithm, Algorithm::Packet | Algorithm::PacketTwoShot);
    moves && !packets && op.bytes() as u64 >= LARGE_BYTES
}

/// Least number of elements of a row that several blocks share. All stripes of such a row have
/// elements. A lane then has fewer of them, which saves more than the exchange between the blocks
/// costs, by the counts of `fusewire-benches trips`.
const LEAST_SHARED: usize = 4096;

/// Returns the binary logarithm of the number of blocks that share a row of a fused norm: as many
/// as the launch has for each row.
fn stripe_bits(op: &Op, agreed: &Agreed<'_>, algorithm: Algorithm) -> u32 {
    let Op::AllReduceNorm { rows, hidden, .. } = *op else {
        return 0;
    };
    // On a CPU, blocks of one lane run one after the other.
    let run_together = agreed.machine.gpu || agreed.options.testing.lanes > 1;
    if !run_together || algorithm != Algorithm::Packet || hidden < LEAST_SHARED {
        return 0;
    }
    let blocks = agreed.options.blocks as usize;
    let fits = |bits: &u32| rows <= blocks >> bits;
    (0..=MOST_STRIPE_BITS).rev().find(fits).unwrap_or(0)
}

/// Returns true if the plan uses multicast instead of the algorithm `otherwise`.
/// [`Determinism::Bitwise`] excludes multicast (see [`Determinism::refuses`]). With
/// [`Algorithm::Auto`], only all_reduce by sum or average uses multicast, and only if the
/// alternative is two-shot, by packets for more than [`NVLS_BYTES`]. With multicast, reduce_scatter
/// and all_gather would move as many bytes into or out of each rank as without it, and minimum and
/// maximum would no longer be guaranteed to propagate NaN.
fn uses_multicast(op: &Op, agreed: &Agreed<'_>, otherwise: Algorithm) -> bool {
    let possible = match *op {
        Op::AllReduce {
            dtype, reduction, ..
        }
        | Op::ReduceScatter {
            dtype, reduction, ..
        } => multimem::combine(dtype, reduction as u8).is_some(),
        Op::AllGather { .. } => true,
        _ => false,
    };
    let machine = agreed.machine;
    if !possible || agreed.options.determinism != Determinism::Any || machine.split {
        return false;
    }
    if agreed.wanted != Algorithm::Auto {
        return agreed.wanted == Algorithm::Nvls;
    }
    let adds = matches!(
        op,
        Op::AllReduce {
            reduction: ReductionCode::Sum | ReductionCode::Average,
            ..
        }
    );
    let is_large = match otherwise {
        Algorithm::TwoShot => true,
        Algorithm::PacketTwoShot => op.bytes() as u64 > NVLS_BYTES,
        _ => false,
    };
    machine.multicast && adds && is_large
}

/// Returns the plan of an operation that a backend carries out.
pub(crate) fn plan_of_backend(op: &Op, backend: &dyn Backend) -> Plan {
    let reduction = op.reduction();
    Plan {
        operation: op.operation(),
        algorithm: Algorithm::HandOff,
        blocks: 0,
        grid: PlannedGrid::ALL,
        stripe_bits: 0,
        chunk: 0,
        bitwise: reduction.is_none() || backend.is_bitwise(),
        reduction,
        route: backend.route(op),
        by_network: false,
    }
}

/// Returns the algorithm of an operation without multicast.
fn algorithm(op: &Op, agreed: &Agreed<'_>) -> Algorithm {
    let Agreed {
        options,
        wanted,
        ranks,
        machine,
    } = *agreed;
    let (dtype, reduction) = match *op {
        Op::AllReduce {
            dtype, reduction, ..
        } => (dtype, reduction),
        Op::Reduce { .. } if machine.split => return Algorithm::Signal,
        Op::Reduce { .. } => return Algorithm::TwoShot,
        Op::ReduceScatter { .. } | Op::ReduceScatterOnArrival { .. } | Op::Barrier => {
            return Algorithm::Signal;
        }
        Op::Send { .. } | Op::Recv { .. } => return Algorithm::Channel,
        Op::AllReduceNorm {
            rows,
            hidden,
            row_bytes,
            ..
        } => return norm(agreed, rows as u64, op.bytes() as u64, hidden, row_bytes),
        Op::ReduceScatterNorm { .. } => return Algorithm::Signal,
        Op::VocabParallel { .. } => return Algorithm::Packet,
        Op::Broadcast { .. }
        | Op::AllGather { .. }
        | Op::AllGatherV { .. }
        | Op::AllGatherWithFlags { .. }
        | Op::Scatter { .. }
        | Op::Gather { .. }
        | Op::AllToAll { .. }
        | Op::AllToAllV { .. } => return Algorithm::Pull,
    };
    let bytes = op.bytes() as u64;
    let room = packet::capacity(options.packet_slot(ranks));
    let part = part_bytes(op, options.blocks);
    let packets = has_instance(dtype, reduction) && part <= room;
    let shards =
        has_instance(dtype, reduction) && !machine.split && shard_bytes(part, ranks) <= room;
    match wanted {
        Algorithm::Packet if packets => Algorithm::Packet,
        Algorithm::PacketTwoShot if shards => Algorithm::PacketTwoShot,
        Algorithm::Signal => Algorithm::Signal,
        Algorithm::TwoShot if !machine.split => Algorithm::TwoShot,
        _ if packets && bytes <= machine.packet_bytes(ranks) => Algorithm::Packet,
        _ if shards && bytes <= machine.packet_two_shot_bytes(ranks) => Algorithm::PacketTwoShot,
        // Two-shot writes to other ranks' outputs.
        _ if machine.split => Algorithm::Signal,
        _ if bytes <= machine.one_shot_bytes(ranks, GPU_ONE_SHOT_BYTES) => Algorithm::Signal,
        _ => Algorithm::TwoShot,
    }
}

/// Returns the size in bytes of the largest part of an operation that one of `blocks` blocks
/// handles. Packets of this part go through a slot of the block.
fn part_bytes(op: &Op, blocks: u32) -> u64 {
    let count = op.count() as u64;
    let part = match blocks {
        0 | 1 => count,
        _ => {
            let part = count.div_ceil(u64::from(blocks));
            part.next_multiple_of(fusewire_kernels::ALIGNMENT as u64)
        }
    };
    part.saturating_mul(op.dtype().map_or(1, DType::size) as u64)
}

/// Returns the size in bytes of the largest shard of a block's part, in two shots by packets.
fn shard_bytes(part: u64, ranks: u32) -> u64 {
    part.div_ceil(u64::from(ranks))
        .checked_next_multiple_of(LINE)
        .unwrap_or(u64::MAX)
}

/// Chooses the algorithm of a fused norm over `rows` rows of `hidden` elements, which have `bytes`
/// bytes: packets for small inputs if each block's rows fit a packet slot, one-shot for few rows or
/// few bytes, otherwise two-shot, which divides the arithmetic among the ranks. Each rank writes
/// `row_bytes` bytes of results for a row.
fn norm(agreed: &Agreed<'_>, rows: u64, bytes: u64, hidden: usize, row_bytes: usize) -> Algorithm {
    let Agreed {
        options,
        wanted,
        ranks,
        machine,
    } = *agreed;
    let block = rows.div_ceil(u64::from(options.blocks.max(1)));
    let row = bytes / rows.max(1);
    let packets = block * row <= packet::capacity(options.packet_slot(ranks));
    let planned = match wanted {
        Algorithm::Packet if packets => Algorithm::Packet,
        Algorithm::Signal => Algorithm::Signal,
        Algorithm::TwoShot => Algorithm::TwoShot,
        _ if packets && bytes <= machine.packet_bytes(ranks) => Algorithm::Packet,
        _ if rows < u64::from(ranks) => Algorithm::Signal,
        _ if bytes <= machine.one_shot_bytes(ranks, GPU_NORM_BYTES) => Algorithm::Signal,
        // Between two ranks, two-shot moves as many bytes, and often through staging.
        _ if machine.gpu && ranks <= 2 => Algorithm::Signal,
        _ => Algorithm::TwoShot,
    };
    let scratch = norm_scratch(options, ranks, hidden).saturating_add(32);
    let room = aligned_end(options.staging_bytes, scratch).unwrap_or(0);
    if planned == Algorithm::TwoShot && row_bytes as u64 > room {
        // The rows that peers write must fit in staging, in case a peer uses staging for its
        // output.
        return Algorithm::Signal;
    }
    planned
}

/// Returns the bytes of staging that hold rows of `hidden` elements that are too long for shared
/// memory; 0 if rows fit.
pub(crate) fn norm_scratch(options: &Options, ranks: u32, hidden: usize) -> u64 {
    if hidden > shared_row(ranks) {
        (hidden as u64).saturating_mul(4 * u64::from(options.blocks))
    } else {
        0
    }
}

/// Returns the offset of `bytes` bytes at the end of `staging` bytes, a multiple of 16; `None` if
/// they do not fit.
pub(crate) fn aligned_end(staging: u64, bytes: u64) -> Option<u64> {
    Some(staging.checked_sub(bytes)? / 16 * 16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;

    #[test]
    fn rows_in_staging_are_aligned_and_end_within_it() {
        for staging in [1024, 1025, 1031, 1039, 1040] {
            let at = aligned_end(staging, 320).expect("room");
            assert!(at.is_multiple_of(16), "{at} of {staging}");
            assert!(
                at + 320 <= staging && at + 336 > staging,
                "{at} of {staging}"
            );
        }
        assert_eq!(aligned_end(319, 320), None);
        assert_eq!(aligned_end(320, 320), Some(0));
    }

    /// Returns what `ranks` GPUs of a domain agree on.
    fn gpus(ranks: u32, options: &Options) -> Agreed<'_> {
        Agreed {
            options,
            wanted: Algorithm::Auto,
            ranks,
            machine: Machine {
                split: false,
                oversubscribed: false,
                multicast: false,
                gpu: true,
            },
        }
    }

    /// Plans all_reduce of `bytes` bytes of bf16 on `ranks` GPUs with these options.
    fn on_gpus(ranks: u32, bytes: usize, options: &Options) -> Plan {
        let agreed = gpus(ranks, options);
        plan(&all_reduce(bytes / 2, ReductionCode::Sum), &agreed)
    }

    #[test]
    fn packets_on_gpus_are_limited_by_the_part_of_a_block_and_by_the_ranks() {
        let options = Options::default().blocks(64).resolved(Device::Cuda(0));
        for (ranks, limit, next) in [
            (2, 512 << 10, Algorithm::Signal),
            (3, 128 << 10, Algorithm::PacketTwoShot),
            (4, 128 << 10, Algorithm::PacketTwoShot),
            (8, 64 << 10, Algorithm::PacketTwoShot),
        ] {
            let algorithm = |bytes| on_gpus(ranks, bytes, &options).algorithm;
            assert_eq!(algorithm(limit), Algorithm::Packet, "{ranks} ranks");
            assert_eq!(algorithm(limit + 2), next, "{ranks} ranks");
            if ranks > 2 {
                assert_eq!(algorithm(512 << 10), next, "{ranks} ranks");
                assert_eq!(algorithm((512 << 10) + 2), Algorithm::TwoShot);
            }
        }
        // One block has one slot, of 64 KiB: half of it are flags.
        let one = Options::default().blocks(1).resolved(Device::Cuda(0));
        let room = packet::capacity(one.packet_slot(2)) as usize;
        assert_eq!(on_gpus(2, room, &one).algorithm, Algorithm::Packet);
        assert_eq!(on_gpus(2, room + 2, &one).algorithm, Algorithm::Signal);
    }

    #[test]
    fn multicast_replaces_packets_in_two_shots_from_128_kib() {
        let options = Options {
            determinism: Determinism::Any,
            ..Options::default().resolved(Device::Cuda(0))
        };
        let mut agreed = gpus(8, &options);
        agreed.machine.multicast = true;
        for (bytes, algorithm) in [
            (64 << 10, Algorithm::Packet),
            (128 << 10, Algorithm::PacketTwoShot),
            ((128 << 10) + 2, Algorithm::Nvls),
        ] {
            let op = all_reduce(bytes / 2, ReductionCode::Sum);
            assert_eq!(plan(&op, &agreed).algorithm, algorithm, "{bytes} bytes");
        }
    }

    /// A network carries no packets that differ by rank.
    #[test]
    fn packets_in_two_shots_need_load_and_store() {
        let options = Options::default().resolved(Device::Cuda(0));
        let mut agreed = gpus(8, &options);
        agreed.machine.split = true;
        agreed.wanted = Algorithm::PacketTwoShot;
        let op = all_reduce(128 << 10, ReductionCode::Sum);
        assert_eq!(plan(&op, &agreed).algorithm, Algorithm::Packet);
    }

    /// A row of a large model is 16 KiB: 8192 elements of bf16.
    #[test]
    fn few_rows_of_a_norm_go_by_packets_on_gpus() {
        let options = Options::default().resolved(Device::Cuda(0));
        for ranks in [2, 4, 8] {
            let agreed = gpus(ranks, &options);
            for rows in [1, 4] {
                let planned = norm(&agreed, rows, rows * (16 << 10), 8192, 32 << 10);
                assert_eq!(planned, Algorithm::Packet, "{rows} rows, {ranks} ranks");
            }
        }
    }

    #[test]
    fn blocks_share_the_rows_that_are_fewer() {
        let options = Options::default().resolved(Device::Cuda(0));
        let plan_of = |agreed: &Agreed<'_>, rows, hidden| {
            let op = Op::AllReduceNorm {
                rows,
                hidden,
                dtype: DType::Bf16,
                row_bytes: 2 * hidden,
                digest: 0,
            };
            let plan = plan(&op, agreed);
            (plan.stripe_bits, plan.grid.blocks, plan.grid.threads)
        };
        let agreed = gpus(2, &options);
        for (rows, hidden, expected) in [
            (0, 7168, (3, 1, 320)),
            (1, 7168, (3, 8, 320)),
            (2, 7168, (3, 16, 320)),
            (3, 7168, (2, 12, 576)),
            (8, 4096, (1, 16, 576)),
            (1, 4096, (3, 8, 192)),
            (1, 4088, (0, 1, 1024)),
            (1, 1016, (0, 1, 256)),
            (9, 7168, (0, 9, 1856)),
        ] {
            let found = plan_of(&agreed, rows, hidden);
            assert_eq!(found, expected, "{rows} rows of {hidden}");
        }
        // Only packets are exchanged between blocks, and only blocks that run at the same time.
        let signal = Agreed {
            wanted: Algorithm::Signal,
            ..agreed
        };
        assert_eq!(plan_of(&signal, 1, 7168).0, 0);
        let packets = Agreed {
            wanted: Algorithm::Packet,
            ..agreed
        };
        assert_eq!(plan_of(&packets, 1, 4096).0, 3);
        let mut cpu = packets;
        cpu.machine.gpu = false;
        assert_eq!(plan_of(&cpu, 1, 4096).0, 0);
        let mut lanes = options.clone();
        lanes.testing.lanes = 64;
        cpu.options = &lanes;
        assert_eq!(plan_of(&cpu, 1, 4096).0, 3);
    }

    #[test]
    fn small_packets_take_few_blocks_and_threads() {
        let options = Options::default().resolved(Device::Cuda(0));
        for (bytes, blocks, threads) in [
            (0, 1, 128),
            (512, 1, 128),
            (1016, 1, 128),
            (4 << 10, 4, 256),
            (16 << 10, 16, 256),
            (64 << 10, 16, 1024),
        ] {
            let grid = on_gpus(2, bytes, &options).grid;
            assert_eq!(
                (grid.blocks, grid.threads),
                (blocks, threads),
                "{bytes} bytes"
            );
        }
        // Signals take all blocks. So do packets whose parts would not fit a small slot.
        assert_eq!(on_gpus(2, 2 << 20, &options).grid, PlannedGrid::ALL);
        let small = Options {
            packet_slot_bytes: 1 << 10,
            ..options
        };
        let plan = on_gpus(2, 4 << 10, &small);
        assert_eq!((plan.algorithm, plan.grid.blocks), (Algorithm::Packet, 16));
    }

    #[test]
    fn operations_from_4_mib_on_have_more_blocks_on_gpus() {
        let options = Options::default().resolved(Device::Cuda(0));
        let blocks = |bytes, options: &Options| {
            let plan = on_gpus(4, bytes, options);
            (plan.blocks, plan.grid.is_large)
        };
        assert_eq!(blocks((4 << 20) - 2, &options), (16, false));
        assert_eq!(blocks(4 << 20, &options), (32, true));
        let agreed = gpus(4, &options);
        let gather = all_gather(2 << 20);
        assert_eq!(plan(&gather, &agreed).blocks, 32);
        // Channels have places for fewer blocks.
        let (count, dtype) = (4 << 20, DType::Bf16);
        let send = Op::Send {
            count,
            dtype,
            peer: 1,
        };
        assert_eq!(plan(&send, &agreed).blocks, 16);
        // Those who choose the number of blocks leave the other SMs to computation.
        let few = Options::default().blocks(4).resolved(Device::Cuda(0));
        assert_eq!(blocks(4 << 20, &few), (4, true));
        let both = Options::default().blocks(4).large_blocks(24);
        assert_eq!(blocks(4 << 20, &both.resolved(Device::Cuda(0))), (24, true));
        let more = Options::default().large_blocks(8);
        assert_eq!(blocks(4 << 20, &more.resolved(Device::Cuda(0))), (16, true));
        let cpu = Options::default().large_blocks(8).resolved(Device::Cpu);
        assert_eq!(cpu.block_limits(), (1, 1));
    }

    const LARGE: usize = 1 << 20;

    fn chosen(determinism: Determinism, wanted: Algorithm, multicast: bool, op: &Op) -> Algorithm {
        let options = Options {
            determinism,
            ..Options::default().resolved(Device::Cpu)
        };
        let machine = Machine {
            split: false,
            oversubscribed: false,
            multicast,
            gpu: false,
        };
        let agreed = Agreed {
            options: &options,
            wanted,
            ranks: 2,
            machine,
        };
        plan(op, &agreed).algorithm
    }

    fn all_reduce(count: usize, reduction: ReductionCode) -> Op {
        Op::AllReduce {
            count,
            dtype: DType::Bf16,
            reduction,
        }
    }

    fn reduce_scatter(count: usize, reduction: ReductionCode) -> Op {
        Op::ReduceScatter {
            count,
            dtype: DType::Bf16,
            reduction,
        }
    }

    fn all_gather(count: usize) -> Op {
        let dtype = DType::Bf16;
        Op::AllGather { count, dtype }
    }

    #[test]
    fn multicast_is_taken_where_it_exists_and_bits_may_differ() {
        let auto =
            |determinism, multicast, op| chosen(determinism, Algorithm::Auto, multicast, &op);
        let large = |reduction| all_reduce(LARGE, reduction);
        let sum = ReductionCode::Sum;
        assert_eq!(auto(Determinism::Any, true, large(sum)), Algorithm::Nvls);
        let average = ReductionCode::Average;
        assert_eq!(
            auto(Determinism::Any, true, large(average)),
            Algorithm::Nvls
        );
        // Multicast is excluded for bitwise results and for windows that multicast does not reach.
        let two_shot = Algorithm::TwoShot;
        assert_eq!(auto(Determinism::Bitwise, true, large(sum)), two_shot);
        assert_eq!(auto(Determinism::Any, false, large(sum)), two_shot);
        // Multicast is not used for small messages, for a maximum (NaN), or for operations that
        // gain nothing.
        let small = all_reduce(64, sum);
        assert_eq!(auto(Determinism::Any, true, small), Algorithm::Packet);
        let max = ReductionCode::Max;
        assert_eq!(auto(Determinism::Any, true, large(max)), two_shot);
        let scatter = reduce_scatter(LARGE, sum);
        assert_eq!(auto(Determinism::Any, true, scatter), Algorithm::Signal);
        let gather = all_gather(LARGE);
        assert_eq!(auto(Determinism::Any, true, gather), Algorithm::Pull);
    }

    #[test]
    fn multicast_that_is_asked_for() {
        for multicast in [false, true] {
            let asked = |determinism, op| chosen(determinism, Algorithm::Nvls, multicast, &op);
            for op in [all_reduce, reduce_scatter] {
                let max = op(64, ReductionCode::Max);
                assert_eq!(asked(Determinism::Any, max), Algorithm::Nvls);
                assert_ne!(asked(Determinism::Bitwise, max), Algorithm::Nvls);
                let product = op(64, ReductionCode::Product);
                assert_ne!(asked(Determinism::Any, product), Algorithm::Nvls);
            }
            assert_eq!(asked(Determinism::Any, all_gather(64)), Algorithm::Nvls);
            let (count, dtype) = (64, DType::Bf16);
            let other = Op::AllToAll { count, dtype };
            assert_eq!(asked(Determinism::Any, other), Algorithm::Pull);
        }
    }
}
