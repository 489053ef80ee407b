//! Devices that run kernels.

use core::fmt;

use fusewire_device::native::Isa;

/// A device that runs kernels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Device {
    /// The CPU: the embedded default.
    #[default]
    Cpu,
}

impl Device {
    /// Name, as in `--device`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The best native entries for this machine, or those that `FUSEWIRE_ISA` names (`baseline`, `avx2`,
/// `avx512`) if the machine has them.
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
