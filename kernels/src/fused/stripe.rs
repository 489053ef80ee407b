//! Stripes: the parts of a row that several blocks handle.
//!
//! Stripe s of 2^b has the elements of virtual lanes `s * 512 / 2^b ..` of the row (`row`). So it
//! has whole partials of each statistic, and the sums of all stripes are the same bits as those of
//! one block. Of each 4096 elements of a row, a stripe has 4096 / 2^b, which are contiguous.

use core::ops::Range;

use fusewire_device::packet::Segments;
use fusewire_device::{Block, Machine};

use super::spec::{GROUP, MOST_STRIPE_BITS, NormSpec};

/// Number of accumulators of a row.
pub(super) const ACCUMULATORS: usize = 4096;
/// Number of partial sums of a row.
pub(crate) const PARTIALS: usize = 128;
/// Number of virtual lanes.
pub(super) const VIRTUAL_LANES: usize = ACCUMULATORS / CHUNK;
/// Number of elements that a lane moves at once. The elements of a row are a multiple of it.
pub(super) const CHUNK: usize = 8;

// A stripe has whole groups of fp8 and whole warps of 64 lanes.
const _: () = assert!(VIRTUAL_LANES >> MOST_STRIPE_BITS == 64);
const _: () = assert!((64 * CHUNK).is_multiple_of(GROUP));

/// A block's stripe of a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stripe {
    /// Binary logarithm of the number of stripes of a row.
    pub(super) bits: u32,
    /// Index of the stripe.
    pub(super) index: u32,
}

impl Stripe {
    /// The whole row.
    pub(super) const WHOLE: Self = Self { bits: 0, index: 0 };

    /// Returns this block's stripe, the first of its rows, and their number. With several blocks
    /// for a row, a block has at most one row. Rows have one stripe if the launch has too few
    /// blocks for more.
    #[inline(always)]
    pub(super) fn of_block<M: Machine>(
        block: Block<M>,
        rows: usize,
        spec: NormSpec,
    ) -> (Self, usize, usize) {
        let bits = spec.stripe_bits();
        if M::LANES == 1 || bits == 0 || rows > block.count() as usize >> bits {
            let (first, last) = block.slice(rows, 1);
            return (Self::WHOLE, first, last - first);
        }
        let row = (block.index() >> bits) as usize;
        let index = block.index() & ((1 << bits) - 1);
        (Self { bits, index }, row, usize::from(row < rows))
    }

    /// Returns the number of stripes of a row.
    #[inline(always)]
    pub(super) fn count(self) -> u32 {
        1 << self.bits
    }

    /// Returns the virtual lanes of the stripe.
    #[inline(always)]
    pub(super) fn lanes(self) -> Range<u32> {
        let first = self.index << self.width();
        first..first + (1 << self.width())
    }

    /// Returns the partials of the stripe.
    #[inline(always)]
    pub(super) fn partials(self) -> Range<usize> {
        let (lanes, each) = (self.lanes(), VIRTUAL_LANES / PARTIALS);
        lanes.start as usize / each..lanes.end as usize / each
    }

    /// Returns the binary logarithm of the number of virtual lanes of the stripe, and of its chunks
    /// in a segment.
    #[inline(always)]
    fn width(self) -> u32 {
        VIRTUAL_LANES.ilog2() - self.bits
    }

    /// Returns the number of the stripe's chunks, of a row of `chunks`.
    #[inline(always)]
    pub(super) fn chunks(self, chunks: u32) -> u32 {
        let period = VIRTUAL_LANES as u32;
        let rest = (chunks % period).saturating_sub(self.lanes().start);
        ((chunks / period) << self.width()) + rest.min(1 << self.width())
    }

    /// Returns the position, among the stripe's chunks, of chunk `chunk` of the row.
    #[inline(always)]
    pub(super) fn position(self, chunk: u32) -> u32 {
        let segment = chunk / VIRTUAL_LANES as u32;
        (segment << self.width()) + (chunk & ((1 << self.width()) - 1))
    }

    /// Returns the chunk of the row at a position among the stripe's chunks.
    #[inline(always)]
    pub(super) fn chunk(self, position: u32) -> u32 {
        let segment = position >> self.width();
        // The segment begins here among all stripes' chunks, and there among this one's.
        let (here, there) = (segment * VIRTUAL_LANES as u32, segment << self.width());
        self.lanes().start + here + (position - there)
    }

    /// Returns the segments of the stripe in a row whose chunks have `1 << chunk` bytes.
    #[inline(always)]
    pub(super) fn segments(self, chunk: u32) -> Segments {
        Segments::new(self.width() + chunk, self.bits)
    }
}

/// Returns the number of elements of the first of `1 << bits` stripes of a row of `hidden`
/// elements. No stripe has more.
pub const fn first_stripe(hidden: usize, bits: u32) -> usize {
    let (period, width) = (VIRTUAL_LANES * CHUNK, (VIRTUAL_LANES * CHUNK) >> bits);
    let rest = hidden % period;
    (hidden / period) * width + if rest < width { rest } else { width }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_divide_a_row() {
        for bits in 0..=MOST_STRIPE_BITS {
            for chunks in [0, 1, 63, 64, 65, 255, 511, 512, 513, 896, 1024, 2000] {
                let mut owners = [u32::MAX; 2000];
                for index in 0..1 << bits {
                    let stripe = Stripe { bits, index };
                    let count = stripe.chunks(chunks);
                    assert!(count as usize * CHUNK <= first_stripe(chunks as usize * CHUNK, bits));
                    for position in 0..count {
                        let chunk = stripe.chunk(position);
                        assert_eq!(stripe.position(chunk), position);
                        assert!(stripe.lanes().contains(&(chunk % VIRTUAL_LANES as u32)));
                        // The packets of a chunk of 16 bytes come from its place in the row.
                        let first = 16 * stripe.chunk(0) as usize;
                        let found = stripe.segments(4).find(16 * position as usize);
                        assert_eq!(first + found, 16 * chunk as usize);
                        let owner = &mut owners[chunk as usize];
                        assert_eq!(*owner, u32::MAX, "chunk {chunk} has two stripes");
                        *owner = index;
                    }
                }
                let owned = owners.iter().filter(|&&owner| owner != u32::MAX).count();
                assert_eq!(owned, chunks as usize, "{bits} bits");
            }
        }
    }
}
