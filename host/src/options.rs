//! Options of a communicator, reductions, and the choice of an algorithm.

use core::fmt;
use core::str::FromStr;
use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::Arc;

use fusewire_device::DType;
use fusewire_device::element::ReductionCode;

use crate::store::Store;
use crate::{Error, Result};

/// How elements of all ranks become one.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum, in rank order; small floats in f32, rounded once.
    Sum,
    /// Product, in rank order.
    Product,
    /// Minimum; NaN propagates.
    Min,
    /// Maximum; NaN propagates.
    Max,
    /// Sum divided by the number of ranks; integers truncate.
    Average,
    /// Sum of each rank's elements times that rank's factor.
    PreMulSum(f64),
    /// Bitwise and; integers only.
    BitAnd,
    /// Bitwise or; integers only.
    BitOr,
    /// Bitwise exclusive or; integers only.
    BitXor,
}

impl ReduceOp {
    /// The code that kernels know.
    pub const fn code(self) -> ReductionCode {
        match self {
            Self::Sum => ReductionCode::Sum,
            Self::Product => ReductionCode::Product,
            Self::Min => ReductionCode::Min,
            Self::Max => ReductionCode::Max,
            Self::Average => ReductionCode::Average,
            Self::PreMulSum(_) => ReductionCode::PreMulSum,
            Self::BitAnd => ReductionCode::BitAnd,
            Self::BitOr => ReductionCode::BitOr,
            Self::BitXor => ReductionCode::BitXor,
        }
    }

    /// The scalar word for elements of `dtype`: f64 bits for floats, the integer otherwise.
    pub(crate) fn scalar(self, dtype: DType) -> u64 {
        match self {
            Self::PreMulSum(factor) if dtype.is_integer() => factor as i64 as u64,
            Self::PreMulSum(factor) => factor.to_bits(),
            _ => 0,
        }
    }
}

impl FromStr for ReduceOp {
    type Err = Error;

    /// Parses `sum`, `product`, `min`, `max`, `average` (`avg`), `premul_sum` (factor 0.5), `band`,
    /// `bor`, `bxor`.
    fn from_str(name: &str) -> Result<Self> {
        Ok(match name {
            "sum" => Self::Sum,
            "product" | "prod" => Self::Product,
            "min" => Self::Min,
            "max" => Self::Max,
            "average" | "avg" => Self::Average,
            "premul_sum" => Self::PreMulSum(0.5),
            "band" => Self::BitAnd,
            "bor" => Self::BitOr,
            "bxor" => Self::BitXor,
            _ => {
                return Err(Error::InvalidArgument {
                    operation: "reduction",
                    detail: format!(
                        "\"{name}\" is none of sum, product, min, max, average, premul_sum, band, \
                         bor, bxor"
                    ),
                });
            }
        })
    }
}

/// How an operation is carried out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum Algorithm {
    /// The plan chooses by operation, size and type.
    #[default]
    Auto = 0,
    /// One hop by packets; small all_reduce only.
    Packet = 1,
    /// One hop by signals: every rank reads every rank's input.
    Signal = 2,
    /// Two hops: shards are reduced, then gathered.
    TwoShot = 3,
    /// Data is pulled from the peers (movements).
    Pull = 4,
    /// A credited channel (send and receive).
    Channel = 5,
    /// Another library's, which the communicator's backend is.
    HandOff = 6,
    /// By multicast (NVLink SHARP): the switch adds and copies. Of all_reduce, reduce_scatter and
    /// all_gather; needs [`Determinism::Any`]. Memory of which a rank has some at another offset,
    /// or in no window, goes the ordinary way in the same launch. The CPU emulates it, one rank
    /// after the other.
    Nvls = 7,
}

impl Algorithm {
    /// Name, as in `--algorithm`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Packet => "packet",
            Self::Signal => "signal",
            Self::TwoShot => "two_shot",
            Self::Pull => "pull",
            Self::Channel => "channel",
            Self::HandOff => "handed off",
            Self::Nvls => "nvls",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        [
            Self::Auto,
            Self::Packet,
            Self::Signal,
            Self::TwoShot,
            Self::Nvls,
        ]
        .into_iter()
        .find(|algorithm| algorithm.name() == name)
        .ok_or_else(|| Error::InvalidArgument {
            operation: "algorithm",
            detail: format!("\"{name}\" is none of auto, packet, signal, two_shot, nvls"),
        })
    }
}

/// What a reduction promises about its bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Determinism {
    /// The same bits on every rank, in every run, by every algorithm: ranks are reduced in rank
    /// order. A route that cannot promise it is refused.
    #[default]
    Bitwise,
    /// Any order of the ranks; the fastest route.
    Any,
}

impl Determinism {
    /// Why `algorithm` cannot be had, if it cannot: NVLS adds in the switch, in an order that is
    /// the switch's own and may change from call to call; it hands sums of f16 and bf16 back
    /// rounded, so that an average is rounded twice; and what it makes of NaN in a minimum or
    /// maximum is not promised.
    pub(crate) const fn refuses(self, algorithm: Algorithm) -> Option<&'static str> {
        match (self, algorithm) {
            (Self::Bitwise, Algorithm::Nvls) => Some(
                "algorithm nvls lets the NVLink switch add, in an order of its own, so bits may \
                    differ between runs \
                 and from other algorithms: make the communicator with determinism \"any\", or choose another algorithm",
            ),
            _ => None,
        }
    }
}

/// The way in which the blocks of ranks that share a GPU become resident at the same time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum GridMode {
    /// Each rank launches its own grids, as on a GPU of its own. Creating the communicator checks
    /// that the blocks of all ranks fit on the GPU together. The GPU may still run the grids in
    /// sequence.
    #[default]
    Separate,
    /// The blocks of all ranks run in a multi-rank grid, which is resident as a whole: for tests
    /// and sanitizers. The ranks must be threads of one process and share one GPU, and there must
    /// be an image of the kernels' grid forms (`fusewire-build build --multi-rank-grid`).
    ///
    /// A collective is launched when all ranks have called it. Until then every caller blocks, also
    /// in an `_async` form, and all ranks must call the collectives of all their communicators in
    /// one order. Operations that not all ranks launch (send, recv, batches, windows, user kernels)
    /// run as with [`GridMode::Separate`]. Collectives cannot be captured.
    MultiRankGrid,
}

/// Options of one call: see [`crate::Communicator::with_options`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallOptions {
    /// Bound of the call's waits; the communicator's where it is `None` or zero.
    pub timeout: Option<Duration>,
    /// Hints by name; the known ones are [`CallOptions::HINTS`]. An unknown one is reported as a
    /// warning.
    pub hints: BTreeMap<String, String>,
}

impl CallOptions {
    /// The hints that a call knows: `algorithm` (`auto`, `packet`, `signal`, `two_shot` or `nvls`;
    /// the same on all ranks).
    pub const HINTS: &[&str] = &["algorithm"];

    /// No time-out of its own, no hints.
    pub fn new() -> Self {
        Self::default()
    }

    /// With a time-out.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// With a hint.
    #[must_use]
    pub fn hint(mut self, name: &str, value: &str) -> Self {
        self.hints.insert(name.to_owned(), value.to_owned());
        self
    }
}

/// Options of a communicator. Those marked *agreed* must be equal on all ranks; bootstrap compares
/// them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Bound of every wait, and of bootstrap. Default 600 s, or `FUSEWIRE_TIMEOUT_SECONDS`, or
    /// `TORCHCOMM_TIMEOUT_SECONDS`.
    pub timeout: Duration,
    /// All_reduce (with [`Algorithm::Nvls`] reduce_scatter and all_gather, too) by this algorithm
    /// where it can; default [`Algorithm::Auto`]. Agreed.
    pub algorithm: Algorithm,
    /// Bytes of staging, for input and output each: what goes through it in one round. Agreed.
    pub staging_bytes: u64,
    /// Bytes of a packet slot. Agreed.
    pub packet_slot_bytes: u64,
    /// Bytes of a slot of a channel between two ranks. Agreed.
    pub channel_slot_bytes: u64,
    /// Slots of a channel between two ranks. Agreed.
    pub channel_depth: u64,
    /// Blocks of a launch, 64 at most; 0 for the device's default: 1 on a CPU, where more run on
    /// threads of their own (tests), 16 on a GPU, whose other multiprocessors are left to
    /// computation. Agreed.
    pub blocks: u32,
    /// Lanes of a block on the CPU: 1 in production; 32 or 64 run every lane as a thread (tests).
    /// Agreed.
    pub lanes: u32,
    /// Threads of a block on a GPU: a multiple of 64, 512 at most; 0 for 512. Agreed.
    pub threads: u32,
    /// Polls of a wait before it gives the core away; default by the number of cores and ranks.
    pub spins: Option<u32>,
    /// Epochs start here (tests of wrapping); default 0. Agreed.
    pub first_epoch: u64,
    /// What reductions promise about their bits. Agreed.
    pub determinism: Determinism,
    /// The mode of launches by ranks that share a GPU; default [`GridMode::Separate`]. All ranks
    /// must agree.
    pub grid_mode: GridMode,
    /// Whether a watchdog ends the process (after writing the failure and the flight record) when
    /// the communicator has failed. Default: `TORCHCOMM_ABORT_ON_ERROR` where it is set. Where it
    /// is not, [`crate::new_comm`] takes torchcomms' default, which is yes; the constructors that
    /// give errors to Rust callers take no.
    pub abort_process_on_timeout_or_error: Option<bool>,
    /// Whether the communicator is made by [`crate::Communicator::reconfigure`] after a failure;
    /// the watchdog then never ends the process.
    pub enable_reconfigure: bool,
    /// Store for the rendezvous; the environment's store if it is `None`. For [`crate::new_comm`].
    pub store: Option<Arc<dyn Store>>,
    /// Rank and size; the environment's where it is `None`. For [`crate::new_comm`].
    pub rank_size: Option<(u32, u32)>,
    /// Operations that the flight recorder keeps; 0 turns it off. Default
    /// `TORCHCOMM_FR_BUFFER_SIZE`, or 2000.
    pub flight_recorder_entries: usize,
    /// Most bytes of an object that the object collectives send or receive; default 64 MiB. Agreed.
    pub max_object_bytes: u64,
    /// Hints by name, as torchcomms' programs give them: [`Options::HINTS`] are known; an unknown
    /// one is reported as a warning.
    pub hints: BTreeMap<String, String>,
}

impl Options {
    /// The hints that a communicator knows: `algorithm`, `staging_bytes`, `packet_slot_bytes`,
    /// `channel_slot_bytes`, `channel_depth`, `determinism` (`bitwise` or `any`), `library_path`
    /// (the file that backend `nccl`, `ncclx`, `rccl` or `rcclx` opens), and
    /// `is_high_priority_stream`, `max_event_pool_size`, which the CPU device has no use for.
    pub const HINTS: &[&str] = &[
        "algorithm",
        "staging_bytes",
        "packet_slot_bytes",
        "channel_slot_bytes",
        "channel_depth",
        "determinism",
        "library_path",
        "is_high_priority_stream",
        "max_event_pool_size",
    ];

    /// These options with the known hints applied; unknown ones are warned of.
    pub(crate) fn with_hints_applied(mut self) -> Result<Self> {
        for (name, value) in &self.hints {
            let wrong = |what: &str| Error::InvalidArgument {
                operation: "new_comm",
                detail: format!("hint {name}=\"{value}\": {what}"),
            };
            let number = || value.parse::<u64>().map_err(|_| wrong("not a number"));
            match name.as_str() {
                "algorithm" => self.algorithm = value.parse()?,
                "staging_bytes" => self.staging_bytes = number()?,
                "packet_slot_bytes" => self.packet_slot_bytes = number()?,
                "channel_slot_bytes" => self.channel_slot_bytes = number()?,
                "channel_depth" => self.channel_depth = number()?,
                "determinism" => {
                    self.determinism = match value.as_str() {
                        "bitwise" => Determinism::Bitwise,
                        "any" => Determinism::Any,
                        _ => return Err(wrong("neither bitwise nor any")),
                    };
                }
                known if Self::HINTS.contains(&known) => {}
                _ => warn_unknown_hint(name, Self::HINTS),
            }
        }
        Ok(self)
    }
}

/// Warns of an unknown hint.
pub(crate) fn warn_unknown_hint(name: &str, known: &[&str]) {
    tracing::warn!(
        "unknown hint \"{name}\" is ignored; known are {}",
        known.join(", ")
    );
}

/// Whether an environment variable says yes or no.
pub(crate) fn flag(name: &str) -> Option<bool> {
    let value = std::env::var(name).ok()?;
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" | "y" | "t" => Some(true),
        "0" | "false" | "no" | "off" | "n" | "f" => Some(false),
        _ => None,
    }
}

impl Default for Options {
    fn default() -> Self {
        let seconds = ["FUSEWIRE_TIMEOUT_SECONDS", "TORCHCOMM_TIMEOUT_SECONDS"]
            .into_iter()
            .find_map(|name| std::env::var(name).ok()?.parse::<f64>().ok())
            .filter(|seconds| seconds.is_finite() && *seconds > 0.0 && *seconds < 1e9);
        Self {
            timeout: Duration::from_secs_f64(seconds.unwrap_or(600.0)),
            algorithm: Algorithm::Auto,
            staging_bytes: 1 << 20,
            packet_slot_bytes: 32 << 10,
            channel_slot_bytes: 64 << 10,
            channel_depth: 4,
            blocks: 0,
            lanes: 1,
            threads: 0,
            spins: None,
            first_epoch: 0,
            determinism: Determinism::Bitwise,
            grid_mode: GridMode::Separate,
            abort_process_on_timeout_or_error: flag("TORCHCOMM_ABORT_ON_ERROR"),
            enable_reconfigure: false,
            store: None,
            rank_size: None,
            flight_recorder_entries: std::env::var("TORCHCOMM_FR_BUFFER_SIZE")
                .ok()
                .and_then(|entries| entries.parse().ok())
                .unwrap_or(2000),
            max_object_bytes: 64 << 20,
            hints: BTreeMap::new(),
        }
    }
}
