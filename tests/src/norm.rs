//! Computes the expected results of fused norms, bit for bit and in f64. The code follows the
//! documentation and shares no code with the library's operations.

use core::cmp::Ordering;
use std::sync::LazyLock;

use fusewire::{DType, ReduceOp};
use half::{bf16, f16};

use crate::oracle::{narrow, reduce, row_sum, widen};

/// Format of a norm's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputFormat {
    /// The input's type.
    Unquantized,
    /// fp8 with a given scale.
    Static,
    /// fp8 with a scale per row.
    Rows,
    /// fp8 with a scale per 128 elements of a row.
    Groups,
}

/// A kind of norm.
#[derive(Clone, Copy, Debug)]
pub struct NormForm {
    /// Uses mean and variance instead of the root mean square.
    pub layer: bool,
    /// Adds a bias.
    pub bias: bool,
    /// Multiplies by `1 + weight`.
    pub unit_offset: bool,
    /// Adds a residual.
    pub residual: bool,
    /// Also writes the values before normalization: the sum over ranks, plus the residual if any.
    pub keeps: bool,
    /// The residual is in f32.
    pub wide: bool,
    /// Format of the output.
    pub output_format: OutputFormat,
    /// Scales are powers of two, stored in one byte each.
    pub ue8m0: bool,
    /// Scales are stored column-major.
    pub column_major: bool,
}

impl NormForm {
    /// RMSNorm of the sum over ranks.
    pub const PLAIN: Self = Self {
        layer: false,
        bias: false,
        unit_offset: false,
        residual: false,
        keeps: false,
        wide: false,
        output_format: OutputFormat::Unquantized,
        ue8m0: false,
        column_major: false,
    };

    /// Returns one form for each distinct computation and each distinct layout of results.
    pub fn all() -> Vec<Self> {
        let residual = Self {
            residual: true,
            keeps: true,
            ..Self::PLAIN
        };
        let layer = Self {
            layer: true,
            bias: true,
            ..residual
        };
        let groups = Self {
            output_format: OutputFormat::Groups,
            ..residual
        };
        vec![
            Self::PLAIN,
            residual,
            Self {
                keeps: false,
                unit_offset: true,
                ..residual
            },
            layer,
            Self {
                bias: false,
                residual: false,
                keeps: true,
                ..layer
            },
            Self {
                wide: true,
                ..residual
            },
            Self {
                wide: true,
                keeps: false,
                output_format: OutputFormat::Static,
                ..layer
            },
            Self {
                output_format: OutputFormat::Static,
                ..residual
            },
            Self {
                output_format: OutputFormat::Rows,
                ..layer
            },
            Self {
                output_format: OutputFormat::Rows,
                ue8m0: true,
                keeps: false,
                ..residual
            },
            groups,
            Self {
                column_major: true,
                wide: true,
                ..groups
            },
            Self {
                column_major: true,
                ue8m0: true,
                keeps: false,
                ..groups
            },
            Self {
                ue8m0: true,
                ..groups
            },
        ]
    }

    /// Returns the type of the residual for an input of `dtype`.
    pub const fn residual_type(&self, dtype: DType) -> DType {
        if self.wide { DType::F32 } else { dtype }
    }

    /// Returns the type of the output for an input of `dtype`.
    pub fn output_type(&self, dtype: DType) -> DType {
        if self.output_format == OutputFormat::Unquantized {
            dtype
        } else {
            DType::E4m3
        }
    }

    /// Returns the number of scales of a row.
    pub const fn groups(&self, hidden: usize) -> usize {
        match self.output_format {
            OutputFormat::Unquantized | OutputFormat::Static => 0,
            OutputFormat::Rows => 1,
            OutputFormat::Groups => hidden.div_ceil(128),
        }
    }
}

/// Inputs of a norm.
#[derive(Clone, Debug)]
pub struct NormInputs<'a> {
    /// Rows of each rank, as bytes of the input type.
    pub inputs: &'a [Vec<u8>],
    /// Bytes of the residual, in [`NormForm::residual_type`].
    pub residual: &'a [u8],
    /// One row of weights.
    pub weight: &'a [u8],
    /// One row of biases.
    pub bias: &'a [u8],
    /// The scale of [`OutputFormat::Static`].
    pub scale: f32,
}

/// Expected results of a norm.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NormOutputs {
    /// Bytes of the output, in [`NormForm::output_type`].
    pub output: Vec<u8>,
    /// The sum over ranks, plus the residual if any, in the residual's type.
    pub kept: Vec<u8>,
    /// Scales by which the output values were divided, row-major.
    pub scales: Vec<f32>,
    /// The norm in f64, computed from the rounded sums. It is neither rounded nor quantized.
    pub exact: Vec<f64>,
}

/// Rounds `value` to `dtype`.
fn round(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::Bf16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Converts to E4M3 by a search for the nearest value. Ties round to the even code. Magnitudes
/// above the largest value saturate.
pub fn e4m3(value: f32) -> u8 {
    static VALUES: LazyLock<Vec<f64>> = LazyLock::new(|| (0u8..=0x7e).map(e4m3_value).collect());
    if value.is_nan() {
        return 0x7f;
    }
    let magnitude = f64::from(value.abs());
    // `above` is the first code whose value is not less than `magnitude`. The predecessor of
    // `above` is the other candidate.
    let above = VALUES.partition_point(|of| *of < magnitude).min(0x7e);
    let below = above.saturating_sub(1);
    let off = |code: usize| (magnitude - VALUES[code]).abs();
    let nearest = match off(below).total_cmp(&off(above)) {
        Ordering::Less => below,
        Ordering::Greater => above,
        Ordering::Equal => [below, above]
            .into_iter()
            .find(|code| code % 2 == 0)
            .unwrap_or(above),
    };
    nearest as u8 | if value.is_sign_negative() { 0x80 } else { 0 }
}

/// Returns the value of a code whose sign bit is 0.
fn e4m3_value(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 3), f64::from(code & 7));
    if exponent == 0 {
        mantissa / 8.0 * 2f64.powi(-6)
    } else {
        (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7)
    }
}

/// Returns the scale of values whose greatest magnitude is `greatest`.
fn scale_of(form: &NormForm, greatest: f32) -> f32 {
    let scale = greatest.max(1e-10) / 448.0;
    if !form.ue8m0 {
        return scale;
    }
    let mut power = 2f64.powi(-126);
    while power < f64::from(scale) {
        power *= 2.0;
    }
    power as f32
}

/// Returns the expected results of `form` for rows of `hidden` elements of `dtype`.
pub fn expected(
    form: &NormForm,
    dtype: DType,
    hidden: usize,
    given: &NormInputs<'_>,
    epsilon: f32,
) -> NormOutputs {
    let sum = widen(dtype, &reduce(dtype, ReduceOp::Sum, &[], given.inputs));
    let kept_type = form.residual_type(dtype);
    let residual = widen(kept_type, given.residual);
    let kept: Vec<f32> = sum
        .iter()
        .enumerate()
        .map(|(i, sum)| {
            let value = if form.residual {
                sum + residual[i]
            } else {
                *sum
            };
            round(kept_type, value)
        })
        .collect();
    let (weight, bias) = (widen(dtype, given.weight), widen(dtype, given.bias));
    let mut out = NormOutputs {
        kept: if form.keeps {
            narrow(kept_type, &kept)
        } else {
            Vec::new()
        },
        ..NormOutputs::default()
    };
    for row in kept.chunks(hidden) {
        let mean = if form.layer {
            row_sum(row.iter().copied()) / hidden as f32
        } else {
            0.0
        };
        let squares = row_sum(row.iter().map(|value| (value - mean) * (value - mean)));
        let scale = 1.0 / (squares / hidden as f32 + epsilon).sqrt();
        let exact = exact_row(form, row, &weight, &bias, epsilon);
        out.exact.extend(exact);
        let normed: Vec<f32> = row
            .iter()
            .enumerate()
            .map(|(i, value)| {
                let weight = if form.unit_offset {
                    1.0 + weight[i]
                } else {
                    weight[i]
                };
                let mut y = (value - mean) * scale * weight;
                if form.bias {
                    y += bias[i];
                }
                round(dtype, y)
            })
            .collect();
        let greatest = |values: &[f32]| values.iter().fold(0f32, |max, value| max.max(value.abs()));
        let span = match form.output_format {
            OutputFormat::Unquantized => {
                out.output.extend(narrow(dtype, &normed));
                continue;
            }
            OutputFormat::Static | OutputFormat::Rows => hidden,
            OutputFormat::Groups => 128,
        };
        for group in normed.chunks(span) {
            let scale = if form.output_format == OutputFormat::Static {
                given.scale
            } else {
                let scale = scale_of(form, greatest(group));
                out.scales.push(scale);
                scale
            };
            let inverse = 1.0 / scale;
            out.output
                .extend(group.iter().map(|value| e4m3(value * inverse)));
        }
    }
    out
}

/// Returns the norm of a row in f64.
fn exact_row(form: &NormForm, row: &[f32], weight: &[f32], bias: &[f32], epsilon: f32) -> Vec<f64> {
    let wide: Vec<f64> = row.iter().map(|value| f64::from(*value)).collect();
    let count = wide.len() as f64;
    let mean = if form.layer {
        wide.iter().sum::<f64>() / count
    } else {
        0.0
    };
    let variance = wide.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / count;
    let root = (variance + f64::from(epsilon)).sqrt();
    wide.iter()
        .enumerate()
        .map(|(i, value)| {
            let offset = if form.unit_offset { 1.0 } else { 0.0 };
            let bias = if form.bias { f64::from(bias[i]) } else { 0.0 };
            (value - mean) / root * (f64::from(weight[i]) + offset) + bias
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{e4m3, e4m3_value};

    #[test]
    fn e4m3_by_search() {
        assert_eq!(e4m3(1.0), 0x38);
        assert_eq!(e4m3(-448.0), 0xfe);
        assert_eq!(e4m3(1e9), 0x7e);
        // Ties: 1.0625 is halfway between 1 and 1.125, and 1.1875 is halfway between 1.125 and
        // 1.25.
        assert_eq!(e4m3(1.0625), 0x38);
        assert_eq!(e4m3(1.1875), 0x3a);
        assert_eq!(e4m3(2f32.powi(-9)), 1);
        assert!((e4m3_value(0x7e) - 448.0).abs() < 1e-9);
    }
}
