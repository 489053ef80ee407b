//! The lanes of one emulated block: their barriers, shuffles and shared memory.
//!
//! Each lane is a thread. A block of several warps has a barrier for each of them; in a block of
//! one warp, the barrier of the block is also that of the warp.

use core::cell::UnsafeCell;
use core::fmt;
use core::panic::Location;
// Not modelled: these words only decide whether to panic.
use core::sync::atomic::{AtomicPtr, AtomicU32 as PlainU32, AtomicU64 as PlainU64};

use super::{MAX_LANES, MAX_WARPS};
use crate::arch;
use crate::mem::prim::{AtomicU32, AtomicU64, Ordering};

/// Shared state of the lanes of one emulated block: barriers, an exchange area, shared memory.
pub struct BlockShared {
    /// Lanes of a warp.
    warp: u32,
    block: Barrier,
    /// The barriers of the warps; none in a block of one warp.
    warps: [Barrier; if cfg!(loom) { 0 } else { MAX_WARPS }],
    exchange: [AtomicU64; MAX_LANES],
    shared: UnsafeCell<*mut u8>,
    calls: [CallSite; MAX_LANES],
    /// Two lanes that entered one barrier from different places, plus 1 each; 0 if there are none.
    diverged: [PlainU32; 2],
}

/// Flag in a report of divergence: one lane waits for its warp, and the other for the block.
const BARRIERS_DIFFER: u32 = 1 << 31;

/// A barrier of a block or of a warp.
struct Barrier {
    lanes: u32,
    arrived: AtomicU32,
    phase: AtomicU32,
    /// Lanes that have left the kernel.
    gone: AtomicU32,
}

impl Barrier {
    fn new(lanes: u32) -> Self {
        Self {
            lanes,
            arrived: AtomicU32::new(0),
            phase: AtomicU32::new(0),
            gone: AtomicU32::new(0),
        }
    }

    /// Records that a lane has left. Returns true for the last one.
    fn leave(&self) -> bool {
        self.gone.fetch_add(1, Ordering::AcqRel) + 1 == self.lanes
    }

    /// Prepares the barrier for another launch.
    fn reset(&self) {
        self.arrived.store(0, Ordering::Relaxed);
        self.gone.store(0, Ordering::Release);
    }
}

/// The collective call that a lane has entered last. The barriers order the accesses.
struct CallSite {
    location: AtomicPtr<Location<'static>>,
    /// Hash of the arguments that must be equal on all lanes.
    arguments: PlainU64,
    /// Phase of the barrier of the block that the lane has entered last, plus 1.
    at_block: PlainU64,
}

impl CallSite {
    fn new() -> Self {
        Self {
            location: AtomicPtr::new(core::ptr::null_mut()),
            arguments: PlainU64::new(0),
            at_block: PlainU64::new(0),
        }
    }

    fn location(&self) -> Option<&'static Location<'static>> {
        let location = self.location.load(core::sync::atomic::Ordering::Relaxed);
        // SAFETY: null, or written from a `&'static Location` by `BlockShared::enter`.
        unsafe { location.cast_const().as_ref() }
    }

    fn arguments(&self) -> u64 {
        self.arguments.load(core::sync::atomic::Ordering::Relaxed)
    }
}

// SAFETY: the pointer is written at construction only; the barriers order the lanes' accesses to
// the memory that it points to; everything else is atomic.
unsafe impl Send for BlockShared {}
// SAFETY: as above.
unsafe impl Sync for BlockShared {}

impl fmt::Debug for BlockShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockShared")
            .field("lanes", &self.block.lanes)
            .field("warp", &self.warp)
            .finish_non_exhaustive()
    }
}

impl BlockShared {
    /// Creates a block of `lanes` lanes in warps of `warp` lanes, whose shared memory is at
    /// `shared` ([`arch::SHARED_BYTES`] bytes, 128-byte aligned, alive as long as this value).
    ///
    /// # Panics
    /// If `warp` is not a power of two that divides `lanes`, or there are more than [`MAX_LANES`]
    /// lanes or [`MAX_WARPS`] warps.
    pub fn new(lanes: u32, warp: u32, shared: *mut u8) -> Self {
        assert!(
            lanes as usize <= MAX_LANES
                && warp.is_power_of_two()
                && lanes.is_multiple_of(warp)
                && (lanes / warp) as usize <= MAX_WARPS,
            "a block of {lanes} lanes in warps of {warp}"
        );
        Self {
            warp,
            block: Barrier::new(lanes),
            warps: core::array::from_fn(|_| Barrier::new(warp)),
            exchange: core::array::from_fn(|_| AtomicU64::new(0)),
            shared: UnsafeCell::new(shared),
            calls: core::array::from_fn(|_| CallSite::new()),
            diverged: [const { PlainU32::new(0) }; 2],
        }
    }

    /// Returns the start of the block's shared memory.
    #[inline(always)]
    pub fn shared(&self) -> *mut u8 {
        // SAFETY: written at construction only.
        unsafe { *self.shared.get() }
    }

    /// Returns the number of lanes of a warp.
    pub fn warp_size(&self) -> u32 {
        self.warp
    }

    /// Returns the barrier of the warp of `lane`, and the first lane of that warp.
    fn warp_of(&self, lane: u32) -> (&Barrier, u32) {
        if self.warp == self.block.lanes {
            return (&self.block, 0);
        }
        let index = lane / self.warp;
        (&self.warps[index as usize], index * self.warp)
    }

    /// Waits until all lanes of the block have entered.
    ///
    /// # Panics
    /// If lanes have entered from different places, or with different arguments
    /// ([`BlockShared::uniform`]). If a lane has left the kernel ([`BlockShared::leave`]) while
    /// this one waits. On a GPU both are a hang or undefined behaviour.
    #[track_caller]
    pub fn sync(&self, lane: u32) {
        self.enter(&self.block, 0, lane);
    }

    /// Waits until all lanes of the warp have entered.
    ///
    /// # Panics
    /// As [`BlockShared::sync`]; also if a lane of the warp waits at the barrier of the block.
    #[track_caller]
    pub fn sync_warp(&self, lane: u32) {
        let (barrier, first) = self.warp_of(lane);
        self.enter(barrier, first, lane);
    }

    /// Enters a barrier of the lanes from `first` on.
    #[track_caller]
    fn enter(&self, barrier: &Barrier, first: u32, lane: u32) {
        use core::sync::atomic::Ordering::{Relaxed, Release};
        let call = &self.calls[lane as usize % MAX_LANES];
        let location = core::ptr::from_ref(Location::caller()).cast_mut();
        call.location.store(location, Relaxed);
        let is_block = barrier.lanes == self.block.lanes;
        let phase = barrier.phase.load(Ordering::Acquire);
        if is_block {
            call.at_block.store(u64::from(phase) + 1, Release);
        }
        if barrier.arrived.fetch_add(1, Ordering::AcqRel) + 1 == barrier.lanes {
            self.compare_calls(first, barrier.lanes, is_block);
            barrier.arrived.store(0, Ordering::Relaxed);
            barrier
                .phase
                .store(phase.wrapping_add(1), Ordering::Release);
        } else {
            self.await_phase(barrier, first, lane, phase);
        }
        self.check_diverged();
    }

    fn await_phase(&self, barrier: &Barrier, first: u32, lane: u32, phase: u32) {
        let waits = || barrier.phase.load(Ordering::Acquire) == phase;
        let mut polls = 0u32;
        while waits() {
            assert!(
                barrier.gone.load(Ordering::Acquire) == 0 || !waits(),
                "a lane left the kernel while others of its block wait at a barrier"
            );
            if let Some(other) = self.lane_at_block(barrier, first)
                && waits()
            {
                self.report([lane, other], BARRIERS_DIFFER);
                self.check_diverged();
            }
            polls += 1;
            if polls < 8 {
                arch::pause()
            } else {
                arch::nap(0)
            }
        }
    }

    /// Returns a lane of a warp that waits at the barrier of the block, if `barrier` is that of the
    /// warp.
    fn lane_at_block(&self, barrier: &Barrier, first: u32) -> Option<u32> {
        if barrier.lanes == self.block.lanes {
            return None;
        }
        // The block's barrier cannot end before this lane enters it. Acquires what the other lane
        // had acquired when it entered, such as the end of the warp's barrier.
        let waiting = u64::from(self.block.phase.load(Ordering::Acquire)) + 1;
        (first..first + barrier.lanes).find(|&lane| {
            let at_block = &self.calls[lane as usize].at_block;
            at_block.load(core::sync::atomic::Ordering::Acquire) == waiting
        })
    }

    /// Adds `value` to the arguments of this lane's next barrier of the block, which must be equal
    /// on all lanes.
    pub fn uniform(&self, lane: u32, value: u64) {
        let arguments = &self.calls[lane as usize % MAX_LANES].arguments;
        let before = arguments.load(core::sync::atomic::Ordering::Relaxed);
        let next = (before.rotate_left(7) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        arguments.store(next.wrapping_add(1), core::sync::atomic::Ordering::Relaxed);
    }

    /// Compares the calls of `lanes` lanes from `first` on; their arguments, too, if they are the
    /// block. By the last lane that enters a barrier.
    fn compare_calls(&self, first: u32, lanes: u32, is_block: bool) {
        if cfg!(loom) {
            return;
        }
        let calls = &self.calls[first as usize..(first + lanes) as usize];
        let [leader, others @ ..] = calls else {
            return;
        };
        let differs = others.iter().position(|call| {
            call.location() != leader.location()
                || is_block && call.arguments() != leader.arguments()
        });
        match differs {
            Some(other) => self.report([first, first + 1 + other as u32], 0),
            None if is_block => {
                for call in calls {
                    call.arguments
                        .store(0, core::sync::atomic::Ordering::Relaxed);
                }
            }
            None => {}
        }
    }

    /// Records that two lanes have made different calls. `reason` is 0 or [`BARRIERS_DIFFER`].
    fn report(&self, lanes: [u32; 2], reason: u32) {
        let relaxed = core::sync::atomic::Ordering::Relaxed;
        let free = self.diverged[0].compare_exchange(0, lanes[0] + 1, relaxed, relaxed);
        if free.is_ok() {
            let other = (lanes[1] + 1) | reason;
            self.diverged[1].store(other, core::sync::atomic::Ordering::Release);
        }
    }

    /// Panics if lanes of the block have made different calls.
    fn check_diverged(&self) {
        let other = self.diverged[1].load(core::sync::atomic::Ordering::Acquire);
        if other == 0 {
            return;
        }
        let one = self.diverged[0].load(core::sync::atomic::Ordering::Relaxed);
        let barriers_differ = other & BARRIERS_DIFFER != 0;
        let lanes = [one, other & !BARRIERS_DIFFER].map(|lane| lane as usize - 1);
        let [one, other] = lanes.map(|lane| self.calls[lane].location());
        if let (Some(one), Some(other)) = (one, other) {
            let [a, b] = lanes;
            assert!(
                one == other && !barriers_differ,
                "lanes of a block have diverged: lane {a} makes the collective call at {one}, lane \
                 {b} the one at {other}; all lanes of a block must make the same calls"
            );
            panic!(
                "lanes of a block pass different arguments to the collective call at {one}, such \
                 as the rank or the signal: lanes {a} and {b} differ"
            );
        }
    }

    /// Contributes `value`; every lane of the block gets what `pick` makes of all contributions.
    #[track_caller]
    pub fn exchange<R>(
        &self,
        lane: u32,
        value: u64,
        pick: impl FnOnce(&dyn Fn(u32) -> u64) -> R,
    ) -> R {
        self.exchange_in(&self.block, 0, lane, value, pick)
    }

    /// Contributes `value`; every lane of the warp gets what `pick` makes of the contributions of
    /// the warp, by the index of a lane in the warp.
    #[track_caller]
    pub fn exchange_warp<R>(
        &self,
        lane: u32,
        value: u64,
        pick: impl FnOnce(&dyn Fn(u32) -> u64) -> R,
    ) -> R {
        let (barrier, first) = self.warp_of(lane);
        self.exchange_in(barrier, first, lane, value, pick)
    }

    #[track_caller]
    fn exchange_in<R>(
        &self,
        barrier: &Barrier,
        first: u32,
        lane: u32,
        value: u64,
        pick: impl FnOnce(&dyn Fn(u32) -> u64) -> R,
    ) -> R {
        self.exchange[lane as usize].store(value, Ordering::Relaxed);
        self.enter(barrier, first, lane);
        let picked = pick(&|from| {
            let lane = first + from % barrier.lanes;
            self.exchange[lane as usize].load(Ordering::Relaxed)
        });
        self.enter(barrier, first, lane);
        picked
    }

    /// Records that a lane has returned from the kernel. The last one to leave resets the block, so
    /// that the value can serve another launch.
    pub fn leave(&self, lane: u32) {
        if self.warp != self.block.lanes {
            self.warp_of(lane).0.leave();
        }
        if self.block.leave() {
            for lane in &self.diverged {
                lane.store(0, core::sync::atomic::Ordering::Relaxed);
            }
            for call in &self.calls {
                call.at_block
                    .store(0, core::sync::atomic::Ordering::Relaxed);
                call.arguments
                    .store(0, core::sync::atomic::Ordering::Relaxed);
            }
            for warp in &self.warps {
                warp.reset();
            }
            self.block.reset();
        }
    }
}
