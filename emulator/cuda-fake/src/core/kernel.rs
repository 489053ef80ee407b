//! Modules, functions and launches.

use core::sync::atomic::{AtomicU32, Ordering};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, OnceLock};

use fusewire::cpu::{self, BlockOrder, Grid, LaunchInfo, LaunchOwner};
use fusewire_device::arch::SHARED_BYTES;
use fusewire_device::multi_rank_grid::{GridParams, kernel_name};
use fusewire_device::native::{KERNELS, KernelInfo, NativeEntry, ParamField};
use fusewire_emulator::{Entry, LoadedModule};

use super::context::Context;
use super::emulated::{self, Job};
use super::grid::{self, GridArguments};
use super::handles::{FUNCTIONS, MODULES, fresh};
use super::record::{count_launch, log_refusal};
use super::settings::{Execution, settings};
use super::shared_object::{self, ObjectKernel};
use super::stream::Stream;
use super::{capture, constants, lock, memory};
use crate::status::{Result, Status};

/// Default limit of the shared memory of a block, in bytes.
pub(crate) const SHARED_USUAL: u32 = 48 << 10;
/// Maximum shared memory of a block in bytes (sm_90).
pub(crate) const SHARED_MOST: u32 = 227 << 10;
/// Shared memory of an SM, in bytes.
pub(crate) const SHARED_MULTIPROCESSOR: u32 = 228 << 10;
/// Shared memory that the system reserves per block, in bytes.
const SHARED_SYSTEM: u32 = 1 << 10;
/// Maximum number of threads of a block.
pub(crate) const MAX_THREADS: u32 = 1024;
/// Maximum numbers of resident threads and blocks of an SM.
pub(crate) const RESIDENT: (u32, u32) = (2048, 32);
/// Registers per thread of kernels that are not in the library's images.
const REGISTERS: u32 = 32;
/// Registers of an SM.
pub(crate) const REGISTERS_MULTIPROCESSOR: u32 = 65_536;
/// Number of sub-partitions of an SM. Each has a quarter of the register file, and a warp uses the
/// registers of one sub-partition.
const PARTS: u32 = 4;
/// Register allocation unit of a warp, in registers.
const WARP_REGISTERS: u32 = 256;

// The kernels of this crate are in `KERNELS`.
use fusewire_kernels as _;

/// Lists of kernels that tests have registered, in addition to those of linked crates.
static LISTS: Mutex<Vec<&'static [&'static [KernelInfo]]>> = Mutex::new(Vec::new());

/// Registers kernels. The fake can execute an entry of an image if a kernel with the entry's name
/// is registered or belongs to a linked crate.
pub fn register(lists: &'static [&'static [KernelInfo]]) {
    lock(&LISTS).push(lists);
}

/// Returns the kernels of a crate that is linked into the program, for
/// [`super::image::stand_in`]. Leaks the list.
pub fn kernels_of(name: &str) -> &'static [&'static [KernelInfo]] {
    let mut kernels: Vec<KernelInfo> = fusewire_device::native::kernels_of(name).copied().collect();
    kernels.sort_by_key(|kernel| kernel.name);
    vec![&*kernels.leak()].leak()
}

fn native(name: &str) -> Option<&'static KernelInfo> {
    let added = lock(&LISTS);
    KERNELS
        .iter()
        .chain(
            added
                .iter()
                .flat_map(|lists| lists.iter().copied().flatten()),
        )
        .find(|kernel| kernel.name == name)
}

/// Native code of an image's entry.
#[derive(Clone, Copy, Debug)]
enum Native {
    /// Native entry of a kernel.
    Ordinary(&'static KernelInfo),
    /// `NAME__grid`: native entry of the kernel `NAME`, run for all ranks.
    Grid(&'static KernelInfo),
    /// Kernel of a shared object.
    Object(&'static ObjectKernel),
}

impl Native {
    fn find(symbol: &str) -> Option<Self> {
        let ordinary = native(symbol).map(Self::Ordinary);
        let grid = || Some(Self::Grid(native(kernel_name(symbol)?)?));
        let object = || ObjectKernel::find(symbol).map(Self::Object);
        ordinary.or_else(grid).or_else(object)
    }

    /// Returns the parameters that an image must declare for the entry.
    fn params(self) -> &'static [ParamField] {
        match self {
            Self::Ordinary(kernel) => kernel.params,
            Self::Grid(_) => GridParams::FIELDS,
            Self::Object(kernel) => kernel.params,
        }
    }
}

/// Returns the registers per thread of the library's kernels by target and name: those that ptxas
/// assigns, from the manifest of the library's images.
fn registers() -> &'static BTreeMap<(u32, String), u32> {
    static REGISTERS: OnceLock<BTreeMap<(u32, String), u32>> = OnceLock::new();
    REGISTERS.get_or_init(|| {
        let manifest = fusewire::testing::IMAGES_MANIFEST;
        let manifest: serde_json::Value = serde_json::from_str(manifest).unwrap_or_default();
        let mut table = BTreeMap::new();
        for image in manifest["images"].as_array().into_iter().flatten() {
            let target = image["target"]
                .as_str()
                .and_then(|it| it.strip_prefix("sm_"));
            let Some(target) = target.and_then(|it| it.parse().ok()) else {
                continue;
            };
            for entry in image["entries"].as_array().into_iter().flatten() {
                let (name, registers) = (entry["name"].as_str(), entry["registers"].as_u64());
                if let (Some(name), Some(registers @ 1..)) = (name, registers) {
                    table.insert((target, name.to_owned()), registers as u32);
                }
            }
        }
        table
    })
}

/// Returns the registers per thread of the kernel or grid form `name` for a target.
fn registers_of(target: u32, name: &str) -> u32 {
    let kernel = kernel_name(name).unwrap_or(name).to_owned();
    registers()
        .get(&(target, kernel))
        .copied()
        .unwrap_or(REGISTERS)
}

/// Returns the number of warps whose registers an SM has, with `registers` per thread.
fn warps(registers: u32) -> u32 {
    let warp = (registers * 32).next_multiple_of(WARP_REGISTERS);
    REGISTERS_MULTIPROCESSOR / PARTS / warp * PARTS
}

/// Returns the maximum number of threads of a block that the compiler of the library's images
/// allows for a kernel: 512, or as many as the registers of an SM suffice for.
pub(super) fn most_threads(target: u32, name: &str) -> u32 {
    (warps(registers_of(target, name)) * 32).min(512)
}

/// A loaded image.
#[derive(Debug)]
pub(crate) struct Module {
    pub(crate) handle: usize,
    pub(crate) context: usize,
    image: Arc<LoadedModule>,
    /// Handles of the functions that the program has requested, by name.
    functions: Mutex<BTreeMap<String, usize>>,
}

/// An entry of a module.
#[derive(Debug)]
pub(crate) struct Function {
    pub(crate) module: usize,
    pub(crate) context: usize,
    pub(crate) entry: Entry,
    image: Arc<LoadedModule>,
    native: Option<Native>,
    /// Target of the image, such as 90 for sm_90.
    pub(crate) target: u32,
    /// Registers per thread.
    pub(crate) registers: u32,
    pub(crate) max_dynamic: AtomicU32,
}

/// Shape and attributes of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) shared_bytes: u32,
    pub(crate) cluster: [u32; 3],
    pub(crate) cooperative: bool,
}

/// External functions that the driver provides.
const SYSTEM: [&str; 4] = ["vprintf", "malloc", "free", "__assertfail"];

/// Loads PTX. An error contains the message that the driver's compiler would log.
pub(crate) fn load(context: &Context, text: &str) -> core::result::Result<usize, (Status, String)> {
    let invalid = |error: fusewire_emulator::Error| {
        let detail = match error {
            fusewire_emulator::Error::Ptx { line, detail } => {
                format!("ptxas application ptx input, line {line}; fatal   : {detail}")
            }
            other => format!("ptxas fatal   : {other}"),
        };
        (Status::InvalidPtx, detail)
    };
    let image = emulated::parse(text).map_err(invalid)?;
    let settings = settings();
    let fatal = |status, detail: String| Err((status, format!("ptxas fatal   : {detail}")));
    // CUDA 12.5 and 12.6 both have PTX 8.5, so later minor versions of CUDA 12 are one ahead of
    // PTX: CUDA 12.8 has PTX 8.7. CUDA 13.0 has PTX 9.0.
    let newest = match settings.driver {
        13_000.. => 90,
        driver => 80 + (driver - 12_000.min(driver)) / 10 - u32::from(driver >= 12_060),
    };
    if image.version() > newest {
        return fatal(
            Status::UnsupportedPtxVersion,
            format!(
                "Unsupported .version {}.{}; current version is '{}.{}'",
                image.version() / 10,
                image.version() % 10,
                newest / 10,
                newest % 10
            ),
        );
    }
    let target = image.target();
    if target > settings.capability || (image.is_exact() && target != settings.capability) {
        return fatal(
            Status::InvalidPtx,
            format!(
                "SM version specified by .target (sm_{target}) is not supported by the device's \
                 sm_{}",
                settings.capability
            ),
        );
    }
    let mut external = image.external_functions();
    if let Some(name) = external.find(|name| !SYSTEM.contains(name)) {
        return fatal(
            Status::InvalidPtx,
            format!("Unresolved extern function '{name}'"),
        );
    }
    let handle = fresh();
    let module = Module {
        handle,
        context: context.handle,
        image: Arc::new(LoadedModule::new(&image, context.device).map_err(invalid)?),
        functions: Mutex::default(),
    };
    MODULES.insert_as(handle, Arc::new(module));
    Ok(handle)
}

/// Unloads a module. Enqueued launches still run.
pub(crate) fn unload(handle: usize) -> Result<()> {
    let module = MODULES.remove(handle).ok_or(Status::InvalidHandle)?;
    FUNCTIONS.take(|function| function.module == module.handle);
    Ok(())
}

impl Module {
    /// Returns the handle of a function.
    pub(crate) fn function(&self, name: &str) -> Result<usize> {
        let image = self.image.module();
        let entry = image.entry(name).ok_or(Status::NotFound)?;
        let mut functions = lock(&self.functions);
        if let Some(handle) = functions.get(name) {
            return Ok(*handle);
        }
        let handle = FUNCTIONS.insert(Arc::new(Function {
            module: self.handle,
            context: self.context,
            entry: entry.clone(),
            native: Native::find(name),
            target: image.target(),
            registers: registers_of(image.target(), name),
            max_dynamic: AtomicU32::new(SHARED_USUAL.saturating_sub(entry.shared_bytes)),
            image: Arc::clone(&self.image),
        }));
        functions.insert(name.to_owned(), handle);
        Ok(handle)
    }

    /// Returns the names of all entries.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let entries = self.image.module().entries().iter();
        entries.map(|entry| entry.name.as_str())
    }
}

impl Function {
    /// Returns the maximum number of threads of a block.
    pub(crate) fn max_threads(&self) -> u32 {
        let most = settings().max_threads.min(MAX_THREADS);
        match self.entry.max_threads {
            0 => most,
            threads => threads.min(most),
        }
    }

    /// Returns the number of blocks that can be resident on one SM.
    pub(crate) fn occupancy(&self, threads: u32, dynamic: u32) -> Result<u32> {
        if threads == 0 || threads > MAX_THREADS {
            return Err(Status::InvalidValue);
        }
        if threads > self.max_threads() || dynamic > SHARED_MOST {
            return Ok(0);
        }
        let shared = self.entry.shared_bytes + dynamic + SHARED_SYSTEM;
        let by_threads = RESIDENT.0 / threads.next_multiple_of(32);
        Ok(by_threads
            .min(RESIDENT.1)
            .min(warps(self.registers) / threads.div_ceil(32))
            .min(SHARED_MULTIPROCESSOR / shared))
    }

    /// Returns true if the parameters that the image declares match the parameters of the native
    /// entry.
    fn fits(&self, native: Native) -> bool {
        let declared = self.entry.params.iter();
        let declared = declared.map(|it| (it.offset as usize, it.size as usize));
        declared.eq(native.params().iter().map(|it| (it.offset, it.size)))
    }

    /// Checks a launch shape. Returns the numbers of blocks and threads.
    fn check(&self, shape: &Shape) -> Result<(u32, u32)> {
        let product = |dimensions: [u32; 3]| {
            let wide = dimensions.map(u64::from);
            u32::try_from(wide[0].saturating_mul(wide[1]).saturating_mul(wide[2]))
                .ok()
                .filter(|count| *count > 0)
                .ok_or(Status::InvalidValue)
        };
        let (blocks, threads) = (product(shape.grid)?, product(shape.block)?);
        let limit = self.max_dynamic.load(Ordering::Relaxed);
        if threads > self.max_threads() || shape.shared_bytes > limit {
            return Err(Status::InvalidValue);
        }
        if self.occupancy(threads, shape.shared_bytes)? == 0 {
            return Err(Status::LaunchOutOfResources);
        }
        if shape.cluster != [0; 3] {
            if product(shape.cluster)? > 8 || settings().capability < 90 {
                return Err(Status::InvalidClusterSize);
            }
            let whole = shape
                .grid
                .iter()
                .zip(shape.cluster)
                .all(|(grid, cluster)| grid.is_multiple_of(cluster));
            if !whole {
                return Err(Status::InvalidValue);
            }
        }
        if shape.cooperative {
            let resident = self.occupancy(threads, shape.shared_bytes)?;
            if blocks > resident.saturating_mul(settings().multiprocessors) {
                return Err(Status::CooperativeLaunchTooLarge);
            }
        }
        Ok((blocks, threads))
    }

    /// Enqueues a launch. `parameters` contains the bytes of all parameters at the offsets that the
    /// image declares.
    pub(crate) fn launch(
        &self,
        context: &Arc<Context>,
        stream: &Stream,
        shape: &Shape,
        parameters: &[u8],
    ) -> Result<()> {
        if self.context != context.handle || stream.context != context.handle {
            return Err(Status::InvalidHandle);
        }
        let (blocks, threads) = self.check(shape)?;
        let name = &self.entry.name;
        let (launch, table, job) = if settings().execution == Execution::Ptx {
            let occupancy = self.occupancy(threads, shape.shared_bytes)?;
            let job = Job::new(context, &self.image, name, shape, occupancy, parameters);
            let job = Arc::new(job);
            let (entry, argument, grid) = job.entry();
            // SAFETY: the owner keeps the job alive, whose address is the parameter of the entry.
            // `cuda.h` requires the values of the parameters to be valid when the kernel runs.
            let launch = unsafe { cpu::Launch::new(entry, &argument, grid) };
            (launch, None, Some(job))
        } else {
            let (launch, table) = self.native_launch(shape, blocks, parameters)?;
            (launch, table, None)
        };
        let launch = launch.map_err(|error| {
            log_refusal(&format!("{name}: {error}"));
            Status::LaunchOutOfResources
        })?;
        let words = self.entry.params.iter().filter(|it| it.size == 8);
        let owner = Owner {
            context: Arc::clone(context),
            name: name.clone(),
            table,
            _job: job,
            words: words
                .filter_map(|it| {
                    let at = it.offset as usize;
                    parameters.get(at..at + 8)?.try_into().ok()
                })
                .map(u64::from_le_bytes)
                .collect(),
        };
        let launch = launch.owned_by(Arc::new(owner), [0; 4]);
        capture::submit(stream, cpu::Command::Launch(launch))?;
        count_launch(name);
        Ok(())
    }

    /// Creates a launch of the native entry. Also returns the arguments and the number of ranks of
    /// a grid form.
    #[allow(clippy::type_complexity)] // used once
    fn native_launch(
        &self,
        shape: &Shape,
        blocks: u32,
        parameters: &[u8],
    ) -> Result<(fusewire::Result<cpu::Launch>, Option<(GridArguments, u32)>)> {
        let name = &self.entry.name;
        let Some(native) = self.native else {
            log_refusal(&format!(
                "{name} has no native entry; `register` its kernel, or set \
                 FUSEWIRE_CUDA_FAKE_KERNELS"
            ));
            return Err(Status::NotSupported);
        };
        if !self.fits(native) {
            log_refusal(&format!(
                "the image's parameters of {name} differ from those of its native entry; rebuild \
                 the image"
            ));
            return Err(Status::InvalidImage);
        }
        if shape.grid[1] != 1 || shape.grid[2] != 1 {
            log_refusal(&format!(
                "{name}: the fake does not support grids of more than one dimension"
            ));
            return Err(Status::NotSupported);
        }
        let grid = Grid {
            blocks,
            lanes: 1,
            warp: 1,
            shared_bytes: shape.shared_bytes.min(SHARED_BYTES as u32),
            order: if blocks == 1 {
                BlockOrder::Sequential
            } else {
                BlockOrder::Concurrent
            },
        };
        let mut table = None;
        let (entry, bound): (NativeEntry, _) = match native {
            Native::Ordinary(kernel) => (kernel.native.entry(fusewire::isa(), 1), None),
            Native::Grid(kernel) => {
                let bound = GridArguments::new(kernel, parameters).ok_or(Status::InvalidValue)?;
                let Some(ranks) = bound.ranks(blocks) else {
                    log_refusal(&format!(
                        "{name}: {blocks} blocks are not a multiple of the blocks per rank: \
                         {bound:?}"
                    ));
                    return Err(Status::InvalidValue);
                };
                table = Some((bound, ranks));
                (grid::run, Some(bound.bytes().to_vec()))
            }
            Native::Object(kernel) => (shared_object::run, Some(kernel.arguments(parameters))),
        };
        let arguments = bound.as_ref().map_or(parameters, |bound| bound.as_slice());
        // SAFETY: `fits` has checked that the parameters have the layout of the entry's struct, and
        // `cuda.h` requires their values to be valid when the kernel runs.
        let launch = unsafe { cpu::Launch::new(entry, arguments, grid) };
        Ok((launch, table))
    }
}

/// State of one launch for the hooks that run before and after the kernel.
#[derive(Debug)]
struct Owner {
    context: Arc<Context>,
    name: String,
    /// All 8-byte arguments. Any of them may be an address.
    words: Vec<u64>,
    /// A grid form's arguments and number of ranks.
    table: Option<(GridArguments, u32)>,
    /// The job of an emulated launch, which the launch refers to by address.
    _job: Option<Arc<Job>>,
}

impl Owner {
    /// Describes the first argument that is an address at which the device would fault. Returns
    /// `None` if all arguments are valid.
    fn fault(&self) -> Option<String> {
        let device = self.context.device;
        let bad = |words: &[u64]| {
            let word = words.iter().find(|word| memory::faults(**word, device))?;
            Some(format!(
                "argument {word:#x} is an address without mapped memory or without access"
            ))
        };
        let all = |words: &[u64]| {
            bad(words).or_else(|| {
                let mut constants = words.iter();
                constants.find_map(|word| constants::fault(*word, device))
            })
        };
        all(&self.words).or_else(|| {
            let (table, ranks) = self.table?;
            match table.words(ranks, device) {
                Ok(words) => all(&words),
                Err(detail) => Some(detail),
            }
        })
    }
}

impl LaunchOwner for Owner {
    fn before(&self, _: &LaunchInfo) -> fusewire::Result<u64> {
        if self.context.failure().is_err() {
            return Err(refused(&self.name, "the device has a sticky error"));
        }
        memory::begin_work();
        if let Some(detail) = self.fault() {
            memory::end_work();
            self.context.fail(Status::IllegalAddress);
            log_refusal(&format!("{}: {detail}", self.name));
            return Err(refused(&self.name, &detail));
        }
        Ok(0)
    }

    fn after(&self, _: u64, _: &LaunchInfo, ran: bool) -> fusewire::Result<()> {
        memory::end_work();
        if !ran {
            self.context.fail(Status::LaunchFailed);
        }
        Ok(())
    }
}

fn refused(name: &str, detail: &str) -> fusewire::Error {
    fusewire::Error::Driver {
        library: "CUDA fake",
        call: "kernel",
        detail: format!("{name}: {detail}"),
    }
}
