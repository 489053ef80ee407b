//! A fake bundle, in which shell scripts replace the programs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Fake of the program `fusewire`. It lists devices. Instead of measuring, it writes one row:
/// 8 bytes in 20 us with NCCL, in 12.5 us with NVLS, otherwise in 10 us.
const FUSEWIRE: &str = r#"
case $1 in
    info)
        echo devices
        echo '  found    cpu                      a model, 2 cores'
        no_driver='no driver: libcuda.so.1 was not found'
        echo "  ${FAKE_CUDA:-missing}  cuda                     ${FAKE_DETAIL:-$no_driver}"
        gpu=1
        while [ $gpu -lt "${FAKE_GPUS:-1}" ]; do
            echo "  found    cuda                     cuda:$gpu: a GPU"
            gpu=$((gpu + 1))
        done
        [ -z "${FAKE_HIP-}" ] || echo '  found    hip                      hip:0: a GPU'
        echo "  ${FAKE_NCCL:-missing}  libnccl.so               a path"
        ;;
    --version) echo 'fusewire 9.9.9' ;;
    perf)
        echo "$@ on $FUSEWIRE_TEST_DEVICE"
        case " $* " in
            *' nccl '*) us=20.0 ;;
            *' nvls '*) us=12.5 ;;
            *) us=10.0 ;;
        esac
        while [ "$1" != --json ]; do shift; done
        printf '  {\n "operation": "all_reduce",\n "bytes": 8,\n "algorithm": "packet",\n' >"$2"
        printf ' "timing": "gpu_events",\n "median_us": %s,\n "wrong": 0\n  }\n' $us >>"$2"
        ;;
esac
"#;

/// Fake of a test binary. It reports the named tests as passed, or forty tests if none is named.
const PASSES: &str = r#"
count=40
case " $* " in *' --exact '*)
    count=0
    for word in "$@"; do case $word in --*) ;; *) count=$((count + 1)) ;; esac; done ;;
esac
echo "test result: ok. $count passed; 0 failed; 0 ignored; 0 measured; 0 filtered out"
"#;

/// A folder with the files of a bundle.
pub(crate) struct Bundle {
    folder: tempfile::TempDir,
}

impl Bundle {
    pub(crate) fn new() -> Self {
        let bundle = Self {
            folder: tempfile::tempdir().expect("a folder"),
        };
        let scripts = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/command/bundle");
        fs::create_dir_all(bundle.path().join("path")).expect("a folder");
        for name in ["run.sh", "results.sh"] {
            fs::copy(scripts.join(name), bundle.path().join(name)).expect("a script");
        }
        bundle.program("bin/fusewire", FUSEWIRE);
        bundle.program("bin/fusewire-benches", "exit 0");
        for name in ["conformance", "graphs", "moe", "on_device", "operations"] {
            bundle.program(&format!("tests/{name}"), PASSES);
        }
        fs::create_dir_all(bundle.path().join("images")).expect("a folder");
        fs::write(
            bundle.path().join("images/seeded-bugs.sm_80.ptx"),
            "an image",
        )
        .expect("an image");
        bundle.sums();
        bundle
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the folder of results.
    pub(crate) fn results(&self) -> PathBuf {
        self.path().join("results")
    }

    /// Writes an executable shell script with this body.
    pub(crate) fn program(&self, name: &str, body: &str) {
        let path = self.path().join(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(&path, format!("#!/bin/sh\n{body}\n")).expect("a script");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
    }

    /// Writes the hashes of the programs and tests to `SHA256SUMS`.
    pub(crate) fn sums(&self) {
        let made = Command::new("sh")
            .args(["-c", "sha256sum bin/* tests/* > SHA256SUMS"])
            .current_dir(self.path())
            .status();
        assert!(made.expect("sh").success());
    }

    /// Returns a command that runs `run.sh`. Its environment contains only `PATH`, which starts
    /// with the folder `path` of the bundle.
    pub(crate) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new("/bin/sh");
        command
            .arg(self.path().join("run.sh"))
            .args(arguments)
            .arg("--out")
            .arg(self.results())
            .env_clear()
            .env(
                "PATH",
                format!("{}:/usr/bin:/bin", self.path().join("path").display()),
            )
            .current_dir(self.path());
        command
    }

    pub(crate) fn run(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
        self.command(arguments)
            .envs(environment.iter().copied())
            .output()
            .expect("a shell")
    }

    /// Returns the rows of the results: section, result, text.
    pub(crate) fn rows(&self) -> Vec<(String, String, String)> {
        rows(&self.results())
    }

    /// Returns the result and the text of a section.
    pub(crate) fn row(&self, section: &str) -> (String, String) {
        let rows = self.rows();
        let row = rows.into_iter().find(|row| row.0 == section);
        row.map(|(_, result, what)| (result, what))
            .unwrap_or_else(|| panic!("there is no {section}"))
    }
}

/// Returns the rows of `results.json`, after checking that `results.txt` has the same rows.
pub(crate) fn rows(folder: &Path) -> Vec<(String, String, String)> {
    let read = |name| fs::read_to_string(folder.join(name)).expect("the results");
    let json: serde_json::Value = serde_json::from_str(&read("results.json")).expect("JSON");
    let text = |row: &serde_json::Value, name: &str| row[name].as_str().expect(name).to_owned();
    let rows: Vec<(String, String, String)> = json["sections"]
        .as_array()
        .expect("sections")
        .iter()
        .map(|row| (text(row, "section"), text(row, "result"), text(row, "what")))
        .collect();
    let page = read("results.txt");
    for (section, result, what) in &rows {
        let there = page.lines().any(|line| {
            let cells: Vec<&str> = line.splitn(4, '|').map(str::trim).collect();
            cells.len() == 4 && [cells[0], cells[1], cells[3]] == [section, result, what]
        });
        assert!(there, "{section}, {result}, {what} is not in\n{page}");
    }
    rows
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}
