//! Properties of a GPU.

use core::ffi::{c_char, c_uint};

use super::bindings::{
    self as hip, Int, PROP_ARCHITECTURE, PROP_ARCHITECTURE_BYTES, PROP_BYTES, Prop, hipUUID,
};
use super::device::{self, Hip};
use super::error::driver_error;
use super::library::Functions;
use super::library::LIBRARY;
use crate::Result;
use crate::gpu::{DeviceDriver, MulticastDriver, Properties};

// AMD GPUs have no multicast objects.
impl MulticastDriver for Hip {}

impl DeviceDriver for Hip {
    fn library(&self) -> &'static str {
        LIBRARY
    }

    fn properties(&self) -> &Properties {
        &self.properties
    }

    fn native_atomics(&self, peer: &[u8; 16]) -> Result<Option<bool>> {
        let functions = self.functions;
        for ordinal in 0..device::count(functions)?.cast_signed() {
            if identifier(functions, ordinal)? != *peer {
                continue;
            }
            let mut value: Int = 0;
            let (attribute, own) = (hip::P2P_NATIVE_ATOMICS, self.ordinal);
            // SAFETY: `value` is writable.
            let status = unsafe {
                (functions.hipDeviceGetP2PAttribute)(&mut value, attribute, own, ordinal)
            };
            functions.check("hipDeviceGetP2PAttribute", status)?;
            return Ok(Some(value != 0));
        }
        Ok(None)
    }
}

/// Queries the properties of device `ordinal`. The device must exist.
pub(super) fn of(functions: &Functions, ordinal: Int) -> Result<Properties> {
    let attribute = |number| attribute(functions, number, ordinal);
    Ok(Properties {
        ordinal: ordinal.cast_unsigned(),
        name: name(functions, ordinal)?,
        architecture: architecture(functions, ordinal)?,
        uuid: identifier(functions, ordinal)?,
        memory: memory(functions, ordinal)?,
        multiprocessors: attribute(hip::ATTRIBUTE_MULTIPROCESSORS)?,
        warp: attribute(hip::ATTRIBUTE_WARP)?,
        max_threads: attribute(hip::ATTRIBUTE_MAX_THREADS)?,
        shared_bytes: attribute(hip::ATTRIBUTE_SHARED_BYTES)?,
        version: version(functions)?,
        descriptors: false,
        fabric: false,
        domain: None,
        multicast: false,
        cooperative: attribute(hip::ATTRIBUTE_COOPERATIVE)? != 0,
    })
}

/// Returns the identifier of device `ordinal`.
fn identifier(functions: &Functions, ordinal: Int) -> Result<[u8; 16]> {
    let attribute = |number| attribute(functions, number, ordinal);
    let pci = [
        attribute(hip::ATTRIBUTE_PCI_DOMAIN)?,
        attribute(hip::ATTRIBUTE_PCI_BUS)?,
        attribute(hip::ATTRIBUTE_PCI_DEVICE)?,
    ];
    Ok(identity(uuid(functions, ordinal)?, pci))
}

fn attribute(functions: &Functions, number: c_uint, ordinal: Int) -> Result<u32> {
    let mut value: Int = 0;
    // SAFETY: `value` is writable.
    let status = unsafe { (functions.hipDeviceGetAttribute)(&mut value, number, ordinal) };
    functions.check("hipDeviceGetAttribute", status)?;
    u32::try_from(value).map_err(|_| {
        driver_error(
            "hipDeviceGetAttribute",
            &format!("attribute {number} is {value}"),
        )
    })
}

fn name(functions: &Functions, ordinal: Int) -> Result<String> {
    let mut name = [0; 256];
    // SAFETY: `name` is writable and has 256 bytes, the length that is passed.
    let status = unsafe { (functions.hipDeviceGetName)(name.as_mut_ptr(), 256, ordinal) };
    functions.check("hipDeviceGetName", status)?;
    Ok(string(&name.map(c_char::cast_unsigned)))
}

fn uuid(functions: &Functions, ordinal: Int) -> Result<[u8; 16]> {
    let mut uuid = hipUUID { bytes: [0; 16] };
    // SAFETY: `uuid` is writable.
    let status = unsafe { (functions.hipDeviceGetUuid)(&mut uuid, ordinal) };
    functions.check("hipDeviceGetUuid", status)?;
    Ok(uuid.bytes.map(c_char::cast_unsigned))
}

fn memory(functions: &Functions, ordinal: Int) -> Result<u64> {
    let mut bytes = 0_usize;
    // SAFETY: `bytes` is writable.
    let status = unsafe { (functions.hipDeviceTotalMem)(&mut bytes, ordinal) };
    functions.check("hipDeviceTotalMem", status)?;
    Ok(bytes as u64)
}

fn version(functions: &Functions) -> Result<u32> {
    let mut version: Int = 0;
    // SAFETY: `version` is writable.
    let status = unsafe { (functions.hipRuntimeGetVersion)(&mut version) };
    functions.check("hipRuntimeGetVersion", status)?;
    Ok(u32::try_from(version).unwrap_or_default())
}

/// Returns the architecture of the GPU without target features, such as `gfx942` if the runtime
/// reports `gfx942:sramecc+:xnack-`.
fn architecture(functions: &Functions, ordinal: Int) -> Result<String> {
    // The buffer has twice the size of the structure, because a later runtime may fill a longer
    // structure under the same name.
    let mut properties = [0_u64; PROP_BYTES / 4];
    let pointer = properties.as_mut_ptr().cast::<Prop>();
    // SAFETY: the buffer is writable, aligned to 8 bytes like the structure, and larger than the
    // structure.
    let status = unsafe { (functions.hipGetDevicePropertiesR0600)(pointer, ordinal) };
    functions.check("hipGetDevicePropertiesR0600", status)?;
    let bytes: &[u8] = bytemuck::cast_slice(&properties);
    let text = string(&bytes[PROP_ARCHITECTURE..PROP_ARCHITECTURE + PROP_ARCHITECTURE_BYTES]);
    base(&text).ok_or_else(|| {
        driver_error(
            "hipGetDevicePropertiesR0600",
            &format!(
                "the GPU's architecture is {text:?}, expected gfx and a number; this \
                 version of the HIP runtime is not known"
            ),
        )
    })
}

/// Returns the architecture without target features, or `None` if the text is not an architecture.
fn base(text: &str) -> Option<String> {
    let base = text.split(':').next()?;
    let number = base.strip_prefix("gfx")?;
    (!number.is_empty() && number.bytes().all(|byte| byte.is_ascii_alphanumeric()))
        .then(|| base.to_owned())
}

/// Returns the bytes up to the first zero as text.
fn string(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]).into_owned()
}

/// Returns the identifier that the runtime reports if it consists of 16 hexadecimal digits that are
/// not all 0. Most graphics cards report no identifier, or a text that is equal for all cards. For
/// such a card, returns the PCI address, which is unique within a host.
fn identity(uuid: [u8; 16], [domain, bus, device]: [u32; 3]) -> [u8; 16] {
    let digits = uuid.iter().all(u8::is_ascii_hexdigit);
    if digits && uuid.iter().any(|byte| *byte != b'0') {
        return uuid;
    }
    let mut out = *b"PCI\0\0\0\0\0\0\0\0\0\0\0\0\0";
    for (part, value) in out[4..]
        .as_chunks_mut::<4>()
        .0
        .iter_mut()
        .zip([domain, bus, device])
    {
        part.copy_from_slice(&value.to_be_bytes());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn architectures_lose_their_features() {
        assert_eq!(base("gfx942:sramecc+:xnack-").as_deref(), Some("gfx942"));
        assert_eq!(base("gfx90a").as_deref(), Some("gfx90a"));
        assert_eq!(base(""), None);
        assert_eq!(base("gfx"), None);
        assert_eq!(base("AMD Instinct"), None);
        assert_eq!(base("gfx\u{fffd}"), None);
    }

    #[test]
    fn strings_end_at_their_zero_or_at_the_end() {
        assert_eq!(string(b"gfx942\0rest"), "gfx942");
        assert_eq!(string(b"gfx942"), "gfx942");
    }

    #[test]
    fn graphics_cards_without_identifier_differ_by_their_address() {
        let own = *b"b5a6f1c2d3e4f506";
        assert_eq!(identity(own, [0, 1, 0]), own);
        for none in [
            [0; 16],
            *b"0000000000000000",
            *b"XX\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
        ] {
            let addresses =
                [[0, 1, 0], [0, 2, 0], [1, 1, 0], [0, 1, 1]].map(|at| identity(none, at));
            for (at, address) in addresses.iter().enumerate() {
                assert!(!addresses[..at].contains(address), "{addresses:?}");
                assert_ne!(*address, none);
            }
        }
    }
}
