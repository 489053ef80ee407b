//! Sizes of a mixture of experts, and the layout of its memory.

use bytemuck::{Pod, Zeroable};
use fusewire_device::arch::MAX_WARPS;

/// Word of an absent item: no rank, no row, no expert.
pub const NONE: u32 = u32::MAX;

/// Channels of fp8 payload that share a scale.
pub const GROUP: usize = 128;

/// Parts of the memory start at multiples of this number of words: a cache line.
const LINE: usize = 32;

/// Words before the counters of experts in an [announcement](MoeShape::announcement_words).
pub(crate) const ANNOUNCED: usize = 4;

/// Words of a header before those of the selections.
pub(crate) const HEADER: usize = 1;
/// Words of a selection in a header: its place, its index, its weight.
pub(crate) const SELECTION: usize = 3;

/// Flags of a launch: the halves that it runs, and the form of the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct MoeFlags(pub u32);

impl MoeFlags {
    /// Runs the half that sends.
    pub const SEND: Self = Self(1);
    /// Runs the second part of the half that receives: interprets what has arrived.
    pub const RECEIVE: Self = Self(2);
    /// Rows are copied to their experts. Otherwise they stay where they have arrived, or with
    /// staging are copied in the order of ranks.
    pub const EXPERT_MAJOR: Self = Self(4);
    /// Scales of fp8 are the exponents of powers of two.
    pub const UE8M0: Self = Self(8);
    /// More rows may arrive than the capacity, so no rank sends rows before all ranks know that
    /// theirs fit. Only if rows are copied from where they arrive.
    pub const BOUNDED: Self = Self(16);
    /// Runs the first part of the half that receives: waits for the other ranks.
    pub const WAIT: Self = Self(32);
    /// Ranks that do not arrive are masked. If the launch has several blocks, it must not have both
    /// [`MoeFlags::WAIT`] and [`MoeFlags::RECEIVE`].
    pub const MASK: Self = Self(64);
    /// Dispatch sends to the same experts as the last dispatch.
    pub const REUSE: Self = Self(128);
    /// The copies of rows have column-major scales: a column for each word of the scales of a row.
    pub const COLUMNS: Self = Self(256);
    /// The copies of rows are converted from fp8 to the type of the tokens.
    pub const DEQUANTIZE: Self = Self(512);
    /// Tokens and results are f16. Without this and [`MoeFlags::BF16`], they are f32.
    pub const F16: Self = Self(1024);
    /// Tokens and results are bf16.
    pub const BF16: Self = Self(2048);
    /// Tokens are sent as fp8.
    pub const FP8: Self = Self(4096);
    /// Results are sent as fp8, with f32 scales.
    pub const FP8_RESULTS: Self = Self(8192);
    /// With staging: dispatch runs its next round. Without this, it only exchanges the numbers of
    /// rows, and describes the result.
    pub const ROUND: Self = Self(16384);
    /// With staging: combine runs its first round; without this, the next one.
    pub const FIRST: Self = Self(32768);

    /// Returns the flags of both sets.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns the flags of this set that `other` does not have.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns true if the set has all flags of `other`.
    #[inline(always)]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Runs a block with `$type` as the type of the elements that the flags name.
macro_rules! with_element {
    ($flags:expr, $type:ident => $body:block) => {
        if $flags.has(MoeFlags::BF16) {
            type $type = fusewire_device::Bf16;
            $body
        } else if $flags.has(MoeFlags::F16) {
            type $type = fusewire_device::F16;
            $body
        } else {
            type $type = f32;
            $body
        }
    };
}
pub(crate) use with_element;

/// The shape of a launch: equal on all ranks.
///
/// Sizes are in words of 4 bytes. A **row** is what one rank sends another of a token: the payload,
/// the scales of the payload, and the header: the index of the token, and for each selection its
/// place, its index among the sender's selections of that expert, and its weight. Rows are
/// [`MoeShape::row_stride`] apart.
///
/// A rank's part of the window of rows has
/// - for each block of each rank an *announcement*: the rows that the rank sends, the first row of
///   this block, the rows of this block, the rank's tokens, and for each expert of the receiver the
///   selections of the rank;
/// - for each rank `max_tokens` rows; or with staging, for each block of each rank a region for the
///   even rounds and one for the odd ones: the number of rows, and `staging` rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub struct MoeShape {
    /// Experts of all ranks.
    pub experts: u32,
    /// Experts of a token.
    pub top_k: u32,
    /// Maximum number of experts of a rank.
    pub local_experts: u32,
    /// Maximum number of tokens of a rank.
    pub max_tokens: u32,
    /// Elements of a token.
    pub hidden: u32,
    /// Words of the payload of a row.
    pub payload: u32,
    /// Words of the scales of a row.
    pub scales: u32,
    /// Rows of the result in expert-major order, or with staging.
    pub capacity: u32,
    /// The rows of an expert start at a multiple of this number.
    pub alignment: u32,
    /// The halves that the launch runs, and the form of the data.
    pub flags: MoeFlags,
    /// Words of a result, as it is sent: its payload, and its scales.
    pub result: u32,
    /// Tokens of a block in a round, in a launch with staging; otherwise 0.
    pub staging: u32,
}

impl MoeShape {
    /// Returns the same shape, built from the words that an entry receives. Compilers for
    /// GPUs keep a struct in local memory if its fields are halves of its words.
    #[inline(always)]
    pub(crate) fn unpacked(self) -> Self {
        let words: [u64; 6] = bytemuck::cast(self);
        let high = |word: u64| (word >> 32) as u32;
        Self {
            experts: words[0] as u32,
            top_k: high(words[0]),
            local_experts: words[1] as u32,
            max_tokens: high(words[1]),
            hidden: words[2] as u32,
            payload: high(words[2]),
            scales: words[3] as u32,
            capacity: high(words[3]),
            alignment: words[4] as u32,
            flags: MoeFlags(high(words[4])),
            result: words[5] as u32,
            staging: high(words[5]),
        }
    }

    /// Returns the experts of a token. At least 1, because division by 0 would panic.
    #[inline(always)]
    pub const fn k(&self) -> usize {
        match self.top_k {
            0 => 1,
            k => k as usize,
        }
    }

    /// Returns the word of a row at which its header begins.
    #[inline(always)]
    pub const fn header_at(&self) -> usize {
        ceil(self.payload as usize + self.scales as usize, 4)
    }

    /// Returns the words of a row that are sent.
    #[inline(always)]
    pub const fn row_words(&self) -> usize {
        self.header_at() + self.header_words()
    }

    /// Returns the words of a header.
    #[inline(always)]
    pub(crate) const fn header_words(&self) -> usize {
        ceil(HEADER + SELECTION * self.k(), 4)
    }

    /// Returns the words of a token, or of the result of a selection, before quantization.
    #[inline(always)]
    pub(crate) const fn input_words(&self) -> usize {
        let is_short = self.flags.has(MoeFlags::F16) || self.flags.has(MoeFlags::BF16);
        self.hidden as usize / if is_short { 2 } else { 1 }
    }

    /// Returns true if rows pass through staging.
    #[inline(always)]
    pub const fn is_staged(&self) -> bool {
        self.staging > 0
    }

    /// Returns the number of the rounds in which a block sends its part of `tokens` tokens.
    #[inline(always)]
    pub const fn rounds(&self, tokens: usize, blocks: usize) -> usize {
        match self.staging {
            0 => 0,
            staging => {
                let blocks = if blocks == 0 { 1 } else { blocks };
                tokens.div_ceil(blocks).div_ceil(staging as usize)
            }
        }
    }

    /// Returns the words from a row to the next.
    #[inline(always)]
    pub const fn row_stride(&self) -> usize {
        ceil(self.row_words(), LINE)
    }

    /// Returns the words of an announcement: a multiple of 16 bytes, so that lanes write whole
    /// vectors.
    #[inline(always)]
    pub const fn announcement_words(&self) -> usize {
        ceil(ANNOUNCED + self.local_experts as usize, 4)
    }

    /// Returns the first word of the announcement of block `block` of rank `source`, in a window
    /// for `blocks` blocks.
    #[inline(always)]
    pub const fn announcement(&self, source: usize, block: usize, blocks: usize) -> usize {
        (source * blocks + block) * ceil(self.announcement_words(), LINE)
    }

    /// Returns the first word of row 0 of rank `source`, in a window for `ranks` ranks and `blocks`
    /// blocks.
    #[inline(always)]
    pub const fn rows(&self, source: usize, ranks: usize, blocks: usize) -> usize {
        self.announcement(ranks, 0, blocks) + source * self.max_tokens as usize * self.row_stride()
    }

    /// Returns the words of a rank's part of the window of rows.
    pub const fn window_words(&self, ranks: usize, blocks: usize) -> usize {
        if self.is_staged() {
            self.region(ranks, (ranks, 0), blocks, 0)
        } else {
            self.rows(ranks, ranks, blocks)
        }
    }

    /// Returns the first word of the region for the rows of block `block` of rank `source` in round
    /// `round`, in a window for `ranks` ranks and `blocks` blocks.
    #[inline(always)]
    pub const fn region(
        &self,
        ranks: usize,
        (source, block): (usize, usize),
        blocks: usize,
        round: usize,
    ) -> usize {
        let region = 2 * (source * blocks + block) + round % 2;
        let words = LINE + self.staging as usize * self.row_stride();
        self.announcement(ranks, 0, blocks) + region * words
    }

    /// Returns the word of row `slot` of a rank in its region.
    #[inline(always)]
    pub const fn staged_row(&self, slot: usize) -> usize {
        // A round has consecutive slots, not more than `staging`.
        let staging = if self.staging == 0 { 1 } else { self.staging };
        LINE + slot % staging as usize * self.row_stride()
    }

    /// Returns the tokens of a round, of the block's tokens `first .. last`.
    #[inline(always)]
    pub(crate) const fn tokens_of_round(
        &self,
        (first, last): (usize, usize),
        round: usize,
    ) -> (usize, usize) {
        let staging = self.staging as usize;
        let start = first + round * staging;
        let start = if start < last { start } else { last };
        let end = start + staging;
        (start, if end < last { end } else { last })
    }

    /// Returns the rows of the result: what [`Meta`] describes.
    #[inline(always)]
    pub const fn result_rows(&self, ranks: usize) -> usize {
        if self.flags.has(MoeFlags::EXPERT_MAJOR) || self.is_staged() {
            self.capacity as usize
        } else {
            ranks * self.max_tokens as usize
        }
    }

    /// Returns the word of a result that is not in the window at which the scales begin, after the
    /// payload of all rows. Only if rows are not converted from fp8.
    #[inline(always)]
    pub const fn scales_at(&self) -> usize {
        ceil(self.capacity as usize * self.payload as usize, LINE)
    }

    /// Returns the words of the scales of a result that is not in the window.
    #[inline(always)]
    pub const fn scales_words(&self) -> usize {
        let rows = if self.flags.has(MoeFlags::COLUMNS) {
            self.scales_column()
        } else {
            self.capacity as usize
        };
        rows * self.scales as usize
    }

    /// Returns the words from a column of the scales to the next, with [`MoeFlags::COLUMNS`]: a
    /// multiple of 16 bytes, as tensor maps need it.
    #[inline(always)]
    pub const fn scales_column(&self) -> usize {
        ceil(self.capacity as usize, 4)
    }

    /// Returns the number of results in a region of the window of results. All ranks write to one
    /// region, unless each has its own.
    #[inline(always)]
    pub const fn results_of_rank(&self) -> usize {
        self.max_tokens as usize * self.k()
    }

    /// Returns the number of results in a rank's part of the window of results. With
    /// [`MoeFlags::MASK`], each rank has a region of its own, so that late writes of a masked rank
    /// do not overwrite the results of others. With staging, each block has a region for the even
    /// rounds and one for the odd ones.
    pub const fn window_results(&self, ranks: usize, blocks: usize) -> usize {
        if self.is_staged() {
            return blocks * 2 * self.results_of_round();
        }
        let regions = if self.flags.has(MoeFlags::MASK) {
            ranks
        } else {
            1
        };
        regions * self.results_of_rank()
    }

    /// Returns the number of results of a block's tokens in a round.
    #[inline(always)]
    pub(crate) const fn results_of_round(&self) -> usize {
        self.staging as usize * self.k()
    }

    /// Returns the layout of the description of the result.
    #[inline(always)]
    pub const fn meta(&self, ranks: usize) -> Meta {
        let (rows, local) = (self.result_rows(ranks), self.local_experts as usize);
        let (counts, offsets, each) = if self.flags.has(MoeFlags::EXPERT_MAJOR) {
            (local, local + 1, 1)
        } else if self.is_staged() {
            (ranks, ranks + 1, self.k())
        } else {
            (ranks, 0, self.k())
        };
        let offsets_at = ceil(counts, LINE);
        let sources_at = offsets_at + ceil(offsets, LINE);
        let ids_at = sources_at + ceil(2 * rows, LINE);
        let weights_at = ids_at + ceil(each * rows, LINE);
        Meta {
            counts,
            offsets,
            rows,
            each,
            offsets_at,
            sources_at,
            ids_at,
            weights_at,
            words: weights_at + ceil(each * rows, LINE),
        }
    }

    /// Returns the layout of a rank's own memory.
    #[inline(always)]
    pub const fn own(&self, ranks: usize, blocks: usize) -> OwnLayout {
        let (tokens, staging) = (self.max_tokens as usize, self.staging as usize);
        let local = ranks * self.local_experts as usize;
        let counters = ceil(self.experts as usize + SEGMENTS * ranks, LINE);
        let announced_at = LINE + (MAX_WARPS + 1) * counters;
        let announced = ceil(self.announcement_words(), LINE);
        let inverse_at = announced_at + ranks * announced;
        let bases_at = inverse_at + ceil(local, LINE);
        let mask_at = bases_at + ceil(local, LINE);
        let origins_at = mask_at + ceil(ranks, LINE);
        let origin = match staging {
            0 => 0,
            _ => ORIGIN + self.rounds(tokens, blocks) + 1,
        };
        let block = origins_at + ceil(ranks * origin, LINE);
        let slots_at = blocks * block;
        let headers_at = slots_at + ceil(tokens * self.k(), LINE);
        let packed_at = headers_at + ceil(tokens * self.header_words(), LINE);
        let packed = match staging {
            _ if !self.flags.has(MoeFlags::FP8) => 0,
            0 => tokens,
            staging => blocks * staging,
        };
        let kept_at = packed_at + ceil(packed * self.header_at(), LINE);
        let kept = match staging {
            0 => 0,
            _ => self.capacity as usize,
        };
        let results_at = kept_at + ceil(kept * self.header_words(), LINE);
        let results = match self.flags.has(MoeFlags::FP8_RESULTS) {
            true => blocks * MAX_WARPS,
            false => 0,
        };
        OwnLayout {
            counters,
            announced_at,
            announced,
            inverse_at,
            bases_at,
            mask_at,
            origins_at,
            origin,
            block,
            slots_at,
            headers_at,
            packed_at,
            kept_at,
            results_at,
            words: results_at + results * self.result as usize,
        }
    }
}

/// Layout of the description of a result, in words: the rows of each expert or rank, the first row
/// of each expert, or with staging of each rank in rank-major order, and for each row its rank and
/// token, its experts and its weights.
#[derive(Clone, Copy, Debug)]
pub struct Meta {
    /// Number of counts. They come first.
    pub counts: usize,
    /// Number of offsets; 0 if there are none.
    pub offsets: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of experts, and of weights, of a row.
    pub each: usize,
    /// First word of the offsets.
    pub offsets_at: usize,
    /// First word of the sources: pairs of rank and token.
    pub sources_at: usize,
    /// First word of the experts.
    pub ids_at: usize,
    /// First word of the weights.
    pub weights_at: usize,
    /// Number of words.
    pub words: usize,
}

/// Parts of the tokens whose rows are counted separately: those of earlier blocks, of this block
/// and of later blocks.
pub(crate) const SEGMENTS: usize = 3;

/// Words about a rank whose rows arrive through staging: its tokens, and the index of the first row
/// that the block receives from it, after all rows of lower ranks and its rows for lower blocks.
/// For each round, the number of rows that have arrived before it follows.
pub(crate) const ORIGIN: usize = 2;

/// Layout of the memory that only a rank itself uses, in words.
///
/// For each block: its step, the number of tokens of the last routing, the rounds and the next
/// round, the counters of each warp and their sums, the announcements for the ranks, the expert of
/// each place, the first row of each (rank, expert), the block's copy of the mask, and what is
/// known about the rows of each rank. For all blocks: the slot of each selection, the headers of
/// the tokens, their payload and scales in fp8, the headers of the rows that have arrived through
/// staging, and a result of each warp in fp8.
#[derive(Clone, Copy, Debug)]
pub struct OwnLayout {
    /// Counters of a warp.
    pub(crate) counters: usize,
    /// First word of the announcements in a block's part.
    pub(crate) announced_at: usize,
    /// Words from an announcement to the next.
    pub(crate) announced: usize,
    /// First word of the experts by place.
    pub(crate) inverse_at: usize,
    /// First word of the first rows.
    pub(crate) bases_at: usize,
    /// First word of the block's copy of the mask.
    pub(crate) mask_at: usize,
    /// First word of what is known about the rows of each rank.
    pub(crate) origins_at: usize,
    /// Words of what is known about the rows of a rank.
    pub(crate) origin: usize,
    /// Words of a block.
    pub(crate) block: usize,
    /// First word of the slots.
    pub(crate) slots_at: usize,
    /// First word of the headers.
    pub(crate) headers_at: usize,
    /// First word of the payload in fp8.
    pub(crate) packed_at: usize,
    /// First word of the headers that have arrived.
    pub(crate) kept_at: usize,
    /// First word of the results in fp8.
    pub(crate) results_at: usize,
    /// Words.
    pub words: usize,
}

/// First word of the counters in a block's part. The first line has the step.
pub(crate) const COUNTERS_AT: usize = LINE;

/// Returns the word of the placement for an expert that is expert `local` of `rank`.
pub const fn place(rank: u32, local: u32) -> u32 {
    rank << 16 | local
}

/// Returns the rank of a place.
#[inline(always)]
pub(crate) const fn rank_of(place: u32) -> u32 {
    place >> 16
}

/// Returns the index of a place among the experts of its rank.
#[inline(always)]
pub(crate) const fn local_of(place: u32) -> u32 {
    place & 0xffff
}

/// Returns `count` rounded up to a multiple of `unit`.
#[inline(always)]
const fn ceil(count: usize, unit: usize) -> usize {
    count.div_ceil(unit) * unit
}
