//! Filters the system calls of a thread. A system call that is not allowed kills the process with
//! SIGSYS.

use std::io;

/// System calls that a wait for a late peer makes to yield the core and to read the clock.
pub const WAITING: &[i64] = &[
    libc::SYS_sched_yield,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
];

const LOAD_WORD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;

/// Permanently restricts this thread to the system calls in `allowed`. A thread needs system calls
/// to exit. If `allowed` does not contain them, another thread must end the process.
///
/// # Errors
/// Returns the system's error if the kernel does not support seccomp or refuses the filter.
pub fn allow_only(allowed: &[i64]) -> io::Result<()> {
    let instruction = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    // Offset 0 of the filter's data is the number of the system call.
    let mut program = vec![instruction(LOAD_WORD, 0, 0, 0)];
    for call in allowed {
        program.push(instruction(JUMP_EQUAL, 0, 1, *call as u32));
        program.push(instruction(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW));
    }
    program.push(instruction(RETURN, 0, 0, libc::SECCOMP_RET_KILL_PROCESS));
    let filter = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // Leak the program: freeing it could make a system call that the filter does not allow.
    core::mem::forget(program);
    // SAFETY: PR_SET_NO_NEW_PRIVS takes integers and accesses no memory of the process.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `filter` and the leaked program are live during the call, and the kernel copies both.
    let set = unsafe {
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const filter,
            0,
            0,
        )
    };
    if set != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
