//! Checks that wrong arguments are refused before any transfer, and that the communicator remains
//! usable.

use core::time::Duration;

use fusewire::{
    Communicator, DType, E4m3, Error, Norm, Op, Options, ReduceOp, ReductionCode, Result, Tensor,
};
use fusewire_tests::device::tensor;

/// Makes calls with wrong arguments on a communicator of two ranks. Returns the results of the
/// calls, which must be errors.
fn refused(comm: &Communicator) -> Vec<(&'static str, Result<()>)> {
    let me = comm.rank();
    let sum = ReduceOp::Sum;
    let mut x = [1f32; 8];
    let y = [2f32; 8];
    let mut i = [1i32; 8];
    let mut fp8 = [E4m3(0); 8];
    let t = tensor(DType::F32, 16).expect("memory");
    let part = |start, count| t.slice(start, count).expect("a part");
    let words = |count: usize| tensor(DType::U64, count).expect("memory");
    let norm = |input: &Tensor, residual: &Tensor, weight: &Tensor| {
        let mut out = vec![0f32; input.len()];
        comm.all_reduce_norm(&Norm::rms(&mut out, input, weight, 1e-5).with_residual(residual))
    };
    vec![
        ("length", comm.all_reduce_into(&mut x[..7], &y[..], sum)),
        ("type", comm.all_reduce_into(&mut x[..], &i[..], sum)),
        ("fp8", comm.all_reduce(&mut fp8[..], sum)),
        ("fp8 max", comm.all_reduce(&mut fp8[..], ReduceOp::Max)),
        ("bits", comm.all_reduce(&mut x[..], ReduceOp::BitAnd)),
        ("bits rs", {
            comm.reduce_scatter_single(&mut x[..4], &y[..], ReduceOp::BitXor)
        }),
        (
            "overlap",
            comm.all_reduce_into(&part(1, 8), &part(0, 8), sum),
        ),
        ("root", comm.broadcast(&mut x[..], 2)),
        ("root reduce", comm.reduce(&mut x[..], 9, sum)),
        ("root scatter", comm.scatter_single(&mut x[..], &y[..], 2)),
        (
            "root gather",
            comm.gather_single(&mut x[..], &y[..], u32::MAX),
        ),
        (
            "rows rs",
            comm.reduce_scatter_single(&mut x[..], &y[..], sum),
        ),
        ("rows ag", comm.all_gather_single(&mut x[..], &y[..])),
        ("rows a2a", comm.all_to_all_single(&mut x[..7], &y[..7])),
        ("type ag", comm.all_gather_single(&mut i[..], &y[..4])),
        (
            "overlap ag",
            comm.all_gather_single(&part(0, 16), &part(1, 8)),
        ),
        (
            "overlap rs",
            comm.reduce_scatter_single(&part(1, 8), &part(0, 16), sum),
        ),
        (
            "overlap a2a",
            comm.all_to_all_single(&part(0, 8), &part(4, 8)),
        ),
        ("self", comm.send(&x[..], me)),
        ("self recv", comm.recv(&mut x[..], me)),
        ("peer", comm.send(&x[..], 2)),
        ("counts", comm.all_gather_v_single(&mut x[..], &y[..], &[8])),
        (
            "counts sum",
            comm.all_gather_v_single(&mut x[..], &y[..4], &[4, 5]),
        ),
        ("counts overflow", {
            comm.all_gather_v_single(&mut x[..], &y[..4], &[u64::MAX, 4])
        }),
        (
            "counts input",
            comm.all_gather_v_single(&mut x[..], &y[..3], &[4, 4]),
        ),
        (
            "splits",
            comm.all_to_all_v_single(&mut x[..], &y[..], &[4], &[4, 4]),
        ),
        (
            "splits sum",
            comm.all_to_all_v_single(&mut x[..], &y[..], &[4, 4], &[5, 4]),
        ),
        ("splits overflow", {
            comm.all_to_all_v_single(&mut x[..], &y[..], &[4, 4], &[u64::MAX, 2])
        }),
        (
            "splits in place",
            comm.all_to_all_v_single(&t, &t, &[8, 8], &[8, 8]),
        ),
        ("splits tensor", {
            comm.all_to_all_v_single_async(&part(0, 8), &part(8, 8), &words(3), &words(2))
                .map(drop)
        }),
        ("splits type", {
            comm.all_to_all_v_single_async(&part(0, 8), &part(8, 8), &part(0, 2), &words(2))
                .map(drop)
        }),
        ("splits in the output", {
            let output = words(8);
            let splits = output.slice(2, 2).expect("in range");
            comm.all_to_all_v_single_async(&output, &words(8), &splits, &splits)
                .map(drop)
        }),
        ("counts in the output", {
            let output = words(4);
            let counts = output.slice(0, 2).expect("in range");
            counts.copy_from(&[2u64; 2]).expect("two counts");
            comm.all_gather_v_single(&output, &words(2), &counts)
        }),
        ("splits on host and device", {
            comm.all_to_all_v_single_async(&part(0, 8), &part(8, 8), &[4, 4], &words(2))
                .map(drop)
        }),
        ("counts type", {
            comm.all_gather_v_single_async(&part(0, 8), &part(8, 4), &part(0, 2))
                .map(drop)
        }),
        ("norm rows", norm(&part(0, 8), &part(8, 8), &part(0, 3))),
        ("norm weight", norm(&part(0, 8), &part(8, 8), &part(0, 0))),
        ("norm residual", norm(&part(0, 8), &part(8, 7), &part(0, 8))),
        ("norm type", {
            let i = tensor(DType::I32, 8).expect("memory");
            let mut out = [0i32; 8];
            comm.all_reduce_norm(&Norm::rms(&mut out[..], &i, &i, 1e-5).with_residual(&i))
        }),
        ("norm overlap", {
            let (a, b) = (part(1, 8), part(0, 8));
            let norm = Norm::rms(&a, &b, &y[..], 1e-5).with_residual(&y[..]);
            comm.all_reduce_norm(&norm)
        }),
        ("norm outputs overlap", {
            let (a, b) = (part(0, 8), part(4, 8));
            let norm = Norm::rms(&a, &x[..], &y[..], 1e-5)
                .with_residual(&y[..])
                .with_residual_out(&b);
            comm.all_reduce_norm(&norm)
        }),
        (
            "alloc overflow",
            comm.alloc(DType::F64, usize::MAX).map(drop),
        ),
        (
            "alloc huge",
            comm.alloc(DType::U8, usize::MAX / 4).map(drop),
        ),
        ("plan", {
            comm.plan(&Op::AllReduce {
                count: 1,
                dtype: DType::E5m2,
                reduction: ReductionCode::Sum,
            })
            .map(drop)
        }),
        ("type copy", t.copy_from(&i[..])),
        ("length copy", t.copy_from(&y[..])),
        ("slice", t.slice(10, 7).map(drop)),
        ("slice overflow", t.slice(1, usize::MAX).map(drop)),
    ]
}

#[test]
fn bad_arguments_move_nothing() {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(20);
    for result in fusewire::run_threads(2, &options, |comm| {
        for round in 0..3 {
            for (what, result) in refused(&comm) {
                let error = result.expect_err(what);
                assert!(
                    matches!(error, Error::InvalidArgument { .. }),
                    "{what}: {error}"
                );
                // A refused call uses no sequence number and does not cause the communicator to
                // fail.
                assert!(comm.failure().is_none(), "{what}");
            }
            let mut x = [comm.rank() as f32 + 1.0; 300];
            comm.all_reduce(&mut x[..], ReduceOp::Sum)?;
            assert_eq!(x, [3.0; 300], "round {round}");
        }
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

#[test]
fn too_many_windows_are_refused_and_the_others_stay() {
    // Every window opens one memory file per rank, and both ranks are in this process. The
    // default limit of open files may be too low for this test.
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a writable `rlimit`.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur = limit.rlim_max.min(8192);
    // SAFETY: `limit` is a readable `rlimit`.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    let mut options = Options::default();
    options.timeout = Duration::from_secs(20);
    for result in fusewire::run_threads(2, &options, |comm| {
        let mut tensors = Vec::new();
        let error = loop {
            match comm.alloc(DType::F32, 4) {
                Ok(tensor) => tensors.push(tensor),
                Err(error) => break error,
            }
            assert!(tensors.len() < 1100, "no limit");
        };
        assert!(error.to_string().contains("windows"), "{error}");
        let last = tensors.last().expect("some");
        last.copy_from(&[1f32; 4])?;
        comm.all_reduce(last, ReduceOp::Sum)?;
        assert_eq!(last.to_vec::<f32>()?, [2.0; 4]);
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

#[test]
fn sizes_of_windows_must_agree() {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(2);
    for result in fusewire::run_threads(2, &options, |comm| {
        let refused = comm.alloc(DType::F32, 100 + 5000 * comm.rank() as usize);
        Ok(refused.map(drop))
    }) {
        let error = result.expect("joined").expect_err("refused");
        assert!(error.to_string().contains("sizes must be equal"), "{error}");
    }
}
