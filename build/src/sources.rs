//! Content hashes: what images were made of.

use core::fmt::Write as _;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::project::Project;
use crate::{Error, Result, files};

/// What compiles: a change here can change every image.
const PIPELINE: [&str; 3] = [
    include_str!("compile.rs"),
    include_str!("edit.rs"),
    include_str!("target.rs"),
];

/// A hash over several texts.
#[derive(Default)]
pub(crate) struct Hash(Sha256);

impl Hash {
    /// Adds a text so that its borders count.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    /// The hash in hexadecimal digits.
    pub(crate) fn text(self) -> String {
        hexadecimal(&self.0.finalize())
    }
}

/// SHA-256 of `bytes` in hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Hash of everything that images of `project` are made of, but the tools: Rust and IR files and manifests of the crate and
/// of its path dependencies, versions of its other dependencies, the steps and flags of this crate. The same in every
/// checkout; needs no device tool chain.
///
/// # Errors
/// Where a file cannot be read.
pub fn hash(project: &Project) -> Result<String> {
    let mut all = Vec::new();
    for folder in &project.sources {
        collect(folder, folder, &mut all)?;
    }
    all.extend(project.shims.values().flatten().cloned());
    let mut named: Vec<(String, PathBuf)> = all
        .into_iter()
        .map(|path| (name(project, &path), path))
        .collect();
    named.sort();
    named.dedup();
    let mut hash = Hash::default();
    for text in PIPELINE {
        hash.add(text.as_bytes());
    }
    for dependency in &project.dependencies {
        hash.add(dependency.as_bytes());
    }
    for (name, path) in named {
        hash.add(name.as_bytes());
        hash.add(&files::read_bytes(&path)?);
    }
    Ok(hash.text())
}

/// The path as every checkout has it.
fn name(project: &Project, path: &Path) -> String {
    let inner = path.strip_prefix(&project.workspace).ok().or_else(|| {
        // Outside of the workspace: from the folder that holds the package.
        let folder = project
            .sources
            .iter()
            .find(|folder| path.starts_with(folder))?;
        path.strip_prefix(folder.parent()?).ok()
    });
    inner.unwrap_or(path).to_string_lossy().into_owned()
}

/// Rust and IR files and manifests of the package at `root`, without its tests and what cargo writes.
fn collect(root: &Path, folder: &Path, out: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(folder).map_err(|source| Error::File {
        action: "list",
        path: folder.to_owned(),
        source,
    })?;
    for entry in entries.flatten() {
        let path = entry.path();
        let name = entry.file_name();
        if path.is_dir() {
            let aside = ["tests", "benches", "examples"];
            let aside = folder == root && aside.iter().any(|&other| name == other);
            if name != "target" && name != ".git" && !aside {
                collect(root, &path, out)?;
            }
        } else if path
            .extension()
            .is_some_and(|e| e == "rs" || e == "ll" || e == "toml")
        {
            out.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A project of one crate in `folder`, with what cargo would say about it.
    fn project(folder: &Path) -> Project {
        Project {
            name: "probe".to_owned(),
            folder: folder.join("probe"),
            workspace: folder.to_owned(),
            target: folder.join("target"),
            sources: vec![folder.join("probe")],
            dependencies: vec!["bytemuck 1.0.0".to_owned()],
            device: None,
            shims: [("nvptx".to_owned(), vec![folder.join("shim.ll")])].into(),
            settings: crate::project::Settings::default(),
        }
    }

    fn write(folder: &Path) {
        for (path, text) in [
            ("probe/Cargo.toml", "[package]"),
            ("probe/src/lib.rs", "pub fn f() {}"),
            ("probe/tests/t.rs", "#[test] fn t() {}"),
            ("shim.ll", "; nothing"),
        ] {
            let path = folder.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn the_folder_and_the_tests_do_not_count_and_everything_else_does() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write(a.path());
        write(b.path());
        let first = hash(&project(a.path())).unwrap();
        assert_eq!(first, hash(&project(b.path())).unwrap());
        std::fs::write(b.path().join("probe/tests/t.rs"), "changed").unwrap();
        assert_eq!(first, hash(&project(b.path())).unwrap());
        for path in [
            "probe/Cargo.toml",
            "probe/src/lib.rs",
            "shim.ll",
            "probe/src/new.rs",
        ] {
            write(b.path());
            std::fs::write(b.path().join(path), "changed").unwrap();
            assert_ne!(first, hash(&project(b.path())).unwrap(), "{path}");
        }
        let mut other = project(a.path());
        other.dependencies = vec!["bytemuck 1.0.1".to_owned()];
        assert_ne!(first, hash(&other).unwrap());
    }
}
