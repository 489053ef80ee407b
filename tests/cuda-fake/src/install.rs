//! Finds the shared object of the fake and installs it for a child process.

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Names under which programs open the driver library and the management library.
pub const NAMES: [&str; 3] = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"];

/// Returns the path of the fake's shared object. Cargo builds it next to the test binaries of
/// crates that depend on this crate.
///
/// # Errors
/// Fails if the file does not exist. The message names the command that builds it.
pub fn library() -> io::Result<PathBuf> {
    let name = format!("{DLL_PREFIX}fusewire_cuda_fake_library{DLL_SUFFIX}");
    let binary = std::env::current_exe()?;
    let mut folders = binary.ancestors().skip(1).take(3);
    folders
        .find_map(|folder| {
            [folder.join(&name), folder.join("deps").join(&name)]
                .into_iter()
                .find(|path| path.exists())
        })
        .ok_or_else(|| {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!(
                    "{name} is not next to {}; run `cargo build -p fusewire-cuda-fake-library` \
                     with the same profile",
                    binary.display()
                ),
            )
        })
}

/// Links the shared object into `folder` under all [`NAMES`]. A process that starts with `folder`
/// as the first entry of `LD_LIBRARY_PATH` opens the fake instead of the driver.
///
/// # Errors
/// Fails if the shared object is not built, or if `folder` is not writable.
pub fn install(folder: &Path) -> io::Result<()> {
    let library = library()?;
    for name in NAMES {
        let link = folder.join(name);
        match symlink(&library, &link) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                std::fs::remove_file(&link)?;
                symlink(&library, &link)?;
            }
            other => other?,
        }
    }
    Ok(())
}
