//! What is shown and written: the table, JSON, the chart.

use fusewire::{Algorithm, Communicator};
use serde::Serialize;

use super::operation::Kind;
use super::{Settings, plot};

/// One row: an operation at a size.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) operation: &'static str,
    pub(crate) device: &'static str,
    pub(crate) backend: &'static str,
    pub(crate) ranks: u32,
    pub(crate) bytes: u64,
    pub(crate) count: usize,
    pub(crate) dtype: &'static str,
    pub(crate) redop: &'static str,
    pub(crate) algorithm: &'static str,
    pub(crate) in_place: bool,
    pub(crate) graph: bool,
    pub(crate) iterations: usize,
    pub(crate) min_us: f64,
    pub(crate) median_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) algbw_gbps: f64,
    pub(crate) busbw_gbps: f64,
    pub(crate) wrong: u64,
}

impl Row {
    #[allow(clippy::too_many_arguments)] // the columns
    pub(crate) fn new(
        settings: &Settings,
        kind: Kind,
        comm: &Communicator,
        count: usize,
        algorithm: Algorithm,
        in_place: bool,
        times: &mut [f64],
        wrong: u64,
    ) -> Self {
        times.sort_by(f64::total_cmp);
        let median_us = times[times.len() / 2];
        let bytes = kind.bytes(count, settings.dtype, comm.size());
        let algbw_gbps = bytes as f64 / (median_us * 1e3);
        let fused = kind == Kind::AllReduceRmsNorm;
        Self {
            operation: kind.name(),
            device: comm.device().name(),
            backend: comm.backend(),
            ranks: comm.size(),
            bytes,
            count,
            dtype: settings.dtype.name(),
            redop: if kind.reduces() {
                settings.op.code().name()
            } else if fused {
                "sum"
            } else {
                "none"
            },
            algorithm: algorithm.name(),
            in_place,
            graph: settings.graph,
            iterations: times.len(),
            min_us: times[0],
            median_us,
            p99_us: times[(times.len() * 99 / 100).min(times.len() - 1)],
            algbw_gbps,
            busbw_gbps: algbw_gbps * kind.bus_factor(comm.size()),
            wrong,
        }
    }
}

/// Collects rows; rank 0 prints them as they come.
pub(crate) struct Report<'a> {
    shown: bool,
    settings: &'a Settings,
    rows: Vec<Row>,
}

impl<'a> Report<'a> {
    pub(crate) fn new(shown: bool, settings: &'a Settings) -> Self {
        Self {
            shown,
            settings,
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub(crate) fn row(&mut self, row: Row) {
        if self.shown {
            if self.rows.is_empty() {
                println!(
                    "# {} ranks, device {}, {} buffers{}; times in us, bandwidth in GB/s",
                    row.ranks,
                    row.device,
                    if self.settings.registered {
                        "registered"
                    } else {
                        "ordinary"
                    },
                    if row.graph { ", graph replay" } else { "" }
                );
                println!(
                    "{:<20} {:>11} {:>10} {:>5} {:>8} {:>9} {:>10} {:>10} {:>10} {:>8} {:>8} {:>6}",
                    "operation",
                    "bytes",
                    "count",
                    "type",
                    "op",
                    "algorithm",
                    "min",
                    "median",
                    "p99",
                    "algbw",
                    "busbw",
                    "wrong"
                );
            }
            println!(
                "{:<20} {:>11} {:>10} {:>5} {:>8} {:>9} {:>10.2} {:>10.2} {:>10.2} {:>8.3} {:>8.3} {:>6}",
                row.operation,
                row.bytes,
                row.count,
                row.dtype,
                row.redop,
                row.algorithm,
                row.min_us,
                row.median_us,
                row.p99_us,
                row.algbw_gbps,
                row.busbw_gbps,
                if self.settings.check {
                    row.wrong.to_string()
                } else {
                    "-".to_owned()
                }
            );
        }
        self.rows.push(row);
    }

    /// Writes the files, on rank 0.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        if !self.shown {
            return Ok(());
        }
        if let Some(path) = &self.settings.json {
            std::fs::write(path, serde_json::to_string_pretty(&self.rows)? + "\n")?;
        }
        if let Some(path) = &self.settings.plot {
            plot::write(path, &self.rows)?;
        }
        Ok(())
    }
}
