//! Exported C functions.
#![allow(non_snake_case)] // the names of nccl.h

use core::ffi::{c_char, c_int, c_void};
use core::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use fusewire_ccl_sys::sys::*;

use crate::comm::{Comm, Factor, SharedComm};
use crate::ops::{NONE, Op, comm_of, depth, group_end, group_start, issue};
use crate::record;
use crate::reduce::size;

static COMMS: LazyLock<Mutex<HashMap<[c_char; 128], Arc<SharedComm>>>> =
    LazyLock::new(Mutex::default);
/// Version set by `fusewireCclFakeSetVersion`. 0 selects the version from the environment.
static VERSION: AtomicI32 = AtomicI32::new(0);

fn version() -> i32 {
    let set = VERSION.load(Ordering::Relaxed);
    if set != 0 {
        return set;
    }
    let variable = std::env::var("FUSEWIRE_CCL_FAKE_VERSION").ok();
    variable
        .and_then(|text| text.parse().ok())
        .unwrap_or(22_800)
}

/// Returns true if the current version includes functions that were introduced in version `since`.
fn has(since: i32) -> bool {
    let has = version() >= since;
    if !has {
        crate::last_error::set("this version does not have the function");
    }
    has
}

macro_rules! export {
    ($($(#[$m:meta])* fn $name:ident($($arg:ident: $ty:ty),*) -> $ret:ty $body:block)*) => {$(
        #[doc = concat!("`", stringify!($name), "` of `nccl.h`.")]
        ///
        /// # Safety
        /// The requirements of `nccl.h`.
        #[unsafe(no_mangle)]
        #[allow(unreachable_pub, clippy::too_many_arguments)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> $ret $body
    )*};
}

/// Writes a result through a pointer argument of a C function.
fn put<T>(out: *mut T, value: T) -> ncclResult_t {
    if out.is_null() {
        return ncclInvalidArgument;
    }
    // SAFETY: the pointer is not null (checked above), and `nccl.h` requires result pointers to be
    // writable.
    unsafe { out.write(value) };
    ncclSuccess
}

fn init(
    name: &str,
    out: *mut ncclComm_t,
    count: c_int,
    id: ncclUniqueId,
    rank: c_int,
    fields: &[(&str, i64)],
) -> ncclResult_t {
    if out.is_null() || count < 1 || rank < 0 || rank >= count || depth() > 0 {
        return ncclInvalidArgument;
    }
    let mut comms = COMMS.lock().unwrap_or_else(PoisonError::into_inner);
    let shared = comms.entry(id.internal);
    let shared = Arc::clone(shared.or_insert_with(|| SharedComm::new(count as usize)));
    drop(comms);
    if shared.count != count as usize {
        return ncclInvalidArgument;
    }
    let comm = Comm::new(shared, rank as usize);
    record::call(name, Some(&comm), 0, fields);
    match comm.shared.join(rank as usize) {
        Ok(()) => put(out, Box::into_raw(Box::new(comm)).cast()),
        Err(code) => code,
    }
}

fn split(comm: &Comm, colour: c_int, key: c_int, out: *mut ncclComm_t) -> ncclResult_t {
    let fields = [("colour", i64::from(colour)), ("key", i64::from(key))];
    record::call("ncclCommSplit", Some(comm), depth(), &fields);
    let Comm { shared, rank, .. } = comm;
    let part = [colour.to_ne_bytes(), key.to_ne_bytes()].concat();
    let number = shared.post(*rank, ("ncclCommSplit", 0, 0, 0, 0), (part, Vec::new()));
    let parts = match shared.all_parts(number) {
        Ok(parts) => parts,
        Err(code) => return code,
    };
    if colour < 0 {
        return put(out, core::ptr::null_mut());
    }
    let word = |part: &[u8], at: usize| i32::from_ne_bytes(part[at..at + 4].try_into().unwrap());
    let mut members: Vec<_> = parts
        .iter()
        .enumerate()
        .filter(|(_, (part, _))| word(part, 0) == colour)
        .map(|(rank, (part, _))| (word(part, 4), rank))
        .collect();
    members.sort_unstable();
    let at = members.iter().position(|(_, member)| member == rank);
    let shared = shared.child(number, colour, members.len());
    put(
        out,
        Box::into_raw(Box::new(Comm::new(shared, at.unwrap_or(0)))).cast(),
    )
}

/// Records a call with the communicator as the only recorded argument, then runs `then`.
fn on(
    name: &str,
    comm: ncclComm_t,
    then: impl FnOnce(&'static Comm) -> ncclResult_t,
) -> ncclResult_t {
    comm_of(comm).map_or(ncclInvalidArgument, |comm| {
        record::call(name, Some(comm), depth(), &[]);
        then(comm)
    })
}

export! {
    fn ncclGetVersion(out: *mut c_int) -> ncclResult_t {
        put(out, version())
    }
    fn ncclGetUniqueId(out: *mut ncclUniqueId) -> ncclResult_t {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut id = ncclUniqueId { internal: [0; 128] };
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        for (target, byte) in id.internal.iter_mut().zip(number.to_ne_bytes()) {
            *target = byte as c_char;
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
    fn ncclGetLastError(_comm: ncclComm_t) -> *const c_char {
        crate::last_error::get()
    }
    fn ncclCommInitRank(
        out: *mut ncclComm_t, count: c_int, id: ncclUniqueId, rank: c_int
    ) -> ncclResult_t {
        init("ncclCommInitRank", out, count, id, rank, &[])
    }
    fn ncclCommInitRankConfig(
        out: *mut ncclComm_t, count: c_int, id: ncclUniqueId, rank: c_int,
        config: *mut ncclConfig_t
    ) -> ncclResult_t {
        if !has(21_400) || config.is_null() { return ncclInvalidUsage }
        // SAFETY: the caller passes a whole configuration.
        let config = unsafe { *config };
        let set = |value: c_int| i64::from(if value == NCCL_CONFIG_UNDEF_INT { -1 } else { value });
        let text = |at: *const c_char| match at.is_null() {
            true => -1,
            // SAFETY: the caller passes texts that end with NUL.
            false => unsafe { core::ffi::CStr::from_ptr(at) }.to_bytes().len() as i64,
        };
        init("ncclCommInitRankConfig", out, count, id, rank, &[
            ("magic", i64::from(config.magic)),
            ("min_ctas", set(config.minCTAs)),
            ("max_ctas", set(config.maxCTAs)),
            ("cga", set(config.cgaClusterSize)),
            ("net_name", text(config.netName)),
        ])
    }
    fn ncclCommFinalize(comm: ncclComm_t) -> ncclResult_t {
        if !has(21_400) { return ncclInvalidUsage }
        on("ncclCommFinalize", comm, |_| ncclSuccess)
    }
    fn ncclCommDestroy(comm: ncclComm_t) -> ncclResult_t {
        on("ncclCommDestroy", comm, |_| ncclSuccess)
    }
    fn ncclCommAbort(comm: ncclComm_t) -> ncclResult_t {
        on("ncclCommAbort", comm, |comm| { comm.shared.abort(); ncclSuccess })
    }
    fn ncclCommCount(comm: ncclComm_t, out: *mut c_int) -> ncclResult_t {
        comm_of(comm).map_or(ncclInvalidArgument, |comm| put(out, comm.shared.count as c_int))
    }
    fn ncclCommUserRank(comm: ncclComm_t, out: *mut c_int) -> ncclResult_t {
        comm_of(comm).map_or(ncclInvalidArgument, |comm| put(out, comm.rank as c_int))
    }
    fn ncclCommGetAsyncError(comm: ncclComm_t, out: *mut ncclResult_t) -> ncclResult_t {
        let error = |comm: &Comm| if comm.shared.aborted() { ncclRemoteError } else { ncclSuccess };
        comm_of(comm).map_or(ncclInvalidArgument, |comm| put(out, error(comm)))
    }
    fn ncclCommSplit(
        comm: ncclComm_t, colour: c_int, key: c_int, out: *mut ncclComm_t,
        _config: *mut ncclConfig_t
    ) -> ncclResult_t {
        if !has(21_800) { return ncclInvalidUsage }
        comm_of(comm).map_or(ncclInvalidArgument, |comm| split(comm, colour, key, out))
    }
    fn ncclCommRegister(
        comm: ncclComm_t, at: *mut c_void, bytes: usize, out: *mut *mut c_void
    ) -> ncclResult_t {
        if !has(21_900) || at.is_null() { return ncclInvalidUsage }
        let Some(comm) = comm_of(comm) else { return ncclInvalidArgument };
        record::call("ncclCommRegister", Some(comm), depth(), &[("count", bytes as i64)]);
        put(out, at)
    }
    fn ncclCommDeregister(comm: ncclComm_t, handle: *mut c_void) -> ncclResult_t {
        if !has(21_900) || handle.is_null() { return ncclInvalidUsage }
        on("ncclCommDeregister", comm, |_| ncclSuccess)
    }
    fn ncclRedOpCreatePreMulSum(
        out: *mut ncclRedOp_t, scalar: *mut c_void, dtype: i32, residence: c_int, comm: ncclComm_t
    ) -> ncclResult_t {
        let (Some(comm), Some(size)) = (comm_of(comm), size(dtype)) else {
            return ncclInvalidArgument;
        };
        let on_device = residence == ncclScalarDevice;
        if !has(21_100) || scalar.is_null() || !on_device && residence != ncclScalarHostImmediate {
            return ncclInvalidUsage;
        }
        // SAFETY: the pointer is not null (checked above), and `nccl.h` requires one readable
        // element.
        let bytes = unsafe { core::slice::from_raw_parts(scalar.cast::<u8>(), size) }.to_vec();
        let word = bytes.iter().rev().fold(0u64, |word, byte| word << 8 | u64::from(*byte));
        let mut scales = comm.scales();
        let factor = match on_device {
            true => Factor::OnDevice(scalar as usize, size),
            false => Factor::Immediate(bytes),
        };
        scales.push(Some((dtype, factor)));
        let op = ncclAvg + scales.len() as i32;
        let fields = [
            ("dtype", i64::from(dtype)),
            ("op", i64::from(op)),
            ("scalar", word as i64),
            ("residence", i64::from(residence)),
        ];
        record::call("ncclRedOpCreatePreMulSum", Some(comm), depth(), &fields);
        put(out, op)
    }
    fn ncclRedOpDestroy(op: ncclRedOp_t, comm: ncclComm_t) -> ncclResult_t {
        let Some(comm) = comm_of(comm) else { return ncclInvalidArgument };
        if !has(21_100) { return ncclInvalidUsage }
        record::call("ncclRedOpDestroy", Some(comm), depth(), &[("op", i64::from(op))]);
        let at = usize::try_from(i64::from(op) - i64::from(ncclAvg) - 1).unwrap_or(usize::MAX);
        match comm.scales().get_mut(at).and_then(Option::take) {
            Some(_) => ncclSuccess,
            None => ncclInvalidArgument,
        }
    }
    fn ncclGroupStart() -> ncclResult_t {
        group_start()
    }
    fn ncclGroupEnd() -> ncclResult_t {
        group_end()
    }
    fn fusewireCclFakeHostMemory() -> c_int { 1 }
    fn fusewireCclFakeSetVersion(version: c_int) -> c_int {
        VERSION.store(version, Ordering::Relaxed);
        0
    }
    fn fusewireCclFakeTake(buffer: *mut c_char, len: usize) -> usize {
        // SAFETY: the caller guarantees that `buffer` is null or has `len` writable bytes, as
        // `take` requires.
        unsafe { record::take(buffer, len) }
    }
}

/// Exports operations. Each entry lists the arguments of `nccl.h`, the fields of [`Op`], and the
/// version that introduced the operation.
macro_rules! operations {
    ($(
        $name:ident($($arg:ident: $ty:ty),*)
            { $($field:ident: $value:expr),* } since $since:literal
    )*) => {$(
        export! {
            fn $name($($arg: $ty,)* comm: ncclComm_t, _stream: ncclStream_t) -> ncclResult_t {
                if !has($since) { return ncclInvalidUsage }
                let none = Op {
                    name: stringify!($name),
                    send: core::ptr::null(),
                    recv: core::ptr::null_mut(),
                    count: 0,
                    dtype: 0,
                    red: NONE,
                    root: NONE,
                    comm,
                };
                issue(Op { $($field: $value,)* ..none })
            }
        }
    )*};
}

type SendPointer = *const c_void;
type ReceivePointer = *mut c_void;

operations! {
    ncclAllReduce(send: SendPointer, recv: ReceivePointer, count: usize, dtype: i32, red: i32)
        { send: send, recv: recv, count: count, dtype: dtype, red: red } since 0
    ncclReduce(
        send: SendPointer, recv: ReceivePointer, count: usize, dtype: i32, red: i32, root: c_int)
        { send: send, recv: recv, count: count, dtype: dtype, red: red, root: root } since 0
    ncclBroadcast(send: SendPointer, recv: ReceivePointer, count: usize, dtype: i32, root: c_int)
        { send: send, recv: recv, count: count, dtype: dtype, root: root } since 0
    ncclAllGather(send: SendPointer, recv: ReceivePointer, count: usize, dtype: i32)
        { send: send, recv: recv, count: count, dtype: dtype } since 0
    ncclReduceScatter(send: SendPointer, recv: ReceivePointer, count: usize, dtype: i32, red: i32)
        { send: send, recv: recv, count: count, dtype: dtype, red: red } since 0
    ncclSend(send: SendPointer, count: usize, dtype: i32, peer: c_int)
        { send: send, count: count, dtype: dtype, root: peer } since 0
    ncclRecv(recv: ReceivePointer, count: usize, dtype: i32, peer: c_int)
        { recv: recv, count: count, dtype: dtype, root: peer } since 0
    ncclAlltoAll(send: SendPointer, recv: ReceivePointer, count: usize, dtype: i32)
        { send: send, recv: recv, count: count, dtype: dtype } since 22_800
    // RCCL's `ncclAllToAll`, which is older than NCCL's `ncclAlltoAll`.
    ncclAllToAll(send: SendPointer, recv: ReceivePointer, count: usize, dtype: i32)
        { send: send, recv: recv, count: count, dtype: dtype } since 0
    ncclScatter(send: SendPointer, recv: ReceivePointer, count: usize, dtype: i32, root: c_int)
        { send: send, recv: recv, count: count, dtype: dtype, root: root } since 22_800
    ncclGather(send: SendPointer, recv: ReceivePointer, count: usize, dtype: i32, root: c_int)
        { send: send, recv: recv, count: count, dtype: dtype, root: root } since 22_800
}
