//! Multicast objects: teams of devices, and the memory that each device has bound.
//!
//! All processes with a handle to an object share the memory file of its team. The fake does not
//! emulate a switch: native kernels access the memory of each device through the unicast address of
//! that memory. The address range of the object can be reserved and mapped, but not accessed.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use super::backing::{Backing, GRANULARITY};
use super::handles::{ALLOCATIONS, MULTICASTS, fresh};
use super::memory::{self, Kind};
use super::settings::settings;
use super::{context, lock, record};
use crate::status::{Result, Status};

const NAME: &str = "fusewire-cuda-fake-multicast";

/// Maximum number of devices of a team.
pub(crate) const DEVICES: u32 = 72;

/// Size of the memory file of a team, in bytes.
const PAGE: usize = 4096;

/// Recommended granularity in bytes.
const RECOMMENDED: u64 = 512 << 20;

/// State of an object in the memory file that all processes share.
#[derive(Debug)]
#[repr(C)]
struct Team {
    /// Spin lock that protects the other fields: 1 while locked.
    locked: AtomicU32,
    count: AtomicU32,
    /// UUIDs of the devices, two words each.
    members: [AtomicU64; 2 * DEVICES as usize],
}

const _: () = assert!(size_of::<Team>() <= PAGE);

/// This process's handle to a multicast object.
#[derive(Debug)]
pub(crate) struct Object {
    handle: usize,
    pub(crate) file: File,
    pub(crate) handles: u32,
    bytes: u64,
    devices: u32,
    team: *const Team,
    references: Mutex<u32>,
    bindings: Mutex<Vec<Binding>>,
}

// SAFETY: `team` points to atomics in shared memory, which stays mapped until the object is
// dropped.
unsafe impl Send for Object {}
// SAFETY: `team` points to atomics in shared memory, which stays mapped until the object is
// dropped.
unsafe impl Sync for Object {}

/// Memory that is bound to an object for one device. The binding keeps the memory alive.
#[derive(Debug)]
struct Binding {
    device: u32,
    offset: u64,
    bytes: u64,
    _memory: Arc<Backing>,
}

static BINDINGS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of live bindings.
pub(crate) fn bindings() -> u64 {
    BINDINGS.load(Ordering::Acquire)
}

impl Drop for Binding {
    fn drop(&mut self) {
        BINDINGS.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: `map_team` mapped `PAGE` bytes at `team`. References into the mapping borrow
        // `self`, so none is live.
        unsafe { libc::munmap(self.team.cast_mut().cast(), PAGE) };
    }
}

/// Fails if the devices do not support multicast.
pub(crate) fn supported() -> Result<()> {
    if settings().multicast {
        Ok(())
    } else {
        Err(Status::NotSupported)
    }
}

/// Returns the minimum or the recommended granularity in bytes.
pub(crate) fn granularity(recommended: bool) -> u64 {
    if recommended {
        RECOMMENDED
    } else {
        GRANULARITY
    }
}

/// Creates an object. Returns its handle.
pub(crate) fn create(bytes: u64, devices: u32, handles: u32) -> Result<usize> {
    supported()?;
    if devices == 0 || devices > DEVICES || bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
        return Err(Status::InvalidValue);
    }
    let name = format!("{NAME} {devices} {bytes} {handles}");
    let name = CString::new(name).or(Err(Status::Unknown))?;
    // SAFETY: `name` is a live C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(Status::OperatingSystem);
    }
    // SAFETY: `memfd_create` has just returned `fd`, so it is open and has no other owner.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(PAGE as u64).or(Err(Status::OutOfMemory))?;
    insert(file, bytes, devices, handles)
}

/// Adopts the object of a descriptor. Returns a handle, or `None` if the descriptor does not refer
/// to a multicast object.
pub(crate) fn adopt(fd: &OwnedFd, kind: u32) -> Result<Option<usize>> {
    let link = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    let link = link.or(Err(Status::OperatingSystem))?;
    let Some(text) = link
        .to_str()
        .and_then(|text| text.strip_prefix("/memfd:")?.strip_prefix(NAME))
    else {
        return Ok(None);
    };
    supported()?;
    let mut words = text.split_whitespace().map_while(|word| word.parse().ok());
    let (Some(devices), Some(bytes), Some(handles)) = (words.next(), words.next(), words.next())
    else {
        return Err(Status::InvalidValue);
    };
    let (devices, handles): (u64, u64) = (devices, handles);
    if handles as u32 & kind == 0 {
        return Err(Status::InvalidValue);
    }
    let file = File::from(fd.try_clone().or(Err(Status::OperatingSystem))?);
    insert(file, bytes, devices as u32, handles as u32).map(Some)
}

fn insert(file: File, bytes: u64, devices: u32, handles: u32) -> Result<usize> {
    let team = map_team(&file)?;
    let handle = fresh();
    let object = Object {
        handle,
        file,
        handles,
        bytes,
        devices,
        team,
        references: Mutex::new(1),
        bindings: Mutex::default(),
    };
    MULTICASTS.insert_as(handle, Arc::new(object));
    Ok(handle)
}

fn map_team(file: &File) -> Result<*const Team> {
    // SAFETY: a mapping without a fixed address replaces no other mapping.
    let address = unsafe {
        libc::mmap(
            core::ptr::null_mut(),
            PAGE,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED,
            file.as_raw_fd(),
            0,
        )
    };
    if address == libc::MAP_FAILED {
        return Err(Status::OutOfMemory);
    }
    Ok(address.cast_const().cast())
}

/// Returns the object of a handle.
fn object(handle: usize) -> Result<Arc<Object>> {
    supported()?;
    MULTICASTS.get(handle).ok_or(Status::InvalidValue)
}

/// Releases a reference. Releasing the last reference removes all bindings made through this
/// handle.
pub(crate) fn release(handle: usize) -> Result<()> {
    let object = MULTICASTS.get(handle).ok_or(Status::InvalidValue)?;
    let mut references = lock(&object.references);
    *references -= 1;
    if *references == 0 {
        MULTICASTS.remove(handle);
        lock(&object.bindings).clear();
    }
    Ok(())
}

/// Adds a reference to a mapped object. Returns its handle.
pub(crate) fn retain(object: &Arc<Object>) -> usize {
    *lock(&object.references) += 1;
    MULTICASTS.insert_as(object.handle, Arc::clone(object));
    object.handle
}

/// Returns a device's UUID as two words.
fn identity(device: u32) -> [u64; 2] {
    let uuid = context::uuid(device);
    let (low, high) = uuid.split_at(8);
    [low, high].map(|half| {
        half.iter()
            .fold(0, |word, byte| word << 8 | u64::from(*byte))
    })
}

impl Object {
    fn team(&self) -> &Team {
        // SAFETY: `team` stays mapped until `self` is dropped. All fields are atomic integers, for
        // which all bit patterns are valid.
        unsafe { &*self.team }
    }

    fn has(&self, device: u32) -> bool {
        let wanted = identity(device);
        let count = self.team().count.load(Ordering::Acquire).min(DEVICES) as usize;
        self.team().members[..2 * count]
            .chunks_exact(2)
            .any(|words| wanted == [0, 1].map(|at| words[at].load(Ordering::Acquire)))
    }

    /// Returns an error if a device of the team has not joined yet. The driver would wait for that
    /// device.
    fn complete(&self, what: &str) -> Result<()> {
        let count = self.team().count.load(Ordering::Acquire);
        if count == self.devices {
            return Ok(());
        }
        record::log_refusal(&format!(
            "{what} of a multicast object that only {count} of {} devices have joined; the driver \
             would wait for the others",
            self.devices
        ));
        Err(Status::IllegalState)
    }
}

/// Adds a device to the team.
pub(crate) fn join(handle: usize, device: u32) -> Result<()> {
    let object = object(handle)?;
    let team = object.team();
    let take = || {
        team.locked
            .compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed)
    };
    while take().is_err() {
        std::thread::yield_now();
    }
    let count = team.count.load(Ordering::Acquire);
    let joined = if object.has(device) || count >= object.devices {
        Err(Status::InvalidValue)
    } else {
        let slots = &team.members[2 * count as usize..];
        for (slot, word) in slots.iter().zip(identity(device)) {
            slot.store(word, Ordering::Release);
        }
        team.count.store(count + 1, Ordering::Release);
        Ok(())
    };
    team.locked.store(0, Ordering::Release);
    joined
}

/// Binds a range of memory to a range of an object.
pub(crate) fn bind(
    handle: usize,
    offset: u64,
    memory: Arc<Backing>,
    memory_offset: u64,
    bytes: u64,
) -> Result<()> {
    let object = object(handle)?;
    object.complete("a binding")?;
    let device = memory.device;
    if !object.has(device) {
        return Err(Status::InvalidDevice);
    }
    let within = |offset: u64, all: u64| offset.checked_add(bytes).is_some_and(|end| end <= all);
    let aligned = [offset, memory_offset, bytes]
        .iter()
        .all(|value| value.is_multiple_of(GRANULARITY));
    if bytes == 0
        || !aligned
        || !within(offset, object.bytes)
        || !within(memory_offset, memory.bytes)
    {
        return Err(Status::InvalidValue);
    }
    let mut bindings = lock(&object.bindings);
    let overlaps = |binding: &Binding| {
        binding.device == device
            && offset < binding.offset + binding.bytes
            && binding.offset < offset + bytes
    };
    if bindings.iter().any(overlaps) {
        return Err(Status::InvalidValue);
    }
    BINDINGS.fetch_add(1, Ordering::AcqRel);
    bindings.push(Binding {
        device,
        offset,
        bytes,
        _memory: memory,
    });
    Ok(())
}

/// Binds a range of an allocation; see [`bind`].
pub(crate) fn bind_allocation(
    handle: usize,
    offset: u64,
    allocation: usize,
    memory_offset: u64,
    bytes: u64,
) -> Result<()> {
    supported()?;
    let allocation = ALLOCATIONS.get(allocation).ok_or(Status::InvalidValue)?;
    let memory = Arc::clone(&allocation.backing);
    bind(handle, offset, memory, memory_offset, bytes)
}

/// Binds a range of mapped memory; see [`bind`].
pub(crate) fn bind_address(handle: usize, offset: u64, address: u64, bytes: u64) -> Result<()> {
    supported()?;
    let region = memory::find(address).ok_or(Status::InvalidValue)?;
    let Kind::Mapping(allocation) = &region.kind else {
        return Err(Status::InvalidValue);
    };
    let memory = Arc::clone(&allocation.backing);
    bind(handle, offset, memory, address - region.start, bytes)
}

/// Removes a device's binding. The binding must cover exactly this range of the object.
pub(crate) fn unbind(handle: usize, device: u32, offset: u64, bytes: u64) -> Result<()> {
    let object = object(handle)?;
    let mut bindings = lock(&object.bindings);
    let is_it = |binding: &Binding| {
        (binding.device, binding.offset, binding.bytes) == (device, offset, bytes)
    };
    let at = bindings.iter().position(is_it);
    bindings.remove(at.ok_or(Status::InvalidValue)?);
    Ok(())
}

/// Returns the object of a handle if its first `bytes` bytes can be mapped.
pub(crate) fn mappable(handle: usize, bytes: u64) -> Result<Arc<Object>> {
    let object = object(handle)?;
    object.complete("a mapping")?;
    if bytes > object.bytes {
        return Err(Status::InvalidValue);
    }
    Ok(object)
}
