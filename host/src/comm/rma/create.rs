//! Creation of windows, over a tensor of each rank or over new memory.

use std::sync::Arc;

use fusewire_device::DType;
use fusewire_device::window::{DeviceWindow, signal_pad_bytes};

use super::register::{PeerAccess, WindowArgs};
use super::{Shared, Window};
use crate::Result;
use crate::comm::Communicator;
use crate::comm::observe::Buffers;
use crate::comm::submit::invalid;
use crate::gpu::Scratch;
use crate::memory::Memory;
use crate::tensor::Tensor;

/// Numbers of a window's signals, counters, barriers and cells; equal on all ranks. The defaults
/// are those of torchcomms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct WindowOptions {
    /// Number of signals; the number of ranks if this is `None`.
    pub signals: Option<u32>,
    /// Number of counters; the number of ranks if this is `None`.
    pub counters: Option<u32>,
    /// Number of barriers; 1 by default.
    pub barriers: u32,
    /// Number of cells, which are words that kernels of all ranks update atomically
    /// ([`fusewire_device::window::Fetch`]); 0 by default.
    pub cells: u32,
}

impl Default for WindowOptions {
    fn default() -> Self {
        Self {
            signals: None,
            counters: None,
            barriers: 1,
            cells: 0,
        }
    }
}

impl WindowOptions {
    /// Creates the default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of signals.
    #[must_use]
    pub fn signals(mut self, signals: u32) -> Self {
        self.signals = Some(signals);
        self
    }

    /// Sets the number of counters.
    #[must_use]
    pub fn counters(mut self, counters: u32) -> Self {
        self.counters = Some(counters);
        self
    }

    /// Sets the number of barriers.
    #[must_use]
    pub fn barriers(mut self, barriers: u32) -> Self {
        self.barriers = barriers;
        self
    }

    /// Sets the number of cells.
    #[must_use]
    pub fn cells(mut self, cells: u32) -> Self {
        self.cells = cells;
        self
    }
}

/// Size of the rings of a queue; 0 for other windows.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rings {
    pub(super) rows: u32,
    pub(super) width: u32,
}

impl Communicator {
    /// Returns true if the communicator supports [`Communicator::new_window`], which needs
    /// Fusewire's kernels.
    pub fn supports_window(&self) -> bool {
        self.inner.executor.backend.is_none()
    }

    /// Creates a window over `tensor` of each rank: memory from [`Tensor::new`] or
    /// [`Communicator::alloc`], of the same type and length on all ranks, at any offset in its
    /// allocation. Collectives on the tensor then need no copy. All ranks must call this together.
    /// May be called while the stream is capturing: the window is created now, by operations on
    /// another stream.
    ///
    /// # Errors
    /// [`Error::Communicator`](crate::Error::Communicator) if ranks pass different arguments, or if
    /// the call fails on another rank, which the message names; a failed allocation or mapping;
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) on backends without windows, and
    /// for a window with cells if the GPU of a rank has no atomics for the memory of another rank.
    /// No rank has the window then, and all ranks can repeat the call. If the ranks cannot agree on
    /// the outcome, the communicator fails, as in [`Communicator::alloc`].
    pub fn new_window(&self, tensor: &Tensor, options: WindowOptions) -> Result<Window> {
        let buffers = || Buffers::of_tensors([], [tensor]);
        self.hooked("new_window", None, buffers, |_| {
            let (args, tensor) = ((tensor.dtype(), tensor.len()), Ok(tensor.clone()));
            self.make_window("new_window", args, tensor, options, Rings::default())
        })
    }

    /// Creates a window over the `len` elements of `tensor`, with rings if it is the window of a
    /// queue. A rank that could not allocate the tensor passes the error, which fails the call on
    /// all ranks.
    pub(super) fn make_window(
        &self,
        operation: &'static str,
        (dtype, len): (DType, usize),
        tensor: Result<Tensor>,
        options: WindowOptions,
        rings: Rings,
    ) -> Result<Window> {
        if !self.supports_window() {
            return Err(invalid(
                "new_window",
                format!("backend {} has no windows", self.backend()),
            ));
        }
        self.inner.check()?;
        let outside = self.outside_capture()?;
        let size = self.size();
        let signals = options.signals.unwrap_or(size);
        let counters = options.counters.unwrap_or(size);
        let (barriers, cells) = (options.barriers, options.cells);
        let args = WindowArgs {
            dtype,
            len,
            numbers: [signals, counters, barriers, cells],
        };
        outside.agree_on_window(&args, tensor.as_ref().ok(), PeerAccess::Write)?;
        let blocks = self.options().blocks;
        let pad_bytes = signal_pad_bytes(size, blocks, signals, counters, barriers, cells).max(8);
        let parts = tensor.clone().and_then(|tensor| {
            let pad = Memory::create(self.device(), pad_bytes, "fusewire-window")?;
            Ok(vec![tensor.memory(), (pad, 0)])
        });
        let call = self.host_call(operation);
        let windows = call.add_windows(parts.clone(), &[args.bytes(), pad_bytes]);
        let made = windows.and_then(|windows| {
            let device = Box::new(DeviceWindow {
                window: windows.id(0) as u32,
                signal_pad: windows.id(1) as u32,
                offset: 0,
                bytes: args.bytes(),
                signals,
                counters,
                barriers,
                size,
                blocks,
                ring: rings.rows,
                width: rings.width,
                cells,
            });
            let on_gpu = self.inner.executor.on_gpu.as_ref();
            let on_gpu = on_gpu
                .map(|on_gpu| Scratch::holding(on_gpu.gpu(), bytemuck::bytes_of(&*device)))
                .transpose()?;
            Ok((windows, device, on_gpu))
        });
        let (windows, device, on_gpu) = call.agreed(made)?;
        let tensor = tensor?;
        let ids = [windows.id(0), windows.id(1)];
        windows.publish();
        self.keep_owner(ids[0], &tensor);
        let parts = ids.map(|id| {
            let parts = (0..size).map(|rank| self.inner.windows.part(id, rank));
            parts.collect()
        });
        Ok(Window {
            comm: self.clone(),
            tensor,
            shared: Arc::new(Shared {
                device,
                on_gpu,
                end: Arc::default(),
                parts,
            }),
        })
    }

    /// Creates a window over `count` zeroed elements of new memory. All ranks must call this
    /// together.
    ///
    /// # Errors
    /// The errors of [`Communicator::new_window`] and [`Tensor::new`].
    pub fn alloc_window(
        &self,
        dtype: DType,
        count: usize,
        options: WindowOptions,
    ) -> Result<Window> {
        let tensor = self.tensor(dtype, count);
        let buffers = || Buffers::of_tensors([], tensor.as_ref().ok());
        self.hooked("new_window", None, buffers, |_| {
            let (args, tensor) = ((dtype, count), tensor.clone());
            self.make_window("alloc_window", args, tensor, options, Rings::default())
        })
    }
}
