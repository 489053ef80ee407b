//! Tests the backends nccl, ncclx, rccl and rcclx over a fake of their libraries. Ranks of the fake
//! are threads, memory is host memory, and the fake records every call.

mod failures;
mod libraries;
mod lists;
mod mapping;
mod operations;
mod parts;

use core::ffi::{c_char, c_int};
use core::time::Duration;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::thread;

use fusewire::store::MemoryStore;
use fusewire::{Communicator, Device, Options, Result, new_comm};
use serde::Deserialize;
use tempfile::TempDir;

/// Time limit of the tests' waits, long enough for a busy machine.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the path of the fake's shared library. Cargo usually builds the library together with
/// this binary. If the file is missing, this function builds it.
fn built() -> PathBuf {
    let name = format!(
        "{}fusewire_ccl_fake{}",
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
        .args(["build", "-p", "fusewire-ccl-fake", "--profile", profile])
        .arg("--target-dir")
        .arg(folder.parent().expect("the target folder"))
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")))
        .status()
        .expect("cargo");
    assert!(built.success(), "the fake is not built");
    folder.join(&name)
}

/// A call that the fake has recorded. Numbers that do not apply to the call are -1.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
struct Record {
    name: String,
    depth: i64,
    comm: i64,
    rank: i64,
    ranks: i64,
    count: i64,
    dtype: i64,
    op: i64,
    root: i64,
    peer: i64,
    in_place: i64,
    thread: i64,
    colour: i64,
    key: i64,
    scalar: i64,
    residence: i64,
    min_ctas: i64,
    max_ctas: i64,
    cga: i64,
    net_name: i64,
}

impl Default for Record {
    fn default() -> Self {
        let name = String::new();
        let [
            depth,
            comm,
            rank,
            ranks,
            count,
            dtype,
            op,
            root,
            peer,
            in_place,
        ] = [-1; 10];
        let [
            thread,
            colour,
            key,
            scalar,
            residence,
            min_ctas,
            max_ctas,
            cga,
            net_name,
        ] = [-1; 9];
        Self {
            name,
            depth,
            comm,
            rank,
            ranks,
            count,
            dtype,
            op,
            root,
            peer,
            in_place,
            thread,
            colour,
            key,
            scalar,
            residence,
            min_ctas,
            max_ctas,
            cga,
            net_name,
        }
    }
}

/// A loaded copy of the fake with a separate version, separate communicators and separate records.
#[derive(Debug)]
struct Fake {
    path: PathBuf,
    object: libloading::Library,
    _folder: TempDir,
}

impl Fake {
    fn new() -> Self {
        Self::of_version(23_203)
    }

    fn of_version(version: c_int) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("fake.so");
        std::fs::copy(built(), &path).expect("a copy of the fake");
        // SAFETY: the fake's library has no initializers.
        let object = unsafe { libloading::Library::new(&path) }.expect("the fake");
        let fake = Self {
            path,
            object,
            _folder: folder,
        };
        // SAFETY: the type is the signature of the fake's function.
        unsafe {
            let set = fake
                .object
                .get::<unsafe extern "C" fn(c_int) -> c_int>(b"fusewireCclFakeSetVersion")
                .expect("its own function");
            assert_eq!(set(version), 0);
        }
        fake
    }

    /// Returns the calls that the fake has recorded since the last `take`.
    fn take(&self) -> Vec<Record> {
        type TakeFn = unsafe extern "C" fn(*mut c_char, usize) -> usize;
        let mut text = vec![0u8; 1 << 16];
        loop {
            // SAFETY: the type is the signature of the fake's function, and `text` has `text.len()`
            // writable bytes.
            let need = unsafe {
                let take = self.object.get::<TakeFn>(b"fusewireCclFakeTake");
                take.expect("its own function")(text.as_mut_ptr().cast(), text.len())
            };
            if need <= text.len() {
                let text = core::str::from_utf8(&text[..need]).expect("text");
                let record = |line| serde_json::from_str(line).expect("a record");
                return text.lines().map(record).collect();
            }
            text.resize(need * 2, 0);
        }
    }

    fn options(&self) -> Options {
        let mut options = Options::default();
        options.timeout = TEST_TIMEOUT;
        options.abort_process_on_timeout_or_error = Some(false);
        let path = self.path.display().to_string();
        options.hints.insert("library_path".to_owned(), path);
        options
    }

    /// Runs `body` on `size` ranks of `nccl`, as threads.
    fn ranks<R: Send>(
        &self,
        size: u32,
        body: impl Fn(Communicator) -> Result<R> + Sync,
    ) -> Vec<Result<R>> {
        ranks_of("nccl", size, &self.options(), body)
    }

    /// Runs `body` on `size` ranks of `nccl`, as threads. Panics if `body` fails on a rank.
    fn all<R: Send>(&self, size: u32, body: impl Fn(Communicator) -> Result<R> + Sync) -> Vec<R> {
        self.ranks(size, body)
            .into_iter()
            .map(|result| result.unwrap_or_else(|error| panic!("{error}")))
            .collect()
    }
}

/// Runs `body` on `size` ranks of a backend, as threads.
fn ranks_of<R: Send>(
    backend: &str,
    size: u32,
    options: &Options,
    body: impl Fn(Communicator) -> Result<R> + Sync,
) -> Vec<Result<R>> {
    let store = Arc::new(MemoryStore::new());
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| {
                let mut options = options.clone();
                options.store = Some(Arc::clone(&store) as _);
                options.rank_size = Some((rank, size));
                let body = &body;
                scope.spawn(move || {
                    let comm = new_comm(backend, Device::Cpu, "test", options)?;
                    let result = body(comm.clone());
                    if result.is_ok() {
                        // Dropping the communicator without `finalize` would abort peers that are
                        // still in an operation.
                        let _ = comm.finalize();
                    }
                    result
                })
            })
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().expect("no panic"))
            .collect()
    })
}
