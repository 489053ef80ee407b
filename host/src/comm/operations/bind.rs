//! Binds collectives to kernels.

use core::mem::offset_of;
use std::sync::Arc;

use super::{Lifetime, instances};
use crate::Result;
use crate::algorithm::Algorithm;
use crate::collective::{Collective, Counts, Op, Operands};
use crate::comm::Communicator;
use crate::comm::observe::OpInfo;
use crate::comm::submit::PreparedOp;
use crate::cpu::last_level_bytes;
use crate::gpu::{Scratch, Upload};
use crate::plan::Plan;
use crate::tensor::Tensor;
use fusewire_device::args::RawBuffer;
use fusewire_device::comm::WindowAddr;
use fusewire_device::native::Kernel;
use fusewire_kernels::Exchange;
use fusewire_kernels::all_reduce::two_shot::select_all_reduce_packet_two_shot;
use fusewire_kernels::all_reduce::{AllReducePacketParams, select_all_reduce_packet};
use fusewire_kernels::barrier::{BARRIER, BarrierParams};
use fusewire_kernels::movement::{MOVE_ROWS, MovementParams};
use fusewire_kernels::nvls::ALL_GATHER_NVLS;
use fusewire_kernels::point::{RECV, RecvParams, SEND, SendParams};
use fusewire_kernels::reduction::ReductionParams;
use fusewire_kernels::vector::{ALL_GATHER_V, ALL_TO_ALL_V, AllGatherVParams, AllToAllVParams};

/// Minimum size in bytes of staged results that bypass the caches.
const STAGED_STREAMING_BYTES: usize = 4 << 20;

/// Byte offsets of the window addresses in the parameters of kernels of rounds.
const REDUCTION_WINDOWS: &[usize] = &[
    offset_of!(ReductionParams, exchange.source_at),
    offset_of!(ReductionParams, exchange.target_at),
];
const MOVEMENT_WINDOWS: &[usize] = &[
    offset_of!(MovementParams, exchange.source_at),
    offset_of!(MovementParams, exchange.target_at),
];
const ALL_GATHER_V_WINDOWS: &[usize] = &[offset_of!(AllGatherVParams, exchange.source_at)];
const ALL_TO_ALL_V_WINDOWS: &[usize] = &[offset_of!(AllToAllVParams, exchange.source_at)];

/// A checked and planned collective.
#[derive(Clone, Copy)]
struct Planned<'b, 'a> {
    op: &'b Op,
    operands: &'b Operands<'a>,
    plan: &'b Plan,
    info: OpInfo,
}

impl Communicator {
    /// Plans a checked collective, binds it to a kernel or to a call of the backend, and passes it
    /// to `submit`. A returned [`PreparedOp`] would be copied on its way to `submit`, which takes a
    /// quarter of the time of a barrier.
    #[inline]
    pub(super) fn bind<'a, R>(
        &self,
        collective: &Collective<'a>,
        lifetime: Lifetime,
        submit: impl FnOnce(&PreparedOp<'a>) -> Result<R>,
    ) -> Result<R> {
        let Collective { op, operands } = collective;
        let plan = self.plan_checked(op);
        let info = OpInfo {
            call: op.call(plan.algorithm, self.tag).0,
            input_count: operands.input.count as u64,
            output_count: operands.output.count as u64,
        };
        if let Some(backend) = &self.inner.executor.backend {
            return submit(&self.bind_backend(backend, collective, info)?);
        }
        let planned = Planned {
            op,
            operands,
            plan: &plan,
            info,
        };
        match op {
            Op::AllReduce {
                dtype, reduction, ..
            } if plan.algorithm == Algorithm::Packet
                && let Some(kernel) = select_all_reduce_packet(*dtype, *reduction) =>
            {
                submit(&self.bind_packets(planned, kernel))
            }
            Op::AllReduce {
                dtype, reduction, ..
            } if plan.algorithm == Algorithm::PacketTwoShot
                && let Some(kernel) = select_all_reduce_packet_two_shot(*dtype, *reduction) =>
            {
                submit(&self.bind_packets(planned, kernel))
            }
            Op::AllReduce { .. } | Op::Reduce { .. } | Op::ReduceScatter { .. } => {
                submit(&self.bind_reduction(planned))
            }
            Op::Broadcast { .. }
            | Op::Scatter { .. }
            | Op::Gather { .. }
            | Op::AllToAll { .. }
            | Op::AllGather { .. } => submit(&self.bind_movement(planned)),
            Op::AllGatherV { .. } => submit(&self.bind_all_gather_v(planned, lifetime)?),
            Op::AllToAllV { .. } => submit(&self.bind_all_to_all_v(planned, lifetime)?),
            Op::Send { .. } => {
                let source = operands.input.raw_bytes();
                let header = self.header(info.call, source.len);
                submit(&self.bound(planned, &SEND, SendParams { header, source }))
            }
            Op::Recv { .. } => {
                let target = operands.output.as_input().raw_bytes();
                let header = self.header(info.call, target.len);
                submit(&self.bound(planned, &RECV, RecvParams { header, target }))
            }
            Op::Barrier => {
                let header = self.header(info.call, 0);
                submit(&self.bound(planned, &BARRIER, BarrierParams { header }))
            }
            // `check_collective` refuses these. The methods of the same names bind their operands.
            Op::AllGatherWithFlags { .. }
            | Op::ReduceScatterOnArrival { .. }
            | Op::AllReduceNorm { .. }
            | Op::ReduceScatterNorm { .. }
            | Op::VocabParallel { .. } => {
                unreachable!("{} without its operands", op.name())
            }
        }
    }

    #[inline(always)]
    fn bound<'a, P: Copy>(
        &self,
        planned: Planned<'_, 'a>,
        kernel: &Kernel<P>,
        params: P,
    ) -> PreparedOp<'a> {
        let tensors = planned.operands.tensors();
        let borrowed = planned.operands.is_borrowed();
        PreparedOp::new(self, kernel, params, tensors, borrowed, planned.info)
            .planned(planned.plan.grid)
    }

    /// Binds a kernel like [`Communicator::bound`], with window addresses at the byte offsets
    /// `fields` of the parameters. `params` resolves the addresses.
    #[inline(always)]
    fn bound_in_windows<'a, P: Copy>(
        &self,
        planned: Planned<'_, 'a>,
        kernel: &Kernel<P>,
        fields: &'static [usize],
        params: impl FnOnce() -> P,
    ) -> PreparedOp<'a> {
        let version = self.inner.windows.version();
        let mut prepared = self.bound(planned, kernel, params());
        prepared.note_windows(version, fields);
        prepared
    }

    #[inline(always)]
    fn bind_packets<'a>(
        &self,
        planned: Planned<'_, 'a>,
        kernel: &Kernel<AllReducePacketParams>,
    ) -> PreparedOp<'a> {
        let Planned { op, operands, .. } = planned;
        let params = AllReducePacketParams {
            header: self.header(planned.info.call, op.count() as u64),
            source: operands.input.raw(),
            target: operands.output.as_input().raw(),
        };
        self.bound(planned, kernel, params)
    }

    /// Binds a kernel of rounds that reduces.
    fn bind_reduction<'a>(&self, planned: Planned<'_, 'a>) -> PreparedOp<'a> {
        let Planned {
            op, operands, plan, ..
        } = planned;
        let (dtype, reduce) = (operands.input.dtype, operands.reduce);
        let select: instances::Select = match (op, plan.algorithm) {
            (Op::ReduceScatter { .. }, Algorithm::Nvls) => instances::reduce_scatter_nvls,
            (Op::ReduceScatter { .. }, _) => instances::reduce_whole,
            (_, Algorithm::Nvls) => instances::all_reduce_nvls,
            (_, Algorithm::Signal) => instances::reduce_whole,
            _ => instances::reduce_shards,
        };
        // In place, one-shot kernels would overwrite the input before all peers have read it.
        let staged = plan.algorithm == Algorithm::Signal
            && !matches!(op, Op::ReduceScatter { .. })
            && operands.is_in_place();
        let kernel = select(dtype, reduce);
        self.bound_in_windows(planned, kernel, REDUCTION_WINDOWS, || ReductionParams {
            header: self.header(planned.info.call, op.count() as u64),
            source: operands.input.raw_bytes(),
            target: operands.output.as_input().raw_bytes(),
            exchange: Exchange {
                scalar: reduce.scalar(dtype),
                factor: operands.factor.map_or(0, |it| it.as_ptr() as u64),
                ..self.exchange_of(planned, op.count(), staged, true)
            },
        })
    }

    /// Binds a kernel that only moves bytes.
    fn bind_movement<'a>(&self, planned: Planned<'_, 'a>) -> PreparedOp<'a> {
        let Planned {
            op, operands, plan, ..
        } = planned;
        let kernel: &Kernel<MovementParams> = match plan.algorithm {
            Algorithm::Nvls => &ALL_GATHER_NVLS,
            _ => &MOVE_ROWS,
        };
        // In place, a row would be overwritten before its peer has read it.
        let staged = matches!(op, Op::AllToAll { .. }) && operands.is_in_place();
        // Peers write the output by multicast only.
        let shared = plan.algorithm == Algorithm::Nvls;
        self.bound_in_windows(planned, kernel, MOVEMENT_WINDOWS, || MovementParams {
            header: self.header(planned.info.call, op.count() as u64),
            source: operands.input.raw_bytes(),
            target: operands.output.as_input().raw_bytes(),
            exchange: self.exchange_of(planned, operands.output.count, staged, shared),
        })
    }

    fn bind_all_gather_v<'a>(
        &self,
        planned: Planned<'_, 'a>,
        lifetime: Lifetime,
    ) -> Result<PreparedOp<'a>> {
        let operands = planned.operands;
        let words = self.device_words(&operands.counts, lifetime)?;
        let params = || AllGatherVParams {
            header: self.header(planned.info.call, 0),
            source: operands.input.raw_bytes(),
            target: operands.output.as_input().raw_bytes(),
            counts: self.one_each(words.outputs),
            exchange: self.exchange_of(planned, operands.output.count, false, false),
        };
        let fields = ALL_GATHER_V_WINDOWS;
        let prepared = self.bound_in_windows(planned, &ALL_GATHER_V, fields, params);
        Ok(words.kept_by(prepared))
    }

    fn bind_all_to_all_v<'a>(
        &self,
        planned: Planned<'_, 'a>,
        lifetime: Lifetime,
    ) -> Result<PreparedOp<'a>> {
        let operands = planned.operands;
        let words = self.device_words(&operands.counts, lifetime)?;
        let params = || AllToAllVParams {
            header: self.header(planned.info.call, 0),
            source: operands.input.raw_bytes(),
            target: operands.output.as_input().raw_bytes(),
            send_counts: self.one_each(words.inputs),
            receive_counts: self.one_each(words.outputs),
            exchange: self.exchange_of(planned, operands.output.count, false, false),
        };
        let fields = ALL_TO_ALL_V_WINDOWS;
        let prepared = self.bound_in_windows(planned, &ALL_TO_ALL_V, fields, params);
        Ok(words.kept_by(prepared))
    }

    /// Returns the arguments that kernels of rounds share. The input is staged if it is in no
    /// window, or if `staged` is true. `shared` is true if peers write the output. Each rank writes
    /// `written` elements of results.
    fn exchange_of(
        &self,
        planned: Planned<'_, '_>,
        written: usize,
        staged: bool,
        shared: bool,
    ) -> Exchange {
        let Planned {
            op, operands, plan, ..
        } = planned;
        // On ranks other than the root, an unused buffer may have another type.
        let size = op.dtype().map_or(1, |dtype| dtype.size());
        let addr = |at: *const u8, count: usize| WindowAddr(self.inner.addr_of(at, count * size));
        let target_at = match shared {
            true => {
                let (at, bytes) = (operands.output.ptr, operands.output.count * size);
                WindowAddr(self.inner.target_addr_of(at, bytes))
            }
            false => WindowAddr::NONE,
        };
        // An operation in place whose results are staged also stages its input, so that peers do
        // not read memory into which results are copied.
        let in_place = core::ptr::eq(operands.input.ptr, operands.output.ptr);
        let source_at = match staged || shared && in_place && !target_at.is_some() {
            true => WindowAddr::NONE,
            false => addr(operands.input.ptr, operands.input.count),
        };
        let copied = !source_at.is_some() || shared && !target_at.is_some();
        self.exchange_at(plan, [source_at, target_at], size, written, copied)
    }

    /// Returns the arguments of kernels of rounds for window addresses of input and output, and
    /// elements of `size` bytes. `copied` is true if the kernel goes through staging.
    pub(super) fn exchange_at(
        &self,
        plan: &Plan,
        [source_at, target_at]: [WindowAddr; 2],
        size: usize,
        written: usize,
        copied: bool,
    ) -> Exchange {
        Exchange {
            source_at,
            target_at,
            scalar: 0,
            factor: 0,
            chunk: plan.chunk,
            size: size as u32,
            policy: self.policy(written * size, copied),
        }
    }

    /// Returns the cache policy for results of `bytes` bytes per rank: 1 if they bypass the caches.
    /// Copied results bypass the caches if they are larger than a core's cache, because lines that
    /// another core has read must be fetched back before they can be written. Other results bypass
    /// them if those of all ranks are larger than half of the last-level cache; the other half
    /// holds the inputs. The policies of different ranks may differ.
    fn policy(&self, bytes: usize, copied: bool) -> u32 {
        let all = (bytes as u64).saturating_mul(u64::from(self.size()));
        let cached = if copied {
            bytes < STAGED_STREAMING_BYTES
        } else {
            all <= last_level_bytes() / 2
        };
        u32::from(!cached)
    }

    /// Returns kernel parameters for an array of one count per rank.
    fn one_each(&self, at: *const u64) -> RawBuffer {
        RawBuffer {
            at: at.cast_mut().cast(),
            len: u64::from(self.size()),
        }
    }

    /// Returns row lengths that the kernels of the communicator's device can read. Copies lengths
    /// in host memory if the device cannot read them, or if they may not outlive the launch.
    fn device_words(&self, counts: &[Counts<'_>; 2], lifetime: Lifetime) -> Result<DeviceWords> {
        let address = |counts: Counts<'_>| match counts.tensor() {
            Some(tensor) => tensor.as_ptr().cast_const().cast(),
            None => counts.on_host().as_ptr(),
        };
        let words = |kept| DeviceWords {
            outputs: address(counts[0]),
            inputs: address(counts[1]),
            kept,
        };
        if let Some(tensor) = counts[0].tensor() {
            return Ok(words(Kept::ByTensors([
                Some(tensor.clone()),
                counts[1].tensor().cloned(),
            ])));
        }
        let (outputs, inputs) = (counts[0].on_host(), counts[1].on_host());
        let ranks = outputs.len();
        if let Some(on_gpu) = &self.inner.executor.on_gpu {
            let words = [outputs, inputs].concat();
            let bytes = bytemuck::cast_slice(&words);
            let (copy, upload) = self.table_on_gpu(on_gpu.gpu(), bytes)?;
            let at = copy.address() as *const u64;
            return Ok(DeviceWords::contiguous(
                at,
                ranks,
                Kept::OnGpu(copy, upload),
            ));
        }
        if lifetime == Lifetime::Call && !self.stream.is_capturing() {
            return Ok(words(Kept::ByCaller));
        }
        let words: Arc<[u64]> = [outputs, inputs].concat().into();
        let at = words.as_ptr();
        Ok(DeviceWords::contiguous(at, ranks, Kept::OnHost(words)))
    }
}

/// Row lengths that a kernel reads.
struct DeviceWords {
    outputs: *const u64,
    inputs: *const u64,
    kept: Kept,
}

/// Owner of the memory of [`DeviceWords`].
enum Kept {
    /// Tensors of the operands. The operation's tensors include the first one.
    ByTensors([Option<Tensor>; 2]),
    /// The caller, for the duration of the call.
    ByCaller,
    OnHost(Arc<[u64]>),
    OnGpu(Scratch, Option<Upload>),
}

impl DeviceWords {
    /// Describes the lengths of the outputs of `ranks` ranks at `at`, followed by those of the
    /// inputs.
    fn contiguous(at: *const u64, ranks: usize, kept: Kept) -> Self {
        Self {
            outputs: at,
            inputs: at.wrapping_add(ranks),
            kept,
        }
    }

    /// Keeps copies alive as long as the launch.
    fn kept_by(self, prepared: PreparedOp<'_>) -> PreparedOp<'_> {
        match self.kept {
            Kept::ByTensors([_, None]) => prepared,
            Kept::ByTensors([_, Some(inputs)]) => prepared.also_reading(&inputs),
            Kept::ByCaller => prepared.borrowing(),
            Kept::OnHost(words) => prepared.keeping(Arc::new(words)),
            Kept::OnGpu(copy, upload) => prepared.keeping(Arc::new(copy)).uploading(upload),
        }
    }
}
