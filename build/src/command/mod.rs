//! The subcommands of `fusewire-build`.

pub(crate) mod build;
pub(crate) mod bundle;
pub(crate) mod check;
pub(crate) mod doctor;
pub(crate) mod images;
pub(crate) mod new;

use core::sync::atomic::{AtomicUsize, Ordering};
use std::collections::BTreeSet;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::thread;

use fusewire_build::findings::Finding;
use fusewire_build::lines::Frame;
use fusewire_build::{Project, Result, Target, verify};

/// A subcommand.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Compiles a kernel crate for GPUs.
    Build(build::Arguments),
    /// Puts tests, benches and one script into a folder, for a machine with a GPU driver and no
    /// compiler.
    Bundle(bundle::Arguments),
    /// Compiles a kernel crate and verifies its images.
    Check(check::Arguments),
    /// Lists the tools that were found, and how to install missing ones.
    Doctor,
    /// Makes the portable images that the host library includes, or compares them with the sources.
    Images(images::Arguments),
    /// Makes a kernel crate that can be built, tested and checked.
    New(new::Arguments),
}

/// Options that select a kernel crate.
#[derive(Debug, clap::Args)]
pub(crate) struct CrateSelector {
    /// Folder of the kernel crate.
    #[arg(long = "crate", value_name = "PATH", conflicts_with = "package")]
    krate: Option<PathBuf>,
    /// A package of this workspace.
    #[arg(short, long, value_name = "NAME")]
    package: Option<String>,
}

impl CrateSelector {
    /// Selects the crate in a folder.
    pub(crate) fn folder(folder: PathBuf) -> Self {
        Self {
            krate: Some(folder),
            package: None,
        }
    }

    /// Returns the selected crate. Without a selection, returns this workspace's `fusewire-kernels`
    /// or, outside this workspace, the package in the current folder.
    pub(crate) fn project(&self) -> Result<Project> {
        match (&self.krate, &self.package) {
            (Some(folder), _) => Project::at(folder),
            (None, Some(name)) => Project::named(name),
            (None, None) => Project::named("fusewire-kernels")
                .or_else(|_| Project::at(std::path::Path::new("."))),
        }
    }
}

/// Calls `work` for every target, on one thread per core. Returns the results in the order of
/// `targets`.
pub(crate) fn each_target<T: Send>(
    targets: &[Target],
    work: impl Fn(Target) -> T + Sync,
) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        while let Some((index, &target)) = {
            let index = next.fetch_add(1, Ordering::Relaxed);
            targets.get(index).map(|target| (index, target))
        } {
            done.push((index, work(target)));
        }
        done
    };
    let mut all: Vec<(usize, T)> = thread::scope(|scope| {
        let workers: Vec<_> = (0..thread::available_parallelism().map_or(1, usize::from))
            .map(|_| scope.spawn(worker))
            .collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().unwrap_or_else(|panic| resume_unwind(panic)))
            .collect()
    });
    all.sort_by_key(|(index, _)| *index);
    all.into_iter().map(|(_, done)| done).collect()
}

/// Returns `path` relative to the current folder, or unchanged if it is outside that folder.
pub(crate) fn shown(path: &Path) -> &Path {
    std::env::current_dir()
        .ok()
        .and_then(|here| path.strip_prefix(here).ok())
        .unwrap_or(path)
}

/// Prints one violation per kernel and rule, or all violations if `verbose`, with their source
/// lines and advice.
pub(crate) fn print_findings(mark: &str, target: &str, findings: &[Finding], verbose: bool) {
    let mut groups: Vec<(&Finding, usize)> = Vec::new();
    for finding in findings {
        let violation = &finding.violation;
        let same = groups.iter_mut().find(|(first, _)| {
            let first = &first.violation;
            !verbose && first.rule == violation.rule && first.kernel == violation.kernel
        });
        match same {
            Some((_, count)) => *count += 1,
            None => groups.push((finding, 1)),
        }
    }
    let mut advised = BTreeSet::new();
    for (finding, count) in groups {
        let violation = &finding.violation;
        let detail: String = match verbose {
            true => violation.detail.clone(),
            false => violation.detail.chars().take(160).collect(),
        };
        let line = |frame: &Option<Frame>, before: &str, after: &str| match frame {
            Some(Frame { file, line }) => format!("{before}{file}:{line}{after}"),
            None => String::new(),
        };
        let more = match count {
            1 => String::new(),
            _ => format!(" (and {} more)", count - 1),
        };
        println!(
            "{mark} {target:<7} {}: {}: {}{detail}{}{more}",
            violation.rule,
            violation.kernel,
            line(&finding.line, "", ": "),
            line(&finding.branch, ", a branch at ", "")
        );
        let advice = verify::advice(violation.rule);
        if !advice.is_empty() && advised.insert(violation.rule) {
            println!("{:width$}help: {advice}", "", width = mark.len() + 1);
        }
    }
}
