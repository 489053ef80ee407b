//! Requests between meshes of this process, failures, and invalid input.

use core::cell::UnsafeCell;
use core::net::Ipv4Addr;
use core::sync::atomic::AtomicBool;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;

use super::*;
use crate::Nonce;

/// Bound of loops that otherwise end by a condition.
const LIMIT: Duration = Duration::from_secs(10);

/// Memory of an endpoint. An address is the offset of a byte.
struct Memory {
    words: Box<[UnsafeCell<u64>]>,
    /// First address that peers may access.
    first: AtomicU64,
    is_closed: AtomicBool,
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
        self.is_closed.load(Ordering::Relaxed)
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
            is_closed: AtomicBool::new(false),
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

    fn is_filled(&self, byte: u8) -> bool {
        self.bytes(0, self.len()).iter().all(|other| *other == byte)
    }

    fn write(&self, address: usize, bytes: &[u8]) {
        let to = self.at(address, bytes.len());
        // SAFETY: `at` checks the range, and no mesh accesses it during the call.
        unsafe { to.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) }
    }

    fn fill(&self, byte: u8) {
        self.write(0, &vec![byte; self.len()]);
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
    /// Receiver of the requests: this node, until a test replaces it.
    peer: Peer,
    target: u64,
    requests: u64,
    completed: Vec<(u64, Option<u64>)>,
    refused: Vec<u64>,
    lost: Vec<(Peer, String)>,
}

impl Node {
    fn new(bytes: usize) -> Self {
        let mut mesh = Mesh::new(Ipv4Addr::LOCALHOST.into()).unwrap();
        let memory = Memory::new(bytes);
        let endpoint = mesh.open(|_| memory.clone()).unwrap();
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
        (self.mesh.open(|_| memory.clone()).unwrap(), memory)
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

    /// Returns the values of the completions of a request.
    fn completions(&self, number: u64) -> Vec<Option<u64>> {
        let events = self.completed.iter().filter(|(other, _)| *other == number);
        events.map(|(_, value)| *value).collect()
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
fn until<const N: usize>(nodes: &mut [Node; N], mut is_done: impl FnMut(&mut [Node; N]) -> bool) {
    let start = Instant::now();
    while !is_done(nodes) {
        assert!(start.elapsed() < LIMIT);
        for node in &mut *nodes {
            node.poll();
        }
    }
}

/// Adds to the last word of node `to`, after all earlier requests of node `from`.
#[track_caller]
fn exchange<const N: usize>(nodes: &mut [Node; N], from: usize, to: usize) {
    let memory = Arc::clone(&nodes[to].memory);
    let (address, before) = (memory.len() - 8, memory.word(memory.len() - 8));
    let add = nodes[from].send(address, Operation::Add(5));
    until(nodes, |nodes| !nodes[from].completions(add).is_empty());
    assert_eq!(nodes[from].completions(add), [Some(before)]);
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
        at += bytes;
        word += 1;
        nodes[0].send(0, Operation::Signal(word));
        until(&mut nodes, |_| target.word(0) == word);
        assert!(target.bytes(9, at - 9) == data[9..at], "{bytes}");
    }
    assert!((1..=10).all(|number| nodes[0].completions(number) == [None]));
    assert_eq!(target.bytes(at, 100), [0; 100]);
}

#[test]
fn stores_adds_and_swaps_are_executed_in_order() {
    let mut nodes = pair(4096);
    let data = Random(2).bytes(16);
    let values = [0, 8].map(|at| u64::from_ne_bytes(data[at..at + 8].try_into().unwrap()));
    let mut model = vec![0; 4096];
    for slot in 0..64 {
        // Aligned and unaligned targets.
        let (bytes, at) = (slot % 16 + 1, 32 * slot + [0, 3, 4, 8][slot / 16]);
        nodes[0].send(at, Operation::Store { values, bytes });
        model[at..at + bytes].copy_from_slice(&data[..bytes]);
    }
    let requests = [
        (Operation::Swap(1, 2), 0),
        (Operation::Swap(0, 7), 0),
        (Operation::Add(u64::MAX), 7),
        (Operation::Swap(6, u64::MAX), 6),
        (Operation::Add(3), u64::MAX),
    ];
    let sent = requests.map(|(operation, _)| nodes[0].send(4000, operation));
    model[4000] = 2;
    nodes[0].memory.write(0, &[5; 100]);
    nodes[0].send(3001, nodes[0].memory.put(0, 100));
    model[3001..3101].fill(5);
    let (reader, into) = nodes[0].open(4096);
    let get = nodes[0].post(reader, nodes[1].endpoint, 0, into.get(0, 4096));
    until(&mut nodes, |nodes| nodes[0].completions(get) == [None]);
    for (number, (operation, value)) in sent.into_iter().zip(requests) {
        assert_eq!(nodes[0].completions(number), [Some(value)], "{operation:?}");
    }
    assert!(into.bytes(0, 4096) == model && nodes[1].memory.bytes(0, 4096) == model);
}

#[test]
fn a_get_does_not_return_the_data_of_a_later_put() {
    let mut nodes = pair(64);
    exchange(&mut nodes, 0, 1);
    nodes[0].memory.write(0, &[9; 8]);
    nodes[0].send(0, nodes[0].memory.get(16, 8));
    nodes[0].send(0, nodes[0].memory.put(0, 8));
    exchange(&mut nodes, 0, 1);
    assert_eq!(nodes[1].memory.bytes(0, 8), [9; 8]);
    assert_eq!(nodes[0].memory.bytes(16, 8), [0; 8]);
}

#[test]
fn more_answers_than_the_limit_arrive() {
    const GETS: usize = 10_000;
    let mut nodes = pair(GETS * 1024);
    let data = Random(3).bytes(GETS * 1024);
    nodes[1].memory.write(0, &data);
    // The first requests wait for the connection.
    for bytes in [8, 1024] {
        for at in (0..GETS).map(|get| 1024 * get) {
            nodes[0].send(at, nodes[0].memory.get(at, bytes));
        }
        until(&mut nodes, |nodes| {
            // The answering side fills the sockets' buffers.
            (0..10_000).all(|_| nodes[1].poll());
            nodes[0].completed.len() as u64 == nodes[0].requests
        });
        for at in (0..GETS).map(|get| 1024 * get) {
            assert!(nodes[0].memory.bytes(at, bytes) == data[at..at + bytes]);
        }
    }
    assert!(nodes[0].refused.is_empty());
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
    let values = [1; 2];
    let store = Operation::Store { values, bytes: 15 };
    let outside = [
        (57, put),
        (usize::MAX, put),
        (50, store),
        (4, Operation::Signal(1)),
        (64, Operation::Signal(1)),
        (60, get),
        (usize::MAX - 7, get),
        (12, Operation::Add(1)),
        (9, Operation::Swap(0, 1)),
    ];
    let mut refused = Vec::new();
    let (reader, into) = nodes[0].open(16);
    for (at, (address, operation)) in outside.into_iter().enumerate() {
        refused.push(nodes[0].send(address, operation));
        nodes[0].post(reader, nodes[1].endpoint, at, into.get(at, 1));
    }
    exchange(&mut nodes, 0, 1);
    assert_eq!(nodes[0].refused, refused);
    assert_eq!(into.bytes(0, 9), data[..9]);

    // A closed endpoint refuses only requests with an answer.
    let (closed, memory) = nodes[1].open(64);
    for is_open in [true, false] {
        memory.is_closed.store(is_open, Ordering::Relaxed);
        if !is_open {
            nodes[1].mesh.close(closed);
        }
        for operation in [put, store, Operation::Signal(1), get, Operation::Add(1)] {
            for address in [0, 64] {
                let number = nodes[0].post(nodes[0].endpoint, closed, address, operation);
                let is_answered = matches!(operation, Operation::Get { .. } | Operation::Add(_));
                refused.extend(is_answered.then_some(number));
            }
        }
    }
    exchange(&mut nodes, 0, 1);
    assert_eq!(nodes[0].refused, refused);
    assert!(memory.is_filled(0) && nodes[0].memory.is_filled(0));
    assert_eq!(nodes[1].memory.bytes(0, 48), data);
    assert!(nodes[0].lost.is_empty());
}

#[test]
fn close_ends_transfers_and_keeps_the_connection() {
    const BYTES: usize = 50 << 20;
    for (is_put, is_source) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut nodes = pair(64);
        let (x, at_x) = nodes[0].open(BYTES);
        let (y, at_y) = nodes[1].open(BYTES);
        let operation = match is_put {
            true => at_x.put(0, BYTES),
            false => at_x.get(0, BYTES),
        };
        let (source, target) = if is_put { (at_x, at_y) } else { (at_y, at_x) };
        source.fill(7);
        nodes[0].post(x, y, 0, operation);
        let (peer, endpoint) = (nodes[0].peer, nodes[1].endpoint);
        nodes[0].post(x, endpoint, 0, Operation::Signal(1));
        nodes[0].mesh.notify(peer, x, endpoint, b"left");
        until(&mut nodes, |_| target.word(1 << 20) != 0);
        assert_eq!(target.word(BYTES - 8), 0);
        let closes_x = is_put == is_source;
        match closes_x {
            true => nodes[0].mesh.close(x),
            false => nodes[1].mesh.close(y),
        }
        if is_source {
            source.fill(9);
            // The allocator unmaps the memory, so that accesses of the mesh fail.
            drop(Arc::into_inner(source).unwrap());
        } else {
            target.fill(9);
        }
        exchange(&mut nodes, 0, 1);
        exchange(&mut nodes, 1, 0);
        match is_source {
            true => assert!(!target.bytes(0, BYTES).contains(&9) && target.word(BYTES - 8) == 0),
            false => assert!(target.is_filled(9)),
        }
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
    let target = Arc::clone(&nodes[1].memory);
    nodes[0].memory.fill(7);
    nodes[0].send(0, nodes[0].memory.put(0, HALF));
    nodes[0].send(HALF, nodes[0].memory.put(0, 1024));
    until(&mut nodes, |_| target.word(1 << 20) != 0);
    assert_eq!(target.word(HALF - 8), 0);
    let half = HALF as u64;
    target.first.store(half, Ordering::Relaxed);
    let endpoint = nodes[1].endpoint;
    nodes[1].mesh.forget(endpoint, &|address| address < half);
    target.write(0, &vec![9; HALF]);
    let refused = nodes[0].send(0, nodes[0].memory.put(0, 8));
    exchange(&mut nodes, 0, 1);
    assert!(target.bytes(0, HALF) == vec![9; HALF]);
    assert!(target.bytes(HALF, 1024) == vec![7; 1024] && target.word(HALF + 1024) == 0);
    assert_eq!(nodes[0].refused, [refused]);
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
    a.memory.fill(7);
    let mut sender = [a];
    sender[0].send(8, sender[0].memory.put(0, 60_000));
    sender[0].send(0, Operation::Signal(1));
    b.send(0, b.memory.get(0, 8));
    // The requests fit into the sockets' buffers, so that `b` receives them after the drop.
    until(&mut sender, |nodes| nodes[0].mesh.is_flushed());
    let name = sender[0].mesh.url().public();
    drop(sender);
    let mut nodes = [b, Node::new(64)];
    until(&mut nodes, |nodes| !nodes[0].lost.is_empty());
    let memory = Arc::clone(&nodes[0].memory);
    assert!(memory.word(0) == 1 && memory.bytes(8, 60_000) == vec![7; 60_000]);

    let put = nodes[0].send(0, memory.put(0, 8));
    let refused = [put - 1, nodes[0].send(0, memory.get(0, 8))];
    let (peer, endpoint) = (nodes[0].peer, nodes[0].endpoint);
    nodes[0].mesh.notify(peer, endpoint, endpoint, b"late");
    until(&mut nodes, |nodes| nodes[0].refused == refused);
    assert_eq!(nodes[0].completions(put), [None]);
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
    for address in [unused.to_string(), nodes[1].mesh.url().address().to_owned()] {
        // The secret is wrong.
        let url = Url::new(Mesh::SCHEME, &address, Nonce::random().unwrap());
        nodes[0].lost.clear();
        nodes[0].peer = nodes[0].mesh.peer(&url);
        let put = nodes[0].send(0, nodes[0].memory.put(0, 8));
        let get = nodes[0].send(0, nodes[0].memory.get(0, 8));
        until(&mut nodes, |nodes| !nodes[0].lost.is_empty());
        assert_eq!(nodes[0].completions(put), [None]);
        assert_eq!(nodes[0].refused.pop(), Some(get));
        let (lost, reason) = &nodes[0].lost[0];
        assert!(
            *lost == nodes[0].peer && reason.contains(&url.public()),
            "{reason}"
        );
    }
    let [a, b] = &mut nodes;
    a.aim(b);
    exchange(&mut nodes, 0, 1);
    assert!(nodes[0].lost.len() == 1 && nodes[1].lost.is_empty());
}

/// Receives into all of `buffer`. Returns false at the end of the stream.
#[track_caller]
fn read<const N: usize>(nodes: &mut [Node; N], stream: &mut TcpStream, buffer: &mut [u8]) -> bool {
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
fn call<const N: usize>(nodes: &mut [Node; N]) -> (TcpStream, Challenge) {
    let mut stream = TcpStream::connect(nodes[1].mesh.url().address()).unwrap();
    let mut bytes = [0; Challenge::BYTES];
    assert!(read(nodes, &mut stream, &mut bytes));
    (stream, Challenge::from_bytes(&bytes).unwrap())
}

fn hello() -> Hello {
    Hello {
        from: Nonce::random().unwrap().peer_id(),
        challenge: [4; 16],
        queue: None,
    }
}

/// Connects to node 1 as a process that knows its secret.
fn intruder<const N: usize>(nodes: &mut [Node; N]) -> TcpStream {
    let (mut stream, challenge) = call(nodes);
    let (hello, secret) = (hello(), nodes[1].mesh.url().nonce());
    stream
        .write_all(&hello.to_bytes(secret, &challenge))
        .unwrap();
    let mut bytes = [0; Welcome::BYTES];
    assert!(read(nodes, &mut stream, &mut bytes));
    assert!(Welcome::from_bytes(&bytes, secret, &hello).is_some());
    stream
}

#[test]
fn strangers_do_no_harm() {
    let [a, b] = pair(64);
    let mut nodes = [a, b, Node::new(64)];
    exchange(&mut nodes, 0, 1);
    // A proxy between the nodes 2 and 1 records a hello.
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = proxy.local_addr().unwrap().to_string();
    let url = Url::new(Mesh::SCHEME, &address, nodes[1].mesh.url().nonce());
    nodes[2].peer = nodes[2].mesh.peer(&url);
    nodes[2].send(0, Operation::Signal(1));
    let (mut caller, _) = proxy.accept().unwrap();
    let (mut listener, challenge) = call(&mut nodes);
    caller.write_all(&challenge.to_bytes()).unwrap();
    let mut recorded = [0; Hello::BYTES];
    assert!(read(&mut nodes, &mut caller, &mut recorded));
    listener.write_all(&recorded).unwrap();
    assert!(read(&mut nodes, &mut listener, &mut [0; Welcome::BYTES]));
    drop((caller, listener));
    until(&mut nodes, |nodes| {
        !nodes[1].lost.is_empty() && !nodes[2].lost.is_empty()
    });

    let _silent = call(&mut nodes);
    let (mut half, challenge) = call(&mut nodes);
    let hello_of_half = hello().to_bytes(nodes[1].mesh.url().nonce(), &challenge);
    half.write_all(&hello_of_half[..20]).unwrap();
    let garbage = Random(5).bytes(5000);
    for kind in 0..3 {
        let (mut stranger, challenge) = call(&mut nodes);
        let wrong = hello().to_bytes(Nonce::random().unwrap(), &challenge);
        stranger
            .write_all([&garbage[..], &recorded, &wrong][kind])
            .unwrap();
        assert!(!read(&mut nodes, &mut stranger, &mut [0]), "{kind}");
    }
    exchange(&mut nodes, 0, 1);
    let [_, b, c] = &mut nodes;
    c.aim(b);
    exchange(&mut nodes, 2, 1);
    assert!(nodes[0].lost.is_empty() && nodes[1].lost.len() == 1);
}

#[test]
fn a_peer_that_sends_invalid_requests_is_lost() {
    let mut nodes = pair(64);
    exchange(&mut nodes, 0, 1);
    let put = Head {
        kind: Kind::Put,
        endpoint: nodes[1].endpoint,
        address: 0,
        length: u64::MAX,
        values: [1; 2],
        sender: 2,
        number: 3,
    };
    let invalid = [
        (Kind::Data, 0),
        (Kind::Refused, 0),
        (Kind::Notice, 1 << 30),
        (Kind::Store, 17),
        (Kind::Signal, 16),
    ];
    let heads = invalid.map(|(kind, length)| {
        Head {
            kind,
            length,
            ..put
        }
        .to_bytes()
        .to_vec()
    });
    for bytes in heads.into_iter().chain([Random(6).bytes(64)]) {
        let mut stream = intruder(&mut nodes);
        stream.write_all(&bytes).unwrap();
        assert!(!read(&mut nodes, &mut stream, &mut [0]), "{bytes:?}");
    }
    let mut stream = intruder(&mut nodes);
    stream.write_all(&put.to_bytes()).unwrap();
    let mut bytes = [0; message::BYTES];
    assert!(read(&mut nodes, &mut stream, &mut bytes));
    assert_eq!(
        Head::from_bytes(&bytes, true).map(|head| head.kind),
        Some(Kind::Refused)
    );
    stream.write_all(&[1; 50_000]).unwrap();
    drop(stream);
    until(&mut nodes, |nodes| nodes[1].lost.len() == 7);
    assert_eq!(nodes[1].memory.bytes(0, 56), [0; 56]);
    exchange(&mut nodes, 0, 1);
    exchange(&mut nodes, 1, 0);
    assert!(nodes[0].lost.is_empty());
}

/// Permits this process as many descriptors as the system allows.
fn raise_descriptor_limit() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a live value.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: see above.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
}

#[test]
fn silent_callers_do_not_keep_a_peer_out() {
    raise_descriptor_limit();
    let [a, b] = pair(64);
    let mut nodes = [a, b, Node::new(64)];
    exchange(&mut nodes, 0, 1);
    let _silent = [(); 2000].map(|()| {
        nodes[1].poll();
        TcpStream::connect(nodes[1].mesh.url().address()).unwrap()
    });
    exchange(&mut nodes, 0, 1);
    let [_, b, c] = &mut nodes;
    c.aim(b);
    exchange(&mut nodes, 2, 1);
    exchange(&mut nodes, 0, 1);
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
fn random_requests_of_both_sides_match_a_model() {
    // Areas of the memory: targets of the peer, sources of puts, and targets of gets.
    const AREA: usize = 1 << 14;
    for seed in 1..20 {
        let (mut random, mut nodes) = (Random(seed), pair(3 * AREA));
        // The peers' targets, the words before adds, and the targets of gets.
        let mut models = [(); 2].map(|()| (vec![0; AREA], Vec::new(), vec![0; AREA]));
        for node in &nodes {
            node.memory.write(AREA, &random.bytes(AREA));
        }
        for step in 0..400 {
            let from = random.below(2);
            let (node, (model, words, gets)) = (&mut nodes[from], &mut models[from]);
            // Few addresses, so that many ranges overlap.
            let (at, bytes) = (random.below(256), random.below(400));
            let (word, value) = (at & !7, random.0);
            match random.below(5) {
                0 => {
                    let source = AREA + random.below(AREA - bytes);
                    node.send(at, node.memory.put(source, bytes));
                    model[at..at + bytes].copy_from_slice(&node.memory.bytes(source, bytes));
                }
                1 => {
                    let (values, bytes) = ([value, !value], bytes % 17);
                    node.send(at, Operation::Store { values, bytes });
                    let data = values.map(u64::to_ne_bytes).concat();
                    model[at..at + bytes].copy_from_slice(&data[..bytes]);
                }
                2 => {
                    node.send(word, Operation::Signal(value));
                    model[word..word + 8].copy_from_slice(&value.to_ne_bytes());
                }
                3 => {
                    let into = 32 * step;
                    node.send(at, node.memory.get(2 * AREA + into, bytes % 33));
                    gets[into..into + bytes % 33].copy_from_slice(&model[at..at + bytes % 33]);
                }
                _ => {
                    let before = u64::from_ne_bytes(model[word..word + 8].try_into().unwrap());
                    let number = node.send(word, Operation::Add(value));
                    words.push((number, Some(before)));
                    let after = before.wrapping_add(value);
                    model[word..word + 8].copy_from_slice(&after.to_ne_bytes());
                }
            }
            if random.below(3) == 0 {
                nodes[random.below(2)].poll();
            }
        }
        until(&mut nodes, |nodes| {
            nodes
                .iter()
                .all(|node| node.completed.len() as u64 == node.requests)
        });
        exchange(&mut nodes, 0, 1);
        exchange(&mut nodes, 1, 0);
        for (from, (model, words, gets)) in models.iter().enumerate() {
            let (node, peer) = (&nodes[from], &nodes[1 - from]);
            assert!(peer.memory.bytes(0, AREA) == *model, "{seed}");
            assert!(
                node.memory.bytes(2 * AREA, AREA - 8) == gets[..AREA - 8],
                "{seed}"
            );
            assert!(
                words.iter().all(|word| node.completed.contains(word)),
                "{seed}"
            );
        }
    }
}
