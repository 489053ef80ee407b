//! Operations that overlap with work on a consumer or producer stream, and their binding to
//! kernels.

use core::mem::offset_of;

use crate::collective::{Op, Operands};
use crate::comm::observe::{Arguments, OpInfo};
use crate::comm::ready_flags::ReadyFlags;
use crate::comm::submit::{PreparedOp, invalid};
use crate::comm::{Communicator, Work};
use crate::options::ReduceOp;
use crate::plan::Plan;
use crate::stream::{Event, Stream};
use crate::tensor::{Input, Output, Tensor, TensorUse};
use crate::{Error, Result};
use fusewire_device::DType;
use fusewire_device::args::RawBuffer;
use fusewire_device::comm::WindowAddr;
use fusewire_device::native::Kernel;
use fusewire_kernels::Exchange;
use fusewire_kernels::overlap::{
    ALL_GATHER_WITH_FLAGS, AllGatherWithFlagsParams, FAILED, REDUCE_SCATTER_ON_ARRIVAL_ANY,
    ReduceScatterOnArrivalParams, Tiles, select_reduce_scatter_on_arrival,
};

/// Returns the kernel instance for a type and a reduction.
fn instance(dtype: DType, op: ReduceOp) -> &'static Kernel<ReduceScatterOnArrivalParams> {
    let compiled = match op {
        ReduceOp::Sum => select_reduce_scatter_on_arrival(dtype),
        _ => None,
    };
    compiled.unwrap_or(const { &REDUCE_SCATTER_ON_ARRIVAL_ANY })
}

impl Communicator {
    /// Copies the `input` of rank r to row r of every rank's `output`, like
    /// [`Communicator::all_gather_single_async`], and sets a word of `flags` as soon as a chunk has
    /// arrived, so that the computation on the stream `consumer` can begin with the chunks that
    /// have arrived. Chunk c of rank r consists of `chunk` elements of its row, starting at element
    /// `c * chunk` (the last chunk may be shorter), and has word
    /// `r * input.len().div_ceil(chunk) + c`. This rank's own chunks arrive first, then those of
    /// the next ranks in ring order.
    ///
    /// All words are cleared on `consumer`. Then the operation runs on the communicator's stream,
    /// which must be another stream ([`Communicator::on`]). Work that is enqueued on `consumer`
    /// afterwards waits for chunks by [`ReadyFlags::stream_wait`] or in its own kernels. Before
    /// `consumer` ends a capture, or uses the words or `output` for another purpose, it must wait
    /// for the whole operation by [`Work::wait`]. Both streams may be captured; a replay begins
    /// with cleared words.
    ///
    /// # Safety
    /// The library does not order the operation with work on `consumer` and with threads that
    /// access parts of `output`. They must not access a chunk of `output` before they have acquired
    /// its word, and must not write a chunk before the operation has ended. Work on other streams
    /// must not access parts of `output` before the operation has ended. Accesses of the host and
    /// of other streams to all of `output` wait for the operation, except in a graph. In a graph,
    /// every access to `output` must follow the words of its chunks or [`Work::wait`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] before any data moves: for lengths and types that
    /// [`Communicator::all_gather_single`] refuses, too few words, words or streams of another
    /// device, a `consumer` that is the communicator's stream, chunks of 0 elements, or a backend
    /// other than Fusewire's kernels. The communicator's first failure. The [`Work`] reports a
    /// failure while the operation runs, which also ends all waits for words.
    pub unsafe fn all_gather_with_flags_async(
        &self,
        consumer: &Stream,
        output: &Tensor,
        input: &Tensor,
        flags: &ReadyFlags,
        chunk: usize,
    ) -> Result<Work> {
        let prepared = self.prepare_all_gather_with_flags(consumer, output, input, flags, chunk)?;
        self.fork(consumer, flags, &prepared, TensorUse::Write(output))
    }

    pub(in crate::comm) fn prepare_all_gather_with_flags<'a>(
        &self,
        consumer: &Stream,
        output: &'a Tensor,
        input: &'a Tensor,
        flags: &'a ReadyFlags,
        chunk: usize,
    ) -> Result<PreparedOp<'a>> {
        let (count, dtype) = (input.len(), input.dtype());
        let mut op = Op::AllGatherWithFlags {
            count,
            dtype,
            chunk,
        };
        self.check_operands(&mut op, &Operands::new(output, input))?;
        self.check_streams(op.name(), consumer, [output, input], flags, count, chunk)?;
        let (to, from) = (Output::from(output), Input::from(input));
        let plan = self.plan_checked(&op);
        let call = op.call(plan.algorithm, 0).0;
        let version = self.inner.windows.version();
        let len = self.chunks(count, chunk) as u64;
        let params = AllGatherWithFlagsParams {
            header: self.header(call, count as u64),
            source: from.raw_bytes(),
            target: to.as_input().raw_bytes(),
            words: RawBuffer {
                at: flags.as_ptr().cast(),
                len,
            },
            arrivals: RawBuffer {
                at: flags.arrivals().cast(),
                len,
            },
            exchange: self.overlap_exchange(&plan, &from, to.count),
            tiles: Tiles {
                span: chunk.max(1) as u64,
                wanted: 0,
            },
        };
        let op_info = OpInfo {
            call,
            input_count: count as u64,
            output_count: to.count as u64,
        };
        let tensors = [
            TensorUse::Unordered(output),
            TensorUse::Read(input),
            TensorUse::Unordered(flags.words()),
        ];
        let tensors = tensors.map(Some);
        let mut prepared = PreparedOp::new(
            self,
            &ALL_GATHER_WITH_FLAGS,
            params,
            tensors,
            false,
            op_info,
        );
        prepared.note_windows(
            version,
            const { &[offset_of!(AllGatherWithFlagsParams, exchange.source_at)] },
        );
        Ok(prepared.keeping(flags.keep()))
    }

    /// Reduces row r of every rank's `input` to the `output` of rank r, like
    /// [`Communicator::reduce_scatter_single_async`], and reads each tile of this rank's input as
    /// soon as its word of `tiles` shows that it is complete, so that the first tiles are
    /// transferred while the computation on the stream `producer` makes the others. Tile t of row r
    /// consists of `tile` elements, starting at element `t * tile` (the last tile may be shorter),
    /// has word `r * output.len().div_ceil(tile) + t`, and is complete when the word is `target` or
    /// more. Tiles are read in the order of t, those of all rows together, so the computation
    /// should make them in that order.
    ///
    /// [`Communicator::all_gather_with_flags_async`] describes the rules for streams, captures and
    /// words. Call this method first, then enqueue the producer's work, which raises words by
    /// [`ReadyFlags::stream_write`], in its own kernels or by [`ReadyFlags::add`], and then call
    /// [`Work::wait`]. Each tile is an exchange between all ranks, so few large tiles are faster
    /// than many small ones.
    ///
    /// On a GPU the operation waits in `Options::blocks` blocks, which stay resident until it ends.
    /// The kernels that make the tiles must run on the other multiprocessors and must be loaded
    /// before this call, because a library that loads a kernel at its first call may wait for the
    /// device.
    ///
    /// The result is bitwise equal to that of [`Communicator::reduce_scatter_single`].
    ///
    /// # Safety
    /// The library does not order the operation with work on `producer` and with threads that
    /// access parts of `input`. They must not write a tile of `input` from the moment at which its
    /// word may reach `target` until the operation has ended. Work on other streams must not write
    /// parts of `input` before the operation has ended. Accesses of the host and of other streams
    /// to all of `input` wait for the operation, unless `input` is a single tile, and except in a
    /// graph. In a graph, every write to `input` must precede the update of the tile's word or
    /// follow [`Work::wait`].
    ///
    /// # Errors
    /// The errors of [`Communicator::all_gather_with_flags_async`]; [`Error::InvalidArgument`] for
    /// a `target` of 0 or above 2^30 - 1, and on a GPU if the operation would leave no
    /// multiprocessor free. If a tile is not completed in time, the [`Work`] reports a failure that
    /// names it ([`crate::Failure::tile`]).
    #[expect(
        clippy::too_many_arguments,
        reason = "what an overlapped reduction is made of"
    )]
    pub unsafe fn reduce_scatter_on_arrival_async(
        &self,
        producer: &Stream,
        output: &Tensor,
        input: &Tensor,
        tiles: &ReadyFlags,
        tile: usize,
        target: u32,
        op: ReduceOp,
    ) -> Result<Work> {
        let prepared = self.prepare_reduce_scatter_on_arrival(
            producer,
            [output, input],
            tiles,
            tile,
            target,
            op,
        )?;
        // A producer may write a single tile by a copy to all of the input.
        let is_one_tile = self.chunks(output.len(), tile) == 1;
        let operand = match is_one_tile {
            true => TensorUse::Unordered(input),
            false => TensorUse::Read(input),
        };
        self.fork(producer, tiles, &prepared, operand)
    }

    pub(in crate::comm) fn prepare_reduce_scatter_on_arrival<'a>(
        &self,
        producer: &Stream,
        [output, input]: [&'a Tensor; 2],
        tiles: &'a ReadyFlags,
        tile: usize,
        target: u32,
        op: ReduceOp,
    ) -> Result<PreparedOp<'a>> {
        let (count, dtype) = (output.len(), output.dtype());
        let mut operation = Op::ReduceScatterOnArrival {
            count,
            dtype,
            reduction: op.code(),
            tile,
        };
        let name = operation.name();
        let operands = Operands::new(output, input).with_reduction(op);
        self.check_operands(&mut operation, &operands)?;
        self.check_streams(name, producer, [output, input], tiles, count, tile)?;
        if target == 0 || target >= FAILED {
            return Err(invalid(
                name,
                format!("target {target}; a tile is done at 1 to {}", FAILED - 1),
            ));
        }
        self.check_free_multiprocessors(name)?;
        let (to, from) = (Output::from(output), Input::from(input));
        let plan = self.plan_checked(&operation);
        let call = operation.call(plan.algorithm, 0).0;
        let version = self.inner.windows.version();
        let params = ReduceScatterOnArrivalParams {
            header: self.header(call, count as u64),
            source: from.raw_bytes(),
            target: to.as_input().raw_bytes(),
            counters: RawBuffer {
                at: tiles.as_ptr().cast(),
                len: self.chunks(count, tile) as u64,
            },
            exchange: Exchange {
                scalar: op.scalar(dtype),
                chunk: plan.chunk.min(tile.max(1) as u64),
                ..self.overlap_exchange(&plan, &from, count)
            },
            tiles: Tiles {
                span: tile.max(1) as u64,
                wanted: u64::from(target),
            },
        };
        let op_info = OpInfo {
            call,
            input_count: from.count as u64,
            output_count: count as u64,
        };
        let tensors = [
            TensorUse::Write(output),
            TensorUse::Unordered(input),
            TensorUse::Unordered(tiles.words()),
        ];
        let tensors = tensors.map(Some);
        let kernel = instance(dtype, op);
        let mut prepared = PreparedOp::new(self, kernel, params, tensors, false, op_info);
        prepared.note_windows(
            version,
            const { &[offset_of!(ReduceScatterOnArrivalParams, exchange.source_at)] },
        );
        Ok(prepared.keeping(tiles.keep()))
    }

    /// Returns the exchange arguments of an overlapped kernel that writes `written` elements.
    fn overlap_exchange(&self, plan: &Plan, input: &Input<'_>, written: usize) -> Exchange {
        let size = input.dtype.size();
        let source_at = WindowAddr(self.inner.addr_of(input.ptr, input.count * size));
        let copied = !source_at.is_some();
        self.exchange_at(plan, [source_at, WindowAddr::NONE], size, written, copied)
    }

    /// Checks the streams, devices and words of an overlapped operation of `count` elements per
    /// rank in chunks of `span` elements.
    fn check_streams(
        &self,
        name: &'static str,
        compute: &Stream,
        tensors: [&Tensor; 2],
        flags: &ReadyFlags,
        count: usize,
        span: usize,
    ) -> Result<()> {
        let refuse = |detail: String| Err(invalid(name, detail));
        if self.inner.executor.backend.is_some() {
            return refuse(format!(
                "backend {} raises no words and waits for none; only Fusewire's own kernels do",
                self.backend()
            ));
        }
        let device = self.device();
        if compute.device() != device {
            let other = compute.device();
            return refuse(format!(
                "the compute stream is on {other}, the communicator is on {device}"
            ));
        }
        if let Some(tensor) = tensors.iter().find(|tensor| tensor.device() != device) {
            let other = tensor.device();
            return refuse(format!(
                "a tensor is on {other}, the communicator is on {device}"
            ));
        }
        if compute.id() == self.stream.id() {
            return refuse(
                "the compute stream is the communicator's own stream, so each would wait for the \
                 other; give the operation a stream of its own: comm.on(&stream)"
                    .to_owned(),
            );
        }
        if compute.synchronizes_with(&self.stream) {
            return refuse(
                "one of the two streams is the legacy default stream and the other is a blocking \
                 stream, so each would wait for the other; give the operation a non-blocking \
                 stream: comm.on(&stream)"
                    .to_owned(),
            );
        }
        if !flags.is_of(&self.inner) {
            return refuse("the words belong to another communicator".to_owned());
        }
        if span == 0 && count > 0 {
            return refuse("chunks of no elements".to_owned());
        }
        let needed = self.chunks(count, span);
        if flags.len() < needed {
            return refuse(format!(
                "{} words; {count} elements of {} ranks in chunks of {span} need {needed}",
                flags.len(),
                self.size()
            ));
        }
        Ok(())
    }

    /// Checks that on a GPU the operation leaves multiprocessors for the work that it waits for.
    fn check_free_multiprocessors(&self, name: &'static str) -> Result<()> {
        let Some(on_gpu) = &self.inner.executor.on_gpu else {
            return Ok(());
        };
        let all = on_gpu.gpu().properties().multiprocessors;
        let (blocks, there) = (
            self.options().blocks,
            self.stream.multiprocessors().unwrap_or(all),
        );
        if blocks < there {
            return Ok(());
        }
        Err(invalid(
            name,
            format!(
                "{blocks} blocks would wait on {there} multiprocessors, which leaves none for what \
                 they wait for; make the communicator with fewer (Options::blocks)"
            ),
        ))
    }

    /// Clears the words on the compute stream, then enqueues the operation on the communicator's
    /// stream, which waits for the clearing. The flags order its accesses to `operand`.
    fn fork(
        &self,
        compute: &Stream,
        flags: &ReadyFlags,
        prepared: &PreparedOp<'_>,
        operand: TensorUse<'_>,
    ) -> Result<Work> {
        self.inner.check()?;
        if self.stream.capture_number()?.is_some() && compute.capture_number()?.is_none() {
            return Err(Error::capture(
                "the communicator's stream is captured, the compute stream is not: begin the \
                 capture on the compute stream; the communicator's stream then joins it",
            ));
        }
        flags.clear_on(compute)?;
        let cleared = Event::new();
        compute.record(&cleared)?;
        self.stream.wait_event(&cleared)?;
        self.stream.branch();
        let flagged = Some((operand, compute));
        let work = self.submit_flagged(prepared, Arguments::Tensors, flagged)?;
        flags.used_on(&self.stream)?;
        Ok(work)
    }
}
