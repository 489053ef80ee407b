//! Loads, stores and atomic operations.

use super::{Env, Group, Poll, Problem, Warp, lanes};
use crate::block::Shared;
use crate::error::FaultKind;
use crate::memory::{self, View};
use crate::program::{Access, Extend, LOCAL_BASE, NO_REG, Reg, Space, Src, resolve};

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
            if space == Space::Shared && access.extend == Extend::Zero {
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
                        *env.progress += u64::from(bytes != value);
                        bytes.copy_from_slice(value);
                    }
                }
            }
        }
        Ok(())
    }

    /// Replaces an element of memory by a function of its value. Returns the old value.
    pub(super) fn update(
        &mut self,
        env: &mut Env<'_>,
        lane: usize,
        access: Access,
        address: u64,
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
        *env.progress += u64::from(f(old) != old);
        Ok(old)
    }
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
pub(super) fn multicast(
    env: &mut Env<'_>,
    lane: usize,
    access: Access,
    address: u64,
    first: bool,
) -> Result<Vec<u64>, Problem> {
    let bytes = u64::from(access.size) * u64::from(access.count);
    if first && !address.is_multiple_of(bytes) {
        return Err(Problem::new(
            FaultKind::MisalignedAddress,
            lane,
            format!(
                "accesses {bytes} bytes at the multicast address {address:#x}, which is not a \
                 multiple of {bytes}"
            ),
        ));
    }
    env.view
        .replicas(address, u64::from(access.size))
        .map_err(|detail| Problem::new(FaultKind::IllegalAddress, lane, detail))
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
