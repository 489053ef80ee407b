//! Communicators with their rendezvous and mailboxes.

use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use fusewire_ccl_sys::sys::*;

/// Communicator of one rank. An `ncclComm_t` points to it. It is never freed.
#[derive(Debug)]
pub(crate) struct Comm {
    pub(crate) shared: Arc<SharedComm>,
    pub(crate) rank: usize,
    /// Reduction operators that this rank created with `ncclRedOpCreatePreMulSum` (scaled sums).
    /// The handle of entry `i` is `ncclAvg + 1 + i`. Destroyed operators are `None`.
    pub(crate) scales: Mutex<Vec<Option<Scale>>>,
}

/// A scaled-sum operator: the element type and the factor.
pub(crate) type Scale = (i32, Factor);

/// Factor of a scaled-sum operator.
#[derive(Clone, Debug)]
pub(crate) enum Factor {
    /// The bytes that the factor had when the operator was created.
    Immediate(Vec<u8>),
    /// Address and size of the factor, which each operation reads. The fake's device memory is host
    /// memory.
    OnDevice(usize, usize),
}

impl Factor {
    /// Returns the bytes of the factor now.
    pub(crate) fn read(&self) -> Vec<u8> {
        match self {
            Self::Immediate(bytes) => bytes.clone(),
            // SAFETY: `nccl.h` requires that the scalar stays valid until the operations with the
            // operator have ended.
            Self::OnDevice(at, size) => unsafe {
                core::slice::from_raw_parts(*at as *const u8, *size).to_vec()
            },
        }
    }
}

impl Comm {
    pub(crate) fn new(shared: Arc<SharedComm>, rank: usize) -> Self {
        Self {
            shared,
            rank,
            scales: Mutex::default(),
        }
    }

    pub(crate) fn scales(&self) -> MutexGuard<'_, Vec<Option<Scale>>> {
        self.scales.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
pub(crate) struct SharedComm {
    /// Number that identifies the communicator in the call records.
    pub(crate) id: u64,
    pub(crate) count: usize,
    state: Mutex<State>,
    moved: Condvar,
}

/// Function name, count, element type, reduction and root of a collective. All ranks must pass the
/// same values.
pub(crate) type Shape = (&'static str, usize, i32, i32, i32);

/// A rank's contribution to a rendezvous: its data, and the factor (empty unless the reduction is a
/// scaled sum).
pub(crate) type Contribution = (Vec<u8>, Vec<u8>);

/// A message that has been sent but not received.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) number: u64,
    pub(crate) dtype: i32,
    pub(crate) count: usize,
    pub(crate) data: Vec<u8>,
}

#[derive(Debug, Default)]
struct State {
    joined: Vec<bool>,
    aborted: bool,
    next: Vec<u64>,
    rendezvous: HashMap<u64, Rendezvous>,
    mail: HashMap<(usize, usize), VecDeque<Message>>,
    sent: u64,
    /// Received messages by number. The value is true if type and count matched.
    deliveries: HashMap<u64, bool>,
}

#[derive(Debug)]
struct Rendezvous {
    shape: Shape,
    mismatch: bool,
    parts: Vec<Option<Contribution>>,
    left: usize,
    children: HashMap<i32, Arc<SharedComm>>,
}

fn check(state: &State) -> Result<(), ncclResult_t> {
    if !state.aborted {
        return Ok(());
    }
    crate::last_error::set("the communicator was aborted by one of its ranks");
    Err(ncclRemoteError)
}

impl SharedComm {
    pub(crate) fn new(count: usize) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let state = State {
            joined: vec![false; count],
            next: vec![0; count],
            ..State::default()
        };
        Arc::new(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            count,
            state: Mutex::new(state),
            moved: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until `ready` returns a value. Fails if the communicator is aborted.
    fn wait<T>(&self, mut ready: impl FnMut(&mut State) -> Option<T>) -> Result<T, ncclResult_t> {
        let mut state = self.lock();
        loop {
            if let Some(value) = ready(&mut state) {
                return Ok(value);
            }
            check(&state)?;
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

    /// Fails if the communicator is aborted.
    pub(crate) fn check(&self) -> Result<(), ncclResult_t> {
        check(&self.lock())
    }

    pub(crate) fn aborted(&self) -> bool {
        self.lock().aborted
    }

    /// Adds the contribution of `rank` to the next rendezvous of that rank. Returns the number of
    /// the rendezvous.
    pub(crate) fn post(&self, rank: usize, shape: Shape, part: Contribution) -> u64 {
        let mut state = self.lock();
        let number = state.next[rank];
        state.next[rank] += 1;
        let count = self.count;
        let rendezvous = state
            .rendezvous
            .entry(number)
            .or_insert_with(|| Rendezvous {
                shape,
                mismatch: false,
                parts: vec![None; count],
                left: 0,
                children: HashMap::new(),
            });
        rendezvous.mismatch |= rendezvous.shape != shape;
        rendezvous.parts[rank] = Some(part);
        drop(state);
        self.moved.notify_all();
        number
    }

    /// Waits until all ranks have contributed, then returns all contributions. The last rank that
    /// leaves deletes the rendezvous, except after a split, because [`Self::child`] still needs the
    /// rendezvous.
    pub(crate) fn all_parts(&self, number: u64) -> Result<Vec<Contribution>, ncclResult_t> {
        self.wait(|state| {
            let rendezvous = state.rendezvous.get_mut(&number)?;
            if rendezvous.mismatch {
                crate::last_error::set("the ranks' calls differ");
                return Some(Err(ncclInvalidUsage));
            }
            let parts = rendezvous
                .parts
                .iter()
                .cloned()
                .collect::<Option<Vec<_>>>()?;
            rendezvous.left += 1;
            if rendezvous.left == self.count && rendezvous.shape.0 != "ncclCommSplit" {
                state.rendezvous.remove(&number);
            }
            Some(Ok(parts))
        })?
    }

    /// Returns the child communicator of one colour of a split.
    pub(crate) fn child(&self, number: u64, colour: i32, count: usize) -> Arc<Self> {
        let mut state = self.lock();
        let rendezvous = state
            .rendezvous
            .get_mut(&number)
            .expect("all ranks have joined it");
        Arc::clone(
            rendezvous
                .children
                .entry(colour)
                .or_insert_with(|| Self::new(count)),
        )
    }

    /// Puts a message into the mailbox between rank `from` and rank `to`. Returns the message's
    /// number.
    pub(crate) fn send(
        &self,
        (from, to): (usize, usize),
        dtype: i32,
        count: usize,
        data: Vec<u8>,
    ) -> u64 {
        let mut state = self.lock();
        state.sent += 1;
        let number = state.sent;
        let mail = Message {
            number,
            dtype,
            count,
            data,
        };
        state.mail.entry((from, to)).or_default().push_back(mail);
        drop(state);
        self.moved.notify_all();
        number
    }

    /// Takes the next message from rank `from` to rank `to` and completes its send. Both the
    /// receive and the send fail if type or count do not match.
    pub(crate) fn recv(
        &self,
        (from, to): (usize, usize),
        dtype: i32,
        count: usize,
    ) -> Result<Vec<u8>, ncclResult_t> {
        let mail = self.wait(|state| state.mail.get_mut(&(from, to))?.pop_front())?;
        let good = mail.dtype == dtype && mail.count == count;
        self.lock().deliveries.insert(mail.number, good);
        self.moved.notify_all();
        if good {
            return Ok(mail.data);
        }
        crate::last_error::set(&format!(
            "rank {from} sent {} elements of type {}, rank {to} receives {count} of type {dtype}",
            mail.count, mail.dtype
        ));
        Err(ncclInvalidUsage)
    }

    /// Waits until the peer has received message `number`. Fails if type or count of the receive
    /// did not match.
    pub(crate) fn delivered(&self, number: u64, peer: usize) -> Result<(), ncclResult_t> {
        if self.wait(|state| state.deliveries.remove(&number))? {
            return Ok(());
        }
        crate::last_error::set(&format!(
            "rank {peer} receives another type or count than this rank sent to it"
        ));
        Err(ncclInvalidUsage)
    }
}
