//! A communicator.

use core::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::library::int;
use crate::sys::{
    NCCL_SPLIT_NOCOLOR, ncclAvg, ncclComm_t, ncclDataType_t, ncclMax, ncclMin, ncclProd,
    ncclRedOp_t, ncclScalarDevice, ncclScalarHostImmediate, ncclScalarResidence_t, ncclStream_t,
    ncclSuccess, ncclSum, ncclUniqueId,
};
use crate::{Error, Library, Result, result};

/// Raw stream of the device; null is the default stream.
pub type Stream = ncclStream_t;

impl Library {
    /// Joins a communicator of `count` ranks as `rank`, on the current device of the thread. Blocks
    /// until every rank has joined. Must not be called inside a group, because the library would
    /// then write the handle only at the end of the group.
    ///
    /// # Errors
    /// [`Error::Call`], also on a machine without a device.
    pub fn init_rank(&self, count: usize, id: ncclUniqueId, rank: usize) -> Result<Comm> {
        let (count, rank) = (
            int("ncclCommInitRank", count)?,
            int("ncclCommInitRank", rank)?,
        );
        let mut raw = core::ptr::null_mut();
        // SAFETY: `raw` is writable. The call blocks, so `raw` outlives the library's use of it.
        let code = unsafe { (self.inner.table.comm_init_rank)(&raw mut raw, count, id, rank) };
        self.check("ncclCommInitRank", code)?;
        // SAFETY: `raw` is a new communicator of this library, which nothing else owns.
        unsafe { Comm::from_raw(*self, raw) }
    }
}

/// Reduction operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RedOp(pub ncclRedOp_t);

impl RedOp {
    /// Sum.
    pub const SUM: Self = Self(ncclSum);
    /// Product.
    pub const PROD: Self = Self(ncclProd);
    /// Maximum.
    pub const MAX: Self = Self(ncclMax);
    /// Minimum.
    pub const MIN: Self = Self(ncclMin);
    /// Average.
    pub const AVG: Self = Self(ncclAvg);
}

/// One rank's handle of a communicator.
///
/// Dropping the handle destroys the communicator. If the communicator has an asynchronous error or
/// the thread panics, dropping the handle aborts the communicator instead, because a destroy would
/// wait for peers that have failed. [`Comm::abort`] may be called from any thread, also while
/// another thread is inside an operation.
#[derive(Debug)]
pub struct Comm {
    pub(crate) library: Library,
    pub(crate) raw: ncclComm_t,
    count: usize,
    rank: usize,
    /// True while the handle is live. Locked while the handle is queried or freed.
    live: Mutex<bool>,
}

// SAFETY: NCCL's handles are not bound to the thread that created them.
unsafe impl Send for Comm {}
// SAFETY: safe methods either lock `live` or read fields that never change. Unsafe methods document
// the threads that may call them.
unsafe impl Sync for Comm {}

impl Comm {
    /// Takes ownership of a raw communicator.
    ///
    /// # Errors
    /// [`Error::Call`]. The communicator is then aborted.
    ///
    /// # Safety
    /// `raw` is a live, initialised communicator of `library` that no other code frees.
    pub unsafe fn from_raw(library: Library, raw: ncclComm_t) -> Result<Self> {
        let mut comm = Self {
            library,
            raw,
            count: 0,
            rank: 0,
            live: Mutex::new(true),
        };
        let table = library.as_raw();
        let (mut count, mut rank) = (0, 0);
        // SAFETY: the caller passes a live `raw`; `count` is writable.
        comm.check("ncclCommCount", unsafe {
            (table.comm_count)(raw, &raw mut count)
        })?;
        // SAFETY: the caller passes a live `raw`; `rank` is writable.
        comm.check("ncclCommUserRank", unsafe {
            (table.comm_user_rank)(raw, &raw mut rank)
        })?;
        (comm.count, comm.rank) = (count as usize, rank as usize);
        Ok(comm)
    }

    /// Returns the raw communicator. The pointer dangles after [`Comm::abort`].
    pub const fn as_raw(&self) -> ncclComm_t {
        self.raw
    }

    /// Returns the communicator's library.
    pub const fn library(&self) -> Library {
        self.library
    }

    /// Returns the number of ranks.
    pub const fn count(&self) -> usize {
        self.count
    }

    /// Returns this rank's number.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the asynchronous error, or `ncclSuccess` if there is none.
    ///
    /// # Errors
    /// [`Error::Call`]; [`Error::Argument`] after an abort.
    pub fn async_error(&self) -> Result<c_int> {
        let _live = self.alive("ncclCommGetAsyncError")?;
        let mut error = ncclSuccess;
        // SAFETY: the handle is live while `_live` is held; `error` is writable.
        let code =
            unsafe { (self.library.as_raw().comm_get_async_error)(self.raw, &raw mut error) };
        self.check("ncclCommGetAsyncError", code)?;
        Ok(error)
    }

    /// Aborts the communicator: ends running operations and frees the handle. A second call does
    /// nothing.
    ///
    /// # Errors
    /// [`Error::Call`]. The handle is freed even if the call fails.
    pub fn abort(&self) -> Result<()> {
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        if !core::mem::replace(&mut *live, false) {
            return Ok(());
        }
        // SAFETY: `live` was true and is now false, so the handle is live and is freed only once.
        let code = unsafe { (self.library.as_raw().comm_abort)(self.raw) };
        result::check(self.library.as_raw(), "ncclCommAbort", code)
    }

    /// Splits the communicator: ranks with the same colour form a new communicator, in the order of
    /// `key`. A rank with colour `None` joins no new communicator. Every rank must call this
    /// function, outside a group.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Call`], [`Error::Argument`].
    pub fn split(&self, colour: Option<usize>, key: c_int) -> Result<Option<Self>> {
        const NAME: &str = "ncclCommSplit";
        let split = self
            .library
            .as_raw()
            .comm_split
            .ok_or_else(|| self.lacks(NAME))?;
        let colour = colour.map_or(Ok(NCCL_SPLIT_NOCOLOR), |colour| int(NAME, colour))?;
        drop(self.alive(NAME)?);
        let mut raw = core::ptr::null_mut();
        // SAFETY: the handle is live. A concurrent abort makes the call return. A null
        // configuration inherits the configuration of the parent.
        self.check(NAME, unsafe {
            split(self.raw, colour, key, &raw mut raw, core::ptr::null_mut())
        })?;
        if raw.is_null() {
            return Ok(None);
        }
        // SAFETY: `raw` is a new communicator of the same library, which nothing else owns.
        unsafe { Self::from_raw(self.library, raw) }.map(Some)
    }

    /// Creates a reduction operator that multiplies the inputs by the host scalar at `scalar` and
    /// sums the products.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Call`], [`Error::Argument`].
    ///
    /// # Safety
    /// `scalar` points to one readable element of type `dtype`.
    pub unsafe fn pre_mul_sum(
        &self,
        scalar: *const c_void,
        dtype: ncclDataType_t,
    ) -> Result<RedOp> {
        // SAFETY: the precondition of this function. The library reads the scalar before the call
        // returns.
        unsafe { self.create_pre_mul_sum(scalar, dtype, ncclScalarHostImmediate) }
    }

    /// Creates a reduction operator like [`Comm::pre_mul_sum`], with a scalar in device memory,
    /// which every operation reads when it runs.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Call`], [`Error::Argument`].
    ///
    /// # Safety
    /// `scalar` points to one element of type `dtype` that the device can read until every
    /// operation with the operator is complete.
    pub unsafe fn pre_mul_sum_on_device(
        &self,
        scalar: *const c_void,
        dtype: ncclDataType_t,
    ) -> Result<RedOp> {
        // SAFETY: the precondition of this function.
        unsafe { self.create_pre_mul_sum(scalar, dtype, ncclScalarDevice) }
    }

    /// # Safety
    /// `scalar` points to one element of type `dtype`, readable where and as long as `residence`
    /// requires.
    unsafe fn create_pre_mul_sum(
        &self,
        scalar: *const c_void,
        dtype: ncclDataType_t,
        residence: ncclScalarResidence_t,
    ) -> Result<RedOp> {
        const NAME: &str = "ncclRedOpCreatePreMulSum";
        let create = self
            .library
            .as_raw()
            .red_op_create_pre_mul_sum
            .ok_or_else(|| self.lacks(NAME))?;
        let _live = self.alive(NAME)?;
        let mut op = 0;
        // SAFETY: the precondition of this function.
        self.check(NAME, unsafe {
            create(&raw mut op, scalar.cast_mut(), dtype, residence, self.raw)
        })?;
        Ok(RedOp(op))
    }

    /// Frees a reduction that [`Comm::pre_mul_sum`] created.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Call`], [`Error::Argument`].
    pub fn destroy_op(&self, op: RedOp) -> Result<()> {
        const NAME: &str = "ncclRedOpDestroy";
        let destroy = self
            .library
            .as_raw()
            .red_op_destroy
            .ok_or_else(|| self.lacks(NAME))?;
        let _live = self.alive(NAME)?;
        // SAFETY: the handle is live; the library checks `op`.
        self.check(NAME, unsafe { destroy(op.0, self.raw) })
    }

    pub(crate) fn lacks(&self, symbol: &'static str) -> Error {
        Error::Unsupported {
            symbol,
            version: self.library.version(),
        }
    }

    pub(crate) fn alive(&self, operation: &'static str) -> Result<MutexGuard<'_, bool>> {
        let live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        if *live {
            Ok(live)
        } else {
            Err(Error::Argument {
                operation,
                reason: "the communicator was aborted",
            })
        }
    }

    /// Converts a result code to a result. Queries the last error without a communicator, because
    /// an abort may have freed this communicator concurrently.
    pub(crate) fn check(&self, operation: &'static str, code: c_int) -> Result<()> {
        result::check(self.library.as_raw(), operation, code)
    }
}

macro_rules! operations {
    (
        $(
            $(#[$doc:meta])*
            $name:ident = $symbol:literal
                ($($arg:ident: $ty:ty $(=> $convert:expr)?),*);
        )*
    ) => {
        impl Comm {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// [`Error::Call`]; [`Error::Argument`] after an abort, or if a rank exceeds the
                /// range of `int`.
                ///
                /// # Safety
                /// The buffers have the size that `nccl.h` states, in memory that the library can
                /// access. They stay valid until the stream (or the group) has completed the
                /// operation. `stream` is null or live. Operations of one communicator are called
                /// from one thread at a time; only an abort may run concurrently.
                #[allow(clippy::too_many_arguments)] // as in nccl.h
                pub unsafe fn $name(&self, $($arg: $ty,)* stream: Stream) -> Result<()> {
                    drop(self.alive($symbol)?);
                    $($(let $arg = $convert($symbol, $arg)?;)?)*
                    // SAFETY: the caller passes valid buffers and a valid stream. The handle was
                    // live when it was checked, and the library allows an abort during its
                    // operations.
                    self.check($symbol, unsafe {
                        (self.library.as_raw().$name)($($arg,)* self.raw, stream)
                    })
                }
            )*
        }
    };
}

fn op(_: &'static str, op: RedOp) -> Result<ncclRedOp_t> {
    Ok(op.0)
}

operations! {
    /// All-reduces `count` elements.
    all_reduce = "ncclAllReduce" (
        send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t,
        red: RedOp => op
    );
    /// Reduces `count` elements to `root`; `recv` may be null on other ranks.
    reduce = "ncclReduce" (
        send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t,
        red: RedOp => op, root: usize => int
    );
    /// Broadcasts `count` elements from `root`.
    broadcast = "ncclBroadcast" (
        send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t,
        root: usize => int
    );
    /// All-gathers `count` elements per rank.
    all_gather = "ncclAllGather" (
        send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t
    );
    /// Reduce-scatters to `count` elements per rank.
    reduce_scatter = "ncclReduceScatter" (
        send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t,
        red: RedOp => op
    );
    /// Sends `count` elements to `peer`.
    send = "ncclSend" (
        buffer: *const c_void, count: usize, dtype: ncclDataType_t, peer: usize => int
    );
    /// Receives `count` elements from `peer`.
    recv = "ncclRecv" (
        buffer: *mut c_void, count: usize, dtype: ncclDataType_t, peer: usize => int
    );
}

impl Drop for Comm {
    fn drop(&mut self) {
        let sound = !std::thread::panicking() && self.async_error() == Ok(ncclSuccess);
        let live = self.live.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !core::mem::replace(live, false) {
            return;
        }
        let table = self.library.as_raw();
        let free = if sound {
            table.comm_destroy
        } else {
            table.comm_abort
        };
        // SAFETY: `live` was true and is now false, and `&mut self` excludes other uses of the
        // handle.
        let _ = unsafe { free(self.raw) };
    }
}
