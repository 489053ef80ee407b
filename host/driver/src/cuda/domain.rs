//! NVLink domain of a GPU: GPUs of several hosts that are connected by NVLink switches.
//!
//! The management library (NVML) reports the cluster of a GPU, and the clique of the GPU within the
//! cluster. The GPUs of a clique can access each other. NVML is opened at run time, and only if the
//! driver supports fabric handles. If NVML is missing, the GPU has no domain.

use core::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use core::mem::offset_of;
use std::sync::OnceLock;

use super::symbols::Symbols;
use crate::Result;

/// Soname of the management library, which the driver installs.
const SONAME: &str = "libnvidia-ml.so.1";

/// `NVML_SUCCESS`.
const SUCCESS: c_int = 0;

/// `NVML_GPU_FABRIC_STATE_COMPLETED`: the registration of the GPU in its cluster has completed,
/// with or without success.
const COMPLETED: c_uchar = 3;

/// `nvmlGpuFabricInfo_v2_t`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
struct FabricInfo {
    version: c_uint,
    cluster: [u8; 16],
    /// Result of the registration, after it has completed (`nvmlReturn_t`).
    status: c_int,
    clique: c_uint,
    state: c_uchar,
    health: c_uint,
}

/// Version number of `nvmlGpuFabricInfo_v2`: the structure's size, and 2 in the highest byte.
const VERSION: c_uint = size_of::<FabricInfo>() as c_uint | 2 << 24;

const _: () = {
    assert!(VERSION == 0x0200_0024);
    assert!(offset_of!(FabricInfo, cluster) == 4);
    assert!(offset_of!(FabricInfo, status) == 20);
    assert!(offset_of!(FabricInfo, clique) == 24);
    assert!(offset_of!(FabricInfo, state) == 28);
    assert!(offset_of!(FabricInfo, health) == 32);
};

impl FabricInfo {
    /// Returns the name of the domain, or `None` if the GPU is in no domain or its registration has
    /// not completed.
    fn domain(&self) -> Option<String> {
        let registered = self.state == COMPLETED && self.status == SUCCESS;
        // GPUs that are only connected within their host have a cluster of zeros.
        if !registered || self.cluster == [0; 16] {
            return None;
        }
        let cluster: String = self.cluster.iter().map(|b| format!("{b:02x}")).collect();
        Some(format!("{cluster}.{}", self.clique))
    }
}

/// `nvmlDeviceGetHandleByPciBusId_v2`.
type ByBus = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
/// `nvmlDeviceGetGpuFabricInfoV`.
type GetInfo = unsafe extern "C" fn(*mut c_void, *mut FabricInfo) -> c_int;

/// The initialised management library. The library stays initialised until the process exits.
#[derive(Debug)]
struct Nvml {
    by_bus: ByBus,
    get_info: GetInfo,
    /// Keeps the function pointers valid.
    _symbols: Symbols,
}

impl Nvml {
    /// Initialises the library. Returns `None` if the library or one of the functions is missing.
    fn new(symbols: Result<Symbols, Option<String>>) -> Option<Self> {
        let symbols = symbols
            .inspect_err(|error| tracing::debug!(?error, "no NVLink domain"))
            .ok()?;
        // SAFETY: the function type is the prototype in `nvml.h`.
        let start = unsafe { symbols.get::<unsafe extern "C" fn() -> c_int>("nvmlInit_v2") };
        // SAFETY: the function type is the prototype in `nvml.h`.
        let by_bus = unsafe { symbols.get::<ByBus>("nvmlDeviceGetHandleByPciBusId_v2") };
        // SAFETY: the function type is the prototype in `nvml.h`. Drivers before 550 lack the
        // function.
        let get_info = unsafe { symbols.get::<GetInfo>("nvmlDeviceGetGpuFabricInfoV") };
        let (start, by_bus, get_info) = (start.ok()?, by_bus.ok()?, get_info.ok()?);
        // SAFETY: the function has no preconditions.
        let code = unsafe { start() };
        if code != SUCCESS {
            tracing::debug!(code, "no NVLink domain: nvmlInit fails");
            return None;
        }
        Some(Self {
            by_bus,
            get_info,
            _symbols: symbols,
        })
    }

    /// Returns the domain of the GPU at `bus`.
    fn domain(&self, bus: &CStr) -> Option<String> {
        let mut device = core::ptr::null_mut();
        // SAFETY: `bus` is a C string, and `device` is writable.
        let code = unsafe { (self.by_bus)(bus.as_ptr(), &raw mut device) };
        if code != SUCCESS {
            tracing::debug!(code, ?bus, "no NVLink domain: NVML does not know the GPU");
            return None;
        }
        let mut info = FabricInfo {
            version: VERSION,
            ..FabricInfo::default()
        };
        // SAFETY: NVML returned `device`. `info` is writable and contains the version number of the
        // structure.
        let code = unsafe { (self.get_info)(device, &raw mut info) };
        if code != SUCCESS {
            tracing::debug!(code, ?bus, "no NVLink domain");
            return None;
        }
        let domain = info.domain();
        if domain.is_none() {
            tracing::debug!(?info, ?bus, "the GPU is in no NVLink domain");
        }
        domain
    }
}

/// Returns the NVLink domain of the GPU at PCI address `bus`. The value of `FUSEWIRE_NVLINK_DOMAIN`
/// has priority over the domain that NVML reports. The driver of the GPU must support fabric
/// handles.
///
/// # Errors
/// `Error::InvalidArgument` if the value of `FUSEWIRE_NVLINK_DOMAIN` is invalid.
pub(super) fn find(bus: &CStr) -> Result<Option<String>> {
    static NVML: OnceLock<Option<Nvml>> = OnceLock::new();
    if let Some(set) = nvlink_domain()? {
        return Ok(Some(set).filter(|name| !name.is_empty()));
    }
    let nvml = NVML.get_or_init(|| Nvml::new(Symbols::open(&[SONAME])));
    Ok(nvml.as_ref().and_then(|nvml| nvml.domain(bus)))
}

/// Returns the value of `FUSEWIRE_NVLINK_DOMAIN`, or `None` if the variable is not set. The value
/// is the domain's name, or an empty string if the GPUs are in no domain.
///
/// # Errors
/// `Error::InvalidArgument` if the name is not valid Unicode or is longer than 256 bytes.
fn nvlink_domain() -> Result<Option<String>> {
    const NAME: &str = "FUSEWIRE_NVLINK_DOMAIN";
    match std::env::var(NAME) {
        Ok(name) if name.len() <= 256 => Ok(Some(name)),
        Err(std::env::VarError::NotPresent) => Ok(None),
        _ => Err(crate::Error::InvalidArgument {
            operation: NAME,
            detail: "the value is no name of an NVLink domain: it has more than 256 bytes, or is \
                     not Unicode"
                .to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REGISTERED: FabricInfo = FabricInfo {
        version: VERSION,
        cluster: [0xab; 16],
        status: SUCCESS,
        clique: 7,
        state: COMPLETED,
        health: 0,
    };

    #[test]
    fn a_domain_is_a_cluster_and_a_clique() {
        let domain = REGISTERED.domain().expect("a domain");
        assert_eq!(domain, format!("{}.7", "ab".repeat(16)));
        let other = FabricInfo {
            clique: 8,
            ..REGISTERED
        };
        assert_ne!(other.domain(), Some(domain));
    }

    #[test]
    fn a_gpu_that_is_not_registered_is_in_none() {
        for state in [0, 1, 2, 4] {
            assert_eq!(
                FabricInfo {
                    state,
                    ..REGISTERED
                }
                .domain(),
                None,
                "{state}"
            );
        }
        let failed = FabricInfo {
            status: 999,
            ..REGISTERED
        };
        assert_eq!(failed.domain(), None);
        let alone = FabricInfo {
            cluster: [0; 16],
            ..REGISTERED
        };
        assert_eq!(alone.domain(), None);
    }

    #[test]
    fn a_missing_library_reports_no_domain() {
        let missing = Symbols::open_object(&["libfusewire-has-no-such-library.so.1"]);
        assert!(Nvml::new(missing).is_none());
        // libc exists but does not have the functions of NVML.
        assert!(Nvml::new(Symbols::open_object(&["libc.so.6"])).is_none());
    }
}
