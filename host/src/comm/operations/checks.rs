//! What is refused before anything moves.

use crate::Result;
use crate::comm::Communicator;
use crate::comm::submit::invalid;
use crate::options::ReduceOp;
use crate::tensor::{Input, Output, Tensor};
use fusewire_device::DType;

impl Communicator {
    pub(super) fn rank_of(&self, operation: &'static str, what: &str, rank: u32) -> Result<()> {
        if rank < self.size() {
            return Ok(());
        }
        Err(invalid(
            operation,
            format!("{what} {rank}; ranks are 0 to {}", self.size() - 1),
        ))
    }

    pub(super) fn peer_of(&self, operation: &'static str, peer: u32) -> Result<()> {
        self.rank_of(operation, "peer", peer)?;
        if peer == self.rank() {
            return Err(invalid(
                operation,
                format!("peer {peer} is this rank itself; copy instead"),
            ));
        }
        Ok(())
    }

    pub(super) fn rows(
        &self,
        operation: &'static str,
        what: &str,
        count: usize,
        row: usize,
    ) -> Result<()> {
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

    pub(super) fn total(
        &self,
        operation: &'static str,
        what: &str,
        counts: &[u64],
    ) -> Result<usize> {
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

/// The counts in a tensor of u64. In CPU memory their sums are checked at the call; a GPU's memory
/// is not read (`None`).
pub(super) fn device_counts<'a>(
    operation: &'static str,
    counts: &'a Tensor,
) -> Result<Option<&'a [u64]>> {
    if counts.dtype() != DType::U64 || !(counts.as_ptr() as usize).is_multiple_of(8) {
        return Err(invalid(
            operation,
            "counts are a tensor of u64, aligned to 8 bytes".to_owned(),
        ));
    }
    if counts.device().is_gpu() {
        return Ok(None);
    }
    // SAFETY: the tensor holds this many aligned u64.
    Ok(Some(unsafe {
        core::slice::from_raw_parts(counts.as_ptr().cast(), counts.len())
    }))
}

pub(super) fn same_type(
    operation: &'static str,
    output: &Output<'_>,
    input: &Input<'_>,
) -> Result<()> {
    if output.dtype == input.dtype {
        return Ok(());
    }
    Err(invalid(
        operation,
        format!(
            "output is {}, input is {}",
            output.dtype.name(),
            input.dtype.name()
        ),
    ))
}

pub(super) fn length(
    operation: &'static str,
    what: &str,
    count: usize,
    needed: usize,
) -> Result<()> {
    if count == needed {
        return Ok(());
    }
    Err(invalid(
        operation,
        format!("{what} has {count} elements; {needed} are needed"),
    ))
}

pub(super) fn at_most(
    operation: &'static str,
    what: &str,
    needed: usize,
    count: usize,
) -> Result<()> {
    if needed <= count {
        return Ok(());
    }
    Err(invalid(
        operation,
        format!("{what} has {count} elements; the splits need {needed}"),
    ))
}

pub(super) fn reducible(operation: &'static str, dtype: DType, op: ReduceOp) -> Result<()> {
    if let ReduceOp::PreMulSum(factor) = op
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
    if op.code().supports(dtype) {
        return Ok(());
    }
    Err(invalid(
        operation,
        format!(
            "elements of {} have no reduction {}",
            dtype.name(),
            op.code().name()
        ),
    ))
}

/// Output and input must not overlap, but for the place where the operation works in place:
/// `in_place` elements into the input.
pub(super) fn apart(
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

/// As [`apart`], where the input may lie in the output, `at` elements in.
pub(super) fn within(
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

pub(super) fn overlap(operation: &'static str) -> crate::Error {
    invalid(
        operation,
        "output and input overlap in a way that the operation cannot work in place with".to_owned(),
    )
}
