//! `fusewire-build bundle`: puts tests, benches and one script into a folder, for a machine that
//! has a GPU driver and no compiler.

mod cargo;
mod contents;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context as _, ensure};
use fusewire_build::portable::pack;
use fusewire_build::{Options, Project, Target, Toolchain, compile, install};

use self::contents::{Manifest, Stripper};

/// Arguments of `fusewire-build bundle`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Folder of the bundle: a new one, an empty one, or an earlier bundle.
    dir: PathBuf,
    /// Removes all symbols from the programs, not only debug information. Backtraces then have no
    /// names.
    #[arg(long)]
    strip: bool,
    /// Maximum size of the bundle in MiB.
    #[arg(long, default_value_t = 64)]
    max_mib: u64,
}

/// Test binaries of `tests/` that a bundle includes. They run on the device that
/// `FUSEWIRE_TEST_DEVICE` names and need no other file.
const TESTS: [&str; 5] = ["conformance", "graphs", "moe", "on_device", "operations"];

/// Test binaries that a bundle does not include, each with the reason.
const LEFT_OUT: [(&str, &str); 15] = [
    (
        "calls",
        "tests the CPU device, its lanes and checkers; conformance tests other devices",
    ),
    (
        "ccl_backend",
        "needs a library that cargo builds next to it",
    ),
    ("cuda", "runs on a fake of the driver"),
    (
        "external_backend",
        "needs a library that cargo builds next to it",
    ),
    (
        "failures",
        "runs its ranks on the CPU; on_device tests failures on other devices",
    ),
    ("file_store", "uses no device"),
    ("graph_capture", "counts the calls of a fake of the driver"),
    (
        "grid",
        "needs backends that cargo builds next to it; conformance tests the built-in ones",
    ),
    ("hosts", "needs network namespaces and a build with Gloo"),
    ("launchers", "needs mpirun and torchrun"),
    (
        "multi_rank_grid",
        "runs on a fake of the driver; on_device uses one with FUSEWIRE_TEST_MULTI_RANK_GRID=1",
    ),
    ("nvlink", "runs on a fake of the driver and of its switch"),
    ("steady", "counts the CPU's system calls and allocations"),
    ("torch_store", "needs PyTorch and the checkout"),
    (
        "user_kernels",
        "its kernels have no image: they are defined in the test",
    ),
];

/// Programs that a bundle includes.
const PROGRAMS: [&str; 2] = ["fusewire", "fusewire-benches"];

/// Example of a user's kernel crate. The bundle includes its images if they have been built.
const EXAMPLE: &str = "vocab-argmax";

/// Targets of the images for multi-rank grids. Their PTX runs on sm_80 and later GPUs.
const GRID_TARGETS: &str = "sm_80,sm_90";

/// Name, folder and target of the crate whose kernels have deliberate bugs. The command `bundle`
/// compiles it. PTX for sm_80 also runs on all later GPUs.
const SEEDED_BUGS: (&str, &str, &str) = ("seeded-bugs", "tests/seeded-bugs", "sm_80");

/// Targets and family of the kernels whose waits have no bounds. The targets are those of the
/// library's own PTX, so that `wait-cost` compares images that were compiled for the same target.
const UNBOUNDED: (&str, &str) = ("sm_80,sm_90", "all_reduce");

/// Targets of the CUDA C++ baseline.
const BASELINE_TARGETS: [&str; 2] = ["sm_80", "sm_90"];

const SCRIPT: &str = include_str!("run.sh");
/// Part of the script that writes the page of results.
const RESULTS: &str = include_str!("results.sh");
const README: &str = include_str!("README.txt");

/// Builds the programs and images, writes the bundle and prints its contents.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let folder = std::path::absolute(&arguments.dir)
        .with_context(|| format!("cannot make {} an absolute path", arguments.dir.display()))?;
    // Checks the folder before the build, which takes minutes.
    contents::prepare(&folder)?;
    let workspace = cargo::workspace()?;
    let programs = cargo::build(&workspace, &TESTS, &PROGRAMS)?;
    let mut manifest = Manifest::new(cargo::commit(&workspace), &LEFT_OUT);
    let stripper = Stripper::find(arguments.strip);
    match stripper.program {
        Some(program) => println!("debug information is removed by {program}"),
        None => println!("debug information is kept: found no llvm-strip, strip or objcopy"),
    }
    let wanted = TESTS.iter().map(|name| ("test", "tests", *name));
    let wanted = wanted.chain(PROGRAMS.iter().map(|name| ("bin", "bin", *name)));
    let (mut target, mut packed) = (None, Vec::new());
    for (kind, folder_name, name) in wanted {
        let from = programs
            .get(&(kind.to_owned(), name.to_owned()))
            .with_context(|| format!("cargo has built no {kind} named {name}"))?;
        let path = format!("{folder_name}/{name}");
        stripper.copy(from, &folder.join(&path))?;
        packed.push(path);
        if kind == "bin" {
            // `from` is `target/release/fusewire`, so its second ancestor is `target`.
            target = from.ancestors().nth(2).map(Path::to_owned);
        }
    }
    make_seeded_bugs(&workspace);
    add_images(&mut manifest, &folder, &target.unwrap_or_default())?;
    add_grid_images(&mut manifest, &folder)?;
    add_unbounded_images(&mut manifest, &folder)?;
    add_baseline(&mut manifest, &folder)?;
    // Compresses the programs last, because `add_baseline` runs one of them.
    for path in packed {
        manifest.add_packed(&folder, &path)?;
    }
    add_texts(&mut manifest, &folder)?;
    // Writes the manifest even if the bundle is too large, so that the next call can replace the
    // bundle.
    manifest.write(&folder)?;
    summary(&manifest, &folder);
    manifest.check_size(arguments.max_mib)?;
    Ok(ExitCode::SUCCESS)
}

/// Compiles the kernels with seeded bugs. Without a device tool chain, the bundle does not include
/// them.
fn make_seeded_bugs(workspace: &Path) {
    let (name, path, target) = SEEDED_BUGS;
    let arguments = super::build::Arguments::of(workspace.join(path), target);
    if let Err(error) = super::build::run(&arguments) {
        println!("cannot build the image of {name}: {error:#}");
    }
}

fn add_images(manifest: &mut Manifest, folder: &Path, target: &Path) -> anyhow::Result<()> {
    let mut images = Vec::new();
    for (name, path) in [
        (EXAMPLE, "examples/vocab-argmax"),
        (SEEDED_BUGS.0, SEEDED_BUGS.1),
    ] {
        let found = contents::images(target, name);
        if found.is_empty() {
            println!(
                "left out: images of {name}: not built; build them by \
                    `fusewire-build build --crate {path}`"
            );
        }
        images.extend(found);
    }
    for from in images {
        let name = from.file_name().unwrap_or_default().to_string_lossy();
        let path = format!("images/{name}");
        let bytes =
            std::fs::read(&from).with_context(|| format!("cannot read {}", from.display()))?;
        contents::write(&folder.join(&path), &bytes)?;
        manifest.add(folder, &path)?;
    }
    Ok(())
}

/// Adds the images of grid forms. `run.sh` uses them to run several ranks under NVIDIA's
/// sanitizers.
fn add_grid_images(manifest: &mut Manifest, folder: &Path) -> anyhow::Result<()> {
    let toolchain = match Toolchain::find() {
        Ok(toolchain) => toolchain,
        Err(error) => {
            println!("left out: images for multi-rank grids: {error}");
            return Ok(());
        }
    };
    let project = Project::named("fusewire-kernels")?;
    let options = Options {
        multi_rank_grid: true,
        ..Options::default()
    };
    for target in Target::list(GRID_TARGETS)? {
        for part in compile(&toolchain, &project, target, &options)?.parts {
            let from = part
                .image
                .with_context(|| format!("{} for {target} has no image", part.name))?;
            let (name, bytes) = install::file(&project, &options, target, &part.name, &from)?;
            let path = format!("images/{name}.lzma");
            contents::write(&folder.join(&path), &pack(&bytes)?)?;
            manifest.add(folder, &path)?;
        }
    }
    Ok(())
}

/// Adds the images of the kernels whose waits have no bounds. `fusewire-benches wait-cost` compares
/// these images with the library's own images.
fn add_unbounded_images(manifest: &mut Manifest, folder: &Path) -> anyhow::Result<()> {
    let toolchain = match Toolchain::find() {
        Ok(toolchain) => toolchain,
        Err(error) => {
            println!("left out: images without bounded waits: {error}");
            return Ok(());
        }
    };
    let project = Project::named("fusewire-kernels")?;
    let options = super::build::unbounded(&project)?;
    for target in Target::list(UNBOUNDED.0)? {
        let parts = compile(&toolchain, &project, target, &options)?.parts;
        for part in parts.iter().filter(|part| part.name == UNBOUNDED.1) {
            let from = part
                .image
                .as_ref()
                .with_context(|| format!("{} for {target} has no image", part.name))?;
            let (name, bytes) = install::file(&project, &options, target, &part.name, from)?;
            let path = format!("unbounded/{name}.lzma");
            contents::write(&folder.join(&path), &pack(&bytes)?)?;
            manifest.add(folder, &path)?;
        }
    }
    Ok(())
}

/// Adds the cubins of the CUDA C++ baseline if nvcc is installed. Otherwise the GPU machine can
/// compile the baseline. `fusewire-benches versus cuda` compares the library's kernels with the
/// baseline.
fn add_baseline(manifest: &mut Manifest, folder: &Path) -> anyhow::Result<()> {
    let made = Command::new(folder.join("bin/fusewire-benches"))
        .args(["baseline", "--target", &BASELINE_TARGETS.join(","), "--out"])
        .arg(folder.join("cuda"))
        .output()
        .context("cannot start the bundle's fusewire-benches")?;
    if !made.status.success() {
        let said = String::from_utf8_lossy(&made.stderr);
        let said = said.trim();
        let required = std::env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
        ensure!(
            !required.split(',').any(|name| name.trim() == "nvcc"),
            "FUSEWIRE_REQUIRE names nvcc, but: {said}"
        );
        println!("left out: cubins of the CUDA C++ baseline: {said}");
        return Ok(());
    }
    for target in BASELINE_TARGETS {
        manifest.add(folder, &format!("cuda/baseline.{target}.cubin"))?;
    }
    Ok(())
}

fn add_texts(manifest: &mut Manifest, folder: &Path) -> anyhow::Result<()> {
    use std::os::unix::fs::PermissionsExt;

    let script = folder.join("run.sh");
    contents::write(&script, SCRIPT.as_bytes())?;
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))
        .with_context(|| format!("cannot make {} executable", script.display()))?;
    manifest.add(folder, "run.sh")?;
    contents::write(&folder.join("results.sh"), RESULTS.as_bytes())?;
    manifest.add(folder, "results.sh")?;
    let left_out: Vec<String> = LEFT_OUT
        .iter()
        .map(|(name, why)| format!("  {name:<18} {why}"))
        .collect();
    let readme = README
        .replace("@VERSION@", &manifest.version)
        .replace("@COMMIT@", manifest.commit.as_deref().unwrap_or("unknown"))
        .replace("@MACHINE@", &manifest.machine)
        .replace("@GLIBC@", manifest.glibc.as_deref().unwrap_or("any"))
        .replace("@LEFT_OUT@", &left_out.join("\n"));
    contents::write(&folder.join("README.txt"), readme.as_bytes())?;
    manifest.add(folder, "README.txt")
}

fn summary(manifest: &Manifest, folder: &Path) {
    for (name, why) in &manifest.left_out {
        println!("left out: test {name}: {why}");
    }
    for file in &manifest.files {
        println!("{:>9} KiB  {}", file.bytes.div_ceil(1024), file.path);
    }
    println!(
        "{}: {} files, {} KiB, Fusewire {}, commit {}; needs {} and glibc {} or newer",
        folder.display(),
        manifest.files.len(),
        manifest.bytes().div_ceil(1024),
        manifest.version,
        manifest.commit.as_deref().unwrap_or("unknown"),
        manifest.machine,
        manifest.glibc.as_deref().unwrap_or("of any version")
    );
    println!("on the GPU machine: ./run.sh --device cuda --out results");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_test_binary_is_in_a_list() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/tests");
        let there: Vec<String> = std::fs::read_dir(folder)
            .expect("the tests")
            .flatten()
            .filter_map(|entry| Some(entry.path().file_stem()?.to_str()?.to_owned()))
            .collect();
        for name in &there {
            let left_out = LEFT_OUT.iter().any(|(known, _)| known == name);
            assert!(
                TESTS.contains(&name.as_str()) != left_out,
                "add {name} to TESTS, or to LEFT_OUT with the reason"
            );
        }
        for name in TESTS {
            assert!(
                there.iter().any(|known| known == name),
                "TESTS names {name}, which does not exist"
            );
        }
    }
}
