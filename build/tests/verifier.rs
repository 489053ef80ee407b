//! Tests the verifier end to end: it must report every negative control, and no violation in
//! correct kernels.
//!
//! Without a device tool chain, the GPU tests are skipped and print the reason. With
//! `FUSEWIRE_REQUIRE=ptx,amdgcn` they fail instead.

use fusewire_build::controls::{self, Outcome};
use fusewire_build::{Project, Target, Toolchain, toolchain};

fn required(word: &str) -> bool {
    std::env::var("FUSEWIRE_REQUIRE").is_ok_and(|all| all.split(',').any(|part| part == word))
}

fn skip(word: &str, reason: &str) {
    assert!(!required(word), "{word} is required, but: {reason}");
    println!("skipped: {word}: {reason}");
}

fn assert_held(outcomes: &[Outcome]) {
    let missed: Vec<String> = outcomes
        .iter()
        .filter(|outcome| !outcome.held)
        .map(|outcome| {
            format!(
                "{} on {}: {}",
                outcome.control, outcome.target, outcome.seen
            )
        })
        .collect();
    assert!(missed.is_empty(), "{missed:#?}");
    assert!(!outcomes.is_empty());
}

fn this_package() -> Project {
    Project::at(std::path::Path::new(env!("CARGO_MANIFEST_DIR")))
        .expect("this crate's own manifest")
}

fn device(target: Target) {
    let word = target.vendor().requirement();
    let found = match Toolchain::find() {
        Ok(found) => found,
        Err(error) => return skip(word, &error.to_string()),
    };
    let ptxas = match toolchain::find_ptxas() {
        Ok(path) => Some(path),
        Err(missing) => {
            if word == "ptx" {
                skip(word, &missing.to_string());
            }
            None
        }
    };
    let outcomes = controls::device(&found, &this_package(), target, ptxas.as_deref())
        .expect("the controls compile");
    assert_held(&outcomes);
}

#[test]
fn nvidia_controls_are_caught() {
    // sm_90 is the oldest target with multicast.
    device(Target::Sm90);
}

#[test]
fn amd_controls_are_caught() {
    device(Target::Gfx942);
}

#[test]
fn native_controls_are_caught() {
    if !cfg!(target_arch = "x86_64") {
        return skip("native", "only x86-64 has variants");
    }
    match toolchain::find_objdump() {
        Ok(objdump) => {
            let outcomes =
                controls::native(&this_package(), &objdump).expect("the controls compile");
            assert_held(&outcomes);
        }
        Err(missing) => skip("native", &missing.to_string()),
    }
}
