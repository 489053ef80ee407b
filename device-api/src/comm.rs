//! A communicator as a kernel sees it: ranks, windows, and pointers into a peer's memory.

use core::marker::PhantomData;
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
use core::sync::atomic::{AtomicU64, Ordering};

use bytemuck::{Pod, Zeroable};

use crate::layout::{CommConst, LINE, MAX_WINDOWS, WindowConst, WorkspaceLayout};

/// True on devices that can have a network ([`crate::net`]). No host serves the requests of a GPU
/// yet, so kernels for GPUs have no code for them.
pub(crate) const HAS_NETWORK: bool =
    cfg!(not(any(target_arch = "nvptx64", target_arch = "amdgpu")));

/// Address in a window: 16 bits of window, 48 bits of offset. Ranks name memory to each other by
/// it; addresses are local to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct WindowAddr(pub u64);

impl WindowAddr {
    /// Memory that lies in no window.
    pub const NONE: Self = Self(u64::MAX);

    /// Returns the address of byte `offset` of window `window`.
    #[inline(always)]
    pub const fn new(window: u32, offset: u64) -> Self {
        Self((window as u64) << 48 | offset & 0xffff_ffff_ffff)
    }

    /// Returns the window.
    #[inline(always)]
    pub const fn window(self) -> u32 {
        (self.0 >> 48) as u32
    }

    /// Returns the byte offset.
    #[inline(always)]
    pub const fn offset(self) -> u64 {
        self.0 & 0xffff_ffff_ffff
    }

    /// Returns true if this names memory in a window.
    #[inline(always)]
    pub const fn is_some(self) -> bool {
        self.0 != Self::NONE.0
    }
}

/// Typed address in one rank's part of a window: the only way to a peer's memory.
#[derive(Debug)]
pub struct PeerPtr<T> {
    /// The window.
    pub window: u32,
    /// The rank that owns the part.
    pub rank: u32,
    /// Byte offset in the part.
    pub offset: u64,
    element: PhantomData<*mut T>,
}

impl<T> Clone for PeerPtr<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for PeerPtr<T> {}

impl<T> PeerPtr<T> {
    /// Returns the address of byte `offset` of `rank`'s part of `window`.
    #[inline(always)]
    pub const fn new(window: u32, rank: u32, offset: u64) -> Self {
        Self {
            window,
            rank,
            offset,
            element: PhantomData,
        }
    }

    /// Returns the address `count` elements further.
    #[inline(always)]
    pub const fn add(self, count: u64) -> Self {
        Self::new(
            self.window,
            self.rank,
            self.offset + count * size_of::<T>() as u64,
        )
    }
}

/// Returns the rank `step` positions after `from` in the ring of `size` ranks; `from` is below the
/// size, `step` at most the size. Uses no division, which on a GPU costs dozens of instructions and
/// a path to a panic.
#[inline(always)]
pub fn ring(from: u32, step: u32, size: u32) -> u32 {
    let sum = from + step;
    if sum >= size { sum - size } else { sum }
}

/// A rank of the session's communicator. Only [`crate::Session::peers`], [`crate::Session::peer`]
/// and [`crate::Session::me`] create one, so the rank exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank(u32);

impl Rank {
    #[inline(always)]
    pub(crate) const fn new(rank: u32) -> Self {
        Self(rank)
    }

    /// Returns the number of the rank.
    #[inline(always)]
    pub const fn index(self) -> u32 {
        self.0
    }
}

/// A set of ranks, this one included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Team {
    /// All ranks.
    World,
    /// The ranks whose windows this one reaches by load and store.
    Local,
    /// The ranks at the same position in their local teams as this one: one of each local team.
    /// If every rank sends only to its rail, each pair of local teams exchanges one message per
    /// rank in each direction.
    Rail,
}

/// Iterator over the ranks of a team, from the one after this rank to this rank itself, so that not
/// all ranks begin with the same one.
#[derive(Clone, Debug)]
pub struct Peers {
    first: u32,
    /// Distance between the numbers of two ranks of the team.
    spacing: u32,
    size: u32,
    /// Position of this rank in the team.
    position: u32,
    /// Distance from this rank to the next one.
    step: u32,
    stride: u32,
}

impl Peers {
    /// Returns every `stride`-th rank of a team, from the one `start` positions after this one on.
    #[inline(always)]
    pub(crate) fn new(comm: &Comm, team: Team, start: u32, stride: u32) -> Self {
        let (rank, size) = (comm.rank(), comm.size());
        let (local_first, local_size) = comm.local();
        let (first, spacing, size, position) = match team {
            Team::World => (0, 1, size, rank),
            Team::Local => (local_first, 1, local_size, rank - local_first),
            // All local teams have the same number of ranks.
            Team::Rail => (
                rank - local_first,
                local_size,
                size / local_size.max(1),
                local_first / local_size.max(1),
            ),
        };
        Self {
            first,
            spacing,
            size,
            position,
            step: start,
            stride,
        }
    }
}

impl Iterator for Peers {
    type Item = Rank;

    #[inline(always)]
    fn next(&mut self) -> Option<Rank> {
        if self.step > self.size {
            return None;
        }
        let index = ring(self.position, self.step, self.size);
        self.step += self.stride;
        Some(Rank(self.first + index * self.spacing))
    }
}

/// The communicator of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Comm {
    constants: *const CommConst,
}

impl Comm {
    /// Wraps the communicator whose constants are at `constants`.
    ///
    /// # Safety
    /// `constants` and everything it points at must stay valid, and mapped on every rank, during
    /// the kernel.
    #[inline(always)]
    pub unsafe fn new(constants: *const CommConst) -> Self {
        Self { constants }
    }

    /// Returns the constants.
    #[inline(always)]
    pub fn constants(&self) -> &CommConst {
        // SAFETY: valid by the precondition of `new`; nothing writes them while kernels run.
        unsafe { &*self.constants }
    }

    /// Returns this rank.
    #[inline(always)]
    pub fn rank(&self) -> u32 {
        self.constants().rank
    }

    /// Returns the rank `step` positions after this one in the ring of all ranks; `step` is at most
    /// the size.
    #[inline(always)]
    pub fn after(&self, step: u32) -> u32 {
        ring(self.rank(), step, self.size())
    }

    /// Returns the number of ranks.
    #[inline(always)]
    pub fn size(&self) -> u32 {
        self.constants().size
    }

    /// Returns the layout of every rank's workspace.
    #[inline(always)]
    pub fn workspace(&self) -> &WorkspaceLayout {
        &self.constants().workspace
    }

    /// Returns true if `rank`, a rank of the communicator, is reachable by load and store.
    #[inline(always)]
    pub fn reaches(&self, rank: u32) -> bool {
        if !HAS_NETWORK {
            return true;
        }
        let (first, size) = self.local();
        rank.wrapping_sub(first) < size
    }

    /// Returns the number of ranks of the team.
    #[inline(always)]
    pub(crate) fn members(&self) -> u32 {
        self.constants().team_size
    }

    /// Returns the position of `rank` in the team. On devices without a network, all ranks are in
    /// the team.
    #[inline(always)]
    pub(crate) fn member(&self, rank: u32) -> u32 {
        match HAS_NETWORK {
            true => rank.wrapping_sub(self.constants().team_first),
            false => rank,
        }
    }

    /// Returns the first rank of the team, and the number of its ranks. On devices without a
    /// network, all ranks are in the team.
    #[inline(always)]
    fn local(&self) -> (u32, u32) {
        let constants = self.constants();
        match HAS_NETWORK {
            true => (constants.team_first, constants.team_size),
            false => (0, constants.size),
        }
    }

    /// Returns true if there are ranks that are not reachable by load and store.
    #[inline(always)]
    pub(crate) fn is_split(&self) -> bool {
        self.local().1 < self.size()
    }

    /// Returns the entry of a window, and the addresses of the parts of the team's ranks. The
    /// window is below [`MAX_WINDOWS`].
    #[inline(always)]
    pub(crate) fn window(&self, window: u32) -> (*const WindowConst, *const u64) {
        let constants = self.constants();
        let at = u64::from(window) * constants.window_stride;
        let entry = (constants.windows as *const u8).wrapping_add(at as usize);
        let entry = entry.cast::<WindowConst>();
        (entry, entry.wrapping_add(1).cast())
    }

    /// Returns the address of byte 0 of the workspace of `rank`, which is in the team: see
    /// [`Comm::reaches`].
    #[inline(always)]
    pub(crate) fn workspace_of(&self, rank: u32) -> *mut u8 {
        let at = self.workspaces().wrapping_add(self.member(rank) as usize);
        debug_assert!(self.reaches(rank));
        // SAFETY: the table is live, and has an entry for each rank of the team.
        unsafe { at.read() as *mut u8 }
    }

    /// Returns the addresses of the workspaces of the team's ranks.
    #[inline(always)]
    pub(crate) fn workspaces(&self) -> *const u64 {
        self.constants().workspaces as *const u64
    }

    /// Returns the address of byte `offset` of this rank's own workspace.
    #[inline(always)]
    pub fn own(&self, offset: u64) -> *mut u8 {
        (self.constants().state as *mut u8).wrapping_add(offset as usize)
    }

    /// Returns the address of `bytes` bytes of memory that `rank` named as `addr`, or `None` if the
    /// window does not exist, the range leaves it, or the rank is not reachable. The check is
    /// needed because a peer's word is not trusted.
    #[inline(always)]
    pub fn resolve(&self, addr: WindowAddr, rank: u32, bytes: u64) -> Option<*mut u8> {
        match self.base(addr, rank, bytes) {
            Some(base) if base != 0 => Some((base as *mut u8).wrapping_add(addr.offset() as usize)),
            _ => None,
        }
    }

    /// Returns the address of `rank`'s part of a window, or 0 if it cannot be reached by load and
    /// store. `None` if the window does not exist or the range leaves it.
    #[inline(always)]
    pub(crate) fn base(&self, addr: WindowAddr, rank: u32, bytes: u64) -> Option<u64> {
        if addr.window() as usize >= MAX_WINDOWS || rank >= self.size() {
            return None;
        }
        let (window, parts) = self.window(addr.window());
        // SAFETY: the table has MAX_WINDOWS entries.
        let size = unsafe { part_bytes(window) };
        let base = match self.reaches(rank) {
            // SAFETY: each entry has an address for each rank of the team.
            true => unsafe { parts.wrapping_add(self.member(rank) as usize).read() },
            false => 0,
        };
        let fits = addr.offset() <= size && bytes <= size - addr.offset();
        fits.then_some(base)
    }

    /// Returns the address that a [`PeerPtr`] names for `count` elements, checked as by
    /// [`Comm::resolve`].
    #[inline(always)]
    pub fn pointer<T>(&self, at: PeerPtr<T>, count: u64) -> Option<*mut T> {
        let bytes = count.checked_mul(size_of::<T>() as u64)?;
        let addr = WindowAddr::new(at.window, at.offset);
        self.resolve(addr, at.rank, bytes).map(<*mut u8>::cast)
    }

    /// Returns the offset of the ready line that `from` writes for `block`. The done line follows
    /// it.
    #[inline(always)]
    pub fn inbox(&self, block: u32, from: u32) -> u64 {
        self.workspace().inbox
            + (u64::from(block) * u64::from(self.size()) + u64::from(from)) * 2 * LINE
    }
}

/// Returns the bytes of each rank's part of a window, or 0 if the window does not exist.
///
/// The host clears this word when a window ends, and a replay may read it at the same time. On the
/// CPU, both accesses are therefore atomic. A GPU's copy of the table is written by the driver, and
/// aligned words are not torn.
///
/// # Safety
/// `window` must be an entry of the table.
#[inline(always)]
unsafe fn part_bytes(window: *const WindowConst) -> u64 {
    // SAFETY: the precondition of this function.
    let bytes = unsafe { &raw const (*window).bytes };
    #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
    // SAFETY: the precondition of this function.
    return unsafe { bytes.read() };
    #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
    // SAFETY: entries are aligned. The host writes other values only while nothing has the number
    // of the window.
    return unsafe { AtomicU64::from_ptr(bytes.cast_mut()) }.load(Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    extern crate std;

    use std::boxed::Box;
    use std::collections::HashSet;
    use std::vec::Vec;

    use bytemuck::Zeroable;

    use super::*;
    use crate::layout::{BLOCK_WORDS, BLOCKS_AT, WorkspaceConfig};

    /// Metadata of a rank, whose addresses name no memory.
    struct Metadata {
        constants: Box<CommConst>,
        _windows: Vec<u64>,
        _workspaces: Vec<u64>,
        config: WorkspaceConfig,
    }

    /// Bytes of each rank's part of the one window besides the workspace.
    const BYTES: u64 = 1 << 20;

    fn part(rank: u32) -> u64 {
        1 << 40 | u64::from(rank) << 24
    }

    impl Metadata {
        /// Creates the metadata of rank `rank` of `size`, in teams of `team` ranks.
        fn new(rank: u32, size: u32, team: u32) -> Self {
            let config = WorkspaceConfig {
                size,
                team,
                max_blocks: 16,
                blocks: 8,
                packet_slot: 2048,
                channel_slot: 4096,
                channel_depth: 4,
                staging: 1 << 20,
            };
            let first = rank / team * team;
            let stride = WindowConst::stride(team);
            let mut windows = Vec::new();
            for id in 0..2u64 {
                windows.extend([BYTES, 0]);
                windows.extend((first..first + team).map(|rank| part(rank) + id));
                windows.resize((id + 1) as usize * stride as usize / 8, 0);
            }
            let workspaces: Vec<u64> = (first..first + team).map(part).collect();
            let constants = Box::new(CommConst {
                rank,
                size,
                team_first: first,
                team_size: team,
                windows: windows.as_ptr() as u64,
                window_stride: stride,
                workspaces: workspaces.as_ptr() as u64,
                workspace: WorkspaceLayout::new(&config),
                ..CommConst::zeroed()
            });
            Self {
                constants,
                _windows: windows,
                _workspaces: workspaces,
                config,
            }
        }

        fn comm(&self) -> Comm {
            // SAFETY: the constants and tables live as long as `self`; the functions that the tests
            // call access nothing else.
            unsafe { Comm::new(&raw const *self.constants) }
        }
    }

    const SHAPES: [(u32, u32, u32); 6] = [
        (255, 256, 256),
        (100, 256, 8),
        (255, 256, 1),
        (2047, 4096, 8),
        (0, 4096, 64),
        (4031, 4032, 576),
    ];

    #[test]
    fn tables_have_an_entry_for_each_rank_of_the_team() {
        for (rank, size, team) in &SHAPES {
            let metadata = Metadata::new(*rank, *size, *team);
            let comm = metadata.comm();
            let first = rank / team * team;
            for peer in 0..*size {
                let reached = (first..first + team).contains(&peer);
                assert_eq!(comm.reaches(peer), reached);
                let addr = WindowAddr::new(1, 16);
                let expected = reached.then(|| (part(peer) + 1 + 16) as *mut u8);
                assert_eq!(comm.resolve(addr, peer, BYTES - 16), expected);
                assert_eq!(comm.resolve(addr, peer, BYTES - 15), None, "beyond the end");
                if reached {
                    assert_eq!(comm.workspace_of(peer) as u64, part(peer));
                }
            }
            assert_eq!(comm.resolve(WindowAddr::new(1, 0), *size, 0), None);
            assert_eq!(comm.resolve(WindowAddr::new(1, 0), u32::MAX, 0), None);
        }
    }

    #[test]
    fn arrays_of_a_workspace_do_not_overlap() {
        for (rank, size, team) in SHAPES {
            let metadata = Metadata::new(rank, size, team);
            let (comm, config, layout) = (
                metadata.comm(),
                metadata.config,
                metadata.constants.workspace,
            );
            let (most, blocks) = (u64::from(config.max_blocks), u64::from(config.blocks));
            let slots = blocks * u64::from(size);
            let arrays = [
                (BLOCKS_AT, most * LINE),
                (layout.progress, most * LINE),
                (layout.dead, u64::from(size).div_ceil(64) * 8),
                (
                    layout.mirrors,
                    u64::from(size) * if team < size { 192 } else { 0 },
                ),
                (layout.inbox, most * u64::from(size) * 2 * LINE),
                (layout.block_words, blocks * 8 * BLOCK_WORDS as u64),
                (
                    layout.packets,
                    2 * blocks * u64::from(size) * config.packet_slot,
                ),
                (layout.channel_lines, slots * 3 * LINE),
                (
                    layout.channel_slots,
                    slots * config.channel_depth * (config.channel_slot + LINE),
                ),
                (layout.staging_in, config.staging),
                (layout.staging_out, config.staging),
            ];
            let mut end = BLOCKS_AT;
            for (at, bytes) in arrays {
                assert!(
                    at >= end && at.is_multiple_of(LINE),
                    "{size} ranks, teams of {team}"
                );
                end = at + bytes;
            }
            assert!(layout.bytes >= end);
            let lines: HashSet<u64> = (0..config.max_blocks)
                .flat_map(|block| (0..size).map(move |from| (block, from)))
                .map(|(block, from)| comm.inbox(block, from))
                .collect();
            assert_eq!(lines.len() as u64, most * u64::from(size));
            let inbox = layout.inbox..layout.block_words;
            assert!(
                lines
                    .iter()
                    .all(|line| inbox.contains(&(line + 2 * LINE - 1)))
            );
        }
    }

    #[test]
    fn teams_have_the_ranks_that_they_say() {
        for (rank, size, team) in &SHAPES {
            let metadata = Metadata::new(*rank, *size, *team);
            let ranks = |team| -> Vec<u32> {
                let mut ranks: Vec<_> = Peers::new(&metadata.comm(), team, 1, 1)
                    .map(Rank::index)
                    .collect();
                assert_eq!(ranks.last(), Some(rank), "this rank is the last");
                ranks.sort_unstable();
                ranks
            };
            let first = rank / team * team;
            let local: Vec<_> = (first..first + team).collect();
            let rail: Vec<_> = (0..*size)
                .filter(|peer| peer % team == rank % team)
                .collect();
            assert_eq!(ranks(Team::World), (0..*size).collect::<Vec<_>>());
            assert_eq!(ranks(Team::Local), local);
            assert_eq!(ranks(Team::Rail), rail);
        }
    }
}
