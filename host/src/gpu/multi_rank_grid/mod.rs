//! Multi-rank grids: one kernel launch for all ranks that share a GPU. Tests with more ranks than
//! GPUs use multi-rank grids.
//!
//! The ranks are threads of one process. Their kernels wait for each other, so the blocks of all
//! ranks must be resident at the same time. Separate launches do not guarantee residency. A
//! [`MultiRankGrid`] therefore collects the launches of all ranks and launches the grid form of the
//! kernel ([`fusewire_device::multi_rank_grid`]) once, with the blocks of all ranks. If all blocks
//! fit on the GPU at once, they are all resident. Otherwise the launch returns an error instead of
//! hanging.

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
pub(crate) use self::image::IMAGE;
use self::state::{RankLaunch, State};
use super::device::Gpu;
use super::driver::{
    CaptureStatus, Driver, LaunchShape, MemoryKind, RawMemory, RawModule, RawStream, StreamPriority,
};
use crate::cpu::MAX_PARAM_BYTES;
use crate::{Error, Result};

/// Options of a [`MultiRankGrid`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MultiRankGridOptions {
    /// Number of ranks.
    pub size: u32,
    /// Maximum time that a rank waits for the other ranks to launch the same kernel. Also limits
    /// the wait for a free slot.
    pub timeout: Duration,
    /// Maximum number of grids in flight. If all slots are in use, the next launch waits until the
    /// oldest grid is complete. Each slot is a separate part of the parameter table.
    pub slots: u32,
}

impl MultiRankGridOptions {
    /// Returns options for `size` ranks, with a timeout of 30 seconds and 8 slots.
    pub(crate) const fn new(size: u32) -> Self {
        Self {
            size,
            timeout: Duration::from_secs(30),
            slots: 8,
        }
    }
}

/// Combines the launches of all ranks of a process on one GPU into one grid.
///
/// All ranks must launch the same kernels in the same order, and each rank must use a separate
/// thread. If a rank does not launch in time, if the launches of the ranks differ, or if a driver
/// call fails while the grid is enqueued, the [`MultiRankGrid`] is broken: the current launch and
/// all later launches return the same error on every rank. If a check fails before any work is
/// enqueued (unknown kernel, too many blocks), the launch returns the same error on every rank, and
/// the [`MultiRankGrid`] remains usable.
#[derive(Debug)]
pub(crate) struct MultiRankGrid {
    driver: Arc<dyn Driver>,
    /// The GPU that frees the table, if [`MultiRankGrid::on`] created this value. A shared GPU
    /// defers freeing until no operation is in flight.
    gpu: Option<Arc<Gpu>>,
    module: RawModule,
    options: MultiRankGridOptions,
    /// The stream on which all grids run, in order.
    stream: RawStream,
    /// Device memory for the parameter structs, one struct per rank and slot.
    table: RawMemory,
    state: Mutex<State>,
    changed: Condvar,
}

/// Bytes per rank in a slot.
const SLOT_BYTES: u64 = MAX_PARAM_BYTES as u64;

impl MultiRankGrid {
    /// Creates a [`MultiRankGrid`] that launches kernels of `module`. The image must have been
    /// built with `fusewire-build build --multi-rank-grid`, and `driver` must have loaded the image
    /// as `module`. Allocates device memory for the parameters, and creates a stream and events.
    ///
    /// # Safety
    /// The module must stay loaded until the [`MultiRankGrid`] is dropped.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the number of ranks or slots is 0; [`Error::Driver`].
    pub(crate) unsafe fn new(
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
        let stream = driver.create_stream(StreamPriority::Normal);
        // If a later step fails, dropping `grid` releases the resources that exist by then.
        let mut grid = Self {
            gpu: None,
            module,
            options,
            stream: RawStream::LEGACY,
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

    /// Creates a [`MultiRankGrid`] on a GPU of this process. `module` must be the module of a
    /// [`GridImage`]. Dropping the value passes the parameter table to [`Gpu::free`] instead of
    /// freeing it immediately, because freeing may wait for the device, and the kernel of another
    /// rank may be waiting for a launch by the thread that drops the value.
    pub(crate) fn on(
        gpu: &Arc<Gpu>,
        module: RawModule,
        options: MultiRankGridOptions,
    ) -> Result<Self> {
        // SAFETY: `module` belongs to a `GridImage`, whose module stays loaded until the process
        // exits.
        let mut grid = unsafe { Self::new(gpu.shared_driver(), module, options) }?;
        grid.gpu = Some(Arc::clone(gpu));
        Ok(grid)
    }

    /// Returns the error that broke the [`MultiRankGrid`], or `None` if it is not broken.
    pub(crate) fn failure(&self) -> Option<Error> {
        self.lock().broken.clone()
    }

    /// Breaks the [`MultiRankGrid`]. Launches that are waiting return `error`. Later launches
    /// return the first error that broke the [`MultiRankGrid`].
    pub(crate) fn fail(&self, error: &Error) {
        self.lock().fail(error);
        self.changed.notify_all();
    }

    /// Launches `kernel` for `rank` on `shape.blocks` blocks, in one grid with the launches of all
    /// other ranks. `kernel` is the name of the ordinary entry, not of the grid form. `params`
    /// contains the bytes of the kernel's parameter struct, which are copied.
    ///
    /// Blocks for at most `timeout` until all ranks have called this method and the grid is
    /// enqueued. The grid is ordered after all earlier work and before all later work of every
    /// rank's `stream`.
    ///
    /// # Safety
    /// `params` must contain the bytes of the parameter struct of `kernel`. The arguments must
    /// fulfil the safety requirements of the kernel until the grid is complete. `stream` must be a
    /// live stream of the driver of this [`MultiRankGrid`].
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if an argument of this rank is invalid. Only this rank returns
    /// the error. The following errors are the same on every rank: [`Error::Launch`] if a rank does
    /// not launch in time, if the launches of the ranks differ, if the image does not contain the
    /// grid form of the kernel, or if the blocks of all ranks do not fit on the GPU at once;
    /// [`Error::Driver`] if a driver call fails.
    pub(crate) unsafe fn launch(
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

    /// Checks the arguments of one rank.
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
            _ => Err(invalid(format!(
                "{kernel}: rank {rank}'s stream is being captured; a grid of several ranks belongs \
                 to no one's graph, so launch eagerly"
            ))),
        }
    }

    /// Blocks until the outcome of the launch is set, and returns the outcome. Breaks the
    /// [`MultiRankGrid`] if the outcome is not set within `timeout`.
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
        if self.stream != RawStream::LEGACY {
            if let Err(error) = self.driver.synchronize_stream(self.stream) {
                tracing::warn!(%error, "a grid's grids have not ended; its memory is leaked");
                return;
            }
            // SAFETY: `create_stream` returned the stream. Only this value uses the stream, and all
            // work on the stream is complete.
            let _ = unsafe { self.driver.destroy_stream(self.stream) };
        }
        for event in state.slots.drain(..).chain(state.before.drain(..)) {
            // SAFETY: `create_event` returned the event, and only this value uses the event. The
            // driver keeps the state of the event until the enqueued waits of the ranks' streams
            // are complete.
            let _ = unsafe { self.driver.destroy_event(event) };
        }
        match self.gpu.take() {
            Some(gpu) => gpu.free(self.table),
            // SAFETY: `allocate` returned the table. Only the launched grids access the table, and
            // all of them are complete.
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
