//! Symbols and arguments of the baseline's kernels.

use core::ffi::c_void;

use fusewire::DType;

/// Numbers of ranks for which kernels are compiled.
pub(crate) const RANKS: [usize; 3] = [2, 4, 8];
/// Element types for which kernels are compiled.
pub(crate) const TYPES: [DType; 2] = [DType::F32, DType::Bf16];
/// Numbers of vectors of a row that each thread processes. The norm kernels are compiled for each
/// number.
pub(crate) const WIDTHS: [u32; 3] = [1, 2, 4];

/// Size in bytes of `Vector` in `cuda/memory.cuh`.
pub(crate) const VECTOR: usize = 16;
/// Maximum number of blocks of a signal pad.
pub(crate) const MAX_BLOCKS: usize = 256;
/// Maximum number of ranks of a signal pad.
const MAX_RANKS: usize = 8;
/// Maximum number of threads per block.
pub(crate) const MAX_THREADS: u32 = 512;
/// Size in bytes of `SignalPad` in `cuda/barrier.cuh`.
pub(crate) const SIGNAL_PAD_BYTES: usize =
    4 * (2 * MAX_BLOCKS + 2 * MAX_BLOCKS * MAX_RANKS + 32 + 32);

/// Number of experts of a token, of the kernels for a mixture of experts.
pub(crate) const TOP_K: usize = 8;
/// Maximum number of experts of all ranks.
pub(crate) const MAX_EXPERTS: usize = 256;
/// Payloads of the tokens that dispatch kernels send.
pub(crate) const PAYLOADS: [DType; 2] = [DType::Bf16, DType::E4m3];
/// Words of the description of a row, `INFO_WORDS` in `cuda/moe.cuh`, and the index of the word
/// with the row's token.
pub(crate) const INFO_WORDS: usize = 3 * TOP_K + 4;
pub(crate) const INFO_TOKEN: usize = 3 * TOP_K;
/// Words of `MoePad` in `cuda/moe.cuh`, and the index of its first word with a number of rows.
pub(crate) const MOE_PAD_WORDS: usize = MOE_COUNTS + 32 + MAX_EXPERTS + 64;
pub(crate) const MOE_COUNTS: usize = 64 + MAX_EXPERTS;

/// Threads that copy a row together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Team {
    Block,
    Warp,
}

/// Memory order of a barrier or a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    Relaxed,
    Release,
}

impl Order {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Relaxed => "relaxed",
            Self::Release => "release",
        }
    }
}

/// A kernel, for any type and number of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kernel {
    OneStage,
    TwoStagePull,
    TwoStagePush,
    PacketsOneShot,
    PacketsTwoShot,
    /// The value of each norm variant is the number of a row's vectors that each thread processes.
    NormByBarrier(u32),
    NormByPackets(u32),
    NormAlone(u32),
    /// Dispatch in rank-major order.
    MoeDispatch(Team),
    /// Dispatch in expert-major order.
    MoeDispatchExperts(Team),
    MoeCombinePull,
    MoeCombinePush,
    Barriers(Order),
    PingPong(Order),
    Copy,
    Empty,
    Latch,
}

impl Kernel {
    /// Returns the name in tables.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::OneStage => "one_stage",
            Self::TwoStagePull => "two_stage_pull",
            Self::TwoStagePush => "two_stage_push",
            Self::PacketsOneShot => "packets_one_shot",
            Self::PacketsTwoShot => "packets_two_shot",
            Self::NormByBarrier(_) => "norm_by_barrier",
            Self::NormByPackets(_) => "norm_by_packets",
            Self::NormAlone(_) => "norm_alone",
            Self::MoeDispatch(Team::Block) => "moe_dispatch_block",
            Self::MoeDispatch(Team::Warp) => "moe_dispatch_warp",
            Self::MoeDispatchExperts(Team::Block) => "moe_dispatch_experts_block",
            Self::MoeDispatchExperts(Team::Warp) => "moe_dispatch_experts_warp",
            Self::MoeCombinePull => "moe_combine_pull",
            Self::MoeCombinePush => "moe_combine_push",
            Self::Barriers(_) => "barriers",
            Self::PingPong(_) => "ping_pong",
            Self::Copy => "copy",
            Self::Empty => "empty",
            Self::Latch => "latch",
        }
    }

    /// Returns the waits of one operation: the numbers of barriers without a fence, barriers with a
    /// fence, and one-way packet latencies.
    pub(crate) const fn waits(self) -> (u32, u32, u32) {
        match self {
            Self::OneStage | Self::NormByBarrier(_) => (2, 0, 0),
            Self::TwoStagePull | Self::TwoStagePush => (1, 1, 0),
            Self::PacketsOneShot | Self::NormByPackets(_) => (0, 0, 1),
            Self::PacketsTwoShot => (0, 0, 2),
            _ => (0, 0, 0),
        }
    }
}

/// A kernel of the module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) kernel: Kernel,
    pub(crate) dtype: DType,
    pub(crate) ranks: usize,
}

/// Returns every kernel of the module.
pub(crate) fn all() -> Vec<Entry> {
    let mut list = Vec::new();
    let mut add = |kernel, dtype, ranks| {
        list.push(Entry {
            kernel,
            dtype,
            ranks,
        });
    };
    for dtype in TYPES {
        for ranks in RANKS {
            for kernel in [
                Kernel::OneStage,
                Kernel::TwoStagePull,
                Kernel::TwoStagePush,
                Kernel::PacketsOneShot,
                Kernel::PacketsTwoShot,
            ] {
                add(kernel, dtype, ranks);
            }
            for width in WIDTHS {
                add(Kernel::NormByBarrier(width), dtype, ranks);
                add(Kernel::NormByPackets(width), dtype, ranks);
            }
        }
        for width in WIDTHS {
            add(Kernel::NormAlone(width), dtype, 1);
        }
    }
    for ranks in RANKS {
        for payload in PAYLOADS {
            for team in [Team::Block, Team::Warp] {
                add(Kernel::MoeDispatch(team), payload, ranks);
                add(Kernel::MoeDispatchExperts(team), payload, ranks);
            }
        }
        add(Kernel::MoeCombinePull, DType::Bf16, ranks);
        add(Kernel::MoeCombinePush, DType::Bf16, ranks);
    }
    for order in [Order::Relaxed, Order::Release] {
        for ranks in RANKS {
            add(Kernel::Barriers(order), DType::F32, ranks);
        }
        add(Kernel::PingPong(order), DType::F32, 2);
    }
    add(Kernel::Copy, DType::F32, 1);
    add(Kernel::Empty, DType::F32, 1);
    add(Kernel::Latch, DType::F32, 1);
    list
}

/// Values of all possible arguments. Each kernel takes a subset of them. All addresses are device
/// addresses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Values {
    pub(crate) rank: u32,
    /// Addresses by rank.
    pub(crate) inputs: Vec<u64>,
    pub(crate) outputs: Vec<u64>,
    pub(crate) scratches: Vec<u64>,
    pub(crate) pads: Vec<u64>,
    pub(crate) buffers: Vec<u64>,
    /// Address of this rank's input.
    pub(crate) input: u64,
    pub(crate) output: u64,
    pub(crate) residual: u64,
    pub(crate) residual_out: u64,
    pub(crate) weight: u64,
    pub(crate) vectors: u32,
    /// Maximum number of vectors in a block's region of `buffers`.
    pub(crate) capacity: u32,
    pub(crate) rows: u32,
    /// Vectors per row or token.
    pub(crate) width: u32,
    pub(crate) epsilon: f32,
    pub(crate) turns: u32,
    pub(crate) moe: MoeValues,
}

/// Values of the arguments that only kernels for a mixture of experts take.
#[derive(Clone, Debug, Default)]
pub(crate) struct MoeValues {
    /// Addresses by rank.
    pub(crate) arrivals: Vec<u64>,
    pub(crate) infos: Vec<u64>,
    pub(crate) results: Vec<u64>,
    pub(crate) experts: u64,
    pub(crate) slots: u64,
    /// Rows in expert-major order, and their description.
    pub(crate) rows: u64,
    pub(crate) offsets: u64,
    pub(crate) origins: u64,
    pub(crate) row_weights: u64,
    /// Results of the expert-major rows.
    pub(crate) y: u64,
    pub(crate) tokens: u32,
    /// Maximum number of tokens of a rank.
    pub(crate) capacity: u32,
    /// Experts of a rank.
    pub(crate) per_rank: u32,
}

/// Kernel arguments in the layout of a C struct.
#[derive(Clone, Debug, Default)]
pub(crate) struct Arguments {
    words: Vec<u64>,
    bytes: usize,
    /// Offset and size of each argument.
    fields: Vec<(usize, usize)>,
}

impl Arguments {
    fn word(&mut self, value: u32) {
        let offset = self.bytes.next_multiple_of(4);
        if offset / 8 == self.words.len() {
            self.words.push(0);
        }
        self.words[offset / 8] |= u64::from(value) << (offset % 8 * 8);
        self.fields.push((offset, 4));
        self.bytes = offset + 4;
    }

    fn pointers(&mut self, values: &[u64]) {
        let offset = self.bytes.next_multiple_of(8);
        self.words.extend_from_slice(values);
        self.fields.push((offset, 8 * values.len()));
        self.bytes = offset + 8 * values.len();
    }

    /// Returns the addresses of the arguments, in order. The addresses are valid until `self` is
    /// dropped or changed.
    pub(super) fn addresses(&mut self) -> Vec<*mut c_void> {
        let base = self.words.as_mut_ptr().cast::<u8>();
        self.fields
            .iter()
            .map(|(offset, _)| base.wrapping_add(*offset).cast::<c_void>())
            .collect()
    }
}

impl Entry {
    /// Returns the exported symbol.
    pub(crate) fn symbol(&self) -> String {
        let (name, dtype, ranks) = (self.kernel.name(), self.dtype.name(), self.ranks);
        match self.kernel {
            Kernel::NormByBarrier(width) | Kernel::NormByPackets(width) => {
                format!("{name}_{dtype}_{ranks}_{width}")
            }
            Kernel::NormAlone(width) => format!("{name}_{dtype}_{width}"),
            Kernel::Barriers(order) => format!("{name}_{}_{ranks}", order.name()),
            Kernel::PingPong(order) => format!("{name}_{}", order.name()),
            Kernel::Copy | Kernel::Empty | Kernel::Latch => name.to_owned(),
            _ => format!("{name}_{dtype}_{ranks}"),
        }
    }

    /// Returns the arguments, in the order of `cuda/baseline.cu`.
    pub(crate) fn arguments(&self, values: &Values) -> Arguments {
        let mut list = Arguments::default();
        let peers = |list: &mut Arguments, all: &[&Vec<u64>]| {
            all.iter().for_each(|peers| list.pointers(peers));
        };
        let pointers = |list: &mut Arguments, all: &[u64]| {
            all.iter().for_each(|pointer| list.pointers(&[*pointer]));
        };
        let words = |list: &mut Arguments, all: &[u32]| {
            all.iter().for_each(|word| list.word(*word));
        };
        let Values {
            rank,
            inputs,
            outputs,
            scratches,
            pads,
            buffers,
            input,
            output,
            residual,
            residual_out,
            weight,
            vectors,
            capacity,
            rows,
            width,
            epsilon,
            turns,
            moe,
        } = values;
        let norm = |list: &mut Arguments| {
            pointers(list, &[*residual, *weight, *residual_out, *output]);
            words(list, &[*rows, *width, epsilon.to_bits()]);
        };
        match self.kernel {
            Kernel::OneStage => {
                peers(&mut list, &[inputs, pads]);
                pointers(&mut list, &[*output]);
                words(&mut list, &[*vectors, *rank]);
            }
            Kernel::TwoStagePull => {
                peers(&mut list, &[inputs, pads, scratches]);
                pointers(&mut list, &[*output]);
                words(&mut list, &[*vectors, *rank]);
            }
            Kernel::TwoStagePush => {
                peers(&mut list, &[inputs, pads, outputs]);
                words(&mut list, &[*vectors, *rank]);
            }
            Kernel::PacketsOneShot | Kernel::PacketsTwoShot => {
                pointers(&mut list, &[*input]);
                peers(&mut list, &[pads, buffers]);
                pointers(&mut list, &[*output]);
                words(&mut list, &[*vectors, *rank, *capacity]);
            }
            Kernel::NormByBarrier(_) => {
                peers(&mut list, &[inputs, pads]);
                norm(&mut list);
                words(&mut list, &[*rank]);
            }
            Kernel::NormByPackets(_) => {
                pointers(&mut list, &[*input]);
                peers(&mut list, &[pads, buffers]);
                norm(&mut list);
                words(&mut list, &[*rank, *capacity]);
            }
            Kernel::NormAlone(_) => {
                pointers(&mut list, &[*input]);
                norm(&mut list);
            }
            Kernel::MoeDispatch(_) | Kernel::MoeDispatchExperts(_) => {
                peers(&mut list, &[pads, &moe.arrivals, &moe.infos]);
                pointers(&mut list, &[*input, moe.experts, *weight, moe.slots]);
                if matches!(self.kernel, Kernel::MoeDispatchExperts(_)) {
                    let copies = [moe.rows, moe.offsets, moe.origins, moe.row_weights];
                    pointers(&mut list, &copies);
                }
                words(
                    &mut list,
                    &[moe.tokens, moe.capacity, *width, moe.per_rank, *rank],
                );
            }
            Kernel::MoeCombinePull => {
                peers(&mut list, &[pads, &moe.results]);
                pointers(&mut list, &[*weight, moe.slots, *output]);
                words(&mut list, &[moe.tokens, moe.capacity, *width, *rank]);
            }
            Kernel::MoeCombinePush => {
                peers(&mut list, &[pads, &moe.results]);
                let rows = [moe.y, moe.offsets, moe.origins];
                pointers(&mut list, &rows);
                pointers(&mut list, &[*weight, moe.slots, *output]);
                words(&mut list, &[moe.tokens, *width, moe.per_rank, *rank]);
            }
            Kernel::Barriers(_) | Kernel::PingPong(_) => {
                peers(&mut list, &[pads]);
                words(&mut list, &[*turns, *rank]);
            }
            Kernel::Copy => {
                pointers(&mut list, &[*output, *input]);
                words(&mut list, &[*vectors]);
            }
            Kernel::Latch => {
                pointers(&mut list, &[*input]);
                words(&mut list, &[*turns]);
            }
            Kernel::Empty => {}
        }
        list
    }

    /// Returns the offset and the size of each argument.
    pub(crate) fn layout(&self) -> Vec<(usize, usize)> {
        let peers = vec![0; self.ranks];
        let values = Values {
            inputs: peers.clone(),
            outputs: peers.clone(),
            scratches: peers.clone(),
            pads: peers.clone(),
            buffers: peers.clone(),
            moe: MoeValues {
                arrivals: peers.clone(),
                infos: peers.clone(),
                results: peers,
                ..MoeValues::default()
            },
            ..Values::default()
        };
        self.arguments(&values).fields
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_laid_out_as_in_c() {
        let entry = Entry {
            kernel: Kernel::PacketsOneShot,
            dtype: DType::Bf16,
            ranks: 2,
        };
        assert_eq!(entry.symbol(), "packets_one_shot_bf16_2");
        let values = Values {
            input: 7,
            pads: vec![1, 2],
            buffers: vec![3, 4],
            output: 5,
            vectors: 6,
            rank: 1,
            capacity: 9,
            ..Values::default()
        };
        let list = entry.arguments(&values);
        assert_eq!(
            list.fields,
            [
                (0, 8),
                (8, 16),
                (24, 16),
                (40, 8),
                (48, 4),
                (52, 4),
                (56, 4)
            ]
        );
        assert_eq!(list.words, [7, 1, 2, 3, 4, 5, 6 | 1 << 32, 9]);
        // A pointer after a u32 must be aligned to 8 bytes.
        let mut list = Arguments::default();
        list.word(1);
        list.pointers(&[2]);
        assert_eq!(
            (list.words, list.fields),
            (vec![1, 2], vec![(0, 4), (8, 8)])
        );
    }

    #[test]
    fn symbols_are_different() {
        let mut symbols: Vec<String> = all().iter().map(Entry::symbol).collect();
        let count = symbols.len();
        symbols.sort();
        symbols.dedup();
        assert_eq!(symbols.len(), count);
    }

    #[test]
    fn constants_are_those_of_the_source() {
        let memory = include_str!("../../cuda/memory.cuh");
        for (name, value) in [
            ("MAX_BLOCKS", MAX_BLOCKS),
            ("MAX_RANKS", MAX_RANKS),
            ("MAX_THREADS", MAX_THREADS as usize),
        ] {
            let line = format!("constexpr int {name} = {value};");
            assert!(memory.contains(&line), "{line}");
        }
        let barrier = include_str!("../../cuda/barrier.cuh");
        assert!(barrier.contains(&format!(
            "static_assert(sizeof(SignalPad) == {SIGNAL_PAD_BYTES}"
        )));
        let moe = include_str!("../../cuda/moe.cuh");
        for line in [
            format!("constexpr int TOP_K = {TOP_K};"),
            format!("constexpr int MAX_EXPERTS = {MAX_EXPERTS};"),
            format!("static_assert(sizeof(MoePad) == {},", 4 * MOE_PAD_WORDS),
        ] {
            assert!(moe.contains(&line), "{line}");
        }
    }
}
