//! Warnings for programs that have not set up `tracing`.

use core::fmt;
use std::io::Write;

/// Logs `message` as a `tracing` warning, and writes it to stderr if the program has no subscriber.
pub fn warn(message: impl fmt::Display) {
    tracing::warn!("{message}");
    if !tracing::dispatcher::has_been_set() {
        // A single write keeps the lines of several ranks from interleaving. The result is ignored,
        // because stderr may be closed.
        let line = format!("fusewire: {message}\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
}
