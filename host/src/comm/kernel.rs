//! Launches of kernels with typed arguments.

use core::any::Any;
use core::fmt;
use core::time::Duration;
use std::sync::Arc;

use fusewire_device::arch::{RESERVED_BYTES, SHARED_BYTES};
use fusewire_device::call::Call;
use fusewire_device::layout::LaunchHeader;
use fusewire_device::native::{
    ArgumentValue, Buffer, Contract, Kernel, KernelArguments, QueueBuffer, SafeKernel, WindowBuffer,
};
use fusewire_device::window::scratch_bytes;

use super::attributes::LaunchAttributes;
use super::observe::OpInfo;
use super::submit::{PreparedOp, invalid};
use super::{Communicator, Queue, Window, Work};
use crate::cpu::report_faults;
use crate::tensor::{Tensor, TensorUse};
use crate::usage::AccessList;
use crate::user_kernels;
use crate::{DType, Result};

impl<'a, T> From<&'a Tensor> for Buffer<'a, T> {
    fn from(tensor: &'a Tensor) -> Self {
        // SAFETY: the tensor's memory is valid as long as the tensor or a clone of it lives.
        unsafe { Self::new(tensor.as_ptr(), tensor.len() as u64, tensor.dtype(), tensor) }
    }
}

impl<'a, T> From<&'a Window> for WindowBuffer<'a, T> {
    fn from(window: &'a Window) -> Self {
        let part = window.tensor();
        // SAFETY: the description is valid as long as the window or a clone of it lives.
        unsafe {
            Self::new(
                window.device_window(),
                part.len() as u64,
                part.dtype(),
                window.signals(),
                window,
            )
        }
    }
}

impl<'a, T> From<&'a Queue> for QueueBuffer<'a, T> {
    fn from(queue: &'a Queue) -> Self {
        // SAFETY: `alloc_queue` made the window, with the rings of a queue.
        unsafe { Self::new(queue.window().into()) }
    }
}

/// A launch of a kernel, from [`Communicator::kernel`].
///
/// It runs on the communicator's stream. By default it has the number of blocks
/// ([`Options::blocks`](crate::Options::blocks)) and the timeout of the communicator.
#[derive(Debug)]
#[must_use = "nothing runs before `launch` or `enqueue`"]
pub struct KernelLaunch<'c, A> {
    comm: &'c Communicator,
    arguments: A,
    attributes: LaunchAttributes,
    timeout: Option<Duration>,
    kept: Vec<Arc<dyn Any + Send + Sync>>,
    /// Tensors that peers may write once the launch has begun.
    exposed: Vec<Tensor>,
}

impl Communicator {
    /// Begins a launch of a kernel of another crate. `#[kernel]` generates a struct of the kernel's
    /// arguments, whose memory fields take tensors and windows:
    ///
    /// ```ignore
    /// comm.kernel(Scale { x: (&tensor).into(), factor: 2.0 }).launch()?;
    /// ```
    ///
    /// The launch keeps the memory allocated until it has completed. A graph keeps the memory of
    /// its launches allocated as long as the graph exists.
    pub fn kernel<A: KernelArguments>(&self, arguments: A) -> KernelLaunch<'_, A> {
        KernelLaunch {
            comm: self,
            arguments,
            attributes: LaunchAttributes::default(),
            timeout: None,
            kept: Vec::new(),
            exposed: Vec::new(),
        }
    }
}

impl<A: KernelArguments> KernelLaunch<'_, A> {
    /// Sets the number of blocks, which is at most [`Options::blocks`](crate::Options::blocks) and
    /// equal on all ranks.
    pub fn blocks(mut self, blocks: u32) -> Self {
        self.attributes.blocks = blocks;
        self
    }

    /// Sets the shape of the launch.
    pub fn attributes(mut self, attributes: LaunchAttributes) -> Self {
        self.attributes = attributes;
        self
    }

    /// Sets the timeout of each wait in the kernel.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Keeps `tensor` allocated as long as the launch, for a kernel that takes its address as a raw
    /// pointer. Tensors and windows among the arguments are always kept.
    pub fn keeping(mut self, tensor: &Tensor) -> Self {
        self.kept.push(tensor.keep());
        self
    }

    /// Orders the launch after all accesses to `tensor`, which peers may write once the launch has
    /// begun: this rank's part of a window.
    pub(in crate::comm) fn exposing(mut self, tensor: &Tensor) -> Self {
        self.exposed.push(tensor.clone());
        self
    }

    /// Launches the kernel on the communicator's stream and waits until it has completed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) and
    /// [`Error::Launch`](crate::Error::Launch), before the kernel runs, for arguments or a shape
    /// that the kernel does not support; the communicator's failure.
    pub fn launch(self) -> Result<()>
    where
        A: SafeKernel,
    {
        self.check_safe()?;
        // SAFETY: `check_safe` found that the kernel is a safe function.
        unsafe { self.launch_unchecked() }
    }

    /// Enqueues the kernel on the communicator's stream, or adds it to the graph that the stream is
    /// capturing.
    ///
    /// # Errors
    /// The errors of [`KernelLaunch::launch`]. The [`Work`] reports a failure of the kernel.
    pub fn enqueue(self) -> Result<Work>
    where
        A: SafeKernel,
    {
        self.check_safe()?;
        // SAFETY: `check_safe` found that the kernel is a safe function.
        unsafe { self.enqueue_unchecked() }
    }

    /// Runs [`KernelLaunch::launch`] for a kernel that is an unsafe function.
    ///
    /// # Safety
    /// The arguments must meet the requirements of the kernel. The memory of raw pointers must live
    /// until the launch has completed and, if a graph contains the launch, as long as the graph.
    ///
    /// # Errors
    /// The errors of [`KernelLaunch::launch`].
    pub unsafe fn launch_unchecked(self) -> Result<()> {
        self.expect_faults();
        self.comm.run(&self.bind()?)
    }

    /// Runs [`KernelLaunch::enqueue`] for a kernel that is an unsafe function.
    ///
    /// # Safety
    /// The requirements of [`KernelLaunch::launch_unchecked`].
    ///
    /// # Errors
    /// The errors of [`KernelLaunch::enqueue`].
    pub unsafe fn enqueue_unchecked(self) -> Result<Work> {
        self.expect_faults();
        self.comm.submit(&self.bind()?)
    }

    /// Checks the launch and binds the arguments. The result can be launched many times, with the
    /// same memory and the same values, and only checks that its windows were not freed. On a GPU,
    /// also loads the kernel.
    ///
    /// # Errors
    /// The errors of [`KernelLaunch::launch`] and of [`Communicator::warm_up_kernel`].
    pub fn prepare(self) -> Result<PreparedKernel>
    where
        A: SafeKernel,
    {
        self.check_safe()?;
        // SAFETY: `check_safe` found that the kernel is a safe function.
        unsafe { self.prepare_unchecked() }
    }

    /// Runs [`KernelLaunch::prepare`] for a kernel that is an unsafe function.
    ///
    /// # Safety
    /// The requirements of [`KernelLaunch::launch_unchecked`], at every launch of the result. The
    /// memory of raw pointers must live as long as the result.
    ///
    /// # Errors
    /// The errors of [`KernelLaunch::prepare`].
    pub unsafe fn prepare_unchecked(self) -> Result<PreparedKernel> {
        self.expect_faults();
        let op = self.bind()?;
        self.comm.warm_up_kernel(&self.arguments.kernel())?;
        let tensors: Vec<_> = op
            .tensors
            .iter()
            .flatten()
            .map(|used| used.tensor().keep())
            .collect();
        Ok(PreparedKernel {
            comm: self.comm.clone(),
            op: op.detached().owning(Arc::new(tensors)),
        })
    }

    /// Checks the launch against the kernel's contract and binds the arguments.
    fn bind(&self) -> Result<PreparedOp<'_>> {
        let kernel = self.arguments.kernel();
        let info = kernel.info();
        let check = Check {
            comm: self.comm,
            name: info.name,
            contract: info.contract,
            blocks: self.block_count(),
        };
        check.shape(&self.attributes)?;
        let (mut tensors, mut accesses) = ([None; 3], AccessList::new());
        let mut kept = self.kept.clone();
        let mut first_error = None;
        let (mut queues, mut windows) = (Vec::new(), Vec::new());
        let (mut index, mut scratch) = (0, 0);
        self.arguments.visit(&mut |value| {
            let checked = match &value {
                ArgumentValue::Buffer(buffer) => check.buffer(index, buffer),
                ArgumentValue::Window(window) => check.window(index, window),
                ArgumentValue::Queue(window) => check.queue(index, window, &mut queues),
                ArgumentValue::Scratch(len) => check.scratch(index, *len, &mut scratch),
                ArgumentValue::Value => Ok(None),
            };
            index += 1;
            match checked {
                Ok(Some(Owner::Tensor(tensor))) => {
                    let tensor = match check.argument_writes(index - 1) {
                        true => TensorUse::Write(tensor),
                        false => TensorUse::Read(tensor),
                    };
                    tensor.add_to(&mut accesses);
                    match tensors.iter_mut().find(|slot| slot.is_none()) {
                        Some(slot) => *slot = Some(tensor),
                        None => kept.push(tensor.tensor().keep()),
                    }
                }
                Ok(Some(Owner::Window(window))) => {
                    kept.push(window.keep());
                    windows.push(window.end_flag());
                }
                Ok(None) => {}
                Err(error) => {
                    first_error.get_or_insert(error);
                }
            }
        });
        if let Some(error) = first_error {
            return Err(error);
        }
        for tensor in &self.exposed {
            TensorUse::Write(tensor).add_to(&mut accesses);
            kept.push(tensor.keep());
        }
        let op_info = self.op_info(&kernel, &queues);
        let header = LaunchHeader {
            constants: self.comm.constants(),
            call: op_info.call,
            count: op_info.input_count,
            timeout_ns: self.timeout.map_or(self.comm.timeout_ns(), |timeout| {
                self.comm.inner.call_timeout(timeout)
            }),
        };
        let params = self.arguments.params(header);
        let mut prepared = PreparedOp::new(self.comm, &kernel, params, tensors, false, op_info);
        if tensors.iter().all(Option::is_some) || !self.exposed.is_empty() {
            // There may be more tensors than these.
            prepared = prepared.accessing(&accesses);
        }
        if !kept.is_empty() {
            prepared = prepared.keeping(Arc::new(kept));
        }
        if !windows.is_empty() {
            prepared = prepared.taking(windows.into());
        }
        let mut attributes = self.attributes;
        attributes.threads = attributes.threads.max(info.contract.threads);
        if attributes != LaunchAttributes::default() {
            prepared = prepared.shaped(attributes);
        }
        Ok(prepared)
    }

    /// Refuses unsafe kernels. The field `kernel` of the arguments may name another kernel with the
    /// same parameters.
    fn check_safe(&self) -> Result<()> {
        let kernel = self.arguments.kernel();
        if kernel.info().contract.safe {
            return Ok(());
        }
        Err(invalid(
            kernel.info().name,
            "an unsafe function; call launch_unchecked, enqueue_unchecked or prepare_unchecked"
                .to_owned(),
        ))
    }

    /// Enables reports of invalid memory accesses for an unsafe kernel on the CPU.
    fn expect_faults(&self) {
        if !self.arguments.kernel().info().contract.safe
            && self.comm.inner.executor.on_gpu.is_none()
        {
            report_faults();
        }
    }

    /// Returns the number of blocks of the launch.
    fn block_count(&self) -> u32 {
        match self.attributes.blocks {
            0 => self.comm.inner.group.options.blocks,
            blocks => blocks,
        }
    }

    /// Returns the call word, which has the kernel and a hash of the values that must be equal on
    /// all ranks.
    fn op_info(&self, kernel: &Kernel<A::Params>, queues: &[u32]) -> OpInfo {
        // All ranks launch the same number of blocks, with the same queues.
        let (mut agreed, mut count) = (u64::from(self.block_count()), None);
        let mut mix = |value: u64| {
            agreed = (agreed.rotate_left(17) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 1;
        };
        self.arguments.agreed(&mut |value| {
            count.get_or_insert(value);
            mix(value);
        });
        for queue in queues {
            mix(u64::from(*queue));
        }
        OpInfo {
            call: Call::of_kernel(user_kernels::register(kernel.info()), agreed).0,
            input_count: count.unwrap_or(0),
            output_count: 0,
        }
    }
}

/// A kernel with bound arguments, from [`KernelLaunch::prepare`], for launches in a loop. Keeps its
/// tensors, windows and queues allocated.
///
/// A value that changes between launches, such as a number of tokens, must be in a tensor that the
/// kernel reads, as in a graph.
///
/// ```ignore
/// let step = comm.kernel(Step { x: (&x).into(), tokens: (&tokens).into() }).prepare()?;
/// for count in batches {
///     tokens.copy_from(&[count])?;
///     step.launch()?;
/// }
/// ```
#[must_use = "nothing runs before `launch` or `enqueue`"]
pub struct PreparedKernel {
    comm: Communicator,
    op: PreparedOp<'static>,
}

impl fmt::Debug for PreparedKernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedKernel")
            .field("kernel", &self.op.name)
            .finish_non_exhaustive()
    }
}

impl PreparedKernel {
    /// Launches the kernel on the communicator's stream and waits until it has completed. On an
    /// idle CPU stream, with one block of one lane and without hooks, the call itself neither
    /// allocates nor makes a system call.
    ///
    /// # Errors
    /// The communicator's failure; [`Error::InvalidArgument`](crate::Error::InvalidArgument) if a
    /// window was freed.
    pub fn launch(&self) -> Result<()> {
        self.op.check_windows()?;
        self.comm.run(&self.op)
    }

    /// Enqueues the kernel on the communicator's stream, or adds it to the graph that the stream is
    /// capturing.
    ///
    /// # Errors
    /// The errors of [`PreparedKernel::launch`]. The [`Work`] reports a failure of the kernel.
    pub fn enqueue(&self) -> Result<Work> {
        self.op.check_windows()?;
        self.comm.submit(&self.op)
    }
}

/// Tensor or window that an argument refers to and that the launch keeps alive.
enum Owner<'a> {
    Tensor(&'a Tensor),
    Window(&'a Window),
}

/// Checks of a launch against the kernel's contract.
struct Check<'a> {
    comm: &'a Communicator,
    name: &'static str,
    contract: &'static Contract,
    blocks: u32,
}

impl Check<'_> {
    fn shape(&self, attributes: &LaunchAttributes) -> Result<()> {
        let Contract {
            threads,
            blocks,
            shared_bytes,
            ..
        } = *self.contract;
        if self.comm.inner.executor.backend.is_some() {
            return Err(invalid(
                self.name,
                format!(
                    "backend {} cannot run kernels; create the communicator with backend fusewire",
                    self.comm.backend()
                ),
            ));
        }
        attributes.check(self.name, self.blocks)?;
        if !attributes.threads.is_multiple_of(64) || attributes.threads > 512 {
            return Err(invalid(
                self.name,
                format!(
                    "{} threads a block; blocks have a multiple of 64 threads, up to 512",
                    attributes.threads
                ),
            ));
        }
        let most = self.comm.inner.group.options.blocks;
        if self.blocks > most {
            return Err(invalid(
                self.name,
                format!(
                    "{} blocks, but this communicator allows at most {most} (Options::blocks is \
                     {}, and the blocks of all ranks must fit on their GPUs at the same time); \
                     launch {most} blocks or fewer, or raise Options::blocks on all ranks",
                    self.blocks, self.comm.inner.group.requested_blocks.0
                ),
            ));
        }
        if blocks != 0 && self.blocks != blocks {
            return Err(invalid(
                self.name,
                format!(
                    "{} blocks; the kernel needs exactly {blocks}: call .blocks({blocks})",
                    self.blocks
                ),
            ));
        }
        if threads != 0 && attributes.threads != 0 && attributes.threads != threads {
            return Err(invalid(
                self.name,
                format!(
                    "{} threads a block; the kernel needs exactly {threads}",
                    attributes.threads
                ),
            ));
        }
        if attributes.dependent && !self.contract.dependent {
            return Err(invalid(
                self.name,
                "a dependent launch; the kernel does not wait for the launches that it depends on: \
                 declare it with #[kernel(dependent)]"
                    .to_owned(),
            ));
        }
        let room = (SHARED_BYTES - RESERVED_BYTES) as u32;
        if shared_bytes > room {
            return Err(invalid(
                self.name,
                format!("needs {shared_bytes} bytes of shared memory; a block has {room}"),
            ));
        }
        Ok(())
    }

    fn argument_writes(&self, index: usize) -> bool {
        let argument = self.contract.arguments.get(index);
        argument.is_none_or(|argument| argument.writes)
    }

    fn argument_name(&self, index: usize) -> &'static str {
        self.contract
            .arguments
            .get(index)
            .map_or("argument", |argument| argument.name)
    }

    fn refuse(&self, index: usize, detail: &str) -> crate::Error {
        let argument = self.argument_name(index);
        invalid(self.name, format!("argument {argument}: {detail}"))
    }

    /// Checks that the element type of an argument is the kernel's.
    fn dtype(&self, index: usize, found: DType) -> Result<()> {
        let expected = self
            .contract
            .arguments
            .get(index)
            .and_then(|argument| argument.dtype);
        match expected {
            Some(expected) if expected != found => Err(self.refuse(
                index,
                &format!(
                    "elements of {}; the kernel takes {}",
                    found.name(),
                    expected.name()
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Checks that `len` elements fit in staging after the `used` bytes of other arguments.
    fn scratch<'b>(&self, index: usize, len: u64, used: &mut u64) -> Result<Option<Owner<'b>>> {
        let dtype = self.contract.arguments.get(index);
        let size = dtype
            .and_then(|argument| argument.dtype)
            .map_or(8, DType::size) as u64;
        let (before, room) = (*used, self.comm.options().staging_bytes);
        *used = before.saturating_add(scratch_bytes(size, len));
        if *used <= room {
            return Ok(None);
        }
        let after = match before {
            0 => String::new(),
            _ => format!(" after {before} bytes of other arguments"),
        };
        Err(self.refuse(
            index,
            &format!(
                "{len} elements of {size} bytes{after} do not fit {room} bytes of staging; raise \
                 Options::staging_bytes"
            ),
        ))
    }

    fn buffer<'b>(&self, index: usize, buffer: &Buffer<'b>) -> Result<Option<Owner<'b>>> {
        self.dtype(index, buffer.dtype())?;
        let Some(tensor) = buffer.owner().downcast_ref::<Tensor>() else {
            return Err(self.refuse(index, "not a tensor of this library"));
        };
        let (device, own) = (tensor.device(), self.comm.device());
        if device != own {
            return Err(self.refuse(
                index,
                &format!("memory of {device}; the communicator is on {own}"),
            ));
        }
        let size = tensor.dtype().size();
        if !(tensor.as_ptr() as usize).is_multiple_of(size) {
            return Err(self.refuse(index, &format!("not aligned to {size} bytes")));
        }
        Ok(Some(Owner::Tensor(tensor)))
    }

    fn window<'b>(&self, index: usize, window: &WindowBuffer<'b>) -> Result<Option<Owner<'b>>> {
        self.dtype(index, window.dtype())?;
        let Some(window) = window.owner().downcast_ref::<Window>() else {
            return Err(self.refuse(index, "not a window of this library"));
        };
        window.check_launch(self.name, self.comm)?;
        if window.queue_number().is_some() {
            return Err(self.refuse(index, "the window of a queue"));
        }
        let (signals, needed) = (window.signals(), self.contract.signals);
        if signals < needed {
            let text = format!(
                "a window with {signals} signals; the kernel needs {needed}: set \
                 WindowOptions::signals to {needed}"
            );
            return Err(self.refuse(index, &text));
        }
        Ok(Some(Owner::Window(window)))
    }

    /// Checks a queue and adds its number to those of the launch.
    fn queue<'b>(
        &self,
        index: usize,
        window: &WindowBuffer<'b>,
        queues: &mut Vec<u32>,
    ) -> Result<Option<Owner<'b>>> {
        self.dtype(index, window.dtype())?;
        let owner = window.owner().downcast_ref::<Window>();
        let queue = owner.and_then(|window| Some((window, window.queue_number()?)));
        let Some((window, number)) = queue else {
            return Err(self.refuse(index, "not a queue of this library"));
        };
        window.check_launch(self.name, self.comm)?;
        if queues.contains(&number) {
            return Err(self.refuse(index, "the same queue as another argument"));
        }
        queues.push(number);
        Ok(Some(Owner::Window(window)))
    }
}
