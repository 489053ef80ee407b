//! `fusewire-build images`.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use fusewire_build::portable::{COMMAND, ImageSet, TARGETS};
use fusewire_build::{Image, Options, Project, Target, Toolchain, compile, host, toolchain};

use super::{each_target, shown};

/// Arguments of `fusewire-build images`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Writes nothing. Fails if the images differ from those that the sources produce.
    #[arg(long)]
    check: bool,
    /// Compares only the images of these targets, separated by commas.
    #[arg(long, requires = "check")]
    target: Option<String>,
    /// Folder of the images; by default `host/images` of this workspace.
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Makes the portable images of Fusewire's kernels, or compares them with the committed images.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let start = Instant::now();
    let project = Project::named("fusewire-kernels")?;
    let toolchain = Toolchain::find()?;
    let folder = arguments
        .out
        .clone()
        .unwrap_or_else(|| project.workspace.join("host/images"));
    let options = Options {
        families: host::probe(&project)?.families(),
        ..Options::default()
    };
    let targets = match &arguments.target {
        Some(list) => Target::list(list)?,
        None => TARGETS.to_vec(),
    };
    if let Some(other) = targets.iter().find(|target| !TARGETS.contains(target)) {
        anyhow::bail!("there are no committed images for {other}");
    }
    // The registers of PTX are numbers of ptxas. A comparison works without them.
    let ptxas = match (toolchain::find_ptxas(), arguments.check) {
        (Ok(ptxas), _) => Some(ptxas),
        (Err(_), true) => None,
        (Err(missing), false) => anyhow::bail!("{missing}"),
    };
    let images = each_target(&targets, |target| {
        let compiled = compile(&toolchain, &project, target, &options)?;
        Image::read(&compiled, ptxas.as_deref())
    });
    let images = images
        .into_iter()
        .collect::<fusewire_build::Result<Vec<_>>>()?;
    let version = ptxas.as_deref().map(toolchain::ptxas_version).transpose()?;
    let version = version.unwrap_or_default();
    let made = ImageSet::gather(&toolchain, &version, &project, &images)?;
    println!("made by {}", made.manifest.toolchain);
    if arguments.check {
        let differences = made.compare(&folder, &targets)?;
        for difference in &differences {
            println!("FAIL {}: {}", difference.file, difference.reason);
        }
        println!(
            "{} images in {}: {} in {:.0} s",
            made.manifest.images.len(),
            shown(&folder).display(),
            match differences.len() {
                0 => "equal to what the sources give".to_owned(),
                count => format!("{count} differences; run `{COMMAND}` and commit the images"),
            },
            start.elapsed().as_secs_f64()
        );
        return Ok(if differences.is_empty() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        });
    }
    let total = made.write(&folder)?;
    println!(
        "{:<8} {:<16} {:>7} {:>10} {:>10}",
        "target", "family", "entries", "bytes", "packed"
    );
    for image in &made.manifest.images {
        let packed = std::fs::metadata(folder.join(&image.file))?.len();
        println!(
            "{:<8} {:<16} {:>7} {:>10} {:>10}",
            image.target,
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
