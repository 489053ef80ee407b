//! Prepared operations as commands of a stream.

use core::any::Any;
use std::sync::Arc;

use fusewire_device::arch::SHARED_BYTES;
use fusewire_device::native::{KernelInfo, NativeEntry};

use super::prepared_op::{Entry, PARAM_WORDS, PreparedOp};
use crate::comm::attributes::LaunchAttributes;
use crate::comm::{Communicator, multi_rank_grid};
use crate::cpu::{self, BlockOrder, Grid, HostFn, KeepAlive, Launch, LaunchOwner, MAX_PARAM_BYTES};
use crate::gpu::{self, Gpu, Scratch, Upload};
use crate::stream::Command;
use crate::{Error, Result};

impl Communicator {
    /// Returns the command that executes the operation on the communicator's stream.
    pub(super) fn command(&self, prepared: &PreparedOp<'_>, id: u64) -> Result<Command> {
        Ok(match &prepared.entry {
            Entry::Native(entry) => {
                Command::Cpu(cpu::Command::Launch(self.launch_of(prepared, *entry, id)?))
            }
            Entry::Gpu(kernel) => Command::Gpu(gpu::Command::Launch(
                self.gpu_launch_of(prepared, kernel, id)?,
            )),
            Entry::HandOff => self.stream.call_command(self.hand_off_call(prepared, id)),
        })
    }

    fn hand_off_call(&self, prepared: &PreparedOp<'_>, id: u64) -> HostFn {
        let (inner, run) = (Arc::clone(&self.inner), prepared.hand_off.clone());
        let op_info = prepared.op_info.launch(id);
        let keep = (
            prepared
                .tensors
                .map(|used| used.map(|used| used.tensor().keep())),
            prepared.table.clone(),
        );
        Arc::new(move || {
            let _alive = &keep;
            let word = inner.before(&op_info)?;
            let ran = run.as_ref().map_or(Ok(()), |run| run());
            if let Err(error) = &ran {
                inner.poison(error);
            }
            let after = inner.after(word, &op_info, ran.is_ok());
            ran.and(after)
        })
    }

    fn keep(prepared: &PreparedOp<'_>) -> KeepAlive {
        let [a, b, c] = prepared
            .tensors
            .map(|used| used.map(|used| used.tensor().keep() as Arc<dyn Any + Send + Sync>));
        [a, b, c, prepared.table.clone()]
    }

    fn gpu_launch_of(
        &self,
        prepared: &PreparedOp<'_>,
        info: &KernelInfo,
        id: u64,
    ) -> Result<gpu::Launch> {
        let Some(on_gpu) = &self.inner.executor.on_gpu else {
            return Err(Error::launch("a kernel of a GPU on the CPU"));
        };
        let kernel = on_gpu.gpu().kernel(info)?;
        let params = &bytemuck::bytes_of(&prepared.params)[..prepared.bytes];
        let (blocks, large) = self.inner.group.options.block_limits();
        let most = match prepared.grid.is_large {
            true => large,
            false => blocks,
        };
        let mut shape = on_gpu.shape(kernel, most.min(prepared.grid.blocks));
        if shape.blocks > blocks {
            on_gpu.check_stream(&self.stream, shape.blocks)?;
        }
        shape.threads = shape.threads.min(prepared.grid.threads);
        let mut attributes = prepared.attributes.unwrap_or_default();
        // The driver refuses a cooperative launch whose blocks are not resident together. On the
        // CPU, where every block has a thread, this flag is not needed.
        attributes.cooperative |= info.contract.grid;
        if attributes != LaunchAttributes::default() {
            for (value, own) in [
                (attributes.blocks, &mut shape.blocks),
                (attributes.threads, &mut shape.threads),
            ] {
                if value != 0 {
                    *own = value;
                }
            }
            attributes.check_on(on_gpu.gpu(), kernel, shape.blocks, shape.threads)?;
            shape.shared_bytes = attributes.shared_bytes;
            shape.cluster = attributes.cluster;
            shape.cooperative = attributes.cooperative;
            // Code without a wait for the previous kernel would start too early.
            shape.dependent = attributes.dependent && kernel.properties.dependent_launch;
        }
        let operation = prepared.op_info.call().operation();
        let grid = on_gpu
            .grid()
            .filter(|_| multi_rank_grid::is_grid_launch(info, operation));
        let member = grid.map(|grid| gpu::GridMember {
            grid: Arc::clone(grid),
            rank: self.inner.group.rank,
            timeout: self.inner.group.timeout(self.timeout_ns),
        });
        // SAFETY: the parameters belong to the kernel (`PreparedOp::new`), and loading the image
        // compared its argument types. The launch keeps the tensors alive; for memory without a
        // tensor, the caller waits for the launch or guarantees its lifetime (captures).
        let launch = unsafe { gpu::Launch::new(kernel, params, shape)? };
        Ok(launch
            .owned_by(Arc::clone(&self.inner) as _, prepared.op_info.launch(id))
            .keeping(Self::keep(prepared))
            .uploading(prepared.upload)
            .in_grid(member))
    }

    /// Allocates device memory for the table of a launch. Returns the memory, and the copy that the
    /// launch must make first. During a capture, this call itself copies the table and waits for
    /// the copy.
    pub(in crate::comm) fn table_on_gpu(
        &self,
        gpu: &Arc<Gpu>,
        bytes: &[u8],
    ) -> Result<(Scratch, Option<Upload>)> {
        if self.stream.is_capturing() {
            return Ok((Scratch::holding(gpu, bytes)?, None));
        }
        let (scratch, upload) = Scratch::filled_by_stream(gpu, bytes)?;
        Ok((scratch, Some(upload)))
    }

    fn launch_of(&self, prepared: &PreparedOp<'_>, entry: NativeEntry, id: u64) -> Result<Launch> {
        const { assert!(MAX_PARAM_BYTES >= 8 * PARAM_WORDS) };
        let options = &self.inner.group.options;
        let own = prepared
            .attributes
            .map_or(0, |attributes| attributes.blocks);
        let blocks = if own == 0 { options.blocks } else { own };
        let order = if blocks > 1 {
            BlockOrder::Concurrent
        } else {
            BlockOrder::Sequential
        };
        let grid = Grid {
            blocks,
            lanes: options.testing.lanes,
            warp: options.testing.warp,
            shared_bytes: SHARED_BYTES as u32,
            order,
        };
        let params = &bytemuck::bytes_of(&prepared.params)[..prepared.bytes];
        let keep = Self::keep(prepared);
        // SAFETY: the parameters belong to the entry (`PreparedOp::new`). The launch keeps the
        // tensors alive; for memory without a tensor, the caller waits for the launch or guarantees
        // its lifetime (captures).
        let launch = unsafe { Launch::new(entry, params, grid)? };
        Ok(launch
            .of_kernel(self.running(prepared))
            .owned_by(Arc::clone(&self.inner) as _, prepared.op_info.launch(id))
            .keeping(keep))
    }
}
