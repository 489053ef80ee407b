//! Compares vocabulary-parallel top-k and log-sum-exp with an independent oracle. Results must be
//! bitwise identical for every type, every number of ranks, lanes, blocks and rows, with ties,
//! infinities and NaN, and in graphs with changing inputs.

use core::ops::Range;

use fusewire::{Communicator, DType, Error, FailureKind, Options, Result, Tensor, VocabParallel};
use fusewire_tests::device::{device, run_threads, tensor};
use fusewire_tests::oracle::narrow;
use fusewire_tests::runner::{Setup, of_networks};
use fusewire_tests::vocab::{Contents, difference, expected};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];
const INDICES: [DType; 4] = [DType::I64, DType::I32, DType::U32, DType::U64];
/// Number of guard elements after each output, which must not change.
const GUARD: usize = 16;

/// Split of the columns over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Split {
    /// The library's default.
    Even,
    /// The last rank's part is half as long.
    ShortLast,
    /// Rank 1 has no columns, and no rank has the last column.
    Gaps,
}

/// One case.
#[derive(Clone, Copy, Debug)]
struct Case {
    contents: Contents,
    dtype: DType,
    rows: usize,
    vocabulary: usize,
    /// Number of greatest logits to select. 0 selects none.
    k: usize,
    sums: bool,
    values: bool,
    split: Split,
    /// Number of elements between the end of a row and the start of the next row.
    padding: usize,
    indices: DType,
}

impl Case {
    fn shards(&self, ranks: u32) -> Vec<Range<usize>> {
        let ranks = ranks as usize;
        let all = self.vocabulary;
        let even = |parts: usize, r: usize| {
            let each = all.div_ceil(parts);
            (r * each).min(all)..((r + 1) * each).min(all)
        };
        (0..ranks)
            .map(|r| match self.split {
                Split::Even => even(ranks, r),
                Split::ShortLast => {
                    let each = (2 * all).div_ceil(2 * ranks - 1);
                    (r * each).min(all)..((r + 1) * each).min(all)
                }
                Split::Gaps if ranks == 1 => 0..all - 1,
                Split::Gaps if r == 1 => 7..7,
                Split::Gaps => {
                    let index = if r == 0 { 0 } else { r - 1 };
                    let part = even(ranks - 1, index);
                    part.start.min(all - 1)..part.end.min(all - 1)
                }
            })
            .collect()
    }
}

/// Buffers of a case on a rank.
struct Buffers {
    case: Case,
    columns: Range<usize>,
    stride: usize,
    logits: Tensor,
    indices: Tensor,
    values: Tensor,
    sums: Tensor,
}

impl Buffers {
    fn new(comm: &Communicator, case: Case) -> Result<Self> {
        let columns = case.shards(comm.size())[comm.rank() as usize].clone();
        let stride = columns.len() + case.padding;
        Ok(Self {
            case,
            stride,
            logits: tensor(case.dtype, case.rows * stride)?,
            indices: tensor(case.indices, case.rows * case.k + GUARD)?,
            values: tensor(DType::F32, case.rows * case.k + GUARD)?,
            sums: tensor(DType::F32, case.rows + GUARD)?,
            columns,
        })
    }

    /// Writes the logits of `round`. The padding between rows holds values that are greater than
    /// all logits.
    fn fill(&self, round: u64) -> Result<()> {
        let case = self.case;
        let mut logits = Vec::new();
        for row in 0..case.rows {
            let all = case.contents.row(case.dtype, round, row, case.vocabulary);
            logits.extend_from_slice(&all[self.columns.clone()]);
            logits.resize((row + 1) * self.stride, 60_000.0);
        }
        self.logits.copy_from_bytes(&narrow(case.dtype, &logits))?;
        for poisoned in [&self.indices, &self.values, &self.sums] {
            let bytes = poisoned.len() * poisoned.dtype().size();
            poisoned.copy_from_bytes(&vec![0x5a; bytes])?;
        }
        Ok(())
    }

    fn call(&self, comm: &Communicator, enqueued: bool) -> Result<()> {
        let case = self.case;
        let indices = self.indices.slice(0, case.rows * case.k)?;
        let values = self.values.slice(0, case.rows * case.k)?;
        let sums = self.sums.slice(0, case.rows)?;
        let mut vocab = VocabParallel::new(&self.logits, case.rows, case.vocabulary);
        if case.split != Split::Even {
            vocab = vocab.with_columns(self.columns.clone());
        }
        if case.padding > 0 {
            vocab = vocab.with_stride(self.stride);
        }
        if case.k > 0 {
            vocab = vocab.with_top_k(case.k, &indices);
        }
        if case.values && case.k > 0 {
            vocab = vocab.with_values(&values);
        }
        if case.sums || case.k == 0 {
            vocab = vocab.with_log_sum_exp(&sums);
        }
        if enqueued {
            comm.vocab_parallel_async(&vocab).map(drop)
        } else {
            comm.vocab_parallel(&vocab)
        }
    }

    fn check(&self, comm: &Communicator, round: u64) -> Result<()> {
        let case = self.case;
        let shards = case.shards(comm.size());
        let (indices, indices_guard) = words(&self.indices, case.rows * case.k)?;
        let (values, values_guard) = words(&self.values, case.rows * case.k)?;
        let (sums, sums_guard) = words(&self.sums, case.rows)?;
        assert!(
            indices_guard && values_guard && sums_guard,
            "{case:?}: written after an output's end"
        );
        for row in 0..case.rows {
            let logits = case.contents.row(case.dtype, round, row, case.vocabulary);
            let mut want = expected(&logits, &shards, case.k);
            if !case.values {
                want.values.fill(0x5a5a_5a5a);
            }
            let part = row * case.k..(row + 1) * case.k;
            let summed = case.sums || case.k == 0;
            assert!(summed || sums[row] == 0x5a5a_5a5a);
            let found = difference(
                &want,
                &indices[part.clone()],
                &values[part],
                summed.then_some(sums[row]),
            );
            if let Some(detail) = found {
                panic!("{case:?}, rank {}, row {row}: {detail}", comm.rank());
            }
        }
        Ok(())
    }
}

/// Returns the low 32 bits of the first `count` elements, and true if the rest is poison. Panics if
/// the upper half of a 64-bit element is not the sign extension that indices have.
fn words(tensor: &Tensor, count: usize) -> Result<(Vec<u32>, bool)> {
    let bytes = tensor.to_bytes()?;
    let size = tensor.dtype().size();
    let (used, guard) = bytes.split_at(count * size);
    let out = used
        .chunks(size)
        .map(|word| {
            let low = u32::from_le_bytes([word[0], word[1], word[2], word[3]]);
            let extended = if low == u32::MAX { 0xff } else { 0 };
            assert!(word[4..].iter().all(|byte| *byte == extended));
            low
        })
        .collect();
    Ok((out, guard.iter().all(|byte| *byte == 0x5a)))
}

fn options(setup: &Setup) -> Options {
    let mut options = setup.options();
    // A slot of this size holds two rows with k = 64.
    options.packet_slot_bytes = 2304;
    options.staging_bytes = setup.staging;
    options
}

fn run(setup: &Setup, cases: &[Case]) {
    run_with(setup, &options(setup), cases);
}

fn run_with(setup: &Setup, options: &Options, cases: &[Case]) {
    for result in run_threads(setup.ranks, options, |comm| {
        for (index, case) in cases.iter().enumerate() {
            let buffers = Buffers::new(&comm, *case)?;
            buffers.fill(index as u64)?;
            buffers.call(&comm, index % 2 == 1)?;
            comm.stream().synchronize()?;
            buffers.check(&comm, index as u64)?;
        }
        Ok(())
    }) {
        result.unwrap_or_else(|error| panic!("{setup:?}: {error}"));
    }
}

/// Returns one case per kind of contents and shape. The other settings alternate between cases.
fn cases(shapes: &[(usize, usize, usize)]) -> Vec<Case> {
    let mut out = Vec::new();
    for (c, contents) in Contents::ALL.into_iter().enumerate() {
        for (s, (rows, vocabulary, k)) in shapes.iter().enumerate() {
            let turn = c + s;
            out.push(Case {
                contents,
                dtype: FLOATS[turn % 3],
                rows: *rows,
                vocabulary: *vocabulary,
                k: *k,
                sums: turn % 4 != 3,
                values: turn % 5 != 4,
                split: [Split::Even, Split::ShortLast, Split::Gaps][(turn + c) % 3],
                padding: [0, 0, 3, 8][turn % 4],
                indices: INDICES[(c + 2 * s) % 4],
            });
        }
    }
    out
}

#[test]
fn ranks_blocks_and_contents() {
    for ranks in [1, 2, 3, 4, 8] {
        for blocks in [1, 3] {
            let setup = Setup {
                blocks,
                ..Setup::new(ranks)
            };
            let shapes = [
                (0, 100, 4),
                (1, 1000, 1),
                (5, 333, 64),
                (4, 64, 64),
                (7, 65, 0),
                (40, 17, 9),
                (2, 9001, 20),
            ];
            run(&setup, &cases(&shapes));
        }
    }
}

#[test]
fn every_type() {
    for dtype in FLOATS {
        let mut list = cases(&[(3, 4096, 8), (2, 4111, 50), (9, 700, 1), (3, 5000, 0)]);
        list.iter_mut().for_each(|case| case.dtype = dtype);
        run(&Setup::new(2), &list);
    }
}

#[test]
fn every_k() {
    let base = cases(&[(2, 400, 1)]);
    let list: Vec<Case> = (1..=64)
        .map(|k| Case {
            k,
            ..base[k % base.len()]
        })
        .collect();
    run(&Setup::new(3), &list);
}

#[test]
fn lanes_give_the_same_bits() {
    if device().is_gpu() {
        println!("the number of lanes is fixed on a GPU");
        return;
    }
    for (lanes, ranks) in [(32, 1), (64, 2), (32, 3)] {
        let setup = Setup {
            lanes,
            ..Setup::new(ranks)
        };
        // In some shapes, k exceeds the number of lanes, or the candidates do not fit into the
        // buffer.
        let shapes = [
            (2, 300, 5),
            (1, 5000, 64),
            (3, 77, 1),
            (0, 8, 2),
            (2, 2051, 0),
            (1, 9000, 31),
        ];
        run(&setup, &cases(&shapes));
    }
}

/// Packets also reach ranks that only a network connects, alone or in teams.
#[test]
fn over_a_network() {
    if device().is_gpu() {
        println!("the network for tests connects ranks on the CPU");
        return;
    }
    for (ranks, team, lanes) in [(2, 1, 1), (4, 2, 1), (3, 1, 32)] {
        let setup = Setup {
            lanes,
            ..Setup::new(ranks)
        };
        for options in of_networks(&options(&setup), team, 3) {
            let shapes = [(0, 100, 4), (5, 333, 64), (2, 2051, 0), (1, 1000, 1)];
            run_with(&setup, &options, &cases(&shapes));
        }
    }
}

/// Sixteen ranks with k = 64 have more keys than the kernel sorts at once.
#[test]
fn many_ranks() {
    let list = cases(&[(1, 2000, 64), (3, 200, 3)]);
    run(&Setup::new(16), &list);
    if !device().is_gpu() {
        let setup = Setup {
            lanes: 32,
            ..Setup::new(17)
        };
        let short: Vec<Case> = cases(&[(1, 2000, 64)]).into_iter().take(2).collect();
        run(&setup, &short);
        // Blocks of four warps.
        let setup = Setup {
            lanes: 64,
            warp: 16,
            ..Setup::new(2)
        };
        run(&setup, &list);
    }
}

#[test]
fn epochs_that_wrap() {
    for first_epoch in [(1 << 31) - 9, (1 << 32) - 9] {
        let lanes = if device().is_gpu() { 1 } else { 32 };
        let setup = Setup {
            lanes,
            first_epoch,
            ..Setup::new(2)
        };
        // A launch has several rounds.
        run(&setup, &cases(&[(9, 90, 64)])[..3]);
    }
}

#[test]
fn graphs_replay_with_changing_logits() {
    let setup = Setup::new(3);
    for result in run_threads(setup.ranks, &options(&setup), |comm| {
        let buffers = cases(&[(3, 1000, 6), (17, 50, 40), (2, 300, 0)])
            .into_iter()
            .map(|case| Buffers::new(&comm, case))
            .collect::<Result<Vec<_>>>()?;
        comm.stream().begin_capture()?;
        for buffers in &buffers {
            buffers.call(&comm, true)?;
        }
        let graph = comm.stream().end_capture()?.instantiate()?;
        for round in 0..4 {
            for buffers in &buffers {
                buffers.fill(round)?;
            }
            graph.run(comm.stream())?;
            for buffers in &buffers {
                buffers.check(&comm, round)?;
            }
        }
        Ok(())
    }) {
        result.expect("every rank");
    }
}

/// Returns the indices, values and log-sum-exps of every rank.
fn outcome(setup: &Setup, rows: usize) -> Vec<[Vec<u8>; 3]> {
    const COLUMNS: usize = 2500;
    const K: usize = 5;
    // Only eight rows have different contents, to save time.
    let some: Vec<Vec<f32>> = (0..8)
        .map(|row| Contents::Ordinary.row(DType::Bf16, 3, row, 2 * COLUMNS))
        .collect();
    run_threads(setup.ranks, &options(setup), |comm| {
        let first = comm.rank() as usize * COLUMNS;
        let mut logits = Vec::with_capacity(rows * COLUMNS);
        for row in 0..rows {
            logits.extend_from_slice(&some[row % 8][first..first + COLUMNS]);
        }
        let x = tensor(DType::Bf16, rows * COLUMNS)?;
        x.copy_from_bytes(&narrow(DType::Bf16, &logits))?;
        let indices = tensor(DType::I32, rows * K)?;
        let values = tensor(DType::F32, rows * K)?;
        let sums = tensor(DType::F32, rows)?;
        comm.vocab_parallel(
            &VocabParallel::new(&x, rows, 2 * COLUMNS)
                .with_top_k(K, &indices)
                .with_values(&values)
                .with_log_sum_exp(&sums),
        )?;
        Ok([indices.to_bytes()?, values.to_bytes()?, sums.to_bytes()?])
    })
    .into_iter()
    .map(|result| result.expect("every rank"))
    .collect()
}

#[test]
fn a_row_does_not_depend_on_the_number_of_rows() {
    let one = outcome(&Setup::new(2), 8);
    assert!(one[0] == one[1], "ranks differ");
    let mut runs = vec![(1, 1, 4096), (1, 3, 100), (1, 1, 1)];
    if !device().is_gpu() {
        runs.extend([(32, 1, 16), (64, 2, 9)]);
    }
    for (lanes, blocks, rows) in runs {
        let setup = Setup {
            lanes,
            blocks,
            ..Setup::new(2)
        };
        for rank in outcome(&setup, rows) {
            for (found, want) in rank.iter().zip(&one[0]) {
                let each = want.len() / 8;
                for (row, bytes) in found.chunks(each).enumerate() {
                    let at = row % 8 * each;
                    assert!(
                        bytes == &want[at..at + each],
                        "row {row} of {rows}, {lanes} lanes, {blocks} blocks"
                    );
                }
            }
        }
    }
}

#[test]
fn refusals() {
    for result in run_threads(2, &options(&Setup::new(2)), |comm| {
        let t = |dtype, count| tensor(dtype, count).expect("memory");
        let x = t(DType::F32, 400);
        let (i, v) = (t(DType::I64, 8), t(DType::F32, 8));
        let sums = t(DType::F32, 4);
        let both = t(DType::F32, 400);
        let top = |k| VocabParallel::new(&x, 4, 200).with_top_k(k, &i);
        let refused = [
            ("possible", VocabParallel::new(&i, 4, 2).with_argmax(&i)),
            ("vocabulary of 0", VocabParallel::new(&x, 4, 0)),
            ("vocabulary of", VocabParallel::new(&x, 4, 1 << 31)),
            ("nothing is asked", VocabParallel::new(&x, 4, 200)),
            ("logits", VocabParallel::new(&x, 5, 200).with_argmax(&i)),
            (
                "columns 4..201",
                VocabParallel::new(&x, 1, 200).with_columns(4..201),
            ),
            ("stride of 99", top(2).with_stride(99)),
            ("logits", top(2).with_stride(101)),
            ("logits", top(2).with_stride(usize::MAX)),
            ("the 0 greatest", top(0)),
            ("the 65 greatest", top(65)),
            (
                "the 3 greatest",
                VocabParallel::new(&x, 1, 2).with_top_k(3, &i),
            ),
            ("indices has 8", top(3)),
            (
                "indices has 8 elements of f32",
                VocabParallel::new(&x, 4, 200).with_top_k(2, &v),
            ),
            ("values has 4", top(2).with_values(&sums)),
            ("values without", {
                VocabParallel::new(&x, 4, 200)
                    .with_log_sum_exp(&sums)
                    .with_values(&v)
            }),
            ("log_sum_exp has 8", top(2).with_log_sum_exp(&v)),
        ];
        for (index, (what, vocab)) in refused.iter().enumerate() {
            let error = comm.vocab_parallel(vocab).expect_err("a refusal");
            let text = error.to_string();
            let fits = text.contains(what) && text.contains("vocab_parallel");
            assert!(fits, "{index}: {text}");
        }
        let inside = both.slice(3, 4)?;
        let vocab = VocabParallel::new(&both, 4, 200).with_log_sum_exp(&inside);
        let error = comm.vocab_parallel(&vocab).expect_err("a refusal");
        let wanted = "log_sum_exp and logits overlap";
        assert!(error.to_string().contains(wanted), "{error}");
        let slice = [1f32; 100];
        let one = sums.slice(0, 1)?;
        let vocab = VocabParallel::new(&slice[..], 1, 200).with_log_sum_exp(&one);
        let error = comm
            .vocab_parallel_async(&vocab)
            .map(drop)
            .expect_err("a slice");
        let text = error.to_string();
        assert!(text.contains("tensor"), "{text}");
        // The communicator remains usable.
        comm.vocab_parallel(&top(2).with_values(&v).with_log_sum_exp(&sums))
    }) {
        result.expect("both ranks");
    }
}

#[test]
fn a_slot_that_is_too_small_is_named() {
    let mut options = options(&Setup::new(1));
    options.packet_slot_bytes = 256;
    for result in run_threads(1, &options, |comm| {
        let (x, i) = (tensor(DType::F32, 100)?, tensor(DType::I64, 64)?);
        let vocab = VocabParallel::new(&x, 1, 100).with_top_k(64, &i);
        let error = comm.vocab_parallel(&vocab).expect_err("a refusal");
        assert!(error.to_string().contains("packet_slot_bytes"), "{error}");
        let few = i.slice(0, 8)?;
        comm.vocab_parallel(&VocabParallel::new(&x, 1, 100).with_top_k(8, &few))
    }) {
        result.expect("the rank");
    }
}

#[test]
fn different_calls_are_reported() {
    for lanes in [1, 32] {
        for other in 0..5 {
            let setup = Setup {
                lanes: if device().is_gpu() { 1 } else { lanes },
                ..Setup::new(2)
            };
            for result in run_threads(2, &options(&setup), |comm| {
                let differs = comm.rank() == 1;
                let pick = |which, usual: usize, unusual| {
                    if differs && other == which {
                        unusual
                    } else {
                        usual
                    }
                };
                let dtype = FLOATS[1 + pick(0, 0, 1)];
                let (rows, k) = (pick(1, 3, 4), pick(2, 4, 5));
                let vocabulary = pick(3, 100, 101);
                let x = tensor(dtype, rows * 51)?;
                let (i, sums) = (tensor(DType::I32, rows * k)?, tensor(DType::F32, rows)?);
                let vocab = VocabParallel::new(&x, rows, vocabulary).with_top_k(k, &i);
                comm.vocab_parallel(&if differs && other == 4 {
                    vocab
                } else {
                    vocab.with_log_sum_exp(&sums)
                })
            }) {
                match result.expect_err("a mismatch") {
                    Error::Mismatch(failure) | Error::Failed(failure) => {
                        assert_eq!(failure.kind, FailureKind::Mismatch, "{failure}");
                    }
                    error => panic!("{other}: {error}"),
                }
            }
        }
    }
}
