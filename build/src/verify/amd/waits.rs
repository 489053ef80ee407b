//! Rule `amd-wait`: no register is read or overwritten before the load into it is complete.
//!
//! The hardware increments vmcnt for every access to global memory and lgkmcnt for every access to
//! LDS and every scalar load. `s_waitcnt vmcnt(N)` blocks until at most N accesses are outstanding.
//! Accesses of the same counter complete in order, so an access is complete after the wait if at
//! least N accesses followed it. There are two exceptions: flat accesses, which increment both
//! counters, and scalar loads complete out of order. They are complete only after a wait for zero,
//! and they do not count as followers. Neither do cache operations: LLVM's versions differ in which
//! of them they count, and every uncounted increment only makes a wait stronger.

use super::decode::{Kind, Op, REGISTERS};
use super::flow::Analysis;
use super::{Kernel, WAIT};
use crate::violation::Violation;

/// A load that may be outstanding under one counter. The order is that of the age, so the join of
/// two paths is the maximum.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Pending(u8);

impl Pending {
    const COMPLETE: Self = Self(0);
    /// Issued last. Each later access of the counter decrements the number, down to 1. Counters
    /// saturate at 63.
    const ISSUED: Self = Self(64);
    /// Completes out of order.
    const UNORDERED: Self = Self(65);

    /// Another access of the same counter is issued.
    fn follow(&mut self) {
        if (2..=Self::ISSUED.0).contains(&self.0) {
            self.0 -= 1;
        }
    }

    /// Waits until at most `limit` accesses are outstanding.
    fn wait(&mut self, limit: Option<u8>) {
        let Some(limit) = limit else { return };
        if limit == 0 || *self != Self::UNORDERED && Self::ISSUED.0 - self.0 >= limit {
            *self = Self::COMPLETE;
        }
    }
}

/// Finds uses of registers whose load may be outstanding.
pub(super) struct Waits<'a>(pub(super) &'a Kernel<'a>);

/// Loads into each register, by vmcnt and by lgkmcnt.
#[derive(Clone, PartialEq)]
pub(super) struct Registers(Vec<[Pending; 2]>);

impl Default for Registers {
    fn default() -> Self {
        Self(vec![[Pending::COMPLETE; 2]; REGISTERS])
    }
}

/// Returns the state of an access under each counter, directly after it is issued.
fn issued(op: &Op) -> [Pending; 2] {
    match op.kind {
        _ if op.flat => [Pending::UNORDERED; 2],
        Kind::Scalar => [Pending::COMPLETE, Pending::UNORDERED],
        Kind::Lds => [Pending::COMPLETE, Pending::ISSUED],
        _ if op.is_vector() => [Pending::ISSUED, Pending::COMPLETE],
        _ => [Pending::COMPLETE; 2],
    }
}

impl Analysis for Waits<'_> {
    type State = Registers;

    fn join(into: &mut Registers, from: &Registers) -> bool {
        let mut changed = false;
        for (into, from) in into
            .0
            .as_flattened_mut()
            .iter_mut()
            .zip(from.0.as_flattened())
        {
            changed |= from > into;
            *into = *from.max(into);
        }
        changed
    }

    fn step(&self, state: &mut Registers, index: usize) {
        let op = &self.0.ops[index];
        if let Kind::Wait { vm, lgkm } = op.kind {
            for [by_vm, by_lgkm] in &mut state.0 {
                by_vm.wait(vm);
                by_lgkm.wait(lgkm);
            }
        }
        let issued = issued(op);
        for counter in 0..2 {
            if issued[counter] == Pending::ISSUED {
                state
                    .0
                    .iter_mut()
                    .for_each(|register| register[counter].follow());
            }
        }
        for register in op.result.clone().into_iter().flatten() {
            state.0[usize::from(register)] = issued;
        }
    }

    fn check(&self, state: &Registers, index: usize, out: &mut Vec<Violation>) {
        let op = &self.0.ops[index];
        let issued = issued(op);
        for (position, range) in op.registers.iter().enumerate() {
            let loads = position == 0 && op.result.is_some();
            // Ordered loads of one counter write their registers in order.
            let may_follow = |(before, now): (&Pending, &Pending)| {
                *before == Pending::COMPLETE
                    || loads && *now == Pending::ISSUED && *before != Pending::UNORDERED
            };
            // A flat load that is complete under lgkmcnt, but not under vmcnt, reads global memory,
            // so it is ordered with the other accesses there.
            let ordered = |it: &[Pending; 2]| match *it {
                [Pending::UNORDERED, Pending::COMPLETE] => [Pending::ISSUED, Pending::COMPLETE],
                other => other,
            };
            let pending = &state.0[usize::from(range.start)..usize::from(range.end)];
            if !pending
                .iter()
                .all(|it| ordered(it).iter().zip(&issued).all(may_follow))
            {
                let text = "an operand is used before the load into it is complete";
                out.push(self.0.violation(WAIT, index, text));
                return;
            }
        }
    }
}
