//! Numeric constants of the table. Their meaning never changes.

/// First word of a table: the text `FUSEWIRE` in memory order.
pub const MAGIC: u64 = u64::from_le_bytes(*b"FUSEWIRE");
/// Major version. Tables of different major versions are incompatible.
pub const ABI_MAJOR: u32 = 1;
/// Minor version. Incremented when fields are appended.
pub const ABI_MINOR: u32 = 0;
/// Size in bytes of the version 1.0 table. A host rejects smaller tables.
pub const TABLE_BYTES_1_0: u32 = 232;
/// Name of the function that a library exports.
pub const ENTRY_SYMBOL: &str = "fusewire_backend_v1";
/// Maximum length of a store key in bytes.
pub const MAX_KEY_BYTES: usize = 4096;
/// Maximum length of a store value in bytes.
pub const MAX_VALUE_BYTES: usize = 16 << 20;

/// Success.
pub const CODE_OK: i32 = 0;
/// A failure that no other code describes.
pub const CODE_OTHER: i32 = 1;
/// A call did not complete within its timeout.
pub const CODE_TIMEOUT: i32 = 2;
/// A rank or its connection failed.
pub const CODE_PEER: i32 = 3;
/// The handle was aborted.
pub const CODE_ABORTED: i32 = 4;
/// The backend does not support the operation for this element type or reduction.
pub const CODE_UNSUPPORTED: i32 = 5;
/// An argument is invalid.
pub const CODE_INVALID: i32 = 6;
/// The store failed.
pub const CODE_STORE: i32 = 7;
/// A panic or an exception was caught: a bug in the backend or, for store functions, in the host.
pub const CODE_INTERNAL: i32 = 8;

/// Host memory.
pub const DEVICE_CPU: u32 = 0;
/// Memory of a CUDA device.
pub const DEVICE_CUDA: u32 = 1;
/// Memory of a HIP device.
pub const DEVICE_HIP: u32 = 2;

/// IEEE binary64.
pub const DTYPE_F64: u32 = 1;
/// IEEE binary32.
pub const DTYPE_F32: u32 = 2;
/// IEEE binary16.
pub const DTYPE_F16: u32 = 3;
/// bfloat16.
pub const DTYPE_BF16: u32 = 4;
/// fp8 E4M3FN.
pub const DTYPE_E4M3: u32 = 5;
/// fp8 E5M2.
pub const DTYPE_E5M2: u32 = 6;
/// Signed 8-bit integer.
pub const DTYPE_I8: u32 = 7;
/// Unsigned 8-bit integer.
pub const DTYPE_U8: u32 = 8;
/// Signed 32-bit integer.
pub const DTYPE_I32: u32 = 9;
/// Unsigned 32-bit integer.
pub const DTYPE_U32: u32 = 10;
/// Signed 64-bit integer.
pub const DTYPE_I64: u32 = 11;
/// Unsigned 64-bit integer.
pub const DTYPE_U64: u32 = 12;
/// IEEE binary32 and an unsigned 32-bit index, aligned to 8 bytes. Minimum and maximum find the
/// value and its index; of equal values, the lowest index.
pub const DTYPE_F32_INDEX: u32 = 13;

/// No reduction.
pub const REDUCE_NONE: u32 = 0;
/// Sum; integers wrap.
pub const REDUCE_SUM: u32 = 1;
/// Product; integers wrap.
pub const REDUCE_PRODUCT: u32 = 2;
/// Minimum; NaN propagates, -0 is less than +0.
pub const REDUCE_MIN: u32 = 3;
/// Maximum; NaN propagates, -0 is less than +0.
pub const REDUCE_MAX: u32 = 4;
/// Sum divided by the number of ranks; integers truncate.
pub const REDUCE_AVERAGE: u32 = 5;
/// Sum of each rank's elements multiplied by that rank's factor.
pub const REDUCE_PREMUL_SUM: u32 = 6;
/// Bitwise and; integers only.
pub const REDUCE_BIT_AND: u32 = 7;
/// Bitwise or; integers only.
pub const REDUCE_BIT_OR: u32 = 8;
/// Bitwise exclusive or; integers only.
pub const REDUCE_BIT_XOR: u32 = 9;

/// `all_reduce`.
pub const OPERATION_ALL_REDUCE: u32 = 1;
/// `reduce_scatter`.
pub const OPERATION_REDUCE_SCATTER: u32 = 2;
/// `all_gather`.
pub const OPERATION_ALL_GATHER: u32 = 3;
/// `all_gather_v`.
pub const OPERATION_ALL_GATHER_V: u32 = 4;
/// `broadcast`.
pub const OPERATION_BROADCAST: u32 = 5;
/// `reduce`.
pub const OPERATION_REDUCE: u32 = 6;
/// `scatter`.
pub const OPERATION_SCATTER: u32 = 7;
/// `gather`.
pub const OPERATION_GATHER: u32 = 8;
/// `all_to_all`.
pub const OPERATION_ALL_TO_ALL: u32 = 9;
/// `all_to_all_v`.
pub const OPERATION_ALL_TO_ALL_V: u32 = 10;
/// `barrier`.
pub const OPERATION_BARRIER: u32 = 11;
/// `send`.
pub const OPERATION_SEND: u32 = 32;
/// `recv`.
pub const OPERATION_RECV: u32 = 33;
