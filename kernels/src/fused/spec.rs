//! Specification of a fused norm: one word that is equal on all ranks.

use bytemuck::{Pod, Zeroable};

/// The rows that a rank reduces, and the ranks that get them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Route {
    /// Every rank reduces all rows.
    OneShot = 0,
    /// Rank r reduces and normalizes its part of the rows, and writes them to all ranks.
    TwoShot = 1,
    /// Rank r reduces and normalizes part r of the input's rows, and keeps them.
    ReduceScatter = 2,
}

/// The statistics that a row is normalized by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Statistics {
    /// Root mean square.
    Rms = 0,
    /// Mean and variance.
    Layer = 1,
}

/// Format of the normalized rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum OutputFormat {
    /// The element type.
    Unquantized = 0,
    /// fp8 E4M3, by one given scale.
    StaticFp8 = 1,
    /// fp8 E4M3, by a computed scale per row.
    TokenFp8 = 2,
    /// fp8 E4M3, by a computed scale per [`GROUP`] elements of a row.
    GroupFp8 = 3,
}

/// Greatest [`NormSpec::stripe_bits`].
pub const MOST_STRIPE_BITS: u32 = 3;

/// Elements that share a scale in [`OutputFormat::GroupFp8`].
pub const GROUP: usize = 128;

/// A fused norm: `[..][stripes:2][route:2][column-major:1][ue8m0:1][output_format:2][f32
/// residual:1][weight + 1:1][statistics:1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct NormSpec(pub u32);

impl NormSpec {
    const UNIT_OFFSET: u32 = 1 << 1;
    const WIDE_RESIDUAL: u32 = 1 << 2;
    const UE8M0: u32 = 1 << 5;
    const COLUMN_MAJOR: u32 = 1 << 6;

    /// Creates a specification with these statistics, output and route, and all else off.
    pub const fn new(statistics: Statistics, output_format: OutputFormat, route: Route) -> Self {
        Self(statistics as u32 | (output_format as u32) << 3 | (route as u32) << 7)
    }

    /// Multiplies by `1 + weight` instead of `weight`.
    #[must_use]
    pub const fn with_unit_offset(self) -> Self {
        Self(self.0 | Self::UNIT_OFFSET)
    }

    /// Makes the residual and its sum f32 for every element type. The f32 values are normalized.
    #[must_use]
    pub const fn with_wide_residual(self) -> Self {
        Self(self.0 | Self::WIDE_RESIDUAL)
    }

    /// Makes scales powers of two, of one byte each (E8M0, bias 127).
    #[must_use]
    pub const fn with_ue8m0(self) -> Self {
        Self(self.0 | Self::UE8M0)
    }

    /// Makes the scales of a group contiguous, instead of those of a row.
    #[must_use]
    pub const fn with_column_major(self) -> Self {
        Self(self.0 | Self::COLUMN_MAJOR)
    }

    /// Divides each row into `1 << bits` stripes, at most 8, of one block each.
    #[must_use]
    pub const fn with_stripe_bits(self, bits: u32) -> Self {
        assert!(bits <= MOST_STRIPE_BITS);
        Self(self.0 | bits << 9)
    }

    /// Returns the binary logarithm of the number of stripes of a row.
    #[inline(always)]
    pub const fn stripe_bits(self) -> u32 {
        self.0 >> 9 & 3
    }

    /// Returns true if the statistics are those of a layer norm.
    #[inline(always)]
    pub const fn is_layer(self) -> bool {
        self.0 & 1 != 0
    }

    /// Returns true if the weight is `1 + weight`.
    #[inline(always)]
    pub const fn has_unit_offset(self) -> bool {
        self.0 & Self::UNIT_OFFSET != 0
    }

    /// Returns true if the residual is f32.
    #[inline(always)]
    pub const fn has_wide_residual(self) -> bool {
        self.0 & Self::WIDE_RESIDUAL != 0
    }

    /// Returns true if a computed scale is one byte.
    #[inline(always)]
    pub const fn is_ue8m0(self) -> bool {
        self.0 & Self::UE8M0 != 0
    }

    /// Returns true if the scales of a group are contiguous.
    #[inline(always)]
    pub const fn is_column_major(self) -> bool {
        self.0 & Self::COLUMN_MAJOR != 0
    }

    /// Returns the output format.
    #[inline(always)]
    pub const fn output_format(self) -> OutputFormat {
        match self.0 >> 3 & 3 {
            0 => OutputFormat::Unquantized,
            1 => OutputFormat::StaticFp8,
            2 => OutputFormat::TokenFp8,
            _ => OutputFormat::GroupFp8,
        }
    }

    /// Returns the route. Codes that do not exist are [`Route::OneShot`].
    #[inline(always)]
    pub const fn route(self) -> Route {
        match self.0 >> 7 & 3 {
            1 => Route::TwoShot,
            2 => Route::ReduceScatter,
            _ => Route::OneShot,
        }
    }

    /// Returns true if scales are computed.
    #[inline(always)]
    pub const fn has_scales(self) -> bool {
        self.0 >> 3 & 3 >= 2
    }

    /// Returns the bytes of a computed scale.
    #[inline(always)]
    pub const fn scale_bytes(self) -> usize {
        if self.is_ue8m0() { 1 } else { 4 }
    }

    /// Returns the number of computed scales of a row of `hidden` elements.
    #[inline(always)]
    pub const fn scales(self, hidden: usize) -> usize {
        match self.output_format() {
            OutputFormat::Unquantized | OutputFormat::StaticFp8 => 0,
            OutputFormat::TokenFp8 => 1,
            OutputFormat::GroupFp8 => hidden.div_ceil(GROUP),
        }
    }

    /// Returns the number of scales from row to row, and from group to group. `stride` is the
    /// latter if scales are column-major.
    #[inline(always)]
    pub(super) const fn strides(self, hidden: usize, stride: u64) -> (u32, u32) {
        if self.is_column_major() {
            (1, stride as u32)
        } else {
            (self.scales(hidden) as u32, 1)
        }
    }

    /// Returns the bytes from the first to the last computed scale of `rows` rows.
    #[inline(always)]
    pub(super) const fn scale_span(self, hidden: usize, rows: usize, strides: (u32, u32)) -> usize {
        let groups = self.scales(hidden);
        if groups == 0 || rows == 0 {
            return 0;
        }
        let last = (rows - 1) * strides.0 as usize + (groups - 1) * strides.1 as usize;
        (last + 1) * self.scale_bytes()
    }

    /// Returns the bytes of a row of `hidden` elements of `size` bytes in the output.
    #[inline(always)]
    pub const fn out_bytes(self, hidden: usize, size: usize) -> usize {
        match self.output_format() {
            OutputFormat::Unquantized => hidden * size,
            _ => hidden,
        }
    }

    /// Returns the bytes of a row of the residual for elements of `size` bytes.
    #[inline(always)]
    pub const fn residual_bytes(self, hidden: usize, size: usize) -> usize {
        if self.has_wide_residual() {
            hidden * 4
        } else {
            hidden * size
        }
    }
}
