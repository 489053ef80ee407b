//! Machines for the models, in addition to [`fusewire_device::group::Single`] and
//! [`fusewire_device::group::Lanes`].

use std::cell::Cell;

use fusewire_device::Machine;
use fusewire_device::arch;
use fusewire_device::mem::prim::{AtomicU64, Ordering};

use crate::tool::{Condvar, Mutex};

/// A block of one lane that takes the code paths of a GPU: it processes two packets as a unit and
/// loops over lanes.
#[derive(Clone, Copy, Debug)]
pub struct SingleLaneGpu {
    /// Shared memory.
    pub shared: *mut u8,
}

impl Machine for SingleLaneGpu {
    const LANES: u32 = 0;
    const CONSTANTS_IN_WORKSPACE: bool = true;
    const CUMULATIVE: bool = true;

    fn lane(self) -> u32 {
        0
    }
    fn lanes(self) -> u32 {
        1
    }
    fn block(self) -> u32 {
        0
    }
    fn blocks(self) -> u32 {
        1
    }
    fn warp_size(self) -> u32 {
        1
    }
    fn sync(self) {}
    fn sync_warp(self) {}
    fn any(self, value: bool) -> bool {
        value
    }
    fn ballot(self, value: bool) -> u64 {
        u64::from(value)
    }
    fn shuffle(self, value: u32, _from: u32) -> u32 {
        value
    }
    fn shuffle_xor(self, value: u32, _mask: u32) -> u32 {
        value
    }
    fn shared(self) -> *mut u8 {
        self.shared
    }
}

/// A barrier that counts all arrivals since its creation and is never reset.
#[derive(Debug)]
pub struct Barrier {
    lanes: u64,
    arrived: AtomicU64,
    /// Value of each lane in an exchange.
    values: Vec<AtomicU64>,
}

impl Barrier {
    /// Creates a barrier of `lanes` lanes.
    pub fn new(lanes: u32) -> Self {
        Self {
            lanes: u64::from(lanes),
            arrived: AtomicU64::new(0),
            values: (0..lanes).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Returns the values of all lanes. Orders no other accesses, like the exchanges of a warp:
    /// updates read the last value without an order.
    fn exchange(&self, passed: &Cell<u64>, lane: u32, value: u64) -> Vec<u64> {
        let order = Ordering::Relaxed;
        self.values[lane as usize].swap(value, order);
        self.wait(passed, order, order);
        let values = self.values.iter();
        let values = values.map(|value| value.fetch_add(0, order)).collect();
        self.wait(passed, order, order);
        values
    }

    /// Waits until all lanes have entered. `passed` holds the number of times that this lane has
    /// entered before.
    pub fn wait(&self, passed: &Cell<u64>, arrive: Ordering, leave: Ordering) {
        passed.set(passed.get() + 1);
        let all = passed.get() * self.lanes;
        self.arrived.fetch_add(1, arrive);
        while self.arrived.load(leave) < all {
            arch::pause();
        }
    }
}

/// Start or end of the launches of a rank, which all lanes enter. Everything before it is visible
/// after it, as in the order of a stream.
///
/// Lanes block instead of polling: loom runs the thread that has yielded least, so that lanes which
/// poll can keep one that has polled more from running.
#[derive(Debug)]
pub struct Boundary {
    lanes: u64,
    arrived: Mutex<u64>,
    all_arrived: Condvar,
}

impl Boundary {
    /// Creates a boundary of `lanes` lanes.
    pub fn new(lanes: u32) -> Self {
        Self {
            lanes: u64::from(lanes),
            arrived: Mutex::new(0),
            all_arrived: Condvar::new(),
        }
    }

    /// Waits until all lanes have entered. `passed` holds the number of times that this lane has
    /// entered before.
    ///
    /// # Panics
    /// Panics if another lane has panicked here.
    pub fn wait(&self, passed: &Cell<u64>) {
        passed.set(passed.get() + 1);
        let all = passed.get() * self.lanes;
        let mut arrived = self.arrived.lock().expect("no lane panicked");
        *arrived += 1;
        if *arrived == all {
            self.all_arrived.notify_all();
        }
        while *arrived < all {
            arrived = self.all_arrived.wait(arrived).expect("no lane panicked");
        }
    }
}

/// A lane of a block whose barrier has only the guarantees of AMD's barrier.
///
/// `sync` covers only writes that the arriving lane has completed, because a release by one wave
/// does not await the stores of other waves. The models express the completion by a release fence,
/// which also orders a later relaxed signal of the same lane; models with other blocks find such
/// signals. After `any`, a lane must execute an acquire fence before it reads what other lanes
/// wrote, because its caches may be stale. In these models, `any` always returns false. If `CLAIMS`
/// is true, the machine wrongly declares its barrier cumulative.
#[derive(Clone, Copy, Debug)]
pub struct WeakLane<'a, const CLAIMS: bool> {
    /// Index of the lane.
    pub lane: u32,
    /// The block's barrier.
    pub barrier: &'a Barrier,
    /// Number of block barriers that this lane has entered.
    pub passed: &'a Cell<u64>,
    /// Shared memory.
    pub shared: *mut u8,
}

impl<const CLAIMS: bool> WeakLane<'_, CLAIMS> {
    /// Returns the lanes whose value matches, bit i for lane i.
    fn match_lanes(self, matches: impl Fn(u64) -> bool, value: u64) -> u64 {
        let values = self.barrier.exchange(self.passed, self.lane, value);
        let bits = values.iter().enumerate();
        bits.map(|(lane, other)| u64::from(matches(*other)) << lane)
            .sum()
    }
}

impl<const CLAIMS: bool> Machine for WeakLane<'_, CLAIMS> {
    const LANES: u32 = 0;
    const CONSTANTS_IN_WORKSPACE: bool = true;
    const CUMULATIVE: bool = CLAIMS;

    fn lane(self) -> u32 {
        self.lane
    }
    fn lanes(self) -> u32 {
        self.barrier.lanes as u32
    }
    fn block(self) -> u32 {
        0
    }
    fn blocks(self) -> u32 {
        1
    }
    fn warp_size(self) -> u32 {
        self.barrier.lanes as u32
    }
    fn sync(self) {
        self.barrier
            .wait(self.passed, Ordering::Relaxed, Ordering::Acquire);
    }
    fn sync_warp(self) {
        self.sync();
    }
    fn any(self, value: bool) -> bool {
        assert!(!value, "a failure vote in a model without failures");
        self.barrier
            .wait(self.passed, Ordering::Release, Ordering::Relaxed);
        false
    }
    fn ballot(self, value: bool) -> u64 {
        self.match_lanes(|other| other == 1, u64::from(value))
    }
    fn match_any(self, value: u64, _bits: u32) -> u64 {
        self.match_lanes(|other| other == value, value)
    }
    fn shuffle(self, value: u32, from: u32) -> u32 {
        let values = self
            .barrier
            .exchange(self.passed, self.lane, u64::from(value));
        values[from as usize] as u32
    }
    fn shuffle_xor(self, value: u32, mask: u32) -> u32 {
        self.shuffle(value, self.lane ^ mask)
    }
    fn shared(self) -> *mut u8 {
        self.shared
    }
}
