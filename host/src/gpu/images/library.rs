//! The images of the library's own kernels, which `fusewire-build images` generates.

use std::io::Read as _;
use std::sync::OnceLock;

use lzma_rust2::LzmaReader;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::{Entry, Image, Kind, choose, ptx};
use crate::{Error, Result};

/// The names and contents of the compressed image files.
#[cfg(feature = "images")]
pub(super) const FILES: &[(&str, &[u8])] = include!("../../../images/files.rs");
#[cfg(not(feature = "images"))]
pub(super) const FILES: &[(&str, &[u8])] = &[];

/// Manifest of the library's images, as JSON: sources, files, and entries with their registers.
#[cfg(feature = "images")]
pub const MANIFEST: &str = include_str!("../../../images/manifest.json");
/// Manifest of the library's images: no images without the feature `images`.
#[cfg(not(feature = "images"))]
pub const MANIFEST: &str = r#"{ "sources": "", "images": [] }"#;

/// Memory limit of decompression in KiB.
const MEMORY: u32 = 64 << 10;

/// Maximum size in bytes of an image.
const MOST_BYTES: usize = 64 << 20;

#[derive(Debug, Deserialize)]
pub(super) struct Manifest {
    /// Hash of the sources from which the images were built.
    pub(super) sources: String,
    pub(super) images: Vec<PackedImage>,
}

/// The manifest entry of an image.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct PackedImage {
    pub(super) name: String,
    pub(super) target: String,
    pub(super) file: String,
    /// Size in bytes of the uncompressed image.
    pub(super) bytes: usize,
    /// SHA-256 of the uncompressed image, in hexadecimal digits.
    pub(super) sha256: String,
    /// Version of PTX times ten, version of CUDA that made the cubin times ten, or version of the
    /// code object.
    pub(super) format: u32,
    pub(super) entries: Vec<PackedEntry>,
}

impl PackedImage {
    fn kind(&self) -> Kind {
        Kind::of_file(&self.file)
    }

    fn is_ptx(&self) -> bool {
        self.kind() == Kind::Other && self.target.starts_with("sm_")
    }

    /// Returns true if a driver for the CUDA version `cuda` can load the image. A driver loads the
    /// cubins of all CUDA versions with its major version or an older one, but only PTX that is not
    /// newer than the driver.
    fn loads_with(&self, cuda: u32) -> bool {
        match self.kind() {
            Kind::Cubin => self.format / 10 <= cuda / 1000,
            Kind::Other => !self.is_ptx() || ptx::cuda_version(self.format) <= cuda,
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct PackedEntry {
    pub(super) name: String,
    pub(super) parameters: Vec<(usize, usize)>,
}

pub(super) fn manifest() -> Result<&'static Manifest> {
    static PARSED: OnceLock<core::result::Result<Manifest, String>> = OnceLock::new();
    PARSED
        .get_or_init(|| serde_json::from_str(MANIFEST).map_err(|error| error.to_string()))
        .as_ref()
        .map_err(|detail| Error::Image {
            image: "of the library".to_owned(),
            detail: format!("the manifest cannot be parsed: {detail}"),
        })
}

/// The device and driver for which images are chosen.
#[derive(Clone, Copy, Debug)]
pub(super) struct Device<'a> {
    pub(super) architecture: &'a str,
    /// CUDA version that the driver supports, or `None` for any version and for AMD GPUs.
    pub(super) cuda: Option<u32>,
    /// True if cubins are preferred to PTX.
    pub(super) cubins: bool,
}

/// Returns the library's images for a device.
fn fitting(device: Device<'_>) -> Result<Vec<&'static PackedImage>> {
    let images = &manifest()?.images;
    if images.is_empty() {
        return Err(Error::Image {
            image: "of the library".to_owned(),
            detail: "the crate fusewire was built without the feature images".to_owned(),
        });
    }
    let usable: Vec<&PackedImage> = images
        .iter()
        .filter(|image| device.cubins || image.kind() != Kind::Cubin)
        .filter(|image| device.cuda.is_none_or(|cuda| image.loads_with(cuda)))
        .collect();
    let of = |image: &'static PackedImage| (image.kind(), image.target.as_str());
    let Some(chosen) = choose(device.architecture, &usable, of) else {
        let mut there: Vec<&str> = images.iter().map(|image| image.target.as_str()).collect();
        there.sort_unstable();
        there.dedup();
        return Err(Error::Image {
            image: "of the library".to_owned(),
            detail: format!(
                "there is none for {}{}; there are {} (PTX also runs on later GPUs; newer PTX may \
                 need a newer driver)",
                device.architecture,
                device.cuda.map_or_else(String::new, |cuda| format!(
                    " that a driver for CUDA {}.{} can load",
                    cuda / 1000,
                    cuda % 1000 / 10
                )),
                there.join(", ")
            ),
        });
    };
    let chosen = of(chosen);
    let images = usable.into_iter().filter(|image| of(image) == chosen);
    Ok(images.collect())
}

pub(super) fn families(device: Device<'_>) -> Result<Vec<&'static str>> {
    let images = fitting(device)?.into_iter();
    Ok(images.map(|image| image.name.as_str()).collect())
}

pub(super) fn image(device: Device<'_>, family: &str) -> Result<Image> {
    let images = fitting(device)?;
    let Some(packed) = images.iter().find(|image| image.name == family) else {
        let there: Vec<&str> = images.iter().map(|image| image.name.as_str()).collect();
        return Err(Error::Image {
            image: family.to_owned(),
            detail: format!(
                "the library has no such family of kernels; it has {}",
                there.join(", ")
            ),
        });
    };
    let file = FILES.iter().find(|(name, _)| *name == packed.file);
    open(packed, file.map_or(&[], |(_, bytes)| *bytes))
}

/// Decompresses at most `most + 1` bytes. A result of `most + 1` bytes means that the decompressed
/// data exceeds the limit `most`.
pub(super) fn unpack(compressed: &[u8], most: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    LzmaReader::new_mem_limit(compressed, MEMORY, None)?
        .take(most as u64 + 1)
        .read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Decompresses `compressed`. Fails if the size or the hash of the result differs from `packed`.
pub(super) fn open(packed: &PackedImage, compressed: &[u8]) -> Result<Image> {
    let wrong = |detail: String| Error::Image {
        image: format!("{} for {}", packed.name, packed.target),
        detail: format!("{detail}; this build of the library is damaged"),
    };
    if packed.bytes > MOST_BYTES {
        return Err(wrong(format!("it is said to have {} bytes", packed.bytes)));
    }
    let mut bytes = unpack(compressed, packed.bytes)
        .map_err(|error| wrong(format!("it cannot be unpacked: {error}")))?;
    if bytes.len() != packed.bytes {
        return Err(wrong(format!(
            "unpacked it has {} bytes instead of {}",
            bytes.len(),
            packed.bytes
        )));
    }
    let hash = Sha256::digest(&bytes);
    let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    if hash != packed.sha256 {
        return Err(wrong(format!(
            "its SHA-256 is {hash} instead of {}",
            packed.sha256
        )));
    }
    if packed.is_ptx() {
        bytes.push(0);
    }
    let entries = packed.entries.iter().map(|entry| Entry {
        name: entry.name.clone(),
        parameters: entry.parameters.clone(),
    });
    Ok(Image {
        name: packed.name.clone(),
        target: packed.target.clone(),
        bytes,
        entries: entries.collect(),
    })
}
