//! File operations whose errors name the file.

use std::fs::File;
use std::path::Path;

use crate::{Error, Result};

pub(crate) fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).map_err(|source| file("read", path, source))
}

pub(crate) fn read_bytes(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|source| file("read", path, source))
}

/// Writes a temporary file and renames it, so that readers never see a partially written file.
pub(crate) fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let temporary = Path::new(&temporary);
    std::fs::write(temporary, bytes)
        .and_then(|()| std::fs::rename(temporary, path))
        .map_err(|source| file("write", path, source))
}

pub(crate) fn create_directory(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(|source| file("create", path, source))
}

/// Locks a file, which is created if it does not exist, until the result is dropped. Waits for
/// other locks.
pub(crate) fn lock(path: &Path) -> Result<File> {
    let locked = File::create(path).map_err(|source| file("create", path, source))?;
    locked.lock().map_err(|source| file("lock", path, source))?;
    Ok(locked)
}

fn file(action: &'static str, path: &Path, source: std::io::Error) -> Error {
    Error::File {
        action,
        path: path.to_owned(),
        source,
    }
}
