//! Rows and results in fp8, with a scale for each group of channels.
//!
//! With `a` the largest magnitude of a group, at least 1e-4, the scale is `a / 448`, and an
//! element is `x * (448 / a)`, rounded to the nearest E4M3 (ties to even), saturating. For UE8M0
//! the scale is rounded up to a power of two, and an element is `x / scale`. A NaN makes all
//! elements of its group and the scale NaN; with UE8M0, so does an infinity.

use fusewire_device::element::E4m3;
use fusewire_device::mem;
use fusewire_device::{Element, Group, In, Machine, Out, Warp};

use crate::chunk;

use super::memory::Memory;
use super::shape::{GROUP, MoeFlags, MoeShape, with_element};

/// The largest finite E4M3.
const LARGEST: f32 = 448.0;
/// Lower bound of the largest magnitude.
const LEAST: f32 = 1e-4;
/// Elements of a lane: lanes divide a group.
const CHUNK: usize = 8;
/// Elements that a lane converts back at once: 16 bytes of fp8.
const UNIT: usize = 16;
/// Lanes of a group.
const LANES: usize = GROUP / CHUNK;

/// Rows that are quantized: each becomes its payload, followed by its scales.
#[derive(Clone, Copy, Debug)]
pub(super) struct Quantizer<'a> {
    /// The elements of all rows, as words.
    pub(super) source: In<'a, u32>,
    /// Words of a row of the source.
    pub(super) row: usize,
    /// The quantized rows.
    pub(super) target: Memory<'a, u32>,
    /// Words from a quantized row to the next.
    pub(super) stride: usize,
    /// Words of the payload of a row: a quarter of its elements.
    pub(super) payload: usize,
    /// Scales are the exponents of powers of two.
    pub(super) is_ue8m0: bool,
}

impl Quantizer<'_> {
    /// Quantizes `rows` rows of elements of type `T`. All lanes of the group together; the caller
    /// synchronizes.
    ///
    /// # Safety
    /// On a GPU, the elements must be aligned to 16 bytes.
    #[inline(always)]
    pub(super) unsafe fn run<M: Machine, T: Element<Acc = f32>>(
        self,
        (machine, group): (M, impl Group),
        rows: usize,
    ) {
        let groups = match 4 * self.payload / GROUP {
            0 => 1, // A division by 0 would be a panic.
            groups => groups,
        };
        let target = move |index: usize| {
            let (row, group) = (index / groups, index % groups);
            Target {
                row: self.target.slice(row * self.stride, self.stride),
                payload: self.payload,
                is_ue8m0: self.is_ue8m0,
                group,
            }
        };
        let words = GROUP * size_of::<T>() / 4;
        let source = move |index: usize| {
            let (row, group) = (index / groups, index % groups);
            self.source.slice(row * self.row + group * words, words)
        };
        let count = rows * groups;
        if M::LANES == 1 || machine.warp_size() < LANES as u32 {
            for index in group.elements_of_group(count) {
                let from = source(index);
                if from.len() < words {
                    continue; // An error has been recorded.
                }
                // SAFETY: the source has a group, whose address is aligned (precondition).
                unsafe { target(index).quantize::<M, T>(from.as_ptr().cast()) };
            }
            return;
        }
        let mut start = 0;
        // All lanes stay in the loop, because of the shuffles.
        while start < count * LANES {
            let position = start + group.rank() as usize;
            start += group.size() as usize;
            let is_there = position < count * LANES;
            let index = if is_there { position / LANES } else { 0 };
            let chunk = position % LANES;
            let mut values = [T::narrow(0.0); CHUNK];
            if is_there {
                let from = source(index);
                if from.len() == words {
                    // SAFETY: the group has the chunk; its address is aligned (precondition).
                    values = unsafe {
                        let at = from.as_ptr().cast::<T>().add(chunk * CHUNK);
                        chunk::read::<M, T, CHUNK>(at)
                    };
                }
            }
            let mut greatest = magnitude(values);
            let mut mask = 1;
            while mask < LANES as u32 {
                greatest = greatest.max(machine.shuffle_xor(greatest, mask));
                mask *= 2;
            }
            let target = target(index);
            let factor = target.put_scale(greatest, is_there && chunk == 0);
            if is_there {
                target.put::<M, T, CHUNK>(chunk * CHUNK, values, factor);
            }
        }
    }
}

/// Writes a row that has arrived in fp8 to row `row` of the result, as elements of the type of the
/// tokens. All lanes of the warp together.
///
/// # Safety
/// On a GPU, the result and the row must be aligned to 16 bytes. The row must not be in the result.
#[inline(always)]
pub(super) unsafe fn dequantize<M: Machine>(
    warp: Warp<M>,
    shape: &MoeShape,
    from: Memory<u32>,
    out: Out<u32>,
    row: usize,
) {
    let (words, payload) = (shape.input_words(), shape.payload as usize);
    let to = out.slice(row * words, words);
    if to.len() < words || from.len() < payload + shape.scales as usize {
        return; // An error has been recorded.
    }
    with_element!(shape.flags, T => {
        let row = Received {
            shape: *shape,
            from,
            to: to.as_ptr().cast::<T>(),
        };
        if M::LANES == 1 {
            for group in 0..4 * payload / GROUP {
                // SAFETY: the row has the group. There is one lane.
                unsafe { row.dequantize::<M, GROUP>(group * GROUP) };
            }
        } else {
            for unit in warp.elements_of_group(4 * payload / UNIT) {
                // SAFETY: the row has the elements, each of which goes to one lane. Their addresses
                // are aligned (precondition), because `UNIT` elements of any type are a multiple
                // of 16 bytes.
                unsafe { row.dequantize::<M, UNIT>(unit * UNIT) };
            }
        }
    });
}

/// A row that has arrived, and the elements to which it is converted.
struct Received<'a, T> {
    shape: MoeShape,
    from: Memory<'a, u32>,
    to: *mut T,
}

impl<T: Element<Acc = f32>> Received<'_, T> {
    /// Converts elements `[at, at + N)` of a group: an element times the scale, rounded.
    ///
    /// # Safety
    /// The row must have the elements, and no other lane may write them. With several lanes, their
    /// addresses must be aligned to 16 bytes.
    #[inline(always)]
    unsafe fn dequantize<M: Machine, const N: usize>(&self, at: usize) {
        let group = at / GROUP;
        let scales = self.shape.payload as usize;
        let scale = if self.shape.flags.has(MoeFlags::UE8M0) {
            let word = self.from.get(scales + group / 4);
            let exponent = word >> (group % 4 * 8) & 0xff;
            f32::from_bits(exponent << 23)
        } else {
            f32::from_bits(self.from.get(scales + group))
        };
        // SAFETY: the precondition of this function.
        unsafe {
            let from = self.from.as_ptr().cast::<E4m3>().add(at);
            let mut values = chunk::widen(chunk::read::<M, E4m3, N>(from));
            for i in 0..N {
                values[i] *= scale;
            }
            chunk::write::<M, T, N>(self.to.add(at), chunk::narrow(values));
        }
    }
}

/// A group in a row that is quantized.
#[derive(Clone, Copy)]
struct Target<'a> {
    row: Memory<'a, u32>,
    payload: usize,
    is_ue8m0: bool,
    group: usize,
}

impl Target<'_> {
    /// Quantizes the group with one lane. With one lane in a block, the loops over the group
    /// vectorize.
    ///
    /// # Safety
    /// `source` must be valid for a group, and aligned to 16 bytes on a GPU.
    #[inline(always)]
    unsafe fn quantize<M: Machine, T: Element<Acc = f32>>(&self, source: *const T) {
        if M::LANES == 1 {
            // SAFETY: the precondition of this function.
            let values = unsafe { chunk::read::<M, T, GROUP>(source) };
            let factor = self.put_scale(magnitude(values), true);
            self.put::<M, T, GROUP>(0, values, factor);
            return;
        }
        let mut greatest = 0;
        for chunk in 0..LANES {
            // SAFETY: the precondition of this function; the group has the chunk.
            let values = unsafe { chunk::read::<M, T, CHUNK>(source.add(chunk * CHUNK)) };
            greatest = greatest.max(magnitude(values));
        }
        let factor = self.put_scale(greatest, true);
        for chunk in 0..LANES {
            // SAFETY: as above.
            let values = unsafe { chunk::read::<M, T, CHUNK>(source.add(chunk * CHUNK)) };
            self.put::<M, T, CHUNK>(chunk * CHUNK, values, factor);
        }
    }

    /// Computes the scale for magnitudes up to the one with the bits `greatest`, and writes it if
    /// `writes` is true. Returns the factor by which elements are multiplied.
    #[inline(always)]
    fn put_scale(&self, greatest: u32, writes: bool) -> f32 {
        let greatest = f32::from_bits(greatest);
        let greatest = if greatest < LEAST { LEAST } else { greatest };
        let scale = greatest / LARGEST;
        if !self.is_ue8m0 {
            if writes {
                self.row.set(self.payload + self.group, scale.to_bits());
            }
            return LARGEST / greatest;
        }
        // The next power of two. The least scale is normal; infinity and NaN stay above all others.
        let bits = scale.to_bits();
        let exponent = (bits >> 23) + u32::from(bits & 0x7f_ffff != 0);
        let exponent = if exponent > 255 { 255 } else { exponent };
        if writes {
            let words = self
                .row
                .slice(self.payload, self.row.len().saturating_sub(self.payload));
            if self.group < 4 * words.len() {
                let at = words.as_ptr().cast::<u8>().wrapping_add(self.group);
                // SAFETY: the words have the byte; only this lane writes it.
                unsafe { mem::write(at, exponent as u8) };
            }
        }
        if exponent == 255 {
            return f32::NAN;
        }
        1.0 / f32::from_bits(exponent << 23)
    }

    /// Writes elements `[at, at + N)` of the group: the values times the factor.
    #[inline(always)]
    fn put<M: Machine, T: Element<Acc = f32>, const N: usize>(
        &self,
        at: usize,
        values: [T; N],
        factor: f32,
    ) {
        let mut scaled = chunk::widen(values);
        for i in 0..N {
            scaled[i] *= factor;
        }
        let word = (self.group * GROUP + at) / 4;
        let words = self.row.slice(word, N / 4);
        if words.len() == N / 4 {
            // SAFETY: the words have the elements, at a multiple of 8 bytes; only this lane writes
            // them.
            unsafe { chunk::write::<M, E4m3, N>(words.as_ptr().cast(), chunk::narrow(scaled)) };
        }
    }
}

/// Returns the bits of the largest magnitude. Bits grow with magnitudes; those of a NaN are
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
