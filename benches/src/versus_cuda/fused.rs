//! Measures all-reduce, residual and RMSNorm, in one launch and in two.

use anyhow::{Context, Result};
use fusewire::{DType, Tensor};

use super::all_reduce::{Operands, RankPart};
use super::benchmark::{Candidate, Mode, NormBuffers, Side, Stage, Step};
use super::data::{self, Norm};
use super::entries::{Entry, Kernel, VECTOR, Values, WIDTHS};
use super::report::Row;

const EPSILON: f32 = 1e-6;
const DTYPE: DType = DType::Bf16;

/// Returns the number of vectors in a row.
pub(crate) fn row_vectors(hidden: usize) -> usize {
    hidden * data::size(DTYPE) / VECTOR
}

/// Returns the number of vectors of a row that each thread processes, or `None` if no kernel is
/// compiled for that number.
pub(crate) fn vectors_of_thread(hidden: usize, threads: u32) -> Option<u32> {
    let needed = row_vectors(hidden).div_ceil(threads as usize);
    WIDTHS.into_iter().find(|width| *width as usize >= needed)
}

/// Memory of one rank.
struct Memory {
    operands: Operands,
    residual: Tensor,
    weight: Tensor,
    residual_out: Tensor,
    output: Tensor,
}

impl RankPart<'_> {
    /// Measures all numbers of tokens, with captured graphs.
    pub(crate) fn all_tokens(
        &self,
        tokens: &[usize],
        hidden: usize,
        say: impl Fn(&Row),
    ) -> Result<Vec<Row>> {
        let most = tokens.iter().copied().max().unwrap_or(0);
        let (rank, ranks) = (self.benchmark.rank, self.shape.ranks);
        let norm = |rows, turn: usize| Norm {
            dtype: DTYPE,
            ranks,
            rows,
            hidden,
            epsilon: EPSILON,
            salt: turn % 2,
        };
        let operands = self.operands(DTYPE, most * hidden)?;
        let tensor = |count| self.comm.tensor(DTYPE, count);
        let memory = Memory {
            operands,
            residual: tensor(most * hidden)?,
            weight: tensor(hidden)?,
            residual_out: tensor(most * hidden)?,
            output: tensor(most * hidden)?,
        };
        // Candidates alternate between two sets of values, so that stale results are detected.
        let own = [0, 1].map(|salt| data::input(DTYPE, rank, most * hidden, salt));
        memory.residual.copy_from_bytes(&norm(most, 0).residual())?;
        memory.weight.copy_from_bytes(&norm(most, 0).weight())?;
        let mut rows = Vec::new();
        for &count in tokens {
            let candidates = self.norms(&memory, count, hidden)?;
            let residual_out = memory.residual_out.slice(0, count * hidden)?;
            let output = memory.output.slice(0, count * hidden)?;
            let input = memory.operands.input.slice(0, count * hidden)?;
            let bytes = count * hidden * data::size(DTYPE);
            let spoil = |turn: usize| {
                input.copy_from_bytes(&own[turn % 2][..bytes])?;
                residual_out.copy_from_bytes(&vec![0xff; bytes])?;
                Ok(output.copy_from_bytes(&vec![0xff; bytes])?)
            };
            let check = |stage: Stage| {
                let expected = norm(count, stage.index);
                let added = residual_out.to_bytes()?;
                let wrong = data::differing(DTYPE, &added, &expected.residual_out());
                Ok(wrong + expected.wrong(&output.to_bytes()?))
            };
            let figures = self
                .benchmark
                .compare(Mode::Graph, candidates, spoil, check)?;
            let row = Row {
                ranks,
                dtype: DTYPE.name().to_owned(),
                bytes,
                tokens: count,
                moe: None,
                mode: Mode::Graph,
                blocks: self.shape.blocks,
                threads: self.shape.threads,
                figures,
            };
            if rank == 0 {
                say(&row);
            }
            rows.push(row);
        }
        Ok(rows)
    }

    fn norms(&self, memory: &Memory, rows: usize, hidden: usize) -> Result<Vec<Candidate>> {
        let count = rows * hidden;
        let width = vectors_of_thread(hidden, self.shape.threads)
            .with_context(|| format!("rows of {hidden} elements are too long"))?;
        let reduced = Operands {
            input: memory.operands.input.slice(0, count)?,
            output: memory.operands.output.slice(0, count)?,
            inputs: memory.operands.inputs.clone(),
            outputs: memory.operands.outputs.clone(),
        };
        let buffers = NormBuffers {
            input: reduced.input.clone(),
            residual: memory.residual.slice(0, count)?,
            weight: memory.weight.clone(),
            residual_out: memory.residual_out.slice(0, count)?,
            output: memory.output.slice(0, count)?,
            epsilon: EPSILON,
        };
        let values = self.values(&buffers, &reduced, rows, hidden)?;
        let mut list = vec![Candidate {
            name: "fused".to_owned(),
            side: Side::Ours,
            waits: (0, 0, 0),
            steps: vec![Step::Norm {
                comm: self.comm.clone(),
                buffers: Box::new(buffers),
            }],
            is_split: false,
        }];
        for kernel in [Kernel::NormByBarrier(width), Kernel::NormByPackets(width)] {
            list.push(self.fused(kernel, &values, rows)?);
        }
        let bytes = count * data::size(DTYPE);
        let ours = self.ours(&reduced, DTYPE)?.into_iter();
        let ours = ours.map(|candidate| (candidate, Side::OursApart));
        let theirs = self.theirs(&reduced, DTYPE, bytes)?.into_iter();
        let theirs = theirs.map(|candidate| (candidate, Side::TheirsApart));
        for (mut candidate, side) in ours.chain(theirs) {
            candidate.name = format!("{}, then norm_alone", candidate.name);
            candidate.side = side;
            candidate.steps.push(self.alone(width, &values, rows)?);
            list.push(candidate);
        }
        Ok(list)
    }

    fn values(
        &self,
        buffers: &NormBuffers,
        reduced: &Operands,
        rows: usize,
        hidden: usize,
    ) -> Result<Values> {
        let at = |tensor: &Tensor| tensor.as_ptr() as u64;
        Ok(Values {
            rank: self.benchmark.rank as u32,
            inputs: reduced.inputs.clone(),
            outputs: reduced.outputs.clone(),
            pads: self.buffers.pads.addresses(),
            input: at(&buffers.input),
            output: at(&buffers.output),
            residual: at(&buffers.residual),
            residual_out: at(&buffers.residual_out),
            weight: at(&buffers.weight),
            rows: u32::try_from(rows)?,
            width: u32::try_from(row_vectors(hidden))?,
            epsilon: buffers.epsilon,
            ..Values::default()
        })
    }

    /// Returns a candidate with a single launch. The grid has one block per row, but at most as
    /// many blocks as Fusewire's grid.
    fn fused(&self, kernel: Kernel, values: &Values, rows: usize) -> Result<Candidate> {
        let packets = &self.buffers.norm;
        let values = match kernel {
            Kernel::NormByPackets(_) => Values {
                pads: packets.pads.addresses(),
                buffers: packets.buffers.addresses(),
                capacity: packets.capacity,
                ..values.clone()
            },
            _ => values.clone(),
        };
        let entry = Entry {
            kernel,
            dtype: DTYPE,
            ranks: self.shape.ranks,
        };
        let blocks = self.shape.blocks.min(u32::try_from(rows)?).max(1);
        let launch = self.baseline.launch(
            entry,
            &values,
            blocks,
            self.shape.threads,
            self.shape.ranks as u32,
        )?;
        Ok(Candidate {
            name: kernel.name().to_owned(),
            side: Side::Theirs,
            waits: kernel.waits(),
            steps: vec![Step::Launch(launch)],
            is_split: false,
        })
    }

    /// Returns a launch of the norm without communication, for the output of an all-reduce. No
    /// block waits for a peer, so the grid has one block per row.
    fn alone(&self, width: u32, values: &Values, rows: usize) -> Result<Step> {
        let entry = Entry {
            kernel: Kernel::NormAlone(width),
            dtype: DTYPE,
            ranks: 1,
        };
        let values = Values {
            input: values.outputs[self.benchmark.rank],
            ..values.clone()
        };
        let blocks = u32::try_from(rows)?.clamp(1, 256);
        let launch = self
            .baseline
            .launch(entry, &values, blocks, self.shape.threads, 0)?;
        Ok(Step::Launch(launch))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_dealt_out() {
        assert_eq!(row_vectors(7168), 896);
        assert_eq!(vectors_of_thread(7168, 512), Some(2));
        assert_eq!(vectors_of_thread(4096, 512), Some(1));
        assert_eq!(vectors_of_thread(16384, 512), Some(4));
        assert_eq!(vectors_of_thread(16392, 512), None);
    }
}
