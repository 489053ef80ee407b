//! Connections of a client to its server. Only one call at a time uses a connection. Idle
//! connections are kept for later calls.

use core::time::Duration;
use std::io::{self, ErrorKind};
use std::net::{TcpStream, ToSocketAddrs};
use std::sync::PoisonError;
use std::thread;
use std::time::Instant;

use super::{StoreProtocol, TcpStore};
use crate::client_connection::{Greeting, authenticate, describe, greet};
use crate::error::is_disconnect;
use crate::{Error, Result, notice};

/// Time after which the user is warned that no server answers.
const FIRST_REPORT: Duration = Duration::from_secs(8);

/// Maximum number of idle connections that are kept.
const MAX_IDLE: usize = 8;

impl TcpStore {
    pub(super) fn open_until(&self, start: Instant, timeout: Duration) -> Result<TcpStream> {
        let mut pause = Duration::from_millis(5);
        let mut report = FIRST_REPORT;
        loop {
            let left = timeout
                .saturating_sub(start.elapsed())
                .max(Duration::from_millis(1));
            let error = match self.open(left) {
                Ok(connection) => return Ok(connection),
                Err(error) => error,
            };
            if error.kind() == ErrorKind::PermissionDenied {
                let address = self.address();
                return Err(Error::io("connect", &address, error));
            }
            if start.elapsed() + pause >= timeout {
                let address = self.address();
                return Err(Error::Call {
                    operation: "connect",
                    key: address,
                    detail: format!(
                        "no store server answered within {} s ({error}); is rank 0 running, and \
                         are MASTER_ADDR and MASTER_PORT the same on all ranks?",
                        timeout.as_secs_f64()
                    ),
                    source: Some(error.into()),
                });
            }
            if start.elapsed() >= report {
                notice::warn(format_args!(
                    "no store server answers at {} for {:.0} s ({error}); trying up to {:.0} s (is \
                     rank 0 running?)",
                    self.address(),
                    start.elapsed().as_secs_f64(),
                    timeout.as_secs_f64()
                ));
                report *= 2;
            }
            thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(250));
        }
    }

    fn address(&self) -> String {
        if self.host.contains(':') {
            format!("[{}]:{}", self.host, self.port)
        } else {
            format!("{}:{}", self.host, self.port)
        }
    }

    /// Makes one attempt to connect, and verifies that the other end is a store server.
    fn open(&self, timeout: Duration) -> io::Result<TcpStream> {
        let mut failure = io::Error::new(ErrorKind::NotFound, "the host name has no address");
        let greetings: &[Greeting] = match (self.greeting.get(), self.options.protocol) {
            (Some(known), _) => core::slice::from_ref(known),
            // Only servers of this crate have secrets, and they answer `Ping`.
            _ if self.options.secret.is_some() => &[Greeting::Ping],
            // A current server may also close a connection, e.g. when it has run out of
            // descriptors, so `Ping` is tried twice. An old server closes both connections.
            (None, StoreProtocol::Auto) => &[
                Greeting::Ping,
                Greeting::Ping,
                Greeting::Legacy,
                Greeting::Count,
            ],
            (None, StoreProtocol::Current) => &[Greeting::Ping, Greeting::Count],
            (None, StoreProtocol::Legacy) => &[Greeting::Legacy],
        };
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            for greeting in greetings {
                let mut connection = match TcpStream::connect_timeout(&address, timeout) {
                    Ok(connection) => connection,
                    Err(error) => {
                        failure = error;
                        break;
                    }
                };
                connection.set_nodelay(true)?;
                connection.set_read_timeout(Some(timeout))?;
                connection.set_write_timeout(Some(timeout))?;
                if let Some(secret) = &self.options.secret {
                    authenticate(&mut connection, secret)?;
                }
                match greet(&mut connection, *greeting) {
                    Ok(()) => {
                        connection.set_write_timeout(Some(self.io_timeout()))?;
                        // Another thread may have set the greeting first. Its value is the same.
                        let _ = self.greeting.set(*greeting);
                        return Ok(connection);
                    }
                    // A server that does not know the greeting closes the connection. Try the next
                    // greeting.
                    Err(error) if is_disconnect(error.kind()) => failure = describe(error),
                    Err(error) => return Err(error),
                }
            }
        }
        Err(failure)
    }

    pub(super) fn io_timeout(&self) -> Duration {
        // The socket option rejects a timeout of zero.
        self.timeout.max(Duration::from_millis(1))
    }

    pub(super) fn take(&self) -> Result<TcpStream> {
        let idle = self
            .idle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop();
        match idle {
            Some(connection) => Ok(connection),
            None => self.open_until(Instant::now(), self.timeout),
        }
    }

    pub(super) fn put_back(&self, connection: TcpStream) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if idle.len() < MAX_IDLE {
            idle.push(connection);
        }
    }

    /// Runs `talk` on a connection. If `talk` fails, the connection is closed, because the next
    /// byte on it could belong to the answer of the failed request.
    pub(super) fn exchange<R>(
        &self,
        operation: &'static str,
        key: &str,
        talk: impl FnOnce(&mut TcpStream) -> io::Result<R>,
    ) -> Result<R> {
        let mut connection = self.take()?;
        let answer = connection
            .set_read_timeout(Some(self.io_timeout()))
            .and_then(|()| talk(&mut connection))
            .map_err(|error| Error::io(operation, key, describe(error)))?;
        self.put_back(connection);
        Ok(answer)
    }
}
