//! The communicator's metadata: plain data in device memory, the same bytes on every machine.
//!
//! [`CommConst`] is written once by the host and may be read freely. The **workspace** of a rank is
//! window 0: a region of the same layout on every rank, mapped by the ranks of its **team**, which
//! reach each other by load and store. It starts with [`CommState`]; [`WorkspaceLayout`] has the
//! offsets of the arrays that follow.
//!
//! ```text
//! workspace: CommState | CommConst | block state[block] | progress[block] | dead ranks
//!            | mirrors[rank] | inbox[block][rank] | words[block]
//!            | packet slots[block][parity][rank] | channels[block][member] | staging in
//!            | staging out
//! ```
//!
//! A *member* is the position of a rank in its team. No table has a length that is fixed at compile
//! time, except that the constants have room for the addresses of [`NEAR_RANKS`] workspaces. Those
//! of a larger team are in memory of their own.
//!
//! Each launch gets the address of the constants. On NVIDIA GPUs and for blocks of several lanes on
//! the CPU, they lie in the workspace: block states and the abort word are at fixed distances from
//! them. On AMD GPUs they are in other device memory, and for blocks of one lane in memory of the
//! process. Blocks of several lanes copy them to shared memory, and then use only the copy.

use bytemuck::{Pod, Zeroable};

/// First word of [`CommConst`]: "fusewire" in ASCII, little endian.
pub const CONST_MAGIC: u64 = u64::from_le_bytes(*b"fusewire");
/// First word of [`CommState`].
pub const STATE_MAGIC: u64 = u64::from_le_bytes(*b"fw-state");
/// Version of everything in this file; host and kernels must agree.
pub const LAYOUT_VERSION: u32 = 10;
/// Greatest number of ranks of a team whose workspace addresses a block keeps in its shared memory.
pub const NEAR_RANKS: usize = 64;
/// Greatest number of windows of a communicator: those that exist, and ended ones to which graphs
/// may refer. Window 0 is the workspace.
pub const MAX_WINDOWS: usize = 1024;
/// Offset of the [`CommConst`] in a workspace.
pub const CONSTANTS_AT: u64 = 256;
/// Offset of the [`BlockState`]s in a workspace.
pub const BLOCKS_AT: u64 = 1024;
/// Size of a line: one signal and its words.
pub const LINE: u64 = 64;
/// Words that travel with a ready signal.
pub const SIGNAL_WORDS: usize = 7;
/// Words that a block can receive from the other blocks of its launch.
pub const BLOCK_WORDS: usize = 384;

/// Offsets of the arrays of a workspace, in bytes from its start.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct WorkspaceLayout {
    /// [`Progress`] of each block.
    pub progress: u64,
    /// Bitmap of the ranks whose processes have ended: rank r is bit r % 64 of word r / 64.
    pub dead: u64,
    /// [`Mirror`] of each rank, if there are ranks outside of the team.
    pub mirrors: u64,
    /// Signal lines: per block and source rank one ready line, then one done line.
    pub inbox: u64,
    /// Per block, [`BLOCK_WORDS`] words from other blocks of its launch: 0 between launches.
    pub block_words: u64,
    /// Packet slots: per block, parity and source rank [`WorkspaceLayout::packet_slot`] bytes.
    pub packets: u64,
    /// Size of a packet slot.
    pub packet_slot: u64,
    /// Channel lines: per block and member a tail line (written by the peer as sender), a credit
    /// line (written by the peer as receiver) and a line of local counters.
    pub channel_lines: u64,
    /// Channel slots: per block and member [`WorkspaceLayout::channel_depth`] slots.
    pub channel_slots: u64,
    /// Payload of a channel slot.
    pub channel_slot: u64,
    /// Slots of a channel.
    pub channel_depth: u64,
    /// Staging for input that lies in no window.
    pub staging_in: u64,
    /// Size of that staging.
    pub staging_in_bytes: u64,
    /// Staging for output that lies in no window.
    pub staging_out: u64,
    /// Size of that staging.
    pub staging_out_bytes: u64,
    /// Size of the whole workspace.
    pub bytes: u64,
}

/// Parameters of a workspace; equal on all ranks of the communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkspaceConfig {
    /// Ranks.
    pub size: u32,
    /// Ranks of the team.
    pub team: u32,
    /// Most blocks of a launch.
    pub max_blocks: u32,
    /// Most blocks of a launch that uses packets, channels or words of other blocks.
    pub blocks: u32,
    /// Bytes of a packet slot.
    pub packet_slot: u64,
    /// Bytes of a channel slot.
    pub channel_slot: u64,
    /// Slots of a channel.
    pub channel_depth: u64,
    /// Bytes of staging, for input and for output each.
    pub staging: u64,
}

impl WorkspaceLayout {
    /// Lays the arrays out one after the other, each on a line of its own.
    pub const fn new(config: &WorkspaceConfig) -> Self {
        const fn next(at: &mut u64, bytes: u64) -> u64 {
            let start = *at;
            *at = (start + bytes).div_ceil(256) * 256;
            start
        }
        let (ranks, members) = (config.size as u64, config.team as u64);
        let (most, blocks) = (config.max_blocks as u64, config.blocks as u64);
        let mut at = BLOCKS_AT;
        next(&mut at, most * LINE);
        let mirrors = if members < ranks { ranks } else { 0 };
        let mut layout = Self {
            progress: next(&mut at, most * LINE),
            dead: next(&mut at, ranks.div_ceil(64) * 8),
            mirrors: next(&mut at, mirrors * size_of::<Mirror>() as u64),
            inbox: next(&mut at, most * ranks * 2 * LINE),
            block_words: next(&mut at, blocks * 8 * BLOCK_WORDS as u64),
            packets: next(&mut at, blocks * 2 * ranks * config.packet_slot),
            packet_slot: config.packet_slot,
            channel_lines: next(&mut at, blocks * ranks * 3 * LINE),
            channel_slots: next(
                &mut at,
                blocks * ranks * config.channel_depth * (config.channel_slot + LINE),
            ),
            channel_slot: config.channel_slot,
            channel_depth: config.channel_depth,
            staging_in: 0,
            staging_in_bytes: config.staging,
            staging_out: 0,
            staging_out_bytes: config.staging,
            bytes: 0,
        };
        at = at.div_ceil(4096) * 4096;
        layout.staging_in = next(&mut at, config.staging);
        layout.staging_out = next(&mut at, config.staging);
        layout.bytes = at;
        layout
    }
}

/// One window as a rank sees it. In the table of windows, it is followed by the address of the part
/// of each rank of the team, or 0 if this rank does not reach the part by load and store.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct WindowConst {
    /// Size of every rank's part; 0 if the window does not exist.
    pub bytes: u64,
    /// Address of the multicast mapping of all ranks' parts, or 0; on all ranks or on none. A CPU
    /// needs none.
    pub multicast: u64,
}

impl WindowConst {
    /// Returns the bytes of an entry of the table of windows, for a team of `members` ranks: whole
    /// cache lines of a GPU. A kernel that has read an entry therefore has no old copy of another
    /// one, which the host may write meanwhile.
    pub const fn stride(members: u32) -> u64 {
        (size_of::<Self>() as u64 + 8 * members as u64).next_multiple_of(128)
    }
}

/// Constants of a communicator on one rank; written once by the host.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct CommConst {
    /// [`CONST_MAGIC`].
    pub magic: u64,
    /// [`LAYOUT_VERSION`].
    pub version: u32,
    /// Size of this struct.
    pub bytes: u32,
    /// This rank.
    pub rank: u32,
    /// Ranks of the communicator.
    pub size: u32,
    /// First rank of the team reachable by load and store.
    pub team_first: u32,
    /// Ranks of that team.
    pub team_size: u32,
    /// Blocks that the workspace has room for.
    pub max_blocks: u32,
    /// Polls of a wait before it gives the core away.
    pub spins: u32,
    /// Identity of the communicator, equal on all ranks.
    pub id: u64,
    /// Generation: counts reconfigurations.
    pub generation: u64,
    /// Default timeout of a wait, nanoseconds.
    pub timeout_ns: u64,
    /// Address of the table of windows: for each of [`MAX_WINDOWS`] windows a [`WindowConst`] and
    /// the addresses of the team's parts.
    pub windows: u64,
    /// Address of this rank's [`CommState`] (the start of its workspace).
    pub state: u64,
    /// Address of the [`NetContext`], or 0 if all ranks are reachable by load and store.
    pub contexts: u64,
    /// Layout of every rank's workspace.
    pub workspace: WorkspaceLayout,
    /// Address, for the device, of a word in host memory to which a kernel that finds a failure
    /// also writes the abort word, because the host cannot read device memory at each call; 0 if it
    /// can.
    pub host_word: u64,
    /// Bytes of an entry of the table of windows: [`WindowConst::stride`].
    pub window_stride: u64,
    /// Address of the addresses of the workspaces of the team's ranks. In device memory and in
    /// workspaces it is [`CommConst::near_of`] these constants, if the team has no more than
    /// [`NEAR_RANKS`] ranks.
    pub workspaces: u64,
    /// Addresses of the workspaces of the team's first ranks.
    pub near: [u64; NEAR_RANKS],
}

impl CommConst {
    /// Returns the address of [`CommConst::near`] of constants at the address `constants`.
    #[inline(always)]
    pub const fn near_of(constants: u64) -> u64 {
        constants + core::mem::offset_of!(Self, near) as u64
    }
}

/// Ring of requests to reach ranks that a kernel cannot reach by load and store. See
/// [`crate::net`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct NetContext {
    /// Address of [`NetContext::depth`] entries.
    pub entries: u64,
    /// Number of entries: a power of two.
    pub depth: u64,
    /// Address of the [`NetCounters`].
    pub counters: u64,
    /// Address of memory for data that is not in a window.
    pub staging: u64,
    /// Bytes of that memory for each block.
    pub staging_bytes: u64,
    /// Address of a result of two words for each lane of each block: a tag and the value that a
    /// request has fetched ([`crate::net`]).
    pub results: u64,
    /// Results of a block: at least the number of its lanes.
    pub lanes: u64,
    /// On a CPU, the address of an `unsafe extern "C" fn(agent: u64, is_new: bool)` by which lanes
    /// let the agent execute requests, or 0. Any number of threads may call it at the same time.
    /// `is_new` is true if the lane has appended a request for which it may not wait.
    pub drive: u64,
    /// Argument of that function.
    pub agent: u64,
}

/// An entry of the ring of requests.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
pub struct NetEntry {
    /// The words of a [`crate::net::Request`], and unused ones.
    pub words: [u64; 8],
}

/// The counters of a ring of requests.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct NetCounters {
    /// Numbers that lanes have reserved.
    pub reserved: u64,
    _reserved: [u64; 7],
    /// Requests that the agent has executed, in order.
    pub completed: u64,
    _completed: [u64; 7],
}

/// The parameters of a launch that its session needs: the first of every kernel with a session.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LaunchHeader {
    /// The communicator's constants.
    pub constants: *const CommConst,
    /// The call word ([`crate::call::Call`]).
    pub call: u64,
    /// Number of elements in messages.
    pub count: u64,
    /// Timeout of every wait in nanoseconds; 0 selects the communicator's timeout.
    pub timeout_ns: u64,
}

/// Reason for which a launch failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum FailureKind {
    /// A wait outlasted the timeout.
    Timeout = 1,
    /// Ranks called different operations, sizes or types.
    Mismatch = 2,
    /// Two launches of one communicator were in flight at once.
    Overlap = 3,
    /// A peer named memory outside a window.
    Bounds = 4,
    /// The host asked to stop.
    Abort = 5,
    /// A rank cannot be reached by load and store, and there is no network.
    NoRoute = 6,
    /// Counts in device memory add up to more than a buffer holds.
    Counts = 7,
    /// The awaited rank's process has ended.
    Dead = 8,
    /// A kernel accessed an element that an argument does not have: the record has the number of
    /// the argument (`awaited`), the index (`observed`) and the length (`expected`).
    Index = 9,
    /// A kernel named a rank that does not exist: `observed` of `expected` ranks.
    Rank = 10,
    /// A kernel named a signal, counter, barrier or cell that a window does not have: the record
    /// has the number of the argument (`awaited`), the number (`observed`) and how many there are
    /// (`expected`).
    Id = 11,
    /// The kernel's author recorded the failure: the record has its code (`awaited`) and two values
    /// (`observed`, `expected`).
    User = 12,
    /// A kernel opened packet slots for `observed` bytes; a slot has room for `expected`.
    Capacity = 13,
    /// A kernel asked for word `observed` of a packet stream of `expected` words.
    Word = 14,
    /// A kernel put `expected` bytes whose source begins `observed` bytes from the target.
    Aliasing = 15,
    /// A batch of a queue had `observed` rows; it can have `expected`.
    Batch = 16,
    /// A kernel entered a barrier of its blocks, and is not declared `#[kernel(grid)]`.
    NotGrid = 17,
    /// A kernel did not run to its end: it panicked, or could not be launched.
    Stopped = 18,
    /// A kernel called [`Session::last_block`](crate::Session::last_block) more often than
    /// `expected` times; or its blocks called it different numbers of times, if `expected` is 0.
    LastBlock = 19,
    /// A lane waited for the result of network request `expected` after it had issued another
    /// update of a cell (`observed`): the record has the number of the argument (`awaited`).
    Ticket = 20,
}

/// Report of a failing rank for its host: claimed by compare-exchange, filled, then made valid.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct FailureRecord {
    /// 0: none; 1: being filled; 2: valid.
    pub state: u64,
    /// A [`FailureKind`].
    pub kind: u64,
    /// Collective sequence number of the operation that failed.
    pub sequence: u64,
    /// Its call word ([`crate::call::Call`]).
    pub call: u64,
    /// Its element count.
    pub count: u64,
    /// The block that detected the failure.
    pub block: u64,
    /// A [`crate::wait::WaitKind`].
    pub wait_kind: u64,
    /// The rank whose signal was awaited.
    pub awaited: u64,
    /// The rank to blame: the one with the least progress.
    pub blamed: u64,
    /// Progress of the blamed rank: its collective sequence number.
    pub blamed_sequence: u64,
    /// Progress of the blamed rank: its call.
    pub blamed_call: u64,
    /// Progress of the blamed rank: its [`Progress::count`], perhaps of another operation than
    /// [`FailureRecord::blamed_sequence`].
    pub blamed_count: u64,
    /// Awaited value.
    pub expected: u64,
    /// Value that the wait read last.
    pub observed: u64,
    /// Duration of the wait, nanoseconds.
    pub elapsed_ns: u64,
    /// Generation of the communicator.
    pub generation: u64,
}

/// Start of a rank's workspace.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct CommState {
    /// [`STATE_MAGIC`].
    pub magic: u64,
    /// [`LAYOUT_VERSION`].
    pub version: u32,
    /// Size of this struct.
    pub bytes: u32,
    /// Generation of the workspace.
    pub generation: u64,
    /// Number of ranks whose processes have ended; written by this rank's host after the bits at
    /// [`WorkspaceLayout::dead`].
    pub dead: u64,
    /// Blocks that have arrived in each call of [`Session::last_block`](crate::Session::last_block)
    /// of a launch, 16 bits for a call; 0 between launches.
    pub arrived: [u64; 4],
    /// Abort word, on a line of its own: 0, or [`ABORT`] with the rank that holds the failure
    /// record.
    pub abort: u64,
    _abort: [u64; 7],
    /// This rank's failure record.
    pub failure: FailureRecord,
}

/// Set in an abort word; the low 32 bits are the rank that holds the failure record.
pub const ABORT: u64 = 1 << 63;

/// Progress of a block; written by it, read by peers that stall. Every word carries the low bits of
/// the sequence number, which distinguish words of different operations without an ordering between
/// them.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Progress {
    /// `[sequence:24][call:40]`.
    pub call: u64,
    /// `[sequence:16][count:48]`.
    pub count: u64,
    /// `[sequence:24][steps:40]`: signals published within the operation.
    pub step: u64,
    /// [`Progress::call`] of the last collective kernels with windows; that of sequence number n is
    /// word n modulo 4. A rank whose wait for a signal ends looks here, because its peer may be in
    /// a later operation already.
    pub recent: [u64; 4],
    /// Changes while a block waits for a rank that may be absent: this rank itself is not absent.
    pub beat: u64,
}

/// State of a rank outside of this rank's team. The host of that rank keeps it up to date: it sends
/// its progress before every signal, and its failure record before it stops this rank. Once a rank
/// has failed, its progress is no longer sent.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct Mirror {
    /// Progress of block 0.
    pub progress: Progress,
    /// The failure record, if the rank has one.
    pub failure: FailureRecord,
}

/// State of a block between launches. Only that block of that rank accesses it, except that block 0
/// reads [`BlockState::entered`], reads and writes [`BlockState::released`], and counts launches
/// without the block in [`BlockState::sequence`] and [`BlockState::busy`].
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct BlockState {
    /// Collectives that this block has finished, or that had no block of this index.
    pub sequence: u64,
    /// Epoch of the last launch that used packet slots.
    pub packet_epoch: u64,
    /// Signal rounds that this block has finished.
    pub rounds: u64,
    /// 1 while a launch of this block is in flight, otherwise [`BlockState::idle`].
    pub busy: u64,
    /// Number of barriers of all blocks that the block has entered.
    pub entered: u64,
    /// Number of these barriers from which block 0 has released it.
    pub released: u64,
    /// On a CPU, number of successive yields of this block's waits after which another thread has
    /// run for a short time.
    pub exchanges: u64,
    _line: [u64; 1],
}

impl BlockState {
    /// Returns the busy word of a block with these epochs on which no launch is in flight: even,
    /// and different whenever one of the epochs is.
    #[inline(always)]
    pub const fn idle(sequence: u64, rounds: u64, packet_epoch: u64) -> u64 {
        sequence.wrapping_add(rounds).wrapping_add(packet_epoch) << 1
    }
}

/// Counters of one channel end; touched by the owning block only.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub struct ChannelState {
    /// Slots sent to the peer.
    pub sent: u64,
    /// Slots received from the peer.
    pub received: u64,
    _line: [u64; 6],
}

const _: () = {
    assert!(size_of::<WorkspaceLayout>() == 128);
    assert!(size_of::<CommConst>() == 240 + 8 * NEAR_RANKS);
    assert!(CONSTANTS_AT >= size_of::<CommState>() as u64);
    assert!(BLOCKS_AT >= CONSTANTS_AT + size_of::<CommConst>() as u64);
    assert!(core::mem::offset_of!(CommConst, rank) == 16);
    assert!(core::mem::offset_of!(CommConst, id) == 40);
    assert!(core::mem::offset_of!(CommConst, windows) == 64);
    assert!(core::mem::offset_of!(CommConst, state) == 72);
    assert!(core::mem::offset_of!(CommConst, workspace) == 88);
    assert!(core::mem::offset_of!(CommConst, host_word) == 216);
    assert!(core::mem::offset_of!(CommConst, workspaces) == 232);
    assert!(size_of::<WindowConst>() == 16);
    assert!(size_of::<FailureRecord>() == 128);
    assert!(size_of::<NetEntry>() == 64);
    assert!(size_of::<NetCounters>() == 128);
    assert!(size_of::<LaunchHeader>() == 24 + size_of::<*const CommConst>());
    assert!(size_of::<CommState>() == 256);
    assert!(core::mem::offset_of!(CommState, abort) == 64);
    assert!(core::mem::offset_of!(CommState, failure) == 128);
    assert!(size_of::<Progress>() == 64);
    assert!(size_of::<BlockState>() == 64);
    assert!(size_of::<ChannelState>() == 64);
};
