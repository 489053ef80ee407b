//! Starts child processes: one with the whole model, and one per rank.

use core::time::Duration;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use fusewire::store::TcpStoreServer;

/// Time that the remaining ranks have to report after a rank has failed. Their messages name the
/// failed rank.
const GRACE: Duration = Duration::from_secs(10);

/// Variables of an outer launcher that would take precedence over those of this launcher.
const OTHER_LAUNCHERS: [&str; 9] = [
    "TORCHCOMM_RANK",
    "TORCHCOMM_SIZE",
    "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "PALS_RANKID",
    "PALS_SIZE",
];

/// Returns the number of cores for each of `parts` concurrent processes, at least 1.
pub fn cores(parts: u32) -> u32 {
    let all = thread::available_parallelism().map_or(1, |cores| cores.get() as u32);
    (all / parts.max(1)).max(1)
}

/// Runs this program with `arguments` and `threads` threads for candle, and waits until it exits.
///
/// # Errors
/// Fails if the process cannot be started or exits with an error. In the second case, the process
/// has printed the reason.
pub fn alone(arguments: &[OsString], threads: u32) -> Result<()> {
    let child = start(arguments, threads, &[])?;
    supervise(vec![("the single process".to_owned(), child)])
}

/// Runs this program once per rank, like [`alone`]. The ranks rendezvous through a store that this
/// process serves.
///
/// # Errors
/// Returns the errors of [`alone`].
pub fn ranks(arguments: &[OsString], threads: u32, ranks: u32) -> Result<()> {
    let server = TcpStoreServer::bind("127.0.0.1:0").context("the store for the ranks")?;
    let mut children = Vec::new();
    for rank in 0..ranks {
        let environment = [
            ("RANK", rank.to_string()),
            ("WORLD_SIZE", ranks.to_string()),
            ("LOCAL_RANK", rank.to_string()),
            ("LOCAL_WORLD_SIZE", ranks.to_string()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("MASTER_PORT", server.port().to_string()),
            // This process already serves the store.
            ("TORCHELASTIC_USE_AGENT_STORE", "True".to_owned()),
        ];
        match start(arguments, threads, &environment) {
            Ok(child) => children.push((format!("rank {rank}"), child)),
            Err(error) => {
                children.iter_mut().for_each(|(_, child)| end(child));
                return Err(error);
            }
        }
    }
    supervise(children)
}

fn start(arguments: &[OsString], threads: u32, environment: &[(&str, String)]) -> Result<Child> {
    let program = std::env::current_exe().context("the program's own path")?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        // Candle and rayon read this variable when they start.
        .env("RAYON_NUM_THREADS", threads.to_string())
        .env_remove("CANDLE_NUM_THREADS");
    OTHER_LAUNCHERS.iter().for_each(|name| {
        command.env_remove(name);
    });
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    // CUDA reads these variables once, when a process first uses CUDA.
    let unset = fusewire::environment::VARIABLES
        .iter()
        .filter(|(name, _)| std::env::var_os(name).is_none());
    command.envs(unset.copied());
    let parent = std::process::id();
    // SAFETY: between fork and exec the closure calls only prctl and getppid, which are
    // async-signal-safe, and does not allocate.
    unsafe {
        command.pre_exec(move || {
            // Kills the child when the parent exits, even if the parent is killed.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if libc::getppid() as u32 != parent {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
    command.spawn().context("a process of this program")
}

/// Waits for all children. After the first failure, waits for at most [`GRACE`].
fn supervise(mut children: Vec<(String, Child)>) -> Result<()> {
    let mut failed: Option<(String, Instant)> = None;
    while !children.is_empty() {
        let mut at = 0;
        while at < children.len() {
            let (name, child) = &mut children[at];
            let ended = match child.try_wait() {
                Ok(None) => {
                    at += 1;
                    continue;
                }
                Ok(Some(status)) if status.success() => None,
                Ok(Some(status)) => Some(format!("{name} ended with {status}")),
                Err(error) => Some(format!("{name} cannot be waited for: {error}")),
            };
            if let Some(what) = ended {
                failed.get_or_insert((what, Instant::now() + GRACE));
            }
            children.swap_remove(at);
        }
        if failed
            .as_ref()
            .is_some_and(|(_, until)| Instant::now() > *until)
        {
            children.iter_mut().for_each(|(_, child)| end(child));
            break;
        }
        thread::sleep(Duration::from_millis(2));
    }
    match failed {
        Some((what, _)) => bail!("{what}; see above for its reason"),
        None => Ok(()),
    }
}

fn end(child: &mut Child) {
    // `kill` fails only if the child has already ended.
    let _ = child.kill();
    let _ = child.wait();
}
