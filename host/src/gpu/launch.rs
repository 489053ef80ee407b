//! Kernels of a loaded module, and launches of them.

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
use crate::cpu::{Keep, LaunchInfo, LaunchOwner, MAX_PARAM_BYTES};
use crate::{Error, Result};

/// Most parameters of a kernel.
const MAX_PARAMS: usize = MAX_PARAM_BYTES / 4;

/// A kernel of a loaded module. It lives as long as the process.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// Symbol.
    pub(crate) name: &'static str,
    /// The library's handle.
    pub(crate) raw: RawFunction,
    /// Where each argument lies in the parameter struct.
    pub(crate) params: &'static [ParamField],
    /// What it needs.
    pub(crate) properties: FunctionProperties,
}

impl Kernel {
    /// `function`, which was compared with `params`.
    pub(super) fn new(function: &Function, params: &'static [ParamField]) -> Self {
        Self {
            name: function.name,
            raw: function.raw,
            params,
            properties: function.properties,
        }
    }
}

/// The way of a launch that goes out as a multi-rank grid with those of all other ranks.
#[derive(Clone, Debug)]
pub(crate) struct GridMember {
    /// Where ranks gather.
    pub(crate) grid: Arc<MultiRankGrid>,
    /// This rank there.
    pub(crate) rank: u32,
    /// How long it waits for the others.
    pub(crate) timeout: Duration,
}

/// A kernel with its arguments and all that a launch needs: a plain record.
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
    pub(super) keep: Keep,
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
    /// A launch of `kernel` with the bytes of its parameter struct, which are copied.
    ///
    /// # Safety
    /// As [`crate::cpu::Launch::new`].
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
                "{} bytes of parameters for kernel {}, which takes {needed} ({MAX_PARAM_BYTES} at most)",
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

    /// Reports each execution to `owner`, with `info`.
    #[must_use]
    pub(crate) fn owned_by(mut self, owner: Arc<dyn LaunchOwner>, info: LaunchInfo) -> Self {
        self.owner = Some(owner);
        self.info = info;
        self
    }

    /// Keeps memory alive as long as the launch, or a graph that holds it, can still run.
    #[must_use]
    pub(crate) fn keeping(mut self, keep: [Option<Arc<dyn Any + Send + Sync>>; 4]) -> Self {
        self.keep = keep;
        self
    }

    /// Has a table be copied to the device before the kernel, from page-locked memory that is kept alive
    /// ([`Launch::keeping`]), and that nobody writes meanwhile.
    #[must_use]
    pub(crate) fn uploading(mut self, upload: Option<Upload>) -> Self {
        self.upload = upload;
        self
    }

    /// Has the launch go out with those of all other ranks, where `via` is one: [`Launch::issue`] then waits for theirs.
    #[must_use]
    pub(crate) fn in_grid(mut self, member: Option<GridMember>) -> Self {
        self.grid = member;
        self
    }

    /// Puts the kernel on a stream.
    pub(super) fn issue(&self, driver: &dyn Driver, stream: RawStream) -> Result<()> {
        if let Some(upload) = self.upload {
            // SAFETY: both are kept alive as long as the launch, by the contract of `uploading`; also where the launch below
            // fails, until the stream has come past it.
            unsafe { driver.copy(upload.to, upload.from, upload.bytes, stream)? };
        }
        if let Some(member) = &self.grid {
            let params = &bytemuck::bytes_of(&self.params)[..self.bytes];
            // SAFETY: the bytes are the kernel's parameter struct, and that they fulfil its requirements is the contract of
            // `new`; the stream is one of this driver's.
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
        // SAFETY: the addresses are those of the kernel's arguments, in order, by the list that was compared with the
        // image's own; that they fulfil its requirements is the contract of `new`.
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
