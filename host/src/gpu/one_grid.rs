//! Ranks that share a GPU, in one grid: their launches are gathered, and go out as one.
//!
//! For tests with more ranks than GPUs. The ranks are threads of one process; their kernels wait for each other, so their
//! blocks must be resident together, which separate launches do not promise. A [`Gang`] launches the grid form of a kernel
//! ([`fusewire_device::one_grid`]) once with the blocks of all ranks: a grid that fits on the GPU is resident as a whole,
//! and one that does not is refused by name instead of hanging.

mod gathering;
mod image;
#[cfg(test)]
mod tests;

use core::ffi::c_void;
use core::time::Duration;
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::Instant;

use fusewire_device::one_grid::{GridParams, SUFFIX};

use self::gathering::{Arrival, State};
pub(crate) use self::image::GridImage;
pub use self::image::IMAGE;
use super::device::Gpu;
use super::driver::{
    CaptureStatus, Driver, LaunchShape, MemoryKind, RawEvent, RawFunction, RawMemory, RawModule,
    RawStream,
};
use crate::cpu::MAX_PARAM_BYTES;
use crate::{Error, Result};

/// How ranks gather.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GangOptions {
    /// Number of ranks.
    pub size: u32,
    /// How long a rank waits for the others to launch the same kernel.
    pub timeout: Duration,
    /// How many grids may be enqueued before a launch waits for the first of them to end: each has its own table.
    pub slots: u32,
}

impl GangOptions {
    /// `size` ranks, 30 seconds, 8 grids.
    pub const fn new(size: u32) -> Self {
        Self {
            size,
            timeout: Duration::from_secs(30),
            slots: 8,
        }
    }
}

/// The ranks of one process on one GPU, whose launches go out as one grid.
///
/// All ranks launch the same kernels in the same order, each from a thread of its own. A rank that does not come in time, or
/// comes with something else, breaks the gang: every rank gets the same error, then and at every later launch. A launch that
/// is refused before it begins (no such kernel, too many blocks) gives every rank the same error, and the gang lives on.
#[derive(Debug)]
pub struct Gang {
    driver: Arc<dyn Driver>,
    /// Takes the memory back, where it frees it at its own time.
    home: Option<Arc<Gpu>>,
    module: RawModule,
    options: GangOptions,
    /// Where grids run, one after another.
    stream: RawStream,
    /// One parameter struct a rank and slot.
    table: RawMemory,
    state: Mutex<State>,
    changed: Condvar,
}

/// A launch as it goes to the driver.
struct Prepared {
    function: RawFunction,
    shape: LaunchShape,
    /// Bytes of the table: all ranks' structs.
    table: Vec<u8>,
    blocks_per_rank: u32,
}

/// Bytes of one slot for one rank.
const PART: u64 = MAX_PARAM_BYTES as u64;

impl Gang {
    /// A gang on `module`, an image that was built with `fusewire-build build --one-grid` and loaded by `driver`. Allocates
    /// device memory for the parameters, a stream and events.
    ///
    /// # Safety
    /// The module stays loaded as long as the gang lives.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no ranks or no slots; [`Error::Driver`].
    pub unsafe fn new(
        driver: Arc<dyn Driver>,
        module: RawModule,
        options: GangOptions,
    ) -> Result<Self> {
        if options.size == 0 || options.slots == 0 {
            return Err(invalid(format!(
                "{} ranks and {} slots; a gang has at least one of each",
                options.size, options.slots
            )));
        }
        let bytes = u64::from(options.slots) * u64::from(options.size) * PART;
        let table = driver.allocate(bytes, MemoryKind::Private)?;
        let stream = driver.create_stream();
        // From here on dropping the value frees what there is.
        let mut gang = Self {
            home: None,
            module,
            options,
            stream: RawStream(0),
            table,
            state: Mutex::new(State {
                arrivals: (0..options.size).map(|_| None).collect(),
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
        gang.stream = stream?;
        let state = gang.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        for _ in 0..options.slots {
            state.slots.push(gang.driver.create_event(false)?);
        }
        for _ in 0..options.size {
            state.before.push(gang.driver.create_event(false)?);
        }
        Ok(gang)
    }

    /// As [`Gang::new`], on a GPU of this process, which frees the memory when nothing runs on it: others may wait for
    /// the thread that lets the gang go. `module` is of a [`GridImage`].
    pub(crate) fn on(gpu: &Arc<Gpu>, module: RawModule, options: GangOptions) -> Result<Self> {
        // SAFETY: the modules of a `GridImage` stay loaded.
        let mut gang = unsafe { Self::new(gpu.shared_driver(), module, options) }?;
        gang.home = Some(Arc::clone(gpu));
        Ok(gang)
    }

    /// Number of ranks.
    pub fn size(&self) -> u32 {
        self.options.size
    }

    /// Why the gang launches nothing any more, if it is broken.
    pub fn failure(&self) -> Option<Error> {
        self.lock().broken.clone()
    }

    /// Breaks the gang from outside: whoever waits in it, and every later launch, gets `error`, or what broke the gang
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
    /// `stream` is a stream of the gang's driver.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for this rank's own arguments, which nobody else hears of. The same error for every rank:
    /// [`Error::Launch`] when a rank does not come in time, when ranks come with different launches, when the image lacks the
    /// kernel's grid form, when the blocks do not fit on the GPU at once; and what the driver said.
    pub unsafe fn launch(
        &self,
        rank: u32,
        kernel: &str,
        params: &[u8],
        shape: LaunchShape,
        stream: RawStream,
    ) -> Result<()> {
        let patience = self.options.timeout;
        // SAFETY: the requirements are the same.
        unsafe { self.launch_within(patience, rank, kernel, params, shape, stream) }
    }

    /// As [`Gang::launch`], with a bound of its own of the wait for the other ranks.
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there.
    pub unsafe fn launch_within(
        &self,
        patience: Duration,
        rank: u32,
        kernel: &str,
        params: &[u8],
        shape: LaunchShape,
        stream: RawStream,
    ) -> Result<()> {
        self.check(rank, kernel, params, &shape, stream)?;
        let arrival = Arrival {
            kernel: kernel.to_owned(),
            params: params.to_owned(),
            shape,
            stream,
        };
        let mut state = self.lock();
        if let Some(error) = &state.broken {
            return Err(error.clone());
        }
        let place = rank as usize;
        if state.arrivals[place].is_some() {
            return Err(invalid(format!(
                "rank {rank} launches {kernel} while another thread of it launches; a rank has one \
                 order of launches"
            )));
        }
        if let Some(error) = state.mismatch(rank, &arrival) {
            state.fail(&error);
            self.changed.notify_all();
            return Err(error);
        }
        state.arrivals[place] = Some(arrival);
        let outcome = Arc::clone(&state.outcome);
        if state.arrivals.iter().all(Option::is_some) {
            self.complete(&mut state);
            self.changed.notify_all();
        }
        self.wait(state, &outcome, patience)
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
            return Err(invalid(format!("rank {rank} in a gang of {size} ranks")));
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
        patience: Duration,
    ) -> Result<()> {
        let deadline = Instant::now() + patience;
        loop {
            if let Some(result) = outcome.get() {
                return result.clone();
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let error = state.late(patience);
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

    /// Launches the grid that has gathered, and says to all what came of it.
    fn complete(&self, state: &mut State) {
        let arrivals: Vec<Arrival> = state.arrivals.iter_mut().filter_map(Option::take).collect();
        let prepared = match self.prepare(state, &arrivals) {
            Ok(prepared) => prepared,
            Err(error) => return state.finish(Err(error)),
        };
        match self.enqueue(state, &arrivals, &prepared) {
            Ok(()) => state.finish(Ok(())),
            // Nobody knows how far it came.
            Err(error) => state.fail(&error),
        }
    }

    /// Everything that can be refused before anything is enqueued.
    fn prepare(&self, state: &mut State, arrivals: &[Arrival]) -> Result<Prepared> {
        let Some(first) = arrivals.first() else {
            return Err(invalid("nobody has come".to_owned()));
        };
        let function = self.function(state, &first.kernel)?;
        let blocks = self.fitting(function, first)?;
        Ok(Prepared {
            function,
            shape: LaunchShape {
                blocks,
                threads: first.shape.threads,
                shared_bytes: first.shape.shared_bytes,
                cooperative: self.driver.properties().cooperative,
                ..LaunchShape::default()
            },
            table: arrivals
                .iter()
                .flat_map(|arrival| &arrival.params)
                .copied()
                .collect(),
            blocks_per_rank: first.shape.blocks,
        })
    }

    /// The grid form of a kernel.
    fn function(&self, state: &mut State, kernel: &str) -> Result<RawFunction> {
        if let Some(function) = state.functions.get(kernel) {
            return Ok(*function);
        }
        let symbol = format!("{kernel}{SUFFIX}");
        let name = CString::new(symbol.as_str())
            .map_err(|_| invalid(format!("{kernel:?} is no kernel's name")))?;
        let Some(function) = self.driver.function(self.module, &name)? else {
            return Err(Error::launch(format!(
                "the image has no {symbol}; build it with `fusewire-build build --one-grid`"
            )));
        };
        let expected: Vec<_> = GridParams::FIELDS
            .iter()
            .map(|field| (field.offset, field.size))
            .collect();
        if let Some(found) = self.driver.parameters(function)?
            && found != expected
        {
            return Err(Error::launch(format!(
                "{symbol} takes arguments (offset, size) {found:?}, but a grid form takes \
                 {expected:?}; the image was built by another version"
            )));
        }
        state.functions.insert(kernel.to_owned(), function);
        Ok(function)
    }

    /// The blocks of all ranks, if the GPU holds them at once.
    fn fitting(&self, function: RawFunction, launch: &Arrival) -> Result<u32> {
        let LaunchShape {
            blocks,
            threads,
            shared_bytes,
            ..
        } = launch.shape;
        let size = self.options.size;
        let each = self
            .driver
            .resident_blocks(function, threads, shared_bytes)?;
        let multiprocessors = self.driver.properties().multiprocessors;
        let most = u64::from(each) * u64::from(multiprocessors);
        match size.checked_mul(blocks) {
            Some(all) if u64::from(all) <= most => Ok(all),
            _ => Err(Error::launch(format!(
                "{}: {blocks} blocks of each of {size} ranks are not resident together: \
                 {multiprocessors} multiprocessors hold {each} blocks of {threads} threads each; \
                 use fewer blocks, threads or ranks",
                launch.kernel
            ))),
        }
    }

    fn enqueue(&self, state: &mut State, arrivals: &[Arrival], prepared: &Prepared) -> Result<()> {
        let slot = state.next_slot;
        state.next_slot = (slot + 1) % state.slots.len();
        let ended = state.slots[slot];
        self.until_complete(ended)?;
        let mut address = self.table.address + slot as u64 * u64::from(self.options.size) * PART;
        // SAFETY: the slot lies in the table; the grid that read it last has ended.
        unsafe { self.driver.write(address, &prepared.table) }?;
        for (arrival, &event) in arrivals.iter().zip(&state.before) {
            self.driver.record_event(event, arrival.stream)?;
            self.driver.wait_event(self.stream, event)?;
        }
        let mut blocks_per_rank = prepared.blocks_per_rank;
        let mut arguments = [
            (&raw mut address).cast::<c_void>(),
            (&raw mut blocks_per_rank).cast::<c_void>(),
        ];
        // SAFETY: these are a grid form's arguments (`function` compared them); the table has every rank's struct,
        // whose requirements each rank's caller fulfils.
        unsafe {
            self.driver.launch(
                prepared.function,
                &prepared.shape,
                &mut arguments,
                self.stream,
            )
        }?;
        self.driver.record_event(ended, self.stream)?;
        for arrival in arrivals {
            self.driver.wait_event(arrival.stream, ended)?;
        }
        Ok(())
    }

    /// Waits for the grid whose end `event` is.
    fn until_complete(&self, event: RawEvent) -> Result<()> {
        let deadline = Instant::now() + self.options.timeout;
        while !self.driver.query_event(event)? {
            if Instant::now() >= deadline {
                return Err(Error::launch(format!(
                    "{} grids are enqueued, and the first of them has not ended within {} s; a \
                     kernel before it on a rank's stream has not ended either, or hangs",
                    self.options.slots,
                    self.options.timeout.as_secs_f64()
                )));
            }
            thread::sleep(Duration::from_micros(50));
        }
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Gang {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        if self.stream != RawStream(0) {
            if let Err(error) = self.driver.synchronize_stream(self.stream) {
                tracing::warn!(%error, "a gang's grids have not ended; its memory is leaked");
                return;
            }
            // SAFETY: the gang's own stream, whose work is done.
            let _ = unsafe { self.driver.destroy_stream(self.stream) };
        }
        for event in state.slots.drain(..).chain(state.before.drain(..)) {
            // SAFETY: the gang's own event; whoever waits for it on a stream keeps what it needs in the driver.
            let _ = unsafe { self.driver.destroy_event(event) };
        }
        match self.home.take() {
            Some(gpu) => gpu.free(self.table),
            // SAFETY: the gang's own memory, which only its grids use, and these have ended.
            None => drop(unsafe { self.driver.release(self.table) }),
        }
    }
}

fn invalid(detail: String) -> Error {
    Error::InvalidArgument {
        operation: "one-grid launch",
        detail,
    }
}
