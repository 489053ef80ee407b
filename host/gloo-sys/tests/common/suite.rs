//! Runs every operation once, on one rank of a connected group, and compares the results with plain
//! loops.

use fusewire_gloo_sys::{Call, Context, Transfer};

use crate::common::{POISON, pattern};

/// Runs the operations without a reduction, with parts of `bytes` bytes.
pub(crate) fn movers(context: &Context, bytes: usize) {
    broadcast(context, bytes);
    gather_and_scatter(context, bytes);
    allgather(context, bytes);
    alltoall(context, bytes);
    context.barrier(Call::new()).expect("barrier");
}

fn broadcast(context: &Context, bytes: usize) {
    for root in 0..context.size() {
        let expected = pattern(root, 0, bytes);
        let mut buffer = if context.rank() == root {
            expected.clone()
        } else {
            vec![POISON; bytes]
        };
        // SAFETY: the buffer has `bytes` bytes and outlives the call.
        unsafe { context.broadcast(buffer.as_mut_ptr(), bytes, root, Call::new()) }
            .expect("broadcast");
        assert_eq!(buffer, expected, "broadcast from {root}");
    }
}

fn gather_and_scatter(context: &Context, bytes: usize) {
    let (rank, size) = (context.rank(), context.size());
    for root in 0..size {
        let call = Call::new().tag(root as u32);
        let input = pattern(rank, root, bytes);
        let all: Vec<u8> = (0..size)
            .flat_map(|from| pattern(from, root, bytes))
            .collect();
        let mut output = vec![POISON; if rank == root { size * bytes } else { 0 }];
        // SAFETY: the input has `bytes` bytes, and the root's output has `size` times as many.
        unsafe { context.gather(input.as_ptr(), output.as_mut_ptr(), bytes, root, call) }
            .expect("gather");
        assert!(rank != root || output == all, "gather to {root}");
        let mut part = vec![POISON; bytes];
        // SAFETY: the root's input has `size` parts of `bytes` bytes, and the output has one part.
        unsafe { context.scatter(output.as_ptr(), part.as_mut_ptr(), bytes, root, call) }
            .expect("scatter");
        assert_eq!(part, input, "scatter from {root}");
    }
}

fn allgather(context: &Context, bytes: usize) {
    let (rank, size) = (context.rank(), context.size());
    let expected: Vec<u8> = (0..size).flat_map(|from| pattern(from, 3, bytes)).collect();
    let input = pattern(rank, 3, bytes);
    let mut output = vec![POISON; size * bytes];
    // SAFETY: the input has `bytes` bytes, and the output has `size` times as many.
    unsafe { context.allgather(input.as_ptr(), output.as_mut_ptr(), bytes, Call::new()) }
        .expect("allgather");
    assert_eq!(output, expected, "allgather");
    // The same operation in place.
    output.fill(POISON);
    output[rank * bytes..][..bytes].copy_from_slice(&input);
    let base = output.as_mut_ptr();
    // SAFETY: the output has `size` parts, and the input is this rank's part.
    unsafe { context.allgather(base.add(rank * bytes), base, bytes, Call::new()) }
        .expect("allgather in place");
    assert_eq!(output, expected, "allgather in place");
}

fn alltoall(context: &Context, bytes: usize) {
    let (rank, size) = (context.rank(), context.size());
    let input: Vec<u8> = (0..size).flat_map(|to| pattern(rank, to, bytes)).collect();
    let expected: Vec<u8> = (0..size)
        .flat_map(|from| pattern(from, rank, bytes))
        .collect();
    let mut output = vec![POISON; size * bytes];
    // SAFETY: both buffers have `size` parts of `bytes` bytes.
    unsafe { context.alltoall(input.as_ptr(), output.as_mut_ptr(), bytes, Call::new()) }
        .expect("alltoall");
    assert_eq!(output, expected, "alltoall");
}

/// Runs the operations with one count per rank, which `count(from, to)` returns.
pub(crate) fn unequal(context: &Context, count: impl Fn(usize, usize) -> usize) {
    let (rank, size) = (context.rank(), context.size());
    let sent: Vec<_> = (0..size).map(|to| count(rank, to)).collect();
    let received: Vec<_> = (0..size).map(|from| count(from, rank)).collect();
    let input: Vec<u8> = (0..size)
        .flat_map(|to| pattern(rank, to, sent[to]))
        .collect();
    let expected: Vec<u8> = (0..size)
        .flat_map(|from| pattern(from, rank, received[from]))
        .collect();
    let mut output = vec![POISON; expected.len()];
    // SAFETY: the sizes of the buffers are the sums of the counts.
    unsafe {
        let (input, output) = (input.as_ptr(), output.as_mut_ptr());
        context.alltoallv(input, &sent, output, &received, Call::new())
    }
    .expect("alltoallv");
    assert_eq!(output, expected, "alltoallv");

    let counts: Vec<_> = (0..size).map(|from| count(from, from + 1)).collect();
    let input = pattern(rank, 9, counts[rank]);
    let expected: Vec<u8> = (0..size)
        .flat_map(|from| pattern(from, 9, counts[from]))
        .collect();
    let mut output = vec![POISON; expected.len()];
    // SAFETY: the input has this rank's count, the output the sum of all counts.
    unsafe { context.allgatherv(input.as_ptr(), output.as_mut_ptr(), &counts, Call::new()) }
        .expect("allgatherv");
    assert_eq!(output, expected, "allgatherv");

    for root in 0..size {
        output.fill(POISON);
        // SAFETY: the input has this rank's count, the output the sum of all counts.
        unsafe {
            let (input, output) = (input.as_ptr(), output.as_mut_ptr());
            context.gatherv(input, output, &counts, root, Call::new())
        }
        .expect("gatherv");
        if rank == root {
            assert_eq!(output, expected, "gatherv to {root}");
        } else {
            assert!(
                output.iter().all(|byte| *byte == POISON),
                "gatherv wrote elsewhere"
            );
        }
    }
}

/// Sends to the next rank and receives from the previous rank at the same time. A single rank sends
/// to itself.
pub(crate) fn ring(context: &Context, bytes: usize) {
    let (rank, size) = (context.rank(), context.size());
    let (next, previous) = ((rank + 1) % size, (rank + size - 1) % size);
    let data = pattern(rank, next, bytes);
    let mut received = vec![POISON; bytes];
    let transfers = [
        Transfer::Send {
            data: data.as_ptr(),
            bytes,
            peer: next,
            tag: 5,
        },
        Transfer::Recv {
            data: received.as_mut_ptr(),
            bytes,
            peer: previous,
            tag: 5,
        },
    ];
    // SAFETY: both buffers have `bytes` bytes and outlive the call.
    unsafe { context.batch(&transfers, Call::new()) }.expect("batch");
    assert_eq!(received, pattern(previous, rank, bytes), "ring");
}
