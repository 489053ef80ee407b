//! Runs the same operations with one process per rank. Some tests kill a process.

mod common;
#[path = "common/suite.rs"]
mod suite;

use core::time::Duration;
use std::env;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use common::{TEST_TIMEOUT, connect};
use fusewire_gloo_sys::{Call, Context, DataType, Error, ReduceOp};

const RANK: &str = "FUSEWIRE_GLOO_TEST_RANK";
const SIZE: &str = "FUSEWIRE_GLOO_TEST_SIZE";
const FOLDER: &str = "FUSEWIRE_GLOO_TEST_FOLDER";
const PART: &str = "FUSEWIRE_GLOO_TEST_PART";

/// Starts this test binary as a child process that runs only `rank_process`.
fn spawn(part: &str, rank: usize, size: usize, folder: &Path) -> Child {
    Command::new(env::current_exe().expect("this binary"))
        .args([
            "--exact",
            "rank_process",
            "--ignored",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(RANK, rank.to_string())
        .env(SIZE, size.to_string())
        .env(FOLDER, folder)
        .env(PART, part)
        .stdout(Stdio::null())
        .spawn()
        .expect("a process")
}

/// Waits for `child`, but at most for `bound`. Returns true if `child` succeeded.
fn finish(mut child: Child, bound: Duration) -> bool {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().expect("a status") {
            return status.success();
        }
        if start.elapsed() > bound {
            child.kill().expect("an end");
            child.wait().expect("a status");
            panic!("a process did not end within {bound:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
#[ignore = "one rank, started by the other tests of this file"]
fn rank_process() {
    let variable = |name| env::var(name).expect("set by the test that started this process");
    let number = |name| variable(name).parse::<usize>().expect("a number");
    let (rank, size) = (number(RANK), number(SIZE));
    let folder = variable(FOLDER);
    let context = connect(rank, size, TEST_TIMEOUT, Path::new(&folder)).expect("a context");
    match variable(PART).as_str() {
        "suite" => {
            for bytes in [0, 1, 5000] {
                suite::movers(&context, bytes);
            }
            suite::unequal(
                &context,
                |from, to| if from == 0 { 0 } else { from * 100 + to },
            );
            suite::ring(&context, 8 << 20);
            let mut data = vec![rank as f64 + 1.0; 10_000];
            let pointer = data.as_mut_ptr().cast::<u8>();
            // SAFETY: input and output are the same 10,000 elements.
            unsafe {
                let (dtype, op) = (DataType::F64, ReduceOp::Sum);
                context.allreduce(pointer, pointer, data.len(), dtype, op, Call::new())
            }
            .expect("allreduce");
            let expected = (size * (size + 1) / 2) as f64;
            assert!(data.iter().all(|sum| *sum == expected));
            context.barrier(Call::new()).expect("barrier");
        }
        "until killed" => {
            context.barrier(Call::new()).expect("barrier");
            std::fs::write(Path::new(&folder).join(format!("ready{rank}")), "").expect("a file");
            if rank == size - 1 {
                std::thread::sleep(TEST_TIMEOUT * 2);
                return;
            }
            let error = context
                .barrier(Call::new())
                .expect_err("the last rank is killed");
            assert!(matches!(error, Error::Io { .. }), "{error:?}");
        }
        "half way, rank 0 dies" => half_way(&context, Path::new(&folder), 0),
        "half way, rank 1 dies" => half_way(&context, Path::new(&folder), 1),
        other => panic!("no part {other}"),
    }
}

/// Rank 0 starts to receive from rank 1 and is stopped with `SIGSTOP` before the data arrives. When
/// `victim` is killed, the part of the message that fits the sockets' buffers is therefore in
/// flight.
fn half_way(context: &Context, folder: &Path, victim: usize) {
    context.barrier(Call::new()).expect("barrier");
    let mut data = vec![0_u8; 64 << 20];
    let (pointer, bytes) = (data.as_mut_ptr(), data.len());
    let result = if context.rank() == 0 {
        std::fs::write(folder.join("receiving"), "").expect("a file");
        // SAFETY: the buffer has `bytes` bytes.
        unsafe { context.recv(pointer, bytes, 1, Call::new()) }
    } else {
        until(|| folder.join("stopped").exists());
        std::fs::write(folder.join("sending"), "").expect("a file");
        // SAFETY: the buffer has `bytes` bytes.
        unsafe { context.send(pointer, bytes, 0, Call::new()) }
    };
    let error = result.expect_err("the other rank is killed");
    let Error::Io { peer, .. } = error else {
        panic!("{error:?}");
    };
    assert_eq!(peer, Some(victim));
}

fn until(condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < TEST_TIMEOUT, "nothing happened");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn signal(child: &Child, signal: i32) {
    let id = i32::try_from(child.id()).expect("a process id");
    // SAFETY: `kill` takes two integers; the child has not been waited for, so its id is valid.
    assert_eq!(unsafe { libc::kill(id, signal) }, 0);
}

#[test]
fn every_operation_between_processes() {
    for size in 1..=4 {
        let folder = tempfile::tempdir().expect("a folder");
        let ranks: Vec<_> = (0..size)
            .map(|rank| spawn("suite", rank, size, folder.path()))
            .collect();
        let results: Vec<_> = ranks
            .into_iter()
            .map(|rank| finish(rank, TEST_TIMEOUT * 2))
            .collect();
        assert!(
            results.iter().all(|success| *success),
            "{results:?} of {size} ranks"
        );
    }
}

#[test]
fn a_killed_process_fails_the_others_soon() {
    for size in [2, 4] {
        let folder = tempfile::tempdir().expect("a folder");
        let mut ranks: Vec<_> = (0..size)
            .map(|rank| spawn("until killed", rank, size, folder.path()))
            .collect();
        let ready = |rank: usize| folder.path().join(format!("ready{rank}")).exists();
        until(|| (0..size).all(ready));
        // The other ranks have entered the second barrier, or will enter it soon. All of them must
        // fail.
        std::thread::sleep(Duration::from_millis(200));
        let mut victim = ranks.pop().expect("the last rank");
        victim.kill().expect("an end");
        victim.wait().expect("a status");
        let start = Instant::now();
        let results: Vec<_> = ranks
            .into_iter()
            .map(|rank| finish(rank, TEST_TIMEOUT))
            .collect();
        assert!(
            results.iter().all(|success| *success),
            "{results:?} of {size} ranks"
        );
        assert!(
            start.elapsed() < TEST_TIMEOUT / 2,
            "took {:?}",
            start.elapsed()
        );
    }
}

#[test]
fn a_process_killed_half_way_through_a_message_fails_the_other_soon() {
    for victim in 0..2 {
        let folder = tempfile::tempdir().expect("a folder");
        let part = format!("half way, rank {victim} dies");
        let mut ranks: Vec<_> = (0..2)
            .map(|rank| spawn(&part, rank, 2, folder.path()))
            .collect();
        until(|| folder.path().join("receiving").exists());
        // This process cannot observe that the receive has begun. Half a second is long enough.
        std::thread::sleep(Duration::from_millis(500));
        signal(&ranks[0], libc::SIGSTOP);
        std::fs::write(folder.path().join("stopped"), "").expect("a file");
        until(|| folder.path().join("sending").exists());
        std::thread::sleep(Duration::from_millis(300));
        let mut dead = ranks.remove(victim);
        dead.kill().expect("an end");
        dead.wait().expect("a status");
        let survivor = ranks.remove(0);
        if victim == 1 {
            signal(&survivor, libc::SIGCONT);
        }
        let start = Instant::now();
        assert!(finish(survivor, TEST_TIMEOUT * 2), "{part}");
        assert!(
            start.elapsed() < TEST_TIMEOUT / 2,
            "{part}: took {:?}",
            start.elapsed()
        );
    }
}
