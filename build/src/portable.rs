//! Portable images. The host library includes them, so that its users need only a driver.
//!
//! `host/images` has one compressed file per family and target, and a manifest with their hashes,
//! the hash of the sources ([`crate::sources::hash`]) and the tools. The same sources and tools
//! give the same bytes on every machine.
//!
//! NVIDIA's images are PTX and cubins. A driver compiles PTX in every process that loads it, which
//! takes half a minute for all kernels. The cubins are made by the ptxas of CUDA 12, so that
//! drivers for CUDA 12 load them too.

use std::io::{Read as _, Write as _};
use std::path::Path;

use lzma_rust2::{LzmaOptions, LzmaReader, LzmaWriter};
use serde::{Deserialize, Serialize};

use crate::image::ManifestEntry;
use crate::sources::{self, sha256};
use crate::toolchain::{self, MissingTool};
use crate::{Error, Image, Project, Result, Target, Toolchain, Vendor, files, recipe};

/// Folder of the committed images in the workspace.
pub const FOLDER: &str = "host/images";

/// Targets of the images that the host library includes.
pub const TARGETS: [Target; 4] = [Target::Sm80, Target::Sm90, Target::Gfx90a, Target::Gfx942];

/// Returns the targets of the cubins that are made from the PTX for `target`.
pub const fn cubin_targets(target: Target) -> &'static [Target] {
    match target {
        Target::Sm80 => &[Target::Sm80],
        Target::Sm90 => &[Target::Sm90, Target::Sm100],
        _ => &[],
    }
}

/// Major version of CUDA whose ptxas makes the cubins. Drivers for a newer major version load them
/// too, drivers for an older one do not.
const CUBIN_CUDA: u32 = 12;

/// The command that makes the images.
pub const COMMAND: &str = "cargo run --release -p fusewire-build -- images";

/// Maximum total size of the compressed images, in bytes: half of what crates.io accepts as a
/// package.
pub const MOST_BYTES: usize = 5 << 20;

/// File name of the manifest.
pub const MANIFEST: &str = "manifest.json";

/// File name of the list that the host library includes: `&[(name, bytes)]`.
pub const LIST: &str = "files.rs";

/// The manifest of the images.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub struct Manifest {
    /// The command that made the images.
    pub command: String,
    /// Hash of the sources of the images.
    pub sources: String,
    /// The tools that made the images.
    pub toolchain: String,
    /// The ptxas that made the cubins.
    #[serde(default)]
    pub ptxas: String,
    /// The images, by target and name.
    pub images: Vec<PackedImage>,
}

/// An image in the manifest.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct PackedImage {
    /// The family of kernels.
    pub name: String,
    /// The GPU's architecture.
    pub target: String,
    /// Compressed file, in the folder of the manifest.
    pub file: String,
    /// Bytes before compression.
    pub bytes: usize,
    /// Hash before compression.
    pub sha256: String,
    /// Format of the image: the version of PTX times ten (82 for PTX 8.2), the version of CUDA that
    /// made the cubin times ten (129 for CUDA 12.9), or the version of the code object. It
    /// determines the oldest driver that can load the image.
    #[serde(default)]
    pub format: u32,
    /// Maximum number of threads per block.
    pub max_threads: u32,
    /// Kernels, sorted by name.
    pub entries: Vec<PackedEntry>,
}

impl PackedImage {
    /// Returns the extension of the uncompressed file: `ptx`, `cubin` or `co`.
    pub fn extension(&self) -> &str {
        let file = self.file.strip_suffix(".lzma").unwrap_or(&self.file);
        file.rsplit_once('.').map_or("", |(_, extension)| extension)
    }

    fn is_cubin(&self) -> bool {
        self.extension() == "cubin"
    }
}

/// A kernel in the manifest.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub struct PackedEntry {
    /// Exported symbol.
    pub name: String,
    /// Offset and size of each parameter in bytes, in order.
    pub parameters: Vec<(usize, usize)>,
    /// Registers per thread (NVIDIA) or vector registers per lane (AMD). For PTX, the number that
    /// [`Manifest::ptxas`] assigns for the target of the PTX.
    #[serde(default)]
    pub registers: u32,
}

fn packed_entries(entries: Vec<ManifestEntry>) -> Vec<PackedEntry> {
    let packed = entries.into_iter().map(|entry| PackedEntry {
        name: entry.name,
        parameters: entry.parameters,
        registers: entry.resources.map_or(0, |used| used.registers),
    });
    packed.collect()
}

/// Images in memory.
#[derive(Clone, Debug)]
pub struct ImageSet {
    /// Manifest of the images.
    pub manifest: Manifest,
    /// Uncompressed bytes of the images, in the order of the manifest.
    pub contents: Vec<Vec<u8>>,
}

/// A difference between the committed images and the images that the sources produce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The image's file, or the manifest.
    pub file: String,
    /// Description of the difference and of its cause.
    pub reason: String,
}

impl ImageSet {
    /// Collects the files of compiled images, and assembles cubins with `ptxas`, if it is given.
    ///
    /// # Errors
    /// [`Error::Project`] for a target whose images could not be linked, [`Error::Parse`] for an
    /// image of an unknown format, [`Error::Toolchain`] for a ptxas that is not of CUDA 12,
    /// [`Error::File`] for a file that cannot be read.
    pub fn gather(
        toolchain: &Toolchain,
        ptxas: Option<&Path>,
        project: &Project,
        images: &[Image],
    ) -> Result<Self> {
        let version = ptxas.map(toolchain::ptxas_version).transpose()?;
        let mut made = Self {
            manifest: Manifest {
                command: COMMAND.to_owned(),
                sources: sources::hash(project)?,
                toolchain: toolchain.identity(),
                ptxas: version.clone().unwrap_or_default(),
                images: Vec::new(),
            },
            contents: Vec::new(),
        };
        let cuda = version.map(|version| cubin_format(&version)).transpose()?;
        let assembler = ptxas.zip(cuda);
        for image in images {
            for part in &image.files {
                let Some(path) = &part.path else {
                    return Err(Error::Project(format!(
                        "{} for {} was not linked: llvm-mc or ld.lld is missing",
                        part.name, image.target
                    )));
                };
                let mut add = |target: Target, extension, bytes: Vec<u8>, format, entries| {
                    made.manifest.images.push(PackedImage {
                        name: part.name.clone(),
                        target: target.name().to_owned(),
                        file: format!("{}.{target}.{extension}.lzma", part.name),
                        bytes: bytes.len(),
                        sha256: sha256(&bytes),
                        format,
                        max_threads: project.max_threads(),
                        entries: packed_entries(entries),
                    });
                    made.contents.push(bytes);
                };
                let bytes = files::read_bytes(path)?;
                let format = format(image.target, &bytes).map_err(|detail| Error::Parse {
                    what: format!("{} for {}", part.name, image.target),
                    detail,
                })?;
                let target = image.target;
                let entries = image.manifest_entries(part);
                add(target, target.extension(), bytes, format, entries);
                let Some((ptxas, format)) = assembler else {
                    continue;
                };
                for &target in cubin_targets(target) {
                    let (bytes, entries) = image.cubin(part, target, ptxas)?;
                    add(target, "cubin", bytes, format, entries);
                }
            }
        }
        Ok(made)
    }

    /// Writes images, manifest and list into `folder`, and removes the images of the previous
    /// manifest. Returns the total size of the compressed images in bytes.
    ///
    /// # Errors
    /// [`Error::Project`] if the total size exceeds [`MOST_BYTES`], [`Error::File`] for a
    /// file that cannot be written.
    pub fn write(&self, folder: &Path) -> Result<usize> {
        files::create_directory(folder)?;
        let packed = self
            .contents
            .iter()
            .map(|content| pack(content))
            .collect::<Result<Vec<_>>>()?;
        let total = packed.iter().map(Vec::len).sum();
        if total > MOST_BYTES {
            return Err(Error::Project(format!(
                "the compressed images have {total} bytes, at most {MOST_BYTES} are allowed; \
                    reduce instances or targets"
            )));
        }
        if let Ok(old) = read(folder) {
            for image in &old.images {
                // Ignores errors: a file that stays has no effect, because the new list does not
                // name it.
                let _ = std::fs::remove_file(folder.join(&image.file));
            }
        }
        for (image, bytes) in self.manifest.images.iter().zip(&packed) {
            files::write(&folder.join(&image.file), bytes)?;
        }
        files::write(&folder.join(LIST), self.manifest.list())?;
        files::write(&folder.join(MANIFEST), self.manifest.json()?)?;
        Ok(total)
    }

    /// Compares these images with the images in `folder` and returns the differences. An image in
    /// `folder` that these images do not include is a difference only if it is for one of
    /// `targets`. Cubins are compared only with those of the same ptxas.
    ///
    /// # Errors
    /// [`Error::File`] or [`Error::Parse`] if the manifest cannot be read.
    pub fn compare(&self, folder: &Path, targets: &[Target]) -> Result<Vec<Difference>> {
        let old = read(folder)?;
        let now = &self.manifest;
        let mut out = Vec::new();
        let mut add = |file: &str, reason: String| {
            out.push(Difference {
                file: file.to_owned(),
                reason,
            });
        };
        let cause = if old.sources != now.sources {
            add(
                MANIFEST,
                format!(
                    "the sources are newer than the images: hash {} instead of {}",
                    short(&now.sources),
                    short(&old.sources)
                ),
            );
            "the sources are newer than the image".to_owned()
        } else if old.toolchain != now.toolchain {
            format!(
                "another tool chain: it was made by [{}], this is [{}]",
                old.toolchain, now.toolchain
            )
        } else {
            "not reproducible: the same sources and tool chain gave other bytes".to_owned()
        };
        // Another ptxas assigns other numbers of registers.
        let same_ptxas = old.ptxas == now.ptxas;
        let entry = |image: &PackedImage| {
            let mut image = image.clone();
            if !same_ptxas && image.target.starts_with("sm_") {
                for entry in &mut image.entries {
                    entry.registers = 0;
                }
            }
            image
        };
        for (image, content) in now.images.iter().zip(&self.contents) {
            if image.is_cubin() && !same_ptxas {
                continue;
            }
            let Some(before) = old.images.iter().find(|other| other.file == image.file) else {
                add(&image.file, "it is missing".to_owned());
                continue;
            };
            match contents(folder, before) {
                Err(error) => add(&image.file, error.to_string()),
                Ok(bytes) if sha256(&bytes) != before.sha256 => add(
                    &image.file,
                    "its content is not what the manifest says".to_owned(),
                ),
                Ok(bytes) if bytes != *content => {
                    add(
                        &image.file,
                        format!("{cause}; {}", difference(&bytes, content)),
                    );
                }
                Ok(_) if entry(before) != entry(image) => {
                    add(
                        &image.file,
                        format!("{cause}; the manifest's entry differs"),
                    );
                }
                Ok(_) => {}
            }
        }
        let compared = |image: &&PackedImage| {
            let is_made = !image.is_cubin() || same_ptxas;
            is_made && targets.iter().any(|of| of.name() == image.target)
        };
        for image in old.images.iter().filter(compared) {
            if !now.images.iter().any(|other| other.file == image.file) {
                add(
                    &image.file,
                    "the sources have no such image any more".to_owned(),
                );
            }
        }
        if files::read(&folder.join(LIST)).ok().as_deref() != Some(&old.list()) {
            add(LIST, "it does not list the images".to_owned());
        }
        Ok(out)
    }
}

impl Manifest {
    /// Returns JSON with one image per line, so that diffs are readable.
    fn json(&self) -> Result<String> {
        let images = self
            .images
            .iter()
            .map(|image| Ok(format!("    {}", to_json(image)?)))
            .collect::<Result<Vec<_>>>()?;
        Ok(format!(
            "{{\n  \"command\": {},\n  \"sources\": {},\n  \"toolchain\": {},\n  \"ptxas\": {},\n  \
                \"images\": [\n{}\n  ]\n}}\n",
            to_json(&self.command)?,
            to_json(&self.sources)?,
            to_json(&self.toolchain)?,
            to_json(&self.ptxas)?,
            images.join(",\n")
        ))
    }

    /// Returns the content of the file [`LIST`].
    fn list(&self) -> String {
        let mut text = format!("// Written by `{COMMAND}`.\n&[\n");
        for image in &self.images {
            let file = &image.file;
            text.push_str(&format!("    ({file:?}, include_bytes!({file:?})),\n"));
        }
        text.push_str("]\n");
        text
    }
}

fn to_json<T: Serialize>(value: &T) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::Parse {
        what: "a manifest".to_owned(),
        detail: error.to_string(),
    })
}

/// Reads the manifest in `folder`.
///
/// # Errors
/// [`Error::File`] if there is no manifest, [`Error::Parse`] if it cannot be parsed.
pub fn read(folder: &Path) -> Result<Manifest> {
    let path = folder.join(MANIFEST);
    serde_json::from_str(&files::read(&path)?).map_err(|error| Error::Parse {
        what: path.display().to_string(),
        detail: error.to_string(),
    })
}

/// Compresses `bytes` to the format of `.lzma` files.
///
/// # Errors
/// [`Error::Parse`] with the error of the compressor.
pub fn pack(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut options = LzmaOptions::with_preset(9);
    options.dict_size = 4 << 20;
    LzmaWriter::new_use_header(Vec::new(), &options, Some(bytes.len() as u64))
        .and_then(|mut writer| {
            writer.write_all(bytes)?;
            writer.finish()
        })
        .map_err(|error| damaged("cannot be compressed", &error))
}

/// Reads and unpacks an image in `folder`.
///
/// # Errors
/// [`Error::File`] if the file cannot be read, [`Error::Parse`] if it is damaged.
pub(crate) fn contents(folder: &Path, image: &PackedImage) -> Result<Vec<u8>> {
    unpack(&files::read_bytes(&folder.join(&image.file))?, image.bytes)
}

/// Unpacks an image. Fails if the unpacked image does not have exactly `bytes` bytes.
fn unpack(packed: &[u8], bytes: usize) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    LzmaReader::new_mem_limit(packed, 64 << 10, None)
        .and_then(|reader| reader.take(bytes as u64 + 1).read_to_end(&mut out))
        .map_err(|error| damaged("is damaged", &error))?;
    if out.len() == bytes {
        return Ok(out);
    }
    Err(Error::Parse {
        what: "a compressed image".to_owned(),
        detail: format!("it holds {} bytes, the manifest says {bytes}", out.len()),
    })
}

fn damaged(what: &str, error: &std::io::Error) -> Error {
    Error::Parse {
        what: "a compressed image".to_owned(),
        detail: format!("it {what}: {error}"),
    }
}

/// Returns [`PackedImage::format`] of the cubins that a ptxas of this version makes. The version is
/// that of [`toolchain::ptxas_version`], such as `release 12.9, V12.9.86`.
///
/// # Errors
/// [`Error::Toolchain`] if ptxas is not of CUDA 12: drivers for CUDA 12 load no newer cubins.
pub fn cubin_format(ptxas: &str) -> Result<u32> {
    let release = ptxas.strip_prefix("release ").and_then(|rest| {
        let (major, minor) = rest.split(',').next()?.split_once('.')?;
        Some((major.parse::<u32>().ok()?, minor.parse::<u32>().ok()?))
    });
    match release {
        Some((CUBIN_CUDA, minor)) => Ok(CUBIN_CUDA * 10 + minor),
        _ => Err(Error::Toolchain(vec![MissingTool {
            piece: format!("ptxas of CUDA {CUBIN_CUDA}"),
            reason: format!(
                "ptxas is of {ptxas:?}; drivers load only cubins that are not of a newer major \
                 version of CUDA"
            ),
            install: toolchain::INSTALL_PTXAS.to_owned(),
        }])),
    }
}

/// Returns [`PackedImage::format`] of PTX or a code object. Refuses a code object that is not of
/// version [`recipe::CODE_OBJECT`].
fn format(target: Target, bytes: &[u8]) -> core::result::Result<u32, String> {
    if target.vendor() == Vendor::Nvidia {
        let text = core::str::from_utf8(bytes).ok();
        let version = text.and_then(|text| {
            let (_, rest) = text.split_once(".version")?;
            let (major, minor) = rest.split_whitespace().next()?.split_once('.')?;
            Some(major.parse::<u32>().ok()? * 10 + minor.parse::<u32>().ok()?)
        });
        return version.ok_or_else(|| "it has no .version".to_owned());
    }
    // The byte EI_ABIVERSION. ELFABIVERSION_AMDGPU_HSA_V5 is 3.
    match bytes.get(8) {
        Some(&abi) if u32::from(abi) + 2 == recipe::CODE_OBJECT => Ok(recipe::CODE_OBJECT),
        Some(&abi) => Err(format!(
            "it is a code object of version {}; version {} is needed, because ROCm before 6.3 \
             refuses newer ones",
            u32::from(abi) + 2,
            recipe::CODE_OBJECT
        )),
        None => Err("it is not an ELF file".to_owned()),
    }
}

fn short(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}

/// Describes the first difference between two images: a line of text or a byte.
fn difference(before: &[u8], now: &[u8]) -> String {
    let at = before.iter().zip(now).take_while(|(a, b)| a == b).count();
    match (core::str::from_utf8(before), core::str::from_utf8(now)) {
        (Ok(before), Ok(now)) => {
            let line = before.as_bytes()[..at]
                .iter()
                .filter(|&&b| b == b'\n')
                .count();
            let show = |text: &str| {
                let line = text.lines().nth(line).unwrap_or("the end").trim();
                line.chars().take(100).collect::<String>()
            };
            format!(
                "first in line {}: `{}` became `{}`",
                line + 1,
                show(before),
                show(now)
            )
        }
        _ => format!(
            "first at byte {at} of {} (now {} bytes)",
            before.len(),
            now.len()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(text: &str) -> ImageSet {
        let content = text.as_bytes().to_vec();
        ImageSet {
            manifest: Manifest {
                command: COMMAND.to_owned(),
                sources: "aa".to_owned(),
                toolchain: "rustc 1".to_owned(),
                ptxas: "ptxas 1".to_owned(),
                images: vec![PackedImage {
                    name: "point".to_owned(),
                    target: "sm_80".to_owned(),
                    file: "point.sm_80.ptx.lzma".to_owned(),
                    bytes: content.len(),
                    sha256: sha256(&content),
                    format: 80,
                    max_threads: 512,
                    entries: vec![PackedEntry {
                        name: "send".to_owned(),
                        parameters: vec![(0, 8), (8, 4)],
                        registers: 80,
                    }],
                }],
            },
            contents: vec![content],
        }
    }

    fn reasons(now: &ImageSet, folder: &Path) -> String {
        let all = now.compare(folder, &TARGETS).unwrap();
        let lines = all
            .iter()
            .map(|one| format!("{}: {}", one.file, one.reason));
        lines.collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn written_images_have_no_differences() {
        let folder = tempfile::tempdir().unwrap();
        let first = made(".target sm_80\nret;\n");
        first.write(folder.path()).unwrap();
        assert_eq!(read(folder.path()).unwrap(), first.manifest);
        assert_eq!(reasons(&first, folder.path()), "");
    }

    #[test]
    fn every_difference_is_named_with_its_cause() {
        let folder = tempfile::tempdir().unwrap();
        made(".target sm_80\nret;\n").write(folder.path()).unwrap();
        let mut now = made(".target sm_80\ntrap;\n");
        let text = reasons(&now, folder.path());
        assert!(
            text.contains("point.sm_80.ptx.lzma: not reproducible"),
            "{text}"
        );
        assert!(text.contains("line 2: `ret;` became `trap;`"), "{text}");
        now.manifest.toolchain = "rustc 2".to_owned();
        let text = reasons(&now, folder.path());
        assert!(
            text.contains("made by [rustc 1], this is [rustc 2]"),
            "{text}"
        );
        now.manifest.sources = "bb".to_owned();
        let text = reasons(&now, folder.path());
        assert!(
            text.contains("manifest.json: the sources are newer"),
            "{text}"
        );

        // Newer sources make the manifest stale, even if they produce the same bytes.
        let mut now = made(".target sm_80\nret;\n");
        now.manifest.sources = "bb".to_owned();
        assert_eq!(now.compare(folder.path(), &TARGETS).unwrap().len(), 1);
        // Another tool chain is accepted if it produces the same bytes.
        now.manifest.sources = "aa".to_owned();
        now.manifest.toolchain = "rustc 2".to_owned();
        assert_eq!(reasons(&now, folder.path()), "");
        // The numbers of registers of another ptxas are not compared.
        now.manifest.images[0].entries[0].registers = 81;
        now.manifest.ptxas = "ptxas 2".to_owned();
        assert_eq!(reasons(&now, folder.path()), "");
        now.manifest.ptxas = "ptxas 1".to_owned();
        let text = reasons(&now, folder.path());
        assert!(text.contains("the manifest's entry differs"), "{text}");
        now.manifest.images[0].entries[0].registers = 80;
        now.manifest.images[0].entries[0].parameters[1] = (12, 4);
        let text = reasons(&now, folder.path());
        assert!(text.contains("the manifest's entry differs"), "{text}");
    }

    #[test]
    fn formats_are_read_and_other_code_objects_are_refused() {
        assert_eq!(
            format(Target::Sm90, b"//\n.version 8.2\n.target sm_90"),
            Ok(82)
        );
        assert!(format(Target::Sm90, b"\x7fELF").is_err());
        let mut object = *b"\x7fELF\x02\x01\x01\x40\x03";
        assert_eq!(format(Target::Gfx942, &object), Ok(5));
        object[8] = 4;
        let refused = format(Target::Gfx942, &object).unwrap_err();
        assert!(
            refused.contains("version 6; version 5 is needed"),
            "{refused}"
        );
        assert!(format(Target::Gfx942, b"").is_err());
    }

    #[test]
    fn images_of_other_targets_are_not_compared() {
        let folder = tempfile::tempdir().unwrap();
        let mut now = made(".target sm_80\nret;\n");
        now.write(folder.path()).unwrap();
        now.manifest.images.clear();
        now.contents.clear();
        let other = now.compare(folder.path(), &[Target::Sm90]).unwrap();
        assert_eq!(other, []);
        let own = now.compare(folder.path(), &[Target::Sm80]).unwrap();
        assert_eq!(own.len(), 1);
        assert_eq!(own[0].reason, "the sources have no such image any more");
    }

    #[test]
    fn damage_and_missing_files_are_found() {
        let folder = tempfile::tempdir().unwrap();
        let now = made(&".target sm_80\nret;\n".repeat(100));
        now.write(folder.path()).unwrap();
        let file = folder.path().join("point.sm_80.ptx.lzma");
        let good = std::fs::read(&file).unwrap();
        std::fs::write(&file, &good[..good.len() / 2]).unwrap();
        assert!(!reasons(&now, folder.path()).is_empty());
        std::fs::write(&file, pack(b"something else").unwrap()).unwrap();
        let text = reasons(&now, folder.path());
        assert!(text.contains("it holds 14 bytes"), "{text}");
        let other = ".target sm_80\nRET;\n".repeat(100);
        std::fs::write(&file, pack(other.as_bytes()).unwrap()).unwrap();
        let text = reasons(&now, folder.path());
        assert!(text.contains("not what the manifest says"), "{text}");
        std::fs::remove_file(&file).unwrap();
        assert!(reasons(&now, folder.path()).contains("cannot read"));
        std::fs::write(&file, good).unwrap();
        std::fs::write(folder.path().join(LIST), "&[]").unwrap();
        assert!(reasons(&now, folder.path()).contains("does not list"));
    }

    #[test]
    fn obsolete_images_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        made("ret;").write(folder.path()).unwrap();
        let mut now = made("ret;");
        now.manifest.images[0].file = "batch.sm_80.ptx.lzma".to_owned();
        let text = reasons(&now, folder.path());
        assert!(
            text.contains("batch.sm_80.ptx.lzma: it is missing"),
            "{text}"
        );
        assert!(text.contains("no such image any more"), "{text}");
        now.write(folder.path()).unwrap();
        assert!(!folder.path().join("point.sm_80.ptx.lzma").exists());
        assert_eq!(reasons(&now, folder.path()), "");
    }
}
