//! One-sided communication: windows with put, get, signals, counters, barriers and cells.

mod cells;
mod create;
mod queue;
mod register;
mod signal;
mod transfer;

use core::any::Any;
use core::fmt;
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

use fusewire_device::session::{Call, Operation};
use fusewire_device::window::DeviceWindow;

pub use self::create::WindowOptions;
pub use self::queue::Queue;
pub use self::register::Registration;
pub use self::signal::SignalUpdate;
use crate::Result;
use crate::algorithm::Algorithm;
use crate::comm::submit::{PreparedOp, invalid};
use crate::comm::windows::WindowPart;
use crate::comm::{Communicator, Inner};
use crate::gpu::Scratch;
use crate::tensor::{Allocation, Tensor};

/// How a peer's part of a window is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WindowAccess {
    /// By load and store: there is one copy of the memory.
    Unified,
    /// By the network only.
    Separate,
}

/// Symmetric memory with signals: every rank contributes a tensor of the same length, and each can
/// write, read and signal every other one's without its help.
///
/// Operations are enqueued in the communicator's order (the plain methods also wait for their end);
/// they are not collective. A signal covers the puts that this rank has issued to that peer on this
/// communicator before. What is overwritten when is the program's protocol: a put does not ask
/// whether its target is free.
///
/// ```
/// use fusewire::{Compare, DType, Options, SignalUpdate, WindowOptions, run_threads};
///
/// run_threads(2, &Options::default(), |comm| {
///     let window = comm.alloc_window(DType::F32, 4, WindowOptions::default())?;
///     let next = (comm.rank() + 1) % comm.size();
///     let mine = comm.alloc(DType::F32, 4)?;
///     mine.copy_from(&[comm.rank() as f32; 4])?;
///     window.put(&mine, next, 0)?;
///     window.signal(next, 0, SignalUpdate::Add(1))?;
///     window.wait_signal(0, None, Compare::GreaterEqual, 1)?;
///     assert_eq!(window.tensor().to_vec::<f32>()?, [next as f32; 4]);
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

/// What a window's launches need.
struct Shared {
    device: Box<DeviceWindow>,
    /// The same in a GPU's memory.
    on_gpu: Option<Scratch>,
    inner: Arc<Inner>,
    freed: AtomicBool,
    /// Every rank's memory of both windows: mapped as long as a launch that names it may run, also
    /// after the end of the window.
    _parts: [Vec<WindowPart>; 2],
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

impl Window {
    /// This rank's part.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// This window with another stream: as [`Communicator::on`].
    #[must_use]
    pub fn on(&self, stream: &crate::stream::Stream) -> Self {
        Self {
            comm: self.comm.on(stream),
            ..self.clone()
        }
    }

    /// Number of signals.
    pub fn signals(&self) -> u32 {
        self.shared.device.signals
    }

    /// The window as kernels take it: an address that is valid as long as the window or a clone of
    /// it.
    pub fn device_window(&self) -> *const DeviceWindow {
        match &self.shared.on_gpu {
            Some(on_gpu) => on_gpu.address() as *const DeviceWindow,
            None => &raw const *self.shared.device,
        }
    }

    /// How `peer`'s part is reached.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a rank out of range.
    pub fn attributes(&self, peer: u32) -> Result<WindowAccess> {
        self.peer("attributes", peer)?;
        Ok(match self.comm.inner.reaches(peer) {
            true => WindowAccess::Unified,
            false => WindowAccess::Separate,
        })
    }

    /// `peer`'s part as a tensor of this rank: the same memory. The program orders its accesses
    /// with the peer's, by signals or barriers.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a rank out of range or one
    /// that is not reachable by load and store, or a window that was freed.
    pub fn map_remote(&self, peer: u32) -> Result<Tensor> {
        self.peer("map_remote", peer)?;
        if !self.comm.inner.reaches(peer) {
            return Err(invalid(
                "map_remote",
                format!("rank {peer} is only reachable by the network; use get or put"),
            ));
        }
        let id = self.shared.device.window as usize;
        let Some((memory, offset)) = self.comm.inner.windows.part(id, peer) else {
            return Err(invalid("map_remote", "the window was freed".to_owned()));
        };
        let allocation = Allocation::new(memory, None);
        Ok(Tensor::at(
            allocation,
            offset,
            self.tensor.dtype(),
            self.tensor.len(),
        ))
    }

    /// Ends the window; all ranks together. Waits until no operation of any rank uses it. Without
    /// it the window lives as long as the communicator.
    ///
    /// # Errors
    /// The communicator's failure: then the memory stays.
    pub fn free(self) -> Result<()> {
        self.alive("free")?;
        self.shared.freed.store(true, Ordering::Release);
        let device = &self.shared.device;
        self.comm
            .end_windows(&[device.window as usize, device.signal_pad as usize])
    }

    fn alive(&self, operation: &'static str) -> Result<()> {
        if self.shared.freed.load(Ordering::Acquire) {
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

    /// Returns what a launch must keep alive.
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

    /// The launch keeps the window's description alive.
    fn bind<'a>(&self, prepared: PreparedOp<'a>) -> PreparedOp<'a> {
        prepared.keeping(Arc::clone(&self.shared) as _)
    }
}
