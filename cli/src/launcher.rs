//! Local ranks: child processes with torchrun's environment, stopped together.

use core::sync::atomic::{AtomicI32, Ordering};
use core::time::Duration;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::Instant;

use anyhow::Context;
use fusewire::store::TcpStoreServer;

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
    /// How long the other ranks may go on after one has failed, to report what they see.
    pub(crate) grace: Duration,
}

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
    let mut ranks = Vec::new();
    let mut readers = Vec::new();
    for rank in 0..job.ranks {
        match start(job, rank, server.port()) {
            Ok((child, mut threads)) => {
                ranks.push(Some(child));
                readers.append(&mut threads);
            }
            Err(error) => {
                stop(&mut ranks);
                return Err(error);
            }
        }
    }
    let status = supervise(job, &mut ranks);
    for reader in readers {
        // A reader ends with its pipe; one that panicked has nothing to tell.
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
        .env("TORCHELASTIC_USE_AGENT_STORE", "True");
    for name in ["TORCHCOMM_RANK", "TORCHCOMM_SIZE"] {
        command.env_remove(name);
    }
    if job.prefix {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    }
    let parent = std::process::id();
    // SAFETY: prctl and getppid are async-signal-safe, and nothing else is called.
    unsafe {
        command.pre_exec(move || {
            // A rank dies with its launcher, also when that is killed.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if libc::getppid() as u32 != parent {
                return Err(std::io::Error::other("the launcher has ended"));
            }
            Ok(())
        });
    }
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {}", job.program.to_string_lossy()))?;
    let mut threads = Vec::new();
    if let Some(out) = child.stdout.take() {
        threads.push(thread::spawn(move || copy_lines(rank, out, std::io::stdout())));
    }
    if let Some(err) = child.stderr.take() {
        threads.push(thread::spawn(move || copy_lines(rank, err, std::io::stderr())));
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

/// Waits for all ranks; after the first failure the others get the grace, then are stopped.
fn supervise(job: &Job<'_>, ranks: &mut [Option<Child>]) -> u8 {
    let mut failed: Option<(u8, Instant)> = None;
    loop {
        let mut alive = false;
        for (rank, slot) in ranks.iter_mut().enumerate() {
            let Some(child) = slot else { continue };
            match child.try_wait() {
                Ok(None) => alive = true,
                Ok(Some(status)) => {
                    *slot = None;
                    let code = code(status);
                    if code != 0 && failed.is_none() {
                        if let Some(signal) = status.signal() {
                            eprintln!("fusewire: rank {rank} was killed by signal {signal}");
                        }
                        failed = Some((code, Instant::now()));
                    }
                }
                Err(error) => {
                    eprintln!("fusewire: rank {rank} cannot be waited for: {error}");
                    *slot = None;
                    failed.get_or_insert((1, Instant::now()));
                }
            }
        }
        let signal = STOP.load(Ordering::Relaxed);
        if signal != 0 {
            stop(ranks);
            return 128 + signal as u8;
        }
        if !alive {
            return failed.map_or(0, |(code, _)| code);
        }
        if let Some((code, since)) = failed
            && since.elapsed() > job.grace
        {
            stop(ranks);
            return code;
        }
        thread::sleep(Duration::from_millis(5));
    }
}

/// Stops all ranks: first asked, after a second killed (a stopped process does not hear the question).
fn stop(ranks: &mut [Option<Child>]) {
    for child in ranks.iter().flatten() {
        // SAFETY: the child has not been waited for, so its id is its own.
        unsafe { libc::kill(child.id() as i32, libc::SIGTERM) };
    }
    let asked = Instant::now();
    for child in ranks.iter_mut().flatten() {
        while matches!(child.try_wait(), Ok(None)) && asked.elapsed() < Duration::from_secs(1) {
            thread::sleep(Duration::from_millis(5));
        }
        // It may have ended by itself.
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn code(status: ExitStatus) -> u8 {
    match (status.code(), status.signal()) {
        (Some(code), _) => code as u8,
        (None, Some(signal)) => 128 + signal as u8,
        (None, None) => 1,
    }
}
