//! Rule for the size and the latency of kernels.

use super::chains::{self, ENDLESS};
use super::{Violation, kernel};
use crate::host::GRID_SUFFIX;
use crate::project::fits;
use crate::{Image, Vendor};

pub(super) const BUDGET: &str = "budget";

/// Finds kernels with more PTX instructions, registers, dependent loads or alias fences than their
/// crate's manifest states, and, if the manifest states any budget, kernels without one.
/// Instructions of functions that are not inlined do not count, because no hot path contains them.
/// Grid forms have no budget, because only tests run them.
pub(super) fn budget(image: &Image) -> Vec<Violation> {
    let mut out = Vec::new();
    if image.target.vendor() != Vendor::Nvidia || image.budgets.is_empty() {
        return out;
    }
    for entry in image.entries().filter(|it| !it.name.ends_with(GRID_SUFFIX)) {
        let mut add = |detail: String| out.push(Violation::new(BUDGET, &entry.name, detail));
        let fitting = |pattern: &str| fits(pattern, kernel(&entry.name));
        let Some(budget) = image.budgets.iter().find(|it| fitting(&it.kernel)) else {
            add("the manifest states no budget for it".to_owned());
            continue;
        };
        let instructions = entry.instructions().count();
        if instructions > budget.instructions {
            let most = budget.instructions;
            add(format!("{instructions} PTX instructions; at most {most}"));
        }
        let used = image.kernels.iter().find(|it| it.name == entry.name);
        if let (Some(used), Some(most)) = (used.and_then(|it| it.resources), budget.registers)
            && used.registers > most
        {
            add(format!("{} registers; at most {most}", used.registers));
        }
        let ir = image.ir.iter().find(|it| it.name == entry.name);
        let loads = ir.map(chains::longest);
        if loads.is_none() && budget.dependent_loads.is_some() {
            add("its IR is missing, so that its loads cannot be counted".to_owned());
        }
        if let (Some(loads), Some(most)) = (loads, budget.dependent_loads)
            && loads > most
        {
            let or_more = if loads == ENDLESS { " or more" } else { "" };
            add(format!(
                "{loads}{or_more} loads, each from an address that the one before returned; at \
                 most {most}"
            ));
        }
        let is_fence = |code: &str| code.starts_with("fence.proxy.alias");
        let fences = entry.instructions().filter(|it| is_fence(it.0)).count();
        if fences > budget.alias_fences {
            let most = budget.alias_fences;
            add(format!("{fences} alias fences; at most {most}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::Kernel;
    use crate::project::Budget;
    use crate::text::assembly::Resources;
    use crate::text::ptx;

    /// Returns the findings for a kernel of two instructions and 40 registers.
    fn found(pattern: &str, instructions: usize, registers: Option<u32>) -> Vec<String> {
        let text = ".visible .entry k()\n{\n\tmov.u32 %r1, 0;\n\tret;\n}\n";
        let resources = Resources {
            registers: 40,
            ..Resources::default()
        };
        let image = Image {
            target: crate::Target::Sm90,
            functions: ptx::parse(text).expect("PTX"),
            ir: Vec::new(),
            assembly: String::new(),
            kernels: vec![Kernel {
                name: "k".to_owned(),
                resources: Some(resources),
            }],
            host: None,
            allow: Vec::new(),
            multicast: Vec::new(),
            budgets: vec![Budget {
                kernel: pattern.to_owned(),
                instructions,
                registers,
                dependent_loads: None,
                alias_fences: 0,
            }],
            files: Vec::new(),
            refused: None,
        };
        let found = budget(&image).into_iter();
        found.map(|violation| violation.detail).collect()
    }

    #[test]
    fn instructions_and_registers_are_limited() {
        assert!(found("k", 2, Some(40)).is_empty());
        assert_eq!(found("k", 1, None), ["2 PTX instructions; at most 1"]);
        assert_eq!(found("k", 2, Some(39)), ["40 registers; at most 39"]);
        assert_eq!(
            found("other", 2, None),
            ["the manifest states no budget for it"]
        );
    }
}
