//! Grid forms: the entries `NAME__grid` of images that were built for all ranks in a multi-rank grid.

use core::slice;

use fusewire_device::multi_rank_grid::{GridParams, run_lane};
use fusewire_device::native::{KernelInfo, LaneContext};

use super::memory::{self, Location};

/// What the native entry of every grid form takes: the arguments, and which kernel it is.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct GridArguments {
    params: GridParams,
    kernel: &'static KernelInfo,
}

impl GridArguments {
    /// The arguments from the bytes of a launch, which are those of [`GridParams`].
    pub(crate) fn new(kernel: &'static KernelInfo, bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| bytes.get(at..at + 8)?.try_into().ok();
        let count = |at: usize| bytes.get(at..at + 4)?.try_into().ok();
        let [parameters, blocks_per_rank] = GridParams::FIELDS else {
            return None;
        };
        let address = u64::from_le_bytes(word(parameters.offset)?);
        Some(Self {
            params: GridParams {
                parameters: address as *const u8,
                blocks_per_rank: u32::from_le_bytes(count(blocks_per_rank.offset)?),
            },
            kernel,
        })
    }

    /// How many ranks a grid of `blocks` blocks has, if they have equally many.
    pub(crate) fn ranks(&self, blocks: u32) -> Option<u32> {
        let each = self.params.blocks_per_rank.max(1);
        blocks.is_multiple_of(each).then_some(blocks / each)
    }

    /// As the parameters of [`run`].
    pub(crate) fn bytes(&self) -> [u8; size_of::<Self>()] {
        let mut bytes = [0; size_of::<Self>()];
        // SAFETY: as many bytes as the value has; padding is copied as it is, and nobody reads it.
        unsafe {
            core::ptr::copy_nonoverlapping(
                (&raw const *self).cast::<u8>(),
                bytes.as_mut_ptr(),
                bytes.len(),
            );
        }
        bytes
    }

    /// Whatever may be an address among the parameters of `ranks` ranks: read while device work runs.
    ///
    /// # Errors
    /// Why the table cannot be read.
    pub(crate) fn words(&self, ranks: u32, device: u32) -> Result<Vec<u64>, String> {
        let (at, each) = (self.params.parameters, self.kernel.param_bytes());
        let bytes = each * ranks as usize;
        if memory::check(at as u64, bytes as u64, device, false) != Ok(Location::Device) {
            return Err(format!(
                "the table of {ranks} ranks' parameters, {bytes} bytes at {at:?}, is not memory of the device"
            ));
        }
        // SAFETY: just checked; whoever launches keeps the table as long as the grid runs.
        let table = unsafe { slice::from_raw_parts(at, bytes) };
        let wide = self.kernel.params.iter().filter(|field| field.size == 8);
        let wide: Vec<usize> = wide.map(|field| field.offset).collect();
        let structs = table.chunks_exact(each.max(1));
        Ok(structs
            .flat_map(|own| wide.iter().filter_map(|at| own.get(*at..at + 8)))
            .filter_map(|word| Some(u64::from_le_bytes(word.try_into().ok()?)))
            .collect())
    }
}

/// The native entry of a grid form, whose `context` counts blocks over all ranks.
///
/// # Safety
/// That of a native entry, with a [`GridArguments`] as parameters; and of [`run_lane`].
pub(crate) unsafe fn run(context: *const LaneContext, params: *const u8) {
    // SAFETY: the parameters are those of this entry.
    let bound = unsafe { &*params.cast::<GridArguments>() };
    // SAFETY: the contract of a native entry.
    let context = unsafe { &*context };
    // SAFETY: the caller's promise; blocks are as many as the table's ranks have (`GridArguments::ranks`).
    unsafe { run_lane(bound.kernel, fusewire::isa(), &bound.params, context) }
}
