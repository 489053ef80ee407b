//! Runs ranks as processes of the test binary. A test starts its own binary once per rank, with the
//! name of the test as an argument and a role in the environment.

use core::time::Duration;
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::time::Instant;

use fusewire::store::TcpStoreServer;

const ROLE: &str = "FUSEWIRE_TEST_ROLE";
/// Prefix of the output lines that a child reports to its parent.
const REPORT: &str = "@@ ";

/// Returns the role of this process if it is a child of a test.
pub fn role() -> Option<String> {
    std::env::var(ROLE).ok()
}

/// Sends a line to the parent. Uses a single write, because a launcher merges the output of several
/// ranks and could otherwise interleave their lines.
pub fn report(line: impl core::fmt::Display) {
    let line = format!("{REPORT}{line}\n");
    std::io::stderr()
        .write_all(line.as_bytes())
        .expect("the parent reads");
}

/// The process that serves the store of the rendezvous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Host {
    /// The parent, like a launcher's agent.
    Parent,
    /// Rank 0, as in a run that a user starts without a launcher.
    RankZero,
}

/// Returns the arguments with which a test binary runs only `test`, in a child process.
pub fn child_arguments(test: &str) -> [&str; 5] {
    [
        test,
        "--exact",
        "--include-ignored",
        "--nocapture",
        "--test-threads=1",
    ]
}

/// Starts this binary as a child that runs `test` in the role `role`. Adds `environment` to the
/// child's environment variables.
///
/// # Panics
/// Panics if the process cannot be started.
pub fn start(test: &str, role: &str, environment: &[(String, String)]) -> Process {
    let binary = std::env::current_exe().expect("the path of this binary");
    let mut child = Command::new(binary)
        .args(child_arguments(test))
        .env(ROLE, role)
        .envs(environment.iter().cloned())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a child process");
    let stderr = BufReader::new(child.stderr.take().expect("a pipe"));
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        for line in stderr.lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    Process {
        child,
        lines,
        noise: VecDeque::new(),
    }
}

/// A child process. Dropping the value kills the process if it still runs.
#[derive(Debug)]
pub struct Process {
    child: Child,
    lines: Receiver<String>,
    noise: VecDeque<String>,
}

impl Process {
    /// Returns the process id of the child.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal to the child.
    pub fn signal(&self, signal: i32) {
        // SAFETY: `kill` accesses no memory. This process has not waited for the child, so the
        // child's id is not reused.
        unsafe { libc::kill(self.child.id() as i32, signal) };
    }

    /// Returns the next report, or an error with the last lines of the child's output.
    pub fn next_report(&mut self, timeout: Duration) -> Result<String, String> {
        self.next_line(timeout, |line| line.strip_prefix(REPORT))
    }

    /// Returns the next line of the child's standard error that contains `text`, or an error with
    /// the last lines of the child's output. Skips reports before that line.
    pub fn next_line_with(&mut self, text: &str, timeout: Duration) -> Result<String, String> {
        self.next_line(timeout, |line| line.contains(text).then_some(line))
    }

    fn next_line(
        &mut self,
        timeout: Duration,
        select: impl Fn(&str) -> Option<&str>,
    ) -> Result<String, String> {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    if let Some(selected) = select(&line) {
                        return Ok(selected.to_owned());
                    }
                    self.noise.push_back(line);
                    if self.noise.len() > 40 {
                        self.noise.pop_front();
                    }
                }
                Err(error) => {
                    let what = match error {
                        RecvTimeoutError::Timeout => "did not write the awaited line in time",
                        RecvTimeoutError::Disconnected => "ended without the awaited line",
                    };
                    return Err(format!("child {} {what}: {:?}", self.id(), self.noise));
                }
            }
        }
    }

    /// Waits at most `timeout` for the process to exit and returns its exit status.
    pub fn wait(&mut self, timeout: Duration) -> Result<ExitStatus, String> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Ok(status),
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Ok(None) => return Err(format!("child {} did not end in time", self.id())),
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    /// Waits at most `timeout` for the process to exit. Fails if the exit status is not success.
    pub fn succeed(&mut self, timeout: Duration) -> Result<(), String> {
        let status = self.wait(timeout)?;
        if status.success() {
            return Ok(());
        }
        while let Ok(line) = self.lines.recv_timeout(Duration::from_millis(500)) {
            self.noise.push_back(line);
        }
        Err(format!(
            "child {} ended with {:?} (signal {:?}): {:#?}",
            self.id(),
            status.code(),
            status.signal(),
            self.noise
        ))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The ranks of a communicator, each in a separate process.
#[derive(Debug)]
pub struct Ranks {
    /// Each rank's process.
    pub processes: Vec<Process>,
    _server: Option<TcpStoreServer>,
}

impl Ranks {
    /// Starts `size` processes that run `role`. The ranks connect by `Communicator::from_env`.
    ///
    /// # Panics
    /// Panics if a process or the store cannot be started.
    pub fn start(
        test: &str,
        role: &str,
        size: u32,
        host: Host,
        environment: &[(&str, String)],
    ) -> Self {
        Self::start_each(test, role, size, host, |_| environment.to_vec())
    }

    /// Starts `size` processes that run `role`. `environment` returns the variables of each rank.
    ///
    /// # Panics
    /// Panics if a process or the store cannot be started.
    pub fn start_each<'a>(
        test: &str,
        role: &str,
        size: u32,
        host: Host,
        environment: impl Fn(u32) -> Vec<(&'a str, String)>,
    ) -> Self {
        let server = (host == Host::Parent)
            .then(|| TcpStoreServer::bind(("127.0.0.1", 0)).expect("a store in the parent"));
        let port = server.as_ref().map_or_else(free_port, TcpStoreServer::port);
        let processes = (0..size)
            .map(|rank| {
                let mut all: Vec<(String, String)> = vec![
                    ("TORCHCOMM_RANK".to_owned(), rank.to_string()),
                    ("TORCHCOMM_SIZE".to_owned(), size.to_string()),
                    ("MASTER_ADDR".to_owned(), "127.0.0.1".to_owned()),
                    ("MASTER_PORT".to_owned(), port.to_string()),
                ];
                if host == Host::Parent {
                    all.push(("TORCHELASTIC_USE_AGENT_STORE".to_owned(), "True".to_owned()));
                }
                all.extend(
                    environment(rank)
                        .into_iter()
                        .map(|(name, value)| (name.to_owned(), value)),
                );
                start(test, role, &all)
            })
            .collect();
        Self {
            processes,
            _server: server,
        }
    }

    /// Waits until all ranks have exited. Fails if the exit status of a rank is not success.
    pub fn succeed(&mut self, timeout: Duration) -> Result<(), String> {
        self.processes
            .iter_mut()
            .enumerate()
            .try_for_each(|(rank, process)| {
                let ended = process.succeed(timeout);
                ended.map_err(|error| format!("rank {rank}: {error}"))
            })
    }
}

/// Returns a port that was free at the time of the call.
///
/// # Panics
/// Panics if no port is free.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    listener.local_addr().expect("its address").port()
}
