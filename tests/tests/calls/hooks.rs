//! Hooks: the calls for which they are called, their arguments, and the hooks of the library.

use core::slice::from_ref;
use core::time::Duration;
use std::io;
use std::sync::{Arc, Mutex};

use fusewire::{
    Algorithm, CallOptions, Communicator, Compare, DType, Error, HookArguments, HookHandle,
    Operation, Options, P2pKind, RecordState, ReduceOp, Registration, Result, SignalUpdate, Tensor,
    Window, WindowOptions,
};
use fusewire_tests::device::{device, run_threads, stream, tensor};

/// Values that hooks collect.
struct Seen<T>(Arc<Mutex<Vec<T>>>);

impl<T> Clone for Seen<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> Seen<T> {
    fn new() -> Self {
        Self(Arc::default())
    }

    fn push(&self, value: T) {
        self.0.lock().expect("no panic").push(value);
    }

    fn take(&self) -> Vec<T> {
        core::mem::take(&mut self.0.lock().expect("no panic"))
    }
}

/// Registers a pre-hook and a post-hook that collect what `value` returns, if it is not `None`.
fn collect<T: Send + 'static>(
    comm: &Communicator,
    value: impl Fn(bool, &HookArguments<'_>) -> Option<T> + Clone + Send + Sync + 'static,
) -> Seen<T> {
    let seen = Seen::new();
    let push = |is_after: bool| {
        let (seen, value) = (seen.clone(), value.clone());
        move |arguments: &HookArguments<'_>| {
            value(is_after, arguments)
                .into_iter()
                .for_each(|it| seen.push(it));
        }
    };
    comm.register_pre_hook(push(false));
    comm.register_post_hook(push(true));
    seen
}

fn values(count: usize, value: f32) -> Result<Tensor> {
    let x = tensor(DType::F32, count)?;
    x.copy_from(&vec![value; count])?;
    Ok(x)
}

#[test]
fn a_captured_operation_calls_hooks_at_its_capture_only() {
    for result in run_threads(2, &Options::default(), |comm| {
        let x = values(8, 1.0)?;
        let (one, two) = (values(4, 1.0)?, values(4, 1.0)?);
        let seen = collect(&comm, |is_after, arguments| {
            let is_known = arguments.record_id.is_some() || arguments.error.is_some();
            Some((
                is_after,
                arguments.name,
                arguments.id,
                arguments.is_captured,
                arguments.is_async,
                arguments.work.is_some(),
                is_known,
            ))
        });
        comm.stream().begin_capture()?;
        comm.all_reduce_async(&x, ReduceOp::Sum)?;
        comm.all_reduce(&x, ReduceOp::Sum)?;
        comm.all_gather(&[one, two], &x.slice(0, 4)?)?;
        let graph = comm.stream().end_capture()?.instantiate()?;
        assert_eq!(
            seen.take(),
            [
                (false, "all_reduce", 1, true, true, false, false),
                (true, "all_reduce", 1, true, true, true, false),
                (false, "all_reduce", 2, true, false, false, false),
                (true, "all_reduce", 2, true, false, false, false),
                (false, "all_gather", 3, true, false, false, false),
                (true, "all_gather", 3, true, false, false, false),
            ]
        );
        for _ in 0..2 {
            graph.run(comm.stream())?;
        }
        assert!(seen.take().is_empty(), "replays have hooks of their own");
        comm.barrier()?;
        let barrier = [
            (false, "barrier", 4, false, false, false, true),
            (true, "barrier", 4, false, false, false, true),
        ];
        assert_eq!(seen.take(), barrier);
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

/// A hook that calls an operation while the stream is capturing adds that operation to the graph.
#[test]
fn hooks_call_operations_at_a_capture() {
    for result in run_threads(2, &Options::default(), |comm| {
        let (x, y) = (values(4, 1.0)?, values(4, 1.0)?);
        let (inner, target) = (comm.clone(), y.clone());
        comm.register_pre_hook(move |arguments| {
            if arguments.input_count == 4 && arguments.inputs[0].as_ptr() != target.as_ptr() {
                let doubled = inner.all_reduce_async(&target, ReduceOp::Sum);
                drop(doubled.expect("captured"));
            }
        });
        comm.stream().begin_capture()?;
        comm.all_reduce_async(&x, ReduceOp::Sum)?;
        let graph = comm.stream().end_capture()?.instantiate()?;
        for _ in 0..3 {
            graph.run(comm.stream())?;
        }
        assert_eq!(x.to_vec::<f32>()?, [8.0; 4]);
        assert_eq!(y.to_vec::<f32>()?, [8.0; 4]);
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

/// A hook uses the communicator on another stream before the operation runs.
#[test]
fn an_operation_follows_that_of_its_hook_on_another_stream() {
    for result in run_threads(2, &Options::default(), |comm| {
        let other = comm.on(&fusewire_tests::device::stream());
        let y = values(1 << 16, 1.0)?;
        let target = y.clone();
        comm.register_pre_hook(move |arguments| {
            if arguments.operation == Operation::AllReduce && arguments.input_count == 4 {
                let work = other.all_reduce_async(&target, ReduceOp::Average);
                drop(work.expect("enqueued"));
            }
        });
        for _ in 0..50 {
            let x = values(4, 1.0)?;
            comm.all_reduce_async(&x, ReduceOp::Sum)?.wait_blocking()?;
            comm.all_reduce(&x, ReduceOp::Sum)?;
            assert_eq!(x.to_vec::<f32>()?, [4.0; 4]);
        }
        comm.synchronize()
    }) {
        result.expect("both ranks");
    }
}

#[test]
fn names_distinguish_the_functions() {
    for result in run_threads(2, &Options::default(), |comm| {
        let seen = collect(&comm, |is_after, arguments| {
            let counts = |list: &[fusewire::HookBuffer<'_>]| -> Vec<usize> {
                list.iter().map(fusewire::HookBuffer::len).collect()
            };
            let (inputs, outputs) = (counts(arguments.inputs), counts(arguments.outputs));
            is_after.then_some((arguments.name, arguments.operation, inputs, outputs))
        });
        let (x, whole) = (values(4, 1.0)?, values(8, 1.0)?);
        let two = [values(4, 0.0)?, values(4, 0.0)?];
        let uneven = [values(3, 0.0)?, values(5, 0.0)?];
        let own = &uneven[comm.rank() as usize];
        let count = own.len();
        use Operation as Op;
        comm.all_gather(&two, &x)?;
        comm.all_gather_single(&whole, &x)?;
        comm.all_gather_v(&uneven, &values(count, 0.0)?)?;
        comm.reduce_scatter(&x, &two, ReduceOp::Sum)?;
        comm.reduce_scatter_single(&x, &whole, ReduceOp::Sum)?;
        comm.reduce_scatter_v(&values(count, 0.0)?, &uneven, ReduceOp::Sum)?;
        comm.all_to_all(&[values(4, 0.0)?, values(4, 0.0)?], &two)?;
        comm.all_to_all_single(&values(8, 0.0)?, &whole)?;
        comm.scatter_async(&x, &two, 0)?.wait_blocking()?;
        comm.gather_async(&two, &x, 1)?.wait_blocking()?;
        comm.gather_single(&whole, &x, 1)?;
        comm.broadcast(&x, 1)?;
        let all = vec![4, 4];
        let (is_first, is_second) = (comm.rank() == 0, comm.rank() == 1);
        let only = |is_used: bool, counts: &[usize]| match is_used {
            true => counts.to_vec(),
            false => Vec::new(),
        };
        assert_eq!(
            seen.take(),
            [
                ("all_gather", Op::AllGather, vec![4], all.clone()),
                ("all_gather_single", Op::AllGather, vec![4], vec![8]),
                ("all_gather_v", Op::AllGatherV, vec![count], vec![3, 5]),
                ("reduce_scatter", Op::ReduceScatter, all.clone(), vec![4]),
                ("reduce_scatter_single", Op::ReduceScatter, vec![8], vec![4]),
                (
                    "reduce_scatter_v",
                    Op::ReduceScatter,
                    vec![3, 5],
                    vec![count]
                ),
                ("all_to_all", Op::AllToAllV, all.clone(), all),
                ("all_to_all_single", Op::AllToAll, vec![8], vec![8]),
                ("scatter", Op::Scatter, only(is_first, &[4, 4]), vec![4]),
                ("gather", Op::Gather, vec![4], only(is_second, &[4, 4])),
                ("gather_single", Op::Gather, vec![4], only(is_second, &[8])),
                (
                    "broadcast",
                    Op::Broadcast,
                    only(is_second, &[4]),
                    only(is_first, &[4])
                ),
            ]
        );
        let mut batch = comm.batch_op_create();
        batch.send(&x, 1 - comm.rank())?;
        batch.recv(&two[0], 1 - comm.rank())?;
        let ops = collect(&comm, |_, arguments| {
            let kinds: Vec<P2pKind> = arguments.ops.iter().map(|op| op.kind).collect();
            Some((arguments.name, kinds))
        });
        batch.issue()?;
        let both = ("batch_op_issue", vec![P2pKind::Send, P2pKind::Recv]);
        assert_eq!(ops.take(), [both.clone(), both]);
        let batch = ("batch_op_issue", Op::Batch, vec![4], vec![4]);
        assert_eq!(seen.take(), [batch]);
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

#[test]
fn calls_that_are_no_operations_call_hooks() {
    for result in run_threads(2, &Options::default(), |comm| {
        let seen = collect(&comm, |is_after, arguments| {
            let is_operation = arguments.operation != Operation::None;
            let new_comm = arguments.new_comm.map(Communicator::size);
            (!is_operation).then(|| {
                (
                    is_after,
                    arguments.name,
                    new_comm,
                    arguments.error.is_some(),
                )
            })
        });
        let in_part = Seen::new();
        let of_parts = in_part.clone();
        comm.register_post_hook(move |arguments| {
            if let Some(part) = arguments.new_comm {
                let seen = of_parts.clone();
                part.register_pre_hook(move |arguments| seen.push(arguments.name));
            }
        });
        let part = comm.split(&[comm.rank()], "alone")?.expect("a part");
        let none: &[u32] = if comm.rank() == 0 { &[0] } else { &[] };
        assert_eq!(comm.split(none, "first")?.is_some(), comm.rank() == 0);
        drop(comm.dup()?);
        let calls = [
            (false, "split", None, false),
            (true, "split", Some(1), false),
            (false, "split", None, false),
            (true, "split", (comm.rank() == 0).then_some(1), false),
            (false, "dup", None, false),
            (true, "dup", Some(2), false),
        ];
        assert_eq!(seen.take(), calls);
        // The hook of the part does not apply to its parent.
        comm.barrier()?;
        assert!(in_part.take().is_empty());
        part.barrier()?;
        part.finalize()?;
        assert_eq!(in_part.take(), ["barrier", "finalize"]);
        assert!(comm.split(&[7], "wrong").is_err());
        comm.new_window(&values(4, 0.0)?, WindowOptions::default())?;
        comm.alloc_window(DType::F32, 4, WindowOptions::default())?;
        comm.finalize()?;
        comm.finalize()?;
        let calls = [
            (false, "finalize", None, false),
            (true, "finalize", None, false),
            (false, "split", None, false),
            (true, "split", None, true),
            (false, "new_window", None, false),
            (true, "new_window", None, false),
            (false, "new_window", None, false),
            (true, "new_window", None, false),
            (false, "finalize", None, false),
            (true, "finalize", None, false),
        ];
        assert_eq!(seen.take(), calls);
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

#[test]
fn hooks_read_the_buffers_of_slices_and_tensors() {
    for result in run_threads(2, &Options::default(), |comm| {
        let seen = collect(&comm, |is_after, arguments| {
            let buffer = match is_after {
                false => arguments.inputs[0],
                true => arguments.outputs[0],
            };
            assert!(buffer.to_vec::<i32>().is_err(), "another type");
            let values = buffer.to_vec::<f32>().expect("readable");
            Some((values, arguments.timeout, arguments.algorithm.name()))
        });
        let options = CallOptions::new().timeout(Duration::from_secs(7));
        let comm = comm.with_options(&options.hint("algorithm", "signal"))?;
        let mut slice = [1.0f32, 2.0];
        comm.all_reduce(slice.as_mut_slice(), ReduceOp::Sum)?;
        let x = values(2, 3.0)?;
        comm.all_reduce_async(&x, ReduceOp::Sum)?.wait_blocking()?;
        let call = |values: [f32; 2]| (values.to_vec(), Duration::from_secs(7), "signal");
        let calls = [[1.0, 2.0], [2.0, 4.0], [3.0, 3.0], [6.0, 6.0]];
        assert_eq!(seen.take(), calls.map(call));
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

#[test]
fn a_nan_in_an_input_refuses_the_call() {
    for result in run_threads(1, &Options::default(), |comm| {
        let check = comm.register_nan_check();
        let errors = collect(&comm, |is_after, arguments| {
            (is_after && arguments.error.is_some()).then_some(arguments.name)
        });
        let nan = values(8, 1.0)?;
        nan.slice(5, 1)?.copy_from(&[f32::NAN])?;
        let (fine, output) = (values(8, 1.0)?, values(8, 1.0)?);
        let refused = |result: Result<()>, part: &str| {
            let error = result.expect_err("refused");
            assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
            assert!(error.to_string().contains(part), "{error}");
        };
        let single = "all_reduce: input of rank 0 of \"threads\" has a NaN at element 5 (f32)";
        refused(comm.all_reduce(&nan, ReduceOp::Sum), single);
        let mut slice = [1.0, f64::NAN];
        let of_slice = comm.all_reduce(slice.as_mut_slice(), ReduceOp::Sum);
        refused(of_slice, "NaN at element 1 (f64)");
        refused(comm.all_reduce_async(&nan, ReduceOp::Sum).map(drop), single);
        refused(comm.all_gather_single(&output, &nan), "all_gather_single:");
        let of_list = comm.all_gather(from_ref(&output), &nan);
        refused(of_list, "all_gather: input of rank 0");
        let mut batch = comm.batch_op_create();
        batch.send(&fine, 0)?;
        batch.send(&nan, 0)?;
        batch.recv(&output, 0)?;
        batch.recv(&values(8, 1.0)?, 0)?;
        refused(batch.issue(), "batch_op_issue: input 1 of rank 0");
        comm.stream().begin_capture()?;
        refused(comm.all_reduce_async(&nan, ReduceOp::Sum).map(drop), single);
        comm.all_reduce_async(&fine, ReduceOp::Sum)?;
        let graph = comm.stream().end_capture()?.instantiate()?;
        assert_eq!(output.to_vec::<f32>()?, [1.0; 8], "nothing moved");
        assert_eq!(errors.take().len(), 7, "post-hooks see the refusals");
        // Replays are not checked.
        fine.slice(0, 1)?.copy_from(&[f32::NAN])?;
        graph.run(comm.stream())?;
        let states: Vec<_> = comm.flight_records().iter().map(|it| it.state).collect();
        // A call on a list of tensors is recorded when its operations are issued.
        let mut expected = vec![RecordState::Failed; 5];
        expected.push(RecordState::Completed);
        assert_eq!(states, expected);
        check.remove();
        comm.all_reduce(&nan, ReduceOp::Sum)?;
        // The communicator has not failed.
        comm.finalize()
    }) {
        result.expect("the rank");
    }
    // A rank that receives a broadcast does not read its buffer.
    for result in run_threads(2, &Options::default(), |comm| {
        comm.register_nan_check();
        let mut x = [if comm.rank() == 0 { 1.0f32 } else { f32::NAN }];
        comm.broadcast(x.as_mut_slice(), 0)?;
        assert_eq!(x, [1.0]);
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

#[test]
fn a_log_has_a_line_for_each_call() {
    #[derive(Clone)]
    struct Sink(Seen<u8>);
    impl io::Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            bytes.iter().for_each(|byte| self.0.push(*byte));
            Ok(bytes.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    for result in run_threads(1, &Options::default(), |comm| {
        let sink = Sink(Seen::new());
        let log = comm.register_log(sink.clone());
        let x = values(4, 1.0)?;
        comm.broadcast(&x, 0)?;
        comm.stream().begin_capture()?;
        comm.all_reduce_async(&x, ReduceOp::Max)?;
        drop(comm.stream().end_capture()?);
        comm.all_to_all_async(&[values(3, 0.0)?], &[values(3, 0.0)?])?
            .wait_blocking()?;
        comm.split(&[0], "part")?.expect("a part").finalize()?;
        log.remove();
        comm.finalize()?;
        let text = String::from_utf8(sink.0.take()).expect("text");
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split('|').collect()).collect();
        let part = |line: usize, fields: &[&str]| {
            for field in fields {
                assert!(lines[line].contains(field), "{field}: {:?}", lines[line]);
            }
        };
        assert_eq!(lines.len(), 5, "{text}");
        assert!(lines.iter().all(|line| line[0].starts_with('+')), "{text}");
        part(
            0,
            &[
                "broadcast",
                "comm=threads",
                "rank=0",
                "work_id=1",
                "peer=0",
                "dtype=f32",
            ],
        );
        part(0, &["in_count=4", "out_count=", "async_op=f", "captured=f"]);
        part(
            1,
            &[
                "all_reduce",
                "work_id=2",
                "red_op=max",
                "async_op=t",
                "captured=t",
            ],
        );
        part(
            2,
            &["all_to_all", "in_count=3", "out_count=3", "async_op=t"],
        );
        part(3, &["split", "in_count=", "out_count="]);
        part(4, &["finalize"]);
        Ok(())
    }) {
        result.expect("the rank");
    }
}

#[test]
fn a_fused_operation_gives_hooks_its_buffers() {
    for result in run_threads(2, &Options::default(), |comm| {
        if device().is_gpu() {
            return Ok(());
        }
        comm.register_nan_check();
        let x = values(16, 1.0)?;
        let (weight, out) = (values(8, 1.0)?, values(16, 0.0)?);
        let norm = fusewire::Norm::rms(&out, &x, &weight, 1e-6);
        comm.all_reduce_norm(&norm)?;
        weight.slice(1, 1)?.copy_from(&[f32::NAN])?;
        let refused = comm.all_reduce_norm(&norm).expect_err("refused");
        let expected = "all_reduce_norm: input 1 of rank";
        assert!(refused.to_string().contains(expected), "{refused}");
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

/// Registers a pre-hook that, at its first call of an operation, ends `registration` and registers
/// `next`, which gets the number of the window. The calls of the hook are on another stream.
fn replace_registration(
    comm: &Communicator,
    registration: Registration,
    next: &Tensor,
) -> HookHandle {
    let next = next.clone();
    let outside = comm.on(&stream());
    let registration = Mutex::new(Some(registration));
    let registered = Mutex::new(None);
    comm.register_pre_hook(move |_| {
        let ended = registration.lock().expect("no panic").take();
        if let Some(ended) = ended {
            outside.tensor_deregister(&ended).expect("the end");
            let new = outside.tensor_register(&next).expect("a registration");
            *registered.lock().expect("no panic") = Some(new);
        }
    })
}

/// The operation is bound before the hook is called.
#[test]
fn a_hook_may_end_the_registration_of_an_operand() {
    const COUNT: usize = 20_000;
    type Call = fn(&Communicator, &Tensor) -> Result<()>;
    let calls: [(&str, Call); 5] = [
        ("run", |comm, x| comm.all_reduce(x, ReduceOp::Sum)),
        ("enqueued", |comm, x| {
            comm.all_reduce_async(x, ReduceOp::Sum)?.wait_blocking()
        }),
        ("captured", |comm, x| {
            let captured = stream();
            captured.begin_capture()?;
            comm.on(&captured).all_reduce(x, ReduceOp::Sum)?;
            let graph = captured.end_capture()?.instantiate()?;
            graph.run(&captured)
        }),
        ("movement", |comm, x| {
            let rows = tensor(DType::F32, 2 * COUNT)?;
            comm.all_gather_single(&rows, x)?;
            let half = rows.slice(0, COUNT)?;
            assert_eq!(half.to_vec::<f32>()?, vec![1.0; COUNT]);
            x.copy_from(&[2.0f32; COUNT])
        }),
        ("vector movement", |comm, x| {
            let rows = tensor(DType::F32, 2 * COUNT)?;
            comm.all_gather_v_single(&rows, x, &[COUNT as u64; 2])?;
            let half = rows.slice(0, COUNT)?;
            assert_eq!(half.to_vec::<f32>()?, vec![1.0; COUNT]);
            x.copy_from(&[2.0f32; COUNT])
        }),
    ];
    for algorithm in [Algorithm::Signal, Algorithm::TwoShot] {
        for (name, call) in calls {
            let mut options = Options::default();
            options.algorithm = algorithm;
            for result in run_threads(2, &options, |comm| {
                let (x, y) = (values(COUNT, 1.0)?, values(COUNT, -7.0)?);
                let registration = comm.tensor_register(&x)?;
                let hook = replace_registration(&comm, registration, &y);
                call(&comm, &x)?;
                hook.remove();
                assert_eq!(x.to_vec::<f32>()?, vec![2.0; COUNT], "{name}");
                assert_eq!(y.to_vec::<f32>()?, vec![-7.0; COUNT], "{name}");
                comm.finalize()
            }) {
                result.unwrap_or_else(|error| panic!("{name}, {algorithm:?}: {error}"));
            }
        }
    }
}

/// Registers a pre-hook that, at its first call of an operation, frees `window` and allocates
/// another one, which gets the number. Returns the hook and the new window.
fn replace_window(
    comm: &Communicator,
    window: &Window,
) -> (HookHandle, Arc<Mutex<Option<Window>>>) {
    let outside = stream();
    let window = Mutex::new(Some(window.on(&outside)));
    let new = Arc::new(Mutex::new(None));
    let (outside, of_hook) = (comm.on(&outside), Arc::clone(&new));
    let hook = comm.register_pre_hook(move |_| {
        let freed = window.lock().expect("no panic").take();
        if let Some(freed) = freed {
            let (dtype, len) = (freed.dtype(), freed.len());
            freed.free().expect("the end");
            let next = outside.alloc_window(dtype, len, WindowOptions::default());
            *of_hook.lock().expect("no panic") = Some(next.expect("a window"));
        }
    });
    (hook, new)
}

/// The operation has the number of the window, which belongs to another window after the hook.
#[test]
fn an_operation_fails_if_a_hook_frees_its_window() {
    const COUNT: usize = 256;
    type Call = fn(&Window, &Tensor, u32) -> Result<()>;
    let calls: [(&str, Call); 7] = [
        ("put", |window, x, peer| window.put(x, peer, 0)),
        ("put enqueued", |window, x, peer| {
            window.put_async(x, peer, 0)?.wait_blocking()
        }),
        ("put with signal", |window, x, peer| {
            window.put_signal(x, peer, 0, 0)
        }),
        ("put captured", |window, x, peer| {
            let captured = stream();
            captured.begin_capture()?;
            let put = window.on(&captured).put_async(x, peer, 0);
            captured.end_capture()?;
            put.map(drop)
        }),
        ("get", |window, x, peer| window.get(x, peer, 0)),
        ("signal", |window, _, peer| {
            window.signal(peer, 0, SignalUpdate::Set(5))
        }),
        ("wait", |window, _, peer| {
            window.wait_signal(0, Some(peer), Compare::Equal, 0)
        }),
    ];
    for blocks in [1, 2] {
        for (name, call) in calls {
            let mut options = Options::default();
            options.blocks = blocks;
            for result in run_threads(2, &options, |comm| {
                let x = values(COUNT, 1.0)?;
                let window = comm.alloc_window(DType::F32, COUNT, WindowOptions::default())?;
                let (hook, new) = replace_window(&comm, &window);
                let refused = call(&window, &x, 1 - comm.rank()).expect_err(name);
                hook.remove();
                let is_refusal = matches!(refused, Error::InvalidArgument { .. });
                assert!(is_refusal, "{name}: {refused}");
                let text = refused.to_string();
                assert!(text.contains("the window was freed"), "{name}: {text}");
                comm.barrier()?;
                let new = new.lock().expect("no panic").take().expect("a window");
                assert_eq!(new.tensor().to_vec::<f32>()?, vec![0.0; COUNT], "{name}");
                assert_eq!(new.read_signal(0, None)?, 0, "{name}");
                assert_eq!(x.to_vec::<f32>()?, vec![1.0; COUNT], "{name}");
                // The numbers are used again, also after a capture that was refused.
                let format = |window: &Window| format!("{window:?}");
                assert_eq!(format(&new), format(&window), "{name}");
                comm.barrier()?;
                new.free()?;
                comm.finalize()
            }) {
                result.unwrap_or_else(|error| panic!("{name}, {blocks} blocks: {error}"));
            }
        }
    }
}
