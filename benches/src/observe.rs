//! Measures the overhead of the flight recorder and of hooks. The measured operation is a barrier
//! of a single rank, which waits for no peer. The cases are: no recorder and no hooks, the
//! recorder, and hooks that do nothing.

use core::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Args;
use fusewire::store::MemoryStore;
use fusewire::{Communicator, Device, Options};

use crate::machine;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Rounds. Each round is short and measures every case once, so that other load affects all
    /// cases.
    #[arg(long, default_value_t = 401)]
    rounds: usize,
    /// Calls per case and round.
    #[arg(long, default_value_t = 2_000)]
    calls: u32,
    /// Appends the table to this file.
    #[arg(long)]
    out: Option<PathBuf>,
}

struct Case {
    name: &'static str,
    comm: Communicator,
    /// Nanoseconds per call, one value per round.
    times: Vec<f64>,
}

impl Case {
    fn new(name: &'static str, entries: usize, hooked: bool) -> Result<Self> {
        let mut options = Options::default();
        options.flight_recorder_entries = entries;
        let store = Arc::new(MemoryStore::new());
        let comm = Communicator::new(Device::Cpu, 0, 1, store, name, options)?;
        if hooked {
            comm.register_pre_hook(|_| {});
            comm.register_post_hook(|_| {});
        }
        Ok(Self {
            name,
            comm,
            times: Vec::new(),
        })
    }

    fn measure(&mut self, calls: u32) -> Result<()> {
        let start = Instant::now();
        for _ in 0..calls {
            self.comm.barrier()?;
        }
        let ns = start.elapsed().as_nanos() as f64 / f64::from(calls);
        self.times.push(ns);
        Ok(())
    }

    /// Returns lower quartile, median and upper quartile.
    fn quartiles(&self) -> [f64; 3] {
        let mut times = self.times.clone();
        times.sort_by(f64::total_cmp);
        [1, 2, 3].map(|quarter| times[(times.len() - 1) * quarter / 4])
    }
}

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    let core = *machine::cores()?.last().context("no core")?;
    machine::pin(core)?;
    let mut cases = [
        Case::new("neither", 0, false)?,
        Case::new("flight recorder, 2000 entries", 2000, false)?,
        Case::new("one empty hook before and after", 0, true)?,
        Case::new("both", 2000, true)?,
    ];
    for round in 0..=arguments.rounds {
        for case in &mut cases {
            case.measure(arguments.calls)?;
            if round == 0 {
                case.times.clear(); // the first round warms up
            }
        }
    }
    let mut text = String::new();
    writeln!(text, "{}, core {core}", machine::processor())?;
    writeln!(
        text,
        "Barrier of one rank, ns per call; {} rounds of {} calls.\n",
        arguments.rounds, arguments.calls
    )?;
    writeln!(
        text,
        "| | median | quartiles | lower quartile: more than neither |"
    )?;
    writeln!(text, "|---|---|---|---|")?;
    let [base, _, _] = cases[0].quartiles();
    for case in &cases {
        let [low, median, high] = case.quartiles();
        writeln!(
            text,
            "| {} | {median:.1} | {low:.1} to {high:.1} | {:.1} |",
            case.name,
            low - base
        )?;
    }
    print!("{text}");
    if let Some(path) = &arguments.out {
        let before = fs::read_to_string(path).unwrap_or_default();
        fs::write(path, before + &text).with_context(|| path.display().to_string())?;
    }
    for case in cases {
        case.comm.finalize()?;
    }
    Ok(())
}
