//! Requests between meshes of this process, failures, and invalid input.

use core::cell::UnsafeCell;
use core::net::Ipv4Addr;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;

use super::*;
use crate::Nonce;

/// Bound of loops that otherwise end by a condition. Less than the time limit of a handshake, so
/// that no condition becomes true because of that.
const LIMIT: Duration = Duration::from_secs(9);

/// Memory of an endpoint. An address is the offset of a byte.
struct Memory {
    words: Box<[UnsafeCell<u64>]>,
    /// First address that peers may access. `u64::MAX` closes the endpoint.
    first: AtomicU64,
    /// Sender and message of each notice, and the word at address 0 at its delivery.
    notices: Mutex<Vec<(u64, Vec<u8>, u64)>>,
}

// SAFETY: each test accesses the words on one thread.
unsafe impl Sync for Memory {}

// SAFETY: the ranges are in `words`, which the mesh keeps alive until `Mesh::close`.
unsafe impl Endpoint for Memory {
    fn locate(&self, address: u64, bytes: u64) -> Option<*mut u8> {
        let end = address.checked_add(bytes)?;
        let is_in = address >= self.first.load(Ordering::Relaxed) && end <= self.len() as u64;
        is_in.then(|| self.at(address as usize, bytes as usize))
    }

    fn is_closed(&self) -> bool {
        self.first.load(Ordering::Relaxed) == u64::MAX
    }

    fn notice(&self, sender: u64, message: &[u8]) {
        let notice = (sender, message.to_vec(), self.word(0));
        self.notices.lock().unwrap().push(notice);
    }
}

impl Memory {
    fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            words: (0..bytes.div_ceil(8)).map(|_| 0.into()).collect(),
            first: AtomicU64::new(0),
            notices: Mutex::default(),
        })
    }

    fn len(&self) -> usize {
        8 * self.words.len()
    }

    fn at(&self, address: usize, bytes: usize) -> *mut u8 {
        assert!(address + bytes <= self.len());
        let start = self.words.as_ptr().cast::<u8>().cast_mut();
        start.wrapping_add(address)
    }

    fn bytes(&self, address: usize, bytes: usize) -> Vec<u8> {
        // SAFETY: `at` checks the range, and no mesh writes it during the call.
        unsafe { core::slice::from_raw_parts(self.at(address, bytes), bytes) }.to_vec()
    }

    fn word(&self, address: usize) -> u64 {
        u64::from_ne_bytes(self.bytes(address, 8).try_into().unwrap())
    }

    fn write(&self, address: usize, bytes: &[u8]) {
        let to = self.at(address, bytes.len());
        // SAFETY: `at` checks the range, and no mesh accesses it during the call.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    fn local(&self, address: usize, bytes: usize) -> Local {
        let start = self.at(address, bytes);
        let address = address as u64;
        Local { address, start }
    }

    fn put(&self, address: usize, bytes: usize) -> Operation {
        let local = self.local(address, bytes);
        Operation::Put { local, bytes }
    }

    fn get(&self, address: usize, bytes: usize) -> Operation {
        let local = self.local(address, bytes);
        Operation::Get { local, bytes }
    }
}

/// A mesh with an endpoint, and what its events have reported.
struct Node {
    mesh: Mesh,
    endpoint: u64,
    memory: Arc<Memory>,
    /// Receiver of the requests.
    peer: Peer,
    target: u64,
    requests: u64,
    completed: Vec<(u64, Option<u64>)>,
    refused: Vec<u64>,
    lost: Vec<(Peer, String)>,
}

/// Returns a number for an endpoint.
fn random() -> u64 {
    let mut bytes = [0; 8];
    crate::url::fill_random(&mut bytes).unwrap();
    u64::from_ne_bytes(bytes)
}

impl Node {
    /// Creates a node that sends its requests to itself.
    fn new(bytes: usize) -> Self {
        let mut mesh = Mesh::new(Ipv4Addr::LOCALHOST.into()).unwrap();
        let memory = Memory::new(bytes);
        let endpoint = random();
        mesh.open(endpoint, memory.clone());
        Self {
            peer: mesh.peer(&mesh.url().clone()),
            mesh,
            endpoint,
            memory,
            target: endpoint,
            requests: 0,
            completed: Vec::new(),
            refused: Vec::new(),
            lost: Vec::new(),
        }
    }

    fn open(&mut self, bytes: usize) -> (u64, Arc<Memory>) {
        let memory = Memory::new(bytes);
        let endpoint = random();
        self.mesh.open(endpoint, memory.clone());
        (endpoint, memory)
    }

    /// Makes another node the receiver of the requests.
    fn aim(&mut self, other: &Self) {
        self.peer = self.mesh.peer(other.mesh.url());
        self.target = other.endpoint;
    }

    /// Posts a request of endpoint `sender` and returns its number.
    fn post(&mut self, sender: u64, endpoint: u64, address: usize, operation: Operation) -> u64 {
        self.requests += 1;
        let request = MeshRequest {
            sender,
            number: self.requests,
            endpoint,
            address: address as u64,
            operation,
        };
        // SAFETY: the ranges are in the `Memory` of `sender`, which lives until `Mesh::close`.
        unsafe { self.mesh.post(self.peer, request) };
        self.requests
    }

    fn send(&mut self, address: usize, operation: Operation) -> u64 {
        self.post(self.endpoint, self.target, address, operation)
    }

    fn poll(&mut self) -> bool {
        let mut events = Vec::new();
        let is_busy = self.mesh.poll(&mut events);
        for event in events {
            match event {
                Event::Completed { number, value, .. } => self.completed.push((number, value)),
                Event::Refused { number, .. } => self.refused.push(number),
                Event::Lost { peer, reason } => self.lost.push((peer, reason)),
            }
        }
        is_busy
    }
}

/// Creates two nodes that send their requests to each other.
fn pair(bytes: usize) -> [Node; 2] {
    let (mut a, mut b) = (Node::new(bytes), Node::new(bytes));
    a.aim(&b);
    b.aim(&a);
    [a, b]
}

#[track_caller]
fn until(nodes: &mut [Node], mut is_done: impl FnMut(&mut [Node]) -> bool) {
    let start = Instant::now();
    while !is_done(nodes) {
        assert!(start.elapsed() < LIMIT);
        nodes.iter_mut().for_each(|node| _ = node.poll());
    }
}

/// Adds to the last word of node `to`, after all earlier requests of node `from`.
#[track_caller]
fn exchange(nodes: &mut [Node], from: usize, to: usize) {
    let memory = Arc::clone(&nodes[to].memory);
    let (address, before) = (memory.len() - 8, memory.word(memory.len() - 8));
    let add = nodes[from].send(address, Operation::Add(5));
    let expected = (add, Some(before));
    until(nodes, |nodes| {
        nodes[from].completed.last() == Some(&expected)
    });
    assert_eq!(memory.word(address), before + 5);
}

/// Xorshift generator.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) as usize % limit
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.below(256) as u8).collect()
    }
}

#[test]
fn the_data_of_puts_arrives_before_the_signal() {
    let mut nodes = pair(6 << 20);
    let data = Random(1).bytes(6 << 20);
    nodes[0].memory.write(0, &data);
    let target = Arc::clone(&nodes[1].memory);
    let (mut at, mut word) = (9, 0);
    for bytes in [1, 64, 100 << 10, 5 << 20, 0] {
        nodes[0].send(at, nodes[0].memory.put(at, bytes));
        (at, word) = (at + bytes, word + 1);
        nodes[0].send(0, Operation::Signal(word));
        until(&mut nodes, |_| target.word(0) == word);
        assert!(target.bytes(9, at - 9) == data[9..at], "{bytes}");
    }
    assert!(
        (1..=10)
            .map(|number| (number, None))
            .eq(nodes[0].completed.clone())
    );
    assert_eq!(target.bytes(at, 100), [0; 100]);
}

#[test]
fn more_answers_than_the_limit_arrive() {
    let mut nodes = pair(10_000 << 10);
    let data = Random(3).bytes(10_000 << 10);
    nodes[1].memory.write(8, &data[8..]);
    // The first requests wait for the connection. With the second number of gets, the last ones are
    // in the receive buffer of the answering side when it reaches its limit.
    for (gets, bytes) in [(10_000, 8), (4_200, 8), (10_000, 1000)] {
        nodes[0].send(0, Operation::Signal(1));
        let addresses = || (0..gets).map(|get| 8 + 1024 * get);
        for at in addresses() {
            nodes[0].send(at, nodes[0].memory.get(at, bytes));
        }
        until(&mut nodes, |nodes| {
            // The answering side fills the sockets' buffers.
            (0..10_000).all(|_| nodes[1].poll());
            nodes[0].completed.len() as u64 == nodes[0].requests
        });
        let is_correct = |at| nodes[0].memory.bytes(at, bytes) == data[at..at + bytes];
        assert!(addresses().all(is_correct));
        nodes[0].memory.write(0, &vec![0; 10_000 << 10]);
    }
}

#[test]
fn a_mesh_has_several_endpoints_and_is_its_own_peer() {
    let mut nodes = [Node::new(64)];
    let (other, memory) = nodes[0].open(64);
    nodes[0].memory.write(0, &[3; 5]);
    let own = nodes[0].endpoint;
    nodes[0].post(own, other, 8, nodes[0].memory.put(0, 5));
    nodes[0].post(other, own, 1, memory.get(32, 4));
    exchange(&mut nodes, 0, 0);
    assert_eq!(memory.bytes(6, 10), [0, 0, 3, 3, 3, 3, 3, 0, 0, 0]);
    assert_eq!(memory.bytes(31, 6), [0, 3, 3, 3, 3, 0]);
    assert_eq!(nodes[0].memory.bytes(0, 6), [3, 3, 3, 3, 3, 0]);
    assert!(nodes[0].mesh.is_connected(nodes[0].peer) && nodes[0].mesh.is_flushed());
}

#[test]
fn requests_outside_the_memory_or_to_a_closed_endpoint_are_refused() {
    let mut nodes = pair(64);
    let data = Random(4).bytes(48);
    nodes[1].memory.write(0, &data);
    let (put, get) = (nodes[0].memory.put(0, 8), nodes[0].memory.get(0, 8));
    let (signal, add, swap) = (
        Operation::Signal(1),
        Operation::Add(1),
        Operation::Swap(0, 1),
    );
    let values = [1; 2];
    let store = Operation::Store { values, bytes: 15 };
    let outside = [
        (57, put),
        (usize::MAX, put),
        (50, store),
        (4, signal),
        (64, signal),
        (60, get),
        (usize::MAX - 7, get),
        (12, add),
        (9, swap),
    ];
    let (reader, into) = nodes[0].open(16);
    let (mut refused, own) = (Vec::new(), nodes[0].endpoint);
    for (at, (address, operation)) in outside.into_iter().enumerate() {
        refused.push(nodes[0].send(address, operation));
        nodes[0].post(reader, nodes[1].endpoint, at, into.get(at, 1));
    }
    exchange(&mut nodes, 0, 1);
    assert_eq!(nodes[0].refused, refused);
    assert_eq!(into.bytes(0, 9), data[..9]);

    let (closed, memory) = nodes[1].open(64);
    memory.first.store(u64::MAX, Ordering::Relaxed);
    for _ in 0..2 {
        for address in [0, 64] {
            for operation in [put, store, signal] {
                nodes[0].post(own, closed, address, operation);
            }
            refused.extend([get, add, swap].map(|op| nodes[0].post(own, closed, address, op)));
        }
        exchange(&mut nodes, 0, 1);
        nodes[1].mesh.close(closed);
        memory.first.store(0, Ordering::Relaxed);
    }
    assert_eq!(nodes[0].refused, refused);
    assert!(memory.bytes(0, 64) == [0; 64] && nodes[0].memory.bytes(0, 64) == [0; 64]);
    assert_eq!(nodes[1].memory.bytes(0, 48), data);
}

#[test]
fn close_ends_transfers_and_keeps_the_connection() {
    const BYTES: usize = 50 << 20;
    for (is_put, is_source) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut nodes = pair(64);
        let (x, at_x) = nodes[0].open(BYTES);
        let (y, at_y) = nodes[1].open(BYTES);
        let [put, get, later] = [at_x.put(0, BYTES), at_x.get(0, BYTES), at_x.get(0, 8)];
        let (source, target) = if is_put { (at_x, at_y) } else { (at_y, at_x) };
        source.write(0, &vec![7; BYTES]);
        let (peer, endpoint) = (nodes[0].peer, nodes[1].endpoint);
        nodes[0].post(x, y, 0, if is_put { put } else { get });
        nodes[0].post(x, endpoint, 0, Operation::Signal(1));
        nodes[0].post(x, endpoint, 0, later);
        nodes[0].mesh.notify(peer, x, endpoint, b"left");
        until(&mut nodes, |_| target.word(1 << 20) != 0);
        assert_eq!(target.word(BYTES - 8), 0);
        let closes_x = is_put == is_source;
        match closes_x {
            true => nodes[0].mesh.close(x),
            false => nodes[1].mesh.close(y),
        }
        let (closed, other) = match is_source {
            true => (source, target),
            false => (target, source),
        };
        closed.write(0, &vec![9; BYTES]);
        // The allocator unmaps the source, so that system calls that read it fail.
        let closed = (!is_source).then_some(closed);
        exchange(&mut nodes, 0, 1);
        exchange(&mut nodes, 1, 0);
        let is_intact = closed.is_none_or(|target| target.bytes(0, BYTES) == vec![9; BYTES]);
        assert!(is_intact && !other.bytes(0, BYTES).contains(&9));
        // The close drops the signal if it waits for the put.
        let word = u64::from(!(is_put && closes_x));
        let notices = nodes[1].memory.notices.lock().unwrap();
        assert_eq!(*notices, [(x, b"left".to_vec(), word)]);
        assert!(nodes[0].refused.is_empty() && nodes[0].lost.is_empty());
    }
}

#[test]
fn forget_ends_the_accesses_to_one_range() {
    const HALF: usize = 25 << 20;
    let mut nodes = pair(2 * HALF);
    let (endpoint, target) = (nodes[1].endpoint, Arc::clone(&nodes[1].memory));
    nodes[0].memory.write(0, &vec![7; HALF]);
    nodes[0].send(0, nodes[0].memory.put(0, HALF));
    nodes[0].send(HALF, nodes[0].memory.put(0, 1024));
    until(&mut nodes, |_| target.word(1 << 20) != 0);
    assert_eq!(target.word(HALF - 8), 0);
    nodes[1].mesh.forget(endpoint, &|address| address > 0);
    until(&mut nodes, |_| target.word(8 << 20) != 0);
    target.first.store(HALF as u64, Ordering::Relaxed);
    let is_first = |address| address < HALF as u64;
    nodes[1].mesh.forget(endpoint, &is_first);
    target.write(0, &vec![9; HALF]);
    let refused = nodes[0].send(0, nodes[0].memory.put(0, 8));
    exchange(&mut nodes, 0, 1);
    assert!(target.bytes(0, HALF) == vec![9; HALF] && nodes[0].refused == [refused]);
    assert!(target.bytes(HALF, 1024) == vec![7; 1024] && target.word(HALF + 1024) == 0);
}

#[test]
fn close_and_forget_apply_to_requests_that_wait_for_a_connection() {
    let mut nodes = pair(64);
    let (endpoint, peer) = (nodes[1].endpoint, nodes[0].peer);
    let [(x, at_x), (y, at_y)] = [(); 2].map(|()| nodes[0].open(64));
    nodes[1].memory.write(0, &[5; 64]);
    for (sender, memory, to) in [(x, &at_x, 16), (y, &at_y, 32)] {
        memory.write(0, &[7; 64]);
        nodes[0].post(sender, endpoint, to, memory.put(0, 8));
        nodes[0].post(sender, endpoint, to + 8, memory.put(16, 8));
        nodes[0].post(sender, endpoint, 0, memory.get(8, 8));
        nodes[0].mesh.notify(peer, sender, endpoint, b"left");
    }
    nodes[0].mesh.close(x);
    nodes[0].mesh.forget(y, &|address| address < 16);
    at_y.write(0, &[9; 64]);
    exchange(&mut nodes, 0, 1);
    let expected = [[5; 8], [5; 8], [0; 8], [9; 8], [5; 8]].concat();
    assert_eq!(nodes[1].memory.bytes(16, 40), expected);
    assert!(at_x.bytes(0, 64) == [7; 64] && at_y.bytes(0, 64) == [9; 64]);
    assert_eq!(nodes[1].memory.notices.lock().unwrap().len(), 2);
}

#[test]
fn notices_are_delivered_after_the_earlier_requests() {
    let mut nodes = pair(64);
    let (peer, sender, endpoint) = (nodes[0].peer, nodes[0].endpoint, nodes[1].endpoint);
    let mut expected = Vec::new();
    for (word, bytes) in (1..).zip([0, 1, MAX_NOTICE, 0, 100]) {
        let message = Random(word).bytes(bytes);
        nodes[0].send(0, Operation::Signal(word));
        nodes[0].mesh.notify(peer, sender, endpoint, &message);
        expected.push((sender, message, word));
    }
    exchange(&mut nodes, 0, 1);
    assert_eq!(*nodes[1].memory.notices.lock().unwrap(), expected);
}

#[test]
fn a_loss_is_reported_once_and_after_the_requests_that_were_sent() {
    let mut nodes = pair(1 << 16);
    exchange(&mut nodes, 0, 1);
    exchange(&mut nodes, 1, 0);
    let [a, mut b] = nodes;
    let (memory, peer, name) = (Arc::clone(&b.memory), b.peer, a.mesh.url().public());
    a.memory.write(0, &[7; 60_000]);
    let mut sender = [a];
    sender[0].send(8, sender[0].memory.put(0, 60_000));
    sender[0].send(0, Operation::Signal(1));
    let refused = b.send(0, memory.get(0, 8));
    // The requests fit into the sockets' buffers, so that `b` receives them after the drop.
    until(&mut sender, |nodes| nodes[0].mesh.is_flushed());
    drop(sender);
    let mut nodes = [b, Node::new(64)];
    until(&mut nodes, |nodes| !nodes[0].lost.is_empty());
    assert!(memory.word(0) == 1 && memory.bytes(8, 60_000) == [7; 60_000]);

    let put = nodes[0].send(0, memory.put(0, 8));
    let refused = [refused, nodes[0].send(0, memory.get(0, 8))];
    nodes[0].mesh.notify(peer, 1, 1, b"late");
    until(&mut nodes, |nodes| nodes[0].refused == refused);
    assert_eq!(nodes[0].completed.last(), Some(&(put, None)));
    assert!(nodes[0].mesh.is_flushed() && !nodes[0].mesh.is_connected(peer));
    let [b, c] = &mut nodes;
    b.aim(c);
    c.aim(b);
    exchange(&mut nodes, 0, 1);
    exchange(&mut nodes, 1, 0);
    let [(lost, reason)] = &nodes[0].lost[..] else {
        panic!("{:?}", nodes[0].lost);
    };
    assert!(*lost == peer && reason.contains(&name), "{reason}");
}

#[test]
fn a_process_that_cannot_be_reached_is_lost() {
    let mut nodes = pair(64);
    // Reserves a port on which nothing listens.
    let socket = socket2::Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    socket.bind(&any.into()).unwrap();
    let unused = socket.local_addr().unwrap().as_socket().unwrap();
    let secret = Nonce::random().unwrap();
    for address in [unused.to_string(), nodes[1].mesh.url().address().to_owned()] {
        // The second mesh has another secret.
        let url = Url::new(Mesh::SCHEME, &address, secret);
        let node = &mut nodes[0];
        node.lost.clear();
        node.peer = node.mesh.peer(&url);
        let put = node.send(0, node.memory.put(0, 8));
        let get = node.send(0, node.memory.get(0, 8));
        until(&mut nodes, |nodes| !nodes[0].lost.is_empty());
        assert_eq!(nodes[0].completed.last(), Some(&(put, None)));
        assert_eq!(nodes[0].refused.last(), Some(&get));
        let (lost, reason) = &nodes[0].lost[0];
        assert_eq!(*lost, nodes[0].peer);
        assert!(reason.contains(&url.public()), "{reason}");
    }
    let [a, b] = &mut nodes;
    a.aim(b);
    exchange(&mut nodes, 0, 1);
    assert!(nodes[0].lost.len() == 1 && nodes[1].lost.is_empty());
}

/// Receives into all of `buffer`. Returns false at the end of the stream.
#[track_caller]
fn read(nodes: &mut [Node], stream: &mut TcpStream, buffer: &mut [u8]) -> bool {
    stream.set_nonblocking(true).unwrap();
    let (mut count, mut has_ended) = (0, false);
    until(nodes, |_| {
        match stream.read(&mut buffer[count..]) {
            Ok(bytes) => (count, has_ended) = (count + bytes, bytes == 0),
            Err(error) => has_ended = error.kind() != ErrorKind::WouldBlock,
        }
        has_ended || count == buffer.len()
    });
    stream.set_nonblocking(false).unwrap();
    !has_ended
}

/// Connects to node 1 and receives its challenge.
fn call(nodes: &mut [Node]) -> (TcpStream, Challenge) {
    let mut stream = TcpStream::connect(nodes[1].mesh.url().address()).unwrap();
    let mut bytes = [0; Challenge::BYTES];
    assert!(read(nodes, &mut stream, &mut bytes));
    (stream, Challenge::from_bytes(&bytes).unwrap())
}

/// Connects to node 1 and proves a secret. Returns the hello, and true if it was accepted.
fn greet(nodes: &mut [Node], secret: Nonce, from: Nonce) -> (TcpStream, [u8; Hello::BYTES], bool) {
    let (mut stream, challenge) = call(nodes);
    let hello = Hello {
        from: from.peer_id(),
        challenge: [4; 16],
        queue: None,
    };
    let sent = hello.to_bytes(secret, &challenge);
    stream.write_all(&sent).unwrap();
    let mut bytes = [0; Welcome::BYTES];
    let is_welcome = read(nodes, &mut stream, &mut bytes);
    let welcome = Welcome::from_bytes(&bytes, secret, &hello);
    assert_eq!(welcome.is_some(), is_welcome);
    (stream, sent, is_welcome)
}

fn head(kind: Kind, endpoint: u64, length: u64) -> Head {
    Head {
        kind,
        endpoint,
        address: 0,
        length,
        values: [1; 2],
        sender: 2,
        number: 3,
    }
}

#[test]
fn requests_that_have_arrived_are_executed_before_a_loss() {
    let mut nodes = pair(64);
    let [from, secret] = [0, 1].map(|at| nodes[at].mesh.url().nonce());
    let (mut stream, ..) = greet(&mut nodes, secret, from);
    exchange(&mut nodes, 1, 0);
    let [a, b] = nodes;
    drop(a);
    // The end of the other connection arrives before this request.
    let signal = head(Kind::Signal, b.endpoint, 8);
    stream.write_all(&signal.to_bytes()).unwrap();
    drop(stream);
    let mut nodes = [b];
    until(&mut nodes, |nodes| !nodes[0].lost.is_empty());
    assert_eq!(nodes[0].memory.word(0), 1);
}

#[test]
fn requests_that_have_arrived_are_executed_even_if_their_answers_are_not_received() {
    const ADDS: usize = MAX_ANSWERS + 1000;
    let mut nodes = pair(64);
    exchange(&mut nodes, 0, 1);
    let [a, b] = nodes;
    let mut sender = [a];
    for _ in 0..ADDS {
        sender[0].send(0, Operation::Add(1));
    }
    // The requests fit into the sockets' buffers.
    until(&mut sender, |nodes| nodes[0].mesh.is_flushed());
    drop(sender);
    let mut nodes = [b];
    until(&mut nodes, |nodes| !nodes[0].lost.is_empty());
    // The system drops requests that have not arrived when the first answer is refused.
    assert!(nodes[0].memory.word(0) > MAX_ANSWERS as u64);
}

/// Permits this process as many descriptors as the system allows.
fn raise_descriptor_limit() {
    // SAFETY: zeros are a valid value.
    let mut limit: libc::rlimit = unsafe { core::mem::zeroed() };
    // SAFETY: `limit` is a live value.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: see above.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
}

#[test]
fn strangers_do_no_harm() {
    raise_descriptor_limit();
    let [a, b] = pair(64);
    let mut nodes = [a, b, Node::new(64)];
    exchange(&mut nodes, 0, 1);
    let secret = nodes[1].mesh.url().nonce();
    let other = Nonce::random().unwrap();
    let (_accepted, recorded, is_welcome) = greet(&mut nodes, secret, other);
    assert!(is_welcome && !greet(&mut nodes, other, other).2);
    for bytes in [&recorded[..], &[7; 5000]] {
        let (mut stream, _) = call(&mut nodes);
        stream.write_all(bytes).unwrap();
        assert!(!read(&mut nodes, &mut stream, &mut [0]));
    }
    let (mut half, _) = call(&mut nodes);
    half.write_all(&recorded[..20]).unwrap();
    let address = nodes[1].mesh.url().address().to_owned();
    let _silent = [(); 2000].map(|()| {
        nodes[1].poll();
        TcpStream::connect(&address).unwrap()
    });
    exchange(&mut nodes, 0, 1);
    let [_, b, c] = &mut nodes;
    c.aim(b);
    // Node 1 admits this caller once the silent ones have had their time.
    exchange(&mut nodes, 2, 1);
    assert!(nodes.iter().all(|node| node.lost.is_empty()));
}

#[test]
fn unanswered_dials_do_not_keep_callers_out() {
    raise_descriptor_limit();
    let mut nodes = pair(64);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    for _ in 0..MAX_CALLERS {
        let url = Url::new(Mesh::SCHEME, &address, Nonce::random().unwrap());
        nodes[1].peer = nodes[1].mesh.peer(&url);
        nodes[1].send(0, Operation::Signal(1));
    }
    exchange(&mut nodes, 0, 1);
}

#[test]
fn a_peer_that_sends_invalid_requests_is_lost() {
    let mut nodes = pair(64);
    exchange(&mut nodes, 0, 1);
    let secret = nodes[1].mesh.url().nonce();
    let intruder = |nodes: &mut [Node]| greet(nodes, secret, Nonce::random().unwrap()).0;
    let endpoint = nodes[1].endpoint;
    let garbage = Random(6).bytes(message::BYTES);
    let invalid = [
        head(Kind::Data, endpoint, 0).to_bytes(),
        head(Kind::Refused, endpoint, 0).to_bytes(),
        head(Kind::Notice, endpoint, 1 << 30).to_bytes(),
        head(Kind::Store, endpoint, 17).to_bytes(),
        garbage.try_into().unwrap(),
    ];
    for bytes in invalid {
        let mut stream = intruder(&mut nodes);
        stream.write_all(&bytes).unwrap();
        assert!(!read(&mut nodes, &mut stream, &mut [0]), "{bytes:?}");
    }
    let mut stream = intruder(&mut nodes);
    let put = head(Kind::Put, endpoint, u64::MAX);
    stream.write_all(&put.to_bytes()).unwrap();
    let mut bytes = [0; message::BYTES];
    assert!(read(&mut nodes, &mut stream, &mut bytes));
    let answer = Head::from_bytes(&bytes, true).unwrap();
    assert!(answer.kind == Kind::Refused && answer.number == 3);
    stream.write_all(&[1; 50_000]).unwrap();
    drop(stream);
    until(&mut nodes, |nodes| nodes[1].lost.len() == 6);
    assert_eq!(nodes[1].memory.bytes(0, 56), [0; 56]);
    exchange(&mut nodes, 0, 1);
    exchange(&mut nodes, 1, 0);
    assert!(nodes[0].lost.is_empty());
}

#[test]
fn random_requests_of_both_sides_match_a_model() {
    // The memory has an area for the requests of the peer, and one for sources and targets.
    const AREA: usize = 1 << 12;
    for seed in 1..40 {
        let (mut random, mut nodes) = (Random(seed), pair(2 * AREA));
        // The peer's memory, and the values before adds and swaps.
        let mut models = [(); 2].map(|()| (vec![0; AREA], Vec::new()));
        for node in &nodes {
            node.memory.write(AREA, &random.bytes(AREA));
        }
        for _ in 0..400 {
            let from = random.below(2);
            let (node, (model, words)) = (&mut nodes[from], &mut models[from]);
            // Few addresses, so that many ranges overlap.
            let (at, bytes) = (random.below(256), random.below(400));
            let (word, value) = (at & !7, random.0);
            let (start, data) = match random.below(4) {
                0 => {
                    let source = AREA + random.below(AREA / 2);
                    node.send(at, node.memory.put(source, bytes));
                    (at, node.memory.bytes(source, bytes))
                }
                1 => {
                    let (values, bytes) = ([value, !value], bytes % 17);
                    node.send(at, Operation::Store { values, bytes });
                    (at, values.map(u64::to_ne_bytes).concat()[..bytes].to_vec())
                }
                2 => {
                    node.send(word, Operation::Signal(value));
                    (word, value.to_ne_bytes().to_vec())
                }
                _ => {
                    let before = u64::from_ne_bytes(model[word..word + 8].try_into().unwrap());
                    let (operation, after) = match random.below(3) {
                        0 => (Operation::Add(value), before.wrapping_add(value)),
                        1 => (Operation::Swap(before, value), value),
                        _ => (Operation::Swap(!before, value), before),
                    };
                    words.push((node.send(word, operation), Some(before)));
                    (word, after.to_ne_bytes().to_vec())
                }
            };
            model[start..start + data.len()].copy_from_slice(&data);
            if random.below(3) == 0 {
                nodes[random.below(2)].poll();
            }
            if random.below(20) == 0 {
                let get = nodes[from].send(at, nodes[from].memory.get(2 * AREA - 400, bytes));
                let event = (get, None);
                until(&mut nodes, |nodes| nodes[from].completed.contains(&event));
                let data = nodes[from].memory.bytes(2 * AREA - 400, bytes);
                assert!(data == models[from].0[at..at + bytes], "{seed}");
            }
        }
        until(&mut nodes, |nodes| {
            let mut nodes = nodes.iter();
            nodes.all(|node| node.completed.len() as u64 == node.requests)
        });
        for (from, (model, words)) in models.into_iter().enumerate() {
            exchange(&mut nodes, from, 1 - from);
            let is_reported = |word| nodes[from].completed.contains(word);
            assert!(words.iter().all(is_reported), "{seed}");
            assert!(nodes[1 - from].memory.bytes(0, AREA) == model, "{seed}");
        }
    }
}
