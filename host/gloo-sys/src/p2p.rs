//! Messages between two ranks, singly or in batches.

use crate::context::{Call, Context};
use crate::error::Error;
use crate::ffi::Message;

/// Tag prefix of this crate's messages. Gloo's own operations use prefixes below 0x10.
const BATCH: u8 = 0x40;
/// Tag prefix of `gatherv`.
pub(crate) const GATHERV: u8 = 0x41;

/// One message of a [`batch`](Context::batch).
///
/// A send and a receive match if they have the same pair of ranks, tag and length. Messages for
/// which all three are equal arrive in the order of sending. A send and a receive of different
/// lengths never match, and fail with [`Error::Timeout`]. A message of 0 bytes completes at once,
/// without the peer.
#[derive(Clone, Copy, Debug)]
pub enum Transfer {
    /// Bytes to send to a peer.
    Send {
        /// Address of the first byte.
        data: *const u8,
        /// Number of bytes.
        bytes: usize,
        /// The rank that receives the bytes.
        peer: usize,
        /// Tag that distinguishes this message from others.
        tag: u32,
    },
    /// Bytes to receive from a peer.
    Recv {
        /// Address at which the first byte is stored.
        data: *mut u8,
        /// Number of bytes.
        bytes: usize,
        /// The rank that sends the bytes.
        peer: usize,
        /// Tag that distinguishes this message from others.
        tag: u32,
    },
}

impl Transfer {
    const fn peer(&self) -> usize {
        match self {
            Self::Send { peer, .. } | Self::Recv { peer, .. } => *peer,
        }
    }

    const fn bytes(&self) -> usize {
        match self {
            Self::Send { bytes, .. } | Self::Recv { bytes, .. } => *bytes,
        }
    }
}

impl Context {
    /// Sends `bytes` bytes at `data` to `peer`. Returns when the data has been sent. This may
    /// require that the peer has posted the receive, so two ranks that both send before they
    /// receive block until the timeout. Use a [`batch`](Self::batch) instead.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `peer` is out of range or is this rank itself, or a connection error.
    ///
    /// # Safety
    /// `data` is valid for reads of `bytes` bytes until the call returns, and no other code writes
    /// it during the call.
    pub unsafe fn send(
        &self,
        data: *const u8,
        bytes: usize,
        peer: usize,
        call: Call,
    ) -> Result<(), Error> {
        let transfer = Transfer::Send {
            data,
            bytes,
            peer,
            tag: call.tag_value(),
        };
        // SAFETY: the caller's `data` is valid for reads of `bytes` bytes.
        unsafe { self.transfer("send", &[transfer], BATCH, call) }
    }

    /// Receives `bytes` bytes from `peer` and stores them at `data`. The peer must send exactly
    /// `bytes` bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `peer` is out of range or is this rank itself, or a connection error.
    ///
    /// # Safety
    /// `data` is valid for writes of `bytes` bytes until the call returns, and no other code uses
    /// it during the call.
    pub unsafe fn recv(
        &self,
        data: *mut u8,
        bytes: usize,
        peer: usize,
        call: Call,
    ) -> Result<(), Error> {
        let transfer = Transfer::Recv {
            data,
            bytes,
            peer,
            tag: call.tag_value(),
        };
        // SAFETY: the caller's `data` is valid for writes of `bytes` bytes.
        unsafe { self.transfer("recv", &[transfer], BATCH, call) }
    }

    /// Posts all `transfers` at the same time, and returns when all are complete. No order of the
    /// transfers, on this rank or another, can deadlock. Messages of a rank to itself are copied;
    /// their sends and receives must match within the batch. The batch uses the tags of its
    /// messages and ignores the tag of `call`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a peer out of range, or for unmatched messages of this rank to
    /// itself; or a connection error.
    ///
    /// # Safety
    /// Each `data` is valid for `bytes` bytes until the call returns: for reads in a send, and for
    /// writes in a receive. No other code writes to the buffers during the call. Receive buffers
    /// are disjoint from all other buffers.
    pub unsafe fn batch(&self, transfers: &[Transfer], call: Call) -> Result<(), Error> {
        // SAFETY: the preconditions of `transfer` are those of this method.
        unsafe { self.transfer("batch", transfers, BATCH, call) }
    }

    /// Runs a batch with another name and tag prefix.
    ///
    /// # Safety
    /// The preconditions of [`batch`](Self::batch).
    pub(crate) unsafe fn transfer(
        &self,
        operation: &'static str,
        transfers: &[Transfer],
        prefix: u8,
        call: Call,
    ) -> Result<(), Error> {
        let mut messages = Vec::with_capacity(transfers.len());
        let mut own = Vec::new();
        for transfer in transfers {
            let (send, address, tag) = match *transfer {
                Transfer::Send { data, tag, .. } => (true, data as usize, tag),
                Transfer::Recv { data, tag, .. } => (false, data as usize, tag),
            };
            let (peer, bytes) = (transfer.peer(), transfer.bytes());
            let code = i32::try_from(peer).ok().filter(|_| peer < self.size());
            let Some(code) = code else {
                let text = format!("peer {peer} is not a rank of a group of {}", self.size());
                return Err(Error::invalid(operation, text));
            };
            if isize::try_from(bytes).is_err() {
                return Err(Error::invalid(
                    operation,
                    "the size exceeds the address space",
                ));
            }
            if bytes > 0 && address == 0 {
                return Err(Error::invalid(
                    operation,
                    "a message that is not empty is null",
                ));
            }
            if peer == self.rank() {
                own.push(transfer);
            } else if bytes > 0 {
                messages.push(Message {
                    send,
                    address,
                    bytes,
                    peer: code,
                    tag,
                });
            }
        }
        let copies = match_own(operation, &own)?;
        self.check_open(operation)?;
        for (from, to, bytes) in copies {
            // SAFETY: `match_own` paired buffers of equal size. The caller keeps them valid and
            // disjoint.
            unsafe { core::ptr::copy_nonoverlapping(from, to, bytes) };
        }
        if messages.is_empty() {
            return Ok(());
        }
        self.run(operation, call, |bridge, call| {
            // SAFETY: `messages` has the addresses and sizes of the caller's transfers.
            unsafe { bridge.batch(&messages, prefix, call) }
        })
    }
}

/// Pairs the sends of this rank to itself with its receives from itself, in order, by tag and
/// length.
fn match_own(
    operation: &'static str,
    own: &[&Transfer],
) -> Result<Vec<(*const u8, *mut u8, usize)>, Error> {
    let mut receives: Vec<_> = own
        .iter()
        .filter_map(|transfer| match **transfer {
            Transfer::Recv {
                data, bytes, tag, ..
            } => Some((data, bytes, tag)),
            Transfer::Send { .. } => None,
        })
        .collect();
    let mut copies = Vec::new();
    for transfer in own {
        let Transfer::Send {
            data, bytes, tag, ..
        } = **transfer
        else {
            continue;
        };
        let found = receives
            .iter()
            .position(|receive| (receive.1, receive.2) == (bytes, tag));
        let Some(found) = found else {
            let text =
                format!("no receive matches a send of {bytes} bytes, tag {tag}, to this rank");
            return Err(Error::invalid(operation, text));
        };
        copies.push((data, receives.remove(found).0, bytes));
    }
    match receives.first() {
        None => Ok(copies),
        Some((_, bytes, tag)) => {
            let text =
                format!("no send matches a receive of {bytes} bytes, tag {tag}, from this rank");
            Err(Error::invalid(operation, text))
        }
    }
}
