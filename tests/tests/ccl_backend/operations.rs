//! Compares every operation, type and reduction that the libraries support with the sequential
//! reference.

use fusewire::testing::reference::{self, fill, first_difference};
use fusewire::{
    Bf16, Communicator, DType, E4m3, E5m2, Element, Error, F16, Op, ReduceOp, ReductionCode,
    Result, Tensor,
};
use fusewire_tests::factor;

use crate::Fake;

const OPS: [ReduceOp; 6] = [
    ReduceOp::Sum,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Average,
    ReduceOp::PreMulSum(0.0),
];

fn values<T: Element>(bytes: &[u8]) -> Vec<T> {
    let element = |bytes: &[u8]| {
        let mut word = [0u8; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        T::from_bits(u64::from_le_bytes(word))
    };
    bytes.chunks_exact(size_of::<T>()).map(element).collect()
}

fn bytes<T: Element>(values: &[T]) -> Vec<u8> {
    values
        .iter()
        .flat_map(|value| value.to_bits().to_le_bytes()[..size_of::<T>()].to_vec())
        .collect()
}

/// Returns the input of `rank` for reduction number `call`. Sums and products over up to eight
/// ranks are exact in every type, because libraries may reduce in any order.
fn exact(dtype: DType, rank: u32, call: u64, count: usize) -> Vec<u8> {
    let noise = fill(DType::U32, rank, call, count);
    let chosen = noise.as_chunks::<4>().0.iter().map(|word| {
        let word = u32::from_le_bytes(*word);
        [0.5f32, -0.5, 1.0, -1.0, 2.0, -2.0][word as usize % 6]
    });
    match dtype {
        DType::F64 => chosen
            .flat_map(|value| f64::from(value).to_le_bytes())
            .collect(),
        DType::F32 | DType::F16 | DType::Bf16 => {
            let chosen: Vec<f32> = chosen.collect();
            if dtype == DType::F32 {
                chosen
                    .iter()
                    .flat_map(|value| value.to_le_bytes())
                    .collect()
            } else {
                reference::narrow(dtype, &chosen)
            }
        }
        _ => fill(dtype, rank, call, count),
    }
}

/// Returns the factor of `rank` in a scaled sum.
fn factor(dtype: DType, rank: u32) -> f64 {
    if dtype.is_integer() {
        [3.0, 1.0, 5.0][rank as usize % 3]
    } else {
        [0.5, -2.0, 1.5][rank as usize % 3]
    }
}

/// Runs the checks of one rank and counts them.
struct Checks<'a> {
    comm: &'a Communicator,
    call: u64,
    done: u64,
}

type InputFn = fn(DType, u32, u64, usize) -> Vec<u8>;

impl Checks<'_> {
    /// Returns the inputs of all ranks for the next call. Each call gets different inputs.
    fn inputs<T: Element>(&mut self, held: InputFn, count: impl Fn(u32) -> usize) -> Vec<Vec<u8>> {
        self.call += 1;
        let held = |rank| held(T::DTYPE, rank, self.call, count(rank));
        self.comm.ranks().map(held).collect()
    }

    fn own<T: Element>(&self, inputs: &[Vec<u8>]) -> Vec<T> {
        values(&inputs[self.comm.rank() as usize])
    }

    fn equal<T: Element>(&mut self, what: &str, expected: &[u8], got: &[T]) {
        self.done += 1;
        let wrong = first_difference(expected, &bytes(got), T::DTYPE);
        let (rank, size) = (self.comm.rank(), self.comm.size());
        if let Some(wrong) = wrong {
            let dtype = T::DTYPE.name();
            panic!("{what} of {dtype} on rank {rank} of {size}: {wrong}");
        }
    }

    fn reductions<T: Element>(&mut self, count: usize, root: u32) -> Result<()> {
        let (comm, dtype) = (self.comm, T::DTYPE);
        let (rank, size) = (comm.rank() as usize, comm.size() as usize);
        let factors: Vec<f64> = comm.ranks().map(|rank| factor(dtype, rank)).collect();
        for op in OPS {
            let own_op = match op {
                ReduceOp::PreMulSum(_) => ReduceOp::PreMulSum(factors[rank]),
                op => op,
            };
            let inputs = self.inputs::<T>(exact, |_| count);
            let total = reference::reduce(dtype, op, &factors, &inputs);
            let own = self.own::<T>(&inputs);
            let mut x = own.clone();
            comm.all_reduce(&mut x, own_op)?;
            self.equal(&format!("all_reduce {op:?}"), &total, &x);
            let mut x = vec![T::from_bits(7); count];
            comm.all_reduce_into(&mut x, &own, own_op)?;
            self.equal("all_reduce_into", &total, &x);
            let at_root = rank == root as usize;
            let mut x = own.clone();
            comm.reduce(&mut x, root, own_op)?;
            let expected = if at_root { &total } else { &inputs[rank] };
            self.equal(&format!("reduce {op:?}"), expected, &x);
            let before = vec![T::from_bits(7); count];
            let mut x = before.clone();
            comm.reduce_into(&mut x, &own, root, own_op)?;
            let before = bytes(&before);
            let expected = if at_root { &total } else { &before };
            self.equal(&format!("reduce_into {op:?}"), expected, &x);
            let inputs = self.inputs::<T>(exact, |_| count * size);
            let own = self.own::<T>(&inputs);
            let expected = reference::reduce_scatter(dtype, op, &factors, &inputs, rank);
            let mut x = vec![T::from_bits(7); count];
            comm.reduce_scatter_single(&mut x, &own, own_op)?;
            self.equal(&format!("reduce_scatter {op:?}"), &expected, &x);
            // In place: the output is this rank's row of the input.
            let whole = tensor(&own)?;
            let row = whole.slice(rank * count, count)?;
            comm.reduce_scatter_single(&row, &whole, own_op)?;
            self.equal("reduce_scatter in place", &expected, &row.to_vec::<T>()?);
        }
        Ok(())
    }

    fn movements<T: Element>(&mut self, count: usize, root: u32) -> Result<()> {
        let comm = self.comm;
        let (rank, size) = (comm.rank() as usize, comm.size() as usize);
        let junk = |count: usize| vec![T::from_bits(7); count];
        let (at_root, from_root) = (rank == root as usize, root as usize);

        let inputs = self.inputs::<T>(fill, |_| count);
        let own = self.own::<T>(&inputs);
        let mut x = own.clone();
        comm.broadcast(&mut x, root)?;
        self.equal("broadcast", &inputs[from_root], &x);

        let gathered = reference::gather(&inputs);
        let mut x = junk(count * size);
        comm.all_gather_single(&mut x, &own)?;
        self.equal("all_gather", &gathered, &x);
        let whole = tensor(&junk(count * size))?;
        let row = whole.slice(rank * count, count)?;
        row.copy_from(&own)?;
        comm.all_gather_single(&whole, &row)?;
        self.equal("all_gather in place", &gathered, &whole.to_vec::<T>()?);

        let mut x = junk(if at_root { count * size } else { 0 });
        comm.gather_single(&mut x, &own, root)?;
        let expected = if at_root { gathered } else { vec![] };
        self.equal("gather", &expected, &x);

        let held = |rank: u32| count * (rank as usize + 1) % 2500;
        let inputs = self.inputs::<T>(fill, held);
        let counts: Vec<u64> = comm.ranks().map(|rank| held(rank) as u64).collect();
        let mut x = junk(counts.iter().sum::<u64>() as usize);
        comm.all_gather_v_single(&mut x, &self.own::<T>(&inputs), &counts)?;
        self.equal("all_gather_v", &reference::gather(&inputs), &x);

        let inputs = self.inputs::<T>(fill, |_| count * size);
        let own = self.own::<T>(&inputs);
        let mut x = junk(count);
        comm.scatter_single(&mut x, &own, root)?;
        let expected = reference::scatter(&inputs[from_root], size, rank);
        self.equal("scatter", &expected, &x);

        let expected = reference::all_to_all(&inputs, rank);
        let mut x = junk(count * size);
        comm.all_to_all_single(&mut x, &own)?;
        self.equal("all_to_all", &expected, &x);
        let whole = tensor(&own)?;
        comm.all_to_all_single(&whole, &whole)?;
        self.equal("all_to_all in place", &expected, &whole.to_vec::<T>()?);

        // Some pairs of ranks exchange no elements.
        let split = |from: usize, to: usize| (from + 2 * to) % 3 * count;
        let sent = |from: usize| {
            let to = 0..size;
            to.map(|to| split(from, to) as u64).collect::<Vec<_>>()
        };
        let got: Vec<u64> = (0..size).map(|from| split(from, rank) as u64).collect();
        let total = |rank: u32| sent(rank as usize).iter().sum::<u64>() as usize;
        let inputs = self.inputs::<T>(fill, total);
        let mut x = junk(got.iter().sum::<u64>() as usize);
        comm.all_to_all_v_single(&mut x, &self.own::<T>(&inputs), &got, &sent(rank))?;
        let expected = reference::all_to_all_v(T::DTYPE, &inputs, rank, split);
        self.equal("all_to_all_v", &expected, &x);
        Ok(())
    }

    /// Sends and receives in a ring, first by separate calls, then by a batch in which every rank
    /// also sends to itself.
    fn ring<T: Element>(&mut self, count: usize) -> Result<()> {
        let comm = self.comm;
        let (rank, size) = (comm.rank(), comm.size());
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let inputs = self.inputs::<T>(fill, |_| count);
        let own = self.own::<T>(&inputs);
        if size > 1 {
            let mut x = vec![T::from_bits(7); count];
            if rank == 0 {
                comm.send(&own, next)?;
                comm.recv(&mut x, before)?;
            } else {
                comm.recv(&mut x, before)?;
                comm.send(&own, next)?;
            }
            self.equal("send and recv", &inputs[before as usize], &x);
        }
        let (source, target) = (tensor(&own)?, tensor(&vec![T::from_bits(7); count])?);
        let itself = tensor(&vec![T::from_bits(7); count])?;
        let mut batch = comm.batch_op_create();
        batch.recv(&target, before)?;
        batch.send(&source, next)?;
        batch.send(&source, rank)?;
        batch.recv(&itself, rank)?;
        batch.issue()?;
        self.equal("batch", &inputs[before as usize], &target.to_vec::<T>()?);
        self.equal("to itself", &bytes(&own), &itself.to_vec::<T>()?);
        Ok(())
    }

    fn moved<T: Element>(&mut self) -> Result<()> {
        for (i, count) in [0, 1, 257].into_iter().enumerate() {
            let root = (i as u32 + 1) % self.comm.size();
            self.movements::<T>(count, root)?;
            self.ring::<T>(count)?;
            self.comm.barrier()?;
        }
        Ok(())
    }

    fn all<T: Element>(&mut self) -> Result<()> {
        for (i, count) in [0, 1, 257].into_iter().enumerate() {
            self.reductions::<T>(count, (i as u32 + 1) % self.comm.size())?;
        }
        self.moved::<T>()
    }
}

fn tensor<T: Element>(values: &[T]) -> Result<Tensor> {
    let tensor = Tensor::new(T::DTYPE, values.len())?;
    tensor.copy_from(values)?;
    Ok(tensor)
}

/// Runs all checks on one rank. Returns the number of compared results.
fn every_operation(comm: &Communicator) -> Result<u64> {
    let mut checks = Checks {
        comm,
        call: 0,
        done: 0,
    };
    checks.all::<f64>()?;
    checks.all::<f32>()?;
    checks.all::<F16>()?;
    checks.all::<Bf16>()?;
    checks.all::<i8>()?;
    checks.all::<u8>()?;
    checks.all::<i32>()?;
    checks.all::<u32>()?;
    checks.all::<i64>()?;
    checks.all::<u64>()?;
    checks.moved::<E4m3>()?;
    checks.moved::<E5m2>()?;
    checks.movements::<f32>(100_000, comm.size() - 1)?;
    Ok(checks.done)
}

/// Minimum number of compared results: 1,080 reductions, plus data movements of twelve types.
const AT_LEAST: u64 = 1_400;

#[test]
fn one_to_eight_ranks() {
    let fake = Fake::new();
    for size in [1, 2, 3, 4, 8] {
        for done in fake.all(size, |comm| {
            assert_eq!((comm.backend(), comm.size()), ("nccl", size));
            assert_eq!(comm.backend_version(), "2.32.3");
            let done = every_operation(&comm)?;
            comm.finalize()?;
            Ok(done)
        }) {
            assert!(done > AT_LEAST, "only {done} results were compared");
        }
    }
}

#[test]
fn factors_in_memory() {
    let fake = Fake::new();
    let dtypes = [DType::F32, DType::F16, DType::Bf16, DType::F64, DType::I32];
    fake.all(3, |comm| factor::compare(&comm, &dtypes, &[1, 257]));
    let created = fake
        .take()
        .into_iter()
        .filter(|record| record.residence >= 0);
    let (in_memory, of_host): (Vec<_>, Vec<_>) = created.partition(|record| {
        // `ncclScalarDevice`.
        record.residence == 0
    });
    // Each comparison has five rounds of four operations with either kind of factor.
    let each = 3 * dtypes.len() * 2 * 5 * 4;
    assert_eq!((in_memory.len(), of_host.len()), (each, each));
}

/// Checks that a version without all_to_all, split and 8-bit floats gives the same results.
#[test]
fn an_old_version_gives_the_same() {
    let fake = Fake::of_version(21_105);
    for done in fake.all(3, |comm| {
        assert_eq!(comm.backend_version(), "2.11.5");
        every_operation(&comm)
    }) {
        assert!(done > AT_LEAST, "only {done} results were compared");
    }
}

#[test]
fn unsupported_operations_are_refused_before_the_call() {
    const CODES: [ReductionCode; 9] = [
        ReductionCode::Sum,
        ReductionCode::Product,
        ReductionCode::Min,
        ReductionCode::Max,
        ReductionCode::Average,
        ReductionCode::PreMulSum,
        ReductionCode::BitAnd,
        ReductionCode::BitOr,
        ReductionCode::BitXor,
    ];
    for version in [20_908, 21_003, 21_105, 23_203] {
        let fake = Fake::of_version(version);
        fake.all(2, |comm| {
            let backend = comm.backend_impl().expect("a backend");
            for dtype in DType::ALL {
                assert!(backend.supports(&Op::AllGather { count: 1, dtype }));
                for code in CODES {
                    let bits = code.name().starts_with('b');
                    let expected = !matches!(dtype, DType::E4m3 | DType::E5m2 | DType::F32Index)
                        && !matches!(
                            code,
                            ReductionCode::BitAnd | ReductionCode::BitOr | ReductionCode::BitXor
                        )
                        && (code != ReductionCode::Average || version >= 21_000)
                        && (code != ReductionCode::PreMulSum || version >= 21_100);
                    assert!(!(bits && expected));
                    let can = backend.supports(&Op::AllReduce {
                        count: 1,
                        dtype,
                        reduction: code,
                    });
                    assert_eq!(
                        can,
                        expected,
                        "{version}: {} of {}",
                        code.name(),
                        dtype.name()
                    );
                }
            }
            assert!(!backend.is_bitwise());
            let mut x = [3i32, 5];
            let error = comm.all_reduce(x.as_mut_slice(), ReduceOp::BitXor);
            let error = error.expect_err("no bits");
            assert!(matches!(error, Error::Backend { .. }), "{error}");
            assert!(
                error.to_string().contains("no all_reduce of i32 with"),
                "{error}"
            );
            // All ranks refuse the call, and the communicator remains usable.
            assert!(comm.failure().is_none());
            comm.all_reduce(x.as_mut_slice(), ReduceOp::Sum)?;
            assert_eq!(x, [6, 10]);
            Ok(())
        });
        assert!(
            fake.take()
                .iter()
                .any(|record| record.name == "ncclAllReduce")
        );
    }
}
