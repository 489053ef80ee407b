//! Rule for the access width of copies.

use std::collections::HashSet;

use super::Violation;
use crate::text::assembly;
use crate::text::ir::{self, Block, IrFunction};
use crate::{Image, Vendor};

pub(super) const VECTORS: &str = "vector-move";

/// Finds copies without 16-byte accesses. If a loop of a kernel loads values of less than 16 bytes
/// and stores them unchanged, the kernel must also have 16-byte loads and stores. The narrow loop
/// is then the head, the tail or the unaligned case of the copy.
pub(super) fn vectors(image: &Image) -> Vec<Violation> {
    let mut out = Vec::new();
    for function in image.ir.iter().filter(|function| function.kernel) {
        let Some(copy) = narrow_copy(function) else {
            continue;
        };
        let Some(assembly) = image
            .functions
            .iter()
            .find(|other| other.name == function.name)
        else {
            continue;
        };
        let (loads, stores) = wide_moves(assembly, image.target.vendor());
        if !loads || !stores {
            let what = if loads { "stores" } else { "loads" };
            let (copy, location) = ir::location(copy);
            let detail = format!("no 16-byte {what}, but a loop copies by `{copy}`");
            out.push(Violation::new(VECTORS, &function.name, detail).at(location));
        }
    }
    out
}

/// Returns a pair of flags. The first is `true` if the function has plain 16-byte loads, the second
/// if it has plain 16-byte stores. Accesses to shared memory do not count.
fn wide_moves(function: &assembly::AsmFunction, vendor: Vendor) -> (bool, bool) {
    let is_wide = |code: &str| match vendor {
        Vendor::Amd => code.ends_with("dwordx4") && !code.starts_with("s_"),
        Vendor::Nvidia => {
            // Relaxed accesses are accesses to packets, not to plain data.
            !code.contains(".relaxed.")
                && !code.contains(".shared.")
                && [
                    ".v4.b32", ".v4.u32", ".v4.f32", ".v2.b64", ".v2.u64", ".v2.f64", ".b128",
                ]
                .iter()
                .any(|ending| code.ends_with(ending))
        }
    };
    let mut found = (false, false);
    for (code, _) in function.instructions().filter(|(code, _)| is_wide(code)) {
        found.0 |= code.starts_with("ld.") || code.contains("_load_");
        found.1 |= code.starts_with("st.") || code.contains("_store_");
    }
    found
}

/// Finds a load of less than 16 bytes whose value is stored in the same loop. Both addresses must
/// advance with the loop.
fn narrow_copy(function: &IrFunction) -> Option<&str> {
    let cycles = cycles(function);
    let in_cycles = || {
        function
            .blocks
            .iter()
            .zip(&cycles)
            .filter_map(|(block, cycle)| Some((block, (*cycle)?)))
    };
    let advancing = advancing(in_cycles().map(|(block, _)| block));
    let advances = |access: &str| address(access).is_some_and(|name| advancing.contains(name));
    let mut stored = HashSet::new();
    for (block, cycle) in in_cycles() {
        for line in &block.instructions {
            if let Some(access) = line.strip_prefix("store ")
                && is_narrow_global(access)
                && advances(access)
                && let Some(value) = ir::names(access).next()
            {
                stored.insert((cycle, value));
            }
        }
    }
    in_cycles().find_map(|(block, cycle)| {
        block.instructions.iter().map(String::as_str).find(|line| {
            let (result, operation) = ir::split(line);
            operation.strip_prefix("load ").is_some_and(|access| {
                is_narrow_global(access) && advances(access) && stored.contains(&(cycle, result))
            })
        })
    })
}

/// Returns the pointer operand of an access, which is the last name before the alignment.
fn address(access: &str) -> Option<&str> {
    ir::names(access.split(", align").next()?).last()
}

/// Returns the values that may change between iterations: phis and values computed from them.
fn advancing<'a>(blocks: impl Iterator<Item = &'a Block> + Clone) -> HashSet<&'a str> {
    let mut out: HashSet<&str> = HashSet::new();
    loop {
        let before = out.len();
        for line in blocks.clone().flat_map(|block| &block.instructions) {
            let (result, operation) = ir::split(line);
            let computed = !operation.starts_with("load ")
                && ir::names(operation).any(|name| out.contains(name))
                && ir::callee(operation).is_none();
            if !result.is_empty() && (operation.starts_with("phi ") || computed) {
                out.insert(result);
            }
        }
        if out.len() == before {
            return out;
        }
    }
}

/// Returns `true` if a plain access, given as the text after `load` or `store`, accesses a scalar
/// outside shared, local and constant memory.
fn is_narrow_global(access: &str) -> bool {
    let width = match access.split([' ', ',']).next().unwrap_or_default() {
        "i8" => 1,
        "i16" | "half" | "bfloat" => 2,
        "i32" | "float" => 4,
        "i64" | "double" | "ptr" => 8,
        _ => 16, // vectors, atomic, volatile
    };
    let elsewhere = ["addrspace(3)", "addrspace(4)", "addrspace(5)"];
    width < 16 && !elsewhere.iter().any(|space| access.contains(space))
}

/// Returns, for every block, the number of its strongly connected component; `None` if it is in no
/// cycle.
fn cycles(function: &IrFunction) -> Vec<Option<usize>> {
    // Tarjan's algorithm, without recursion because functions have thousands of blocks.
    let count = function.blocks.len();
    let mut index = vec![usize::MAX; count];
    let mut low = vec![0; count];
    let mut on_stack = vec![false; count];
    let mut stack = Vec::new();
    let mut out = vec![None; count];
    let (mut next_index, mut next_cycle) = (0, 0);
    for start in 0..count {
        if index[start] != usize::MAX {
            continue;
        }
        let mut open = vec![(start, 0)];
        while let Some((block, edge)) = open.pop() {
            if edge == 0 {
                index[block] = next_index;
                low[block] = next_index;
                next_index += 1;
                stack.push(block);
                on_stack[block] = true;
            }
            let successors = &function.blocks[block].successors;
            if let Some(&next) = successors.get(edge) {
                open.push((block, edge + 1));
                if index[next] == usize::MAX {
                    open.push((next, 0));
                } else if on_stack[next] {
                    low[block] = low[block].min(index[next]);
                }
                continue;
            }
            if low[block] == index[block] {
                let mut members = Vec::new();
                while let Some(member) = stack.pop() {
                    on_stack[member] = false;
                    members.push(member);
                    if member == block {
                        break;
                    }
                }
                if members.len() > 1 || successors.contains(&block) {
                    for member in members {
                        out[member] = Some(next_cycle);
                    }
                    next_cycle += 1;
                }
            }
            if let Some(&(parent, _)) = open.last() {
                low[parent] = low[parent].min(low[block]);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_narrow_copy_is_found_in_a_loop_only() {
        let text = |target: &str| {
            format!(
                "define ptx_kernel void @k(ptr %a, ptr %b) {{\n\
                 start:\n\
                 \x20 br label %loop\n\
                 loop:\n\
                 \x20 %p = phi ptr [ %a, %start ], [ %q, %loop ]\n\
                 \x20 %q = getelementptr i8, ptr %p, i64 4\n\
                 \x20 %v = load i32, ptr %p, align 4\n\
                 \x20 store i32 %v, ptr %q, align 4\n\
                 \x20 br i1 %c, label %{target}, label %end\n\
                 end:\n\
                 \x20 ret void\n\
                 }}\n"
            )
        };
        let of = |text: &str| narrow_copy(&ir::parse(text, Vendor::Nvidia)[0]).is_some();
        assert!(of(&text("loop")));
        assert!(!of(&text("end")));
    }
}
