//! Ranks as the tool's threads, launches in sequence.

use std::cell::Cell;
use std::sync::Arc;

use fusewire_device::Block;
use fusewire_device::group::{Lanes, Single};
use fusewire_device::layout::{ABORT, CommState, FailureRecord};
use fusewire_device::mem::model::Model;
use fusewire_device::mem::prim::Ordering;
use fusewire_device::mem::{self, Order, Scope};
use fusewire_device::native::{BlockShared, LaneContext};

use crate::machine::{Barrier, SingleLaneGpu, Weak};
use crate::memory_image::MemoryImage;
use crate::step::Step;
use crate::tool;

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// The CPU's block of one lane.
    Single,
    /// One lane that behaves as a GPU's.
    SingleLaneGpu,
    /// The emulator's lanes, with its barrier.
    Lanes,
    /// Lanes whose barrier is as weak as AMD's.
    Weak,
    /// The same, but its machine says that the barrier orders memory.
    Claimed,
}

/// How ranks end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedOutcome {
    /// Every launch succeeds.
    Success,
    /// Launches may fail: then every rank learns of it, and the record that its abort word names is valid.
    Failure,
}

/// What is broken in the memory of an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// Packets have one set of slots.
    OneSlotSet,
    /// Credits are there before they are given.
    FreeCredits,
    /// Rank 1 never launches.
    Absent,
    /// The words of chunks and tiles stay as the launch before has left them.
    KeptWords,
    /// The producer marks tiles as done before it has written them.
    EarlyTiles,
}

/// A model: ranks that run launches, one after the other.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Memory of the ranks.
    pub image: Arc<MemoryImage>,
    /// The launches, the same on all ranks.
    pub steps: Vec<Step>,
    /// What runs them.
    pub blocks: Blocks,
    /// How they end.
    pub expected: ExpectedOutcome,
    /// What is broken.
    pub injected: Option<InjectedFault>,
    /// A thread of the host's writes every abort word at some time.
    pub host_aborts: bool,
}

/// What the lanes of a rank share in one execution.
struct RankBlock {
    shared: BlockShared,
    /// Where a launch begins and ends.
    boundary: Barrier,
    /// The block's barrier, where it is weak.
    weak: Barrier,
}

impl Scenario {
    /// Every launch succeeds, nothing is broken.
    pub fn new(image: MemoryImage, blocks: Blocks, steps: Vec<Step>) -> Self {
        Self {
            image: Arc::new(image),
            steps,
            blocks,
            expected: ExpectedOutcome::Success,
            injected: None,
            host_aborts: false,
        }
    }

    /// With something broken.
    #[must_use]
    pub fn with_fault(mut self, fault: InjectedFault) -> Self {
        self.injected = Some(fault);
        self
    }

    /// With launches that may fail.
    #[must_use]
    pub fn may_fail(mut self) -> Self {
        self.expected = ExpectedOutcome::Failure;
        self
    }

    /// One execution; to be called by the tool.
    pub fn execute(&self) {
        let model = self.image.open();
        self.break_memory(&model);
        let config = self.image.config();
        let blocks: Vec<Arc<RankBlock>> = (0..config.ranks)
            .map(|rank| {
                Arc::new(RankBlock {
                    shared: BlockShared::new(config.lanes, self.image.shared(rank)),
                    boundary: Barrier::new(config.lanes),
                    weak: Barrier::new(config.lanes),
                })
            })
            .collect();
        let mut threads = Vec::new();
        for rank in 0..config.ranks {
            if self.injected == Some(InjectedFault::Absent) && rank == 1 {
                continue;
            }
            for lane in 0..config.lanes {
                if (rank, lane) == (0, 0) {
                    continue;
                }
                let (this, block) = (self.clone(), Arc::clone(&blocks[rank as usize]));
                threads.push(tool::spawn(move || this.lane(rank, lane, &block)));
            }
        }
        if self.host_aborts {
            let this = self.clone();
            threads.push(tool::spawn(move || this.abort_all()));
        }
        // The thread that is there anyway is one of the lanes: fewer threads, fewer interleavings.
        self.lane(0, 0, &blocks[0]);
        for thread in threads {
            thread.join().expect("a lane that ends");
        }
    }

    fn break_memory(&self, model: &Model) {
        match self.injected {
            Some(InjectedFault::OneSlotSet) => self.image.lose_second_slots(model),
            Some(InjectedFault::FreeCredits) => self.image.forge_credits(model),
            Some(InjectedFault::Absent | InjectedFault::KeptWords | InjectedFault::EarlyTiles)
            | None => {}
        }
    }

    /// One lane of one rank: all launches.
    fn lane(&self, rank: u32, lane: u32, block: &RankBlock) {
        let image = &*self.image;
        let lanes = image.config().lanes;
        let passed = Cell::new(0);
        let boundaries = Cell::new(0);
        let boundary = || {
            if matches!(
                self.blocks,
                Blocks::SingleLaneGpu | Blocks::Weak | Blocks::Claimed
            ) {
                stream_order();
            }
            if lanes > 1 {
                let (arrive, leave) = (Ordering::AcqRel, Ordering::Acquire);
                block.boundary.wait(&boundaries, arrive, leave);
            }
        };
        let context = LaneContext {
            block: 0,
            blocks: 1,
            lane,
            lanes,
            shared: &raw const block.shared,
        };
        for (epoch, step) in self.steps.iter().enumerate() {
            let epoch = epoch as u64;
            if !step.has(rank) {
                continue;
            }
            if lane == 0 {
                step.prepare(image, rank, epoch);
                let kept =
                    self.injected == Some(InjectedFault::KeptWords) && step.has_compute(rank);
                if image.config().parts.words && !kept {
                    step.clear(image, rank);
                }
            }
            boundary();
            let compute = (lane == 0 && step.has_compute(rank)).then(|| {
                let (image, step) = (Arc::clone(&self.image), *step);
                let early = self.injected == Some(InjectedFault::EarlyTiles);
                tool::spawn(move || step.compute(&image, rank, epoch, early))
            });
            match self.blocks {
                Blocks::Single => {
                    // SAFETY: the context describes this lane, and outlives the launch.
                    let single: Single = unsafe { Single::new(&raw const context) };
                    step.launch(image, rank, Block::new(single));
                }
                Blocks::Lanes => {
                    // SAFETY: as above.
                    let lanes = unsafe { Lanes::new(&raw const context) };
                    step.launch(image, rank, Block::new(lanes));
                }
                Blocks::SingleLaneGpu => {
                    let shared = image.shared(rank);
                    step.launch(image, rank, Block::new(SingleLaneGpu { shared }));
                }
                Blocks::Weak => {
                    let weak = Weak::<false> {
                        lane,
                        barrier: &block.weak,
                        passed: &passed,
                        shared: image.shared(rank),
                    };
                    step.launch(image, rank, Block::new(weak));
                }
                Blocks::Claimed => {
                    let claimed = Weak::<true> {
                        lane,
                        barrier: &block.weak,
                        passed: &passed,
                        shared: image.shared(rank),
                    };
                    step.launch(image, rank, Block::new(claimed));
                }
            }
            if let Some(compute) = compute {
                compute.join().expect("the compute thread ends");
            }
            boundary();
            if self.failed(rank, epoch) {
                return;
            }
            if lane == 0 {
                if step.has_compute(rank) {
                    step.raised(image, rank);
                }
                step.verify(image, rank, epoch);
            }
        }
    }

    /// Whether the launch that has just returned failed; then checks what is left behind.
    fn failed(&self, rank: u32, epoch: u64) -> bool {
        let image = &*self.image;
        // A launch that succeeds gives the busy word back; one that was refused never took it.
        // SAFETY: this rank's own state; the abort word is only accessed atomically.
        let (busy, abort) = unsafe {
            let state = image.state(rank);
            let busy = (*image.block_state(rank)).busy & 1 == 1;
            let abort = if image.config().parts.failure {
                mem::load_u64(&raw const (*state).abort, Order::Acquire, Scope::System)
            } else {
                (*state).abort
            };
            (busy, abort)
        };
        // SAFETY: this rank's own state. Launches that succeed count.
        let refused = unsafe { (*image.block_state(rank)).sequence } != epoch + 1;
        if self.expected == ExpectedOutcome::Success {
            assert!(!busy && abort == 0, "launch {epoch} failed on rank {rank}");
            return false;
        }
        if !busy && !refused {
            return false;
        }
        assert!(
            abort & ABORT != 0,
            "rank {rank} failed in launch {epoch} without an abort word"
        );
        let named = abort as u32;
        if self.host_aborts && named == HOST {
            return true;
        }
        let state = image.state(named).cast_const();
        // SAFETY: a rank's record; the abort word was written after it was filled, and was acquired.
        unsafe {
            let record = &raw const (*state).failure;
            let valid = mem::load_u64(&raw const (*record).state, Order::Acquire, Scope::System);
            assert_eq!(valid, 2, "the record that an abort word names is valid");
            let record: FailureRecord = mem::read(record);
            assert!(
                record.kind == 1 && record.awaited < u64::from(image.config().ranks),
                "a time-out that names a rank: {record:?}"
            );
        }
        true
    }

    /// The host's side: writes every rank's abort word.
    fn abort_all(&self) {
        for rank in 0..self.image.config().ranks {
            let state: *mut CommState = self.image.state(rank);
            // SAFETY: the abort word is only accessed atomically.
            unsafe {
                mem::compare_exchange_u64(
                    &raw mut (*state).abort,
                    0,
                    ABORT | u64::from(HOST),
                    Order::AcqRel,
                    Scope::System,
                );
            }
        }
    }
}

/// What a launch finds on a GPU: everything that the launch before it has seen is behind it. A CPU's rank
/// has no more than its program order.
fn stream_order() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::AcqRel);
    #[cfg(shuttle)]
    shuttle::sync::atomic::fence(Ordering::AcqRel);
}

/// Who the host says it is in an abort word of its own.
const HOST: u32 = 0xffff;
