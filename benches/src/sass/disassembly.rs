//! Parses the output of nvdisasm: kernels, their instructions and innermost loops.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};

/// The kernels of a cubin.
#[derive(Debug, Default)]
pub(super) struct Code {
    kernels: BTreeMap<String, Vec<Line>>,
}

#[derive(Debug, PartialEq, Eq)]
enum Line {
    Label(String),
    Instruction(Instruction),
}

#[derive(Debug, PartialEq, Eq)]
struct Instruction {
    /// Guard predicate: `P0`, `!P0` or empty.
    guard: String,
    /// Opcode with modifiers: `LDG.E.128`.
    name: String,
    operands: String,
}

/// Instruction counts of an innermost loop.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Loop {
    pub(super) instructions: usize,
    /// Maximum number of 16-byte loads per iteration, over all values of the guards.
    pub(super) loads: usize,
    /// Maximum number of 16-byte stores per iteration, over all values of the guards.
    pub(super) stores: usize,
    /// Number of 16-byte loads before the first use of one of their results.
    pub(super) in_flight: usize,
    pub(super) integer: usize,
    pub(super) float: usize,
    pub(super) shared: usize,
    pub(super) branch: usize,
}

impl Loop {
    /// Returns the number of 16-byte vectors that an iteration moves.
    pub(super) fn moved(&self) -> usize {
        self.loads + self.stores
    }
}

impl Code {
    pub(super) fn parse(text: &str) -> Self {
        let mut code = Self::default();
        let mut kernel: Option<&mut Vec<Line>> = None;
        for line in text.lines() {
            if let Some(name) = line
                .strip_prefix(".text.")
                .and_then(|rest| rest.strip_suffix(':'))
            {
                kernel = Some(code.kernels.entry(name.to_owned()).or_default());
            } else if line.trim_start().starts_with(".section") {
                kernel = None;
            } else if let Some(lines) = kernel.as_deref_mut() {
                lines.extend(Line::parse(line));
            }
        }
        code
    }

    fn lines(&self, kernel: &str) -> Result<&[Line]> {
        let lines = self.kernels.get(kernel);
        lines
            .map(Vec::as_slice)
            .with_context(|| format!("there is no kernel {kernel} in the machine code"))
    }

    /// Returns the number of instructions of `kernel`, or 0 if it does not exist.
    pub(super) fn length(&self, kernel: &str) -> usize {
        self.lines(kernel)
            .map_or(0, |lines| instructions(lines).count())
    }

    /// Returns the innermost loops of `kernel` that load or store 16 bytes at a time.
    pub(super) fn data_loops(&self, kernel: &str) -> Result<Vec<Loop>> {
        let lines = self.lines(kernel)?;
        let labels: BTreeMap<&str, usize> = lines
            .iter()
            .enumerate()
            .filter_map(|(at, line)| match line {
                Line::Label(name) => Some((name.as_str(), at)),
                Line::Instruction(_) => None,
            })
            .collect();
        // A loop spans from a label to the branch back to it.
        let spans: Vec<(usize, usize)> = lines
            .iter()
            .enumerate()
            .filter_map(|(at, line)| match line {
                Line::Instruction(instruction) => {
                    let first = *labels.get(instruction.target()?)?;
                    (first < at).then_some((first, at))
                }
                Line::Label(_) => None,
            })
            .collect();
        let inside = |a: (usize, usize), b: (usize, usize)| a != b && b.0 <= a.0 && a.1 <= b.1;
        Ok(spans
            .iter()
            .filter(|outer| !spans.iter().any(|inner| inside(*inner, **outer)))
            .map(|(first, last)| Loop::of(&lines[*first..=*last]))
            .filter(|found| found.moved() > 0)
            .collect())
    }
}

fn instructions(lines: &[Line]) -> impl Iterator<Item = &Instruction> {
    lines.iter().filter_map(|line| match line {
        Line::Instruction(instruction) => Some(instruction),
        Line::Label(_) => None,
    })
}

impl Line {
    fn parse(line: &str) -> Option<Self> {
        if let Some(label) = line.trim_end().strip_suffix(':') {
            return label
                .starts_with(".L_")
                .then(|| Self::Label(label.to_owned()));
        }
        // `/*0120*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;`
        let (_, text) = line.split_once("*/")?;
        let text = text.split(';').next()?.trim();
        let (guard, text) = match text.strip_prefix('@') {
            Some(rest) => rest.split_once(' ')?,
            None => ("", text),
        };
        let text = text.trim_start();
        let (name, operands) = text.split_once(' ').unwrap_or((text, ""));
        let known = name.starts_with(|first: char| first.is_ascii_uppercase());
        known.then(|| {
            Self::Instruction(Instruction {
                guard: guard.to_owned(),
                name: name.to_owned(),
                operands: operands.trim().to_owned(),
            })
        })
    }
}

impl Instruction {
    /// Returns the target label of a branch.
    fn target(&self) -> Option<&str> {
        if !self.name.starts_with("BRA") {
            return None;
        }
        self.operands.split_once("`(")?.1.split(')').next()
    }

    fn is(&self, names: &[&str]) -> bool {
        let base = self.name.split('.').next().unwrap_or_default();
        names.contains(&base)
    }

    fn is_wide(&self) -> bool {
        self.name.split('.').any(|part| part == "128")
    }

    fn registers(operands: &str) -> impl Iterator<Item = u32> {
        operands
            .split(|character: char| !character.is_ascii_alphanumeric())
            .filter_map(|word| word.strip_prefix('R')?.parse().ok())
    }
}

const LOADS: [&str; 2] = ["LDG", "LD"];
const STORES: [&str; 2] = ["STG", "ST"];
const FLOATS: [&str; 11] = [
    "FADD", "FMUL", "FFMA", "FMNMX", "HADD2", "HFMA2", "HMUL2", "HMNMX2", "F2F", "F2FP", "MUFU",
];
const SHARED: [&str; 5] = ["LDS", "STS", "LDC", "ULDC", "LDCU"];
const BRANCHES: [&str; 7] = ["BRA", "EXIT", "BSSY", "BSYNC", "WARPSYNC", "BAR", "CALL"];

impl Loop {
    fn of(lines: &[Line]) -> Self {
        let mut found = Self::default();
        let mut loads = GuardCounts::default();
        let mut stores = GuardCounts::default();
        let mut pending = BTreeSet::new();
        let mut needed = false;
        for instruction in instructions(lines) {
            found.instructions += 1;
            needed |= Instruction::registers(&instruction.operands)
                .any(|register| pending.contains(&register) && !instruction.is(&LOADS));
            if instruction.is(&LOADS) || instruction.is(&STORES) {
                if instruction.is_wide() && instruction.is(&LOADS) {
                    loads.add(&instruction.guard);
                    if !needed {
                        let first = Instruction::registers(&instruction.operands).next();
                        pending.extend(first.into_iter().flat_map(|first| first..first + 4));
                        found.in_flight = loads.count();
                    }
                } else if instruction.is_wide() {
                    stores.add(&instruction.guard);
                }
            } else if instruction.is(&FLOATS) {
                found.float += 1;
            } else if instruction.is(&SHARED) {
                found.shared += 1;
            } else if instruction.is(&BRANCHES) {
                found.branch += 1;
            } else {
                found.integer += 1;
            }
        }
        (found.loads, found.stores) = (loads.count(), stores.count());
        found
    }
}

/// Counts instructions by guard. Either the instructions under `@P0` or those under `@!P0` are
/// executed, never both.
#[derive(Debug, Default)]
struct GuardCounts(BTreeMap<String, [usize; 2]>);

impl GuardCounts {
    fn add(&mut self, guard: &str) {
        let (negated, name) = match guard.strip_prefix('!') {
            Some(name) => (1, name),
            None => (0, guard),
        };
        self.0.entry(name.to_owned()).or_default()[negated] += 1;
    }

    fn count(&self) -> usize {
        self.0.values().map(|[on, off]| on.max(off)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "
.text.sum:
        /*0000*/                   S2R R0, SR_TID.X ;
.L_x_1:
.L_x_0:
        /*0010*/              @P0  LDG.E.NA.128 R4, desc[UR4][R2.64] ;
        /*0020*/             @!P0  LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0040*/                   IMAD.U32 R12, R5, 0x10000, RZ ;
        /*0050*/                   FADD R13, R12, R9 ;
        /*0060*/                   LDG.E.128 R16, desc[UR4][R2.64+0x20] ;
        /*0070*/                   STG.E.128 desc[UR4][R20.64], R8 ;
        /*0080*/              @P1  BRA `(.L_x_0) ;
        /*0090*/                   LDS.64 R2, [R3] ;
        /*00a0*/              @P2  BRA `(.L_x_1) ;
.L_x_2:
        /*00b0*/                   LDG.E.64 R2, desc[UR4][R2.64] ;
        /*00c0*/              @P2  BRA `(.L_x_2) ;
        /*00d0*/                   EXIT ;
.section .nv.info
        /*0000*/ .byte 0x04
.text.other:
        /*0000*/                   EXIT ;
";

    #[test]
    fn loops_are_found_and_counted() {
        let code = Code::parse(TEXT);
        assert_eq!((code.length("sum"), code.length("other")), (14, 1));
        // The outer loop and the loop that moves 8 bytes are excluded.
        let loops = code.data_loops("sum").expect("the kernel");
        let expected = Loop {
            instructions: 8,
            loads: 3,
            stores: 1,
            in_flight: 2,
            integer: 1,
            float: 1,
            shared: 0,
            branch: 1,
        };
        assert_eq!(loops, [expected]);
        assert_eq!(code.data_loops("other").expect("the kernel"), []);
        let error = code.data_loops("absent").expect_err("no kernel");
        assert!(error.to_string().contains("absent"), "{error}");
    }
}
