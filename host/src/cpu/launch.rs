//! Launches: the native entry and the arguments of a kernel, and the execution of the kernel's
//! blocks and lanes.

use core::any::Any;
use core::cell::OnceCell;
use core::fmt;
use core::panic::AssertUnwindSafe;
use core::ptr::NonNull;
use std::panic;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;

use fusewire_device::arch::SHARED_BYTES;
use fusewire_device::group::cpu::{BlockShared, LaneContext, MAX_LANES, MAX_WARP, MAX_WARPS};
use fusewire_device::native::NativeEntry;

use super::running::{self, RunningKernel};
use crate::{Error, Result};

/// Maximum size in bytes of a kernel's parameter struct.
pub const MAX_PARAM_BYTES: usize = 256;

/// Maximum number of threads of a launch with concurrent blocks or several lanes.
pub(crate) const MAX_THREADS: u32 = 4096;

/// Data that a [`LaunchOwner`] attaches to a launch. The callbacks of the owner receive the data
/// when the launch runs.
pub type LaunchInfo = [u64; 4];

/// Callbacks that run before and after a kernel, on the thread that executes the launch. A
/// communicator uses the callbacks to check its state.
pub trait LaunchOwner: Send + Sync + fmt::Debug {
    /// Called immediately before the kernel, with the `info` of the launch. Returns a word that is
    /// passed to [`LaunchOwner::after`].
    ///
    /// # Errors
    /// Returns an error to refuse the launch. The kernel does not run in that case.
    fn before(&self, info: &LaunchInfo) -> Result<u64>;

    /// Called immediately after the kernel. `ran` is false if the kernel panicked or could not run.
    ///
    /// # Errors
    /// Returns a failure that the kernel recorded. The error becomes the result of the launch.
    fn after(&self, word: u64, info: &LaunchInfo, ran: bool) -> Result<()>;
}

/// Execution order of the blocks of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BlockOrder {
    /// Sequentially, on the thread that executes the launch. Requires that the blocks of the kernel
    /// do not wait for each other.
    #[default]
    Sequential,
    /// Concurrently, each block on a separate thread. Tests with several lanes per block always use
    /// this order.
    Concurrent,
}

/// Shape of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Number of blocks, at least 1.
    pub blocks: u32,
    /// Lanes per block: 1 in production, up to 128 in tests. Each lane is a thread.
    #[doc(hidden)]
    pub lanes: u32,
    /// Lanes per warp: a power of two, at most 64, that divides `lanes`. 0 selects one warp of all
    /// lanes, or warps of 64 lanes if there are more.
    #[doc(hidden)]
    pub warp: u32,
    /// Bytes of block-shared memory that the kernel uses.
    pub shared_bytes: u32,
    /// Execution order of the blocks.
    pub order: BlockOrder,
}

impl Default for Grid {
    /// Returns a grid of one block with one lane.
    fn default() -> Self {
        Self {
            blocks: 1,
            lanes: 1,
            warp: 0,
            shared_bytes: 0,
            order: BlockOrder::Sequential,
        }
    }
}

/// Values that a launch keeps alive until the launch and every graph that contains it are dropped.
pub type KeepAlive = [Option<Arc<dyn Any + Send + Sync>>; 4];

/// The native entry, the arguments and the shape of a kernel. A stream executes a launch, and a
/// graph replays it.
#[derive(Clone)]
pub struct Launch {
    entry: NativeEntry,
    params: [u64; MAX_PARAM_BYTES / 8],
    grid: Grid,
    owner: Option<Arc<dyn LaunchOwner>>,
    info: LaunchInfo,
    kernel: RunningKernel,
    keep: KeepAlive,
}

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launch")
            .field("grid", &self.grid)
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}

impl Launch {
    /// Creates a launch of the kernel with the native entry `entry`. Copies `params`, the bytes of
    /// the kernel's parameter struct.
    ///
    /// # Safety
    /// `params` must be the parameter struct of `entry`, with an alignment of at most 8, and
    /// `entry` must support the grid's number of lanes. The requirements of the kernel, such as
    /// valid pointers among its arguments, must hold at every execution of the launch, including
    /// later replays of a graph on other threads. [`Launch::keeping`] can keep memory valid. The
    /// kernel must not launch kernels.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the grid or the parameters exceed the limits.
    pub unsafe fn new(entry: NativeEntry, params: &[u8], mut grid: Grid) -> Result<Self> {
        let invalid = |detail: String| {
            Err(Error::InvalidArgument {
                operation: "launch",
                detail,
            })
        };
        if params.len() > MAX_PARAM_BYTES {
            return invalid(format!(
                "{} bytes of parameters; the limit is {MAX_PARAM_BYTES}",
                params.len()
            ));
        }
        if grid.blocks == 0 || grid.lanes == 0 || grid.lanes as usize > MAX_LANES {
            return invalid(format!(
                "{} blocks of {} lanes; at least 1 block of 1 to {MAX_LANES} lanes is needed",
                grid.blocks, grid.lanes
            ));
        }
        if grid.warp == 0 {
            grid.warp = grid.lanes.min(MAX_WARP as u32);
        }
        if !is_warp(grid.warp, grid.lanes) {
            return invalid(format!(
                "warps of {} lanes in blocks of {}; a block consists of 1 to {MAX_WARPS} warps, \
                 whose lanes are a power of two, up to {MAX_WARP}",
                grid.warp, grid.lanes
            ));
        }
        if grid.shared_bytes as usize > SHARED_BYTES {
            return invalid(format!(
                "{} bytes of shared memory; a block has {SHARED_BYTES}",
                grid.shared_bytes
            ));
        }
        let threads = grid.blocks.saturating_mul(grid.lanes);
        if grid.needs_threads() && threads > MAX_THREADS {
            return invalid(format!("{threads} threads; the limit is {MAX_THREADS}"));
        }
        let mut words = [0u64; MAX_PARAM_BYTES / 8];
        bytemuck::bytes_of_mut(&mut words)[..params.len()].copy_from_slice(params);
        Ok(Self {
            entry,
            params: words,
            grid,
            owner: None,
            info: [0; 4],
            kernel: RunningKernel { name: "", rank: 0 },
            keep: [const { None }; 4],
        })
    }

    /// Sets the owner, whose callbacks run before and after each execution of the launch with
    /// `info`.
    #[must_use]
    pub fn owned_by(mut self, owner: Arc<dyn LaunchOwner>, info: LaunchInfo) -> Self {
        self.owner = Some(owner);
        self.info = info;
        self
    }

    /// Sets the name of the kernel and the rank, for messages.
    #[must_use]
    pub(crate) fn of_kernel(mut self, kernel: RunningKernel) -> Self {
        self.kernel = kernel;
        self
    }

    /// Keeps the values in `keep` alive until the launch and every graph that contains it are
    /// dropped.
    #[must_use]
    pub fn keeping(mut self, keep: KeepAlive) -> Self {
        self.keep = keep;
        self
    }

    /// Returns the shape of the launch.
    pub fn grid(&self) -> Grid {
        self.grid
    }

    /// Runs the kernel to completion, on this thread or on new threads.
    pub(crate) fn execute(&self) -> Result<()> {
        let Some(owner) = &self.owner else {
            check_float_environment()?;
            return self.run_blocks();
        };
        let word = owner.before(&self.info)?;
        let ran = check_float_environment().and_then(|()| self.run_blocks());
        let after = owner.after(word, &self.info, ran.is_ok());
        ran.and(after)
    }

    fn run_blocks(&self) -> Result<()> {
        if self.grid.needs_threads() {
            self.run_on_threads()
        } else {
            self.run_here()
        }
    }

    fn run_here(&self) -> Result<()> {
        with_block(self.kernel, |shared| {
            for block in 0..self.grid.blocks {
                self.run_lane(block, 0, shared);
            }
        })
    }

    fn run_lane(&self, block: u32, lane: u32, shared: &BlockShared) {
        let Grid { blocks, lanes, .. } = self.grid;
        let context = LaneContext {
            block,
            blocks,
            lane,
            lanes,
            shared,
        };
        let _running = running::enter(self.kernel);
        // SAFETY: `block < blocks` and `lane < lanes` by the loops of `run_here` and `on_threads`.
        // Both functions pass the same `shared` to all lanes of a block. By the contract of
        // `Launch::new`, `params` is the parameter struct of the entry and fulfils the requirements
        // of the kernel.
        unsafe { (self.entry)(&raw const context, self.params.as_ptr().cast()) }
    }

    fn run_on_threads(&self) -> Result<()> {
        let Grid {
            blocks,
            lanes,
            warp,
            ..
        } = self.grid;
        on_threads(
            self.kernel.name,
            blocks,
            lanes,
            warp,
            &|block, lane, shared| {
                self.run_lane(block, lane, shared);
            },
        )
    }
}

/// Returns true if blocks of `lanes` lanes can have warps of `warp` lanes.
pub(crate) fn is_warp(warp: u32, lanes: u32) -> bool {
    warp.is_power_of_two()
        && warp as usize <= MAX_WARP
        && lanes.is_multiple_of(warp)
        && (lanes / warp) as usize <= MAX_WARPS
}

/// Calls `run(block, lane, shared)` for all lanes of all blocks concurrently, each lane on a
/// separate thread. `shared` is the state that the lanes of a block share. The caller has checked
/// `lanes` and `warp` by [`is_warp`].
///
/// # Errors
/// [`Error::Launch`] if a thread cannot be started, in which case no lane runs, or if a lane
/// panics. The error contains the message of the first panic.
pub(super) fn on_threads(
    name: &str,
    blocks: u32,
    lanes: u32,
    warp: u32,
    run: &(dyn Fn(u32, u32, &BlockShared) + Sync),
) -> Result<()> {
    let shared: Vec<OwnedBlock> = (0..blocks).map(|_| OwnedBlock::new(lanes, warp)).collect();
    let latch = Latch::default();
    let first_panic = Mutex::new(None);
    let lane_thread = |block: u32, lane: u32| {
        let shared = &shared[block as usize].shared;
        if !latch.wait() {
            return;
        }
        let ran = panic::catch_unwind(AssertUnwindSafe(|| run(block, lane, shared)));
        if let Err(panic) = ran {
            let text = format!(
                "{} panicked in lane {lane} of block {block}: {}",
                kernel_of(name),
                message(&*panic)
            );
            let mut first = first_panic.lock().unwrap_or_else(PoisonError::into_inner);
            first.get_or_insert(text);
        }
        // Leaves the block barrier only after the panic is recorded. When a lane leaves, the lanes
        // that wait at the barrier also panic, and the error must report the original panic.
        shared.leave(lane);
    };
    thread::scope(|scope| {
        for block in 0..blocks {
            for lane in 0..lanes {
                let lane_thread = &lane_thread;
                let spawned = thread::Builder::new()
                    .name(format!("lane-{block}-{lane}"))
                    .spawn_scoped(scope, move || lane_thread(block, lane));
                if let Err(error) = spawned {
                    latch.open(LatchState::Refused);
                    return Err(Error::launch(format!(
                        "lane {lane} of block {block} got no thread ({error}); use fewer \
                         blocks or lanes"
                    )));
                }
            }
        }
        latch.open(LatchState::Granted);
        Ok(())
    })?;
    let first_panic = first_panic
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some(text) = first_panic {
        return Err(Error::launch(text));
    }
    // Blocks of several lanes are for tests, so the check may take its time.
    for (block, shared) in shared.iter().enumerate() {
        // SAFETY: all lanes have ended.
        if !unsafe { shared.repair_guard() } {
            return Err(Error::launch(format!(
                "{} {OVERRUN} (block {block})",
                kernel_of(name)
            )));
        }
    }
    Ok(())
}

/// Returns the kernel's name for a message.
fn kernel_of(name: &str) -> String {
    match name {
        "" => "the kernel".to_owned(),
        name => format!("kernel {name}"),
    }
}

/// Runs `body` with the thread-local state of a block with one lane. Converts a panic to an error.
fn with_block(kernel: RunningKernel, body: impl FnOnce(&BlockShared)) -> Result<()> {
    thread_local! {
        static SHARED: OnceCell<OwnedBlock> = const { OnceCell::new() };
    }
    SHARED
        .try_with(|shared| {
            let shared = shared.get_or_init(|| OwnedBlock::new(1, 1));
            // Unwind safe: the kernel accesses memory only through raw pointers, so no Rust value
            // can be left in a broken state.
            let ran = panic::catch_unwind(AssertUnwindSafe(|| body(&shared.shared)));
            let name = || kernel_of(kernel.name);
            // SAFETY: the only lane has ended.
            let is_intact = !cfg!(debug_assertions) || unsafe { shared.repair_guard() };
            match ran {
                Err(panic) => Err(Error::launch(format!(
                    "{} panicked: {}",
                    name(),
                    message(&*panic)
                ))),
                Ok(()) if !is_intact => Err(Error::launch(format!("{} {OVERRUN}", name()))),
                Ok(()) => Ok(()),
            }
        })
        .map_err(|_| Error::launch("this thread is ending"))?
}

/// Runs one block with one lane on this thread, without a [`Launch`]. The caller has checked the
/// thread's floating-point environment. An error means that the kernel panicked.
///
/// # Safety
/// `params` must point to the parameter struct of `entry`, and `entry` must support one lane. The
/// requirements of the kernel must hold during the call, and the kernel must not launch kernels.
pub(crate) unsafe fn run_single(
    kernel: RunningKernel,
    entry: NativeEntry,
    params: *const u8,
) -> Result<()> {
    with_block(kernel, |shared| {
        let _running = running::enter(kernel);
        let context = LaneContext {
            block: 0,
            blocks: 1,
            lane: 0,
            lanes: 1,
            shared,
        };
        // SAFETY: `context` describes the only lane of the only block, and its shared memory
        // belongs to this thread. The caller guarantees that `params` is the parameter struct of
        // `entry` and fulfils the requirements of the kernel.
        unsafe { entry(&raw const context, params) }
    })
}

impl Grid {
    fn needs_threads(&self) -> bool {
        self.lanes > 1 || self.order == BlockOrder::Concurrent
    }
}

/// The state that the lanes of a block share, and the shared memory to which the state points.
struct OwnedBlock {
    shared: BlockShared,
    /// The shared memory, and a guard after it.
    memory: NonNull<[SharedChunk]>,
}

// SAFETY: the memory belongs to this value. Lanes access it by the rules of block-shared memory.
unsafe impl Sync for OwnedBlock {}

#[derive(Clone, Copy, PartialEq)]
#[repr(align(128))]
struct SharedChunk([u8; 128]);

/// Bytes after the shared memory that no kernel may write.
const GUARD: SharedChunk = SharedChunk([0xa5; 128]);
const GUARD_CHUNKS: usize = 32;
/// Chunks of the shared memory itself.
const CHUNKS: usize = SHARED_BYTES.div_ceil(128);

const OVERRUN: &str = "wrote beyond the end of its shared memory";

impl OwnedBlock {
    fn new(lanes: u32, warp: u32) -> Self {
        let mut memory = vec![GUARD; CHUNKS + GUARD_CHUNKS];
        memory[..CHUNKS].fill(SharedChunk([0; 128]));
        // Owned as a raw pointer, because lanes use the memory while this value moves.
        let memory = NonNull::from(Box::leak(memory.into_boxed_slice()));
        Self {
            shared: BlockShared::new(lanes, warp, memory.cast().as_ptr()),
            memory,
        }
    }

    /// Returns false if a kernel has written beyond its shared memory, and repairs the guard.
    ///
    /// # Safety
    /// No lane may run.
    unsafe fn repair_guard(&self) -> bool {
        // SAFETY: no other code accesses the memory, by the precondition of this function.
        let memory = unsafe { &mut *self.memory.as_ptr() };
        let guard = &mut memory[CHUNKS..];
        let is_intact = guard.iter().all(|chunk| *chunk == GUARD);
        guard.fill(GUARD);
        is_intact
    }
}

impl Drop for OwnedBlock {
    fn drop(&mut self) {
        // SAFETY: the box that `new` has leaked. No lane runs.
        drop(unsafe { Box::from_raw(self.memory.as_ptr()) });
    }
}

/// Blocks every lane until all lanes have a thread. Without the latch, if a thread could not be
/// started, the other lanes would wait at a block barrier forever.
#[derive(Default)]
struct Latch {
    state: Mutex<Option<LatchState>>,
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum LatchState {
    Granted,
    Refused,
}

impl Latch {
    fn open(&self, state: LatchState) {
        *self.state.lock().unwrap_or_else(PoisonError::into_inner) = Some(state);
        self.changed.notify_all();
    }

    fn wait(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let state = self
            .changed
            .wait_while(state, |state| state.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        *state == Some(LatchState::Granted)
    }
}

/// Returns the message of a panic payload.
pub(crate) fn message(panic: &(dyn Any + Send)) -> &str {
    if let Some(text) = panic.downcast_ref::<&str>() {
        text
    } else if let Some(text) = panic.downcast_ref::<String>() {
        text
    } else {
        "no message"
    }
}

/// Fails if the floating-point mode of this thread would change results: a rounding mode other than
/// round to nearest, or flushing of subnormal numbers to zero.
#[cfg(target_arch = "x86_64")]
pub(crate) fn check_float_environment() -> Result<()> {
    const DENORMALS_ARE_ZERO: u32 = 1 << 6;
    const ROUNDING: u32 = 3 << 13;
    const FLUSH_TO_ZERO: u32 = 1 << 15;
    let mut mxcsr = 0u32;
    // SAFETY: `stmxcsr` stores the 4 bytes of the control register to a live, aligned variable.
    unsafe {
        core::arch::asm!("stmxcsr [{}]", in(reg) &raw mut mxcsr, options(nostack, preserves_flags));
    }
    if mxcsr & (DENORMALS_ARE_ZERO | ROUNDING | FLUSH_TO_ZERO) == 0 {
        return Ok(());
    }
    Err(Error::launch(format!(
        "this thread rounds otherwise than to nearest or flushes subnormal numbers to zero \
         (MXCSR is {mxcsr:#06x}), so its results would differ from other ranks'; reset the flags \
         (a library that was linked with -ffast-math may have set them)"
    )))
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn check_float_environment() -> Result<()> {
    Ok(())
}
