//! Emulated devices with memory of their own, for programs without a driver.

use core::sync::atomic::{AtomicU64, Ordering};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::launch::{Counts, Launch};
use crate::machine::{Config, Machine};
use crate::memory::{Memory, Range, Replica};
use crate::module::{LoadedModule, Module};
use crate::stream::StreamOperation;

/// Alignment of buffers in bytes, as of the CUDA driver.
const ALIGNMENT: usize = 256;
/// Start of the addresses of multicast objects. No process has memory there.
const OBJECTS: u64 = 0x00e0_0000_0000_0000;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory of all devices. Each device may access the memory of all others.
#[derive(Debug, Default)]
struct Arena {
    state: Mutex<State>,
    removed: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// End address and device of each buffer, by start address.
    buffers: BTreeMap<u64, (u64, u32)>,
    /// End address of each multicast object and the start addresses of its buffers, by start
    /// address.
    objects: BTreeMap<u64, (u64, Vec<u64>)>,
    /// End addresses of buffers that were dropped, by start address.
    freed: BTreeMap<u64, u64>,
    /// Number of calls of [`Gpus::keep`] that are running.
    running: u32,
    /// Memory of buffers that were dropped while kernels were running.
    dropped: Vec<Box<[AtomicU64]>>,
}

// SAFETY: the ranges are those of buffers. The memory of a buffer is freed only while no kernel is
// running. All accesses are atomic.
unsafe impl Memory for Arena {
    fn range(&self, _device: u32, address: u64) -> Option<Range> {
        let state = lock(&self.state);
        let within = |(_, end): &(&u64, u64)| address < *end;
        let range = |start: u64, end: u64| Range {
            start,
            end,
            read: true,
            write: true,
            multicast: false,
            owner: None,
            memory: start,
            offset: 0,
        };
        if address >= OBJECTS {
            let (start, (end, _)) = state.objects.range(..=address).next_back()?;
            let (start, end) = Some((start, *end)).filter(within)?;
            return Some(Range {
                multicast: true,
                ..range(*start, end)
            });
        }
        let (start, (end, owner)) = state.buffers.range(..=address).next_back()?;
        let (start, end) = Some((start, *end)).filter(within)?;
        Some(Range {
            owner: Some(*owner),
            ..range(*start, end)
        })
    }

    fn describe(&self, _device: u32, address: u64) -> Option<String> {
        let state = lock(&self.state);
        let (_, end) = state.freed.range(..=address).next_back()?;
        (address < *end).then(|| "the buffer of this address was dropped".to_owned())
    }

    fn generation(&self) -> u64 {
        self.removed.load(Ordering::Acquire)
    }

    fn hold(&self, slice: &mut dyn FnMut()) {
        // `State::dropped` keeps the memory of dropped buffers.
        slice();
    }

    fn replicas(&self, _: u32, address: u64, _: u64) -> core::result::Result<Vec<Replica>, String> {
        let state = lock(&self.state);
        let found = state.objects.range(..=address).next_back();
        let Some((start, (end, buffers))) = found.filter(|(_, (end, _))| address < *end) else {
            return Err(format!("{address:#x} is not in a multicast object"));
        };
        let replica = |buffer: &u64| {
            let is_live = state
                .buffers
                .get(buffer)
                .is_some_and(|(it, _)| it - buffer == end - start);
            let offset = address - start;
            is_live
                .then_some(Replica {
                    address: buffer + offset,
                    memory: *buffer,
                    offset,
                })
                .ok_or_else(|| {
                    format!("a buffer of the multicast object at {start:#x} was dropped")
                })
        };
        buffers.iter().map(replica).collect()
    }
}

/// Memory of an emulated device. The contents are accessed with atomic operations, so a buffer may
/// be read and written while kernels are running.
#[derive(Debug)]
pub struct Buffer {
    words: Box<[AtomicU64]>,
    /// Number of words before the first aligned address.
    skip: usize,
    bytes: usize,
    arena: Arc<Arena>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let start = self.address();
        let mut state = lock(&self.arena.state);
        if let Some((end, _)) = state.buffers.remove(&start) {
            state.freed.insert(start, end);
        }
        self.arena.removed.fetch_add(1, Ordering::Release);
        if state.running > 0 {
            state.dropped.push(core::mem::take(&mut self.words));
        }
    }
}

impl Buffer {
    /// Returns the address of the buffer for kernels.
    pub fn address(&self) -> u64 {
        self.words.as_ptr().wrapping_add(self.skip) as u64
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Returns true if the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Returns the bytes of the buffer.
    pub fn read(&self) -> Vec<u8> {
        let words = self.words[self.skip..].iter();
        let bytes = words.flat_map(|word| word.load(Ordering::Acquire).to_le_bytes());
        bytes.take(self.bytes).collect()
    }

    /// Returns the contents as little-endian 32-bit numbers. Ignores an incomplete last number.
    pub fn read_u32(&self) -> Vec<u32> {
        let bytes = self.read();
        let words = bytes.as_chunks::<4>().0.iter();
        words.map(|bytes| u32::from_le_bytes(*bytes)).collect()
    }

    /// Replaces the bytes of the buffer.
    ///
    /// # Panics
    /// Panics if the length of `bytes` differs from that of the buffer.
    pub fn write(&self, bytes: &[u8]) {
        assert_eq!(
            bytes.len(),
            self.bytes,
            "the length differs from that of the buffer"
        );
        for (word, bytes) in self.words[self.skip..].iter().zip(bytes.chunks(8)) {
            let mut all = [0; 8];
            all[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_le_bytes(all), Ordering::Release);
        }
    }
}

/// A multicast object of [`Gpus::multicast`].
#[derive(Debug)]
pub struct Multicast {
    address: u64,
    arena: Arc<Arena>,
}

impl Multicast {
    /// Returns the address of the object for `multimem` instructions.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Multicast {
    fn drop(&mut self) {
        lock(&self.arena.state).objects.remove(&self.address);
        self.arena.removed.fetch_add(1, Ordering::Release);
    }
}

/// An argument of a kernel.
#[derive(Clone, Debug, PartialEq)]
pub struct Arg(Vec<u8>);

macro_rules! numbers {
    ($($type:ty),*) => {$(
        impl From<$type> for Arg {
            fn from(value: $type) -> Self {
                Self(value.to_le_bytes().to_vec())
            }
        }
    )*};
}

numbers!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

impl From<&Buffer> for Arg {
    fn from(buffer: &Buffer) -> Self {
        buffer.address().into()
    }
}

impl From<&Multicast> for Arg {
    fn from(object: &Multicast) -> Self {
        object.address().into()
    }
}

impl From<&[u8]> for Arg {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.to_vec())
    }
}

/// A launch of a kernel on a device of [`Gpus`].
#[derive(Clone, Debug)]
pub struct Kernel {
    module: Arc<Module>,
    launch: Launch,
    args: Vec<Arg>,
}

impl Kernel {
    /// Describes a launch of the kernel `name` of a module: one block of one thread on device 0.
    pub fn new(module: &Arc<Module>, name: &str) -> Self {
        Self {
            module: Arc::clone(module),
            launch: Launch {
                kernel: name.to_owned(),
                device: 0,
                blocks: [1; 3],
                threads: [1; 3],
                dynamic_shared: 0,
                params: Vec::new(),
                cost: 1,
            },
            args: Vec::new(),
        }
    }

    /// Sets the device.
    pub fn device(mut self, device: u32) -> Self {
        self.launch.device = device;
        self
    }

    /// Sets the number of blocks.
    pub fn blocks(self, count: u32) -> Self {
        self.grid([count, 1, 1])
    }

    /// Sets the numbers of blocks in each dimension.
    pub fn grid(mut self, blocks: [u32; 3]) -> Self {
        self.launch.blocks = blocks;
        self
    }

    /// Sets the number of threads of a block.
    pub fn threads(self, count: u32) -> Self {
        self.block([count, 1, 1])
    }

    /// Sets the numbers of threads of a block in each dimension.
    pub fn block(mut self, threads: [u32; 3]) -> Self {
        self.launch.threads = threads;
        self
    }

    /// Sets the size of the dynamic shared memory of a block in bytes.
    pub fn dynamic_shared(mut self, bytes: u32) -> Self {
        self.launch.dynamic_shared = bytes;
        self
    }

    /// Adds an argument.
    pub fn arg(mut self, value: impl Into<Arg>) -> Self {
        self.args.push(value.into());
        self
    }
}

/// Emulated GPUs with memory. Each device may access the memory of all others.
///
/// The type [`Machine`] executes the kernels; this type adds memory, so that a test needs neither a
/// driver nor unsafe code.
#[derive(Debug)]
pub struct Gpus {
    arena: Arc<Arena>,
    machine: Machine,
    loaded: Mutex<HashMap<(usize, u32), Arc<LoadedModule>>>,
}

impl Default for Gpus {
    fn default() -> Self {
        Self::new(Config::default())
    }
}

impl Gpus {
    /// Creates emulated GPUs.
    pub fn new(config: Config) -> Self {
        let arena = Arc::new(Arena::default());
        Self {
            machine: Machine::new(config, Arc::clone(&arena) as Arc<dyn Memory>),
            arena,
            loaded: Mutex::default(),
        }
    }

    /// Allocates memory of a device, filled with zeros. The address is a multiple of 256.
    pub fn allocate(&self, device: u32, bytes: usize) -> Buffer {
        let words = bytes.div_ceil(8) + ALIGNMENT / 8;
        let words: Box<[AtomicU64]> = (0..words).map(|_| AtomicU64::new(0)).collect();
        let misaligned = words.as_ptr() as usize % ALIGNMENT;
        let skip = (ALIGNMENT - misaligned) % ALIGNMENT / 8;
        let buffer = Buffer {
            words,
            skip,
            bytes,
            arena: Arc::clone(&self.arena),
        };
        let start = buffer.address();
        let end = start + bytes as u64;
        let mut state = lock(&self.arena.state);
        state.freed.retain(|from, to| *to <= start || *from >= end);
        state.buffers.insert(start, (end, device));
        drop(state);
        buffer
    }

    /// Creates a multicast object: `multimem` instructions with an address of it access all
    /// buffers, in the order of the list.
    ///
    /// # Panics
    /// Panics if there are no buffers, if they differ in size, or if they are those of other
    /// [`Gpus`].
    pub fn multicast(&self, buffers: &[&Buffer]) -> Multicast {
        let bytes = buffers
            .first()
            .expect("a multicast object needs buffers")
            .len();
        for buffer in buffers {
            assert_eq!(buffer.len(), bytes, "the buffers differ in size");
            let same = Arc::ptr_eq(&buffer.arena, &self.arena);
            assert!(same, "a buffer is that of other GPUs");
        }
        let mut state = lock(&self.arena.state);
        let start = state
            .objects
            .last_key_value()
            .map_or(OBJECTS, |(_, (end, _))| end.next_multiple_of(1 << 21));
        let members = buffers.iter().map(|it| it.address()).collect();
        let end = start + bytes as u64;
        state.objects.insert(start, (end, members));
        Multicast {
            address: start,
            arena: Arc::clone(&self.arena),
        }
    }

    /// Executes kernels concurrently. Blocks until all have completed. Returns the counts of each.
    ///
    /// # Errors
    /// Fails if a launch does not fit its kernel, if a thread faults, or if threads wait for events
    /// that do not happen.
    pub fn run(&self, kernels: &[Kernel]) -> Result<Vec<Counts>> {
        let mut launches = Vec::new();
        for kernel in kernels {
            let mut launch = kernel.launch.clone();
            let Some(entry) = kernel.module.entry(&launch.kernel) else {
                return Err(Error::launch(
                    &launch.kernel,
                    "the module has no such kernel",
                ));
            };
            let params = &entry.params;
            if params.len() != kernel.args.len() {
                let detail = format!(
                    "{} arguments; the kernel has {} parameters",
                    kernel.args.len(),
                    params.len()
                );
                return Err(Error::launch(&launch.kernel, detail));
            }
            for (param, Arg(bytes)) in params.iter().zip(&kernel.args) {
                if bytes.len() != param.size as usize {
                    let detail = format!(
                        "an argument of {} bytes for parameter {}, which has {}",
                        bytes.len(),
                        param.name,
                        param.size
                    );
                    return Err(Error::launch(&launch.kernel, detail));
                }
                launch.params.resize(param.offset as usize, 0);
                launch.params.extend_from_slice(bytes);
            }
            launches.push((self.load(&kernel.module, launch.device)?, launch));
        }
        // SAFETY: `keep` keeps the memory of dropped buffers, and `Buffer` accesses its memory with
        // atomic operations.
        self.keep(|| unsafe { self.machine.execute_all(&launches) })
    }

    /// Executes an operation of a stream of `device`, which orders launches. Kernels that are
    /// running continue: use [`IdleTime::Host`](crate::IdleTime::Host) for kernels that wait for
    /// the operation. Does not block until the condition of a wait is met: returns false if it is
    /// not met, and the caller must call again.
    ///
    /// With [`LaunchOrder::Host`](crate::LaunchOrder::Host), a launch is ordered after all launches
    /// that ended before it started, so events have no effect.
    ///
    /// # Errors
    /// Fails if the address of the operation is not a multiple of 4, or if `device` may not access
    /// the 4 bytes.
    pub fn execute_on_stream(&self, device: u32, operation: StreamOperation) -> Result<bool> {
        // SAFETY: as in `run`.
        self.keep(|| unsafe { self.machine.execute_on_stream(device, operation) })
    }

    /// Keeps the memory of buffers that are dropped while `f` runs.
    fn keep<T>(&self, f: impl FnOnce() -> T) -> T {
        lock(&self.arena.state).running += 1;
        let result = f();
        let mut state = lock(&self.arena.state);
        state.running -= 1;
        if state.running == 0 {
            state.dropped.clear();
        }
        result
    }

    /// Returns the module loaded on a device. Each module is loaded once per device.
    fn load(&self, module: &Arc<Module>, device: u32) -> Result<Arc<LoadedModule>> {
        let mut loaded = lock(&self.loaded);
        let key = (Arc::as_ptr(module) as usize, device);
        if let Some(module) = loaded.get(&key) {
            return Ok(Arc::clone(module));
        }
        let module = Arc::new(LoadedModule::new(module, device)?);
        loaded.insert(key, Arc::clone(&module));
        Ok(module)
    }
}
