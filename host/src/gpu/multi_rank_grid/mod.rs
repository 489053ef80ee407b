//! Multi-rank grids: one launch for all ranks that share a GPU. For tests with more ranks than
//! GPUs.
//!
//! The ranks are threads of one process. Their kernels wait for each other, so all their blocks
//! must be resident at once, which separate launches do not guarantee. A [`MultiRankGrid`] collects
//! the launches of all ranks and launches the grid form of the kernel
//! ([`fusewire_device::multi_rank_grid`]) once, with the blocks of all ranks. A grid that fits on
//! the GPU is resident as a whole; one that does not fit is refused with an error instead of a
//! hang.

mod image;
mod launch;
mod state;
#[cfg(test)]
mod tests;

use core::time::Duration;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

pub(crate) use self::image::GridImage;
pub use self::image::IMAGE;
use self::state::{RankLaunch, State};
use super::device::Gpu;
use super::driver::{
    CaptureStatus, Driver, LaunchShape, MemoryKind, RawMemory, RawModule, RawStream,
};
use crate::cpu::MAX_PARAM_BYTES;
use crate::{Error, Result};

/// Options of a [`MultiRankGrid`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MultiRankGridOptions {
    /// Number of ranks.
    pub size: u32,
    /// Time limit of a rank's wait for the other ranks' launches of the same kernel.
    pub timeout: Duration,
    /// Number of grids that can be enqueued before a launch waits for the first to end. Each has
    /// its own parameter table.
    pub slots: u32,
}

impl MultiRankGridOptions {
    /// Returns options for `size` ranks, with a timeout of 30 seconds and 8 slots.
    pub const fn new(size: u32) -> Self {
        Self {
            size,
            timeout: Duration::from_secs(30),
            slots: 8,
        }
    }
}

/// The ranks of one process on one GPU, whose launches are combined into one grid.
///
/// All ranks must launch the same kernels in the same order, each from a thread of its own. If a
/// rank does not launch in time, or launches something else, the grid is broken: this and every
/// later launch returns the same error on every rank. If a launch is refused before it begins (no
/// such kernel, too many blocks), every rank gets the same error, and the grid remains usable.
#[derive(Debug)]
pub struct MultiRankGrid {
    driver: Arc<dyn Driver>,
    /// The GPU that frees the table, if the grid was created by `on`. It defers freeing until
    /// nothing is in flight.
    gpu: Option<Arc<Gpu>>,
    module: RawModule,
    options: MultiRankGridOptions,
    /// The stream that grids run on, in order.
    stream: RawStream,
    /// A parameter struct per rank and slot.
    table: RawMemory,
    state: Mutex<State>,
    changed: Condvar,
}

/// Bytes per rank in a slot.
const SLOT_BYTES: u64 = MAX_PARAM_BYTES as u64;

impl MultiRankGrid {
    /// Creates a grid on `module`, an image that was built with `fusewire-build build
    /// --multi-rank-grid` and loaded by `driver`. Allocates device memory for the parameters, a
    /// stream and events.
    ///
    /// # Safety
    /// The module must stay loaded while the grid lives.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the number of ranks or slots is 0; [`Error::Driver`].
    pub unsafe fn new(
        driver: Arc<dyn Driver>,
        module: RawModule,
        options: MultiRankGridOptions,
    ) -> Result<Self> {
        if options.size == 0 || options.slots == 0 {
            return Err(invalid(format!(
                "{} ranks and {} slots; a grid has at least one of each",
                options.size, options.slots
            )));
        }
        let bytes = u64::from(options.slots) * u64::from(options.size) * SLOT_BYTES;
        let table = driver.allocate(bytes, MemoryKind::Private)?;
        let stream = driver.create_stream();
        // From here on, dropping the value releases what was created.
        let mut grid = Self {
            gpu: None,
            module,
            options,
            stream: RawStream(0),
            table,
            state: Mutex::new(State {
                launches: (0..options.size).map(|_| None).collect(),
                outcome: Arc::default(),
                broken: None,
                functions: HashMap::new(),
                slots: Vec::new(),
                next_slot: 0,
                before: Vec::new(),
            }),
            changed: Condvar::new(),
            driver,
        };
        grid.stream = stream?;
        let state = grid.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..options.slots {
            state.slots.push(grid.driver.create_event(false)?);
        }
        for _ in 0..options.size {
            state.before.push(grid.driver.create_event(false)?);
        }
        Ok(grid)
    }

    /// Creates a grid on a GPU of this process, which frees the table when nothing is in flight:
    /// another rank's kernel may wait for a launch by the thread that drops the grid. `module` must
    /// be that of a [`GridImage`].
    pub(crate) fn on(
        gpu: &Arc<Gpu>,
        module: RawModule,
        options: MultiRankGridOptions,
    ) -> Result<Self> {
        // SAFETY: the module of a `GridImage` stays loaded until the process ends.
        let mut grid = unsafe { Self::new(gpu.shared_driver(), module, options) }?;
        grid.gpu = Some(Arc::clone(gpu));
        Ok(grid)
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> u32 {
        self.options.size
    }

    /// Returns the error that broke the grid, if it is broken.
    pub fn failure(&self) -> Option<Error> {
        self.lock().broken.clone()
    }

    /// Breaks the grid: current waits and later launches return `error`, or the error that broke
    /// the grid before.
    pub fn fail(&self, error: &Error) {
        self.lock().fail(error);
        self.changed.notify_all();
    }

    /// Launches `kernel` (the name of the ordinary entry) for `rank` on `shape.blocks` blocks,
    /// together with all other ranks. Blocks until all ranks have launched and the grid is
    /// enqueued. The grid runs after all earlier work and before all later work of every rank's
    /// `stream`. `params` is the kernel's parameter struct, which is copied.
    ///
    /// # Safety
    /// `params` must be the bytes of the parameter struct of `kernel` and fulfil its requirements
    /// until the grid has ended. `stream` must be a stream of the grid's driver.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for this rank's own arguments, on this rank only. On every rank,
    /// the same error: [`Error::Launch`] if a rank does not launch in time, if the ranks' launches
    /// differ, if the image lacks the kernel's grid form, or if the blocks do not fit on the GPU at
    /// once; and the driver's error.
    pub unsafe fn launch(
        &self,
        rank: u32,
        kernel: &str,
        params: &[u8],
        shape: LaunchShape,
        stream: RawStream,
    ) -> Result<()> {
        let timeout = self.options.timeout;
        // SAFETY: the caller fulfils the contract of this function, which is that of
        // `launch_within`.
        unsafe { self.launch_within(timeout, rank, kernel, params, shape, stream) }
    }

    /// Launches like [`MultiRankGrid::launch`], with `timeout` as the limit of the wait for the
    /// other ranks.
    ///
    /// # Safety
    /// The requirements of [`MultiRankGrid::launch`].
    ///
    /// # Errors
    /// The errors of [`MultiRankGrid::launch`].
    pub unsafe fn launch_within(
        &self,
        timeout: Duration,
        rank: u32,
        kernel: &str,
        params: &[u8],
        shape: LaunchShape,
        stream: RawStream,
    ) -> Result<()> {
        self.check(rank, kernel, params, &shape, stream)?;
        let launch = RankLaunch {
            kernel: kernel.to_owned(),
            params: params.to_owned(),
            shape,
            stream,
        };
        let mut state = self.lock();
        if let Some(error) = &state.broken {
            return Err(error.clone());
        }
        let index = rank as usize;
        if state.launches[index].is_some() {
            return Err(invalid(format!(
                "rank {rank} launches {kernel} while another thread of it launches; a rank has one \
                 order of launches"
            )));
        }
        if let Some(error) = state.mismatch(rank, &launch) {
            state.fail(&error);
            self.changed.notify_all();
            return Err(error);
        }
        state.launches[index] = Some(launch);
        let outcome = Arc::clone(&state.outcome);
        if state.launches.iter().all(Option::is_some) {
            self.launch_grid(&mut state);
            self.changed.notify_all();
        }
        self.wait(state, &outcome, timeout)
    }

    /// Checks a rank's own arguments.
    fn check(
        &self,
        rank: u32,
        kernel: &str,
        params: &[u8],
        shape: &LaunchShape,
        stream: RawStream,
    ) -> Result<()> {
        let size = self.options.size;
        if rank >= size {
            return Err(invalid(format!("rank {rank} in a grid of {size} ranks")));
        }
        if params.len() > MAX_PARAM_BYTES {
            return Err(invalid(format!(
                "{kernel}: {} bytes of parameters; the limit is {MAX_PARAM_BYTES}",
                params.len()
            )));
        }
        if shape.blocks == 0 || shape.threads == 0 {
            return Err(invalid(format!(
                "{kernel}: {} blocks of {} threads; at least one of each is needed",
                shape.blocks, shape.threads
            )));
        }
        if shape.cluster != 0 || shape.dependent {
            return Err(invalid(format!(
                "{kernel}: clusters and dependent launches have no grid form; leave `cluster` 0 \
                 and `dependent` false"
            )));
        }
        match self.driver.capture_status(stream)? {
            CaptureStatus::None => Ok(()),
            CaptureStatus::Active(..) | CaptureStatus::Invalidated => Err(invalid(format!(
                "{kernel}: rank {rank}'s stream is being captured; a grid of several ranks belongs \
                 to no one's graph, so launch eagerly"
            ))),
        }
    }

    /// Blocks until the launch has an outcome, and returns it.
    fn wait(
        &self,
        mut state: MutexGuard<'_, State>,
        outcome: &OnceLock<Result<()>>,
        timeout: Duration,
    ) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(result) = outcome.get() {
                return result.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let error = state.timeout_error(timeout);
                state.fail(&error);
                self.changed.notify_all();
                return Err(error);
            }
            state = self
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for MultiRankGrid {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.stream != RawStream(0) {
            if let Err(error) = self.driver.synchronize_stream(self.stream) {
                tracing::warn!(%error, "a grid's grids have not ended; its memory is leaked");
                return;
            }
            // SAFETY: `create_stream` returned the stream, which only this grid uses, and its work
            // is complete.
            let _ = unsafe { self.driver.destroy_stream(self.stream) };
        }
        for event in state.slots.drain(..).chain(state.before.drain(..)) {
            // SAFETY: `create_event` returned the event, which only this grid records. The driver
            // keeps what waits on ranks' streams still need of it.
            let _ = unsafe { self.driver.destroy_event(event) };
        }
        match self.gpu.take() {
            Some(gpu) => gpu.free(self.table),
            // SAFETY: `allocate` returned the table, which only the grids use, and these have
            // ended.
            None => drop(unsafe { self.driver.release(self.table) }),
        }
    }
}

fn invalid(detail: String) -> Error {
    Error::InvalidArgument {
        operation: "multi-rank-grid launch",
        detail,
    }
}
