//! The image with the multi-rank grid forms of the library's kernels. A grid form runs its kernel
//! for all ranks in one launch.

use std::ffi::CString;

use fusewire_device::multi_rank_grid::{GridParams, SUFFIX};
use fusewire_device::native::KernelInfo;

use super::super::device::Gpu;
use super::super::driver::{Driver, RawFunction, RawModule};
use super::super::images::{Image, Images};
use crate::{Error, Result};

/// Name of the image for [`Images::find`]. The library does not contain this image.
pub(crate) const IMAGE: &str = "fusewire-kernels-multi-rank-grid";

/// The command that builds the image, without the value of `--target`.
const COMMAND: &str = "fusewire-build build --multi-rank-grid --target";

/// The loaded image of multi-rank grid forms.
#[derive(Debug)]
pub(crate) struct GridImage {
    module: RawModule,
    forms: Vec<GridForm>,
}

/// The multi-rank grid form of a kernel.
#[derive(Debug)]
struct GridForm {
    name: &'static str,
    raw: RawFunction,
    max_threads: u32,
}

impl GridImage {
    /// Finds and loads the image and looks up the grid forms of `kernels`. All grid forms are
    /// looked up in advance, because a later lookup could block until a running kernel completes,
    /// and that kernel may wait for a launch that needs the lookup.
    pub(crate) fn load(driver: &dyn Driver, kernels: &[&'static KernelInfo]) -> Result<Self> {
        let architecture = driver.properties().architecture.clone();
        let command = format!("`{COMMAND} {architecture} --out FOLDER`");
        let images = Images::new(&architecture);
        let image = images.find_made_by(IMAGE, &command)?;
        if let Some(found) = image.sources()
            && found != images.sources()?
        {
            // The grid forms of all kernels have the same parameters, so comparing parameters
            // cannot detect an image of another version. The hashes of the sources are compared
            // instead.
            return Err(other_version(
                &image,
                "it was made from other sources than the library's own images",
            ));
        }
        let module = driver.load(&image.bytes)?;
        let forms = kernels
            .iter()
            .map(|kernel| form(driver, &image, module, kernel))
            .collect::<Result<Vec<_>>>()?;
        Ok(Self { module, forms })
    }

    /// Returns the module, which stays loaded until the process exits.
    pub(crate) fn module(&self) -> RawModule {
        self.module
    }

    /// Returns the number of grid forms.
    pub(crate) fn len(&self) -> usize {
        self.forms.len()
    }

    /// Returns the greatest number of blocks of a rank with which, for every kernel of the image,
    /// the blocks of all `ranks` ranks fit on the GPU at once. Fails if it is below `blocks`.
    pub(crate) fn resident_blocks(
        &self,
        gpu: &Gpu,
        blocks: u32,
        threads: u32,
        ranks: u32,
    ) -> Result<u32> {
        let (driver, properties) = (gpu.driver(), gpu.properties());
        let mut limit = u32::MAX;
        for form in &self.forms {
            let threads = threads.min(form.max_threads);
            let each = driver.resident_blocks(form.raw, threads, 0)?;
            let fits = each.saturating_mul(properties.multiprocessors);
            if fits / ranks < blocks {
                return Err(Error::Launch {
                    detail: format!(
                        "a multi-rank grid of {ranks} ranks with {blocks} blocks of {threads} \
                         threads each is not resident as a whole on {} ({}), which holds {fits} \
                         such blocks of {}{SUFFIX} at once; use fewer ranks, \
                         blocks (Options::blocks) or threads (Options::threads)",
                        gpu.device(),
                        properties.name,
                        form.name
                    ),
                });
            }
            limit = limit.min(fits / ranks);
        }
        Ok(limit)
    }
}

fn other_version(image: &Image, detail: &str) -> Error {
    Error::Image {
        image: image.to_string(),
        detail: format!(
            "{detail}: image and program are of different versions; rebuild the image by \
             `{COMMAND} {}`",
            image.target
        ),
    }
}

/// Looks up the grid form of a kernel and checks the offsets and sizes of its arguments.
fn form(
    driver: &dyn Driver,
    image: &Image,
    module: RawModule,
    kernel: &'static KernelInfo,
) -> Result<GridForm> {
    let wrong = |detail: String| other_version(image, &detail);
    let symbol = format!("{}{SUFFIX}", kernel.name);
    let name =
        CString::new(symbol.as_str()).map_err(|_| wrong(format!("{symbol:?} is no name")))?;
    let Some(raw) = driver.function(module, &name)? else {
        return Err(wrong(format!("it lacks {symbol}")));
    };
    let read = match driver.parameters(raw)? {
        Some(read) => Some(read),
        None => image.entry(&symbol).map(|entry| entry.parameters.clone()),
    };
    let expected: Vec<_> = GridParams::FIELDS
        .iter()
        .map(|field| (field.offset, field.size))
        .collect();
    if read.as_ref() != Some(&expected) {
        return Err(wrong(format!(
            "{symbol} takes arguments (offset, size) {read:?}, a grid form {expected:?}"
        )));
    }
    Ok(GridForm {
        name: kernel.name,
        raw,
        max_threads: driver.function_properties(raw)?.max_threads,
    })
}
