//! Received notifications: a counter, and a futex that waiters sleep on.
//!
//! The peer (through shared memory) and this side's serving thread increment `posted` after they
//! have written the notified bytes. Only this side increments `taken`, the number of notifications
//! that it has delivered. A peer that corrupts the counters can cause only spurious or late
//! notifications.

use core::hint;
use core::ptr;
use core::sync::atomic::{AtomicU32, Ordering, fence};
use core::time::Duration;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use crate::Result;
use fusewire_driver::{Segment, SegmentDescriptor};

/// Duration for which a waiter polls before it sleeps.
const POLLING: Duration = Duration::from_micros(30);

/// Maximum time for which a waiter sleeps before it checks its condition again. Bounds the delay
/// that a hostile peer can cause by corrupting the counters.
const MAX_SLEEP: Duration = Duration::from_millis(100);

/// Counters of a doorbell. If the doorbell is in shared memory, the counters are the first bytes of
/// the segment.
#[repr(C)]
#[derive(Debug, Default)]
struct Doorbell {
    posted: AtomicU32,
    /// Incremented by every ring, so that a sleeping waiter misses no ring.
    rung: AtomicU32,
    sleepers: AtomicU32,
}

#[derive(Debug)]
enum DoorbellLocation {
    Private(Doorbell),
    Shared(Arc<Segment>),
}

/// Handle of a doorbell that this process can ring.
#[derive(Debug)]
pub(super) struct DoorbellHandle(DoorbellLocation);

/// Notifications that this side receives, and the doorbell that announces them.
#[derive(Debug)]
pub(super) struct Inbox {
    doorbell: DoorbellHandle,
    taken: AtomicU32,
}

impl DoorbellHandle {
    /// Opens the doorbell of a peer.
    pub(super) fn open(descriptor: &SegmentDescriptor) -> Result<Self> {
        Ok(Self(DoorbellLocation::Shared(Segment::open(
            descriptor, 0,
        )?)))
    }

    fn bell(&self) -> &Doorbell {
        match &self.0 {
            DoorbellLocation::Private(bell) => bell,
            // SAFETY: a segment is page-aligned, at least a page long, and mapped while it is
            // borrowed. All accesses are atomic, and every bit pattern is valid.
            DoorbellLocation::Shared(segment) => unsafe { &*segment.ptr().cast::<Doorbell>() },
        }
    }

    /// Adds a notification. A receiver that takes the notification sees all earlier writes of this
    /// thread.
    pub(super) fn post(&self) {
        self.bell().posted.fetch_add(1, Ordering::Release);
        self.ring();
    }

    /// Wakes the waiters, which then check their conditions again.
    pub(super) fn ring(&self) {
        let bell = self.bell();
        bell.rung.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if bell.sleepers.load(Ordering::SeqCst) != 0 {
            futex(&bell.rung, libc::FUTEX_WAKE, i32::MAX as u32, None);
        }
    }
}

impl Inbox {
    /// Creates an inbox in memory of this process only.
    pub(super) fn private() -> Self {
        Self {
            doorbell: DoorbellHandle(DoorbellLocation::Private(Doorbell::default())),
            taken: AtomicU32::new(0),
        }
    }

    /// Creates an inbox in memory that a peer can map.
    pub(super) fn shared() -> Result<Self> {
        let segment = Segment::create(1, "fusewire-bell")?;
        Ok(Self {
            doorbell: DoorbellHandle(DoorbellLocation::Shared(segment)),
            taken: AtomicU32::new(0),
        })
    }

    /// Returns the descriptor with which a peer opens the doorbell.
    pub(super) fn descriptor(&self) -> Option<SegmentDescriptor> {
        match &self.doorbell.0 {
            DoorbellLocation::Private(_) => None,
            DoorbellLocation::Shared(segment) => Some(segment.descriptor()),
        }
    }

    /// See [`DoorbellHandle::post`].
    pub(super) fn post(&self) {
        self.doorbell.post();
    }

    /// See [`DoorbellHandle::ring`].
    pub(super) fn ring(&self) {
        self.doorbell.ring();
    }

    /// Takes one notification. Returns false if no notification is available.
    pub(super) fn take(&self) -> bool {
        let bell = self.doorbell.bell();
        self.taken
            .try_update(Ordering::AcqRel, Ordering::Acquire, |taken| {
                let posted = bell.posted.load(Ordering::Acquire);
                (posted != taken).then(|| taken.wrapping_add(1))
            })
            .is_ok()
    }

    /// Calls `ready` until it returns a result: first in a polling loop, then after every ring of
    /// the doorbell. Returns the result, or `None` after `timeout`.
    pub(super) fn wait<R>(
        &self,
        timeout: Duration,
        mut ready: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        let bell = self.doorbell.bell();
        let start = Instant::now();
        loop {
            let seen = bell.rung.load(Ordering::SeqCst);
            if let Some(ready) = ready() {
                return Some(ready);
            }
            let waited = start.elapsed();
            let left = timeout.checked_sub(waited).filter(|left| !left.is_zero())?;
            if waited < POLLING {
                for _ in 0..16 {
                    hint::spin_loop();
                }
                thread::yield_now();
                continue;
            }
            bell.sleepers.fetch_add(1, Ordering::SeqCst);
            futex(
                &bell.rung,
                libc::FUTEX_WAIT,
                seen,
                Some(left.min(MAX_SLEEP)),
            );
            bell.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

/// Makes a futex call on shared memory. Ignores the result, because waiters check their conditions
/// again in any case.
fn futex(word: &AtomicU32, operation: i32, value: u32, timeout: Option<Duration>) {
    let time = timeout.map(|timeout| libc::timespec {
        tv_sec: timeout.as_secs() as libc::time_t,
        tv_nsec: libc::c_long::from(timeout.subsec_nanos() as i32),
    });
    let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
    // SAFETY: `word` is a reference, so the word is aligned and live during the call. `time` is
    // null or points to a value that outlives the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, value, time) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notifications_are_counted_and_wake_a_sleeper() {
        let inbox = Inbox::shared().unwrap();
        let doorbell = DoorbellHandle::open(&inbox.descriptor().unwrap()).unwrap();
        assert!(!inbox.take());
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(30));
                doorbell.post();
                inbox.post();
            });
            let start = Instant::now();
            let take = || inbox.take().then_some(());
            for _ in 0..2 {
                inbox.wait(Duration::from_secs(10), take).unwrap();
            }
            assert!(start.elapsed() < Duration::from_secs(2));
            assert!(inbox.wait(Duration::from_millis(5), take).is_none());
        });
    }
}
