//! Function calls.

use super::{Env, Group, Next, Problem, Return, Warp};
use crate::error::FaultKind;
use crate::program::{FUNCTION_BASE, Src};
use crate::row::{LANES, lanes};

impl Warp {
    pub(super) fn call(
        &mut self,
        env: &mut Env<'_>,
        group: &Group,
        active: u32,
        site: u32,
        address: Src,
    ) -> Result<Next, Problem> {
        let program = env.program;
        let addresses = *self.row(env, group, address);
        let caller = program
            .functions
            .iter()
            .filter(|it| it.start <= group.pc)
            .max_by_key(|it| it.start)
            .expect("each instruction belongs to a function");
        let call = &program.calls[site as usize];
        if self.stacks.is_empty() {
            self.stacks = vec![Vec::new(); LANES];
        }
        if self.locals.is_empty() {
            self.locals = vec![Vec::new(); LANES];
        }
        self.set_pcs(group.mask & !active, group.pc + 1);
        for lane in lanes(active) {
            let index = match call.callee {
                Some(index) => index,
                None => {
                    let number = addresses[lane].wrapping_sub(FUNCTION_BASE);
                    let found = program
                        .functions
                        .iter()
                        .position(|it| u64::from(it.number) == number);
                    found.map_or(u32::MAX, |index| index as u32)
                }
            };
            let invalid =
                |detail: &str| Problem::new(FaultKind::InvalidOperand, lane, detail.to_owned());
            let callee = program.functions.get(index as usize).filter(|it| {
                call.arguments.len() == it.parameters.len()
                    && call.results.len() == it.returns.len()
            });
            let callee = callee.ok_or_else(|| {
                invalid("calls an address that is not that of a function with these parameters")
            })?;
            let stack = &mut self.stacks[lane];
            if stack.len() >= 1000 {
                return Err(invalid("the call stack has more than 1000 frames"));
            }
            let frame = self.frames[lane];
            stack.push(Return {
                pc: group.pc + 1,
                rows: self.rows[lane],
                frame,
                site,
            });
            let next = frame + caller.frame;
            let local = &mut self.locals[lane];
            local.resize(local.len().max((next + callee.frame) as usize), 0xcb);
            for ((from, size), to) in call.arguments.iter().zip(&callee.parameters) {
                let from = (frame + from) as usize;
                local.copy_within(from..from + *size as usize, (next + to) as usize);
            }
            self.frames[lane] = next;
            self.rows[lane] += caller.rows;
            self.pcs[lane] = callee.start;
            let rows = (self.rows[lane] + callee.rows) as usize;
            if self.registers.len() < rows {
                self.registers.resize(rows, [0; LANES]);
            }
        }
        Ok(Next::Regroup)
    }

    pub(super) fn ret(
        &mut self,
        env: &mut Env<'_>,
        group: &Group,
        active: u32,
    ) -> Result<Next, Problem> {
        let program = env.program;
        let callee = program
            .functions
            .iter()
            .filter(|it| it.start <= group.pc)
            .max_by_key(|it| it.start)
            .expect("each instruction belongs to a function");
        self.set_pcs(group.mask & !active, group.pc + 1);
        for lane in lanes(active) {
            let frame = self.stacks[lane].pop().ok_or_else(|| {
                Problem::new(FaultKind::InvalidOperand, lane, "returns without a call")
            })?;
            let call = &program.calls[frame.site as usize];
            let local = &mut self.locals[lane];
            for ((to, size), from) in call.results.iter().zip(&callee.returns) {
                let from = (self.frames[lane] + from) as usize;
                local.copy_within(from..from + *size as usize, (frame.frame + to) as usize);
            }
            self.frames[lane] = frame.frame;
            self.rows[lane] = frame.rows;
            self.pcs[lane] = frame.pc;
        }
        Ok(Next::Regroup)
    }
}
