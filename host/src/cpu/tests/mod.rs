//! Tests of launches, streams, events and graphs, and the kernels and helpers that the tests share.

mod accesses;
mod graph;
mod launch;
mod stream;

use core::sync::atomic::{AtomicU64, Ordering};
use core::time::Duration;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;

use fusewire_device::group::cpu::LaneContext;

use super::{Command, CpuGraphExec, CpuStream, Grid, Launch};
use crate::Error;

const LONG: Duration = Duration::from_secs(20);

#[derive(Clone, Copy)]
#[repr(C)]
struct Params {
    target: *const AtomicU64,
    amount: u64,
}

/// Adds `amount` to `target` in every lane.
unsafe fn add(_: *const LaneContext, params: *const u8) {
    // SAFETY: every test passes a `Params`.
    let Params { target, amount } = unsafe { *params.cast() };
    // SAFETY: the launch keeps `target` alive.
    unsafe { (*target).fetch_add(amount, Ordering::Relaxed) };
}

/// Sets `target` to `target * 3 + amount`, so that the result depends on the order of the launches.
unsafe fn fold(_: *const LaneContext, params: *const u8) {
    // SAFETY: every test passes a `Params`.
    let Params { target, amount } = unsafe { *params.cast() };
    // SAFETY: the launch keeps `target` alive.
    let target = unsafe { &*target };
    let value = target.load(Ordering::Relaxed);
    target.store(
        value.wrapping_mul(3).wrapping_add(amount),
        Ordering::Relaxed,
    );
}

/// Adds with a separate load and store, so that overlapping launches lose additions.
unsafe fn increment(_: *const LaneContext, params: *const u8) {
    // SAFETY: every test passes a `Params`.
    let Params { target, amount } = unsafe { *params.cast() };
    // SAFETY: the launch keeps `target` alive.
    let target = unsafe { &*target };
    let value = target.load(Ordering::Relaxed);
    thread::yield_now();
    target.store(value + amount, Ordering::Relaxed);
}

unsafe fn panics(_: *const LaneContext, _: *const u8) {
    panic!("out of order");
}

type Entry = unsafe fn(*const LaneContext, *const u8);

fn launch_grid(entry: Entry, target: &Arc<AtomicU64>, amount: u64, grid: Grid) -> Launch {
    let words = [Arc::as_ptr(target) as u64, amount];
    // SAFETY: the words have the layout of `Params`, and the launch keeps `target` alive.
    let launch = unsafe { Launch::new(entry, bytemuck::bytes_of(&words), grid) }.unwrap();
    launch.keeping([Some(Arc::clone(target) as _), None, None, None])
}

fn launch(entry: Entry, target: &Arc<AtomicU64>, amount: u64) -> Launch {
    launch_grid(entry, target, amount, Grid::default())
}

fn value(target: &AtomicU64) -> u64 {
    target.load(Ordering::Relaxed)
}

/// Blocks a stream's worker until the returned sender sends a message or is dropped.
fn block(stream: &CpuStream) -> mpsc::Sender<()> {
    let (release, released) = mpsc::channel();
    let released = Mutex::new(released);
    let wait = move || {
        let _ = released.lock().unwrap().recv();
        Ok(())
    };
    stream.enqueue(Command::host(wait)).unwrap();
    release
}

fn failing(text: &'static str) -> Command {
    Command::Host(Arc::new(move || Err(Error::launch(text))))
}

fn capture(stream: &CpuStream, work: impl FnOnce()) -> CpuGraphExec {
    stream.begin_capture().unwrap();
    work();
    stream.end_capture().unwrap().instantiate().unwrap()
}
