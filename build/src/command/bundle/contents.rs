//! The files of a bundle, their manifest and their folder.

use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};
use fusewire_build::sources::sha256;
use serde::{Deserialize, Serialize};

/// File that marks a folder as a bundle.
pub(super) const MANIFEST: &str = "manifest.json";
/// File with the hashes of all files, for `sha256sum -c`.
pub(super) const SUMS: &str = "SHA256SUMS";
const FORMAT: &str = "fusewire-bundle-1";

/// Content of `manifest.json`.
#[derive(Debug, Deserialize, Serialize)]
pub(super) struct Manifest {
    format: String,
    pub(super) version: String,
    pub(super) commit: Option<String>,
    pub(super) machine: String,
    /// The newest version of glibc that any of the programs requires.
    pub(super) glibc: Option<String>,
    pub(super) files: Vec<File>,
    /// Names of the tests that the bundle does not include, each with the reason.
    pub(super) left_out: Vec<(String, String)>,
}

/// A file of a bundle.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(super) struct File {
    pub(super) path: String,
    pub(super) bytes: u64,
    pub(super) sha256: String,
}

impl Manifest {
    pub(super) fn new(commit: Option<String>, left_out: &[(&str, &str)]) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            commit,
            machine: format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
            glibc: None,
            files: Vec::new(),
            left_out: left_out
                .iter()
                .map(|(name, why)| ((*name).to_owned(), (*why).to_owned()))
                .collect(),
        }
    }

    /// Compresses the program at `path` in `folder` to about a third of its size and adds `path.gz`
    /// to the manifest.
    pub(super) fn add_packed(&mut self, folder: &Path, path: &str) -> anyhow::Result<()> {
        let program = folder.join(path);
        if let Some(needed) = glibc(&read(&program)?) {
            let known = self.glibc.as_deref().and_then(numbers);
            if known < numbers(&needed) {
                self.glibc = Some(needed);
            }
        }
        // `-n` omits the file's name and time, so that identical programs compress to identical
        // files.
        let output = Command::new("gzip")
            .args(["-9", "-n", "-f"])
            .arg(&program)
            .output()
            .context("cannot start gzip")?;
        ensure!(
            output.status.success(),
            "gzip {} failed: {}",
            program.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        self.add(folder, &format!("{path}.gz"))
    }

    /// Adds the file at `path` in `folder` to the manifest.
    pub(super) fn add(&mut self, folder: &Path, path: &str) -> anyhow::Result<()> {
        let bytes = read(&folder.join(path))?;
        self.files.push(File {
            path: path.to_owned(),
            bytes: bytes.len() as u64,
            sha256: sha256(&bytes),
        });
        Ok(())
    }

    /// Writes the manifest and the hashes.
    pub(super) fn write(&self, folder: &Path) -> anyhow::Result<()> {
        let text = serde_json::to_string_pretty(self)? + "\n";
        write(&folder.join(MANIFEST), text.as_bytes())?;
        let sums: String = self
            .files
            .iter()
            .map(|file| format!("{}  {}\n", file.sha256, file.path))
            .collect();
        write(&folder.join(SUMS), sums.as_bytes())
    }

    /// Returns the total size of the files in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Fails if the files take more than `mib` MiB in total. The error names the largest files.
    pub(super) fn check_size(&self, mib: u64) -> anyhow::Result<()> {
        if self.bytes() <= mib << 20 {
            return Ok(());
        }
        let mut files = self.files.clone();
        files.sort_by_key(|file| core::cmp::Reverse(file.bytes));
        let largest: Vec<String> = files
            .iter()
            .take(5)
            .map(|file| format!("{} ({} KiB)", file.path, file.bytes >> 10))
            .collect();
        bail!(
            "the bundle has {} KiB, more than --max-mib {mib} allows; the largest files are {}; \
                --strip makes them smaller",
            self.bytes() >> 10,
            largest.join(", ")
        )
    }
}

/// Creates `folder`, or removes the files of an earlier bundle from it. Keeps files that the
/// earlier bundle's manifest does not name, such as results.
pub(super) fn prepare(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let mut entries =
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    if entries.next().is_none() {
        return Ok(());
    }
    let former = fs::read(folder.join(MANIFEST))
        .ok()
        .and_then(|text| serde_json::from_slice::<Manifest>(&text).ok())
        .filter(|manifest| manifest.format == FORMAT);
    let Some(former) = former else {
        bail!(
            "{} is neither empty nor an earlier bundle; name another folder, or empty it",
            folder.display()
        );
    };
    for file in former.files {
        let path = Path::new(&file.path);
        ensure!(
            path.components()
                .all(|part| matches!(part, Component::Normal(_))),
            "{} names {}, which is outside of it",
            folder.join(MANIFEST).display(),
            file.path
        );
        remove(&folder.join(path))?;
    }
    remove(&folder.join(SUMS))?;
    remove(&folder.join(MANIFEST))
}

fn remove(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

pub(super) fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
    }
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// Programs that remove symbols, in order of preference.
const STRIPPERS: [&str; 4] = ["llvm-strip", "llvm-strip-22", "strip", "objcopy"];

/// Tool that removes symbols from programs.
#[derive(Debug)]
pub(super) struct Stripper {
    /// The tool's name; `None` if no tool was found.
    pub(super) program: Option<&'static str>,
    option: &'static str,
}

impl Stripper {
    /// Finds a tool on this machine. The tool will remove debug information or, if `all` is set,
    /// all symbols. Without symbols, backtraces have no names.
    pub(super) fn find(all: bool) -> Self {
        let works = |program: &&'static str| {
            Command::new(program)
                .arg("--version")
                .output()
                .is_ok_and(|output| output.status.success())
        };
        Self {
            program: STRIPPERS.iter().find(|program| works(program)).copied(),
            option: if all { "--strip-all" } else { "--strip-debug" },
        }
    }

    /// Copies the program `from` to `to` and strips the copy, if a tool was found.
    pub(super) fn copy(&self, from: &Path, to: &Path) -> anyhow::Result<()> {
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder)
                .with_context(|| format!("cannot create {}", folder.display()))?;
        }
        fs::copy(from, to)
            .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
        let Some(program) = self.program else {
            return Ok(());
        };
        let output = Command::new(program)
            .arg(self.option)
            .arg(to)
            .output()
            .with_context(|| format!("cannot start {program}"))?;
        ensure!(
            output.status.success(),
            "{program} {} {} failed: {}",
            self.option,
            to.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(())
    }
}

/// Returns the newest `GLIBC_x.y` that an ELF file requires; `None` if it requires none.
fn glibc(bytes: &[u8]) -> Option<String> {
    if !bytes.starts_with(b"\x7fELF") {
        return None;
    }
    const PREFIX: &[u8] = b"GLIBC_";
    let mut newest: Option<(Vec<u32>, String)> = None;
    for at in 0..bytes.len().saturating_sub(PREFIX.len()) {
        // In an ELF string table, a zero byte precedes and follows every name.
        if !bytes[at..].starts_with(PREFIX) || (at > 0 && bytes[at - 1] != 0) {
            continue;
        }
        let rest = &bytes[at + PREFIX.len()..];
        let Some(end) = rest.iter().take(16).position(|byte| *byte == 0) else {
            continue;
        };
        let text = String::from_utf8_lossy(&rest[..end]).into_owned();
        if let Some(parts) = numbers(&text)
            && newest.as_ref().is_none_or(|(known, _)| *known < parts)
        {
            newest = Some((parts, text));
        }
    }
    newest.map(|(_, text)| text)
}

fn numbers(version: &str) -> Option<Vec<u32>> {
    version.split('.').map(|part| part.parse().ok()).collect()
}

/// Returns the paths of the images and the manifest of the crate `name`, if `fusewire-build build`
/// has written them to its default folder. `target` is cargo's target folder.
pub(super) fn images(target: &Path, name: &str) -> Vec<PathBuf> {
    let folder = target.join("fusewire-gpu/out").join(name);
    let mut files: Vec<PathBuf> = fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| {
            path.extension()
                .is_some_and(|end| ["ptx", "co", "json"].iter().any(|known| end == *known))
        })
        .collect();
    files.sort();
    files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_glibc_is_found_by_number() {
        let elf = b"\x7fELF..\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_2.4\0GLIBC_PRIVATE\0XGLIBC_2.99\0";
        assert_eq!(glibc(elf).as_deref(), Some("2.34"));
        assert_eq!(glibc(b"#!/bin/sh\n\0GLIBC_2.9\0"), None);
    }

    #[test]
    fn too_large_a_bundle_names_its_largest_files() {
        let mut manifest = Manifest::new(None, &[]);
        for (path, bytes) in [("tests/small", 10), ("tests/large", 3 << 20)] {
            manifest.files.push(File {
                path: path.to_owned(),
                bytes,
                sha256: String::new(),
            });
        }
        assert!(manifest.check_size(4).is_ok());
        let error = manifest.check_size(2).expect_err("too large").to_string();
        assert!(
            error.contains("files are tests/large (3072 KiB), tests/small"),
            "{error}"
        );
        assert!(error.contains("--max-mib 2"), "{error}");
    }

    #[test]
    fn only_earlier_bundles_are_emptied() {
        let folder = tempfile::tempdir().expect("a folder");
        let at = folder.path();
        write(&at.join("mine"), b"1").expect("written");
        let error = prepare(at).expect_err("not a bundle").to_string();
        assert!(
            error.contains("neither empty nor an earlier bundle"),
            "{error}"
        );
        write(&at.join("tests/old"), b"1").expect("written");
        let mut manifest = Manifest::new(None, &[]);
        manifest.add(at, "tests/old").expect("it is there");
        manifest.write(at).expect("written");
        prepare(at).expect("an earlier bundle");
        assert!(!at.join("tests/old").exists() && !at.join(MANIFEST).exists());
        assert!(at.join("mine").exists());
        manifest.files[0].path = "../outside".to_owned();
        manifest.write(at).expect("written");
        let error = prepare(at).expect_err("outside").to_string();
        assert!(error.contains("outside of it"), "{error}");
    }
}
