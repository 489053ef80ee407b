//! Declarations of a module: variables and functions.

use core::ops::Range;
use std::sync::Arc;

use super::lexer::{Lexer, Token};
use crate::error::{Error, Result};

/// A parameter or a return value of a function.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Param {
    pub(crate) name: String,
    /// Offset in bytes from the start of the parameters.
    pub(crate) offset: u32,
    /// Size in bytes.
    pub(crate) size: u32,
}

/// An element of the initial value of a variable.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Initializer {
    Integer(u64),
    /// The bits of an f64.
    Float(u64),
    /// The address of a variable or function, plus an offset. True if it is a generic address.
    Address(String, i64, bool),
}

/// A variable declaration.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Variable {
    pub(crate) name: String,
    /// Line of the declaration.
    pub(crate) line: u32,
    pub(crate) align: u32,
    /// Size of an element in bytes.
    pub(crate) element: u32,
    /// Size in bytes. 0 for an array without a length (`.extern .shared`).
    pub(crate) bytes: u32,
    /// Initial elements; missing elements are zero.
    pub(crate) initial: Vec<Initializer>,
}

/// A function with its declaration and the text of its body.
#[derive(Clone, Debug)]
pub(crate) struct FunctionText {
    pub(crate) name: String,
    pub(crate) is_entry: bool,
    pub(crate) params: Vec<Param>,
    pub(crate) returns: Vec<Param>,
    /// True if the function is declared `.extern`.
    pub(crate) is_external: bool,
    /// Product of the dimensions of `.maxntid` or `.reqntid`, or 0.
    pub(crate) max_threads: u32,
    /// Text of the body and its first line. `None` if the function is only declared.
    pub(crate) body: Option<(Range<usize>, u32)>,
    pub(crate) line: u32,
}

/// The declarations of a module.
#[derive(Clone, Debug, Default)]
pub(crate) struct Declarations {
    /// Version times ten.
    pub(crate) version: u32,
    /// Target: 90 for `sm_90`.
    pub(crate) target: u32,
    /// True if the module runs only on the target (`sm_90a`).
    pub(crate) exact: bool,
    /// Variables in global and constant memory.
    pub(crate) globals: Vec<Variable>,
    /// Variables in shared memory, outside of functions.
    pub(crate) shared: Vec<Variable>,
    pub(crate) functions: Vec<FunctionText>,
    files: Vec<(u64, String)>,
}

/// PTX text with its declarations.
#[derive(Debug)]
pub(crate) struct Source {
    pub(crate) text: Arc<str>,
    pub(crate) declarations: Declarations,
    /// Names of the source files by their numbers in `.loc`.
    pub(crate) files: Arc<Vec<(u64, String)>>,
}

impl Source {
    /// Reads the declarations of a module.
    ///
    /// # Errors
    /// Fails at the first token that is not PTX.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let mut declarations = Declarations::parse(text)?;
        Ok(Self {
            text: text.into(),
            files: Arc::new(core::mem::take(&mut declarations.files)),
            declarations,
        })
    }
}

/// Returns the size in bytes of a fundamental type such as `.b32`.
pub(crate) fn type_size(name: &str) -> Option<u32> {
    Some(match name.strip_prefix('.').unwrap_or(name) {
        "b8" | "u8" | "s8" => 1,
        "b16" | "u16" | "s16" | "f16" | "bf16" => 2,
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" | "tf32" => 4,
        "b64" | "u64" | "s64" | "f64" => 8,
        "b128" => 16,
        _ => return None,
    })
}

impl Declarations {
    /// Reads the declarations of a module.
    ///
    /// # Errors
    /// Fails at the first token that is not PTX.
    fn parse(text: &str) -> Result<Self> {
        let mut lexer = Lexer::new(text, 1)?;
        let mut module = Self::default();
        let mut external = false;
        loop {
            let token = lexer.take()?;
            if module.target == 0 && !matches!(token, Token::Name(".version" | ".target")) {
                return lexer.error("the text does not start with .version and .target");
            }
            match token {
                Token::End => break,
                Token::Name(".version") => module.version = version(&mut lexer)?,
                Token::Name(".target") => (module.target, module.exact) = target(&mut lexer)?,
                Token::Name(".address_size") => {
                    if lexer.integer()? != 64 {
                        return lexer.error("the emulator supports only 64-bit addresses");
                    }
                }
                Token::Name(".file") => {
                    let number = lexer.integer()?;
                    if let Token::Text(name) = lexer.take()? {
                        module.files.push((number, name.to_owned()));
                    }
                    while lexer.accept(b',')? {
                        lexer.take()?;
                    }
                }
                Token::Name(".section") => {
                    lexer.name()?;
                    lexer.body()?;
                }
                Token::Name(".pragma" | ".alias") => lexer.skip_past(b';')?,
                Token::Name(linkage @ (".visible" | ".extern" | ".weak" | ".common")) => {
                    external = linkage == ".extern";
                    continue;
                }
                Token::Name(space @ (".global" | ".const" | ".shared")) => {
                    let variables = variables(&mut lexer)?;
                    match space {
                        ".shared" => module.shared.extend(variables),
                        _ => module.globals.extend(variables),
                    }
                }
                Token::Name(".entry") => {
                    let line = lexer.line();
                    let function = function(&mut lexer, true)?;
                    if function.body.is_none() {
                        return Err(Error::syntax(line, "an entry without a body"));
                    }
                    if module.functions.iter().any(|it| it.name == function.name) {
                        let detail = format!("the entry {} is declared twice", function.name);
                        return Err(Error::syntax(line, detail));
                    }
                    module.functions.push(function);
                }
                Token::Name(".func") => {
                    let mut function = function(&mut lexer, false)?;
                    function.is_external = external;
                    // A definition replaces its declarations.
                    let declared = module
                        .functions
                        .iter_mut()
                        .find(|it| it.name == function.name);
                    match declared {
                        Some(declared) if function.body.is_some() => *declared = function,
                        Some(_) => {}
                        None => module.functions.push(function),
                    }
                }
                Token::Mark(b';') => {}
                other => {
                    return lexer.error(format!("{} is not expected here", other.describe()));
                }
            }
            external = false;
        }
        if module.version == 0 || module.target == 0 {
            return lexer.error("the text has no .version or no .target");
        }
        Ok(module)
    }
}

fn version(lexer: &mut Lexer<'_>) -> Result<u32> {
    // The lexer reads a version as a decimal fraction.
    match lexer.take()? {
        Token::Float { bits, .. } => Ok((f64::from_bits(bits) * 10.0).round() as u32),
        Token::Integer(number) => Ok(number as u32 * 10),
        other => lexer.error(format!("expected a version, found {}", other.describe())),
    }
}

/// Reads a target. Returns its number, and true if the module runs only on this target.
fn target(lexer: &mut Lexer<'_>) -> Result<(u32, bool)> {
    let name = lexer.name()?;
    let digits = name.strip_prefix("sm_").unwrap_or("");
    let Ok(number) = digits.trim_end_matches(['a', 'f']).parse() else {
        return lexer.error(format!("{name:?} is not a target"));
    };
    while lexer.accept(b',')? {
        lexer.name()?;
    }
    Ok((number, digits.ends_with(['a', 'f'])))
}

/// Maximum size of a parameter, and maximum alignment.
const MAX_PARAM: u64 = 1 << 20;

/// Reads variables up to and including the semicolon, after the state space.
pub(crate) fn variables(lexer: &mut Lexer<'_>) -> Result<Vec<Variable>> {
    let mut variables = Vec::new();
    let (mut align, mut element) = (0, 0);
    while let Token::Name(name) = lexer.peek() {
        if let Some(size) = type_size(name).filter(|_| name.starts_with('.')) {
            lexer.take()?;
            element = size;
        } else if name == ".align" {
            lexer.take()?;
            align = lexer.integer()? as u32;
        } else if let ".v2" | ".v4" = name {
            lexer.take()?;
            return lexer.error("the emulator does not support variables of vector type");
        } else if let ".attribute" = name {
            lexer.take()?;
            lexer.skip_past(b')')?;
        } else {
            break;
        }
    }
    if element == 0 {
        return lexer.error("expected the type of a variable");
    }
    if align != 0 && (!align.is_power_of_two() || u64::from(align) > MAX_PARAM) {
        return lexer.error("an alignment must be a power of two up to 2^20");
    }
    loop {
        let line = lexer.line();
        let name = lexer.name()?.to_owned();
        let mut bytes = element;
        while lexer.accept(b'[')? {
            if lexer.accept(b']')? {
                bytes = 0;
                continue;
            }
            let length = lexer.integer()?;
            let Some(all) = u32::try_from(length)
                .ok()
                .and_then(|it| bytes.checked_mul(it))
            else {
                return lexer.error(format!("variable {name} is too large"));
            };
            bytes = all;
            lexer.expect(b']')?;
        }
        let mut initial = Vec::new();
        if lexer.accept(b'=')? {
            initializers(lexer, &mut initial)?;
            bytes = bytes.max(element.saturating_mul(initial.len() as u32));
        }
        variables.push(Variable {
            name,
            line,
            align: align.max(element).max(1),
            element,
            bytes,
            initial,
        });
        if !lexer.accept(b',')? {
            break;
        }
    }
    lexer.expect(b';')?;
    Ok(variables)
}

fn initializers(lexer: &mut Lexer<'_>, out: &mut Vec<Initializer>) -> Result<()> {
    if lexer.accept(b'{')? {
        loop {
            initializers(lexer, out)?;
            if !lexer.accept(b',')? {
                return lexer.expect(b'}');
            }
        }
    }
    let negative = lexer.accept(b'-')?;
    match lexer.take()? {
        Token::Integer(value) if negative => out.push(Initializer::Integer(value.wrapping_neg())),
        Token::Integer(value) => out.push(Initializer::Integer(value)),
        Token::Float { bits, .. } => {
            out.push(Initializer::Float(bits ^ u64::from(negative) << 63));
        }
        Token::Name("generic") => {
            lexer.expect(b'(')?;
            let name = lexer.name()?.to_owned();
            lexer.expect(b')')?;
            let offset = offset(lexer)?;
            out.push(Initializer::Address(name, offset, true));
        }
        Token::Name(name) => {
            let offset = offset(lexer)?;
            out.push(Initializer::Address(name.to_owned(), offset, false));
        }
        other => return lexer.error(format!("{} is not a value", other.describe())),
    }
    Ok(())
}

/// Reads an optional offset `+n` or `-n`.
pub(crate) fn offset(lexer: &mut Lexer<'_>) -> Result<i64> {
    let mut offset = 0i64;
    loop {
        let sign = if lexer.accept(b'+')? {
            1
        } else if lexer.peek() == Token::Mark(b'-') {
            0
        } else {
            return Ok(offset);
        };
        let negative = lexer.accept(b'-')?;
        debug_assert!(sign == 1 || negative);
        let value = lexer.integer()? as i64;
        offset = offset.wrapping_add(if negative {
            value.wrapping_neg()
        } else {
            value
        });
    }
}

/// Returns the total size of the variables in shared memory that a body declares.
pub(crate) fn shared_bytes(body: &str) -> Result<u32> {
    let mut bytes = 0u32;
    for (at, word) in body.match_indices(".shared") {
        // In the name of an instruction, a letter precedes the word.
        if body[..at].ends_with(|c: char| c.is_ascii_whitespace() || c == ';' || c == '{') {
            let mut lexer = Lexer::new(&body[at + word.len()..], 1)?;
            for variable in variables(&mut lexer)? {
                bytes = bytes
                    .checked_next_multiple_of(variable.align)
                    .and_then(|start| start.checked_add(variable.bytes))
                    .ok_or_else(|| Error::syntax(variable.line, "too much shared memory"))?;
            }
        }
    }
    Ok(bytes)
}

fn function(lexer: &mut Lexer<'_>, is_entry: bool) -> Result<FunctionText> {
    let line = lexer.line();
    let returns = if lexer.peek() == Token::Mark(b'(') {
        params(lexer)?
    } else {
        Vec::new()
    };
    let name = lexer.name()?.to_owned();
    let params = if lexer.peek() == Token::Mark(b'(') {
        params(lexer)?
    } else {
        Vec::new()
    };
    let mut max_threads = 0;
    let body = loop {
        match lexer.peek() {
            Token::Mark(b'{') => break Some(lexer.body()?),
            Token::Mark(b';') => {
                lexer.take()?;
                break None;
            }
            Token::Name(".maxntid" | ".reqntid") => {
                lexer.take()?;
                max_threads = 1;
                loop {
                    let threads = u32::try_from(lexer.integer()?).unwrap_or(u32::MAX);
                    max_threads = u32::saturating_mul(max_threads, threads);
                    if !lexer.accept(b',')? {
                        break;
                    }
                }
            }
            Token::Name(".pragma") => lexer.skip_past(b';')?,
            Token::Name(".noreturn" | ".explicitcluster" | ".blocksareclusters") => {
                lexer.take()?;
            }
            Token::Name(name) if name.starts_with('.') => {
                lexer.take()?;
                while let Token::Integer(_) | Token::Mark(b',') = lexer.peek() {
                    lexer.take()?;
                }
            }
            other => {
                return lexer.error(format!("expected a body, found {}", other.describe()));
            }
        }
    };
    Ok(FunctionText {
        name,
        is_entry,
        params,
        returns,
        is_external: false,
        max_threads,
        body,
        line,
    })
}

fn params(lexer: &mut Lexer<'_>) -> Result<Vec<Param>> {
    lexer.expect(b'(')?;
    let mut params: Vec<Param> = Vec::new();
    let mut end = 0u32;
    while !lexer.accept(b')')? {
        let (mut align, mut size) = (0, 0);
        loop {
            let Token::Name(name) = lexer.peek() else {
                return lexer.error("expected a parameter");
            };
            if let Some(bytes) = type_size(name).filter(|_| name.starts_with('.')) {
                lexer.take()?;
                size = bytes;
            } else if name == ".align" {
                lexer.take()?;
                align = lexer.integer()? as u32;
            } else if name == ".reg" {
                return lexer.error("the emulator does not support parameters in registers");
            } else if name.starts_with('.') {
                // `.param`, `.ptr` and the state space of a pointer.
                lexer.take()?;
            } else {
                break;
            }
        }
        if size == 0 {
            return lexer.error("expected the type of a parameter");
        }
        let align = align.max(size.min(16));
        if !align.is_power_of_two() || u64::from(end) > MAX_PARAM {
            return lexer
                .error("the alignment is not a power of two, or the parameters are too large");
        }
        let name = lexer.name()?.to_owned();
        if lexer.accept(b'[')? {
            let length = match lexer.peek() {
                Token::Integer(_) => lexer.integer()?,
                _ => 0,
            };
            size = match u64::from(size).checked_mul(length) {
                // The limit of all parameters of a kernel is 32,764 bytes.
                Some(size @ ..=MAX_PARAM) => size as u32,
                _ => return lexer.error(format!("parameter {name} is too large")),
            };
            lexer.expect(b']')?;
        }
        let offset = end.next_multiple_of(align);
        end = offset + size;
        params.push(Param { name, offset, size });
        if !lexer.accept(b',')? {
            lexer.expect(b')')?;
            break;
        }
    }
    Ok(params)
}
