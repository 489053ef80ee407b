//! Calls that users of torchcomms expect: names and options of communicators, tags, rooted
//! operations without unused buffers, lists of references, ends that a program can match.

use core::any::Any;
use core::time::Duration;
use std::sync::Arc;

use fusewire::backend::{Backend, CallArgs, register_backend};
use fusewire::store::{self, MemoryStore, Store};
use fusewire::{
    Algorithm, CallOptions, Collective, Communicator, DType, Device, EndReason, Error, GraphExec,
    Input, Op, Operands, Options, ReduceOp, ReductionCode, Result, Tensor, Window, WindowOptions,
    new_comm,
};
use fusewire_tests::device::{device, run_threads, tensor};
use fusewire_tests::process::{report, role, start};

const TEST_TIMEOUT: Duration = Duration::from_secs(30);

fn options() -> Options {
    Options::new().timeout(TEST_TIMEOUT)
}

fn all<R: Send>(ranks: u32, body: impl Fn(Communicator) -> Result<R> + Sync) -> Vec<R> {
    run_threads(ranks, &options(), body)
        .into_iter()
        .map(|result| result.unwrap_or_else(|error| panic!("{error}")))
        .collect()
}

fn capture(comm: &Communicator, calls: impl FnOnce() -> Result<()>) -> Result<GraphExec> {
    let stream = comm.stream();
    stream.begin_capture()?;
    let called = calls();
    let graph = stream.end_capture()?;
    called?;
    graph.instantiate()
}

#[test]
fn a_part_has_the_given_name_and_the_ranks_of_the_world() {
    all(4, |comm| {
        let of_odd = comm.rank() % 2;
        let part = comm
            .split(&[of_odd, of_odd + 2], "my_part")?
            .expect("in its list");
        assert_eq!(part.name(), "my_part");
        assert_ne!(part.full_name(), "my_part");
        assert!(part.full_name().starts_with(comm.full_name()));
        assert_eq!(part.world_ranks(), [of_odd, of_odd + 2]);
        assert_eq!(comm.world_ranks(), [0, 1, 2, 3]);
        let single = part.split(&[1 - part.rank() / 2], "single");
        // A list without the own rank is refused on that rank only.
        assert_eq!(single.is_err(), part.rank() == 0);
        let last = match part.rank() {
            1 => part
                .split(&[1], "last")?
                .expect("in its list")
                .world_ranks(),
            _ => {
                assert!(part.split(&[], "last")?.is_none());
                vec![of_odd + 2]
            }
        };
        assert_eq!(last, [of_odd + 2]);
        part.barrier()?;
        comm.barrier()
    });
}

#[test]
fn a_part_has_its_own_options() {
    all(2, |comm| {
        let slow = Options::new()
            .timeout(Duration::from_secs(77))
            .staging_bytes(1 << 16)
            .hint("algorithm", "signal");
        let part = comm.split_with(&[0, 1], "slow", slow)?.expect("a part");
        assert_eq!(part.timeout(), Duration::from_secs(77));
        assert_eq!(part.options().algorithm, Algorithm::Signal);
        assert_eq!(comm.options().algorithm, Algorithm::Auto);
        let op = Op::AllReduce {
            count: 4,
            dtype: DType::F32,
            reduction: ReduceOp::Sum.code(),
        };
        assert_eq!(part.plan(&op)?.algorithm, Algorithm::Signal);
        assert!(part.workspace_bytes() < comm.workspace_bytes());
        let x = tensor(DType::I32, 3)?;
        x.fill(2i32)?;
        part.all_reduce(&x, ReduceOp::Sum)?;
        assert_eq!(x.to_vec::<i32>()?, [4; 3]);
        // Wrong hints are errors on all ranks, before a rank waits for another.
        let wrong = Options::new().hint("max_event_pool_size", "many");
        let error = comm.split_with(&[0, 1], "wrong", wrong);
        let error = error.expect_err("a wrong hint").to_string();
        assert!(error.contains("max_event_pool_size"), "{error}");
        comm.barrier()
    });
}

#[test]
fn a_timeout_that_is_set_holds_for_all_clones() {
    all(2, |comm| {
        let (clone, own) = (comm.clone(), comm.with_timeout(Duration::from_secs(9)));
        comm.set_timeout(Duration::from_secs(11));
        assert_eq!(clone.timeout(), Duration::from_secs(11));
        assert_eq!(own.timeout(), Duration::from_secs(9));
        assert_eq!(clone.dup()?.timeout(), Duration::from_secs(11));
        comm.set_timeout(Duration::MAX);
        comm.barrier()?;
        comm.set_timeout(Duration::ZERO);
        assert_eq!(clone.timeout(), TEST_TIMEOUT);
        comm.barrier()?;
        // Operations end by the timeout that was set on another clone.
        comm.set_timeout(Duration::from_millis(50));
        if comm.rank() == 0 {
            let error = clone.barrier().expect_err("rank 1 does not come");
            assert!(matches!(error, Error::Timeout(_)), "{error}");
            assert_eq!(error.failure().expect("a failure").rank, 1);
            assert_eq!(error.end_reason(), None);
        } else {
            let begin = std::time::Instant::now();
            while clone.failure().is_none() && begin.elapsed() < TEST_TIMEOUT {
                std::thread::yield_now();
            }
            assert!(clone.failure().is_some());
        }
        Ok(())
    });
}

/// A store that takes some time for each access.
#[derive(Debug)]
struct SlowStore(Arc<MemoryStore>);

impl SlowStore {
    fn delayed(&self) -> &MemoryStore {
        std::thread::sleep(Duration::from_millis(10));
        &self.0
    }
}

impl Store for SlowStore {
    fn set(&self, key: &str, value: &[u8]) -> store::Result<()> {
        self.delayed().set(key, value)
    }
    fn get(&self, key: &str, timeout: Duration) -> store::Result<Vec<u8>> {
        self.delayed().get(key, timeout)
    }
    fn wait(&self, keys: &[&str], timeout: Duration) -> store::Result<()> {
        self.delayed().wait(keys, timeout)
    }
    fn add(&self, key: &str, amount: i64) -> store::Result<i64> {
        self.delayed().add(key, amount)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> store::Result<Vec<u8>> {
        self.delayed().compare_set(key, expected, desired)
    }
    fn check(&self, keys: &[&str]) -> store::Result<bool> {
        self.delayed().check(keys)
    }
    fn delete(&self, key: &str) -> store::Result<bool> {
        self.delayed().delete(key)
    }
}

/// A short timeout of operations bounds no step of the rendezvous.
#[test]
fn the_bootstrap_has_a_timeout_of_its_own() {
    let run = |options: Options, ranks: u32| -> Vec<Result<()>> {
        let store = Arc::new(MemoryStore::new());
        std::thread::scope(|scope| {
            let ranks: Vec<_> = (0..ranks)
                .map(|rank| {
                    let own: Arc<dyn Store> = match rank {
                        0 => store.clone(),
                        _ => Arc::new(SlowStore(store.clone())),
                    };
                    let options = options.clone().store(own).rank_size(rank, 2);
                    scope.spawn(move || {
                        if rank == 1 {
                            std::thread::sleep(Duration::from_millis(100));
                        }
                        new_comm("fusewire", Device::Cpu, "world", options)?.finalize()
                    })
                })
                .collect();
            let join = |rank: std::thread::ScopedJoinHandle<'_, _>| rank.join().expect("no panic");
            ranks.into_iter().map(join).collect()
        })
    };
    let short = Options::new()
        .return_errors()
        .timeout(Duration::from_millis(1));
    for result in run(short.clone(), 2) {
        result.expect("both ranks join");
    }
    let bound = short.bootstrap_timeout(Duration::from_millis(20));
    let results = run(bound, 1);
    let error = results[0].as_ref().expect_err("rank 1 is missing");
    let error = error.to_string();
    assert!(
        error.contains("rank 1 did not join within 0.0 s"),
        "{error}"
    );
}

#[test]
fn tags_must_agree() {
    all(2, |comm| {
        let tagged = comm.with_options(&CallOptions::new().tag(7))?;
        let tagged = match comm.rank() {
            0 => tagged.with_options(&CallOptions::new().timeout(TEST_TIMEOUT))?,
            _ => tagged,
        };
        let x = tensor(DType::I32, 2)?;
        match comm.rank() {
            0 => {
                tagged.send(&[1i32, 2], 1)?;
                comm.send(&[3i32, 4], 1)
            }
            _ => {
                tagged.recv(&x, 0)?;
                assert_eq!(x.to_vec::<i32>()?, [1, 2]);
                comm.recv(&x, 0)?;
                assert_eq!(x.to_vec::<i32>()?, [3, 4]);
                Ok(())
            }
        }
    });
    for batch in [false, true] {
        let results = run_threads(2, &options(), |comm| {
            let tag = CallOptions::new().tag(7 + comm.rank());
            let tagged = comm.with_options(&tag)?;
            let x = tensor(DType::I32, 2)?;
            let result = match (comm.rank(), batch) {
                (0, false) => tagged.send(&x, 1),
                (_, false) => tagged.recv(&x, 0),
                (rank, true) => {
                    let mut batch = tagged.batch_op_create();
                    match rank {
                        0 => batch.send(&x, 1)?,
                        _ => batch.recv(&x, 0)?,
                    }
                    batch.issue()
                }
            };
            result.and_then(|()| comm.barrier())
        });
        for result in results {
            let error = result.expect_err("tags differ");
            assert!(matches!(error, Error::Mismatch(_)), "{error}");
            assert!(error.to_string().contains("tags differ"), "{error}");
        }
    }
}

#[test]
fn calls_have_typed_options() {
    all(2, |comm| {
        let signal = CallOptions::new().algorithm(Algorithm::Signal);
        let op = Op::AllReduce {
            count: 4,
            dtype: DType::F32,
            reduction: ReduceOp::Sum.code(),
        };
        assert_eq!(comm.plan(&op)?.algorithm, Algorithm::Packet);
        let comm = comm.with_options(&signal)?;
        assert_eq!(comm.plan(&op)?.algorithm, Algorithm::Signal);
        // Options that are not set keep their values.
        let comm = comm.with_options(&CallOptions::new().timeout(Duration::from_secs(7)))?;
        assert_eq!(comm.plan(&op)?.algorithm, Algorithm::Signal);
        assert_eq!(comm.timeout(), Duration::from_secs(7));
        let nvls = CallOptions::new().algorithm(Algorithm::Nvls);
        assert!(comm.with_options(&nvls).is_err(), "it is not bitwise");
        comm.barrier()
    });
}

#[test]
fn rooted_operations_need_no_unused_buffer() {
    all(3, |comm| {
        let (rank, root) = (comm.rank(), 1);
        let is_root = rank == root;
        let own = comm.tensor_from(&[rank, rank + 10])?;
        let whole = comm.tensor(DType::U32, 6)?;
        let rows = is_root.then_some(&whole);
        let check = |seen: &Tensor, expected: &[u32]| -> Result<()> {
            assert_eq!(seen.to_vec::<u32>()?, expected);
            seen.fill(0u32)
        };
        let gathered = [0, 10, 1, 11, 2, 12];
        comm.gather_single(rows, &own, root)?;
        check(&whole, if is_root { &gathered } else { &[0; 6] })?;
        comm.gather_single_async(rows, &own, root)?
            .wait_blocking()?;
        check(&whole, if is_root { &gathered } else { &[0; 6] })?;

        whole.copy_from(&gathered)?;
        let part = comm.tensor(DType::U32, 2)?;
        comm.scatter_single(&part, rows, root)?;
        check(&part, &[rank, rank + 10])?;
        match is_root {
            true => comm.scatter_single_async(&part, &whole, root)?,
            false => comm.scatter_single_async(&part, None, root)?,
        }
        .wait_blocking()?;
        check(&part, &[rank, rank + 10])?;

        comm.reduce_into(is_root.then_some(&part), &own, root, ReduceOp::Sum)?;
        check(&part, if is_root { &[3, 33] } else { &[0, 0] })?;
        match is_root {
            true => comm.reduce_into_async(&part, &own, root, ReduceOp::Sum)?,
            false => comm.reduce_into_async(None, &own, root, ReduceOp::Sum)?,
        }
        .wait_blocking()?;
        check(&part, if is_root { &[3, 33] } else { &[0, 0] })?;

        if is_root {
            for result in [
                comm.gather_single(None, &own, root),
                comm.scatter_single(&part, None, root),
                comm.reduce_into(None, &own, root, ReduceOp::Sum),
            ] {
                let error = result.expect_err("the root needs it").to_string();
                assert!(error.contains("the root passed no"), "{error}");
            }
        }
        comm.gather_single(None, None, root)
    });
}

/// Row lengths that an operation does not use are dropped, so they hide no other operand.
#[test]
fn unused_row_lengths_are_no_operands() {
    all(2, |comm| {
        let x = comm.tensor_from(&[1.0f32; 4])?;
        let factor = comm.tensor_from(&[0.5f32])?;
        // The tensor is no list of lengths.
        let other = comm.tensor_from(&[7u8; 3])?;
        let op = Op::AllReduce {
            count: 4,
            dtype: DType::F32,
            reduction: ReductionCode::PreMulSum,
        };
        let operands = Operands::in_place(&x)
            .with_reduction(ReduceOp::PreMulSum(1.0))
            .with_counts(&other)
            .with_factor(&factor);
        let collective = Collective::new(op, operands);
        let graph = capture(&comm, || comm.enqueue(collective).map(drop))?;
        // The graph keeps the factor.
        drop(factor);
        let noise: Vec<_> = (0..20)
            .map(|_| comm.tensor_from(&[100.0f32]))
            .collect::<Result<_>>()?;
        graph.run(comm.stream())?;
        assert_eq!(x.to_vec::<f32>()?, [1.0; 4]);
        drop(noise);
        let (y, part, counts) = (comm.tensor(DType::F32, 2)?, x.slice(0, 1)?, [1u64, 1]);
        let op = *Collective::all_gather_v(&y, &part, &counts).op();
        let operands = Operands::new(&y, &part).with_splits(&counts, &other);
        comm.execute(Collective::new(op, operands))?;
        assert_eq!(y.to_vec::<f32>()?, [1.0; 2]);
        Ok(())
    });
}

#[test]
fn lists_may_consist_of_references() {
    all(2, |comm| {
        let rank = comm.rank();
        let (a, b) = (tensor(DType::U32, 1)?, tensor(DType::U32, 1)?);
        let own = comm.tensor_from(&[rank + 5])?;
        comm.all_gather(&[&a, &b], &own)?;
        assert_eq!((a.to_vec::<u32>()?, b.to_vec::<u32>()?), (vec![5], vec![6]));
        comm.reduce_scatter(&own, &[&a, &b], ReduceOp::Sum)?;
        assert_eq!(own.to_vec::<u32>()?, [10 + 2 * rank]);
        let (c, d) = (tensor(DType::U32, 1)?, tensor(DType::U32, 1)?);
        comm.all_to_all(&[&c, &d], &[&own, &own])?;
        assert_eq!(
            (c.to_vec::<u32>()?, d.to_vec::<u32>()?),
            (vec![10], vec![12])
        );
        match rank {
            0 => comm.gather(&[&a, &b], &own, 0)?,
            _ => comm.gather(Tensor::NONE, &own, 0)?,
        }
        let expected = if rank == 0 { [10, 12] } else { [5, 6] };
        let seen = [a.to_vec::<u32>()?, b.to_vec::<u32>()?].concat();
        assert_eq!(seen, expected);
        Ok(())
    });
}

#[test]
fn the_reason_of_an_end_can_be_matched() {
    for result in run_threads(2, &options(), |comm| {
        if comm.rank() == 0 {
            comm.abort();
        }
        let error = comm.barrier().expect_err("rank 0 aborts");
        assert_eq!(error.end_reason(), Some(EndReason::Aborted));
        Ok(())
    }) {
        result.expect("both ranks");
    }
    all(1, |comm| {
        comm.finalize()?;
        for error in [comm.barrier(), comm.dup().map(drop)] {
            let error = error.expect_err("it was finalized");
            assert_eq!(error.end_reason(), Some(EndReason::Finalized));
            assert!(error.to_string().contains("finalized"), "{error}");
        }
        Ok(())
    });
}

/// The memory of tensors that all ranks have dropped is freed by the next allocation.
#[test]
fn allocations_reuse_the_memory_of_dropped_tensors() {
    const BYTES: usize = 1 << 20;
    let mapped = || -> usize {
        let maps = std::fs::read_to_string("/proc/self/maps").expect("the mappings");
        maps.lines().filter(|line| line.contains("window")).count()
    };
    all(2, |comm| {
        let keep = comm.alloc(DType::U8, BYTES)?;
        keep.fill(7u8)?;
        for round in 0..1_500u32 {
            let x = comm.alloc(DType::U32, 4)?;
            x.fill(round)?;
            // The work, not the handle, keeps the tensor.
            let work = comm.all_reduce_async(&x, ReduceOp::Sum)?;
            if round % 3 == 0 {
                assert_eq!(x.to_vec::<u32>()?, [2 * round; 4]);
            }
            drop(x);
            if round % 2 == 0 {
                work.wait_blocking()?;
            }
        }
        assert_eq!(keep.to_vec::<u8>()?, [7; BYTES]);
        if device() == Device::Cpu {
            // Two ranks map two parts each of few windows.
            assert!(mapped() < 100, "{} mappings", mapped());
        }
        // Memory that one rank still uses is not freed.
        let x = comm.alloc(DType::U32, 4)?;
        x.fill(1u32)?;
        let held = (comm.rank() == 0).then(|| x.clone());
        drop(x);
        for _ in 0..4 {
            let y = comm.alloc(DType::U32, 4)?;
            y.fill(9u32)?;
            comm.all_reduce(&y, ReduceOp::Sum)?;
        }
        if let Some(held) = held {
            assert_eq!(held.to_vec::<u32>()?, [1; 4]);
        }
        // A graph keeps its tensors, so the memory is not used again.
        let x = comm.alloc(DType::U32, 4)?;
        x.fill(1u32)?;
        let seen = comm.tensor(DType::U32, 4)?;
        let graph = capture(&comm, || {
            comm.all_reduce_into_async(&seen, &x, ReduceOp::Sum)
                .map(drop)
        })?;
        drop(x);
        for _ in 0..4 {
            comm.alloc(DType::U32, 4)?.fill(5u32)?;
        }
        graph.run(comm.stream())?;
        assert_eq!(seen.to_vec::<u32>()?, [2; 4]);
        drop(graph);
        comm.alloc(DType::U32, 4)?;
        comm.barrier()
    });
}

/// The program may create a window while its stream is capturing, and use it in the capture.
#[test]
fn windows_may_be_created_during_a_capture() {
    all(2, |comm| {
        let next = 1 - comm.rank();
        let source = comm.tensor_from(&[comm.rank() + 1; 4])?;
        let mut window: Option<Window> = None;
        let registered = comm.tensor(DType::U32, 4)?;
        // The window's operations follow those that are in flight when the capture begins.
        let early = comm.tensor_from(&[comm.rank() + 1; 100])?;
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
        }
        let in_flight = comm.all_reduce_async(&early, ReduceOp::Sum)?;
        let graph = capture(&comm, || {
            assert!(comm.window_addr(&registered).is_err());
            let of_graph = comm.alloc_window(DType::U32, 4, WindowOptions::new().signals(1))?;
            let registration = comm.tensor_register(&registered)?;
            comm.window_addr(&registered)?;
            let queue = comm.alloc_queue(DType::U32, 4, 4)?;
            let refused = of_graph.clone().free().expect_err("a capture");
            assert!(refused.to_string().contains("capturing"), "{refused}");
            of_graph.put_signal_async(&source, next, 0, 0)?;
            comm.all_reduce_async(&registered, ReduceOp::Sum)?;
            drop((registration, queue));
            window = Some(of_graph);
            Ok(())
        })?;
        in_flight.wait_blocking()?;
        assert_eq!(early.to_vec::<u32>()?, [3; 100]);
        let window = window.expect("a window");
        for round in 1..4u64 {
            registered.fill(round as u32)?;
            graph.run(comm.stream())?;
            window.wait_signal(0, Some(next), fusewire::Compare::GreaterEqual, round)?;
            assert_eq!(window.tensor().to_vec::<u32>()?, [next + 1; 4]);
            assert_eq!(registered.to_vec::<u32>()?, [2 * round as u32; 4]);
        }
        // The refused call has not ended the window.
        window.free()
    });
}

/// The options of a call hold for the operations of windows and prepared operations.
#[test]
fn windows_and_prepared_operations_take_options() {
    for is_window in [false, true] {
        for result in run_threads(2, &options(), |comm| {
            let window = comm.alloc_window(DType::F32, 4, WindowOptions::new())?;
            assert_eq!((window.dtype(), window.len()), (DType::F32, 4));
            assert_eq!(window.device(), comm.device());
            let prepared = comm.all_gather_p_init(&tensor(DType::F32, 4)?)?;
            prepared.exec(&tensor(DType::F32, 2)?)?;
            if comm.rank() == 1 {
                let begin = std::time::Instant::now();
                while comm.failure().is_none() && begin.elapsed() < TEST_TIMEOUT {
                    std::thread::yield_now();
                }
                return Ok(());
            }
            let begin = std::time::Instant::now();
            let short = CallOptions::new().timeout(Duration::from_millis(50));
            let result = match is_window {
                true => {
                    let window = window.with_options(&short)?;
                    window.wait_signal(0, Some(1), fusewire::Compare::Equal, 1)
                }
                false => {
                    let prepared = prepared.with_options(&short)?;
                    prepared.exec(&tensor(DType::F32, 2)?)
                }
            };
            let error = result.expect_err("rank 1 does nothing");
            assert!(matches!(error, Error::Timeout(_)), "{error}");
            assert!(begin.elapsed() < TEST_TIMEOUT, "not the call's timeout");
            Ok(())
        }) {
            result.expect("both ranks");
        }
    }
}

/// A stream that waits for work reports the failure of that work.
#[test]
fn a_stream_that_waits_reports_the_failure() {
    if device() != Device::Cpu {
        // Events of a GPU carry no failures.
        return;
    }
    for result in run_threads(2, &options(), |comm| {
        comm.barrier()?;
        let comm = comm.with_timeout(Duration::from_millis(100));
        if comm.rank() == 1 {
            let begin = std::time::Instant::now();
            while comm.failure().is_none() && begin.elapsed() < TEST_TIMEOUT {
                std::thread::yield_now();
            }
            return Ok(());
        }
        let (x, other) = (tensor(DType::F32, 4)?, fusewire_tests::device::stream());
        // Keeps the operation from starting, and from failing, before the wait is enqueued.
        let (start, started) = std::sync::mpsc::channel::<()>();
        let started = std::sync::Mutex::new(started);
        comm.stream().host_fn(Arc::new(move || {
            let _ = started.lock().expect("the lock").recv_timeout(TEST_TIMEOUT);
            Ok(())
        }))?;
        let work = comm.all_reduce_async(&x, ReduceOp::Sum)?;
        work.wait(&other)?;
        start.send(()).expect("the stream waits");
        let error = other.synchronize().expect_err("rank 1 does not come");
        assert!(matches!(error, Error::Timeout(_)), "{error}");
        other.synchronize()?;
        // The work has failed before the call.
        assert!(matches!(work.wait(&other), Err(Error::Timeout(_))));
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

/// A backend of the program: it only counts its barriers.
#[derive(Debug)]
struct Counting {
    rank: u32,
    barriers: core::sync::atomic::AtomicU32,
}

impl Backend for Counting {
    fn name(&self) -> &str {
        "counting"
    }
    fn version(&self) -> String {
        "1".to_owned()
    }
    fn rank(&self) -> u32 {
        self.rank
    }
    fn size(&self) -> u32 {
        2
    }
    fn supports(&self, op: &Op) -> bool {
        matches!(op, Op::Barrier)
    }
    fn group_start(&self) -> Result<()> {
        Ok(())
    }
    fn group_end(&self) -> Result<()> {
        Ok(())
    }
    unsafe fn execute(&self, _: &Op, _: &Operands<'_>, _: &CallArgs) -> Result<()> {
        self.barriers
            .fetch_add(1, core::sync::atomic::Ordering::Relaxed);
        Ok(())
    }
    fn abort(&self) {}
}

#[test]
fn an_adopted_backend_can_be_reached_and_needs_a_store_for_parts() {
    let counting = |rank| {
        Arc::new(Counting {
            rank,
            barriers: Default::default(),
        })
    };
    let comm = Communicator::adopt(counting(0), "adopted", Device::Cpu, options())
        .expect("a communicator");
    comm.barrier().expect("a barrier");
    let backend = comm.backend_impl().expect("a backend");
    let own: &Counting = (&**backend as &dyn Any).downcast_ref().expect("its type");
    assert_eq!(own.barriers.load(core::sync::atomic::Ordering::Relaxed), 1);
    for error in [comm.split(&[0, 1], "part").map(drop), comm.dup().map(drop)] {
        let error = error.expect_err("the ranks have no common store");
        assert!(error.to_string().contains("Options::store"), "{error}");
    }
    register_backend(
        "counting",
        Arc::new(move |setup| Ok(counting(setup.rank) as Arc<dyn Backend>)),
    )
    .expect("the name is free");
    let store = Arc::new(MemoryStore::new());
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let options = options().store(store.clone());
            scope.spawn(move || {
                // A second communicator of the name has a rendezvous of its own.
                for _ in 0..2 {
                    let options = options.clone();
                    let comm = Communicator::adopt(counting(rank), "adopted", Device::Cpu, options)
                        .expect("a communicator");
                    let part = comm.split(&[1, 0], "part").expect("a part");
                    assert_eq!(part.expect("in its list").rank(), 1 - rank);
                    // Wrong options are found after the backend's split.
                    let wrong = Options::new().hint("algorithm", "made_up");
                    assert!(comm.split_with(&[0, 1], "wrong", wrong).is_err());
                }
            });
        }
    });
}

/// Values of environment variables that cannot be parsed are errors. Unknown hints and the end of a
/// communicator without `finalize` are printed.
#[test]
fn mistakes_in_the_environment_are_errors() {
    const TEST: &str = "parity::mistakes_in_the_environment_are_errors";
    let create = || {
        let options = Options::new()
            .return_errors()
            .store(Arc::new(MemoryStore::new()))
            .rank_size(0, 1)
            .hint("made_up", "1");
        new_comm("fusewire", Device::Cpu, "world", options)
    };
    match role().as_deref() {
        Some("create") => {
            return match create() {
                Ok(comm) => comm.finalize().expect("it is sound"),
                Err(error) => report(error),
            };
        }
        Some("drop") => return drop(create()),
        _ => {}
    }
    for (name, value) in [
        ("TORCHCOMM_ABORT_ON_ERROR", "maybe"),
        ("TORCHCOMM_TIMEOUT_SECONDS", "abc"),
        ("FUSEWIRE_TIMEOUT_SECONDS", "-1"),
        ("TORCHCOMM_FR_BUFFER_SIZE", "many"),
        ("TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME", "maybe"),
    ] {
        let variable = (name.to_owned(), value.to_owned());
        let mut child = start(TEST, "create", &[variable]);
        let text = child.next_report(TEST_TIMEOUT).expect("an error");
        assert!(text.contains(name) && text.contains(value), "{text}");
        child.succeed(TEST_TIMEOUT).expect("no panic");
    }
    let mut child = start(TEST, "drop", &[]);
    // The child has no subscriber for logs.
    let line = child.next_line_with("unknown hint", TEST_TIMEOUT);
    let line = line.expect("a warning");
    assert!(
        line.starts_with("fusewire: warning: ") && line.contains("made_up"),
        "{line}"
    );
    let line = child.next_line_with("without finalize()", TEST_TIMEOUT);
    assert!(line.expect("a warning").contains("\"world\""));
    child.succeed(TEST_TIMEOUT).expect("no panic");
}

#[test]
fn empty_operands_have_no_elements() {
    let none = Input::from(None);
    assert_eq!((none.len(), none.is_empty()), (0, true));
}
