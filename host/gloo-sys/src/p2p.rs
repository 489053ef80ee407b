//! Messages between two ranks, one or many at once.

use crate::context::{Call, Context};
use crate::error::Error;
use crate::ffi::Message;

/// Tag prefix of our messages, apart from Gloo's: its own operations have prefixes below 0x10.
const BATCH: u8 = 0x40;
/// Tag prefix of `gatherv`.
pub(crate) const GATHERV: u8 = 0x41;

/// One message of a [`batch`](Context::batch).
///
/// A send and a receive match by rank, tag and length. Messages that are alike in these arrive in
/// the order of sending. Two lengths never match, and end in [`Error::Timeout`]. A message of 0
/// bytes is done at once, without the peer.
#[derive(Clone, Copy, Debug)]
pub enum Transfer {
    /// Bytes that go to a peer.
    Send {
        /// The first byte.
        data: *const u8,
        /// How many.
        bytes: usize,
        /// The rank that receives them.
        peer: usize,
        /// Distinguishes this message from others.
        tag: u32,
    },
    /// Bytes that come from a peer.
    Recv {
        /// Where the first byte goes.
        data: *mut u8,
        /// How many.
        bytes: usize,
        /// The rank that sends them.
        peer: usize,
        /// Distinguishes this message from others.
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
    /// Sends `bytes` at `data` to `peer`. Returns when the data has left, which can be when the
    /// peer has posted the receive: two ranks that send to each other before they receive wait for
    /// each other until the time-out; use a [`batch`](Self::batch) for that.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a peer out of range or this rank itself; else what the connection
    /// does.
    ///
    /// # Safety
    /// `data` is valid for reads of `bytes` until the call returns, and nobody writes it meanwhile.
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
        // SAFETY: the caller's promise.
        unsafe { self.transfer("send", &[transfer], BATCH, call) }
    }

    /// Receives `bytes` from `peer` at `data`; the peer sends exactly as many.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a peer out of range or this rank itself; else what the connection
    /// does.
    ///
    /// # Safety
    /// `data` is valid for writes of `bytes` until the call returns, and nobody uses it meanwhile.
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
        // SAFETY: the caller's promise.
        unsafe { self.transfer("recv", &[transfer], BATCH, call) }
    }

    /// Posts all `transfers` at once, and returns when all are done: no order among them, on this
    /// rank or another, can deadlock. Messages of a rank to itself are copied; within the batch
    /// they must match. The batch uses the messages' tags, not that of `call`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a peer out of range, or messages to itself that do not match; else
    /// what the connections do.
    ///
    /// # Safety
    /// Each `data` is valid for its `bytes`, for reads where it is sent and for writes where it is
    /// received, until the call returns; nobody else writes them meanwhile; what is received is
    /// apart from everything else.
    pub unsafe fn batch(&self, transfers: &[Transfer], call: Call) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { self.transfer("batch", transfers, BATCH, call) }
    }

    /// A batch under another name, with another tag.
    ///
    /// # Safety
    /// As for [`batch`](Self::batch).
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
                let text = format!("peer {peer} in a group of {}", self.size());
                return Err(Error::invalid(operation, text));
            };
            if isize::try_from(bytes).is_err() {
                return Err(Error::invalid(
                    operation,
                    "the size exceeds the address space",
                ));
            }
            if bytes > 0 && address == 0 {
                return Err(Error::invalid(operation, "a null pointer"));
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
            // SAFETY: valid and apart by the caller's promise.
            unsafe { core::ptr::copy_nonoverlapping(from, to, bytes) };
        }
        if messages.is_empty() {
            return Ok(());
        }
        self.run(operation, call, |bridge, call| {
            // SAFETY: the caller's promise, for the same addresses and sizes.
            unsafe { bridge.batch(&messages, prefix, call) }
        })
    }
}

/// Pairs what a rank sends to itself with what it receives from itself, in order, by tag and
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
            let text = format!("{bytes} bytes to this rank itself, tag {tag}, without a receive");
            return Err(Error::invalid(operation, text));
        };
        copies.push((data, receives.remove(found).0, bytes));
    }
    match receives.first() {
        None => Ok(copies),
        Some((_, bytes, tag)) => {
            let text = format!("{bytes} bytes from this rank itself, tag {tag}, without a send");
            Err(Error::invalid(operation, text))
        }
    }
}
