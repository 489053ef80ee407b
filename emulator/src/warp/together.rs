//! Barriers, and instructions that the lanes of a mask execute together.

use super::{Env, Group, Next, Problem, UNDEFINED, Wait, Warp};
use crate::atomic;
use crate::block::{Arrival, BARRIERS};
use crate::error::FaultKind;
use crate::program::{BarrierKind, NO_REG, Reg, Shuffle, Src, Together, Vote};
use crate::row::{LANES, Row, lanes};
use crate::shadow::Gathering;

impl Warp {
    #[allow(clippy::too_many_arguments)] // the fields of an instruction
    pub(super) fn barrier(
        &mut self,
        env: &mut Env<'_>,
        group: &Group,
        active: u32,
        kind: BarrierKind,
        ids: &Row,
        arrival: Arrival,
        trues: u32,
    ) -> Result<Next, Problem> {
        let lane = active.trailing_zeros() as usize;
        let id = ids[lane];
        if id >= BARRIERS as u64 || lanes(active).any(|lane| ids[lane] != id) {
            let detail = format!("{id} is not the number of a barrier, or differs between lanes");
            return Err(Problem::new(FaultKind::InvalidOperand, lane, detail));
        }
        if arrival
            .count
            .is_some_and(|it| it == 0 || !it.is_multiple_of(LANES as u32))
        {
            return Err(Problem::new(
                FaultKind::InvalidOperand,
                lane,
                "the number of threads of a barrier is not a multiple of 32",
            ));
        }
        self.set_pcs(group.mask & !active, group.pc + 1);
        if !self.agents.is_empty() {
            for lane in lanes(active) {
                env.shared.gather(id as usize, &mut self.agents[lane], kind);
            }
        }
        let phase = env
            .shared
            .arrive(id as usize, &arrival, self.number, active, trues)
            .map_err(|detail| Problem::new(FaultKind::Divergence, lane, detail))?;
        if env.shared.barriers[id as usize].phase > phase {
            *env.progress += 1;
        }
        if kind == BarrierKind::Arrive {
            self.set_pcs(active, group.pc + 1);
            return Ok(Next::Regroup);
        }
        self.set_pcs(active, group.pc);
        for lane in lanes(active) {
            self.waits[lane] = Wait::Barrier(id as u8, phase);
        }
        self.ready &= !active;
        Ok(Next::Regroup)
    }

    /// Executes an instruction that all lanes of a mask execute together. Lanes that arrive before
    /// others wait.
    pub(super) fn together(
        &mut self,
        env: &mut Env<'_>,
        group: &Group,
        active: u32,
        inst: &TogetherInst,
        masks: &Row,
    ) -> Result<Next, Problem> {
        let mut rest = active;
        let mut complete = 0;
        while rest != 0 {
            let lane = rest.trailing_zeros() as usize;
            let mask = masks[lane] as u32;
            let same = lanes(rest)
                .filter(|lane| masks[*lane] as u32 == mask)
                .fold(0, |all, lane| all | 1 << lane);
            rest &= !same;
            if same & !mask != 0 {
                return Err(Problem::new(
                    FaultKind::Divergence,
                    (same & !mask).trailing_zeros() as usize,
                    format!("the lane is not in its member mask {mask:#010x}"),
                ));
            }
            // Lanes that wait at this instruction with this mask.
            let waiting = lanes(mask & self.live & !active)
                .filter(|lane| {
                    self.waits[*lane] == Wait::Mask(mask)
                        && self.pcs[*lane] == group.pc
                        && self.rows[*lane] as usize == group.rows
                })
                .fold(0, |all, lane| all | 1 << lane);
            let members = mask & self.live;
            if (same | waiting) & members == members {
                self.exchange(env, group, inst, members);
                if matches!(inst.op, Together::Sync) && !self.agents.is_empty() {
                    self.synchronize(members);
                }
                for lane in lanes(waiting) {
                    self.waits[lane] = Wait::No;
                    self.pcs[lane] = group.pc + 1;
                    self.ready |= 1 << lane;
                }
                complete |= members;
            } else {
                for lane in lanes(same) {
                    self.waits[lane] = Wait::Mask(mask);
                    self.pcs[lane] = group.pc;
                }
                self.ready &= !same;
            }
        }
        if complete == active {
            return Ok(Next::Step);
        }
        self.set_pcs(group.mask & (complete | !active), group.pc + 1);
        Ok(Next::Regroup)
    }

    /// Orders accesses of the lanes `members` before and after a barrier.
    fn synchronize(&mut self, members: u32) {
        let mut gathering = Gathering::default();
        for lane in lanes(members) {
            gathering.add(&mut self.agents[lane], false);
        }
        if let Some(gathered) = gathering.complete(u32::MAX) {
            for lane in lanes(members) {
                gathered.give(&mut self.agents[lane]);
            }
        }
    }

    /// Exchanges the values of the lanes `members`.
    pub(super) fn exchange(
        &mut self,
        env: &Env<'_>,
        group: &Group,
        inst: &TogetherInst,
        members: u32,
    ) {
        let a = *self.row(env, group, inst.a);
        let truth = |lane: usize| (a[lane] & 1 != 0) != inst.negate;
        let count = lanes(members).filter(|lane| truth(*lane)).count() as u32;
        let mut values = [0; LANES];
        let mut flags = [0; LANES];
        let mut flag_register = NO_REG;
        match inst.op {
            Together::Shuffle {
                kind,
                valid,
                lane: source,
                clamp,
            } => {
                flag_register = valid;
                let (sources, clamps) =
                    (*self.row(env, group, source), *self.row(env, group, clamp));
                for lane in lanes(members) {
                    let (b, c) = (sources[lane] as u32 & 31, clamps[lane] as u32);
                    let segment = c >> 8 & 31;
                    let own = lane as u32;
                    let least = own & segment;
                    let most = least | (c & 31 & !segment);
                    let (from, within) = match kind {
                        // The clamp of an upward shuffle is its lower bound.
                        Shuffle::Up => (
                            own.wrapping_sub(b),
                            i64::from(own) - i64::from(b) >= i64::from(most),
                        ),
                        Shuffle::Down => (own + b, own + b <= most),
                        Shuffle::Butterfly => (own ^ b, own ^ b <= most),
                        Shuffle::Index => {
                            let from = least | (b & !segment);
                            (from, from <= most)
                        }
                    };
                    let from = if within { from as usize } else { lane };
                    values[lane] = if members >> from & 1 != 0 {
                        a[from]
                    } else {
                        UNDEFINED
                    };
                    flags[lane] = u64::from(within);
                }
            }
            Together::Vote(vote) => {
                let all = members.count_ones();
                let ballot = lanes(members)
                    .filter(|lane| truth(*lane))
                    .fold(0, |mask, lane| mask | 1u32 << lane);
                let value = match vote {
                    Vote::All => u64::from(count == all),
                    Vote::Any => u64::from(count > 0),
                    Vote::Uni => u64::from(count == 0 || count == all),
                    Vote::Ballot => u64::from(ballot),
                };
                values = [value; LANES];
            }
            Together::Reduce(reduction) => {
                let first = a[members.trailing_zeros() as usize];
                let rest = lanes(members & (members - 1));
                let value = rest.fold(first, |all, lane| {
                    atomic::apply(reduction, 4, all, a[lane], 0)
                });
                values = [value; LANES];
            }
            Together::MatchAny => {
                for lane in lanes(members) {
                    values[lane] = lanes(members)
                        .filter(|other| a[*other] == a[lane])
                        .fold(0, |mask, other| mask | 1 << other);
                }
            }
            Together::MatchAll { valid } => {
                flag_register = valid;
                let first = a[members.trailing_zeros() as usize];
                let equal = lanes(members).all(|lane| a[lane] == first);
                values = [if equal { u64::from(members) } else { 0 }; LANES];
                flags = [u64::from(equal); LANES];
            }
            Together::Elect { leader } => {
                flag_register = leader;
                let first = members.trailing_zeros();
                values = [u64::from(first); LANES];
                flags[first as usize] = 1;
            }
            Together::Sync => {}
        }
        self.write(group, inst.d, members, &values);
        self.write(group, flag_register, members, &flags);
    }
}

/// Operands of an instruction that lanes execute together.
pub(super) struct TogetherInst {
    pub(super) op: Together,
    pub(super) d: Reg,
    pub(super) a: Src,
    pub(super) negate: bool,
}
