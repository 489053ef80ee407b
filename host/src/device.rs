//! Devices that run kernels.

use core::fmt;
use core::str::FromStr;

use fusewire_device::native::Isa;

use crate::{Error, Result};

/// A device that runs kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// The CPU, which is the default.
    #[default]
    Cpu,
    /// An NVIDIA GPU, by its number among the GPUs visible to the process (`CUDA_VISIBLE_DEVICES`).
    Cuda(u32),
    /// An AMD GPU, by its number among the GPUs visible to the process (`HIP_VISIBLE_DEVICES`).
    Hip(u32),
}

impl Device {
    /// Returns the kind of the device, as the option `--device` accepts it: `cpu`, `cuda` or `hip`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda(_) => "cuda",
            Self::Hip(_) => "hip",
        }
    }

    /// Returns true if the device is a GPU. The memory of a GPU is not host memory.
    pub const fn is_gpu(self) -> bool {
        !matches!(self, Self::Cpu)
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str(self.name()),
            Self::Cuda(ordinal) | Self::Hip(ordinal) => write!(f, "{}:{ordinal}", self.name()),
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    /// Parses `cpu`, `cuda`, `cuda:N`, `hip` or `hip:N`. Without a number, N is 0.
    fn from_str(text: &str) -> Result<Self> {
        let (name, ordinal) = text.split_once(':').unwrap_or((text, "0"));
        match (name, ordinal.parse()) {
            ("cpu", _) if text == "cpu" => Ok(Self::Cpu),
            ("cuda", Ok(ordinal)) => Ok(Self::Cuda(ordinal)),
            ("hip", Ok(ordinal)) => Ok(Self::Hip(ordinal)),
            _ => Err(Error::InvalidArgument {
                operation: "device",
                detail: format!("\"{text}\" is none of cpu, cuda, cuda:N, hip, hip:N"),
            }),
        }
    }
}

/// Returns the instruction set for native kernels: the set that the variable `FUSEWIRE_ISA` names
/// (`baseline`, `avx2` or `avx512`), or the best set that this machine supports if the variable
/// does not name a supported set.
pub fn isa() -> Isa {
    let best = detect();
    match std::env::var("FUSEWIRE_ISA").as_deref() {
        Ok("baseline") => Isa::Baseline,
        Ok("avx2") if best != Isa::Baseline => Isa::Avx2,
        _ => best,
    }
}

#[cfg(target_arch = "x86_64")]
fn detect() -> Isa {
    let avx2 = is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("bmi1")
        && is_x86_feature_detected!("bmi2");
    let avx512 = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl");
    match (avx2, avx512) {
        (true, true) => Isa::Avx512,
        (true, false) => Isa::Avx2,
        _ => Isa::Baseline,
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn detect() -> Isa {
    Isa::Baseline
}
