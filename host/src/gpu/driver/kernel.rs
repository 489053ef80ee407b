//! Resource usage of kernels, and shapes of launches.

/// Resource usage of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionProperties {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of local memory per thread (spills).
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
    /// Blocks per cluster, 0 for none. NVIDIA from sm_90 on.
    pub cluster: u32,
    /// Requires that all blocks are resident together; otherwise the launch is refused.
    pub cooperative: bool,
    /// Allows the kernel to begin before the previous kernel on the stream has ended (programmatic
    /// dependent launch). The kernel itself waits for the previous kernel's memory.
    pub dependent: bool,
}
