//! Calls every operation once.

use fusewire::{DType, Options, ReduceOp};
use fusewire_tests::device::run_threads;

#[test]
fn every_operation_on_slices_and_tensors() {
    for (size, lanes) in [(1, 1), (2, 1), (3, 1), (4, 1), (2, 32), (3, 64)] {
        let mut options = Options::default();
        options.testing.lanes = lanes;
        options.timeout = core::time::Duration::from_secs(20);
        for result in run_threads(size, &options, |comm| {
            let n = comm.size() as usize;
            let r = comm.rank() as usize;
            for count in [0usize, 1, 5, 100, 3000, 100_000] {
                let expect = |i: usize| (0..n).map(|k| (k + i % 7) as f32).sum::<f32>();
                let mut x: Vec<f32> = (0..count).map(|i| (r + i % 7) as f32).collect();
                comm.all_reduce(&mut x, ReduceOp::Sum)?;
                assert!(
                    (0..count).all(|i| x[i] == expect(i)),
                    "all_reduce {size} {count}"
                );
                let t = comm.alloc(DType::F32, count)?;
                t.copy_from(&(0..count).map(|i| (r + i % 7) as f32).collect::<Vec<_>>())?;
                comm.all_reduce(&t, ReduceOp::Sum)?;
                let x = t.to_vec::<f32>()?;
                assert!(
                    (0..count).all(|i| x[i] == expect(i)),
                    "all_reduce window {size} {count}"
                );
                let mut x: Vec<i32> = (0..count).map(|i| (r + i % 7) as i32).collect();
                comm.all_reduce(&mut x, ReduceOp::Max)?;
                assert!((0..count).all(|i| x[i] == (n - 1 + i % 7) as i32));
                let input: Vec<f32> = (0..count).map(|i| (r * 1000 + i) as f32).collect();
                let mut out = vec![0f32; count * n];
                comm.all_gather_single(&mut out, &input)?;
                for k in 0..n {
                    assert!((0..count).all(|i| out[k * count + i] == (k * 1000 + i) as f32));
                }
                let mut back = vec![0f32; count * n];
                comm.all_to_all_single(&mut back, &out)?;
                for k in 0..n {
                    assert!((0..count).all(|i| back[k * count + i] == (r * 1000 + i) as f32));
                }
                let mut rs = vec![0f32; count];
                comm.reduce_scatter_single(&mut rs, &out, ReduceOp::Sum)?;
                assert!((0..count).all(|i| rs[i] == n as f32 * (r * 1000 + i) as f32));
                let root = (n - 1) as u32;
                let mut b = if r as u32 == root {
                    input.clone()
                } else {
                    vec![0f32; count]
                };
                comm.broadcast(&mut b, root)?;
                assert!((0..count).all(|i| b[i] == ((n - 1) * 1000 + i) as f32));
                let mut g = vec![0f32; if r as u32 == root { count * n } else { 0 }];
                comm.gather_single(&mut g, &input, root)?;
                if r as u32 == root {
                    assert_eq!(g, out);
                }
                let mut s = vec![0f32; count];
                comm.scatter_single(&mut s, &g, root)?;
                assert_eq!(s, input);
                let mut red = vec![0f32; count];
                comm.reduce_into(&mut red, &s, root, ReduceOp::Sum)?;
                if n > 1 {
                    let mut got = vec![0f32; count];
                    if r.is_multiple_of(2) {
                        if r + 1 < n {
                            comm.send(&input, r as u32 + 1)?;
                        }
                    } else {
                        comm.recv(&mut got, r as u32 - 1)?;
                        assert!((0..count).all(|i| got[i] == ((r - 1) * 1000 + i) as f32));
                    }
                }
                let counts: Vec<u64> = (0..n).map(|k| (count * k / n) as u64).collect();
                let total: u64 = counts.iter().sum();
                let mut v = vec![0f32; total as usize];
                comm.all_gather_v_single(&mut v, &input[..counts[r] as usize], &counts)?;
                let ins: Vec<u64> = (0..n).map(|k| (count * (k + r) / (2 * n)) as u64).collect();
                let outs = ins.clone();
                let send = vec![r as f32; ins.iter().sum::<u64>() as usize];
                let mut recv = vec![-1f32; outs.iter().sum::<u64>() as usize];
                comm.all_to_all_v_single(&mut recv, &send, &outs, &ins)?;
                let mut at = 0;
                for k in 0..n {
                    for _ in 0..outs[k] {
                        assert_eq!(recv[at], k as f32);
                        at += 1;
                    }
                }
                comm.barrier()?;
            }
            Ok(())
        }) {
            result.unwrap();
        }
    }
}
