//! Temporary memory of a launch that a network can read and write.

use super::Local;
use crate::args::{InOut, LaunchScope};
use crate::comm::WindowAddr;
use crate::element::Element;
use crate::group::Machine;
use crate::session::Session;

/// Temporary memory of this rank, as an argument of a kernel whose host passes the number of
/// elements. It is the source of puts of values that the kernel computes, and the target of gets,
/// like this rank's part of a window ([`Local`]).
///
/// All blocks of the launch share the elements. Their values at the start of a launch are
/// unspecified. A launch takes its temporary memory from the communicator's staging
/// (`Options::staging_bytes`).
///
/// ```
/// use fusewire_device::{Aborted, Group, Machine, Scratch, Session, Team, Window, kernel};
///
/// /// Writes twice this rank's number to every rank's part of `window`.
/// #[kernel(blocks = 1, signals = 1)]
/// pub fn doubles(
///     s: &mut Session<impl Machine>,
///     window: Window<u32>,
///     double: Scratch<u32>,
/// ) -> Result<(), Aborted> {
///     let block = s.block();
///     if block.is_leader() {
///         double.set(0, 2 * s.rank());
///     }
///     block.sync();
///     s.barrier()?;
///     for peer in s.peers(Team::World) {
///         let target = window.at(peer).slice(s.rank() as usize, 1);
///         target.put(s, block, double.local()).raise(s, 0);
///     }
///     window.wait_all(s, 0, Team::World)?;
///     Ok(())
/// }
/// # fn main() {}
/// ```
#[derive(Debug)]
pub struct Scratch<'a, T> {
    local: Local<'a, T>,
}

impl<T> Clone for Scratch<'_, T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Scratch<'_, T> {}

impl<'a, T: Element> Scratch<'a, T> {
    /// Makes the argument with number `argument`: `len` elements in the workspace's staging, after
    /// its first `end` bytes. Returns it, and the new end. Called by `#[kernel]`.
    ///
    /// # Safety
    /// The elements must fit the staging ([`scratch_bytes`]). Nothing else may use them during the
    /// launch.
    #[doc(hidden)]
    #[inline(always)]
    pub unsafe fn new<M: Machine>(
        _launch: &'a LaunchScope,
        session: &Session<M>,
        argument: u32,
        len: u64,
        end: u64,
    ) -> (Self, u64) {
        let comm = session.comm();
        let addr = WindowAddr::new(0, comm.workspace().staging_out + end);
        let at = comm.own(addr.offset());
        let local = Local {
            // SAFETY: staging is aligned to more than `ALIGNMENT`; the rest is the precondition.
            elements: unsafe { InOut::of(session, argument, at, len) },
            window: addr.window(),
            offset: addr.offset(),
        };
        let scratch = Self { local };
        (scratch, end + scratch_bytes(size_of::<T>() as u64, len))
    }

    /// Returns the number of elements.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.local.len()
    }

    /// Returns true if there are no elements.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.local.is_empty()
    }

    /// Returns element `index`, or zero if there is none. Any lane by itself.
    #[inline(always)]
    pub fn get(&self, index: usize) -> T {
        self.local.elements().get(index)
    }

    /// Writes element `index`. Any lane by itself.
    #[inline(always)]
    pub fn set(&self, index: usize, value: T) {
        self.local.elements().set(index, value);
    }

    /// Returns the elements as a source of puts and a target of gets.
    #[inline(always)]
    pub fn local(&self) -> Local<'a, T> {
        self.local
    }

    /// Returns elements `first .. first + len`, as [`Local::slice`] does.
    #[inline(always)]
    #[must_use]
    pub fn slice(&self, first: usize, len: usize) -> Local<'a, T> {
        self.local.slice(first, len)
    }
}

/// Alignment of the arrays in staging.
const ALIGNMENT: u64 = 16;

/// Returns the bytes of staging for `len` elements of `size` bytes.
#[inline(always)]
pub const fn scratch_bytes(size: u64, len: u64) -> u64 {
    size.saturating_mul(len).saturating_add(ALIGNMENT - 1) & !(ALIGNMENT - 1)
}
