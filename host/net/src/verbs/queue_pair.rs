//! Reliable connected queue pair with its completion queue.

use core::ffi::c_void;
use core::fmt;
use core::mem::zeroed;
use core::net::IpAddr;
use core::ptr::{self, NonNull};
use std::io;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::Arc;

use fusewire_verbs_sys::bindings::*;
use fusewire_verbs_sys::{ibv_poll_cq, ibv_post_recv, ibv_post_send, ibv_req_notify_cq};
use socket2::SockRef;

use super::status::describe;
use super::{Context, Gid, LinkLayer, PortChoice, VerbsPort, failed};
use crate::url::fill_random;
use crate::{Error, Result, TransportFailure};

/// Maximum number of requests in the send queue.
const SEND_DEPTH: u32 = 128;

/// Number of posted receives, one per notification. If none is left, this side's device answers
/// "receiver not ready", and the sender's device retries.
const RECEIVE_DEPTH: u32 = 256;

/// Writes of at most this size are copied into the send queue if the device can hold them.
const INLINE_BYTES: u32 = 64;

/// Id of all receives. Requests have other ids.
const RECEIVE_ID: u64 = 0;

/// Retransmission timeout: 4.096 us * 2^14 = 67 ms.
const RETRY_TIMEOUT: u8 = 14;

/// Number of retransmissions before a request fails, after 0.5 s to 2 s (a device may wait up to 4
/// times the timeout). Soft-RoCE treats 7 as unlimited, and needs that on networks that reorder
/// packets. The TCP connection then detects an unreachable peer.
const RETRIES: u8 = 7;

/// Number of retries after "receiver not ready". 7 means no limit; the deadlines of operations
/// limit the retries.
const RECEIVER_RETRIES: u8 = 7;

/// Pause before a sender retries after "receiver not ready": 12 means 0.64 ms.
const RECEIVER_TIMER: u8 = 12;

/// Maximum number of routers that a packet passes.
const HOP_LIMIT: u8 = 64;

/// Address of a queue pair, which its peer needs to connect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct QueueAddress {
    pub(crate) gid: [u8; 16],
    pub(crate) number: u32,
    /// First packet sequence number that the queue pair sends.
    pub(crate) sequence: u32,
    pub(crate) lid: u16,
    /// Maximum payload of a packet, as a value of `ibv_mtu`.
    pub(crate) mtu: u8,
    /// Number of concurrent reads that the queue pair serves.
    pub(crate) reads: u8,
}

impl QueueAddress {
    /// Length of the result of [`QueueAddress::to_bytes`].
    pub(crate) const BYTES: usize = 28;

    pub(crate) fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0..16].copy_from_slice(&self.gid);
        bytes[16..20].copy_from_slice(&self.number.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[24..26].copy_from_slice(&self.lid.to_le_bytes());
        bytes[26] = self.mtu;
        bytes[27] = self.reads;
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let word =
            |at| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let mut gid = [0; 16];
        gid.copy_from_slice(&bytes[..16]);
        Self {
            gid,
            number: word(16),
            sequence: word(20),
            lid: u16::from_le_bytes([bytes[24], bytes[25]]),
            mtu: bytes[26],
            reads: bytes[27],
        }
    }
}

/// Kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opcode {
    Write,
    /// A write that also completes one receive of the peer, after its bytes and those of all
    /// earlier writes have been written.
    WriteNotify,
    Read,
}

/// Request to transfer `len` bytes between `local` and the peer's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WorkRequest {
    /// Returned with the completion. Not 0.
    pub(crate) id: u64,
    pub(crate) opcode: Opcode,
    /// Address of the local memory.
    pub(crate) local: u64,
    pub(crate) len: u32,
    /// Key of the registered local memory. Unused if the write is [`QueuePair::is_inline`].
    pub(crate) local_key: Option<u32>,
    pub(crate) remote: u64,
    pub(crate) remote_key: u32,
    /// True if the request must not start before all earlier reads have completed.
    pub(crate) fence: bool,
}

/// Completion of a request or of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Completion {
    /// The request with this id has completed.
    Done(u64),
    /// A notification has arrived.
    Notified,
}

/// Queue pair whose requests and receives complete into its own completion queue. Dropping it stops
/// all transfers: afterwards the device accesses no memory for it.
pub(crate) struct QueuePair {
    context: Arc<Context>,
    channel: NonNull<ibv_comp_channel>,
    completions: Option<NonNull<ibv_cq>>,
    pair: Option<NonNull<ibv_qp>>,
    address: QueueAddress,
    port: VerbsPort,
    gid: Gid,
    traffic_class: u8,
    peer: Option<QueueAddress>,
    /// Number of requests that can still be posted.
    free: u32,
    max_inline: u32,
    requests: Vec<ibv_send_wr>,
    sges: Vec<ibv_sge>,
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("address", &self.address)
            .field("peer", &self.peer)
            .finish_non_exhaustive()
    }
}

// SAFETY: the functions of libibverbs may be called from any thread. The vectors hold pointers only
// during `post`.
unsafe impl Send for QueuePair {}

impl QueuePair {
    /// Creates a queue pair that is not connected, and that already accepts notifications.
    pub(crate) fn new(choice: &PortChoice, traffic_class: u8) -> Result<Self> {
        let (context, port) = Context::open(choice)?;
        let gid = port.gid(choice.gid_index).ok_or_else(|| Error::Call {
            operation: "open an RDMA device",
            peer: port.device.clone(),
            kind: TransportFailure::System,
            detail: "the port has no GID of the requested index".to_owned(),
        })?;
        let call = |function, error| failed(function, &port.device, &error);
        let mut sequence = [0; 4];
        fill_random(&mut sequence)?;
        let verbs = context.verbs;
        // SAFETY: the context is live.
        let channel = unsafe { verbs.ibv_create_comp_channel(context.context.as_ptr()) };
        let channel = NonNull::new(channel)
            .ok_or_else(|| call("ibv_create_comp_channel", io::Error::last_os_error()))?;
        let reads = context.attributes.max_qp_rd_atom.clamp(1, 16);
        // From here on, dropping the value destroys what exists.
        let mut this = Self {
            channel,
            completions: None,
            pair: None,
            address: QueueAddress {
                gid: gid.bytes,
                number: 0,
                sequence: u32::from_le_bytes(sequence) & 0xff_ffff,
                lid: port.lid,
                mtu: port.mtu_code as u8,
                reads: reads as u8,
            },
            gid,
            traffic_class,
            peer: None,
            free: 0,
            max_inline: 0,
            requests: Vec::new(),
            sges: Vec::new(),
            port: port.clone(),
            context: Arc::clone(&context),
        };
        // SAFETY: the channel is live, and owns its descriptor.
        let events = unsafe { BorrowedFd::borrow_raw(this.event_fd()) };
        let nonblocking = SockRef::from(&events).set_nonblocking(true);
        nonblocking.map_err(|error| call("fcntl", error))?;

        let limit = u32::try_from(context.attributes.max_qp_wr).unwrap_or(1);
        let (sends, receives) = (SEND_DEPTH.min(limit), RECEIVE_DEPTH.min(limit));
        // SAFETY: the context and the channel are live.
        let completions = unsafe {
            let (context, entries) = (context.context.as_ptr(), (sends + receives) as i32);
            verbs.ibv_create_cq(context, entries, ptr::null_mut(), channel.as_ptr(), 0)
        };
        let completions = NonNull::new(completions)
            .ok_or_else(|| call("ibv_create_cq", io::Error::last_os_error()))?;
        this.completions = Some(completions);

        // SAFETY: all bytes of the structure may be zero.
        let mut initial: ibv_qp_init_attr = unsafe { zeroed() };
        initial.send_cq = completions.as_ptr();
        initial.recv_cq = completions.as_ptr();
        initial.qp_type = IBV_QPT_RC;
        initial.cap = ibv_qp_cap {
            max_send_wr: sends,
            max_recv_wr: receives,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: INLINE_BYTES,
        };
        let create = |initial: &mut ibv_qp_init_attr| {
            // SAFETY: the domain and the completion queue are live.
            NonNull::new(unsafe { verbs.ibv_create_qp(context.domain.as_ptr(), initial) })
        };
        let pair = create(&mut initial).or_else(|| {
            // Some devices have no inline data.
            initial.cap.max_inline_data = 0;
            create(&mut initial)
        });
        let pair = pair.ok_or_else(|| call("ibv_create_qp", io::Error::last_os_error()))?;
        this.pair = Some(pair);
        this.free = sends;
        this.max_inline = initial.cap.max_inline_data;
        // SAFETY: the queue pair is live.
        this.address.number = unsafe { (*pair.as_ptr()).qp_num };

        // SAFETY: all bytes of the structure may be zero.
        let mut attributes: ibv_qp_attr = unsafe { zeroed() };
        attributes.qp_state = IBV_QPS_INIT;
        attributes.port_num = port.number;
        attributes.qp_access_flags = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE;
        let mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
        this.modify(&mut attributes, mask)?;
        this.post_receives(receives)
            .map_err(|error| call("ibv_post_recv", error))?;
        this.arm()
            .map_err(|error| call("ibv_req_notify_cq", error))?;
        Ok(this)
    }

    /// Returns the device on which requests are executed.
    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// Returns the link layer of the port.
    pub(crate) fn link_layer(&self) -> LinkLayer {
        self.port.link_layer
    }

    /// Returns the IP address of the port, if its GID encodes one.
    pub(crate) fn ip(&self) -> Option<IpAddr> {
        self.gid.ip()
    }

    /// Returns the address that the peer needs.
    pub(crate) fn address(&self) -> QueueAddress {
        self.address
    }

    /// Connects to the peer's queue pair. A repeated call with the same address has no effect.
    pub(crate) fn connect(&mut self, peer: &QueueAddress) -> Result<()> {
        let refused = |detail: &str| Error::Call {
            operation: "connect",
            peer: format!("the queue pair {:#x}", peer.number),
            kind: TransportFailure::Connect,
            detail: detail.to_owned(),
        };
        match &self.peer {
            Some(connected) if connected == peer => return Ok(()),
            Some(_) => return Err(refused("the peer announced two queue pairs")),
            None => {}
        }
        let is_ethernet = self.port.link_layer == LinkLayer::Ethernet;
        if (peer.lid == 0) != is_ethernet {
            return Err(refused(
                "one port is InfiniBand and the other one Ethernet; choose ports of one fabric",
            ));
        }
        if !(1..=5).contains(&peer.mtu) || peer.number > 0xff_ffff || peer.sequence > 0xff_ffff {
            return Err(refused("the peer announced an address that no device has"));
        }
        // SAFETY: all bytes of the structure may be zero.
        let mut attributes: ibv_qp_attr = unsafe { zeroed() };
        attributes.qp_state = IBV_QPS_RTR;
        attributes.path_mtu = u32::from(peer.mtu.min(self.address.mtu));
        attributes.dest_qp_num = peer.number;
        attributes.rq_psn = peer.sequence;
        attributes.max_dest_rd_atomic = self.address.reads;
        attributes.min_rnr_timer = RECEIVER_TIMER;
        let path = &mut attributes.ah_attr;
        path.port_num = self.port.number;
        path.dlid = peer.lid;
        // The first 8 bytes of a GID are the subnet prefix. Another subnet needs a global route
        // header (GRH), as RoCE always does.
        path.is_global = u8::from(is_ethernet || peer.gid[..8] != self.gid.bytes[..8]);
        path.grh.dgid.raw = peer.gid;
        path.grh.sgid_index = self.gid.index as u8;
        path.grh.hop_limit = HOP_LIMIT;
        path.grh.traffic_class = self.traffic_class;
        let mask = IBV_QP_STATE
            | IBV_QP_AV
            | IBV_QP_PATH_MTU
            | IBV_QP_DEST_QPN
            | IBV_QP_RQ_PSN
            | IBV_QP_MAX_DEST_RD_ATOMIC
            | IBV_QP_MIN_RNR_TIMER;
        self.modify(&mut attributes, mask)?;

        attributes.qp_state = IBV_QPS_RTS;
        attributes.sq_psn = self.address.sequence;
        attributes.timeout = RETRY_TIMEOUT;
        attributes.retry_cnt = RETRIES;
        attributes.rnr_retry = RECEIVER_RETRIES;
        let own = self.context.attributes.max_qp_init_rd_atom.clamp(1, 16) as u8;
        attributes.max_rd_atomic = own.min(peer.reads.max(1));
        let mask = IBV_QP_STATE
            | IBV_QP_SQ_PSN
            | IBV_QP_TIMEOUT
            | IBV_QP_RETRY_CNT
            | IBV_QP_RNR_RETRY
            | IBV_QP_MAX_QP_RD_ATOMIC;
        self.modify(&mut attributes, mask)?;
        self.peer = Some(*peer);
        Ok(())
    }

    /// Returns the number of requests that can be posted now.
    pub(crate) fn free(&self) -> u32 {
        self.free
    }

    /// Returns the size of the largest write that is sent inline, so that its memory need not be
    /// registered.
    pub(crate) fn inline_bytes(&self) -> usize {
        self.max_inline as usize
    }

    /// Posts requests as one chain. The device executes them in order.
    ///
    /// # Safety
    /// The local memory of each request must stay valid until the request has completed or the
    /// queue pair has been dropped. It must be registered under the request's key, or the request
    /// must have no key.
    pub(crate) unsafe fn post(&mut self, requests: &[WorkRequest]) -> io::Result<()> {
        let Some(pair) = self.pair.filter(|_| !requests.is_empty()) else {
            return Ok(());
        };
        assert!(requests.len() <= self.free as usize);
        self.sges.clear();
        self.sges.extend(requests.iter().map(|request| ibv_sge {
            addr: request.local,
            length: request.len,
            lkey: request.local_key.unwrap_or(0),
        }));
        self.requests.clear();
        for (index, request) in requests.iter().enumerate() {
            // SAFETY: all bytes of the structure may be zero.
            let mut raw: ibv_send_wr = unsafe { zeroed() };
            raw.wr_id = request.id;
            raw.sg_list = &raw mut self.sges[index];
            // A zero-length request has no SGE, because its memory need not be registered.
            raw.num_sge = i32::from(request.len > 0);
            raw.opcode = match request.opcode {
                Opcode::Write => IBV_WR_RDMA_WRITE,
                Opcode::WriteNotify => IBV_WR_RDMA_WRITE_WITH_IMM,
                Opcode::Read => IBV_WR_RDMA_READ,
            };
            raw.send_flags = IBV_SEND_SIGNALED;
            if request.local_key.is_none() && request.opcode != Opcode::Read {
                assert!(request.len <= self.max_inline);
                raw.send_flags |= IBV_SEND_INLINE;
            }
            if request.fence {
                raw.send_flags |= IBV_SEND_FENCE;
            }
            raw.wr.rdma = ibv_send_wr__bindgen_ty_2__bindgen_ty_1 {
                remote_addr: request.remote,
                rkey: request.remote_key,
            };
            self.requests.push(raw);
        }
        let first = self.requests.as_mut_ptr();
        for index in 1..requests.len() {
            // SAFETY: both indexes are within the vector.
            unsafe { (*first.add(index - 1)).next = first.add(index) };
        }
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair is live. The chain and its sges are in vectors that do not change
        // during the call, and the caller guarantees the memory.
        let code = unsafe { ibv_post_send(pair.as_ptr(), first, &raw mut bad) };
        if code != 0 {
            let error = io::Error::from_raw_os_error(code);
            return Err(io::Error::new(
                error.kind(),
                format!("ibv_post_send: {error}"),
            ));
        }
        self.free -= requests.len() as u32;
        Ok(())
    }

    /// Polls the completion queue, and appends the completions to `taken`. Returns true if more may
    /// be available.
    ///
    /// # Errors
    /// A description of the first request that failed. The queue pair then transfers nothing more.
    pub(crate) fn poll(&mut self, taken: &mut Vec<Completion>) -> io::Result<bool> {
        const COUNT: usize = 32;
        let Some(completions) = self.completions else {
            return Ok(false);
        };
        // SAFETY: all bytes of the structure may be zero.
        let mut found: [ibv_wc; COUNT] = unsafe { zeroed() };
        // SAFETY: the completion queue is live, and `found` has `COUNT` elements.
        let count = unsafe { ibv_poll_cq(completions.as_ptr(), COUNT as i32, found.as_mut_ptr()) };
        let count = usize::try_from(count)
            .map_err(|_| io::Error::other("ibv_poll_cq: the device failed"))?;
        let mut received = 0;
        let mut failure = Ok(());
        for completion in &found[..count] {
            let is_receive = completion.wr_id == RECEIVE_ID;
            if completion.status != IBV_WC_SUCCESS {
                failure = failure.and_then(|()| Err(self.failure(completion, is_receive)));
            } else if is_receive {
                received += 1;
                // Messages other than writes with immediate data are not notifications.
                if completion.opcode == IBV_WC_RECV_RDMA_WITH_IMM {
                    taken.push(Completion::Notified);
                }
            } else {
                self.free += 1;
                taken.push(Completion::Done(completion.wr_id));
            }
        }
        failure?;
        self.post_receives(received)?;
        Ok(count == COUNT)
    }

    fn failure(&self, completion: &ibv_wc, is_receive: bool) -> io::Error {
        io::Error::other(format!(
            "{} (status {}, vendor error {:#x}) on {} port {}",
            describe(completion.status, is_receive),
            completion.status,
            completion.vendor_err,
            self.port.device,
            self.port.number
        ))
    }

    /// Returns a descriptor that is readable if [`QueuePair::acknowledge`] must be called.
    pub(crate) fn event_fd(&self) -> RawFd {
        // SAFETY: the channel is live.
        unsafe { (*self.channel.as_ptr()).fd }
    }

    /// Takes the events of the completion queue, and requests an event for the next completion. The
    /// caller must take completions afterwards, because there is no event for those that are
    /// already in the queue.
    pub(crate) fn acknowledge(&mut self) -> io::Result<()> {
        let mut completions: *mut ibv_cq = ptr::null_mut();
        let mut data: *mut c_void = ptr::null_mut();
        // SAFETY: the channel is live, its descriptor does not block, and both results are
        // writable. All events are of this value's completion queue, which is live.
        while unsafe {
            let verbs = self.context.verbs;
            let channel = self.channel.as_ptr();
            verbs.ibv_get_cq_event(channel, &raw mut completions, &raw mut data) == 0
        } {
            // SAFETY: the event was returned for this completion queue.
            unsafe { self.context.verbs.ibv_ack_cq_events(completions, 1) };
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => self.arm(),
            // The device was removed.
            kind => Err(io::Error::new(
                kind,
                format!("ibv_get_cq_event on {}: {error}", self.port.device),
            )),
        }
    }

    fn arm(&self) -> io::Result<()> {
        let Some(completions) = self.completions else {
            return Ok(());
        };
        // SAFETY: the completion queue is live.
        match unsafe { ibv_req_notify_cq(completions.as_ptr(), 0) } {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code)),
        }
    }

    fn post_receives(&self, count: u32) -> io::Result<()> {
        let Some(pair) = self.pair else {
            return Ok(());
        };
        for _ in 0..count {
            // SAFETY: all bytes of the structure may be zero.
            let mut receive: ibv_recv_wr = unsafe { zeroed() };
            receive.wr_id = RECEIVE_ID;
            let mut bad = ptr::null_mut();
            // SAFETY: the queue pair is live, and the receive refers to no memory.
            let code = unsafe { ibv_post_recv(pair.as_ptr(), &raw mut receive, &raw mut bad) };
            if code != 0 {
                return Err(io::Error::from_raw_os_error(code));
            }
        }
        Ok(())
    }

    fn modify(&self, attributes: &mut ibv_qp_attr, mask: u32) -> Result<()> {
        let Some(pair) = self.pair else {
            return Ok(());
        };
        // SAFETY: the queue pair is live. The library only reads the attributes.
        match unsafe {
            self.context
                .verbs
                .ibv_modify_qp(pair.as_ptr(), attributes, mask as i32)
        } {
            0 => Ok(()),
            code => {
                let error = io::Error::from_raw_os_error(code);
                Err(failed("ibv_modify_qp", &self.port.device, &error))
            }
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        let verbs = self.context.verbs;
        // SAFETY: `new` created the objects, and this is their only owner. They are destroyed
        // before the objects that they refer to. All events have been acknowledged.
        unsafe {
            if let Some(pair) = self.pair {
                verbs.ibv_destroy_qp(pair.as_ptr());
            }
            if let Some(completions) = self.completions {
                verbs.ibv_destroy_cq(completions.as_ptr());
            }
            verbs.ibv_destroy_comp_channel(self.channel.as_ptr());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_survive_their_bytes() {
        let address = QueueAddress {
            gid: core::array::from_fn(|index| index as u8),
            number: 0x12_3456,
            sequence: 0xab_cdef,
            lid: 0x789a,
            mtu: 5,
            reads: 16,
        };
        assert_eq!(QueueAddress::from_bytes(&address.to_bytes()), address);
    }
}
