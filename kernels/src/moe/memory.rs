//! Memory whose length a launch checks once.

use core::marker::PhantomData;

use fusewire_device::session::{Aborted, Session};
use fusewire_device::{Element, In, InOut, Machine, Out, mem};

/// Elements whose number has been checked against the shape of the launch. An index out of range
/// would be a bug in this crate, so it is not recorded: it reads zero, and writes nothing. Code to
/// record an error at each access would be several times the size of the kernels.
#[derive(Debug)]
pub(super) struct Memory<'a, T> {
    at: *mut T,
    len: usize,
    launch: PhantomData<&'a T>,
}

impl<T> Clone for Memory<'_, T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Memory<'_, T> {}

impl<'a, T: Element> Memory<'a, T> {
    /// Wraps the first `len` elements of an argument that the kernel reads. All lanes together.
    ///
    /// # Safety
    /// While lanes read an element, nothing may write it. [`Memory::set`] must not be called.
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn read_only<M: Machine>(
        s: &Session<M>,
        elements: In<'a, T>,
        len: usize,
    ) -> Result<Self, Aborted> {
        let elements = elements.require(s, len)?;
        // SAFETY: the precondition of this function.
        Ok(unsafe { Self::of(elements) })
    }

    /// Wraps the first `len` elements of an argument that the kernel writes. All lanes together.
    ///
    /// # Safety
    /// Lanes that access an element must be ordered by barriers, unless all of them read it.
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn written<M: Machine>(
        s: &Session<M>,
        elements: Out<'a, T>,
        len: usize,
    ) -> Result<Self, Aborted> {
        let elements = elements.require(s, len)?;
        Ok(Self {
            at: elements.as_ptr(),
            len,
            launch: PhantomData,
        })
    }

    /// Wraps the first `len` elements of an argument that the kernel reads and writes. All lanes
    /// together.
    ///
    /// # Safety
    /// As [`Memory::written`].
    #[inline(always)]
    #[track_caller]
    pub(super) unsafe fn updated<M: Machine>(
        s: &Session<M>,
        elements: InOut<'a, T>,
        len: usize,
    ) -> Result<Self, Aborted> {
        // SAFETY: the precondition of this function.
        unsafe { Self::written(s, elements.as_out(), len) }
    }

    /// Wraps elements that the kernel reads.
    ///
    /// # Safety
    /// As [`Memory::read_only`].
    #[inline(always)]
    pub(super) unsafe fn of(elements: In<'a, T>) -> Self {
        Self {
            at: elements.as_ptr().cast_mut(),
            len: elements.len(),
            launch: PhantomData,
        }
    }

    /// Returns the number of elements.
    #[inline(always)]
    pub(super) fn len(self) -> usize {
        self.len
    }

    /// Returns the address of the first element.
    #[inline(always)]
    pub(super) fn as_ptr(self) -> *mut T {
        self.at
    }

    /// Returns elements `first .. first + len`, or none if the range is not within the elements.
    #[inline(always)]
    pub(super) fn slice(self, first: usize, len: usize) -> Self {
        let fits = first <= self.len && len <= self.len - first;
        Self {
            at: self.at.wrapping_add(first),
            len: if fits { len } else { 0 },
            launch: PhantomData,
        }
    }

    /// Returns element `index`.
    #[inline(always)]
    pub(super) fn get(self, index: usize) -> T {
        if index < self.len {
            // SAFETY: the index is in range; the rest is a precondition of the constructors.
            return unsafe { mem::read(self.at.wrapping_add(index)) };
        }
        T::from_bits(0)
    }

    /// Writes element `index`.
    #[inline(always)]
    pub(super) fn set(self, index: usize, value: T) {
        if index < self.len {
            // SAFETY: as in `get`.
            unsafe { mem::write(self.at.wrapping_add(index), value) };
        }
    }
}
