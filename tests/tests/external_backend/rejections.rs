//! Checks that a library that is not a backend, or that has another version, causes an error that
//! contains the library's path, the actual value and the expected value.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use fusewire::store::MemoryStore;
use fusewire::{Device, Error, backend, new_comm};

use crate::options;

/// Builds `broken.c` with `defines` as a library.
fn build(name: &str, defines: &[&str]) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let file = format!("broken-{name}-{}.so", std::process::id());
    let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join(file);
    let built = Command::new("cc")
        .args([
            "-shared",
            "-fPIC",
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unused-function",
        ])
        .args(defines)
        .arg("-I")
        .arg(root.join("../host/backend-abi/include"))
        .arg(root.join("tests/external_backend/broken.c"))
        .arg("-o")
        .arg(&library)
        .output()
        .expect("cc, which links Rust programs too");
    let said = String::from_utf8_lossy(&built.stderr);
    assert!(built.status.success(), "{said}");
    library
}

/// Returns the error of creating a communicator with the library.
fn error_of(name: &str, path: &Path) -> Error {
    // SAFETY: the libraries of these tests either follow the rules of the table or do not export
    // it.
    unsafe { backend::register_external_backend(name, path) }.expect("a new name");
    let mut options = options();
    options.store = Some(Arc::new(MemoryStore::new()));
    options.rank_size = Some((0, 1));
    options.hints.insert("fabric".to_owned(), "blue".to_owned());
    new_comm(name, Device::Cpu, "refused", options).expect_err("refused")
}

/// Builds a library and checks that it is refused. The error message must contain the library's
/// path and every string in `expected`.
fn refused(name: &str, defines: &[&str], expected: &[&str]) {
    let path = build(name, defines);
    let error = error_of(name, &path);
    let said = error.to_string();
    assert!(matches!(error, Error::Backend { .. }), "{said}");
    assert!(
        said.starts_with(&format!("backend {name}: load: ")),
        "{said}"
    );
    assert!(said.contains(&path.display().to_string()), "{said}");
    for expected in expected {
        assert!(said.contains(expected), "no \"{expected}\" in: {said}");
    }
    let _ = std::fs::remove_file(path);
}

#[test]
fn another_magic() {
    refused(
        "magic",
        &["-DTHE_MAGIC=0x1234"],
        &["0x0000000000001234", "0x4552495745535546"],
    );
}

#[test]
fn another_major_version() {
    refused(
        "major",
        &["-DTHE_MAJOR=2"],
        &["version 2.7", "expected 1.x"],
    );
}

#[test]
fn a_table_that_is_too_small() {
    refused(
        "small",
        &["-DTHE_BYTES=224"],
        &["has 224 bytes", "at least 232"],
    );
}

#[test]
fn a_missing_symbol() {
    refused(
        "symbol",
        &["-DNO_SYMBOL"],
        &["no symbol fusewire_backend_v1"],
    );
}

#[test]
fn no_table() {
    refused(
        "null",
        &["-DNO_TABLE"],
        &["returned null instead of a table"],
    );
}

#[test]
fn a_missing_function() {
    refused("function", &["-DTHE_ABORT=0"], &["the table lacks abort"]);
}

#[test]
fn a_missing_file() {
    let error = error_of("absent", Path::new("/nowhere/libabsent.so")).to_string();
    assert!(
        error.contains("/nowhere/libabsent.so: cannot be opened"),
        "{error}"
    );
}

/// Checks that the table of a newer minor version is accepted, and that the error contains the
/// library's message with its arguments.
#[test]
fn a_message_of_the_library() {
    let path = build("message", &["-DTHE_BYTES=(sizeof(FusewireBackendTable)+8)"]);
    let error = error_of("message", &path);
    let expected = "backend message: create: not supported (code 5): no fabric blue for rank 0 of \
                    1 in refused, 0 42 42";
    assert_eq!(error.to_string(), expected);
    let _ = std::fs::remove_file(path);
}

#[test]
fn names() {
    // SAFETY: there is no library at this path.
    let register =
        |name: &str| unsafe { backend::register_external_backend(name, "/nowhere/lib.so") };
    for name in ["", "fusewire"] {
        let error = register(name).expect_err("no name for a backend");
        assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    }
    register("twice").expect("a new name");
    let error = register("twice").expect_err("it is taken");
    assert!(error.to_string().contains("already"), "{error}");
    let error = new_comm("no-body", Device::Cpu, "names", options()).expect_err("no such backend");
    assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
    assert!(
        error.to_string().contains("FUSEWIRE_BACKEND_PATH_NO_BODY"),
        "{error}"
    );
}
