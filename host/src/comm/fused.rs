//! Fused operations: communication and the arithmetic around it in one launch.

use fusewire_device::DType;
use fusewire_device::session::{Call, Operation};
use fusewire_kernels::fused::{
    ALL_REDUCE_RMS_NORM_BF16, ALL_REDUCE_RMS_NORM_F16, ALL_REDUCE_RMS_NORM_F32,
    AllReduceRmsNormParams,
};

use super::observe::Note;
use super::submit::{Prepared, invalid};
use super::{Communicator, Work};
use crate::Result;
use crate::options::Algorithm;
use crate::tensor::{Input, Output, Tensor};

/// The buffers of [`Communicator::all_reduce_rms_norm`]: `rows` rows of `hidden` elements, where `hidden` is
/// the length of `weight`.
#[derive(Debug)]
#[non_exhaustive]
pub struct RmsNorm<'a> {
    /// What is summed over the ranks.
    pub input: Input<'a>,
    /// What is added to the sum; may be the same memory as `residual_out`.
    pub residual: Input<'a>,
    /// Weight of each column.
    pub weight: Input<'a>,
    /// Where the sum with the residual goes, if it is wanted.
    pub residual_out: Option<Output<'a>>,
    /// Where the normalised rows go; may be the same memory as `input`.
    pub output: Output<'a>,
    /// Added to the mean of squares.
    pub epsilon: f32,
}

impl<'a> RmsNorm<'a> {
    /// `output = rms_norm(sum of input + residual) * weight`, with the residual not written.
    pub fn new(
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        residual: impl Into<Input<'a>>,
        weight: impl Into<Input<'a>>,
        epsilon: f32,
    ) -> Self {
        Self {
            input: input.into(),
            residual: residual.into(),
            weight: weight.into(),
            residual_out: None,
            output: output.into(),
            epsilon,
        }
    }

    /// Also writes the sum with the residual.
    #[must_use]
    pub fn with_residual_out(mut self, residual_out: impl Into<Output<'a>>) -> Self {
        self.residual_out = Some(residual_out.into());
        self
    }
}

impl Communicator {
    /// Sums `input` over all ranks, adds `residual`, and normalises each row by its root mean square,
    /// in one launch; for f32, f16 and bf16. Rounding points: the sum is rounded to the type, the sum
    /// with the residual is rounded (that is `residual_out`), the norm is taken of the rounded values.
    ///
    /// Zero rows are legal.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] before anything moves; the communicator's first failure.
    pub fn all_reduce_rms_norm(&self, norm: &RmsNorm<'_>) -> Result<()> {
        self.run(&self.prepare_rms_norm(norm, [None; 3], true)?)
    }

    /// As [`Communicator::all_reduce_rms_norm`], enqueued. All buffers must be tensors; those of
    /// `residual`, `weight` and `residual_out` must be kept alive by the caller until the work (and every graph that captured
    /// it) is done, which `keep` does for one of them.
    ///
    /// # Safety
    /// As said: memory that is not kept alive must live long enough.
    ///
    /// # Errors
    /// As there.
    pub unsafe fn all_reduce_rms_norm_async(
        &self,
        norm: &RmsNorm<'_>,
        keep: Option<&Tensor>,
    ) -> Result<Work> {
        let tensors = [norm.output.tensor, norm.input.tensor, keep];
        self.enqueue(&self.prepare_rms_norm(norm, tensors, false)?)
    }

    fn prepare_rms_norm<'a>(
        &self,
        norm: &RmsNorm<'_>,
        tensors: [Option<&'a Tensor>; 3],
        borrowed: bool,
    ) -> Result<Prepared<'a>> {
        let name = "all_reduce_rms_norm";
        let RmsNorm {
            input,
            residual,
            weight,
            residual_out,
            output,
            epsilon,
        } = norm;
        let views = [*input, *residual, *weight, output.as_input()];
        for view in views
            .iter()
            .chain(residual_out.as_ref().map(Output::as_input).as_ref())
        {
            self.refuse_slice(name, view)?;
        }
        let dtype = input.dtype;
        let kernel = match dtype {
            DType::F32 => ALL_REDUCE_RMS_NORM_F32,
            DType::F16 => ALL_REDUCE_RMS_NORM_F16,
            DType::Bf16 => ALL_REDUCE_RMS_NORM_BF16,
            other => {
                return Err(invalid(
                    name,
                    format!("{}; f32, f16 and bf16 are possible", other.name()),
                ));
            }
        };
        let hidden = weight.count;
        if hidden == 0 || !input.count.is_multiple_of(hidden) {
            return Err(invalid(
                name,
                format!(
                    "{} elements are no rows of {hidden} (the weight's length)",
                    input.count
                ),
            ));
        }
        let residual_out_view = residual_out.as_ref().map(Output::as_input);
        let others = [
            ("residual", Some(*residual)),
            ("residual_out", residual_out_view),
        ];
        for (what, view) in others
            .into_iter()
            .chain([("output", Some(output.as_input()))])
        {
            let Some(view) = view else { continue };
            if view.count != input.count || view.dtype != dtype {
                return Err(invalid(
                    name,
                    format!(
                        "{what} has {} elements of {}; {} of {} are needed",
                        view.count,
                        view.dtype.name(),
                        input.count,
                        dtype.name()
                    ),
                ));
            }
        }
        if weight.dtype != dtype {
            return Err(invalid(
                name,
                format!("weight is {}, input {}", weight.dtype.name(), dtype.name()),
            ));
        }
        let bytes = input.count * dtype.size();
        let overlaps = |a: *const u8, b: *const u8| {
            let (a, b) = (a as usize, b as usize);
            a < b + bytes && b < a + bytes
        };
        let written = [Some(output.ptr), residual_out.as_ref().map(|out| out.ptr)];
        // Rows are written while peers still read the input: then it is staged.
        let staged = written.iter().flatten().any(|at| overlaps(*at, input.ptr));
        if let Some(out) = residual_out
            && overlaps(out.ptr, output.ptr)
        {
            return Err(invalid(name, "output and residual_out overlap".to_owned()));
        }
        let partly = |a: *const u8, b: *const u8| a != b && overlaps(a, b);
        if written
            .iter()
            .flatten()
            .any(|at| partly(*at, input.ptr) || partly(*at, residual.ptr))
        {
            return Err(invalid(
                name,
                "outputs may be the inputs' memory, but not overlap them partly".to_owned(),
            ));
        }
        if residual_out.is_none()
            && overlaps(output.ptr, residual.ptr)
            && output.ptr.cast_const() != residual.ptr
        {
            return Err(invalid(name, "output and residual overlap".to_owned()));
        }
        let rows = (input.count / hidden) as u64;
        let room = (self.options().staging_bytes as usize / (hidden * dtype.size())) as u64;
        if room == 0 {
            return Err(invalid(
                name,
                format!("a row of {hidden} does not fit staging; raise Options::staging_bytes"),
            ));
        }
        let algorithm = Algorithm::Signal as u8;
        let agreed = rows << 32 ^ hidden as u64 ^ u64::from(epsilon.to_bits()) << 16;
        let operation = Operation::AllReduceRmsNorm;
        let call = Call::new(operation, dtype as u8, 0, algorithm, 0xffff, agreed).0;
        if let Some(backend) = &self.inner.backend {
            return Err(crate::backend::backend_error(
                backend.name(),
                name,
                "fused operations are kernels of Fusewire's; use all_reduce and normalise apart",
            ));
        }
        let note = Note {
            call,
            input_count: input.count as u64,
            output_count: output.count as u64,
        };
        let params = AllReduceRmsNormParams {
            constants: self.constants(),
            call,
            rows,
            hidden: hidden as u64,
            timeout_ns: self.timeout_ns,
            source: input.ptr,
            source_at: if staged {
                fusewire_device::comm::Place::NONE.0
            } else {
                self.inner.windows.place(input.ptr, bytes).0
            },
            residual: residual.ptr,
            weight: weight.ptr,
            residual_out: residual_out
                .as_ref()
                .map_or(core::ptr::null_mut(), |out| out.ptr),
            out: output.ptr,
            chunk: room,
            epsilon: *epsilon,
        };
        Ok(Prepared::new(
            self, &kernel, params, tensors, borrowed, note,
        ))
    }
}
