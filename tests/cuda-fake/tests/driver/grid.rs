//! Tests grid forms: entries `NAME__grid`, which run the blocks of all ranks.

use core::ptr::null_mut;
use std::ffi::CString;

use cudarc::driver::sys::{self, CUresult};

use crate::support::*;

fn function() -> sys::CUfunction {
    let image = fusewire_cuda_fake_library::stand_in_multi_rank_grid(
        fusewire_cuda_fake_library::kernels_of("fusewire_kernels"),
        90,
    );
    let image = CString::new(image).unwrap();
    let (mut module, mut function) = (null_mut(), null_mut());
    ok!(cuModuleLoadData(&raw mut module, image.as_ptr().cast()));
    // The image declares only the grid form of the kernel.
    let ordinary = c"quantize".as_ptr();
    fails!(
        CUDA_ERROR_NOT_FOUND,
        cuModuleGetFunction(&raw mut function, module, ordinary)
    );
    let name = c"quantize__grid".as_ptr();
    ok!(cuModuleGetFunction(&raw mut function, module, name));
    function
}

/// Launches a grid of `blocks` blocks with `each` blocks per rank. Returns the result code.
fn launch(
    function: sys::CUfunction,
    stream: sys::CUstream,
    mut table: u64,
    blocks: u32,
    mut each: u32,
) -> CUresult {
    let mut arguments = [(&raw mut table).cast(), (&raw mut each).cast()];
    let arguments = arguments.as_mut_ptr();
    code!(cuLaunchCooperativeKernel(
        function, blocks, 1, 1, 64, 1, 1, 0, stream, arguments
    ))
}

/// Creates a parameter table for `quantize`. Each rank rounds two floats from its source to its
/// target.
fn table(ranks: &[(u64, u64)]) -> u64 {
    let words: Vec<u64> = ranks
        .iter()
        .flat_map(|(source, target)| [*source, *target, 2, 0])
        .collect();
    let table = block(8 * words.len());
    write(table, &words);
    table
}

driver_test! {
    /// The blocks of each rank use the rank's parameters.
    ranks() {
        start();
        let (function, stream) = (function(), stream());
        let two = |low: f32, high: f32| u64::from(low.to_bits()) | u64::from(high.to_bits()) << 32;
        for each in [1, 3] {
            let ranks: Vec<(u64, u64)> = (0..3).map(|_| (block(8), block(8))).collect();
            for (rank, (source, target)) in ranks.iter().enumerate() {
                write(*source, &[two(rank as f32 + 1.0, -2.0)]);
                write(*target, &[0]);
            }
            assert_eq!(launch(function, stream, table(&ranks), 3 * each, each), CUDA_SUCCESS);
            ok!(cuStreamSynchronize(stream));
            let rounded = [0xc000_3f80u64, 0xc000_4000, 0xc000_4040];
            for ((_, target), expected) in ranks.iter().zip(rounded) {
                assert_eq!(read(*target, 1), [expected]);
            }
        }
        // The number of blocks must be a multiple of the blocks per rank.
        let one = table(&[(block(8), block(8))]);
        assert_eq!(launch(function, stream, one, 3, 2), CUDA_ERROR_INVALID_VALUE);
    }
}

driver_test! {
    /// The fake checks the addresses in the parameters of all ranks.
    faults() {
        start();
        let (function, stream) = (function(), stream());
        let mut reserved = 0;
        ok!(cuMemAddressReserve(&raw mut reserved, 2 << 20, 0, 0, 0));
        let ranks = [(block(8), block(8)), (block(8), reserved)];
        assert_eq!(launch(function, stream, table(&ranks), 2, 1), CUDA_SUCCESS);
        fails!(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
    }
}

driver_test! {
    /// A table with fewer ranks than the grid is an error.
    short_tables() {
        start();
        let (function, stream) = (function(), stream());
        let ranks = [(block(8), block(8)); 2];
        assert_eq!(launch(function, stream, table(&ranks), 4, 1), CUDA_SUCCESS);
        fails!(CUDA_ERROR_ILLEGAL_ADDRESS, cuStreamSynchronize(stream));
    }
}
