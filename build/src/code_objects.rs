//! The AMD images that the host library includes, and their check by [`verify::amd`].

use std::collections::BTreeMap;
use std::path::Path;

use crate::portable::{self, PackedImage};
use crate::text::disassembly::{self, Disassembly};
use crate::verify::{self, Violation, amd};
use crate::{Result, Target, files, process};

/// An AMD image.
#[derive(Clone, Debug)]
pub struct CodeObject {
    /// File name of the compressed image.
    pub file: String,
    /// The GPU architecture.
    pub target: Target,
    /// Kernels of the image.
    pub kernels: Vec<Disassembly>,
}

/// Reads and disassembles the AMD images in `folder` for one target. Writes temporary files to
/// `scratch`.
///
/// # Errors
/// [`crate::Error::File`] or [`crate::Error::Parse`] if an image cannot be read,
/// [`crate::Error::Command`] if `objdump` fails.
pub fn read(
    folder: &Path,
    target: Target,
    objdump: &Path,
    scratch: &Path,
) -> Result<Vec<CodeObject>> {
    files::create_directory(scratch)?;
    let images = portable::read(folder)?.images;
    let own = images.iter().filter(|image| image.target == target.name());
    let read = |image: &PackedImage| {
        let bytes = portable::contents(folder, image)?;
        let path = scratch.join(&image.file).with_extension("");
        files::write(&path, &bytes)?;
        let mut command = process::clean(objdump);
        command.args(disassembly::OBJDUMP).arg(&path);
        let output = process::run("disassembling an AMD image", &mut command)?;
        Ok(CodeObject {
            file: image.file.clone(),
            target,
            kernels: disassembly::parse(&output.stdout),
        })
    };
    own.map(read).collect()
}

/// Checks code objects, and compares the kernels of different targets that have the same name.
/// Returns the violations that no exemption covers, by file.
pub fn check(objects: &[CodeObject]) -> BTreeMap<&str, Vec<Violation>> {
    let exemptions = amd::exemptions();
    let mut out = BTreeMap::new();
    let mut first: BTreeMap<&str, (Target, &Disassembly)> = BTreeMap::new();
    for object in objects {
        let mut all = Vec::new();
        for kernel in &object.kernels {
            all.extend(amd::check(object.target, kernel));
            let form = (object.target, kernel);
            let other = *first.entry(&kernel.name).or_insert(form);
            if other.0 != object.target {
                all.extend(amd::compare([other, form]));
            }
        }
        let left = verify::without_allowed(all, &exemptions);
        if !left.is_empty() {
            out.insert(object.file.as_str(), left);
        }
    }
    out
}
