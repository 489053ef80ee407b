//! Translates the statements of a kernel and of the functions that it calls into a [`Program`].

use std::collections::HashMap;
use std::sync::Arc;

use crate::alu::{self, AluFn};
use crate::error::{Error, Result};
use crate::float::{Arith, Format, Modifiers, Rounding};
use crate::liveness;
use crate::module::Module;
use crate::program::{
    Access, Atomic, BarrierKind, CallSite, Conversion, Extend, FUNCTION_BASE, Function, Guard,
    Inst, LANES, MultimemType, NO_REG, Op, Order, Program, Reg, SHARED_BASE, Scope, Shuffle, Space,
    Special, Src, Together, Vote, base,
};
use crate::ptx::{Body, FunctionText, Initializer, Item, Operand, Statement, Variable};

/// Decodes the kernel `name` of a module.
pub(crate) fn decode(module: &Module, name: &str) -> Result<Program> {
    let functions = &module.declarations().functions;
    let kernel = functions.iter().find(|it| it.is_entry && it.name == name);
    let Some(kernel) = kernel else {
        return Err(Error::launch(name, "the module has no such kernel"));
    };
    let mut decoder = Decoder {
        module,
        program: Program {
            name: name.to_owned(),
            shared_bytes: 0,
            functions: Vec::new(),
            code: Vec::new(),
            constants: Vec::new(),
            tables: Vec::new(),
            calls: Vec::new(),
            locations: Vec::new(),
            files: Arc::clone(module.files()),
            text: Arc::clone(module.text()),
        },
        constants: HashMap::new(),
        dynamic: None,
        shared: HashMap::new(),
        pending: Vec::new(),
        indices: HashMap::new(),
    };
    // A block has all variables of the module and of the kernel, in this order. Arrays without a
    // length start at the end of the others.
    let declarations = module.declarations();
    for variable in declarations.shared.iter().filter(|it| it.bytes > 0) {
        decoder.place_shared(variable);
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
    module: &'a Module,
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

/// Returns the width in bits of a type; 1 for predicates.
fn width(kind: &str) -> Option<u32> {
    Some(match kind {
        "pred" => 1,
        "b8" | "u8" | "s8" => 8,
        "b16" | "u16" | "s16" | "f16" | "bf16" | "e4m3x2" | "e5m2x2" => 16,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" | "tf32" => 32,
        "b64" | "u64" | "s64" | "f64" => 64,
        _ => return None,
    })
}

/// Returns the format of a floating-point type, and true for two packed elements.
fn format(kind: &str) -> Option<(Format, bool)> {
    Some(match kind {
        "f16" => (Format::F16, false),
        "f16x2" => (Format::F16, true),
        "bf16" => (Format::Bf16, false),
        "bf16x2" => (Format::Bf16, true),
        "tf32" => (Format::Tf32, false),
        "f32" => (Format::F32, false),
        "f64" => (Format::F64, false),
        "e4m3x2" => (Format::E4m3, true),
        "e5m2x2" => (Format::E5m2, true),
        _ => return None,
    })
}

/// Reads the modifiers of a floating-point operation. Returns `None` for an unknown modifier.
fn float_modifiers(words: &[&str]) -> Option<Modifiers> {
    let mut modifiers = Modifiers::default();
    for word in words {
        match *word {
            "rn" | "rni" => modifiers.rounding = Rounding::Nearest,
            "rz" | "rzi" => modifiers.rounding = Rounding::Zero,
            "rm" | "rmi" => modifiers.rounding = Rounding::Down,
            "rp" | "rpi" => modifiers.rounding = Rounding::Up,
            "rna" => modifiers.rounding = Rounding::Away,
            "ftz" => modifiers.ftz = true,
            "sat" => modifiers.saturate = true,
            "satfinite" => modifiers.satfinite = true,
            "relu" => modifiers.relu = true,
            "NaN" => modifiers.nan = true,
            "xorsign" => modifiers.xorsign = true,
            "abs" | "approx" | "full" | "noftz" => {}
            _ => return None,
        }
    }
    Some(modifiers)
}

impl<'a> Decoder<'a> {
    fn place_shared(&mut self, variable: &Variable) {
        let offset = self.program.shared_bytes.next_multiple_of(variable.align);
        self.program.shared_bytes = offset + variable.bytes;
        self.shared.insert(variable.name.clone(), u64::from(offset));
    }

    /// Returns the index of a function in the program. Decodes the function later if necessary.
    fn function_index(&mut self, name: &str) -> Option<u32> {
        if let Some(index) = self.indices.get(name) {
            return Some(*index);
        }
        let functions = &self.module.declarations().functions;
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
        let body: &'a str = &self.module.source()[range.clone()];
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
                        self.place_shared(&variable);
                        Name::Shared(self.shared[&key])
                    } else {
                        let offset = c.frame.next_multiple_of(variable.align);
                        c.frame = offset + variable.bytes;
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
        let declarations = self.module.declarations();
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

    /// Returns the base and offset of a memory operand, and changes the space of the access if the
    /// operand names a parameter.
    fn memory(
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

    fn mov(
        &mut self,
        c: &mut Context<'a>,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let [kind] = words else { return Ok(false) };
        let Some(bits) = width(kind) else {
            return Ok(false);
        };
        match operands {
            // Packing: the first element is in the low bits.
            [d, Operand::List(parts)] => {
                let d = self.destination(c, Some(d))?;
                let each = bits / parts.len().max(1) as u32;
                let part = format!("b{each}");
                let mut all = self.constant(0);
                for (at, operand) in parts.iter().enumerate() {
                    let value = self.value(c, operand, &part)?;
                    let value = self.temporary(c, alu::truncate(each), each, &[value]);
                    let shift = self.constant(u64::from(each) * at as u64);
                    let shifted = self.temporary(c, alu::shift(true), bits, &[value, shift]);
                    all = self.temporary(c, alu::or(), bits, &[all, shifted]);
                }
                self.alu(c, alu::copy(), d, &[all]);
            }
            // Unpacking.
            [Operand::List(parts), a] => {
                let a = self.value(c, a, kind)?;
                let a = self.temporary(c, alu::copy(), bits, &[a]);
                let each = bits / parts.len().max(1) as u32;
                for (at, operand) in parts.iter().enumerate() {
                    let d = self.destination(c, Some(operand))?;
                    if d == NO_REG {
                        continue;
                    }
                    let shift = self.constant(u64::from(each) * at as u64);
                    let value = self.temporary(c, alu::shift(false), bits, &[a, shift]);
                    self.alu(c, alu::truncate(each), d, &[value]);
                }
            }
            [d, Operand::Name(name, 0)]
                if self.lookup(c, name).is_none() && special(name).is_some() =>
            {
                let d = self.destination(c, Some(d))?;
                if let Some(register) = special(name) {
                    c.emit(Op::Special { register, d });
                }
            }
            [d, a] => {
                let d = self.destination(c, Some(d))?;
                let a = self.value(c, a, kind)?;
                self.alu(c, alu::truncate(bits), d, &[a]);
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    fn load(
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

    fn store(
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
    fn values(
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

    fn atomic(
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
            if !words
                .iter()
                .any(|word| matches!(*word, "cta" | "gpu" | "sys" | "cluster"))
            {
                access.scope = Scope::Gpu;
            }
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

    fn multimem(
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

    fn compare(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let mut words: Vec<&str> = words.to_vec();
        let Some(kind) = words.pop() else {
            return Ok(false);
        };
        let ftz = words.iter().position(|word| *word == "ftz");
        let ftz = ftz.map(|at| words.remove(at)).is_some();
        // `set` has the type of its result before the type of its operands.
        let result = if name == "set" { words.pop() } else { None };
        let (Some(comparison), combine) = (words.first().copied(), words.get(1).copied()) else {
            return Ok(false);
        };
        let [d, _, _, ..] = operands else {
            return Ok(false);
        };
        let [p, q] = self.destinations(c, Some(d))?;
        let mut a = self.source(c, operands, 1, kind)?;
        let mut b = self.source(c, operands, 2, kind)?;
        let mut compared = kind;
        if let Some((from, false)) = format(kind)
            && (ftz || !matches!(from, Format::F32 | Format::F64))
        {
            // Widening to f32 is exact.
            let modifiers = Modifiers {
                ftz,
                ..Modifiers::default()
            };
            for side in [&mut a, &mut b] {
                *side = self.widen(c, *side, from, modifiers);
            }
            compared = "f32";
        }
        let Some(f) = alu::comparison(comparison, compared) else {
            return Ok(false);
        };
        if name == "setp" && combine.is_none() && q == NO_REG && operands.len() == 3 {
            self.alu(c, f, p, &[a, b]);
            return Ok(true);
        }
        let compared = self.temporary(c, f, 1, &[a, b]);
        let inverted = self.temporary(c, alu::invert(), 1, &[compared]);
        let combined = match (combine, operands.len()) {
            (Some(word), 4) => {
                let Some(f) = alu::combine(word) else {
                    return Ok(false);
                };
                let third = self.source(c, operands, 3, "pred")?;
                let first = self.temporary(c, f, 1, &[compared, third]);
                [first, self.temporary(c, f, 1, &[inverted, third])]
            }
            (None, 3) => [compared, inverted],
            _ => return Ok(false),
        };
        if let Some(result) = result {
            let one = match result {
                "f32" => 0x3f80_0000,
                "u32" | "s32" | "b32" => 0xffff_ffff,
                _ => return Ok(false),
            };
            let values = [self.constant(one), self.constant(0), combined[0]];
            self.alu(c, alu::select(), p, &values);
        } else {
            self.alu(c, alu::copy(), p, &[combined[0]]);
            if q != NO_REG {
                self.alu(c, alu::copy(), q, &[combined[1]]);
            }
        }
        Ok(true)
    }

    /// Emits a conversion of an operand to f32.
    fn widen(&self, c: &mut Context<'a>, s: Src, from: Format, modifiers: Modifiers) -> Src {
        let d = c.fresh(32);
        let conversion = Conversion::Float(from, Format::F32, modifiers, None);
        c.prepare(Op::Convert {
            conversion,
            d,
            s: [s; 2],
        });
        Src::register(d)
    }

    fn select(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let ftz = words.contains(&"ftz");
        let words: Vec<&str> = words.iter().copied().filter(|it| *it != "ftz").collect();
        let Some(kind) = words.first() else {
            return Ok(false);
        };
        let d = self.destination(c, operands.first())?;
        let a = self.source(c, operands, 1, kind)?;
        let b = self.source(c, operands, 2, kind)?;
        let chosen = match (name, &words[1..]) {
            ("selp", []) => self.source(c, operands, 3, "pred")?,
            ("slct", [kind @ ("s32" | "f32")]) => {
                let mut third = self.source(c, operands, 3, kind)?;
                if ftz {
                    let modifiers = Modifiers {
                        ftz,
                        ..Modifiers::default()
                    };
                    third = self.widen(c, third, Format::F32, modifiers);
                }
                let zero = self.constant(0);
                let f = alu::comparison("ge", kind).expect("both types can be compared");
                self.temporary(c, f, 1, &[third, zero])
            }
            _ => return Ok(false),
        };
        self.alu(c, alu::select(), d, &[a, b, chosen]);
        Ok(true)
    }

    fn convert(
        &mut self,
        c: &mut Context<'a>,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let [modifiers @ .., to, from] = words else {
            return Ok(false);
        };
        let pack = modifiers.first() == Some(&"pack");
        let Some(mode) = float_modifiers(modifiers) else {
            return Ok(false);
        };
        let d = self.destination(c, operands.first())?;
        let a = self.source(c, operands, 1, from)?;
        let (Some(to_bits), Some(from_bits)) = (width(to), width(from)) else {
            return Ok(false);
        };
        if pack {
            return Ok(false);
        }
        let signed = |kind: &str| kind.starts_with('s');
        let conversion = match (format(from), format(to)) {
            (Some((from, false)), Some((to, true))) if operands.len() == 3 => {
                let b = self.source(c, operands, 2, words[words.len() - 1])?;
                c.emit(Op::Convert {
                    conversion: Conversion::Float(from, to, mode, Some(true)),
                    d,
                    s: [a, b],
                });
                return Ok(true);
            }
            (Some((from, true)), Some((to, true))) => {
                Conversion::Float(from, to, mode, Some(false))
            }
            (Some((from, false)), Some((to, false))) => {
                let integral = modifiers.iter().any(|word| word.ends_with('i'));
                if from == to && integral {
                    Conversion::Integral(from, mode)
                } else {
                    Conversion::Float(from, to, mode, None)
                }
            }
            (Some((from, false)), None) => {
                Conversion::ToInteger(from, to_bits as u8, signed(to), mode)
            }
            (None, Some((to, false))) => {
                Conversion::FromInteger(from_bits as u8, signed(from), to, mode)
            }
            (None, None) => {
                return self.convert_integer(c, d, a, from, to, mode.saturate);
            }
            _ => return Ok(false),
        };
        c.emit(Op::Convert {
            conversion,
            d,
            s: [a, a],
        });
        if let Conversion::ToInteger(..) = conversion {
            self.extend(c, d, to);
        }
        Ok(true)
    }

    /// Sign-extends the result of a conversion to a signed type to the width of its register.
    fn extend(&mut self, c: &mut Context<'a>, d: Reg, kind: &str) {
        let register = c.widths.get(d as usize).map_or(0, |it| u32::from(*it));
        let bits = width(kind).unwrap_or(64);
        if kind.starts_with('s')
            && let Some(f) = alu::sign_extend(bits, register)
        {
            self.alu(c, f, d, &[Src::register(d)]);
        }
    }

    fn convert_integer(
        &mut self,
        c: &mut Context<'a>,
        d: Reg,
        a: Src,
        from: &str,
        to: &str,
        saturate: bool,
    ) -> Result<bool> {
        let (from_bits, to_bits) = (width(from).unwrap_or(64), width(to).unwrap_or(64));
        let signed = from.starts_with('s');
        let mut value = self.temporary(c, alu::truncate(from_bits), from_bits, &[a]);
        if signed && let Some(f) = alu::sign_extend(from_bits, 64) {
            value = self.temporary(c, f, 64, &[value]);
        }
        if saturate {
            let kind = if signed { "s64" } else { "u64" };
            let (low, high): (i128, i128) = if to.starts_with('s') {
                (-(1 << (to_bits - 1)), (1 << (to_bits - 1)) - 1)
            } else {
                (0, (1 << to_bits) - 1)
            };
            let (least, most) = if signed {
                (i128::from(i64::MIN), i128::from(i64::MAX))
            } else {
                (0, i128::from(u64::MAX))
            };
            let low = self.constant(low.max(least) as u64);
            let high = self.constant(high.min(most) as u64);
            let of = |name| alu::integer(name, &[kind]).expect("both types have an order");
            value = self.temporary(c, of("max"), 64, &[value, low]);
            value = self.temporary(c, of("min"), 64, &[value, high]);
        }
        self.alu(c, alu::truncate(to_bits), d, &[value]);
        self.extend(c, d, to);
        Ok(true)
    }

    fn spaces(
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

    fn control(
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

    fn call(&mut self, c: &mut Context<'a>, operands: &[Operand<'a>]) -> Result<bool> {
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

    fn synchronize(
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
            ("membar", ["cta" | "gl" | "sys"]) => c.emit(Op::Fence { sequential: true }),
            ("fence", ["sc", "cta" | "cluster" | "gpu" | "sys"]) => {
                c.emit(Op::Fence { sequential: true });
            }
            (
                "fence",
                [
                    "acq_rel" | "acquire" | "release",
                    "cta" | "cluster" | "gpu" | "sys",
                ]
                | ["proxy", "alias"],
            ) => c.emit(Op::Fence { sequential: false }),
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

    fn together(
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

    /// Decodes integer, logical and floating-point arithmetic.
    fn arithmetic(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&'a str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let Some(kind) = words.last().copied() else {
            return Ok(false);
        };
        if let ("testp", [property, _]) = (name, words)
            && let Some((format, false)) = format(kind)
            && let Some(at) = alu::TESTP.iter().position(|it| it == property)
        {
            let d = self.destination(c, operands.first())?;
            let s = self.source(c, operands, 1, kind)?;
            c.emit(Op::Testp {
                kind: at as u8,
                format,
                d,
                s,
            });
            return Ok(true);
        }
        if let ("lop3", ["b32"]) = (name, words) {
            return self.lop3(c, operands);
        }
        if name == "bfi" && operands.len() == 5 {
            return self.bfi(c, kind, operands);
        }
        if words.contains(&"cc") || matches!(name, "addc" | "subc") {
            return self.carry(c, name, words, operands);
        }
        let found = alu::integer(name, words).or_else(|| alu::float(name, words));
        if let Some(f) = found {
            let d = self.destination(c, operands.first())?;
            let sources = operands.len() - 1;
            if sources > 3 {
                return Ok(false);
            }
            let zero = self.constant(0);
            let mut s = [zero; 3];
            for at in 0..sources {
                // Shift amounts and bit positions are 32-bit values. The third operand of a
                // widening multiplication is as wide as the result.
                let wide = words.contains(&"wide");
                let kind = match (name, at) {
                    ("shl" | "shr" | "bfe", 1) | ("bfe", 2) => "u32",
                    ("mad", 2) if wide && kind.ends_with("16") => "b32",
                    ("mad", 2) if wide => "b64",
                    _ => kind,
                };
                s[at] = self.source(c, operands, at + 1, kind)?;
            }
            c.emit(Op::Alu { f, d, s });
            return Ok(true);
        }
        self.float(c, name, words, operands)
    }

    fn float(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let [modifiers @ .., kind] = words else {
            return Ok(false);
        };
        let Some((format, packed)) = format(kind) else {
            return Ok(false);
        };
        let Some(mode) = float_modifiers(modifiers) else {
            return Ok(false);
        };
        let approximate = modifiers.contains(&"approx");
        let op = match (name, approximate) {
            ("add", false) => Arith::Add,
            ("sub", false) => Arith::Sub,
            ("mul", false) => Arith::Mul,
            ("fma" | "mad", false) => Arith::Fma,
            ("div", true) => Arith::DivApprox,
            ("div", false) if modifiers.contains(&"full") => Arith::DivFull,
            ("div", false) => Arith::Div,
            ("rcp", true) => Arith::RcpApprox,
            ("rcp", false) => Arith::Rcp,
            ("sqrt", true) => Arith::SqrtApprox,
            ("sqrt", false) => Arith::Sqrt,
            ("rsqrt", true) => Arith::RsqrtApprox,
            ("min", false) => Arith::Min,
            ("max", false) => Arith::Max,
            ("neg", false) => Arith::Neg,
            ("abs", false) => Arith::Abs,
            ("ex2", true) => Arith::Ex2,
            ("lg2", true) => Arith::Lg2,
            ("sin", true) => Arith::Sin,
            ("cos", true) => Arith::Cos,
            ("tanh", true) => Arith::Tanh,
            _ => return Ok(false),
        };
        if operands.len() > 4 || operands.len() < 2 {
            return Ok(false);
        }
        let d = self.destination(c, operands.first())?;
        let mut s = [self.constant(0); 3];
        for at in 1..operands.len() {
            s[at - 1] = self.source(c, operands, at, kind)?;
        }
        c.emit(Op::Float {
            op,
            format,
            packed,
            modifiers: mode,
            d,
            s,
        });
        Ok(true)
    }

    fn lop3(&mut self, c: &mut Context<'a>, operands: &[Operand<'a>]) -> Result<bool> {
        let [d, _, _, _, Operand::Integer(table)] = operands else {
            return Ok(false);
        };
        let d = self.destination(c, Some(d))?;
        let mut s = [self.constant(0); 3];
        for (at, source) in s.iter_mut().enumerate() {
            *source = self.source(c, operands, at + 1, "b32")?;
        }
        // Sum of the minterms of the truth table.
        let of = |name| alu::integer(name, &["b32"]).expect("bitwise operations have this type");
        let mut inverse = s;
        for (inverse, source) in inverse.iter_mut().zip(s) {
            *inverse = self.temporary(c, of("not"), 32, &[source]);
        }
        let mut all = self.constant(0);
        for term in (0..8).filter(|term| table >> term & 1 != 0) {
            let pick = |at: usize| {
                if term >> (2 - at) & 1 != 0 {
                    s[at]
                } else {
                    inverse[at]
                }
            };
            let both = self.temporary(c, of("and"), 32, &[pick(0), pick(1)]);
            let product = self.temporary(c, of("and"), 32, &[both, pick(2)]);
            all = self.temporary(c, of("or"), 32, &[all, product]);
        }
        self.alu(c, alu::copy(), d, &[all]);
        Ok(true)
    }

    fn bfi(&mut self, c: &mut Context<'a>, kind: &str, operands: &[Operand<'a>]) -> Result<bool> {
        let bits = match kind {
            "b32" => 32,
            "b64" => 64,
            _ => return Ok(false),
        };
        let d = self.destination(c, operands.first())?;
        let a = self.source(c, operands, 1, kind)?;
        let b = self.source(c, operands, 2, kind)?;
        let position = self.source(c, operands, 3, "u32")?;
        let length = self.source(c, operands, 4, "u32")?;
        // The mask of the field, shifted to its position; positions beyond the width leave `b`.
        let field = self.temporary(c, alu::field(bits), bits, &[position, length]);
        let [and, shl] = [("and", "b32"), ("shl", kind)]
            .map(|(name, kind)| alu::integer(name, &[kind]).expect("the types are supported"));
        // The position is an 8-bit number.
        let eight_bits = self.constant(0xff);
        let position = self.temporary(c, and, 32, &[position, eight_bits]);
        let shifted = self.temporary(c, shl, bits, &[a, position]);
        self.alu(c, alu::blend(), d, &[shifted, b, field]);
        Ok(true)
    }

    fn carry(
        &mut self,
        c: &mut Context<'a>,
        name: &str,
        words: &[&str],
        operands: &[Operand<'a>],
    ) -> Result<bool> {
        let words: Vec<&str> = words.iter().copied().filter(|it| *it != "cc").collect();
        let [kind] = words.as_slice() else {
            return Ok(false);
        };
        let wide = match *kind {
            "u32" | "s32" => false,
            "u64" | "s64" => true,
            _ => return Ok(false),
        };
        let (Some(value), Some(carry)) = (alu::with_carry(name, wide), alu::carry(name, wide))
        else {
            return Ok(false);
        };
        let d = self.destination(c, operands.first())?;
        let a = self.source(c, operands, 1, kind)?;
        let b = self.source(c, operands, 2, kind)?;
        let flag = match c.carry {
            Some(flag) => flag,
            None => c.fresh(1),
        };
        c.carry = Some(flag);
        let next = self.temporary(c, carry, 1, &[a, b, Src::register(flag)]);
        self.alu(c, value, d, &[a, b, Src::register(flag)]);
        self.alu(c, alu::copy(), flag, &[next]);
        Ok(true)
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

/// Reads the words of a memory instruction after its name. Returns the access and its type.
fn access<'w>(words: &[&'w str]) -> Option<(Access, &'w str)> {
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
            "cta" => access.scope = Scope::Cta,
            "cluster" | "gpu" => access.scope = Scope::Gpu,
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

/// Returns the read-modify-write function of an operation and a type.
fn atomic_of(operation: &str, kind: &str) -> Option<Atomic> {
    if let Some((format, packed)) = format(kind) {
        let op = match operation {
            "add" => Arith::Add,
            "min" => Arith::Min,
            "max" => Arith::Max,
            "exch" if !packed => return Some(Atomic::Exchange),
            _ => return None,
        };
        return Some(Atomic::Float(op, format, packed));
    }
    let signed = kind.starts_with('s');
    Some(match operation {
        "exch" => Atomic::Exchange,
        "cas" => Atomic::CompareSwap,
        "add" => Atomic::Add,
        "and" => Atomic::And,
        "or" => Atomic::Or,
        "xor" => Atomic::Xor,
        "inc" => Atomic::Inc,
        "dec" => Atomic::Dec,
        "min" if signed => Atomic::MinSigned,
        "max" if signed => Atomic::MaxSigned,
        "min" => Atomic::Min,
        "max" => Atomic::Max,
        _ => return None,
    })
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
        let program = decode(&Module::parse(text).unwrap(), "k").unwrap();
        let first = program.constants.iter().map(|row| row[0]);
        let mut first: Vec<u64> = first.collect();
        first.sort_unstable();
        assert_eq!(first, [0, 48, u64::MAX]);
    }
}
