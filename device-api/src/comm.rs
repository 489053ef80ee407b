//! A communicator as a kernel sees it: ranks, windows, and pointers into a peer's memory.

use core::marker::PhantomData;

use crate::layout::{CommConst, LINE, MAX_RANKS, MAX_WINDOWS, WindowConst, WorkspaceLayout};

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
        (fits && base != 0).then(|| (base as *mut u8).wrapping_add(addr.offset() as usize))
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
