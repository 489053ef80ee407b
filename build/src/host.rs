//! The host side of a kernel crate: its list of kernels and their native code.
//!
//! The probe is a small program that depends on the kernel crate and is built with the ordinary
//! tool chain in release mode. It prints the kernels of the crate as JSON: `fusewire-device`'s
//! feature `kernel-list` makes `#[kernel]` register them. Its machine code contains every native
//! entry.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Deserialize;

use crate::project::{Project, host_cargo};
use crate::{Error, Result, files, process};

/// A kernel, as the host describes it for a launch.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub struct HostKernel {
    /// Exported symbol.
    pub name: String,
    /// Name of the kernel's family, which is the module that defines the kernel.
    pub family: String,
    /// Parameters in order.
    pub params: Vec<HostParameter>,
}

/// A parameter as the host passes it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub struct HostParameter {
    /// Name of the argument.
    pub name: String,
    /// Byte offset in the parameter struct.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
}

/// A family of kernels: the kernels of one module, which share an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Family {
    /// Name of the module.
    pub name: String,
    /// Exported symbols.
    pub entries: Vec<String>,
}

/// Result of the probe.
#[derive(Debug)]
pub struct Host {
    /// The crate's list of kernels.
    pub kernels: Vec<HostKernel>,
    /// The parameters of a grid form, which are the same for all kernels.
    pub grid: Vec<HostParameter>,
    /// The compiled probe, whose machine code contains the native entries.
    pub program: PathBuf,
}

impl Host {
    /// Returns the list of kernels for an image of grid forms.
    pub fn multi_rank_grid(&self) -> Vec<HostKernel> {
        self.kernels
            .iter()
            .map(|kernel| HostKernel {
                name: format!("{}{GRID_SUFFIX}", kernel.name),
                family: kernel.family.clone(),
                params: self.grid.clone(),
            })
            .collect()
    }

    /// Returns the families of the crate's kernels, sorted by name.
    pub fn families(&self) -> Vec<Family> {
        let mut families: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for kernel in &self.kernels {
            let entries = families.entry(&kernel.family).or_default();
            entries.push(kernel.name.clone());
        }
        families
            .into_iter()
            .map(|(name, mut entries)| {
                entries.sort();
                Family {
                    name: name.to_owned(),
                    entries,
                }
            })
            .collect()
    }
}

/// Suffix of the name of a kernel's multi-rank-grid variant
/// (`fusewire_device::multi_rank_grid::SUFFIX`).
pub const GRID_SUFFIX: &str = "__grid";

#[derive(Deserialize)]
struct HostInfo {
    kernels: Vec<HostKernel>,
    grid: Vec<HostParameter>,
}

const MAIN: &str = r#"use fusewire_device::native::{ParamField, kernels_of};
use fusewire_device::multi_rank_grid::GridParams;
use probed as _;

fn parameters(fields: &[ParamField]) -> String {
    let fields: Vec<String> = fields
        .iter()
        .map(|p| format!("{{\"name\":{:?},\"offset\":{},\"size\":{}}}", p.name, p.offset, p.size))
        .collect();
    format!("[{}]", fields.join(","))
}

fn main() {
    let mut kernels: Vec<_> = kernels_of(env!("PROBED_CRATE"))
        .map(|kernel| {
            std::hint::black_box(kernel.native);
            let (params, family) = (parameters(kernel.params), kernel.family());
            format!("{{\"name\":{:?},\"family\":{family:?},\"params\":{params}}}", kernel.name)
        })
        .collect();
    kernels.sort();
    let (kernels, grid) = (kernels.join(","), parameters(GridParams::FIELDS));
    println!("{{\"kernels\":[{kernels}],\"grid\":{grid}}}");
}
"#;

/// Builds and runs the probe of `project`.
///
/// # Errors
/// [`Error::Project`] if the crate does not depend on `fusewire-device` or has no kernels;
/// [`Error::Command`] if it does not compile.
pub fn probe(project: &Project) -> Result<Host> {
    let Some(device) = &project.device else {
        return Err(Error::Project(format!(
            "{} does not depend on fusewire-device, so it has no list of kernels",
            project.name
        )));
    };
    let folder = project.target.join("fusewire-probe").join(&project.name);
    files::create_directory(&folder.join("src"))?;
    // Depends on the same copy of `fusewire-device` as the crate, because another copy would define
    // different types.
    let published = project.dependencies.iter().find_map(|dependency| {
        let version = dependency.strip_prefix("fusewire-device ")?;
        Some(format!("\"={version}\""))
    });
    let device = match published {
        Some(version) => format!("version = {version}"),
        None => format!("path = {device:?}"),
    };
    let manifest = format!(
        "[package]\nname = \"probe\"\nversion = \"0.0.0\"\nedition = \"2024\"\npublish = false\n\n\
         [dependencies]\nfusewire-device = {{ {device}, features = [\"kernel-list\"] }}\n\
         probed = {{ package = {:?}, path = {:?} }}\n\n\
         [profile.release]\ndebug = false\ncodegen-units = 4\n\n[workspace]\n",
        project.name, project.folder
    );
    files::write(&folder.join("Cargo.toml"), manifest)?;
    files::write(&folder.join("src/main.rs"), MAIN)?;
    // Pins the probe's dependencies to the versions that the crate uses.
    if let Ok(lock) = files::read(&project.workspace.join("Cargo.lock")) {
        files::write(&folder.join("Cargo.lock"), lock)?;
    }
    let target = project.target.join("fusewire-probe/target");
    let mut command = process::clean(&host_cargo());
    command
        .args(["build", "--release", "--quiet"])
        .current_dir(&folder)
        .env("CARGO_TARGET_DIR", &target)
        .env("PROBED_CRATE", &project.crate_name);
    process::run("building the host's list of kernels", &mut command)?;
    // Copies the program, because the probe of another crate overwrites it in the target folder.
    let program = folder.join("program");
    std::fs::copy(target.join("release/probe"), &program).map_err(|source| Error::File {
        action: "copy the probe to",
        path: program.clone(),
        source,
    })?;
    let output = process::run("listing the host's kernels", &mut process::clean(&program))?;
    let HostInfo { kernels, grid } =
        serde_json::from_str(&output.stdout).map_err(|error| Error::Parse {
            what: "the host's list of kernels".to_owned(),
            detail: error.to_string(),
        })?;
    if kernels.is_empty() {
        return Err(Error::Project(format!("{} has no kernels", project.name)));
    }
    Ok(Host {
        kernels,
        grid,
        program,
    })
}
