//! Example of a user kernel crate: a toy mixture of experts whose kernels exchange rows by queues.
//!
//! Each rank has tokens, and experts that process tokens of all ranks. A router, which is not part
//! of this example, has chosen `k` experts for each token. An *item* is a token with one of its
//! experts: item `token * k + j` is the j-th expert of the token. Three kernels compute the layer:
//!
//! 1. [`dispatch`] sends each item's token to the rank that has the item's expert.
//! 2. [`run_experts`] processes the rows that have arrived.
//! 3. [`combine`] sends the results back, and adds the results of each token with their weights.
//!
//! No rank knows in advance how many rows it will receive. The queues transfer the numbers together
//! with the rows, so the host does not take part, and a graph of the kernels can be replayed with
//! other tokens and other experts.
//!
//! ```text
//! cargo run --release --example moe           # on the CPU
//! cargo gpu build --crate examples/moe-toy    # for GPUs
//! ```
//!
//! # Memory
//! Block b of a rank exchanges rows with block b of every rank, so [`dispatch`] and [`combine`]
//! need the same number of blocks. *Region* `r * blocks + b` holds the rows that block b has
//! received from rank r. A region has room for `batch` rows, where `batch` is the [`Queue::batch`]
//! of both queues.
//!
//! | argument | elements |
//! |---|---|
//! | `x`, `out` | `hidden` for each token |
//! | `ids`, `weights`, `places` | one for each item |
//! | `received` | `hidden` for each of the `batch` rows of each region |
//! | `experts` | one for each of the `batch` rows of each region: the row's expert |
//! | `counts` | one for each region: its number of rows |
//! | `sums` | one for each expert of this rank |
//!
//! Rank r has the experts `[r * per_rank, (r + 1) * per_rank)`. The ranks must have fewer than 2^24
//! experts together, because the number of an expert is sent as an f32.
#![no_std]
#![cfg_attr(
    any(target_arch = "nvptx64", target_arch = "amdgpu"),
    feature(abi_gpu_kernel),
    allow(improper_gpu_kernel_arg)
)]

use fusewire_device::{
    Aborted, Block, Group, In, InOut, Machine, Out, Queue, Rank, Session, Team, kernel,
};

/// Id of an item without an expert. The item is not sent, and adds nothing to its token's result.
pub const NO_EXPERT: u32 = u32::MAX;

/// Failure code: an item has the id of an expert that does not exist.
pub const UNKNOWN_EXPERT: u32 = 1;

/// Sends the token of each item to the rank that has the item's expert, and stores the rows that
/// arrive. Each block sends the items of a slice of the tokens.
///
/// A row of the queue `rows` has `hidden + 1` elements: those of the token, and the number of the
/// expert. Rows arrive in the order of their items. `places` gets the position of each item's row
/// among the rows for the same rank, where [`combine`] finds the result.
#[kernel(failures(UNKNOWN_EXPERT = "no rank has expert {a}; there are {b} experts"))]
pub fn dispatch(
    s: &mut Session<impl Machine>,
    mut rows: Queue<f32>,
    x: In<f32>,
    ids: In<u32>,
    places: InOut<u32>,
    received: Out<f32>,
    experts: Out<u32>,
    counts: Out<u32>,
    k: u32,
    #[agreed] per_rank: u32,
) -> Result<(), Aborted> {
    let (block, warp) = (s.block(), s.block().warp());
    let (hidden, most) = (rows.width() - 1, rows.batch());
    let k = k.max(1) as usize; // A division by 0 would be a panic.
    let (first, last) = block.slice(ids.len() / k, 1);
    let items = (last - first) * k;
    let (ids, places) = (ids.slice(first * k, items), places.slice(first * k, items));

    let all_experts = u64::from(per_rank) * u64::from(s.ranks());
    for item in block.elements_of_block(items) {
        let id = ids.get(item);
        if id != NO_EXPERT && rank_of(s, id, per_rank).is_none() {
            // `route` votes, so it returns this failure on all lanes.
            s.fault(UNKNOWN_EXPERT, u64::from(id), all_experts);
        }
    }
    let batch = rows.route(s, items, places, |item| rank_of(s, ids.get(item), per_rank))?;
    for item in block.elements_of_warp(items) {
        if let Some(rank) = rank_of(s, ids.get(item), per_rank) {
            let row = batch.row(s, rank, places.get(item) as usize);
            let token = x.slice((first + item / k) * hidden, hidden);
            row.write(s, warp, token);
            if warp.is_leader() {
                row.store(s, hidden, [ids.get(item) as f32]);
            }
        }
    }
    batch.publish(s)?;

    let arrived = rows.recv_all(s)?;
    for rank in s.peers(Team::World) {
        let (batch, region) = (arrived.of(rank), region(block, rank));
        for index in block.elements_of_warp(batch.len()) {
            let (row, target) = (batch.row(index), region * most + index);
            let place = received.slice(target * hidden, hidden);
            place.copy_from(warp, row.slice(0, hidden));
            if warp.is_leader() {
                experts.set(target, row.get(hidden) as u32);
            }
        }
        if block.is_leader() {
            counts.set(region, batch.len() as u32);
        }
    }
    rows.release_all(s);
    Ok(())
}

/// Multiplies the rows of expert e by e + 1, in place. A real layer has two matrix products here.
/// Each block processes a slice of this rank's experts.
///
/// Also writes the sum of the elements of each expert's rows, before the multiplication, to `sums`.
/// One lane adds the elements of an expert in the order of the regions, rows and elements, so a sum
/// has the same bits in every run and with any number of lanes.
#[kernel]
pub fn run_experts(
    s: &mut Session<impl Machine>,
    received: InOut<f32>,
    experts: In<u32>,
    counts: In<u32>,
    sums: Out<f32>,
    hidden: u32,
    batch: u32,
    per_rank: u32,
) -> Result<(), Aborted> {
    let (block, hidden, batch) = (s.block(), hidden as usize, batch as usize);
    let (first, last) = block.slice(per_rank as usize, 1);
    let first_id = s.rank() * per_rank;
    for expert in block.elements_of_block(last - first) {
        let expert = first + expert;
        let mut sum = 0.0;
        for region in 0..counts.len() {
            for row in 0..counts.get(region) as usize {
                let row = region * batch + row;
                if experts.get(row) == first_id + expert as u32 {
                    for at in row * hidden..(row + 1) * hidden {
                        sum += received.get(at);
                    }
                }
            }
        }
        sums.set(expert, sum);
    }
    // Lanes read rows above that other lanes multiply below.
    block.sync();
    let own_ids = first_id + first as u32..first_id + last as u32;
    for region in 0..counts.len() {
        for row in block.elements_of_warp(counts.get(region) as usize) {
            let row = region * batch + row;
            let id = experts.get(row);
            if own_ids.contains(&id) {
                for element in block.warp().elements_of_group(hidden) {
                    let at = row * hidden + element;
                    received.set(at, received.get(at) * (id + 1) as f32);
                }
            }
        }
    }
    Ok(())
}

/// Sends each row back to the rank from which it came, and adds the results of each token, in the
/// order of its items: `out = 0 + weight * row + weight * row ..`. Every product is rounded before
/// it is added.
///
/// A row of the queue `rows` has `hidden` elements. `ids` and `places` are those of [`dispatch`].
#[kernel]
pub fn combine(
    s: &mut Session<impl Machine>,
    mut rows: Queue<f32>,
    received: In<f32>,
    counts: In<u32>,
    ids: In<u32>,
    places: In<u32>,
    weights: In<f32>,
    out: Out<f32>,
    k: u32,
    #[agreed] per_rank: u32,
) -> Result<(), Aborted> {
    let (block, hidden, k) = (s.block(), rows.width(), k.max(1) as usize);
    let region_elements = rows.batch() * hidden;
    let batch = rows.open(s, |rank| Some(counts.get(region(block, rank)) as usize))?;
    for rank in s.peers(Team::World) {
        let first = region(block, rank) * region_elements;
        let results = received.slice(first, batch.rows(rank) * hidden);
        batch.to(s, rank).write(s, block, results);
    }
    batch.publish(s)?;

    let arrived = rows.recv_all(s)?;
    let (first, last) = block.slice(ids.len() / k, 1);
    for token in block.elements_of_warp(last - first) {
        let token = first + token;
        for element in block.warp().elements_of_group(hidden) {
            let mut sum = 0.0;
            for item in token * k..(token + 1) * k {
                if let Some(rank) = rank_of(s, ids.get(item), per_rank) {
                    let row = arrived.of(rank).row(places.get(item) as usize);
                    sum += weights.get(item) * row.get(element);
                }
            }
            out.set(token * hidden + element, sum);
        }
    }
    rows.release_all(s);
    Ok(())
}

/// Returns the rank that has expert `id`, or `None` if there is no such expert.
#[inline(always)]
fn rank_of(s: &Session<impl Machine>, id: u32, per_rank: u32) -> Option<Rank> {
    match id {
        NO_EXPERT => None,
        id => s.peer(id.checked_div(per_rank)?),
    }
}

/// Returns the region for the rows that this block receives from `rank`.
#[inline(always)]
fn region(block: Block<impl Machine>, rank: Rank) -> usize {
    rank.index() as usize * block.count() as usize + block.index() as usize
}
