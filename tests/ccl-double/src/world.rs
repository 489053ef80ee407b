//! The ranks of one communicator: their meeting places and mailboxes.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use fusewire_ccl_sys::sys::*;

/// One rank's handle. Never freed.
#[derive(Debug)]
pub(crate) struct Comm {
    pub(crate) world: Arc<World>,
    pub(crate) rank: usize,
}

#[derive(Debug)]
pub(crate) struct World {
    pub(crate) count: usize,
    state: Mutex<State>,
    moved: Condvar,
}

/// Name, count, type, operation and root: what must agree between ranks.
pub(crate) type Shape = (&'static str, usize, i32, i32, i32);

#[derive(Debug, Default)]
struct State {
    joined: Vec<bool>,
    aborted: bool,
    next: Vec<u64>,
    meetings: HashMap<u64, Meeting>,
    #[allow(clippy::type_complexity)] // (from, to) to the queue of (type, bytes)
    mail: HashMap<(usize, usize), VecDeque<(i32, Vec<u8>)>>,
}

#[derive(Debug)]
struct Meeting {
    shape: Shape,
    mismatch: bool,
    parts: Vec<Option<Vec<u8>>>,
    children: HashMap<i32, Arc<World>>,
}

impl World {
    pub(crate) fn new(count: usize) -> Arc<Self> {
        let state = State {
            joined: vec![false; count],
            next: vec![0; count],
            ..State::default()
        };
        Arc::new(Self {
            count,
            state: Mutex::new(state),
            moved: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` answers, or the communicator is aborted.
    fn wait<T>(&self, mut ready: impl FnMut(&mut State) -> Option<T>) -> Result<T, ncclResult_t> {
        let mut state = self.lock();
        loop {
            if state.aborted {
                return Err(ncclRemoteError);
            }
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            state = self
                .moved
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(crate) fn join(&self, rank: usize) -> Result<(), ncclResult_t> {
        if core::mem::replace(&mut self.lock().joined[rank], true) {
            return Err(ncclInvalidUsage);
        }
        self.moved.notify_all();
        self.wait(|state| state.joined.iter().all(|joined| *joined).then_some(()))
    }

    pub(crate) fn abort(&self) {
        self.lock().aborted = true;
        self.moved.notify_all();
    }

    pub(crate) fn aborted(&self) -> bool {
        self.lock().aborted
    }

    /// Brings a part to this rank's next meeting, whose number it returns.
    pub(crate) fn post(&self, rank: usize, shape: Shape, part: Vec<u8>) -> u64 {
        let mut state = self.lock();
        let number = state.next[rank];
        state.next[rank] += 1;
        let count = self.count;
        let meeting = state.meetings.entry(number).or_insert_with(|| Meeting {
            shape,
            mismatch: false,
            parts: vec![None; count],
            children: HashMap::new(),
        });
        meeting.mismatch |= meeting.shape != shape;
        meeting.parts[rank] = Some(part);
        drop(state);
        self.moved.notify_all();
        number
    }

    /// Every rank's part, once all came. Meetings are kept: this is a double for short tests.
    pub(crate) fn meet(&self, number: u64) -> Result<Vec<Vec<u8>>, ncclResult_t> {
        self.wait(|state| {
            let meeting = &state.meetings[&number];
            if meeting.mismatch {
                return Some(Err(ncclInvalidUsage));
            }
            meeting
                .parts
                .iter()
                .cloned()
                .collect::<Option<Vec<_>>>()
                .map(Ok)
        })?
    }

    /// The child of a split for one colour.
    pub(crate) fn child(&self, number: u64, colour: i32, count: usize) -> Arc<Self> {
        let mut state = self.lock();
        let meeting = state.meetings.get_mut(&number).expect("met before");
        Arc::clone(
            meeting
                .children
                .entry(colour)
                .or_insert_with(|| Self::new(count)),
        )
    }

    pub(crate) fn send(&self, from: usize, to: usize, dtype: i32, data: Vec<u8>) {
        self.lock()
            .mail
            .entry((from, to))
            .or_default()
            .push_back((dtype, data));
        self.moved.notify_all();
    }

    pub(crate) fn recv(&self, from: usize, to: usize) -> Result<(i32, Vec<u8>), ncclResult_t> {
        self.wait(|state| state.mail.get_mut(&(from, to))?.pop_front())
    }
}
