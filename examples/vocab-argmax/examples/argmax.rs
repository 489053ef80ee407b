//! Greedy sampling over a vocabulary that is split over four ranks. The ranks are threads of one
//! process.

use fusewire::{DType, Operation, Options, run_threads};
use vocab_argmax::{VOCAB_ARGMAX, VocabArgmaxParams};

const ROWS: usize = 3;
const COLUMNS: usize = 8_000;

fn main() -> Result<(), fusewire::Error> {
    let ranks = run_threads(4, &Options::default(), |comm| {
        let rank = comm.rank() as usize;
        // Row i has its peak in column 9,000 * (i + 1) of the whole vocabulary.
        let logits: Vec<f32> = (0..ROWS * COLUMNS)
            .map(|at| {
                let (row, column) = (at / COLUMNS, rank * COLUMNS + at % COLUMNS);
                if column == 9_000 * (row + 1) {
                    9.5
                } else {
                    (column % 97) as f32 * 0.05
                }
            })
            .collect();
        let keys = fusewire::Tensor::new(DType::U64, ROWS)?;
        let winners = fusewire::Tensor::new(DType::U64, ROWS)?;
        let params = VocabArgmaxParams {
            constants: comm.constants(),
            call: comm.call_word(Operation::User, (ROWS * COLUMNS) as u64),
            rows: ROWS as u64,
            columns: COLUMNS as u64,
            timeout_ns: 0,
            logits: logits.as_ptr(),
            keys: keys.as_ptr().cast(),
            winners: winners.as_ptr().cast(),
        };
        // SAFETY: `logits` has ROWS * COLUMNS elements, and `keys` and `winners` have ROWS
        // elements. The launch keeps the tensors alive, and `logits` lives until the blocking call
        // returns. The communicator has one block.
        unsafe { comm.launch(&VOCAB_ARGMAX, params, [Some(&keys), Some(&winners), None])? };
        winners.to_vec::<u64>()
    });
    for (rank, winners) in ranks.into_iter().enumerate() {
        println!("rank {rank}: {:?}", winners?);
    }
    Ok(())
}
