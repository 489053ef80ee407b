//! `fusewire-build check`: the verifier.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use fusewire_build::code_objects;
use fusewire_build::controls::{self, Outcome};
use fusewire_build::findings::{Finding, findings};
use fusewire_build::host::{self, Host};
use fusewire_build::portable::{self, COMMAND, FOLDER, ImageSet, TARGETS};
use fusewire_build::project::{Exemption, Project};
use fusewire_build::verify::{self, amd};
use fusewire_build::{
    Error, Image, Options, Target, Toolchain, Vendor, compile, native, toolchain,
};

use super::{CrateSelector, each_target, print_findings};

/// Arguments of `fusewire-build check`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    which: CrateSelector,
    /// Targets, separated by commas: sm_80, sm_90, sm_100, gfx90a, gfx942, or all.
    #[arg(long, default_value = "all")]
    target: String,
    /// Checks only the native code.
    #[arg(long)]
    native: bool,
    /// Checks only images of grid forms (see `build --multi-rank-grid`).
    #[arg(long, hide = true, conflicts_with = "native")]
    multi_rank_grid: bool,
    /// Compares the images with the committed ones. Only for fusewire-kernels.
    #[arg(long, conflicts_with_all = ["native", "multi_rank_grid"])]
    images: bool,
    /// Prints every violation (by default one per kernel and rule) and every negative control.
    #[arg(long)]
    verbose: bool,
    /// Runs the negative controls. Each control is a kernel that breaks one rule, and that rule
    /// must report the kernel. Always set for fusewire-kernels.
    #[arg(long)]
    controls: bool,
    /// Checks that must not be skipped: ptx, amdgcn, native. Added to the list in
    /// `$FUSEWIRE_REQUIRE`.
    #[arg(long, value_delimiter = ',')]
    require: Vec<String>,
}

impl Arguments {
    fn controls(&self, project: &Project) -> bool {
        self.controls || project.name == "fusewire-kernels"
    }
}

/// Number of violations, number of negative controls and of those without the required result, and
/// the required checks that were skipped.
#[derive(Default)]
struct Report {
    verbose: bool,
    violations: usize,
    controls: usize,
    missed: usize,
    required: Vec<String>,
    missing: Vec<String>,
}

impl Report {
    fn skip(&mut self, part: &str, reason: &str) {
        println!("skipped: {part}: {reason}");
        if self.required.iter().any(|word| word == part) {
            self.missing.push(part.to_owned());
        }
    }

    fn controls(&mut self, outcomes: &[Outcome]) {
        for outcome in outcomes {
            let mark = if outcome.held { "ok  " } else { "FAIL" };
            let aim = if outcome.rule.is_empty() {
                "must be clean".to_owned()
            } else {
                format!("caught by {}", outcome.rule)
            };
            let seen: String = outcome.seen.chars().take(70).collect();
            if self.verbose || !outcome.held {
                println!(
                    "{mark} control {:<7} {:<44} {aim}: {seen}",
                    outcome.target, outcome.control
                );
            }
            self.controls += 1;
            self.missed += usize::from(!outcome.held);
        }
    }
}

/// Runs the verifier. Returns failure if there is a violation, if a negative control does not have
/// the required result, or if a required check was skipped.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let project = arguments.which.project()?;
    let mut report = Report {
        verbose: arguments.verbose,
        required: std::env::var("FUSEWIRE_REQUIRE")
            .unwrap_or_default()
            .split(',')
            .map(str::trim)
            .map(str::to_owned)
            .chain(arguments.require.iter().cloned())
            .collect(),
        ..Report::default()
    };
    for allow in &project.settings.allow {
        println!(
            "allowed: {} in {}: {}",
            allow.rule, allow.kernel, allow.reason
        );
    }
    let host = match host::probe(&project) {
        Ok(host) => Some(host),
        Err(Error::Project(reason)) => {
            report.skip("native", &reason);
            None
        }
        Err(error) => return Err(error.into()),
    };
    if let (Some(host), false) = (&host, arguments.multi_rank_grid) {
        check_native(&project, host, &mut report, arguments)?;
    }
    if !arguments.native && !arguments.multi_rank_grid && project.name == "fusewire-kernels" {
        check_code_objects(&project, &mut report, arguments)?;
    }
    if !arguments.native {
        check_images(&project, host.as_ref(), &mut report, arguments)?;
    }
    println!(
        "{} violations{}{}",
        report.violations,
        match report.controls {
            0 => String::new(),
            all => format!(", {} of {all} controls missed", report.missed),
        },
        if report.missing.is_empty() {
            String::new()
        } else {
            format!(", required but missing: {}", report.missing.join(", "))
        }
    );
    let good = report.violations == 0 && report.missed == 0 && report.missing.is_empty();
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

fn check_native(
    project: &Project,
    host: &Host,
    report: &mut Report,
    arguments: &Arguments,
) -> anyhow::Result<()> {
    if !cfg!(target_arch = "x86_64") {
        report.skip("native", "only x86-64 has variants");
        return Ok(());
    }
    let objdump = match toolchain::find_objdump() {
        Ok(objdump) => objdump,
        Err(missing) => {
            report.skip("native", &missing.to_string());
            return Ok(());
        }
    };
    let program = native::disassemble(&objdump, &host.program)?;
    let entries: BTreeSet<&str> = program
        .keys()
        .filter_map(|symbol| native::entry(symbol))
        .map(|(kernel, _)| kernel)
        .collect();
    let violations = verify::without_allowed(
        native::check(&program, &project.settings.reductions),
        &project.settings.allow,
    );
    println!("native: {} kernels in {}", entries.len(), project.name);
    let findings: Vec<Finding> = violations.into_iter().map(Finding::from).collect();
    print_findings("FAIL", "native", &findings, arguments.verbose);
    report.violations += findings.len();
    for kernel in &host.kernels {
        if !entries.contains(kernel.name.as_str()) {
            println!(
                "FAIL native  entries: {}: no native entry in the program",
                kernel.name
            );
            report.violations += 1;
        }
    }
    if arguments.controls(project) {
        report.controls(&controls::native(project, &objdump)?);
    }
    Ok(())
}

/// Checks the AMD images that the host library includes.
fn check_code_objects(
    project: &Project,
    report: &mut Report,
    arguments: &Arguments,
) -> anyhow::Result<()> {
    let mut targets = Target::list(&arguments.target)?;
    targets.retain(|target| target.vendor() == Vendor::Amd);
    if targets.is_empty() {
        return Ok(());
    }
    let objdump = match toolchain::find_llvm_objdump() {
        Ok(objdump) => objdump,
        Err(missing) => {
            report.skip("amdgcn", &missing.to_string());
            return Ok(());
        }
    };
    let folder = project.workspace.join(FOLDER);
    let scratch = project.target.join("fusewire-code-objects");
    let mut objects = Vec::new();
    for target in targets {
        objects.extend(code_objects::read(&folder, target, &objdump, &scratch)?);
    }
    for allow in amd::exemptions() {
        println!(
            "allowed: {} in {}: {}",
            allow.rule, allow.kernel, allow.reason
        );
    }
    let kernels: usize = objects.iter().map(|object| object.kernels.len()).sum();
    println!(
        "amdgcn: {kernels} kernels in {} committed images",
        objects.len()
    );
    for (file, violations) in code_objects::check(&objects) {
        let findings: Vec<Finding> = violations.into_iter().map(Finding::from).collect();
        print_findings("FAIL", file, &findings, arguments.verbose);
        report.violations += findings.len();
    }
    Ok(())
}

fn check_images(
    project: &Project,
    host: Option<&Host>,
    report: &mut Report,
    arguments: &Arguments,
) -> anyhow::Result<()> {
    let targets = Target::list(&arguments.target)?;
    let toolchain = match Toolchain::find() {
        Ok(toolchain) => toolchain,
        Err(error @ Error::Toolchain(_)) => {
            let vendors: BTreeSet<&str> = targets
                .iter()
                .map(|target| target.vendor().requirement())
                .collect();
            for part in vendors {
                report.skip(part, &error.to_string());
            }
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let mut ptxas: Option<PathBuf> = None;
    if targets
        .iter()
        .any(|target| target.vendor() == Vendor::Nvidia)
    {
        match toolchain::find_ptxas() {
            Ok(path) => ptxas = Some(path),
            Err(missing) => report.skip("ptx", &missing.to_string()),
        }
    }
    let options = Options {
        multi_rank_grid: arguments.multi_rank_grid,
        families: match arguments.multi_rank_grid {
            true => Vec::new(),
            false => host.map_or_else(Vec::new, Host::families),
        },
        ..Options::default()
    };
    let images = each_target(&targets, |target| {
        let compilation = compile(&toolchain, project, target, &options)?;
        let mut image = Image::read(&compilation, ptxas.as_deref())?;
        image.host = host.map(|host| match arguments.multi_rank_grid {
            true => host.multi_rank_grid(),
            false => host.kernels.clone(),
        });
        image.configure(&project.settings);
        if arguments.multi_rank_grid {
            image.allow.extend(exemptions_of_grid_forms());
        }
        let findings = findings(&toolchain, project, &compilation, &image)?;
        fusewire_build::Result::Ok((image, findings))
    });
    let mut checked = Vec::new();
    for (&target, image) in targets.iter().zip(images) {
        if let (Vendor::Amd, Err(missing)) = (target.vendor(), &toolchain.amd) {
            report.skip("amdgcn", &missing.to_string());
        }
        let (mut image, findings) = image?;
        table(&image, &findings.all);
        if findings.library > 0 {
            println!(
                "{target:<8} {} accesses with device scope are the library's own",
                findings.library
            );
        }
        print_findings("FAIL", target.name(), &findings.all, arguments.verbose);
        report.violations += findings.all.len();
        if let (Some(host), true) = (host, arguments.multi_rank_grid) {
            report.controls(&controls::multi_rank_grid(&mut image, host));
        }
        checked.push(image);
    }
    if arguments.images {
        compare(&toolchain, ptxas.as_deref(), project, &checked, report)?;
    }
    if arguments.multi_rank_grid || !arguments.controls(project) {
        return Ok(());
    }
    // The rules depend on the vendor's text formats, not on the GPU, so one run of the controls per
    // vendor is enough. The newest target supports every instruction of the older targets.
    for vendor in [Vendor::Nvidia, Vendor::Amd] {
        let newest = targets
            .iter()
            .rev()
            .find(|target| target.vendor() == vendor);
        if let Some(&target) = newest {
            let ptxas: Option<&Path> = ptxas.as_deref();
            report.controls(&controls::device(&toolchain, project, target, ptxas)?);
        }
    }
    Ok(())
}

/// Compares images with the committed ones of the same targets.
fn compare(
    toolchain: &Toolchain,
    ptxas: Option<&Path>,
    project: &Project,
    images: &[Image],
    report: &mut Report,
) -> anyhow::Result<()> {
    anyhow::ensure!(
        project.name == "fusewire-kernels",
        "--images: only fusewire-kernels has committed images that this command can compare"
    );
    let committed = |image: &&Image| TARGETS.contains(&image.target);
    let images: Vec<Image> = images.iter().filter(committed).cloned().collect();
    let targets: Vec<Target> = images.iter().map(|image| image.target).collect();
    let folder = project.workspace.join(FOLDER);
    let committed = portable::read(&folder)?.ptxas;
    // Another ptxas makes other cubins and counts other registers.
    let version = ptxas.map(toolchain::ptxas_version).transpose()?;
    let ptxas = ptxas.filter(|_| version.as_deref() == Some(&committed));
    let of_nvidia = |target: &Target| target.vendor() == Vendor::Nvidia;
    if ptxas.is_none() && targets.iter().any(of_nvidia) {
        let version = version.as_deref().unwrap_or("not there");
        report.skip(
            "ptx",
            &format!(
                "comparison of cubins: they are of ptxas {committed}, this ptxas is {version}"
            ),
        );
    }
    let made = ImageSet::gather(toolchain, ptxas, project, &images)?;
    let differences = made.compare(&folder, &targets)?;
    for difference in &differences {
        println!("FAIL {}: {}", difference.file, difference.reason);
    }
    println!(
        "{} images made by {}: {}",
        made.manifest.images.len(),
        made.manifest.toolchain,
        match differences.len() {
            0 => "equal to the committed ones".to_owned(),
            count => format!("{count} differences; run `{COMMAND}` and commit the images"),
        },
    );
    report.violations += differences.len();
    Ok(())
}

/// Returns exemptions from the rule `local-memory` for grid forms, which only tests use. A grid
/// form takes one more pointer than the ordinary form. Some ordinary forms already use all
/// registers, so their grid forms spill.
fn exemptions_of_grid_forms() -> impl Iterator<Item = Exemption> {
    ["*_nvls_*", "reduce_norm*"]
        .into_iter()
        .map(|kernel| Exemption {
            rule: "local-memory".to_owned(),
            kernel: kernel.to_owned(),
            containing: String::new(),
            limit: None,
            reason: "one pointer more than the ordinary form".to_owned(),
        })
}

fn table(image: &Image, findings: &[Finding]) {
    let amd = image.target.vendor() == Vendor::Amd;
    println!(
        "\n{:<8} {:<40} {:>5} {:>5} {:>7} {:>6} {:>6} {:>6}",
        image.target,
        "kernel",
        if amd { "vgpr" } else { "regs" },
        if amd { "sgpr" } else { "" },
        if amd { "lds" } else { "shared" },
        if amd { "scratc" } else { "local" },
        "spills",
        "rules"
    );
    for kernel in &image.kernels {
        let broken: BTreeSet<&str> = findings
            .iter()
            .map(|finding| &finding.violation)
            .filter(|violation| violation.kernel == kernel.name)
            .map(|violation| violation.rule)
            .collect();
        let rules = if broken.is_empty() {
            "ok".to_owned()
        } else {
            format!("-{}", broken.len())
        };
        match kernel.resources {
            Some(used) => println!(
                "{:<8} {:<40} {:>5} {:>5} {:>7} {:>6} {:>6} {rules:>6}",
                "",
                kernel.name,
                used.registers,
                if amd {
                    used.scalar_registers.to_string()
                } else {
                    String::new()
                },
                used.shared,
                used.local,
                used.spills
            ),
            None => println!("{:<8} {:<40} {:>40} {rules:>6}", "", kernel.name, "?"),
        }
    }
}
