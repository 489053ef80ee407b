//! Output of the rows: as a table on the terminal, as JSON, and as a chart.

use core::cell::Cell;
use core::fmt::{Arguments, Display};
use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::Context;
use fusewire::{Algorithm, Communicator};
use serde::Serialize;

use super::operation::Kind;
use super::timing::{Samples, Timing};
use super::{Settings, plot};

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
        algorithm: Algorithm,
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
            algorithm: algorithm.name(),
            in_place,
            graph: settings.graph,
            timing: Timing::of(comm).name(),
            batch: samples.batch,
            iterations: times.len(),
            min_us: rounded(times[0]),
            median_us: rounded(median_us),
            p99_us: rounded(times[(times.len() * 99 / 100).min(times.len() - 1)]),
            algbw_gbps: rounded(algbw_gbps),
            busbw_gbps: rounded(algbw_gbps * kind.bus_factor(comm.size())),
            wrong,
        }
    }
}

/// Rounds to three decimals: microseconds to nanoseconds, and GB/s to MB/s.
fn rounded(value: f64) -> f64 {
    (value * 1e3).round() / 1e3
}

/// Collects rows. Rank 0 also prints each row when the row is complete.
pub(crate) struct Report<'a> {
    shown: bool,
    timing: Timing,
    settings: &'a Settings,
    rows: Vec<Row>,
    /// True after the reader of the table has closed the pipe.
    closed: Cell<bool>,
    /// True after a failure to write the table, other than a closed pipe, was reported.
    failed: Cell<bool>,
}

impl<'a> Report<'a> {
    pub(crate) fn new(comm: &Communicator, settings: &'a Settings) -> Self {
        let timing = Timing::of(comm);
        let report = Self {
            shown: comm.rank() == 0,
            timing,
            settings,
            rows: Vec::new(),
            closed: Cell::new(false),
            failed: Cell::new(false),
        };
        for note in &settings.notes {
            report.line(format_args!("# {note}"));
        }
        let registered = if settings.registered {
            "registered"
        } else {
            "ordinary"
        };
        let graph = if settings.graph { ", graph replay" } else { "" };
        report.line(format_args!(
            "# {} ranks, device {}, backend {}, {registered} buffers{graph}; times of the slowest \
                rank in us, bandwidth in GB/s",
            comm.size(),
            comm.device().name(),
            comm.backend()
        ));
        report.line(format_args!(
            "# timing: {}",
            timing.description(settings.graph)
        ));
        report.line(format_args!(
            "{:<20} {:>11} {:>10} {:>5} {:>10} {:>9}{} {:>10} {:>10} {:>10} {:>8} {:>8} {:>6}",
            "operation",
            "bytes",
            "count",
            "type",
            "op",
            "algorithm",
            report.batch_cell("n"),
            "min",
            "median",
            "p99",
            "algbw",
            "busbw",
            "wrong"
        ));
        report
    }

    /// Returns the cell of the column with the number of operations of a sample. The table has this
    /// column only if samples have several operations.
    fn batch_cell(&self, cell: impl Display) -> String {
        match self.timing {
            Timing::HostClock => String::new(),
            Timing::GpuEvents => format!(" {cell:>4}"),
        }
    }

    /// Prints a row and adds it to the rows.
    pub(crate) fn row(&mut self, row: Row) {
        let wrong = if self.settings.check {
            row.wrong.to_string()
        } else {
            "-".to_owned()
        };
        self.line(format_args!(
            "{:<20} {:>11} {:>10} {:>5} {:>10} {:>9}{} {:>10.2} {:>10.2} {:>10.2} {:>8.3} \
                {:>8.3} {:>6}",
            row.operation,
            row.bytes,
            row.count,
            row.dtype,
            row.redop,
            row.algorithm,
            self.batch_cell(row.batch),
            row.min_us,
            row.median_us,
            row.p99_us,
            row.algbw_gbps,
            row.busbw_gbps,
            wrong
        ));
        self.rows.push(row);
    }

    fn line(&self, line: Arguments<'_>) {
        if !self.shown {
            return;
        }
        let written = match &self.settings.json {
            Some(path) if is_stdout(path) => writeln!(std::io::stderr(), "{line}"),
            _ => writeln!(std::io::stdout(), "{line}"),
        };
        match written {
            Ok(()) => {}
            Err(error) if error.kind() == ErrorKind::BrokenPipe => self.closed.set(true),
            Err(error) => {
                if !self.failed.replace(true) {
                    super::complain(format_args!("the table cannot be written: {error}"));
                }
            }
        }
    }

    /// Returns true if the reader of the table has closed the pipe and neither JSON nor a chart was
    /// requested.
    pub(crate) fn is_unread(&self) -> bool {
        self.closed.get() && self.settings.json.is_none() && self.settings.plot.is_none()
    }

    /// Returns all rows.
    pub(crate) fn into_rows(self) -> Vec<Row> {
        self.rows
    }
}

/// Returns true if `path` stands for standard output.
pub(crate) fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

/// Writes the JSON and the chart, if they were requested.
pub(crate) fn write(settings: &Settings, rows: &[Row]) -> anyhow::Result<()> {
    if let Some(path) = &settings.json {
        let text = serde_json::to_string_pretty(rows)? + "\n";
        if is_stdout(path) {
            let written = std::io::stdout().write_all(text.as_bytes());
            // A closed pipe is not an error, because the reader needs no more output.
            if let Err(error) = written
                && error.kind() != ErrorKind::BrokenPipe
            {
                return Err(error).context("--json -");
            }
        } else {
            std::fs::write(path, text).with_context(|| format!("--json {}", path.display()))?;
        }
    }
    if let Some(path) = &settings.plot {
        plot::write(path, rows)?;
    }
    Ok(())
}
