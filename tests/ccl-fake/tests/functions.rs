//! Tests the results and argument checks of the fake's C functions.

use core::ffi::{c_char, c_int, c_void};
use std::path::PathBuf;
use std::sync::Mutex;

use fusewire_ccl_sys::sys::{
    ncclAvg, ncclComm_t, ncclFloat32, ncclInt64, ncclInvalidArgument, ncclInvalidUsage, ncclProd,
    ncclSuccess, ncclSum,
};
use fusewire_ccl_sys::{Comm, Kind, Library, RedOp};

const NULL: *mut c_void = core::ptr::null_mut();

/// Serialises the tests, because the records and the version are global state of the library.
static ONE: Mutex<()> = Mutex::new(());

fn fake() -> PathBuf {
    std::env::current_exe()
        .unwrap()
        .with_file_name("libfusewire_ccl_fake.so")
}

fn ranks(count: usize, body: impl Fn(Comm) + Sync) {
    let library = Library::open(Kind::Nccl, Some(&fake())).unwrap();
    let id = library.unique_id().unwrap();
    std::thread::scope(|scope| {
        for rank in 0..count {
            let body = &body;
            scope.spawn(move || body(library.init_rank(count, id, rank).unwrap()));
        }
    });
}

fn object() -> libloading::Library {
    // SAFETY: the fake has no initialisers that run at load time.
    unsafe { libloading::Library::new(fake()) }.unwrap()
}

fn take() -> String {
    let object = object();
    let mut text = vec![0u8; 1 << 20];
    // SAFETY: the type is that of the exported function, and `text` has `text.len()` bytes.
    let length = unsafe {
        let take =
            object.get::<unsafe extern "C" fn(*mut c_char, usize) -> usize>(b"fusewireCclFakeTake");
        take.unwrap()(text.as_mut_ptr().cast(), text.len())
    };
    String::from_utf8(text[..length].to_vec()).unwrap()
}

fn set_version(version: c_int) {
    let object = object();
    // SAFETY: the type is that of the exported function, which has no requirements.
    unsafe {
        let set = object.get::<unsafe extern "C" fn(c_int) -> c_int>(b"fusewireCclFakeSetVersion");
        set.unwrap()(version);
    }
}

#[test]
fn scatter_gather_and_all_to_all() {
    let _one = ONE.lock().unwrap();
    ranks(3, |comm| {
        let table = *comm.library().as_raw();
        let (rank, raw) = (comm.rank() as i64, comm.as_raw());
        let rows = [10 * rank, 10 * rank + 1, 10 * rank + 2];
        let (from, mut row, mut all) = (rows.as_ptr().cast(), [-1i64], [-1i64; 3]);
        let (to_row, to_all): (*mut c_void, *mut c_void) =
            (row.as_mut_ptr().cast(), all.as_mut_ptr().cast());
        // SAFETY: `rows` has the three elements that are sent. `row` and `all` have the one and the
        // three elements that are received.
        let codes = unsafe {
            [
                table.scatter.unwrap()(from, to_row, 1, ncclInt64, 2, raw, NULL),
                table.gather.unwrap()(to_row, to_all, 1, ncclInt64, 0, raw, NULL),
            ]
        };
        assert_eq!(codes, [ncclSuccess; 2]);
        assert_eq!(row, [20 + rank]);
        assert_eq!(all, if rank == 0 { [20, 21, 22] } else { [-1; 3] });
        // SAFETY: `rows` and `all` have three elements each.
        unsafe { comm.all_to_all(from, to_all, 1, ncclInt64, NULL) }.unwrap();
        assert_eq!(all, [rank, 10 + rank, 20 + rank]);
    });
}

#[test]
fn scaled_sums_are_each_ranks_own() {
    let _one = ONE.lock().unwrap();
    ranks(2, |comm| {
        let factor = [2.0f32, -0.5][comm.rank()];
        // SAFETY: `factor` is one float, and the fake reads it during the call.
        let op = unsafe { comm.pre_mul_sum((&raw const factor).cast(), ncclFloat32) }.unwrap();
        let mut x = [4.0f32];
        let at: *mut c_void = x.as_mut_ptr().cast();
        let reduce = |dtype, op| {
            // SAFETY: `x` has one element of four bytes. The call with a larger type fails before
            // it reads memory.
            unsafe { comm.all_reduce(at, at, 1, dtype, op, NULL) }
        };
        reduce(ncclFloat32, op).unwrap();
        assert_eq!(x, [6.0]);
        let other_type = reduce(ncclInt64, op).unwrap_err().to_string();
        assert!(
            other_type.contains("a bad root, reduction or pointer"),
            "{other_type}"
        );
        comm.destroy_op(op).unwrap();
        assert!(reduce(ncclFloat32, op).is_err(), "it is destroyed");
        assert!(comm.destroy_op(op).is_err(), "twice");
        for op in [RedOp(-1), RedOp(i32::MIN), RedOp(i32::MAX)] {
            assert!(reduce(ncclFloat32, op).is_err(), "{op:?}");
        }
        let mut raw_op = 0;
        // SAFETY: the call names no kind of memory, so it fails before it reads the factor.
        let code = unsafe {
            let create = comm.library().as_raw().red_op_create_pre_mul_sum.unwrap();
            create(&raw mut raw_op, at, ncclFloat32, 2, comm.as_raw())
        };
        assert_eq!(code, ncclInvalidUsage);
    });
}

#[test]
fn integers_wrap() {
    let _one = ONE.lock().unwrap();
    ranks(3, |comm| {
        for (op, expected) in [
            (ncclSum, i64::MAX.wrapping_mul(3)),
            (
                ncclProd,
                i64::MAX.wrapping_mul(i64::MAX).wrapping_mul(i64::MAX),
            ),
            (ncclAvg, i64::MAX.wrapping_mul(3) / 3),
        ] {
            let mut x = [i64::MAX];
            let at: *mut c_void = x.as_mut_ptr().cast();
            // SAFETY: `x` has one element, which is reduced in place.
            unsafe { comm.all_reduce(at, at, 1, ncclInt64, RedOp(op), NULL) }.unwrap();
            assert_eq!(x, [expected], "{op}");
        }
    });
}

/// Sender and receiver both fail if count or type differ. All ranks fail if the counts of a
/// collective differ.
#[test]
fn mismatches_are_errors_on_all_ranks() {
    let _one = ONE.lock().unwrap();
    ranks(2, |comm| {
        let mut x = [0i64; 4];
        let at: *mut c_void = x.as_mut_ptr().cast();
        let (count, other) = (3 + comm.rank(), 1 - comm.rank());
        for dtype in [ncclInt64, ncclFloat32] {
            let group = comm.library().group().unwrap();
            let mine = if comm.rank() == 0 { dtype } else { ncclInt64 };
            // SAFETY: `x` has four elements and outlives the group. The calls send and receive at
            // most four elements.
            unsafe {
                comm.send(at, count, mine, other, NULL).unwrap();
                comm.recv(at, 4, ncclInt64, other, NULL).unwrap();
            }
            // Rank 1 expects four i64. Rank 0 sends three elements or another type, so rank 1
            // rejects the message.
            let error = group.end().unwrap_err().to_string();
            let received = comm.rank() == 1;
            let text = if received {
                "rank 0 sent 3 elements"
            } else {
                "rank 1 receives another"
            };
            assert!(error.contains(text), "rank {}: {error}", comm.rank());
        }
        // SAFETY: `x` has four elements, and the call reduces at most four elements in place.
        let error = unsafe { comm.all_reduce(at, at, count, ncclInt64, RedOp::SUM, NULL) };
        let error = error.unwrap_err().to_string();
        assert!(error.contains("the ranks' calls differ"), "{error}");
    });
}

#[test]
fn arguments_are_checked() {
    let _one = ONE.lock().unwrap();
    ranks(1, |comm| {
        let table = *comm.library().as_raw();
        let (raw, mut x) = (comm.as_raw(), [1i64]);
        let at: *mut c_void = x.as_mut_ptr().cast();
        // SAFETY: every call fails before it accesses memory.
        let codes = unsafe {
            [
                (table.broadcast)(at, at, 1, ncclInt64, -1, raw, NULL),
                (table.broadcast)(at, at, 1, ncclInt64, 1, raw, NULL),
                (table.broadcast)(at, at, 1, 99, 0, raw, NULL),
                (table.broadcast)(at, at, usize::MAX / 4, ncclInt64, 0, raw, NULL),
                (table.broadcast)(at, at, 1, ncclInt64, 0, NULL, NULL),
                (table.all_gather)(NULL, at, 1, ncclInt64, raw, NULL),
                (table.all_gather)(at, NULL, 1, ncclInt64, raw, NULL),
            ]
        };
        assert_eq!(codes, [ncclInvalidArgument; 7]);
        // SAFETY: a call with a count of 0 accesses no memory.
        let code = unsafe { (table.all_gather)(NULL, NULL, 0, ncclInt64, raw, NULL) };
        assert_eq!(code, ncclSuccess);
    });
}

#[test]
fn communicators_are_recorded() {
    let _one = ONE.lock().unwrap();
    take();
    let library = Library::open(Kind::Nccl, Some(&fake())).unwrap();
    let table = *library.as_raw();
    let id = library.unique_id().unwrap();
    let (mut raw, mut config): (ncclComm_t, _) = (NULL, library.config());
    // SAFETY: the pointers point to live variables, and every call with the communicator precedes
    // its destruction.
    let codes = unsafe {
        let init = table.comm_init_rank_config.unwrap();
        let made = init(&raw mut raw, 1, id, 0, &raw mut config);
        let (start, end) = ((table.group_start)(), (table.group_end)());
        let finalized = table.comm_finalize.unwrap()(raw);
        [
            made,
            start,
            end,
            finalized,
            (table.comm_destroy)(raw),
            (table.group_end)(),
        ]
    };
    assert_eq!(codes[..5], [ncclSuccess; 5]);
    assert_eq!(codes[5], ncclInvalidUsage, "no group is open");
    let records = take();
    let names = [
        "ncclCommInitRankConfig",
        "ncclGroupStart",
        "ncclGroupEnd",
        "ncclCommFinalize",
        "ncclCommDestroy",
        "ncclGroupEnd",
    ];
    assert_eq!(records.lines().count(), names.len(), "{records}");
    for (record, name) in records.lines().zip(names) {
        assert!(
            record.starts_with(&format!("{{\"name\":\"{name}\",")),
            "{record}"
        );
    }
}

/// Functions that are newer than the version are exported, but return an error.
#[test]
fn an_old_version_has_symbols_that_fail() {
    let _one = ONE.lock().unwrap();
    ranks(1, |comm| {
        let table = *comm.library().as_raw();
        let (raw, mut x, mut part) = (comm.as_raw(), [1i64], NULL);
        let at: *mut c_void = x.as_mut_ptr().cast();
        let mut calls = || {
            // SAFETY: `x` has the one element that is exchanged in place; `part` is writable.
            unsafe {
                [
                    table.all_to_all.unwrap()(at, at, 1, ncclInt64, raw, NULL),
                    table.comm_split.unwrap()(raw, 0, 0, &raw mut part, core::ptr::null_mut()),
                ]
            }
        };
        assert_eq!(calls(), [ncclSuccess; 2]);
        set_version(21_705);
        assert_eq!(calls(), [ncclInvalidUsage; 2]);
        set_version(21_800);
        assert_eq!(calls(), [ncclInvalidUsage, ncclSuccess]);
        set_version(0);
    });
}
