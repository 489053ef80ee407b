//! The formats of the requests to the server thread and of its replies. Requests and replies have
//! fixed sizes. A request contains the secret of a descriptor. If the request is granted, the
//! descriptor is attached to the reply.

use core::mem;
use core::ptr;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::token::Random;
use crate::descriptor::counted;

/// Bytes of a request.
pub(super) const REQUEST_BYTES: usize = 24;

/// Bytes of a reply.
pub(super) const REPLY_BYTES: usize = 8;

const REQUEST_MAGIC: [u8; 8] = *b"FWFETCH1";
const REPLY_MAGIC: [u8; 7] = *b"FWGIVE1";

/// Maximum number of descriptors that one call of [`receive`] accepts. A valid reply has at most
/// one descriptor; the second place lets the receiver detect an unexpected one. The system closes
/// descriptors that do not fit and sets `MSG_CTRUNC`.
const CAPACITY: usize = 2;

/// The status in a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Reply {
    /// The descriptor is attached.
    Granted = 1,
    /// No published descriptor has this secret.
    Unknown = 2,
    /// The requesting process belongs to another user.
    Refused = 3,
    /// The server has too many connections, or the system is out of resources. The peer must send
    /// the request again.
    Busy = 4,
}

impl Reply {
    pub(super) fn to_bytes(self) -> [u8; REPLY_BYTES] {
        let mut bytes = [self as u8; REPLY_BYTES];
        bytes[..7].copy_from_slice(&REPLY_MAGIC);
        bytes
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let bytes = <&[u8; REPLY_BYTES]>::try_from(bytes).ok()?;
        if !bytes.starts_with(&REPLY_MAGIC) {
            return None;
        }
        [Self::Granted, Self::Unknown, Self::Refused, Self::Busy]
            .into_iter()
            .find(|reply| *reply as u8 == bytes[7])
    }
}

/// Encodes the request for the descriptor with the secret `secret`.
pub(super) fn request(secret: &Random) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes[..8].copy_from_slice(&REQUEST_MAGIC);
    bytes[8..].copy_from_slice(secret);
    bytes
}

/// Returns the secret in a request, or `None` if the request is invalid.
pub(super) fn secret(request: &[u8]) -> Option<Random> {
    let request = <&[u8; REQUEST_BYTES]>::try_from(request).ok()?;
    let secret = request.strip_prefix(&REQUEST_MAGIC)?;
    Random::try_from(secret).ok()
}

/// A buffer for control messages, aligned for `cmsghdr`.
#[repr(C, align(8))]
struct Control([u8; 64]);

/// Returns the size in bytes of a control message with `count` descriptors: first with trailing
/// padding, then without.
const fn control_bytes(count: usize) -> (usize, usize) {
    let payload = (count * size_of::<RawFd>()) as u32;
    // SAFETY: CMSG_SPACE only computes, and the small payload does not overflow.
    let space = unsafe { libc::CMSG_SPACE(payload) };
    // SAFETY: CMSG_LEN only computes, and the small payload does not overflow.
    let len = unsafe { libc::CMSG_LEN(payload) };
    (space as usize, len as usize)
}

const _: () = assert!(control_bytes(8).0 <= size_of::<Control>() && CAPACITY <= 8);
const _: () = assert!(align_of::<libc::cmsghdr>() <= align_of::<Control>());

/// Sends `bytes` with an optional descriptor. Returns the number of sent bytes, or `None` if the
/// call must be repeated. Never blocks.
pub(super) fn send(
    socket: &impl AsRawFd,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<Option<usize>> {
    let descriptors: Vec<_> = descriptor.into_iter().collect();
    send_several(socket, bytes, &descriptors)
}

/// Sends like [`send`], with several descriptors.
///
/// # Panics
/// Panics if `descriptors` has more elements than fit in a [`Control`] buffer.
pub(super) fn send_several(
    socket: &impl AsRawFd,
    bytes: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<Option<usize>> {
    let mut part = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut control = Control([0; 64]);
    // SAFETY: a zeroed `msghdr` is valid: it contains null pointers and zero lengths.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if !descriptors.is_empty() {
        let (space, len) = control_bytes(descriptors.len());
        assert!(space <= size_of::<Control>(), "too many descriptors");
        message.msg_control = (&raw mut control).cast();
        message.msg_controllen = space as _;
        let header = (&raw mut control).cast::<libc::cmsghdr>();
        // SAFETY: a zeroed `cmsghdr` is valid, because all of its fields are integers.
        let mut first: libc::cmsghdr = unsafe { mem::zeroed() };
        first.cmsg_level = libc::SOL_SOCKET;
        first.cmsg_type = libc::SCM_RIGHTS;
        first.cmsg_len = len as _;
        // SAFETY: `control` is aligned for a header by its type, and the assertion above implies
        // that it is larger than a header.
        unsafe { header.write(first) };
        // SAFETY: the header is valid, and its payload lies within the buffer.
        let mut target = unsafe { libc::CMSG_DATA(header) }.cast::<RawFd>();
        for descriptor in descriptors {
            // SAFETY: `space` bytes hold all descriptors, and the assertion above bounds `space` by
            // the size of the buffer.
            unsafe { target.write_unaligned(descriptor.as_raw_fd()) };
            // SAFETY: the result is at most one element past the payload, and the payload lies
            // within the buffer.
            target = unsafe { target.add(1) };
        }
    }
    let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    // SAFETY: `message` refers to `bytes`, which `sendmsg` only reads, and to `control`. Both
    // outlive the call.
    counted(unsafe { libc::sendmsg(socket.as_raw_fd(), &message, flags) })
}

/// The result of one call of [`receive`].
#[derive(Debug)]
pub(super) struct ReceivedMessage {
    /// Number of bytes; 0 at the end of the stream.
    pub(super) count: usize,
    /// All received descriptors. They are closed on `exec`.
    pub(super) descriptors: Vec<OwnedFd>,
    /// True if the system dropped descriptors that did not fit.
    pub(super) cut: bool,
}

/// Receives bytes into `buffer`, and up to [`CAPACITY`] attached descriptors. Returns `None` if no
/// data is available. Never blocks.
pub(super) fn receive(
    socket: &impl AsRawFd,
    buffer: &mut [u8],
) -> io::Result<Option<ReceivedMessage>> {
    let mut part = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let mut control = Control([0; 64]);
    // SAFETY: a zeroed `msghdr` is valid: it contains null pointers and zero lengths.
    let mut message: libc::msghdr = unsafe { mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = (&raw mut control).cast();
    message.msg_controllen = control_bytes(CAPACITY).0 as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: `message` refers to `buffer`, which this function borrows exclusively, and to
    // `control`. Both outlive the call.
    let result = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    let Some(count) = counted(result)? else {
        return Ok(None);
    };

    let mut descriptors = Vec::new();
    // SAFETY: `recvmsg` has filled in `message`, and `control`, to which `message` refers, is live.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    while !header.is_null() {
        // SAFETY: CMSG_FIRSTHDR or CMSG_NXTHDR returned `header`, so it lies within the buffer,
        // which is aligned for headers.
        let found = unsafe { ptr::read(header) };
        if found.cmsg_level == libc::SOL_SOCKET && found.cmsg_type == libc::SCM_RIGHTS {
            let payload = (found.cmsg_len as usize).saturating_sub(control_bytes(0).1);
            // SAFETY: CMSG_FIRSTHDR or CMSG_NXTHDR returned the header, so its payload lies within
            // the buffer.
            let mut source = unsafe { libc::CMSG_DATA(header) }.cast::<RawFd>();
            for _ in 0..payload / size_of::<RawFd>() {
                // SAFETY: `recvmsg` wrote `payload` bytes at this position, and they lie within the
                // buffer.
                let fd = unsafe { source.read_unaligned() };
                // SAFETY: `recvmsg` has just opened this descriptor for this process, and no other
                // code owns it.
                descriptors.push(unsafe { OwnedFd::from_raw_fd(fd) });
                // SAFETY: the result is at most one element past the payload, and the payload lies
                // within the buffer.
                source = unsafe { source.add(1) };
            }
        }
        // SAFETY: `recvmsg` filled in `message`, and `header` is a header of `message`.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    Ok(Some(ReceivedMessage {
        count,
        descriptors,
        cut: message.msg_flags & libc::MSG_CTRUNC != 0,
    }))
}
