//! Operations with a length for each rank, bound to their kernels.

use super::NO_ROOT;
use super::checks::{apart, at_most, length, same_type, within};
use crate::Result;
use crate::comm::Communicator;
use crate::comm::handoff::{Address, Counts, hand_off};
use crate::comm::observe::Note;
use crate::comm::submit::Prepared;
use crate::tensor::{Input, Output, Tensor};
use fusewire_device::comm::Place;
use fusewire_device::session::Operation;
use fusewire_kernels::vector::{ALL_GATHER_V, ALL_TO_ALL_V, AllGatherVParams, AllToAllVParams};

impl Communicator {
    pub(in crate::comm) fn prepare_all_gather_v<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        counts: &[u64],
        counts_tensor: Option<&'a Tensor>,
    ) -> Result<Prepared<'a>> {
        let name = "all_gather_v";
        same_type(name, output, input)?;
        let total = self.total(name, "counts", counts)?;
        length(name, "output", output.count, total)?;
        let rank = self.rank() as usize;
        length(name, "input", input.count, counts[rank] as usize)?;
        let before: u64 = counts[..rank].iter().sum();
        within(name, output, input, before as usize)?;
        let size = input.dtype.size();
        let plan = self.plan_rows(Operation::AllGatherV, total, input.dtype, 1, None);
        let agreed = counts.iter().fold(total as u64, |hash, count| {
            (hash ^ count)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(23)
        });
        let call = self.call(&plan, Some(input.dtype), None, NO_ROOT, agreed);
        let note = Note {
            call,
            input_count: input.count as u64,
            output_count: output.count as u64,
        };
        let tensors = [output.tensor, input.tensor, counts_tensor];
        let borrowed = tensors.iter().any(Option::is_none);
        if let Some(backend) = self.backend_for(&plan, input.dtype)? {
            let (from, to) = (Address::of(input), Address::of_output(output));
            let counts = Counts::new(counts, counts_tensor.is_some());
            let (sends, holds) = (input.count as u64, output.count as u64);
            let run = hand_off(backend, self.how(input.dtype), move |backend, how| {
                let counts = counts.read();
                let own = counts[backend.rank() as usize];
                if own != sends || counts.iter().sum::<u64>() > holds {
                    return Err(Counts::changed(backend.name(), name));
                }
                // SAFETY: the arguments were checked; the memory is kept alive (`Prepared`).
                unsafe { backend.all_gather_v(from.get(), to.get(), &counts, how) }
            });
            return Ok(Prepared::hand_off(run, tensors, borrowed, note));
        }
        let source_at = self.place_of(input.ptr, input.count * size, false);
        let params = AllGatherVParams {
            constants: self.constants(),
            call,
            size: size as u64,
            timeout_ns: self.timeout_ns,
            source: input.ptr,
            source_at,
            source_count: input.count as u64,
            target: output.ptr,
            target_count: output.count as u64,
            counts: counts.as_ptr(),
            chunk: plan.chunk,
            hint: self.hint(output.count * size, source_at == Place::NONE.0),
        };
        Ok(Prepared::new(
            self,
            &ALL_GATHER_V,
            params,
            tensors,
            borrowed,
            note,
        ))
    }

    pub(in crate::comm) fn prepare_all_to_all_v<'a>(
        &self,
        output: &Output<'a>,
        input: &Input<'a>,
        output_splits: &[u64],
        input_splits: &[u64],
        splits_tensor: Option<&'a Tensor>,
    ) -> Result<Prepared<'a>> {
        let name = "all_to_all_v";
        same_type(name, output, input)?;
        let sent = self.total(name, "input splits", input_splits)?;
        let received = self.total(name, "output splits", output_splits)?;
        at_most(name, "input", sent, input.count)?;
        at_most(name, "output", received, output.count)?;
        apart(name, output, input, None)?;
        let size = input.dtype.size();
        let rows = u64::from(self.size());
        let plan = self.plan_rows(Operation::AllToAllV, 0, input.dtype, rows, None);
        let call = self.call(&plan, Some(input.dtype), None, NO_ROOT, 0);
        let note = Note {
            call,
            input_count: input.count as u64,
            output_count: output.count as u64,
        };
        let tensors = [output.tensor, input.tensor, splits_tensor];
        let borrowed = tensors.iter().any(Option::is_none);
        if let Some(backend) = self.backend_for(&plan, input.dtype)? {
            let (from, to) = (Address::of(input), Address::of_output(output));
            let sends = Counts::new(input_splits, splits_tensor.is_some());
            let receives = Counts::new(output_splits, splits_tensor.is_some());
            let (has, holds) = (input.count as u64, output.count as u64);
            let run = hand_off(backend, self.how(input.dtype), move |backend, how| {
                let (sends, receives) = (sends.read(), receives.read());
                if sends.iter().sum::<u64>() > has || receives.iter().sum::<u64>() > holds {
                    return Err(Counts::changed(backend.name(), name));
                }
                // SAFETY: as for all_gather_v.
                unsafe { backend.all_to_all_v(from.get(), &sends, to.get(), &receives, how) }
            });
            return Ok(Prepared::hand_off(run, tensors, borrowed, note));
        }
        let source_at = self.place_of(input.ptr, input.count * size, false);
        let params = AllToAllVParams {
            constants: self.constants(),
            call,
            size: size as u64,
            timeout_ns: self.timeout_ns,
            source: input.ptr,
            source_at,
            source_count: input.count as u64,
            target: output.ptr,
            target_count: output.count as u64,
            send_counts: input_splits.as_ptr(),
            receive_counts: output_splits.as_ptr(),
            chunk: plan.chunk,
            hint: self.hint(output.count * size, source_at == Place::NONE.0),
        };
        Ok(Prepared::new(
            self,
            &ALL_TO_ALL_V,
            params,
            tensors,
            borrowed,
            note,
        ))
    }
}
