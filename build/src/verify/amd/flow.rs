//! Forward data flow over the instructions of a kernel.

use crate::text::disassembly::{Disassembly, Instruction};
use crate::violation::Violation;

/// A forward may-analysis.
pub(super) trait Analysis {
    /// State before an instruction. [`Default`] is the state at the start of the kernel.
    type State: Clone + Default;

    /// Adds the executions that `from` describes to `into`. Returns `true` if `into` changed.
    fn join(into: &mut Self::State, from: &Self::State) -> bool;

    /// Executes the instruction `index`.
    fn step(&self, state: &mut Self::State, index: usize);

    /// Reports the violations of the instruction `index`.
    fn check(&self, state: &Self::State, index: usize, out: &mut Vec<Violation>);
}

/// A basic block: a range of instructions that is entered only at its start.
struct Block {
    start: usize,
    end: usize,
    next: Vec<usize>,
}

/// Computes the states to a fixed point, then checks every reachable instruction.
pub(super) fn run<A: Analysis>(kernel: &Disassembly, analysis: &A) -> Vec<Violation> {
    let blocks = blocks(kernel);
    let mut states: Vec<Option<A::State>> = vec![None; blocks.len()];
    states[0] = Some(A::State::default());
    let mut open = vec![0];
    while let Some(block) = open.pop() {
        let Some(mut state) = states[block].clone() else {
            continue;
        };
        let Block { start, end, next } = &blocks[block];
        (*start..*end).for_each(|index| analysis.step(&mut state, index));
        for &next in next {
            let changed = match &mut states[next] {
                Some(old) => A::join(old, &state),
                new => new.replace(state.clone()).is_none(),
            };
            if changed && !open.contains(&next) {
                open.push(next);
            }
        }
    }
    let mut out = Vec::new();
    for (block, state) in blocks.iter().zip(states) {
        let Some(mut state) = state else { continue };
        for index in block.start..block.end {
            analysis.check(&state, index, &mut out);
            analysis.step(&mut state, index);
        }
    }
    out
}

/// Returns the basic blocks. There is at least one.
fn blocks(kernel: &Disassembly) -> Vec<Block> {
    let code = &kernel.instructions;
    let mut starts = vec![0];
    for (index, instruction) in code.iter().enumerate() {
        starts.extend(instruction.target);
        if instruction.is_branch() || instruction.is_last() {
            starts.push(index + 1);
        }
    }
    starts.retain(|&start| start == 0 || start < code.len());
    starts.sort_unstable();
    starts.dedup();
    let ends = starts.iter().skip(1).copied().chain([code.len()]);
    let block = |(&start, end): (&usize, usize)| {
        let last = code[start..end].last();
        let falls = (!last.is_some_and(Instruction::is_last)).then_some(end);
        let next = last.and_then(|last| last.target).into_iter().chain(falls);
        let next = next.filter_map(|at| starts.binary_search(&at).ok());
        Block {
            start,
            end,
            next: next.collect(),
        }
    };
    starts.iter().zip(ends).map(block).collect()
}
