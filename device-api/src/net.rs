//! Requests to the network: how a kernel reaches ranks whose memory it cannot load and store.
//!
//! A communicator with such ranks has a [`NetContext`]: a ring of requests in host memory.
//! Lanes append requests, and an agent on the CPU executes them: puts, gets, stores of a few bytes,
//! signals, and updates of cells. [`crate::Window`] chooses between stores and requests; kernels do
//! not see the choice.
//!
//! The agent may execute the requests in any order, except that a signal follows
//! - the requests that it covers: those of the same block to the same peer, from request
//!   [`Request::after`] on,
//! - the earlier signals of the same block to the same peer, because a counter must not decrease.
//!
//! The signals of the session's rounds and barriers to such ranks are requests, too.
//!
//! # The ring
//! Requests have numbers, starting at 0. Request n is in entry n % depth.
//!
//! - **Who may overwrite what:** the lane that has reserved number n overwrites its entry,
//! - **after having acquired** a count of completed requests above n - depth,
//! - **released by** the agent, after it has executed all requests below that count.
//!
//! Bit 63 of every word of an entry is the lap bit: 1 in the first lap of the ring (n < depth), 0
//! in the second, and so on. The agent takes an entry when all its words have the lap bit of n, so
//! the words may become visible in any order, and a GPU needs no fence between them. One fence of
//! the lane, before it stores the words, releases the data of its block; one fence of the agent,
//! after it has loaded the words, acquires this data. A lap
//! bit is unambiguous: an entry of lap k is complete before the agent counts it as executed, and
//! only then overwritten by lap k + 1.
//!
//! On a CPU, the agent may provide a function that executes requests ([`NetContext::drive`]).
//! Waiting lanes call it, so that requests and answers need no thread switch.
//!
//! # Results
//! An update of a cell fetches the value before it. Each lane has one result: a value, and a tag
//! that says which request has fetched it.
//!
//! - **Who may overwrite what:** the agent overwrites the result of a lane, the tag last,
//! - **after having acquired** the lane's request,
//! - **released by** the lane, after it has read the last result and has marked the tag as pending.
//!
//! A lane whose tag is pending does not append another update. So a lane has at most one update in
//! flight. After the agent has executed the lane's update with number n, the tag is n + 1.

use crate::comm::{Comm, HAS_NETWORK, WindowAddr};
use crate::layout::{NetContext, NetCounters, NetEntry};
use crate::mem::{self, Order, Scope};
use crate::wait::WaitContext;

/// Update of a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SignalOp {
    /// Stores the value.
    Set(u64),
    /// Adds the value, wrapping.
    Add(u64),
}

/// Action of the agent for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Action {
    /// Copies from this rank's memory to the peer's.
    Put = 1,
    /// Stores [`Request::value`], up to 16 bytes, in the peer's memory.
    Store = 2,
    /// Stores the first word of [`Request::value`] in the peer's memory with release order, after
    /// the requests that it covers.
    Signal = 3,
    /// Copies from the peer's memory to this rank's.
    Get = 4,
    /// Adds the first word of [`Request::value`] to a cell of the peer. The value before is the
    /// result of the lane.
    FetchAdd = 5,
    /// Replaces the value of a cell of the peer by the second word of [`Request::value`] if it is
    /// equal to the first. The value before is the result of the lane.
    CompareSwap = 6,
}

impl Action {
    /// Returns the action with this code.
    pub const fn from_code(code: u8) -> Option<Self> {
        match code {
            1 => Some(Self::Put),
            2 => Some(Self::Store),
            3 => Some(Self::Signal),
            4 => Some(Self::Get),
            5 => Some(Self::FetchAdd),
            6 => Some(Self::CompareSwap),
            _ => None,
        }
    }
}

/// Number of a window in a [`Request::local`] that means the staging memory of the context.
pub const STAGING: u32 = 0xffff;
/// Number of a window in a [`Request::local`] that means the results of the context.
pub const RESULTS: u32 = 0xfffe;
/// Bytes of the result of a lane.
pub const RESULT_BYTES: u64 = 16;
/// Tag of a result while the lane's request is on its way. No request has this number.
const PENDING: u64 = u64::MAX;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The action.
    pub action: Action,
    /// The block that issues the request.
    pub block: u32,
    /// The peer.
    pub peer: u32,
    /// The range of the peer's memory.
    pub remote: WindowAddr,
    /// The range of this rank's memory, for puts and gets; the result of the lane, for updates of
    /// cells.
    pub local: WindowAddr,
    /// The value, for stores and signals; the operands, for updates of cells.
    pub value: [u64; 2],
    /// Bytes; 8 for updates of cells.
    pub bytes: u64,
    /// The first request that a signal covers.
    pub after: u64,
}

/// Words of an entry: the head, and five words of which the head holds bit 63.
const WORDS: usize = 6;
/// Bit 63 of each word: the lap bit.
const LAP: u64 = 1 << 63;
/// Mask of the peer, from bit 32 of the head on.
const PEER_MASK: u32 = 0xff_ffff;
/// Position in the head of the bits 63 of the other words.
const TOPS_AT: usize = 56;

impl Request {
    /// Encodes the request in words whose bit 63 is 0. The head consists of the action in bits 0 to
    /// 7, the block in bits 8 to 31, the peer in bits 32 to 55, and the bits 63 of the other words.
    fn words(self) -> [u64; WORDS] {
        let head = u64::from(self.peer) << 32 | u64::from(self.block) << 8 | self.action as u64;
        let (value, bytes) = match self.action {
            Action::Put | Action::Get => ([self.local.0, 0], self.bytes),
            Action::Store | Action::Signal => (self.value, self.bytes),
            // A cell has 8 bytes, so the word can hold the result's address.
            Action::FetchAdd | Action::CompareSwap => (self.value, self.local.0),
        };
        let [low, high] = value;
        let mut words = [head, self.remote.0, low, high, bytes, self.after];
        let mut index = 1;
        while index < WORDS {
            words[0] |= (words[index] >> 63) << (TOPS_AT + index);
            words[index] &= !LAP;
            index += 1;
        }
        words
    }

    /// Decodes words whose bit 63 is ignored.
    fn from_words(mut words: [u64; WORDS]) -> Option<Self> {
        for index in 1..WORDS {
            words[index] = words[index] & !LAP | (words[0] >> (TOPS_AT + index) & 1) << 63;
        }
        let [head, remote, low, high, bytes, after] = words;
        let action = Action::from_code(head as u8)?;
        let (local, value, bytes) = match action {
            Action::Put | Action::Get => (WindowAddr(low), [0; 2], bytes),
            Action::Store | Action::Signal => (WindowAddr::NONE, [low, high], bytes),
            Action::FetchAdd | Action::CompareSwap => (WindowAddr(bytes), [low, high], 8),
        };
        Some(Self {
            action,
            block: (head >> 8) as u32 & 0xff_ffff,
            peer: (head >> 32) as u32 & PEER_MASK,
            remote: WindowAddr(remote),
            local,
            value,
            bytes,
            after,
        })
    }
}

/// Route to a range of a rank's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Route {
    /// By load and store, at this address.
    Direct(*mut u8),
    /// By network requests.
    Network(Requests),
    /// The rank is not reachable, or the range does not exist.
    None,
}

impl Route {
    /// Returns the route to `bytes` bytes of memory that `rank` named as `addr`, checked as by
    /// [`Comm::resolve`].
    #[inline(always)]
    pub(crate) fn to(comm: &Comm, addr: WindowAddr, rank: u32, bytes: u64) -> Self {
        match comm.base(addr, rank, bytes) {
            Some(0) => Requests::of(comm).map_or(Self::None, Self::Network),
            Some(base) => Self::Direct((base as *mut u8).wrapping_add(addr.offset() as usize)),
            None => Self::None,
        }
    }
}

/// The ring of a context.
#[derive(Clone, Copy, Debug)]
pub struct Requests {
    context: NetContext,
}

impl Requests {
    /// Wraps the ring of a context.
    ///
    /// # Safety
    /// The context must describe memory that is valid as long as the value is used, and that is
    /// accessed by the functions of this type only.
    #[inline(always)]
    pub unsafe fn new(context: NetContext) -> Self {
        Self { context }
    }

    /// Returns the ring of a communicator that has a network.
    #[inline(always)]
    pub(crate) fn of(comm: &Comm) -> Option<Self> {
        if !HAS_NETWORK {
            return None;
        }
        let at = comm.constants().contexts as *const NetContext;
        // SAFETY: the constants of a live communicator say where its context is, which nothing
        // writes while kernels run.
        (!at.is_null()).then(|| unsafe { Self::new(mem::read(at)) })
    }

    /// Returns the address of the staging memory of a block, and its bytes.
    #[inline(always)]
    pub(crate) fn staging(&self, block: u32) -> (*mut u8, WindowAddr, u64) {
        let (bytes, context) = (self.context.staging_bytes, &self.context);
        let offset = u64::from(block) * bytes;
        let at = (context.staging as *mut u8).wrapping_add(offset as usize);
        (at, WindowAddr::new(STAGING, offset), bytes)
    }

    fn counters(&self) -> *mut NetCounters {
        self.context.counters as *mut NetCounters
    }

    /// Returns the lap bit of request `number`.
    const fn lap(&self, number: u64) -> u64 {
        match number & self.context.depth {
            0 => LAP,
            _ => 0,
        }
    }

    /// Lets the agent execute requests on this thread, if it can. Called by lanes that wait, and,
    /// with `is_new`, after a request, because the lane might not wait afterwards.
    #[inline(always)]
    pub(crate) fn drive(&self, is_new: bool) {
        #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
        if self.context.drive != 0 {
            type Drive = unsafe extern "C" fn(u64, bool);
            let drive = self.context.drive as usize as *const ();
            // SAFETY: the context is live, and a value that is not 0 is the address of such a
            // function.
            unsafe { core::mem::transmute::<*const (), Drive>(drive)(self.context.agent, is_new) };
        }
        let _ = is_new;
    }

    fn entry(&self, number: u64) -> *mut u64 {
        let index = number & (self.context.depth - 1);
        (self.context.entries as *mut NetEntry)
            .wrapping_add(index as usize)
            .cast()
    }

    /// Appends a request and returns its number. Any lane by itself. The request covers what this
    /// lane wrote before, and what its block has published.
    ///
    /// `None` after a failure, which is then recorded.
    #[inline(never)]
    pub(crate) fn append(&self, ctx: &WaitContext, request: Request) -> Option<u64> {
        let counters = self.counters();
        // SAFETY: the counters are live and only accessed atomically.
        let number = unsafe {
            let reserved = &raw mut (*counters).reserved;
            mem::fetch_add_u64(reserved, 1, Order::Relaxed, Scope::Device)
        };
        let (entry, depth) = (self.entry(number), self.context.depth);
        let room = number.wrapping_sub(depth);
        // The entry is written inside the wait: where lanes run in lock step, a lane that has room
        // must not wait for one that needs the first lane's request to be executed.
        ctx.until_executed(
            || self.oldest_peer(ctx),
            room,
            || {
                let completed = self.completed();
                if number >= completed + depth {
                    return Err(completed);
                }
                mem::fence(Order::Release, Scope::System);
                for (index, word) in request.words().into_iter().enumerate() {
                    let word = word | self.lap(number);
                    // SAFETY: the number is this lane's, the entry's last request has been
                    // executed, and an entry has more words than a request.
                    unsafe {
                        mem::store_u64(entry.add(index), word, Order::Relaxed, Scope::System)
                    };
                }
                Ok(())
            },
        )?;
        // The kernel may compute next, while the peer waits.
        if !matches!(request.action, Action::Put | Action::Store) {
            self.drive(true);
        }
        Some(number)
    }

    /// Returns the result of a lane of a block.
    #[inline(always)]
    fn result(&self, block: u32, lane: u32) -> (*mut u64, WindowAddr) {
        let index = u64::from(block) * self.context.lanes + u64::from(lane);
        let offset = index * RESULT_BYTES;
        let at = (self.context.results as *mut u8).wrapping_add(offset as usize);
        (at.cast(), WindowAddr::new(RESULTS, offset))
    }

    /// Returns the tag and the value of the last result of a lane, or `None` while its request is
    /// on its way. Only that lane may call this.
    #[inline(always)]
    pub(crate) fn last_result(&self, block: u32, lane: u32) -> Option<[u64; 2]> {
        let (result, _) = self.result(block, lane);
        // SAFETY: the context has a result of two words for each lane of each block; they are only
        // accessed atomically.
        unsafe {
            let tag = mem::load_u64(result, Order::Acquire, Scope::System);
            if tag == PENDING {
                return None;
            }
            let value = mem::load_u64(result.add(1), Order::Relaxed, Scope::System);
            Some([tag, value])
        }
    }

    /// Waits until no update of this lane is on its way, and returns the tag and the value of its
    /// last result. Only that lane may call this.
    ///
    /// `None` after a failure, which is then recorded.
    #[inline(never)]
    pub(crate) fn await_result(
        &self,
        ctx: &WaitContext,
        block: u32,
        lane: u32,
    ) -> Option<[u64; 2]> {
        ctx.until_executed(
            || self.oldest_peer(ctx),
            0,
            || self.last_result(block, lane).ok_or(PENDING),
        )
    }

    /// Appends an update of a cell for lane `lane` of the request's block, after the lane's last
    /// update has been executed. Returns its number. Only that lane may call this.
    ///
    /// `None` after a failure, which is then recorded.
    #[inline(never)]
    pub(crate) fn update(&self, ctx: &WaitContext, lane: u32, request: Request) -> Option<u64> {
        self.await_result(ctx, request.block, lane)?;
        let (result, local) = self.result(request.block, lane);
        // SAFETY: as in `last_result`. The agent does not write the tag, because no update of this
        // lane is on its way. It writes the next tag after it has acquired the request.
        unsafe { mem::store_u64(result, PENDING, Order::Relaxed, Scope::System) };
        self.append(ctx, Request { local, ..request })
    }

    /// Returns true if `tag` is that of the result of request `number`.
    #[inline(always)]
    pub(crate) const fn is_result_of(tag: u64, number: u64) -> bool {
        tag == number + 1
    }

    /// Stores the result of update `number`: the value before. For the agent, before it counts the
    /// request as executed.
    ///
    /// # Safety
    /// `result` must be the address of the result that [`Request::local`] of the request names,
    /// checked against the results of the context.
    pub unsafe fn store_result(result: *mut u64, number: u64, value: u64) {
        // SAFETY: `result` is valid by the precondition; the words are only accessed atomically.
        unsafe {
            mem::store_u64(result.add(1), value, Order::Relaxed, Scope::System);
            mem::store_u64(result, number + 1, Order::Release, Scope::System);
        }
    }

    /// Returns the peer of the oldest request that has not been executed, for messages.
    fn oldest_peer(&self, ctx: &WaitContext) -> u32 {
        let entry = self.entry(self.completed());
        // SAFETY: the entry is in the ring, and is only accessed atomically.
        let head = unsafe { mem::load_u64(entry, Order::Relaxed, Scope::System) };
        let peer = (head >> 32) as u32 & PEER_MASK;
        match peer < ctx.comm.size() {
            true => peer,
            false => ctx.comm.rank(),
        }
    }

    /// Returns the number of requests that the device has reserved.
    #[inline(always)]
    pub(crate) fn reserved(&self) -> u64 {
        let counters = self.counters();
        // SAFETY: the counters are live and only accessed atomically.
        unsafe {
            let reserved = &raw const (*counters).reserved;
            mem::load_u64(reserved, Order::Relaxed, Scope::Device)
        }
    }

    /// Returns a number of requests such that all before it have been executed: their sources may
    /// be reused, and what they read has arrived.
    #[inline(always)]
    pub fn completed(&self) -> u64 {
        let counters = self.counters();
        // SAFETY: the counters are live and only accessed atomically.
        unsafe {
            let completed = &raw const (*counters).completed;
            mem::load_u64(completed, Order::Acquire, Scope::System)
        }
    }

    /// Waits until the requests below `count` have been executed. Any lane by itself.
    #[inline(always)]
    pub(crate) fn finish(&self, ctx: &WaitContext, count: u64) -> Option<()> {
        ctx.until_executed(
            || self.oldest_peer(ctx),
            count,
            || {
                let completed = self.completed();
                if completed >= count {
                    Ok(())
                } else {
                    Err(completed)
                }
            },
        )
    }

    /// Returns request `number`, or `None` if the device has not appended it yet. For the agent,
    /// which calls this for each number in order.
    ///
    /// # Errors
    /// The words of an entry that is not a request.
    pub fn take(&self, number: u64) -> Option<Result<Request, [u64; 6]>> {
        let (entry, lap) = (self.entry(number), self.lap(number));
        let mut words = [0; WORDS];
        for (index, word) in words.iter_mut().enumerate() {
            // SAFETY: the entry is in the ring, has more words than a request, and is only accessed
            // atomically.
            *word = unsafe { mem::load_u64(entry.add(index), Order::Relaxed, Scope::System) };
            if *word & LAP != lap {
                return None;
            }
        }
        mem::fence(Order::Acquire, Scope::System);
        Some(Request::from_words(words).ok_or(words))
    }

    /// Publishes that all requests below `count` have been executed. For the agent.
    pub fn complete(&self, count: u64) {
        let counters = self.counters();
        // SAFETY: the counters are live and only accessed atomically; the agent is the only writer.
        unsafe {
            let completed = &raw mut (*counters).completed;
            mem::store_u64(completed, count, Order::Release, Scope::System);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_survives_its_words() {
        let put = Request {
            action: Action::Put,
            block: 63,
            peer: 4095,
            remote: WindowAddr::new(1023, 1 << 40),
            local: WindowAddr::new(STAGING, 4096),
            value: [0; 2],
            bytes: u64::MAX,
            after: u64::MAX,
        };
        let signal = Request {
            action: Action::Signal,
            local: WindowAddr::NONE,
            value: [u64::MAX, 7],
            bytes: 8,
            after: 1 << 50,
            ..put
        };
        let add = Request {
            action: Action::FetchAdd,
            local: WindowAddr::new(RESULTS, 127 * RESULT_BYTES),
            value: [u64::MAX, 0],
            bytes: 8,
            ..put
        };
        let swap = Request {
            action: Action::CompareSwap,
            value: [u64::MAX, 1 << 63],
            ..add
        };
        for request in [put, signal, add, swap] {
            let words = request.words();
            assert!(words.iter().all(|word| word & LAP == 0), "{words:x?}");
            for lap in [0, LAP] {
                let words = words.map(|word| word | lap);
                assert_eq!(Request::from_words(words), Some(request));
            }
        }
        assert_eq!(Request::from_words([0; 6]), None);
        assert_eq!(Request::from_words([7, 0, 0, 0, 0, 0]), None);
    }
}
