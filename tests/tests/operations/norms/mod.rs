//! Compares fused norms with an independent oracle. Results must be bitwise identical to the oracle
//! for every form, type, route, and number of ranks and lanes, and close to a norm in f64. The
//! cases include registered, staged and in-place buffers, graphs with changing inputs, and rows
//! that are longer than shared memory.

mod case;

use fusewire::{Algorithm, DType, Norm, Result, ScaleLayout};
use fusewire_tests::device::{device, run_threads, tensor};
use fusewire_tests::oracle::{fill, widen};
use fusewire_tests::runner::Setup;
use fusewire_tests::skip::full;

use self::case::{Buffers, EPSILON, FLOATS, Route, cases, options, run};

#[test]
fn every_form_and_route() {
    for (index, ranks) in [1, 2, 3, 4, 8].into_iter().enumerate() {
        // The short form runs 1 block with an odd number of ranks, and 3 blocks with an even one.
        for blocks in [1, 3] {
            if !full() && (ranks % 2 == 1) != (blocks == 1) {
                continue;
            }
            let setup = Setup {
                blocks,
                // This size of staging is small enough for several rounds.
                staging: 64 << 10,
                ..Setup::new(ranks)
            };
            let dtype = FLOATS[index % 3];
            run(
                &setup,
                &cases(dtype, &[(0, 64), (1, 8), (5, 136), (3, 1024)]),
            );
        }
    }
}

#[test]
fn every_type() {
    for dtype in FLOATS {
        let setup = Setup {
            staging: 256 << 10,
            ..Setup::new(2)
        };
        run(&setup, &cases(dtype, &[(2, 2048), (7, 264)]));
    }
}

#[test]
fn rows_that_are_longer_than_shared_memory() {
    let setup = Setup {
        blocks: 2,
        staging: 512 << 10,
        ..Setup::new(2)
    };
    let mut list = cases(DType::Bf16, &[(3, 8192), (3, 8200), (2, 16_384)]);
    // The longer rows do not fit packet slots.
    list.retain(|case| case.route != Route::AllReduce(Algorithm::Packet) || case.hidden == 8192);
    run(&setup, &list);
}

#[test]
fn lanes_give_the_same_bits() {
    if device().is_gpu() {
        println!("the number of lanes is fixed on a GPU");
        return;
    }
    let shapes = [(2, 136), (0, 8), (1, 1040)];
    let runs = [
        (32, 2, DType::Bf16, &shapes[..1]),
        (64, 3, DType::F32, &shapes[2..]),
        (32, 4, DType::F16, &shapes[1..2]),
    ];
    for (lanes, ranks, dtype, short) in runs {
        let setup = Setup {
            lanes,
            staging: 128 << 10,
            ..Setup::new(ranks)
        };
        run(&setup, &cases(dtype, if full() { &shapes } else { short }));
    }
}

/// Several blocks share a row if there are fewer rows than blocks.
#[test]
fn several_blocks_share_a_row() {
    let wide = [(1, 4104), (0, 4096), (2, 4104)];
    let runs = [
        // Eight stripes, of which the first has a chunk more. A lane has several entries.
        (8, 32, 2, DType::Bf16, &wide[..if full() { 3 } else { 2 }]),
        (5, 64, 3, DType::F32, &[(2, 4104)][..]),
    ];
    for (blocks, lanes, ranks, dtype, shapes) in runs {
        let setup = Setup {
            blocks,
            lanes: if device().is_gpu() { 1 } else { lanes },
            staging: 256 << 10,
            ..Setup::new(ranks)
        };
        let mut list = cases(dtype, shapes);
        list.retain(|case| case.route == Route::AllReduce(Algorithm::Packet));
        assert!(!list.is_empty(), "no packets");
        run(&setup, &list);
    }
}

#[test]
fn graphs_replay_with_changing_inputs() {
    let setup = Setup {
        staging: 128 << 10,
        ..Setup::new(3)
    };
    for result in run_threads(setup.ranks, &options(&setup), |comm| {
        for dtype in FLOATS {
            let buffers = cases(dtype, &[(4, 520)])
                .iter()
                .map(|case| Buffers::new(&comm, *case))
                .collect::<Result<Vec<_>>>()?;
            comm.stream().begin_capture()?;
            for buffers in &buffers {
                buffers.call(&comm, true)?;
            }
            let graph = comm.stream().end_capture()?.instantiate()?;
            for round in 0..3 {
                for (index, buffers) in buffers.iter().enumerate() {
                    buffers.fill(&comm, round * 1000 + index as u64 * 8)?;
                }
                comm.barrier()?;
                graph.run(comm.stream())?;
                for (index, buffers) in buffers.iter().enumerate() {
                    buffers.check(&comm, round * 1000 + index as u64 * 8)?;
                }
                comm.barrier()?;
            }
        }
        Ok(())
    }) {
        result.expect("every rank");
    }
}

#[test]
fn a_row_does_not_depend_on_the_number_of_rows() {
    const ROWS: usize = 64;
    const HIDDEN: usize = 256;
    let setup = Setup {
        staging: 512 << 10,
        ..Setup::new(2)
    };
    for result in run_threads(2, &options(&setup), |comm| {
        for dtype in FLOATS {
            let x = comm.alloc(dtype, ROWS * HIDDEN)?;
            x.copy_from_bytes(&fill(dtype, comm.rank(), 9, ROWS * HIDDEN))?;
            let weight = tensor(dtype, HIDDEN)?;
            weight.copy_from_bytes(&fill(dtype, 0, 10, HIDDEN))?;
            let all = comm.alloc(dtype, ROWS * HIDDEN)?;
            let mut first: Option<Vec<u8>> = None;
            for algorithm in [Algorithm::Signal, Algorithm::TwoShot, Algorithm::Auto] {
                let norm = Norm::rms(&all, &x, &weight, EPSILON).with_algorithm(algorithm);
                comm.all_reduce_norm(&norm)?;
                let bytes = all.to_bytes()?;
                if let Some(first) = &first {
                    assert!(*first == bytes, "{algorithm:?} of {dtype:?}");
                }
                first = Some(bytes);
            }
            let together = first.expect("a result");
            for row in [0, 1, 17, ROWS - 1] {
                let one = x.slice(row * HIDDEN, HIDDEN)?;
                let out = comm.alloc(dtype, HIDDEN)?;
                comm.all_reduce_norm(&Norm::rms(&out, &one, &weight, EPSILON))?;
                let bytes = row * HIDDEN * dtype.size()..(row + 1) * HIDDEN * dtype.size();
                assert!(out.to_bytes()? == together[bytes], "row {row} of {dtype:?}");
            }
        }
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

#[test]
fn rows_whose_outputs_do_not_fit_staging_take_one_shot() {
    let setup = Setup {
        staging: 16 << 10,
        ..Setup::new(2)
    };
    for result in run_threads(2, &options(&setup), |comm| {
        let (rows, hidden) = (4, 4096);
        let get = |count| tensor(DType::F32, count).expect("memory");
        let (x, y, kept, weight) = (
            get(rows * hidden),
            get(rows * hidden),
            get(rows * hidden),
            get(hidden),
        );
        x.copy_from(&vec![1f32; rows * hidden])?;
        weight.copy_from(&vec![1f32; hidden])?;
        let norm = Norm::rms(&y, &x, &weight, 0.0).with_residual_out(&kept);
        assert_eq!(comm.plan_norm(&norm)?, Algorithm::Signal);
        comm.all_reduce_norm(&norm)?;
        assert_eq!(y.to_vec::<f32>()?, vec![1f32; rows * hidden]);
        assert_eq!(kept.to_vec::<f32>()?, vec![2f32; rows * hidden]);
        Ok(())
    }) {
        result.expect("both ranks");
    }
}

#[test]
fn special_values() {
    // A NaN makes its row and scale NaN, a row of zeros stays zero, and other rows do not change.
    for result in run_threads(
        2,
        &options(&Setup {
            staging: 64 << 10,
            ..Setup::new(2)
        }),
        |comm| {
            let (rows, hidden) = (3, 128);
            let x = tensor(DType::F32, rows * hidden)?;
            let mut values = vec![0.5f32; rows * hidden];
            values[..hidden].fill(0.0);
            values[hidden + 7] = f32::NAN;
            x.copy_from(&values)?;
            let weight = tensor(DType::F32, hidden)?;
            weight.copy_from(&vec![1f32; hidden])?;
            let out = tensor(DType::E4m3, rows * hidden)?;
            let (f32_scales, byte_scales) = (tensor(DType::F32, rows)?, tensor(DType::U8, rows)?);
            comm.all_reduce_norm(
                &Norm::rms(&out, &x, &weight, EPSILON).with_row_scales(&f32_scales),
            )?;
            let check = |out: Vec<u8>| {
                assert!(out[..hidden].iter().all(|code| code & 0x7f == 0), "zeros");
                assert!(
                    out[hidden..2 * hidden]
                        .iter()
                        .all(|code| code & 0x7f == 0x7f),
                    "NaN"
                );
                assert!(
                    out[2 * hidden..]
                        .iter()
                        .all(|code| *code == out[2 * hidden] && *code != 0)
                );
            };
            check(out.to_bytes()?);
            let scales = widen(DType::F32, &f32_scales.to_bytes()?);
            assert_eq!(scales[0], 1e-10 / 448.0);
            assert!(scales[1].is_nan() && scales[2] > 0.0);
            comm.all_reduce_norm(
                &Norm::rms(&out, &x, &weight, EPSILON).with_row_scales(&byte_scales),
            )?;
            check(out.to_bytes()?);
            assert_eq!(byte_scales.to_bytes()?[1], 255);
            Ok(())
        },
    ) {
        result.expect("both ranks");
    }
}

#[test]
fn refusals() {
    for result in run_threads(2, &options(&Setup::new(2)), |comm| {
        let t = |dtype, count| tensor(dtype, count).expect("memory");
        let (x, y) = (t(DType::F32, 32), t(DType::F32, 32));
        let (w, w12) = (t(DType::F32, 16), t(DType::F32, 12));
        let wide = t(DType::F32, 48);
        let (half, bytes) = (t(DType::F16, 32), t(DType::U8, 32));
        let fp8 = t(DType::E4m3, 32);
        let scales = t(DType::F32, 8);
        let refused = [
            (
                "multiple of 8",
                comm.all_reduce_norm(&Norm::rms(&y, &x, &w12, EPSILON)),
            ),
            (
                "rows",
                comm.all_reduce_norm(&Norm::rms(&y, &wide.slice(0, 40)?, &w, EPSILON)),
            ),
            (
                "possible",
                comm.all_reduce_norm(&Norm::rms(&bytes, &bytes, &bytes, EPSILON)),
            ),
            (
                "output has",
                comm.all_reduce_norm(&Norm::rms(&half, &x, &w, EPSILON)),
            ),
            ("bias has", {
                comm.all_reduce_norm(&Norm::layer(&y, &x, &w, EPSILON).with_bias(&x))
            }),
            ("residual has", {
                comm.all_reduce_norm(&Norm::rms(&y, &x, &w, EPSILON).with_residual(&half))
            }),
            ("scales of", {
                let scales = scales.slice(0, 1)?;
                comm.all_reduce_norm(&Norm::rms(&fp8, &x, &w, EPSILON).with_row_scales(&scales))
            }),
            ("stride of", {
                let layout = ScaleLayout::ColumnMajor { stride: 1 };
                comm.all_reduce_norm(
                    &Norm::rms(&fp8, &x, &w, EPSILON).with_group_scales(&scales, layout),
                )
            }),
            (
                "overlap",
                comm.all_reduce_norm(&Norm::rms(
                    &wide.slice(8, 32)?,
                    &wide.slice(0, 32)?,
                    &w,
                    EPSILON,
                )),
            ),
            ("overlap", {
                comm.all_reduce_norm(&Norm::rms(&y, &x, &w, EPSILON).with_residual_out(&y))
            }),
            (
                "rows",
                comm.reduce_scatter_norm(&Norm::rms(&w, &wide, &w, EPSILON)),
            ),
        ];
        for (index, (what, result)) in refused.into_iter().enumerate() {
            let error = result.expect_err("a refusal").to_string();
            assert!(error.contains(what), "{index}: {error}");
        }
        let slice = [1f32; 16];
        let enqueued = comm.all_reduce_norm_async(&Norm::rms(&y, &x, &slice[..], EPSILON));
        let error = enqueued.map(drop).expect_err("a slice").to_string();
        assert!(
            error.contains("tensors") || error.contains("slice"),
            "{error}"
        );
        comm.all_reduce_norm(&Norm::rms(&y, &x, &w, EPSILON))
    }) {
        result.expect("both ranks");
    }
}
