//! Structs and constants of the header.

use core::ffi::{c_char, c_void};
use core::mem::MaybeUninit;

use core::time::Duration;
use fusewire::{Algorithm, DType, Determinism, Options, ReduceOp};

use crate::error::{Outcome, argument, text};

/// The header's constants.
pub mod numbers {
    /// Type of elements: the default that the field documents.
    pub const FUSEWIRE_DTYPE_DEFAULT: u32 = 0;
    /// Reduction: sum, in rank order.
    pub const FUSEWIRE_SUM: u32 = 1;
    /// Reduction: product.
    pub const FUSEWIRE_PRODUCT: u32 = 2;
    /// Reduction: minimum.
    pub const FUSEWIRE_MIN: u32 = 3;
    /// Reduction: maximum.
    pub const FUSEWIRE_MAX: u32 = 4;
    /// Reduction: sum divided by the number of ranks.
    pub const FUSEWIRE_AVERAGE: u32 = 5;
    /// Reduction: bitwise and.
    pub const FUSEWIRE_BIT_AND: u32 = 6;
    /// Reduction: bitwise or.
    pub const FUSEWIRE_BIT_OR: u32 = 7;
    /// Reduction: bitwise exclusive or.
    pub const FUSEWIRE_BIT_XOR: u32 = 8;
    /// Kind of a message in a batch: this rank sends.
    pub const FUSEWIRE_P2P_SEND: u32 = 1;
    /// Kind of a message in a batch: this rank receives.
    pub const FUSEWIRE_P2P_RECV: u32 = 2;
    /// Sender of a signal: all ranks, whose values are added.
    pub const FUSEWIRE_ALL_RANKS: u32 = u32::MAX;
    /// Update of a signal: set the value.
    pub const FUSEWIRE_SIGNAL_SET: u32 = 1;
    /// Update of a signal: add to the value.
    pub const FUSEWIRE_SIGNAL_ADD: u32 = 2;
    /// Algorithm: chosen by the plan.
    pub const FUSEWIRE_ALGORITHM_AUTO: u32 = 0;
    /// Algorithm: packets.
    pub const FUSEWIRE_ALGORITHM_PACKET: u32 = 1;
    /// Algorithm: signals, one shot.
    pub const FUSEWIRE_ALGORITHM_SIGNAL: u32 = 2;
    /// Algorithm: two shots.
    pub const FUSEWIRE_ALGORITHM_TWO_SHOT: u32 = 3;
    /// Algorithm: multicast.
    pub const FUSEWIRE_ALGORITHM_NVLS: u32 = 7;
    /// Algorithm: packets, two shots.
    pub const FUSEWIRE_ALGORITHM_PACKET_TWO_SHOT: u32 = 8;
    /// Norm: root mean square.
    pub const FUSEWIRE_NORM_RMS: u32 = 0;
    /// Norm: mean and variance.
    pub const FUSEWIRE_NORM_LAYER: u32 = 1;
    /// Flag of a norm: multiply by 1 + weight.
    pub const FUSEWIRE_NORM_UNIT_OFFSET: u32 = 1;
    /// Flag of a norm: programmatic dependent launch.
    pub const FUSEWIRE_NORM_DEPENDENT: u32 = 2;
    /// Output of a norm: the type of the input.
    pub const FUSEWIRE_SCALE_NONE: u32 = 0;
    /// Output of a norm: fp8 with one given scale.
    pub const FUSEWIRE_SCALE_STATIC: u32 = 1;
    /// Output of a norm: fp8 with a scale for each row.
    pub const FUSEWIRE_SCALE_ROWS: u32 = 2;
    /// Output of a norm: fp8 with a scale for each 128 elements.
    pub const FUSEWIRE_SCALE_GROUPS: u32 = 3;
    /// Number of elements that share a scale in [`FUSEWIRE_SCALE_GROUPS`].
    pub const FUSEWIRE_SCALE_GROUP: u32 = 128;
    /// Flag of sampling: programmatic dependent launch.
    pub const FUSEWIRE_VOCAB_DEPENDENT: u32 = 1;
    /// Payload of a mixture of experts: the type of the tokens.
    pub const FUSEWIRE_MOE_PAYLOAD_SAME: u32 = 0;
    /// Payload of a mixture of experts: fp8 with a scale for each 128 elements.
    pub const FUSEWIRE_MOE_PAYLOAD_FP8: u32 = 1;
    /// Form of the results of a mixture of experts: the type of the tokens.
    pub const FUSEWIRE_MOE_RESULTS_SAME: u32 = 0;
    /// Form of the results of a mixture of experts: fp8 with an f32 scale for each 128 elements.
    pub const FUSEWIRE_MOE_RESULTS_FP8: u32 = 1;
    /// Mode of a mixture of experts: few tokens; operations have halves.
    pub const FUSEWIRE_MOE_LOW_LATENCY: u32 = 0;
    /// Mode of a mixture of experts: many tokens, which pass through staging in rounds.
    pub const FUSEWIRE_MOE_HIGH_THROUGHPUT: u32 = 1;
    /// Layout of a mixture of experts: a row for each selection, in the order of the experts.
    pub const FUSEWIRE_MOE_EXPERT_MAJOR: u32 = 0;
    /// Layout of a mixture of experts: a row for each token, in the order of the ranks.
    pub const FUSEWIRE_MOE_RANK_MAJOR: u32 = 1;
    /// Flag of a mixture of experts: mask missing ranks.
    pub const FUSEWIRE_MOE_MASK_MISSING: u32 = 1;
    /// Flag of a mixture of experts: scales in columns.
    pub const FUSEWIRE_MOE_COLUMN_SCALES: u32 = 2;
    /// Flag of a mixture of experts: convert received rows from fp8 to the type of the tokens.
    pub const FUSEWIRE_MOE_DEQUANTIZE: u32 = 4;
}

/// `fusewire_options`. Zero selects the default of each field.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireOptions {
    /// Size of this struct in bytes, as the program was compiled with it.
    pub struct_size: usize,
    /// Timeout of every wait in seconds; 0 for the default.
    pub timeout_seconds: f64,
    /// Size of the staging area for input in bytes; 0 for the default of the device. The staging
    /// area for output has the same size.
    pub staging_bytes: u64,
    /// Size of a packet slot in bytes; 0 for the default of the device.
    pub packet_slot_bytes: u64,
    /// Number of blocks of a launch; 0 for the default of the device.
    pub blocks: u32,
    /// Number of threads of a block on a GPU; 0 for 512.
    pub threads: u32,
    /// Algorithm of all_reduce.
    pub algorithm: u32,
    /// If not 0, ranks may be reduced in any order.
    pub any_order: u32,
    /// If not 0, the store is already served, so rank 0 does not serve it.
    pub store_is_served: u32,
    /// If not 0, a failure of the communicator ends the process.
    pub abort_process: u32,
    /// Name of the backend; null for Fusewire's kernels.
    pub backend: *const c_char,
    /// If not 0, the communicator's own stream has a high priority.
    pub high_priority_stream: u32,
    /// Maximum size of a byte string with its header; 0 for 64 MiB.
    pub max_object_bytes: u64,
    /// Number of blocks of a launch that moves 4 MiB or more; 0 for the default of the device.
    pub large_blocks: u32,
}

/// `fusewire_norm`: buffers and kind of a fused norm.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireNorm {
    /// Size of this struct in bytes, as the program was compiled with it.
    pub struct_size: usize,
    /// RMS norm or layer norm.
    pub kind: u32,
    /// Flags.
    pub flags: u32,
    /// Number of rows of the result.
    pub rows: u64,
    /// Number of elements of a row.
    pub hidden: u64,
    /// Type of input, weight and bias, and of an output that is not fp8.
    pub dtype: u32,
    /// Type of `residual` and `residual_out`; 0 for `dtype`.
    pub residual_dtype: u32,
    /// Added to the mean square (RMS norm) or to the variance (layer norm).
    pub epsilon: f32,
    /// Algorithm of the reduction.
    pub algorithm: u32,
    /// This rank's contribution to the sum.
    pub input: *const c_void,
    /// `hidden` elements.
    pub weight: *const c_void,
    /// `hidden` elements, or null.
    pub bias: *const c_void,
    /// Input residual, with as many rows as the result, or null.
    pub residual: *const c_void,
    /// Output residual, with as many rows as the result, or null.
    pub residual_out: *mut c_void,
    /// The result.
    pub output: *mut c_void,
    /// Kind of the scales, if the output is fp8.
    pub scaling: u32,
    /// Type of `scales`: F32 (also selected by 0), or U8 for powers of two.
    pub scale_dtype: u32,
    /// The scale of `FUSEWIRE_SCALE_STATIC`: one f32.
    pub scale: *const c_void,
    /// Output: the scales of rows or groups.
    pub scales: *mut c_void,
    /// Distance in elements between the scales of adjacent groups; 0 if the scales of each row are
    /// contiguous.
    pub scale_stride: u64,
}

/// `fusewire_vocab`: logits whose columns are split over the ranks, and the results to compute.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireVocab {
    /// Size of this struct in bytes, as the program was compiled with it.
    pub struct_size: usize,
    /// Type of the logits.
    pub dtype: u32,
    /// Flags.
    pub flags: u32,
    /// Number of rows.
    pub rows: u64,
    /// Number of columns of all ranks together.
    pub vocabulary: u64,
    /// Index of this rank's first column.
    pub first: u64,
    /// Number of columns of this rank.
    pub columns: u64,
    /// Distance in elements between the first logits of adjacent rows; 0 for `columns`.
    pub stride: u64,
    /// Number of greatest logits to find in each row.
    pub k: u32,
    /// Type of the indices; 0 for I64.
    pub index_dtype: u32,
    /// This rank's columns of each row.
    pub logits: *const c_void,
    /// Output: `rows * k` column indices; null if `k` is 0.
    pub indices: *mut c_void,
    /// Output: `rows * k` f32 values, or null.
    pub values: *mut c_void,
    /// Output: `rows` f32 values, or null.
    pub log_sum_exp: *mut c_void,
}

/// Structs that C code or the library fills. Their fields are numbers and addresses, and the first
/// field is the size of the struct, which C code sets.
///
/// # Safety
/// Every bit pattern must be a valid value of the type. The type's first field must be a `usize`.
pub(crate) unsafe trait VersionedStruct {
    /// Name in the header.
    const NAME: &'static str;
    /// Size of the struct in the first version of the library.
    const FIRST: usize;
}

// SAFETY: all fields are integers, floats or pointers, for which every bit pattern is valid. The
// struct is `repr(C)`, and its first field is the `usize` `struct_size`.
unsafe impl VersionedStruct for FusewireOptions {
    const NAME: &'static str = "fusewire_options";
    const FIRST: usize = 64;
}

// SAFETY: all fields are integers, floats or pointers, for which every bit pattern is valid. The
// struct is `repr(C)`, and its first field is the `usize` `struct_size`.
unsafe impl VersionedStruct for FusewireNorm {
    const NAME: &'static str = "fusewire_norm";
    const FIRST: usize = 128;
}

// SAFETY: all fields are integers, floats or pointers, for which every bit pattern is valid. The
// struct is `repr(C)`, and its first field is the `usize` `struct_size`.
unsafe impl VersionedStruct for FusewireVocab {
    const NAME: &'static str = "fusewire_vocab";
    const FIRST: usize = 96;
}

const _: () = assert!(size_of::<FusewireOptions>() >= FusewireOptions::FIRST);
const _: () = assert!(size_of::<FusewireNorm>() >= FusewireNorm::FIRST);
const _: () = assert!(size_of::<FusewireVocab>() >= FusewireVocab::FIRST);

/// Returns the `struct_size` of the struct at `from`.
///
/// # Safety
/// `from` is null, or its first field is readable.
pub(crate) unsafe fn struct_size<T: VersionedStruct>(
    operation: &str,
    from: *const T,
) -> Outcome<usize> {
    if from.is_null() {
        return Err(argument(operation, format!("the {} is NULL", T::NAME)));
    }
    if !from.is_aligned() {
        return Err(argument(
            operation,
            format!("the {} at {from:p} is not aligned", T::NAME),
        ));
    }
    // SAFETY: `from` is not null and aligned (checked above). The first field is a `usize`
    // (`VersionedStruct`), which the caller guarantees to be readable.
    let size = unsafe { from.cast::<usize>().read() };
    if !(T::FIRST..=4096).contains(&size) {
        return Err(argument(
            operation,
            format!(
                "{}.struct_size is {size}: set it to sizeof({}), {} at least",
                T::NAME,
                T::NAME,
                T::FIRST
            ),
        ));
    }
    Ok(size)
}

/// Reads the struct at `from`. The first field of the struct is its size in bytes. Fields that an
/// older program does not know are set to zero. Fields of a newer program that this library does
/// not know must be zero.
///
/// # Safety
/// `from` is null, or readable for the number of bytes in its first field.
pub(crate) unsafe fn read<T: VersionedStruct>(operation: &str, from: *const T) -> Outcome<T> {
    // SAFETY: the caller passes null or a struct, whose first field is readable.
    let size = unsafe { struct_size(operation, from)? };
    let known = size.min(size_of::<T>());
    // SAFETY: the caller guarantees `size` readable bytes, and `known <= size`.
    let tail = unsafe { core::slice::from_raw_parts(from.cast::<u8>().add(known), size - known) };
    if let Some(at) = tail.iter().position(|byte| *byte != 0) {
        return Err(argument(
            operation,
            format!(
                "byte {} of {} is not zero, and this library (version {}) does not know that \
                 field: use a newer library",
                known + at,
                T::NAME,
                env!("CARGO_PKG_VERSION")
            ),
        ));
    }
    let mut value = MaybeUninit::<T>::zeroed();
    // SAFETY: `known` is at most `size`, which the caller guarantees to be readable, and at most
    // the size of `T`. `value` is a local variable, so source and destination do not overlap.
    unsafe {
        core::ptr::copy_nonoverlapping(from.cast::<u8>(), value.as_mut_ptr().cast::<u8>(), known);
    }
    // SAFETY: all bytes are initialised, and every bit pattern is a valid value
    // (`VersionedStruct`).
    Ok(unsafe { value.assume_init() })
}

/// Writes `value` to the struct at `to`, except for the first field, which is its size in bytes.
/// Leaves out fields that an older program does not know. Sets bytes of a newer program that this
/// library does not know to zero.
///
/// # Safety
/// `to` is null, or writable for the number of bytes in its first field, which is readable.
pub(crate) unsafe fn write<T: VersionedStruct>(operation: &str, to: *mut T, value: T) -> Outcome {
    // SAFETY: the caller passes null or a struct, whose first field is readable.
    let size = unsafe { struct_size(operation, to.cast_const())? };
    let (first, known) = (size_of::<usize>(), size.min(size_of::<T>()));
    let from = (&raw const value).cast::<u8>();
    // SAFETY: `first <= known`, because `struct_size` returns at least `T::FIRST`. `known` is at
    // most `size`, which the caller guarantees to be writable, and at most the size of `T`. `value`
    // is a local variable, so source and destination do not overlap.
    unsafe {
        let at = to.cast::<u8>();
        core::ptr::copy_nonoverlapping(from.add(first), at.add(first), known - first);
        at.add(known).write_bytes(0, size - known);
    }
    Ok(())
}

/// Returns the type of elements with this number.
pub(crate) fn dtype(operation: &str, what: &str, number: u32) -> Outcome<DType> {
    u8::try_from(number)
        .ok()
        .and_then(DType::from_code)
        .ok_or_else(|| {
            argument(
                operation,
                format!("{what} {number} is no type of elements (FUSEWIRE_F32, ...)"),
            )
        })
}

/// Returns the reduction with this number.
pub(crate) fn reduction(operation: &str, number: u32) -> Outcome<ReduceOp> {
    Ok(match number {
        numbers::FUSEWIRE_SUM => ReduceOp::Sum,
        numbers::FUSEWIRE_PRODUCT => ReduceOp::Product,
        numbers::FUSEWIRE_MIN => ReduceOp::Min,
        numbers::FUSEWIRE_MAX => ReduceOp::Max,
        numbers::FUSEWIRE_AVERAGE => ReduceOp::Average,
        numbers::FUSEWIRE_BIT_AND => ReduceOp::BitAnd,
        numbers::FUSEWIRE_BIT_OR => ReduceOp::BitOr,
        numbers::FUSEWIRE_BIT_XOR => ReduceOp::BitXor,
        _ => {
            return Err(argument(
                operation,
                format!("{number} is no reduction (FUSEWIRE_SUM, ...)"),
            ));
        }
    })
}

/// Returns the algorithm with this number.
pub(crate) fn algorithm(operation: &str, number: u32) -> Outcome<Algorithm> {
    Ok(match number {
        numbers::FUSEWIRE_ALGORITHM_AUTO => Algorithm::Auto,
        numbers::FUSEWIRE_ALGORITHM_PACKET => Algorithm::Packet,
        numbers::FUSEWIRE_ALGORITHM_SIGNAL => Algorithm::Signal,
        numbers::FUSEWIRE_ALGORITHM_TWO_SHOT => Algorithm::TwoShot,
        numbers::FUSEWIRE_ALGORITHM_NVLS => Algorithm::Nvls,
        numbers::FUSEWIRE_ALGORITHM_PACKET_TWO_SHOT => Algorithm::PacketTwoShot,
        _ => {
            return Err(argument(
                operation,
                format!("{number} is no algorithm (FUSEWIRE_ALGORITHM_AUTO, ...)"),
            ));
        }
    })
}

/// Converts a timeout in seconds.
pub(crate) fn seconds(operation: &str, seconds: f64) -> Outcome<Duration> {
    if seconds.is_finite() && seconds > 0.0 && seconds < 1e9 {
        return Ok(Duration::from_secs_f64(seconds));
    }
    Err(argument(
        operation,
        format!("a timeout of {seconds} s; more than 0 and less than 1e9 are possible"),
    ))
}

/// Options of a communicator, and the fields of the struct that `Options` does not contain.
pub(crate) struct ParsedOptions {
    pub(crate) options: Options,
    pub(crate) backend: String,
    pub(crate) store_is_served: bool,
}

impl ParsedOptions {
    /// Reads options. Null selects all defaults.
    ///
    /// # Safety
    /// `from` is null, or readable for its `struct_size` bytes. Its text fields are null or C
    /// strings.
    pub(crate) unsafe fn read(operation: &str, from: *const FusewireOptions) -> Outcome<Self> {
        let mut options = Options::default();
        options
            .abort_process_on_timeout_or_error
            .get_or_insert(false);
        let mut parsed = Self {
            options,
            backend: "fusewire".to_owned(),
            store_is_served: false,
        };
        if from.is_null() {
            return Ok(parsed);
        }
        // SAFETY: the caller passes null or a struct that is readable for `struct_size` bytes.
        let given = unsafe { read(operation, from)? };
        let options = &mut parsed.options;
        if given.timeout_seconds != 0.0 {
            options.timeout = seconds(operation, given.timeout_seconds)?;
        }
        for (value, own) in [
            (given.staging_bytes, &mut options.staging_bytes),
            (given.packet_slot_bytes, &mut options.packet_slot_bytes),
            (given.max_object_bytes, &mut options.max_object_bytes),
        ] {
            if value != 0 {
                *own = value;
            }
        }
        (options.blocks, options.large_blocks) = (given.blocks, given.large_blocks);
        options.threads = given.threads;
        options.algorithm = algorithm(operation, given.algorithm)?;
        if given.any_order != 0 {
            options.determinism = Determinism::Any;
        }
        if given.abort_process != 0 {
            options.abort_process_on_timeout_or_error = Some(true);
        }
        options.high_priority_stream = given.high_priority_stream != 0;
        parsed.store_is_served = given.store_is_served != 0;
        // SAFETY: the caller passes null or a C string that lives as long as the call.
        let backend = unsafe { text(operation, "backend", given.backend, Some("fusewire"))? };
        parsed.backend = backend.to_owned();
        Ok(parsed)
    }
}
