//! Tests several GPUs in one process: peer access, and the current context of the caller's thread.

use core::cell::Cell;

use fusewire::{
    Algorithm, Compare, Device, Error, ReduceOp, Result, Stream, Tensor, WindowOptions,
    run_threads_each,
};
use fusewire::{Communicator, DType};
use fusewire_tests::fake::Fake;

use crate::{on_fake, options};

/// Runs all kinds of accesses to memory of peers: staged, allocated in a window, registered, and
/// windows.
fn exchange(comm: &Communicator) -> Result<()> {
    let (device, size) = (comm.device(), comm.size());
    let fake = Fake::open().expect("the fake");
    let check = |x: &Tensor, what: &str| -> Result<()> {
        x.copy_from(&vec![comm.rank() as f32 + 1.0; x.len()])?;
        comm.all_reduce(x, ReduceOp::Sum)?;
        let sum = (size * (size + 1) / 2) as f32;
        assert_eq!(x.to_vec::<f32>()?, vec![sum; x.len()], "{what}");
        Ok(())
    };
    for count in [7, 100_000] {
        check(&comm.alloc(DType::F32, count)?, "in a window")?;
        let x = Tensor::on_device(device, DType::F32, count)?;
        check(&x, "staged")?;
        let registration = comm.tensor_register(&x)?;
        check(&x, "registered")?;
        comm.tensor_deregister(&registration)?;
    }
    // Memory of another library, which the fake allocates on the current device.
    let Device::Cuda(ordinal) = device else {
        panic!("not CUDA: {device}");
    };
    fake.make_current(fake.primary_context(ordinal as i32));
    let raw = fake.allocate(4000);
    fake.make_current(0);
    // SAFETY: the memory has 4000 bytes, and is never freed.
    let x = unsafe { Tensor::adopt(device, raw, DType::F32, 1000, None)? };
    let registration = comm.tensor_register(&x)?;
    check(&x, "registered memory of cuMemAlloc")?;
    comm.tensor_deregister(&registration)?;

    let window = comm.alloc_window(DType::U64, 100, WindowOptions::default())?;
    let next = (comm.rank() + 1) % size;
    let before = (comm.rank() + size - 1) % size;
    let source = Tensor::on_device(device, DType::U64, 50)?;
    source.copy_from(&vec![u64::from(comm.rank()); 50])?;
    window.put_signal(&source, next, 50, 0)?;
    window.wait_signal(0, Some(before), Compare::GreaterEqual, 1)?;
    let got = window.tensor().slice(50, 50)?.to_vec::<u64>()?;
    assert_eq!(got, vec![u64::from(before); 50]);
    comm.barrier()?;
    window.free()
}

fn on_each<R: Send>(ranks: u32, body: impl Fn(Communicator) -> Result<R> + Sync) -> Vec<Result<R>> {
    let mut options = options();
    // With this algorithm, peers write to registered memory.
    options.algorithm = Algorithm::TwoShot;
    run_threads_each(Device::Cuda, "fusewire", ranks, &options, body)
}

#[test]
fn peer_access_is_enabled_for_memory_at_its_own_address() {
    let test = "several::peer_access_is_enabled_for_memory_at_its_own_address";
    for descriptors in ["0", "1"] {
        let environment = [
            ("FUSEWIRE_CUDA_FAKE_DEVICES", "4"),
            ("FUSEWIRE_CUDA_FAKE_DESCRIPTORS", descriptors),
        ];
        on_fake(test, &environment, || {
            let fake = Fake::open().expect("the fake");
            for ranks in [2, 4] {
                for result in on_each(ranks, |comm| exchange(&comm)) {
                    result.expect("every rank");
                }
                assert!(fake.calls(c"cuCtxEnablePeerAccess") > 0);
            }
        });
    }
}

/// Negative control: the fake refuses kernels that use memory of another GPU if the driver reports
/// that access is enabled although it is not.
#[test]
fn a_kernel_without_peer_access_fails() {
    let test = "several::a_kernel_without_peer_access_fails";
    let environment = [
        ("FUSEWIRE_CUDA_FAKE_DEVICES", "2"),
        ("FUSEWIRE_CUDA_FAKE_DESCRIPTORS", "0"),
    ];
    on_fake(test, &environment, || {
        let fake = Fake::open().expect("the fake");
        const ALREADY_ENABLED: u32 = 704;
        for nth in 1..=2 {
            fake.fail(c"cuCtxEnablePeerAccess", nth, ALREADY_ENABLED);
        }
        let results = on_each(2, |comm| comm.barrier());
        let errors: Vec<_> = results.into_iter().filter_map(Result::err).collect();
        assert!(!errors.is_empty(), "no rank noticed");
        let text = errors.iter().map(ToString::to_string).collect::<String>();
        assert!(text.contains("ILLEGAL_ADDRESS"), "{text}");
    });
}

#[test]
fn gpus_without_peer_access_are_refused_by_name() {
    let test = "several::gpus_without_peer_access_are_refused_by_name";
    let environment = [
        ("FUSEWIRE_CUDA_FAKE_DEVICES", "2"),
        ("FUSEWIRE_CUDA_FAKE_DESCRIPTORS", "0"),
        ("FUSEWIRE_CUDA_FAKE_PEER_ACCESS", "0"),
    ];
    on_fake(test, &environment, || {
        for result in on_each(2, |_| Ok(())) {
            let error = result.expect_err("the GPUs are not connected");
            let text = error.to_string();
            assert!(text.contains("cannot access memory of cuda:"), "{text}");
        }
    });
}

/// Calls everything with another context current, and checks after each call that it still is.
#[test]
fn the_callers_context_stays_current() {
    let test = "several::the_callers_context_stays_current";
    let environment = [("FUSEWIRE_CUDA_FAKE_DEVICES", "2")];
    on_fake(test, &environment, || {
        let fake = Fake::open().expect("the fake");
        let of_device_0 = fake.primary_context(0);
        for context in [of_device_0, 0] {
            fake.make_current(context);
            let checks = Cell::new(0);
            let check = |what: &str| {
                assert_eq!(fake.current_context(), context, "after {what}");
                checks.set(checks.get() + 1);
            };
            let device = Device::Cuda(1);
            let store = std::sync::Arc::new(fusewire::store::MemoryStore::new());
            let name = format!("context-{context:x}");
            let comm =
                Communicator::new(device, 0, 1, store, &name, options()).expect("a communicator");
            check("Communicator::new");
            let x = comm.alloc(DType::F32, 1000).expect("memory");
            check("alloc");
            x.copy_from(&[2f32; 1000]).expect("a copy");
            check("copy_from");
            comm.all_reduce(&x, ReduceOp::Sum).expect("all_reduce");
            check("all_reduce");
            let work = comm
                .all_reduce_async(&x, ReduceOp::Sum)
                .expect("all_reduce");
            check("all_reduce_async");
            work.wait_blocking().expect("the work");
            check("Work::wait");
            let y = Tensor::on_device(device, DType::F32, 1000).expect("memory");
            check("Tensor::on_device");
            let registration = comm.tensor_register(&y).expect("a registration");
            check("tensor_register");
            comm.tensor_deregister(&registration)
                .expect("the end of it");
            check("tensor_deregister");
            let stream = Stream::on_device(device).expect("a stream");
            check("Stream::on_device");
            let on = comm.on(&stream);
            stream.begin_capture().expect("a capture");
            check("begin_capture");
            on.all_reduce_async(&x, ReduceOp::Sum).expect("captured");
            check("a captured all_reduce");
            let graph = stream.end_capture().expect("a graph");
            check("end_capture");
            let exec = graph.instantiate().expect("an instance");
            check("instantiate");
            exec.run(&stream).expect("a replay");
            check("a replay");
            let window = comm
                .alloc_window(DType::F32, 10, WindowOptions::default())
                .expect("a window");
            check("alloc_window");
            window.free().expect("the end of it");
            check("the end of a window");
            // Failing calls.
            const INVALID_VALUE: u32 = 1;
            for call in [c"cuEventRecord", c"cuLaunchKernel", c"cuStreamSynchronize"] {
                fake.fail(call, 1, INVALID_VALUE);
            }
            let failed = stream.synchronize();
            check("a failed synchronize");
            assert!(matches!(failed, Err(Error::Driver { .. })), "{failed:?}");
            let failed = comm.all_reduce(&x, ReduceOp::Sum);
            check("a failed all_reduce");
            failed.expect_err("the launch fails");
            drop((exec, graph, on, stream));
            check("drop of a stream");
            drop((x, y));
            check("drop of tensors");
            drop(comm);
            check("drop of the communicator");
            assert!(checks.get() > 20);
        }
        // The context was changed during the calls: without it, no call would have succeeded.
        assert!(fake.calls(c"cuCtxPushCurrent_v2") > 0);
    });
}
