//! Ranks that share a GPU, in a multi-rank grid: their launches are gathered, and go out as one.
//!
//! For tests with more ranks than GPUs. The ranks are threads of one process; their kernels wait for each other, so their
//! blocks must be resident together, which separate launches do not promise. A [`MultiRankGrid`] launches the grid form of a kernel
//! ([`fusewire_device::multi_rank_grid`]) once with the blocks of all ranks: a grid that fits on the GPU is resident as a whole,
//! and one that does not is refused by name instead of hanging.

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

/// How ranks gather.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MultiRankGridOptions {
    /// Number of ranks.
    pub size: u32,
    /// How long a rank waits for the others to launch the same kernel.
    pub timeout: Duration,
    /// How many grids may be enqueued before a launch waits for the first of them to end: each has its own table.
    pub slots: u32,
}

impl MultiRankGridOptions {
    /// `size` ranks, 30 seconds, 8 grids.
    pub const fn new(size: u32) -> Self {
        Self {
            size,
            timeout: Duration::from_secs(30),
            slots: 8,
        }
    }
}

/// The ranks of one process on one GPU, whose launches go out as a multi-rank grid.
///
/// All ranks launch the same kernels in the same order, each from a thread of its own. A rank that does not come in time, or
/// comes with something else, breaks the grid: every rank gets the same error, then and at every later launch. A launch that
/// is refused before it begins (no such kernel, too many blocks) gives every rank the same error, and the grid lives on.
#[derive(Debug)]
pub struct MultiRankGrid {
    driver: Arc<dyn Driver>,
    /// Takes the memory back, where it frees it at its own time.
    gpu: Option<Arc<Gpu>>,
    module: RawModule,
    options: MultiRankGridOptions,
    /// Where grids run, one after another.
    stream: RawStream,
    /// One parameter struct a rank and slot.
    table: RawMemory,
    state: Mutex<State>,
    changed: Condvar,
}

/// Bytes of one slot for one rank.
const SLOT_BYTES: u64 = MAX_PARAM_BYTES as u64;

impl MultiRankGrid {
    /// A grid on `module`, an image that was built with `fusewire-build build --multi-rank-grid` and loaded by `driver`. Allocates
    /// device memory for the parameters, a stream and events.
    ///
    /// # Safety
    /// The module stays loaded as long as the grid lives.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no ranks or no slots; [`Error::Driver`].
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
        // From here on dropping the value frees what there is.
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

    /// As [`MultiRankGrid::new`], on a GPU of this process, which frees the memory when nothing runs on it: others may wait for
    /// the thread that lets the grid go. `module` is of a [`GridImage`].
    pub(crate) fn on(
        gpu: &Arc<Gpu>,
        module: RawModule,
        options: MultiRankGridOptions,
    ) -> Result<Self> {
        // SAFETY: the modules of a `GridImage` stay loaded.
        let mut grid = unsafe { Self::new(gpu.shared_driver(), module, options) }?;
        grid.gpu = Some(Arc::clone(gpu));
        Ok(grid)
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.options.size
    }

    /// Why the grid launches nothing any more, if it is broken.
    pub fn failure(&self) -> Option<Error> {
        self.lock().broken.clone()
    }

    /// Breaks the grid from outside: whoever waits in it, and every later launch, gets `error`, or what broke the grid
    /// before.
    pub fn fail(&self, error: &Error) {
        self.lock().fail(error);
        self.changed.notify_all();
    }

    /// Launches `kernel` (the name of the ordinary entry) for `rank` on `shape.blocks` blocks, together with all other
    /// ranks; waits until they have come and the grid is enqueued. The grid comes behind all work of every rank's `stream`,
    /// and before whatever comes on these streams later. `params` is the kernel's parameter struct, which is copied.
    ///
    /// # Safety
    /// `params` are the bytes of the parameter struct of `kernel` and fulfil its requirements until the grid has ended;
    /// `stream` is a stream of the grid's driver.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for this rank's own arguments, which is not reported to other
    /// ranks. The same error for every rank: [`Error::Launch`] when a rank does not come in time,
    /// when ranks come with different launches, when the image lacks the kernel's grid form, when
    /// the blocks do not fit on the GPU at once; and what the driver said.
    pub unsafe fn launch(
        &self,
        rank: u32,
        kernel: &str,
        params: &[u8],
        shape: LaunchShape,
        stream: RawStream,
    ) -> Result<()> {
        let timeout = self.options.timeout;
        // SAFETY: the requirements are the same.
        unsafe { self.launch_within(timeout, rank, kernel, params, shape, stream) }
    }

    /// As [`MultiRankGrid::launch`], with a bound of its own of the wait for the other ranks.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there.
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

    /// What a rank's arguments must be by themselves.
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
                "{kernel}: clusters and dependent launches have no grid form; leave `cluster` 0 and \
                 `dependent` false"
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

    /// Waits for what becomes of a grid.
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
            // SAFETY: the grid's own stream, whose work is done.
            let _ = unsafe { self.driver.destroy_stream(self.stream) };
        }
        for event in state.slots.drain(..).chain(state.before.drain(..)) {
            // SAFETY: the grid's own event; whoever waits for it on a stream keeps what it needs in the driver.
            let _ = unsafe { self.driver.destroy_event(event) };
        }
        match self.gpu.take() {
            Some(gpu) => gpu.free(self.table),
            // SAFETY: the grid's own memory, which only its grids use, and these have ended.
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
