//! The part of the example that runs on the host: memory, launches, and a reference. The program
//! and the tests share it.

use fusewire::{Communicator, DType, GraphExec, Queue, Result, Tensor};
use moe_toy::{COMBINE, Combine, DISPATCH, Dispatch, NO_EXPERT, RUN_EXPERTS, RunExperts};

/// Sizes of a layer, equal on all ranks. `tokens` is the greatest number of tokens of a rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) tokens: usize,
    pub(crate) hidden: usize,
    pub(crate) k: usize,
    pub(crate) per_rank: u32,
}

/// Tokens of a rank, and the expert and the weight of each item.
#[derive(Debug)]
pub(crate) struct Input {
    pub(crate) x: Vec<f32>,
    pub(crate) ids: Vec<u32>,
    pub(crate) weights: Vec<f32>,
}

impl Input {
    /// Returns `tokens` tokens with random elements and weights, and the experts `id(item)`.
    pub(crate) fn new(shape: Shape, tokens: usize, seed: u64, id: impl Fn(usize) -> u32) -> Self {
        // From -1 to 1, in steps of 2^-23.
        let number = |seed, index| (random(seed, index) >> 8) as f32 / (1 << 23) as f32 - 1.0;
        let (elements, items) = (0..tokens * shape.hidden, 0..tokens * shape.k);
        Self {
            x: elements.map(|index| number(seed, index)).collect(),
            ids: items.clone().map(id).collect(),
            weights: items.map(|item| number(!seed, item)).collect(),
        }
    }
}

/// Returns a number that looks random, and depends only on `seed` and `index`.
pub(crate) fn random(seed: u64, index: usize) -> u32 {
    let mut x = (seed << 32 ^ index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    (x.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32
}

/// Results of a rank: the results of its tokens, the sums of its experts, and the number of rows
/// from each rank. Floats are stored as bits, so a comparison finds every difference.
#[derive(Debug, PartialEq)]
pub(crate) struct Output {
    pub(crate) out: Vec<u32>,
    pub(crate) sums: Vec<u32>,
    pub(crate) rows: Vec<u32>,
}

fn bits(values: Vec<f32>) -> Vec<u32> {
    values.into_iter().map(f32::to_bits).collect()
}

/// Returns the results of `rank`. The host performs the operations of the kernels in the same
/// order, so the results have the same bits.
pub(crate) fn expected(shape: Shape, inputs: &[Input], rank: u32) -> Output {
    let (hidden, k, per_rank) = (shape.hidden, shape.k, shape.per_rank);
    let own = &inputs[rank as usize];
    let mut out = vec![0f32; own.x.len()];
    for (at, sum) in out.iter_mut().enumerate() {
        let token = at / hidden;
        for item in token * k..(token + 1) * k {
            let id = own.ids[item];
            if id != NO_EXPERT {
                *sum += own.weights[item] * (own.x[at] * (id + 1) as f32);
            }
        }
    }
    let (mut sums, mut rows) = (vec![0f32; per_rank as usize], vec![0; inputs.len()]);
    for (source, input) in inputs.iter().enumerate() {
        for (item, id) in input.ids.iter().enumerate() {
            if *id != NO_EXPERT && id / per_rank == rank {
                let first = item / k * hidden;
                for x in &input.x[first..first + hidden] {
                    sums[(id % per_rank) as usize] += x;
                }
                rows[source] += 1;
            }
        }
    }
    let (out, sums) = (bits(out), bits(sums));
    Output { out, sums, rows }
}

/// Memory of a layer on a rank.
pub(crate) struct Moe<'c> {
    comm: &'c Communicator,
    shape: Shape,
    to_experts: Queue,
    to_tokens: Queue,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    places: Tensor,
    received: Tensor,
    experts: Tensor,
    counts: Tensor,
    sums: Tensor,
    out: Tensor,
}

impl<'c> Moe<'c> {
    /// Allocates the memory of a layer, and loads the kernels. All ranks together.
    pub(crate) fn new(comm: &'c Communicator, shape: Shape) -> Result<Self> {
        let all_experts = comm.size() * shape.per_rank;
        assert!(
            all_experts < 1 << 24,
            "an f32 holds the number of an expert"
        );
        let blocks = comm.options().blocks as usize;
        let regions = comm.size() as usize * blocks;
        // A block may send all its items to one rank.
        let batch = shape.tokens.div_ceil(blocks) * shape.k;
        let to_experts = comm.alloc_queue(DType::F32, shape.hidden + 1, batch)?;
        let to_tokens = comm.alloc_queue(DType::F32, shape.hidden, batch)?;
        let rows = regions * to_experts.batch();
        let (elements, items) = (shape.tokens * shape.hidden, shape.tokens * shape.k);
        let moe = Self {
            comm,
            shape,
            to_experts,
            to_tokens,
            x: comm.tensor(DType::F32, elements)?,
            ids: comm.tensor(DType::U32, items)?,
            weights: comm.tensor(DType::F32, items)?,
            places: comm.tensor(DType::U32, items)?,
            received: comm.tensor(DType::F32, rows * shape.hidden)?,
            experts: comm.tensor(DType::U32, rows)?,
            counts: comm.tensor(DType::U32, regions)?,
            sums: comm.tensor(DType::F32, shape.per_rank as usize)?,
            out: comm.tensor(DType::F32, elements)?,
        };
        // On a GPU, loading a kernel may wait for running kernels. All ranks therefore load the
        // kernels before the first of them launches one.
        comm.warm_up_kernel(&DISPATCH)?;
        comm.warm_up_kernel(&RUN_EXPERTS)?;
        comm.warm_up_kernel(&COMBINE)?;
        comm.barrier()?;
        Ok(moe)
    }

    /// Computes the layer once. All ranks together.
    pub(crate) fn run(&self, input: &Input) -> Result<Output> {
        let tokens = input.ids.len() / self.shape.k;
        self.write(input)?;
        self.enqueue(tokens)?;
        self.comm.synchronize()?;
        self.read(tokens)
    }

    /// Captures the kernels for `tokens` tokens as a graph. [`Moe::write`] sets the input of a
    /// replay, and [`Moe::read`] returns its results.
    pub(crate) fn capture(&self, tokens: usize) -> Result<GraphExec> {
        self.comm.stream().begin_capture()?;
        let enqueued = self.enqueue(tokens);
        let graph = self.comm.stream().end_capture()?;
        enqueued?;
        graph.instantiate()
    }

    /// Copies the input to the device.
    pub(crate) fn write(&self, input: &Input) -> Result<()> {
        let Input { x, ids, weights } = input;
        self.x.slice(0, x.len())?.copy_from(x)?;
        self.ids.slice(0, ids.len())?.copy_from(ids)?;
        self.weights.slice(0, weights.len())?.copy_from(weights)
    }

    /// Returns the results for `tokens` tokens.
    pub(crate) fn read(&self, tokens: usize) -> Result<Output> {
        let out = self.out.slice(0, tokens * self.shape.hidden)?;
        let counts = self.counts.to_vec::<u32>()?;
        let of_rank = counts.chunks(self.comm.options().blocks as usize);
        Ok(Output {
            out: bits(out.to_vec()?),
            sums: bits(self.sums.to_vec()?),
            rows: of_rank.map(|counts| counts.iter().sum()).collect(),
        })
    }

    /// Frees the queues. All ranks together.
    pub(crate) fn free(self) -> Result<()> {
        self.to_experts.free()?;
        self.to_tokens.free()
    }

    /// Enqueues the three kernels for the first `tokens` tokens.
    fn enqueue(&self, tokens: usize) -> Result<()> {
        let (hidden, k, per_rank) = (self.shape.hidden, self.shape.k, self.shape.per_rank);
        let of_tokens = |tensor: &Tensor| tensor.slice(0, tokens * hidden);
        let of_items = |tensor: &Tensor| tensor.slice(0, tokens * k);
        let (x, out) = (of_tokens(&self.x)?, of_tokens(&self.out)?);
        let (ids, places) = (of_items(&self.ids)?, of_items(&self.places)?);
        let weights = of_items(&self.weights)?;
        let dispatch = Dispatch {
            rows: (&self.to_experts).into(),
            x: (&x).into(),
            ids: (&ids).into(),
            places: (&places).into(),
            received: (&self.received).into(),
            experts: (&self.experts).into(),
            counts: (&self.counts).into(),
            k: k as u32,
            per_rank,
        };
        let run_experts = RunExperts {
            received: (&self.received).into(),
            experts: (&self.experts).into(),
            counts: (&self.counts).into(),
            sums: (&self.sums).into(),
            hidden: hidden as u32,
            batch: self.to_experts.batch() as u32,
            per_rank,
        };
        let combine = Combine {
            rows: (&self.to_tokens).into(),
            received: (&self.received).into(),
            counts: (&self.counts).into(),
            ids: (&ids).into(),
            places: (&places).into(),
            weights: (&weights).into(),
            out: (&out).into(),
            k: k as u32,
            per_rank,
        };
        self.comm.kernel(dispatch).enqueue()?;
        self.comm.kernel(run_experts).enqueue()?;
        self.comm.kernel(combine).enqueue()?;
        Ok(())
    }
}
