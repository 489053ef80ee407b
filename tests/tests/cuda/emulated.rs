//! Runs the committed PTX images on the emulator: every kernel, with several ranks, targets and
//! schedulers; graphs, failures and invalid kernels.

use core::time::Duration;
use std::collections::BTreeSet;
use std::ffi::CString;

use fusewire::gpu::driver::Properties;
use fusewire::{
    Algorithm, Communicator, DType, Device, MissingRanks, Moe, Operation, Options, ReduceOp,
    Result, VocabParallel, run_threads_each,
};
use fusewire_kernels::KERNELS;
use fusewire_tests::cases;
use fusewire_tests::device::{device_of, run_threads, separate_gpus, stream, tensor};
use fusewire_tests::fake::Fake;
use fusewire_tests::moe::{self, Buffers, Expert, GROUP, MoeCase};
use fusewire_tests::oracle;
use fusewire_tests::process::{Host, role};
use fusewire_tests::rank::CallMode;
use fusewire_tests::runner::{Processes, Setup, Threads};
use fusewire_tests::seeded_bugs::{LANES, SeededBug};

use super::{mix, on_fake, options, rank_1_never_launches, run};

/// Environment of all tests: the emulator executes kernels on eight devices, with blocks of at most
/// 64 threads.
pub(crate) const EMULATED: [(&str, &str); 5] = [
    ("FUSEWIRE_FAKE_GPU", "ptx"),
    ("FUSEWIRE_CUDA_FAKE_DEVICES", "8"),
    ("FUSEWIRE_CUDA_FAKE_THREADS", "64"),
    ("FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS", "24"),
    ("FUSEWIRE_TEST_DEVICE", "cuda:each"),
];

/// Runs `body` in a child process on the emulator, with `environment`. `test` is the name of the
/// calling test in this module.
fn on_emulator(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    let all = [&EMULATED, environment].concat();
    on_fake(&format!("emulated::{test}"), &all, body);
}

/// Runs calls that launch every kernel of the library, with numbers of ranks. Results must have
/// the bits of the reference, which are those of the CPU device. Kernels whose names `is_absent`
/// accepts are not launched.
fn every_kernel(numbers: &[u32], is_absent: impl Fn(&str) -> bool) {
    for ranks in numbers {
        run(&Threads, Setup::new(*ranks), "core");
    }
    let replayed = Setup {
        mode: CallMode::Graph,
        blocks: 2,
        ..Setup::new(3)
    };
    run(&Threads, replayed, "core");
    run(&Threads, Setup::new(2), "types");
    run(&Threads, Setup::new(3), "norms");
    // The plan takes two shots by packets only for larger inputs.
    let two_shot = |list: &str, ranks: u32| {
        let setup = Setup {
            algorithm: Algorithm::PacketTwoShot,
            ..Setup::new(ranks)
        };
        let mut cases = cases::list(list, ranks);
        cases.retain(|case| case.operation == Operation::AllReduce);
        if let Err(wrong) = Threads.run_cases(&setup, &cases) {
            panic!("{wrong}");
        }
    };
    for ranks in numbers {
        two_shot("core", *ranks);
    }
    two_shot("types", 2);
    let gpus = separate_gpus().unwrap_or_default();
    if gpus.iter().all(|gpu: &Properties| gpu.multicast) {
        for ranks in numbers {
            let setup = Setup {
                algorithm: Algorithm::Nvls,
                ..Setup::new(*ranks)
            };
            run(&Threads, setup, "nvls");
        }
    }
    mix(4);
    mixture_of_experts();
    for result in run_threads(3, &Options::default(), |comm| overlapped(&comm)) {
        result.expect("all ranks");
    }
    assert_eq!(fused(fusewire_tests::device()), fused(Device::Cpu));
    let fake = Fake::open().expect("the fake");
    let count = |name: &str| fake.launch_count(&CString::new(name).expect("a name"));
    let kernels = KERNELS.iter().copied().flatten().map(|kernel| kernel.name);
    let missing: BTreeSet<&str> = kernels
        .filter(|name| !is_absent(name) && count(name) == 0)
        .collect();
    assert!(
        missing.is_empty(),
        "kernels that were not launched: {missing:?}"
    );
}

/// Runs dispatch and combine of a mixture of experts, for each type, payload and layout, with one
/// and with several blocks.
fn mixture_of_experts() {
    for (ranks, blocks) in [(2, 1), (3, 2)] {
        let setup = Setup {
            blocks,
            ..Setup::new(ranks)
        };
        let results = Threads.each(&setup, |comm| {
            for case in moe::forms() {
                moe::run(&comm, &case, 3)?;
            }
            for case in moe::settings(ranks) {
                moe::run(&comm, &case, 2)?;
            }
            Ok::<(), String>(())
        });
        for result in results {
            result.expect("all ranks");
        }
        if ranks > 2 {
            for result in Threads.each(&setup, |comm| without_rank_1(&comm)) {
                result.expect("all ranks");
            }
        }
    }
}

/// Runs dispatch and combine on all ranks but rank 1, which is masked.
fn without_rank_1(comm: &Communicator) -> core::result::Result<(), String> {
    let text = |error: fusewire::Error| error.to_string();
    let (rank, ranks) = (comm.rank(), comm.size());
    let mut case = MoeCase {
        missing_ranks: MissingRanks::Mask,
        ..MoeCase::new(7, 3, 2 * GROUP, 5)
    };
    let config = case.config().timeout(Duration::from_millis(50));
    let moe = Moe::new(comm, &config).map_err(text)?;
    let store = comm.store();
    if rank == 1 {
        for other in [0, 2] {
            let key = format!("{other} has combined");
            let ended = store.get(&key, Duration::from_secs(600));
            ended.map_err(|error| error.to_string())?;
        }
        return Ok(());
    }
    case.masked = 1 << 1;
    let buffers = Buffers::new(comm, &case, moe.info()).map_err(text)?;
    for round in 0..2 {
        let inputs = moe::inputs(&case, rank, round);
        let it = buffers.write(&case, &inputs).map_err(text)?;
        let dispatched = moe.dispatch(&it.x, &it.ids, &it.weights).map_err(text)?;
        comm.synchronize().map_err(text)?;
        assert_eq!(moe.mask().to_vec::<u32>().map_err(text)?, [0, 1, 0]);
        let expected = moe::expected(&case, ranks, rank, round);
        moe::check_dispatched(&case, moe.info(), &dispatched, &expected, false)?;
        let expert = Expert::Affine(round as f32);
        let y = moe::results(&case, &expected, moe.info().results, expert);
        buffers.y.copy_from_bytes(&y).map_err(text)?;
        moe.combine(&buffers.y, &dispatched, &it.out)
            .map_err(text)?;
        comm.synchronize().map_err(text)?;
        let (present, missing) = case.present(ranks, round, &inputs);
        let found = moe.missing().to_vec::<u32>().map_err(text)?;
        assert_eq!(found[..inputs.tokens], missing);
        buffers.check(&case, &moe::outputs(&case, &present, expert))?;
    }
    let key = format!("{rank} has combined");
    store.set(&key, b"").map_err(|error| error.to_string())
}

/// Runs the operations with a ready flag for each chunk or tile, for each type that they support.
fn overlapped(comm: &Communicator) -> Result<()> {
    const COUNT: usize = 1000;
    const CHUNK: usize = 300;
    let ranks = comm.size() as usize;
    let other = stream();
    for dtype in [DType::F32, DType::F16, DType::Bf16, DType::I32] {
        let fill = |rank: usize, count: usize| oracle::fill(dtype, rank as u32, 3, count);
        let x = tensor(dtype, COUNT)?;
        let all = tensor(dtype, ranks * COUNT)?;
        x.copy_from_bytes(&fill(comm.rank() as usize, COUNT))?;
        let flags = comm.ready_flags(comm.chunks(COUNT, CHUNK))?;
        // SAFETY: the host accesses the tensors only after the operation has completed.
        let work = unsafe { comm.all_gather_with_flags_async(&other, &all, &x, &flags, CHUNK)? };
        for index in 0..flags.len() {
            flags.stream_wait(&other, index)?;
        }
        other.synchronize()?;
        work.wait_blocking()?;
        let expected: Vec<u8> = (0..ranks).flat_map(|rank| fill(rank, COUNT)).collect();
        assert_eq!(all.to_bytes()?, expected, "{dtype:?}");

        let sums = tensor(dtype, COUNT)?;
        let tiles = comm.ready_flags(comm.chunks(COUNT, CHUNK))?;
        let op = ReduceOp::Sum;
        // SAFETY: the input was written before, and its words follow.
        let work = unsafe {
            comm.reduce_scatter_on_arrival_async(&other, &sums, &all, &tiles, CHUNK, 1, op)?
        };
        for index in 0..tiles.len() {
            tiles.stream_write(&other, index, 1)?;
        }
        work.wait_blocking()?;
        other.synchronize()?;
        let whole = tensor(dtype, COUNT)?;
        comm.reduce_scatter_single(&whole, &all, op)?;
        assert_eq!(sums.to_bytes()?, whole.to_bytes()?, "{dtype:?}");
    }
    Ok(())
}

/// Returns the results of vocabulary-parallel sampling for each type, and of a quantized
/// reduce_scatter, on three ranks.
fn fused(device: Device) -> Vec<Vec<u8>> {
    const ROWS: usize = 3;
    const COLUMNS: usize = 200;
    const TOP: usize = 4;
    let device_of = |rank| {
        if device.is_gpu() {
            device_of(rank)
        } else {
            device
        }
    };
    let ranks = run_threads_each(device_of, "fusewire", 3, &Options::default(), |comm| {
        let mut out = Vec::new();
        for dtype in [DType::F32, DType::F16, DType::Bf16] {
            let logits = comm.alloc(dtype, ROWS * COLUMNS)?;
            logits.copy_from_bytes(&oracle::fill(dtype, comm.rank(), 8, ROWS * COLUMNS))?;
            let (top, sums) = (
                comm.alloc(DType::U64, ROWS * TOP)?,
                comm.alloc(DType::F32, ROWS)?,
            );
            comm.vocab_parallel(
                &VocabParallel::new(&logits, ROWS, comm.size() as usize * COLUMNS)
                    .with_top_k(TOP, &top)
                    .with_log_sum_exp(&sums),
            )?;
            out.extend([top.to_bytes()?, sums.to_bytes()?]);
        }
        let input = comm.alloc(DType::F32, 3 * 700)?;
        input.copy_from_bytes(&oracle::fill(DType::F32, comm.rank(), 9, 3 * 700))?;
        let output = comm.alloc(DType::F32, 700)?;
        comm.reduce_scatter_quantized(&output, &input, ReduceOp::Sum, 5)?;
        out.push(output.to_bytes()?);
        Ok(out)
    });
    let ranks = ranks.into_iter().map(|rank| rank.expect("all ranks"));
    ranks.flatten().collect()
}

#[test]
fn every_kernel_of_sm_90() {
    // The other tests check for races.
    let environment = [
        ("FUSEWIRE_CUDA_FAKE_MULTICAST", "1"),
        ("FUSEWIRE_CUDA_FAKE_MEMORY_MODEL", "unchecked"),
    ];
    on_emulator("every_kernel_of_sm_90", &environment, || {
        every_kernel(&[2, 4, 8], |_| false);
    });
}

#[test]
fn every_kernel_with_weak_memory() {
    let environment = [
        ("FUSEWIRE_CUDA_FAKE_MULTICAST", "1"),
        ("FUSEWIRE_CUDA_FAKE_MEMORY_MODEL", "weak"),
        ("FUSEWIRE_CUDA_FAKE_SCHEDULER", "random:3"),
    ];
    on_emulator("every_kernel_with_weak_memory", &environment, || {
        every_kernel(&[3], |_| false);
    });
}

#[test]
fn every_kernel_of_sm_80() {
    let environment = [("FUSEWIRE_CUDA_FAKE_SM", "80")];
    on_emulator("every_kernel_of_sm_80", &environment, || {
        // Multicast objects need sm_90.
        every_kernel(&[2, 3, 4, 8], |name| name.contains("_nvls"));
    });
}

#[test]
fn schedules_do_not_change_results() {
    for schedule in ["random:1", "random:2", "starve:1", "starve:*:0"] {
        let environment = [("FUSEWIRE_CUDA_FAKE_SCHEDULER", schedule)];
        on_emulator("schedules_do_not_change_results", &environment, || {
            let setup = Setup {
                blocks: 2,
                ..Setup::new(3)
            };
            run(&Threads, setup, "core");
        });
        if role().is_some() {
            return;
        }
    }
}

#[test]
fn trips_of_a_barrier() {
    let environment = [
        ("FUSEWIRE_CUDA_FAKE_TRIPS", "1"),
        ("FUSEWIRE_CUDA_FAKE_SCHEDULER", "random:3"),
    ];
    on_emulator("trips_of_a_barrier", &environment, || {
        for result in run_threads(2, &Options::default(), |comm| {
            comm.barrier()?;
            comm.barrier()
        }) {
            result.expect("all ranks");
        }
        let fake = Fake::open().expect("the fake");
        let trips = fake.trips(c"barrier");
        // A block of 64 threads reads its constants in two iterations; then the signal of the peer.
        // No fence: the launch has no earlier stores that the release of its signal would await,
        // and its end releases nothing.
        assert_eq!(trips.matches("\"steps\":[3,0,0]").count(), 2, "{trips}");
        assert_eq!(fake.trips(c"no_kernel"), "[]");
    });
}

/// Checks that a rank loads the rows of all peers at once: the dependent loads of an operation do
/// not grow with the number of ranks.
#[test]
fn dependent_loads_do_not_grow_with_the_ranks() {
    let environment = [
        ("FUSEWIRE_CUDA_FAKE_TRIPS", "1"),
        ("FUSEWIRE_CUDA_FAKE_SCHEDULER", "round-robin"),
        // A warp for each rank.
        ("FUSEWIRE_CUDA_FAKE_THREADS", "256"),
    ];
    let test = "dependent_loads_do_not_grow_with_the_ranks";
    on_emulator(test, &environment, || {
        const COUNT: usize = 64;
        for result in run_threads(8, &Options::default(), |comm| {
            let count = comm.size() as usize * COUNT;
            let (x, y) = (tensor(DType::F32, count)?, tensor(DType::F32, count)?);
            comm.all_to_all_single(&y, &x)
        }) {
            result.expect("all ranks");
        }
        let fake = Fake::open().expect("the fake");
        let trips = fake.trips(c"move_rows");
        // Strong loads: epochs, ready, done. Weak loads: the input, which goes to staging; the
        // words of the peers; the addresses of their workspaces; their data. A fence for the ready
        // signal.
        assert_eq!(trips.matches("\"steps\":[3,4,1]").count(), 8, "{trips}");
    });
}

#[test]
fn ranks_as_processes() {
    if Processes::child() {
        return;
    }
    let environment = [("FUSEWIRE_CUDA_FAKE_MULTICAST", "1")];
    on_emulator("ranks_as_processes", &environment, || {
        let runner = Processes {
            test: "emulated::ranks_as_processes",
            host: Host::Parent,
        };
        run(&runner, Setup::new(2), "core");
        let setup = Setup {
            algorithm: Algorithm::Nvls,
            ..Setup::new(2)
        };
        run(&runner, setup, "nvls");
    });
}

#[test]
fn a_rank_that_never_launches_is_named() {
    on_emulator(
        "a_rank_that_never_launches_is_named",
        &[],
        rank_1_never_launches,
    );
}

/// Kernels of the crate `seeded-bugs`, written by hand: `seeded_race` exchanges lane numbers
/// through shared memory if `ordered` is not 0, else it writes after the end of `out`;
/// `seeded_divergence` executes a barrier in the lanes below `limit`, and another one in all lanes.
const SEEDED: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry seeded_race(.param .u32 ordered, .param .u64 out)
{
	.reg .pred %p<2>;
	.reg .b32 %r<6>;
	.reg .b64 %rd<4>;
	.shared .align 4 .b8 cells[256];
	ld.param.u32 %r1, [ordered];
	ld.param.u64 %rd1, [out];
	mov.u32 %r2, %tid.x;
	shl.b32 %r3, %r2, 2;
	cvt.u64.u32 %rd2, %r3;
	mov.u64 %rd3, cells;
	add.s64 %rd3, %rd3, %rd2;
	st.shared.u32 [%rd3], %r2;
	bar.sync 0;
	xor.b32 %r3, %r3, 128;
	cvt.u64.u32 %rd3, %r3;
	mov.u64 %rd1, cells;
	add.s64 %rd3, %rd3, %rd1;
	ld.shared.u32 %r4, [%rd3];
	ld.param.u64 %rd1, [out];
	add.s64 %rd1, %rd1, %rd2;
	setp.eq.u32 %p1, %r1, 0;
	@%p1 add.s64 %rd1, %rd1, 0x100000000000;
	st.global.u32 [%rd1], %r4;
	ret;
}
.visible .entry seeded_divergence(.param .u32 limit, .param .u64 out)
{
	.reg .pred %p<2>;
	.reg .b32 %r<6>;
	.reg .b64 %rd<4>;
	ld.param.u32 %r1, [limit];
	ld.param.u64 %rd1, [out];
	mov.u32 %r2, %tid.x;
	setp.ge.u32 %p1, %r2, %r1;
	@%p1 bra AFTER;
	bar.sync 0;
AFTER:
	mul.wide.u32 %rd2, %r2, 4;
	add.s64 %rd1, %rd1, %rd2;
	st.global.u32 [%rd1], %r2;
	bar.sync 0;
	ret;
}
";

#[test]
fn faults_of_user_kernels_are_errors() {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("seeded-bugs.sm_80.ptx"), SEEDED).expect("an image");
    let path = folder.path().display().to_string();
    let environment = [("FUSEWIRE_IMAGES", path.as_str())];
    let cases = [
        ("right", SeededBug::Race { ordered: true }, None),
        ("address", SeededBug::Race { ordered: false }, Some("700")),
        (
            "barrier",
            SeededBug::Divergence { limit: LANES - 5 },
            Some("719"),
        ),
        ("whole", SeededBug::Divergence { limit: LANES }, None),
    ];
    for (name, ..) in cases {
        let environment = [environment[0], ("CASE", name)];
        on_emulator("faults_of_user_kernels_are_errors", &environment, || {
            let case = std::env::var("CASE").expect("set by the parent");
            let (_, bug, code) = cases.into_iter().find(|it| it.0 == case).expect("a case");
            for result in run_threads(1, &options(), |comm| Ok(bug.launch(&comm))) {
                match (result.expect("a communicator"), code) {
                    (Ok(output), None) => assert_eq!(output, bug.expected()),
                    (Err(error), Some(code)) => {
                        let text = error.to_string();
                        assert!(text.contains(code), "{bug:?}: {text}");
                    }
                    (result, _) => panic!("{bug:?}: {result:?}"),
                }
            }
        });
        if role().is_some() {
            return;
        }
    }
}
