//! Properties of a GPU.

/// What is known of a GPU.
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
    /// Lanes of a warp (wave).
    pub warp: u32,
    /// Most threads of a block.
    pub max_threads: u32,
    /// Bytes of shared memory that a block may use.
    pub shared_bytes: u32,
    /// Version of driver (CUDA: 13000 for 13.0) or run time.
    pub version: u32,
    /// Whether memory can be exported as a file descriptor; else there are IPC handles only.
    pub descriptors: bool,
    /// Whether memory can be exported as a fabric handle (NVLink between hosts).
    pub fabric: bool,
    /// The NVLink domain that the GPU is in, where its memory can be reached from other hosts: ranks whose GPUs are in one
    /// domain reach each other wherever they are. Never there without `fabric`.
    pub domain: Option<String>,
    /// Whether the GPU can be part of a multicast object (NVLink SHARP).
    pub multicast: bool,
    /// Whether cooperative launches are possible.
    pub cooperative: bool,
}
