//! How ranks find each other's memory: through a store, before any kernel runs.

use core::hash::{Hash, Hasher};
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;
use std::hash::DefaultHasher;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;

use fusewire_device::layout::{
    BlockState, CONST_MAGIC, CommConst, CommState, LAYOUT_VERSION, LINE, MAX_WINDOWS, PadConfig,
    PadLayout, Progress, STATE_MAGIC,
};

use super::directory::Site;
use super::meeting::{Card, Meeting, Seat};
use super::multicast;
use super::observe::{Hooks, Recorder};
use super::on_gpu::{BLOCKS, OnGpu};
use super::reconfigure::random;
use super::windows::Windows;
use super::{Communicator, Inner, MAX_SIZE, nanoseconds};
use super::{one_grid, peers};
use crate::backend::{Backend, Reach};
use crate::bootstrap::{RankSize, host_id, store_from_env};
use crate::device::{Device, isa};
use crate::gpu::Gpu;
use crate::gpu::one_grid::Gang;
use crate::memory::Memory;
use crate::options::Options;
use crate::store::Store;
use crate::stream::Stream;
use crate::{Error, Result};

impl Communicator {
    /// Joins the communicator `name` as `rank` of `size`. All ranks together, with the same name, size and
    /// agreed options, over one store.
    ///
    /// Ranks on several hosts (told apart by [`host_id`]) whose GPUs are all in one NVLink domain are as ranks of one host. Others
    /// need a build with the feature `gloo`: kernels work on each host, Gloo between them, and [`Communicator::plan`]
    /// says which way an operation takes. With [`crate::Determinism::Bitwise`] the bits are those of one host; there
    /// are no windows.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use fusewire::{Communicator, Device, Options, ReduceOp, store::MemoryStore};
    ///
    /// let store = Arc::new(MemoryStore::new());
    /// let comm = Communicator::new(Device::Cpu, 0, 1, store, "alone", Options::default())?;
    /// let mut x = [1.0f32, 2.0];
    /// comm.all_reduce(x.as_mut_slice(), ReduceOp::Sum)?;
    /// assert_eq!(x, [1.0, 2.0]);
    /// # Ok::<(), fusewire::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Communicator`] when ranks do not fit together (size, options, hosts),
    /// [`Error::StoreTimeout`] when a rank does not come, and the errors of store and memory.
    pub fn new(
        device: Device,
        rank: u32,
        size: u32,
        store: Arc<dyn Store>,
        name: &str,
        options: Options,
    ) -> Result<Self> {
        let options = options.resolved(device);
        validate(name, rank, size, &options)?;
        let Seat { prefix } = Seat::take(&*store, name, rank, &host_id()?)?;
        Self::form(Forming {
            device,
            rank,
            size,
            prefix,
            store,
            name: name.to_owned(),
            options,
            generation: 0,
            hooks: Hooks::default(),
            meeting_timeout: None,
            reach: Reach::Host,
        })
    }

    /// As [`Communicator::form`], once rank, size and options are known to be possible.
    pub(super) fn form_checked(mut forming: Forming) -> Result<Self> {
        forming.options = forming.options.resolved(forming.device);
        validate(&forming.name, forming.rank, forming.size, &forming.options)?;
        Self::form(forming)
    }

    /// Meets the other ranks at the keys that start with the prefix, which no other communicator has used.
    pub(super) fn form(forming: Forming) -> Result<Self> {
        let Forming {
            rank,
            size,
            options,
            ..
        } = &forming;
        let (rank, size) = (*rank, *size);
        forming.check_one_grid(None)?;
        let layout = layout(size, options);
        let agreed = format!("pad-{:016x}", agreed_hash(size, options));
        let meeting = forming.meeting();
        if forming.device.is_gpu() {
            // Before any kernel can wait for another: loading one may wait for the device.
            Gpu::open(forming.device)?.load()?;
        }
        let pad = Memory::create(forming.device, layout.bytes, "fusewire-pad")?;
        write_state(&pad, &layout, options, forming.generation)?;
        let site = Site::of(forming.device)?;
        let (elsewhere, cards) = meeting.gather(&agreed, &pad.descriptor()?, &site)?;
        if let Some(elsewhere) = elsewhere {
            forming.check_one_grid_over(&elsewhere)?;
            let here = cards.iter().map(|card| card.rank).collect();
            return forming.over_hosts(&agreed, here, &elsewhere);
        }
        let process = |card: &Card| card.is_here.then(|| card.memory.process());
        let processes = cards.iter().map(process).collect();
        let multicast = multicast::is_possible(&cards);
        forming.check_kinds(&cards)?;
        forming.check_one_grid_of(cards.iter().map(|card| &card.memory))?;
        let pads = if forming.device.is_gpu() {
            // Others map it also where this rank is refused.
            let _offered = pad.clone();
            let room = forming.check_neighbours(cards.iter().map(|card| &card.memory));
            let pads = room.and_then(|()| meeting.open(forming.device, pad, cards));
            meeting.unanimous(pads)?
        } else {
            meeting.open(forming.device, pad, cards)?
        };
        let crowded = meeting.agree("crowded", !forming.device.is_gpu() && size > cores())?;
        let gang = forming.gang()?;
        let parts = Parts {
            place: (rank, size),
            layout,
            gang,
            crowded,
            pads,
            processes,
            multicast,
            backend: None,
        };
        let comm = Self::assemble(forming, parts)?;
        let mapped = format!("mapped-{}", comm.next_host_call());
        comm.meeting()
            .end(&mapped, &agreed, &site.host, &["crowded", one_grid::KEY])?;
        Ok(comm)
    }

    /// A communicator whose operations `backend` carries out: its pad is this rank's own affair.
    pub(super) fn over(backend: Arc<dyn Backend>, mut forming: Forming) -> Result<Self> {
        forming.options = forming.options.resolved(forming.device);
        forming.check_one_grid(Some(backend.name()))?;
        let layout = layout(1, &forming.options);
        let pad = Memory::create(Device::Cpu, layout.bytes, "fusewire-pad")?;
        write_state(&pad, &layout, &forming.options, forming.generation)?;
        let parts = Parts {
            place: (0, 1),
            layout,
            gang: None,
            crowded: false,
            pads: vec![pad],
            processes: Vec::new(),
            multicast: false,
            backend: Some(backend),
        };
        Self::assemble(forming, parts)
    }

    /// Puts the parts together.
    fn assemble(forming: Forming, parts: Parts) -> Result<Self> {
        let Forming {
            device,
            rank,
            size,
            store,
            name,
            options,
            prefix,
            generation,
            hooks,
            meeting_timeout: _,
            reach,
        } = forming;
        let Parts {
            place: (team_rank, team_size),
            layout,
            gang,
            crowded,
            pads,
            processes,
            multicast,
            backend,
        } = parts;
        let pad = pads[team_rank as usize].clone();
        let gpu = pad.gpu().cloned();
        // Without random numbers the address and the time must do.
        let identity = random().unwrap_or_else(|_| {
            let mut hasher = DefaultHasher::new();
            (
                std::process::id(),
                pads[0].ptr() as usize,
                std::time::SystemTime::now(),
            )
                .hash(&mut hasher);
            hasher.finish()
        });
        let windows = Windows::new(gpu.as_ref())?;
        windows.add(team_rank, pads.clone())?;
        let on_gpu = gpu
            .map(|gpu| OnGpu::new(gpu, options.threads, gang))
            .transpose()?;
        let mut hasher = DefaultHasher::new();
        prefix.hash(&mut hasher);
        let constants = Box::new(CommConst {
            magic: CONST_MAGIC,
            version: LAYOUT_VERSION,
            bytes: size_of::<CommConst>() as u32,
            rank: team_rank,
            size: team_size,
            team_first: 0,
            team_size,
            max_blocks: options.blocks,
            spins: options.spins.unwrap_or(if on_gpu.is_some() {
                GPU_SPINS
            } else if team_size <= cores() && options.lanes == 1 {
                20_000
            } else {
                1
            }),
            id: hasher.finish(),
            generation,
            timeout_ns: nanoseconds(options.timeout),
            windows: windows.table(),
            state: pad.ptr() as u64,
            contexts: 0,
            context_count: 0,
            pad: layout,
            host_word: on_gpu.as_ref().map_or(0, OnGpu::host_word),
        });
        if let Some(on_gpu) = &on_gpu {
            on_gpu.publish(&constants)?;
        }
        let stream = Stream::on_device(device)?;
        let inner = Arc::new(Inner {
            name,
            rank,
            size,
            device,
            crowded,
            isa: isa(),
            constants,
            windows,
            pad,
            pads,
            processes,
            multicast,
            on_gpu,
            prefix,
            store,
            host_calls: AtomicU64::new(0),
            last_stream: AtomicUsize::new(0),
            order: Mutex::default(),
            failure: OnceLock::new(),
            generation,
            backend,
            reach,
            hooks,
            recorder: Recorder::new(options.flight_recorder_entries, size),
            world: OnceLock::new(),
            finalized: AtomicBool::new(false),
            identity,
            replaced: OnceLock::new(),
            options,
        });
        Inner::watch(&inner);
        peers::watch(&inner);
        Ok(Self {
            algorithm: inner.options.algorithm,
            inner,
            stream,
            timeout_ns: 0,
        })
    }

    /// Joins the communicator `"world"` as the rank that the environment names (`fusewire run`,
    /// `torchrun`, `mpirun`), over the store at `MASTER_ADDR:MASTER_PORT`.
    ///
    /// # Errors
    /// [`Error::Bootstrap`] when the environment names no rank or store, and as [`Communicator::new`].
    pub fn from_env(device: Device, options: Options) -> Result<Self> {
        let RankSize { rank, size, .. } = RankSize::from_env()?;
        let store = store_of_environment(rank, size, options.timeout)?;
        Self::new(device, rank, size, store, "world", options)
    }

    /// Number of the next collective host call.
    pub(super) fn next_host_call(&self) -> u64 {
        self.inner.host_calls.fetch_add(1, Ordering::Relaxed)
    }

    /// Every rank's new segment of `bytes` bytes. All ranks together.
    pub(super) fn share(&self, what: &str, bytes: u64) -> Result<Vec<Memory>> {
        let memory = Memory::create(self.device(), bytes, "fusewire-window")?;
        self.share_memory(what, memory)
    }

    /// Every rank's piece of memory. All ranks together.
    pub(super) fn share_memory(&self, what: &str, memory: Memory) -> Result<Vec<Memory>> {
        // Counted also where the window is refused, so that ranks go on with the same keys.
        let what = format!("{what}-{}", self.next_host_call());
        if self.inner.windows.count() == MAX_WINDOWS {
            return Err(Error::Communicator {
                name: self.inner.name.clone(),
                detail: format!(
                    "there were {MAX_WINDOWS} windows already, the most that a communicator can have in its \
                     life; allocate fewer and larger tensors and slice them"
                ),
            });
        }
        self.meeting().share(self.device(), &what, memory)
    }

    /// Waits in the store until all ranks are here.
    pub(super) fn meet(&self, what: &str) -> Result<()> {
        self.meeting()
            .barrier(&format!("{what}-{}", self.next_host_call()))
    }

    /// Every rank's bytes. All ranks together.
    pub(super) fn exchange(&self, what: &str, own: &[u8]) -> Result<Vec<Vec<u8>>> {
        let what = format!("{what}-{}", self.next_host_call());
        self.meeting().exchange(&what, own)
    }

    fn meeting(&self) -> Meeting<'_> {
        let inner = &*self.inner;
        Meeting {
            store: &*inner.store,
            prefix: &inner.prefix,
            name: &inner.name,
            rank: inner.rank,
            size: inner.size,
            timeout: inner.options.timeout,
        }
    }
}

/// Runs `size` ranks as threads of this process; each gets its communicator. The results are in rank
/// order; a rank that cannot join gives its error.
///
/// # Errors
/// Those of [`Communicator::new`] and of `body`, per rank.
pub fn run_threads<R: Send>(
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    run_threads_with("fusewire", size, options, body)
}

/// As [`run_threads`], with the backend of that name.
///
/// # Errors
/// Those of [`crate::new_comm`] and of `body`, per rank.
pub fn run_threads_with<R: Send>(
    backend: &str,
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    run_threads_on(Device::Cpu, backend, size, options, body)
}

/// As [`run_threads_with`], with communicators of `device`: ranks on a GPU share it, with a stream each.
///
/// # Errors
/// As there; and [`Error::NoDevice`] of every rank where the device is not there.
pub fn run_threads_on<R: Send>(
    device: Device,
    backend: &str,
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let store: Arc<dyn Store> = Arc::new(crate::store::MemoryStore::new());
    let run = |rank: u32| {
        let mut options = options.clone();
        options.store = Some(Arc::clone(&store));
        options.rank_size = Some((rank, size));
        // Errors are given to the caller.
        options
            .abort_process_on_timeout_or_error
            .get_or_insert(false);
        body(super::new_comm(backend, device, "threads", options)?)
    };
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let run = &run;
                scope.spawn(move || run(rank))
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| match rank.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
            .collect()
    })
}

/// The store that the environment names, served by rank 0 where nobody else does.
pub(super) fn store_of_environment(
    rank: u32,
    size: u32,
    timeout: Duration,
) -> Result<Arc<dyn Store>> {
    let hosted = store_from_env(rank, size, timeout)?;
    Ok(Arc::new(EnvStore {
        store: hosted.store(),
        _hosted: hosted,
    }))
}

/// Polls of a wait on a GPU before it looks at the clock and the abort word.
const GPU_SPINS: u32 = 1000;

impl Options {
    /// Bytes of workspace (pad and staging) that a communicator of `size` ranks with these options will hold on `device`, for
    /// each rank: what [`Communicator::workspace_bytes`] says of one that there is.
    ///
    /// # Errors
    /// [`Error::Communicator`] for a size or options that no communicator can have.
    pub fn workspace_bytes(&self, device: Device, size: u32) -> Result<u64> {
        let options = self.clone().resolved(device);
        validate("workspace", 0, size, &options)?;
        Ok(layout(size, &options).bytes)
    }

    /// With the device's defaults in place of zeros.
    fn resolved(mut self, device: Device) -> Self {
        if self.blocks == 0 {
            self.blocks = if device.is_gpu() { BLOCKS } else { 1 };
        }
        self
    }
}

/// What a communicator consists of.
struct Parts {
    /// Rank and size as kernels see them.
    place: (u32, u32),
    layout: PadLayout,
    /// Where ranks gather that share a grid.
    gang: Option<Arc<Gang>>,
    crowded: bool,
    pads: Vec<Memory>,
    /// Id and start time of each rank's process; `None` on another host.
    processes: Vec<Option<(u32, u64)>>,
    /// Whether windows can have multicast addresses.
    multicast: bool,
    backend: Option<Arc<dyn Backend>>,
}

/// What a communicator is formed from.
pub(super) struct Forming {
    pub(super) device: Device,
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) store: Arc<dyn Store>,
    pub(super) name: String,
    pub(super) options: Options,
    /// Its keys in the store start with this.
    pub(super) prefix: String,
    pub(super) generation: u64,
    pub(super) hooks: Hooks,
    /// Bound of the meeting, where it is not the communicator's.
    pub(super) meeting_timeout: Option<Duration>,
    pub(super) reach: Reach,
}

impl Forming {
    pub(super) fn meeting(&self) -> Meeting<'_> {
        Meeting {
            store: &*self.store,
            prefix: &self.prefix,
            name: &self.name,
            rank: self.rank,
            size: self.size,
            timeout: self.meeting_timeout.unwrap_or(self.options.timeout),
        }
    }
}

fn layout(size: u32, options: &Options) -> PadLayout {
    PadLayout::new(&PadConfig {
        size,
        max_blocks: options.blocks,
        packet_slot: options.packet_slot_bytes,
        channel_slot: options.channel_slot_bytes,
        channel_depth: options.channel_depth,
        staging: options.staging_bytes,
        user_signals: 64,
    })
}

/// A store together with the server that rank 0 may host for it.
#[derive(Debug)]
struct EnvStore {
    store: Arc<dyn Store>,
    _hosted: crate::bootstrap::BootstrapStore,
}

impl Store for EnvStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(key, value)
    }
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.store.get(key, timeout)
    }
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.store.wait(keys, timeout)
    }
    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.store.add(key, amount)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(key, expected, desired)
    }
    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.store.check(keys)
    }
    fn delete(&self, key: &str) -> Result<bool> {
        self.store.delete(key)
    }
    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.append(key, value)
    }
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.store.multi_get(keys, timeout)
    }
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.store.multi_set(pairs)
    }
    fn num_keys(&self) -> Result<u64> {
        self.store.num_keys()
    }
}

/// Most bytes of one of the pad's parts, and most slots of a channel: products of them fit 64 bits.
const MAX_OPTION: u64 = 1 << 30;

pub(super) fn validate(name: &str, rank: u32, size: u32, options: &Options) -> Result<()> {
    let refuse = |detail: String| {
        Err(Error::Communicator {
            name: name.to_owned(),
            detail,
        })
    };
    if size == 0 || size > MAX_SIZE {
        return refuse(format!("{size} ranks; 1 to {MAX_SIZE} are possible"));
    }
    if rank >= size {
        return refuse(format!("rank {rank} of {size}"));
    }
    if options.blocks == 0 || options.blocks > 64 {
        return refuse(format!("{} blocks; 1 to 64 are possible", options.blocks));
    }
    if let Some(reason) = options.determinism.refuses(options.algorithm) {
        return refuse(reason.to_owned());
    }
    if !matches!(options.lanes, 1 | 32 | 64) {
        return refuse(format!("{} lanes; 1, 32 or 64 are possible", options.lanes));
    }
    if options.threads > 512 || !options.threads.is_multiple_of(64) {
        return refuse(format!(
            "{} threads a block; multiples of 64 up to 512 are possible, or 0 for the default",
            options.threads
        ));
    }
    if options.packet_slot_bytes < 128 || !options.packet_slot_bytes.is_multiple_of(64) {
        return refuse("a packet slot is a multiple of 64 bytes, 128 at least".to_owned());
    }
    for (what, bytes) in [
        ("a packet slot", options.packet_slot_bytes),
        ("staging", options.staging_bytes),
        ("a channel's slot", options.channel_slot_bytes),
        ("the depth of a channel", options.channel_depth),
    ] {
        if bytes > MAX_OPTION {
            return refuse(format!("{what} of {bytes}; {MAX_OPTION} at most"));
        }
    }
    let least = u64::from(size) * 64 * 8;
    if options.staging_bytes < least {
        return refuse(format!(
            "staging of {} bytes; {least} at least",
            options.staging_bytes
        ));
    }
    if options.channel_depth == 0
        || options.channel_slot_bytes == 0
        || !options.channel_slot_bytes.is_multiple_of(64)
    {
        return refuse("a channel has at least one slot, of a multiple of 64 bytes".to_owned());
    }
    Ok(())
}

/// Hash of everything that must be equal on all ranks.
pub(super) fn agreed_hash(size: u32, options: &Options) -> u64 {
    let mut hasher = DefaultHasher::new();
    LAYOUT_VERSION.hash(&mut hasher);
    size.hash(&mut hasher);
    options.algorithm.hash(&mut hasher);
    options.determinism.hash(&mut hasher);
    options.residency.hash(&mut hasher);
    options.max_object_bytes.hash(&mut hasher);
    (options.blocks, options.lanes, options.threads).hash(&mut hasher);
    options.first_epoch.hash(&mut hasher);
    (options.staging_bytes, options.packet_slot_bytes).hash(&mut hasher);
    (options.channel_slot_bytes, options.channel_depth).hash(&mut hasher);
    hasher.finish()
}

fn cores() -> u32 {
    // SAFETY: sysconf has no preconditions.
    let cores = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_ONLN) };
    u32::try_from(cores).unwrap_or(1).max(1)
}

fn write_state(pad: &Memory, layout: &PadLayout, options: &Options, generation: u64) -> Result<()> {
    let mut state: CommState = bytemuck::Zeroable::zeroed();
    state.magic = STATE_MAGIC;
    state.version = LAYOUT_VERSION;
    state.bytes = size_of::<CommState>() as u32;
    state.generation = generation;
    // SAFETY: the new pad is nobody else's yet.
    unsafe { pad.write(0, bytemuck::bytes_of(&state))? };
    let mut block_state: BlockState = bytemuck::Zeroable::zeroed();
    block_state.sequence = options.first_epoch;
    block_state.rounds = options.first_epoch;
    block_state.packet_epoch = options.first_epoch;
    // No operation yet, but the sequence number that peers compare with.
    let mut progress: Progress = bytemuck::Zeroable::zeroed();
    progress.call = options.first_epoch << 40;
    progress.count = options.first_epoch << 48;
    progress.step = options.first_epoch << 40;
    for block in 0..u64::from(options.blocks) {
        // SAFETY: as above.
        unsafe {
            pad.write(
                layout.blocks + block * LINE,
                bytemuck::bytes_of(&block_state),
            )?;
            pad.write(
                layout.progress + block * LINE,
                bytemuck::bytes_of(&progress),
            )?;
        }
    }
    Ok(())
}
