//! The memory of a measurement: inputs, outputs, and the guards around them.

use fusewire::testing::reference::{Difference, first_difference, widen};
use fusewire::{Communicator, DType, Result, Tensor};

use super::Settings;
use super::case::Case;
use super::moe::{ExpertLayer, Experts};
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
    /// Set for the operations of a mixture of experts. The output of dispatch and the input of
    /// combine are the memory of the rows that this rank receives.
    pub(crate) experts: Option<Experts>,
    /// Further outputs of dispatch, with their names.
    descriptions: Vec<(&'static str, Tensor)>,
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
        if let Some(layer) = kind.layer() {
            return Self::of_experts(comm, arena, kind, layer, count);
        }
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
            experts: None,
            descriptions: Vec::new(),
            in_place: shared || kind == Kind::Broadcast,
            guards: [
                around.0.slice(0, GUARD)?,
                around.0.slice(GUARD + around.1, GUARD)?,
            ],
            input,
            output,
        })
    }

    /// Creates the buffers of an operation of a mixture of experts.
    fn of_experts(
        comm: &Communicator,
        arena: &Arena,
        kind: Kind,
        layer: ExpertLayer,
        count: usize,
    ) -> Result<Self> {
        let (tokens, sums) = (&arena.input, &arena.output);
        let tokens = tokens.slice(GUARD, count)?;
        let experts = Experts::new(comm, layer, &tokens)?;
        let (rows, after) = experts.rows()?;
        let (input, output, guards, descriptions) = match kind {
            Kind::MoeCombine(_) => {
                let guards = [sums.slice(0, GUARD)?, sums.slice(GUARD + count, GUARD)?];
                (rows, sums.slice(GUARD, count)?, guards, Vec::new())
            }
            _ => {
                let after = after.slice(0, after.len().min(GUARD))?;
                let guards = [after.slice(0, 0)?, after];
                (tokens, rows, guards, experts.descriptions()?)
            }
        };
        Ok(Self {
            input,
            output,
            residual: comm.tensor(arena.input.dtype(), 0)?,
            weight: comm.tensor(arena.input.dtype(), 0)?,
            counts: Vec::new(),
            experts: Some(experts),
            descriptions,
            in_place: false,
            guards,
        })
    }

    /// Frees memory that peers can access. All ranks must call this together.
    pub(crate) fn free(self) -> Result<()> {
        self.experts.map_or(Ok(()), Experts::free)
    }

    /// Returns all outputs, with their names in messages.
    fn outputs(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        let descriptions = self.descriptions.iter();
        let descriptions = descriptions.map(|(name, tensor)| (*name, tensor));
        core::iter::once((self.output.dtype().name(), &self.output)).chain(descriptions)
    }

    /// Poisons the outputs and the guards, and writes the inputs of `case`. No operation in flight
    /// may use this memory.
    pub(crate) fn prepare(&self, case: &Case) -> Result<()> {
        self.guards.iter().try_for_each(poison)?;
        self.outputs().try_for_each(|(_, output)| poison(output))?;
        self.residual
            .copy_from_bytes(&case.residual(self.residual.len()))?;
        self.weight
            .copy_from_bytes(&case.weight(self.weight.len()))?;
        if case.gives() {
            self.input.copy_from_bytes(&case.input(self.input.len()))?;
        }
        Ok(())
    }

    /// Compares the outputs with the reference. Returns the first difference of each output that
    /// differs, and the name of the output.
    pub(crate) fn differences(
        &self,
        case: &Case,
        exact: bool,
    ) -> Result<Vec<(&'static str, Difference)>> {
        let mut differences = Vec::new();
        if let Some(difference) = self.difference(case, exact)? {
            differences.push((self.output.dtype().name(), difference));
        }
        for ((name, tensor), expected) in self.descriptions.iter().zip(case.descriptions()) {
            let difference = first_difference(&expected, &tensor.to_bytes()?, tensor.dtype());
            differences.extend(difference.map(|difference| (*name, difference)));
        }
        Ok(differences)
    }

    /// Compares the output with the reference and returns the first difference. If `exact` is
    /// false, ignores differences of f32, f16 and bf16 within the rounding error, because some
    /// backends reduce the ranks in another order.
    fn difference(&self, case: &Case, exact: bool) -> Result<Option<Difference>> {
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

    /// Corrupts the last element of each output. The comparison must then report a mismatch.
    pub(crate) fn flip(&self) -> Result<()> {
        self.outputs().try_for_each(|(_, output)| {
            let mut bytes = output.to_bytes()?;
            if let Some(last) = bytes.last_mut() {
                *last ^= 1;
            }
            output.copy_from_bytes(&bytes)
        })
    }
}

fn poison(tensor: &Tensor) -> Result<()> {
    tensor.copy_from_bytes(&vec![POISON; tensor.len() * tensor.dtype().size()])
}
