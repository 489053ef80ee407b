//! Properties of the machine that every run measures: the latency of a cache-line ping-pong and
//! memory bandwidth.

use core::hint::spin_loop;
use core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Barrier;
use std::time::Instant;
use std::{fs, io, thread};

use anyhow::{Context, Result};

use crate::reduce;

/// Threshold of the one-way ping-pong time, in ns. If the time is shorter, the two cores share a
/// last-level cache. Only results that were measured while the time was shorter count.
pub(crate) const NEAR_NS: f64 = 100.0;

/// Returns the cores that this process may use.
pub(crate) fn cores() -> Result<Vec<usize>> {
    // SAFETY: zero bytes are a valid cpu_set_t, and the call writes at most as many bytes as the
    // set has.
    let set = unsafe {
        let mut set: libc::cpu_set_t = core::mem::zeroed();
        if libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) != 0 {
            return Err(io::Error::last_os_error()).context("sched_getaffinity");
        }
        set
    };
    let allowed = |core: &usize| {
        // SAFETY: `core` is below CPU_SETSIZE by the range.
        unsafe { libc::CPU_ISSET(*core, &set) }
    };
    Ok((0..libc::CPU_SETSIZE as usize).filter(allowed).collect())
}

/// Pins the calling thread to `core`.
pub(crate) fn pin(core: usize) -> Result<()> {
    // SAFETY: zero bytes are a valid cpu_set_t, and the call reads at most as many bytes as the set
    // has.
    let result = unsafe {
        let mut set: libc::cpu_set_t = core::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if result != 0 {
        return Err(io::Error::last_os_error()).with_context(|| format!("pin to core {core}"));
    }
    Ok(())
}

/// Returns the model name of the processor.
pub(crate) fn processor() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        text.lines()
            .filter_map(|line| line.split_once(':'))
            .find(|(key, _)| key.trim() == name)
            .map_or("?", |(_, value)| value.trim())
    };
    format!(
        "{}, family {}, model {}",
        field("model name"),
        field("cpu family"),
        field("model")
    )
}

/// Returns the version of the operating system's kernel.
pub(crate) fn kernel() -> String {
    let text = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    text.trim().to_owned()
}

#[repr(align(128))]
struct Line(AtomicU64);

/// Returns the one-way time in ns of a ping-pong between the first two cores. Each core writes its
/// own cache line.
pub(crate) fn ping_pong(cores: &[usize]) -> Option<f64> {
    const TURNS: u64 = 20_000;
    const TRIES: usize = 5;
    let &[first, second, ..] = cores else {
        return None;
    };
    let (ping, pong) = (Line(AtomicU64::new(0)), Line(AtomicU64::new(0)));
    let wait = |line: &Line, value| {
        while line.0.load(Ordering::Acquire) < value {
            spin_loop();
        }
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = pin(second);
            for turn in 1..=TURNS * TRIES as u64 {
                wait(&ping, turn);
                pong.0.store(turn, Ordering::Release);
            }
        });
        let times = scope.spawn(|| {
            let _ = pin(first);
            let mut times = [0.0; TRIES];
            let mut turn = 0;
            for time in &mut times {
                let start = Instant::now();
                for _ in 0..TURNS {
                    turn += 1;
                    ping.0.store(turn, Ordering::Release);
                    wait(&pong, turn);
                }
                *time = start.elapsed().as_nanos() as f64 / (2 * TURNS) as f64;
            }
            times
        });
        let mut times = times.join().ok()?;
        times.sort_unstable_by(f64::total_cmp);
        Some(times[TRIES / 2])
    })
}

/// Rate of a memory operation in GB/s, with one and with two threads. Counts the bytes copied, or
/// the bytes of `b` in `b += a`, over all threads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rate {
    pub(crate) name: &'static str,
    pub(crate) one: f64,
    pub(crate) two: f64,
}

/// Measures memory rates with one thread, and with two threads on two cores.
pub(crate) fn memory_rates(cores: &[usize]) -> Vec<Rate> {
    let copy = |from: &[f32], to: &mut [f32]| to.copy_from_slice(from);
    let add = |from: &[f32], to: &mut [f32]| reduce::add(from, to);
    let rate = |name, bytes, work: fn(&[f32], &mut [f32])| Rate {
        name,
        one: throughput(&cores[..1], bytes, work),
        two: throughput(&cores[..cores.len().min(2)], bytes, work),
    };
    vec![
        rate("copy of 64 MiB", 64 << 20, copy),
        rate("b += a, f32, 64 MiB", 64 << 20, add),
        rate("copy of 1 MiB", 1 << 20, copy),
        rate("copy of 64 KiB", 64 << 10, copy),
    ]
}

fn throughput(cores: &[usize], bytes: usize, work: fn(&[f32], &mut [f32])) -> f64 {
    let turns = ((256 << 20) / bytes).clamp(4, 1000);
    let start = Barrier::new(cores.len());
    thread::scope(|scope| {
        let threads: Vec<_> = cores
            .iter()
            .map(|&core| {
                let start = &start;
                scope.spawn(move || {
                    let _ = pin(core);
                    let from = vec![1.0f32; bytes / 4];
                    let mut to = vec![2.0f32; bytes / 4];
                    work(&from, &mut to);
                    start.wait();
                    let clock = Instant::now();
                    for _ in 0..turns {
                        work(&from, core::hint::black_box(&mut to));
                    }
                    (turns * bytes) as f64 / clock.elapsed().as_nanos() as f64
                })
            })
            .collect();
        threads
            .into_iter()
            .filter_map(|thread| thread.join().ok())
            .sum()
    })
}
