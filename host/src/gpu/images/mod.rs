//! GPU images: the images of the library's own kernels, which the feature `images` embeds in the
//! library, and the images of user kernel crates.
//!
//! Images for NVIDIA GPUs are cubins or PTX. The driver loads a cubin as it is, and compiles PTX,
//! which takes seconds. A cubin runs on GPUs with the major version of its target. PTX runs on its
//! target and on all later GPUs, so the PTX with the newest target that the GPU can run is chosen.
//! Images for AMD GPUs are code objects, which run only on their target architecture.
//!
//! # Images of the library
//! The library contains its kernels as cubins for sm_80, sm_90 and sm_100, and as PTX for sm_80 and
//! sm_90. It uses PTX if there is no cubin for the GPU, if the driver refuses the cubin, or if the
//! environment variable `CUDA_FORCE_PTX_JIT` is 1, which makes the driver refuse all cubins.
//!
//! # User kernels
//! `fusewire-build build --crate FOLDER --out OUT` writes `NAME.TARGET.ptx` and `NAME.TARGET.co`,
//! where NAME is the name of the crate. `ptxas -arch sm_90 NAME.sm_90.ptx -o NAME.sm_90.cubin`
//! assembles a cubin. At run time [`Images::find`] searches for these files in the following order:
//!
//! 1. in the folders that `FUSEWIRE_IMAGES` lists, separated as in `PATH`;
//! 2. in the program's folder, and in `images` next to the program;
//! 3. in `fusewire-gpu/out/NAME` in cargo's target folder, if the program is in a target folder.
//!    `fusewire-build build` writes to this folder by default.
//!
//! The search stops at the first folder with an image for the device. In that folder, a cubin that
//! the GPU can run is preferred to PTX. A GPU can run a cubin if the major version of the target is
//! that of the GPU and the minor version is not newer. An architecture-specific cubin (`sm_90a`)
//! requires a GPU of exactly that version. Files with the additional suffix `.lzma` are
//! decompressed. [`Images::from_path`] reads one file without a search.
//!
//! # Replacing the library's images
//! If the environment variable [`LIBRARY_IMAGES`] names a folder, images in that folder
//! (`all_reduce.sm_90.ptx`) replace the library's images of the same kernel families. Modified
//! kernels can thus be measured without rebuilding the program. When an image is loaded, its kernel
//! parameters are compared with those of the program.

mod code_object;
mod cubin;
mod library;
mod ptx;

#[cfg(test)]
mod cubin_tests;
#[cfg(test)]
mod tests;

use core::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

pub use self::library::MANIFEST;
use super::driver::Properties;
use crate::{Error, Result};

/// The environment variable that names a folder whose images replace the library's own images.
pub const LIBRARY_IMAGES: &str = "FUSEWIRE_LIBRARY_IMAGES";

/// Maximum size in bytes of an image file.
const MOST_BYTES: u64 = 256 << 20;

/// An image that a driver can load: kernels for one architecture.
#[derive(Clone)]
pub struct Image {
    /// A kernel family of the library, or the name of a user crate.
    pub name: String,
    /// Target architecture: `sm_90`, `gfx942`.
    pub target: String,
    /// PTX with its terminating zero byte, a cubin, or a code object.
    pub bytes: Vec<u8>,
    /// The kernels in the image.
    pub entries: Vec<Entry>,
}

/// A kernel of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Exported symbol.
    pub name: String,
    /// Offset and size in bytes of each parameter, in order.
    pub parameters: Vec<(usize, usize)>,
}

impl fmt::Debug for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Image")
            .field("name", &self.name)
            .field("target", &self.target)
            .field("bytes", &self.bytes.len())
            .field("entries", &self.entries.len())
            .finish()
    }
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}", self.name, self.target)
    }
}

impl Image {
    /// Parses PTX, a cubin or a code object. Reads the target and the kernels from the metadata in
    /// the image.
    ///
    /// # Errors
    /// `Error::Image` if the bytes are in none of these formats or are damaged.
    pub fn new(name: &str, mut bytes: Vec<u8>) -> Result<Self> {
        let wrong = |detail: String| Error::Image {
            image: name.to_owned(),
            detail,
        };
        let (target, entries) = if cubin::is_cubin(&bytes) {
            cubin::parse(&bytes).map_err(wrong)?
        } else if bytes.starts_with(b"\x7fELF") {
            code_object::parse(&bytes).map_err(wrong)?
        } else {
            let end = bytes
                .iter()
                .rposition(|&byte| byte != 0)
                .map_or(0, |at| at + 1);
            bytes.truncate(end);
            let text = core::str::from_utf8(&bytes).map_err(|_| {
                wrong("it is neither PTX, nor a cubin, nor a code object of an AMD GPU".to_owned())
            })?;
            let found = ptx::parse(text).map_err(wrong)?;
            bytes.push(0);
            found
        };
        if entries.is_empty() {
            return Err(wrong("it holds no kernel".to_owned()));
        }
        Ok(Self {
            name: name.to_owned(),
            target,
            bytes,
            entries,
        })
    }

    /// Returns the hash of the sources that this image was built from, or `None` if the image
    /// contains no such hash. Only PTX that `fusewire-build build --multi-rank-grid` built contains
    /// the hash, in a comment.
    pub(super) fn sources(&self) -> Option<&str> {
        const MARK: &str = "\n// fusewire sources ";
        let text = core::str::from_utf8(&self.bytes).ok()?;
        let (_, rest) = text.rsplit_once(MARK)?;
        rest.split(|end: char| !end.is_ascii_hexdigit()).next()
    }

    fn kind(&self) -> Kind {
        if cubin::is_cubin(&self.bytes) {
            Kind::Cubin
        } else {
            Kind::Other
        }
    }

    /// Returns true if the image is a cubin: machine code for an NVIDIA GPU.
    pub fn is_cubin(&self) -> bool {
        self.kind() == Kind::Cubin
    }

    /// Returns the kernel with the symbol `name`.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

/// The kind of an image. The rules for the targets that a device can run depend on the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// Machine code for an NVIDIA GPU.
    Cubin,
    /// PTX or a code object. The name of the target distinguishes the two (`sm_` or `gfx`).
    Other,
}

impl Kind {
    /// Returns the kind of the image with this file name. Ignores the suffix of a compressed file.
    fn of_file(name: &str) -> Self {
        match unpacked(name).ends_with(".cubin") {
            true => Self::Cubin,
            false => Self::Other,
        }
    }
}

/// Looks up images for one device, both among the library's images and in folders.
#[derive(Clone, Debug)]
pub struct Images {
    architecture: String,
    /// CUDA version that the driver supports, or `None` for any version and for AMD GPUs.
    cuda: Option<u32>,
    folders: Vec<PathBuf>,
    /// Possible output folders of `fusewire-build`. Any of several folders above the program may be
    /// cargo's target folder. This list contains one output folder in each of them.
    around: Vec<PathBuf>,
    /// The folder whose images replace the library's own images.
    library: Option<PathBuf>,
    /// True if cubins of the library's kernels are preferred to PTX.
    cubins: bool,
}

impl Images {
    /// Creates the image lookup for a device of `architecture` (see
    /// [`Properties::architecture`](super::driver::Properties::architecture)). Reads the
    /// environment variables.
    pub fn new(architecture: &str) -> Self {
        let listed = std::env::var_os("FUSEWIRE_IMAGES").unwrap_or_default();
        let mut folders: Vec<PathBuf> = std::env::split_paths(&listed)
            .filter(|folder| !folder.as_os_str().is_empty())
            .collect();
        let mut around = Vec::new();
        if let Some(program_folder) = std::env::current_exe()
            .ok()
            .as_deref()
            .and_then(Path::parent)
        {
            folders.push(program_folder.to_owned());
            folders.push(program_folder.join("images"));
            // Cargo places programs in target/release, target/release/examples or
            // target/TRIPLE/release/deps, so one of the three folders above the program's folder is
            // the target folder.
            let outer = program_folder.ancestors().skip(1).take(3);
            around.extend(outer.map(|folder| folder.join("fusewire-gpu/out")));
        }
        Self {
            architecture: architecture.to_owned(),
            cuda: None,
            folders,
            around,
            library: std::env::var_os(LIBRARY_IMAGES).map(PathBuf::from),
            cubins: std::env::var_os("CUDA_FORCE_PTX_JIT").is_none_or(|value| value != "1"),
        }
    }

    /// Creates the image lookup for a device of `architecture`. User images are searched for only
    /// in `folders`.
    pub fn in_folders(architecture: &str, folders: Vec<PathBuf>) -> Self {
        Self {
            architecture: architecture.to_owned(),
            cuda: None,
            folders,
            around: Vec::new(),
            library: None,
            cubins: true,
        }
    }

    /// Returns this lookup without the cubins of the library's kernels: [`Images::library`] then
    /// returns PTX.
    #[must_use]
    pub fn without_cubins(self) -> Self {
        Self {
            cubins: false,
            ..self
        }
    }

    fn device(&self) -> library::Device<'_> {
        library::Device {
            architecture: &self.architecture,
            cuda: self.cuda,
            cubins: self.cubins,
        }
    }

    /// Creates the image lookup for a device with the given properties. Chooses only images that
    /// its driver can load.
    pub(super) fn of(properties: &Properties) -> Self {
        let images = Self::new(&properties.architecture);
        let is_nvidia = properties.architecture.starts_with("sm_");
        Self {
            cuda: is_nvidia.then_some(properties.version),
            ..images
        }
    }

    /// Returns the device's architecture.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// Returns the kernel families for which [`Images::library`] has an image.
    ///
    /// # Errors
    /// `Error::Image` if the library has no images for the device. The error lists the available
    /// targets.
    pub fn families(&self) -> Result<Vec<&'static str>> {
        library::families(self.device())
    }

    /// Returns the image of a kernel family of the library. An image in the folder that
    /// [`LIBRARY_IMAGES`] names has priority.
    ///
    /// # Errors
    /// `Error::Image` if the library has no such image for the device, or if the image is damaged.
    pub fn library(&self, family: &str) -> Result<Image> {
        if let Some(folder) = &self.library {
            let mut candidates = candidates(folder, family);
            candidates.retain(|candidate| self.cubins || candidate.kind != Kind::Cubin);
            if let Some(path) = chosen(&self.architecture, &candidates) {
                let shown = path.display();
                tracing::info!(family, path = %shown, "replaced the library's own kernels");
                return self.from_path(path);
            }
        }
        library::image(self.device(), family)
    }

    /// Returns the hash of the sources that the library's images were built from.
    ///
    /// # Errors
    /// `Error::Image` if the library's manifest is damaged.
    pub(super) fn sources(&self) -> Result<&'static str> {
        Ok(&library::manifest()?.sources)
    }

    /// Finds the image of a user kernel crate; see [the module](self) for the search order. The
    /// crate's name may be written with `-` or `_`.
    ///
    /// # Errors
    /// `Error::Image`. If no image was found, the error lists the searched folders and the images
    /// for other devices in these folders. If an image was found but is invalid, the error
    /// describes the defect.
    pub fn find(&self, name: &str) -> Result<Image> {
        let command = format!(
            "`fusewire-build build --crate FOLDER --target {} --out FOLDER`",
            self.architecture
        );
        self.find_made_by(name, &command)
    }

    /// Finds an image like [`Images::find`]. If no image is found, the error names `command` as the
    /// command that builds the image.
    pub(super) fn find_made_by(&self, name: &str, command: &str) -> Result<Image> {
        let mut folders = self.folders.clone();
        for outer in &self.around {
            folders.extend([name.replace('_', "-"), name.replace('-', "_")].map(|n| outer.join(n)));
        }
        folders.dedup();
        let mut others = Vec::new();
        for folder in &folders {
            let candidates = candidates(folder, name);
            if let Some(path) = chosen(&self.architecture, &candidates) {
                return self.from_path(path);
            }
            others.extend(candidates.into_iter().map(|candidate| candidate.path));
        }
        let list = |paths: &[PathBuf]| {
            let lines = paths.iter().map(|path| format!("\n  {}", path.display()));
            lines.collect::<String>()
        };
        let mut detail = format!(
            "there is none for {}; looked in{}",
            self.architecture,
            list(&folders)
        );
        if !others.is_empty() {
            detail.push_str(&format!("\nthere are, for other devices{}", list(&others)));
        }
        detail.push_str(&format!(
            "\n{command} makes one; FUSEWIRE_IMAGES names more folders"
        ));
        Err(Error::Image {
            image: name.to_owned(),
            detail,
        })
    }

    /// Reads the image in a file.
    ///
    /// # Errors
    /// `Error::Image` if the file cannot be read, is not an image, or is an image for other
    /// devices.
    pub fn from_path(&self, path: &Path) -> Result<Image> {
        let shown = path.display().to_string();
        let wrong = |detail: String| Error::Image {
            image: shown.clone(),
            detail,
        };
        let mut bytes = Vec::new();
        File::open(path)
            .and_then(|file| file.take(MOST_BYTES + 1).read_to_end(&mut bytes))
            .map_err(|error| wrong(format!("it cannot be read: {error}")))?;
        if bytes.len() as u64 > MOST_BYTES {
            return Err(wrong(format!("it has more than {MOST_BYTES} bytes")));
        }
        if path.extension().is_some_and(|end| end == PACKED) {
            bytes = library::unpack(&bytes, MOST_BYTES as usize)
                .map_err(|error| wrong(format!("it cannot be unpacked: {error}")))?;
        }
        let mut image = Image::new(&shown, bytes)?;
        let fits = match image.kind() {
            Kind::Cubin => runs_cubin(&self.architecture, &image.target),
            Kind::Other => best(&self.architecture, [image.target.as_str()].into_iter()).is_some(),
        };
        if !fits {
            let cubin = match image.kind() {
                Kind::Cubin => "a cubin ",
                Kind::Other => "",
            };
            return Err(wrong(format!(
                "it is {cubin}for {}, this device is {}",
                image.target, self.architecture
            )));
        }
        let text = match image.kind() {
            Kind::Other if image.target.starts_with("sm_") => core::str::from_utf8(&image.bytes),
            _ => Ok(""),
        };
        if let (Ok(text), Some(cuda)) = (text, self.cuda)
            && let Some(version) = ptx::version(text)
            && let needed = ptx::cuda_version(version)
            && needed > cuda
        {
            return Err(wrong(format!(
                "it is PTX {}.{}, which needs a driver for CUDA {}.{}, and this driver supports \
                 CUDA {}.{}; install a newer driver, or build the image again with \
                 `fusewire-build build --target sm_80`, which writes PTX 8.0",
                version / 10,
                version % 10,
                needed / 1000,
                needed % 1000 / 10,
                cuda / 1000,
                cuda % 1000 / 10
            )));
        }
        if let Some(name) = path.file_name().and_then(|name| name.to_str()) {
            image.name = split(name).map_or(name, |(name, _)| name).to_owned();
        }
        Ok(image)
    }
}

/// A file that has the name of an image, such as `NAME.TARGET.ptx`.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    target: String,
    kind: Kind,
    path: PathBuf,
}

/// Returns the image files in `folder` for the kernel family or user crate `name`.
fn candidates(folder: &Path, name: &str) -> Vec<Candidate> {
    let wanted = name.replace('-', "_");
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let file = entry.file_name();
            let (name, target) = split(file.to_str()?)?;
            let fits = name.replace('-', "_") == wanted;
            let kind = Kind::of_file(file.to_str()?);
            fits.then(|| Candidate {
                target: target.to_owned(),
                kind,
                path: entry.path(),
            })
        })
        .collect();
    found.sort();
    found
}

/// File name extension of a compressed image.
const PACKED: &str = "lzma";

/// Returns the path of the best candidate that a device of `architecture` can run.
fn chosen<'a>(architecture: &str, candidates: &'a [Candidate]) -> Option<&'a Path> {
    let candidates: Vec<&Candidate> = candidates.iter().collect();
    let best = choose(architecture, &candidates, |it| {
        (it.kind, it.target.as_str())
    })?;
    Some(best.path.as_path())
}

/// Returns the best of `images` that a device of `architecture` can run: a cubin if possible, then
/// the newest target. `of` returns the kind and the target of an image.
fn choose<'a, T>(
    architecture: &str,
    images: &[&'a T],
    of: impl Fn(&'a T) -> (Kind, &'a str),
) -> Option<&'a T> {
    let all = |wanted| {
        let images = images.iter().map(|&image| (of(image), image));
        images
            .filter_map(move |((kind, target), image)| (kind == wanted).then_some((target, image)))
    };
    let cubin = all(Kind::Cubin)
        .filter(|(target, _)| runs_cubin(architecture, target))
        // If the versions are equal, the longer target name wins, so `sm_90a` is preferred to
        // `sm_90`.
        .max_by_key(|(target, _)| (number(target), target.len()));
    let other = || {
        let best = best(architecture, all(Kind::Other).map(|(target, _)| target))?;
        all(Kind::Other).find(|(target, _)| *target == best)
    };
    cubin.or_else(other).map(|(_, image)| image)
}

/// Returns a file name without the suffix of a compressed file.
fn unpacked(file: &str) -> &str {
    file.strip_suffix(PACKED)
        .and_then(|file| file.strip_suffix('.'))
        .unwrap_or(file)
}

/// Splits `NAME.TARGET.ptx`, `NAME.TARGET.cubin` or `NAME.TARGET.co` into name and target. Ignores
/// the suffix of a compressed file.
fn split(file: &str) -> Option<(&str, &str)> {
    let file = unpacked(file);
    let stem = file
        .strip_suffix(".ptx")
        .or_else(|| file.strip_suffix(".cubin"))
        .or_else(|| file.strip_suffix(".co"))?;
    stem.rsplit_once('.')
}

/// Returns the best PTX or code object target in `targets` that a device of `architecture` can run.
fn best<'a>(architecture: &str, targets: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // Ignores feature flags, as in `gfx942:sramecc+:xnack-`.
    let architecture = architecture.split(':').next().unwrap_or_default();
    let mut targets = targets;
    let Some(device) = compute(architecture) else {
        return targets.find(|&target| target == architecture);
    };
    targets
        .filter_map(|target| Some((compute(target)?, target)))
        .filter(|(made_for, _)| *made_for <= device)
        .max()
        .map(|(_, target)| target)
}

/// Returns true if a device of `architecture` can run a cubin for `target`. The target must have
/// the device's major version and must not be newer than the device. A target with a suffix
/// (`sm_90a`, `sm_100f`) must have exactly the version of the device.
fn runs_cubin(architecture: &str, target: &str) -> bool {
    let (Some(device), Some(made_for)) = (compute(architecture), number(target)) else {
        return false;
    };
    let only = compute(target).is_none();
    made_for == device || (!only && made_for / 10 == device / 10 && made_for < device)
}

/// Parses a target such as `sm_90` or `sm_90a` and returns its version, here 90.
fn number(target: &str) -> Option<u32> {
    let plain = target.strip_suffix(['a', 'f']).unwrap_or(target);
    compute(plain)
}

/// Parses a target such as `sm_90` and returns its version, here 90. Returns `None` for an
/// architecture-specific target such as `sm_90a`. PTX for such a target does not run on later GPUs
/// and is therefore never chosen.
fn compute(target: &str) -> Option<u32> {
    target.strip_prefix("sm_")?.parse().ok()
}
