//! A mix of all operations and of user kernels, issued in a fixed order. The inputs change each
//! round, and every output element is checked.

use fusewire::testing::reference;
use fusewire::{
    CallOptions, Communicator, Compare, DType, Error, Norm, ReduceOp, Result, SignalUpdate, Tensor,
    VocabParallel, Window, WindowOptions,
};
use fusewire_kernels::one_sided::RingPut;
use vocab_argmax::{VOCAB_ARGMAX, VocabArgmax};

use crate::device::tensor;
use crate::rng::Rng;
use crate::vocab;

/// Number of elements that a rank contributes to most operations.
const N: usize = 12;
/// Shape of the fused norm and of the logits.
const ROWS: usize = 2;
const HIDDEN: usize = 8;
const COLUMNS: usize = 5;
/// Number of greatest logits that sampling selects per row.
const TOP: usize = 3;
/// Value of outputs before each round.
const POISON: i64 = -0x5bad_5bad_5bad_5bad;
const EPSILON: f32 = 1e-5;

/// A part of a tensor: first element and number of elements.
type TensorRange = (usize, usize);

/// Allocates parts of a tensor in sequence.
#[derive(Default)]
struct RangeAllocator(usize);

impl RangeAllocator {
    fn next(&mut self, count: usize) -> TensorRange {
        // Fused norms require an alignment of 16 bytes on a GPU.
        let at = self.0.next_multiple_of(8);
        self.0 = at + count;
        (at, count)
    }
}

/// One rank's buffers. All integers are in one tensor, all floats in a second, and all words in a
/// third, so a round needs only three copies from the host and three copies to the host.
#[derive(Debug)]
pub struct Mix {
    comm: Communicator,
    integers: Tensor,
    floats: Tensor,
    words: Tensor,
    window: Window,
    /// Target of the library's put by a kernel.
    pushed: Window,
    /// True if an image with the kernel of the crate `vocab-argmax` was found.
    argmax: bool,
}

/// Parts of the tensor of integers, for `n` ranks.
struct Integers {
    x: TensorRange,
    sent: TensorRange,
    one_hop: TensorRange,
    packets: TensorRange,
    two_hops: TensorRange,
    gathered: TensorRange,
    scattered: TensorRange,
    exchanged: TensorRange,
    v: TensorRange,
    pair: TensorRange,
    ring: TensorRange,
    got: TensorRange,
    all: usize,
}

impl Integers {
    fn new(n: usize) -> Self {
        let mut parts = RangeAllocator::default();
        let mut one = |rows: usize| parts.next(rows * N);
        let mut this = Self {
            x: one(1),
            sent: one(1),
            one_hop: one(1),
            packets: one(1),
            two_hops: one(1),
            gathered: one(n),
            scattered: one(1),
            exchanged: one(n),
            v: one(n),
            pair: one(1),
            ring: one(1),
            got: one(1),
            all: 0,
        };
        this.all = parts.0;
        this
    }
}

/// Parts of the tensor of floats.
struct Floats {
    input: TensorRange,
    residual: TensorRange,
    weight: TensorRange,
    logits: TensorRange,
    output: TensorRange,
    sums: TensorRange,
    all: usize,
}

impl Floats {
    fn new() -> Self {
        let mut parts = RangeAllocator::default();
        let mut this = Self {
            input: parts.next(ROWS * HIDDEN),
            residual: parts.next(ROWS * HIDDEN),
            weight: parts.next(HIDDEN),
            logits: parts.next(ROWS * COLUMNS),
            output: parts.next(ROWS * HIDDEN),
            sums: parts.next(ROWS),
            all: 0,
        };
        this.all = parts.0;
        this
    }
}

/// Parts of the tensor of words.
struct Words {
    splits: TensorRange,
    keys: TensorRange,
    winners: TensorRange,
    top: TensorRange,
    source: TensorRange,
    all: usize,
}

impl Words {
    fn new(n: usize) -> Self {
        let mut parts = RangeAllocator::default();
        let mut this = Self {
            splits: parts.next(2 * n),
            keys: parts.next(ROWS),
            winners: parts.next(ROWS),
            top: parts.next(ROWS * TOP),
            source: parts.next(N),
            all: 0,
        };
        this.all = parts.0;
        this
    }
}

/// Inputs of all ranks in a round.
struct Round {
    x: Vec<Vec<i64>>,
    floats: Vec<Vec<f32>>,
    /// `splits[a][b]` is the number of elements that rank a sends to rank b.
    splits: Vec<Vec<usize>>,
}

impl Round {
    fn new(n: usize, round: u64) -> Self {
        let mut rng = Rng::new(round);
        let numbers = |rng: &mut Rng| (0..N).map(|_| rng.bits() as i64 >> 8).collect();
        let floats = |rng: &mut Rng| {
            let small = |rng: &mut Rng| rng.below(64) as f32 - 31.5;
            (0..Floats::new().all).map(|_| small(rng)).collect()
        };
        Self {
            x: (0..n).map(|_| numbers(&mut rng)).collect(),
            floats: (0..n).map(|_| floats(&mut rng)).collect(),
            splits: (0..n)
                .map(|_| (0..n).map(|_| rng.pick(&[0, 0, 1, 5, N])).collect())
                .collect(),
        }
    }
}

impl Round {
    /// Returns the words that a rank puts by a kernel.
    fn words(&self, rank: usize) -> Vec<u64> {
        self.x[rank].iter().map(|x| *x as u64).collect()
    }
}

/// Returns a part of a tensor's contents.
fn part<T>(values: &[T], (at, count): TensorRange) -> &[T] {
    &values[at..at + count]
}

impl Mix {
    /// Allocates the buffers. All ranks of `comm` must call this function. The communicator must
    /// have at least two ranks and one block per launch.
    ///
    /// # Errors
    /// Returns the errors of [`Communicator::alloc`].
    pub fn new(comm: &Communicator) -> Result<Self> {
        let n = comm.size() as usize;
        let argmax = comm.warm_up_kernel(&VOCAB_ARGMAX);
        let argmax = match argmax {
            Ok(()) => true,
            // Without that image, the mix launches only one user kernel: `RING_PUT`, which the
            // library ships.
            Err(Error::Image { .. }) => false,
            Err(error) => return Err(error),
        };
        let words = tensor(DType::U64, Words::new(n).all)?;
        Ok(Self {
            integers: comm.alloc(DType::I64, Integers::new(n).all)?,
            floats: comm.alloc(DType::F32, Floats::new().all)?,
            words,
            window: comm.alloc_window(DType::I64, N, WindowOptions::default())?,
            pushed: comm.alloc_window(DType::U64, N, WindowOptions::default())?,
            comm: comm.clone(),
            argmax,
        })
    }

    /// Returns true if the mix launches the kernel of the crate `vocab-argmax`. On a GPU, this
    /// kernel needs an image.
    pub fn has_argmax(&self) -> bool {
        self.argmax
    }

    fn integers(&self, (at, count): TensorRange) -> Result<Tensor> {
        self.integers.slice(at, count)
    }

    fn floats(&self, (at, count): TensorRange) -> Result<Tensor> {
        self.floats.slice(at, count)
    }

    fn words(&self, (at, count): TensorRange) -> Result<Tensor> {
        self.words.slice(at, count)
    }

    /// Enqueues every operation once on the stream of `comm`. `comm` must be the communicator that
    /// [`Mix::new`] received, but may use another stream.
    ///
    /// # Errors
    /// Returns the first error of an operation.
    pub fn issue(&self, comm: &Communicator) -> Result<()> {
        let n = comm.size() as usize;
        let at = Integers::new(n);
        let (me, last) = (comm.rank(), comm.size() - 1);
        let (next, before) = ((me + 1) % comm.size(), (me + last) % comm.size());
        let by = |name| comm.with_options(&CallOptions::new().hint("algorithm", name));
        let x = self.integers(at.x)?;
        let gathered = self.integers(at.gathered)?;
        by("signal")?.all_reduce_into_async(&self.integers(at.one_hop)?, &x, ReduceOp::Sum)?;
        by("packet")?.all_reduce_into_async(&self.integers(at.packets)?, &x, ReduceOp::Sum)?;
        by("two_shot")?.all_reduce_into_async(&self.integers(at.two_hops)?, &x, ReduceOp::Max)?;
        comm.all_gather_single_async(&gathered, &x)?;
        comm.reduce_scatter_single_async(
            &self.integers(at.scattered)?,
            &gathered,
            ReduceOp::BitXor,
        )?;
        comm.broadcast_async(&self.integers(at.sent)?, last)?;
        comm.all_to_all_single_async(&self.integers(at.exchanged)?, &gathered)?;
        let splits = self.words(Words::new(n).splits)?;
        let (receive, send) = (splits.slice(0, n)?, splits.slice(n, n)?);
        comm.all_to_all_v_single_async(&self.integers(at.v)?, &gathered, &receive, &send)?;
        let pair = self.integers(at.pair)?;
        match me {
            0 => {
                comm.send_async(&x, 1)?;
                comm.recv_async(&pair, 1)?;
            }
            1 => {
                comm.recv_async(&pair, 0)?;
                comm.send_async(&x, 0)?;
            }
            _ => {}
        }
        let mut batch = comm.batch_op_create();
        batch.send(&x, next)?;
        batch.recv(&self.integers(at.ring)?, before)?;
        batch.issue_async()?;

        // One-sided operations. The last two calls reset the signal to zero, so every replay starts
        // from the same state.
        let window = self.window.on(comm.stream());
        window.put_async(&x, next, 0)?;
        window.signal_async(next, 0, SignalUpdate::Set(1))?;
        window.wait_signal_async(0, Some(before), Compare::Equal, 1)?;
        window.get_async(&self.integers(at.got)?, me, 0)?;
        comm.barrier_async()?;
        window.signal_async(next, 0, SignalUpdate::Set(0))?;
        window.wait_signal_async(0, Some(before), Compare::Equal, 0)?;

        self.issue_kernels(comm)
    }

    /// Enqueues the fused norm, sampling, and user kernels.
    fn issue_kernels(&self, comm: &Communicator) -> Result<()> {
        let n = comm.size() as usize;
        let (floats, words) = (Floats::new(), Words::new(n));
        let (input, output) = (self.floats(floats.input)?, self.floats(floats.output)?);
        let (residual, weight) = (self.floats(floats.residual)?, self.floats(floats.weight)?);
        let norm = Norm::rms(&output, &input, &weight, EPSILON).with_residual(&residual);
        comm.all_reduce_norm_async(&norm)?;
        let (logits, sums) = (self.floats(floats.logits)?, self.floats(floats.sums)?);
        let top = self.words(words.top)?;
        comm.vocab_parallel_async(
            &VocabParallel::new(&logits, ROWS, n * COLUMNS)
                .with_top_k(TOP, &top)
                .with_log_sum_exp(&sums),
        )?;

        let source = self.words(words.source)?;
        let arguments = RingPut {
            window: (&self.pushed).into(),
            source: (&source).into(),
        };
        comm.kernel(arguments).blocks(1).enqueue()?;
        if !self.argmax {
            return Ok(());
        }
        let (keys, winners) = (self.words(words.keys)?, self.words(words.winners)?);
        let arguments = VocabArgmax {
            logits: (&logits).into(),
            columns: COLUMNS as u64,
            keys: (&keys).into(),
            winners: (&winners).into(),
        };
        comm.kernel(arguments).enqueue().map(drop)
    }

    /// Writes the inputs of `round`. All operations that were issued earlier must have completed.
    ///
    /// # Errors
    /// Returns the errors of [`Tensor::copy_from`].
    pub fn fill(&self, round: u64) -> Result<()> {
        let (n, me) = (self.comm.size() as usize, self.comm.rank() as usize);
        let all = Round::new(n, round);
        let at = Integers::new(n);
        let mut integers = vec![POISON; at.all];
        integers[at.x.0..][..N].copy_from_slice(&all.x[me]);
        integers[at.sent.0..][..N].copy_from_slice(&all.x[me]);
        self.integers.copy_from(&integers)?;
        let mut floats = all.floats[me].clone();
        floats[Floats::new().output.0..].fill(f32::NAN);
        self.floats.copy_from(&floats)?;
        let receive = (0..n).map(|from| all.splits[from][me] as u64);
        let send = all.splits[me].iter().map(|count| *count as u64);
        let words: Vec<u64> = receive.chain(send).collect();
        self.words(Words::new(n).splits)?.copy_from(&words)?;
        self.words(Words::new(n).source)?
            .copy_from(&all.words(me))?;
        self.pushed.tensor().copy_from(&[u64::MAX; N])
    }

    /// Checks the results of [`Mix::issue`] in `round`.
    ///
    /// # Errors
    /// Returns the errors of [`Tensor::to_vec`].
    ///
    /// # Panics
    /// Panics if a result is wrong.
    pub fn check(&self, round: u64) -> Result<()> {
        let (n, me) = (self.comm.size() as usize, self.comm.rank() as usize);
        let all = Round::new(n, round);
        let at = Integers::new(n);
        let seen = self.integers.to_vec::<i64>()?;
        let reduced = |op: fn(i64, i64) -> i64| -> Vec<i64> {
            let rows = all.x.iter().cloned();
            let both =
                |a: Vec<i64>, b: Vec<i64>| a.iter().zip(&b).map(|(a, b)| op(*a, *b)).collect();
            rows.reduce(both).expect("a rank")
        };
        let is = |what: &str, at: TensorRange, expected: &[i64]| {
            assert_eq!(
                part(&seen, at),
                expected,
                "{what} of rank {me}, round {round}"
            );
        };
        let (sum, whole) = (reduced(|a, b| a + b), all.x.concat());
        let before = (me + n - 1) % n;
        is("the input", at.x, &all.x[me]);
        is("all_reduce in one hop", at.one_hop, &sum);
        is("all_reduce by packets", at.packets, &sum);
        is("all_reduce in two hops", at.two_hops, &reduced(i64::max));
        is("all_gather", at.gathered, &whole);
        // Every rank passes the output of all_gather to reduce_scatter, so all inputs are equal.
        // The XOR of an odd number of equal rows is the row itself, and that of an even number is
        // zero.
        let odd = i64::from(n % 2 == 1);
        let xor: Vec<i64> = all.x[me].iter().map(|x| x * odd).collect();
        is("reduce_scatter", at.scattered, &xor);
        is("broadcast", at.sent, &all.x[n - 1]);
        let exchanged = all.x[me].repeat(n);
        is("all_to_all", at.exchanged, &exchanged);
        let mut v = Vec::new();
        for from in &all.splits {
            let start: usize = from[..me].iter().sum();
            v.extend_from_slice(&whole[start..start + from[me]]);
        }
        v.resize(n * N, POISON);
        is("all_to_all_v", at.v, &v);
        if me < 2 {
            is("recv", at.pair, &all.x[1 - me]);
        }
        is("batch", at.ring, &all.x[before]);
        is("get after put", at.got, &all.x[before]);
        let pushed = self.pushed.tensor().to_vec::<u64>()?;
        assert_eq!(pushed, all.words(before), "put by a kernel, round {round}");
        self.check_floats(&all, round)
    }

    fn check_floats(&self, all: &Round, round: u64) -> Result<()> {
        let (n, me) = (self.comm.size() as usize, self.comm.rank() as usize);
        let (floats, words) = (Floats::new(), Words::new(n));
        let bytes = |values: &[f32]| reference::narrow(DType::F32, values);
        let inputs: Vec<Vec<u8>> = all
            .floats
            .iter()
            .map(|values| bytes(part(values, floats.input)))
            .collect();
        let sum = reference::reduce(DType::F32, ReduceOp::Sum, &[], &inputs);
        let residual = bytes(part(&all.floats[me], floats.residual));
        let weight = bytes(part(&all.floats[me], floats.weight));
        let (normed, _) = reference::rms_norm(DType::F32, &sum, &residual, &weight, EPSILON);
        let seen = self.floats.to_vec::<f32>()?;
        let got = bytes(part(&seen, floats.output));
        let difference = reference::first_difference(&normed, &got, DType::F32);
        assert_eq!(difference, None, "fused norm of rank {me}, round {round}");
        self.check_sampling(all, round, part(&seen, floats.sums))?;
        if !self.argmax {
            return Ok(());
        }
        let winners = self.words(words.winners)?.to_vec::<u64>()?;
        for (row, winner) in winners.into_iter().enumerate() {
            let logit = |column: usize| {
                let values = part(&all.floats[column / COLUMNS], floats.logits);
                values[row * COLUMNS + column % COLUMNS]
            };
            let best = (0..n * COLUMNS)
                .reduce(|a, b| if logit(b) > logit(a) { b } else { a })
                .expect("a column");
            assert_eq!(winner, best as u64, "argmax of rank {me}, round {round}");
        }
        Ok(())
    }

    fn check_sampling(&self, all: &Round, round: u64, sums: &[f32]) -> Result<()> {
        let (n, me) = (self.comm.size() as usize, self.comm.rank());
        let (at, words) = (Floats::new().logits, Words::new(n));
        let top = self.words(words.top)?.to_vec::<u64>()?;
        let shards: Vec<_> = (0..n).map(|r| r * COLUMNS..(r + 1) * COLUMNS).collect();
        for row in 0..ROWS {
            let of_rank = |floats: &Vec<f32>| part(floats, at)[row * COLUMNS..][..COLUMNS].to_vec();
            let logits: Vec<f32> = all.floats.iter().flat_map(of_rank).collect();
            let want = vocab::expected(&logits, &shards, TOP);
            let found: Vec<u32> = part(&top, (row * TOP, TOP))
                .iter()
                .map(|column| u32::try_from(*column).expect("a column"))
                .collect();
            // The sampling call does not request the values of the logits, so the expected values
            // are passed in their place.
            let sum = Some(sums[row].to_bits());
            let difference = vocab::difference(&want, &found, &want.values, sum);
            assert_eq!(difference, None, "row {row} of rank {me}, round {round}");
        }
        Ok(())
    }
}
