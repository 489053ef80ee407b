//! Windows of a communicator: symmetric memory, and the lookup from an address to its window and
//! offset.

use core::any::Any;
use core::cell::UnsafeCell;
use core::fmt;
use core::ops::Range;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use arrayvec::ArrayVec;
use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::{MAX_WINDOWS, WindowConst};

use crate::Result;
use crate::gpu::{Gpu, Multicast, Scratch};
use crate::memory::Memory;

/// Most window addresses of an operation.
pub(super) const MAX_ADDRESSES: usize = 4;

/// Flag of a window that is set before the window ends.
#[derive(Clone, Debug, Default)]
pub(super) struct EndFlag(Arc<AtomicBool>);

impl EndFlag {
    /// Sets the flag. Returns false if it was set before.
    pub(super) fn set(&self) -> bool {
        !self.0.swap(true, Ordering::SeqCst)
    }

    /// Clears the flag of a window that has not ended.
    pub(super) fn clear(&self) {
        self.0.store(false, Ordering::SeqCst);
    }

    #[inline]
    pub(super) fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Windows to which a captured operation may refer.
#[derive(Debug)]
pub(super) enum WindowNumbers<'a> {
    /// Windows at these addresses, which were resolved at this version of the windows.
    Bound(usize, ArrayVec<WindowAddr, MAX_ADDRESSES>),
    /// Any window: the operation takes windows with these flags, or a value that may be a window
    /// address.
    Any(&'a [EndFlag]),
}

impl WindowNumbers<'_> {
    pub(super) const NONE: Self = Self::Bound(0, ArrayVec::new_const());
}

/// A rank's part of a window: memory, and the offset at which the part begins in it.
pub(crate) type WindowPart = (Memory, u64);

/// The parts of all ranks of a window; `None` for ranks of other processes that only a network
/// reaches.
pub(crate) type WindowParts = Vec<Option<WindowPart>>;

/// Called with the number of a window that no kernel resolves any more, before its memory is freed.
type OnEnd = Box<dyn Fn(usize) + Send + Sync>;

/// The device's table of windows and the host's index of this rank's parts.
pub(crate) struct Windows {
    /// Entries of [`WindowConst::stride`] bytes.
    table: Box<[UnsafeCell<u64>]>,
    /// Ranks that this rank reaches by load and store.
    team: Range<u32>,
    /// Copy of the table in memory of the GPU that its kernels may cache, because no peer accesses
    /// it. A running replay may read an entry as it was before its window ended; the memory of that
    /// window is still mapped ([`EndedWindows`]).
    on_gpu: Option<Scratch>,
    /// This rank's parts of the live windows: start, end, number.
    live: Box<[(AtomicUsize, AtomicUsize, AtomicUsize)]>,
    live_count: AtomicUsize,
    /// For each window number, true if peers must not write this rank's part while a kernel runs.
    coarse: Box<[AtomicBool]>,
    /// Set if all ranks can join one multicast object. New windows then try to bind one.
    pub(super) multicast: bool,
    /// Odd while the list changes. A reader that sees a change reads again.
    version: AtomicUsize,
    /// Number of live windows, and number of live windows without multicast; both exclude the
    /// workspace.
    windows: AtomicUsize,
    unicast: AtomicUsize,
    /// Multicast objects by window number.
    multicasts: Mutex<HashMap<usize, Multicast>>,
    slots: Mutex<Vec<Slot>>,
    /// Ended windows that graphs of this rank may use. The graphs own the value.
    of_graphs: Mutex<Weak<EndedWindows>>,
    /// Ended windows that only graphs of other ranks may use.
    of_others: EndedWindows,
    on_end: OnceLock<OnEnd>,
}

/// Memory of ended windows to which graphs may refer. A replay that has resolved the number of a
/// window may still run when the window ends.
#[derive(Default)]
pub(super) struct EndedWindows(Mutex<Vec<(Option<Multicast>, Slot)>>);

/// State of a window number.
enum Slot {
    /// A new window may get the number.
    Free,
    /// The number of a live window.
    Live {
        /// Every rank's part, mapped as long as the window lives.
        parts: WindowParts,
        /// False until the ranks have agreed on the window. No operation finds it before.
        is_listed: bool,
        /// Owner of this rank's part, if other code allocated the memory.
        owner: Option<Arc<dyn Any + Send + Sync>>,
        /// True if this rank has captured an operation that may have the number.
        captured: bool,
        /// True if this rank has dropped all tensors of the window.
        dropped: bool,
    },
    /// A graph of some rank may have the number, so no other window gets it.
    Retired,
}

impl EndedWindows {
    fn push(&self, window: (Option<Multicast>, Slot)) {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(window);
    }
}

impl Slot {
    fn parts(&self) -> Option<&WindowParts> {
        match self {
            Self::Live { parts, .. } => Some(parts),
            _ => None,
        }
    }
}

/// A window from [`Windows::reserve`].
#[derive(Debug)]
pub(crate) struct ReservedWindow {
    /// Number of the window.
    pub(crate) id: usize,
    /// Address of this rank's part.
    start: usize,
    bytes: u64,
    /// True if no multicast address reaches the parts.
    is_unicast: bool,
}

// SAFETY: an entry of the table is written under the lock, before its number is published.
// `Windows::remove` then clears the words of an entry: the size atomically, as kernels read it, and
// the multicast address, which only GPUs have. Otherwise an entry is only read.
unsafe impl Sync for Windows {}

impl fmt::Debug for Windows {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Windows")
            .field("count", &self.count())
            .finish_non_exhaustive()
    }
}

impl Windows {
    /// Creates a table without windows, for kernels of `gpu` (or of the CPU), which reach the parts
    /// of the ranks of `team` by load and store.
    pub(crate) fn new(gpu: Option<&Arc<Gpu>>, team: Range<u32>, multicast: bool) -> Result<Self> {
        let bytes = MAX_WINDOWS as u64 * WindowConst::stride(team.len() as u32);
        let zeros = || vec![0; bytes as usize];
        let on_gpu = gpu.map(|gpu| Scratch::holding(gpu, &zeros())).transpose()?;
        let mut table = bytemuck::allocation::zeroed_slice_box::<u64>(bytes as usize / 8);
        let (at, count) = (table.as_mut_ptr(), table.len());
        core::mem::forget(table);
        let cells = core::ptr::slice_from_raw_parts_mut(at.cast::<UnsafeCell<u64>>(), count);
        Ok(Self {
            on_gpu,
            team,
            multicast,
            // SAFETY: `at` and `count` come from the box that was just forgotten, and
            // `UnsafeCell<u64>` has the layout of `u64`. The system provides the zeroed memory
            // lazily, so entries that are never used occupy no pages.
            table: unsafe { Box::from_raw(cells) },
            live: (0..MAX_WINDOWS).map(|_| Default::default()).collect(),
            live_count: AtomicUsize::new(0),
            coarse: (0..MAX_WINDOWS).map(|_| AtomicBool::new(false)).collect(),
            version: AtomicUsize::new(0),
            windows: AtomicUsize::new(0),
            unicast: AtomicUsize::new(0),
            multicasts: Mutex::default(),
            slots: Mutex::default(),
            of_graphs: Mutex::default(),
            of_others: EndedWindows::default(),
            on_end: OnceLock::new(),
        })
    }

    /// Returns the address of the device's table.
    pub(crate) fn table(&self) -> u64 {
        self.on_gpu
            .as_ref()
            .map_or(self.table.as_ptr() as u64, |table| table.address())
    }

    /// Returns the bytes of an entry of the table.
    pub(crate) fn stride(&self) -> u64 {
        WindowConst::stride(self.team.len() as u32)
    }

    /// Returns the words of the entry of a window.
    fn words(&self, id: usize) -> &[UnsafeCell<u64>] {
        let words = self.stride() as usize / 8;
        &self.table[id * words..][..words]
    }

    /// Returns the entry of a window.
    fn entry(&self, id: usize) -> *mut WindowConst {
        UnsafeCell::raw_get(self.words(id).as_ptr()).cast()
    }

    /// Returns the count of numbers in use: those of live windows, and those that graphs may have.
    pub(crate) fn count(&self) -> usize {
        let all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter()
            .filter(|slot| !matches!(slot, Slot::Free))
            .count()
    }

    /// Sets the function that is called with the number of a window that no kernel resolves any
    /// more, before its memory is freed. Called once.
    pub(crate) fn on_end(&self, on_end: impl Fn(usize) + Send + Sync + 'static) {
        let _ = self.on_end.set(Box::new(on_end));
    }

    /// Adds a window of `bytes` bytes to which rank r contributes all of `parts[r]`.
    pub(crate) fn add(&self, rank: u32, parts: Vec<Option<Memory>>, bytes: u64) -> Result<()> {
        let parts = parts.into_iter().map(|part| Some((part?, 0))).collect();
        self.list(&self.reserve(rank, parts, bytes, 0, false)?);
        Ok(())
    }

    /// Reserves a number for a window to which rank r contributes `bytes` bytes of `parts[r]`, and
    /// enters the window in the device's table. All ranks must reserve and remove windows in the
    /// same order, so that the numbers agree, and the table must not be full. `multicast` is the
    /// address that reaches all parts, or 0 if there is none (on the CPU); all ranks must agree on
    /// its existence. `coarse` is true if this rank's part is coarse-grained memory, which peers
    /// only read.
    ///
    /// No kernel has the number before [`Windows::list`]. If the ranks do not agree on the window,
    /// each rank therefore removes it, and reuses the number, without a barrier of kernels:
    /// - A rank overwrites the entry in its own table, which only its own kernels read.
    /// - It first acquires the failure of a rank: its own, or that which the barrier of the host
    ///   call reports. After this failure no rank lists the window.
    /// - The failed rank releases the failure as it enters this barrier.
    pub(crate) fn reserve(
        &self,
        rank: u32,
        parts: WindowParts,
        bytes: u64,
        multicast: u64,
        coarse: bool,
    ) -> Result<ReservedWindow> {
        let mut all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        // All ranks create and remove windows in the same order, so they choose the same number.
        let free = all.iter().position(|slot| matches!(slot, Slot::Free));
        let id = free.unwrap_or(all.len());
        // The ranks of the team have parts.
        let address = |part: &Option<WindowPart>| {
            let part = part.as_ref();
            part.map_or(0, |(memory, offset)| memory.ptr() as u64 + offset)
        };
        let entry = self.entry(id);
        let header = size_of::<WindowConst>() / 8;
        let team = &parts[self.team.start as usize..self.team.end as usize];
        for (part, word) in team.iter().zip(&self.words(id)[header..]) {
            // SAFETY: `words(id)` bounds the word. Kernels read it only after a rank has listed the
            // window, and peers list it only after this rank has entered the call's barrier.
            unsafe { word.get().write(address(part)) };
        }
        // SAFETY: `entry` points to this table's entry, and kernels read it only after the window
        // was listed.
        unsafe { (&raw mut (*entry).multicast).write(multicast) };
        // SAFETY: see the write above.
        unsafe { (&raw mut (*entry).bytes).write(bytes) };
        self.publish(id)?;
        self.coarse[id].store(coarse, Ordering::Relaxed);
        let window = ReservedWindow {
            id,
            start: address(&parts[rank as usize]) as usize,
            bytes,
            is_unicast: multicast == 0,
        };
        let slot = Slot::Live {
            parts,
            is_listed: false,
            owner: None,
            captured: false,
            dropped: false,
        };
        match all.get_mut(id) {
            Some(free) => *free = slot,
            None => all.push(slot),
        }
        Ok(window)
    }

    /// Lets operations use a reserved window. All ranks must have agreed on it.
    pub(crate) fn list(&self, window: &ReservedWindow) {
        let mut all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Slot::Live { is_listed, .. }) = all.get_mut(window.id) {
            *is_listed = true;
        }
        if window.id > 0 {
            self.windows.fetch_add(1, Ordering::AcqRel);
            self.unicast
                .fetch_add(usize::from(window.is_unicast), Ordering::AcqRel);
        }
        let at = self.live_count.load(Ordering::Acquire);
        // A removed window may have had this entry, which a reader may still look at.
        self.version.fetch_add(1, Ordering::AcqRel);
        core::sync::atomic::fence(Ordering::Release);
        self.live[at].0.store(window.start, Ordering::Relaxed);
        self.live[at]
            .1
            .store(window.start + window.bytes as usize, Ordering::Relaxed);
        self.live[at].2.store(window.id, Ordering::Relaxed);
        self.live_count.store(at + 1, Ordering::Release);
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    /// Keeps the owner of this rank's part alive as long as the window.
    pub(crate) fn keep_owner(&self, id: usize, new: Arc<dyn Any + Send + Sync>) {
        let mut all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Slot::Live { owner, .. }) = all.get_mut(id) {
            *owner = Some(new);
        }
    }

    /// Copies an entry to the GPU's table. No kernel has used its number yet, or no kernel uses it
    /// any more.
    fn publish(&self, id: usize) -> Result<()> {
        let Some(table) = &self.on_gpu else {
            return Ok(());
        };
        let words = self.words(id).iter();
        // SAFETY: entries are only written by the caller, which holds the lock.
        let words: Vec<u64> = words.map(|word| unsafe { word.get().read() }).collect();
        // SAFETY: the table has this entry. A replay that reads it meanwhile finds each word as it
        // was before or after, because the driver copies whole words; either is valid.
        unsafe { table.write(id as u64 * self.stride(), bytemuck::cast_slice(&words)) }
    }

    /// Retires a window: operations that are issued from now on do not find their buffers in it,
    /// and go through staging. Operations in flight still use it.
    pub(crate) fn retire(&self, id: usize) {
        let _all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let count = self.live_count.load(Ordering::Acquire);
        let words = |at: usize| [&self.live[at].0, &self.live[at].1, &self.live[at].2];
        self.version.fetch_add(1, Ordering::AcqRel);
        // A reader that sees one of the new words also sees the odd version.
        core::sync::atomic::fence(Ordering::Release);
        if let Some(at) = (0..count).find(|at| words(*at)[2].load(Ordering::Relaxed) == id) {
            for later in at + 1..count {
                for (to, from) in words(later - 1).into_iter().zip(words(later)) {
                    to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
                }
            }
            self.live_count.store(count - 1, Ordering::Release);
        }
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    /// Marks the windows to which a captured operation may refer. Returns false, and marks none, if
    /// a window may have ended since the operation was bound.
    #[cold]
    pub(super) fn note_capture(&self, numbers: &WindowNumbers<'_>) -> bool {
        // Windows are retired under this lock.
        let mut all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let bound = match numbers {
            WindowNumbers::Any(flags) if flags.iter().any(EndFlag::is_set) => return false,
            WindowNumbers::Any(_) => None,
            WindowNumbers::Bound(_, bound) if bound.is_empty() => return true,
            WindowNumbers::Bound(version, _) if *version != self.version() => return false,
            WindowNumbers::Bound(_, bound) => Some(bound),
        };
        for (id, slot) in (0..).zip(&mut *all) {
            let is_used = bound.is_none_or(|bound| bound.iter().any(|addr| addr.window() == id));
            if let Slot::Live {
                captured,
                is_listed,
                ..
            } = slot
            {
                *captured |= *is_listed && is_used;
            }
        }
        true
    }

    /// Returns the owner of the memory of windows that end while a graph of this rank exists. Every
    /// captured operation keeps this owner, because the operation or a peer may refer to a window.
    pub(super) fn for_graph(&self) -> Arc<EndedWindows> {
        let mut of_graphs = self
            .of_graphs
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        of_graphs.upgrade().unwrap_or_else(|| {
            let new = Arc::default();
            *of_graphs = Arc::downgrade(&new);
            new
        })
    }

    /// Returns the version of the list, which changes when a window begins or ends.
    #[inline]
    pub(crate) fn version(&self) -> usize {
        self.version.load(Ordering::SeqCst)
    }

    /// Notes that this rank has dropped all tensors of a window.
    pub(crate) fn note_dropped(&self, id: usize) {
        let mut all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Slot::Live { dropped, .. }) = all.get_mut(id) {
            *dropped = true;
        }
    }

    /// Returns a word for each live window whose tensors this rank has dropped, by number: twice
    /// the number, plus 1 if this rank has captured an operation that may have the number.
    pub(crate) fn dropped(&self) -> Vec<u32> {
        let all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let dropped = (0..).zip(&*all).filter_map(|(id, slot)| match slot {
            Slot::Live {
                dropped: true,
                captured,
                ..
            } => Some(2 * id + u32::from(*captured)),
            _ => None,
        });
        dropped.collect()
    }

    /// Returns true if this rank has captured an operation that may have the window's number.
    pub(crate) fn is_captured(&self, id: usize) -> bool {
        let all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        matches!(all.get(id), Some(Slot::Live { captured: true, .. }))
    }

    /// Removes a window that is retired or was never listed: kernels no longer resolve its number,
    /// and its memory may be freed. All ranks must have agreed that no operation in flight uses it.
    /// A new window may get the number if `is_free` is true. All ranks must pass the same value,
    /// which must be false if a rank has captured an operation with the number. Later replays then
    /// fail. A replay that runs now may have resolved the number, so the memory lives as long as
    /// the graphs of this rank; if only other ranks have such graphs, as long as the communicator.
    pub(crate) fn remove(&self, id: usize, is_free: bool) {
        let mut all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = match is_free {
            true => Slot::Free,
            false => Slot::Retired,
        };
        let Some(Slot::Live {
            is_listed,
            captured,
            ..
        }) = all.get(id)
        else {
            return;
        };
        let (was_listed, was_captured) = (*is_listed, *captured);
        let parts = core::mem::replace(&mut all[id], slot);
        let entry = self.entry(id);
        // SAFETY: `entry` points to this table's entry. Replays that read it at the same time load
        // the word atomically.
        let bytes = unsafe { AtomicU64::from_ptr(&raw mut (*entry).bytes) };
        bytes.store(0, Ordering::Relaxed);
        // SAFETY: the lock is held, and kernels of a CPU do not read this word.
        let multicast = unsafe { (&raw mut (*entry).multicast).replace(0) };
        if let Err(error) = self.publish(id) {
            tracing::warn!(%error, "a window of a GPU could not be taken out of its table");
        }
        if id > 0 && was_listed {
            self.windows.fetch_sub(1, Ordering::AcqRel);
            self.unicast
                .fetch_sub(usize::from(multicast == 0), Ordering::AcqRel);
        }
        drop(all);
        if let Some(on_end) = self.on_end.get() {
            on_end(id);
        }
        let multicast = self
            .multicasts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&id);
        // The multicast object is unbound before the memory is freed.
        let ended = (multicast, parts);
        if is_free {
            return;
        }
        let of_graphs = self
            .of_graphs
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let of_graphs = of_graphs.upgrade();
        match &of_graphs {
            Some(of_graphs) => of_graphs.push(ended),
            // The graphs of this rank have been dropped.
            None if was_captured => {}
            None => self.of_others.push(ended),
        }
    }

    /// Returns true if there are windows, and multicast reaches all of them (except the workspace).
    /// The result is the same on all ranks between the same operations, because all ranks create
    /// and free windows together.
    pub(crate) fn have_multicast(&self) -> bool {
        self.windows.load(Ordering::Acquire) > 0 && self.unicast.load(Ordering::Acquire) == 0
    }

    /// Keeps the multicast object of window `id` alive as long as the window.
    pub(super) fn hold(&self, id: usize, multicast: Multicast) {
        let mut held = self
            .multicasts
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        held.insert(id, multicast);
    }

    /// Returns the address in this process of a range of `rank`'s part of a window, while the
    /// window lives.
    pub(crate) fn range(&self, addr: WindowAddr, rank: u32, bytes: u64) -> Option<*mut u8> {
        let all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let id = addr.window() as usize;
        let (memory, start) = all.get(id)?.parts()?.get(rank as usize)?.as_ref()?;
        // SAFETY: entries are only written under the lock.
        let size = unsafe { (&raw const (*self.entry(id)).bytes).read() };
        let (offset, start) = (addr.offset(), *start + addr.offset());
        let fits = offset <= size && bytes <= size - offset;
        fits.then(|| memory.ptr().wrapping_add(start as usize))
    }

    /// Returns the part of `rank` in window `id`, while the window lives.
    pub(crate) fn part(&self, id: usize, rank: u32) -> Option<WindowPart> {
        let all = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        all.get(id)?.parts()?.get(rank as usize)?.clone()
    }

    /// Returns the window address of `bytes` bytes at `at`, or [`WindowAddr::NONE`].
    #[inline]
    pub(crate) fn addr_of(&self, at: *const u8, bytes: usize) -> WindowAddr {
        loop {
            let version = self.version.load(Ordering::Acquire);
            let addr = self.find(at as usize, bytes);
            core::sync::atomic::fence(Ordering::Acquire);
            if version.is_multiple_of(2) && self.version.load(Ordering::Relaxed) == version {
                return addr;
            }
            core::hint::spin_loop();
        }
    }

    /// Returns the window address of `bytes` bytes at `at` that peers write, or
    /// [`WindowAddr::NONE`] if they must not: if the memory is in no window, or is coarse-grained.
    /// A GPU may read old values of coarse-grained memory from its caches after a peer has written
    /// the memory during a kernel.
    #[inline]
    pub(crate) fn target_addr_of(&self, at: *const u8, bytes: usize) -> WindowAddr {
        let addr = self.addr_of(at, bytes);
        match addr.is_some() && self.coarse[addr.window() as usize].load(Ordering::Relaxed) {
            true => WindowAddr::NONE,
            false => addr,
        }
    }

    #[inline]
    fn find(&self, at: usize, bytes: usize) -> WindowAddr {
        for live in self.live[..self.live_count.load(Ordering::Acquire)]
            .iter()
            .rev()
        {
            let start = live.0.load(Ordering::Relaxed);
            let end = live.1.load(Ordering::Relaxed);
            if at >= start && at < end && bytes <= end - at {
                let id = live.2.load(Ordering::Relaxed);
                return WindowAddr::new(id as u32, (at - start) as u64);
            }
        }
        WindowAddr::NONE
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;

    #[test]
    fn peers_do_not_write_coarse_memory() {
        let windows = Windows::new(None, 0..1, false).expect("a table");
        let add = |coarse| {
            let memory = Memory::create(Device::Cpu, 4096, "window").expect("memory");
            let at = memory.ptr();
            let window = windows
                .reserve(0, vec![Some((memory, 0))], 4096, 0, coarse)
                .expect("a window");
            assert!(!windows.addr_of(at, 4096).is_some(), "not agreed on");
            windows.list(&window);
            (window.id, at)
        };
        for coarse in [true, false] {
            let (id, at) = add(coarse);
            assert!(windows.addr_of(at, 4096).is_some(), "peers read it");
            assert_eq!(windows.target_addr_of(at, 4096).is_some(), !coarse);
            // The next window gets the number.
            windows.retire(id);
            windows.remove(id, true);
            assert!(!windows.target_addr_of(at, 4096).is_some());
        }
    }

    #[test]
    fn multicast_must_reach_every_window_but_the_workspace() {
        let windows = Windows::new(None, 0..1, false).expect("a table");
        let add = |multicast| {
            let memory = Memory::create(Device::Cpu, 4096, "window").expect("memory");
            let window = windows
                .reserve(0, vec![Some((memory, 0))], 4096, multicast, false)
                .expect("a window");
            windows.list(&window);
            window.id
        };
        assert!(!windows.have_multicast());
        add(0); // the workspace
        assert!(!windows.have_multicast(), "there is no window yet");
        let first = add(1 << 40);
        assert!(windows.have_multicast());
        let second = add(0);
        assert!(!windows.have_multicast());
        let end = |id| {
            windows.retire(id);
            windows.remove(id, !windows.is_captured(id));
        };
        end(second);
        assert!(windows.have_multicast());
        end(first);
        assert!(!windows.have_multicast());
        assert_eq!(
            add(0),
            first,
            "the number of a removed window is used again"
        );
    }

    /// Only the numbers that a graph may have are not used again. A graph keeps the memory.
    #[test]
    fn a_capture_marks_the_windows_of_its_operation() {
        let windows = Windows::new(None, 0..1, false).expect("a table");
        let add = || {
            let owner = Arc::new(());
            let memory = Memory::create(Device::Cpu, 4096, "window").expect("memory");
            let at = memory.ptr();
            let window = windows.reserve(0, vec![Some((memory, 0))], 4096, 0, false);
            let window = window.expect("a window");
            windows.list(&window);
            windows.keep_owner(window.id, Arc::clone(&owner) as _);
            (window.id, windows.addr_of(at, 4096), owner)
        };
        let (used, addr, owner) = add();
        let (other, ..) = add();
        let bound = |version| WindowNumbers::Bound(version, [addr].into_iter().collect());
        assert!(!windows.note_capture(&bound(windows.version() - 2)));
        assert!(windows.note_capture(&WindowNumbers::NONE));
        assert!(!windows.is_captured(used), "not captured");
        assert!(windows.note_capture(&bound(windows.version())));
        let graph = windows.for_graph();
        for id in [used, other] {
            assert_eq!(windows.is_captured(id), id == used);
            windows.retire(id);
            windows.remove(id, !windows.is_captured(id));
        }
        assert!(!windows.note_capture(&bound(windows.version() - 2)));
        assert_eq!(windows.count(), 1, "the number of the other window is free");
        assert_eq!(Arc::strong_count(&owner), 2, "the graph keeps the memory");
        drop(graph);
        assert_eq!(Arc::strong_count(&owner), 1);
    }

    /// A window on which the ranks do not agree frees its number, and no graph refers to it.
    #[test]
    fn a_window_that_was_not_listed_frees_its_number() {
        let windows = Windows::new(None, 0..1, false).expect("a table");
        let reserve = || {
            let memory = Memory::create(Device::Cpu, 4096, "window").expect("memory");
            let at = memory.ptr();
            let window = windows
                .reserve(0, vec![Some((memory, 0))], 4096, 1 << 40, false)
                .expect("a window");
            (window, at)
        };
        windows.list(&reserve().0); // the workspace
        let (first, at) = reserve();
        let (second, _) = reserve();
        assert_ne!(first.id, second.id);
        assert!(windows.note_capture(&WindowNumbers::Any(&[])));
        assert!(!windows.is_captured(first.id));
        assert!(!windows.addr_of(at, 4096).is_some());
        assert!(!windows.have_multicast(), "no operation has a window");
        for window in [&first, &second] {
            windows.remove(window.id, true);
        }
        assert_eq!((windows.count(), windows.have_multicast()), (1, false));
        let (again, at) = reserve();
        assert_eq!(again.id, first.id);
        windows.list(&again);
        assert!(windows.addr_of(at, 4096).is_some() && windows.have_multicast());
    }
}
