//! The layer on one rank: the router, dispatch, the rank's experts, and combine.

use core::time::Duration;
use std::sync::Arc;

use fusewire::{
    Bf16, Communicator, DType, Dispatched, GraphExec, MicroBatch, Moe, MoeConfig, Result, Tensor,
};

use crate::clock::{Clock, PARTS, Part};
use crate::experts::{self, Expert};
use crate::model::Shape;
use crate::router::Router;

/// Tokens that pass through the layer together, and their memory.
struct Batch {
    moe: MicroBatch,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    /// Results of this rank's experts, for tokens of all ranks.
    y: Tensor,
    out: Tensor,
}

/// The layer on one rank.
pub(crate) struct Layer {
    comm: Communicator,
    moe: Moe,
    router: Arc<Router>,
    /// The experts of this rank.
    experts: Arc<[Arc<Expert>]>,
    /// One batch, or two micro-batches.
    batches: Vec<Batch>,
    clock: Clock,
}

impl Layer {
    /// Creates the layer for `tokens` tokens of this rank, in `micro_batches` batches (1 or 2). All
    /// ranks must call this together.
    pub(crate) fn new(
        comm: &Communicator,
        shape: Shape,
        router: &Arc<Router>,
        experts: Vec<Arc<Expert>>,
        tokens: usize,
        micro_batches: usize,
    ) -> Result<Self> {
        let Shape { hidden, top_k, .. } = shape;
        let most = shape
            .tokens
            .div_ceil(comm.size() as usize)
            .div_ceil(micro_batches);
        let config = MoeConfig::new(shape.experts as u32, top_k as u32, hidden, most)
            .in_flight(micro_batches);
        let moe = Moe::new(comm, &config)?;
        let batch = |index: usize| {
            let (size, rest) = (tokens / micro_batches, tokens % micro_batches);
            let tokens = size + usize::from(index < rest);
            Ok(Batch {
                moe: moe.micro_batch(index)?,
                x: comm.tensor(DType::Bf16, tokens * hidden)?,
                ids: comm.tensor(DType::I32, tokens * top_k)?,
                weights: comm.tensor(DType::F32, tokens * top_k)?,
                y: comm.tensor(DType::Bf16, moe.info().results * hidden)?,
                out: comm.tensor(DType::Bf16, tokens * hidden)?,
            })
        };
        Ok(Self {
            batches: (0..micro_batches).map(batch).collect::<Result<_>>()?,
            comm: comm.clone(),
            moe,
            router: Arc::clone(router),
            experts: experts.into(),
            clock: Clock::new(comm.stream()),
        })
    }

    /// Copies the tokens of this rank into the batches.
    pub(crate) fn write(&self, tokens: &[f32]) -> Result<()> {
        let mut rest = tokens;
        for batch in &self.batches {
            let (part, after) = rest.split_at(batch.x.len());
            let part: Vec<Bf16> = part.iter().map(|x| Bf16::from_f32(*x)).collect();
            batch.x.copy_from(&part)?;
            rest = after;
        }
        Ok(())
    }

    /// Returns the results of this rank's tokens, as bits of bf16.
    pub(crate) fn read(&self) -> Result<Vec<u16>> {
        let mut results = Vec::new();
        for batch in &self.batches {
            results.extend(batch.out.to_vec::<Bf16>()?.iter().map(|x| x.0));
        }
        Ok(results)
    }

    /// Returns the times of the parts in the last run.
    pub(crate) fn times(&self) -> [Duration; PARTS] {
        self.clock.times()
    }

    /// Enqueues the layer on the communicator's stream. All ranks must call this in the same order.
    pub(crate) fn enqueue(&self) -> Result<()> {
        self.clock.start()?;
        match &*self.batches {
            [batch] => self.sequential(batch),
            [first, second] => self.overlapped(first, second),
            _ => unreachable!("Moe::new allows one or two micro-batches"),
        }
    }

    /// Captures the layer in a graph. Each replay reads the current tokens and routes them.
    pub(crate) fn capture(&self) -> Result<GraphExec> {
        self.comm.stream().begin_capture()?;
        let issued = self.enqueue();
        let graph = self.comm.stream().end_capture()?;
        issued?;
        graph.instantiate()
    }

    /// Enqueues the layer for one batch.
    fn sequential(&self, batch: &Batch) -> Result<()> {
        self.route(batch)?;
        let received = batch.moe.dispatch(&batch.x, &batch.ids, &batch.weights)?;
        self.clock.lap(Part::Dispatch)?;
        self.run_experts(batch, &received)?;
        batch.moe.combine(&batch.y, &received, &batch.out)?;
        self.clock.lap(Part::Combine)
    }

    /// Enqueues the layer for two micro-batches. While a rank computes experts of one micro-batch,
    /// rows of the other micro-batch arrive.
    fn overlapped(&self, first: &Batch, second: &Batch) -> Result<()> {
        let received_first = self.send(first)?;
        let received_second = self.send(second)?;
        self.receive_and_return(first, &received_first)?;
        self.receive_and_return(second, &received_second)?;
        first.moe.combine_receive(&received_first, &first.out)?;
        second.moe.combine_receive(&received_second, &second.out)?;
        self.clock.lap(Part::Combine)
    }

    /// Enqueues the router and the sending half of dispatch.
    fn send(&self, batch: &Batch) -> Result<Dispatched> {
        self.route(batch)?;
        let received = batch
            .moe
            .dispatch_send(&batch.x, &batch.ids, &batch.weights)?;
        self.clock.lap(Part::Dispatch)?;
        Ok(received)
    }

    /// Enqueues the receiving half of dispatch, the experts, and the sending half of combine.
    fn receive_and_return(&self, batch: &Batch, received: &Dispatched) -> Result<()> {
        batch.moe.dispatch_receive(received)?;
        self.clock.lap(Part::Dispatch)?;
        self.run_experts(batch, received)?;
        batch.moe.combine_send(&batch.y, received)?;
        self.clock.lap(Part::Combine)
    }

    /// Enqueues the router. A host function may copy from and to tensors: it does not wait for its
    /// own stream.
    fn route(&self, batch: &Batch) -> Result<()> {
        let (router, hidden) = (Arc::clone(&self.router), self.moe.config().hidden);
        let (x, ids, weights) = (batch.x.clone(), batch.ids.clone(), batch.weights.clone());
        let call = move || {
            let x: Vec<f32> = x.to_vec::<Bf16>()?.into_iter().map(Bf16::to_f32).collect();
            let selected = x
                .chunks_exact(hidden)
                .flat_map(|token| router.select(token));
            let (selected_ids, selected_weights): (Vec<i32>, Vec<f32>) = selected
                .map(|selection| (selection.expert as i32, selection.weight))
                .unzip();
            ids.copy_from(&selected_ids)?;
            weights.copy_from(&selected_weights)
        };
        self.comm.stream().host_fn(Arc::new(call))?;
        self.clock.lap(Part::Router)
    }

    /// Enqueues the experts of this rank.
    fn run_experts(&self, batch: &Batch, received: &Dispatched) -> Result<()> {
        let experts = Arc::clone(&self.experts);
        let (received, y) = (received.clone(), batch.y.clone());
        let call = move || experts::run(&experts, &received, &y);
        self.comm.stream().host_fn(Arc::new(call))?;
        self.clock.lap(Part::Experts)
    }

    /// Frees the memory that the peers can write. All ranks must call this together.
    pub(crate) fn free(self) -> Result<()> {
        self.moe.free()
    }
}
