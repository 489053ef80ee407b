//! A row of the output: an operation at a size.

use fusewire::Communicator;
use serde::Serialize;

use super::Settings;
use super::moe::ExpertLayer;
use super::operation::Kind;
use super::timing::{Samples, Timing};

/// One row: an operation at a size.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) operation: &'static str,
    pub(crate) device: &'static str,
    pub(crate) backend: String,
    pub(crate) ranks: u32,
    pub(crate) bytes: u64,
    pub(crate) count: usize,
    pub(crate) dtype: &'static str,
    pub(crate) redop: &'static str,
    pub(crate) algorithm: &'static str,
    /// Sizes of the layer, if the operation is part of a mixture of experts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) moe: Option<ExpertLayer>,
    pub(crate) in_place: bool,
    pub(crate) graph: bool,
    /// Method of measurement.
    pub(crate) timing: &'static str,
    /// Number of operations of a sample.
    pub(crate) batch: u64,
    /// Number of samples.
    pub(crate) iterations: usize,
    pub(crate) min_us: f64,
    pub(crate) median_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) algbw_gbps: f64,
    pub(crate) busbw_gbps: f64,
    pub(crate) wrong: u64,
}

impl Row {
    /// Creates a row. The times must be sorted and must not be empty.
    #[allow(clippy::too_many_arguments)] // the columns
    pub(crate) fn new(
        settings: &Settings,
        kind: Kind,
        comm: &Communicator,
        count: usize,
        algorithm: &'static str,
        in_place: bool,
        samples: &Samples,
        wrong: u64,
    ) -> Self {
        let times = &samples.times;
        let median_us = times[times.len() / 2];
        let bytes = kind.bytes(count, settings.dtype, comm.size());
        let algbw_gbps = bytes as f64 / (median_us * 1e3);
        Self {
            operation: kind.name(),
            device: comm.device().name(),
            backend: comm.backend().to_owned(),
            ranks: comm.size(),
            bytes,
            count,
            dtype: settings.dtype.name(),
            redop: if kind.reduces() {
                settings.op.code().name()
            } else if kind.is_norm() {
                "sum"
            } else {
                "none"
            },
            algorithm,
            moe: kind.layer(),
            in_place,
            graph: settings.graph,
            timing: Timing::of(comm).name(),
            batch: samples.batch,
            iterations: times.len(),
            min_us: rounded(times[0]),
            median_us: rounded(median_us),
            p99_us: rounded(times[(times.len() * 99 / 100).min(times.len() - 1)]),
            algbw_gbps: rounded(algbw_gbps),
            busbw_gbps: rounded(algbw_gbps * kind.bus_factor(count, comm.size())),
            wrong,
        }
    }
}

/// Rounds to three decimals: microseconds to nanoseconds, and GB/s to MB/s.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}
