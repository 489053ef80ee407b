//! Memory of all ranks in one execution. Parts of it are controlled by the model checker.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};

use bytemuck::Zeroable;
use fusewire_device::arch::SHARED_BYTES;
use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::{
    BlockState, CONST_MAGIC, CONSTANTS_AT, CommConst, CommState, FailureRecord, LAYOUT_VERSION,
    LINE, MAX_WINDOWS, WindowConst, WorkspaceConfig, WorkspaceLayout,
};
use fusewire_device::mem::model::{Kind, Model};

/// Sizes of a model's memory, all as small as the protocol allows.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Ranks.
    pub ranks: u32,
    /// Lanes of a block; each is a thread of the model checker.
    pub lanes: u32,
    /// Bytes of a packet slot.
    pub packet_slot: u64,
    /// Bytes of a channel slot.
    pub channel_slot: u64,
    /// Slots of a channel.
    pub channel_depth: u64,
    /// Bytes of staging.
    pub staging: u64,
    /// Bytes of a rank's input, and of its output.
    pub user: usize,
    /// First epoch of packets and rounds.
    pub first_epoch: u64,
    /// Time-out of waits in nanoseconds of the model's clock.
    pub timeout_ns: u64,
    /// Parts of the memory that the model checker controls.
    pub parts: Parts,
}

/// Parts of the memory that the model checker controls. Parts that a model does not use stay plain
/// memory, because every controlled word costs time.
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

/// Allocates zeroed, page-aligned bytes that are never freed, because models keep their addresses.
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
    /// Constants, in the workspace.
    constants: *mut CommConst,
    /// Content of `constants`.
    content: CommConst,
    workspace: *mut u8,
    /// Window 1: input, then output.
    window: *mut u8,
    /// Memory outside windows: counts, weights.
    private: *mut u8,
    shared: *mut u8,
}

/// Memory of all ranks. Allocated once per model, reset for each execution.
#[derive(Debug)]
pub struct MemoryImage {
    config: Config,
    layout: WorkspaceLayout,
    ranks: Vec<Rank>,
}

// SAFETY: the model checker runs the threads of an execution in turns on one OS thread, so that
// accesses through the pointers never overlap.
unsafe impl Send for MemoryImage {}
// SAFETY: shared access never overlaps, as for `Send`.
unsafe impl Sync for MemoryImage {}

const PRIVATE_BYTES: usize = 4096;
/// Offsets of the ready flags or arrival counters, and of the arrived bytes, in private memory.
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

    /// Returns the window address of the input, the same on every rank.
    pub fn source_addr(&self) -> WindowAddr {
        WindowAddr::new(1, 0)
    }

    /// Returns the window address of the output, the same on every rank.
    pub fn target_addr(&self) -> WindowAddr {
        WindowAddr::new(1, self.config.user as u64)
    }

    /// Returns `rank`'s memory outside windows. The model checker controls only the part of
    /// [`MemoryImage::words`].
    pub fn private(&self, rank: u32) -> *mut u8 {
        self.ranks[rank as usize].private
    }

    /// Returns `rank`'s ready flags or arrival counters.
    pub fn words(&self, rank: u32) -> *mut u32 {
        self.private(rank).wrapping_add(WORDS_AT).cast()
    }

    /// Returns `rank`'s counts of arrived bytes per chunk, which only one block accesses.
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

    /// The state at the start of `rank`'s workspace.
    pub fn state(&self, rank: u32) -> *mut CommState {
        self.workspace(rank, 0).cast()
    }

    /// Returns the state of `rank`'s block.
    pub fn block_state(&self, rank: u32) -> *mut BlockState {
        self.workspace(rank, self.layout.blocks).cast()
    }

    /// Returns the packet slot of `parity` at `rank` that `source` writes.
    fn packet_slot(&self, rank: u32, source: u32, parity: u64) -> *mut u8 {
        let index = parity * u64::from(self.config.ranks) + u64::from(source);
        self.workspace(rank, self.layout.packets + index * self.config.packet_slot)
    }

    fn peers(&self, rank: u32) -> impl Iterator<Item = u32> {
        (0..self.config.ranks).filter(move |peer| *peer != rank)
    }

    /// Returns the credit word at the sender `rank` that the receiver `peer` writes.
    fn credit(&self, rank: u32, peer: u32) -> *mut u8 {
        self.channel_line(rank, peer, 1)
    }

    fn channel_line(&self, rank: u32, peer: u32, which: u64) -> *mut u8 {
        let at = self.layout.channel_lines + (u64::from(peer) * 3 + which) * LINE;
        self.workspace(rank, at)
    }

    /// Starts an execution: resets plain memory and registers the other parts with the model
    /// checker. To be called inside the model, before its threads start.
    pub fn open(&self) -> Model {
        let model = Model::new();
        let parts = self.config.parts;
        for rank in 0..self.config.ranks {
            let memory = &self.ranks[rank as usize];
            // SAFETY: the pointers are to live allocations of at least these sizes, and no thread
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

    /// Registers payload under loom, which checks it for races. Shuttle cannot detect races, so
    /// that payload stays plain memory there.
    fn payload(&self, model: &Model, start: *mut u8, bytes: u64) {
        if cfg!(loom) {
            model.register(start, bytes as usize, Kind::Data);
        }
    }

    /// Maps the packet slots of odd epochs to those of even ones.
    pub fn lose_second_slots(&self, model: &Model) {
        for rank in 0..self.config.ranks {
            for source in self.peers(rank) {
                let [even, odd] = [0, 1].map(|parity| self.packet_slot(rank, source, parity));
                model.alias(odd, self.config.packet_slot as usize, even);
            }
        }
    }

    /// Makes every credit available from the start.
    pub fn forge_credits(&self, model: &Model) {
        for rank in 0..self.config.ranks {
            for peer in self.peers(rank) {
                model.forge(self.credit(rank, peer), u64::MAX);
            }
        }
    }
}
