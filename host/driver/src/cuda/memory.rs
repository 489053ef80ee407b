//! Allocation, export, import and release of memory.

use core::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys;

use super::context::{Cuda, RelaxedCapture};
use super::error::{self, OUT_OF_MEMORY, PEER_ACCESS_ALREADY_ENABLED};
use super::foreign;
use super::library::Library;
use super::open::open_cuda;
use super::virtual_memory::{self, DESCRIPTOR, FABRIC, Physical};
use crate::Result;
use crate::gpu::{
    Export, HANDLE_BYTES, HostMemory, Import, MemoryDriver, MemoryKind, Origin, RawMemory,
};

/// Allocation granularity of private memory in bytes.
const WHOLE_PRIVATE: u64 = 512;

/// Allocation granularity in bytes of shared memory that is exported by IPC. IPC maps whole device
/// pages, so IPC of a smaller allocation would also expose the other allocations in its page.
pub(super) const WHOLE_SHARED: u64 = 2 << 20;

/// Rounds `bytes` up to a multiple of `granularity`, and to at least one `granularity`.
pub(super) fn round_up(bytes: u64, granularity: u64) -> Result<u64> {
    bytes
        .max(1)
        .checked_next_multiple_of(granularity.max(1))
        .filter(|bytes| usize::try_from(*bytes).is_ok_and(|bytes| isize::try_from(bytes).is_ok()))
        .ok_or_else(|| {
            error::driver(
                "cuMemCreate",
                format!("{bytes} bytes exceed the address space"),
            )
        })
}

impl MemoryDriver for Cuda {
    /// Allocates zeroed memory.
    fn allocate(&self, bytes: u64, kind: MemoryKind) -> Result<RawMemory> {
        let library = self.relaxed()?;
        let memory = match kind {
            MemoryKind::Private => allocate_whole(&library, round_up(bytes, WHOLE_PRIVATE)?)?,
            MemoryKind::Shared => {
                let bytes = round_up(bytes, self.granularity)?;
                if self.handles == 0 {
                    allocate_whole(&library, bytes)?
                } else {
                    self.allocate_virtual(&library, bytes)?
                }
            }
        };
        let zeroed = self.on_own_stream(&library, |stream| {
            // SAFETY: the memory was allocated above, with `memory.bytes` bytes.
            library.check("cuMemsetD8Async", unsafe {
                (library.cuMemsetD8Async)(memory.address, 0, memory.bytes as usize, stream)
            })
        });
        if let Err(error) = zeroed {
            // SAFETY: the memory was allocated above, and no other code has its address. A second
            // error is ignored, because the first error is returned.
            let _ = unsafe { self.release(memory) };
            return Err(error);
        }
        Ok(memory)
    }

    /// Releases memory with the function that matches its [`Origin`].
    ///
    /// # Safety
    /// The preconditions of [`Driver::release`](crate::gpu::Driver::release).
    unsafe fn release(&self, memory: RawMemory) -> Result<()> {
        let library = self.relaxed()?;
        match memory.origin {
            Origin::Virtual | Origin::ImportedVirtual => {
                let bytes = memory.bytes;
                // SAFETY: `map` mapped `bytes` bytes at this address, and the caller guarantees
                // that the memory is not in use.
                let unmapped = unsafe { virtual_memory::unmap(&library, memory.address, bytes) };
                // SAFETY: the handle belongs to `memory`, which the caller releases once.
                let released = unsafe { (library.cuMemRelease)(memory.handle) };
                unmapped.and(library.check("cuMemRelease", released))
            }
            // SAFETY: `cuMemAlloc` returned the address, and the caller guarantees that the memory
            // is not in use.
            Origin::Whole => library.check("cuMemFree", unsafe {
                (library.cuMemFree_v2)(memory.address)
            }),
            // SAFETY: `cuIpcOpenMemHandle` returned the address, and the caller guarantees that the
            // memory is not in use.
            Origin::ImportedIpc => library.check("cuIpcCloseMemHandle", unsafe {
                (library.cuIpcCloseMemHandle)(memory.address)
            }),
        }
    }

    /// Exports memory for another process.
    fn export(&self, memory: &RawMemory) -> Result<Export> {
        let library = self.relaxed()?;
        match memory.origin {
            Origin::Virtual => virtual_memory::export(&library, memory.handle, self.handles),
            Origin::Whole => {
                let (base, _) = range(&library, memory.address)?;
                Ok(Export::Ipc(
                    ipc_handle(&library, base)?,
                    memory.address - base,
                ))
            }
            Origin::ImportedVirtual | Origin::ImportedIpc => Err(error::driver(
                "export",
                "memory imported from another process can only be exported by that process",
            )),
        }
    }

    /// Exports the allocation that contains `address` for another process. Also returns the base
    /// address and the size of the allocation.
    ///
    /// Memory from `cuMemAlloc` is exported by IPC. Memory from the virtual memory API has no IPC
    /// handle. For such memory, this function exports the physical allocation as a file descriptor
    /// or as a fabric handle, if the allocator requested such a handle type. The returned base and
    /// size then describe the physical allocation.
    fn export_foreign(&self, address: u64) -> Result<(Export, u64, u64)> {
        let library = self.relaxed()?;
        let (base, bytes) = range(&library, address).map_err(|error| {
            error::with(error, &format!("{address:#x} is not memory of this device"))
        })?;
        let refused = match ipc_handle(&library, base) {
            Ok(handle) => return Ok((Export::Ipc(handle, 0), base, bytes)),
            Err(error) => error,
        };
        let Some(physical) = foreign::retain(&library, address) else {
            return Err(error::with(
                refused,
                "neither cuMemAlloc nor cuMemCreate allocated this memory: memory of a pool \
                 (cudaMallocAsync) or of cudaMallocManaged cannot be shared; allocate it with \
                 Fusewire or with cudaMalloc",
            ));
        };
        let mut handles = foreign::handles(&library, &physical)?;
        if handles & DESCRIPTOR != 0 && !self.properties.fabric {
            handles &= !FABRIC;
        }
        let export = virtual_memory::export(&library, physical.handle(), handles)?;
        Ok((export, base, bytes))
    }

    /// Maps a peer's memory.
    fn import(&self, import: Import<'_>, bytes: u64) -> Result<RawMemory> {
        let library = self.relaxed()?;
        if bytes == 0 || round_up(bytes, 1).is_err() {
            return Err(error::driver(
                "import",
                format!("the peer reports a size of {bytes} bytes"),
            ));
        }
        if let Import::Ipc(handle) = import {
            return open_ipc(&library, handle, bytes);
        }
        let physical = virtual_memory::import(&library, import)?;
        let (device, handle) = (self.device, physical.handle());
        let address = virtual_memory::map(&library, device, handle, bytes, self.granularity)
            .map_err(|error| {
                error::with(
                    error,
                    "this is a peer's memory: it may have another size, may have been freed, or \
                     may be on a GPU that this GPU cannot access",
                )
            })?;
        Ok(RawMemory {
            address,
            bytes,
            handle: physical.keep(),
            origin: Origin::ImportedVirtual,
        })
    }

    /// Enables access to memory of another device, by `cuCtxEnablePeerAccess`.
    fn enable_peer_access(&self, peer: u32) -> Result<()> {
        if peer == self.properties.ordinal {
            return Ok(());
        }
        let other = open_cuda(peer)?;
        let library = self.relaxed()?;
        let mut can: c_int = 0;
        // SAFETY: `can` is writable.
        library.check("cuDeviceCanAccessPeer", unsafe {
            (library.cuDeviceCanAccessPeer)(&raw mut can, self.device, other.device)
        })?;
        if can == 0 {
            return Err(error::driver(
                "cuDeviceCanAccessPeer",
                format!(
                    "cuda:{} ({}) cannot access memory of cuda:{peer} ({}), because neither NVLink \
                     nor PCIe peer access connects them; run the ranks on GPUs that \
                     `nvidia-smi topo -p2p r` shows as OK (set CUDA_VISIBLE_DEVICES)",
                    self.properties.ordinal, self.properties.name, other.properties.name
                ),
            ));
        }
        // SAFETY: the primary context of the peer is retained and never released. The flags must be
        // 0.
        let code = unsafe { (library.cuCtxEnablePeerAccess)(other.context as sys::CUcontext, 0) };
        if code == PEER_ACCESS_ALREADY_ENABLED {
            return Ok(());
        }
        library.check("cuCtxEnablePeerAccess", code)
    }

    /// Allocates page-locked zeroed host memory.
    fn allocate_host(&self, bytes: usize) -> Result<HostMemory> {
        let library = self.relaxed()?;
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        let bytes = bytes.max(1);
        let pinned = host(&library, bytes, flags as c_uint)?;
        // SAFETY: the memory was allocated above, with `bytes` bytes.
        unsafe { pinned.write_bytes(0, bytes) };
        let mut device = 0;
        // SAFETY: `device` is writable, and `pinned` is page-locked memory that is mapped for
        // devices.
        let code = unsafe {
            (library.cuMemHostGetDevicePointer_v2)(&raw mut device, pinned.cast::<c_void>(), 0)
        };
        if let Err(error) = library.check("cuMemHostGetDevicePointer", code) {
            // SAFETY: the memory was allocated above, and no other code has its address. A second
            // error is ignored, because the first error is returned.
            let _ = unsafe { (library.cuMemFreeHost)(pinned.cast::<c_void>()) };
            return Err(error);
        }
        Ok(HostMemory {
            host: pinned,
            device,
            bytes,
        })
    }

    /// Frees page-locked memory.
    ///
    /// # Safety
    /// The preconditions of [`Driver::release_host`](crate::gpu::Driver::release_host).
    unsafe fn release_host(&self, memory: HostMemory) -> Result<()> {
        let library = self.relaxed()?;
        // SAFETY: the caller guarantees that `allocate_host`, which calls `cuMemHostAlloc`,
        // returned the memory, and that the memory is not in use.
        library.check("cuMemFreeHost", unsafe {
            (library.cuMemFreeHost)(memory.host.cast::<c_void>())
        })
    }
}

impl Cuda {
    /// Allocates physical memory that can be exported to other processes, and maps it.
    fn allocate_virtual(&self, library: &Library, bytes: u64) -> Result<RawMemory> {
        let properties = virtual_memory::properties(self.device, self.handles, self.rdma);
        let physical = Physical::create(library, &properties, bytes)?;
        let address = virtual_memory::map(
            library,
            self.device,
            physical.handle(),
            bytes,
            self.granularity,
        )?;
        Ok(RawMemory {
            address,
            bytes,
            handle: physical.keep(),
            origin: Origin::Virtual,
        })
    }
}

/// Allocates and maps memory with `cuMemAlloc`.
fn allocate_whole(library: &Library, bytes: u64) -> Result<RawMemory> {
    let mut address = 0;
    // SAFETY: `address` is writable.
    let code = unsafe { (library.cuMemAlloc_v2)(&raw mut address, bytes as usize) };
    check_sized(library, "cuMemAlloc", code, bytes)?;
    Ok(RawMemory {
        address,
        bytes,
        handle: 0,
        origin: Origin::Whole,
    })
}

/// Allocates page-locked memory.
pub(super) fn host(library: &Library, bytes: usize, flags: c_uint) -> Result<*mut u8> {
    let mut pinned = core::ptr::null_mut();
    // SAFETY: `pinned` is writable.
    library.check("cuMemHostAlloc", unsafe {
        (library.cuMemHostAlloc)(&raw mut pinned, bytes, flags)
    })?;
    Ok(pinned.cast::<u8>())
}

/// Returns the base address and the size of the allocation that contains `address`.
pub(super) fn range(library: &Library, address: u64) -> Result<(u64, u64)> {
    let (mut base, mut bytes) = (0, 0_usize);
    // SAFETY: `base` and `bytes` are writable. The function accepts any address.
    library.check("cuMemGetAddressRange", unsafe {
        (library.cuMemGetAddressRange_v2)(&raw mut base, &raw mut bytes, address)
    })?;
    Ok((base, bytes as u64))
}

/// Returns the IPC handle of an allocation.
pub(super) fn ipc_handle(library: &Library, base: u64) -> Result<[u8; HANDLE_BYTES]> {
    let mut handle = sys::CUipcMemHandle {
        reserved: [0; HANDLE_BYTES],
    };
    // SAFETY: `handle` is writable. The library returns an error for an invalid address.
    library.check("cuIpcGetMemHandle", unsafe {
        (library.cuIpcGetMemHandle)(&raw mut handle, base)
    })?;
    Ok(handle.reserved.map(|byte| byte as u8))
}

/// Maps the allocation that an IPC handle refers to. Fails if the allocation is smaller than
/// `bytes`.
fn open_ipc(
    library: &RelaxedCapture,
    handle: &[u8; HANDLE_BYTES],
    bytes: u64,
) -> Result<RawMemory> {
    let handle = sys::CUipcMemHandle {
        reserved: handle.map(|byte| byte as core::ffi::c_char),
    };
    let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as c_uint;
    let mut address = 0;
    // SAFETY: `address` is writable. The library returns an error for an invalid handle.
    let code = unsafe { (library.cuIpcOpenMemHandle_v2)(&raw mut address, handle, flags) };
    library
        .check("cuIpcOpenMemHandle", code)
        .map_err(|error| error::with(error, "the peer may have freed the memory or ended"))?;
    let memory = RawMemory {
        address,
        bytes,
        handle: 0,
        origin: Origin::ImportedIpc,
    };
    let there = match range(library, address) {
        Ok((base, there)) => there.saturating_sub(address - base),
        Err(error) => {
            // If the driver does not report the size, the mapping is accepted without a check.
            tracing::debug!(%error, "the size of a peer's allocation is unknown");
            return Ok(memory);
        }
    };
    if there >= bytes {
        return Ok(memory);
    }
    // SAFETY: the allocation was opened above, and no other code has its address. A second error is
    // ignored, because the first error is returned.
    let _ = unsafe { (library.cuIpcCloseMemHandle)(address) };
    Err(error::driver(
        "cuIpcOpenMemHandle",
        format!("the peer's allocation has {there} bytes; the peer reports {bytes}"),
    ))
}

/// Returns an error if `code`, the result code of an allocation, reports a failure. The error
/// contains the requested size and, if the device is out of memory, the size of the free memory.
pub(super) fn check_sized(
    library: &Library,
    call: &'static str,
    code: c_int,
    bytes: u64,
) -> Result<()> {
    library.check(call, code).map_err(|error| {
        let mut more = format!("requested {bytes} bytes");
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: `free` and `total` are writable.
        let known = unsafe { (library.cuMemGetInfo_v2)(&raw mut free, &raw mut total) };
        if code == OUT_OF_MEMORY && known == error::SUCCESS {
            more.push_str(&format!(", {free} of {total} are free"));
        }
        error::with(error, &more)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_multiples_and_never_zero() {
        assert_eq!(round_up(0, 512).ok(), Some(512));
        assert_eq!(round_up(512, 512).ok(), Some(512));
        assert_eq!(round_up(513, 512).ok(), Some(1024));
        assert!(round_up(u64::MAX - 1, 512).is_err());
        assert!(round_up(1 << 63, 1).is_err());
    }
}
