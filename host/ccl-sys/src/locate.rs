//! Search paths of the libraries.

use core::fmt;
use std::path::{Path, PathBuf};

/// One of the four libraries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// NVIDIA's NCCL.
    Nccl,
    /// Meta's NCCLX.
    Ncclx,
    /// AMD's RCCL.
    Rccl,
    /// Meta's RCCLX.
    Rcclx,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Kind {
    /// Returns the name of the library in environment variables.
    const fn name(self) -> &'static str {
        match self {
            Self::Nccl => "NCCL",
            Self::Ncclx => "NCCLX",
            Self::Rccl => "RCCL",
            Self::Rcclx => "RCCLX",
        }
    }

    /// Returns true if the library uses AMD's function names.
    pub(crate) const fn is_rccl(self) -> bool {
        matches!(self, Self::Rccl | Self::Rcclx)
    }

    const fn sonames(self) -> &'static [&'static str] {
        match self {
            Self::Nccl | Self::Ncclx => &["libnccl.so.2"],
            Self::Rccl | Self::Rcclx => &["librccl.so.1", "librccl.so"],
        }
    }

    pub(crate) const fn install(self) -> &'static str {
        match self {
            Self::Nccl => "libnccl2 (or PyPI's nvidia-nccl-cu13), or set FUSEWIRE_NCCL_PATH",
            Self::Ncclx => "NCCLX from torchcomms, or set FUSEWIRE_NCCLX_PATH",
            Self::Rccl => "ROCm's rccl, or set FUSEWIRE_RCCL_PATH",
            Self::Rcclx => "RCCLX from torchcomms, or set FUSEWIRE_RCCLX_PATH",
        }
    }

    /// Returns the paths to try, in order. If the caller passes a path, returns only this path,
    /// because the caller does not expect another library.
    pub(crate) fn candidates(self, path: Option<&Path>) -> Vec<PathBuf> {
        let name = self.name();
        path.map(Path::to_path_buf)
            .or_else(|| named(&format!("FUSEWIRE_{name}_PATH")))
            .or_else(|| named(&format!("TORCHCOMMS_BACKEND_LIB_PATH_{name}")))
            .map_or_else(
                || self.sonames().iter().map(PathBuf::from).collect(),
                |path| vec![path],
            )
    }
}

fn named(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from)
}
