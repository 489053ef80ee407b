//! Configuration of a mixture of experts.

use fusewire::{
    DType, MissingRanks, MoeConfig, MoeLayout, MoeMode, MoePayload, MoeReceived, MoeResults,
    MoeScales, MoeScalesLayout,
};

use crate::error::{Outcome, argument};
use crate::types::{VersionedStruct, dtype, numbers as n, read, seconds};

/// `fusewire_moe_config`: sizes and formats of a mixture of experts.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FusewireMoeConfig {
    /// Size of this struct in bytes, as the program was compiled with it.
    pub struct_size: usize,
    /// Number of experts of all ranks.
    pub experts: u32,
    /// Number of experts of a token.
    pub top_k: u32,
    /// Number of elements of a token.
    pub hidden: u64,
    /// Maximum number of tokens of a rank.
    pub max_tokens: u64,
    /// Maximum number of rows of a rank in expert-major order or in high throughput mode; 0 for all
    /// that can arrive.
    pub capacity: u64,
    /// In expert-major order, the rows of each expert start at a multiple of this number; 0 for 1.
    pub alignment: u64,
    /// Type of tokens and results; 0 for BF16.
    pub dtype: u32,
    /// Form in which tokens are sent.
    pub payload: u32,
    /// Type of the scales of fp8: F32 (also selected by 0), or U8 for powers of two.
    pub scale_dtype: u32,
    /// Order of the rows that a rank receives.
    pub layout: u32,
    /// Number of micro-batches; 0 for 1.
    pub in_flight: u32,
    /// Maximum number of experts of a rank; 0 for the experts divided by the ranks, rounded up.
    pub local_experts: u32,
    /// Number of blocks of a launch; 0 for the communicator's.
    pub blocks: u32,
    /// `FUSEWIRE_MOE_MASK_MISSING`, `FUSEWIRE_MOE_COLUMN_SCALES`, `FUSEWIRE_MOE_DEQUANTIZE`.
    pub flags: u32,
    /// Time in seconds after which a rank does not send in time; 0 for the communicator's.
    pub timeout_seconds: f64,
    /// Low latency or high throughput.
    pub mode: u32,
    /// Form in which results are sent.
    pub results: u32,
    /// In high throughput mode, the tokens of a rank that are sent in a round; 0 for 512.
    pub staging: u64,
}

// SAFETY: all fields are integers, floats or pointers, for which every bit pattern is valid. The
// struct is `repr(C)`, and its first field is the `usize` `struct_size`.
unsafe impl VersionedStruct for FusewireMoeConfig {
    const NAME: &'static str = "fusewire_moe_config";
    const FIRST: usize = 88;
}

const _: () = assert!(size_of::<FusewireMoeConfig>() >= FusewireMoeConfig::FIRST);

/// Reads a configuration.
///
/// # Safety
/// `from` is null, or readable for its `struct_size` bytes.
pub(super) unsafe fn config_of(
    operation: &str,
    from: *const FusewireMoeConfig,
) -> Outcome<MoeConfig> {
    // SAFETY: the caller passes null or a struct that is readable for `struct_size` bytes.
    let given = unsafe { read(operation, from)? };
    let refuse = |detail: String| Err(argument(operation, detail));
    // Sizes that exceed `usize` become `usize::MAX`, which `Moe::new` refuses.
    let size = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
    let (hidden, max_tokens) = (size(given.hidden), size(given.max_tokens));
    let mut config = MoeConfig::new(given.experts, given.top_k, hidden, max_tokens);
    let has = |flag: u32| given.flags & flag != 0;
    let known =
        n::FUSEWIRE_MOE_MASK_MISSING | n::FUSEWIRE_MOE_COLUMN_SCALES | n::FUSEWIRE_MOE_DEQUANTIZE;
    if has(!known) {
        return refuse(format!("flags {:#x} are unknown", given.flags & !known));
    }
    if has(n::FUSEWIRE_MOE_MASK_MISSING) {
        config.missing_ranks = MissingRanks::Mask;
    }
    if has(n::FUSEWIRE_MOE_COLUMN_SCALES) {
        config.scales_layout = MoeScalesLayout::ColumnMajor;
    }
    if has(n::FUSEWIRE_MOE_DEQUANTIZE) {
        config.received = MoeReceived::Dequantized;
    }
    if given.timeout_seconds != 0.0 {
        config.timeout = Some(seconds(operation, given.timeout_seconds)?);
    }
    if given.dtype != n::FUSEWIRE_DTYPE_DEFAULT {
        config.input = dtype(operation, "dtype", given.dtype)?;
    }
    let scales = match given.scale_dtype {
        n::FUSEWIRE_DTYPE_DEFAULT => MoeScales::F32,
        other => match dtype(operation, "scale_dtype", other)? {
            DType::F32 => MoeScales::F32,
            DType::U8 => MoeScales::Ue8m0,
            other => {
                let name = other.name();
                return refuse(format!("scales of type {name}; must be f32 or u8 (UE8M0)"));
            }
        },
    };
    config.payload = match given.payload {
        n::FUSEWIRE_MOE_PAYLOAD_FP8 => MoePayload::Fp8(scales),
        n::FUSEWIRE_MOE_PAYLOAD_SAME if given.scale_dtype == 0 => MoePayload::Same,
        n::FUSEWIRE_MOE_PAYLOAD_SAME => {
            return refuse("scale_dtype is for FUSEWIRE_MOE_PAYLOAD_FP8 only".to_owned());
        }
        other => {
            return refuse(format!(
                "payload {other} is unknown (FUSEWIRE_MOE_PAYLOAD_SAME, ...)"
            ));
        }
    };
    config.layout = match given.layout {
        n::FUSEWIRE_MOE_EXPERT_MAJOR => MoeLayout::ExpertMajor,
        n::FUSEWIRE_MOE_RANK_MAJOR => MoeLayout::RankMajor,
        other => {
            return refuse(format!(
                "layout {other} is unknown (FUSEWIRE_MOE_EXPERT_MAJOR, ...)"
            ));
        }
    };
    config.mode = match given.mode {
        n::FUSEWIRE_MOE_LOW_LATENCY => MoeMode::LowLatency,
        n::FUSEWIRE_MOE_HIGH_THROUGHPUT => MoeMode::HighThroughput,
        other => {
            return refuse(format!(
                "mode {other} is unknown (FUSEWIRE_MOE_LOW_LATENCY, ...)"
            ));
        }
    };
    config.results = match given.results {
        n::FUSEWIRE_MOE_RESULTS_SAME => MoeResults::Same,
        n::FUSEWIRE_MOE_RESULTS_FP8 => MoeResults::Fp8,
        other => {
            return refuse(format!(
                "results {other} is unknown (FUSEWIRE_MOE_RESULTS_SAME, ...)"
            ));
        }
    };
    config.staging = (given.staging != 0).then(|| size(given.staging));
    config.capacity = (given.capacity != 0).then(|| size(given.capacity));
    if given.alignment != 0 {
        config.alignment = size(given.alignment);
    }
    if given.in_flight != 0 {
        config.in_flight = given.in_flight as usize;
    }
    config.local_experts = (given.local_experts != 0).then_some(given.local_experts);
    config.blocks = given.blocks;
    Ok(config)
}
