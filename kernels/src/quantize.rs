//! Local steps of the quantized reduce_scatter: f32 to bf16 with stochastic rounding, and the sum
//! of bf16 rows in f32.

use fusewire_device::{Block, Machine, kernel, mem};

/// Returns a hash of `seed` and `index` whose low 16 bits are used as a random number: two rounds
/// of multiply and xor-shift (the 32-bit finalizer of MurmurHash3).
#[inline(always)]
fn random(seed: u32, index: u32) -> u32 {
    let mut word = index.wrapping_mul(0x9e37_79b9) ^ seed;
    word ^= word >> 16;
    word = word.wrapping_mul(0x85eb_ca6b);
    word ^= word >> 13;
    word = word.wrapping_mul(0xc2b2_ae35);
    word ^ word >> 16
}

/// Rounds to bf16, away from zero with a probability equal to the fraction that is cut off. Exact
/// values and infinities do not change; NaN stays NaN. Values beyond the largest finite bf16 may
/// become infinite.
#[inline(always)]
fn stochastic(bits: u32, random: u32) -> u16 {
    let rounded = (bits.wrapping_add(random & 0xffff) >> 16) as u16;
    let special = bits & 0x7f80_0000 == 0x7f80_0000;
    let nan = special && bits & 0x007f_ffff != 0;
    if nan {
        (bits >> 16) as u16 | 0x40
    } else if special {
        (bits >> 16) as u16
    } else {
        rounded
    }
}

/// Rounds `count` elements at `source` to bf16 at `target`. Element i uses random number i of the
/// stream `seed`, so the result does not depend on blocks or lanes.
///
/// # Safety
/// `source` must be readable and `target` writable for `count` elements.
#[kernel]
pub unsafe fn quantize(
    block: Block<impl Machine>,
    source: *const u32,
    target: *mut u16,
    count: u64,
    seed: u32,
) {
    for at in block.elements(count as usize) {
        // SAFETY: `at < count`, and both buffers have `count` elements (precondition).
        unsafe {
            let bits = mem::read(source.add(at));
            mem::write(target.add(at), stochastic(bits, random(seed, at as u32)));
        }
    }
}

/// Sums `rows` rows of `count` bf16 elements in row order, in f32, divides by `divisor` and writes
/// f32.
///
/// # Safety
/// `source` must be readable for all rows, and `target` writable for `count` elements.
#[kernel]
pub unsafe fn sum_rows(
    block: Block<impl Machine>,
    source: *const u16,
    target: *mut f32,
    rows: u32,
    count: u64,
    divisor: f32,
) {
    for at in block.elements(count as usize) {
        let mut sum = 0.0f32;
        let mut row = 0;
        while row < rows {
            // SAFETY: `row < rows` and `at < count`, so the source has the element (precondition).
            let bits = unsafe { mem::read(source.add(row as usize * count as usize + at)) };
            let value = f32::from_bits(u32::from(bits) << 16);
            sum = if row == 0 { value } else { sum + value };
            row += 1;
        }
        // SAFETY: `at < count`, and the target has `count` elements (precondition).
        unsafe { mem::write(target.add(at), sum / divisor) };
    }
}
