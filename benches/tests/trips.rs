//! The table of `fusewire-benches trips` does not depend on the order in which warps execute.

use std::process::Command;

fn table(scheduler: &str) -> String {
    let arguments = ["trips", "--ranks", "4", "--bytes", "4096"];
    let output = Command::new(env!("CARGO_BIN_EXE_fusewire-benches"))
        .args(arguments)
        .args(["--operations", "all_reduce,all_to_all,send,barrier,signal"])
        .args(["--scheduler", scheduler])
        .output()
        .expect("the program");
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(output.status.success(), "{scheduler}: {text}");
    text
}

#[test]
fn schedules_do_not_change_trips() {
    let expected = table("round-robin");
    assert!(expected.contains("| all_reduce nvls | all_reduce_nvls_bf16 | 4 | 4096 |"));
    assert!(
        expected.contains("| barrier | barrier | 4 | 0 | 2 | 0 | 0 |"),
        "{expected}"
    );
    for seed in 1..3 {
        assert_eq!(table(&format!("random:{seed}")), expected, "seed {seed}");
    }
}
