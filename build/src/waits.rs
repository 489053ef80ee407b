//! Inserts the `s_waitcnt` that LLVM 22 omits into the assembly of AMD kernels:
//!
//! - after a write-back, if no other access is outstanding (llvm/llvm-project#178316 fixes it in
//!   LLVM 23). Without it, a signal can become visible before the data that it publishes;
//! - in a fence in a loop, if the only outstanding accesses are of the previous iteration
//!   (llvm/llvm-project#220356). Such a fence ends with an invalidation or a barrier.
//!
//! Delete this module, and generate objects by llc again, when the tool chain's LLVM has both
//! fixes: [`crate::verify::amd`] then finds no violation in images that are built without it.

use crate::Target;
use crate::text::assembly::opcode;

/// The encoding of `buffer_wbl2` by llc for gfx90a. It has the bits sc0 and sc1, which select
/// system scope. The syntax of gfx90a has no names for them, and the assembler leaves them 0.
const WRITE_BACK_GFX90A: &str = "\t.long 0xe0a0c000, 0\n";

/// Inserts a wait for global memory after each write-back and before each invalidation, and a wait
/// for LDS before each barrier, unless there is one.
pub(crate) fn insert(assembly: &str) -> String {
    let mut out = String::with_capacity(assembly.len() + assembly.len() / 64);
    // The last instruction is a write-back.
    let mut written_back = false;
    // Waits for global memory and for LDS precede directly, or only cache operations are between.
    let (mut global, mut lds) = (false, false);
    for line in assembly.lines() {
        let code = line.split(';').next().unwrap_or_default().trim();
        let opcode = opcode(code);
        // A branch to a label skips the instructions before the label.
        if opcode.is_some() || code.ends_with(':') {
            let opcode = opcode.unwrap_or_default();
            let waits = |counter| opcode == "s_waitcnt" && code.contains(counter);
            let invalidates =
                ["buffer_inv", "buffer_invl2", "buffer_wbinvl1_vol"].contains(&opcode);
            if written_back && !waits("vmcnt(0)") || invalidates && !global {
                out.push_str("\ts_waitcnt vmcnt(0)\n");
                global = true;
            }
            if opcode == "s_barrier" && !lds {
                out.push_str("\ts_waitcnt lgkmcnt(0)\n");
            }
            written_back = opcode == "buffer_wbl2";
            let between = written_back || invalidates || opcode == "s_waitcnt";
            global = waits("vmcnt(0)") || global && between && !written_back;
            lds = waits("lgkmcnt(0)") || lds && between;
        }
        out.push_str(line);
        out.push('\n');
    }
    out
}

/// Returns `assembly` with instructions that the assembler encodes as llc does.
pub(crate) fn encodable(target: Target, assembly: &str) -> String {
    match target {
        Target::Gfx90a => assembly.replace("\tbuffer_wbl2\n", WRITE_BACK_GFX90A),
        _ => assembly.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_waits_are_inserted() {
        let before = "\
k:                                      ; @k
; %bb.0:
\tbuffer_wbl2 sc0 sc1
\tglobal_store_dword v[0:1], v2, off sc0 sc1
\tbuffer_wbl2 sc0 sc1
\ts_waitcnt lgkmcnt(0)
\ts_waitcnt vmcnt(0) lgkmcnt(0)
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\tbuffer_inv sc1
\tbuffer_wbl2 sc0 sc1
\tbuffer_inv sc0 sc1
\tbuffer_wbl2 sc0 sc1
.LBB0_2:
\tbuffer_invl2
\tbuffer_wbinvl1_vol
";
        let after = "\
k:                                      ; @k
; %bb.0:
\tbuffer_wbl2 sc0 sc1
\ts_waitcnt vmcnt(0)
\tglobal_store_dword v[0:1], v2, off sc0 sc1
\tbuffer_wbl2 sc0 sc1
\ts_waitcnt vmcnt(0)
\ts_waitcnt lgkmcnt(0)
\ts_waitcnt vmcnt(0) lgkmcnt(0)
.LBB0_1:                                ; =>This Inner Loop Header: Depth=1
\ts_waitcnt vmcnt(0)
\tbuffer_inv sc1
\tbuffer_wbl2 sc0 sc1
\ts_waitcnt vmcnt(0)
\tbuffer_inv sc0 sc1
\tbuffer_wbl2 sc0 sc1
\ts_waitcnt vmcnt(0)
.LBB0_2:
\ts_waitcnt vmcnt(0)
\tbuffer_invl2
\tbuffer_wbinvl1_vol
";
        assert_eq!(insert(before), after);
        assert_eq!(insert(after), after);
    }

    #[test]
    fn existing_waits_are_kept() {
        let complete = "\
\tbuffer_wbl2 sc0 sc1
\ts_waitcnt vmcnt(0) lgkmcnt(0)
\tglobal_load_dword v2, v[0:1], off sc0 sc1
\ts_waitcnt vmcnt(0)
\t.p2align 8
\tbuffer_inv sc0 sc1
";
        assert_eq!(insert(complete), complete);
    }
}
