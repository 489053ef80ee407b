//! Parts of a block's bytes, one for each rank.

use fusewire_device::comm::ring;
use fusewire_device::layout::LINE;
use fusewire_device::mem;
use fusewire_device::packet::{PAIR_DATA, Slots, read_pair};
use fusewire_device::session::Session;
use fusewire_device::{Group, Machine};

/// Number of ranks whose pairs a lane has in flight.
pub(super) const AT_ONCE: usize = 4;

/// Bytes that are divided into a part for each rank, of whole lines. The last parts can be shorter
/// than the others, or empty.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts {
    bytes: usize,
    each: usize,
}

impl Parts {
    #[inline(always)]
    pub(super) fn new(bytes: usize, ranks: u32) -> Self {
        let line = LINE as usize;
        // A GPU divides 32 bits faster. If there are more lines, a part does not fit a slot.
        let lines = u32::try_from(bytes.div_ceil(line)).unwrap_or(u32::MAX);
        let each = lines.div_ceil(ranks.max(1)) as usize * line;
        Self { bytes, each }
    }

    /// Returns the bytes of the first part, which is the longest.
    #[inline(always)]
    pub(super) const fn each(self) -> usize {
        self.each
    }

    /// Returns the offset of the first byte of `rank`'s part, and the number of its bytes.
    #[inline(always)]
    pub(super) fn of(self, rank: u32) -> (usize, usize) {
        let first = (rank as usize * self.each).min(self.bytes);
        (first, self.each.min(self.bytes - first))
    }

    /// Returns true if all parts of `ranks` have all 8 bytes of pair `pair`, a pair of the first
    /// part.
    #[inline(always)]
    pub(super) fn have(self, ranks: [u32; AT_ONCE], pair: usize) -> bool {
        let last = ranks[0].max(ranks[1]).max(ranks[2].max(ranks[3]));
        last as usize * self.each + (pair + 1) * PAIR_DATA <= self.bytes
    }
}

/// Returns the ranks at steps `step .. step + N` of the ring; those beyond the last step are the
/// rank at the last step.
#[inline(always)]
pub(super) fn ranks_from<M: Machine, const N: usize>(
    session: &Session<M>,
    step: u32,
    steps: u32,
) -> [u32; N] {
    let (me, ranks) = (session.comm().rank(), session.comm().size());
    core::array::from_fn(|i| ring(me, (step + i as u32).min(steps - 1), ranks))
}

/// Sends to each rank its part of the bytes at `from`. Blocks of several lanes send to this rank,
/// too, so that it can receive its own part as any other. A lane reads a pair once, before it sends
/// it. So a rank that has received its own pair may overwrite its elements. All lanes together.
///
/// # Safety
/// `slots` must be open for parts of `parts`, with [`Slots::open_direct`]; `from` must be readable
/// for all parts.
#[inline(always)]
pub(super) unsafe fn send_parts<M: Machine>(
    session: &Session<M>,
    slots: &Slots,
    from: *const u8,
    parts: Parts,
) {
    let block = session.block();
    let ranks = session.comm().size();
    if M::LANES == 1 {
        for step in 1..ranks {
            let [peer] = ranks_from(session, step, ranks);
            let (first, bytes) = parts.of(peer);
            // SAFETY: the part is readable, and no longer than the streams of the slots.
            unsafe { slots.send_stream(session, peer, from.wrapping_add(first), bytes) };
        }
        return;
    }
    // The last lanes send the headers, because they have less data if the parts are short.
    let mut peer = block.size() - 1 - block.rank();
    while peer < ranks {
        // SAFETY: `open_direct` has checked that all ranks are reachable.
        unsafe { slots.send_header(session, peer) };
        peer += block.size();
    }
    let is_aligned = (from as usize).is_multiple_of(PAIR_DATA);
    for pair in block.elements_of_block(parts.each() / PAIR_DATA) {
        let mut step = 1;
        while step <= ranks {
            let peers = ranks_from::<_, AT_ONCE>(session, step, ranks + 1);
            if is_aligned && parts.have(peers, pair) {
                let data: [u64; AT_ONCE] = core::array::from_fn(|i| {
                    let at = peers[i] as usize * parts.each() + pair * PAIR_DATA;
                    // SAFETY: the pair is within the peer's part by the condition, and aligned.
                    unsafe { mem::read(from.wrapping_add(at).cast::<u64>()) }
                });
                // SAFETY: the pair is within the streams; all ranks are reachable (`open_direct`).
                unsafe { slots.send_pairs(session, pair, data, [step, ranks + 1]) };
                step += AT_ONCE as u32;
                continue;
            }
            let (first, bytes) = parts.of(peers[0]);
            if pair * PAIR_DATA < bytes {
                // SAFETY: the part is readable, and the pair begins within it; as above.
                unsafe {
                    let data = read_pair(from.wrapping_add(first), bytes, pair);
                    slots.send_pairs(session, pair, [data], [step, ranks + 1]);
                }
            }
            step += 1;
        }
    }
}
