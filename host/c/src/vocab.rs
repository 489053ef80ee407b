//! Sampling over logits whose columns are split over the ranks.

use core::ffi::{c_int, c_void};

use fusewire::{DType, VocabParallel, Work};

use crate::call::{Call, operate};
use crate::comm::FusewireComm;
use crate::error::{Outcome, argument};
use crate::types::{FusewireVocab, dtype, numbers as n, read};
use crate::work::FusewireWork;

fn run(call: &Call<'_>, vocab: &FusewireVocab) -> Outcome<Option<Work>> {
    let name = call.name();
    let element = dtype(name, "dtype", vocab.dtype)?;
    let index = match vocab.index_dtype {
        n::FUSEWIRE_DTYPE_DEFAULT => DType::I64,
        other => dtype(name, "index_dtype", other)?,
    };
    let unknown = vocab.flags & !n::FUSEWIRE_VOCAB_DEPENDENT;
    if unknown != 0 {
        return Err(argument(name, format!("flags {unknown:#x} are unknown")));
    }
    let stride = match vocab.stride {
        0 => vocab.columns,
        stride => stride,
    };
    let count = match vocab.rows {
        0 => Some(0),
        rows => (rows - 1)
            .checked_mul(stride)
            .and_then(|before| before.checked_add(vocab.columns)),
    };
    let entries = vocab.rows.checked_mul(u64::from(vocab.k));
    let optional = |what: &str, at: *mut c_void, count, dtype| {
        if at.is_null() {
            Ok(None)
        } else {
            call.view(what, at, count, dtype).map(Some)
        }
    };
    let logits = call.view("logits", vocab.logits, count, element)?;
    let indices = if vocab.k > 0 {
        Some(call.view("indices", vocab.indices, entries, index)?)
    } else if vocab.indices.is_null() {
        None
    } else {
        return Err(argument(name, "k is 0, so indices must be NULL".to_owned()));
    };
    let values = optional("values", vocab.values, entries, DType::F32)?;
    let sums = optional(
        "log_sum_exp",
        vocab.log_sum_exp,
        Some(vocab.rows),
        DType::F32,
    )?;

    // Sizes that exceed `usize` become `usize::MAX`, which the operation refuses.
    let size = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let end = vocab.first.saturating_add(vocab.columns);
    let mut built = VocabParallel::new(logits.input(), size(vocab.rows), size(vocab.vocabulary))
        .with_columns(size(vocab.first)..size(end))
        .with_stride(size(stride));
    if let Some(indices) = &indices {
        built = built.with_top_k(size(u64::from(vocab.k)), indices.output());
    }
    if let Some(values) = &values {
        built = built.with_values(values.output());
    }
    if let Some(sums) = &sums {
        built = built.with_log_sum_exp(sums.output());
    }
    if vocab.flags & n::FUSEWIRE_VOCAB_DEPENDENT != 0 {
        built = built.as_dependent();
    }
    let comm = &call.handle.comm;
    call.choose(
        || comm.vocab_parallel(&built),
        || comm.vocab_parallel_async(&built),
    )
}

/// Runs the operation that `vocab` describes, or enqueues the operation if `work` is given.
///
/// # Safety
/// If `work` is given, the preconditions of [`fusewire_vocab_parallel_async`]; otherwise those of
/// [`fusewire_vocab_parallel`].
unsafe fn sample(
    name: &'static str,
    comm: *const FusewireComm,
    vocab: *const FusewireVocab,
    work: Option<*mut *mut FusewireWork>,
) -> c_int {
    let body = |call: &Call<'_>| {
        // SAFETY: the caller passes null or a struct that is readable for `struct_size` bytes.
        let vocab = unsafe { read(name, vocab)? };
        run(call, &vocab)
    };
    // SAFETY: the preconditions of `operate` are also preconditions of this function.
    unsafe { operate(name, comm, work, body) }
}

/// Finds the greatest logits of each row and their columns, and computes the log-sum-exp of each
/// row. Stores all results on every rank.
///
/// # Safety
/// `comm` is null or a live handle. `vocab` is null or readable for its `struct_size` bytes. Its
/// buffers are valid device memory until the call returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_vocab_parallel(
    comm: *const FusewireComm,
    vocab: *const FusewireVocab,
) -> c_int {
    // SAFETY: the preconditions of `sample` are also preconditions of this function.
    unsafe { sample("fusewire_vocab_parallel", comm, vocab, None) }
}

/// Enqueues [`fusewire_vocab_parallel`] on the handle's stream.
///
/// # Safety
/// The preconditions of [`fusewire_vocab_parallel`], except that the buffers must stay valid until
/// the work is done and every graph that contains it is destroyed. `work` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_vocab_parallel_async(
    comm: *const FusewireComm,
    vocab: *const FusewireVocab,
    work: *mut *mut FusewireWork,
) -> c_int {
    // SAFETY: the preconditions of `sample` are also preconditions of this function.
    unsafe { sample("fusewire_vocab_parallel_async", comm, vocab, Some(work)) }
}
