//! Keeps `ptxas` from unrolling loops.
//!
//! `ptxas` unrolls every loop that it can, those of failure handling included, which multiplies the
//! size of a kernel and the time that a driver takes to compile it. The kernels batch their loads
//! in the source, so they do not rely on unrolling. The pragma `nounroll` in the block that begins
//! with the label of a loop disables it for that loop.

use std::collections::{HashMap, HashSet};

const PRAGMA: &str = "\t.pragma \"nounroll\";\n";

/// Inserts the pragma after every label to which a later line branches. Not all of them are heads
/// of loops; elsewhere, the pragma has no effect. Labels of PTX by llc are unique in a file.
pub(crate) fn forbid(ptx: &str) -> String {
    let labels: HashMap<&str, usize> = ptx
        .lines()
        .enumerate()
        .filter_map(|(row, line)| Some((label(line)?, row)))
        .collect();
    let heads: HashSet<&str> = ptx
        .lines()
        .enumerate()
        .filter_map(|(row, line)| Some((branch(line)?, row)))
        .filter(|(target, row)| labels.get(target).is_some_and(|at| at < row))
        .map(|(target, _)| target)
        .collect();
    let mut out = String::with_capacity(ptx.len() + heads.len() * PRAGMA.len());
    for line in ptx.lines() {
        out.push_str(line);
        out.push('\n');
        if label(line).is_some_and(|label| heads.contains(label)) {
            out.push_str(PRAGMA);
        }
    }
    out
}

/// Returns the label that the line declares.
fn label(line: &str) -> Option<&str> {
    let (label, _) = line.split_once(':')?;
    label.starts_with("$L_").then_some(label)
}

/// Returns the label to which the line branches.
fn branch(line: &str) -> Option<&str> {
    let (before, target) = line.trim_end().strip_suffix(';')?.rsplit_once('\t')?;
    let code = before.split_whitespace().last()?;
    ["bra", "bra.uni"].contains(&code).then_some(target)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_heads_of_loops_get_the_pragma() {
        let ptx = "$L__BB0_1:\n\tadd.s32 \t%r1, %r1, 1;\n\t@%p1 bra \t$L__BB0_1;\n\
                   \tbra.uni \t$L__BB0_2;\n$L__BB0_2:\n\tret;\n";
        let expected = ptx.replacen(":\n", ":\n\t.pragma \"nounroll\";\n", 1);
        assert_eq!(forbid(ptx), expected);
    }
}
