//! Tests of the rendezvous: ranks that join, fail to join, and leave.

use core::time::Duration;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread;

use bytemuck::Zeroable;
use fusewire_device::layout::{ABORT, FailureKind, FailureRecord};

use super::Communicator;
use super::rendezvous::{Rendezvous, Watched, WatchedMember, set_duplicate_grace};
use super::topology::Locality;
use super::words::{ABORT_AT, FAILURE_AT};
use crate::cpu::SegmentDescriptor;
use crate::device::Device;
use crate::memory::{Memory, MemoryDescriptor};
use crate::options::Options;
use crate::store::{self, MemoryStore, Store, TcpStore, TcpStoreServer};
use crate::{DType, Error, Result, WindowOptions};

const TIMEOUT: Duration = Duration::from_secs(10);

/// A store that delays its waits, so that other ranks make progress first.
#[derive(Debug)]
struct LateStore(Arc<dyn Store>, Mutex<Option<Receiver<()>>>);

impl Store for LateStore {
    fn set(&self, key: &str, value: &[u8]) -> store::Result<()> {
        self.0.set(key, value)
    }
    fn get(&self, key: &str, timeout: Duration) -> store::Result<Vec<u8>> {
        self.wait(&[key], timeout)?;
        self.0.get(key, timeout)
    }
    fn wait(&self, keys: &[&str], timeout: Duration) -> store::Result<()> {
        match self.1.lock().unwrap().take() {
            Some(gate) => gate.recv().unwrap(),
            None => thread::sleep(Duration::from_millis(300)),
        }
        self.0.wait(keys, timeout)
    }
    fn add(&self, key: &str, amount: i64) -> store::Result<i64> {
        self.0.add(key, amount)
    }
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> store::Result<Vec<u8>> {
        self.0.compare_set(key, expected, desired)
    }
    fn check(&self, keys: &[&str]) -> store::Result<bool> {
        self.0.check(keys)
    }
    fn delete(&self, key: &str) -> store::Result<bool> {
        self.0.delete(key)
    }
}

fn join(rank: u32, store: Arc<dyn Store>) -> Result<()> {
    let options = Options {
        timeout: TIMEOUT,
        ..Options::default()
    };
    Communicator::new(Device::Cpu, rank, 3, store, "rendezvous", options).map(drop)
}

#[test]
fn a_rank_that_hosts_the_store_leaves_last() -> Result<()> {
    let server = TcpStoreServer::bind("127.0.0.1:0")?;
    let port = server.port();
    let client = move || TcpStore::connect("127.0.0.1", port, TIMEOUT);
    let late: Vec<_> = (1..3)
        .map(|rank| {
            thread::spawn(move || {
                join(
                    rank,
                    Arc::new(LateStore(Arc::new(client()?), Mutex::default())),
                )
            })
        })
        .collect();
    // Rank 0 joins last, so that it need not wait for the others.
    thread::sleep(Duration::from_millis(200));
    join(0, Arc::new(client()?))?;
    drop(server);
    for rank in late {
        rank.join().map_err(|_| Error::Communicator {
            name: "rendezvous".to_owned(),
            detail: "a rank panicked".to_owned(),
        })??;
    }
    Ok(())
}

#[test]
fn options_that_overflow_the_layout_are_refused() {
    let store = || Arc::new(crate::store::MemoryStore::new());
    let options = Options::default;
    for options in [
        Options {
            staging_bytes: 1 << 63,
            ..options()
        },
        Options {
            packet_slot_bytes: 1 << 62,
            ..options()
        },
        Options {
            channel_slot_bytes: 1 << 62,
            ..options()
        },
        Options {
            channel_depth: 1 << 60,
            ..options()
        },
    ] {
        let error = Communicator::new(Device::Cpu, 0, 1, store(), "large", options)
            .expect_err("more than an address space");
        assert!(error.to_string().contains("at most"), "{error}");
    }
}

/// Checks that packet slots shrink as the number of ranks grows.
#[test]
fn packet_slots_of_many_ranks_fit_the_limit() {
    let options = Options {
        packet_slot_bytes: 8 << 20,
        blocks: 4,
        ..Options::default()
    };
    let bytes = |size| options.workspace_bytes(Device::Cpu, size).unwrap();
    assert_eq!(options.packet_slot(4), 8 << 20);
    assert_eq!(options.packet_slot(5), (256 << 20) / 40 / 64 * 64);
    assert!(bytes(4) > 256 << 20);
    assert!(bytes(300) < 1 << 30, "{}", bytes(300));
}

fn join_named(
    rank: u32,
    size: u32,
    store: &Arc<MemoryStore>,
    timeout: u64,
) -> Result<Communicator> {
    let options = Options {
        bootstrap_timeout: Some(Duration::from_millis(timeout)),
        ..Options::default()
    };
    let store: Arc<dyn Store> = Arc::clone(store) as Arc<dyn Store>;
    Communicator::new(Device::Cpu, rank, size, store, "again", options)
}

/// Returns the error of each of `ranks`, which join concurrently.
fn errors(ranks: &[u32], size: u32, store: &Arc<MemoryStore>) -> Vec<String> {
    thread::scope(|scope| {
        let ranks: Vec<_> = ranks
            .iter()
            .map(|rank| scope.spawn(move || join_named(*rank, size, store, 300)))
            .collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap().map(drop).unwrap_err().to_string())
            .collect()
    })
}

fn all_meet(size: u32, store: &Arc<MemoryStore>) {
    thread::scope(|scope| {
        let ranks: Vec<_> = (0..size)
            .map(|rank| scope.spawn(move || join_named(rank, size, store, 10_000).map(drop)))
            .collect();
        ranks
            .into_iter()
            .for_each(|rank| rank.join().unwrap().unwrap());
    });
}

#[test]
fn who_did_not_come_is_named_and_the_next_try_is_not_in_the_way() {
    let store = Arc::new(MemoryStore::new());
    for (round, (there, missing)) in [
        (&[0, 1, 3][..], 2),
        (&[1, 2, 3], 0),
        (&[2, 3], 0),
        (&[0], 1),
    ]
    .into_iter()
    .enumerate()
    {
        for error in errors(there, 4, &store) {
            let expected = format!("rank {missing} did not join within 0.3 s");
            assert!(error.contains(&expected), "{error}");
            // A rank of another job would see this hint at its first attempt.
            let attempt = format!("this is attempt {} to create \"again\"", 2 * round + 1);
            assert_eq!(error.contains(&attempt), round > 0, "{error}");
        }
        all_meet(4, &store);
    }
}

fn await_key(store: &MemoryStore, key: &str) {
    store.wait(&[key], Duration::from_secs(60)).unwrap();
}

#[test]
fn a_rank_joins_once() {
    let store = Arc::new(MemoryStore::new());
    // Rank 0 joins only after the duplicate was refused, which takes long on a slow machine.
    let patient = |rank| {
        set_duplicate_grace(Duration::from_secs(60));
        join_named(rank, 2, &store, 60_000).map(drop)
    };
    thread::scope(|scope| {
        let first = scope.spawn(|| patient(1));
        await_key(&store, "fusewire/again/0/workspace/1");
        let error = patient(1).unwrap_err().to_string();
        assert!(
            error.contains("rank 1 was started twice: process"),
            "{error}"
        );
        assert!(error.contains("MASTER_PORT"), "{error}");
        assert!(error.contains("RANKSIZE_QUERY_METHOD"), "{error}");
        // The rank that joined first is not affected.
        patient(0).unwrap();
        first.join().unwrap().unwrap();
    });
    // The key of the duplicate was also deleted.
    assert_eq!(store.num_keys().unwrap(), 1);
}

/// Returns the errors of ranks that join as (rank, size), and the time until all had failed.
fn errors_of(ranks: &[(u32, u32)]) -> (Vec<String>, Duration) {
    let store = Arc::new(MemoryStore::new());
    let started = std::time::Instant::now();
    let errors = thread::scope(|scope| {
        let join = |&(rank, size): &(u32, u32)| {
            let store = &store;
            scope.spawn(move || join_named(rank, size, store, 60_000).map(drop))
        };
        let ranks: Vec<_> = ranks.iter().map(join).collect();
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap().unwrap_err().to_string())
            .collect()
    });
    (errors, started.elapsed())
}

/// Regression test: ranks with different sizes used to fail with "other options (or calls)", or to
/// wait for ranks that the others did not know.
#[test]
fn sizes_that_differ_are_named() {
    for (ranks, message) in [
        (
            [(0, 2), (1, 3)],
            "rank 1 was started as one of 3 ranks, rank 0 as one of 2",
        ),
        (
            [(0, 3), (1, 2)],
            "rank 1 was started as one of 2 ranks, rank 0 as one of 3",
        ),
    ] {
        let (errors, elapsed) = errors_of(&ranks);
        for error in errors {
            assert!(error.contains(message), "{error}");
        }
        assert!(elapsed < Duration::from_secs(20), "{elapsed:?}");
    }
    // Ranks 0 and 1 agree on 2 ranks, which exclude rank 2. The rendezvous does not end, because
    // its end would delete the keys that rank 2 reads.
    let store = MemoryStore::new();
    thread::scope(|scope| {
        let gather = |rank, size| {
            let store = &store;
            scope.spawn(move || {
                let rendezvous = Rendezvous {
                    store,
                    prefix: "sizes",
                    name: "again",
                    rank,
                    size,
                    timeout: Duration::from_secs(60),
                    watched: Watched::default(),
                };
                let nothing = MemoryDescriptor::Host(SegmentDescriptor {
                    pid: std::process::id(),
                    fd: rank,
                    bytes: 1,
                    inode: 0,
                    start_time: 0,
                });
                let here = Locality::on_host("here");
                rendezvous
                    .gather("workspace-sizes", &nothing, &here)
                    .map(drop)
            })
        };
        let ranks = [gather(0, 2), gather(1, 2), gather(2, 3)];
        let [zero, one, two] = ranks.map(|rank| rank.join().unwrap());
        zero.unwrap();
        one.unwrap();
        let error = two.unwrap_err().to_string();
        assert!(error.contains("rank 0 counts fewer"), "{error}");
    });
}

/// Regression test: all ranks except the duplicate used to wait until their timeout.
#[test]
fn a_rank_that_was_started_twice_releases_the_others() {
    let store = Arc::new(MemoryStore::new());
    let started = std::time::Instant::now();
    let errors: Vec<String> = thread::scope(|scope| {
        let join = |rank: u32| {
            let store = &store;
            scope.spawn(move || join_named(rank, 4, store, 60_000).map(drop))
        };
        let mut ranks: Vec<_> = (0..3).map(join).collect();
        for rank in 0..3 {
            await_key(&store, &format!("fusewire/again/0/workspace/{rank}"));
        }
        ranks.push(join(1));
        ranks
            .into_iter()
            .map(|rank| rank.join().unwrap().unwrap_err().to_string())
            .collect()
    });
    let elapsed = started.elapsed();
    for error in &errors {
        assert!(error.contains("rank 1 was started twice"), "{error}");
    }
    let named = errors
        .iter()
        .filter(|error| error.contains("rank 3 has not joined"));
    assert_eq!(named.count(), 3, "{errors:#?}");
    assert!(elapsed < Duration::from_secs(20), "{elapsed:?}");
}

#[test]
fn the_claim_of_a_dead_process_can_be_taken() {
    let store = Arc::new(MemoryStore::new());
    // Process ids are at most 2^22, the kernel's limit.
    let dead = format!("4194305/0/{}", crate::bootstrap::host_id().unwrap());
    store
        .set("fusewire/again/0/claim/0", dead.as_bytes())
        .unwrap();
    all_meet(2, &store);
}

#[test]
fn a_rendezvous_that_has_ended_leaves_only_its_number() {
    let store = Arc::new(MemoryStore::new());
    all_meet(3, &store);
    // Only the number of the next rendezvous remains, so the keys do not accumulate.
    let left = store.num_keys().unwrap();
    all_meet(3, &store);
    all_meet(5, &store);
    assert_eq!((left, store.num_keys().unwrap()), (1, 1));
}

/// A rank that has left the last barrier of a call may end its process, although another rank has
/// not left yet.
#[test]
fn a_rank_may_end_after_it_has_left_a_barrier() {
    let mut child = std::process::Command::new("sleep")
        .arg("100")
        .spawn()
        .unwrap();
    let process = (child.id(), crate::process::start_time(child.id()).unwrap());
    let store = Arc::new(MemoryStore::new());
    let (open, gate) = channel();
    let late = LateStore(Arc::clone(&store) as _, Mutex::new(Some(gate)));
    thread::scope(|scope| {
        let barrier = |rank: u32| {
            let (store, late): (&dyn Store, &dyn Store) = (&*store, &late);
            scope.spawn(move || {
                let rendezvous = Rendezvous {
                    // Rank 1 sees later than rank 2 that all ranks have entered.
                    store: if rank == 1 { late } else { store },
                    prefix: "leaving",
                    name: "leaving",
                    rank,
                    size: 3,
                    timeout: Duration::from_secs(60),
                    watched: Watched {
                        communicator: None,
                        replaced: None,
                        members: vec![WatchedMember {
                            member: 2,
                            rank: 2,
                            process,
                        }],
                    },
                };
                rendezvous.barrier_then("leaving", || ())
            })
        };
        // Rank 1 enters first: the last rank to enter does not wait for the others.
        let one = barrier(1);
        while store.add("leaving/leaving", 0).unwrap() == 0 {
            thread::yield_now();
        }
        let [zero, two] = [0, 2].map(barrier);
        two.join().unwrap().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        // Rank 0 waits for rank 1, although rank 2 has ended.
        thread::sleep(Duration::from_millis(700));
        assert!(!zero.is_finished() && !one.is_finished());
        open.send(()).unwrap();
        one.join().unwrap().unwrap();
        zero.join().unwrap().unwrap();
    });
}

/// If ranks fail before a barrier, all ranks learn the reason of one of them.
#[test]
fn ranks_agree_on_the_failure_of_some() {
    let store = Arc::new(MemoryStore::new());
    for failed in [&[][..], &[0], &[2], &[0, 1, 2]] {
        let reasons: Vec<Option<String>> = thread::scope(|scope| {
            let agree = |rank: u32| {
                let store = &store;
                scope.spawn(move || {
                    let rendezvous = Rendezvous {
                        store: &**store,
                        prefix: "agreement",
                        name: "agreement",
                        rank,
                        size: 3,
                        timeout: TIMEOUT,
                        watched: Watched::default(),
                    };
                    let failure = failed.contains(&rank).then(|| format!("reason {rank}"));
                    rendezvous.agree("end", failure, || ()).unwrap()
                })
            };
            let ranks: Vec<_> = (0..3).map(agree).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(reasons.iter().all(|reason| *reason == reasons[0]));
        let possible: Vec<_> = failed.iter().map(|rank| format!("reason {rank}")).collect();
        match &reasons[0] {
            None => assert!(failed.is_empty()),
            Some(reason) => assert!(possible.contains(reason), "{reason}"),
        }
        assert_eq!(store.num_keys().unwrap(), 0, "{failed:?}");
    }
}

/// Calls `body` on each rank of a communicator of `size` ranks over `store`.
fn on_ranks(
    size: u32,
    store: &Arc<MemoryStore>,
    body: impl Fn(&Communicator) -> Result<()> + Sync,
) {
    thread::scope(|scope| {
        let (store, body) = (&store, &body);
        let run = |rank| {
            scope.spawn(move || {
                let comm = join_named(rank, size, store, 10_000)?;
                body(&comm)
            })
        };
        let ranks: Vec<_> = (0..size).map(run).collect();
        ranks
            .into_iter()
            .for_each(|rank| rank.join().unwrap().unwrap());
    });
}

/// Regression test: each call left several keys per rank in the store.
#[test]
fn host_calls_leave_no_keys() {
    let store = Arc::new(MemoryStore::new());
    on_ranks(3, &store, |comm| {
        comm.barrier()?;
        let before = store.num_keys()?;
        // No rank begins a call before all ranks have counted.
        comm.barrier()?;
        let tensor = comm.alloc(DType::F32, 4)?;
        let window = comm.new_window(&tensor, WindowOptions::default())?;
        comm.barrier()?;
        assert_eq!(store.num_keys()?, before);
        window.free()
    });
}

/// Regression test: a rank that could not determine the outcome of a call kept its communicator.
/// Its later windows then had other numbers than those of the other ranks.
#[test]
fn a_host_call_that_a_rank_does_not_join_stops_the_communicator() {
    let store = Arc::new(MemoryStore::new());
    on_ranks(2, &store, |comm| {
        if comm.rank() == 1 {
            // Stays until rank 0 has failed.
            await_key(&store, "failed");
            return Ok(());
        }
        let short = comm.with_timeout(Duration::from_millis(200));
        let error = short.alloc(DType::F32, 4).expect_err("rank 1 is missing");
        let text = error.to_string();
        assert!(text.contains("rank 1 did not join within 0.2 s"), "{text}");
        assert!(comm.failure().is_some());
        Ok(store.set("failed", b"1")?)
    });
}

#[test]
fn a_host_call_without_an_outcome_stops_the_communicator() {
    let store = Arc::new(MemoryStore::new());
    // The ranks cannot count in this key.
    store
        .set("fusewire/again/0/alloc-0/end", b"not a number")
        .unwrap();
    on_ranks(2, &store, |comm| {
        let error = comm.alloc(DType::F32, 4).expect_err("no outcome");
        assert!(matches!(error, Error::Store(_)), "{error}");
        assert!(comm.failure().is_some());
        Ok(())
    });
}

/// A rank whose communicator fails during a host call cannot repeat it, so no rank can.
#[test]
fn a_host_call_during_which_one_rank_stops_stops_all() {
    let store = Arc::new(MemoryStore::new());
    on_ranks(2, &store, |comm| {
        let call = comm.host_call("alloc");
        let failed = comm.inner.group.error("a time-out");
        if comm.rank() == 0 {
            comm.inner.stop(failed.clone());
            call.agreed(Err::<(), _>(failed)).expect_err("the failure");
            return Ok(());
        }
        let error = call.agreed(Ok(())).expect_err("rank 0 has failed");
        let text = error.to_string();
        assert!(
            text.contains("\": alloc failed on rank 0") && !text.contains("repeated"),
            "{text}"
        );
        assert!(comm.failure().is_some());
        Ok(())
    });
}

/// Regression test, found on a GPU: two ranks failed concurrently, each wrote the abort words of
/// some ranks first, and the ranks returned two different errors.
#[test]
fn ranks_report_the_same_failure_if_two_fail_concurrently() {
    let store = Arc::new(MemoryStore::new());
    on_ranks(3, &store, |comm| {
        let rank = comm.rank();
        store.set(&format!("joined-{rank}"), b"1")?;
        if rank == 0 {
            (0..3).for_each(|rank| await_key(&store, &format!("joined-{rank}")));
            let workspaces = &comm.inner.executor.workspaces;
            for reporter in [1, 2] {
                let record = FailureRecord {
                    state: 2,
                    kind: FailureKind::Timeout as u64,
                    ..FailureRecord::zeroed()
                };
                let words: [u64; size_of::<FailureRecord>() / 8] = bytemuck::cast(record);
                for (at, word) in (FAILURE_AT..).step_by(8).zip(words) {
                    workspaces[reporter]
                        .as_ref()
                        .expect("mapped")
                        .store(at, word)?;
                }
            }
            // Rank 1 wins the word of rank 0, and rank 2 overtakes it.
            for (workspace, reporter) in workspaces.iter().flatten().zip([1, 2, 2]) {
                workspace.store(ABORT_AT, ABORT | reporter)?;
            }
            store.set("failed", b"1")?;
        }
        await_key(&store, "failed");
        let error = comm.failure().expect("two ranks have failed");
        let reporter = error.failure().map(|failure| failure.reporter);
        assert_eq!(reporter, Some(1), "rank {rank}: {error}");
        Ok(())
    });
}

#[test]
fn new_windows_are_removed_unless_a_peer_may_use_them() {
    let store = Arc::new(MemoryStore::new());
    on_ranks(1, &store, |comm| {
        let call = comm.host_call("alloc");
        let memory = Memory::create(Device::Cpu, 4096, "window")?;
        let add = || call.add_windows(Ok(vec![(memory.clone(), 0)]), &[4096]);
        // The workspace is a window, too.
        let windows = add()?;
        assert_eq!((windows.id(0), comm.inner.windows.count()), (1, 2));
        drop(windows);
        assert_eq!(comm.inner.windows.count(), 1);
        let windows = add()?;
        assert_eq!(windows.id(0), 1);
        // Peers may have agreed on the window before the failure.
        comm.abort();
        drop(windows);
        assert_eq!(comm.inner.windows.count(), 2);
        Ok(())
    });
}
