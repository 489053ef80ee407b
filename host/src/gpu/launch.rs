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

/// A kernel of a loaded module. Lives until the process ends.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// Symbol.
    pub(crate) name: &'static str,
    /// The driver's handle.
    pub(crate) raw: RawFunction,
    /// Layout of the parameter struct.
    pub(crate) params: &'static [ParamField],
    /// Resource usage.
    pub(crate) properties: FunctionProperties,
}

impl Kernel {
    /// Wraps `function`, whose parameters were compared with `params`.
    pub(super) fn new(function: &Function, params: &'static [ParamField]) -> Self {
        Self {
            name: function.name,
            raw: function.raw,
            params,
            properties: function.properties,
        }
    }
}

/// The part of one rank in a multi-rank grid.
#[derive(Clone, Debug)]
pub(crate) struct GridMember {
    /// The grid that launches for all ranks.
    pub(crate) grid: Arc<MultiRankGrid>,
    /// This rank in the grid.
    pub(crate) rank: u32,
    /// Time limit of the wait for the other ranks.
    pub(crate) timeout: Duration,
}

/// A kernel with its arguments and everything else that a launch needs: a plain record.
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
    /// Creates a launch of `kernel`. Copies `params`, the bytes of its parameter struct.
    ///
    /// # Safety
    /// `params` must be the parameter struct of `kernel`. At every execution of the launch (a graph
    /// may replay it later) the kernel's own requirements must hold, such as the validity of the
    /// pointers among its arguments; [`Launch::keeping`] helps.
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

    /// Sets the owner to call before and after each execution, with `info`.
    #[must_use]
    pub(crate) fn owned_by(mut self, owner: Arc<dyn LaunchOwner>, info: LaunchInfo) -> Self {
        self.owner = Some(owner);
        self.info = info;
        self
    }

    /// Keeps memory alive as long as the launch, or a graph that contains it, can run.
    #[must_use]
    pub(crate) fn keeping(mut self, keep: [Option<Arc<dyn Any + Send + Sync>>; 4]) -> Self {
        self.keep = keep;
        self
    }

    /// Copies a table to the device before the kernel, from page-locked memory that
    /// [`Launch::keeping`] keeps alive and that is not written until the copy is complete.
    #[must_use]
    pub(crate) fn uploading(mut self, upload: Option<Upload>) -> Self {
        self.upload = upload;
        self
    }

    /// Launches together with the other ranks if `member` is given. [`Launch::issue`] then waits
    /// for the launches of the other ranks.
    #[must_use]
    pub(crate) fn in_grid(mut self, member: Option<GridMember>) -> Self {
        self.grid = member;
        self
    }

    /// Enqueues the kernel on a stream.
    pub(super) fn issue(&self, driver: &dyn Driver, stream: RawStream) -> Result<()> {
        if let Some(upload) = self.upload {
            // SAFETY: `keep` holds both memories (see `uploading`). If the launch below fails,
            // `WorkKind::Failed` keeps them until the stream has executed the copy.
            unsafe { driver.copy(upload.to, upload.from, upload.bytes, stream)? };
        }
        if let Some(member) = &self.grid {
            let params = &bytemuck::bytes_of(&self.params)[..self.bytes];
            // SAFETY: by the contract of `new`, the bytes are the kernel's parameter struct and
            // fulfil its requirements. The stream belongs to the grid's driver, because both are of
            // this communicator's GPU.
            return unsafe {
                member.grid.launch_within(
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
        // SAFETY: the addresses are those of the kernel's arguments in order, because
        // `kernel.params` was compared with the image's metadata. By the contract of `new` the
        // arguments fulfil the kernel's requirements.
        unsafe {
            driver.launch(
                self.kernel.raw,
                &self.shape,
                &mut parameters[..self.kernel.params.len()],
                stream,
            )
        }
    }
}
