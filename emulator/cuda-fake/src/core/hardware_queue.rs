//! Hardware queues. The streams of a context share a fixed number of queues per priority, and the
//! work of a queue runs in the order in which it was enqueued. A kernel therefore waits for earlier
//! work of other streams in its queue. If that work waits for the kernel, both wait forever.
//!
//! The model is stricter than NVIDIA's hardware, on which a kernel may start as soon as all blocks
//! of the previous kernel in the queue have started. It corresponds to AMD's hardware, on which a
//! kernel starts only after the previous kernel in the queue is complete.

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};

use super::lock;

/// A queue. Work gets a ticket when it is enqueued, and waits until the tickets before it are done.
#[derive(Debug, Default)]
pub(crate) struct HardwareQueue {
    /// Number of live streams of the queue.
    streams: AtomicUsize,
    tickets: AtomicU64,
    done: Mutex<u64>,
    changed: Condvar,
}

/// The place of an item of work in a queue.
#[derive(Clone, Debug)]
pub(crate) struct Turn {
    queue: Arc<HardwareQueue>,
    ticket: u64,
}

impl Turn {
    /// Waits for all earlier work of the queue.
    pub(crate) fn wait(&self) {
        let mut done = lock(&self.queue.done);
        while *done < self.ticket {
            done = self
                .queue
                .changed
                .wait(done)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Marks the work as done.
    pub(crate) fn end(&self) {
        *lock(&self.queue.done) += 1;
        self.queue.changed.notify_all();
    }
}

/// The queues of a context.
#[derive(Debug)]
pub(crate) struct HardwareQueues {
    /// Number of queues per priority.
    connections: usize,
    by_priority: Mutex<BTreeMap<i32, Vec<Arc<HardwareQueue>>>>,
}

/// A stream's use of a queue, until it is dropped.
#[derive(Debug)]
pub(crate) struct QueueSlot(Arc<HardwareQueue>);

impl Drop for QueueSlot {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::AcqRel);
    }
}

impl QueueSlot {
    /// Returns a turn for the next work of the stream, or `None` if the stream does not share its
    /// queue. Work without a turn does not delay the work of a stream that joins the queue later.
    pub(crate) fn turn(&self) -> Option<Turn> {
        (self.0.streams.load(Ordering::Acquire) > 1).then(|| Turn {
            queue: Arc::clone(&self.0),
            ticket: self.0.tickets.fetch_add(1, Ordering::AcqRel),
        })
    }
}

impl Default for HardwareQueues {
    fn default() -> Self {
        Self::new(connections())
    }
}

impl HardwareQueues {
    fn new(connections: usize) -> Self {
        Self {
            connections,
            by_priority: Mutex::default(),
        }
    }

    /// Assigns a new stream to the queue of its priority that has the fewest streams.
    pub(crate) fn assign(&self, priority: i32) -> QueueSlot {
        let mut all = lock(&self.by_priority);
        let queues = all
            .entry(priority)
            .or_insert_with(|| (0..self.connections).map(|_| Arc::default()).collect());
        let streams = |queue: &&Arc<HardwareQueue>| queue.streams.load(Ordering::Acquire);
        let queue = queues.iter().min_by_key(streams).map(Arc::clone);
        let queue = queue.unwrap_or_default();
        queue.streams.fetch_add(1, Ordering::AcqRel);
        QueueSlot(queue)
    }
}

/// Returns the number of queues: `CUDA_DEVICE_MAX_CONNECTIONS`, 8 by default.
fn connections() -> usize {
    static CONNECTIONS: OnceLock<usize> = OnceLock::new();
    *CONNECTIONS.get_or_init(|| {
        let value = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok();
        let number = value.and_then(|value| value.trim().parse().ok());
        number
            .filter(|number| (1..=32).contains(number))
            .unwrap_or(8)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_spread_over_the_queues_of_their_priority() {
        let queues = HardwareQueues::new(8);
        let slots: Vec<_> = (0..8).map(|_| queues.assign(0)).collect();
        assert!(
            slots.iter().all(|slot| slot.turn().is_none()),
            "8 queues, 8 streams"
        );
        let high = queues.assign(-5);
        assert!(
            high.turn().is_none(),
            "another priority has separate queues"
        );
        let ninth = queues.assign(0);
        let shared: Vec<_> = slots.iter().filter_map(QueueSlot::turn).collect();
        assert_eq!(shared.len(), 1);
        let second = ninth.turn().expect("the other stream of the queue");
        let waiter = std::thread::spawn(move || second.wait());
        std::thread::sleep(core::time::Duration::from_millis(20));
        assert!(!waiter.is_finished(), "the first turn has not ended");
        shared[0].wait();
        shared[0].end();
        waiter.join().expect("no panic");
        drop(ninth);
        assert!(slots.iter().all(|slot| slot.turn().is_none()));
    }
}
