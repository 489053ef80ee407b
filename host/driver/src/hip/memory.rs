//! GPU memory and page-locked memory, sharing by IPC, and copies that do not wait for other
//! streams.
//!
//! Memory that peers use is **uncached** (`hipDeviceMallocUncached`). A running kernel polls words
//! that another GPU writes. HIP guarantees coherence of ordinary (coarse-grained) device memory
//! only at synchronisation points: until then, the L2 cache of the owner may return an old value.
//! Fine-grained memory and uncached memory are also coherent while a kernel runs. Uncached memory
//! is the stricter of the two kinds, and other communication libraries also use it. In RCCL, the
//! memory that kernels poll is uncached: RCCL's builds define `HIP_UNCACHED_MEMORY`, and without
//! this definition kernels on MI300 hang. The all-reduce of vLLM uses uncached memory, because its
//! signals need such memory on MI200. rocSHMEM has an option for an uncached symmetric heap. Every
//! fence that is sufficient for fine-grained memory is sufficient for uncached memory, but local
//! reads of uncached memory are slower. Memory that only this GPU uses is [`MemoryKind::Private`].

use core::ffi::{c_char, c_uint, c_void};
use core::ops::Range;
use core::ptr;

use super::bindings::{self as hip, Int, hipIpcMemHandle_t, hipStream_t};
use super::device::Hip;
use super::error::driver_error;
use crate::Result;
use crate::gpu::{
    CopyDriver, Export, HANDLE_BYTES, HostMemory, Import, MemoryDriver, MemoryKind, Origin,
    RawMemory, RawStream, StreamDriver, StreamPriority,
};

/// Allocation granularity of private memory in bytes: one page.
const PRIVATE_GRANULARITY: u64 = 4096;
/// Allocation granularity of shared memory in bytes. The runtime combines smaller allocations in
/// one larger allocation, and IPC would expose the whole larger allocation to the peer.
const SHARED_GRANULARITY: u64 = 2 << 20;
/// Size of the page-locked copy buffer in bytes.
const STAGING_BYTES: usize = 1 << 20;
/// A byte's offset in the copy buffer and its device address are equal modulo this number.
const STAGING_ALIGNMENT: usize = 256;

/// Page-locked buffer and stream for [`Hip::write`] and [`Hip::read`].
#[derive(Debug, Default)]
pub(super) struct Staging {
    /// Address of the buffer.
    host: usize,
    /// Handle of the stream.
    stream: usize,
}

impl Staging {
    fn stream(&self) -> hipStream_t {
        self.stream as hipStream_t
    }
}

impl Hip {
    pub(super) fn create_staging(&self) -> Result<Staging> {
        let memory = self.allocate_host(STAGING_BYTES)?;
        let stream = self.create_stream(StreamPriority::Highest)?;
        Ok(Staging {
            host: memory.host as usize,
            stream: stream.0,
        })
    }

    /// Zeroes new memory and waits for completion.
    fn zero(&self, pointer: *mut c_void, bytes: usize) -> Result<()> {
        let staging = self.staging();
        let stream = staging.stream();
        // SAFETY: the memory at `pointer` has just been allocated with `bytes` bytes, and no other
        // code uses it.
        let status = unsafe { (self.functions.hipMemsetAsync)(pointer, 0, bytes, stream) };
        self.functions.check("hipMemsetAsync", status)?;
        self.wait(stream)
    }

    /// Waits for the staging stream.
    fn wait(&self, stream: hipStream_t) -> Result<()> {
        // SAFETY: the staging stream is never destroyed.
        let status = unsafe { (self.functions.hipStreamSynchronize)(stream) };
        self.functions.check("hipStreamSynchronize", status)
    }

    /// Returns the base address and the size of the allocation that contains `address`.
    fn range(&self, address: u64) -> Result<(u64, u64)> {
        let (mut base, mut bytes) = (ptr::null_mut(), 0);
        // SAFETY: `base` and `bytes` are writable. The runtime returns an error for an unknown
        // address.
        let status = unsafe {
            (self.functions.hipMemGetAddressRange)(&mut base, &mut bytes, address as *mut c_void)
        };
        self.functions.check("hipMemGetAddressRange", status)?;
        let (base, bytes) = (base as u64, bytes as u64);
        if base > address || address - base >= bytes {
            return Err(driver_error(
                "hipMemGetAddressRange",
                &format!("address {address:#x} is not within {bytes} bytes at {base:#x}"),
            ));
        }
        Ok((base, bytes))
    }
}

impl MemoryDriver for Hip {
    fn allocate(&self, bytes: u64, kind: MemoryKind) -> Result<RawMemory> {
        let (call, granularity) = match kind {
            MemoryKind::Private => ("hipMalloc", PRIVATE_GRANULARITY),
            MemoryKind::Shared => ("hipExtMallocWithFlags", SHARED_GRANULARITY),
        };
        let (bytes, size) = rounded(bytes, granularity)
            .ok_or_else(|| driver_error(call, &format!("{bytes} bytes cannot be allocated")))?;
        let _relaxed = self.relaxed()?;
        let mut pointer = ptr::null_mut();
        let status = match kind {
            // SAFETY: `pointer` is writable.
            MemoryKind::Private => unsafe { (self.functions.hipMalloc)(&mut pointer, size) },
            // SAFETY: `pointer` is writable.
            MemoryKind::Shared => unsafe {
                (self.functions.hipExtMallocWithFlags)(&mut pointer, size, hip::MALLOC_UNCACHED)
            },
        };
        self.functions.check(call, status)?;
        let memory = RawMemory {
            address: pointer as u64,
            bytes,
            handle: 0,
            origin: Origin::Whole,
        };
        if let Err(error) = self.zero(pointer, size) {
            // SAFETY: the memory was allocated above, and no other code has its address.
            unsafe { self.release(memory) }?;
            return Err(error);
        }
        Ok(memory)
    }

    /// # Safety
    /// The preconditions of `Driver::release`.
    unsafe fn release(&self, memory: RawMemory) -> Result<()> {
        let _relaxed = self.relaxed()?;
        let pointer = memory.address as *mut c_void;
        match memory.origin {
            Origin::Whole => {
                // SAFETY: `hipMalloc` or `hipExtMallocWithFlags` returned the address, and the
                // caller guarantees that the memory is not in use.
                let status = unsafe { (self.functions.hipFree)(pointer) };
                self.functions.check("hipFree", status)
            }
            Origin::ImportedIpc => {
                // SAFETY: `hipIpcOpenMemHandle` returned the address, and the caller guarantees
                // that the memory is not in use.
                let status = unsafe { (self.functions.hipIpcCloseMemHandle)(pointer) };
                self.functions.check("hipIpcCloseMemHandle", status)
            }
            Origin::Virtual | Origin::ImportedVirtual => Err(driver_error(
                "hipFree",
                "this driver did not allocate the memory: it has no virtual memory",
            )),
        }
    }

    /// Exports memory for a peer, in the same way as [`Hip::export_foreign`].
    fn export(&self, memory: &RawMemory) -> Result<Export> {
        self.export_foreign(memory.address)
            .map(|(export, _, _)| export)
    }

    /// Exports the allocation that contains `address` as an IPC handle for its base address. A
    /// handle for `address` itself would map the memory starting at `address`, not at the base.
    /// Also returns the base address and the size of the allocation.
    fn export_foreign(&self, address: u64) -> Result<(Export, u64, u64)> {
        let _relaxed = self.relaxed()?;
        let (base, bytes) = self.range(address)?;
        let mut handle = hipIpcMemHandle_t {
            reserved: [0; HANDLE_BYTES],
        };
        // SAFETY: `handle` is writable. The runtime returns an error for an unknown address.
        let status =
            unsafe { (self.functions.hipIpcGetMemHandle)(&mut handle, base as *mut c_void) };
        self.functions.check("hipIpcGetMemHandle", status)?;
        let handle = handle.reserved.map(c_char::cast_unsigned);
        Ok((Export::Ipc(handle, address - base), base, bytes))
    }

    fn import(&self, import: Import<'_>, bytes: u64) -> Result<RawMemory> {
        let Import::Ipc(handle) = import else {
            return Err(driver_error(
                "hipIpcOpenMemHandle",
                "HIP can only open IPC handles, and this is another kind of export; all ranks of a \
                 communicator need the same kind of GPU",
            ));
        };
        let _relaxed = self.relaxed()?;
        let handle = hipIpcMemHandle_t {
            reserved: handle.map(u8::cast_signed),
        };
        let mut pointer = ptr::null_mut();
        // SAFETY: `pointer` is writable. The runtime returns an error for an invalid handle.
        let status = unsafe {
            (self.functions.hipIpcOpenMemHandle)(&mut pointer, handle, hip::IPC_LAZY_PEER_ACCESS)
        };
        self.functions.check("hipIpcOpenMemHandle", status)?;
        let memory = RawMemory {
            address: pointer as u64,
            bytes,
            handle: 0,
            origin: Origin::ImportedIpc,
        };
        let found = self.range(memory.address);
        if let Ok((base, found)) = found
            && base == memory.address
            && found >= bytes
        {
            return Ok(memory);
        }
        // SAFETY: the memory was opened above, and no other code has its address.
        unsafe { self.release(memory) }?;
        let (base, found) = found?;
        Err(driver_error(
            "hipIpcOpenMemHandle",
            &format!(
                "the peer reports {bytes} bytes, but the handle has {found} at {base:#x} for {:#x}",
                memory.address
            ),
        ))
    }

    fn enable_peer_access(&self, peer: u32) -> Result<()> {
        let other = Int::try_from(peer).unwrap_or(Int::MAX);
        if other == self.ordinal {
            return Ok(());
        }
        let _relaxed = self.relaxed()?;
        let mut can: Int = 0;
        // SAFETY: `can` is writable.
        let status =
            unsafe { (self.functions.hipDeviceCanAccessPeer)(&mut can, self.ordinal, other) };
        self.functions.check("hipDeviceCanAccessPeer", status)?;
        if can == 0 {
            return Err(driver_error(
                "hipDeviceCanAccessPeer",
                &format!(
                    "hip:{} ({}) cannot access memory of hip:{peer}, because neither xGMI nor PCIe \
                     peer access connects them; run the ranks on GPUs that \
                     `rocm-smi --showtopoaccess` shows as connected (set HIP_VISIBLE_DEVICES)",
                    self.ordinal, self.properties.name
                ),
            ));
        }
        // SAFETY: the function takes only integers. The flags must be 0.
        let status = unsafe { (self.functions.hipDeviceEnablePeerAccess)(other, 0) };
        if status == hip::ERROR_PEER_ACCESS_ALREADY_ENABLED {
            self.functions.forget();
            return Ok(());
        }
        self.functions.check("hipDeviceEnablePeerAccess", status)
    }

    fn allocate_host(&self, bytes: usize) -> Result<HostMemory> {
        if bytes == 0 {
            return Err(driver_error("hipHostMalloc", "0 bytes cannot be allocated"));
        }
        let _relaxed = self.relaxed()?;
        let flags: c_uint = hip::HOST_PORTABLE | hip::HOST_MAPPED | hip::HOST_COHERENT;
        let mut host = ptr::null_mut();
        // SAFETY: `host` is writable.
        let status = unsafe { (self.functions.hipHostMalloc)(&mut host, bytes, flags) };
        self.functions.check("hipHostMalloc", status)?;
        let mut device = ptr::null_mut();
        // SAFETY: `device` is writable, and `host` is mapped page-locked memory.
        let status = unsafe { (self.functions.hipHostGetDevicePointer)(&mut device, host, 0) };
        let memory = HostMemory {
            host: host.cast(),
            device: device as u64,
            bytes,
        };
        if let Err(error) = self.functions.check("hipHostGetDevicePointer", status) {
            // SAFETY: the memory was allocated above, and no other code has its address.
            unsafe { self.release_host(memory) }?;
            return Err(error);
        }
        // SAFETY: the memory was allocated above, with `bytes` bytes.
        unsafe { memory.host.write_bytes(0, bytes) };
        Ok(memory)
    }

    /// # Safety
    /// The preconditions of `Driver::release_host`.
    unsafe fn release_host(&self, memory: HostMemory) -> Result<()> {
        let _relaxed = self.relaxed()?;
        // SAFETY: the caller guarantees that `allocate_host`, which calls `hipHostMalloc`, returned
        // the memory, and that the memory is not in use.
        let status = unsafe { (self.functions.hipHostFree)(memory.host.cast()) };
        self.functions.check("hipHostFree", status)
    }
}

impl CopyDriver for Hip {
    /// # Safety
    /// The preconditions of `Driver::write`.
    unsafe fn write(&self, to: u64, from: &[u8]) -> Result<()> {
        let _relaxed = self.relaxed()?;
        let staging = self.staging();
        for piece in Pieces::new(to, from.len()) {
            let buffer = (staging.host + piece.staging) as *mut u8;
            let bytes = &from[piece.range.clone()];
            // SAFETY: a piece fits into the buffer. The lock gives exclusive access to the buffer,
            // and no copy is in progress.
            unsafe { buffer.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            let target = (to + piece.range.start as u64) as *mut c_void;
            // SAFETY: the buffer lives as long as the driver, and the caller guarantees that the
            // device memory is mapped.
            let status = unsafe {
                (self.functions.hipMemcpyAsync)(
                    target,
                    buffer.cast(),
                    bytes.len(),
                    hip::COPY_HOST_TO_DEVICE,
                    staging.stream(),
                )
            };
            self.functions.check("hipMemcpyAsync", status)?;
            self.wait(staging.stream())?;
        }
        Ok(())
    }

    /// # Safety
    /// The preconditions of `Driver::read`.
    unsafe fn read(&self, to: &mut [u8], from: u64) -> Result<()> {
        let _relaxed = self.relaxed()?;
        let staging = self.staging();
        for piece in Pieces::new(from, to.len()) {
            let buffer = (staging.host + piece.staging) as *mut u8;
            let source = (from + piece.range.start as u64) as *const c_void;
            let bytes = &mut to[piece.range];
            // SAFETY: a piece fits into the buffer, and the lock gives exclusive access to the
            // buffer. The caller guarantees that the device memory is mapped.
            let status = unsafe {
                (self.functions.hipMemcpyAsync)(
                    buffer.cast(),
                    source,
                    bytes.len(),
                    hip::COPY_DEVICE_TO_HOST,
                    staging.stream(),
                )
            };
            self.functions.check("hipMemcpyAsync", status)?;
            self.wait(staging.stream())?;
            // SAFETY: the copy of `bytes.len()` bytes to the buffer has completed.
            unsafe { buffer.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        }
        Ok(())
    }

    /// # Safety
    /// The preconditions of `Driver::copy`.
    unsafe fn copy(&self, to: u64, from: u64, bytes: u64, stream: RawStream) -> Result<()> {
        let _current = self.current()?;
        let size = usize::try_from(bytes)
            .map_err(|_| driver_error("hipMemcpyAsync", "the size exceeds the address space"))?;
        if size == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees that both ranges stay mapped until the copy is complete.
        let status = unsafe {
            (self.functions.hipMemcpyAsync)(
                to as *mut c_void,
                from as *const c_void,
                size,
                hip::COPY_DEFAULT,
                stream.0 as hipStream_t,
            )
        };
        self.functions.check("hipMemcpyAsync", status)
    }
}

/// Rounds `bytes` up to a multiple of `granularity`, and to at least one `granularity`. Returns the
/// size as `u64` and as `usize`, or `None` if the size exceeds the address space.
fn rounded(bytes: u64, granularity: u64) -> Option<(u64, usize)> {
    let bytes = bytes.max(1).checked_next_multiple_of(granularity)?;
    // An allocation cannot exceed `isize::MAX` bytes.
    isize::try_from(bytes).ok()?;
    Some((bytes, usize::try_from(bytes).ok()?))
}

/// Splits a copy between device memory and the page-locked buffer into pieces. The buffer offset
/// and the device address of a byte are equal modulo [`STAGING_ALIGNMENT`], and a piece ends only
/// at a multiple of [`STAGING_ALIGNMENT`] or at the end of the copy. As a result, aligned words are
/// not torn, and copy engines move aligned bursts.
#[derive(Debug)]
struct Pieces {
    address: u64,
    done: usize,
    bytes: usize,
}

/// One piece of a copy.
#[derive(Debug, PartialEq, Eq)]
struct Piece {
    /// Range of the piece in the caller's bytes.
    range: Range<usize>,
    /// Offset of the piece in the page-locked buffer.
    staging: usize,
}

impl Pieces {
    fn new(address: u64, bytes: usize) -> Self {
        Self {
            address,
            done: 0,
            bytes,
        }
    }
}

impl Iterator for Pieces {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.done == self.bytes {
            return None;
        }
        let offset = self.address.wrapping_add(self.done as u64) % STAGING_ALIGNMENT as u64;
        let staging = offset as usize;
        let end = self.bytes.min(self.done + STAGING_BYTES - staging);
        let range = self.done..end;
        self.done = end;
        Some(Piece { range, staging })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_rounded_up_and_bounded() {
        assert_eq!(rounded(0, 4096), Some((4096, 4096)));
        assert_eq!(rounded(4096, 4096), Some((4096, 4096)));
        assert_eq!(rounded(4097, 4096), Some((8192, 8192)));
        assert_eq!(rounded(u64::MAX, 4096), None);
        assert_eq!(rounded(i64::MAX as u64, 4096), None);
    }

    /// Checks that no aligned group of eight bytes is split, that every byte is copied exactly
    /// once, and that buffer offsets and device addresses are equal modulo 64.
    fn check(pieces: &[Piece], address: u64, bytes: usize) -> Result<(), String> {
        let mut done = 0;
        for piece in pieces {
            let at = address + piece.range.start as u64;
            if piece.range.start != done || piece.range.is_empty() {
                return Err(format!("{piece:?} after {done}"));
            }
            if piece.range.start != 0 && !at.is_multiple_of(8) {
                return Err(format!("a word is cut at {at:#x}"));
            }
            if at % 64 != piece.staging as u64 % 64 {
                return Err(format!("{piece:?} has another offset than {at:#x}"));
            }
            if piece.staging + piece.range.len() > STAGING_BYTES {
                return Err(format!("{piece:?} does not fit"));
            }
            done = piece.range.end;
        }
        (done == bytes)
            .then_some(())
            .ok_or(format!("{done} of {bytes}"))
    }

    #[test]
    fn copies_never_cut_an_aligned_word() {
        for address in (0x7f00_0000_0000..).take(300) {
            for bytes in [
                0,
                1,
                7,
                8,
                STAGING_BYTES - 1,
                STAGING_BYTES,
                3 * STAGING_BYTES + 5,
            ] {
                let pieces: Vec<_> = Pieces::new(address, bytes).collect();
                check(&pieces, address, bytes).unwrap();
            }
        }
    }

    #[test]
    fn a_cut_word_is_found() {
        let cut = |range, staging| Piece { range, staging };
        check(&[cut(0..4, 0), cut(4..16, 4)], 0, 16).unwrap_err();
        check(&[cut(0..8, 8)], 0, 8).unwrap_err();
        check(&[cut(0..8, 0)], 0, 16).unwrap_err();
        check(&[cut(0..8, 0), cut(8..16, 8)], 0, 16).unwrap();
    }
}
