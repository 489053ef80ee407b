//! Fused operations: communication and adjacent arithmetic in one launch.

use core::mem::offset_of;
use std::sync::Arc;

use fusewire_device::args::RawBuffer;
use fusewire_device::call::{Call, Operation};
use fusewire_device::comm::WindowAddr;
use fusewire_kernels::fused::{
    NormShape, NormSpec, REDUCE_NORM_F32, REDUCE_NORM_PACKET_F32, ReduceNormParams, Route,
    select_reduce_norm, select_reduce_norm_packet,
};

use super::norm::{CheckedNorm, Norm};
use super::observe::{Arguments, OpInfo};
use super::submit::{PreparedOp, invalid};
use super::{Communicator, LaunchAttributes, Work};
use crate::Result;
use crate::algorithm::Algorithm;
use crate::collective::Op;
use crate::plan::{self, Agreed, Plan};
use crate::tensor::{Input, Output};

/// Byte offsets of the window addresses in the parameters of the kernel.
const WINDOWS: &[usize] = &[
    offset_of!(ReduceNormParams, shape.source_at),
    offset_of!(ReduceNormParams, shape.kept_at),
    offset_of!(ReduceNormParams, shape.out_at),
    offset_of!(ReduceNormParams, shape.scales_at),
];

impl Communicator {
    /// Sums `norm`'s input over all ranks, adds the residual, and normalizes each row, in one
    /// launch. Supports f32, f16 and bf16, and fp8 output. Every rank gets all rows.
    ///
    /// The sum over the ranks is rounded to the input's type. The sum with the residual, if there
    /// is one, is rounded to the residual's type and is the value of `residual_out`. The norm is
    /// computed from the rounded sum and rounded to the input's type, and fp8 is converted from the
    /// rounded norm. So the result is bitwise equal to that of an all_reduce followed by separate
    /// steps, for every algorithm and number of rows.
    ///
    /// Zero rows are allowed.
    ///
    /// # Errors
    /// [`crate::Error::InvalidArgument`] before any data moves; the communicator's first failure.
    pub fn all_reduce_norm(&self, norm: &Norm<'_>) -> Result<()> {
        let prepared = self.prepare_norm(Operation::AllReduceNorm, norm, true)?;
        self.run_accessing(&prepared, &norm.accesses(), Arguments::Fused(norm))
    }

    /// Enqueues [`Communicator::all_reduce_norm`]. All buffers must be tensors: the launch, and any
    /// graph that contains it, keeps them allocated.
    ///
    /// # Errors
    /// The errors of [`Communicator::all_reduce_norm`]; [`crate::Error::InvalidArgument`] if a
    /// buffer is not a tensor.
    pub fn all_reduce_norm_async(&self, norm: &Norm<'_>) -> Result<Work> {
        let prepared = self.prepare_norm(Operation::AllReduceNorm, norm, false)?;
        self.submit_with(
            &prepared.accessing(&norm.accesses()),
            Arguments::Fused(norm),
        )
    }

    /// Computes the result of [`Communicator::all_reduce_norm`], of which each rank gets only its
    /// part of the rows, as in a reduce_scatter. The input has the number of ranks times the
    /// output's rows; `residual` and `residual_out` have as many rows as the output.
    ///
    /// # Errors
    /// The errors of [`Communicator::all_reduce_norm`].
    pub fn reduce_scatter_norm(&self, norm: &Norm<'_>) -> Result<()> {
        let prepared = self.prepare_norm(Operation::ReduceScatterNorm, norm, true)?;
        self.run_accessing(&prepared, &norm.accesses(), Arguments::Fused(norm))
    }

    /// Enqueues [`Communicator::reduce_scatter_norm`]. All buffers must be tensors: the launch, and
    /// any graph that contains it, keeps them allocated.
    ///
    /// # Errors
    /// The errors of [`Communicator::reduce_scatter_norm`]; [`crate::Error::InvalidArgument`] if a
    /// buffer is not a tensor.
    pub fn reduce_scatter_norm_async(&self, norm: &Norm<'_>) -> Result<Work> {
        let prepared = self.prepare_norm(Operation::ReduceScatterNorm, norm, false)?;
        self.submit_with(
            &prepared.accessing(&norm.accesses()),
            Arguments::Fused(norm),
        )
    }

    /// Returns the algorithm of [`Communicator::all_reduce_norm`] for `norm`, which is the same on
    /// all ranks.
    ///
    /// # Errors
    /// The errors of [`Communicator::all_reduce_norm`].
    pub fn plan_norm(&self, norm: &Norm<'_>) -> Result<Algorithm> {
        let operation = Operation::AllReduceNorm;
        let checked = CheckedNorm::new(operation.name(), norm, 1)?;
        Ok(self.norm_plan(&checked.op(operation), &checked).algorithm)
    }

    fn norm_plan(&self, op: &Op, norm: &CheckedNorm<'_, '_>) -> Plan {
        let wanted = match norm.algorithm() {
            Algorithm::Auto => self.options().algorithm,
            wanted => wanted,
        };
        let agreed = Agreed {
            wanted,
            ..self.agreed()
        };
        plan::plan(op, &agreed)
    }

    pub(in crate::comm) fn prepare_norm<'a>(
        &self,
        operation: Operation,
        norm: &Norm<'a>,
        borrowed: bool,
    ) -> Result<PreparedOp<'a>> {
        let name = operation.name();
        let scatters = operation == Operation::ReduceScatterNorm;
        let shards = if scatters { self.size() as usize } else { 1 };
        let norm = CheckedNorm::new(name, norm, shards)?;
        for (what, view) in norm.views() {
            let Some(view) = view else { continue };
            self.check_view(name, what, &view, borrowed)?;
        }
        let op = norm.op(operation);
        self.refuse_backend(&op, "use all_reduce and a separate norm")?;
        let Plan {
            algorithm,
            grid,
            stripe_bits,
            ..
        } = self.norm_plan(&op, &norm);
        let route = match (scatters, algorithm) {
            (true, _) => Route::ReduceScatter,
            (false, Algorithm::TwoShot) => Route::TwoShot,
            (false, _) => Route::OneShot,
        };
        let spec = norm.spec(route).with_stripe_bits(stripe_bits);
        let call = op.call(algorithm, 0).0;
        let op_info = OpInfo {
            call,
            input_count: norm.input().count as u64,
            output_count: norm.output().count as u64,
        };
        let version = self.inner.windows.version();
        let params = self.norm_params(name, &norm, spec, call)?;
        let kernel = match algorithm {
            Algorithm::Packet => {
                select_reduce_norm_packet(norm.dtype).unwrap_or(const { &REDUCE_NORM_PACKET_F32 })
            }
            _ => select_reduce_norm(norm.dtype).unwrap_or(const { &REDUCE_NORM_F32 }),
        };
        let prepared = PreparedOp::new(self, kernel, params, [None; 3], borrowed, op_info);
        let mut prepared = prepared.planned(grid);
        prepared.note_windows(version, WINDOWS);
        let prepared = if norm.is_dependent() {
            prepared.shaped(LaunchAttributes {
                dependent: true,
                ..LaunchAttributes::default()
            })
        } else {
            prepared
        };
        if borrowed {
            return Ok(prepared);
        }
        Ok(prepared.owning(Arc::new(norm.tensors())))
    }

    /// Checks the conditions that hold for each buffer.
    fn check_view(
        &self,
        name: &'static str,
        what: &str,
        view: &Input<'_>,
        borrowed: bool,
    ) -> Result<()> {
        self.refuse_slice(name, view)?;
        if !borrowed && view.tensor.is_none() {
            return Err(invalid(
                name,
                format!(
                    "{what} is no tensor; an enqueued operation keeps its memory alive, which \
                        takes tensors"
                ),
            ));
        }
        if self.inner.group.device.is_gpu()
            && view.count > 0
            && !(view.ptr as usize).is_multiple_of(16)
        {
            return Err(invalid(
                name,
                format!("{what} is at {:p}; a GPU needs 16-byte alignment", view.ptr),
            ));
        }
        Ok(())
    }

    /// Returns the bytes of staging that hold rows too long for shared memory; 0 if rows fit.
    fn scratch(&self, hidden: usize) -> u64 {
        plan::norm_scratch(self.options(), self.size(), hidden)
    }

    /// Returns the parameters of the signal or packet kernel. Packets use no window, and staging
    /// only for long rows.
    fn norm_params(
        &self,
        name: &'static str,
        norm: &CheckedNorm<'_, '_>,
        spec: NormSpec,
        call: u64,
    ) -> Result<ReduceNormParams> {
        let addr = |view: Option<Input<'_>>| match view {
            Some(view) => {
                let bytes = view.count * view.dtype.size();
                WindowAddr(self.inner.addr_of(view.ptr, bytes))
            }
            None => WindowAddr::NONE,
        };
        let target = |view: Option<Input<'_>>| match view {
            Some(view) => {
                let bytes = view.count * view.dtype.size();
                WindowAddr(self.inner.target_addr_of(view.ptr, bytes))
            }
            None => WindowAddr::NONE,
        };
        let raw = |view: Option<Input<'_>>| view.map_or(RawBuffer::EMPTY, |view| view.raw());
        let bytes = |view: Option<Input<'_>>| view.map_or(RawBuffer::EMPTY, |v| v.raw_bytes());
        let route = spec.route();
        // Peers may still read the input when rows are written, unless the rank that writes a row
        // is the only one that reads it (two-shot).
        let is_target = target(Some(norm.output().as_input())).is_some();
        let staged = norm.is_in_place() && (route != Route::TwoShot || !is_target);
        let (scratch, chunk) = if Call(call).algorithm() == Algorithm::Packet as u8 {
            self.check_scratch(name, norm, self.scratch(norm.hidden), 0)?;
            (0, 0)
        } else {
            self.norm_staging(name, norm, spec)?
        };
        let (input, output) = (norm.input(), norm.output().as_input());
        let kept = norm.residual_out().map(Output::as_input);
        Ok(ReduceNormParams {
            header: self.header(call, (norm.rows * norm.hidden) as u64),
            source: input.raw(),
            residual: bytes(norm.residual()),
            weight: norm.weight().raw(),
            bias: raw(norm.bias()),
            kept: bytes(kept),
            out: output.raw_bytes(),
            scales: bytes(norm.scales()),
            shape: NormShape {
                rows: norm.rows as u64,
                hidden: norm.hidden as u64,
                source_at: match staged {
                    true => WindowAddr::NONE,
                    false => addr(Some(input)),
                },
                kept_at: target(kept),
                out_at: target(Some(output)),
                scales_at: target(norm.scales()),
                stride: norm.stride(),
                scratch,
                chunk,
                epsilon: norm.epsilon(),
                spec,
            },
        })
    }

    /// Returns the offset of long rows in the staging for output, after the data that peers write,
    /// and the number of rows that are staged at once.
    fn norm_staging(
        &self,
        name: &'static str,
        norm: &CheckedNorm<'_, '_>,
        spec: NormSpec,
    ) -> Result<(u64, u64)> {
        let (size, hidden) = (norm.size(), norm.hidden);
        let shards = match spec.route() {
            Route::ReduceScatter => self.size() as usize,
            _ => 1,
        };
        let scratch = self.scratch(hidden);
        let outputs = match spec.route() {
            Route::TwoShot => norm.row_bytes(),
            _ => 0,
        };
        // Each part of staging is 16-byte aligned.
        let aligned = spec.out_bytes(hidden, size).is_multiple_of(16);
        let room = self.check_scratch(name, norm, scratch, if aligned { 0 } else { 32 })?;
        let input = self.options().staging_bytes as usize / (hidden * size * shards);
        let output = room.checked_div(outputs).unwrap_or(usize::MAX);
        let chunk = input.min(output);
        if chunk == 0 {
            return Err(invalid(
                name,
                format!(
                    "a row of {hidden} does not fit {} bytes of staging; raise \
                        Options::staging_bytes",
                    self.options().staging_bytes
                ),
            ));
        }
        let scratch = plan::aligned_end(self.options().staging_bytes, scratch).unwrap_or(0);
        Ok((scratch, chunk as u64))
    }

    /// Returns the bytes of output staging that remain after `scratch` and `more` bytes.
    fn check_scratch(
        &self,
        name: &'static str,
        norm: &CheckedNorm<'_, '_>,
        scratch: u64,
        more: u64,
    ) -> Result<usize> {
        let staging = self.options().staging_bytes;
        match plan::aligned_end(staging, scratch + more) {
            Some(room) => Ok(room as usize),
            None => Err(invalid(
                name,
                format!(
                    "rows of {} elements: {} blocks keep {scratch} bytes of them in staging, which \
                     has {staging}; raise Options::staging_bytes or use fewer blocks",
                    norm.hidden,
                    self.options().blocks
                ),
            )),
        }
    }
}
