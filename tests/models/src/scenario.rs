//! Runs ranks as threads of the model checker, each with a sequence of launches.

use std::cell::Cell;
use std::sync::Arc;

use fusewire_device::Block;
use fusewire_device::group::cpu::{BlockShared, LaneContext};
use fusewire_device::group::{Lanes, Single};
use fusewire_device::layout::{ABORT, CommState, FailureKind, FailureRecord};
use fusewire_device::mem::model::Model;
use fusewire_device::mem::prim::{AtomicU64, Ordering};
use fusewire_device::mem::{self, Order, Scope};

use crate::machine::{Barrier, Boundary, SingleLaneGpu, WeakLane};
use crate::memory_image::MemoryImage;
use crate::step::{Op, Step};
use crate::tool;
use crate::windows;

/// Machine that runs the lanes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// Blocks of one lane, as on the CPU.
    Single,
    /// Blocks of one lane that takes the code paths of a GPU.
    SingleLaneGpu,
    /// Blocks of several lanes with the lanes and the barrier of the emulator.
    Lanes,
    /// Blocks of several lanes whose barrier is as weak as AMD's.
    WeakLane,
    /// The same blocks as `WeakLane`, but the machine wrongly declares its barrier cumulative.
    Claimed,
}

/// Required outcome of the launches of every rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpectedOutcome {
    /// Every launch succeeds.
    Success,
    /// Launches may fail. On each rank whose launch fails, the abort word must be set. The abort
    /// word must name the host, or a rank whose failure record is a valid timeout.
    Failure,
    /// Every rank has a launch that fails, and the failure record has this kind.
    EveryRankFails(FailureKind),
}

/// Fault that a negative control injects into an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedFault {
    /// Packets of odd and even epochs share one set of slots.
    OneSlotSet,
    /// All credits are available before the receiver has sent them.
    FreeCredits,
    /// Rank 1 never launches.
    Absent,
    /// Ready flags and arrival counters are not cleared between launches.
    KeptWords,
    /// The producer marks tiles as done before it has written them.
    EarlyTiles,
    /// The network carries out every signal before the put that it covers.
    EarlySignals,
}

/// Sequence of launches that every rank of a memory image runs.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Memory of the ranks.
    pub image: Arc<MemoryImage>,
    /// The launches. All ranks run the same sequence.
    pub steps: Vec<Step>,
    /// Machine that runs the launches.
    pub blocks: Blocks,
    /// Required outcome of the launches.
    pub expected: ExpectedOutcome,
    /// Injected fault of a negative control.
    pub injected: Option<InjectedFault>,
    /// If true, a host thread writes every abort word at an arbitrary time.
    pub host_aborts: bool,
}

/// State that the lanes of a rank share in one execution. Only `shared` is of a block.
struct RankBlock {
    shared: Vec<BlockShared>,
    /// Start and end of each launch.
    boundary: Boundary,
    /// Block barrier of `Blocks::WeakLane` and `Blocks::Claimed`.
    weak: Barrier,
}

impl Scenario {
    /// Creates a scenario without a fault, in which every launch must succeed.
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

    /// Injects a fault.
    #[must_use]
    pub fn with_fault(mut self, fault: InjectedFault) -> Self {
        self.injected = Some(fault);
        self
    }

    /// Allows launches to fail.
    #[must_use]
    pub fn may_fail(mut self) -> Self {
        self.expected = ExpectedOutcome::Failure;
        self
    }

    /// Requires that every rank has a launch that fails, with a failure record of this kind.
    #[must_use]
    pub fn must_fail(mut self, kind: FailureKind) -> Self {
        self.expected = ExpectedOutcome::EveryRankFails(kind);
        self
    }

    /// Returns this scenario with newly allocated memory, so that explorations on several OS
    /// threads do not share memory.
    #[must_use]
    pub fn with_own_memory(self) -> Self {
        let image = Arc::new(MemoryImage::new(*self.image.config()));
        Self { image, ..self }
    }

    /// Runs one execution. Call this method only inside the model checker.
    pub fn execute(&self) {
        let model = self.image.open();
        self.break_memory(&model);
        let config = self.image.config();
        let blocks: Vec<Arc<RankBlock>> = (0..config.ranks)
            .map(|rank| {
                Arc::new(RankBlock {
                    shared: (0..config.blocks)
                        .map(|block| {
                            let shared = self.image.shared_of(rank, block);
                            BlockShared::new(config.lanes, config.lanes, shared)
                        })
                        .collect(),
                    boundary: Boundary::new(config.lanes * config.blocks),
                    weak: Barrier::new(config.lanes),
                })
            })
            .collect();
        let mut threads = Vec::new();
        let ended = Arc::new(AtomicU64::new(0));
        for rank in 0..config.ranks {
            if self.injected == Some(InjectedFault::Absent) && rank == 1 {
                continue;
            }
            for place in 0..config.lanes * config.blocks {
                if (rank, place) == (0, 0) {
                    continue;
                }
                let (this, shared) = (self.clone(), Arc::clone(&blocks[rank as usize]));
                let (block, lane) = (place / config.lanes, place % config.lanes);
                let ended = Arc::clone(&ended);
                threads.push(tool::spawn(move || {
                    this.lane(rank, block, lane, &shared);
                    ended.fetch_add(1, Ordering::Release);
                }));
            }
            // On a network, only rank 0 makes requests, unless all ranks send packets or return
            // the credits of channels.
            let by_all = |step: &Step| matches!(step.op, Op::Packet | Op::Transfer(..));
            let sends = rank == 0 || self.steps.iter().any(by_all);
            if config.parts.network && sends {
                let (this, ended) = (self.clone(), Arc::clone(&ended));
                threads.push(tool::spawn(move || this.agent(rank, &ended)));
            }
        }
        if self.host_aborts {
            let this = self.clone();
            threads.push(tool::spawn(move || this.abort_all()));
        }
        // Lane 0 of rank 0 runs on this thread, so the checker has one fewer thread to interleave.
        self.lane(0, 0, 0, &blocks[0]);
        ended.fetch_add(1, Ordering::Release);
        for thread in threads {
            thread.join().expect("a lane panicked");
        }
    }

    fn break_memory(&self, model: &Model) {
        match self.injected {
            Some(InjectedFault::OneSlotSet) => self.image.lose_second_slots(model),
            Some(InjectedFault::FreeCredits) => self.image.forge_credits(model),
            Some(
                InjectedFault::Absent
                | InjectedFault::KeptWords
                | InjectedFault::EarlyTiles
                | InjectedFault::EarlySignals,
            )
            | None => {}
        }
    }

    /// Carries out the requests of `rank` until all lanes of all ranks have ended, or all streams
    /// of packets have been put: two agents that only wait would keep lanes from running in loom.
    fn agent(&self, rank: u32, ended: &AtomicU64) {
        let config = self.image.config();
        let lanes = u64::from(config.ranks * config.blocks * config.lanes);
        let mut number = 0;
        // The number of requests, if it is known. An agent without work would delay the others.
        let of_step = |step: &Step| match step.op {
            Op::Packet => Some(2 * u64::from(config.ranks - 1)),
            // For each slot: its header, its data if it has any, and its tail; or its credit.
            Op::Transfer(from, to) => {
                let bytes = step.count as u64;
                let slots = bytes.div_ceil(config.channel_slot).max(1);
                let sent = 2 * slots + bytes.div_ceil(config.channel_slot);
                Some(match rank {
                    rank if rank == from => sent,
                    rank if rank == to => slots,
                    _ => 0,
                })
            }
            _ => None,
        };
        let all: Option<u64> = self.steps.iter().map(of_step).sum();
        while all.is_none_or(|all| number < all) {
            let last = ended.load(Ordering::Acquire) == lanes;
            let early = self.injected == Some(InjectedFault::EarlySignals);
            let requests = self.image.requests(rank);
            if early && windows::carry_out(&self.image, rank, number + 1) {
                windows::carry_out(&self.image, rank, number);
                number += 2;
                requests.complete(number);
            } else if !early && windows::carry_out(&self.image, rank, number) {
                number += 1;
                requests.complete(number);
            } else if last {
                return;
            } else {
                tool::yield_now();
            }
        }
    }

    /// Runs all launches of one lane of one rank.
    fn lane(&self, rank: u32, index: u32, lane: u32, block: &RankBlock) {
        let image = &*self.image;
        let lanes = image.config().lanes;
        let is_first = index == 0 && lane == 0;
        let passed = Cell::new(0);
        let boundaries = Cell::new(0);
        let boundary = || {
            if matches!(
                self.blocks,
                Blocks::SingleLaneGpu | Blocks::WeakLane | Blocks::Claimed
            ) {
                stream_order();
            }
            if lanes * image.config().blocks > 1 {
                block.boundary.wait(&boundaries);
            }
        };
        let context = LaneContext {
            block: index,
            blocks: image.config().blocks,
            lane,
            lanes,
            shared: &raw const block.shared[index as usize],
        };
        for (epoch, step) in self.steps.iter().enumerate() {
            let epoch = epoch as u64;
            if !step.has(rank) {
                continue;
            }
            if is_first {
                step.prepare(image, rank, epoch);
                let kept =
                    self.injected == Some(InjectedFault::KeptWords) && step.has_compute(rank);
                if image.config().parts.words && !kept {
                    step.clear(image, rank);
                }
            }
            boundary();
            let compute = (is_first && step.has_compute(rank)).then(|| {
                let (image, step) = (Arc::clone(&self.image), *step);
                let early = self.injected == Some(InjectedFault::EarlyTiles);
                tool::spawn(move || step.compute(&image, rank, epoch, early))
            });
            match self.blocks {
                Blocks::Single => {
                    // SAFETY: `context` describes this lane and lives until the end of the
                    // function.
                    let single: Single = unsafe { Single::new(&raw const context) };
                    step.launch(image, rank, Block::new(single));
                }
                Blocks::Lanes => {
                    // SAFETY: `context` describes this lane and lives until the end of the
                    // function.
                    let lanes = unsafe { Lanes::new(&raw const context) };
                    step.launch(image, rank, Block::new(lanes));
                }
                Blocks::SingleLaneGpu => {
                    let shared = image.shared(rank);
                    step.launch(image, rank, Block::new(SingleLaneGpu { shared }));
                }
                Blocks::WeakLane => {
                    let weak = WeakLane::<false> {
                        lane,
                        barrier: &block.weak,
                        passed: &passed,
                        shared: image.shared(rank),
                    };
                    step.launch(image, rank, Block::new(weak));
                }
                Blocks::Claimed => {
                    let claimed = WeakLane::<true> {
                        lane,
                        barrier: &block.weak,
                        passed: &passed,
                        shared: image.shared(rank),
                    };
                    step.launch(image, rank, Block::new(claimed));
                }
            }
            if let Some(compute) = compute {
                compute.join().expect("the compute thread panicked");
            }
            boundary();
            if self.failed(rank, epoch) {
                if is_first {
                    step.verify_failed(image, rank);
                }
                return;
            }
            if is_first {
                if step.has_compute(rank) {
                    step.verify_flags(image, rank);
                }
                step.verify(image, rank, epoch);
            }
        }
        assert!(
            !matches!(self.expected, ExpectedOutcome::EveryRankFails(_)),
            "no launch of rank {rank} has failed"
        );
    }

    /// Returns true if the launch that has just returned failed.
    ///
    /// # Panics
    /// Panics if a launch that must succeed failed, or if the failure record of a failed launch is
    /// not valid.
    fn failed(&self, rank: u32, epoch: u64) -> bool {
        let image = &*self.image;
        // A successful launch releases the busy word, so a set busy bit means that the launch
        // failed. A refused launch never sets the bit. `refused` covers that case.
        //
        // SAFETY: `state` and `block_state` point to live memory of this rank. No launch of this
        // rank is running, and the abort word is accessed atomically if other threads may write it.
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
        // Only successful launches increment `sequence`.
        // SAFETY: `block_state` points to live memory of this rank, and no launch of it is running.
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
        // SAFETY: `state` points to live memory of rank `named`. Rank `named` wrote its failure
        // record before it released the abort word, and this thread acquired the abort word above.
        unsafe {
            let record = &raw const (*state).failure;
            let valid = mem::load_u64(&raw const (*record).state, Order::Acquire, Scope::System);
            assert_eq!(valid, 2, "the failure record of rank {named} is not valid");
            let record: FailureRecord = mem::read(record);
            if let ExpectedOutcome::EveryRankFails(kind) = self.expected {
                assert_eq!(record.kind, kind as u64, "the failure record: {record:?}");
                return true;
            }
            assert!(
                record.kind == 1 && record.awaited < u64::from(image.config().ranks),
                "the failure record is not a timeout on a rank: {record:?}"
            );
        }
        true
    }

    /// Writes the abort word of every rank, as the host does.
    fn abort_all(&self) {
        for rank in 0..self.image.config().ranks {
            let state: *mut CommState = self.image.state(rank);
            // SAFETY: `state` points to live memory, and its abort word is only accessed
            // atomically.
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

/// Orders a launch after all writes that the previous launch has observed, as a GPU stream does.
/// Blocks of the CPU do not need this fence: on the CPU, only program order relates launches of a
/// rank.
fn stream_order() {
    #[cfg(loom)]
    loom::sync::atomic::fence(Ordering::AcqRel);
    #[cfg(shuttle)]
    shuttle::sync::atomic::fence(Ordering::AcqRel);
}

/// Rank number that the host writes into abort words.
const HOST: u32 = 0xffff;
