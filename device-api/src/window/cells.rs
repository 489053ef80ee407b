//! Cells of a window: words that all ranks update atomically.
//!
//! The host declares the number of cells when it makes the window. Each rank has a word of 64 bits
//! for each cell, 0 at first. Every rank updates the cells of every rank, its own included, with
//! [`Remote::fetch_add`] and [`Remote::compare_swap`].
//!
//! One agent updates all cells of a rank, because updates by two agents are not atomic with respect
//! to each other:
//! - If all ranks reach each other by load and store, it is the memory of that rank. The host
//!   refuses a window with cells if a pair of ranks has no native atomics.
//! - On a communicator with a network, it is that rank's proxy. All updates are requests, also
//!   those of the rank's own cells, and of cells that are reachable by load and store.
//!
//! # Protocol
//! - **Who may overwrite what:** any lane of any rank updates any cell;
//! - **after having acquired** nothing: each update reads and writes the cell in one step;
//! - **released by** no event: a cell is never free or occupied.
//!
//! [`Fetch`] documents the order of updates.
//!
//! No protocol of this library uses cells.

use super::{Remote, Window};
use crate::comm::WindowAddr;
use crate::element::Element;
use crate::group::{Group, Machine};
use crate::layout::FailureKind;
use crate::mem::{self, Order, Scope};
use crate::net::{Action, Request, Requests, Route};
use crate::session::{Session, Unvoted};

impl<T: Element> Window<'_, T> {
    /// Returns the number of cells.
    #[inline(always)]
    pub fn cells(&self) -> u32 {
        self.window.cells
    }

    /// Returns the value of cell `id` of this rank. Any lane by itself. Fails if the cell does not
    /// exist, which is recorded as an error, or if a lane of the block has recorded an error.
    #[inline(always)]
    pub fn cell<M: Machine>(&self, s: &Session<M>, id: u32) -> Unvoted<u64> {
        if !self.has_cell(id) || s.faults().is_pending() {
            return Unvoted::from_wait(None);
        }
        let Some(word) = self.window.own(s.comm(), self.window.cell_at(id), 1) else {
            self.no_route(s.rank());
            return Unvoted::from_wait(None);
        };
        // SAFETY: `own` has checked the word against the signal pad. `cell_at` is a multiple of 8,
        // so the word is aligned; cells are only accessed atomically.
        Unvoted::new(unsafe { mem::load_u64(word, Order::Acquire, Scope::System) })
    }

    #[inline(always)]
    fn has_cell(&self, id: u32) -> bool {
        if id >= self.window.cells {
            self.refuse(FailureKind::Id, id, self.window.cells);
        }
        id < self.window.cells
    }
}

impl<T: Element> Remote<'_, T> {
    /// Adds `value` to cell `id` of the rank, wrapping. The ticket has the value before. Any lane
    /// by itself.
    #[inline(always)]
    pub fn fetch_add<M: Machine>(&self, s: &Session<M>, id: u32, value: u64) -> Fetch {
        self.update(s, id, Action::FetchAdd, [value, 0])
    }

    /// Replaces the value of cell `id` of the rank by `new` if it is equal to `expected`. The
    /// ticket has the value before: `expected`, if it was replaced. Any lane by itself.
    #[inline(always)]
    pub fn compare_swap<M: Machine>(
        &self,
        s: &Session<M>,
        id: u32,
        expected: u64,
        new: u64,
    ) -> Fetch {
        self.update(s, id, Action::CompareSwap, [expected, new])
    }

    /// Updates cell `id` of the rank on one lane. Does nothing after an error.
    #[inline(always)]
    fn update<M: Machine>(
        &self,
        s: &Session<M>,
        id: u32,
        action: Action,
        value: [u64; 2],
    ) -> Fetch {
        let (window, peer) = (&self.window, self.rank().index());
        let argument = window.argument;
        if !window.has_cell(id) || s.faults().is_pending() {
            let state = State::Failed;
            return Fetch { state, argument };
        }
        let remote = WindowAddr::new(window.window.signal_pad, window.window.cell_at(id));
        let route = Route::to(s.comm(), remote, peer, 8);
        let state = match (route, Requests::of(s.comm())) {
            (Route::None, _) => {
                window.no_route(peer);
                State::Failed
            }
            (Route::Direct(word), None) => {
                let (word, [first, second]) = (word.cast(), value);
                // SAFETY: `route` has checked the word against the signal pad. `cell_at` is a
                // multiple of 8, so the word is aligned; cells are only accessed atomically.
                State::Done(unsafe {
                    if action == Action::CompareSwap {
                        mem::compare_exchange_u64(word, first, second, Order::AcqRel, Scope::System)
                    } else {
                        mem::fetch_add_u64(word, first, Order::AcqRel, Scope::System)
                    }
                })
            }
            (Route::Direct(_), Some(ring)) | (Route::Network(ring), _) => {
                let block = s.block();
                let request = Request {
                    action,
                    block: block.index(),
                    peer,
                    remote,
                    local: WindowAddr::NONE,
                    value,
                    bytes: 8,
                    after: 0,
                };
                match ring.update(s.ctx(), block.rank(), request) {
                    Some(number) => State::Requested(number),
                    None => {
                        s.faults().record(FailureKind::Abort, 0, 0, 0);
                        State::Failed
                    }
                }
            }
        };
        Fetch { state, argument }
    }
}

/// A ticket for an update of a cell: a word of 64 bits in a window that all ranks update
/// atomically. [`Fetch::wait`] gives the value before the update.
///
/// On a communicator with a network, a lane waits for a ticket before its next update, because the
/// result of the next one takes its place. Dropping a ticket does not undo its update.
///
/// # Order
/// The updates of a cell have one order, and each of them returns the value that the one before has
/// left. More is promised only as far as a network can keep it:
/// - An update is made between the call and the end of the wait for its ticket. Two updates of a
///   lane, of one or of several cells, are ordered if the lane has waited for the ticket of the
///   first before the second call. So are an update and a later [`Window::cell`] of the same lane.
/// - What a rank reads after it has waited for a signal or a barrier includes the updates whose
///   tickets lanes of the sending block had waited for before the signal. Between the waits and the
///   signal, these lanes synchronize; [`Remote::raise`] and the other functions that signal do so.
/// - An update covers no other memory. To publish elements, use signals ([`super`]).
///
/// Between ranks that reach each other by load and store, an update is also an acquire and a
/// release at system scope. It releases what the lane has written before, and, after
/// [`Group::publish`], what its block has written. An update or a [`Window::cell`] that returns its
/// value, or a later value, acquires these writes for its lane. A kernel that relies on this does
/// not run over a network.
#[derive(Debug)]
#[must_use = "the value before the update is known when the ticket has been waited for"]
pub struct Fetch {
    state: State,
    /// Number of the argument, for errors.
    argument: u32,
}

/// State of an update.
#[derive(Debug)]
enum State {
    /// Made; has the value before.
    Done(u64),
    /// The number of its network request.
    Requested(u64),
    /// Not made, because of a recorded error.
    Failed,
}

impl Fetch {
    /// Waits until the update has been made, and returns the value before. The lane that has made
    /// the update calls this by itself. Fails
    /// - after an error that kept the update from being made,
    /// - after a timeout,
    /// - on a network, if the lane has issued another update since, which is recorded as
    ///   [`FailureKind::Ticket`].
    #[inline(always)]
    pub fn wait<M: Machine>(self, s: &Session<M>) -> Unvoted<u64> {
        Unvoted::from_wait(match self.state {
            State::Done(before) => Some(before),
            State::Requested(number) => self.arrived(s, number),
            State::Failed => None,
        })
    }

    /// Returns true if [`Fetch::wait`] returns at once: the update has been made, or the launch has
    /// failed. The lane that has made the update calls this by itself.
    #[inline(always)]
    pub fn is_done<M: Machine>(&self, s: &Session<M>) -> bool {
        let State::Requested(_) = self.state else {
            return true;
        };
        let (block, lane) = (s.block().index(), s.block().rank());
        let has_result = |ring: Requests| {
            ring.drive(false);
            ring.last_result(block, lane).is_some()
        };
        Requests::of(s.comm()).is_none_or(has_result) || s.ctx().aborted()
    }

    /// Waits for the result of request `number`.
    #[inline(always)]
    fn arrived<M: Machine>(&self, s: &Session<M>, number: u64) -> Option<u64> {
        let ring = Requests::of(s.comm())?;
        let block = s.block();
        let [tag, before] = ring.await_result(s.ctx(), block.index(), block.rank())?;
        if Requests::is_result_of(tag, number) {
            return Some(before);
        }
        let later = tag.wrapping_sub(1);
        s.faults()
            .record(FailureKind::Ticket, self.argument, later, number);
        None
    }
}
