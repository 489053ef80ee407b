//! Configuration of a mixture of experts, and its checks.

use core::time::Duration;

use fusewire_device::DType;
use fusewire_kernels::moe::{GROUP, MoeFlags, MoeShape};

use crate::Result;
use crate::comm::Communicator;
use crate::comm::submit::invalid;

/// Default of [`MoeConfig::staging`].
const STAGING: usize = 512;

/// Maximum number of experts of a token.
const MAX_TOP_K: u32 = 16;

/// Form in which tokens are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MoePayload {
    /// In the input's type.
    #[default]
    Same,
    /// In fp8 E4M3, with a scale for each 128 channels of a token.
    ///
    /// With `a` the largest magnitude of the channels, at least 1e-4, the scale is `a / 448`, and
    /// an element is `x * (448 / a)` in f32, rounded to the nearest E4M3, ties to even, saturating.
    /// A NaN makes all 128 elements and the scale NaN.
    Fp8(MoeScales),
}

/// Form in which results are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MoeResults {
    /// In the input's type.
    #[default]
    Same,
    /// In fp8 E4M3, with an f32 scale for each 128 elements, as in [`MoePayload::Fp8`]. Combine
    /// adds `weight * (element * scale)`.
    Fp8,
}

/// Protocol of dispatch and combine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MoeMode {
    /// Few tokens, as in decoding. A rank sends all rows at once, and peers have room for as many
    /// as can arrive. Each operation is one launch, and has two halves between which the caller can
    /// compute.
    #[default]
    LowLatency,
    /// Many tokens, as in prefill. The ranks first exchange the numbers of rows. Then rows and
    /// results pass through [staging](MoeConfig::staging) in rounds, each of which is a launch. The
    /// operations have no halves.
    HighThroughput,
}

/// Type of the scales of fp8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MoeScales {
    /// f32.
    #[default]
    F32,
    /// The exponent of a power of two, with a bias of 127, in a byte (UE8M0): the scale is rounded
    /// up, and an element is `x / scale`. Infinities make all 128 elements NaN.
    Ue8m0,
}

/// Order of the scales of fp8, if dispatch copies rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MoeScalesLayout {
    /// The scales of a row are contiguous.
    #[default]
    RowMajor,
    /// The scales of the same 128 channels of all rows are contiguous, and columns start at
    /// multiples of 16 bytes, as the tensor maps of TMA require. UE8M0 scales are u32, with those
    /// of 512 channels of a row, the first in the lowest byte.
    ColumnMajor,
}

/// Type of the rows that a rank receives, if they are sent in fp8.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MoeReceived {
    /// The form in which the rows are sent.
    #[default]
    AsSent,
    /// The input's type, if dispatch copies rows: the product of the fp8 element and its scale in
    /// f32, rounded to the type. There are no scales.
    Dequantized,
}

/// Behavior when a rank does not send in time, or its process has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MissingRanks {
    /// The communicator fails on all ranks.
    #[default]
    Fail,
    /// This rank masks the missing rank, and continues without it ([`Moe::mask`]).
    ///
    /// From then on, this rank neither sends to the masked rank nor waits for it. The tokens of
    /// the masked rank are missing from what dispatch receives, and the results of its experts are
    /// missing from the sums of combine, which [`MicroBatch::missing`] reports; weights are not
    /// changed. Each rank masks by itself, so a slow rank may be masked by some ranks only. Rows
    /// and results that a masked rank still writes are ignored. A mask lasts as long as the
    /// [`Moe`].
    ///
    /// A rank is late after the timeout ([`MoeConfig::timeout`]). A rank that itself waits for a
    /// missing rank has up to four times as long.
    ///
    /// All other failures, and all other operations of the communicator, fail as always: an
    /// `all_reduce` with a dead rank fails the communicator, and so does a failure of a masked
    /// rank. Needs ranks that reach each other by load and store. The window of results has a
    /// region for each rank, so it is larger by a factor of the number of ranks.
    ///
    /// [`Moe`]: super::Moe
    /// [`Moe::mask`]: super::Moe::mask
    /// [`MicroBatch::missing`]: super::MicroBatch::missing
    Mask,
}

/// Order of the rows that a rank receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MoeLayout {
    /// A row for each selection, expert by expert: the copies that a grouped GEMM needs.
    #[default]
    ExpertMajor,
    /// A row for each token, rank by rank. In low latency mode, the rows stay where they have
    /// arrived. In high throughput mode, dispatch copies them, and the rows of all ranks are
    /// contiguous.
    RankMajor,
}

/// Configuration of a [`Moe`](super::Moe), equal on all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MoeConfig {
    /// Experts of all ranks.
    pub experts: u32,
    /// Experts of a token: 1 to 16.
    pub top_k: u32,
    /// Elements of a token: a multiple of 8, or of 128 for fp8.
    pub hidden: usize,
    /// Maximum number of tokens of a rank.
    pub max_tokens: usize,
    /// Maximum number of rows of a rank, including those that the alignment adds. Has no effect in
    /// rank-major order in low latency mode. `None` (default) is as many as can arrive. With fewer,
    /// the ranks exchange row counts before the rows, which takes one or two more messages; if the
    /// rows of any rank exceed the capacity, dispatch fails on all ranks before any row moves.
    pub capacity: Option<usize>,
    /// Protocol of dispatch and combine.
    pub mode: MoeMode,
    /// In high throughput mode, the tokens that each rank sends in a round: at most `max_tokens`,
    /// rounded up to a multiple of the blocks. A rank has staging for the rows of two rounds from
    /// each rank, and for the results of two rounds. `None` (default) is 512.
    pub staging: Option<usize>,
    /// Type of the tokens and results: bf16 (default), f16 or f32.
    pub input: DType,
    /// Form in which tokens are sent.
    pub payload: MoePayload,
    /// Form in which results are sent.
    pub results: MoeResults,
    /// Order of the scales, if tokens are sent in fp8.
    pub scales_layout: MoeScalesLayout,
    /// Type of the rows that a rank receives, if tokens are sent in fp8.
    pub received: MoeReceived,
    /// Order of the rows that a rank receives.
    pub layout: MoeLayout,
    /// In expert-major order, the rows of each expert start at a multiple of this number, such as
    /// the rows of a GEMM's tile. Default: 1.
    pub alignment: usize,
    /// Micro-batches that can be in flight at the same time: 1 (default) or 2.
    pub in_flight: usize,
    /// Maximum number of experts of a rank. `None` (default) is the experts divided by the ranks,
    /// rounded up.
    pub local_experts: Option<u32>,
    /// Blocks of a launch. 0 (default) selects the communicator's ([`Options::blocks`]).
    ///
    /// [`Options::blocks`]: field@crate::Options::blocks
    pub blocks: u32,
    /// Behavior when a rank does not send in time, or its process has ended.
    pub missing_ranks: MissingRanks,
    /// Timeout of each wait for another rank. `None` (default) selects the communicator's
    /// ([`Options::timeout`]).
    ///
    /// [`Options::timeout`]: field@crate::Options::timeout
    pub timeout: Option<Duration>,
}

impl MoeConfig {
    /// Creates a configuration with the default values of all other fields.
    pub fn new(experts: u32, top_k: u32, hidden: usize, max_tokens: usize) -> Self {
        Self {
            experts,
            top_k,
            hidden,
            max_tokens,
            capacity: None,
            mode: MoeMode::LowLatency,
            staging: None,
            input: DType::Bf16,
            payload: MoePayload::Same,
            results: MoeResults::Same,
            scales_layout: MoeScalesLayout::RowMajor,
            received: MoeReceived::AsSent,
            layout: MoeLayout::ExpertMajor,
            alignment: 1,
            in_flight: 1,
            local_experts: None,
            blocks: 0,
            missing_ranks: MissingRanks::Fail,
            timeout: None,
        }
    }

    /// Sets the maximum number of rows of a rank.
    #[must_use]
    pub fn capacity(mut self, rows: usize) -> Self {
        self.capacity = Some(rows);
        self
    }

    /// Sets the protocol of dispatch and combine.
    #[must_use]
    pub fn mode(mut self, mode: MoeMode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets the tokens of a rank that are sent in a round, in high throughput mode.
    #[must_use]
    pub fn staging(mut self, tokens: usize) -> Self {
        self.staging = Some(tokens);
        self
    }

    /// Sets the type of tokens and results.
    #[must_use]
    pub fn input(mut self, input: DType) -> Self {
        self.input = input;
        self
    }

    /// Sets the form in which tokens are sent.
    #[must_use]
    pub fn payload(mut self, payload: MoePayload) -> Self {
        self.payload = payload;
        self
    }

    /// Sets the form in which results are sent.
    #[must_use]
    pub fn results(mut self, results: MoeResults) -> Self {
        self.results = results;
        self
    }

    /// Sets the order of the scales.
    #[must_use]
    pub fn scales_layout(mut self, layout: MoeScalesLayout) -> Self {
        self.scales_layout = layout;
        self
    }

    /// Sets the type of the rows that a rank receives.
    #[must_use]
    pub fn received(mut self, received: MoeReceived) -> Self {
        self.received = received;
        self
    }

    /// Sets the order of the rows that a rank receives.
    #[must_use]
    pub fn layout(mut self, layout: MoeLayout) -> Self {
        self.layout = layout;
        self
    }

    /// Sets the alignment of the rows of an expert.
    #[must_use]
    pub fn alignment(mut self, rows: usize) -> Self {
        self.alignment = rows;
        self
    }

    /// Sets the number of micro-batches.
    #[must_use]
    pub fn in_flight(mut self, micro_batches: usize) -> Self {
        self.in_flight = micro_batches;
        self
    }

    /// Sets the maximum number of experts of a rank.
    #[must_use]
    pub fn local_experts(mut self, experts: u32) -> Self {
        self.local_experts = Some(experts);
        self
    }

    /// Sets the number of blocks of a launch.
    #[must_use]
    pub fn blocks(mut self, blocks: u32) -> Self {
        self.blocks = blocks;
        self
    }

    /// Sets the consequence of missing ranks.
    #[must_use]
    pub fn missing_ranks(mut self, missing: MissingRanks) -> Self {
        self.missing_ranks = missing;
        self
    }

    /// Sets the timeout of each wait for another rank.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Returns the words that must be equal on all ranks.
    pub(super) fn words(&self) -> [u64; 19] {
        let payload = match self.payload {
            MoePayload::Same => 0,
            MoePayload::Fp8(MoeScales::F32) => 1,
            MoePayload::Fp8(MoeScales::Ue8m0) => 2,
        };
        [
            u64::from(self.experts),
            u64::from(self.top_k),
            self.hidden as u64,
            self.max_tokens as u64,
            self.capacity.map_or(u64::MAX, |rows| rows as u64),
            self.input as u64,
            payload,
            u64::from(self.layout == MoeLayout::RankMajor),
            self.alignment as u64,
            self.in_flight as u64,
            self.local_experts.map_or(u64::MAX, u64::from),
            u64::from(self.blocks),
            u64::from(self.scales_layout == MoeScalesLayout::ColumnMajor),
            u64::from(self.received == MoeReceived::Dequantized),
            u64::from(self.missing_ranks == MissingRanks::Mask),
            self.timeout.map_or(u64::MAX, |time| time.as_nanos() as u64),
            u64::from(self.mode == MoeMode::HighThroughput),
            self.staging.map_or(u64::MAX, |tokens| tokens as u64),
            u64::from(self.results == MoeResults::Fp8),
        ]
    }

    /// Formats [`MoeConfig::words`] for a message.
    pub(super) fn describe(words: &[u64]) -> String {
        let optional = |word: u64| match word {
            u64::MAX => "default".to_owned(),
            value => value.to_string(),
        };
        let payload = [
            "the input's type",
            "fp8 with f32 scales",
            "fp8 with UE8M0 scales",
        ];
        let layout = ["expert-major", "rank-major"];
        let scales = [", row-major scales", ", column-major scales"];
        let received = ["", ", dequantized"];
        let missing = ["fail", "are masked"];
        let modes = ["low latency", "high throughput"];
        let results = ["", ", results in fp8"];
        let chosen = |names: &[&'static str], word: usize| {
            names.get(words[word] as usize).copied().unwrap_or("?")
        };
        let form = match words[6] {
            0 => String::new(),
            _ => format!("{}{}", chosen(&scales, 12), chosen(&received, 13)),
        };
        format!(
            "{}, staging {}, {} experts, top {}, hidden {}, {} tokens, capacity {}, {} in \
             {}{form}{}, {} rows aligned to {}, {} micro-batches, {} local experts, {} blocks, \
             missing ranks {}, timeout {} ns",
            chosen(&modes, 16),
            optional(words[17]),
            words[0],
            words[1],
            words[2],
            words[3],
            optional(words[4]),
            DType::from_code(words[5] as u8).map_or("?", DType::name),
            chosen(&payload, 6),
            chosen(&results, 18),
            chosen(&layout, 7),
            words[8],
            words[9],
            optional(words[10]),
            words[11],
            chosen(&missing, 14),
            optional(words[15]),
        )
    }

    /// Checks the configuration. Returns the shape of the launches, without the half to run, and
    /// the number of blocks.
    pub(super) fn check(&self, comm: &Communicator) -> Result<(MoeShape, u32)> {
        let refuse = |detail: String| Err(invalid(super::NAME, detail));
        let Self {
            experts,
            top_k,
            hidden,
            max_tokens,
            alignment,
            ..
        } = *self;
        if experts == 0 || max_tokens == 0 || alignment == 0 {
            return refuse(format!(
                "{experts} experts, {max_tokens} tokens of a rank at most, alignment {alignment}; \
                 each must be at least 1"
            ));
        }
        if top_k == 0 || top_k > MAX_TOP_K {
            return refuse(format!(
                "{top_k} experts of a token; must be 1 to {MAX_TOP_K}"
            ));
        }
        if !matches!(self.input, DType::Bf16 | DType::F16 | DType::F32) {
            return refuse(format!(
                "tokens of type {}; must be bf16, f16 or f32",
                self.input.name()
            ));
        }
        let unit = match (self.payload, self.results) {
            (MoePayload::Same, MoeResults::Same) => 8,
            _ => GROUP,
        };
        if hidden == 0 || !hidden.is_multiple_of(unit) || hidden > 1 << 20 {
            return refuse(format!(
                "{hidden} elements of a token; must be a multiple of {unit}, at most 2^20"
            ));
        }
        let is_fp8 = matches!(self.payload, MoePayload::Fp8(_));
        for (is_set, what) in [
            (
                self.scales_layout == MoeScalesLayout::ColumnMajor,
                "column-major scales",
            ),
            (
                self.received == MoeReceived::Dequantized,
                "dequantized rows",
            ),
        ] {
            if is_set && !(is_fp8 && self.copies_rows()) {
                return refuse(format!(
                    "{what} need fp8 payload, and expert-major order or high throughput mode, in \
                     which dispatch copies rows"
                ));
            }
        }
        let is_staged = self.mode == MoeMode::HighThroughput;
        if is_staged && self.missing_ranks == MissingRanks::Mask {
            return refuse("missing ranks can be masked only in low latency mode".to_owned());
        }
        if self.staging.is_some() && !is_staged {
            return refuse("staging is for high throughput mode".to_owned());
        }
        if !(1..=2).contains(&self.in_flight) {
            return refuse(format!(
                "{} micro-batches; the number must be 1 or 2",
                self.in_flight
            ));
        }
        if self.missing_ranks == MissingRanks::Mask && comm.inner.executor.is_split() {
            return refuse(
                "missing ranks can be masked only if all ranks reach each other by load and \
                 store; this communicator uses a network"
                    .to_owned(),
            );
        }
        let ranks = comm.size();
        let local_experts = self.local_experts.unwrap_or(experts.div_ceil(ranks));
        let places = u64::from(local_experts) * u64::from(ranks);
        if u64::from(experts) > places || local_experts > 0xffff || ranks > 0xffff {
            return refuse(format!(
                "{experts} experts, but {ranks} ranks with up to {local_experts} experts each \
                 (at most 65535)"
            ));
        }
        let most = comm.options().blocks;
        let blocks = match self.blocks {
            0 => most,
            blocks => blocks,
        };
        if blocks > most {
            return refuse(format!(
                "{blocks} blocks; this communicator allows at most {most} (Options::blocks)"
            ));
        }
        // All numbers of rows, selections and words must fit 32 bits.
        let tokens = (max_tokens as u64).saturating_mul(u64::from(ranks));
        let items = tokens.saturating_mul(u64::from(top_k));
        let padding = (alignment as u64 - 1).saturating_mul(u64::from(local_experts));
        let worst = match self.layout {
            MoeLayout::RankMajor if is_staged => tokens,
            _ => items.saturating_add(padding),
        };
        let capacity = self.capacity.map_or(worst, |rows| rows as u64);
        if items > 1 << 30 || worst > 1 << 30 || capacity > 1 << 30 {
            return refuse(format!(
                "{max_tokens} tokens of each of {ranks} ranks with {top_k} experts, capacity \
                 {capacity}: more than 2^30 rows"
            ));
        }
        let (size, scales, form) = match self.payload {
            MoePayload::Same => (self.input.size(), 0, MoeFlags::default()),
            MoePayload::Fp8(MoeScales::F32) => (1, hidden / GROUP, MoeFlags::default()),
            MoePayload::Fp8(MoeScales::Ue8m0) => (1, (hidden / GROUP).div_ceil(4), MoeFlags::UE8M0),
        };
        let layout = match self.layout {
            MoeLayout::ExpertMajor if capacity < worst => {
                MoeFlags::EXPERT_MAJOR.with(MoeFlags::BOUNDED)
            }
            MoeLayout::ExpertMajor => MoeFlags::EXPERT_MAJOR,
            MoeLayout::RankMajor if is_staged && capacity < worst => MoeFlags::BOUNDED,
            MoeLayout::RankMajor => MoeFlags::default(),
        };
        let mut flags = form.with(layout);
        for (is_set, flag) in [
            (
                self.scales_layout == MoeScalesLayout::ColumnMajor,
                MoeFlags::COLUMNS,
            ),
            (
                self.received == MoeReceived::Dequantized,
                MoeFlags::DEQUANTIZE,
            ),
            (self.missing_ranks == MissingRanks::Mask, MoeFlags::MASK),
            (is_fp8, MoeFlags::FP8),
            (self.results == MoeResults::Fp8, MoeFlags::FP8_RESULTS),
            (self.input == DType::Bf16, MoeFlags::BF16),
            (self.input == DType::F16, MoeFlags::F16),
        ] {
            if is_set {
                flags = flags.with(flag);
            }
        }
        let staging = match self.mode {
            MoeMode::LowLatency => 0,
            // More than all tokens would only waste memory.
            MoeMode::HighThroughput => {
                let tokens = self.staging.unwrap_or(STAGING).min(max_tokens);
                tokens.div_ceil(blocks as usize).max(1) as u32
            }
        };
        let result = match self.results {
            MoeResults::Same => hidden * self.input.size() / 4,
            // Multiples of 16 bytes.
            MoeResults::Fp8 => hidden / 4 + (hidden / GROUP).next_multiple_of(4),
        };
        let shape = MoeShape {
            experts,
            top_k,
            local_experts,
            max_tokens: max_tokens as u32,
            hidden: hidden as u32,
            payload: (hidden * size / 4) as u32,
            scales: scales as u32,
            capacity: capacity as u32,
            alignment: alignment as u32,
            flags,
            result: result as u32,
            staging,
        };
        Ok((shape, blocks))
    }

    /// Returns true if dispatch copies the rows from where they arrive.
    pub(super) fn copies_rows(&self) -> bool {
        self.layout == MoeLayout::ExpertMajor || self.mode == MoeMode::HighThroughput
    }

    /// Returns the type of the rows that a rank receives.
    pub(super) fn received_type(&self) -> DType {
        match self.payload {
            MoePayload::Fp8(_) if self.received == MoeReceived::AsSent => DType::E4m3,
            _ => self.input,
        }
    }

    /// Returns the type of the scales that a rank receives, and their number in a word of 4 bytes.
    pub(super) fn scales_type(&self) -> Option<(DType, usize)> {
        match self.payload {
            _ if self.received == MoeReceived::Dequantized => None,
            MoePayload::Same => None,
            MoePayload::Fp8(MoeScales::F32) => Some((DType::F32, 1)),
            MoePayload::Fp8(MoeScales::Ue8m0) => match self.scales_layout {
                MoeScalesLayout::RowMajor => Some((DType::U8, 4)),
                MoeScalesLayout::ColumnMajor => Some((DType::U32, 1)),
            },
        }
    }
}
