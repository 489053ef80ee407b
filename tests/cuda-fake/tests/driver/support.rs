//! Runs tests in child processes, and provides short forms of driver calls.

use core::ffi::{CStr, c_char, c_void};
use core::ptr::null_mut;
use std::process::{Command, Output};

use cudarc::driver::sys::{self, CUresult};

/// Error codes by their short names.
pub(crate) use cudarc::driver::sys::CUresult::*;

/// Environment variable with the name of the test that a child process runs.
const CHILD: &str = "CUDA_FAKE_TEST";

/// Runs `body` in a child process that opens the fake as the driver. The names of variables get the
/// prefix `FUSEWIRE_CUDA_FAKE_`, unless they begin with `FUSEWIRE_`. Returns the child's output, or
/// `None` in the child.
pub(crate) fn run_child(name: &str, variables: &[(&str, &str)], body: fn()) -> Option<Output> {
    let name = name.split_once("::").map_or(name, |(_, name)| name);
    if std::env::var(CHILD).is_ok_and(|child| child == name) {
        body();
        return None;
    }
    let folder = tempfile::tempdir().unwrap();
    fusewire_cuda_fake_library::install(folder.path()).unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(CHILD, name)
        .env("LD_LIBRARY_PATH", folder.path());
    for (key, value) in variables {
        match key.starts_with("FUSEWIRE_") {
            true => command.env(key, value),
            false => command.env(format!("FUSEWIRE_CUDA_FAKE_{key}"), value),
        };
    }
    Some(command.output().unwrap())
}

/// Runs `body` in a child process and asserts that the child's test passes.
pub(crate) fn in_child(name: &str, variables: &[(&str, &str)], body: fn()) {
    let Some(output) = run_child(name, variables, body) else {
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{:?}\n{text}\n{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Defines a test that runs in a child process.
macro_rules! driver_test {
    ($(#[$meta:meta])* $name:ident($($key:literal = $value:literal),*) $body:block) => {
        $(#[$meta])*
        #[test]
        fn $name() {
            let name = concat!(module_path!(), "::", stringify!($name));
            $crate::support::in_child(name, &[$(($key, $value)),*], || $body);
        }
    };
}
pub(crate) use driver_test;

/// Calls the driver. Evaluates to the result code.
macro_rules! code {
    ($function:ident($($argument:expr),* $(,)?)) => {
        // SAFETY: pointer arguments point to live variables of the test, and the fake checks all
        // handles and addresses.
        unsafe { cudarc::driver::sys::$function($($argument),*) }
    };
}
pub(crate) use code;

/// Calls the driver and asserts that the call succeeds.
macro_rules! ok {
    ($function:ident($($argument:expr),* $(,)?)) => {
        assert_eq!(
            $crate::support::code!($function($($argument),*)),
            cudarc::driver::sys::CUresult::CUDA_SUCCESS,
            stringify!($function)
        )
    };
}
pub(crate) use ok;

/// Calls the driver and asserts that the call returns `$code`.
macro_rules! fails {
    ($code:ident, $function:ident($($argument:expr),* $(,)?)) => {
        assert_eq!($crate::support::code!($function($($argument),*)), $code, stringify!($function))
    };
}
pub(crate) use fails;

/// Initialises the driver and makes the primary context of device 0 current.
pub(crate) fn start() -> sys::CUcontext {
    ok!(cuInit(0));
    let mut context = null_mut();
    ok!(cuDevicePrimaryCtxRetain(&raw mut context, 0));
    ok!(cuCtxSetCurrent(context));
    context
}

/// Creates a stream that does not wait for the default stream.
pub(crate) fn stream() -> sys::CUstream {
    let mut stream = null_mut();
    ok!(cuStreamCreate(&raw mut stream, 1));
    stream
}

/// Creates an event without timing.
pub(crate) fn event() -> sys::CUevent {
    let mut event = null_mut();
    ok!(cuEventCreate(&raw mut event, 2));
    event
}

/// Allocates a block of device memory.
pub(crate) fn block(bytes: usize) -> u64 {
    let mut address = 0;
    ok!(cuMemAlloc_v2(&raw mut address, bytes));
    address
}

/// Writes words to device memory.
pub(crate) fn write(to: u64, words: &[u64]) {
    ok!(cuMemcpyHtoD_v2(
        to,
        words.as_ptr().cast(),
        size_of_val(words)
    ));
}

/// Reads words of device memory.
pub(crate) fn read(from: u64, count: usize) -> Vec<u64> {
    let mut words = vec![0u64; count];
    ok!(cuMemcpyDtoH_v2(words.as_mut_ptr().cast(), from, count * 8));
    words
}

/// Returns a function of the fake that the driver does not have. `F` must be the type of the
/// function.
fn extra<F: Copy>(name: &str) -> F {
    // SAFETY: with the child's `LD_LIBRARY_PATH`, this call opens the fake, and the initialisers of
    // the fake have no requirements.
    let library = unsafe { sys::culib() };
    // SAFETY: all callers in this file pass the type of the exported function.
    *unsafe { library.get::<F>(name.as_bytes()) }.unwrap()
}

/// Returns the number of calls of a function.
pub(crate) fn calls(name: &CStr) -> u64 {
    let calls = extra::<unsafe extern "C" fn(*const c_char) -> u64>("fusewireCudaFakeCalls");
    // SAFETY: `name` is a live C string.
    unsafe { calls(name.as_ptr()) }
}

/// Returns the number of live objects of a kind.
pub(crate) fn live(kind: &CStr) -> u64 {
    let live = extra::<unsafe extern "C" fn(*const c_char) -> u64>("fusewireCudaFakeLive");
    // SAFETY: `kind` is a live C string.
    unsafe { live(kind.as_ptr()) }
}

/// Makes the `nth` call of a function fail.
pub(crate) fn fail(name: &CStr, nth: u64, code: CUresult) {
    type Fail = unsafe extern "C" fn(*const c_char, u64, u32);
    let fail = extra::<Fail>("fusewireCudaFakeFail");
    // SAFETY: `name` is a live C string.
    unsafe { fail(name.as_ptr(), nth, code as u32) }
}

/// Returns the fake's report.
pub(crate) fn report() -> String {
    type Report = unsafe extern "C" fn(*mut c_char, usize) -> usize;
    let report = extra::<Report>("fusewireCudaFakeReport");
    let mut buffer = vec![0u8; 1 << 16];
    // SAFETY: `buffer` has `buffer.len()` writable bytes.
    let length = unsafe { report(buffer.as_mut_ptr().cast(), buffer.len()) };
    String::from_utf8(buffer[..length].to_vec()).unwrap()
}

/// A gate that holds back the work of a stream until the gate is opened.
#[derive(Debug, Default)]
pub(crate) struct Switch(core::sync::atomic::AtomicBool);

impl Switch {
    /// Creates a closed switch that is never freed.
    pub(crate) fn new() -> &'static Self {
        Box::leak(Box::default())
    }

    /// Makes a stream wait for the switch.
    pub(crate) fn block(&'static self, stream: sys::CUstream) {
        unsafe extern "C" fn wait(switch: *mut c_void) {
            // SAFETY: `block` passes a `&'static Switch`.
            let switch = unsafe { &*switch.cast::<Switch>() };
            while !switch.0.load(core::sync::atomic::Ordering::Acquire) {
                std::thread::yield_now();
            }
        }
        let data = core::ptr::from_ref(self).cast_mut().cast();
        ok!(cuLaunchHostFunc(stream, Some(wait), data));
    }

    /// Opens the switch, so that waiting streams continue.
    pub(crate) fn open(&self) {
        self.0.store(true, core::sync::atomic::Ordering::Release);
    }
}

/// Waits until `is_met` returns true. Panics after a minute.
pub(crate) fn eventually(condition: &str, is_met: impl Fn() -> bool) {
    let start = std::time::Instant::now();
    while !is_met() {
        assert!(
            start.elapsed().as_secs() < 60,
            "not met within a minute: {condition}"
        );
        std::thread::yield_now();
    }
}
