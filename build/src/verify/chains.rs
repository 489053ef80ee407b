//! Chains of dependent loads: loads whose address comes from the load before.
//!
//! A GPU waits for each load of a chain in turn, as long as for a trip to the L2 cache. The
//! analysis follows the values of optimised LLVM IR. It does not follow them through shared memory,
//! comparisons or functions that are not inlined, and not the order that control flow and fences
//! impose. An address that may be in shared memory counts as one.

use std::collections::HashMap;

use crate::text::ir::{self, IrFunction};

/// Greatest length that is computed. Longer chains are endless: the load is in a loop, and gives
/// itself the next address.
pub(super) const ENDLESS: usize = 16;

/// Properties of a value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Value {
    /// Number of loads in the chain that the value ends.
    loads: usize,
    /// True for an address in shared memory.
    is_shared: bool,
}

/// Returns the number of loads from global memory in the longest chain of a function; at most
/// [`ENDLESS`].
pub(super) fn longest(function: &IrFunction) -> usize {
    let mut values: HashMap<&str, Value> = HashMap::new();
    loop {
        let mut changed = false;
        for instruction in function.instructions() {
            let (result, operation) = ir::split(ir::location(instruction).0);
            if result.is_empty() {
                continue;
            }
            let value = value(operation, &values);
            if values.insert(result, value) != Some(value) {
                changed = true;
            }
        }
        if !changed {
            return values.values().map(|it| it.loads).max().unwrap_or(0);
        }
    }
}

/// Returns the value of an operation on `values`, as far as they are known.
fn value(operation: &str, values: &HashMap<&str, Value>) -> Value {
    if operation.starts_with("icmp ") || operation.starts_with("fcmp ") {
        return Value::default();
    }
    let operands = ir::names(operation).filter_map(|name| values.get(name));
    let before = operands.fold(Value::default(), |all, it| Value {
        loads: all.loads.max(it.loads),
        is_shared: all.is_shared || it.is_shared,
    });
    let is_shared = before.is_shared || operation.contains("addrspace(3)");
    let is_asm = operation.contains(" asm ");
    let loads = |word: &str| operation.contains(word);
    let is_load = match is_asm {
        true => loads("ld.") || loads("atom.") || loads("multimem.ld_reduce."),
        false => ["load ", "atomicrmw ", "cmpxchg "]
            .iter()
            .any(|word| operation.starts_with(word)),
    };
    if !is_load {
        return Value {
            is_shared,
            ..before
        };
    }
    if is_shared || is_asm && operation.contains(".shared") {
        return Value::default();
    }
    Value {
        loads: (before.loads + 1).min(ENDLESS),
        is_shared: false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Vendor;

    fn longest_of(body: &str) -> usize {
        let text =
            format!("define ptx_kernel void @k(ptr %a, i64 %n) {{\n{body}\n  ret void\n}}\n");
        longest(&ir::parse(&text, Vendor::Nvidia)[0])
    }

    #[test]
    fn chains_follow_addresses() {
        let one = "  %1 = load i64, ptr %a, align 8\n  %2 = load i64, ptr %a, align 8";
        assert_eq!(longest_of(one), 1);
        let two = "  %1 = load ptr, ptr addrspace(1) %a, align 8\n\
            \x20 %2 = getelementptr i8, ptr %1, i64 8\n\
            \x20 %3 = tail call i64 asm sideeffect \"ld.acquire.sys.global.u64 $0, [$1];\", \
            \"=l,l,~{memory}\"(ptr %2) #1";
        assert_eq!(longest_of(two), 2);
        let by_atomic = "  %1 = atomicrmw add ptr %a, i64 1 monotonic, align 8\n\
            \x20 %2 = inttoptr i64 %1 to ptr\n  %3 = load i32, ptr %2, align 4";
        assert_eq!(longest_of(by_atomic), 2);
        assert_eq!(longest_of("  store i32 0, ptr %a, align 4"), 0);
    }

    #[test]
    fn shared_memory_and_comparisons_end_a_chain() {
        let shared = "  %1 = load i64, ptr %a, align 8\n\
            \x20 %2 = getelementptr i8, ptr addrspacecast (ptr addrspace(3) @s to ptr), i64 %1\n\
            \x20 %3 = load ptr, ptr %2, align 8\n  %4 = load i32, ptr %3, align 4";
        assert_eq!(longest_of(shared), 1);
        let compared = "  %1 = load i64, ptr %a, align 8\n  %2 = icmp eq i64 %1, 0\n\
            \x20 %3 = select i1 %2, ptr %a, ptr %b\n  %4 = load i32, ptr %3, align 4";
        assert_eq!(longest_of(compared), 1);
    }

    #[test]
    fn a_load_that_finds_its_next_address_is_endless() {
        let around = |next: &str| {
            longest_of(&format!(
                "  br label %head\nhead:\n  %at = phi ptr [ %a, %0 ], [ {next}, %head ]\n\
                 \x20 %1 = load ptr, ptr %at, align 8\n  %2 = getelementptr i8, ptr %at, i64 8\n\
                 \x20 br i1 %c, label %head, label %end\nend:"
            ))
        };
        assert_eq!(around("%1"), ENDLESS);
        // A loop over an array is not.
        assert_eq!(around("%2"), 1);
    }
}
