//! Negative controls: kernels that break one rule each. A rule that does not report its control is
//! defective.

use std::path::Path;

use crate::host::{Host, HostKernel, HostParameter};
use crate::project::{Project, host_cargo};
use crate::verify::{self, Violation};
use crate::{
    Compilation, Error, Image, Options, Result, Target, Toolchain, Vendor, compile, files, native,
    process,
};

/// Result of one negative control.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The target, or `native`.
    pub target: String,
    /// The control.
    pub control: String,
    /// The rule that must report the control; empty if the control must be clean.
    pub rule: String,
    /// `true` if the result is as required.
    pub held: bool,
    /// The violation that was found, or `clean`, or `not caught`.
    pub seen: String,
}

const DEVICE: &str = include_str!("../controls/device.rs");
const NATIVE: &str = include_str!("../controls/native.rs");
const SHIMS: [(&str, &str); 2] = [
    ("nvptx", include_str!("../controls/nvptx.ll")),
    ("amdgcn", include_str!("../controls/amdgcn.ll")),
];

/// The kernel, the rule that must report it, and the vendors for which the kernel is compiled.
const CONTROLS: &[(&str, &str, &[Vendor])] = &[
    ("control_unscoped", "unscoped-atomic", &[Vendor::Nvidia]),
    (
        "control_narrow_scope",
        "scope",
        &[Vendor::Amd, Vendor::Nvidia],
    ),
    (
        "control_scalar_copy",
        "vector-move",
        &[Vendor::Amd, Vendor::Nvidia],
    ),
    (
        "control_local_array",
        "local-memory",
        &[Vendor::Amd, Vendor::Nvidia],
    ),
    ("control_panic", "panic", &[Vendor::Amd, Vendor::Nvidia]),
    (
        "control_divergent_barrier",
        "barrier",
        &[Vendor::Amd, Vendor::Nvidia],
    ),
    (
        "control_divergent_loop",
        "barrier",
        &[Vendor::Amd, Vendor::Nvidia],
    ),
    (
        "control_early_return",
        "barrier",
        &[Vendor::Amd, Vendor::Nvidia],
    ),
    (
        "control_fast_math",
        "rounding",
        &[Vendor::Amd, Vendor::Nvidia],
    ),
    ("control_fused", "rounding", &[Vendor::Amd, Vendor::Nvidia]),
    (
        "control_approximation",
        "approximation",
        &[Vendor::Amd, Vendor::Nvidia],
    ),
    ("control_reference", "non-coherent-load", &[Vendor::Nvidia]),
    ("control_called_barrier", "barrier", &[Vendor::Nvidia]),
    ("control_called_array", "local-memory", &[Vendor::Nvidia]),
    ("control_size", "budget", &[Vendor::Nvidia]),
    ("unlimited_control", "budget", &[Vendor::Nvidia]),
    ("control_chain", "budget", &[Vendor::Nvidia]),
    ("control_fences", "budget", &[Vendor::Nvidia]),
];

/// Compiles the device controls for `target` and runs the verifier on them. Builds them in the
/// target folder of `around`.
///
/// # Errors
/// [`Error::Command`] if the controls do not compile, [`Error::File`] if they cannot be written.
pub fn device(
    toolchain: &Toolchain,
    around: &Project,
    target: Target,
    ptxas: Option<&Path>,
) -> Result<Vec<Outcome>> {
    let project = write_device(around)?;
    let compiled = compile(toolchain, &project, target, &Options::default())?;
    let mut image = Image::read(&compiled, ptxas)?;
    image.configure(&project.settings);
    let found = verify::check(&image);
    let mut out = vec![clean(target, "control_clean", &found)];
    for (kernel, rule, vendors) in CONTROLS {
        if vendors.contains(&target.vendor()) {
            out.push(caught(target.name(), kernel, rule, &found));
        }
    }
    if target.has_multicast() {
        out.push(clean(target, "control_multicast_clean", &found));
        for kernel in ["control_multicast_scalar", "control_multicast_unfenced"] {
            out.push(caught(target.name(), kernel, "multicast", &found));
        }
        let listed = core::mem::replace(&mut image.multicast, vec!["control_clean".to_owned()]);
        let other = verify::check(&image);
        for (kernel, how) in [
            ("control_multicast_clean", "not listed"),
            ("control_clean", "listed"),
        ] {
            let mut outcome = caught(target.name(), kernel, "multicast", &other);
            outcome.control = format!("{kernel}, {how}");
            out.push(outcome);
        }
        image.multicast = listed;
    }
    out.push(clean(target, "control_threaded", &found));
    let threaded = Options {
        jump_threading: true,
        ..Options::default()
    };
    let threaded = Image::read(&compile(toolchain, &project, target, &threaded)?, None)?;
    let cloned = verify::check(&threaded);
    let mut outcome = caught(target.name(), "control_threaded", "barrier", &cloned);
    outcome.control.push_str(" with MIR jump threading");
    out.push(outcome);
    image.host = Some(wrong_host(&image));
    let found = verify::check(&image);
    out.push(caught(target.name(), "control_clean", "arguments", &found));
    out.push(caught(target.name(), "control_ghost", "entries", &found));
    out.push(caught(target.name(), "control_panic", "entries", &found));
    if let (Some(ptxas), Vendor::Nvidia) = (ptxas, target.vendor()) {
        let broken = broken(&compiled)?;
        let found = verify::check(&Image::read(&broken, Some(ptxas))?);
        let mut outcome = caught(target.name(), "", "assembler", &found);
        outcome.control = "an instruction that does not exist".to_owned();
        out.push(outcome);
    }
    Ok(out)
}

/// Returns the host's list of kernels with three deliberate errors: a wrong offset, an extra entry
/// and a missing entry.
fn wrong_host(image: &Image) -> Vec<HostKernel> {
    let mut host: Vec<HostKernel> = image
        .entries()
        .filter(|entry| entry.name != "control_panic")
        .map(|entry| HostKernel {
            name: entry.name.clone(),
            family: "controls".to_owned(),
            params: entry
                .parameters
                .iter()
                .map(|parameter| HostParameter {
                    name: "argument".to_owned(),
                    offset: parameter.offset + if entry.name == "control_clean" { 8 } else { 0 },
                    size: parameter.size,
                })
                .collect(),
        })
        .collect();
    host.push(HostKernel {
        name: "control_ghost".to_owned(),
        family: "controls".to_owned(),
        params: Vec::new(),
    });
    host
}

/// Checks an image of grid forms against wrong host lists: the list of the ordinary entries, a list
/// with an extra entry, and a list with a wrong offset. On return, the image has no host list.
pub fn multi_rank_grid(image: &mut Image, host: &Host) -> Vec<Outcome> {
    let target = image.target.name();
    let list = host.multi_rank_grid();
    let Some(first) = list.first().map(|kernel| kernel.name.clone()) else {
        return Vec::new();
    };
    let ghost = "control_ghost__grid".to_owned();
    let (mut longer, mut moved) = (list.clone(), list.clone());
    longer.push(HostKernel {
        family: String::new(),
        name: ghost.clone(),
        params: Vec::new(),
    });
    if let Some(param) = moved[0].params.last_mut() {
        param.offset += 4;
    }
    let controls = [
        (host.kernels.clone(), &first, "entries", "the ordinary list"),
        (longer, &ghost, "entries", "an extra entry"),
        (moved, &first, "arguments", "a moved argument"),
        (list, &first, "", "grid forms"),
    ];
    let outcomes = controls.map(|(host, kernel, rule, control)| {
        image.host = Some(host);
        let found: Vec<Violation> = verify::RULES
            .iter()
            .filter(|rule| ["entries", "arguments"].contains(&rule.name))
            .flat_map(|rule| (rule.check)(image))
            .collect();
        let mut outcome = if rule.is_empty() {
            clean(image.target, kernel, &found)
        } else {
            caught(target, kernel, rule, &found)
        };
        outcome.control = format!("{control} on {kernel}");
        outcome
    });
    image.host = None;
    outcomes.into()
}

fn broken(compiled: &Compilation) -> Result<Compilation> {
    let mut broken = compiled.clone();
    for part in &mut broken.parts {
        let text = files::read(&part.assembly)?;
        part.assembly = part.assembly.with_file_name("broken.ptx");
        let text = text.replacen("ret;", "return.now;\n\tret;", 1);
        files::write(&part.assembly, text)?;
    }
    Ok(broken)
}

fn caught(target: &str, kernel: &str, rule: &str, found: &[Violation]) -> Outcome {
    let by = found
        .iter()
        .find(|violation| violation.rule == rule && violation.kernel == kernel);
    Outcome {
        target: target.to_owned(),
        control: kernel.to_owned(),
        rule: rule.to_owned(),
        held: by.is_some(),
        seen: by.map_or_else(
            || "not caught".to_owned(),
            |violation| violation.detail.clone(),
        ),
    }
}

fn clean(target: Target, kernel: &str, found: &[Violation]) -> Outcome {
    let wrong = found.iter().find(|violation| violation.kernel == kernel);
    Outcome {
        target: target.name().to_owned(),
        control: kernel.to_owned(),
        rule: String::new(),
        held: wrong.is_none(),
        seen: wrong.map_or_else(|| "clean".to_owned(), ToString::to_string),
    }
}

/// Writes the device controls as a separate crate.
fn write_device(around: &Project) -> Result<Project> {
    let folder = around.gpu_folder().join("controls/device");
    files::create_directory(&folder)?;
    files::write(
        &folder.join("Cargo.toml"),
        "[package]\nname = \"verifier-controls\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\
         publish = false\n\n[lib]\npath = \"device.rs\"\n\n\
         [package.metadata.fusewire]\nmulticast = [\"control_multicast_*\"]\n\n\
         [[package.metadata.fusewire.budget]]\nkernel = \"control_size\"\ninstructions = 8\n\n\
         [[package.metadata.fusewire.budget]]\nkernel = \"control_*\"\ninstructions = 1000\n\
         dependent-loads = 2\nalias-fences = 2\n\n\
         [package.metadata.fusewire.shims]\nnvptx = [\"nvptx.ll\"]\namdgcn = [\"amdgcn.ll\"]\n\n\
         [workspace]\n",
    )?;
    files::write(&folder.join("device.rs"), DEVICE)?;
    for (vendor, text) in SHIMS {
        files::write(&folder.join(format!("{vendor}.ll")), text)?;
    }
    let mut project = Project::at(&folder)?;
    // Shares the target folder, so that `core` is compiled once.
    project.target.clone_from(&around.target);
    Ok(project)
}

/// Builds the native controls and checks their machine code.
///
/// # Errors
/// [`Error::Command`] if the controls do not compile, [`Error::File`] if they cannot be written.
pub fn native(around: &Project, objdump: &Path) -> Result<Vec<Outcome>> {
    let folder = around.target.join("fusewire-probe/controls");
    files::create_directory(&folder)?;
    files::write(
        &folder.join("Cargo.toml"),
        "[package]\nname = \"native-controls\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\
         publish = false\n\n[[bin]]\nname = \"native-controls\"\npath = \"native.rs\"\n\n\
         [workspace]\n",
    )?;
    files::write(&folder.join("native.rs"), NATIVE)?;
    let target = around.target.join("fusewire-probe/target");
    let mut command = process::clean(&host_cargo());
    command
        .args(["build", "--release", "--quiet"])
        .current_dir(&folder)
        .env("CARGO_TARGET_DIR", &target);
    process::run("building the native controls", &mut command)?;
    let program = target.join("release/native-controls");
    if !program.exists() {
        return Err(Error::Project(format!(
            "{} was not built",
            program.display()
        )));
    }
    let found = native::check(&native::disassemble(objdump, &program)?, &[]);
    let mut out = Vec::new();
    for (entry, rule) in [
        ("narrow_reduce__avx512", native::WIDTH),
        ("fallback_reduce__avx2", native::CALLS),
        ("calling_reduce__avx2", native::CALLS),
        ("fused_reduce__avx2", native::FUSED),
    ] {
        out.push(caught("native", entry, rule, &found));
    }
    for entry in ["clean_reduce__avx2", "clean_reduce__avx512"] {
        let wrong = found.iter().find(|violation| violation.kernel == entry);
        out.push(Outcome {
            target: "native".to_owned(),
            control: entry.to_owned(),
            rule: String::new(),
            held: wrong.is_none(),
            seen: wrong.map_or_else(|| "clean".to_owned(), ToString::to_string),
        });
    }
    Ok(out)
}
