//! Tests in which one process publishes and fetches descriptors, and tests with invalid clients of
//! the server thread.

mod fakes;
mod processes;

use core::time::Duration;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::thread;
use std::time::Instant;

use super::server::{CALLER_TIME, MAX_CALLERS};
use super::*;

const LONG: Duration = Duration::from_secs(30);

/// Creates anonymous memory that contains `text`.
fn memory(text: &str) -> OwnedFd {
    // SAFETY: the name is a valid C string.
    let fd = unsafe { libc::memfd_create(c"fusewire-test".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0);
    // SAFETY: `memfd_create` has just returned the descriptor, and no other code owns it.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.write_all_at(text.as_bytes(), 0).unwrap();
    file.into()
}

fn contents(descriptor: impl AsFd) -> String {
    let file = File::from(descriptor.as_fd().try_clone_to_owned().unwrap());
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    String::from_utf8(bytes).unwrap()
}

fn failure(result: Result<OwnedFd, FetchError>) -> FetchFailure {
    let error = result.expect_err("fetched");
    assert!(error.to_string().contains("process "), "{error}");
    error.failure
}

/// Connects to the server thread of the process that the token identifies. Sends no request.
fn stranger(token: &Token) -> UnixStream {
    let address = SocketAddr::from_abstract_name(token.socket_name()).unwrap();
    let stream = UnixStream::connect_addr(&address).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream
}

#[test]
fn a_fetched_descriptor_is_of_the_same_memory_and_closed_on_exec() {
    let own = memory("seven");
    let other = own.try_clone().unwrap();
    let published = publish(own).unwrap();
    let token = Token::from_bytes(&published.token().to_bytes()).unwrap();
    let fetched = fetch(&token, LONG).unwrap();
    assert_eq!(contents(&fetched), "seven");
    File::from(other).write_all_at(b"E", 1).unwrap();
    assert_eq!(contents(&fetched), "sEven");
    // SAFETY: `fetched` keeps the descriptor open, and the call accesses no memory.
    let flags = unsafe { libc::fcntl(fetched.as_raw_fd(), libc::F_GETFD) };
    assert_eq!(flags & libc::FD_CLOEXEC, libc::FD_CLOEXEC);
    // A descriptor can be fetched several times, and fetched descriptors stay valid after the
    // withdrawal.
    let again = fetch(&token, LONG).unwrap();
    drop(published);
    assert_eq!(contents(&again), "sEven");
}

#[test]
fn each_token_is_for_its_own_descriptor_until_that_is_withdrawn() {
    let (one, two) = (publish(memory("1")).unwrap(), publish(memory("2")).unwrap());
    let tokens = [one.token(), two.token()];
    assert_ne!(tokens[0].secret, tokens[1].secret);
    assert_eq!(contents(fetch(&tokens[0], LONG).unwrap()), "1");
    assert_eq!(contents(fetch(&tokens[1], LONG).unwrap()), "2");
    drop(one);
    assert_eq!(failure(fetch(&tokens[0], LONG)), FetchFailure::Withdrawn);
    assert_eq!(contents(fetch(&tokens[1], LONG).unwrap()), "2");
}

#[test]
fn a_wrong_secret_and_a_wrong_process_get_nothing() {
    let published = publish(memory("x")).unwrap();
    let good = published.token();
    for bit in [0, 64, 127] {
        let mut wrong = good;
        wrong.secret[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(failure(fetch(&wrong, LONG)), FetchFailure::Withdrawn);
    }
    let mut wrong = good;
    wrong.socket[3] ^= 1;
    assert_eq!(failure(fetch(&wrong, LONG)), FetchFailure::Withdrawn);
    let later = Token {
        start_time: good.start_time + 1,
        ..good
    };
    let no_process = Token {
        pid: i32::MAX as u32,
        ..good
    };
    for stale in [later, no_process] {
        let error = fetch(&stale, LONG).unwrap_err();
        assert_eq!(error.failure, FetchFailure::Gone);
        assert!(error.detail.contains("FUSEWIRE_HOST_ID"), "{error}");
    }
    // Process 1 exists, but another process listens on the socket of the token.
    let other = Token {
        pid: 1,
        start_time: crate::process::start_time(1).unwrap(),
        ..good
    };
    assert_eq!(failure(fetch(&other, LONG)), FetchFailure::Refused);
    assert_eq!(contents(fetch(&good, LONG).unwrap()), "x");
}

#[test]
fn callers_that_say_nothing_or_half_hold_up_no_process() {
    let published = publish(memory("x")).unwrap();
    let token = published.token();
    let start = Instant::now();
    let request = message::request(&token.secret);
    let silent: Vec<_> = (0..2 * MAX_CALLERS + 5).map(|_| stranger(&token)).collect();
    let mut half = stranger(&token);
    half.write_all(&request[..10]).unwrap();
    // Closes a connection in the middle of a request.
    stranger(&token).write_all(&request[..23]).unwrap();
    for _ in 0..20 {
        fetch(&token, LONG).unwrap();
    }
    assert!(start.elapsed() < CALLER_TIME, "{:?}", start.elapsed());

    // A request whose second half arrives late still gets a reply.
    half.write_all(&request[10..]).unwrap();
    let mut answer = Vec::new();
    half.read_to_end(&mut answer).unwrap();
    assert_eq!(
        message::Reply::from_bytes(&answer),
        Some(message::Reply::Granted)
    );

    // The oldest connections received `Busy` when the limit was exceeded. The other connections
    // time out.
    let mut busy = 0;
    for mut stream in silent {
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        match message::Reply::from_bytes(&answer) {
            Some(message::Reply::Busy) => busy += 1,
            _ => assert!(answer.is_empty(), "{answer:?}"),
        }
    }
    assert!(busy > MAX_CALLERS, "{busy}");
    let waited = start.elapsed();
    assert!(
        waited >= CALLER_TIME && waited < 3 * CALLER_TIME,
        "{waited:?}"
    );
}

#[test]
fn invalid_requests_get_no_reply() {
    let published = publish(memory("x")).unwrap();
    let token = published.token();
    let request = message::request(&token.secret);
    let mut other_magic = request;
    other_magic[0] ^= 1;
    let longer = [&request[..], &[0]].concat();
    for bad in [&other_magic[..], &longer] {
        let mut stream = stranger(&token);
        stream.write_all(bad).unwrap();
        let mut answer = Vec::new();
        // The read returns the end of the stream, or a reset error because of the unread byte.
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty(), "{answer:?}");
    }
    // Control: a valid request over the same kind of connection succeeds.
    let mut stream = stranger(&token);
    stream.write_all(&request).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert_eq!(
        message::Reply::from_bytes(&answer),
        Some(message::Reply::Granted)
    );
}

#[test]
fn eight_threads_publish_and_fetch_at_once() {
    let start = std::sync::Barrier::new(8);
    thread::scope(|scope| {
        for thread in 0..8 {
            let start = &start;
            scope.spawn(move || {
                start.wait();
                for round in 0..100 {
                    let text = format!("{thread} {round}");
                    let published = publish(memory(&text)).unwrap();
                    let token = published.token();
                    assert_eq!(contents(fetch(&token, LONG).unwrap()), text);
                    drop(published);
                    let failed = failure(fetch(&token, LONG));
                    assert_eq!(failed, FetchFailure::Withdrawn);
                }
            });
        }
    });
}
