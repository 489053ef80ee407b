//! Parses the declarations of PTX images, and generates stand-in images.

use fusewire_device::multi_rank_grid::{GridParams, SUFFIX};
use fusewire_device::native::{KernelInfo, ParamField};

use super::kernel;

/// One parameter of an entry: its offset and size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Parameter {
    pub(crate) offset: usize,
    pub(crate) size: usize,
}

/// One `.entry` of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) name: String,
    pub(crate) parameters: Vec<Parameter>,
    /// Total size of all parameters in bytes.
    pub(crate) bytes: usize,
    /// Maximum number of threads from `.maxntid` or `.reqntid`; 0 if the entry declares neither.
    pub(crate) max_threads: u32,
    /// Total size of the shared variables that the body uses, in bytes.
    pub(crate) shared_bytes: usize,
}

/// Declarations of an image.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Image {
    /// `.version` times ten.
    pub(crate) version: u32,
    /// Number of the `.target`, such as 90 for `sm_90a`.
    pub(crate) target: u32,
    /// True if the image runs only on the target architecture (`a` and `f` suffixes).
    pub(crate) exact: bool,
    pub(crate) entries: Vec<Entry>,
    /// External functions that the driver does not have.
    pub(crate) unresolved: Vec<String>,
}

/// Parse error and its line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PtxError {
    pub(crate) line: u32,
    pub(crate) detail: String,
}

type PtxResult<T> = Result<T, PtxError>;

/// Tokenizer that skips white space and comments.
struct Tokens<'a> {
    text: &'a str,
    at: usize,
    line: u32,
}

impl<'a> Tokens<'a> {
    fn error<T>(&self, detail: impl Into<String>) -> PtxResult<T> {
        Err(PtxError {
            line: self.line,
            detail: detail.into(),
        })
    }

    fn skip(&mut self) -> PtxResult<()> {
        let bytes = self.text.as_bytes();
        while let Some(byte) = bytes.get(self.at) {
            match (byte, bytes.get(self.at + 1)) {
                (b'\n', _) => {
                    self.line += 1;
                    self.at += 1;
                }
                (b'/', Some(b'/')) => {
                    let rest = &self.text[self.at..];
                    self.at += rest.find('\n').unwrap_or(rest.len());
                }
                (b'/', Some(b'*')) => {
                    let rest = &self.text[self.at..];
                    let Some(end) = rest.find("*/") else {
                        return self.error("unterminated comment");
                    };
                    self.line += rest[..end].matches('\n').count() as u32;
                    self.at += end + 2;
                }
                (byte, _) if byte.is_ascii_whitespace() => self.at += 1,
                _ => break,
            }
        }
        Ok(())
    }

    fn next(&mut self) -> PtxResult<Option<&'a str>> {
        self.skip()?;
        let rest = &self.text[self.at..];
        let Some(first) = rest.bytes().next() else {
            return Ok(None);
        };
        let word = |byte: u8| byte.is_ascii_alphanumeric() || b"_$%.".contains(&byte);
        let length = if first == b'"' {
            match rest[1..].find('"') {
                Some(end) => end + 2,
                None => return self.error("unterminated string"),
            }
        } else if word(first) {
            rest.bytes()
                .position(|byte| !word(byte))
                .unwrap_or(rest.len())
        } else if first.is_ascii() {
            1
        } else {
            return self.error("character that is not ASCII");
        };
        self.at += length;
        Ok(Some(&rest[..length]))
    }

    fn need(&mut self, what: &str) -> PtxResult<&'a str> {
        match self.next()? {
            Some(token) => Ok(token),
            None => self.error(format!("expected {what}, found the end of the text")),
        }
    }

    fn expect(&mut self, token: &str) -> PtxResult<()> {
        let found = self.need(token)?;
        if found == token {
            Ok(())
        } else {
            self.error(format!("expected {token:?}, found {found:?}"))
        }
    }

    fn number(&mut self, what: &str) -> PtxResult<usize> {
        let token = self.need(what)?;
        match token.parse() {
            Ok(number) => Ok(number),
            Err(_) => self.error(format!("expected {what}, found {token:?}")),
        }
    }
}

/// Returns the size in bytes of a type such as `.u64`.
fn size_of(name: &str) -> Option<usize> {
    Some(match name {
        ".b8" | ".u8" | ".s8" => 1,
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => 2,
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => 4,
        ".b64" | ".u64" | ".s64" | ".f64" => 8,
        ".b128" => 16,
        _ => return None,
    })
}

/// External functions that the driver provides.
const SYSTEM: [&str; 4] = ["vprintf", "malloc", "free", "__assertfail"];

impl Image {
    /// Parses PTX.
    pub(crate) fn parse(text: &str) -> PtxResult<Self> {
        let mut tokens = Tokens {
            text,
            at: 0,
            line: 1,
        };
        let mut image = Self::default();
        let mut shared: Vec<(String, usize)> = Vec::new();
        tokens.expect(".version")?;
        image.version = version(&mut tokens)?;
        tokens.expect(".target")?;
        (image.target, image.exact) = target(&mut tokens)?;
        tokens.expect(".address_size")?;
        if tokens.number("the size of an address")? != 64 {
            return tokens.error("addresses must have 64 bits");
        }
        let (mut linkage, mut depth) = ("", 0u32);
        while let Some(token) = tokens.next()? {
            match token {
                ".visible" | ".extern" | ".weak" => linkage = token,
                ".entry" => {
                    let entry = entry(&mut tokens, &shared)?;
                    if image.entries.iter().any(|other| other.name == entry.name) {
                        return tokens.error(format!("duplicate entry {}", entry.name));
                    }
                    image.entries.push(entry);
                    linkage = "";
                }
                ".func" => {
                    let name = function(&mut tokens)?;
                    if linkage == ".extern" && !SYSTEM.contains(&name) {
                        image.unresolved.push(name.to_owned());
                    }
                    linkage = "";
                }
                ".shared" => {
                    let (name, bytes) = variable(&mut tokens)?;
                    if linkage != ".extern" {
                        shared.push((name.to_owned(), bytes));
                    }
                    linkage = "";
                }
                "{" => depth += 1,
                "}" if depth == 0 => return tokens.error("unmatched closing brace"),
                "}" => depth -= 1,
                ";" => linkage = "",
                _ => {}
            }
        }
        if depth > 0 {
            return tokens.error("unmatched opening brace");
        }
        Ok(image)
    }

    pub(crate) fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

fn version(tokens: &mut Tokens<'_>) -> PtxResult<u32> {
    let text = tokens.need("a version")?;
    let parts = text.split_once('.');
    let number = parts.and_then(|(major, minor)| {
        Some(major.parse::<u32>().ok()? * 10 + minor.parse::<u32>().ok()?)
    });
    match number {
        Some(number) => Ok(number),
        None => tokens.error(format!("{text:?} is not a version")),
    }
}

fn target(tokens: &mut Tokens<'_>) -> PtxResult<(u32, bool)> {
    let text = tokens.need("a target")?;
    let number = text.strip_prefix("sm_").and_then(|number| {
        let digits = number.trim_end_matches(['a', 'f']);
        Some((digits.parse().ok()?, digits.len() != number.len()))
    });
    match number {
        Some(target) => Ok(target),
        None => tokens.error(format!("{text:?} is not a target")),
    }
}

/// Parses `[.align N] TYPE NAME[N]...;` after `.shared`. Returns the name and the size in bytes.
fn variable<'a>(tokens: &mut Tokens<'a>) -> PtxResult<(&'a str, usize)> {
    let mut size = None;
    loop {
        let token = tokens.need("a variable")?;
        if token == ".align" {
            tokens.number("an alignment")?;
        } else if let Some(bytes) = size_of(token) {
            size = Some(bytes);
        } else if token.starts_with('.') || size.is_none() {
            return tokens.error(format!("expected a variable's type, found {token:?}"));
        } else {
            let mut bytes = size.unwrap_or(1);
            loop {
                match tokens.need("the end of a variable")? {
                    "[" => {}
                    "]" => {}
                    ";" => return Ok((token, bytes)),
                    number => match number.parse::<usize>() {
                        Ok(number) => bytes *= number,
                        Err(_) => return tokens.error(format!("{number:?} is not a length")),
                    },
                }
            }
        }
    }
}

/// Parses the name of a function after `.func`. The caller reads its parameters and body.
fn function<'a>(tokens: &mut Tokens<'a>) -> PtxResult<&'a str> {
    let mut token = tokens.need("a function")?;
    if token == "(" {
        while tokens.need("the end of a function's result")? != ")" {}
        token = tokens.need("a function's name")?;
    }
    Ok(token)
}

/// Parses an entry and its body after `.entry`.
fn entry(tokens: &mut Tokens<'_>, shared: &[(String, usize)]) -> PtxResult<Entry> {
    let name = tokens.need("an entry's name")?;
    if name.starts_with(['.', '(', '{']) {
        return tokens.error(format!("expected an entry's name, found {name:?}"));
    }
    let mut entry = Entry {
        name: name.to_owned(),
        ..Entry::default()
    };
    let mut token = tokens.need("an entry's parameters")?;
    if token == "(" {
        parameters(tokens, &mut entry)?;
        token = tokens.need("an entry's body")?;
    }
    while token != "{" {
        match token {
            ".maxntid" | ".reqntid" => {
                entry.max_threads = 1;
                loop {
                    entry.max_threads *= tokens.number("a number of threads")? as u32;
                    token = tokens.need("an entry's body")?;
                    if token != "," {
                        break;
                    }
                }
                continue;
            }
            ".minnctapersm" | ".maxnreg" | ".maxnctapersm" => {
                tokens.number("a number")?;
            }
            ";" => return tokens.error(format!("entry {name} has no body")),
            _ => {}
        }
        token = tokens.need("an entry's body")?;
    }
    let mut used = vec![false; shared.len()];
    let mut depth = 1;
    while depth > 0 {
        match tokens.need("the end of an entry's body")? {
            "{" => depth += 1,
            "}" => depth -= 1,
            ".shared" => entry.shared_bytes += variable(tokens)?.1,
            ".entry" => return tokens.error(format!("unterminated body of entry {name}")),
            word => {
                if let Some(at) = shared.iter().position(|(name, _)| name == word) {
                    used[at] = true;
                }
            }
        }
    }
    for ((_, bytes), used) in shared.iter().zip(used) {
        entry.shared_bytes += if used { *bytes } else { 0 };
    }
    Ok(entry)
}

/// Parses `.param [.align N] TYPE [.ptr [.SPACE] [.align N]] NAME[N], ...)` after the `(`.
fn parameters(tokens: &mut Tokens<'_>, entry: &mut Entry) -> PtxResult<()> {
    let mut token = tokens.need("a parameter")?;
    while token != ")" {
        if token != ".param" {
            return tokens.error(format!("expected .param, found {token:?}"));
        }
        let (mut size, mut alignment, mut pointee) = (0, 0, false);
        let name = loop {
            let token = tokens.need("a parameter's type")?;
            match token {
                ".align" => {
                    let number = tokens.number("an alignment")?;
                    if !number.is_power_of_two() {
                        return tokens.error(format!("alignment {number} is not a power of two"));
                    }
                    if !pointee {
                        alignment = number;
                    }
                }
                ".ptr" => pointee = true,
                ".global" | ".shared" | ".const" | ".local" if pointee => {}
                _ if !token.starts_with('.') => break token,
                _ => match size_of(token) {
                    Some(bytes) if size == 0 => size = bytes,
                    _ => return tokens.error(format!("{token:?} is not a parameter type")),
                },
            }
        };
        if size == 0 || matches!(name, "," | "(" | ")" | "[") {
            return tokens.error(format!("expected a type or a name, found {name:?}"));
        }
        let alignment = alignment.max(size);
        token = tokens.need("the end of a parameter")?;
        if token == "[" {
            size *= tokens.number("a length")?;
            tokens.expect("]")?;
            token = tokens.need("the end of a parameter")?;
        }
        let offset = entry.bytes.next_multiple_of(alignment);
        entry.parameters.push(Parameter { offset, size });
        entry.bytes = offset + size;
        match token {
            "," => token = tokens.need("a parameter")?,
            ")" => {}
            other => return tokens.error(format!("unexpected {other:?} after a parameter")),
        }
    }
    Ok(())
}

/// Returns a stand-in image for the fake: PTX that declares the kernels of `lists`, with empty
/// bodies.
///
/// `capability` is the target: 90 for `sm_90`. Parameters have the same sizes, and therefore the
/// same offsets, as the fields of the kernel's parameter struct.
pub fn stand_in(lists: &[&[KernelInfo]], capability: u32) -> String {
    let all = lists.iter().copied().flatten();
    declare(
        all.map(|kernel| (kernel.name.to_owned(), kernel.params)),
        capability,
    )
}

/// Returns a stand-in image like [`stand_in`] that declares the grid forms of the kernels:
/// `NAME__grid` instead of `NAME`.
pub fn stand_in_multi_rank_grid(lists: &[&[KernelInfo]], capability: u32) -> String {
    let all = lists.iter().copied().flatten();
    declare(
        all.map(|kernel| (format!("{}{SUFFIX}", kernel.name), GridParams::FIELDS)),
        capability,
    )
}

pub(super) fn declare(
    entries: impl Iterator<Item = (String, &'static [ParamField])>,
    capability: u32,
) -> String {
    let mut text = format!(".version 8.0\n.target sm_{capability}\n.address_size 64\n");
    for (name, params) in entries {
        let parameters: Vec<String> = params
            .iter()
            .enumerate()
            .map(|(at, field)| match field.size {
                1 | 2 | 4 | 8 => format!("\t.param .u{} {name}_param_{at}", field.size * 8),
                size => {
                    let alignment = 1 << field.offset.trailing_zeros().min(3);
                    format!("\t.param .align {alignment} .b8 {name}_param_{at}[{size}]")
                }
            })
            .collect();
        text.push_str(&format!(
            "\n.visible .entry {name}(\n{}\n)\n.maxntid {}\n.minnctapersm 1\n{{\n\tret;\n}}\n",
            parameters.join(",\n"),
            kernel::most_threads(capability, &name)
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = ".version 8.6\n.target sm_90a\n.address_size 64\n";

    fn parse(body: &str) -> PtxResult<Image> {
        Image::parse(&format!("{HEAD}{body}"))
    }

    #[test]
    fn entries_with_offsets_and_attributes() {
        let image = parse(
            "// a comment with .entry nothing(\n\
             .extern .func (.param .b32 r) vprintf (.param .b64 a, .param .b64 b);\n\
             .shared .align 128 .b8 scratch[64];\n\
             .visible .entry first(\n .param .u64 .ptr .global .align 16 a,\n .param .u32 b,\n\
             .param .align 16 .b8 c[20],\n .param .f16 d)\n.maxntid 16, 8\n\
             { mov.b64 %rd1, scratch; { } ret; }\n\
             .visible .entry second()\n{ /* } */ ret; }\n",
        )
        .unwrap();
        assert_eq!((image.version, image.target, image.exact), (86, 90, true));
        assert_eq!(image.unresolved, [""; 0]);
        let first = image.entry("first").unwrap();
        let parameters: Vec<_> = first
            .parameters
            .iter()
            .map(|it| (it.offset, it.size))
            .collect();
        assert_eq!(parameters, [(0, 8), (8, 4), (16, 20), (36, 2)]);
        assert_eq!(
            (first.bytes, first.max_threads, first.shared_bytes),
            (38, 128, 64)
        );
        let second = image.entry("second").unwrap();
        assert!(second.parameters.is_empty() && second.shared_bytes == 0);
        assert!(image.entry("nothing").is_none());
    }

    #[test]
    fn malformed_text_is_refused_with_its_line() {
        for (body, line) in [
            (".visible .entry k(.param .u64 a", 4),
            (".visible .entry k(.param .u65 a) { }", 4),
            ("\n.visible .entry k(.param .u64 a)\n{", 6),
            (".visible .entry k(.param .u64 a);", 4),
            (".visible .entry k(.param .align 3 .b8 a[3]) { }", 4),
            (".visible .entry k() { }\n.visible .entry k() { }", 5),
            ("}", 4),
            ("/* no end", 4),
        ] {
            let error = parse(body).unwrap_err();
            assert_eq!(error.line, line, "{body:?}: {error:?}");
        }
        for text in [
            "",
            "hello",
            ".version 8.6\n.target gfx942\n",
            ".version x\n",
        ] {
            assert!(Image::parse(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn calls_to_functions_that_are_not_there() {
        let image = parse(".extern .func panic_somewhere\n(\n.param .b64 a\n);").unwrap();
        assert_eq!(image.unresolved, ["panic_somewhere"]);
    }

    #[test]
    fn the_library_lists_every_kernel_that_is_registered() {
        let listed = fusewire_kernels::KERNELS.iter().copied().flatten();
        let mut listed: Vec<_> = listed.map(|kernel| kernel.name).collect();
        listed.sort_unstable();
        let registered = crate::kernels_of("fusewire_kernels").iter().copied();
        let registered: Vec<_> = registered.flatten().map(|kernel| kernel.name).collect();
        assert_eq!(listed, registered);
    }

    #[test]
    fn stand_ins_declare_what_the_structs_have() {
        for name in ["fusewire_kernels", "vocab_argmax"] {
            let lists = crate::kernels_of(name);
            let image = Image::parse(&stand_in(lists, 90)).unwrap();
            let kernels: Vec<_> = lists.iter().copied().flatten().collect();
            assert_eq!(image.entries.len(), kernels.len());
            for kernel in kernels {
                let entry = image.entry(kernel.name).unwrap();
                let parameters = entry.parameters.iter().map(|it| (it.offset, it.size));
                let fields = kernel.params.iter().map(|it| (it.offset, it.size));
                assert!(parameters.eq(fields), "{}", kernel.name);
            }
        }
    }
}
