//! Rules for block barriers.

use super::Violation;
use crate::divergence::divergent_blocks;
use crate::text::ir;
use crate::{Image, Vendor};

pub(super) const BARRIERS: &str = "barrier";

/// Finds barriers that only some lanes of a block may reach. Such a barrier hangs the block or
/// pairs with a different barrier. Also finds predicated barriers, kernels with more barriers in
/// the assembly than in the IR, and barriers in functions that are not inlined: only some lanes may
/// call these.
pub(super) fn barriers(image: &Image) -> Vec<Violation> {
    let mut out = Vec::new();
    for function in &image.ir {
        let before = function.instructions().filter(|line| in_ir(line)).count();
        if before > 0 && !function.kernel {
            let detail = "a barrier in a function that is not inlined".to_owned();
            out.push(Violation::new(BARRIERS, &function.name, detail));
        } else if before > 0 {
            let divergent = divergent_blocks(function);
            for (index, block) in function.blocks.iter().enumerate() {
                let Some(branch) = divergent.get(&index) else {
                    continue;
                };
                for line in block.instructions.iter().filter(|line| in_ir(line)) {
                    let (branch, taken_at) = ir::location(branch);
                    let branch: String = branch.chars().take(100).collect();
                    let mut violation = Violation::of_ir(BARRIERS, &function.name, line);
                    violation.detail = format!("{} after `{branch}`", violation.detail);
                    out.push(violation.at(taken_at));
                }
            }
        }
        let Some(assembly) = image
            .functions
            .iter()
            .find(|other| other.name == function.name)
        else {
            continue;
        };
        let mut after = 0;
        for (code, line, location) in assembly.located() {
            if in_assembly(code, image.target.vendor()) {
                after += 1;
                if line.starts_with('@') {
                    let detail = format!("predicated: {line}");
                    out.push(Violation::new(BARRIERS, &function.name, detail).at(location));
                }
            }
        }
        if after > before {
            let detail = format!("{before} barriers in the IR, {after} in the assembly");
            out.push(Violation::new(BARRIERS, &function.name, detail));
        }
    }
    out
}

fn in_ir(line: &str) -> bool {
    ir::callee(ir::split(line).1).is_some_and(|name| {
        name.starts_with("llvm.nvvm.barrier")
            || name.starts_with("llvm.nvvm.bar.sync")
            || name.starts_with("llvm.amdgcn.s.barrier")
    }) || line.contains(" asm ") && (line.contains("bar.sync") || line.contains("barrier.sync"))
}

fn in_assembly(code: &str, vendor: Vendor) -> bool {
    match vendor {
        Vendor::Amd => code == "s_barrier",
        Vendor::Nvidia => ["bar.sync", "bar.red", "bar.arrive", "bar.cta", "barrier."]
            .iter()
            .any(|prefix| code.starts_with(prefix)),
    }
}
