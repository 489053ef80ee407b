//! The functions of NVIDIA's libraries: those of the system's libraries, or functions of this
//! process that replace them.

use core::ffi::c_void;
use core::ptr::NonNull;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::{Error, Result};

/// Returns the address of the function with a name, such as `cuInit`.
pub type Lookup = fn(&str) -> Option<NonNull<c_void>>;

/// The source of all functions of this process. The first use decides it.
static SOURCE: OnceLock<Source> = OnceLock::new();

#[derive(Clone, Copy, Debug)]
enum Source {
    System,
    Process(Lookup),
}

/// Replaces the CUDA driver library and NVML in this process: functions come from `lookup` instead.
///
/// Devices of emulators use this function. A function that `lookup` does not return is one that
/// the driver lacks.
///
/// # Safety
/// Each function that `lookup` returns must have the prototype that `cuda.h` or `nvml.h` declares
/// for its name, and fulfil the driver's contract for it.
///
/// # Errors
/// [`Error::InvalidArgument`] if the process has already looked for the driver library, or has
/// replaced it.
pub unsafe fn replace_library(lookup: Lookup) -> Result<()> {
    let mut replaced = false;
    SOURCE.get_or_init(|| {
        replaced = true;
        Source::Process(lookup)
    });
    if replaced {
        return Ok(());
    }
    Err(Error::InvalidArgument {
        operation: "replace_library",
        detail: "this process has already looked for the CUDA driver library; replace the library \
                 before the first use of a CUDA device"
            .to_owned(),
    })
}

/// Returns true if functions of this process replace the libraries.
pub(super) fn is_replaced() -> bool {
    matches!(SOURCE.get(), Some(Source::Process(_)))
}

/// The functions of an open library.
#[derive(Debug)]
pub(super) enum Symbols {
    /// Keeps the shared object loaded, so that pointers to its functions stay valid.
    Object(Library),
    Process(Lookup),
}

impl Symbols {
    /// Opens the first library in `names` that can be loaded, or returns the functions that replace
    /// it. An error is the reason why the first library that exists cannot be opened, or `None` if
    /// there is no such library.
    pub(super) fn open(names: &[&str]) -> Result<Self, Option<String>> {
        match SOURCE.get_or_init(|| Source::System) {
            Source::System => Self::open_object(names),
            Source::Process(lookup) => Ok(Self::Process(*lookup)),
        }
    }

    /// Opens the first library in `names` that can be loaded, like [`Symbols::open`].
    pub(super) fn open_object(names: &[&str]) -> Result<Self, Option<String>> {
        let mut broken = None;
        for name in names {
            // SAFETY: loading a library runs its initialisers. Those of the CUDA driver and of NVML
            // have no preconditions.
            match unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) } {
                Ok(object) => return Ok(Self::Object(object)),
                Err(error) => {
                    let text = error.to_string();
                    if !text.contains("No such file") && broken.is_none() {
                        broken = Some(format!("{name} cannot be opened: {text}"));
                    }
                }
            }
        }
        Err(broken)
    }

    /// Looks up a function. An error is the reason why there is no such function.
    ///
    /// # Safety
    /// `F` must be the type of pointers to the function `name`.
    pub(super) unsafe fn get<F: Copy>(&self, name: &str) -> Result<F, String> {
        const { assert!(size_of::<F>() == size_of::<NonNull<c_void>>()) };
        match self {
            Self::Object(object) => {
                // SAFETY: `F` is the type of the function (contract of this function).
                let function = unsafe { object.get::<F>(name.as_bytes()) };
                function.map(|it| *it).map_err(|error| error.to_string())
            }
            Self::Process(lookup) => {
                let address = lookup(name).ok_or_else(|| format!("no function {name}"))?;
                // SAFETY: `F` is the type of pointers to the function and has the size of an
                // address. `replace_library` requires the address to be that of the function.
                Ok(unsafe { core::mem::transmute_copy::<NonNull<c_void>, F>(&address) })
            }
        }
    }
}
