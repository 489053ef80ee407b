//! Virtual memory management: physical memory, reserved addresses and mappings.

use std::sync::{Arc, Mutex};

use super::{Allocation, Kind, Region, SPACE, Space, find, region, removing};
use crate::core::backing::{self, Backing, GRANULARITY};
use crate::core::handles::{ALLOCATIONS, fresh};
use crate::core::settings::settings;
use crate::core::{lock, multicast};
use crate::status::{Result, Status};

/// Creates physical memory. Returns its handle.
pub(crate) fn create(backing: Backing) -> usize {
    let handle = fresh();
    let allocation = Arc::new(Allocation {
        handle,
        backing: Arc::new(backing),
        references: Mutex::new(1),
    });
    ALLOCATIONS.insert_as(handle, allocation);
    handle
}

/// Releases a reference. Mappings keep the memory alive after the last release, but the handle
/// becomes invalid.
pub(crate) fn release(handle: usize) -> Result<()> {
    let allocation = ALLOCATIONS.get(handle).ok_or(Status::InvalidValue)?;
    let mut references = lock(&allocation.references);
    *references -= 1;
    if *references == 0 {
        ALLOCATIONS.remove(handle);
    }
    Ok(())
}

/// Adds a reference to the physical memory or multicast object that is mapped at an address.
/// Returns the handle of the memory or object.
pub(crate) fn retain(address: u64) -> Result<usize> {
    let allocation = match find(address).map(|region| region.kind) {
        Some(Kind::Mapping(allocation)) => allocation,
        Some(Kind::Multicast(object)) => return Ok(multicast::retain(&object)),
        _ => return Err(Status::InvalidValue),
    };
    *lock(&allocation.references) += 1;
    ALLOCATIONS.insert_as(allocation.handle, Arc::clone(&allocation));
    Ok(allocation.handle)
}

/// Reserves a range of addresses. Returns the start of the range.
pub(crate) fn reserve(bytes: u64, alignment: u64) -> Result<u64> {
    let valid = alignment == 0 || alignment.is_power_of_two();
    if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) || !valid {
        return Err(Status::InvalidValue);
    }
    let alignment = alignment.max(GRANULARITY);
    let wide = bytes.checked_add(alignment).ok_or(Status::OutOfMemory)?;
    let from = backing::reserve(None, wide)?;
    let start = from.next_multiple_of(alignment);
    if start > from {
        backing::unmap(from, start - from);
    }
    if from + wide > start + bytes {
        backing::unmap(start + bytes, from + wide - start - bytes);
    }
    lock(&SPACE).reservations.insert(start, bytes);
    Ok(start)
}

/// Frees a reserved range of addresses. Fails if the range contains a mapping.
pub(crate) fn unreserve(start: u64, bytes: u64) -> Result<()> {
    let mut space = lock(&SPACE);
    if space.reservations.get(&start) != Some(&bytes)
        || space.regions.range(start..start + bytes).next().is_some()
    {
        return Err(Status::InvalidValue);
    }
    space.reservations.remove(&start);
    backing::unmap(start, bytes);
    Ok(())
}

/// Maps physical memory or a multicast object into a reservation, without access rights.
pub(crate) fn map(start: u64, bytes: u64, offset: u64, handle: usize) -> Result<()> {
    let allocation = ALLOCATIONS.get(handle);
    let most = match &allocation {
        Some(allocation) => allocation.backing.bytes,
        // The handle is invalid or refers to a multicast object. `mappable` checks the size of the
        // object.
        None => u64::MAX,
    };
    let aligned = start.is_multiple_of(GRANULARITY) && bytes.is_multiple_of(GRANULARITY);
    let mut space = lock(&SPACE);
    let free = space.containing(start).is_none()
        && space
            .regions
            .range(start..start.saturating_add(bytes))
            .next()
            .is_none();
    if bytes == 0
        || !aligned
        || offset != 0
        || bytes > most
        || !space.reserved(start, bytes)
        || !free
    {
        return Err(Status::InvalidValue);
    }
    let Some(allocation) = allocation else {
        let kind = Kind::Multicast(multicast::mappable(handle, bytes)?);
        return space.add(region(start, bytes, kind, 0, 0)).map(drop);
    };
    allocation
        .backing
        .map(Some(start), bytes, libc::PROT_NONE)?;
    let device = allocation.backing.device;
    space
        .add(Region {
            backing: Some(Arc::clone(&allocation.backing)),
            ..region(start, bytes, Kind::Mapping(allocation), device, 0)
        })
        .map(drop)
}

/// Returns the start addresses of the mappings that exactly fill a range.
fn mappings(space: &Space, start: u64, bytes: u64) -> Result<Vec<u64>> {
    let end = start.checked_add(bytes).ok_or(Status::InvalidValue)?;
    let mut at = start;
    let mut found = Vec::new();
    while at < end {
        match space.regions.get(&at) {
            Some(region) if matches!(region.kind, Kind::Mapping(_) | Kind::Multicast(_)) => {
                found.push(at);
                at = region.end();
            }
            _ => return Err(Status::InvalidValue),
        }
    }
    if at == end && bytes > 0 {
        Ok(found)
    } else {
        Err(Status::InvalidValue)
    }
}

/// Unmaps the mappings that exactly fill a range.
pub(crate) fn unmap(start: u64, bytes: u64) -> Result<()> {
    let _removing = removing();
    let mut space = lock(&SPACE);
    for at in mappings(&space, start, bytes)? {
        if let Some(region) = space.regions.remove(&at) {
            backing::reserve(Some(region.start), region.bytes)?;
        }
    }
    Ok(())
}

/// Sets the access rights of a device to the mappings that exactly fill a range.
pub(crate) fn set_access(start: u64, bytes: u64, device: u32, flags: u32) -> Result<()> {
    if !matches!(flags, 0 | 1 | 3) || device >= settings().devices {
        return Err(Status::InvalidValue);
    }
    let _removing = removing();
    let mut space = lock(&SPACE);
    for at in mappings(&space, start, bytes)? {
        if let Some(region) = space.regions.get_mut(&at) {
            region.access.insert(device, flags);
        }
        if let Some(region) = space.regions.get(&at) {
            space.protect(region)?;
        }
    }
    Ok(())
}

/// Returns the access rights of a device at an address.
pub(crate) fn access(address: u64, device: u32) -> Result<u32> {
    let region = find(address).ok_or(Status::InvalidValue)?;
    match region.kind {
        Kind::Mapping(_) | Kind::Multicast(_) => {
            Ok(region.access.get(&device).copied().unwrap_or(0))
        }
        _ => Err(Status::InvalidValue),
    }
}
