//! Collectives, sends and receives, with torchcomms' names.
//!
//! Every operation has a blocking form, which takes slices or tensors, and an asynchronous form
//! (`_async`), which takes tensors and keeps them allocated. Each method creates a [`Collective`]
//! and passes it to [`Communicator::execute`] or [`Communicator::enqueue`].
//!
//! The suffix `_single` means one contiguous buffer of rank-ordered rows. If an operation also has
//! a form without the suffix, that form takes a list of tensors or of references to tensors, one
//! for each rank.
//!
//! This file only has these methods: `operations/` checks a collective, plans it and binds it to a
//! kernel.

use core::borrow::Borrow;

use super::{Communicator, Work};
use crate::Result;
use crate::collective::{Collective, Counts};
use crate::options::ReduceOp;
use crate::tensor::{Input, Output, Tensor};

impl Communicator {
    /// Reduces every rank's `buffer` element by element. Every rank gets the result, in place.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn all_reduce<'a>(&self, buffer: impl Into<Output<'a>>, op: ReduceOp) -> Result<()> {
        self.execute(Collective::all_reduce_in_place(buffer, op))
    }

    /// Enqueues [`Communicator::all_reduce`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn all_reduce_async(&self, buffer: &Tensor, op: ReduceOp) -> Result<Work> {
        self.enqueue(Collective::all_reduce_in_place(buffer, op))
    }

    /// Reduces every rank's `input` element by element to every rank's `output` of the same length.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn all_reduce_into<'a>(
        &self,
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        op: ReduceOp,
    ) -> Result<()> {
        self.execute(Collective::all_reduce(output, input, op))
    }

    /// Enqueues [`Communicator::all_reduce_into`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn all_reduce_into_async(
        &self,
        output: &Tensor,
        input: &Tensor,
        op: ReduceOp,
    ) -> Result<Work> {
        self.enqueue(Collective::all_reduce(output, input, op))
    }

    /// Reduces every rank's `buffer` element by element. The root gets the result in place, other
    /// ranks keep their values.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn reduce<'a>(&self, buffer: impl Into<Output<'a>>, root: u32, op: ReduceOp) -> Result<()> {
        self.execute(Collective::reduce_in_place(buffer, root, op))
    }

    /// Enqueues [`Communicator::reduce`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn reduce_async(&self, buffer: &Tensor, root: u32, op: ReduceOp) -> Result<Work> {
        self.enqueue(Collective::reduce_in_place(buffer, root, op))
    }

    /// Reduces every rank's `input` element by element to the root's `output`. Other ranks may pass
    /// `None` as the output.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn reduce_into<'a>(
        &self,
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        root: u32,
        op: ReduceOp,
    ) -> Result<()> {
        self.execute(Collective::reduce(output, input, root, op))
    }

    /// Enqueues [`Communicator::reduce_into`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn reduce_into_async<'a>(
        &self,
        output: impl Into<Option<&'a Tensor>>,
        input: &'a Tensor,
        root: u32,
        op: ReduceOp,
    ) -> Result<Work> {
        self.enqueue(Collective::reduce(output.into(), input, root, op))
    }

    /// Reduces row r of every rank's `input` to the `output` of rank r. An input has one row per
    /// rank, each as long as `output`.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn reduce_scatter_single<'a>(
        &self,
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        op: ReduceOp,
    ) -> Result<()> {
        self.execute(Collective::reduce_scatter(output, input, op))
    }

    /// Enqueues [`Communicator::reduce_scatter_single`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn reduce_scatter_single_async(
        &self,
        output: &Tensor,
        input: &Tensor,
        op: ReduceOp,
    ) -> Result<Work> {
        self.enqueue(Collective::reduce_scatter(output, input, op))
    }

    /// Copies the `input` of rank r to row r of every rank's `output`. An output has as many rows
    /// as ranks.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn all_gather_single<'a>(
        &self,
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
    ) -> Result<()> {
        self.execute(Collective::all_gather(output, input))
    }

    /// Enqueues [`Communicator::all_gather_single`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn all_gather_single_async(&self, output: &Tensor, input: &Tensor) -> Result<Work> {
        self.enqueue(Collective::all_gather(output, input))
    }

    /// Copies the root's `buffer` to every rank's.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn broadcast<'a>(&self, buffer: impl Into<Output<'a>>, root: u32) -> Result<()> {
        self.execute(Collective::broadcast(buffer, root))
    }

    /// Enqueues [`Communicator::broadcast`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn broadcast_async(&self, buffer: &Tensor, root: u32) -> Result<Work> {
        self.enqueue(Collective::broadcast(buffer, root))
    }

    /// Copies row r of the root's `input` to the `output` of rank r. Other ranks may pass `None` as
    /// the input.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn scatter_single<'a>(
        &self,
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        root: u32,
    ) -> Result<()> {
        self.execute(Collective::scatter(output, input, root))
    }

    /// Enqueues [`Communicator::scatter_single`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn scatter_single_async<'a>(
        &self,
        output: &'a Tensor,
        input: impl Into<Option<&'a Tensor>>,
        root: u32,
    ) -> Result<Work> {
        self.enqueue(Collective::scatter(output, input.into(), root))
    }

    /// Copies the `input` of rank r to row r of the root's `output`. Other ranks may pass `None` as
    /// the output.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn gather_single<'a>(
        &self,
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        root: u32,
    ) -> Result<()> {
        self.execute(Collective::gather(output, input, root))
    }

    /// Enqueues [`Communicator::gather_single`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn gather_single_async<'a>(
        &self,
        output: impl Into<Option<&'a Tensor>>,
        input: &'a Tensor,
        root: u32,
    ) -> Result<Work> {
        self.enqueue(Collective::gather(output.into(), input, root))
    }

    /// Copies row r of the `input` of rank s to row s of the `output` of rank r.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn all_to_all_single<'a>(
        &self,
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
    ) -> Result<()> {
        self.execute(Collective::all_to_all(output, input, self.size()))
    }

    /// Enqueues [`Communicator::all_to_all_single`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn all_to_all_single_async(&self, output: &Tensor, input: &Tensor) -> Result<Work> {
        self.enqueue(Collective::all_to_all(output, input, self.size()))
    }

    /// Sends `input` to `peer`, which must receive the same number of elements of the same type.
    /// Returns when `input` may be reused.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn send<'a>(&self, input: impl Into<Input<'a>>, peer: u32) -> Result<()> {
        self.execute(Collective::send(input, peer))
    }

    /// Enqueues [`Communicator::send`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn send_async(&self, input: &Tensor, peer: u32) -> Result<Work> {
        self.enqueue(Collective::send(input, peer))
    }

    /// Receives into `output` from `peer`, which must send the same number of elements of the same
    /// type.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn recv<'a>(&self, output: impl Into<Output<'a>>, peer: u32) -> Result<()> {
        self.execute(Collective::recv(output, peer))
    }

    /// Enqueues [`Communicator::recv`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn recv_async(&self, output: &Tensor, peer: u32) -> Result<Work> {
        self.enqueue(Collective::recv(output, peer))
    }

    /// Blocks until every rank has called this method.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn barrier(&self) -> Result<()> {
        self.execute(Collective::barrier())
    }

    /// Enqueues [`Communicator::barrier`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn barrier_async(&self) -> Result<Work> {
        self.enqueue(Collective::barrier())
    }

    /// Copies the `input` of rank r, which has `counts[r]` elements, to row r of every rank's
    /// `output`. Rows are contiguous. `counts` is equal on all ranks. It is a slice, or a tensor
    /// that the kernel reads ([`Counts`]). If the counts in a tensor exceed a buffer, no data
    /// moves: on the CPU the call fails, on a GPU the kernel fails.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn all_gather_v_single<'a>(
        &self,
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        counts: impl Into<Counts<'a>>,
    ) -> Result<()> {
        self.execute(Collective::all_gather_v(output, input, counts))
    }

    /// Enqueues [`Communicator::all_gather_v_single`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn all_gather_v_single_async<'a>(
        &self,
        output: &'a Tensor,
        input: &'a Tensor,
        counts: impl Into<Counts<'a>>,
    ) -> Result<Work> {
        self.enqueue(Collective::all_gather_v(output, input, counts))
    }

    /// Sends `input_splits[r]` elements to rank r and receives `output_splits[r]` elements from it.
    /// The parts are contiguous, in rank order. If sender and receiver pass different numbers, both
    /// fail with a mismatch.
    ///
    /// The splits are slices, or tensors that the kernel reads ([`Counts`]). If those in tensors
    /// add up to more elements than a buffer has, no data moves: on the CPU the call fails, on a
    /// GPU the kernel fails.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn all_to_all_v_single<'a>(
        &self,
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        output_splits: impl Into<Counts<'a>>,
        input_splits: impl Into<Counts<'a>>,
    ) -> Result<()> {
        self.execute(Collective::all_to_all_v(
            output,
            input,
            output_splits,
            input_splits,
        ))
    }

    /// Enqueues [`Communicator::all_to_all_v_single`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn all_to_all_v_single_async<'a>(
        &self,
        output: &'a Tensor,
        input: &'a Tensor,
        output_splits: impl Into<Counts<'a>>,
        input_splits: impl Into<Counts<'a>>,
    ) -> Result<Work> {
        self.enqueue(Collective::all_to_all_v(
            output,
            input,
            output_splits,
            input_splits,
        ))
    }

    /// Copies the `input` of rank r to `outputs[r]` of every rank.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn all_gather(&self, outputs: &[impl Borrow<Tensor>], input: &Tensor) -> Result<()> {
        self.execute_list(self.list_all_gather(&references(outputs), input)?)
    }

    /// Enqueues [`Communicator::all_gather`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn all_gather_async(
        &self,
        outputs: &[impl Borrow<Tensor>],
        input: &Tensor,
    ) -> Result<Work> {
        self.enqueue_list(self.list_all_gather(&references(outputs), input)?)
    }

    /// Runs [`Communicator::all_gather`] with inputs of different lengths: `outputs[r]` has the
    /// length of the input of rank r.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn all_gather_v(&self, outputs: &[impl Borrow<Tensor>], input: &Tensor) -> Result<()> {
        self.execute_list(self.list_all_gather_v(&references(outputs), input)?)
    }

    /// Enqueues [`Communicator::all_gather_v`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn all_gather_v_async(
        &self,
        outputs: &[impl Borrow<Tensor>],
        input: &Tensor,
    ) -> Result<Work> {
        self.enqueue_list(self.list_all_gather_v(&references(outputs), input)?)
    }

    /// Reduces `inputs[r]` of every rank to the `output` of rank r.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn reduce_scatter(
        &self,
        output: &Tensor,
        inputs: &[impl Borrow<Tensor>],
        op: ReduceOp,
    ) -> Result<()> {
        self.execute_list(self.list_reduce_scatter(output, &references(inputs), op)?)
    }

    /// Enqueues [`Communicator::reduce_scatter`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn reduce_scatter_async(
        &self,
        output: &Tensor,
        inputs: &[impl Borrow<Tensor>],
        op: ReduceOp,
    ) -> Result<Work> {
        self.enqueue_list(self.list_reduce_scatter(output, &references(inputs), op)?)
    }

    /// Runs [`Communicator::reduce_scatter`] with different lengths: `inputs[r]` has the same
    /// length on all ranks, but the length may differ between values of r.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn reduce_scatter_v(
        &self,
        output: &Tensor,
        inputs: &[impl Borrow<Tensor>],
        op: ReduceOp,
    ) -> Result<()> {
        self.execute_list(self.list_reduce_scatter_v(output, &references(inputs), op)?)
    }

    /// Enqueues [`Communicator::reduce_scatter_v`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn reduce_scatter_v_async(
        &self,
        output: &Tensor,
        inputs: &[impl Borrow<Tensor>],
        op: ReduceOp,
    ) -> Result<Work> {
        self.enqueue_list(self.list_reduce_scatter_v(output, &references(inputs), op)?)
    }

    /// Sends `inputs[r]` to rank r and receives `outputs[r]` from it. Each pair of ranks may use a
    /// different length.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn all_to_all(
        &self,
        outputs: &[impl Borrow<Tensor>],
        inputs: &[impl Borrow<Tensor>],
    ) -> Result<()> {
        self.execute_list(self.list_all_to_all(&references(outputs), &references(inputs))?)
    }

    /// Enqueues [`Communicator::all_to_all`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn all_to_all_async(
        &self,
        outputs: &[impl Borrow<Tensor>],
        inputs: &[impl Borrow<Tensor>],
    ) -> Result<Work> {
        self.enqueue_list(self.list_all_to_all(&references(outputs), &references(inputs))?)
    }

    /// Copies `inputs[r]` of the root to the `output` of rank r. Other ranks may pass
    /// [`Tensor::NONE`] as the inputs.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn scatter(
        &self,
        output: &Tensor,
        inputs: &[impl Borrow<Tensor>],
        root: u32,
    ) -> Result<()> {
        self.execute_list(self.list_scatter(output, &references(inputs), root)?)
    }

    /// Enqueues [`Communicator::scatter`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn scatter_async(
        &self,
        output: &Tensor,
        inputs: &[impl Borrow<Tensor>],
        root: u32,
    ) -> Result<Work> {
        self.enqueue_list(self.list_scatter(output, &references(inputs), root)?)
    }

    /// Copies the `input` of rank r to `outputs[r]` of the root. Other ranks may pass
    /// [`Tensor::NONE`] as the outputs.
    ///
    /// # Errors
    /// The errors of [`Communicator::execute`].
    pub fn gather(&self, outputs: &[impl Borrow<Tensor>], input: &Tensor, root: u32) -> Result<()> {
        self.execute_list(self.list_gather(&references(outputs), input, root)?)
    }

    /// Enqueues [`Communicator::gather`] on the communicator's stream.
    ///
    /// # Errors
    /// The errors of [`Communicator::enqueue`].
    pub fn gather_async(
        &self,
        outputs: &[impl Borrow<Tensor>],
        input: &Tensor,
        root: u32,
    ) -> Result<Work> {
        self.enqueue_list(self.list_gather(&references(outputs), input, root)?)
    }
}

/// Returns references to the tensors of a list.
fn references(list: &[impl Borrow<Tensor>]) -> Vec<&Tensor> {
    list.iter().map(Borrow::borrow).collect()
}
