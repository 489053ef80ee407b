//! Multicast objects: teams of devices, and the memory that each device has bound.
//!
//! All processes with a handle to an object share the memory file of its team, which lists the
//! bindings of all devices. The address range of the object can be reserved and mapped, but not
//! accessed. Native kernels access the memory of each device through its unicast address. The
//! emulator executes `multimem` instructions on the bound memory of all devices. It opens the
//! memory files of other processes through `/proc`.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex};

use fusewire_emulator::Replica;

use super::backing::{self, Backing, GRANULARITY};
use super::handles::{ALLOCATIONS, MULTICASTS, fresh};
use super::memory::{self, Kind};
use super::settings::settings;
use super::{context, lock, record};
use crate::status::{Result, Status};

const NAME: &str = "fusewire-cuda-fake-multicast";

/// Maximum number of devices of a team.
pub(crate) const DEVICES: u32 = 72;

/// Maximum number of bindings of an object.
const BINDINGS_MAX: usize = 4 * DEVICES as usize;

/// Size of the memory file of a team, in bytes.
const PAGE: usize = 20 << 10;

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
    bindings: [TeamBinding; BINDINGS_MAX],
}

/// A binding in the memory file of a team. Written while the team is locked.
#[derive(Debug)]
#[repr(C)]
struct TeamBinding {
    /// Number of the binding, unique on the host. 0: the entry is free.
    id: AtomicU64,
    /// Index of the device in the members of the team.
    member: AtomicU64,
    offset: AtomicU64,
    bytes: AtomicU64,
    /// Process and descriptor of the memory file, and the offset in this file.
    process: AtomicU64,
    descriptor: AtomicU64,
    memory_offset: AtomicU64,
}

/// A mapping of the memory file of a team.
#[derive(Debug)]
struct TeamMapping(*const Team);

// SAFETY: the pointer refers to atomics in shared memory, which stays mapped until the value is
// dropped.
unsafe impl Send for TeamMapping {}
// SAFETY: see `Send`.
unsafe impl Sync for TeamMapping {}

impl Drop for TeamMapping {
    fn drop(&mut self) {
        // SAFETY: `map_team` mapped `PAGE` bytes at this address. References into the mapping
        // borrow `self`, so none is live.
        unsafe { libc::munmap(self.0.cast_mut().cast(), PAGE) };
    }
}

impl TeamMapping {
    fn team(&self) -> &Team {
        // SAFETY: the mapping lives as long as `self`. All fields are atomic integers, for which
        // all bit patterns are valid.
        unsafe { &*self.0 }
    }

    /// Runs `f` while this process has locked the team.
    fn locked<T>(&self, f: impl FnOnce(&Team) -> T) -> T {
        let team = self.team();
        let take = || {
            team.locked
                .compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed)
        };
        while take().is_err() {
            std::thread::yield_now();
        }
        let result = f(team);
        team.locked.store(0, Ordering::Release);
        result
    }
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
    team: Arc<TeamMapping>,
    references: Mutex<u32>,
    bindings: Mutex<Vec<Binding>>,
    /// Mapped memory of bindings by their numbers.
    replicas: Mutex<BTreeMap<u64, MappedBinding>>,
}

/// The memory of a binding, which this process has mapped.
#[derive(Clone, Copy, Debug)]
struct MappedBinding {
    bytes: u64,
    /// The first byte.
    start: Replica,
}

/// Memory that is bound to an object for one device. The binding keeps the memory alive.
#[derive(Debug)]
struct Binding {
    device: u32,
    offset: u64,
    bytes: u64,
    team: Arc<TeamMapping>,
    /// Index in the bindings of the team.
    slot: usize,
    _memory: Arc<Backing>,
}

static BINDINGS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of live bindings.
pub(crate) fn bindings() -> u64 {
    BINDINGS.load(Ordering::Acquire)
}

impl Drop for Binding {
    fn drop(&mut self) {
        self.team.team().bindings[self.slot]
            .id
            .store(0, Ordering::Release);
        BINDINGS.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        for MappedBinding { start, bytes } in lock(&self.replicas).values() {
            backing::unmap(start.address, *bytes);
        }
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
        team: Arc::new(team),
        references: Mutex::new(1),
        bindings: Mutex::default(),
        replicas: Mutex::default(),
    };
    MULTICASTS.insert_as(handle, Arc::new(object));
    Ok(handle)
}

fn map_team(file: &File) -> Result<TeamMapping> {
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
    Ok(TeamMapping(address.cast_const().cast()))
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
        self.team.team()
    }

    /// Returns the index of a device in the members of the team.
    fn member(&self, device: u32) -> Option<usize> {
        let wanted = identity(device);
        let count = self.team().count.load(Ordering::Acquire).min(DEVICES) as usize;
        self.team().members[..2 * count]
            .as_chunks::<2>()
            .0
            .iter()
            .position(|words| wanted == [0, 1].map(|at| words[at].load(Ordering::Acquire)))
    }

    /// Adds a binding to the memory file of the team. Returns its index.
    fn publish(
        &self,
        device: u32,
        offset: u64,
        memory: &Backing,
        memory_offset: u64,
        bytes: u64,
    ) -> Result<usize> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let member = self.member(device).ok_or(Status::InvalidDevice)? as u64;
        self.team.locked(|team| {
            let is_free = |binding: &TeamBinding| binding.id.load(Ordering::Acquire) == 0;
            let slot = team
                .bindings
                .iter()
                .position(is_free)
                .ok_or(Status::OutOfMemory)?;
            let binding = &team.bindings[slot];
            let process = u64::from(std::process::id());
            let words = [
                (&binding.member, member),
                (&binding.offset, offset),
                (&binding.bytes, bytes),
                (&binding.process, process),
                (&binding.descriptor, memory.file.as_raw_fd() as u64),
                (&binding.memory_offset, memory_offset),
            ];
            for (cell, word) in words {
                cell.store(word, Ordering::Relaxed);
            }
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            binding.id.store(process << 32 | number, Ordering::Release);
            Ok(slot)
        })
    }

    /// Returns the memory that all devices have bound at an offset, in the order of the devices'
    /// UUIDs.
    pub(crate) fn replicas(
        &self,
        offset: u64,
        bytes: u64,
    ) -> core::result::Result<Vec<Replica>, String> {
        let mut mapped = lock(&self.replicas);
        let find = |member: u64| {
            self.team().bindings.iter().find_map(|binding| {
                let id = binding.id.load(Ordering::Acquire);
                let start = binding.offset.load(Ordering::Relaxed);
                let end = start + binding.bytes.load(Ordering::Relaxed);
                let found = id != 0
                    && binding.member.load(Ordering::Relaxed) == member
                    && start <= offset
                    && offset + bytes <= end;
                found.then_some((id, binding))
            })
        };
        let mut members: Vec<_> = self
            .team()
            .members
            .as_chunks::<2>()
            .0
            .iter()
            .enumerate()
            .collect();
        members.truncate(self.devices as usize);
        members.sort_by_key(|(_, words)| [0, 1].map(|at| words[at].load(Ordering::Acquire)));
        members
            .into_iter()
            .map(|(member, _)| {
                let (id, binding) = find(member as u64).ok_or_else(|| {
                    format!(
                        "device {member} of the multicast object has no memory bound at offset \
                         {offset:#x}"
                    )
                })?;
                let inner = offset - binding.offset.load(Ordering::Relaxed);
                let start = match mapped.get(&id) {
                    Some(known) => known.start,
                    None => {
                        let new = binding.map()?;
                        mapped.insert(id, new);
                        new.start
                    }
                };
                Ok(Replica {
                    address: start.address + inner,
                    offset: start.offset + inner,
                    ..start
                })
            })
            .collect()
    }

    fn has(&self, device: u32) -> bool {
        self.member(device).is_some()
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
    object.team.locked(|team| {
        let count = team.count.load(Ordering::Acquire);
        if object.has(device) || count >= object.devices {
            return Err(Status::InvalidValue);
        }
        let slots = &team.members[2 * count as usize..];
        for (slot, word) in slots.iter().zip(identity(device)) {
            slot.store(word, Ordering::Release);
        }
        team.count.store(count + 1, Ordering::Release);
        Ok(())
    })
}

impl TeamBinding {
    /// Maps the bound memory. Returns the address and the size of the mapping.
    fn map(&self) -> core::result::Result<MappedBinding, String> {
        let word = |cell: &AtomicU64| cell.load(Ordering::Acquire);
        let path = format!(
            "/proc/{}/fd/{}",
            word(&self.process),
            word(&self.descriptor)
        );
        let file = File::options().read(true).write(true).open(&path);
        let file = file.map_err(|error| format!("cannot open the bound memory {path}: {error}"))?;
        let bytes = word(&self.bytes);
        // SAFETY: a mapping without a fixed address replaces no other mapping.
        let address = unsafe {
            libc::mmap(
                core::ptr::null_mut(),
                bytes as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                word(&self.memory_offset) as libc::off_t,
            )
        };
        if address == libc::MAP_FAILED {
            return Err(format!(
                "cannot map {bytes} bytes of the bound memory {path}"
            ));
        }
        let data = file.metadata();
        let data =
            data.map_err(|error| format!("cannot examine the bound memory {path}: {error}"))?;
        Ok(MappedBinding {
            bytes,
            start: Replica {
                address: address as u64,
                memory: data.ino(),
                offset: word(&self.memory_offset),
            },
        })
    }
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
    let slot = object.publish(device, offset, &memory, memory_offset, bytes)?;
    BINDINGS.fetch_add(1, Ordering::AcqRel);
    bindings.push(Binding {
        device,
        offset,
        bytes,
        team: Arc::clone(&object.team),
        slot,
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
