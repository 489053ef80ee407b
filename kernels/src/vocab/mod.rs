//! Sampling's reductions over logits that are split by columns, in one launch: the k greatest
//! logits of each row with their columns, and the row's log-sum-exp.
//!
//! A block has its rows to itself, and all its lanes work on one row. What a rank finds in a row
//! are k words of logit and column and one of maximum and sum; these go to all ranks by packets
//! ([`fusewire_device::packet`]), and every rank puts them together by itself: keys by their order,
//! sums in rank order. So all ranks have the same bits.
//!
//! # Rounds
//! Rows that do not fit a slot go in rounds, each an epoch of the slots:
//! - **who may overwrite what:** a rank overwrites its slot of round r at a peer in round r + 2;
//! - **after having acquired** the peer's stream of round r + 1, all of it by all lanes, which pass
//!   a barrier before they send;
//! - **released by** the peer, whose lanes passed a barrier after their last read of round r and
//!   before they sent round r + 1.
//!
//! This is the idiom of the packets, of launches one after the other; that a launch has several
//! epochs changes nothing in it.
//!
//! | file | subject |
//! |---|---|
//! | `key` | a logit and its column in one word |
//! | `row` | a rank's part of a row; the sum of its exponentials |
//! | `lanes`, `single` | the greatest keys, by several lanes and by one |
//! | `merge` | what all ranks found |
//! | `shared` | what lies where in shared memory |

mod key;
mod lanes;
mod merge;
mod row;
mod shared;
mod single;

use fusewire_device::packet::Slots;
use fusewire_device::session::Session;
use fusewire_device::{Aborted, Bf16, Block, Element, F16, Group, Machine, kernel, mem};

use self::lanes::Sorter;
use self::merge::Merge;
use self::row::RowPart;
use self::single::{List, greatest_logit};

/// Most logits of a row that can be asked for.
pub const MAX_K: usize = 64;

/// Specification of the results of a row: `[..][8-byte indices:1][log-sum-exp:1][k:8]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct VocabSpec(pub u32);

impl VocabSpec {
    const SUM: u32 = 1 << 8;
    const WIDE: u32 = 1 << 9;

    /// Computes the `k` greatest logits, at most [`MAX_K`], possibly none.
    pub const fn new(k: u8) -> Self {
        Self(k as u32)
    }

    /// Adds the log-sum-exp.
    #[must_use]
    pub const fn with_log_sum_exp(self) -> Self {
        Self(self.0 | Self::SUM)
    }

    /// Indices are 8 bytes, not 4.
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

/// What a rank sends of a row: `k` keys in order, then the partial sum.
#[derive(Clone, Copy, Debug)]
struct Words {
    k: usize,
    has_sum: bool,
}

impl Words {
    /// Words of a row.
    #[inline(always)]
    fn each(self) -> usize {
        self.k + usize::from(self.has_sum)
    }
}

/// Where results go.
#[derive(Clone, Copy, Debug)]
struct Outputs {
    /// Null: not wanted.
    values: *mut f32,
    indices: *mut u8,
    wide: bool,
    log_sum_exp: *mut f32,
}

/// Computes the `k` greatest logits of each row, of which the launch counts as many, with their
/// columns, and each row's log-sum-exp, as `spec` says. This rank has columns `first .. first +
/// columns`, perhaps none; its rows begin `stride` elements apart. A block takes `round` rows at a
/// time.
///
/// Logits descend, of equal ones the first column comes first; +0 is above -0, NaN below all. A
/// position for which there is no column gets NaN and an index of all ones.
///
/// # Safety
/// `logits` is readable for the rows, `indices` and `values`
/// (or null) writable for `rows * k` elements, `log_sum_exp` for `rows`, where they are wanted;
/// they overlap nothing. Fewer than 2^31 columns in all. `rows`, `round` and `spec` are equal on
/// all ranks; `round` is not 0, its rows fit [`fusewire_device::packet::capacity`] of a slot, and
/// those of all blocks fit staging.
#[kernel(dependent, each(T: f32 = f32, f16 = F16, bf16 = Bf16))]
pub unsafe fn vocab<T: Element<Acc = f32>>(
    session: &mut Session<impl Machine>,
    columns: u64,
    first: u64,
    stride: u64,
    logits: *const u8,
    values: *mut f32,
    indices: *mut u8,
    log_sum_exp: *mut f32,
    round: u64,
    spec: u32,
) -> Result<(), Aborted> {
    let (block, rows) = (session.block(), session.count());
    let spec = VocabSpec(spec);
    let words = Words {
        k: spec.k(),
        has_sum: spec.has_log_sum_exp(),
    };
    let outputs = Outputs {
        values,
        indices,
        wide: spec.0 & VocabSpec::WIDE != 0,
        log_sum_exp,
    };
    let round = round as usize;
    let (start, end) = block.slice(rows as usize, 1);
    let staged = block.index() as usize * round * spec.row_bytes();
    let at = session.comm().workspace().staging_out;
    let own = session.comm().own(at).wrapping_add(staged).cast::<u64>();
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
            let at = logits
                .cast::<T>()
                .wrapping_add((done + row) * stride as usize);
            let part = RowPart::new(block, at, columns as usize, first as u32);
            // SAFETY: a row of the caller's; this block's part of staging.
            unsafe { find(block, &part, words, own.add(row * words.each()), &mut turn) };
            row += 1;
        }
        block.sync();
        let slots = Slots::open(session, count * spec.row_bytes())?;
        // SAFETY: the words of these rows, which fit a slot.
        unsafe { slots.send_to_all(session, own.cast()) };
        let merge = Merge {
            session,
            slots: &slots,
            words,
            own,
            outputs,
        };
        // SAFETY: these rows.
        if !unsafe { merge.run(done, count) } {
            return session.settle(false);
        }
        slots.close(session);
        done += count;
        if done >= end {
            break;
        }
        // The next round's words and packets come behind the last look at this one's.
        block.sync();
    }
    Ok(())
}

/// Writes this rank's words of a row. All lanes together.
///
/// # Safety
/// The row is readable; `to` is writable for its words.
#[inline(always)]
unsafe fn find<M: Machine, T: Element<Acc = f32>>(
    block: Block<M>,
    part: &RowPart<T>,
    words: Words,
    to: *mut u64,
    turn: &mut usize,
) {
    let list = shared::list(block);
    let greatest = if M::LANES == 1 {
        // SAFETY: the caller's promise; the list is this lane's.
        unsafe { List::new(list, words.k).offer_part::<M, T>(part) }
    } else {
        let sorter = Sorter { block, k: words.k };
        // SAFETY: the caller's promise.
        greatest_logit((unsafe { sorter.top(part, turn) } >> 32) as u32)
    };
    for i in block.elements_of_block(words.k) {
        // SAFETY: the list has `k` keys, and there is room for as many.
        unsafe { mem::write(to.add(i), list.add(i).read()) };
    }
    if words.has_sum {
        // SAFETY: the caller's promise.
        let partial = unsafe { part.partial(block, greatest) };
        if block.is_leader() {
            // SAFETY: the word behind the keys.
            unsafe { mem::write(to.add(words.k), partial.word()) };
        }
    }
}
