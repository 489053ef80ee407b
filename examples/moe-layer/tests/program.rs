//! Runs the program with a small layer.

use std::process::Command;

/// Runs the program. Returns its exit status, its output and its error messages.
fn run(arguments: &str) -> (Option<i32>, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_moe-layer"))
        .args("--tokens 37 --hidden 40 --experts 6 --intermediate 24 --iterations 5".split(' '))
        .args(arguments.split(' '))
        .output()
        .expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (
        output.status.code(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// The shape has ranks with different numbers of tokens and of experts, and batches of different
/// sizes. With 4 ranks, the last one has no expert.
#[test]
fn ranks_have_the_bits_of_the_reference() {
    for arguments in ["--ranks 1", "--ranks 2", "--ranks 3", "--ranks 4 --top-k 6"] {
        let (status, output, errors) = run(arguments);
        assert_eq!(status, Some(0), "{arguments}: {output}{errors}");
        assert!(
            output.contains("equal the reference bit by bit"),
            "{arguments}: {output}"
        );
    }
}

#[test]
fn ranks_without_tokens_take_part() {
    let (status, output, errors) = run("--ranks 3 --top-k 1 --tokens 2");
    assert_eq!(status, Some(0), "{output}{errors}");
}

/// Negative control: a changed weight on one rank must be found in every mode.
#[test]
fn a_changed_weight_is_found() {
    for (ranks, rank) in [(1, 0), (2, 1), (4, 2)] {
        let (status, output, errors) = run(&format!("--ranks {ranks} --inject {rank}"));
        assert_eq!(status, Some(1), "{ranks} ranks: {output}{errors}");
        for mode in ["eager", "graph", "two micro-batches", "two, in a graph"] {
            let found = format!("moe-layer: {ranks} ranks, {mode}: iteration 0: token ");
            assert!(errors.contains(&found), "{errors} lacks {found}");
        }
        // `down[0]` is a weight of element 0.
        assert!(errors.contains(", element 0 is "), "{errors}");
        assert!(!output.contains("equal the reference"), "{output}");
        assert!(
            !errors.contains("moe-layer: 1 ranks") || ranks == 1,
            "{errors}"
        );
    }
}

#[test]
fn invalid_arguments_are_refused() {
    for arguments in [
        "--hidden 12",
        "--top-k 7",
        "--inject 2",
        "--ranks 4 --inject 3",
        "--ranks 0",
    ] {
        let (status, output, errors) = run(arguments);
        assert_eq!(status, Some(2), "{arguments}: {output}{errors}");
        assert_eq!(errors.lines().count(), 1, "{arguments}: {errors}");
    }
}
