//! Statements of function bodies.

use super::lexer::{Lexer, Token};
use super::module::{Variable, offset, type_size, variables};
use crate::error::Result;

/// An operand of an instruction.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Operand<'a> {
    /// A register, a special register, a variable, a label or a function, plus an offset.
    Name(&'a str, i64),
    Integer(u64),
    /// The bits of an f64.
    Float(u64),
    /// `[base+offset]`. The base is `None` for an absolute address.
    Memory(Option<&'a str>, i64),
    /// `{a, b, ..}` or `(a, b, ..)`.
    List(Vec<Self>),
    /// `a|b`.
    Pair(&'a str, &'a str),
    /// `!a`.
    Not(&'a str),
}

/// An instruction.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Statement<'a> {
    pub(crate) line: u32,
    /// The guard predicate, and true if it is negated.
    pub(crate) guard: Option<(&'a str, bool)>,
    pub(crate) opcode: &'a str,
    pub(crate) operands: Vec<Operand<'a>>,
}

/// An item of a body.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Item<'a> {
    Statement(Statement<'a>),
    Label(&'a str),
    /// A list of labels: `NAME: .branchtargets A, B;`.
    Targets(&'a str, Vec<&'a str>),
    /// A prototype of indirect calls.
    Prototype(&'a str),
    /// A declaration of registers of a type such as `.b32`: names, and for names of numbered
    /// registers their number.
    Registers(&'a str, Vec<(&'a str, Option<u32>)>),
    /// Variables of a state space: `.shared`, `.local` or `.param`.
    Variables(&'a str, Vec<Variable>),
    /// A source location: file number and line.
    Location(u64, u32),
    OpenScope,
    CloseScope,
}

/// Reads the items of a body.
#[derive(Debug)]
pub(crate) struct Body<'a> {
    lexer: Lexer<'a>,
}

impl<'a> Body<'a> {
    /// Starts to read a body, which begins in line `line` of its file.
    pub(crate) fn new(text: &'a str, line: u32) -> Result<Self> {
        Ok(Self {
            lexer: Lexer::new(text, line)?,
        })
    }

    /// Returns the next item, or `None` at the end of the body.
    pub(crate) fn next_item(&mut self) -> Result<Option<Item<'a>>> {
        loop {
            let line = self.lexer.line();
            return Ok(Some(match self.lexer.take()? {
                Token::End => return Ok(None),
                Token::Mark(b';') => continue,
                Token::Mark(b'{') => Item::OpenScope,
                Token::Mark(b'}') => Item::CloseScope,
                Token::Mark(b'@') => {
                    let negated = self.lexer.accept(b'!')?;
                    let register = self.lexer.name()?;
                    let opcode = self.lexer.name()?;
                    self.statement(line, Some((register, negated)), opcode)?
                }
                Token::Name(".reg") => self.registers()?,
                Token::Name(space @ (".shared" | ".local" | ".param")) => {
                    Item::Variables(space, variables(&mut self.lexer)?)
                }
                Token::Name(".loc") => self.location()?,
                Token::Name(".pragma") => {
                    self.lexer.skip_past(b';')?;
                    continue;
                }
                Token::Name(name) if self.lexer.accept(b':')? => self.label(name)?,
                Token::Name(name) => self.statement(line, None, name)?,
                other => {
                    return self
                        .lexer
                        .error(format!("{} does not start a statement", other.describe()));
                }
            }));
        }
    }

    /// Reads the rest of a label, after its colon.
    fn label(&mut self, name: &'a str) -> Result<Item<'a>> {
        match self.lexer.peek() {
            Token::Name(".branchtargets" | ".calltargets") => {
                self.lexer.take()?;
                let mut targets = vec![self.lexer.name()?];
                while self.lexer.accept(b',')? {
                    targets.push(self.lexer.name()?);
                }
                self.lexer.expect(b';')?;
                Ok(Item::Targets(name, targets))
            }
            Token::Name(".callprototype") => {
                self.lexer.skip_past(b';')?;
                Ok(Item::Prototype(name))
            }
            _ => Ok(Item::Label(name)),
        }
    }

    fn registers(&mut self) -> Result<Item<'a>> {
        let kind = self.lexer.name()?;
        if kind != ".pred" && type_size(kind).is_none_or(|size| size > 8) {
            return self.lexer.error(format!(
                "the emulator does not support registers of type {kind}"
            ));
        }
        let mut registers = Vec::new();
        loop {
            let name = self.lexer.name()?;
            let count = if self.lexer.accept(b'<')? {
                let count = self.lexer.integer()?;
                if count > 1 << 20 {
                    return self.lexer.error(format!("{count} registers"));
                }
                self.lexer.expect(b'>')?;
                Some(count as u32)
            } else {
                None
            };
            registers.push((name, count));
            if !self.lexer.accept(b',')? {
                break;
            }
        }
        self.lexer.expect(b';')?;
        Ok(Item::Registers(kind, registers))
    }

    /// Reads `.loc file line column` with optional attributes, which end with the line.
    fn location(&mut self) -> Result<Item<'a>> {
        let line = self.lexer.line();
        let file = self.lexer.integer()?;
        let source_line = self.lexer.integer()? as u32;
        while self.lexer.line() == line && self.lexer.peek() != Token::End {
            self.lexer.take()?;
        }
        Ok(Item::Location(file, source_line))
    }

    fn statement(
        &mut self,
        line: u32,
        guard: Option<(&'a str, bool)>,
        opcode: &'a str,
    ) -> Result<Item<'a>> {
        let mut operands = Vec::new();
        if !self.lexer.accept(b';')? {
            loop {
                operands.push(self.operand()?);
                if !self.lexer.accept(b',')? {
                    break;
                }
            }
            self.lexer.expect(b';')?;
        }
        Ok(Item::Statement(Statement {
            line,
            guard,
            opcode,
            operands,
        }))
    }

    fn operand(&mut self) -> Result<Operand<'a>> {
        Ok(match self.lexer.take()? {
            Token::Name(name) => {
                if self.lexer.accept(b'|')? {
                    Operand::Pair(name, self.lexer.name()?)
                } else {
                    Operand::Name(name, offset(&mut self.lexer)?)
                }
            }
            Token::Integer(value) => Operand::Integer(value),
            Token::Float { bits, .. } => Operand::Float(bits),
            Token::Mark(b'-') => match self.lexer.take()? {
                Token::Integer(value) => Operand::Integer(value.wrapping_neg()),
                Token::Float { bits, .. } => Operand::Float(bits ^ 1 << 63),
                other => {
                    return self
                        .lexer
                        .error(format!("{} is not a number", other.describe()));
                }
            },
            Token::Mark(b'!') => Operand::Not(self.lexer.name()?),
            Token::Mark(b'[') => {
                let memory = match self.lexer.peek() {
                    Token::Name(name) => {
                        self.lexer.take()?;
                        Operand::Memory(Some(name), offset(&mut self.lexer)?)
                    }
                    _ => {
                        let negative = self.lexer.accept(b'-')?;
                        let value = self.lexer.integer()? as i64;
                        Operand::Memory(None, if negative { -value } else { value })
                    }
                };
                self.lexer.expect(b']')?;
                memory
            }
            Token::Mark(open @ (b'{' | b'(')) => {
                let close = if open == b'{' { b'}' } else { b')' };
                let mut list = Vec::new();
                while !self.lexer.accept(close)? {
                    list.push(self.operand()?);
                    if !self.lexer.accept(b',')? {
                        self.lexer.expect(close)?;
                        break;
                    }
                }
                Operand::List(list)
            }
            other => {
                return self
                    .lexer
                    .error(format!("{} is not an operand", other.describe()));
            }
        })
    }
}
