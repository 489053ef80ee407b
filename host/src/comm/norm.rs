//! Arguments of a fused norm and their checks.
use fusewire_device::DType;
use fusewire_device::call::Operation;
use fusewire_kernels::fused::{GROUP, NormSpec, OutputFormat, Route, Statistics};

use super::observe::FusedBuffers;
use super::submit::invalid;
use crate::Result;
use crate::algorithm::Algorithm;
use crate::collective::Op;
use crate::digest;
use crate::tensor::{Input, Output, Tensor, TensorUse};
use crate::usage::AccessList;

/// Memory layout of the scales of groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleLayout {
    /// The scales of a row are contiguous: the scale of row r and group g is at `r * groups + g`.
    RowMajor,
    /// The scales of a group are contiguous: the scale of row r and group g is at `g * stride + r`.
    /// Matrix multiplications of several vendors read this layout.
    ColumnMajor {
        /// Number of scales from the first of one group to the first of the next; at least the
        /// number of rows.
        stride: usize,
    },
}

/// Source or destination of the fp8 scales.
#[derive(Debug)]
enum Scales<'a> {
    Static(Input<'a>),
    OfRows(Output<'a>),
    OfGroups(Output<'a>, ScaleLayout),
}

/// Buffers and kind of a norm that is fused with the preceding reduction. Rows have `hidden`
/// elements, where `hidden` is the length of `weight`, a multiple of 8. `residual`, `weight` and
/// `bias` must be equal on all ranks, except that in a reduce_scatter each rank passes its own rows
/// of the residual. See [`super::Communicator::all_reduce_norm`].
///
/// ```no_run
/// # use fusewire::{Communicator, DType, Norm, Result};
/// # fn layer(comm: &Communicator) -> Result<()> {
/// let (tokens, hidden) = (16, 7168);
/// let partial = comm.alloc(DType::Bf16, tokens * hidden)?; // this rank's part of a matrix product
/// let residual = comm.alloc(DType::Bf16, tokens * hidden)?;
/// let weight = comm.alloc(DType::Bf16, hidden)?;
/// let out = comm.alloc(DType::E4m3, tokens * hidden)?;
/// let scales = comm.alloc(DType::F32, tokens)?;
/// let norm = Norm::rms(&out, &partial, &weight, 1e-6)
///     .with_residual(&residual)
///     .with_residual_out(&residual)
///     .with_row_scales(&scales);
/// comm.all_reduce_norm(&norm)
/// # }
/// ```
#[derive(Debug)]
pub struct Norm<'a> {
    statistics: Statistics,
    input: Input<'a>,
    weight: Input<'a>,
    bias: Option<Input<'a>>,
    unit_offset: bool,
    residual: Option<Input<'a>>,
    residual_out: Option<Output<'a>>,
    output: Output<'a>,
    scales: Option<Scales<'a>>,
    epsilon: f32,
    algorithm: Algorithm,
    dependent: bool,
}

impl<'a> Norm<'a> {
    /// Returns the accesses to the tensors among the buffers.
    pub(in crate::comm) fn accesses(&self) -> AccessList<'a> {
        let scales = self.scales.as_ref().map(|scales| match scales {
            Scales::Static(scale) => scale.tensor.map(TensorUse::Read),
            Scales::OfRows(out) | Scales::OfGroups(out, _) => out.tensor.map(TensorUse::Write),
        });
        let inputs = [
            Some(self.input),
            Some(self.weight),
            self.bias,
            self.residual,
        ];
        let inputs = inputs.map(|input| input?.tensor.map(TensorUse::Read));
        let outputs = [Some(&self.output), self.residual_out.as_ref()];
        let outputs = outputs.map(|output| output?.tensor.map(TensorUse::Write));
        let all = inputs.into_iter().chain(outputs).chain(scales);
        TensorUse::accesses(all.flatten())
    }

    /// Computes `output = v * (1 / sqrt(mean(v * v) + epsilon)) * weight`, where `v` is the sum of
    /// `input` over the ranks, plus the residual if there is one.
    pub fn rms(
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        weight: impl Into<Input<'a>>,
        epsilon: f32,
    ) -> Self {
        Self {
            statistics: Statistics::Rms,
            input: input.into(),
            weight: weight.into(),
            bias: None,
            unit_offset: false,
            residual: None,
            residual_out: None,
            output: output.into(),
            scales: None,
            epsilon,
            algorithm: Algorithm::Auto,
            dependent: false,
        }
    }

    /// Computes `output = (v - m) * (1 / sqrt(mean((v - m)^2) + epsilon)) * weight`, where `v` is
    /// the sum of `input` over the ranks, plus the residual if there is one, and `m` is the mean of
    /// `v`.
    pub fn layer(
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        weight: impl Into<Input<'a>>,
        epsilon: f32,
    ) -> Self {
        Self {
            statistics: Statistics::Layer,
            ..Self::rms(output, input, weight, epsilon)
        }
    }

    /// Adds `bias`, which is as long as `weight`, to each normalized row.
    #[must_use]
    pub fn with_bias(mut self, bias: impl Into<Input<'a>>) -> Self {
        self.bias = Some(bias.into());
        self
    }

    /// Multiplies by `1 + weight` instead of `weight`.
    #[must_use]
    pub fn with_unit_offset(mut self) -> Self {
        self.unit_offset = true;
        self
    }

    /// Adds `residual`, of the input's type or f32, to the sum before the norm.
    #[must_use]
    pub fn with_residual(mut self, residual: impl Into<Input<'a>>) -> Self {
        self.residual = Some(residual.into());
        self
    }

    /// Also writes the sum with the residual, in the residual's type. May be the memory of the
    /// residual.
    #[must_use]
    pub fn with_residual_out(mut self, residual_out: impl Into<Output<'a>>) -> Self {
        self.residual_out = Some(residual_out.into());
        self
    }

    /// Writes fp8 (E4M3) output with one given f32 scale: `out = e4m3(y * (1 / scale))`.
    #[must_use]
    pub fn with_scale(mut self, scale: impl Into<Input<'a>>) -> Self {
        self.scales = Some(Scales::Static(scale.into()));
        self
    }

    /// Writes fp8 (E4M3) output with a scale per row. Writes the scales to `scales`: f32, or `u8`
    /// for a power of two (UE8M0). The scale is the greatest magnitude of the row, at least 1e-10,
    /// divided by 448.
    #[must_use]
    pub fn with_row_scales(mut self, scales: impl Into<Output<'a>>) -> Self {
        self.scales = Some(Scales::OfRows(scales.into()));
        self
    }

    /// Writes fp8 output like [`Norm::with_row_scales`], with a scale per 128 elements of a row.
    #[must_use]
    pub fn with_group_scales(mut self, scales: impl Into<Output<'a>>, layout: ScaleLayout) -> Self {
        self.scales = Some(Scales::OfGroups(scales.into(), layout));
        self
    }

    /// Sets the algorithm of the reduction: [`Algorithm::Packet`], [`Algorithm::Signal`] (one shot)
    /// or [`Algorithm::TwoShot`]; equal on all ranks. The result is bitwise the same.
    #[must_use]
    pub fn with_algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = algorithm;
        self
    }

    /// Lets the launch begin before the previous kernel on the stream has ended; the kernel itself
    /// waits for the results of the previous one (programmatic dependent launch, NVIDIA, sm_90 and
    /// later). No effect on other devices.
    #[must_use]
    pub fn as_dependent(mut self) -> Self {
        self.dependent = true;
        self
    }
}

impl FusedBuffers for Norm<'_> {
    fn buffers(&self) -> [Vec<Input<'_>>; 2] {
        let mut inputs = vec![self.input, self.weight];
        inputs.extend(self.bias.into_iter().chain(self.residual));
        let mut outputs = vec![self.output.as_input()];
        outputs.extend(self.residual_out.as_ref().map(Output::as_input));
        match &self.scales {
            Some(Scales::Static(scale)) => inputs.push(*scale),
            Some(Scales::OfRows(out) | Scales::OfGroups(out, _)) => outputs.push(out.as_input()),
            None => {}
        }
        [inputs, outputs]
    }
}

/// A norm whose arguments have been checked for consistency.
#[derive(Debug)]
pub(super) struct CheckedNorm<'n, 'a> {
    norm: &'n Norm<'a>,
    /// Number of rows of the result.
    pub(super) rows: usize,
    pub(super) hidden: usize,
    pub(super) dtype: DType,
    output_format: OutputFormat,
    wide: bool,
}

impl<'n, 'a> CheckedNorm<'n, 'a> {
    /// Checks the conditions that do not depend on a communicator. The input has `shards` times the
    /// rows of the result.
    pub(super) fn new(name: &'static str, norm: &'n Norm<'a>, shards: usize) -> Result<Self> {
        let refuse = |detail: String| Err(invalid(name, detail));
        let dtype = norm.input.dtype;
        if !matches!(dtype, DType::F32 | DType::F16 | DType::Bf16) {
            return refuse(format!("{}; f32, f16 and bf16 are possible", dtype.name()));
        }
        let hidden = norm.weight.count;
        if hidden == 0 || !hidden.is_multiple_of(8) {
            return refuse(format!(
                "rows of {hidden} elements (the weight's length); a multiple of 8 is needed"
            ));
        }
        if !norm.input.count.is_multiple_of(hidden * shards) {
            return refuse(format!(
                "{} elements are no {}rows of {hidden} (the weight's length)",
                norm.input.count,
                if shards > 1 {
                    format!("{shards} times as many ")
                } else {
                    String::new()
                }
            ));
        }
        let rows = norm.input.count / hidden / shards;
        let residual = norm.residual.as_ref().map(|residual| residual.dtype);
        let residual_out = norm.residual_out.as_ref().map(|out| out.dtype);
        let wide = residual.or(residual_out) == Some(DType::F32) && dtype != DType::F32;
        let kept = if wide { DType::F32 } else { dtype };
        let (output_format, out) = match &norm.scales {
            None => (OutputFormat::Unquantized, dtype),
            Some(Scales::Static(_)) => (OutputFormat::StaticFp8, DType::E4m3),
            Some(Scales::OfRows(_)) => (OutputFormat::TokenFp8, DType::E4m3),
            Some(Scales::OfGroups(..)) => (OutputFormat::GroupFp8, DType::E4m3),
        };
        let checked = Self {
            norm,
            rows,
            hidden,
            dtype,
            output_format,
            wide,
        };
        let elements = rows * hidden;
        let residual_out_view = norm.residual_out.as_ref().map(Output::as_input);
        for (what, view, count, wanted) in [
            ("weight", Some(norm.weight), hidden, dtype),
            ("bias", norm.bias, hidden, dtype),
            ("residual", norm.residual, elements, kept),
            ("residual_out", residual_out_view, elements, kept),
            ("output", Some(norm.output.as_input()), elements, out),
        ] {
            let Some(view) = view else { continue };
            if view.count != count || view.dtype != wanted {
                return refuse(format!(
                    "{what} has {} elements of {}; {count} of {} are needed",
                    view.count,
                    view.dtype.name(),
                    wanted.name()
                ));
            }
        }
        checked.check_scales(name)?;
        checked.check_overlaps(name, shards)?;
        Ok(checked)
    }

    fn check_scales(&self, name: &'static str) -> Result<()> {
        let groups = self.hidden.div_ceil(GROUP);
        let (view, needed, byte) = match &self.norm.scales {
            None => return Ok(()),
            Some(Scales::Static(scale)) => (*scale, 1, false),
            Some(Scales::OfRows(scales)) => (scales.as_input(), self.rows, true),
            Some(Scales::OfGroups(scales, ScaleLayout::RowMajor)) => {
                (scales.as_input(), self.rows * groups, true)
            }
            Some(Scales::OfGroups(scales, ScaleLayout::ColumnMajor { stride })) => {
                if *stride < self.rows || *stride > u32::MAX as usize {
                    return Err(invalid(
                        name,
                        format!(
                            "a stride of {stride} scales from group to group; {} rows need at \
                             least as many, and it is less than 2^32",
                            self.rows
                        ),
                    ));
                }
                let needed = if self.rows == 0 {
                    0
                } else {
                    (groups - 1) * stride + self.rows
                };
                (scales.as_input(), needed, true)
            }
        };
        let typed = view.dtype == DType::F32 || byte && view.dtype == DType::U8;
        if !typed || view.count < needed {
            return Err(invalid(
                name,
                format!(
                    "{} scales of {}; at least {needed} of f32{} are needed",
                    view.count,
                    view.dtype.name(),
                    if byte { " or u8" } else { "" }
                ),
            ));
        }
        Ok(())
    }

    /// Outputs may be the memory of the residual or the input, row for row, and must not overlap
    /// otherwise.
    fn check_overlaps(&self, name: &'static str, shards: usize) -> Result<()> {
        let norm = self.norm;
        let scales = norm.scales.as_ref();
        let spans = [
            ("output", Some(span(&norm.output.as_input()))),
            (
                "residual_out",
                norm.residual_out.as_ref().map(|out| span(&out.as_input())),
            ),
            (
                "scales",
                scales.and_then(|scales| match scales {
                    Scales::Static(_) => None,
                    Scales::OfRows(out) | Scales::OfGroups(out, _) => Some(span(&out.as_input())),
                }),
            ),
        ];
        let read = [
            ("weight", Some(span(&norm.weight))),
            ("bias", norm.bias.as_ref().map(span)),
            (
                "scale",
                scales.and_then(|scales| match scales {
                    Scales::Static(scale) => Some(span(scale)),
                    Scales::OfRows(_) | Scales::OfGroups(..) => None,
                }),
            ),
            ("residual", norm.residual.as_ref().map(span)),
            ("input", Some(span(&norm.input))),
        ];
        let refuse = |a: &str, b: &str| {
            Err(invalid(
                name,
                format!(
                    "{a} and {b} overlap; output and residual_out may be the memory of input or \
                     residual, row for row, and nothing else"
                ),
            ))
        };
        for (index, (what, span)) in spans.iter().enumerate() {
            let Some(span) = *span else { continue };
            for (other, theirs) in &spans[..index] {
                if theirs.is_some_and(|theirs| overlap(span, theirs)) {
                    return refuse(what, other);
                }
            }
            for (other, theirs) in &read {
                let Some(theirs) = *theirs else { continue };
                let same = match *other {
                    "residual" => span == theirs,
                    // In a reduce_scatter, this rank's rows may start at any multiple of their
                    // length within the input.
                    "input" => {
                        span.1 == theirs.1 / shards
                            && span.0 >= theirs.0
                            && (span.0 - theirs.0).is_multiple_of(span.1.max(1))
                    }
                    _ => false,
                };
                if overlap(span, theirs) && !(same && *what != "scales") {
                    return refuse(what, other);
                }
            }
        }
        Ok(())
    }

    /// Returns true if an output overlaps the input.
    pub(super) fn is_in_place(&self) -> bool {
        let input = span(&self.norm.input);
        let kept = self.norm.residual_out.as_ref().map(Output::as_input);
        [Some(self.norm.output.as_input()), kept]
            .iter()
            .flatten()
            .any(|view| overlap(span(view), input))
    }

    /// Returns the specification of the computation on `route`.
    pub(super) fn spec(&self, route: Route) -> NormSpec {
        let mut spec = NormSpec::new(self.norm.statistics, self.output_format, route);
        if self.norm.unit_offset {
            spec = spec.with_unit_offset();
        }
        if self.wide {
            spec = spec.with_wide_residual();
        }
        if let Some(Scales::OfRows(out) | Scales::OfGroups(out, _)) = &self.norm.scales
            && out.dtype == DType::U8
        {
            spec = spec.with_ue8m0();
        }
        if let Some(Scales::OfGroups(_, ScaleLayout::ColumnMajor { .. })) = &self.norm.scales {
            spec = spec.with_column_major();
        }
        spec
    }

    /// Returns what all ranks must agree on, so that they run the same steps and get the same
    /// result.
    pub(super) fn op(&self, operation: Operation) -> Op {
        let norm = self.norm;
        let present = [
            norm.bias.is_some(),
            norm.residual.is_some(),
            norm.residual_out.is_some(),
        ];
        let present = present
            .iter()
            .fold(0, |bits, is| bits << 1 | u64::from(*is));
        let digest = digest::of_words(&[
            u64::from(self.spec(Route::OneShot).0),
            self.stride(),
            u64::from(norm.epsilon.to_bits()),
            present,
        ]);
        let (rows, hidden, dtype) = (self.rows, self.hidden, self.dtype);
        match operation {
            Operation::ReduceScatterNorm => Op::ReduceScatterNorm {
                rows,
                hidden,
                dtype,
                digest,
            },
            _ => Op::AllReduceNorm {
                rows,
                hidden,
                dtype,
                row_bytes: self.row_bytes(),
                digest,
            },
        }
    }

    /// Returns the bytes of the results of a row.
    pub(super) fn row_bytes(&self) -> usize {
        let (hidden, size, spec) = (self.hidden, self.size(), self.spec(Route::TwoShot));
        let kept = match self.norm.residual_out {
            Some(_) => spec.residual_bytes(hidden, size),
            None => 0,
        };
        spec.out_bytes(hidden, size) + kept + spec.scales(hidden) * spec.scale_bytes()
    }

    /// Returns the number of scales from the first of one group to the first of the next; 0 if the
    /// layout is not column-major.
    pub(super) fn stride(&self) -> u64 {
        match &self.norm.scales {
            Some(Scales::OfGroups(_, ScaleLayout::ColumnMajor { stride })) => *stride as u64,
            _ => 0,
        }
    }

    /// Returns the bytes of an element of the input.
    pub(super) fn size(&self) -> usize {
        self.dtype.size()
    }

    pub(super) fn input(&self) -> Input<'a> {
        self.norm.input
    }

    pub(super) fn weight(&self) -> Input<'a> {
        self.norm.weight
    }

    pub(super) fn bias(&self) -> Option<Input<'a>> {
        self.norm.bias
    }

    pub(super) fn residual(&self) -> Option<Input<'a>> {
        self.norm.residual
    }

    pub(super) fn output(&self) -> &Output<'a> {
        &self.norm.output
    }

    pub(super) fn residual_out(&self) -> Option<&Output<'a>> {
        self.norm.residual_out.as_ref()
    }

    /// Returns the scales, as input or as output.
    pub(super) fn scales(&self) -> Option<Input<'_>> {
        self.norm.scales.as_ref().map(|scales| match scales {
            Scales::Static(scale) => *scale,
            Scales::OfRows(out) | Scales::OfGroups(out, _) => out.as_input(),
        })
    }

    pub(super) fn epsilon(&self) -> f32 {
        self.norm.epsilon
    }

    pub(super) fn algorithm(&self) -> Algorithm {
        self.norm.algorithm
    }

    pub(super) fn is_dependent(&self) -> bool {
        self.norm.dependent
    }

    /// Returns all buffers with their names.
    pub(super) fn views(&self) -> [(&'static str, Option<Input<'_>>); 7] {
        let norm = self.norm;
        [
            ("output", Some(norm.output.as_input())),
            ("input", Some(norm.input)),
            ("weight", Some(norm.weight)),
            ("bias", norm.bias),
            ("residual", norm.residual),
            (
                "residual_out",
                norm.residual_out.as_ref().map(Output::as_input),
            ),
            ("scales", self.scales()),
        ]
    }

    /// Returns the tensors among the buffers.
    pub(super) fn tensors(&self) -> Vec<Tensor> {
        self.views()
            .into_iter()
            .filter_map(|(_, view)| view?.tensor.cloned())
            .collect()
    }
}

/// Returns the address and the length in bytes.
fn span(view: &Input<'_>) -> (usize, usize) {
    (view.ptr as usize, view.count * view.dtype.size())
}

fn overlap(a: (usize, usize), b: (usize, usize)) -> bool {
    a.1 > 0 && b.1 > 0 && a.0 < b.0 + b.1 && b.0 < a.0 + a.1
}
