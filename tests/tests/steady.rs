//! Checks that repeated calls and replays allocate no memory and make no system calls, except to
//! yield the core while they wait for a late peer.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::sync::Mutex;
use std::time::Instant;

use fusewire::{
    Communicator, DType, GraphExec, Options, PreparedKernel, ReduceOp, Result, Tensor,
    WindowOptions, run_threads,
};
use fusewire_device::{Aborted, InOut, Machine, Session, Team, Window, kernel};
use fusewire_tests::alloc::{CountingAllocator, calls};
use fusewire_tests::process::{role, start};
use fusewire_tests::skip::skip;
use fusewire_tests::syscall::{WAITING, allow_only};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The repeated calls of a rank: all_reduce with packets, one shot and two shots, in windows and on
/// slices, operations that move data, and graph replays.
struct Steady {
    comm: Communicator,
    tensors: [Tensor; 3],
    gathered: Tensor,
    small: Vec<f32>,
    doubles: Vec<f64>,
    large: Vec<f32>,
    rows: Vec<f32>,
    graph: GraphExec,
    prepared: PreparedKernel,
}

/// Adds `step` to each element and waits for all ranks.
#[kernel(signals = 1)]
fn add_step(
    s: &mut Session<impl Machine>,
    window: Window<f32>,
    x: InOut<f32>,
    step: f32,
) -> Result<(), Aborted> {
    for i in s.block().elements(x.len()) {
        x.set(i, x.get(i) + step);
    }
    for peer in s.peers(Team::World) {
        window.at(peer).raise(s, 0);
    }
    window.wait_all(s, 0, Team::World)?;
    s.barrier()
}

impl Steady {
    fn new(comm: Communicator) -> Result<Self> {
        let ranks = comm.size() as usize;
        let tensors = [
            comm.alloc(DType::F32, 16)?,
            comm.alloc(DType::F32, 1500)?,
            comm.alloc(DType::F32, 60_000)?,
        ];
        let gathered = comm.alloc(DType::F32, 1500 * ranks)?;
        comm.stream().begin_capture()?;
        for tensor in &tensors {
            comm.all_reduce_async(tensor, ReduceOp::Sum)?;
        }
        comm.all_gather_single_async(&gathered, &tensors[1])?;
        comm.barrier_async()?;
        let graph = comm.stream().end_capture()?.instantiate()?;
        let window = comm.alloc_window(DType::F32, 16, WindowOptions::default())?;
        let arguments = AddStep {
            window: (&window).into(),
            x: (&tensors[0]).into(),
            step: 1.0,
        };
        let prepared = comm.kernel(arguments).prepare()?;
        Ok(Self {
            prepared,
            tensors,
            gathered,
            small: vec![0.0; 16],
            doubles: vec![0.0; 100],
            large: vec![0.0; 60_000],
            rows: vec![0.0; 60_000 * ranks],
            graph,
            comm,
        })
    }

    /// Makes each call once. Returns the first error.
    fn step(&mut self) -> Result<()> {
        let comm = &self.comm;
        for tensor in &self.tensors {
            comm.all_reduce(tensor, ReduceOp::Sum)?;
        }
        comm.all_gather_single(&self.gathered, &self.tensors[1])?;
        comm.all_reduce(&mut self.small, ReduceOp::Sum)?;
        comm.all_reduce(&mut self.doubles, ReduceOp::Min)?;
        comm.all_reduce(&mut self.large, ReduceOp::Sum)?;
        comm.all_gather_single(&mut self.rows, &self.large)?;
        comm.reduce_scatter_single(&mut self.large, &self.rows, ReduceOp::Sum)?;
        comm.broadcast(&mut self.small, 0)?;
        comm.barrier()?;
        self.prepared.launch()?;
        self.graph.run(comm.stream())
    }
}

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = TEST_TIMEOUT;
    options
}

#[test]
fn steady_calls_and_replays_allocate_nothing() {
    for ranks in [1, 2, 3] {
        for result in run_threads(ranks, &options(), |comm| {
            let mut steady = Steady::new(comm)?;
            for _ in 0..3 {
                steady.step()?;
            }
            let before = calls();
            for _ in 0..100 {
                steady.step()?;
            }
            Ok(calls() - before)
        }) {
            assert_eq!(
                result.expect("joined"),
                0,
                "allocations on a rank of {ranks}"
            );
        }
    }
}

#[test]
fn the_counter_counts() {
    let before = calls();
    drop(core::hint::black_box(Box::new(7)));
    assert_eq!(calls() - before, 2, "one allocation and one free");
    // Control of the counter: an asynchronous call allocates an entry of the launch queue.
    for result in run_threads(1, &options(), |comm| {
        let x = comm.alloc(DType::F32, 4)?;
        let before = calls();
        comm.all_reduce_async(&x, ReduceOp::Sum)?.wait_blocking()?;
        Ok(calls() - before)
    }) {
        assert!(result.expect("joined") > 0);
    }
}

/// Runs ranks as threads, restricts each rank to the system calls `allowed`, and ends the process.
fn filtered(ranks: u32, allowed: &'static [i64], forbidden: bool) -> ! {
    let done = AtomicU32::new(0);
    let refused: Mutex<Option<io::Error>> = Mutex::default();
    let exit = |code: i32| -> ! {
        // SAFETY: `_exit` has no preconditions.
        unsafe { libc::_exit(code) }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // This thread has no filter, so it can end the process.
            while done.load(Ordering::Acquire) < ranks {
                if let Some(error) = &*refused.lock().expect("no panic") {
                    eprintln!("@@ refused {error}");
                    exit(0);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            eprintln!("@@ done");
            exit(0);
        });
        let results = run_threads(ranks, &options(), |comm| {
            let mut steady = Steady::new(comm)?;
            for _ in 0..3 {
                steady.step()?;
            }
            if let Err(error) = allow_only(allowed) {
                *refused.lock().expect("no panic") = Some(error);
            }
            let mut right = true;
            for _ in 0..1000 {
                right &= steady.step().is_ok();
            }
            if forbidden {
                // SAFETY: `getppid` has no preconditions.
                unsafe { libc::getppid() };
            }
            if right {
                done.fetch_add(1, Ordering::Release);
            }
            // This thread cannot exit, so it waits until the process exits.
            let started = Instant::now();
            while started.elapsed() < TEST_TIMEOUT {
                spin_loop();
            }
            Ok(())
        });
        drop(results);
    });
    exit(1)
}

#[test]
fn steady_calls_make_no_system_call() {
    match role().as_deref() {
        Some("alone") => filtered(1, &[], false),
        Some("two") => filtered(2, WAITING, false),
        Some("control") => filtered(1, &[], true),
        _ => {}
    }
    for role in ["alone", "two", "control"] {
        let mut child = start("steady_calls_make_no_system_call", role, &[]);
        let said = child.next_report(TEST_TIMEOUT);
        if let Ok(said) = &said
            && said.starts_with("refused")
        {
            skip("seccomp", said);
            return;
        }
        let status = child.wait(TEST_TIMEOUT).expect("its end");
        if role == "control" {
            // A forbidden system call kills the process.
            assert_eq!(status.signal(), Some(libc::SIGSYS), "{said:?}");
        } else {
            assert_eq!(said.as_deref(), Ok("done"), "{role}: {status:?}");
            assert!(status.success(), "{role}: {status:?}");
        }
    }
}
