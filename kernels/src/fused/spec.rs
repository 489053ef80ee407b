//! Specification of a fused norm, in one word that all ranks agree on.

/// Rows that a rank reduces, and their targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Route {
    /// Every rank reduces all rows for itself.
    OneShot = 0,
    /// Rank r reduces and normalises its part of the rows, and writes them to all ranks.
    TwoShot = 1,
    /// Rank r reduces and normalises rows `r * rows / ranks ..` and keeps them.
    ReduceScatter = 2,
}

/// The statistics that a row is normalised by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Statistics {
    /// Root mean square.
    Rms = 0,
    /// Mean and variance.
    Layer = 1,
}

/// Format in which the normalised rows are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum OutputFormat {
    /// The element type.
    Unquantized = 0,
    /// fp8 E4M3, by one scale that is given.
    StaticFp8 = 1,
    /// fp8 E4M3, by a scale of each row.
    TokenFp8 = 2,
    /// fp8 E4M3, by a scale of each [`GROUP`] elements of a row.
    GroupFp8 = 3,
}

/// Elements that share a scale in [`OutputFormat::GroupFp8`].
pub const GROUP: usize = 128;

/// A fused norm: `[..][route:2][column-major:1][ue8m0:1][output_format:2][f32 residual:1][weight +
/// 1:1][statistics:1]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct NormSpec(pub u32);

impl NormSpec {
    const UNIT_OFFSET: u32 = 1 << 1;
    const WIDE_RESIDUAL: u32 = 1 << 2;
    const UE8M0: u32 = 1 << 5;
    const COLUMN_MAJOR: u32 = 1 << 6;

    /// Creates a specification with these statistics, output and route; the rest is off.
    pub const fn new(statistics: Statistics, output_format: OutputFormat, route: Route) -> Self {
        Self(statistics as u32 | (output_format as u32) << 3 | (route as u32) << 7)
    }

    /// Multiplies by `1 + weight` instead of `weight`.
    #[must_use]
    pub const fn with_unit_offset(self) -> Self {
        Self(self.0 | Self::UNIT_OFFSET)
    }

    /// Makes the residual f32, before and after, for every element type; the norm is of the f32
    /// values.
    #[must_use]
    pub const fn with_wide_residual(self) -> Self {
        Self(self.0 | Self::WIDE_RESIDUAL)
    }

    /// Scales are powers of two, a byte each (E8M0, bias 127).
    #[must_use]
    pub const fn with_ue8m0(self) -> Self {
        Self(self.0 | Self::UE8M0)
    }

    /// Scales of one group lie side by side, not those of one row.
    #[must_use]
    pub const fn with_column_major(self) -> Self {
        Self(self.0 | Self::COLUMN_MAJOR)
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

    /// Returns true if scales are a byte.
    #[inline(always)]
    pub const fn is_ue8m0(self) -> bool {
        self.0 & Self::UE8M0 != 0
    }

    /// Returns true if scales of one group are contiguous.
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

    /// Returns the route; a code that does not exist is [`Route::OneShot`].
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

    /// Returns the bytes of a row of `hidden` elements of `size` bytes as it is written.
    #[inline(always)]
    pub const fn out_bytes(self, hidden: usize, size: usize) -> usize {
        match self.output_format() {
            OutputFormat::Unquantized => hidden * size,
            _ => hidden,
        }
    }

    /// Returns the bytes of a row of the residual.
    #[inline(always)]
    pub const fn residual_bytes(self, hidden: usize, size: usize) -> usize {
        if self.has_wide_residual() {
            hidden * 4
        } else {
            hidden * size
        }
    }
}
