//! Runs the conformance list and the kernels of `examples/moe-toy` under ThreadSanitizer through
//! the host crate, with ranks as threads of one process. Also runs programs of safe code that try
//! to race with operations in flight, and deliberately broken kernels, whose races ThreadSanitizer
//! must report.
//!
//! A process exits with status 66 if ThreadSanitizer reports a race, so each part runs in a child
//! process.

#[cfg(tsan)]
#[path = "../../../examples/moe-toy/host/moe.rs"]
#[allow(dead_code)] // the example and its tests use the rest
mod moe;

#[cfg(tsan)]
mod parts {
    use core::time::Duration;

    use fusewire::{DType, LaunchAttributes, Operation, Options, Tensor, run_threads};
    use fusewire_device::call::Call;
    use fusewire_device::comm::WindowAddr;
    use fusewire_device::layout::CommConst;
    use fusewire_device::{Block, Machine, kernel};
    use fusewire_models::broken::Kernel;
    use fusewire_tests::cases;
    use fusewire_tests::rank::CallMode;
    use fusewire_tests::runner::{ALGORITHMS, Setup, Threads};

    use crate::moe::{Input, Moe, Shape, expected, random};

    /// Runs entry `which` of [`KERNELS`].
    ///
    /// # Safety
    /// The caller must meet the requirements of [`Kernel::run`], and `which` must be below 4.
    #[kernel]
    unsafe fn broken(
        block: Block<impl Machine>,
        constants: *const CommConst,
        call: u64,
        count: u64,
        timeout_ns: u64,
        which: u32,
        addr: u64,
        source: *const u8,
        target: *mut u8,
    ) {
        let addr = WindowAddr(addr);
        // SAFETY: the caller meets the requirements of `Kernel::run`.
        unsafe {
            KERNELS[which as usize].1.run(
                block, constants, call, count, timeout_ns, addr, source, target,
            );
        }
    }

    /// The correct kernel, followed by kernels whose races ThreadSanitizer must report.
    pub(crate) const KERNELS: [(&str, Kernel); 4] = [
        ("the correct kernel of the next controls", Kernel::Correct),
        ("reads user memory after done", Kernel::ReadsAfterDone),
        ("no done signal", Kernel::NoDone),
        ("reads user memory before ready", Kernel::NoReady),
    ];

    /// Launches entry `which` of [`KERNELS`] 200 times and writes the input between launches.
    pub(crate) fn run_kernel(which: usize) -> Result<(), String> {
        let ranks = run_threads(2, &Options::default(), |comm| {
            let bytes = 64;
            // `alloc` returns memory in a window, at the same offset on every rank.
            let (source, target) = (comm.alloc(DType::U8, bytes)?, comm.alloc(DType::U8, bytes)?);
            let addr = comm.window_addr(&source)?;
            for call in 0..200u8 {
                source.copy_from(&[call; 64])?;
                let params = BrokenParams {
                    constants: comm.constants(),
                    call: Call::new(Operation::User, 0, 0, 0, 0xffff, 1).0,
                    count: bytes as u64,
                    timeout_ns: 0,
                    which: which as u32,
                    addr: addr.0,
                    source: source.as_ptr(),
                    target: target.as_ptr(),
                };
                // SAFETY: both buffers have `count` bytes and outlive the launch. `source` is at
                // `addr` on every rank, and every rank makes the same call.
                let work = unsafe {
                    let shape = LaunchAttributes::default();
                    comm.launch_raw(&BROKEN, params, &[&source, &target], shape)?
                };
                work.wait_blocking()?;
            }
            Ok(())
        });
        ranks
            .into_iter()
            .try_for_each(|rank| rank.map_err(|error| error.to_string()))
    }

    /// Returns the settings in which the conformance list must be free of races.
    pub(crate) fn setups() -> Vec<(String, Setup, &'static str)> {
        let base = Setup::new(3);
        let mut setups = vec![
            ("3 ranks".to_owned(), base, "all"),
            ("2 ranks, types".to_owned(), Setup::new(2), "types"),
            (
                "3 ranks, async".to_owned(),
                Setup {
                    mode: CallMode::Async,
                    ..base
                },
                "core",
            ),
            (
                "3 ranks, graphs".to_owned(),
                Setup {
                    mode: CallMode::Graph,
                    ..base
                },
                "core",
            ),
            (
                "3 ranks, 2 blocks".to_owned(),
                Setup { blocks: 2, ..base },
                "core",
            ),
        ];
        for algorithm in ALGORITHMS {
            setups.push((
                format!("4 ranks, {algorithm}"),
                Setup {
                    algorithm,
                    ..Setup::new(4)
                },
                "core",
            ));
        }
        setups
    }

    /// Ranks, blocks and lanes with which the queues of `examples/moe-toy` must be free of races.
    pub(crate) const QUEUES: [(u32, u32, u32); 3] = [(3, 2, 1), (2, 1, 32), (2, 2, 32)];

    /// Runs the kernels of `examples/moe-toy` with entry `which` of [`QUEUES`], often enough for
    /// their rings to wrap.
    pub(crate) fn run_queues(which: usize) -> Result<(), String> {
        let (ranks, blocks, lanes) = QUEUES[which];
        let shape = Shape {
            tokens: 6,
            hidden: 5,
            k: 2,
            per_rank: 2,
        };
        let mut options = Options::default();
        options.timeout = Duration::from_secs(120);
        (options.blocks, options.testing.lanes) = (blocks, lanes);
        let input = |rank: u32, round: u64| {
            let seed = round * u64::from(ranks) + u64::from(rank);
            let id = |item| random(seed, item) % (ranks * shape.per_rank);
            Input::new(shape, shape.tokens, seed, id)
        };
        let results = run_threads(ranks, &options, |comm| {
            let moe = Moe::new(&comm, shape)?;
            for round in 0..10 {
                let inputs: Vec<_> = comm.ranks().map(|rank| input(rank, round)).collect();
                let output = moe.run(&inputs[comm.rank() as usize])?;
                assert_eq!(
                    output,
                    expected(shape, &inputs, comm.rank()),
                    "round {round}"
                );
            }
            moe.free()
        });
        results
            .into_iter()
            .try_for_each(|rank| rank.map_err(|error| error.to_string()))
    }

    /// Writes a tensor during an operation that reads it. ThreadSanitizer must report the race.
    pub(crate) fn write_by_pointer() -> Result<(), String> {
        let ranks = run_threads(2, &Options::default(), |comm| {
            let (x, y) = (Tensor::new(DType::U8, 64)?, Tensor::new(DType::U8, 128)?);
            for round in 0..200u8 {
                let work = comm.all_gather_single_async(&y, &x)?;
                // SAFETY: the address is that of a byte of the tensor. The race is intended.
                unsafe { x.as_ptr().write(round) };
                work.wait_blocking()?;
            }
            Ok(())
        });
        ranks
            .into_iter()
            .try_for_each(|rank| rank.map_err(|error| error.to_string()))
    }

    /// Runs entry `which` of [`setups`].
    pub(crate) fn run_setup(which: usize) -> Result<u64, String> {
        let (_, setup, list) = &setups()[which];
        Threads.run_cases(setup, &cases::list(list, setup.ranks))
    }
}

#[cfg(tsan)]
fn main() -> std::process::ExitCode {
    use fusewire_tests::{overlap_programs, safe_programs};
    use std::process::{Command, ExitCode};

    let programs = safe_programs::PROGRAMS.iter();
    let programs: Vec<_> = programs.chain(overlap_programs::PROGRAMS).collect();
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, part, which] = &arguments[..] {
        let which: usize = which.parse().expect("a number from the parent");
        let result = match part.as_str() {
            "setup" => parts::run_setup(which).map(|calls| println!("{calls} calls")),
            "queues" => parts::run_queues(which),
            "safe" => {
                programs[which].check();
                Ok(())
            }
            "pointer" => parts::write_by_pointer(),
            _ => parts::run_kernel(which),
        };
        if let Err(wrong) = result {
            eprintln!("{wrong}");
            return ExitCode::FAILURE;
        }
        return ExitCode::SUCCESS;
    }
    let mut bad = 0;
    let mut check = |name: &str, part: &str, which: usize, racy: bool| {
        let output = Command::new(std::env::current_exe().expect("this program"))
            .args([part, &which.to_string()])
            .output()
            .expect("a child");
        let text = String::from_utf8_lossy(&output.stderr);
        let reports = text.matches("WARNING: ThreadSanitizer: data race").count();
        let good = if racy {
            reports > 0 && output.status.code() == Some(66)
        } else {
            reports == 0 && output.status.success()
        };
        let said = String::from_utf8_lossy(&output.stdout);
        println!(
            "tsan: {name:<44} {reports} races reported, {} {}{}",
            output.status,
            said.trim(),
            if good { "" } else { " NOT AS EXPECTED" }
        );
        if !good {
            bad += 1;
            eprintln!("{text}");
        }
    };
    for (which, (name, _, list)) in parts::setups().iter().enumerate() {
        check(&format!("{name}, cases `{list}`"), "setup", which, false);
    }
    for (which, (ranks, blocks, lanes)) in parts::QUEUES.into_iter().enumerate() {
        let name = format!("{ranks} ranks, {blocks} blocks of {lanes} lanes, queues");
        check(&name, "queues", which, false);
    }
    for (which, program) in programs.iter().enumerate() {
        check(
            &format!("safe code: {}", program.name),
            "safe",
            which,
            false,
        );
    }
    check("control: a tensor written by pointer", "pointer", 0, true);
    for (which, (name, _)) in parts::KERNELS.iter().enumerate() {
        let racy = which > 0;
        let name = if racy {
            format!("control: {name}")
        } else {
            (*name).to_owned()
        };
        check(&name, "kernel", which, racy);
    }
    println!("tsan: {bad} not as expected");
    if bad == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[cfg(not(tsan))]
fn main() {
    println!("skipped: needs --cfg tsan, see tests/models/run.sh");
}
