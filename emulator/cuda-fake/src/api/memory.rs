//! Memory of `cuMemAlloc`, host memory, copies and fills.

use core::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::Arc;

use fusewire::cpu;

use super::{export, get, put, put_if};
use crate::core::context::{Context, current};
use crate::core::memory::{self, Kind, Location};
use crate::core::settings::settings;
use crate::core::stream::{self, Stream};
use crate::core::{backing, capture, handoff, ipc};
use crate::status::{Result, Status};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEER_ACCESS: c_uint = 1;

/// Creates a command for device work other than a kernel. If `body` fails, its error becomes
/// the sticky error of the context.
fn work(
    context: &Arc<Context>,
    body: impl Fn() -> Result<()> + Send + Sync + 'static,
) -> cpu::Command {
    let context = Arc::clone(context);
    cpu::Command::Host(Arc::new(move || {
        if context.failure().is_ok()
            && let Err(status) = body()
        {
            context.fail(status);
        }
        Ok(())
    }))
}

/// Kind of address that a copy function requires for its source or its target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    /// A device address. Page-locked host memory also has one.
    Device,
    Host,
    /// Any address.
    Any,
}

/// Returns the location of the source or the target of a copy. Fails on errors that the driver
/// reports immediately.
fn side(address: u64, bytes: u64, device: u32, write: bool, side: Side) -> Result<Location> {
    if address == 0 && bytes > 0 {
        return Err(Status::InvalidValue);
    }
    match memory::check_copy(address, bytes, device, write) {
        Ok(Location::Pageable) if side == Side::Device => Err(Status::InvalidValue),
        Ok(location) => Ok(location),
        // This call does not report missing access rights. The copy fails on the device when it
        // executes.
        Err(_) => match memory::find(address).map(|region| region.kind) {
            Some(Kind::Mapping(_)) => Ok(Location::Device),
            _ => Err(Status::InvalidValue),
        },
    }
}

/// Enqueues a copy on a stream.
fn copy(
    context: &Arc<Context>,
    to: (u64, Side),
    from: (u64, Side),
    bytes: u64,
    stream: &Stream,
) -> Result<()> {
    let ((to, to_side), (from, from_side)) = (to, from);
    let device = context.device;
    let target = side(to, bytes, device, true, to_side)?;
    let source = side(from, bytes, device, false, from_side)?;
    if bytes == 0 {
        return Ok(());
    }
    let captured = !matches!(capture::info(stream)?, capture::Info::None);
    if source == Location::Pageable && !captured {
        // The driver reads pageable memory before the copy function returns.
        // SAFETY: `cuda.h` requires `bytes` readable bytes at `from`.
        let staged = unsafe { core::slice::from_raw_parts(from as *const u8, bytes as usize) };
        let staged: Box<[u64]> = words(staged);
        let command = work(context, move || {
            memory::check_copy(to, bytes, device, true).or(Err(Status::IllegalAddress))?;
            // SAFETY: `check` found `bytes` writable bytes at the target, and `staged` has at least
            // `bytes` bytes.
            unsafe { memory::copy(to, staged.as_ptr() as u64, bytes) };
            Ok(())
        });
        capture::submit(stream, command)?;
    } else {
        let command = work(context, move || {
            memory::check_copy(to, bytes, device, true)?;
            memory::check_copy(from, bytes, device, false)?;
            // SAFETY: `check` found every range in device memory accessible, and `cuda.h` requires
            // every range in host memory to be accessible.
            unsafe { memory::copy(to, from, bytes) };
            Ok(())
        });
        capture::submit(stream, command)?;
    }
    if target == Location::Pageable && !captured {
        // The driver writes pageable memory before the copy function returns.
        stream.settle();
        context.failure()?;
    }
    Ok(())
}

/// Copies bytes into memory with the alignment of u64, padded with zeros.
fn words(bytes: &[u8]) -> Box<[u64]> {
    bytes
        .chunks(8)
        .map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            u64::from_ne_bytes(word)
        })
        .collect()
}

/// Copies and waits for completion.
fn copy_now(to: (u64, Side), from: (u64, Side), bytes: usize) -> Result<()> {
    let context = current()?;
    capture::potentially_unsafe()?;
    let legacy = Arc::clone(&context.legacy);
    copy(&context, to, from, bytes as u64, &legacy)?;
    legacy.settle();
    context.failure()
}

/// Enqueues a copy on the stream of a handle.
fn copy_async(to: (u64, Side), from: (u64, Side), bytes: usize, handle: usize) -> Result<()> {
    let context = current()?;
    let stream = stream::find(&context, handle)?;
    copy(&context, to, from, bytes as u64, &stream)
}

/// Enqueues a fill on the stream of a handle.
fn fill(to: u64, pattern: u32, width: u64, count: usize, handle: usize) -> Result<()> {
    let context = current()?;
    let stream = stream::find(&context, handle)?;
    let count = count as u64;
    let bytes = count.checked_mul(width).ok_or(Status::InvalidValue)?;
    let device = context.device;
    side(to, bytes, device, true, Side::Device)?;
    if !to.is_multiple_of(width) {
        return Err(Status::InvalidValue);
    }
    if count == 0 {
        return Ok(());
    }
    let command = work(&context, move || {
        memory::check_copy(to, bytes, device, true)?;
        // SAFETY: `check` found `count * width` writable bytes at `to`, and `to` is a multiple of
        // `width`.
        unsafe { memory::fill(to, pattern, width, count) };
        Ok(())
    });
    capture::submit(&stream, command).map(drop)
}

export! {
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let context = current()?;
        let bytes = settings().memory_bytes;
        put(free, (bytes - backing::used(context.device)) as usize)?;
        put(total, bytes as usize)
    }

    fn cuMemAlloc_v2(out: *mut u64, bytes: usize) {
        let context = current()?;
        capture::potentially_unsafe()?;
        if out.is_null() {
            return Err(Status::InvalidValue);
        }
        put(out, memory::allocate(context.device, context.handle, bytes as u64)?)
    }

    fn cuMemFree_v2(address: u64) {
        let context = current()?;
        capture::potentially_unsafe()?;
        if address == 0 {
            return Ok(());
        }
        context.synchronize()?;
        memory::free(address)
    }

    fn cuMemGetAddressRange_v2(base: *mut u64, bytes: *mut usize, address: u64) {
        current()?;
        let region = memory::find(address).ok_or(Status::NotFound)?;
        put_if(base, region.start);
        put_if(bytes, region.requested as usize);
        Ok(())
    }

    fn cuIpcGetMemHandle(handle: *mut [u8; handoff::BYTES], address: u64) {
        current()?;
        if handle.is_null() {
            return Err(Status::InvalidValue);
        }
        put(handle, ipc::export(address)?)
    }

    fn cuIpcOpenMemHandle_v2(out: *mut u64, handle: IpcHandle, flags: c_uint) {
        let context = current()?;
        capture::potentially_unsafe()?;
        if out.is_null() || flags != LAZY_PEER_ACCESS {
            return Err(Status::InvalidValue);
        }
        put(out, ipc::open(&handle.bytes, context.device, context.handle)?)
    }

    fn cuIpcCloseMemHandle(address: u64) {
        let context = current()?;
        capture::potentially_unsafe()?;
        context.synchronize()?;
        memory::close_block(address)
    }

    fn cuMemHostAlloc(out: *mut *mut c_void, bytes: usize, flags: c_uint) {
        if flags > 7 {
            return Err(Status::InvalidValue);
        }
        allocate_host(out, bytes)
    }

    fn cuMemAllocHost_v2(out: *mut *mut c_void, bytes: usize) {
        allocate_host(out, bytes)
    }

    fn cuMemFreeHost(address: *mut c_void) {
        let context = current()?;
        capture::potentially_unsafe()?;
        context.synchronize()?;
        memory::free_host(address as u64)
    }

    fn cuMemHostGetDevicePointer_v2(out: *mut u64, address: *mut c_void, flags: c_uint) {
        current()?;
        let region = memory::find(address as u64);
        match region {
            Some(region) if !region.on_device() && flags == 0 => put(out, address as u64),
            _ => Err(Status::InvalidValue),
        }
    }

    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, _flags: c_uint) {
        let context = current()?;
        capture::potentially_unsafe()?;
        memory::register(context.device, context.handle, address as u64, bytes as u64)
    }

    fn cuMemHostUnregister(address: *mut c_void) {
        let context = current()?;
        capture::potentially_unsafe()?;
        context.synchronize()?;
        memory::unregister(address as u64)
    }

    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, stream: usize) {
        copy_async((to, Side::Any), (from, Side::Any), bytes, stream)
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, bytes: usize, stream: usize) {
        copy_async((to, Side::Device), (from as u64, Side::Host), bytes, stream)
    }

    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, bytes: usize, stream: usize) {
        copy_async((to as u64, Side::Host), (from, Side::Device), bytes, stream)
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: usize) {
        copy_async((to, Side::Device), (from, Side::Device), bytes, stream)
    }

    fn cuMemcpy(to: u64, from: u64, bytes: usize) {
        copy_now((to, Side::Any), (from, Side::Any), bytes)
    }

    fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, bytes: usize) {
        copy_now((to, Side::Device), (from as u64, Side::Host), bytes)
    }

    fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, bytes: usize) {
        copy_now((to as u64, Side::Host), (from, Side::Device), bytes)
    }

    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        copy_now((to, Side::Device), (from, Side::Device), bytes)
    }

    fn cuMemsetD8Async(to: u64, byte: u8, count: usize, stream: usize) {
        fill(to, byte.into(), 1, count, stream)
    }

    fn cuMemsetD32Async(to: u64, word: c_uint, count: usize, stream: usize) {
        fill(to, word, 4, count, stream)
    }

    fn cuMemsetD8_v2(to: u64, byte: u8, count: usize) {
        capture::potentially_unsafe()?;
        fill(to, byte.into(), 1, count, 0)?;
        let context = current()?;
        context.legacy.settle();
        context.failure()
    }

    fn cuPointerGetAttribute(out: *mut c_void, attribute: c_uint, address: u64) {
        crate::core::context::ready()?;
        pointer(out, attribute, address)
    }

    fn cuPointerGetAttributes(
        count: c_uint,
        attributes: *mut c_uint,
        outs: *mut *mut c_void,
        address: u64,
    ) {
        crate::core::context::ready()?;
        for at in 0..count as usize {
            // SAFETY: `at < count`, and `cuda.h` requires an array of `count` attributes.
            let attribute = get(unsafe { attributes.add(at) })?;
            // SAFETY: `at < count`, and `cuda.h` requires an array of `count` result pointers.
            let out = get(unsafe { outs.add(at) })?;
            if memory::find(address).is_some() {
                pointer(out, attribute, address)?;
            } else {
                put(out.cast::<c_uint>(), 0)?;
            }
        }
        Ok(())
    }
}

/// `CUipcMemHandle`, which is passed by value.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct IpcHandle {
    bytes: [u8; handoff::BYTES],
}

fn allocate_host(out: *mut *mut c_void, bytes: usize) -> Result<()> {
    let context = current()?;
    capture::potentially_unsafe()?;
    if out.is_null() {
        return Err(Status::InvalidValue);
    }
    let address = memory::allocate_host(context.device, context.handle, bytes as u64)?;
    put(out, address as *mut c_void)
}

/// Writes one attribute of an address.
fn pointer(out: *mut c_void, attribute: c_uint, address: u64) -> Result<()> {
    let region = memory::find(address).ok_or(Status::InvalidValue)?;
    let (on_device, block) = (region.on_device(), matches!(region.kind, Kind::Block));
    match attribute {
        1 if region.context != 0 => put(out.cast(), region.context),
        2 => put(out.cast(), if on_device { 2 } else { 1 } as c_uint),
        3 => put(out.cast(), address),
        4 if !on_device => put(out.cast(), address),
        7 => put(out.cast(), region.id as c_ulonglong),
        6 | 8 => put(out.cast(), c_int::from(false)),
        9 => put(out.cast(), region.device as c_int),
        10 => put(out.cast(), u8::from(block)),
        11 => put(out.cast(), region.start),
        12 => put(out.cast(), region.requested as usize),
        13 => put(out.cast(), u8::from(true)),
        14 => put(
            out.cast(),
            region
                .backing
                .map_or(0, |backing| c_ulonglong::from(backing.handles)),
        ),
        _ => Err(Status::InvalidValue),
    }
}
