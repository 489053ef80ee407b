//! Every collective on 1 to 4 ranks, each a thread.

mod common;
#[path = "common/suite.rs"]
mod suite;

use common::{POISON, TEST_TIMEOUT, pattern, with_threads};
use fusewire_gloo_sys::{Call, Context, DataType, ReduceOp, Transfer};
use half::{bf16, f16};

#[test]
fn movers_of_equal_parts() {
    for size in 1..=4 {
        with_threads(size, TEST_TIMEOUT, |context| {
            for bytes in [0, 1, 13, 4096, 300_001] {
                suite::movers(&context, bytes);
            }
        });
    }
}

#[test]
fn movers_of_unequal_parts() {
    for size in 1..=4 {
        with_threads(size, TEST_TIMEOUT, |context| {
            suite::unequal(&context, |from, to| (from * 5 + to * 3) % 7 * 11);
            // First some ranks have no data, then only one rank has data, then no rank has data.
            suite::unequal(
                &context,
                |from, to| if from % 2 == 0 { 1000 + to } else { 0 },
            );
            suite::unequal(
                &context,
                |from, _| if from == size - 1 { 70_000 } else { 0 },
            );
            suite::unequal(&context, |_, _| 0);
        });
    }
}

/// Returns small whole numbers, for which every reduction gives the same value in every order.
fn number(rank: usize, index: usize) -> u8 {
    match (rank * 5 + index * 3) % 4 {
        0 => 1,
        1 => 2,
        2 => 3,
        _ => 1,
    }
}

fn reference(op: ReduceOp, size: usize, index: usize) -> u8 {
    let combine: fn(u8, u8) -> u8 = match op {
        ReduceOp::Sum => |a, b| a + b,
        ReduceOp::Product => |a, b| a * b,
        ReduceOp::Min => u8::min,
        ReduceOp::Max => u8::max,
        ReduceOp::BitAnd => |a, b| a & b,
        ReduceOp::BitOr => |a, b| a | b,
        ReduceOp::BitXor => |a, b| a ^ b,
        other => panic!("no reference for {other:?}"),
    };
    (0..size)
        .map(|rank| number(rank, index))
        .reduce(combine)
        .expect("a rank")
}

fn encode(dtype: DataType, value: u8) -> Vec<u8> {
    match dtype {
        DataType::F32 => f32::from(value).to_ne_bytes().to_vec(),
        DataType::F64 => f64::from(value).to_ne_bytes().to_vec(),
        DataType::F16 => f16::from(value).to_ne_bytes().to_vec(),
        DataType::Bf16 => bf16::from(value).to_ne_bytes().to_vec(),
        DataType::I8 => (value as i8).to_ne_bytes().to_vec(),
        DataType::U8 => value.to_ne_bytes().to_vec(),
        DataType::I32 => i32::from(value).to_ne_bytes().to_vec(),
        DataType::I64 => i64::from(value).to_ne_bytes().to_vec(),
        DataType::U64 => u64::from(value).to_ne_bytes().to_vec(),
        other => panic!("no code for {other:?}"),
    }
}

fn encode_all(dtype: DataType, count: usize, value: impl Fn(usize) -> u8) -> Vec<u8> {
    (0..count)
        .flat_map(|index| encode(dtype, value(index)))
        .collect()
}

fn reductions(context: &Context, dtype: DataType, op: ReduceOp, count: usize) {
    let (rank, size) = (context.rank(), context.size());
    let what = format!("{op:?} of {count} {dtype:?} on {size} ranks");
    let input = encode_all(dtype, count, |index| number(rank, index));
    let expected = encode_all(dtype, count, |index| reference(op, size, index));
    let mut output = vec![POISON; input.len()];
    // SAFETY: both buffers have `count` elements.
    unsafe {
        let (input, output) = (input.as_ptr(), output.as_mut_ptr());
        context.allreduce(input, output, count, dtype, op, Call::new())
    }
    .expect("allreduce");
    assert_eq!(output, expected, "{what}");

    let mut buffer = input.clone();
    let data = buffer.as_mut_ptr();
    // SAFETY: the buffer has `count` elements; input and output are equal.
    unsafe { context.allreduce(data, data, count, dtype, op, Call::new().tag(1)) }
        .expect("allreduce in place");
    assert_eq!(buffer, expected, "{what}, in place");

    let root = count % size;
    output.fill(POISON);
    // SAFETY: both buffers have `count` elements.
    unsafe {
        let (input, output) = (input.as_ptr(), output.as_mut_ptr());
        context.reduce(input, output, count, dtype, op, root, Call::new())
    }
    .expect("reduce");
    if rank == root {
        assert_eq!(output, expected, "{what}, to {root}");
    } else {
        assert!(
            output.iter().all(|byte| *byte == POISON),
            "{what}: wrote elsewhere"
        );
    }
}

#[test]
fn reductions_of_every_type() {
    for size in 1..=4 {
        with_threads(size, TEST_TIMEOUT, |context| {
            for dtype in DataType::ALL {
                for op in ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype)) {
                    for count in [0, 1, 3, 130] {
                        reductions(&context, dtype, op, count);
                    }
                }
            }
        });
    }
}

#[test]
fn large_reduction_has_the_same_bits_everywhere() {
    // The data fills several segments of Gloo's ring. The last segment is partial.
    const COUNT: usize = 1_500_007;
    for size in [2, 3] {
        let value = |rank: usize, index: usize| {
            let x = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15 + rank as u64);
            (x >> 40) as f32 / 1e3 * if x & 1 == 0 { 1.0 } else { -1.0 }
        };
        let results = with_threads(size, TEST_TIMEOUT, |context| {
            let mut data: Vec<f32> = (0..COUNT)
                .map(|index| value(context.rank(), index))
                .collect();
            let pointer = data.as_mut_ptr().cast::<u8>();
            // SAFETY: input and output are the same `COUNT` elements.
            unsafe {
                let (dtype, op) = (DataType::F32, ReduceOp::Sum);
                context.allreduce(pointer, pointer, COUNT, dtype, op, Call::new())
            }
            .expect("allreduce");
            data
        });
        for index in 0..COUNT {
            let exact: f64 = (0..size).map(|rank| f64::from(value(rank, index))).sum();
            let bits = results[0][index].to_bits();
            assert!(
                (f64::from(results[0][index]) - exact).abs() < 0.02,
                "element {index}"
            );
            for result in &results {
                assert_eq!(result[index].to_bits(), bits, "element {index}");
            }
        }
    }
}

#[test]
fn ring_of_8_mib() {
    for size in 1..=4 {
        with_threads(size, TEST_TIMEOUT, |context| suite::ring(&context, 8 << 20));
    }
}

#[test]
fn many_messages_at_once() {
    const EACH: usize = 12;
    with_threads(4, TEST_TIMEOUT, |context| {
        let (rank, size) = (context.rank(), context.size());
        let bytes = |index: usize| index * 9_000;
        let sent: Vec<Vec<u8>> = (0..size * EACH)
            .map(|slot| pattern(rank * EACH + slot % EACH, slot / EACH, bytes(slot % EACH)))
            .collect();
        let mut received: Vec<Vec<u8>> = (0..size * EACH)
            .map(|slot| vec![POISON; bytes(slot % EACH)])
            .collect();
        // Sends come before receives, in descending order of rank, because the order of posting
        // must not matter.
        let mut transfers: Vec<_> = (0..size * EACH)
            .rev()
            .map(|slot| Transfer::Send {
                data: sent[slot].as_ptr(),
                bytes: sent[slot].len(),
                peer: slot / EACH,
                tag: (slot % EACH) as u32,
            })
            .collect();
        transfers.extend(
            received
                .iter_mut()
                .enumerate()
                .map(|(slot, buffer)| Transfer::Recv {
                    data: buffer.as_mut_ptr(),
                    bytes: buffer.len(),
                    peer: slot / EACH,
                    tag: (slot % EACH) as u32,
                }),
        );
        // SAFETY: every buffer has its message's length and outlives the call.
        unsafe { context.batch(&transfers, Call::new()) }.expect("batch");
        for (slot, buffer) in received.iter().enumerate() {
            let from = slot / EACH * EACH + slot % EACH;
            assert_eq!(
                *buffer,
                pattern(from, rank, bytes(slot % EACH)),
                "message {slot}"
            );
        }
    });
}

#[test]
fn send_and_receive_with_tags_out_of_order() {
    with_threads(2, TEST_TIMEOUT, |context| {
        let peer = 1 - context.rank();
        let (first, second) = (pattern(1, 1, 500), pattern(2, 2, 500));
        if context.rank() == 0 {
            let transfers = [(&first, 1), (&second, 2)].map(|(data, tag)| Transfer::Send {
                data: data.as_ptr(),
                bytes: data.len(),
                peer,
                tag,
            });
            // SAFETY: both buffers outlive the call.
            unsafe { context.batch(&transfers, Call::new()) }.expect("batch");
        } else {
            for (expected, tag) in [(&second, 2), (&first, 1)] {
                let mut data = vec![POISON; 500];
                // SAFETY: the buffer has 500 bytes and outlives the call.
                unsafe { context.recv(data.as_mut_ptr(), 500, peer, Call::new().tag(tag)) }
                    .expect("recv");
                assert_eq!(data, *expected, "tag {tag}");
            }
        }
    });
}

#[test]
fn operations_with_tags_of_their_own_run_together() {
    with_threads(3, TEST_TIMEOUT, |context| {
        std::thread::scope(|scope| {
            for tag in 0..4_u32 {
                let context = &context;
                scope.spawn(move || {
                    for round in 0..20_i64 {
                        let value = context.rank() as i64 + i64::from(tag) * 100 + round;
                        let mut data = vec![value; 1000];
                        let pointer = data.as_mut_ptr().cast::<u8>();
                        // SAFETY: input and output are the same 1000 elements.
                        unsafe {
                            let (dtype, op) = (DataType::I64, ReduceOp::Sum);
                            let call = Call::new().tag(tag);
                            context.allreduce(pointer, pointer, 1000, dtype, op, call)
                        }
                        .expect("allreduce");
                        let expected = 3 + 3 * (i64::from(tag) * 100 + round);
                        assert!(data.iter().all(|sum| *sum == expected), "tag {tag}");
                    }
                });
            }
        });
    });
}

#[test]
fn barrier_waits_for_the_last() {
    use core::sync::atomic::{AtomicUsize, Ordering};

    let arrived = AtomicUsize::new(0);
    with_threads(3, TEST_TIMEOUT, |context| {
        if context.rank() == 2 {
            std::thread::sleep(core::time::Duration::from_millis(300));
        }
        arrived.fetch_add(1, Ordering::SeqCst);
        context.barrier(Call::new()).expect("barrier");
        assert_eq!(arrived.load(Ordering::SeqCst), 3);
    });
}
