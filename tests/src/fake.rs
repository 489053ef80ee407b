//! The executing fake of the CUDA driver, controlled by tests, and the driver's calls as another
//! library of the process would make them.

use core::ffi::{CStr, c_char, c_void};

use libloading::Library;

use crate::skip::skip;

/// The driver library that this process uses, which is the fake. Handles are numbers: it knows those that live, and
/// refuses others.
#[derive(Debug)]
pub struct Fake(Library);

/// A number of the driver's that is not 0.
///
/// # Panics
/// For such a number: the driver refuses.
#[track_caller]
fn ok(what: &str, code: u32) {
    assert_eq!(code, 0, "{what}");
}

impl Fake {
    /// The fake, where the tests run on it; else the test is skipped.
    ///
    /// # Panics
    /// When `FUSEWIRE_REQUIRE` names `cuda-fake`, and it is not there.
    pub fn open() -> Option<Self> {
        if crate::device().is_gpu() {
            // SAFETY: the fake's initialisers do nothing but what the driver's do.
            let library = unsafe { Library::new("libcuda.so.1") };
            if let Ok(library) = library {
                // SAFETY: only looked for.
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

    /// A function of the library, as its address.
    fn find<T: Copy>(&self, name: &str) -> T {
        // SAFETY: the callers give the types of `cuda.h` and of the fake.
        let found = unsafe { self.0.get::<T>(name.as_bytes()) };
        *found.unwrap_or_else(|error| panic!("{name}: {error}"))
    }

    /// How often a function was called so far.
    pub fn calls(&self, name: &CStr) -> u64 {
        let ask: unsafe extern "C" fn(*const c_char) -> u64 = self.find("fusewireCudaFakeCalls");
        // SAFETY: a live C string.
        unsafe { ask(name.as_ptr()) }
    }

    /// How often entries of images were launched: of that name, or with a leading `*` those whose names end so.
    pub fn launch_count(&self, name: &CStr) -> u64 {
        let ask: unsafe extern "C" fn(*const c_char) -> u64 =
            self.find("fusewireCudaFakeLaunchCount");
        // SAFETY: a live C string.
        unsafe { ask(name.as_ptr()) }
    }

    /// How many objects of a kind live.
    pub fn live(&self, kind: &CStr) -> u64 {
        let ask: unsafe extern "C" fn(*const c_char) -> u64 = self.find("fusewireCudaFakeLive");
        // SAFETY: a live C string.
        unsafe { ask(kind.as_ptr()) }
    }

    /// A text that the fake writes into a buffer, whose length it gives.
    fn text(write: impl Fn(*mut c_char, usize) -> usize) -> String {
        let mut bytes = vec![0u8; write(core::ptr::null_mut(), 0) + 1024];
        let length = write(bytes.as_mut_ptr().cast(), bytes.len());
        // What grew meanwhile beyond the room is cut off.
        bytes.truncate(length.min(bytes.len() - 1));
        String::from_utf8(bytes).expect("text")
    }

    /// Calls by name and what lives, as JSON: `{"calls": {name: count}, "live": {kind: count}, ..}`.
    pub fn report(&self) -> String {
        let ask: unsafe extern "C" fn(*mut c_char, usize) -> usize =
            self.find("fusewireCudaFakeReport");
        // SAFETY: the buffer is writable for its length.
        Self::text(|buffer, bytes| unsafe { ask(buffer, bytes) })
    }

    /// The last launches of a kernel as JSON, the oldest first: a list of `{"grid", "block", "shared_bytes", "attributes",
    /// "captured", "code"}`.
    pub fn launches(&self, kernel: &CStr) -> String {
        let ask: unsafe extern "C" fn(*const c_char, *mut c_char, usize) -> usize =
            self.find("fusewireCudaFakeLaunches");
        // SAFETY: a live C string, and the buffer is writable for its length.
        Self::text(|buffer, bytes| unsafe { ask(kernel.as_ptr(), buffer, bytes) })
    }

    /// Has the `nth` call of a function from now on fail.
    pub fn fail(&self, name: &CStr, nth: u64, code: u32) {
        let fail: unsafe extern "C" fn(*const c_char, u64, u32) = self.find("fusewireCudaFakeFail");
        // SAFETY: a live C string.
        unsafe { fail(name.as_ptr(), nth, code) }
    }

    /// A stream that does not wait for the legacy default stream.
    pub fn stream(&self) -> usize {
        let create: unsafe extern "C" fn(*mut usize, u32) -> u32 = self.find("cuStreamCreate");
        let mut stream = 0usize;
        // SAFETY: `stream` is writable.
        ok("cuStreamCreate", unsafe { create(&raw mut stream, 1) });
        stream
    }

    /// Begins a capture in `mode` (0 global, 1 of this thread, 2 relaxed).
    pub fn begin_capture(&self, stream: usize, mode: u32) {
        let begin: unsafe extern "C" fn(usize, u32) -> u32 = self.find("cuStreamBeginCapture_v2");
        // SAFETY: a live stream.
        ok("cuStreamBeginCapture", unsafe { begin(stream, mode) });
    }

    /// Ends it and makes the graph ready; gives graph and executable.
    pub fn end_capture(&self, stream: usize) -> (usize, usize) {
        let end: unsafe extern "C" fn(usize, *mut usize) -> u32 = self.find("cuStreamEndCapture");
        let make: unsafe extern "C" fn(*mut usize, usize, u64) -> u32 =
            self.find("cuGraphInstantiateWithFlags");
        let (mut graph, mut exec) = (0usize, 0usize);
        // SAFETY: a live stream, and `graph` is writable.
        ok("cuStreamEndCapture", unsafe { end(stream, &raw mut graph) });
        // SAFETY: a live graph, and `exec` is writable.
        ok("cuGraphInstantiate", unsafe {
            make(&raw mut exec, graph, 0)
        });
        (graph, exec)
    }

    /// Calls a function of one handle: a synchronisation, or what ends the handle.
    pub fn call(&self, name: &str, handle: usize) {
        let call: unsafe extern "C" fn(usize) -> u32 = self.find(name);
        // SAFETY: the test gives a live handle of the right kind.
        ok(name, unsafe { call(handle) });
    }

    /// Launches a graph.
    pub fn launch(&self, exec: usize, stream: usize) {
        let launch: unsafe extern "C" fn(usize, usize) -> u32 = self.find("cuGraphLaunch");
        // SAFETY: both are live.
        ok("cuGraphLaunch", unsafe { launch(exec, stream) });
    }

    /// Device memory.
    pub fn allocate(&self, bytes: usize) -> *mut u8 {
        let allocate: unsafe extern "C" fn(*mut u64, usize) -> u32 = self.find("cuMemAlloc_v2");
        let mut at = 0u64;
        // SAFETY: `at` is writable.
        ok("cuMemAlloc", unsafe { allocate(&raw mut at, bytes) });
        at as *mut u8
    }
}
