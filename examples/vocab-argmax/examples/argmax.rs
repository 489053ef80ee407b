//! Greedy sampling over a vocabulary that is split over four ranks. The ranks are threads of one
//! process.

use fusewire::{DType, Options, run_threads};
use vocab_argmax::VocabArgmax;

const ROWS: usize = 3;
const COLUMNS: usize = 8_000;

fn main() -> Result<(), fusewire::Error> {
    let ranks = run_threads(4, &Options::default(), |comm| {
        let rank = comm.rank() as usize;
        // Row i has its peak in column 9,000 * (i + 1) of the whole vocabulary.
        let values: Vec<f32> = (0..ROWS * COLUMNS)
            .map(|at| {
                let (row, column) = (at / COLUMNS, rank * COLUMNS + at % COLUMNS);
                if column == 9_000 * (row + 1) {
                    9.5
                } else {
                    (column % 97) as f32 * 0.05
                }
            })
            .collect();
        let logits = fusewire::Tensor::new(DType::F32, ROWS * COLUMNS)?;
        logits.copy_from(&values)?;
        let keys = fusewire::Tensor::new(DType::U64, ROWS)?;
        let winners = fusewire::Tensor::new(DType::U64, ROWS)?;
        comm.kernel(VocabArgmax {
            logits: (&logits).into(),
            columns: COLUMNS as u64,
            keys: (&keys).into(),
            winners: (&winners).into(),
        })
        .launch()?;
        winners.to_vec::<u64>()
    });
    for (rank, winners) in ranks.into_iter().enumerate() {
        println!("rank {rank}: {:?}", winners?);
    }
    Ok(())
}
