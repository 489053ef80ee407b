//! Measures the cost of bounded waits. Runs the same program with two kinds of kernels: kernels
//! whose waits are bounded, and kernels compiled with `--cfg fusewire_unbounded`. The latter have
//! no timeout, abort word, failure record, progress, fingerprint or busy word.
//!
//! ```text
//! RUSTFLAGS='--cfg fusewire_unbounded' cargo build --release -p fusewire-benches \
//!     --target-dir target/unbounded
//! fusewire-benches wait-cost --unbounded target/unbounded/release/fusewire-benches
//!
//! fusewire-build build -p fusewire-kernels --unbounded --target sm_90 \
//!     --out target/unbounded/images
//! fusewire-benches wait-cost --device cuda --unbounded target/unbounded/images
//! ```
//!
//! The two kinds of kernels run in separate processes, which alternate round by round.

use core::fmt::Write as _;
use core::time::Duration;
use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use fusewire::Device;
use fusewire::gpu::images::{Images, LIBRARY_IMAGES};
use serde_json::Value;

use crate::machine;
use crate::measure::Schedule;
use crate::versus::{OwnProgram, size};
use crate::versus_cuda::statistics::{Interval, median, ratio};

/// Output of `fusewire-benches built`.
pub(crate) const BUILT: &str = if cfg!(fusewire_unbounded) {
    "unbounded"
} else {
    "bounded"
};

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DeviceKind {
    Cpu,
    Cuda,
}

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Device that runs the kernels.
    #[arg(long, value_enum, default_value_t = DeviceKind::Cpu)]
    device: DeviceKind,
    /// For the CPU: path of this program built with `--cfg fusewire_unbounded`. For a GPU: folder
    /// of images that `fusewire-build build --unbounded` wrote.
    #[arg(long, value_name = "PATH")]
    unbounded: PathBuf,
    /// Number of ranks. On the CPU at most the number of cores; on a GPU 2, 4 or 8.
    #[arg(long, default_value_t = 2)]
    ranks: usize,
    /// Sizes of the all_reduce of f32 sums in bytes, with suffix K or M for powers of 1024.
    #[arg(
        long,
        value_delimiter = ',',
        value_parser = size,
        default_value = "64,1K,8K,64K,1M,8M"
    )]
    sizes: Vec<usize>,
    /// Rounds. Each round runs both kinds once. With 6 or more rounds, the table has confidence
    /// intervals.
    #[arg(long, default_value_t = 21)]
    rounds: usize,
    /// GPU that all ranks share.
    #[arg(long, default_value_t = 0)]
    gpu: u32,
    /// Appends the table to this file.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Further arguments of `versus cuda`, which measures on a GPU.
    #[arg(last = true)]
    more: Vec<String>,
}

/// Algorithm and size in bytes, in the order of the table.
type Case = (String, usize);

/// Nanoseconds per call of each case in one run.
type Run = BTreeMap<Case, f64>;

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    ensure!(arguments.rounds > 0, "no rounds");
    let here = env::current_exe().context("this program's own path")?;
    ensure!(
        BUILT == "bounded",
        "this program is the one without bounds: start the other, with --unbounded {}",
        here.display()
    );
    let cores = machine::cores()?;
    let where_ = match arguments.device {
        DeviceKind::Cpu => {
            check_program(&arguments.unbounded)?;
            ensure!(
                (2..=cores.len()).contains(&arguments.ranks),
                "{} ranks on {} cores: an unbounded wait never yields its core; use at \
                 most one rank per core",
                arguments.ranks,
                cores.len()
            );
            machine::processor()
        }
        DeviceKind::Cuda => check_images(arguments)?,
    };
    let one = |unbounded: bool| match arguments.device {
        DeviceKind::Cpu => {
            let program = if unbounded {
                &arguments.unbounded
            } else {
                &here
            };
            on_cpu(arguments, program, &cores)
        }
        DeviceKind::Cuda => on_cuda(arguments, &here, unbounded),
    };
    let mut times: BTreeMap<Case, [Vec<f64>; 2]> = BTreeMap::new();
    for round in 0..arguments.rounds {
        // Rounds alternate the order, so that neither kind always runs first.
        let first = round % 2 == 1;
        let mut runs = [Run::new(), Run::new()];
        for unbounded in [first, !first] {
            let name = if unbounded { "unbounded" } else { "bounded" };
            runs[usize::from(unbounded)] =
                one(unbounded).with_context(|| format!("{name} waits"))?;
        }
        let [bounded, unbounded] = runs;
        for (case, with) in bounded {
            // Compares only cases that were measured with both kinds of kernels.
            if let Some(&without) = unbounded.get(&case) {
                let [all_with, all_without] = times.entry(case).or_default();
                all_with.push(with);
                all_without.push(without);
            }
        }
        eprintln!("round {} of {}", round + 1, arguments.rounds);
    }
    let text = table(arguments, &where_, &times)?;
    print!("{text}");
    if let Some(path) = &arguments.out {
        let before = fs::read_to_string(path).unwrap_or_default();
        fs::write(path, before + &text).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Checks that `program` was built without bounded waits. Otherwise the run would compare two
/// identical programs.
fn check_program(program: &Path) -> Result<()> {
    let output = Command::new(program)
        .arg("built")
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start {}", program.display()))?;
    let printed = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success() && printed.trim() == "unbounded",
        "{} is not built with RUSTFLAGS='--cfg fusewire_unbounded': `built` prints {:?}",
        program.display(),
        printed.trim()
    );
    Ok(())
}

/// Checks that the unbounded images exist and differ from the library's images. Returns a
/// description of the GPU.
fn check_images(arguments: &Arguments) -> Result<String> {
    let gpu = fusewire::open_gpu(Device::Cuda(arguments.gpu))?;
    let properties = gpu.properties();
    let folder = &arguments.unbounded;
    let given = Images::in_folders(&properties.architecture, vec![folder.clone()]);
    let given = given.find("all_reduce")?;
    let own = Images::in_folders(&properties.architecture, Vec::new());
    let own = own.without_cubins().library("all_reduce")?;
    ensure!(
        given.bytes != own.bytes,
        "the image of all_reduce in {} is the library's own: `fusewire-build build -p \
            fusewire-kernels --unbounded` makes others",
        folder.display()
    );
    Ok(format!(
        "{}, {}, driver {}; all ranks on it, graphs of 100 operations",
        properties.name, properties.architecture, properties.version
    ))
}

fn on_cpu(arguments: &Arguments, program: &Path, cores: &[usize]) -> Result<Run> {
    let schedule = Schedule::new(&arguments.sizes);
    let limit = Duration::from_secs(120);
    let mut run = Run::new();
    for algorithm in ["packet", "signal"] {
        let ours = OwnProgram {
            program,
            kind: "registered",
            algorithm,
            touch: false,
            is_pinned: true,
            memory: None,
        };
        let Some(figures) = ours.run(arguments.ranks, cores, &schedule, limit)? else {
            bail!("the ranks did not end within {} s", limit.as_secs());
        };
        for figure in figures {
            ensure!(figure.wrong == 0, "{} wrong elements", figure.wrong);
            let case = (algorithm.to_owned(), figure.bytes);
            run.insert(case, figure.median_ns as f64);
        }
    }
    Ok(run)
}

/// Runs `versus cuda` in a child process, with the bounded or the unbounded images.
fn on_cuda(arguments: &Arguments, program: &Path, unbounded: bool) -> Result<Run> {
    let folder = tempfile::tempdir()?;
    let json = folder.path().join("run.json");
    let sizes: Vec<_> = arguments.sizes.iter().map(usize::to_string).collect();
    let mut command = Command::new(program);
    // The unbounded images are PTX, so the bounded ones must be compiled from PTX, too.
    command.env("CUDA_FORCE_PTX_JIT", "1");
    command
        .args(["versus", "cuda", "--only", "all-reduce", "--types", "f32"])
        .args(["--modes", "graph", "--rounds", "3"])
        .args(["--gpu", &arguments.gpu.to_string()])
        .args(["--ranks", &arguments.ranks.to_string()])
        .args(["--sizes", &sizes.join(",")])
        .arg("--json")
        .arg(&json)
        .args(&arguments.more);
    match unbounded {
        true => command.env(LIBRARY_IMAGES, &arguments.unbounded),
        false => command.env_remove(LIBRARY_IMAGES),
    };
    let output = command.stdin(Stdio::null()).output()?;
    ensure!(
        output.status.success(),
        "versus cuda ended with {}: {}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    figures(&fs::read_to_string(&json)?)
}

/// Extracts Fusewire's medians from the output of `versus cuda --json`.
fn figures(text: &str) -> Result<Run> {
    let report: Value = serde_json::from_str(text)?;
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut run = Run::new();
    for row in list(&report["all_reduce"]) {
        let bytes = row["bytes"].as_u64().context("a row without bytes")? as usize;
        for figure in list(&row["figures"]) {
            let ns: Vec<f64> = list(&figure["ns"])
                .iter()
                .filter_map(Value::as_f64)
                .collect();
            let (Some("ours"), Some(name), Some(ns)) = (
                figure["side"].as_str(),
                figure["name"].as_str(),
                median(&ns),
            ) else {
                continue;
            };
            run.insert((name.to_owned(), bytes), ns);
        }
    }
    ensure!(!run.is_empty(), "the run has no figures of ours");
    Ok(run)
}

fn table(
    arguments: &Arguments,
    where_: &str,
    times: &BTreeMap<Case, [Vec<f64>; 2]>,
) -> Result<String> {
    let mut text = String::new();
    writeln!(text, "{where_}")?;
    writeln!(
        text,
        "All_reduce of f32, {} ranks; {} rounds, in each either kind of kernel runs in processes \
            of its own; us a call, median of \
         the rounds; ratio by round: median [95 % interval by order statistics].\n",
        arguments.ranks, arguments.rounds
    )?;
    writeln!(
        text,
        "| algorithm | bytes | bounded us | unbounded us | bounded / unbounded |"
    )?;
    writeln!(text, "|---|---|---|---|---|")?;
    for ((algorithm, bytes), [bounded, unbounded]) in times {
        let shown = |values: &[f64]| median(values).map(|ns| format!("{:.3}", ns / 1e3));
        let [with, without] =
            [bounded, unbounded].map(|values| shown(values).unwrap_or_else(|| "-".to_owned()));
        let by_round = match ratio(bounded, unbounded) {
            Some(Interval { median, low, high }) => format!("{median:.3} [{low:.3}, {high:.3}]"),
            None => "-".to_owned(),
        };
        writeln!(
            text,
            "| {algorithm} | {bytes} | {with} | {without} | {by_round} |"
        )?;
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_bounds_is_not_taken_for_one_without() {
        for (program, printed) in [("true", "prints \"\""), ("echo", "prints \"built\"")] {
            let error = check_program(Path::new(program)).expect_err("another program");
            assert!(error.to_string().contains(printed), "{error}");
        }
        assert!(check_program(Path::new("no-such-program")).is_err());
    }

    #[test]
    fn our_side_is_read_from_the_report() {
        let text = r#"{"all_reduce": [{"bytes": 512, "figures": [
            {"side": "ours", "name": "packets", "ns": [3.0, 1.0, 2.0]},
            {"side": "ours", "name": "left out", "ns": []},
            {"side": "theirs", "name": "packets_one_shot", "ns": [1.0]}]}]}"#;
        let run = figures(text).expect("a report");
        assert_eq!(
            run.into_iter().collect::<Vec<_>>(),
            [(("packets".to_owned(), 512), 2.0)]
        );
        assert!(figures(r#"{"all_reduce": []}"#).is_err());
    }
}
