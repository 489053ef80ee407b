//! Opens the fake as a library and runs four ranks as threads.

use std::path::PathBuf;

use fusewire_ccl_sys::sys::ncclFloat32;
use fusewire_ccl_sys::{Comm, Kind, Library, RedOp};

fn fake() -> PathBuf {
    std::env::current_exe()
        .unwrap()
        .with_file_name("libfusewire_ccl_fake.so")
}

fn ranks(body: impl Fn(Comm) + Sync) {
    let library = Library::open(Kind::Nccl, Some(&fake())).unwrap();
    let id = library.unique_id().unwrap();
    std::thread::scope(|scope| {
        for rank in 0..4 {
            let body = &body;
            scope.spawn(move || body(library.init_rank(4, id, rank).unwrap()));
        }
    });
}

#[test]
fn collectives() {
    ranks(|comm| {
        let null = core::ptr::null_mut();
        let rank = comm.rank() as f32;
        let send = [rank, 1.0, 2.0, 3.0];
        let (from, mut out) = (send.as_ptr().cast(), [0f32; 4]);
        // SAFETY: `send` and `out` have four floats each.
        unsafe {
            comm.all_reduce(
                from,
                out.as_mut_ptr().cast(),
                4,
                ncclFloat32,
                RedOp::SUM,
                null,
            )
        }
        .unwrap();
        assert_eq!(out, [6.0, 4.0, 8.0, 12.0]);
        // SAFETY: `send` has the one float that is sent, and `out` has room for the four floats
        // that are received.
        unsafe { comm.all_gather(from, out.as_mut_ptr().cast(), 1, ncclFloat32, null) }.unwrap();
        assert_eq!(out, [0.0, 1.0, 2.0, 3.0]);
        let group = comm.library().group().unwrap();
        // SAFETY: `send` has the float that is sent and outlives the group.
        unsafe { comm.send(from, 1, ncclFloat32, (comm.rank() + 1) % 4, null) }.unwrap();
        // SAFETY: `out` has the float that is received and outlives the group.
        unsafe {
            comm.recv(
                out.as_mut_ptr().cast(),
                1,
                ncclFloat32,
                (comm.rank() + 3) % 4,
                null,
            )
        }
        .unwrap();
        group.end().unwrap();
        assert_eq!(out[0], (rank + 3.0) % 4.0);
        let half = comm.split(Some(comm.rank() % 2), 0).unwrap().unwrap();
        assert_eq!((half.count(), half.rank()), (2, comm.rank() / 2));
    });
}

#[test]
fn abort_frees_a_waiting_rank() {
    ranks(|comm| {
        if comm.rank() == 0 {
            comm.abort().unwrap();
            return;
        }
        let mut out = [0f32];
        // SAFETY: `out` has the one float that is received.
        let answer = unsafe {
            comm.recv(
                out.as_mut_ptr().cast(),
                1,
                ncclFloat32,
                0,
                core::ptr::null_mut(),
            )
        };
        assert!(answer.is_err());
        assert_eq!(comm.async_error(), Ok(6));
    });
}
