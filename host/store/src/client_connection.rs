//! The client side of one connection to a store server: greeting, authentication, waits, answers.

use core::sync::atomic::{AtomicU32, Ordering};
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;

use super::secret::{self, Role, StoreSecret};
use super::wire::{self, Dialect, Query, Writer};
use crate::error::is_disconnect;

/// The first requests of a connection, which reveal the protocol of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// [`Query::Validate`], then a ping: PyTorch 2.4 and later.
    Ping,
    /// [`Query::KeyCount`] in the legacy numbering: PyTorch before 2.1.
    Legacy,
    /// [`Query::Validate`], then [`Query::KeyCount`]: PyTorch 2.1 to 2.3.
    Count,
}

impl Greeting {
    pub(super) fn dialect(self) -> Dialect {
        match self {
            Self::Legacy => Dialect::Legacy,
            Self::Ping | Self::Count => Dialect::Current,
        }
    }
}

/// Identifies this end as a store client, and checks that the other end is a store server.
pub(super) fn greet(connection: &mut TcpStream, greeting: Greeting) -> io::Result<()> {
    static NONCE: AtomicU32 = AtomicU32::new(0);
    // A legacy server parses `Validate` as `SET`, and the magic number, the ping and three bytes of
    // the nonce as the length of a key. These three bytes are the upper bytes of the length. They
    // are 0xFF, so that the length is absurdly large and the server closes the connection instead
    // of allocating memory.
    let nonce = (NONCE.fetch_add(1, Ordering::Relaxed) << 24) | 0x00FF_FFFF;
    let request = Writer::to(greeting.dialect());
    let hello = |request: Writer| request.then(Query::Validate).u32(wire::VALIDATION_MAGIC);
    let request = match greeting {
        Greeting::Ping => hello(request).then(Query::Ping).u32(nonce),
        Greeting::Count => hello(request).then(Query::KeyCount),
        Greeting::Legacy => request.then(Query::KeyCount),
    };
    connection.write_all(&request.finish())?;
    match greeting {
        Greeting::Ping => {
            let answer: [u8; 4] = read_array(connection)?;
            wants_no_secret(&answer)?;
            if u32::from_ne_bytes(answer) != nonce {
                return Err(unexpected("another number in answer to a ping"));
            }
        }
        Greeting::Count | Greeting::Legacy => {
            let answer: [u8; 8] = read_array(connection)?;
            wants_no_secret(&answer)?;
            let count = i64::from_ne_bytes(answer);
            if !(0..1 << 40).contains(&count) {
                return Err(unexpected("no number of keys"));
            }
        }
    }
    Ok(())
}

/// Waits for the answer to a wait request. Returns `false` if the read timeout of the socket
/// expires first.
pub(super) fn stop_waiting(connection: &mut TcpStream) -> io::Result<bool> {
    match read_array(connection) {
        Ok([wire::STOP_WAITING]) => Ok(true),
        Ok([other]) => Err(unexpected(&format!("{other} in answer to a wait"))),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Cancels a wait. The server may have answered the wait before the cancellation arrived; that
/// answer is read and dropped.
pub(super) fn cancel_wait(connection: &mut TcpStream) -> io::Result<()> {
    connection.write_all(
        &Writer::to(Dialect::Current)
            .then(Query::CancelWait)
            .finish(),
    )?;
    let mut answer = read_array(connection)?;
    if answer == [wire::STOP_WAITING] {
        answer = read_array(connection)?;
    }
    if answer != [wire::WAIT_CANCELED] {
        return Err(unexpected(&format!(
            "{} in answer to a cancelled wait",
            answer[0]
        )));
    }
    Ok(())
}

pub(super) fn read_array<const N: usize>(connection: &mut impl Read) -> io::Result<[u8; N]> {
    let mut array = [0; N];
    connection.read_exact(&mut array)?;
    Ok(array)
}

pub(super) fn read_vector(connection: &mut impl Read) -> io::Result<Vec<u8>> {
    let len = read_array(connection).map(u64::from_ne_bytes)?;
    if len > wire::MAX_VALUE_BYTES {
        return Err(unexpected(&format!("a value of {len} bytes")));
    }
    let mut value = Vec::new();
    // The buffer grows with the bytes that arrive, so a false length reserves no memory.
    connection.take(len).read_to_end(&mut value)?;
    if value.len() as u64 != len {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    Ok(value)
}

pub(super) fn unexpected(what: &str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, format!("the server sent {what}"))
}

/// Replaces the messages of the two most common failures with what they mean to a store client.
pub(super) fn describe(error: io::Error) -> io::Error {
    let meaning = match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => "the server did not answer in time",
        _ if is_disconnect(error.kind()) => {
            "the server closed the connection: it has stopped, or it refused the request"
        }
        _ => return error,
    };
    io::Error::new(error.kind(), meaning)
}

fn wants_no_secret(answer: &[u8]) -> io::Result<()> {
    if secret::SECRET_WANTED.starts_with(answer) {
        return Err(denied(
            "the server wants a secret; set FUSEWIRE_STORE_SECRET as it is set there",
        ));
    }
    Ok(())
}

/// Proves to the server that this client has the secret, and verifies that the server has the same
/// secret.
pub(super) fn authenticate(connection: &mut TcpStream, secret: &StoreSecret) -> io::Result<()> {
    const OTHER: &str = "the server has another secret than this client; FUSEWIRE_STORE_SECRET \
                         must be equal on all ranks";
    let own = secret::nonce()?;
    connection.write_all(&[&[secret::HELLO][..], &own].concat())?;
    // A PyTorch server does not know the first byte and closes the connection.
    let no_secret = |error: io::Error| {
        if is_disconnect(error.kind()) {
            denied("the server knows no secrets, but FUSEWIRE_STORE_SECRET is set here")
        } else {
            error
        }
    };
    match read_array(connection).map_err(no_secret)? {
        [secret::ACCEPTED] => {}
        [secret::REFUSED] => {
            return Err(denied(
                "the server has no secret, but FUSEWIRE_STORE_SECRET is set here",
            ));
        }
        [other] => return Err(unexpected(&format!("{other} in answer to a hello"))),
    }
    let theirs = read_array(connection)?;
    let proof = read_array(connection)?;
    if !secret.verify(Role::Server, &own, &theirs, &proof) {
        return Err(denied(OTHER));
    }
    connection.write_all(&secret.prove(Role::Client, &own, &theirs))?;
    match read_array(connection)? {
        [secret::ACCEPTED] => Ok(()),
        _ => Err(denied(OTHER)),
    }
}

fn denied(what: &str) -> io::Error {
    io::Error::new(ErrorKind::PermissionDenied, what.to_owned())
}
