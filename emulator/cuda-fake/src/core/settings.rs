//! Settings of the devices from the environment.

use std::sync::OnceLock;

/// Settings of the devices.
#[derive(Debug)]
pub(crate) struct Settings {
    /// `FUSEWIRE_CUDA_FAKE_DEVICES`: number of devices.
    pub(crate) devices: u32,
    /// `FUSEWIRE_CUDA_FAKE_SM`: compute capability times ten (90).
    pub(crate) capability: u32,
    /// `FUSEWIRE_CUDA_FAKE_MULTIPROCESSORS`: number of SMs of a device.
    pub(crate) multiprocessors: u32,
    /// `FUSEWIRE_CUDA_FAKE_THREADS`: maximum number of threads of a block.
    pub(crate) threads: u32,
    /// `FUSEWIRE_CUDA_FAKE_MEMORY`: size of a device's memory in bytes.
    pub(crate) memory: u64,
    /// `FUSEWIRE_CUDA_FAKE_DRIVER`: version of the driver (12080).
    pub(crate) driver: u32,
    /// `FUSEWIRE_CUDA_FAKE_DESCRIPTORS=0`: memory cannot be exported as a file descriptor.
    pub(crate) descriptors: bool,
    /// `FUSEWIRE_CUDA_FAKE_FABRIC`: name of the devices' fabric, or `None` if the variable is unset
    /// or empty.
    pub(crate) fabric: Option<String>,
    /// `FUSEWIRE_CUDA_FAKE_MULTICAST=1`: the devices support multicast objects.
    pub(crate) multicast: bool,
    /// `FUSEWIRE_CUDA_FAKE_ATOMICS=0`: the devices have no native atomics for each other's memory.
    pub(crate) atomics: bool,
    /// `FUSEWIRE_CUDA_FAKE_PEER_ACCESS=0`: no device can access memory of another device.
    pub(crate) peer_access: bool,
    /// `FUSEWIRE_CUDA_FAKE_HOST`: number of the host, which is part of the devices' UUIDs.
    pub(crate) host: u8,
    /// `FUSEWIRE_CUDA_FAKE_GUARD=1`: host accesses to device memory crash while devices are idle.
    pub(crate) guard: bool,
    /// `FUSEWIRE_FAKE_GPU=ptx`: the emulator executes the PTX of images.
    pub(crate) emulate: bool,
    /// `FUSEWIRE_CUDA_FAKE_POISON=0`: new device memory is zero, not filled with [`POISON`].
    pub(crate) poison: bool,
}

/// Byte that fills new device memory.
pub(crate) const POISON: u8 = 0xcb;

/// Size of an H200's memory in bytes.
const H200_MEMORY: u64 = 150_754_820_096;

/// Returns the settings. Reads the environment on the first call.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| Settings {
        devices: number("DEVICES", 1) as u32,
        capability: number("SM", 90) as u32,
        multiprocessors: number("MULTIPROCESSORS", 132) as u32,
        threads: number("THREADS", 1024) as u32,
        memory: number("MEMORY", H200_MEMORY),
        driver: number("DRIVER", 12_080) as u32,
        descriptors: number("DESCRIPTORS", 1) != 0,
        fabric: variable("FABRIC").filter(|name| !name.is_empty()),
        multicast: number("MULTICAST", 0) != 0,
        atomics: number("ATOMICS", 1) != 0,
        peer_access: number("PEER_ACCESS", 1) != 0,
        host: number("HOST", 0) as u8,
        guard: number("GUARD", 0) != 0,
        emulate: emulate(),
        poison: number("POISON", 1) != 0,
    })
}

/// Reads `FUSEWIRE_FAKE_GPU`, which selects how kernels are executed.
fn emulate() -> bool {
    match std::env::var("FUSEWIRE_FAKE_GPU").as_deref() {
        Ok("ptx") => true,
        Ok("native" | "") | Err(_) => false,
        Ok(other) => {
            super::record::log_refusal(&format!(
                "FUSEWIRE_FAKE_GPU is {other:?}; the values are ptx and native"
            ));
            false
        }
    }
}

/// Returns the value of `FUSEWIRE_CUDA_FAKE_` + `name`.
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(format!("FUSEWIRE_CUDA_FAKE_{name}")).ok()
}

fn number(name: &str, default: u64) -> u64 {
    let Some(text) = variable(name) else {
        return default;
    };
    text.trim().parse().unwrap_or_else(|_| {
        super::record::log_refusal(&format!(
            "FUSEWIRE_CUDA_FAKE_{name} is {text:?}, which is not a number; using {default}"
        ));
        default
    })
}
