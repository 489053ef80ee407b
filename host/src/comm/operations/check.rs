//! Checks of operands, before any data moves.

use std::borrow::Cow;

use crate::Result;
use crate::collective::{Counts, Op, Operands};
use crate::comm::Communicator;
use crate::comm::submit::invalid;
use crate::options::ReduceOp;
use crate::tensor::{Input, Output, Tensor};
use fusewire_device::DType;
use fusewire_device::element::ReductionCode;

/// Row lengths: the caller's, or a copy of those in a tensor.
type Lengths<'a> = Cow<'a, [u64]>;

impl Communicator {
    /// Checks the buffers of a collective against the operation and against each other. Sets the
    /// digest of row lengths in a tensor.
    #[inline]
    pub(super) fn check_operands(&self, op: &mut Op, operands: &Operands<'_>) -> Result<()> {
        let Operands { output, input, .. } = operands;
        let (name, rank) = (op.name(), self.rank() as usize);
        for used in operands.tensors().into_iter().flatten() {
            self.check_device(name, used.tensor())?;
        }
        if let Some(factor) = operands.factor {
            check_factor(op, output, factor)?;
        }
        match *op {
            Op::AllReduce {
                count,
                dtype,
                reduction,
            } => {
                types(name, dtype, output, input)?;
                length(name, "output", output.count, count)?;
                length(name, "input", input.count, count)?;
                reducible(name, dtype, reduction, operands)?;
                apart(name, output, input, Some(0))
            }
            Op::Reduce {
                count,
                dtype,
                reduction,
                root,
            } => {
                self.rank_of(name, "root", root)?;
                if root == self.rank() && given(name, "output", output.ptr.is_null(), count)? {
                    types(name, dtype, output, input)?;
                    length(name, "output", output.count, count)?;
                    apart(name, output, input, Some(0))?;
                }
                same_type(name, dtype, input.dtype)?;
                length(name, "input", input.count, count)?;
                reducible(name, dtype, reduction, operands)
            }
            Op::ReduceScatter {
                count,
                dtype,
                reduction,
            }
            | Op::ReduceScatterOnArrival {
                count,
                dtype,
                reduction,
                ..
            } => {
                types(name, dtype, output, input)?;
                length(name, "output", output.count, count)?;
                self.rows(name, "input", input.count, count)?;
                reducible(name, dtype, reduction, operands)?;
                apart(name, output, input, Some(rank * count))
            }
            Op::Broadcast { count, dtype, root } => {
                self.rank_of(name, "root", root)?;
                types(name, dtype, output, input)?;
                length(name, "output", output.count, count)?;
                length(name, "input", input.count, count)?;
                if !operands.is_in_place() {
                    return Err(invalid(
                        name,
                        "output and input differ: a broadcast has one buffer".to_owned(),
                    ));
                }
                Ok(())
            }
            Op::AllGather { count, dtype } | Op::AllGatherWithFlags { count, dtype, .. } => {
                types(name, dtype, output, input)?;
                length(name, "input", input.count, count)?;
                self.rows(name, "output", output.count, count)?;
                within(name, output, input, rank * count)
            }
            Op::AllGatherV {
                count,
                dtype,
                digest,
            } => {
                types(name, dtype, output, input)?;
                length(name, "output", output.count, count)?;
                let digest = self.check_gathered_counts(name, operands, digest)?;
                *op = Op::AllGatherV {
                    count,
                    dtype,
                    digest,
                };
                Ok(())
            }
            Op::Scatter { count, dtype, root } => {
                self.rank_of(name, "root", root)?;
                same_type(name, dtype, output.dtype)?;
                length(name, "output", output.count, count)?;
                if root == self.rank() && given(name, "input", input.ptr.is_null(), count)? {
                    types(name, dtype, output, input)?;
                    self.rows(name, "input", input.count, count)?;
                    apart(name, output, input, Some(rank * count))?;
                }
                Ok(())
            }
            Op::Gather { count, dtype, root } => {
                self.rank_of(name, "root", root)?;
                same_type(name, dtype, input.dtype)?;
                length(name, "input", input.count, count)?;
                if root == self.rank() && given(name, "output", output.ptr.is_null(), count)? {
                    types(name, dtype, output, input)?;
                    self.rows(name, "output", output.count, count)?;
                    within(name, output, input, rank * count)?;
                }
                Ok(())
            }
            Op::AllToAll { count, dtype } => {
                types(name, dtype, output, input)?;
                length(name, "output", output.count, input.count)?;
                let ranks = self.size() as usize;
                if count.checked_mul(ranks) != Some(input.count) {
                    return Err(invalid(
                        name,
                        format!(
                            "{} elements are no {ranks} rows of {count}, one per rank",
                            input.count
                        ),
                    ));
                }
                apart(name, output, input, Some(0))
            }
            Op::AllToAllV { dtype } => {
                types(name, dtype, output, input)?;
                self.check_splits(name, operands)?;
                apart(name, output, input, None)
            }
            Op::Send { count, dtype, peer } => {
                self.peer_of(name, peer)?;
                same_type(name, dtype, input.dtype)?;
                length(name, "input", input.count, count)
            }
            Op::Recv { count, dtype, peer } => {
                self.peer_of(name, peer)?;
                same_type(name, dtype, output.dtype)?;
                length(name, "output", output.count, count)
            }
            // The methods of these operations check the operands.
            Op::AllReduceNorm { .. }
            | Op::ReduceScatterNorm { .. }
            | Op::VocabParallel { .. }
            | Op::Barrier => Ok(()),
        }
    }

    /// Checks the row lengths of an all_gather_v. Returns their digest, or 0 if the host does not
    /// read them.
    fn check_gathered_counts(
        &self,
        name: &'static str,
        operands: &Operands<'_>,
        digest: u64,
    ) -> Result<u64> {
        let (output, input) = (&operands.output, &operands.input);
        counts_apart(name, operands)?;
        let Some(counts) = self.readable_counts(name, operands.counts[0])? else {
            // In place, replays must not move this rank's row. A GPU's counts are not known.
            if let Some(counts) = operands.counts[0].tensor()
                && apart(name, output, input, None).is_err()
                && !counts.device().is_gpu()
            {
                let counts = counts.to_vec::<u64>()?;
                self.total(name, "counts", &counts)?;
                within(name, output, input, self.row_start(&counts))?;
            }
            return Ok(0);
        };
        let total = self.total(name, "counts", &counts)?;
        let actual = Op::digest(&counts);
        if operands.counts[0].tensor().is_none() && actual != digest {
            return Err(invalid(
                name,
                "the digest of the operation is not that of the counts (Op::digest)".to_owned(),
            ));
        }
        length(name, "output", output.count, total)?;
        let own = counts[self.rank() as usize];
        length(name, "input", input.count, own as usize)?;
        within(name, output, input, self.row_start(&counts))?;
        Ok(actual)
    }

    /// Returns the element at which this rank's row of an all_gather_v begins.
    fn row_start(&self, counts: &[u64]) -> usize {
        counts[..self.rank() as usize].iter().sum::<u64>() as usize
    }

    /// Checks the row lengths of an all_to_all_v.
    fn check_splits(&self, name: &'static str, operands: &Operands<'_>) -> Result<()> {
        let [outputs, inputs] = operands.counts;
        counts_apart(name, operands)?;
        if outputs.tensor().is_some() != inputs.tensor().is_some() {
            return Err(invalid(
                name,
                "one list of splits is in host memory and the other in a tensor: pass both as \
                 slices or both as tensors"
                    .to_owned(),
            ));
        }
        if let Some(inputs) = self.readable_counts(name, inputs)? {
            let sent = self.total(name, "input splits", &inputs)?;
            at_most(name, "input", sent, operands.input.count)?;
        }
        if let Some(outputs) = self.readable_counts(name, outputs)? {
            let received = self.total(name, "output splits", &outputs)?;
            at_most(name, "output", received, operands.output.count)?;
        }
        Ok(())
    }

    /// Returns row lengths. Returns `None` for those in a tensor that the host does not read now:
    /// on a GPU, which the host would have to wait for, and in a capture, because each replay reads
    /// them again.
    fn readable_counts<'a>(
        &self,
        name: &'static str,
        counts: Counts<'a>,
    ) -> Result<Option<Lengths<'a>>> {
        let tensor = match counts {
            Counts::None => return Ok(Some(Cow::Borrowed(&[]))),
            Counts::Host(counts) => return Ok(Some(Cow::Borrowed(counts))),
            Counts::Device(tensor) => tensor,
        };
        if tensor.dtype() != DType::U64 || !(tensor.as_ptr() as usize).is_multiple_of(8) {
            return Err(invalid(
                name,
                "counts are a tensor of u64, aligned to 8 bytes".to_owned(),
            ));
        }
        self.check_device(name, tensor)?;
        if tensor.len() != self.size() as usize {
            return Err(invalid(
                name,
                format!(
                    "a tensor of {} counts for {} ranks",
                    tensor.len(),
                    self.size()
                ),
            ));
        }
        if tensor.device().is_gpu() || self.stream.is_capturing() {
            return Ok(None);
        }
        // Waits for operations that write the counts. Another thread may write them later, so all
        // checks of a list must use one copy.
        tensor.to_vec().map(|counts| Some(Cow::Owned(counts)))
    }

    /// Fails if a tensor with elements is on another device than the communicator.
    #[inline]
    pub(in crate::comm) fn check_device(
        &self,
        operation: &'static str,
        tensor: &Tensor,
    ) -> Result<()> {
        let (device, own) = (tensor.device(), self.device());
        if device == own || tensor.is_empty() {
            return Ok(());
        }
        Err(invalid(
            operation,
            format!("a tensor is on {device}, the communicator is on {own}"),
        ))
    }

    fn rank_of(&self, operation: &'static str, what: &str, rank: u32) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        Err(invalid(
            operation,
            format!("{what} {rank}; ranks are 0 to {}", self.size() - 1),
        ))
    }

    fn peer_of(&self, operation: &'static str, peer: u32) -> Result<()> {
        self.rank_of(operation, "peer", peer)?;
        if peer == self.rank() {
            return Err(invalid(
                operation,
                format!("peer {peer} is this rank itself; copy instead"),
            ));
        }
        Ok(())
    }

    fn rows(&self, operation: &'static str, what: &str, count: usize, row: usize) -> Result<()> {
        let needed = row.checked_mul(self.size() as usize);
        if needed == Some(count) {
            return Ok(());
        }
        Err(invalid(
            operation,
            format!(
                "{what} has {count} elements; {} rows of {row} are needed",
                self.size()
            ),
        ))
    }

    fn total(&self, operation: &'static str, what: &str, counts: &[u64]) -> Result<usize> {
        if counts.len() != self.size() as usize {
            return Err(invalid(
                operation,
                format!("{} {what} for {} ranks", counts.len(), self.size()),
            ));
        }
        counts
            .iter()
            .try_fold(0u64, |sum, count| sum.checked_add(*count))
            .and_then(|sum| usize::try_from(sum).ok())
            .ok_or_else(|| invalid(operation, format!("the sum of the {what} overflows")))
    }
}

/// Returns true if `tensor` shares memory with `output`.
fn lies_in(tensor: &Tensor, output: &Output<'_>) -> bool {
    let (at, start) = (tensor.as_ptr() as usize, output.ptr as usize);
    let bytes = tensor.len() * tensor.dtype().size();
    at < start + output.count * output.dtype.size() && start < at + bytes
}

/// Refuses row lengths in the output, because kernels read them while they write the output.
fn counts_apart(operation: &'static str, operands: &Operands<'_>) -> Result<()> {
    for counts in operands.counts.iter().filter_map(|counts| counts.tensor()) {
        if lies_in(counts, &operands.output) {
            return Err(invalid(
                operation,
                "the counts lie in the output, which the operation writes while it reads them"
                    .to_owned(),
            ));
        }
    }
    Ok(())
}

/// Returns true if the root has passed the buffer `what`, and fails if it has not, although rows
/// have `count` elements.
#[inline]
fn given(operation: &'static str, what: &str, is_missing: bool, count: usize) -> Result<bool> {
    if is_missing && count > 0 {
        return Err(invalid(
            operation,
            format!("the root passed no {what}; only the other ranks need none"),
        ));
    }
    Ok(!is_missing)
}

/// Checks that output and input have the operation's type.
#[inline]
fn types(
    operation: &'static str,
    dtype: DType,
    output: &Output<'_>,
    input: &Input<'_>,
) -> Result<()> {
    if output.dtype != input.dtype {
        return Err(invalid(
            operation,
            format!(
                "output is {}, input is {}",
                output.dtype.name(),
                input.dtype.name()
            ),
        ));
    }
    same_type(operation, dtype, input.dtype)
}

#[inline]
fn same_type(operation: &'static str, dtype: DType, buffer: DType) -> Result<()> {
    if dtype == buffer {
        return Ok(());
    }
    Err(invalid(
        operation,
        format!(
            "a buffer is {}, the operation is on {}",
            buffer.name(),
            dtype.name()
        ),
    ))
}

#[inline]
fn length(operation: &'static str, what: &str, count: usize, needed: usize) -> Result<()> {
    if count == needed {
        return Ok(());
    }
    Err(invalid(
        operation,
        format!("{what} has {count} elements; {needed} are needed"),
    ))
}

fn at_most(operation: &'static str, what: &str, needed: usize, count: usize) -> Result<()> {
    if needed <= count {
        return Ok(());
    }
    Err(invalid(
        operation,
        format!("{what} has {count} elements; the splits need {needed}"),
    ))
}

/// Checks that the reduction of the buffers is the operation's, and that the type supports it.
#[inline]
fn reducible(
    operation: &'static str,
    dtype: DType,
    code: ReductionCode,
    operands: &Operands<'_>,
) -> Result<()> {
    let reduce = operands.reduce;
    if reduce.code() != code {
        return Err(invalid(
            operation,
            format!(
                "the operands are for {}, the operation is {}",
                reduce.code().name(),
                code.name()
            ),
        ));
    }
    if let ReduceOp::PreMulSum(factor) = reduce
        && operands.factor.is_none()
        && dtype.is_integer()
        && (factor.fract() != 0.0 || factor.abs() > 9e15)
    {
        return Err(invalid(
            operation,
            format!(
                "the factor {factor} is no integer, but the elements are {}",
                dtype.name()
            ),
        ));
    }
    supports_reduction(operation, dtype, code)
}

/// Checks the factor of a scaled sum in device memory.
#[cold]
fn check_factor(op: &Op, output: &Output<'_>, factor: &Tensor) -> Result<()> {
    let name = op.name();
    let refuse = |detail: String| Err(invalid(name, detail));
    if op.reduction() != Some(ReductionCode::PreMulSum) {
        let reduction = op.reduction().map_or("none", ReductionCode::name);
        return refuse(format!(
            "a factor is for the reduction {}, this one is {reduction}",
            ReductionCode::PreMulSum.name()
        ));
    }
    if factor.len() != 1 {
        return refuse(format!(
            "the factor has {} elements; 1 is needed",
            factor.len()
        ));
    }
    if op.dtype() != Some(factor.dtype()) {
        return refuse(format!(
            "the factor is {}, the operation is on {}",
            factor.dtype().name(),
            op.dtype().map_or("none", DType::name)
        ));
    }
    if lies_in(factor, output) {
        return refuse(
            "the factor lies in the output, which the operation writes while it reads the factor"
                .to_owned(),
        );
    }
    Ok(())
}

/// Checks that the type supports the reduction.
#[inline]
pub(super) fn supports_reduction(
    operation: &'static str,
    dtype: DType,
    code: ReductionCode,
) -> Result<()> {
    if code.supports(dtype) {
        return Ok(());
    }
    Err(invalid(
        operation,
        format!(
            "elements of {} have no reduction {}",
            dtype.name(),
            code.name()
        ),
    ))
}

/// Checks that output and input do not overlap, unless the output begins `in_place` elements after
/// the input, which the operation supports.
#[inline]
fn apart(
    operation: &'static str,
    output: &Output<'_>,
    input: &Input<'_>,
    in_place: Option<usize>,
) -> Result<()> {
    let size = input.dtype.size();
    let (from, to) = (input.ptr as usize, output.ptr as usize);
    if in_place.is_some_and(|at| to == from.wrapping_add(at * size)) {
        return Ok(());
    }
    if to < from + input.count * size && from < to + output.count * size {
        return Err(overlap(operation));
    }
    Ok(())
}

/// Checks that output and input do not overlap, unless the input begins `at` elements after the
/// output, which the operation supports.
fn within(
    operation: &'static str,
    output: &Output<'_>,
    input: &Input<'_>,
    at: usize,
) -> Result<()> {
    if input.ptr as usize == (output.ptr as usize).wrapping_add(at * input.dtype.size()) {
        return Ok(());
    }
    apart(operation, output, input, None)
}

fn overlap(operation: &'static str) -> crate::Error {
    invalid(
        operation,
        "output and input overlap in a way that the operation cannot work in place with".to_owned(),
    )
}
