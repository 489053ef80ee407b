//! Properties of a GPU.

/// Properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Index among the GPUs that are visible to the process.
    pub ordinal: u32,
    /// Marketing name.
    pub name: String,
    /// Architecture: `sm_90`, `gfx942`.
    pub architecture: String,
    /// Identifier of the GPU. All processes and containers on a host see the same identifier.
    pub uuid: [u8; 16],
    /// Bytes of memory.
    pub memory: u64,
    /// Number of SMs (compute units on AMD).
    pub multiprocessors: u32,
    /// Lanes per warp (wavefront on AMD).
    pub warp: u32,
    /// Maximum number of threads per block.
    pub max_threads: u32,
    /// Maximum bytes of shared memory per block.
    pub shared_bytes: u32,
    /// CUDA version that the driver supports (13000 for 13.0), or the version of the HIP runtime.
    pub version: u32,
    /// Set if memory can be exported as a file descriptor. Otherwise only IPC handles are
    /// available.
    pub descriptors: bool,
    /// Set if memory can be exported as a fabric handle (NVLink between hosts).
    pub fabric: bool,
    /// The NVLink domain of the GPU, or `None` if GPUs of other hosts cannot access its memory.
    /// Ranks whose GPUs are in the same domain can access each other's memory across hosts. Always
    /// `None` if `fabric` is false.
    pub domain: Option<String>,
    /// Set if the GPU supports multicast objects (NVLink SHARP).
    pub multicast: bool,
    /// Set if the GPU supports cooperative launches.
    pub cooperative: bool,
}
