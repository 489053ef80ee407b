//! Metadata of the kernels in a code object. A code object is an ELF file, and the metadata is a
//! MessagePack map in a note (LLVM's AMDGPU user guide, "Code Object Metadata"). HIP has no
//! function that returns the offsets of kernel arguments, so this module reads them from the
//! metadata.
//!
//! The HIP runtime determines the length of an image from the ELF headers. This module therefore
//! checks the headers before the runtime reads the image: every segment and every section must lie
//! within the given bytes.

use core::ops::Range;
use std::collections::HashMap;

use serde::Deserialize;

/// Target and kernels of an image, according to its metadata.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CodeObject {
    /// Target, such as `amdgcn-amd-amdhsa--gfx942`, followed by target features if the image was
    /// built for specific features.
    pub(super) target: Option<String>,
    /// Version of the code object; `None` if it is not known.
    pub(super) version: Option<u8>,
    /// Offset and size of each explicit argument, by kernel name. `None` if the image has no
    /// metadata.
    pub(super) kernels: Option<HashMap<String, Vec<(usize, usize)>>>,
}

/// Type of the ELF note that contains the metadata. The owner of the note is `AMDGPU`.
const NT_AMDGPU_METADATA: u32 = 32;
const EM_AMDGPU: u16 = 224;
const PT_NOTE: u32 = 4;
const SHT_NOBITS: u32 = 8;
const PROGRAM_HEADER: usize = 56;
const SECTION_HEADER: usize = 64;
/// Maximum size in bytes of a kernel's argument block.
const MAX_ARGUMENTS: u64 = 1 << 16;

#[derive(Deserialize)]
struct Root {
    #[serde(rename = "amdhsa.target", default)]
    target: Option<String>,
    #[serde(rename = "amdhsa.kernels", default)]
    kernels: Vec<Kernel>,
}

#[derive(Deserialize)]
struct Kernel {
    #[serde(rename = ".name")]
    name: String,
    #[serde(rename = ".args", default)]
    arguments: Vec<Argument>,
}

#[derive(Deserialize)]
struct Argument {
    #[serde(rename = ".offset")]
    offset: u64,
    #[serde(rename = ".size")]
    size: u64,
    #[serde(rename = ".value_kind")]
    kind: String,
}

/// Parses an image.
///
/// # Errors
/// A message that describes the defect and the required format.
pub(super) fn parse(image: &[u8]) -> Result<CodeObject, String> {
    if image.starts_with(b"__CLANG_OFFLOAD_BUNDLE__") || image.starts_with(b"CCOB") {
        return Err(
            "this is an offload bundle; unpack the code object of one architecture \
                    (clang-offload-bundler --unbundle)"
                .to_owned(),
        );
    }
    if image.get(..6) != Some(b"\x7fELF\x02\x01") {
        return Err(
            "this is not a 64-bit little-endian ELF file; HIP takes code objects (.co)".into(),
        );
    }
    let machine = u16_at(image, 18)?;
    if machine != EM_AMDGPU {
        return Err(format!(
            "this is an ELF file for machine {machine}, not for an AMD GPU"
        ));
    }
    check_sections(image)?;
    let table = u64_at(image, 32)?;
    let count = usize::from(u16_at(image, 56)?);
    if count > 0 && usize::from(u16_at(image, 54)?) != PROGRAM_HEADER {
        return Err("its program headers have an unknown size".to_owned());
    }
    let headers = inside(
        image,
        table,
        (count * PROGRAM_HEADER) as u64,
        "program headers",
    )?;
    let mut out = CodeObject {
        // The byte EI_ABIVERSION. Version 4 has the value 2.
        version: image
            .get(8)
            .and_then(|abi| abi.checked_add(2))
            .filter(|version| (4..=6).contains(version)),
        ..CodeObject::default()
    };
    for header in image[headers].as_chunks::<PROGRAM_HEADER>().0 {
        let bytes = inside(image, u64_at(header, 8)?, u64_at(header, 32)?, "a segment")?;
        if u32_at(header, 0)? == PT_NOTE && out.kernels.is_none() {
            notes(&image[bytes], &mut out)?;
        }
    }
    Ok(out)
}

/// Checks that all sections with contents lie within the image.
fn check_sections(image: &[u8]) -> Result<(), String> {
    let table = u64_at(image, 40)?;
    let count = usize::from(u16_at(image, 60)?);
    if count > 0 && usize::from(u16_at(image, 58)?) != SECTION_HEADER {
        return Err("its section headers have an unknown size".to_owned());
    }
    let headers = inside(
        image,
        table,
        (count * SECTION_HEADER) as u64,
        "section headers",
    )?;
    for header in image[headers].as_chunks::<SECTION_HEADER>().0 {
        if u32_at(header, 4)? != SHT_NOBITS {
            inside(image, u64_at(header, 24)?, u64_at(header, 32)?, "a section")?;
        }
    }
    Ok(())
}

/// Finds the metadata in the notes of a segment.
fn notes(mut bytes: &[u8], out: &mut CodeObject) -> Result<(), String> {
    while !bytes.is_empty() {
        let name_bytes = u64::from(u32_at(bytes, 0)?);
        let descriptor_bytes = u64::from(u32_at(bytes, 4)?);
        let kind = u32_at(bytes, 8)?;
        let name = inside(bytes, 12, name_bytes, "a note's name")?;
        let start = 12 + name_bytes.next_multiple_of(4);
        let descriptor = inside(bytes, start, descriptor_bytes, "a note")?;
        if kind == NT_AMDGPU_METADATA && bytes[name].starts_with(b"AMDGPU") {
            return metadata(&bytes[descriptor], out);
        }
        let next = start + descriptor_bytes.next_multiple_of(4);
        bytes = usize::try_from(next)
            .ok()
            .and_then(|next| bytes.get(next..))
            .unwrap_or_default();
    }
    Ok(())
}

fn metadata(bytes: &[u8], out: &mut CodeObject) -> Result<(), String> {
    let root: Root = rmp_serde::from_slice(bytes)
        .map_err(|error| format!("its metadata note cannot be read: {error}"))?;
    let mut kernels = HashMap::new();
    for kernel in root.kernels {
        let mut arguments = Vec::new();
        for argument in kernel.arguments {
            // Skips hidden arguments, which the runtime sets at the launch.
            if argument.kind.starts_with("hidden_") {
                continue;
            }
            let end = argument.offset.checked_add(argument.size);
            let (Ok(offset), Ok(size), Some(0..=MAX_ARGUMENTS)) = (
                usize::try_from(argument.offset),
                usize::try_from(argument.size),
                end,
            ) else {
                return Err(format!(
                    "kernel {} has an argument of {} bytes at offset {}",
                    kernel.name, argument.size, argument.offset
                ));
            };
            arguments.push((offset, size));
        }
        kernels.insert(kernel.name, arguments);
    }
    out.target = root.target;
    out.kernels = Some(kernels);
    Ok(())
}

/// Returns the range `start..start + bytes`, if it lies within `image`.
fn inside(image: &[u8], start: u64, bytes: u64, what: &str) -> Result<Range<usize>, String> {
    start
        .checked_add(bytes)
        .filter(|end| *end <= image.len() as u64)
        .and_then(|end| Some(usize::try_from(start).ok()?..usize::try_from(end).ok()?))
        .ok_or_else(|| {
            format!(
                "the image is cut short or damaged: {what} at {start} with {bytes} bytes, of {}",
                image.len()
            )
        })
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N], String> {
    bytes
        .get(at..at + N)
        .and_then(|slice| slice.try_into().ok())
        .ok_or_else(|| "the image is cut short: a header is missing".to_owned())
}

fn u16_at(bytes: &[u8], at: usize) -> Result<u16, String> {
    array_at(bytes, at).map(u16::from_le_bytes)
}

fn u32_at(bytes: &[u8], at: usize) -> Result<u32, String> {
    array_at(bytes, at).map(u32::from_le_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Result<u64, String> {
    array_at(bytes, at).map(u64::from_le_bytes)
}

#[cfg(test)]
#[path = "metadata_tests.rs"]
mod tests;
