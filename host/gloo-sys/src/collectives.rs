//! Collectives over raw host pointers. Sizes of operations without a reduction are in bytes; counts
//! of reductions are in elements.

use crate::context::{Call, Context};
use crate::error::Error;
use crate::p2p::{GATHERV, Transfer};
use crate::reduction::{DataType, ReduceOp};

/// Returns the offset of each part of a buffer with unequal counts, and the end of the last part.
fn offsets(operation: &'static str, counts: &[usize]) -> Result<Vec<usize>, Error> {
    let mut ends = vec![0];
    let mut end = 0_usize;
    for &count in counts {
        end = end
            .checked_add(count)
            .filter(|end| isize::try_from(*end).is_ok())
            .ok_or_else(|| Error::invalid(operation, "the counts exceed the address space"))?;
        ends.push(end);
    }
    Ok(ends)
}

impl Context {
    fn check_root(&self, operation: &'static str, root: usize) -> Result<i32, Error> {
        let code = i32::try_from(root).ok().filter(|_| root < self.size());
        code.ok_or_else(|| {
            Error::invalid(
                operation,
                format!("root {root} is not a rank of a group of {}", self.size()),
            )
        })
    }

    fn check_counts(&self, operation: &'static str, counts: &[usize]) -> Result<Vec<usize>, Error> {
        if counts.len() != self.size() {
            let text = format!("{} counts in a group of {}", counts.len(), self.size());
            return Err(Error::invalid(operation, text));
        }
        offsets(operation, counts)
    }

    /// Returns the total size in bytes of one part per rank, or an error if it exceeds the address
    /// space.
    fn check_total(&self, operation: &'static str, bytes: usize) -> Result<usize, Error> {
        bytes
            .checked_mul(self.size())
            .filter(|total| isize::try_from(*total).is_ok())
            .ok_or_else(|| Error::invalid(operation, "the size exceeds the address space"))
    }

    fn check_reduction(
        &self,
        operation: &'static str,
        count: usize,
        dtype: DataType,
        op: ReduceOp,
    ) -> Result<usize, Error> {
        if !op.supports(dtype) {
            return Err(Error::invalid(operation, format!("{op:?} of {dtype:?}")));
        }
        count
            .checked_mul(dtype.size())
            .filter(|total| isize::try_from(*total).is_ok())
            .ok_or_else(|| Error::invalid(operation, "the size exceeds the address space"))
    }

    /// Returns an error if a pointer to memory of nonzero size is null.
    fn check_pointers(operation: &'static str, used: &[(*const u8, usize)]) -> Result<(), Error> {
        if used
            .iter()
            .any(|(pointer, bytes)| *bytes > 0 && pointer.is_null())
        {
            return Err(Error::invalid(
                operation,
                "a buffer that is not empty is null",
            ));
        }
        Ok(())
    }

    /// Reduces `count` elements over all ranks and stores the result on every rank. Uses a ring, so
    /// each rank sends about twice the size of the data. The result is bitwise identical on all
    /// ranks. The order in which the ranks are reduced depends on the element's index, and f16 and
    /// bf16 values are rounded at each step. Works in place if `input == output`. With 0 elements
    /// nothing is sent.
    ///
    /// # Errors
    /// [`Error::Invalid`] for bit operations on floats, or a connection error.
    ///
    /// # Safety
    /// `input` is valid for reads and `output` for writes of `count` elements until the call
    /// returns. No other code writes to either buffer during the call. The buffers are equal or
    /// disjoint.
    pub unsafe fn allreduce(
        &self,
        input: *const u8,
        output: *mut u8,
        count: usize,
        dtype: DataType,
        op: ReduceOp,
        call: Call,
    ) -> Result<(), Error> {
        const NAME: &str = "allreduce";
        let bytes = self.check_reduction(NAME, count, dtype, op)?;
        Self::check_pointers(NAME, &[(input, bytes), (output, bytes)])?;
        if count == 0 {
            return self.check_open(NAME);
        }
        self.run(NAME, call, |bridge, call| {
            let element = dtype.size();
            // SAFETY: the caller's buffers hold `count` elements of `element` bytes, which is the
            // size of `dtype`.
            unsafe { bridge.allreduce(input, output, count, element, dtype as u8, op as u8, call) }
        })
    }

    /// Reduces `count` elements over all ranks. Only `root` gets the result, in `output`; other
    /// ranks do not use `output`. Works in place if `input == output`. With 0 elements nothing is
    /// sent.
    ///
    /// # Errors
    /// [`Error::Invalid`] for bit operations on floats or a root out of range, or a connection
    /// error.
    ///
    /// # Safety
    /// `input` is valid for reads, and on the root `output` for writes, of `count` elements until
    /// the call returns. No other code writes to either buffer during the call. The buffers are
    /// equal or disjoint.
    #[allow(clippy::too_many_arguments)] // MPI_Reduce has equally many
    pub unsafe fn reduce(
        &self,
        input: *const u8,
        output: *mut u8,
        count: usize,
        dtype: DataType,
        op: ReduceOp,
        root: usize,
        call: Call,
    ) -> Result<(), Error> {
        const NAME: &str = "reduce";
        let code = self.check_root(NAME, root)?;
        let bytes = self.check_reduction(NAME, count, dtype, op)?;
        let mut scratch = Vec::new();
        // Gloo's ring writes `output` on every rank.
        let output = if self.rank() == root {
            output
        } else {
            scratch.resize(bytes, 0_u8);
            scratch.as_mut_ptr()
        };
        Self::check_pointers(NAME, &[(input, bytes), (output, bytes)])?;
        if count == 0 {
            return self.check_open(NAME);
        }
        self.run(NAME, call, |bridge, call| {
            let element = dtype.size();
            let (dtype, op) = (dtype as u8, op as u8);
            // SAFETY: the caller's buffers hold `count` elements of `element` bytes. The scratch
            // buffer has that size and outlives the call.
            unsafe { bridge.reduce(input, output, count, element, dtype, op, code, call) }
        })
    }

    /// Concatenates `bytes` bytes of each rank, in rank order, in `output` on all ranks. The size
    /// of `output` is `bytes` times the group's size. Works in place if `input` is this rank's part
    /// of `output`.
    ///
    /// # Errors
    /// A connection error.
    ///
    /// # Safety
    /// `input` is valid for reads of `bytes` bytes, and `output` for writes of `bytes` times the
    /// group's size, until the call returns. No other code writes to either buffer during the call.
    /// The buffers are disjoint, or `input` is this rank's part of `output`.
    pub unsafe fn allgather(
        &self,
        input: *const u8,
        output: *mut u8,
        bytes: usize,
        call: Call,
    ) -> Result<(), Error> {
        const NAME: &str = "allgather";
        let total = self.check_total(NAME, bytes)?;
        Self::check_pointers(NAME, &[(input, bytes), (output, total)])?;
        self.check_open(NAME)?;
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: `input` and this rank's part of `output` are valid for `bytes` bytes. `copy`
        // allows them to overlap.
        unsafe { core::ptr::copy(input, output.add(self.rank() * bytes), bytes) };
        self.run(NAME, call, |bridge, call| {
            // SAFETY: the caller's `output` has `bytes` bytes for each rank.
            unsafe { bridge.allgather(output, bytes, call) }
        })
    }

    /// Runs [`allgather`](Self::allgather) with one size per rank: rank `r` contributes `counts[r]`
    /// bytes. `counts` must be equal on all ranks; each count may be 0.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless there is one count per rank, or a connection error.
    ///
    /// # Safety
    /// `input` is valid for reads of `counts[rank]` bytes, and `output` for writes of the sum of
    /// `counts` in bytes, until the call returns. No other code writes to either buffer during the
    /// call. The buffers are disjoint, or `input` is this rank's part of `output`.
    pub unsafe fn allgatherv(
        &self,
        input: *const u8,
        output: *mut u8,
        counts: &[usize],
        call: Call,
    ) -> Result<(), Error> {
        const NAME: &str = "allgatherv";
        let offsets = self.check_counts(NAME, counts)?;
        let bytes = counts[self.rank()];
        let total = offsets[self.size()];
        Self::check_pointers(NAME, &[(input, bytes), (output, total)])?;
        self.check_open(NAME)?;
        if total == 0 {
            return Ok(());
        }
        if bytes > 0 {
            // SAFETY: `input` and this rank's part of `output` are valid for `bytes` bytes. `copy`
            // allows them to overlap.
            unsafe { core::ptr::copy(input, output.add(offsets[self.rank()]), bytes) };
        }
        if self.size() == 1 {
            return Ok(());
        }
        self.run(NAME, call, |bridge, call| {
            // SAFETY: the caller's `output` has the parts that `counts` gives.
            unsafe { bridge.allgatherv(output, counts, call) }
        })
    }

    /// Sends part `r` of `input` to rank `r`, and receives part `r` of `output` from rank `r`. Each
    /// part has `bytes` bytes.
    ///
    /// # Errors
    /// A connection error.
    ///
    /// # Safety
    /// `input` is valid for reads, and `output` for writes, of `bytes` times the group's size until
    /// the call returns. No other code writes to either buffer during the call. The buffers are
    /// disjoint.
    pub unsafe fn alltoall(
        &self,
        input: *const u8,
        output: *mut u8,
        bytes: usize,
        call: Call,
    ) -> Result<(), Error> {
        const NAME: &str = "alltoall";
        let total = self.check_total(NAME, bytes)?;
        Self::check_pointers(NAME, &[(input, total), (output, total)])?;
        if bytes == 0 {
            return self.check_open(NAME);
        }
        self.run(NAME, call, |bridge, call| {
            // SAFETY: the caller's buffers have `bytes` bytes for each rank.
            unsafe { bridge.alltoall(input, output, bytes, call) }
        })
    }

    /// Runs [`alltoall`](Self::alltoall) with one size per pair of ranks: this rank sends `sent[r]`
    /// bytes to rank `r`, and receives `received[r]` bytes from rank `r`. Parts are contiguous.
    /// Both ranks of a pair must pass the same size; each count may be 0.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless there is one count per rank, or if this rank's two counts for
    /// itself differ; [`Error::Timeout`] if ranks disagree; or a connection error.
    ///
    /// # Safety
    /// `input` is valid for reads of the sum of `sent`, and `output` for writes of the sum of
    /// `received`, until the call returns. No other code writes to either buffer during the call.
    /// The buffers are disjoint.
    pub unsafe fn alltoallv(
        &self,
        input: *const u8,
        sent: &[usize],
        output: *mut u8,
        received: &[usize],
        call: Call,
    ) -> Result<(), Error> {
        const NAME: &str = "alltoallv";
        let inputs = self.check_counts(NAME, sent)?;
        let outputs = self.check_counts(NAME, received)?;
        if sent[self.rank()] != received[self.rank()] {
            return Err(Error::invalid(
                NAME,
                "this rank's own send and receive counts differ",
            ));
        }
        let (total_in, total_out) = (inputs[self.size()], outputs[self.size()]);
        Self::check_pointers(NAME, &[(input, total_in), (output, total_out)])?;
        let signed = |counts: &[usize]| counts.iter().map(|count| *count as i64).collect();
        let (sent, received): (Vec<i64>, Vec<i64>) = (signed(sent), signed(received));
        self.run(NAME, call, |bridge, call| {
            // SAFETY: the caller's buffers have the parts that `sent` and `received` give.
            unsafe { bridge.alltoallv(input, &sent, output, &received, call) }
        })
    }

    /// Copies `bytes` bytes of `buffer` from `root` to all ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a root out of range, or a connection error.
    ///
    /// # Safety
    /// `buffer` is valid for reads on the root and for writes on other ranks until the call
    /// returns. No other code uses it during the call.
    pub unsafe fn broadcast(
        &self,
        buffer: *mut u8,
        bytes: usize,
        root: usize,
        call: Call,
    ) -> Result<(), Error> {
        const NAME: &str = "broadcast";
        let code = self.check_root(NAME, root)?;
        Self::check_pointers(NAME, &[(buffer, bytes)])?;
        if bytes == 0 {
            return self.check_open(NAME);
        }
        self.run(NAME, call, |bridge, call| {
            // SAFETY: the caller's buffer has `bytes` bytes.
            unsafe { bridge.broadcast(buffer, bytes, code, call) }
        })
    }

    /// Sends part `r` of the root's `input` to rank `r`. Each part has `bytes` bytes. Other ranks
    /// do not use `input`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a root out of range, or a connection error.
    ///
    /// # Safety
    /// `output` is valid for writes of `bytes` bytes, and on the root `input` for reads of `bytes`
    /// times the group's size, until the call returns. No other code writes to either buffer during
    /// the call. The buffers are disjoint.
    pub unsafe fn scatter(
        &self,
        input: *const u8,
        output: *mut u8,
        bytes: usize,
        root: usize,
        call: Call,
    ) -> Result<(), Error> {
        const NAME: &str = "scatter";
        let code = self.check_root(NAME, root)?;
        let total = self.check_total(NAME, bytes)?;
        let read = if self.rank() == root { total } else { 0 };
        Self::check_pointers(NAME, &[(input, read), (output, bytes)])?;
        if bytes == 0 {
            return self.check_open(NAME);
        }
        self.run(NAME, call, |bridge, call| {
            // SAFETY: the caller's `output` has `bytes` bytes, and the root's `input` has `bytes`
            // bytes for each rank.
            unsafe { bridge.scatter(input, output, bytes, code, call) }
        })
    }

    /// Concatenates `bytes` bytes of each rank, in rank order, in the root's `output`. Other ranks
    /// do not use `output`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a root out of range, or a connection error.
    ///
    /// # Safety
    /// `input` is valid for reads of `bytes` bytes, and on the root `output` for writes of `bytes`
    /// times the group's size, until the call returns. No other code writes to either buffer during
    /// the call. The buffers are disjoint.
    pub unsafe fn gather(
        &self,
        input: *const u8,
        output: *mut u8,
        bytes: usize,
        root: usize,
        call: Call,
    ) -> Result<(), Error> {
        const NAME: &str = "gather";
        let code = self.check_root(NAME, root)?;
        let total = self.check_total(NAME, bytes)?;
        let written = if self.rank() == root { total } else { 0 };
        Self::check_pointers(NAME, &[(input, bytes), (output, written)])?;
        if bytes == 0 {
            return self.check_open(NAME);
        }
        self.run(NAME, call, |bridge, call| {
            // SAFETY: the caller's `input` has `bytes` bytes, and the root's `output` has `bytes`
            // bytes for each rank.
            unsafe { bridge.gather(input, output, bytes, code, call) }
        })
    }

    /// Runs [`gather`](Self::gather) with one size per rank: rank `r` contributes `counts[r]`
    /// bytes. The root uses all counts; other ranks use only their own. Each count may be 0, and a
    /// rank with count 0 sends nothing. Implemented as a batch of messages, because Debian's
    /// package lacks the header of Gloo's `gatherv`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a root out of range, or unless there is one count per rank;
    /// [`Error::Timeout`] if ranks disagree; or a connection error.
    ///
    /// # Safety
    /// `input` is valid for reads of `counts[rank]` bytes, and on the root `output` for writes of
    /// the sum of `counts` in bytes, until the call returns. No other code writes to either buffer
    /// during the call. The buffers are disjoint, or `input` is the root's own part of `output`.
    pub unsafe fn gatherv(
        &self,
        input: *const u8,
        output: *mut u8,
        counts: &[usize],
        root: usize,
        call: Call,
    ) -> Result<(), Error> {
        const NAME: &str = "gatherv";
        self.check_root(NAME, root)?;
        let offsets = self.check_counts(NAME, counts)?;
        let bytes = counts[self.rank()];
        let tag = call.tag_value();
        if self.rank() != root {
            Self::check_pointers(NAME, &[(input, bytes)])?;
            let transfers = [Transfer::Send {
                data: input,
                bytes,
                peer: root,
                tag,
            }];
            // SAFETY: the caller's `input` has this rank's count of bytes.
            return unsafe { self.transfer(NAME, &transfers, GATHERV, call) };
        }
        Self::check_pointers(NAME, &[(input, bytes), (output, offsets[self.size()])])?;
        self.check_open(NAME)?;
        if bytes > 0 {
            // SAFETY: `input` and the root's part of `output` are valid for `bytes` bytes. `copy`
            // allows them to overlap.
            unsafe { core::ptr::copy(input, output.add(offsets[root]), bytes) };
        }
        let transfers: Vec<_> = (0..self.size())
            .filter(|peer| *peer != root && counts[*peer] > 0)
            .map(|peer| {
                // SAFETY: the offset is at most the sum of the counts, which is the size of
                // `output`.
                let data = unsafe { output.add(offsets[peer]) };
                Transfer::Recv {
                    data,
                    bytes: counts[peer],
                    peer,
                    tag,
                }
            })
            .collect();
        // SAFETY: `offsets` separates the parts of `output`, which the caller's buffer contains.
        unsafe { self.transfer(NAME, &transfers, GATHERV, call) }
    }

    /// Blocks until all ranks have called `barrier`.
    ///
    /// # Errors
    /// A connection error.
    pub fn barrier(&self, call: Call) -> Result<(), Error> {
        self.run("barrier", call, |bridge, call| bridge.barrier(call))
    }
}
