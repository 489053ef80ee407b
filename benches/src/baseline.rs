//! The CUDA C++ baseline: its sources, its compilation to cubins by nvcc, and the search for
//! compiled cubins.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

/// The files of `cuda/` that nvcc needs.
const SOURCES: [(&str, &str); 9] = [
    ("all_reduce.cuh", include_str!("../cuda/all_reduce.cuh")),
    ("barrier.cuh", include_str!("../cuda/barrier.cuh")),
    ("baseline.cu", include_str!("../cuda/baseline.cu")),
    ("elements.cuh", include_str!("../cuda/elements.cuh")),
    ("fused.cuh", include_str!("../cuda/fused.cuh")),
    ("moe.cuh", include_str!("../cuda/moe.cuh")),
    ("memory.cuh", include_str!("../cuda/memory.cuh")),
    ("packets.cuh", include_str!("../cuda/packets.cuh")),
    ("costs.cuh", include_str!("../cuda/costs.cuh")),
];

/// Options of nvcc in addition to the architecture and the kind of output.
const FLAGS: [&str; 2] = ["-O3", "-std=c++17"];
/// Options of the `baseline` command. They turn warnings into errors. Compilation at run time does
/// not use them, because an unknown version of nvcc may give warnings.
const STRICT: [&str; 3] = ["-cubin", "-Werror", "all-warnings"];

/// Ways to install nvcc, for error messages.
const INSTALL: &str = "pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-cuda-runtime \
    nvidia-nvvm (and a g++), or a CUDA toolkit";

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Folder for the cubins, `baseline.ARCHITECTURE.cubin`.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// GPU architectures to compile for.
    #[arg(long, value_delimiter = ',', default_value = "sm_80,sm_90")]
    target: Vec<String>,
}

/// Compiles a cubin for every architecture.
pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    let nvcc = find()?;
    fs::create_dir_all(&arguments.out)
        .with_context(|| format!("create {}", arguments.out.display()))?;
    for target in &arguments.target {
        let cubin = compile(&nvcc, target, &STRICT)?;
        let path = arguments.out.join(file_name(target));
        fs::write(&path, &cubin).with_context(|| format!("write {}", path.display()))?;
        println!(
            "{}: {} KiB, by {}",
            path.display(),
            cubin.len().div_ceil(1024),
            version(&nvcc).unwrap_or_default()
        );
    }
    Ok(())
}

/// Returns the file name of the cubin for an architecture.
pub(crate) fn file_name(architecture: &str) -> String {
    format!("baseline.{architecture}.cubin")
}

/// Returns the path of the cubin in a bundle: `../cuda/` relative to the program's folder. Returns
/// `None` if the file does not exist.
pub(crate) fn bundled(architecture: &str) -> Option<PathBuf> {
    let program = env::current_exe().ok()?;
    let folder = program.parent()?.parent()?.join("cuda");
    Some(folder.join(file_name(architecture))).filter(|path| path.is_file())
}

/// Finds nvcc. Searches `$FUSEWIRE_NVCC`, the PyPI wheels, PATH, `$CUDA_HOME` and /usr/local/cuda,
/// in this order.
pub(crate) fn find() -> Result<PathBuf> {
    if let Some(named) = env::var_os("FUSEWIRE_NVCC") {
        let named = PathBuf::from(named);
        ensure!(
            version(&named).is_some(),
            "FUSEWIRE_NVCC={} does not run; {INSTALL}",
            named.display()
        );
        return Ok(named);
    }
    let mut candidates = from_wheels();
    candidates.extend(
        env::split_paths(&env::var_os("PATH").unwrap_or_default())
            .chain(
                env::var_os("CUDA_HOME")
                    .into_iter()
                    .map(|home| Path::new(&home).join("bin")),
            )
            .chain([PathBuf::from("/usr/local/cuda/bin")])
            .map(|folder| folder.join("nvcc")),
    );
    let works = |path: &PathBuf| path.is_file() && version(path).is_some();
    candidates.into_iter().find(works).with_context(|| {
        format!(
            "nvcc is neither $FUSEWIRE_NVCC nor in the Python package nvidia, PATH, $CUDA_HOME \
            or /usr/local/cuda; {INSTALL}"
        )
    })
}

fn from_wheels() -> Vec<PathBuf> {
    const PROGRAM: &str = "import glob, importlib.util\n\
        spec = importlib.util.find_spec('nvidia')\n\
        for folder in spec.submodule_search_locations if spec else []:\n\
        \x20   for path in glob.glob(folder + '/*/bin/nvcc'):\n\
        \x20       print(path)\n";
    let said = Command::new("python3").args(["-c", PROGRAM]).output();
    let said = said.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&said)
        .lines()
        .map(PathBuf::from)
        .collect()
}

/// Returns `nvcc` and the line of `nvcc --version` with the release, or `None` if nvcc fails.
pub(crate) fn version(nvcc: &Path) -> Option<String> {
    let output = Command::new(nvcc).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().find(|line| line.contains("release"));
    output
        .status
        .success()
        .then(|| format!("nvcc, {}", line.unwrap_or("of unknown version").trim()))
}

/// Compiles the sources with nvcc. `kind` contains `-cubin` or `-ptx`, and optionally further
/// options.
pub(crate) fn compile(nvcc: &Path, architecture: &str, kind: &[&str]) -> Result<Vec<u8>> {
    let folder = tempfile::tempdir().context("a folder for nvcc")?;
    write_sources(folder.path())?;
    let out = folder.path().join("baseline.out");
    let output = Command::new(nvcc)
        .args(FLAGS)
        .arg(format!("-arch={architecture}"))
        .args(kind)
        .arg("-o")
        .args([&out, &folder.path().join("baseline.cu")])
        .output()
        .with_context(|| format!("start {}", nvcc.display()))?;
    if !output.status.success() {
        bail!(
            "{} failed for {architecture} ({}): {}{}",
            nvcc.display(),
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    fs::read(&out).with_context(|| format!("read what {} has made", nvcc.display()))
}

fn write_sources(folder: &Path) -> Result<()> {
    for (name, text) in SOURCES {
        let path = folder.join(name);
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
