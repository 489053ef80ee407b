//! Counts in device memory that change during a launch, as a put of a peer can change them.

use fusewire::{DType, Tensor};
use fusewire_device::comm::WindowAddr;
use fusewire_device::native::Buffer;
use fusewire_kernels::Exchange;
use fusewire_kernels::vector::{AllGatherV, AllToAllV};

use super::{LANES, all, tensor, zeros};

/// Elements that each rank sends to each rank.
const COUNT: usize = 3 * CHUNK;
/// Elements that are staged at once.
const CHUNK: usize = 64;

/// Returns `count` elements of `tensor` from `first` on as an argument whose elements are `T`.
fn part<T>(tensor: &Tensor, first: usize, count: usize) -> Buffer<'_, T> {
    let dtype = if size_of::<T>() == 1 {
        DType::U8
    } else {
        DType::U64
    };
    let at = tensor.as_ptr().wrapping_add(8 * first);
    let len = (count * 8 / size_of::<T>()) as u64;
    // SAFETY: the tensor has these elements, and owns them.
    unsafe { Buffer::new(at, len, dtype, tensor) }
}

fn exchange() -> Exchange {
    Exchange {
        source_at: WindowAddr::NONE,
        target_at: WindowAddr::NONE,
        scalar: 0,
        factor: 0,
        chunk: CHUNK as u64,
        size: 8,
        policy: 0,
    }
}

/// Each kernel writes its output over its counts in the first of three rounds. The new counts name
/// memory outside of the output.
#[test]
fn counts_that_change_during_a_launch_have_no_effect() {
    for lanes in LANES {
        all((2, 1, lanes), |comm| {
            let me = u64::from(comm.rank());
            // The count of rank 0 grows by a chunk, which moves the part of rank 1 out of the
            // output.
            let input = |rank: u64| -> Vec<u64> {
                let mut input: Vec<u64> = (0..COUNT as u64).map(|i| 1000 * rank + i).collect();
                input[..2].copy_from_slice(&[(COUNT + CHUNK) as u64, COUNT as u64]);
                input
            };
            let expected = [input(0), input(1), vec![0; 2 * CHUNK]].concat();

            let memory = zeros(DType::U64, expected.len())?;
            memory.slice(0, 2)?.copy_from(&[COUNT as u64; 2])?;
            let source = tensor(&input(me))?;
            let kernel = AllGatherV {
                source: part(&source, 0, COUNT),
                target: part(&memory, 0, 2 * COUNT),
                counts: part(&memory, 0, 2),
                exchange: exchange(),
            };
            // SAFETY: a chunk fits staging; nothing else accesses the buffers.
            unsafe { comm.kernel(kernel).launch_unchecked()? };
            assert!(
                memory.to_vec::<u64>()? == expected,
                "all_gather_v, {lanes} lanes"
            );

            memory.copy_from(&vec![0u64; expected.len()])?;
            memory.slice(0, 2)?.copy_from(&[COUNT as u64; 2])?;
            let source = tensor(&[input(me), input(me)].concat())?;
            let sent = tensor(&[COUNT as u64; 2])?;
            let kernel = AllToAllV {
                source: part(&source, 0, 2 * COUNT),
                target: part(&memory, 0, 2 * COUNT),
                send_counts: part(&sent, 0, 2),
                receive_counts: part(&memory, 0, 2),
                exchange: exchange(),
            };
            // SAFETY: a chunk for each rank fits staging; nothing else accesses the buffers.
            unsafe { comm.kernel(kernel).launch_unchecked()? };
            assert!(
                memory.to_vec::<u64>()? == expected,
                "all_to_all_v, {lanes} lanes"
            );
            Ok(())
        });
    }
}
