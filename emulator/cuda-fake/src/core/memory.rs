//! Address space of the devices: mapped ranges and their access rights.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard};

use fusewire_emulator::{Range, Replica};

use super::backing::{self, Backing};
use super::settings::{POISON, settings};
use super::{context, lock, multicast};
use crate::status::{Result, Status};

mod virtual_memory;

pub(crate) use virtual_memory::{
    access, create, map, release, reserve, retain, set_access, unmap, unreserve,
};

/// Physical memory of `cuMemCreate` and its reference count.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) handle: usize,
    pub(crate) backing: Arc<Backing>,
    references: Mutex<u32>,
}

/// Origin of a range.
#[derive(Clone, Debug)]
pub(crate) enum Kind {
    /// Memory of `cuMemAlloc`.
    Block,
    /// A mapping of physical memory in a reservation.
    Mapping(Arc<Allocation>),
    /// A mapping of a multicast object. Kernels and copies cannot access it.
    Multicast(Arc<multicast::Object>),
    /// A block of another process, and the number of times that this process has opened it.
    Ipc(u32),
    /// Page-locked host memory.
    Host,
    /// User memory that `cuMemHostRegister` registered.
    Registered,
}

/// A range of addresses.
#[derive(Clone, Debug)]
pub(crate) struct Region {
    pub(crate) start: u64,
    /// Bytes that are mapped.
    pub(crate) bytes: u64,
    /// Bytes that were requested.
    pub(crate) requested: u64,
    pub(crate) kind: Kind,
    pub(crate) backing: Option<Arc<Backing>>,
    pub(crate) device: u32,
    /// Handle of the context that owns the range, or 0 if no context owns it.
    pub(crate) context: usize,
    /// Unique number, never reused.
    pub(crate) id: u64,
    /// Access rights of each device (1: read, 3: read and write).
    access: BTreeMap<u32, u32>,
}

/// Location of a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    Device,
    /// Page-locked host memory.
    Host,
    /// Pageable host memory, which the fake does not track.
    Pageable,
}

#[derive(Debug, Default)]
struct Space {
    regions: BTreeMap<u64, Region>,
    /// Reserved ranges: start address and size in bytes.
    reservations: BTreeMap<u64, u64>,
    /// The ranges that were freed last: start, end and device.
    freed: VecDeque<(u64, u64, u32)>,
    /// Number of work items that devices are running now.
    working: u32,
}

static SPACE: Mutex<Space> = Mutex::new(Space {
    regions: BTreeMap::new(),
    reservations: BTreeMap::new(),
    freed: VecDeque::new(),
    working: 0,
});

/// Number of freed ranges that are remembered.
const FREED: usize = 256;

/// Number of ranges of each kind.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LiveCounts {
    pub(crate) reservations: u64,
    pub(crate) mappings: u64,
    pub(crate) blocks: u64,
    pub(crate) ipc: u64,
    pub(crate) host: u64,
    pub(crate) registered: u64,
}

impl Region {
    pub(crate) fn end(&self) -> u64 {
        self.start + self.bytes
    }

    pub(crate) fn on_device(&self) -> bool {
        !matches!(self.kind, Kind::Host | Kind::Registered)
    }

    /// Returns the protection of the range while device work is running.
    fn protection(&self) -> i32 {
        if matches!(self.kind, Kind::Multicast(_)) {
            return libc::PROT_NONE;
        }
        match self.access.values().max() {
            None | Some(0) => libc::PROT_NONE,
            Some(1) => libc::PROT_READ,
            Some(_) => libc::PROT_READ | libc::PROT_WRITE,
        }
    }

    /// Returns true if kernels of a device may access the range at its address.
    fn allows(&self, device: u32, write: bool) -> bool {
        match self.kind {
            Kind::Mapping(_) => {
                let access = self.access.get(&device).copied().unwrap_or(0);
                access >= if write { 3 } else { 1 }
            }
            Kind::Multicast(_) => false,
            Kind::Block => self.device == device || context::has_peer(device, self.context),
            // The flag of `cuIpcOpenMemHandle` enables access for the device that opened the block.
            Kind::Ipc(_) => self.device == device,
            Kind::Host | Kind::Registered => true,
        }
    }

    /// Returns true if copies on streams of a device may access the range. They need no peer
    /// access, because the driver stages them where it is missing.
    fn allows_copy(&self, device: u32, write: bool) -> bool {
        matches!(self.kind, Kind::Block | Kind::Ipc(_)) || self.allows(device, write)
    }
}

impl Space {
    fn containing(&self, address: u64) -> Option<&Region> {
        let (_, region) = self.regions.range(..=address).next_back()?;
        (address < region.end()).then_some(region)
    }

    /// Removes a range that starts at an address. Returns the range.
    fn remove(&mut self, start: u64) -> Option<Region> {
        let region = self.regions.remove(&start)?;
        self.remember(&region);
        Some(region)
    }

    /// Remembers a range that was freed.
    fn remember(&mut self, region: &Region) {
        self.freed.truncate(FREED - 1);
        self.freed
            .push_front((region.start, region.end(), region.device));
    }

    fn reserved(&self, address: u64, bytes: u64) -> bool {
        let before = self.reservations.range(..=address).next_back();
        before.is_some_and(|(start, length)| {
            address
                .checked_add(bytes)
                .is_some_and(|end| end <= start + length)
        })
    }

    /// Sets the page protection of a range. If the guard setting is on and no device work is
    /// running, the range becomes inaccessible.
    fn protect(&self, region: &Region) -> Result<()> {
        let hidden = settings().guard && self.working == 0;
        let protection = if hidden {
            libc::PROT_NONE
        } else {
            region.protection()
        };
        backing::protect(region.start, region.bytes, protection)
    }

    fn add(&mut self, region: Region) -> Result<u64> {
        let start = region.start;
        if region.on_device() {
            self.protect(&region)?;
        }
        self.regions.insert(start, region);
        Ok(start)
    }

    fn work_changed(&self) {
        if settings().guard {
            for region in self.regions.values().filter(|region| region.on_device()) {
                // `protect` cannot fail, because the fake has mapped all pages of the range.
                let _ = self.protect(region);
            }
        }
    }
}

/// Number of times that ranges have been removed or have lost access rights.
static REMOVED: AtomicU64 = AtomicU64::new(0);

/// Read-locked while the emulator executes a slice, write-locked while ranges are removed.
static EMULATION: RwLock<()> = RwLock::new(());

/// Number of threads that wait for [`EMULATION`] to remove ranges.
static REMOVING: AtomicU32 = AtomicU32::new(0);

/// Waits until the emulator executes no slice. Call this function before locking the address
/// space, and keep the guard while ranges or access rights are removed.
fn removing() -> RwLockWriteGuard<'static, ()> {
    REMOVING.fetch_add(1, Ordering::AcqRel);
    let guard = EMULATION.write().unwrap_or_else(PoisonError::into_inner);
    REMOVING.fetch_sub(1, Ordering::AcqRel);
    REMOVED.fetch_add(1, Ordering::Release);
    guard
}

/// Runs a slice of the emulator. Ranges are removed only between slices. Threads that wait to
/// remove ranges go first, because the emulator locks again at once after each slice.
pub(crate) fn hold(slice: &mut dyn FnMut()) {
    while REMOVING.load(Ordering::Acquire) > 0 {
        std::thread::yield_now();
    }
    let _guard = EMULATION.read().unwrap_or_else(PoisonError::into_inner);
    slice();
}

/// Returns a number that changes when ranges are removed or lose access rights.
pub(crate) fn generation() -> u64 {
    REMOVED.load(Ordering::Acquire)
}

/// Returns the range at an address with the access rights of a device, for the emulator.
pub(crate) fn range(device: u32, address: u64) -> Option<Range> {
    let space = lock(&SPACE);
    let region = space.containing(address)?;
    let multicast = matches!(region.kind, Kind::Multicast(_));
    let end = match region.kind {
        Kind::Mapping(_) | Kind::Multicast(_) => region.end(),
        _ => region.start + region.requested,
    };
    let allows = |write| {
        if multicast {
            region
                .access
                .get(&device)
                .is_some_and(|access| *access == 3)
        } else {
            region.allows(device, write)
        }
    };
    Some(Range {
        start: region.start,
        end,
        read: allows(false),
        write: allows(true),
        multicast,
        owner: region.on_device().then_some(region.device),
        memory: match &region.backing {
            Some(backing) => backing.inode(),
            // Host memory. Numbers of regions are not reused.
            None => HOST_MEMORY | region.id,
        },
        offset: match &region.backing {
            Some(_) => 0,
            None => region.start & 7,
        },
    })
}

/// Distinguishes the numbers of host memory from inode numbers.
const HOST_MEMORY: u64 = 1 << 63;

/// Describes an address without a range, for the emulator.
pub(crate) fn describe(address: u64) -> Option<String> {
    let space = lock(&SPACE);
    if space.reserved(address, 1) {
        return Some("the address is reserved, but no memory is mapped there".to_owned());
    }
    let within = |(start, end, _): &&(u64, u64, u32)| *start <= address && address < *end;
    let (.., owner) = space.freed.iter().find(within)?;
    Some(format!(
        "the memory of device {owner} at this address was freed"
    ))
}

/// Returns the memory that all devices have bound at a multicast address.
pub(crate) fn replicas(
    device: u32,
    address: u64,
    bytes: u64,
) -> core::result::Result<Vec<Replica>, String> {
    let region = find(address);
    let Some((object, offset)) = region.as_ref().and_then(|region| match &region.kind {
        Kind::Multicast(object) if region.access.get(&device) == Some(&3) => {
            Some((object, address - region.start))
        }
        _ => None,
    }) else {
        return Err(format!(
            "device {device} has no access to a multicast object at {address:#x}"
        ));
    };
    object.replicas(offset, bytes)
}

/// Marks the start of device work. Device memory must be accessible until [`end_work`].
pub(crate) fn begin_work() {
    let mut space = lock(&SPACE);
    space.working += 1;
    if space.working == 1 {
        space.work_changed();
    }
}

/// Marks the end of device work.
pub(crate) fn end_work() {
    let mut space = lock(&SPACE);
    space.working -= 1;
    if space.working == 0 {
        space.work_changed();
    }
}

/// Marks device work as running until the guard is dropped.
#[derive(Debug)]
struct WorkGuard;

fn working() -> WorkGuard {
    begin_work();
    WorkGuard
}

impl Drop for WorkGuard {
    fn drop(&mut self) {
        end_work();
    }
}

fn region(start: u64, bytes: u64, kind: Kind, device: u32, context: usize) -> Region {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    Region {
        start,
        bytes,
        requested: bytes,
        kind,
        backing: None,
        device,
        context,
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        access: BTreeMap::new(),
    }
}

fn round_up(bytes: u64, to: u64) -> Result<u64> {
    bytes
        .checked_next_multiple_of(to)
        .ok_or(Status::OutOfMemory)
}

/// Page size of the host.
const PAGE: u64 = 4096;

/// Allocates a block of device memory. Returns its address.
pub(crate) fn allocate(device: u32, context: usize, requested: u64) -> Result<u64> {
    if requested == 0 {
        return Err(Status::InvalidValue);
    }
    let bytes = round_up(requested, PAGE)?;
    let backing = Arc::new(Backing::new(bytes, device, 0)?);
    let start = backing.map(None, bytes, libc::PROT_NONE)?;
    lock(&SPACE).add(Region {
        requested,
        backing: Some(backing),
        access: BTreeMap::from([(device, 3)]),
        ..region(start, bytes, Kind::Block, device, context)
    })
}

/// Maps a block of another process. If the block is already mapped, increments its open count.
pub(crate) fn open_block(
    backing: Backing,
    requested: u64,
    device: u32,
    context: usize,
) -> Result<u64> {
    let mut space = lock(&SPACE);
    let inode = backing.inode();
    let open = space.regions.values_mut().find(|region| {
        matches!(region.kind, Kind::Ipc(_))
            && region.context == context
            && region
                .backing
                .as_ref()
                .is_some_and(|it| it.inode() == inode)
    });
    if let Some(open) = open {
        if let Kind::Ipc(times) = &mut open.kind {
            *times += 1;
        }
        return Ok(open.start);
    }
    let bytes = backing.bytes;
    let start = backing.map(None, bytes, libc::PROT_NONE)?;
    space.add(Region {
        requested,
        backing: Some(Arc::new(backing)),
        access: BTreeMap::from([(device, 3)]),
        ..region(start, bytes, Kind::Ipc(1), device, context)
    })
}

/// Closes a block that [`open_block`] opened.
pub(crate) fn close_block(address: u64) -> Result<()> {
    let _removing = removing();
    let mut space = lock(&SPACE);
    let region = space
        .regions
        .get_mut(&address)
        .ok_or(Status::InvalidValue)?;
    let Kind::Ipc(times) = &mut region.kind else {
        return Err(Status::InvalidValue);
    };
    *times -= 1;
    if *times == 0 {
        backing::unmap(region.start, region.bytes);
        space.remove(address);
    }
    Ok(())
}

/// Frees the block at an address.
pub(crate) fn free(address: u64) -> Result<()> {
    remove(address, |kind| matches!(kind, Kind::Block))
}

/// Frees the page-locked host memory at an address.
pub(crate) fn free_host(address: u64) -> Result<()> {
    remove(address, |kind| matches!(kind, Kind::Host))
}

fn remove(address: u64, of_kind: impl Fn(&Kind) -> bool) -> Result<()> {
    let _removing = removing();
    let mut space = lock(&SPACE);
    match space.regions.get(&address) {
        Some(region) if of_kind(&region.kind) => {
            backing::unmap(region.start, region.bytes);
            space.remove(address);
            Ok(())
        }
        _ => Err(Status::InvalidValue),
    }
}

/// Allocates page-locked host memory.
pub(crate) fn allocate_host(device: u32, context: usize, requested: u64) -> Result<u64> {
    if requested == 0 {
        return Err(Status::InvalidValue);
    }
    let bytes = round_up(requested, PAGE)?;
    let start = backing::reserve(None, bytes)?;
    backing::protect(start, bytes, libc::PROT_READ | libc::PROT_WRITE)?;
    if settings().poison {
        // SAFETY: the `bytes` bytes at `start` have just been mapped as writable, and no other code
        // has their address.
        unsafe { core::ptr::write_bytes(start as *mut u8, POISON, bytes as usize) };
    }
    lock(&SPACE).add(Region {
        requested,
        ..region(start, bytes, Kind::Host, device, context)
    })
}

/// Registers user memory as page-locked.
pub(crate) fn register(device: u32, context: usize, start: u64, bytes: u64) -> Result<()> {
    let end = start.checked_add(bytes).ok_or(Status::InvalidValue)?;
    if bytes == 0 || start == 0 {
        return Err(Status::InvalidValue);
    }
    let mut space = lock(&SPACE);
    if space.containing(start).is_some() || space.regions.range(start..end).next().is_some() {
        return Err(Status::HostMemoryAlreadyRegistered);
    }
    space
        .add(region(start, bytes, Kind::Registered, device, context))
        .map(drop)
}

/// Undoes [`register`].
pub(crate) fn unregister(start: u64) -> Result<()> {
    let _removing = removing();
    let mut space = lock(&SPACE);
    match space.regions.get(&start).map(|region| &region.kind) {
        Some(Kind::Registered) => {
            space.remove(start);
            Ok(())
        }
        _ => Err(Status::HostMemoryNotRegistered),
    }
}

/// Returns the tracked range that contains an address.
pub(crate) fn find(address: u64) -> Option<Region> {
    lock(&SPACE).containing(address).cloned()
}

/// Returns the location of a range of addresses that kernels and memory operations of a device
/// access.
///
/// # Errors
/// Fails with `IllegalAddress` if an access by the device would fault.
pub(crate) fn check(address: u64, bytes: u64, device: u32, write: bool) -> Result<Location> {
    check_with(address, bytes, |region| region.allows(device, write))
}

/// Returns the location of a range of addresses that a copy on a stream of a device accesses.
///
/// # Errors
/// Fails with `IllegalAddress` if the copy would fault.
pub(crate) fn check_copy(address: u64, bytes: u64, device: u32, write: bool) -> Result<Location> {
    check_with(address, bytes, |region| region.allows_copy(device, write))
}

fn check_with(address: u64, bytes: u64, allows: impl Fn(&Region) -> bool) -> Result<Location> {
    let end = address.checked_add(bytes).ok_or(Status::IllegalAddress)?;
    let space = lock(&SPACE);
    let Some(first) = space.containing(address) else {
        let reserved = space.reserved(address, 1);
        return if reserved {
            Err(Status::IllegalAddress)
        } else {
            Ok(Location::Pageable)
        };
    };
    let location = if first.on_device() {
        Location::Device
    } else {
        Location::Host
    };
    let mut at = address;
    while at < end || at == address {
        let region = space.containing(at).ok_or(Status::IllegalAddress)?;
        let limit = match region.kind {
            Kind::Mapping(_) => region.end(),
            _ => region.start + region.requested,
        };
        if !allows(region) || (at >= limit && bytes > 0) {
            return Err(Status::IllegalAddress);
        }
        if end <= limit {
            break;
        }
        if !matches!(region.kind, Kind::Mapping(_)) {
            return Err(Status::IllegalAddress);
        }
        at = region.end();
    }
    Ok(location)
}

/// Returns true if an access by the device would fault, because the address is reserved but not
/// mapped with access for the device.
pub(crate) fn faults(address: u64, device: u32) -> bool {
    check(address, 0, device, false) == Err(Status::IllegalAddress)
}

/// Frees all ranges of a context.
pub(crate) fn free_context(context: usize) {
    let _removing = removing();
    let mut space = lock(&SPACE);
    space.regions.retain(|_, region| {
        if region.context != context {
            return true;
        }
        if !matches!(region.kind, Kind::Registered) {
            backing::unmap(region.start, region.bytes);
        }
        false
    });
}

/// Returns the number of ranges of each kind.
pub(crate) fn live() -> LiveCounts {
    let space = lock(&SPACE);
    let mut live = LiveCounts {
        reservations: space.reservations.len() as u64,
        ..LiveCounts::default()
    };
    for region in space.regions.values() {
        match region.kind {
            Kind::Block => live.blocks += 1,
            Kind::Mapping(_) | Kind::Multicast(_) => live.mappings += 1,
            Kind::Ipc(_) => live.ipc += 1,
            Kind::Host => live.host += 1,
            Kind::Registered => live.registered += 1,
        }
    }
    live
}

/// Copies as a device does: small aligned copies write every eight bytes in a single access.
///
/// # Safety
/// `bytes` bytes must be readable at `from` and writable at `to` while device work is running.
pub(crate) unsafe fn copy(to: u64, from: u64, bytes: u64) {
    let _working = working();
    if (to | from | bytes).is_multiple_of(8) && bytes <= 256 {
        for at in (0..bytes).step_by(8) {
            let source = (from + at) as *mut u64;
            let target = (to + at) as *mut u64;
            // SAFETY: `source` is aligned, and it is in the readable range because `at < bytes`.
            let word = unsafe { AtomicU64::from_ptr(source) }.load(Ordering::Acquire);
            // SAFETY: `target` is aligned, and it is in the writable range because `at < bytes`.
            unsafe { AtomicU64::from_ptr(target) }.store(word, Ordering::Release);
        }
        return;
    }
    // SAFETY: the caller guarantees readable bytes at `from` and writable bytes at `to`.
    // `ptr::copy` permits overlap.
    unsafe { core::ptr::copy(from as *const u8, to as *mut u8, bytes as usize) };
}

/// Fills `count` elements of `width` bytes with a pattern.
///
/// # Safety
/// `count * width` bytes must be writable at `to`. The bytes may be protected while no device work
/// is running, because this function marks work as running.
pub(crate) unsafe fn fill(to: u64, pattern: u32, width: u64, count: u64) {
    let _working = working();
    for at in 0..count {
        let address = to + at * width;
        match width {
            // SAFETY: `at < count`, so the byte is in the writable range.
            1 => unsafe { (address as *mut u8).write(pattern as u8) },
            // SAFETY: `at < count`, so both bytes are in the writable range.
            2 => unsafe { (address as *mut u16).write_unaligned(pattern as u16) },
            // SAFETY: `at < count`, so the four bytes are in the writable range.
            _ => unsafe { (address as *mut u32).write_unaligned(pattern) },
        }
    }
}
