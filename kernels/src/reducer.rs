//! Reductions of a range: compiled for one type and reduction, or switched at run time.

use core::marker::PhantomData;

use fusewire_device::bulk::{self, Range, Tables};
use fusewire_device::comm::WindowAddr;
use fusewire_device::element::{Reduction, WithReduction, dispatch};
use fusewire_device::session::Call;
use fusewire_device::{Block, DType, Element, Machine};

use crate::exchange::Memory;

/// Reduces ranges of one type by one reduction.
pub(crate) trait Reducer: Copy {
    /// Bytes of an element.
    fn size(self) -> usize;

    /// Reduces `range`. All lanes together.
    ///
    /// # Safety
    /// As [`bulk::reduce`].
    unsafe fn reduce<M: Machine>(self, block: Block<M>, tables: Tables, range: Range);
}

/// Compiled for `T` and `O`.
pub(crate) struct StaticReducer<T, O>(pub(crate) PhantomData<(T, O)>);

impl<T, O> Clone for StaticReducer<T, O> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<T, O> Copy for StaticReducer<T, O> {}

impl<T: Element, O: Reduction<T>> Reducer for StaticReducer<T, O> {
    #[inline(always)]
    fn size(self) -> usize {
        size_of::<T>()
    }

    #[inline(always)]
    unsafe fn reduce<M: Machine>(self, block: Block<M>, tables: Tables, range: Range) {
        // SAFETY: the caller's promise.
        unsafe { bulk::reduce::<M, T, O>(block, tables, range) }
    }
}

/// Whatever a call names.
#[derive(Clone, Copy)]
pub(crate) struct DynReducer {
    dtype: DType,
    reduction: u8,
}

impl DynReducer {
    /// The type and reduction of `call`, if it has a type.
    #[inline(always)]
    pub(crate) fn of(call: Call) -> Option<Self> {
        let dtype = DType::from_code(call.dtype())?;
        Some(Self {
            dtype,
            reduction: call.reduction(),
        })
    }
}

impl Reducer for DynReducer {
    #[inline(always)]
    fn size(self) -> usize {
        self.dtype.size()
    }

    #[inline(always)]
    unsafe fn reduce<M: Machine>(self, block: Block<M>, tables: Tables, range: Range) {
        struct Switch<M> {
            block: Block<M>,
            tables: Tables,
            range: Range,
        }
        impl<M: Machine> WithReduction for Switch<M> {
            type Output = ();
            #[inline(always)]
            fn run<T: Element, O: Reduction<T>>(self) {
                // SAFETY: promised to `reduce`.
                unsafe { bulk::reduce_rare::<M, T, O>(self.block, self.tables, self.range) }
            }
        }
        // The host refuses combinations that do not exist before it launches.
        let _ = dispatch(
            self.dtype as u8,
            self.reduction,
            Switch {
                block,
                tables,
                range,
            },
        );
    }
}

/// Defines a reduction kernel twice: compiled for the frequent types and reductions, and `$any` for
/// all others, switched at run time. `$code` is
/// `|session, reducer, memory, policy| -> bool`, false after a failure.
macro_rules! reduction_kernel {
    (
        $(#[$doc:meta])*
        $name:ident, $any:ident, $(params = $params:path,)? any_params = $any_params:path,
        |$session:ident, $reducer:ident, $memory:ident, $policy:ident| $code:expr
    ) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// The buffers valid for what the operation reads and writes; `chunk` elements of each row
        /// (a multiple of [`crate::ALIGNMENT`]) must fit staging.
        #[fusewire_device::kernel(
            $(params = $params,)?
            each(T: f32 = f32, f16 = fusewire_device::F16, bf16 = fusewire_device::Bf16),
            each(
                O: sum = fusewire_device::element::Sum,
                average = fusewire_device::element::Average,
                max = fusewire_device::element::Max
            )
        )]
        pub unsafe fn $name<
            T: fusewire_device::Element,
            O: fusewire_device::element::Reduction<T>,
        >(
            session: &mut fusewire_device::Session<impl fusewire_device::Machine>,
            source: *const u8,
            source_at: u64,
            target: *mut u8,
            target_at: u64,
            scalar: u64,
            chunk: u64,
            hint: u32,
        ) -> Result<(), fusewire_device::Aborted> {
            let $session = session;
            let $reducer = $crate::reducer::StaticReducer::<T, O>(core::marker::PhantomData);
            let count = $session.count();
            let $memory = $crate::reducer::memory(
                $reducer, count, source, source_at, target, target_at, scalar, chunk,
            );
            let $policy = $crate::policy(hint);
            // SAFETY: the caller's promise.
            let done = unsafe { $code };
            $session.settle(done)
        }

        /// Does what the kernel of the name without `any` does, for every type and reduction that
        /// has no instance of its own: they are switched at run time.
        ///
        /// # Safety
        /// As there.
        #[fusewire_device::kernel(params = $any_params)]
        pub unsafe fn $any(
            session: &mut fusewire_device::Session<impl fusewire_device::Machine>,
            source: *const u8,
            source_at: u64,
            target: *mut u8,
            target_at: u64,
            scalar: u64,
            chunk: u64,
            hint: u32,
        ) -> Result<(), fusewire_device::Aborted> {
            let $session = session;
            let Some($reducer) = $crate::reducer::DynReducer::of($session.call()) else {
                return $session.settle(false);
            };
            let count = $session.count();
            let $memory = $crate::reducer::memory(
                $reducer, count, source, source_at, target, target_at, scalar, chunk,
            );
            let $policy = $crate::policy(hint);
            // SAFETY: the caller's promise.
            let done = unsafe { $code };
            $session.settle(done)
        }
    };
}

pub(crate) use reduction_kernel;

/// The memory that a reduction kernel's arguments name; rows, shards and sharing are the
/// operation's.
#[inline(always)]
#[allow(clippy::too_many_arguments)] // the arguments of a kernel
pub(crate) fn memory<R: Reducer>(
    reducer: R,
    count: u64,
    source: *const u8,
    source_at: u64,
    target: *mut u8,
    target_at: u64,
    scalar: u64,
    chunk: u64,
) -> Memory {
    Memory {
        size: reducer.size(),
        count: count as usize,
        chunk: chunk as usize,
        source,
        source_at: WindowAddr(source_at),
        source_rows: 1,
        target,
        target_at: WindowAddr(target_at),
        target_shared: false,
        shards: 1,
        alignment: crate::ALIGNMENT,
        scalar,
    }
}
