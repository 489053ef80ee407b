//! Launches a real kernel on one rank, writes its input, and checks its output.
//!
//! Reductions add bytes (wrapping) or small integers in f32, so results are exact.

use fusewire_device::args::RawBuffer;
use fusewire_device::call::{Call, Operation};
use fusewire_device::comm::WindowAddr;
use fusewire_device::element::{ReductionCode, Sum};
use fusewire_device::layout::LaunchHeader;
use fusewire_device::mem::{self, Order, Scope};
use fusewire_device::{Block, DType, Machine};
use fusewire_kernels::all_reduce::{AllReducePacketParams, two_shot};
use fusewire_kernels::barrier::BarrierParams;
use fusewire_kernels::batch::{BatchOp, BatchParams};
use fusewire_kernels::fused::{
    NormShape, NormSpec, OutputFormat, ReduceNormParams, Route, Statistics,
};
use fusewire_kernels::movement::MovementParams;
use fusewire_kernels::one_sided::RingPutParams;
use fusewire_kernels::overlap::{AllGatherWithFlagsParams, ReduceScatterOnArrivalParams, Tiles};
use fusewire_kernels::point::{RecvParams, SendParams};
use fusewire_kernels::reduction::ReductionParams;
use fusewire_kernels::vector::{AllGatherVParams, AllToAllVParams};
use fusewire_kernels::{
    ALIGNMENT, Exchange, all_reduce, barrier, batch, fused, movement, one_sided, overlap, point,
    reduction, vector,
};

use crate::broken;
use crate::input::number;
use crate::memory_image::MemoryImage;
use crate::{moe, windows};

/// Operation of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// all_reduce with packets, f32.
    Packet,
    /// all_reduce with packets in two shots, f32.
    PacketTwoShot,
    /// all_reduce in one shot: every rank reads the inputs of all ranks.
    Signal,
    /// all_reduce in one shot, f32.
    SignalF32,
    /// all_reduce in two shots.
    TwoShot,
    /// reduce to this root.
    Reduce(u32),
    /// reduce_scatter.
    ReduceScatter,
    /// all_gather.
    AllGather,
    /// broadcast from this root.
    Broadcast(u32),
    /// scatter from this root.
    Scatter(u32),
    /// gather to this root.
    Gather(u32),
    /// all_to_all.
    AllToAll,
    /// all_gather_v: rank r sends `count - r` units, or none if `r > count`.
    AllGatherV,
    /// all_to_all_v: rank a sends `(a + b) % (count + 1)` units to rank b.
    AllToAllV,
    /// Reduction + residual + RMSNorm of rows of eight f32: one row with [`Route::OneShot`], and
    /// one row per rank with the other routes.
    Norm(Route),
    /// Reduction + residual + RMSNorm of one row, with packets.
    NormPacket,
    /// A write with a signal to the next rank of a ring.
    RingPut,
    /// A kernel with a window.
    Window(windows::Kernel),
    /// A launch of a mixture of experts. The count is not used.
    Moe(moe::Launch),
    /// all_gather with a ready flag per row. Rank 0 has a consumer that reads each row whose flag
    /// is set.
    GatherWithFlags,
    /// reduce_scatter with an arrival counter per row. Rank 0 has a producer that writes the rows.
    ScatterOnArrival,
    /// barrier.
    Barrier,
    /// send from the first rank to the second rank. Other ranks launch nothing.
    Transfer(u32, u32),
    /// A batch in a ring: every rank sends more bytes than a channel holds to the next rank, and
    /// receives as many from the previous rank.
    Ring,
    /// A deliberately broken kernel.
    Broken(broken::Kernel),
}

/// Number of elements of a row of a norm.
const HIDDEN: usize = 8;

/// Offset of the norm's weight in private memory, after the residual.
const WEIGHT_AT: usize = 512;

fn residual(column: usize) -> f32 {
    column as f32 + 1.0
}

fn weight(column: usize) -> f32 {
    column as f32 + 3.0
}

/// Location of a rank's buffers. The rank publishes this location to its peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// Buffers are in a window on every rank.
    Registered,
    /// Buffers are outside windows on every rank, so transfers go through staging.
    Staged,
    /// Buffers are in a window on rank 0, and outside windows on the other ranks.
    Mixed,
}

/// Description of one launch.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Operation.
    pub op: Op,
    /// Number of elements of a row. Elements are bytes, except f32 in [`Op::Packet`],
    /// [`Op::PacketTwoShot`] and [`Op::SignalF32`], and 64-bit words in [`Op::RingPut`] and
    /// [`Op::Window`]. Norms ignore the number.
    pub count: usize,
    /// Location of the buffers.
    pub memory: Memory,
    /// If true, a reduction writes its output over its input.
    pub in_place: bool,
    /// Timeout of the launch's waits on each rank. 0 selects the timeout of the communicator.
    pub timeout_ns: [u64; 4],
}

impl Step {
    /// Creates a launch of `op` on `count` elements in windows.
    pub const fn new(op: Op, count: usize) -> Self {
        Self {
            op,
            count,
            memory: Memory::Registered,
            in_place: false,
            timeout_ns: [0; 4],
        }
    }

    /// Sets the location of the buffers.
    #[must_use]
    pub const fn memory(self, memory: Memory) -> Self {
        Self { memory, ..self }
    }

    /// Makes the operation write its output over its input.
    #[must_use]
    pub const fn in_place(self) -> Self {
        Self {
            in_place: true,
            ..self
        }
    }

    /// Sets the timeout on each rank.
    #[must_use]
    pub const fn timeouts(self, timeout_ns: [u64; 4]) -> Self {
        Self { timeout_ns, ..self }
    }

    /// Returns true if `rank` takes part in the operation.
    pub fn has(&self, rank: u32) -> bool {
        match self.op {
            Op::Transfer(from, to) => rank == from || rank == to,
            _ => true,
        }
    }

    /// Returns the input of `rank` in launch `epoch`.
    pub fn input(&self, ranks: u32, rank: u32, epoch: u64) -> Vec<u8> {
        let number = |i| number(rank, epoch, i);
        let rows = ranks as usize;
        match self.op {
            Op::Packet | Op::PacketTwoShot | Op::SignalF32 | Op::Norm(_) | Op::NormPacket => {
                let count = match self.op {
                    Op::Norm(Route::OneShot) | Op::NormPacket => HIDDEN,
                    Op::Norm(_) => HIDDEN * rows,
                    _ => self.count,
                };
                (0..count)
                    .flat_map(|i| (number(i) as f32).to_le_bytes())
                    .collect()
            }
            Op::RingPut | Op::Window(_) => (0..self.count as u64)
                .flat_map(|i| number(i as usize).to_le_bytes())
                .collect(),
            Op::ReduceScatter | Op::ScatterOnArrival | Op::Scatter(_) | Op::AllToAll => {
                (0..self.count * rows).map(|i| number(i) as u8).collect()
            }
            Op::AllToAllV => {
                let sent: usize = (0..ranks).map(|to| self.split(rank, to)).sum();
                (0..sent).map(|i| number(i) as u8).collect()
            }
            Op::Barrier | Op::Moe(_) => Vec::new(),
            _ => (0..self.count).map(|i| number(i) as u8).collect(),
        }
    }

    fn split(&self, from: u32, to: u32) -> usize {
        match self.op {
            Op::AllGatherV => self.count.saturating_sub(from as usize),
            _ => (from + to) as usize % (self.count + 1),
        }
    }

    /// Returns the expected output of `rank` in launch `epoch`, or an empty vector if `rank` has no
    /// output.
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
            Op::Packet | Op::PacketTwoShot | Op::SignalF32 => float_sums()
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
                // Sums of small integers are exact in f32.
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
            Op::Window(kernel) if !kernel.gathers() => Vec::new(),
            Op::Barrier | Op::Moe(_) => Vec::new(),
            Op::Window(_) => inputs.concat(),
            Op::Transfer(from, to) => {
                if rank == to {
                    inputs[from as usize].clone()
                } else {
                    Vec::new()
                }
            }
        }
    }

    /// Writes the input of launch `epoch` and fills the output with poison, as a program would
    /// before the call.
    pub fn prepare(&self, image: &MemoryImage, rank: u32, epoch: u64) {
        if let Op::Moe(launch) = self.op {
            return launch.prepare(image, rank);
        }
        let ranks = image.config().ranks;
        let input = self.input(ranks, rank, epoch);
        assert!(
            input.len() <= image.config().user,
            "the input of {:?} exceeds `user`",
            self.op
        );
        let poison = vec![0xee; self.output(ranks, rank, epoch).len()];
        // SAFETY: the input buffer and the output buffer have `user` bytes each. The size of the
        // input is checked above, and the models choose `user` large enough for the output. Private
        // memory has room for the tables at their offsets. If a peer still accesses the buffers,
        // the model checker reports a race.
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

    /// Clears flags and counters, as the compute stream does before the launch. If the launch waits
    /// for tiles but `rank` has no producer, sets the counters so that all tiles count as done.
    pub fn clear(&self, image: &MemoryImage, rank: u32) {
        let made = self.op == Op::ScatterOnArrival && !self.has_compute(rank);
        for index in 0..image.config().ranks as usize {
            let word = image.words(rank).wrapping_add(index);
            // SAFETY: `words` has one u32 per rank, and no launch of this rank is running.
            unsafe { mem::store_u32(word, u32::from(made), Order::Relaxed, Scope::Device) };
            // SAFETY: `arrivals` has one u64 per rank, and no launch of this rank is running.
            unsafe { image.arrivals(rank).add(index).write(0) };
        }
    }

    /// Runs the consumer or producer of `rank` in launch `epoch`. If `early` is true, the producer
    /// marks a tile as done before it has written the tile.
    ///
    /// # Panics
    /// Panics if the ready flag of a row is set but the row has not arrived.
    pub fn compute(&self, image: &MemoryImage, rank: u32, epoch: u64, early: bool) {
        let ranks = image.config().ranks;
        for row in 0..ranks {
            let word = image.words(rank).wrapping_add(row as usize);
            let at = row as usize * self.count;
            let raise = || {
                // SAFETY: `words` has one u32 per rank, and all accesses to it are atomic.
                unsafe { mem::fetch_add_u32(word, 1, Order::Release, Scope::Device) }
            };
            if self.op == Op::ScatterOnArrival {
                if early {
                    raise();
                }
                let input = self.input(ranks, rank, epoch);
                let tile = &input[at..at + self.count];
                let to = image.source(rank).wrapping_add(at);
                // SAFETY: the models choose `user` large enough for all rows.
                unsafe { mem::copy(to, tile.as_ptr(), tile.len()) };
                if !early {
                    raise();
                }
                continue;
            }
            // Read the flag only once: the model checker explores all positions of this read. If a
            // loop waited for the flag, the checker could schedule only that loop and never run the
            // other ranks.
            // SAFETY: `words` has one u32 per rank, and all accesses to it are atomic.
            if unsafe { mem::load_u32(word, Order::Acquire, Scope::Device) } < overlap::THERE {
                continue;
            }
            let expected = self.input(ranks, row, epoch);
            let mut found = vec![0; expected.len()];
            let from = self.target(image, rank).wrapping_add(at);
            // SAFETY: the models choose `user` large enough for all rows.
            unsafe { mem::copy(found.as_mut_ptr(), from, found.len()) };
            assert!(
                found == expected,
                "row {row} has not arrived although its flag is raised: {found:?}"
            );
        }
    }

    /// Checks that the ready flag of every chunk is set after a launch with a consumer.
    ///
    /// # Panics
    /// Panics if a ready flag is not set.
    pub fn verify_flags(&self, image: &MemoryImage, rank: u32) {
        for row in 0..image.config().ranks {
            let word = image.words(rank).wrapping_add(row as usize);
            // SAFETY: `words` has one u32 per rank, and all accesses to it are atomic.
            let seen = unsafe { mem::load_u32(word, Order::Relaxed, Scope::Device) };
            assert!(
                self.op != Op::GatherWithFlags || seen == overlap::THERE,
                "the ready flag of row {row} is {seen}"
            );
        }
    }

    /// Checks the output of launch `epoch`.
    ///
    /// # Panics
    /// Panics if the output is wrong.
    pub fn verify(&self, image: &MemoryImage, rank: u32, epoch: u64) {
        let expected = self.output(image.config().ranks, rank, epoch);
        let mut found = vec![0; expected.len()];
        let from = self.target(image, rank);
        // SAFETY: the models choose `user` large enough for the outputs of their operations.
        unsafe { mem::copy(found.as_mut_ptr(), from, found.len()) };
        assert!(
            found == expected,
            "wrong result on rank {rank} in launch {epoch} of {:?}: {found:?}, not {expected:?}",
            self.op
        );
        match self.op {
            Op::Window(kernel) => kernel.verify(image, rank),
            Op::Moe(launch) => launch.verify(image, rank),
            _ => {}
        }
    }

    /// Checks what a launch that has failed must not have written.
    ///
    /// # Panics
    /// Panics if it has been written.
    pub fn verify_failed(&self, image: &MemoryImage, rank: u32) {
        if let Op::Moe(launch) = self.op {
            launch.verify_failed(image, rank);
        }
    }

    fn target(&self, image: &MemoryImage, rank: u32) -> *mut u8 {
        if self.in_place {
            image.source(rank)
        } else {
            image.target(rank)
        }
    }

    /// Returns the operation that `rank` launches.
    pub fn operation(&self, rank: u32) -> Operation {
        self.call(rank).operation()
    }

    fn call(&self, rank: u32) -> Call {
        let reduction = ReductionCode::Sum as u8;
        let byte = DType::U8 as u8;
        let (operation, dtype, reduction, root) = match self.op {
            Op::Packet | Op::PacketTwoShot | Op::SignalF32 => {
                (Operation::AllReduce, DType::F32 as u8, reduction, 0xffff)
            }
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
            Op::RingPut | Op::Window(_) | Op::Moe(_) => (Operation::User, 0, 0, 0),
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
            // The call words of sender and receiver differ, but both must use the same fingerprint,
            // which is in the low 16 bits.
            call.0 = call.0 & !0xffff | 0x7a7a;
        }
        call
    }

    /// Runs one lane of the kernel.
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
        let chunk = ALIGNMENT as u64;
        let header = LaunchHeader {
            constants,
            call,
            count,
            timeout_ns: timeout,
        };
        let user = image.config().user as u64;
        let raw = |at: *mut u8, len: u64| RawBuffer { at, len };
        let source = raw(source.cast_mut(), user);
        let target = raw(target, user);
        let params = ReductionParams {
            header,
            source,
            target,
            exchange: Exchange {
                source_at: WindowAddr(source_at),
                target_at: WindowAddr(target_at),
                scalar: 0,
                factor: 0,
                chunk,
                size: 1,
                policy: 0,
            },
        };
        let exchange = Exchange {
            target_at: WindowAddr::NONE,
            ..params.exchange
        };
        let movement = MovementParams {
            header,
            source,
            target,
            exchange,
        };
        let packets = AllReducePacketParams {
            header,
            source: raw(source.at, count),
            target: raw(target.at, count),
        };
        let counts = image.private(rank).cast::<u64>();
        let ranks = u64::from(image.config().ranks);
        let counts_at = |first: usize| raw(counts.wrapping_add(first).cast(), ranks);
        let floats = image.private(rank);
        // SAFETY: `constants` belongs to a live communicator. The buffers, tables, flags and
        // counters of the image are large enough for the operation: `prepare` checks the size of
        // the input.
        unsafe {
            match self.op {
                Op::Packet => all_reduce::all_reduce_packet__run::<f32, Sum, _>(block, &packets),
                Op::PacketTwoShot => {
                    two_shot::all_reduce_packet_two_shot__run::<f32, Sum, _>(block, &packets);
                }
                Op::SignalF32 => {
                    reduction::reduce_whole__run::<f32, Sum, _>(block, &params);
                }
                Op::Signal | Op::ReduceScatter => {
                    reduction::reduce_whole_any__run(block, &params);
                }
                Op::TwoShot | Op::Reduce(_) => {
                    reduction::reduce_shards_any__run(block, &params);
                }
                Op::GatherWithFlags => overlap::all_gather_with_flags__run(
                    block,
                    &AllGatherWithFlagsParams {
                        header,
                        source,
                        target,
                        words: raw(image.words(rank).cast(), ranks),
                        arrivals: raw(image.arrivals(rank).cast(), ranks),
                        exchange,
                        tiles: Tiles {
                            span: count,
                            wanted: 0,
                        },
                    },
                ),
                Op::ScatterOnArrival => overlap::reduce_scatter_on_arrival_any__run(
                    block,
                    &ReduceScatterOnArrivalParams {
                        header,
                        source,
                        target,
                        counters: raw(image.words(rank).cast(), ranks),
                        exchange,
                        tiles: Tiles {
                            span: count,
                            wanted: 1,
                        },
                    },
                ),
                Op::AllGather
                | Op::Broadcast(_)
                | Op::Scatter(_)
                | Op::Gather(_)
                | Op::AllToAll => movement::move_rows__run(block, &movement),
                Op::AllGatherV => vector::all_gather_v__run(
                    block,
                    &AllGatherVParams {
                        header: LaunchHeader { count: 0, ..header },
                        source,
                        target,
                        counts: counts_at(0),
                        exchange,
                    },
                ),
                Op::AllToAllV => vector::all_to_all_v__run(
                    block,
                    &AllToAllVParams {
                        header: LaunchHeader { count: 0, ..header },
                        source,
                        target,
                        send_counts: counts_at(0),
                        receive_counts: counts_at(64),
                        exchange,
                    },
                ),
                Op::Norm(_) | Op::NormPacket => {
                    let route = match self.op {
                        Op::Norm(route) => route,
                        _ => Route::OneShot,
                    };
                    let rows = if route == Route::TwoShot { ranks } else { 1 };
                    let shape = NormShape {
                        rows,
                        hidden: HIDDEN as u64,
                        source_at: exchange.source_at,
                        kept_at: WindowAddr::NONE,
                        out_at: params.exchange.target_at,
                        scales_at: WindowAddr::NONE,
                        stride: 0,
                        scratch: 0,
                        chunk: ranks,
                        epsilon: 0.5,
                        spec: NormSpec::new(Statistics::Rms, OutputFormat::Unquantized, route),
                    };
                    let count = rows * HIDDEN as u64;
                    let inputs = match route {
                        Route::ReduceScatter => ranks * count,
                        _ => count,
                    };
                    let params = ReduceNormParams {
                        header: LaunchHeader { count, ..header },
                        source: raw(source.at, inputs),
                        residual: raw(floats.cast(), 4 * count),
                        weight: raw(floats.add(WEIGHT_AT).cast(), HIDDEN as u64),
                        bias: RawBuffer::EMPTY,
                        kept: RawBuffer::EMPTY,
                        out: raw(target.at, 4 * count),
                        scales: RawBuffer::EMPTY,
                        shape,
                    };
                    if let Op::NormPacket = self.op {
                        fused::reduce_norm_packet__run::<f32, _>(block, &params);
                    } else {
                        fused::reduce_norm__run::<f32, _>(block, &params);
                    }
                }
                Op::RingPut => one_sided::ring_put__run(
                    block,
                    &RingPutParams {
                        header,
                        window: image.device_window(),
                        source: raw(source.at, count),
                    },
                ),
                Op::Window(kernel) => kernel.run(block, header, image, source.at, count),
                Op::Moe(launch) => launch.run(block, header, image, rank),
                Op::Barrier => barrier::barrier__run(block, &BarrierParams { header }),
                Op::Transfer(from, _) if rank == from => {
                    let source = raw(source.at, count);
                    point::send__run(block, &SendParams { header, source });
                }
                Op::Ring => batch::batch__run(
                    block,
                    &BatchParams {
                        header: LaunchHeader { count: 2, ..header },
                        ops: counts.cast(),
                        progress: counts.add(64),
                    },
                ),
                Op::Transfer(..) => {
                    let target = raw(target.at, count);
                    point::recv__run(block, &RecvParams { header, target });
                }
                Op::Broken(kernel) => {
                    kernel.run(
                        block,
                        constants,
                        call,
                        count,
                        timeout,
                        WindowAddr::new(1, 0),
                        source.at,
                        target.at,
                    );
                }
            }
        }
    }
}
