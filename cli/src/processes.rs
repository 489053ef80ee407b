//! Finds and ends the descendants of this process.

use core::fmt;
use core::sync::atomic::{AtomicI32, Ordering};
use core::time::Duration;
use std::fs;
use std::io::{ErrorKind, Write};
use std::thread;
use std::time::Instant;

/// Installs `handler`, which must be async-signal-safe, for `signal`. Does nothing if this process
/// was started with `signal` ignored, as by `nohup`.
pub(crate) fn catch(signal: libc::c_int, handler: extern "C" fn(libc::c_int)) {
    // SAFETY: `libc::signal` refuses invalid signals, and `handler` is async-signal-safe, as this
    // function requires.
    unsafe {
        let before = libc::signal(signal, handler as *const () as libc::sighandler_t);
        if before == libc::SIG_IGN {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
}

/// Writes a line to stderr. Ignores errors, because stderr may be closed.
pub(crate) fn say(message: fmt::Arguments<'_>) {
    let _ = std::io::stderr().write_all(format!("fusewire: {message}\n").as_bytes());
}

/// Makes this process the parent of descendants that become orphans, so that it can end them.
fn adopt_orphans() {
    // SAFETY: `PR_SET_CHILD_SUBREAPER` takes one integer, and only changes which process becomes
    // the parent of orphans.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
}

/// The process that [`continue_in_child`] has started, or 0.
static CHILD: AtomicI32 = AtomicI32::new(0);

/// Sends a signal to [`CHILD`], whose end then ends this process.
extern "C" fn forward(signal: libc::c_int) {
    // SAFETY: `kill` is async-signal-safe and accesses no memory. The system cannot reuse the id
    // before this process has waited for the child, with the signals blocked.
    unsafe { libc::kill(CHILD.load(Ordering::Relaxed), signal) };
}

/// Continues the program in a child of this process. This process only passes `signals` on, and
/// ends with the status of the child. If it is killed, the child finds it by [`Guard::is_gone`]. If
/// the child is killed, this process ends all its descendants. So one of the two ends the
/// descendants, unless both are killed.
///
/// # Safety
/// This process must have no other threads.
pub(crate) unsafe fn continue_in_child(signals: &[libc::c_int]) -> std::io::Result<Guard> {
    adopt_orphans();
    // Otherwise the system would discard the status of the child.
    // SAFETY: `SIG_DFL` is a valid action.
    unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) };
    let guard = Guard(std::process::id());
    // Signals that arrive before the child can get them wait.
    let blocked = SignalMask::block(signals);
    // SAFETY: no other thread exists whose locks the child would lack.
    match unsafe { libc::fork() } {
        -1 => Err(std::io::Error::last_os_error()),
        0 => {
            drop(blocked);
            adopt_orphans();
            Ok(guard)
        }
        child => {
            CHILD.store(child, Ordering::Relaxed);
            for signal in signals {
                catch(*signal, forward);
            }
            drop(blocked);
            let status = status_of(child);
            // From here on, `forward` would send to an id that the system may use again.
            core::mem::forget(SignalMask::block(signals));
            end_descendants(Duration::ZERO);
            std::process::exit(status)
        }
    }
}

/// Waits for the end of a child, which stays a zombie. Returns its exit status, or 128 + signal.
fn status_of(child: i32) -> i32 {
    loop {
        // SAFETY: a zeroed value is valid, and valid during the call.
        let (waited, info) = unsafe {
            let mut info: libc::siginfo_t = core::mem::zeroed();
            let options = libc::WEXITED | libc::WNOWAIT;
            let waited = libc::waitid(libc::P_PID, child as u32, &raw mut info, options);
            (waited, info)
        };
        if waited == 0 {
            // SAFETY: `waitid` has filled the fields of a child.
            let status = unsafe { info.si_status() };
            return match info.si_code {
                libc::CLD_EXITED => status,
                _ => 128 + status,
            };
        }
        if std::io::Error::last_os_error().kind() != ErrorKind::Interrupted {
            return 1;
        }
    }
}

/// The process that waits for this one after [`continue_in_child`].
pub(crate) struct Guard(u32);

impl Guard {
    /// Returns true if the process has ended.
    pub(crate) fn is_gone(&self) -> bool {
        std::os::unix::process::parent_id() != self.0
    }
}

/// Signals that are blocked until the value is dropped.
struct SignalMask(libc::sigset_t);

impl SignalMask {
    fn block(signals: &[libc::c_int]) -> Self {
        // SAFETY: a zeroed set is a valid value, and all sets are valid during the calls.
        unsafe {
            let mut set = core::mem::zeroed();
            let mut before = core::mem::zeroed();
            libc::sigemptyset(&raw mut set);
            for signal in signals {
                libc::sigaddset(&raw mut set, *signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, &raw mut before);
            Self(before)
        }
    }
}

impl Drop for SignalMask {
    fn drop(&mut self) {
        // SAFETY: the set is valid; the previous set is not wanted.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, core::ptr::null_mut())
        };
    }
}

/// Ends every descendant of this process. Sends SIGTERM and, after `timeout`, SIGKILL, because a
/// stopped process does not handle SIGTERM. Discards the exit statuses.
pub(crate) fn end_descendants(timeout: Duration) {
    let started = Instant::now();
    let mut asked = Vec::new();
    loop {
        let alive = descendants();
        if alive.is_empty() {
            return;
        }
        let late = started.elapsed() > timeout;
        if started.elapsed() > timeout + Duration::from_secs(5) {
            say(format_args!("processes {alive:?} cannot be ended"));
            return;
        }
        for pid in alive {
            if late {
                send(pid, libc::SIGKILL);
            } else if !asked.contains(&pid) {
                send(pid, libc::SIGTERM);
                asked.push(pid);
            }
            // SAFETY: `waitpid` accepts a null status pointer. If `pid` is not a child of this
            // process, the call fails without effect.
            unsafe { libc::waitpid(pid, core::ptr::null_mut(), libc::WNOHANG) };
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Stops every descendant of this process, so that no descendant observes that another one ends.
pub(crate) fn stop_descendants() {
    for pid in descendants() {
        send(pid, libc::SIGSTOP);
    }
}

fn send(pid: i32, signal: libc::c_int) {
    // SAFETY: the call accesses no memory. `pid` was a descendant when the list was read. The
    // system reuses the id only after the parent, which is this process or another descendant, has
    // waited for the process.
    unsafe { libc::kill(pid, signal) };
}

/// Returns the ids of all processes whose chain of parents leads to this process.
fn descendants() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else {
        return Vec::new();
    };
    let parents: Vec<(i32, i32)> = entries
        .flatten()
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            Some((pid, parent(pid)?))
        })
        .collect();
    let mut found = vec![std::process::id() as i32];
    let mut next = 0;
    while next < found.len() {
        let above = found[next];
        found.extend(
            parents
                .iter()
                .filter(|(_, parent)| *parent == above)
                .map(|(pid, _)| *pid),
        );
        next += 1;
    }
    found.split_off(1)
}

fn parent(pid: i32) -> Option<i32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of the program is in parentheses and may contain any characters. The state and the
    // parent follow the last parenthesis.
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(1)?.parse().ok()
}
