//! Tests windows: put, get, signal, wait, registered memory, and a kernel with a device window.

use core::time::Duration;
use std::sync::{Arc, Mutex};

use fusewire::{Communicator, Compare, DType, Error, Options, Result, SignalUpdate, WindowOptions};
use fusewire_device::net::SignalOp;
use fusewire_device::{Aborted, Group, In, Machine, Out, Session, Team, kernel};
use fusewire_kernels::one_sided::RingPut;
use fusewire_tests::device;
use fusewire_tests::device::{run_threads, stream, tensor};
use fusewire_tests::runner::of_networks;

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(30);
    options.testing.spins = Some(200);
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

fn ring_put(dtype: DType, count: usize, ranks: u32, put_async: bool, signal_async: bool) {
    all(ranks, &options(), |comm| {
        let (rank, size) = (comm.rank(), comm.size());
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let window = comm.alloc_window(dtype, count * size as usize, WindowOptions::default())?;
        let bytes = count * dtype.size();
        let source = tensor(dtype, count)?;
        for round in 1..4u64 {
            let fill = |of: u32| (of as u8).wrapping_mul(31).wrapping_add(round as u8);
            source.copy_from_bytes(&vec![fill(rank); bytes])?;
            let at = rank as usize * count;
            if put_async {
                window.put_async(&source, next, at)?;
            } else {
                window.put(&source, next, at)?;
            }
            if signal_async {
                window.signal_async(next, 0, SignalUpdate::Add(1))?;
            } else {
                window.signal(next, 0, SignalUpdate::Add(1))?;
            }
            window.wait_signal(0, Some(before), Compare::GreaterEqual, round)?;
            let row = window.tensor().slice(before as usize * count, count)?;
            // The signal covers the put, and the sender does not write again before the barrier.
            let seen = row.to_bytes()?;
            assert!(
                seen.iter().all(|byte| *byte == fill(before)),
                "round {round}"
            );
            assert_eq!(window.read_signal(0, None)?, round);
            comm.barrier()?;
        }
        window.free()
    });
}

#[test]
fn put_round_a_ring() {
    for dtype in [DType::F32, DType::I32, DType::I8] {
        for (count, ranks) in [(0, 2), (4, 1), (4, 4), (1024, 3), (1 << 20, 2)] {
            for (put_async, signal_async) in [(false, false), (true, false), (true, true)] {
                ring_put(dtype, count, ranks, put_async, signal_async);
            }
        }
    }
}

/// Runs rounds of puts around a ring without barriers: signal 0 is raised after the put, and signal
/// 1 after the data has been read.
fn counted_ring(ranks: u32, options: &Options, enqueue: bool) {
    all(ranks, options, |comm| {
        let (rank, size) = (comm.rank(), comm.size());
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let mut numbers = WindowOptions::default();
        numbers.signals = Some(2);
        let window = comm.alloc_window(DType::U64, 100, numbers)?;
        let source = tensor(DType::U64, 100)?;
        for round in 0..12u64 {
            source.copy_from(&[round * 100 + u64::from(rank); 100])?;
            if round % u64::from(size) == u64::from(rank) {
                // A wait that does not block would see the data of the previous round.
                std::thread::sleep(Duration::from_millis(5));
            }
            if enqueue {
                window.put_async(&source, next, 0)?;
                window.raise_async(next, 0)?;
                window.wait_raised_async(0, Some(before))?.wait_blocking()?;
            } else {
                window.put(&source, next, 0)?;
                window.raise(next, 0)?;
                window.wait_raised(0, Some(before))?;
            }
            let expected = [round * 100 + u64::from(before); 100];
            assert_eq!(window.tensor().to_vec::<u64>()?, expected, "round {round}");
            window.raise(before, 1)?;
            window.wait_raised(1, Some(next))?;
        }
        assert_eq!(window.read_signal(0, Some(before))?, 12);
        window.free()
    });
}

#[test]
fn raises_are_counted() {
    for ranks in [1, 2, 3, 5] {
        counted_ring(ranks, &options(), false);
        counted_ring(ranks, &options(), true);
    }
}

#[test]
fn raises_are_counted_over_a_network() {
    if device().is_gpu() {
        return fusewire_tests::skip::skip("cpu", "the network for tests is on the CPU");
    }
    for options in of_networks(&options(), 1, 4) {
        counted_ring(3, &options, false);
        counted_ring(3, &options, true);
    }
}

#[test]
fn raises_are_counted_in_replays_and_between_them() {
    all(3, &options(), |comm| {
        let (rank, size, stream) = (comm.rank(), comm.size(), stream());
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let window = comm.alloc_window(DType::U64, 8, WindowOptions::default())?;
        let source = tensor(DType::U64, 8)?;
        let on_stream = window.on(&stream);
        stream.begin_capture()?;
        on_stream.wait_raised_async(1, Some(next))?;
        on_stream.put_signal_async(&source, next, 0, 0)?;
        on_stream.wait_raised_async(0, Some(before))?;
        let graph = stream.end_capture()?.instantiate()?;
        window.raise(before, 1)?;
        for round in 0..12u64 {
            source.copy_from(&[round * 100 + u64::from(rank); 8])?;
            if round % u64::from(size) == u64::from(rank) {
                std::thread::sleep(Duration::from_millis(5));
            }
            if round % 4 == 3 {
                window.wait_raised(1, Some(next))?;
                window.put_signal(&source, next, 0, 0)?;
                window.wait_raised(0, Some(before))?;
            } else {
                graph.run(&stream)?;
                stream.synchronize()?;
            }
            let expected = [round * 100 + u64::from(before); 8];
            assert_eq!(window.tensor().to_vec::<u64>()?, expected, "round {round}");
            window.raise(before, 1)?;
        }
        drop(graph);
        comm.barrier()?;
        window.free()
    });
}

#[test]
fn a_wait_for_every_rank_uses_up_one_raise_of_each() {
    for ranks in [1, 2, 4] {
        all(ranks, &options(), |comm| {
            let window = comm.alloc_window(DType::U32, 4, WindowOptions::default())?;
            let signal = window.signals() - 1;
            let one = tensor(DType::U32, 1)?;
            // All raises of a rank may precede the first wait of another one.
            for round in 1..=3u32 {
                one.copy_from(&[round])?;
                for peer in 0..comm.size() {
                    window.put(&one, peer, comm.rank() as usize)?;
                    window.raise(peer, signal)?;
                }
            }
            for round in 1..=3 {
                window.wait_raised(signal, None)?;
                let seen = window.tensor().to_vec::<u32>()?;
                let first = &seen[..comm.size() as usize];
                assert!(first.iter().all(|value| *value >= round), "{seen:?}");
            }
            assert_eq!(
                window.read_signal(signal, None)?,
                u64::from(3 * comm.size())
            );
            // The reset also clears the counts.
            comm.barrier()?;
            window.reset_signal(signal)?;
            comm.barrier()?;
            for peer in 0..comm.size() {
                window.raise(peer, signal)?;
            }
            window.wait_raised_async(signal, None)?.wait_blocking()?;
            comm.barrier()?;
            window.free()
        });
    }
}

/// The host's raises and waits and those of a kernel use one count: in each round, a kernel raises
/// and waits once, the host raises once before it, and waits once after it.
#[test]
fn raises_of_the_host_and_of_a_library_kernel_mix() {
    all(3, &options(), |comm| {
        let (rank, size) = (comm.rank(), comm.size());
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let window = comm.alloc_window(DType::U64, 8, WindowOptions::default())?;
        let source = tensor(DType::U64, 8)?;
        for round in 1..8u64 {
            source.copy_from(&[round; 8])?;
            window.raise(next, 0)?;
            let arguments = RingPut {
                window: (&window).into(),
                source: (&source).into(),
            };
            comm.kernel(arguments).blocks(1).launch()?;
            window.wait_raised(0, Some(before))?;
            assert_eq!(window.read_signal(0, Some(before))?, 2 * round);
            comm.barrier()?;
        }
        window.free()
    });
}

/// Raises signal 0 of the next rank.
#[kernel(blocks = 1, signals = 1)]
fn raise_next(
    s: &mut Session<impl Machine>,
    window: fusewire_device::Window<u64>,
    value: u64,
) -> Result<(), Aborted> {
    for next in s.peers(Team::World).take(1) {
        let target = window.at(next).slice(0, 1);
        target.write_with(s, s.block(), |_| value).raise(s, 0);
    }
    Ok(())
}

/// Waits for signal 0 of the previous rank, and returns what that rank has written.
#[kernel(blocks = 1, signals = 1)]
fn wait_before(
    s: &mut Session<impl Machine>,
    window: fusewire_device::Window<u64>,
    seen: Out<u64>,
) -> Result<(), Aborted> {
    let before = s.rank().checked_sub(1).unwrap_or(s.ranks() - 1);
    if let Some(before) = s.peer(before) {
        let received = window.wait(s, 0, before)?;
        if s.block().is_leader() {
            seen.set(0, received.get(0));
        }
    }
    Ok(())
}

#[test]
fn a_kernel_waits_for_the_host_and_the_host_for_a_kernel() {
    if device().is_gpu() {
        return fusewire_tests::skip::skip(
            "image",
            "the kernels of this test have no image for a GPU",
        );
    }
    all(3, &options(), |comm| {
        let (rank, size) = (comm.rank(), comm.size());
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let window = comm.alloc_window(DType::U64, 1, WindowOptions::default())?;
        let (source, seen) = (tensor(DType::U64, 1)?, tensor(DType::U64, 1)?);
        for round in 0..16u64 {
            let value = |rank: u32| round * 10 + u64::from(rank);
            // Each of the four combinations occurs on every rank.
            let (kernel_raises, kernel_waits) = (round & 1 == 0, round & 2 == 0);
            if round % u64::from(size) == u64::from(rank) {
                std::thread::sleep(Duration::from_millis(5));
            }
            if kernel_raises {
                comm.kernel(RaiseNext {
                    window: (&window).into(),
                    value: value(rank),
                })
                .launch()?;
            } else {
                source.copy_from(&[value(rank)])?;
                window.put_signal(&source, next, 0, 0)?;
            }
            if kernel_waits {
                comm.kernel(WaitBefore {
                    window: (&window).into(),
                    seen: (&seen).into(),
                })
                .launch()?;
                assert_eq!(seen.to_vec::<u64>()?, [value(before)], "round {round}");
            } else {
                window.wait_raised(0, Some(before))?;
                assert_eq!(
                    window.tensor().to_vec::<u64>()?,
                    [value(before)],
                    "round {round}"
                );
            }
            comm.barrier()?;
        }
        window.free()
    });
}

#[test]
fn get_map_remote_and_every_comparison() {
    all(3, &options(), |comm| {
        let (rank, size) = (comm.rank(), comm.size());
        // The registered memory is a slice of a larger tensor, at an offset that differs by rank.
        let large = tensor(DType::U64, 100)?;
        let mine = large.slice(10 * rank as usize, 20)?;
        mine.copy_from(&[u64::from(rank) + 100; 20])?;
        let window = comm.new_window(&mine, WindowOptions::default())?;
        comm.barrier()?;
        let out = tensor(DType::U64, 5)?;
        for peer in 0..size {
            window.get(&out, peer, 15)?;
            assert_eq!(out.to_vec::<u64>()?, [u64::from(peer) + 100; 5]);
            assert_eq!(
                window.map_remote(peer)?.to_vec::<u64>()?,
                [u64::from(peer) + 100; 20]
            );
        }
        comm.barrier()?;
        // Signals start at 0.
        window.wait_signal(1, None, Compare::Equal, 0)?;
        comm.barrier()?;
        for peer in 0..size {
            window.signal(peer, 1, SignalUpdate::Set(u64::from(rank) + 1))?;
        }
        window.wait_signal(1, None, Compare::Equal, 6)?;
        window.wait_signal(1, Some(2), Compare::Equal, 3)?;
        window.wait_signal(1, None, Compare::NotEqual, 5)?;
        window.wait_signal(1, Some(0), Compare::Less, 2)?;
        window.wait_signal(1, Some(0), Compare::LessEqual, 1)?;
        window.wait_signal(1, None, Compare::Greater, 5)?;
        window.wait_signal(1, None, Compare::GreaterEqual, 6)?;
        comm.barrier()?;
        window.reset_signal(1)?;
        assert_eq!(window.read_signal(1, None)?, 0);
        comm.barrier()?;
        window.free()
    });
}

#[test]
fn a_tensor_is_registered_and_deregistered() {
    all(2, &options(), |comm| {
        let tensor = tensor(DType::F32, 1000)?;
        assert!(comm.window_addr(&tensor).is_err());
        for round in 0..60 {
            let registration = comm.tensor_register(&tensor)?;
            assert!(comm.window_addr(&tensor).is_ok(), "round {round}");
            tensor.copy_from(&vec![1.0f32; 1000])?;
            comm.all_reduce(&tensor, fusewire::ReduceOp::Sum)?;
            assert_eq!(tensor.to_vec::<f32>()?, vec![2.0; 1000]);
            comm.tensor_deregister(&registration)?;
            assert!(comm.window_addr(&tensor).is_err());
        }
        Ok(())
    });
}

/// A communicator has at most 1,024 windows at a time. More than that are created here, of which
/// few are alive at a time.
#[test]
fn the_numbers_of_windows_are_used_again() {
    all(2, &options(), |comm| {
        let (next, tensor) = (1 - comm.rank(), tensor(DType::U64, 8)?);
        let kept = comm.tensor_register(&tensor)?;
        for round in 0..1500u64 {
            let other = device::tensor(DType::U64, 8)?;
            let registration = comm.tensor_register(&other)?;
            if round % 100 == 0 {
                let window = comm.alloc_window(DType::U64, 8, WindowOptions::default())?;
                tensor.copy_from(&[round + u64::from(comm.rank()); 8])?;
                window.put_signal(&tensor, next, 0, 0)?;
                window.wait_signal(0, None, Compare::GreaterEqual, 1)?;
                let sent = round + u64::from(next);
                assert_eq!(window.tensor().to_vec::<u64>()?, [sent; 8]);
                window.free()?;
            }
            comm.tensor_deregister(&registration)?;
        }
        comm.tensor_deregister(&kept)
    });
}

#[test]
fn a_registration_with_another_communicator_is_not_ended() {
    all(1, &options(), |comm| {
        let (other, tensor) = (comm.dup()?, tensor(DType::F32, 8)?);
        let (own, theirs) = (
            comm.tensor_register(&tensor)?,
            other.tensor_register(&tensor)?,
        );
        let error = comm
            .tensor_deregister(&theirs)
            .expect_err("of the other one");
        assert!(
            error.to_string().contains("another communicator"),
            "{error}"
        );
        assert!(comm.window_addr(&tensor).is_ok() && other.window_addr(&tensor).is_ok());
        comm.tensor_deregister(&own)?;
        other.tensor_deregister(&theirs)?;
        assert!(comm.window_addr(&tensor).is_err() && other.window_addr(&tensor).is_err());
        Ok(())
    });
}

#[test]
fn a_registration_ends_once_and_a_refused_end_can_be_repeated() {
    all(2, &options(), |comm| {
        let first = tensor(DType::F32, 8)?;
        let registration = comm.tensor_register(&first)?;
        comm.stream().begin_capture()?;
        let refused = comm.tensor_deregister(&registration);
        drop(comm.stream().end_capture()?);
        let error = refused.expect_err("in a capture");
        assert!(matches!(error, Error::CaptureState { .. }), "{error}");
        assert!(comm.window_addr(&first).is_ok());
        comm.tensor_deregister(&registration)?;
        assert!(comm.window_addr(&first).is_err());

        // The second registration has the number of the first one, and must not end.
        let second = tensor(DType::F32, 8)?;
        let other = comm.tensor_register(&second)?;
        let error = comm
            .tensor_deregister(&registration)
            .expect_err("it has ended");
        assert!(error.to_string().contains("already ended"), "{error}");
        assert!(comm.window_addr(&second).is_ok());
        comm.tensor_deregister(&other)
    });
}

#[test]
fn windows_are_allocated_and_freed_repeatedly() {
    let descriptors = || std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count);
    all(2, &options(), |comm| {
        let mut first = 0;
        for round in 0..60 {
            let window = comm.alloc_window(DType::U8, 64, WindowOptions::default())?;
            window.put_signal(&tensor(DType::U8, 64)?, 1 - comm.rank(), 0, 0)?;
            window.wait_signal(0, None, Compare::GreaterEqual, 1)?;
            window.free()?;
            comm.barrier()?;
            if round == 10 {
                first = descriptors();
            }
            comm.barrier()?;
        }
        // Concurrent tests also open file descriptors, so the bound is loose. Sixty leaked windows
        // of two ranks would need hundreds of descriptors.
        assert!(descriptors() < first + 60, "{first} then {}", descriptors());
        Ok(())
    });
}

#[test]
fn a_wait_is_bounded_and_names_the_sender() {
    let wait = |counted, sender, timeout| -> Vec<Error> {
        let mut short = options();
        short.timeout = timeout;
        run_threads(2, &short, |comm| {
            let window = comm.alloc_window(DType::U8, 8, WindowOptions::default())?;
            if comm.rank() == 0 && counted {
                window.raise(0, 0)?;
                return window.wait_raised(0, sender);
            }
            if comm.rank() == 0 {
                return window.wait_signal(0, sender, Compare::Equal, 7);
            }
            while comm.failure().is_none() {
                std::thread::sleep(Duration::from_millis(1));
            }
            comm.failure().map_or(Ok(()), Err)
        })
        .into_iter()
        .map(|result| result.expect_err("no rank signals"))
        .collect()
    };
    let signal = ["waiting for rank 1, its signal", "rank 1 did not take part"];
    for (counted, sender, texts) in [
        (false, Some(1), signal),
        (true, Some(1), signal),
        (true, None, signal),
        (
            false,
            None,
            [
                "waiting for rank 1, its part of a sum of signals",
                "rank 1 has contributed least",
            ],
        ),
    ] {
        // On a busy machine a short timeout may expire before both ranks have the window.
        let errors = [150, 3_000, 15_000]
            .map(Duration::from_millis)
            .into_iter()
            .map(|timeout| wait(counted, sender, timeout))
            .find(|errors| {
                let mut errors = errors.iter().map(ToString::to_string);
                errors.all(|error| error.contains("rank 0 in wait_signal #"))
            })
            .expect("a window within 15 s");
        for error in errors {
            assert!(matches!(error, Error::Timeout(_)), "{error}");
            for text in texts {
                assert!(error.to_string().contains(text), "{error} lacks {text}");
            }
        }
    }
}

#[test]
fn refused_before_anything_moves() {
    all(2, &options(), |comm| {
        let window = comm.alloc_window(DType::F32, 8, WindowOptions::default())?;
        let eight = tensor(DType::F32, 8)?;
        assert!(window.put(&eight, 2, 0).is_err(), "rank");
        assert!(window.put(&eight, 0, 1).is_err(), "range");
        assert!(window.put(&eight, 0, usize::MAX).is_err(), "overflow");
        assert!(window.put(&tensor(DType::I32, 8)?, 0, 0).is_err(), "type");
        assert!(window.put_signal(&eight, 0, 0, 2).is_err(), "signal");
        assert!(window.get(&eight, 0, 1).is_err());
        assert!(window.signal(0, 2, SignalUpdate::Add(1)).is_err());
        assert!(window.wait_signal(0, Some(2), Compare::Equal, 0).is_err());
        assert!(window.wait_raised_async(0, Some(2)).is_err());
        assert!(window.map_remote(2).is_err());
        for (result, text) in [
            (
                window.read_signal(2, None).map(drop),
                "read_signal: signal 2; the window has 2",
            ),
            (
                window.read_signal(0, Some(2)).map(drop),
                "read_signal: peer 2; ranks are 0 to 1",
            ),
            (
                window.read_counter(2).map(drop),
                "read_counter: counter 2 of 2",
            ),
            (
                window.wait_signal(2, None, Compare::Equal, 0),
                "wait_signal: signal 2; the window has 2",
            ),
            (window.raise(2, 0), "raise: peer 2; ranks are 0 to 1"),
            (window.raise(0, 2), "raise: signal 2; the window has 2"),
            (
                window.wait_raised(2, None),
                "wait_raised: signal 2; the window has 2",
            ),
            (
                window.reset_signal(2),
                "reset_signal: signal 2; the window has 2",
            ),
        ] {
            let error = result.expect_err(text).to_string();
            assert!(error.contains(text), "{error} lacks {text}");
        }
        let freed = window.clone();
        window.free()?;
        let error = freed.put(&eight, 1, 0).expect_err("freed");
        assert!(error.to_string().contains("was freed"), "{error}");
        assert!(freed.map_remote(0).is_err() && freed.read_signal(0, None).is_err());
        assert!(freed.free().is_err(), "twice");
        comm.barrier()
    });
}

#[test]
fn ranks_that_register_different_sizes_are_reported() {
    let whole = |rank: u32| tensor(DType::U8, 4096 * (1 + rank as usize));
    // The memory has equal size on both ranks, but the slices have different lengths.
    let slice = |rank: u32| tensor(DType::U8, 4096)?.slice(0, 100 + rank as usize);
    let windows = run_threads(2, &options(), |comm| {
        let tensor = whole(comm.rank())?;
        comm.new_window(&tensor, WindowOptions::default()).map(drop)
    });
    let slices = run_threads(2, &options(), |comm| {
        let tensor = slice(comm.rank())?;
        comm.new_window(&tensor, WindowOptions::default()).map(drop)
    });
    let registrations = run_threads(2, &options(), |comm| {
        comm.tensor_register(&slice(comm.rank())?).map(drop)
    });
    for (results, texts) in [
        (
            windows,
            ["4096 u8 with 2 signals", "8192 u8 with 2 signals"],
        ),
        (slices, ["100 u8 with 2 signals", "101 u8 with 2 signals"]),
        (
            registrations,
            ["100 u8 with 0 signals", "101 u8 with 0 signals"],
        ),
    ] {
        for result in results {
            let error = result.expect_err("lengths differ").to_string();
            for text in texts {
                assert!(error.contains(text), "{error} lacks {text}");
            }
        }
    }
}

/// The arguments of `alloc_window`: type, elements, and numbers of signals, counters, barriers and
/// cells.
type WindowArguments = (DType, usize, [u32; 4]);

fn words((dtype, count, [signals, counters, barriers, cells]): WindowArguments) -> String {
    let dtype = dtype.name();
    format!(
        "{count} {dtype} with {signals} signals, {counters} counters, {barriers} barriers and \
         {cells} cells"
    )
}

#[test]
fn ranks_that_make_different_windows_are_reported_on_all_ranks() {
    let usual = (DType::F32, 8, [2, 3, 1, 0]);
    for other in [
        (DType::I32, 8, [2, 3, 1, 0]),
        (DType::F32, 9, [2, 3, 1, 0]),
        (DType::F32, 8, [4, 3, 1, 0]),
        (DType::F32, 8, [2, 2, 1, 0]),
        (DType::F32, 8, [2, 3, 2, 0]),
        (DType::F32, 8, [2, 3, 1, 5]),
    ] {
        all(3, &options(), |comm| {
            let of = |rank: u32| if rank == 1 { other } else { usual };
            let make = |(dtype, count, numbers): WindowArguments| {
                let mut options = WindowOptions::default();
                let [signals, counters, barriers, cells] = numbers;
                (options.signals, options.counters) = (Some(signals), Some(counters));
                (options.barriers, options.cells) = (barriers, cells);
                comm.alloc_window(dtype, count, options)
            };
            let own = comm.rank();
            let peer = if own == 1 { 0 } else { 1 };
            let error = make(of(own)).expect_err("the windows differ").to_string();
            let text = format!(
                "a window: rank {peer} passes {}, rank {own} {}: they must be equal",
                words(of(peer)),
                words(of(own))
            );
            assert!(error.contains(&text), "{error} lacks {text}");
            // The communicator has not failed.
            make(usual)?.free()
        });
    }
}

#[test]
fn captured_and_replayed() {
    all(2, &options(), |comm| {
        let stream = stream();
        let peer = 1 - comm.rank();
        let window = comm.alloc_window(DType::U64, 4, WindowOptions::default())?;
        let source = tensor(DType::U64, 4)?;
        // The put adds 1 to the peer's signal, and the peer resets its signal between replays.
        // Without the reset, the waits of later replays would return immediately.
        let on_stream = window.on(&stream);
        stream.begin_capture()?;
        on_stream.put_signal_async(&source, peer, 0, 1)?;
        on_stream.wait_signal_async(1, Some(peer), Compare::GreaterEqual, 1)?;
        let captured = stream.end_capture()?.instantiate()?;
        for round in 1..10u64 {
            source.copy_from(&[round; 4])?;
            captured.run(&stream)?;
            assert_eq!(window.tensor().to_vec::<u64>()?, [round; 4]);
            comm.barrier()?;
            window.reset_signal(1)?;
            comm.barrier()?;
        }
        window.free()
    });
}

/// Puts this rank's word to every rank with a signal, waits for all words, adds them, and enters
/// barrier 0. Counts its puts.
#[kernel(blocks = 1)]
fn exchange(
    s: &mut Session<impl Machine>,
    window: fusewire_device::Window<u64>,
    source: In<u64>,
    sum: Out<u64>,
    launch: u64,
) -> Result<(), Aborted> {
    let (block, ranks) = (s.block(), s.ranks());
    for peer in s.peers(Team::World) {
        let slot = window.at(peer).slice(s.rank() as usize, 1);
        slot.write(s, block, source).signal(s, 0, SignalOp::Add(1));
        window.count(s, 0)?;
    }
    let awaited = u64::from(ranks) * launch;
    let words = window.wait_value(s, 0, None, Compare::GreaterEqual, awaited)?;
    if block.is_leader() {
        sum.set(0, (0..ranks as usize).map(|rank| words.get(rank)).sum());
    }
    window.barrier(s, 0)?;
    Ok(())
}

#[test]
fn the_device_window_in_a_kernel() {
    if device().is_gpu() {
        return fusewire_tests::skip::skip(
            "image",
            "the kernel of this test has no image for a GPU",
        );
    }
    for (ranks, lanes) in [(1, 1), (3, 1), (8, 1), (2, 32), (2, 64)] {
        let mut options = options();
        options.testing.lanes = lanes;
        all(ranks, &options, |comm| {
            let size = comm.size() as usize;
            let window = comm.alloc_window(DType::U64, size, WindowOptions::default())?;
            let (source, sum) = (tensor(DType::U64, 1)?, tensor(DType::U64, 1)?);
            for launch in 1..6 {
                source.copy_from(&[u64::from(comm.rank()) + launch * 10])?;
                comm.kernel(Exchange {
                    window: (&window).into(),
                    source: (&source).into(),
                    sum: (&sum).into(),
                    launch,
                })
                .launch()?;
                let ranks = u64::from(comm.size());
                let expected = ranks * (ranks - 1) / 2 + ranks * launch * 10;
                assert_eq!(sum.to_vec::<u64>()?, [expected]);
                assert_eq!(window.read_counter(0)?, ranks * launch);
            }
            window.free()
        });
    }
}

#[test]
fn freeing_a_captured_window_is_an_error_and_no_crash() {
    all(2, &options(), |comm| {
        let stream = stream();
        let peer = 1 - comm.rank();
        let window = comm.alloc_window(DType::U8, 1 << 16, WindowOptions::default())?;
        let source = tensor(DType::U8, 1 << 16)?;
        let on_stream = window.on(&stream);
        stream.begin_capture()?;
        on_stream.put_async(&source, peer, 0)?;
        // `free` has a barrier, which the capture would record instead of executing it.
        let error = on_stream.clone().free().expect_err("while capturing");
        assert!(error.to_string().contains("capturing"), "{error}");
        let graph = stream.end_capture()?.instantiate()?;
        Ok((comm, graph, stream))
    })
    .into_iter()
    .for_each(|(comm, graph, stream)| {
        drop(comm);
        // The windows were not freed, and the graph keeps their memory alive.
        graph.run(&stream).expect("the graph keeps the memory");
    });
}

/// A blocking call is refused in work of the same stream.
#[test]
fn a_refused_end_of_a_window_can_be_repeated() {
    if device().is_gpu() {
        return fusewire_tests::skip::skip(
            "cpu",
            "a host function of a GPU may not call the driver",
        );
    }
    all(2, &options(), |comm| {
        let stream = stream();
        let window = comm
            .on(&stream)
            .alloc_window(DType::F32, 4, WindowOptions::default())?;
        let (inside, outside) = (window.clone(), window.clone());
        let refused = Arc::new(Mutex::new(None));
        let of_stream = Arc::clone(&refused);
        stream.host_fn(Arc::new(move || {
            *of_stream.lock().expect("no panic") = Some(inside.clone().free());
            Ok(())
        }))?;
        stream.synchronize()?;
        let refused = refused.lock().expect("no panic").take().expect("a result");
        refused.expect_err("a blocking call in work of the stream");
        let source = tensor(DType::F32, 4)?;
        source.copy_from(&[1.0f32; 4])?;
        window.put(&source, comm.rank(), 0)?;
        assert_eq!(window.tensor().to_vec::<f32>()?, [1.0; 4]);
        window.free()?;
        let error = outside.free().expect_err("a second end").to_string();
        assert!(error.contains("free: the window was freed"), "{error}");
        Ok(())
    });
}
