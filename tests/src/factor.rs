//! Compares scaled sums that take the factor from device memory with those of a factor that the
//! host passes.

use fusewire::{Collective, Communicator, DType, Error, ReduceOp, Result, Tensor};

use crate::device::{stream, tensor};
use crate::oracle;

/// Reduction whose factor no operation may use.
pub const IGNORED: ReduceOp = ReduceOp::PreMulSum(77.5);

/// Returns a factor that `dtype` represents exactly and that differs by rank and round.
fn factor_of(dtype: DType, rank: u32, round: u32) -> f64 {
    let at = ((rank + round) % 4) as usize;
    match dtype {
        DType::U8 | DType::U32 | DType::U64 => [3.0, 1.0, 5.0, 2.0][at],
        _ if dtype.is_integer() => [3.0, -1.0, 5.0, -2.0][at],
        _ => [0.5, -2.0, 1.375, -0.1875][at],
    }
}

/// Returns the bytes of an element with this value.
fn element(dtype: DType, value: f64) -> Vec<u8> {
    match dtype {
        DType::F64 => value.to_ne_bytes().to_vec(),
        DType::F32 => (value as f32).to_ne_bytes().to_vec(),
        DType::F16 => half::f16::from_f64(value).to_ne_bytes().to_vec(),
        DType::Bf16 => half::bf16::from_f64(value).to_ne_bytes().to_vec(),
        _ => (value as i64).to_le_bytes()[..dtype.size()].to_vec(),
    }
}

/// The reducing operations, each with its buffers.
struct Buffers {
    input: Tensor,
    outputs: [Tensor; 4],
}

impl Buffers {
    fn new(comm: &Communicator, dtype: DType, count: usize, in_window: bool) -> Result<Self> {
        let (rank, ranks) = (comm.rank(), comm.size() as usize);
        let make = |count: usize| match in_window {
            true => comm.alloc(dtype, count),
            false => tensor(dtype, count),
        };
        let input = make(count * ranks)?;
        input.copy_from_bytes(&oracle::fill(dtype, rank, 9, count * ranks))?;
        let outputs = [make(count)?, make(count)?, make(count)?, make(count)?];
        Ok(Self { input, outputs })
    }

    fn row(&self) -> Result<Tensor> {
        self.input.slice(0, self.outputs[0].len())
    }

    /// Clears the outputs, and copies the input of the operation in place.
    fn clear(&self) -> Result<()> {
        let [a, b, c, in_place] = &self.outputs;
        for output in [a, b, c] {
            output.copy_from_bytes(&vec![0; output.len() * output.dtype().size()])?;
        }
        in_place.copy_from_bytes(&self.row()?.to_bytes()?)
    }

    /// Calls `run` with each operation.
    fn each<'a>(
        &'a self,
        row: &'a Tensor,
        op: ReduceOp,
        factor: Option<&'a Tensor>,
        mut run: impl FnMut(Collective<'a>) -> Result<()>,
    ) -> Result<()> {
        let [a, b, c, in_place] = &self.outputs;
        for collective in [
            Collective::all_reduce(a, row, op),
            Collective::reduce(b, row, 0, op),
            Collective::reduce_scatter(c, &self.input, op),
            Collective::all_reduce_in_place(in_place, op),
        ] {
            run(match factor {
                Some(factor) => collective.with_factor(factor),
                None => collective,
            })?;
        }
        Ok(())
    }

    fn results(&self) -> Result<Vec<Vec<u8>>> {
        self.outputs.iter().map(Tensor::to_bytes).collect()
    }
}

/// Compares factors in memory with the same factors of the host, bit for bit: blocking, enqueued,
/// and captured with a factor that changes between replays.
///
/// # Errors
/// The errors of the operations.
///
/// # Panics
/// Panics if a result differs.
pub fn compare(comm: &Communicator, dtypes: &[DType], counts: &[usize]) -> Result<()> {
    let rank = comm.rank();
    for (&dtype, in_window) in dtypes.iter().zip([true, false].into_iter().cycle()) {
        for &count in counts {
            let buffers = Buffers::new(comm, dtype, count, in_window)?;
            let (row, factor) = (buffers.row()?, tensor(dtype, 1)?);
            let expected = |round: u32| {
                buffers.clear()?;
                let op = ReduceOp::PreMulSum(factor_of(dtype, rank, round));
                buffers.each(&row, op, None, |collective| comm.execute(collective))?;
                let expected = buffers.results()?;
                buffers.clear()?;
                factor.copy_from_bytes(&element(dtype, factor_of(dtype, rank, round)))?;
                Ok::<_, Error>(expected)
            };
            let check = |how: &str, round: u32, expected: Vec<Vec<u8>>| {
                let results = buffers.results()?;
                let what = (how, round, dtype, count, rank, in_window);
                for (at, (result, expected)) in results.iter().zip(&expected).enumerate() {
                    assert!(result == expected, "operation {at} of {what:?}");
                }
                // No rank writes buffers that another one may still read.
                comm.barrier()
            };
            let first = expected(0)?;
            buffers.each(&row, IGNORED, Some(&factor), |it| comm.execute(it))?;
            check("blocking", 0, first)?;
            let second = expected(1)?;
            buffers.each(&row, IGNORED, Some(&factor), |it| {
                comm.enqueue(it)?.wait_blocking()
            })?;
            check("enqueued", 1, second)?;
            let stream = stream();
            let on_stream = comm.on(&stream);
            stream.begin_capture()?;
            buffers.each(&row, IGNORED, Some(&factor), |it| {
                on_stream.enqueue(it).map(drop)
            })?;
            let graph = stream.end_capture()?.instantiate()?;
            for round in 2..5 {
                let replayed = expected(round)?;
                graph.run(&stream)?;
                stream.synchronize()?;
                check("replayed", round, replayed)?;
            }
        }
    }
    Ok(())
}
