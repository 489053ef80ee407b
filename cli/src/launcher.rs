//! Starts local ranks as child processes with torchrun's environment, and stops them together.
//!
//! The launcher serves the store of the ranks, with a secret that only the ranks get. When a rank
//! fails, the other ranks may continue for a grace period to report what they observe. Then the
//! launcher ends all its descendants.
//!
//! The launcher is two processes, each of which ends the descendants if the other one is killed. If
//! both are killed, the system kills the ranks (`PR_SET_PDEATHSIG`), but not the processes that the
//! ranks have started, for example if a rank is a shell.

use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use core::time::Duration;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Instant;

use fusewire::store::{StoreSecret, TcpStoreServer};

use crate::processes::{Guard, catch, say};
use crate::{Usage, processes};

/// A job: a program and how its ranks run.
pub(crate) struct Job<'a> {
    /// The program.
    pub(crate) program: &'a std::ffi::OsStr,
    /// Arguments of the program.
    pub(crate) arguments: &'a [std::ffi::OsString],
    /// Number of ranks.
    pub(crate) ranks: u32,
    /// Prefixes each line of output with the rank.
    pub(crate) prefix: bool,
    /// Maximum time for which the other ranks continue after a rank has failed, to report what they
    /// observe.
    pub(crate) grace: Duration,
    /// Lets clients without a secret connect to the store.
    pub(crate) open_store: bool,
    /// Ends the job when the reader of its output closes the pipe. If false, the launcher discards
    /// further output.
    pub(crate) ends_with_output: bool,
}

/// Environment variable with the secret that the server and the clients of the store share.
const SECRET: &str = "FUSEWIRE_STORE_SECRET";

/// Time between SIGTERM and SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum grace period after the failure of a rank that no signal killed.
const AFTER_EXIT: Duration = Duration::from_secs(5);
/// If the launcher sees a crash within this time after the exit of another rank, the crash may have
/// caused the exit, because peers may notice a crash before the launcher does. See [`is_cause_of`].
const SAME_FAILURE: Duration = Duration::from_millis(500);

/// Variables of other launchers, which a rank would prefer to the variables of this launcher. The
/// ranks start without them.
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

/// Signals that ask this process to stop.
const SIGNALS: [libc::c_int; 4] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP, libc::SIGQUIT];

/// The signal that asked this process to stop, or 0.
static STOP: AtomicI32 = AtomicI32::new(0);

/// True after the reader of the ranks' output has closed the pipe, as `head` does.
static OUTPUT_CLOSED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_signal(signal: libc::c_int) {
    STOP.store(signal, Ordering::Relaxed);
}

/// Returns the secret of the ranks' store: the value of [`SECRET`] if it is set, otherwise a random
/// secret. Returns an empty string, which means no secret, for an open store.
fn secret(job: &Job<'_>) -> anyhow::Result<String> {
    if job.open_store {
        return Ok(String::new());
    }
    if let Some(secret) = std::env::var_os(SECRET) {
        let secret = secret.into_string();
        return secret.map_err(|_| Usage(format!("{SECRET} is not Unicode")).into());
    }
    let mut random = [0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Continues the program as a launcher, which is two processes.
///
/// # Safety
/// This process must have no other threads, so it must not have loaded the library of a GPU.
pub(crate) unsafe fn guarded() -> anyhow::Result<Guard> {
    // SAFETY: the precondition of this function.
    Ok(unsafe { processes::continue_in_child(&SIGNALS) }?)
}

/// Runs a job until all its processes have ended. Returns the exit status: 0, or the status of the
/// rank that failed first, or 128 + signal if a signal killed that rank or stopped this process.
/// Returns 128 + SIGPIPE if the job ended because its output was closed.
pub(crate) fn run(job: &Job<'_>, guard: &Guard) -> anyhow::Result<u8> {
    let secret = secret(job)?;
    for signal in SIGNALS {
        catch(signal, on_signal);
    }
    let server =
        TcpStoreServer::bind_with("127.0.0.1:0", StoreSecret::new(secret.as_bytes()).ok())?;
    // A write to a closed output must return an error and must not end this process. Ranks start
    // with the default action.
    // SAFETY: `SIG_IGN` is a valid action for SIGPIPE.
    unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    let mut ranks = Vec::new();
    let mut readers = Vec::new();
    for rank in 0..job.ranks {
        match start(job, rank, server.port(), &secret) {
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
    let end = supervise(job, &mut ranks, guard);
    if matches!(end, End::OutputClosed) {
        processes::stop_descendants();
        processes::end_descendants(Duration::ZERO);
    } else {
        // Ends the ranks that still run, and processes that ranks have left running.
        processes::end_descendants(KILL_TIMEOUT);
    }
    if let End::Signal(_) = end {
        // A second signal ends a launcher whose output nobody reads.
        for signal in SIGNALS {
            // SAFETY: `SIG_DFL` is a valid action.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
    }
    for reader in readers {
        // A reader returns when its pipe is closed. Ignores panics of readers.
        let _ = reader.join();
    }
    Ok(match end {
        End::Success => 0,
        End::Signal(signal) => 128 + signal as u8,
        End::OutputClosed => 128 + libc::SIGPIPE as u8,
        End::Failure(failure) => {
            if failure.others > 0 {
                say(format_args!("the first failure: {failure}"));
            }
            code(failure.status)
        }
    })
}

fn start(
    job: &Job<'_>,
    rank: u32,
    port: u16,
    secret: &str,
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
        .env("TORCHELASTIC_USE_AGENT_STORE", "True")
        .env(SECRET, secret);
    OTHER_LAUNCHERS.iter().for_each(|name| {
        command.env_remove(name);
    });
    // The CUDA driver and the HIP runtime read these variables once, so they must be set before the
    // rank starts. Keeps values that the user has set.
    let unset = fusewire::environment::VARIABLES
        .iter()
        .filter(|(name, _)| std::env::var_os(name).is_none());
    command.envs(unset.copied());
    command.stdout(Stdio::piped());
    if job.prefix {
        command.stdin(Stdio::null()).stderr(Stdio::piped());
    }
    let parent = std::process::id();
    // SAFETY: the closure runs between fork and exec. It does not allocate, and calls only prctl
    // and getppid, which are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            // Makes the system kill the rank when the launcher ends, even if the launcher is
            // killed. If the launcher ended before this call, the parent has changed.
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
    if let Some(mut out) = child.stdout.take() {
        let (prefix, ends_with_output) = (job.prefix, job.ends_with_output);
        threads.push(thread::spawn(move || {
            if prefix {
                copy_lines(rank, out, std::io::stdout());
                return;
            }
            let Err(error) = copy(&mut out, std::io::stdout()) else {
                return;
            };
            if error.kind() == ErrorKind::BrokenPipe && ends_with_output {
                OUTPUT_CLOSED.store(true, Ordering::Relaxed);
                return;
            }
            say_unwritten(rank, &error);
            // Discards the rest of the output, so that the rank neither blocks on a full pipe nor
            // fails because of a closed pipe.
            let _ = std::io::copy(&mut out, &mut std::io::sink());
        }));
    }
    if let Some(err) = child.stderr.take() {
        threads.push(thread::spawn(move || {
            copy_lines(rank, err, std::io::stderr())
        }));
    }
    Ok((child, threads))
}

/// Reports that the output of a rank cannot be written. Reports nothing if the reader has closed
/// the pipe.
fn say_unwritten(rank: u32, error: &std::io::Error) {
    if error.kind() != ErrorKind::BrokenPipe {
        say(format_args!(
            "the output of rank {rank} cannot be written: {error}; it is discarded"
        ));
    }
}

/// Copies data to `to` as soon as it arrives. Fails if `to` cannot be written.
fn copy(from: &mut impl Read, mut to: impl Write) -> std::io::Result<()> {
    let mut bytes = [0; 16 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        to.write_all(&bytes[..count])?;
        to.flush()?;
    }
    Ok(())
}

fn copy_lines(rank: u32, from: impl Read, mut to: impl Write) {
    let mut reader = BufReader::new(from);
    let mut line = Vec::new();
    let mut failed = false;
    while let Ok(1..) = reader.read_until(b'\n', &mut line) {
        if line.last() != Some(&b'\n') {
            line.push(b'\n');
        }
        let mut out = format!("[{rank}] ").into_bytes();
        out.append(&mut line);
        // Continues to read after an error, because a closed output must not stop the ranks.
        if let Err(error) = to.write_all(&out)
            && !failed
        {
            failed = true;
            say_unwritten(rank, &error);
        }
    }
}

/// Reason why a job ended.
enum End {
    Success,
    /// This process received a signal that asked it to stop.
    Signal(i32),
    OutputClosed,
    Failure(Failure),
}

/// Failure of a rank. If several ranks fail, a job keeps the first failure, or the crash that may
/// have caused it.
struct Failure {
    rank: usize,
    status: ExitStatus,
    seen: Instant,
    /// Time at which the launcher ends the other ranks.
    until: Instant,
    /// Number of other ranks that have failed.
    others: u32,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rank, status, .. } = self;
        match status.signal() {
            Some(signal) => write!(f, "rank {rank} was killed by signal {signal}"),
            None => write!(f, "rank {rank} ended with status {}", code(*status)),
        }
    }
}

/// Waits until all ranks have exited or, after a failure, until the grace period is over.
fn supervise(job: &Job<'_>, ranks: &mut [Option<Child>], guard: &Guard) -> End {
    let mut first: Option<Failure> = None;
    loop {
        let signal = STOP.load(Ordering::Relaxed);
        if signal != 0 {
            return End::Signal(signal);
        }
        if guard.is_gone() {
            return End::Signal(libc::SIGKILL);
        }
        if OUTPUT_CLOSED.load(Ordering::Relaxed) {
            return End::OutputClosed;
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
                    say(format_args!("rank {rank} cannot be waited for: {error}"));
                    ExitStatus::from_raw(1 << 8)
                }
            };
            *slot = None;
            if status.success() {
                continue;
            }
            let was_killed = status.signal().is_some();
            let grace = if was_killed {
                job.grace
            } else {
                // The rank could report its failure to the other ranks before it exited. So the
                // other ranks need not wait for their timeouts.
                job.grace.min(AFTER_EXIT)
            };
            let seen = Instant::now();
            let failure = Failure {
                rank,
                status,
                seen,
                until: seen + grace,
                others: 0,
            };
            let others = first.as_ref().map_or(0, |first| first.others + 1);
            let is_cause = first
                .as_ref()
                .is_none_or(|first| is_cause_of(status, first.status, first.seen.elapsed()));
            if is_cause {
                if job.prefix || was_killed {
                    say(format_args!("{failure}"));
                }
                first = Some(failure);
            }
            if let Some(first) = &mut first {
                first.others = others;
            }
        }
        match first {
            Some(first) if !alive || Instant::now() > first.until => return End::Failure(first),
            None if !alive => return End::Success,
            still => first = still,
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Returns true if the crash of one rank may have caused the failure of another rank that the
/// launcher saw first. `status` is the exit status of the rank that may have crashed, `first` is
/// that of the other rank, and `elapsed` is the time since the launcher saw the first failure.
///
/// SIGABRT does not count as a crash, because programs also abort when they notice the failure of
/// another rank.
fn is_cause_of(status: ExitStatus, first: ExitStatus, elapsed: Duration) -> bool {
    let crashed = matches!(
        status.signal(),
        Some(libc::SIGKILL | libc::SIGSEGV | libc::SIGBUS | libc::SIGILL | libc::SIGFPE)
    );
    crashed && first.signal().is_none() && elapsed < SAME_FAILURE
}

fn code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128 + signal as u8,
        (None, None) => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_is_the_cause_of_an_exit_that_was_seen_just_before() {
        let signal = ExitStatus::from_raw;
        let exit = |code: i32| ExitStatus::from_raw(code << 8);
        let soon = SAME_FAILURE / 2;
        for crash in [
            libc::SIGKILL,
            libc::SIGSEGV,
            libc::SIGBUS,
            libc::SIGILL,
            libc::SIGFPE,
        ] {
            assert!(is_cause_of(signal(crash), exit(3), soon), "{crash}");
            assert!(!is_cause_of(signal(crash), exit(3), SAME_FAILURE));
            assert!(!is_cause_of(signal(crash), signal(libc::SIGABRT), soon));
        }
        for other in [libc::SIGABRT, libc::SIGTERM, libc::SIGPIPE] {
            assert!(!is_cause_of(signal(other), exit(3), soon), "{other}");
        }
        assert!(!is_cause_of(exit(1), exit(3), soon));
    }
}
