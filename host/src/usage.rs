//! Order between the accesses to the memory of a tensor.
//!
//! Safe code can pass one tensor to operations on several streams and threads, and can read and
//! write the tensor on the host at any time. [`Usage`] orders these accesses, per allocation. Two
//! accesses conflict if their bytes overlap and at least one of them writes.
//!
//! - A *held* access belongs to a thread: a copy between the host and the tensor, a blocking
//!   operation, or the submission of work. Conflicting accesses wait until the thread releases it.
//! - A *pending* access belongs to work on a stream. Work on the same stream needs no further
//!   order. Conflicting work on another stream waits on the device. A conflicting copy or blocking
//!   operation blocks its thread.
//!
//! The protocol:
//!
//! - A thread or the work of a stream accesses the bytes only while its access is held or pending.
//! - It has acquired the access in [`Usage::word`], which was 0 while `is_shared` was false, or
//!   under the lock, after the release or the completion of each conflicting access.
//! - A thread releases its access by a store of 0 to `word` or under the lock; a stream by the
//!   completion of the work ([`WorkSource::is_complete`]).
//!
//! A thread that acquires `word` then reads `is_shared`; a thread that takes the lock sets
//! `is_shared`, then reads `word`. All four are sequentially consistent, so at least one of two
//! such threads sees the other.
//!
//! A thread acquires all accesses of an operation or none, and waits for an access only while it
//! holds no other access of that operation. A queued operation is pending, not held. So a closure
//! on a stream can access a tensor that a thread waiting for that stream also accesses. A thread
//! that executes work does not wait for work that has not started, which may wait for the work that
//! the thread executes. Instead that work is held back until the access has ended.
//!
//! Operations that run directly on the calling thread usually need no locked instruction for their
//! tensors: the module `direct` describes how.
//!
//! The operand of a pending operation with [`crate::ReadyFlags`] is [`Flagged`]: flags order the
//! operation with accesses to parts of the operand and with those of the compute stream, which do
//! not wait. An access of another user to the whole operand waits for the operation.
//!
//! Not ordered here are accesses by peers (`put`, or a collective on registered memory, which uses
//! signals), operations of different streams or branches of one graph, flagged operands in a graph,
//! and windows that kernels take: the program must order these accesses by events, signals or
//! flags. The functions with flagged operands are therefore unsafe.

mod direct;

use core::any::Any;
use core::cell::Cell;
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use arrayvec::ArrayVec;
use fusewire_device::call::Call;

pub(crate) use self::direct::DirectUse;
use self::direct::{Favor, FavorState};
use crate::{Error, Result};

/// Bit of an access: it writes.
const WRITES: u64 = 1 << 63;
/// Bit that every access has, so that it is not 0.
const HELD: u64 = 1 << 62;
/// Bits of the first and of the last unit of an access.
const UNIT_BITS: u32 = 31;
const UNIT_MASK: u64 = (1 << UNIT_BITS) - 1;

/// Number of entries from which a new one removes those of completed work.
const MANY_ENTRIES: usize = 16;

/// Longest sleep of a thread that waits for a release. A release may miss that a thread has just
/// started to wait, and the holder stores which rank it is only after it has acquired the access.
const NAP: Duration = Duration::from_micros(200);

/// Time for which a rank waits for another rank that uses the same memory. A message of that rank
/// may arrive before the operation that has sent it returns.
const GRACE: Duration = Duration::from_millis(100);

/// A stream whose completed work can be observed.
pub(crate) trait WorkSource: Send + Sync {
    /// Returns true if the operation `number` is complete. Neither blocks nor calls other code.
    fn is_complete(&self, number: u64) -> bool;

    /// Blocks until the operation `number` is complete.
    fn wait(&self, number: u64);

    /// Returns the result of the operation `number`, which is complete, as far as it is known.
    fn result(&self, _number: u64) -> Result<()> {
        Ok(())
    }

    /// Returns true if the operation `number` has started or is complete. Neither blocks nor calls
    /// other code.
    fn is_started(&self, number: u64) -> bool;

    /// Like [`WorkSource::is_complete`], but asks the driver of a GPU, and may call callbacks of
    /// completed work.
    fn poll(&self, number: u64) -> bool {
        self.is_complete(number)
    }

    /// Keeps the operation `number` from starting until [`WorkSource::let_go`]. Returns false if it
    /// has started or is complete. Work of a GPU cannot be held back.
    fn hold_back(&self, number: u64) -> bool {
        !self.is_started(number)
    }

    /// Ends a successful [`WorkSource::hold_back`].
    fn let_go(&self, _number: u64) {}

    /// Returns true if this thread is executing work of the stream, or a callback of its work.
    fn is_current(&self) -> bool;

    /// Returns the accesses that a thread publishes while it runs an operation directly.
    fn direct_use(&self) -> Option<&DirectUse> {
        None
    }

    /// Modifies the word by which a thread takes the stream to run an operation directly, without
    /// changing it, with acquire and release order.
    fn meet_direct(&self) {}

    fn as_any(&self) -> &dyn Any;
}

/// An operation of a stream.
#[derive(Clone)]
pub(crate) struct PendingWork {
    pub(crate) source: Arc<dyn WorkSource>,
    pub(crate) number: u64,
}

impl PendingWork {
    /// Waits until the operation is complete, for at most `limit`. Returns true if it is.
    fn ends_within(&self, limit: Duration) -> bool {
        let started = Instant::now();
        loop {
            if self.source.poll(self.number) {
                return true;
            }
            if started.elapsed() > limit {
                return false;
            }
            std::thread::sleep(NAP);
        }
    }

    fn is_complete(&self) -> bool {
        self.source.is_complete(self.number)
    }
}

/// Operations that may not start before the value is dropped.
#[derive(Default)]
#[must_use]
struct HeldBack(Vec<PendingWork>);

impl HeldBack {
    /// Adds `work`. Returns false if it has started.
    fn add(&mut self, work: &PendingWork) -> bool {
        let is_held = work.source.hold_back(work.number);
        if is_held {
            self.0.push(work.clone());
        }
        is_held
    }
}

impl Drop for HeldBack {
    fn drop(&mut self) {
        for work in &self.0 {
            work.source.let_go(work.number);
        }
    }
}

/// Returns a value that identifies a source as long as the source lives.
pub(crate) fn source_id(source: &Arc<dyn WorkSource>) -> usize {
    Arc::as_ptr(source).cast::<()>() as usize
}

/// The thread, stream, rank and graph on whose behalf memory is accessed. A value of 0 stands for
/// none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct User {
    thread: usize,
    /// [`source_id`] of the stream.
    stream: usize,
    rank: u64,
    /// The graph, if the access is that of a replay.
    replay: u64,
    /// The graph, if the thread executes a closure of a replay.
    inside: u64,
    /// True if the thread executes work of a stream.
    in_work: bool,
}

impl User {
    pub(crate) const NOBODY: Self = Self {
        thread: 0,
        stream: 0,
        rank: 0,
        replay: 0,
        inside: 0,
        in_work: false,
    };

    /// Returns the calling thread.
    #[inline]
    pub(crate) fn this_thread() -> Self {
        static THREADS: AtomicUsize = AtomicUsize::new(0);
        thread_local!(static NUMBER: Cell<usize> = const { Cell::new(0) });
        #[cold]
        fn number() -> usize {
            NUMBER.set(THREADS.fetch_add(1, Ordering::Relaxed) + 1);
            NUMBER.get()
        }
        Self {
            thread: match NUMBER.get() {
                0 => number(),
                known => known,
            },
            ..Self::NOBODY
        }
    }

    /// Returns this user as a thread that executes work of a stream. It does not wait for work that
    /// has not started, because that may wait for the work that it executes.
    #[inline]
    pub(crate) fn in_work(self, in_work: bool) -> Self {
        Self { in_work, ..self }
    }

    pub(crate) fn is_in_work(self) -> bool {
        self.in_work
    }

    /// Returns this user with work on a stream. `source` is the [`source_id`] of the stream.
    #[inline]
    pub(crate) fn on_stream(self, source: usize) -> Self {
        Self {
            stream: source,
            ..self
        }
    }

    /// Returns this user as `rank` of the communicator `id`.
    #[inline]
    pub(crate) fn as_rank(self, id: u64, rank: u32) -> Self {
        Self {
            rank: (id << 16) | u64::from(rank & 0xffff),
            ..self
        }
    }

    /// Returns this user as a replay of `graph`.
    pub(crate) fn as_replay(self, graph: u64) -> Self {
        Self {
            replay: graph,
            ..self
        }
    }

    /// Returns this user as a thread that executes a closure of a replay of `graph`.
    pub(crate) fn inside(self, graph: u64) -> Self {
        Self {
            inside: graph,
            ..self
        }
    }

    /// Returns the other rank if both are different ranks of one communicator, which are threads of
    /// this process then. Waiting would deadlock: the operation of the other rank cannot end before
    /// this rank joins it.
    fn other_rank(self, other: Self) -> Option<u32> {
        let both = self.rank != 0 && other.rank != 0;
        (both && self.rank >> 16 == other.rank >> 16 && self.rank != other.rank)
            .then_some((other.rank & 0xffff) as u32)
    }
}

/// A range of bytes of an allocation: the word of a reading access to it, or 0 if it is empty.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent(u64);

/// Bytes of an allocation that an operation accesses.
#[derive(Clone, Copy)]
pub(crate) struct Access<'a> {
    usage: &'a Arc<Usage>,
    /// [`HELD`], [`WRITES`], the first unit, and the first unit after the access.
    word: u64,
}

/// An [`Access`] that keeps its [`Usage`] alive.
#[derive(Clone)]
pub(crate) struct SharedAccess {
    usage: Arc<Usage>,
    word: u64,
}

impl SharedAccess {
    fn borrow(&self) -> Access<'_> {
        Access {
            usage: &self.usage,
            word: self.word,
        }
    }
}

impl<'a> Access<'a> {
    /// The word of an access to all units.
    const WHOLE: u64 = HELD | WRITES | UNIT_MASK;

    /// Creates an access to an extent of the allocation, if it is not empty.
    #[inline(always)]
    pub(crate) fn of(usage: &'a Arc<Usage>, extent: Extent, writes: bool) -> Option<Self> {
        let writes = if writes { WRITES } else { 0 };
        let word = extent.0 | writes;
        (extent.0 != 0).then_some(Self { usage, word })
    }

    /// Creates an access to the bytes `start .. end`, which must not be empty.
    #[cfg(test)]
    pub(crate) fn new(usage: &'a Arc<Usage>, start: u64, end: u64, writes: bool) -> Self {
        Self::of(usage, usage.extent(start, end), writes).expect("bytes")
    }

    fn to_shared(self) -> SharedAccess {
        SharedAccess {
            usage: Arc::clone(self.usage),
            word: self.word,
        }
    }
}

/// Returns the first unit of an access and the first unit after it.
#[inline]
const fn units(word: u64) -> (u64, u64) {
    (word >> UNIT_BITS & UNIT_MASK, word & UNIT_MASK)
}

/// Returns one access for two accesses of one allocation, if there is one that covers no more units
/// and writes no more units.
#[inline]
fn merged(one: u64, other: u64) -> Option<u64> {
    let ((first, last), (start, end)) = (units(one), units(other));
    let union = HELD | (one | other) & WRITES | first.min(start) << UNIT_BITS | last.max(end);
    let touch = first <= end && start <= last;
    let fits = (one ^ other) & WRITES == 0 || union == one || union == other;
    (touch && fits).then_some(union)
}

/// Returns true if two accesses of one allocation conflict.
fn conflict(one: u64, other: u64) -> bool {
    let ((first, last), (start, end)) = (units(one), units(other));
    (one | other) & WRITES != 0 && first < end && start < last
}

/// Most accesses of an [`AccessList`] that needs no heap allocation.
const INLINE: usize = 8;

/// The accesses of an operation. Those that one access can stand for are merged.
#[derive(Clone)]
pub(crate) enum AccessList<'a> {
    Inline(ArrayVec<Access<'a>, INLINE>),
    Shared(Arc<[SharedAccess]>),
}

impl fmt::Debug for AccessList<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AccessList").finish_non_exhaustive()
    }
}

impl<'a> AccessList<'a> {
    /// Creates an empty list. A constant would be copied with its unused bytes.
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Self::Inline(ArrayVec::new())
    }

    /// Adds an access.
    #[inline]
    pub(crate) fn push(&mut self, access: Access<'a>) {
        if let Self::Inline(list) = self {
            for known in list.iter_mut() {
                if Arc::ptr_eq(known.usage, access.usage)
                    && let Some(word) = merged(known.word, access.word)
                {
                    known.word = word;
                    return;
                }
            }
            if list.try_push(access).is_ok() {
                return;
            }
        }
        self.push_shared(access);
    }

    #[cold]
    fn push_shared(&mut self, access: Access<'a>) {
        let mut all: Vec<SharedAccess> = self.iter().map(Access::to_shared).collect();
        all.push(access.to_shared());
        *self = Self::Shared(merge(all));
    }

    /// Makes the stream of this thread favor the allocations, if nothing uses them. `direct` is
    /// that of the stream `source`.
    #[inline]
    pub(crate) fn begin_favor(
        &self,
        direct: &DirectUse,
        source: impl FnOnce() -> Arc<dyn WorkSource>,
    ) {
        let thread = User::this_thread().thread;
        if let Self::Inline(list) = self
            && list.iter().any(|access| access.usage.may_be_favored())
            && direct.may_publish(thread)
        {
            let source = source();
            for access in list {
                access.usage.begin_favor(&source, thread);
            }
        }
    }

    /// Returns true if the operation accesses no tensor.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        match self {
            Self::Inline(list) => list.is_empty(),
            Self::Shared(list) => list.is_empty(),
        }
    }

    #[inline]
    fn iter(&self) -> impl Iterator<Item = Access<'_>> {
        let (inline, shared): (&[Access<'_>], &[SharedAccess]) = match self {
            Self::Inline(list) => (list, &[]),
            Self::Shared(list) => (&[], list),
        };
        let shared = shared.iter().map(SharedAccess::borrow);
        inline.iter().copied().chain(shared)
    }

    /// Returns the same accesses, which keep their [`Usage`] alive.
    pub(crate) fn to_arc(&self) -> Arc<[SharedAccess]> {
        match self {
            Self::Shared(list) => Arc::clone(list),
            Self::Inline(_) => self.iter().map(Access::to_shared).collect(),
        }
    }

    /// Appends the accesses to those of a capture.
    pub(crate) fn append_to(&self, all: &mut Vec<SharedAccess>) {
        all.extend(self.iter().map(Access::to_shared));
    }
}

/// Returns the accesses, with those merged that one access can stand for.
pub(crate) fn merge(mut all: Vec<SharedAccess>) -> Arc<[SharedAccess]> {
    all.sort_by_key(|access| (Arc::as_ptr(&access.usage) as usize, units(access.word)));
    all.dedup_by(|access, kept| {
        let same = Arc::ptr_eq(&access.usage, &kept.usage);
        let Some(word) = merged(kept.word, access.word).filter(|_| same) else {
            return false;
        };
        kept.word = word;
        true
    });
    all.into()
}

/// The accesses of an operation, and for whom it makes them.
#[derive(Clone, Copy)]
pub(crate) struct Uses<'a> {
    pub(crate) accesses: &'a AccessList<'a>,
    pub(crate) user: User,
    pub(crate) operation: Name,
    pub(crate) flagged: Option<&'a Flagged>,
}

/// The operand of an operation with ready flags, while the operation is pending. The flags order
/// the accesses to its parts with the operation, and those of the compute stream.
pub(crate) struct Flagged {
    operand: SharedAccess,
    compute: Arc<dyn WorkSource>,
}

impl Flagged {
    /// Creates the operand from the only access of a list, or `None` if the list is empty.
    pub(crate) fn new(accesses: &AccessList<'_>, compute: Arc<dyn WorkSource>) -> Option<Self> {
        let operand = accesses.iter().next()?.to_shared();
        Some(Self { operand, compute })
    }

    /// Returns true if the access `word` of `usage` is that to the operand.
    fn is_operand(&self, usage: &Usage, word: u64) -> bool {
        core::ptr::eq(&raw const *self.operand.usage, usage) && self.operand.word == word
    }
}

/// Name of an operation, for messages.
#[derive(Clone, Copy)]
pub(crate) enum Name {
    Text(&'static str),
    /// The name that the call word tells.
    Call(Call),
}

impl Name {
    #[cold]
    fn text(self) -> &'static str {
        match self {
            Self::Text(text) => text,
            Self::Call(call) => call.operation().name(),
        }
    }
}

/// Address and size of memory.
type Range = (usize, u64);

/// The usages of all memory. Several allocations may be the same memory, for example the part of a
/// window and the same part as another rank of this process has mapped it.
static USAGES: Mutex<BTreeMap<Range, Weak<Usage>>> = Mutex::new(BTreeMap::new());

fn usages() -> MutexGuard<'static, BTreeMap<Range, Weak<Usage>>> {
    USAGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The accesses to an allocation that have begun.
pub(crate) struct Usage {
    /// The key in [`USAGES`], if it is there.
    range: Option<Range>,
    /// A byte offset is `unit << shift`. The unit makes offsets fit [`UNIT_BITS`].
    shift: u32,
    /// One held access, or 0.
    word: AtomicU64,
    /// True if there are entries in `shared`, or a thread adds one or waits.
    is_shared: AtomicBool,
    /// The user of the access in `word`: stored after the access was acquired, and 0 before.
    thread: AtomicUsize,
    stream: AtomicUsize,
    rank: AtomicU64,
    favor: Favor,
    shared: Mutex<Shared>,
    released: Condvar,
}

#[derive(Default)]
struct Shared {
    entries: Vec<Entry>,
    /// Number of threads that wait for a release.
    waiting: u32,
    favor: FavorState,
}

struct Entry {
    /// The access.
    word: u64,
    user: User,
    /// The work of a pending access; `None` for a held access.
    work: Option<PendingWork>,
    /// The compute stream of an operation with flags, if this is the access to its operand.
    compute: Option<Arc<dyn WorkSource>>,
    /// Conflicting work that starts after the end of this access, if it is held.
    _held_back: HeldBack,
}

/// The reason why an access cannot begin now.
enum Blocker {
    /// Another thread holds a conflicting access.
    Held,
    /// Conflicting work is pending.
    Work(PendingWork),
    /// Another rank of the same communicator uses the memory: now, or in pending work.
    Rank(u32, Option<PendingWork>),
    /// This thread uses the memory until after the work has been enqueued.
    Own,
}

impl fmt::Debug for Usage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Usage").finish_non_exhaustive()
    }
}

impl Usage {
    /// Returns the usage of the memory at `address`.
    pub(crate) fn of_memory(address: usize, bytes: u64) -> Arc<Self> {
        let mut usages = usages();
        let known = usages.get(&(address, bytes)).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let usage = Self::with_range(Some((address, bytes)), bytes);
            usages.insert((address, bytes), Arc::downgrade(&usage));
            usage
        })
    }

    /// Creates the usage of an allocation of `bytes` bytes.
    #[cfg(test)]
    pub(crate) fn new(bytes: u64) -> Arc<Self> {
        Self::with_range(None, bytes)
    }

    fn with_range(range: Option<Range>, bytes: u64) -> Arc<Self> {
        let bits = u64::BITS - bytes.leading_zeros();
        Arc::new(Self {
            range,
            shift: (bits + 1).saturating_sub(UNIT_BITS),
            word: AtomicU64::new(0),
            is_shared: AtomicBool::new(false),
            thread: AtomicUsize::new(0),
            stream: AtomicUsize::new(0),
            rank: AtomicU64::new(0),
            favor: Favor::default(),
            shared: Mutex::default(),
            released: Condvar::new(),
        })
    }

    /// Returns the extent of the bytes `start .. end`.
    pub(crate) fn extent(&self, start: u64, end: u64) -> Extent {
        if start >= end {
            return Extent(0);
        }
        let first = start >> self.shift;
        let last = ((end - 1) >> self.shift) + 1;
        Extent(HELD | first << UNIT_BITS | last)
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the held access `word`, if the allocation has no other access.
    #[inline]
    fn acquire(&self, word: u64, user: User) -> bool {
        let acquired = self
            .word
            .compare_exchange(0, word, Ordering::SeqCst, Ordering::Relaxed);
        if acquired.is_err() {
            return false;
        }
        // In this order: who ends favor has stored that accesses are shared.
        if self.favor.is_to_another(user.thread) || self.is_shared.load(Ordering::SeqCst) {
            self.word.store(0, Ordering::Release);
            return false;
        }
        self.thread.store(user.thread, Ordering::Relaxed);
        self.stream.store(user.stream, Ordering::Relaxed);
        self.rank.store(user.rank, Ordering::Relaxed);
        true
    }

    /// Returns the access in `word`.
    fn entry_of_word(&self) -> Option<Entry> {
        let word = self.word.load(Ordering::SeqCst);
        (word != 0).then(|| Entry {
            word,
            user: User {
                thread: self.thread.load(Ordering::Relaxed),
                stream: self.stream.load(Ordering::Relaxed),
                rank: self.rank.load(Ordering::Relaxed),
                ..User::NOBODY
            },
            work: None,
            compute: None,
            _held_back: HeldBack::default(),
        })
    }

    /// Begins the held access `word` in `entries`. If `before` is not `None`, the stream of `user`
    /// will run the access: pending work does not block, and is added to `before`.
    #[cold]
    fn acquire_shared(
        &self,
        word: u64,
        user: User,
        flagged: Option<&Flagged>,
        mut before: Option<&mut Before>,
    ) -> core::result::Result<(), Blocker> {
        let mut shared = self.lock();
        self.is_shared.store(true, Ordering::SeqCst);
        shared.prune();
        let in_word = self.entry_of_word();
        let published = self.end_favor(&mut shared);
        let held = in_word.iter().chain(&published);
        let ends_later = before.as_ref().is_some_and(|before| !before.caller_waits);
        let mut held_back = HeldBack::default();
        for entry in held.chain(&shared.entries) {
            if !conflict(entry.word, word) || entry.is_ordered_with(word, user) {
                continue;
            }
            let is_own = entry.work.is_none() && entry.user.thread == user.thread;
            if is_own && !ends_later {
                continue;
            }
            let blocker = match (&entry.work, &mut before) {
                // This thread executes earlier work of that stream, so the conflicting work starts
                // after it; or it executes a callback of the conflicting work, which has ended.
                (Some(work), _) if !ends_later && work.source.is_current() => continue,
                (None, _) if is_own => Blocker::Own,
                (work, _) if let Some(rank) = user.other_rank(entry.user) => {
                    Blocker::Rank(rank, work.clone())
                }
                (Some(work), None) if user.in_work && held_back.add(work) => continue,
                (None, _) => Blocker::Held,
                (Some(work), Some(before)) => {
                    before.work.push(work.clone());
                    continue;
                }
                (Some(work), None) => Blocker::Work(work.clone()),
            };
            self.leave(&mut shared);
            return Err(blocker);
        }
        shared.entries.push(Entry {
            word,
            user,
            work: None,
            compute: flagged
                .filter(|flagged| flagged.is_operand(self, word))
                .map(|flagged| Arc::clone(&flagged.compute)),
            _held_back: held_back,
        });
        Ok(())
    }

    /// Waits until an access that `blocker` blocks may be possible. The caller has waited for
    /// `waited` before.
    fn wait(&self, blocker: Blocker, waited: Duration, operation: Name) -> Result<()> {
        let operation = operation.text();
        match blocker {
            Blocker::Work(work) => work.source.wait(work.number),
            Blocker::Own => {
                return Err(Error::InvalidArgument {
                    operation,
                    detail:
                        "an operation that this thread is executing uses the same tensor until \
                             after this one could run: enqueue it on the same stream, or use \
                             another tensor"
                            .to_owned(),
                });
            }
            Blocker::Held => self.wait_for_release(),
            Blocker::Rank(_, Some(work)) if work.ends_within(GRACE) => {}
            Blocker::Rank(_, None) if waited < GRACE => self.wait_for_release(),
            Blocker::Rank(rank, _) => {
                return Err(Error::InvalidArgument {
                    operation,
                    detail: format!(
                        "rank {rank} of this communicator, a thread of this process, is using the \
                         same memory, and at least one of the two ranks writes it: pass a separate \
                         tensor to each rank"
                    ),
                });
            }
        }
        Ok(())
    }

    /// Waits until the access in `word` or a held access in `entries` may have been released.
    fn wait_for_release(&self) {
        let mut shared = self.lock();
        let held =
            shared.entries.iter().any(|entry| entry.work.is_none()) || self.has_published(&shared);
        if !held && self.word.load(Ordering::Relaxed) == 0 {
            return;
        }
        self.is_shared.store(true, Ordering::SeqCst);
        // A stream may have begun to favor the allocation since this thread found the access.
        let _ = self.end_favor(&mut shared);
        shared.waiting += 1;
        let waited = self.released.wait_timeout(shared, NAP);
        shared = waited.unwrap_or_else(PoisonError::into_inner).0;
        shared.waiting -= 1;
        self.leave(&mut shared);
    }

    /// Ends the access that [`Usage::acquire`] began.
    #[inline]
    fn release(&self) {
        self.forget_user();
        self.word.store(0, Ordering::Release);
        if self.is_shared.load(Ordering::Relaxed) {
            self.notify();
        }
    }

    /// Clears the user of the access in `word`, before its release: the next holder has acquired
    /// the word before it stores who it is.
    #[inline]
    fn forget_user(&self) {
        self.thread.store(0, Ordering::Relaxed);
        self.stream.store(0, Ordering::Relaxed);
        self.rank.store(0, Ordering::Relaxed);
    }

    #[cold]
    fn notify(&self) {
        if self.lock().waiting > 0 {
            self.released.notify_all();
        }
    }

    /// Ends a held access under the lock. `in_word` is true if [`Usage::acquire`] began it. If
    /// `work` is not `None`, the access continues as a pending access of that work.
    #[cold]
    fn release_shared(&self, word: u64, user: User, in_word: bool, work: Option<&PendingWork>) {
        let mut shared = self.lock();
        // The last one: an operation may contain another one.
        let own = shared
            .entries
            .iter()
            .rposition(|entry| entry.work.is_none() && (entry.word, entry.user) == (word, user))
            .filter(|_| !in_word);
        let own = own.map(|own| shared.entries.remove(own));
        if let Some(work) = work {
            let compute = own.and_then(|own| own.compute);
            self.is_shared.store(true, Ordering::SeqCst);
            shared.add(Entry {
                word,
                user,
                work: Some(work.clone()),
                compute,
                _held_back: HeldBack::default(),
            });
        }
        if in_word {
            self.forget_user();
            self.word.store(0, Ordering::Release);
        }
        if shared.waiting > 0 {
            self.released.notify_all();
        }
        self.leave(&mut shared);
    }

    /// Clears `is_shared` if nothing needs it.
    fn leave(&self, shared: &mut Shared) {
        if shared.entries.is_empty() && shared.waiting == 0 && !self.has_published(shared) {
            shared.favor.end();
            // Releases the accesses that ended under the lock to a thread that acquires `word`.
            self.is_shared.store(false, Ordering::Release);
        }
    }
}

impl Drop for Usage {
    fn drop(&mut self) {
        let Some(range) = self.range else { return };
        let mut usages = usages();
        // The same memory may have another usage already.
        let own = core::ptr::from_ref(self);
        if usages
            .get(&range)
            .is_some_and(|usage| usage.as_ptr() == own)
        {
            usages.remove(&range);
        }
    }
}

impl Entry {
    /// Returns true if the stream, the graph or flags order this access and the access `word` of
    /// `user`.
    fn is_ordered_with(&self, word: u64, user: User) -> bool {
        let (stream, replay) = (self.user.stream, self.user.replay);
        let compute = self.compute.as_ref();
        (stream != 0 && stream == user.stream)
            || (replay != 0 && replay == user.inside)
            || compute.is_some_and(|compute| {
                let ((first, last), (start, end)) = (units(word), units(self.word));
                let is_part = start < first || last < end;
                is_part || source_id(compute) == user.stream || compute.is_current()
            })
    }
}

impl Shared {
    fn prune(&mut self) {
        self.entries
            .retain(|entry| entry.work.as_ref().is_none_or(|work| !work.is_complete()));
    }

    /// Adds a pending access. A later operation of a stream replaces an earlier one with the same
    /// bytes.
    fn add(&mut self, new: Entry) {
        if self.entries.len() >= MANY_ENTRIES {
            self.prune();
        }
        let number = |entry: &Entry| entry.work.as_ref().map_or(0, |work| work.number);
        let source = |entry: &Entry| entry.work.as_ref().map(|work| source_id(&work.source));
        let old = self.entries.iter_mut().find(|entry| {
            source(entry) == source(&new)
                && entry.word == new.word
                && entry.user.replay == new.user.replay
                && entry.user.rank == new.user.rank
                && entry.compute.is_none()
                && new.compute.is_none()
        });
        match old {
            // Another thread may have enqueued a later operation in the meantime.
            Some(old) if number(old) < number(&new) => old.work = new.work,
            Some(_) => {}
            None => self.entries.push(new),
        }
    }
}

/// Work for which the stream of an operation must wait before the operation.
struct Before {
    work: Vec<PendingWork>,
    /// True if the thread that enqueues the operation waits for it. Then the operation ends before
    /// the work that this thread is executing.
    caller_waits: bool,
}

/// Accesses that this thread holds. Dropping the value ends them.
pub(crate) struct InUse<'a> {
    accesses: &'a AccessList<'a>,
    user: User,
    /// Number of accesses that have begun.
    count: usize,
    /// 1 if all of them were begun by [`Usage::acquire`], 0 if by [`Usage::acquire_shared`]. A
    /// word, because the compiler copies a `bool` and its padding in pieces that overlap the stores
    /// before them, and loads of such pieces wait.
    in_words: usize,
}

impl<'a> InUse<'a> {
    /// Begins all `accesses` for this thread. Blocks until conflicting accesses have ended, except
    /// work of the stream of `user` and of streams whose work this thread is executing.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if another rank of the same communicator uses the memory.
    #[inline(always)]
    pub(crate) fn begin(accesses: &'a AccessList<'a>, user: User, operation: Name) -> Result<Self> {
        match Self::begin_in_words(accesses, user) {
            Some(held) => Ok(held),
            None => {
                let uses = Uses {
                    accesses,
                    user,
                    operation,
                    flagged: None,
                };
                Self::begin_shared(uses, &mut None)
            }
        }
    }

    /// Begins all `accesses` if their allocations are unused.
    #[inline(always)]
    fn begin_in_words(accesses: &'a AccessList<'a>, user: User) -> Option<Self> {
        let AccessList::Inline(list) = accesses else {
            return None;
        };
        let mut held = Self {
            accesses,
            user,
            count: 0,
            in_words: 1,
        };
        for access in list {
            if !access.usage.acquire(access.word, user) {
                return None;
            }
            held.count += 1;
        }
        Some(held)
    }

    /// Begins accesses for work that will be enqueued on the stream of the user. `caller_waits` is
    /// true if this thread will wait for the work. `order` is called for each operation for which
    /// this stream must wait. Blocks only until other threads have released conflicting accesses.
    /// [`InUse::enqueued`] passes the accesses to the work.
    ///
    /// # Errors
    /// The errors of [`InUse::begin`] and of `order`.
    pub(crate) fn begin_enqueue(
        uses: Uses<'a>,
        caller_waits: bool,
        order: impl FnMut(&PendingWork) -> Result<()>,
    ) -> Result<Self> {
        let mut before = Some(Before {
            work: Vec::new(),
            caller_waits,
        });
        let held = Self::begin_shared(uses, &mut before)?;
        let before = before.iter().flat_map(|before| &before.work);
        before.into_iter().try_for_each(order)?;
        Ok(held)
    }

    /// Begins all `accesses` under the locks of their allocations. `before` is that of
    /// [`Usage::acquire_shared`].
    #[cold]
    fn begin_shared(uses: Uses<'a>, before: &mut Option<Before>) -> Result<Self> {
        let Uses { accesses, user, .. } = uses;
        let mut first = None;
        loop {
            if let Some(before) = before {
                before.work.clear();
            }
            let mut held = Self {
                accesses,
                user,
                count: 0,
                in_words: 0,
            };
            let blocked = accesses.iter().find_map(|access| {
                let acquired =
                    access
                        .usage
                        .acquire_shared(access.word, user, uses.flagged, before.as_mut());
                held.count += usize::from(acquired.is_ok());
                Some((access.usage, acquired.err()?))
            });
            let Some((usage, blocker)) = blocked else {
                return Ok(held);
            };
            // Waits only after it has ended the accesses that have begun.
            drop(held);
            let first = *first.get_or_insert_with(Instant::now);
            usage.wait(blocker, first.elapsed(), uses.operation)?;
        }
    }

    /// Ends the accesses of this thread, and begins the same accesses of `work`.
    pub(crate) fn enqueued(mut self, work: &PendingWork) {
        self.release_shared(Some(work));
    }

    #[cold]
    fn release_shared(&mut self, work: Option<&PendingWork>) {
        let count = core::mem::take(&mut self.count);
        for access in self.accesses.iter().take(count) {
            let (usage, word) = (access.usage, access.word);
            usage.release_shared(word, self.user, self.in_words == 1, work);
        }
    }
}

impl Drop for InUse<'_> {
    #[inline]
    fn drop(&mut self) {
        match self.accesses {
            AccessList::Inline(list) if self.in_words == 1 => {
                for access in &list[..self.count] {
                    access.usage.release();
                }
            }
            _ => self.release_shared(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use core::sync::atomic::AtomicI32;
    use std::thread;

    use super::*;

    /// A stream whose work completes when the test says so.
    #[derive(Default)]
    struct Source {
        completed: AtomicU64,
        is_current: AtomicBool,
        direct_use: DirectUse,
    }

    impl WorkSource for Source {
        fn is_complete(&self, number: u64) -> bool {
            self.completed.load(Ordering::Acquire) >= number
        }

        fn is_started(&self, number: u64) -> bool {
            self.completed.load(Ordering::Acquire) + 1 >= number
        }

        fn wait(&self, number: u64) {
            while !self.is_complete(number) {
                thread::yield_now();
            }
        }

        fn is_current(&self) -> bool {
            self.is_current.load(Ordering::Relaxed)
        }

        fn direct_use(&self) -> Option<&DirectUse> {
            Some(&self.direct_use)
        }

        fn as_any(&self) -> &dyn Any {
            self
        }
    }

    fn list<'a>(uses: &[(&'a Arc<Usage>, u64, u64, bool)]) -> AccessList<'a> {
        let mut accesses = AccessList::new();
        for (usage, start, end, writes) in uses {
            accesses.push(Access::new(usage, *start, *end, *writes));
        }
        accesses
    }

    /// Threads access random ranges of two allocations. A writer must be alone.
    #[test]
    fn accesses_exclude_each_other() {
        const BYTES: u64 = 8;
        let usages = [Usage::new(BYTES), Usage::new(BYTES)];
        let users: [[AtomicI32; BYTES as usize]; 2] = Default::default();
        thread::scope(|scope| {
            for seed in 1..=6u64 {
                let (usages, users) = (&usages, &users);
                scope.spawn(move || {
                    let mut random = seed;
                    let mut below = |limit: u64| {
                        random = random
                            .wrapping_mul(6_364_136_223_846_793_005)
                            .wrapping_add(seed);
                        (random >> 33) % limit
                    };
                    for _ in 0..5000 {
                        let start = below(BYTES);
                        let range = (start, start + 1 + below(BYTES - start));
                        let writes = below(2) == 1;
                        let accesses = list(&[
                            (&usages[0], range.0, range.1, writes),
                            (&usages[1], range.0, range.1, !writes),
                        ]);
                        let held = InUse::begin(&accesses, User::this_thread(), Name::Text("test"));
                        let held = held.expect("no ranks");
                        for (bytes, writes) in users.iter().zip([writes, !writes]) {
                            for byte in &bytes[range.0 as usize..range.1 as usize] {
                                let before = byte
                                    .fetch_add(if writes { 1000 } else { 1 }, Ordering::Relaxed);
                                assert!(before == 0 || (!writes && before < 1000), "{before}");
                            }
                        }
                        for (bytes, writes) in users.iter().zip([writes, !writes]) {
                            for byte in &bytes[range.0 as usize..range.1 as usize] {
                                byte.fetch_sub(if writes { 1000 } else { 1 }, Ordering::Relaxed);
                            }
                        }
                        drop(held);
                    }
                });
            }
        });
        for usage in &usages {
            assert_eq!(usage.word.load(Ordering::Relaxed), 0);
            // A later holder must not look like one of these threads until it has stored who it is.
            assert_eq!(usage.thread.load(Ordering::Relaxed), 0);
            assert_eq!(usage.stream.load(Ordering::Relaxed), 0);
            assert_eq!(usage.rank.load(Ordering::Relaxed), 0);
            assert!(usage.lock().entries.is_empty());
        }
    }

    fn uses<'a>(accesses: &'a AccessList<'a>, user: User) -> Uses<'a> {
        Uses {
            accesses,
            user,
            operation: Name::Text("test"),
            flagged: None,
        }
    }

    /// Makes the access pending for the operation `number`. Returns the operations for which its
    /// stream must wait.
    fn enqueue(
        uses: Uses<'_>,
        caller_waits: bool,
        stream: &Arc<dyn WorkSource>,
        number: u64,
    ) -> Result<Vec<u64>> {
        let mut waits = Vec::new();
        let held = InUse::begin_enqueue(uses, caller_waits, |work| {
            waits.push(work.number);
            Ok(())
        })?;
        let source = Arc::clone(stream);
        held.enqueued(&PendingWork { source, number });
        Ok(waits)
    }

    fn sources() -> [(Arc<Source>, Arc<dyn WorkSource>); 2] {
        [0, 1].map(|_| {
            let source = Arc::new(Source::default());
            (Arc::clone(&source), source as Arc<dyn WorkSource>)
        })
    }

    #[test]
    fn pending_work_blocks_only_what_it_conflicts_with() {
        let usage = Usage::new(100);
        let [(source, stream), _] = sources();
        let user = User::this_thread().on_stream(source_id(&stream));
        let write = list(&[(&usage, 0, 50, true)]);
        for number in [1, 3, 2] {
            let waits = enqueue(uses(&write, user), false, &stream, number);
            assert!(
                waits.expect("no ranks").is_empty(),
                "a stream orders its own work"
            );
        }
        // Another thread enqueued operation 3 before this one enqueued operation 2.
        let mut waits = Vec::new();
        let other = User::this_thread();
        drop(InUse::begin_enqueue(uses(&write, other), false, |work| {
            waits.push(work.number);
            Ok(())
        }));
        assert_eq!(waits, [3]);
        let disjoint = list(&[(&usage, 50, 100, true)]);
        drop(InUse::begin(&disjoint, other, Name::Text("test")).expect("other bytes"));
        // Work of this stream, and work that starts after that which this thread executes.
        let read = list(&[(&usage, 10, 20, false)]);
        drop(InUse::begin(&read, user, Name::Text("test")).expect("the same stream"));
        drop(InUse::begin(&read, other.in_work(true), Name::Text("test")).expect("not started"));
        source.is_current.store(true, Ordering::Relaxed);
        drop(InUse::begin(&read, other, Name::Text("test")).expect("the current stream"));
        source.is_current.store(false, Ordering::Relaxed);
        thread::scope(|scope| {
            let reader = scope.spawn(|| {
                drop(
                    InUse::begin(&read, User::this_thread(), Name::Text("test")).expect("the end"),
                );
                source.is_complete(3)
            });
            thread::sleep(Duration::from_millis(20));
            source.completed.store(3, Ordering::Release);
            assert!(reader.join().expect("the reader"), "did not wait");
        });
        assert!(
            !usage.is_shared.load(Ordering::Relaxed),
            "nothing is pending"
        );
    }

    /// Work that is enqueued from work of another stream may run after that work.
    #[test]
    fn work_enqueued_from_work_waits_for_later_work_of_that_stream() {
        let usage = Usage::new(100);
        let [(source, stream), (_, other)] = sources();
        let write = list(&[(&usage, 0, 50, true)]);
        let user = User::this_thread().on_stream(source_id(&stream));
        enqueue(uses(&write, user), false, &stream, 5).expect("no ranks");
        // This thread executes an earlier operation of the stream.
        source.is_current.store(true, Ordering::Relaxed);
        let inside = User::this_thread()
            .on_stream(source_id(&other))
            .in_work(true);
        let waits = |caller_waits| {
            let mut waits = Vec::new();
            drop(InUse::begin_enqueue(
                uses(&write, inside),
                caller_waits,
                |work| {
                    waits.push(work.number);
                    Ok(())
                },
            ));
            waits
        };
        assert_eq!(waits(false), [5]);
        assert!(
            waits(true).is_empty(),
            "operation 5 starts after this thread has waited"
        );
    }

    #[test]
    fn work_is_refused_while_this_thread_uses_the_memory_itself() {
        let usage = Usage::new(100);
        let [(_, stream), (_, other)] = sources();
        let write = list(&[(&usage, 0, 50, true)]);
        let user = |source| User::this_thread().on_stream(source_id(source));
        let held = InUse::begin(&write, user(&stream), Name::Text("test")).expect("no ranks");
        let refused = enqueue(uses(&write, user(&other)), false, &other, 1);
        let message = refused.expect_err("no order").to_string();
        assert!(
            message.contains("that this thread is executing"),
            "{message}"
        );
        enqueue(uses(&write, user(&stream)), false, &stream, 1).expect("the same stream");
        drop(held);
    }

    /// A thread that waits for a release may meet a stream that has just begun to favor the memory.
    #[test]
    fn favor_ends_before_accesses_are_shared() {
        let usage = Usage::new(100);
        let [(source, stream), _] = sources();
        let write = list(&[(&usage, 0, 50, true)]);
        let user = User::this_thread().on_stream(source_id(&stream));
        write.begin_favor(&source.direct_use, || Arc::clone(&stream));
        assert!(DirectUse::is_favored(&write, source_id(&stream)));
        let held = InUse::begin(&write, User::this_thread(), Name::Text("test"));
        usage.wait_for_release();
        drop(held.expect("the thread of the stream"));
        let publish = || source.direct_use.publish(&write, user, source_id(&stream));
        thread::scope(|scope| {
            let other = || InUse::begin(&write, User::this_thread(), Name::Text("test"));
            let other = scope.spawn(move || other().map(core::mem::forget));
            other.join().expect("no panic").expect("no ranks");
        });
        assert!(!publish(), "another thread has the access");
    }

    /// A message of the other rank may arrive before its operation returns.
    #[test]
    fn a_rank_waits_for_the_end_of_an_operation_of_another_rank() {
        let usage = Usage::new(100);
        let write = list(&[(&usage, 0, 50, true)]);
        let begin = |rank| {
            let user = User::this_thread().as_rank(1, rank);
            InUse::begin(&write, user, Name::Text("test"))
        };
        // Returns the error of rank 1, or the time that it waited for rank 0.
        let wait = |held_for: Duration| {
            thread::scope(|scope| {
                let held = begin(0).expect("the first");
                let other = scope.spawn(|| {
                    let began = Instant::now();
                    begin(1).map(|_| began.elapsed())
                });
                thread::sleep(held_for);
                if held_for < GRACE {
                    drop(held);
                    return other.join().expect("no panic");
                }
                let waited = other.join().expect("no panic");
                drop(held);
                waited
            })
        };
        // On a busy machine, rank 0 may end too late, or rank 1 may begin after that.
        let mut tries = (0..100).map(|_| wait(GRACE / 5));
        let has_waited = |waited: Result<Duration>| waited.is_ok_and(|time| time > GRACE / 20);
        assert!(tries.any(has_waited), "no wait for the end");
        let message = wait(GRACE).expect_err("a deadlock").to_string();
        assert!(message.contains("rank 0 of this communicator"), "{message}");
    }

    #[test]
    fn accesses_of_one_allocation_merge_if_that_adds_nothing() {
        let usage = Usage::new(1 << 40);
        let unit = 1 << usage.shift;
        let words = |uses: &[(u64, u64, bool)]| -> Vec<(u64, u64, bool)> {
            let mut accesses = AccessList::new();
            for (start, end, writes) in uses {
                accesses.push(Access::new(&usage, start * unit, end * unit, *writes));
            }
            let words = accesses.iter().map(|access| access.word);
            words
                .map(|word| (units(word).0, units(word).1, word & WRITES != 0))
                .collect()
        };
        let apart = [(0, 1, false), (4, 5, true)];
        assert_eq!(words(&apart), apart);
        assert_eq!(words(&[(0, 1, false), (1, 2, false)]), [(0, 2, false)]);
        // An input next to an output stays an input.
        let adjacent = [(0, 4, false), (4, 8, true)];
        assert_eq!(words(&adjacent), adjacent);
        assert_eq!(words(&[(0, 4, false), (0, 8, true)]), [(0, 8, true)]);
        let cut = [(0, 4, true), (0, 8, false)];
        assert_eq!(words(&cut), cut);
        let many: Vec<_> = (0..12)
            .map(|index| (2 * index, 2 * index + 1, false))
            .collect();
        assert_eq!(words(&many), many, "more than an inline list holds");
    }

    #[test]
    fn small_allocations_have_units_of_one_byte() {
        for bytes in [1, 100, (1 << 30) - 1, 1 << 30] {
            assert_eq!(
                Usage::new(bytes).shift,
                u32::from(bytes == 1 << 30),
                "{bytes}"
            );
            let usage = Usage::new(bytes);
            let word = Access::new(&usage, bytes - 1, bytes, true).word;
            assert_eq!(
                units(word),
                ((bytes - 1) >> usage.shift, ((bytes - 1) >> usage.shift) + 1)
            );
        }
    }
}
