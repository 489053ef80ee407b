//! Vendors and architectures of GPUs.

use core::fmt;
use core::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;

/// Vendor of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Vendor {
    /// AMD. An image is a code object with AMDGCN machine code.
    Amd,
    /// NVIDIA. An image is PTX.
    Nvidia,
}

impl Vendor {
    /// Returns the vendor's key in the table of shims.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Amd => "amdgcn",
            Self::Nvidia => "nvptx",
        }
    }

    /// Returns the word in `FUSEWIRE_REQUIRE` that makes the checks for this vendor compulsory.
    pub const fn requirement(self) -> &'static str {
        match self {
            Self::Amd => "amdgcn",
            Self::Nvidia => "ptx",
        }
    }

    /// Returns rustc's target triple.
    pub const fn triple(self) -> &'static str {
        match self {
            Self::Amd => "amdgcn-amd-amdhsa",
            Self::Nvidia => "nvptx64-nvidia-cuda",
        }
    }

    /// Returns the calling convention of a kernel in LLVM IR.
    pub const fn calling_convention(self) -> &'static str {
        match self {
            Self::Amd => "amdgpu_kernel",
            Self::Nvidia => "ptx_kernel",
        }
    }
}

/// A GPU architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Target {
    /// NVIDIA Ampere (A100).
    #[serde(rename = "sm_80")]
    Sm80,
    /// NVIDIA Hopper.
    #[serde(rename = "sm_90")]
    Sm90,
    /// NVIDIA Blackwell.
    #[serde(rename = "sm_100")]
    Sm100,
    /// AMD MI200.
    Gfx90a,
    /// AMD MI300.
    Gfx942,
}

impl Target {
    /// All targets.
    pub const ALL: [Self; 5] = [
        Self::Sm80,
        Self::Sm90,
        Self::Sm100,
        Self::Gfx90a,
        Self::Gfx942,
    ];

    /// Returns the name of the architecture, as in `--target` and in the compiler's `-Ctarget-cpu`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm90 => "sm_90",
            Self::Sm100 => "sm_100",
            Self::Gfx90a => "gfx90a",
            Self::Gfx942 => "gfx942",
        }
    }

    /// Returns the vendor.
    pub const fn vendor(self) -> Vendor {
        match self {
            Self::Sm80 | Self::Sm90 | Self::Sm100 => Vendor::Nvidia,
            Self::Gfx90a | Self::Gfx942 => Vendor::Amd,
        }
    }

    /// Returns the PTX version as a target feature; empty for AMD. The version is the oldest one
    /// that has the required instructions, so that old drivers accept the image.
    pub const fn features(self) -> &'static str {
        match self {
            Self::Sm80 => "+ptx80",
            // PTX 8.2 has multicast reductions that accumulate 16-bit floats in f32.
            Self::Sm90 => "+ptx82",
            Self::Sm100 => "+ptx86",
            Self::Gfx90a | Self::Gfx942 => "",
        }
    }

    /// Returns `true` if the architecture has instructions for multicast addresses (NVLink SHARP).
    pub const fn has_multicast(self) -> bool {
        matches!(self, Self::Sm90 | Self::Sm100)
    }

    /// Returns the extension of an image's file name.
    pub const fn extension(self) -> &'static str {
        match self.vendor() {
            Vendor::Amd => "co",
            Vendor::Nvidia => "ptx",
        }
    }

    /// Parses a list such as `sm_80,gfx942` or `all`.
    ///
    /// # Errors
    /// [`Error::Target`] for an unknown name.
    pub fn list(text: &str) -> Result<Vec<Self>, Error> {
        let mut out = Vec::new();
        for name in text
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
        {
            if name == "all" {
                out.extend(Self::ALL);
            } else {
                out.push(name.parse()?);
            }
        }
        out.sort_unstable();
        out.dedup();
        Ok(out)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Target {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::ALL
            .into_iter()
            .find(|target| target.name() == text)
            .ok_or_else(|| Error::Target(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!(Target::list("all").unwrap(), Target::ALL);
        assert_eq!(
            Target::list("gfx942, sm_80").unwrap(),
            [Target::Sm80, Target::Gfx942]
        );
        assert!(matches!(Target::list("sm_70"), Err(Error::Target(name)) if name == "sm_70"));
    }
}
