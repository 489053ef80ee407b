//! Rule for the size of kernels.

use super::{Violation, kernel};
use crate::host::GRID_SUFFIX;
use crate::project::fits;
use crate::{Image, Vendor};

pub(super) const BUDGET: &str = "budget";

/// Finds kernels with more PTX instructions or registers than their crate's manifest states, and,
/// if the manifest states any budget, kernels without one. Instructions of functions that are
/// not inlined do not count, because no hot path contains them. Grid forms have no budget, because
/// only tests run them.
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
    }
    out
}
