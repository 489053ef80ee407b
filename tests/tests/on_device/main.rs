//! The tests to run first on a new GPU. They cover every subject briefly. Each test is independent
//! and takes seconds. `FUSEWIRE_TEST_DEVICE` names the device. A run on the CPU checks that the
//! tests themselves are correct. `fusewire-build bundle` packs the tests for a machine with a GPU.

mod several_gpus;

use core::ffi::c_void;
use core::time::Duration;

use fusewire::testing::GridMode;
use fusewire::{
    Communicator, DType, Device, Error, LaunchAttributes, Norm, Options, ReduceOp, Result, Tensor,
};
use fusewire::{new_comm, run_threads_each};
use fusewire_kernels::quantize::{QUANTIZE, QuantizeParams};
use fusewire_tests::device::{device_of, grid_mode, run_threads, tensor};
use fusewire_tests::process::{Host, Process, Ranks, report, role};
use fusewire_tests::rank::CallMode;
use fusewire_tests::runner::{Processes, Runner, Setup, Threads};
use fusewire_tests::seeded_bugs::{LANES, SeededBug};
use fusewire_tests::skip::skip;
use fusewire_tests::{device, oracle};

/// Time limit of the tests' waits, long enough for processes that take turns on a GPU.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);
/// A timeout that the tests let expire. Ranks that are processes use a longer timeout.
const SHORT: Duration = Duration::from_secs(2);
const SHORT_OF_PROCESSES: Duration = Duration::from_secs(10);

fn options(timeout: Duration) -> Options {
    let mut options = Options::default();
    options.timeout = timeout;
    options.abort_process_on_timeout_or_error = Some(false);
    options
}

/// Runs `list` and prints the number of calls.
fn run(runner: &dyn Runner, setup: Setup, list: &str) {
    match runner.run(&setup, list) {
        Ok(calls) => println!("{list}: {calls} calls a rank, {setup:?}"),
        Err(wrong) => panic!("{wrong}"),
    }
}

/// Returns the numbers of blocks to test: one, several, and on a GPU also 0, which selects the
/// default: as many as are resident for all ranks at the same time, at most 16.
fn blocks() -> &'static [u32] {
    if device().is_gpu() {
        &[1, 3, 0]
    } else {
        &[1, 3]
    }
}

fn short_form(ranks: u32) {
    for blocks in blocks() {
        let setup = Setup {
            blocks: *blocks,
            ..Setup::new(ranks)
        };
        run(&Threads, setup, "core");
    }
}

#[test]
fn short_form_of_1_rank() {
    short_form(1);
}

#[test]
fn short_form_of_2_ranks() {
    short_form(2);
}

#[test]
fn three_to_eight_ranks_as_threads() {
    for ranks in 3..=8 {
        short_form(ranks);
    }
}

#[test]
fn types_reductions_and_the_fused_norm() {
    run(&Threads, Setup::new(2), "types");
    for mode in [CallMode::Blocking, CallMode::Graph] {
        let setup = Setup {
            mode,
            staging: 32 << 10,
            ..Setup::new(3)
        };
        run(&Threads, setup, "norms");
    }
}

#[test]
fn enqueued_and_replayed() {
    for mode in [CallMode::Async, CallMode::Graph] {
        let setup = Setup {
            mode,
            ..Setup::new(2)
        };
        run(&Threads, setup, "core");
    }
}

#[test]
fn two_ranks_as_processes() {
    if Processes::child() {
        return;
    }
    let runner = Processes {
        test: "two_ranks_as_processes",
        host: Host::Parent,
    };
    for mode in [CallMode::Blocking, CallMode::Graph] {
        let setup = Setup {
            mode,
            ..Setup::new(2)
        };
        run(&runner, setup, "core");
    }
}

/// Checks that `size` ranks can create a communicator and compute a sum on the device.
fn works(size: u32) {
    for result in run_threads(size, &options(TEST_TIMEOUT), |comm| {
        let x = comm.alloc(DType::F32, 3000)?;
        x.copy_from(&vec![comm.rank() as f32 + 1.0; 3000])?;
        comm.all_reduce(&x, ReduceOp::Sum)?;
        x.to_vec::<f32>()
    }) {
        let expected = (1..=size).sum::<u32>() as f32;
        assert_eq!(result.expect("every rank"), vec![expected; 3000]);
    }
}

#[test]
fn a_rank_that_never_launches_is_named_and_the_device_works_afterwards() {
    works(2);
    rank_1_never_launches(3);
}

/// Runs `ranks` ranks, of which rank 1 does not launch an operation. Every rank must name rank 1,
/// and the process and its GPU contexts must remain usable.
fn rank_1_never_launches(ranks: u32) {
    let multi_rank_grid = grid_mode() == GridMode::MultiRankGrid;
    for graph in [false, true] {
        if graph && multi_rank_grid {
            skip(
                "separate",
                "launches in a multi-rank grid cannot be captured",
            );
            continue;
        }
        let results = run_threads(ranks, &options(SHORT), |comm| {
            let x = comm.alloc(DType::F32, 3000)?;
            comm.barrier()?;
            if comm.rank() == 1 {
                while comm.failure().is_none() {
                    std::thread::sleep(Duration::from_millis(5));
                }
                return Ok(comm.failure());
            }
            if !graph {
                return Ok(comm.all_reduce(&x, ReduceOp::Sum).err());
            }
            comm.stream().begin_capture()?;
            comm.all_reduce_async(&x, ReduceOp::Sum)?;
            let graph = comm.stream().end_capture()?.instantiate()?;
            Ok(graph.run(comm.stream()).err())
        });
        for result in results {
            let error = result.expect("joined").expect("a failure on every rank");
            let text = error.to_string();
            if multi_rank_grid {
                // The host reports the missing rank, because the grid starts only when all ranks
                // have called the operation.
                let says = format!(
                    "rank 1 of {ranks} did not launch within 2 s; another rank launched all_reduce"
                );
                assert!(text.contains(&says), "{text}");
                println!("{text}");
                continue;
            }
            let Error::Timeout(failure) = error else {
                panic!("not a timeout: {text}");
            };
            assert_eq!(failure.rank, 1, "{text}");
            assert!(
                text.contains("rank 1 never entered all_reduce #2"),
                "{text}"
            );
            println!("graph {graph}: {text}");
        }
        works(ranks);
    }
}

#[test]
fn a_process_that_ends_is_named() {
    let test = "a_process_that_ends_is_named";
    if role().as_deref() == Some("rank") {
        // The process exits without `finalize`.
        until_rank_1_ends(|| std::process::abort());
        return;
    }
    rank_1_ends(test, 2, |_| {});
    works(2);
}

/// Runs a rank that is a process. On rank 1, calls `end`, which ends the process. On the other
/// ranks, reports the failure of an operation without rank 1.
fn until_rank_1_ends(end: impl FnOnce()) {
    let comm = new_comm("fusewire", device(), "ends", options(SHORT_OF_PROCESSES))
        .expect("a communicator");
    let x = comm.alloc(DType::F32, 3000).expect("a tensor");
    comm.all_reduce(&x, ReduceOp::Sum).expect("all ranks");
    report("running");
    if comm.rank() == 1 {
        end();
        panic!("this process has not ended");
    }
    let error = comm.all_reduce(&x, ReduceOp::Sum).expect_err("rank 1 ends");
    report(error.to_string().replace('\n', " "));
    let again = comm.barrier().expect_err("it stays failed").to_string();
    assert_eq!(again, error.to_string());
}

/// Starts `size` processes that run `test`, and calls `end` with the process of rank 1 when all
/// ranks run. The other ranks must report that the process of rank 1 has ended.
fn rank_1_ends(test: &str, size: u32, end: impl FnOnce(&Process)) {
    let mut ranks = Ranks::start(test, "rank", size, Host::Parent, &[]);
    for process in &mut ranks.processes {
        assert_eq!(process.next_report(TEST_TIMEOUT).as_deref(), Ok("running"));
    }
    end(&ranks.processes[1]);
    for (rank, process) in ranks.processes.iter_mut().enumerate() {
        if rank == 1 {
            continue;
        }
        let said = process.next_report(TEST_TIMEOUT).expect("a failure");
        assert!(
            said.contains("the process of rank 1 has ended"),
            "rank {rank} reported: {said}"
        );
        println!("rank {rank}: {said}");
        process.succeed(TEST_TIMEOUT).expect("a clean end");
    }
}

const FLOATS: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::Bf16];
const REDUCTIONS: [ReduceOp; 6] = [
    ReduceOp::Sum,
    ReduceOp::Product,
    ReduceOp::Min,
    ReduceOp::Max,
    ReduceOp::Average,
    ReduceOp::PreMulSum(0.3),
];
/// Element counts. They make operations use packets, staging, one shot and two shots.
const COUNTS: [usize; 3] = [331, 9001, 70_001];
const HIDDEN: usize = 776;

fn filled(comm: &Communicator, dtype: DType, bytes: &[u8]) -> Result<Tensor> {
    let tensor = comm.alloc(dtype, bytes.len() / dtype.size())?;
    tensor.copy_from_bytes(bytes)?;
    Ok(tensor)
}

/// Returns the results of all operations that round, by name, for each rank.
fn bits(device: Device, setup: &Setup) -> Vec<Vec<(String, Vec<u8>)>> {
    let mut options = setup.options();
    options.packet_slot_bytes = 8192;
    if device.is_gpu() {
        options.testing.grid_mode = grid_mode();
    }
    // On a GPU, the ranks use the devices of the tests, of which `device` is the first.
    let device_of = |rank| {
        if device.is_gpu() {
            device_of(rank)
        } else {
            device
        }
    };
    let results = run_threads_each(device_of, "fusewire", setup.ranks, &options, |comm| {
        let mut out = Vec::new();
        for dtype in FLOATS {
            for count in COUNTS {
                let bytes = oracle::fill(dtype, comm.rank(), 77, count);
                let (x, y) = (filled(&comm, dtype, &bytes)?, comm.alloc(dtype, count)?);
                for op in REDUCTIONS {
                    comm.all_reduce_into(&y, &x, op)?;
                    out.push((format!("{op:?} of {count} {dtype:?}"), y.to_bytes()?));
                }
            }
        }
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let count = 3 * HIDDEN;
            let x = filled(&comm, dtype, &oracle::fill(dtype, comm.rank(), 5, count))?;
            let residual = filled(&comm, dtype, &oracle::fill(dtype, 0, 7, count))?;
            let weight = filled(&comm, dtype, &oracle::fill(dtype, 0, 6, HIDDEN))?;
            let (y, kept) = (comm.alloc(dtype, count)?, comm.alloc(dtype, count)?);
            let norm = Norm::rms(&y, &x, &weight, 1e-6)
                .with_residual(&residual)
                .with_residual_out(&kept);
            comm.all_reduce_norm(&norm)?;
            out.push((format!("norm of {dtype:?}"), y.to_bytes()?));
            out.push((format!("residual of {dtype:?}"), kept.to_bytes()?));
        }
        Ok(out)
    });
    results
        .into_iter()
        .map(|rank| rank.unwrap_or_else(|error| panic!("{device}, {setup:?}: {error}")))
        .collect()
}

/// Returns a description of the first difference of two ranks' results, or `None` if they are
/// equal.
fn difference(a: &[(String, Vec<u8>)], b: &[(String, Vec<u8>)]) -> Option<String> {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).find_map(|((name, a), (_, b))| {
        let at = (0..a.len().max(b.len())).find(|at| a.get(*at) != b.get(*at))?;
        Some(format!(
            "{name}, byte {at}: {:02x?} and {:02x?}",
            a.get(at),
            b.get(at)
        ))
    })
}

#[test]
fn the_bits_are_those_of_the_cpu() {
    for ranks in [1, 2, 3] {
        let cpu = bits(Device::Cpu, &Setup::new(ranks));
        for blocks in [1, 3] {
            let setup = Setup {
                blocks,
                // On the CPU, compare blocks of one lane with blocks of several lanes.
                lanes: if device().is_gpu() { 1 } else { 32 },
                ..Setup::new(ranks)
            };
            for (rank, other) in bits(device(), &setup).iter().enumerate() {
                if let Some(found) = difference(&cpu[0], other) {
                    panic!("CPU and rank {rank} of {}, {setup:?}: {found}", device());
                }
            }
        }
        println!(
            "{ranks} ranks: {} results with the bits of the CPU",
            cpu[0].len()
        );
        // Negative control of the comparison.
        let mut flipped = cpu[0].clone();
        let last = flipped.last_mut().and_then(|(_, bytes)| bytes.last_mut());
        *last.expect("results") ^= 1;
        let found = difference(&cpu[0], &flipped).expect("a flipped bit");
        assert!(found.starts_with("residual of Bf16, byte 4655"), "{found}");
    }
}

/// Allocates `bytes` bytes by `cuMemAlloc` and never frees them. A sanitizer knows the exact end of
/// a `cuMemAlloc` allocation, but not of memory that is mapped in pages.
fn driver_memory(ordinal: u32, bytes: usize) -> core::result::Result<u64, String> {
    /// Calls a function of the driver. Returns an error from the enclosing function if the call
    /// fails.
    macro_rules! call {
        ($library:expr, $name:literal, ($($type:ty),*), $($argument:expr),*) => {{
            let symbol = concat!($name, "\0").as_bytes();
            // SAFETY: `cuda.h` declares the function with this type.
            let function = unsafe {
                $library.get::<unsafe extern "C" fn($($type),*) -> i32>(symbol)
            };
            let function = function.map_err(|error| error.to_string())?;
            // SAFETY: pointer arguments point to live variables of the types in `cuda.h`.
            match unsafe { function($($argument),*) } {
                0 => {}
                code => return Err(format!("{} returned {code}", $name)),
            }
        }};
    }
    // SAFETY: the driver's initializers have no requirements.
    let library =
        unsafe { libloading::Library::new("libcuda.so.1") }.map_err(|error| error.to_string())?;
    let (mut ordinal_of, mut context) = (0i32, core::ptr::null_mut::<c_void>());
    let mut address = 0u64;
    call!(library, "cuInit", (u32), 0);
    call!(
        library,
        "cuDeviceGet",
        (*mut i32, i32),
        &raw mut ordinal_of,
        ordinal as i32
    );
    call!(
        library,
        "cuDevicePrimaryCtxRetain",
        (*mut *mut c_void, i32),
        &raw mut context,
        ordinal_of
    );
    call!(library, "cuCtxSetCurrent", (*mut c_void), context);
    call!(
        library,
        "cuMemAlloc_v2",
        (*mut u64, usize),
        &raw mut address,
        bytes
    );
    // The context is never released, so the library must stay loaded.
    core::mem::forget(library);
    Ok(address)
}

#[test]
#[ignore = "writes two bytes beyond its memory; a sanitizer must report it"]
fn seeded_write_beyond_memory() {
    const COUNT: usize = 100;
    let Device::Cuda(ordinal) = device() else {
        return skip("cuda", "the seeded bug is an access beyond CUDA memory");
    };
    for result in run_threads(1, &options(TEST_TIMEOUT), |comm| {
        let source = tensor(DType::F32, COUNT + 1)?;
        source.copy_from(&vec![1.5f32; COUNT + 1])?;
        let address = driver_memory(ordinal, COUNT * 2).expect("memory of the driver");
        // SAFETY: `address` points to `COUNT` bf16 elements, which are never freed.
        let target =
            unsafe { Tensor::adopt(device(), address as *mut u8, DType::Bf16, COUNT, None)? };
        let params = QuantizeParams {
            source: source.as_ptr().cast(),
            target: target.as_ptr().cast(),
            // The seeded bug: the count is one element too large.
            count: COUNT as u64 + 1,
            seed: 1,
        };
        // SAFETY: the extra element overlaps no other allocation, because the driver allocates
        // multiples of 256 bytes.
        let work = unsafe {
            let shape = LaunchAttributes::default();
            comm.launch_raw(&QUANTIZE, params, &[&source, &target], shape)?
        };
        work.wait_blocking()?;
        // The output shows that the kernel has run.
        target.to_bytes()
    }) {
        let bytes = result.expect("the launch");
        assert!(
            bytes
                .chunks(2)
                .all(|value| value == 0x3fc0u16.to_le_bytes())
        );
        println!("seeded bug: {COUNT} elements, {} written", COUNT + 1);
    }
}

#[test]
#[ignore = "a race in shared memory; a sanitizer must report it"]
fn seeded_race() {
    SeededBug::Race { ordered: false }.run();
}

#[test]
#[ignore = "the kernel of seeded_race without its error"]
fn seeded_race_fixed() {
    SeededBug::Race { ordered: true }.run();
}

#[test]
#[ignore = "a barrier that one of two warps skips; a sanitizer must report it"]
fn seeded_divergence_of_warps() {
    SeededBug::Divergence { limit: LANES / 2 }.run();
}

#[test]
#[ignore = "a barrier that part of a warp skips; a sanitizer must report it; may hang without one"]
fn seeded_divergence_in_a_warp() {
    SeededBug::Divergence {
        limit: LANES / 2 + 8,
    }
    .run();
}

#[test]
#[ignore = "the kernel of seeded_divergence without its error"]
fn seeded_divergence_fixed() {
    SeededBug::Divergence { limit: LANES }.run();
}
