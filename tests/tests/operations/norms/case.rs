//! Runs a case of a fused norm: allocates and fills the buffers, calls the norm, and compares the
//! results with the oracle.

use fusewire::{Algorithm, Communicator, DType, Norm, Options, Result, ScaleLayout, Tensor};
use fusewire_tests::device::{run_threads, tensor};
use fusewire_tests::norm::{NormForm, NormInputs, OutputFormat, expected};
use fusewire_tests::oracle::{fill, narrow, widen};
use fusewire_tests::runner::Setup;

pub(super) const EPSILON: f32 = 1e-6;
pub(super) const SCALE: f32 = 0.37;
pub(super) const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];

/// Operation that reduces the rows over the ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    AllReduce(Algorithm),
    ReduceScatter,
}

impl Route {
    /// Returns the number of rows of the input per row of the result.
    pub(super) fn shards(self, ranks: u32) -> usize {
        if self == Self::ReduceScatter {
            ranks as usize
        } else {
            1
        }
    }
}

pub(super) const ROUTES: [Route; 4] = [
    Route::AllReduce(Algorithm::Packet),
    Route::AllReduce(Algorithm::Signal),
    Route::AllReduce(Algorithm::TwoShot),
    Route::ReduceScatter,
];

/// Kind of memory of the buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    Registered,
    Ordinary,
    /// Buffers are in windows on odd ranks only.
    Mixed,
}

/// One case.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) form: NormForm,
    pub(super) route: Route,
    pub(super) dtype: DType,
    /// Rows of a rank's result.
    pub(super) rows: usize,
    pub(super) hidden: usize,
    pub(super) memory: Memory,
    /// If true, the output overwrites the input, and the sum overwrites the residual.
    pub(super) in_place: bool,
}

/// Buffers of a case on a rank.
pub(super) struct Buffers {
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

/// Number of guard elements after each output, which must not change.
const GUARD: usize = 16;

impl Buffers {
    pub(super) fn new(comm: &Communicator, case: Case) -> Result<Self> {
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
            // All ranks must allocate the window, including ranks that use unregistered memory.
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
        let shards = case.route.shards(comm.size());
        let elements = rows * hidden;
        let input = get(dtype, shards * elements + GUARD)?;
        let kept_type = form.residual_type(dtype);
        let residual = get(kept_type, elements + GUARD)?;
        let in_place = case.in_place && form.output_format == OutputFormat::Unquantized;
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

    /// Writes the inputs of `round` and poisons the outputs.
    pub(super) fn fill(&self, comm: &Communicator, round: u64) -> Result<()> {
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
        if form.output_format == OutputFormat::Static {
            put(&self.scales, &SCALE.to_le_bytes())?;
        }
        Ok(())
    }

    pub(super) fn call(&self, comm: &Communicator, enqueued: bool) -> Result<()> {
        let Case { form, route, .. } = self.case;
        let elements = self.elements();
        let shards = route.shards(comm.size());
        let input = self.input.slice(0, shards * elements)?;
        let output = self.output.slice(0, elements)?;
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
        norm = match form.output_format {
            OutputFormat::Unquantized => norm,
            OutputFormat::Static => norm.with_scale(&given),
            OutputFormat::Rows => norm.with_row_scales(&scales),
            OutputFormat::Groups => {
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

    pub(super) fn check(&self, comm: &Communicator, round: u64) -> Result<()> {
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
        let given = NormInputs {
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
        if form.output_format == OutputFormat::Unquantized {
            let found = widen(dtype, &self.output.to_bytes()?);
            // The bound covers three roundings to the type, and the error of sums in f32.
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

    /// Checks that `tensor` begins with `want`, followed by poison.
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
        // If the norm is in place, the guard elements hold inputs instead of poison.
        if !self.case.in_place {
            assert!(
                found[want.len()..].iter().all(|byte| *byte == 0x5a),
                "{:?}: {what}: written after its end",
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
    let shards = case.route.shards(ranks);
    (0..ranks)
        .map(|rank| fill(case.dtype, rank, round, shards * case.rows * case.hidden))
        .collect()
}

fn residual(case: Case, comm: &Communicator, round: u64) -> Vec<u8> {
    let kept = case.form.residual_type(case.dtype);
    // The residual is equal on all ranks, unless each rank has different rows.
    let rank = if case.route == Route::ReduceScatter {
        comm.rank()
    } else {
        0
    };
    let bytes = fill(case.dtype, rank, round ^ 1, case.rows * case.hidden);
    narrow(kept, &widen(case.dtype, &bytes))
}

pub(super) fn options(setup: &Setup) -> Options {
    let mut options = setup.options();
    // Room for a row of 4104 elements of f32.
    options.packet_slot_bytes = 40 << 10;
    options.staging_bytes = setup.staging;
    options
}

pub(super) fn run(setup: &Setup, cases: &[Case]) {
    for result in run_threads(setup.ranks, &options(setup), |comm| {
        for (index, case) in cases.iter().enumerate() {
            let buffers = Buffers::new(&comm, *case)?;
            let round = index as u64 * 64;
            buffers.fill(&comm, round)?;
            comm.barrier()?;
            buffers.call(&comm, index % 2 == 1)?;
            comm.stream().synchronize()?;
            buffers.check(&comm, round)?;
            // No rank poisons its memory before all ranks have checked their results.
            comm.barrier()?;
        }
        Ok(())
    }) {
        result.unwrap_or_else(|error| panic!("{setup:?}: {error}"));
    }
}

/// Returns one case per form, route and shape for one type. The cases alternate between the kinds
/// of memory.
pub(super) fn cases(dtype: DType, shapes: &[(usize, usize)]) -> Vec<Case> {
    let mut out = Vec::new();
    for (f, form) in NormForm::all().into_iter().enumerate() {
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
