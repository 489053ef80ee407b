//! Registers of all lanes of a warp.

/// Number of lanes of a warp.
pub(crate) const LANES: usize = 32;

/// A register of all lanes of a warp. Values narrower than 64 bits are zero-extended; predicates
/// are 0 or 1.
pub(crate) type Row = [u64; LANES];

/// Computes an operation for the lanes of a mask. Other lanes of the result are unspecified.
pub(crate) type AluFn = fn(&mut Row, [&Row; 3], u32);

/// Iterates over the lanes of a mask.
pub(crate) fn lanes(mut mask: u32) -> impl Iterator<Item = usize> {
    core::iter::from_fn(move || {
        let lane = (mask != 0).then(|| mask.trailing_zeros() as usize)?;
        mask &= mask - 1;
        Some(lane)
    })
}
