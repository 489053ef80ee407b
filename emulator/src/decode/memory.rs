//! Memory instructions.

use super::types::{atomic_of, width};
use super::{Context, DYNAMIC_SHARED, Decoder, Name};
use crate::alu;
use crate::error::Result;
use crate::float::Format;
use crate::program::{
    Access, Atomic, Extend, MultimemType, NO_REG, Op, Order, SHARED_BASE, Scope, Space, Src, base,
};
use crate::ptx::Operand;

impl<'a> Decoder<'a> {
    /// Returns the base and offset of a memory operand, and changes the space of the access if the
    /// operand names a parameter.
    pub(super) fn memory(
        &mut self,
        c: &mut Context<'a>,
        operand: Option<&Operand<'a>>,
        access: &mut Access,
    ) -> Result<(Src, i64)> {
        let (name, offset) = match operand {
            Some(Operand::Memory(Some(name), offset)) => (*name, *offset),
            Some(Operand::Memory(None, offset)) => return Ok((self.constant(0), *offset)),
            _ => return c.error("expected an address in brackets"),
        };
        let Some(named) = self.lookup(c, name) else {
            return c.error(format!("unknown name {name}"));
        };
        let generic = access.space == Space::Generic;
        match named {
            Name::Register(register) => Ok((Src::register(register), offset)),
            Name::KernelParam(start) => {
                access.space = Space::Param;
                Ok((self.constant(u64::from(start)), offset))
            }
            Name::Frame(start, _) => {
                access.space = Space::Frame;
                Ok((self.constant(0), i64::from(start) + offset))
            }
            Name::Shared(start) if start != DYNAMIC_SHARED => {
                let start = start + if generic { SHARED_BASE } else { 0 };
                Ok((self.constant(start), offset))
            }
            other => {
                let address = self.address(c, name, other, 0)?;
                let space = match other {
                    Name::Shared(_) => Space::Shared,
                    Name::Local(_) => Space::Local,
                    _ => Space::Global,
                };
                if !generic {
                    return Ok((address, offset));
                }
                let s = [address, self.constant(base(space)), address];
                let d = c.fresh(64);
                c.prepare(Op::Alu {
                    f: alu::add64(),
                    d,
                    s,
                });
                Ok((Src::register(d), offset))
            }
        }
    }

    pub(super) fn load(
        &mut self,
        c: &mut Context<'a>,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let Some((mut access, kind)) = access(words) else {
            return Ok(false);
        };
        let [d, address] = operands else {
            return Ok(false);
        };
        let (base, offset) = self.memory(c, Some(address), &mut access)?;
        let mut registers = [NO_REG; 4];
        match d {
            Operand::List(list) if list.len() == usize::from(access.count) => {
                for (register, operand) in registers.iter_mut().zip(list) {
                    *register = self.destination(c, Some(operand))?;
                }
            }
            other if access.count == 1 => registers[0] = self.destination(c, Some(other))?,
            _ => return Ok(false),
        }
        if kind.starts_with('s')
            && let Some(width) = registers.iter().find_map(|it| c.widths.get(*it as usize))
        {
            access.extend = Extend::Sign(*width);
        }
        c.emit(Op::Load {
            access,
            d: registers,
            base,
            offset,
        });
        Ok(true)
    }

    pub(super) fn store(
        &mut self,
        c: &mut Context<'a>,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let Some((mut access, kind)) = access(words) else {
            return Ok(false);
        };
        let [address, value] = operands else {
            return Ok(false);
        };
        let (base, offset) = self.memory(c, Some(address), &mut access)?;
        let Some(s) = self.values(c, value, access.count, kind)? else {
            return Ok(false);
        };
        c.emit(Op::Store {
            access,
            s,
            base,
            offset,
        });
        Ok(true)
    }

    /// Returns the sources of a vector operand.
    pub(super) fn values(
        &mut self,
        c: &mut Context<'a>,
        operand: &Operand<'a>,
        count: u8,
        kind: &str,
    ) -> Result<Option<[Src; 4]>> {
        let mut s = [self.constant(0); 4];
        match operand {
            Operand::List(list) if list.len() == usize::from(count) => {
                for (source, operand) in s.iter_mut().zip(list) {
                    *source = self.value(c, operand, kind)?;
                }
            }
            other if count == 1 => s[0] = self.value(c, other, kind)?,
            _ => return Ok(None),
        }
        Ok(Some(s))
    }

    pub(super) fn atomic(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let is_operation = |word: &&str| atomic_of(word, "b32").is_some() || *word == "cas";
        let Some(at) = words.iter().position(is_operation) else {
            return Ok(false);
        };
        let mut rest = words.to_vec();
        let operation = rest.remove(at);
        rest.retain(|word| *word != "noftz");
        let Some((mut access, kind)) = access(&rest) else {
            return Ok(false);
        };
        if access.order == Order::Weak {
            access.order = Order::Relaxed;
        }
        if !words
            .iter()
            .any(|word| matches!(*word, "cta" | "gpu" | "sys" | "cluster"))
        {
            access.scope = Scope::Gpu;
        }
        let Some(atomic) = atomic_of(operation, kind) else {
            return Ok(false);
        };
        let (d, operands) = match (name, operands) {
            ("atom", [d, rest @ ..]) => (self.destination(c, Some(d))?, rest),
            (_, rest) => (NO_REG, rest),
        };
        let [address, values @ ..] = operands else {
            return Ok(false);
        };
        let (base, offset) = self.memory(c, Some(address), &mut access)?;
        let expected = if atomic == Atomic::CompareSwap { 2 } else { 1 };
        if values.len() != expected || access.count != 1 {
            return Ok(false);
        }
        let mut s = [self.constant(0); 2];
        for (source, operand) in s.iter_mut().zip(values) {
            *source = self.value(c, operand, kind)?;
        }
        c.emit(Op::Atomic {
            access,
            atomic,
            d,
            base,
            offset,
            s,
        });
        Ok(true)
    }

    pub(super) fn multimem(
        &mut self,
        c: &mut Context<'a>,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let Some((form, rest)) = words.split_first() else {
            return Ok(false);
        };
        let mut rest = rest.to_vec();
        let accumulator = rest.iter().position(|word| *word == "acc::f32").map(|at| {
            rest.remove(at);
            Format::F32
        });
        let is_operation = |word: &&str| atomic_of(word, "b32").is_some();
        let operation = rest.iter().position(is_operation).map(|at| rest.remove(at));
        let Some((mut access, kind)) = access(&rest) else {
            return Ok(false);
        };
        access.space = Space::Global;
        let kind_of = |operation: &str| {
            atomic_of(operation, kind).map(|reduction| MultimemType {
                reduction,
                accumulator,
            })
        };
        match (*form, operation, operands) {
            ("ld_reduce", Some(operation), [d, address]) => {
                let Some(kind) = kind_of(operation) else {
                    return Ok(false);
                };
                let (base, offset) = self.memory(c, Some(address), &mut access)?;
                let mut registers = [NO_REG; 4];
                match d {
                    Operand::List(list) if list.len() == usize::from(access.count) => {
                        for (register, operand) in registers.iter_mut().zip(list) {
                            *register = self.destination(c, Some(operand))?;
                        }
                    }
                    other => registers[0] = self.destination(c, Some(other))?,
                }
                c.emit(Op::MultimemLoad {
                    access,
                    kind,
                    d: registers,
                    base,
                    offset,
                });
            }
            ("st" | "red", operation, [address, value]) => {
                let (base, offset) = self.memory(c, Some(address), &mut access)?;
                let Some(s) = self.values(c, value, access.count, kind)? else {
                    return Ok(false);
                };
                let kind = match (*form, operation) {
                    ("st", None) => None,
                    ("red", Some(operation)) => match kind_of(operation) {
                        Some(kind) => Some(kind),
                        None => return Ok(false),
                    },
                    _ => return Ok(false),
                };
                c.emit(Op::MultimemStore {
                    access,
                    kind,
                    s,
                    base,
                    offset,
                });
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(super) fn spaces(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let d = self.destination(c, operands.first())?;
        let a = self.source(c, operands, 1, "u64")?;
        let space = |word: &str| {
            Some(match word {
                "global" | "const" => Space::Global,
                "shared" | "shared::cta" | "shared::cluster" => Space::Shared,
                "local" => Space::Local,
                "param" | "param::entry" => Space::Param,
                _ => return None,
            })
        };
        match (name, words) {
            ("cvta", ["to", word, "u64"]) => {
                let Some(space) = space(word) else {
                    return Ok(false);
                };
                let offset = self.constant(base(space).wrapping_neg());
                self.alu(c, alu::add64(), d, &[a, offset]);
            }
            ("cvta", [word, "u64"]) => {
                let Some(space) = space(word) else {
                    return Ok(false);
                };
                let offset = self.constant(base(space));
                self.alu(c, alu::add64(), d, &[a, offset]);
            }
            ("isspacep", [word]) => {
                let Some(space) = space(word) else {
                    return Ok(false);
                };
                let base = self.constant(base(space));
                self.alu(c, alu::in_space(), d, &[a, base]);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// Reads the words of a memory instruction after its name. Returns the access and its type.
pub(super) fn access<'w>(words: &[&'w str]) -> Option<(Access, &'w str)> {
    let (kind, words) = words.split_last()?;
    let bits = width(kind)?;
    let mut access = Access {
        space: Space::Generic,
        order: Order::Weak,
        scope: Scope::Sys,
        size: (bits / 8) as u8,
        count: 1,
        extend: Extend::Zero,
    };
    for word in words {
        match *word {
            "weak" => {}
            "relaxed" => access.order = Order::Relaxed,
            "acquire" => access.order = Order::Acquire,
            "release" => access.order = Order::Release,
            "acq_rel" => access.order = Order::AcqRel,
            "volatile" | "mmio" => access.order = Order::Volatile,
            "nc" => access.order = Order::Constant,
            // Each block is a cluster.
            "cta" | "cluster" => access.scope = Scope::Cta,
            "gpu" => access.scope = Scope::Gpu,
            "sys" => access.scope = Scope::Sys,
            "global" => access.space = Space::Global,
            "const" => {
                access.space = Space::Global;
                access.order = Order::Constant;
            }
            "shared" | "shared::cta" | "shared::cluster" => access.space = Space::Shared,
            "local" => access.space = Space::Local,
            "param" | "param::entry" | "param::func" => access.space = Space::Param,
            "v2" => access.count = 2,
            "v4" => access.count = 4,
            "ca" | "cg" | "cs" | "lu" | "cv" | "wb" | "wt" | "unified" => {}
            word if word.starts_with("L1::") => {}
            word if word.starts_with("L2::") && word != "L2::cache_hint" => {}
            _ => return None,
        }
    }
    (access.size > 0).then_some((access, kind))
}
