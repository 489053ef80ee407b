//! Counts of calls, live objects and launches, and injected failures.

use core::sync::atomic::{AtomicBool, Ordering};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;

use serde_json::{Value, json};

use super::handles::{
    ALLOCATIONS, CONTEXTS, EVENTS, EXECS, GRAPHS, MODULES, MULTICASTS, STREAMS, USER_OBJECTS,
};
use super::settings::variable;
use super::{lock, memory, multicast};

static CALLS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());
static LAUNCH_COUNTS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());
static FAILURES: Mutex<Vec<Failure>> = Mutex::new(Vec::new());
static LAUNCHES: Mutex<VecDeque<LaunchRecord>> = Mutex::new(VecDeque::new());
static PREPARED: AtomicBool = AtomicBool::new(false);

/// Maximum number of recorded launches. Older launches are dropped.
const RECORDED_LAUNCHES: usize = 256;

/// Arguments and result of a launch call.
#[derive(Debug)]
pub(crate) struct LaunchRecord {
    pub(crate) kernel: String,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    /// For each attribute, in the caller's order: its number in `cuda.h`, then the words of its
    /// value.
    pub(crate) attributes: Vec<Vec<u32>>,
    /// True if the launch was captured into a graph.
    pub(crate) captured: bool,
    /// Code that the call returned.
    pub(crate) code: u32,
}

/// An injected failure.
#[derive(Debug)]
struct Failure {
    name: String,
    /// Remaining calls until the failure, including the call that fails.
    left: u64,
    code: u32,
}

/// Prints the reason why the fake rejects a call.
pub(crate) fn log_refusal(text: &str) {
    eprintln!("fusewire-cuda-fake: {text}");
}

/// Counts a call. Returns the code of an injected failure as an error.
pub(crate) fn enter(name: &'static str) -> core::result::Result<(), u32> {
    prepare();
    *lock(&CALLS).entry(name).or_default() += 1;
    let mut failures = lock(&FAILURES);
    let mut code = None;
    failures.retain_mut(|failure| {
        if failure.name != name {
            return true;
        }
        failure.left -= 1;
        if failure.left == 0 {
            code = Some(failure.code);
        }
        failure.left > 0
    });
    code.map_or(Ok(()), Err)
}

/// Makes the `nth` subsequent call of a function fail. If `nth` is 0, removes the failures of the
/// function that have not occurred.
pub(crate) fn fail(name: &str, nth: u64, code: u32) {
    prepare();
    let mut failures = lock(&FAILURES);
    if nth == 0 {
        failures.retain(|failure| failure.name != name);
        return;
    }
    failures.push(Failure {
        name: name.to_owned(),
        left: nth,
        code,
    });
}

/// Records a launch.
pub(crate) fn launched(launch: LaunchRecord) {
    let mut launches = lock(&LAUNCHES);
    if launches.len() == RECORDED_LAUNCHES {
        launches.pop_front();
    }
    launches.push_back(launch);
}

/// Returns the recorded launches of a kernel, oldest first, as a JSON list.
pub(crate) fn launches(kernel: &str) -> String {
    let launches = lock(&LAUNCHES);
    let of = launches.iter().filter(|launch| launch.kernel == kernel);
    of.map(|launch| {
        json!({
            "grid": launch.grid,
            "block": launch.block,
            "shared_bytes": launch.shared_bytes,
            "attributes": launch.attributes,
            "captured": launch.captured,
            "code": launch.code,
        })
    })
    .collect::<Value>()
    .to_string()
}

/// Returns the number of calls of a function.
pub(crate) fn calls(name: &str) -> u64 {
    lock(&CALLS).get(name).copied().unwrap_or(0)
}

/// Counts a launch of an entry.
pub(crate) fn count_launch(entry: &str) {
    let mut launches = lock(&LAUNCH_COUNTS);
    if let Some(count) = launches.get_mut(entry) {
        *count += 1;
    } else {
        launches.insert(entry.to_owned(), 1);
    }
}

/// Returns the number of launches of the entry `pattern`. With a leading `*`, counts all entries
/// whose names end with the rest of `pattern`.
pub(crate) fn launch_count(pattern: &str) -> u64 {
    let fits = |name: &str| match pattern.strip_prefix('*') {
        Some(end) => name.ends_with(end),
        None => name == pattern,
    };
    let launches = lock(&LAUNCH_COUNTS);
    let fitting = launches.iter().filter(|(name, _)| fits(name));
    fitting.map(|(_, count)| count).sum()
}

/// Returns the number of live objects of each kind.
pub(crate) fn live() -> [(&'static str, u64); 16] {
    let memory = memory::live();
    [
        ("context", CONTEXTS.len() as u64),
        ("stream", STREAMS.len() as u64),
        ("event", EVENTS.len() as u64),
        ("module", MODULES.len() as u64),
        ("graph", GRAPHS.len() as u64),
        ("exec", EXECS.len() as u64),
        ("user_object", USER_OBJECTS.len() as u64),
        ("allocation", ALLOCATIONS.len() as u64),
        ("multicast", MULTICASTS.len() as u64),
        ("binding", multicast::bindings()),
        ("reservation", memory.reservations),
        ("mapping", memory.mappings),
        ("block", memory.blocks),
        ("ipc", memory.ipc),
        ("host", memory.host),
        ("registered", memory.registered),
    ]
}

/// Returns the numbers of calls and of live objects as JSON:
/// `{"pid": .., "calls": {name: count}, "live": {kind: count}}`.
pub(crate) fn report() -> String {
    let calls: BTreeMap<&str, u64> = lock(&CALLS).clone();
    let live: serde_json::Map<String, Value> = live()
        .into_iter()
        .map(|(kind, count)| (kind.to_owned(), count.into()))
        .collect();
    json!({"pid": std::process::id(), "calls": calls, "live": live}).to_string()
}

/// Applies `FUSEWIRE_CUDA_FAKE_FAIL` and `FUSEWIRE_CUDA_FAKE_REPORT` on the first call.
fn prepare() {
    if PREPARED.swap(true, Ordering::AcqRel) {
        return;
    }
    for part in variable("FAIL").unwrap_or_default().split(',') {
        if part.is_empty() {
            continue;
        }
        match parse(part) {
            Some((name, nth, code)) => fail(name, nth, code),
            None => log_refusal(&format!(
                "FUSEWIRE_CUDA_FAKE_FAIL has {part:?}, which is not of the form NAME:NTH=CODE, \
                 such as cuMemCreate:3=2; the part is ignored"
            )),
        }
    }
    if variable("REPORT").is_some() {
        // SAFETY: the code of `dump` stays loaded until exit, because programs do not unload the
        // driver library.
        unsafe { libc::atexit(dump) };
    }
}

fn parse(part: &str) -> Option<(&str, u64, u32)> {
    let (call, code) = part.trim().split_once('=')?;
    let (name, nth) = call.split_once(':').unwrap_or((call, "1"));
    Some((name, nth.parse().ok()?, code.parse().ok()?))
}

/// Writes the report to `FUSEWIRE_CUDA_FAKE_REPORT`, in which `%p` stands for the process id.
extern "C" fn dump() {
    if let Some(path) = variable("REPORT") {
        let path = path.replace("%p", &std::process::id().to_string());
        if let Err(error) = std::fs::write(&path, report()) {
            log_refusal(&format!("cannot write the report {path}: {error}"));
        }
    }
}
