//! Execution of the threads of a warp. Each lane has a program counter of its own; lanes with equal
//! program counters execute an instruction together.

mod access;
mod calls;
mod together;
mod trace;

use core::sync::atomic::{Ordering, fence};

use self::access::{Update, check_multicast};
use self::together::TogetherInst;
use crate::atomic;
use crate::block::{Arrival, Shared};
use crate::error::{Fault, FaultKind, Site};
use crate::float::{self, Format};
use crate::memory::View;
use crate::module::LoadedModule;
use crate::program::{Atomic, Conversion, Inst, NO_REG, Op, Program, Reg, Special, Src};
use crate::row::{LANES, Row, lanes};
use crate::shadow::{Agent, Element, Shadow, Violation};
use crate::trips::Tracer;

/// Value of a register that a shuffle reads from a lane outside of its mask.
const UNDEFINED: u64 = 0xcbcb_cbcb;

/// The event that a lane waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// The lane is ready, or has exited.
    No,
    /// The lane sleeps until this time.
    Sleep(u64),
    /// The lane waits for the completion of a phase of a barrier.
    Barrier(u8, u64),
    /// The lane waits for the lanes of a mask to execute the same instruction.
    Mask(u32),
}

/// A return address: program counter, first register row, start of the frame, call site.
#[derive(Clone, Copy, Debug)]
struct Return {
    pc: u32,
    rows: u32,
    frame: u32,
    site: u32,
}

/// A load by which a lane may wait for another thread.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Poll {
    pub(crate) address: u64,
    pub(crate) value: u64,
    pub(crate) size: u8,
}

/// The state of a warp.
#[derive(Debug)]
pub(crate) struct Warp {
    /// Number of the warp in its block.
    number: u32,
    /// Lanes that have not exited.
    pub(crate) live: u32,
    /// Lanes that can execute.
    ready: u32,
    pub(crate) waits: [Wait; LANES],
    pub(crate) pcs: [u32; LANES],
    /// Register row of each lane at which its function's registers start.
    rows: [u32; LANES],
    /// Start of each lane's frame in its local memory.
    frames: [u32; LANES],
    registers: Vec<Row>,
    stacks: Vec<Vec<Return>>,
    locals: Vec<Vec<u8>>,
    /// The memory model's state of each lane. Empty without a model.
    pub(crate) agents: Vec<Agent>,
    /// The last strong load of global memory of each lane.
    pub(crate) polls: [Option<Poll>; LANES],
    /// State to which lanes return, for the counts of trips. Empty without them.
    snapshots: Vec<Option<Box<trace::Snapshot>>>,
}

/// Selection of the lanes of a warp that a slice executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Choice {
    /// The lanes with the lowest program counter. Lanes that have diverged meet again.
    Lowest,
    /// The lanes with the program counter of the n-th ready lane, restricted to a mask if a lane
    /// remains.
    Lane(u32, u32),
}

/// The environment of a warp while it executes.
#[derive(Debug)]
pub(crate) struct Env<'a> {
    pub(crate) program: &'a Program,
    pub(crate) module: &'a LoadedModule,
    pub(crate) view: &'a mut View,
    pub(crate) shared: &'a mut Shared,
    pub(crate) params: &'a [u8],
    pub(crate) blocks: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_shared: u32,
    pub(crate) device: u32,
    pub(crate) grid: u64,
    /// The virtual clock in nanoseconds.
    pub(crate) now: u64,
    /// Number of instructions that the machine has executed.
    pub(crate) clock: u64,
    /// Counts events that other threads may wait for.
    pub(crate) progress: &'a mut u64,
    /// The memory model's state, if the machine has one.
    pub(crate) shadow: Option<&'a mut Shadow>,
    /// The paths of values, if the machine computes them.
    pub(crate) trips: Option<Tracer<'a>>,
}

/// A fault without its site.
struct Problem {
    kind: FaultKind,
    lane: usize,
    detail: String,
    other: Option<Box<Site>>,
}

impl Problem {
    fn new(kind: FaultKind, lane: usize, detail: impl Into<String>) -> Self {
        Self {
            kind,
            lane,
            detail: detail.into(),
            other: None,
        }
    }

    /// Describes a violation of the memory model by an access; `verb` is what it does.
    #[cold]
    fn violation(lane: usize, element: &Element, verb: &str, violation: Violation) -> Self {
        let space = if element.shared { "shared" } else { "global" };
        Self {
            kind: violation.kind,
            lane,
            detail: format!(
                "{verb} {} bytes at the {space} address {:#x}: {}",
                element.size, element.address, violation.detail
            ),
            other: violation.other,
        }
    }
}

/// Effect of an instruction on the program counters.
enum Next {
    /// All lanes of the group continue with the next instruction.
    Step,
    /// All lanes of the group continue at a program counter.
    Jump(u32),
    /// The lanes have been given program counters or wait.
    Regroup,
}

/// Lanes with the same program counter and function frame.
#[derive(Clone, Copy, Debug)]
struct Group {
    mask: u32,
    pc: u32,
    /// First register row.
    rows: usize,
    /// The lowest program counter of the lanes that are not in the group.
    limit: u32,
}

impl Warp {
    /// Creates warp `number` of a block, with `count` threads.
    pub(crate) fn new(program: &Program, number: u32, count: u32) -> Self {
        let live = if count >= 32 {
            u32::MAX
        } else {
            (1 << count) - 1
        };
        let kernel = &program.functions[0];
        let local = if kernel.frame > 0 {
            vec![vec![0xcb; kernel.frame as usize]; LANES]
        } else {
            Vec::new()
        };
        Self {
            number,
            live,
            ready: live,
            waits: [Wait::No; LANES],
            pcs: [kernel.start; LANES],
            rows: [0; LANES],
            frames: [0; LANES],
            registers: vec![[0; LANES]; kernel.rows as usize],
            stacks: Vec::new(),
            locals: local,
            agents: Vec::new(),
            polls: [None; LANES],
            snapshots: Vec::new(),
        }
    }

    /// Returns the earliest time at which a sleeping lane wakes.
    pub(crate) fn wakes_at(&self) -> Option<u64> {
        let times = lanes(self.live).filter_map(|lane| match self.waits[lane] {
            Wait::Sleep(until) => Some(until),
            _ => None,
        });
        times.min()
    }

    /// Returns true if a lane can execute now.
    pub(crate) fn is_ready(&self, shared: &Shared, now: u64) -> bool {
        self.ready != 0
            || lanes(self.live).any(|lane| match self.waits[lane] {
                Wait::Sleep(until) => until <= now,
                Wait::Barrier(id, phase) => shared.barriers[usize::from(id)].phase > phase,
                Wait::No | Wait::Mask(_) => false,
            })
    }

    /// Makes the lanes ready whose waits have ended.
    fn wake(&mut self, env: &mut Env<'_>) {
        for lane in lanes(self.live & !self.ready) {
            match self.waits[lane] {
                Wait::Sleep(until) if until <= env.now => {}
                Wait::Barrier(id, phase) => {
                    let barrier = &env.shared.barriers[usize::from(id)];
                    if barrier.phase <= phase {
                        continue;
                    }
                    if let Op::Barrier { kind, d, .. } =
                        env.program.code[self.pcs[lane] as usize].op
                        && kind.reduces()
                    {
                        let result = env.shared.read_result(usize::from(id), phase, kind);
                        if d != NO_REG {
                            let row = (self.rows[lane] + d) as usize;
                            self.registers[row][lane] = result;
                        }
                    }
                    if let Some(agent) = self.agents.get_mut(lane) {
                        env.shared.give(usize::from(id), phase, agent);
                    }
                    self.trace_wake(env, lane, id, phase);
                    self.pcs[lane] += 1;
                }
                _ => continue,
            }
            self.waits[lane] = Wait::No;
            self.ready |= 1 << lane;
        }
    }

    /// Chooses the next group of lanes.
    fn group(&self, choice: Choice) -> Option<Group> {
        if self.ready == 0 {
            return None;
        }
        let key = |lane: usize| (self.pcs[lane], self.rows[lane]);
        let leader = match choice {
            Choice::Lowest => lanes(self.ready).min_by_key(|lane| key(*lane))?,
            Choice::Lane(nth, _) => {
                lanes(self.ready).nth((nth % self.ready.count_ones()) as usize)?
            }
        };
        let (pc, rows) = key(leader);
        let mut mask = 0;
        let mut limit = u32::MAX;
        for lane in lanes(self.ready) {
            if key(lane) == (pc, rows) {
                mask |= 1 << lane;
            } else if self.rows[lane] == rows {
                limit = limit.min(self.pcs[lane]);
            }
        }
        if let Choice::Lane(_, subset) = choice {
            limit = u32::MAX;
            if mask & subset != 0 {
                mask &= subset;
            }
        }
        Some(Group {
            mask,
            pc,
            rows: rows as usize,
            limit,
        })
    }

    /// Executes up to `budget` instructions. Returns the number of executed instructions.
    pub(crate) fn run(
        &mut self,
        env: &mut Env<'_>,
        choice: Choice,
        budget: u32,
    ) -> Result<u32, Box<Fault>> {
        self.wake(env);
        let mut executed = 0;
        let mut values = [0; LANES];
        let Some(mut group) = self.group(choice) else {
            return Ok(0);
        };
        // After a divergence, a slice for one lane continues with the lanes that are with it.
        let mut choice = choice;
        if let Choice::Lane(..) = choice {
            choice = Choice::Lane(0, u32::MAX);
        }
        while executed < budget {
            let inst = &env.program.code[group.pc as usize];
            executed += 1;
            env.program.executed[group.pc as usize].store(true, Ordering::Relaxed);
            let traced = env
                .trips
                .is_some()
                .then(|| self.before_trace(env, inst, &group));
            let next = self
                .execute(env, inst, &group, &mut values)
                .map_err(|problem| self.fault(env, inst, problem))?;
            if let Some(traced) = traced {
                let repeats = self.trace(env, inst, &group, &traced);
                if repeats != 0 {
                    self.repeat(env, &group, repeats);
                    match self.group(choice) {
                        Some(next) => group = next,
                        None => return Ok(executed),
                    }
                    continue;
                }
            }
            match next {
                Next::Step => group.pc += 1,
                Next::Jump(pc) => group.pc = pc,
                Next::Regroup => {
                    self.wake(env);
                    match self.group(choice) {
                        Some(next) => group = next,
                        None => return Ok(executed),
                    }
                    continue;
                }
            }
            if group.pc >= group.limit {
                self.save(&group);
                match self.group(choice) {
                    Some(next) => group = next,
                    None => return Ok(executed),
                }
            }
        }
        self.save(&group);
        Ok(executed)
    }

    /// Stores the program counter of a group.
    fn save(&mut self, group: &Group) {
        for lane in lanes(group.mask & self.ready) {
            self.pcs[lane] = group.pc;
        }
    }

    fn fault(&self, env: &Env<'_>, inst: &Inst, problem: Problem) -> Box<Fault> {
        Box::new(Fault {
            kind: problem.kind,
            detail: problem.detail,
            site: env.program.site(
                inst,
                env.device,
                env.shared.number,
                self.number * LANES as u32 + problem.lane as u32,
            ),
            other: problem.other.map(|it| *it),
            seed: None,
        })
    }

    #[inline(always)]
    fn row<'s>(&'s self, env: &'s Env<'_>, group: &Group, source: Src) -> &'s Row {
        match source.as_constant() {
            Some(index) => &env.program.constants[index],
            None => &self.registers[group.rows + source.0 as usize],
        }
    }

    #[inline(always)]
    fn write(&mut self, group: &Group, d: Reg, mask: u32, values: &Row) {
        if d == NO_REG {
            return;
        }
        let row = &mut self.registers[group.rows + d as usize];
        if mask == u32::MAX {
            *row = *values;
        } else {
            for lane in lanes(mask) {
                row[lane] = values[lane];
            }
        }
    }

    /// Sets the program counter of lanes.
    fn set_pcs(&mut self, mask: u32, pc: u32) {
        for lane in lanes(mask) {
            self.pcs[lane] = pc;
        }
    }

    /// Executes an instruction for the lanes of a group.
    ///
    /// `values` is memory for the result. Its initial contents do not matter.
    fn execute(
        &mut self,
        env: &mut Env<'_>,
        inst: &Inst,
        group: &Group,
        values: &mut Row,
    ) -> Result<Next, Problem> {
        let active = match inst.guard {
            None => group.mask,
            Some(guard) => {
                let row = &self.registers[group.rows + guard.predicate as usize];
                let chosen = lanes(group.mask)
                    .filter(|lane| (row[*lane] & 1 != 0) != guard.negated)
                    .fold(0, |mask, lane| mask | 1 << lane);
                if chosen == 0 {
                    return Ok(Next::Step);
                }
                chosen
            }
        };
        match &inst.op {
            Op::Alu { f, d, s } => {
                let mut values = [0; LANES];
                f(
                    &mut values,
                    s.map(|source| self.row(env, group, source)),
                    active,
                );
                self.write(group, *d, active, &values);
            }
            Op::Float {
                op,
                format,
                packed,
                modifiers,
                d,
                s,
            } => {
                let (x, y) = (self.row(env, group, s[0]), self.row(env, group, s[1]));
                let z = self.row(env, group, s[2]);
                let of = |a, b, c| float::arith(*op, *format, *modifiers, a, b, c);
                for lane in lanes(active) {
                    let (a, b, c) = (x[lane], y[lane], z[lane]);
                    values[lane] = if *packed {
                        let low = of(a & 0xffff, b & 0xffff, c & 0xffff);
                        low | of(a >> 16 & 0xffff, b >> 16 & 0xffff, c >> 16 & 0xffff) << 16
                    } else {
                        of(a, b, c)
                    };
                }
                self.write(group, *d, active, values);
            }
            Op::Convert { conversion, d, s } => {
                let (x, y) = (self.row(env, group, s[0]), self.row(env, group, s[1]));
                for lane in lanes(active) {
                    values[lane] = convert(conversion, x[lane], y[lane]);
                }
                self.write(group, *d, active, values);
            }
            Op::Testp { kind, format, d, s } => {
                let x = self.row(env, group, *s);
                let name = crate::alu::TESTP[usize::from(*kind)];
                for lane in lanes(active) {
                    let holds = float::testp(name, *format, x[lane]);
                    values[lane] = u64::from(holds == Some(true));
                }
                self.write(group, *d, active, values);
            }
            Op::Special { register, d } => {
                for lane in lanes(active) {
                    values[lane] = self.special(env, *register, lane, active);
                }
                self.write(group, *d, active, values);
            }
            Op::Variable {
                variable,
                offset,
                d,
            } => {
                let address = env.module.address(*variable as usize);
                let values = [address.wrapping_add_signed(*offset); LANES];
                self.write(group, *d, active, &values);
            }
            Op::FrameAddress { offset, d } => {
                let values = self.frames.map(|frame| u64::from(frame + offset));
                self.write(group, *d, active, &values);
            }
            Op::Branch { target } => {
                if active == group.mask {
                    return Ok(Next::Jump(*target));
                }
                self.set_pcs(active, *target);
                self.set_pcs(group.mask & !active, group.pc + 1);
                return Ok(Next::Regroup);
            }
            Op::BranchIndex { index, table } => {
                let index = *self.row(env, group, *index);
                let table = &env.program.tables[*table as usize];
                self.set_pcs(group.mask & !active, group.pc + 1);
                for lane in lanes(active) {
                    let Some(target) = table.get(index[lane] as u32 as usize) else {
                        return Err(Problem::new(
                            FaultKind::InvalidOperand,
                            lane,
                            format!("index {} of a table of {}", index[lane], table.len()),
                        ));
                    };
                    self.pcs[lane] = *target;
                }
                return Ok(Next::Regroup);
            }
            Op::Call { site, address } => return self.call(env, group, active, *site, *address),
            Op::Return => return self.ret(env, group, active),
            Op::Exit => {
                self.set_pcs(group.mask & !active, group.pc + 1);
                self.live &= !active;
                self.ready &= !active;
                // Lanes that wait for an exited lane execute their instruction again.
                for lane in lanes(self.live & !self.ready) {
                    if let Wait::Mask(mask) = self.waits[lane]
                        && mask & active != 0
                    {
                        self.waits[lane] = Wait::No;
                        self.ready |= 1 << lane;
                    }
                }
                *env.progress += 1;
                env.shared.exit(self.number, active).map_err(|detail| {
                    Problem::new(
                        FaultKind::Divergence,
                        active.trailing_zeros() as usize,
                        detail,
                    )
                })?;
                return Ok(Next::Regroup);
            }
            Op::Trap => {
                return Err(Problem::new(
                    FaultKind::Trap,
                    active.trailing_zeros() as usize,
                    "the kernel executed trap",
                ));
            }
            Op::Nop => {}
            Op::Load {
                access,
                d,
                base,
                offset,
            } => self.load(env, group, active, *access, *d, *base, *offset)?,
            Op::Store {
                access,
                s,
                base,
                offset,
            } => self.store(env, group, active, *access, *s, *base, *offset)?,
            Op::Atomic {
                access,
                atomic,
                d,
                base,
                offset,
                s,
            } => {
                let [x, y] = s.map(|source| *self.row(env, group, source));
                let addresses = *self.row(env, group, *base);
                for lane in lanes(active) {
                    let address = addresses[lane].wrapping_add_signed(*offset);
                    let f = |old| atomic::apply(*atomic, access.size, old, x[lane], y[lane]);
                    let update = Update {
                        compares: *atomic == Atomic::CompareSwap,
                        reduction: *d == NO_REG,
                    };
                    values[lane] = self.update(env, group.pc, lane, *access, address, update, f)?;
                }
                self.write(group, *d, active, values);
            }
            Op::MultimemLoad {
                access,
                kind,
                d,
                base,
                offset,
            } => {
                let addresses = *self.row(env, group, *base);
                for lane in lanes(active) {
                    let address = addresses[lane].wrapping_add_signed(*offset);
                    check_multicast(lane, *access, address)?;
                    for at in 0..usize::from(access.count) {
                        let address = address + at as u64 * u64::from(access.size);
                        let value =
                            self.multimem_load(env, group.pc, lane, *access, *kind, address)?;
                        if d[at] != NO_REG {
                            self.registers[group.rows + d[at] as usize][lane] = value;
                        }
                    }
                }
            }
            Op::MultimemStore {
                access,
                kind,
                s,
                base,
                offset,
            } => {
                let addresses = *self.row(env, group, *base);
                let rows = s.map(|source| *self.row(env, group, source));
                for lane in lanes(active) {
                    let address = addresses[lane].wrapping_add_signed(*offset);
                    check_multicast(lane, *access, address)?;
                    for at in 0..usize::from(access.count) {
                        let address = address + at as u64 * u64::from(access.size);
                        let value = rows[at][lane];
                        self.multimem_store(env, group.pc, lane, *access, *kind, address, value)?;
                        *env.progress += 1;
                    }
                }
            }
            Op::Together {
                op,
                d,
                a,
                mask,
                negate,
            } => {
                let masks = *self.row(env, group, *mask);
                let together = TogetherInst {
                    op: *op,
                    d: *d,
                    a: *a,
                    negate: *negate,
                };
                return self.together(env, group, active, &together, &masks);
            }
            Op::Barrier {
                kind,
                aligned,
                id,
                count,
                a,
                negate,
                ..
            } => {
                let arrival = Arrival {
                    count: count.map(|count| {
                        let row = self.row(env, group, count);
                        row[active.trailing_zeros() as usize] as u32
                    }),
                    aligned: *aligned,
                    reduces: kind.reduces(),
                    pc: group.pc,
                };
                let ids = *self.row(env, group, *id);
                let row = self.row(env, group, *a);
                let trues = lanes(active)
                    .filter(|lane| (row[*lane] & 1 != 0) != *negate)
                    .fold(0, |mask, lane| mask | 1 << lane);
                return self.barrier(env, group, active, *kind, &ids, arrival, trues);
            }
            Op::Fence(kind) => {
                fence(Ordering::SeqCst);
                if let Some(shadow) = env.shadow.as_deref_mut() {
                    for lane in lanes(active) {
                        shadow.world.fence(&mut self.agents[lane], kind);
                    }
                }
            }
            Op::Nanosleep { duration } => {
                let durations = *self.row(env, group, *duration);
                self.set_pcs(group.mask, group.pc + 1);
                for lane in lanes(active) {
                    let duration = durations[lane] & 0xffff_ffff;
                    self.waits[lane] = Wait::Sleep(env.now + duration);
                }
                self.ready &= !active;
                return Ok(Next::Regroup);
            }
        }
        Ok(Next::Step)
    }

    fn special(&self, env: &Env<'_>, register: Special, lane: usize, active: u32) -> u64 {
        let thread = self.number * LANES as u32 + lane as u32;
        let [x, y, z] = env.block;
        let below = (1u64 << lane) - 1;
        match register {
            Special::Tid(0) => u64::from(thread % x),
            Special::Tid(1) => u64::from(thread / x % y),
            Special::Tid(_) => u64::from(thread / x / y),
            Special::Ntid(axis) => u64::from(env.block[usize::from(axis)]),
            Special::Ctaid(axis) => u64::from(env.shared.coordinates[usize::from(axis)]),
            Special::Nctaid(axis) => u64::from(env.blocks[usize::from(axis)]),
            Special::LaneId => lane as u64,
            Special::WarpId => u64::from(self.number),
            Special::WarpCount => u64::from((x * y * z).div_ceil(LANES as u32)),
            Special::SmId => env.shared.number % 132,
            Special::SmCount => 132,
            Special::GridId => env.grid,
            Special::MaskEq => 1 << lane,
            Special::MaskLt => below,
            Special::MaskLe => below | 1 << lane,
            Special::MaskGt => 0xffff_ffff & !(below | 1 << lane),
            Special::MaskGe => 0xffff_ffff & !below,
            Special::Clock => env.clock & 0xffff_ffff,
            Special::ClockHigh => env.clock >> 32,
            Special::Clock64 => env.clock,
            Special::Timer => env.now & 0xffff_ffff,
            Special::TimerHigh => env.now >> 32,
            Special::Timer64 => env.now,
            Special::DynamicShared => u64::from(env.dynamic_shared),
            Special::TotalShared => env.shared.bytes.len() as u64,
            Special::ActiveMask => u64::from(active),
        }
    }
}

fn convert(conversion: &Conversion, a: u64, b: u64) -> u64 {
    match *conversion {
        Conversion::Float(from, to, modifiers, None) => float::convert(a, from, to, modifiers),
        Conversion::Float(from, to, modifiers, Some(true)) => {
            let of = |value| float::convert(value, from, to, modifiers);
            of(b) | of(a) << to.bits()
        }
        Conversion::Float(from, to, modifiers, Some(false)) => {
            let mask = (1 << from.bits()) - 1;
            let of = |value| float::convert(value & mask, from, to, modifiers);
            of(a) | of(a >> from.bits()) << to.bits()
        }
        Conversion::Integral(format, modifiers) => float::round_to_integral(a, format, modifiers),
        Conversion::ToInteger(from, width, signed, modifiers) => {
            float::to_int(a, from, modifiers, u32::from(width), signed)
        }
        Conversion::FromInteger(width, signed, to, modifiers) => {
            let to: Format = to;
            float::from_int(a, u32::from(width), signed, to, modifiers)
        }
    }
}
