//! Persistent all_gather: prepared once, executed often.

use super::submit::invalid;
use super::{Communicator, Work};
use crate::Result;
use crate::tensor::Tensor;

/// A prepared all_gather: [`Communicator::all_gather_p_init`]. Freed when it is dropped, or by
/// [`AllGatherP::free`].
#[derive(Debug)]
pub struct AllGatherP {
    comm: Communicator,
    output: Tensor,
}

impl Communicator {
    /// Prepares an all_gather into `output`, which has as many rows as ranks. All ranks together;
    /// the output is used by this handle's executions only in between.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] when the output has no equal rows; the communicator's
    /// failure.
    pub fn all_gather_p_init(&self, output: &Tensor) -> Result<AllGatherP> {
        if !output.len().is_multiple_of(self.size() as usize) {
            return Err(invalid(
                "all_gather_p_init",
                format!(
                    "{} elements are no multiple of {} ranks",
                    output.len(),
                    self.size()
                ),
            ));
        }
        // A mismatch of the prepared outputs is reported here, not at the first execution.
        self.with_agreement(output)?;
        Ok(AllGatherP {
            comm: self.clone(),
            output: output.clone(),
        })
    }

    /// A barrier that fails where ranks bring different lengths or types.
    fn with_agreement(&self, output: &Tensor) -> Result<()> {
        let mine = [output.len() as u64, output.dtype() as u64];
        let mut all = vec![0; 2 * self.size() as usize];
        self.all_gather_single(all.as_mut_slice(), mine.as_slice())?;
        match all.chunks(2).position(|theirs| theirs != mine) {
            None => Ok(()),
            Some(rank) => Err(invalid(
                "all_gather_p_init",
                format!(
                    "rank {rank} prepares {} elements, this rank {} (or types differ)",
                    all[2 * rank],
                    mine[0]
                ),
            )),
        }
    }
}

impl AllGatherP {
    /// Gathers every rank's `input`, a row of the output.
    ///
    /// # Errors
    /// As [`Communicator::all_gather_single`].
    pub fn exec(&self, input: &Tensor) -> Result<()> {
        self.comm.all_gather_single(&self.output, input)
    }

    /// As [`AllGatherP::exec`], enqueued.
    ///
    /// # Errors
    /// As there.
    pub fn exec_async(&self, input: &Tensor) -> Result<Work> {
        self.comm.all_gather_single_async(&self.output, input)
    }

    /// The output.
    pub fn output(&self) -> &Tensor {
        &self.output
    }

    /// Ends the handle. What is enqueued still runs.
    pub fn free(self) {}
}
