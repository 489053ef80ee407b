//! A GPU as this process uses it: its driver library, the kernels that are loaded, and what waits to be freed.

use core::any::Any;
use core::fmt;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use core::time::Duration;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::Instant;

use fusewire_device::native::KernelInfo;

use super::driver::{Driver, HostMemory, Properties, RawMemory};
use super::images::Images;
use super::in_flight::DeferredRelease;
use super::launch::Kernel;
use super::module::{self, Module};
use super::multi_rank_grid::GridImage;
use super::scratch::Pool;
use super::stream;
use crate::device::Device;
use crate::{Error, Result};

/// A GPU; one value for each in a process, which lives as long as the process.
pub struct Gpu {
    device: Device,
    driver: Arc<dyn Driver>,
    kernels: RwLock<HashMap<&'static str, &'static Kernel>>,
    loaded: Mutex<Vec<LoadedModule>>,
    /// The image of grid forms, once it was asked for.
    multi_rank_grid: Mutex<Option<Arc<GridImage>>>,
    pub(super) pool: Pool,
    /// What callbacks of the driver and ends of work have let go, and may not free themselves.
    dropped: Mutex<Vec<Box<dyn Any + Send>>>,
    /// Whether several ranks of this process share the GPU.
    shared: AtomicBool,
    /// Pieces of work in flight.
    in_flight: AtomicU64,
    /// Held for reading while work is put on a stream, for writing while memory is freed.
    launching: RwLock<()>,
    /// Memory that nothing uses any more, to be freed when no work is in flight.
    unfreed: Mutex<Vec<RawMemory>>,
    /// Lines of page-locked host memory that are free. They are never given back: freeing one may wait for the device.
    lines: Mutex<Vec<HostLine>>,
    /// The streams that live.
    streams: Mutex<Vec<Weak<stream::Inner>>>,
    /// What is in flight on streams that live no more.
    deferred: Mutex<Vec<DeferredRelease>>,
}

/// Work is in flight as long as this lives.
pub(super) struct InFlightGuard(Arc<Gpu>);

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::AcqRel);
    }
}

/// 64 bytes of page-locked host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostLine(pub(crate) HostMemory);

// SAFETY: an address, which its owner uses as it must.
unsafe impl Send for HostLine {}

/// Bytes of a line, and lines that are allocated at once.
const LINE: usize = 64;
const LINES: usize = 64;

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu")
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// A module that was loaded.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct LoadedModule {
    /// Name of the image.
    pub name: String,
    /// Kernels in it.
    pub kernels: usize,
    /// How long loading took; with PTX, the driver compiles it (or finds it in its cache).
    pub time: Duration,
}

impl Gpu {
    /// The GPU `device`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when there is no driver or no such GPU; [`Error::InvalidArgument`] for the CPU.
    pub fn open(device: Device) -> Result<Arc<Self>> {
        static OPEN: OnceLock<Mutex<HashMap<Device, Arc<Gpu>>>> = OnceLock::new();
        let mut open = OPEN
            .get_or_init(Mutex::default)
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(gpu) = open.get(&device) {
            return Ok(Arc::clone(gpu));
        }
        let driver = match device {
            Device::Cuda(ordinal) => crate::cuda::open(ordinal)?,
            Device::Hip(ordinal) => crate::hip::open(ordinal)?,
            Device::Cpu => {
                return Err(Error::InvalidArgument {
                    operation: "open GPU",
                    detail: "the CPU device has no driver".to_owned(),
                });
            }
        };
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
            unfreed: Mutex::default(),
            lines: Mutex::default(),
            streams: Mutex::default(),
            deferred: Mutex::default(),
        });
        open.insert(device, Arc::clone(&gpu));
        Ok(gpu)
    }

    /// Which device it is.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The driver library with this device.
    pub fn driver(&self) -> &dyn Driver {
        &*self.driver
    }

    /// The same, for whoever keeps it.
    pub(super) fn shared_driver(&self) -> Arc<dyn Driver> {
        Arc::clone(&self.driver)
    }

    /// What is known of the GPU.
    pub fn properties(&self) -> &Properties {
        self.driver.properties()
    }

    /// The modules that were loaded, with the time that it took.
    pub fn modules(&self) -> Vec<LoadedModule> {
        self.loaded
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Loads all of Fusewire's own kernels. Later calls do nothing.
    ///
    /// # Errors
    /// [`Error::NoDevice`] when no image fits the GPU; what the driver says of the image; a kernel whose arguments lie
    /// elsewhere in the image than this library puts them.
    pub fn load(&self) -> Result<()> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if !loaded.is_empty() {
            return Ok(());
        }
        let images = Images::new(&self.properties().architecture);
        let modules = module::load_library(self.driver(), &images, fusewire_kernels::KERNELS)?;
        let all = fusewire_kernels::KERNELS.iter().copied().flatten();
        for module in modules {
            self.insert_kernels(&mut loaded, &module, all.clone());
        }
        Ok(())
    }

    /// The image with the grid forms of `kernels`: loaded by the first call, with the same kernels each time.
    ///
    /// # Errors
    /// [`Error::Image`] where there is none, or it is of another version; what the driver says of it.
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

    /// The kernel that `info` describes: Fusewire's own, or one of an image that is found beside the binary or in
    /// `FUSEWIRE_IMAGES`.
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
        let image = Images::new(&self.properties().architecture).find(krate)?;
        let module = Module::load(self.driver(), &image, [info])?;
        self.insert_kernels(&mut loaded, &module, [info]);
        self.loaded_kernel(info.name)
            .ok_or_else(|| Error::launch(format!("image {image} has no kernel {}", info.name)))
    }

    /// Inserts the kernels of a module that was loaded.
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

    /// Refuses a launch whose blocks wait for each other and would not all be resident.
    pub(crate) fn check_resident(&self, blocks: u32, threads: u32, ranks: u32) -> Result<()> {
        let kernels = self.kernels.read().unwrap_or_else(PoisonError::into_inner);
        let properties = self.properties();
        for kernel in kernels.values() {
            let threads = threads.min(kernel.properties.max_threads);
            let each = self.driver().resident_blocks(kernel.raw, threads, 0)?;
            let fits = u64::from(each) * u64::from(properties.multiprocessors);
            let needed = u64::from(blocks) * u64::from(ranks);
            if needed > fits {
                return Err(Error::Launch {
                    detail: format!(
                        "{ranks} ranks of this process with {blocks} blocks of {threads} threads each wait for each \
                         other on {} ({}), where {fits} blocks of kernel {} are resident at once: they would hang; \
                         use fewer blocks (Options::blocks) or threads (Options::threads)",
                        self.device, properties.name, kernel.name
                    ),
                });
            }
        }
        Ok(())
    }

    /// A zeroed line of page-locked host memory, to be given back by [`Gpu::give_line`].
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
        // SAFETY: a line of a live allocation, which nobody else has.
        unsafe { line.0.host.write_bytes(0, LINE) };
        Ok(line)
    }

    /// Gives a line back that no kernel writes any more.
    pub(crate) fn give_line(&self, line: HostLine) {
        self.lines
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(line);
    }

    /// Several ranks of this process share the GPU from now on.
    pub(crate) fn share(&self) {
        self.shared.store(true, Ordering::Release);
    }

    /// Work is being put on a stream while the guard lives, and is in flight as long as the other value.
    pub(super) fn launch(self: &Arc<Self>) -> (InFlightGuard, RwLockReadGuard<'_, ()>) {
        self.in_flight.fetch_add(1, Ordering::AcqRel);
        let guard = self
            .launching
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        (InFlightGuard(Arc::clone(self)), guard)
    }

    /// Frees memory that nothing uses any more. The driver may wait for the device then: where several ranks share it, a
    /// kernel of another one may run that waits for a launch of the calling thread's, so memory is freed when
    /// nothing is in flight.
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
            // SAFETY: the last user of memory that `allocate` or `import` gave has gone.
            if let Err(error) = unsafe { self.driver.release(memory) } {
                tracing::warn!(%error, bytes = memory.bytes, "device memory could not be freed");
            }
        }
    }

    /// Takes what a callback of the driver or the end of work lets go; it is freed by the next [`Gpu::reap`].
    pub(super) fn leave(&self, value: Box<dyn Any + Send>) {
        self.dropped
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(value);
    }

    /// Frees what was left.
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

    /// Takes notice of a stream.
    pub(super) fn know(&self, stream: Weak<stream::Inner>) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.retain(|stream| stream.strong_count() > 0);
        streams.push(stream);
    }

    /// Takes what is in flight on a stream that ends; it is looked after by [`Gpu::sweep`].
    pub(super) fn defer_release(&self, deferred: DeferredRelease) {
        self.deferred
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(deferred);
    }

    /// Frees what work has let go that has ended since, on any stream: for those who make or free things, not for those who
    /// launch. Waits for nothing.
    pub(crate) fn sweep(&self) {
        self.reap();
        let streams: Vec<_> = {
            let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
            streams.iter().filter_map(Weak::upgrade).collect()
        };
        for stream in &streams {
            stream.poll();
        }
        // A stream whose last handle this is ends here.
        drop(streams);
        // Callbacks of owners may make and end streams: not under the lock.
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
