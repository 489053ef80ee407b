//! Translates the statements of a kernel and of the functions that it calls into a [`Program`].

use core::sync::atomic::AtomicBool;
use std::collections::HashMap;
use std::sync::Arc;

mod arithmetic;
mod control;
mod memory;
mod types;

use self::types::width;
use crate::alu;
use crate::error::{Error, Result};
use crate::liveness;
use crate::program::{
    FUNCTION_BASE, Function, Guard, Inst, NO_REG, Op, Program, Reg, Special, Src,
};
use crate::ptx::{Body, FunctionText, Initializer, Item, Operand, Source, Statement, Variable};
use crate::row::AluFn;
use crate::row::LANES;

/// Decodes the kernel `name` of a module.
pub(crate) fn decode(source: &Source, name: &str) -> Result<Program> {
    let functions = &source.declarations.functions;
    let kernel = functions.iter().find(|it| it.is_entry && it.name == name);
    let Some(kernel) = kernel else {
        return Err(Error::launch(name, "the module has no such kernel"));
    };
    let mut decoder = Decoder {
        source,
        program: Program {
            name: name.to_owned(),
            shared_bytes: 0,
            functions: Vec::new(),
            code: Vec::new(),
            executed: Vec::new(),
            constants: Vec::new(),
            tables: Vec::new(),
            calls: Vec::new(),
            locations: Vec::new(),
            files: Arc::clone(&source.files),
            text: Arc::clone(&source.text),
        },
        constants: HashMap::new(),
        dynamic: None,
        shared: HashMap::new(),
        pending: Vec::new(),
        indices: HashMap::new(),
    };
    // A block has all variables of the module and of the kernel, in this order. Arrays without a
    // length start at the end of the others.
    let declarations = &source.declarations;
    for variable in declarations.shared.iter().filter(|it| it.bytes > 0) {
        decoder.place_shared(variable)?;
    }
    decoder.function_index(&kernel.name);
    loop {
        while let Some(function) = decoder.pending.pop() {
            let text = &functions[function];
            let index = decoder.indices[&text.name] as usize;
            decoder.function(text, index)?;
        }
        // An indirect call may read the address of its function from an initialized variable.
        if decoder.program.calls.iter().any(|it| it.callee.is_none()) {
            let values = declarations.globals.iter().flat_map(|it| &it.initial);
            for value in values {
                if let Initializer::Address(name, ..) = value {
                    decoder.function_index(name);
                }
            }
        }
        if decoder.pending.is_empty() {
            break;
        }
    }
    for variable in declarations.shared.iter().filter(|it| it.bytes == 0) {
        let end = decoder
            .program
            .shared_bytes
            .next_multiple_of(variable.align);
        decoder.program.shared_bytes = end;
    }
    decoder.finish()
}

/// Stands for the start of dynamic shared memory, which is known when all functions are decoded:
/// the end of the static variables.
const DYNAMIC_SHARED: u64 = u64::MAX;

struct Decoder<'a> {
    source: &'a Source,
    program: Program,
    constants: HashMap<u64, usize>,
    /// Index of the constant with the start of dynamic shared memory.
    dynamic: Option<usize>,
    /// Offsets of the variables in shared memory, by function (empty for the module) and name.
    shared: HashMap<String, u64>,
    /// Functions that are not decoded yet, by their index in the module.
    pending: Vec<usize>,
    /// Index in the program of each function.
    indices: HashMap<String, u32>,
}

/// The meaning of a name.
#[derive(Clone, Copy, Debug)]
enum Name {
    Register(Reg),
    Shared(u64),
    Local(u32),
    /// A parameter or return value in the frame: offset and size.
    Frame(u32, u32),
    KernelParam(u32),
    Variable(u32),
    Function,
}

/// Registers and variables of a scope.
#[derive(Default)]
struct Names<'a> {
    names: HashMap<String, Name>,
    /// Numbered registers: prefix, first register, number of registers.
    numbered: Vec<(&'a str, Reg, u32)>,
}

/// State of the function that is being decoded.
struct Context<'a> {
    scopes: Vec<Names<'a>>,
    code: Vec<Inst>,
    /// Width of each register in bits.
    widths: Vec<u8>,
    labels: HashMap<&'a str, u32>,
    /// Branches by instruction, and tables by number, with the labels of their targets.
    branches: Vec<(usize, &'a str, u32)>,
    indexed: Vec<(u32, &'a str, u32)>,
    targets: HashMap<&'a str, Vec<&'a str>>,
    frame: u32,
    carry: Option<Reg>,
    line: u32,
    location: u32,
    guard: Option<Guard>,
    name: &'a str,
}

impl Context<'_> {
    fn error<T>(&self, detail: impl Into<String>) -> Result<T> {
        Err(Error::syntax(self.line, detail))
    }

    fn fresh(&mut self, width: u32) -> Reg {
        self.widths.push(width as u8);
        self.widths.len() as Reg - 1
    }

    /// Adds an instruction with the guard of the statement.
    fn emit(&mut self, op: Op) {
        let guard = self.guard;
        self.code.push(Inst {
            op,
            guard,
            line: self.line,
            location: self.location,
        });
    }

    /// Adds an instruction that computes an operand, and so has no guard.
    fn prepare(&mut self, op: Op) {
        self.code.push(Inst {
            op,
            guard: None,
            line: self.line,
            location: self.location,
        });
    }
}

/// Maximum size of the shared memory of a block and of the frame of a function.
const MOST_BYTES: u32 = 1 << 24;

/// Places a variable at the end of a memory of `end` bytes. Returns its offset.
fn place(end: &mut u32, variable: &Variable) -> Result<u32> {
    let start = end.next_multiple_of(variable.align);
    match start.checked_add(variable.bytes) {
        Some(new @ ..=MOST_BYTES) => {
            *end = new;
            Ok(start)
        }
        _ => Err(Error::syntax(
            variable.line,
            format!("variable {} is too large", variable.name),
        )),
    }
}

impl<'a> Decoder<'a> {
    fn place_shared(&mut self, variable: &Variable) -> Result<()> {
        let offset = place(&mut self.program.shared_bytes, variable)?;
        self.shared.insert(variable.name.clone(), u64::from(offset));
        Ok(())
    }

    /// Returns the index of a function in the program. Decodes the function later if necessary.
    fn function_index(&mut self, name: &str) -> Option<u32> {
        if let Some(index) = self.indices.get(name) {
            return Some(*index);
        }
        let functions = &self.source.declarations.functions;
        let position = functions.iter().position(|it| it.name == name)?;
        functions[position].body.as_ref()?;
        let index = self.program.functions.len() as u32;
        self.program.functions.push(Function {
            name: name.to_owned(),
            number: position as u32,
            start: 0,
            rows: 0,
            frame: 0,
            parameters: Vec::new(),
            returns: Vec::new(),
        });
        self.indices.insert(name.to_owned(), index);
        self.pending.push(position);
        Some(index)
    }

    fn constant(&mut self, value: u64) -> Src {
        let program = &mut self.program;
        let index = *self.constants.entry(value).or_insert_with(|| {
            program.constants.push([value; LANES]);
            program.constants.len() - 1
        });
        Src::constant(index)
    }

    /// Returns the start of dynamic shared memory.
    fn dynamic_shared(&mut self) -> Src {
        let constants = &mut self.program.constants;
        let index = *self.dynamic.get_or_insert_with(|| {
            constants.push([0; LANES]);
            constants.len() - 1
        });
        Src::constant(index)
    }

    fn function(&mut self, text: &'a FunctionText, index: usize) -> Result<()> {
        let mut c = Context {
            scopes: vec![Names::default()],
            code: Vec::new(),
            widths: Vec::new(),
            labels: HashMap::new(),
            branches: Vec::new(),
            indexed: Vec::new(),
            targets: HashMap::new(),
            frame: 0,
            carry: None,
            line: text.line,
            location: 0,
            guard: None,
            name: &text.name,
        };
        let mut offsets = [Vec::new(), Vec::new()];
        for (list, offsets) in [&text.params, &text.returns].into_iter().zip(&mut offsets) {
            for param in list {
                let name = if text.is_entry {
                    Name::KernelParam(param.offset)
                } else {
                    let offset = c.frame.next_multiple_of(16);
                    c.frame = offset + param.size;
                    offsets.push(offset);
                    Name::Frame(offset, param.size)
                };
                c.scopes[0].names.insert(param.name.clone(), name);
            }
        }
        let Some((range, line)) = &text.body else {
            return c.error(format!("function {} has no body", text.name));
        };
        let body: &'a str = &self.source.text[range.clone()];
        let mut items = Body::new(body, *line)?;
        while let Some(item) = items.next_item()? {
            self.item(&mut c, item)?;
        }
        c.guard = None;
        c.emit(if text.is_entry { Op::Exit } else { Op::Return });
        self.link(&mut c)?;
        let rows = liveness::allocate(&mut c.code, c.widths.len() as u32, &self.program.tables);
        // Branch targets become indices of the program.
        let start = self.program.code.len() as u32;
        for inst in &mut c.code {
            if let Op::Branch { target } = &mut inst.op {
                *target += start;
            }
        }
        for (table, ..) in &c.indexed {
            for target in &mut self.program.tables[*table as usize] {
                *target += start;
            }
        }
        self.program.code.append(&mut c.code);
        let [parameters, returns] = offsets;
        self.program.functions[index] = Function {
            name: text.name.clone(),
            number: self.program.functions[index].number,
            start,
            rows,
            frame: c.frame.next_multiple_of(16),
            parameters,
            returns,
        };
        Ok(())
    }

    fn item(&mut self, c: &mut Context<'a>, item: Item<'a>) -> Result<()> {
        match item {
            Item::OpenScope => c.scopes.push(Names::default()),
            Item::CloseScope => {
                c.scopes.pop();
                if c.scopes.is_empty() {
                    return c.error("a closing brace without an opening brace");
                }
            }
            Item::Label(label) => {
                if c.labels.insert(label, c.code.len() as u32).is_some() {
                    return c.error(format!("the label {label} is defined twice"));
                }
            }
            Item::Targets(name, targets) => {
                c.targets.insert(name, targets);
            }
            Item::Prototype(_) => {}
            Item::Location(file, line) => {
                self.program.locations.push((file as u32, line));
                c.location = self.program.locations.len() as u32;
            }
            Item::Registers(kind, registers) => {
                let width = width(&kind[1..]).unwrap_or(64) as u8;
                for (name, count) in registers {
                    let first = c.widths.len() as Reg;
                    let scope = c.scopes.last_mut().expect("a function has a scope");
                    match count {
                        Some(count) => {
                            scope.numbered.push((name, first, count));
                            c.widths.resize((first + count) as usize, width);
                        }
                        None => {
                            scope.names.insert(name.to_owned(), Name::Register(first));
                            c.widths.push(width);
                        }
                    }
                }
            }
            Item::Variables(space, variables) => {
                for variable in variables {
                    let name = if space == ".shared" {
                        // Each function has shared variables of its own.
                        let key = format!("{} {}", c.name, variable.name);
                        let variable = Variable {
                            name: key.clone(),
                            ..variable.clone()
                        };
                        self.place_shared(&variable)?;
                        Name::Shared(self.shared[&key])
                    } else {
                        let offset = place(&mut c.frame, &variable)?;
                        if space == ".local" {
                            Name::Local(offset)
                        } else {
                            Name::Frame(offset, variable.bytes)
                        }
                    };
                    let scope = c.scopes.last_mut().expect("a function has a scope");
                    scope.names.insert(variable.name, name);
                }
            }
            Item::Statement(statement) => {
                c.line = statement.line;
                c.guard = None;
                if let Some((name, negated)) = statement.guard {
                    let predicate = self.register(c, name)?;
                    c.guard = Some(Guard { predicate, negated });
                }
                self.statement(c, &statement)?;
            }
        }
        Ok(())
    }

    /// Replaces labels by indices of the function's instructions.
    fn link(&mut self, c: &mut Context<'a>) -> Result<()> {
        let find = |label: &str, line: u32| {
            c.labels
                .get(label)
                .copied()
                .ok_or_else(|| Error::syntax(line, format!("there is no label {label}")))
        };
        for (at, label, line) in &c.branches {
            let target = find(label, *line)?;
            c.code[*at].op = Op::Branch { target };
        }
        for (table, name, line) in &c.indexed {
            let targets = c.targets.get(name).ok_or_else(|| {
                Error::syntax(*line, format!("there is no list of targets {name}"))
            })?;
            self.program.tables[*table as usize] = targets
                .iter()
                .map(|label| find(label, *line))
                .collect::<Result<_>>()?;
        }
        Ok(())
    }

    /// Replaces the placeholder of the start of dynamic shared memory.
    fn finish(mut self) -> Result<Program> {
        if let Some(index) = self.dynamic {
            self.program.constants[index] = [u64::from(self.program.shared_bytes); LANES];
        }
        let code = &self.program.code;
        self.program.executed = code.iter().map(|_| AtomicBool::new(false)).collect();
        let kernel = &self.program.functions[0];
        if code.get(kernel.start as usize).is_none() {
            return Err(Error::launch(&self.program.name, "the kernel is empty"));
        }
        Ok(self.program)
    }

    fn lookup(&self, c: &Context<'a>, name: &str) -> Option<Name> {
        let digits = name
            .bytes()
            .rev()
            .take_while(|byte| byte.is_ascii_digit())
            .count();
        let (prefix, number) = name.split_at(name.len() - digits);
        let number: Option<u32> = number.parse().ok();
        for scope in c.scopes.iter().rev() {
            if let Some(number) = number {
                let found = scope
                    .numbered
                    .iter()
                    .find(|(it, _, count)| *it == prefix && number < *count);
                if let Some((_, first, _)) = found {
                    return Some(Name::Register(first + number));
                }
            }
            if !scope.names.is_empty()
                && let Some(found) = scope.names.get(name)
            {
                return Some(*found);
            }
        }
        if let Some(offset) = self.shared.get(name) {
            return Some(Name::Shared(*offset));
        }
        let declarations = &self.source.declarations;
        let named = |variable: &Variable| variable.name == name;
        if declarations.shared.iter().any(named) {
            return Some(Name::Shared(DYNAMIC_SHARED));
        }
        if let Some(index) = declarations.globals.iter().position(named) {
            return Some(Name::Variable(index as u32));
        }
        let function = declarations.functions.iter().find(|it| it.name == name);
        function.map(|_| Name::Function)
    }

    fn register(&self, c: &Context<'a>, name: &str) -> Result<Reg> {
        match self.lookup(c, name) {
            Some(Name::Register(register)) => Ok(register),
            _ => c.error(format!("there is no register {name}")),
        }
    }

    /// Returns the destination register of an operand; `_` discards the result.
    fn destination(&self, c: &Context<'a>, operand: Option<&Operand<'a>>) -> Result<Reg> {
        match operand {
            Some(Operand::Name("_", 0)) => Ok(NO_REG),
            Some(Operand::Name(name, 0)) => self.register(c, name),
            _ => c.error("expected a destination register"),
        }
    }

    /// Returns the two destinations of `a|b`, or one destination.
    fn destinations(&self, c: &Context<'a>, operand: Option<&Operand<'a>>) -> Result<[Reg; 2]> {
        match operand {
            Some(Operand::Pair(first, second)) => {
                let of = |name: &&str| match *name {
                    "_" => Ok(NO_REG),
                    name => self.register(c, name),
                };
                Ok([of(first)?, of(second)?])
            }
            other => Ok([self.destination(c, other)?, NO_REG]),
        }
    }

    /// Returns the operand at a position as a source of a type.
    fn source(
        &mut self,
        c: &mut Context<'a>,
        operands: &[Operand<'a>],
        at: usize,
        kind: &str,
    ) -> Result<Src> {
        match operands.get(at) {
            Some(operand) => self.value(c, operand, kind),
            None => c.error(format!("operand {} is missing", at + 1)),
        }
    }

    /// Returns the source of a value of a type.
    fn value(&mut self, c: &mut Context<'a>, operand: &Operand<'a>, kind: &str) -> Result<Src> {
        let bits = width(kind).unwrap_or(64);
        let mask = if bits == 64 {
            u64::MAX
        } else {
            (1 << bits) - 1
        };
        match operand {
            Operand::Integer(value) => Ok(self.constant(value & mask)),
            Operand::Float(value) => {
                let value = match bits {
                    32 => narrow(*value),
                    64 => *value,
                    _ => return c.error("a floating-point literal of 16 bits"),
                };
                Ok(self.constant(value))
            }
            Operand::Not(name) => {
                let register = self.register(c, name)?;
                let d = c.fresh(1);
                let s = [Src::register(register); 3];
                c.prepare(Op::Alu {
                    f: alu::invert(),
                    d,
                    s,
                });
                Ok(Src::register(d))
            }
            Operand::Name(name, offset) => match self.lookup(c, name) {
                Some(Name::Register(register)) if *offset == 0 => Ok(Src::register(register)),
                Some(named) => self.address(c, name, named, *offset),
                None => match special(name) {
                    Some(register) => {
                        let d = c.fresh(64);
                        c.prepare(Op::Special { register, d });
                        Ok(Src::register(d))
                    }
                    None if *name == "WARP_SZ" => Ok(self.constant(LANES as u64)),
                    None => c.error(format!("unknown name {name}")),
                },
            },
            _ => c.error("expected a register or a constant"),
        }
    }

    /// Returns the address of a variable or function in its state space.
    fn address(&mut self, c: &mut Context<'a>, text: &str, name: Name, offset: i64) -> Result<Src> {
        match name {
            Name::Shared(DYNAMIC_SHARED) => {
                let (start, offset) = (self.dynamic_shared(), self.constant(offset as u64));
                let d = c.fresh(64);
                c.prepare(Op::Alu {
                    f: alu::add64(),
                    d,
                    s: [start, offset, start],
                });
                Ok(Src::register(d))
            }
            Name::Shared(start) => Ok(self.constant(start.wrapping_add_signed(offset))),
            Name::KernelParam(start) => {
                Ok(self.constant(u64::from(start).wrapping_add_signed(offset)))
            }
            Name::Local(start) | Name::Frame(start, _) => {
                let offset = start.wrapping_add_signed(offset as i32);
                let d = c.fresh(64);
                c.prepare(Op::FrameAddress { offset, d });
                Ok(Src::register(d))
            }
            Name::Variable(variable) => {
                let d = c.fresh(64);
                c.prepare(Op::Variable {
                    variable,
                    offset,
                    d,
                });
                Ok(Src::register(d))
            }
            Name::Function => match self.function_index(text) {
                Some(index) => {
                    let number = self.program.functions[index as usize].number;
                    Ok(self.constant(FUNCTION_BASE + u64::from(number)))
                }
                None => c.error(format!("function {text} has no body")),
            },
            Name::Register(_) => c.error("a register has no address"),
        }
    }

    fn alu(&mut self, c: &mut Context<'a>, f: AluFn, d: Reg, s: &[Src]) {
        let zero = self.constant(0);
        let s = [0, 1, 2].map(|at| s.get(at).copied().unwrap_or(zero));
        c.emit(Op::Alu { f, d, s });
    }

    /// Emits an operation whose result is used by the next operations of the statement.
    fn temporary(&mut self, c: &mut Context<'a>, f: AluFn, bits: u32, s: &[Src]) -> Src {
        let d = c.fresh(bits);
        let zero = self.constant(0);
        let s = [0, 1, 2].map(|at| s.get(at).copied().unwrap_or(zero));
        c.prepare(Op::Alu { f, d, s });
        Src::register(d)
    }

    fn statement(&mut self, c: &mut Context<'a>, statement: &Statement<'a>) -> Result<()> {
        let mut words: Vec<&'a str> = statement.opcode.split('.').collect();
        let name = words.remove(0);
        let operands = &statement.operands;
        let decoded = match name {
            "mov" => self.mov(c, &words, operands)?,
            "ld" | "ldu" => self.load(c, &words, operands)?,
            "st" => self.store(c, &words, operands)?,
            "atom" | "red" => self.atomic(c, name, &words, operands)?,
            "multimem" => self.multimem(c, &words, operands)?,
            "setp" | "set" => self.compare(c, name, &words, operands)?,
            "selp" | "slct" => self.select(c, name, &words, operands)?,
            "cvt" => self.convert(c, &words, operands)?,
            "cvta" | "isspacep" => self.spaces(c, name, &words, operands)?,
            "bra" | "brx" | "call" | "ret" | "exit" | "trap" => {
                self.control(c, name, &words, operands)?
            }
            "bar" | "barrier" | "fence" | "membar" | "griddepcontrol" | "nanosleep" => {
                self.synchronize(c, name, &words, operands)?
            }
            "shfl" | "vote" | "match" | "redux" | "activemask" | "elect" => {
                self.together(c, name, &words, operands)?
            }
            "brkpt" | "pmevent" | "prefetch" | "prefetchu" | "applypriority" | "discard" => {
                c.emit(Op::Nop);
                true
            }
            _ => self.arithmetic(c, name, &words, operands)?,
        };
        if decoded {
            Ok(())
        } else {
            c.error(format!(
                "the emulator does not support the instruction {}",
                statement.opcode
            ))
        }
    }
}

/// Returns the bits of the f32 with the value of an f64 literal. Keeps the payload of a NaN.
fn narrow(bits: u64) -> u64 {
    let value = f64::from_bits(bits);
    if value.is_nan() {
        return bits >> 63 << 31 | 0x7f80_0000 | (bits >> 29 & 0x7f_ffff);
    }
    u64::from((value as f32).to_bits())
}

/// Returns the special register with a name.
fn special(name: &str) -> Option<Special> {
    let axis = |axis: &str| {
        Some(match axis {
            "x" => 0,
            "y" => 1,
            "z" => 2,
            _ => return None,
        })
    };
    let name = name.strip_prefix('%')?;
    if let Some((vector, component)) = name.split_once('.') {
        let axis = axis(component)?;
        return Some(match vector {
            "tid" => Special::Tid(axis),
            "ntid" => Special::Ntid(axis),
            "ctaid" => Special::Ctaid(axis),
            "nctaid" => Special::Nctaid(axis),
            _ => return None,
        });
    }
    Some(match name {
        "laneid" => Special::LaneId,
        "warpid" => Special::WarpId,
        "nwarpid" => Special::WarpCount,
        "smid" => Special::SmId,
        "nsmid" => Special::SmCount,
        "gridid" => Special::GridId,
        "lanemask_eq" => Special::MaskEq,
        "lanemask_le" => Special::MaskLe,
        "lanemask_lt" => Special::MaskLt,
        "lanemask_ge" => Special::MaskGe,
        "lanemask_gt" => Special::MaskGt,
        "clock" => Special::Clock,
        "clock_hi" => Special::ClockHigh,
        "clock64" => Special::Clock64,
        "globaltimer_lo" => Special::Timer,
        "globaltimer_hi" => Special::TimerHigh,
        "globaltimer" => Special::Timer64,
        "dynamic_smem_size" => Special::DynamicShared,
        "total_smem_size" => Special::TotalShared,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_constant_of_all_ones_is_not_the_start_of_dynamic_shared_memory() {
        let text = ".version 8.0\n.target sm_80\n.address_size 64\n\
                    .extern .shared .align 16 .b8 dynamic[];\n.shared .b8 fixed[48];\n\
                    .entry k()\n{\n.reg .b64 %rd<3>;\nmov.b64 %rd1, -1;\n\
                    mov.b64 %rd2, dynamic;\nret;\n}\n";
        let program = decode(&Source::parse(text).unwrap(), "k").unwrap();
        let first = program.constants.iter().map(|row| row[0]);
        let mut first: Vec<u64> = first.collect();
        first.sort_unstable();
        assert_eq!(first, [0, 48, u64::MAX]);
    }
}
