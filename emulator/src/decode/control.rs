//! Control flow, calls, and instructions that threads execute together.

use super::types::atomic_of;
use super::{Context, Decoder, Name};
use crate::error::Result;
use crate::program::{
    BarrierKind, CallSite, FenceKind, NO_REG, Op, Scope, Shuffle, Special, Src, Together, Vote,
};
use crate::ptx::Operand;

impl<'a> Decoder<'a> {
    pub(super) fn control(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        match (name, words, operands) {
            ("bra", [] | ["uni"], [Operand::Name(label, 0)]) => {
                c.branches.push((c.code.len(), label, c.line));
                c.emit(Op::Branch { target: 0 });
            }
            ("brx", ["idx"] | ["idx", "uni"], [index, Operand::Name(list, 0)]) => {
                let index = self.value(c, index, "u32")?;
                let table = self.program.tables.len() as u32;
                self.program.tables.push(Vec::new());
                c.indexed.push((table, list, c.line));
                c.emit(Op::BranchIndex { index, table });
            }
            ("call", [] | ["uni"], operands) => return self.call(c, operands),
            ("ret", [] | ["uni"], []) => {
                let kernel = self.program.functions[0].name == c.name;
                c.emit(if kernel { Op::Exit } else { Op::Return });
            }
            ("exit", [], []) => c.emit(Op::Exit),
            ("trap", [], []) => c.emit(Op::Trap),
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn call(&mut self, c: &mut Context<'a>, operands: &[Operand<'a>]) -> Result<bool> {
        let (results, operands) = match operands {
            [Operand::List(results), rest @ ..] => (results.as_slice(), rest),
            rest => (&[][..], rest),
        };
        let [Operand::Name(callee, 0), rest @ ..] = operands else {
            return Ok(false);
        };
        let arguments = match rest.first() {
            Some(Operand::List(arguments)) => arguments.as_slice(),
            _ => &[],
        };
        let frame = |list: &[Operand<'a>]| {
            list.iter()
                .map(|operand| match operand {
                    Operand::Name(name, 0) => match self.lookup(c, name) {
                        Some(Name::Frame(offset, size)) => Ok((offset, size)),
                        _ => c.error(format!(
                            "{name} is not a .param variable; the emulator does not support \
                             arguments in registers"
                        )),
                    },
                    _ => c.error("expected the name of a .param variable"),
                })
                .collect::<Result<Vec<_>>>()
        };
        let (arguments, results) = (frame(arguments)?, frame(results)?);
        let zero = self.constant(0);
        let (callee, address) = match self.lookup(c, callee) {
            Some(Name::Register(register)) => (None, Src::register(register)),
            Some(Name::Function) => match self.function_index(callee) {
                Some(index) => (Some(index), zero),
                None => {
                    return c.error(format!(
                        "the function {callee} has no body; the emulator has no built-in functions"
                    ));
                }
            },
            _ => return c.error(format!("unknown function {callee}")),
        };
        let site = self.program.calls.len() as u32;
        self.program.calls.push(CallSite {
            callee,
            arguments,
            results,
        });
        c.emit(Op::Call { site, address });
        Ok(true)
    }

    pub(super) fn synchronize(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let zero = self.constant(0);
        match (name, words) {
            ("nanosleep", ["u32"]) => {
                let duration = self.source(c, operands, 0, "u32")?;
                c.emit(Op::Nanosleep { duration });
            }
            ("griddepcontrol", ["wait" | "launch_dependents"]) => c.emit(Op::Nop),
            ("membar" | "fence", words) => match fence(name, words) {
                Some(kind) => c.emit(Op::Fence(kind)),
                None => return Ok(false),
            },
            ("bar", ["warp", "sync"]) => {
                let mask = self.source(c, operands, 0, "b32")?;
                c.emit(Op::Together {
                    op: Together::Sync,
                    d: NO_REG,
                    a: zero,
                    mask,
                    negate: false,
                });
            }
            ("bar" | "barrier", words) => {
                let words: Vec<&str> = words.iter().copied().filter(|it| *it != "cta").collect();
                let aligned = name == "bar" || words.contains(&"aligned");
                let words: Vec<&str> = words.into_iter().filter(|it| *it != "aligned").collect();
                let (kind, is_reduction) = match words.as_slice() {
                    ["sync"] => (BarrierKind::Sync, false),
                    ["arrive"] => (BarrierKind::Arrive, false),
                    ["red", "and", "pred"] => (BarrierKind::RedAnd, true),
                    ["red", "or", "pred"] => (BarrierKind::RedOr, true),
                    ["red", "popc", "u32"] => (BarrierKind::RedPopc, true),
                    _ => return Ok(false),
                };
                let (d, rest) = if is_reduction {
                    (self.destination(c, operands.first())?, &operands[1..])
                } else {
                    (NO_REG, operands)
                };
                let (numbers, a, negate) = match rest.split_last() {
                    Some((Operand::Not(name), numbers)) if is_reduction => {
                        (numbers, Src::register(self.register(c, name)?), true)
                    }
                    Some((last, numbers)) if is_reduction => {
                        (numbers, self.value(c, last, "pred")?, false)
                    }
                    _ => (rest, zero, false),
                };
                let id = self.source(c, numbers, 0, "u32")?;
                let count = match numbers.get(1) {
                    Some(count) => Some(self.value(c, count, "u32")?),
                    None if kind == BarrierKind::Arrive => return Ok(false),
                    None => None,
                };
                c.emit(Op::Barrier {
                    kind,
                    aligned,
                    id,
                    count,
                    d,
                    a,
                    negate,
                });
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn together(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let (op, d, a, mask, negate) = match (name, words) {
            ("activemask", ["b32"]) => {
                let d = self.destination(c, operands.first())?;
                c.emit(Op::Special {
                    register: Special::ActiveMask,
                    d,
                });
                return Ok(true);
            }
            ("shfl", ["sync", mode, "b32"]) => {
                let kind = match *mode {
                    "up" => Shuffle::Up,
                    "down" => Shuffle::Down,
                    "bfly" => Shuffle::Butterfly,
                    "idx" => Shuffle::Index,
                    _ => return Ok(false),
                };
                let [d, valid] = self.destinations(c, operands.first())?;
                let a = self.source(c, operands, 1, "b32")?;
                let lane = self.source(c, operands, 2, "b32")?;
                let clamp = self.source(c, operands, 3, "b32")?;
                let mask = self.source(c, operands, 4, "b32")?;
                let op = Together::Shuffle {
                    kind,
                    valid,
                    lane,
                    clamp,
                };
                (op, d, a, mask, false)
            }
            ("vote", ["sync", mode, "pred" | "b32"]) => {
                let vote = match *mode {
                    "all" => Vote::All,
                    "any" => Vote::Any,
                    "uni" => Vote::Uni,
                    "ballot" => Vote::Ballot,
                    _ => return Ok(false),
                };
                let d = self.destination(c, operands.first())?;
                let (a, negate) = match operands.get(1) {
                    Some(Operand::Not(name)) => (Src::register(self.register(c, name)?), true),
                    _ => (self.source(c, operands, 1, "pred")?, false),
                };
                let mask = self.source(c, operands, 2, "b32")?;
                (Together::Vote(vote), d, a, mask, negate)
            }
            ("redux", ["sync", operation, kind]) => {
                let Some(atomic) = atomic_of(operation, kind) else {
                    return Ok(false);
                };
                let d = self.destination(c, operands.first())?;
                let a = self.source(c, operands, 1, kind)?;
                let mask = self.source(c, operands, 2, "b32")?;
                (Together::Reduce(atomic), d, a, mask, false)
            }
            ("match", ["any", "sync", kind @ ("b32" | "b64")]) => {
                let d = self.destination(c, operands.first())?;
                let a = self.source(c, operands, 1, kind)?;
                let mask = self.source(c, operands, 2, "b32")?;
                (Together::MatchAny, d, a, mask, false)
            }
            ("match", ["all", "sync", kind @ ("b32" | "b64")]) => {
                let [d, valid] = self.destinations(c, operands.first())?;
                let a = self.source(c, operands, 1, kind)?;
                let mask = self.source(c, operands, 2, "b32")?;
                (Together::MatchAll { valid }, d, a, mask, false)
            }
            ("elect", ["sync"]) => {
                let [d, leader] = self.destinations(c, operands.first())?;
                let mask = self.source(c, operands, 1, "b32")?;
                (Together::Elect { leader }, d, mask, mask, false)
            }
            _ => return Ok(false),
        };
        c.emit(Op::Together {
            op,
            d,
            a,
            mask,
            negate,
        });
        Ok(true)
    }
}

/// Reads the words of a fence after its name.
fn fence(name: &str, words: &[&str]) -> Option<FenceKind> {
    let (semantics, scope) = match (name, words) {
        ("membar", [scope]) => ("sc", *scope),
        ("fence", ["proxy", "alias"]) => return Some(FenceKind::Proxy),
        ("fence", [semantics, scope]) => (*semantics, *scope),
        _ => return None,
    };
    let scope = match (name, scope) {
        // Each block is a cluster.
        (_, "cta") | ("fence", "cluster") => Scope::Cta,
        ("membar", "gl") | ("fence", "gpu") => Scope::Gpu,
        (_, "sys") => Scope::Sys,
        _ => return None,
    };
    matches!(semantics, "sc" | "acq_rel" | "acquire" | "release").then_some(FenceKind::Scoped {
        scope,
        acquire: semantics != "release",
        release: semantics != "acquire",
        sequential: semantics == "sc",
    })
}
