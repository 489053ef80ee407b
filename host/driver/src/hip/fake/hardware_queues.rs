//! Streams, events and hardware queues of the fake.
//!
//! The streams of a device share a fixed number of queues per priority, and the work of a queue
//! runs in the order in which it was enqueued. Work runs as soon as it is at the front of its
//! queue, during the call that enqueues it or that completes the work before it. Only kernels and
//! waits can stay at the front. The fake has no other threads, so a host call that waits for work
//! that cannot run would wait forever.

use core::cell::Cell;
use core::ffi::c_int;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use crate::environment;

/// An item of work, which returns true once it is complete.
type Work = Box<dyn FnMut() -> bool>;

struct HardwareQueue {
    priority: c_int,
    /// Number of live streams of the queue.
    streams: usize,
    /// Streams and their work that is not complete.
    pending: VecDeque<(usize, Work)>,
}

#[derive(Default)]
pub(in super::super) struct HardwareQueues {
    /// Number of queues per priority that a test has set. `None` selects the number that the
    /// environment sets.
    pub(in super::super) per_priority: Option<u32>,
    queues: Vec<HardwareQueue>,
    /// Index of the queue of each live stream.
    streams: BTreeMap<usize, usize>,
    /// Number of streams that were created.
    created: usize,
    /// For each event, whether its latest record is complete.
    events: BTreeMap<usize, Rc<Cell<bool>>>,
}

impl HardwareQueues {
    /// Creates a stream in the queue of its priority that has the fewest streams. Returns the
    /// handle of the stream.
    pub(super) fn create(&mut self, priority: c_int) -> usize {
        if !self.queues.iter().any(|queue| queue.priority == priority) {
            let number = self
                .per_priority
                .unwrap_or_else(|| environment::HIP.queues());
            self.queues.extend((0..number).map(|_| HardwareQueue {
                priority,
                streams: 0,
                pending: VecDeque::new(),
            }));
        }
        let of_priority = self.queues.iter_mut().enumerate();
        let (index, queue) = of_priority
            .filter(|(_, queue)| queue.priority == priority)
            .min_by_key(|(_, queue)| queue.streams)
            .expect("a device has queues of every priority");
        queue.streams += 1;
        self.created += 1;
        let stream = 0x5100 + self.created;
        self.streams.insert(stream, index);
        stream
    }

    /// Destroys a stream, whose pending work still runs. Returns false if there is no such stream.
    pub(super) fn destroy(&mut self, stream: usize) -> bool {
        let Some(index) = self.streams.remove(&stream) else {
            return false;
        };
        self.queues[index].streams -= 1;
        true
    }

    /// Enqueues work. Returns false if there is no such stream.
    pub(super) fn enqueue(&mut self, stream: usize, work: impl FnMut() -> bool + 'static) -> bool {
        let Some(index) = self.streams.get(&stream) else {
            return false;
        };
        let work = Box::new(work);
        self.queues[*index].pending.push_back((stream, work));
        self.run();
        true
    }

    /// Runs all work that can run.
    fn run(&mut self) {
        let mut is_blocked = false;
        while !is_blocked {
            is_blocked = true;
            for queue in &mut self.queues {
                while queue.pending.front_mut().is_some_and(|(_, work)| work()) {
                    queue.pending.pop_front();
                    // May complete a kernel or a wait of another queue.
                    is_blocked = false;
                }
            }
        }
    }

    /// Returns true if all work of a stream is complete.
    pub(super) fn is_idle(&mut self, stream: usize) -> bool {
        self.run();
        let mut pending = self.queues.iter().flat_map(|queue| &queue.pending);
        pending.all(|(other, _)| *other != stream)
    }

    /// Records an event. Returns false if there is no such stream.
    pub(super) fn record(&mut self, event: usize, stream: usize) -> bool {
        let record = Rc::new(Cell::new(false));
        self.events.insert(event, Rc::clone(&record));
        self.enqueue(stream, move || {
            record.set(true);
            true
        })
    }

    /// Makes later work of a stream wait for the latest record of an event. Returns false if there
    /// is no such stream.
    pub(super) fn wait(&mut self, stream: usize, event: usize) -> bool {
        let record = self.events.get(&event).map(Rc::clone);
        self.enqueue(stream, move || record.as_ref().is_none_or(|it| it.get()))
    }

    /// Returns true if the latest record of an event is complete.
    pub(super) fn is_recorded(&mut self, event: usize) -> bool {
        self.run();
        self.events.get(&event).is_none_or(|record| record.get())
    }
}
