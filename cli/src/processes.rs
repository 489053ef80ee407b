//! Finds and ends the descendants of this process.

use core::time::Duration;
use std::fs;
use std::thread;
use std::time::Instant;

use crate::launcher;

/// Makes this process the parent of descendants that become orphans, so that it can end them.
pub(crate) fn adopt_orphans() {
    // SAFETY: `PR_SET_CHILD_SUBREAPER` takes one integer, and only changes which process becomes
    // the parent of orphans.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
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
            launcher::say(format_args!("processes {alive:?} cannot be ended"));
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
