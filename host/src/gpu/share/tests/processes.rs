//! Tests with peer processes. A peer is an instance of this test binary that reads commands from
//! standard input and replies on standard error.

use core::panic::AssertUnwindSafe;
use core::ptr;
use std::env;
use std::fs;
use std::io::{BufRead, BufReader, stdin};
use std::os::unix::process::CommandExt;
use std::panic::catch_unwind;
use std::process::{self, Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};

use super::*;

const ROLE: &str = "FUSEWIRE_TEST_SHARE_CHILD";

struct Peer {
    child: Child,
    input: ChildStdin,
    replies: Receiver<String>,
}

impl Peer {
    fn start(role: &str) -> Self {
        Self::start_as(role, None)
    }

    fn start_as(role: &str, user: Option<u32>) -> Self {
        let (_, module) = module_path!().split_once("::").unwrap();
        let mut command = Command::new(env::current_exe().unwrap());
        command
            .args(["--exact", &format!("{module}::child"), "--nocapture"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        if let Some(user) = user {
            command.uid(user);
        }
        let mut child = command.spawn().unwrap();
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
        Self {
            child,
            input,
            replies,
        }
    }

    fn reply(&self) -> String {
        self.replies.recv_timeout(2 * LONG).unwrap()
    }

    fn ask(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        self.reply()
    }

    fn publish(&mut self, text: &str) -> Token {
        parsed(&self.ask(&format!("publish {text}")))
    }

    fn signal(&self, signal: i32) {
        // SAFETY: the child has not been waited for, so its id cannot have been reused.
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
        // The child may have been killed before.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn hex(token: &Token) -> String {
    token
        .to_bytes()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

fn parsed(hex: &str) -> Token {
    let digits = hex.as_bytes().chunks(2);
    let bytes: Vec<_> = digits
        .map(|pair| u8::from_str_radix(core::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect();
    Token::from_bytes(&bytes).unwrap()
}

/// Describes the outcome of a fetch in one line.
fn outcome(token: &Token) -> String {
    match fetch(token, LONG) {
        Ok(descriptor) => format!("got {}", contents(descriptor)),
        Err(error) => format!("{:?}: {error}", error.failure),
    }
}

/// Installs a SIGUSR1 handler that does nothing, so that the signal only interrupts system calls.
fn interruptible() {
    extern "C" fn nothing(_: i32) {}
    // SAFETY: a zeroed `sigaction` is valid. Without the flag `SA_RESTART`, interrupted calls are
    // not restarted.
    let mut action: libc::sigaction = unsafe { core::mem::zeroed() };
    action.sa_sigaction = nothing as extern "C" fn(i32) as usize;
    // SAFETY: the handler does nothing, and `action` is a live local variable.
    let result = unsafe { libc::sigaction(libc::SIGUSR1, &raw const action, ptr::null_mut()) };
    assert_eq!(result, 0);
}

/// The program of a [`Peer`] process. Returns immediately in an ordinary test run.
#[test]
fn child() {
    let Ok(role) = env::var(ROLE) else {
        return;
    };
    match role.as_str() {
        "serve" => serve(),
        "leaks" => eprintln!("@@{}", leaks()),
        "fork" => eprintln!("@@{}", forks()),
        _ => panic!("unknown role {role}"),
    }
    process::exit(0);
}

fn serve() {
    interruptible();
    let mut published = Vec::new();
    for line in stdin().lines().map_while(Result::ok) {
        let words: Vec<_> = line.split(' ').collect();
        let reply = match words[..] {
            ["publish", text] => {
                published.push(publish(memory(text)).unwrap());
                hex(&published.last().unwrap().token())
            }
            ["withdraw"] => {
                published.clear();
                "ok".to_owned()
            }
            ["fetch", token] => outcome(&parsed(token)),
            ["full-table", token] => full_table(&parsed(token)),
            // SAFETY: unshare accesses no memory and affects this thread only.
            ["leave"] => match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
                0 => "ok".to_owned(),
                _ => std::io::Error::last_os_error().to_string(),
            },
            _ => panic!("unknown command {line}"),
        };
        eprintln!("@@{reply}");
    }
}

/// Fetches when the process can open only two more descriptors: the two that [`fetch`] itself
/// opens. The fetched descriptor exceeds the limit. Describes the outcome in one line.
fn full_table(token: &Token) -> String {
    let limit = libc::rlimit {
        rlim_cur: 64,
        rlim_max: 64,
    };
    // SAFETY: `limit` is a live local variable.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert_eq!(result, 0);
    let mut all = Vec::new();
    while let Ok(file) = File::open("/dev/null") {
        all.push(file);
    }
    all.truncate(all.len() - 2);
    outcome(token)
}

#[test]
fn a_process_without_room_for_the_descriptor_gets_an_error() {
    let own = publish(memory("x")).unwrap();
    let mut peer = Peer::start("serve");
    let reply = peer.ask(&format!("full-table {}", hex(&own.token())));
    assert!(
        reply.starts_with("Answer: ") && reply.contains("ulimit"),
        "{reply}"
    );
    assert_eq!(peer.ask(&format!("fetch {}", hex(&own.token()))), "got x");
}

#[test]
fn processes_fetch_from_each_other_until_it_is_withdrawn() {
    let mut peer = Peer::start("serve");
    let (one, two) = (peer.publish("one"), peer.publish("two"));
    assert_eq!(one.pid, peer.child.id());
    assert_eq!(outcome(&one), "got one");
    assert_eq!(outcome(&two), "got two");
    let own = publish(memory("own")).unwrap();
    assert_eq!(peer.ask(&format!("fetch {}", hex(&own.token()))), "got own");
    assert_eq!(peer.ask("withdraw"), "ok");
    assert_eq!(failure(fetch(&one, LONG)), FetchFailure::Withdrawn);
    let three = peer.publish("three");
    assert_eq!(outcome(&three), "got three");
    assert_ne!(three.socket, one.socket);
    assert_eq!(failure(fetch(&one, LONG)), FetchFailure::Withdrawn);
}

#[test]
fn a_killed_process_is_noticed_at_once_and_a_stopped_one_in_time() {
    let mut peer = Peer::start("serve");
    let token = peer.publish("x");
    peer.signal(libc::SIGSTOP);
    let start = Instant::now();
    let short = Duration::from_millis(150);
    assert_eq!(failure(fetch(&token, short)), FetchFailure::TimedOut);
    assert!(start.elapsed() >= short && start.elapsed() < LONG / 3);
    peer.signal(libc::SIGCONT);
    assert_eq!(outcome(&token), "got x");

    peer.signal(libc::SIGSTOP);
    thread::scope(|scope| {
        let pending = scope.spawn(|| fetch(&token, LONG));
        thread::sleep(Duration::from_millis(100));
        assert!(!pending.is_finished());
        let start = Instant::now();
        // The test does not wait for the killed process, so the process remains a zombie.
        peer.signal(libc::SIGKILL);
        assert_eq!(failure(pending.join().unwrap()), FetchFailure::Gone);
        assert!(
            start.elapsed() < Duration::from_secs(2),
            "{:?}",
            start.elapsed()
        );
    });
    assert_eq!(failure(fetch(&token, LONG)), FetchFailure::Gone);
    peer.child.wait().unwrap();
    assert_eq!(failure(fetch(&token, LONG)), FetchFailure::Gone);
}

#[test]
fn a_killed_process_is_noticed_while_it_serves_many() {
    for _ in 0..10 {
        let mut peer = Peer::start("serve");
        let token = peer.publish("x");
        thread::scope(|scope| {
            let fetchers: Vec<_> = (0..4)
                .map(|_| {
                    scope.spawn(|| {
                        loop {
                            if let Err(error) = fetch(&token, LONG) {
                                return error;
                            }
                        }
                    })
                })
                .collect();
            thread::sleep(Duration::from_millis(10));
            peer.signal(libc::SIGKILL);
            for fetcher in fetchers {
                let error = fetcher.join().unwrap();
                assert_eq!(error.failure, FetchFailure::Gone, "{error}");
            }
        });
    }
}

#[test]
fn signals_interrupt_nothing() {
    interruptible();
    let mut peer = Peer::start("serve");
    let token = peer.publish("x");
    peer.signal(libc::SIGSTOP);
    thread::scope(|scope| {
        let (sender, receiver) = channel();
        let pending = scope.spawn(move || {
            // SAFETY: pthread_self has no preconditions.
            sender.send(unsafe { libc::pthread_self() }).unwrap();
            let first = outcome(&token);
            let all = (0..50).all(|_| outcome(&token) == "got x");
            (first, all)
        });
        let thread = receiver.recv().unwrap();
        for round in 0..200 {
            if pending.is_finished() {
                break;
            }
            // SAFETY: the thread has not been joined, so its id is valid.
            unsafe { libc::pthread_kill(thread, libc::SIGUSR1) };
            if round == 50 {
                assert!(!pending.is_finished());
                peer.signal(libc::SIGCONT);
            }
            if round > 50 {
                peer.signal(libc::SIGUSR1);
            }
            thread::sleep(Duration::from_micros(500));
        }
        assert_eq!(pending.join().unwrap(), ("got x".to_owned(), true));
    });
}

#[test]
fn another_user_is_refused() {
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        eprintln!("skipped: only root can start a process of another user");
        return;
    }
    let own = publish(memory("x")).unwrap();
    let command = format!("fetch {}", hex(&own.token()));
    let mut same = Peer::start("serve");
    assert_eq!(same.ask(&command), "got x");
    let mut other = Peer::start_as("serve", Some(65534));
    let reply = other.ask(&command);
    assert!(reply.starts_with("Refused: "), "{reply}");
    // A process of root can fetch from processes of every user.
    let token = other.publish("y");
    assert_eq!(outcome(&token), "got y");
}

#[test]
fn another_network_namespace_is_named() {
    let own = publish(memory("x")).unwrap();
    let command = format!("fetch {}", hex(&own.token()));
    let mut peer = Peer::start("serve");
    assert_eq!(peer.ask(&command), "got x");
    let left = peer.ask("leave");
    if left != "ok" {
        eprintln!("skipped: no network namespace can be made here ({left})");
        return;
    }
    let reply = peer.ask(&command);
    assert!(reply.starts_with("Namespace: "), "{reply}");
    assert!(reply.contains("FUSEWIRE_HOST_ID"), "{reply}");
}

/// Returns the number of open descriptors and the number of threads of this process.
fn counts() -> (usize, usize) {
    let count = |path| fs::read_dir(path).unwrap().count();
    (count("/proc/self/fd"), count("/proc/self/task"))
}

/// Returns the list of Unix sockets in this network namespace, with their names.
fn sockets() -> String {
    fs::read_to_string("/proc/net/unix").unwrap()
}

/// Publishes and fetches 1000 descriptors one after another, then 500 descriptors that are
/// published at the same time. Describes the leaked descriptors, threads and sockets.
fn leaks() -> String {
    let before = counts();
    let mut names = Vec::new();
    for round in 0..1000 {
        let published = publish(memory("x")).unwrap();
        let token = published.token();
        names.push(token.socket_name());
        fetch(&token, LONG).unwrap();
        if round % 100 == 0 {
            assert!(sockets().contains(&token.socket_name()));
            assert_ne!(counts(), before, "what is there is seen");
        }
        drop(published);
        assert_eq!(counts().0, before.0, "closed at once");
    }
    settle(before);
    let one_by_one = counts();
    let all: Vec<_> = (0..500)
        .map(|at| publish(memory(&at.to_string())).unwrap())
        .collect();
    for (at, published) in all.iter().enumerate() {
        let fetched = fetch(&published.token(), LONG).unwrap();
        assert_eq!(contents(fetched), at.to_string());
    }
    // 500 published descriptors, the listener and the eventfd of the server, and one server thread.
    let expected = (before.0 + 502, before.1 + 1);
    settle(expected);
    assert_eq!(counts(), expected);
    drop(all);
    settle(before);
    let after = counts();
    let listed = sockets();
    let left = names.iter().filter(|name| listed.contains(*name)).count();
    let clean = one_by_one == before && after == before && left == 0;
    format!("{clean} {before:?} {one_by_one:?} {after:?} {left} sockets")
}

/// Waits up to two seconds until [`counts`] returns `expected`. For a short time, a joined thread
/// may remain listed and a connection may remain open.
fn settle(expected: (usize, usize)) {
    let start = Instant::now();
    while counts() != expected && start.elapsed() < Duration::from_secs(2) {
        thread::yield_now();
    }
}

#[test]
fn a_thousand_descriptors_leave_nothing_behind() {
    let mut peer = Peer::start("leaks");
    let reply = peer.reply();
    assert!(reply.starts_with("true "), "{reply}");
    assert!(peer.child.wait().unwrap().success());
}

/// Runs in a forked child. Checks that the child can fetch the parent's descriptor and publish a
/// descriptor, and that dropping the child's copy of `of_parent` does not withdraw the parent's
/// descriptor. Returns 0, or the number of the first failed check.
fn in_forked_child(of_parent: PublishedDescriptor) -> i32 {
    let token = of_parent.token();
    let sees_parent = outcome(&token) == "got parent";
    let own = publish(memory("child")).unwrap();
    let is_own = own.token().pid == process::id() && own.token().socket != token.socket;
    let sees_own = outcome(&own.token()) == "got child";
    drop(of_parent);
    let still = outcome(&token) == "got parent";
    let token_of_own = own.token();
    drop(own);
    let withdrawn = failure(fetch(&token_of_own, LONG)) == FetchFailure::Withdrawn;
    let good = [sees_parent, is_own, sees_own, still, withdrawn];
    let wrong = good.iter().position(|good| !good);
    wrong.map_or(0, |at| at as i32 + 1)
}

/// Checks publication and withdrawal before and after a fork. Returns "ok" or a description of the
/// failure.
fn forks() -> String {
    let of_parent = publish(memory("parent")).unwrap();
    let token = of_parent.token();
    let fork = || {
        // SAFETY: no other thread of the parent holds a lock at this point, so the child can use
        // the allocator and this module.
        unsafe { libc::fork() }
    };
    let first = fork();
    if first == 0 {
        // Without `catch_unwind`, a panic would end the only thread of the child, and the child
        // would exit with status 0.
        let code = catch_unwind(AssertUnwindSafe(|| in_forked_child(of_parent))).unwrap_or(99);
        // SAFETY: _exit has no preconditions. It skips the exit handlers that the child inherited.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: `status` is a live local variable.
    unsafe { libc::waitpid(first, &raw mut status, 0) };
    if status != 0 {
        return format!("the child failed: {status:#x}");
    }
    if outcome(&token) != "got parent" {
        return "the parent's descriptor went with the child's".to_owned();
    }

    // A child inherits copies of the parent's sockets. The copies must not keep the socket name
    // alive after the parent has withdrawn its last descriptor.
    let second = fork();
    if second == 0 {
        loop {
            // SAFETY: pause has no preconditions.
            unsafe { libc::pause() };
        }
    }
    drop(of_parent);
    let start = Instant::now();
    let failed = fetch(&token, LONG).map_err(|error| error.failure);
    let waited = start.elapsed();
    // SAFETY: the child has not been waited for, so its id cannot have been reused.
    unsafe { libc::kill(second, libc::SIGKILL) };
    // SAFETY: `status` is a live local variable.
    unsafe { libc::waitpid(second, &raw mut status, 0) };
    match failed {
        Err(FetchFailure::Withdrawn) if waited < LONG / 3 => "ok".to_owned(),
        other => format!("withdrawn with a copy in a child: {other:?} after {waited:?}"),
    }
}

#[test]
fn a_forked_child_publishes_for_itself_and_withdraws_nothing_of_its_parent() {
    let mut peer = Peer::start("fork");
    assert_eq!(peer.reply(), "ok");
    assert!(peer.child.wait().unwrap().success());
}
