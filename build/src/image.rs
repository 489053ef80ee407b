//! Images as the verifier and the manifest see them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::compile::{Compilation, Part};
use crate::host::HostKernel;
use crate::project::Exemption;
use crate::text::assembly::{AsmFunction, Resources};
use crate::text::{amd, ir, ptx};
use crate::{Result, Target, Vendor, files, process, toolchain};

/// One kernel crate for one target, in one image or several: the texts, read.
#[derive(Clone, Debug)]
pub struct Image {
    /// For which GPU.
    pub target: Target,
    /// Functions of the final assembly.
    pub functions: Vec<AsmFunction>,
    /// Functions of the optimised IR.
    pub ir: Vec<ir::IrFunction>,
    /// The final assembly, for what stands outside functions.
    pub assembly: String,
    /// Names of the arguments in AMD metadata, and resources of every kernel that has them.
    pub kernels: Vec<Kernel>,
    /// What the host passes, if its list could be read.
    pub host: Option<Vec<HostKernel>>,
    /// Exceptions.
    pub allow: Vec<Exemption>,
    /// Kernels that go by multicast: patterns.
    pub multicast: Vec<String>,
    /// What a driver loads, by name; no path for AMD without `ld.lld`.
    pub files: Vec<ImageFile>,
    /// Why ptxas refused it, if it did.
    pub refused: Option<String>,
}

/// A file that a driver loads.
#[derive(Clone, Debug)]
pub struct ImageFile {
    /// The family of kernels, or the package.
    pub name: String,
    /// Where it lies, if it could be made.
    pub path: Option<PathBuf>,
    /// Kernels that it holds.
    pub entries: Vec<String>,
}

/// A kernel of an image.
#[derive(Clone, Debug)]
pub struct Kernel {
    /// Its symbol.
    pub name: String,
    /// What it uses; `None` where nobody could say (PTX without ptxas).
    pub resources: Option<Resources>,
}

impl Image {
    /// Reads what was compiled. `ptxas`, where given, assembles the PTX and says what each kernel uses.
    ///
    /// # Errors
    /// Files that cannot be read, texts that cannot be understood.
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
                    match ptxas.map(|ptxas| assemble(compiled, part, ptxas)) {
                        Some(Ok(said)) => resources.extend(ptx::resources(&said)),
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
            files: list,
            refused,
        })
    }

    /// The kernels' functions.
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

/// Runs ptxas, or finds what it said about this very content.
fn assemble(compiled: &Compilation, part: &Part, ptxas: &Path) -> Result<String> {
    let version = toolchain::ask(ptxas, &["--version"]).unwrap_or_default();
    let stamp = format!("{}\n{version}\n----\n", compiled.key);
    let said = part.assembly.with_extension("ptxas");
    if let Ok(text) = files::read(&said)
        && let Some(rest) = text.strip_prefix(&stamp)
    {
        return Ok(rest.to_owned());
    }
    let output = process::run(
        &format!("ptxas of {} for {}", part.name, compiled.target),
        process::clean(ptxas)
            .arg("-v")
            .arg(format!("-arch={}", compiled.target))
            .arg(&part.assembly)
            .arg("-o")
            .arg(part.assembly.with_extension("cubin")),
    )?;
    let text = output.stdout + &output.stderr;
    files::write(&said, format!("{stamp}{text}"))?;
    Ok(text)
}

/// What an image's manifest says about it.
#[derive(Debug, Serialize)]
pub struct ManifestImage {
    /// For which GPU.
    pub target: Target,
    /// File name beside the manifest.
    pub file: String,
    /// Hash of the file.
    pub sha256: String,
    /// Most lanes a block.
    pub max_threads: u32,
    /// Its kernels.
    pub entries: Vec<ManifestEntry>,
}

/// What a manifest says about a kernel.
#[derive(Debug, Serialize)]
pub struct ManifestEntry {
    /// Exported symbol.
    pub name: String,
    /// Parameters, in order: offset and size in bytes.
    pub parameters: Vec<(usize, usize)>,
    /// What it uses, where that is known.
    pub resources: Option<Resources>,
}

impl Image {
    /// What a manifest says about the kernels of one of the files, by name.
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
