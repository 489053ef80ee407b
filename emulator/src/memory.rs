//! Global memory of the devices.

use core::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

use crate::program::Order;
use crate::shadow::Place;

/// A range of addresses and the access that a device has to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// End address, exclusive.
    pub end: u64,
    /// True if the device may read the range.
    pub read: bool,
    /// True if the device may write the range.
    pub write: bool,
    /// True if the range is the mapping of a multicast object: only `multimem` instructions may
    /// access it.
    pub multicast: bool,
    /// The device that has the memory, or `None` for host memory.
    pub owner: Option<u32>,
    /// A number that is the same for all ranges that map the same memory.
    pub memory: u64,
    /// Offset of `start` in the memory. The difference to `start` is a multiple of 8.
    pub offset: u64,
}

impl Range {
    /// Returns the location of an address in the range.
    fn place(&self, address: u64) -> Place {
        Place {
            memory: self.memory,
            offset: self.offset + (address - self.start),
        }
    }
}

/// The memory of a device at a multicast address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    /// An address at which this process has mapped the memory.
    pub address: u64,
    /// The memory, as in [`Range::memory`].
    pub memory: u64,
    /// The offset of the address in the memory.
    pub offset: u64,
}

/// Global memory: addresses of this process, with the access rights of the devices.
///
/// # Safety
/// The bytes of a range that [`range`](Memory::range) returns must be mapped in this process with
/// the range's access rights, unless it is a multicast range. The addresses that
/// [`replicas`](Memory::replicas) returns must be mapped. While [`hold`](Memory::hold) runs its
/// argument, mappings and access rights must not be removed. If they are removed afterwards,
/// [`generation`](Memory::generation) must change before.
pub unsafe trait Memory: Send + Sync + core::fmt::Debug {
    /// Returns the range that contains `address`, or `None` if an access by `device` would fault.
    fn range(&self, device: u32, address: u64) -> Option<Range>;

    /// Describes an address that `device` may not access, for an error: the memory was freed, for
    /// example. Returns `None` if nothing is known about the address.
    fn describe(&self, _device: u32, _address: u64) -> Option<String> {
        None
    }

    /// Returns a number that changes whenever a range is removed or loses access rights.
    fn generation(&self) -> u64;

    /// Runs `slice`, which accesses memory.
    fn hold(&self, slice: &mut dyn FnMut());

    /// Returns the replicas of a multicast address, one for each device of the object.
    ///
    /// # Errors
    /// Fails with a description if not all `bytes` bytes are bound on all devices.
    fn replicas(&self, device: u32, address: u64, bytes: u64) -> Result<Vec<Replica>, String>;
}

/// The view of one device on the global memory. Keeps the ranges that were found.
#[derive(Debug)]
pub(crate) struct View {
    memory: Arc<dyn Memory>,
    device: u32,
    ranges: Vec<Range>,
    last: usize,
    generation: u64,
    /// Variables of the module.
    variables: Vec<Range>,
}

impl View {
    pub(crate) fn new(memory: Arc<dyn Memory>, device: u32, variables: Vec<Range>) -> Self {
        let generation = memory.generation();
        Self {
            memory,
            device,
            ranges: variables.clone(),
            last: 0,
            generation,
            variables,
        }
    }

    /// Returns a copy, for searches that must not change the view.
    pub(crate) fn clone_ranges(&self) -> Self {
        Self::new(
            Arc::clone(&self.memory),
            self.device,
            self.variables.clone(),
        )
    }

    /// Forgets the ranges if one has been removed.
    pub(crate) fn refresh(&mut self) {
        let generation = self.memory.generation();
        if generation != self.generation {
            self.generation = generation;
            self.ranges.clone_from(&self.variables);
            self.last = 0;
        }
    }

    /// Returns the range that contains `address`.
    pub(crate) fn find(&mut self, address: u64) -> Option<Range> {
        let within = |range: &Range| range.start <= address && address < range.end;
        if let Some(range) = self.ranges.get(self.last).filter(|it| within(it)) {
            return Some(*range);
        }
        if let Some(at) = self.ranges.iter().position(within) {
            self.last = at;
            return Some(self.ranges[at]);
        }
        let range = self.memory.range(self.device, address).filter(within)?;
        self.last = self.ranges.len();
        self.ranges.push(range);
        Some(range)
    }

    /// Checks an access. Returns a description of the fault.
    #[inline]
    pub(crate) fn check(&mut self, address: u64, bytes: u64, write: bool) -> Result<(), String> {
        if let Some(range) = self.ranges.get(self.last)
            && range.start <= address
            && address <= range.end.saturating_sub(bytes)
            && !range.multicast
            && (if write { range.write } else { range.read })
        {
            return Ok(());
        }
        self.check_slowly(address, bytes, write)
    }

    #[cold]
    fn check_slowly(&mut self, address: u64, bytes: u64, write: bool) -> Result<(), String> {
        let verb = if write { "writes" } else { "reads" };
        let Some(range) = self.find(address) else {
            let known = self.memory.describe(self.device, address);
            let detail = known.unwrap_or_else(|| {
                format!(
                    "no memory of this address is accessible to device {}",
                    self.device
                )
            });
            return Err(format!("{verb} {bytes} bytes at {address:#x}: {detail}"));
        };
        if address > range.end.saturating_sub(bytes) {
            return Err(format!(
                "{verb} {bytes} bytes at {address:#x}: the memory ends at {:#x}",
                range.end
            ));
        }
        if range.multicast {
            return Err(format!(
                "{verb} {address:#x}, an address of a multicast object, with an instruction other \
                 than multimem"
            ));
        }
        if !(if write { range.write } else { range.read }) {
            let owner = match range.owner {
                Some(owner) => format!("in memory of device {owner}"),
                None => "in host memory".to_owned(),
            };
            return Err(format!(
                "{verb} {bytes} bytes at {address:#x} {owner}, to which device {} has no such \
                 access",
                self.device
            ));
        }
        Ok(())
    }

    /// Returns the location of an address that [`check`](Self::check) has accepted.
    pub(crate) fn place(&self, address: u64) -> Place {
        self.ranges[self.last].place(address)
    }

    /// Returns the replicas of a multicast address.
    pub(crate) fn replicas(&mut self, address: u64, bytes: u64) -> Result<Vec<Replica>, String> {
        match self.find(address) {
            Some(range) if range.multicast && address <= range.end.saturating_sub(bytes) => {
                self.memory.replicas(self.device, address, bytes)
            }
            _ => Err(format!(
                "{bytes} bytes at {address:#x} are not in the mapping of a multicast object"
            )),
        }
    }
}

/// Loads an element of 1, 2, 4 or 8 bytes.
///
/// # Safety
/// `size` bytes at `address` must be mapped and readable, and `address` must be a multiple of
/// `size`.
pub(crate) unsafe fn load(address: u64, size: u8, order: Order) -> u64 {
    let ordering = match order {
        Order::Acquire | Order::AcqRel => Ordering::Acquire,
        _ => Ordering::Relaxed,
    };
    match size {
        // SAFETY: the caller guarantees a readable byte.
        1 => u64::from(unsafe { AtomicU8::from_ptr(address as *mut u8) }.load(ordering)),
        // SAFETY: the caller guarantees two aligned, readable bytes.
        2 => u64::from(unsafe { AtomicU16::from_ptr(address as *mut u16) }.load(ordering)),
        // SAFETY: the caller guarantees four aligned, readable bytes.
        4 => u64::from(unsafe { AtomicU32::from_ptr(address as *mut u32) }.load(ordering)),
        // SAFETY: the caller guarantees eight aligned, readable bytes.
        _ => unsafe { AtomicU64::from_ptr(address as *mut u64) }.load(ordering),
    }
}

/// Stores an element of 1, 2, 4 or 8 bytes. Returns true if its value was different before.
///
/// # Safety
/// `size` bytes at `address` must be mapped and writable, and `address` must be a multiple of
/// `size`.
pub(crate) unsafe fn store(address: u64, size: u8, order: Order, value: u64) -> bool {
    let ordering = match order {
        Order::Release | Order::AcqRel => Ordering::Release,
        _ => Ordering::Relaxed,
    };
    // SAFETY: writable memory is also readable; the caller guarantees the alignment.
    let before = unsafe { load(address, size, Order::Weak) };
    match size {
        1 => {
            // SAFETY: the caller guarantees a writable byte.
            unsafe { AtomicU8::from_ptr(address as *mut u8) }.store(value as u8, ordering);
        }
        2 => {
            // SAFETY: the caller guarantees two aligned, writable bytes.
            unsafe { AtomicU16::from_ptr(address as *mut u16) }.store(value as u16, ordering);
        }
        4 => {
            // SAFETY: the caller guarantees four aligned, writable bytes.
            unsafe { AtomicU32::from_ptr(address as *mut u32) }.store(value as u32, ordering);
        }
        _ => {
            // SAFETY: the caller guarantees eight aligned, writable bytes.
            unsafe { AtomicU64::from_ptr(address as *mut u64) }.store(value, ordering);
        }
    }
    before != value
}

/// Replaces an element of 2, 4 or 8 bytes by a function of its value. Returns the old value.
///
/// # Safety
/// The requirements of [`store`].
pub(crate) unsafe fn update(address: u64, size: u8, f: impl Fn(u64) -> u64) -> u64 {
    let (set, fetch) = (Ordering::SeqCst, Ordering::SeqCst);
    match size {
        2 => {
            // SAFETY: the caller guarantees two aligned, writable bytes.
            let cell = unsafe { AtomicU16::from_ptr(address as *mut u16) };
            let old = cell.try_update(set, fetch, |old| Some(f(old.into()) as u16));
            u64::from(old.unwrap_or_else(|old| old))
        }
        4 => {
            // SAFETY: the caller guarantees four aligned, writable bytes.
            let cell = unsafe { AtomicU32::from_ptr(address as *mut u32) };
            let old = cell.try_update(set, fetch, |old| Some(f(old.into()) as u32));
            u64::from(old.unwrap_or_else(|old| old))
        }
        _ => {
            // SAFETY: the caller guarantees eight aligned, writable bytes.
            let cell = unsafe { AtomicU64::from_ptr(address as *mut u64) };
            let old = cell.try_update(set, fetch, |old| Some(f(old)));
            old.unwrap_or_else(|old| old)
        }
    }
}
