//! The metadata of a cubin: its target, and the parameters of its kernels.
//!
//! NVIDIA does not document the format. The flags of the ELF header are taken from LLVM's
//! `BinaryFormat/ELF.h`. This parser was checked against the output of `ptxas` 12.8 and 13.5. The
//! encoding of the target depends on the ELF ABI version:
//!
//! | ELF ABI version | `ptxas` version | architecture in `e_flags` | architecture-specific flag |
//! |---|---|---|---|
//! | 7 (OS ABI 0x33) | 12.x for GPUs before Blackwell | bits 0..8 | bit 11 |
//! | 8 (OS ABI 0x41) | 12.8 for Blackwell, 13 for all | bits 8..16 | bit 3 (12.8 only) |
//!
//! A kernel is a function symbol with bit 4 of `st_other` set. Section `.nv.info.NAME` contains the
//! attributes of kernel NAME. Each attribute 0x17 or 0x45 describes one parameter.

use super::Entry;

/// `EM_CUDA`.
const MACHINE_CUDA: u16 = 190;
const SECTION_HEADER: usize = 64;
const SECTION_SYMBOLS: u32 = 2;
const SYMBOL_FUNCTION: u8 = 2;
/// `STO_CUDA_ENTRY`.
const OTHER_ENTRY: u8 = 0x10;
/// Format of an attribute that states the length of its value. An attribute of any other format is
/// four bytes long in total.
const FORMAT_LONG: u8 = 4;
/// `EIATTR_KPARAM_INFO`. Encodes the size of the parameter in 14 bits, starting at bit 18 of the
/// third word.
const ATTRIBUTE_PARAMETER: u8 = 0x17;
/// The variant of `EIATTR_KPARAM_INFO` for kernels with more than 4 KiB of parameters. Encodes the
/// size of the parameter in 16 bits.
const ATTRIBUTE_LARGE: u8 = 0x45;

/// Returns true if the file is an ELF file for an NVIDIA GPU.
pub(super) fn is_cubin(file: &[u8]) -> bool {
    file.starts_with(b"\x7fELF") && half(file, 18) == Some(MACHINE_CUDA)
}

/// Parses the target (`sm_90`; `sm_90a` if architecture-specific) and the kernels of a cubin.
pub(super) fn parse(file: &[u8]) -> Result<(String, Vec<Entry>), String> {
    let target = target(file)?;
    let entries = entries(file).ok_or("it is a cubin, but damaged: a table leaves the file")?;
    Ok((target, entries))
}

/// Returns the target that the ELF header encodes.
fn target(file: &[u8]) -> Result<String, String> {
    if file.get(4..6) != Some(&[2, 1]) {
        return Err("it is a cubin, but not of 64 bits".to_owned());
    }
    let (version, flags) = file
        .get(8)
        .zip(word(file, 48))
        .ok_or("it is a cubin that ends within its header")?;
    let (architecture, only) = match version {
        7 => (flags & 0xff, flags & 0x800 != 0),
        8 => (flags >> 8 & 0xff, flags & 0x8 != 0),
        other => {
            return Err(format!(
                "it is a cubin of ELF ABI version {other}, of which 7 and 8 are known (CUDA 12 \
                 and 13): use PTX"
            ));
        }
    };
    Ok(format!("sm_{architecture}{}", if only { "a" } else { "" }))
}

/// A section of the ELF file.
#[derive(Clone, Copy)]
struct Section<'a> {
    name: usize,
    kind: u32,
    link: usize,
    bytes: &'a [u8],
}

fn section(file: &[u8], index: usize) -> Option<Section<'_>> {
    let table = usize::try_from(long(file, 40)?).ok()?;
    let size = usize::from(half(file, 58)?);
    let start = table.checked_add(index.checked_mul(size)?)?;
    let header = file.get(start..start.checked_add(SECTION_HEADER)?)?;
    let kind = word(header, 4)?;
    let start = usize::try_from(long(header, 24)?).ok()?;
    let bytes = usize::try_from(long(header, 32)?).ok()?;
    // A section of type 8 (`SHT_NOBITS`), such as shared memory, has a size but no bytes in the
    // file.
    let bytes = if kind == 8 { 0 } else { bytes };
    Some(Section {
        name: word(header, 0)? as usize,
        kind,
        link: word(header, 40)? as usize,
        bytes: file.get(start..start.checked_add(bytes)?)?,
    })
}

/// Returns the string that starts at byte `at` of a string table.
fn text(table: Section<'_>, at: usize) -> Option<&str> {
    let rest = table.bytes.get(at..)?;
    let end = rest.iter().position(|byte| *byte == 0)?;
    core::str::from_utf8(rest.get(..end)?).ok()
}

/// Returns the kernels, or `None` if the file is damaged.
fn entries(file: &[u8]) -> Option<Vec<Entry>> {
    let sections = (0..usize::from(half(file, 60)?))
        .map(|index| section(file, index))
        .collect::<Option<Vec<_>>>()?;
    let names = *sections.get(usize::from(half(file, 62)?))?;
    let mut out = Vec::new();
    for table in sections.iter().filter(|it| it.kind == SECTION_SYMBOLS) {
        let texts = *sections.get(table.link)?;
        for symbol in table.bytes.as_chunks::<24>().0 {
            if symbol[4] & 0xf != SYMBOL_FUNCTION || symbol[5] & OTHER_ENTRY == 0 {
                continue;
            }
            let name = text(texts, word(symbol, 0)? as usize)?;
            let wanted = format!(".nv.info.{name}");
            let attributes = sections
                .iter()
                .find(|it| text(names, it.name) == Some(wanted.as_str()));
            out.push(Entry {
                name: name.to_owned(),
                parameters: attributes.map_or(Some(Vec::new()), |it| parameters(it.bytes))?,
            });
        }
    }
    Some(out)
}

/// Returns the offset and size of each parameter from the attributes of a kernel.
fn parameters(mut attributes: &[u8]) -> Option<Vec<(usize, usize)>> {
    let mut out = Vec::new();
    while !attributes.is_empty() {
        let (format, attribute) = (*attributes.first()?, *attributes.get(1)?);
        let length = match format {
            FORMAT_LONG => usize::from(half(attributes, 2)?),
            _ => 0,
        };
        let value = attributes.get(4..4 + length)?;
        let size = match (format, attribute) {
            (FORMAT_LONG, ATTRIBUTE_PARAMETER) => Some(word(value, 8)? >> 18),
            (FORMAT_LONG, ATTRIBUTE_LARGE) => Some(u32::from(half(value, 8)?)),
            _ => None,
        };
        if let Some(size) = size {
            let (ordinal, offset) = (half(value, 4)?, half(value, 6)?);
            out.push((ordinal, (usize::from(offset), size as usize)));
        }
        attributes = attributes.get(4 + length..)?;
    }
    out.sort_unstable();
    Some(out.into_iter().map(|(_, parameter)| parameter).collect())
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
