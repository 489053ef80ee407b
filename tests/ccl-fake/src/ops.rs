//! Checks, groups and executes operations.

use core::cell::{Cell, RefCell};
use core::ffi::c_void;

use fusewire_ccl_sys::sys::*;

use crate::comm::{Comm, Contribution, Scale};
use crate::record;
use crate::reduce::{reduce, size};

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static GROUP: RefCell<Vec<Op>> = const { RefCell::new(Vec::new()) };
}

/// Value of the root, peer or reduction for operations that have none.
pub(crate) const NONE: i32 = -1;

/// Arguments of one call.
#[derive(Clone, Copy)]
pub(crate) struct Op {
    pub(crate) name: &'static str,
    pub(crate) send: *const c_void,
    pub(crate) recv: *mut c_void,
    pub(crate) count: usize,
    pub(crate) dtype: i32,
    pub(crate) red: i32,
    /// The root of a collective, or the peer of a send or receive.
    pub(crate) root: i32,
    pub(crate) comm: ncclComm_t,
}

/// A started call with valid arguments.
struct StartedCall {
    op: Op,
    comm: &'static Comm,
    bytes: usize,
    number: u64,
}

pub(crate) fn comm_of(comm: ncclComm_t) -> Option<&'static Comm> {
    // SAFETY: a non-null handle points to a `Comm` of this crate, and a `Comm` is never freed.
    unsafe { comm.cast::<Comm>().as_ref() }
}

/// Returns the scaled-sum operator that the handle `red` identifies.
fn scale(comm: &Comm, red: i32) -> Option<Scale> {
    let at = usize::try_from(red.checked_sub(ncclAvg + 1)?).ok()?;
    comm.scales().get(at).cloned().flatten()
}

pub(crate) fn depth() -> u32 {
    DEPTH.get()
}

pub(crate) fn group_start() -> ncclResult_t {
    DEPTH.set(DEPTH.get() + 1);
    record::call("ncclGroupStart", None, DEPTH.get(), &[]);
    ncclSuccess
}

pub(crate) fn group_end() -> ncclResult_t {
    record::call("ncclGroupEnd", None, DEPTH.get(), &[]);
    match DEPTH.get() {
        0 => ncclInvalidUsage,
        1 => {
            DEPTH.set(0);
            run(&GROUP.take())
        }
        depth => {
            DEPTH.set(depth - 1);
            ncclSuccess
        }
    }
}

impl Op {
    fn is_point(&self) -> bool {
        matches!(self.name, "ncclSend" | "ncclRecv")
    }

    /// Returns the numbers of rows that this rank reads from the send buffer and writes to the
    /// receive buffer. The number is 0 for a buffer that this rank does not use.
    fn rows(&self, comm: &Comm) -> (usize, usize) {
        let all = comm.shared.count;
        let at_root = self.root == comm.rank as i32;
        let root_only = |rows| if at_root { rows } else { 0 };
        match self.name {
            "ncclSend" => (1, 0),
            "ncclRecv" => (0, 1),
            "ncclBroadcast" => (root_only(1), 1),
            "ncclReduce" => (1, root_only(1)),
            "ncclAllGather" => (1, all),
            "ncclReduceScatter" => (all, 1),
            "ncclAlltoAll" | "ncclAllToAll" => (all, all),
            "ncclScatter" => (root_only(all), 1),
            "ncclGather" => (1, root_only(all)),
            _ => (1, 1),
        }
    }

    fn is_valid(&self, comm: &Comm) -> bool {
        let (read, written) = self.rows(comm);
        let everybody = matches!(
            self.name,
            "ncclAllReduce"
                | "ncclReduceScatter"
                | "ncclAllGather"
                | "ncclAlltoAll"
                | "ncclAllToAll"
        );
        let reduces = matches!(
            self.name,
            "ncclAllReduce" | "ncclReduceScatter" | "ncclReduce"
        );
        let root = everybody || (0..comm.shared.count as i32).contains(&self.root);
        let lacks = |rows: usize, is_null: bool| rows > 0 && self.count > 0 && is_null;
        let red = !reduces
            || (ncclSum..=ncclAvg).contains(&self.red)
            || scale(comm, self.red).is_some_and(|(dtype, _)| dtype == self.dtype);
        root && red && !lacks(read, self.send.is_null()) && !lacks(written, self.recv.is_null())
    }

    fn record(&self, comm: &Comm, bytes: usize) {
        let (send, recv) = (self.send.cast::<u8>(), self.recv.cast::<u8>());
        let row = bytes * comm.rank;
        let in_place = match self.name {
            "ncclAllGather" | "ncclGather" => send == recv.wrapping_add(row),
            "ncclReduceScatter" | "ncclScatter" => send.wrapping_add(row) == recv,
            _ => send == recv.cast_const(),
        };
        let role = if self.is_point() { "peer" } else { "root" };
        let fields = [
            ("count", self.count as i64),
            ("dtype", i64::from(self.dtype)),
            ("op", i64::from(self.red)),
            (role, i64::from(self.root)),
            ("in_place", i64::from(in_place)),
        ];
        record::call(self.name, Some(comm), depth(), &fields);
    }

    /// Returns this rank's contribution to the rendezvous.
    fn part(&self, comm: &Comm, bytes: usize) -> Contribution {
        let bytes = bytes * self.rows(comm).0;
        let data = if bytes == 0 {
            Vec::new()
        } else {
            // SAFETY: `is_valid` has checked that the pointer is not null, and `nccl.h` requires
            // `bytes` readable bytes in the send buffer.
            unsafe { core::slice::from_raw_parts(self.send.cast::<u8>(), bytes) }.to_vec()
        };
        let scale = scale(comm, self.red);
        (data, scale.map_or(Vec::new(), |(_, factor)| factor.read()))
    }
}

/// Runs a call, or defers it to the end of the open group.
pub(crate) fn issue(op: Op) -> ncclResult_t {
    let Some(comm) = comm_of(op.comm) else {
        return ncclInvalidArgument;
    };
    let bytes = size(op.dtype)
        .and_then(|size| size.checked_mul(op.count))
        .filter(|bytes| bytes.checked_mul(comm.shared.count).is_some());
    let Some(bytes) = bytes else {
        crate::last_error::set("the type is unknown or the count is too large");
        return ncclInvalidArgument;
    };
    op.record(comm, bytes);
    if let Err(code) = comm.shared.check() {
        return code;
    }
    if !op.is_valid(comm) {
        crate::last_error::set("a bad root, reduction or pointer");
        return ncclInvalidArgument;
    }
    if depth() > 0 {
        GROUP.with_borrow_mut(|group| group.push(op));
        return ncclSuccess;
    }
    run(&[op])
}

/// Starts all calls, then waits for all of them. Waits for sends last, after this rank's receives
/// have completed the peers' sends, so no pattern of calls within a group can deadlock.
fn run(ops: &[Op]) -> ncclResult_t {
    let post = |op: &Op| {
        let comm = comm_of(op.comm)?;
        let bytes = op.count * size(op.dtype)?;
        let number = match op.name {
            "ncclRecv" => 0,
            "ncclSend" => {
                let path = (comm.rank, op.root as usize);
                let (data, _) = op.part(comm, bytes);
                comm.shared.send(path, op.dtype, op.count, data)
            }
            _ => {
                // The handles of scaled-sum operators may differ between ranks, so the shape
                // contains the same number for all of them.
                let shape = (
                    op.name,
                    op.count,
                    op.dtype,
                    op.red.min(ncclAvg + 1),
                    op.root,
                );
                comm.shared.post(comm.rank, shape, op.part(comm, bytes))
            }
        };
        let op = *op;
        Some(StartedCall {
            op,
            comm,
            bytes,
            number,
        })
    };
    let posted: Vec<StartedCall> = ops.iter().filter_map(post).collect();
    let (sends, others): (Vec<_>, Vec<_>) = posted
        .iter()
        .partition(|posted| posted.op.name == "ncclSend");
    let mut first = ncclSuccess;
    for posted in others.into_iter().chain(sends) {
        if let Err(code) = posted.finish()
            && first == ncclSuccess
        {
            first = code;
        }
    }
    first
}

impl StartedCall {
    fn finish(&self) -> Result<(), ncclResult_t> {
        let Self {
            op,
            comm,
            bytes,
            number,
        } = self;
        let (shared, rank) = (&comm.shared, comm.rank);
        let out = match op.name {
            "ncclSend" => return shared.delivered(*number, op.root as usize),
            "ncclRecv" => shared.recv((op.root as usize, rank), op.dtype, op.count)?,
            name => {
                let parts = shared.all_parts(*number)?;
                if op.rows(comm).1 == 0 {
                    return Ok(());
                }
                let rows = |at: usize| parts.iter().map(move |(part, _)| &part[at..at + bytes]);
                match name {
                    "ncclAllGather" | "ncclGather" => rows(0).collect::<Vec<_>>().concat(),
                    "ncclAlltoAll" | "ncclAllToAll" => {
                        rows(bytes * rank).collect::<Vec<_>>().concat()
                    }
                    "ncclBroadcast" => parts[op.root as usize].0.clone(),
                    "ncclScatter" => {
                        parts[op.root as usize].0[bytes * rank..bytes * (rank + 1)].to_vec()
                    }
                    _ => {
                        let at = if name == "ncclReduceScatter" {
                            bytes * rank
                        } else {
                            0
                        };
                        let scales = parts.iter().map(|(_, scale)| &scale[..]);
                        let parts: Vec<_> = rows(at).zip(scales).collect();
                        reduce(op.dtype, op.red, &parts).ok_or(ncclInvalidArgument)?
                    }
                }
            }
        };
        if !out.is_empty() {
            // SAFETY: `is_valid` has checked that the pointer is not null, and `nccl.h` requires a
            // receive buffer of `out.len()` bytes.
            unsafe { core::ptr::copy_nonoverlapping(out.as_ptr(), op.recv.cast(), out.len()) };
        }
        Ok(())
    }
}
