//! Predicts the time of a launch on GPUs that NVLink connects, from its counts.
//!
//! The costs were measured on one H100 (`benches/results/gpu/2026-11-26-h100.md`) or are those of
//! `docs/performance.md`. The parts are added, as if none overlapped another.

use super::Launch;

/// A node of a graph, in us.
const NODE: f64 = 0.79;
/// A dependent load.
const LOAD: f64 = 0.163;
/// A fence of system scope.
const FENCE: f64 = 0.78;
/// An instruction of the leader.
const INSTRUCTION: f64 = 0.0046;
/// The time until a peer sees a store, beyond that of its load.
const STORE: f64 = 0.792;
/// Bytes in a us over NVLink 4, in one direction.
const NVLINK: f64 = 370e3;
/// Bytes in a us of a GPU's own memory, reads and writes: twice the bytes of a measured copy.
const OWN: f64 = 2.0 * 1392e3;

/// Head of the table.
pub(super) const HEAD: &str = "\
Predicted us on H100s over NVLink, not measured: the sum of the parts.

| operation | ranks | bytes | node | loads | fences | instructions | store | NVLink | own memory | \
sum | sum without instructions |
|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|";

/// Returns the row of a launch.
pub(super) fn row(operation: &str, ranks: u32, bytes: usize, launch: &Launch) -> String {
    let [strong, weak, fences] = launch.steps.map(f64::from);
    let of_route = |prefix: &str, index: usize| -> f64 {
        let routes = launch.bytes.iter();
        let routes = routes.filter(|(name, _)| name.starts_with(prefix));
        routes.map(|(_, bytes)| bytes[index] as f64).sum()
    };
    let instructions = launch.leader_instructions as f64 * INSTRUCTION;
    let nvlink = of_route("peer", 0).max(of_route("peer", 1));
    let parts = [
        NODE,
        (strong + weak) * LOAD,
        fences * FENCE,
        instructions,
        STORE,
        nvlink / NVLINK,
        (of_route("own", 0) + of_route("own", 1)) / OWN,
    ];
    let sum: f64 = parts.iter().sum();
    let parts = parts.map(|part| format!("{part:.1}")).join(" | ");
    format!(
        "| {operation} | {ranks} | {bytes} | {parts} | {sum:.1} | {:.1} |",
        sum - instructions
    )
}
