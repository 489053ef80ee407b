//! The collectives, over raw host pointers. Data movers count bytes, reductions count elements.

use crate::context::{Call, Context};
use crate::error::Error;
use crate::p2p::{GATHERV, Transfer};
use crate::reduction::{DataType, ReduceOp};

/// Where the parts of a buffer with unequal counts begin, and where it ends.
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
                format!("root {root} in a group of {}", self.size()),
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

    /// Bytes of one part, if `size` of them fit the address space.
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

    /// Refuses null pointers for memory that is used.
    fn check_pointers(operation: &'static str, used: &[(*const u8, usize)]) -> Result<(), Error> {
        if used
            .iter()
            .any(|(pointer, bytes)| *bytes > 0 && pointer.is_null())
        {
            return Err(Error::invalid(operation, "a null pointer"));
        }
        Ok(())
    }

    /// Reduces `count` elements over all ranks; every rank gets the result. A ring: the time is
    /// that of moving the data twice, and the result has the same bits on all ranks, but the order
    /// of the sum depends on the element's index, and small floats are rounded at each step. In
    /// place where `input == output`. With 0 elements nothing is sent.
    ///
    /// # Errors
    /// [`Error::Invalid`] for bit operations on floats; else what the connections do.
    ///
    /// # Safety
    /// `input` is valid for reads and `output` for writes of `count` elements, until the call
    /// returns; nobody else writes them meanwhile; they are equal or apart.
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
            // SAFETY: the caller's promise, for `count` elements of `element` bytes.
            unsafe { bridge.allreduce(input, output, count, element, dtype as u8, op as u8, call) }
        })
    }

    /// Reduces `count` elements over all ranks; `root` gets the result in `output`, which the
    /// others do not use. In place where `input == output`. With 0 elements nothing is sent.
    ///
    /// # Errors
    /// [`Error::Invalid`] for bit operations on floats or a root out of range; else what the
    /// connections do.
    ///
    /// # Safety
    /// `input` is valid for reads, and on the root `output` for writes, of `count` elements, until
    /// the call returns; nobody else writes them meanwhile; they are equal or apart.
    #[allow(clippy::too_many_arguments)] // MPI's
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
        // Gloo's ring writes the output of every rank.
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
            // SAFETY: the caller's promise, for `count` elements of `element` bytes; the scratch
            // has that size and outlives the call.
            unsafe { bridge.reduce(input, output, count, element, dtype, op, code, call) }
        })
    }

    /// Puts `bytes` of each rank behind each other, in rank order, into the `output` of all, which
    /// has `bytes` times the group's size. In place where `input` is this rank's part of `output`.
    ///
    /// # Errors
    /// What the connections do.
    ///
    /// # Safety
    /// `input` is valid for reads of `bytes`, `output` for writes of its size, until the call
    /// returns; nobody else writes them meanwhile; they are apart, or `input` is this rank's part.
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
        // SAFETY: both are valid for `bytes` at these addresses by the caller's promise; `copy`
        // allows that they are the same.
        unsafe { core::ptr::copy(input, output.add(self.rank() * bytes), bytes) };
        self.run(NAME, call, |bridge, call| {
            // SAFETY: the caller's promise for `output`.
            unsafe { bridge.allgather(output, bytes, call) }
        })
    }

    /// [`allgather`](Self::allgather) with a size for each rank: `counts[r]` bytes come from rank
    /// `r`. The counts are the same on all ranks; each may be 0.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless there is a count for each rank; else what the connections do.
    ///
    /// # Safety
    /// `input` is valid for reads of `counts[rank]` bytes, `output` for writes of the sum, until
    /// the call returns; nobody else writes them meanwhile; they are apart, or `input` is this
    /// rank's part.
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
            // SAFETY: both are valid for `bytes` at these addresses by the caller's promise; `copy`
            // allows that they are the same.
            unsafe { core::ptr::copy(input, output.add(offsets[self.rank()]), bytes) };
        }
        if self.size() == 1 {
            return Ok(());
        }
        self.run(NAME, call, |bridge, call| {
            // SAFETY: the caller's promise for `output`, whose parts `counts` gives.
            unsafe { bridge.allgatherv(output, counts, call) }
        })
    }

    /// Sends part `r` of `input` to rank `r`, and receives the part of rank `r` as part `r` of
    /// `output`; a part has `bytes`.
    ///
    /// # Errors
    /// What the connections do.
    ///
    /// # Safety
    /// `input` is valid for reads and `output` for writes of `bytes` times the group's size, until
    /// the call returns; nobody else writes them meanwhile; they are apart.
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
            // SAFETY: the caller's promise.
            unsafe { bridge.alltoall(input, output, bytes, call) }
        })
    }

    /// [`alltoall`](Self::alltoall) with a size for each pair: `sent[r]` bytes go to rank `r`,
    /// `received[r]` come from it; parts follow each other. What one rank sends to another, the
    /// other must expect; each count may be 0.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless there is a count for each rank, or where this rank's own two
    /// counts differ; [`Error::Timeout`] where ranks disagree; else what the connections do.
    ///
    /// # Safety
    /// `input` is valid for reads of the sum of `sent`, `output` for writes of the sum of
    /// `received`, until the call returns; nobody else writes them meanwhile; they are apart.
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
            return Err(Error::invalid(NAME, "a rank's own part has two sizes"));
        }
        let (total_in, total_out) = (inputs[self.size()], outputs[self.size()]);
        Self::check_pointers(NAME, &[(input, total_in), (output, total_out)])?;
        let signed = |counts: &[usize]| counts.iter().map(|count| *count as i64).collect();
        let (sent, received): (Vec<i64>, Vec<i64>) = (signed(sent), signed(received));
        self.run(NAME, call, |bridge, call| {
            // SAFETY: the caller's promise, for parts that `sent` and `received` give.
            unsafe { bridge.alltoallv(input, &sent, output, &received, call) }
        })
    }

    /// Copies `bytes` of `buffer` from `root` to all.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a root out of range; else what the connections do.
    ///
    /// # Safety
    /// `buffer` is valid for reads on the root and for writes elsewhere, until the call returns;
    /// nobody else uses it meanwhile.
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
            // SAFETY: the caller's promise.
            unsafe { bridge.broadcast(buffer, bytes, code, call) }
        })
    }

    /// Sends part `r` of the root's `input` to rank `r`; a part has `bytes`. The others' `input` is
    /// not used.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a root out of range; else what the connections do.
    ///
    /// # Safety
    /// `output` is valid for writes of `bytes`, and on the root `input` for reads of `bytes` times
    /// the group's size, until the call returns; nobody else writes them meanwhile; they are apart.
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
            // SAFETY: the caller's promise.
            unsafe { bridge.scatter(input, output, bytes, code, call) }
        })
    }

    /// Puts `bytes` of each rank behind each other, in rank order, into the root's `output`. The
    /// others' `output` is not used.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a root out of range; else what the connections do.
    ///
    /// # Safety
    /// `input` is valid for reads of `bytes`, and on the root `output` for writes of `bytes` times
    /// the group's size, until the call returns; nobody else writes them meanwhile; they are apart.
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
            // SAFETY: the caller's promise.
            unsafe { bridge.gather(input, output, bytes, code, call) }
        })
    }

    /// [`gather`](Self::gather) with a size for each rank: `counts[r]` bytes come from rank `r`.
    /// The root needs all counts, the others only their own to be right; each may be 0, and a rank
    /// with 0 sends nothing. (Debian's package has Gloo's own without its header; this is a batch
    /// of messages.)
    ///
    /// # Errors
    /// [`Error::Invalid`] for a root out of range, or unless there is a count for each rank;
    /// [`Error::Timeout`] where ranks disagree; else what the connections do.
    ///
    /// # Safety
    /// `input` is valid for reads of `counts[rank]` bytes, and on the root `output` for writes of
    /// the sum, until the call returns; nobody else writes them meanwhile; they are apart, or
    /// `input` is the root's own part.
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
            // SAFETY: the caller's promise for `input`.
            return unsafe { self.transfer(NAME, &transfers, GATHERV, call) };
        }
        Self::check_pointers(NAME, &[(input, bytes), (output, offsets[self.size()])])?;
        self.check_open(NAME)?;
        if bytes > 0 {
            // SAFETY: both are valid for `bytes` at these addresses by the caller's promise; `copy`
            // allows that they are the same.
            unsafe { core::ptr::copy(input, output.add(offsets[root]), bytes) };
        }
        let transfers: Vec<_> = (0..self.size())
            .filter(|peer| *peer != root && counts[*peer] > 0)
            .map(|peer| {
                // SAFETY: the offset is within the sum, for which the caller vouches.
                let data = unsafe { output.add(offsets[peer]) };
                Transfer::Recv {
                    data,
                    bytes: counts[peer],
                    peer,
                    tag,
                }
            })
            .collect();
        // SAFETY: the parts of `output` are apart, and valid by the caller's promise.
        unsafe { self.transfer(NAME, &transfers, GATHERV, call) }
    }

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    /// What the connections do.
    pub fn barrier(&self, call: Call) -> Result<(), Error> {
        self.run("barrier", call, |bridge, call| bridge.barrier(call))
    }
}
