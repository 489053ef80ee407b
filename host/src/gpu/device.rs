//! The state of a GPU in this process: its driver library, the loaded kernels, and resources to be
//! freed later.

use core::any::Any;
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::collections::HashMap;
use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak,
};
use std::time::Instant;

use fusewire_device::native::KernelInfo;

use super::driver::{CaptureStatus, Driver, HostMemory, Properties, RawMemory, RawStream};
use super::images::Images;
use super::in_flight::DeferredRelease;
use super::launch::Kernel;
use super::module::{self, Module};
use super::multi_rank_grid::GridImage;
use super::scratch::Pool;
use super::stream;
use crate::device::Device;
use crate::{Error, Result};

/// A GPU. Each device that the process opens has one [`Gpu`], which is never dropped.
pub struct Gpu {
    device: Device,
    driver: Arc<dyn Driver>,
    kernels: RwLock<HashMap<&'static str, &'static Kernel>>,
    loaded: Mutex<Vec<LoadedModule>>,
    /// The image with the multi-rank grid forms of the kernels, loaded on first use.
    multi_rank_grid: Mutex<Option<Arc<GridImage>>>,
    pub(super) pool: Pool,
    /// Values that were released in a driver callback or while an owner was being notified of
    /// completed work. [`Gpu::reap`] drops these values later, because dropping a value may call
    /// the driver. A callback must not call the driver, and a notification must not block.
    dropped: Mutex<Vec<Box<dyn Any + Send>>>,
    /// Set if several ranks of this process share the GPU.
    shared: AtomicBool,
    /// Number of operations in flight.
    in_flight: AtomicU64,
    /// Read-locked while work is enqueued. Write-locked while memory of a shared GPU is freed.
    launching: RwLock<()>,
    /// Read-locked while work is enqueued on the legacy default stream. Write-locked while a
    /// capture begins.
    legacy: RwLock<()>,
    /// Captures that streams of this crate have begun and not ended.
    captures: Mutex<Vec<OwnCapture>>,
    /// Unused memory that has not been freed yet. See [`Gpu::free`].
    unfreed: Mutex<Vec<RawMemory>>,
    /// Free lines of page-locked host memory. They are never returned to the driver, because
    /// freeing page-locked memory may wait for the device.
    lines: Mutex<Vec<HostLine>>,
    /// All live streams.
    streams: Mutex<Vec<Weak<stream::Inner>>>,
    /// Work that was in flight when its stream was dropped.
    deferred: Mutex<Vec<DeferredRelease>>,
}

/// Counts as one operation in flight on the GPU until it is dropped.
pub(super) struct InFlightGuard(Arc<Gpu>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A line of 64 bytes of page-locked host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostLine(pub(crate) HostMemory);

// SAFETY: a `HostLine` holds two addresses of page-locked memory, and page-locked memory is valid
// on all threads. Dereferencing an address requires a separate `unsafe` operation.
unsafe impl Send for HostLine {}

/// Bytes of a [`HostLine`].
const LINE: usize = 64;
/// Number of lines per allocation.
const LINES: usize = 64;

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// A loaded module.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadedModule {
    /// Name of the image.
    pub name: String,
    /// Number of kernels in the image.
    pub kernels: usize,
    /// Load time. Includes the compilation of PTX by the driver, unless the driver has the result
    /// in its cache.
    pub time: Duration,
}

/// A capture that a stream of this crate has begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct OwnCapture {
    pub(super) stream: RawStream,
    /// The thread that adopted the stream, if it is a per-thread default stream.
    pub(super) thread: Option<usize>,
}

/// Number of blocks that one SM can hold at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Residency {
    pub(crate) blocks: u32,
    /// Threads per block.
    pub(crate) threads: u32,
    /// The kernel of which one SM holds the fewest blocks.
    pub(crate) kernel: &'static str,
    /// Number of SMs of the GPU.
    pub(crate) multiprocessors: u32,
}

impl Residency {
    /// Returns the number of blocks that the GPU can hold at once.
    pub(crate) const fn on_device(&self) -> u32 {
        self.blocks.saturating_mul(self.multiprocessors)
    }
}

impl Gpu {
    /// Returns the GPU `device`. The first call for a device opens its driver by `driver`.
    ///
    /// # Errors
    /// The errors of `driver`.
    pub(crate) fn open_with(
        device: Device,
        driver: impl FnOnce() -> Result<Arc<dyn Driver>>,
    ) -> Result<Arc<Self>> {
        static OPEN: OnceLock<Mutex<HashMap<Device, Arc<Gpu>>>> = OnceLock::new();
        let mut open = OPEN
            .get_or_init(Mutex::default)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = open.get(&device) {
            return Ok(Arc::clone(gpu));
        }
        let driver = driver()?;
        let gpu = Arc::new(Self {
            device,
            driver,
            kernels: RwLock::default(),
            loaded: Mutex::default(),
            multi_rank_grid: Mutex::default(),
            pool: Pool::default(),
            dropped: Mutex::default(),
            shared: AtomicBool::new(false),
            in_flight: AtomicU64::new(0),
            launching: RwLock::default(),
            legacy: RwLock::default(),
            captures: Mutex::default(),
            unfreed: Mutex::default(),
            lines: Mutex::default(),
            streams: Mutex::default(),
            deferred: Mutex::default(),
        });
        open.insert(device, Arc::clone(&gpu));
        Ok(gpu)
    }

    /// Returns the device.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the driver of this device.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// Returns the driver of this device with shared ownership.
    pub(super) fn shared_driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.driver)
    }

    /// Returns the GPU's properties.
    pub fn properties(&self) -> &Properties {
        self.driver.properties()
    }

    /// Returns the loaded modules with their load times.
    pub fn modules(&self) -> Vec<LoadedModule> {
        self.loaded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Loads all of Fusewire's own kernels. Later calls do nothing.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if no image fits the GPU; the driver's error if it cannot load an image;
    /// an error if the parameter layout of a kernel differs between the image and this library.
    pub fn load(&self) -> Result<()> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if !loaded.is_empty() {
            return Ok(());
        }
        let images = Images::of(self.properties());
        let modules = module::load_library(self.driver(), &images, fusewire_kernels::KERNELS)?;
        let all = fusewire_kernels::KERNELS.iter().copied().flatten();
        for module in modules {
            self.insert_kernels(&mut loaded, &module, all.clone());
        }
        Ok(())
    }

    /// Returns the image with the multi-rank grid forms of `kernels`. A grid form runs its kernel
    /// for all ranks in one launch. The first call loads the image. All calls must pass the same
    /// kernels.
    ///
    /// # Errors
    /// [`Error::Image`] if the image does not exist or has another version; the driver's error if
    /// it cannot load the image.
    pub(crate) fn multi_rank_grid(
        &self,
        kernels: &[&'static KernelInfo],
    ) -> Result<Arc<GridImage>> {
        let mut multi_rank_grid = self
            .multi_rank_grid
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = &*multi_rank_grid {
            return Ok(Arc::clone(image));
        }
        let start = Instant::now();
        let image = Arc::new(GridImage::load(self.driver(), kernels)?);
        self.loaded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(LoadedModule {
                name: super::multi_rank_grid::IMAGE.to_owned(),
                kernels: image.len(),
                time: start.elapsed(),
            });
        Ok(Arc::clone(multi_rank_grid.insert(image)))
    }

    fn loaded_kernel(&self, name: &str) -> Option<&'static Kernel> {
        self.kernels
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(name)
            .copied()
    }

    /// Returns the kernel that `info` describes, from the library's images or from the image of a
    /// user crate. [`Images::find`] documents where user images are searched for.
    pub(crate) fn kernel(&self, info: &KernelInfo) -> Result<&'static Kernel> {
        if let Some(kernel) = self.loaded_kernel(info.name) {
            return Ok(kernel);
        }
        self.load()?;
        if let Some(kernel) = self.loaded_kernel(info.name) {
            return Ok(kernel);
        }
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kernel) = self.loaded_kernel(info.name) {
            return Ok(kernel);
        }
        let krate = info.module.split("::").next().unwrap_or_default();
        let image = Images::of(self.properties()).find(krate)?;
        let module = Module::load(self.driver(), &image, [info])?;
        self.insert_kernels(&mut loaded, &module, [info]);
        self.loaded_kernel(info.name)
            .ok_or_else(|| Error::launch(format!("image {image} has no kernel {}", info.name)))
    }

    /// Inserts the kernels of a loaded module.
    fn insert_kernels<'a>(
        &self,
        loaded: &mut Vec<LoadedModule>,
        module: &Module,
        infos: impl IntoIterator<Item = &'a KernelInfo>,
    ) {
        let mut known = self.kernels.write().unwrap_or_else(PoisonError::into_inner);
        for info in infos {
            if let Some(function) = module.function(info.name) {
                let kernel = Kernel::new(function, info.params);
                known.insert(info.name, Box::leak(Box::new(kernel)));
            }
        }
        loaded.push(LoadedModule {
            name: module.name().to_owned(),
            kernels: module.functions().len(),
            time: module.load_time(),
        });
    }

    /// Returns the number of blocks of `threads` threads that one SM can hold at once: the minimum
    /// over all loaded kernels. Blocks of ranks wait for each other, so a block that is not
    /// resident would make the other blocks hang.
    pub(crate) fn residency(&self, threads: u32) -> Result<Residency> {
        let kernels = self.kernels.read().unwrap_or_else(PoisonError::into_inner);
        let mut least: Option<Residency> = None;
        for kernel in kernels.values() {
            let threads = threads.min(kernel.properties.max_threads);
            let blocks = self.driver().resident_blocks(kernel.raw, threads, 0)?;
            if least.is_none_or(|least| (blocks, kernel.name) < (least.blocks, least.kernel)) {
                least = Some(Residency {
                    blocks,
                    threads,
                    kernel: kernel.name,
                    multiprocessors: self.properties().multiprocessors,
                });
            }
        }
        least.ok_or_else(|| Error::launch("no kernel is loaded"))
    }

    /// Returns a zeroed line of page-locked host memory, to be returned by [`Gpu::put_line`].
    pub(crate) fn take_line(&self) -> Result<HostLine> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.is_empty() {
            let page = self.driver.allocate_host(LINE * LINES)?;
            lines.extend((0..LINES).map(|at| {
                HostLine(HostMemory {
                    host: page.host.wrapping_add(at * LINE),
                    device: page.device + (at * LINE) as u64,
                    bytes: LINE,
                })
            }));
        }
        let line = lines
            .pop()
            .ok_or_else(|| Error::launch("no page-locked memory"))?;
        // SAFETY: the line is part of an allocation that is never freed, and it was removed from
        // the list of free lines, so nothing else accesses it.
        unsafe { line.0.host.write_bytes(0, LINE) };
        Ok(line)
    }

    /// Returns a line to the list of free lines. No kernel may write the line after this call.
    pub(crate) fn put_line(&self, line: HostLine) {
        self.lines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(line);
    }

    /// Marks the GPU as shared by several ranks of this process.
    pub(crate) fn share(&self) {
        self.shared.store(true, Ordering::Release);
    }

    /// Starts an operation. The operation counts as in flight until the returned
    /// [`InFlightGuard`] is dropped. On a shared GPU, no memory is freed until the returned lock
    /// guard is dropped.
    pub(super) fn launch(self: &Arc<Self>) -> (InFlightGuard, RwLockReadGuard<'_, ()>) {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        let guard = self
            .launching
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        (InFlightGuard(Arc::clone(self)), guard)
    }

    /// Locks out work on the legacy default stream while a capture begins.
    pub(super) fn begin_capture(&self) -> RwLockWriteGuard<'_, ()> {
        self.legacy.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks out beginning captures while work is enqueued on the legacy default stream. Returns
    /// `None` if a stream of this crate is capturing.
    pub(super) fn no_capture(&self) -> Option<RwLockReadGuard<'_, ()>> {
        let guard = self.legacy.read().unwrap_or_else(PoisonError::into_inner);
        (!self.has_capture()).then_some(guard)
    }

    /// Adds a capture that a stream of this crate has begun.
    pub(super) fn add_capture(&self, capture: OwnCapture) {
        self.captures().push(capture);
    }

    /// Removes the capture of a stream. Must be called before the stream is destroyed.
    pub(super) fn remove_capture(&self, stream: RawStream) {
        self.captures().retain(|capture| capture.stream != stream);
    }

    fn captures(&self) -> MutexGuard<'_, Vec<OwnCapture>> {
        self.captures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns true if a capture that a stream of this crate has begun is active. Other code may
    /// have ended it, so the driver is asked.
    pub(super) fn has_capture(&self) -> bool {
        // The lock keeps the streams from being destroyed.
        self.captures().iter().any(|capture| {
            // A default stream of another thread cannot be queried, so its capture counts.
            let here = capture.thread.is_none_or(stream::is_this_thread);
            // If the query fails, the capture also counts.
            let status = || self.driver.capture_status(capture.stream);
            !here || !matches!(status(), Ok(CaptureStatus::None))
        })
    }

    /// Frees `memory`, which must be unused, immediately or later. The driver may wait for the
    /// device while it frees memory. If several ranks of this process share the GPU, this wait
    /// could deadlock, because the kernel of another rank may be waiting for a launch by the
    /// calling thread. Memory of a shared GPU is therefore freed only while no operation is in
    /// flight.
    pub(super) fn free(&self, memory: RawMemory) {
        self.unfreed
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(memory);
        self.free_all();
    }

    fn free_all(&self) {
        let Ok(mut unfreed) = self.unfreed.try_lock() else {
            return;
        };
        if unfreed.is_empty() {
            return;
        }
        let _still = if self.shared.load(Ordering::Acquire) {
            let Ok(still) = self.launching.try_write() else {
                return;
            };
            if self.in_flight.load(Ordering::Acquire) != 0 {
                return;
            }
            Some(still)
        } else {
            None
        };
        for memory in unfreed.drain(..) {
            // SAFETY: `allocate` or `import` returned the memory, and `free` was called after the
            // last user of the memory was dropped. `drain` removes each entry from the list, so no
            // memory is released twice.
            if let Err(error) = unsafe { self.driver.release(memory) } {
                tracing::warn!(%error, bytes = memory.bytes, "device memory could not be freed");
            }
        }
    }

    /// Keeps a value that must not be dropped by the caller, because the caller is a driver
    /// callback or is notifying an owner of completed work. The next [`Gpu::reap`] drops the value.
    pub(super) fn leave(&self, value: Box<dyn Any + Send>) {
        self.dropped
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(value);
    }

    /// Frees unused memory and drops the values passed to [`Gpu::leave`].
    pub(super) fn reap(&self) {
        self.free_all();
        let dropped = {
            let Ok(mut dropped) = self.dropped.try_lock() else {
                return;
            };
            if dropped.is_empty() {
                return;
            }
            core::mem::take(&mut *dropped)
        };
        drop(dropped);
    }

    /// Adds a stream to the list of live streams.
    pub(super) fn know(&self, stream: Weak<stream::Inner>) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(stream);
    }

    /// Takes over the work in flight on a dropped stream. [`Gpu::sweep`] releases the resources of
    /// the work after the work is complete.
    pub(super) fn defer_release(&self, deferred: DeferredRelease) {
        self.deferred
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(deferred);
    }

    /// Polls all streams and releases the resources of completed work. Called when resources are
    /// created or freed, but not on the launch path. Never blocks.
    pub(crate) fn sweep(&self) {
        self.reap();
        let streams: Vec<_> = {
            let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
            streams.iter().filter_map(Weak::upgrade).collect()
        };
        for stream in &streams {
            stream.poll();
        }
        // If `streams` holds the last handle of a stream, the stream is dropped here.
        drop(streams);
        // The list is taken out of the mutex, so that no lock is held during the polls: callbacks
        // of owners may create and drop streams.
        let mut deferred = {
            let mut deferred = self.deferred.lock().unwrap_or_else(PoisonError::into_inner);
            core::mem::take(&mut *deferred)
        };
        deferred.retain_mut(|deferred| !deferred.poll(self));
        if !deferred.is_empty() {
            self.deferred
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .append(&mut deferred);
        }
        self.reap();
    }
}
