//! Writes images to the folder where the host library finds them.

use std::path::{Path, PathBuf};

use crate::findings::author_line;
use crate::image::Image;
use crate::{Error, Options, Project, Result, Target, Toolchain, Vendor};
use crate::{compile, files, lines, sources};

/// Compiles the kernels of the crate in `folder` for `target`, and writes the images to the folder
/// where programs in cargo's target folder find them, as `fusewire-build build` does. Returns the
/// files. Compiles nothing if the inputs have not changed.
///
/// PTX gets a line table, so that errors of an emulator or a debugger name source lines. Its
/// instructions are those that `fusewire-build build` writes.
///
/// Tests of a kernel crate call this function, so that they never run an image of old sources:
///
/// ```no_run
/// # fn main() -> fusewire_build::Result<()> {
/// use fusewire_build::{Target, install_images};
///
/// install_images(env!("CARGO_MANIFEST_DIR"), Target::Sm90)?;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Toolchain`] if there is no device tool chain, [`Error::Project`] if the folder contains
/// no package, [`Error::Command`] if the kernels do not compile.
pub fn install_images(folder: impl AsRef<Path>, target: Target) -> Result<Vec<PathBuf>> {
    let toolchain = Toolchain::find()?;
    let project = Project::at(folder.as_ref())?;
    let options = Options::default();
    let out = out_folder(&project, &options);
    files::create_directory(&out)?;
    // Tests of several processes or threads can call this function at the same time.
    let _lock = files::lock(&out.join("lock"))?;
    let compiled = compile(&toolchain, &project, target, &options)?;
    let image = Image::read(&compiled, None)?;
    let mark = format!("// fusewire lines {}\n", compiled.key);
    // Computed for the first file that needs it.
    let mut located = None;
    let mut written = Vec::new();
    for part in &image.files {
        let from = part.path.as_ref().ok_or_else(|| {
            let missing = toolchain.amd.as_ref().err().cloned();
            Error::Toolchain(missing.into_iter().collect())
        })?;
        let (name, bytes) = file(&project, &options, target, &part.name, from)?;
        let path = out.join(name);
        written.push(path.clone());
        if target.vendor() == Vendor::Amd {
            files::write(&path, bytes)?;
            continue;
        }
        if files::read(&path).is_ok_and(|text| text.ends_with(&mark)) {
            continue;
        }
        let (image, map) = match &located {
            Some(known) => known,
            None => located.insert(lines::annotate(&toolchain, &project, &compiled, &image)?),
        };
        let text = String::from_utf8_lossy(&bytes);
        let text = lines::with_table(&text, image, |location| {
            author_line(&project, &map.frames(location))
        })?;
        files::write(&path, text + &mark)?;
    }
    Ok(written)
}

/// Returns the folder in which programs in cargo's target folder find the images of a crate.
pub fn out_folder(project: &Project, options: &Options) -> PathBuf {
    let name = format!("{}{}", project.name, options.suffix());
    project.gpu_folder().join("out").join(name)
}

/// Reads the image `name` in the file `from`. Returns the file name under which the host library
/// looks for the image, and the content to write to that file.
///
/// For grid forms, appends the hash of the sources to the PTX. A grid form takes a pointer to a
/// table of structs, and the parameter list in the PTX does not describe the layout of these
/// structs. The library therefore compares this hash with the hash of its own images.
///
/// # Errors
/// [`Error::File`] if a file cannot be read.
pub fn file(
    project: &Project,
    options: &Options,
    target: Target,
    name: &str,
    from: &Path,
) -> Result<(String, Vec<u8>)> {
    let suffix = match options.families.is_empty() {
        true => options.suffix(),
        // The library looks for a family's image under a file name without the suffix.
        false => String::new(),
    };
    let file = format!("{name}{suffix}.{target}.{}", target.extension());
    let mut bytes = files::read_bytes(from)?;
    if options.multi_rank_grid && target.vendor() == Vendor::Nvidia {
        bytes.extend(format!("\n// fusewire sources {}\n", sources::hash(project)?).bytes());
    }
    Ok((file, bytes))
}
