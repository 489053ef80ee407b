//! Files of results: a header, tables, and handwritten sections that a later run keeps.

use core::fmt;
use std::process::Command;
use std::{env, path};

/// Machine, programs and options of a run.
#[derive(Debug)]
pub(crate) struct Header {
    command: String,
    date: String,
    lines: Vec<String>,
}

impl Header {
    /// Returns a header with this command, the date and `lines`.
    pub(crate) fn of(lines: Vec<String>) -> Self {
        let arguments = env::args().skip(1).map(|argument| {
            // Shows only the file name of a program.
            match argument.starts_with('/') {
                true => path::Path::new(&argument)
                    .file_name()
                    .map_or(argument.clone(), |name| name.to_string_lossy().into_owned()),
                false => argument,
            }
        });
        let arguments: Vec<_> = arguments.collect();
        let date = Command::new("date")
            .args(["-u", "+%Y-%m-%d %H:%M UTC"])
            .output();
        let date = date.map_or_else(
            |_| "unknown date".to_owned(),
            |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
        );
        Self {
            command: arguments.join(" "),
            date,
            lines,
        }
    }
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.date)?;
        writeln!(f)?;
        writeln!(f, "```text")?;
        writeln!(
            f,
            "cargo run --release --bin fusewire-benches -- {}",
            self.command
        )?;
        writeln!(f, "```")?;
        writeln!(f)?;
        for line in &self.lines {
            writeln!(f, "- {line}")?;
        }
        writeln!(f)
    }
}

/// Returns the content of a run's file. Keeps the handwritten sections of the `old` content.
pub(crate) fn document(old: &str, title: &str, header: &Header, tables: &str) -> String {
    let section = |name: &str, empty: &str| {
        let mut kept = String::new();
        let mut inside = false;
        for line in old.lines() {
            if let Some(title) = line.strip_prefix("## ") {
                inside = title.starts_with(name);
            }
            if inside {
                kept += line;
                kept.push('\n');
            }
        }
        match kept.trim() {
            "" => format!("## {name}\n\n{empty}"),
            kept => kept.to_owned(),
        }
    };
    let title = match old.lines().next() {
        Some(line) if line.starts_with("# ") => line,
        _ => title,
    };
    format!(
        "{title}\n\n{}\n\n## Measured\n\n{header}{tables}\n{}\n",
        section("Prediction", "To be written before the run."),
        section(
            "Explanation",
            "To be written: what differs from the prediction, and why."
        ),
    )
}
