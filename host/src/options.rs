//! Defines the options of communicators and of calls, the reductions and the algorithms.

pub(crate) mod testing;

use core::str::FromStr;
use core::time::Duration;
use std::collections::BTreeMap;
use std::sync::Arc;

use fusewire_device::DType;
use fusewire_device::element::ReductionCode;

use self::testing::TestOptions;
use crate::algorithm::Algorithm;
use crate::device::Device;
use crate::store::Store;
use crate::{Error, Result};

/// Operation that combines the elements of all ranks.
///
/// Minimum and maximum of [`F32Index`](crate::F32Index) also find the index:
///
/// ```
/// use fusewire::{F32Index, Options, ReduceOp, run_threads};
///
/// let results = run_threads(2, &Options::default(), |comm| {
///     // The greatest logit of each rank, with its column.
///     let logits = [1.5, 4.0];
///     let mut best = [F32Index {
///         value: logits[comm.rank() as usize],
///         index: 100 * comm.rank() + 7,
///     }];
///     comm.all_reduce(&mut best, ReduceOp::Max)?;
///     Ok(best[0].index)
/// });
/// for result in results {
///     assert_eq!(result?, 107);
/// }
/// # Ok::<(), fusewire::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum in rank order. f16 and bf16 are added in f32 and rounded once.
    Sum,
    /// Product, in rank order.
    Product,
    /// Minimum; NaN propagates.
    Min,
    /// Maximum; NaN propagates.
    Max,
    /// Sum divided by the number of ranks; integers truncate.
    Average,
    /// Sum over the ranks, after each rank's elements have been multiplied by that rank's factor.
    /// [`Collective::with_factor`](crate::Collective::with_factor) takes the factor from device
    /// memory instead.
    PreMulSum(f64),
    /// Bitwise and. Integers only.
    BitAnd,
    /// Bitwise or. Integers only.
    BitOr,
    /// Bitwise exclusive or. Integers only.
    BitXor,
}

impl ReduceOp {
    /// Returns the code that kernels use.
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

    /// Returns the factor of [`ReduceOp::PreMulSum`] as the word that kernels take: the bits of an
    /// f64 if `dtype` is a float, otherwise an integer. Returns 0 for other reductions.
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

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        [
            Self::Auto,
            Self::Packet,
            Self::PacketTwoShot,
            Self::Signal,
            Self::TwoShot,
            Self::Nvls,
        ]
        .into_iter()
        .find(|algorithm| algorithm.name() == name)
        .ok_or_else(|| Error::InvalidArgument {
            operation: "algorithm",
            detail: format!(
                "\"{name}\" is none of auto, packet, packet_two_shot, signal, two_shot, nvls"
            ),
        })
    }
}

/// Guarantee about the bits of the results of reductions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Determinism {
    /// Results are bitwise identical on every rank, in every run and with every algorithm: ranks
    /// are reduced in rank order. Algorithms that cannot guarantee this are refused.
    #[default]
    Bitwise,
    /// Reductions may combine the ranks in any order. Permits the fastest algorithm.
    Any,
}

impl Determinism {
    /// Returns the reason why `algorithm` is refused, or `None` if it is allowed.
    /// [`Determinism::Bitwise`] refuses NVLS, which adds in the switch, for three reasons: the
    /// order of the additions may change from call to call; the switch rounds sums of f16 and bf16,
    /// so an average is rounded twice; a minimum or maximum is not guaranteed to propagate NaN.
    pub(crate) const fn refuses(self, algorithm: Algorithm) -> Option<&'static str> {
        match (self, algorithm) {
            (Self::Bitwise, Algorithm::Nvls) => Some(
                "algorithm nvls adds in the NVLink switch, in an order that may change from call \
                 to call, so bits may differ between runs and from other algorithms: create the \
                 communicator with determinism \"any\", or choose another algorithm",
            ),
            _ => None,
        }
    }
}

/// Selects how ranks on different hosts are connected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InterHost {
    /// [`InterHost::Proxy`] for ranks on the CPU, [`InterHost::Gloo`] for ranks on GPUs.
    #[default]
    Auto,
    /// Kernels reach ranks on other hosts by requests, which a proxy in each process sends over
    /// TCP. For ranks on the CPU.
    Proxy,
    /// Kernels run within each host, and Gloo connects the hosts. Supports collectives, `send` and
    /// `recv`; neither windows nor fused operations. Needs the feature `gloo`.
    Gloo,
}

impl InterHost {
    /// Returns true if Gloo connects the hosts of ranks on `device`.
    pub(crate) fn is_gloo(self, device: Device) -> bool {
        match self {
            Self::Auto => device.is_gpu(),
            Self::Proxy => false,
            Self::Gloo => true,
        }
    }
}

/// Least timeout of the rendezvous, unless [`Options::bootstrap_timeout`] is set.
const LEAST_BOOTSTRAP_TIMEOUT: Duration = Duration::from_secs(5);

/// Options of one call. See [`crate::Communicator::with_options`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallOptions {
    /// Timeout of the call's waits. `None` or zero selects the communicator's timeout.
    pub timeout: Option<Duration>,
    /// Algorithm of the call, if it supports the algorithm. `None` selects the communicator's
    /// ([`field@Options::algorithm`]). Must be equal on all ranks.
    pub algorithm: Option<Algorithm>,
    /// Tag of a send or receive. Messages between two ranks are matched in the order of the calls,
    /// not by tag. If the tags of sender and receiver differ, both fail with a mismatch: Fusewire's
    /// kernels compare a hash of 16 bits, and backends ignore the tag. `None` keeps the tag of the
    /// communicator value, which is 0 by default.
    pub tag: Option<u32>,
    /// Hints by name. [`CallOptions::HINTS`] lists the known hints. An unknown hint is logged as a
    /// warning.
    pub hints: BTreeMap<String, String>,
}

impl CallOptions {
    /// Names of the known hints. `algorithm` (`auto`, `packet`, `packet_two_shot`, `signal`,
    /// `two_shot` or `nvls`) must be equal on all ranks.
    pub const HINTS: &[&str] = &["algorithm"];

    /// Creates options without a timeout or hints.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the timeout.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = Some(timeout);
        self
    }

    /// Sets the algorithm.
    #[must_use]
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = Some(algorithm);
        self
    }

    /// Sets the tag of a send or receive.
    #[must_use]
    pub fn tag(mut self, tag: u32) -> Self {
        self.tag = Some(tag);
        self
    }

    /// Adds a hint.
    #[must_use]
    pub fn hint(mut self, name: &str, value: &str) -> Self {
        self.hints.insert(name.to_owned(), value.to_owned());
        self
    }
}

/// Options of a communicator. Options marked *Agreed* must be equal on all ranks. The ranks compare
/// them when they create the communicator.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// Timeout of every wait of an operation. Default: `FUSEWIRE_TIMEOUT_SECONDS`, then
    /// `TORCHCOMM_TIMEOUT_SECONDS`, then 600 s.
    pub timeout: Duration,
    /// Timeout of the rendezvous, in which the ranks find each other. `None` selects `timeout`, but
    /// at least 5 s, so that a short timeout of operations does not limit the start of the ranks.
    pub bootstrap_timeout: Option<Duration>,
    /// Algorithm of all_reduce and the fused norm. Calls that the algorithm does not support use
    /// [`Algorithm::Auto`]. [`Algorithm::Nvls`] also applies to reduce_scatter and all_gather.
    /// Default: [`Algorithm::Auto`]. Agreed.
    pub algorithm: Algorithm,
    /// Size in bytes of the staging area for input. The area for output has the same size. A round
    /// moves at most this many bytes. 0 selects the device's default: 1 MiB on a CPU, where the
    /// data of a round stays in caches, and 8 MiB on a GPU, where each round costs about 10 us.
    /// Agreed.
    pub staging_bytes: u64,
    /// Size of a packet slot in bytes. A rank has two slots per block and rank. If they exceed 256
    /// MiB together, the slots are made smaller. 0 selects the device's default: 32 KiB on a CPU,
    /// and 64 KiB on a GPU, where a slot then has room for a row of 16,380 bf16 elements. Agreed.
    pub packet_slot_bytes: u64,
    /// Size of a channel slot in bytes. A channel connects two ranks. Default: 64 KiB. Agreed.
    pub channel_slot_bytes: u64,
    /// Number of slots of a channel. Default: 4. Agreed.
    pub channel_depth: u64,
    /// Maximum number of blocks of a launch, at most 64. 0 selects the device's default: 1 on a
    /// CPU, and 16 on a GPU, which leaves the remaining SMs to computation. If a GPU cannot hold as
    /// many blocks of all of its ranks at the same time, all ranks use fewer;
    /// [`Communicator::options`](crate::Communicator::options) returns the number. More than 1
    /// block on a CPU is for tests: every block runs on a separate thread. Agreed.
    pub blocks: u32,
    /// Maximum number of blocks of a launch on a GPU that moves 4 MiB or more for an all_reduce,
    /// reduce, reduce_scatter, broadcast, all_gather, scatter, gather or all_to_all, at most 64. 0
    /// selects 32 if [`field@Options::blocks`] is 0, and otherwise as many as that field. Fewer
    /// than that field have no effect. Kernels of other crates never have more blocks than that
    /// field. As for that field, all ranks use fewer if a GPU cannot hold them. Agreed.
    pub large_blocks: u32,
    /// Number of threads of a block on a GPU: a multiple of 64, at most 512. 0 selects 512. Agreed.
    pub threads: u32,
    /// Guarantee about the bits of the results of reductions. Agreed.
    pub determinism: Determinism,
    /// Connection of ranks on different hosts. Agreed.
    pub inter_host: InterHost,
    /// If true, a watchdog ends the process after the communicator has failed. The watchdog first
    /// writes the failure and the flight record. Default: `TORCHCOMM_ABORT_ON_ERROR` if it is set.
    /// Otherwise true for [`crate::new_comm`], as in torchcomms, and false for
    /// [`crate::Communicator::new`], [`crate::Communicator::from_env`] and [`crate::run_threads`].
    pub abort_process_on_timeout_or_error: Option<bool>,
    /// If true, [`crate::Communicator::reconfigure`] can create the communicator again after a
    /// failure, and the watchdog never ends the process.
    pub enable_reconfigure: bool,
    /// Store for the rendezvous. `None` selects the store that the environment variables specify.
    /// Only [`crate::new_comm`] and [`crate::Communicator::adopt`] read this field.
    pub store: Option<Arc<dyn Store>>,
    /// Rank and size. `None` selects the values in the environment variables. Only
    /// [`crate::new_comm`] reads this field.
    pub rank_size: Option<(u32, u32)>,
    /// Gives the communicator's own stream a high priority ([`StreamPriority::High`]), so that its
    /// pending blocks are scheduled before those of a GEMM. On AMD GPUs, which have no priority
    /// between the default and the highest, kernels of this stream can delay an abort. The CPU has
    /// no priorities.
    /// Default: false.
    ///
    /// [`StreamPriority::High`]: crate::StreamPriority::High
    pub high_priority_stream: bool,
    /// Number of operations that the flight recorder keeps; 0 disables the recorder. Default:
    /// `TORCHCOMM_FR_BUFFER_SIZE`, or 2000.
    pub flight_recorder_entries: usize,
    /// Maximum size in bytes of an object in the object collectives. Default: 64 MiB. Agreed.
    pub max_object_bytes: u64,
    /// Options for tests. Not a stable interface.
    #[doc(hidden)]
    pub testing: TestOptions,
    /// Hints by name, as torchcomms programs pass them. [`Options::HINTS`] lists the known hints.
    /// An unknown hint is logged as a warning.
    pub hints: BTreeMap<String, String>,
}

impl Options {
    /// Returns the timeout of the rendezvous.
    pub(crate) fn rendezvous_timeout(&self) -> Duration {
        let given = self.bootstrap_timeout.filter(|timeout| !timeout.is_zero());
        given.unwrap_or(self.timeout.max(LEAST_BOOTSTRAP_TIMEOUT))
    }

    /// Returns the number of ranks of a team that reach each other by load and store, of `size`
    /// ranks.
    pub(crate) fn team(&self, size: u32) -> u32 {
        self.testing.network.map_or(size, |network| network.team)
    }

    /// Names of the known hints: `algorithm`, `staging_bytes`, `packet_slot_bytes`,
    /// `channel_slot_bytes`, `channel_depth`, `determinism` (`bitwise` or `any`), `inter_host`
    /// (`auto`, `proxy` or `gloo`), `library_path`
    /// (path of the library that backend `nccl`, `ncclx`, `rccl` or `rcclx` loads),
    /// `is_high_priority_stream` (`high_priority_stream`), and `max_event_pool_size`, which has no
    /// effect, because the streams of this library reuse their events.
    ///
    /// `hostname` and `interface` choose the address of backend `gloo`. The names of values of
    /// `ncclConfig_t`, such as `minCTAs`, configure backend `nccl`, `ncclx`, `rccl` or `rcclx`.
    pub const HINTS: &[&str] = &[
        "algorithm",
        "staging_bytes",
        "packet_slot_bytes",
        "channel_slot_bytes",
        "channel_depth",
        "determinism",
        "inter_host",
        "library_path",
        "is_high_priority_stream",
        "max_event_pool_size",
        "hostname",
        "interface",
        "cga_cluster_size",
        "cgaClusterSize",
        "minCTAs",
        "maxCTAs",
        "netName",
        "splitShare",
        "trafficClass",
        "commName",
        "collnetEnable",
        "CTAPolicy",
        "shrinkShare",
        "nvlsCTAs",
        "nChannelsPerNetPeer",
        "nvlinkCentricSched",
    ];

    /// Returns the options with the known hints applied. Logs a warning for every unknown hint.
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
                "inter_host" => {
                    self.inter_host = match value.as_str() {
                        "auto" => InterHost::Auto,
                        "proxy" => InterHost::Proxy,
                        "gloo" => InterHost::Gloo,
                        _ => return Err(wrong("neither auto nor proxy nor gloo")),
                    };
                }
                "max_event_pool_size" => drop(number()?),
                "is_high_priority_stream" => {
                    self.high_priority_stream =
                        parse_flag(value).ok_or_else(|| wrong("neither 1 nor 0"))?;
                }
                known if Self::HINTS.contains(&known) => {}
                _ => warn_unknown_hint(name, Self::HINTS),
            }
        }
        Ok(self)
    }
}

/// Functions that set one option each, for chains of calls.
///
/// ```
/// use core::time::Duration;
/// use fusewire::{Determinism, Options};
///
/// let options = Options::new()
///     .timeout(Duration::from_secs(30))
///     .determinism(Determinism::Any)
///     .hint("max_event_pool_size", "1000");
/// assert_eq!(options.timeout.as_secs(), 30);
/// ```
impl Options {
    /// Creates the default options.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the timeout of every wait ([`field@Options::timeout`]).
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the timeout of the rendezvous ([`field@Options::bootstrap_timeout`]).
    #[must_use]
    pub fn bootstrap_timeout(mut self, timeout: Duration) -> Self {
        self.bootstrap_timeout = Some(timeout);
        self
    }

    /// Sets the algorithm of all_reduce and the fused norm ([`field@Options::algorithm`]).
    #[must_use]
    pub fn algorithm(mut self, algorithm: Algorithm) -> Self {
        self.algorithm = algorithm;
        self
    }

    /// Sets the size of each staging area ([`field@Options::staging_bytes`]).
    #[must_use]
    pub fn staging_bytes(mut self, staging_bytes: u64) -> Self {
        self.staging_bytes = staging_bytes;
        self
    }

    /// Sets the size of a packet slot ([`field@Options::packet_slot_bytes`]).
    #[must_use]
    pub fn packet_slot_bytes(mut self, packet_slot_bytes: u64) -> Self {
        self.packet_slot_bytes = packet_slot_bytes;
        self
    }

    /// Sets the size of a channel slot ([`field@Options::channel_slot_bytes`]).
    #[must_use]
    pub fn channel_slot_bytes(mut self, channel_slot_bytes: u64) -> Self {
        self.channel_slot_bytes = channel_slot_bytes;
        self
    }

    /// Sets the number of slots of a channel ([`field@Options::channel_depth`]).
    #[must_use]
    pub fn channel_depth(mut self, channel_depth: u64) -> Self {
        self.channel_depth = channel_depth;
        self
    }

    /// Sets the maximum number of blocks of a launch ([`field@Options::blocks`]).
    #[must_use]
    pub fn blocks(mut self, blocks: u32) -> Self {
        self.blocks = blocks;
        self
    }

    /// Sets the maximum number of blocks of a launch that moves 4 MiB or more
    /// ([`field@Options::large_blocks`]).
    #[must_use]
    pub fn large_blocks(mut self, large_blocks: u32) -> Self {
        self.large_blocks = large_blocks;
        self
    }

    /// Sets the number of threads of a block on a GPU ([`field@Options::threads`]).
    #[must_use]
    pub fn threads(mut self, threads: u32) -> Self {
        self.threads = threads;
        self
    }

    /// Sets the connection of ranks on different hosts ([`field@Options::inter_host`]).
    #[must_use]
    pub fn inter_host(mut self, inter_host: InterHost) -> Self {
        self.inter_host = inter_host;
        self
    }

    /// Sets the guarantee about the bits of results ([`field@Options::determinism`]).
    #[must_use]
    pub fn determinism(mut self, determinism: Determinism) -> Self {
        self.determinism = determinism;
        self
    }

    /// Sets the store of the rendezvous ([`field@Options::store`]).
    #[must_use]
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// Sets the number of operations that the flight recorder keeps
    /// ([`field@Options::flight_recorder_entries`]).
    #[must_use]
    pub fn flight_recorder_entries(mut self, flight_recorder_entries: usize) -> Self {
        self.flight_recorder_entries = flight_recorder_entries;
        self
    }

    /// Sets the maximum size of an object ([`field@Options::max_object_bytes`]).
    #[must_use]
    pub fn max_object_bytes(mut self, max_object_bytes: u64) -> Self {
        self.max_object_bytes = max_object_bytes;
        self
    }

    /// Sets this rank's number and the number of ranks ([`field@Options::rank_size`]).
    #[must_use]
    pub fn rank_size(mut self, rank: u32, size: u32) -> Self {
        self.rank_size = Some((rank, size));
        self
    }

    /// Makes a watchdog end the process after a failure
    /// ([`field@Options::abort_process_on_timeout_or_error`]).
    #[must_use]
    pub fn abort_process_on_timeout_or_error(mut self) -> Self {
        self.abort_process_on_timeout_or_error = Some(true);
        self
    }

    /// Returns failures as errors and never ends the process, whatever the environment says.
    #[must_use]
    pub fn return_errors(mut self) -> Self {
        self.abort_process_on_timeout_or_error = Some(false);
        self
    }

    /// Permits [`crate::Communicator::reconfigure`] after a failure
    /// ([`field@Options::enable_reconfigure`]).
    #[must_use]
    pub fn enable_reconfigure(mut self) -> Self {
        self.enable_reconfigure = true;
        self
    }

    /// Gives the communicator's own stream a high priority
    /// ([`field@Options::high_priority_stream`]).
    #[must_use]
    pub fn high_priority_stream(mut self) -> Self {
        self.high_priority_stream = true;
        self
    }

    /// Adds a hint ([`Options::HINTS`]).
    #[must_use]
    pub fn hint(mut self, name: &str, value: &str) -> Self {
        self.hints.insert(name.to_owned(), value.to_owned());
        self
    }
}

/// Logs a warning for an unknown hint.
pub(crate) fn warn_unknown_hint(name: &str, known: &[&str]) {
    warn_user(&format!(
        "unknown hint \"{name}\" is ignored; known are {}",
        known.join(", ")
    ));
}

/// Logs a warning about a mistake of the program. Prints it if the program has no subscriber for
/// logs.
pub(crate) fn warn_user(text: &str) {
    match tracing::dispatcher::has_been_set() {
        true => tracing::warn!("{text}"),
        false => eprintln!("fusewire: warning: {text}"),
    }
}

/// Variables that name the default timeout.
const TIMEOUT_VARIABLES: [&str; 2] = ["FUSEWIRE_TIMEOUT_SECONDS", "TORCHCOMM_TIMEOUT_SECONDS"];

fn parse_seconds(value: &str) -> Option<f64> {
    let seconds = value.parse::<f64>().ok()?;
    (seconds > 0.0 && seconds < 1e9).then_some(seconds)
}

/// Refuses values of environment variables that cannot be parsed. [`Options::default`] and the
/// flight recorder ignore such values.
pub(crate) fn check_environment() -> Result<()> {
    let refuse = |name: &str, value: &str, needed: &str| {
        Err(Error::bootstrap(format!(
            "the environment variable {name} is \"{value}\"; it must be {needed}, or be unset"
        )))
    };
    let value = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    for name in TIMEOUT_VARIABLES {
        if let Some(value) = value(name)
            && parse_seconds(&value).is_none()
        {
            return refuse(name, &value, "a number of seconds greater than 0");
        }
    }
    for name in [
        "TORCHCOMM_ABORT_ON_ERROR",
        "TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME",
    ] {
        if let Some(value) = value(name)
            && parse_flag(&value).is_none()
        {
            return refuse(name, &value, "1 or 0");
        }
    }
    let name = "TORCHCOMM_FR_BUFFER_SIZE";
    if let Some(value) = value(name)
        && value.parse::<usize>().is_err()
    {
        return refuse(name, &value, "a number of operations");
    }
    Ok(())
}

/// Parses a boolean environment variable.
pub(crate) fn flag(name: &str) -> Option<bool> {
    parse_flag(&std::env::var(name).ok()?)
}

/// Parses a boolean: `1` or `0`, `true` or `false`, and their usual synonyms.
fn parse_flag(value: &str) -> Option<bool> {
    match value.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" | "y" | "t" => Some(true),
        "0" | "false" | "no" | "off" | "n" | "f" => Some(false),
        _ => None,
    }
}

impl Default for Options {
    fn default() -> Self {
        let seconds = TIMEOUT_VARIABLES.into_iter().find_map(|name| {
            let value = std::env::var(name).ok()?;
            parse_seconds(&value)
        });
        Self {
            timeout: Duration::from_secs_f64(seconds.unwrap_or(600.0)),
            bootstrap_timeout: None,
            algorithm: Algorithm::Auto,
            staging_bytes: 0,
            packet_slot_bytes: 0,
            channel_slot_bytes: 64 << 10,
            channel_depth: 4,
            blocks: 0,
            large_blocks: 0,
            threads: 0,
            determinism: Determinism::Bitwise,
            inter_host: InterHost::Auto,
            abort_process_on_timeout_or_error: flag("TORCHCOMM_ABORT_ON_ERROR"),
            enable_reconfigure: false,
            high_priority_stream: false,
            store: None,
            rank_size: None,
            flight_recorder_entries: std::env::var("TORCHCOMM_FR_BUFFER_SIZE")
                .ok()
                .and_then(|entries| entries.parse().ok())
                .unwrap_or(2000),
            max_object_bytes: 64 << 20,
            testing: TestOptions::default(),
            hints: BTreeMap::new(),
        }
    }
}
