//! A communicator.

use core::ffi::{c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::library::int;
use crate::sys::{
    NCCL_SPLIT_NOCOLOR, ncclAvg, ncclComm_t, ncclDataType_t, ncclMax, ncclMin, ncclProd,
    ncclRedOp_t, ncclScalarHostImmediate, ncclStream_t, ncclSuccess, ncclSum,
};
use crate::{Error, Library, Result, result};

/// A raw stream of the device; null is the default stream.
pub type Stream = ncclStream_t;

/// A reduction.
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
/// Dropping it destroys the communicator, or aborts it when it has an asynchronous error or the
/// thread panics (a destroy would then wait for peers that do not come). [`Comm::abort`] may come
/// from any thread, also while another one is inside an operation.
#[derive(Debug)]
pub struct Comm {
    pub(crate) library: Library,
    pub(crate) raw: ncclComm_t,
    count: usize,
    rank: usize,
    /// Whether the handle is still live; held while it is queried or freed.
    live: Mutex<bool>,
}

// SAFETY: the handle is not bound to a thread.
unsafe impl Send for Comm {}
// SAFETY: safe methods hold `live` or read plain fields; the unsafe ones state their rule on
// threads.
unsafe impl Sync for Comm {}

impl Comm {
    /// Takes a raw communicator over.
    ///
    /// # Errors
    /// [`Error::Call`]; the communicator is then aborted.
    ///
    /// # Safety
    /// `raw` is a live, initialised communicator of `library` that nobody else frees.
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
        // SAFETY: `raw` is live and `count` writable.
        comm.check("ncclCommCount", unsafe {
            (table.comm_count)(raw, &raw mut count)
        })?;
        // SAFETY: `raw` is live and `rank` writable.
        comm.check("ncclCommUserRank", unsafe {
            (table.comm_user_rank)(raw, &raw mut rank)
        })?;
        (comm.count, comm.rank) = (count as usize, rank as usize);
        Ok(comm)
    }

    /// The raw communicator; dangling after [`Comm::abort`].
    pub const fn as_raw(&self) -> ncclComm_t {
        self.raw
    }

    /// Its library.
    pub const fn library(&self) -> Library {
        self.library
    }

    /// Number of ranks.
    pub const fn count(&self) -> usize {
        self.count
    }

    /// This rank.
    pub const fn rank(&self) -> usize {
        self.rank
    }

    /// The asynchronous error, `ncclSuccess` when there is none.
    ///
    /// # Errors
    /// [`Error::Call`], [`Error::Argument`] after an abort.
    pub fn async_error(&self) -> Result<c_int> {
        let _live = self.alive("ncclCommGetAsyncError")?;
        let mut error = ncclSuccess;
        // SAFETY: the handle is live while `_live` is held; `error` is writable.
        let code =
            unsafe { (self.library.as_raw().comm_get_async_error)(self.raw, &raw mut error) };
        self.check("ncclCommGetAsyncError", code)?;
        Ok(error)
    }

    /// Aborts: operations under way end, and the handle is freed. A second abort does nothing.
    ///
    /// # Errors
    /// [`Error::Call`]; the handle is gone even then.
    pub fn abort(&self) -> Result<()> {
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        if !core::mem::replace(&mut *live, false) {
            return Ok(());
        }
        // SAFETY: the handle was live, and is marked freed.
        let code = unsafe { (self.library.as_raw().comm_abort)(self.raw) };
        result::check(self.library.as_raw(), "ncclCommAbort", code)
    }

    /// Splits: ranks of one colour form a communicator, ordered by `key`. `None` as colour joins
    /// none. Every rank calls it. Not inside a group.
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
        // SAFETY: the handle is live; an abort meanwhile frees this call; a null configuration
        // inherits.
        self.check(NAME, unsafe {
            split(self.raw, colour, key, &raw mut raw, core::ptr::null_mut())
        })?;
        if raw.is_null() {
            return Ok(None);
        }
        // SAFETY: a new communicator of the same library, owned by nobody else.
        unsafe { Self::from_raw(self.library, raw) }.map(Some)
    }

    /// Creates a sum whose inputs are first multiplied by the host scalar at `scalar`.
    ///
    /// # Errors
    /// [`Error::Unsupported`], [`Error::Call`], [`Error::Argument`].
    ///
    /// # Safety
    /// `scalar` points at one readable element of type `dtype`.
    pub unsafe fn pre_mul_sum(
        &self,
        scalar: *const c_void,
        dtype: ncclDataType_t,
    ) -> Result<RedOp> {
        const NAME: &str = "ncclRedOpCreatePreMulSum";
        let create = self
            .library
            .as_raw()
            .red_op_create_pre_mul_sum
            .ok_or_else(|| self.lacks(NAME))?;
        let _live = self.alive(NAME)?;
        let mut op = 0;
        // SAFETY: the caller promises `scalar`; it is read before the call returns.
        self.check(NAME, unsafe {
            create(
                &raw mut op,
                scalar.cast_mut(),
                dtype,
                ncclScalarHostImmediate,
                self.raw,
            )
        })?;
        Ok(RedOp(op))
    }

    /// Frees a reduction of [`Comm::pre_mul_sum`].
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

    /// The last error is asked of no communicator: an abort may have freed this one meanwhile.
    pub(crate) fn check(&self, operation: &'static str, code: c_int) -> Result<()> {
        result::check(self.library.as_raw(), operation, code)
    }
}

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident = $symbol:literal ($($arg:ident: $ty:ty $(=> $convert:expr)?),*);)*) => {
        impl Comm {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// [`Error::Call`]; [`Error::Argument`] after an abort or for a rank beyond `int`.
                ///
                /// # Safety
                /// Buffers have the size `nccl.h` states, in memory the library reaches, and stay
                /// valid until the stream (or the group) has done the operation. `stream` is null
                /// or live. One thread at a time calls operations of one communicator; only an
                /// abort may come meanwhile.
                #[allow(clippy::too_many_arguments)] // as in nccl.h
                pub unsafe fn $name(&self, $($arg: $ty,)* stream: Stream) -> Result<()> {
                    drop(self.alive($symbol)?);
                    $($(let $arg = $convert($symbol, $arg)?;)?)*
                    // SAFETY: the caller promises buffers and stream; the handle was live just now,
                    // and the library lets an abort overtake its operations.
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
    /// All-reduce of `count` elements.
    all_reduce = "ncclAllReduce" (send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, red: RedOp => op);
    /// Reduce of `count` elements to `root`; `recv` may be null elsewhere.
    reduce = "ncclReduce" (send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, red: RedOp => op, root: usize => int);
    /// Broadcast of `count` elements from `root`.
    broadcast = "ncclBroadcast" (send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, root: usize => int);
    /// All-gather of `count` elements a rank.
    all_gather = "ncclAllGather" (send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t);
    /// Reduce-scatter to `count` elements a rank.
    reduce_scatter = "ncclReduceScatter" (send: *const c_void, recv: *mut c_void, count: usize, dtype: ncclDataType_t, red: RedOp => op);
    /// Send of `count` elements to `peer`.
    send = "ncclSend" (buffer: *const c_void, count: usize, dtype: ncclDataType_t, peer: usize => int);
    /// Receive of `count` elements from `peer`.
    recv = "ncclRecv" (buffer: *mut c_void, count: usize, dtype: ncclDataType_t, peer: usize => int);
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
        // SAFETY: the handle was live, is marked freed, and no other reference exists.
        let _ = unsafe { free(self.raw) };
    }
}
