//! Runs cases on one rank. Buffers lie between guard zones. All memory is poisoned before a call
//! and compared byte for byte afterwards.

use core::ops::Range;
use std::collections::HashMap;

use fusewire::GraphExec;
use fusewire::{Communicator, DType, Operation, Result, Tensor, Work};

use crate::call::{self, Buffers};
use crate::cases::{Case, Memory};
use crate::device;
use crate::oracle::{self, Shape};

/// Form of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallMode {
    /// Blocking.
    Blocking,
    /// Enqueued, then waited for.
    Async,
    /// Captured once and replayed twice with different inputs.
    Graph,
}

/// Number of guard elements between buffers. No operation may write them.
const GUARD: usize = 96;
/// Number of wrong cases that are described. Later wrong cases are not recorded.
const DESCRIBED: usize = 5;

/// A rank that runs cases.
#[derive(Debug)]
pub struct Rank {
    comm: Communicator,
    mode: CallMode,
    registered: HashMap<DType, Tensor>,
    ordinary: HashMap<DType, Tensor>,
    wrong: Vec<String>,
    calls: u64,
}

/// The buffers of a case, as element ranges of one allocation. Equal ranges are the same buffer.
#[derive(Clone, Debug, Default)]
pub struct BufferRanges {
    /// The input.
    pub input: Range<usize>,
    /// The output.
    pub output: Range<usize>,
    /// The residual that the fused norm reads.
    pub residual: Range<usize>,
    /// The weight of the fused norm.
    pub weight: Range<usize>,
    /// The residual that the fused norm writes.
    pub residual_out: Range<usize>,
    /// Total number of elements, guard zones included.
    pub total: usize,
}

impl BufferRanges {
    /// Lays out the buffers of `case` on `rank`.
    pub fn new(case: &Case, ranks: u32, rank: u32) -> Self {
        let shape = Shape::new(case, ranks, rank);
        let mut at = 0;
        let mut step = 0;
        let mut next = |count: usize| {
            step += 1;
            at += GUARD + case.offset * (rank as usize + step);
            if case.operation == Operation::AllReduceNorm && device().is_gpu() {
                // The fused norm requires an alignment of 16 bytes on a GPU.
                at = at.next_multiple_of(8);
            }
            let start = at;
            at += count;
            start..start + count
        };
        let mut ranges = Self::default();
        let in_place = case.in_place || case.operation == Operation::Broadcast;
        if case.operation == Operation::AllReduceNorm {
            ranges.input = next(shape.input);
            ranges.residual = next(shape.input);
            ranges.weight = next(case.hidden);
            (ranges.output, ranges.residual_out) = if case.in_place {
                (ranges.input.clone(), ranges.residual.clone())
            } else {
                (next(shape.output), next(shape.output))
            };
        } else if let Some(inner) = shape.in_place.filter(|_| in_place) {
            let outer = next(shape.input.max(shape.output));
            let part = |count: usize| outer.start + inner..outer.start + inner + count;
            if shape.input >= shape.output {
                ranges.output = part(shape.output);
                ranges.input = outer;
            } else {
                ranges.input = part(shape.input);
                ranges.output = outer;
            }
        } else {
            ranges.input = next(shape.input);
            ranges.output = next(shape.output);
        }
        ranges.total = at + GUARD;
        ranges
    }
}

/// Compares memory with its expected contents byte for byte.
///
/// # Errors
/// Returns the first difference, with its position in `ranges`.
pub fn compare(
    must: &[u8],
    is: &[u8],
    ranges: &BufferRanges,
    size: usize,
) -> core::result::Result<(), String> {
    let Some(byte) = must.iter().zip(is).position(|(must, is)| must != is) else {
        return Ok(());
    };
    let element = byte / size;
    let named = [
        ("output", &ranges.output),
        ("residual_out", &ranges.residual_out),
        ("input", &ranges.input),
        ("residual", &ranges.residual),
        ("weight", &ranges.weight),
    ];
    let position = named
        .into_iter()
        .find(|(_, range)| range.contains(&element))
        .map_or_else(
            || format!("guard zone element {element}"),
            |(name, range)| format!("{name}[{}] of {}", element - range.start, range.len()),
        );
    let bytes = element * size..(element + 1) * size;
    let wrong = must.iter().zip(is).filter(|(must, is)| must != is).count();
    Err(format!(
        "{position}: {:02x?} instead of {:02x?}; {wrong} bytes differ",
        &is[bytes.clone()],
        &must[bytes]
    ))
}

impl Rank {
    /// Creates a rank of `comm` with memory for `cases`. All ranks must call this function with
    /// equal cases.
    ///
    /// # Errors
    /// Returns the errors of allocation.
    pub fn new(comm: Communicator, mode: CallMode, cases: &[Case]) -> Result<Self> {
        let (ranks, rank) = (comm.size(), comm.rank());
        let (mut registered, mut ordinary) = (HashMap::new(), HashMap::new());
        for dtype in DType::ALL {
            let most = |rank: u32| {
                let cases = cases.iter().filter(|case| case.dtype == dtype);
                cases
                    .map(|case| BufferRanges::new(case, ranks, rank).total)
                    .max()
            };
            let Some(count) = (0..ranks).filter_map(most).max() else {
                continue;
            };
            registered.insert(dtype, comm.alloc(dtype, count)?);
            ordinary.insert(dtype, comm.tensor(dtype, count)?);
        }
        debug_assert!(rank < ranks);
        Ok(Self {
            comm,
            mode,
            registered,
            ordinary,
            wrong: Vec::new(),
            calls: 0,
        })
    }

    /// Returns the communicator.
    pub fn comm(&self) -> &Communicator {
        &self.comm
    }

    /// Runs `case` on this rank's memory and records wrong results.
    ///
    /// # Errors
    /// Returns the operation's error. In these tests, every call must succeed.
    pub fn run(&mut self, case: &Case) -> Result<()> {
        if case.operation == Operation::Send && self.comm.size() == 1 {
            return Ok(());
        }
        match self.mode {
            CallMode::Blocking => self.once(case, Self::blocking),
            CallMode::Async => self.once(case, |rank, case, ranges, memory| {
                for work in rank.enqueue(case, ranges, memory)? {
                    work.wait_blocking()?;
                }
                Ok(())
            }),
            CallMode::Graph => {
                let ranges = BufferRanges::new(case, self.comm.size(), self.comm.rank());
                let memory = self.memory(case);
                let graph = self.capture(case, &ranges, &memory)?;
                for _ in 0..2 {
                    self.once(case, |rank, _, _, _| graph.run(rank.comm.stream()))?;
                }
                Ok(())
            }
        }
    }

    /// Runs `case` in its blocking form, and calls `tamper` on the memory before the comparison.
    /// Used for negative controls, in which the comparison must detect the change.
    ///
    /// # Errors
    /// Returns the operation's error.
    pub fn run_tampered(
        &mut self,
        case: &Case,
        tamper: impl FnOnce(&mut [u8], &BufferRanges),
    ) -> Result<()> {
        self.once(case, |rank, case, ranges, memory| {
            rank.blocking(case, ranges, memory)?;
            let part = memory.slice(0, ranges.total)?;
            let mut bytes = part.to_bytes()?;
            tamper(&mut bytes, ranges);
            part.copy_from_bytes(&bytes)
        })
    }

    /// Returns the number of calls and the descriptions of wrong results.
    pub fn finish(self) -> (u64, Vec<String>) {
        (self.calls, self.wrong)
    }

    /// Captures `case` as a graph.
    ///
    /// # Errors
    /// Returns the errors of the capture.
    pub fn capture(
        &self,
        case: &Case,
        ranges: &BufferRanges,
        memory: &Tensor,
    ) -> Result<GraphExec> {
        let stream = self.comm.stream();
        stream.begin_capture()?;
        let enqueued = self.enqueue(case, ranges, memory);
        let graph = stream.end_capture()?;
        enqueued?;
        graph.instantiate()
    }

    /// Returns the memory that `case` uses on this rank.
    pub fn memory(&self, case: &Case) -> Tensor {
        let registered = match case.memory {
            Memory::Registered => true,
            Memory::Ordinary => false,
            Memory::Mixed => self.comm.rank() == 1,
        };
        let memory = if registered {
            &self.registered
        } else {
            &self.ordinary
        };
        memory[&case.dtype].clone()
    }

    fn once(
        &mut self,
        case: &Case,
        call: impl FnOnce(&Self, &Case, &BufferRanges, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let (ranks, rank) = (self.comm.size(), self.comm.rank());
        let ranges = BufferRanges::new(case, ranks, rank);
        let memory = self.memory(case);
        let iteration = self.calls;
        self.calls += 1;
        let size = case.dtype.size();
        let bytes = ranges.total * size;
        let whole = memory.slice(0, ranges.total)?;
        let mut image: Vec<u8> = (0..bytes)
            .map(|i| 0xa5 ^ (i * 29) as u8 ^ (iteration * 7) as u8)
            .collect();
        let mut put = |range: &Range<usize>, data: &[u8]| {
            if data.is_empty() {
                return;
            }
            image[range.start * size..range.end * size].copy_from_slice(data);
        };
        let given = oracle::input(case, ranks, rank, iteration);
        put(&ranges.input, &given.input);
        put(&ranges.residual, &given.residual);
        put(&ranges.weight, &given.weight);
        whole.copy_from_bytes(&image)?;
        let mut put = |range: &Range<usize>, data: &[u8]| {
            if data.is_empty() {
                return;
            }
            image[range.start * size..range.end * size].copy_from_slice(data);
        };
        if let Some(expected) = oracle::output(case, ranks, rank, iteration) {
            put(&ranges.residual_out, &expected.residual_out);
            put(&ranges.output, &expected.output);
        }
        call(self, case, &ranges, &memory)?;
        let actual = whole.to_bytes()?;
        if let Err(difference) = compare(&image, &actual, &ranges, size)
            && self.wrong.len() < DESCRIBED
        {
            self.wrong.push(format!(
                "rank {rank} of {ranks}, call {iteration}, {case:?}: {difference}"
            ));
        }
        Ok(())
    }

    /// Calls the blocking form. Passes unregistered memory as raw addresses, as calls on slices do.
    fn blocking(&self, case: &Case, ranges: &BufferRanges, memory: &Tensor) -> Result<()> {
        let by_address = !core::ptr::eq(memory.as_ptr(), self.registered[&case.dtype].as_ptr());
        call::blocking(
            &self.comm,
            case,
            &Self::tensors(ranges, memory)?,
            by_address,
        )
    }

    /// Enqueues the asynchronous form.
    ///
    /// # Errors
    /// Returns the operation's error.
    pub fn enqueue(
        &self,
        case: &Case,
        ranges: &BufferRanges,
        memory: &Tensor,
    ) -> Result<Vec<Work>> {
        call::enqueue(&self.comm, case, &Self::tensors(ranges, memory)?)
    }

    fn tensors(ranges: &BufferRanges, memory: &Tensor) -> Result<Buffers> {
        let part = |range: &Range<usize>| memory.slice(range.start, range.len());
        Ok(Buffers {
            output: part(&ranges.output)?,
            input: part(&ranges.input)?,
            residual: part(&ranges.residual)?,
            weight: part(&ranges.weight)?,
            residual_out: part(&ranges.residual_out)?,
        })
    }
}
