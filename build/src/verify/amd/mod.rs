//! Rules for the disassembly of AMD code objects: the waits that the compiler inserts, and its code
//! sequences for releases and acquires.
//!
//! The sources of the sequences are the tables "AMDHSA Memory Model Code Sequences GFX90A" and
//! "GFX942" in LLVM's [User Guide for AMDGPU Backend](https://llvm.org/docs/AMDGPUUsage.html):
//!
//! | at system scope | gfx90a | gfx942 |
//! |---|---|---|
//! | release | `buffer_wbl2`, wait | `buffer_wbl2 sc0 sc1`, wait |
//! | acquire | wait, `buffer_invl2`, `buffer_wbinvl1_vol` | wait, `buffer_inv sc0 sc1` |
//! | load | `glc` | `sc0 sc1` |
//! | store | no modifier | `sc0 sc1` |
//! | atomic | no modifier | `sc1` |
//!
//! The wait is `s_waitcnt vmcnt(0)`.
//!
//! Every rule holds on all paths through the control-flow graph of a kernel.
//!
//! - [`WAIT`]: no instruction reads or overwrites a register before an `s_waitcnt` covers the load
//!   into the register.
//! - [`RELEASE`]: (a) All accesses and the write-back are complete at the first store, atomic,
//!   barrier or invalidation after a write-back. (b) Only gfx942: a wave that has stored data does
//!   not store at system scope before it writes the data back, except packets, which are several
//!   words of one address. (c) A write-back directly precedes every atomic at system scope. (d) All
//!   accesses to LDS are complete at a barrier. (e) At the first store or atomic after a
//!   write-back, all stores of data from before the last barrier were complete at that barrier: a
//!   signal of one wave covers the data of its whole block, and a write-back covers only what has
//!   reached the cache. Not checked after a compare-and-swap, with which the record of a failure
//!   begins: that publishes only what its own lane has stored.
//! - [`ACQUIRE`]: (a) All accesses are complete at an invalidation. (b) An invalidation at system
//!   scope follows every poll, before the wave sleeps. A poll is a load of a word at system scope
//!   while no other access is outstanding, with a wait directly after it, from which an `s_sleep`
//!   is reachable. (c) An invalidation at system scope directly follows every atomic at system
//!   scope.
//! - [`SCOPE`]: no access to global memory has block scope (`sc0` without `sc1`). The load or
//!   atomic directly before an invalidation, and the first store or atomic after a write-back, have
//!   at least the scope of the cache operation.
//! - [`PARITY`]: a kernel contains as many cache operations, barriers and loads with a scope for
//!   gfx90a as for gfx942.
//! - [`FLOW`]: all jumps are direct.
//!
//! The rules do not see:
//!
//! - the memory to which an address belongs. A load of peer memory without a scope passes, and so
//!   does a signal to a wrong address;
//! - which stores are releases, except by the write-back before them. On gfx90a, only [`PARITY`]
//!   finds a missing write-back. On gfx942, it is also found if the wave itself has stored data;
//! - an acquire after which the wave does not sleep, except by [`PARITY`];
//! - an ordering that both forms of a kernel lack, for example because the source lacks it. The
//!   loom models check the source.

mod decode;
mod flow;
mod order;
mod waits;

use self::decode::{Kind, Op, Scope};
use crate::Target;
use crate::project::Exemption;
use crate::text::disassembly::Disassembly;
use crate::violation::Violation;

/// Rule: a load is complete before its result is used.
pub const WAIT: &str = "amd-wait";
/// Rule: data is written back, and all accesses are complete, before a signal.
pub const RELEASE: &str = "amd-release";
/// Rule: an invalidation follows a poll.
pub const ACQUIRE: &str = "amd-acquire";
/// Rule: signals and polls have the scope of their cache operations.
pub const SCOPE: &str = "amd-scope";
/// Rule: the images for both targets contain the same cache operations.
pub const PARITY: &str = "amd-parity";
/// Rule: the control flow is known.
pub const FLOW: &str = "amd-flow";

/// Advice for each rule.
pub(crate) const ADVICE: &[(&str, &str)] = &[
    (
        WAIT,
        "report the kernel to LLVM, which inserts these waits, and use another version",
    ),
    (
        RELEASE,
        "release the data by Order::Release or fence before the signal; if the source does, report \
         the missing s_waitcnt or buffer_wbl2 to LLVM and insert it in `build/src/waits.rs`",
    ),
    (
        ACQUIRE,
        "poll by Order::Acquire; if the source does, report the missing s_waitcnt or buffer_inv to \
         LLVM and insert it in `build/src/waits.rs`",
    ),
    (SCOPE, "give words that peers read or write Scope::System"),
    (
        PARITY,
        "compare the disassembly of the kernel for both targets: one lacks a buffer_wbl2, a \
         buffer_inv or an s_barrier",
    ),
    (
        FLOW,
        "inline the function: the checker follows only direct branches",
    ),
];

/// Returns the exemptions for the images of `fusewire-kernels`.
pub fn exemptions() -> Vec<Exemption> {
    let exemption = |rule: &str, kernel: &str, containing: &str, limit, reason: &str| Exemption {
        rule: rule.to_owned(),
        kernel: kernel.to_owned(),
        containing: containing.to_owned(),
        limit: Some(limit),
        reason: reason.to_owned(),
    };
    let mut out = vec![
        exemption(
            RELEASE,
            "*",
            "offset:16 sc0 sc1: no write-back",
            4,
            "a progress word, which orders nothing",
        ),
        exemption(
            SCOPE,
            "batch",
            "the load before has a narrower scope",
            2,
            "a counter that only this block writes; the fence is not for it",
        ),
        exemption(
            ACQUIRE,
            "reduce_norm_packet_*",
            "no invalidation after this poll",
            3,
            "a word of another block has its value in it, as a packet has",
        ),
    ];
    // `Progress::recent` and `Progress::beat`.
    let text = "off offset:24";
    let recent = "the call of a peer, which is only compared with this rank's own call";
    out.push(exemption(ACQUIRE, "moe_*", text, 24, recent));
    out.push(exemption(ACQUIRE, "window_wait", text, 4, recent));
    let text = "offset:56 sc0 sc1: no write-back";
    let beat = "a word that shows only that this rank waits, which orders nothing";
    out.push(exemption(RELEASE, "moe_*", text, 6, beat));
    let host_word = "the host's copy of a peer's abort word, which the lane itself has read";
    let text = "off: stores were not complete"; // gfx90a
    out.push(exemption(RELEASE, "*", text, 2, host_word));
    for kernel in [
        "all_reduce_packet_*",
        "all_reduce_nvls_*",
        "reduce_*",
        "batch",
        "moe_dispatch*",
        "vocab_*",
    ] {
        let text = "off sc0 sc1: stores were not complete";
        out.push(exemption(RELEASE, kernel, text, 1, host_word));
    }
    for kernel in [
        "reduce_whole_*",
        "move_rows",
        "all_gather_v",
        "all_to_all_v",
    ] {
        out.push(exemption(
            RELEASE,
            kernel,
            "offset:64 sc0 sc1: no write-back",
            1,
            "the done signal of a kernel that writes nothing for its peers",
        ));
    }
    out
}

/// A decoded kernel.
struct Kernel<'a> {
    target: Target,
    text: &'a Disassembly,
    ops: Vec<Op>,
}

impl<'a> Kernel<'a> {
    fn new(target: Target, text: &'a Disassembly) -> Self {
        let code = text.instructions.iter();
        Self {
            target,
            text,
            ops: code.map(|it| decode::decode(target, it)).collect(),
        }
    }

    /// Returns a violation by the instruction `index`.
    fn violation(&self, rule: &'static str, index: usize, text: &str) -> Violation {
        let it = &self.text.instructions[index];
        let text = format!("{:#x}: {} {}: {text}", it.address, it.code, it.operands);
        Violation::new(rule, &self.text.name, text)
    }

    /// Returns the numbers that [`PARITY`] compares.
    fn counts(&self) -> [(&'static str, usize); 5] {
        let count = |wanted: &dyn Fn(&Op) -> bool| self.ops.iter().filter(|op| wanted(op)).count();
        let strong = |kind| count(&|op| op.kind == kind && op.is_strong());
        // `buffer_invl2` is not an invalidation of its own.
        let invalidates = |op: &Op| {
            let own = self.target == Target::Gfx942 || !op.is_strong();
            op.kind == Kind::Invalidate && own
        };
        let scoped = |op: &Op| op.kind == Kind::Load && op.scope > Scope::None;
        [
            ("write-backs at system scope", strong(Kind::WriteBack)),
            ("invalidations at system scope", strong(Kind::Invalidate)),
            ("invalidations", count(&invalidates)),
            ("barriers", count(&|op| op.kind == Kind::Barrier)),
            ("loads with a scope", count(&scoped)),
        ]
    }
}

/// Returns the violations in a kernel, including exempt ones.
pub fn check(target: Target, text: &Disassembly) -> Vec<Violation> {
    let kernel = Kernel::new(target, text);
    let mut out = Vec::new();
    for (index, instruction) in text.instructions.iter().enumerate() {
        let jumps = ["s_swappc", "s_call", "s_rfe"];
        let lost = instruction.is_branch() && instruction.target.is_none();
        if lost || jumps.iter().any(|jump| instruction.code.starts_with(jump)) {
            out.push(kernel.violation(FLOW, index, "a jump to an unknown target"));
        }
    }
    out.extend(flow::run(text, &waits::Waits(&kernel)));
    out.extend(flow::run(text, &order::Order(&kernel)));
    out
}

/// Compares the forms of a kernel for two targets.
pub fn compare(kernels: [(Target, &Disassembly); 2]) -> Vec<Violation> {
    let [(one, text), (other, _)] = kernels;
    let [first, second] = kernels.map(|(target, text)| Kernel::new(target, text).counts());
    let pairs = first.into_iter().zip(second);
    let different = pairs.filter(|(first, second)| first != second);
    let violation = |((what, first), (_, second))| {
        let detail = format!("{first} {what} for {one}, {second} for {other}");
        Violation::new(PARITY, &text.name, detail)
    };
    different.map(violation).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::disassembly;

    /// Returns the rules that a kernel for gfx942 breaks.
    fn broken(code: &str) -> Vec<&'static str> {
        let mut text = "0000000000000000 <k>:\n".to_owned();
        for (index, line) in code.lines().map(str::trim).enumerate() {
            text += &match line.strip_suffix(':') {
                Some(label) => format!("{index:016x} <{label}>:\n"),
                None => format!("\t{line} // {index:X}: 0\n"),
            };
        }
        let kernels = disassembly::parse(&text);
        let found = check(Target::Gfx942, &kernels[0]);
        found.iter().map(|violation| violation.rule).collect()
    }

    #[test]
    fn a_load_is_tracked_through_a_loop() {
        let used = "global_load_dword v1, v[2:3], off
            L0:
            s_waitcnt vmcnt(0)
            v_mov_b32_e32 v4, v1
            global_load_dword v1, v[2:3], off
            s_cbranch_scc1 L0
            s_endpgm";
        assert!(broken(used).is_empty());
        let late = "L0:
            v_mov_b32_e32 v4, v1
            global_load_dword v1, v[2:3], off
            s_cbranch_scc1 L0
            s_endpgm";
        assert_eq!(broken(late), [WAIT]);
        let counted = "global_load_dword v1, v[2:3], off
            global_load_dword v4, v[2:3], off
            s_waitcnt vmcnt(1)
            v_mov_b32_e32 v5, v1
            v_mov_b32_e32 v5, v4
            s_endpgm";
        assert_eq!(broken(counted), [WAIT]);
        let flat = "flat_load_dword v1, v[2:3]
            flat_load_dword v4, v[2:3]
            s_waitcnt vmcnt(1) lgkmcnt(1)
            v_mov_b32_e32 v5, v1
            s_endpgm";
        assert_eq!(broken(flat), [WAIT]);
        assert!(broken(&flat.replace("cnt(1)", "cnt(0)")).is_empty());
    }

    #[test]
    fn a_load_may_overwrite_the_result_of_an_ordered_load() {
        let global = "global_load_dword v1, v[2:3], off
            global_load_dword v1, v[4:5], off
            s_waitcnt vmcnt(0)
            s_endpgm";
        assert!(broken(global).is_empty());
        let flat = "flat_load_dword v1, v[2:3]
            s_waitcnt lgkmcnt(0)
            global_load_dword v1, v[4:5], off
            s_waitcnt vmcnt(0)
            s_endpgm";
        assert!(broken(flat).is_empty());
        // The flat load may have read LDS, which is not ordered with global memory.
        let unordered = flat.replace("lgkmcnt(0)", "lgkmcnt(1)");
        assert_eq!(broken(&unordered), [WAIT]);
        // The result is not there yet.
        let used = flat.replace("global_load_dword v1, v[4:5], off", "v_mov_b32_e32 v5, v1");
        assert_eq!(broken(&used), [WAIT]);
    }

    #[test]
    fn unknown_jumps_are_reported() {
        assert_eq!(broken("s_setpc_b64 s[0:1]\ns_endpgm"), [FLOW]);
        assert_eq!(broken("s_branch L7"), [FLOW]);
    }
}
