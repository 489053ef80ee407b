//! Tests a crate that `fusewire-build new` creates outside the workspace. The tests of the crate
//! pass with stable Rust and fail if its kernel is wrong. `check` finds no violation in the new
//! crate, and reports the source lines of seeded violations.
//!
//! Without a device tool chain, the test of `check` is skipped and prints the reason. With
//! `FUSEWIRE_REQUIRE=ptx` it fails instead.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use fusewire_build::Toolchain;

/// A new crate that shares this workspace's target folder and dependency versions.
struct NewCrate {
    _parent: tempfile::TempDir,
    folder: PathBuf,
}

impl NewCrate {
    /// Creates a crate. The crates of different tests have different names, because images in the
    /// target folder are named after the crate.
    fn make(name: &str) -> Self {
        let parent = tempfile::tempdir().expect("a folder");
        let folder = parent.path().join(name);
        let made = run(fusewire_build().arg("new").arg(&folder));
        assert!(made.status.success(), "{made:?}");
        let again = run(fusewire_build().arg("new").arg(&folder));
        assert!(!again.status.success(), "the crate was overwritten");
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        std::fs::copy(root.join("Cargo.lock"), folder.join("Cargo.lock")).expect("a lock file");
        std::fs::create_dir(folder.join(".cargo")).expect("a folder");
        let program = Path::new(env!("CARGO_BIN_EXE_fusewire-build"));
        let target = program.parent().and_then(Path::parent).expect("a folder");
        let config = format!("[build]\ntarget-dir = {target:?}\n");
        std::fs::write(folder.join(".cargo/config.toml"), config).expect("settings");
        Self {
            _parent: parent,
            folder,
        }
    }

    fn library(&self) -> String {
        std::fs::read_to_string(self.folder.join("src/lib.rs")).expect("a source")
    }

    /// Replaces a part of the crate's `lib.rs` and returns the line where the change begins.
    fn edit(&self, from: &str, to: &str) -> usize {
        let text = self.library();
        let at = text.find(from).unwrap_or_else(|| panic!("no {from:?}"));
        let changed = text.replacen(from, to, 1);
        std::fs::write(self.folder.join("src/lib.rs"), changed).expect("a source");
        text[..at].lines().count()
    }

    /// Runs `cargo` in the profile of this test, so that the crate and the workspace share compiled
    /// dependencies.
    fn cargo(&self, subcommand: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO"));
        command.args([subcommand, "--offline", "--quiet"]);
        if !cfg!(debug_assertions) {
            command
                .arg("--release")
                .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "4");
        }
        command.args(arguments).env_remove("RUSTFLAGS");
        run(command.current_dir(&self.folder))
    }

    fn build(&self, arguments: &[&str]) -> (bool, String) {
        let output = run(fusewire_build().args(arguments).current_dir(&self.folder));
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        (output.status.success(), text.into_owned())
    }
}

fn fusewire_build() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fusewire-build"));
    command.env_remove("FUSEWIRE_REQUIRE");
    command
}

fn run(command: &mut Command) -> Output {
    command.output().expect("a program that starts")
}

#[test]
#[ignore = "compiles the library a second time; run by `.ci/run template`"]
fn its_tests_pass_and_fail_for_a_wrong_kernel() {
    let new = NewCrate::make("template-wrong");
    let output = new.cargo("test", &[]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(text.contains("1 passed"), "{text}");
    let output = new.cargo("run", &["--example", "exchange_sum"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let sums = "[100.0, 102.0, 104.0, 106.0, 108.0, 110.0, 112.0, 114.0]";
    assert_eq!(text, format!("rank 0: {sums}\nrank 1: {sums}\n"));
    new.edit("sum +=", "sum -=");
    let output = new.cargo("test", &["--test", "exchange_sum"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success(), "a wrong kernel passes: {text}");
    assert!(text.contains("1 failed"), "{output:?}");
}

/// Prints the reason why tests that compile kernels are skipped, and returns false. Panics if
/// `FUSEWIRE_REQUIRE` lists `ptx`.
fn has_toolchain() -> bool {
    let Err(error) = Toolchain::find() else {
        return true;
    };
    let required = std::env::var("FUSEWIRE_REQUIRE").unwrap_or_default();
    assert!(!required.split(',').any(|part| part == "ptx"), "{error}");
    println!("skipped: ptx: {error}");
    false
}

#[test]
#[ignore = "compiles the library a second time; run by `.ci/run template`"]
fn its_compiled_kernel_runs_on_emulated_gpus() {
    if !has_toolchain() {
        return;
    }
    let new = NewCrate::make("template-emulated");
    let run = || {
        let output = new.cargo("test", &["--test", "emulated", "--", "--nocapture"]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.success(), text + &errors)
    };
    let (passed, text) = run();
    assert!(passed && text.contains("1 passed"), "{text}");
    assert!(!text.contains("skipped"), "{text}");
    // Without the barrier, a rank overwrites its rows while peers read them. The test compiles the
    // changed kernel, and the error names the lines of the write and of the read.
    let end = new.edit("    s.barrier()\n", "    Ok(())\n");
    let (write, read) = (end - 9, end - 3);
    let (passed, text) = run();
    assert!(!passed, "{text}");
    let race = format!("(src/lib.rs:{write}): writes");
    let race = text.lines().find(|line| line.contains(&race));
    let race = race.unwrap_or_else(|| panic!("no race with line {write}: {text}"));
    assert!(race.contains("races with another thread"), "{text}");
    assert!(text.contains(&format!("(src/lib.rs:{read})")), "{text}");
    // A barrier is missing between the writes and the reads of shared memory.
    new.edit("    Ok(())\n", "    s.barrier()\n");
    new.edit(
        "    output: Out<f32>,\n",
        "    output: Out<f32>,\n    zeros: Shared<f32, 64>,\n",
    );
    new.edit(
        "Machine, Out, Session,",
        "Group, Machine, Out, Session, Shared,",
    );
    let line = new.edit(
        "    for index in block.elements_of_block(part.len()) {\n        let mut sum = 0.0;\n",
        "    let lane = block.rank() as usize;\n    zeros.set(lane, 1.0);\n    block.sync();\n    \
         zeros.set(lane, 0.0);\n    for index in block.elements_of_block(part.len()) {\n        \
         let mut sum = zeros.get((lane + 1) % 64);\n",
    );
    let (passed, text) = run();
    assert!(!passed, "{text}");
    let lines = [line + 4, line + 6].map(|line| format!("(src/lib.rs:{line})"));
    let is_race = |text: &str| {
        text.contains("the shared address")
            && text.contains("races with another thread")
            && lines.iter().any(|line| text.contains(line))
    };
    assert!(text.lines().any(is_race), "{text}");
    // With it, the test passes.
    new.edit(
        "    zeros.set(lane, 0.0);\n",
        "    zeros.set(lane, 0.0);\n    block.sync();\n",
    );
    let (passed, text) = run();
    assert!(passed, "{text}");
}

#[test]
#[ignore = "compiles the library a second time; run by `.ci/run template`"]
fn check_finds_nothing_and_names_the_lines_of_errors() {
    if !has_toolchain() {
        return;
    }
    let new = NewCrate::make("template-checked");
    let check = ["check", "--target", "sm_90"];
    let (passed, text) = new.build(&check);
    assert!(passed && text.contains("\n0 violations"), "{text}");
    assert!(text.contains("are the library's own"), "{text}");

    let line = new.edit(
        "    s.barrier()\n",
        "    if count == 77 && block.rank() > 3 {\n\
         \x20       return Ok(());\n\
         \x20   }\n\
         \x20   let word = output.as_ptr().wrapping_add(64).cast::<u64>();\n\
         \x20   // SAFETY: nothing runs this kernel.\n\
         \x20   unsafe { mem::store_u64(word, 1, mem::Order::Release, mem::Scope::Device) };\n\
         \x20   s.barrier()\n",
    );
    new.edit("Window, kernel}", "Window, kernel, mem}");
    new.edit(
        "use fusewire_device::{",
        "use fusewire_device::group::Group;\nuse fusewire_device::{",
    );
    let line = line + 1;
    let (branch, store, barrier) = (line + 1, line + 6, line + 7);
    let (passed, text) = new.build(&check);
    assert!(!passed, "{text}");
    let found = |what: &str| {
        assert!(text.contains(what), "no {what:?} in {text}");
    };
    found(&format!(
        "FAIL sm_90   barrier: exchange_sum: src/lib.rs:{barrier}: "
    ));
    found(&format!(", a branch at src/lib.rs:{branch}"));
    found("help: a lane may have returned before this barrier");
    found(&format!(
        "FAIL sm_90   scope: exchange_sum: src/lib.rs:{store}: st.release.gpu"
    ));
    // The library's own device-scope accesses are not reported, and they do not hide the author's
    // access.
    let scope = text
        .lines()
        .find(|line| line.contains("scope: exchange_sum"));
    assert!(scope.is_some_and(|line| !line.contains("more)")), "{text}");
    assert_eq!(text.matches("FAIL").count(), 2, "{text}");

    // `build` reports the same as warnings.
    let (passed, text) = new.build(&["build", "--target", "sm_90"]);
    assert!(passed, "{text}");
    assert!(
        text.contains("warning: sm_90   barrier: exchange_sum: src/lib.rs:"),
        "{text}"
    );
}
