//! A store for ranks that are all on one host and have no address in the environment: a file in a
//! directory of the job.

use core::sync::atomic::{AtomicU32, Ordering};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::store::{FileStore, Store};
use crate::{Error, Result};

/// How often a directory is made anew that others remove.
const TRIES: u32 = 1000;

/// How many ranks are done with a store.
const LEFT: &str = "fusewire/left";

/// Variables that together name a job, or a step of one: equal on all its ranks, and other than in any
/// job before. The first group of which the first is set counts.
const JOBS: [&[&str]; 4] = [
    &["SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"],
    &[
        "PMIX_NAMESPACE",
        "PMIX_SERVER_URI2",
        "OMPI_MCA_orte_precondition_transports",
    ],
    &[
        "OMPI_MCA_ess_base_jobid",
        "OMPI_MCA_orte_precondition_transports",
    ],
    &["PALS_APID"],
];

/// A store of one host. The last rank that drops it removes it.
#[derive(Debug)]
pub(super) struct LocalStore {
    pub(super) store: Arc<FileStore>,
    size: u32,
}

impl LocalStore {
    /// The store of this job, for `size` ranks; `None` where nothing names the job.
    pub(super) fn open(
        variable: &dyn Fn(&str) -> Option<String>,
        size: u32,
    ) -> Result<Option<Self>> {
        /// Stores of this process: each gets a file of its own, for the last may not be gone yet.
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let Some(job) = job(variable) else {
            return Ok(None);
        };
        let parent = variable("XDG_RUNTIME_DIR")
            .map(PathBuf::from)
            .filter(|path| path.is_dir())
            .unwrap_or_else(|| PathBuf::from("/tmp"));
        // SAFETY: geteuid has no preconditions.
        let user = unsafe { libc::geteuid() };
        let directory = parent.join(format!("fusewire-{user}-{job}"));
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!("store-{number}"));
        let mut tries = 0;
        let store = loop {
            make_private(&directory, user)?;
            match FileStore::open(&path) {
                // The end of the store before has removed the directory meanwhile.
                Err(Error::Store {
                    source: Some(source),
                    ..
                }) if source.kind() == ErrorKind::NotFound && tries < TRIES => tries += 1,
                opened => break opened?,
            }
        };
        Ok(Some(Self {
            store: Arc::new(store),
            size,
        }))
    }
}

impl Drop for LocalStore {
    fn drop(&mut self) {
        // A rank that fails leaves the file for others to see what happened.
        if self.store.add(LEFT, 1).ok() == Some(i64::from(self.size)) {
            let _ = fs::remove_file(self.store.path());
            if let Some(directory) = self.store.path().parent() {
                // Fails while there is another store of the job, whose end removes it.
                let _ = fs::remove_dir(directory);
            }
        }
    }
}

/// A name for the job, fit for a file.
fn job(variable: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let names = JOBS.iter().find(|names| variable(names[0]).is_some())?;
    let values: Vec<_> = names.iter().map(|name| variable(name)).collect();
    let mut name: String = values[0].clone()?;
    name.retain(|c| c.is_ascii_alphanumeric());
    name.truncate(32);
    // FNV-1a, because the hash has to be equal in all processes.
    let hash = format!("{values:?}")
        .bytes()
        .fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
        });
    Some(format!("{name}-{hash:016x}"))
}

/// Makes a directory that only this user can enter, or makes sure that it is one.
fn make_private(directory: &Path, user: u32) -> Result<()> {
    let refuse = |what: String| {
        Err(Error::bootstrap(format!(
            "{} {what}; remove it, or give MASTER_ADDR and MASTER_PORT",
            directory.display()
        )))
    };
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
        Err(error) => return refuse(format!("cannot be made ({error})")),
    }
    // Not through a link, which somebody else may have put there.
    match fs::symlink_metadata(directory) {
        Ok(found) if !found.is_dir() => refuse("is no directory".to_owned()),
        Ok(found) if found.uid() != user || found.mode() & 0o077 != 0 => {
            refuse("is open to other users".to_owned())
        }
        Ok(_) => Ok(()),
        // Removed meanwhile: who opens a file in it finds out.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => refuse(format!("cannot be looked at ({error})")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_store_is_opened_while_the_end_of_another_removes_the_directory() {
        let base = std::env::temp_dir().join(format!("fusewire-removed-{}", std::process::id()));
        fs::create_dir(&base).unwrap();
        let runtime = base.display().to_string();
        let variable = |name: &str| match name {
            "XDG_RUNTIME_DIR" => Some(runtime.clone()),
            "PMIX_NAMESPACE" => Some("again".to_owned()),
            _ => None,
        };
        let first = LocalStore::open(&variable, 1).unwrap().unwrap();
        let directory = first.store.path().parent().unwrap().to_owned();
        drop(first);
        let done = core::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    let _ = fs::remove_dir(&directory);
                    std::thread::sleep(core::time::Duration::from_micros(5));
                }
            });
            for _ in 0..2000 {
                let opened = LocalStore::open(&variable, 1);
                done.store(opened.is_err(), Ordering::Relaxed);
                opened.unwrap().unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn the_last_rank_removes_the_store_of_a_job() {
        let base = std::env::temp_dir().join(format!("fusewire-local-{}", std::process::id()));
        fs::create_dir(&base).unwrap();
        let runtime = base.display().to_string();
        let variable = |name: &str| match name {
            "XDG_RUNTIME_DIR" => Some(runtime.clone()),
            "PMIX_NAMESPACE" => Some("../job 7".to_owned()),
            _ => None,
        };
        let a = LocalStore::open(&variable, 2).unwrap().unwrap();
        let path = a.store.path().to_owned();
        let directory = path.parent().unwrap().to_owned();
        assert_eq!(directory.parent(), Some(&*base));
        assert_eq!(fs::metadata(&directory).unwrap().mode() & 0o777, 0o700);
        // Another process would have the same number.
        let store = Arc::new(FileStore::open(&path).unwrap());
        let b = LocalStore { store, size: 2 };
        a.store.set("k", b"v").unwrap();
        assert!(b.store.check(&["k"]).unwrap());
        drop(a);
        assert!(path.exists());
        drop(b);
        assert!(!directory.exists());
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
        let error = LocalStore::open(&variable, 2).unwrap_err();
        assert!(error.to_string().contains("open to other"), "{error}");
        assert!(LocalStore::open(&|_| None, 2).unwrap().is_none());
        fs::remove_dir_all(&base).unwrap();
    }
}
