//! Output of a row with its statistics: normalized, rounded, possibly in fp8.
//!
//! fp8 is computed from the rounded result, as if norm and quantization were separate: with `y` the
//! rounded result and `a` the greatest `|y|` of the row (or of a group of 128), the scale is
//! `max(a, 1e-10) / 448`, for UE8M0 rounded up to a power of two; `q = e4m3(y * (1 / scale))`,
//! saturating. A NaN makes its scale NaN.

use fusewire_device::element::E4m3;
use fusewire_device::mem;
use fusewire_device::{Element, Group, Machine};

use super::row::{Row, chunks_of_lane};
use super::spec::{GROUP, OutputFormat};
use super::stripe::{CHUNK, PARTIALS, VIRTUAL_LANES};
use super::sum::{Exchange, Sums};
use crate::chunk;

/// The largest finite E4M3.
const LARGEST: f32 = 448.0;
/// Lower bound of the greatest magnitude.
const LEAST: f32 = 1e-10;

impl<M: Machine, T: Element<Acc = f32>> Row<M, T> {
    /// Writes the block's stripe of the row to the targets. Returns false after a failure, which is
    /// recorded. All lanes together.
    #[inline(always)]
    pub(super) fn write(&self, sums: &impl Sums<M>) -> bool {
        match self.norm.spec().output_format() {
            OutputFormat::Unquantized => self.each(Unquantized { row: self }),
            OutputFormat::StaticFp8 | OutputFormat::TokenFp8 => {
                let inverse = if self.norm.spec().output_format() == OutputFormat::StaticFp8 {
                    let scale = self.norm.arguments().scales.cast_const().cast::<f32>();
                    // SAFETY: `Norm::new` has checked that the buffer has a scale.
                    1.0 / unsafe { mem::read(scale) }
                } else {
                    let Some(greatest) = self.greatest(sums) else {
                        return false;
                    };
                    // SAFETY: a row has a scale; only the leader writes it.
                    unsafe {
                        let writes = self.block.is_leader() && self.norm.stripe().index == 0;
                        self.put_scale(0, greatest, writes)
                    }
                };
                self.each(Fp8 { row: self, inverse });
            }
            OutputFormat::GroupFp8 => {
                if self.block.machine().warp_size() < 16 {
                    self.groups_of_lanes();
                } else {
                    self.groups_of_16_lanes();
                }
            }
        }
        true
    }

    /// Returns elements `[at, at + N)` of the normalized row, rounded.
    ///
    /// # Safety
    /// As [`Row::values`].
    #[inline(always)]
    unsafe fn normalized<const N: usize>(&self, at: usize) -> [T; N] {
        // x - 0, x + -0 and -0 + w are x, x and w bit for bit.
        let offset = if self.norm.spec().has_unit_offset() {
            1.0
        } else {
            -0.0
        };
        let weights = self.norm.arguments().weight.cast::<T>();
        // SAFETY: the precondition of this function; `Norm::new` has checked that the weight has as
        // many elements as a row.
        let (values, weight) = unsafe {
            (
                self.values::<N>(at),
                chunk::widen(chunk::read::<M, T, N>(weights.add(at))),
            )
        };
        let biases = self.norm.arguments().bias.cast::<T>();
        let bias = if biases.is_null() {
            [-0.0; N]
        } else {
            // SAFETY: as for the weight.
            chunk::widen(unsafe { chunk::read::<M, T, N>(biases.add(at)) })
        };
        let mut out = [0.0; N];
        for i in 0..N {
            out[i] = (values[i] - self.mean) * self.scale * (weight[i] + offset) + bias[i];
        }
        chunk::narrow(out)
    }

    /// Runs `work` over the row in chunks. All lanes together.
    #[inline(always)]
    fn each(&self, work: impl Chunks) {
        let hidden = self.norm.hidden();
        let mut at = 0;
        if M::LANES == 1 {
            while at + PARTIALS <= hidden {
                // SAFETY: within the row by the condition. There is one lane.
                unsafe { work.chunk::<PARTIALS>(at) };
                at += PARTIALS;
            }
            while at < hidden {
                // SAFETY: `at + CHUNK <= hidden`: both are multiples of it. There is one lane.
                unsafe { work.chunk::<CHUNK>(at) };
                at += CHUNK;
            }
        } else {
            chunks_of_lane(self.block, self.norm.stripe(), hidden / CHUNK, |index| {
                // SAFETY: `index < hidden / CHUNK`; each index goes to one lane.
                unsafe { work.chunk::<CHUNK>(index * CHUNK) };
            });
        }
    }

    /// Returns the bits of the greatest magnitude of the row, on every lane. `None` after a
    /// failure, which is recorded. All lanes together.
    #[inline(always)]
    fn greatest(&self, sums: &impl Sums<M>) -> Option<u32> {
        let hidden = self.norm.hidden();
        let mut greatest = 0;
        if M::LANES == 1 {
            let mut at = 0;
            while at + PARTIALS <= hidden {
                // SAFETY: within the row by the condition.
                greatest = greatest.max(magnitude(unsafe { self.normalized::<PARTIALS>(at) }));
                at += PARTIALS;
            }
            while at < hidden {
                // SAFETY: `at + CHUNK <= hidden`: both are multiples of it.
                greatest = greatest.max(magnitude(unsafe { self.normalized::<CHUNK>(at) }));
                at += CHUNK;
            }
            return Some(greatest);
        }
        let stripe = self.norm.stripe();
        chunks_of_lane(self.block, stripe, hidden / CHUNK, |index| {
            // SAFETY: `index < hidden / CHUNK`.
            let chunk = unsafe { self.normalized::<CHUNK>(index * CHUNK) };
            greatest = greatest.max(magnitude(chunk));
        });
        let greatest = self.block.reduce(greatest, u32::max);
        if stripe.bits == 0 {
            return Some(greatest);
        }
        // The reduction has a barrier after the last read of the table of partials.
        let table = self.table().cast::<u32>();
        if self.block.is_leader() {
            // SAFETY: memory of this block with more entries than there are stripes. Only the
            // leader writes it.
            unsafe { table.add(stripe.index as usize).write(greatest) };
        }
        self.block.sync();
        // SAFETY: the block has written its entry, and passed a barrier. A launch has one row.
        if !unsafe { sums.complete(stripe, Exchange::Greatest, table) } {
            return None;
        }
        let mut greatest = 0;
        let mut index = 0;
        while index < stripe.count() as usize {
            // SAFETY: the exchange has written all entries, before a barrier.
            greatest = greatest.max(unsafe { table.add(index).read() });
            index += 1;
        }
        Some(greatest)
    }

    /// Computes the scale for magnitudes up to the one with the bits `greatest`, and writes it if
    /// `writes` is true. Returns the factor by which values are multiplied.
    ///
    /// # Safety
    /// `group` must have a scale, and only one lane may write it.
    #[inline(always)]
    unsafe fn put_scale(&self, group: usize, greatest: u32, writes: bool) -> f32 {
        let (targets, row) = (self.targets, self.index);
        let greatest = f32::from_bits(greatest);
        let scale = if greatest < LEAST { LEAST } else { greatest } / LARGEST;
        if !self.norm.spec().is_ue8m0() {
            if writes {
                let mut target = 0;
                while let Some(to) = targets.scale(target, row, group, 4) {
                    // SAFETY: every target has the scales of its rows; `group` has one.
                    unsafe { mem::write(to.cast::<f32>(), scale) };
                    target += 1;
                }
            }
            return 1.0 / scale;
        }
        // The next power of two. The least scale is normal; infinity and NaN stay above all others.
        let bits = scale.to_bits();
        let exponent = (bits >> 23) + u32::from(bits & 0x7f_ffff != 0);
        let exponent = if exponent > 255 { 255 } else { exponent };
        if writes {
            let mut target = 0;
            while let Some(to) = targets.scale(target, row, group, 1) {
                // SAFETY: every target has the scales of its rows; `group` has one.
                unsafe { mem::write(to, exponent as u8) };
                target += 1;
            }
        }
        if exponent == 255 {
            return f32::NAN;
        }
        1.0 / f32::from_bits(exponent << 23)
    }

    /// Writes each group of 128 by 16 adjacent lanes. All lanes together, in warps of at least 16.
    #[inline(always)]
    fn groups_of_16_lanes(&self) {
        let (block, stripe) = (self.block, self.norm.stripe());
        let chunks = stripe.chunks((self.norm.hidden() / CHUNK) as u32);
        // All lanes stay in the loop, including those without elements, because of the shuffles.
        let mut first = 0;
        while first < chunks {
            let position = first + block.rank();
            let there = position < chunks;
            let at = stripe.chunk(position) as usize * CHUNK;
            let values = match there {
                // SAFETY: the chunk is in the row, and this lane has computed its values.
                true => unsafe { self.normalized::<CHUNK>(at) },
                false => [T::narrow(0.0); CHUNK],
            };
            let mut greatest = magnitude(values);
            let mut mask = 1;
            while mask < (GROUP / CHUNK) as u32 {
                greatest = greatest.max(block.machine().shuffle_xor(greatest, mask));
                mask *= 2;
            }
            let leads = there && position.is_multiple_of((GROUP / CHUNK) as u32);
            // SAFETY: the group of an element of the row; only the lane of its first chunk writes.
            let inverse = unsafe { self.put_scale(at / GROUP, greatest, leads) };
            if there {
                // SAFETY: the chunk is in the row; each goes to one lane.
                unsafe { self.put_fp8::<CHUNK>(at, values, inverse) };
            }
            first += block.size();
        }
    }

    /// Writes each group of 128 by one lane. All lanes together.
    #[inline(always)]
    fn groups_of_lanes(&self) {
        let hidden = self.norm.hidden();
        for group in self.block.elements_of_block(hidden.div_ceil(GROUP)) {
            let start = group * GROUP;
            let lane = (start / CHUNK % VIRTUAL_LANES) as u32;
            if !self.norm.stripe().lanes().contains(&lane) {
                continue;
            }
            if M::LANES == 1 && start + GROUP <= hidden {
                // SAFETY: a whole group of the row by the condition. There is one lane.
                unsafe {
                    let values = self.normalized::<GROUP>(start);
                    let inverse = self.put_scale(group, magnitude(values), true);
                    self.put_fp8::<GROUP>(start, values, inverse);
                }
                continue;
            }
            let end = if start + GROUP < hidden {
                start + GROUP
            } else {
                hidden
            };
            let mut greatest = 0;
            let mut at = start;
            while at < end {
                // SAFETY: `at + CHUNK <= end`: both are multiples of it.
                greatest = greatest.max(magnitude(unsafe { self.normalized::<CHUNK>(at) }));
                at += CHUNK;
            }
            // SAFETY: a group of the row; each group goes to one lane.
            let inverse = unsafe { self.put_scale(group, greatest, true) };
            let mut at = start;
            while at < end {
                // SAFETY: `at + CHUNK <= end`, as above; each group goes to one lane.
                unsafe {
                    let values = self.normalized::<CHUNK>(at);
                    self.put_fp8::<CHUNK>(at, values, inverse);
                }
                at += CHUNK;
            }
        }
        // This lane has read values that other lanes write in the next row.
        self.block.sync();
    }

    /// Writes elements `[at, at + N)` to the targets: `values` times `inverse`, in fp8.
    ///
    /// # Safety
    /// The elements must be in the row, and no other lane may write them.
    #[inline(always)]
    unsafe fn put_fp8<const N: usize>(&self, at: usize, values: [T; N], inverse: f32) {
        let mut scaled = chunk::widen(values);
        for i in 0..N {
            scaled[i] *= inverse;
        }
        // SAFETY: the precondition of this function.
        unsafe { self.put::<E4m3, N>(at, chunk::narrow(scaled)) };
    }

    /// Writes elements `[at, at + N)` to the targets.
    ///
    /// # Safety
    /// The elements must be in the row, and no other lane may write them. The type of the output
    /// must be `E`.
    #[inline(always)]
    unsafe fn put<E: Element, const N: usize>(&self, at: usize, values: [E; N]) {
        let to = self.index * self.norm.hidden() + at;
        let mut target = 0;
        while let Some(out) = self.targets.out(target) {
            // SAFETY: every target has the row, and the row has the elements.
            unsafe { chunk::write::<M, E, N>(out.cast::<E>().add(to), values) };
            target += 1;
        }
    }
}

/// Work on each chunk of a row. A trait instead of a closure: its method is generic, and can be
/// forced inline.
trait Chunks {
    /// Writes elements `[at, at + N)`.
    ///
    /// # Safety
    /// The elements must be in the row, and no other lane may write them.
    unsafe fn chunk<const N: usize>(&self, at: usize);
}

/// Writes the row in the element type.
struct Unquantized<'a, M, T> {
    row: &'a Row<M, T>,
}

impl<M: Machine, T: Element<Acc = f32>> Chunks for Unquantized<'_, M, T> {
    #[inline(always)]
    unsafe fn chunk<const N: usize>(&self, at: usize) {
        // SAFETY: the precondition of this function; an output that is not quantized has type `T`.
        unsafe { self.row.put::<T, N>(at, self.row.normalized::<N>(at)) };
    }
}

/// Writes fp8 by a known scale.
struct Fp8<'a, M, T> {
    row: &'a Row<M, T>,
    inverse: f32,
}

impl<M: Machine, T: Element<Acc = f32>> Chunks for Fp8<'_, M, T> {
    #[inline(always)]
    unsafe fn chunk<const N: usize>(&self, at: usize) {
        // SAFETY: the precondition of this function.
        unsafe {
            let values = self.row.normalized::<N>(at);
            self.row.put_fp8::<N>(at, values, self.inverse);
        }
    }
}

/// Returns the bits of the greatest magnitude. Bits grow with magnitudes; those of a NaN are
/// greater than all others.
#[inline(always)]
fn magnitude<T: Element<Acc = f32>, const N: usize>(values: [T; N]) -> u32 {
    let values = chunk::widen(values);
    let mut greatest = 0;
    for i in 0..N {
        let bits = values[i].to_bits() & 0x7fff_ffff;
        greatest = if bits > greatest { bits } else { greatest };
    }
    greatest
}
