//! Grid forms: the entries `NAME__grid` of images for multi-rank grids.

use core::slice;

use fusewire_device::group::cpu::LaneContext;
use fusewire_device::multi_rank_grid::{GridParams, run_lane};
use fusewire_device::native::KernelInfo;

use super::memory::{self, Location};

/// Parameters of [`run`]: the arguments of the launch, and the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct GridArguments {
    params: GridParams,
    kernel: &'static KernelInfo,
}

impl GridArguments {
    /// Reads the arguments from the parameter bytes of a launch, which have the layout of
    /// [`GridParams`].
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

    /// Returns the number of ranks of a grid of `blocks` blocks, or `None` if `blocks` is not a
    /// multiple of the blocks per rank.
    pub(crate) fn ranks(&self, blocks: u32) -> Option<u32> {
        let each = self.params.blocks_per_rank.max(1);
        blocks.is_multiple_of(each).then_some(blocks / each)
    }

    /// Returns the bytes of this value. [`run`] takes them as its parameters.
    pub(crate) fn bytes(&self) -> [u8; size_of::<Self>()] {
        let mut bytes = [0; size_of::<Self>()];
        // SAFETY: source and target have the size of `Self`. The copy is untyped, so padding may be
        // uninitialised. `run` reads only the fields.
        unsafe {
            core::ptr::copy_nonoverlapping(
                (&raw const *self).cast::<u8>(),
                bytes.as_mut_ptr(),
                bytes.len(),
            );
        }
        bytes
    }

    /// Returns all 8-byte parameters of all `ranks` ranks; each may be an address. Call this method
    /// only while device work is running, because the parameter table is in device memory.
    ///
    /// # Errors
    /// Fails if the parameter table is not in accessible device memory.
    pub(crate) fn words(&self, ranks: u32, device: u32) -> Result<Vec<u64>, String> {
        let (at, each) = (self.params.parameters, self.kernel.param_bytes());
        let bytes = each * ranks as usize;
        if memory::check(at as u64, bytes as u64, device, false) != Ok(Location::Device) {
            return Err(format!(
                "the parameter table of {ranks} ranks, {bytes} bytes at {at:?}, is not in device \
                 memory"
            ));
        }
        // SAFETY: `check` found `bytes` readable bytes at `at`. A launch of a grid form requires
        // that the table stays unchanged until the grid has completed.
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

/// Native entry of all grid forms. The block numbers in `context` cover the blocks of all ranks.
///
/// # Safety
/// The requirements of a native entry and of [`run_lane`]. `params` must point to a
/// [`GridArguments`].
pub(crate) unsafe fn run(context: *const LaneContext, params: *const u8) {
    // SAFETY: the caller guarantees that `params` points to a `GridArguments`.
    let bound = unsafe { &*params.cast::<GridArguments>() };
    // SAFETY: a native entry requires `context` to point to a live context.
    let context = unsafe { &*context };
    // SAFETY: the caller meets the requirements of `run_lane`. The launch has checked with
    // `GridArguments::ranks` that the table has as many ranks as the grid.
    unsafe { run_lane(bound.kernel, fusewire::isa(), &bound.params, context) }
}
