//! Tests Fusewire's TCP store client with PyTorch's server, and Fusewire's server with PyTorch's
//! client. The tests use the Python interpreter that `FUSEWIRE_PYTHON` names and
//! `/usr/bin/python3`. If no interpreter has PyTorch, the tests are skipped, or fail if
//! `FUSEWIRE_REQUIRE` names `torch`.

use core::time::Duration;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;

use fusewire::store::Error;
use fusewire::store::{Store, StoreOptions, StoreProtocol, TcpStore, TcpStoreServer};
use fusewire_tests::process::free_port;
use fusewire_tests::skip::skip;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(200);

/// An interpreter that has PyTorch.
struct Python {
    path: String,
    new: bool,
}

/// A running script. Dropping the value kills the script.
struct Script {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Python {
    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.path);
        command
            .arg(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/python/torch_store.py"
            ))
            .args(arguments);
        command
    }

    fn start(&self, arguments: &[&str]) -> Script {
        let mut child = self
            .command(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("an interpreter");
        Script {
            input: child.stdin.take().expect("a pipe"),
            output: BufReader::new(child.stdout.take().expect("a pipe")),
            child,
        }
    }
}

impl Script {
    /// Returns the next line. Panics if the line does not begin with `expected`.
    fn line(&mut self, expected: &str) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("text");
        assert!(!line.is_empty() && line.starts_with(expected), "{line:?}");
        line.trim().to_owned()
    }

    fn go_on(&mut self) {
        self.input.write_all(b"\n").expect("a script that reads");
    }

    fn end(mut self) {
        assert!(self.child.wait().expect("a child").success());
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the Python interpreters that can import PyTorch. Skips the test if no interpreter can.
fn pythons() -> Vec<Python> {
    let named = std::env::var("FUSEWIRE_PYTHON").ok();
    let paths = named.into_iter().chain(["/usr/bin/python3".to_owned()]);
    let found: Vec<_> = paths
        .filter_map(|path| {
            let mut python = Python { path, new: false };
            let answer = python.command(&["probe"]).output().ok()?;
            let answer = String::from_utf8(answer.stdout).ok()?;
            let (version, kind) = answer.trim().split_once(' ')?;
            eprintln!("{} has PyTorch {version}", python.path);
            python.new = kind == "new";
            Some(python)
        })
        .collect();
    if found.is_empty() {
        skip(
            "torch",
            "no interpreter of FUSEWIRE_PYTHON or /usr/bin/python3 imports torch",
        );
    }
    found
}

fn large() -> Vec<u8> {
    (0..1u32 << 20).map(|i| (i * 7 + (i >> 8)) as u8).collect()
}

#[test]
fn our_client_of_pytorchs_server() {
    for python in pythons() {
        let servers: &[&[&str]] = if python.new {
            &[&["serve", "libuv"], &["serve", "plain"]]
        } else {
            &[&["serve"]]
        };
        for arguments in servers {
            let mut script = python.start(arguments);
            let port: u16 = script.line("").parse().expect("a port");
            let store = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
            let expected = if python.new {
                StoreProtocol::Current
            } else {
                StoreProtocol::Legacy
            };
            assert_eq!(store.protocol(), expected);
            use_server(&store, port, python.new);
            store.set("from_fusewire", b"\0\xff binary").unwrap();
            store.set("large", &large()).unwrap();
            script.go_on();
            script.line("ok");
            assert_eq!(store.get("from_torch", LONG).unwrap(), large());
            assert_eq!(store.get("counter", LONG).unwrap(), b"43");
            script.go_on();
            script.end();
        }
    }
}

fn use_server(store: &TcpStore, port: u16, new: bool) {
    store.set("k", b"").unwrap();
    assert_eq!(store.get("k", LONG).unwrap(), b"");
    assert_eq!(store.add("counter", 50).unwrap(), 50);
    assert_eq!(store.add("counter", -8).unwrap(), 42);
    assert_eq!(store.compare_set("cas", b"old", b"new").unwrap(), b"old");
    assert!(!store.check(&["cas"]).unwrap());
    assert_eq!(store.compare_set("cas", b"", b"1").unwrap(), b"1");
    assert_eq!(store.compare_set("cas", b"wrong", b"2").unwrap(), b"1");
    assert_eq!(store.compare_set("cas", b"1", b"2").unwrap(), b"2");
    assert!(store.check(&["cas", "k"]).unwrap());
    let keys = store.num_keys().unwrap();
    assert!(store.delete("cas").unwrap());
    assert!(!store.delete("cas").unwrap());
    assert_eq!(store.num_keys().unwrap(), keys - 1);
    store.multi_set(&[("m1", b"1"), ("m2", b"\0")]).unwrap();
    let values = store.multi_get(&["m2", "m1"], LONG).unwrap();
    assert_eq!(values, [b"\0", b"1"]);
    if new {
        store.append("m1", b"+").unwrap();
        assert_eq!(store.get("m1", LONG).unwrap(), b"1+");
    } else {
        assert!(store.append("m1", b"+").is_err());
    }
    // This wait times out. The next wait completes while other clients add to a key.
    let error = store.wait(&["k", "never"], SHORT).unwrap_err();
    assert!(
        matches!(&error, Error::Timeout { key, .. } if key == "never"),
        "{error}"
    );
    thread::scope(|scope| {
        let late = scope.spawn(|| store.get("late", LONG).unwrap());
        for _ in 0..4 {
            scope.spawn(move || {
                let own = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
                for _ in 0..50 {
                    own.add("many", 1).unwrap();
                }
            });
        }
        thread::sleep(Duration::from_millis(20));
        store.set("late", b"x").unwrap();
        assert_eq!(late.join().unwrap(), b"x");
    });
    assert_eq!(store.add("many", 0).unwrap(), 200);
}

/// Checks that the server of a PyTorch master counts Fusewire's client as a worker. The master's
/// constructor returns only when all workers have joined.
#[test]
fn a_master_of_pytorch_counts_our_client() {
    for python in pythons() {
        let port = free_port();
        let mut script = python.start(&["master", &port.to_string()]);
        let store = TcpStore::connect("127.0.0.1", port, LONG).unwrap();
        store.join_as_worker().unwrap();
        script.line("ok");
        store.set("from_fusewire", b"1").unwrap();
        script.go_on();
        script.end();
    }
}

#[test]
fn pytorchs_client_of_our_server() {
    for python in pythons() {
        let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
        let store = TcpStore::connect("127.0.0.1", server.port(), LONG).unwrap();
        let mut script = python.start(&["client", &server.port().to_string()]);
        store.set("from_rust", &large()).unwrap();
        script.line("ok");
        assert_eq!(store.get("done", LONG).unwrap(), b"\0done");
        assert_eq!(store.get("many", LONG).unwrap(), b"200");
        script.end();
    }
}

#[test]
fn a_wrong_protocol_is_reported() {
    let server = TcpStoreServer::bind("127.0.0.1:0").unwrap();
    // Fusewire's server supports both protocols. A server that closes connections supports neither.
    let options = StoreOptions::default().with_protocol(StoreProtocol::Legacy);
    let store = TcpStore::connect_with("127.0.0.1", server.port(), LONG, options).unwrap();
    assert_eq!(store.protocol(), StoreProtocol::Legacy);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let closing = thread::spawn(move || {
        // The client makes at least three connections, one per attempt.
        (0..3).for_each(|_| drop(listener.accept().unwrap()));
    });
    let error = TcpStore::connect("127.0.0.1", port, SHORT).unwrap_err();
    closing.join().unwrap();
    assert!(error.to_string().contains("no store server"), "{error}");
}
