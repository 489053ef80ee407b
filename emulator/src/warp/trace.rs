//! Passes executed instructions to the model of [`crate::trips`].

use std::collections::HashMap;

use super::{Env, Group, Return, Wait, Warp};
use crate::program::{FenceKind, Inst, Op, Order, Scope, Space, Together};
use crate::row::{LANES, Row, lanes};
use crate::trips::{self, GlobalAccess};

/// Number of loads after a snapshot after which more loads add no steps. They are polls.
const LOADS: u32 = 4096;
/// Number of repetitions of a lane after which its later polls count.
const REPETITIONS: u32 = 1000;

/// The state of a lane before its first strong load after a store, an atomic operation or an
/// instruction that lanes execute together.
///
/// If the lane finds that a value has changed that it has loaded since then, it continues with this
/// state. The counts are then those of a lane that has found all values at the first load. They do
/// not depend on the number of polls. The lane has written nothing, so no other thread notices.
#[derive(Debug)]
pub(crate) struct Snapshot {
    pc: u32,
    rows: u32,
    frame: u32,
    stack: Vec<Return>,
    registers: Vec<u64>,
    trips: (trips::Lane, Vec<trips::Path>),
    /// Addresses and values of the loads since then.
    seen: HashMap<u64, u64>,
    loads: u32,
    repetitions: u32,
}

/// Operands of an instruction, before the execution replaces them.
pub(super) struct Traced {
    active: u32,
    /// Addresses of an access, numbers of a barrier, or masks.
    operands: Row,
    /// Phase of a barrier.
    phase: u64,
}

impl Warp {
    /// Returns what [`trace`](Self::trace) needs of the state before an instruction.
    pub(super) fn before_trace(&mut self, env: &Env<'_>, inst: &Inst, group: &Group) -> Traced {
        let active = inst.guard.map_or(group.mask, |guard| {
            let row = &self.registers[group.rows + guard.predicate as usize];
            lanes(group.mask)
                .filter(|lane| (row[*lane] & 1 != 0) != guard.negated)
                .fold(0, |mask, lane| mask | 1 << lane)
        });
        let (source, offset) = match inst.op {
            Op::Load { base, offset, .. }
            | Op::Store { base, offset, .. }
            | Op::Atomic { base, offset, .. }
            | Op::MultimemLoad { base, offset, .. }
            | Op::MultimemStore { base, offset, .. } => (Some(base), offset),
            Op::Barrier { id, .. } => (Some(id), 0),
            Op::Together { mask, .. } => (Some(mask), 0),
            _ => (None, 0),
        };
        let mut operands = [0; LANES];
        if let Some(source) = source {
            operands = self
                .row(env, group, source)
                .map(|it| it.wrapping_add_signed(offset));
        }
        self.keep_snapshots(env, inst, group, active, &operands);
        let phase = match inst.op {
            Op::Barrier { .. } if active != 0 => {
                let id = operands[active.trailing_zeros() as usize] as usize;
                env.shared.barriers.get(id).map_or(0, |it| it.phase)
            }
            _ => 0,
        };
        Traced {
            active,
            operands,
            phase,
        }
    }

    /// Takes or drops the snapshots of the lanes that execute an instruction.
    fn keep_snapshots(
        &mut self,
        env: &Env<'_>,
        inst: &Inst,
        group: &Group,
        active: u32,
        operands: &Row,
    ) {
        match inst.op {
            Op::Load { access, .. } if access.order.is_strong() => {
                for lane in lanes(active) {
                    let space = self.locate(lane, access.space, operands[lane]);
                    if !matches!(space, Ok((Space::Global, _))) {
                        continue;
                    }
                    self.snapshots.resize_with(LANES, || None);
                    if let (None, Some(tracer)) = (&self.snapshots[lane], &env.trips) {
                        let snapshot = Snapshot {
                            pc: group.pc,
                            rows: self.rows[lane],
                            frame: self.frames[lane],
                            stack: self.stacks.get(lane).cloned().unwrap_or_default(),
                            registers: self.registers.iter().map(|row| row[lane]).collect(),
                            trips: tracer.block.save(self.number, lane),
                            seen: HashMap::new(),
                            loads: 0,
                            repetitions: 0,
                        };
                        self.snapshots[lane] = Some(Box::new(snapshot));
                    }
                }
            }
            Op::Store { .. }
            | Op::Atomic { .. }
            | Op::MultimemStore { .. }
            | Op::Barrier { .. }
            | Op::Together { .. }
                if !self.snapshots.is_empty() =>
            {
                for lane in lanes(active) {
                    self.snapshots[lane] = None;
                }
            }
            _ => {}
        }
    }

    /// Continues lanes with their snapshots, after a load by a group.
    pub(super) fn repeat(&mut self, env: &mut Env<'_>, group: &Group, repeats: u32) {
        self.set_pcs(group.mask & !repeats, group.pc + 1);
        for lane in lanes(repeats) {
            let (Some(snapshot), Some(tracer)) = (&mut self.snapshots[lane], &mut env.trips) else {
                continue;
            };
            snapshot.seen.clear();
            snapshot.loads = 0;
            snapshot.repetitions += 1;
            (self.pcs[lane], self.rows[lane]) = (snapshot.pc, snapshot.rows);
            self.frames[lane] = snapshot.frame;
            if let Some(stack) = self.stacks.get_mut(lane) {
                stack.clone_from(&snapshot.stack);
            }
            for (row, value) in self.registers.iter_mut().zip(&snapshot.registers) {
                row[lane] = *value;
            }
            tracer.block.restore(self.number, lane, &snapshot.trips);
        }
    }

    /// Records the phase of a barrier that a lane has waited for.
    pub(super) fn trace_wake(&self, env: &mut Env<'_>, lane: usize, id: u8, phase: u64) {
        if let Some(tracer) = &mut env.trips {
            let group = trips::Group {
                warp: self.number,
                mask: 1 << lane,
                active: 1 << lane,
                pc: self.pcs[lane],
                rows: self.rows[lane] as usize,
            };
            tracer.block.leave(&group, lane, id.into(), phase);
        }
    }

    /// Records an instruction that has been executed. Returns the lanes that must
    /// [`repeat`](Self::repeat).
    pub(super) fn trace(
        &mut self,
        env: &mut Env<'_>,
        inst: &Inst,
        group: &Group,
        traced: &Traced,
    ) -> u32 {
        let mut repeats = 0;
        let Some(tracer) = &mut env.trips else {
            return repeats;
        };
        let active = traced.active;
        let group = trips::Group {
            warp: self.number,
            mask: group.mask,
            active,
            pc: group.pc,
            rows: group.rows,
        };
        let sources = tracer.block.sources(&group, inst.guard.is_some());
        match &inst.op {
            Op::Branch { target } => {
                let backward = if *target <= group.pc { active } else { 0 };
                tracer.block.branch(&group, &sources, backward);
            }
            Op::BranchIndex { .. } => {
                let backward = lanes(active)
                    .filter(|lane| self.pcs[*lane] <= group.pc)
                    .fold(0, |mask, lane| mask | 1 << lane);
                tracer.block.branch(&group, &sources, backward);
            }
            Op::Call { .. } | Op::Return => tracer.block.branch(&group, &sources, active),
            Op::Exit => {
                tracer.block.branch(&group, &sources, 0);
                tracer.exit(&group);
            }
            Op::Load { .. } | Op::Store { .. } | Op::Atomic { .. } => {
                for lane in lanes(active) {
                    let address = traced.operands[lane];
                    if self.trace_access(env, inst, &group, lane, address, sources[lane]) {
                        repeats |= 1 << lane;
                    }
                }
            }
            Op::MultimemLoad { access, .. } | Op::MultimemStore { access, .. } => {
                let bytes = u64::from(access.size) * u64::from(access.count);
                for lane in lanes(active) {
                    let address = traced.operands[lane];
                    let Some(range) = env.view.find(address) else {
                        continue;
                    };
                    let replicas = env.view.replicas(address, bytes).unwrap_or_default();
                    let places: Vec<_> = replicas.iter().map(|it| (it.memory, it.offset)).collect();
                    let global = GlobalAccess {
                        lane,
                        bytes,
                        range,
                        sources: sources[lane],
                    };
                    let loads = matches!(inst.op, Op::MultimemLoad { .. });
                    let order = access.order;
                    if releases(order, access.scope) {
                        tracer.fence(&group, lane);
                    }
                    if loads {
                        let acquires = matches!(order, Order::Acquire | Order::AcqRel);
                        let path = tracer.load(&group, &global, &places, true, acquires);
                        tracer.block.define(&group, lane, path);
                    } else {
                        tracer.store(&group, &global, &places, None);
                    }
                }
            }
            Op::Together { op, .. } => {
                let complete = lanes(active)
                    .filter(|lane| !matches!(self.waits[*lane], Wait::Mask(_)))
                    .fold(0, |mask, lane| mask | traced.operands[lane] as u32);
                let synchronizes = matches!(op, Together::Sync);
                // Lanes with different masks are different groups; they are joined only if they
                // execute the instruction at the same time.
                tracer
                    .block
                    .together(&group, complete & self.live, synchronizes);
            }
            Op::Barrier { .. } if active != 0 => {
                let id = traced.operands[active.trailing_zeros() as usize];
                tracer.block.arrive(&group, id, traced.phase);
            }
            Op::Fence(kind) => {
                let waits = match kind {
                    FenceKind::Scoped { scope, release, .. } => *release && *scope > Scope::Cta,
                    FenceKind::Proxy => true,
                };
                for lane in lanes(active).filter(|_| waits) {
                    tracer.fence(&group, lane);
                }
            }
            _ => {
                for lane in lanes(active) {
                    tracer.block.define(&group, lane, sources[lane]);
                }
            }
        }
        repeats
    }

    /// Records an access of a lane. Returns true if the lane has found a new value.
    fn trace_access(
        &mut self,
        env: &mut Env<'_>,
        inst: &Inst,
        group: &trips::Group,
        lane: usize,
        address: u64,
        sources: trips::Path,
    ) -> bool {
        let (Op::Load { access, .. } | Op::Store { access, .. } | Op::Atomic { access, .. }) =
            &inst.op
        else {
            return false;
        };
        let (Some(tracer), Ok((space, address))) =
            (&mut env.trips, self.locate(lane, access.space, address))
        else {
            return false;
        };
        let bytes = u64::from(access.size) * u64::from(access.count);
        let loads = matches!(inst.op, Op::Load { .. });
        if space != Space::Global {
            let shared = space == Space::Shared;
            let block = &mut tracer.block;
            let mut path = sources;
            if space != Space::Param {
                let stored = block.private(group, lane, shared, address, bytes);
                if !matches!(inst.op, Op::Store { .. }) {
                    path = path.max(stored);
                }
                if !loads {
                    block.set_private(group, lane, shared, address, bytes, path);
                }
            }
            block.define(group, lane, path);
            return false;
        }
        let Some(range) = env.view.find(address) else {
            return false;
        };
        let places = [(range.memory, range.offset + (address - range.start))];
        let global = GlobalAccess {
            lane,
            bytes,
            range,
            sources,
        };
        let order = access.order;
        let acquires = matches!(order, Order::Acquire | Order::AcqRel);
        if releases(order, access.scope) {
            tracer.fence(group, lane);
        }
        match inst.op {
            Op::Load { d, .. } => {
                let value = d[..usize::from(access.count)]
                    .iter()
                    .filter_map(|it| self.registers.get(group.rows + *it as usize))
                    .fold(0u64, |all, row| all.rotate_left(7) ^ row[lane]);
                let strong = order.is_strong();
                if let Some(Some(snapshot)) = self.snapshots.get_mut(lane)
                    && strong
                {
                    let before = snapshot.seen.insert(address, value);
                    if before.is_some_and(|it| it != value) && snapshot.repetitions < REPETITIONS {
                        return true;
                    }
                    snapshot.loads += 1;
                    if snapshot.loads > LOADS {
                        // A long wait: the lane will repeat.
                        tracer.block.define(group, lane, sources);
                        return false;
                    }
                }
                let path = tracer.load(group, &global, &places, strong, acquires);
                tracer.block.define(group, lane, path);
            }
            Op::Atomic { d, .. } => {
                let result = d != crate::program::NO_REG;
                let path = tracer.store(group, &global, &places, Some(result));
                if result {
                    if acquires {
                        tracer.acquire(group, lane, path);
                    }
                    tracer.block.define(group, lane, path);
                }
            }
            _ => {
                tracer.store(group, &global, &places, None);
            }
        }
        false
    }
}

/// Returns true if an access has the fence of a release at a scope above that of the block.
fn releases(order: Order, scope: Scope) -> bool {
    matches!(order, Order::Release | Order::AcqRel) && scope > Scope::Cta
}
