//! NVIDIA.

/// Lanes that run in lock step.
pub const WARP: u32 = 32;
