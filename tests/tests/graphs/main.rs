//! Tests graphs that are captured once and replayed with changing memory contents.

mod overlapped;
mod replays;

use core::time::Duration;

use fusewire::{Communicator, DType, Error, Norm, Options, Output, ReduceOp, Result, Tensor};
use fusewire::{Event, GraphExec};
use fusewire_tests::device;
use fusewire_tests::device::{run_threads, stream, tensor};
use fusewire_tests::fake::Fake;
use fusewire_tests::rng::Rng;

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(30);
    options
}

fn all(ranks: u32, body: impl Fn(Communicator) -> Result<()> + Sync) {
    for result in run_threads(ranks, &options(), body) {
        result.expect("all ranks");
    }
}

/// Runs `body`, which has a data race. `body` checks that the race has an effect. On the emulator,
/// the race is an error instead, after which no test of this process can use the GPU.
fn race(ranks: u32, body: impl Fn(Communicator) -> Result<()> + Sync) {
    let is_emulated = std::env::var("FUSEWIRE_FAKE_GPU").is_ok_and(|it| it == "ptx");
    if !is_emulated {
        all(ranks, body);
        return;
    }
    let fake = Fake::open().expect("the emulator is part of the fake");
    assert_eq!(fake.faults(), "");
    let results = run_threads(ranks, &options(), body);
    assert!(results.iter().any(Result::is_err), "{results:?}");
    let faults = fake.faults();
    let first = faults.lines().next().unwrap_or_default();
    assert!(first.contains("races with another thread"), "{faults}");
}

/// Returns the number of rounds: `usual` on the CPU and `usual / 25` on a GPU, because a launch
/// takes longer on a GPU.
fn rounds(usual: u64) -> u64 {
    if device().is_gpu() { usual / 25 } else { usual }
}

/// Captures `calls` on the communicator's stream as a graph.
fn capture(comm: &Communicator, calls: impl FnOnce() -> Result<()>) -> Result<GraphExec> {
    comm.stream().begin_capture()?;
    let called = calls();
    let graph = comm.stream().end_capture()?;
    called?;
    graph.instantiate()
}

#[test]
fn ten_thousand_replays_of_every_operation() {
    const N: usize = 24;
    all(2, |comm| {
        let (ranks, me) = (comm.size() as usize, comm.rank() as usize);
        let peer = 1 - comm.rank();
        let t = |count| comm.alloc(DType::I64, count);
        let (x, summed, gathered, scattered) = (t(N)?, t(N)?, t(N * ranks)?, t(N)?);
        let (exchanged, sent, got, rooted) = (t(N * ranks)?, t(N)?, t(N)?, t(N)?);
        let (root_rows, back, parts, v) = (t(N * ranks)?, t(N)?, t(N * ranks)?, t(N * ranks)?);
        // These tensors are not in a window, so transfers go through staging.
        let counts = tensor(DType::U64, ranks)?;
        counts.copy_from(&vec![N as u64; ranks])?;
        let splits = tensor(DType::U64, 2 * ranks)?;
        splits.copy_from(&vec![N as u64; 2 * ranks])?;
        let (receive, send) = (splits.slice(0, ranks)?, splits.slice(ranks, ranks)?);
        let graph = capture(&comm, || {
            comm.all_reduce_into_async(&summed, &x, ReduceOp::Sum)?;
            comm.all_gather_single_async(&gathered, &summed)?;
            comm.reduce_scatter_single_async(&scattered, &gathered, ReduceOp::Max)?;
            comm.barrier_async()?;
            comm.all_to_all_single_async(&exchanged, &gathered)?;
            comm.all_gather_v_single_async(&parts, &x, &counts)?;
            comm.all_to_all_v_single_async(&v, &parts, &receive, &send)?;
            if me == 0 {
                comm.send_async(&x, peer)?;
                comm.recv_async(&got, peer)?;
            } else {
                comm.recv_async(&got, peer)?;
                comm.send_async(&x, peer)?;
            }
            comm.reduce_into_async(&rooted, &x, 1, ReduceOp::BitXor)?;
            comm.gather_single_async(&root_rows, &x, 0)?;
            comm.scatter_single_async(&back, &root_rows, 0)?;
            comm.broadcast_async(&sent, 1)?;
            Ok(())
        })?;
        let of = |rank: usize, round: u64| -> Vec<i64> {
            let mut rng = Rng::new(round * 2 + rank as u64);
            (0..N).map(|_| rng.bits() as i64 >> 8).collect()
        };
        for round in 0..rounds(10_000) {
            let (a, b) = (of(0, round), of(1, round));
            let mine = [&a, &b][me];
            x.copy_from(mine)?;
            sent.copy_from(mine)?;
            graph.run(comm.stream())?;
            let sum: Vec<i64> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
            let both = [a.clone(), b.clone()].concat();
            assert_eq!(summed.to_vec::<i64>()?, sum, "round {round}");
            assert_eq!(
                gathered.to_vec::<i64>()?,
                [sum.clone(), sum.clone()].concat()
            );
            assert_eq!(scattered.to_vec::<i64>()?, sum);
            assert_eq!(exchanged.to_vec::<i64>()?, [sum.clone(), sum].concat());
            assert_eq!(parts.to_vec::<i64>()?, both);
            assert_eq!(v.to_vec::<i64>()?, [mine.clone(), mine.clone()].concat());
            assert_eq!(&got.to_vec::<i64>()?, [&b, &a][me]);
            if me == 1 {
                let xor: Vec<i64> = a.iter().zip(&b).map(|(a, b)| a ^ b).collect();
                assert_eq!(rooted.to_vec::<i64>()?, xor);
            } else {
                assert_eq!(root_rows.to_vec::<i64>()?, both);
            }
            assert_eq!(&back.to_vec::<i64>()?, mine);
            assert_eq!(sent.to_vec::<i64>()?, b);
        }
        Ok(())
    });
}

#[test]
fn several_graphs_and_eager_calls_between_them() {
    all(3, |comm| {
        let x: Vec<Tensor> = (0..4)
            .map(|k| comm.alloc(DType::F32, [1, 100, 3000, 20_000][k]))
            .collect::<Result<_>>()?;
        let mut graphs = Vec::new();
        for x in &x {
            graphs.push(capture(&comm, || {
                comm.all_reduce_async(x, ReduceOp::Sum)?;
                comm.all_reduce_async(x, ReduceOp::Average)?;
                Ok(())
            })?);
        }
        let mut rng = Rng::new(5);
        for round in 0..400 {
            let k = rng.below(4);
            let value = (round % 50) as f32 * 4.0;
            x[k].copy_from(&vec![value; x[k].len()])?;
            match rng.below(3) {
                0 => comm.all_reduce(&x[k], ReduceOp::Sum)?,
                1 => graphs[k].run(comm.stream())?,
                _ => comm.stream().wait(graphs[k].launch(comm.stream())?, None)?,
            }
            assert_eq!(
                x[k].to_vec::<f32>()?,
                vec![value * 3.0; x[k].len()],
                "round {round}"
            );
        }
        Ok(())
    });
}

#[test]
fn memory_lives_as_long_as_the_graph() {
    all(2, |comm| {
        let (x, y) = (tensor(DType::F32, 50_000)?, tensor(DType::F32, 50_000)?);
        let between = tensor(DType::F32, 50_000)?;
        let (receive, send) = (tensor(DType::U64, 2)?, tensor(DType::U64, 2)?);
        receive.copy_from(&[25_000u64; 2])?;
        send.copy_from(&[25_000u64; 2])?;
        let weight = comm.alloc(DType::F32, 80)?;
        weight.copy_from(&[1f32; 80])?;
        let graph = capture(&comm, || {
            comm.all_reduce_into_async(&between, &x, ReduceOp::Sum)?;
            comm.all_to_all_v_single_async(&y, &between, &receive, &send)?;
            let normed = tensor(DType::F32, 50_000)?;
            let norm = Norm::rms(&normed, &between, &weight, 1e-5).with_residual(&between);
            comm.all_reduce_norm_async(&norm)?;
            Ok(())
        })?;
        drop((between, receive, send, weight));
        // If the graph's memory was freed too early, these allocations reuse and overwrite it.
        let noise: Vec<Tensor> = (0..20)
            .map(|_| tensor(DType::F32, 50_000))
            .collect::<Result<_>>()?;
        for tensor in &noise {
            tensor.copy_from(&vec![f32::NAN; 50_000])?;
        }
        for round in 0..20 {
            x.copy_from(&vec![round as f32; 50_000])?;
            graph.run(comm.stream())?;
            assert_eq!(y.to_vec::<f32>()?, vec![round as f32 * 2.0; 50_000]);
        }
        assert!(
            noise
                .iter()
                .all(|t| t.to_vec::<f32>().is_ok_and(|t| t[0].is_nan()))
        );
        Ok(())
    });
}

#[test]
fn blocking_calls_on_tensors_are_captured_and_on_slices_refused() {
    all(2, |comm| {
        let t = comm.alloc(DType::F32, 8)?;
        let [normed, weight] = [comm.tensor_from(&[0f32; 8])?, comm.tensor_from(&[1f32; 8])?];
        let mut refused = Vec::new();
        let graph = capture(&comm, || {
            let mut slice = [1f32; 8];
            refused.push(comm.all_reduce(&mut slice[..], ReduceOp::Sum));
            assert_eq!(slice, [1.0; 8]);
            // SAFETY: the tensor has 8 elements and outlives the call.
            let at = unsafe { Output::from_raw(t.as_ptr(), 8, DType::F32) };
            refused.push(comm.all_reduce(at, ReduceOp::Sum));
            let norm = Norm::rms(&normed, &t, &weight, 1e-5);
            refused.push(comm.all_reduce_norm(&norm));
            comm.all_reduce(&t, ReduceOp::Sum)?;
            // The captured call has not run, so the contents are unchanged.
            t.copy_from(&[5f32; 8])
        })?;
        let functions = ["all_reduce", "all_reduce", "all_reduce_norm"];
        for (refused, function) in refused.into_iter().zip(functions) {
            let error = refused.expect_err(function);
            assert!(matches!(error, Error::CaptureState { .. }), "{error}");
            let expected = format!(
                "a graph outlives the call, so {function} cannot be captured with slices or \
                 addresses: use tensors and the _async form of the function"
            );
            assert!(error.to_string().ends_with(&expected), "{error}");
        }
        assert_eq!(t.to_vec::<f32>()?, [5.0; 8]);
        graph.run(comm.stream())?;
        assert_eq!(t.to_vec::<f32>()?, [10.0; 8]);
        Ok(())
    });
}

#[test]
fn graphs_are_dropped_and_captured_again() {
    all(2, |comm| {
        let x = comm.alloc(DType::I32, 2000)?;
        for round in 0..200i32 {
            let count = 1 + (round as usize * 37) % 2000;
            let part = x.slice(2000 - count, count)?;
            let graph = capture(&comm, || {
                comm.all_reduce_async(&part, ReduceOp::Sum).map(drop)
            })?;
            for repeat in 0..3 {
                part.copy_from(&vec![round + repeat; count])?;
                graph.run(comm.stream())?;
                assert_eq!(part.to_vec::<i32>()?, vec![2 * (round + repeat); count]);
            }
        }
        Ok(())
    });
}

#[test]
fn streams_join_a_capture_by_events() {
    all(2, |comm| {
        let (s0, s1) = (stream(), stream());
        let (on0, on1) = (comm.on(&s0), comm.on(&s1));
        let x = comm.alloc(DType::F32, 3000)?;
        let y = comm.alloc(DType::F32, 6000)?;
        let (forked, joined) = (Event::new(), Event::new());
        s0.begin_capture()?;
        on0.all_reduce_async(&x, ReduceOp::Sum)?;
        s0.record(&forked)?;
        s1.wait_event(&forked)?;
        on1.all_gather_single_async(&y, &x)?;
        s1.record(&joined)?;
        s0.wait_event(&joined)?;
        on0.all_reduce_async(&y, ReduceOp::Max)?;
        let graph = s0.end_capture()?.instantiate()?;
        assert!(!s1.is_capturing());
        for round in 0..300 {
            let mine = (round * 2 + comm.rank()) as f32;
            x.copy_from(&vec![mine; 3000])?;
            graph.run(if round % 2 == 0 { &s0 } else { &s1 })?;
            let sum = (round * 4 + 1) as f32;
            assert_eq!(y.to_vec::<f32>()?, vec![sum; 6000]);
        }
        Ok(())
    });
}

#[test]
fn zero_elements_are_replayed_in_step() {
    all(3, |comm| {
        let (empty, x) = (comm.alloc(DType::F32, 0)?, comm.alloc(DType::F32, 5)?);
        let graph = capture(&comm, || {
            comm.all_reduce_async(&empty, ReduceOp::Sum)?;
            comm.all_gather_single_async(&empty, &empty)?;
            comm.broadcast_async(&empty, 2)?;
            comm.reduce_scatter_single_async(&empty, &empty, ReduceOp::Sum)?;
            comm.all_reduce_async(&x, ReduceOp::Sum)?;
            Ok(())
        })?;
        let nothing = capture(&comm, || Ok(()))?;
        for round in 0..rounds(500) {
            x.copy_from(&[round as f32; 5])?;
            nothing.run(comm.stream())?;
            graph.run(comm.stream())?;
            assert_eq!(x.to_vec::<f32>()?, [round as f32 * 3.0; 5]);
        }
        Ok(())
    });
}

/// A graph copies counts and splits in host memory, also those of blocking calls.
#[test]
fn counts_in_host_memory_are_captured() {
    all(2, |comm| {
        let rank = u64::from(comm.rank());
        let (x, y, z) = (
            comm.alloc(DType::U32, 4)?,
            comm.alloc(DType::U32, 4)?,
            tensor(DType::U32, 4)?,
        );
        let mut counts = vec![1u64, 3];
        let own = x.slice(0, 1 + 2 * rank as usize)?;
        // Each rank sends 1 element to rank 0 and 3 to rank 1.
        let mut receive = [1 + 2 * rank; 2];
        let (received, first) = (2 + 4 * rank as usize, 1);
        let target = tensor(DType::U32, received)?;
        let graph = capture(&comm, || {
            comm.all_gather_v_single(&y, &own, &counts)?;
            comm.all_gather_v_single_async(&z, &own, counts.as_slice())?;
            comm.all_to_all_v_single(&target, &y, &receive, &counts)?;
            comm.all_to_all_v_single_async(&target, &z, &receive, &counts)
                .map(drop)
        })?;
        counts.fill(u64::MAX);
        receive.fill(u64::MAX);
        for round in 0..3 {
            x.copy_from(&[round * 10 + comm.rank(); 4])?;
            graph.run(comm.stream())?;
            let (of_0, of_1) = (round * 10, round * 10 + 1);
            let gathered = [of_0, of_1, of_1, of_1];
            assert_eq!(y.to_vec::<u32>()?, gathered);
            assert_eq!(z.to_vec::<u32>()?, gathered);
            let sent = match rank {
                0 => &gathered[..first],
                _ => &gathered[first..],
            };
            assert_eq!(target.to_vec::<u32>()?, [sent, sent].concat());
        }
        Ok(())
    });
}

#[test]
fn splits_that_outgrow_the_tensors_fail_before_anything_moves() {
    for (output_split, input_split) in [
        (9, 4),
        (4, 9),
        (u64::MAX, 4),
        (4, u64::MAX),
        (1 << 61, 1 << 61),
    ] {
        all(1, |comm| {
            // The tensors are parts of larger tensors. Elements outside the parts must not change.
            let (inside, outside) = (comm.alloc(DType::U32, 64)?, comm.alloc(DType::U32, 64)?);
            let (input, output) = (inside.slice(16, 8)?, outside.slice(16, 8)?);
            let splits = tensor(DType::U64, 2)?;
            splits.copy_from(&[4u64, 4])?;
            let (receive, send) = (splits.slice(0, 1)?, splits.slice(1, 1)?);
            let graph = capture(&comm, || {
                comm.all_to_all_v_single_async(&output, &input, &receive, &send)
                    .map(drop)
            })?;
            inside.copy_from(&[7u32; 64])?;
            outside.copy_from(&[1u32; 64])?;
            splits.copy_from(&[output_split, input_split])?;
            let error = graph
                .run(comm.stream())
                .and_then(|()| comm.synchronize())
                .expect_err("splits beyond the tensors");
            let text = error.to_string();
            assert!(
                text.contains("all_to_all_v") && text.contains("its buffer has 8"),
                "{text}"
            );
            assert_eq!(outside.to_vec::<u32>()?, [1; 64]);
            Ok(())
        });
    }
}

#[test]
fn splits_in_device_memory_are_read_by_each_replay() {
    const RANKS: u32 = 3;
    const MOST: usize = 90;
    for staged in [false, true] {
        all(RANKS, |comm| {
            let n = RANKS as usize;
            let numbers = |count| {
                if staged {
                    tensor(DType::U32, count)
                } else {
                    comm.alloc(DType::U32, count)
                }
            };
            let (input, output) = (numbers(n * MOST)?, numbers(n * MOST)?);
            let splits = tensor(DType::U64, 2 * n)?;
            let (receive, send) = (splits.slice(0, n)?, splits.slice(n, n)?);
            let graph = capture(&comm, || {
                comm.all_to_all_v_single_async(&output, &input, &receive, &send)
                    .map(drop)
            })?;
            for round in 0..rounds(1000) {
                let mut rng = Rng::new(round);
                let all: Vec<Vec<u64>> = (0..n)
                    .map(|_| (0..n).map(|_| rng.pick(&[0, 0, 1, 7, 64, 90])).collect())
                    .collect();
                let me = comm.rank() as usize;
                let receive: Vec<u64> = all.iter().map(|sends| sends[me]).collect();
                splits.copy_from(&[receive.clone(), all[me].clone()].concat())?;
                let tag = |from: usize, to: usize, i: usize| {
                    ((round as u32) << 16) | ((from * 8 + to) as u32 * 128 + i as u32)
                };
                let mut sent = vec![0; n * MOST];
                let mut at = 0;
                for (to, count) in all[me].iter().enumerate() {
                    for i in 0..*count as usize {
                        sent[at] = tag(me, to, i);
                        at += 1;
                    }
                }
                input.copy_from(&sent)?;
                output.copy_from(&vec![u32::MAX; n * MOST])?;
                graph.run(comm.stream())?;
                let mut expected = Vec::new();
                for (from, count) in receive.iter().enumerate() {
                    expected.extend((0..*count as usize).map(|i| tag(from, me, i)));
                }
                expected.resize(n * MOST, u32::MAX);
                assert_eq!(output.to_vec::<u32>()?, expected, "round {round}");
            }
            Ok(())
        });
    }
}

#[test]
fn a_failed_replay_fails_all_later_calls() {
    let mut options = options();
    options.timeout = Duration::from_millis(500);
    let results = run_threads(2, &options, |comm| {
        let x = comm.alloc(DType::F32, 8)?;
        let graph = capture(&comm, || comm.all_reduce_async(&x, ReduceOp::Sum).map(drop))?;
        if comm.rank() == 1 {
            while comm.failure().is_none() {
                std::thread::sleep(Duration::from_millis(2));
            }
        }
        let first = graph.run(comm.stream()).unwrap_err().to_string();
        let again = graph.run(comm.stream()).unwrap_err().to_string();
        let ticket = graph.launch(comm.stream())?;
        let queued = comm.stream().wait(ticket, None).unwrap_err().to_string();
        assert_eq!((&first, &first), (&again, &queued));
        Ok(first)
    });
    for message in results {
        let message = message.expect("joined");
        assert!(message.contains("timed out"), "{message}");
    }
}
