//! Properties of a GPU.

/// Properties of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties {
    /// Number among the GPUs that the process sees.
    pub ordinal: u32,
    /// Marketing name.
    pub name: String,
    /// Architecture: `sm_90`, `gfx942`.
    pub architecture: String,
    /// Identifies the GPU across processes of a host and containers.
    pub uuid: [u8; 16],
    /// Bytes of memory.
    pub memory: u64,
    /// Multiprocessors (compute units).
    pub multiprocessors: u32,
    /// Lanes per warp (wave).
    pub warp: u32,
    /// Maximum number of threads per block.
    pub max_threads: u32,
    /// Maximum bytes of shared memory per block.
    pub shared_bytes: u32,
    /// Version of the driver (CUDA: 13000 for 13.0) or of the run time (HIP).
    pub version: u32,
    /// Set if memory can be exported as a file descriptor. Otherwise only IPC handles are
    /// available.
    pub descriptors: bool,
    /// Set if memory can be exported as a fabric handle (NVLink between hosts).
    pub fabric: bool,
    /// The NVLink domain of the GPU, if its memory can be reached from other hosts: ranks whose
    /// GPUs are in one domain reach each other on any host. `None` without `fabric`.
    pub domain: Option<String>,
    /// Set if the GPU supports multicast objects (NVLink SHARP).
    pub multicast: bool,
    /// Set if the GPU supports cooperative launches.
    pub cooperative: bool,
}
