//! Tokens of PTX text.

use core::ops::Range;

use crate::error::{Error, Result};

/// A token. Names include the leading `%`, `$` or `.` and the dots and colons inside of opcodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Token<'a> {
    /// A directive (`.reg`), an opcode (`ld.global.u32`), a register (`%r1`) or a symbol.
    Name(&'a str),
    /// An integer literal.
    Integer(u64),
    /// A floating-point literal: the bits of an f64, and true if it was written as an f32 (`0f`).
    Float { bits: u64, single: bool },
    /// A string literal, without its quotes.
    Text(&'a str),
    /// A punctuation character.
    Mark(u8),
    /// The end of the text.
    End,
}

impl Token<'_> {
    /// Returns the text of the token for error messages.
    pub(crate) fn describe(self) -> String {
        match self {
            Token::Name(name) => format!("{name:?}"),
            Token::Integer(value) => format!("{value}"),
            Token::Float { .. } => "a floating-point literal".into(),
            Token::Text(text) => format!("{text:?}"),
            Token::Mark(mark) => format!("{:?}", char::from(mark)),
            Token::End => "the end of the text".into(),
        }
    }
}

/// A position in PTX text, with one token of lookahead.
#[derive(Clone, Debug)]
pub(crate) struct Lexer<'a> {
    text: &'a str,
    at: usize,
    /// Line of the position `at`.
    at_line: u32,
    /// The next token, and the line in which it starts.
    next: Token<'a>,
    line: u32,
}

fn starts_name(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

fn continues_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'.' | b'%')
}

impl<'a> Lexer<'a> {
    /// Starts at the first byte of `text`, which is in line `line` of its file.
    pub(crate) fn new(text: &'a str, line: u32) -> Result<Self> {
        let mut lexer = Self {
            text,
            at: 0,
            at_line: line,
            next: Token::End,
            line,
        };
        lexer.advance()?;
        Ok(lexer)
    }

    /// Returns the line of the next token.
    pub(crate) fn line(&self) -> u32 {
        self.line
    }

    /// Returns the next token without consuming it.
    pub(crate) fn peek(&self) -> Token<'a> {
        self.next
    }

    /// Returns an error at the next token.
    pub(crate) fn error<T>(&self, detail: impl Into<String>) -> Result<T> {
        Err(Error::syntax(self.line, detail))
    }

    /// Consumes the next token.
    pub(crate) fn take(&mut self) -> Result<Token<'a>> {
        let token = self.next;
        self.advance()?;
        Ok(token)
    }

    /// Consumes the next token if it is the punctuation character `mark`.
    pub(crate) fn accept(&mut self, mark: u8) -> Result<bool> {
        let found = self.next == Token::Mark(mark);
        if found {
            self.advance()?;
        }
        Ok(found)
    }

    /// Consumes the punctuation character `mark`.
    pub(crate) fn expect(&mut self, mark: u8) -> Result<()> {
        if self.accept(mark)? {
            return Ok(());
        }
        self.error(format!(
            "expected {:?}, found {}",
            char::from(mark),
            self.next.describe()
        ))
    }

    /// Consumes a name.
    pub(crate) fn name(&mut self) -> Result<&'a str> {
        match self.next {
            Token::Name(name) => {
                self.advance()?;
                Ok(name)
            }
            other => self.error(format!("expected a name, found {}", other.describe())),
        }
    }

    /// Consumes an integer literal.
    pub(crate) fn integer(&mut self) -> Result<u64> {
        match self.next {
            Token::Integer(value) => {
                self.advance()?;
                Ok(value)
            }
            other => self.error(format!("expected a number, found {}", other.describe())),
        }
    }

    /// Consumes all tokens up to and including the punctuation character `mark`.
    pub(crate) fn skip_past(&mut self, mark: u8) -> Result<()> {
        while self.next != Token::Mark(mark) {
            if self.next == Token::End {
                return self.error(format!("expected {:?} before the end", char::from(mark)));
            }
            self.advance()?;
        }
        self.advance()
    }

    /// Skips a body in braces. The next token must be the opening brace. Returns the text between
    /// the braces as a range of the text, and the line in which it starts.
    pub(crate) fn body(&mut self) -> Result<(Range<usize>, u32)> {
        if self.next != Token::Mark(b'{') {
            return self.error(format!("expected a body, found {}", self.next.describe()));
        }
        let (start, line) = (self.at, self.at_line);
        let mut depth = 1usize;
        let bytes = self.text.as_bytes();
        while depth > 0 {
            match bytes.get(self.at) {
                None => {
                    return Err(Error::syntax(line, "the body does not end"));
                }
                Some(b'{') => depth += 1,
                Some(b'}') => depth -= 1,
                Some(b'\n') => self.at_line += 1,
                Some(b'/') if matches!(bytes.get(self.at + 1), Some(b'/' | b'*')) => {
                    self.comment()?;
                    continue;
                }
                Some(b'"') => {
                    let rest = &self.text[self.at + 1..];
                    let Some(length) = rest.find('"') else {
                        return Err(Error::syntax(self.at_line, "the string does not end"));
                    };
                    self.at += length + 1;
                }
                Some(_) => {}
            }
            self.at += 1;
        }
        let body = start..self.at - 1;
        self.advance()?;
        Ok((body, line))
    }

    /// Skips the comment that starts at the current position.
    fn comment(&mut self) -> Result<()> {
        let rest = &self.text[self.at..];
        if rest.starts_with("//") {
            self.at += rest.find('\n').unwrap_or(rest.len());
        } else {
            let Some(length) = rest[2..].find("*/") else {
                return Err(Error::syntax(self.at_line, "the comment does not end"));
            };
            let comment = &rest[..length + 4];
            self.at_line += comment.bytes().filter(|byte| *byte == b'\n').count() as u32;
            self.at += comment.len();
        }
        Ok(())
    }

    fn advance(&mut self) -> Result<()> {
        let bytes = self.text.as_bytes();
        loop {
            match bytes.get(self.at) {
                Some(b'\n') => {
                    self.at_line += 1;
                    self.at += 1;
                }
                Some(b' ' | b'\t' | b'\r' | 0) => self.at += 1,
                Some(b'/') if matches!(bytes.get(self.at + 1), Some(b'/' | b'*')) => {
                    self.comment()?;
                }
                _ => break,
            }
        }
        self.line = self.at_line;
        let start = self.at;
        let Some(&first) = bytes.get(start) else {
            self.next = Token::End;
            return Ok(());
        };
        if first.is_ascii_digit() {
            return self.number();
        }
        if starts_name(first) {
            let mut end = start + 1;
            loop {
                match bytes.get(end) {
                    Some(&byte) if continues_name(byte) => end += 1,
                    // Names such as `L1::no_allocate`.
                    Some(b':') if bytes.get(end + 1) == Some(&b':') => end += 2,
                    _ => break,
                }
            }
            self.at = end;
            self.next = Token::Name(&self.text[start..end]);
            return Ok(());
        }
        if first == b'"' {
            let rest = &self.text[start + 1..];
            let Some(length) = rest.find('"') else {
                return Err(Error::syntax(self.at_line, "the string does not end"));
            };
            self.at = start + length + 2;
            self.next = Token::Text(&rest[..length]);
            return Ok(());
        }
        if !first.is_ascii() {
            return Err(Error::syntax(self.at_line, "a character that is not ASCII"));
        }
        self.at += 1;
        self.next = Token::Mark(first);
        Ok(())
    }

    /// Reads a number: decimal, octal (`0..`), hexadecimal (`0x`), binary (`0b`), the bits of an
    /// f32 (`0f`) or of an f64 (`0d`), or a decimal fraction.
    fn number(&mut self) -> Result<()> {
        let rest = &self.text[self.at..];
        let digits = |text: &str, radix: u32| {
            let length = text
                .bytes()
                .take_while(|byte| char::from(*byte).is_digit(radix))
                .count();
            (u64::from_str_radix(&text[..length], radix).ok(), length)
        };
        let invalid = || Error::syntax(self.at_line, "an invalid number");
        let prefix = rest.get(..2).unwrap_or("");
        let (token, mut length) = match prefix {
            "0f" | "0F" | "0d" | "0D" => {
                let (bits, length) = digits(&rest[2..], 16);
                let bits = bits.ok_or_else(invalid)?;
                let single = prefix.ends_with(['f', 'F']);
                if length != if single { 8 } else { 16 } {
                    return Err(invalid());
                }
                let bits = if single { widen(bits as u32) } else { bits };
                (Token::Float { bits, single }, length + 2)
            }
            "0x" | "0X" => {
                let (value, length) = digits(&rest[2..], 16);
                (Token::Integer(value.ok_or_else(invalid)?), length + 2)
            }
            "0b" | "0B" => {
                let (value, length) = digits(&rest[2..], 2);
                (Token::Integer(value.ok_or_else(invalid)?), length + 2)
            }
            _ => {
                let (value, length) = digits(rest, 10);
                let fraction = rest[length..].starts_with('.')
                    && rest[length + 1..].starts_with(|c: char| c.is_ascii_digit());
                if fraction {
                    let end = rest
                        .bytes()
                        .position(|b| !(b.is_ascii_alphanumeric() || b == b'.'))
                        .unwrap_or(rest.len());
                    let value: f64 = rest[..end].parse().map_err(|_| invalid())?;
                    let bits = value.to_bits();
                    let single = false;
                    (Token::Float { bits, single }, end)
                } else if length > 1 && rest.starts_with('0') {
                    let (value, length) = digits(rest, 8);
                    (Token::Integer(value.ok_or_else(invalid)?), length)
                } else {
                    (Token::Integer(value.ok_or_else(invalid)?), length)
                }
            }
        };
        if matches!(token, Token::Integer(_)) && rest[length..].starts_with('U') {
            length += 1;
        }
        if rest[length..].starts_with(|c: char| c.is_ascii_alphanumeric()) {
            return Err(invalid());
        }
        self.at += length;
        self.next = token;
        Ok(())
    }
}

/// Returns the f64 with the value of an f32. Keeps the payload of a NaN.
fn widen(bits: u32) -> u64 {
    let value = f32::from_bits(bits);
    if value.is_nan() {
        let sign = u64::from(bits >> 31) << 63;
        return sign | 0x7ff << 52 | u64::from(bits & 0x7f_ffff) << 29;
    }
    f64::from(value).to_bits()
}
