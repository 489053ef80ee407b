//! Queues: rings in a window, through which blocks send batches of rows.
//!
//! A kernel takes a [`Queue`] as an argument. Block b of a rank sends to block b of every rank. For
//! each sending block, the receiving block has a separate ring, so a ring has one writer and one
//! reader.
//!
//! - [`Queue::open`] takes the number of rows for each rank, and waits until there is room for
//!   them. [`Queue::route`] instead takes the rank of each item, and computes the number of rows
//!   for each rank and the index of each row. Rows arrive in the order of the items, in every run.
//! - [`Batch::to`] returns the [`Remote`] to which the block writes the rows for a rank.
//!   [`Batch::publish`] sends the numbers of rows, and signals.
//! - [`Queue::recv`] waits for the next batch from a rank, and returns its [`Rows`].
//!
//! The borrow checker rejects a kernel that reads rows after their release, or writes rows after
//! their publication.
//!
//! # The ring
//! A ring has `ring` slots of one row each, where `ring` is a power of two and a batch has at most
//! `ring / 4` rows. Sender and receiver count slots: position p is in slot p % ring. A batch takes
//! as many slots as it has rows, or one if it has none. Its rows are contiguous: if they do not fit
//! between their position and the end of the ring, they begin at the next multiple of `ring`. Its
//! *header* is the number of its rows. Headers are stored after the rings, one for each slot. The
//! header of a batch is the one for the end position of the previous batch, which the receiver
//! knows.
//!
//! The *tail* is the position after the last batch that the sender has published; the *credit* is
//! a position below which the receiver has read all rows. Each of them is a signal with one writer,
//! and only increases.
//!
//! - **Who may overwrite what:** the sender overwrites the slots and headers below position e,
//! - **after having acquired** a credit of at least e - ring,
//! - **released by** the receiver, after it has read the rows of these slots.
//!
//! The receiver reads the rows after having acquired a tail above their positions, which the
//! sender has released after it has written them.
//!
//! The receiver returns a credit once it is `ring / 4` above the last one. So a batch never has to
//! wait for the release of the one batch that a receiver holds: the slots that it needs (up to
//! `ring / 4`), those that it skips (less than that), those of the batch that is held (up to that)
//! and those whose credit has not been returned (less than that) are not more than `ring`.

use core::marker::PhantomData;

use super::{DeviceWindow, Remote, Window};
use crate::args::{In, InOut, LaunchScope};
use crate::comm::{PeerPtr, Rank, Team, WindowAddr};
use crate::element::Element;
use crate::group::{Group, Machine};
use crate::layout::FailureKind;
use crate::mem::{self, Order, Scope};
use crate::net::{Action, Request, Requests, Route};
use crate::session::{Aborted, Session, Unvoted};
use crate::wait::WaitKind;

/// Signals of the window of a queue.
pub const QUEUE_SIGNALS: u32 = 3;

/// Signal whose slots hold the tails. Its `sent` words hold the positions of this block as a
/// sender, and its `taken` words those as a receiver.
const TAIL: u32 = 0;
/// Signal whose slots hold the credits. Its `sent` words hold the last credit returned to each
/// sender, and its `taken` words the number of rows of the open batch for each receiver.
const CREDIT: u32 = 1;
/// Signal of which only the `taken` words are used: the number of rows of the last batch received
/// from each sender.
const HELD: u32 = 2;

/// Number of rows that marks a rank for which no batch is open.
const NO_BATCH: u64 = u64::MAX;

/// Returns the number of elements of each rank's part of a window for rings of `ring` rows of
/// `width` elements, on `size` ranks with up to `blocks` blocks; `element` is the size of an
/// element. `None` if the number is too large.
pub fn queue_elements(
    size: u32,
    blocks: u32,
    ring: u32,
    width: u32,
    element: usize,
) -> Option<usize> {
    let row = (width as usize).checked_add(size_of::<u64>() / element)?;
    let rings = (size as usize).checked_mul(blocks as usize)?;
    row.checked_mul(ring as usize)?.checked_mul(rings)
}

/// A queue as an argument of a kernel: rows of [`Queue::width`] elements, in batches of up to
/// [`Queue::batch`].
///
/// All lanes of a block call its functions together, with equal arguments. Batches of a block
/// arrive at a rank in the order in which they were published, over all launches and replays.
#[derive(Debug)]
pub struct Queue<'a, T>(Rings<'a, T>);

/// The rings of a block.
#[derive(Debug)]
struct Rings<'a, T> {
    window: Window<'a, T>,
    /// This rank's part; empty if the window has been freed.
    part: InOut<'a, T>,
    /// The words of the signals in this rank's memory. Null if the window has been freed.
    words: *mut u64,
    block: u32,
}

impl<T> Clone for Rings<'_, T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Rings<'_, T> {}

impl<'a, T: Element> Queue<'a, T> {
    /// Wraps the argument with number `argument`. Called by `#[kernel]`.
    ///
    /// # Safety
    /// `window` must describe a window of the session's communicator that a host has made for a
    /// queue, and that is alive during the launch.
    #[inline(always)]
    pub unsafe fn new<M: Machine>(
        launch: &'a LaunchScope,
        session: &Session<M>,
        argument: u32,
        window: *const DeviceWindow,
    ) -> Self {
        // SAFETY: the precondition of this function.
        let window = unsafe { Window::new(launch, session, argument, window) };
        let device: DeviceWindow = window.window;
        let (comm, me) = (session.comm(), session.rank());
        let words = device.own(comm, 0, 3 * device.slots());
        let at = PeerPtr::<T>::new(device.window, me, device.offset);
        let part = comm.pointer(at, window.len() as u64);
        let (words, part, len) = match (words, part) {
            (Some(words), Some(part)) => (words, part.cast(), window.len() as u64),
            _ => (core::ptr::null_mut(), core::ptr::null_mut(), 0),
        };
        Self(Rings {
            window,
            // SAFETY: the window is alive during the launch; concurrent accesses come from peers,
            // through device memory operations.
            part: unsafe { InOut::of(session, argument, part, len) },
            words,
            block: session.block().index(),
        })
    }

    /// Returns the number of elements of a row.
    #[inline(always)]
    pub fn width(&self) -> usize {
        self.0.width()
    }

    /// Returns the greatest number of rows of a batch.
    #[inline(always)]
    pub fn batch(&self) -> usize {
        self.0.ring() as usize / 4
    }

    /// Opens a batch of `rows(rank)` rows for each rank, this one included, and waits until there
    /// is room for all of them. Ranks for which `rows` returns `None` get no batch, and must not
    /// wait for one; those with 0 rows get an empty one. A batch that is dropped before
    /// [`Batch::publish`] has not been sent. Single lanes call `rows`, so it must not call what all
    /// lanes call together.
    ///
    /// # Errors
    /// [`Aborted`] if there is no room within the timeout; after recording [`FailureKind::Batch`],
    /// if there are more rows than [`Queue::batch`], or [`FailureKind::NoRoute`], if the queue has
    /// been freed; or if a lane has recorded an error.
    #[inline(always)]
    #[track_caller]
    pub fn open<M: Machine>(
        &mut self,
        s: &Session<M>,
        rows: impl Fn(Rank) -> Option<usize>,
    ) -> Result<Batch<'_, 'a, T>, Aborted> {
        let rings = self.0;
        rings.check(s)?;
        rings.end_dropped(s)?;
        for peer in s.peers_of_lane(Team::World) {
            let rows = rows(peer).map_or(NO_BATCH, |rows| (rows as u64).min(NO_BATCH - 1));
            rings.set(rings.opened(peer), rows);
        }
        self.reserve(s)
    }

    /// Opens a batch for every rank. `to(item)` returns the rank for each of the items `0..items`,
    /// or `None` for an item that is not sent. The rows for a rank are in the order of their items.
    /// `places` must have at least `items` elements. Element `item` is set to the index of the
    /// item's row for [`Batch::row`]; elements of items that are not sent are unchanged. Single
    /// lanes call `to`, several times for an item; it must return the same rank each time.
    ///
    /// # Errors
    /// As [`Queue::open`].
    #[inline(always)]
    #[track_caller]
    pub fn route<M: Machine>(
        &mut self,
        s: &Session<M>,
        items: usize,
        places: InOut<u32>,
        to: impl Fn(usize) -> Option<Rank>,
    ) -> Result<Batch<'_, 'a, T>, Aborted> {
        let rings = self.0;
        let block = s.block();
        rings.check(s)?;
        block.uniform([items as u64]);
        rings.end_dropped(s)?;
        if M::LANES == 1 {
            for peer in s.peers(Team::World) {
                rings.set(rings.opened(peer), 0);
            }
            for item in 0..items {
                if let Some(peer) = to(item)
                    && rings.has(peer)
                {
                    let at = rings.opened(peer);
                    let place = rings.get(at);
                    places.set(item, place as u32);
                    rings.set(at, place + 1);
                }
            }
        } else {
            // Each warp counts the items of some ranks, as many items at a time as it has lanes.
            let warp = block.warp();
            let (lane, lanes) = (warp.rank(), warp.size());
            for peer in s.peers_of(1 + block.warp_index(), block.warps()) {
                let (mut count, mut start) = (0, 0);
                while start < items {
                    let item = start + lane as usize;
                    let is_here = item < items && to(item) == Some(peer);
                    let all = warp.ballot(is_here);
                    if is_here {
                        let before = (all & ((1 << lane) - 1)).count_ones();
                        places.set(item, count + before);
                    }
                    count += all.count_ones();
                    start += lanes as usize;
                }
                if warp.is_leader() {
                    rings.set(rings.opened(peer), u64::from(count));
                }
            }
            block.sync();
        }
        self.reserve(s)
    }

    /// Waits until there is room for the batches that have been opened.
    #[inline(always)]
    #[track_caller]
    fn reserve<M: Machine>(&mut self, s: &Session<M>) -> Result<Batch<'_, 'a, T>, Aborted> {
        let rings = self.0;
        let mut free = Unvoted::new(());
        for peer in s.peers_of_lane(Team::World) {
            free = free.and(rings.await_room(s, peer));
        }
        s.vote(free)?;
        Ok(Batch {
            rings,
            queue: PhantomData,
        })
    }

    /// Waits for the next batch from `from`, which may be this rank, and returns its rows. They
    /// stay until this block receives from `from` again, or releases them.
    ///
    /// # Errors
    /// [`Aborted`] if no batch arrives within the timeout; after recording [`FailureKind::Batch`],
    /// if the number of rows that has arrived is not valid, or [`FailureKind::NoRoute`], if the
    /// queue has been freed; or if a lane has recorded an error.
    #[inline(always)]
    #[track_caller]
    pub fn recv<M: Machine>(&mut self, s: &Session<M>, from: Rank) -> Result<Rows<'_, T>, Aborted> {
        let (rings, block) = (self.0, s.block());
        self.release(s, from);
        rings.check(s)?;
        let mut arrived = Unvoted::new(());
        if block.is_leader() && rings.has(from) {
            arrived = rings.await_batch(s, from);
        }
        s.vote(arrived)?;
        Ok(rings.rows_of(from))
    }

    /// Does what [`Queue::recv`] does for all ranks at once, this rank included.
    ///
    /// # Errors
    /// As [`Queue::recv`].
    #[inline(always)]
    #[track_caller]
    pub fn recv_all<M: Machine>(&mut self, s: &Session<M>) -> Result<AllRows<'_, T>, Aborted> {
        let rings = self.0;
        self.release_all(s);
        rings.check(s)?;
        let mut arrived = Unvoted::new(());
        for from in s.peers_of_lane(Team::World) {
            arrived = arrived.and(rings.await_batch(s, from));
        }
        s.vote(arrived)?;
        Ok(AllRows {
            rings,
            queue: PhantomData,
        })
    }

    /// Releases the rows that this block has received from `from`, so that the sender can overwrite
    /// them. Returns a credit to the sender only when at least a quarter of the ring has been
    /// received since the last credit.
    #[inline(always)]
    #[track_caller]
    pub fn release<M: Machine>(&mut self, s: &Session<M>, from: Rank) {
        let (rings, block) = (self.0, s.block());
        block.uniform([u64::from(from.index())]);
        block.publish();
        if block.is_leader() && rings.is_alive() && rings.has(from) {
            rings.give_back(s, from);
        }
    }

    /// Does what [`Queue::release`] does for all ranks.
    #[inline(always)]
    #[track_caller]
    pub fn release_all<M: Machine>(&mut self, s: &Session<M>) {
        let rings = self.0;
        s.block().publish();
        if rings.is_alive() {
            for from in s.peers_of_lane(Team::World) {
                rings.give_back(s, from);
            }
        }
    }
}

impl<'a, T: Element> Rings<'a, T> {
    /// Returns an error on all lanes if the window has been freed, or has no rings for this block.
    #[inline(always)]
    #[track_caller]
    fn check<M: Machine>(&self, s: &Session<M>) -> Result<(), Aborted> {
        let (argument, device) = (self.window.argument, &self.window.window);
        if !self.is_alive() {
            let (rank, ranks) = (u64::from(s.rank()), u64::from(s.ranks()));
            return Err(s.refuse(FailureKind::NoRoute, argument, rank, ranks));
        }
        if self.block >= device.blocks {
            let (block, blocks) = (u64::from(self.block), u64::from(device.blocks));
            return Err(s.refuse(FailureKind::Id, argument, block, blocks));
        }
        Ok(())
    }

    /// Returns true if the window has not been freed.
    #[inline(always)]
    fn is_alive(&self) -> bool {
        !self.words.is_null()
    }

    /// Returns true if the rank exists, and records an error otherwise: it may be the rank of
    /// another communicator.
    #[inline(always)]
    fn has(&self, rank: Rank) -> bool {
        let (rank, ranks) = (rank.index(), self.window.window.size);
        if rank >= ranks {
            self.window.refuse(FailureKind::Rank, rank, ranks);
        }
        rank < ranks
    }

    /// Waits at a block barrier, after which no lane still reads the row counts of the last batch.
    /// If ranks use a network and that batch was dropped, also waits until its writes have been
    /// executed. They could otherwise overwrite later writes to the same slots, because the network
    /// orders writes only before a signal.
    #[inline(always)]
    #[track_caller]
    fn end_dropped<M: Machine>(&self, s: &Session<M>) -> Result<(), Aborted> {
        if Requests::of(s.comm()).is_none() {
            s.block().sync();
            return Ok(());
        }
        let mut is_open = false;
        for peer in s.peers_of_lane(Team::World) {
            is_open |= self.get(self.opened(peer)) != NO_BATCH;
        }
        match s.block().any(is_open) {
            true => s.vote(s.flush()),
            false => Ok(()),
        }
    }

    #[inline(always)]
    fn width(&self) -> usize {
        self.window.window.width as usize
    }

    #[inline(always)]
    fn ring(&self) -> u64 {
        u64::from(self.window.window.ring)
    }

    /// Returns the position at which the rows of a batch begin, and the one after them.
    #[inline(always)]
    fn place(&self, position: u64, rows: u64) -> (u64, u64) {
        let (ring, slots) = (self.ring(), rows.max(1));
        let slot = position & (ring - 1);
        let first = match slot + slots > ring {
            true => position.wrapping_add(ring - slot),
            false => position,
        };
        (first, first.wrapping_add(slots))
    }

    /// Returns the number of a ring in a part: that of this block of `sender`.
    #[inline(always)]
    fn index(&self, sender: Rank) -> u64 {
        u64::from(sender.index()) * u64::from(self.window.window.blocks) + u64::from(self.block)
    }

    /// Returns the element at which the slot of `position` begins, in the ring of this block of
    /// `sender`.
    #[inline(always)]
    fn element(&self, sender: Rank, position: u64) -> usize {
        let slot = self.index(sender) * self.ring() + (position & (self.ring() - 1));
        slot as usize * self.width()
    }

    /// Returns the offset of the header for `position` in the ring that this block of `sender`
    /// writes, in bytes from the start of the receiver's part. The headers follow the rings.
    #[inline(always)]
    fn header(&self, sender: Rank, position: u64) -> u64 {
        let device = &self.window.window;
        let slots = u64::from(device.size) * u64::from(device.blocks) * self.ring();
        let slot = self.index(sender) * self.ring() + (position & (self.ring() - 1));
        slots * (self.width() * size_of::<T>()) as u64 + slot * 8
    }

    /// Returns the address of this rank's word at byte `offset` of the words of the signals.
    #[inline(always)]
    fn word(&self, offset: u64) -> *mut u64 {
        self.words.wrapping_add(offset as usize / 8)
    }

    /// Reads a word that only this block accesses.
    #[inline(always)]
    fn get(&self, word: *mut u64) -> u64 {
        // SAFETY: a word of this block in this rank's memory. Its lanes are ordered by barriers.
        unsafe { mem::read(word) }
    }

    /// Writes a word that only this block accesses, on one lane.
    #[inline(always)]
    fn set(&self, word: *mut u64, value: u64) {
        // SAFETY: as in `get`.
        unsafe { mem::write(word, value) };
    }

    /// Returns the word with the position of this sender in the ring at `peer`.
    #[inline(always)]
    fn sent(&self, peer: Rank) -> *mut u64 {
        self.word(self.window.window.sent_at(TAIL, peer.index(), self.block))
    }

    /// Returns the word with the rows of the batch that is open for `peer`, or [`NO_BATCH`].
    #[inline(always)]
    fn opened(&self, peer: Rank) -> *mut u64 {
        self.word(
            self.window
                .window
                .taken_at(CREDIT, peer.index(), self.block),
        )
    }

    /// Returns the word with the position of this receiver in the ring of `from`.
    #[inline(always)]
    fn received(&self, from: Rank) -> *mut u64 {
        self.word(self.window.window.taken_at(TAIL, from.index(), self.block))
    }

    /// Returns the word with the last credit that this receiver has returned to `from`.
    #[inline(always)]
    fn returned(&self, from: Rank) -> *mut u64 {
        self.word(self.window.window.sent_at(CREDIT, from.index(), self.block))
    }

    /// Returns the word with the rows of the last batch that this receiver has received from
    /// `from`.
    #[inline(always)]
    fn held(&self, from: Rank) -> *mut u64 {
        self.word(self.window.window.taken_at(HELD, from.index(), self.block))
    }

    /// Returns the slot of signal `id` that `from` writes.
    #[inline(always)]
    fn slot(&self, id: u32, from: Rank) -> *mut u64 {
        self.word(self.window.window.slot_at(id, from.index(), self.block))
    }

    /// Waits on one lane until there is room for the batch that is open for `peer`.
    #[inline(always)]
    fn await_room<M: Machine>(&self, s: &Session<M>, peer: Rank) -> Unvoted<()> {
        let (rows, ring) = (self.get(self.opened(peer)), self.ring());
        if rows == NO_BATCH || s.faults().is_pending() {
            return Unvoted::new(());
        }
        if rows > ring / 4 {
            self.refuse(rows);
            return Unvoted::new(());
        }
        let (_, end) = self.place(self.get(self.sent(peer)), rows);
        let needed = end.wrapping_sub(ring);
        let credit = self.slot(CREDIT, peer);
        let room = s.ctx().until(WaitKind::Room, peer.index(), needed, || {
            // SAFETY: a slot of this rank's words, only accessed atomically.
            let seen = unsafe { mem::load_u64(credit, Order::Acquire, Scope::System) };
            match (seen.wrapping_sub(needed) as i64) < 0 {
                true => Err(seen),
                false => Ok(()),
            }
        });
        Unvoted::from_wait(room)
    }

    /// Waits on one lane for the next batch from `from`.
    #[inline(always)]
    fn await_batch<M: Machine>(&self, s: &Session<M>, from: Rank) -> Unvoted<()> {
        if s.faults().is_pending() {
            return Unvoted::new(());
        }
        let (at, tail) = (self.get(self.received(from)), self.slot(TAIL, from));
        let needed = at.wrapping_add(1);
        let tail = s.ctx().until(WaitKind::Rows, from.index(), needed, || {
            // SAFETY: a slot of this rank's words, only accessed atomically.
            let seen = unsafe { mem::load_u64(tail, Order::Acquire, Scope::System) };
            match (seen.wrapping_sub(needed) as i64) < 0 {
                true => Err(seen),
                false => Ok(seen),
            }
        });
        let Some(tail) = tail else {
            return Unvoted::from_wait(None);
        };
        let header = self.part.as_ptr().cast::<u8>();
        let header = header.wrapping_add(self.header(from, at) as usize);
        // SAFETY: a header of this rank's part, which the tail covers.
        let rows = unsafe { mem::read(header.cast::<u64>()) };
        let (_, end) = self.place(at, rows.min(self.ring()));
        // A peer has sent the number, so it is checked.
        if rows > self.ring() / 4 || (tail.wrapping_sub(end) as i64) < 0 {
            self.refuse(rows);
            return Unvoted::new(());
        }
        self.set(self.held(from), rows);
        self.set(self.received(from), end);
        Unvoted::new(())
    }

    /// Returns the credit for what has been received from `from`, if it is due. One lane, after the
    /// block has read the rows.
    #[inline(always)]
    fn give_back<M: Machine>(&self, s: &Session<M>, from: Rank) {
        let (at, returned) = (self.get(self.received(from)), self.returned(from));
        if at.wrapping_sub(self.get(returned)) < self.ring() / 4 {
            return;
        }
        self.set(returned, at);
        self.post(s, CREDIT, from, at);
    }

    /// Stores `value` in this block's slot of signal `id` at `peer`. One lane, after the block has
    /// published what the value covers.
    #[inline(always)]
    fn post<M: Machine>(&self, s: &Session<M>, id: u32, peer: Rank, value: u64) {
        let device = &self.window.window;
        let slot = device.slot_at(id, s.rank(), self.block);
        if !device.post(s, peer.index(), slot, value, 0) {
            self.window.no_route(peer.index());
        }
    }

    /// Writes the header of the batch for `peer`. One lane.
    #[inline(always)]
    fn write_header<M: Machine>(&self, s: &Session<M>, peer: Rank, rows: u64) {
        let device = &self.window.window;
        let header = self.header(s.me(), self.get(self.sent(peer)));
        let remote = WindowAddr::new(device.window, device.offset + header);
        match Route::to(s.comm(), remote, peer.index(), 8) {
            // SAFETY: `route` has checked the range; headers are aligned, because a ring has a
            // multiple of 16 bytes.
            Route::Direct(to) => unsafe { mem::write(to.cast::<u64>(), rows) },
            Route::Network(ring) => {
                let request = Request {
                    action: Action::Store,
                    block: self.block,
                    peer: peer.index(),
                    remote,
                    local: WindowAddr::NONE,
                    value: [rows, 0],
                    bytes: 8,
                    after: 0,
                };
                s.request(&ring, request);
            }
            Route::None => self.window.no_route(peer.index()),
        }
    }

    /// Returns the rows of the batch that this block has received from `from`.
    #[inline(always)]
    fn rows_of<'r>(&self, from: Rank) -> Rows<'r, T>
    where
        'a: 'r,
    {
        if !self.has(from) {
            return Rows {
                elements: self.part.as_in().slice(0, 0),
                rows: 0,
                width: self.width(),
                from,
            };
        }
        let (rows, end) = (self.get(self.held(from)), self.get(self.received(from)));
        let first = self.element(from, end.wrapping_sub(rows.max(1)));
        let elements = rows as usize * self.width();
        Rows {
            elements: self.part.as_in().slice(first, elements),
            rows: rows as usize,
            width: self.width(),
            from,
        }
    }

    #[inline(always)]
    fn refuse(&self, rows: u64) {
        let (faults, argument) = (self.window.faults, self.window.argument);
        faults.record(FailureKind::Batch, argument, rows, self.ring() / 4);
    }
}

/// A batch for each rank, with room for its rows.
#[derive(Debug)]
#[must_use = "a batch that is not published is not sent"]
pub struct Batch<'q, 'a, T> {
    rings: Rings<'a, T>,
    /// A queue has at most one open batch.
    queue: PhantomData<&'q mut ()>,
}

impl<'a, T: Element> Batch<'_, 'a, T> {
    /// Returns the number of rows for `rank`. Any lane by itself.
    #[inline(always)]
    pub fn rows(&self, rank: Rank) -> usize {
        if !self.rings.has(rank) {
            return 0;
        }
        match self.rings.get(self.rings.opened(rank)) {
            NO_BATCH => 0,
            rows => rows as usize,
        }
    }

    /// Returns the range of the rows for `rank`, which are contiguous. Any lane by itself.
    #[inline(always)]
    pub fn to<M: Machine>(&self, s: &Session<M>, rank: Rank) -> Remote<'_, T> {
        let (rings, rows) = (&self.rings, self.rows(rank));
        // Only the queue uses the signals.
        let mut window = rings.window;
        window.window.signals = 0;
        if rows == 0 {
            return window.at(rank).slice(0, 0);
        }
        let (first, _) = rings.place(rings.get(rings.sent(rank)), rows as u64);
        let (first, len) = (rings.element(s.me(), first), rows * rings.width());
        window.at(rank).slice(first, len)
    }

    /// Returns the range of row `index` of the rows for `rank`. Any lane by itself.
    #[inline(always)]
    pub fn row<M: Machine>(&self, s: &Session<M>, rank: Rank, index: usize) -> Remote<'_, T> {
        let width = self.rings.width();
        self.to(s, rank).slice(index.saturating_mul(width), width)
    }

    /// Publishes the batches for all ranks. Before the call, the lanes of this block must have
    /// written all rows.
    ///
    /// # Errors
    /// [`Aborted`], before anything has been published, if the communicator has failed or a lane
    /// has recorded an error.
    #[inline(always)]
    #[track_caller]
    pub fn publish<M: Machine>(self, s: &Session<M>) -> Result<(), Aborted> {
        let (rings, block) = (self.rings, s.block());
        for peer in s.peers_of_lane(Team::World) {
            let rows = rings.get(rings.opened(peer));
            if rows != NO_BATCH {
                rings.write_header(s, peer, rows);
            }
        }
        let is_over = block.is_leader() && s.ctx().aborted();
        s.vote(if is_over {
            Unvoted::from_wait(None)
        } else {
            Unvoted::new(())
        })?;
        block.publish();
        for peer in s.peers_of_lane(Team::World) {
            let (rows, sent) = (rings.get(rings.opened(peer)), rings.sent(peer));
            if rows != NO_BATCH {
                let (_, end) = rings.place(rings.get(sent), rows);
                rings.set(sent, end);
                rings.set(rings.opened(peer), NO_BATCH);
                rings.post(s, TAIL, peer, end);
            }
        }
        Ok(())
    }
}

/// The rows of a batch that has arrived.
#[derive(Debug)]
pub struct Rows<'r, T> {
    elements: In<'r, T>,
    rows: usize,
    width: usize,
    from: Rank,
}

impl<'r, T: Element> Rows<'r, T> {
    /// Returns the number of rows.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.rows
    }

    /// Returns true if the batch has no rows.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.rows == 0
    }

    /// Returns the rank that has sent the batch.
    #[inline(always)]
    pub fn rank(&self) -> Rank {
        self.from
    }

    /// Returns row `index`. A row that the batch does not have is recorded as an error, and the
    /// result is empty. Any lane by itself.
    #[inline(always)]
    pub fn row(&self, index: usize) -> In<'r, T> {
        let first = index.saturating_mul(self.width);
        self.elements.slice(first, self.width)
    }

    /// Returns all rows, which are contiguous. Any lane by itself.
    #[inline(always)]
    pub fn elements(&self) -> In<'r, T> {
        self.elements
    }
}

/// A batch from every rank.
#[derive(Debug)]
pub struct AllRows<'q, T> {
    rings: Rings<'q, T>,
    queue: PhantomData<&'q mut ()>,
}

impl<T: Element> AllRows<'_, T> {
    /// Returns the rows from `rank`. Any lane by itself.
    #[inline(always)]
    pub fn of(&self, rank: Rank) -> Rows<'_, T> {
        self.rings.rows_of(rank)
    }
}
