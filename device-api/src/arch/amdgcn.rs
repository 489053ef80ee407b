//! AMD, in waves of 64 lanes (gfx90a, gfx942).

/// Lanes that run in lock step.
pub const WARP: u32 = 64;
