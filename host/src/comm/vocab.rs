//! Reductions for sampling over logits whose columns are split over the ranks: arguments, checks
//! and launch.

use core::ops::Range;
use std::sync::Arc;

use fusewire_device::args::RawBuffer;
use fusewire_device::call::Operation;
use fusewire_device::{DType, packet};
use fusewire_kernels::vocab::{MAX_K, VOCAB_F32, VocabParams, VocabShape, VocabSpec, select_vocab};

use super::observe::{Arguments, FusedBuffers, OpInfo};
use super::submit::{PreparedOp, invalid};
use super::{Communicator, LaunchAttributes, Work};
use crate::Result;
use crate::collective::Op;
use crate::plan;
use crate::tensor::{Input, Output, Tensor, TensorUse};
use crate::usage::AccessList;

/// Name of the operation in messages.
const NAME: &str = Operation::VocabParallel.name();

/// Logits whose columns are split over the ranks, as a tensor-parallel output layer produces them,
/// and the reductions requested for each row: the greatest logits and their columns
/// ([`VocabParallel::with_top_k`], [`VocabParallel::with_argmax`]) and the logarithm of the sum of
/// exponentials. See [`Communicator::vocab_parallel`].
///
/// ```no_run
/// # use fusewire::{Communicator, DType, Result, VocabParallel};
/// # fn sample(comm: &Communicator) -> Result<()> {
/// let (rows, vocabulary, k) = (16, 128_256, 50);
/// let columns = vocabulary / comm.size() as usize; // of this rank
/// let logits = comm.alloc(DType::Bf16, rows * columns)?;
/// let values = comm.alloc(DType::F32, rows * k)?;
/// let indices = comm.alloc(DType::I64, rows * k)?;
/// let lse = comm.alloc(DType::F32, rows)?;
/// comm.vocab_parallel(
///     &VocabParallel::new(&logits, rows, vocabulary)
///         .with_top_k(k, &indices)
///         .with_values(&values)
///         .with_log_sum_exp(&lse),
/// )
/// // The winners' probabilities: exp(value - lse).
/// # }
/// ```
#[derive(Debug)]
pub struct VocabParallel<'a> {
    logits: Input<'a>,
    rows: usize,
    vocabulary: usize,
    columns: Option<Range<usize>>,
    stride: Option<usize>,
    top: Option<(usize, Output<'a>)>,
    values: Option<Output<'a>>,
    log_sum_exp: Option<Output<'a>>,
    dependent: bool,
}

impl<'a> VocabParallel<'a> {
    /// Creates the arguments for `rows` rows of `vocabulary` columns over all ranks, less than
    /// 2^31. `logits` are this rank's columns in row-major order: f32, f16 or bf16. With
    /// `c = ceil(vocabulary / ranks)` rank r has at most c columns of each row, starting with
    /// column `r * c`, unless [`VocabParallel::with_columns`] is called.
    pub fn new(logits: impl Into<Input<'a>>, rows: usize, vocabulary: usize) -> Self {
        Self {
            logits: logits.into(),
            rows,
            vocabulary,
            columns: None,
            stride: None,
            top: None,
            values: None,
            log_sum_exp: None,
            dependent: false,
        }
    }

    /// Sets the columns of each row that this rank has, possibly none. The ranks' columns must not
    /// overlap, which is not checked. A column that no rank has is ignored.
    #[must_use]
    pub fn with_columns(mut self, columns: Range<usize>) -> Self {
        self.columns = Some(columns);
        self
    }

    /// Sets the distance in elements between the beginnings of this rank's rows, at least the
    /// number of its columns. A GPU reads rows fastest if they begin at multiples of 16 bytes.
    #[must_use]
    pub fn with_stride(mut self, stride: usize) -> Self {
        self.stride = Some(stride);
        self
    }

    /// Writes the columns of the `k` greatest logits of each row to `indices`: `rows * k` elements
    /// of i32, u32, i64 or u64, row by row, in descending order of the logit. Among equal logits
    /// the lower column comes first; -0 is less than +0, and NaN is less than all other values. `k`
    /// is at most 64 and at most the vocabulary. If the ranks have fewer than `k` columns, the
    /// remaining indices have all bits set (-1) and the remaining values are NaN.
    #[must_use]
    pub fn with_top_k(mut self, k: usize, indices: impl Into<Output<'a>>) -> Self {
        self.top = Some((k, indices.into()));
        self
    }

    /// Writes the column of the greatest logit of each row, like [`VocabParallel::with_top_k`] for
    /// one logit.
    #[must_use]
    pub fn with_argmax(self, indices: impl Into<Output<'a>>) -> Self {
        self.with_top_k(1, indices)
    }

    /// Writes the logits themselves to `values`, in the order of the indices: one f32 per index.
    /// The conversion to f32 is exact for every logit type.
    #[must_use]
    pub fn with_values(mut self, values: impl Into<Output<'a>>) -> Self {
        self.values = Some(values.into());
        self
    }

    /// Writes the logarithm of the sum of the exponentials of each row to `out`: `rows` elements of
    /// f32. A NaN in a row gives NaN; a row of only -inf, or without columns, gives -inf.
    #[must_use]
    pub fn with_log_sum_exp(mut self, out: impl Into<Output<'a>>) -> Self {
        self.log_sum_exp = Some(out.into());
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

    /// Returns the columns of `rank` in the even split.
    fn even(&self, rank: u32, ranks: u32) -> Range<usize> {
        let each = self.vocabulary.div_ceil(ranks as usize);
        let first = (rank as usize * each).min(self.vocabulary);
        first..(first + each).min(self.vocabulary)
    }

    /// Returns all buffers with their names. The first is read, the others are written.
    fn views(&self) -> [(&'static str, Option<Input<'_>>); 4] {
        [
            ("logits", Some(self.logits)),
            (
                "indices",
                self.top.as_ref().map(|(_, indices)| indices.as_input()),
            ),
            ("values", self.values.as_ref().map(Output::as_input)),
            (
                "log_sum_exp",
                self.log_sum_exp.as_ref().map(Output::as_input),
            ),
        ]
    }

    pub(in crate::comm) fn accesses(&self) -> AccessList<'a> {
        let outputs = [
            self.top.as_ref().map(|(_, indices)| indices),
            self.values.as_ref(),
            self.log_sum_exp.as_ref(),
        ];
        let written = outputs.into_iter().filter_map(|output| output?.tensor);
        let read = self.logits.tensor.map(TensorUse::Read);
        TensorUse::accesses(read.into_iter().chain(written.map(TensorUse::Write)))
    }

    /// Returns the number of logits of each row that are requested.
    fn k(&self) -> usize {
        self.top.as_ref().map_or(0, |(k, _)| *k)
    }

    /// Returns the part of the specification that must be equal on all ranks.
    fn agreed_spec(&self) -> VocabSpec {
        // `check` has limited k to `MAX_K`, so it fits `u8`.
        let spec = VocabSpec::new(self.k() as u8);
        if self.log_sum_exp.is_some() {
            spec.with_log_sum_exp()
        } else {
            spec
        }
    }

    /// Returns what all ranks must agree on.
    fn op(&self) -> Op {
        Op::VocabParallel {
            rows: self.rows,
            vocabulary: self.vocabulary,
            dtype: self.logits.dtype,
            digest: u64::from(self.agreed_spec().0),
        }
    }

    fn spec(&self) -> VocabSpec {
        match &self.top {
            Some((_, indices)) if indices.dtype.size() == 8 => {
                self.agreed_spec().with_wide_indices()
            }
            _ => self.agreed_spec(),
        }
    }

    /// Checks all arguments. Returns this rank's columns and the stride of its rows.
    fn check(&self, rank: u32, ranks: u32) -> Result<(Range<usize>, usize)> {
        let refuse = |detail: String| Err(invalid(NAME, detail));
        let dtype = self.logits.dtype;
        if !matches!(dtype, DType::F32 | DType::F16 | DType::Bf16) {
            return refuse(format!("{}; f32, f16 and bf16 are possible", dtype.name()));
        }
        if self.vocabulary == 0 || self.vocabulary > i32::MAX as usize {
            return refuse(format!(
                "a vocabulary of {} columns; it must be from 1 to 2^31 - 1",
                self.vocabulary
            ));
        }
        let given = self.columns.is_some();
        let columns = self.columns.clone();
        let columns = columns.unwrap_or_else(|| self.even(rank, ranks));
        if columns.start > columns.end || columns.end > self.vocabulary {
            return refuse(format!(
                "columns {}..{} of a vocabulary of {}",
                columns.start, columns.end, self.vocabulary
            ));
        }
        let stride = self.stride.unwrap_or(columns.len());
        if stride < columns.len() {
            return refuse(format!(
                "a stride of {stride} elements from row to row; {} columns need at least as many",
                columns.len()
            ));
        }
        let needed = match self.rows {
            0 => Some(0),
            rows => stride
                .checked_mul(rows - 1)
                .and_then(|before| before.checked_add(columns.len())),
        };
        if needed.is_none_or(|needed| needed > self.logits.count) {
            return refuse(format!(
                "{} logits; {} rows of columns {}..{}{}, {stride} elements apart, need more",
                self.logits.count,
                self.rows,
                columns.start,
                columns.end,
                if given {
                    ""
                } else {
                    " (this rank's by the even split)"
                },
            ));
        }
        if self.top.is_none() && self.log_sum_exp.is_none() {
            return refuse("nothing is asked for; with_top_k or with_log_sum_exp".to_owned());
        }
        self.check_outputs()?;
        self.check_overlaps()?;
        Ok((columns, stride))
    }

    fn check_outputs(&self) -> Result<()> {
        let refuse = |detail: String| Err(invalid(NAME, detail));
        let k = self.k();
        if self.top.is_some() && (k == 0 || k > MAX_K || k > self.vocabulary) {
            return refuse(format!(
                "the {k} greatest of {} columns; from 1 to {MAX_K}, and no more than there are, \
                    are possible",
                self.vocabulary
            ));
        }
        if self.top.is_none() && self.values.is_some() {
            return refuse("values without indices; they go with with_top_k".to_owned());
        }
        let winners = self.rows.checked_mul(k);
        const INDICES: &[DType] = &[DType::I32, DType::U32, DType::I64, DType::U64];
        const VALUES: &[DType] = &[DType::F32];
        let [_, indices, values, sums] = self.views();
        for ((what, view), needed, types) in [
            (indices, winners, INDICES),
            (values, winners, VALUES),
            (sums, Some(self.rows), VALUES),
        ] {
            let Some(view) = view else { continue };
            if Some(view.count) != needed || !types.contains(&view.dtype) {
                let types: Vec<&str> = types.iter().map(|dtype| dtype.name()).collect();
                return refuse(format!(
                    "{what} has {} elements of {}; {} of {} are needed",
                    view.count,
                    view.dtype.name(),
                    needed.map_or("more than there can be".to_owned(), |n| n.to_string()),
                    types.join(" or ")
                ));
            }
        }
        Ok(())
    }

    fn check_overlaps(&self) -> Result<()> {
        let views = self.views();
        let span = |view: &Input<'_>| {
            let at = view.ptr as usize;
            at..at + view.count * view.dtype.size()
        };
        for (index, (what, view)) in views.iter().enumerate() {
            for (other, theirs) in &views[..index] {
                let (Some(view), Some(theirs)) = (view, theirs) else {
                    continue;
                };
                let (a, b) = (span(view), span(theirs));
                if !a.is_empty() && !b.is_empty() && a.start < b.end && b.start < a.end {
                    return Err(invalid(NAME, format!("{what} and {other} overlap")));
                }
            }
        }
        Ok(())
    }
}

impl FusedBuffers for VocabParallel<'_> {
    fn buffers(&self) -> [Vec<Input<'_>>; 2] {
        let outputs = [
            self.top.as_ref().map(|(_, indices)| indices),
            self.values.as_ref(),
            self.log_sum_exp.as_ref(),
        ];
        let outputs = outputs.into_iter().flatten().map(Output::as_input);
        [vec![self.logits], outputs.collect()]
    }
}

impl Communicator {
    /// Computes the greatest logits of each row with their columns, and each row's log-sum-exp, of
    /// logits whose columns are split over the ranks, in one launch. Every rank gets all results,
    /// bitwise equal.
    ///
    /// The results of a row depend only on the row and on the split of its columns, not on other
    /// rows, the number of blocks or lanes, or the device. The log-sum-exp is `m + log(s)`, where m
    /// is the greatest logit of the row, s is the sum of `exp(logit - m_r) * exp(m_r - m)` over the
    /// ranks in rank order, and m_r is the greatest logit of a rank. Within a rank, partial sum j
    /// covers the columns whose index, counted from the rank's first column, is j mod 2048, and a
    /// binary tree adds the partial sums. All computations are in f32, by
    /// [`fusewire_device::math`].
    ///
    /// Zero rows and ranks without columns are allowed.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] before any data moves; the communicator's first failure,
    /// including a mismatch if ranks differ in rows, vocabulary, k, type, or whether the
    /// log-sum-exp is requested.
    pub fn vocab_parallel(&self, vocab: &VocabParallel<'_>) -> Result<()> {
        let prepared = self.prepare_vocab(vocab, true)?;
        self.run_accessing(&prepared, &vocab.accesses(), Arguments::Fused(vocab))
    }

    /// Enqueues [`Communicator::vocab_parallel`]. All buffers must be tensors: the launch, and any
    /// graph that contains it, keeps them allocated.
    ///
    /// # Errors
    /// The errors of [`Communicator::vocab_parallel`]; [`crate::Error::InvalidArgument`] if a
    /// buffer is not a tensor.
    pub fn vocab_parallel_async(&self, vocab: &VocabParallel<'_>) -> Result<Work> {
        let prepared = self.prepare_vocab(vocab, false)?;
        self.submit_with(
            &prepared.accessing(&vocab.accesses()),
            Arguments::Fused(vocab),
        )
    }

    pub(in crate::comm) fn prepare_vocab<'a>(
        &self,
        vocab: &VocabParallel<'a>,
        borrowed: bool,
    ) -> Result<PreparedOp<'a>> {
        let (columns, stride) = vocab.check(self.rank(), self.size())?;
        for (what, view) in vocab.views() {
            let Some(view) = view else { continue };
            self.refuse_slice(NAME, &view)?;
            if !borrowed && view.tensor.is_none() {
                return Err(invalid(
                    NAME,
                    format!(
                        "{what} is no tensor; an enqueued operation keeps its memory alive, which \
                            takes tensors"
                    ),
                ));
            }
            if view.count > 0 && !(view.ptr as usize).is_multiple_of(view.dtype.size()) {
                return Err(invalid(
                    NAME,
                    format!(
                        "{what} is at {:p}, which is not aligned to {}",
                        view.ptr,
                        view.dtype.name()
                    ),
                ));
            }
        }
        let op = vocab.op();
        self.refuse_backend(&op, "use all_gather and separate reductions")?;
        let spec = vocab.agreed_spec();
        let rows = vocab.rows as u64;
        let call = op.call(plan::plan(&op, &self.agreed()).algorithm, 0).0;
        let op_info = OpInfo {
            call,
            input_count: rows * columns.len() as u64,
            output_count: rows * (spec.row_bytes() / 8) as u64,
        };
        let raw = |output: Option<&Output<'_>>| {
            output.map_or(RawBuffer::EMPTY, |output| output.as_input().raw())
        };
        // Length in 4-byte words.
        let indices = vocab.top.as_ref().map_or(RawBuffer::EMPTY, |(_, indices)| {
            let bytes = indices.as_input().raw_bytes();
            RawBuffer {
                len: bytes.len / 4,
                ..bytes
            }
        });
        let round = self.vocab_round(spec)?;
        let params = VocabParams {
            header: self.header(call, rows),
            logits: vocab.logits.raw(),
            values: raw(vocab.values.as_ref()),
            indices,
            log_sum_exp: raw(vocab.log_sum_exp.as_ref()),
            own: u64::from(self.options().blocks) * round * (spec.row_bytes() / 8) as u64,
            shape: VocabShape {
                columns: columns.len() as u64,
                first: columns.start as u64,
                stride: stride as u64,
                round: round as u32,
                spec: vocab.spec(),
            },
        };
        let kernel = select_vocab(vocab.logits.dtype).unwrap_or(const { &VOCAB_F32 });
        let mut prepared = PreparedOp::new(self, kernel, params, [None; 3], borrowed, op_info);
        if vocab.dependent {
            prepared = prepared.shaped(LaunchAttributes {
                dependent: true,
                ..LaunchAttributes::default()
            });
        }
        if borrowed {
            return Ok(prepared);
        }
        let tensors: Vec<Tensor> = vocab
            .views()
            .into_iter()
            .filter_map(|(_, view)| view?.tensor.cloned())
            .collect();
        Ok(prepared.owning(Arc::new(tensors)))
    }

    /// Returns the rows per round of a block: those that fit both in a packet slot and in a block's
    /// part of staging.
    fn vocab_round(&self, spec: VocabSpec) -> Result<u64> {
        let options = self.options();
        let slot_bytes = self.inner.executor.constants.workspace.packet_slot;
        let slot = packet::capacity(slot_bytes);
        let staged = options.staging_bytes / u64::from(options.blocks.max(1));
        let row = spec.row_bytes() as u64;
        match slot.min(staged) / row {
            0 => Err(invalid(
                NAME,
                format!(
                    "a rank sends {row} bytes of a row; a packet slot of {slot_bytes} bytes \
                     holds {slot}, a block's part of staging {staged}; raise \
                     Options::packet_slot_bytes or Options::staging_bytes, or use fewer blocks"
                ),
            )),
            round => Ok(round),
        }
    }
}
