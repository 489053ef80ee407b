//! Invalid input: callers that are not peers, and hostile peers.

use core::time::Duration;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use super::*;
use crate::inbox::Inbox;
use crate::wire::{Answer, Challenge, Hello, Refusal, Request, VERSION, Verb, Welcome};
use crate::{Nonce, Notify, Url};

/// Starts a peer that accepts the connection from `url`, and then neither reads nor answers.
pub(super) fn silent_peer(url: &Url) -> (std::thread::JoinHandle<TcpStream>, Url) {
    silent_peer_with(url, welcome())
}

fn silent_peer_with(url: &Url, welcome: Welcome) -> (std::thread::JoinHandle<TcpStream>, Url) {
    silent_peer_with_secret(url, welcome, true)
}

/// If `knows_secret` is false, the peer does not know the secret of the URL that is returned.
fn silent_peer_with_secret(
    url: &Url,
    welcome: Welcome,
    knows_secret: bool,
) -> (std::thread::JoinHandle<TcpStream>, Url) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let nonce = Nonce::random().unwrap();
    let from = url.nonce().peer_id();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let challenge = Challenge::new().unwrap();
        stream.write_all(&challenge.to_bytes()).unwrap();
        let mut hello = [0; Hello::BYTES];
        stream.read_exact(&mut hello).unwrap();
        let hello = Hello::from_bytes(&hello, nonce, &challenge).unwrap();
        assert!(hello.from == from);
        let secret = match knows_secret {
            true => nonce,
            false => Nonce::random().unwrap(),
        };
        let answer = welcome.to_bytes(secret, &hello);
        stream.write_all(&answer).unwrap();
        stream
    });
    (thread, Url::new("tcp", &address, nonce))
}

fn welcome() -> Welcome {
    Welcome {
        bell: None,
        queue: None,
    }
}

/// Receives the challenge of a listener.
pub(super) fn challenge(stream: &mut TcpStream) -> Challenge {
    let mut bytes = [0; Challenge::BYTES];
    stream.read_exact(&mut bytes).unwrap();
    Challenge::from_bytes(&bytes).unwrap()
}

fn hello() -> Hello {
    Hello {
        from: Nonce::random().unwrap().peer_id(),
        challenge: [4; 16],
        queue: None,
    }
}

/// Connects to `url`. The test writes the messages of this peer.
fn hostile_peer(url: &Url) -> TcpStream {
    let mut stream = TcpStream::connect(url.address()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let challenge = challenge(&mut stream);
    let hello = hello();
    stream
        .write_all(&hello.to_bytes(url.nonce(), &challenge))
        .unwrap();
    let mut bytes = [0; Welcome::BYTES];
    stream.read_exact(&mut bytes).unwrap();
    let answer = Welcome::from_bytes(&bytes, url.nonce(), &hello);
    assert_eq!(answer, Some(welcome()));
    stream
}

fn request(stream: &mut TcpStream, verb: Verb, key: u64, offset: u64, len: u64) {
    let request = Request {
        verb,
        id: 1,
        key,
        offset,
        len,
    };
    stream.write_all(&request.to_bytes()).unwrap();
}

fn answer(stream: &mut TcpStream) -> Answer {
    let mut bytes = [0; Answer::BYTES];
    stream.read_exact(&mut bytes).unwrap();
    Answer::from_bytes(&bytes).unwrap().0
}

#[test]
fn strangers_do_no_harm() {
    let (a, b) = (transport(Kind::Tcp), transport(Kind::Tcp));
    let (url_a, url_b) = (a.bind().unwrap(), b.bind().unwrap());
    let call = || TcpStream::connect(url_b.address()).unwrap();
    // The number of silent callers exceeds the limit.
    let _silent: Vec<_> = (0..40).map(|_| call()).collect();
    let mut half = call();
    let challenged = challenge(&mut half);
    let replayed = hello().to_bytes(url_b.nonce(), &challenged);
    half.write_all(&replayed[..20]).unwrap();
    let other = Nonce::random().unwrap();
    let garbage = pattern(5_000, 11);
    for way in 0..3 {
        let mut stranger = call();
        stranger.set_read_timeout(Some(LONG)).unwrap();
        let challenged = challenge(&mut stranger);
        let wrong = hello().to_bytes(other, &challenged);
        // The last one answers the challenge of another connection.
        let bytes = [&garbage[..], &wrong, &replayed][way];
        stranger.write_all(bytes).unwrap();
        // The link closes the connection without an answer.
        assert!(
            matches!(stranger.read(&mut [0; 1]), Ok(0) | Err(_)),
            "{way}"
        );
    }

    let start = Instant::now();
    a.connect(&url_b, LONG).unwrap();
    b.connect(&url_a, LONG).unwrap();
    assert!(a.connected() && b.connected());
    assert!(start.elapsed() < soon());
    // Waits until the link has stopped listening.
    while TcpStream::connect(url_b.address()).is_ok() {
        assert!(start.elapsed() < LONG);
    }
    let memory = Memory::allocate(8).unwrap();
    let remote = memory.remote_key().whole();
    let view = memory.view(..).unwrap();
    a.write(view, remote, Notify::Yes, LONG)
        .unwrap()
        .wait()
        .unwrap();
    b.wait_for_write(LONG).unwrap();
}

#[test]
fn only_the_peer_that_was_called_is_let_in() {
    let (a, b, c) = (
        transport(Kind::Tcp),
        transport(Kind::Tcp),
        transport(Kind::Tcp),
    );
    let [url_a, url_b, url_c] = [&a, &b, &c].map(|side| side.bind().unwrap());
    a.connect(&url_b, LONG).unwrap();
    // `a` admits only `b`, because `a` has connected to `b`.
    assert_eq!(failure(c.connect(&url_a, LONG)), TransportFailure::Connect);
    assert_eq!(failure(b.connect(&url_c, LONG)), TransportFailure::Connect);
    b.connect(&url_a, LONG).unwrap();
    assert!(a.connected() && b.connected() && !c.connected());
}

#[test]
fn nonsense_from_a_peer_breaks_the_link_only() {
    for bytes in [pattern(Request::BYTES, 5), vec![0; 10_000]] {
        let a = transport(Kind::Tcp);
        let mut peer = hostile_peer(&a.bind().unwrap());
        peer.write_all(&bytes).unwrap();
        assert_eq!(failure(a.wait_for_write(LONG)), TransportFailure::Broken);
        join(&a, &transport(Kind::Tcp));
    }
    // A request for an enormous number of bytes allocates nothing and is refused.
    let a = transport(Kind::Tcp);
    let memory = Memory::register(vec![3; 100]).unwrap();
    let mut peer = hostile_peer(&a.bind().unwrap());
    let key = memory.remote_key().id;
    request(&mut peer, Verb::Read, key, 1, u64::MAX);
    assert_eq!(answer(&mut peer), Answer::Refused(Refusal::Range));
    request(&mut peer, Verb::Write { notify: true }, key, 0, u64::MAX);
    peer.write_all(&[0; 100_000]).unwrap();
    drop(peer);
    assert_eq!(failure(a.wait_for_write(LONG)), TransportFailure::Broken);
    assert_eq!(contents(&memory), [3; 100]);
}

#[test]
fn a_peer_over_tcp_cannot_name_a_process_to_map() {
    let bell = Inbox::shared().unwrap();
    let welcome = Welcome {
        bell: bell.descriptor(),
        queue: None,
    };
    let a = transport(Kind::Tcp);
    let (_silent, peer) = silent_peer_with(&a.bind().unwrap(), welcome);
    a.connect(&peer, LONG).unwrap();
    let memory = Memory::allocate(8).unwrap();
    let remote = memory.remote_key().whole();
    let view = memory.view(..).unwrap();
    let write = a.write(view, remote, Notify::Yes, LONG).unwrap();
    assert!(!write.is_done() && !bell.take());
}

#[test]
fn answers_that_fit_no_request_break_the_link() {
    let done = Answer::Done.to_bytes(1).to_vec();
    let too_much = Answer::Data(9).to_bytes(1).to_vec();
    let other = Answer::Data(8).to_bytes(2).to_vec();
    for bytes in [done, too_much, other, pattern(100, 9)] {
        let a = transport(Kind::Tcp);
        let (silent, peer) = silent_peer(&a.bind().unwrap());
        a.connect(&peer, LONG).unwrap();
        let memory = Memory::register(vec![7; 8]).unwrap();
        let remote = memory.remote_key().whole();
        let read = a.read(memory.view_mut(..).unwrap(), remote, LONG).unwrap();
        let mut stream = silent.join().unwrap();
        stream.write_all(&bytes).unwrap();
        // The link may be broken already.
        let _ = stream.write_all(&[0; 64]);
        assert_eq!(failure(read.wait()), TransportFailure::Broken);
        assert_eq!(contents(&memory), [7; 8]);
    }
}

#[test]
fn memory_that_is_dropped_during_a_write_is_left_alone() {
    const BYTES: usize = 1 << 20;
    let a = transport(Kind::Tcp);
    let mut bytes = vec![0; BYTES];
    // SAFETY: the bytes outlive the registration, and the test accesses the vector only after the
    // registration has ended.
    let memory = unsafe { Memory::register_raw(bytes.as_mut_ptr(), BYTES) }.unwrap();
    let mut peer = hostile_peer(&a.bind().unwrap());
    let verb = Verb::Write { notify: true };
    request(&mut peer, verb, memory.remote_key().id, 0, BYTES as u64);
    peer.write_all(&vec![1; BYTES / 2]).unwrap();
    while contents(&memory)[BYTES / 2 - 1] == 0 {
        std::thread::yield_now();
    }
    // The peer has sent only half of the bytes. The incomplete write must not delay the drop.
    drop(memory);
    bytes.fill(2);
    peer.write_all(&vec![1; BYTES / 2]).unwrap();
    assert_eq!(answer(&mut peer), Answer::Refused(Refusal::Key));
    assert!(bytes.iter().all(|byte| *byte == 2));
    let none = Duration::from_millis(1);
    assert_eq!(failure(a.wait_for_write(none)), TransportFailure::Timeout);
}

#[test]
fn memory_that_is_dropped_during_a_read_is_refused_at_the_end() {
    const BYTES: usize = 32 << 20;
    let a = transport(Kind::Tcp);
    let memory = Memory::register(vec![1; BYTES]).unwrap();
    let mut peer = hostile_peer(&a.bind().unwrap());
    request(
        &mut peer,
        Verb::Read,
        memory.remote_key().id,
        0,
        BYTES as u64,
    );
    let first = answer(&mut peer);
    assert!(matches!(first, Answer::Data(_)), "{first:?}");
    // The remaining bytes do not fit into the sockets' buffers, so the serving thread is still
    // sending them when the memory is dropped.
    drop(memory);
    let mut next = first;
    while let Answer::Data(len) = next {
        peer.read_exact(&mut vec![0; len as usize]).unwrap();
        next = answer(&mut peer);
    }
    assert_eq!(next, Answer::Refused(Refusal::Key));
}

#[test]
fn a_listener_that_does_not_know_the_secret_is_rejected() {
    let a = transport(Kind::Tcp);
    let (_imposter, url) = silent_peer_with_secret(&a.bind().unwrap(), welcome(), false);
    let error = a.connect(&url, LONG).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("does not prove the URL's secret"),
        "{error}"
    );
    // The transport is still usable for its peer.
    let b = transport(Kind::Tcp);
    a.connect(&b.bind().unwrap(), LONG).unwrap();
}

#[test]
fn a_listener_of_another_version_or_of_another_service_is_named() {
    let newer = Challenge {
        version: VERSION + 1,
        random: [0; 16],
    };
    let versions = format!(
        "version {} of the protocol, this side {VERSION}",
        VERSION + 1
    );
    for (bytes, expected) in [
        (newer.to_bytes(), versions.as_str()),
        (*b"HTTP/1.1 400 Bad Request\r\n\r\nXX..", "another service"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let thread = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            stream.write_all(&bytes).unwrap();
            stream
        });
        let a = transport(Kind::Tcp);
        a.bind().unwrap();
        let url = Url::new("tcp", &address, Nonce::random().unwrap());
        let error = a.connect(&url, LONG).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
        drop(thread.join().unwrap());
    }
}
