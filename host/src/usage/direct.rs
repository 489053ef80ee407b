//! Accesses of the operation that a thread runs directly on a CPU stream, without acquiring
//! [`Usage::word`]: a locked instruction for each tensor takes as long as a short collective needs
//! for everything else on the host.
//!
//! An allocation that a thread has used through a stream is *favored* by that stream: until another
//! thread, or an operation that is enqueued, uses it, only this thread does. The thread publishes
//! its accesses in the stream by plain stores, and takes the stream for the operation by a locked
//! instruction, which it needs anyway.
//!
//! - A thread accesses the bytes only while its access is published, it has taken the stream, and
//!   all its allocations are favored by the stream.
//! - It has acquired the end of favor, if there was one, by taking the stream: who ends favor
//!   stores that, then modifies the same word ([`WorkSource::meet_direct`]). One of the two
//!   modifications is first. Either the thread sees the end of favor and withdraws, or the other
//!   one sees the published access.
//! - The thread releases its access by [`DirectUse::withdraw`]. Who has ended favor waits for that.
//!
//! A thread begins favor under the lock, while it holds [`Usage::word`] and no access is shared. An
//! access under the lock ends it.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

use super::{Access, AccessList, Entry, HeldBack, Shared, Usage, User, WorkSource, source_id};

/// Most tensors of an operation that are published.
const SLOTS: usize = 4;

/// Number of times that an allocation becomes favored.
const MAX_FAVORS: u32 = 32;

/// Value of [`Favor::source`] of an allocation that will not be favored again.
const NEVER: usize = 1;

/// The stream that favors an allocation.
#[derive(Default)]
pub(super) struct Favor {
    /// [`source_id`] of the stream, 0, or [`NEVER`].
    source: AtomicUsize,
    /// The only thread that runs operations directly on that stream with published accesses; or 0.
    thread: AtomicUsize,
}

/// The part of [`Favor`] under the lock.
#[derive(Default)]
pub(super) struct FavorState {
    /// The stream that favors the allocation, or did so and may still have a published access.
    by: Option<Arc<dyn WorkSource>>,
    begun: u32,
}

impl FavorState {
    /// Forgets the stream, which has ended favor and has no published access.
    pub(super) fn end(&mut self) {
        self.by = None;
    }
}

/// The published accesses of a stream.
#[derive(Debug, Default)]
pub(crate) struct DirectUse {
    /// The thread that may publish: the first one that has run an operation directly; or 0.
    thread: AtomicUsize,
    /// The rank for which the thread does so.
    rank: AtomicU64,
    /// Number of published accesses.
    count: AtomicUsize,
    slots: [Slot; SLOTS],
}

/// An access: the address of its [`Usage`], and its word.
#[derive(Debug, Default)]
struct Slot {
    usage: AtomicUsize,
    word: AtomicU64,
}

fn address(usage: &Arc<Usage>) -> usize {
    Arc::as_ptr(usage) as usize
}

impl DirectUse {
    /// Publishes the accesses of this thread, if the stream `source` favors all of them. The caller
    /// then takes the stream by a read-modify-write with acquire and release order, and calls
    /// [`DirectUse::is_favored`].
    #[inline(always)]
    pub(crate) fn publish(&self, accesses: &AccessList<'_>, user: User, source: usize) -> bool {
        let AccessList::Inline(list) = accesses else {
            return false;
        };
        // A published access belongs to an operation of this thread that calls this one.
        let may = self.thread.load(Ordering::Relaxed) == user.thread
            && self.count.load(Ordering::Relaxed) == 0
            && list.len() <= SLOTS;
        if !may || !Self::is_favored(accesses, source) {
            return false;
        }
        for (slot, access) in self.slots.iter().zip(list) {
            // Who reads a later access has acquired the end of the earlier one.
            slot.usage.store(address(access.usage), Ordering::Release);
            slot.word.store(access.word, Ordering::Release);
        }
        self.rank.store(user.rank, Ordering::Relaxed);
        self.count.store(list.len(), Ordering::Release);
        true
    }

    /// Returns true if the stream `source` favors all accesses.
    #[inline(always)]
    pub(crate) fn is_favored(accesses: &AccessList<'_>, source: usize) -> bool {
        let AccessList::Inline(list) = accesses else {
            return false;
        };
        let favored = |usage: &Usage| usage.favor.source.load(Ordering::Relaxed) == source;
        list.iter().all(|access| favored(access.usage))
    }

    /// Ends the published accesses.
    #[inline(always)]
    pub(crate) fn withdraw(&self) {
        self.count.store(0, Ordering::Release);
    }

    /// Returns true if `thread` may publish accesses. The first thread that asks may.
    #[inline]
    pub(super) fn may_publish(&self, thread: usize) -> bool {
        match self.thread.load(Ordering::Relaxed) {
            0 => {
                let order = Ordering::Relaxed;
                let claimed = self.thread.compare_exchange(0, thread, order, order);
                claimed.is_ok()
            }
            owner => owner == thread,
        }
    }

    /// Returns the published accesses to an allocation.
    fn entries(&self, usage: usize, source: usize) -> impl Iterator<Item = Entry> {
        let slots = &self.slots[..self.count.load(Ordering::Acquire)];
        let named = move |slot: &&Slot| slot.usage.load(Ordering::Acquire) == usage;
        slots.iter().filter(named).map(move |slot| Entry {
            word: slot.word.load(Ordering::Acquire),
            user: User {
                thread: self.thread.load(Ordering::Relaxed),
                stream: source,
                rank: self.rank.load(Ordering::Relaxed),
                ..User::NOBODY
            },
            work: None,
            compute: None,
            _held_back: HeldBack::default(),
        })
    }
}

impl Favor {
    /// Returns true if a thread other than `thread` may have published accesses.
    #[inline(always)]
    pub(super) fn is_to_another(&self, thread: usize) -> bool {
        let owner = self.thread.load(Ordering::Acquire);
        owner != 0 && owner != thread
    }
}

impl Usage {
    /// Returns true if a stream may begin to favor the allocation.
    #[inline]
    pub(super) fn may_be_favored(&self) -> bool {
        self.favor.source.load(Ordering::Relaxed) == 0 && !self.is_shared.load(Ordering::Relaxed)
    }

    /// Makes `source` favor the allocation, if nothing uses it. The thread may publish accesses
    /// there.
    #[cold]
    pub(super) fn begin_favor(&self, source: &Arc<dyn WorkSource>, thread: usize) {
        let mut shared = self.lock();
        // `is_shared` does not change while this thread has the lock.
        if !self.may_be_favored() || shared.favor.by.is_some() {
            return;
        }
        let (held, order) = (Access::WHOLE, Ordering::Acquire);
        let acquired = self
            .word
            .compare_exchange(0, held, order, Ordering::Relaxed);
        if acquired.is_ok() {
            shared.favor.begun += 1;
            shared.favor.by = Some(Arc::clone(source));
            self.favor
                .source
                .store(source_id(source), Ordering::Relaxed);
            self.favor.thread.store(thread, Ordering::Relaxed);
            // Who acquires the word sees the thread.
            self.word.store(0, Ordering::Release);
        }
    }

    /// Ends favor, and returns the accesses that are still published.
    pub(super) fn end_favor(&self, shared: &mut Shared) -> Vec<Entry> {
        let Some(source) = &shared.favor.by else {
            return Vec::new();
        };
        let next = match shared.favor.begun {
            MAX_FAVORS => NEVER,
            _ => 0,
        };
        self.favor.source.store(next, Ordering::Relaxed);
        // Who sees that no thread publishes accesses also sees that accesses are shared.
        self.favor.thread.store(0, Ordering::Release);
        source.meet_direct();
        let published = self.published(source);
        if published.is_empty() {
            shared.favor.by = None;
        }
        published
    }

    /// Returns true if there may be published accesses after the end of favor.
    pub(super) fn has_published(&self, shared: &Shared) -> bool {
        let by = shared.favor.by.as_ref();
        by.is_some_and(|source| !self.published(source).is_empty())
    }

    fn published(&self, source: &Arc<dyn WorkSource>) -> Vec<Entry> {
        let direct = source.direct_use().into_iter();
        let usage = core::ptr::from_ref(self) as usize;
        direct
            .flat_map(|direct| direct.entries(usage, source_id(source)))
            .collect()
    }
}
