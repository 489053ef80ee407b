//! Compares the results of every operation of the sample backend with the sequential reference.

use fusewire::testing::reference::{self, fill, first_difference};
use fusewire::{
    Communicator, DType, Device, Element, Error, F32Index, Op, ReduceOp, ReductionCode, Result,
    new_comm,
};
use fusewire_tests::process::{Host, Ranks, report, role};

use crate::{TEST_TIMEOUT, options, ranks, sample};

const OPS: [ReduceOp; 5] = [
    ReduceOp::Sum,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Product,
    ReduceOp::Average,
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

/// Runs the checks of one rank and counts them.
struct Checks<'a> {
    comm: &'a Communicator,
    call: u64,
    done: u64,
}

impl Checks<'_> {
    /// Returns the inputs of all ranks for the next call. Each call gets different inputs.
    fn inputs<T: Element>(&mut self, count: impl Fn(u32) -> usize) -> Vec<Vec<u8>> {
        self.call += 1;
        let held = |rank| fill(T::DTYPE, rank, self.call, count(rank));
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
            panic!(
                "{what} of {} on rank {rank} of {size}: {wrong}",
                T::DTYPE.name()
            );
        }
    }

    fn reductions<T: Element>(&mut self, count: usize, root: u32) -> Result<()> {
        let (comm, dtype) = (self.comm, T::DTYPE);
        let (rank, size) = (comm.rank() as usize, comm.size() as usize);
        for op in OPS {
            let inputs = self.inputs::<T>(|_| count);
            let total = reference::reduce(dtype, op, &[], &inputs);
            let own = self.own::<T>(&inputs);
            let mut x = own.clone();
            comm.all_reduce(&mut x, op)?;
            self.equal(&format!("all_reduce {op:?}"), &total, &x);
            let mut x = vec![T::from_bits(7); count];
            comm.all_reduce_into(&mut x, &own, op)?;
            self.equal("all_reduce_into", &total, &x);
            let mut x = own.clone();
            comm.reduce(&mut x, root, op)?;
            let at_root = rank == root as usize;
            let expected = if at_root { &total } else { &inputs[rank] };
            self.equal(&format!("reduce {op:?}"), expected, &x);
            let inputs = self.inputs::<T>(|_| count * size);
            let mut x = vec![T::from_bits(7); count];
            comm.reduce_scatter_single(&mut x, &self.own::<T>(&inputs), op)?;
            let expected = reference::reduce_scatter(dtype, op, &[], &inputs, rank);
            self.equal(&format!("reduce_scatter {op:?}"), &expected, &x);
        }
        Ok(())
    }

    fn movements<T: Element>(&mut self, count: usize, root: u32) -> Result<()> {
        let comm = self.comm;
        let (rank, size) = (comm.rank() as usize, comm.size() as usize);
        let junk = |count: usize| vec![T::from_bits(7); count];
        let (at_root, from_root) = (rank == root as usize, root as usize);

        let inputs = self.inputs::<T>(|_| count);
        let mut x = self.own::<T>(&inputs);
        comm.broadcast(&mut x, root)?;
        self.equal("broadcast", &inputs[from_root], &x);

        let inputs = self.inputs::<T>(|_| count);
        let mut x = junk(count * size);
        comm.all_gather_single(&mut x, &self.own::<T>(&inputs))?;
        self.equal("all_gather", &reference::gather(&inputs), &x);

        let mut x = junk(if at_root { count * size } else { 0 });
        comm.gather_single(&mut x, &self.own::<T>(&inputs), root)?;
        let expected = if at_root {
            reference::gather(&inputs)
        } else {
            vec![]
        };
        self.equal("gather", &expected, &x);

        let held = |rank: u32| count * (rank as usize + 1) % 2500;
        let inputs = self.inputs::<T>(held);
        let counts: Vec<u64> = comm.ranks().map(|rank| held(rank) as u64).collect();
        let mut x = junk(counts.iter().sum::<u64>() as usize);
        comm.all_gather_v_single(&mut x, &self.own::<T>(&inputs), &counts)?;
        self.equal("all_gather_v", &reference::gather(&inputs), &x);

        let inputs = self.inputs::<T>(|_| count * size);
        let mut x = junk(count);
        comm.scatter_single(&mut x, &self.own::<T>(&inputs), root)?;
        let expected = reference::scatter(&inputs[from_root], size, rank);
        self.equal("scatter", &expected, &x);

        let mut x = junk(count * size);
        comm.all_to_all_single(&mut x, &self.own::<T>(&inputs))?;
        self.equal("all_to_all", &reference::all_to_all(&inputs, rank), &x);

        // Some pairs of ranks exchange no elements.
        let split = |from: usize, to: usize| (from + 2 * to) % 3 * count;
        let sent = |from: usize| {
            (0..size)
                .map(|to| split(from, to) as u64)
                .collect::<Vec<_>>()
        };
        let got: Vec<u64> = (0..size).map(|from| split(from, rank) as u64).collect();
        let inputs = self.inputs::<T>(|rank| sent(rank as usize).iter().sum::<u64>() as usize);
        let mut x = junk(got.iter().sum::<u64>() as usize);
        comm.all_to_all_v_single(&mut x, &self.own::<T>(&inputs), &got, &sent(rank))?;
        let expected = reference::all_to_all_v(T::DTYPE, &inputs, rank, split);
        self.equal("all_to_all_v", &expected, &x);
        Ok(())
    }

    /// Sends a message around the ring.
    fn ring<T: Element>(&mut self, count: usize) -> Result<()> {
        let comm = self.comm;
        let (rank, size) = (comm.rank(), comm.size());
        let inputs = self.inputs::<T>(|_| count);
        let own = self.own::<T>(&inputs);
        let mut x = vec![T::from_bits(7); count];
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        if size == 1 {
            let error = comm.send(&own, 0).expect_err("to itself");
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            return Ok(());
        }
        if rank == 0 {
            comm.send(&own, next)?;
            comm.recv(&mut x, before)?;
        } else {
            comm.recv(&mut x, before)?;
            comm.send(&own, next)?;
        }
        self.equal("send and recv", &inputs[before as usize], &x);
        Ok(())
    }

    fn all<T: Element>(&mut self) -> Result<()> {
        for (i, count) in [0, 1, 1000].into_iter().enumerate() {
            let root = i as u32 % self.comm.size();
            self.reductions::<T>(count, root)?;
            self.movements::<T>(count, root)?;
            self.ring::<T>(count)?;
            self.comm.barrier()?;
        }
        Ok(())
    }
}

/// Runs all checks on one rank. Returns the number of compared results.
fn every_operation(comm: &Communicator) -> Result<u64> {
    assert_eq!(comm.backend(), "sample");
    let version = comm.backend_version();
    assert_eq!(version, format!("sample {}", env!("CARGO_PKG_VERSION")));
    let mut checks = Checks {
        comm,
        call: 0,
        done: 0,
    };
    checks.all::<f32>()?;
    checks.all::<f64>()?;
    checks.all::<i32>()?;
    checks.all::<i64>()?;
    checks.all::<u8>()?;
    // These messages are larger than the socket buffers in both directions. A backend that sends
    // all data before it receives any would block.
    checks.movements::<F32Index>(1000, 0)?;
    checks.movements::<f32>(400_000, comm.size() - 1)?;
    checks.reductions::<i64>(300_001, 0)?;
    Ok(checks.done)
}

#[test]
fn threads_of_one_to_four_ranks() {
    for size in 1..=4 {
        for result in ranks(size, &options(), |comm| {
            let done = every_operation(&comm)?;
            comm.finalize()?;
            Ok(done)
        }) {
            let done = result.expect("every operation");
            assert!(done > 400, "only {done} results were compared");
        }
    }
}

#[test]
fn two_processes_named_by_the_environment() {
    const TEST: &str = "operations::two_processes_named_by_the_environment";
    if role().as_deref() == Some("operations") {
        let comm =
            new_comm("sample", Device::Cpu, "processes", options()).expect("by its variable");
        let done = every_operation(&comm).expect("every operation");
        // No rank exits before all ranks have received their data.
        comm.barrier().expect("all are done");
        report(done);
        return;
    }
    let path = sample().display().to_string();
    for variable in [
        "FUSEWIRE_BACKEND_PATH_SAMPLE",
        "TORCHCOMMS_BACKEND_LIB_PATH_SAMPLE",
    ] {
        let environment = [(variable, path.clone())];
        let mut ranks = Ranks::start(TEST, "operations", 2, Host::Parent, &environment);
        for process in &mut ranks.processes {
            let done = process.next_report(TEST_TIMEOUT).expect("a report");
            assert!(done.parse::<u64>().is_ok_and(|done| done > 400), "{done}");
        }
        ranks.succeed(TEST_TIMEOUT).expect("both ranks");
    }
}

#[test]
fn split_and_dup() {
    for (rank, result) in ranks(3, &options(), |comm| {
        let copy = comm.dup()?;
        let mut x = [1i32 << comm.rank()];
        copy.all_reduce(x.as_mut_slice(), ReduceOp::Sum)?;
        let list: &[u32] = if comm.rank() == 1 { &[] } else { &[2, 0] };
        let Some(part) = comm.split(list, "part")? else {
            return Ok((x[0], None));
        };
        let mut y = [10 * comm.rank() as i64 + 1];
        part.broadcast(y.as_mut_slice(), 0)?;
        Ok((x[0], Some((part.rank(), part.size(), y[0]))))
    })
    .into_iter()
    .enumerate()
    {
        let part = [Some((1, 2, 21)), None, Some((0, 2, 21))][rank];
        assert_eq!(result.expect("all"), (7, part), "rank {rank}");
    }
}

#[test]
fn unsupported_operations_are_refused_before_the_call() {
    for result in ranks(2, &options(), |comm| {
        let backend = comm.backend_impl().expect("a backend");
        let sum = |dtype| Op::AllReduce {
            count: 1,
            dtype,
            reduction: ReductionCode::Sum,
        };
        assert!(backend.supports(&sum(DType::U64)));
        assert!(!backend.supports(&sum(DType::Bf16)));
        assert!(backend.supports(&Op::AllToAllV { dtype: DType::E4m3 }));
        // The ABI has a number for every type.
        for dtype in DType::ALL {
            assert!(
                backend.supports(&Op::AllGather { count: 1, dtype }),
                "{dtype:?}"
            );
        }
        assert!(backend.is_bitwise());
        let mut x = [fusewire::Bf16::from_bits(0); 4];
        let error = comm
            .all_reduce(x.as_mut_slice(), ReduceOp::Sum)
            .expect_err("bf16 is not reduced");
        assert!(matches!(error, Error::Backend { .. }), "{error}");
        assert!(
            error.to_string().contains("no all_reduce of bf16"),
            "{error}"
        );
        // All ranks refuse the call, and the communicator remains usable.
        assert!(comm.failure().is_none());
        comm.broadcast(x.as_mut_slice(), 1)
    }) {
        result.expect("both ranks");
    }
}
