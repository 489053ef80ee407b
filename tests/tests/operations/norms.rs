//! Fused norms against an oracle of the tests' own: to the bit for every form, type, route, number of ranks and lanes, and
//! against f64; registered and staged, in place, in graphs with changing inputs, with rows longer than shared memory.

use fusewire::{Algorithm, Communicator, DType, Norm, Options, Result, ScaleLayout, Tensor};
use fusewire_tests::device::{device, run_threads, tensor};
use fusewire_tests::norm::{Form, Given, Written, expected};
use fusewire_tests::oracle::{fill, narrow, widen};
use fusewire_tests::runner::Setup;

const EPSILON: f32 = 1e-6;
const SCALE: f32 = 0.37;
const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// How rows are reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    AllReduce(Algorithm),
    ReduceScatter,
}

const ROUTES: [Route; 4] = [
    Route::AllReduce(Algorithm::Packet),
    Route::AllReduce(Algorithm::Signal),
    Route::AllReduce(Algorithm::TwoShot),
    Route::ReduceScatter,
];

/// Where buffers lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Memory {
    Registered,
    Ordinary,
    /// Odd ranks' in windows.
    Mixed,
}

/// One call.
#[derive(Clone, Copy, Debug)]
struct Case {
    form: Form,
    route: Route,
    dtype: DType,
    /// Rows of a rank's result.
    rows: usize,
    hidden: usize,
    memory: Memory,
    /// Rows are written over the input, the sum over the residual.
    in_place: bool,
}

/// Buffers of a case on a rank.
struct Buffers {
    case: Case,
    input: Tensor,
    output: Tensor,
    residual: Tensor,
    kept: Tensor,
    weight: Tensor,
    bias: Tensor,
    scales: Tensor,
    stride: usize,
}

/// Elements behind each output that must stay as they are.
const GUARD: usize = 16;

impl Buffers {
    fn new(comm: &Communicator, case: Case) -> Result<Self> {
        let Case {
            form,
            dtype,
            rows,
            hidden,
            ..
        } = case;
        let registered = match case.memory {
            Memory::Registered => true,
            Memory::Ordinary => false,
            Memory::Mixed => comm.rank() % 2 == 1,
        };
        let get = |dtype, count: usize| {
            // All ranks allocate alike; who is to have ordinary memory takes that.
            let window = if case.memory == Memory::Ordinary {
                None
            } else {
                Some(comm.alloc(dtype, count)?)
            };
            match window {
                Some(window) if registered => Ok(window),
                _ => tensor(dtype, count),
            }
        };
        let shards = if case.route == Route::ReduceScatter {
            comm.size() as usize
        } else {
            1
        };
        let elements = rows * hidden;
        let input = get(dtype, shards * elements + GUARD)?;
        let kept_type = form.residual_type(dtype);
        let residual = get(kept_type, elements + GUARD)?;
        let in_place = case.in_place && form.written == Written::Same;
        let output = if in_place {
            let own = if shards > 1 {
                comm.rank() as usize * elements
            } else {
                0
            };
            input.slice(own, elements + GUARD)?
        } else {
            get(form.output_type(dtype), elements + GUARD)?
        };
        let kept = if case.in_place {
            residual.clone()
        } else {
            get(kept_type, elements + GUARD)?
        };
        let groups = form.groups(hidden);
        let stride = rows + 3;
        let scales = if form.column_major {
            groups * stride
        } else {
            groups * rows
        };
        let scale_type = if form.ue8m0 { DType::U8 } else { DType::F32 };
        Ok(Self {
            case,
            input,
            output,
            residual,
            kept,
            weight: get(dtype, hidden)?,
            bias: get(dtype, hidden)?,
            scales: get(scale_type, scales + GUARD)?,
            stride,
        })
    }

    fn elements(&self) -> usize {
        self.case.rows * self.case.hidden
    }

    /// Inputs of `round`; everything else poisoned.
    fn fill(&self, comm: &Communicator, round: u64) -> Result<()> {
        let (form, dtype, hidden) = (self.case.form, self.case.dtype, self.case.hidden);
        for poisoned in [&self.output, &self.kept, &self.scales] {
            let bytes = poisoned.len() * poisoned.dtype().size();
            poisoned.copy_from_bytes(&vec![0x5a; bytes])?;
        }
        put(
            &self.input,
            &inputs(self.case, comm.size(), round)[comm.rank() as usize],
        )?;
        put(&self.residual, &residual(self.case, comm, round))?;
        put(&self.weight, &fill(dtype, 0, round ^ 2, hidden))?;
        put(&self.bias, &fill(dtype, 0, round ^ 3, hidden))?;
        if form.written == Written::Given {
            put(&self.scales, &SCALE.to_le_bytes())?;
        }
        Ok(())
    }

    fn call(&self, comm: &Communicator, enqueued: bool) -> Result<()> {
        let Case {
            form,
            route,
            hidden,
            ..
        } = self.case;
        let elements = self.elements();
        let shards = self.input.len() / elements.max(1);
        let (input, output) = match route {
            Route::ReduceScatter => (
                self.input.slice(0, comm.size() as usize * elements)?,
                elements,
            ),
            Route::AllReduce(_) => (self.input.slice(0, elements)?, elements),
        };
        let _ = shards;
        let output = self.output.slice(0, output)?;
        let (residual, kept) = (
            self.residual.slice(0, elements)?,
            self.kept.slice(0, elements)?,
        );
        let mut norm = if form.layer {
            Norm::layer(&output, &input, &self.weight, EPSILON)
        } else {
            Norm::rms(&output, &input, &self.weight, EPSILON)
        };
        if form.bias {
            norm = norm.with_bias(&self.bias);
        }
        if form.unit_offset {
            norm = norm.with_unit_offset();
        }
        if form.residual {
            norm = norm.with_residual(&residual);
        }
        if form.keeps {
            norm = norm.with_residual_out(&kept);
        }
        let scales = self.scales.slice(0, self.scales.len() - GUARD)?;
        let given = self.scales.slice(0, 1)?;
        norm = match form.written {
            Written::Same => norm,
            Written::Given => norm.with_scale(&given),
            Written::Rows => norm.with_row_scales(&scales),
            Written::Groups => {
                let layout = if form.column_major {
                    ScaleLayout::ColumnMajor {
                        stride: self.stride,
                    }
                } else {
                    ScaleLayout::RowMajor
                };
                norm.with_group_scales(&scales, layout)
            }
        };
        let _ = hidden;
        match (route, enqueued) {
            (Route::ReduceScatter, false) => comm.reduce_scatter_norm(&norm),
            (Route::ReduceScatter, true) => comm.reduce_scatter_norm_async(&norm).map(drop),
            (Route::AllReduce(algorithm), _) => {
                let norm = norm.with_algorithm(algorithm);
                if enqueued {
                    comm.all_reduce_norm_async(&norm).map(drop)
                } else {
                    comm.all_reduce_norm(&norm)
                }
            }
        }
    }

    fn check(&self, comm: &Communicator, round: u64) -> Result<()> {
        let Case {
            form,
            dtype,
            rows,
            hidden,
            ..
        } = self.case;
        let mut inputs = inputs(self.case, comm.size(), round);
        if self.case.route == Route::ReduceScatter {
            let bytes = self.elements() * dtype.size();
            let at = comm.rank() as usize * bytes;
            inputs
                .iter_mut()
                .for_each(|rows| *rows = rows[at..at + bytes].to_vec());
        }
        let given = Given {
            inputs: &inputs,
            residual: &residual(self.case, comm, round),
            weight: &fill(dtype, 0, round ^ 2, hidden),
            bias: &fill(dtype, 0, round ^ 3, hidden),
            scale: SCALE,
        };
        let want = expected(&form, dtype, hidden, &given, EPSILON);
        self.same("output", &self.output, &want.output, round);
        if form.keeps {
            self.same("residual_out", &self.kept, &want.kept, round);
        }
        let groups = form.groups(hidden);
        let scales = self.scales.to_bytes()?;
        for row in 0..rows {
            for group in 0..groups {
                let at = if form.column_major {
                    group * self.stride + row
                } else {
                    row * groups + group
                };
                let want = want.scales[row * groups + group];
                let found = if form.ue8m0 {
                    2f64.powi(i32::from(scales[at]) - 127) as f32
                } else {
                    f32::from_le_bytes([
                        scales[4 * at],
                        scales[4 * at + 1],
                        scales[4 * at + 2],
                        scales[4 * at + 3],
                    ])
                };
                assert!(
                    found.to_bits() == want.to_bits(),
                    "{:?}, rank {}: scale of row {row}, group {group}: {found} instead of {want}",
                    self.case,
                    comm.rank()
                );
            }
        }
        if form.written == Written::Same {
            let found = widen(dtype, &self.output.to_bytes()?);
            // Three roundings of the type and the sums in f32.
            let bound = if dtype == DType::F32 { 1e-4 } else { 0.02 };
            for (i, want) in want.exact.iter().enumerate() {
                let off = (f64::from(found[i]) - want).abs();
                assert!(
                    off <= bound * (1.0 + want.abs()),
                    "{:?}: element {i}: {} but {want} in f64",
                    self.case,
                    found[i]
                );
            }
        }
        Ok(())
    }

    /// `want` at the beginning of `tensor`, poison behind it.
    fn same(&self, what: &str, tensor: &Tensor, want: &[u8], round: u64) {
        let found = tensor.to_bytes().expect("a copy");
        let at = want
            .iter()
            .zip(&found)
            .position(|(want, found)| want != found);
        assert!(
            at.is_none(),
            "{:?}, round {round}: {what} differs at byte {} of {}",
            self.case,
            at.unwrap_or(0),
            want.len()
        );
        // A guard in the input's or the residual's memory holds what these held.
        if !self.case.in_place {
            assert!(
                found[want.len()..].iter().all(|byte| *byte == 0x5a),
                "{:?}: {what}: written behind its end",
                self.case
            );
        }
    }
}

fn put(tensor: &Tensor, bytes: &[u8]) -> Result<()> {
    let part = tensor.slice(0, bytes.len() / tensor.dtype().size())?;
    part.copy_from_bytes(bytes)
}

fn inputs(case: Case, ranks: u32, round: u64) -> Vec<Vec<u8>> {
    let shards = if case.route == Route::ReduceScatter {
        ranks as usize
    } else {
        1
    };
    (0..ranks)
        .map(|rank| fill(case.dtype, rank, round, shards * case.rows * case.hidden))
        .collect()
}

fn residual(case: Case, comm: &Communicator, round: u64) -> Vec<u8> {
    let kept = case.form.residual_type(case.dtype);
    // The same on all ranks where they share rows.
    let rank = if case.route == Route::ReduceScatter {
        comm.rank()
    } else {
        0
    };
    let bytes = fill(case.dtype, rank, round ^ 1, case.rows * case.hidden);
    narrow(kept, &widen(case.dtype, &bytes))
}

fn options(setup: &Setup) -> Options {
    let mut options = setup.options();
    options.packet_slot_bytes = 32 << 10;
    options.staging_bytes = setup.staging;
    options
}

fn run(setup: &Setup, cases: &[Case]) {
    for result in run_threads(setup.ranks, &options(setup), |comm| {
        for (index, case) in cases.iter().enumerate() {
            let buffers = Buffers::new(&comm, *case)?;
            let round = index as u64 * 64;
            buffers.fill(&comm, round)?;
            comm.barrier()?;
            buffers.call(&comm, index % 2 == 1)?;
            comm.stream().synchronize()?;
            buffers.check(&comm, round)?;
            // Nobody poisons what a peer still checks.
            comm.barrier()?;
        }
        Ok(())
    }) {
        result.unwrap_or_else(|error| panic!("{setup:?}: {error}"));
    }
}

/// Every form and route, for one type, with memories and places in turn.
fn cases(dtype: DType, shapes: &[(usize, usize)]) -> Vec<Case> {
    let mut out = Vec::new();
    for (f, form) in Form::all().into_iter().enumerate() {
        for (r, route) in ROUTES.into_iter().enumerate() {
            for (s, (rows, hidden)) in shapes.iter().enumerate() {
                let turn = f + r + s;
                out.push(Case {
                    form,
                    route,
                    dtype,
                    rows: *rows,
                    hidden: *hidden,
                    memory: [Memory::Registered, Memory::Ordinary, Memory::Mixed][turn % 3],
                    in_place: turn % 4 == 3,
                });
            }
        }
    }
    out
}

#[test]
fn every_form_and_route() {
    for (index, ranks) in [1, 2, 3, 4, 8].into_iter().enumerate() {
        for blocks in [1, 3] {
            let setup = Setup {
                blocks,
                // Several rounds.
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
    // Packets have no room for them.
    list.retain(|case| case.route != Route::AllReduce(Algorithm::Packet) || case.hidden == 8192);
    run(&setup, &list);
}

#[test]
fn lanes_give_the_same_bits() {
    if device().is_gpu() {
        println!("lanes are those of the GPU");
        return;
    }
    let runs = [
        (32, 2, DType::Bf16),
        (64, 3, DType::F32),
        (32, 4, DType::F16),
    ];
    for (lanes, ranks, dtype) in runs {
        let setup = Setup {
            lanes,
            staging: 128 << 10,
            ..Setup::new(ranks)
        };
        run(&setup, &cases(dtype, &[(2, 136), (0, 8), (1, 1040)]));
    }
}

#[test]
fn graphs_replay_with_changing_inputs() {
    let setup = Setup {
        staging: 128 << 10,
        ..Setup::new(3)
    };
    for result in run_threads(setup.ranks, &options(&setup), |comm| {
        for (index, dtype) in FLOATS.into_iter().enumerate() {
            let mut list = cases(dtype, &[(4, 520)]);
            // Two forms of every route in each type.
            list.retain(|case| (case.rows + case.hidden + index) > 0);
            let buffers = list
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
fn a_row_does_not_depend_on_how_many_there_are() {
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
    // A NaN makes its row NaN, and its scale; a row of zeros stays one; others are as without them.
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
