//! Fused norms: reduction, residual, norm and conversion to fp8 in one launch.

use core::ffi::{c_int, c_void};

use fusewire::{DType, Norm, ScaleLayout, Work};

use crate::call::{Call, operate};
use crate::comm::FusewireComm;
use crate::error::{Outcome, argument};
use crate::memory::View;
use crate::types::{FusewireNorm, algorithm, dtype, numbers as n, read};
use crate::work::FusewireWork;

/// The collective that a fused norm contains.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    AllReduce,
    ReduceScatter,
}

/// Kind and memory of the fp8 scales.
enum Scales {
    None,
    Static(View),
    Rows(View),
    Groups(View, ScaleLayout),
}

fn scales(call: &Call<'_>, norm: &FusewireNorm) -> Outcome<Scales> {
    let refuse = |detail: String| Err(argument(call.name(), detail));
    let element = match norm.scale_dtype {
        n::FUSEWIRE_DTYPE_DEFAULT => DType::F32,
        other => dtype(call.name(), "scale_dtype", other)?,
    };
    if norm.scaling != n::FUSEWIRE_SCALE_GROUPS && norm.scale_stride != 0 {
        return refuse("scale_stride is for FUSEWIRE_SCALE_GROUPS only".to_owned());
    }
    let (wanted, other) = if norm.scaling == n::FUSEWIRE_SCALE_STATIC {
        ("scale", !norm.scales.is_null())
    } else {
        ("scales", !norm.scale.is_null())
    };
    let none = norm.scaling == n::FUSEWIRE_SCALE_NONE;
    if other || none && !norm.scales.is_null() {
        return refuse(format!(
            "scaling {} does not use scale or scales: set {} to NULL",
            norm.scaling,
            if none { "both" } else { "the other" }
        ));
    }
    let view = |at: *const c_void, count| call.view(wanted, at, count, element);
    let groups = norm.hidden.div_ceil(u64::from(n::FUSEWIRE_SCALE_GROUP));
    Ok(match norm.scaling {
        n::FUSEWIRE_SCALE_NONE => Scales::None,
        n::FUSEWIRE_SCALE_STATIC => Scales::Static(view(norm.scale, Some(1))?),
        n::FUSEWIRE_SCALE_ROWS => Scales::Rows(view(norm.scales, Some(norm.rows))?),
        n::FUSEWIRE_SCALE_GROUPS if norm.scale_stride == 0 => Scales::Groups(
            view(norm.scales, norm.rows.checked_mul(groups))?,
            ScaleLayout::RowMajor,
        ),
        n::FUSEWIRE_SCALE_GROUPS => {
            let stride = norm.scale_stride;
            let count = if norm.rows == 0 {
                Some(0)
            } else {
                (groups.saturating_sub(1))
                    .checked_mul(stride)
                    .and_then(|before| before.checked_add(norm.rows))
            };
            let layout = ScaleLayout::ColumnMajor {
                stride: usize::try_from(stride).unwrap_or(usize::MAX),
            };
            Scales::Groups(view(norm.scales, count)?, layout)
        }
        other => {
            return refuse(format!(
                "scaling {other} is unknown (FUSEWIRE_SCALE_NONE, ...)"
            ));
        }
    })
}

fn run(call: &Call<'_>, kind: Kind, norm: &FusewireNorm) -> Outcome<Option<Work>> {
    let name = call.name();
    let element = dtype(name, "dtype", norm.dtype)?;
    let kept = match norm.residual_dtype {
        n::FUSEWIRE_DTYPE_DEFAULT => element,
        other => dtype(name, "residual_dtype", other)?,
    };
    let known = n::FUSEWIRE_NORM_UNIT_OFFSET | n::FUSEWIRE_NORM_DEPENDENT;
    if norm.flags & !known != 0 {
        return Err(argument(
            name,
            format!("flags {:#x} are unknown", norm.flags & !known),
        ));
    }
    let elements = norm.rows.checked_mul(norm.hidden);
    let shards = match kind {
        Kind::AllReduce => 1,
        Kind::ReduceScatter => u64::from(call.handle.comm.size()),
    };
    let given = elements.and_then(|elements| elements.checked_mul(shards));
    let optional = |what: &str, at: *const c_void, count, dtype| {
        if at.is_null() {
            Ok(None)
        } else {
            call.view(what, at, count, dtype).map(Some)
        }
    };
    let fp8 = norm.scaling != n::FUSEWIRE_SCALE_NONE;
    let written = if fp8 { DType::E4m3 } else { element };
    let input = call.view("input", norm.input, given, element)?;
    let weight = call.view("weight", norm.weight, Some(norm.hidden), element)?;
    let output = call.view("output", norm.output, elements, written)?;
    let bias = optional("bias", norm.bias, Some(norm.hidden), element)?;
    let residual = optional("residual", norm.residual, elements, kept)?;
    let residual_out = optional("residual_out", norm.residual_out, elements, kept)?;
    let scales = scales(call, norm)?;

    let (out, from, by) = (output.output(), input.input(), weight.input());
    let built = match norm.kind {
        n::FUSEWIRE_NORM_RMS => Norm::rms(out, from, by, norm.epsilon),
        n::FUSEWIRE_NORM_LAYER => Norm::layer(out, from, by, norm.epsilon),
        other => {
            return Err(argument(
                name,
                format!("kind {other} is neither FUSEWIRE_NORM_RMS nor FUSEWIRE_NORM_LAYER"),
            ));
        }
    };
    let mut built = built.with_algorithm(algorithm(name, norm.algorithm)?);
    if let Some(bias) = &bias {
        built = built.with_bias(bias.input());
    }
    if let Some(residual) = &residual {
        built = built.with_residual(residual.input());
    }
    if let Some(residual_out) = &residual_out {
        built = built.with_residual_out(residual_out.output());
    }
    built = match &scales {
        Scales::None => built,
        Scales::Static(view) => built.with_scale(view.input()),
        Scales::Rows(view) => built.with_row_scales(view.output()),
        Scales::Groups(view, layout) => built.with_group_scales(view.output(), *layout),
    };
    if norm.flags & n::FUSEWIRE_NORM_UNIT_OFFSET != 0 {
        built = built.with_unit_offset();
    }
    if norm.flags & n::FUSEWIRE_NORM_DEPENDENT != 0 {
        built = built.as_dependent();
    }
    let comm = &call.handle.comm;
    match kind {
        Kind::AllReduce => call.choose(
            || comm.all_reduce_norm(&built),
            || comm.all_reduce_norm_async(&built),
        ),
        Kind::ReduceScatter => call.choose(
            || comm.reduce_scatter_norm(&built),
            || comm.reduce_scatter_norm_async(&built),
        ),
    }
}

/// Runs a fused norm, or enqueues the norm if `work` is given.
///
/// # Safety
/// If `work` is given, the preconditions of [`fusewire_all_reduce_norm_async`]; otherwise those of
/// [`fusewire_all_reduce_norm`].
unsafe fn fused(
    name: &'static str,
    kind: Kind,
    comm: *const FusewireComm,
    norm: *const FusewireNorm,
    work: Option<*mut *mut FusewireWork>,
) -> c_int {
    let body = |call: &Call<'_>| {
        // SAFETY: the caller passes null or a struct that is readable for `struct_size` bytes.
        let norm = unsafe { read(name, norm)? };
        run(call, kind, &norm)
    };
    // SAFETY: the preconditions of `operate` are also preconditions of this function.
    unsafe { operate(name, comm, work, body) }
}

/// Sums the input over the ranks, adds the residual, and normalises each row. Stores all rows on
/// every rank.
///
/// # Safety
/// `comm` is null or a live handle. `norm` is null or readable for its `struct_size` bytes. Its
/// buffers are valid device memory until the call returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_reduce_norm(
    comm: *const FusewireComm,
    norm: *const FusewireNorm,
) -> c_int {
    let name = "fusewire_all_reduce_norm";
    // SAFETY: the preconditions of `fused` are also preconditions of this function.
    unsafe { fused(name, Kind::AllReduce, comm, norm, None) }
}

/// Enqueues [`fusewire_all_reduce_norm`] on the handle's stream.
///
/// # Safety
/// The preconditions of [`fusewire_all_reduce_norm`], except that the buffers must stay valid until
/// the work is done and every graph that contains it is destroyed. `work` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_all_reduce_norm_async(
    comm: *const FusewireComm,
    norm: *const FusewireNorm,
    work: *mut *mut FusewireWork,
) -> c_int {
    let name = "fusewire_all_reduce_norm_async";
    // SAFETY: the preconditions of `fused` are also preconditions of this function.
    unsafe { fused(name, Kind::AllReduce, comm, norm, Some(work)) }
}

/// Computes the same as [`fusewire_all_reduce_norm`], but stores on each rank only that rank's
/// share of the rows.
///
/// # Safety
/// The preconditions of [`fusewire_all_reduce_norm`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_reduce_scatter_norm(
    comm: *const FusewireComm,
    norm: *const FusewireNorm,
) -> c_int {
    let name = "fusewire_reduce_scatter_norm";
    // SAFETY: the preconditions of `fused` are also preconditions of this function.
    unsafe { fused(name, Kind::ReduceScatter, comm, norm, None) }
}

/// Enqueues [`fusewire_reduce_scatter_norm`] on the handle's stream.
///
/// # Safety
/// The preconditions of [`fusewire_all_reduce_norm_async`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_reduce_scatter_norm_async(
    comm: *const FusewireComm,
    norm: *const FusewireNorm,
    work: *mut *mut FusewireWork,
) -> c_int {
    let name = "fusewire_reduce_scatter_norm_async";
    // SAFETY: the preconditions of `fused` are also preconditions of this function.
    unsafe { fused(name, Kind::ReduceScatter, comm, norm, Some(work)) }
}
