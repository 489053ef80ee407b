//! Memory of all ranks in one execution. The model checker controls selected parts of this memory.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};

use bytemuck::Zeroable;
use fusewire_device::arch::SHARED_BYTES;
use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::{
    BlockState, CONST_MAGIC, CONSTANTS_AT, CommConst, CommState, FailureRecord, LAYOUT_VERSION,
    LINE, MAX_WINDOWS, WindowConst, WorkspaceConfig, WorkspaceLayout,
};
use fusewire_device::mem::model::{Kind, Model};

/// Sizes and settings of a model. Models choose sizes as small as the protocol allows.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Number of ranks.
    pub ranks: u32,
    /// Number of lanes of a block. Each lane is a thread of the model checker.
    pub lanes: u32,
    /// Size of a packet slot in bytes.
    pub packet_slot: u64,
    /// Size of a channel slot in bytes.
    pub channel_slot: u64,
    /// Number of slots of a channel.
    pub channel_depth: u64,
    /// Size of staging in bytes.
    pub staging: u64,
    /// Size of a rank's input in bytes. The output has the same size.
    pub user: usize,
    /// First epoch of packets and rounds.
    pub first_epoch: u64,
    /// Timeout of waits in nanoseconds of the model's clock.
    pub timeout_ns: u64,
    /// Parts of the memory that the model checker controls.
    pub parts: Parts,
}

/// Parts of the memory that the model checker controls. A model selects only the parts that it
/// uses, because every controlled word makes the exploration slower. All other parts are plain
/// memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parts {
    /// Packet slots.
    pub packets: bool,
    /// Ready and done lines, and user signals.
    pub rounds: bool,
    /// Staging.
    pub staging: bool,
    /// Channels.
    pub channels: bool,
    /// Abort words, failure records, progress.
    pub failure: bool,
    /// Ready flags and arrival counters.
    pub words: bool,
}

impl Config {
    /// Creates the configuration of `ranks` ranks of one lane.
    pub fn new(ranks: u32, parts: Parts) -> Self {
        Self {
            ranks,
            lanes: 1,
            packet_slot: 64,
            channel_slot: 16,
            channel_depth: 2,
            staging: 256,
            user: 64,
            first_epoch: 0,
            timeout_ns: u64::MAX,
            parts,
        }
    }
}

/// Allocates zeroed, page-aligned memory. The memory is never freed, so addresses that a model
/// holds stay valid.
fn pages(bytes: usize) -> *mut u8 {
    let layout = Layout::from_size_align(bytes.next_multiple_of(4096), 4096).expect("a layout");
    // SAFETY: all callers pass a size above 0.
    let start = unsafe { alloc_zeroed(layout) };
    if start.is_null() {
        handle_alloc_error(layout);
    }
    start
}

#[derive(Clone, Copy, Debug)]
struct Rank {
    /// Address of the constants in the workspace.
    constants: *mut CommConst,
    /// Values that each execution writes to `constants`.
    content: CommConst,
    workspace: *mut u8,
    /// Memory of window 1: the input, followed by the output.
    window: *mut u8,
    /// Memory outside windows, for tables of counts and for weights.
    private: *mut u8,
    shared: *mut u8,
}

/// Memory of all ranks. It is allocated once per model and reset for each execution.
#[derive(Debug)]
pub struct MemoryImage {
    config: Config,
    layout: WorkspaceLayout,
    ranks: Vec<Rank>,
}

// SAFETY: the model checker runs all threads of an execution on one OS thread, one thread at a
// time, so accesses through the pointers never overlap.
unsafe impl Send for MemoryImage {}
// SAFETY: accesses through a shared reference never overlap, for the same reason as for `Send`.
unsafe impl Sync for MemoryImage {}

const PRIVATE_BYTES: usize = 4096;
/// Offsets in private memory: `WORDS_AT` for the ready flags or arrival counters, `ARRIVALS_AT` for
/// the numbers of arrived bytes.
const WORDS_AT: usize = 3072;
const ARRIVALS_AT: usize = 3584;

impl MemoryImage {
    /// Allocates the memory for `config`.
    pub fn new(config: Config) -> Self {
        let layout = WorkspaceLayout::new(&WorkspaceConfig {
            size: config.ranks,
            max_blocks: 1,
            packet_slot: config.packet_slot,
            channel_slot: config.channel_slot,
            channel_depth: config.channel_depth,
            staging: config.staging,
            user_signals: 8,
        });
        let mut ranks: Vec<Rank> = (0..config.ranks)
            .map(|_| Rank {
                constants: core::ptr::null_mut(),
                content: CommConst::zeroed(),
                workspace: pages(layout.bytes as usize),
                window: pages(2 * config.user),
                private: pages(PRIVATE_BYTES),
                shared: pages(SHARED_BYTES),
            })
            .collect();
        let mut windows = vec![WindowConst::zeroed(); MAX_WINDOWS];
        windows[0].bytes = layout.bytes;
        windows[1].bytes = 2 * config.user as u64;
        for (index, rank) in ranks.iter().enumerate() {
            windows[0].peers[index] = rank.workspace as u64;
            windows[1].peers[index] = rank.window as u64;
        }
        let workspaces = windows[0].peers;
        let windows = windows.leak().as_ptr() as u64;
        for (index, rank) in ranks.iter_mut().enumerate() {
            rank.constants = rank.workspace.wrapping_add(CONSTANTS_AT as usize).cast();
            rank.content = CommConst {
                magic: CONST_MAGIC,
                version: LAYOUT_VERSION,
                bytes: size_of::<CommConst>() as u32,
                rank: index as u32,
                size: config.ranks,
                team_first: 0,
                team_size: config.ranks,
                max_blocks: 1,
                spins: 1,
                id: 1,
                generation: 1,
                timeout_ns: config.timeout_ns,
                windows,
                state: rank.workspace as u64,
                contexts: 0,
                context_count: 0,
                workspace: layout,
                host_word: 0,
                workspaces,
            };
        }
        Self {
            config,
            layout,
            ranks,
        }
    }

    /// Returns the configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the constants of `rank`'s communicator.
    pub fn constants(&self, rank: u32) -> *const CommConst {
        self.ranks[rank as usize].constants
    }

    /// Returns `rank`'s input.
    pub fn source(&self, rank: u32) -> *mut u8 {
        self.ranks[rank as usize].window
    }

    /// Returns `rank`'s output.
    pub fn target(&self, rank: u32) -> *mut u8 {
        self.source(rank).wrapping_add(self.config.user)
    }

    /// Returns the window address of the input, which is the same on every rank.
    pub fn source_addr(&self) -> WindowAddr {
        WindowAddr::new(1, 0)
    }

    /// Returns the window address of the output, which is the same on every rank.
    pub fn target_addr(&self) -> WindowAddr {
        WindowAddr::new(1, self.config.user as u64)
    }

    /// Returns the start of `rank`'s memory outside windows. In this memory, the model checker
    /// controls only the words that [`MemoryImage::words`] returns.
    pub fn private(&self, rank: u32) -> *mut u8 {
        self.ranks[rank as usize].private
    }

    /// Returns `rank`'s ready flags or arrival counters.
    pub fn words(&self, rank: u32) -> *mut u32 {
        self.private(rank).wrapping_add(WORDS_AT).cast()
    }

    /// Returns the number of arrived bytes of each chunk at `rank`. Only one block accesses these
    /// numbers.
    pub fn arrivals(&self, rank: u32) -> *mut u64 {
        self.private(rank).wrapping_add(ARRIVALS_AT).cast()
    }

    /// Returns the shared memory of `rank`'s block.
    pub fn shared(&self, rank: u32) -> *mut u8 {
        self.ranks[rank as usize].shared
    }

    fn workspace(&self, rank: u32, offset: u64) -> *mut u8 {
        self.ranks[rank as usize]
            .workspace
            .wrapping_add(offset as usize)
    }

    /// Returns the communicator state at the start of `rank`'s workspace.
    pub fn state(&self, rank: u32) -> *mut CommState {
        self.workspace(rank, 0).cast()
    }

    /// Returns the state of `rank`'s block.
    pub fn block_state(&self, rank: u32) -> *mut BlockState {
        self.workspace(rank, self.layout.blocks).cast()
    }

    /// Returns the packet slot in `rank`'s workspace that `source` writes in even epochs (`parity`
    /// 0) or odd epochs (`parity` 1).
    fn packet_slot(&self, rank: u32, source: u32, parity: u64) -> *mut u8 {
        let index = parity * u64::from(self.config.ranks) + u64::from(source);
        self.workspace(rank, self.layout.packets + index * self.config.packet_slot)
    }

    fn peers(&self, rank: u32) -> impl Iterator<Item = u32> {
        (0..self.config.ranks).filter(move |peer| *peer != rank)
    }

    /// Returns the credit word in the workspace of the sender `rank`. The receiver `peer` writes
    /// this word.
    fn credit(&self, rank: u32, peer: u32) -> *mut u8 {
        self.channel_line(rank, peer, 1)
    }

    fn channel_line(&self, rank: u32, peer: u32, which: u64) -> *mut u8 {
        let at = self.layout.channel_lines + (u64::from(peer) * 3 + which) * LINE;
        self.workspace(rank, at)
    }

    /// Starts an execution: resets the memory outside windows and registers the selected parts with
    /// the model checker. Call this method inside the model, before the model starts its threads.
    pub fn open(&self) -> Model {
        let model = Model::new();
        let parts = self.config.parts;
        for rank in 0..self.config.ranks {
            let memory = &self.ranks[rank as usize];
            // SAFETY: the pointers point to live allocations of at least these sizes, and no thread
            // of the execution has started.
            unsafe {
                memory.workspace.write_bytes(0, self.layout.bytes as usize);
                memory.private.write_bytes(0, PRIVATE_BYTES);
                memory.constants.write(memory.content);
                let state = self.block_state(rank);
                (*state).packet_epoch = self.config.first_epoch;
                (*state).rounds = self.config.first_epoch;
                (*state).busy = BlockState::idle(0, (*state).rounds, (*state).packet_epoch);
            }
            if parts.packets {
                let bytes = self.config.packet_slot as usize;
                for source in self.peers(rank) {
                    for parity in 0..2 {
                        let slot = self.packet_slot(rank, source, parity);
                        model.register(slot, bytes, Kind::Peer);
                    }
                }
            }
            if parts.rounds {
                for source in 0..self.config.ranks {
                    // A rank signals itself only if it has several lanes.
                    if source == rank && self.config.lanes == 1 {
                        continue;
                    }
                    let ready = self.layout.inbox + u64::from(source) * 2 * LINE;
                    model.register(self.workspace(rank, ready), LINE as usize, Kind::Peer);
                    model.register(self.workspace(rank, ready + LINE), 8, Kind::Peer);
                }
                model.register(
                    self.workspace(rank, self.layout.user_signals),
                    8,
                    Kind::Peer,
                );
            }
            if parts.channels {
                for peer in self.peers(rank) {
                    for which in 0..2 {
                        model.register(self.channel_line(rank, peer, which), 8, Kind::Peer);
                    }
                    let stride = self.config.channel_slot + LINE;
                    let bytes = self.config.channel_depth * stride;
                    let at = self.layout.channel_slots + u64::from(peer) * bytes;
                    self.payload(&model, self.workspace(rank, at), bytes);
                }
            }
            if parts.staging {
                self.payload(
                    &model,
                    self.workspace(rank, self.layout.staging_in),
                    self.config.staging,
                );
                self.payload(
                    &model,
                    self.workspace(rank, self.layout.staging_out),
                    self.config.staging,
                );
            }
            if parts.words {
                let bytes = 4 * self.config.ranks as usize;
                model.register(self.words(rank).cast(), bytes, Kind::Own);
            }
            if parts.failure {
                let abort = self.workspace(rank, core::mem::offset_of!(CommState, abort) as u64);
                let record = self.workspace(rank, core::mem::offset_of!(CommState, failure) as u64);
                model.register(abort, 8, Kind::Peer);
                model.register(record, size_of::<FailureRecord>(), Kind::Peer);
                model.register(self.workspace(rank, self.layout.progress), 24, Kind::Peer);
            }
            self.payload(&model, memory.window, 2 * self.config.user as u64);
        }
        model
    }

    /// Registers payload with loom, which detects races on it. Shuttle cannot detect races, so
    /// payload stays plain memory under shuttle.
    fn payload(&self, model: &Model, start: *mut u8, bytes: u64) {
        if cfg!(loom) {
            model.register(start, bytes as usize, Kind::Data);
        }
    }

    /// Makes odd epochs use the packet slots of even epochs, as a negative control.
    pub fn lose_second_slots(&self, model: &Model) {
        for rank in 0..self.config.ranks {
            for source in self.peers(rank) {
                let [even, odd] = [0, 1].map(|parity| self.packet_slot(rank, source, parity));
                model.alias(odd, self.config.packet_slot as usize, even);
            }
        }
    }

    /// Makes every credit available from the start, as a negative control.
    pub fn forge_credits(&self, model: &Model) {
        for rank in 0..self.config.ranks {
            for peer in self.peers(rank) {
                model.forge(self.credit(rank, peer), u64::MAX);
            }
        }
    }
}
