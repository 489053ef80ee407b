//! A communicator as a kernel sees it: ranks, windows, and pointers into a peer's memory.

use core::marker::PhantomData;

use crate::layout::{CommConst, LINE, MAX_RANKS, MAX_WINDOWS, WindowConst, WorkspaceLayout};
use crate::net::Requests;

/// Address in a window: 16 bits of window, 48 bits of offset. Ranks name memory to each other by
/// it; addresses are local to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    /// The rank whose part is meant.
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
/// size, `step` at most the size. Without a division, which on a GPU costs dozens of instructions
/// and a path to a panic.
#[inline(always)]
pub fn ring(from: u32, step: u32, size: u32) -> u32 {
    let sum = from + step;
    if sum >= size { sum - size } else { sum }
}

/// A rank of the session's communicator. Made by [`crate::Session::peers`],
/// [`crate::Session::peer`] and [`crate::Session::me`], so that it exists.
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
}

/// Iterator over the ranks of a team, from the one after this rank to this rank itself, so that not
/// all ranks begin with the same one.
#[derive(Clone, Debug)]
pub struct Peers {
    first: u32,
    size: u32,
    /// Position of this rank in the team.
    position: u32,
    /// Distance from this rank to the next one.
    step: u32,
    stride: u32,
}

impl Peers {
    /// Returns every `stride`-th rank of a team, beginning with rank `start` after this one.
    #[inline(always)]
    pub(crate) fn new(comm: &Comm, team: Team, start: u32, stride: u32) -> Self {
        let constants = comm.constants();
        let (first, size) = match team {
            Team::World => (0, constants.size),
            // With a network, other ranks' workspaces may be mapped, but their windows are not.
            Team::Local if Requests::of(comm).is_some() => (constants.rank, 1),
            Team::Local => (constants.team_first, constants.team_size),
        };
        Self {
            first,
            size,
            position: constants.rank - first,
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
        let rank = self.first + ring(self.position, self.step, self.size);
        self.step += self.stride;
        Some(Rank(rank))
    }
}

/// Route to a range of a rank's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Route {
    /// By load and store, at this address.
    Direct(*mut u8),
    /// By requests.
    Network(Requests),
    /// Not at all, or the range does not exist.
    None,
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
        // SAFETY: promised to `new`; nobody writes them while kernels run.
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

    /// Whether `rank` is reachable by load and store.
    #[inline(always)]
    pub fn reaches(&self, rank: u32) -> bool {
        rank.wrapping_sub(self.constants().team_first) < self.constants().team_size
    }

    #[inline(always)]
    pub(crate) fn window(&self, window: u32) -> *const WindowConst {
        // The bound is the caller's: every path from a peer's data checks first.
        (self.constants().windows as *const WindowConst).wrapping_add(window as usize)
    }

    /// Returns the address of byte 0 of `rank`'s workspace.
    #[inline(always)]
    pub fn workspace_of(&self, rank: u32) -> *mut u8 {
        // SAFETY: the constants are live, and the index is within their table.
        unsafe {
            (&raw const (*self.constants).workspaces[rank as usize % MAX_RANKS]).read() as *mut u8
        }
    }

    /// The table of all ranks' workspaces, as [`Comm::workspace_of`] reads it.
    #[inline(always)]
    pub(crate) fn workspaces(&self) -> *const u64 {
        // SAFETY: the constants are live.
        unsafe { (&raw const (*self.constants).workspaces).cast() }
    }

    /// Returns the address of byte `offset` of this rank's own workspace.
    #[inline(always)]
    pub fn own(&self, offset: u64) -> *mut u8 {
        (self.constants().state as *mut u8).wrapping_add(offset as usize)
    }

    /// Returns the address of `bytes` bytes of memory that `rank` named as `addr`, or `None` where
    /// the window does not exist, the range leaves it, or the rank is not reachable. A peer's word
    /// is never trusted.
    #[inline(always)]
    pub fn resolve(&self, addr: WindowAddr, rank: u32, bytes: u64) -> Option<*mut u8> {
        match self.base(addr, rank, bytes) {
            Some(base) if base != 0 => Some((base as *mut u8).wrapping_add(addr.offset() as usize)),
            _ => None,
        }
    }

    /// Returns how `bytes` bytes of memory that `rank` named as `addr` are reached, checked as by
    /// [`Comm::resolve`].
    #[inline(always)]
    pub(crate) fn route(&self, addr: WindowAddr, rank: u32, bytes: u64) -> Route {
        match self.base(addr, rank, bytes) {
            Some(0) => Requests::of(self).map_or(Route::None, Route::Network),
            Some(base) => Route::Direct((base as *mut u8).wrapping_add(addr.offset() as usize)),
            None => Route::None,
        }
    }

    /// Returns the address of `rank`'s part of a window, or 0 if it cannot be reached by load and
    /// store. `None` if the window does not exist or the range leaves it.
    #[inline(always)]
    fn base(&self, addr: WindowAddr, rank: u32, bytes: u64) -> Option<u64> {
        if addr.window() as usize >= MAX_WINDOWS || rank >= self.size() {
            return None;
        }
        let window = self.window(addr.window());
        // SAFETY: the table has MAX_WINDOWS entries and each MAX_RANKS >= size peers.
        let (size, base) = unsafe {
            (
                (&raw const (*window).bytes).read(),
                (&raw const (*window).peers[rank as usize % MAX_RANKS]).read(),
            )
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

    /// Returns the offset of the signal line that `from` writes for `block`: the ready line; the
    /// done line is the next one.
    #[inline(always)]
    pub fn inbox(&self, block: u32, from: u32) -> u64 {
        self.workspace().inbox
            + (u64::from(block) * u64::from(self.size()) + u64::from(from)) * 2 * LINE
    }
}
