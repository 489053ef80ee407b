//! Buffers that C code passes as address, count and type, and the functions for memory in windows.

use core::any::Any;
use core::ffi::{c_int, c_void};
use core::ptr::{self, NonNull};
use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};

use fusewire::{DType, Error, Input, Output, Registration, Tensor};

use crate::comm::{FusewireComm, Shared};
use crate::error::{Outcome, argument, give, guard};
use crate::region::Region;

/// Maximum size of a buffer in bytes: the size of the address space.
const MOST_BYTES: usize = 1 << 47;

impl Shared {
    fn regions(&self) -> MutexGuard<'_, BTreeMap<usize, Region>> {
        self.regions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an object that keeps the memory at `at` alive, or `None` if the caller allocated it.
    fn keeper(&self, at: usize) -> Option<Arc<dyn Any + Send + Sync>> {
        let regions = self.regions();
        let (start, region) = regions.range(..=at).next_back()?;
        (region.owned && at < start + region.tensor.len())
            .then(|| Arc::new(region.tensor.clone()) as _)
    }

    /// Returns the memory from `at` as a part of the region that contains `at`, or `None` if no
    /// region does.
    pub(crate) fn part(&self, operation: &str, at: usize, bytes: usize) -> Outcome<Option<Tensor>> {
        let regions = self.regions();
        let Some((start, region)) = regions.range(..=at).next_back() else {
            return Ok(None);
        };
        let offset = at - start;
        let size = region.tensor.len();
        if offset >= size {
            return Ok(None);
        }
        if bytes > size - offset {
            let detail = format!(
                "{bytes} bytes at offset {offset} of memory of {size} bytes, which the \
                 communicator allocated or registered"
            );
            return Err(argument(operation, detail));
        }
        Ok(Some(region.tensor.slice(offset, bytes)?))
    }

    /// Adds a region to the table.
    pub(crate) fn insert(&self, region: Region) {
        let at = region.tensor.as_ptr() as usize;
        self.regions().insert(at, region);
    }

    /// Removes the region that begins at `at`.
    pub(crate) fn remove(&self, at: usize) {
        self.regions().remove(&at);
    }
}

/// A buffer that C code passed, after its address, size and alignment were checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    at: *mut u8,
    count: usize,
    dtype: DType,
}

impl Buffer {
    /// Checks a buffer of `count` elements at `at`. `what` is the name of the argument.
    pub(crate) fn new(
        operation: &str,
        what: &str,
        at: *const c_void,
        count: Option<u64>,
        dtype: DType,
    ) -> Outcome<Self> {
        let count = count.and_then(|count| usize::try_from(count).ok());
        let sized = count.and_then(|count| Some((count, count.checked_mul(dtype.size())?)));
        let Some((count, bytes)) = sized.filter(|(_, bytes)| *bytes <= MOST_BYTES) else {
            return Err(argument(
                operation,
                format!("{what} has more elements than memory can hold"),
            ));
        };
        let refuse = |detail: &str| Err(argument(operation, format!("{what} {detail}")));
        if count == 0 {
            // No element is accessed, so any non-null address is valid.
            let at = ptr::without_provenance_mut(4096);
            return Ok(Self { at, count, dtype });
        }
        if at.is_null() {
            return refuse("is NULL");
        }
        if !(at as usize).is_multiple_of(dtype.size()) {
            return refuse(&format!("is at {at:p}, not aligned to {}", dtype.name()));
        }
        if (at as usize).checked_add(bytes).is_none() {
            return refuse("reaches beyond the end of memory");
        }
        Ok(Self {
            at: at.cast::<u8>().cast_mut(),
            count,
            dtype,
        })
    }

    /// Adopts the memory as a tensor.
    pub(crate) fn tensor(self, comm: &FusewireComm) -> Outcome<Tensor> {
        let keep = comm.shared.keeper(self.at as usize);
        let device = comm.comm.device();
        // SAFETY: the header requires that the memory stays allocated until the call returns, or
        // (enqueued) until the work is done and every graph that uses it is destroyed. `keep` owns
        // memory that the library allocated.
        Ok(unsafe { Tensor::adopt(device, self.at, self.dtype, self.count, keep)? })
    }

    /// Creates the view that operations take. The view of an enqueued operation contains a tensor.
    pub(crate) fn view(self, comm: &FusewireComm, enqueued: bool) -> Outcome<View> {
        let tensor = match enqueued {
            true => Some(self.tensor(comm)?),
            false => None,
        };
        Ok(View {
            buffer: self,
            tensor,
        })
    }
}

/// A buffer of an operation.
#[derive(Debug)]
pub(crate) struct View {
    buffer: Buffer,
    tensor: Option<Tensor>,
}

impl View {
    pub(crate) fn input(&self) -> Input<'_> {
        let Buffer { at, count, dtype } = self.buffer;
        match &self.tensor {
            Some(tensor) => tensor.into(),
            // SAFETY: `Buffer::new` has checked address, size and alignment. The header requires
            // that the elements stay readable until the call returns.
            None => unsafe { Input::from_raw(at, count, dtype) },
        }
    }

    pub(crate) fn output(&self) -> Output<'_> {
        let Buffer { at, count, dtype } = self.buffer;
        match &self.tensor {
            Some(tensor) => tensor.into(),
            // SAFETY: `Buffer::new` has checked address, size and alignment. The header requires
            // that the elements stay writable, and that no other code uses them, until the call
            // returns.
            None => unsafe { Output::from_raw(at, count, dtype) },
        }
    }
}

/// Returns the size of memory to allocate or to share, which must be at least 1.
pub(crate) fn checked_size(operation: &str, bytes: u64) -> Outcome<usize> {
    usize::try_from(bytes)
        .ok()
        .filter(|bytes| (1..=MOST_BYTES).contains(bytes))
        .ok_or_else(|| {
            argument(
                operation,
                format!("{bytes} bytes; 1 to {MOST_BYTES} are possible"),
            )
        })
}

/// Fails if the handle's stream is capturing, during which no window can end.
pub(crate) fn refuse_capture(handle: &FusewireComm) -> Outcome {
    if handle.comm.stream().is_capturing() {
        return Err(Error::CaptureState {
            detail: "a window cannot end while its communicator's stream is capturing".to_owned(),
        }
        .into());
    }
    Ok(())
}

/// Allocates zeroed device memory in a new window. All ranks must call this function, with the same
/// size.
///
/// # Safety
/// `comm` is null or a live handle; `memory` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_alloc(
    comm: *const FusewireComm,
    bytes: u64,
    memory: *mut *mut c_void,
) -> c_int {
    const NAME: &str = "fusewire_alloc";
    guard(|| {
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "memory", memory, ptr::null_mut())? };
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        let count = checked_size(NAME, bytes)?;
        let tensor = handle.comm.tensor(DType::U8, count)?;
        let registration = handle.comm.tensor_register(&tensor)?;
        let at = tensor.as_ptr();
        handle.shared.insert(Region {
            tensor,
            registration: Some(registration),
            owned: true,
        });
        // SAFETY: the caller passes null, which `give` rejects, or a writable pointer.
        unsafe { give(NAME, "memory", memory, at.cast()) }
    })
}

/// Places GPU memory of the caller into a window. All ranks must call this function, with the same
/// size.
///
/// # Safety
/// `comm` is null or a live handle. Until it is deregistered, `memory` is valid device memory of
/// `bytes` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_register(
    comm: *const FusewireComm,
    memory: *mut c_void,
    bytes: u64,
) -> c_int {
    const NAME: &str = "fusewire_register";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        if bytes == 0 {
            return Err(argument(NAME, "0 bytes cannot be registered"));
        }
        if !handle.comm.device().is_gpu() {
            return Err(argument(
                NAME,
                "peers cannot map the memory of a process on the CPU: pass it to operations \
                 unregistered, which go through staging, or allocate it with fusewire_alloc",
            ));
        }
        let buffer = Buffer::new(NAME, "memory", memory, Some(bytes), DType::U8)?;
        let (at, count) = (buffer.at as usize, buffer.count);
        if handle.shared.overlaps(at, count) {
            return Err(argument(
                NAME,
                format!("memory at {memory:p} lies in a window already"),
            ));
        }
        // SAFETY: the caller keeps the memory allocated until it is deregistered, which drops the
        // tensor.
        let tensor =
            unsafe { Tensor::adopt(handle.comm.device(), buffer.at, DType::U8, count, None)? };
        let registration = handle.comm.tensor_register(&tensor)?;
        handle.shared.insert(Region {
            tensor,
            registration: Some(registration),
            owned: false,
        });
        Ok(())
    })
}

impl Shared {
    fn overlaps(&self, at: usize, count: usize) -> bool {
        let regions = self.regions();
        regions
            .range(..at + count)
            .next_back()
            .is_some_and(|(start, region)| start + region.tensor.len() > at)
    }

    /// Removes the region that begins at `memory` from the table, and returns its registration.
    fn take(&self, operation: &str, memory: *mut c_void, owned: bool) -> Outcome<Registration> {
        let mut regions = self.regions();
        let key = memory as usize;
        if regions
            .get(&key)
            .is_some_and(|region| region.owned == owned && region.registration.is_some())
            && let Some(registration) = regions.remove(&key).and_then(|region| region.registration)
        {
            return Ok(registration);
        }
        let from = if owned {
            "fusewire_alloc"
        } else {
            "fusewire_register"
        };
        Err(argument(
            operation,
            format!(
                "{memory:p} is no memory of {from} of this communicator, or was released before"
            ),
        ))
    }
}

/// Deregisters the window at `memory`. All ranks must call this function.
///
/// # Safety
/// `comm` is null or a live handle.
unsafe fn release(
    operation: &'static str,
    comm: *const FusewireComm,
    memory: *mut c_void,
    owned: bool,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(operation, comm)? };
        if memory.is_null() {
            return Err(argument(operation, "memory is NULL"));
        }
        refuse_capture(handle)?;
        let registration = handle.shared.take(operation, memory, owned)?;
        Ok(handle.comm.tensor_deregister(&registration)?)
    })
}

/// Frees memory of [`fusewire_alloc`]. All ranks must call this function.
///
/// # Safety
/// `comm` is null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_free(comm: *const FusewireComm, memory: *mut c_void) -> c_int {
    // SAFETY: the preconditions of `release` are also preconditions of this function.
    unsafe { release("fusewire_free", comm, memory, true) }
}

/// Removes memory of [`fusewire_register`] from its window. All ranks must call this function.
///
/// # Safety
/// `comm` is null or a live handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_deregister(
    comm: *const FusewireComm,
    memory: *mut c_void,
) -> c_int {
    // SAFETY: the preconditions of `release` are also preconditions of this function.
    unsafe { release("fusewire_deregister", comm, memory, false) }
}

/// Checks both buffers of a copy. Returns a tensor over the device memory, and the host address.
fn copied(
    operation: &str,
    comm: &FusewireComm,
    device: *const c_void,
    host: *const c_void,
    bytes: u64,
) -> Outcome<(Tensor, NonNull<u8>)> {
    let buffer = Buffer::new(operation, "device memory", device, Some(bytes), DType::U8)?;
    let host = Buffer::new(operation, "host memory", host, Some(bytes), DType::U8)?;
    let host = NonNull::new(host.at).ok_or_else(|| argument(operation, "host memory is NULL"))?;
    // SAFETY: the callers of `fusewire_upload` and `fusewire_download`, the only users of this
    // function, keep the memory allocated until the call returns. The tensor does not outlive the
    // call.
    let tensor =
        unsafe { Tensor::adopt(comm.comm.device(), buffer.at, DType::U8, buffer.count, None)? };
    Ok((tensor, host))
}

/// Copies from host memory to device memory, and waits until the copy is complete.
///
/// # Safety
/// `comm` is null or a live handle. Both buffers are valid for `bytes` bytes, do not overlap, and
/// no other code uses them during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_upload(
    comm: *const FusewireComm,
    to: *mut c_void,
    from: *const c_void,
    bytes: u64,
) -> c_int {
    const NAME: &str = "fusewire_upload";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        let (tensor, host) = copied(NAME, handle, to, from, bytes)?;
        // SAFETY: `copied` has checked address and size; the caller guarantees `bytes` readable
        // bytes. The slice does not outlive the call.
        let bytes = unsafe { core::slice::from_raw_parts(host.as_ptr(), tensor.len()) };
        Ok(tensor.copy_from_bytes(bytes)?)
    })
}

/// Copies from device memory to host memory, and waits until the copy is complete.
///
/// # Safety
/// `comm` is null or a live handle. Both buffers are valid for `bytes` bytes, do not overlap, and
/// no other code uses them during the call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fusewire_download(
    comm: *const FusewireComm,
    to: *mut c_void,
    from: *const c_void,
    bytes: u64,
) -> c_int {
    const NAME: &str = "fusewire_download";
    guard(|| {
        // SAFETY: the caller passes null or a handle that stays alive during the call.
        let handle = unsafe { FusewireComm::of(NAME, comm)? };
        let (tensor, host) = copied(NAME, handle, from, to, bytes)?;
        let values = tensor.to_bytes()?;
        // SAFETY: the caller guarantees `bytes` writable bytes at `to`, and `values` has the same
        // length (the tensor's size). `values` is a local vector, so the two do not overlap.
        unsafe { ptr::copy_nonoverlapping(values.as_ptr(), host.as_ptr(), values.len()) };
        Ok(())
    })
}
