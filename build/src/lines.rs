//! Source lines of the instructions of an image.
//!
//! Images carry no line tables. To find source lines, the same bitcode is optimised a second time
//! with its line tables. In the optimised IR, the line of every debug location is then replaced by
//! the number of that location. The assembly's `.loc` directives therefore contain the location's
//! number, which identifies the chain of inlined calls in the IR.

use std::collections::{BTreeMap, HashMap};

use crate::compile::{self, Compilation};
use crate::text::assembly::{self, opcode};
use crate::text::{amd, ir, ptx};
use crate::{Image, Project, Result, Toolchain, Vendor, files};

/// A position in a source file, in a function that may have been inlined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The file, relative to the folder of the workspace.
    pub file: String,
    /// The line number, starting at 1.
    pub line: u32,
}

/// Debug locations of a module.
#[derive(Debug, Default)]
pub struct SourceMap {
    locations: HashMap<u32, Location>,
    /// Enclosing scope and file of each scope, if known.
    scopes: HashMap<u32, (Option<u32>, Option<u32>)>,
    files: HashMap<u32, String>,
}

#[derive(Clone, Copy, Debug)]
struct Location {
    line: u32,
    scope: u32,
    inlined_at: Option<u32>,
}

impl SourceMap {
    /// Reads the metadata of a module.
    pub fn parse(text: &str) -> Self {
        let mut map = Self::default();
        for line in text.lines().filter(|line| line.starts_with('!')) {
            let Some((number, node)) = node(line) else {
                continue;
            };
            let node = node.strip_prefix("distinct ").unwrap_or(node);
            let Some((kind, fields)) = node.split_once('(') else {
                continue;
            };
            match kind {
                "!DILocation" => {
                    let location = Location {
                        line: number_of(fields, "line: ").unwrap_or(0),
                        scope: number_of(fields, "scope: !").unwrap_or(0),
                        inlined_at: number_of(fields, "inlinedAt: !"),
                    };
                    map.locations.insert(number, location);
                }
                "!DISubprogram" | "!DILexicalBlock" | "!DILexicalBlockFile" => {
                    let outer = number_of(fields, "scope: !");
                    map.scopes
                        .insert(number, (outer, number_of(fields, "file: !")));
                }
                "!DIFile" => {
                    let mut texts = fields.split('"').skip(1).step_by(2);
                    let name = texts.next().unwrap_or_default();
                    let folder = texts.next().unwrap_or_default();
                    map.files.insert(number, file_name(name, folder));
                }
                _ => {}
            }
        }
        map
    }

    /// Returns the positions of a location, from the innermost function to the kernel.
    pub fn frames(&self, location: u32) -> Vec<Frame> {
        let mut out = Vec::new();
        let mut next = Some(location);
        while let Some(location) = next.and_then(|number| self.locations.get(&number)) {
            if location.line > 0
                && let Some(file) = self.file(location.scope)
            {
                out.push(Frame {
                    file: file.to_owned(),
                    line: location.line,
                });
            }
            next = location.inlined_at;
        }
        out
    }

    fn file(&self, scope: u32) -> Option<&str> {
        let mut next = Some(scope);
        while let Some(&(outer, file)) = next.and_then(|number| self.scopes.get(&number)) {
            if let Some(file) = file {
                return self.files.get(&file).map(String::as_str);
            }
            next = outer;
        }
        None
    }

    /// Returns the module with the line of every location replaced by the location's number.
    fn numbered(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        for line in text.lines() {
            let location = node(line).and_then(|(number, _)| {
                let mut location = self.locations.get(&number)?;
                while let Some(outer) = location.inlined_at {
                    location = self.locations.get(&outer)?;
                }
                Some((number, location.scope))
            });
            match location {
                // LLVM requires that the scope belongs to the function that contains the
                // instruction.
                Some((number, scope)) => out.push_str(&format!(
                    "!{number} = distinct !DILocation(line: {number}, column: 1, scope: !{scope})"
                )),
                None => out.push_str(line),
            }
            out.push('\n');
        }
        out
    }
}

/// Joins the fields of a `DIFile`. The folder of a file in the workspace is `.`. For other
/// packages, the path starts with the package's name and version.
fn file_name(name: &str, folder: &str) -> String {
    if folder.is_empty() || folder == "." || name.starts_with('/') || name.starts_with(folder) {
        name.to_owned()
    } else {
        format!("{folder}/{name}")
    }
}

/// Splits a line such as `!7 = node` into its number and its node.
fn node(line: &str) -> Option<(u32, &str)> {
    let (number, node) = line.strip_prefix('!')?.split_once(" = ")?;
    Some((number.parse().ok()?, node))
}

/// Returns the number after `name` in the fields of a node.
fn number_of(fields: &str, name: &str) -> Option<u32> {
    let at = fields.find(name)?;
    // `name` must be a whole field name, not the end of a longer one.
    let own = at == 0 || fields[..at].ends_with(", ");
    let rest = &fields[at + name.len()..];
    let end = rest.find(|c: char| !c.is_ascii_digit());
    own.then(|| rest[..end.unwrap_or(rest.len())].parse().ok())
        .flatten()
}

/// Returns a copy of `image` with the number of every instruction's debug location, and the map
/// that resolves these numbers.
///
/// # Errors
/// Returns the errors of [`crate::compile()`].
pub fn annotate(
    toolchain: &Toolchain,
    project: &Project,
    compiled: &Compilation,
    image: &Image,
) -> Result<(Image, SourceMap)> {
    let vendor = image.target.vendor();
    let text = compile::optimise_with_lines(toolchain, project, compiled)?;
    let map = SourceMap::parse(&text);
    let assembly = compile::assemble_lines(toolchain, compiled, &map.numbered(&text))?;
    let assembly = files::read(&assembly)?;
    let mut located = match vendor {
        Vendor::Amd => amd::parse(&assembly)?.0,
        Vendor::Nvidia => ptx::parse(&assembly)?,
    };
    let mut out = image.clone();
    let mut with_lines = ir::parse(&text, vendor);
    for function in &mut out.functions {
        let Some(other) = located.iter_mut().find(|it| it.name == function.name) else {
            continue;
        };
        attach(other);
        locate(function, other);
        let plain = out.ir.iter_mut().find(|it| it.name == function.name);
        let lines = with_lines.iter_mut().find(|it| it.name == function.name);
        if let (Some(plain), Some(lines)) = (plain, lines) {
            *plain = core::mem::take(lines);
        }
    }
    Ok((out, map))
}

/// Returns PTX with a line table: `text` with `.loc` directives for the source lines that `line_of`
/// returns for the locations of `image`, the same image with locations. An instruction of unknown
/// location gets the line of the instruction before it.
pub(crate) fn with_table(
    text: &str,
    image: &Image,
    line_of: impl Fn(u32) -> Option<Frame>,
) -> Result<String> {
    let mut sources: Vec<String> = Vec::new();
    let mut directives: BTreeMap<usize, String> = BTreeMap::new();
    for function in ptx::parse(text)? {
        let Some(located) = image.functions.iter().find(|it| it.name == function.name) else {
            continue;
        };
        let mut last = None;
        // A call can extend over several lines, and a directive must not divide it.
        let mut begins = true;
        let rows = function.rows.iter().zip(&function.lines);
        for ((&row, line), &location) in rows.zip(&located.locations) {
            let is_begin = core::mem::replace(&mut begins, line.ends_with([';', ':', '{', '}']));
            let frame = line_of(location);
            let (Some(frame), true, true) = (&frame, is_begin, frame != last) else {
                continue;
            };
            let known = sources.iter().position(|it| *it == frame.file);
            let number = known.unwrap_or(sources.len()) + 1;
            if known.is_none() {
                sources.push(frame.file.clone());
            }
            // A text line has one directive: that of its first statement.
            let directive = || format!("\t.loc\t{number} {} 0\n", frame.line);
            directives.entry(row).or_insert_with(directive);
            last = Some(frame.clone());
        }
    }
    let mut out = String::with_capacity(text.len() * 5 / 4);
    for (row, line) in text.lines().enumerate() {
        out.extend(directives.get(&row).map(String::as_str));
        out.push_str(line);
        out.push('\n');
    }
    for (index, source) in sources.iter().enumerate() {
        out.push_str(&format!("\t.file\t{} {source:?}\n", index + 1));
    }
    Ok(out)
}

/// Assigns the number of each `.loc` directive to the instructions that follow it.
fn attach(function: &mut assembly::AsmFunction) {
    let mut location = 0;
    let mut lines = Vec::with_capacity(function.lines.len());
    let mut locations = Vec::with_capacity(function.lines.len());
    for line in function.lines.drain(..) {
        match line.strip_prefix(".loc") {
            Some(rest) => {
                let number = rest.split_whitespace().nth(1);
                location = number.and_then(|text| text.parse().ok()).unwrap_or(0);
            }
            None => {
                lines.push(line);
                locations.push(location);
            }
        }
    }
    function.lines = lines;
    function.locations = locations;
}

/// Gives the instructions of `function` the locations of those of `other`, the same function with
/// line tables. These may change the numbers of registers and the order of some instructions, so
/// the longest common sequence of opcodes is matched. An instruction without a partner gets the
/// location 0, which no line has.
fn locate(function: &mut assembly::AsmFunction, other: &assembly::AsmFunction) {
    let opcodes = |function: &assembly::AsmFunction| -> Vec<(usize, String)> {
        let lines = function.lines.iter().enumerate();
        lines
            .filter_map(|(index, line)| Some((index, opcode(line)?.to_owned())))
            .collect()
    };
    let (mine, theirs) = (opcodes(function), opcodes(other));
    let same = |&(left, right): &(&(usize, String), &(usize, String))| left.1 == right.1;
    let start = mine.iter().zip(&theirs).take_while(same).count();
    let (rest, others) = (&mine[start..], &theirs[start..]);
    let end = rest.iter().rev().zip(others.iter().rev());
    let end = end.take_while(same).count();
    let middle = &rest[..rest.len() - end];
    let others = &others[..others.len() - end];
    function.locations = vec![0; function.lines.len()];
    let mut pair = |left: usize, right: usize| {
        function.locations[mine[left].0] = other.locations[theirs[right].0];
    };
    (0..start).for_each(|index| pair(index, index));
    (1..=end).for_each(|back| pair(mine.len() - back, theirs.len() - back));
    // Lengths of the longest common sequences of the ends of both parts.
    let width = others.len() + 1;
    let mut longest = vec![0u32; (middle.len() + 1) * width];
    for left in (0..middle.len()).rev() {
        for right in (0..others.len()).rev() {
            let at = left * width + right;
            longest[at] = if middle[left].1 == others[right].1 {
                longest[at + width + 1] + 1
            } else {
                longest[at + width].max(longest[at + 1])
            };
        }
    }
    let (mut left, mut right) = (0, 0);
    while left < middle.len() && right < others.len() {
        let at = left * width + right;
        if middle[left].1 == others[right].1 {
            pair(start + left, start + right);
            (left, right) = (left + 1, right + 1);
        } else if longest[at + width] >= longest[at + 1] {
            left += 1;
        } else {
            right += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
define void @k() !dbg !3 {
  call void @f(), !dbg !7
}
!1 = !DIFile(filename: \"src/lib.rs\", directory: \".\")
!2 = !DIFile(filename: \"device-api/src/wait.rs\", directory: \".\")
!3 = distinct !DISubprogram(name: \"k\", linkageName: \"k\", scope: !9, file: !1, line: 4, \
    scopeLine: 4)
!4 = distinct !DISubprogram(name: \"f\", scope: !9, file: !2, line: 40, scopeLine: 41)
!5 = distinct !DILexicalBlock(scope: !3, file: !1, line: 5, column: 3)
!6 = distinct !DILocation(line: 6, column: 9, scope: !5)
!7 = !DILocation(line: 42, column: 2, scope: !4, inlinedAt: !6)
!8 = !DILocation(line: 0, scope: !4, inlinedAt: !6)
";

    #[test]
    fn a_location_is_followed_to_the_kernel() {
        let map = SourceMap::parse(TEXT);
        let frame = |file: &str, line| Frame {
            file: file.to_owned(),
            line,
        };
        let own = frame("src/lib.rs", 6);
        let inlined = frame("device-api/src/wait.rs", 42);
        assert_eq!(map.frames(7), [inlined, own.clone()]);
        assert_eq!(map.frames(8), [own]);
        assert!(map.frames(0).is_empty());
        let numbered = map.numbered(TEXT);
        assert!(
            numbered.contains("\n!7 = distinct !DILocation(line: 7, column: 1, scope: !5)\n"),
            "{numbered}"
        );
        assert!(numbered.contains("define void @k() !dbg !3 {\n"));
    }

    #[test]
    fn files_are_named_from_the_workspace_or_the_package() {
        assert_eq!(file_name("src/lib.rs", "."), "src/lib.rs");
        assert_eq!(file_name("/rustc/1/core.rs", ""), "/rustc/1/core.rs");
        assert_eq!(file_name("src/lib.rs", "a-1.0.0"), "a-1.0.0/src/lib.rs");
        let registry = "index.crates.io-1/a-1.0.0";
        assert_eq!(
            file_name("index.crates.io-1/a-1.0.0/src/lib.rs", registry),
            "index.crates.io-1/a-1.0.0/src/lib.rs"
        );
    }

    #[test]
    fn tables_have_the_lines_of_instructions() {
        let text = "\
.visible .entry k()
{
	.reg .b32 %r<2>;
	mov.b32 %r1, 0;
$L__BB0_1:
	add.s32 %r1, %r1, 1;
	call.uni
	f,
	(
	param0
	);
	ret;
}
";
        let mut function = ptx::parse(text).unwrap().remove(0);
        // The other lines of the call have locations, as if they were instructions.
        let location = |line: &String| match line.as_str() {
            "f," | "param0" | "ret;" => 2,
            line => opcode(line).is_some().into(),
        };
        function.locations = function.lines.iter().map(location).collect();
        let image = Image {
            target: crate::Target::Sm90,
            functions: vec![function],
            ir: Vec::new(),
            assembly: String::new(),
            kernels: Vec::new(),
            host: None,
            allow: Vec::new(),
            multicast: Vec::new(),
            budgets: Vec::new(),
            files: Vec::new(),
            refused: None,
        };
        let frame = |location: u32| {
            let file = ["", "src/lib.rs", "src/other.rs"][location as usize];
            (location > 0).then(|| Frame {
                file: file.to_owned(),
                line: 40 + location,
            })
        };
        let expected = text
            .replace("\tmov", "\t.loc\t1 41 0\n\tmov")
            .replace("\tret", "\t.loc\t2 42 0\n\tret");
        let files = "\t.file\t1 \"src/lib.rs\"\n\t.file\t2 \"src/other.rs\"\n";
        assert_eq!(with_table(text, &image, frame).unwrap(), expected + files);
    }

    #[test]
    fn directives_move_to_instructions() {
        let mut function = assembly::AsmFunction {
            lines: [
                ".loc 1 7 1",
                "mov.b32 %r1, 0;",
                "$L__BB3_1:",
                "bra $L__BB3_1;",
            ]
            .map(str::to_owned)
            .to_vec(),
            ..assembly::AsmFunction::default()
        };
        attach(&mut function);
        assert_eq!(function.lines.len(), 3);
        assert_eq!(function.locations, [7, 7, 7]);
        // The image has one instruction more, and one in another place.
        let lines = [
            "add.s32 %r2, %r1, 1;",
            "mov.b32 %r1, 0;",
            "$L:",
            "bra $L;",
            "ret;",
        ];
        let mut plain = assembly::AsmFunction {
            lines: lines.map(str::to_owned).to_vec(),
            ..assembly::AsmFunction::default()
        };
        locate(&mut plain, &function);
        assert_eq!(plain.locations, [0, 7, 0, 7, 0]);
    }
}
