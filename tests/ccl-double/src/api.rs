//! The exported C functions.
#![allow(non_snake_case)] // the names of nccl.h

use core::cell::{Cell, RefCell};
use core::ffi::{c_char, c_int, c_void};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use fusewire_ccl_sys::sys::*;

use crate::reduce::{reduce, size};
use crate::world::{Comm, World};

static RECORDS: Mutex<String> = Mutex::new(String::new());
static WORLDS: LazyLock<Mutex<HashMap<[c_char; 128], Arc<World>>>> = LazyLock::new(Mutex::default);

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static GROUP: RefCell<Vec<Op>> = const { RefCell::new(Vec::new()) };
}

#[derive(Clone, Copy)]
struct Op {
    name: &'static str,
    send: *const u8,
    recv: *mut u8,
    count: usize,
    dtype: i32,
    red: i32,
    root: i32,
    comm: &'static Comm,
}

#[allow(clippy::too_many_arguments)] // as in nccl.h
fn issue(
    name: &'static str,
    send: *const c_void,
    recv: *mut c_void,
    count: usize,
    dtype: i32,
    red: i32,
    root: i32,
    comm: ncclComm_t,
) -> ncclResult_t {
    // SAFETY: null, or a handle made here, which is never freed.
    let Some(comm) = (unsafe { comm.cast::<Comm>().as_ref() }) else {
        return ncclInvalidArgument;
    };
    let Some(bytes) = size(dtype).map(|size| size * count) else {
        return ncclInvalidArgument;
    };
    let (send, recv) = (send.cast::<u8>(), recv.cast::<u8>());
    let offset = bytes * comm.rank;
    let in_place = match name {
        "ncclAllGather" => send == recv.wrapping_add(offset),
        "ncclReduceScatter" => send.wrapping_add(offset) == recv,
        _ => send == recv.cast_const(),
    };
    let depth = DEPTH.get();
    let line = format!(
        "{{\"name\":\"{name}\",\"rank\":{},\"count\":{count},\"dtype\":{dtype},\"op\":{red},\"root\":{root},\"in_place\":{in_place},\"depth\":{depth}}}\n",
        comm.rank
    );
    RECORDS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push_str(&line);
    let no_send = send.is_null()
        && !(name == "ncclRecv" || name == "ncclBroadcast" && root != comm.rank as i32);
    let no_recv =
        recv.is_null() && !(name == "ncclSend" || name == "ncclReduce" && root != comm.rank as i32);
    if !(0..=ncclAvg).contains(&red)
        || root < 0
        || root as usize >= comm.world.count
        || count > 0 && (no_send || no_recv)
    {
        return ncclInvalidArgument;
    }
    let op = Op {
        name,
        send,
        recv,
        count,
        dtype,
        red,
        root,
        comm,
    };
    if depth > 0 {
        GROUP.with_borrow_mut(|group| group.push(op));
        return ncclSuccess;
    }
    run(&[op])
}

/// Posts everything, then waits for everything: no pattern deadlocks.
fn run(ops: &[Op]) -> ncclResult_t {
    let read = |op: &Op, bytes: usize| -> Vec<u8> {
        if bytes == 0 || op.send.is_null() {
            return Vec::new();
        }
        // SAFETY: the caller of the operation promises the send buffer.
        unsafe { core::slice::from_raw_parts(op.send, bytes) }.to_vec()
    };
    let mut numbers = Vec::new();
    for op in ops {
        let bytes = op.count * size(op.dtype).unwrap_or(0);
        let Comm { world, rank } = op.comm;
        numbers.push(match op.name {
            "ncclSend" => {
                world.send(*rank, op.root as usize, op.dtype, read(op, bytes));
                0
            }
            "ncclRecv" => 0,
            "ncclReduceScatter" => world.post(
                *rank,
                (op.name, op.count, op.dtype, op.red, op.root),
                read(op, bytes * world.count),
            ),
            _ => world.post(
                *rank,
                (op.name, op.count, op.dtype, op.red, op.root),
                read(op, bytes),
            ),
        });
    }
    ops.iter()
        .zip(numbers)
        .map(|(op, number)| finish(op, number).err().unwrap_or(ncclSuccess))
        .find(|code| *code != ncclSuccess)
        .unwrap_or(ncclSuccess)
}

fn finish(op: &Op, number: u64) -> Result<(), ncclResult_t> {
    let bytes = op.count * size(op.dtype).unwrap_or(0);
    let Comm { world, rank } = op.comm;
    let out = match op.name {
        "ncclSend" => return Ok(()),
        "ncclRecv" => {
            let (dtype, data) = world.recv(op.root as usize, *rank)?;
            if dtype != op.dtype || data.len() != bytes {
                return Err(ncclInvalidUsage);
            }
            data
        }
        name => {
            let parts = world.meet(number)?;
            match name {
                "ncclAllGather" => parts.concat(),
                "ncclBroadcast" => parts[op.root as usize].clone(),
                _ => {
                    if name == "ncclReduce" && op.root as usize != *rank {
                        return Ok(());
                    }
                    let at = if name == "ncclReduceScatter" {
                        bytes * rank
                    } else {
                        0
                    };
                    let parts: Vec<_> = parts.iter().map(|part| &part[at..at + bytes]).collect();
                    reduce(op.dtype, op.red, &parts, None).ok_or(ncclInvalidArgument)?
                }
            }
        }
    };
    if !out.is_empty() {
        // SAFETY: the caller of the operation promises a receive buffer of this size.
        unsafe { core::ptr::copy_nonoverlapping(out.as_ptr(), op.recv, out.len()) };
    }
    Ok(())
}

macro_rules! export {
    ($($(#[$m:meta])* fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "`: see `nccl.h`.\n\n# Safety\nAs `nccl.h` says.")]
        #[unsafe(no_mangle)]
        #[allow(unreachable_pub, clippy::too_many_arguments)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> $ret $body
    )*};
}

/// Writes through a pointer of the caller.
fn put<T>(place: *mut T, value: T) -> ncclResult_t {
    if place.is_null() {
        return ncclInvalidArgument;
    }
    // SAFETY: not null; the caller of the C function promises it is writable.
    unsafe { place.write(value) };
    ncclSuccess
}

fn comm_of(comm: ncclComm_t) -> Option<&'static Comm> {
    // SAFETY: null, or a handle made here, which is never freed.
    unsafe { comm.cast::<Comm>().as_ref() }
}

export! {
    fn ncclGetVersion(out: *mut c_int) -> ncclResult_t {
        put(out, std::env::var("FUSEWIRE_DOUBLE_VERSION").ok().and_then(|text| text.parse().ok()).unwrap_or(22_800))
    }
    fn ncclGetUniqueId(out: *mut ncclUniqueId) -> ncclResult_t {
        static NEXT: core::sync::atomic::AtomicU64 = core::sync::atomic::AtomicU64::new(1);
        let mut id = ncclUniqueId { internal: [0; 128] };
        let number = NEXT.fetch_add(1, core::sync::atomic::Ordering::Relaxed);
        for (place, byte) in id.internal.iter_mut().zip(number.to_ne_bytes()) {
            *place = byte as c_char;
        }
        put(out, id)
    }
    fn ncclGetErrorString(code: ncclResult_t) -> *const c_char {
        match code {
            ncclSuccess => c"no error",
            ncclInvalidArgument => c"invalid argument",
            ncclInvalidUsage => c"invalid usage",
            ncclRemoteError => c"remote process exited or there was a network error",
            _ => c"unknown result code",
        }.as_ptr()
    }
    fn ncclCommInitRank(out: *mut ncclComm_t, count: c_int, id: ncclUniqueId, rank: c_int) -> ncclResult_t {
        if out.is_null() || count < 1 || rank < 0 || rank >= count {
            return ncclInvalidArgument;
        }
        let world = Arc::clone(WORLDS.lock().unwrap_or_else(PoisonError::into_inner).entry(id.internal).or_insert_with(|| World::new(count as usize)));
        if world.count != count as usize {
            return ncclInvalidArgument;
        }
        if let Err(code) = world.join(rank as usize) {
            return code;
        }
        put(out, Box::into_raw(Box::new(Comm { world, rank: rank as usize })).cast())
    }
    fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
        if comm.is_null() { ncclInvalidArgument } else { ncclSuccess }
    }
    fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
        comm_of(comm).map_or(ncclInvalidArgument, |comm| { comm.world.abort(); ncclSuccess })
    }
    fn ncclCommCount(comm: ncclComm_t, out: *mut c_int) -> ncclResult_t {
        comm_of(comm).map_or(ncclInvalidArgument, |comm| put(out, comm.world.count as c_int))
    }
    fn ncclCommUserRank(comm: ncclComm_t, out: *mut c_int) -> ncclResult_t {
        comm_of(comm).map_or(ncclInvalidArgument, |comm| put(out, comm.rank as c_int))
    }
    fn ncclCommGetAsyncError(comm: ncclComm_t, out: *mut ncclResult_t) -> ncclResult_t {
        comm_of(comm).map_or(ncclInvalidArgument, |comm| put(out, if comm.world.aborted() { ncclRemoteError } else { ncclSuccess }))
    }
    fn ncclCommSplit(comm: ncclComm_t, colour: c_int, key: c_int, out: *mut ncclComm_t, _config: *mut ncclConfig_t) -> ncclResult_t {
        let Some(Comm { world, rank }) = comm_of(comm) else { return ncclInvalidArgument };
        let part = [colour.to_ne_bytes(), key.to_ne_bytes()].concat();
        let number = world.post(*rank, ("ncclCommSplit", 0, 0, 0, 0), part);
        let parts = match world.meet(number) { Ok(parts) => parts, Err(code) => return code };
        if colour < 0 {
            return put(out, core::ptr::null_mut());
        }
        let word = |part: &[u8], at: usize| i32::from_ne_bytes(part[at..at + 4].try_into().unwrap_or_default());
        let mut members: Vec<_> = parts.iter().enumerate().filter(|(_, part)| word(part, 0) == colour).map(|(rank, part)| (word(part, 4), rank)).collect();
        members.sort_unstable();
        let at = members.iter().position(|(_, member)| member == rank).unwrap_or(0);
        let world = world.child(number, colour, members.len());
        put(out, Box::into_raw(Box::new(Comm { world, rank: at })).cast())
    }
    fn ncclGroupStart() -> ncclResult_t {
        DEPTH.set(DEPTH.get() + 1);
        ncclSuccess
    }
    fn ncclGroupEnd() -> ncclResult_t {
        match DEPTH.get() {
            0 => ncclInvalidUsage,
            1 => { DEPTH.set(0); run(&GROUP.take()) }
            depth => { DEPTH.set(depth - 1); ncclSuccess }
        }
    }
    fn ncclAllReduce(send: *const c_void, recv: *mut c_void, count: usize, dtype: i32, red: i32, comm: ncclComm_t, _stream: ncclStream_t) -> ncclResult_t {
        issue("ncclAllReduce", send, recv, count, dtype, red, 0, comm)
    }
    fn ncclReduce(send: *const c_void, recv: *mut c_void, count: usize, dtype: i32, red: i32, root: c_int, comm: ncclComm_t, _stream: ncclStream_t) -> ncclResult_t {
        issue("ncclReduce", send, recv, count, dtype, red, root, comm)
    }
    fn ncclBroadcast(send: *const c_void, recv: *mut c_void, count: usize, dtype: i32, root: c_int, comm: ncclComm_t, _stream: ncclStream_t) -> ncclResult_t {
        issue("ncclBroadcast", send, recv, count, dtype, 0, root, comm)
    }
    fn ncclAllGather(send: *const c_void, recv: *mut c_void, count: usize, dtype: i32, comm: ncclComm_t, _stream: ncclStream_t) -> ncclResult_t {
        issue("ncclAllGather", send, recv, count, dtype, 0, 0, comm)
    }
    fn ncclReduceScatter(send: *const c_void, recv: *mut c_void, count: usize, dtype: i32, red: i32, comm: ncclComm_t, _stream: ncclStream_t) -> ncclResult_t {
        issue("ncclReduceScatter", send, recv, count, dtype, red, 0, comm)
    }
    fn ncclSend(send: *const c_void, count: usize, dtype: i32, peer: c_int, comm: ncclComm_t, _stream: ncclStream_t) -> ncclResult_t {
        issue("ncclSend", send, core::ptr::null_mut(), count, dtype, 0, peer, comm)
    }
    fn ncclRecv(recv: *mut c_void, count: usize, dtype: i32, peer: c_int, comm: ncclComm_t, _stream: ncclStream_t) -> ncclResult_t {
        issue("ncclRecv", core::ptr::null(), recv, count, dtype, 0, peer, comm)
    }
    fn fusewireDoubleHostMemory() -> c_int { 1 }
    fn fusewireDoubleTake(buffer: *mut c_char, len: usize) -> usize {
        let mut records = RECORDS.lock().unwrap_or_else(PoisonError::into_inner);
        let need = records.len();
        if need <= len && !buffer.is_null() {
            // SAFETY: the caller promises `len` writable bytes.
            unsafe { core::ptr::copy_nonoverlapping(records.as_ptr(), buffer.cast(), need) };
            records.clear();
        }
        need
    }
}
