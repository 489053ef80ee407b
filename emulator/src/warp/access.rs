//! Loads, stores and atomic operations.

use super::{Env, Group, Poll, Problem, Warp};
use crate::atomic;
use crate::block::Shared;
use crate::error::FaultKind;
use crate::memory::{self, Replica, View};
use crate::program::{
    Access, Extend, LOCAL_BASE, MultimemType, NO_REG, Order, Reg, Space, Src, resolve,
};
use crate::row::lanes;
use crate::shadow::{Cells, Element, Place, World};

/// Properties of a read-modify-write instruction.
#[derive(Clone, Copy, Debug)]
pub(super) struct Update {
    /// True if the instruction writes only if the value changes.
    pub(super) compares: bool,
    /// True if the old value is discarded.
    pub(super) reduction: bool,
}

impl Warp {
    /// Returns the bytes of shared or local memory of an access.
    #[inline(always)]
    pub(super) fn private<'s>(
        &'s mut self,
        shared: &'s mut Shared,
        lane: usize,
        space: Space,
        address: u64,
        size: u64,
    ) -> Result<&'s mut [u8], Problem> {
        let (bytes, name): (&mut [u8], _) = match space {
            Space::Shared => (&mut shared.bytes, "shared"),
            _ => (
                self.locals
                    .get_mut(lane)
                    .map_or(&mut [][..], |it| it.as_mut_slice()),
                "local",
            ),
        };
        let length = bytes.len() as u64;
        if address.is_multiple_of(size) && address.checked_add(size).is_some_and(|it| it <= length)
        {
            return Ok(&mut bytes[address as usize..][..size as usize]);
        }
        Err(private_problem(lane, name, address, size, length))
    }

    /// Returns the state space and address of an access.
    #[inline(always)]
    pub(super) fn locate(
        &self,
        lane: usize,
        space: Space,
        address: u64,
    ) -> Result<(Space, u64), Problem> {
        match space {
            Space::Generic => Ok(resolve(address)),
            Space::Frame => Ok((Space::Local, address + u64::from(self.frames[lane]))),
            // Parameters are also read through generic addresses and through frame addresses.
            Space::Param if address >= LOCAL_BASE => Ok(resolve(address)),
            Space::Global if resolve(address).0 != Space::Global => {
                let (space, address) = resolve(address);
                Err(Problem::new(
                    FaultKind::IllegalAddress,
                    lane,
                    format!(
                        "a global access to the address {address:#x} of {} memory",
                        name_of(space)
                    ),
                ))
            }
            space => Ok((space, address)),
        }
    }

    /// Checks an access to global memory.
    #[inline(always)]
    pub(super) fn check(
        view: &mut View,
        lane: usize,
        access: Access,
        address: u64,
        write: bool,
    ) -> Result<(), Problem> {
        let bytes = u64::from(access.size) * u64::from(access.count);
        if !address.is_multiple_of(bytes) {
            return Err(Problem::new(
                FaultKind::MisalignedAddress,
                lane,
                format!(
                    "accesses {bytes} bytes at the global address {address:#x}, which is not a \
                     multiple of {bytes}"
                ),
            ));
        }
        view.check(address, bytes, write)
            .map_err(|detail| Problem::new(FaultKind::IllegalAddress, lane, detail))
    }

    #[allow(clippy::too_many_arguments)] // the fields of an instruction
    pub(super) fn load(
        &mut self,
        env: &mut Env<'_>,
        group: &Group,
        active: u32,
        access: Access,
        d: [Reg; 4],
        base: Src,
        offset: i64,
    ) -> Result<(), Problem> {
        let addresses = *self.row(env, group, base);
        let (size, count) = (u64::from(access.size), u64::from(access.count));
        for lane in lanes(active) {
            let address = addresses[lane].wrapping_add_signed(offset);
            let (space, address) = self.locate(lane, access.space, address)?;
            if space == Space::Global {
                Self::check(env.view, lane, access, address, false)?;
            }
            if space == Space::Shared && access.extend == Extend::Zero && env.shadow.is_none() {
                // The most frequent accesses of kernels that keep their state in shared memory.
                let bytes = self.private(env.shared, lane, space, address, size * count)?;
                let mut loaded = [0; 4];
                for (value, bytes) in loaded.iter_mut().zip(bytes.chunks_exact(size as usize)) {
                    *value = little(bytes);
                }
                for (d, value) in d.iter().zip(loaded).take(count as usize) {
                    if *d != NO_REG {
                        self.registers[group.rows + *d as usize][lane] = value;
                    }
                }
                continue;
            }
            if count > 1 && !matches!(space, Space::Global | Space::Param) {
                self.private(env.shared, lane, space, address, size * count)?;
            }
            for at in 0..count {
                let address = address + at * size;
                let value = match space {
                    // SAFETY: `check` found `size * count` readable bytes, and the address is a
                    // multiple of this product.
                    Space::Global => unsafe { memory::load(address, access.size, access.order) },
                    Space::Param => {
                        let end = address.saturating_add(size) as usize;
                        let bytes = env.params.get(address as usize..end);
                        little(bytes.ok_or_else(|| {
                            Problem::new(
                                FaultKind::IllegalAddress,
                                lane,
                                format!("reads {size} bytes at parameter address {address:#x}"),
                            )
                        })?)
                    }
                    space => little(self.private(env.shared, lane, space, address, size)?),
                };
                let value = self.read(env, group.pc, lane, &access, space, address, value)?;
                if access.order.is_strong() && space == Space::Global {
                    self.polls[lane] = Some(Poll {
                        address,
                        value,
                        size: access.size,
                    });
                }
                let value = match access.extend {
                    Extend::Zero => value,
                    Extend::Sign(width) => {
                        let shift = 64 - 8 * u32::from(access.size);
                        let value = ((value << shift) as i64 >> shift) as u64;
                        value & (u64::MAX >> (64 - u32::from(width)))
                    }
                };
                let d = d[at as usize];
                if d != NO_REG {
                    self.registers[group.rows + d as usize][lane] = value;
                }
            }
        }
        Ok(())
    }

    #[allow(clippy::too_many_arguments)] // the fields of an instruction
    pub(super) fn store(
        &mut self,
        env: &mut Env<'_>,
        group: &Group,
        active: u32,
        access: Access,
        s: [Src; 4],
        base: Src,
        offset: i64,
    ) -> Result<(), Problem> {
        let addresses = *self.row(env, group, base);
        let (size, count) = (u64::from(access.size), u64::from(access.count));
        for lane in lanes(active) {
            let address = addresses[lane].wrapping_add_signed(offset);
            let (space, address) = self.locate(lane, access.space, address)?;
            if space == Space::Global {
                Self::check(env.view, lane, access, address, true)?;
            }
            if count > 1 && !matches!(space, Space::Global | Space::Param) {
                self.private(env.shared, lane, space, address, size * count)?;
            }
            for at in 0..count {
                let value = self.row(env, group, s[at as usize])[lane];
                let address = address + at * size;
                self.write_checked(env, group.pc, lane, &access, space, address, value)?;
                match space {
                    Space::Global => {
                        // SAFETY: `check` found `size * count` writable bytes, and the address is
                        // a multiple of this product.
                        let changed =
                            unsafe { memory::store(address, access.size, access.order, value) };
                        *env.progress += u64::from(changed);
                    }
                    Space::Param => {
                        return Err(Problem::new(
                            FaultKind::IllegalAddress,
                            lane,
                            "writes a parameter of the kernel",
                        ));
                    }
                    space => {
                        let bytes = self.private(env.shared, lane, space, address, size)?;
                        let value = &value.to_le_bytes()[..size as usize];
                        // No other thread sees local memory, which holds the arguments of
                        // functions.
                        let is_shared = space == Space::Shared;
                        *env.progress += u64::from(is_shared && bytes != value);
                        bytes.copy_from_slice(value);
                    }
                }
            }
        }
        Ok(())
    }

    /// Replaces an element of memory by a function of its value. Returns the old value.
    #[allow(clippy::too_many_arguments)] // the fields of an instruction
    pub(super) fn update(
        &mut self,
        env: &mut Env<'_>,
        pc: u32,
        lane: usize,
        access: Access,
        address: u64,
        update: Update,
        f: impl Fn(u64) -> u64,
    ) -> Result<u64, Problem> {
        let (space, address) = self.locate(lane, access.space, address)?;
        let old = match space {
            Space::Global => {
                Self::check(env.view, lane, access, address, true)?;
                // SAFETY: `check` found `size` writable bytes at a multiple of `size`.
                let old = unsafe { memory::update(address, access.size, &f) };
                self.polls[lane] = Some(Poll {
                    address,
                    value: old,
                    size: access.size,
                });
                old
            }
            Space::Shared => {
                let size = u64::from(access.size);
                let bytes = self.private(env.shared, lane, space, address, size)?;
                let old = little(bytes);
                bytes.copy_from_slice(&f(old).to_le_bytes()[..usize::from(access.size)]);
                old
            }
            _ => {
                return Err(Problem::new(
                    FaultKind::IllegalAddress,
                    lane,
                    format!("an atomic operation on {} memory", name_of(space)),
                ));
            }
        };
        if env.shadow.is_some() {
            let mut element = element(env, &access, space, address, pc);
            element.kind.atomic = true;
            element.reduction = update.reduction;
            if update.compares && f(old) == old {
                self.apply_read(env, lane, &element, old)?;
            } else {
                self.apply_write(env, lane, &element, old, f(old))?;
            }
        }
        *env.progress += u64::from(f(old) != old);
        Ok(old)
    }

    /// Applies the memory model to a load whose bytes in memory are `value`. Returns its value.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)] // the fields of an instruction
    fn read(
        &mut self,
        env: &mut Env<'_>,
        pc: u32,
        lane: usize,
        access: &Access,
        space: Space,
        address: u64,
        value: u64,
    ) -> Result<u64, Problem> {
        if env.shadow.is_none() || !matches!(space, Space::Global | Space::Shared) {
            return Ok(value);
        }
        let element = element(env, access, space, address, pc);
        self.apply_read(env, lane, &element, value)
    }

    /// Applies the memory model to a store that follows.
    #[inline(always)]
    #[allow(clippy::too_many_arguments)] // the fields of an instruction
    fn write_checked(
        &mut self,
        env: &mut Env<'_>,
        pc: u32,
        lane: usize,
        access: &Access,
        space: Space,
        address: u64,
        value: u64,
    ) -> Result<(), Problem> {
        if env.shadow.is_none() || !matches!(space, Space::Global | Space::Shared) {
            return Ok(());
        }
        let before = if space == Space::Global {
            // SAFETY: the caller has checked `size` writable, and thus readable, bytes at a
            // multiple of `size`.
            unsafe { memory::load(address, access.size, Order::Weak) }
        } else {
            little(self.private(env.shared, lane, space, address, access.size.into())?)
        };
        let element = element(env, access, space, address, pc);
        self.apply_write(env, lane, &element, before, value)
    }

    fn apply_read(
        &mut self,
        env: &mut Env<'_>,
        lane: usize,
        element: &Element,
        value: u64,
    ) -> Result<u64, Problem> {
        let read = match model(env, element) {
            Some((world, cells)) => world.read(cells, &mut self.agents[lane], element, value),
            None => return Ok(value),
        };
        read.map_err(|violation| Problem::violation(lane, element, "reads", violation))
    }

    fn apply_write(
        &mut self,
        env: &mut Env<'_>,
        lane: usize,
        element: &Element,
        before: u64,
        value: u64,
    ) -> Result<(), Problem> {
        let written = match model(env, element) {
            Some((world, cells)) => {
                world.write(cells, &mut self.agents[lane], element, before, value)
            }
            None => return Ok(()),
        };
        written.map_err(|violation| Problem::violation(lane, element, "writes", violation))
    }

    /// Reduces an element of all replicas of a multicast object.
    pub(super) fn multimem_load(
        &mut self,
        env: &mut Env<'_>,
        pc: u32,
        lane: usize,
        access: Access,
        kind: MultimemType,
        address: u64,
    ) -> Result<u64, Problem> {
        let mut values = Vec::new();
        for replica in multicast(env, lane, access, address)? {
            // SAFETY: `Memory::replicas` returns mapped addresses of at least `size` bytes, and
            // `multicast` has checked the alignment.
            let value = unsafe { memory::load(replica.address, access.size, Order::Relaxed) };
            let element = alias(&access, replica, pc);
            values.push(self.apply_read(env, lane, &element, value)?);
        }
        Ok(atomic::reduce(kind, access.size, values.into_iter()))
    }

    /// Writes an element of all replicas of a multicast object, or applies a reduction to it.
    #[allow(clippy::too_many_arguments)] // the fields of an instruction
    pub(super) fn multimem_store(
        &mut self,
        env: &mut Env<'_>,
        pc: u32,
        lane: usize,
        access: Access,
        kind: Option<MultimemType>,
        address: u64,
        value: u64,
    ) -> Result<(), Problem> {
        for replica in multicast(env, lane, access, address)? {
            let mut element = alias(&access, replica, pc);
            let (before, value) = match kind {
                Some(kind) => {
                    let f = |old| atomic::apply(kind.reduction, access.size, old, value, 0);
                    // SAFETY: as for a load.
                    let before = unsafe { memory::update(replica.address, access.size, f) };
                    element.kind.atomic = true;
                    element.reduction = true;
                    (before, f(before))
                }
                None => {
                    let (address, size) = (replica.address, access.size);
                    // SAFETY: as for a load.
                    let before = unsafe { memory::load(address, size, Order::Relaxed) };
                    // SAFETY: as for a load.
                    unsafe { memory::store(address, size, access.order, value) };
                    (before, value)
                }
            };
            self.apply_write(env, lane, &element, before, value)?;
        }
        Ok(())
    }
}

/// Returns the memory model's state for an access, if the machine has a model.
fn model<'e>(env: &'e mut Env<'_>, element: &Element) -> Option<(&'e mut World, &'e mut Cells)> {
    let shadow = env.shadow.as_deref_mut()?;
    let cells = if element.shared {
        &mut env.shared.cells
    } else {
        &mut shadow.global
    };
    Some((&mut shadow.world, cells))
}

/// Returns an element of an access to global or shared memory, for the memory model.
fn element(env: &Env<'_>, access: &Access, space: Space, address: u64, pc: u32) -> Element {
    let shared = space == Space::Shared;
    let place = if shared {
        Place {
            memory: 0,
            offset: address,
        }
    } else {
        env.view.place(address)
    };
    Element::new(access, place, address, pc, shared)
}

/// Returns an element of a replica, for the memory model.
fn alias(access: &Access, replica: Replica, pc: u32) -> Element {
    let place = Place {
        memory: replica.memory,
        offset: replica.offset,
    };
    let mut element = Element::new(access, place, replica.address, pc, false);
    element.kind.alias = true;
    element
}

/// Describes an invalid access to shared or local memory.
#[cold]
pub(super) fn private_problem(
    lane: usize,
    name: &str,
    address: u64,
    size: u64,
    length: u64,
) -> Problem {
    if !address.is_multiple_of(size) {
        let detail = format!(
            "accesses {size} bytes at the {name} address {address:#x}, which is not a multiple of \
             {size}"
        );
        return Problem::new(FaultKind::MisalignedAddress, lane, detail);
    }
    let detail = format!(
        "accesses {size} bytes at {name} address {address:#x}; the {name} memory has {length:#x} \
         bytes"
    );
    Problem::new(FaultKind::IllegalAddress, lane, detail)
}

/// Returns the replicas of an element of a multicast object.
fn multicast(
    env: &mut Env<'_>,
    lane: usize,
    access: Access,
    address: u64,
) -> Result<Vec<Replica>, Problem> {
    env.view
        .replicas(address, u64::from(access.size))
        .map_err(|detail| Problem::new(FaultKind::IllegalAddress, lane, detail))
}

/// Checks the alignment of an access to a multicast object.
pub(super) fn check_multicast(lane: usize, access: Access, address: u64) -> Result<(), Problem> {
    let bytes = u64::from(access.size) * u64::from(access.count);
    if address.is_multiple_of(bytes) {
        return Ok(());
    }
    Err(Problem::new(
        FaultKind::MisalignedAddress,
        lane,
        format!(
            "accesses {bytes} bytes at the multicast address {address:#x}, which is not a multiple \
             of {bytes}"
        ),
    ))
}

#[inline(always)]
pub(super) fn little(bytes: &[u8]) -> u64 {
    match bytes {
        [a, b, c, d] => return u64::from(u32::from_le_bytes([*a, *b, *c, *d])),
        [a, b, c, d, e, f, g, h] => return u64::from_le_bytes([*a, *b, *c, *d, *e, *f, *g, *h]),
        _ => {}
    }
    let mut all = [0; 8];
    all[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(all)
}

/// Returns the name of a state space in messages.
fn name_of(space: Space) -> &'static str {
    match space {
        Space::Generic => "generic",
        Space::Global => "global",
        Space::Shared => "shared",
        Space::Local | Space::Frame => "local",
        Space::Param => "parameter",
    }
}
