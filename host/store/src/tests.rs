//! Tests that run with every kind of store, and tests of each kind.

use core::sync::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use super::wire::{self, Dialect, Query, Writer};
use super::{
    FileStore, MemoryStore, PrefixStore, Store, StoreOptions, StoreProtocol, StoreSecret, TcpStore,
    TcpStoreServer,
};
use crate::Error;

const SHORT: Duration = Duration::from_millis(60);
const LONG: Duration = Duration::from_secs(20);

fn local_server() -> (TcpStoreServer, TcpStore) {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let store = TcpStore::connect("127.0.0.1", server.port(), LONG).unwrap();
    (server, store)
}

/// A temporary path at which no file exists. The file is removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("fusewire-store-test-{}-{number}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Runs `test` with each kind of store.
fn each_store(test: impl Fn(Arc<dyn Store>)) {
    test(Arc::new(MemoryStore::new()));
    test(Arc::new(PrefixStore::new(
        "group",
        Arc::new(MemoryStore::new()),
    )));
    let file = Scratch::new();
    test(Arc::new(FileStore::open(&file.0).unwrap()));
    let (_server, store) = local_server();
    test(Arc::new(store));
    let (_server, store) = local_server();
    test(Arc::new(PrefixStore::new("group", Arc::new(store))));
}

#[test]
fn values_come_back() {
    each_store(|store| {
        let large: Vec<u8> = (0..1_000_003u32).map(|i| i as u8).collect();
        for value in [&b""[..], b"x", b"\0\xff", &large] {
            store.set("key", value).unwrap();
            assert_eq!(store.get("key", LONG).unwrap(), value);
        }
        assert!(store.check(&["key"]).unwrap());
        assert!(!store.check(&["key", "other"]).unwrap());
        assert!(store.check(&[]).unwrap());
        assert!(store.delete("key").unwrap());
        assert!(!store.delete("key").unwrap());
        assert!(!store.check(&["key"]).unwrap());
        store.wait(&[], SHORT).unwrap();
    });
}

#[test]
fn counters_are_decimal_text() {
    each_store(|store| {
        assert_eq!(store.add("n", 5).unwrap(), 5);
        assert_eq!(store.add("n", -12).unwrap(), -7);
        assert_eq!(store.get("n", LONG).unwrap(), b"-7");
        store.set("n", b"40").unwrap();
        assert_eq!(store.add("n", 2).unwrap(), 42);
        store.set("n", b"forty").unwrap();
        assert!(matches!(
            store.add("n", 1),
            Err(Error::Call {
                operation: "add",
                ..
            })
        ));
        // The failed `add` did not change the value.
        assert_eq!(store.get("n", LONG).unwrap(), b"forty");
    });
}

#[test]
fn compare_set_follows_pytorch() {
    each_store(|store| {
        assert_eq!(store.compare_set("k", b"old", b"new").unwrap(), b"old");
        assert!(!store.check(&["k"]).unwrap());
        assert_eq!(store.compare_set("k", b"", b"first").unwrap(), b"first");
        assert_eq!(
            store.compare_set("k", b"wrong", b"second").unwrap(),
            b"first"
        );
        assert_eq!(
            store.compare_set("k", b"first", b"second").unwrap(),
            b"second"
        );
        assert_eq!(store.get("k", LONG).unwrap(), b"second");
    });
}

#[test]
fn waiting_ends_when_the_last_key_comes() {
    each_store(|store| {
        thread::scope(|scope| {
            let value = scope.spawn(|| store.get("late", LONG).unwrap());
            let keys = scope.spawn(|| store.wait(&["a", "late", "b"], LONG).unwrap());
            thread::sleep(Duration::from_millis(20));
            store.set("a", b"").unwrap();
            assert_eq!(store.add("late", 3).unwrap(), 3);
            thread::sleep(Duration::from_millis(10));
            assert!(!keys.is_finished());
            assert_eq!(store.compare_set("b", b"", b"x").unwrap(), b"x");
            assert_eq!(value.join().unwrap(), b"3");
            keys.join().unwrap();
        });
    });
}

#[test]
fn timeouts_name_the_missing_key_and_leave_the_store_usable() {
    each_store(|store| {
        store.set("here", b"1").unwrap();
        let start = Instant::now();
        let error = store.wait(&["here", "missing"], SHORT).unwrap_err();
        assert!(start.elapsed() >= SHORT);
        match error {
            Error::Timeout { key, .. } => assert!(key.ends_with("missing"), "{key}"),
            other => panic!("{other}"),
        }
        assert!(matches!(
            store.get("missing", SHORT),
            Err(Error::Timeout { .. })
        ));
        assert_eq!(store.get("here", SHORT).unwrap(), b"1");
        store.set("missing", b"2").unwrap();
        assert_eq!(store.get("missing", SHORT).unwrap(), b"2");
    });
}

#[test]
fn many_threads_count_without_loss() {
    each_store(|store| {
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        store.add("n", 1).unwrap();
                    }
                });
            }
        });
        assert_eq!(store.add("n", 0).unwrap(), 400);
    });
}

#[test]
fn prefixes_keep_keys_apart() {
    let root: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let a = PrefixStore::new("a", Arc::clone(&root));
    let b = PrefixStore::new("b", Arc::clone(&root));
    a.set("key", b"a").unwrap();
    assert!(!b.check(&["key"]).unwrap());
    assert_eq!(root.get("a/key", SHORT).unwrap(), b"a");
}

#[test]
fn dropping_the_server_ends_waits_with_an_error() {
    let (server, store) = local_server();
    thread::scope(|scope| {
        let wait = scope.spawn(|| store.get("never", LONG));
        thread::sleep(Duration::from_millis(30));
        let start = Instant::now();
        drop(server);
        let error = wait.join().unwrap().unwrap_err();
        assert!(start.elapsed() < Duration::from_secs(5));
        assert!(
            error.to_string().contains("closed the connection"),
            "{error}"
        );
    });
}

#[test]
fn connecting_waits_for_the_server() {
    let free = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let port = free.port();
    drop(free);
    assert!(TcpStore::connect("127.0.0.1", port, SHORT).is_err());
    thread::scope(|scope| {
        let client = scope.spawn(move || TcpStore::connect("127.0.0.1", port, LONG).map(drop));
        thread::sleep(Duration::from_millis(50));
        let _server = TcpStoreServer::bind(("127.0.0.1", port)).unwrap();
        client.join().unwrap().unwrap();
    });
}

#[test]
fn clients_out_of_the_protocol_are_cut_off() {
    let (server, store) = local_server();
    let hello = || {
        Writer::default()
            .then(Query::Validate)
            .u32(wire::VALIDATION_MAGIC)
    };
    let oversized = hello().then(Query::Set).vector(b"k").u64(u64::MAX).finish();
    let old_oversized = Writer::to(Dialect::Legacy)
        .then(Query::Set)
        .u64(u64::MAX)
        .finish();
    let wrong_number = Writer::default()
        .then(Query::Validate)
        .u32(wire::VALIDATION_MAGIC + 1)
        .then(Query::Ping)
        .u32(0)
        .finish();
    let old_watch = [&[7][..], &1u64.to_ne_bytes(), b"k"].concat();
    let absent = hello().then(Query::Get).vector(b"absent").finish();
    for bytes in [oversized, old_oversized, wrong_number, old_watch, absent] {
        let mut peer = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
        peer.set_read_timeout(Some(LONG)).unwrap();
        peer.write_all(&bytes).unwrap();
        // The read returns end of file or a reset, depending on how much the server had read.
        assert!(!matches!(peer.read(&mut [0]), Ok(1..)), "{bytes:?}");
    }
    assert!(!store.check(&["k"]).unwrap());
    let long = "k".repeat(wire::MAX_KEY_BYTES as usize);
    assert!(matches!(
        store.set(&long, b""),
        Err(Error::InvalidArgument { .. })
    ));
}

#[test]
fn the_wire_is_pytorchs() {
    let (server, store) = local_server();
    let mut peer = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
    peer.set_read_timeout(Some(LONG)).unwrap();
    // Sends VALIDATE, MULTI_SET, APPEND, GETNUMKEYS and MULTI_GET, one byte at a time.
    let bytes = Writer::default()
        .then(Query::Validate)
        .u32(wire::VALIDATION_MAGIC)
        .then(Query::MultiSet)
        .u64(2)
        .vector(b"/a")
        .vector(b"1")
        .vector(b"/b")
        .vector(b"2")
        .then(Query::Append)
        .vector(b"/a")
        .vector(b"0")
        .then(Query::KeyCount)
        .then(Query::MultiGet)
        .u64(2)
        .vector(b"/a")
        .vector(b"/b")
        .finish();
    for byte in bytes {
        peer.write_all(&[byte]).unwrap();
    }
    let expected = Writer::default().i64(2).vector(b"10").vector(b"2").finish();
    let mut answer = vec![0; expected.len()];
    peer.read_exact(&mut answer).unwrap();
    assert_eq!(answer, expected);
    assert_eq!(store.get("a", SHORT).unwrap(), b"10");
}

#[test]
fn several_keys_in_one_call() {
    each_store(|store| {
        let before = store.num_keys().unwrap();
        store.multi_set(&[]).unwrap();
        assert!(store.multi_get(&[], SHORT).unwrap().is_empty());
        store
            .multi_set(&[("a", b"1"), ("b", b""), ("c", b"\0\xff")])
            .unwrap();
        let values = store.multi_get(&["c", "a", "b", "a"], LONG).unwrap();
        assert_eq!(values, [&b"\0\xff"[..], b"1", b"", b"1"]);
        assert_eq!(store.num_keys().unwrap() - before, 3);
        let error = store.multi_get(&["a", "missing"], SHORT).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        thread::scope(|scope| {
            let late = scope.spawn(|| store.multi_get(&["a", "late"], LONG).unwrap());
            thread::sleep(Duration::from_millis(20));
            store.append("late", b"no").unwrap();
            assert_eq!(late.join().unwrap(), [&b"1"[..], b"no"]);
        });
        store.append("late", b"w").unwrap();
        assert_eq!(store.get("late", LONG).unwrap(), b"now");
    });
}

#[test]
fn old_clients_are_served() {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    let connect = |protocol| {
        let options = StoreOptions::default().with_protocol(protocol);
        TcpStore::connect_with("127.0.0.1", server.port(), LONG, options).unwrap()
    };
    let (old, new) = (connect(StoreProtocol::Legacy), connect(StoreProtocol::Auto));
    assert_eq!(old.protocol(), StoreProtocol::Legacy);
    assert_eq!(new.protocol(), StoreProtocol::Current);
    old.set("k", b"old").unwrap();
    assert_eq!(new.get("k", LONG).unwrap(), b"old");
    assert_eq!(old.add("n", 4).unwrap(), 4);
    assert_eq!(old.compare_set("k", b"old", b"new").unwrap(), b"new");
    old.multi_set(&[("a", b"1"), ("b", b"2")]).unwrap();
    assert_eq!(old.multi_get(&["b", "a"], LONG).unwrap(), [b"2", b"1"]);
    assert_eq!(old.num_keys().unwrap(), 4);
    assert!(matches!(
        old.wait(&["k", "late"], SHORT),
        Err(Error::Timeout { key, .. }) if key == "late"
    ));
    assert!(old.delete("k").unwrap());
    assert!(!old.check(&["k"]).unwrap());
    assert!(old.append("a", b"1").is_err());
}

#[test]
fn values_of_a_queue_go_to_one_client_each() {
    let (server, _store) = local_server();
    let answer = |peer: &mut TcpStream, expected: Writer| {
        let expected = expected.finish();
        let mut answer = vec![0; expected.len()];
        peer.read_exact(&mut answer).unwrap();
        assert_eq!(answer, expected);
    };
    let (mut a, mut b) = (raw_client(&server), raw_client(&server));
    let wait = Writer::default()
        .then(Query::Wait)
        .u64(1)
        .vector(b"/q")
        .finish();
    let length = Writer::default()
        .then(Query::QueueLen)
        .vector(b"/q")
        .finish();
    let push = |value| {
        Writer::default()
            .then(Query::QueuePush)
            .vector(b"/q")
            .vector(value)
            .finish()
    };
    let pop = Writer::default()
        .then(Query::QueuePop)
        .vector(b"/q")
        .finish();
    a.write_all(&wait).unwrap();
    b.write_all(&push(b"1")).unwrap();
    answer(&mut a, Writer::default().u8(wire::STOP_WAITING));
    b.write_all(&push(b"2")).unwrap();
    b.write_all(&length).unwrap();
    answer(&mut b, Writer::default().i64(2));
    a.write_all(&pop).unwrap();
    answer(&mut a, Writer::default().i64(1).vector(b"1"));
    b.write_all(&pop).unwrap();
    answer(&mut b, Writer::default().i64(1).vector(b"2"));
    b.write_all(&pop).unwrap();
    answer(&mut b, Writer::default().i64(0));
}

/// A value that was offered to a client is offered to the next client if the first one closes its
/// connection or cancels its wait.
#[test]
fn an_offered_value_is_not_lost() {
    let (server, _store) = local_server();
    let queue = || Writer::default().then(Query::Wait).u64(1).vector(b"/q");
    let pop = Writer::default().then(Query::QueuePop).vector(b"/q");
    let pop = pop.finish();
    // The answer to the ping shows that the wait has begun.
    let waiting = || {
        let mut peer = raw_client(&server);
        let request = [queue().finish(), ping(7)].concat();
        peer.write_all(&request).unwrap();
        answer(&mut peer, &Writer::default().u32(7).finish());
        peer
    };
    let stopped = [wire::STOP_WAITING];
    let popped = |value| Writer::default().i64(1).vector(value).finish();
    let (mut a, mut b, mut c, mut d) = (waiting(), waiting(), waiting(), waiting());
    let push = Writer::default().then(Query::QueuePush).vector(b"/q");
    d.write_all(&push.vector(b"value").finish()).unwrap();

    answer(&mut a, &stopped);
    // A client that starts to wait now is not offered the same value.
    let mut late = waiting();
    drop(a);
    answer(&mut b, &stopped);
    let cancel = Writer::default().then(Query::CancelWait).finish();
    b.write_all(&cancel).unwrap();
    answer(&mut b, &[wire::WAIT_CANCELED]);
    answer(&mut c, &stopped);
    c.write_all(&pop).unwrap();
    answer(&mut c, &popped(b"value"));

    for peer in [&mut d, &mut late] {
        peer.set_read_timeout(Some(SHORT)).unwrap();
        assert!(peer.read_exact(&mut [0]).is_err(), "one value, one client");
        peer.set_read_timeout(Some(LONG)).unwrap();
    }
    let push = Writer::default().then(Query::QueuePush).vector(b"/q");
    c.write_all(&push.vector(b"second").finish()).unwrap();
    answer(&mut d, &stopped);
    d.write_all(&pop).unwrap();
    answer(&mut d, &popped(b"second"));
}

/// Connects to `server` and sends the validation number, as every client of the current protocol
/// does first.
fn raw_client(server: &TcpStoreServer) -> TcpStream {
    let mut peer = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
    peer.set_read_timeout(Some(LONG)).unwrap();
    let hello = Writer::default()
        .then(Query::Validate)
        .u32(wire::VALIDATION_MAGIC);
    peer.write_all(&hello.finish()).unwrap();
    peer
}

fn ping(nonce: u32) -> Vec<u8> {
    Writer::default().then(Query::Ping).u32(nonce).finish()
}

fn answer(peer: &mut TcpStream, expected: &[u8]) {
    let mut answer = vec![0; expected.len()];
    peer.read_exact(&mut answer).unwrap();
    assert_eq!(answer, expected);
}

/// The server stops handling requests while too many answers are unread, and continues afterwards.
#[test]
fn requests_in_one_piece_are_all_answered() {
    const REQUESTS: usize = 300;
    let (server, store) = local_server();
    let value = vec![7; 600 << 10];
    store.set("k", &value).unwrap();
    let mut peer = raw_client(&server);
    let mut requests = Writer::default();
    for _ in 0..REQUESTS {
        requests = requests.then(Query::Get).vector(b"/k");
    }
    peer.write_all(&requests.finish()).unwrap();
    let mut answer = vec![0; 8 + value.len()];
    for _ in 0..REQUESTS {
        peer.read_exact(&mut answer).unwrap();
        assert_eq!(answer[8..], value);
    }
}

/// A client does not fall back to the protocol of old PyTorch versions after one closed connection.
#[test]
fn one_hang_up_does_not_change_the_protocol() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    thread::scope(|scope| {
        let client = scope.spawn(move || TcpStore::connect("127.0.0.1", port, LONG).unwrap());
        drop(listener.accept().unwrap());
        let (mut peer, _) = listener.accept().unwrap();
        let mut request = [0; 10];
        peer.read_exact(&mut request).unwrap();
        peer.write_all(&request[6..]).unwrap();
        assert_eq!(client.join().unwrap().protocol(), StoreProtocol::Current);
    });
}

/// Checks the bytes that the client of PyTorch 2.15 sends for `list_keys` and `barrier`, and the
/// answers that it expects (little-endian). The bytes are the same for the libuv server and for the
/// plain server of PyTorch.
#[test]
#[cfg(target_endian = "little")]
fn list_keys_and_barrier_have_pytorchs_bytes() {
    const VALIDATE: [u8; 5] = [0, 0xCE, 0xF7, 0x85, 0x3C];
    const LIST_KEYS: [u8; 1] = [17];
    // Key "/b" of 2 bytes, world size 2.
    const BARRIER: [u8; 19] = [
        18, 2, 0, 0, 0, 0, 0, 0, 0, b'/', b'b', 2, 0, 0, 0, 0, 0, 0, 0,
    ];
    const CANCEL_WAIT: [u8; 1] = [12];
    let (server, store) = local_server();
    let connect = || {
        let mut peer = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
        peer.set_read_timeout(Some(LONG)).unwrap();
        peer.write_all(&VALIDATE).unwrap();
        peer
    };
    let (mut a, mut b) = (connect(), connect());
    store.set("k", b"1").unwrap();
    a.write_all(&LIST_KEYS).unwrap();
    let one_key = [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, b'/', b'k'];
    answer(&mut a, &one_key);
    // Waits until the first client has entered the barrier. Polls because, as in PyTorch, the first
    // entry does not wake clients that wait for the key.
    let entered = || {
        while !store.check(&["b"]).unwrap() {
            thread::sleep(Duration::from_millis(1));
        }
    };
    // As in PyTorch, a barrier call that is cancelled remains counted.
    a.write_all(&BARRIER).unwrap();
    entered();
    a.write_all(&CANCEL_WAIT).unwrap();
    answer(&mut a, &[1]);
    assert_eq!(store.get("b", LONG).unwrap(), b"1");
    store.delete("b").unwrap();
    a.write_all(&BARRIER).unwrap();
    entered();
    a.set_read_timeout(Some(SHORT)).unwrap();
    assert!(a.read_exact(&mut [0]).is_err(), "one of two has entered");
    a.set_read_timeout(Some(LONG)).unwrap();
    b.write_all(&BARRIER).unwrap();
    answer(&mut b, &[0]);
    answer(&mut a, &[0]);
    assert_eq!(store.get("b", LONG).unwrap(), b"2");
}

#[test]
fn keys_are_listed_and_barriers_wait_for_all() {
    each_store(|store| {
        let before = store.list_keys().unwrap();
        store.set("b", b"1").unwrap();
        store.set("a/c", b"1").unwrap();
        let mut after = store.list_keys().unwrap();
        after.retain(|key| !before.contains(key));
        assert_eq!(after, ["a/c", "b"]);
        let error = store.barrier("alone", 2, SHORT).unwrap_err();
        assert!(matches!(error, Error::Timeout { .. }), "{error}");
        let entered = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(5));
                    entered.fetch_add(1, Ordering::Relaxed);
                    store.barrier("all", 4, LONG).unwrap();
                    assert_eq!(entered.load(Ordering::Relaxed), 4);
                });
            }
        });
    });
}

#[test]
fn a_file_is_seen_by_all_who_open_it() {
    let path = Scratch::new();
    let (a, b) = (
        FileStore::open(&path.0).unwrap(),
        FileStore::open(&path.0).unwrap(),
    );
    thread::scope(|scope| {
        let late = scope.spawn(|| b.get("late", LONG).unwrap());
        a.set("late", b"\0x").unwrap();
        assert_eq!(late.join().unwrap(), b"\0x");
    });
    assert!(b.delete("late").unwrap());
    assert!(!a.check(&["late"]).unwrap());
    a.append("log", b"1").unwrap();
    b.append("log", b"2").unwrap();
    let c = FileStore::open(&path.0).unwrap();
    assert_eq!(c.get("log", SHORT).unwrap(), b"12");
    assert_eq!(c.path(), path.0);
}

#[test]
fn an_unfinished_record_of_a_file_does_not_count() {
    let path = Scratch::new();
    let store = FileStore::open(&path.0).unwrap();
    store.set("k", b"1").unwrap();
    let whole = fs::read(&path.0).unwrap();
    store.set("k", b"2").unwrap();
    let longer = fs::read(&path.0).unwrap();
    drop(store);
    for cut in whole.len()..longer.len() {
        fs::write(&path.0, &longer[..cut]).unwrap();
        let store = FileStore::open(&path.0).unwrap();
        assert_eq!(store.get("k", SHORT).unwrap(), b"1", "{cut}");
        // The next writer overwrites the unfinished record.
        assert_eq!(store.add("n", 1).unwrap(), 1);
        drop(store);
        let store = FileStore::open(&path.0).unwrap();
        assert_eq!(store.get("n", SHORT).unwrap(), b"1", "{cut}");
    }
    fs::write(&path.0, b"something else, longer than a header").unwrap();
    let error = FileStore::open(&path.0).unwrap_err();
    assert!(error.to_string().contains("no store"), "{error}");
}

#[test]
fn a_secret_is_wanted_from_both_sides() {
    let secret = |text: &str| StoreSecret::new(text.as_bytes()).unwrap();
    let guarded = TcpStoreServer::bind_with("127.0.0.1:0", Some(secret("one"))).unwrap();
    let open = TcpStoreServer::bind_with("127.0.0.1:0", None).unwrap();
    let connect = |options, server: &TcpStoreServer| {
        TcpStore::connect_with("127.0.0.1", server.port(), LONG, options)
    };
    let with = |text| StoreOptions::default().with_secret(secret(text));
    let store = connect(with("one"), &guarded).unwrap();
    store.set("k", b"v").unwrap();
    assert_eq!(store.get("k", SHORT).unwrap(), b"v");
    let legacy = StoreOptions::default().with_protocol(StoreProtocol::Legacy);
    let start = Instant::now();
    for (options, server, message) in [
        (with("two"), &guarded, "another secret"),
        (StoreOptions::default(), &guarded, "wants a secret"),
        (legacy, &guarded, "wants a secret"),
        (with("one"), &open, "the server has no secret"),
    ] {
        let error = connect(options, server).unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
    // The clients fail at once instead of retrying until the timeout.
    assert!(start.elapsed() < LONG / 2);
    // The server does not handle requests after a wrong proof or without a proof.
    let set = Writer::default()
        .then(Query::Validate)
        .u32(wire::VALIDATION_MAGIC)
        .then(Query::Set)
        .vector(b"/k")
        .vector(b"intruder")
        .finish();
    let hello = [&[super::secret::HELLO][..], &[0; 64]].concat();
    for bytes in [set.clone(), [hello, set].concat()] {
        let mut peer = TcpStream::connect(("127.0.0.1", guarded.port())).unwrap();
        peer.set_read_timeout(Some(LONG)).unwrap();
        peer.write_all(&bytes).unwrap();
        let mut answer = Vec::new();
        // A reset is as good as an end of file here.
        let _ = peer.read_to_end(&mut answer);
        assert!(answer.is_empty() || !answer.ends_with(&[super::secret::ACCEPTED]));
    }
    assert_eq!(store.get("k", SHORT).unwrap(), b"v");
}

/// Returns true if the server has closed the connection.
fn is_closed(stream: &mut TcpStream) -> bool {
    match stream.read(&mut [0; 4]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() != std::io::ErrorKind::WouldBlock,
    }
}

/// Bytes that a client has already received do not count as kept, and the server closes the client
/// that holds the most bytes.
#[test]
fn idle_readers_are_not_charged_and_the_largest_client_is_closed() {
    let limit = 4 << 20;
    let server = TcpStoreServer::start("127.0.0.1:0", None, Some(limit)).unwrap();
    let connect = || TcpStore::connect("127.0.0.1", server.port(), LONG).unwrap();
    let value = vec![7; 600 << 10];
    let writer = connect();
    writer.set("value", &value).unwrap();
    let readers: Vec<_> = (0..16).map(|_| connect()).collect();
    for reader in &readers {
        assert_eq!(reader.get("value", LONG).unwrap(), value);
    }
    for (number, reader) in readers.iter().enumerate() {
        reader.set(&number.to_string(), &[0; 1 << 10]).unwrap();
    }

    // Two clients send unfinished requests; the request of the first is larger.
    let unfinished = |bytes: usize| {
        let mut stranger = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
        stranger.set_read_timeout(Some(SHORT)).unwrap();
        let request = Writer::default()
            .then(Query::Validate)
            .u32(wire::VALIDATION_MAGIC)
            .then(Query::Set)
            .vector(b"/k")
            .vector(&vec![7; bytes])
            .finish();
        stranger.write_all(&request[..request.len() - 1]).unwrap();
        let sum = request.len() as u64;
        (stranger, sum)
    };
    let received = |bytes: u64| {
        let started = Instant::now();
        while server.traffic().received < bytes {
            assert!(started.elapsed() < LONG, "{:?}", server.traffic());
            thread::sleep(Duration::from_millis(1));
        }
    };
    let before = server.traffic().received;
    let (mut large, bytes) = unfinished(2 << 20);
    received(before + bytes - 1);
    let before = server.traffic().received;
    let (mut small, bytes) = unfinished(3 << 19);
    received(before + bytes - 1);
    let started = Instant::now();
    while !is_closed(&mut large) {
        assert!(started.elapsed() < LONG);
    }
    assert!(!is_closed(&mut small));
    writer.set("value", b"still here").unwrap();
}

/// A server without a secret limits the memory that clients can fill with stored values or
/// unfinished requests. A server with a secret does not.
#[test]
fn a_server_without_a_secret_bounds_what_it_keeps() {
    let hello = || {
        Writer::default()
            .then(Query::Validate)
            .u32(wire::VALIDATION_MAGIC)
    };
    let value = vec![7; 60 << 20];
    let set = |key: u8| hello().then(Query::Set).vector(&[b'/', key]).vector(&value);
    let unfinished = |key: u8| {
        let mut bytes = set(key).finish();
        bytes.pop();
        bytes
    };
    for (finished, secret) in [(true, false), (false, false), (true, true)] {
        let secret = secret.then(|| StoreSecret::new(b"s").unwrap());
        let server = TcpStoreServer::bind_with("127.0.0.1:0", secret.clone()).unwrap();
        let mut options = StoreOptions::default();
        options.secret.clone_from(&secret);
        let store = TcpStore::connect_with("127.0.0.1", server.port(), LONG, options).unwrap();
        let mut strangers = Vec::new();
        for key in 0..6 {
            if secret.is_some() {
                // Clients that have the secret are not limited.
                store.set(&key.to_string(), &value).unwrap();
                continue;
            }
            let mut stranger = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
            stranger.set_read_timeout(Some(SHORT)).unwrap();
            let bytes = if finished {
                set(key).then(Query::Ping).u32(9).finish()
            } else {
                unfinished(key)
            };
            // The write fails if the server closes the connection.
            let _ = stranger.write_all(&bytes);
            strangers.push(stranger);
        }
        // The limit of 256 MiB holds 4 of the 6 values of 60 MiB, so 2 clients are closed.
        let expected = if secret.is_some() { 0 } else { 2 };
        let started = Instant::now();
        let mut refused = 0;
        while started.elapsed() < LONG {
            refused = strangers
                .iter_mut()
                .map(is_closed)
                .filter(|closed| *closed)
                .count();
            if refused >= expected {
                break;
            }
        }
        assert_eq!(refused, expected, "{finished}");
        drop(strangers);
        store.set("k", b"still here").unwrap();
    }
}

#[test]
fn every_address_of_a_name_is_listened_at() {
    let free = TcpStoreServer::bind("127.0.0.1:0").unwrap().port();
    let addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.1", "192.0.2.1"];
    let addresses = addresses.map(|ip| core::net::SocketAddr::new(ip.parse().unwrap(), free));
    let server = TcpStoreServer::bind_with(&addresses[..], None).unwrap();
    let connect = |ip: &str| {
        TcpStore::connect_with(ip, server.port(), SHORT, StoreOptions::default()).map(drop)
    };
    connect("127.0.0.1").unwrap();
    connect("127.0.0.2").unwrap();
    assert!(connect("127.0.0.3").is_err());
    // An address that is in use is an error; the server does not skip it.
    let error = TcpStoreServer::bind_with(&addresses[1..2], None).unwrap_err();
    assert!(error.to_string().contains("in use"), "{error}");
    assert!(TcpStoreServer::bind_with(&addresses[3..], None).is_err());
}
