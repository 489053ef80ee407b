//! A rank's part of a window, as the other ranks use it.

use core::marker::PhantomData;

use super::{Local, Window};
use crate::args::{In, InOut, Out};
use crate::bulk;
use crate::comm::{Rank, WindowAddr};
use crate::element::Element;
use crate::group::{Block, Group, Machine};
use crate::layout::FailureKind;
use crate::mem::{self, Policy};
use crate::net::{Action, Request, Requests, Route, SignalOp};
use crate::session::{Aborted, Session, Unvoted};

/// Bytes that are copied between two checks for a failure. A GPU does not check.
const PIECE: usize = match cfg!(any(target_arch = "nvptx64", target_arch = "amdgpu")) {
    true => usize::MAX,
    false => 1 << 16,
};

/// A range of a rank's part of a window. The rank may be this one.
///
/// Functions that take a group are called by all its lanes together, with equal arguments. What
/// they write is visible to the rank after it has waited for a later signal of this block. The
/// sources of puts may be reused after [`Window::flush`], or after the rank has answered a signal.
/// The same holds for writing a target again: on a network, a later put may overtake an earlier
/// one.
#[derive(Debug)]
pub struct Remote<'a, T> {
    pub(super) window: Window<'a, T>,
    rank: Rank,
    first: usize,
    len: usize,
}

impl<T> Clone for Remote<'_, T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Remote<'_, T> {}

impl<'a, T: Element> Remote<'a, T> {
    #[inline(always)]
    pub(super) fn new(window: Window<'a, T>, rank: Rank) -> Self {
        Self {
            window,
            rank,
            first: 0,
            len: window.len(),
        }
    }

    /// Returns the rank.
    #[inline(always)]
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Returns the number of elements.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns true if there are no elements.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns elements `first .. first + len`. A range that is not within these elements is
    /// recorded as an error, and the result is empty. Any lane by itself.
    #[inline(always)]
    #[must_use]
    pub fn slice(self, first: usize, len: usize) -> Self {
        if first <= self.len && len <= self.len - first {
            return Self {
                first: self.first + first,
                len,
                ..self
            };
        }
        let last = first.saturating_add(len).saturating_sub(1) as u64;
        let (argument, len) = (self.window.argument, self.len as u64);
        let faults = self.window.faults;
        faults.record(FailureKind::Index, argument, last, len);
        Self { len: 0, ..self }
    }

    /// Writes the elements of `source` to the first elements of this range. The source must not
    /// overlap the target.
    ///
    /// The source is memory of a window or [`Scratch`](super::Scratch) memory, because a network
    /// reads it directly: use [`Remote::write`] for other memory. The lanes that have written the
    /// source must synchronize before the put: by a barrier of the group, or by [`Group::publish`]
    /// of the block if they are not all in the group.
    #[inline(always)]
    #[track_caller]
    pub fn put<M: Machine, G: Group>(
        &self,
        s: &Session<M>,
        group: G,
        source: Local<T>,
    ) -> Put<'a, T, G> {
        let target = self.slice(0, source.len());
        group.uniform(target.identity());
        let from = source.elements().as_in();
        let mut first = 0;
        match target.route(s) {
            Route::Direct(to) => {
                target.copy(s, group, to, from.slice(0, target.len).as_ptr().cast());
            }
            Route::Network(ring) => {
                group.publish();
                if group.is_leader() {
                    let local = source.addr();
                    first = s.request(&ring, target.request(s, Action::Put, local, 0, target.len));
                }
            }
            Route::None => {}
        }
        self.sent(first)
    }

    /// Writes the elements of `source`, any memory of this rank, to the first elements of this
    /// range. For a network, they are copied to other memory first. The source must not overlap the
    /// target; it may be reused when the lanes of the group have synchronized.
    #[inline(always)]
    #[track_caller]
    pub fn write<M: Machine, G: Group>(
        &self,
        s: &Session<M>,
        group: G,
        source: In<T>,
    ) -> Put<'a, T, G> {
        let target = self.slice(0, source.len());
        group.uniform(target.identity());
        let mut first = 0;
        match target.route(s) {
            Route::Direct(to) => {
                target.copy(s, group, to, source.slice(0, target.len).as_ptr().cast());
            }
            Route::Network(ring) => {
                first = target.stage(s, group, &ring, &|index| source.get(index));
            }
            Route::None => {}
        }
        self.sent(first)
    }

    /// Writes `value(index)` to each element of this range.
    #[inline(always)]
    #[track_caller]
    pub fn write_with<M: Machine, G: Group>(
        &self,
        s: &Session<M>,
        group: G,
        value: impl Fn(usize) -> T,
    ) -> Put<'a, T, G> {
        group.uniform(self.identity());
        let mut first = 0;
        match self.route(s) {
            Route::Direct(to) => {
                for index in group.elements_of_group(self.len) {
                    // SAFETY: `route` has checked the range, which contains the index. Elements
                    // have no invalid values.
                    unsafe { mem::write(to.cast::<T>().wrapping_add(index), value(index)) };
                }
            }
            Route::Network(ring) => first = self.stage(s, group, &ring, &value),
            Route::None => {}
        }
        self.sent(first)
    }

    /// Stores 1 to 16 bytes of elements from registers, from element `index` of this range on. One
    /// lane by itself. On a network this is a message of its own: for payload use
    /// [`Remote::write_with`].
    #[inline(always)]
    pub fn store<M: Machine, const N: usize>(&self, s: &Session<M>, index: usize, values: [T; N]) {
        const { assert!(N > 0 && size_of::<[T; N]>() <= 16, "1 to 16 bytes") };
        let target = self.slice(index, N);
        let mut pair = [0; 2];
        for (index, value) in values.into_iter().enumerate() {
            bulk::pack(&mut pair, index, value);
        }
        match target.route(s) {
            Route::Direct(to) if size_of::<[T; N]>() == 16 && (to as usize).is_multiple_of(16) => {
                // SAFETY: `route` has checked the range; the address is aligned.
                unsafe { mem::write_16(to, pair, Policy::Cached) };
            }
            Route::Direct(to) => {
                for (index, value) in values.into_iter().enumerate() {
                    // SAFETY: `route` has checked the range, which contains the index.
                    unsafe { mem::write(to.cast::<T>().wrapping_add(index), value) };
                }
            }
            Route::Network(ring) => {
                let request = Request {
                    value: pair,
                    ..target.request(s, Action::Store, WindowAddr::NONE, 0, N)
                };
                s.request(&ring, request);
            }
            Route::None => {}
        }
    }

    /// Reads this range into the first elements of `target`, memory of a window. Returns a ticket:
    /// the elements have arrived once it has been waited for. All lanes of the block together.
    #[inline(always)]
    #[track_caller]
    pub fn get<'b, M: Machine>(&self, s: &Session<M>, target: Local<'b, T>) -> Get<'b, T> {
        let target = target.slice(0, self.len);
        s.block().uniform(self.identity());
        let source = Self {
            len: target.len(),
            ..*self
        };
        let mut count = 0;
        match source.route(s) {
            Route::Direct(from) => {
                let to = target.elements().as_ptr().cast();
                source.copy(s, s.block(), to, from);
            }
            Route::Network(ring) => {
                s.block().publish();
                if s.block().is_leader() {
                    let request = source.request(s, Action::Get, target.addr(), 0, source.len);
                    count = s.request(&ring, request) + 1;
                }
            }
            Route::None => {}
        }
        Get {
            elements: target.elements(),
            count,
        }
    }

    /// Reads this range into the first elements of `target`, any memory of this rank. From a
    /// network, they arrive in staging memory and are copied. All lanes of the block together.
    ///
    /// # Errors
    /// [`Aborted`] after a timeout, or if a lane has recorded an error.
    #[inline(always)]
    #[track_caller]
    pub fn read<M: Machine>(&self, s: &Session<M>, target: Out<T>) -> Result<(), Aborted> {
        let (block, target) = (s.block(), target.slice(0, self.len));
        block.uniform(self.identity());
        let source = Self {
            len: target.len(),
            ..*self
        };
        match source.route(s) {
            Route::Direct(from) => source.copy(s, block, target.as_ptr().cast(), from),
            Route::Network(ring) => {
                let (staging, local, bytes) = ring.staging(block.index());
                let chunk = bytes as usize / size_of::<T>();
                let mut done = 0;
                // The staging memory may be the source of a put.
                s.vote(s.flush())?;
                while done < source.len {
                    let len = chunk.min(source.len - done);
                    let mut arrived = Unvoted::new(());
                    if block.is_leader() {
                        let request = source.request(s, Action::Get, local, done, len);
                        arrived = s.finish_requests(&ring, || s.request(&ring, request) + 1);
                    }
                    s.vote(arrived)?;
                    let (to, from) = (target.slice(done, len), staging.cast_const());
                    // SAFETY: the request has filled the block's staging memory, which has room
                    // for the chunk; the target has `len` elements.
                    unsafe {
                        let bytes = len * size_of::<T>();
                        bulk::copy(block, to.as_ptr().cast(), from, bytes, Policy::Cached);
                    }
                    block.sync();
                    done += len;
                }
            }
            Route::None => {}
        }
        s.vote(Unvoted::new(()))
    }

    /// Adds 1 to signal `id` of the rank, for [`Window::wait`]. The new value covers all that this
    /// block has written to the rank before. All lanes of the block together.
    #[inline(always)]
    #[track_caller]
    pub fn raise<M: Machine>(&self, s: &Session<M>, id: u32) {
        self.signal(s, id, SignalOp::Add(1));
    }

    /// Updates signal `id` of the rank, for [`Window::wait_value`]. The new value covers all that
    /// this block has written to the rank before. All lanes of the block together.
    #[inline(always)]
    #[track_caller]
    pub fn signal<M: Machine>(&self, s: &Session<M>, id: u32, op: SignalOp) {
        self.signal_after(s, id, op, 0);
    }

    #[inline(always)]
    #[track_caller]
    fn signal_after<M: Machine>(&self, s: &Session<M>, id: u32, op: SignalOp, after: u64) {
        let block = s.block();
        block.uniform([u64::from(id), u64::from(self.rank.index())]);
        block.publish();
        // After an error, the rank must not trust the data, so it gets no signal.
        if block.is_leader() && !s.faults().is_pending() {
            self.window.update(s, id, self.rank, op, after);
        }
    }

    /// Returns the range for loads and stores of this rank. Only for ranks that are reachable by
    /// load and store: a kernel that calls this for a peer cannot run over a network. All lanes of
    /// the block together.
    ///
    /// # Errors
    /// [`Aborted`] after recording [`FailureKind::NoRoute`].
    #[inline(always)]
    pub fn direct<M: Machine>(&self, s: &Session<M>) -> Result<InOut<'a, T>, Aborted> {
        let comm = s.comm();
        match comm.resolve(self.addr(0), self.rank.index(), self.bytes()) {
            // SAFETY: the window is alive during the launch; concurrent accesses come from peers,
            // through device memory operations.
            Some(at) => Ok(unsafe { InOut::of(s, self.window.argument, at, self.len as u64) }),
            None => {
                let (rank, ranks) = (u64::from(self.rank.index()), u64::from(s.ranks()));
                Err(s.refuse(FailureKind::NoRoute, self.window.argument, rank, ranks))
            }
        }
    }

    /// Copies as many bytes as this range has, by the lanes of a group, from or to the checked
    /// address of the range. The other side has as many elements.
    ///
    /// A process may be stopped during a copy on the CPU. If its peers fail meanwhile, they use
    /// their memory for something else, so the copy ends when it finds the failure.
    #[inline(always)]
    fn copy<M: Machine, G: Group>(&self, s: &Session<M>, group: G, to: *mut u8, from: *const u8) {
        let bytes = self.bytes() as usize;
        let distance = (to as usize).abs_diff(from as usize);
        if distance < bytes {
            let (kind, argument) = (FailureKind::Aliasing, self.window.argument);
            let faults = self.window.faults;
            faults.record(kind, argument, distance as u64, bytes as u64);
            return;
        }
        let mut done = 0;
        while done < bytes {
            let piece = PIECE.min(bytes - done);
            let (to, from) = (to.wrapping_add(done), from.wrapping_add(done));
            // SAFETY: the range was checked against the window; source and target have as many
            // elements and do not overlap; elements have no invalid values. The peer may access its
            // memory.
            unsafe { bulk::copy_shared(group, to, from, piece) };
            done += piece;
            if done < bytes && s.ctx().aborted() {
                s.faults().record(FailureKind::Abort, 0, 0, 0);
                return;
            }
        }
    }

    /// Sends `value(index)` for each element of this range by requests. Returns the number of the
    /// first request, on the leader.
    ///
    /// A block fills its staging memory and puts from there:
    /// - **Who may overwrite what:** the block overwrites its staging memory,
    /// - **after having acquired** that all requests so far have been executed,
    /// - **released by** the agent, after it has read their sources.
    ///
    /// Other groups, of a block with several lanes, send up to 16 bytes in a request.
    #[inline(always)]
    #[track_caller]
    fn stage<M: Machine, G: Group>(
        &self,
        s: &Session<M>,
        group: G,
        ring: &Requests,
        value: &impl Fn(usize) -> T,
    ) -> u64 {
        if !G::IS_BLOCK && M::LANES != 1 {
            let each = 16 / size_of::<T>();
            for part in group.elements_of_group(self.len.div_ceil(each)) {
                let start = part * each;
                let len = each.min(self.len - start);
                let mut pair = [0; 2];
                for index in 0..len {
                    bulk::pack(&mut pair, index, value(start + index));
                }
                let request = self.request(s, Action::Store, WindowAddr::NONE, start, len);
                s.request(
                    ring,
                    Request {
                        value: pair,
                        ..request
                    },
                );
            }
            return 0;
        }
        let block = s.block();
        let (staging, local, bytes) = ring.staging(block.index());
        let chunk = bytes as usize / size_of::<T>();
        let (mut first, mut done) = (u64::MAX, 0);
        while done < self.len {
            let mut free = Unvoted::new(());
            if block.is_leader() {
                free = s.finish_requests(ring, || ring.reserved());
            }
            if s.vote(free).is_err() {
                s.faults().record(FailureKind::Abort, 0, 0, 0);
                return 0;
            }
            let len = chunk.min(self.len - done);
            for index in block.elements_of_block(len) {
                // SAFETY: the staging memory has room for the chunk, and is this block's.
                unsafe { mem::write(staging.cast::<T>().wrapping_add(index), value(done + index)) };
            }
            block.publish();
            if block.is_leader() {
                let number = s.request(ring, self.request(s, Action::Put, local, done, len));
                first = first.min(number);
            }
            done += len;
        }
        first
    }

    /// Returns the route to the range. Records an error and returns `None` if there is none; also
    /// returns `None` for an empty range.
    #[inline(always)]
    fn route<M: Machine>(&self, s: &Session<M>) -> Route {
        if self.len == 0 {
            return Route::None;
        }
        let route = Route::to(s.comm(), self.addr(0), self.rank.index(), self.bytes());
        if matches!(route, Route::None) {
            self.window.no_route(self.rank.index());
        }
        route
    }

    /// Returns a request for elements `first .. first + len` of this range.
    #[inline(always)]
    fn request<M: Machine>(
        &self,
        s: &Session<M>,
        action: Action,
        local: WindowAddr,
        first: usize,
        len: usize,
    ) -> Request {
        Request {
            action,
            block: s.block().index(),
            peer: self.rank.index(),
            remote: self.addr(first),
            local,
            value: [0; 2],
            bytes: (len * size_of::<T>()) as u64,
            after: 0,
        }
    }

    #[inline(always)]
    fn identity(&self) -> [u64; 3] {
        [
            u64::from(self.rank.index()),
            self.first as u64,
            self.len as u64,
        ]
    }

    #[inline(always)]
    fn sent<G>(&self, first: u64) -> Put<'a, T, G> {
        Put {
            remote: *self,
            first,
            group: PhantomData,
        }
    }

    /// Returns the address of element `index`.
    #[inline(always)]
    fn addr(&self, index: usize) -> WindowAddr {
        let window = &self.window.window;
        let bytes = (self.first + index) as u64 * size_of::<T>() as u64;
        WindowAddr::new(window.window, window.offset + bytes)
    }

    #[inline(always)]
    fn bytes(&self) -> u64 {
        self.len as u64 * size_of::<T>() as u64
    }
}

/// A put that a block, warp or lane has issued.
#[derive(Debug)]
pub struct Put<'a, T, G> {
    remote: Remote<'a, T>,
    /// The first network request of the put, on the leader of the group.
    first: u64,
    group: PhantomData<G>,
}

impl<T: Element, M: Machine> Put<'_, T, Block<M>> {
    /// Adds 1 to signal `id` of the rank, as [`Remote::raise`] does, but the new value need not
    /// cover what this block wrote before this put.
    #[inline(always)]
    #[track_caller]
    pub fn raise(self, s: &Session<M>, id: u32) {
        self.signal(s, id, SignalOp::Add(1));
    }

    /// Updates signal `id` of the rank, as [`Remote::signal`] does, but the new value need not
    /// cover what this block wrote before this put.
    #[inline(always)]
    #[track_caller]
    pub fn signal(self, s: &Session<M>, id: u32, op: SignalOp) {
        self.remote.signal_after(s, id, op, self.first);
    }
}

/// A get that a block has issued.
#[derive(Debug)]
#[must_use = "the elements have arrived when the ticket has been waited for"]
pub struct Get<'a, T> {
    elements: InOut<'a, T>,
    /// The number of network requests that must have been executed; on the leader.
    count: u64,
}

impl<'a, T: Element> Get<'a, T> {
    /// Waits until the elements have arrived, and returns them. All lanes of the block together.
    ///
    /// # Errors
    /// [`Aborted`] after a timeout, or if a lane has recorded an error.
    #[inline(always)]
    #[track_caller]
    pub fn wait<M: Machine>(self, s: &Session<M>) -> Result<In<'a, T>, Aborted> {
        let mut arrived = Unvoted::new(());
        if s.block().is_leader()
            && let Some(ring) = Requests::of(s.comm())
        {
            arrived = s.finish_requests(&ring, || self.count);
        }
        s.vote(arrived)?;
        Ok(self.elements.as_in())
    }

    /// Returns true if [`Get::wait`] returns at once: the elements have arrived, or the launch has
    /// failed. All lanes of the block together.
    #[inline(always)]
    #[track_caller]
    pub fn is_done<M: Machine>(&self, s: &Session<M>) -> bool {
        let mut pending = false;
        if s.block().is_leader()
            && let Some(ring) = Requests::of(s.comm())
        {
            ring.drive(false);
            pending = ring.completed() < self.count && !s.ctx().aborted();
        }
        !s.block().any(pending)
    }
}
