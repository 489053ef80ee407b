//! Inputs of launches.

/// Returns number `i` of the input of `rank` in launch `epoch`.
pub fn number(rank: u32, epoch: u64, i: usize) -> u64 {
    (u64::from(rank) + 1) * 31 + epoch * 7 + i as u64 * 3
}
