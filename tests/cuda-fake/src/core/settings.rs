//! What the environment says of the devices.

use std::sync::OnceLock;

/// The devices as the environment wants them.
#[derive(Debug)]
pub(crate) struct Settings {
    /// `FUSEWIRE_CUDA_FAKE_DEVICES`: how many devices there are.
    pub(crate) devices: u32,
    /// `FUSEWIRE_CUDA_FAKE_SM`: compute capability, ten times (90).
    pub(crate) capability: u32,
    /// `FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS`: multiprocessors of a device.
    pub(crate) multiprocessors: u32,
    /// `FUSEWIRE_CUDA_FAKE_MEMORY`: bytes of a device's memory.
    pub(crate) memory: u64,
    /// `FUSEWIRE_CUDA_FAKE_DRIVER`: version of the driver (12080).
    pub(crate) driver: u32,
    /// `FUSEWIRE_CUDA_FAKE_DESCRIPTORS=0`: memory cannot be exported as a file descriptor.
    pub(crate) descriptors: bool,
    /// `FUSEWIRE_CUDA_FAKE_FABRIC`: name of the fabric that the devices are in; empty for none.
    pub(crate) fabric: Option<String>,
    /// `FUSEWIRE_CUDA_FAKE_MULTICAST=1`: the devices have multicast objects.
    pub(crate) multicast: bool,
    /// `FUSEWIRE_CUDA_FAKE_HOST`: a number that is in the identities of the devices.
    pub(crate) host: u8,
    /// `FUSEWIRE_CUDA_FAKE_GUARD=1`: the host's accesses to device memory crash while no device works.
    pub(crate) guard: bool,
    /// `FUSEWIRE_CUDA_FAKE_POISON=0`: new device memory is zero, not filled with [`POISON`].
    pub(crate) poison: bool,
}

/// What new device memory holds.
pub(crate) const POISON: u8 = 0xcb;

/// Bytes of an H200's memory.
const H200_MEMORY: u64 = 150_754_820_096;

/// The settings, read once.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| Settings {
        devices: number("DEVICES", 1) as u32,
        capability: number("SM", 90) as u32,
        multiprocessors: number("MULTIPROCESSORS", 132) as u32,
        memory: number("MEMORY", H200_MEMORY),
        driver: number("DRIVER", 12_080) as u32,
        descriptors: number("DESCRIPTORS", 1) != 0,
        fabric: variable("FABRIC").filter(|name| !name.is_empty()),
        multicast: number("MULTICAST", 0) != 0,
        host: number("HOST", 0) as u8,
        guard: number("GUARD", 0) != 0,
        poison: number("POISON", 1) != 0,
    })
}

/// A variable of the fake.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(format!("FUSEWIRE_CUDA_FAKE_{name}")).ok()
}

fn number(name: &str, usual: u64) -> u64 {
    let Some(text) = variable(name) else {
        return usual;
    };
    text.trim().parse().unwrap_or_else(|_| {
        super::record::log_refusal(&format!(
            "FUSEWIRE_CUDA_FAKE_{name} is {text:?}, no number; {usual} is taken"
        ));
        usual
    })
}
