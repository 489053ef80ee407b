//! Mixture of experts: dispatches tokens to the ranks of their experts, and combines the experts'
//! results.
//!
//! A router has chosen `top_k` experts for each token; a token with one of its experts is a
//! *selection*. [`moe_dispatch`] sends a token once to each rank that holds any of its experts.
//! [`moe_combine`] sends the result of each selection back to the token's rank, which adds them in
//! the order of the selections. Each kernel has two halves, which run in one launch or in two: one
//! sends, the other receives.
//!
//! # Protocol
//! The file `staged` describes launches with staging, and this section the others. Memory and
//! signals belong to a micro-batch, whose launches follow each other. In dispatch, block b of a
//! rank writes the rows of its part of the tokens, and an announcement, to every rank, and raises
//! [`ROWS`]; block b of the receiver waits for block b of every rank. In combine, block b returns
//! the results of the rows that it has received from block b of the rank, and raises [`RESULTS`].
//!
//! Rows and announcements:
//! - **Who may overwrite what:** a rank overwrites its rows and announcements of dispatch n at a
//!   peer in dispatch n + 1,
//! - **after having acquired** the peer's signal [`RESULTS`] of the combine between them, in all
//!   blocks (an earlier launch); without a combine between them, the peer's signal [`ENTRY`] of
//!   dispatch n + 1,
//! - **released by** the peer, after it has read the rows in combine, or after the launches before
//!   dispatch n + 1.
//!
//! Results:
//! - **Who may overwrite what:** a rank overwrites its results of a combine at a peer in the next
//!   combine,
//! - **after having acquired** the peer's signal [`ROWS`] of the dispatch between them; without a
//!   dispatch between them, the peer's signal [`AGAIN`] of the next combine,
//! - **released by** the peer, after the launch in which it has read the results.
//!
//! If more rows may arrive than the result has ([`MoeFlags::BOUNDED`]), the announcements come
//! first, with [`COUNTS`]. A rank for which the rows of all ranks fit raises [`FITS`], and no rank
//! sends rows before it has that signal from every rank. So the launch fails on all ranks before
//! rows move. The last launch's rows are protected as above.
//!
//! The half that receives has two parts: one waits, the other interprets what has arrived. With
//! [`MoeFlags::MASK`], a rank that does not arrive in time is *masked*: from then on, this rank
//! neither signals nor awaits it, and uses nothing that it has sent. Different blocks may find
//! different ranks missing, so the parts are separate launches unless the launch has a single
//! block. All blocks of the second launch see the same mask, without waiting for each other. Each
//! rank then writes its results to a region of its own, so that the late writes of a masked rank,
//! of rows and of results, change nothing that is still in use. The file `mask` has the protocol of
//! the mask.
//!
//! Every rank raises its signals to every rank, even if it has no rows for it, and all ranks make
//! the same calls. So all ranks find the same *step* of the micro-batch, which determines whether
//! a launch begins with [`ENTRY`] or [`AGAIN`].
//!
//! | file | subject |
//! |---|---|
//! | `shape` | sizes, layout of the memory |
//! | `routing` | slots and indices of the rows |
//! | `arrived` | rows that have arrived, and the selections in their headers |
//! | `dispatch`, `combine` | the kernels |
//! | `staged` | rounds, in which tokens pass through staging of a bounded size |
//! | `fp8` | quantization of rows and results, and the reverse |
//! | `mask` | ranks that are missing |
//! | `memory` | elements whose number a launch checks once |

mod arrived;
mod combine;
mod dispatch;
mod fp8;
mod mask;
mod memory;
mod routing;
mod shape;
mod staged;

use fusewire_device::session::Session;
use fusewire_device::{Aborted, In, InOut, Machine, Out, Window, kernel};

pub use self::mask::{ENDED, LATE};
pub use self::shape::{GROUP, Meta, MoeFlags, MoeShape, NONE, OwnLayout, place};

use self::combine::Combine;
use self::dispatch::Dispatch;

/// Signal of the window of rows: the rows of the block have arrived.
pub const ROWS: u32 = 0;
/// Signal of the window of rows: the rank has begun a launch that overwrites what peers may read.
pub const ENTRY: u32 = 1;
/// Signal of the window of rows: the announcements have arrived, before the rows.
pub const COUNTS: u32 = 2;
/// Signal of the window of rows: the rank has room for all rows.
pub const FITS: u32 = 3;
/// Signal of the window of results: the results of the block have arrived.
pub const RESULTS: u32 = 0;
/// Signal of the window of results: the rank has begun a combine after a combine.
pub const AGAIN: u32 = 1;

/// Failure code: an expert does not exist.
pub const UNKNOWN_EXPERT: u32 = 1;
/// Failure code: an expert is on a rank that does not exist, or at the place of another.
pub const PLACEMENT: u32 = 2;
/// Failure code: the halves of a micro-batch are out of order.
pub const ORDER: u32 = 3;
/// Failure code: more rows than the result has.
pub const CAPACITY: u32 = 4;
/// Failure code: a rank has announced numbers of rows that are not possible.
pub const ANNOUNCEMENT: u32 = 5;
/// Failure code: a rank has sent a selection that it has not announced.
pub const SELECTION_INDEX: u32 = 6;
/// Failure code: a dispatch reuses the routing of another number of tokens.
pub const REUSED: u32 = 7;

/// Failure code: a combine has another number of tokens than the dispatch before it.
pub const TOKENS: u32 = 8;

/// Step of a micro-batch: nothing has been sent.
const IDLE: u32 = 0;
/// Step of a micro-batch: dispatch has sent.
const SENT: u32 = 1;
/// Step of a micro-batch: the rows have arrived.
const ARRIVED: u32 = 2;
/// Step of a micro-batch: dispatch has received.
const DISPATCHED: u32 = 3;
/// Step of a micro-batch: combine has sent.
const RETURNED: u32 = 4;
/// Step of a micro-batch: the results have arrived.
const SUMMABLE: u32 = 5;
/// Step of a micro-batch: combine has received.
const COMBINED: u32 = 6;

/// Sends each token to the ranks of its experts, and receives the tokens for the experts of this
/// rank.
///
/// `ids` and `weights` have `top_k` elements for each token, up to `max_tokens`; selections with a
/// negative id are not sent. `x` has the tokens, in the type that the flags name, as words;
/// [`MoeFlags::FP8`] quantizes them in groups of [`GROUP`] channels. `placement` has the
/// [place](place) of each expert. `own` is the memory of the micro-batch that only this rank uses
/// ([`MoeShape::own`]), `meta` gets the description of the result ([`MoeShape::meta`]), and
/// `tokens_per_expert` the number of rows of each expert of this rank, added to what it has. In
/// expert-major order, `out` gets the payload and, from [`MoeShape::scales_at`] on, the scales, or
/// with [`MoeFlags::DEQUANTIZE`] elements of the type of `x`, and no scales. Otherwise both stay in
/// the window, where the code that follows reads them. `wait_ns` gets the nanoseconds from the
/// start of the wait to the arrival of each rank's rows, and with staging of its announcements,
/// added to what it has; it may be empty.
/// `mask` has a word for each rank; [`MoeFlags::MASK`] sets those of missing ranks to
/// [`LATE`] or [`ENDED`]. With [`MoeFlags::REUSE`], `ids`, `weights` and `placement` are not read,
/// except for the number of tokens: the selections are those of the last dispatch.
///
/// With staging, a launch with only [`MoeFlags::SEND`] exchanges the numbers of rows, and describes
/// the result. The launches with [`MoeFlags::ROUND`] and both halves that follow send and receive
/// the rows of a round each; [`MoeShape::rounds`] is their number, because a launch after the last
/// round of all ranks does nothing. In rank-major order, `out` also gets the payload and the
/// scales, and the rows of each rank follow those of the rank before it.
///
/// # Safety
/// `shape.hidden` must be a multiple of 8, or of [`GROUP`] for fp8, `shape.payload` and
/// `shape.result` the words of that many elements, in fp8 with their scales. On a GPU, all buffers
/// must be aligned to 16 bytes. During the launch, nothing else may write the inputs or access the
/// other buffers, which do not overlap.
#[kernel(failures(
    UNKNOWN_EXPERT = "expert {a} does not exist; there are {b} experts (ids of -1 are not sent)",
    PLACEMENT = "expert {a} has the place {b} (rank << 16 | index), which does not exist or is \
                 that of another expert",
    ORDER = "the micro-batch is at step {a} (0: idle, 1: dispatch has sent, 2: rows have arrived, \
             3: dispatch has received, 4: combine has sent, 5: results have arrived, 6: combine \
             has received), so this half is out of order",
    CAPACITY = "this rank receives {a} rows, which exceeds the capacity of {b} rows",
    ANNOUNCEMENT = "rank {a} has announced numbers of rows that are not possible ({b} in all)",
    SELECTION_INDEX = "rank {a} has sent a selection with index {b} that it has not announced",
    REUSED = "the last routing was of {a} tokens (2^32 - 1: there was none), but a dispatch that \
              reuses it has {b} tokens",
))]
pub unsafe fn moe_dispatch(
    session: &mut Session<impl Machine>,
    rows: Window<u32>,
    x: In<u32>,
    ids: In<i32>,
    weights: In<f32>,
    placement: In<u32>,
    own: InOut<u32>,
    meta: Out<u32>,
    out: Out<u32>,
    tokens_per_expert: InOut<u64>,
    wait_ns: InOut<u64>,
    mask: InOut<u32>,
    #[words(6)] shape: MoeShape,
    #[agreed] config: u64,
) -> Result<(), Aborted> {
    let _ = config;
    let dispatch = Dispatch {
        shape: shape.unpacked(),
        rows,
        x,
        meta,
        out,
        tokens_per_expert,
        wait_ns,
    };
    // SAFETY: the precondition of this function.
    unsafe { dispatch.run(session, (ids, weights, placement), (own, mask)) }
}

/// Sends the result of each selection to the rank of its token, and adds the results of each token
/// of this rank: `out = 0 + weight * result + weight * result ..`, in the order of the selections
/// with an expert. Products and sums are f32; the sum is rounded once.
///
/// `y` has the results, as words: in expert-major order one for each row of the result of
/// [`moe_dispatch`], otherwise one for each selection of each row. With [`MoeFlags::FP8_RESULTS`],
/// they are quantized in groups of [`GROUP`] elements, and a result is the product of the element
/// and its scale. The headers of the rows are read in the window; with staging, they have been
/// kept. `ids` and `weights` are those of the dispatch.
/// With [`MoeFlags::MASK`], the results of masked ranks are not added, and `missing` gets a word
/// for each token: bit k is 1 if the result of selection k is missing. With staging, each launch
/// runs both halves of a round, the first one with [`MoeFlags::FIRST`].
///
/// # Safety
/// As [`moe_dispatch`]. `y` may be `out` of the dispatch.
#[kernel(failures(
    ORDER = "the micro-batch is at step {a} (0: idle, 1: dispatch has sent, 2: rows have arrived, \
             3: dispatch has received, 4: combine has sent, 5: results have arrived, 6: combine \
             has received), so this half is out of order",
    SELECTION_INDEX = "rank {a} has sent a selection with index {b} that it has not announced",
    TOKENS = "combine has {b} tokens, but the last dispatch of the micro-batch on the device had \
              {a}",
))]
pub unsafe fn moe_combine(
    session: &mut Session<impl Machine>,
    rows: Window<u32>,
    results: Window<u32>,
    y: In<u32>,
    ids: In<i32>,
    weights: In<f32>,
    own: InOut<u32>,
    mask: InOut<u32>,
    out: Out<u32>,
    missing: Out<u32>,
    #[words(6)] shape: MoeShape,
    #[agreed] config: u64,
) -> Result<(), Aborted> {
    let _ = config;
    let combine = Combine {
        shape: shape.unpacked(),
        rows,
        results,
        y,
        ids,
        weights,
        out,
        missing,
    };
    // SAFETY: the precondition of this function.
    unsafe { combine.run(session, (own, mask)) }
}
