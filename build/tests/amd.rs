//! Checks the committed AMD images, and mutants of them, which the check must find.
//!
//! Without `llvm-objdump`, the tests are skipped and print the reason. With
//! `FUSEWIRE_REQUIRE=amdgcn` they fail instead.

use std::path::Path;
use std::sync::LazyLock;

use fusewire_build::code_objects::{self, CodeObject};
use fusewire_build::text::disassembly::{Disassembly, Instruction};
use fusewire_build::verify::amd::{ACQUIRE, PARITY, RELEASE, SCOPE, WAIT};
use fusewire_build::verify::{self, amd};
use fusewire_build::{Target, Target::Gfx90a, Target::Gfx942, toolchain};

use Change::{Delete, Drop, Swap, Weaken};

/// The images for gfx90a, then those for gfx942.
static OBJECTS: LazyLock<Option<Vec<CodeObject>>> = LazyLock::new(|| {
    let objdump = match toolchain::find_llvm_objdump() {
        Ok(objdump) => objdump,
        Err(missing) => {
            let required = std::env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
            let required = required.split(',').any(|part| part == "amdgcn");
            assert!(!required, "amdgcn is required, but: {missing}");
            println!("skipped: amdgcn: {missing}");
            return None;
        }
    };
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../host/images");
    let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let read = |target| code_objects::read(&folder, target, &objdump, scratch).expect("images");
    Some([Gfx90a, Gfx942].into_iter().flat_map(read).collect())
});

#[test]
fn committed_images_are_clean() {
    let Some(objects) = OBJECTS.as_ref() else {
        return;
    };
    let kernels: usize = objects.iter().map(|object| object.kernels.len()).sum();
    println!("{kernels} kernels in {} images", objects.len());
    assert!(objects.len() >= 28 && kernels >= 128);
    let found = code_objects::check(objects);
    assert!(found.is_empty(), "{found:#?}");
}

/// A change at an instruction.
#[derive(Clone, Copy, Debug)]
enum Change {
    Delete,
    /// Exchanges the instruction and the one at this distance after it.
    Swap(usize),
    /// Increments the counter of this name.
    Weaken(&'static str),
    /// Removes a modifier.
    Drop(&'static str),
}

impl Change {
    fn apply(self, code: &mut [Instruction], index: usize) {
        let it = &mut code[index];
        match self {
            Self::Delete => {
                it.code = "s_nop".to_owned();
                it.operands = "0".to_owned();
            }
            Self::Swap(by) => code.swap(index, index + by),
            Self::Weaken(counter) => {
                let (before, rest) = it.operands.split_once(counter).expect("a counter");
                let (limit, rest) = rest.split_once(')').expect("a limit");
                let limit: u8 = limit.parse().expect("a number");
                it.operands = format!("{before}{counter}{}){rest}", limit + 1);
            }
            Self::Drop(word) => {
                assert!(it.has(word), "{it:?}");
                let words = it.operands.split(' ').filter(|other| *other != word);
                it.operands = words.collect::<Vec<_>>().join(" ");
            }
        }
    }
}

/// A mutant: its name, the target and the kernel, the rule that must find it, the place of the
/// change, and the change. The place is an index into the first sequence of instructions in the
/// kernel that start with these prefixes.
type Mutant = (
    &'static str,
    Target,
    &'static str,
    &'static str,
    (&'static str, usize),
    Change,
);

const SUM: &str = "reduce_whole_f32_sum";
const SHARDS: &str = "reduce_shards_f32_sum";
const FLAGS: &str = "all_gather_with_flags";
const PACKET: &str = "all_reduce_packet_f32_sum";
const SIGNAL_42: &str = "buffer_wbl2 sc0 sc1;s_waitcnt vmcnt(0);global_store_dwordx2";
const RECORD_42: &str =
    "buffer_wbl2 sc0 sc1;s_waitcnt vmcnt(0);global_store_dwordx2;flat_load_dword";
const SIGNAL_90: &str = "buffer_wbl2;s_waitcnt vmcnt(0);global_store_dwordx2";
const FENCE: &str = "buffer_wbl2 sc0 sc1;s_waitcnt vmcnt(0);buffer_inv";
const POLL_42: &str = "global_load_dwordx2;s_waitcnt vmcnt(0);buffer_inv sc0 sc1;s_xor_b64";
const POLL_90: &str =
    "global_load_dwordx2;s_waitcnt vmcnt(0);buffer_invl2;buffer_wbinvl1_vol;v_lshrrev_b64";
const SWAP_42: &str = "global_atomic_cmpswap;s_waitcnt vmcnt(0);buffer_inv sc0 sc1";
const SWAP_90: &str = "global_atomic_cmpswap;s_waitcnt vmcnt(0);buffer_invl2";
const BEFORE_SWAP: &str = "buffer_wbl2 sc0 sc1;s_waitcnt;global_atomic_cmpswap";
const IN_LOOP: &str = "s_waitcnt lgkmcnt(0);s_barrier;s_waitcnt vmcnt(0);buffer_inv";
const PUBLISH: &str = "s_waitcnt vmcnt(0) lgkmcnt(0);s_barrier";
const BARRIER: &str = "ds_write;s_waitcnt lgkmcnt(0);s_barrier";
const SCALAR: &str = "s_waitcnt lgkmcnt(0)";
const READ: &str = "ds_read_b64;s_waitcnt lgkmcnt(0)";

#[rustfmt::skip]
const MUTANTS: &[Mutant] = &[
    ("no wait for a flat load", Gfx942, "send", WAIT, ("flat_load;s_waitcnt", 1), Delete),
    ("no wait for a load from LDS", Gfx90a, "send", WAIT, (READ, 1), Delete),
    ("no wait for a scalar load", Gfx90a, "recv", WAIT, (SCALAR, 0), Delete),
    ("a weak wait for a scalar load", Gfx942, "recv", WAIT, (SCALAR, 0), Weaken("lgkmcnt(")),
    ("a weak wait for data", Gfx942, SUM, WAIT, ("s_waitcnt vmcnt(3)", 0), Weaken("vmcnt(")),
    ("a weak wait for LDS", Gfx90a, SUM, WAIT, ("s_waitcnt lgkmcnt(1)", 0), Weaken("lgkmcnt(")),
    ("no wait for data and write-back", Gfx942, "send", RELEASE, (SIGNAL_42, 1), Delete),
    ("no wait for data and write-back", Gfx90a, "send", RELEASE, (SIGNAL_90, 1), Delete),
    ("no wait for a write-back", Gfx942, "batch", RELEASE, (SIGNAL_42, 1), Delete),
    ("no wait for a write-back", Gfx90a, "batch", RELEASE, (SIGNAL_90, 1), Delete),
    ("a weak wait for a write-back", Gfx942, "send", RELEASE, (SIGNAL_42, 1), Weaken("vmcnt(")),
    ("no wait in a fence before a barrier", Gfx942, PACKET, RELEASE, (FENCE, 1), Delete),
    ("no wait in a fence in a loop", Gfx942, "window_wait", ACQUIRE, (IN_LOOP, 2), Delete),
    ("no wait for data before a barrier", Gfx942, SHARDS, RELEASE, (PUBLISH, 0), Delete),
    ("no wait for data before a barrier", Gfx90a, SHARDS, RELEASE, (PUBLISH, 0), Delete),
    ("no wait for data before a barrier", Gfx942, "window_put", RELEASE, (PUBLISH, 0), Delete),
    ("no wait for data before a barrier", Gfx942, FLAGS, RELEASE, (PUBLISH, 0), Delete),
    ("a weak wait before a barrier", Gfx942, SHARDS, RELEASE, (PUBLISH, 0), Weaken("vmcnt(")),
    ("no wait for LDS before a barrier", Gfx942, SUM, RELEASE, (BARRIER, 1), Delete),
    ("no write-back before a signal", Gfx942, "batch", RELEASE, (RECORD_42, 0), Delete),
    ("no write-back before a signal", Gfx90a, "batch", PARITY, (SIGNAL_90, 0), Delete),
    ("a write-back after its signal", Gfx942, "batch", RELEASE, (SIGNAL_42, 0), Swap(2)),
    ("a write-back after its wait", Gfx90a, "batch", RELEASE, (SIGNAL_90, 0), Swap(1)),
    ("a write-back at agent scope", Gfx942, "batch", RELEASE, (RECORD_42, 0), Drop("sc0")),
    ("no write-back before an atomic", Gfx942, "send", RELEASE, (BEFORE_SWAP, 0), Delete),
    ("no invalidation after a poll", Gfx942, SUM, ACQUIRE, (POLL_42, 2), Delete),
    ("no invalidation of L2 after a poll", Gfx90a, SUM, ACQUIRE, (POLL_90, 2), Delete),
    ("no invalidation of L1 after a poll", Gfx90a, SUM, PARITY, (POLL_90, 3), Delete),
    ("an invalidation at agent scope", Gfx942, SUM, ACQUIRE, (POLL_42, 2), Drop("sc0")),
    ("an invalidation before the poll is complete", Gfx942, SUM, ACQUIRE, (POLL_42, 1), Swap(1)),
    ("no wait for a poll", Gfx90a, SUM, ACQUIRE, (POLL_90, 1), Delete),
    ("no invalidation after an atomic", Gfx90a, "send", ACQUIRE, (SWAP_90, 2), Delete),
    ("a poll at agent scope", Gfx942, SUM, SCOPE, (POLL_42, 0), Drop("sc0")),
    ("a poll at block scope", Gfx942, SUM, SCOPE, (POLL_42, 0), Drop("sc1")),
    ("a poll without scope", Gfx90a, SUM, SCOPE, (POLL_90, 0), Drop("glc")),
    ("an atomic at agent scope", Gfx942, "send", SCOPE, (SWAP_42, 0), Drop("sc1")),
    ("a signal at agent scope", Gfx942, "send", SCOPE, (SIGNAL_42, 2), Drop("sc0")),
    ("no barrier", Gfx90a, "barrier", PARITY, ("s_barrier", 0), Delete),
];

#[test]
fn mutants_are_found() {
    let Some(objects) = OBJECTS.as_ref() else {
        return;
    };
    let find = |target, name: &str| -> &Disassembly {
        let own = objects.iter().filter(|object| object.target == target);
        let mut kernels = own.flat_map(|object| &object.kernels);
        kernels
            .find(|kernel| kernel.name == name)
            .expect("a kernel")
    };
    let mut missed = Vec::new();
    for &(name, target, kernel, rule, (sequence, at), change) in MUTANTS {
        let name = format!("{name} in {kernel} for {target}");
        let mut mutant = find(target, kernel).clone();
        let code = &mut mutant.instructions;
        let sequence: Vec<&str> = sequence.split(';').collect();
        let starts = |(it, prefix): (&Instruction, &&str)| {
            format!("{} {}", it.code, it.operands).starts_with(prefix)
        };
        let mut windows = code.windows(sequence.len());
        let start = windows.position(|window| window.iter().zip(&sequence).all(starts));
        let Some(start) = start else {
            missed.push(format!("{name}: no such instructions"));
            continue;
        };
        let place = start + at;
        change.apply(code, place);
        let mut found = amd::check(target, &mutant);
        let other = if target == Gfx942 { Gfx90a } else { Gfx942 };
        found.extend(amd::compare([
            (other, find(other, kernel)),
            (target, &mutant),
        ]));
        let address = mutant.instructions[place].address;
        let found = verify::without_allowed(found, &amd::exemptions());
        let is_found = found.iter().any(|violation| violation.rule == rule);
        if !is_found {
            missed.push(format!("{name}: {found:?} at {address:#x}"));
        }
    }
    assert!(missed.is_empty(), "{missed:#?}");
    println!("{} mutants found", MUTANTS.len());
}
