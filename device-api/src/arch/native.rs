//! The CPU: a clock, a nap and a trap. Identity and synchronisation of lanes come from
//! [`crate::native`], because on a CPU they are values, not registers.

/// Lanes that run in lock step. A CPU block in production has one lane.
pub const WARP: u32 = 1;

/// Returns the nanoseconds of a monotonic clock with an arbitrary epoch.
#[inline]
pub fn clock_ns() -> u64 {
    #[cfg(any(loom, shuttle))]
    {
        // Time is an explicit input of a model; without it, no time passes.
        crate::mem::model::clock_ns()
    }
    #[cfg(not(any(loom, shuttle)))]
    {
        let mut now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `now` is a valid timespec; CLOCK_MONOTONIC always exists on Linux.
        unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
        now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
    }
}

/// Pauses briefly between two polls of the same word.
#[inline(always)]
pub fn pause() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(shuttle)]
    shuttle::thread::yield_now();
    #[cfg(not(any(loom, shuttle)))]
    core::hint::spin_loop();
}

/// Number of naps of a wait that yield to another thread of this core; later ones sleep.
pub const YIELDS: u32 = 4000;

/// Yields the core for a moment. `round` counts the naps of one wait: the first [`YIELDS`] yield to
/// another thread of this core, later ones sleep 50 microseconds.
#[inline]
pub fn nap(round: u32) {
    #[cfg(any(loom, shuttle))]
    {
        let _ = round;
        pause();
    }
    #[cfg(not(any(loom, shuttle)))]
    if round < YIELDS {
        // SAFETY: sched_yield has no preconditions.
        unsafe { libc::sched_yield() };
    } else {
        let span = libc::timespec {
            tv_sec: 0,
            tv_nsec: 50_000,
        };
        // SAFETY: `span` is valid, and a null remainder is allowed.
        unsafe { libc::nanosleep(&raw const span, core::ptr::null_mut()) };
    }
}

/// Stops the program, if no error can be reported.
#[cold]
pub fn trap() -> ! {
    panic!("fusewire: trap in a kernel")
}

/// Returns the square root, correctly rounded.
#[inline(always)]
pub fn sqrt_f32(value: f32) -> f32 {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_mm_cvtss_f32, _mm_set_ss, _mm_sqrt_ss};
        // SAFETY: SSE is part of every x86-64 CPU.
        unsafe { _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(value))) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        unsafe extern "C" {
            safe fn sqrtf(value: f32) -> f32;
        }
        sqrtf(value)
    }
}

/// Returns `value`, but hides it from the compiler, so that a loop over a few ranks is not
/// vectorised across them.
#[inline(always)]
pub fn opaque(value: u32) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        let out;
        // SAFETY: the template is a comment, so it emits no instruction.
        unsafe {
            core::arch::asm!(
                "/* {0:e} */",
                inout(reg) value => out,
                options(nomem, nostack, preserves_flags, pure),
            );
        }
        out
    }
    #[cfg(not(target_arch = "x86_64"))]
    core::hint::black_box(value)
}
