//! Store for ranks that are all on one host and have no server address. The store is a file in a
//! job-specific directory.

use core::sync::atomic::{AtomicU32, Ordering};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::process;
use crate::store::{FileStore, Store};
use crate::{Error, Result};

/// Maximum number of times that the directory is created again after another rank has removed it.
const TRIES: u32 = 1000;

/// Key of the counter of ranks that have opened the store.
const OPENED: &str = "fusewire/opened";

/// Name of Hydra's proxy process, which starts all ranks of a host.
const HYDRA_PROXY: &str = "hydra_pmi_proxy";

/// Groups of variables. The values of a group identify a job or a job step: they are equal on all
/// ranks of the job, and different from those of earlier jobs. The first group whose first variable
/// is set is used.
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

/// Opens the store of this job for `size` ranks. Returns `None` if the job cannot be identified.
///
/// The last rank that opens the file removes the file's name and the directory, so nothing is left
/// on disk even if a rank is killed later. The content exists as long as a rank has the file open.
pub(super) fn open(
    variable: &dyn Fn(&str) -> Option<String>,
    size: u32,
) -> Result<Option<FileStore>> {
    /// Number of stores that this process has opened. All ranks open the same number of stores,
    /// each in a separate file.
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let Some(job) = job(variable).or_else(|| hydra_job(variable)) else {
        return Ok(None);
    };
    let parent = variable("XDG_RUNTIME_DIR")
        .map(PathBuf::from)
        .filter(|path| path.is_dir())
        .unwrap_or_else(|| PathBuf::from("/tmp"));
    // SAFETY: `geteuid` has no preconditions.
    let user = unsafe { libc::geteuid() };
    let directory = parent.join(format!("fusewire-{user}-{job}"));
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    open_at(&directory, &format!("store-{number}"), user, size).map(Some)
}

fn open_at(directory: &Path, name: &str, user: u32, size: u32) -> Result<FileStore> {
    let path = directory.join(name);
    let mut tries = 0;
    let store = loop {
        make_private(directory, user)?;
        match FileStore::open(&path) {
            // The last rank that opened another store of the job has removed the directory since
            // `make_private` returned.
            Err(error) if error.kind() == Some(ErrorKind::NotFound) && tries < TRIES => tries += 1,
            opened => break opened?,
        }
    };
    if store.add(OPENED, 1)? == i64::from(size) {
        let _ = fs::remove_file(&path);
        // Fails if the directory contains another store of the job. The last rank that opens that
        // store then removes the directory.
        let _ = fs::remove_dir(directory);
    }
    Ok(store)
}

/// Returns a name for the job that is valid as part of a file name, or `None` if no variable
/// identifies the job.
fn job(variable: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    let names = JOBS.iter().find(|names| variable(names[0]).is_some())?;
    let values: Vec<_> = names.iter().map(|name| variable(name)).collect();
    let mut name: String = values[0].clone()?;
    name.retain(|c| c.is_ascii_alphanumeric());
    name.truncate(32);
    Some(format!("{name}-{:016x}", hash(&format!("{values:?}"))))
}

/// Returns a name for a job of Hydra, the launcher of MPICH and Intel MPI. Hydra sets no variable
/// that identifies the job, but all ranks of a host descend from one proxy process. The proxy's
/// process id and start time identify the job within one boot and one PID namespace, so the name
/// also depends on the boot id and the namespace.
fn hydra_job(variable: &dyn Fn(&str) -> Option<String>) -> Option<String> {
    variable("PMI_RANK")?;
    let mut pid = std::process::id();
    loop {
        pid = process::parent(pid).ok().filter(|parent| *parent > 1)?;
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        if name.trim_end() == HYDRA_PROXY {
            break;
        }
    }
    let start = process::start_time(pid).ok()?;
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let namespace = fs::read_link("/proc/self/ns/pid").ok()?;
    let hash = hash(&format!("{start} {boot} {}", namespace.display()));
    Some(format!("hydra{pid}-{hash:016x}"))
}

/// Returns the FNV-1a hash of `text`, which is equal in all processes.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

/// Creates a directory that only this user can access. If the directory exists, checks that it
/// belongs to this user and that other users have no access.
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
    // `symlink_metadata` does not follow a symbolic link, which another user may have created.
    match fs::symlink_metadata(directory) {
        Ok(found) if !found.is_dir() => refuse("is no directory".to_owned()),
        Ok(found) if found.uid() != user || found.mode() & 0o077 != 0 => {
            refuse("is open to other users".to_owned())
        }
        Ok(_) => Ok(()),
        // Another rank has just removed the directory. Opening a file in it then fails, and
        // `open_at` tries again.
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) => refuse(format!("cannot be looked at ({error})")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_store_is_opened_while_the_last_rank_of_another_removes_the_directory() {
        let base = std::env::temp_dir().join(format!("fusewire-removed-{}", std::process::id()));
        fs::create_dir(&base).unwrap();
        let runtime = base.display().to_string();
        let variable = |name: &str| match name {
            "XDG_RUNTIME_DIR" => Some(runtime.clone()),
            "PMIX_NAMESPACE" => Some("again".to_owned()),
            _ => None,
        };
        let first = open(&variable, 1).unwrap().unwrap();
        let directory = first.path().parent().unwrap().to_owned();
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
                let opened = open(&variable, 1);
                done.store(opened.is_err(), Ordering::Relaxed);
                opened.unwrap().unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn nothing_is_left_once_all_ranks_have_opened_the_store_of_a_job() {
        let base = std::env::temp_dir().join(format!("fusewire-local-{}", std::process::id()));
        fs::create_dir(&base).unwrap();
        let runtime = base.display().to_string();
        let variable = |name: &str| match name {
            "XDG_RUNTIME_DIR" => Some(runtime.clone()),
            "PMIX_NAMESPACE" => Some("../job 7".to_owned()),
            _ => None,
        };
        let a = open(&variable, 2).unwrap().unwrap();
        let path = a.path().to_owned();
        let directory = path.parent().unwrap().to_owned();
        assert_eq!(directory.parent(), Some(&*base));
        let metadata = fs::metadata(&directory).unwrap();
        assert_eq!(metadata.mode() & 0o777, 0o700);
        assert!(path.exists());
        // A second process would compute the same file name, because its counter has the same
        // value.
        let name = path.file_name().unwrap().to_str().unwrap();
        let b = open_at(&directory, name, metadata.uid(), 2).unwrap();
        assert!(!directory.exists());
        a.set("k", b"v").unwrap();
        assert!(b.check(&["k"]).unwrap());
        fs::create_dir(&directory).unwrap();
        fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
        let error = open(&variable, 2).unwrap_err();
        assert!(error.to_string().contains("open to other"), "{error}");
        assert!(open(&|_| None, 2).unwrap().is_none());
        fs::remove_dir_all(&base).unwrap();
    }
}
