//! Limits of ranks and options, and the options that must be equal on all ranks.

use core::time::Duration;

use fusewire_device::group::cpu::{MAX_WARP, MAX_WARPS};
use fusewire_device::layout::LAYOUT_VERSION;

use crate::comm::MAX_SIZE;
use crate::comm::on_gpu::{BLOCKS, LARGE_BLOCKS};
use crate::cpu::{MAX_THREADS, is_warp};
use crate::device::Device;
use crate::digest;
use crate::options::Options;
use crate::{Error, Result};

/// Maximum number of bytes of the packet slots of a workspace.
const MAX_PACKETS: u64 = 256 << 20;

/// Maximum number of bytes of a part of the workspace, and of slots of a channel. Their products
/// fit in 64 bits.
const MAX_OPTION: u64 = 1 << 30;

/// Greatest first epoch. A signal has 48 bits of the epoch, and waits compare epochs without
/// wrapping.
const MAX_FIRST_EPOCH: u64 = 1 << 47;

/// Longest timeout of a communicator: 100 years.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

impl Options {
    /// Returns the bytes of workspace (signals, slots and staging) of each rank of a communicator
    /// of `size` ranks with these options on `device`: the value of
    /// [`Communicator::workspace_bytes`](crate::Communicator::workspace_bytes).
    ///
    /// # Errors
    /// [`Error::Communicator`] for a size or options that no communicator can have.
    pub fn workspace_bytes(&self, device: Device, size: u32) -> Result<u64> {
        let options = self.clone().resolved(device);
        validate("workspace", 0, size, &options)?;
        Ok(super::workspace::layout(size, options.team(size), &options).bytes)
    }

    /// Returns the options with the device's defaults in place of zeros.
    pub(crate) fn resolved(mut self, device: Device) -> Self {
        if !device.is_gpu() {
            self.large_blocks = self.blocks;
        } else if self.blocks == 0 && self.large_blocks == 0 {
            self.large_blocks = LARGE_BLOCKS;
        }
        if self.blocks == 0 {
            self.blocks = if device.is_gpu() { BLOCKS } else { 1 };
        }
        self.large_blocks = self.large_blocks.max(self.blocks);
        if self.staging_bytes == 0 {
            self.staging_bytes = if device.is_gpu() { 8 << 20 } else { 1 << 20 };
        }
        if self.packet_slot_bytes == 0 {
            self.packet_slot_bytes = if device.is_gpu() { 64 << 10 } else { 32 << 10 };
        }
        // Longer timeouts would overflow the time at which they end.
        self.timeout = self.timeout.min(LONGEST_TIMEOUT);
        self.bootstrap_timeout = self.bootstrap_timeout.map(|it| it.min(LONGEST_TIMEOUT));
        self
    }

    /// Returns the maximum numbers of blocks of a launch and of a large one.
    pub(crate) fn block_limits(&self) -> (u32, u32) {
        (self.blocks, self.large_blocks)
    }

    /// Returns the bytes of a packet slot in a communicator of `size` ranks: fewer than
    /// [`Options::packet_slot_bytes`] if a rank's slots would need more than [`MAX_PACKETS`]. The
    /// option keeps its value, so that a smaller communicator made from this one gets larger slots.
    pub(crate) fn packet_slot(&self, size: u32) -> u64 {
        let slots = 2 * u64::from(self.blocks.max(1)) * u64::from(size.max(1));
        let room = (MAX_PACKETS / slots / 64 * 64).max(128);
        self.packet_slot_bytes.min(room)
    }
}

pub(in crate::comm) fn validate(name: &str, rank: u32, size: u32, options: &Options) -> Result<()> {
    let refuse = |detail: String| {
        Err(Error::Communicator {
            name: name.to_owned(),
            detail,
        })
    };
    if size == 0 || size > MAX_SIZE {
        return refuse(format!("{size} ranks; 1 to {MAX_SIZE} are possible"));
    }
    if rank >= size {
        return refuse(format!("rank {rank} of {size}"));
    }
    if options.timeout.is_zero() {
        return refuse("the timeout is 0; every wait ends, so it must be longer".to_owned());
    }
    let team = options.team(size);
    if team == 0 || !size.is_multiple_of(team) {
        return refuse(format!("{size} ranks in teams of {team}"));
    }
    let of_host = options.testing.ranks_per_host.unwrap_or(size);
    if of_host == 0 || of_host < size && !size.is_multiple_of(of_host) {
        return refuse(format!("{size} ranks on hosts of {of_host}"));
    }
    let most = options.large_blocks;
    if options.blocks == 0 || most > 64 {
        return refuse(format!("{most} blocks; 1 to 64 are possible"));
    }
    if let Some(reason) = options.determinism.refuses(options.algorithm) {
        return refuse(reason.to_owned());
    }
    if !matches!(options.testing.lanes, 1 | 32 | 64 | 128) {
        return refuse(format!(
            "{} lanes; 1, 32, 64 or 128 are possible",
            options.testing.lanes
        ));
    }
    let threads = options.blocks * options.testing.lanes;
    if options.testing.lanes > 1 && threads > MAX_THREADS {
        return refuse(format!(
            "{} blocks of {} lanes; each lane is a thread, and a launch has at most {MAX_THREADS}",
            options.blocks, options.testing.lanes
        ));
    }
    if options.testing.warp != 0 && !is_warp(options.testing.warp, options.testing.lanes) {
        return refuse(format!(
            "warps of {} lanes in blocks of {}; a block consists of 1 to {MAX_WARPS} warps, whose \
             lanes are a power of two, up to {MAX_WARP}",
            options.testing.warp, options.testing.lanes
        ));
    }
    if options.testing.first_epoch > MAX_FIRST_EPOCH {
        return refuse(format!(
            "first epoch {}; {MAX_FIRST_EPOCH} at most, because a signal has 48 bits of it",
            options.testing.first_epoch
        ));
    }
    if options.threads > 512 || !options.threads.is_multiple_of(64) {
        return refuse(format!(
            "{} threads a block; multiples of 64 up to 512 are possible, or 0 for the default",
            options.threads
        ));
    }
    if options.packet_slot_bytes < 128 || !options.packet_slot_bytes.is_multiple_of(64) {
        return refuse("a packet slot is a multiple of 64 bytes, 128 at least".to_owned());
    }
    for (what, bytes) in [
        ("a packet slot", options.packet_slot_bytes),
        ("staging", options.staging_bytes),
        ("a channel's slot", options.channel_slot_bytes),
        ("the depth of a channel", options.channel_depth),
    ] {
        if bytes > MAX_OPTION {
            return refuse(format!("{what} of {bytes}; {MAX_OPTION} at most"));
        }
    }
    let least = u64::from(size) * 64 * 8;
    if options.staging_bytes < least {
        return refuse(format!(
            "staging of {} bytes; {least} at least",
            options.staging_bytes
        ));
    }
    if options.channel_depth == 0
        || options.channel_slot_bytes == 0
        || !options.channel_slot_bytes.is_multiple_of(64)
    {
        return refuse("a channel has at least one slot, of a multiple of 64 bytes".to_owned());
    }
    Ok(())
}

/// Returns a hash of all values that must be equal on all ranks.
pub(in crate::comm) fn agreed_hash(size: u32, options: &Options) -> u64 {
    let testing = &options.testing;
    digest::of_words(&[
        u64::from(LAYOUT_VERSION),
        u64::from(size),
        options.algorithm as u64,
        options.determinism as u64,
        testing.grid_mode as u64,
        options.max_object_bytes,
        u64::from(options.blocks),
        u64::from(options.large_blocks),
        u64::from(options.threads),
        u64::from(testing.lanes),
        u64::from(testing.warp),
        u64::from(options.team(size)),
        u64::from(testing.ranks_per_host.unwrap_or(0)),
        options.inter_host as u64,
        testing.first_epoch,
        options.staging_bytes,
        options.packet_slot_bytes,
        options.channel_slot_bytes,
        options.channel_depth,
    ])
}
