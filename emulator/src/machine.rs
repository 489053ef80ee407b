//! The machine: runs the launches of all devices, one slice of a warp after another.

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError, TryLockError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::error::{Error, Hang, Result};
use crate::launch::{Block, Counts, Grid, Launch, Ticket};
use crate::memory::Memory;
use crate::module::LoadedModule;
use crate::random::Random;
use crate::report;
use crate::shadow::{LaunchOrder, MemoryModel, Shadow};
use crate::stream::StreamOperation;
use crate::trips::{Tracer, World};
use crate::warp::{Choice, Env};

/// The order in which the warps of all launches execute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheduler {
    /// Each warp executes 256 instructions in turn.
    RoundRobin,
    /// Random warps, numbers of instructions, and subsets of lanes. Errors name the seed.
    Random(u64),
    /// Round robin, but the warps of one device or block execute only if the others have made no
    /// progress.
    Starve {
        /// Number of the device, or `None` for all devices.
        device: Option<u32>,
        /// Number of the block, or `None` for all blocks.
        block: Option<u64>,
    },
}

/// The passage of virtual time while no thread makes progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IdleTime {
    /// Virtual time advances as fast as the host's clock. For launches that wait for the host or
    /// for other processes.
    Host,
    /// Virtual time advances at once to the end of the shortest sleep, or, if threads poll, by at
    /// least a microsecond in each round.
    Skip,
}

/// Properties of a [`Machine`].
#[derive(Clone, Debug)]
pub struct Config {
    /// The order in which warps execute.
    pub scheduler: Scheduler,
    /// The passage of virtual time while no thread makes progress.
    pub idle: IdleTime,
    /// Sum of the costs of the blocks that a device can execute concurrently. Further blocks wait
    /// until a block has completed.
    pub capacity: u32,
    /// Time of the host's clock after which launches without progress fail.
    pub hang_after: Duration,
    /// Virtual time after which launches without progress fail.
    pub hang_after_virtual: Duration,
    /// The values that loads return, and the checks of accesses.
    pub memory: MemoryModel,
    /// The launches that happen before a launch.
    pub order: LaunchOrder,
    /// True to compute the longest chain of loads and fences of each launch:
    /// [`Counts::trips`].
    pub trips: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            scheduler: Scheduler::RoundRobin,
            idle: IdleTime::Skip,
            capacity: u32::MAX,
            hang_after: Duration::from_secs(120),
            hang_after_virtual: Duration::from_secs(3600),
            memory: MemoryModel::default(),
            order: LaunchOrder::default(),
            trips: false,
        }
    }
}

/// Executes launches. All launches of a machine share a virtual clock, and may communicate through
/// global memory.
#[derive(Debug)]
pub struct Machine {
    run: Mutex<Run>,
    incoming: Mutex<Vec<Incoming>>,
    /// Threads that wait for a launch wait here for another thread to stop running the machine.
    turns: Mutex<u64>,
    changed: Condvar,
    memory: Arc<dyn Memory>,
    launches: AtomicU64,
    /// Number of elements of `incoming`.
    pending: AtomicU64,
}

/// Work for the thread that runs the machine.
#[derive(Debug)]
enum Incoming {
    Launch(Box<Grid>),
    /// An operation of a stream of a device.
    Stream(u32, StreamOperation, Arc<Ticket<bool>>),
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Machine {
    /// Creates a machine whose devices access `memory`.
    pub fn new(config: Config, memory: Arc<dyn Memory>) -> Self {
        let epoch = SystemTime::now().duration_since(UNIX_EPOCH);
        let seed = seed(&config).unwrap_or(0);
        Self {
            run: Mutex::new(Run {
                random: Random::new(seed),
                paused: (0, 0),
                shadow: Shadow::new(config.memory, config.order, seed),
                trips: config.trips.then(World::new),
                config,
                grids: Vec::new(),
                used: HashMap::new(),
                now: epoch.map_or(0, |it| it.as_nanos() as u64),
                clock: 0,
                progress: 0,
                idle: None,
            }),
            incoming: Mutex::default(),
            turns: Mutex::default(),
            changed: Condvar::new(),
            memory,
            launches: AtomicU64::new(0),
            pending: AtomicU64::new(0),
        }
    }

    /// Executes a launch. Blocks until it has completed. Launches of several threads run
    /// concurrently.
    ///
    /// # Errors
    /// Fails if the launch is invalid, if a thread of it faults, or if its threads wait for events
    /// that do not happen.
    ///
    /// # Safety
    /// Memory that the kernel accesses and that [`Memory`] describes must stay mapped until the
    /// launch has completed. If the host or other programs access this memory concurrently, they
    /// must do so with atomic operations or copies by the operating system.
    pub unsafe fn execute(&self, module: &Arc<LoadedModule>, launch: &Launch) -> Result<Counts> {
        let mut results = self.submit(&[(Arc::clone(module), launch.clone())])?;
        self.wait(&results.remove(0))
    }

    /// Executes launches concurrently. If some fail, returns an error after all have ended: a fault
    /// rather than a hang.
    ///
    /// # Errors
    /// As [`execute`](Self::execute).
    ///
    /// # Safety
    /// As [`execute`](Self::execute).
    pub unsafe fn execute_all(
        &self,
        launches: &[(Arc<LoadedModule>, Launch)],
    ) -> Result<Vec<Counts>> {
        let tickets = self.submit(launches)?;
        let results: Vec<_> = tickets.iter().map(|ticket| self.wait(ticket)).collect();
        // Other launches may wait without end for one that has faulted.
        let is_cause = |it: &&Result<Counts>| !matches!(it, Ok(_) | Err(Error::Hang(_)));
        match results.iter().find(is_cause) {
            Some(Err(error)) => Err(error.clone()),
            _ => results.into_iter().collect(),
        }
    }

    fn submit(&self, launches: &[(Arc<LoadedModule>, Launch)]) -> Result<Vec<Arc<Ticket<Counts>>>> {
        let mut grids = Vec::new();
        for (module, launch) in launches {
            let id = self.launches.fetch_add(1, Ordering::Relaxed);
            grids.push(Grid::new(launch, module, &self.memory, id)?);
        }
        let tickets = grids.iter().map(|grid| Arc::clone(&grid.ticket)).collect();
        self.enqueue(
            grids
                .into_iter()
                .map(|grid| Incoming::Launch(Box::new(grid))),
        );
        Ok(tickets)
    }

    /// Executes an operation of a stream of `device`, and orders launches as it does. The launches
    /// that are running continue. Returns false if the operation is a wait whose condition is not
    /// met: the caller repeats it.
    ///
    /// # Errors
    /// Fails if the address of the operation is not a multiple of 4, or if `device` may not access
    /// the 4 bytes.
    ///
    /// # Safety
    /// If the host or other programs access the address of the operation concurrently, they must do
    /// so with atomic operations.
    pub unsafe fn execute_on_stream(
        &self,
        device: u32,
        operation: StreamOperation,
    ) -> Result<bool> {
        let ticket = Arc::<Ticket<bool>>::default();
        self.enqueue([Incoming::Stream(device, operation, Arc::clone(&ticket))]);
        self.wait(&ticket)
    }

    fn enqueue(&self, work: impl IntoIterator<Item = Incoming>) {
        let mut incoming = lock(&self.incoming);
        let before = incoming.len();
        incoming.extend(work);
        let added = incoming.len() - before;
        self.pending.fetch_add(added as u64, Ordering::Release);
    }

    /// Runs the machine, or waits for the thread that does, until a launch or an operation has
    /// completed.
    fn wait<T: Clone>(&self, ticket: &Ticket<T>) -> Result<T> {
        loop {
            let turn = *lock(&self.turns);
            if let Some(result) = ticket.result() {
                return result;
            }
            match self.run.try_lock() {
                Ok(mut run) => self.run_until(&mut run, ticket),
                Err(TryLockError::Poisoned(poisoned)) => {
                    // Another thread has panicked while it ran the machine, so its state is
                    // unknown. All launches of this machine fail, later ones too.
                    let mut run = poisoned.into_inner();
                    let detail = "the machine has panicked during another launch";
                    for work in lock(&self.incoming).drain(..) {
                        match work {
                            Incoming::Launch(grid) => run.grids.push(*grid),
                            Incoming::Stream(_, operation, ticket) => {
                                ticket.finish(Err(operation.error(detail)));
                            }
                        }
                    }
                    run.abandon(detail);
                    // The panic may have lost the work.
                    if ticket.result().is_none() {
                        ticket.finish(Err(Error::launch("(unknown)", detail)));
                    }
                }
                Err(TryLockError::WouldBlock) => {
                    let turns = lock(&self.turns);
                    if *turns == turn && ticket.result().is_none() {
                        let wait = self.changed.wait_timeout(turns, Duration::from_millis(100));
                        drop(wait.unwrap_or_else(PoisonError::into_inner));
                    }
                    continue;
                }
            }
            *lock(&self.turns) += 1;
            self.changed.notify_all();
        }
    }

    fn run_until<T: Clone>(&self, run: &mut Run, ticket: &Ticket<T>) {
        while ticket.result().is_none() {
            let mut ended = false;
            self.memory.hold(&mut || {
                ended = if self.pending.load(Ordering::Acquire) > 0 {
                    self.take_incoming(run)
                } else {
                    run.round()
                };
            });
            if ended {
                // Its thread may be waiting.
                *lock(&self.turns) += 1;
                self.changed.notify_all();
            }
        }
    }

    /// Begins launches, and executes operations of streams. Returns true if an operation has
    /// completed. Must be called within [`Memory::hold`].
    fn take_incoming(&self, run: &mut Run) -> bool {
        let mut incoming = lock(&self.incoming);
        self.pending.store(0, Ordering::Release);
        run.progress += 1;
        let mut ended = false;
        for work in incoming.drain(..) {
            match work {
                Incoming::Launch(grid) => run.begin(*grid),
                Incoming::Stream(device, operation, ticket) => {
                    let result = operation.execute(device, &self.memory, run.shadow.as_mut());
                    ticket.finish(result);
                    ended = true;
                }
            }
        }
        ended
    }
}

/// State of the machine while a thread runs it.
#[derive(Debug)]
struct Run {
    config: Config,
    grids: Vec<Grid>,
    /// Cost of the resident blocks of each device.
    used: HashMap<u32, u64>,
    random: Random,
    /// A launch that pauses under the random scheduler, and for how many rounds.
    paused: (u64, u64),
    shadow: Option<Shadow>,
    trips: Option<World>,
    /// The virtual clock in nanoseconds.
    now: u64,
    /// Number of executed instructions.
    clock: u64,
    /// Number of events that a thread may wait for: changes of memory, completed barriers,
    /// completed blocks.
    progress: u64,
    /// Start of the period without progress.
    idle: Option<Idle>,
}

/// A period without progress.
#[derive(Clone, Copy, Debug)]
struct Idle {
    since: Instant,
    last: Instant,
    since_virtual: u64,
    rounds: u64,
}

/// Number of instructions of a slice of the scheduler [`Scheduler::RoundRobin`].
const SLICE: u32 = 256;
/// Number of rounds without progress after which a machine is idle. One round may miss events of
/// the current one.
const PATIENT_ROUNDS: u64 = 3;

impl Run {
    /// Adds a launch.
    fn begin(&mut self, grid: Grid) {
        if let Some(shadow) = &mut self.shadow {
            shadow.begin(grid.id, grid.device);
        }
        if let Some(world) = &mut self.trips {
            world.begin(grid.id, grid.device);
        }
        self.grids.push(grid);
    }

    /// Executes a slice of each warp. Returns true if a launch has ended.
    fn round(&mut self) -> bool {
        self.admit();
        if let Some(shadow) = &mut self.shadow {
            shadow.world.round += 1;
        }
        let before = self.progress;
        let mut order: Vec<(usize, usize, usize)> = Vec::new();
        let random = matches!(self.config.scheduler, Scheduler::Random(_));
        for (grid, it) in self.grids.iter_mut().enumerate() {
            it.view.refresh();
            for (block, it) in it.resident.iter().enumerate() {
                order.extend((0..it.warps.len()).map(|warp| (grid, block, warp)));
            }
        }
        let mut longest = 0;
        if random {
            self.random.shuffle(&mut order);
            let paused = self.pause();
            for &(grid, block, warp) in &order {
                if paused == Some(self.grids[grid].id) || self.random.below(4) == 0 {
                    continue;
                }
                let budget = [1, 4, 16, 64, 256][self.random.below(5) as usize];
                let choice = match self.random.below(4) {
                    0 => Choice::Lane(self.random.next() as u32, self.random.next() as u32),
                    1 => Choice::Lane(self.random.next() as u32, u32::MAX),
                    _ => Choice::Lowest,
                };
                longest = longest.max(self.slice(grid, block, warp, choice, budget));
            }
        } else {
            let is_starved = |grid: &Grid, block: &Block| match self.config.scheduler {
                Scheduler::Starve {
                    device,
                    block: number,
                } => {
                    device.is_none_or(|it| it == grid.device)
                        && number.is_none_or(|it| it == block.shared.number)
                }
                _ => false,
            };
            let (starved, others): (Vec<_>, Vec<_>) =
                order.iter().copied().partition(|(grid, block, _)| {
                    let grid = &self.grids[*grid];
                    is_starved(grid, &grid.resident[*block])
                });
            for (grid, block, warp) in others {
                longest = longest.max(self.fair_slice(grid, block, warp));
            }
            let rounds = self.idle.map_or(0, |idle| idle.rounds);
            if self.progress == before && (longest == 0 || rounds >= PATIENT_ROUNDS) {
                for (grid, block, warp) in starved {
                    longest = longest.max(self.fair_slice(grid, block, warp));
                }
            }
        }
        self.now += u64::from(longest);
        let removed = self.remove();
        if self.progress != before {
            self.idle = None;
        } else {
            self.rest();
        }
        removed
    }

    /// Returns the launch that does not execute in this round. Launches pause for up to 64 rounds,
    /// as long as the others make progress.
    fn pause(&mut self) -> Option<u64> {
        let (grid, rounds) = self.paused;
        if rounds > 0 && self.idle.is_none() {
            self.paused.1 -= 1;
            return Some(grid);
        }
        let count = self.grids.len() as u64;
        let chosen = self.grids.get(self.random.below(4 * count) as usize)?;
        self.paused = (chosen.id, 1 << self.random.below(7));
        Some(chosen.id)
    }

    /// Executes a slice of a warp: mostly the lanes with the lowest program counter, sometimes the
    /// others, so that lanes that wait for lanes of their warp do not stop them.
    fn fair_slice(&mut self, grid: usize, block: usize, warp: usize) -> u32 {
        self.clock += 1;
        let executed = self.slice(grid, block, warp, Choice::Lowest, SLICE);
        if executed < SLICE {
            return executed;
        }
        let nth = self.random.next() as u32;
        executed + self.slice(grid, block, warp, Choice::Lane(nth, u32::MAX), SLICE / 4)
    }

    /// Makes waiting blocks resident while the devices have room.
    fn admit(&mut self) {
        let mut admitted = false;
        for grid in &mut self.grids {
            let used = self.used.entry(grid.device).or_default();
            let cost = u64::from(grid.cost);
            while *used == 0 || *used + cost <= u64::from(self.config.capacity) {
                let Some(number) = grid.waiting.pop_front() else {
                    break;
                };
                *used += cost;
                let mut block = Block::new(grid, number, self.shadow.as_mut());
                if let Some(world) = &mut self.trips {
                    let (program, shared) = (&grid.program, &block.shared);
                    block.trips = Some(world.admit(program, grid.id, grid.device, shared));
                }
                grid.resident.push(block);
                admitted = true;
            }
        }
        self.progress += u64::from(admitted);
    }

    /// Executes a slice of a warp. Returns the number of executed instructions.
    fn slice(
        &mut self,
        grid: usize,
        block: usize,
        warp: usize,
        choice: Choice,
        budget: u32,
    ) -> u32 {
        let grid = &mut self.grids[grid];
        let Some(block) = grid.resident.get_mut(block) else {
            return 0;
        };
        let warp = &mut block.warps[warp];
        if warp.live == 0 || !warp.is_ready(&block.shared, self.now) {
            return 0;
        }
        let mut env = Env {
            program: &grid.program,
            module: &grid.module,
            view: &mut grid.view,
            shared: &mut block.shared,
            params: &grid.params,
            blocks: grid.blocks,
            block: grid.block,
            dynamic_shared: grid.dynamic_shared,
            device: grid.device,
            grid: grid.id,
            now: self.now,
            clock: self.clock,
            progress: &mut self.progress,
            shadow: self.shadow.as_mut(),
            trips: self
                .trips
                .as_mut()
                .zip(block.trips.as_deref_mut())
                .map(|(world, block)| Tracer { world, block }),
        };
        match warp.run(&mut env, choice, budget) {
            Ok(executed) => {
                self.clock += u64::from(executed);
                grid.counts.instructions += u64::from(executed);
                executed
            }
            Err(mut fault) => {
                fault.seed = seed(&self.config);
                end(
                    grid,
                    &mut self.used,
                    &mut self.shadow,
                    Err(Error::Fault(fault.into())),
                );
                self.progress += 1;
                0
            }
        }
    }

    /// Removes completed blocks and launches. Fails launches with a block whose threads wait for
    /// each other. Returns true if a launch has ended.
    fn remove(&mut self) -> bool {
        for grid in &mut self.grids {
            let cost = u64::from(grid.cost);
            let before = grid.resident.len();
            if let Some(shadow) = &mut self.shadow {
                for block in grid.resident.iter().filter(|it| it.shared.threads == 0) {
                    shadow.complete(grid.id, block.warps.iter().flat_map(|it| &it.agents));
                }
            }
            grid.resident.retain(|block| block.shared.threads > 0);
            let completed = (before - grid.resident.len()) as u64;
            if completed > 0 {
                *self.used.entry(grid.device).or_default() -= cost * completed;
                self.progress += 1;
            }
            let now = self.now;
            let stuck = grid.resident.iter().position(|block| {
                block.warps.iter().all(|warp| {
                    warp.live == 0
                        || (!warp.is_ready(&block.shared, now) && warp.wakes_at().is_none())
                })
            });
            if let Some(stuck) = stuck {
                let block = &grid.resident[stuck];
                let hang = Hang {
                    summary: format!(
                        "kernel {}, device {}, block {}: all threads wait for each other",
                        grid.program.name, grid.device, block.shared.number
                    ),
                    waits: report::waits(grid, block),
                    seed: seed(&self.config),
                };
                end(
                    grid,
                    &mut self.used,
                    &mut self.shadow,
                    Err(Error::Hang(Arc::new(hang))),
                );
                self.progress += 1;
            }
        }
        let before = self.grids.len();
        let (shadow, world) = (&mut self.shadow, &mut self.trips);
        self.grids.retain_mut(|grid| {
            if grid.ticket.result().is_some() {
                if let Some(world) = world {
                    world.end(grid.id);
                }
                return false;
            }
            if grid.is_complete() {
                if let Some(shadow) = shadow {
                    shadow.end(grid.id, grid.device);
                }
                let trips = world.as_mut().and_then(|world| world.end(grid.id));
                grid.counts.trips = trips.map(Box::new);
                grid.ticket.finish(Ok(grid.counts.clone()));
                return false;
            }
            true
        });
        before != self.grids.len()
    }

    /// Lets virtual time pass after a round without progress. Fails all launches after a long time
    /// without progress.
    fn rest(&mut self) {
        let now = Instant::now();
        let wakes_at = self.wakes_at();
        let idle = self.idle.get_or_insert(Idle {
            since: now,
            last: now,
            since_virtual: self.now,
            rounds: 0,
        });
        idle.rounds += 1;
        let rounds = idle.rounds;
        if rounds <= PATIENT_ROUNDS && wakes_at.is_none() {
            return;
        }
        let (since, since_virtual) = (idle.since, idle.since_virtual);
        let elapsed = now - core::mem::replace(&mut idle.last, now);
        match self.config.idle {
            IdleTime::Host => {
                self.now += elapsed.as_nanos() as u64;
                if rounds > 1000 {
                    std::thread::sleep(Duration::from_micros(20));
                } else {
                    std::thread::yield_now();
                }
            }
            IdleTime::Skip => match wakes_at {
                Some(until) if rounds < 1000 => self.now = self.now.max(until),
                // Threads that poll for a long time wait for a timeout. The step grows with the
                // time that has passed, so that timeouts of any length end after few rounds.
                _ => self.now += ((self.now - since_virtual) / 512).max(1000),
            },
        }
        let virtual_time = Duration::from_nanos(self.now - since_virtual);
        if now - since > self.config.hang_after || virtual_time > self.config.hang_after_virtual {
            self.hang();
        }
    }

    /// Returns the earliest time at which a thread wakes, if all threads sleep or wait.
    fn wakes_at(&self) -> Option<u64> {
        let blocks = self.grids.iter().flat_map(|grid| &grid.resident);
        let mut earliest = None;
        for block in blocks {
            for warp in &block.warps {
                if warp.is_ready(&block.shared, self.now) {
                    return None;
                }
                earliest = match (earliest, warp.wakes_at()) {
                    (Some(first), Some(second)) => Some(u64::min(first, second)),
                    (first, second) => first.or(second),
                };
            }
        }
        earliest
    }

    /// Fails all launches because they make no progress.
    fn hang(&mut self) {
        let mut waits = Vec::new();
        for grid in &self.grids {
            for block in &grid.resident {
                waits.extend(report::waits(grid, block));
            }
            if let (Some(first), Some(last)) = (grid.waiting.front(), grid.waiting.back()) {
                waits.push(format!(
                    "kernel {}, device {}: blocks {first} to {last} are not resident, because the \
                     device has no room",
                    grid.program.name, grid.device
                ));
            }
        }
        let hang = Arc::new(Hang {
            summary: match self.grids.len() {
                1 => "a launch makes no progress".to_owned(),
                count => format!("{count} launches make no progress"),
            },
            waits,
            seed: seed(&self.config),
        });
        for mut grid in core::mem::take(&mut self.grids) {
            if let Some(world) = &mut self.trips {
                world.end(grid.id);
            }
            end(
                &mut grid,
                &mut self.used,
                &mut self.shadow,
                Err(Error::Hang(Arc::clone(&hang))),
            );
        }
        self.idle = None;
    }

    /// Fails all launches.
    fn abandon(&mut self, detail: &str) {
        for mut grid in core::mem::take(&mut self.grids) {
            if let Some(world) = &mut self.trips {
                world.end(grid.id);
            }
            let error = Error::launch(&grid.program.name, detail);
            end(&mut grid, &mut self.used, &mut self.shadow, Err(error));
        }
    }
}

fn seed(config: &Config) -> Option<u64> {
    match config.scheduler {
        Scheduler::Random(seed) => Some(seed),
        _ => None,
    }
}

/// Ends a launch with a result.
fn end(
    grid: &mut Grid,
    used: &mut HashMap<u32, u64>,
    shadow: &mut Option<Shadow>,
    result: Result<Counts>,
) {
    let blocks = grid.resident.len() as u64;
    *used.entry(grid.device).or_default() -= blocks * u64::from(grid.cost);
    grid.resident.clear();
    grid.waiting.clear();
    if grid.ticket.result().is_none() {
        if let Some(shadow) = shadow {
            shadow.end(grid.id, grid.device);
        }
        grid.ticket.finish(result);
    }
}
