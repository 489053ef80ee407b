//! Multicast objects: teams of devices, and what memory each of them has bound.
//!
//! The team is in a memory file that all processes share which have the object. The switch itself is not there: kernels
//! of the host reach all parts by their ordinary addresses, and the object's own address can be reserved and mapped, but
//! not touched.

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

/// Most devices of a team.
pub(crate) const DEVICES: u32 = 72;

/// Bytes of the memory file.
const PAGE: usize = 4096;

/// Granularity that the driver recommends.
const RECOMMENDED: u64 = 512 << 20;

/// What all processes share of an object.
#[derive(Debug)]
#[repr(C)]
struct Team {
    /// 1 while somebody changes what follows.
    locked: AtomicU32,
    count: AtomicU32,
    /// Identities of devices, two words each.
    members: [AtomicU64; 2 * DEVICES as usize],
}

const _: () = assert!(size_of::<Team>() <= PAGE);

/// An object, as one handle of this process has it.
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

// SAFETY: the team is shared memory whose words are atomic; it stays mapped as long as the value.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

/// Memory that a device has bound, which stays as long as it is.
#[derive(Debug)]
struct Binding {
    device: u32,
    offset: u64,
    bytes: u64,
    _memory: Arc<Backing>,
}

static BINDINGS: AtomicU64 = AtomicU64::new(0);

/// How many bindings live.
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
        // SAFETY: mapped by `map_team` with so many bytes; this was the last to use it.
        unsafe { libc::munmap(self.team.cast_mut().cast(), PAGE) };
    }
}

/// Whether the devices have multicast.
pub(crate) fn supported() -> Result<()> {
    if settings().multicast {
        Ok(())
    } else {
        Err(Status::NotSupported)
    }
}

/// The granularity for such objects: the least, or the one that is recommended.
pub(crate) fn granularity(recommended: bool) -> u64 {
    if recommended {
        RECOMMENDED
    } else {
        GRANULARITY
    }
}

/// A new object; gives its handle.
pub(crate) fn create(bytes: u64, devices: u32, handles: u32) -> Result<usize> {
    supported()?;
    if devices == 0 || devices > DEVICES || bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
        return Err(Status::InvalidValue);
    }
    let name = format!("{NAME} {devices} {bytes} {handles}");
    let name = CString::new(name).or(Err(Status::Unknown))?;
    // SAFETY: the name is a live C string.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
    if fd < 0 {
        return Err(Status::OperatingSystem);
    }
    // SAFETY: the descriptor is new and nobody else's.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(PAGE as u64).or(Err(Status::OutOfMemory))?;
    insert(file, bytes, devices, handles)
}

/// The object behind a descriptor, if it is that of one; gives its handle.
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
    // SAFETY: a fresh mapping replaces nothing of others.
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

/// The object of a handle.
fn object(handle: usize) -> Result<Arc<Object>> {
    supported()?;
    MULTICASTS.get(handle).ok_or(Status::InvalidValue)
}

/// Gives a reference back; the last one ends what is bound by this handle.
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

/// Takes a reference to an object that is mapped; gives its handle.
pub(crate) fn retain(object: &Arc<Object>) -> usize {
    *lock(&object.references) += 1;
    MULTICASTS.insert_as(object.handle, Arc::clone(object));
    object.handle
}

/// A device's identity as two words.
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
        // SAFETY: mapped as long as this value; its words are atomic.
        unsafe { &*self.team }
    }

    fn has(&self, device: u32) -> bool {
        let wanted = identity(device);
        let count = self.team().count.load(Ordering::Acquire).min(DEVICES) as usize;
        self.team().members[..2 * count]
            .chunks_exact(2)
            .any(|words| wanted == [0, 1].map(|at| words[at].load(Ordering::Acquire)))
    }

    /// Refuses where the driver would wait: for devices that have not joined.
    fn complete(&self, what: &str) -> Result<()> {
        let count = self.team().count.load(Ordering::Acquire);
        if count == self.devices {
            return Ok(());
        }
        record::log_refusal(&format!(
            "{what} of a multicast object that {count} of {} devices have joined: the driver would wait here",
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

/// As [`bind`], of an allocation's handle.
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

/// As [`bind`], of mapped memory.
pub(crate) fn bind_address(handle: usize, offset: u64, address: u64, bytes: u64) -> Result<()> {
    supported()?;
    let region = memory::find(address).ok_or(Status::InvalidValue)?;
    let Kind::Mapping(allocation) = &region.kind else {
        return Err(Status::InvalidValue);
    };
    let memory = Arc::clone(&allocation.backing);
    bind(handle, offset, memory, address - region.start, bytes)
}

/// Takes a device's memory out of exactly the range that it was bound to.
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

/// The object of a handle, where a range from its beginning can be mapped.
pub(crate) fn mappable(handle: usize, bytes: u64) -> Result<Arc<Object>> {
    let object = object(handle)?;
    object.complete("a mapping")?;
    if bytes > object.bytes {
        return Err(Status::InvalidValue);
    }
    Ok(object)
}
