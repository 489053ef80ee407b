//! Measures all-reduce: Fusewire with every algorithm, the baseline's five kernels, and a copy of
//! the same number of bytes.

use anyhow::Result;
use fusewire::{CallOptions, Communicator, DType, Op, ReduceOp, Tensor};

use super::benchmark::{AUTO, Benchmark, Candidate, Mode, Side, Stage, Step};
use super::buffers::{Buffers, Packets};
use super::entries::{Entry, Kernel, VECTOR, Values};
use super::module::Baseline;
use super::report::Row;
use super::{Shape, data};

/// Largest inputs, in bytes, for which the packet kernels are measured: the one-shot kernel up to
/// `ONE_SHOT_BYTES`, and the two-shot kernel up to `TWO_SHOT_BYTES`.
pub(crate) const ONE_SHOT_BYTES: usize = 256 << 10;
pub(crate) const TWO_SHOT_BYTES: usize = 1 << 20;

/// Returns the number of blocks that have work: one block per `threads` vectors, at most `blocks`.
pub(crate) fn grid(vectors: usize, threads: u32, blocks: u32) -> u32 {
    let wanted = vectors.div_ceil(threads as usize).max(1);
    u32::try_from(wanted).map_or(blocks, |wanted| wanted.min(blocks))
}

/// State of one rank for the measurements.
#[derive(Debug)]
pub(crate) struct RankPart<'a> {
    pub(crate) benchmark: &'a Benchmark<'a>,
    pub(crate) comm: &'a Communicator,
    pub(crate) baseline: &'a Baseline,
    pub(crate) buffers: &'a Buffers,
    pub(crate) shape: Shape,
}

/// Input and output of a rank, and their addresses on every rank.
#[derive(Debug)]
pub(crate) struct Operands {
    pub(crate) input: Tensor,
    pub(crate) output: Tensor,
    pub(crate) inputs: Vec<u64>,
    pub(crate) outputs: Vec<u64>,
}

impl RankPart<'_> {
    fn rank(&self) -> usize {
        self.benchmark.rank
    }

    /// Allocates registered memory for `count` elements and exchanges the addresses with the other
    /// ranks.
    pub(crate) fn operands(&self, dtype: DType, count: usize) -> Result<Operands> {
        let input = self.comm.alloc(dtype, count)?;
        let output = self.comm.alloc(dtype, count)?;
        let rendezvous = self.benchmark.rendezvous;
        Ok(Operands {
            inputs: rendezvous.exchange(self.rank(), input.as_ptr() as u64)?,
            outputs: rendezvous.exchange(self.rank(), output.as_ptr() as u64)?,
            input,
            output,
        })
    }

    /// Measures all sizes of a type.
    pub(crate) fn all_sizes(
        &self,
        dtype: DType,
        sizes: &[usize],
        modes: &[Mode],
        say: impl Fn(&Row),
    ) -> Result<Vec<Row>> {
        let most = sizes.iter().copied().max().unwrap_or(0);
        let width = data::size(dtype);
        let operands = self.operands(dtype, most / width)?;
        let (rank, ranks) = (self.rank(), self.shape.ranks);
        // Candidates alternate between two sets of values, so that stale results are detected.
        let own = [0, 1].map(|salt| data::input(dtype, rank, most / width, salt));
        let sums = [0, 1].map(|salt| data::sum(dtype, ranks, most / width, salt));
        let mut rows = Vec::new();
        for &bytes in sizes {
            let part = Operands {
                input: operands.input.slice(0, bytes / width)?,
                output: operands.output.slice(0, bytes / width)?,
                inputs: operands.inputs.clone(),
                outputs: operands.outputs.clone(),
            };
            for &mode in modes {
                let mut candidates = self.ours(&part, dtype)?;
                candidates.extend(self.theirs(&part, dtype, bytes)?);
                candidates.push(self.copy(&part, bytes)?);
                let spoil = |turn: usize| {
                    part.input.copy_from_bytes(&own[turn % 2][..bytes])?;
                    Ok(part.output.copy_from_bytes(&vec![0xff; bytes])?)
                };
                let check = |stage: Stage| {
                    let got = part.output.to_bytes()?;
                    let expected = match stage.side {
                        Side::Floor => &own[stage.index % 2],
                        _ => &sums[stage.index % 2],
                    };
                    Ok(data::differing(dtype, &got, &expected[..bytes]))
                };
                let figures = self.benchmark.compare(mode, candidates, spoil, check)?;
                let row = Row {
                    ranks,
                    dtype: dtype.name().to_owned(),
                    bytes,
                    tokens: 0,
                    moe: None,
                    mode,
                    blocks: self.shape.blocks,
                    threads: self.shape.threads,
                    figures,
                };
                if rank == 0 {
                    say(&row);
                }
                rows.push(row);
            }
        }
        Ok(rows)
    }

    /// Returns Fusewire's candidates for this size. The first uses the plan's choice of algorithm;
    /// the others use the other algorithms.
    pub(crate) fn ours(&self, operands: &Operands, dtype: DType) -> Result<Vec<Candidate>> {
        let mut taken = Vec::new();
        let mut list = Vec::new();
        for wanted in [AUTO, "packet", "packet_two_shot", "signal", "two_shot"] {
            let options = CallOptions::new().hint("algorithm", wanted);
            let comm = self.comm.with_options(&options)?;
            let op = Op::AllReduce {
                count: operands.input.len(),
                dtype,
                reduction: ReduceOp::Sum.code(),
            };
            let plan = comm.plan(&op)?;
            if taken.contains(&plan.algorithm) {
                continue;
            }
            taken.push(plan.algorithm);
            list.push(Candidate {
                name: if wanted == AUTO {
                    format!("{AUTO}: {}", plan.algorithm)
                } else {
                    plan.algorithm.to_string()
                },
                side: Side::Ours,
                waits: (0, 0, 0),
                steps: vec![Step::AllReduce {
                    comm,
                    input: operands.input.clone(),
                    output: operands.output.clone(),
                }],
                is_split: false,
            });
        }
        Ok(list)
    }

    /// Returns the baseline's kernels for this size. Each kernel is launched with one block per
    /// `threads` vectors of work, but with no more blocks than Fusewire's kernels.
    pub(crate) fn theirs(
        &self,
        operands: &Operands,
        dtype: DType,
        bytes: usize,
    ) -> Result<Vec<Candidate>> {
        let Shape {
            ranks,
            blocks,
            threads,
        } = self.shape;
        let vectors = bytes / VECTOR;
        let part = vectors.div_ceil(ranks);
        let with = |packets: &Packets| Values {
            pads: packets.pads.addresses(),
            buffers: packets.buffers.addresses(),
            capacity: packets.capacity,
            ..Values::default()
        };
        let plain = || Values {
            pads: self.buffers.pads.addresses(),
            ..Values::default()
        };
        let all = [
            (Kernel::OneStage, vectors, usize::MAX, plain()),
            (Kernel::TwoStagePull, part, usize::MAX, plain()),
            (Kernel::TwoStagePush, part, usize::MAX, plain()),
            (
                Kernel::PacketsOneShot,
                vectors,
                ONE_SHOT_BYTES,
                with(&self.buffers.one_shot),
            ),
            (
                Kernel::PacketsTwoShot,
                part,
                TWO_SHOT_BYTES,
                with(&self.buffers.two_shot),
            ),
        ];
        let possible = all.into_iter().filter(|(_, _, most, _)| bytes <= *most);
        possible
            .map(|(kernel, work, _, values)| {
                let values = Values {
                    rank: self.rank() as u32,
                    inputs: operands.inputs.clone(),
                    outputs: operands.outputs.clone(),
                    scratches: self.buffers.scratches.addresses(),
                    input: operands.inputs[self.rank()],
                    output: operands.outputs[self.rank()],
                    vectors: u32::try_from(vectors)?,
                    ..values
                };
                let entry = Entry {
                    kernel,
                    dtype,
                    ranks,
                };
                let blocks = grid(work, threads, blocks);
                let launch = self
                    .baseline
                    .launch(entry, &values, blocks, threads, ranks as u32)?;
                Ok(Candidate {
                    name: kernel.name().to_owned(),
                    side: Side::Theirs,
                    waits: kernel.waits(),
                    steps: vec![Step::Launch(launch)],
                    is_split: false,
                })
            })
            .collect()
    }

    /// Returns a candidate that copies each rank's input to its output, with the same number of
    /// blocks.
    fn copy(&self, operands: &Operands, bytes: usize) -> Result<Candidate> {
        let entry = Entry {
            kernel: Kernel::Copy,
            dtype: DType::F32,
            ranks: 1,
        };
        let vectors = bytes / VECTOR;
        let values = Values {
            input: operands.inputs[self.rank()],
            output: operands.outputs[self.rank()],
            vectors: u32::try_from(vectors)?,
            ..Values::default()
        };
        let Shape {
            blocks, threads, ..
        } = self.shape;
        let blocks = grid(vectors, threads, blocks);
        let launch = self.baseline.launch(entry, &values, blocks, threads, 0)?;
        Ok(Candidate {
            name: "copy".to_owned(),
            side: Side::Floor,
            waits: (0, 0, 0),
            steps: vec![Step::Launch(launch)],
            is_split: false,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::grid;

    #[test]
    fn grids_have_the_blocks_that_have_work() {
        assert_eq!(grid(32, 512, 16), 1);
        assert_eq!(grid(513, 512, 16), 2);
        assert_eq!(grid(1 << 22, 512, 16), 16);
        assert_eq!(grid(0, 512, 16), 1);
    }
}
