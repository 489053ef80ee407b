//! Controls the executing fake of the CUDA driver, and makes driver calls as another library in the
//! same process would.

use core::ffi::{CStr, c_char, c_void};

use libloading::Library;

use crate::skip::skip;

/// The fake that this process uses as its driver library. Handles are plain numbers, because the
/// fake checks every handle.
#[derive(Debug)]
pub struct Fake(Library);

/// Checks the result of a driver call.
///
/// # Panics
/// Panics if `code` is not 0.
#[track_caller]
fn ok(what: &str, code: u32) {
    assert_eq!(code, 0, "{what}");
}

impl Fake {
    /// Returns the fake. If the tests do not run on the fake, calls [`skip`] and returns `None`.
    ///
    /// # Panics
    /// Panics if `FUSEWIRE_REQUIRE` names `cuda-fake` and the test does not run on the fake.
    pub fn open() -> Option<Self> {
        if crate::device().is_gpu() {
            // SAFETY: the initializers of the driver and of the fake have no requirements.
            let library = unsafe { Library::new("libcuda.so.1") };
            if let Ok(library) = library {
                // SAFETY: the symbol is never dereferenced or called.
                let own = unsafe { library.get::<*const c_void>(b"fusewireCudaFakeCalls\0") };
                if own.is_ok() {
                    return Some(Self(library));
                }
            }
        }
        skip(
            "cuda-fake",
            "the tests do not run on the fake of the CUDA driver",
        );
        None
    }

    /// Looks up a function of the library. `F` must be the function's type.
    fn find<T: Copy>(&self, name: &str) -> T {
        // SAFETY: all callers in this file pass the function's type as `cuda.h` or the fake
        // declares it.
        let found = unsafe { self.0.get::<T>(name.as_bytes()) };
        *found.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// Returns how often the process has called the driver function `name`.
    pub fn calls(&self, name: &CStr) -> u64 {
        let query: unsafe extern "C" fn(*const c_char) -> u64 = self.find("fusewireCudaFakeCalls");
        // SAFETY: the argument points to a live C string.
        unsafe { query(name.as_ptr()) }
    }

    /// Returns the number of launches of the kernel entry point `name`. A name with a leading `*`
    /// counts all entry points whose names end with the rest of `name`.
    pub fn launch_count(&self, name: &CStr) -> u64 {
        let query: unsafe extern "C" fn(*const c_char) -> u64 =
            self.find("fusewireCudaFakeLaunchCount");
        // SAFETY: the argument points to a live C string.
        unsafe { query(name.as_ptr()) }
    }

    /// Returns the number of live objects of a kind.
    pub fn live(&self, kind: &CStr) -> u64 {
        let query: unsafe extern "C" fn(*const c_char) -> u64 = self.find("fusewireCudaFakeLive");
        // SAFETY: the argument points to a live C string.
        unsafe { query(kind.as_ptr()) }
    }

    /// Returns the text that `write` writes. `write` gets a buffer and its size, and returns the
    /// length of the whole text.
    fn text(write: impl Fn(*mut c_char, usize) -> usize) -> String {
        let mut bytes = vec![0u8; write(core::ptr::null_mut(), 0) + 1024];
        let length = write(bytes.as_mut_ptr().cast(), bytes.len());
        // The text may have grown since the first call. In that case the second call has truncated
        // the text to the buffer.
        bytes.truncate(length.min(bytes.len() - 1));
        String::from_utf8(bytes).expect("text")
    }

    /// Returns the numbers of calls and of live objects as JSON:
    /// `{"calls": {name: count}, "live": {kind: count}, ..}`.
    pub fn report(&self) -> String {
        let query: unsafe extern "C" fn(*mut c_char, usize) -> usize =
            self.find("fusewireCudaFakeReport");
        // SAFETY: `text` passes null or a buffer of `bytes` writable bytes.
        Self::text(|buffer, bytes| unsafe { query(buffer, bytes) })
    }

    /// Returns the last launches of a kernel, oldest first, as a JSON list of `{"grid", "block",
    /// "shared_bytes", "attributes", "captured", "code"}`.
    pub fn launches(&self, kernel: &CStr) -> String {
        let query: unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> usize =
            self.find("fusewireCudaFakeLaunches");
        // SAFETY: `kernel` points to a live C string, and `text` passes null or a buffer of `bytes`
        // bytes.
        Self::text(|buffer, bytes| unsafe { query(kernel.as_ptr(), buffer, bytes) })
    }

    /// Returns the lines of a kernel that the emulator has executed: their numbers after the
    /// kernel's entry, and their texts.
    ///
    /// # Panics
    /// Panics if the fake returns something else.
    pub fn executed(&self, kernel: &CStr) -> Vec<(usize, String)> {
        let query: unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> usize =
            self.find("fusewireCudaFakeExecuted");
        // SAFETY: `kernel` points to a live C string, and `text` passes null or a buffer of `bytes`
        // bytes.
        let lines = Self::text(|buffer, bytes| unsafe { query(kernel.as_ptr(), buffer, bytes) });
        let parse = |line: &str| {
            let (number, text) = line.split_once('\t').expect("a number and a text");
            (number.parse().expect("a number"), text.to_owned())
        };
        lines.lines().map(parse).collect()
    }

    /// Returns the trips of the last launch of a kernel on each device, or of all kernels for `*`,
    /// as a JSON list of `{"kernel", "device", "number", "steps", "to_data",
    /// "leader_instructions", "bytes", "chain"}`.
    pub fn trips(&self, kernel: &CStr) -> String {
        let query: unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> usize =
            self.find("fusewireCudaFakeTrips");
        // SAFETY: `kernel` points to a live C string, and `text` passes null or a buffer of `bytes`
        // bytes.
        Self::text(|buffer, bytes| unsafe { query(kernel.as_ptr(), buffer, bytes) })
    }

    /// Returns the errors of emulated launches.
    pub fn faults(&self) -> String {
        let query: unsafe extern "C" fn(*mut c_char, usize) -> usize =
            self.find("fusewireCudaFakeFaults");
        // SAFETY: `text` passes null or a buffer of `bytes` writable bytes.
        Self::text(|buffer, bytes| unsafe { query(buffer, bytes) })
    }

    /// Makes the `nth` subsequent call of the driver function `name` return the error `code`. `nth`
    /// is 1 for the next call; 0 removes the failures of the function that have not occurred.
    pub fn fail(&self, name: &CStr, nth: u64, code: u32) {
        let fail: unsafe extern "C" fn(*const c_char, u64, u32) = self.find("fusewireCudaFakeFail");
        // SAFETY: the argument points to a live C string.
        unsafe { fail(name.as_ptr(), nth, code) }
    }

    /// Makes the primary context of device 0 current on the calling thread, unless the thread has a
    /// current context, as the CUDA runtime does in its first call.
    fn need_context(&self) {
        self.initialize();
        if self.current_context() == 0 {
            self.make_current(self.primary_context(0));
        }
    }

    /// Creates a non-blocking stream, which does not synchronize with the legacy default stream.
    pub fn stream(&self) -> usize {
        self.need_context();
        let create: unsafe extern "C" fn(*mut usize, u32) -> u32 = self.find("cuStreamCreate");
        let mut stream = 0usize;
        // SAFETY: `stream` is a live variable.
        ok("cuStreamCreate", unsafe { create(&raw mut stream, 1) });
        stream
    }

    /// Creates a blocking stream, which synchronizes with the legacy default stream.
    pub fn blocking_stream(&self) -> usize {
        self.need_context();
        let create: unsafe extern "C" fn(*mut usize, u32) -> u32 = self.find("cuStreamCreate");
        let mut stream = 0usize;
        // SAFETY: `stream` is a live variable.
        ok("cuStreamCreate", unsafe { create(&raw mut stream, 0) });
        stream
    }

    /// Creates a stream of a green context with `multiprocessors` SMs.
    pub fn green_stream(&self, multiprocessors: u32) -> usize {
        self.need_context();
        let create: unsafe extern "C" fn(u32) -> usize = self.find("fusewireCudaFakeGreenStream");
        // SAFETY: the function accepts any number.
        let stream = unsafe { create(multiprocessors) };
        assert_ne!(stream, 0, "no current context");
        stream
    }

    /// Returns the priority of a stream; 0 is the lowest.
    pub fn priority(&self, stream: usize) -> i32 {
        self.need_context();
        let query: unsafe extern "C" fn(usize, *mut i32) -> u32 = self.find("cuStreamGetPriority");
        let mut priority = 1;
        // SAFETY: the fake checks the handle, and `priority` is a live variable.
        ok("cuStreamGetPriority", unsafe {
            query(stream, &raw mut priority)
        });
        priority
    }

    fn initialize(&self) {
        let initialize: unsafe extern "C" fn(u32) -> u32 = self.find("cuInit");
        // SAFETY: the flags must be 0.
        ok("cuInit", unsafe { initialize(0) });
    }

    /// Returns the primary context of a device, which stays alive until the process exits.
    pub fn primary_context(&self, device: i32) -> usize {
        let retain: unsafe extern "C" fn(*mut usize, i32) -> u32 =
            self.find("cuDevicePrimaryCtxRetain");
        self.initialize();
        let mut context = 0usize;
        // SAFETY: `context` is a live variable.
        ok("cuDevicePrimaryCtxRetain", unsafe {
            retain(&raw mut context, device)
        });
        context
    }

    /// Returns the current context of the calling thread, or 0.
    pub fn current_context(&self) -> usize {
        let query: unsafe extern "C" fn(*mut usize) -> u32 = self.find("cuCtxGetCurrent");
        let mut context = 1usize;
        // SAFETY: `context` is a live variable.
        ok("cuCtxGetCurrent", unsafe { query(&raw mut context) });
        context
    }

    /// Makes a context current on the calling thread; 0 for none.
    pub fn make_current(&self, context: usize) {
        self.call("cuCtxSetCurrent", context);
    }

    /// Starts a capture in `mode` (0 global, 1 thread local, 2 relaxed).
    pub fn begin_capture(&self, stream: usize, mode: u32) {
        self.need_context();
        let begin: unsafe extern "C" fn(usize, u32) -> u32 = self.find("cuStreamBeginCapture_v2");
        // SAFETY: the fake checks the handle.
        ok("cuStreamBeginCapture", unsafe { begin(stream, mode) });
    }

    /// Ends a capture and instantiates its graph. Returns the handles of the graph and of the
    /// executable graph.
    pub fn end_capture(&self, stream: usize) -> (usize, usize) {
        self.need_context();
        let end: unsafe extern "C" fn(usize, *mut usize) -> u32 = self.find("cuStreamEndCapture");
        let make: unsafe extern "C" fn(*mut usize, usize, u64) -> u32 =
            self.find("cuGraphInstantiateWithFlags");
        let (mut graph, mut exec) = (0usize, 0usize);
        // SAFETY: the fake checks the handle, and `graph` is a live variable.
        ok("cuStreamEndCapture", unsafe { end(stream, &raw mut graph) });
        // SAFETY: the fake checks the handle, and `exec` is a live variable.
        ok("cuGraphInstantiate", unsafe {
            make(&raw mut exec, graph, 0)
        });
        (graph, exec)
    }

    /// Calls a driver function that takes one handle, such as a function that synchronizes or
    /// destroys an object.
    pub fn call(&self, name: &str, handle: usize) {
        let call: unsafe extern "C" fn(usize) -> u32 = self.find(name);
        // SAFETY: the fake checks the handle, so any number is permitted.
        ok(name, unsafe { call(handle) });
    }

    /// Launches a graph.
    pub fn launch(&self, exec: usize, stream: usize) {
        self.need_context();
        let launch: unsafe extern "C" fn(usize, usize) -> u32 = self.find("cuGraphLaunch");
        // SAFETY: the fake checks both handles.
        ok("cuGraphLaunch", unsafe { launch(exec, stream) });
    }

    /// Allocates device memory.
    pub fn allocate(&self, bytes: usize) -> *mut u8 {
        self.need_context();
        let allocate: unsafe extern "C" fn(*mut u64, usize) -> u32 = self.find("cuMemAlloc_v2");
        let mut at = 0u64;
        // SAFETY: `at` is a live variable.
        ok("cuMemAlloc", unsafe { allocate(&raw mut at, bytes) });
        at as *mut u8
    }
}
