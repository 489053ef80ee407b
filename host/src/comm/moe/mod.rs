//! Mixture of experts: dispatches tokens to the ranks of their experts, and combines the results.

mod config;

use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use fusewire_device::DType;
use fusewire_device::native::{Buffer, KernelArguments};
use fusewire_kernels::moe::{
    MOE_COMBINE, MOE_DISPATCH, Meta, MoeCombine, MoeDispatch, MoeFlags, MoeShape, place,
};

pub use self::config::{
    MissingRanks, MoeConfig, MoeLayout, MoeMode, MoePayload, MoeReceived, MoeResults, MoeScales,
    MoeScalesLayout,
};
use super::Communicator;
use super::kernel::KernelLaunch;
use super::rma::{Window, WindowOptions};
use super::submit::invalid;
use crate::Result;
use crate::tensor::Tensor;

/// Name of the operation in messages.
const NAME: &str = "moe";

/// Sizes of a [`Moe`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MoeInfo {
    /// Rows of [`Dispatched::x`].
    pub rows: usize,
    /// Rows of `y`, the results of the experts: as many as `rows` in expert-major order, and
    /// `rows * top_k` in rank-major order.
    pub results: usize,
    /// Elements from one row of [`Dispatched::x`] to the next.
    pub x_stride: usize,
    /// Elements from the scales of one row to those of the next, or from one column to the next
    /// ([`MoeScalesLayout::ColumnMajor`]); 0 without scales.
    pub scales_stride: usize,
    /// Maximum number of experts of a rank.
    pub local_experts: u32,
    /// Blocks of a launch.
    pub blocks: u32,
    /// Bytes of a row that one rank sends to another.
    pub row_bytes: usize,
    /// Bytes of memory on this rank, for all micro-batches.
    pub bytes: usize,
}

/// The tokens that a rank has received for its experts, from [`Moe::dispatch`].
///
/// The tensors belong to the micro-batch, and every dispatch of the micro-batch overwrites them.
/// Their contents are valid until the next dispatch. Operations on other streams are ordered like
/// other accesses to tensors. In rank-major order in low latency mode, `x` and `scales` are views
/// of the memory in which rows arrive, and are valid only until the next combine. The caller must
/// not write between the rows: combine reads the headers of the rows there.
///
/// | | expert-major | rank-major |
/// |---|---|---|
/// | row | one for each selection of an expert of this rank, in the order of expert, rank, token, selection | one for each token with an expert of this rank, in the order of rank and token: in low latency mode, row `rank * max_tokens + i` is that of the rank's i-th such token; in high throughput mode the rows of each rank follow those of the rank before it |
/// | `counts` | rows of each expert | rows from each rank |
/// | `offsets` | first row of each expert, and the end of the last one | in high throughput mode the first row of each rank, and the end of the last one; otherwise `None` |
/// | `ids` | the expert of each row; -1 for rows without a token | `top_k` experts for each row; -1 for those of other ranks, and for rows without a token |
/// | `weights` | the weight of each row | `top_k` weights for each row |
///
/// Experts are numbered from 0 on each rank. Rows without a token keep their previous contents,
/// except for their ids.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Dispatched {
    /// Rows of `hidden` elements, [`MoeInfo::x_stride`] apart; in the input's type, or E4M3.
    pub x: Tensor,
    /// The scales of each row, or of each column ([`MoeScalesLayout`]), [`MoeInfo::scales_stride`]
    /// apart: f32, or u8 or u32 for UE8M0.
    pub scales: Option<Tensor>,
    /// Numbers of rows; u32.
    pub counts: Tensor,
    /// First rows; u32.
    pub offsets: Option<Tensor>,
    /// The rank and the token of each row; u32.
    pub sources: Tensor,
    /// The experts of each row; i32.
    pub ids: Tensor,
    /// The weights of each row; f32.
    pub weights: Tensor,
    batch: Arc<Batch>,
    /// Sequence number of the dispatch in the micro-batch.
    number: u64,
    selected: (Tensor, Tensor),
}

/// Memory of a micro-batch.
#[derive(Debug)]
struct Batch {
    index: usize,
    rows: Window,
    results: Window,
    own: Tensor,
    meta: Tensor,
    /// Copies of the rows and their scales, as words; without copies the window, which the launch
    /// writes.
    out: Tensor,
    missing: Tensor,
    /// Tensor without elements, for the arguments that a half does not use.
    none: Tensor,
    /// Number of dispatches so far. Combining an earlier one would use wrong weights.
    dispatches: AtomicU64,
}

/// A mixture of experts over the ranks of a communicator: sends tokens to the ranks of their
/// experts, and adds the experts' results.
///
/// A router chooses `top_k` experts for each token: a token with one of its experts is a
/// *selection*. [`Moe::dispatch`] sends each token once to each rank that holds any of its experts.
/// The caller runs the experts, and [`Moe::combine`] returns the results and adds them:
///
/// ```
/// use fusewire::{DType, Moe, MoeConfig, Options, run_threads};
///
/// run_threads(2, &Options::default(), |comm| {
///     let (tokens, hidden, top_k) = (3, 8, 2);
///     let moe = Moe::new(&comm, &MoeConfig::new(4, top_k, hidden, tokens).input(DType::F32))?;
///     let x = comm.tensor_from(&vec![1.0f32; tokens * hidden])?;
///     let ids = comm.tensor_from(&[0i32, 3, 1, 2, -1, 0])?;
///     let weights = comm.tensor_from(&[0.5f32; 6])?;
///     let received = moe.dispatch(&x, &ids, &weights)?;
///     // The experts: here they return their input.
///     let y = &received.x;
///     let out = comm.tensor(DType::F32, tokens * hidden)?;
///     moe.combine(y, &received, &out)?;
///     comm.synchronize()?;
///     let expected = [[1.0f32; 8], [1.0; 8], [0.5; 8]].concat();
///     assert_eq!(out.to_vec::<f32>()?, expected);
///     moe.free()
/// })
/// .into_iter()
/// .collect::<Result<(), _>>()?;
/// # Ok::<(), fusewire::Error>(())
/// ```
///
/// All operations are enqueued on the communicator's stream, allocate no device memory and never
/// wait for the device, so a graph can contain them; [`Moe::blocking`] is the form whose operations
/// wait. A failure, such as an expert that does not exist, fails the communicator on all ranks;
/// [`Communicator::synchronize`] returns it.
///
/// Each operation has two halves, between which the caller can compute:
/// [`Moe::dispatch_send`] and [`Moe::dispatch_receive`], [`Moe::combine_send`] and
/// [`Moe::combine_receive`] ([`MoeMode::LowLatency`]). With [`MoeConfig::in_flight`] of 2, the
/// halves of two micro-batches can alternate ([`Moe::micro_batch`]). All ranks call the same
/// operations in the same order.
///
/// # Results
/// They are bitwise identical in every run, with any number of blocks, in both layouts and modes,
/// with and without graphs. Rows are in the order of source rank and token. Combine computes
/// `0 + weight * result + weight * result ..` in the order of a token's selections, in f32, without
/// fused multiply-add, and rounds once.
#[derive(Clone, Debug)]
pub struct Moe {
    comm: Communicator,
    shared: Arc<Shared>,
    completion: Completion,
}

/// When an operation returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Completion {
    /// Once its launches are enqueued.
    Enqueued,
    /// Once its launches have completed.
    Completed,
}

#[derive(Debug)]
struct Shared {
    config: MoeConfig,
    shape: MoeShape,
    info: MoeInfo,
    digest: u64,
    placement: Tensor,
    tokens_per_expert: Tensor,
    wait_ns: Tensor,
    mask: Tensor,
    batches: Vec<Arc<Batch>>,
}

/// One of the micro-batches of a [`Moe`], with its own memory and signals.
#[derive(Clone, Debug)]
pub struct MicroBatch {
    moe: Moe,
    batch: Arc<Batch>,
}

impl Moe {
    /// Allocates the memory, and loads the kernels. All ranks must call this together.
    ///
    /// Expert e is expert `e % n` of rank `e / n`, where n is the number of experts divided by the
    /// number of ranks, rounded up; [`Moe::set_placement`] changes this.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for an invalid configuration;
    /// [`Error::Communicator`](crate::Error::Communicator) if the ranks pass different ones;
    /// the errors of [`Communicator::alloc_window`].
    pub fn new(comm: &Communicator, config: &MoeConfig) -> Result<Self> {
        if !comm.supports_window() {
            let detail = format!("backend {} cannot run kernels", comm.backend());
            return Err(invalid(NAME, detail));
        }
        let words = config.words();
        comm.outside_capture()?
            .agree(NAME, [], &words, MoeConfig::describe)?;
        let (shape, blocks) = config.check(comm)?;
        let ranks = comm.size() as usize;
        let each = config.experts.div_ceil(comm.size());
        let places: Vec<u32> = (0..config.experts)
            .map(|expert| place(expert / each, expert % each))
            .collect();
        let rows = shape.result_rows(ranks);
        let is_expert_major = config.layout == MoeLayout::ExpertMajor;
        let x_stride = match config.copies_rows() {
            true => config.hidden,
            false => 4 * shape.row_stride() / config.received_type().size(),
        };
        let scale_words = match config.scales_layout {
            MoeScalesLayout::ColumnMajor => shape.scales_column(),
            MoeScalesLayout::RowMajor if config.copies_rows() => shape.scales as usize,
            MoeScalesLayout::RowMajor => shape.row_stride(),
        };
        let info = MoeInfo {
            rows,
            results: if is_expert_major {
                rows
            } else {
                rows * shape.k()
            },
            x_stride,
            scales_stride: config
                .scales_type()
                .map_or(0, |(_, each)| each * scale_words),
            local_experts: shape.local_experts,
            blocks,
            row_bytes: 4 * shape.row_words(),
            bytes: 0,
        };
        let digest = words.iter().fold(0, |digest: u64, word| {
            (digest.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
        // Each rank first allocates its local memory. If one fails, all ranks return its error.
        let local = || -> Result<_> {
            let memory = |_| LocalMemory::new(comm, config, &shape, blocks);
            Ok((
                (0..config.in_flight)
                    .map(memory)
                    .collect::<Result<Vec<_>>>()?,
                comm.tensor_from(&places)?,
                comm.tensor(DType::U64, shape.local_experts as usize)?,
                comm.tensor(DType::U64, ranks)?,
                comm.tensor(DType::U32, ranks)?,
            ))
        };
        let outside = comm.outside_capture()?;
        let local = outside.host_call(NAME).agreed(local())?;
        let (memories, placement, tokens_per_expert, wait_ns, mask) = local;
        let mut batches: Vec<Arc<Batch>> = Vec::new();
        for memory in memories {
            match Batch::new(comm, &shape, blocks, batches.len(), memory) {
                Ok(batch) => batches.push(Arc::new(batch)),
                Err(error) => {
                    // The creation of a window fails on all ranks.
                    let _ = batches.iter().try_for_each(|batch| batch.free());
                    return Err(error);
                }
            }
        }
        let info = MoeInfo {
            bytes: batches.iter().map(|batch| batch.bytes()).sum(),
            ..info
        };
        let shared = Shared {
            placement,
            tokens_per_expert,
            wait_ns,
            mask,
            config: config.clone(),
            shape,
            info,
            digest,
            batches,
        };
        let moe = Self {
            comm: comm.clone(),
            shared: Arc::new(shared),
            completion: Completion::Enqueued,
        };
        moe.warm_up()?;
        Ok(moe)
    }

    /// Loads the kernels on a GPU, where loading may wait for running kernels.
    fn warm_up(&self) -> Result<()> {
        self.comm.warm_up_kernel(&MOE_DISPATCH)?;
        self.comm.warm_up_kernel(&MOE_COMBINE)?;
        self.comm.outside_capture()?.barrier()
    }

    /// Returns the sizes.
    pub fn info(&self) -> &MoeInfo {
        &self.shared.info
    }

    /// Returns the configuration.
    pub fn config(&self) -> &MoeConfig {
        &self.shared.config
    }

    /// Returns this `Moe` on another stream, like [`Communicator::on`].
    #[must_use]
    pub fn on(&self, stream: &crate::Stream) -> Self {
        Self {
            comm: self.comm.on(stream),
            ..self.clone()
        }
    }

    /// Returns this `Moe` with operations that return once they have completed, with their failure,
    /// like [`Communicator::all_reduce`]. While the stream is capturing, they are captured.
    ///
    /// On an idle CPU stream, such an operation runs on the calling thread, which is about 20 us
    /// faster than a handoff to the thread of the stream. All ranks must then call concurrently: a
    /// thread that calls for several ranks in turn would wait for itself.
    #[must_use]
    pub fn blocking(&self) -> Self {
        Self {
            completion: Completion::Completed,
            ..self.clone()
        }
    }

    /// Returns micro-batch `index`. The operations of [`Moe`] itself use micro-batch 0.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `index` is not below
    /// [`MoeConfig::in_flight`].
    pub fn micro_batch(&self, index: usize) -> Result<MicroBatch> {
        match self.shared.batches.get(index) {
            Some(batch) => Ok(MicroBatch {
                moe: self.clone(),
                batch: Arc::clone(batch),
            }),
            None => Err(invalid(
                NAME,
                format!(
                    "micro-batch {index} does not exist; MoeConfig::in_flight is {}",
                    self.shared.batches.len()
                ),
            )),
        }
    }

    fn first(&self) -> MicroBatch {
        MicroBatch {
            moe: self.clone(),
            batch: Arc::clone(&self.shared.batches[0]),
        }
    }

    /// Runs [`MicroBatch::dispatch`] of micro-batch 0.
    ///
    /// # Errors
    /// As [`MicroBatch::dispatch`].
    pub fn dispatch(&self, x: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Dispatched> {
        self.first().dispatch(x, ids, weights)
    }

    /// Runs [`MicroBatch::dispatch_send`] of micro-batch 0.
    ///
    /// # Errors
    /// As [`MicroBatch::dispatch`].
    pub fn dispatch_send(&self, x: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Dispatched> {
        self.first().dispatch_send(x, ids, weights)
    }

    /// Runs [`MicroBatch::redispatch`] of the micro-batch that `previous` belongs to.
    ///
    /// # Errors
    /// As [`MicroBatch::redispatch`].
    pub fn redispatch(&self, x: &Tensor, previous: &Dispatched) -> Result<Dispatched> {
        self.of(previous)?.redispatch(x, previous)
    }

    /// Runs [`MicroBatch::redispatch_send`] of the micro-batch that `previous` belongs to.
    ///
    /// # Errors
    /// As [`MicroBatch::redispatch`].
    pub fn redispatch_send(&self, x: &Tensor, previous: &Dispatched) -> Result<Dispatched> {
        self.of(previous)?.redispatch_send(x, previous)
    }

    /// Runs [`MicroBatch::dispatch_receive`] of the micro-batch that `dispatched` belongs to.
    ///
    /// # Errors
    /// As [`MicroBatch::dispatch`].
    pub fn dispatch_receive(&self, dispatched: &Dispatched) -> Result<()> {
        self.of(dispatched)?.dispatch_receive(dispatched)
    }

    /// Runs [`MicroBatch::combine`] of the micro-batch that `dispatched` belongs to.
    ///
    /// # Errors
    /// As [`MicroBatch::combine`].
    pub fn combine(&self, y: &Tensor, dispatched: &Dispatched, out: &Tensor) -> Result<()> {
        self.of(dispatched)?.combine(y, dispatched, out)
    }

    /// Runs [`MicroBatch::combine_send`] of the micro-batch that `dispatched` belongs to.
    ///
    /// # Errors
    /// As [`MicroBatch::combine`].
    pub fn combine_send(&self, y: &Tensor, dispatched: &Dispatched) -> Result<()> {
        self.of(dispatched)?.combine_send(y, dispatched)
    }

    /// Runs [`MicroBatch::combine_receive`] of the micro-batch that `dispatched` belongs to.
    ///
    /// # Errors
    /// As [`MicroBatch::combine`].
    pub fn combine_receive(&self, dispatched: &Dispatched, out: &Tensor) -> Result<()> {
        self.of(dispatched)?.combine_receive(dispatched, out)
    }

    fn of(&self, dispatched: &Dispatched) -> Result<MicroBatch> {
        self.micro_batch(dispatched.batch.index)
    }

    /// Returns the place of each expert: `rank << 16 | index`, u32. Each dispatch reads it, so it
    /// may change between launches and replays, in the same way on all ranks.
    pub fn placement(&self) -> &Tensor {
        &self.shared.placement
    }

    /// Sets the rank of each expert. The experts of a rank are numbered in their order. All ranks
    /// must set the same ranks between the same launches. Waits until launches that use the
    /// placement have ended.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if there are not as many ranks as
    /// experts, if a rank does not exist, or if it has more than [`MoeInfo::local_experts`].
    pub fn set_placement(&self, ranks: &[u32]) -> Result<()> {
        let refuse = |detail: String| Err(invalid("moe placement", detail));
        let (experts, most) = (self.shared.config.experts, self.shared.info.local_experts);
        if ranks.len() != experts as usize {
            return refuse(format!("{} ranks for {experts} experts", ranks.len()));
        }
        let mut counts = vec![0; self.comm.size() as usize];
        let mut places = Vec::with_capacity(ranks.len());
        for (expert, &rank) in ranks.iter().enumerate() {
            let Some(count) = counts.get_mut(rank as usize) else {
                let size = self.comm.size();
                return refuse(format!("expert {expert} on rank {rank} of {size}"));
            };
            if *count == most {
                return refuse(format!(
                    "more than {most} experts on rank {rank}; MoeConfig::local_experts is the \
                     limit"
                ));
            }
            places.push(place(rank, *count));
            *count += 1;
        }
        self.shared.placement.copy_from(&places)
    }

    /// Returns the number of selections of each expert of this rank, over all dispatches; u64.
    pub fn tokens_per_expert(&self) -> &Tensor {
        &self.shared.tokens_per_expert
    }

    /// Returns the nanoseconds for which block 0 has waited for the rows of each rank, over all
    /// dispatches; u64. Each time is measured from the start of the wait, which all ranks share. In
    /// high throughput mode, the wait for the row counts is included.
    pub fn wait_ns(&self) -> &Tensor {
        &self.shared.wait_ns
    }

    /// Returns the ranks that this rank has masked ([`MissingRanks::Mask`]): u32 for each rank, 0
    /// if it takes part, 1 if it was late, 2 if its process had ended. Kernels and programs may
    /// read it after any operation, but must not write it: a rank that was masked can take part
    /// again only in a new `Moe` of a new communicator.
    pub fn mask(&self) -> &Tensor {
        &self.shared.mask
    }

    /// Returns [`MicroBatch::missing`] of micro-batch 0.
    pub fn missing(&self) -> &Tensor {
        &self.shared.batches[0].missing
    }

    /// Frees the memory that the peers can write. All ranks must call this together, so a
    /// communicator with a dead rank cannot. Memory that is not freed lives as long as the
    /// communicator.
    ///
    /// # Errors
    /// The communicator's failure, if it has failed. The memory is then not freed.
    pub fn free(self) -> Result<()> {
        let mut outcome = Ok(());
        for batch in &self.shared.batches {
            outcome = outcome.and(batch.free());
        }
        outcome
    }

    /// Checks the type, length and alignment of a tensor.
    fn check(
        &self,
        operation: &'static str,
        (name, tensor): (&str, &Tensor),
        dtype: DType,
        count: usize,
    ) -> Result<()> {
        if tensor.dtype() != dtype || tensor.len() != count {
            return Err(invalid(
                operation,
                format!(
                    "{name} has {} elements of type {}; it must have {count} of type {}",
                    tensor.len(),
                    tensor.dtype().name(),
                    dtype.name()
                ),
            ));
        }
        if !(tensor.as_ptr() as usize).is_multiple_of(16) && count > 0 {
            return Err(invalid(
                operation,
                format!("{name} is not aligned to 16 bytes"),
            ));
        }
        Ok(())
    }

    /// Begins a launch of a kernel.
    fn launch<A: KernelArguments>(&self, arguments: A) -> KernelLaunch<'_, A> {
        let Shared { config, info, .. } = &*self.shared;
        let launch = self.comm.kernel(arguments).blocks(info.blocks);
        match config.timeout {
            Some(timeout) => launch.timeout(timeout),
            None => launch,
        }
    }

    /// Launches a kernel, and waits for its completion if operations of this `Moe` do.
    ///
    /// # Safety
    /// The requirements of [`KernelLaunch::launch_unchecked`].
    unsafe fn submit<A: KernelArguments>(&self, launch: KernelLaunch<'_, A>) -> Result<()> {
        match self.completion {
            // SAFETY: the caller meets the requirements.
            Completion::Enqueued => unsafe { launch.enqueue_unchecked() }.map(drop),
            // SAFETY: the caller meets the requirements.
            Completion::Completed => unsafe { launch.launch_unchecked() },
        }
    }

    /// Returns the shape of a launch.
    fn shape(&self, halves: MoeFlags) -> MoeShape {
        MoeShape {
            flags: self.shared.shape.flags.with(halves),
            ..self.shared.shape
        }
    }

    /// Returns a hash of the configuration and of the halves that a launch runs.
    fn digest(&self, halves: MoeFlags, batch: &Batch) -> u64 {
        // The window's number identifies the micro-batch, even among those of other `Moe` values.
        let window = batch.rows.number();
        (self.shared.digest ^ u64::from(window)).rotate_left(8) ^ u64::from(halves.0)
    }

    /// Rejects tensors of the caller that overlap memory that the launch writes.
    fn check_overlap(
        &self,
        operation: &'static str,
        batch: &Batch,
        read: &[(&str, &Tensor)],
        written: Option<(&str, &Tensor)>,
    ) -> Result<()> {
        let overlap = |a: &Tensor, b: &Tensor| {
            let span = |tensor: &Tensor| {
                let at = tensor.as_ptr() as usize;
                at..at + tensor.len() * tensor.dtype().size()
            };
            let (a, b) = (span(a), span(b));
            !a.is_empty() && !b.is_empty() && a.start < b.end && b.start < a.end
        };
        let refuse = |name: &str, other: &str| {
            let detail = format!("{name} overlaps {other}, which the launch writes");
            Err(invalid(operation, detail))
        };
        if let Some((name, written)) = written
            && let Some((other, _)) = read.iter().find(|(_, tensor)| overlap(tensor, written))
        {
            return refuse(other, name);
        }
        // Combine reads some of these, and writes `missing`.
        let own = [batch.rows.tensor(), &batch.out, &batch.meta];
        let shared = &*self.shared;
        let statistics = [&shared.tokens_per_expert, &shared.wait_ns];
        let own = own.into_iter().chain(statistics);
        let own = own.chain([&shared.placement, &shared.mask, &batch.missing]);
        let is_dispatch = written.is_none();
        for (name, tensor) in written.iter().chain(read.iter().filter(|_| is_dispatch)) {
            if own.clone().any(|own| overlap(own, tensor)) {
                return refuse(name, "memory of the Moe");
            }
        }
        Ok(())
    }
}

/// The half that receives.
const RECEIVE_HALF: MoeFlags = MoeFlags::WAIT.with(MoeFlags::RECEIVE);
/// Both halves of an operation.
const BOTH_HALVES: MoeFlags = MoeFlags::SEND.with(RECEIVE_HALF);

impl MicroBatch {
    /// Sends each token to the ranks of its experts, and receives the tokens for the experts of
    /// this rank.
    ///
    /// `ids` has `top_k` experts for each token, i32, and `weights` their weights, f32. Selections
    /// with a negative id are not sent. An expert that a token selects twice counts twice. `x` has
    /// the tokens, up to [`MoeConfig::max_tokens`]; their number may differ between ranks, and be
    /// 0. Every combine of this dispatch, and of each redispatch that follows it, reads `ids` and
    /// `weights` again, so they must not change until the last of these combines has ended.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if a tensor does not have the
    /// right type and length; the communicator's failure.
    pub fn dispatch(&self, x: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Dispatched> {
        let dispatched = self.dispatched(x, ids, weights)?;
        self.launch_dispatch(BOTH_HALVES, Some(x), &dispatched)?;
        Ok(dispatched)
    }

    /// Runs the sending half of [`MicroBatch::dispatch`]. The tensors of the result are
    /// valid after [`MicroBatch::dispatch_receive`].
    ///
    /// # Errors
    /// As [`MicroBatch::dispatch`].
    pub fn dispatch_send(&self, x: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Dispatched> {
        self.check_halves("moe_dispatch", MoeFlags::SEND)?;
        let dispatched = self.dispatched(x, ids, weights)?;
        self.launch_dispatch(MoeFlags::SEND, Some(x), &dispatched)?;
        Ok(dispatched)
    }

    /// Dispatches other tokens to the same experts: does what [`MicroBatch::dispatch`] does with
    /// the ids and weights of `previous`, which must be the last dispatch of this micro-batch,
    /// without reading the ids and counting them again. The experts are on the ranks on which they
    /// were for `previous`, and [`Dispatched::weights`] has its weights. All ranks must call this
    /// together. When the launch or a replay of it runs, the last dispatch of the micro-batch on
    /// the device must have had the same ids and weights; otherwise the sums of combine are wrong.
    ///
    /// # Errors
    /// As [`MicroBatch::dispatch`], and [`Error::InvalidArgument`](crate::Error::InvalidArgument)
    /// if `previous` is not the last dispatch of this micro-batch. The launch fails if the last one
    /// on the device, such as one of another graph, had another number of tokens.
    pub fn redispatch(&self, x: &Tensor, previous: &Dispatched) -> Result<Dispatched> {
        let dispatched = self.redispatched(x, previous)?;
        self.launch_dispatch(BOTH_HALVES.with(MoeFlags::REUSE), Some(x), &dispatched)?;
        Ok(dispatched)
    }

    /// Runs the sending half of [`MicroBatch::redispatch`].
    ///
    /// # Errors
    /// As [`MicroBatch::redispatch`].
    pub fn redispatch_send(&self, x: &Tensor, previous: &Dispatched) -> Result<Dispatched> {
        self.check_halves("moe_dispatch", MoeFlags::SEND)?;
        let dispatched = self.redispatched(x, previous)?;
        let halves = MoeFlags::SEND.with(MoeFlags::REUSE);
        self.launch_dispatch(halves, Some(x), &dispatched)?;
        Ok(dispatched)
    }

    fn redispatched(&self, x: &Tensor, previous: &Dispatched) -> Result<Dispatched> {
        self.check_own("moe_dispatch", previous)?;
        let (ids, weights) = &previous.selected;
        self.dispatched(x, ids, weights)
    }

    /// Runs the receiving half of [`MicroBatch::dispatch`].
    ///
    /// # Errors
    /// As [`MicroBatch::dispatch`].
    pub fn dispatch_receive(&self, dispatched: &Dispatched) -> Result<()> {
        self.check_halves("moe_dispatch", RECEIVE_HALF)?;
        self.check_own("moe_dispatch", dispatched)?;
        self.launch_dispatch(RECEIVE_HALF, None, dispatched)
    }

    /// Returns the experts' results to the ranks of their tokens, and writes the weighted sum of
    /// the results of each of this rank's tokens to `out`.
    ///
    /// `y` has [`MoeInfo::results`] rows in the input's type. In expert-major order, row i is the
    /// result of row i of [`Dispatched::x`]; it may be the same tensor. In rank-major order, row
    /// `i * top_k + k` is the result of row i for its expert k. Only the results of experts of this
    /// rank are read. A token without experts has the result 0.
    ///
    /// # Errors
    /// As [`MicroBatch::dispatch`]; [`Error::InvalidArgument`](crate::Error::InvalidArgument) if
    /// `dispatched` belongs to another micro-batch.
    pub fn combine(&self, y: &Tensor, dispatched: &Dispatched, out: &Tensor) -> Result<()> {
        self.launch_combine(BOTH_HALVES, Some(y), dispatched, Some(out))
    }

    /// Runs the sending half of [`MicroBatch::combine`].
    ///
    /// # Errors
    /// As [`MicroBatch::combine`].
    pub fn combine_send(&self, y: &Tensor, dispatched: &Dispatched) -> Result<()> {
        self.launch_combine(MoeFlags::SEND, Some(y), dispatched, None)
    }

    /// Runs the receiving half of [`MicroBatch::combine`].
    ///
    /// # Errors
    /// As [`MicroBatch::combine`].
    pub fn combine_receive(&self, dispatched: &Dispatched, out: &Tensor) -> Result<()> {
        self.launch_combine(RECEIVE_HALF, None, dispatched, Some(out))
    }

    /// Returns the missing results of the last combine, with [`MissingRanks::Mask`]: u32 for each
    /// token of this rank, up to [`MoeConfig::max_tokens`]. Bit k is 1 if the result of selection k
    /// is missing from the token's sum. Later words keep their previous contents.
    pub fn missing(&self) -> &Tensor {
        &self.batch.missing
    }

    /// Checks the inputs of a dispatch, and returns its results.
    fn dispatched(&self, x: &Tensor, ids: &Tensor, weights: &Tensor) -> Result<Dispatched> {
        const OPERATION: &str = "moe_dispatch";
        let Shared { config, shape, .. } = &*self.moe.shared;
        let (k, hidden) = (config.top_k as usize, config.hidden);
        let tokens = ids.len() / k;
        if !ids.len().is_multiple_of(k) || tokens > config.max_tokens {
            return Err(invalid(
                OPERATION,
                format!(
                    "{} ids; must be a multiple of {k} (top_k), for at most {} tokens",
                    ids.len(),
                    config.max_tokens
                ),
            ));
        }
        self.moe
            .check(OPERATION, ("ids", ids), DType::I32, tokens * k)?;
        self.moe
            .check(OPERATION, ("weights", weights), DType::F32, tokens * k)?;
        self.moe
            .check(OPERATION, ("x", x), config.input, tokens * hidden)?;
        let read = [("x", x), ("ids", ids), ("weights", weights)];
        self.moe
            .check_overlap(OPERATION, &self.batch, &read, None)?;
        let ranks = self.moe.comm.size() as usize;
        let (meta, batch) = (shape.meta(ranks), &self.batch);
        let Meta {
            counts,
            offsets,
            rows,
            each,
            ..
        } = meta;
        let words = |first: usize, dtype, count| batch.meta.view(4 * first, dtype, count);
        let (x, scales) = self.payload();
        Ok(Dispatched {
            x,
            scales,
            counts: words(0, DType::U32, counts),
            offsets: (offsets > 0).then(|| words(meta.offsets_at, DType::U32, offsets)),
            sources: words(meta.sources_at, DType::U32, 2 * rows),
            ids: words(meta.ids_at, DType::I32, each * rows),
            weights: words(meta.weights_at, DType::F32, each * rows),
            batch: Arc::clone(batch),
            number: batch.dispatches.fetch_add(1, Ordering::Relaxed) + 1,
            selected: (ids.clone(), weights.clone()),
        })
    }

    /// Returns the rows and their scales.
    fn payload(&self) -> (Tensor, Option<Tensor>) {
        let Shared {
            config,
            shape,
            info,
            ..
        } = &*self.moe.shared;
        let batch = &self.batch;
        let elements = |stride: usize, last: usize| match info.rows {
            0 => 0,
            rows => (rows - 1) * stride + last,
        };
        let (x_at, scales_at) = match config.copies_rows() {
            true => (0, 4 * shape.scales_at()),
            false => {
                let ranks = self.moe.comm.size() as usize;
                let rows = shape.rows(0, ranks, info.blocks as usize);
                (4 * rows, 4 * (rows + shape.payload as usize))
            }
        };
        let count = elements(info.x_stride, config.hidden);
        let x = batch.out.view(x_at, config.received_type(), count);
        let scales = config.scales_type().map(|(dtype, each)| {
            let words = shape.scales as usize;
            let count = match config.scales_layout {
                MoeScalesLayout::RowMajor => elements(info.scales_stride, each * words),
                MoeScalesLayout::ColumnMajor => each * words * info.scales_stride,
            };
            batch.out.view(scales_at, dtype, count)
        });
        (x, scales)
    }

    /// Checks that a result is that of the last dispatch of this micro-batch.
    fn check_own(&self, operation: &'static str, dispatched: &Dispatched) -> Result<()> {
        if !Arc::ptr_eq(&self.batch, &dispatched.batch) {
            return Err(invalid(
                operation,
                format!(
                    "the tokens were dispatched by another micro-batch, not by micro-batch {} of \
                     this Moe",
                    self.batch.index
                ),
            ));
        }
        let latest = self.batch.dispatches.load(Ordering::Relaxed);
        if dispatched.number != latest {
            return Err(invalid(
                operation,
                format!(
                    "the tokens are those of dispatch {} of micro-batch {}; after dispatch \
                     {latest} they are no longer valid",
                    dispatched.number, self.batch.index
                ),
            ));
        }
        Ok(())
    }

    /// Returns the launches that run `halves`. A launch with several blocks that masks ranks must
    /// not interpret what has arrived, because its blocks may not see the same mask.
    fn launches(&self, halves: MoeFlags) -> impl Iterator<Item = MoeFlags> {
        let Shared { config, info, .. } = &*self.moe.shared;
        let is_split = config.missing_ranks == MissingRanks::Mask && info.blocks > 1;
        let (first, second) = match is_split && halves.has(RECEIVE_HALF) {
            true => (halves.without(MoeFlags::RECEIVE), Some(MoeFlags::RECEIVE)),
            false => (halves, None),
        };
        core::iter::once(first).chain(second)
    }

    /// Returns the rounds of as many tokens as a rank may have; 0 in low latency mode.
    fn rounds(&self) -> usize {
        let Shared { shape, info, .. } = &*self.moe.shared;
        shape.rounds(shape.max_tokens as usize, info.blocks as usize)
    }

    /// Rejects one half of an operation in high throughput mode.
    fn check_halves(&self, operation: &'static str, halves: MoeFlags) -> Result<()> {
        if self.rounds() == 0 || halves.has(BOTH_HALVES) {
            return Ok(());
        }
        Err(invalid(
            operation,
            "high throughput mode has no halves, because a rank sends only as fast as the others \
             receive; call dispatch or combine, or use low latency mode"
                .to_owned(),
        ))
    }

    /// Launches dispatch. The receiving half has no `x`.
    fn launch_dispatch(
        &self,
        halves: MoeFlags,
        x: Option<&Tensor>,
        dispatched: &Dispatched,
    ) -> Result<()> {
        if self.rounds() > 0 {
            // The row counts first; `halves` may also say that the routing is reused.
            let count = halves.without(RECEIVE_HALF);
            self.launch_dispatch_once(count, x, dispatched)?;
            let round = BOTH_HALVES.with(MoeFlags::ROUND);
            return (0..self.rounds())
                .try_for_each(|_| self.launch_dispatch_once(round, x, dispatched));
        }
        self.launches(halves)
            .try_for_each(|halves| self.launch_dispatch_once(halves, x, dispatched))
    }

    fn launch_dispatch_once(
        &self,
        halves: MoeFlags,
        x: Option<&Tensor>,
        dispatched: &Dispatched,
    ) -> Result<()> {
        let (moe, batch) = (&self.moe, &*self.batch);
        let shared = &*moe.shared;
        let (ids, weights) = &dispatched.selected;
        let launch = moe.launch(MoeDispatch {
            rows: (&batch.rows).into(),
            x: words(x.unwrap_or(&batch.none)),
            ids: ids.into(),
            weights: weights.into(),
            placement: (&shared.placement).into(),
            own: (&batch.own).into(),
            meta: (&batch.meta).into(),
            out: (&batch.out).into(),
            tokens_per_expert: (&shared.tokens_per_expert).into(),
            wait_ns: (&shared.wait_ns).into(),
            mask: (&shared.mask).into(),
            shape: moe.shape(halves),
            config: moe.digest(halves, batch),
        });
        // SAFETY: `dispatched` has checked that the tensors of the caller have the right types and
        // sizes, are aligned to 16 bytes, and do not overlap what the launch writes. The memories
        // of the micro-batch do not overlap, except for `out` in rank-major order, which a launch
        // in low latency mode then does not access. `bind` orders launches by their accesses to
        // tensors.
        unsafe { moe.submit(launch) }
    }

    /// Launches combine. The sending half has no `out`, and the receiving half no `y`.
    fn launch_combine(
        &self,
        halves: MoeFlags,
        y: Option<&Tensor>,
        dispatched: &Dispatched,
        out: Option<&Tensor>,
    ) -> Result<()> {
        const OPERATION: &str = "moe_combine";
        let (moe, batch) = (&self.moe, &*self.batch);
        let Shared { config, info, .. } = &*moe.shared;
        self.check_halves(OPERATION, halves)?;
        self.check_own(OPERATION, dispatched)?;
        let (ids, weights) = &dispatched.selected;
        let tokens = ids.len() / config.top_k as usize;
        if let Some(y) = y {
            let count = info.results * config.hidden;
            moe.check(OPERATION, ("y", y), config.input, count)?;
        }
        if let Some(out) = out {
            let count = tokens * config.hidden;
            moe.check(OPERATION, ("out", out), config.input, count)?;
            let read = [("ids", ids), ("weights", weights), ("y", y.unwrap_or(ids))];
            moe.check_overlap(OPERATION, batch, &read, Some(("out", out)))?;
        }
        if self.rounds() > 0 {
            return (0..self.rounds()).try_for_each(|round| {
                let halves = match round {
                    0 => halves.with(MoeFlags::FIRST),
                    _ => halves,
                };
                self.launch_combine_once(halves, y, dispatched, out)
            });
        }
        self.launches(halves)
            .try_for_each(|halves| self.launch_combine_once(halves, y, dispatched, out))
    }

    fn launch_combine_once(
        &self,
        halves: MoeFlags,
        y: Option<&Tensor>,
        dispatched: &Dispatched,
        out: Option<&Tensor>,
    ) -> Result<()> {
        let (moe, batch) = (&self.moe, &*self.batch);
        let config = &moe.shared.config;
        let (ids, weights) = &dispatched.selected;
        let none = &batch.none;
        let arguments = MoeCombine {
            rows: (&batch.rows).into(),
            results: (&batch.results).into(),
            y: words(y.unwrap_or(none)),
            ids: ids.into(),
            weights: weights.into(),
            own: (&batch.own).into(),
            mask: (&moe.shared.mask).into(),
            out: words(out.unwrap_or(none)),
            missing: (&batch.missing).into(),
            shape: moe.shape(halves),
            config: moe.digest(halves, batch),
        };
        let mut launch = moe.launch(arguments);
        if !config.copies_rows() && halves.has(MoeFlags::SEND) {
            // Once they have the results, the peers may overwrite the rows.
            launch = launch.exposing(&batch.out);
        }
        // SAFETY: as in `launch_dispatch_once`; the checks are those of `launch_combine`.
        unsafe { moe.submit(launch) }
    }
}

/// Returns a tensor as words of 4 bytes. Its length is a multiple of 8 elements of at least 2
/// bytes.
fn words(tensor: &Tensor) -> Buffer<'_, u32> {
    let count = tensor.len() * tensor.dtype().size() / 4;
    // SAFETY: the tensor's memory has the words, and is valid as long as the tensor or a clone of
    // it lives.
    unsafe { Buffer::new(tensor.as_ptr(), count as u64, DType::U32, tensor) }
}

/// Memory of a micro-batch that each rank allocates on its own.
struct LocalMemory {
    own: Tensor,
    meta: Tensor,
    none: Tensor,
    missing: Tensor,
    /// Copies of the rows and their scales.
    copies: Option<Tensor>,
}

impl LocalMemory {
    fn new(comm: &Communicator, config: &MoeConfig, shape: &MoeShape, blocks: u32) -> Result<Self> {
        let ranks = comm.size() as usize;
        let tensor = |count| comm.tensor(DType::U32, count);
        let copies = match config.copies_rows() {
            true => {
                let elements = shape.capacity as usize * config.hidden;
                let words = match config.scales_type() {
                    Some(_) => shape.scales_at() + shape.scales_words(),
                    None => elements * config.received_type().size() / 4,
                };
                Some(tensor(words)?)
            }
            false => None,
        };
        Ok(Self {
            own: tensor(shape.own(ranks, blocks as usize).words)?,
            meta: tensor(shape.meta(ranks).words)?,
            none: comm.tensor(config.input, 0)?,
            missing: tensor(config.max_tokens)?,
            copies,
        })
    }
}

impl Batch {
    /// Creates the windows of a micro-batch. All ranks must call this together.
    fn new(
        comm: &Communicator,
        shape: &MoeShape,
        blocks: u32,
        index: usize,
        memory: LocalMemory,
    ) -> Result<Self> {
        let (ranks, blocks) = (comm.size() as usize, blocks as usize);
        let options = |signals| WindowOptions::new().signals(signals).counters(0);
        let rows = shape.window_words(ranks, blocks);
        let rows = comm.alloc_window(DType::U32, rows, options(4))?;
        let results = shape.window_results(ranks, blocks) * shape.result as usize;
        let results = match comm.alloc_window(DType::U32, results, options(2)) {
            Ok(results) => results,
            Err(error) => {
                // The creation has failed on all ranks.
                let _ = rows.free();
                return Err(error);
            }
        };
        let out = memory.copies.unwrap_or_else(|| rows.tensor().clone());
        Ok(Self {
            index,
            own: memory.own,
            meta: memory.meta,
            none: memory.none,
            missing: memory.missing,
            out,
            rows,
            results,
            dispatches: AtomicU64::new(0),
        })
    }

    /// Frees the windows. All ranks must call this together.
    fn free(&self) -> Result<()> {
        self.rows.clone().free().and(self.results.clone().free())
    }

    /// Returns the bytes of this rank's memory.
    fn bytes(&self) -> usize {
        let is_window = self.out.as_ptr() == self.rows.tensor().as_ptr();
        let copies = Some(&self.out).filter(|_| !is_window);
        [
            self.rows.tensor(),
            self.results.tensor(),
            &self.own,
            &self.meta,
            &self.missing,
        ]
        .into_iter()
        .chain(copies)
        .map(|tensor| tensor.len() * tensor.dtype().size())
        .sum()
    }
}
