//! Identity and liveness of other processes on this host.

use std::fs;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// The bit `PF_EXITING` of the kernel's process flags (proc(5), include/linux/sched.h).
const EXITING: u64 = 4;

/// Returns the start time of a process, in clock ticks since boot: field 22 of `/proc/<pid>/stat`.
/// The start time distinguishes a process from a later process with the same id.
pub fn start_time(pid: u32) -> io::Result<u64> {
    Ok(status(pid)?.start_time)
}

/// Returns the id of the process's parent, or 0 if the parent is in another PID namespace.
pub fn parent(pid: u32) -> io::Result<u32> {
    Ok(status(pid)?.parent)
}

/// Returns true if the process with this id and start time has ended, according to `/proc`.
pub fn has_ended(pid: u32, start_time: u64) -> bool {
    match status(pid) {
        Ok(found) => found.has_ended() || found.start_time != start_time,
        // Other errors, such as a lack of file descriptors, do not show that the process has ended.
        Err(error) => says_gone(&error),
    }
}

/// Returns true if no process with this id runs, according to `/proc`.
pub fn is_gone(pid: u32) -> bool {
    match status(pid) {
        Ok(found) => found.has_ended(),
        Err(error) => says_gone(&error),
    }
}

/// Returns true if the process with this id and start time has ended or is exiting. The kernel sets
/// `PF_EXITING` first, then closes the descriptors of the process, and only then ends the process.
pub fn is_ending(pid: u32, start_time: u64) -> bool {
    has_ended(pid, start_time) || status(pid).is_ok_and(|found| found.flags & EXITING != 0)
}

/// Returns true if an error from [`start_time`] means that the process does not exist.
pub fn says_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

/// Returns a descriptor that becomes readable when the process ends, or `None` if the process does
/// not exist or the system does not support `pidfd_open`.
pub fn descriptor(pid: u32) -> Option<OwnedFd> {
    // SAFETY: `pidfd_open` takes two integers and accesses no memory of this process.
    let descriptor = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let descriptor = i32::try_from(descriptor).ok().filter(|fd| *fd >= 0)?;
    // SAFETY: the system call returned a new descriptor, which nothing else owns.
    Some(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Fields of `/proc/<pid>/stat`.
struct Status {
    state: u8,
    parent: u32,
    flags: u64,
    start_time: u64,
}

impl Status {
    /// Returns true if the process is dead or a zombie. A zombie is a process that has exited but
    /// whose parent has not waited for it.
    fn has_ended(&self) -> bool {
        matches!(self.state, b'Z' | b'X')
    }
}

/// Parses fields 3, 4, 9 and 22 of `/proc/<pid>/stat`. Starts after the last `)`, because field 2,
/// the command name, may contain blanks and parentheses.
fn status(pid: u32) -> io::Result<Status> {
    let stat = fs::read(format!("/proc/{pid}/stat"))?;
    let name_end = stat.iter().rposition(|byte| *byte == b')');
    let rest = name_end
        .and_then(|end| stat.get(end + 1..))
        .unwrap_or_default();
    let rest = String::from_utf8_lossy(rest);
    // Field 3 is the first one after the name.
    let fields: Vec<_> = rest.split_ascii_whitespace().collect();
    let number = |field: usize| {
        fields
            .get(field - 3)
            .and_then(|text| text.parse::<u64>().ok())
    };
    let state = fields.first().and_then(|text| text.bytes().next());
    state
        .zip(number(4).zip(number(9).zip(number(22))))
        .map(|(state, (parent, (flags, start_time)))| Status {
            state,
            // Process ids are less than 2^22.
            parent: parent as u32,
            flags,
            start_time,
        })
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "the process has no start time"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_distinguished_from_others_and_from_its_end() {
        let own = std::process::id();
        let start = start_time(own).unwrap();
        assert!(!has_ended(own, start) && !is_ending(own, start));
        assert!(has_ended(own, start + 1));
        assert!(has_ended(u32::MAX / 2, start));
        assert!(!is_gone(own) && is_gone(u32::MAX / 2));
        assert!(says_gone(&start_time(u32::MAX / 2).unwrap_err()));

        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = child.id();
        let start = start_time(pid).unwrap();
        assert_eq!(parent(pid).unwrap(), own);
        assert!(!has_ended(pid, start) && !is_gone(pid));
        child.kill().unwrap();
        let begin = std::time::Instant::now();
        // The test has not called `wait` for the child, so the child remains a zombie.
        while !has_ended(pid, start) {
            assert!(begin.elapsed().as_secs() < 10);
            std::thread::yield_now();
        }
        assert!(is_ending(pid, start) && is_gone(pid));
        child.wait().unwrap();
        assert!(has_ended(pid, start) && is_ending(pid, start));
    }
}
