//! Tests that need no device.

use super::library::Library;
use super::{devices, open};
use crate::Error;

/// Returns the detail of a `NoDevice` error.
fn no_device(error: Error) -> String {
    match error {
        Error::NoDevice { device, detail } => {
            assert_eq!(device, "cuda");
            detail
        }
        other => panic!("not NoDevice: {other}"),
    }
}

#[test]
fn an_absent_library_is_an_error_that_says_what_to_do() {
    let error = Library::open_file("libfusewire-no-such-driver.so.1").unwrap_err();
    let detail = no_device(error);
    assert!(
        detail.starts_with("no CUDA driver (libcuda.so.1 not found); install"),
        "{detail}"
    );
}

#[test]
fn a_file_that_is_no_library_is_named() {
    let folder = std::env::temp_dir().join(format!("fusewire-cuda-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("libcuda.so.1");
    std::fs::write(&file, "no library").unwrap();
    let error = Library::open_file(file.to_str().unwrap()).unwrap_err();
    std::fs::remove_dir_all(&folder).unwrap();
    let detail = no_device(error);
    assert!(
        detail.contains("libcuda.so.1 cannot be opened: "),
        "{detail}"
    );
}

#[test]
fn another_library_lacks_a_symbol() {
    match Library::open_file("libc.so.6").unwrap_err() {
        Error::Driver { call, detail, .. } => {
            assert_eq!(call, Library::REQUIRED[0]);
            assert!(detail.contains("CUDA 12.0"), "{detail}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn opening_never_panics() {
    // `devices` fails on a machine without a driver, and returns at least one device on a machine
    // with a driver.
    match devices() {
        Ok(devices) => assert!(!devices.is_empty()),
        Err(error) => assert!(no_device(error).contains("driver")),
    }
    // No machine has a million devices.
    match open(1_000_000).unwrap_err() {
        Error::NoDevice { device, detail } if device == "cuda:1000000" => {
            assert!(detail.contains("CUDA_VISIBLE_DEVICES"), "{detail}");
        }
        error => assert!(no_device(error).contains("driver")),
    }
}

#[test]
fn documentation_lists_every_symbol() {
    let text = include_str!("mod.rs");
    for symbol in Library::REQUIRED.iter().chain(Library::NEWER) {
        assert!(text.contains(&format!("`{symbol}`")), "{symbol}");
    }
    let listed = text.matches("`cu").count();
    // Three matches are not entries of the lists: the second mentions of
    // cuStreamGetCaptureInfo_v2 and of cuStreamGetCaptureInfo_v3, and a mention of cudarc.
    let twice = 3;
    assert!(listed >= Library::REQUIRED.len() + Library::NEWER.len());
    assert!(listed <= Library::REQUIRED.len() + Library::NEWER.len() + twice);
}
