//! Concurrent transfer of messages. A message never waits for a message of another pair of ranks,
//! so no order of sends and receives can deadlock.
//!
//! A message is sent as its length (8 bytes, little endian) followed by its data. Messages of a
//! pair arrive in the order in which they were sent.

use core::time::Duration;
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Instant;

use fusewire_backend_abi as abi;

use crate::failure::{Failure, Result};
use crate::mesh::Mesh;

/// Size of the length field in bytes.
const HEADER: usize = 8;
/// Maximum sleep between two checks of the abort flag.
const NAP: Duration = Duration::from_millis(50);

/// A message. `done` counts transferred bytes, including those of the length field.
#[derive(Debug)]
struct Message<P> {
    peer: u32,
    at: P,
    bytes: usize,
    done: usize,
}

/// Messages to transfer.
#[derive(Debug, Default)]
pub(crate) struct Exchange {
    sends: Vec<Message<*const u8>>,
    recvs: Vec<Message<*mut u8>>,
}

impl Exchange {
    pub(crate) fn send(&mut self, peer: u32, at: *const u8, bytes: usize) {
        self.sends.push(Message {
            peer,
            at,
            bytes,
            done: 0,
        });
    }

    pub(crate) fn recv(&mut self, peer: u32, at: *mut u8, bytes: usize) {
        self.recvs.push(Message {
            peer,
            at,
            bytes,
            done: 0,
        });
    }

    /// Transfers all messages within `timeout`.
    ///
    /// # Safety
    /// For each message, the source must be readable or the target writable for the message's size
    /// until this function returns. No other code may access the targets during that time.
    pub(crate) unsafe fn run(self, mesh: &Mesh, timeout: Duration) -> Result<()> {
        let started = Instant::now();
        let mut lanes: Vec<Lane> = (0..mesh.size()).map(|_| Lane::default()).collect();
        let absent = |peer: u32| Failure::invalid(format!("there is no rank {peer}"));
        for message in self.sends {
            let peer = message.peer;
            let lane = lanes.get_mut(peer as usize).ok_or_else(|| absent(peer))?;
            lane.sends.push_back(message);
        }
        for message in self.recvs {
            let peer = message.peer;
            let lane = lanes.get_mut(peer as usize).ok_or_else(|| absent(peer))?;
            lane.recvs.push_back(message);
        }
        // SAFETY: the lane's messages come from `self`, and the caller guarantees that their memory
        // is valid.
        unsafe { lanes[mesh.rank as usize].within()? };
        loop {
            let (mut moved, mut open) = (false, Vec::new());
            for (peer, lane) in lanes.iter_mut().enumerate() {
                let Some(stream) = &mesh.peers[peer] else {
                    continue;
                };
                if lane.is_done() {
                    continue;
                }
                // SAFETY: the lane's messages come from `self`, and the caller guarantees that
                // their memory is valid.
                moved |= unsafe { lane.pump(stream) }.map_err(|failure| {
                    if mesh.is_aborted() {
                        return aborted();
                    }
                    failure.of(peer)
                })?;
                if !lane.is_done() {
                    open.push((peer, stream, lane.events()));
                }
            }
            if open.is_empty() {
                return Ok(());
            }
            if mesh.is_aborted() {
                return Err(aborted());
            }
            let elapsed = started.elapsed();
            if elapsed >= timeout {
                let late: Vec<String> = open.iter().map(|(peer, ..)| peer.to_string()).collect();
                return Err(Failure::new(
                    abi::CODE_TIMEOUT,
                    format!(
                        "after {:.3} s data still has to move between rank {} and rank {}",
                        elapsed.as_secs_f64(),
                        mesh.rank,
                        late.join(", ")
                    ),
                ));
            }
            if !moved {
                sleep(&open, (timeout - elapsed).min(NAP));
            }
        }
    }
}

fn aborted() -> Failure {
    Failure::new(abi::CODE_ABORTED, "this rank was aborted")
}

/// Sleeps until one of the streams is ready, but at most for `bound`.
fn sleep(open: &[(usize, &TcpStream, i16)], bound: Duration) {
    let mut waits: Vec<libc::pollfd> = open
        .iter()
        .map(|(_, stream, events)| libc::pollfd {
            fd: stream.as_raw_fd(),
            events: *events,
            revents: 0,
        })
        .collect();
    let bound = (bound.as_millis() as i32).max(1);
    // SAFETY: `waits` is a live vector, and the second argument is its length. The result is not
    // used, because the next round tries every stream.
    unsafe { libc::poll(waits.as_mut_ptr(), waits.len() as libc::nfds_t, bound) };
}

/// Failure of a stream.
enum StreamError {
    Closed(String),
    Length { expected: usize, announced: u64 },
}

impl StreamError {
    fn of(self, peer: usize) -> Failure {
        match self {
            Self::Closed(why) => Failure::new(
                abi::CODE_PEER,
                format!("rank {peer} has gone, or was aborted: {why}"),
            ),
            Self::Length {
                expected,
                announced,
            } => Failure::invalid(format!(
                "rank {peer} sends {announced} bytes where {expected} are expected: the \
                 ranks' calls differ"
            )),
        }
    }

    fn io(result: io::Result<usize>) -> Result<Option<usize>, Self> {
        match result {
            Ok(0) => Err(Self::Closed("its connection has ended".to_owned())),
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(None),
            Err(error) if error.kind() == ErrorKind::Interrupted => Ok(Some(0)),
            Err(error) => Err(Self::Closed(error.to_string())),
        }
    }
}

/// Messages between this rank and one peer, or from this rank to itself.
#[derive(Default)]
struct Lane {
    sends: VecDeque<Message<*const u8>>,
    recvs: VecDeque<Message<*mut u8>>,
    header: [u8; HEADER],
}

impl Lane {
    fn is_done(&self) -> bool {
        self.sends.is_empty() && self.recvs.is_empty()
    }

    fn events(&self) -> i16 {
        let of = |messages: bool, event| if messages { event } else { 0 };
        of(!self.sends.is_empty(), libc::POLLOUT) | of(!self.recvs.is_empty(), libc::POLLIN)
    }

    /// Copies the messages that this rank sends to itself.
    ///
    /// # Safety
    /// The caller must meet the requirements of [`Exchange::run`].
    unsafe fn within(&mut self) -> Result<()> {
        if self.sends.len() != self.recvs.len() {
            return Err(Failure::invalid(format!(
                "{} sends to this rank itself, {} receives",
                self.sends.len(),
                self.recvs.len()
            )));
        }
        for (send, recv) in self.sends.drain(..).zip(self.recvs.drain(..)) {
            if send.bytes != recv.bytes {
                let broken = StreamError::Length {
                    expected: recv.bytes,
                    announced: send.bytes as u64,
                };
                return Err(broken.of(send.peer as usize));
            }
            if send.bytes > 0 {
                // SAFETY: the caller guarantees that source and target are valid for their sizes,
                // and `send.bytes == recv.bytes`. `copy` permits overlap.
                unsafe { core::ptr::copy(send.at, recv.at, send.bytes) };
            }
        }
        Ok(())
    }

    /// Transfers as much as possible without waiting. Returns true if any byte was transferred.
    ///
    /// # Safety
    /// The caller must meet the requirements of [`Exchange::run`].
    unsafe fn pump(&mut self, stream: &TcpStream) -> Result<bool, StreamError> {
        let mut moved = false;
        while let Some(message) = self.sends.front_mut() {
            let wrote = if let Some(at) = message.done.checked_sub(HEADER) {
                if at == message.bytes {
                    self.sends.pop_front();
                    continue;
                }
                let from = message.at.wrapping_add(at);
                // SAFETY: `at < message.bytes`, and the caller guarantees that the source is
                // readable for `message.bytes` bytes.
                let rest = unsafe { core::slice::from_raw_parts(from, message.bytes - at) };
                { stream }.write(rest)
            } else {
                { stream }.write(&(message.bytes as u64).to_le_bytes()[message.done..])
            };
            let Some(wrote) = StreamError::io(wrote)? else {
                break;
            };
            message.done += wrote;
            moved = true;
        }
        while let Some(message) = self.recvs.front_mut() {
            let read = if let Some(at) = message.done.checked_sub(HEADER) {
                if at == message.bytes {
                    self.recvs.pop_front();
                    continue;
                }
                let to = message.at.wrapping_add(at);
                // SAFETY: `at < message.bytes`. The caller guarantees that the target is writable
                // for `message.bytes` bytes and that no other code accesses it.
                let rest = unsafe { core::slice::from_raw_parts_mut(to, message.bytes - at) };
                { stream }.read(rest)
            } else {
                { stream }.read(&mut self.header[message.done..])
            };
            let Some(read) = StreamError::io(read)? else {
                break;
            };
            let header = message.done < HEADER;
            message.done += read;
            moved = true;
            let announced = u64::from_le_bytes(self.header);
            if header && message.done == HEADER && announced != message.bytes as u64 {
                let expected = message.bytes;
                return Err(StreamError::Length {
                    expected,
                    announced,
                });
            }
        }
        Ok(moved)
    }
}
