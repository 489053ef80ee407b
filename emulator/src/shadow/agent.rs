//! Threads as the memory model sees them: knowledge, releases and fences.

use std::sync::Arc;

use super::cell::{Bytes, Place};
use super::clock::{Clock, Event, Knowledge, Thread, join};
use super::release::{Position, Release, add_release};
use crate::program::Scope;

/// Number of releases of a thread that later writes of the same locations continue.
const MANY_RELEASES: usize = 64;

/// Bytes of a location.
type Bounds = (Place, Bytes);

/// The state of a thread in the memory model.
#[derive(Clone, Debug)]
pub(crate) struct Agent {
    pub(crate) position: Position,
    /// Launches that ended before this number ended before that of the thread started.
    pub(crate) start: u64,
    pub(crate) time: u64,
    pub(crate) knowledge: Arc<Knowledge>,
    /// Releases that strong loads have observed. A fence acquires them, or an acquire access of the
    /// location.
    observed: Vec<(Bounds, Arc<Release>)>,
    /// The thread's releases, which later strong writes of the location continue.
    released: Vec<(Bounds, Arc<Release>)>,
    /// Fences, which later strong writes release.
    fences: Vec<Arc<Release>>,
    /// The last write whose releases the thread has observed: location, position in the coherence
    /// order, and the scope of an acquire access. Threads that poll observe it often.
    last: Option<(Bounds, u32, Option<Scope>)>,
}

impl Agent {
    /// Creates the state of a thread of a launch. `knowledge` is what happens before the launch.
    pub(crate) fn new(position: Position, start: u64, knowledge: &Arc<Knowledge>) -> Self {
        Self {
            position,
            start,
            time: 1,
            knowledge: Arc::clone(knowledge),
            observed: Vec::new(),
            released: Vec::new(),
            fences: Vec::new(),
            last: None,
        }
    }

    /// Returns the event of an access now.
    pub(crate) fn event(&self) -> Event {
        Event {
            thread: self.position.thread,
            time: self.time,
        }
    }

    /// Returns what happens before the thread, with its own accesses, and starts a new time.
    fn publish(&mut self) -> Arc<Knowledge> {
        let mut knowledge = (*self.knowledge).clone();
        knowledge.before.add(self.position.thread, self.time + 1);
        self.time += 1;
        Arc::new(knowledge)
    }

    /// Releases what happens before the thread.
    pub(crate) fn release(&mut self, scope: Scope) -> Arc<Release> {
        Arc::new(Release {
            by: self.position,
            scope,
            knowledge: self.publish(),
        })
    }

    /// Returns the releases that a strong write of a location continues.
    pub(crate) fn continued(&self, at: Bounds) -> Vec<Arc<Release>> {
        let mut releases = self.fences.clone();
        for (_, release) in self.released.iter().filter(|(it, _)| *it == at) {
            add_release(&mut releases, release);
        }
        releases
    }

    /// Executes a release access of a location.
    pub(crate) fn release_at(&mut self, at: Bounds, scope: Scope) -> Arc<Release> {
        let release = self.release(scope);
        self.released
            .retain(|(it, old)| *it != at || old.scope > scope);
        if self.released.len() == MANY_RELEASES {
            self.released.remove(0);
        }
        self.released.push((at, Arc::clone(&release)));
        release
    }

    /// Returns true if the last observed write was another one.
    pub(crate) fn observes(&mut self, at: Bounds, order: u32, acquire: Option<Scope>) -> bool {
        let this = Some((at, order, acquire));
        core::mem::replace(&mut self.last, this) != this
    }

    /// Acquires a release with an operation of a scope. Returns false if the scopes do not suffice.
    pub(crate) fn acquire(&mut self, release: &Arc<Release>, scope: Scope) -> bool {
        if !self.position.mutual(scope, release.by, release.scope) {
            return false;
        }
        join(&mut self.knowledge, &release.knowledge);
        true
    }

    /// Learns what the writer of a value has read before it wrote the value.
    pub(crate) fn consume(&mut self, writer: Event, trail: &Arc<Knowledge>) {
        let known = &self.knowledge;
        if writer.thread == self.position.thread
            || writer.thread == Thread::HOST
            || known.consumed.contains(writer)
            || known.before.contains(writer)
        {
            return;
        }
        let knowledge = Arc::make_mut(&mut self.knowledge);
        knowledge.consume(trail);
        knowledge.consumed.add(writer.thread, writer.time + 1);
    }

    /// Remembers a release that a strong load of a location has observed.
    pub(crate) fn observe(&mut self, at: Bounds, release: &Arc<Release>) {
        if self.knowledge.includes(&release.knowledge) {
            return;
        }
        let same = |(it, old): &&mut (Bounds, Arc<Release>)| {
            *it == at
                && old.by == release.by
                && old.scope == release.scope
                && old.by.thread != Thread::HOST
        };
        // A later release of a thread includes an earlier one. Streams are not one thread.
        match self.observed.iter_mut().find(same) {
            Some((_, old)) if old.knowledge.includes(&release.knowledge) => {}
            Some((_, old)) => old.clone_from(release),
            None => self.observed.push((at, Arc::clone(release))),
        }
    }

    /// Acquires what loads of a location, or of all locations, have observed.
    pub(crate) fn acquire_observed(&mut self, at: Option<Bounds>, scope: Scope) {
        if self.observed.is_empty() {
            return;
        }
        let mut observed = core::mem::take(&mut self.observed);
        observed.retain(|(it, release)| {
            at.is_some_and(|at| at != *it) || !self.acquire(release, scope)
        });
        self.observed = observed;
    }

    /// Executes the release direction of a fence.
    pub(crate) fn fence_release(&mut self, scope: Scope) -> Arc<Release> {
        let release = self.release(scope);
        self.fences.retain(|it| it.scope > scope);
        self.fences.push(Arc::clone(&release));
        release
    }

    /// Executes a proxy fence.
    pub(crate) fn fence_proxy(&mut self) {
        let mut knowledge = (*self.publish()).clone();
        let Knowledge { before, fenced, .. } = &mut knowledge;
        fenced.clone_from(before);
        self.knowledge = Arc::new(knowledge);
    }
}

/// Collects the knowledge of the threads that arrive at a barrier.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gathering {
    knowledge: Vec<Arc<Knowledge>>,
    members: Vec<(Thread, u64)>,
    /// Number of members that do not wait.
    passing: u32,
}

/// The common knowledge of the threads of a completed barrier.
#[derive(Clone, Debug)]
pub(crate) struct Gathered {
    knowledge: Arc<Knowledge>,
    /// The time of all threads after the barrier, if all threads of the block have waited.
    time: Option<u64>,
    /// Number of threads that wait for the result.
    pub(crate) unread: u32,
}

impl Gathering {
    /// Adds a thread that waits or, with `passes`, only arrives.
    pub(crate) fn add(&mut self, agent: &mut Agent, passes: bool) {
        let known = |it: &Arc<Knowledge>| Arc::ptr_eq(it, &agent.knowledge);
        if !self.knowledge.iter().any(known) {
            self.knowledge.push(Arc::clone(&agent.knowledge));
        }
        self.members.push((agent.position.thread, agent.time));
        self.passing += u32::from(passes);
        agent.time += 1;
    }

    /// Completes the barrier. `threads` is the number of threads of the block.
    pub(crate) fn complete(&mut self, threads: u32) -> Option<Gathered> {
        let members = core::mem::take(&mut self.members);
        let mut all = core::mem::take(&mut self.knowledge).into_iter();
        let passing = core::mem::take(&mut self.passing);
        let mut knowledge = all.next()?;
        for other in all {
            join(&mut knowledge, &other);
        }
        let it = Arc::make_mut(&mut knowledge);
        let is_whole = members.len() as u32 == threads && passing == 0;
        let time = members.iter().map(|(_, time)| time + 1).max()?;
        if is_whole {
            it.before.add_block(members[0].0.block, time);
        } else {
            let mut own = Clock::default();
            for (thread, time) in &members {
                own.add(*thread, time + 1);
            }
            it.before.join(&own);
        }
        Some(Gathered {
            knowledge,
            time: is_whole.then_some(time),
            unread: members.len() as u32 - passing,
        })
    }
}

impl Gathered {
    /// Gives a thread that has waited the knowledge of all.
    pub(crate) fn give(&self, agent: &mut Agent) {
        agent.knowledge.clone_from(&self.knowledge);
        agent.time = self.time.unwrap_or(agent.time);
    }
}
