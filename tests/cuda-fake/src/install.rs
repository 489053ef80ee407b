//! Where the shared object is, and how a process is made to find it.

use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Names under which programs open the driver library, and the management library.
pub const NAMES: [&str; 3] = ["libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1"];

/// The fake's shared object, which cargo builds beside the binaries of a test that depends on this crate.
///
/// # Errors
/// When it is not there, with the command that builds it.
pub fn library() -> io::Result<PathBuf> {
    let name = format!("{DLL_PREFIX}fusewire_cuda_fake{DLL_SUFFIX}");
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
                    "{name} is not beside {}; run `cargo build -p fusewire-cuda-fake` with the same profile",
                    binary.display()
                ),
            )
        })
}

/// Links the shared object into `folder` as the driver library; a process that has the folder first in
/// `LD_LIBRARY_PATH` when it starts opens it.
///
/// # Errors
/// When it is not built, or the folder cannot be written.
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
