//! Resource usage of kernels, and shapes of launches.

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
