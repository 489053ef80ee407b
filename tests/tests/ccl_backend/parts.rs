//! Communicators from `split` and `dup`, adopted communicators, and two libraries in one process.

use std::thread;

use fusewire::{Communicator, Device, Error, ReduceOp, Result, backend};
use fusewire_ccl_sys::{Kind, Library};

use crate::{Fake, ranks_of};

fn sum(comm: &Communicator, value: i64) -> Result<i64> {
    let mut x = [value];
    comm.all_reduce(x.as_mut_slice(), ReduceOp::Sum)?;
    Ok(x[0])
}

#[test]
fn split_uses_the_library() {
    let fake = Fake::new();
    let results = fake.all(5, |comm| {
        // One new communicator has ranks 3 and 0, and the other has ranks 4 and 1. Rank 2 joins
        // neither, but the library requires that it also calls `split`.
        let list: &[u32] = [&[3, 0][..], &[4, 1], &[], &[3, 0], &[4, 1]][comm.rank() as usize];
        let Some(part) = comm.split(list, "part")? else {
            return Ok(None);
        };
        let mut first = [comm.rank()];
        part.broadcast(first.as_mut_slice(), 0)?;
        let total = sum(&part, 1 << comm.rank())?;
        // Split the new communicator again.
        let alone = part
            .split(&[part.rank()], "alone")?
            .expect("it is in its list");
        assert_eq!((alone.size(), sum(&alone, 9)?), (1, 9));
        alone.finalize()?;
        part.finalize()?;
        Ok(Some((part.rank(), part.size(), first[0], total)))
    });
    let expected = [
        Some((1, 2, 3, 0b01001)),
        Some((1, 2, 4, 0b10010)),
        None,
        Some((0, 2, 3, 0b01001)),
        Some((0, 2, 4, 0b10010)),
    ];
    assert_eq!(results, expected);
    let records = fake.take();
    let world = |name: &str| {
        let named = records.iter().filter(move |record| record.name == name);
        let mut calls: Vec<_> = named
            .filter(|record| record.ranks == 5)
            .map(|record| (record.rank, record.colour, record.key))
            .collect();
        calls.sort_unstable();
        calls
    };
    // The color is the lowest rank of the list. The key is the position of the rank in the list.
    let split = [(0, 0, 1), (1, 1, 1), (2, -1, 0), (3, 0, 0), (4, 1, 0)];
    assert_eq!(world("ncclCommSplit"), split);
    assert_eq!(world("ncclCommInitRank").len(), 5);
    let inits = records
        .iter()
        .filter(|record| record.name == "ncclCommInitRank");
    assert_eq!(
        inits.count(),
        5,
        "the rendezvous of parts is in the library, not in the store"
    );
}

#[test]
fn dup_uses_the_store() {
    let fake = Fake::new();
    fake.all(3, |comm| {
        let copy = comm.dup()?;
        assert_eq!(copy.backend(), "nccl");
        assert_eq!(sum(&copy, i64::from(comm.rank()))?, 3);
        copy.finalize()?;
        assert_eq!(sum(&comm, 1)?, 3);
        Ok(())
    });
    let records = fake.take();
    let ends = |name: &str| records.iter().filter(|record| record.name == name).count();
    assert_eq!((ends("ncclCommInitRank"), ends("ncclCommDestroy")), (6, 6));
}

#[test]
fn an_adopted_communicator_works_and_is_destroyed() {
    let fake = Fake::new();
    let library = Library::open(Kind::Nccl, Some(&fake.path)).expect("the fake");
    let id = library.unique_id().expect("an id");
    let raws = |rank: i32| {
        let mut raw = core::ptr::null_mut();
        // SAFETY: `raw` is writable, and all three ranks make this call with the same id.
        let code = unsafe { (library.as_raw().comm_init_rank)(&raw mut raw, 3, id, rank) };
        assert_eq!(code, 0);
        raw
    };
    thread::scope(|scope| {
        for rank in 0..3 {
            let fake = &fake;
            scope.spawn(move || {
                // SAFETY: `raws` created the communicator, and no other call adopts it.
                let adopted = unsafe { backend::adopt_nccl("nccl", Some(&fake.path), raws(rank)) };
                let adopted = adopted.expect("its library");
                let options = fake.options();
                let comm = Communicator::adopt(adopted, "adopted", Device::Cpu, options);
                let comm = comm.expect("a communicator");
                assert_eq!((comm.rank(), comm.size()), (rank as u32, 3));
                assert_eq!(sum(&comm, i64::from(rank)).expect("a sum"), 3);
                let list: &[u32] = if rank == 0 { &[0] } else { &[1, 2] };
                let part = comm
                    .split(list, "part")
                    .expect("a part")
                    .expect("in its list");
                assert_eq!(sum(&part, 1).expect("a sum"), list.len() as i64);
                part.finalize().expect("it is sound");
                comm.finalize().expect("it is sound");
            });
        }
    });
    let records = fake.take();
    let ends = |name: &str| records.iter().filter(|record| record.name == name).count();
    assert_eq!((ends("ncclCommDestroy"), ends("ncclCommAbort")), (6, 0));
    // SAFETY: `adopt_nccl` refuses a null pointer before any use.
    let refused = |name| unsafe { backend::adopt_nccl(name, None, core::ptr::null_mut()) };
    for (name, part) in [
        ("nccl", "is null"),
        ("gloo", "none of nccl, ncclx, rccl, rcclx"),
    ] {
        let error = refused(name).expect_err("refused");
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
}

/// Checks that each call goes to the library of its communicator if two loaded libraries export the
/// same symbols.
#[test]
fn two_libraries_in_one_process() {
    let (nvidia, amd) = (Fake::of_version(23_203), Fake::of_version(22_106));
    let totals = |backend: &str, fake: &Fake| {
        ranks_of(backend, 2, &fake.options(), |comm| {
            assert_eq!(comm.backend(), backend);
            for _ in 0..10 {
                sum(&comm, 1)?;
            }
            Ok((
                comm.backend_version(),
                sum(&comm, i64::from(comm.rank()) + 1)?,
            ))
        })
    };
    let (first, second) = thread::scope(|scope| {
        let first = scope.spawn(|| totals("nccl", &nvidia));
        let second = scope.spawn(|| totals("rccl", &amd));
        (first.join().expect("nccl"), second.join().expect("rccl"))
    });
    for (results, version) in [(first, "2.32.3"), (second, "2.21.6")] {
        for result in results {
            assert_eq!(result.expect("a sum"), (version.to_owned(), 3));
        }
    }
    for fake in [&nvidia, &amd] {
        let records = fake.take();
        let sums = records
            .iter()
            .filter(|record| record.name == "ncclAllReduce");
        assert_eq!(
            sums.count(),
            22,
            "each library has its own two ranks' calls"
        );
    }
}

/// Tests the names of the two libraries of Meta, which use the same adapter.
#[test]
fn metas_libraries() {
    for backend in ["ncclx", "rcclx"] {
        let fake = Fake::new();
        for result in ranks_of(backend, 2, &fake.options(), |comm| {
            assert_eq!(comm.backend(), backend);
            sum(&comm, 2)
        }) {
            assert_eq!(result.expect("a sum"), 4);
        }
        assert!(backend::backend_names().contains(&backend.to_owned()));
    }
}
