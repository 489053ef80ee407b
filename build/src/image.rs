//! The verifier's representation of images, and their entries in a manifest.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::compile::Compilation;
use crate::host::HostKernel;
use crate::project::{Budget, Exemption, Settings};
use crate::text::assembly::{AsmFunction, Resources};
use crate::text::{amd, ir, ptx};
use crate::{Result, Target, Vendor, files, process, sources, toolchain};

/// The parsed images of one kernel crate for one target.
#[derive(Clone, Debug)]
pub struct Image {
    /// The GPU architecture.
    pub target: Target,
    /// Functions of the final assembly.
    pub functions: Vec<AsmFunction>,
    /// Functions of the optimised IR.
    pub ir: Vec<ir::IrFunction>,
    /// Text of the final assembly, including directives outside functions.
    pub assembly: String,
    /// The kernels with their resources.
    pub kernels: Vec<Kernel>,
    /// The host's list of kernels, if it could be read.
    pub host: Option<Vec<HostKernel>>,
    /// The crate's exemptions from rules.
    pub allow: Vec<Exemption>,
    /// Name patterns of the kernels that use multicast.
    pub multicast: Vec<String>,
    /// Limits on the size of kernels.
    pub budgets: Vec<Budget>,
    /// The files that a driver loads.
    pub files: Vec<ImageFile>,
    /// The output of ptxas, if ptxas rejected the image.
    pub refused: Option<String>,
}

/// A file that a driver loads.
#[derive(Clone, Debug)]
pub struct ImageFile {
    /// The family of kernels, or the package.
    pub name: String,
    /// Path of the file; `None` for an AMD target if `llvm-mc` or `ld.lld` is missing.
    pub path: Option<PathBuf>,
    /// The kernels in the file.
    pub entries: Vec<String>,
}

/// A kernel of an image.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Symbol of the kernel.
    pub name: String,
    /// Resource usage of the kernel; `None` if unknown (PTX without ptxas).
    pub resources: Option<Resources>,
}

impl Image {
    /// Reads the files of a compilation. If `ptxas` is given, runs ptxas on the PTX to determine
    /// the resource usage of each kernel.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) if a file cannot be read,
    /// [`Error::Parse`](crate::Error::Parse) if a text cannot be parsed.
    pub fn read(compiled: &Compilation, ptxas: Option<&Path>) -> Result<Self> {
        let target = compiled.target;
        let ir = ir::parse(&files::read(&compiled.ir)?, target.vendor());
        let mut assembly = String::new();
        let mut functions: Vec<AsmFunction> = Vec::new();
        let mut resources: HashMap<String, Resources> = HashMap::new();
        let mut refused = None;
        let mut list = Vec::new();
        for part in &compiled.parts {
            let text = files::read(&part.assembly)?;
            let found = match target.vendor() {
                Vendor::Amd => {
                    let (found, metadata) = amd::parse(&text)?;
                    let used = metadata.into_iter();
                    resources.extend(used.map(|(name, kernel)| (name, kernel.resources)));
                    found
                }
                Vendor::Nvidia => {
                    match ptxas.map(|ptxas| assemble(ptxas, &part.assembly, &text, target)) {
                        Some(Ok((_, said))) => resources.extend(ptx::resources(&said)),
                        Some(Err(crate::Error::Command { output, .. })) => refused = Some(output),
                        Some(Err(error)) => return Err(error),
                        None => {}
                    }
                    ptx::parse(&text)?
                }
            };
            let kernels = found.iter().filter(|function| function.kernel);
            list.push(ImageFile {
                name: part.name.clone(),
                path: part.image.clone(),
                entries: kernels.map(|kernel| kernel.name.clone()).collect(),
            });
            functions.extend(found);
            assembly.push_str(&text);
        }
        let kernels = kernels(&functions, |name| resources.get(name).copied());
        Ok(Self {
            target,
            functions,
            ir,
            assembly,
            kernels,
            host: None,
            allow: Vec::new(),
            multicast: Vec::new(),
            budgets: Vec::new(),
            files: list,
            refused,
        })
    }

    /// Copies the verifier's settings from those of a crate.
    pub fn configure(&mut self, settings: &Settings) {
        self.allow.clone_from(&settings.allow);
        self.multicast.clone_from(&settings.multicast);
        self.budgets.clone_from(&settings.budget);
    }

    /// Assembles the PTX of `file` for `target`, which may be newer than the target of the PTX.
    /// Returns the cubin and the manifest's entries of its kernels.
    ///
    /// # Errors
    /// [`Error::Command`](crate::Error::Command) if ptxas rejects the PTX,
    /// [`Error::File`](crate::Error::File) if a file cannot be read.
    pub fn cubin(
        &self,
        file: &ImageFile,
        target: Target,
        ptxas: &Path,
    ) -> Result<(Vec<u8>, Vec<ManifestEntry>)> {
        let ptx = file.path.as_deref().unwrap_or(Path::new(""));
        let (cubin, said) = assemble(ptxas, ptx, &files::read(ptx)?, target)?;
        let resources = ptx::resources(&said);
        let mut entries = self.manifest_entries(file);
        for entry in &mut entries {
            entry.resources = resources.get(&entry.name).copied();
        }
        Ok((files::read_bytes(&cubin)?, entries))
    }

    /// Returns the functions that are kernels.
    pub fn entries(&self) -> impl Iterator<Item = &AsmFunction> {
        self.functions.iter().filter(|function| function.kernel)
    }
}

fn kernels(
    functions: &[AsmFunction],
    resources: impl Fn(&str) -> Option<Resources>,
) -> Vec<Kernel> {
    functions
        .iter()
        .filter(|function| function.kernel)
        .map(|function| Kernel {
            name: function.name.clone(),
            resources: resources(&function.name),
        })
        .collect()
}

/// Runs ptxas on the PTX in the file `ptx`, whose content is `text`. Returns the path of the cubin
/// and the output of ptxas. If an earlier run had the same input, returns those of that run.
fn assemble(ptxas: &Path, ptx: &Path, text: &str, target: Target) -> Result<(PathBuf, String)> {
    let version = toolchain::ask(ptxas, &["--version"]).unwrap_or_default();
    let stamp = format!("{}\n{version}\n----\n", sources::sha256(text.as_bytes()));
    let said = ptx.with_extension(format!("{target}.ptxas"));
    let cubin = ptx.with_extension(format!("{target}.cubin"));
    if let Ok(text) = files::read(&said)
        && let Some(rest) = text.strip_prefix(&stamp)
        && cubin.exists()
    {
        return Ok((cubin, rest.to_owned()));
    }
    let output = process::run(
        &format!("ptxas of {} for {target}", ptx.display()),
        process::clean(ptxas)
            .arg("-v")
            .arg(format!("-arch={target}"))
            .arg(ptx)
            .arg("-o")
            .arg(&cubin),
    )?;
    let text = output.stdout + &output.stderr;
    files::write(&said, format!("{stamp}{text}"))?;
    Ok((cubin, text))
}

/// An image in a manifest.
#[derive(Debug, Serialize)]
pub struct ManifestImage {
    /// The GPU architecture.
    pub target: Target,
    /// File name, in the folder of the manifest.
    pub file: String,
    /// Hash of the file.
    pub sha256: String,
    /// Maximum number of lanes per block.
    pub max_threads: u32,
    /// Kernels of the image.
    pub entries: Vec<ManifestEntry>,
}

/// A kernel in a manifest.
#[derive(Debug, Serialize)]
pub struct ManifestEntry {
    /// Exported symbol.
    pub name: String,
    /// Parameters, in order: offset and size in bytes.
    pub parameters: Vec<(usize, usize)>,
    /// Resource usage of the kernel, if known.
    pub resources: Option<Resources>,
}

impl Image {
    /// Returns the manifest's entries for the kernels in `file`, sorted by name.
    pub fn manifest_entries(&self, file: &ImageFile) -> Vec<ManifestEntry> {
        let mut entries: Vec<_> = self
            .entries()
            .filter(|function| file.entries.contains(&function.name))
            .map(|function| ManifestEntry {
                name: function.name.clone(),
                parameters: function
                    .parameters
                    .iter()
                    .map(|p| (p.offset, p.size))
                    .collect(),
                resources: self
                    .kernels
                    .iter()
                    .find(|kernel| kernel.name == function.name)
                    .and_then(|kernel| kernel.resources),
            })
            .collect();
        entries.sort_by(|a, b| a.name.cmp(&b.name));
        entries
    }
}
