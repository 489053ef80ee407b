//! `fusewire-build images`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use fusewire_build::portable::{self, FOLDER, ImageSet, TARGETS};
use fusewire_build::{Image, Options, Project, Toolchain, compile, host, toolchain};

use super::{each_target, shown};

/// Arguments of `fusewire-build images`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Folder of the images; by default `host/images` of this workspace.
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Makes the portable images of Fusewire's kernels.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let project = Project::named("fusewire-kernels")?;
    let toolchain = Toolchain::find()?;
    let folder = arguments
        .out
        .clone()
        .unwrap_or_else(|| project.workspace.join(FOLDER));
    let options = Options {
        families: host::probe(&project)?.families(),
        ..Options::default()
    };
    let ptxas = match toolchain::find_ptxas() {
        Ok(ptxas) => ptxas,
        Err(missing) => anyhow::bail!("{missing}"),
    };
    portable::cubin_format(&toolchain::ptxas_version(&ptxas)?)?;
    let images = each_target(&TARGETS, |target| {
        let compiled = compile(&toolchain, &project, target, &options)?;
        Image::read(&compiled, Some(&ptxas))
    });
    let images = images
        .into_iter()
        .collect::<fusewire_build::Result<Vec<_>>>()?;
    let made = ImageSet::gather(&toolchain, Some(&ptxas), &project, &images)?;
    println!(
        "made by {}; ptxas: {}",
        made.manifest.toolchain, made.manifest.ptxas
    );
    let total = made.write(&folder)?;
    println!(
        "{:<8} {:<6} {:<16} {:>7} {:>10} {:>10}",
        "target", "kind", "family", "entries", "bytes", "packed"
    );
    for image in &made.manifest.images {
        let packed = std::fs::metadata(folder.join(&image.file))?.len();
        println!(
            "{:<8} {:<6} {:<16} {:>7} {:>10} {:>10}",
            image.target,
            image.extension(),
            image.name,
            image.entries.len(),
            image.bytes,
            packed
        );
    }
    println!(
        "{} images in {}: {total} bytes, written in {:.0} s",
        made.manifest.images.len(),
        shown(&folder).display(),
        start.elapsed().as_secs_f64()
    );
    Ok(ExitCode::SUCCESS)
}
