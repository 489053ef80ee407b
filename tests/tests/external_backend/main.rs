//! Backends that are loaded at run time: the sample one through every operation, and libraries that must be
//! refused.

mod failures;
mod operations;
mod refused;

use core::time::Duration;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Once};
use std::thread;

use fusewire::store::MemoryStore;
use fusewire::{Communicator, Device, Options, Result, backend, new_comm};

/// Bound of everything that a test awaits: far beyond, so that a busy machine does not decide.
const PATIENCE: Duration = Duration::from_secs(60);

/// The shared library of the sample backend. Cargo builds it beside this binary; if it did not, it is told to.
fn sample() -> PathBuf {
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

/// Makes `sample` a backend of this process.
fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        backend::register_external_backend("sample", sample()).expect("a new name");
        assert!(backend::backend_names().contains(&"sample".to_owned()));
    });
}

fn options() -> Options {
    let mut options = Options::default();
    options.timeout = PATIENCE;
    options.abort_process_on_timeout_or_error = Some(false);
    options
}

/// Runs `body` on `size` ranks of the sample backend, as threads.
fn ranks<R: Send>(
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    register();
    let store = Arc::new(MemoryStore::new());
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let mut options = options.clone();
                options.store = Some(Arc::clone(&store) as _);
                options.rank_size = Some((rank, size));
                let body = &body;
                scope.spawn(move || body(new_comm("sample", Device::Cpu, "test", options)?))
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("no panic"))
            .collect()
    })
}
