//! Table of a library's functions, which are looked up by name.

use core::ffi::{c_char, c_int, c_uint, c_void};

use libloading::os::unix::Library;

use super::*;
use crate::version::Version;

macro_rules! table {
    (
        required { $($rf:ident: $rs:literal ($($ra:ty),*) -> $rr:ty;)* }
        optional {
            $(
                $of:ident: $os:literal since $min:literal $(, rccl $own:literal)?
                    ($($oa:ty),*) -> $or:ty;
            )*
        }
    ) => {
        /// Functions of one library. An optional function is `None` if the library lacks it, or if
        /// the library is older than the version that introduced the function.
        #[derive(Clone, Copy, Debug)]
        pub struct Table {
            $(#[doc = concat!("`", $rs, "`.")] pub $rf: unsafe extern "C" fn($($ra),*) -> $rr,)*
            $(#[doc = concat!("`", $os, "` (optional).")]
            pub $of: Option<unsafe extern "C" fn($($oa),*) -> $or>,)*
        }

        impl Table {
            /// Looks up all functions. Skips functions that were introduced after `version`,
            /// because their symbols may exist before the functions work. `rccl` selects AMD's
            /// function names.
            ///
            /// # Errors
            /// Returns the name of the first required symbol that is absent.
            ///
            /// # Safety
            /// The symbols of `library` have the signatures of `nccl.h`, and `library` stays loaded
            /// as long as the table is used.
            pub unsafe fn load(
                library: &Library,
                version: Version,
                rccl: bool,
            ) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the fields have the signatures of nccl.h, and the caller guarantees
                    // the same for the symbols.
                    $($rf: unsafe { find(library, $rs) }.ok_or($rs)?,)*
                    $($of: {
                        let own: &[&str] = if rccl { &[$($own)?] } else { &[] };
                        // SAFETY: the field has the signature of nccl.h, and the caller guarantees
                        // the same for the symbol.
                        let look_up = |name: &str| unsafe { find(library, name) };
                        let common = || (version.code() >= $min).then(|| look_up($os));
                        own.iter().find_map(|name| look_up(name)).or_else(|| common()?)
                    },)*
                })
            }

            /// Returns the first name of each optional function, and true if the library has the
            /// function.
            pub fn optional(&self) -> Vec<(&'static str, bool)> {
                vec![$(($os, self.$of.is_some()),)*]
            }
        }
    };
}

/// Looks up a function of the library.
///
/// # Safety
/// `F` is the function pointer type of `name`.
pub(crate) unsafe fn find<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: the caller guarantees that `F` is the function pointer type of `name`.
    unsafe { library.get::<F>(name.as_bytes()) }
        .ok()
        .map(|symbol| *symbol)
}

table! {
    required {
        get_version: "ncclGetVersion" (*mut c_int) -> ncclResult_t;
        get_unique_id: "ncclGetUniqueId" (*mut ncclUniqueId) -> ncclResult_t;
        get_error_string: "ncclGetErrorString" (ncclResult_t) -> *const c_char;
        comm_init_rank: "ncclCommInitRank" (
            *mut ncclComm_t, c_int, ncclUniqueId, c_int
        ) -> ncclResult_t;
        comm_destroy: "ncclCommDestroy" (ncclComm_t) -> ncclResult_t;
        comm_abort: "ncclCommAbort" (ncclComm_t) -> ncclResult_t;
        comm_count: "ncclCommCount" (ncclComm_t, *mut c_int) -> ncclResult_t;
        comm_user_rank: "ncclCommUserRank" (ncclComm_t, *mut c_int) -> ncclResult_t;
        comm_get_async_error: "ncclCommGetAsyncError" (
            ncclComm_t, *mut ncclResult_t
        ) -> ncclResult_t;
        group_start: "ncclGroupStart" () -> ncclResult_t;
        group_end: "ncclGroupEnd" () -> ncclResult_t;
        all_reduce: "ncclAllReduce" (
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, ncclStream_t
        ) -> ncclResult_t;
        reduce: "ncclReduce" (
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, c_int, ncclComm_t,
            ncclStream_t
        ) -> ncclResult_t;
        broadcast: "ncclBroadcast" (
            *const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, ncclStream_t
        ) -> ncclResult_t;
        all_gather: "ncclAllGather" (
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, ncclStream_t
        ) -> ncclResult_t;
        reduce_scatter: "ncclReduceScatter" (
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, ncclStream_t
        ) -> ncclResult_t;
        send: "ncclSend" (
            *const c_void, usize, ncclDataType_t, c_int, ncclComm_t, ncclStream_t
        ) -> ncclResult_t;
        recv: "ncclRecv" (
            *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, ncclStream_t
        ) -> ncclResult_t;
    }
    optional {
        get_last_error: "ncclGetLastError" since 21_300 (ncclComm_t) -> *const c_char;
        comm_init_rank_config: "ncclCommInitRankConfig" since 21_400 (
            *mut ncclComm_t, c_int, ncclUniqueId, c_int, *mut ncclConfig_t
        ) -> ncclResult_t;
        comm_finalize: "ncclCommFinalize" since 21_400 (ncclComm_t) -> ncclResult_t;
        comm_split: "ncclCommSplit" since 21_800 (
            ncclComm_t, c_int, c_int, *mut ncclComm_t, *mut ncclConfig_t
        ) -> ncclResult_t;
        comm_shrink: "ncclCommShrink" since 22_700 (
            ncclComm_t, *mut c_int, c_int, *mut ncclComm_t, *mut ncclConfig_t, c_int
        ) -> ncclResult_t;
        comm_get_unique_id: "ncclCommGetUniqueId" since 22_800 (
            ncclComm_t, *mut ncclUniqueId
        ) -> ncclResult_t;
        comm_grow: "ncclCommGrow" since 22_800 (
            ncclComm_t, c_int, *const ncclUniqueId, c_int, *mut ncclComm_t, *mut ncclConfig_t
        ) -> ncclResult_t;
        comm_revoke: "ncclCommRevoke" since 22_800 (ncclComm_t, c_int) -> ncclResult_t;
        comm_register: "ncclCommRegister" since 21_900 (
            ncclComm_t, *mut c_void, usize, *mut *mut c_void
        ) -> ncclResult_t;
        comm_deregister: "ncclCommDeregister" since 21_900 (
            ncclComm_t, *mut c_void
        ) -> ncclResult_t;
        comm_window_register: "ncclCommWindowRegister" since 22_700 (
            ncclComm_t, *mut c_void, usize, *mut ncclWindow_t, c_int
        ) -> ncclResult_t;
        comm_window_deregister: "ncclCommWindowDeregister" since 22_700 (
            ncclComm_t, ncclWindow_t
        ) -> ncclResult_t;
        mem_alloc: "ncclMemAlloc" since 21_900 (*mut *mut c_void, usize) -> ncclResult_t;
        mem_free: "ncclMemFree" since 21_900 (*mut c_void) -> ncclResult_t;
        red_op_create_pre_mul_sum: "ncclRedOpCreatePreMulSum" since 21_100 (
            *mut ncclRedOp_t, *mut c_void, ncclDataType_t, ncclScalarResidence_t, ncclComm_t
        ) -> ncclResult_t;
        red_op_destroy: "ncclRedOpDestroy" since 21_100 (ncclRedOp_t, ncclComm_t) -> ncclResult_t;
        // RCCL has these three functions in versions long before 2.28, and spells the name of the
        // first one differently. The arguments are the same as in NCCL.
        all_to_all: "ncclAlltoAll" since 22_800, rccl "ncclAllToAll" (
            *const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, ncclStream_t
        ) -> ncclResult_t;
        scatter: "ncclScatter" since 22_800, rccl "ncclScatter" (
            *const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, ncclStream_t
        ) -> ncclResult_t;
        gather: "ncclGather" since 22_800, rccl "ncclGather" (
            *const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, ncclStream_t
        ) -> ncclResult_t;
        put_signal: "ncclPutSignal" since 22_800 (
            *const c_void, usize, ncclDataType_t, c_int, ncclWindow_t, usize, c_int, c_int, c_uint,
            ncclComm_t, ncclStream_t
        ) -> ncclResult_t;
        signal: "ncclSignal" since 22_800 (
            c_int, c_int, c_int, c_uint, ncclComm_t, ncclStream_t
        ) -> ncclResult_t;
        wait_signal: "ncclWaitSignal" since 22_800 (
            c_int, *mut ncclWaitSignalDesc_t, ncclComm_t, ncclStream_t
        ) -> ncclResult_t;
    }
}
