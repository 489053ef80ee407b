//! Modules: images that a driver has loaded. The kernel parameters in an image are compared with
//! those of the program.

use core::num::NonZero;
use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;
use std::ffi::CString;
use std::panic::resume_unwind;
use std::thread;
use std::time::Instant;

use fusewire_device::native::{KernelInfo, ParamField};

use super::driver::{FunctionProperties, ModuleDriver, RawFunction, RawModule};
use super::images::{Image, Images};
use crate::{Error, Result};

#[cfg(test)]
mod tests;

/// A kernel that can be launched on a GPU.
#[derive(Clone, Debug)]
pub struct Function {
    /// Exported symbol.
    pub name: &'static str,
    /// The driver library's handle.
    pub raw: RawFunction,
    /// Resource usage.
    pub properties: FunctionProperties,
    /// Offset and size in bytes of each parameter, in order. They are equal in the program's
    /// parameter struct and in the image.
    pub params: Vec<(usize, usize)>,
}

/// A loaded image, with the kernels of the image that the program uses.
#[derive(Clone, Debug)]
pub struct Module {
    name: String,
    target: String,
    raw: RawModule,
    load_time: Duration,
    /// Sorted by name.
    functions: Vec<Function>,
}

impl Module {
    /// Loads `image` and looks up all `kernels` in it. Logs a warning for kernels that use local
    /// memory.
    ///
    /// Call this function before any communication: it may wait for the device, and takes seconds
    /// if the driver has to compile PTX.
    ///
    /// # Errors
    /// `Error::Image` if a kernel is missing, or if the parameter offsets in the image differ from
    /// those in the program; `Error::Driver` if the driver cannot load the image.
    pub fn load<'a>(
        driver: &dyn ModuleDriver,
        image: &Image,
        kernels: impl IntoIterator<Item = &'a KernelInfo>,
    ) -> Result<Self> {
        let start = Instant::now();
        let raw = driver.load(&image.bytes)?;
        let load_time = start.elapsed();
        let mut functions = kernels
            .into_iter()
            .map(|kernel| function(driver, image, raw, kernel))
            .collect::<Result<Vec<_>>>()?;
        functions.sort_by_key(|function| function.name);
        tracing::debug!(
            image = %image,
            seconds = load_time.as_secs_f64(),
            kernels = functions.len(),
            "loaded a GPU image"
        );
        Ok(Self {
            name: image.name.clone(),
            target: image.target.clone(),
            raw,
            load_time,
            functions,
        })
    }

    /// Returns the name of the image: a kernel family of the library, or a user crate.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the target architecture of the image.
    pub fn target(&self) -> &str {
        &self.target
    }

    /// Returns the load time, including the compilation of PTX.
    pub fn load_time(&self) -> Duration {
        self.load_time
    }

    /// Returns the kernels, sorted by name.
    pub fn functions(&self) -> &[Function] {
        &self.functions
    }

    /// Returns the kernel with the symbol `name`.
    pub fn function(&self, name: &str) -> Option<&Function> {
        let at = self
            .functions
            .binary_search_by(|function| function.name.cmp(name));
        at.ok().and_then(|at| self.functions.get(at))
    }

    /// Returns the driver library's handle.
    pub fn as_raw(&self) -> RawModule {
        self.raw
    }
}

/// Loads the library's images of all kernel families that `kernels` belong to. Calls
/// [`Module::load`] on several threads. Returns the modules sorted by name.
///
/// If the images are cubins and the driver refuses the first, logs a warning and loads PTX.
///
/// # Errors
/// The errors of [`Module::load`]; `Error::Image` if the library has no image for the device or for
/// one of the families.
pub fn load_library(
    driver: &dyn ModuleDriver,
    images: &Images,
    kernels: &[&[KernelInfo]],
) -> Result<Vec<Module>> {
    let kernels: Vec<&KernelInfo> = kernels.iter().copied().flatten().collect();
    let mut families: Vec<&str> = kernels.iter().map(|kernel| kernel.family()).collect();
    families.sort_unstable();
    families.dedup();
    let load = |image: &Image, family: &str| {
        let of_family = kernels.iter().copied().filter(|k| k.family() == family);
        Module::load(driver, image, of_family)
    };
    let mut modules = Vec::new();
    let mut without_cubins = None;
    if let Some((&first, others)) = families.split_first()
        && let image = images.library(first)?
        && image.is_cubin()
    {
        match load(&image, first) {
            Err(Error::Driver { detail, .. }) => {
                tracing::warn!(
                    %image,
                    detail,
                    "the driver refuses the library's machine code; it compiles PTX instead, which \
                     takes seconds in each process"
                );
                without_cubins = Some(images.clone().without_cubins());
            }
            module => {
                modules.push(module?);
                families = others.to_vec();
            }
        }
    }
    let images = without_cubins.as_ref().unwrap_or(images);
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        while let Some(family) = families.get(next.fetch_add(1, Ordering::Relaxed)) {
            done.push(load(&images.library(family)?, family)?);
        }
        Ok::<_, Error>(done)
    };
    let workers = thread::available_parallelism().map_or(1, NonZero::get);
    thread::scope(|scope| {
        let workers: Vec<_> = (0..workers.min(families.len()))
            .map(|_| scope.spawn(worker))
            .collect();
        for worker in workers {
            modules.extend(worker.join().unwrap_or_else(|panic| resume_unwind(panic))?);
        }
        Ok::<_, Error>(())
    })?;
    modules.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(modules)
}

/// Looks up a kernel in a module and compares the parameters in the image with those of the
/// program.
fn function(
    driver: &dyn ModuleDriver,
    image: &Image,
    module: RawModule,
    kernel: &KernelInfo,
) -> Result<Function> {
    let wrong = |detail: String| Error::Image {
        image: image.to_string(),
        detail,
    };
    let symbol = CString::new(kernel.name)
        .map_err(|_| wrong(format!("kernel {:?} has no name for C", kernel.name)))?;
    let Some(raw) = driver.function(module, &symbol)? else {
        return Err(wrong(format!(
            "it lacks kernel {}, which this program launches; {REBUILD}",
            kernel.name
        )));
    };
    let read = match driver.parameters(raw)? {
        Some(read) => read,
        None => match image.entry(kernel.name) {
            Some(entry) => entry.parameters.clone(),
            None => {
                return Err(wrong(format!(
                    "it says nothing about the parameters of kernel {}; {REBUILD}",
                    kernel.name
                )));
            }
        },
    };
    if let Some(detail) = difference(kernel.params, &read) {
        return Err(wrong(format!(
            "kernel {}: {detail}; {REBUILD}",
            kernel.name
        )));
    }
    let properties = driver.function_properties(raw)?;
    if properties.local_bytes > 0 {
        tracing::warn!(
            image = %image,
            kernel = kernel.name,
            local_bytes = properties.local_bytes,
            registers = properties.registers,
            "a kernel needs local memory: it will be slow"
        );
    }
    Ok(Function {
        name: kernel.name,
        raw,
        properties,
        params: read,
    })
}

/// Advice in the error for an image of another version.
const REBUILD: &str = "image and program are of different versions: rebuild the image \
                       (`fusewire-build images` for the library's own, `fusewire-build build` for \
                       others)";

/// Describes the first difference between the parameters of the program (`put`) and of the image
/// (`read`). Returns `None` if they agree.
fn difference(put: &[ParamField], read: &[(usize, usize)]) -> Option<String> {
    for (index, field) in put.iter().enumerate() {
        let expected = (field.offset, field.size);
        match read.get(index) {
            Some(&other) if other == expected => {}
            Some(&(offset, size)) => {
                return Some(format!(
                    "parameter {index} ({}): the program writes {} bytes at offset {}, the image \
                     reads {size} at offset {offset}",
                    field.name, field.size, field.offset
                ));
            }
            None => {
                return Some(format!(
                    "parameter {index} ({}): the program passes it, the image reads only {} \
                     parameters",
                    field.name,
                    read.len()
                ));
            }
        }
    }
    (read.len() > put.len()).then(|| {
        format!(
            "the program passes {} parameters, the image reads {}",
            put.len(),
            read.len()
        )
    })
}
