//! `fusewire-build new`.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, bail, ensure};

use super::shown;

/// Arguments of `fusewire-build new`.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Folder of the new crate. The name of the folder is also the name of the crate.
    #[arg(value_name = "PATH")]
    folder: PathBuf,
    /// Folder of a checkout of Fusewire, which the crate depends on by path. Default: the checkout
    /// that this command was built from if it still exists, otherwise the published version.
    #[arg(long, value_name = "FOLDER")]
    path: Option<PathBuf>,
}

/// Files of a new crate: the path in the crate and the template.
const FILES: [(&str, &str); 7] = [
    ("Cargo.toml", include_str!("../../template/Cargo.toml.in")),
    (".gitignore", include_str!("../../template/gitignore.in")),
    ("README.md", include_str!("../../template/README.md.in")),
    ("src/lib.rs", include_str!("../../template/lib.rs.in")),
    (
        "examples/exchange_sum.rs",
        include_str!("../../template/example.rs.in"),
    ),
    (
        "tests/exchange_sum.rs",
        include_str!("../../template/test.rs.in"),
    ),
    (
        "tests/emulated.rs",
        include_str!("../../template/emulated.rs.in"),
    ),
];

/// Writes a kernel crate that can be built, tested and checked.
pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let folder = &arguments.folder;
    let name = folder
        .file_name()
        .and_then(|name| name.to_str())
        .with_context(|| format!("{} does not end in a name", folder.display()))?;
    check_name(name)?;
    if folder.exists() {
        bail!("{} exists", folder.display());
    }
    let checkout = match &arguments.path {
        Some(path) => {
            let holds = path.join("device-api/Cargo.toml").exists();
            ensure!(holds, "{} holds no device-api", path.display());
            Some(path.canonicalize()?)
        }
        None => own_checkout(),
    };
    let source = |folder: &str| match &checkout {
        Some(checkout) => format!("path = {:?}", checkout.join(folder)),
        None => format!("version = {:?}", env!("CARGO_PKG_VERSION")),
    };
    let dependency = |folder: &str| format!("{{ {} }}", source(folder));
    let home = match &checkout {
        Some(checkout) => checkout.display().to_string(),
        None => "https://docs.rs/fusewire".to_owned(),
    };
    for (file, text) in FILES {
        let text = text
            .replace("@NAME@", name)
            .replace("@CRATE@", &name.replace('-', "_"))
            .replace("@DEVICE@", &dependency("device-api"))
            .replace("@HOST@", &dependency("host"))
            .replace("@BUILD@", &source("build"))
            .replace("@FAKE@", &dependency("emulator/cuda-fake"))
            .replace("@HOME@", &home);
        let path = folder.join(file);
        let parent = path.parent().unwrap_or(folder);
        std::fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    println!(
        "{}: a kernel crate; next: `cargo test` in it, then `fusewire-build check`",
        shown(folder).display()
    );
    Ok(ExitCode::SUCCESS)
}

/// Returns the checkout that this program was built from, if that checkout still exists.
fn own_checkout() -> Option<PathBuf> {
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).parent()?;
    let holds = |folder: &str| checkout.join(folder).join("Cargo.toml").exists();
    (holds("device-api") && holds("host")).then(|| checkout.to_owned())
}

/// Returns an error unless cargo accepts `name` as a package name, Rust code can name the library,
/// and no other crate has this name.
fn check_name(name: &str) -> anyhow::Result<()> {
    let mut letters = name.chars();
    let first = letters.next().is_some_and(|c| c.is_ascii_alphabetic());
    ensure!(
        first && letters.all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_'),
        "{name:?} is no name of a package: letters, digits, - and _, a letter first"
    );
    ensure!(
        ![
            "core",
            "std",
            "test",
            "fusewire",
            "fusewire-device",
            "fusewire-build",
            "fusewire-cuda-fake"
        ]
        .contains(&name),
        "{name:?} is taken; choose another name"
    );
    Ok(())
}
