//! Blocks: shared memory and barriers.

use crate::program::BarrierKind;
use crate::shadow::{Agent, Cells, Gathered, Gathering};

/// Number of barriers of a block.
pub(crate) const BARRIERS: usize = 16;

/// A barrier of a block.
#[derive(Clone, Debug, Default)]
pub(crate) struct Barrier {
    /// Number of threads that have arrived in the current phase. In a barrier with a number of
    /// threads, a warp counts as 32 threads, also if it has fewer or some have exited.
    pub(crate) arrived: u32,
    /// Number of threads that have arrived in the current phase, without those that have exited.
    threads: u32,
    /// Number of threads that must arrive. 0: all threads of the block that have not exited.
    pub(crate) expected: u32,
    /// Number of completed phases.
    pub(crate) phase: u64,
    /// Number of threads with a true predicate in the current phase.
    trues: u32,
    /// True if the current phase reduces predicates.
    reduces: bool,
    /// Results of completed phases that waiting threads have not read.
    results: Vec<PhaseResult>,
    /// Warps of which some lanes have arrived and others have not.
    partial: Vec<Partial>,
    /// The memory model's state of the current phase.
    gathering: Gathering,
    /// The memory model's state of completed phases, which waiting threads have not read.
    gathered: Vec<(u64, Gathered)>,
}

/// The result of a reduction in a phase of a barrier.
#[derive(Clone, Copy, Debug)]
struct PhaseResult {
    phase: u64,
    /// Number of threads.
    threads: u32,
    /// Number of threads with a true predicate.
    trues: u32,
    /// Number of threads that have not read the result.
    unread: u32,
}

/// Lanes of a warp that have arrived at a barrier before the others.
#[derive(Clone, Copy, Debug)]
struct Partial {
    warp: u32,
    lanes: u32,
    /// The instruction of an aligned barrier.
    pc: Option<u32>,
}

/// State that the warps of a block share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) bytes: Vec<u8>,
    pub(crate) barriers: [Barrier; BARRIERS],
    /// Lanes of each warp that have not exited.
    pub(crate) live: Vec<u32>,
    /// Number of threads that have not exited.
    pub(crate) threads: u32,
    /// Number of threads at the start.
    pub(crate) all: u32,
    /// The last accesses of `bytes`, for the memory model.
    pub(crate) cells: Cells,
    /// Number of the block in the grid.
    pub(crate) number: u64,
    /// Coordinates of the block in the grid.
    pub(crate) coordinates: [u32; 3],
}

impl Shared {
    /// Registers the arrival of the lanes `lanes` of warp `warp` at a barrier. Returns the phase
    /// whose completion they wait for.
    ///
    /// # Errors
    /// Fails with a description if lanes of the warp do not execute the barrier together.
    pub(crate) fn arrive(
        &mut self,
        id: usize,
        arrival: &Arrival,
        warp: u32,
        lanes: u32,
        trues: u32,
    ) -> Result<u64, String> {
        let barrier = &mut self.barriers[id];
        let expected = arrival.count.unwrap_or(0);
        if barrier.arrived == 0 {
            barrier.expected = expected;
        } else if barrier.expected != expected {
            let count = |count| match count {
                0 => "all threads".to_owned(),
                count => format!("{count} threads"),
            };
            return Err(format!(
                "barrier {id} is used with {} and with {} in one phase",
                count(barrier.expected),
                count(expected)
            ));
        }
        let pc = arrival.aligned.then_some(arrival.pc);
        match barrier.partial.iter_mut().find(|it| it.warp == warp) {
            Some(partial) if partial.pc != pc => {
                return Err(format!(
                    "lanes of one warp are at two different instructions for the aligned barrier \
                     {id}"
                ));
            }
            Some(partial) => partial.lanes |= lanes,
            None => barrier.partial.push(Partial { warp, lanes, pc }),
        }
        let phase = barrier.phase;
        barrier.arrived += lanes.count_ones();
        barrier.threads += lanes.count_ones();
        barrier.trues += trues.count_ones();
        barrier.reduces |= arrival.reduces;
        self.arrive_warp(id, warp);
        self.complete(id)?;
        Ok(phase)
    }

    /// Adds a thread to the memory model's state of a barrier, before it arrives.
    pub(crate) fn gather(&mut self, id: usize, agent: &mut Agent, kind: BarrierKind) {
        let passes = kind == BarrierKind::Arrive;
        self.barriers[id].gathering.add(agent, passes);
    }

    /// Gives a thread that has waited for a phase of a barrier what the others know.
    pub(crate) fn give(&mut self, id: usize, phase: u64, agent: &mut Agent) {
        let gathered = &mut self.barriers[id].gathered;
        let Some(at) = gathered.iter().position(|(it, _)| *it == phase) else {
            return;
        };
        gathered[at].1.give(agent);
        gathered[at].1.unread -= 1;
        if gathered[at].1.unread == 0 {
            gathered.swap_remove(at);
        }
    }

    /// Registers the arrival of a warp if all lanes that have not exited have arrived.
    fn arrive_warp(&mut self, id: usize, warp: u32) {
        let live = self.live[warp as usize];
        let barrier = &mut self.barriers[id];
        let whole = |it: &Partial| it.warp == warp && live & !it.lanes == 0;
        if let Some(at) = barrier.partial.iter().position(whole) {
            let partial = barrier.partial.swap_remove(at);
            if barrier.expected != 0 {
                barrier.arrived += partial.lanes.count_zeros();
            }
        }
    }

    /// Returns the result of a reduction for a thread that has waited for the end of a phase.
    pub(crate) fn read_result(&mut self, id: usize, phase: u64, kind: BarrierKind) -> u64 {
        let results = &mut self.barriers[id].results;
        let Some(at) = results.iter().position(|it| it.phase == phase) else {
            return 0;
        };
        results[at].unread -= 1;
        let result = results[at];
        if result.unread == 0 {
            results.swap_remove(at);
        }
        reduction(kind, (result.threads, result.trues))
    }

    /// Completes the current phase of a barrier if all threads have arrived.
    fn complete(&mut self, id: usize) -> Result<(), String> {
        let barrier = &mut self.barriers[id];
        let needed = match barrier.expected {
            0 => self.threads,
            expected => expected,
        };
        if barrier.arrived == 0 || barrier.arrived < needed {
            return Ok(());
        }
        if barrier.arrived > needed {
            return Err(format!(
                "{} threads have arrived at barrier {id}, which {needed} threads use",
                barrier.arrived
            ));
        }
        for partial in barrier.partial.drain(..) {
            let missing = self.live[partial.warp as usize] & !partial.lanes;
            if missing != 0 && partial.pc.is_some() {
                return Err(format!(
                    "thread {} does not execute the aligned barrier {id} together with the other \
                     threads of its warp",
                    partial.warp * 32 + missing.trailing_zeros()
                ));
            }
        }
        if core::mem::take(&mut barrier.reduces) {
            barrier.results.push(PhaseResult {
                phase: barrier.phase,
                threads: barrier.threads,
                trues: barrier.trues,
                unread: barrier.threads,
            });
        }
        let gathered = barrier.gathering.complete(self.all);
        if let Some(gathered) = gathered.filter(|it| it.unread > 0) {
            barrier.gathered.push((barrier.phase, gathered));
        }
        barrier.arrived = 0;
        barrier.threads = 0;
        barrier.trues = 0;
        barrier.phase += 1;
        Ok(())
    }

    /// Removes the lanes `lanes` of a warp, which have exited.
    pub(crate) fn exit(&mut self, warp: u32, lanes: u32) -> Result<(), String> {
        self.live[warp as usize] &= !lanes;
        self.threads -= lanes.count_ones();
        (0..BARRIERS).try_for_each(|id| {
            self.arrive_warp(id, warp);
            self.complete(id)
        })
    }
}

/// Properties of a barrier instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) count: Option<u32>,
    pub(crate) aligned: bool,
    /// True if the threads reduce predicates.
    pub(crate) reduces: bool,
    pub(crate) pc: u32,
}

/// Returns the value that a reduction barrier gives to each thread.
fn reduction(kind: BarrierKind, (threads, trues): (u32, u32)) -> u64 {
    match kind {
        BarrierKind::RedAnd => u64::from(trues == threads),
        BarrierKind::RedOr => u64::from(trues > 0),
        BarrierKind::RedPopc => u64::from(trues),
        BarrierKind::Sync | BarrierKind::Arrive => 0,
    }
}
