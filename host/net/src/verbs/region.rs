//! Memory that is registered with a device.

use core::ptr::NonNull;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;

use fusewire_verbs_sys::bindings::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, ibv_mr,
};

use super::{Context, failed};
use crate::Result;

/// Memory to register.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registrable<'a> {
    /// Address of the first byte, on the host or on a GPU.
    pub(crate) start: *mut u8,
    pub(crate) len: usize,
    /// The memory as a dma-buf, and the offset of the first byte in it.
    pub(crate) dma_buf: Option<(BorrowedFd<'a>, u64)>,
}

/// Registration of a range of memory. Dropping it ends the registration: the device then
/// refuses requests with its keys.
#[derive(Debug)]
pub(crate) struct MemoryRegion {
    context: Arc<Context>,
    region: NonNull<ibv_mr>,
}

// SAFETY: the functions of libibverbs may be called from any thread, with the same objects.
unsafe impl Send for MemoryRegion {}
// SAFETY: see `Send`. Shared access only reads the keys, which do not change.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// Registers memory as the source and destination of this side's own requests.
    ///
    /// # Safety
    /// The bytes must stay valid for reads and writes by the device until the region is dropped.
    pub(crate) unsafe fn local(context: &Arc<Context>, memory: &Registrable<'_>) -> Result<Self> {
        // SAFETY: guaranteed by the caller.
        unsafe { Self::register(context, memory, IBV_ACCESS_LOCAL_WRITE) }
    }

    /// Registers memory that peers write and read. Does not set `IBV_ACCESS_RELAXED_ORDERING`,
    /// which would let PCIe reorder the bytes of different writes.
    ///
    /// # Safety
    /// As for [`MemoryRegion::local`]. Peers access the bytes at any time.
    pub(crate) unsafe fn remote(context: &Arc<Context>, memory: &Registrable<'_>) -> Result<Self> {
        let access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
        // SAFETY: guaranteed by the caller.
        unsafe { Self::register(context, memory, access) }
    }

    /// # Safety
    /// As for [`MemoryRegion::local`].
    unsafe fn register(
        context: &Arc<Context>,
        memory: &Registrable<'_>,
        access: u32,
    ) -> Result<Self> {
        let (domain, verbs) = (context.domain.as_ptr(), context.verbs);
        let Registrable { start, len, .. } = *memory;
        // SAFETY: the domain is live. The library checks whether the range is mapped, or inside the
        // buffer, and the caller guarantees that it stays valid.
        let (function, region) = unsafe {
            match &memory.dma_buf {
                None => (
                    "ibv_reg_mr",
                    verbs.ibv_reg_mr(domain, start.cast(), len, access as i32),
                ),
                Some((fd, offset)) => {
                    let (fd, address) = (fd.as_raw_fd(), start as u64);
                    let access = access as i32;
                    (
                        "ibv_reg_dmabuf_mr",
                        verbs.ibv_reg_dmabuf_mr(domain, *offset, len, address, fd, access),
                    )
                }
            }
        };
        let region = NonNull::new(region)
            .ok_or_else(|| failed(function, context.device(), &io::Error::last_os_error()))?;
        Ok(Self {
            context: Arc::clone(context),
            region,
        })
    }

    /// Returns true if the memory is registered with the device of `context`.
    pub(crate) fn is_of(&self, context: &Arc<Context>) -> bool {
        Arc::ptr_eq(&self.context, context)
    }

    /// Returns the key for this side's own requests.
    pub(crate) fn local_key(&self) -> u32 {
        // SAFETY: the region is live, and its keys do not change.
        unsafe { (*self.region.as_ptr()).lkey }
    }

    /// Returns the key for requests of peers.
    pub(crate) fn remote_key(&self) -> u32 {
        // SAFETY: the region is live, and its keys do not change.
        unsafe { (*self.region.as_ptr()).rkey }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: `register` created the region, and this is its only owner. `context` is still
        // open, because fields are dropped after this function.
        let code = unsafe { self.context.verbs.ibv_dereg_mr(self.region.as_ptr()) };
        if code != 0 {
            let error = io::Error::from_raw_os_error(code);
            tracing::warn!(%error, "ibv_dereg_mr failed");
        }
    }
}
