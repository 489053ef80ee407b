//! Register allocation: virtual registers whose lifetimes do not overlap share a row.

use core::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::program::{Inst, Op, Reg, Role};

/// A set of registers.
#[derive(Clone)]
struct Set(Vec<u64>);

impl Set {
    fn new(registers: u32) -> Self {
        Self(vec![0; registers.div_ceil(64) as usize])
    }

    fn insert(&mut self, register: Reg) {
        self.0[register as usize / 64] |= 1 << (register % 64);
    }

    fn contains(&self, register: Reg) -> bool {
        self.0[register as usize / 64] >> (register % 64) & 1 != 0
    }

    fn iter(&self) -> impl Iterator<Item = Reg> {
        self.0.iter().enumerate().flat_map(|(at, word)| {
            let mut word = *word;
            core::iter::from_fn(move || {
                let bit = (word != 0).then(|| word.trailing_zeros())?;
                word &= word - 1;
                Some(at as Reg * 64 + bit)
            })
        })
    }
}

/// A range of instructions without branches into or out of it.
struct Block {
    start: usize,
    end: usize,
    successors: Vec<usize>,
    /// Registers that the block reads before it writes them.
    reads: Set,
    /// Registers that the block writes in all lanes.
    writes: Set,
    live_in: Set,
    live_out: Set,
}

/// Returns the indices of the instructions that may execute after instruction `at`.
fn next(code: &[Inst], at: usize, tables: &[Vec<u32>]) -> (Vec<usize>, bool) {
    let guarded = code[at].guard.is_some();
    match &code[at].op {
        Op::Branch { target } => (vec![*target as usize], guarded),
        Op::BranchIndex { table, .. } => {
            let targets = &tables[*table as usize];
            (targets.iter().map(|it| *it as usize).collect(), guarded)
        }
        Op::Exit | Op::Return | Op::Trap => (Vec::new(), guarded),
        _ => (Vec::new(), true),
    }
}

fn ends_block(op: &Op) -> bool {
    matches!(
        op,
        Op::Branch { .. } | Op::BranchIndex { .. } | Op::Exit | Op::Return | Op::Trap
    )
}

fn blocks(code: &mut [Inst], registers: u32, tables: &[Vec<u32>]) -> Vec<Block> {
    let mut leader = vec![false; code.len() + 1];
    leader[0] = true;
    for at in 0..code.len() {
        if ends_block(&code[at].op) {
            leader[at + 1] = true;
            for target in next(code, at, tables).0 {
                leader[target.min(code.len())] = true;
            }
        }
    }
    let starts: Vec<usize> = (0..code.len()).filter(|at| leader[*at]).collect();
    let block_of = |at: usize| starts.binary_search(&at).ok();
    let mut blocks = Vec::with_capacity(starts.len());
    for (number, &start) in starts.iter().enumerate() {
        let end = starts.get(number + 1).copied().unwrap_or(code.len());
        let (targets, falls) = next(code, end - 1, tables);
        let mut successors: Vec<usize> = targets.into_iter().filter_map(block_of).collect();
        successors.extend(falls.then(|| block_of(end)).flatten());
        let (mut reads, mut writes) = (Set::new(registers), Set::new(registers));
        for inst in &mut code[start..end] {
            let guarded = inst.guard.is_some();
            inst.registers(|register, role| match role {
                Role::Use if !writes.contains(*register) => reads.insert(*register),
                Role::Use => {}
                // Lanes whose guard is false keep the old value.
                Role::Define if guarded => {
                    if !writes.contains(*register) {
                        reads.insert(*register);
                    }
                }
                Role::Define => writes.insert(*register),
            });
        }
        blocks.push(Block {
            start,
            end,
            successors,
            live_in: reads.clone(),
            reads,
            writes,
            live_out: Set::new(registers),
        });
    }
    blocks
}

/// Computes which registers are live at the start and at the end of each block.
fn propagate(blocks: &mut [Block]) {
    let mut changed = true;
    while changed {
        changed = false;
        for at in (0..blocks.len()).rev() {
            let mut out = core::mem::replace(&mut blocks[at].live_out, Set(Vec::new()));
            for successor in &blocks[at].successors {
                for (word, other) in out.0.iter_mut().zip(&blocks[*successor].live_in.0) {
                    *word |= other;
                }
            }
            let block = &mut blocks[at];
            for (word, live) in block.live_in.0.iter_mut().enumerate() {
                let new = block.reads.0[word] | (out.0[word] & !block.writes.0[word]);
                changed |= new != *live;
                *live = new;
            }
            block.live_out = out;
        }
    }
}

/// Replaces the virtual registers of a function by rows. Returns the number of rows.
pub(crate) fn allocate(code: &mut [Inst], registers: u32, tables: &[Vec<u32>]) -> u32 {
    if code.is_empty() || registers == 0 {
        return 0;
    }
    let mut blocks = blocks(code, registers, tables);
    propagate(&mut blocks);
    // First and last position of each register. An instruction reads at an even position and
    // writes at the odd position after it.
    let mut spans: Vec<Option<(usize, usize)>> = vec![None; registers as usize];
    let mut extend = |register: Reg, position: usize| {
        let span = &mut spans[register as usize];
        *span = Some(span.map_or((position, position), |(first, last)| {
            (first.min(position), last.max(position))
        }));
    };
    for block in &blocks {
        for register in block.live_in.iter() {
            extend(register, 2 * block.start);
        }
        for register in block.live_out.iter() {
            extend(register, 2 * block.end);
        }
        for at in block.start..block.end {
            code[at].registers(|register, role| {
                extend(*register, 2 * at + usize::from(role == Role::Define));
            });
        }
    }
    let mut order: Vec<(usize, usize, Reg)> = spans
        .iter()
        .enumerate()
        .filter_map(|(register, span)| span.map(|(first, last)| (first, last, register as Reg)))
        .collect();
    order.sort_unstable();
    let mut rows = vec![0; registers as usize];
    let mut free: BinaryHeap<Reverse<Reg>> = BinaryHeap::new();
    let mut active: BinaryHeap<Reverse<(usize, Reg)>> = BinaryHeap::new();
    let mut count = 0;
    for (first, last, register) in order {
        while let Some(Reverse((end, row))) = active.peek().copied() {
            if end >= first {
                break;
            }
            active.pop();
            free.push(Reverse(row));
        }
        let row = free.pop().map_or_else(
            || {
                count += 1;
                count - 1
            },
            |Reverse(row)| row,
        );
        rows[register as usize] = row;
        active.push(Reverse((last, row)));
    }
    for inst in code {
        inst.registers(|register, _| *register = rows[*register as usize]);
    }
    count
}
