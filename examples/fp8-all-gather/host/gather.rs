//! The part of the example that runs on the host: memory, launches, and a reference. The program
//! and the tests share it.

use fusewire::{Bf16, Communicator, DType, E4m3, GraphExec, Result, Tensor, Window, WindowOptions};
use fusewire_fp8_all_gather::{GATHER_ROWS, GatherRows};

/// Returns `count` rows of random elements. The rows have different magnitudes.
pub(crate) fn random_rows(count: usize, width: usize, seed: u64) -> Vec<Bf16> {
    let element = |index| {
        // From -1 to 1, in steps of 2^-23.
        let number = (random(seed, index) >> 8) as f32 / (1 << 23) as f32 - 1.0;
        // From 2^-8 to 2^7.
        let magnitude = f32::from_bits((127 - 8 + random(!seed, index / width) % 16) << 23);
        Bf16::from_f32(number * magnitude)
    };
    (0..count * width).map(element).collect()
}

/// Returns a number that looks random, and depends only on `seed` and `index`.
pub(crate) fn random(seed: u64, index: usize) -> u32 {
    let mut x = (seed << 32 ^ index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x ^= x >> 29;
    (x.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32
}

/// The rows of all ranks and their scales. Scales are stored as bits, so a comparison finds every
/// difference.
#[derive(Debug, PartialEq)]
pub(crate) struct Gathered {
    pub(crate) rows: Vec<E4m3>,
    pub(crate) scales: Vec<u32>,
}

/// Returns the results for the inputs of all ranks. They are equal on all ranks.
pub(crate) fn expected(inputs: &[Vec<Bf16>], width: usize) -> Gathered {
    let (mut rows, mut scales) = (Vec::new(), Vec::new());
    for row in inputs.iter().flat_map(|input| input.chunks_exact(width)) {
        let values = row.iter().map(|value| value.to_f32());
        let greatest = values
            .clone()
            .fold(1e-10, |greatest: f32, value| greatest.max(value.abs()));
        let scale = if values.clone().any(f32::is_nan) {
            f32::NAN
        } else {
            greatest / 448.0
        };
        rows.extend(values.map(|value| match value * (1.0 / scale) {
            scaled if scaled.is_nan() => E4m3(0x7f),
            scaled => E4m3::from_f32(scaled),
        }));
        scales.push(scale.to_bits());
    }
    Gathered { rows, scales }
}

/// Memory of the operation on a rank.
pub(crate) struct Fp8Gather<'c> {
    comm: &'c Communicator,
    width: u32,
    x: Tensor,
    rows: Window,
    scales: Window,
}

impl<'c> Fp8Gather<'c> {
    /// Allocates memory for `count` rows of each rank, and loads the kernel. All ranks together.
    pub(crate) fn new(comm: &'c Communicator, count: usize, width: usize) -> Result<Self> {
        let all = comm.size() as usize * count;
        // By default, a window has a signal for each rank. The kernel needs one.
        let window = |dtype, elements| comm.alloc_window(dtype, elements, WindowOptions::default());
        let gather = Self {
            comm,
            width: width as u32,
            x: comm.tensor(DType::Bf16, count * width)?,
            rows: window(DType::E4m3, all * width)?,
            scales: window(DType::F32, all)?,
        };
        // On a GPU, loading a kernel may wait for running kernels. All ranks therefore load the
        // kernel before the first of them launches it.
        comm.warm_up_kernel(&GATHER_ROWS)?;
        comm.barrier()?;
        Ok(gather)
    }

    /// Gathers the rows of all ranks once; `x` has those of this rank. All ranks together.
    pub(crate) fn run(&self, x: &[Bf16]) -> Result<Gathered> {
        self.write(x)?;
        self.comm.kernel(self.arguments()).launch()?;
        self.read()
    }

    /// Captures the kernel as a graph. [`Fp8Gather::write`] sets the rows of a replay, and
    /// [`Fp8Gather::read`] returns its results.
    pub(crate) fn capture(&self) -> Result<GraphExec> {
        self.comm.stream().begin_capture()?;
        let enqueued = self.comm.kernel(self.arguments()).enqueue();
        let graph = self.comm.stream().end_capture()?;
        enqueued?;
        graph.instantiate()
    }

    /// Copies the rows of this rank to the device.
    pub(crate) fn write(&self, x: &[Bf16]) -> Result<()> {
        self.x.copy_from(x)
    }

    /// Returns the results of the last launch or replay.
    pub(crate) fn read(&self) -> Result<Gathered> {
        let scales: Vec<f32> = self.scales.tensor().to_vec()?;
        Ok(Gathered {
            rows: self.rows.tensor().to_vec()?,
            scales: scales.into_iter().map(f32::to_bits).collect(),
        })
    }

    /// Frees the windows. All ranks together.
    pub(crate) fn free(self) -> Result<()> {
        self.rows.free()?;
        self.scales.free()
    }

    /// Returns the arguments of a launch.
    pub(crate) fn arguments(&self) -> GatherRows<'_> {
        GatherRows {
            x: (&self.x).into(),
            width: self.width,
            rows: (&self.rows).into(),
            scales: (&self.scales).into(),
        }
    }
}
