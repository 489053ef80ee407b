//! A hook that writes one line per call.

use std::io::Write;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::{HookArguments, HookBuffer};

/// Writes calls to a sink.
pub(crate) struct Log<W> {
    sink: Mutex<W>,
    started: Instant,
}

impl<W: Write> Log<W> {
    pub(crate) fn new(sink: W) -> Self {
        Self {
            sink: Mutex::new(sink),
            started: Instant::now(),
        }
    }

    /// Writes the line of a call.
    pub(crate) fn write(&self, arguments: &HookArguments<'_>) {
        let line = line(arguments, self.started.elapsed().as_secs_f64());
        let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        let written = sink.write_all(line.as_bytes()).and_then(|()| sink.flush());
        if let Err(error) = written {
            tracing::warn!(%error, "a call could not be logged");
        }
    }
}

/// Returns the fields of a call, with torchcomms' names.
fn line(arguments: &HookArguments<'_>, seconds: f64) -> String {
    let HookArguments { comm, .. } = arguments;
    let counts = |list: &[HookBuffer<'_>]| {
        let counts: Vec<_> = list.iter().map(|buffer| buffer.len().to_string()).collect();
        counts.join(",")
    };
    let flag = |is_set| if is_set { "t" } else { "f" };
    let mut fields = vec![
        format!("+{seconds:.6}"),
        format!("comm={}", comm.name()),
        format!("rank={}", comm.rank()),
        format!("work_id={}", arguments.id),
        arguments.name.to_owned(),
        format!("in_count={}", counts(arguments.inputs)),
        format!("out_count={}", counts(arguments.outputs)),
    ];
    fields.extend(
        arguments
            .dtype
            .map(|dtype| format!("dtype={}", dtype.name())),
    );
    fields.extend(
        arguments
            .reduction
            .map(|code| format!("red_op={}", code.name())),
    );
    fields.extend(arguments.peer.map(|peer| format!("peer={peer}")));
    fields.push(format!("async_op={}", flag(arguments.is_async)));
    fields.push(format!("captured={}", flag(arguments.is_captured)));
    fields.push(format!("timeout={}", arguments.timeout.as_secs_f64()));
    fields.push(format!("algorithm={}\n", arguments.algorithm));
    fields.join("|")
}
