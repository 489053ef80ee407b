//! Rules for the ordering and the scope of atomics and fences.

use super::Violation;
use crate::{Image, Vendor};

pub(super) const UNSCOPED: &str = "unscoped-atomic";
/// Name of the rule that forbids device scope.
pub const SCOPE: &str = "scope";

/// Finds atomics and fences without ordering or scope. In PTX, `atom` and `red` without `.sem` are
/// relaxed; without `.scope` they have scope `.gpu` and are not atomic with respect to another GPU.
/// LLVM before 23 drops both qualifiers.
pub(super) fn unscoped(image: &Image) -> Vec<Violation> {
    if image.target.vendor() != Vendor::Nvidia {
        return Vec::new();
    }
    let mut out = Vec::new();
    for function in &image.functions {
        for (code, line, location) in function.located() {
            let has = |words: &[&str]| code.split('.').any(|part| words.contains(&part));
            let atomic = code.starts_with("atom.") || code.starts_with("red.");
            let fence = code.starts_with("fence.") || code.starts_with("membar");
            let semantics = has(&["relaxed", "acquire", "release", "acq_rel", "sc", "proxy"]);
            let scope = has(&["sys", "gpu", "cluster", "cta", "proxy"]);
            if (atomic || fence) && !(semantics && scope) {
                out.push(Violation::new(UNSCOPED, &function.name, line).at(location));
            }
        }
    }
    out
}

/// Finds atomics and fences with the scopes `.gpu` and `agent`, which do not synchronise with peer
/// GPUs. A crate's manifest exempts justified uses.
pub(super) fn scope(image: &Image) -> Vec<Violation> {
    match image.target.vendor() {
        Vendor::Nvidia => image
            .functions
            .iter()
            .flat_map(|function| {
                function
                    .located()
                    .filter(|(code, ..)| code.split('.').any(|part| part == "gpu" || part == "gl"))
                    .map(|(_, line, location)| {
                        Violation::new(SCOPE, &function.name, line).at(location)
                    })
            })
            .collect(),
        // Reads the IR, because AMD assembly does not distinguish a scope from a cache policy.
        Vendor::Amd => image
            .ir
            .iter()
            .flat_map(|function| {
                function
                    .instructions()
                    .filter(|line| line.contains("syncscope(\"agent"))
                    .map(|line| Violation::of_ir(SCOPE, &function.name, line))
            })
            .collect(),
    }
}
