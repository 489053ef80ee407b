//! Timestamps that take a few nanoseconds each.

use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// Returns a count that grows with time. [`TickConverter`] measures its rate.
#[inline]
pub(crate) fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    {
        // SAFETY: every x86-64 processor has the counter, and Linux lets processes read it.
        unsafe { core::arch::x86_64::_rdtsc() }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        static START: OnceLock<Instant> = OnceLock::new();
        START.get_or_init(Instant::now).elapsed().as_nanos() as u64
    }
}

#[derive(Clone, Copy)]
struct Mark {
    ticks: u64,
    at: Instant,
    unix_ns: u64,
}

impl Mark {
    fn now() -> Self {
        Self {
            ticks: ticks(),
            at: Instant::now(),
            unix_ns: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_nanos() as u64),
        }
    }
}

static FIRST: OnceLock<Mark> = OnceLock::new();

/// Records the first pair of count and date. Called when a recorder is created.
pub(crate) fn start() {
    FIRST.get_or_init(Mark::now);
}

/// Converts counts to nanoseconds since 1970.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TickConverter {
    ticks: u64,
    unix_ns: u64,
    ns_per_tick: f64,
}

impl TickConverter {
    /// Measures the rate between the first mark and now.
    pub(crate) fn new() -> Self {
        let first = *FIRST.get_or_init(Mark::now);
        let mut now = Mark::now();
        // A rate over less than a millisecond would have an error of several percent.
        while now.at.duration_since(first.at).as_micros() < 1000 {
            now = Mark::now();
        }
        let ns = now.at.duration_since(first.at).as_nanos() as f64;
        Self {
            ticks: now.ticks,
            unix_ns: now.unix_ns,
            ns_per_tick: ns / (now.ticks.wrapping_sub(first.ticks)).max(1) as f64,
        }
    }

    /// Returns the nanoseconds from a count to the time of this converter.
    pub(crate) fn since(&self, ticks: u64) -> u64 {
        self.unix_ns.saturating_sub(self.of(ticks))
    }

    /// Returns the date of a count, in nanoseconds since 1970.
    pub(crate) fn of(&self, ticks: u64) -> u64 {
        let distance = self.ticks.wrapping_sub(ticks) as i64;
        self.unix_ns
            .saturating_add_signed(-((distance as f64 * self.ns_per_tick) as i64))
    }
}
