//! The crate to compile: its path, its dependencies, and its settings in `Cargo.toml`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::{Error, Result, Vendor, process, tokens};

/// A kernel crate.
#[derive(Clone, Debug)]
pub struct Project {
    /// Package name.
    pub name: String,
    /// Name of the library in Rust.
    pub crate_name: String,
    /// Folder that contains the package's manifest.
    pub folder: PathBuf,
    /// Root of the package's workspace.
    pub workspace: PathBuf,
    /// Cargo's target folder.
    pub target: PathBuf,
    /// Folders of this package and of the packages that it depends on by path.
    pub sources: Vec<PathBuf>,
    /// Name, version, edition, library and features of each package in `sources`.
    pub packages: Vec<String>,
    /// Folders of Fusewire's own crates, in the form in which they appear in line tables.
    pub library: Vec<String>,
    /// Name and version of every dependency that is not a path dependency.
    pub dependencies: Vec<String>,
    /// Folder of `fusewire-device`, if the crate depends on it.
    pub device: Option<PathBuf>,
    /// LLVM IR files to link with an image, by the vendor's name.
    pub shims: BTreeMap<String, Vec<PathBuf>>,
    /// Settings in the crate's manifest.
    pub settings: Settings,
}

/// `[package.metadata.fusewire]` of a kernel crate.
///
/// ```toml
/// [package.metadata.fusewire]
/// max-threads = 512
/// reductions = ["all_reduce*"]
/// multicast = ["*_nvls_*"]
///
/// [[package.metadata.fusewire.threads]]
/// kernel = "reduce_norm*"
/// most = 448
/// reason = "two sweeps of 16 bytes per lane over 7168 elements; 512 lanes leave too few registers"
///
/// [[package.metadata.fusewire.budget]]
/// kernel = "reduce_norm*"
/// instructions = 3000
/// registers = 128
/// dependent-loads = 3
/// alias-fences = 2
///
/// [package.metadata.fusewire.shims]
/// nvptx = ["shims/nvptx.ll"]
///
/// [[package.metadata.fusewire.allow]]
/// rule = "scope"
/// kernel = "*"
/// reason = "only this GPU accesses epochs and busy words"
/// ```
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Settings {
    /// Maximum number of lanes per block, which limits the registers of a lane.
    #[serde(default)]
    pub max_threads: Option<u32>,
    /// Kernels with a lower maximum number of lanes per block.
    #[serde(default)]
    pub threads: Vec<Threads>,
    /// Name patterns, with `*`, of kernels whose hot loop reduces.
    #[serde(default)]
    pub reductions: Vec<String>,
    /// Name patterns, with `*`, of kernels that use multicast on GPUs that support it. No other
    /// kernel may use multicast.
    #[serde(default)]
    pub multicast: Vec<String>,
    /// Limits on the size of kernels. If there are any, each kernel needs one.
    #[serde(default)]
    pub budget: Vec<Budget>,
    /// IR files to link with the images of this crate and of crates that depend on it.
    #[serde(default)]
    pub shims: BTreeMap<String, Vec<PathBuf>>,
    /// Exemptions from rules of the verifier.
    #[serde(default)]
    pub allow: Vec<Exemption>,
}

/// A lower maximum number of lanes per block for the kernels that match a pattern.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Threads {
    /// Name pattern of the kernels, with `*`.
    pub kernel: String,
    /// Maximum number of lanes per block.
    pub most: u32,
    /// Justification.
    pub reason: String,
}

/// Limits on the size of the kernels that match a pattern. The first one that matches applies.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Budget {
    /// Name pattern of the kernels, with `*`.
    pub kernel: String,
    /// Maximum number of PTX instructions, without those of functions that are not inlined.
    pub instructions: usize,
    /// Maximum number of registers of a lane.
    #[serde(default)]
    pub registers: Option<u32>,
    /// Maximum number of loads of global memory in a chain, each from an address that the load
    /// before returned.
    #[serde(default)]
    pub dependent_loads: Option<usize>,
    /// Maximum number of alias fences, which order accesses by multicast with others. By default,
    /// there must be none.
    #[serde(default)]
    pub alias_fences: usize,
}

/// An exemption from a rule of the verifier.
#[derive(Clone, Debug, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Exemption {
    /// The rule.
    pub rule: String,
    /// Name pattern of the kernels, with `*`.
    pub kernel: String,
    /// Text that the violation's description must contain. If empty, any description matches.
    #[serde(default)]
    pub containing: String,
    /// Maximum number of violations per kernel; unlimited if absent.
    #[serde(default)]
    pub limit: Option<usize>,
    /// Justification.
    pub reason: String,
}

/// Maximum number of lanes per block if the crate does not set it.
pub const MAX_THREADS: u32 = 512;

#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Option<Resolve>,
    workspace_members: Vec<String>,
    workspace_root: PathBuf,
    target_directory: PathBuf,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    source: Option<String>,
    edition: String,
    targets: Vec<CargoTarget>,
    manifest_path: PathBuf,
    metadata: Option<serde_json::Value>,
}

/// A cargo target: a library, a program or a test.
#[derive(Deserialize)]
struct CargoTarget {
    name: String,
    kind: Vec<String>,
    src_path: PathBuf,
}

impl Package {
    /// Returns the folder in the form in which it appears in line tables (`-Ztrim-paths`): relative
    /// to the workspace or, outside the workspace, the package's name and version.
    fn traced_folder(&self, workspace: &Path) -> String {
        let folder = self.folder();
        match folder.strip_prefix(workspace) {
            Ok(inner) => format!("{}/", inner.display()),
            Err(_) => format!("{}-{}/", self.name, self.version),
        }
    }

    fn library(&self) -> Option<&CargoTarget> {
        self.targets.iter().find(|target| {
            let kinds = ["lib", "proc-macro", "rlib", "staticlib"];
            target
                .kind
                .iter()
                .any(|kind| kinds.contains(&kind.as_str()))
        })
    }

    /// Describes the parts of the manifest that affect an image.
    fn description(&self, features: &[String]) -> String {
        let library = self.library();
        let folder = self.folder();
        let library = library.map_or(Path::new(""), |target| {
            target
                .src_path
                .strip_prefix(&folder)
                .unwrap_or(&target.src_path)
        });
        format!(
            "{} {} edition {} at {} with {features:?}",
            self.name,
            self.version,
            self.edition,
            library.display()
        )
    }

    fn folder(&self) -> PathBuf {
        self.manifest_path
            .parent()
            .map(Path::to_owned)
            .unwrap_or_default()
    }
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
    features: Vec<String>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<DependencyKind>,
}

#[derive(Deserialize)]
struct DependencyKind {
    /// `dev`, `build`, or `None` for an ordinary dependency.
    kind: Option<String>,
    /// A condition on the target, such as `cfg(unix)`.
    target: Option<String>,
}

impl Dependency {
    /// Returns `true` if an image can contain code of the dependency, that is, if the dependency is
    /// neither only for tests nor only for CPUs.
    fn counts(&self) -> bool {
        self.dep_kinds.iter().any(|kind| {
            let for_cpus = kind.target.as_deref().is_some_and(tokens::excludes_gpus);
            kind.kind.as_deref() != Some("dev") && !for_cpus
        })
    }
}

impl Project {
    /// Reads the crate in `folder` (a package's folder or its `Cargo.toml`).
    ///
    /// # Errors
    /// [`Error::Project`] if there is no package, [`Error::Command`] if cargo fails.
    pub fn at(folder: &Path) -> Result<Self> {
        let manifest = if folder.is_dir() {
            folder.join("Cargo.toml")
        } else {
            folder.to_owned()
        };
        let manifest = manifest
            .canonicalize()
            .map_err(|_| Error::Project(format!("{} does not exist", manifest.display())))?;
        let metadata = metadata(Some(&manifest))?;
        let package = metadata
            .packages
            .iter()
            .find(|package| {
                package
                    .manifest_path
                    .canonicalize()
                    .is_ok_and(|p| p == manifest)
            })
            .ok_or_else(|| Error::Project(format!("{} holds no package", manifest.display())))?;
        Self::of(package, &metadata)
    }

    /// Reads the package `name` of the workspace that contains the current folder. The name
    /// `kernels` also selects `fusewire-kernels`.
    ///
    /// # Errors
    /// Returns the errors of [`Project::at`].
    pub fn named(name: &str) -> Result<Self> {
        let metadata = metadata(None)?;
        let package = metadata
            .packages
            .iter()
            .filter(|package| metadata.workspace_members.contains(&package.id))
            .find(|package| package.name == name || package.name == format!("fusewire-{name}"))
            .ok_or_else(|| Error::Project(format!("no package {name} in this workspace")))?;
        Self::of(package, &metadata)
    }

    fn of(package: &Package, metadata: &Metadata) -> Result<Self> {
        let settings = settings_of(package)?;
        let nodes: BTreeMap<&str, &Node> = metadata
            .resolve
            .iter()
            .flat_map(|resolve| &resolve.nodes)
            .map(|node| (node.id.as_str(), node))
            .collect();
        let mut reached = BTreeSet::new();
        let mut open = vec![package.id.as_str()];
        while let Some(id) = open.pop() {
            if reached.insert(id)
                && let Some(node) = nodes.get(id)
            {
                let counting = node.deps.iter().filter(|dependency| dependency.counts());
                open.extend(counting.map(|dependency| dependency.pkg.as_str()));
            }
        }
        let mut sources = Vec::new();
        let mut packages = Vec::new();
        let mut library = Vec::new();
        let mut dependencies = Vec::new();
        let mut device = None;
        let mut shims: BTreeMap<String, Vec<PathBuf>> = BTreeMap::new();
        for other in metadata
            .packages
            .iter()
            .filter(|other| reached.contains(other.id.as_str()))
        {
            if other.source.is_none() {
                sources.push(other.folder());
                let features = nodes.get(other.id.as_str()).map(|node| &node.features[..]);
                packages.push(other.description(features.unwrap_or_default()));
            } else {
                dependencies.push(format!("{} {}", other.name, other.version));
            }
            if other.name.starts_with("fusewire-") && other.id != package.id {
                library.push(other.traced_folder(&metadata.workspace_root));
            }
            if other.name == "fusewire-device" {
                device = Some(other.folder());
            }
            for (vendor, files) in settings_of(other)?.shims {
                let files = files.iter().map(|file| other.folder().join(file));
                shims.entry(vendor).or_default().extend(files);
            }
        }
        sources.sort();
        packages.sort();
        dependencies.sort();
        let library_name = package.library().map(|target| &target.name);
        Ok(Self {
            name: package.name.clone(),
            crate_name: library_name.unwrap_or(&package.name).replace('-', "_"),
            folder: package.folder(),
            workspace: metadata.workspace_root.clone(),
            target: metadata.target_directory.clone(),
            sources,
            packages,
            library,
            dependencies,
            device,
            shims,
            settings,
        })
    }

    /// Returns the maximum number of lanes per block for all kernels of the crate.
    pub fn max_threads(&self) -> u32 {
        self.settings.max_threads.unwrap_or(MAX_THREADS)
    }

    /// Returns the maximum number of lanes per block for `kernel`, which may be lower than
    /// [`Project::max_threads`].
    pub fn max_threads_of(&self, kernel: &str) -> u32 {
        let bound = |it: &&Threads| fits(&it.kernel, kernel);
        let own = self.settings.threads.iter().find(bound);
        own.map_or(self.max_threads(), |it| it.most.min(self.max_threads()))
    }

    /// Returns `true` if `file`, a path from a line table, belongs to one of Fusewire's own crates.
    pub fn is_library_file(&self, file: &str) -> bool {
        let within = |folder: &String| {
            file.starts_with(folder.as_str()) || file.contains(&format!("/{folder}"))
        };
        self.library.iter().any(within)
    }

    /// Returns the IR files to link with an image for `vendor`.
    pub fn shims(&self, vendor: Vendor) -> &[PathBuf] {
        self.shims.get(vendor.name()).map_or(&[], Vec::as_slice)
    }

    /// Returns the folder for GPU builds in cargo's target folder.
    pub fn gpu_folder(&self) -> PathBuf {
        self.target.join("fusewire-gpu")
    }
}

fn settings_of(package: &Package) -> Result<Settings> {
    let Some(value) = package
        .metadata
        .as_ref()
        .and_then(|all| all.get("fusewire"))
    else {
        return Ok(Settings::default());
    };
    Settings::deserialize(value).map_err(|error| Error::Parse {
        what: format!("[package.metadata.fusewire] of {}", package.name),
        detail: error.to_string(),
    })
}

/// Returns the path of the cargo that started this program. If cargo did not start it, returns
/// `cargo`, which is looked up in `$PATH`.
pub(crate) fn host_cargo() -> PathBuf {
    std::env::var_os("CARGO").map_or_else(|| PathBuf::from("cargo"), PathBuf::from)
}

fn metadata(manifest: Option<&Path>) -> Result<Metadata> {
    let mut command = process::clean(&host_cargo());
    command.args(["metadata", "--format-version", "1"]);
    // Programs of the crate are in this target folder, and search it for images.
    if let Some(folder) = std::env::var_os("CARGO_TARGET_DIR") {
        command.env("CARGO_TARGET_DIR", folder);
    }
    if let Some(manifest) = manifest {
        command.arg("--manifest-path").arg(manifest);
    }
    let output = process::run("cargo metadata", &mut command)?;
    serde_json::from_str(&output.stdout).map_err(|error| Error::Parse {
        what: "cargo metadata".to_owned(),
        detail: error.to_string(),
    })
}

/// Returns `true` if `name` matches `pattern`, in which `*` matches any text.
pub(crate) fn fits(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else {
        return false;
    };
    let mut parts: Vec<&str> = parts.collect();
    let Some(last) = parts.pop() else {
        return rest.is_empty();
    };
    for part in parts {
        let Some(at) = rest.find(part) else {
            return false;
        };
        rest = &rest[at + part.len()..];
    }
    rest.ends_with(last)
}

#[cfg(test)]
mod tests {
    use super::fits;

    #[test]
    fn patterns() {
        assert!(fits("*", "send"));
        assert!(fits("send", "send"));
        assert!(!fits("send", "sender"));
        assert!(fits("all_*_any", "all_reduce_any"));
        assert!(!fits("all_*_any", "all_any"));
        assert!(fits("*reduce*", "all_reduce_f32"));
    }
}
