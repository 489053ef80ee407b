//! Output of the rows: as a table on the terminal, as JSON, and as a chart.

use core::cell::Cell;
use core::fmt::{Arguments, Display};
use std::io::{ErrorKind, Write};
use std::path::Path;

use anyhow::Context;
use fusewire::Communicator;

use super::row::Row;
use super::timing::Timing;
use super::{Settings, plot};

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
