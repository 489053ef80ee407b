//! Multi-rank grids: the second form of a kernel's entry, which runs the blocks of all ranks. For
//! tests.
//!
//! Ranks wait for each other, so the blocks of all ranks must be resident at the same time. If
//! several ranks share one GPU (a test with one GPU and any number of ranks), separate launches do
//! not guarantee that. One launch with the blocks of all ranks does, and it lets sanitizers see the
//! accesses of all ranks in one grid.
//!
//! An image that is built for that (`fusewire-build build --multi-rank-grid`) exports for every
//! kernel instance `NAME`, instead of `NAME`, the entry `NAME__grid(parameters, blocks_per_rank)`:
//!
//! | argument | offset | type | what it is |
//! |---|---|---|---|
//! | `parameters` | 0 | `*const NameParams` | table in device memory: a parameter struct per rank |
//! | `blocks_per_rank` | 8 | `u32` | blocks of each rank; 0 counts as 1 |
//!
//! It is launched on `ranks * blocks_per_rank` blocks. Block `b` runs the kernel's body as block
//! `b % blocks_per_rank` of `blocks_per_rank`, with the parameters of rank `b / blocks_per_rank`.
//! The body is that of the ordinary entry, with another [`Machine`](crate::Machine).
//!
//! The host writes the table before the launch, and nothing writes it while the grid runs, so
//! blocks read it with plain loads.

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
use crate::{
    group::cpu::LaneContext,
    native::{Isa, KernelInfo, ParamField},
};

/// Suffix of a grid form's name after the kernel's.
pub const SUFFIX: &str = "__grid";

/// Returns the name of the kernel whose grid form `symbol` is, or `None` if it is not one.
pub fn kernel_name(symbol: &str) -> Option<&str> {
    symbol.strip_suffix(SUFFIX)
}

/// Returns true if a struct of `bytes` bytes whose fields have these offsets and sizes, in bytes,
/// is laid out as scalars of natural alignment: then the host's table and the GPU's are the same.
/// `#[kernel]` demands it of every parameter struct.
pub const fn is_natural(fields: &[(usize, usize)], bytes: usize) -> bool {
    let (mut end, mut align, mut index) = (0usize, 1, 0);
    while index < fields.len() {
        let (offset, size) = fields[index];
        if size == 0 || offset != end.next_multiple_of(size) {
            return false;
        }
        end = offset + size;
        if size > align {
            align = size;
        }
        index += 1;
    }
    bytes == end.next_multiple_of(align)
}

/// The arguments of a grid form, as a launch passes them.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GridParams {
    /// Parameter structs, one a rank.
    pub parameters: *const u8,
    /// Blocks of each rank.
    pub blocks_per_rank: u32,
}

// SAFETY: an address and a number. Code that reads through the address is unsafe.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
unsafe impl Send for GridParams {}
// SAFETY: as above.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
unsafe impl Sync for GridParams {}

#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
impl GridParams {
    /// Names, offsets and sizes of the arguments, for the check against a GPU image.
    pub const FIELDS: &'static [ParamField] = &[
        ParamField {
            name: "parameters",
            offset: core::mem::offset_of!(Self, parameters),
            size: size_of::<*const u8>(),
        },
        ParamField {
            name: "blocks_per_rank",
            offset: core::mem::offset_of!(Self, blocks_per_rank),
            size: size_of::<u32>(),
        },
    ];
}

/// Runs one lane of the grid form of `kernel`, natively: the counterpart of `NAME__grid`. `context`
/// describes the lane in the whole grid: `block` counts over all ranks.
///
/// # Safety
/// As [`NativeEntry`](crate::native::NativeEntry) for `context`, whose `block` is less than the
/// number of parameter structs times `params.blocks_per_rank`; `params.parameters` points at
/// parameter structs of `kernel`, unchanged while the grid runs.
#[cfg(not(any(target_arch = "nvptx64", target_arch = "amdgpu")))]
pub unsafe fn run_lane(kernel: &KernelInfo, isa: Isa, params: &GridParams, context: &LaneContext) {
    let blocks = params.blocks_per_rank.max(1);
    let rank = context.block / blocks;
    let own = LaneContext {
        block: context.block % blocks,
        blocks,
        ..*context
    };
    // SAFETY: the table has this rank's struct.
    let params = unsafe { params.parameters.add(rank as usize * kernel.param_bytes()) };
    // SAFETY: `own` describes a lane of a block with the shared state of the caller's context; the
    // parameters are the kernel's.
    unsafe { kernel.native.entry(isa, context.lanes)(&raw const own, params) }
}

/// Returns the index of this block among those of its rank, and its rank's parameters. Called by
/// the entries of `#[kernel]`.
///
/// # Safety
/// `parameters` must have a struct for every rank of the grid: `arch::blocks() / blocks_per_rank`.
#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
#[inline(always)]
pub unsafe fn enter<P>(
    parameters: *const P,
    blocks_per_rank: u32,
) -> (crate::Block<crate::group::PartOfGrid>, *const P) {
    let blocks = blocks_per_rank.max(1);
    let index = crate::arch::block();
    let rank = index / blocks;
    let block = crate::Block::new(crate::group::PartOfGrid::new(index - rank * blocks, blocks));
    // SAFETY: `parameters` has a struct for every rank, by the precondition.
    (block, unsafe { parameters.add(rank as usize) })
}

// Defined in the shim with this signature.
#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
unsafe extern "unadjusted" {
    fn fusewire_read_pointer(at: *const u8) -> *mut u8;
}

/// Reads a pointer argument of a grid form as a pointer into global memory. The compiler already
/// knows this of an ordinary entry's arguments; with it, both forms compile to the same
/// instructions.
///
/// # Safety
/// `at` must be valid for a read and in global memory; what it holds is null or points into global
/// memory.
#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
#[inline(always)]
pub unsafe fn pointer<T>(at: *const *const T) -> *const T {
    // SAFETY: the precondition of this function.
    unsafe { fusewire_read_pointer(at.cast()) }
        .cast_const()
        .cast()
}

/// Does what [`pointer`] does, for a mutable pointer.
///
/// # Safety
/// As for [`pointer`].
#[cfg(any(target_arch = "nvptx64", target_arch = "amdgpu"))]
#[inline(always)]
pub unsafe fn pointer_mut<T>(at: *const *mut T) -> *mut T {
    // SAFETY: the precondition of this function.
    unsafe { fusewire_read_pointer(at.cast()) }.cast()
}

/// Picks a kernel's GPU entries: the grid form where the image is built for it, else the ordinary
/// one. A macro of this crate, so that the configuration is read here: kernel crates need not know
/// of it.
#[cfg(all(
    any(target_arch = "nvptx64", target_arch = "amdgpu"),
    not(fusewire_multi_rank_grid)
))]
#[doc(hidden)]
#[macro_export]
macro_rules! gpu_entries {
    ({ $($ordinary:tt)* } { $($grid:tt)* }) => { $($ordinary)* };
}

/// Picks a kernel's grid form, because the image is built for it.
#[cfg(all(
    any(target_arch = "nvptx64", target_arch = "amdgpu"),
    fusewire_multi_rank_grid
))]
#[doc(hidden)]
#[macro_export]
macro_rules! gpu_entries {
    ({ $($ordinary:tt)* } { $($grid:tt)* }) => { $($grid)* };
}

#[cfg(test)]
mod tests {
    use super::{is_natural, kernel_name};

    #[test]
    fn natural_layout() {
        assert!(is_natural(&[], 0));
        assert!(is_natural(&[(0, 8), (8, 4), (16, 8)], 24));
        assert!(is_natural(&[(0, 4), (4, 1), (6, 2)], 8));
        assert!(!is_natural(&[(0, 8), (8, 4)], 12), "the padding behind");
        assert!(!is_natural(&[(0, 4), (4, 8)], 12), "packed");
        assert!(!is_natural(&[(8, 8), (0, 8)], 16), "reordered");
    }

    #[test]
    fn names() {
        assert_eq!(kernel_name("send__grid"), Some("send"));
        assert_eq!(kernel_name("send"), None);
    }
}
