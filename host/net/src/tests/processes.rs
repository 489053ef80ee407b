//! Tests with peers in child processes. A child process runs this test binary, reads commands from
//! standard input, and writes replies to standard error.

use core::time::Duration;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, Write, stdin};
use std::process::{self, Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Instant;

use super::*;
use crate::{Notify, RemoteKey, Url};

const ROLE: &str = "FUSEWIRE_TEST_TRANSPORT_CHILD";
pub(super) const BYTES: usize = 16 << 20;

/// Child process with a transport and two [`Memory`] objects of [`BYTES`] bytes each.
pub(super) struct Peer {
    child: Child,
    input: ChildStdin,
    replies: Receiver<String>,
    url: Url,
    pub(super) keys: [RemoteKey; 2],
}

impl Peer {
    fn start(role: &str) -> (Child, ChildStdin, Receiver<String>) {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["--exact", "tests::processes::child", "--nocapture"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let errors = BufReader::new(child.stderr.take().unwrap());
        let (sender, replies) = channel();
        thread::spawn(move || {
            for line in errors.lines().map_while(Result::ok) {
                match line.strip_prefix("@@") {
                    Some(reply) => drop(sender.send(reply.to_owned())),
                    None => eprintln!("child: {line}"),
                }
            }
        });
        let input = child.stdin.take().unwrap();
        (child, input, replies)
    }

    /// Starts the process and connects it to `side`.
    pub(super) fn join(kind: Kind, side: &Transport) -> Self {
        let (child, input, replies) = Self::start(&format!("{kind:?}"));
        let reply = || replies.recv_timeout(LONG).unwrap();
        let (url, first, second) = (reply(), reply(), reply());
        let mut peer = Self {
            child,
            input,
            replies,
            url: url.parse().unwrap(),
            keys: [first.parse().unwrap(), second.parse().unwrap()],
        };
        let own = side.bind().unwrap();
        side.connect(&peer.url, LONG).unwrap();
        assert_eq!(peer.ask(&format!("connect {own}")), "ok");
        assert!(side.connected());
        peer
    }

    pub(super) fn ask(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        self.replies.recv_timeout(LONG).unwrap()
    }

    pub(super) fn signal(&self, signal: i32) {
        // SAFETY: `kill` takes two integers; the child has not been waited for, so its id is valid.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
        if signal == libc::SIGSTOP {
            let stat = format!("/proc/{}/stat", self.child.id());
            while !fs::read_to_string(&stat).unwrap().contains(") T ") {
                thread::yield_now();
            }
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The child may have been killed already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |sum: u64, byte| {
        sum.rotate_left(5) ^ sum.wrapping_add(u64::from(*byte))
    })
}

/// Runs the child process of a [`Peer`]. Does nothing in an ordinary test run.
#[test]
fn child() {
    let Ok(role) = env::var(ROLE) else {
        return;
    };
    if role == "leaks" {
        eprintln!("@@{}", cycles());
        return;
    }
    let kind = kinds()
        .into_iter()
        .find(|kind| format!("{kind:?}") == role)
        .unwrap();
    let side = transport(kind);
    let memories = memories(BYTES);
    eprintln!("@@{}", side.bind().unwrap());
    for memory in &memories {
        eprintln!("@@{}", memory.remote_key());
    }
    for line in stdin().lines().map_while(Result::ok) {
        let words: Vec<_> = line.split(' ').collect();
        let reply = match words[..] {
            ["connect", url] => {
                side.connect(&url.parse().unwrap(), LONG).unwrap();
                "ok".to_owned()
            }
            ["wait"] => format!("{:?}", side.wait_for_write(LONG).is_ok()),
            ["sum", at] => {
                let at: usize = at.parse().unwrap();
                sum(&contents(&memories[at])).to_string()
            }
            ["write", key] => {
                let key: RemoteKey = key.parse().unwrap();
                let view = memories[0].view(1..1 + key.bytes() as usize).unwrap();
                let write = side.write(view, key.whole(), Notify::Yes, LONG).unwrap();
                let result = write.wait();
                if let Err(error) = &result {
                    eprintln!("{error}");
                }
                format!("{:?}", result.is_ok())
            }
            _ => panic!("unknown command {line}"),
        };
        eprintln!("@@{reply}");
    }
    process::exit(0);
}

#[test]
fn processes_write_and_read_each_other() {
    for kind in kinds() {
        let side = transport(kind);
        let mut peer = Peer::join(kind, &side);
        for at in [0, 1] {
            let mut expected = vec![0; BYTES];
            expected[17..5_000_017].copy_from_slice(&pattern(5_000_000, 3));
            let source = Memory::register(&expected[17..5_000_017]).unwrap();
            let target = peer.keys[at].range(17, 5_000_000);
            let view = source.view(..).unwrap();
            let write = side.write(view, target, Notify::Yes, LONG).unwrap();
            assert_eq!(peer.ask("wait"), "true");
            assert_eq!(peer.ask(&format!("sum {at}")), sum(&expected).to_string());
            write.wait().unwrap();

            let back = Memory::allocate(1_000_000).unwrap();
            let remote = peer.keys[at].range(1_000, 1_000_000);
            let read = side.read(back.view_mut(..).unwrap(), remote, LONG).unwrap();
            read.wait().unwrap();
            assert!(contents(&back)[..] == expected[1_000..1_001_000]);

            for own in memories(2_000_000) {
                let command = format!("write {}", own.remote_key());
                assert_eq!(peer.ask(&command), "true");
                side.wait_for_write(LONG).unwrap();
                assert!(contents(&own)[..] == expected[1..2_000_001]);
            }
        }
    }
}

#[test]
fn a_killed_peer_is_noticed_at_once_and_another_one_is_connected() {
    for kind in kinds() {
        let side = transport(kind);
        let peer = Peer::join(kind, &side);
        peer.signal(libc::SIGSTOP);
        let source = Memory::allocate(BYTES).unwrap();
        let write = |peer: &Peer, timeout| {
            let view = source.view(..).unwrap();
            let write = side.write(view, peer.keys[1].whole(), Notify::Yes, timeout);
            write.unwrap()
        };
        let pending = write(&peer, LONG);
        thread::scope(|scope| {
            let waits = scope.spawn(|| side.wait_for_write(LONG));
            thread::sleep(Duration::from_millis(50));
            assert!(!pending.is_done());
            let start = Instant::now();
            peer.signal(libc::SIGKILL);
            assert_eq!(failure(pending.wait()), TransportFailure::Broken);
            assert_eq!(failure(waits.join().unwrap()), TransportFailure::Broken);
            assert_eq!(failure(write(&peer, LONG).wait()), TransportFailure::Broken);
            assert!(start.elapsed() < soon(), "{kind:?}");
        });
        let mut next = Peer::join(kind, &side);
        write(&next, LONG).wait().unwrap();
        assert_eq!(next.ask("wait"), "true");
    }
}

#[test]
fn bytes_of_a_write_that_timed_out_do_not_land_later() {
    for kind in kinds() {
        let side = transport(kind);
        let mut peer = Peer::join(kind, &side);
        // The first write makes sure that the peer's serving thread has started.
        let source = Memory::register(vec![0; BYTES]).unwrap();
        let write = |key: RemoteKey, bytes, timeout| {
            let view = source.view(..bytes).unwrap();
            let target = key.range(0, bytes as u64);
            side.write(view, target, Notify::No, timeout)
                .unwrap()
                .wait()
        };
        write(peer.keys[1], BYTES, LONG).unwrap();
        source.copy_from(0, &vec![1; BYTES]).unwrap();
        // Over RDMA, a suspended peer's memory is written as long as it was registered before.
        let at = usize::from(kind != Kind::Verbs);
        let before = peer.ask(&format!("sum {at}"));
        peer.signal(libc::SIGSTOP);
        if kind == Kind::Verbs {
            write(peer.keys[1], 1_000, LONG).unwrap();
        }
        let start = Instant::now();
        let bytes = if kind == Kind::Tcp { BYTES } else { 1_000 };
        let result = write(peer.keys[at], bytes, Duration::from_millis(200));
        assert_eq!(failure(result), TransportFailure::Timeout);
        assert!(start.elapsed() < soon());
        peer.signal(libc::SIGCONT);
        thread::sleep(Duration::from_millis(200));
        assert_eq!(peer.ask(&format!("sum {at}")), before, "{kind:?}");
        assert_eq!(peer.ask("wait"), "false");
    }
}

/// Returns the numbers of descriptors and threads of this process.
fn counts() -> (usize, usize) {
    let count = |path| fs::read_dir(path).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

fn cycles() -> String {
    let cycle = |kind| {
        let (a, b) = pair(kind);
        let memory = Memory::allocate(100).unwrap();
        let view = memory.view(..).unwrap();
        let remote = memory.remote_key().whole();
        a.write(view, remote, Notify::Yes, LONG)
            .unwrap()
            .wait()
            .unwrap();
        b.wait_for_write(LONG).unwrap();
    };
    kinds().into_iter().for_each(cycle);
    let before = counts();
    for _ in 0..100 {
        kinds().into_iter().for_each(cycle);
    }
    // A thread may be listed for a short time after it was joined.
    let start = Instant::now();
    while counts() != before && start.elapsed() < soon() {
        thread::yield_now();
    }
    let after = counts();
    format!(
        "{} {}",
        before == after,
        format_args!("{before:?} {after:?}")
    )
}

#[test]
fn two_hundred_connections_leave_nothing_behind() {
    let (mut child, _input, replies) = Peer::start("leaks");
    let reply = replies.recv_timeout(4 * LONG).unwrap();
    assert!(reply.starts_with("true"), "{reply}");
    assert!(child.wait().unwrap().success());
}
