//! Resource usage of kernels, and shapes of launches.

use core::ffi::{CStr, c_void};

use super::{DeviceDriver, RawFunction, RawModule, RawStream};
use crate::Result;

/// Resource usage of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionProperties {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of local memory per thread (register spills and stack).
    pub local_bytes: u32,
    /// Bytes of statically allocated shared memory.
    pub shared_bytes: u32,
    /// Maximum number of threads per block.
    pub max_threads: u32,
    /// True if the kernel may be compiled for dependent launches: it comes from PTX for sm_90 or
    /// later, or is machine code for such a GPU. Other code does not wait for the previous kernel.
    pub dependent_launch: bool,
}

/// Shape and attributes of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchShape {
    /// Number of blocks.
    pub blocks: u32,
    /// Threads per block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// Blocks per cluster, or 0 for a launch without clusters. Requires an NVIDIA GPU of sm_90 or
    /// later.
    pub cluster: u32,
    /// Requires that all blocks are resident at the same time. If they do not fit on the GPU, the
    /// launch returns an error.
    pub cooperative: bool,
    /// Allows the kernel to begin before the previous kernel on the stream has finished
    /// (programmatic dependent launch). The kernel must execute `griddepcontrol.wait` before it
    /// accesses memory that the previous kernel uses.
    pub dependent: bool,
}

/// Modules and kernels.
pub trait ModuleDriver: DeviceDriver {
    /// Loads PTX (zero-terminated text), a cubin or a code object, including all of the kernels in
    /// it. May wait for the device.
    ///
    /// # Errors
    /// `Error::Driver` with the log of the library's compiler.
    fn load(&self, image: &[u8]) -> Result<RawModule>;

    /// Returns the kernel with the symbol `name`, or `None` if the module has no such kernel.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn function(&self, module: RawModule, name: &CStr) -> Result<Option<RawFunction>>;

    /// Returns the offset and size in bytes of each parameter of a kernel, as the image declares
    /// them, or `None` if the driver library does not report parameters.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn parameters(&self, function: RawFunction) -> Result<Option<Vec<(usize, usize)>>>;

    /// Returns the resource usage of a kernel.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn function_properties(&self, function: RawFunction) -> Result<FunctionProperties>;

    /// Returns the maximum number of blocks that one SM can hold at once. Each block has `threads`
    /// threads and `shared_bytes` bytes of dynamic shared memory.
    ///
    /// # Errors
    /// `Error::Driver`.
    fn resident_blocks(
        &self,
        function: RawFunction,
        threads: u32,
        shared_bytes: u32,
    ) -> Result<u32>;

    /// Launches a kernel. `parameters` holds the addresses of the kernel's arguments, in order.
    ///
    /// # Safety
    /// The number and types of the arguments must be those of the kernel's parameters. The
    /// arguments must fulfil the kernel's safety requirements until the kernel has finished.
    ///
    /// # Errors
    /// `Error::Driver`.
    unsafe fn launch(
        &self,
        function: RawFunction,
        shape: &LaunchShape,
        parameters: &mut [*mut c_void],
        stream: RawStream,
    ) -> Result<()>;
}
