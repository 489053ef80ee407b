//! Tests with a fake server that sends invalid replies. Every invalid reply must cause an error,
//! and no descriptor may be leaked.

use std::fs;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::sync::mpsc::channel;

use super::message::{REPLY_BYTES, REQUEST_BYTES, Reply};
use super::*;

/// Starts a server that replies to one request with the bytes `answer` and copies of `descriptors`.
/// Returns the result of [`fetch`] from this server.
fn answered(
    answer: &[u8],
    descriptors: &[BorrowedFd<'_>],
    timeout: Duration,
) -> Result<OwnedFd, FetchError> {
    let pid = std::process::id();
    let mut token = Token {
        pid,
        start_time: crate::process::start_time(pid).unwrap(),
        socket: [0; 16],
        secret: [1; 16],
    };
    getrandom::fill(&mut token.socket).unwrap();
    let address = SocketAddr::from_abstract_name(token.socket_name()).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    thread::scope(|scope| {
        let (done, fetched) = channel::<()>();
        scope.spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            let mut request = [0; REQUEST_BYTES];
            socket.read_exact(&mut request).unwrap();
            assert_eq!(message::secret(&request), Some([1; 16]));
            if !answer.is_empty() {
                let sent = message::send_several(&socket, answer, descriptors).unwrap();
                assert_eq!(sent, Some(answer.len()));
            }
            if answer.len() < REPLY_BYTES && !timeout.is_zero() {
                // With timeout `LONG`, closes the connection immediately. Otherwise keeps the
                // connection open until the fetch times out.
                let bound = if timeout == LONG {
                    Duration::ZERO
                } else {
                    LONG
                };
                let _ = fetched.recv_timeout(bound);
            }
        });
        let result = fetch(&token, timeout);
        drop(done);
        result
    })
}

/// Closes `descriptor`. Returns true if this process has no other descriptor of the same file.
fn closed(descriptor: OwnedFd) -> bool {
    let file = File::from(descriptor);
    let identity = |metadata: fs::Metadata| (metadata.dev(), metadata.ino());
    let own = identity(file.metadata().unwrap());
    drop(file);
    !fs::read_dir("/proc/self/fd")
        .unwrap()
        .filter_map(|entry| fs::metadata(entry.ok()?.path()).ok())
        .any(|found| identity(found) == own)
}

#[test]
fn the_fake_can_answer_rightly() {
    let memory = memory("real");
    let fetched = answered(&Reply::Granted.to_bytes(), &[memory.as_fd()], LONG).unwrap();
    assert_eq!(contents(&fetched), "real");
    assert!(!closed(memory), "the fetched one is open, and is found");
    drop(fetched);
}

#[test]
fn wrong_answers_are_errors_and_leave_no_descriptor() {
    let memory = memory("x");
    let fd = memory.as_fd();
    let granted = Reply::Granted.to_bytes();
    let longer = [&granted[..], &[0]].concat();
    let mut other_magic = granted;
    other_magic[2] ^= 1;
    let mut other_code = granted;
    other_code[7] = 9;
    let cases: [(&[u8], &[BorrowedFd<'_>]); 10] = [
        (&granted, &[]),
        (&granted, &[fd, fd]),
        (&granted, &[fd, fd, fd]),
        (&longer, &[fd]),
        (&granted[..7], &[fd]),
        (&other_magic, &[fd]),
        (&other_code, &[fd]),
        (&Reply::Unknown.to_bytes(), &[fd]),
        (&Reply::Refused.to_bytes(), &[fd]),
        (&Reply::Busy.to_bytes(), &[fd]),
    ];
    for (answer, descriptors) in cases {
        let result = answered(answer, descriptors, LONG);
        assert_eq!(failure(result), FetchFailure::Answer, "{answer:?}");
    }
    let refused = answered(&Reply::Refused.to_bytes(), &[], LONG);
    assert_eq!(failure(refused), FetchFailure::Refused);
    assert!(closed(memory));
}

#[test]
fn more_descriptors_than_there_is_room_for_are_an_error() {
    let memory = memory("x");
    let (a, b) = UnixStream::pair().unwrap();
    let fd = memory.as_fd();
    message::send_several(&a, b"12", &[fd, fd]).unwrap();
    let received = message::receive(&b, &mut [0; 9]).unwrap().unwrap();
    assert_eq!((received.count, received.descriptors.len()), (2, 2));
    assert!(!received.cut);
    drop(received);
    message::send_several(&a, b"123", &[fd, fd, fd]).unwrap();
    let received = message::receive(&b, &mut [0; 9]).unwrap().unwrap();
    assert_eq!((received.count, received.descriptors.len()), (3, 2));
    assert!(received.cut);
    drop(received);
    assert!(message::receive(&b, &mut [0; 9]).unwrap().is_none());
    assert!(closed(memory));
}

#[test]
fn an_owner_that_hangs_up_is_distinguished_from_a_slow_one() {
    assert_eq!(failure(answered(&[], &[], LONG)), FetchFailure::Withdrawn);
    let start = Instant::now();
    let short = Duration::from_millis(150);
    assert_eq!(failure(answered(&[], &[], short)), FetchFailure::TimedOut);
    let waited = start.elapsed();
    assert!(waited >= short && waited < LONG / 3, "{waited:?}");
}
