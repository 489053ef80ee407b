use super::*;

fn of<T: Copy>(values: &[T], bytes: impl Fn(T) -> Vec<u8>) -> Vec<u8> {
    values.iter().flat_map(|value| bytes(*value)).collect()
}

fn f32s(values: &[f32]) -> Vec<u8> {
    of(values, |value| value.to_le_bytes().to_vec())
}

fn halves(values: &[u16]) -> Vec<u8> {
    of(values, |value| value.to_le_bytes().to_vec())
}

fn i32s(values: &[i32]) -> Vec<u8> {
    of(values, |value| value.to_le_bytes().to_vec())
}

#[test]
fn sums_follow_the_ranks() {
    // (1e8 + 1) - 1e8 is 0 in f32, 1e8 - 1e8 + 1 is 1.
    let inputs = [f32s(&[1e8, 1e8]), f32s(&[1.0, -1e8]), f32s(&[-1e8, 1.0])];
    assert_eq!(
        reduce(DType::F32, ReduceOp::Sum, &[], &inputs),
        f32s(&[0.0, 1.0])
    );
}

#[test]
fn small_floats_are_rounded_once() {
    // In bf16 (8 significant bits), 1 + 2^-8 + 2^-8 would be 1 if every step were rounded.
    let one = 0x3f80;
    let little = 0x3b80;
    let inputs = [halves(&[one]), halves(&[little]), halves(&[little])];
    assert_eq!(
        reduce(DType::Bf16, ReduceOp::Sum, &[], &inputs),
        halves(&[0x3f81])
    );
    // In f16, the intermediate sum of 65504 + 65504 - 65504 would overflow.
    let inputs = [halves(&[0x7bff]), halves(&[0x7bff]), halves(&[0xfbff])];
    assert_eq!(
        reduce(DType::F16, ReduceOp::Sum, &[], &inputs),
        halves(&[0x7bff])
    );
}

#[test]
fn integers_wrap_and_their_average_truncates() {
    let inputs = [i32s(&[i32::MAX, -3, 7]), i32s(&[1, -2, 4])];
    let run = |op| reduce(DType::I32, op, &[3.0, -2.0], &inputs);
    assert_eq!(run(ReduceOp::Sum), i32s(&[i32::MIN, -5, 11]));
    assert_eq!(run(ReduceOp::Average), i32s(&[i32::MIN / 2, -2, 5]));
    assert_eq!(
        run(ReduceOp::PreMulSum(0.0)),
        i32s(&[i32::MAX.wrapping_mul(3) - 2, -5, 13])
    );
    assert_eq!(run(ReduceOp::Product), i32s(&[i32::MAX, 6, 28]));
    assert_eq!(run(ReduceOp::Min), i32s(&[1, -3, 4]));
    assert_eq!(run(ReduceOp::BitAnd), i32s(&[1, -4, 4]));
    assert_eq!(run(ReduceOp::BitOr), i32s(&[i32::MAX, -1, 7]));
    assert_eq!(run(ReduceOp::BitXor), i32s(&[i32::MAX - 1, 3, 3]));
    let bytes = |values: &[i8]| of(values, |value| value.to_le_bytes().to_vec());
    let inputs = [bytes(&[-128, 127]), bytes(&[-1, 1])];
    assert_eq!(
        reduce(DType::I8, ReduceOp::Sum, &[], &inputs),
        bytes(&[127, -128])
    );
}

#[test]
fn nan_wins_and_zeros_are_ordered() {
    let (zero, minus) = (0x0000, 0x8000);
    let inputs = [
        halves(&[0x7e01, zero, minus, 0x3c00]),
        halves(&[0xc000, minus, zero, 0xfc01]),
    ];
    let run = |op| reduce(DType::F16, op, &[], &inputs);
    assert_eq!(run(ReduceOp::Min), halves(&[0x7fff, minus, minus, 0x7fff]));
    assert_eq!(run(ReduceOp::Max), halves(&[0x7fff, zero, zero, 0x7fff]));
    assert_eq!(run(ReduceOp::Sum)[..2], halves(&[0x7fff]));
}

#[test]
fn scaled_sums_round_the_product() {
    // The product 1.1 * 3 must be rounded to f32 before the sum. A fused multiply-add does not
    // round the product, so its result would differ.
    let inputs = [f32s(&[1.1]), f32s(&[-3.3])];
    let expected = f32s(&[1.1f32 * 3.0 + -3.3f32]);
    assert_eq!(
        reduce(DType::F32, ReduceOp::PreMulSum(1.0), &[3.0, 1.0], &inputs),
        expected
    );
}

#[test]
fn movements_put_rows_where_they_belong() {
    let inputs = [vec![1, 2, 3, 4], vec![5, 6, 7, 8]];
    assert_eq!(gather(&inputs), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(scatter(&inputs[1], 2, 1), [7, 8]);
    assert_eq!(all_to_all(&inputs, 1), [3, 4, 7, 8]);
    assert_eq!(
        reduce_scatter(DType::U8, ReduceOp::Max, &[], &inputs, 1),
        [7, 8]
    );
    let split = |from: usize, to: usize| [[1, 3], [4, 0]][from][to];
    assert_eq!(all_to_all_v(DType::U8, &inputs, 0, split), [1, 5, 6, 7, 8]);
    assert_eq!(all_to_all_v(DType::U8, &inputs, 1, split), [2, 3, 4]);
}

#[test]
fn the_norm_is_near_its_definition_in_f64() {
    let (hidden, rows) = (300, 3);
    let sum = fill(DType::F32, 0, 1, hidden * rows);
    let (residual, weight) = (
        fill(DType::F32, 1, 2, hidden * rows),
        fill(DType::F32, 2, 3, hidden),
    );
    let (out, kept) = rms_norm(DType::F32, &sum, &residual, &weight, 1e-5);
    let read = |bytes: &[u8]| widen(DType::F32, bytes);
    let (out, kept, weight) = (read(&out), read(&kept), read(&weight));
    for (out, kept) in out.chunks(hidden).zip(kept.chunks(hidden)) {
        let squares: f64 = kept.iter().map(|value| f64::from(*value).powi(2)).sum();
        let scale = 1.0 / (squares / hidden as f64 + 1e-5).sqrt();
        for ((out, kept), weight) in out.iter().zip(kept).zip(&weight) {
            let exact = f64::from(*kept) * scale * f64::from(*weight);
            assert!((f64::from(*out) - exact).abs() <= 1e-5 * exact.abs().max(1e-6));
        }
    }
}

#[test]
fn inputs_differ_and_their_order_matters() {
    for dtype in DType::ALL {
        let first = fill(dtype, 0, 0, 1000);
        assert_eq!(first.len(), 1000 * dtype.size());
        assert_eq!(first, fill(dtype, 0, 0, 1000));
        assert_ne!(first, fill(dtype, 1, 0, 1000));
        assert_ne!(first, fill(dtype, 0, 1, 1000));
    }
    let mut inputs: Vec<Vec<u8>> = (0..3).map(|rank| fill(DType::F32, rank, 5, 1000)).collect();
    assert!(
        inputs
            .iter()
            .all(|input| widen(DType::F32, input).iter().all(|x| x.is_finite()))
    );
    let forwards = reduce(DType::F32, ReduceOp::Sum, &[], &inputs);
    inputs.reverse();
    let backwards = reduce(DType::F32, ReduceOp::Sum, &[], &inputs);
    let difference = first_difference(&forwards, &backwards, DType::F32).unwrap();
    assert!(difference.wrong > 100, "{difference}");
}

#[test]
fn differences_name_the_first_and_count_all() {
    let expected = i32s(&[1, 2, 3, 4]);
    assert_eq!(first_difference(&expected, &expected, DType::I32), None);
    let difference = first_difference(&expected, &i32s(&[1, 0, 3, -4]), DType::I32).unwrap();
    assert_eq!(
        difference.to_string(),
        "2 wrong, the first at index 1: expected 2, got 0"
    );
    let difference = first_difference(&f32s(&[1.0]), &f32s(&[-0.5]), DType::F32).unwrap();
    assert_eq!(
        (difference.expected.as_str(), difference.got.as_str()),
        ("1.0 (0x3f800000)", "-0.5 (0xbf000000)")
    );
}
