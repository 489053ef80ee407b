//! Creation of windows, over a tensor of each rank or over new memory.

use core::sync::atomic::AtomicBool;
use std::sync::Arc;

use fusewire_device::DType;
use fusewire_device::window::{DeviceWindow, signal_pad_bytes};

use super::register::PeerAccess;
use super::{Shared, Window};
use crate::Result;
use crate::comm::Communicator;
use crate::comm::observe::Buffers;
use crate::comm::submit::invalid;
use crate::gpu::Scratch;
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
    /// [`Error::Communicator`](crate::Error::Communicator) if ranks pass different arguments;
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) on backends without windows, and
    /// for a window with cells if the GPU of a rank has no atomics for the memory of another rank.
    pub fn new_window(&self, tensor: &Tensor, options: WindowOptions) -> Result<Window> {
        let buffers = || Buffers::of_tensors([], [tensor]);
        self.hooked("new_window", None, buffers, |_| {
            self.make_window(tensor, options, Rings::default())
        })
    }

    /// Creates a window, with rings if it is the window of a queue.
    pub(super) fn make_window(
        &self,
        tensor: &Tensor,
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
        let numbers = [signals, counters, barriers, cells];
        let (id, parts) = outside.register_parts(tensor, numbers, PeerAccess::Write)?;
        let blocks = self.inner.executor.constants.max_blocks;
        let bytes = signal_pad_bytes(size, blocks, signals, counters, barriers, cells).max(8);
        let signal_pad_id = match self.alloc_memory(bytes) {
            Ok((id, _)) => id,
            Err(error) => {
                // Fails only if the communicator has failed, and then all windows stay.
                let _ = self.end_windows(&[id]);
                return Err(error);
            }
        };
        let signal_pads = (0..size)
            .filter_map(|rank| self.inner.windows.part(signal_pad_id, rank))
            .collect();
        let device = Box::new(DeviceWindow {
            window: id as u32,
            signal_pad: signal_pad_id as u32,
            offset: 0,
            bytes: (tensor.len() * tensor.dtype().size()) as u64,
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
        Ok(Window {
            comm: self.clone(),
            tensor: tensor.clone(),
            shared: Arc::new(Shared {
                device,
                on_gpu,
                inner: Arc::clone(&self.inner),
                freed: AtomicBool::new(false),
                _parts: [parts, signal_pads],
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
        self.new_window(&self.tensor(dtype, count)?, options)
    }
}
