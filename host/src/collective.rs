//! Collectives as values: [`Op`] has what the ranks agree on, [`Operands`] has this rank's buffers,
//! and a [`Collective`] is an operation with its buffers.

use fusewire_device::DType;
use fusewire_device::call::{Call, Operation};
use fusewire_device::element::ReductionCode;

use crate::algorithm::Algorithm;
use crate::digest::{self, mixed};
use crate::options::ReduceOp;
use crate::tensor::{Input, Output, Tensor, TensorUse};

/// Root in the call word of an operation that has none.
const NO_ROOT: u16 = 0xffff;

/// An operation without its buffers: all that must be equal on all ranks.
///
/// Plans, backends and the check for mismatched calls use only these values. A `count` is a number
/// of elements: those of a row if the operation divides a buffer into one row per rank, otherwise
/// those of the buffer.
///
/// The enum is exhaustive, so that the compiler names every backend that lacks a new operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the enum's documentation explains the fields")]
pub enum Op {
    /// Reduces the inputs of all ranks. Every rank gets the result.
    AllReduce {
        count: usize,
        dtype: DType,
        reduction: ReductionCode,
    },
    /// Reduces the inputs of all ranks. The root gets the result.
    Reduce {
        count: usize,
        dtype: DType,
        reduction: ReductionCode,
        root: u32,
    },
    /// Reduces row r of the inputs of all ranks. Rank r gets the result.
    ReduceScatter {
        count: usize,
        dtype: DType,
        reduction: ReductionCode,
    },
    /// Copies the root's buffer to all ranks.
    Broadcast {
        count: usize,
        dtype: DType,
        root: u32,
    },
    /// Copies the input of rank r to row r of every output.
    AllGather { count: usize, dtype: DType },
    /// [`Op::AllGather`] with a row length for each rank. `count` is the sum of the lengths,
    /// `digest` is [`Op::digest`] of them, or 0 if they are in device memory.
    AllGatherV {
        count: usize,
        dtype: DType,
        digest: u64,
    },
    /// Copies row r of the root's input to rank r.
    Scatter {
        count: usize,
        dtype: DType,
        root: u32,
    },
    /// Copies the input of rank r to row r of the root's output.
    Gather {
        count: usize,
        dtype: DType,
        root: u32,
    },
    /// Copies row r of the input of rank s to row s of the output of rank r.
    AllToAll { count: usize, dtype: DType },
    /// [`Op::AllToAll`] with a row length for each pair of ranks.
    AllToAllV { dtype: DType },
    /// [`Op::AllGather`] that raises a flag per chunk of `chunk` elements.
    AllGatherWithFlags {
        count: usize,
        dtype: DType,
        chunk: usize,
    },
    /// [`Op::ReduceScatter`] that waits for each tile of `tile` elements of the input.
    ReduceScatterOnArrival {
        count: usize,
        dtype: DType,
        reduction: ReductionCode,
        tile: usize,
    },
    /// [`Op::AllReduce`] by sum of `rows` rows of `hidden` elements, fused with a norm of each row
    /// ([`crate::Norm`]). `row_bytes` is the size of the results of a row, and `digest` a hash of
    /// the kind of norm.
    AllReduceNorm {
        rows: usize,
        hidden: usize,
        dtype: DType,
        row_bytes: usize,
        digest: u64,
    },
    /// [`Op::AllReduceNorm`] of which each rank gets `rows` rows.
    ReduceScatterNorm {
        rows: usize,
        hidden: usize,
        dtype: DType,
        digest: u64,
    },
    /// The greatest logits and the log-sum-exp of `rows` rows of `vocabulary` logits, whose columns
    /// are split over the ranks ([`crate::VocabParallel`]). `digest` is a hash of the results that
    /// are computed.
    VocabParallel {
        rows: usize,
        vocabulary: usize,
        dtype: DType,
        digest: u64,
    },
    /// Sends the input to `peer`.
    Send {
        count: usize,
        dtype: DType,
        peer: u32,
    },
    /// Receives the output from `peer`.
    Recv {
        count: usize,
        dtype: DType,
        peer: u32,
    },
    /// Blocks until all ranks have called it.
    Barrier,
}

/// The fields of an [`Op`].
struct Fields {
    operation: Operation,
    count: usize,
    dtype: Option<DType>,
    reduction: Option<ReductionCode>,
    root: Option<u32>,
    /// Whatever else must be equal on all ranks.
    other: u64,
}

impl Op {
    #[inline(always)]
    const fn fields(&self) -> Fields {
        use Operation as Kind;
        let mut fields = Fields {
            operation: Kind::Barrier,
            count: 0,
            dtype: None,
            reduction: None,
            root: None,
            other: 0,
        };
        macro_rules! set {
            ($operation:expr, $count:expr, $dtype:expr $(, $field:ident = $value:expr)*) => {{
                fields.operation = $operation;
                fields.count = $count;
                fields.dtype = Some($dtype);
                $(fields.$field = $value;)*
            }};
        }
        match *self {
            Self::AllReduce {
                count,
                dtype,
                reduction,
            } => set!(Kind::AllReduce, count, dtype, reduction = Some(reduction)),
            Self::Reduce {
                count,
                dtype,
                reduction,
                root,
            } => set!(
                Kind::Reduce,
                count,
                dtype,
                reduction = Some(reduction),
                root = Some(root)
            ),
            Self::ReduceScatter {
                count,
                dtype,
                reduction,
            } => set!(
                Kind::ReduceScatter,
                count,
                dtype,
                reduction = Some(reduction)
            ),
            Self::Broadcast { count, dtype, root } => {
                set!(Kind::Broadcast, count, dtype, root = Some(root));
            }
            Self::AllGather { count, dtype } => set!(Kind::AllGather, count, dtype),
            Self::AllGatherV {
                count,
                dtype,
                digest,
            } => set!(Kind::AllGatherV, count, dtype, other = digest),
            Self::Scatter { count, dtype, root } => {
                set!(Kind::Scatter, count, dtype, root = Some(root));
            }
            Self::Gather { count, dtype, root } => {
                set!(Kind::Gather, count, dtype, root = Some(root));
            }
            Self::AllToAll { count, dtype } => set!(Kind::AllToAll, count, dtype),
            Self::AllToAllV { dtype } => set!(Kind::AllToAllV, 0, dtype),
            Self::AllGatherWithFlags {
                count,
                dtype,
                chunk,
            } => set!(
                Kind::AllGatherWithFlags,
                count,
                dtype,
                other = mixed(0, chunk as u64)
            ),
            Self::ReduceScatterOnArrival {
                count,
                dtype,
                reduction,
                tile,
            } => set!(
                Kind::ReduceScatterOnArrival,
                count,
                dtype,
                reduction = Some(reduction),
                other = mixed(0, tile as u64)
            ),
            Self::AllReduceNorm {
                rows,
                hidden,
                dtype,
                row_bytes,
                digest,
            } => set!(
                Kind::AllReduceNorm,
                rows.saturating_mul(hidden),
                dtype,
                other = mixed(mixed(digest, hidden as u64), row_bytes as u64)
            ),
            Self::ReduceScatterNorm {
                rows,
                hidden,
                dtype,
                digest,
            } => set!(
                Kind::ReduceScatterNorm,
                rows.saturating_mul(hidden),
                dtype,
                other = mixed(digest, hidden as u64)
            ),
            Self::VocabParallel {
                rows,
                vocabulary,
                dtype,
                digest,
            } => set!(
                Kind::VocabParallel,
                rows.saturating_mul(vocabulary),
                dtype,
                other = mixed(digest, vocabulary as u64)
            ),
            Self::Send { count, dtype, .. } => set!(Kind::Send, count, dtype),
            Self::Recv { count, dtype, .. } => set!(Kind::Recv, count, dtype),
            Self::Barrier => {}
        }
        fields
    }

    /// Returns the kind of the operation.
    #[inline]
    pub const fn operation(&self) -> Operation {
        self.fields().operation
    }

    /// Returns the name of the operation, for messages.
    pub const fn name(&self) -> &'static str {
        self.operation().name()
    }

    /// Returns the number of elements: of a row if there is one per rank, otherwise of the buffer.
    /// Returns 0 if each pair of ranks has a number of its own.
    #[inline]
    pub const fn count(&self) -> usize {
        self.fields().count
    }

    /// Returns the type of the elements, or `None` for a barrier.
    #[inline]
    pub const fn dtype(&self) -> Option<DType> {
        self.fields().dtype
    }

    /// Returns the reduction, if the operation reduces.
    #[inline]
    pub const fn reduction(&self) -> Option<ReductionCode> {
        self.fields().reduction
    }

    /// Returns the root, if the operation has one.
    #[inline]
    pub const fn root(&self) -> Option<u32> {
        self.fields().root
    }

    /// Returns the peer of a send or receive.
    #[inline]
    pub const fn peer(&self) -> Option<u32> {
        match *self {
            Self::Send { peer, .. } | Self::Recv { peer, .. } => Some(peer),
            _ => None,
        }
    }

    /// Returns true if the operation has more operands than [`Operands`]: flags and a second
    /// stream, or those of a fused operation. Only Fusewire's kernels run it. It is made by the
    /// method of the same name of [`crate::Communicator`].
    pub(crate) const fn is_fused(&self) -> bool {
        self.operation().is_fused()
    }

    /// Returns the number of bytes that [`Op::count`] elements have.
    #[inline]
    pub const fn bytes(&self) -> usize {
        match self.dtype() {
            Some(dtype) => self.count().saturating_mul(dtype.size()),
            None => 0,
        }
    }

    /// Returns the number of rows that a rank stages at once.
    #[inline]
    pub(crate) const fn staged_rows(&self, ranks: u32) -> u32 {
        match self {
            Self::ReduceScatter { .. }
            | Self::ReduceScatterOnArrival { .. }
            | Self::Scatter { .. }
            | Self::AllToAll { .. }
            | Self::AllToAllV { .. } => ranks,
            _ => 1,
        }
    }

    /// Returns the digest of row lengths for [`Op::AllGatherV`]. It does not depend on the compiler
    /// or the machine.
    pub fn digest(counts: &[u64]) -> u64 {
        digest::of_words(counts)
    }

    /// Returns the call word of the operation: its description, and a fingerprint of all that must
    /// be equal on all ranks. `tag` is that of a send or receive.
    #[inline]
    pub(crate) const fn call(&self, algorithm: Algorithm, tag: u32) -> Call {
        if let Some(peer) = self.peer() {
            return self.point_call(peer, tag);
        }
        let fields = self.fields();
        Call::new(
            fields.operation,
            match fields.dtype {
                Some(dtype) => dtype as u8,
                None => 0,
            },
            match fields.reduction {
                Some(code) => code as u8,
                None => 0,
            },
            algorithm as u8,
            match fields.root {
                Some(root) => root as u16,
                None => NO_ROOT,
            },
            fields.count as u64 ^ fields.other,
        )
    }

    /// Returns the call word of a send or receive. Sender and receiver have the same fingerprint.
    const fn point_call(&self, peer: u32, tag: u32) -> Call {
        let fields = self.fields();
        let dtype = match fields.dtype {
            Some(dtype) => dtype as u8,
            None => 0,
        };
        let algorithm = Algorithm::Channel as u8;
        let both = Call::new(Operation::Send, dtype, 0, algorithm, 0, tag as u64).fingerprint();
        let own = Call::new(fields.operation, dtype, 0, algorithm, peer as u16, 0).0;
        Call(own & !0xffff | both)
    }
}

/// Row lengths of an [`Op::AllGatherV`], or of the output or input of an [`Op::AllToAllV`]: one for
/// each rank.
///
/// Created from a slice, vector, array or tensor of u64. Lengths in host memory are copied when the
/// operation is issued; a graph keeps the copy. Lengths in a tensor of u64 are read when the
/// operation runs; each replay of a graph reads them again. For an all_gather_v, either all ranks
/// pass lengths in host memory, or all pass tensors.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub enum Counts<'a> {
    /// The operation has none.
    #[default]
    None,
    /// Lengths in host memory.
    Host(&'a [u64]),
    /// Lengths in the memory of the communicator's device.
    Device(&'a Tensor),
}

impl<'a> Counts<'a> {
    /// Returns the lengths if they are in host memory, otherwise an empty slice.
    pub const fn on_host(self) -> &'a [u64] {
        match self {
            Self::Host(counts) => counts,
            _ => &[],
        }
    }

    /// Returns the tensor of the lengths, if there is one.
    pub const fn tensor(self) -> Option<&'a Tensor> {
        match self {
            Self::Device(tensor) => Some(tensor),
            _ => None,
        }
    }
}

impl<'a> From<&'a [u64]> for Counts<'a> {
    fn from(counts: &'a [u64]) -> Self {
        Self::Host(counts)
    }
}

impl<'a> From<&'a Vec<u64>> for Counts<'a> {
    fn from(counts: &'a Vec<u64>) -> Self {
        Self::Host(counts)
    }
}

impl<'a, const N: usize> From<&'a [u64; N]> for Counts<'a> {
    fn from(counts: &'a [u64; N]) -> Self {
        Self::Host(counts)
    }
}

impl<'a> From<&'a Tensor> for Counts<'a> {
    fn from(counts: &'a Tensor) -> Self {
        Self::Device(counts)
    }
}

/// This rank's buffers of an operation.
///
/// [`Collective`] has a constructor for each operation. Backends get the operands that
/// [`crate::backend::Backend::execute`] describes.
#[derive(Debug)]
pub struct Operands<'a> {
    pub(crate) output: Output<'a>,
    pub(crate) input: Input<'a>,
    /// Row lengths of the output, and (all_to_all_v) of the input.
    pub(crate) counts: [Counts<'a>; 2],
    /// Reduction, with this rank's factor. Unused if the operation does not reduce.
    pub(crate) reduce: ReduceOp,
    /// Factor of a scaled sum in device memory, instead of the one in `reduce`.
    pub(crate) factor: Option<&'a Tensor>,
}

impl<'a> Operands<'a> {
    /// Creates the operands of an operation that has none.
    pub(crate) const fn none() -> Self {
        Self {
            output: Output::EMPTY,
            input: Input::EMPTY,
            counts: [Counts::None; 2],
            reduce: ReduceOp::Sum,
            factor: None,
        }
    }

    /// Creates operands of an output and an input.
    pub fn new(output: impl Into<Output<'a>>, input: impl Into<Input<'a>>) -> Self {
        Self {
            output: output.into(),
            input: input.into(),
            ..Self::none()
        }
    }

    /// Creates operands of one buffer that is both output and input.
    pub fn in_place(buffer: impl Into<Output<'a>>) -> Self {
        let output = buffer.into();
        Self {
            input: output.as_input(),
            output,
            ..Self::none()
        }
    }

    /// Creates operands of an input.
    pub fn of_input(input: impl Into<Input<'a>>) -> Self {
        Self {
            input: input.into(),
            ..Self::none()
        }
    }

    /// Creates operands of an output.
    pub fn of_output(output: impl Into<Output<'a>>) -> Self {
        Self {
            output: output.into(),
            ..Self::none()
        }
    }

    /// Sets the row lengths of an [`Op::AllGatherV`].
    #[must_use]
    pub fn with_counts(mut self, counts: impl Into<Counts<'a>>) -> Self {
        self.counts = [counts.into(), Counts::None];
        self
    }

    /// Sets the row lengths of an [`Op::AllToAllV`]: those of the output and those of the input.
    #[must_use]
    pub fn with_splits(
        mut self,
        output: impl Into<Counts<'a>>,
        input: impl Into<Counts<'a>>,
    ) -> Self {
        self.counts = [output.into(), input.into()];
        self
    }

    /// Sets the reduction. Its code must be the [`Op`]'s; the factor of [`ReduceOp::PreMulSum`] may
    /// differ between ranks.
    #[must_use]
    pub const fn with_reduction(mut self, reduce: ReduceOp) -> Self {
        self.reduce = reduce;
        self
    }

    /// Sets the factor of a [`ReduceOp::PreMulSum`] in device memory. See
    /// [`Collective::with_factor`].
    #[must_use]
    pub const fn with_factor(mut self, factor: &'a Tensor) -> Self {
        self.factor = Some(factor);
        self
    }

    /// Returns the input.
    pub const fn input(&self) -> &Input<'a> {
        &self.input
    }

    /// Returns the output.
    pub const fn output(&self) -> &Output<'a> {
        &self.output
    }

    /// Returns the row lengths of the output, and (all_to_all_v) of the input, in host memory.
    /// Empty if the operation has none, or if they are in device memory.
    pub const fn host_counts(&self) -> (&'a [u64], &'a [u64]) {
        let [output, input] = self.counts;
        (output.on_host(), input.on_host())
    }

    /// Returns the reduction with this rank's factor. Has no meaning if the operation does not
    /// reduce.
    pub const fn reduction(&self) -> ReduceOp {
        self.reduce
    }

    /// Returns the factor of a scaled sum in device memory, which replaces the one of
    /// [`Operands::reduction`]. Backends get it only if
    /// [`Backend::reads_factor`](crate::backend::Backend::reads_factor) returns true.
    pub const fn factor(&self) -> Option<&'a Tensor> {
        self.factor
    }

    /// Drops the buffers and row lengths that `op` does not use on this rank, so that neither
    /// kernels nor backends see them.
    #[inline]
    pub(crate) fn drop_unused(&mut self, op: &Op, rank: u32) {
        let (output, input) = match *op {
            Op::Reduce { root, .. } | Op::Gather { root, .. } => (root == rank, true),
            Op::Scatter { root, .. } => (true, root == rank),
            Op::Send { .. } => (false, true),
            Op::Recv { .. } => (true, false),
            Op::Barrier => (false, false),
            _ => (true, true),
        };
        match op {
            Op::AllToAllV { .. } => {}
            Op::AllGatherV { .. } => self.counts[1] = Counts::None,
            _ => self.counts = [Counts::None; 2],
        }
        if !output {
            self.output = Output::EMPTY;
        }
        if !input {
            self.input = Input::EMPTY;
        }
    }

    /// Returns the tensors that a launch must keep alive, but for the row lengths of the input.
    #[inline]
    pub(crate) fn tensors(&self) -> [Option<TensorUse<'a>>; 3] {
        // Only reductions have a factor, and `drop_unused` has dropped their counts.
        let counts_or_factor = self.counts[0].tensor().or(self.factor);
        [
            self.output.tensor.map(TensorUse::Write),
            self.input.tensor.map(TensorUse::Read),
            counts_or_factor.map(TensorUse::Read),
        ]
    }

    /// Returns true if the operation uses memory that is only borrowed for the call.
    #[inline]
    pub(crate) const fn is_borrowed(&self) -> bool {
        self.output.count > 0 && self.output.tensor.is_none()
            || self.input.count > 0 && self.input.tensor.is_none()
    }

    /// Returns true if the output begins where the input begins.
    #[inline]
    pub(crate) fn is_in_place(&self) -> bool {
        core::ptr::eq(self.input.ptr, self.output.ptr)
    }
}

/// A collective, send or receive with its buffers.
///
/// [`crate::Communicator::execute`] runs it, [`crate::Communicator::enqueue`] enqueues it. The
/// communicator's methods by torchcomms' names, such as [`crate::Communicator::all_reduce`], do the
/// same for one operation each.
///
/// ```
/// use fusewire::{Collective, Options, ReduceOp, run_threads};
///
/// let results = run_threads(2, &Options::default(), |comm| {
///     let input = vec![comm.rank() as f32 + 1.0; 4];
///     let mut output = vec![0.0f32; 4];
///     let sum = Collective::all_reduce(&mut output, &input, ReduceOp::Sum);
///     assert_eq!((sum.op().name(), sum.op().count()), ("all_reduce", 4));
///     comm.execute(sum)?;
///     Ok(output)
/// });
/// for result in results {
///     assert_eq!(result?, [3.0; 4]);
/// }
/// # Ok::<(), fusewire::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "nothing runs before the collective is executed or enqueued"]
pub struct Collective<'a> {
    pub(crate) op: Op,
    pub(crate) operands: Operands<'a>,
}

impl<'a> Collective<'a> {
    /// Creates a collective of any operation and operands. The communicator checks them against
    /// each other.
    #[inline]
    pub const fn new(op: Op, operands: Operands<'a>) -> Self {
        Self { op, operands }
    }

    /// Takes this rank's factor of a [`ReduceOp::PreMulSum`] from `factor`, one element of the
    /// operation's type on the communicator's device. Each launch and each replay of a graph reads
    /// it. The f64 of the reduction is then ignored. Other ranks may pass an f64.
    ///
    /// The result is bitwise equal to that of the same factor as an f64. The factor must not lie in
    /// the output.
    ///
    /// Backends that call a library on the CPU read the factor when they execute the operation;
    /// NCCL and RCCL read it on the device.
    ///
    /// ```
    /// use fusewire::{Collective, DType, Options, ReduceOp, Tensor, run_threads};
    ///
    /// let results = run_threads(2, &Options::default(), |comm| {
    ///     let gradient = comm.alloc(DType::F32, 3)?;
    ///     gradient.copy_from(&[1.0f32, 2.0, 3.0])?;
    ///     let scale = Tensor::new(DType::F32, 1)?;
    ///     scale.copy_from(&[0.5f32])?;
    ///     let op = ReduceOp::PreMulSum(1.0);
    ///     comm.execute(Collective::all_reduce_in_place(&gradient, op).with_factor(&scale))?;
    ///     gradient.to_vec::<f32>()
    /// });
    /// for result in results {
    ///     assert_eq!(result?, [1.0, 2.0, 3.0]);
    /// }
    /// # Ok::<(), fusewire::Error>(())
    /// ```
    pub const fn with_factor(mut self, factor: &'a Tensor) -> Self {
        self.operands.factor = Some(factor);
        self
    }

    /// Returns what the ranks must agree on.
    pub const fn op(&self) -> &Op {
        &self.op
    }

    /// Returns this rank's buffers.
    pub const fn operands(&self) -> &Operands<'a> {
        &self.operands
    }

    /// Creates an all_reduce from `input` to `output`, which has the same length.
    #[inline]
    pub fn all_reduce(
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        op: ReduceOp,
    ) -> Self {
        Self::reducing_all(Operands::new(output, input), op)
    }

    /// Creates an all_reduce of `buffer`, in place.
    #[inline]
    pub fn all_reduce_in_place(buffer: impl Into<Output<'a>>, op: ReduceOp) -> Self {
        Self::reducing_all(Operands::in_place(buffer), op)
    }

    #[inline]
    const fn reducing_all(operands: Operands<'a>, op: ReduceOp) -> Self {
        let Input { count, dtype, .. } = operands.input;
        let reduction = op.code();
        Self::new(
            Op::AllReduce {
                count,
                dtype,
                reduction,
            },
            operands.with_reduction(op),
        )
    }

    /// Creates a reduce from `input` to the root's `output`. Elsewhere `output` may be empty.
    #[inline]
    pub fn reduce(
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        root: u32,
        op: ReduceOp,
    ) -> Self {
        Self::reducing_to(Operands::new(output, input), root, op)
    }

    /// Creates a reduce of `buffer`, in place on the root. Other ranks keep their values.
    #[inline]
    pub fn reduce_in_place(buffer: impl Into<Output<'a>>, root: u32, op: ReduceOp) -> Self {
        Self::reducing_to(Operands::in_place(buffer), root, op)
    }

    #[inline]
    const fn reducing_to(operands: Operands<'a>, root: u32, op: ReduceOp) -> Self {
        let Input { count, dtype, .. } = operands.input;
        let reduction = op.code();
        Self::new(
            Op::Reduce {
                count,
                dtype,
                reduction,
                root,
            },
            operands.with_reduction(op),
        )
    }

    /// Creates a reduce_scatter of `input`, which has one row per rank, to `output`, which has one
    /// row.
    #[inline]
    pub fn reduce_scatter(
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        op: ReduceOp,
    ) -> Self {
        let operands = Operands::new(output, input).with_reduction(op);
        let Output { count, dtype, .. } = operands.output;
        let reduction = op.code();
        Self::new(
            Op::ReduceScatter {
                count,
                dtype,
                reduction,
            },
            operands,
        )
    }

    /// Creates a broadcast of the root's `buffer`.
    #[inline]
    pub fn broadcast(buffer: impl Into<Output<'a>>, root: u32) -> Self {
        let operands = Operands::in_place(buffer);
        let Output { count, dtype, .. } = operands.output;
        Self::new(Op::Broadcast { count, dtype, root }, operands)
    }

    /// Creates an all_gather of `input` to `output`, which has one row per rank.
    #[inline]
    pub fn all_gather(output: impl Into<Output<'a>>, input: impl Into<Input<'a>>) -> Self {
        let operands = Operands::new(output, input);
        let Input { count, dtype, .. } = operands.input;
        Self::new(Op::AllGather { count, dtype }, operands)
    }

    /// Creates an all_gather with `counts[r]` elements of rank r.
    pub fn all_gather_v(
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        counts: impl Into<Counts<'a>>,
    ) -> Self {
        let operands = Operands::new(output, input).with_counts(counts);
        let Output { count, dtype, .. } = operands.output;
        let digest = match operands.counts[0] {
            Counts::Host(counts) => Op::digest(counts),
            _ => 0,
        };
        let op = Op::AllGatherV {
            count,
            dtype,
            digest,
        };
        Self::new(op, operands)
    }

    /// Creates a scatter of the root's `input`, which has one row per rank, to `output`. Elsewhere
    /// `input` may be empty.
    #[inline]
    pub fn scatter(output: impl Into<Output<'a>>, input: impl Into<Input<'a>>, root: u32) -> Self {
        let operands = Operands::new(output, input);
        let Output { count, dtype, .. } = operands.output;
        Self::new(Op::Scatter { count, dtype, root }, operands)
    }

    /// Creates a gather of `input` to the root's `output`, which has one row per rank. Elsewhere
    /// `output` may be empty.
    #[inline]
    pub fn gather(output: impl Into<Output<'a>>, input: impl Into<Input<'a>>, root: u32) -> Self {
        let operands = Operands::new(output, input);
        let Input { count, dtype, .. } = operands.input;
        Self::new(Op::Gather { count, dtype, root }, operands)
    }

    /// Creates an all_to_all of `ranks` rows, for a communicator of this number of ranks.
    #[inline]
    pub fn all_to_all(
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        ranks: u32,
    ) -> Self {
        let operands = Operands::new(output, input);
        let Input { count, dtype, .. } = operands.input;
        let count = count / (ranks as usize).max(1);
        Self::new(Op::AllToAll { count, dtype }, operands)
    }

    /// Creates an all_to_all that sends `input_splits[r]` elements to rank r and receives
    /// `output_splits[r]` elements from it.
    pub fn all_to_all_v(
        output: impl Into<Output<'a>>,
        input: impl Into<Input<'a>>,
        output_splits: impl Into<Counts<'a>>,
        input_splits: impl Into<Counts<'a>>,
    ) -> Self {
        let operands = Operands::new(output, input).with_splits(output_splits, input_splits);
        let dtype = operands.input.dtype;
        Self::new(Op::AllToAllV { dtype }, operands)
    }

    /// Creates a send of `input` to `peer`.
    #[inline]
    pub fn send(input: impl Into<Input<'a>>, peer: u32) -> Self {
        let operands = Operands::of_input(input);
        let Input { count, dtype, .. } = operands.input;
        Self::new(Op::Send { count, dtype, peer }, operands)
    }

    /// Creates a receive of `output` from `peer`.
    #[inline]
    pub fn recv(output: impl Into<Output<'a>>, peer: u32) -> Self {
        let operands = Operands::of_output(output);
        let Output { count, dtype, .. } = operands.output;
        Self::new(Op::Recv { count, dtype, peer }, operands)
    }

    /// Creates a barrier.
    #[inline]
    pub const fn barrier() -> Self {
        Self::new(Op::Barrier, Operands::none())
    }
}
