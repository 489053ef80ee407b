//! Machines without multicast.

use super::Combine;
use crate::comm::{Comm, WindowAddr};
use crate::element::{Element, Number};

/// A multicast address; there is none on this machine.
#[derive(Clone, Copy, Debug)]
pub enum Multicast {}

impl Multicast {
    /// Returns `None`: there are no multicast addresses.
    #[inline(always)]
    pub fn of(_comm: &Comm, _addr: WindowAddr, _bytes: u64) -> Option<Self> {
        None
    }

    /// Cannot be called: there is no such value.
    #[inline(always)]
    pub const fn address(self) -> Option<u64> {
        match self {}
    }

    /// Cannot be called: there is no such value.
    ///
    /// # Safety
    /// None.
    #[inline(always)]
    pub unsafe fn load_reduce<T: Element<Acc: Number>>(
        self,
        _byte: usize,
        _combine: Combine,
    ) -> [u64; 2] {
        match self {}
    }

    /// Cannot be called: there is no such value.
    ///
    /// # Safety
    /// None.
    #[inline(always)]
    pub unsafe fn store(self, _byte: usize, _value: [u64; 2]) {
        match self {}
    }
}
