//! Builds the programs of a bundle with cargo and locates them.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, bail, ensure};
use serde::Deserialize;

/// A message that cargo prints with `--message-format=json`. Contains only the fields that this
/// module uses.
#[derive(Deserialize)]
struct Message {
    reason: String,
    manifest_path: Option<PathBuf>,
    target: Option<Target>,
    profile: Option<Profile>,
    executable: Option<PathBuf>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Profile {
    test: bool,
}

/// Paths of built programs by (kind, name), where the kind is `test` or `bin`.
pub(super) type Programs = BTreeMap<(String, String), PathBuf>;

fn cargo(workspace: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace);
    command
}

/// Returns the root of the workspace that contains the current folder.
pub(super) fn workspace() -> anyhow::Result<PathBuf> {
    let here = std::env::current_dir().context("cannot read the current folder")?;
    let output = cargo(&here)
        .args(["locate-project", "--workspace", "--message-format", "plain"])
        .output()
        .context("cannot start cargo; `bundle` builds with it")?;
    let manifest = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    let root = manifest.parent().map(Path::to_owned).unwrap_or_default();
    ensure!(
        output.status.success() && root.join("tests/tests").is_dir(),
        "{} is not in Fusewire's workspace; run `bundle` in a checkout of it",
        here.display()
    );
    Ok(root)
}

/// Builds the test binaries `tests` of the package in `tests/` and the programs `bins` in release
/// mode. Selects the same features as a build of the default members, so that cargo reuses the
/// artifacts of that build.
pub(super) fn build(workspace: &Path, tests: &[&str], bins: &[&str]) -> anyhow::Result<Programs> {
    let mut programs = Programs::new();
    let mut command = cargo(workspace);
    command.args(["test", "--no-run"]);
    for test in tests {
        command.args(["--test", test]);
    }
    collect(&mut command, &mut programs)?;
    let mut command = cargo(workspace);
    command.arg("build");
    for bin in bins {
        command.args(["--bin", bin]);
    }
    collect(&mut command, &mut programs)?;
    Ok(programs)
}

fn collect(command: &mut Command, programs: &mut Programs) -> anyhow::Result<()> {
    // Cargo runs in the root of the workspace, so it builds the default members.
    command.arg("--release");
    command.arg("--message-format=json-render-diagnostics");
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start cargo")?;
    let stdout = child.stdout.take().context("cargo's output is not piped")?;
    for line in BufReader::new(stdout).lines() {
        let line = line.context("cannot read cargo's output")?;
        let Ok(message) = serde_json::from_str::<Message>(&line) else {
            // The line is the output of a program that cargo ran, such as a build script.
            continue;
        };
        if let Some((key, path)) = program(message) {
            programs.insert(key, path);
        }
    }
    let status = child.wait().context("cannot wait for cargo")?;
    if !status.success() {
        bail!("cargo failed with {status}; its messages are above");
    }
    Ok(())
}

fn program(message: Message) -> Option<((String, String), PathBuf)> {
    if message.reason != "compiler-artifact" {
        return None;
    }
    let (target, executable) = (message.target?, message.executable?);
    let folder = message.manifest_path?.parent()?.file_name()?.to_owned();
    let test = message.profile?.test;
    let kind = match target.kind.first()?.as_str() {
        "test" if test && folder == "tests" => "test",
        "bin" if !test => "bin",
        _ => return None,
    };
    Some(((kind.to_owned(), target.name), executable))
}

/// Returns the commit of the checkout, followed by `+` if tracked files have changed; `None` if git
/// fails.
pub(super) fn commit(workspace: &Path) -> Option<String> {
    let git = |arguments: &[&str]| -> Option<String> {
        let output = Command::new("git")
            .args(arguments)
            .current_dir(workspace)
            .stderr(Stdio::null())
            .output()
            .ok()?;
        output
            .status
            .success()
            .then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let head = git(&["rev-parse", "HEAD"])?;
    let changed = !git(&["status", "--porcelain", "--untracked-files=no"])?.is_empty();
    Some(if changed { head + "+" } else { head })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Option<(String, String)> {
        program(serde_json::from_str(line).expect("a message")).map(|(key, _)| key)
    }

    #[test]
    fn only_tests_of_the_tests_and_programs_are_taken() {
        let line = |folder: &str, kind: &str, test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"/w/{folder}/Cargo.toml",
                "target":{{"name":"n","kind":["{kind}"]}},
                "profile":{{"test":{test}}},"executable":"/w/target/n"}}"#
            )
        };
        let key = |kind: &str| Some((kind.to_owned(), "n".to_owned()));
        assert_eq!(of(&line("tests", "test", true)), key("test"));
        assert_eq!(of(&line("models", "test", true)), None);
        assert_eq!(of(&line("cli", "bin", false)), key("bin"));
        // The unit-test binary of the program `cli` is neither a test of the bundle nor a program.
        assert_eq!(of(&line("cli", "bin", true)), None);
        assert_eq!(of(r#"{"reason":"build-finished","success":true}"#), None);
    }
}
