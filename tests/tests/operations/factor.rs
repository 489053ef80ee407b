//! Tests the factor of a scaled sum in device memory.

use core::time::Duration;

use fusewire::{Algorithm, Collective, Communicator, DType, Options, ReduceOp, Result, Tensor};
use fusewire_tests::device::{device, run_threads, stream, tensor};
use fusewire_tests::factor::{self, IGNORED};
use fusewire_tests::runner::of_networks;

const DTYPES: [DType; 10] = [
    DType::F64,
    DType::F32,
    DType::F16,
    DType::Bf16,
    DType::I8,
    DType::U8,
    DType::I32,
    DType::U32,
    DType::I64,
    DType::U64,
];

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(60);
    options.testing.spins = Some(200);
    options.packet_slot_bytes = 8192;
    options.staging_bytes = 16 << 10;
    options
}

fn all<R: Send>(
    ranks: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<R> {
    run_threads(ranks, options, body)
        .into_iter()
        .map(|result| result.unwrap_or_else(|error| panic!("{error}")))
        .collect()
}

/// Runs [`factor::compare`] on all ranks.
fn compare(ranks: u32, options: &Options, dtypes: &[DType], counts: &[usize]) {
    all(ranks, options, |comm| {
        factor::compare(&comm, dtypes, counts)
    });
}

#[test]
fn results_are_those_of_a_factor_of_the_host() {
    for ranks in [1, 2, 4] {
        compare(ranks, &options(), &DTYPES, &[1, 300, 5000]);
    }
}

#[test]
fn every_algorithm_and_several_lanes_and_blocks() {
    for algorithm in [
        Algorithm::Packet,
        Algorithm::PacketTwoShot,
        Algorithm::Signal,
        Algorithm::TwoShot,
        Algorithm::Nvls,
    ] {
        let mut options = options();
        options.algorithm = algorithm;
        options.determinism = fusewire::Determinism::Any;
        compare(3, &options, &[DType::Bf16, DType::F32], &[70, 3000]);
    }
    let mut options = options();
    (options.testing.lanes, options.blocks) = (32, 2);
    compare(2, &options, &[DType::F16, DType::I64], &[500]);
}

#[test]
fn factors_over_a_network() {
    if device().is_gpu() {
        return fusewire_tests::skip::skip("cpu", "the network for tests is on the CPU");
    }
    for options in of_networks(&options(), 2, 11) {
        compare(4, &options, &[DType::F32, DType::I32], &[300]);
    }
}

/// The factor is an operand: the reduction waits for the work that writes it, and work that writes
/// it later waits for the reduction.
#[test]
fn accesses_to_the_factor_are_ordered() {
    all(2, &options(), |comm| {
        let (before, after) = (comm.on(&stream()), comm.on(&stream()));
        let (x, y) = (comm.alloc(DType::F32, 1000)?, comm.alloc(DType::F32, 1000)?);
        x.copy_from(&[1.0f32; 1000])?;
        let factor = comm.alloc(DType::F32, 1)?;
        for round in 1..20 {
            factor.copy_from(&[round as f32])?;
            // Sums the factors of both ranks.
            before.all_reduce_async(&factor, ReduceOp::Sum)?;
            comm.enqueue(Collective::all_reduce(&y, &x, IGNORED).with_factor(&factor))?;
            after.all_reduce_async(&factor, ReduceOp::Sum)?;
            assert_eq!(y.to_vec::<f32>()?, vec![4.0 * round as f32; 1000]);
            assert_eq!(factor.to_vec::<f32>()?, [4.0 * round as f32]);
        }
        Ok(())
    });
}

/// The launch and the graph keep the factor allocated.
#[test]
fn a_factor_may_be_dropped_after_the_call() {
    all(2, &options(), |comm| {
        let x = comm.alloc(DType::F32, 10)?;
        let scaled = |value: f32| {
            let factor = tensor(DType::F32, 1)?;
            factor.copy_from(&[value])?;
            comm.enqueue(Collective::all_reduce_in_place(&x, IGNORED).with_factor(&factor))
        };
        x.copy_from(&[1.0f32; 10])?;
        scaled(0.25)?.wait_blocking()?;
        assert_eq!(x.to_vec::<f32>()?, [0.5; 10]);
        comm.stream().begin_capture()?;
        scaled(0.25)?;
        let graph = comm.stream().end_capture()?.instantiate()?;
        // Takes the memory of the factor, if it was freed.
        let other = tensor(DType::F32, 1)?;
        other.copy_from(&[100.0f32])?;
        graph.run(comm.stream())?;
        assert_eq!(x.to_vec::<f32>()?, [0.25; 10]);
        Ok(())
    });
}

#[test]
fn ranks_may_take_the_factor_from_different_places() {
    all(2, &options(), |comm| {
        let mut x = [1.0f32; 40];
        let factor = tensor(DType::F32, 1)?;
        factor.copy_from(&[3.0f32])?;
        let own = ReduceOp::PreMulSum(0.5);
        let collective = Collective::all_reduce_in_place(&mut x, own);
        comm.execute(match comm.rank() {
            0 => collective.with_factor(&factor),
            _ => collective,
        })?;
        assert_eq!(x, [3.5; 40]);
        Ok(())
    });
}

#[test]
fn refused_before_anything_moves() {
    all(2, &options(), |comm| {
        let (x, ints) = (comm.alloc(DType::F32, 8)?, comm.alloc(DType::I32, 8)?);
        let one = tensor(DType::F32, 1)?;
        let two = tensor(DType::F32, 2)?;
        let half = tensor(DType::Bf16, 1)?;
        let none = tensor(DType::F32, 0)?;
        let inside = x.slice(7, 1)?;
        let scaled = |factor| Collective::all_reduce_in_place(&x, IGNORED).with_factor(factor);
        let summed = Collective::all_reduce_in_place(&x, ReduceOp::Sum);
        for (collective, text) in [
            (
                summed.with_factor(&one),
                "all_reduce: a factor is for the reduction premul_sum, this one is sum",
            ),
            (
                Collective::broadcast(&x, 0).with_factor(&one),
                "broadcast: a factor is for the reduction premul_sum, this one is none",
            ),
            (
                scaled(&two),
                "all_reduce: the factor has 2 elements; 1 is needed",
            ),
            (
                scaled(&none),
                "all_reduce: the factor has 0 elements; 1 is needed",
            ),
            (
                scaled(&half),
                "all_reduce: the factor is bf16, the operation is on f32",
            ),
            (scaled(&inside), "all_reduce: the factor lies in the output"),
        ] {
            let error = comm.execute(collective).expect_err(text).to_string();
            assert!(error.contains(text), "{error} lacks {text}");
        }
        if device().is_gpu() {
            let on_cpu = Tensor::new(DType::F32, 1)?;
            let error = comm
                .enqueue(scaled(&on_cpu))
                .expect_err("device")
                .to_string();
            assert!(error.contains("a tensor is on cpu"), "{error}");
        }
        // The ignored factor need not be an integer.
        let factor = tensor(DType::I32, 1)?;
        factor.copy_from(&[2i32])?;
        ints.copy_from(&[1i32; 8])?;
        comm.execute(Collective::all_reduce_in_place(&ints, IGNORED).with_factor(&factor))?;
        assert_eq!(ints.to_vec::<i32>()?, [4; 8]);
        Ok(())
    });
}
