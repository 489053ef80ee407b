//! Kernels of a loaded module, and their launches.

use core::any::Any;
use core::ffi::c_void;
use core::fmt;
use core::time::Duration;
use std::sync::Arc;

use fusewire_device::native::ParamField;

use super::driver::{Driver, FunctionProperties, LaunchShape, RawFunction, RawStream};
use super::module::Function;
use super::multi_rank_grid::MultiRankGrid;
use super::scratch::Upload;
use crate::cpu::{KeepAlive, LaunchInfo, LaunchOwner, MAX_PARAM_BYTES};
use crate::{Error, Result};

/// Maximum number of parameters of a kernel.
const MAX_PARAMS: usize = MAX_PARAM_BYTES / 4;

/// A kernel of a loaded module. It stays loaded until the process exits.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// Exported symbol.
    pub(crate) name: &'static str,
    /// The driver's handle.
    pub(crate) raw: RawFunction,
    /// Layout of the parameter struct.
    pub(crate) params: &'static [ParamField],
    /// Resource usage.
    pub(crate) properties: FunctionProperties,
}

impl Kernel {
    /// Wraps `function`. The caller has compared the parameters of `function` with `params`.
    pub(super) fn new(function: &Function, params: &'static [ParamField]) -> Self {
        Self {
            name: function.name,
            raw: function.raw,
            params,
            properties: function.properties,
        }
    }
}

/// A multi-rank grid and the rank that launches through it.
#[derive(Clone, Debug)]
pub(crate) struct GridMember {
    /// The multi-rank grid, which launches for all ranks.
    pub(crate) grid: Arc<MultiRankGrid>,
    /// The number of this rank in the grid.
    pub(crate) rank: u32,
    /// Maximum time to wait for the launches of the other ranks.
    pub(crate) timeout: Duration,
}

/// A kernel with its arguments, its shape and the values that the launch keeps alive.
#[derive(Clone)]
pub(crate) struct Launch {
    kernel: &'static Kernel,
    params: [u64; MAX_PARAM_BYTES / 8],
    /// Bytes of the parameter struct.
    bytes: usize,
    shape: LaunchShape,
    grid: Option<GridMember>,
    pub(super) owner: Option<Arc<dyn LaunchOwner>>,
    pub(super) info: LaunchInfo,
    pub(super) keep: KeepAlive,
    upload: Option<Upload>,
}

impl fmt::Debug for Launch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Launch")
            .field("kernel", &self.kernel.name)
            .field("shape", &self.shape)
            .finish_non_exhaustive()
    }
}

impl Launch {
    /// Creates a launch of `kernel`. Copies `params`, the bytes of the kernel's parameter struct.
    ///
    /// # Safety
    /// `params` must be the parameter struct of `kernel`. The requirements of the kernel, such as
    /// valid pointers among its arguments, must hold at every execution of the launch, including
    /// later replays of a graph. [`Launch::keeping`] can keep memory valid.
    pub(crate) unsafe fn new(
        kernel: &'static Kernel,
        params: &[u8],
        shape: LaunchShape,
    ) -> Result<Self> {
        let needed = kernel
            .params
            .iter()
            .map(|field| field.offset + field.size)
            .max()
            .unwrap_or(0);
        if params.len() > MAX_PARAM_BYTES
            || params.len() < needed
            || kernel.params.len() > MAX_PARAMS
        {
            return Err(Error::launch(format!(
                "{} bytes of parameters for kernel {}, which takes {needed} \
                 ({MAX_PARAM_BYTES} at most)",
                params.len(),
                kernel.name
            )));
        }
        if shape.blocks == 0 || shape.threads == 0 || shape.threads > kernel.properties.max_threads
        {
            return Err(Error::launch(format!(
                "{} blocks of {} threads for kernel {}, which runs with 1 to {} threads a block",
                shape.blocks, shape.threads, kernel.name, kernel.properties.max_threads
            )));
        }
        let mut words = [0u64; MAX_PARAM_BYTES / 8];
        bytemuck::bytes_of_mut(&mut words)[..params.len()].copy_from_slice(params);
        Ok(Self {
            kernel,
            params: words,
            bytes: params.len(),
            shape,
            grid: None,
            owner: None,
            info: [0; 4],
            keep: [const { None }; 4],
            upload: None,
        })
    }

    /// Sets the owner. Its callbacks, which receive `info`, run before and after each execution of
    /// the launch.
    #[must_use]
    pub(crate) fn owned_by(mut self, owner: Arc<dyn LaunchOwner>, info: LaunchInfo) -> Self {
        self.owner = Some(owner);
        self.info = info;
        self
    }

    /// Keeps memory alive until the launch is complete. If the launch was captured, keeps the
    /// memory alive until the graph and its instances are destroyed.
    #[must_use]
    pub(crate) fn keeping(mut self, keep: [Option<Arc<dyn Any + Send + Sync>>; 4]) -> Self {
        self.keep = keep;
        self
    }

    /// Enqueues `upload`, if given, before the kernel. [`Launch::keeping`] must keep the source and
    /// the target of the copy alive, and the source must not be written until the copy is complete.
    #[must_use]
    pub(crate) fn uploading(mut self, upload: Option<Upload>) -> Self {
        self.upload = upload;
        self
    }

    /// Makes this a launch of a multi-rank grid if `member` is given. [`Launch::issue`] then waits
    /// until all other ranks have launched.
    #[must_use]
    pub(crate) fn in_grid(mut self, member: Option<GridMember>) -> Self {
        self.grid = member;
        self
    }

    /// Enqueues the kernel on a stream.
    pub(super) fn issue(&self, driver: &dyn Driver, stream: RawStream) -> Result<()> {
        if let Some(upload) = self.upload {
            // SAFETY: `keep` holds the source and the target of the copy (see `uploading`). If the
            // launch below fails, `WorkKind::Failed` keeps them alive until the stream has executed
            // the copy.
            unsafe { driver.copy(upload.to, upload.from, upload.bytes, stream)? };
        }
        if let Some(member) = &self.grid {
            let params = &bytemuck::bytes_of(&self.params)[..self.bytes];
            // SAFETY: by the contract of `new`, `params` is the parameter struct of the kernel and
            // fulfils the requirements of the kernel. The stream belongs to the driver of the grid,
            // because the stream and the grid belong to the same GPU of the communicator.
            return unsafe {
                member.grid.launch(
                    member.timeout,
                    member.rank,
                    self.kernel.name,
                    params,
                    self.shape,
                    stream,
                )
            };
        }
        let base = self.params.as_ptr().cast::<u8>();
        let mut parameters = [core::ptr::null_mut::<c_void>(); MAX_PARAMS];
        for (at, field) in parameters.iter_mut().zip(self.kernel.params) {
            *at = base.wrapping_add(field.offset).cast_mut().cast();
        }
        // SAFETY: the array contains the addresses of the kernel's arguments in order, because
        // `kernel.params` was compared with the metadata of the image. By the contract of `new` the
        // arguments fulfil the requirements of the kernel.
        unsafe {
            driver.launch(
                self.kernel.raw,
                &self.shape,
                &mut parameters[..self.kernel.params.len()],
                stream,
            )?;
        }
        Ok(())
    }
}
