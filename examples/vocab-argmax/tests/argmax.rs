//! Compares the kernel with a sequential argmax, with one lane and with many lanes.

use fusewire::testing::TestNetwork;
use fusewire::{DType, Options, Tensor, run_threads};
use vocab_argmax::VocabArgmax;

fn logit(seed: u64, row: usize, column: usize) -> f32 {
    let mut x = seed ^ (row as u64) << 32 ^ column as u64;
    x = x.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    x = x.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    // Uses few distinct values, so that ties are frequent, and some NaNs and infinities.
    match x >> 40 & 63 {
        0 => f32::NAN,
        1 => f32::NEG_INFINITY,
        small => small as f32 - 32.0,
    }
}

#[test]
fn equals_a_sequential_argmax() {
    let shared = [(1, 1), (2, 1), (3, 1), (5, 1), (2, 32), (3, 64)];
    // A network for tests connects the ranks, or teams of two ranks.
    let by_network = [(3, 1, 1), (2, 32, 1), (4, 1, 2), (4, 32, 2)];
    let shared = shared.map(|(ranks, lanes)| (ranks, lanes, ranks));
    for (ranks, lanes, team) in shared.into_iter().chain(by_network) {
        let mut options = Options::default();
        options.testing.lanes = lanes;
        // Blocks of 64 lanes have four warps.
        options.testing.warp = lanes.min(16);
        if team < ranks {
            options.testing.network = Some(TestNetwork {
                team,
                seed: u64::from(ranks * lanes),
            });
        }
        for result in run_threads(ranks, &options, |comm| {
            let rank = comm.rank() as usize;
            for (step, (rows, columns)) in [(1, 1), (7, 100), (0, 5), (64, 33), (100, 3), (3, 2000)]
                .into_iter()
                .enumerate()
            {
                let seed = step as u64;
                let values: Vec<f32> = (0..rows * columns)
                    .map(|at| logit(seed, at / columns, rank * columns + at % columns))
                    .collect();
                let logits = Tensor::new(DType::F32, rows * columns)?;
                logits.copy_from(&values)?;
                let keys = Tensor::new(DType::U64, rows)?;
                let winners = Tensor::new(DType::U64, rows)?;
                comm.kernel(VocabArgmax {
                    logits: (&logits).into(),
                    columns: columns as u64,
                    keys: (&keys).into(),
                    winners: (&winners).into(),
                })
                .launch()?;
                let expected: Vec<u64> = (0..rows)
                    .map(|row| {
                        let all = columns * comm.size() as usize;
                        let rank = |c: usize| {
                            let x = logit(seed, row, c);
                            if x.is_nan() { f32::NEG_INFINITY } else { x }
                        };
                        // A row without a number above minus infinity has no defined winner, so
                        // this test ignores it.
                        (0..all)
                            .reduce(|a, b| if rank(b) > rank(a) { b } else { a })
                            .unwrap_or(0) as u64
                    })
                    .collect();
                let got = winners.to_vec::<u64>()?;
                for row in 0..rows {
                    let best = logit(seed, row, expected[row] as usize);
                    if best.is_finite() {
                        assert_eq!(got[row], expected[row], "row {row} of {rows} x {columns}");
                    }
                }
            }
            Ok(())
        }) {
            result.unwrap();
        }
    }
}
