//! Persistent all_gather: prepared once, executed repeatedly.

use super::submit::invalid;
use super::{Communicator, Work};
use crate::Result;
use crate::options::CallOptions;
use crate::tensor::Tensor;

/// A prepared all_gather, from [`Communicator::all_gather_p_init`]. Freed when it is dropped, or by
/// [`AllGatherP::free`].
#[derive(Debug)]
pub struct AllGatherP {
    comm: Communicator,
    output: Tensor,
}

impl Communicator {
    /// Prepares an all_gather into `output`, which has one row per rank. All ranks must call this
    /// together. Until the handle is freed, only its executions may use the output.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] if the length of the output is not a multiple of the
    /// number of ranks, or ranks pass different outputs; the communicator's failure.
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
        // Reports a mismatch of the outputs now instead of at the first execution.
        self.with_agreement(output)?;
        Ok(AllGatherP {
            comm: self.clone(),
            output: output.clone(),
        })
    }

    /// Waits for all ranks, and fails if their outputs have different lengths or types.
    fn with_agreement(&self, output: &Tensor) -> Result<()> {
        let mine = [output.len() as u64, output.dtype() as u64];
        let mut all = vec![0; 2 * self.size() as usize];
        self.outside_capture()?.all_gather_single(&mut all, &mine)?;
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
    /// Gathers every rank's `input` into the rows of the output.
    ///
    /// # Errors
    /// The errors of [`Communicator::all_gather_single`].
    pub fn exec(&self, input: &Tensor) -> Result<()> {
        self.comm.all_gather_single(&self.output, input)
    }

    /// Enqueues [`AllGatherP::exec`].
    ///
    /// # Errors
    /// The errors of [`Communicator::all_gather_single_async`].
    pub fn exec_async(&self, input: &Tensor) -> Result<Work> {
        self.comm.all_gather_single_async(&self.output, input)
    }

    /// Returns this handle with other call options, like [`Communicator::with_options`].
    ///
    /// # Errors
    /// The errors of [`Communicator::with_options`].
    pub fn with_options(&self, options: &CallOptions) -> Result<Self> {
        Ok(Self {
            comm: self.comm.with_options(options)?,
            output: self.output.clone(),
        })
    }

    /// Returns the output.
    pub fn output(&self) -> &Tensor {
        &self.output
    }

    /// Frees the handle. Enqueued executions still run.
    pub fn free(self) {}
}
