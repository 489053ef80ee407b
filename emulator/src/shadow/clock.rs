//! Vector clocks.

use std::sync::Arc;

/// A thread of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Thread {
    /// Number of the block in the shadow. 0 stands for the host.
    pub(crate) block: u32,
    /// Number of the thread in the block.
    pub(crate) number: u16,
}

impl Thread {
    /// The writer of values that no kernel has written.
    pub(crate) const HOST: Self = Self {
        block: 0,
        number: 0,
    };

    fn key(self) -> u64 {
        u64::from(self.block) << 16 | (u64::from(self.number) + 1)
    }
}

/// Returns the key of all threads of a block.
fn all(block: u32) -> u64 {
    u64::from(block) << 16
}

/// An access of a thread. The time of a thread advances when other threads can learn of its
/// accesses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    pub(crate) thread: Thread,
    pub(crate) time: u64,
}

/// A vector clock: the times up to which accesses of other threads happen before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clock {
    /// Exclusive end times of threads, and of all threads of blocks, sorted by key.
    ends: Vec<(u64, u64)>,
}

impl Clock {
    fn end(&self, key: u64) -> u64 {
        let found = self.ends.binary_search_by_key(&key, |(key, _)| *key);
        found.map_or(0, |at| self.ends[at].1)
    }

    /// Returns true if an event happens before.
    pub(crate) fn contains(&self, event: Event) -> bool {
        self.end(all(event.thread.block)) > event.time || self.end(event.thread.key()) > event.time
    }

    fn raise(&mut self, key: u64, end: u64) {
        match self.ends.binary_search_by_key(&key, |(key, _)| *key) {
            Ok(at) => self.ends[at].1 = self.ends[at].1.max(end),
            Err(at) => self.ends.insert(at, (key, end)),
        }
    }

    /// Adds the events of a thread before a time.
    pub(crate) fn add(&mut self, thread: Thread, end: u64) {
        self.raise(thread.key(), end);
    }

    /// Adds the events of all threads of a block before a time.
    pub(crate) fn add_block(&mut self, block: u32, end: u64) {
        self.raise(all(block), end);
        let within = |key: u64| key >> 16 == u64::from(block) && key != all(block);
        self.ends.retain(|(key, time)| !within(*key) || *time > end);
    }

    /// Returns true if all events of `other` are in this clock.
    fn includes(&self, other: &Self) -> bool {
        let mut mine = self.ends.iter().peekable();
        let mut block_end = (u64::MAX, 0);
        other.ends.iter().all(|(key, end)| {
            let mut own = 0;
            while let Some((at, time)) = mine.next_if(|(at, _)| at <= key) {
                if at & 0xffff == 0 {
                    block_end = (at >> 16, *time);
                }
                if at == key {
                    own = *time;
                }
            }
            own >= *end || (block_end.0 == key >> 16 && block_end.1 >= *end)
        })
    }

    /// Adds the events of another clock.
    pub(crate) fn join(&mut self, other: &Self) {
        if self.includes(other) {
            return;
        }
        let mut joined: Vec<(u64, u64)> = Vec::with_capacity(self.ends.len() + other.ends.len());
        let (mut mine, mut theirs) = (self.ends.iter().peekable(), other.ends.iter().peekable());
        let mut block_end = (u64::MAX, 0);
        loop {
            let (key, end) = match (mine.peek(), theirs.peek()) {
                (None, None) => break,
                (Some(a), Some(b)) if a.0 == b.0 => {
                    let both = (a.0, a.1.max(b.1));
                    mine.next();
                    theirs.next();
                    both
                }
                (Some(a), Some(b)) if a.0 > b.0 => {
                    let next = **b;
                    theirs.next();
                    next
                }
                (Some(a), _) => {
                    let next = **a;
                    mine.next();
                    next
                }
                (None, Some(b)) => {
                    let next = **b;
                    theirs.next();
                    next
                }
            };
            if key & 0xffff == 0 {
                block_end = (key >> 16, end);
            } else if block_end.0 == key >> 16 && block_end.1 >= end {
                continue;
            }
            joined.push((key, end));
        }
        self.ends = joined;
    }

    /// Removes the events of blocks.
    fn forget(&mut self, is_old: &impl Fn(u32) -> bool) {
        self.ends.retain(|(key, _)| !is_old((key >> 16) as u32));
    }
}

/// The events that happen before the next access of a thread.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Knowledge {
    /// For each device, sorted: its launches that ended before this number happen before.
    starts: Vec<(u32, u64)>,
    /// For accesses through the same proxy.
    pub(crate) before: Clock,
    /// Events with a proxy fence between them and the thread.
    pub(crate) fenced: Clock,
    /// Reads of threads that have then written, with strong accesses, what this thread has read.
    pub(crate) consumed: Clock,
}

impl Knowledge {
    /// Returns the number before which launches of a device that ended happen before.
    pub(crate) fn start(&self, device: u32) -> u64 {
        let found = self.starts.binary_search_by_key(&device, |(it, _)| *it);
        found.map_or(0, |at| self.starts[at].1)
    }

    /// Adds the launches of a device that ended before a number.
    pub(crate) fn set_start(&mut self, device: u32, start: u64) {
        match self.starts.binary_search_by_key(&device, |(it, _)| *it) {
            Ok(at) => self.starts[at].1 = self.starts[at].1.max(start),
            Err(at) => self.starts.insert(at, (device, start)),
        }
    }

    pub(crate) fn includes(&self, other: &Self) -> bool {
        other
            .starts
            .iter()
            .all(|(device, start)| self.start(*device) >= *start)
            && self.before.includes(&other.before)
            && self.fenced.includes(&other.fenced)
            && self.consumed.includes(&other.consumed)
    }

    pub(crate) fn join(&mut self, other: &Self) {
        for (device, start) in &other.starts {
            self.set_start(*device, *start);
        }
        self.before.join(&other.before);
        self.fenced.join(&other.fenced);
        self.consumed.join(&other.consumed);
    }

    /// Adds what a thread has read before a write that this thread has read.
    pub(crate) fn consume(&mut self, other: &Self) {
        self.consumed.join(&other.before);
        self.consumed.join(&other.consumed);
    }

    /// Returns the number of times.
    pub(crate) fn len(&self) -> usize {
        self.before.ends.len() + self.consumed.ends.len()
    }

    /// Removes the events of blocks.
    pub(crate) fn forget(&mut self, is_old: impl Fn(u32) -> bool) {
        self.before.forget(&is_old);
        self.fenced.forget(&is_old);
        self.consumed.forget(&is_old);
    }
}

/// Adds the events of `other`, without a copy if nothing changes.
pub(crate) fn join(knowledge: &mut Arc<Knowledge>, other: &Arc<Knowledge>) {
    if Arc::ptr_eq(knowledge, other) || knowledge.includes(other) {
        return;
    }
    if other.includes(knowledge) {
        knowledge.clone_from(other);
        return;
    }
    Arc::make_mut(knowledge).join(other);
}
