//! Trips: the longest chain of loads of global memory and of fences that wait for each other.
//!
//! Each register of each lane and each written location carries a [`Path`]. An instruction's result
//! has the longest path of its operands. A load of global memory adds a step to the longest of: the
//! path of its address, the control path of its lane, and the path of the value that it reads. The
//! section "Trips" of `docs/emulator.md` defines the rules.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, OnceLock};

use crate::block::Shared;
use crate::memory::Range;
use crate::program::{Inst, Program, Reg, Role};
use crate::row::{LANES, lanes};

/// Steps of a chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Steps {
    /// Strong loads of global memory, and atomic operations with a result.
    pub strong: u32,
    /// Weak loads of global memory.
    pub weak: u32,
    /// Fences that wait for stores to memory of other devices.
    pub fences: u32,
}

/// Bytes that a launch has read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bytes {
    /// Bytes that lanes have read.
    pub read: u64,
    /// Bytes that lanes have written.
    pub written: u64,
}

/// The memory that an access reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Route {
    /// Memory of the launch's device.
    Own,
    /// Memory of another device.
    Peer(u32),
    /// Host memory.
    Host,
    /// A multicast object.
    Multicast,
}

/// An instruction on the longest chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// The device that has executed the instruction.
    pub device: u32,
    /// Name of the kernel.
    pub kernel: String,
    /// Line of the PTX text.
    pub line: u32,
    /// Text of the instruction.
    pub instruction: String,
    /// Source file and line, if the PTX has a line table.
    pub source: Option<String>,
}

/// Trips of a launch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trips {
    /// Number of the launch on its device, starting with 1. Values of other devices' launches with
    /// the same number add to the chain.
    pub launch: u32,
    /// The longest chain of the launch.
    pub steps: Steps,
    /// The longest chain between the acquire of a value that another device has written in the same
    /// launch, and the first access of 16 bytes of a lane, or of a multicast object, after it.
    pub to_data: Option<Steps>,
    /// Instructions of thread 0 of block 0, without repeated polls.
    pub leader_instructions: u64,
    /// Bytes by route, without repeated polls.
    pub bytes: BTreeMap<Route, Bytes>,
    /// The instructions of `steps`, first to last. The chain can start in another launch, whose
    /// values this launch has read.
    pub chain: Vec<Step>,
}

/// Steps of a chain, and its last instruction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Path {
    strong: u16,
    weak: u16,
    fences: u16,
    /// Index in [`World::nodes`].
    node: u32,
}

impl Path {
    /// Returns the order of paths. Paths of equal length are ordered by their steps, so that the
    /// longest of several does not depend on the order of comparison.
    fn key(self) -> (u32, u16, u16) {
        let sum = u32::from(self.strong) + u32::from(self.weak) + u32::from(self.fences);
        (sum, self.strong, self.fences)
    }

    pub(crate) fn max(self, other: Self) -> Self {
        if other.key() > self.key() {
            other
        } else {
            self
        }
    }

    fn steps(self) -> Steps {
        self.since(Self::default())
    }

    /// Returns the steps after those of `start`.
    fn since(self, start: Self) -> Steps {
        Steps {
            strong: self.strong.saturating_sub(start.strong).into(),
            weak: self.weak.saturating_sub(start.weak).into(),
            fences: self.fences.saturating_sub(start.fences).into(),
        }
    }
}

/// An instruction of a chain and the node before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Node {
    kernel: u32,
    device: u32,
    pc: u32,
    before: u32,
}

#[derive(Clone, Copy, Debug)]
enum StepKind {
    Strong,
    Weak,
    Fence,
}

/// The last write of a word of memory.
#[derive(Clone, Copy, Debug, Default)]
struct Cell {
    path: Path,
    /// [`BlockTrips::generation`] of the writer. 0: the word has not been written.
    generation: u32,
    device: u32,
}

/// Size of a word in bytes.
const WORD: u64 = 4;
/// Number of words of a page.
const PAGE: u64 = 1024;
/// Number of pages after which those of completed launches are removed.
const MANY_PAGES: usize = 1 << 14;

/// Registers of an instruction.
#[derive(Debug, Default)]
struct Registers {
    /// Registers that it uses, the guard first.
    uses: Vec<Reg>,
    /// Registers that it defines.
    definitions: Vec<Reg>,
}

/// Properties of a kernel's instructions.
#[derive(Debug)]
pub(crate) struct Kernel {
    program: Arc<Program>,
    number: u32,
    registers: Vec<Registers>,
    /// Lines of the text.
    lines: OnceLock<Vec<String>>,
}

impl Kernel {
    fn line(&self, line: u32) -> String {
        let lines = self.lines.get_or_init(|| {
            self.program
                .text
                .lines()
                .map(|it| it.trim().into())
                .collect()
        });
        let text = lines.get(line.saturating_sub(1) as usize);
        text.cloned().unwrap_or_default()
    }
}

/// State of all launches of a machine.
#[derive(Debug)]
pub(crate) struct World {
    nodes: Vec<Node>,
    numbers: HashMap<Node, u32>,
    pages: HashMap<(u64, u64), Box<[Cell; PAGE as usize]>>,
    kernels: Vec<Arc<Kernel>>,
    /// Number of launches of each device.
    generations: HashMap<u32, u32>,
    launches: HashMap<u64, Launch>,
}

/// State of a running launch.
#[derive(Debug, Default)]
struct Launch {
    generation: u32,
    end: Path,
    to_data: Option<(Path, Path)>,
    leader_instructions: u64,
    bytes: BTreeMap<Route, Bytes>,
}

impl World {
    pub(crate) fn new() -> Self {
        Self {
            // Node 0 is the start of all chains.
            nodes: vec![Node {
                kernel: u32::MAX,
                device: 0,
                pc: 0,
                before: 0,
            }],
            numbers: HashMap::new(),
            pages: HashMap::new(),
            kernels: Vec::new(),
            generations: HashMap::new(),
            launches: HashMap::new(),
        }
    }

    /// Starts launch `grid`.
    pub(crate) fn begin(&mut self, grid: u64, device: u32) {
        if self.launches.is_empty() && self.pages.len() > MANY_PAGES {
            self.pages.clear();
        }
        let generation = self.generations.entry(device).or_default();
        *generation += 1;
        let launch = Launch {
            generation: *generation,
            ..Launch::default()
        };
        self.launches.insert(grid, launch);
    }

    /// Ends launch `grid`. Returns its trips.
    pub(crate) fn end(&mut self, grid: u64) -> Option<Trips> {
        let launch = self.launches.remove(&grid)?;
        let mut chain = Vec::new();
        let mut node = launch.end.node;
        while node != 0 {
            let Node {
                kernel,
                device,
                pc,
                before,
            } = self.nodes[node as usize];
            let kernel = &self.kernels[kernel as usize];
            let inst = &kernel.program.code[pc as usize];
            chain.push(Step {
                device,
                kernel: kernel.program.name.clone(),
                line: inst.line,
                instruction: kernel.line(inst.line),
                source: kernel.program.source(inst),
            });
            node = before;
        }
        chain.reverse();
        Some(Trips {
            launch: launch.generation,
            steps: launch.end.steps(),
            to_data: launch.to_data.map(|(path, start)| path.since(start)),
            leader_instructions: launch.leader_instructions,
            bytes: launch.bytes,
            chain,
        })
    }

    /// Creates the state of a block.
    pub(crate) fn admit(
        &mut self,
        program: &Arc<Program>,
        grid: u64,
        device: u32,
        block: &Shared,
    ) -> Box<BlockTrips> {
        let found = self
            .kernels
            .iter()
            .find(|it| Arc::ptr_eq(&it.program, program));
        let kernel = found.cloned().unwrap_or_else(|| {
            let registers = program.code.iter().map(registers).collect();
            let kernel = Arc::new(Kernel {
                program: Arc::clone(program),
                number: self.kernels.len() as u32,
                registers,
                lines: OnceLock::new(),
            });
            self.kernels.push(Arc::clone(&kernel));
            kernel
        });
        let warp = || WarpTrips {
            registers: Vec::new(),
            lanes: vec![Lane::default(); LANES],
        };
        Box::new(BlockTrips {
            kernel,
            grid,
            device,
            generation: self.launches.get(&grid).map_or(0, |it| it.generation),
            number: block.number,
            warps: block.live.iter().map(|_| warp()).collect(),
            shared: vec![Path::default(); block.bytes.len().div_ceil(WORD as usize)],
            locals: HashMap::new(),
            barriers: HashMap::new(),
        })
    }

    /// Returns a path with one more step.
    fn step(&mut self, path: Path, kind: StepKind, block: &BlockTrips, pc: u32) -> Path {
        let node = Node {
            kernel: block.kernel.number,
            device: block.device,
            pc,
            before: path.node,
        };
        // The lanes of a warp mostly have the same chain.
        let node = if self.nodes.last() == Some(&node) {
            self.nodes.len() as u32 - 1
        } else {
            *self.numbers.entry(node).or_insert_with(|| {
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            })
        };
        let mut next = Path { node, ..path };
        let count = match kind {
            StepKind::Strong => &mut next.strong,
            StepKind::Weak => &mut next.weak,
            StepKind::Fence => &mut next.fences,
        };
        *count = count.saturating_add(1);
        next
    }

    /// Calls `f` for each word of a range of memory.
    fn words(&mut self, memory: u64, offset: u64, bytes: u64, mut f: impl FnMut(&mut Cell)) {
        let (mut word, end) = (offset / WORD, (offset + bytes).div_ceil(WORD));
        while word < end {
            let page = self.pages.entry((memory, word / PAGE));
            let page = page.or_insert_with(|| Box::new([Cell::default(); PAGE as usize]));
            let last = end.min((word / PAGE + 1) * PAGE);
            for at in word..last {
                f(&mut page[(at % PAGE) as usize]);
            }
            word = last;
        }
    }
}

fn registers(inst: &Inst) -> Registers {
    let mut all = Registers::default();
    let mut inst = *inst;
    inst.registers(|register, role| match role {
        Role::Use => all.uses.push(*register),
        Role::Define => all.definitions.push(*register),
    });
    all
}

/// Index of a route in the counts of a lane: own, host, multicast, then the devices.
fn index(route: Route) -> usize {
    match route {
        Route::Own => 0,
        Route::Host => 1,
        Route::Multicast => 2,
        Route::Peer(device) => (3 + device as usize).min(ROUTES - 1),
    }
}

fn route(index: usize) -> Route {
    match index {
        0 => Route::Own,
        1 => Route::Host,
        2 => Route::Multicast,
        index => Route::Peer(index as u32 - 3),
    }
}

/// Number of routes of a lane, for up to 16 devices.
const ROUTES: usize = 19;

/// State of a lane.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lane {
    /// The path of the last branch, barrier or acquire: the earliest issue of what follows.
    control: Path,
    /// The longest path of the values that the lane has used.
    used: Path,
    instructions: u64,
    read: [u32; ROUTES],
    written: [u32; ROUTES],
    order: Order,
}

/// State that barriers exchange.
#[derive(Clone, Copy, Debug, Default)]
struct Order {
    /// The path of the last acquire of a value of another device.
    acquired: Option<Path>,
    /// True if no data was accessed after `acquired`.
    fresh: bool,
    /// True if a store of the lane to memory of another device has not been covered by a fence.
    own_stores: bool,
    /// True if a store before the last barrier had not been covered by a fence.
    earlier_stores: bool,
    /// True if a fence has covered the stores before the last barrier.
    fenced: bool,
}

impl Order {
    fn join(&mut self, other: &Self) {
        let path = |order: &Self| order.acquired.map(Path::key);
        if path(other) > path(self) {
            (self.acquired, self.fresh) = (other.acquired, other.fresh);
        } else if path(other) == path(self) {
            self.fresh |= other.fresh;
        }
        self.own_stores |= other.own_stores;
        self.earlier_stores |= other.earlier_stores;
        self.fenced |= other.fenced;
    }

    /// Returns the state after a barrier that has joined its threads.
    fn after_barrier(self) -> Self {
        Self {
            own_stores: false,
            earlier_stores: self.own_stores || (self.earlier_stores && !self.fenced),
            fenced: false,
            ..self
        }
    }
}

#[derive(Debug)]
struct WarpTrips {
    registers: Vec<[Path; LANES]>,
    lanes: Vec<Lane>,
}

/// State of a resident block.
#[derive(Debug)]
pub(crate) struct BlockTrips {
    kernel: Arc<Kernel>,
    grid: u64,
    device: u32,
    /// Number of the launch on its device. Launches of several devices with the same number belong
    /// to one operation: the paths of values that they exchange add up.
    generation: u32,
    number: u64,
    warps: Vec<WarpTrips>,
    shared: Vec<Path>,
    /// Paths of local memory, by warp, lane and word.
    locals: HashMap<(u32, usize, u64), Path>,
    /// Control path and order of each phase of each barrier.
    barriers: HashMap<(u64, u64), (Path, Order)>,
}

/// The lanes and registers of an instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Group {
    pub(crate) warp: u32,
    /// Lanes at the instruction.
    pub(crate) mask: u32,
    /// Lanes whose guard is true.
    pub(crate) active: u32,
    pub(crate) pc: u32,
    /// First register row.
    pub(crate) rows: usize,
}

/// An access of a lane to global memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GlobalAccess {
    pub(crate) lane: usize,
    pub(crate) bytes: u64,
    pub(crate) range: Range,
    /// Path of the address, of stored values and of the guard.
    pub(crate) sources: Path,
}

impl BlockTrips {
    /// Starts an instruction. Returns the longest path of the operands of each lane.
    pub(crate) fn sources(&mut self, group: &Group, guarded: bool) -> [Path; LANES] {
        let uses = &self.kernel.registers[group.pc as usize].uses;
        let WarpTrips {
            registers,
            lanes: states,
        } = &mut self.warps[group.warp as usize];
        let mut sources = [Path::default(); LANES];
        for (at, register) in uses.iter().enumerate() {
            let Some(row) = registers.get(group.rows + *register as usize) else {
                continue;
            };
            // Lanes whose guard is false use only the guard.
            let mask = if guarded && at == 0 {
                group.mask
            } else {
                group.active
            };
            for lane in lanes(mask) {
                sources[lane] = sources[lane].max(row[lane]);
            }
        }
        for lane in lanes(group.mask) {
            let state = &mut states[lane];
            state.used = state.used.max(sources[lane]);
            state.instructions += 1;
        }
        sources
    }

    /// Sets the path of the registers that an instruction defines.
    pub(crate) fn define(&mut self, group: &Group, lane: usize, path: Path) {
        let definitions = &self.kernel.registers[group.pc as usize].definitions;
        let registers = &mut self.warps[group.warp as usize].registers;
        for register in definitions {
            let row = group.rows + *register as usize;
            if registers.len() <= row {
                registers.resize(row + 1, [Path::default(); LANES]);
            }
            registers[row][lane] = path;
        }
    }

    fn lane(&mut self, group: &Group, lane: usize) -> &mut Lane {
        &mut self.warps[group.warp as usize].lanes[lane]
    }

    /// Returns the state of a lane and the paths of its registers.
    pub(crate) fn save(&self, warp: u32, lane: usize) -> (Lane, Vec<Path>) {
        let WarpTrips { registers, lanes } = &self.warps[warp as usize];
        let paths = registers.iter().map(|row| row[lane]).collect();
        (lanes[lane].clone(), paths)
    }

    /// Restores the state that [`save`](Self::save) has returned.
    pub(crate) fn restore(&mut self, warp: u32, lane: usize, (state, paths): &(Lane, Vec<Path>)) {
        let WarpTrips { registers, lanes } = &mut self.warps[warp as usize];
        lanes[lane] = state.clone();
        for (at, row) in registers.iter_mut().enumerate() {
            row[lane] = paths.get(at).copied().unwrap_or_default();
        }
    }

    /// Records a branch: later instructions wait for its operands. A lane issues in order, and the
    /// assembler moves instructions across forward branches, but not out of an iteration of a loop.
    /// The instructions after a branch backwards, of the lanes `backward`, therefore wait for all
    /// values that have been used before.
    pub(crate) fn branch(&mut self, group: &Group, sources: &[Path; LANES], backward: u32) {
        for lane in lanes(group.mask) {
            let state = self.lane(group, lane);
            state.control = state.control.max(sources[lane]);
            if backward >> lane & 1 != 0 {
                state.control = state.control.max(state.used);
            }
        }
    }

    /// Records an instruction that the lanes `members` execute together: all results have the
    /// longest path of the operands, and no lane continues before the others arrive.
    pub(crate) fn together(&mut self, group: &Group, members: u32, synchronizes: bool) {
        let WarpTrips {
            registers,
            lanes: states,
        } = &self.warps[group.warp as usize];
        let (mut control, mut order) = (Path::default(), Order::default());
        for lane in lanes(members) {
            control = control.max(states[lane].control);
            order.join(&states[lane].order);
        }
        let uses = self.kernel.registers[group.pc as usize].uses.iter();
        let rows = uses.filter_map(|it| registers.get(group.rows + *it as usize));
        let result = rows.fold(control, |path, row| {
            lanes(members).fold(path, |path, lane| path.max(row[lane]))
        });
        for lane in lanes(members) {
            let state = self.lane(group, lane);
            state.control = control;
            if synchronizes {
                state.order = order.after_barrier();
            }
            self.define(group, lane, result);
        }
    }

    /// Adds lanes to a phase of a barrier.
    pub(crate) fn arrive(&mut self, group: &Group, id: u64, phase: u64) {
        let (mut path, mut order) = self.barriers.get(&(id, phase)).copied().unwrap_or_default();
        for lane in lanes(group.active) {
            let state = self.lane(group, lane);
            state.control = state.control.max(state.used);
            path = path.max(state.control);
            order.join(&state.order);
        }
        self.barriers.insert((id, phase), (path, order));
    }

    /// Continues a lane after a phase of a barrier.
    pub(crate) fn leave(&mut self, group: &Group, lane: usize, id: u64, phase: u64) {
        let Some((path, order)) = self.barriers.get(&(id, phase)).copied() else {
            return;
        };
        let state = self.lane(group, lane);
        state.control = state.control.max(path);
        state.order = order.after_barrier();
        self.define(group, lane, path);
    }

    /// Returns the paths of words of shared or local memory.
    pub(crate) fn private(
        &mut self,
        group: &Group,
        lane: usize,
        shared: bool,
        address: u64,
        bytes: u64,
    ) -> Path {
        (address / WORD..(address + bytes).div_ceil(WORD)).fold(Path::default(), |path, word| {
            path.max(if shared {
                self.shared.get(word as usize).copied().unwrap_or_default()
            } else {
                let found = self.locals.get(&(group.warp, lane, word));
                found.copied().unwrap_or_default()
            })
        })
    }

    /// Sets the paths of words of shared or local memory.
    #[allow(clippy::too_many_arguments)] // the fields of an access
    pub(crate) fn set_private(
        &mut self,
        group: &Group,
        lane: usize,
        shared: bool,
        address: u64,
        bytes: u64,
        sources: Path,
    ) {
        let state = self.lane(group, lane);
        let path = sources.max(state.control);
        for word in address / WORD..(address + bytes).div_ceil(WORD) {
            if !shared {
                self.locals.insert((group.warp, lane, word), path);
            } else if let Some(cell) = self.shared.get_mut(word as usize) {
                *cell = path;
            }
        }
    }
}

/// The state that the execution of a block changes.
#[derive(Debug)]
pub(crate) struct Tracer<'a> {
    pub(crate) world: &'a mut World,
    pub(crate) block: &'a mut BlockTrips,
}

impl Tracer<'_> {
    fn route(&self, range: &Range) -> Route {
        match range.owner {
            _ if range.multicast => Route::Multicast,
            Some(owner) if owner == self.block.device => Route::Own,
            Some(owner) => Route::Peer(owner),
            None => Route::Host,
        }
    }

    /// Returns the longest path of the values at `places`, which launches of the same generation
    /// have written, and true if one was written by another device.
    fn written(&mut self, places: &[(u64, u64)], bytes: u64) -> (Path, bool) {
        let (generation, device) = (self.block.generation, self.block.device);
        let (mut path, mut foreign) = (Path::default(), false);
        for (memory, offset) in places {
            self.world.words(*memory, *offset, bytes, |cell| {
                if cell.generation == generation {
                    path = path.max(cell.path);
                    foreign |= cell.device != device;
                }
            });
        }
        (path, foreign)
    }

    /// Records an access of data: of 16 bytes or of a multicast object.
    fn access_data(&mut self, group: &Group, access: &GlobalAccess) {
        if access.bytes < 16 && !access.range.multicast {
            return;
        }
        let lane = self.block.lane(group, access.lane);
        let path = lane.control.max(access.sources);
        if !core::mem::take(&mut lane.order.fresh) {
            return;
        }
        let Some(start) = lane.order.acquired else {
            return;
        };
        let Some(launch) = self.world.launches.get_mut(&self.block.grid) else {
            return;
        };
        let length = |path: Path, start: Path| path.key().0.saturating_sub(start.key().0);
        let longest = launch.to_data.map(|(path, start)| length(path, start));
        if longest.is_none_or(|it| length(path, start) > it) {
            launch.to_data = Some((path, start));
        }
    }

    /// Records a load of global memory. Returns the path of the result.
    pub(crate) fn load(
        &mut self,
        group: &Group,
        access: &GlobalAccess,
        places: &[(u64, u64)],
        strong: bool,
        acquires: bool,
    ) -> Path {
        let (written, foreign) = self.written(places, access.bytes);
        let route = index(self.route(&access.range));
        self.access_data(group, access);
        let lane = self.block.lane(group, access.lane);
        let issue = lane.control.max(access.sources);
        lane.read[route] = lane.read[route].wrapping_add(access.bytes as u32);
        let kind = if strong {
            StepKind::Strong
        } else {
            StepKind::Weak
        };
        let path = self
            .world
            .step(issue.max(written), kind, self.block, group.pc);
        if acquires {
            let lane = self.block.lane(group, access.lane);
            lane.control = lane.control.max(path);
            if foreign {
                (lane.order.acquired, lane.order.fresh) = (Some(path), true);
            }
        }
        path
    }

    /// Records a store to global memory, or an update by an atomic operation. Returns the path of
    /// the old value.
    pub(crate) fn store(
        &mut self,
        group: &Group,
        access: &GlobalAccess,
        places: &[(u64, u64)],
        update: Option<bool>,
    ) -> Path {
        let route = self.route(&access.range);
        if update.is_none() {
            self.access_data(group, access);
        }
        let written = match update {
            Some(_) => self.written(places, access.bytes).0,
            None => Path::default(),
        };
        let lane = self.block.lane(group, access.lane);
        lane.order.own_stores |= route != Route::Own;
        let at = index(route);
        lane.written[at] = lane.written[at].wrapping_add(access.bytes as u32);
        if update == Some(true) {
            lane.read[at] = lane.read[at].wrapping_add(access.bytes as u32);
        }
        let path = lane.control.max(access.sources).max(written);
        let cell = Cell {
            path,
            generation: self.block.generation,
            device: self.block.device,
        };
        for (memory, offset) in places {
            // Two stores of a part of a word do not replace each other.
            let partial = access.bytes < WORD;
            self.world.words(*memory, *offset, access.bytes, |it| {
                let kept = partial && it.generation == cell.generation;
                it.path = if kept { it.path.max(path) } else { path };
                (it.generation, it.device) = (cell.generation, cell.device);
            });
        }
        self.world
            .step(path, StepKind::Strong, self.block, group.pc)
    }

    /// Makes later instructions of a lane wait for a value.
    pub(crate) fn acquire(&mut self, group: &Group, lane: usize, path: Path) {
        let state = self.block.lane(group, lane);
        state.control = state.control.max(path);
    }

    /// Records a fence, or the fence of a release. It is a step if it covers stores to memory of
    /// other devices.
    pub(crate) fn fence(&mut self, group: &Group, lane: usize) {
        let state = self.block.lane(group, lane);
        let order = &mut state.order;
        let waits = order.own_stores || (order.earlier_stores && !order.fenced);
        (order.own_stores, order.fenced) = (false, true);
        if !waits {
            return;
        }
        let path = state.control.max(state.used);
        let path = self.world.step(path, StepKind::Fence, self.block, group.pc);
        self.acquire(group, lane, path);
    }

    /// Ends lanes.
    pub(crate) fn exit(&mut self, group: &Group) {
        let Some(launch) = self.world.launches.get_mut(&self.block.grid) else {
            return;
        };
        for number in lanes(group.active) {
            let lane = &self.block.warps[group.warp as usize].lanes[number];
            launch.end = launch.end.max(lane.control).max(lane.used);
            if (self.block.number, group.warp, number) == (0, 0, 0) {
                launch.leader_instructions = lane.instructions;
            }
            for (at, (read, written)) in lane.read.iter().zip(lane.written).enumerate() {
                if (*read, written) != (0, 0) {
                    let bytes = launch.bytes.entry(route(at)).or_default();
                    bytes.read += u64::from(*read);
                    bytes.written += u64::from(written);
                }
            }
        }
    }
}
