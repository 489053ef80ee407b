//! Local ranks: child processes with torchrun's environment, stopped together.

use core::sync::atomic::{AtomicI32, Ordering};
use core::time::Duration;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Instant;

use fusewire::store::TcpStoreServer;

use crate::{Usage, processes};

/// What to start.
pub(crate) struct Job<'a> {
    /// The program.
    pub(crate) program: &'a std::ffi::OsStr,
    /// Its arguments.
    pub(crate) arguments: &'a [std::ffi::OsString],
    /// Ranks.
    pub(crate) ranks: u32,
    /// Whether lines of output start with the rank.
    pub(crate) prefix: bool,
    /// How long the other ranks may go on after one was killed, to report what they see.
    pub(crate) grace: Duration,
}

/// How long processes that were asked to end may take.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);
/// Longest grace after a rank that ended by itself.
const AFTER_EXIT: Duration = Duration::from_secs(5);

/// Variables of an outer launcher that a rank would read before this one's.
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

/// The signal that asked this process to stop, or 0.
static STOP: AtomicI32 = AtomicI32::new(0);

extern "C" fn on_signal(signal: libc::c_int) {
    STOP.store(signal, Ordering::Relaxed);
}

fn catch(signal: libc::c_int) {
    // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
    unsafe {
        libc::signal(signal, on_signal as *const () as libc::sighandler_t);
    }
}

/// Runs a job to its end; the exit status to give: the first failure's, 128 + signal for a killed
/// rank or for this process's own interruption.
pub(crate) fn run(job: &Job<'_>) -> anyhow::Result<u8> {
    let server = TcpStoreServer::bind("127.0.0.1:0")?;
    catch(libc::SIGINT);
    catch(libc::SIGTERM);
    catch(libc::SIGHUP);
    catch(libc::SIGQUIT);
    processes::adopt_orphans();
    let mut ranks = Vec::new();
    let mut readers = Vec::new();
    for rank in 0..job.ranks {
        match start(job, rank, server.port()) {
            Ok((child, mut threads)) => {
                ranks.push(Some(child));
                readers.append(&mut threads);
            }
            Err(error) => {
                processes::end_descendants(Duration::ZERO);
                return Err(error);
            }
        }
    }
    let status = supervise(job, &mut ranks);
    // Ranks that are still there, and whatever ranks have left behind.
    processes::end_descendants(KILL_TIMEOUT);
    for reader in readers {
        // A reader ends with its pipe; one that panicked has nothing to report.
        let _ = reader.join();
    }
    Ok(status)
}

fn start(
    job: &Job<'_>,
    rank: u32,
    port: u16,
) -> anyhow::Result<(Child, Vec<thread::JoinHandle<()>>)> {
    let mut command = Command::new(job.program);
    command
        .args(job.arguments)
        .env("RANK", rank.to_string())
        .env("WORLD_SIZE", job.ranks.to_string())
        .env("LOCAL_RANK", rank.to_string())
        .env("LOCAL_WORLD_SIZE", job.ranks.to_string())
        .env("GROUP_RANK", "0")
        .env("MASTER_ADDR", "127.0.0.1")
        .env("MASTER_PORT", port.to_string())
        .env("GROUP_WORLD_SIZE", "1")
        .env("ROLE_NAME", "default")
        .env("ROLE_RANK", rank.to_string())
        .env("ROLE_WORLD_SIZE", job.ranks.to_string())
        .env("TORCHELASTIC_RESTART_COUNT", "0")
        .env("TORCHELASTIC_MAX_RESTARTS", "0")
        .env(
            "TORCHELASTIC_RUN_ID",
            format!("fusewire-{}", std::process::id()),
        )
        .env("TORCHELASTIC_USE_AGENT_STORE", "True");
    OTHER_LAUNCHERS.iter().for_each(|name| {
        command.env_remove(name);
    });
    // What CUDA reads once, when a process starts to use it.
    let unset = fusewire::cuda::ENVIRONMENT
        .iter()
        .filter(|(name, _)| std::env::var_os(name).is_none());
    command.envs(unset.copied());
    if job.prefix {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
    }
    let parent = std::process::id();
    // SAFETY: prctl and getppid are async-signal-safe; nothing else is called, and nothing allocates.
    unsafe {
        command.pre_exec(move || {
            // A rank dies with its launcher, also when that is killed.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if libc::getppid() as u32 != parent {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        });
    }
    let mut child = command.spawn().map_err(|error| {
        Usage(format!(
            "cannot start {}: {error}",
            job.program.to_string_lossy()
        ))
    })?;
    let mut threads = Vec::new();
    if let Some(out) = child.stdout.take() {
        threads.push(thread::spawn(move || {
            copy_lines(rank, out, std::io::stdout())
        }));
    }
    if let Some(err) = child.stderr.take() {
        threads.push(thread::spawn(move || {
            copy_lines(rank, err, std::io::stderr())
        }));
    }
    Ok((child, threads))
}

fn copy_lines(rank: u32, from: impl Read, mut to: impl Write) {
    let mut reader = BufReader::new(from);
    let mut line = Vec::new();
    while let Ok(1..) = reader.read_until(b'\n', &mut line) {
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        let mut out = format!("[{rank}] ").into_bytes();
        out.append(&mut line);
        // A closed output is no reason to stop the ranks.
        let _ = to.write_all(&out);
    }
}

/// Waits for all ranks, after the first failure no longer than the grace; the status to give.
fn supervise(job: &Job<'_>, ranks: &mut [Option<Child>]) -> u8 {
    let mut failed: Option<(u8, Instant)> = None;
    loop {
        let signal = STOP.load(Ordering::Relaxed);
        if signal != 0 {
            return 128 + signal as u8;
        }
        let mut alive = false;
        for (rank, slot) in ranks.iter_mut().enumerate() {
            let Some(child) = slot else { continue };
            let status = match child.try_wait() {
                Ok(None) => {
                    alive = true;
                    continue;
                }
                Ok(Some(status)) => status,
                Err(error) => {
                    eprintln!("fusewire: rank {rank} cannot be waited for: {error}");
                    ExitStatus::from_raw(1 << 8)
                }
            };
            *slot = None;
            if failed.is_some() || status.success() {
                continue;
            }
            let grace = match status.signal() {
                Some(signal) => {
                    eprintln!("fusewire: rank {rank} was killed by signal {signal}");
                    job.grace
                }
                None => {
                    if job.prefix {
                        eprintln!("fusewire: rank {rank} ended with status {}", code(status));
                    }
                    // The rank has reported its failure to the others, which need not time out.
                    job.grace.min(AFTER_EXIT)
                }
            };
            failed = Some((code(status), Instant::now() + grace));
        }
        match failed {
            _ if !alive => return failed.map_or(0, |(code, _)| code),
            Some((code, until)) if Instant::now() > until => return code,
            _ => thread::sleep(Duration::from_millis(2)),
        }
    }
}

fn code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128 + signal as u8,
        (None, None) => 1,
    }
}
