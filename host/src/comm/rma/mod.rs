//! One-sided communication: windows with put, get, signals, counters, barriers and cells.

mod cells;
mod create;
mod queue;
mod register;
mod signal;
mod transfer;

use core::any::Any;
use core::fmt;
use std::sync::Arc;

use fusewire_device::DType;
use fusewire_device::call::{Call, Operation};
use fusewire_device::window::DeviceWindow;

pub use self::create::WindowOptions;
pub use self::queue::Queue;
pub use self::register::Registration;
pub use self::signal::SignalUpdate;
use crate::Result;
use crate::algorithm::Algorithm;
use crate::comm::Communicator;
use crate::comm::observe::HookResult;
use crate::comm::submit::{PreparedOp, invalid};
use crate::comm::windows::{EndFlag, WindowParts};
use crate::device::Device;
use crate::gpu::Scratch;
use crate::options::CallOptions;
use crate::tensor::{Allocation, Tensor};

/// Path on which a rank reaches a peer's part of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WindowAccess {
    /// By load and store: both ranks access the same memory.
    Unified,
    /// Only by the network.
    Separate,
}

/// Symmetric memory with signals: every rank contributes a tensor of the same length. Each rank can
/// write, read and signal the part of every other rank without that rank's participation.
///
/// Operations are enqueued in the communicator's order (methods without `_async` also wait until
/// they have completed); they are not collective. A signal covers the puts that this rank has
/// issued before it to the same peer on this communicator. A put does not check that its target may
/// be overwritten: the program must order the accesses.
///
/// [`Window::raise`] and [`Window::wait_raised`] count signals, as torchcomms' `signal(peer)` and
/// `wait_signal(peer)` do, also over graph replays:
///
/// ```
/// use fusewire::{DType, Options, WindowOptions, run_threads};
///
/// run_threads(2, &Options::default(), |comm| {
///     let window = comm.alloc_window(DType::F32, 4, WindowOptions::default())?;
///     let peer = 1 - comm.rank();
///     let mine = comm.alloc(DType::F32, 4)?;
///     for round in 0..3 {
///         mine.copy_from(&[(10 * round + comm.rank()) as f32; 4])?;
///         // Signal 0: the data has arrived.
///         window.put(&mine, peer, 0)?;
///         window.raise(peer, 0)?;
///         window.wait_raised(0, Some(peer))?;
///         let expected = [(10 * round + peer) as f32; 4];
///         assert_eq!(window.tensor().to_vec::<f32>()?, expected);
///         // Signal 1: the data has been read, so the peer may put again.
///         window.raise(peer, 1)?;
///         window.wait_raised(1, Some(peer))?;
///     }
///     window.free()
/// })
/// .into_iter()
/// .collect::<Result<(), _>>()?;
/// # Ok::<(), fusewire::Error>(())
/// ```
///
/// [`Window::signal`] and [`Window::wait_signal`] set, add and compare values instead:
///
/// ```
/// use fusewire::{Compare, DType, Options, SignalUpdate, WindowOptions, run_threads};
///
/// run_threads(2, &Options::default(), |comm| {
///     let window = comm.alloc_window(DType::F32, 4, WindowOptions::default())?;
///     let next = (comm.rank() + 1) % comm.size();
///     window.signal(next, 0, SignalUpdate::Set(7))?;
///     window.wait_signal(0, Some(next), Compare::Equal, 7)?;
///     window.free()
/// })
/// .into_iter()
/// .collect::<Result<(), _>>()?;
/// # Ok::<(), fusewire::Error>(())
/// ```
#[derive(Clone)]
pub struct Window {
    comm: Communicator,
    tensor: Tensor,
    shared: Arc<Shared>,
}

/// State that a window's launches need.
struct Shared {
    device: Box<DeviceWindow>,
    /// Copy of `device` in GPU memory.
    on_gpu: Option<Scratch>,
    /// Set before the window is freed.
    end: Arc<[EndFlag; 1]>,
    /// Memory of every rank for the window and for its signal pad. Mapped as long as a launch that
    /// refers to it may run, even after the window has been freed.
    parts: [WindowParts; 2],
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window")
            .field("window", &self.shared.device.window)
            .field("dtype", &self.tensor.dtype())
            .field("count", &self.tensor.len())
            .finish_non_exhaustive()
    }
}

impl HookResult for Window {}

/// The end of a window by one caller. If it does not complete, the window can be used and freed
/// again: a refused call has ended nothing, and any other error stops the communicator.
struct Ending<'a>(&'a EndFlag);

impl<'a> Ending<'a> {
    fn begin(flag: &'a EndFlag) -> Result<Self> {
        match flag.set() {
            true => Ok(Self(flag)),
            false => Err(invalid("free", "the window was freed".to_owned())),
        }
    }

    fn complete(self) {
        core::mem::forget(self);
    }
}

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.clear();
    }
}

impl Window {
    /// Returns this rank's part.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Returns this window with another stream, like [`Communicator::on`].
    #[must_use]
    pub fn on(&self, stream: &crate::stream::Stream) -> Self {
        Self {
            comm: self.comm.on(stream),
            ..self.clone()
        }
    }

    /// Returns this window with other call options, like [`Communicator::with_options`].
    ///
    /// # Errors
    /// The errors of [`Communicator::with_options`].
    pub fn with_options(&self, options: &CallOptions) -> Result<Self> {
        Ok(Self {
            comm: self.comm.with_options(options)?,
            ..self.clone()
        })
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> DType {
        self.tensor.dtype()
    }

    /// Returns the number of elements of each rank's part.
    pub fn len(&self) -> usize {
        self.tensor.len()
    }

    /// Returns true if the parts have no elements.
    pub fn is_empty(&self) -> bool {
        self.tensor.is_empty()
    }

    /// Returns the device of the memory.
    pub fn device(&self) -> Device {
        self.comm.device()
    }

    /// Returns the number of the window in its communicator, which is equal on all ranks.
    pub(in crate::comm) fn number(&self) -> u32 {
        self.shared.device.window
    }

    /// Returns the number of signals.
    pub fn signals(&self) -> u32 {
        self.shared.device.signals
    }

    /// Returns the address of the window's description for kernels, which is valid as long as the
    /// window or a clone of it.
    pub fn device_window(&self) -> *const DeviceWindow {
        match &self.shared.on_gpu {
            Some(on_gpu) => on_gpu.address() as *const DeviceWindow,
            None => &raw const *self.shared.device,
        }
    }

    /// Returns the path on which this rank reaches `peer`'s part.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a rank out of range.
    pub fn attributes(&self, peer: u32) -> Result<WindowAccess> {
        self.peer("attributes", peer)?;
        Ok(match self.comm.inner.executor.reaches(peer) {
            true => WindowAccess::Unified,
            false => WindowAccess::Separate,
        })
    }

    /// Returns `peer`'s part as a tensor of this rank, which refers to the same memory. The program
    /// must order its accesses with those of the peer, by signals or barriers.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a rank that is out of range or
    /// not reachable by load and store, or a window that was freed.
    pub fn map_remote(&self, peer: u32) -> Result<Tensor> {
        self.peer("map_remote", peer)?;
        if !self.comm.inner.executor.reaches(peer) {
            return Err(invalid(
                "map_remote",
                format!("rank {peer} is only reachable by the network; use get or put"),
            ));
        }
        if peer == self.comm.rank() {
            return Ok(self.tensor.clone());
        }
        let part = self.shared.parts[0][peer as usize].clone();
        let Some((memory, offset)) = part else {
            return Err(invalid("map_remote", format!("rank {peer} is not mapped")));
        };
        let allocation = Allocation::new(memory, None);
        Ok(Tensor::at(
            allocation,
            offset,
            self.tensor.dtype(),
            self.tensor.len(),
        ))
    }

    /// Frees the window. All ranks must call this together. Waits until no operation of any rank
    /// uses it. A window that is not freed lives as long as the communicator.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the window was freed.
    /// [`Error::CaptureState`](crate::Error::CaptureState) while the communicator's stream is
    /// capturing, and other refusals of [`Communicator::barrier`]: clones of the window can be used
    /// and freed later. The communicator's failure: the memory is not freed.
    pub fn free(self) -> Result<()> {
        let ending = Ending::begin(&self.shared.end[0])?;
        let device = &self.shared.device;
        self.comm
            .end_windows(&[device.window as usize, device.signal_pad as usize])?;
        ending.complete();
        Ok(())
    }

    fn alive(&self, operation: &'static str) -> Result<()> {
        if self.shared.end[0].is_set() {
            return Err(invalid(operation, "the window was freed".to_owned()));
        }
        Ok(())
    }

    fn peer(&self, operation: &'static str, peer: u32) -> Result<()> {
        self.alive(operation)?;
        if peer < self.comm.size() {
            return Ok(());
        }
        Err(invalid(
            operation,
            format!("peer {peer}; ranks are 0 to {}", self.comm.size() - 1),
        ))
    }

    fn check_signal(&self, operation: &'static str, signal: u32) -> Result<()> {
        self.alive(operation)?;
        if signal < self.signals() {
            return Ok(());
        }
        Err(invalid(
            operation,
            format!("signal {signal}; the window has {}", self.signals()),
        ))
    }

    fn call(&self, operation: Operation, dtype: u8, peer: u32) -> u64 {
        Call::new(operation, dtype, 0, Algorithm::Signal as u8, peer as u16, 0).0
    }

    /// Returns the number of the window, equal on all ranks, if it has the rings of a queue.
    pub(in crate::comm) fn queue_number(&self) -> Option<u32> {
        let device = &self.shared.device;
        (device.ring > 0).then_some(device.window)
    }

    /// Returns the state that a launch must keep alive.
    pub(in crate::comm) fn keep(&self) -> Arc<dyn Any + Send + Sync> {
        Arc::clone(&self.shared) as _
    }

    /// Checks that a kernel on `comm` can take this window.
    pub(in crate::comm) fn check_launch(
        &self,
        kernel: &'static str,
        comm: &Communicator,
    ) -> Result<()> {
        self.alive(kernel)?;
        if Arc::ptr_eq(&self.comm.inner, &comm.inner) {
            return Ok(());
        }
        Err(invalid(
            kernel,
            "a window of another communicator".to_owned(),
        ))
    }

    /// Returns the flag that is set before the window is freed.
    pub(in crate::comm) fn end_flag(&self) -> EndFlag {
        self.shared.end[0].clone()
    }

    /// Makes the launch keep the window's description alive, and fail if the window was freed.
    fn bind<'a>(&self, prepared: PreparedOp<'a>) -> PreparedOp<'a> {
        let end = Arc::clone(&self.shared.end);
        prepared.keeping(Arc::clone(&self.shared) as _).taking(end)
    }
}
