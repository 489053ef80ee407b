//! Finds the blocks of a kernel that only some lanes may reach.
//!
//! Performs a small divergence analysis of optimised LLVM IR, which is the same for both vendors. A
//! value is divergent if it is computed from the lane's index, an atomic, an acquire or volatile
//! load (lanes that poll may read different values), or another divergent value. A phi is also
//! divergent if the lanes of a divergent branch join in its block with different values. A load
//! from a uniform address is uniform, and so is the result of a vote. The blocks between a branch
//! on a divergent value and its reconvergence point are divergent code.

use std::collections::{HashMap, HashSet};

use crate::text::ir::{self, IrFunction};

/// Returns the index of each block that divergent lanes may enter, with the branch at which the
/// lanes diverge.
pub fn divergent_blocks(function: &IrFunction) -> HashMap<usize, String> {
    let flow = Flow::new(function);
    let computations = computations(function);
    let mut divergent: HashSet<&str> = HashSet::new();
    // Callers may pass divergent values to a function that is not a kernel.
    if !function.kernel {
        divergent.extend(function.parameters.iter().map(String::as_str));
    }
    // The blocks where the lanes of a divergent branch may join, and where they come from.
    let mut joins: HashMap<usize, Vec<HashSet<&str>>> = HashMap::new();
    let mut regions: HashMap<usize, String> = HashMap::new();
    let mut branches: HashSet<usize> = HashSet::new();
    loop {
        let mut changed = false;
        for (index, block) in function.blocks.iter().enumerate() {
            for instruction in &block.instructions {
                let (result, operation) = ir::split(instruction);
                if !result.is_empty()
                    && !divergent.contains(result)
                    && is_divergent(operation, &divergent, &computations, joins.get(&index))
                {
                    divergent.insert(result);
                    changed = true;
                }
            }
            let Some(last) = block.instructions.last() else {
                continue;
            };
            if branches.contains(&index)
                || flow.live_successors(index).len() < 2
                || !condition(last).is_some_and(|name| divergent.contains(name))
            {
                continue;
            }
            branches.insert(index);
            changed = true;
            let end = flow.reconvergence_point(index);
            let reached: Vec<HashSet<usize>> = flow
                .live_successors(index)
                .iter()
                .map(|&next| flow.until(next, end))
                .collect();
            let from: HashSet<&str> = reached
                .iter()
                .flatten()
                .chain([&index])
                .map(|&block| function.blocks[block].label.as_str())
                .collect();
            let mut join = |block| {
                joins.entry(block).or_default().push(from.clone());
            };
            for (way, blocks) in reached.iter().enumerate() {
                for &inside in blocks {
                    regions.entry(inside).or_insert_with(|| last.clone());
                    if reached
                        .iter()
                        .skip(way + 1)
                        .any(|other| other.contains(&inside))
                    {
                        join(inside);
                    }
                }
            }
            end.into_iter().for_each(join);
        }
        if !changed {
            return regions;
        }
    }
}

/// Returns the operations of values that depend on nothing but their operands. Two values with the
/// same operation are equal. The optimiser computes a value again on each side of a branch if one
/// side needs it early.
fn computations(function: &IrFunction) -> HashMap<&str, &str> {
    const PURE: [&str; 9] = [
        "zext ", "sext ", "trunc ", "add ", "sub ", "mul ", "shl ", "lshr ", "and ",
    ];
    let instructions = function.blocks.iter().flat_map(|block| &block.instructions);
    instructions
        .map(|instruction| ir::split(ir::location(instruction).0))
        .filter(|(_, operation)| PURE.iter().any(|pure| operation.starts_with(pure)))
        .collect()
}

/// Returns the value that a conditional terminator tests.
fn condition(terminator: &str) -> Option<&str> {
    let conditional = terminator.starts_with("br i1 ") || terminator.starts_with("switch ");
    conditional.then(|| ir::names(terminator).next()).flatten()
}

fn is_divergent(
    operation: &str,
    divergent: &HashSet<&str>,
    computations: &HashMap<&str, &str>,
    joins: Option<&Vec<HashSet<&str>>>,
) -> bool {
    let by_operand = || ir::names(operation).any(|name| divergent.contains(name));
    if operation.starts_with("phi ") {
        let mut joins = joins.into_iter().flatten();
        return joins.any(|from| !is_one_value(operation, computations, from)) || by_operand();
    }
    if operation.starts_with("atomicrmw ") || operation.starts_with("cmpxchg ") {
        return true;
    }
    if let Some(rest) = operation.strip_prefix("load ") {
        return rest.starts_with("volatile ")
            || rest.starts_with("atomic ") && rest.contains(" acquire")
            || by_operand();
    }
    if operation.contains(" asm ") {
        return [
            "acquire", "atom.", "volatile", "%tid", "%laneid", "timer", "clock",
        ]
        .iter()
        .any(|word| operation.contains(word))
            || by_operand();
    }
    if let Some(name) = ir::callee(operation) {
        const LANE: [&str; 7] = [
            "sreg.tid",
            "sreg.laneid",
            "workitem.id",
            "mbcnt",
            "memrealtime",
            "memtime",
            "globaltimer",
        ];
        const VOTE: [&str; 7] = [
            "barrier.cta.red",
            "barrier0",
            "vote.",
            "amdgcn.ballot",
            "readfirstlane",
            "readlane",
            "match.all",
        ];
        if LANE.iter().any(|part| name.contains(part)) {
            return true;
        }
        if VOTE.iter().any(|part| name.contains(part)) {
            return false;
        }
        if !name.starts_with("llvm.") {
            return true; // a function that was not inlined
        }
    }
    by_operand()
}

/// Returns `true` if a phi has the same value for all lanes that come from the blocks `from`.
/// `undef` counts as equal to any value.
fn is_one_value(phi: &str, computations: &HashMap<&str, &str>, from: &HashSet<&str>) -> bool {
    let mut values = phi
        .split("[ ")
        .skip(1)
        .filter_map(|way| way.split(" ]").next()?.rsplit_once(", %"))
        .filter(|(value, label)| {
            from.contains(label.trim_matches('"')) && !matches!(*value, "undef" | "poison")
        })
        .map(|(value, _)| {
            let name = value.strip_prefix('%').map(|name| name.trim_matches('"'));
            let computed = name.and_then(|name| computations.get(name));
            computed.copied().unwrap_or(value)
        });
    let first = values.next();
    values.all(|value| Some(value) == first)
}

/// Control-flow graph without the blocks from which no return is reachable. A lane that enters such
/// a block traps and stops the grid.
struct Flow<'a> {
    function: &'a IrFunction,
    live: Vec<bool>,
    /// Immediate post-dominator of each block: the nearest block on all its paths to a return.
    /// `None` stands for the virtual exit after every return.
    post: Vec<Option<usize>>,
}

impl<'a> Flow<'a> {
    fn new(function: &'a IrFunction) -> Self {
        let count = function.blocks.len();
        let mut predecessors = vec![Vec::new(); count];
        for (index, block) in function.blocks.iter().enumerate() {
            for &next in &block.successors {
                predecessors[next].push(index);
            }
        }
        let returns: Vec<usize> = (0..count)
            .filter(|&index| {
                function.blocks[index]
                    .instructions
                    .last()
                    .is_some_and(|i| i.starts_with("ret"))
            })
            .collect();
        let mut live = vec![false; count];
        // Blocks in postorder of a depth-first search from the returns. Reversed below.
        let mut order = Vec::new();
        let mut open: Vec<(usize, usize)> = Vec::new();
        for &start in &returns {
            if live[start] {
                continue;
            }
            live[start] = true;
            open.push((start, 0));
            while let Some((block, next)) = open.pop() {
                match predecessors[block].get(next) {
                    Some(&before) => {
                        open.push((block, next + 1));
                        if !live[before] {
                            live[before] = true;
                            open.push((before, 0));
                        }
                    }
                    None => order.push(block),
                }
            }
        }
        order.reverse();
        let post = post_dominators(function, &live, &order, &returns);
        Self {
            function,
            live,
            post,
        }
    }

    fn live_successors(&self, block: usize) -> Vec<usize> {
        let mut out: Vec<usize> = Vec::new();
        for &next in &self.function.blocks[block].successors {
            if self.live[next] && !out.contains(&next) {
                out.push(next);
            }
        }
        out
    }

    fn reconvergence_point(&self, block: usize) -> Option<usize> {
        self.post[block]
    }

    /// Returns the blocks that can be reached from `start` without entering `end`.
    fn until(&self, start: usize, end: Option<usize>) -> HashSet<usize> {
        let mut reached = HashSet::new();
        let mut open = vec![start];
        while let Some(block) = open.pop() {
            if Some(block) != end && self.live[block] && reached.insert(block) {
                open.extend(self.live_successors(block));
            }
        }
        reached
    }
}

/// Computes the nearest post-dominators, by the algorithm of Cooper, Harvey and Kennedy ("A Simple,
/// Fast Dominance Algorithm") on the reversed graph with one virtual exit.
fn post_dominators(
    function: &IrFunction,
    live: &[bool],
    order: &[usize],
    returns: &[usize],
) -> Vec<Option<usize>> {
    let count = function.blocks.len();
    let end = count;
    let mut rank = vec![usize::MAX; count + 1];
    rank[end] = 0;
    for (position, &block) in order.iter().enumerate() {
        rank[block] = position + 1;
    }
    let mut nearest = vec![None; count + 1];
    nearest[end] = Some(end);
    let mut changed = true;
    while changed {
        changed = false;
        for &block in order {
            let mut new: Option<usize> = None;
            let virtual_end = returns.contains(&block).then_some(end);
            let next = function.blocks[block].successors.iter().copied();
            for next in next.filter(|&next| live[next]).chain(virtual_end) {
                if nearest[next].is_none() {
                    continue;
                }
                new = Some(match new {
                    None => next,
                    Some(mut other) => {
                        let mut this = next;
                        while this != other {
                            while rank[this] > rank[other] {
                                this = nearest[this].unwrap_or(end);
                            }
                            while rank[other] > rank[this] {
                                other = nearest[other].unwrap_or(end);
                            }
                        }
                        this
                    }
                });
            }
            if new.is_some() && nearest[block] != new {
                nearest[block] = new;
                changed = true;
            }
        }
    }
    nearest
        .into_iter()
        .take(count)
        .map(|block| block.filter(|&block| block != end))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Vendor;

    fn regions(text: &str) -> HashMap<usize, String> {
        divergent_blocks(&ir::parse(text, Vendor::Nvidia)[0])
    }

    #[test]
    fn a_branch_on_the_lane_diverges_until_its_paths_join() {
        let inside = regions(
            "define ptx_kernel void @k(i32 %n) {\n\
             start:\n\
             \x20 %t = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x()\n\
             \x20 %c = icmp eq i32 %t, 0\n\
             \x20 br i1 %c, label %a, label %b\n\
             a:\n\
             \x20 br label %b\n\
             b:\n\
             \x20 %p = phi i32 [ 1, %start ], [ 2, %a ]\n\
             \x20 %d = icmp eq i32 %p, 1\n\
             \x20 br i1 %d, label %x, label %y\n\
             x:\n\
             \x20 br label %y\n\
             y:\n\
             \x20 ret void\n\
             }\n",
        );
        let mut blocks: Vec<_> = inside.into_keys().collect();
        blocks.sort_unstable();
        assert_eq!(blocks, [1, 3]);
    }

    #[test]
    fn a_phi_of_one_value_is_uniform() {
        let from = HashSet::from(["a", "b b", "c"]);
        let computations =
            HashMap::from([("x", "zext i32 %n to i64"), ("y", "zext i32 %n to i64")]);
        let one = |phi| is_one_value(phi, &computations, &from);
        assert!(one(r#"phi i64 [ %x, %a ], [ %y, %"b b" ]"#));
        assert!(!one("phi i64 [ %x, %a ], [ %z, %c ]"));
        assert!(one(r#"phi i64 [ undef, %a ], [ %r, %"b b" ], [ %r, %c ]"#));
        assert!(one("phi i64 [ 0, %c ], [ %r, %elsewhere ]"));
        assert!(!one("phi i64 [ 0, %a ], [ %r, %c ]"));
        assert!(!one("phi ptr [ f (@x, i64 1), %a ], [ f (@x, i64 2), %c ]"));
    }

    #[test]
    fn a_phi_is_uniform_if_the_lanes_that_join_bring_one_value() {
        let text = "define ptx_kernel void @k(i32 %n) {\n\
             start:\n\
             \x20 %u = icmp eq i32 %n, 0\n\
             \x20 br i1 %u, label %claim, label %join\n\
             claim:\n\
             \x20 %t = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x()\n\
             \x20 %c = icmp eq i32 %t, 0\n\
             \x20 br i1 %c, label %first, label %join\n\
             first:\n\
             \x20 br label %join\n\
             join:\n\
             \x20 %p = phi i32 [ %n, %start ], [ 0, %claim ], [ 0, %first ]\n\
             \x20 %d = icmp eq i32 %p, 1\n\
             \x20 br i1 %d, label %x, label %y\n\
             x:\n\
             \x20 br label %y\n\
             y:\n\
             \x20 ret void\n\
             }\n";
        assert_eq!(regions(text).into_keys().collect::<Vec<_>>(), [2]);
        let mut other: Vec<_> = regions(&text.replace("[ 0, %first ]", "[ 1, %first ]"))
            .into_keys()
            .collect();
        other.sort_unstable();
        assert_eq!(other, [2, 4]);
    }

    #[test]
    fn a_branch_on_a_vote_is_uniform_and_one_on_a_match_of_lanes_is_not() {
        let voted = "define ptx_kernel void @k() {\n\
             start:\n\
             \x20 %t = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x()\n\
             \x20 %b = icmp eq i32 %t, 0\n\
             \x20 %v = tail call i32 @llvm.nvvm.vote.ballot.sync(i32 -1, i1 %b)\n\
             \x20 %c = icmp eq i32 %v, 1\n\
             \x20 br i1 %c, label %x, label %y\n\
             x:\n\
             \x20 br label %y\n\
             y:\n\
             \x20 ret void\n\
             }\n";
        assert!(regions(voted).is_empty());
        let matched = voted.replace(
            "vote.ballot.sync(i32 -1, i1 %b)",
            "match.any.sync.i32(i32 -1, i32 %t)",
        );
        assert_eq!(regions(&matched).into_keys().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn uniform_branches_loops_and_traps_do_not_diverge() {
        let inside = regions(
            "define ptx_kernel void @k(i32 %n, ptr %q) {\n\
             start:\n\
             \x20 %t = tail call i32 @llvm.nvvm.read.ptx.sreg.tid.x()\n\
             \x20 %big = icmp ugt i32 %t, 9\n\
             \x20 br i1 %big, label %bad, label %head\n\
             bad:\n\
             \x20 unreachable\n\
             head:\n\
             \x20 %i = phi i32 [ 0, %start ], [ %j, %head ]\n\
             \x20 %j = add i32 %i, 1\n\
             \x20 %v = load i32, ptr %q\n\
             \x20 %e = icmp eq i32 %j, %v\n\
             \x20 br i1 %e, label %out, label %head\n\
             out:\n\
             \x20 ret void\n\
             }\n",
        );
        assert!(inside.is_empty(), "{inside:?}");
    }
}
