//! One launch of a real kernel on one rank, its input and the check of its output.
//!
//! Reductions are of bytes (wrapping) or of small whole numbers in f32, so results are exact.

use fusewire_device::comm::WindowAddr;
use fusewire_device::element::{ReductionCode, Sum};
use fusewire_device::mem::{self, Order, Scope};
use fusewire_device::session::{Call, Operation};
use fusewire_device::{Block, DType, Machine};
use fusewire_kernels::batch::BatchOp;
use fusewire_kernels::fused::{NormSpec, Route, Statistics, Written};
use fusewire_kernels::{
    GRANULE, all_reduce, barrier, batch, fused, movement, one_sided, overlap, point,
    reduce_scatter, vector,
};

use crate::broken;
use crate::memory_image::MemoryImage;

/// What a launch does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// all_reduce by packets, f32.
    Packet,
    /// all_reduce, every rank reads every input.
    Signal,
    /// all_reduce, every rank reads every input, f32.
    SignalF32,
    /// all_reduce in two shots.
    TwoShot,
    /// reduce to a root.
    Reduce(u32),
    /// reduce_scatter.
    ReduceScatter,
    /// all_gather.
    AllGather,
    /// broadcast.
    Broadcast(u32),
    /// scatter.
    Scatter(u32),
    /// gather.
    Gather(u32),
    /// all_to_all.
    AllToAll,
    /// all_gather_v: rank r sends `count - r` units, at least none.
    AllGatherV,
    /// all_to_all_v: rank a sends `(a + b) % (count + 1)` units to rank b.
    AllToAllV,
    /// Reduction + residual + RMSNorm of rows of eight f32: a row a rank where ranks share the
    /// rows, else one.
    Norm(Route),
    /// The same of one row by packets.
    NormPacket,
    /// Put with signal round the ring.
    RingPut,
    /// all_gather with a ready flag per row; rank 0 has a consumer, which reads each row once its
    /// flag is raised.
    GatherWithFlags,
    /// reduce_scatter with an arrival counter per row; rank 0 has a producer, which writes its
    /// rows.
    ScatterOnArrival,
    /// barrier.
    Barrier,
    /// send from the first rank to the second; the others pass.
    Transfer(u32, u32),
    /// A batch: everybody sends to the next rank and receives from the one before, more than a
    /// channel holds.
    Ring,
    /// A broken kernel.
    Broken(broken::Kernel),
}

/// Elements of a row of a norm.
const HIDDEN: usize = 8;
/// Where a rank's private memory has the norm's weight, behind its residual.
const WEIGHT_AT: usize = 512;

fn residual(column: usize) -> f32 {
    column as f32 + 1.0
}

fn weight(column: usize) -> f32 {
    column as f32 + 3.0
}

/// Where a rank's memory lies, as it reports to its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// In a window on every rank.
    Registered,
    /// In none: through staging.
    Staged,
    /// In a window on rank 0 only.
    Mixed,
}

/// One launch.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// What it does.
    pub op: Op,
    /// Elements of a row: bytes, or f32 for packets.
    pub count: usize,
    /// Where the buffers lie.
    pub memory: Memory,
    /// The output is the input (reductions).
    pub in_place: bool,
    /// Time-out of this launch's waits on each rank, 0 for the communicator's.
    pub timeout_ns: [u64; 4],
}

impl Step {
    /// `op` on `count` elements in windows.
    pub const fn new(op: Op, count: usize) -> Self {
        Self {
            op,
            count,
            memory: Memory::Registered,
            in_place: false,
            timeout_ns: [0; 4],
        }
    }

    /// In other memory.
    #[must_use]
    pub const fn memory(self, memory: Memory) -> Self {
        Self { memory, ..self }
    }

    /// The output is the input.
    #[must_use]
    pub const fn in_place(self) -> Self {
        Self {
            in_place: true,
            ..self
        }
    }

    /// With another time-out on each rank.
    #[must_use]
    pub const fn timeouts(self, timeout_ns: [u64; 4]) -> Self {
        Self { timeout_ns, ..self }
    }

    /// Whether `rank` launches anything.
    pub fn has(&self, rank: u32) -> bool {
        match self.op {
            Op::Transfer(from, to) => rank == from || rank == to,
            _ => true,
        }
    }

    /// The input of `rank` in launch `epoch`: what the user writes before it.
    pub fn input(&self, ranks: u32, rank: u32, epoch: u64) -> Vec<u8> {
        let number = |i: usize| (u64::from(rank) + 1) * 31 + epoch * 7 + i as u64 * 3;
        let rows = ranks as usize;
        match self.op {
            Op::Packet | Op::SignalF32 | Op::Norm(_) | Op::NormPacket => {
                let count = match self.op {
                    Op::Norm(Route::OneShot) | Op::NormPacket => HIDDEN,
                    Op::Norm(_) => HIDDEN * rows,
                    _ => self.count,
                };
                (0..count)
                    .flat_map(|i| (number(i) as f32).to_le_bytes())
                    .collect()
            }
            Op::RingPut => (0..self.count as u64)
                .flat_map(|i| number(i as usize).to_le_bytes())
                .collect(),
            Op::ReduceScatter | Op::ScatterOnArrival | Op::Scatter(_) | Op::AllToAll => {
                (0..self.count * rows).map(|i| number(i) as u8).collect()
            }
            Op::AllToAllV => {
                let sent: usize = (0..ranks).map(|to| self.split(rank, to)).sum();
                (0..sent).map(|i| number(i) as u8).collect()
            }
            Op::Barrier => Vec::new(),
            _ => (0..self.count).map(|i| number(i) as u8).collect(),
        }
    }

    fn split(&self, from: u32, to: u32) -> usize {
        match self.op {
            Op::AllGatherV => self.count.saturating_sub(from as usize),
            _ => (from + to) as usize % (self.count + 1),
        }
    }

    /// The output of `rank` in launch `epoch`; empty where it has none.
    pub fn output(&self, ranks: u32, rank: u32, epoch: u64) -> Vec<u8> {
        let inputs: Vec<Vec<u8>> = (0..ranks).map(|r| self.input(ranks, r, epoch)).collect();
        let (me, count) = (rank as usize, self.count);
        let sums = || -> Vec<u8> {
            (0..inputs[0].len())
                .map(|i| inputs.iter().fold(0u8, |sum, of| sum.wrapping_add(of[i])))
                .collect()
        };
        let floats = |of: &[u8]| -> Vec<f32> {
            of.chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect()
        };
        let float_sums = || -> Vec<f32> {
            let all: Vec<Vec<f32>> = inputs.iter().map(|of| floats(of)).collect();
            (0..all[0].len())
                .map(|i| all[1..].iter().fold(all[0][i], |sum, of| sum + of[i]))
                .collect()
        };
        match self.op {
            Op::Packet | Op::SignalF32 => float_sums()
                .into_iter()
                .flat_map(f32::to_le_bytes)
                .collect(),
            Op::Signal | Op::TwoShot | Op::Broken(_) => sums(),
            Op::Reduce(root) => {
                if rank == root {
                    sums()
                } else {
                    Vec::new()
                }
            }
            Op::ReduceScatter | Op::ScatterOnArrival => {
                sums()[me * count..(me + 1) * count].to_vec()
            }
            Op::AllGather | Op::GatherWithFlags => inputs.concat(),
            Op::Broadcast(root) => inputs[root as usize].clone(),
            Op::Scatter(root) => inputs[root as usize][me * count..(me + 1) * count].to_vec(),
            Op::Gather(root) => {
                if rank == root {
                    inputs.concat()
                } else {
                    Vec::new()
                }
            }
            Op::AllToAll => inputs
                .iter()
                .flat_map(|of| of[me * count..(me + 1) * count].to_vec())
                .collect(),
            Op::AllGatherV => inputs
                .iter()
                .enumerate()
                .flat_map(|(r, of)| of[..self.split(r as u32, rank)].to_vec())
                .collect(),
            Op::AllToAllV => (0..ranks)
                .flat_map(|from| {
                    let before: usize = (0..rank).map(|to| self.split(from, to)).sum();
                    let length = self.split(from, rank);
                    inputs[from as usize][before..before + length].to_vec()
                })
                .collect(),
            Op::Norm(_) | Op::NormPacket => {
                let sum = float_sums();
                let own = match self.op {
                    Op::Norm(Route::ReduceScatter) => &sum[me * HIDDEN..(me + 1) * HIDDEN],
                    _ => &sum[..],
                };
                // All of it is exact: small integers.
                own.chunks(HIDDEN)
                    .flat_map(|row| {
                        let values: Vec<f32> = (0..HIDDEN).map(|i| row[i] + residual(i)).collect();
                        let squares: f32 = values.iter().map(|value| value * value).sum();
                        let scale = 1.0 / (squares / HIDDEN as f32 + 0.5).sqrt();
                        (0..HIDDEN)
                            .map(|i| values[i] * scale * weight(i))
                            .collect::<Vec<_>>()
                    })
                    .flat_map(f32::to_le_bytes)
                    .collect()
            }
            Op::RingPut | Op::Ring => inputs[(me + ranks as usize - 1) % ranks as usize].clone(),
            Op::Barrier => Vec::new(),
            Op::Transfer(from, to) => {
                if rank == to {
                    inputs[from as usize].clone()
                } else {
                    Vec::new()
                }
            }
        }
    }

    /// The user's writes before launch `epoch`: the input, and poison where the output goes.
    pub fn prepare(&self, image: &MemoryImage, rank: u32, epoch: u64) {
        let ranks = image.config().ranks;
        let input = self.input(ranks, rank, epoch);
        assert!(input.len() <= image.config().user, "the input fits");
        let poison = vec![0xee; self.output(ranks, rank, epoch).len()];
        // SAFETY: this rank's buffers, which hold the bytes; the model says whether a peer still
        // uses them.
        unsafe {
            if !self.has_compute(rank) || self.op != Op::ScatterOnArrival {
                mem::copy(image.source(rank), input.as_ptr(), input.len());
            }
            if !self.in_place {
                mem::copy(image.target(rank), poison.as_ptr(), poison.len());
            }
            let private = image.private(rank);
            match self.op {
                Op::Norm(_) | Op::NormPacket => {
                    for row in 0..16 {
                        let values: [f32; HIDDEN] = core::array::from_fn(residual);
                        private.cast::<[f32; HIDDEN]>().add(row).write(values);
                    }
                    let weights: [f32; HIDDEN] = core::array::from_fn(weight);
                    private
                        .add(WEIGHT_AT)
                        .cast::<[f32; HIDDEN]>()
                        .write(weights);
                }
                Op::AllGatherV | Op::AllToAllV => {
                    let counts = private.cast::<u64>();
                    for peer in 0..ranks {
                        let sent = match self.op {
                            Op::AllGatherV => self.split(peer, rank),
                            _ => self.split(rank, peer),
                        };
                        counts.add(peer as usize).write(sent as u64);
                        let received = self.split(peer, rank) as u64;
                        counts.add(64 + peer as usize).write(received);
                    }
                }
                Op::Ring => {
                    let op = |kind: u32, peer: u32, at: *mut u8| BatchOp {
                        kind,
                        peer,
                        after: batch::NONE,
                        unused: 0,
                        fingerprint: 0x7a7a,
                        bytes: self.count as u64,
                        at: at as u64,
                        to: 0,
                    };
                    let (next, before) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
                    private.cast::<[BatchOp; 2]>().write([
                        op(batch::kind::SEND, next, image.source(rank)),
                        op(batch::kind::RECV, before, image.target(rank)),
                    ]);
                }
                _ => {}
            }
        }
    }

    /// Returns true if a consumer or producer of `rank` runs concurrently with the launch.
    pub fn has_compute(&self, rank: u32) -> bool {
        matches!(self.op, Op::GatherWithFlags | Op::ScatterOnArrival) && rank == 0
    }

    /// Clears the words, as the compute stream does before launch and computation. Of a rank
    /// without a computation all tiles are made.
    pub fn clear(&self, image: &MemoryImage, rank: u32) {
        let made = self.op == Op::ScatterOnArrival && !self.has_compute(rank);
        for index in 0..image.config().ranks as usize {
            let word = image.words(rank).wrapping_add(index);
            // SAFETY: words of this rank, which nobody else uses before the launch.
            unsafe { mem::store_u32(word, u32::from(made), Order::Relaxed, Scope::Device) };
            // SAFETY: as above.
            unsafe { image.arrivals(rank).add(index).write(0) };
        }
    }

    /// Runs the consumer or producer of `rank` in launch `epoch`; with `early` the producer marks a
    /// tile as done before it has written it.
    ///
    /// # Panics
    /// When a row is not there although its word says so: then the model fails.
    pub fn compute(&self, image: &MemoryImage, rank: u32, epoch: u64, early: bool) {
        let ranks = image.config().ranks;
        for row in 0..ranks {
            let word = image.words(rank).wrapping_add(row as usize);
            let at = row as usize * self.count;
            let raise = || {
                // SAFETY: a word of this rank, accessed atomically only.
                unsafe { mem::fetch_add_u32(word, 1, Order::Release, Scope::Device) }
            };
            if self.op == Op::ScatterOnArrival {
                if early {
                    raise();
                }
                let input = self.input(ranks, rank, epoch);
                let tile = &input[at..at + self.count];
                let to = image.source(rank).wrapping_add(at);
                // SAFETY: this rank's input holds the bytes.
                unsafe { mem::copy(to, tile.as_ptr(), tile.len()) };
                if !early {
                    raise();
                }
                continue;
            }
            // One look at some time: the tool tries them all. Who waited here beside two ranks that
            // wait could be preferred to the one that gets on.
            // SAFETY: as above.
            if unsafe { mem::load_u32(word, Order::Acquire, Scope::Device) } < overlap::THERE {
                continue;
            }
            let expected = self.input(ranks, row, epoch);
            let mut found = vec![0; expected.len()];
            let from = self.target(image, rank).wrapping_add(at);
            // SAFETY: this rank's output holds the bytes.
            unsafe { mem::copy(found.as_mut_ptr(), from, found.len()) };
            assert!(found == expected, "row {row} is not there: {found:?}");
        }
    }

    /// Checks after a launch with a consumer that every chunk's flag is raised.
    ///
    /// # Panics
    /// When one is not: so the model fails.
    pub fn raised(&self, image: &MemoryImage, rank: u32) {
        for row in 0..image.config().ranks {
            let word = image.words(rank).wrapping_add(row as usize);
            // SAFETY: a word of this rank, accessed atomically only.
            let seen = unsafe { mem::load_u32(word, Order::Relaxed, Scope::Device) };
            assert!(
                self.op != Op::GatherWithFlags || seen == overlap::THERE,
                "the word of row {row} is {seen}"
            );
        }
    }

    /// The user's reads after launch `epoch`.
    ///
    /// # Panics
    /// When the output is wrong: so the model fails.
    pub fn verify(&self, image: &MemoryImage, rank: u32, epoch: u64) {
        let expected = self.output(image.config().ranks, rank, epoch);
        let mut found = vec![0; expected.len()];
        let from = self.target(image, rank);
        // SAFETY: this rank's output holds the bytes.
        unsafe { mem::copy(found.as_mut_ptr(), from, found.len()) };
        assert!(
            found == expected,
            "wrong result on rank {rank} in launch {epoch} of {:?}: {found:?}, not {expected:?}",
            self.op
        );
    }

    fn target(&self, image: &MemoryImage, rank: u32) -> *mut u8 {
        if self.in_place {
            image.source(rank)
        } else {
            image.target(rank)
        }
    }

    fn call(&self, rank: u32) -> Call {
        let reduction = ReductionCode::Sum as u8;
        let byte = DType::U8 as u8;
        let (operation, dtype, reduction, root) = match self.op {
            Op::Packet | Op::SignalF32 => (Operation::AllReduce, DType::F32 as u8, reduction, 0),
            Op::Signal | Op::TwoShot => (Operation::AllReduce, byte, reduction, 0xffff),
            Op::Broken(_) => (Operation::User, byte, reduction, 0),
            Op::Reduce(root) => (Operation::Reduce, byte, reduction, root as u16),
            Op::ReduceScatter => (Operation::ReduceScatter, byte, reduction, 0),
            Op::AllGather => (Operation::AllGather, byte, 0, 0),
            Op::GatherWithFlags => (Operation::AllGatherWithFlags, byte, 0, 0),
            Op::ScatterOnArrival => (Operation::ReduceScatterOnArrival, byte, reduction, 0),
            Op::Broadcast(root) => (Operation::Broadcast, byte, 0, root as u16),
            Op::Scatter(root) => (Operation::Scatter, byte, 0, root as u16),
            Op::Gather(root) => (Operation::Gather, byte, 0, root as u16),
            Op::AllToAll => (Operation::AllToAll, byte, 0, 0),
            Op::AllGatherV => (Operation::AllGatherV, byte, 0, 0),
            Op::AllToAllV => (Operation::AllToAllV, byte, 0, 0),
            Op::Norm(Route::ReduceScatter) => {
                (Operation::ReduceScatterNorm, DType::F32 as u8, 0, 0)
            }
            Op::Norm(_) | Op::NormPacket => (Operation::AllReduceNorm, DType::F32 as u8, 0, 0),
            Op::RingPut => (Operation::User, 0, 0, 0),
            Op::Barrier => (Operation::Barrier, 0, 0, 0),
            Op::Ring => (Operation::Batch, byte, 0, rank as u16),
            Op::Transfer(from, to) => {
                if rank == from {
                    (Operation::Send, byte, 0, to as u16)
                } else {
                    (Operation::Recv, byte, 0, from as u16)
                }
            }
        };
        let mut call = Call::new(operation, dtype, reduction, 0, root, self.count as u64);
        if let Op::Transfer(..) = self.op {
            // Both ends of a channel agree on the fingerprint.
            call.0 = call.0 & !0xffff | 0x7a7a;
        }
        call
    }

    /// Runs the kernel: one lane of `block`.
    pub fn launch<M: Machine>(&self, image: &MemoryImage, rank: u32, block: Block<M>) {
        if !self.has(rank) {
            return;
        }
        let registered = match self.memory {
            Memory::Registered => true,
            Memory::Staged => false,
            Memory::Mixed => rank == 0,
        };
        let addr = |at: WindowAddr| if registered { at.0 } else { WindowAddr::NONE.0 };
        let constants = image.constants(rank);
        let call = self.call(rank).0;
        let timeout = self.timeout_ns[rank as usize % 4];
        let (source, target) = (image.source(rank).cast_const(), self.target(image, rank));
        let source_at = addr(image.source_addr());
        let target_at = if self.in_place {
            source_at
        } else {
            addr(image.target_addr())
        };
        let count = self.count as u64;
        let chunk = GRANULE as u64;
        macro_rules! reduce {
            ($kernel:expr) => {
                $kernel(
                    block, constants, call, count, timeout, source, source_at, target, target_at,
                    0, chunk, 0,
                )
            };
        }
        macro_rules! movement {
            ($kernel:expr) => {
                $kernel(
                    block, constants, call, count, 1, timeout, source, source_at, target, chunk, 0,
                )
            };
        }
        let counts = image.private(rank).cast::<u64>();
        let user = image.config().user as u64;
        let floats = image.private(rank);
        // SAFETY: the image's communicator is live, its buffers hold what the step moves.
        unsafe {
            match self.op {
                Op::Packet => all_reduce::all_reduce_packet::<f32, Sum>(
                    block, constants, call, count, timeout, source, target,
                ),
                Op::Signal => reduce!(all_reduce::all_reduce_signal_any),
                Op::SignalF32 => reduce!(all_reduce::all_reduce_signal::<f32, Sum>),
                Op::TwoShot | Op::Reduce(_) => reduce!(all_reduce::reduce_shards_any),
                Op::ReduceScatter => reduce!(reduce_scatter::reduce_scatter_any),
                Op::AllGather => movement!(movement::all_gather),
                Op::GatherWithFlags => overlap::all_gather_with_flags(
                    block,
                    constants,
                    call,
                    count,
                    1,
                    timeout,
                    source,
                    source_at,
                    target,
                    chunk,
                    image.words(rank),
                    image.arrivals(rank),
                    count,
                    0,
                ),
                Op::ScatterOnArrival => overlap::reduce_scatter_on_arrival_any(
                    block,
                    constants,
                    call,
                    count,
                    timeout,
                    source,
                    source_at,
                    target,
                    0,
                    chunk,
                    image.words(rank),
                    count,
                    1,
                    0,
                ),
                Op::Broadcast(_) => movement!(movement::broadcast),
                Op::Scatter(_) => movement!(movement::scatter),
                Op::Gather(_) => movement!(movement::gather),
                Op::AllToAll => movement!(movement::all_to_all),
                Op::AllGatherV => vector::all_gather_v(
                    block, constants, call, 1, timeout, source, source_at, user, target, user,
                    counts, chunk, 0,
                ),
                Op::AllToAllV => vector::all_to_all_v(
                    block,
                    constants,
                    call,
                    1,
                    timeout,
                    source,
                    source_at,
                    user,
                    target,
                    user,
                    counts,
                    counts.add(64),
                    chunk,
                    0,
                ),
                Op::Norm(route) => fused::reduce_norm::<f32>(
                    block,
                    constants,
                    call,
                    if route == Route::TwoShot {
                        u64::from(image.config().ranks)
                    } else {
                        1
                    },
                    HIDDEN as u64,
                    timeout,
                    source,
                    source_at,
                    floats,
                    floats.add(WEIGHT_AT),
                    core::ptr::null(),
                    core::ptr::null_mut(),
                    WindowAddr::NONE.0,
                    target,
                    target_at,
                    core::ptr::null_mut(),
                    WindowAddr::NONE.0,
                    0,
                    0,
                    u64::from(image.config().ranks),
                    0.5,
                    NormSpec::new(Statistics::Rms, Written::Same, route).0,
                ),
                Op::NormPacket => fused::reduce_norm_packet::<f32>(
                    block,
                    constants,
                    call,
                    1,
                    HIDDEN as u64,
                    timeout,
                    source,
                    floats,
                    floats.add(WEIGHT_AT),
                    core::ptr::null(),
                    core::ptr::null_mut(),
                    target,
                    core::ptr::null_mut(),
                    0,
                    0,
                    0.5,
                    NormSpec::new(Statistics::Rms, Written::Same, Route::OneShot).0,
                ),
                Op::RingPut => one_sided::ring_put(
                    block,
                    constants,
                    call,
                    count,
                    timeout,
                    source.cast(),
                    image.target_addr().0,
                    0,
                    counts.add(128),
                ),
                Op::Barrier => barrier::barrier(block, constants, call, timeout),
                Op::Transfer(from, _) if rank == from => {
                    point::send(block, constants, call, count, timeout, source);
                }
                Op::Ring => batch::batch(
                    block,
                    constants,
                    call,
                    2,
                    timeout,
                    counts.cast(),
                    counts.add(64),
                ),
                Op::Transfer(..) => point::recv(block, constants, call, count, timeout, target),
                Op::Broken(kernel) => {
                    kernel.run(
                        block,
                        constants,
                        call,
                        count,
                        timeout,
                        WindowAddr::new(1, 0),
                        source,
                        target,
                    );
                }
            }
        }
    }
}
