//! The number of hardware queues, which the driver libraries read from the environment.
//!
//! Streams share a few hardware queues. Kernels of two streams that share a queue start in
//! sequence. If the first kernel waits for the second, the two kernels deadlock. This can happen
//! when ranks of one process use streams that share a queue.

use core::sync::atomic::{AtomicBool, Ordering};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use crate::gpu::RawStream;

/// Environment variables and values that a process should have before it opens a GPU. A launcher
/// sets the variables that are not set already.
///
/// `CUDA_DEVICE_MAX_CONNECTIONS` is the number of hardware queues of an NVIDIA GPU: 8 by default,
/// at most 32. `GPU_MAX_HW_QUEUES` is the number of hardware queues of an AMD GPU: 4 by default.
/// Both GPUs have this number of queues for each stream priority. Each driver library reads its
/// variable once, when it creates the context of a device. Opening a GPU does not set the
/// variables, for two reasons. Changing the environment while another thread reads it is undefined
/// behaviour, and a C library may read it at any time. The change would also have no effect if
/// another library has already used the GPU. Therefore the launcher or the program sets the
/// variables ([`prepare`]). If a device has more streams of one priority than queues, the library
/// logs a warning.
pub const VARIABLES: &[(&str, &str)] = &[(CUDA_VARIABLE, "32"), (HIP_VARIABLE, "16")];

const CUDA_VARIABLE: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
const HIP_VARIABLE: &str = "GPU_MAX_HW_QUEUES";

/// Sets the variables of [`VARIABLES`] that are not set already. Call this function at the start of
/// `main`, before any use of a GPU.
///
/// # Safety
/// The process must have no other thread. A thread that reads the environment concurrently, in any
/// language, would race with this function.
pub unsafe fn prepare() {
    for (name, value) in VARIABLES {
        if std::env::var_os(name).is_none() {
            // SAFETY: the caller guarantees that the process has no other thread.
            unsafe { std::env::set_var(name, value) };
        }
    }
}

/// The variable of a driver library.
#[derive(Debug)]
pub(crate) struct QueueVariable {
    name: &'static str,
    /// Number of queues if the variable is not set or not valid.
    default: u32,
    /// Largest valid value.
    most: u32,
    /// Set after a warning.
    warned: AtomicBool,
}

#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub(crate) static CUDA: QueueVariable = QueueVariable {
    name: CUDA_VARIABLE,
    default: 8,
    most: 32,
    warned: AtomicBool::new(false),
};

#[cfg_attr(not(feature = "hip"), allow(dead_code))]
pub(crate) static HIP: QueueVariable = QueueVariable {
    name: HIP_VARIABLE,
    default: 4,
    most: 64,
    warned: AtomicBool::new(false),
};

impl QueueVariable {
    /// Returns the number of hardware queues if the variable has the given value.
    fn queues_of(&self, value: Option<&str>) -> u32 {
        value
            .and_then(|value| value.trim().parse().ok())
            .filter(|queues| (1..=self.most).contains(queues))
            .unwrap_or(self.default)
    }

    /// Returns the number of hardware queues that the environment sets.
    pub(crate) fn queues(&self) -> u32 {
        self.queues_of(std::env::var(self.name).ok().as_deref())
    }

    /// Counts a new stream of a device. `priority` is the number that the driver library received.
    /// Logs a warning once if the device has more streams of this priority than hardware queues.
    pub(crate) fn count(&self, streams: &DeviceStreams, stream: RawStream, priority: i32) {
        let streams = streams.add(stream, priority);
        let queues = self.queues();
        if streams > queues && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                streams,
                queues,
                "more streams of one priority than hardware queues: kernels of streams that share \
                 a queue run in sequence, and time out if they wait for each other; use at most \
                 {queues} streams of a priority, or set {} to a larger value (at most {}) before \
                 the process starts",
                self.name,
                self.most
            );
        }
    }
}

/// The streams that a driver object has created, with the numbers of their priorities. Includes the
/// object's own stream: work of another stream in its queue delays aborts.
#[derive(Debug, Default)]
pub(crate) struct DeviceStreams(Mutex<BTreeMap<usize, i32>>);

impl DeviceStreams {
    /// Adds a stream. Returns the number of streams of its priority.
    fn add(&self, stream: RawStream, priority: i32) -> u32 {
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        streams.insert(stream.0, priority);
        let of_priority = streams.values().filter(|other| **other == priority);
        of_priority.count() as u32
    }

    /// Removes a stream.
    pub(crate) fn remove(&self, stream: RawStream) {
        let mut streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        streams.remove(&stream.0);
    }

    /// Returns the number of streams of the priority that has the most.
    #[cfg(all(test, feature = "hip"))]
    pub(crate) fn most(&self) -> u32 {
        let streams = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut counts = BTreeMap::<i32, u32>::new();
        for priority in streams.values() {
            *counts.entry(*priority).or_default() += 1;
        }
        counts.into_values().max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_counted_by_priority() {
        let streams = DeviceStreams::default();
        assert_eq!(streams.add(RawStream(1), 0), 1);
        assert_eq!(streams.add(RawStream(2), -1), 1);
        assert_eq!(streams.add(RawStream(3), -1), 2);
        streams.remove(RawStream(2));
        assert_eq!(streams.add(RawStream(4), -1), 2);
    }

    #[test]
    fn queues_are_what_the_driver_takes() {
        assert_eq!(CUDA.queues_of(None), 8);
        assert_eq!(CUDA.queues_of(Some("32")), 32);
        assert_eq!(CUDA.queues_of(Some("1")), 1);
        for wrong in ["0", "33", "many", ""] {
            assert_eq!(CUDA.queues_of(Some(wrong)), 8, "{wrong}");
        }
        assert_eq!(HIP.queues_of(None), 4);
        for (name, value) in VARIABLES {
            let variable = [&CUDA, &HIP].into_iter().find(|it| it.name == *name);
            let variable = variable.expect("a variable of a library");
            assert_eq!(variable.queues_of(Some(value)).to_string(), *value);
        }
    }
}
