//! Memory of the GPU and page-locked memory, sharing by IPC, and copies beside whatever runs.
//!
//! Memory that peers use is **uncached** (`hipDeviceMallocUncached`), not merely fine-grained: a
//! kernel polls words that another GPU writes while it runs. HIP promises coherence of ordinary
//! (coarse-grained) device memory at synchronisations only, not within a kernel: the owner's L2 may
//! keep a word for as long. Of the two kinds that are coherent within kernels, the libraries that
//! do the same took the stricter: RCCL allocates what its kernels poll as uncached (its builds
//! define `HIP_UNCACHED_MEMORY` because kernels on MI300 would hang without), vLLM's all-reduce
//! does so for its signals because of MI200, and rocSHMEM can have its symmetric heap so. It is
//! right with any fence that is right for fine-grained memory, at the price of slower local reads;
//! data that only this GPU uses is [`MemoryKind::Private`].

use core::ffi::{c_char, c_uint, c_void};
use core::ops::Range;
use core::ptr;

use super::bindings::{self as hip, hipIpcMemHandle_t, hipStream_t};
use super::device::Hip;
use super::error::driver_error;
use crate::Result;
use crate::gpu::driver::{
    Export, HANDLE_BYTES, HostMemory, Import, MemoryKind, Origin, RawMemory, RawStream,
};

/// Granularity of private memory: a page.
const PRIVATE_GRANULARITY: u64 = 4096;
/// Granularity of shared memory: what the run time maps as one piece. Smaller allocations come from
/// blocks that it divides, and IPC would show all of such a block to the peer.
const SHARED_GRANULARITY: u64 = 2 << 20;
/// Bytes of the page-locked copy buffer.
const STAGING_BYTES: usize = 1 << 20;
/// Copies have the same offset within so many bytes in the buffer and on the device.
const STAGING_ALIGNMENT: usize = 256;

/// A page-locked buffer and a stream, for [`Hip::write`] and [`Hip::read`].
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
        let stream = self.create_stream()?;
        Ok(Staging {
            host: memory.host as usize,
            stream: stream.0,
        })
    }

    pub(super) fn allocate(&self, bytes: u64, kind: MemoryKind) -> Result<RawMemory> {
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
            // SAFETY: it was allocated just now, and nobody knows it.
            unsafe { self.release(memory) }?;
            return Err(error);
        }
        Ok(memory)
    }

    /// Zeroes fresh memory and waits for that.
    fn zero(&self, pointer: *mut c_void, bytes: usize) -> Result<()> {
        let staging = self.staging();
        let stream = staging.stream();
        // SAFETY: the memory is as long, and nobody else's yet.
        let status = unsafe { (self.functions.hipMemsetAsync)(pointer, 0, bytes, stream) };
        self.functions.check("hipMemsetAsync", status)?;
        self.wait(stream)
    }

    /// Waits for the staging stream.
    fn wait(&self, stream: hipStream_t) -> Result<()> {
        // SAFETY: the stream is this driver's own, and lives as long.
        let status = unsafe { (self.functions.hipStreamSynchronize)(stream) };
        self.functions.check("hipStreamSynchronize", status)
    }

    /// # Safety
    /// As `Driver::release`.
    pub(super) unsafe fn release(&self, memory: RawMemory) -> Result<()> {
        let _relaxed = self.relaxed()?;
        let pointer = memory.address as *mut c_void;
        match memory.origin {
            Origin::Whole => {
                // SAFETY: it came from hipMalloc or hipExtMallocWithFlags; the rest is the caller's
                // promise.
                let status = unsafe { (self.functions.hipFree)(pointer) };
                self.functions.check("hipFree", status)
            }
            Origin::ImportedIpc => {
                // SAFETY: it came from hipIpcOpenMemHandle; the rest is the caller's promise.
                let status = unsafe { (self.functions.hipIpcCloseMemHandle)(pointer) };
                self.functions.check("hipIpcCloseMemHandle", status)
            }
            Origin::Virtual | Origin::ImportedVirtual => Err(driver_error(
                "hipFree",
                "the memory is not of this driver, which makes no virtual memory",
            )),
        }
    }

    /// What a peer imports: all memory goes as somebody else's would.
    pub(super) fn export(&self, memory: &RawMemory) -> Result<Export> {
        self.export_foreign(memory.address)
            .map(|(export, _, _)| export)
    }

    /// The handle is that of the allocation, so that opening it gives its base: HIP's handles of an
    /// address within would open at that address.
    pub(super) fn export_foreign(&self, address: u64) -> Result<(Export, u64, u64)> {
        let _relaxed = self.relaxed()?;
        let (base, bytes) = self.range(address)?;
        let mut handle = hipIpcMemHandle_t {
            reserved: [0; HANDLE_BYTES],
        };
        // SAFETY: `handle` is writable; the run time refuses an address that it does not know.
        let status =
            unsafe { (self.functions.hipIpcGetMemHandle)(&mut handle, base as *mut c_void) };
        self.functions.check("hipIpcGetMemHandle", status)?;
        let handle = handle.reserved.map(c_char::cast_unsigned);
        Ok((Export::Ipc(handle, address - base), base, bytes))
    }

    /// Base and bytes of the allocation that an address lies in.
    fn range(&self, address: u64) -> Result<(u64, u64)> {
        let (mut base, mut bytes) = (ptr::null_mut(), 0);
        // SAFETY: both are writable; the run time refuses an address that it does not know.
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

    pub(super) fn import(&self, import: Import<'_>, bytes: u64) -> Result<RawMemory> {
        let Import::Ipc(handle) = import else {
            return Err(driver_error(
                "hipIpcOpenMemHandle",
                "HIP opens IPC handles only, and this is another kind of export; all ranks of a \
                 communicator need the same kind of GPU",
            ));
        };
        let _relaxed = self.relaxed()?;
        let handle = hipIpcMemHandle_t {
            reserved: handle.map(u8::cast_signed),
        };
        let mut pointer = ptr::null_mut();
        // SAFETY: `pointer` is writable; the run time checks the handle.
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
        // SAFETY: it was opened just now, and nobody knows it.
        unsafe { self.release(memory) }?;
        let (base, found) = found?;
        Err(driver_error(
            "hipIpcOpenMemHandle",
            &format!(
                "the peer says {bytes} bytes, and the handle gives {found} at {base:#x} for {:#x}",
                memory.address
            ),
        ))
    }

    pub(super) fn allocate_host(&self, bytes: usize) -> Result<HostMemory> {
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
            // SAFETY: it was allocated just now, and nobody knows it.
            unsafe { self.release_host(memory) }?;
            return Err(error);
        }
        // SAFETY: it is as long, and nobody else knows it yet.
        unsafe { memory.host.write_bytes(0, bytes) };
        Ok(memory)
    }

    /// # Safety
    /// As `Driver::release_host`.
    pub(super) unsafe fn release_host(&self, memory: HostMemory) -> Result<()> {
        let _relaxed = self.relaxed()?;
        // SAFETY: it came from hipHostMalloc; the rest is the caller's promise.
        let status = unsafe { (self.functions.hipHostFree)(memory.host.cast()) };
        self.functions.check("hipHostFree", status)
    }

    /// # Safety
    /// As `Driver::write`.
    pub(super) unsafe fn write(&self, to: u64, from: &[u8]) -> Result<()> {
        let _relaxed = self.relaxed()?;
        let staging = self.staging();
        for piece in Pieces::new(to, from.len()) {
            let buffer = (staging.host + piece.staging) as *mut u8;
            let bytes = &from[piece.range.clone()];
            // SAFETY: a piece fits into the buffer; the lock makes it ours, and no copy is under
            // way.
            unsafe { buffer.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            let target = (to + piece.range.start as u64) as *mut c_void;
            // SAFETY: the buffer stays; the caller promises the device's memory.
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
    /// As `Driver::read`.
    pub(super) unsafe fn read(&self, to: &mut [u8], from: u64) -> Result<()> {
        let _relaxed = self.relaxed()?;
        let staging = self.staging();
        for piece in Pieces::new(from, to.len()) {
            let buffer = (staging.host + piece.staging) as *mut u8;
            let source = (from + piece.range.start as u64) as *const c_void;
            let bytes = &mut to[piece.range];
            // SAFETY: a piece fits into the buffer, which the lock makes ours; the caller promises
            // the device's memory.
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
            // SAFETY: as long as was copied, and the copy is done.
            unsafe { buffer.copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        }
        Ok(())
    }

    /// # Safety
    /// As `Driver::copy`.
    pub(super) unsafe fn copy(
        &self,
        to: u64,
        from: u64,
        bytes: u64,
        stream: RawStream,
    ) -> Result<()> {
        self.current()?;
        let size = usize::try_from(bytes)
            .map_err(|_| driver_error("hipMemcpyAsync", "more bytes than there are addresses"))?;
        if size == 0 {
            return Ok(());
        }
        // SAFETY: the caller promises both ranges until the copy is done.
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

/// `bytes` rounded up, which are some, as the two types of size.
fn rounded(bytes: u64, granularity: u64) -> Option<(u64, usize)> {
    let bytes = bytes.max(1).checked_next_multiple_of(granularity)?;
    // Beyond that, pointers of the host could not address it.
    isize::try_from(bytes).ok()?;
    Some((bytes, usize::try_from(bytes).ok()?))
}

/// How a range of device memory goes through the buffer: at the same offset within
/// [`STAGING_ALIGNMENT`] bytes in both, and cut at such offsets only, so that no aligned word is
/// cut, and engines move aligned bursts.
#[derive(Debug)]
struct Pieces {
    address: u64,
    done: usize,
    bytes: usize,
}

/// One copy.
#[derive(Debug, PartialEq, Eq)]
struct Piece {
    /// Which of the caller's bytes.
    range: Range<usize>,
    /// Where in the buffer.
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

    /// No aligned eight bytes are cut, all bytes are moved once, and offsets agree.
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
