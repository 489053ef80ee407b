//! The metadata of an AMD code object: its target, and the arguments of its kernels.
//!
//! The metadata is a MessagePack map in a note of the ELF file. Source: LLVM's "User Guide for
//! AMDGPU Backend", section "Code Object V3 and Above Metadata".

use serde::Deserialize;

use super::Entry;

const MACHINE_AMDGPU: u16 = 224;
const SEGMENT_NOTE: u32 = 4;
const NOTE_METADATA: u32 = 32;

#[derive(Deserialize)]
struct Metadata {
    #[serde(rename = "amdhsa.target")]
    target: String,
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
    offset: usize,
    #[serde(rename = ".size")]
    size: usize,
    #[serde(rename = ".value_kind")]
    kind: String,
}

/// Parses the target and the kernels of a code object.
pub(super) fn parse(file: &[u8]) -> Result<(String, Vec<Entry>), String> {
    let metadata = metadata(file)
        .ok_or_else(|| "it is an ELF file, but no code object of an AMD GPU".to_owned())?;
    let metadata: Metadata = rmp_serde::from_slice(metadata)
        .map_err(|error| format!("its metadata cannot be understood: {error}"))?;
    // The target has a form like `amdgcn-amd-amdhsa--gfx942:sramecc+`.
    let target = metadata.target.rsplit_once("--").map_or("", |(_, gpu)| gpu);
    let target = target.split(':').next().unwrap_or_default().to_owned();
    let kernels = metadata.kernels.into_iter().map(|kernel| Entry {
        name: kernel.name,
        parameters: kernel
            .arguments
            .iter()
            .filter(|argument| !argument.kind.starts_with("hidden_"))
            .map(|argument| (argument.offset, argument.size))
            .collect(),
    });
    Ok((target, kernels.collect()))
}

/// Returns the bytes of the metadata in a 64-bit little-endian ELF file.
fn metadata(file: &[u8]) -> Option<&[u8]> {
    let is_64_bit_little = file.get(4..6)? == [2, 1];
    if !is_64_bit_little || half(file, 18)? != MACHINE_AMDGPU {
        return None;
    }
    let table = usize::try_from(long(file, 32)?).ok()?;
    let (size, count) = (usize::from(half(file, 54)?), usize::from(half(file, 56)?));
    (0..count).find_map(|index| {
        let header = file.get(table.checked_add(index * size)?..)?;
        if word(header, 0)? != SEGMENT_NOTE {
            return None;
        }
        let start = usize::try_from(long(header, 8)?).ok()?;
        let length = usize::try_from(long(header, 32)?).ok()?;
        note(file.get(start..start.checked_add(length)?)?)
    })
}

/// Returns the contents of the metadata note in a segment of notes.
fn note(mut notes: &[u8]) -> Option<&[u8]> {
    loop {
        let name = usize::try_from(word(notes, 0)?).ok()?;
        let content = usize::try_from(word(notes, 4)?).ok()?;
        let kind = word(notes, 8)?;
        let start = name.checked_next_multiple_of(4)?.checked_add(12)?;
        let end = start.checked_add(content)?;
        if kind == NOTE_METADATA && notes.get(12..12usize.checked_add(name)?)? == b"AMDGPU\0" {
            return notes.get(start..end);
        }
        notes = notes.get(end.checked_next_multiple_of(4)?..)?;
    }
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    let bytes = bytes.get(at..at.checked_add(2)?)?;
    bytes.try_into().ok().map(u16::from_le_bytes)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    bytes.try_into().ok().map(u32::from_le_bytes)
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    bytes.try_into().ok().map(u64::from_le_bytes)
}
