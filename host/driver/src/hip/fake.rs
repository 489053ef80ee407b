//! Fake of the HIP runtime for tests without a GPU. The fake uses host memory. It executes the work
//! of a stream immediately, unless earlier work of the stream's [hardware queue](hardware_queues)
//! is not complete. It returns errors for calls that the documentation forbids, even if the real
//! runtime might accept them: calls without a current device, calls that are not permitted during a
//! capture, and calls with a range outside an allocation, with the null stream or with unknown
//! flags.

mod hardware_queues;

use core::cell::{Cell, RefCell};
use core::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};
use core::ptr;
use std::collections::BTreeMap;

use super::bindings::{
    self as hip, Prop, hipDeviceptr_t, hipError_t, hipEvent_t, hipFunction_t, hipGraph_t,
    hipGraphExec_t, hipGraphNode_t, hipHostFn_t, hipIpcMemHandle_t, hipModule_t, hipStream_t,
    hipUUID, hipUserObject_t,
};
use super::library::Functions;
use hardware_queues::HardwareQueues;

/// Result of a host call that waits for work that cannot run: `hipErrorLaunchTimeOut`. The real
/// runtime would not return.
pub(super) const WOULD_HANG: hipError_t = 702;

/// `hipErrorInvalidHandle`.
const ERROR_INVALID_HANDLE: hipError_t = 400;

/// State of the fake for one thread. Each test runs on a separate thread and therefore has separate
/// state.
#[derive(Default)]
pub(super) struct State {
    /// Allocations: base address and memory.
    memory: RefCell<BTreeMap<usize, Box<[u64]>>>,
    /// Current device of the thread, or -1 if no device has been set.
    pub(super) device: Cell<c_int>,
    /// Capture mode of the thread.
    pub(super) mode: Cell<c_uint>,
    /// Latest error of the thread.
    pub(super) last: Cell<hipError_t>,
    /// Name of a function and the error that the next call of the function returns.
    pub(super) fail: Cell<Option<(&'static str, hipError_t)>>,
    /// Number of nodes that the current capture has recorded, or `None` if no capture is active.
    pub(super) capture: Cell<Option<usize>>,
    /// If true, cooperative launches run immediately even on a capturing stream, as in old
    /// runtimes.
    pub(super) old: Cell<bool>,
    /// Set if there is a device 1: true if device 0 has native atomics for its memory.
    pub(super) peer: Cell<Option<bool>>,
    /// Version of the runtime, or 0 for ROCm 6.4.
    pub(super) version: Cell<c_int>,
    /// True if device 0 cannot access the memory of device 1.
    pub(super) no_peer_access: Cell<bool>,
    /// Number of successful calls of `hipDeviceEnablePeerAccess`.
    pub(super) peer_accesses: Cell<u32>,
    /// Number of calls that have set the current device.
    pub(super) device_changes: Cell<u32>,
    pub(super) queues: RefCell<HardwareQueues>,
    /// If not 0, kernels launched from now on run until the u32 at this address is not 0.
    pub(super) kernels_poll: Cell<usize>,
    /// Priority of the latest stream.
    pub(super) priority: Cell<c_int>,
    /// Latest launch.
    pub(super) launched: Cell<Option<LaunchRecord>>,
    /// Flags of the latest allocation of shared memory, the latest allocation of host memory, and
    /// the latest creation of a stream.
    pub(super) flags: Cell<[c_uint; 3]>,
    /// Destructor and data of the user object.
    object: Cell<Option<(hipHostFn_t, *mut c_void)>>,
}

/// A launch: true if cooperative, number of blocks, threads per block, bytes of shared memory, and
/// first argument.
pub(super) type LaunchRecord = (bool, u32, u32, u32, u32);

thread_local! {
    static STATE: State = State {
        device: Cell::new(-1),
        ..State::default()
    };
}

/// Calls `act` with the state of the fake for this thread.
pub(super) fn with<T>(act: impl FnOnce(&State) -> T) -> T {
    STATE.with(act)
}

/// Returns the error that a test has set for `call`, otherwise `status`. Stores an error as the
/// latest error of the thread.
fn done(call: &'static str, status: hipError_t) -> hipError_t {
    with(|state| {
        let status = match state.fail.get() {
            Some((name, status)) if name == call => {
                state.fail.set(None);
                status
            }
            _ => status,
        };
        if status != hip::SUCCESS {
            state.last.set(status);
        }
        status
    })
}

/// Returns true if a test has set an error for the next call of `call`.
fn fails(call: &'static str) -> bool {
    with(|state| state.fail.get().is_some_and(|(name, _)| name == call))
}

/// Checks a call of a kind that is not permitted during a capture, such as an allocation. Returns
/// the error if a stream is being captured and the thread is not in relaxed mode, if device 0 is
/// not current, or if a test has set an error for `call`. Otherwise returns `None`.
fn unsafe_call(call: &'static str) -> Option<hipError_t> {
    let state = with(|state| (state.mode.get(), state.capture.get(), state.device.get()));
    match state {
        (mode, Some(_), _) if mode != hip::CAPTURE_RELAXED => {
            Some(done(call, hip::ERROR_CAPTURE_UNSUPPORTED))
        }
        (_, _, 0) => fails(call).then(|| done(call, 0)),
        _ => Some(done(call, hip::ERROR_INVALID_DEVICE)),
    }
}

fn allocate(call: &'static str, out: *mut *mut c_void, bytes: usize) -> hipError_t {
    if let Some(status) = unsafe_call(call) {
        return status;
    }
    let mut memory = vec![0xa5a5_a5a5_a5a5_a5a5_u64; bytes.div_ceil(8)].into_boxed_slice();
    let base = memory.as_mut_ptr();
    with(|state| state.memory.borrow_mut().insert(base as usize, memory));
    // SAFETY: the driver passes a writable pointer.
    unsafe { *out = base.cast() };
    done(call, hip::SUCCESS)
}

fn free(call: &'static str, pointer: *mut c_void) -> hipError_t {
    if let Some(status) = unsafe_call(call) {
        return status;
    }
    let found = with(|state| state.memory.borrow_mut().remove(&(pointer as usize)));
    let known = found.is_some();
    done(
        call,
        if known {
            hip::SUCCESS
        } else {
            hip::ERROR_INVALID_DEVICE_POINTER
        },
    )
}

/// Returns the base address and the size in bytes of the allocation that contains an address.
fn range(address: usize) -> Option<(usize, usize)> {
    with(|state| {
        let memory = state.memory.borrow();
        let (base, words) = memory.range(..=address).next_back()?;
        (address - base < words.len() * 8).then_some((*base, words.len() * 8))
    })
}

/// Returns true if an allocation contains a range.
fn contains(address: usize, bytes: usize) -> bool {
    range(address).is_some_and(|(base, size)| address - base + bytes <= size)
}

/// Returns the u32 at an address, or `None` if no allocation contains it.
fn load(address: usize) -> Option<u32> {
    // SAFETY: the word lies within an allocation, and only this thread accesses the memory.
    contains(address, 4).then(|| unsafe { (address as *const u32).read_unaligned() })
}

/// Enqueues the work of a call.
fn enqueue(
    call: &'static str,
    stream: hipStream_t,
    work: impl FnMut() -> bool + 'static,
) -> hipError_t {
    if fails(call) {
        return done(call, hip::SUCCESS);
    }
    let known = with(|state| state.queues.borrow_mut().enqueue(stream as usize, work));
    done(
        call,
        if known {
            hip::SUCCESS
        } else {
            ERROR_INVALID_HANDLE
        },
    )
}

/// Enqueues a kernel, which runs until the word that a test has set is not 0.
fn enqueue_kernel(call: &'static str, stream: hipStream_t) -> hipError_t {
    let word = with(|state| state.kernels_poll.get());
    enqueue(call, stream, move || word == 0 || load(word) != Some(0))
}

/// Returns the number of allocations.
pub(super) fn allocations() -> usize {
    with(|state| state.memory.borrow().len())
}

/// Writes through a pointer that the driver passed.
fn put<T>(out: *mut T, value: T) {
    // SAFETY: the driver passes writable out parameters.
    unsafe { *out = value };
}

fn set_flag(at: usize, flags: c_uint) {
    with(|state| {
        let mut all = state.flags.get();
        all[at] = flags;
        state.flags.set(all);
    });
}

macro_rules! fake {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty $body:block)*) => {
        /// Functions of the fake.
        pub(super) static FUNCTIONS: Functions = Functions {
            $($name: {
                #[allow(non_snake_case)]
                unsafe extern "C" fn $name($($argument: $type),*) -> $result $body
                $name
            },)*
        };
    };
}

/// Identifier of device 1.
pub(super) const PEER_UUID: [u8; 16] = *b"fedcba9876543210";

const GRAPH: usize = 0x61;

fake! {
    hipInit(_flags: c_uint) -> hipError_t { done("hipInit", 0) }
    hipGetDeviceCount(count: *mut c_int) -> hipError_t {
        put(count, with(|state| state.peer.get()).map_or(1, |_| 2));
        done("hipGetDeviceCount", 0)
    }
    hipRuntimeGetVersion(version: *mut c_int) -> hipError_t {
        let set = with(|state| state.version.get());
        put(version, if set == 0 { 60_443_482 } else { set });
        done("hipRuntimeGetVersion", 0)
    }
    hipGetDevice(device: *mut c_int) -> hipError_t {
        put(device, with(|state| state.device.get()));
        done("hipGetDevice", 0)
    }
    hipDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) -> hipError_t {
        let there = with(|state| state.peer.get().is_some() && !state.no_peer_access.get());
        if (device, peer) != (0, 1) {
            return done("hipDeviceCanAccessPeer", hip::ERROR_INVALID_DEVICE);
        }
        put(can, c_int::from(there));
        done("hipDeviceCanAccessPeer", 0)
    }
    hipDeviceEnablePeerAccess(peer: c_int, flags: c_uint) -> hipError_t {
        let (device, enabled) = with(|state| (state.device.get(), state.peer_accesses.get()));
        if flags != 0 || (device, peer) != (0, 1) {
            return done("hipDeviceEnablePeerAccess", hip::ERROR_INVALID_DEVICE);
        }
        if enabled > 0 {
            return done("hipDeviceEnablePeerAccess", hip::ERROR_PEER_ACCESS_ALREADY_ENABLED);
        }
        with(|state| state.peer_accesses.set(1));
        done("hipDeviceEnablePeerAccess", 0)
    }
    hipDeviceGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> hipError_t {
        put(least, 1);
        put(greatest, -1);
        done("hipDeviceGetStreamPriorityRange", 0)
    }
    hipSetDevice(device: c_int) -> hipError_t {
        with(|state| state.device.set(device));
        with(|state| state.device_changes.set(state.device_changes.get() + 1));
        done("hipSetDevice", 0)
    }
    hipDeviceGetAttribute(value: *mut c_int, attribute: c_uint, _device: c_int) -> hipError_t {
        put(value, match attribute {
            hip::ATTRIBUTE_COOPERATIVE => 1,
            hip::ATTRIBUTE_MAX_THREADS => 1024,
            hip::ATTRIBUTE_MULTIPROCESSORS => 304,
            hip::ATTRIBUTE_SHARED_BYTES => 65536,
            hip::ATTRIBUTE_WARP => 64,
            hip::ATTRIBUTE_PCI_BUS | hip::ATTRIBUTE_PCI_DEVICE | hip::ATTRIBUTE_PCI_DOMAIN => 3,
            _ => return done("hipDeviceGetAttribute", 1),
        });
        done("hipDeviceGetAttribute", 0)
    }
    hipDeviceGetP2PAttribute(
        value: *mut c_int, attribute: c_uint, device: c_int, peer: c_int
    ) -> hipError_t {
        let atomics = with(|state| state.peer.get());
        match (atomics, attribute, device, peer) {
            (Some(atomics), hip::P2P_NATIVE_ATOMICS, 0, 1) => put(value, c_int::from(atomics)),
            _ => return done("hipDeviceGetP2PAttribute", 1),
        }
        done("hipDeviceGetP2PAttribute", 0)
    }
    hipDeviceGetName(name: *mut c_char, _len: c_int, _device: c_int) -> hipError_t {
        // SAFETY: the driver's buffer has 256 bytes.
        unsafe { name.copy_from(c"AMD Instinct MI300X".as_ptr(), 20) };
        done("hipDeviceGetName", 0)
    }
    hipDeviceGetUuid(uuid: *mut hipUUID, device: c_int) -> hipError_t {
        let bytes = if device == 1 { PEER_UUID } else { *b"0123456789abcdef" };
        put(uuid, hipUUID { bytes: bytes.map(u8::cast_signed) });
        done("hipDeviceGetUuid", 0)
    }
    hipDeviceTotalMem(bytes: *mut usize, _device: c_int) -> hipError_t {
        put(bytes, 192 << 30);
        done("hipDeviceTotalMem", 0)
    }
    hipGetDevicePropertiesR0600(prop: *mut Prop, _device: c_int) -> hipError_t {
        let name = b"gfx942:sramecc+:xnack-\0";
        let out = prop.cast::<u8>().wrapping_add(hip::PROP_ARCHITECTURE);
        // SAFETY: the driver's buffer is larger than the structure.
        unsafe { out.copy_from(name.as_ptr(), name.len()) };
        done("hipGetDevicePropertiesR0600", 0)
    }
    hipGetErrorName(_error: hipError_t) -> *const c_char { c"hipErrorFake".as_ptr() }
    hipGetErrorString(_error: hipError_t) -> *const c_char { c"as asked for".as_ptr() }
    hipGetLastError() -> hipError_t { with(|state| state.last.replace(0)) }
    hipMalloc(out: *mut *mut c_void, bytes: usize) -> hipError_t {
        allocate("hipMalloc", out, bytes)
    }
    hipExtMallocWithFlags(out: *mut *mut c_void, bytes: usize, flags: c_uint) -> hipError_t {
        set_flag(0, flags);
        allocate("hipExtMallocWithFlags", out, bytes)
    }
    hipFree(pointer: *mut c_void) -> hipError_t { free("hipFree", pointer) }
    hipMemGetAddressRange(
        base: *mut hipDeviceptr_t, bytes: *mut usize, address: hipDeviceptr_t
    ) -> hipError_t {
        let Some(found) = range(address as usize) else {
            return done("hipMemGetAddressRange", hip::ERROR_INVALID_DEVICE_POINTER);
        };
        put(base, found.0 as hipDeviceptr_t);
        put(bytes, found.1);
        done("hipMemGetAddressRange", 0)
    }
    hipIpcGetMemHandle(handle: *mut hipIpcMemHandle_t, pointer: *mut c_void) -> hipError_t {
        let mut reserved = [0; 64];
        let bytes = (pointer as usize).to_le_bytes().map(u8::cast_signed);
        reserved[..8].copy_from_slice(&bytes);
        put(handle, hipIpcMemHandle_t { reserved });
        done("hipIpcGetMemHandle", 0)
    }
    hipIpcOpenMemHandle(
        out: *mut *mut c_void, handle: hipIpcMemHandle_t, flags: c_uint
    ) -> hipError_t {
        if flags != 1 {
            return done("hipIpcOpenMemHandle", 1);
        }
        let bytes: [c_char; 8] = core::array::from_fn(|at| handle.reserved[at]);
        let address = usize::from_le_bytes(bytes.map(c_char::cast_unsigned));
        let Some((_, bytes)) = range(address) else {
            return done("hipIpcOpenMemHandle", hip::ERROR_INVALID_DEVICE_POINTER);
        };
        allocate("hipIpcOpenMemHandle", out, bytes)
    }
    hipIpcCloseMemHandle(pointer: *mut c_void) -> hipError_t {
        free("hipIpcCloseMemHandle", pointer)
    }
    hipHostMalloc(out: *mut *mut c_void, bytes: usize, flags: c_uint) -> hipError_t {
        set_flag(1, flags);
        allocate("hipHostMalloc", out, bytes)
    }
    hipHostFree(pointer: *mut c_void) -> hipError_t { free("hipHostFree", pointer) }
    hipHostGetDevicePointer(
        out: *mut *mut c_void, host: *mut c_void, _flags: c_uint
    ) -> hipError_t {
        put(out, host);
        done("hipHostGetDevicePointer", 0)
    }
    hipMemcpyAsync(
        to: *mut c_void, from: *const c_void, bytes: usize, _kind: c_uint, stream: hipStream_t
    ) -> hipError_t {
        if stream.is_null() || fails("hipMemcpyAsync") {
            return done("hipMemcpyAsync", 1);
        }
        let is_valid = move || contains(to as usize, bytes) && contains(from as usize, bytes);
        if !is_valid() {
            return done("hipMemcpyAsync", 1);
        }
        enqueue("hipMemcpyAsync", stream, move || {
            // A test may have freed the memory before the copy runs.
            if is_valid() {
                // SAFETY: both ranges lie within allocations of the fake.
                unsafe { ptr::copy(from.cast::<u8>(), to.cast(), bytes) };
            }
            true
        })
    }
    hipMemsetAsync(
        to: *mut c_void, value: c_int, bytes: usize, stream: hipStream_t
    ) -> hipError_t {
        if stream.is_null() || !contains(to as usize, bytes) {
            return done("hipMemsetAsync", 1);
        }
        enqueue("hipMemsetAsync", stream, move || {
            if contains(to as usize, bytes) {
                // SAFETY: the range lies within an allocation of the fake.
                unsafe { to.cast::<u8>().write_bytes(value as u8, bytes) };
            }
            true
        })
    }
    hipModuleLoadData(module: *mut hipModule_t, _image: *const c_void) -> hipError_t {
        put(module, 0x71 as hipModule_t);
        done("hipModuleLoadData", 0)
    }
    hipModuleGetFunction(
        function: *mut hipFunction_t, _module: hipModule_t, name: *const c_char
    ) -> hipError_t {
        // SAFETY: the driver's name ends with a zero byte.
        if unsafe { core::ffi::CStr::from_ptr(name) } != c"vocab_argmax" {
            return done("hipModuleGetFunction", hip::ERROR_NOT_FOUND);
        }
        put(function, 0x72 as hipFunction_t);
        done("hipModuleGetFunction", 0)
    }
    hipFuncGetAttribute(
        value: *mut c_int, attribute: c_uint, _function: hipFunction_t
    ) -> hipError_t {
        put(value, 100 + attribute.cast_signed());
        done("hipFuncGetAttribute", 0)
    }
    hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int, _function: hipFunction_t, threads: c_int, shared: usize
    ) -> hipError_t {
        put(blocks, (2048 / threads).min(65536 / shared.max(1) as c_int));
        done("hipModuleOccupancyMaxActiveBlocksPerMultiprocessor", 0)
    }
    hipModuleLaunchKernel(
        _function: hipFunction_t, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: hipStream_t, arguments: *mut *mut c_void,
        extra: *mut *mut c_void
    ) -> hipError_t {
        if stream.is_null() || !extra.is_null() || [gy, gz, by, bz] != [1; 4] {
            return done("hipModuleLaunchKernel", 1);
        }
        // SAFETY: every test passes one argument, which is a u32.
        let argument = unsafe { **arguments.cast::<*mut u32>() };
        with(|state| state.launched.set(Some((false, gx, bx, shared, argument))));
        enqueue_kernel("hipModuleLaunchKernel", stream)
    }
    hipModuleLaunchCooperativeKernel(
        _function: hipFunction_t, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint,
        bz: c_uint, shared: c_uint, stream: hipStream_t, arguments: *mut *mut c_void
    ) -> hipError_t {
        if stream.is_null() || [gy, gz, by, bz] != [1; 4] {
            return done("hipModuleLaunchCooperativeKernel", 1);
        }
        // SAFETY: every test passes one argument, which is a u32.
        let argument = unsafe { **arguments.cast::<*mut u32>() };
        with(|state| state.launched.set(Some((true, gx, bx, shared, argument))));
        with(|state| {
            if !state.old.get() {
                state.capture.set(state.capture.get().map(|nodes| nodes + 1));
            }
        });
        enqueue_kernel("hipModuleLaunchCooperativeKernel", stream)
    }
    hipStreamCreateWithPriority(
        stream: *mut hipStream_t, flags: c_uint, priority: c_int
    ) -> hipError_t {
        with(|state| state.priority.set(priority));
        set_flag(2, flags);
        let created = with(|state| state.queues.borrow_mut().create(priority));
        put(stream, created as hipStream_t);
        done("hipStreamCreateWithPriority", 0)
    }
    hipStreamDestroy(stream: hipStream_t) -> hipError_t {
        let known = with(|state| state.queues.borrow_mut().destroy(stream as usize));
        done("hipStreamDestroy", if known { hip::SUCCESS } else { ERROR_INVALID_HANDLE })
    }
    hipStreamGetFlags(_stream: hipStream_t, flags: *mut c_uint) -> hipError_t {
        put(flags, with(|state| state.flags.get()[2]));
        done("hipStreamGetFlags", 0)
    }
    hipStreamQuery(stream: hipStream_t) -> hipError_t {
        let idle = with(|state| state.queues.borrow_mut().is_idle(stream as usize));
        done("hipStreamQuery", if idle { hip::SUCCESS } else { hip::ERROR_NOT_READY })
    }
    hipStreamSynchronize(stream: hipStream_t) -> hipError_t {
        let idle = with(|state| state.queues.borrow_mut().is_idle(stream as usize));
        done("hipStreamSynchronize", if idle { hip::SUCCESS } else { WOULD_HANG })
    }
    hipStreamWaitEvent(stream: hipStream_t, event: hipEvent_t, flags: c_uint) -> hipError_t {
        let waits = |state: &State| {
            state.queues.borrow_mut().wait(stream as usize, event as usize)
        };
        if flags != 0 || fails("hipStreamWaitEvent") {
            return done("hipStreamWaitEvent", flags);
        }
        done("hipStreamWaitEvent", if with(waits) { hip::SUCCESS } else { ERROR_INVALID_HANDLE })
    }
    hipStreamWaitValue32(
        stream: hipStream_t, at: *mut c_void, value: u32, flags: c_uint, mask: u32
    ) -> hipError_t {
        if stream.is_null() || flags != 0 || mask != u32::MAX {
            return done("hipStreamWaitValue32", 1);
        }
        let at = at as usize;
        if !contains(at, 4) {
            return done("hipStreamWaitValue32", 1);
        }
        enqueue("hipStreamWaitValue32", stream, move || {
            load(at).is_none_or(|word| word.wrapping_sub(value).cast_signed() >= 0)
        })
    }
    hipStreamWriteValue32(
        stream: hipStream_t, at: *mut c_void, value: u32, flags: c_uint
    ) -> hipError_t {
        if stream.is_null() || flags != 0 || !contains(at as usize, 4) {
            return done("hipStreamWriteValue32", 1);
        }
        enqueue("hipStreamWriteValue32", stream, move || {
            if contains(at as usize, 4) {
                put(at.cast::<u32>(), value);
            }
            true
        })
    }
    hipLaunchHostFunc(
        stream: hipStream_t, function: hipHostFn_t, data: *mut c_void
    ) -> hipError_t {
        enqueue("hipLaunchHostFunc", stream, move || {
            if let Some(function) = function {
                // SAFETY: the test passes a callback for which `data` is valid.
                unsafe { function(data) };
            }
            true
        })
    }
    hipEventCreateWithFlags(event: *mut hipEvent_t, flags: c_uint) -> hipError_t {
        put(event, (0x80 + flags as usize) as hipEvent_t);
        done("hipEventCreateWithFlags", 0)
    }
    hipEventDestroy(_event: hipEvent_t) -> hipError_t { done("hipEventDestroy", 0) }
    hipEventRecord(event: hipEvent_t, stream: hipStream_t) -> hipError_t {
        if fails("hipEventRecord") {
            return done("hipEventRecord", 0);
        }
        let known = with(|state| {
            state.queues.borrow_mut().record(event as usize, stream as usize)
        });
        done("hipEventRecord", if known { hip::SUCCESS } else { ERROR_INVALID_HANDLE })
    }
    hipEventQuery(event: hipEvent_t) -> hipError_t {
        let recorded = with(|state| state.queues.borrow_mut().is_recorded(event as usize));
        done("hipEventQuery", if recorded { hip::SUCCESS } else { hip::ERROR_NOT_READY })
    }
    hipEventElapsedTime(ms: *mut f32, _start: hipEvent_t, _end: hipEvent_t) -> hipError_t {
        put(ms, 1.5);
        done("hipEventElapsedTime", 0)
    }
    hipStreamBeginCapture(_stream: hipStream_t, _mode: c_uint) -> hipError_t {
        with(|state| state.capture.set(Some(0)));
        done("hipStreamBeginCapture", 0)
    }
    hipStreamEndCapture(_stream: hipStream_t, graph: *mut hipGraph_t) -> hipError_t {
        put(graph, GRAPH as hipGraph_t);
        with(|state| state.capture.set(None));
        done("hipStreamEndCapture", 0)
    }
    hipStreamIsCapturing(stream: hipStream_t, status: *mut c_uint) -> hipError_t {
        let capturing = with(|state| state.capture.get().is_some());
        if stream.is_null() && capturing {
            return done("hipStreamIsCapturing", hip::ERROR_CAPTURE_IMPLICIT);
        }
        put(status, if capturing { hip::CAPTURE_STATUS_ACTIVE } else { hip::CAPTURE_STATUS_NONE });
        done("hipStreamIsCapturing", 0)
    }
    hipStreamGetCaptureInfo_v2(
        stream: hipStream_t, status: *mut c_uint, id: *mut c_ulonglong, graph: *mut hipGraph_t,
        _dependencies: *mut *const hipGraphNode_t, _number: *mut usize
    ) -> hipError_t {
        if stream.is_null() {
            return done("hipStreamGetCaptureInfo_v2", 1);
        }
        if with(|state| state.capture.get().is_some()) {
            put(status, hip::CAPTURE_STATUS_ACTIVE);
            put(id, 7);
            put(graph, GRAPH as hipGraph_t);
        } else {
            put(status, hip::CAPTURE_STATUS_NONE);
        }
        done("hipStreamGetCaptureInfo_v2", 0)
    }
    hipThreadExchangeStreamCaptureMode(mode: *mut c_uint) -> hipError_t {
        // SAFETY: the driver passes a readable mode.
        let new = unsafe { *mode };
        put(mode, with(|state| state.mode.replace(new)));
        done("hipThreadExchangeStreamCaptureMode", 0)
    }
    hipUserObjectCreate(
        object: *mut hipUserObject_t, data: *mut c_void, destroy: hipHostFn_t, count: c_uint,
        flags: c_uint
    ) -> hipError_t {
        if count != 1 || flags != 1 || fails("hipUserObjectCreate") {
            return done("hipUserObjectCreate", 1);
        }
        with(|state| state.object.set(Some((destroy, data))));
        put(object, 0x91 as hipUserObject_t);
        done("hipUserObjectCreate", 0)
    }
    hipUserObjectRelease(_object: hipUserObject_t, _count: c_uint) -> hipError_t {
        if let Some((Some(destroy), data)) = with(|state| state.object.take()) {
            // SAFETY: the driver passes a function that may be called once with `data`.
            unsafe { destroy(data) };
        }
        done("hipUserObjectRelease", 0)
    }
    hipGraphRetainUserObject(
        _graph: hipGraph_t, _object: hipUserObject_t, count: c_uint, flags: c_uint
    ) -> hipError_t {
        let moved = count == 1 && flags == hip::USER_OBJECT_MOVE;
        done("hipGraphRetainUserObject", c_uint::from(!moved))
    }
    hipGraphGetNodes(
        _graph: hipGraph_t, nodes: *mut hipGraphNode_t, count: *mut usize
    ) -> hipError_t {
        put(count, with(|state| state.capture.get().unwrap_or(3)));
        done("hipGraphGetNodes", c_uint::from(!nodes.is_null()))
    }
    hipGraphInstantiateWithFlags(
        exec: *mut hipGraphExec_t, _graph: hipGraph_t, _flags: c_ulonglong
    ) -> hipError_t {
        put(exec, 0x62 as hipGraphExec_t);
        done("hipGraphInstantiateWithFlags", 0)
    }
    hipGraphLaunch(_exec: hipGraphExec_t, _stream: hipStream_t) -> hipError_t {
        done("hipGraphLaunch", 0)
    }
    hipGraphDestroy(_graph: hipGraph_t) -> hipError_t {
        // SAFETY: the graph holds the only reference to the user object, so the destructor runs
        // once.
        let _ = unsafe { (FUNCTIONS.hipUserObjectRelease)(ptr::null_mut(), 1) };
        done("hipGraphDestroy", 0)
    }
    hipGraphExecDestroy(_exec: hipGraphExec_t) -> hipError_t { done("hipGraphExecDestroy", 0) }
}
