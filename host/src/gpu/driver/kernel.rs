//! What a kernel needs, and how it is launched.

/// What a kernel needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionProperties {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: spills.
    pub local_bytes: u32,
    /// Bytes of statically allocated shared memory.
    pub shared_bytes: u32,
    /// Most threads of a block that it can be launched with.
    pub max_threads: u32,
}

/// Shape and attributes of a launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaunchShape {
    /// Blocks.
    pub blocks: u32,
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// Blocks of a cluster, 0 for none. NVIDIA from sm_90 on.
    pub cluster: u32,
    /// All blocks are resident together, or the launch is refused.
    pub cooperative: bool,
    /// May begin before the kernel before it on the stream has ended (programmatic dependent launch);
    /// the kernel itself waits for that kernel's memory.
    pub dependent: bool,
}
