//! The pair of layers, in sequence and overlapped.

use core::fmt;
use std::time::Instant;

use fusewire::{
    Communicator, DType, GraphExec, ReadyFlags, ReduceOp, Result, Stream, Tensor, Work,
};

use crate::Gemm;

/// Sizes of the layers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Tokens per rank.
    pub(crate) tokens: usize,
    /// Elements per token.
    pub(crate) hidden: usize,
    /// Columns of the inner layer per rank.
    pub(crate) inner: usize,
    /// Tokens per chunk.
    pub(crate) chunk: usize,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} tokens a rank, {} to {} to {}, chunks of {}",
            self.tokens, self.hidden, self.inner, self.hidden, self.chunk
        )
    }
}

/// Results of a benchmark.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    /// Greatest difference between the results of an overlapped and a sequential call, relative to
    /// the greatest value.
    pub(crate) eager: f32,
    /// Greatest difference between the results of a replay and a sequential call, relative to the
    /// greatest value.
    pub(crate) replayed: f32,
    /// Median time of the sequential calls, in ms.
    pub(crate) sequential_ms: f64,
    pub(crate) overlapped_ms: f64,
    pub(crate) replay_ms: f64,
}

impl Outcome {
    /// Returns the greater value of each field.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            eager: self.eager.max(other.eager),
            replayed: self.replayed.max(other.replayed),
            sequential_ms: self.sequential_ms.max(other.sequential_ms),
            overlapped_ms: self.overlapped_ms.max(other.overlapped_ms),
            replay_ms: self.replay_ms.max(other.replay_ms),
        }
    }

    /// Returns true if the results differ by no more than a different summation order of the GEMMs
    /// can explain.
    pub(crate) fn is_right(&self) -> bool {
        self.eager < 1e-4 && self.replayed < 1e-4
    }
}

/// The layers on one rank.
pub(crate) struct Layer<'a> {
    /// Communicator of the overlapped operations, with a separate stream.
    comm: Communicator,
    /// Stream of the GEMMs.
    stream: Stream,
    gemm: &'a dyn Gemm,
    shape: Shape,
    /// Tokens of this rank. `gathered` holds the tokens of all ranks.
    x: Tensor,
    gathered: Tensor,
    /// This rank's columns of the first layer's weights. `v` holds this rank's rows of the second
    /// layer's weights.
    w: Tensor,
    v: Tensor,
    /// Output of the first layer. `z` is this rank's partial sum of the second layer's output.
    y: Tensor,
    z: Tensor,
    /// This rank's tokens of the result.
    out: Tensor,
    chunks: ReadyFlags,
    tiles: ReadyFlags,
}

/// Returns numbers between -0.5 and 0.5 that depend on `seed`.
fn numbers(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32 - 0.5
    };
    core::iter::repeat_with(next).take(count).collect()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

impl<'a> Layer<'a> {
    pub(crate) fn new(comm: &Communicator, gemm: &'a dyn Gemm, shape: Shape) -> Result<Self> {
        let all = shape.tokens * comm.size() as usize;
        let seed = u64::from(comm.rank()) + 100;
        let Shape { hidden, inner, .. } = shape;
        // Peers access only tensors in windows. The other tensors are local.
        let (window, own) = (
            |count| comm.alloc(DType::F32, count),
            |count| comm.tensor(DType::F32, count),
        );
        let (w, v) = (own(hidden * inner)?, own(inner * hidden)?);
        w.copy_from(&numbers(seed, hidden * inner))?;
        v.copy_from(&numbers(seed + 1000, inner * hidden))?;
        let words = comm.chunks(shape.tokens, shape.chunk);
        Ok(Self {
            stream: Stream::on_device(comm.device())?,
            gemm,
            shape,
            x: window(shape.tokens * hidden)?,
            gathered: own(all * hidden)?,
            w,
            v,
            y: own(all * inner)?,
            z: window(all * hidden)?,
            out: own(shape.tokens * hidden)?,
            chunks: comm.ready_flags(words)?,
            tiles: comm.ready_flags(words)?,
            comm: comm.on(&Stream::on_device(comm.device())?),
        })
    }

    /// Returns the first token and the number of tokens of chunk `index`. Chunks are numbered rank
    /// by rank, like the ready flags.
    fn piece(&self, index: usize) -> (usize, usize) {
        let Shape { tokens, chunk, .. } = self.shape;
        let per_rank = tokens.div_ceil(chunk);
        let start = index % per_rank * chunk;
        (index / per_rank * tokens + start, chunk.min(tokens - start))
    }

    /// Enqueues `y = x * w` for `count` tokens, starting at token `first`.
    fn up(&self, first: usize, count: usize) -> Result<()> {
        let Shape { hidden, inner, .. } = self.shape;
        let x = self.gathered.slice(first * hidden, count * hidden)?;
        let y = self.y.slice(first * inner, count * inner)?;
        self.gemm
            .enqueue(&self.stream, [&x, &self.w, &y], [count, hidden, inner])
    }

    /// Enqueues `z = y * v` for `count` tokens, starting at token `first`.
    fn down(&self, first: usize, count: usize) -> Result<()> {
        let Shape { hidden, inner, .. } = self.shape;
        let y = self.y.slice(first * inner, count * inner)?;
        let z = self.z.slice(first * hidden, count * hidden)?;
        self.gemm
            .enqueue(&self.stream, [&y, &self.v, &z], [count, inner, hidden])
    }

    /// Enqueues collectives and GEMMs in sequence, on one stream.
    fn sequential(&self) -> Result<Work> {
        let comm = self.comm.on(&self.stream);
        let all = self.shape.tokens * comm.size() as usize;
        comm.all_gather_single_async(&self.gathered, &self.x)?;
        self.up(0, all)?;
        self.down(0, all)?;
        comm.reduce_scatter_single_async(&self.out, &self.z, ReduceOp::Sum)
    }

    /// Enqueues the GEMMs on one stream and the collectives on another.
    fn overlapped(&self) -> Result<Work> {
        let (comm, stream) = (&self.comm, &self.stream);
        let (ranks, me) = (comm.size() as usize, comm.rank() as usize);
        let Shape {
            tokens,
            hidden,
            chunk,
            ..
        } = self.shape;
        let (per_rank, span) = (tokens.div_ceil(chunk), chunk * hidden);
        let (x, gathered, words) = (&self.x, &self.gathered, &self.chunks);
        // SAFETY: the flags order the accesses of the GEMMs to chunks and tiles.
        let gather = unsafe { comm.all_gather_with_flags_async(stream, gathered, x, words, span) }?;
        // Enqueue the GEMMs in the order in which chunks arrive: first the chunks of this rank,
        // then those of the next ranks in the ring.
        for row in (0..ranks).map(|step| (me + step) % ranks) {
            for index in row * per_rank..(row + 1) * per_rank {
                self.chunks.stream_wait(stream, index)?;
                let (first, count) = self.piece(index);
                self.up(first, count)?;
            }
        }
        gather.wait(stream)?;
        let (out, z, tiles, sum) = (&self.out, &self.z, &self.tiles, ReduceOp::Sum);
        // SAFETY: the flags order the accesses of the GEMMs to chunks and tiles.
        let scatter =
            unsafe { comm.reduce_scatter_on_arrival_async(stream, out, z, tiles, span, 1, sum) }?;
        // Enqueue the GEMMs in the order in which the operation sends tiles: tile t of all rows,
        // then tile t + 1.
        for t in 0..per_rank {
            for index in (0..ranks).map(|row| row * per_rank + t) {
                let (first, count) = self.piece(index);
                self.down(first, count)?;
                self.tiles.stream_write(stream, index, 1)?;
            }
        }
        scatter.wait(stream)?;
        Ok(scatter)
    }

    /// Runs a call and returns its time in milliseconds.
    fn timed(&self, call: impl FnOnce() -> Result<()>) -> Result<f64> {
        self.comm.barrier()?;
        let start = Instant::now();
        call()?;
        self.stream.synchronize()?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }

    fn graph(&self) -> Result<GraphExec> {
        self.stream.begin_capture()?;
        let issued = self.overlapped();
        let graph = self.stream.end_capture()?;
        issued?;
        graph.instantiate()
    }

    /// Returns the greatest difference between `found` and `expected`, relative to the greatest
    /// value. Returns infinity if any element is NaN.
    fn difference(found: &[f32], expected: &[f32]) -> f32 {
        let greatest = expected.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let pairs = found.iter().zip(expected);
        let apart = pairs.fold(0.0_f32, |most, (a, b)| match (a - b).abs() {
            apart if apart.is_nan() => f32::INFINITY,
            apart => most.max(apart),
        });
        apart / greatest.max(f32::MIN_POSITIVE)
    }

    fn fill(&self, round: u64) -> Result<()> {
        let seed = round * 64 + u64::from(self.comm.rank());
        self.x.copy_from(&numbers(seed, self.x.len()))
    }

    /// Compares and times the sequential and the overlapped layers. All ranks must call this
    /// method.
    pub(crate) fn benchmark(&self, rounds: u32) -> Result<Outcome> {
        // Load the kernels of all libraries now, because loading may wait for the device. If an
        // operation on the device waited for a peer at that time, loading would deadlock.
        self.comm.warm_up()?;
        self.fill(0)?;
        self.sequential()?.wait_blocking()?;
        for index in 0..self.tiles.len() {
            let (first, count) = self.piece(index);
            self.up(first, count)?;
            self.down(first, count)?;
        }
        self.stream.synchronize()?;
        let expected = self.out.to_vec::<f32>()?;
        self.out.copy_from(&vec![f32::NAN; expected.len()])?;
        let work = self.overlapped()?;
        self.stream.synchronize()?;
        work.wait_blocking()?;
        let eager = Self::difference(&self.out.to_vec::<f32>()?, &expected);
        let (mut sequential, mut overlapped, mut replays) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            sequential.push(self.timed(|| self.sequential().map(drop))?);
            overlapped.push(self.timed(|| self.overlapped().map(drop))?);
        }
        let graph = self.graph()?;
        let mut replayed = 0.0_f32;
        for round in 1..=u64::from(rounds) {
            self.fill(round)?;
            replays.push(self.timed(|| graph.run(&self.stream))?);
            let found = self.out.to_vec::<f32>()?;
            self.sequential()?.wait_blocking()?;
            let difference = Self::difference(&found, &self.out.to_vec::<f32>()?);
            replayed = replayed.max(difference);
        }
        Ok(Outcome {
            eager,
            replayed,
            sequential_ms: median(sequential),
            overlapped_ms: median(overlapped),
            replay_ms: median(replays),
        })
    }
}
