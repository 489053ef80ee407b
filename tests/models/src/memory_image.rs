//! Memory of all ranks in one execution. The model checker controls selected parts of this memory.

use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};

use bytemuck::Zeroable;
use fusewire_device::arch::SHARED_BYTES;
use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::{
    BLOCK_WORDS, BLOCKS_AT, BlockState, CONST_MAGIC, CONSTANTS_AT, CommConst, CommState,
    FailureRecord, LAYOUT_VERSION, LINE, MAX_WINDOWS, NEAR_RANKS, NetContext, NetCounters,
    NetEntry, WindowConst, WorkspaceConfig, WorkspaceLayout,
};
use fusewire_device::mem::model::{Kind, Model};
use fusewire_device::net::{RESULT_BYTES, Requests};
use fusewire_device::window::{DeviceWindow, QUEUE_SIGNALS};

use crate::mixture::{Memory, Mixture};

/// Sizes and settings of a model. Models choose sizes as small as the protocol allows.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Number of ranks.
    pub ranks: u32,
    /// Number of lanes of a block. Each lane is a thread of the model checker.
    pub lanes: u32,
    /// Number of blocks of a launch. More than one only with blocks of one lane.
    pub blocks: u32,
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
    /// Rows of the rings of a queue, which has rows of one word; 0 for a window without rings.
    pub ring: u32,
    /// Counters of the window.
    pub counters: u32,
    /// Cells of the window.
    pub cells: u32,
    /// Mixture of experts, with windows of its own.
    pub mixture: Option<Mixture>,
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
    /// Ready and done lines.
    pub rounds: bool,
    /// Staging.
    pub staging: bool,
    /// Channels.
    pub channels: bool,
    /// Abort words, failure records, progress.
    pub failure: bool,
    /// Ready flags and arrival counters.
    pub words: bool,
    /// Signals, counters, barriers and cells of a window.
    pub signals: bool,
    /// Requests to a network, which connects the ranks' windows.
    pub network: bool,
    /// Words of the barrier of all blocks.
    pub grid: bool,
}

impl Config {
    /// Creates the configuration of `ranks` ranks of one lane.
    pub fn new(ranks: u32, parts: Parts) -> Self {
        Self {
            ranks,
            lanes: 1,
            blocks: 1,
            packet_slot: 64,
            channel_slot: 16,
            channel_depth: 2,
            staging: 256,
            user: 64,
            ring: 0,
            counters: 0,
            cells: 0,
            mixture: None,
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
    /// Shared memory of each block.
    shared: *mut u8,
    /// Memory of window 2: the words of the signals of window 1.
    pad: *mut u8,
    /// Context, counters, entries and staging memory of the network.
    network: *mut u8,
}

/// Memory of all ranks. It is allocated once per model and reset for each execution.
#[derive(Debug)]
pub struct MemoryImage {
    config: Config,
    layout: WorkspaceLayout,
    ranks: Vec<Rank>,
    /// The second half of window 1, with signals.
    window: Box<DeviceWindow>,
    mixture: Option<Memory>,
}

// SAFETY: the model checker runs all threads of an execution on one OS thread, one thread at a
// time, so accesses through the pointers never overlap.
unsafe impl Send for MemoryImage {}
// SAFETY: accesses through a shared reference never overlap, for the same reason as for `Send`.
unsafe impl Sync for MemoryImage {}

const PRIVATE_BYTES: usize = 4096;
const PAD_BYTES: usize = 4096;
/// Entries of the ring of requests, and offsets in the memory of the network.
const DEPTH: usize = 2;
const COUNTERS_AT: usize = 256;
const ENTRIES_AT: usize = 512;
const STAGING_AT: usize = 2048;
const STAGING_BYTES: usize = 16;
const RESULTS_AT: usize = 3072;
/// Offsets in private memory: `WORDS_AT` for the ready flags or arrival counters, `ARRIVALS_AT` for
/// the numbers of arrived bytes.
const WORDS_AT: usize = 3072;
const ARRIVALS_AT: usize = 3584;

impl MemoryImage {
    /// Allocates the memory for `config`.
    pub fn new(config: Config) -> Self {
        // Ranks that a network connects reach nothing of each other by load and store.
        let team = if config.parts.network {
            1
        } else {
            config.ranks
        };
        let layout = WorkspaceLayout::new(&WorkspaceConfig {
            size: config.ranks,
            team,
            max_blocks: config.blocks,
            blocks: config.blocks,
            packet_slot: config.packet_slot,
            channel_slot: config.channel_slot,
            channel_depth: config.channel_depth,
            staging: config.staging,
        });
        let mut ranks: Vec<Rank> = (0..config.ranks)
            .map(|_| Rank {
                constants: core::ptr::null_mut(),
                content: CommConst::zeroed(),
                workspace: pages(layout.bytes as usize),
                window: pages(2 * config.user),
                private: pages(PRIVATE_BYTES),
                shared: pages(SHARED_BYTES * config.blocks as usize),
                pad: pages(PAD_BYTES),
                network: pages(PRIVATE_BYTES),
            })
            .collect();
        let mut windows = vec![
            (
                layout.bytes,
                ranks.iter().map(|rank| rank.workspace as u64).collect(),
            ),
            (
                2 * config.user as u64,
                ranks.iter().map(|rank| rank.window as u64).collect(),
            ),
            (
                PAD_BYTES as u64,
                ranks.iter().map(|rank| rank.pad as u64).collect(),
            ),
        ];
        let mixture = config.mixture.map(|mixture| {
            let first = windows.len();
            Memory::new(mixture, config.ranks, config.blocks, first, pages)
        });
        if let Some(mixture) = &mixture {
            windows.extend(mixture.windows());
        }
        assert!(windows.len() <= MAX_WINDOWS, "{} windows", windows.len());
        let windows: Vec<(u64, Vec<u64>)> = windows;
        let stride = WindowConst::stride(team);
        for (index, rank) in ranks.iter_mut().enumerate() {
            let first = index / team as usize * team as usize;
            let members = first..first + team as usize;
            let mut table = vec![0u64; MAX_WINDOWS * stride as usize / 8];
            let entries = table.chunks_mut(stride as usize / 8);
            for (entry, (bytes, parts)) in entries.zip(&windows) {
                let (header, to) = entry.split_at_mut(size_of::<WindowConst>() / 8);
                header[0] = *bytes;
                to[..team as usize].copy_from_slice(&parts[members.clone()]);
            }
            let mut near = [0; NEAR_RANKS];
            near[..team as usize].copy_from_slice(&windows[0].1[members]);
            let table: &[u64] = table.leak();
            rank.constants = rank.workspace.wrapping_add(CONSTANTS_AT as usize).cast();
            rank.content = CommConst {
                magic: CONST_MAGIC,
                version: LAYOUT_VERSION,
                bytes: size_of::<CommConst>() as u32,
                rank: index as u32,
                size: config.ranks,
                team_first: first as u32,
                team_size: team,
                max_blocks: config.blocks,
                spins: 1,
                id: 1,
                generation: 1,
                timeout_ns: config.timeout_ns,
                windows: table.as_ptr() as u64,
                state: rank.workspace as u64,
                contexts: if config.parts.network {
                    rank.network as u64
                } else {
                    0
                },
                workspace: layout,
                host_word: 0,
                window_stride: stride,
                workspaces: CommConst::near_of(rank.constants as u64),
                near,
            };
        }
        let user = config.user as u64;
        let window = Box::new(DeviceWindow {
            window: 1,
            signal_pad: 2,
            offset: user,
            bytes: user,
            signals: if config.ring > 0 { QUEUE_SIGNALS } else { 2 },
            counters: config.counters,
            barriers: config.blocks,
            size: config.ranks,
            blocks: config.blocks,
            ring: config.ring,
            width: 1,
            cells: config.cells,
        });
        Self {
            config,
            layout,
            ranks,
            window,
            mixture,
        }
    }

    /// Returns the memory of the mixture of experts.
    ///
    /// # Panics
    /// Panics if the configuration has none.
    pub(crate) fn mixture(&self) -> &Memory {
        self.mixture.as_ref().expect("a mixture of experts")
    }

    /// Returns the window that consists of the ranks' outputs.
    pub fn device_window(&self) -> *const DeviceWindow {
        &raw const *self.window
    }

    /// Returns the slot of signal `id` in `rank`'s memory that a block of `sender` writes.
    pub fn slot(&self, rank: u32, id: u32, sender: u32, block: u32) -> *mut u64 {
        self.pad(rank, self.window.slot_at(id, sender, block))
    }

    fn pad(&self, rank: u32, offset: u64) -> *mut u64 {
        let pad = self.ranks[rank as usize].pad;
        pad.wrapping_add(offset as usize).cast()
    }

    fn network(&self, rank: u32) -> NetContext {
        let at = self.ranks[rank as usize].network;
        NetContext {
            entries: at.wrapping_add(ENTRIES_AT) as u64,
            depth: DEPTH as u64,
            counters: at.wrapping_add(COUNTERS_AT) as u64,
            staging: self.staging(rank) as u64,
            staging_bytes: STAGING_BYTES as u64,
            results: at.wrapping_add(RESULTS_AT) as u64,
            lanes: u64::from(self.config.lanes),
            drive: 0,
            agent: 0,
        }
    }

    /// Returns the ring of requests of `rank`.
    pub fn requests(&self, rank: u32) -> Requests {
        // SAFETY: the memory lives as long as the image.
        unsafe { Requests::new(self.network(rank)) }
    }

    /// Returns the staging memory of `rank`.
    pub fn staging(&self, rank: u32) -> *mut u8 {
        self.ranks[rank as usize].network.wrapping_add(STAGING_AT)
    }

    /// Returns the result that a request of `rank` names.
    pub fn result(&self, rank: u32, addr: WindowAddr) -> *mut u64 {
        let results = self.ranks[rank as usize].network.wrapping_add(RESULTS_AT);
        results.wrapping_add(addr.offset() as usize).cast()
    }

    /// Returns cell `id` of `rank`.
    pub fn cell(&self, rank: u32, id: u32) -> *mut u64 {
        self.pad(rank, self.window.cell_at(id))
    }

    /// Returns the address of a part of a window of `rank`.
    pub fn address(&self, addr: WindowAddr, rank: u32) -> *mut u8 {
        let memory = &self.ranks[rank as usize];
        let start = match addr.window() {
            0 => memory.workspace,
            1 => memory.window,
            _ => memory.pad,
        };
        start.wrapping_add(addr.offset() as usize)
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

    /// Returns the shared memory of `rank`'s first block.
    pub fn shared(&self, rank: u32) -> *mut u8 {
        self.shared_of(rank, 0)
    }

    /// Returns the shared memory of a block of `rank`.
    pub fn shared_of(&self, rank: u32, block: u32) -> *mut u8 {
        let all = self.ranks[rank as usize].shared;
        all.wrapping_add(block as usize * SHARED_BYTES)
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

    /// Returns the state of `rank`'s first block.
    pub fn block_state(&self, rank: u32) -> *mut BlockState {
        self.workspace(rank, BLOCKS_AT).cast()
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
                memory.pad.write_bytes(0, PAD_BYTES);
                memory.network.write_bytes(0, PRIVATE_BYTES);
                memory
                    .network
                    .cast::<NetContext>()
                    .write(self.network(rank));
                memory.constants.write(memory.content);
                let state = self.block_state(rank);
                (*state).packet_epoch = self.config.first_epoch;
                (*state).rounds = self.config.first_epoch;
                (*state).busy = BlockState::idle(0, (*state).rounds, (*state).packet_epoch);
            }
            if parts.packets {
                let bytes = self.config.packet_slot as usize;
                for source in 0..self.config.ranks {
                    // Only a network reads the slot of a rank at itself.
                    if source == rank && !parts.network {
                        continue;
                    }
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
                    // The signal of the round, and that of packets from a network.
                    model.register(self.workspace(rank, ready + LINE), 16, Kind::Peer);
                }
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
            if parts.signals {
                self.signals(&model, rank);
            }
            if parts.network {
                self.ring(&model, rank);
            }
            if parts.grid {
                for block in 0..self.config.blocks {
                    let state = self.block_state(rank).wrapping_add(block as usize);
                    // SAFETY: computes addresses within the state of a block.
                    let words = unsafe { [&raw mut (*state).entered, &raw mut (*state).released] };
                    for word in words {
                        model.register(word.cast(), 8, Kind::Own);
                    }
                }
                let arrived =
                    self.workspace(rank, core::mem::offset_of!(CommState, arrived) as u64);
                model.register(arrived, 8, Kind::Own);
                for block in 0..u64::from(self.config.blocks) {
                    let at = self.layout.block_words + block * 8 * BLOCK_WORDS as u64;
                    let bytes = 8 * self.config.blocks as usize;
                    model.register(self.workspace(rank, at), bytes, Kind::Own);
                }
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
        if let Some(mixture) = &self.mixture {
            mixture.open(&model, parts.signals);
        }
        model
    }

    /// Registers the words of a window.
    fn signals(&self, model: &Model, rank: u32) {
        let window = &self.window;
        let row = 8 * self.config.blocks as usize;
        for sender in 0..self.config.ranks {
            for id in 0..window.signals {
                let slots = self.pad(rank, window.slot_at(id, sender, 0));
                model.register(slots.cast(), row, Kind::Peer);
                if self.config.blocks > 1 && window.ring == 0 {
                    let sent = self.pad(rank, window.sent_at(id, sender, 0));
                    model.register(sent.cast(), row, Kind::Own);
                }
            }
            for id in 0..window.barriers {
                let word = self.pad(rank, window.barrier_at(id, sender));
                model.register(word.cast(), 8, Kind::Peer);
            }
        }
        for id in 0..window.counters {
            let word = self.pad(rank, window.counter_at(id));
            model.register(word.cast(), 8, Kind::Own);
        }
        for id in 0..window.cells {
            model.register(self.cell(rank, id).cast(), 8, Kind::Peer);
        }
    }

    /// Registers the ring of requests.
    fn ring(&self, model: &Model, rank: u32) {
        let at = self.ranks[rank as usize].network;
        let counters = at.wrapping_add(COUNTERS_AT).cast::<NetCounters>();
        // SAFETY: computes addresses in the rank's memory.
        let completed = unsafe { &raw mut (*counters).completed };
        model.register(completed.cast(), 8, Kind::Peer);
        if self.config.blocks > 1 {
            model.register(counters.cast(), 8, Kind::Own);
        }
        let bytes = DEPTH * size_of::<NetEntry>();
        model.register(at.wrapping_add(ENTRIES_AT), bytes, Kind::Peer);
        if self.config.cells > 0 {
            let lanes = (self.config.blocks * self.config.lanes) as usize;
            let bytes = RESULT_BYTES as usize * lanes;
            model.register(at.wrapping_add(RESULTS_AT), bytes, Kind::Peer);
        }
        self.payload(model, self.staging(rank), STAGING_BYTES as u64);
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
            for source in 0..self.config.ranks {
                if source == rank && !self.config.parts.network {
                    continue;
                }
                let [even, odd] = [0, 1].map(|parity| self.packet_slot(rank, source, parity));
                model.alias(odd, self.config.packet_slot as usize, even);
            }
        }
    }

    /// Makes every credit available from the start, as a negative control.
    pub fn forge_credits(&self, model: &Model) {
        for rank in 0..self.config.ranks {
            for peer in self.peers(rank) {
                let credit = match self.config.ring {
                    0 => self.credit(rank, peer),
                    _ => self.slot(rank, 1, peer, 0).cast(),
                };
                // Above all positions, and not so far above that it counts as below.
                model.forge(credit, u64::MAX / 4);
            }
        }
    }
}
