//! GPU images: the library's own, which every build carries, and those of users' kernel crates.
//!
//! NVIDIA GPUs get PTX, which the driver compiles: the newest that is not newer than the GPU. AMD GPUs get a code object of
//! their very architecture. Users' kernels may also come as cubins, which the driver need not compile.
//!
//! # Users' own kernels
//! `fusewire-build build --crate FOLDER --out OUT` writes `NAME.TARGET.ptx` and `NAME.TARGET.co`, NAME being the crate's;
//! `ptxas -arch sm_90 NAME.sm_90.ptx -o NAME.sm_90.cubin` makes a cubin of one. At run time [`Images::find`] looks for them, in
//! this order,
//! 1. in the folders that `FUSEWIRE_IMAGES` lists, separated as in `PATH`;
//! 2. in the program's folder, and in `images` beside the program;
//! 3. in `fusewire-gpu/out/NAME` of cargo's target folder, where the program lies in one: what `fusewire-build build`
//!    writes by default.
//!
//! The first folder that has one for the device decides; there a cubin that the GPU runs (of its major version and not of a newer
//! minor one; of the very architecture, where it is made for that alone) goes before PTX. [`Images::from_path`] takes a file. One that
//! ends with `.lzma` besides is unpacked.
//!
//! # The library's own, from elsewhere
//! Where [`LIBRARY_IMAGES`] names a folder, the families that it has an image of (`all_reduce.sm_90.ptx`) are taken from there: kernels
//! that were changed can be measured without building the program anew. What they must agree on with the program, their
//! parameters, is compared when they are loaded.

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

use crate::{Error, Result};

/// The environment variable that names a folder of images which go before the library's own.
pub const LIBRARY_IMAGES: &str = "FUSEWIRE_LIBRARY_IMAGES";

/// Most bytes of a file that is taken for an image.
const MOST_BYTES: u64 = 256 << 20;

/// What a driver loads: kernels for one architecture.
#[derive(Clone)]
pub struct Image {
    /// The family of the library's kernels, or the user's crate.
    pub name: String,
    /// Architecture that it was made for: `sm_90`, `gfx942`.
    pub target: String,
    /// PTX with its terminating zero byte, a cubin, or a code object.
    pub bytes: Vec<u8>,
    /// Its kernels.
    pub entries: Vec<Entry>,
}

/// A kernel of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Exported symbol.
    pub name: String,
    /// Offset and size of each parameter in bytes, in order, as the image reads them.
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
    /// Understands PTX, a cubin or a code object; all say themselves for which architecture they are and what they hold.
    ///
    /// # Errors
    /// `Error::Image` for anything else.
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

    /// What PTX says of the sources that it was made from (`fusewire-build build --multi-rank-grid`): their hash.
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

    /// A kernel by its symbol.
    pub fn entry(&self, name: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }
}

/// How an image is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// Machine code of an NVIDIA GPU.
    Cubin,
    /// PTX, and code objects: a target has one of the two.
    Other,
}

/// Where images for one device come from.
#[derive(Clone, Debug)]
pub struct Images {
    architecture: String,
    folders: Vec<PathBuf>,
    /// Cargo's target folders around the program.
    around: Vec<PathBuf>,
    /// What goes before the library's own.
    library: Option<PathBuf>,
}

impl Images {
    /// Images for a device of `architecture`, as [`Properties::architecture`](super::driver::Properties::architecture) has it.
    pub fn new(architecture: &str) -> Self {
        let listed = std::env::var_os("FUSEWIRE_IMAGES").unwrap_or_default();
        let mut folders: Vec<PathBuf> = std::env::split_paths(&listed)
            .filter(|folder| !folder.as_os_str().is_empty())
            .collect();
        let mut around = Vec::new();
        if let Some(beside) = std::env::current_exe()
            .ok()
            .as_deref()
            .and_then(Path::parent)
        {
            folders.push(beside.to_owned());
            folders.push(beside.join("images"));
            // target/release, target/release/examples, target/TRIPLE/release/deps.
            let outer = beside.ancestors().skip(1).take(3);
            around.extend(outer.map(|folder| folder.join("fusewire-gpu/out")));
        }
        Self {
            architecture: architecture.to_owned(),
            folders,
            around,
            library: std::env::var_os(LIBRARY_IMAGES).map(PathBuf::from),
        }
    }

    /// Images for a device of `architecture` from these folders only.
    pub fn in_folders(architecture: &str, folders: Vec<PathBuf>) -> Self {
        Self {
            architecture: architecture.to_owned(),
            folders,
            around: Vec::new(),
            library: None,
        }
    }

    /// The device's architecture.
    pub fn architecture(&self) -> &str {
        &self.architecture
    }

    /// Families of the library's own kernels that [`Images::library`] gives.
    ///
    /// # Errors
    /// `Error::Image` when the library has no images for the device; it names those that it has.
    pub fn families(&self) -> Result<Vec<&'static str>> {
        library::families(&self.architecture)
    }

    /// One family of the library's own kernels, unpacked; that of the folder in [`LIBRARY_IMAGES`], where it has one.
    ///
    /// # Errors
    /// `Error::Image` when the library has none for the device, and when what it carries is damaged; when the folder's is no
    /// image.
    pub fn library(&self, family: &str) -> Result<Image> {
        if let Some(folder) = &self.library {
            let candidates = candidates(folder, family);
            if let Some(path) = chosen(&self.architecture, &candidates) {
                tracing::info!(family, path = %path.display(), "kernels of the library's own from elsewhere");
                return self.from_path(path);
            }
        }
        library::image(&self.architecture, family)
    }

    /// Hash of what the library's own images were made from.
    ///
    /// # Errors
    /// `Error::Image` when what the library carries is damaged.
    pub(super) fn sources(&self) -> Result<&'static str> {
        Ok(&library::manifest()?.sources)
    }

    /// The image of a user's kernel crate: see [the module](self) for the paths where it is searched. The crate's name may
    /// be written with `-` or `_`.
    ///
    /// # Errors
    /// `Error::Image` with the paths where it was searched, and what was found there for other devices; or what is wrong
    /// with the file that was found.
    pub fn find(&self, name: &str) -> Result<Image> {
        let command = format!(
            "`fusewire-build build --crate FOLDER --target {} --out FOLDER`",
            self.architecture
        );
        self.find_made_by(name, &command)
    }

    /// As [`Images::find`], for an image that another command makes.
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

    /// The image in a file.
    ///
    /// # Errors
    /// `Error::Image` when it cannot be read, is no image, or is for other devices.
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
        if let Some(name) = path.file_name().and_then(|name| name.to_str()) {
            image.name = split(name).map_or(name, |(name, _)| name).to_owned();
        }
        Ok(image)
    }
}

/// A file whose name says that it is an image.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    target: String,
    kind: Kind,
    path: PathBuf,
}

/// The images of `name` in `folder`.
fn candidates(folder: &Path, name: &str) -> Vec<Candidate> {
    let wanted = name.replace('-', "_");
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let file = entry.file_name();
            let (name, target) = split(file.to_str()?)?;
            let fits = name.replace('-', "_") == wanted;
            let kind = match file.to_str()?.ends_with(".cubin") {
                true => Kind::Cubin,
                false => Kind::Other,
            };
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

/// End of the name of a compressed image.
const PACKED: &str = "lzma";

/// The one of `candidates` that runs best on a device of `architecture`.
fn chosen<'a>(architecture: &str, candidates: &'a [Candidate]) -> Option<&'a Path> {
    let of = |kind| {
        candidates
            .iter()
            .filter(move |candidate| candidate.kind == kind)
    };
    let cubin = of(Kind::Cubin)
        .filter(|candidate| runs_cubin(architecture, &candidate.target))
        // What is made for the GPU alone goes first.
        .max_by_key(|candidate| (number(&candidate.target), candidate.target.len()));
    let other = || {
        let best = best(architecture, of(Kind::Other).map(|it| it.target.as_str()))?;
        of(Kind::Other).find(|candidate| candidate.target == best)
    };
    cubin
        .or_else(other)
        .map(|candidate| candidate.path.as_path())
}

/// `NAME.TARGET.ptx`, `NAME.TARGET.cubin` and `NAME.TARGET.co`, compressed or not, in name and target.
fn split(file: &str) -> Option<(&str, &str)> {
    let file = file
        .strip_suffix(PACKED)
        .and_then(|file| file.strip_suffix('.'))
        .unwrap_or(file);
    let stem = file
        .strip_suffix(".ptx")
        .or_else(|| file.strip_suffix(".cubin"))
        .or_else(|| file.strip_suffix(".co"))?;
    stem.rsplit_once('.')
}

/// The one of `targets` that runs best on a device of `architecture`.
fn best<'a>(architecture: &str, targets: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    // gfx942:sramecc+:xnack- is a gfx942.
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

/// Whether a device of `architecture` runs a cubin for `target`: one of its major version that is not newer, and, where only
/// the very architecture runs it (`sm_90a`, `sm_100f`), one for that.
fn runs_cubin(architecture: &str, target: &str) -> bool {
    let (Some(device), Some(made_for)) = (compute(architecture), number(target)) else {
        return false;
    };
    let only = compute(target).is_none();
    made_for == device || (!only && made_for / 10 == device / 10 && made_for < device)
}

/// 90 of `sm_90` and `sm_90a`.
fn number(target: &str) -> Option<u32> {
    let plain = target.strip_suffix(['a', 'f']).unwrap_or(target);
    compute(plain)
}

/// 90 of `sm_90`. PTX for `sm_90a` runs on nothing later, and is not taken.
fn compute(target: &str) -> Option<u32> {
    target.strip_prefix("sm_")?.parse().ok()
}
