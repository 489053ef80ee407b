//! Memory of this rank as an argument of a kernel: a pointer with its length; and [`Shared`] memory
//! of a block.
//!
//! Accesses to single elements are checked. An index out of range reads as zero or writes nothing,
//! and is recorded: the next vote of the block ([`crate::session`]) returns an error on all lanes.
//! The message for the host names the argument, the index and the length.
//!
//! On the CPU, accesses are relaxed and atomic, so a race between lanes or blocks makes values
//! unpredictable, but is not undefined behavior. On a GPU, they are ordinary loads and stores, and
//! the compiler may repeat or combine them: a loop that waits for another lane's or rank's value
//! needs the waits of the session.
//!
//! For whole ranges, use [`Out::copy_from`], or the functions of [`crate::bulk`].

use core::marker::PhantomData;

use bytemuck::Pod;

use crate::arch::{RESERVED_BYTES, SHARED_BYTES};
use crate::element::Element;
use crate::faults::Faults;
use crate::group::{Group, Machine};
use crate::layout::FailureKind;
use crate::session::{Aborted, Session};

/// The lifetime of a launch, which none of its arguments outlives. Made by `#[kernel]`.
#[derive(Debug)]
#[doc(hidden)]
pub struct LaunchScope(());

impl LaunchScope {
    /// Begins the scope.
    #[inline(always)]
    pub const fn begin() -> Self {
        Self(())
    }
}

/// The address and the number of elements of a buffer, as the parameters of a kernel hold them.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct RawBuffer {
    /// Address of the first element.
    pub at: *mut u8,
    /// Number of elements.
    pub len: u64,
}

impl RawBuffer {
    /// No buffer: null, and no elements.
    pub const EMPTY: Self = Self {
        at: core::ptr::null_mut(),
        len: 0,
    };
}

/// A range of elements.
#[derive(Debug)]
struct Elements<T> {
    at: *mut T,
    len: usize,
    /// Number of the argument.
    argument: u32,
    faults: Faults,
}

impl<T> Clone for Elements<T> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Elements<T> {}

impl<T: Element> Elements<T> {
    /// Returns the address of element `index`, or `None` after recording the error.
    #[inline(always)]
    fn at(&self, index: usize) -> Option<*mut T> {
        if index < self.len {
            return Some(self.at.wrapping_add(index));
        }
        self.refuse(index);
        None
    }

    #[inline(always)]
    fn refuse(&self, index: usize) {
        let (index, len) = (index as u64, self.len as u64);
        self.faults
            .record(FailureKind::Index, self.argument, index, len);
    }

    #[inline(always)]
    fn bytes(self) -> Elements<u8> {
        Elements {
            at: self.at.cast(),
            len: self.len * size_of::<T>(),
            argument: self.argument,
            faults: self.faults,
        }
    }

    #[inline(always)]
    fn slice(self, first: usize, len: usize) -> Self {
        if first <= self.len && len <= self.len - first {
            return Self {
                at: self.at.wrapping_add(first),
                len,
                ..self
            };
        }
        self.refuse(first.saturating_add(len).saturating_sub(1));
        Self { len: 0, ..self }
    }

    #[inline(always)]
    #[track_caller]
    fn require<M: Machine>(self, session: &Session<M>, len: usize) -> Result<Self, Aborted> {
        session.block().uniform([self.len as u64, len as u64]);
        if self.len < len {
            self.refuse(len - 1);
            session.settle(false)?;
        }
        Ok(Self { len, ..self })
    }
}

macro_rules! argument {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name<'a, T> {
            elements: Elements<T>,
            launch: PhantomData<&'a T>,
        }

        impl<T> Clone for $name<'_, T> {
            #[inline(always)]
            fn clone(&self) -> Self {
                *self
            }
        }

        impl<T> Copy for $name<'_, T> {}

        impl<'a, T: Element> $name<'a, T> {
            /// Wraps the argument with number `argument`: `len` elements at `at`. Called by
            /// `#[kernel]`.
            ///
            /// # Safety
            /// The elements must be valid during the launch, which the value does not outlive, and
            /// aligned. While the kernel runs, other accesses to them must be atomic, or come from
            /// another device.
            #[inline(always)]
            pub unsafe fn new<M: Machine>(
                _launch: &'a LaunchScope,
                session: &Session<M>,
                argument: u32,
                at: *mut u8,
                len: u64,
            ) -> Self {
                // SAFETY: the precondition of this function.
                unsafe { Self::of(session, argument, at, len) }
            }

            /// Does what `new` does, for memory that lives as long as `'a`.
            ///
            /// # Safety
            /// As for `new`.
            #[inline(always)]
            #[allow(dead_code)]
            pub(crate) unsafe fn of<M: Machine>(
                session: &Session<M>,
                argument: u32,
                at: *mut u8,
                len: u64,
            ) -> Self {
                Self::wrap(Elements {
                    at: at.cast(),
                    len: len as usize,
                    argument,
                    faults: session.faults(),
                })
            }

            #[inline(always)]
            fn wrap(elements: Elements<T>) -> Self {
                Self {
                    elements,
                    launch: PhantomData,
                }
            }

            /// Returns the number of elements.
            #[inline(always)]
            pub fn len(&self) -> usize {
                self.elements.len
            }

            /// Returns true if there are no elements.
            #[inline(always)]
            pub fn is_empty(&self) -> bool {
                self.len() == 0
            }

            /// Returns the same memory as bytes.
            ///
            /// # Safety
            /// While one lane or block accesses bytes, no other may write their elements, and the
            /// other way round. Racing accesses of different sizes are undefined behavior.
            #[inline(always)]
            #[must_use]
            pub unsafe fn bytes(self) -> $name<'a, u8> {
                $name::wrap(self.elements.bytes())
            }

            /// Returns elements `first .. first + len`. A range that is not within the argument is
            /// recorded as an error, and the result is empty.
            #[inline(always)]
            #[must_use]
            pub fn slice(self, first: usize, len: usize) -> Self {
                Self::wrap(self.elements.slice(first, len))
            }

            /// Returns the first `len` elements. All lanes together, with the same argument and
            /// `len`: the lanes do not vote.
            ///
            /// # Errors
            /// [`Aborted`] after recording [`FailureKind::Index`], if there are fewer.
            #[inline(always)]
            #[track_caller]
            pub fn require<M: Machine>(
                self,
                session: &Session<M>,
                len: usize,
            ) -> Result<Self, Aborted> {
                Ok(Self::wrap(self.elements.require(session, len)?))
            }
        }
    };
}

argument!(
    /// Memory of this rank that a kernel reads. See the [module](self).
    In
);
argument!(
    /// Memory of this rank that a kernel writes. See the [module](self).
    Out
);
argument!(
    /// Memory of this rank that a kernel reads and writes. See the [module](self).
    InOut
);

impl<T: Element> In<'_, T> {
    /// Returns element `index`, or zero if there is none.
    #[inline(always)]
    pub fn get(&self, index: usize) -> T {
        // SAFETY: `at` has checked the index; `new` requires that racing accesses are atomic.
        self.elements
            .at(index)
            .map_or(T::from_bits(0), |at| unsafe { load(at) })
    }

    /// Returns the address of the first element.
    #[inline(always)]
    pub fn as_ptr(&self) -> *const T {
        self.elements.at
    }
}

impl<T: Element> Out<'_, T> {
    /// Writes element `index`.
    #[inline(always)]
    pub fn set(&self, index: usize, value: T) {
        if let Some(at) = self.elements.at(index) {
            // SAFETY: `at` has checked the index; `new` requires that racing accesses are atomic.
            unsafe { store(at, value) };
        }
    }

    /// Copies the elements of `source` to the first elements, by the lanes of a group together. Too
    /// few elements, or elements that overlap the source, are recorded as an error, and nothing is
    /// copied.
    #[inline(always)]
    #[track_caller]
    pub fn copy_from<G: Group>(&self, group: G, source: In<T>) {
        let target = self.slice(0, source.len());
        group.uniform([source.len() as u64, target.len() as u64]);
        let (bytes, from) = (target.len() * size_of::<T>(), source.as_ptr());
        let distance = (target.as_ptr() as usize).abs_diff(from as usize);
        if distance < bytes {
            let Elements {
                argument, faults, ..
            } = self.elements;
            let (distance, bytes) = (distance as u64, bytes as u64);
            faults.record(FailureKind::Aliasing, argument, distance, bytes);
            return;
        }
        #[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
        // SAFETY: both ranges have these bytes and do not overlap.
        unsafe {
            let (to, from) = (target.as_ptr().cast(), from.cast());
            crate::bulk::copy(group, to, from, bytes, crate::mem::Policy::Cached);
        }
        // A copy that is not atomic would be undefined behavior where lanes race.
        #[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
        for index in group.elements_of_group(target.len()) {
            target.set(index, source.get(index));
        }
    }

    /// Returns the address of the first element.
    #[inline(always)]
    pub fn as_ptr(&self) -> *mut T {
        self.elements.at
    }
}

impl<'a, T: Element> InOut<'a, T> {
    /// Returns element `index`, or zero if there is none.
    #[inline(always)]
    pub fn get(&self, index: usize) -> T {
        self.as_in().get(index)
    }

    /// Writes element `index`.
    #[inline(always)]
    pub fn set(&self, index: usize, value: T) {
        self.as_out().set(index, value);
    }

    /// Returns the same memory for reading.
    #[inline(always)]
    pub fn as_in(self) -> In<'a, T> {
        In::wrap(self.elements)
    }

    /// Returns the same memory for writing.
    #[inline(always)]
    pub fn as_out(self) -> Out<'a, T> {
        Out::wrap(self.elements)
    }

    /// Returns the address of the first element.
    #[inline(always)]
    pub fn as_ptr(&self) -> *mut T {
        self.elements.at
    }
}

/// An array of `N` elements in memory that the lanes of a block share, as an argument of a kernel
/// that its host does not pass: each block has its own. The values at the start of a launch are
/// unspecified. Between the writes of a lane and the reads of another, the block needs a barrier.
///
/// Accesses are checked as those of [`InOut`]. The arrays of a kernel and the bytes of `shared = N`
/// must together fit [`SHARED_BYTES`] minus [`RESERVED_BYTES`]; otherwise the kernel does not
/// compile.
///
/// ```
/// use fusewire_device::{Aborted, Group, In, Machine, Out, Session, Shared, kernel};
///
/// /// Reverses the first 64 numbers of `x`.
/// #[kernel(blocks = 1)]
/// pub fn reverse(
///     s: &mut Session<impl Machine>,
///     x: In<u32>,
///     y: Out<u32>,
///     numbers: Shared<u32, 64>,
/// ) -> Result<(), Aborted> {
///     for i in s.block().elements_of_block(64) {
///         numbers.set(i, x.get(i));
///     }
///     s.block().sync();
///     for i in s.block().elements_of_block(64) {
///         y.set(i, numbers.get(63 - i));
///     }
///     Ok(())
/// }
/// # fn main() {}
/// ```
///
/// [`SHARED_BYTES`]: crate::arch::SHARED_BYTES
/// [`RESERVED_BYTES`]: crate::arch::RESERVED_BYTES
#[derive(Debug)]
pub struct Shared<'a, T, const N: usize> {
    elements: Elements<T>,
    launch: PhantomData<&'a T>,
}

impl<T, const N: usize> Clone for Shared<'_, T, N> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, const N: usize> Copy for Shared<'_, T, N> {}

impl<'a, T: Element, const N: usize> Shared<'a, T, N> {
    /// Size and number of the elements.
    #[doc(hidden)]
    pub const SHAPE: (usize, usize) = (size_of::<T>(), N);

    /// Makes the argument with number `argument` in the block's shared memory, after its first
    /// `end` bytes. Returns it, and the new end. Called by `#[kernel]`.
    ///
    /// # Safety
    /// The arrays must fit ([`shared_bytes`]). No other value may refer to their memory.
    #[inline(always)]
    pub unsafe fn new<M: Machine>(
        _launch: &'a LaunchScope,
        session: &Session<M>,
        argument: u32,
        end: usize,
    ) -> (Self, usize) {
        let first = end.next_multiple_of(SHARED_ALIGNMENT);
        let array = Self {
            elements: Elements {
                at: session.block().shared().wrapping_add(first).cast(),
                len: N,
                argument,
                faults: session.faults(),
            },
            launch: PhantomData,
        };
        (array, first + N * size_of::<T>())
    }

    /// Returns the number of elements: `N`.
    #[inline(always)]
    pub const fn len(&self) -> usize {
        N
    }

    /// Returns true if there are no elements.
    #[inline(always)]
    pub const fn is_empty(&self) -> bool {
        N == 0
    }

    /// Returns element `index`, or zero if there is none. Any lane by itself.
    #[inline(always)]
    pub fn get(&self, index: usize) -> T {
        self.elements
            .at(index)
            // SAFETY: `at` has checked the index. The array is in shared memory. A race yields
            // some value.
            .map_or(T::from_bits(0), |at| unsafe { load_shared(at) })
    }

    /// Writes element `index`. Any lane by itself.
    #[inline(always)]
    pub fn set(&self, index: usize, value: T) {
        if let Some(at) = self.elements.at(index) {
            // SAFETY: as in `get`.
            unsafe { store_shared(at, value) };
        }
    }
}

/// Alignment of the arrays in shared memory; divides the alignment of the shared memory itself.
const SHARED_ALIGNMENT: usize = 16;

/// Returns the bytes of shared memory of a kernel that uses `first` bytes and arrays of these sizes
/// and lengths. Called by `#[kernel]`.
///
/// # Panics
/// If they do not fit.
pub const fn shared_bytes(first: u32, arrays: &[(usize, usize)]) -> u32 {
    let mut end = first as usize;
    let mut index = 0;
    while index < arrays.len() {
        let (size, len) = arrays[index];
        assert!(len <= SHARED_BYTES, "a shared array with too many elements");
        end = end.next_multiple_of(SHARED_ALIGNMENT) + size * len;
        index += 1;
    }
    assert!(
        arrays.is_empty() || end <= SHARED_BYTES - RESERVED_BYTES,
        "the shared arrays of a kernel need more memory than a block has"
    );
    end as u32
}

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu", loom, shuttle)))]
mod access {
    use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

    use crate::element::Element;

    /// Loads an element, relaxed.
    ///
    /// # Safety
    /// `at` must be valid and aligned; racing accesses must be atomic.
    #[inline(always)]
    pub(super) unsafe fn load<T: Element>(at: *mut T) -> T {
        // SAFETY: the precondition of this function; elements have 1, 2, 4 or 8 bytes.
        let bits = unsafe {
            match size_of::<T>() {
                1 => u64::from(AtomicU8::from_ptr(at.cast()).load(Ordering::Relaxed)),
                2 => u64::from(AtomicU16::from_ptr(at.cast()).load(Ordering::Relaxed)),
                4 => u64::from(AtomicU32::from_ptr(at.cast()).load(Ordering::Relaxed)),
                _ => AtomicU64::from_ptr(at.cast()).load(Ordering::Relaxed),
            }
        };
        T::from_bits(bits)
    }

    /// Stores an element, relaxed.
    ///
    /// # Safety
    /// `at` must be valid and aligned; racing accesses must be atomic.
    #[inline(always)]
    pub(super) unsafe fn store<T: Element>(at: *mut T, value: T) {
        let bits = value.to_bits();
        // SAFETY: as in `load`.
        unsafe {
            match size_of::<T>() {
                1 => AtomicU8::from_ptr(at.cast()).store(bits as u8, Ordering::Relaxed),
                2 => AtomicU16::from_ptr(at.cast()).store(bits as u16, Ordering::Relaxed),
                4 => AtomicU32::from_ptr(at.cast()).store(bits as u32, Ordering::Relaxed),
                _ => AtomicU64::from_ptr(at.cast()).store(bits, Ordering::Relaxed),
            }
        }
    }
}

// On a GPU, an element is loaded or stored in a single access. In models, elements are payload,
// which atomic accesses must not touch.
#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu", loom, shuttle))]
mod access {
    use crate::element::Element;
    use crate::mem;

    /// Loads an element.
    ///
    /// # Safety
    /// `at` must be valid and aligned.
    #[inline(always)]
    pub(super) unsafe fn load<T: Element>(at: *mut T) -> T {
        // SAFETY: the precondition of this function.
        unsafe { mem::read(at) }
    }

    /// Stores an element.
    ///
    /// # Safety
    /// `at` must be valid and aligned.
    #[inline(always)]
    pub(super) unsafe fn store<T: Element>(at: *mut T, value: T) {
        // SAFETY: the precondition of this function.
        unsafe { mem::write(at, value) }
    }
}

use access::{load, store};

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
use access::{load as load_shared, store as store_shared};

/// Loads an element of a block's shared memory.
///
/// # Safety
/// `at` must be valid, aligned and in shared memory.
#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
#[inline(always)]
unsafe fn load_shared<T: Element>(at: *mut T) -> T {
    // SAFETY: the precondition of this function.
    T::from_bits(unsafe { crate::mem::read_shared(at.cast(), size_of::<T>()) })
}

/// Stores an element of a block's shared memory.
///
/// # Safety
/// `at` must be valid, aligned and in shared memory.
#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
#[inline(always)]
unsafe fn store_shared<T: Element>(at: *mut T, value: T) {
    // SAFETY: the precondition of this function.
    unsafe { crate::mem::write_shared(at.cast(), size_of::<T>(), value.to_bits()) };
}

/// Makes a struct from the words that an entry received. Called by `#[kernel]`.
#[inline(always)]
pub fn from_words<T: Pod, const N: usize>(words: [u64; N]) -> T {
    const {
        assert!(
            size_of::<T>() == 8 * N,
            "#[words(N)] needs a struct of exactly N words of 8 bytes"
        );
    }
    // SAFETY: the sizes are equal, and every bit pattern is a value of a Pod type.
    unsafe { core::mem::transmute_copy(&words) }
}

/// Makes the words that an entry receives for a struct. Called by `#[kernel]`.
#[inline(always)]
pub fn to_words<T: Pod, const N: usize>(value: T) -> [u64; N] {
    const {
        assert!(
            size_of::<T>() == 8 * N,
            "#[words(N)] needs a struct of exactly N words of 8 bytes"
        );
    }
    // SAFETY: the sizes are equal, and a Pod type has no uninitialized bytes.
    unsafe { core::mem::transmute_copy(&value) }
}
