//! Output of a row with its statistics: normalised, rounded, perhaps fp8.
//!
//! fp8 is of the rounded result, as if the norm had been written and quantised apart: with `y` the
//! rounded result and `a` the greatest `|y|` of the row (or of a group of 128), the scale is
//! `max(a, 1e-10) / 448`, for UE8M0 rounded up to a power of two; `q = e4m3(y * (1 / scale))`,
//! saturating. A NaN makes its scale NaN.

use fusewire_device::element::E4m3;
use fusewire_device::mem;
use fusewire_device::{Block, Element, Group, Machine};

use super::chunk;
use super::row::{CHUNK, Norm, PARTIALS, Row, Targets};
use super::spec::{GROUP, OutputFormat};

/// The largest finite E4M3.
const LARGEST: f32 = 448.0;
/// What the greatest magnitude is at least taken as.
const LEAST: f32 = 1e-10;

impl<T: Element<Acc = f32>> Norm<T> {
    /// Writes row `index` of the targets. All lanes together.
    ///
    /// # Safety
    /// As the kernel promises; `row` is what [`Norm::reduce`] gave.
    #[inline(always)]
    pub(super) unsafe fn write<M: Machine>(
        &self,
        block: Block<M>,
        targets: Targets,
        row: &Row,
        index: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.spec().output_format() {
                OutputFormat::Unquantized => self.each::<M, _>(
                    block,
                    SameType {
                        norm: self,
                        targets,
                        row,
                        index,
                    },
                ),
                OutputFormat::StaticFp8 | OutputFormat::TokenFp8 => {
                    let inverse = if self.spec().output_format() == OutputFormat::StaticFp8 {
                        1.0 / mem::read(self.arguments().scales.cast_const().cast::<f32>())
                    } else {
                        let greatest = self.greatest_of_row::<M>(block, row);
                        self.put_scale(targets, index, 0, greatest, block.is_leader())
                    };
                    let what = Fp8 {
                        norm: self,
                        targets,
                        row,
                        index,
                        inverse,
                    };
                    self.each::<M, _>(block, what);
                }
                OutputFormat::GroupFp8 => {
                    if block.machine().warp_size() < 16 {
                        self.groups_alone::<M>(block, targets, row, index);
                    } else {
                        self.groups_together::<M>(block, targets, row, index);
                    }
                }
            }
        }
    }

    /// Elements `[at, at + N)` of the normalised row, rounded.
    ///
    /// # Safety
    /// As [`Norm::write`]; the elements are in the row.
    #[inline(always)]
    unsafe fn normalised<M: Machine, const N: usize>(&self, row: &Row, at: usize) -> [T; N] {
        // x - 0, x + -0 and -0 + w are x, x and w to the bit.
        let offset = if self.spec().has_unit_offset() {
            1.0
        } else {
            -0.0
        };
        let weights = self.arguments().weight.cast::<T>();
        // SAFETY: the caller's promise.
        let (values, weight) = unsafe {
            (
                row.values.add(at).cast::<[f32; N]>().read(),
                chunk::widen(chunk::read::<M, T, N>(weights.add(at))),
            )
        };
        let biases = self.arguments().bias.cast::<T>();
        let bias = if biases.is_null() {
            [-0.0; N]
        } else {
            // SAFETY: as above.
            chunk::widen(unsafe { chunk::read::<M, T, N>(biases.add(at)) })
        };
        let mut out = [0.0; N];
        for i in 0..N {
            out[i] = (values[i] - row.mean) * row.scale * (weight[i] + offset) + bias[i];
        }
        chunk::narrow(out)
    }

    /// Runs `what` over the row in chunks.
    ///
    /// # Safety
    /// As [`Norm::write`].
    #[inline(always)]
    unsafe fn each<M: Machine, C: Chunks<M>>(&self, block: Block<M>, what: C) {
        let mut at = 0;
        if M::LANES == 1 {
            while at + PARTIALS <= self.hidden {
                // SAFETY: the caller's promise.
                unsafe { what.chunk::<PARTIALS>(at) };
                at += PARTIALS;
            }
            while at < self.hidden {
                // SAFETY: the caller's promise.
                unsafe { what.chunk::<CHUNK>(at) };
                at += CHUNK;
            }
        } else {
            for index in block.elements_of_block(self.hidden / CHUNK) {
                // SAFETY: the caller's promise.
                unsafe { what.chunk::<CHUNK>(index * CHUNK) };
            }
        }
    }

    /// The bits of the greatest magnitude of the row, in every lane.
    ///
    /// # Safety
    /// As [`Norm::write`].
    #[inline(always)]
    unsafe fn greatest_of_row<M: Machine>(&self, block: Block<M>, row: &Row) -> u32 {
        let mut greatest = 0;
        if M::LANES == 1 {
            let mut at = 0;
            while at + PARTIALS <= self.hidden {
                // SAFETY: the caller's promise.
                greatest = greatest.max(magnitude(unsafe {
                    self.normalised::<M, PARTIALS>(row, at)
                }));
                at += PARTIALS;
            }
            while at < self.hidden {
                // SAFETY: the caller's promise.
                greatest = greatest.max(magnitude(unsafe { self.normalised::<M, CHUNK>(row, at) }));
                at += CHUNK;
            }
            return greatest;
        }
        for index in block.elements_of_block(self.hidden / CHUNK) {
            // SAFETY: the caller's promise.
            let chunk = unsafe { self.normalised::<M, CHUNK>(row, index * CHUNK) };
            greatest = greatest.max(magnitude(chunk));
        }
        block.reduce(greatest, u32::max)
    }

    /// Writes the scale for magnitudes up to the one with these bits, if this lane is the one to;
    /// gives what values are multiplied by.
    ///
    /// # Safety
    /// As [`Norm::write`].
    #[inline(always)]
    unsafe fn put_scale(
        &self,
        targets: Targets,
        row: usize,
        group: usize,
        greatest: u32,
        writes: bool,
    ) -> f32 {
        let greatest = f32::from_bits(greatest);
        let scale = if greatest < LEAST { LEAST } else { greatest } / LARGEST;
        if !self.spec().is_ue8m0() {
            if writes {
                let mut target = 0;
                while target < targets.count {
                    let to = targets.scale(target, row, group, 4);
                    // SAFETY: the targets' scales.
                    unsafe { mem::write(to.cast::<f32>(), scale) };
                    target += 1;
                }
            }
            return 1.0 / scale;
        }
        // The next power of two; the least scale is normal, infinity and NaN stay beyond all.
        let bits = scale.to_bits();
        let exponent = (bits >> 23) + u32::from(bits & 0x7f_ffff != 0);
        let exponent = if exponent > 255 { 255 } else { exponent };
        if writes {
            let mut target = 0;
            while target < targets.count {
                // SAFETY: the targets' scales.
                unsafe { mem::write(targets.scale(target, row, group, 1), exponent as u8) };
                target += 1;
            }
        }
        if exponent == 255 {
            return f32::NAN;
        }
        1.0 / f32::from_bits(exponent << 23)
    }

    /// Groups of 128 by 16 lanes side by side. All lanes together.
    ///
    /// # Safety
    /// As [`Norm::write`]; a warp has at least 16 lanes.
    #[inline(always)]
    unsafe fn groups_together<M: Machine>(
        &self,
        block: Block<M>,
        targets: Targets,
        row: &Row,
        index: usize,
    ) {
        let chunks = self.hidden / CHUNK;
        let lanes = block.size() as usize;
        let mut first = 0;
        // All lanes walk together, also those without elements: they shuffle.
        while first < chunks {
            let mine = first + block.rank() as usize;
            let there = mine < chunks;
            let at = if there { mine * CHUNK } else { 0 };
            // SAFETY: the caller's promise.
            let values = unsafe { self.normalised::<M, CHUNK>(row, at) };
            let mut greatest = if there { magnitude(values) } else { 0 };
            let mut mask = 1;
            while mask < (GROUP / CHUNK) as u32 {
                greatest = greatest.max(block.machine().shuffle_xor(greatest, mask));
                mask *= 2;
            }
            let leads = there && mine.is_multiple_of(GROUP / CHUNK);
            // SAFETY: the caller's promise.
            let inverse = unsafe { self.put_scale(targets, index, at / GROUP, greatest, leads) };
            if there {
                // SAFETY: the caller's promise.
                unsafe { put_fp8::<M, T, CHUNK>(self, targets, index, at, values, inverse) };
            }
            first += lanes;
        }
    }

    /// Groups of 128, one lane a group.
    ///
    /// # Safety
    /// As [`Norm::write`].
    #[inline(always)]
    unsafe fn groups_alone<M: Machine>(
        &self,
        block: Block<M>,
        targets: Targets,
        row: &Row,
        index: usize,
    ) {
        for group in block.elements_of_block(self.hidden.div_ceil(GROUP)) {
            let start = group * GROUP;
            if M::LANES == 1 && start + GROUP <= self.hidden {
                // SAFETY: the caller's promise.
                unsafe {
                    let values = self.normalised::<M, GROUP>(row, start);
                    let inverse = self.put_scale(targets, index, group, magnitude(values), true);
                    put_fp8::<M, T, GROUP>(self, targets, index, start, values, inverse);
                }
                continue;
            }
            let end = if start + GROUP < self.hidden {
                start + GROUP
            } else {
                self.hidden
            };
            let mut greatest = 0;
            let mut at = start;
            while at < end {
                // SAFETY: the caller's promise.
                greatest = greatest.max(magnitude(unsafe { self.normalised::<M, CHUNK>(row, at) }));
                at += CHUNK;
            }
            // SAFETY: the caller's promise.
            let inverse = unsafe { self.put_scale(targets, index, group, greatest, true) };
            let mut at = start;
            while at < end {
                // SAFETY: the caller's promise.
                unsafe {
                    let values = self.normalised::<M, CHUNK>(row, at);
                    put_fp8::<M, T, CHUNK>(self, targets, index, at, values, inverse);
                }
                at += CHUNK;
            }
        }
        // A lane has read values that others write in the next row.
        block.sync();
    }
}

/// What is done to each chunk of a row. A trait and not a closure: its method is generic and can be
/// forced inline.
trait Chunks<M: Machine> {
    /// Elements `[at, at + N)`.
    ///
    /// # Safety
    /// As [`Norm::write`]; the elements are in the row.
    unsafe fn chunk<const N: usize>(&self, at: usize);
}

/// Writes the element type.
struct SameType<'a, T> {
    norm: &'a Norm<T>,
    targets: Targets,
    row: &'a Row,
    index: usize,
}

impl<M: Machine, T: Element<Acc = f32>> Chunks<M> for SameType<'_, T> {
    #[inline(always)]
    unsafe fn chunk<const N: usize>(&self, at: usize) {
        // SAFETY: the caller's promise.
        let values = unsafe { self.norm.normalised::<M, N>(self.row, at) };
        let to = self.index * self.norm.hidden + at;
        let mut target = 0;
        while target < self.targets.count {
            // SAFETY: rows of the targets.
            unsafe {
                let out = self.targets.out(target).cast::<T>().add(to);
                chunk::write::<M, T, N>(out, values);
            }
            target += 1;
        }
    }
}

/// Writes fp8 by a known scale.
struct Fp8<'a, T> {
    norm: &'a Norm<T>,
    targets: Targets,
    row: &'a Row,
    index: usize,
    inverse: f32,
}

impl<M: Machine, T: Element<Acc = f32>> Chunks<M> for Fp8<'_, T> {
    #[inline(always)]
    unsafe fn chunk<const N: usize>(&self, at: usize) {
        // SAFETY: the caller's promise.
        unsafe {
            let values = self.norm.normalised::<M, N>(self.row, at);
            put_fp8::<M, T, N>(
                self.norm,
                self.targets,
                self.index,
                at,
                values,
                self.inverse,
            );
        }
    }
}

/// # Safety
/// As [`Norm::write`]; the elements are in the row.
#[inline(always)]
unsafe fn put_fp8<M: Machine, T: Element<Acc = f32>, const N: usize>(
    norm: &Norm<T>,
    targets: Targets,
    row: usize,
    at: usize,
    values: [T; N],
    inverse: f32,
) {
    let mut scaled = chunk::widen(values);
    for i in 0..N {
        scaled[i] *= inverse;
    }
    let out: [E4m3; N] = chunk::narrow(scaled);
    let to = row * norm.hidden + at;
    let mut target = 0;
    while target < targets.count {
        // SAFETY: rows of the targets.
        unsafe { chunk::write::<M, E4m3, N>(targets.out(target).cast::<E4m3>().add(to), out) };
        target += 1;
    }
}

/// The bits of the greatest magnitude: they grow with it, and a NaN's are beyond all.
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
