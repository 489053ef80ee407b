//! Raw types of the NCCL C interface (from `nccl.h` of 2.32) and the table of its functions.
// The names are the names in nccl.h.
#![allow(non_camel_case_types, non_upper_case_globals, non_snake_case)]

mod config;
mod table;

use core::ffi::{c_char, c_int, c_void};

pub use config::{NCCL_API_MAGIC, NCCL_CONFIG_UNDEF_INT, ncclConfig_t};
pub use table::Table;
pub(crate) use table::find;

/// Result code. An integer instead of an enum, because a newer library may return an unknown code.
pub type ncclResult_t = c_int;
/// Success.
pub const ncclSuccess: ncclResult_t = 0;
/// A call of the CUDA or HIP runtime failed.
pub const ncclUnhandledCudaError: ncclResult_t = 1;
/// A system call failed.
pub const ncclSystemError: ncclResult_t = 2;
/// An internal check of the library failed.
pub const ncclInternalError: ncclResult_t = 3;
/// An argument has a bad value.
pub const ncclInvalidArgument: ncclResult_t = 4;
/// The call is not allowed in this state.
pub const ncclInvalidUsage: ncclResult_t = 5;
/// Another rank or the network failed.
pub const ncclRemoteError: ncclResult_t = 6;
/// An operation of a non-blocking communicator has not completed.
pub const ncclInProgress: ncclResult_t = 7;

/// Communicator (opaque handle).
pub type ncclComm_t = *mut c_void;
/// Registered window (opaque handle).
pub type ncclWindow_t = *mut c_void;
/// `cudaStream_t` or `hipStream_t`.
pub type ncclStream_t = *mut c_void;

/// Size of a unique id in bytes.
pub const NCCL_UNIQUE_ID_BYTES: usize = 128;

/// Id that the ranks of one communicator share.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ncclUniqueId {
    /// Opaque bytes.
    pub internal: [c_char; NCCL_UNIQUE_ID_BYTES],
}

/// Element type.
pub type ncclDataType_t = c_int;
/// Signed, 8 bits.
pub const ncclInt8: ncclDataType_t = 0;
/// Unsigned, 8 bits.
pub const ncclUint8: ncclDataType_t = 1;
/// Signed, 32 bits.
pub const ncclInt32: ncclDataType_t = 2;
/// Unsigned, 32 bits.
pub const ncclUint32: ncclDataType_t = 3;
/// Signed, 64 bits.
pub const ncclInt64: ncclDataType_t = 4;
/// Unsigned, 64 bits.
pub const ncclUint64: ncclDataType_t = 5;
/// IEEE half.
pub const ncclFloat16: ncclDataType_t = 6;
/// IEEE single.
pub const ncclFloat32: ncclDataType_t = 7;
/// IEEE double.
pub const ncclFloat64: ncclDataType_t = 8;
/// bfloat16.
pub const ncclBfloat16: ncclDataType_t = 9;
/// 8-bit float, 4 bits of exponent.
pub const ncclFloat8e4m3: ncclDataType_t = 10;
/// 8-bit float, 5 bits of exponent.
pub const ncclFloat8e5m2: ncclDataType_t = 11;

/// Reduction: one of the constants, or a handle of `ncclRedOpCreatePreMulSum`.
pub type ncclRedOp_t = c_int;
/// Sum.
pub const ncclSum: ncclRedOp_t = 0;
/// Product.
pub const ncclProd: ncclRedOp_t = 1;
/// Maximum.
pub const ncclMax: ncclRedOp_t = 2;
/// Minimum.
pub const ncclMin: ncclRedOp_t = 3;
/// Sum divided by the number of ranks.
pub const ncclAvg: ncclRedOp_t = 4;

/// Location of the scalar of a pre-multiplied sum.
pub type ncclScalarResidence_t = c_int;
/// In device memory, read when the operation runs.
pub const ncclScalarDevice: ncclScalarResidence_t = 0;
/// In host memory, read before the call returns.
pub const ncclScalarHostImmediate: ncclScalarResidence_t = 1;

/// Colour that excludes a rank from all parts of a split.
pub const NCCL_SPLIT_NOCOLOR: c_int = -1;

/// Signals of one peer that `ncclWaitSignal` waits for.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ncclWaitSignalDesc_t {
    /// Number of signals.
    pub opCnt: c_int,
    /// The rank that sends the signals.
    pub peer: c_int,
    /// Signal index.
    pub sigIdx: c_int,
    /// Context.
    pub ctx: c_int,
}
