//! Every failure must produce an error within a bound: no operation hangs or ends the process.

mod common;

use core::ptr::{null, null_mut};
use core::time::Duration;
use std::sync::mpsc;
use std::time::Instant;

use common::{POISON, TEST_TIMEOUT, connect, with_threads};
use fusewire_gloo_sys::{
    Call, Context, DataType, Error, ReduceOp, Rendezvous, TcpOptions, Transfer,
};

/// Timeout of operations that are expected to fail.
const SHORT: Duration = Duration::from_millis(400);
/// Bound that is far above every expected duration and far below a hang.
const BOUND: Duration = Duration::from_secs(20);

#[test]
fn a_rank_that_does_not_come_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let start = Instant::now();
    let error = connect(0, 2, SHORT, folder.path()).expect_err("no rank 1");
    let Error::Timeout {
        operation: "connect",
        peer: Some(1),
        ..
    } = error
    else {
        panic!("{error:?}");
    };
    assert!(start.elapsed() >= SHORT, "returned before its time");
    assert!(start.elapsed() < BOUND, "took {:?}", start.elapsed());
}

#[test]
fn a_rank_that_publishes_and_dies_is_bounded() {
    let folder = tempfile::tempdir().expect("a folder");
    // Rank 1 of 3 publishes its address, and times out because rank 2 is missing.
    connect(1, 3, SHORT, folder.path()).expect_err("nobody there");
    let copy = |from: &str, to: &str| {
        if let Ok(value) = std::fs::read(folder.path().join(from)) {
            std::fs::write(folder.path().join(to), value).expect("a copy");
        }
    };
    copy("1", "2");
    copy("rank_1", "rank_2");
    let start = Instant::now();
    let error = connect(0, 3, SHORT, folder.path()).expect_err("nobody listens");
    assert!(
        matches!(error, Error::Timeout { .. } | Error::Io { .. }),
        "{error:?}"
    );
    assert!(start.elapsed() < BOUND, "took {:?}", start.elapsed());
}

struct BrokenStore(&'static str);

impl Rendezvous for BrokenStore {
    fn set(&self, _: &str, _: &[u8]) -> Result<(), String> {
        match self.0 {
            "set" => Err("the disk is on fire".to_owned()),
            "panic" => panic!("a bug in the rendezvous"),
            _ => Ok(()),
        }
    }

    fn get(&self, _: &str) -> Result<Vec<u8>, String> {
        match self.0 {
            "get" => Err("the disk is on fire".to_owned()),
            _ => Ok(vec![0xFF; 3]),
        }
    }

    fn wait(&self, _: &[&str], _: Duration) -> Result<(), String> {
        Ok(())
    }
}

#[test]
fn errors_of_the_rendezvous_come_back() {
    let device = TcpOptions::loopback();
    for name in ["set", "get"] {
        let error = Context::new(0, 2, TEST_TIMEOUT, &device, Box::new(BrokenStore(name)));
        let Err(Error::Rendezvous {
            operation: "connect",
            text,
        }) = error
        else {
            panic!("{error:?}");
        };
        assert!(text.contains("the disk is on fire"), "{text}");
    }
    let error = Context::new(0, 2, TEST_TIMEOUT, &device, Box::new(BrokenStore("panic")));
    let Err(Error::Rendezvous { text, .. }) = error else {
        panic!("{error:?}");
    };
    assert!(text.contains("panicked in set"), "{text}");
}

#[test]
fn devices_that_do_not_exist_are_errors() {
    for device in [
        TcpOptions::Interface("no-such-interface0".to_owned()),
        TcpOptions::Hostname("no-such-host.invalid".to_owned()),
        TcpOptions::Hostname(String::new()),
        TcpOptions::Address([192, 0, 2, 1].into()),
    ] {
        let error = Context::new(
            0,
            1,
            TEST_TIMEOUT,
            &device,
            Box::new(BrokenStore("nothing")),
        );
        assert!(
            matches!(error, Err(Error::Invalid { .. })),
            "{device:?} gave {error:?}"
        );
    }
}

#[test]
fn a_late_rank_times_out_and_closes_the_context() {
    with_threads(2, TEST_TIMEOUT, |context| {
        if context.rank() == 1 {
            // This rank does not call the barrier. Its next operation must return the failure.
            std::thread::sleep(SHORT * 3);
            let start = Instant::now();
            let error = context.barrier(Call::new()).expect_err("rank 0 has failed");
            assert!(matches!(error, Error::Io { .. }), "{error:?}");
            assert!(start.elapsed() < BOUND, "took {:?}", start.elapsed());
            return;
        }
        let start = Instant::now();
        let error = context
            .barrier(Call::new().timeout(SHORT))
            .expect_err("rank 1 is late");
        assert!(start.elapsed() >= SHORT, "returned before its time");
        assert!(start.elapsed() < BOUND, "took {:?}", start.elapsed());
        let Error::Timeout {
            operation: "barrier",
            peer: Some(1),
            ref text,
        } = error
        else {
            panic!("{error:?}");
        };
        assert!(text.contains("Timed out"), "{text}");
        let total = text
            .split_once("after ")
            .and_then(|(_, rest)| rest.split_once(" ms in all"));
        let total: u128 = total.expect("a time").0.parse().expect("a number");
        assert!(total >= SHORT.as_millis(), "{text}");
        assert!(context.is_closed());
        let Err(Error::Closed {
            operation: "barrier",
            first,
        }) = context.barrier(Call::new())
        else {
            panic!("a closed context took a call");
        };
        assert_eq!(first, error.to_string());
        let mut byte = POISON;
        // SAFETY: the buffer has one byte, and the call sends 0 bytes.
        let refused = unsafe { context.broadcast(&raw mut byte, 0, 0, Call::new()) };
        assert!(matches!(refused, Err(Error::Closed { .. })), "{refused:?}");
    });
}

#[test]
fn the_deadline_covers_the_whole_operation() {
    // Rank 1 sends messages in sequence, each well within the receiver's timeout.
    const MESSAGES: u32 = 8;
    with_threads(2, TEST_TIMEOUT, |context| {
        let mut bytes = [POISON; MESSAGES as usize];
        if context.rank() == 1 {
            for tag in 0..MESSAGES {
                std::thread::sleep(SHORT / 2);
                // SAFETY: the buffer has one byte.
                let sent = unsafe { context.send(bytes.as_ptr(), 1, 0, Call::new().tag(tag)) };
                if sent.is_err() {
                    return;
                }
            }
            panic!("all messages arrived in spite of the deadline");
        }
        let transfers: Vec<_> = bytes
            .iter_mut()
            .zip(0..)
            .map(|(byte, tag)| Transfer::Recv {
                data: byte,
                bytes: 1,
                peer: 1,
                tag,
            })
            .collect();
        let start = Instant::now();
        // SAFETY: each message has its own byte.
        let error = unsafe { context.batch(&transfers, Call::new().timeout(SHORT)) }
            .expect_err("the messages take four times as long");
        assert!(
            matches!(error, Error::Timeout { peer: Some(1), .. }),
            "{error:?}"
        );
        assert!(start.elapsed() < SHORT * 3, "took {:?}", start.elapsed());
    });
}

#[test]
fn sizes_that_differ_time_out() {
    with_threads(2, TEST_TIMEOUT, |context| {
        let mut data = [POISON; 64];
        let bytes = if context.rank() == 0 { 64 } else { 32 };
        // SAFETY: the buffer has at least `bytes` bytes.
        let result =
            unsafe { context.broadcast(data.as_mut_ptr(), bytes, 0, Call::new().timeout(SHORT)) };
        let error = result.expect_err("64 bytes for 32");
        assert!(
            matches!(error, Error::Timeout { .. } | Error::Io { .. }),
            "{error:?}"
        );
    });
}

#[test]
fn a_closed_rank_fails_the_others_soon() {
    with_threads(3, TEST_TIMEOUT, |context| {
        context.barrier(Call::new()).expect("barrier");
        if context.rank() == 2 {
            context.close();
            return;
        }
        let start = Instant::now();
        let error = context.barrier(Call::new()).expect_err("rank 2 is gone");
        assert!(matches!(error, Error::Io { .. }), "{error:?}");
        assert!(start.elapsed() < BOUND, "took {:?}", start.elapsed());
    });
}

#[test]
fn abort_from_another_thread_ends_a_blocked_operation() {
    let (sender, receiver) = mpsc::channel();
    let receiver = std::sync::Mutex::new(receiver);
    with_threads(2, TEST_TIMEOUT, |context| {
        if context.rank() == 1 {
            // This rank stays connected without a call until rank 0 has finished.
            receiver
                .lock()
                .expect("a lock")
                .recv_timeout(TEST_TIMEOUT)
                .expect("word from rank 0");
            let error = context.barrier(Call::new()).expect_err("rank 0 has closed");
            assert!(matches!(error, Error::Io { .. }), "{error:?}");
            return;
        }
        std::thread::scope(|scope| {
            let (context, start) = (&context, Instant::now());
            let blocked: Vec<_> = (0..3)
                .map(|tag| {
                    scope.spawn(move || {
                        let mut data = vec![1.0_f32; 1000];
                        let pointer = data.as_mut_ptr().cast::<u8>();
                        let call = Call::new().tag(tag);
                        // SAFETY: input and output are the same 1000 elements.
                        unsafe {
                            let (dtype, op) = (DataType::F32, ReduceOp::Sum);
                            context.allreduce(pointer, pointer, 1000, dtype, op, call)
                        }
                    })
                })
                .collect();
            std::thread::sleep(SHORT);
            assert!(
                blocked.iter().all(|thread| !thread.is_finished()),
                "nothing blocks"
            );
            context.abort();
            context.abort();
            for thread in blocked {
                let error = thread.join().expect("no panic").expect_err("aborted");
                assert!(matches!(error, Error::Aborted { .. }), "{error:?}");
            }
            assert!(start.elapsed() < BOUND, "took {:?}", start.elapsed());
        });
        let error = context.barrier(Call::new()).expect_err("aborted");
        assert!(matches!(error, Error::Closed { .. }), "{error:?}");
        sender.send(()).expect("rank 1 listens");
    });
}

#[test]
fn wrong_arguments_are_refused_and_close_nothing() {
    let invalid = |result: Result<(), Error>| {
        assert!(matches!(result, Err(Error::Invalid { .. })), "{result:?}");
    };
    let no_rank = Context::new(
        2,
        2,
        TEST_TIMEOUT,
        &TcpOptions::loopback(),
        Box::new(BrokenStore("")),
    );
    assert!(matches!(no_rank, Err(Error::Invalid { .. })), "{no_rank:?}");
    let no_time = Context::new(
        0,
        1,
        Duration::ZERO,
        &TcpOptions::loopback(),
        Box::new(BrokenStore("")),
    );
    assert!(matches!(no_time, Err(Error::Invalid { .. })), "{no_time:?}");
    with_threads(2, TEST_TIMEOUT, |context| {
        let call = Call::new();
        let mut data = [0_u8; 16];
        let pointer = data.as_mut_ptr();
        let peer = 1 - context.rank();
        let own = Transfer::Send {
            data: pointer,
            bytes: 1,
            peer: context.rank(),
            tag: 0,
        };
        // SAFETY: every call is refused before it accesses memory.
        unsafe {
            let (float, sum) = (DataType::F32, ReduceOp::Sum);
            invalid(context.allreduce(pointer, pointer, 1, float, ReduceOp::BitXor, call));
            invalid(context.allreduce(pointer, pointer, usize::MAX, float, sum, call));
            invalid(context.allreduce(null(), pointer, 1, float, sum, call));
            invalid(context.reduce(pointer, pointer, 1, float, sum, 2, call));
            invalid(context.broadcast(pointer, 1, 2, call));
            invalid(context.broadcast(null_mut(), 1, 0, call));
            invalid(context.allgather(pointer, pointer, usize::MAX, call));
            invalid(context.allgatherv(pointer, pointer, &[1], call));
            invalid(context.allgatherv(pointer, pointer, &[usize::MAX, 2], call));
            invalid(context.alltoallv(pointer, &[1, 1], pointer, &[1, 1, 1], call));
            invalid(context.alltoallv(pointer, &[1, 2], pointer, &[2, 1], call));
            invalid(context.send(pointer, 1, 2, call));
            invalid(context.recv(pointer, 1, context.rank(), call));
            invalid(context.batch(&[own], call));
            invalid(context.send(pointer, 1, peer, call.timeout(Duration::ZERO)));
        }
        assert!(!context.is_closed());
        context.barrier(call).expect("the context still works");
    });
}

#[test]
fn a_host_name_of_this_machine_is_enough() {
    let device = TcpOptions::Hostname("localhost".to_owned());
    let context = Context::new(
        0,
        1,
        TEST_TIMEOUT,
        &device,
        Box::new(BrokenStore("nothing")),
    )
    .expect("localhost");
    context.barrier(Call::new()).expect("a barrier of one");
}

#[test]
fn a_peer_that_fails_half_way_through_a_message_fails_the_other_soon() {
    // Rank 0 times out and drops its buffers while rank 1 sends. At that time, some data of rank 1
    // is still in flight, and plain Gloo no longer tracks it. This data must not be written to a
    // dropped buffer.
    for delay in [0, 15, 19, 20, 21, 25] {
        with_threads(2, TEST_TIMEOUT, |context| {
            let mut data = vec![POISON; 16 << 20];
            if context.rank() == 0 {
                let call = Call::new().timeout(Duration::from_millis(20));
                let bytes = data.len();
                // SAFETY: `data` is valid for `bytes` bytes.
                let result = unsafe { context.recv(data.as_mut_ptr(), bytes, 1, call) };
                drop(data);
                assert!(result.is_ok() || context.is_closed());
            } else {
                std::thread::sleep(Duration::from_millis(delay));
                let start = Instant::now();
                // SAFETY: `data` is valid for `data.len()` bytes. The call may succeed, because it
                // races with the failure of the peer.
                let result = unsafe { context.send(data.as_ptr(), data.len(), 0, Call::new()) };
                assert!(
                    matches!(result, Ok(()) | Err(Error::Io { .. })),
                    "{result:?}"
                );
                assert!(start.elapsed() < BOUND, "took {:?}", start.elapsed());
            }
        });
    }
}
