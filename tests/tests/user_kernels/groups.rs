//! Reductions, scans and votes of warps and blocks, shared arrays, the last block of a launch, and
//! warps of a block that take different paths.

use fusewire::{Communicator, DType, Options, Result, run_threads};
use fusewire_device::arch::{RESERVED_BYTES, SHARED_BYTES};
use fusewire_device::element::{Number, Ordered};
use fusewire_device::group::LaneValue;
use fusewire_device::{
    Aborted, Block, Element, Group, In, InOut, Machine, Out, Session, Shared, Unvoted, kernel,
};

use super::{assert_contains, failing, failing_on, is_short, options, tensor, zeros};

/// Lanes of a block and of a warp; 0 selects one warp of all lanes.
const SHAPES: [(u32, u32); 7] = [
    (1, 0),
    (32, 0),
    (64, 0),
    (64, 32),
    (64, 16),
    (64, 8),
    (128, 32),
];

fn shape(blocks: u32, lanes: u32, warp: u32) -> Options {
    let mut options = options(blocks, lanes);
    options.testing.warp = warp;
    options
}

/// Calls `test(communicator, lanes, warp)` on every rank, for blocks of these shapes.
fn on_shapes(
    shapes: &[(u32, u32)],
    ranks: u32,
    blocks: u32,
    test: impl Fn(&Communicator, usize, usize) -> Result<()> + Sync,
) {
    for &(lanes, warp) in shapes {
        let of_warp = if warp == 0 { lanes } else { warp };
        let run = |comm: Communicator| test(&comm, lanes as usize, of_warp as usize);
        for result in run_threads(ranks, &shape(blocks, lanes, warp), run) {
            result.unwrap_or_else(|error| panic!("{lanes} lanes, warps of {of_warp}: {error}"));
        }
    }
}

/// Returns a hash of the two values.
fn number(seed: u32, index: usize) -> u64 {
    let start = (u64::from(seed) << 32 | index as u64) + 1;
    let bits = start.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let bits = (bits ^ (bits >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits ^ (bits >> 32)
}

/// Maps every number to itself, as an argument of [`compose`].
const IDENTITY: u64 = 1 << 32;

/// Returns a map for [`compose`]. Its factor is odd, so that the map has an inverse and no factor
/// hides a wrong order.
fn map_of<T: Element>(value: T) -> u64 {
    number(0, value.to_bits() as u32 as usize) | IDENTITY
}

/// Composes two maps `x -> a * x + b` of u32, each with `a` in the upper half of its word and `b`
/// in the lower half. The map `first` is applied first.
fn compose(first: u64, second: u64) -> u64 {
    let [(a, b), (c, d)] = [first, second].map(|map| ((map >> 32) as u32, map as u32));
    let (factor, term) = (a.wrapping_mul(c), b.wrapping_mul(c).wrapping_add(d));
    u64::from(factor) << 32 | u64::from(term)
}

/// Returns the bits of a result, and of 0.0 for -0.0.
fn bits_of<T: Element + Number>(result: T) -> u64 {
    result.add(T::ZERO).to_bits()
}

/// Calls the functions of a warp or a block that combine values.
macro_rules! results {
    ($group:ident, $value:ident) => {{
        let (before, total) = $group.exclusive_sum($value);
        [
            bits_of($group.sum($value)),
            bits_of($group.reduce($value, Ordered::max)),
            bits_of($group.inclusive_scan($value, Ordered::min)),
            bits_of($group.inclusive_scan($value, Number::add)),
            bits_of(before),
            bits_of(total),
            $group.inclusive_scan(map_of($value), compose),
        ]
    }};
}

/// Number of cells of a lane: the results in its warp and in its block, the lanes of the warp that
/// have its value, and 1 if the lane is elected of those with the bits 0.
const COLUMNS: usize = 16;

#[kernel(each(T: u32 = u32, u64 = u64, i32 = i32, f32 = f32))]
fn combine<T: Element + LaneValue>(
    s: &mut Session<impl Machine>,
    values: In<T>,
    cells: Out<u64>,
) -> Result<(), Aborted> {
    let (block, warp) = (s.block(), s.block().warp());
    let lane = (block.index() * block.size() + block.rank()) as usize;
    let value = values.get(lane);
    let results = [results!(warp, value), results!(block, value)];
    let is_elected = warp.elect(value.to_bits() == 0);
    let votes = [warp.match_any(value), u64::from(is_elected)];
    let of_lane = results.as_flattened().iter().chain(&votes);
    for (column, cell) in of_lane.enumerate() {
        cells.set(lane * COLUMNS + column, *cell);
    }
    Ok(())
}

/// Launches [`combine`], and returns the cells.
fn run_combine<T: Element + LaneValue>(comm: &Communicator, values: &[T]) -> Result<Vec<u64>> {
    let input = tensor(values)?;
    let cells = zeros(DType::U64, COLUMNS * values.len())?;
    let arguments = Combine {
        kernel: *select_combine(T::DTYPE).expect("an instance"),
        values: (&input).into(),
        cells: (&cells).into(),
    };
    comm.kernel(arguments).launch()?;
    cells.to_vec()
}

/// Returns the results of lane `lane` in a group of lanes with these values.
fn expected_results<T: Element + LaneValue>((group, lane): (&[T], usize)) -> Vec<u64> {
    let sum = |values: &[T]| values.iter().copied().fold(T::ZERO, T::add);
    let (through, before) = (&group[..=lane], &group[..lane]);
    let least = through.iter().copied().fold(group[0], T::min);
    let most = group.iter().copied().fold(group[0], T::max);
    let total = sum(group);
    let results = [total, most, least, sum(through), sum(before), total].map(bits_of);
    let map = through.iter().copied().map(map_of).fold(IDENTITY, compose);
    results.into_iter().chain([map]).collect()
}

fn check_combine<T: Element + LaneValue>(
    comm: &Communicator,
    (lanes, warp): (usize, usize),
    value: impl Fn(usize) -> T,
) -> Result<()> {
    let values: Vec<T> = (0..2 * lanes).map(value).collect();
    for (lane, found) in run_combine(comm, &values)?.chunks(COLUMNS).enumerate() {
        let group = |size: usize| (&values[lane / size * size..][..size], lane % size);
        let groups = [group(warp), group(lanes)];
        let (of_warp, rank) = groups[0];
        let lanes_with = |bits: u64| {
            let lanes = (0..warp).filter(|lane| of_warp[*lane].to_bits() == bits);
            lanes.map(|lane| 1u64 << lane).sum::<u64>()
        };
        let is_elected = lanes_with(0).trailing_zeros() as usize == rank;
        let mut expected = groups.map(expected_results).concat();
        expected.extend([lanes_with(values[lane].to_bits()), u64::from(is_elected)]);
        assert_eq!(found, expected, "lane {lane}, warps of {warp} in {lanes}");
    }
    Ok(())
}

#[test]
fn lanes_combine_and_compare_their_values() {
    on_shapes(&SHAPES, 2, 2, |comm, lanes, warp| {
        let (shape, bits) = ((lanes, warp), |lane| number(comm.rank(), lane));
        let choice = |lane| bits(lane) as usize % 3;
        check_combine(comm, shape, |lane| bits(lane) as u32)?;
        check_combine(comm, shape, bits)?;
        check_combine(comm, shape, |lane| bits(lane) as i32)?;
        // Sums of these are exact.
        check_combine(comm, shape, |lane| (bits(lane) % 2000) as f32 - 1000.0)?;
        // Few values, of which some differ only in the upper half or in the sign.
        check_combine(comm, shape, |lane| [0u32, 1 << 31, 77][choice(lane)])?;
        let longs = [7u64, 1 << 32 | 7, 1 << 63 | 7];
        check_combine(comm, shape, |lane| longs[choice(lane)])?;
        check_combine(comm, shape, |lane| [0.0f32, -0.0, 1.5][choice(lane)])?;
        // 0, from which a lane is elected, on all lanes, and on one lane of each warp.
        check_combine(comm, shape, |_| 0u32)?;
        let chosen = |lane: usize| (lane / warp + 3) % warp;
        check_combine(comm, shape, |lane| u32::from(lane % warp != chosen(lane)))
    });
}

#[test]
fn sums_of_floats_have_the_same_bits_on_all_lanes_and_in_all_launches() {
    on_shapes(&SHAPES, 1, 3, |comm, lanes, warp| {
        let value = |lane| 1.0 / (1 + number(0, lane) % 1000) as f32;
        let values: Vec<f32> = (0..3 * lanes).map(value).collect();
        let cells = run_combine(comm, &values)?;
        for lane in 0..values.len() {
            // Columns of sums over the group.
            for (column, size) in [(0, warp), (5, warp), (7, lanes), (12, lanes)] {
                let sums = [lane, lane / size * size].map(|lane| cells[lane * COLUMNS + column]);
                assert_eq!(sums[0], sums[1], "column {column}, lane {lane}, {size}");
            }
        }
        for _ in 0..3 {
            assert_eq!(run_combine(comm, &values)?, cells);
        }
        Ok(())
    });
}

const BYTES: usize = 77;
const ROW: usize = 64;
const LONGS: usize = 65;
/// Elements that fill the memory after byte 864, where the other arrays end if `T` is f32.
const REST: usize = (SHARED_BYTES - RESERVED_BYTES - 864) / size_of::<u32>();
const CELLS: usize = BYTES + ROW + LONGS + REST;

fn fill<T: Element, const N: usize>(block: Block<impl Machine>, array: Shared<T, N>, seed: u32) {
    for i in block.elements_of_block(N) {
        array.set(i, T::from_bits(number(seed, i)));
    }
}

/// Writes the bits of the elements to the first cells, and returns the cells after them.
fn write_reversed<'a, T: Element, const N: usize>(
    block: Block<impl Machine>,
    array: Shared<T, N>,
    cells: Out<'a, u64>,
) -> Out<'a, u64> {
    for i in block.elements_of_block(N) {
        cells.set(i, array.get(N - 1 - i).to_bits());
    }
    cells.slice(N, cells.len() - N)
}

/// Returns what [`write_reversed`] writes for an array of `count` elements.
fn reversed<T: Element>(seed: u32, count: usize) -> impl Iterator<Item = u64> {
    let element = move |i| T::from_bits(number(seed, i)).to_bits();
    (0..count).rev().map(element)
}

/// Fills four arrays, calls functions that use shared memory, and writes the reversed arrays.
#[kernel(each(T: f32 = f32, u8 = u8))]
fn fills<T: Element>(
    s: &mut Session<impl Machine>,
    bytes: Shared<u8, BYTES>,
    row: Shared<T, ROW>,
    cells: Out<u64>,
    longs: Shared<u64, LONGS>,
    rest: Shared<u32, REST>,
) -> Result<(), Aborted> {
    let block = s.block();
    for round in 0..2 {
        let seed = round * block.count() + block.index();
        fill(block, bytes, 4 * seed);
        fill(block, row, 4 * seed + 1);
        fill(block, longs, 4 * seed + 2);
        fill(block, rest, 4 * seed + 3);
        block.sync();
        assert_eq!(block.exclusive_sum(1u32), (block.rank(), block.size()));
        assert_eq!(block.sum(block.size()), block.size() * block.size());
        let cells = cells.slice(seed as usize * CELLS, CELLS);
        let cells = write_reversed(block, bytes, cells);
        let cells = write_reversed(block, row, cells);
        let cells = write_reversed(block, longs, cells);
        write_reversed(block, rest, cells);
        block.sync();
    }
    Ok(())
}

fn check_fills<T: Element>(comm: &Communicator) -> Result<()> {
    // Two blocks in two rounds.
    let cells = zeros(DType::U64, 4 * CELLS)?;
    let arguments = Fills {
        kernel: *select_fills(T::DTYPE).expect("an instance"),
        cells: (&cells).into(),
    };
    comm.kernel(arguments).launch()?;
    let expected = (0..4).flat_map(|seed| {
        reversed::<u8>(4 * seed, BYTES)
            .chain(reversed::<T>(4 * seed + 1, ROW))
            .chain(reversed::<u64>(4 * seed + 2, LONGS))
            .chain(reversed::<u32>(4 * seed + 3, REST))
    });
    for (index, (cell, expected)) in cells.to_vec::<u64>()?.into_iter().zip(expected).enumerate() {
        assert_eq!(cell, expected, "cell {index} of {CELLS} for each block");
    }
    Ok(())
}

#[test]
fn shared_arrays_do_not_overlap_each_other_or_the_memory_of_sums() {
    on_shapes(&SHAPES, 1, 2, |comm, _, _| {
        check_fills::<f32>(comm)?;
        check_fills::<u8>(comm)
    });
}

/// Reads or writes element `index` on the last lane of rank 0.
#[kernel]
fn oversteps(
    s: &mut Session<impl Machine>,
    index: u32,
    row: Shared<u32, 64>,
    writes: u8,
) -> Result<(), Aborted> {
    let block = s.block();
    if s.rank() == 0 && block.rank() == block.size() - 1 {
        match writes {
            0 => _ = row.get(index as usize),
            _ => row.set(index as usize, 7),
        }
    }
    s.vote(Unvoted::new(()))?;
    s.barrier()
}

#[test]
fn an_index_beyond_a_shared_array_names_argument_index_and_length() {
    for writes in [0, 1] {
        let run = |comm: &Communicator, index| comm.kernel(Oversteps { index, writes }).launch();
        for (lanes, warp) in SHAPES {
            for message in failing(&shape(1, lanes, warp), |comm| run(comm, 64)) {
                let text = "rank 0 in kernel oversteps #1: argument row: element 64 of 64";
                assert_contains(&message, &[text]);
            }
        }
        // The control: the last element.
        on_shapes(&SHAPES, 2, 1, |comm, _, _| run(comm, 63));
    }
}

/// For each call, adds up the terms, times the number of the call: each block a part of them, and
/// the last block the sums of all blocks. `cells` has for each call the sums of the blocks, 1 for
/// the last block and 0 for the others, and the total.
#[kernel]
fn totals(
    s: &mut Session<impl Machine>,
    terms: In<u64>,
    cells: InOut<u64>,
    calls: u32,
) -> Result<(), Aborted> {
    let block = s.block();
    let (index, blocks) = (block.index() as usize, block.count() as usize);
    for call in 0..calls as usize {
        let cells = cells.slice(call * (2 * blocks + 1), 2 * blocks + 1);
        let terms = block.elements(terms.len()).map(|i| terms.get(i));
        let sum = block.sum(terms.sum::<u64>() * (call as u64 + 1));
        // The leader also releases what other lanes have written.
        if block.rank() == block.size() - 1 {
            cells.set(index, sum);
        }
        let is_last = s.last_block()?;
        if is_last {
            let sums = block.elements_of_block(blocks).map(|i| cells.get(i));
            cells.set(2 * blocks, block.sum(sums.sum::<u64>()));
        }
        if block.is_leader() {
            cells.set(blocks + index, u64::from(is_last));
        }
    }
    Ok(())
}

/// Launches [`totals`], every second time by a replay, with other terms each time.
fn check_totals(comm: &Communicator, blocks: u32, calls: u32, launches: u32) -> Result<()> {
    let row = 2 * blocks as usize + 1;
    let terms = zeros(DType::U64, 333)?;
    let cells = zeros(DType::U64, calls as usize * row)?;
    let arguments = Totals {
        terms: (&terms).into(),
        cells: (&cells).into(),
        calls,
    };
    let (stream, launch) = (comm.stream(), || comm.kernel(arguments).blocks(blocks));
    stream.begin_capture()?;
    launch().enqueue()?;
    let graph = stream.end_capture()?.instantiate()?;
    for seed in 0..launches {
        let values: Vec<u64> = (0..terms.len()).map(|i| number(seed, i) >> 32).collect();
        terms.copy_from(&values)?;
        // No block writes 9.
        cells.copy_from(&vec![9u64; cells.len()])?;
        if seed.is_multiple_of(2) {
            launch().launch()?;
        } else {
            graph.run(stream)?;
            stream.synchronize()?;
        }
        let total: u64 = values.iter().sum();
        for (call, cells) in (1..).zip(cells.to_vec::<u64>()?.chunks(row)) {
            assert_eq!(cells[row - 1], total * call, "call {call} of launch {seed}");
            let last = &cells[row / 2..row - 1];
            assert_eq!(last.iter().sum::<u64>(), 1, "call {call} of launch {seed}");
        }
    }
    Ok(())
}

#[test]
fn the_last_block_reads_what_all_blocks_wrote_also_under_replay() {
    on_shapes(&[(1, 0), (32, 8)], 1, 5, |comm, lanes, _| {
        let launches = if is_short(lanes as u32) { 50 } else { 200 };
        let mut blocks = [1, 2, 5].into_iter();
        blocks.try_for_each(|blocks| check_totals(comm, blocks, 1, launches))
    });
}

#[test]
fn a_launch_has_up_to_16_calls_of_last_block() {
    on_shapes(&SHAPES, 2, 2, |comm, _, _| {
        let mut calls = [16, 1, 7].into_iter();
        calls.try_for_each(|calls| check_totals(comm, 2, calls, 2))
    });
    for (lanes, warp) in [(1, 0), (64, 16)] {
        for message in failing(&shape(2, lanes, warp), |comm| check_totals(comm, 2, 17, 1)) {
            assert_contains(&message, &["more than 16 calls of last_block in a launch"]);
        }
    }
}

/// Block `missing` makes no call.
#[kernel]
fn lacks_an_arrival(s: &mut Session<impl Machine>, missing: u32) -> Result<(), Aborted> {
    if s.block().index() != missing {
        s.last_block()?;
    }
    Ok(())
}

#[test]
fn blocks_that_do_not_all_call_last_block_are_reported() {
    for (lanes, warp) in [(1, 0), (32, 16)] {
        let text = "different numbers of calls of last_block";
        for message in failing(&shape(3, lanes, warp), |comm| {
            comm.kernel(LacksAnArrival { missing: 1 }).launch()
        }) {
            assert_contains(&message, &["in kernel lacks_an_arrival #1", text]);
        }
        // The control: all blocks call it.
        on_shapes(&[(lanes, warp)], 1, 3, |comm, _, _| {
            comm.kernel(LacksAnArrival { missing: 3 }).launch()
        });
    }
}

/// The warps take different numbers of votes and different paths between barriers of the block.
#[kernel]
fn warps_apart(s: &mut Session<impl Machine>, counts: Out<u32>) -> Result<(), Aborted> {
    let (block, warp) = (s.block(), s.block().warp());
    let mut count = 0;
    for round in 0..9 {
        for step in 0..(5 * block.warp_index() + round) % 7 {
            warp.sync();
            count += warp.ballot(warp.rank() <= step).count_ones();
        }
        if block.warp_index() % 2 == 1 {
            count += warp.sum(warp.rank());
        }
        block.sync();
    }
    counts.set(block.rank() as usize, count);
    Ok(())
}

#[test]
fn warps_of_a_block_may_take_different_paths() {
    on_shapes(&SHAPES, 1, 1, |comm, lanes, warp| {
        let counts = zeros(DType::U32, lanes)?;
        let out = (&counts).into();
        comm.kernel(WarpsApart { counts: out }).launch()?;
        let warp = warp as u32;
        for (lane, count) in (0..).zip(counts.to_vec::<u32>()?) {
            let index = lane / warp;
            let steps = (0..9).flat_map(|round| 0..(5 * index + round) % 7);
            let votes: u32 = steps.map(|step| Ord::min(warp, step + 1)).sum();
            let sums = index % 2 * 9 * warp * (warp - 1) / 2;
            assert_eq!(count, votes + sums, "lane {lane}");
        }
        Ok(())
    });
}

/// Warp `apart` returns before the others enter a barrier of the block, or its leader makes another
/// call than its other lanes.
#[kernel]
fn splits_warp(s: &mut Session<impl Machine>, apart: u32, way: u32) -> Result<(), Aborted> {
    let (block, warp) = (s.block(), s.block().warp());
    if block.warp_index() == apart {
        match (way, warp.is_leader()) {
            (0, _) => return Ok(()),
            (1, true) => block.sync(),          // leader at the block
            (2, true) => _ = warp.ballot(true), // leader at the warp
            _ => warp.sync(),                   // others at the warp
        }
    }
    block.sync(); // all at the block
    Ok(())
}

/// Returns the place of the line of this file that ends with `marker`.
fn place(marker: &str) -> String {
    let lines = include_str!("groups.rs").lines();
    let before = lines.take_while(|line| !line.ends_with(marker));
    format!("{}:{}:", file!(), before.count() + 1)
}

#[test]
fn lanes_that_diverge_in_blocks_of_several_warps_are_named_with_their_places() {
    let (text, others) = ("lanes of a block have diverged", "// others at the warp");
    let cases = [
        ["// all at the block"; 2],
        ["// leader at the block", others],
        ["// leader at the warp", others],
    ];
    for (lanes, warp) in [(64, 32), (64, 16), (64, 8), (128, 32)] {
        let warps = lanes / warp;
        for (way, markers) in (0..).zip(cases) {
            let [one, other] = markers.map(place);
            let run = |comm: &Communicator, apart| comm.kernel(SplitsWarp { apart, way }).launch();
            for apart in [0, warps - 1] {
                for message in failing_on(1, &shape(1, lanes, warp), |comm| run(comm, apart)) {
                    assert_contains(&message, &[text, &one, &other]);
                }
            }
            // The control: no warp has this index.
            on_shapes(&[(lanes, warp)], 1, 1, |comm, _, _| run(comm, warps));
        }
    }
}
