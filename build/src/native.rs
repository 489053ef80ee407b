//! Verifier for native code. It checks the machine code of the entries
//! `<crate>__<kernel>__baseline`, `<crate>__<kernel>__avx2` and `<crate>__<kernel>__avx512`.
//!
//! A loop consists of the instructions from the target of a backward jump to the jump. The hot loop
//! of an entry is the loop whose packed instructions, excluding those of inner loops, compute the
//! most bits.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use crate::project::fits;
use crate::violation::Violation;
use crate::{Result, process};

/// Rule: the hot loop of a reduction uses vector registers of its variant's width.
pub const WIDTH: &str = "native-width";
/// Rule: a hot loop calls no function. An entry calls no function that does arithmetic and was
/// compiled without the target features of the entry's variant.
pub const CALLS: &str = "native-call";
/// Parts of the symbols of functions of the device API that are out of line on purpose: a loop may
/// call them, and they need not compute with the width of the variant. The first one appends a
/// request to a network, of which a loop makes one for a piece of data, not for an element. The
/// others run once, after an error.
const OUT_OF_LINE: [&str; 3] = ["8Requests6append", "6Faults6record", "5words7lagging"];
/// Rule: no entry contains an FMA.
pub const FUSED: &str = "native-fused";

/// Advice to authors for each rule.
pub const ADVICE: &[(&str, &str)] = &[
    (
        WIDTH,
        "write the hot loop over bulk::reduce or over lanes of fixed length, so that it vectorises",
    ),
    (
        CALLS,
        "mark what a hot loop calls #[inline(always)], so that it is compiled for the variant",
    ),
    (FUSED, "multiply and add in two operations, without mul_add"),
];

/// Name patterns of kernels that reduce, for a crate that does not list its reductions.
pub const REDUCTIONS: &[&str] = &["*reduce*"];

/// One instruction.
#[derive(Clone, Debug)]
struct Instruction {
    address: u64,
    code: String,
    operands: String,
}

/// A function of a program.
#[derive(Clone, Debug, Default)]
pub struct Code {
    instructions: Vec<Instruction>,
}

/// Machine code of a program, by symbol.
pub type Program = BTreeMap<String, Code>;

/// Disassembles `program`.
///
/// # Errors
/// [`crate::Error::Command`] if objdump fails.
pub fn disassemble(objdump: &Path, program: &Path) -> Result<Program> {
    let output = process::run(
        "disassembling native code",
        process::clean(objdump)
            .args(["-d", "--no-show-raw-insn"])
            .arg(program),
    )?;
    let slots = process::run(
        "listing native code's relocations",
        process::clean(objdump).arg("-R").arg(program),
    )?;
    Ok(parse(&output.stdout, &relocations(&slots.stdout)))
}

/// Parses the relocations of a program. Returns a map from the address of a slot to the address of
/// the function that the slot points to.
fn relocations(text: &str) -> BTreeMap<u64, u64> {
    text.lines()
        .filter_map(|line| {
            let mut words = line.split_whitespace();
            let slot = u64::from_str_radix(words.next()?, 16).ok()?;
            let target = words.nth(1)?.strip_prefix("*ABS*+0x")?;
            Some((slot, u64::from_str_radix(target, 16).ok()?))
        })
        .collect()
}

fn parse(text: &str, slots: &BTreeMap<u64, u64>) -> Program {
    let symbols: BTreeMap<u64, &str> = text
        .lines()
        .filter_map(|line| {
            let (address, symbol) = line.strip_suffix(">:")?.split_once(" <")?;
            Some((u64::from_str_radix(address, 16).ok()?, symbol))
        })
        .collect();
    let mut out = Program::new();
    let mut name = String::new();
    for line in text.lines() {
        if let Some(head) = line.strip_suffix(">:")
            && let Some((_, symbol)) = head.split_once(" <")
        {
            name = symbol.to_owned();
            continue;
        }
        let Some((address, rest)) = line.split_once(':') else {
            continue;
        };
        let Ok(address) = u64::from_str_radix(address.trim(), 16) else {
            continue;
        };
        let rest = rest.trim();
        let (code, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let mut operands = operands.trim().to_owned();
        // `call *0x10(%rip)  # 2000 <slot>` calls the function whose address is in the slot. A
        // relocation gives that address.
        let slot = operands
            .split_once("# ")
            .and_then(|(_, slot)| u64::from_str_radix(slot.split_whitespace().next()?, 16).ok());
        if let Some(callee) = slot.and_then(|slot| symbols.get(slots.get(&slot)?)) {
            operands = format!("*<{callee}>");
        }
        out.entry(name.clone())
            .or_default()
            .instructions
            .push(Instruction {
                address,
                code: code.to_owned(),
                operands,
            });
    }
    out
}

impl Instruction {
    fn is_call(&self) -> bool {
        self.code.starts_with("call")
    }

    /// Returns the target of a direct jump.
    fn jump(&self) -> Option<u64> {
        let target = self.operands.split_whitespace().next()?;
        let direct = self.code.starts_with('j').then_some(target)?;
        u64::from_str_radix(direct.trim_start_matches("0x"), 16).ok()
    }

    /// Returns the symbol that the instruction calls or jumps to.
    fn symbol(&self) -> Option<&str> {
        let (_, rest) = self.operands.split_once('<')?;
        rest.split(['+', '>']).next()?.split('@').next()
    }

    /// Returns `true` for arithmetic, comparisons and logic on packed floats or integers in vector
    /// registers.
    fn is_packed(&self) -> bool {
        let code = self.code.strip_prefix('v').unwrap_or(&self.code);
        let float = [
            "add", "sub", "mul", "div", "min", "max", "cmp", "and", "andn", "or", "blend",
        ]
        .iter()
        .any(|name| code.starts_with(name) && (code.ends_with("ps") || code.ends_with("pd")));
        let integer = [
            "padd", "psub", "pmul", "pmin", "pmax", "pcmp", "pand", "por", "pblend", "psll",
            "psrl", "psra", "ptern",
        ]
        .iter()
        .any(|name| code.starts_with(name));
        (float || integer || self.is_fused()) && self.width() > 0
    }

    fn is_fused(&self) -> bool {
        ["vfmadd", "vfmsub", "vfnmadd", "vfnmsub"]
            .iter()
            .any(|name| self.code.starts_with(name))
    }

    /// Returns the width in bits of the widest vector register among the operands; 0 if there is
    /// none.
    fn width(&self) -> u32 {
        match &self.operands {
            o if o.contains("%zmm") || o.contains("zmm") => 512,
            o if o.contains("ymm") => 256,
            o if o.contains("xmm") => 128,
            _ => 0,
        }
    }
}

impl Code {
    /// Returns the loops as pairs of instruction indices: of the jump's target and of the jump.
    fn loops(&self) -> BTreeSet<(usize, usize)> {
        let Some(first) = self.instructions.first() else {
            return BTreeSet::new();
        };
        let index = |address: u64| {
            self.instructions
                .binary_search_by_key(&address, |i| i.address)
                .ok()
        };
        self.instructions
            .iter()
            .enumerate()
            .filter_map(|(end, instruction)| {
                let target = instruction.jump()?;
                let back = target >= first.address && target <= instruction.address;
                let start = back.then(|| index(target)).flatten()?;
                Some((start, end))
            })
            .collect()
    }

    /// Returns the loops that contain no other loop.
    fn innermost(&self) -> Vec<&[Instruction]> {
        let loops = self.loops();
        loops
            .iter()
            .filter(|(start, end)| {
                !loops
                    .iter()
                    .any(|(s, e)| (s, e) != (start, end) && s >= start && e <= end)
            })
            .map(|&(start, end)| &self.instructions[start..=end])
            .collect()
    }

    /// Returns the width in bits of the widest register that the hot loop computes with.
    fn hot_width(&self) -> Option<u32> {
        let hot = self.hot_loop()?;
        hot.iter().map(|code| code.width()).max()
    }

    /// Returns the packed instructions of the hot loop, excluding those of its inner loops.
    fn hot_loop(&self) -> Option<Vec<&Instruction>> {
        let loops = self.loops();
        let mut own: BTreeMap<(usize, usize), Vec<&Instruction>> = BTreeMap::new();
        for (index, instruction) in self.instructions.iter().enumerate() {
            if !instruction.is_packed() {
                continue;
            }
            let nearest = loops
                .iter()
                .filter(|(start, end)| (*start..=*end).contains(&index))
                .min_by_key(|(start, end)| end - start);
            if let Some(&nearest) = nearest {
                own.entry(nearest).or_default().push(instruction);
            }
        }
        own.into_values()
            .max_by_key(|body| body.iter().map(|code| code.width()).sum::<u32>())
    }
}

fn is_out_of_line(symbol: &str) -> bool {
    OUT_OF_LINE.iter().any(|part| symbol.contains(part))
}

fn packed(body: &[Instruction]) -> usize {
    body.iter()
        .filter(|instruction| instruction.is_packed())
        .count()
}

/// Returns the kernel and the variant of a native entry, whose symbol begins with the name of the
/// crate; `None` for other symbols.
pub fn entry(symbol: &str) -> Option<(&str, &str)> {
    let (kernel, variant) = symbol.rsplit_once("__")?;
    let kernel = kernel.split_once("__").map_or(kernel, |(_, kernel)| kernel);
    ["baseline", "avx2", "avx512"]
        .contains(&variant)
        .then_some((kernel, variant))
}

/// Checks the native entries of `program`. `reductions` are name patterns of the kernels that
/// reduce. If empty, [`REDUCTIONS`] applies.
pub fn check(program: &Program, reductions: &[String]) -> Vec<Violation> {
    let mut out = Vec::new();
    for (symbol, code) in program {
        let Some((kernel, variant)) = entry(symbol) else {
            continue;
        };
        let width = match variant {
            "avx2" => 256,
            "avx512" => 512,
            _ => 0,
        };
        let mut add = |rule: &'static str, detail: String| {
            let name = format!("{kernel}__{variant}");
            out.push(Violation::new(rule, &name, detail));
        };
        let reduces = if reductions.is_empty() {
            REDUCTIONS.iter().any(|pattern| fits(pattern, kernel))
        } else {
            reductions.iter().any(|pattern| fits(pattern, kernel))
        };
        // A kernel that selects the type at run time calls one function per type and reduction, so
        // its packed loops may be in these functions.
        let callees = computing_callees(program, code);
        if reduces && width > 0 {
            match code.hot_width() {
                None if callees.is_empty() => {
                    add(WIDTH, "no loop with packed computation".to_owned());
                }
                Some(widest) if widest < width => {
                    add(WIDTH, format!("its hot loop uses {widest} bits of {width}"));
                }
                _ => {}
            }
        }
        for body in code.innermost() {
            if packed(body) == 0 {
                continue;
            }
            for call in body.iter().filter(|instruction| instruction.is_call()) {
                let callee = call.symbol().unwrap_or("*");
                if !is_out_of_line(callee) && !["memcpy", "memmove", "memset"].contains(&callee) {
                    add(CALLS, format!("its hot loop calls {callee}"));
                }
            }
        }
        if width > 0 {
            for (callee, widest) in callees {
                if widest < width {
                    add(
                        CALLS,
                        format!("{callee} computes with {widest} bits of {width}"),
                    );
                }
            }
        }
        for fused in code
            .instructions
            .iter()
            .filter(|instruction| instruction.is_fused())
        {
            add(FUSED, format!("{} {}", fused.code, fused.operands));
        }
    }
    out
}

/// Returns the functions that an entry calls, directly or indirectly, and that contain loops of
/// packed arithmetic. Maps each function to the width in bits of the widest register in its hot
/// loop.
fn computing_callees<'a>(program: &'a Program, entry: &'a Code) -> BTreeMap<&'a str, u32> {
    let calls = |code: &'a Code| {
        code.instructions
            .iter()
            .filter(|instruction| instruction.is_call() || instruction.code == "jmp")
            .filter_map(Instruction::symbol)
    };
    let mut seen: BTreeSet<&str> = BTreeSet::new();
    let mut open: Vec<&str> = calls(entry).collect();
    let mut out = BTreeMap::new();
    while let Some(symbol) = open.pop() {
        let ours = !["core", "std", "alloc"]
            .iter()
            .any(|crate_name| symbol.contains(&format!("{}{crate_name}", crate_name.len())));
        // Ignores the standard library, which kernels call only to panic, and libc, which they call
        // only to copy.
        let mangled = symbol.starts_with("_R") || symbol.starts_with("_ZN");
        if !ours || !mangled || is_out_of_line(symbol) || !seen.insert(symbol) {
            continue;
        }
        let Some(code) = program.get(symbol) else {
            continue;
        };
        if let Some(width) = code.hot_width() {
            out.insert(symbol, width);
        }
        open.extend(calls(code));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
0000000000001000 <k_reduce__avx512>:
    1000:\tvmovups (%rdi),%ymm0
    1004:\tvaddps (%rsi),%ymm0,%ymm0
    1008:\tcall   2000 <helper>
    100d:\tjne    1004 <k_reduce__avx512+0x4>
    100f:\tret

0000000000002000 <helper>:
    2000:\tret
";

    #[test]
    fn width_and_calls() {
        let found = check(&parse(TEXT, &BTreeMap::new()), &[]);
        let rules: Vec<_> = found.iter().map(|violation| violation.rule).collect();
        assert_eq!(rules, [WIDTH, CALLS], "{found:?}");
        let request = TEXT.replace("helper", "_ZN15fusewire_device3net8Requests6append17h0E");
        let found = check(&parse(&request, &BTreeMap::new()), &[]);
        let rules: Vec<_> = found.iter().map(|violation| violation.rule).collect();
        assert_eq!(rules, [WIDTH], "{found:?}");
    }

    const SLOTS: &str = "
000000000023b000 R_X86_64_RELATIVE  *ABS*+0x0000000000002000
000000000023b008 R_X86_64_GLOB_DAT  memcpy@GLIBC_2.14
";

    fn through_a_slot(register: &str, function: &str) -> Vec<Violation> {
        let text = format!(
            "
0000000000001000 <k_reduce__avx512>:
    1000:\tcall   *0x10(%rip)        # 23b000 <_DYNAMIC+0xa40>
    1008:\tret

0000000000002000 <{function}>:
    2000:\tvaddps (%rsi),{register},{register}
    2004:\tjne    2000 <{function}>
    2008:\tret
"
        );
        check(&parse(&text, &relocations(SLOTS)), &[])
    }

    #[test]
    fn calls_through_slots_are_followed() {
        const COMPUTES: &str = "_ZN6kernel4rare17h0E";
        assert_eq!(through_a_slot("%zmm0", COMPUTES).len(), 0);
        let narrow = through_a_slot("%ymm0", COMPUTES);
        let rules: Vec<_> = narrow.iter().map(|violation| violation.rule).collect();
        assert_eq!(rules, [CALLS], "{narrow:?}");
        const OUT_OF_LINE: &str = "_ZN15fusewire_device6window5words7lagging17h0E";
        // The entry has no other function that computes.
        let ignored = through_a_slot("%xmm0", OUT_OF_LINE);
        let rules: Vec<_> = ignored.iter().map(|violation| violation.rule).collect();
        assert_eq!(rules, [WIDTH], "{ignored:?}");
    }
}
