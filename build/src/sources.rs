//! Content hashes of the inputs of images.

use core::fmt::Write as _;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use crate::project::Project;
use crate::tokens::{self, RustTokens};
use crate::{Error, Result, files};

/// The files of this crate that affect images, except `STEPS`.
const PIPELINE: [&str; 5] = [
    include_str!("recipe.rs"),
    include_str!("edit.rs"),
    include_str!("target.rs"),
    include_str!("unroll.rs"),
    include_str!("waits.rs"),
];

/// The file with the steps of a compilation. It affects the key of images in a build folder, but
/// not [`hash`], so that renaming a function in the file does not require new committed images. If
/// a change of the steps affects the images, `check --images` detects it by comparing bytes.
const STEPS: [&str; 1] = [include_str!("compile.rs")];

/// A hash over several texts.
#[derive(Default)]
pub(crate) struct Hash(Sha256);

impl Hash {
    /// Adds the length of a text and then the text, so that the boundaries between texts affect the
    /// hash.
    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.0.update((bytes.len() as u64).to_le_bytes());
        self.0.update(bytes);
    }

    /// Returns the hash in hexadecimal digits.
    pub(crate) fn text(self) -> String {
        hexadecimal(&self.0.finalize())
    }
}

/// Returns the SHA-256 of `bytes` in hexadecimal digits.
pub fn sha256(bytes: &[u8]) -> String {
    hexadecimal(&Sha256::digest(bytes))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// Returns the hash of all inputs of the images of `project` except the tools: the tokens of the
/// Rust and LLVM IR files of the crate and of its path dependencies, the versions of its other
/// dependencies, the settings that affect an image, and the flags of the tools.
///
/// Comments, documentation, formatting, tests and CPU-only code do not affect the hash. The hash is
/// the same in every checkout and needs no device tool chain. The manifest of the images contains
/// this hash and the versions of the tools.
///
/// # Errors
/// [`Error::File`] if a file cannot be read.
pub fn hash(project: &Project) -> Result<String> {
    let mut absent = BTreeSet::new();
    let mut texts = Vec::new();
    for (name, path) in inputs(project)? {
        let text = files::read(&path)?;
        let is_rust = path.extension().is_some_and(|extension| extension == "rs");
        if is_rust {
            let RustTokens { text, absent: own } = tokens::rust(&text);
            absent.extend(own.iter().map(|module| module_path(&name, module)));
            texts.push((name, text));
        } else {
            texts.push((name, tokens::llvm(&text)));
        }
    }
    let is_absent = |name: &str| {
        let path = Path::new(name).with_extension("");
        path.ancestors().any(|part| absent.contains(part))
    };
    let mut hash = Hash::default();
    for text in PIPELINE {
        hash.add(tokens::rust(text).text.as_bytes());
    }
    for fact in facts(project) {
        hash.add(fact.as_bytes());
    }
    for (name, text) in texts {
        if !is_absent(&name) {
            hash.add(name.as_bytes());
            hash.add(text.as_bytes());
        }
    }
    Ok(hash.text())
}

/// Returns the hash of the same inputs as [`hash`] and of [`STEPS`], including comments, because
/// line tables depend on comments.
pub(crate) fn content(project: &Project) -> Result<String> {
    let mut hash = Hash::default();
    for text in PIPELINE.iter().chain(&STEPS) {
        hash.add(text.as_bytes());
    }
    for fact in facts(project) {
        hash.add(fact.as_bytes());
    }
    for (name, path) in inputs(project)? {
        hash.add(name.as_bytes());
        hash.add(&files::read_bytes(&path)?);
    }
    Ok(hash.text())
}

/// Returns the inputs of images other than files: the maximum numbers of lanes per block, and the
/// descriptions of the packages.
fn facts(project: &Project) -> Vec<String> {
    let settings = &project.settings;
    let bounds = settings.threads.iter();
    let bounds = bounds.map(|bound| format!("{} {}", bound.kernel, bound.most));
    let mut all = vec![format!("max-threads {}", project.max_threads())];
    all.extend(bounds);
    all.extend(project.packages.iter().cloned());
    all.extend(project.dependencies.iter().cloned());
    all
}

/// Returns the input files of images, sorted by name. The names are the same in every checkout.
fn inputs(project: &Project) -> Result<Vec<(String, PathBuf)>> {
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
    Ok(named)
}

/// Returns the path, without the extension, of a module that `file` declares.
fn module_path(file: &str, module: &str) -> PathBuf {
    let file = Path::new(file);
    let stem = file.file_stem().unwrap_or_default();
    let folder = file.parent().unwrap_or(Path::new(""));
    if ["lib", "main", "mod"].iter().any(|&root| stem == root) {
        folder.join(module)
    } else {
        folder.join(stem).join(module)
    }
}

/// Returns a name for the path that is the same in every checkout.
fn name(project: &Project, path: &Path) -> String {
    let inner = path.strip_prefix(&project.workspace).ok().or_else(|| {
        // The name of a file outside the workspace starts with the name of its package's folder.
        let folder = project
            .sources
            .iter()
            .find(|folder| path.starts_with(folder))?;
        path.strip_prefix(folder.parent()?).ok()
    });
    inner.unwrap_or(path).to_string_lossy().into_owned()
}

/// Collects the Rust and LLVM IR files of the package at `root`. Skips its tests, benches, examples
/// and build output, and other packages in its folder.
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
            let apart = ["tests", "benches", "examples"];
            let apart = folder == root && apart.iter().any(|&other| name == other);
            let package = path.join("Cargo.toml").exists();
            if name != "target" && name != ".git" && !apart && !package {
                collect(root, &path, out)?;
            }
        } else if path.extension().is_some_and(|e| e == "rs" || e == "ll") {
            out.push(path);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a project of one crate in `folder`, as cargo would describe it.
    fn project(folder: &Path) -> Project {
        Project {
            crate_name: String::new(),
            name: "probe".to_owned(),
            folder: folder.join("probe"),
            workspace: folder.to_owned(),
            target: folder.join("target"),
            sources: vec![folder.join("probe")],
            packages: vec!["probe 0.1.0 edition 2024".to_owned()],
            library: Vec::new(),
            dependencies: vec!["bytemuck 1.0.0".to_owned()],
            device: None,
            shims: [("nvptx".to_owned(), vec![folder.join("shim.ll")])].into(),
            settings: crate::project::Settings::default(),
        }
    }

    const LIBRARY: &str = "pub fn f() {}\n#[cfg(test)]\nmod tests;\n";

    fn write(folder: &Path) {
        for (path, text) in [
            ("probe/Cargo.toml", "[package]"),
            ("probe/src/lib.rs", LIBRARY),
            ("probe/src/tests.rs", "#[test] fn t() {}"),
            ("probe/src/tests/more.rs", "#[test] fn t() {}"),
            ("probe/tests/t.rs", "#[test] fn t() {}"),
            ("probe/macros/Cargo.toml", "[package]"),
            ("probe/macros/src/lib.rs", "pub fn f() {}"),
            ("shim.ll", "; nothing\n@x = global i32 0\n"),
        ] {
            let path = folder.join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
    }

    #[test]
    fn folders_tests_comments_and_layout_do_not_count() {
        let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        write(a.path());
        write(b.path());
        let first = hash(&project(a.path())).unwrap();
        assert_eq!(first, hash(&project(b.path())).unwrap());
        let raw = content(&project(b.path())).unwrap();
        for (path, text) in [
            ("probe/Cargo.toml", "# a comment\n[package]".to_owned()),
            ("probe/tests/t.rs", "changed".to_owned()),
            ("probe/src/tests.rs", "fn other() {}".to_owned()),
            ("probe/src/tests/more.rs", "fn other() {}".to_owned()),
            ("probe/macros/src/lib.rs", "fn other() {}".to_owned()),
            (
                "probe/src/lib.rs",
                LIBRARY.replace("()", "( )\n// a comment\n"),
            ),
            ("shim.ll", "@x = global i32 0 ; a comment".to_owned()),
        ] {
            std::fs::write(b.path().join(path), text).unwrap();
            assert_eq!(first, hash(&project(b.path())).unwrap(), "{path}");
        }
        assert_ne!(raw, content(&project(b.path())).unwrap());
    }

    #[test]
    fn tokens_files_versions_and_settings_count() {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path());
        let first = hash(&project(folder.path())).unwrap();
        for (path, text) in [
            ("probe/src/lib.rs", "pub fn g() {}"),
            ("probe/src/new.rs", ""),
            ("shim.ll", "@x = global i32 1"),
        ] {
            std::fs::write(folder.path().join(path), text).unwrap();
            let changed = hash(&project(folder.path())).unwrap();
            assert_ne!(first, changed, "{path}");
            let _ = std::fs::remove_file(folder.path().join("probe/src/new.rs"));
            write(folder.path());
            assert_eq!(first, hash(&project(folder.path())).unwrap());
        }
        let changes: [fn(&mut Project); 3] = [
            |project| project.dependencies = vec!["bytemuck 1.0.1".to_owned()],
            |project| project.packages = vec!["probe 0.1.0 edition 2021".to_owned()],
            |project| project.settings.max_threads = Some(256),
        ];
        for change in changes {
            let mut other = project(folder.path());
            change(&mut other);
            assert_ne!(first, hash(&other).unwrap());
        }
    }
}
