//! The rules for write-backs, signals, polls and invalidations. [`super`] lists their criteria.

use super::decode::{Kind, Op, Scope};
use super::flow::Analysis;
use super::{ACQUIRE, Kernel, RELEASE, SCOPE};
use crate::Target;
use crate::violation::Violation;

/// Finds violations of the order between data, write-backs, signals, polls and invalidations.
pub(super) struct Order<'a>(pub(super) &'a Kernel<'a>);

#[derive(Clone, Default, PartialEq)]
pub(super) struct State {
    /// Accesses to global memory or write-backs are outstanding.
    global: bool,
    /// Accesses to LDS are outstanding.
    lds: bool,
    /// Scope of a write-back that no store, atomic, barrier or invalidation has followed.
    open: Scope,
    /// This wave has stored data since its last write-back.
    dirty: bool,
    /// Stores of data are outstanding.
    storing: bool,
    /// Stores of data were outstanding at the last barrier.
    loose: bool,
    /// Indices of loads that may be polls, and that no access or invalidation has followed.
    polls: Vec<usize>,
}

impl Analysis for Order<'_> {
    type State = State;

    fn join(into: &mut State, from: &State) -> bool {
        let before = into.clone();
        into.global |= from.global;
        into.lds |= from.lds;
        into.open = into.open.max(from.open);
        into.dirty |= from.dirty;
        into.storing |= from.storing;
        into.loose |= from.loose;
        into.polls.extend(&from.polls);
        into.polls.sort_unstable();
        into.polls.dedup();
        *into != before
    }

    fn step(&self, state: &mut State, index: usize) {
        let op = &self.0.ops[index];
        match op.kind {
            Kind::Wait { vm, lgkm } => {
                state.global &= vm != Some(0);
                state.storing &= vm != Some(0);
                state.lds &= lgkm != Some(0);
            }
            Kind::WriteBack => {
                state.global = true;
                state.open = op.scope;
                state.dirty &= !op.is_strong();
            }
            Kind::Invalidate => {
                if op.is_strong() {
                    state.polls.clear();
                }
                state.open = Scope::None;
            }
            Kind::Barrier => {
                state.open = Scope::None;
                state.loose = state.storing;
            }
            Kind::Lds => state.lds = true,
            Kind::Load | Kind::Store | Kind::Rmw => {
                state.polls.clear();
                state.loose &= !self.is_swap(index);
                if op.kind != Kind::Load {
                    state.open = Scope::None;
                    state.dirty |= op.scope == Scope::None;
                    state.storing |= op.scope == Scope::None;
                } else if self.is_poll(index) && !state.global {
                    state.polls.push(index);
                }
                state.global = true;
                state.lds |= op.flat;
            }
            _ => {}
        }
    }

    fn check(&self, state: &State, index: usize, out: &mut Vec<Violation>) {
        let op = &self.0.ops[index];
        let mut report = |rule, text: &str| out.push(self.0.violation(rule, index, text));
        // The first of these instructions after a write-back publishes data or ends a fence.
        let publishes = op.writes() || [Kind::Barrier, Kind::Invalidate].contains(&op.kind);
        let released = state.open > Scope::None;
        if publishes && released && state.global {
            report(RELEASE, "an access or write-back before it is not complete");
        }
        if op.is_vector() && op.scope == Scope::Block {
            report(SCOPE, "an access to global memory at block scope");
        }
        match op.kind {
            Kind::Invalidate => {
                if state.global && !released {
                    report(ACQUIRE, "an access before it is not complete");
                }
                let loads = |op: &&Op| matches!(op.kind, Kind::Load | Kind::Rmw);
                let load = self.before(index).filter(loads);
                if load.is_some_and(|load| load.scope < op.scope) {
                    report(SCOPE, "the load before has a narrower scope");
                }
            }
            Kind::Barrier if state.lds => report(RELEASE, "an access to LDS is not complete"),
            Kind::Sleep => {
                let text = "no invalidation after this poll";
                let polls = state.polls.iter();
                out.extend(polls.map(|&poll| self.0.violation(ACQUIRE, poll, text)));
            }
            Kind::Store | Kind::Rmw => {
                // The instruction set of gfx90a cannot express the scope of a store.
                let scoped = self.0.target == Target::Gfx942 || op.kind == Kind::Rmw;
                if scoped && op.scope < state.open {
                    report(SCOPE, "the access after a write-back has a narrower scope");
                }
                if released && state.loose && !self.is_swap(index) {
                    report(RELEASE, "stores were not complete at the barrier before it");
                }
                if !op.is_strong() {
                    return;
                }
                let atomic = op.kind == Kind::Rmw;
                let writes_back = |op: &Op| op.kind == Kind::WriteBack && op.is_strong();
                if atomic && !self.before(index).is_some_and(writes_back) {
                    report(RELEASE, "no write-back before this atomic");
                } else if !atomic && state.dirty && !self.is_packet(index) {
                    report(RELEASE, "no write-back between the data and this store");
                }
                if atomic && !self.is_acquired(index) {
                    report(ACQUIRE, "no invalidation at system scope after this atomic");
                }
            }
            _ => {}
        }
    }
}

impl Order<'_> {
    /// Returns `true` for a compare-and-swap. In the kernels of the library, only code for failures
    /// contains one: it claims the record of a failure, or marks a peer or a tile as failed.
    fn is_swap(&self, index: usize) -> bool {
        self.0.text.instructions[index].code.contains("cmpswap")
    }

    /// Returns `true` for loads of a word at system scope with a wait directly after them.
    fn is_poll(&self, index: usize) -> bool {
        let op = &self.0.ops[index];
        let word = op.result.as_ref().is_some_and(|it| it.len() <= 2);
        op.is_strong() && word && !op.flat && self.is_waited(index)
    }

    /// Returns `true` if the next instruction waits for all accesses.
    fn is_waited(&self, index: usize) -> bool {
        let next = self.0.ops.get(index + 1).map(|op| op.kind);
        matches!(next, Some(Kind::Wait { vm: Some(0), .. }))
    }

    /// Returns `true` if the next instructions wait for an atomic, and then invalidate at system
    /// scope.
    fn is_acquired(&self, index: usize) -> bool {
        let after = self.0.ops.get(index + 2);
        let invalidates = |op: &Op| op.kind == Kind::Invalidate && op.is_strong();
        self.is_waited(index) && after.is_some_and(invalidates)
    }

    /// Returns the last instruction before `index` that is not a wait.
    fn before(&self, index: usize) -> Option<&Op> {
        let mut before = self.0.ops[..index].iter().rev();
        before.find(|op| !matches!(op.kind, Kind::Wait { .. }))
    }

    /// Returns `true` if the previous or the next access is a store to the same address at system
    /// scope, with another offset.
    fn is_packet(&self, index: usize) -> bool {
        let ops = &self.0.ops;
        let is_access = |op: &&Op| op.kind != Kind::Other;
        let before = ops[..index].iter().rfind(is_access);
        let after = ops[index + 1..].iter().find(is_access);
        let address = ops[index].registers.first();
        let same =
            |op: &Op| op.kind == Kind::Store && op.is_strong() && op.registers.first() == address;
        before.into_iter().chain(after).any(same)
    }
}
