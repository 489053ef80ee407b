//! Execution of PTX by the emulator.

use core::fmt::Write;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use fusewire::cpu::{Command, Grid};
use fusewire_device::group::cpu::LaneContext;
use fusewire_device::native::NativeEntry;
use fusewire_emulator::{
    Config, Error, FaultKind, IdleTime, Launch, LaunchOrder, LoadedModule, Machine, Memory, Module,
    Range, Replica, Route, Steps, StreamOperation, Trips,
};
use serde_json::{Value, json};

use super::context::Context;
use super::handles::CONTEXTS;
use super::kernel::Shape;
use super::record::log_refusal;
use super::settings::{Execution, settings, variable};
use super::{lock, memory};
use crate::status::Status;

/// Capacity of an SM, in the unit of [`Launch::cost`].
const MULTIPROCESSOR: u32 = 32 * 27 * 25 * 7;

/// Returns the machine that executes all launches of this process.
fn machine() -> &'static Machine {
    static MACHINE: OnceLock<Machine> = OnceLock::new();
    MACHINE.get_or_init(|| {
        let settings = settings();
        let config = Config {
            scheduler: settings.scheduler,
            idle: IdleTime::Host,
            capacity: MULTIPROCESSOR.saturating_mul(settings.multiprocessors),
            hang_after: settings.hang_after,
            memory: settings.memory_model,
            // The same for one device, but the emulator forgets accesses when no launch is running.
            order: match settings.devices {
                1 => LaunchOrder::Host,
                _ => LaunchOrder::Device,
            },
            trips: settings.trips,
            ..Config::default()
        };
        Machine::new(config, Arc::new(DeviceMemory))
    })
}

/// The memory of all devices of this process.
#[derive(Debug)]
struct DeviceMemory;

// SAFETY: the fake maps all ranges of its address space with their access rights while device work
// is running. Functions that remove a range wait until no slice is running.
unsafe impl Memory for DeviceMemory {
    fn range(&self, device: u32, address: u64) -> Option<Range> {
        memory::range(device, address)
    }

    fn generation(&self) -> u64 {
        memory::generation()
    }

    fn hold(&self, slice: &mut dyn FnMut()) {
        memory::hold(slice);
    }

    fn describe(&self, _device: u32, address: u64) -> Option<String> {
        memory::describe(address)
    }

    fn replicas(&self, device: u32, address: u64, bytes: u64) -> Result<Vec<Replica>, String> {
        memory::replicas(device, address, bytes)
    }
}

static MODULES: Mutex<BTreeMap<String, Weak<Module>>> = Mutex::new(BTreeMap::new());

/// Reads the text of an image. Images with the same text share the decoded kernels.
pub(crate) fn parse(text: &str) -> Result<Arc<Module>, Error> {
    let patched = patched(text);
    let text = patched.as_deref().unwrap_or(text);
    let mut modules = lock(&MODULES);
    if let Some(module) = modules.get(text).and_then(Weak::upgrade) {
        return Ok(module);
    }
    let module = Arc::new(Module::parse(text)?);
    modules.retain(|_, module| module.strong_count() > 0);
    modules.insert(text.to_owned(), Arc::downgrade(&module));
    Ok(module)
}

/// Applies `FUSEWIRE_CUDA_FAKE_PATCH`, `FILE:LINE`: replaces a line of the PTX text by the content
/// of a file, if it has the number `LINE` after the entry of the kernel that the file's name names.
fn patched(text: &str) -> Option<String> {
    let patch = variable("PATCH")?;
    let (file, line) = patch.rsplit_once(':')?;
    let kernel = Path::new(file).file_name()?.to_str()?;
    let mut lines: Vec<&str> = text.lines().collect();
    let entry = format!(".entry {kernel}(");
    let start = lines.iter().position(|line| line.contains(&entry))?;
    let replacement = std::fs::read_to_string(file).ok()?;
    *lines.get_mut(start + line.parse::<usize>().ok()?)? = &replacement;
    Some(lines.join("\n"))
}

/// Returns the lines of a kernel that threads have executed, as lines with the number after the
/// kernel's entry, a tabulator, and the text.
pub(crate) fn executed(kernel: &str) -> String {
    let mut lines = String::new();
    for (text, module) in &*lock(&MODULES) {
        let entry = format!(".entry {kernel}(");
        let start = text.lines().position(|line| line.contains(&entry));
        if let (Some(start), Some(module)) = (start, module.upgrade()) {
            // Lines of functions precede the entry.
            for (line, text) in module.executed(kernel) {
                if let Some(after) = (line as usize - 1).checked_sub(start) {
                    let _ = writeln!(lines, "{after}\t{text}");
                }
            }
        }
    }
    lines
}

/// The last launch of a kernel on a device.
type LastLaunch = (u64, Box<Trips>);

/// Number and trips of the last launch of each kernel on each device.
static TRIPS: Mutex<BTreeMap<(String, u32), LastLaunch>> = Mutex::new(BTreeMap::new());

fn keep_trips(launch: &Launch, trips: Box<Trips>) {
    let mut all = lock(&TRIPS);
    let number = 1 + all.values().map(|it| it.0).max().unwrap_or(0);
    all.insert((launch.kernel.clone(), launch.device), (number, trips));
}

/// Returns the trips of the last launch of a kernel by device.
pub(crate) fn trips(kernel: &str) -> BTreeMap<u32, Trips> {
    let all = lock(&TRIPS);
    let of = all.iter().filter(|((name, _), _)| name == kernel);
    of.map(|((_, device), (_, trips))| (*device, (**trips).clone()))
        .collect()
}

/// Returns the trips of the last launch of a kernel, or of all kernels for `*`, on each device, as
/// JSON.
pub(crate) fn trips_report(kernel: &str) -> String {
    let steps = |steps: &Steps| json!([steps.strong, steps.weak, steps.fences]);
    let all = lock(&TRIPS);
    let fitting = all
        .iter()
        .filter(|((name, _), _)| kernel == "*" || name == kernel);
    let launch = |((kernel, device), (number, trips)): (&(String, u32), &LastLaunch)| {
        let bytes: serde_json::Map<String, Value> = trips
            .bytes
            .iter()
            .map(|(route, bytes)| (name_of(*route), json!([bytes.read, bytes.written])))
            .collect();
        let chain = trips.chain.iter().map(|step| {
            json!([
                step.device,
                step.kernel,
                step.line,
                step.instruction,
                step.source
            ])
        });
        json!({
            "kernel": kernel,
            "device": device,
            "number": number,
            "launch": trips.launch,
            "steps": steps(&trips.steps),
            "to_data": trips.to_data.as_ref().map(steps),
            "leader_instructions": trips.leader_instructions,
            "bytes": bytes,
            "chain": chain.collect::<Vec<_>>(),
        })
    };
    Value::Array(fitting.map(launch).collect()).to_string()
}

fn name_of(route: Route) -> String {
    match route {
        Route::Own => "own".to_owned(),
        Route::Peer(device) => format!("peer {device}"),
        Route::Host => "host".to_owned(),
        Route::Multicast => "multicast".to_owned(),
    }
}

/// Errors of launches, oldest first.
static FAULTS: Mutex<Vec<Error>> = Mutex::new(Vec::new());

/// Maximum number of recorded errors. Later errors are not recorded.
const RECORDED_FAULTS: usize = 1024;

fn keep_fault(error: &Error) {
    let mut faults = lock(&FAULTS);
    if faults.len() < RECORDED_FAULTS {
        faults.push(error.clone());
    }
}

/// Removes and returns the recorded errors, oldest first.
pub(crate) fn take_faults() -> Vec<Error> {
    core::mem::take(&mut lock(&FAULTS))
}

/// Returns the texts of the recorded errors, oldest first.
pub(crate) fn faults() -> String {
    let faults = lock(&FAULTS);
    faults.iter().map(|error| format!("{error}\n")).collect()
}

/// Executes an operation of a stream of a context. Returns false if it is a wait whose condition is
/// not met, or `None` if the emulator does not execute the kernels of this process.
pub(crate) fn execute_on_stream(context: &Context, operation: StreamOperation) -> Option<bool> {
    if settings().execution != Execution::Ptx {
        return None;
    }
    // SAFETY: the memory of the devices is accessed as in `Job::run`. All writers of a word that
    // streams access use atomic stores.
    let result = unsafe { machine().execute_on_stream(context.device, operation) };
    Some(result.unwrap_or_else(|error| {
        log_refusal(&error.to_string());
        context.fail(match error {
            Error::Stream { .. } => Status::IllegalAddress,
            _ => Status::LaunchFailed,
        });
        true
    }))
}

/// Returns a command for an operation that orders launches of several devices, or `None` if the
/// emulator does not need it.
pub(crate) fn note(context: usize, operation: StreamOperation) -> Option<Command> {
    let settings = settings();
    if settings.execution != Execution::Ptx || settings.devices < 2 {
        return None;
    }
    let context = CONTEXTS.get(context)?;
    Some(Command::Host(Arc::new(move || {
        execute_on_stream(&context, operation.clone());
        Ok(())
    })))
}

/// A launch that the emulator executes.
#[derive(Debug)]
pub(crate) struct Job {
    context: Arc<Context>,
    module: Arc<LoadedModule>,
    launch: Launch,
}

impl Job {
    /// Creates a launch. `occupancy` is the number of blocks that an SM can execute concurrently.
    pub(crate) fn new(
        context: &Arc<Context>,
        module: &Arc<LoadedModule>,
        kernel: &str,
        shape: &Shape,
        occupancy: u32,
        parameters: &[u8],
    ) -> Self {
        Self {
            context: Arc::clone(context),
            module: Arc::clone(module),
            launch: Launch {
                kernel: kernel.to_owned(),
                device: context.device,
                blocks: shape.grid,
                threads: shape.block,
                dynamic_shared: shape.shared_bytes,
                params: parameters.to_vec(),
                cost: MULTIPROCESSOR.div_ceil(occupancy.max(1)),
            },
        }
    }

    /// Returns the entry of the launch and its parameters: the address of the job. The launch must
    /// keep the job alive.
    pub(crate) fn entry(self: &Arc<Self>) -> (NativeEntry, [u8; 8], Grid) {
        let address = Arc::as_ptr(self) as u64;
        (run, address.to_le_bytes(), Grid::default())
    }

    fn run(&self) {
        // SAFETY: `DeviceMemory` keeps the accessed memory mapped. The memory of the devices is
        // accessed by the emulator, by copies of the fake, and by other processes that run the
        // fake.
        let result = unsafe { machine().execute(&self.module, &self.launch) };
        let error = match result {
            Ok(counts) => {
                if let Some(trips) = counts.trips {
                    keep_trips(&self.launch, trips);
                }
                return;
            }
            Err(error) => error,
        };
        log_refusal(&error.to_string());
        keep_fault(&error);
        self.context.fail(match error {
            Error::Fault(fault) => match fault.kind {
                FaultKind::IllegalAddress => Status::IllegalAddress,
                FaultKind::MisalignedAddress => Status::MisalignedAddress,
                FaultKind::Trap => Status::IllegalInstruction,
                _ => Status::LaunchFailed,
            },
            _ => Status::LaunchFailed,
        });
    }
}

/// Entry of all emulated launches.
///
/// # Safety
/// `params` must point to the address of a live [`Job`].
unsafe fn run(_: *const LaneContext, params: *const u8) {
    // SAFETY: the caller guarantees that `params` points to an address.
    let address = unsafe { params.cast::<u64>().read_unaligned() };
    // SAFETY: the caller guarantees a live job at this address.
    let job = unsafe { &*(address as *const Job) };
    job.run();
}
