//! The baseline's CUDA module, and launches of its kernels.

use core::ffi::CStr;
use std::collections::HashMap;
use std::ffi::CString;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail, ensure};
use fusewire::gpu::Gpu;
use fusewire::gpu::driver::{LaunchShape, RawFunction, RawModule, RawStream};

use super::entries::{Arguments, Entry, MAX_BLOCKS, MAX_THREADS, Values, all};
use crate::baseline;

/// The loaded baseline. It stays loaded until the process exits.
#[derive(Debug)]
pub(crate) struct Baseline {
    gpu: Arc<Gpu>,
    functions: HashMap<String, RawFunction>,
    /// Origin of the cubin.
    pub(crate) origin: String,
}

impl Baseline {
    /// Loads the `named` cubin. If no cubin is named, loads the bundle's cubin or compiles one with
    /// nvcc. Compares the arguments of every kernel with the cubin's metadata.
    pub(crate) fn load(gpu: &Arc<Gpu>, named: Option<&Path>) -> Result<Self> {
        let architecture = &gpu.properties().architecture;
        let mut refused = None;
        let given = named.map(Path::to_owned);
        if let Some(path) = given.or_else(|| baseline::bundled(architecture)) {
            let cubin = std::fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            match gpu.driver().load(&cubin) {
                Ok(module) => {
                    let name = path.file_name().unwrap_or_default().to_string_lossy();
                    return Self::checked(gpu, module, name.into_owned());
                }
                Err(error) if named.is_some() => {
                    return Err(error).with_context(|| format!("load {}", path.display()));
                }
                // The driver may be older than the compiler of the cubin.
                Err(error) => refused = Some(format!("{} was refused: {error}; ", path.display())),
            }
        }
        let refused = refused.unwrap_or_default();
        let nvcc = baseline::find().with_context(|| {
            format!("{refused}there is no cubin of the baseline for {architecture}")
        })?;
        let cubin = baseline::compile(&nvcc, architecture, &["-cubin"])?;
        let version = baseline::version(&nvcc).unwrap_or_default();
        let module = gpu
            .driver()
            .load(&cubin)
            .with_context(|| format!("{refused}load what {version} has made here"))?;
        Self::checked(gpu, module, format!("compiled here by {version}"))
    }

    fn checked(gpu: &Arc<Gpu>, module: RawModule, origin: String) -> Result<Self> {
        let driver = gpu.driver();
        let mut functions = HashMap::new();
        for entry in all() {
            let symbol = entry.symbol();
            let name: CString = CString::new(symbol.as_str())?;
            let name: &CStr = &name;
            let function = driver
                .function(module, name)?
                .with_context(|| format!("{origin} has no kernel {symbol}; compile it again"))?;
            if let Some(there) = driver.parameters(function)? {
                let expected = entry.layout();
                ensure!(
                    there == expected,
                    "the arguments of {symbol} (offset, size) are {there:?} in {origin} and \
                     {expected:?} in this program; compile the cubin again"
                );
            }
            functions.insert(symbol, function);
        }
        Ok(Self {
            gpu: Arc::clone(gpu),
            functions,
            origin,
        })
    }

    /// Prepares a launch that can be enqueued any number of times. `together` is the number of
    /// grids that wait for each other and must therefore run concurrently.
    pub(crate) fn launch(
        &self,
        entry: Entry,
        values: &Values,
        blocks: u32,
        threads: u32,
        together: u32,
    ) -> Result<Launch> {
        let symbol = entry.symbol();
        let Some(&function) = self.functions.get(&symbol) else {
            bail!("the baseline has no kernel {symbol}");
        };
        ensure!(
            blocks as usize <= MAX_BLOCKS && threads <= MAX_THREADS && threads.is_multiple_of(32),
            "{symbol}: {blocks} blocks of {threads} threads; at most {MAX_BLOCKS} of \
                {MAX_THREADS}, in warps"
        );
        let each = self.gpu.driver().resident_blocks(function, threads, 0)?;
        let fits = each * self.gpu.properties().multiprocessors;
        ensure!(
            together == 0 || blocks * together <= fits,
            "{symbol}: {together} ranks of {blocks} blocks of {threads} threads wait for each \
             other, and {fits} blocks fit the GPU at once; use fewer (--blocks)"
        );
        Ok(Launch {
            gpu: Arc::clone(&self.gpu),
            function,
            shape: LaunchShape {
                blocks,
                threads,
                ..LaunchShape::default()
            },
            arguments: entry.arguments(values),
        })
    }

    /// Returns the number of blocks of a kernel that can be resident on the GPU at the same time.
    pub(crate) fn resident(&self, entry: Entry, threads: u32) -> Result<u32> {
        let symbol = entry.symbol();
        let function = self
            .functions
            .get(&symbol)
            .with_context(|| symbol.clone())?;
        let each = self.gpu.driver().resident_blocks(*function, threads, 0)?;
        Ok(each * self.gpu.properties().multiprocessors)
    }
}

/// A kernel with its arguments.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    gpu: Arc<Gpu>,
    function: RawFunction,
    shape: LaunchShape,
    arguments: Arguments,
}

impl Launch {
    /// Enqueues the kernel on a stream.
    ///
    /// # Safety
    /// The memory that the arguments refer to must stay allocated until the kernel has completed,
    /// and until every replay of a graph that captured the kernel has completed. No other access
    /// may race with the kernel's accesses.
    pub(crate) unsafe fn enqueue(&mut self, stream: RawStream) -> Result<()> {
        let mut addresses = self.arguments.addresses();
        // SAFETY: `load` has checked that the argument layout matches the kernel. The caller
        // guarantees that the memory is valid and free of races.
        unsafe {
            self.gpu
                .driver()
                .launch(self.function, &self.shape, &mut addresses, stream)?;
        }
        Ok(())
    }
}
