//! The processes below this one, and ending them.

use core::time::Duration;
use std::fs;
use std::thread;
use std::time::Instant;

use crate::launcher;

/// Makes this process the parent of the orphans among its descendants, so that it can end them.
pub(crate) fn adopt_orphans() {
    // SAFETY: this option takes one integer and changes nothing but who becomes a parent.
    unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
}

/// Ends every process below this one: sends SIGTERM, and after `timeout` SIGKILL (a stopped process
/// does not handle SIGTERM). Their exit statuses are lost.
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
            // SAFETY: a null status is allowed; for a process that is no child the call fails
            // without effect.
            unsafe { libc::waitpid(pid, core::ptr::null_mut(), libc::WNOHANG) };
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Stops every process below this one, so that none sees another one end.
pub(crate) fn stop_descendants() {
    for pid in descendants() {
        send(pid, libc::SIGSTOP);
    }
}

fn send(pid: i32, signal: libc::c_int) {
    // SAFETY: the call touches no memory. `pid` was a descendant a moment ago; the id is not used
    // again before its parent, which is this process or another descendant, has waited for it.
    unsafe { libc::kill(pid, signal) };
}

/// Ids of all processes whose chain of parents leads to this one.
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
    // The name is in parentheses and may hold anything; the state and the parent follow.
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(1)?.parse().ok()
}
