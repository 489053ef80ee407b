//! Finds MPI installations, compiles a benchmark program for them and launches it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, bail};

use crate::measure::Schedule;

/// A program in C.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    /// Name of the program.
    name: &'static str,
    text: &'static str,
    flags: &'static [&'static str],
}

/// Measures all_reduce.
pub(crate) const ALL_REDUCE: Source = Source {
    name: "mpi_allreduce",
    text: include_str!("../c/mpi_allreduce.c"),
    flags: &["-O2"],
};

/// Measures dispatch and combine of a mixture of experts.
pub(crate) const MOE: Source = Source {
    name: "mpi_moe",
    text: include_str!("../c/mpi_moe.c"),
    flags: &["-O3", "-march=native", "-ffp-contract=off"],
};

/// MPI implementation, which determines launch options and settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flavour {
    Open,
    Mpich,
    Intel,
}

/// An installed MPI with the compiled program.
#[derive(Clone, Debug)]
pub(crate) struct Mpi {
    /// Name and version.
    pub(crate) name: String,
    flavour: Flavour,
    mpirun: PathBuf,
    program: PathBuf,
}

/// Compiler and launcher names that distribution packages install.
const PAIRS: [(&str, &str); 4] = [
    ("mpicc.openmpi", "mpirun.openmpi"),
    ("mpicc.mpich", "mpirun.mpich"),
    ("mpicc", "mpirun"),
    ("mpicc", "mpiexec"),
];

/// Compiles `source` into `folder` for the MPIs that the arguments name, or for every MPI found.
pub(crate) fn find(
    source: &Source,
    mpicc: &[PathBuf],
    mpirun: &[PathBuf],
    folder: &Path,
) -> Result<Vec<Mpi>> {
    let mut pairs = Vec::new();
    if mpicc.is_empty() && mpirun.is_empty() {
        pairs.extend(
            PAIRS
                .iter()
                .filter_map(|(mpicc, mpirun)| Some((in_path(mpicc)?, in_path(mpirun)?))),
        );
    }
    for index in 0..mpicc.len().max(mpirun.len()) {
        pairs.push(match (mpicc.get(index), mpirun.get(index)) {
            (Some(mpicc), Some(mpirun)) => (mpicc.clone(), mpirun.clone()),
            (Some(mpicc), None) => (mpicc.clone(), mpicc.with_file_name("mpirun")),
            (None, Some(mpirun)) => (mpirun.with_file_name("mpicc"), mpirun.clone()),
            (None, None) => continue,
        });
    }
    let mut found: Vec<Mpi> = Vec::new();
    for (mpicc, mpirun) in pairs {
        let (mpicc, mpirun) = (absolute(&mpicc)?, absolute(&mpirun)?);
        let (name, flavour) = version(&mpirun)?;
        if found.iter().any(|mpi| mpi.name == name) {
            continue;
        }
        let program = folder.join(format!("{}_{}", source.name, found.len()));
        let program = compile(source, &mpicc, &program)?;
        found.push(Mpi {
            name,
            flavour,
            mpirun,
            program,
        });
    }
    if found.is_empty() {
        bail!(
            "no MPI found; install one (apt-get install openmpi-bin libopenmpi-dev) or name it \
             by --mpicc PATH --mpirun PATH"
        );
    }
    Ok(found)
}

/// Returns the absolute path. Does not resolve links, because compiler wrappers depend on the name
/// by which they are called.
fn absolute(path: &Path) -> Result<PathBuf> {
    if path.components().count() == 1
        && let Some(name) = path.to_str()
        && let Some(found) = in_path(name)
    {
        return Ok(found);
    }
    std::path::absolute(path).with_context(|| format!("{}", path.display()))
}

fn in_path(name: &str) -> Option<PathBuf> {
    env::split_paths(&env::var_os("PATH")?)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}

/// Returns a command whose PATH begins with the program's folder. MPI installations outside PATH
/// need this.
fn in_its_folder(program: &Path) -> Command {
    let mut command = Command::new(program);
    let folder = program.parent().filter(|folder| folder.is_absolute());
    if let (Some(folder), Some(path)) = (folder, env::var_os("PATH")) {
        let all = core::iter::once(folder.to_owned()).chain(env::split_paths(&path));
        if let Ok(path) = env::join_paths(all) {
            command.env("PATH", path);
        }
        // Intel's scripts need I_MPI_ROOT; a value set by the user takes precedence.
        if let (Some(root), None) = (folder.parent(), env::var_os("I_MPI_ROOT")) {
            command.env("I_MPI_ROOT", root);
        }
    }
    command
}

fn version(mpirun: &Path) -> Result<(String, Flavour)> {
    let output = in_its_folder(mpirun)
        .arg("--version")
        .output()
        .with_context(|| format!("start {}", mpirun.display()))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    let number = |line: &str| {
        let digit = |word: &&str| word.starts_with(|c: char| c.is_ascii_digit());
        let word = line.split([' ', ',']).find(digit).unwrap_or("?");
        word.to_owned()
    };
    let line = |with: &str| text.lines().find(|line| line.contains(with));
    if let Some(line) = line("(Open MPI)").or_else(|| line("(OpenRTE)")) {
        return Ok((format!("Open MPI {}", number(line)), Flavour::Open));
    }
    if let Some(line) = line("Intel(R) MPI") {
        return Ok((format!("Intel MPI {}", number(line)), Flavour::Intel));
    }
    if text.contains("HYDRA") {
        let number = line("Version:").map_or_else(|| "?".to_owned(), number);
        return Ok((format!("MPICH {number}"), Flavour::Mpich));
    }
    bail!(
        "{} is no launcher of Open MPI, MPICH or Intel MPI",
        mpirun.display()
    )
}

fn compile(source: &Source, mpicc: &Path, program: &Path) -> Result<PathBuf> {
    let file = program.with_extension("c");
    fs::write(&file, source.text)?;
    let output = in_its_folder(mpicc)
        .args(source.flags)
        .arg("-o")
        .args([program, &file])
        .output()
        .with_context(|| format!("start {}", mpicc.display()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr);
        bail!("{} failed: {text}", mpicc.display());
    }
    Ok(program.to_owned())
}

/// Returns the cores as an argument of the programs.
pub(crate) fn list(cores: &[usize]) -> String {
    let cores: Vec<_> = cores.iter().map(usize::to_string).collect();
    cores.join(",")
}

impl Mpi {
    /// Returns the command that measures all_reduce with `ranks` ranks on `cores`, pinned to them
    /// or not.
    pub(crate) fn all_reduce(
        &self,
        ranks: usize,
        cores: &[usize],
        is_pinned: bool,
        schedule: &Schedule,
        touch: bool,
    ) -> Command {
        let list = match is_pinned {
            true => self::list(cores),
            false => "-".to_owned(),
        };
        let mut command = self.command(ranks, cores);
        command.args([&schedule.to_string(), &list]);
        command.arg(if touch { "1" } else { "0" });
        command
    }

    /// Returns the command that runs the program with `ranks` ranks on `cores`, without arguments
    /// of the program.
    pub(crate) fn command(&self, ranks: usize, cores: &[usize]) -> Command {
        let oversubscribed = ranks > cores.len();
        let mut command = in_its_folder(&self.mpirun);
        // Without these settings glibc unmaps large temporary buffers after each call, and every
        // call faults their pages in again. The value is 64 GiB in bytes; glibc accepts no suffix.
        command.env("MALLOC_MMAP_MAX_", "0");
        command.env("MALLOC_TRIM_THRESHOLD_", "68719476736");
        match self.flavour {
            Flavour::Open => {
                // SAFETY: geteuid has no preconditions.
                if unsafe { libc::geteuid() } == 0 {
                    command.arg("--allow-run-as-root");
                }
                // The benchmark program pins its own threads, in the same way under every launcher.
                command.args(["--bind-to", "none"]);
                if oversubscribed {
                    command.arg("--oversubscribe");
                }
            }
            Flavour::Mpich => {
                command.args(["-bind-to", "none"]);
            }
            Flavour::Intel => {
                command.env("I_MPI_PIN", "0").env("I_MPI_FABRICS", "shm");
                if oversubscribed {
                    command.env("I_MPI_THREAD_YIELD", "2");
                }
            }
        }
        command.args(["-n", &ranks.to_string()]).arg(&self.program);
        command
    }

    /// Describes the settings for this MPI.
    pub(crate) fn settings(&self) -> &'static str {
        match self.flavour {
            Flavour::Open => {
                "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=64G, --bind-to none, --oversubscribe \
                 where ranks exceed cores"
            }
            Flavour::Mpich => "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=64G, -bind-to none",
            Flavour::Intel => {
                "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=64G, I_MPI_PIN=0, I_MPI_FABRICS=shm, \
                 I_MPI_THREAD_YIELD=2 where ranks exceed cores"
            }
        }
    }
}
