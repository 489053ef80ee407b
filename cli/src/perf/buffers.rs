//! The memory of a measurement: inputs, outputs, and the guards around them.

use fusewire::testing::reference::{Difference, first_difference, widen};
use fusewire::{Communicator, DType, Result, Tensor};

use super::Settings;
use super::case::Case;
use super::operation::{Kind, counts, hidden, split};

/// Number of guard elements before and after every buffer. No operation may change them.
const GUARD: usize = 64;
/// Byte that fills the guards, and the outputs before a call.
const POISON: u8 = 0xa5;

/// The largest input and the largest output. The buffers of each size are slices of these.
#[derive(Debug)]
pub(crate) struct Arena {
    input: Tensor,
    output: Tensor,
    calls: u64,
}

impl Arena {
    pub(crate) fn new(comm: &Communicator, settings: &Settings) -> Result<Self> {
        let elements = settings.longest() + 2 * GUARD;
        let alloc = || {
            if settings.registered {
                comm.alloc(settings.dtype, elements)
            } else {
                comm.tensor(settings.dtype, elements)
            }
        };
        Ok(Self {
            input: alloc()?,
            output: alloc()?,
            calls: 0,
        })
    }

    /// Returns the number of the next verified call. The inputs of the call depend on this number.
    pub(crate) fn next_call(&mut self) -> u64 {
        self.calls += 1;
        self.calls
    }
}

/// The buffers of one operation at one size.
#[derive(Debug)]
pub(crate) struct Buffers {
    pub(crate) input: Tensor,
    pub(crate) output: Tensor,
    pub(crate) residual: Tensor,
    pub(crate) weight: Tensor,
    /// Counts, or the output's splits and then the input's, for the operations that take them.
    pub(crate) counts: Vec<u64>,
    /// True if input and output share memory.
    pub(crate) in_place: bool,
    /// The guard elements before and after the output, or before and after the buffer that contains
    /// the output.
    guards: [Tensor; 2],
}

impl Buffers {
    pub(crate) fn new(
        comm: &Communicator,
        settings: &Settings,
        arena: &Arena,
        kind: Kind,
        count: usize,
    ) -> Result<Self> {
        let (ranks, rank, dtype) = (comm.size(), comm.rank(), settings.dtype);
        let in_place = settings.in_place && kind.has_in_place() || kind == Kind::Broadcast;
        let (given, gotten) = kind.shape(count, ranks, rank);
        let mut input = arena.input.slice(GUARD, given)?;
        let mut output = arena.output.slice(GUARD, gotten)?;
        let mut around = (&arena.output, gotten);
        let mut shared = false;
        if in_place {
            let (input_inside, at) = kind.in_place_at(count, ranks, rank);
            if input_inside && at + given <= gotten {
                input = output.slice(at, given)?;
                shared = true;
            } else if !input_inside {
                output = arena.input.slice(GUARD + at, gotten)?;
                around = (&arena.input, given);
                shared = true;
            }
        }
        let counts: Vec<u64> = match kind {
            Kind::AllGatherV => counts(count, ranks),
            Kind::AllToAllV => {
                let received = (0..ranks).map(|from| split(count, from, rank));
                received
                    .chain((0..ranks).map(|to| split(count, rank, to)))
                    .collect()
            }
            _ => Vec::new(),
        };
        let fused = kind.is_norm();
        Ok(Self {
            residual: comm.tensor(dtype, if fused { count } else { 0 })?,
            weight: comm.tensor(dtype, if fused { hidden(count) } else { 0 })?,
            counts,
            in_place: shared || kind == Kind::Broadcast,
            guards: [
                around.0.slice(0, GUARD)?,
                around.0.slice(GUARD + around.1, GUARD)?,
            ],
            input,
            output,
        })
    }

    /// Poisons the output and the guards, and writes the inputs of `case`. No operation in flight
    /// may use this memory.
    pub(crate) fn prepare(&self, case: &Case) -> Result<()> {
        self.guards.iter().try_for_each(poison)?;
        poison(&self.output)?;
        self.residual
            .copy_from_bytes(&case.residual(self.residual.len()))?;
        self.weight
            .copy_from_bytes(&case.weight(self.weight.len()))?;
        if case.gives() {
            self.input.copy_from_bytes(&case.input(self.input.len()))?;
        }
        Ok(())
    }

    /// Compares the output with the reference and returns the first difference. If `exact` is
    /// false, ignores differences of f32, f16 and bf16 within the rounding error, because some
    /// backends reduce the ranks in another order.
    pub(crate) fn difference(&self, case: &Case, exact: bool) -> Result<Option<Difference>> {
        let Some(expected) = case.expected() else {
            return Ok(None);
        };
        let dtype = self.output.dtype();
        let mut got = self.output.to_bytes()?;
        let is_float = matches!(dtype, DType::F32 | DType::F16 | DType::Bf16);
        if exact || !is_float {
            return Ok(first_difference(&expected, &got, dtype));
        }
        let near = case.rounding();
        let values = widen(dtype, &expected).into_iter().zip(widen(dtype, &got));
        let close: Vec<bool> = values
            .map(|(expected, got)| (expected - got).abs() <= near)
            .collect();
        for (at, close) in close.into_iter().enumerate() {
            let element = at * dtype.size()..(at + 1) * dtype.size();
            if close {
                got[element.clone()].copy_from_slice(&expected[element]);
            }
        }
        Ok(first_difference(&expected, &got, dtype))
    }

    /// Counts the changed bytes in memory that the operation must not change: the guards, the input
    /// (unless in place), and the output on ranks that get no output.
    pub(crate) fn touched(&self, case: &Case) -> Result<u64> {
        let changed = |tensor: &Tensor| -> Result<usize> {
            let bytes = tensor.to_bytes()?;
            Ok(bytes.iter().filter(|byte| **byte != POISON).count())
        };
        let mut touched = changed(&self.guards[0])? + changed(&self.guards[1])?;
        let unwritten = case.expected().is_none();
        if !self.in_place || unwritten {
            let given = case.input(self.input.len());
            let now = self.input.to_bytes()?;
            if given != now {
                touched += given
                    .iter()
                    .zip(&now)
                    .filter(|(given, now)| given != now)
                    .count();
            }
        }
        if !self.in_place && unwritten {
            touched += changed(&self.output)?;
        }
        Ok(touched as u64)
    }

    /// Corrupts the last element of the output. The comparison must then report a mismatch.
    pub(crate) fn flip(&self) -> Result<()> {
        let mut bytes = self.output.to_bytes()?;
        if let Some(last) = bytes.last_mut() {
            *last ^= 1;
        }
        self.output.copy_from_bytes(&bytes)
    }
}

fn poison(tensor: &Tensor) -> Result<()> {
    tensor.copy_from_bytes(&vec![POISON; tensor.len() * tensor.dtype().size()])
}
