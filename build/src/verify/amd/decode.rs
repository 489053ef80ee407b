//! Meaning of the instructions for the checks of AMD images.

use core::ops::Range;

use crate::Target;
use crate::text::disassembly::Instruction;

/// Number of registers that [`registers`] distinguishes: SGPRs from 0, VGPRs from 128, AGPRs from
/// 384.
pub(super) const REGISTERS: usize = 640;
const VCC: u16 = 106;

/// Scope of an access or of a cache operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scope {
    #[default]
    None,
    Block,
    Agent,
    System,
}

/// Kind of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Other,
    Load,
    Store,
    /// Atomic read-modify-write.
    Rmw,
    /// Access to LDS.
    Lds,
    /// Scalar load, or read of a clock.
    Scalar,
    /// `s_waitcnt`, with the greatest permitted number of outstanding accesses per counter.
    Wait {
        vm: Option<u8>,
        lgkm: Option<u8>,
    },
    WriteBack,
    /// On gfx90a, an invalidation at system scope consists of `buffer_invl2` and
    /// `buffer_wbinvl1_vol`.
    Invalidate,
    Barrier,
    Sleep,
}

/// A decoded instruction.
#[derive(Clone, Debug)]
pub(super) struct Op {
    pub(super) kind: Kind,
    pub(super) scope: Scope,
    /// A flat access increments both counters and completes out of order.
    pub(super) flat: bool,
    /// Register that receives the result of an access.
    pub(super) result: Option<Range<u16>>,
    /// All registers of the instruction.
    pub(super) registers: Vec<Range<u16>>,
}

impl Op {
    /// Returns `true` for accesses that the counter vmcnt counts.
    pub(super) fn is_vector(&self) -> bool {
        matches!(self.kind, Kind::Load | Kind::Store | Kind::Rmw)
    }

    /// Returns `true` at system scope.
    pub(super) fn is_strong(&self) -> bool {
        self.scope == Scope::System
    }

    /// Returns `true` for accesses that write global memory.
    pub(super) fn writes(&self) -> bool {
        matches!(self.kind, Kind::Store | Kind::Rmw)
    }
}

/// Decodes an instruction for `target`.
pub(super) fn decode(target: Target, instruction: &Instruction) -> Op {
    let code = instruction.code.as_str();
    let kind = kind(instruction);
    let registers = registers(&instruction.operands);
    let returns = match kind {
        Kind::Load | Kind::Scalar => true,
        Kind::Rmw => instruction.has("glc") || instruction.has("sc0"),
        Kind::Lds => {
            code.starts_with("ds_read") || code.contains("_rtn") || code.contains("permute")
        }
        _ => false,
    };
    Op {
        kind,
        scope: scope(target, kind, instruction),
        flat: code.starts_with("flat_"),
        result: registers.first().filter(|_| returns).cloned(),
        registers,
    }
}

fn kind(instruction: &Instruction) -> Kind {
    let code = instruction.code.as_str();
    let starts = |prefixes: &[&str]| prefixes.iter().any(|prefix| code.starts_with(prefix));
    match code {
        "s_waitcnt" => Kind::Wait {
            vm: limit(&instruction.operands, "vmcnt("),
            lgkm: limit(&instruction.operands, "lgkmcnt("),
        },
        "s_barrier" => Kind::Barrier,
        "s_sleep" => Kind::Sleep,
        "buffer_wbl2" => Kind::WriteBack,
        "buffer_inv" | "buffer_invl2" | "buffer_wbinvl1_vol" => Kind::Invalidate,
        _ if starts(&["ds_"]) => Kind::Lds,
        _ if starts(&["s_load", "s_buffer_load", "s_mem"]) => Kind::Scalar,
        _ if !starts(&["global_", "flat_", "buffer_", "scratch_"]) => Kind::Other,
        _ if code.contains("_load") => Kind::Load,
        _ if code.contains("_store") => Kind::Store,
        _ => Kind::Rmw,
    }
}

/// Returns the scope that the modifiers select. The tables "AMDHSA Memory Model Code Sequences" of
/// gfx90a and gfx942 in LLVM's *User Guide for AMDGPU Backend* define them. On gfx90a, a load has
/// `glc` at agent scope and at system scope, and neither a store nor an atomic names its scope: the
/// library's compare-and-swaps have system scope, and its other atomics agent scope.
fn scope(target: Target, kind: Kind, instruction: &Instruction) -> Scope {
    let has = |word| instruction.has(word);
    match (target, kind) {
        (Target::Gfx942, Kind::Rmw) if has("sc1") => Scope::System,
        (Target::Gfx942, Kind::Rmw) => Scope::Agent,
        (Target::Gfx942, _) => match (has("sc0"), has("sc1")) {
            (true, true) => Scope::System,
            (false, true) => Scope::Agent,
            (true, false) => Scope::Block,
            _ => Scope::None,
        },
        // `glc slc` is a non-temporal load.
        (_, Kind::Load) if has("glc") && !has("slc") => Scope::System,
        (_, Kind::Rmw) if !instruction.code.contains("_cmpswap") => Scope::Agent,
        (_, Kind::Rmw | Kind::WriteBack) => Scope::System,
        (_, Kind::Invalidate) if instruction.code == "buffer_invl2" => Scope::System,
        (_, Kind::Invalidate) => Scope::Agent,
        _ => Scope::None,
    }
}

fn limit(operands: &str, name: &str) -> Option<u8> {
    let (_, rest) = operands.split_once(name)?;
    rest.split(')').next()?.parse().ok()
}

/// Returns the registers in a list of operands.
fn registers(operands: &str) -> Vec<Range<u16>> {
    let words = operands.split([',', ' ', '|', '-', '(', ')']);
    words.filter_map(register).collect()
}

fn register(word: &str) -> Option<Range<u16>> {
    let base = match word.bytes().next()? {
        _ if word == "vcc" => return Some(VCC..VCC + 2),
        _ if word == "vcc_lo" => return Some(VCC..VCC + 1),
        _ if word == "vcc_hi" => return Some(VCC + 1..VCC + 2),
        b's' => 0,
        b'v' => 128,
        b'a' => 384,
        _ => return None,
    };
    let numbers = word[1..].trim_matches(['[', ']']);
    let (first, last) = numbers.split_once(':').unwrap_or((numbers, numbers));
    let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
    (last < 256).then(|| base + first..base + last + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_of_operands() {
        let text = "v[4:5], -|s3|, vcc, a[0:1], src_shared_base, 0x5d, off sc0 offset:8";
        assert_eq!(registers(text), [132..134, 3..4, 106..108, 384..386]);
    }

    #[test]
    fn scopes_depend_on_the_target() {
        let scope = |target, code: &str, operands: &str| {
            let (code, operands) = (code.to_owned(), operands.to_owned());
            let instruction = Instruction {
                code,
                operands,
                ..Instruction::default()
            };
            decode(target, &instruction).scope
        };
        let (old, new, load) = (Target::Gfx90a, Target::Gfx942, "global_load_dword");
        assert_eq!(scope(new, load, "v1, v[2:3], off sc0 sc1"), Scope::System);
        assert_eq!(
            scope(new, "global_atomic_swap", "v0, v2, v[4:5], off sc0"),
            Scope::Agent
        );
        assert_eq!(
            scope(old, "global_atomic_cmpswap", "v[0:1], v[4:5], off"),
            Scope::System
        );
        assert_eq!(scope(old, load, "v1, v[2:3], off glc slc"), Scope::None);
    }
}
