//! Reductions for sampling, in one launch, over logits whose columns are split among the ranks: the
//! k greatest logits of each row with their columns, and the row's log-sum-exp.
//!
//! Each row belongs to one block, whose lanes all work on it. For each row, a rank sends k words of
//! logit and column, and one word of maximum and sum, to all ranks by packets
//! ([`fusewire_device::packet`]). Every rank merges the words of all ranks, keys by their order and
//! sums in rank order, so the results are the same to the bit on all ranks.
//!
//! # Rounds
//! Rows that do not fit a slot are sent in rounds. Each round is an epoch of the slots:
//! - **who may overwrite what:** a rank overwrites its slot of round r at a peer in round r + 2;
//! - **after having acquired** the peer's stream of round r + 1, all of it by all lanes, which pass
//!   a barrier before they send;
//! - **released by** the peer, whose lanes passed a barrier after their last read of round r and
//!   before they sent round r + 1.
//!
//! This is the packet protocol, with several epochs in a launch.
//!
//! | file | subject |
//! |---|---|
//! | `key` | a logit and its column in one word |
//! | `row` | a rank's part of a row; the sum of its exponentials |
//! | `lanes`, `single` | the greatest keys, by several lanes and by one |
//! | `merge` | merge of all ranks' results |
//! | `shared` | layout of shared memory |

mod key;
mod lanes;
mod merge;
mod row;
mod shared;
mod single;

use bytemuck::{Pod, Zeroable};
use fusewire_device::packet::Slots;
use fusewire_device::session::Session;
use fusewire_device::{
    Aborted, Bf16, Block, Element, F16, Group, In, Machine, Out, Scratch, kernel, mem,
};

use self::lanes::Sorter;
use self::merge::Merge;
use self::row::RowPart;
use self::single::{List, greatest_logit};

/// Greatest number of logits that a launch can select in a row.
pub const MAX_K: usize = 64;

/// Specification of the results of a row: `[..][8-byte indices:1][log-sum-exp:1][k:8]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct VocabSpec(pub u32);

impl VocabSpec {
    const SUM: u32 = 1 << 8;
    const WIDE: u32 = 1 << 9;

    /// Selects the `k` greatest logits: 0 to [`MAX_K`].
    pub const fn new(k: u8) -> Self {
        Self(k as u32)
    }

    /// Adds the log-sum-exp.
    #[must_use]
    pub const fn with_log_sum_exp(self) -> Self {
        Self(self.0 | Self::SUM)
    }

    /// Makes indices 8 bytes instead of 4.
    #[must_use]
    pub const fn with_wide_indices(self) -> Self {
        Self(self.0 | Self::WIDE)
    }

    /// Returns the number of logits per row.
    #[inline(always)]
    pub const fn k(self) -> usize {
        let k = self.0 as usize & 0xff;
        if k < MAX_K { k } else { MAX_K }
    }

    /// Returns true if the log-sum-exp is computed.
    #[inline(always)]
    pub const fn has_log_sum_exp(self) -> bool {
        self.0 & Self::SUM != 0
    }

    /// Returns the bytes that a rank sends of a row.
    #[inline(always)]
    pub const fn row_bytes(self) -> usize {
        8 * (self.k() + self.has_log_sum_exp() as usize)
    }
}

/// The shape of a [`vocab`] launch.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct VocabShape {
    /// Number of columns of this rank, possibly 0.
    pub columns: u64,
    /// This rank's first column. All ranks together have fewer than 2^31 columns.
    pub first: u64,
    /// Elements from one row of logits to the next.
    pub stride: u64,
    /// Rows that a block sends at once, equal on all ranks: at least 1, and no more than fit a
    /// packet slot.
    pub round: u32,
    /// The results, equal on all ranks.
    pub spec: VocabSpec,
}

/// The words that a rank sends of a row: `k` keys in order, then the partial sum.
#[derive(Clone, Copy, Debug)]
struct Words {
    k: usize,
    has_sum: bool,
}

impl Words {
    /// Returns the number of words of a row.
    #[inline(always)]
    fn each(self) -> usize {
        self.k + usize::from(self.has_sum)
    }
}

/// The results: addresses without lengths, for which a block of 512 lanes has no registers.
#[derive(Clone, Copy, Debug)]
struct Outputs {
    /// Null if they are not wanted.
    values: *mut f32,
    indices: *mut u32,
    /// True if an index is two words.
    wide: bool,
    log_sum_exp: *mut f32,
}

/// Computes the `k` greatest logits of each row with their columns, and each row's log-sum-exp. The
/// number of rows is the count of the launch.
///
/// Logits descend. Of equal logits, the first column comes first; +0 is above -0, NaN below all. A
/// position for which there is no column gets NaN and an index of all ones.
///
/// `values` may be empty. Indices are 4 or 8 bytes. `own` has the words of one round of each block.
///
/// # Safety
/// During the launch, nothing else may write the logits or access the results. The results must not
/// overlap the logits or each other.
#[kernel(dependent, each(T: f32 = f32, f16 = F16, bf16 = Bf16))]
pub unsafe fn vocab<T: Element<Acc = f32>>(
    session: &mut Session<impl Machine>,
    logits: In<T>,
    values: Out<f32>,
    indices: Out<u32>,
    log_sum_exp: Out<f32>,
    own: Scratch<u64>,
    #[words(4)] shape: VocabShape,
) -> Result<(), Aborted> {
    let (block, spec) = (session.block(), shape.spec);
    let words = Words {
        k: spec.k(),
        has_sum: spec.has_log_sum_exp(),
    };
    let outputs = Outputs {
        values: values.as_ptr(),
        indices: indices.as_ptr(),
        wide: spec.0 & VocabSpec::WIDE != 0,
        log_sum_exp: log_sum_exp.as_ptr(),
    };
    let round = shape.round.max(1) as usize;
    let each = round * words.each();
    let own = own.slice(block.index() as usize * each, each).elements();
    let rows = session.count() as usize;
    let (columns, stride) = (shape.columns as usize, shape.stride as usize);
    let entries = rows.saturating_mul(words.k);
    let logits_end = rows.saturating_sub(1).saturating_mul(stride);
    let fits = own.len() == each
        && logits.len()
            >= if rows == 0 {
                0
            } else {
                logits_end.saturating_add(columns)
            }
        && (values.as_ptr().is_null() || values.len() >= entries)
        && indices.len() >= entries.saturating_mul(1 + usize::from(outputs.wide))
        && (!words.has_sum || log_sum_exp.len() >= rows);
    if !fits {
        // One error for all buffers: the host has checked each of them and names the one that is
        // too short.
        session.fault(u32::MAX, session.count(), shape.columns);
    }
    session.settle(fits)?;
    let own = own.as_ptr();
    let (start, end) = block.slice(rows, 1);
    let mut done = start;
    let mut turn = 0;
    loop {
        let count = if end - done < round {
            end - done
        } else {
            round
        };
        let mut row = 0;
        while row < count {
            let at = logits.as_ptr().wrapping_add((done + row) * stride);
            // SAFETY: by `fits`, `logits` has all rows, and `own` the words of a round.
            unsafe {
                let part = RowPart::new(block, at, columns, shape.first as u32);
                find(block, &part, words, own.add(row * words.each()), &mut turn);
            }
            row += 1;
        }
        block.sync();
        let slots = Slots::open(session, count * spec.row_bytes())?;
        // SAFETY: `own` has the words of a round if there are rows.
        unsafe { slots.send_to_all(session, own.cast()) };
        let merge = Merge {
            session,
            slots: &slots,
            words,
            own,
            outputs,
        };
        // SAFETY: by `fits`, the results have all rows, and `own` the words of a round.
        unsafe { merge.run(done, count)? };
        slots.close(session);
        done += count;
        if done >= end {
            break;
        }
        // All lanes must have read this round's words and packets before a lane writes the next.
        block.sync();
    }
    Ok(())
}

/// Writes this rank's words of a row to `own`. All lanes together.
///
/// # Safety
/// `own` must have room for the words of a row, and no other block may access them.
#[inline(always)]
unsafe fn find<M: Machine, T: Element<Acc = f32>>(
    block: Block<M>,
    part: &RowPart<T>,
    words: Words,
    own: *mut u64,
    turn: &mut usize,
) {
    let list = shared::list(block);
    let greatest = if M::LANES == 1 {
        // SAFETY: shared memory has a list of `MAX_K` keys, which no other lane uses.
        unsafe { List::new(list, words.k).offer_part::<M, T>(part) }
    } else {
        let sorter = Sorter { block, k: words.k };
        greatest_logit((sorter.top(part, turn) >> 32) as u32)
    };
    for i in block.elements_of_block(words.k) {
        // SAFETY: the list and the words have `k` keys; this lane has written entry `i` of the
        // list, or a barrier has passed.
        unsafe { mem::write(own.add(i), list.add(i).read()) };
    }
    if words.has_sum {
        let partial = part.partial(block, greatest);
        if block.is_leader() {
            // SAFETY: the words have one after the keys.
            unsafe { mem::write(own.add(words.k), partial.word()) };
        }
    }
}
