//! The memory model: happens-before by vector clocks, the values that loads may return, and the
//! checks of accesses. The page `docs/memory-model.md` defines the rules.

mod agent;
mod cell;
mod clock;
mod release;
mod stream;

use std::collections::HashMap;
use std::sync::Arc;

use self::cell::{Bytes, Cell, Read, Version, bits};
use self::clock::{Event, Knowledge, Thread, join};
use self::release::{Position, Release, add_release};
use crate::error::{FaultKind, Site};
use crate::program::{Access, FenceKind, Order, Program, Scope};
use crate::random::Random;
use crate::row::lanes;

pub(crate) use self::agent::{Agent, Gathered, Gathering};
pub(crate) use self::cell::{Cells, Kind, Place};
pub use self::stream::Mark;

/// The values that loads return, and the checks of accesses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryModel {
    /// Loads return the newest value. Races are not detected. Kernels of several processes can
    /// share memory.
    Unchecked,
    /// Loads return the newest value. Races, reads of uninitialised shared memory, and changes of
    /// memory that `ld.global.nc` reads are errors.
    #[default]
    Checked,
    /// The checks of `Checked`. Loads may return older values, as PTX's memory model permits. The
    /// scheduler's random numbers select the values.
    Weak,
}

/// The launches that happen before a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaunchOrder {
    /// Launches of all devices that ended before the launch started, because the host has waited
    /// for them.
    #[default]
    Host,
    /// Launches of the same device that ended before the launch started. Those of other devices
    /// only as far as signals in memory order them.
    Device,
}

impl LaunchOrder {
    /// Returns the device whose ends of launches order the launches of `device`.
    fn key(self, device: u32) -> u32 {
        match self {
            Self::Host => 0,
            Self::Device => device,
        }
    }
}

/// Number of rounds of the machine for which strong loads return a value that was overwritten.
const STALE_ROUNDS: u64 = 16;
/// Number of reads of a cell after which those of old launches are removed.
const MANY_READS: usize = 32;
/// Number of times in a clock after which those of old launches are removed.
const MANY_TIMES: usize = 512;
/// Number of pages after which the cells of old launches are removed.
const MANY_PAGES: usize = 1 << 14;
/// Number of blocks after which an idle machine removes all cells.
const MANY_BLOCKS: usize = 1 << 16;

/// A resident block or one of a recent launch.
#[derive(Clone, Debug)]
struct BlockInfo {
    program: Option<Arc<Program>>,
    grid: u64,
    device: u32,
    /// The device in [`Knowledge::start`].
    launches: u32,
    /// Number in the grid.
    number: u64,
    /// The end of its launch, or `u64::MAX`.
    ended: u64,
}

/// State that all accesses use.
#[derive(Debug)]
pub(crate) struct World {
    weak: bool,
    blocks: Vec<BlockInfo>,
    /// Counts ends of launches.
    stamp: u64,
    order: LaunchOrder,
    /// The start of each running launch and the events before it.
    starts: HashMap<u64, (u64, Arc<Knowledge>)>,
    /// For each running launch, the index of its first block, or of an earlier block.
    first_blocks: HashMap<u64, usize>,
    /// Knowledge of the completed blocks of running launches.
    completed: HashMap<u64, Arc<Knowledge>>,
    /// Events before launches that start now, for each device. With [`LaunchOrder::Host`], only
    /// device 0 has an entry.
    ended: HashMap<u32, Arc<Knowledge>>,
    /// Number of times that all accesses have been removed.
    cleared: u64,
    random: Random,
    pub(crate) round: u64,
    /// Releases by sequentially consistent fences, which later ones acquire.
    sequential: Vec<Arc<Release>>,
}

/// The memory model's state of a machine.
#[derive(Debug)]
pub(crate) struct Shadow {
    pub(crate) world: World,
    pub(crate) global: Cells,
    many_pages: usize,
}

/// A violation of the rules by an access.
#[derive(Debug)]
pub(crate) struct Violation {
    pub(crate) kind: FaultKind,
    pub(crate) detail: String,
    pub(crate) other: Option<Box<Site>>,
}

/// An access of an element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Element {
    pub(crate) place: Place,
    /// The address that the instruction uses, for errors.
    pub(crate) address: u64,
    /// Size in bytes.
    pub(crate) size: u8,
    pub(crate) kind: Kind,
    pub(crate) order: Order,
    /// Index of the instruction.
    pub(crate) pc: u32,
    /// True for shared memory, whose initial contents are undefined.
    pub(crate) shared: bool,
    /// True for a reduction, whose read is not part of an acquire pattern.
    pub(crate) reduction: bool,
}

impl Element {
    pub(crate) fn new(access: &Access, place: Place, address: u64, pc: u32, shared: bool) -> Self {
        Self {
            place,
            address,
            size: access.size,
            kind: Kind {
                strong: access.order.is_strong().then_some(access.scope),
                alias: false,
                constant: access.order == Order::Constant && !shared,
                atomic: false,
            },
            order: access.order,
            pc,
            shared,
            reduction: false,
        }
    }

    fn shift(&self) -> u32 {
        (self.place.offset % 8) as u32 * 8
    }

    fn bytes(&self) -> Bytes {
        (((1u16 << self.size) - 1) << (self.place.offset % 8)) as Bytes
    }

    /// Checks that a thread has written the element, if it is in shared memory.
    fn check_initialized(&self, cell: &Cell) -> Result<(), Violation> {
        if !self.shared || self.bytes() & !cell.written == 0 {
            return Ok(());
        }
        Err(Violation {
            kind: FaultKind::Uninitialized,
            detail: "no thread of the block has written all of them".to_owned(),
            other: None,
        })
    }

    /// Returns the value of the element in a cell.
    fn value(&self, content: u64) -> u64 {
        (content & bits(self.bytes())) >> self.shift()
    }
}

impl Shadow {
    /// Creates the state for a model, or `None` for [`MemoryModel::Unchecked`].
    pub(crate) fn new(model: MemoryModel, order: LaunchOrder, seed: u64) -> Option<Self> {
        let world = World {
            weak: model == MemoryModel::Weak,
            blocks: vec![BlockInfo {
                program: None,
                grid: u64::MAX,
                device: u32::MAX,
                launches: u32::MAX,
                number: 0,
                ended: 0,
            }],
            stamp: 1,
            order,
            starts: HashMap::new(),
            first_blocks: HashMap::new(),
            completed: HashMap::new(),
            ended: HashMap::new(),
            cleared: 0,
            random: Random::new(seed ^ 0x5eed),
            round: 0,
            sequential: Vec::new(),
        };
        (model != MemoryModel::Unchecked).then_some(Self {
            world,
            global: Cells::default(),
            many_pages: MANY_PAGES,
        })
    }

    /// Registers the start of a launch on a device.
    pub(crate) fn begin(&mut self, grid: u64, device: u32) {
        let world = &mut self.world;
        let mut knowledge = world.ended(device);
        let it = Arc::make_mut(&mut knowledge);
        let starts = it.clone();
        it.forget(|block| {
            let block = &world.blocks[block as usize];
            block.ended < starts.start(block.launches)
        });
        let device = world.order.key(device);
        world.ended.insert(device, Arc::clone(&knowledge));
        world.starts.insert(grid, (world.stamp, knowledge));
        world.first_blocks.insert(grid, world.blocks.len());
    }

    /// Registers the completion of a block with its threads.
    pub(crate) fn complete<'a>(&mut self, grid: u64, agents: impl Iterator<Item = &'a Agent>) {
        let all = self.world.completed.entry(grid).or_default();
        for agent in agents {
            join(all, &agent.knowledge);
        }
    }

    /// Registers the end of a launch.
    pub(crate) fn end(&mut self, grid: u64, device: u32) {
        let world = &mut self.world;
        let first = world.first_blocks.remove(&grid).unwrap_or(0);
        for block in &mut world.blocks[first..] {
            if block.grid == grid {
                block.ended = world.stamp;
            }
        }
        world.stamp += 1;
        world.starts.remove(&grid);
        if let Some(completed) = world.completed.remove(&grid) {
            world.add_ended(device, &completed);
        }
        // Without order between devices, later launches can race with those that have ended.
        let ordered = world.order == LaunchOrder::Host || world.blocks.len() > MANY_BLOCKS;
        if world.starts.is_empty() && ordered {
            world.cleared += 1;
            world.ended.clear();
            world.blocks.truncate(1);
            world.sequential.clear();
            self.global = Cells::default();
        } else if self.global.pages() > self.many_pages {
            let world = &self.world;
            self.global.forget(|block| world.is_old(block));
            self.many_pages = MANY_PAGES.max(2 * self.global.pages());
        }
    }

    /// Registers a resident block of `threads` threads. Returns the states of the threads.
    pub(crate) fn admit(
        &mut self,
        program: &Arc<Program>,
        grid: u64,
        device: u32,
        number: u64,
        threads: u32,
    ) -> Vec<Agent> {
        let world = &mut self.world;
        world.blocks.push(BlockInfo {
            program: Some(Arc::clone(program)),
            grid,
            device,
            launches: world.order.key(device),
            number,
            ended: u64::MAX,
        });
        let (start, knowledge) = world.starts.get(&grid).cloned().unwrap_or_default();
        let block = world.blocks.len() as u32 - 1;
        let agent = |thread| {
            let thread = Thread {
                block,
                number: thread as u16,
            };
            Agent::new(Position { thread, device }, start, &knowledge)
        };
        (0..threads).map(agent).collect()
    }
}

impl World {
    /// Returns the events before launches of a device that start now.
    fn ended(&self, device: u32) -> Arc<Knowledge> {
        let device = self.order.key(device);
        let mut knowledge = self.ended.get(&device).cloned().unwrap_or_default();
        Arc::make_mut(&mut knowledge).set_start(device, self.stamp);
        knowledge
    }

    /// Adds events before launches of a device that start later.
    fn add_ended(&mut self, device: u32, knowledge: &Arc<Knowledge>) {
        join(
            self.ended.entry(self.order.key(device)).or_default(),
            knowledge,
        );
    }

    /// Returns true if the launch of a block ended before all running launches started.
    fn is_old(&self, block: u32) -> bool {
        let oldest = self.starts.values().map(|(start, _)| *start).min();
        let oldest = oldest.unwrap_or(u64::MAX);
        self.blocks[block as usize].ended < oldest
    }

    /// Returns true if the launch of a block ended before that of `agent` started.
    fn ended_before(&self, block: u32, agent: &Agent) -> bool {
        self.blocks[block as usize].ended < agent.start
    }

    /// Returns true if an access happens before the next access of `agent` to the same location.
    fn is_before(&self, event: Event, alias: bool, agent: &Agent, by_alias: bool) -> bool {
        let own = agent.position.thread;
        let block = &self.blocks[event.thread.block as usize];
        if event.thread == Thread::HOST || block.ended < agent.knowledge.start(block.launches) {
            return true;
        }
        let same_proxy = match (alias, by_alias) {
            (false, false) => true,
            (true, true) => event.thread.block == own.block,
            _ => false,
        };
        if same_proxy {
            event.thread == own || agent.knowledge.before.contains(event)
        } else {
            agent.knowledge.fenced.contains(event)
        }
    }

    fn position(&self, thread: Thread) -> Position {
        Position {
            thread,
            device: self.blocks[thread.block as usize].device,
        }
    }

    /// Returns true if two accesses of different threads are morally strong.
    fn morally_strong(
        &self,
        (thread, kind, bytes): (Thread, Kind, Bytes),
        agent: &Agent,
        element: &Element,
    ) -> bool {
        let (Some(first), Some(second)) = (kind.strong, element.kind.strong) else {
            return false;
        };
        bytes == element.bytes()
            && kind.alias == element.kind.alias
            && agent.position.mutual(second, self.position(thread), first)
    }

    /// Describes the access of a thread.
    fn site(&self, thread: Thread, pc: u32) -> Option<Site> {
        let block = &self.blocks[thread.block as usize];
        let program = block.program.as_ref()?;
        let inst = &program.code[pc as usize];
        Some(program.site(inst, block.device, block.number, u32::from(thread.number)))
    }

    /// Executes a read of `element`, whose bytes in memory are `memory`. Returns its value.
    pub(crate) fn read(
        &mut self,
        cells: &mut Cells,
        agent: &mut Agent,
        element: &Element,
        memory: u64,
    ) -> Result<u64, Violation> {
        let bytes = element.bytes();
        let cell = cells.cell(element.place);
        cell.observe(bytes, memory << element.shift());
        element.check_initialized(cell)?;
        self.check_writes(cell, agent, element)?;
        let version = &cell.versions[self.choose(cell, agent, element)];
        let value = element.value(version.content);
        let seen = version.order;
        self.observe_releases(version, agent, element);
        self.add_read(cell, agent.event(), element, seen);
        Ok(value)
    }

    fn add_read(&self, cell: &mut Cell, event: Event, element: &Element, seen: u32) {
        if cell.reads.len().max(cell.floors.len()) > MANY_READS {
            cell.reads.retain(|it| !self.is_old(it.block));
            cell.floors.retain(|it| !self.is_old(it.block));
        }
        let Thread { block, number } = event.thread;
        let read = Read {
            block,
            warp: number / 32,
            lanes: 1 << (number % 32),
            time: event.time,
            kind: element.kind,
            bytes: element.bytes(),
            pc: element.pc,
            seen,
        };
        if seen > 0 && (self.weak || element.kind.strong.is_some()) {
            cell.add_floor(read);
        }
        cell.add_read(read);
    }

    /// Checks an access against the writes of a cell.
    fn check_writes(&self, cell: &Cell, agent: &Agent, element: &Element) -> Result<(), Violation> {
        let mut bytes = element.bytes();
        for version in cell.versions.iter().rev() {
            let thread = version.writer.thread;
            if thread == Thread::HOST {
                // The host has ordered its write after the earlier ones.
                bytes &= !version.bytes;
            }
            if version.bytes & bytes == 0 {
                continue;
            }
            if element.kind.constant && !self.ended_before(thread.block, agent) {
                return Err(self.changed("was written during the launch", thread, version.pc));
            }
            let alias = version.kind.alias;
            if !self.is_before(version.writer, alias, agent, element.kind.alias)
                && !self.morally_strong((thread, version.kind, version.bytes), agent, element)
                && !self.is_observed(cell, version, agent, element)
            {
                return Err(self.race(thread, version.kind, version.pc, element));
            }
        }
        Ok(())
    }

    /// Returns true if a strong read that happens before has returned the value of a strong write.
    fn is_observed(
        &self,
        cell: &Cell,
        version: &Version,
        agent: &Agent,
        element: &Element,
    ) -> bool {
        let observes = |read: &Read, lane: usize| {
            let event = read.event(lane as u32);
            let (Some(first), Some(second)) = (version.kind.strong, read.kind.strong) else {
                return false;
            };
            let (writer, reader) = (
                self.position(version.writer.thread),
                self.position(event.thread),
            );
            read.bytes == version.bytes
                && read.kind.alias == version.kind.alias
                && writer.mutual(first, reader, second)
                && self.is_before(event, read.kind.alias, agent, element.kind.alias)
        };
        cell.floors
            .iter()
            .filter(|read| read.seen == version.order)
            .any(|read| lanes(read.lanes).any(|lane| observes(read, lane)))
    }

    /// Checks a write against the reads of a cell.
    fn check_reads(&self, cell: &Cell, agent: &Agent, element: &Element) -> Result<(), Violation> {
        let bytes = element.bytes();
        for read in cell.reads.iter().filter(|it| it.bytes & bytes != 0) {
            if read.kind.constant && self.blocks[read.block as usize].ended == u64::MAX {
                let lane = read.lanes.trailing_zeros();
                let thread = read.event(lane).thread;
                return Err(self.changed(
                    "is read by ld.global.nc during the launch",
                    thread,
                    read.pc,
                ));
            }
            for lane in lanes(read.lanes) {
                let event = read.event(lane as u32);
                // The read has returned its value, so the proxies do not matter.
                if !self.is_before(event, false, agent, false)
                    && !agent.knowledge.consumed.contains(event)
                    && !self.morally_strong((event.thread, read.kind, read.bytes), agent, element)
                {
                    return Err(self.race(event.thread, read.kind, read.pc, element));
                }
            }
        }
        Ok(())
    }

    #[cold]
    fn changed(&self, what: &str, other: Thread, pc: u32) -> Violation {
        Violation {
            kind: FaultKind::ConstantChanged,
            detail: format!("the memory {what}"),
            other: self.site(other, pc).map(Box::new),
        }
    }

    #[cold]
    fn race(&self, other: Thread, kind: Kind, pc: u32, element: &Element) -> Violation {
        let reason = match (kind, element.kind) {
            (a, b) if a.alias != b.alias => {
                "the accesses use different proxies, and no fence.proxy.alias is between them"
            }
            (a, b) if a.strong.is_none() || b.strong.is_none() => {
                "the accesses have a conflict, and neither happens before the other"
            }
            _ => "the strong accesses differ in size, or their scopes do not contain both threads",
        };
        Violation {
            kind: FaultKind::Race,
            detail: format!("races with another thread: {reason}"),
            other: self.site(other, pc).map(Box::new),
        }
    }

    /// Chooses the write whose value a read returns.
    fn choose(&mut self, cell: &Cell, agent: &Agent, element: &Element) -> usize {
        let bytes = element.bytes();
        let alias = element.kind.alias;
        let known =
            |version: &Version| self.is_before(version.writer, version.kind.alias, agent, alias);
        let newest = cell.newest_of(bytes);
        if !self.weak || element.kind.atomic || known(&cell.versions[newest]) {
            return newest;
        }
        // The newest write that the thread, or a thread whose read happens before, has read.
        let is_before = |read: &&Read| {
            read.bytes & bytes != 0
                && lanes(read.lanes).any(|lane| {
                    self.is_before(read.event(lane as u32), read.kind.alias, agent, alias)
                })
        };
        let seen = cell.floors.iter().filter(is_before).map(|read| read.seen);
        let floor = seen.max().unwrap_or(0);
        let is_last = |version: &Version| {
            let expired =
                element.kind.strong.is_some() && version.round + STALE_ROUNDS < self.round;
            version.order <= floor || expired || known(version)
        };
        let mut candidates = Vec::new();
        for at in cell.history(bytes) {
            candidates.push(at);
            if is_last(&cell.versions[at]) {
                break;
            }
        }
        if candidates.len() == 1 || self.random.below(2) == 0 {
            return newest;
        }
        candidates[self.random.below(candidates.len() as u64) as usize]
    }

    /// Acquires or remembers the releases of a write that `agent` has read.
    fn observe_releases(&self, version: &Version, agent: &mut Agent, element: &Element) {
        let writer = version.writer.thread;
        if version.trail.is_none()
            || (writer != agent.position.thread
                && !self.morally_strong((writer, version.kind, version.bytes), agent, element))
        {
            return;
        }
        let at = (element.place, element.bytes());
        let scope = element.kind.strong.unwrap_or(Scope::Cta);
        let acquires = matches!(element.order, Order::Acquire | Order::AcqRel);
        if !agent.observes(at, version.order, acquires.then_some(scope)) {
            return;
        }
        if let Some(trail) = &version.trail {
            agent.consume(version.writer, trail);
        }
        if element.reduction {
            return;
        }
        for release in &version.releases {
            if !(acquires && agent.acquire(release, scope)) {
                agent.observe(at, release);
            }
        }
        if acquires {
            agent.acquire_observed(Some(at), scope);
        }
        if agent.knowledge.len() > MANY_TIMES {
            let knowledge = Arc::make_mut(&mut agent.knowledge);
            let starts = knowledge.clone();
            knowledge.forget(|block| {
                let block = &self.blocks[block as usize];
                block.ended < starts.start(block.launches)
            });
        }
    }

    /// Executes a write of `element`. `memory` are its bytes in memory before the write.
    pub(crate) fn write(
        &mut self,
        cells: &mut Cells,
        agent: &mut Agent,
        element: &Element,
        memory: u64,
        value: u64,
    ) -> Result<(), Violation> {
        let bytes = element.bytes();
        let cell = cells.cell(element.place);
        cell.observe(bytes, memory << element.shift());
        self.check_writes(cell, agent, element)?;
        self.check_reads(cell, agent, element)?;
        let writer = agent.event();
        let content = cell.newest().content & !bits(bytes) | value << element.shift() & bits(bytes);
        let previous = &cell.versions[cell.newest_of(bytes)];
        let seen = previous.order;
        if element.kind.atomic {
            element.check_initialized(cell)?;
            self.observe_releases(previous, agent, element);
        }
        let trail = element.kind.strong.map(|_| Arc::clone(&agent.knowledge));
        let releases = self.releases(previous, agent, element);
        if trail.is_some() && agent.time == writer.time {
            agent.time += 1;
        }
        if element.kind.atomic {
            self.add_read(cell, writer, element, seen);
        }
        cell.reads.retain(|read| {
            read.bytes & !bytes != 0
                || lanes(read.lanes)
                    .any(|lane| !self.is_before(read.event(lane as u32), false, agent, false))
        });
        cell.push(Version {
            writer,
            kind: element.kind,
            bytes,
            pc: element.pc,
            order: 0,
            round: self.round,
            content,
            releases,
            trail,
        });
        cell.written |= bytes;
        Ok(())
    }

    /// Returns the releases that a read of a write by `agent` observes.
    fn releases(
        &self,
        previous: &Version,
        agent: &mut Agent,
        element: &Element,
    ) -> Vec<Arc<Release>> {
        let Some(scope) = element.kind.strong else {
            return Vec::new();
        };
        let at = (element.place, element.bytes());
        let mut releases = agent.continued(at);
        let writer = previous.writer.thread;
        if element.kind.atomic
            && (writer == agent.position.thread
                || self.morally_strong((writer, previous.kind, previous.bytes), agent, element))
        {
            for release in &previous.releases {
                add_release(&mut releases, release);
            }
        }
        if matches!(element.order, Order::Release | Order::AcqRel) {
            add_release(&mut releases, &agent.release_at(at, scope));
        }
        releases
    }

    /// Executes a fence.
    pub(crate) fn fence(&mut self, agent: &mut Agent, fence: &FenceKind) {
        let FenceKind::Scoped {
            scope,
            acquire,
            release,
            sequential,
        } = *fence
        else {
            agent.fence_proxy();
            return;
        };
        if acquire {
            agent.acquire_observed(None, scope);
        }
        if sequential {
            for earlier in &self.sequential {
                agent.acquire(earlier, scope);
            }
        }
        if !release {
            return;
        }
        let released = agent.fence_release(scope);
        if !sequential {
            return;
        }
        add_release(&mut self.sequential, &released);
    }
}
