//! `fusewire-build build`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;
use fusewire_build::findings::findings;
use fusewire_build::image::ManifestImage;
use fusewire_build::sources::sha256;
use fusewire_build::{
    Image, Options, Project, Target, Toolchain, compile, host, install, toolchain,
};

use super::{CrateSelector, print_findings, shown};

/// Arguments of `fusewire-build build`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    which: CrateSelector,
    /// Targets, separated by commas: sm_80, sm_90, sm_100, gfx90a, gfx942, or all.
    #[arg(long, default_value = "all")]
    target: String,
    /// Folder for images and manifest. Default: `fusewire-gpu/out/NAME` in cargo's target folder,
    /// where NAME is the name of the images.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Exports every kernel NAME in its grid form, NAME__grid. One launch of a grid form runs the
    /// blocks of all ranks. Tests use grid forms to run several ranks on one GPU.
    #[arg(long, hide = true)]
    multi_rank_grid: bool,
    /// Compiles kernels whose waits have no bounds, with one image per family. `fusewire-benches
    /// wait-cost` measures them.
    #[arg(long, hide = true)]
    unbounded: bool,
}

impl Arguments {
    /// Returns the arguments that build the ordinary images of the crate in `folder` for `target`.
    /// The images are written to the path where the host library looks for them.
    pub(crate) fn of(folder: PathBuf, target: &str) -> Self {
        Self {
            which: CrateSelector::folder(folder),
            target: target.to_owned(),
            out: None,
            multi_rank_grid: false,
            unbounded: false,
        }
    }
}

#[derive(serde::Serialize)]
struct Manifest<'a> {
    package: &'a str,
    compiler: &'a str,
    images: Vec<ManifestImage>,
}

/// Compiles the crate and writes its images and their manifest.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let targets = Target::list(&arguments.target)?;
    let toolchain = Toolchain::find()?;
    let project = arguments.which.project()?;
    let ptxas = toolchain::find_ptxas().ok();
    let options = Options {
        multi_rank_grid: arguments.multi_rank_grid,
        ..match arguments.unbounded {
            true => unbounded(&project)?,
            false => Options::default(),
        }
    };
    let name = format!("{}{}", project.name, options.suffix());
    let out = arguments
        .out
        .clone()
        .unwrap_or_else(|| install::out_folder(&project, &options));
    std::fs::create_dir_all(&out).with_context(|| format!("cannot create {}", out.display()))?;
    let mut manifest = Manifest {
        package: &project.name,
        compiler: toolchain.version.lines().next().unwrap_or_default(),
        images: Vec::new(),
    };
    for target in targets {
        let start = Instant::now();
        let compiled = compile(&toolchain, &project, target, &options)?;
        let mut image = Image::read(&compiled, ptxas.as_deref())?;
        if !arguments.multi_rank_grid && !arguments.unbounded {
            image.configure(&project.settings);
            let findings = findings(&toolchain, &project, &compiled, &image)?;
            print_findings("warning:", target.name(), &findings.all, false);
        }
        for part in &image.files {
            let Some(from) = &part.path else {
                anyhow::bail!(
                    "{target} needs llvm-mc and ld.lld\n{}",
                    toolchain
                        .amd
                        .as_ref()
                        .err()
                        .map(ToString::to_string)
                        .unwrap_or_default()
                );
            };
            let (file, bytes) = install::file(&project, &options, target, &part.name, from)?;
            write(&out.join(&file), &bytes)?;
            let entries = image.manifest_entries(part);
            println!(
                "{target:<8} {:>4} entries {:>9} bytes  {}  {}",
                entries.len(),
                bytes.len(),
                if compiled.cached {
                    "unchanged".to_owned()
                } else {
                    format!("compiled in {:.0} s", start.elapsed().as_secs_f64())
                },
                shown(&out.join(&file)).display()
            );
            manifest.images.push(ManifestImage {
                target,
                file,
                sha256: sha256(&bytes),
                max_threads: project.max_threads(),
                entries,
            });
        }
    }
    let path = out.join(format!("{name}.json"));
    write(&path, serde_json::to_string_pretty(&manifest)?.as_bytes())?;
    println!("{}", shown(&path).display());
    Ok(ExitCode::SUCCESS)
}

/// Returns the options for kernels whose waits have no bounds. Each family gets its own image, so
/// that the image can replace the library's image of the same family.
pub(super) fn unbounded(project: &Project) -> anyhow::Result<Options> {
    Ok(Options {
        families: host::probe(project)?.families(),
        unbounded: true,
        ..Options::default()
    })
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    std::fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}
