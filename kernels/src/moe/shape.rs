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
    /// Rows are copied to their experts; otherwise they stay where they have arrived.
    pub const EXPERT_MAJOR: Self = Self(4);
    /// Scales of fp8 are the exponents of powers of two.
    pub const UE8M0: Self = Self(8);
    /// More rows may arrive than the capacity, so no rank sends rows before all ranks know that
    /// theirs fit. Only in expert-major order.
    pub const BOUNDED: Self = Self(16);
    /// Runs the first part of the half that receives: waits for the other ranks.
    pub const WAIT: Self = Self(32);
    /// Ranks that do not arrive are masked. If the launch has several blocks, it must not have both
    /// [`MoeFlags::WAIT`] and [`MoeFlags::RECEIVE`].
    pub const MASK: Self = Self(64);
    /// Dispatch sends to the same experts as the last dispatch.
    pub const REUSE: Self = Self(128);
    /// In expert-major order, the scales have a column for each word of the scales of a row.
    pub const COLUMNS: Self = Self(256);
    /// In expert-major order, rows are converted from fp8 to the type of the tokens.
    pub const DEQUANTIZE: Self = Self(512);

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

/// The shape of a launch. Only the flags and the capacity may differ between ranks.
///
/// Sizes are in words of 4 bytes. A **row** is what one rank sends another of a token: the payload,
/// the scales of the payload, and the header: the number of the token, and for each selection its
/// place, its index among the sender's selections of that expert, and its weight. Rows are
/// [`MoeShape::row_stride`] apart.
///
/// A rank's part of the window of rows has
/// - for each block of each rank an *announcement*: the rows that the rank sends, the first row of
///   this block, the rows of this block, an unused word, and for each expert of the receiver the
///   selections of the rank;
/// - for each rank `max_tokens` rows.
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
    /// Rows of the result in expert-major order.
    pub capacity: u32,
    /// The rows of an expert start at a multiple of this number.
    pub alignment: u32,
    /// The halves that the launch runs, and the form of the data.
    pub flags: MoeFlags,
}

impl MoeShape {
    /// Returns the same shape, built from the words that an entry receives. Compilers for
    /// GPUs keep a struct in local memory if its fields are halves of its words.
    #[inline(always)]
    pub(crate) fn unpacked(self) -> Self {
        let words: [u64; 5] = bytemuck::cast(self);
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
        self.header_at() + ceil(HEADER + SELECTION * self.k(), 4)
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
        self.rows(ranks, ranks, blocks)
    }

    /// Returns the rows of the result: what [`Meta`] describes.
    #[inline(always)]
    pub const fn result_rows(&self, ranks: usize) -> usize {
        if self.flags.has(MoeFlags::EXPERT_MAJOR) {
            self.capacity as usize
        } else {
            ranks * self.max_tokens as usize
        }
    }

    /// Returns the word of a result in expert-major order at which the scales begin, after the
    /// payload of all rows. Only if rows are not converted from fp8.
    #[inline(always)]
    pub const fn scales_at(&self) -> usize {
        ceil(self.capacity as usize * self.payload as usize, LINE)
    }

    /// Returns the words of the scales in expert-major order.
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

    /// Returns the number of results at a rank that one rank can write: all of them, unless each
    /// rank has a region of its own.
    #[inline(always)]
    pub const fn results_of_rank(&self) -> usize {
        self.max_tokens as usize * self.k()
    }

    /// Returns the number of results in a rank's part of the window of results. With
    /// [`MoeFlags::MASK`], each rank has a region of its own, so that late writes of a masked rank
    /// do not overwrite the results of others.
    pub const fn window_results(&self, ranks: usize) -> usize {
        let regions = if self.flags.has(MoeFlags::MASK) {
            ranks
        } else {
            1
        };
        regions * self.results_of_rank()
    }

    /// Returns the layout of the description of the result.
    #[inline(always)]
    pub const fn meta(&self, ranks: usize) -> Meta {
        let (rows, local) = (self.result_rows(ranks), self.local_experts as usize);
        let (counts, offsets, each) = if self.flags.has(MoeFlags::EXPERT_MAJOR) {
            (local, local + 1, 1)
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
        let local = ranks * self.local_experts as usize;
        let counters = ceil(self.experts as usize + SEGMENTS * ranks, LINE);
        let announced_at = LINE + (MAX_WARPS + 1) * counters;
        let announced = ceil(self.announcement_words(), LINE);
        let inverse_at = announced_at + ranks * announced;
        let bases_at = inverse_at + ceil(local, LINE);
        let mask_at = bases_at + ceil(local, LINE);
        let block = mask_at + ceil(ranks, LINE);
        let slots_at = blocks * block;
        let packed_at = slots_at + ceil(self.max_tokens as usize * self.k(), LINE);
        OwnLayout {
            counters,
            announced_at,
            announced,
            inverse_at,
            bases_at,
            mask_at,
            block,
            slots_at,
            packed_at,
            words: packed_at + self.max_tokens as usize * self.row_stride(),
        }
    }
}

/// Layout of the description of a result, in words: the rows of each expert or rank, the first row
/// of each expert, and for each row its rank and token, its experts and its weights.
#[derive(Clone, Copy, Debug)]
pub struct Meta {
    /// Counts, which come first.
    pub counts: usize,
    /// Offsets.
    pub offsets: usize,
    /// Rows.
    pub rows: usize,
    /// Experts and weights of a row.
    pub each: usize,
    /// First word of the offsets.
    pub offsets_at: usize,
    /// First word of the sources: pairs of rank and token.
    pub sources_at: usize,
    /// First word of the experts.
    pub ids_at: usize,
    /// First word of the weights.
    pub weights_at: usize,
    /// Words.
    pub words: usize,
}

/// Parts of the tokens whose rows are counted separately: those of earlier blocks, of this block
/// and of later blocks.
pub(crate) const SEGMENTS: usize = 3;

/// Layout of the memory that only a rank itself uses, in words.
///
/// For each block: its step and the number of tokens of the last routing, the counters of each warp
/// and their sums, the announcements for the ranks, the expert of each place, the first row of each
/// (rank, expert), and the block's copy of the mask. For all blocks: the slot of each selection,
/// and the rows of the tokens.
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
    /// Words of a block.
    pub(crate) block: usize,
    /// First word of the slots.
    pub(crate) slots_at: usize,
    /// First word of the rows.
    pub(crate) packed_at: usize,
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
