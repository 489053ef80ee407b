//! Tests of the HIP driver with a fake of the runtime and, on request, with a GPU.

use core::ffi::c_void;
use core::ptr;

use super::bindings as hip;
use super::device::Hip;
use super::fake;
use crate::Error;
use crate::gpu::{
    CaptureStatus, Driver, Export, FunctionProperties, HANDLE_BYTES, Import, LaunchShape,
    MemoryKind, Origin, RawMemory, RawStream, StreamPriority,
};

const IMAGE: &[u8] = include_bytes!("fixtures/vocab-argmax-gfx942.co");

fn driver() -> Box<dyn Driver> {
    let hip = Hip::open(&fake::FUNCTIONS, 0).unwrap();
    // Simulates another library that has changed the current device of the thread.
    fake::with(|state| state.device.set(-1));
    Box::new(hip)
}

/// Makes the next call of function `call` fail with `status`.
fn fail(call: &'static str, status: hip::hipError_t) {
    fake::with(|state| state.fail.set(Some((call, status))));
}

/// Checks the conditions that must hold after every method: the capture mode and the current device
/// of the thread are unchanged, and `hipGetLastError` returns no error of this driver.
fn check_thread() {
    fake::with(|state| {
        assert_eq!(state.device.get(), -1, "the current device");
        assert_eq!(state.mode.get(), 0);
        assert_eq!(state.last.get(), 0);
        assert!(state.fail.get().is_none(), "a failure was not used");
    });
}

unsafe extern "C" fn count(data: *mut c_void) {
    // SAFETY: the tests pass a pointer to a counter.
    unsafe { *data.cast::<u32>() += 1 };
}

#[test]
fn properties_are_asked_for() {
    let driver = driver();
    let properties = driver.properties();
    assert_eq!(driver.library(), "HIP");
    assert_eq!(properties.name, "AMD Instinct MI300X");
    assert_eq!(properties.architecture, "gfx942");
    assert_eq!(&properties.uuid, b"0123456789abcdef");
    assert_eq!(properties.memory, 192 << 30);
    assert_eq!((properties.multiprocessors, properties.warp), (304, 64));
    assert_eq!(
        (properties.max_threads, properties.shared_bytes),
        (1024, 65536)
    );
    assert_eq!(properties.version, 60_443_482);
    assert!(properties.cooperative && !properties.descriptors && !properties.multicast);
    let flags = fake::with(|state| state.flags.get());
    assert_eq!(
        flags[1],
        hip::HOST_PORTABLE | hip::HOST_MAPPED | hip::HOST_COHERENT
    );
    assert_eq!(flags[2], hip::STREAM_NON_BLOCKING);
    check_thread();
}

#[test]
fn native_atomics_are_asked_for() {
    let driver = driver();
    let atomics = || driver.native_atomics(&fake::PEER_UUID).unwrap();
    assert_eq!(atomics(), None, "there is no other GPU");
    for has in [true, false] {
        fake::with(|state| state.peer.set(Some(has)));
        assert_eq!(atomics(), Some(has));
    }
    fail("hipDeviceGetP2PAttribute", hip::ERROR_INVALID_DEVICE);
    let error = driver.native_atomics(&fake::PEER_UUID).unwrap_err();
    assert!(error.to_string().contains("hipDeviceGetP2PAttribute"));
    check_thread();
}

#[test]
fn a_code_object_that_the_runtime_does_not_know_is_refused_by_name() {
    let with_version = |abi: u8| {
        let mut image = IMAGE.to_vec();
        image[8] = abi;
        image
    };
    let (v5, v6) = (with_version(3), with_version(4));
    fake::with(|state| state.version.set(60_241_134));
    let older = driver();
    let error = older.load(&v6).unwrap_err().to_string();
    assert!(
        error.contains("code object of version 6, which needs ROCm 6.3"),
        "{error}"
    );
    assert!(error.contains("the runtime is of version 6.2"), "{error}");
    older.load(&v5).unwrap();
    fake::with(|state| state.version.set(60_332_831));
    driver().load(&v6).unwrap();
    check_thread();
}

#[test]
fn the_current_device_is_restored() {
    let driver = driver();
    for other in [-1, 3] {
        fake::with(|state| state.device.set(other));
        let changes = fake::with(|state| state.device_changes.get());
        let stream = driver.create_stream(StreamPriority::Normal).unwrap();
        // The fake refuses allocations on a thread where another device is current.
        let memory = driver.allocate(64, MemoryKind::Shared).unwrap();
        // SAFETY: the memory has 64 bytes.
        unsafe { driver.write(memory.address, &[1; 64]).unwrap() };
        // SAFETY: the memory was allocated above and is not used any more.
        unsafe { driver.release(memory).unwrap() };
        fail("hipStreamQuery", hip::ERROR_ILLEGAL_ADDRESS);
        driver.query_stream(stream).unwrap_err();
        assert_eq!(fake::with(|state| state.device.get()), other);
        let changes = fake::with(|state| state.device_changes.get()) - changes;
        assert!(changes >= 10, "two changes per call: {changes}");
    }
    // No call is made where the device is current already.
    fake::with(|state| state.device.set(0));
    let changes = fake::with(|state| state.device_changes.get());
    driver.create_stream(StreamPriority::Normal).unwrap();
    assert_eq!(fake::with(|state| state.device_changes.get()), changes);
    fake::with(|state| state.device.set(-1));
    check_thread();
}

#[test]
fn peer_access_is_enabled_once_and_refused_by_name() {
    let driver = driver();
    let enabled = || fake::with(|state| state.peer_accesses.get());
    driver.enable_peer_access(0).unwrap();
    assert_eq!(enabled(), 0, "the device itself needs no access");
    let error = driver.enable_peer_access(1).unwrap_err().to_string();
    assert!(
        error.contains("hip:0 (AMD Instinct MI300X) cannot access memory of hip:1"),
        "{error}"
    );
    fake::with(|state| state.peer.set(Some(true)));
    for _ in 0..2 {
        driver.enable_peer_access(1).unwrap();
        assert_eq!(enabled(), 1);
    }
    fake::with(|state| state.no_peer_access.set(true));
    driver.enable_peer_access(1).unwrap_err();
    fail("hipDeviceCanAccessPeer", hip::ERROR_INVALID_DEVICE);
    driver.enable_peer_access(1).unwrap_err();
    check_thread();
}

#[test]
fn streams_have_priorities() {
    let driver = driver();
    for (priority, number) in [
        (StreamPriority::Normal, 0),
        (StreamPriority::High, -1),
        (StreamPriority::Highest, -1),
    ] {
        driver.create_stream(priority).unwrap();
        assert_eq!(fake::with(|state| state.priority.get()), number);
        assert_eq!(
            fake::with(|state| state.flags.get())[2],
            hip::STREAM_NON_BLOCKING
        );
    }
    check_thread();
}

#[test]
fn the_legacy_stream_is_blocked_while_another_stream_captures() {
    let driver = driver();
    let stream = driver.create_stream(StreamPriority::Normal).unwrap();
    let legacy = || driver.capture_status(RawStream::LEGACY).unwrap();
    assert_eq!(legacy(), CaptureStatus::None);
    driver.begin_capture(stream).unwrap();
    assert_eq!(legacy(), CaptureStatus::Blocked);
    assert!(matches!(
        driver.capture_status(stream).unwrap(),
        CaptureStatus::Active(..)
    ));
    driver.end_capture(stream).unwrap();
    assert_eq!(legacy(), CaptureStatus::None);
    check_thread();
}

#[test]
fn absent_gpus_are_said_so() {
    let error = Hip::open(&fake::FUNCTIONS, 1).unwrap_err().to_string();
    assert!(
        error.starts_with("device hip:1: the process sees 1 AMD GPUs"),
        "{error}"
    );
    fail("hipInit", hip::ERROR_NO_DEVICE);
    let error = Hip::open(&fake::FUNCTIONS, 0).unwrap_err();
    assert!(matches!(&error, Error::NoDevice { device, .. } if device == "hip"));
    assert!(error.to_string().contains("/dev/kfd"), "{error}");
    check_thread();
}

#[test]
fn memory_is_zeroed_rounded_and_copied() {
    let driver = driver();
    let kinds = [(MemoryKind::Private, 4096), (MemoryKind::Shared, 2 << 20)];
    for (kind, granularity) in kinds {
        let memory = driver.allocate(5000, kind).unwrap();
        assert_eq!(memory.bytes, 5000_u64.next_multiple_of(granularity));
        let mut bytes = vec![1; memory.bytes as usize];
        // SAFETY: the range is the whole allocation.
        unsafe { driver.read(&mut bytes, memory.address) }.unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        // SAFETY: the memory is not in use and is released once.
        unsafe { driver.release(memory) }.unwrap();
    }
    assert_eq!(
        fake::with(|state| state.flags.get())[0],
        hip::MALLOC_UNCACHED
    );

    // A copy that is larger than the buffer, at an odd address.
    let bytes: Vec<u8> = (0..(5 << 19) + 3).map(|at: u32| (at % 251) as u8).collect();
    let memory = driver.allocate(3 << 20, MemoryKind::Private).unwrap();
    let mut back = vec![0; bytes.len()];
    // SAFETY: the range lies within the allocation.
    unsafe { driver.write(memory.address + 5, &bytes) }.unwrap();
    // SAFETY: the range lies within the allocation.
    unsafe { driver.read(&mut back, memory.address + 5) }.unwrap();
    assert_eq!(back, bytes);
    // SAFETY: both ranges lie within the allocation.
    unsafe {
        driver.copy(
            memory.address,
            memory.address + 5,
            100,
            driver.create_stream(StreamPriority::Normal).unwrap(),
        )
    }
    .unwrap();
    // SAFETY: the range lies within the allocation.
    unsafe { driver.read(&mut back[..100], memory.address) }.unwrap();
    assert_eq!(back[..100], bytes[..100]);
    // SAFETY: the range exceeds the allocation, and the fake returns an error without a copy (a
    // negative control).
    unsafe { driver.write(memory.address + (3 << 20) - 1, &[1, 2]) }.unwrap_err();
    check_thread();
}

#[test]
fn failures_leave_nothing_behind() {
    let driver = driver();
    let before = fake::allocations();
    fail("hipMemsetAsync", hip::ERROR_LAUNCH_FAILURE);
    driver.allocate(1, MemoryKind::Shared).unwrap_err();
    fail("hipHostGetDevicePointer", 1);
    driver.allocate_host(16).unwrap_err();
    fail("hipMalloc", hip::ERROR_OUT_OF_MEMORY);
    let error = driver
        .allocate(1, MemoryKind::Private)
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("HIP: hipMalloc: hipErrorFake (2): as asked for; free memory"),
        "{error}"
    );
    assert_eq!(fake::allocations(), before);
    driver.allocate(u64::MAX, MemoryKind::Private).unwrap_err();
    driver.allocate_host(0).unwrap_err();
    check_thread();
}

#[test]
fn memory_is_shared_by_its_base() {
    let driver = driver();
    let memory = driver.allocate(4096, MemoryKind::Shared).unwrap();
    let (export, base, bytes) = driver.export_foreign(memory.address + 24).unwrap();
    let Export::Ipc(handle, 24) = export else {
        panic!("{export:?}");
    };
    assert_eq!((base, bytes), (memory.address, memory.bytes));
    let imported = driver.import(Import::Ipc(&handle), memory.bytes).unwrap();
    assert_eq!(imported.origin, Origin::ImportedIpc);
    // SAFETY: the memory is not in use and is released once.
    unsafe { driver.release(imported) }.unwrap();

    // A size that exceeds the allocation is refused, and the mapping is closed.
    let before = fake::allocations();
    let error = driver
        .import(Import::Ipc(&handle), memory.bytes + 1)
        .unwrap_err();
    assert!(
        error.to_string().contains("the peer reports 2097153 bytes"),
        "{error}"
    );
    assert_eq!(fake::allocations(), before);
    driver
        .import(Import::Fabric(&[0; HANDLE_BYTES]), 1)
        .unwrap_err();
    driver
        .import(Import::Ipc(&[0; HANDLE_BYTES]), 1)
        .unwrap_err();
    driver.export_foreign(64).unwrap_err();
    let foreign = RawMemory {
        origin: Origin::Virtual,
        ..memory
    };
    // SAFETY: the driver returns an error for this origin and does not free the memory.
    unsafe { driver.release(foreign) }.unwrap_err();
    check_thread();
}

#[test]
fn kernels_are_found_and_launched() {
    let driver = driver();
    let module = driver.load(IMAGE).unwrap();
    assert_eq!(driver.function(module, c"other").unwrap(), None);
    assert_eq!(driver.function(module, c"").unwrap(), None);
    check_thread();
    let function = driver.function(module, c"vocab_argmax").unwrap().unwrap();
    let parameters = driver.parameters(function).unwrap().unwrap();
    assert_eq!(parameters.len(), 8);
    assert_eq!(parameters[7], (56, 8));
    let properties = FunctionProperties {
        registers: 104,
        local_bytes: 103,
        shared_bytes: 101,
        max_threads: 100,
        dependent_launch: false,
    };
    assert_eq!(driver.function_properties(function).unwrap(), properties);
    assert_eq!(driver.resident_blocks(function, 512, 0).unwrap(), 4);
    assert_eq!(driver.resident_blocks(function, 512, 65536).unwrap(), 1);

    let stream = driver.create_stream(StreamPriority::Normal).unwrap();
    let mut argument = 77_u32;
    let mut arguments = [ptr::from_mut(&mut argument).cast::<c_void>()];
    for cooperative in [false, true] {
        let shape = LaunchShape {
            blocks: 304,
            threads: 512,
            shared_bytes: 64,
            cooperative,
            ..LaunchShape::default()
        };
        // SAFETY: the fake reads one u32, which `arguments` points to.
        unsafe { driver.launch(function, &shape, &mut arguments, stream) }.unwrap();
        let launched = fake::with(|state| state.launched.take());
        assert_eq!(launched, Some((cooperative, 304, 512, 64, 77)));
        let cluster = LaunchShape {
            cluster: 4,
            ..shape
        };
        // SAFETY: the fake reads one u32, which `arguments` points to.
        unsafe { driver.launch(function, &cluster, &mut arguments, stream) }.unwrap_err();
        assert_eq!(fake::with(|state| state.launched.take()), None);
    }

    fail("hipModuleLoadData", hip::ERROR_NO_BINARY);
    let error = driver.load(IMAGE).unwrap_err().to_string();
    assert!(
        error.contains("for amdgcn-amd-amdhsa--gfx942, the GPU is gfx942"),
        "{error}"
    );
    driver.load(b".version 8.0\0").unwrap_err();
    driver.function(crate::gpu::RawModule(1), c"x").unwrap_err();
    driver.parameters(crate::gpu::RawFunction(1)).unwrap_err();
    check_thread();
}

#[test]
fn streams_and_events_say_whether_they_are_done() {
    let driver = driver();
    let stream = driver.create_stream(StreamPriority::Normal).unwrap();
    let (start, end) = (
        driver.create_event(true).unwrap(),
        driver.create_event(false).unwrap(),
    );
    assert_eq!((start.0, end.0), (0x80, 0x82));
    driver.record_event(start, stream).unwrap();
    driver.wait_event(stream, start).unwrap();
    assert!(driver.query_stream(stream).unwrap() && driver.query_event(end).unwrap());
    for call in ["hipStreamQuery", "hipEventQuery"] {
        fail(call, hip::ERROR_NOT_READY);
        assert!(!(driver.query_stream(stream).unwrap() && driver.query_event(end).unwrap()));
        fail(call, hip::ERROR_ILLEGAL_ADDRESS);
        let both = driver
            .query_stream(stream)
            .and_then(|_| driver.query_event(end));
        assert!(both.unwrap_err().to_string().contains("(700)"));
    }
    assert!((driver.elapsed(start, end).unwrap() - 1.5).abs() < f32::EPSILON);
    let mut calls = 0_u32;
    // SAFETY: the counter outlives the call.
    unsafe { driver.host_function(stream, count, ptr::from_mut(&mut calls).cast()) }.unwrap();
    assert_eq!(calls, 1);
    check_thread();
}

#[test]
fn streams_wait_for_words_and_write_them() {
    let driver = driver();
    let stream = driver.create_stream(StreamPriority::Normal).unwrap();
    let at = driver.allocate(4, MemoryKind::Private).unwrap().address;
    let word = || {
        let mut word = [0; 4];
        // SAFETY: the allocation contains the word.
        unsafe { driver.read(&mut word, at) }.unwrap();
        u32::from_ne_bytes(word)
    };
    let other = driver.create_stream(StreamPriority::Normal).unwrap();
    // SAFETY: the allocation contains the word and is never freed.
    unsafe { driver.wait_value(other, at, 3) }.unwrap();
    assert!(!driver.query_stream(other).unwrap(), "the word is 0");
    // SAFETY: the allocation contains the word and is never freed.
    unsafe { driver.write_value(stream, at, 3) }.unwrap();
    assert_eq!(word(), 3);
    assert!(driver.query_stream(other).unwrap());
    for call in ["hipStreamWaitValue32", "hipStreamWriteValue32"] {
        fail(call, hip::ERROR_ILLEGAL_ADDRESS);
        // SAFETY: the allocation contains the word and is never freed.
        let waited = unsafe { driver.wait_value(stream, at, 3) };
        // SAFETY: the allocation contains the word and is never freed.
        let both = waited.and_then(|()| unsafe { driver.write_value(stream, at, 3) });
        let text = both.unwrap_err().to_string();
        assert!(text.contains(call) && text.contains("(700)"), "{text}");
    }
    check_thread();
}

#[test]
fn calls_during_a_capture_are_allowed() {
    let driver = driver();
    let stream = driver.create_stream(StreamPriority::Normal).unwrap();
    assert_eq!(driver.capture_status(stream).unwrap(), CaptureStatus::None);
    driver.begin_capture(stream).unwrap();
    let CaptureStatus::Active(7, graph) = driver.capture_status(stream).unwrap() else {
        panic!("not captured");
    };
    let memory = driver.allocate(1, MemoryKind::Shared).unwrap();
    // SAFETY: the range lies within the allocation.
    unsafe { driver.write(memory.address, &[1]) }.unwrap();
    // SAFETY: the memory is not in use and is released once.
    unsafe { driver.release(memory) }.unwrap();
    // Negative control: if the thread is not in relaxed mode, the fake returns an error for an
    // allocation.
    let mut pointer = ptr::null_mut();
    // SAFETY: `pointer` is writable.
    let status = unsafe { (fake::FUNCTIONS.hipMalloc)(&mut pointer, 8) };
    assert_eq!(status, hip::ERROR_CAPTURE_UNSUPPORTED);
    fake::with(|state| state.last.set(0));
    assert_eq!(driver.end_capture(stream).unwrap(), graph);
    assert_eq!(driver.graph_nodes(graph).unwrap(), 3);
    let exec = driver.instantiate(graph).unwrap();
    // SAFETY: the fake does not execute the graph.
    unsafe { driver.launch_graph(exec, stream) }.unwrap();
    // SAFETY: the graph is not in use and is destroyed once.
    unsafe { driver.destroy_exec(exec) }.unwrap();
    check_thread();
}

#[test]
fn a_cooperative_launch_that_was_not_captured_is_an_error() {
    let driver = driver();
    let module = driver.load(IMAGE).unwrap();
    let function = driver.function(module, c"vocab_argmax").unwrap().unwrap();
    let stream = driver.create_stream(StreamPriority::Normal).unwrap();
    let mut argument = 1_u32;
    let mut arguments = [ptr::from_mut(&mut argument).cast::<c_void>()];
    let shape = LaunchShape {
        blocks: 1,
        threads: 64,
        cooperative: true,
        ..LaunchShape::default()
    };
    for old in [false, true] {
        fake::with(|state| state.old.set(old));
        // SAFETY: the fake reads one u32, which `arguments` points to.
        unsafe { driver.launch(function, &shape, &mut arguments, stream) }.unwrap();
        driver.begin_capture(stream).unwrap();
        // SAFETY: the fake reads one u32, which `arguments` points to.
        let launched = unsafe { driver.launch(function, &shape, &mut arguments, stream) };
        driver.end_capture(stream).unwrap();
        assert_eq!(launched.is_err(), old);
    }
    check_thread();
}

#[test]
fn graphs_call_back_when_they_took_the_data() {
    let driver = driver();
    let stream = driver.create_stream(StreamPriority::Normal).unwrap();
    driver.begin_capture(stream).unwrap();
    let graph = driver.end_capture(stream).unwrap();
    let mut calls = 0_u32;
    let data = ptr::from_mut(&mut calls).cast::<c_void>();
    for call in ["hipUserObjectCreate", "hipGraphRetainUserObject"] {
        fail(call, 1);
        // SAFETY: the counter outlives the graph.
        unsafe { driver.retain(graph, count, data) }.unwrap_err();
        // SAFETY: the counter is alive.
        assert_eq!(unsafe { *data.cast::<u32>() }, 0);
        fake::with(|state| state.fail.set(None));
    }
    // SAFETY: the counter outlives the graph.
    unsafe { driver.retain(graph, count, data) }.unwrap();
    // SAFETY: the counter is alive.
    assert_eq!(unsafe { *data.cast::<u32>() }, 0);
    // SAFETY: the graph is not in use and is destroyed once.
    unsafe { driver.destroy_graph(graph) }.unwrap();
    // SAFETY: the counter is alive.
    assert_eq!(unsafe { *data.cast::<u32>() }, 1);
    check_thread();
}

/// Tests memory, a stream, a captured copy and a code object on a machine with ROCm. The code
/// object must load on gfx942. On other GPUs, the load may return an error.
#[test]
#[ignore = "needs an AMD GPU"]
fn on_a_gpu() {
    let devices = super::devices().unwrap();
    assert!(!devices.is_empty());
    let driver = super::open(0).unwrap();
    assert_eq!(driver.properties(), &devices[0]);
    let stream = driver.create_stream(StreamPriority::Normal).unwrap();
    let memory = driver.allocate(1 << 20, MemoryKind::Shared).unwrap();
    let bytes: Vec<u8> = (0..1 << 19).map(|at: u32| (at % 251) as u8).collect();
    // SAFETY: the range lies within the allocation.
    unsafe { driver.write(memory.address + 5, &bytes) }.unwrap();
    driver.begin_capture(stream).unwrap();
    let half = memory.address + (1 << 20);
    // SAFETY: both ranges lie within the allocation of two MiB.
    unsafe { driver.copy(half, memory.address + 5, bytes.len() as u64, stream) }.unwrap();
    let graph = driver.end_capture(stream).unwrap();
    assert_eq!(driver.graph_nodes(graph).unwrap(), 1);
    let exec = driver.instantiate(graph).unwrap();
    // SAFETY: the graph's memory is alive.
    unsafe { driver.launch_graph(exec, stream) }.unwrap();
    driver.synchronize_stream(stream).unwrap();
    let mut back = vec![0; bytes.len()];
    // SAFETY: the range lies within the allocation.
    unsafe { driver.read(&mut back, half) }.unwrap();
    assert_eq!(back, bytes);
    let (Export::Ipc(_, 5), base, _) = driver.export_foreign(memory.address + 5).unwrap() else {
        panic!("not by IPC");
    };
    assert_eq!(base, memory.address);
    match driver.load(IMAGE) {
        Ok(module) => assert!(driver.function(module, c"vocab_argmax").unwrap().is_some()),
        Err(error) => assert_ne!(driver.properties().architecture, "gfx942", "{error}"),
    }
    // SAFETY: the graph has completed its work.
    unsafe { driver.destroy_exec(exec) }.unwrap();
    // SAFETY: the graph is not in use and is destroyed once.
    unsafe { driver.destroy_graph(graph) }.unwrap();
    // SAFETY: the memory is not in use and is released once.
    unsafe { driver.release(memory) }.unwrap();
    // SAFETY: the stream is idle and is destroyed once.
    unsafe { driver.destroy_stream(stream) }.unwrap();
}
