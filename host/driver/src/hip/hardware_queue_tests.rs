//! Tests of streams that share hardware queues, on the fake of the runtime.

use core::ffi::c_void;
use core::ptr;
use std::process::Command;

use super::device::Hip;
use super::fake;
use crate::environment::{HIP, VARIABLES};
use crate::gpu::{
    CopyDriver, EventDriver, LaunchShape, MemoryDriver, MemoryKind, ModuleDriver, RawStream,
    StreamDriver, StreamPriority,
};

const IMAGE: &[u8] = include_bytes!("fixtures/vocab-argmax-gfx942.co");
/// Variable with the number of queues that a child process expects.
const EXPECTED: &str = "FUSEWIRE_TEST_HARDWARE_QUEUES";

/// A GPU, and a word on which kernels wait.
struct Gpu {
    hip: Hip,
    word: u64,
}

impl Gpu {
    /// Opens a GPU with `queues` hardware queues per priority. `None` selects the number that the
    /// environment sets.
    fn open(queues: Option<u32>) -> Self {
        fake::with(|state| state.queues.borrow_mut().per_priority = queues);
        let hip = Hip::open(&fake::FUNCTIONS, 0).unwrap();
        let word = hip.allocate(4, MemoryKind::Shared).unwrap().address;
        Self { hip, word }
    }

    /// Creates a stream, and launches a kernel on it that runs until the word is not 0.
    fn launch(&self, priority: StreamPriority) -> RawStream {
        let stream = self.hip.create_stream(priority).unwrap();
        let module = self.hip.load(IMAGE).unwrap();
        let function = self.hip.function(module, c"vocab_argmax").unwrap().unwrap();
        let mut argument = 1_u32;
        let mut arguments = [ptr::from_mut(&mut argument).cast::<c_void>()];
        let shape = LaunchShape {
            blocks: 1,
            threads: 64,
            ..LaunchShape::default()
        };
        fake::with(|state| state.kernels_poll.set(self.word as usize));
        // SAFETY: the fake reads one u32, which `arguments` points to.
        unsafe { self.hip.launch(function, &shape, &mut arguments, stream) }.unwrap();
        fake::with(|state| state.kernels_poll.set(0));
        stream
    }

    /// Sets the word by a copy, as an abort does.
    fn abort(&self) -> crate::Result<()> {
        // SAFETY: the allocation contains the word.
        unsafe { self.hip.write(self.word, &1_u32.to_ne_bytes()) }
    }
}

/// Runs one kernel on each of `kernels` streams of a priority, and aborts them. Returns true if the
/// abort has stopped all kernels, and the largest number of streams of one priority.
fn abort(queues: Option<u32>, priority: StreamPriority, kernels: u32) -> (bool, u32) {
    // The fake has separate state on each thread.
    std::thread::spawn(move || {
        let gpu = Gpu::open(queues);
        let streams: Vec<_> = (0..kernels).map(|_| gpu.launch(priority)).collect();
        let is_idle = |stream: &RawStream| gpu.hip.query_stream(*stream).unwrap();
        assert!(!streams.iter().any(is_idle), "the kernels wait");
        let has_stopped = match gpu.abort() {
            Ok(()) => streams.iter().all(is_idle),
            Err(error) => {
                assert!(error.to_string().contains("(702)"), "{error}");
                false
            }
        };
        (has_stopped, gpu.hip.streams.most())
    })
    .join()
    .unwrap()
}

/// The number of queues that the library's launchers set.
fn advised() -> u32 {
    let variable = VARIABLES
        .iter()
        .find(|(name, _)| *name == "GPU_MAX_HW_QUEUES");
    variable.unwrap().1.parse().unwrap()
}

#[test]
fn an_abort_does_not_wait_for_kernels_of_normal_streams() {
    for queues in [1, 4, advised()] {
        for kernels in [1, 4, 5, 40] {
            let (has_stopped, _) = abort(Some(queues), StreamPriority::Normal, kernels);
            assert!(has_stopped, "{queues} queues, {kernels} kernels");
        }
    }
}

/// HIP has one priority above the default, so streams of high priority share the queues of the copy
/// stream. With too few queues, the abort waits for a kernel that it must stop (negative control),
/// and the library warns.
#[test]
fn an_abort_waits_for_kernels_of_high_streams_only_after_a_warning() {
    for queues in [1, 4, advised()] {
        for kernels in [1, queues.max(2) - 1, queues, queues + 1] {
            let (has_stopped, streams) = abort(Some(queues), StreamPriority::High, kernels);
            let warns = streams > queues;
            assert_eq!(has_stopped, !warns, "{queues} queues, {kernels} kernels");
            assert_eq!(has_stopped, kernels < queues);
        }
    }
}

#[test]
fn work_waits_for_earlier_work_of_other_streams_in_its_queue() {
    let gpu = Gpu::open(Some(4));
    let waiting: Vec<_> = (0..4).map(|_| gpu.launch(StreamPriority::Normal)).collect();
    let fifth = gpu.hip.create_stream(StreamPriority::Normal).unwrap();
    let event = gpu.hip.create_event(false).unwrap();
    gpu.hip.record_event(event, fifth).unwrap();
    // The copy stream has a queue of another priority.
    let copies = gpu.hip.create_stream(StreamPriority::Highest).unwrap();
    assert!(gpu.hip.query_stream(copies).unwrap());
    gpu.hip.wait_event(copies, event).unwrap();
    for stream in [fifth, copies, waiting[0]] {
        assert!(!gpu.hip.query_stream(stream).unwrap());
        gpu.hip.synchronize_stream(stream).unwrap_err();
    }
    assert!(!gpu.hip.query_event(event).unwrap());
    gpu.abort().unwrap();
    assert!(gpu.hip.query_event(event).unwrap());
    for stream in waiting.into_iter().chain([fifth, copies]) {
        gpu.hip.synchronize_stream(stream).unwrap();
    }
}

#[test]
fn the_environment_sets_the_number_of_queues() {
    const TEST: &str = "hip::hardware_queue_tests::the_environment_sets_the_number_of_queues";
    if let Ok(expected) = std::env::var(EXPECTED) {
        let expected: u32 = expected.parse().unwrap();
        assert_eq!(HIP.queues(), expected);
        // One of the queues has the copy stream.
        assert!(abort(None, StreamPriority::High, expected - 1).0);
        assert!(!abort(None, StreamPriority::High, expected).0);
        return;
    }
    let advised = advised().to_string();
    for (value, queues) in [(None, "4"), (Some("1"), "1"), (Some(&*advised), &*advised)] {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([TEST, "--exact"]).env(EXPECTED, queues);
        match value {
            Some(value) => child.env("GPU_MAX_HW_QUEUES", value),
            None => child.env_remove("GPU_MAX_HW_QUEUES"),
        };
        let output = child.output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
}
