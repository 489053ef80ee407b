//! The backends of this build and the operations that they support.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Once;

use fusewire::{Communicator, backend};

use crate::cases::{Case, op_of};
use crate::skip::skip;

/// Backends that the conformance lists run on: the library's kernels, Gloo, and the sample external
/// backend.
pub const NAMES: [&str; 3] = ["fusewire", "gloo", "sample"];

/// Returns true if the backend reduces in rank order.
pub fn is_bitwise(name: &str) -> bool {
    name != "gloo"
}

/// Returns true if this build includes the backend. Prints the reason if it does not.
///
/// # Panics
/// Panics if the backend is absent and `FUSEWIRE_REQUIRE` names it; see [`crate::skip`].
pub fn is_here(name: &str) -> bool {
    register(name);
    if backend::backend_names().iter().any(|known| known == name) {
        return true;
    }
    skip(name, "the tests are built without this feature");
    false
}

/// Returns true if the communicator's backend supports the operation of `case`.
pub fn supports(comm: &Communicator, case: &Case) -> bool {
    let Some(backend) = comm.backend_impl() else {
        return true;
    };
    op_of(case).is_ok_and(|op| backend.supports(&op))
}

/// Registers the sample backend in this process if `name` is `sample`. Does nothing for other
/// names.
///
/// # Panics
/// Panics if the sample backend cannot be built or loaded.
pub fn register(name: &str) {
    if name != "sample" {
        return;
    }
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: the sample is a library of this workspace, which follows the rules of the table.
        unsafe { backend::register_external_backend("sample", sample()) }.expect("a new name");
    });
}

/// Returns the path of the sample backend's shared library. Cargo usually builds the library
/// together with this binary. If the file is missing, this function builds it.
///
/// # Panics
/// Panics if the build fails.
pub fn sample() -> PathBuf {
    let name = format!(
        "{}fusewire_backend_sample{}",
        std::env::consts::DLL_PREFIX,
        std::env::consts::DLL_SUFFIX
    );
    let binary = std::env::current_exe().expect("the path of this binary");
    let deps = binary.parent().expect("its folder");
    let beside = deps.join(&name);
    if beside.exists() {
        return beside;
    }
    let folder = deps.parent().expect("the profile's folder");
    let profile = match folder.file_name().and_then(|name| name.to_str()) {
        Some("debug") | None => "dev",
        Some(profile) => profile,
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args([
            "build",
            "-p",
            "fusewire-backend-sample",
            "--profile",
            profile,
        ])
        .arg("--target-dir")
        .arg(folder.parent().expect("the target folder"))
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .status()
        .expect("cargo");
    assert!(built.success(), "the sample backend is not built");
    folder.join(&name)
}
