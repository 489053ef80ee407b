//! Requests between meshes of this process, failures, and invalid input.

use core::cell::UnsafeCell;
use core::net::Ipv4Addr;
use core::sync::atomic::AtomicBool;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Mutex;

use super::*;
use crate::Nonce;

/// Bound of all loops. No test needs it.
const LIMIT: Duration = Duration::from_secs(10);

/// Memory of an endpoint. Addresses are offsets of bytes.
struct Memory {
    words: Box<[UnsafeCell<u64>]>,
    /// The first address that peers may access.
    first: AtomicU64,
    is_closed: AtomicBool,
    /// For each notice the sender, the message, and the word at address 0 at the delivery.
    notices: Mutex<Vec<(u64, Vec<u8>, u64)>>,
}

// SAFETY: all meshes of a test and the test itself run on one thread.
unsafe impl Send for Memory {}
// SAFETY: see above.
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

    fn all(&self) -> Vec<u8> {
        self.bytes(0, self.len())
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
        Local {
            address: address as u64,
            start: self.at(address, bytes),
        }
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

/// A mesh with an endpoint.
struct Node {
    mesh: Mesh,
    events: Vec<Event>,
    endpoint: u64,
    memory: Arc<Memory>,
    /// Receiver of the requests: this node, until it is replaced.
    peer: Peer,
    requests: u64,
}

impl Node {
    fn new(bytes: usize) -> Self {
        let mut mesh = Mesh::new(Ipv4Addr::LOCALHOST.into()).unwrap();
        let (endpoint, memory) = open(&mut mesh, bytes);
        let peer = mesh.peer(&mesh.url().clone());
        Self {
            mesh,
            events: Vec::new(),
            endpoint,
            memory,
            peer,
            requests: 0,
        }
    }

    /// Creates a node that sends its requests to `url`.
    fn calling(url: &Url) -> Self {
        let mut node = Self::new(64);
        node.peer = node.mesh.peer(url);
        node
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
        // SAFETY: the ranges of the tests are in `Memory` that the mesh owns until `Mesh::close`.
        unsafe { self.mesh.post(self.peer, request) };
        self.requests
    }

    fn send(&mut self, endpoint: u64, address: usize, operation: Operation) -> u64 {
        self.post(self.endpoint, endpoint, address, operation)
    }

    fn poll(&mut self) -> bool {
        self.mesh.poll(&mut self.events)
    }

    /// Returns the values of the completions of a request.
    fn completed(&self, wanted: u64) -> Vec<Option<u64>> {
        let events = self.events.iter();
        let values = events.filter_map(|event| match event {
            Event::Completed { number, value, .. } => (*number == wanted).then_some(*value),
            _ => None,
        });
        values.collect()
    }

    /// Returns the numbers of the requests that were refused.
    fn refused(&self) -> Vec<u64> {
        let numbers = self.events.iter().filter_map(|event| match event {
            Event::Refused { number, .. } => Some(*number),
            _ => None,
        });
        numbers.collect()
    }

    fn losses(&self) -> Vec<(Peer, &str)> {
        let losses = self.events.iter().filter_map(|event| match event {
            Event::Lost { peer, reason } => Some((*peer, reason.as_str())),
            _ => None,
        });
        losses.collect()
    }
}

fn open(mesh: &mut Mesh, bytes: usize) -> (u64, Arc<Memory>) {
    let memory = Arc::new(Memory {
        words: (0..bytes.div_ceil(8)).map(|_| 0.into()).collect(),
        first: AtomicU64::new(0),
        is_closed: AtomicBool::new(false),
        notices: Mutex::default(),
    });
    let endpoint = mesh.open(|_| Arc::clone(&memory) as Arc<dyn Endpoint>);
    (endpoint.unwrap(), memory)
}

/// Creates two nodes that send their requests to each other.
fn pair(bytes: usize) -> [Node; 2] {
    let (mut a, mut b) = (Node::new(bytes), Node::new(bytes));
    a.peer = a.mesh.peer(b.mesh.url());
    b.peer = b.mesh.peer(a.mesh.url());
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
    let (endpoint, memory) = (nodes[to].endpoint, Arc::clone(&nodes[to].memory));
    let (address, before) = (memory.len() - 8, memory.word(memory.len() - 8));
    let add = nodes[from].send(endpoint, address, Operation::Add(5));
    until(nodes, |nodes| !nodes[from].completed(add).is_empty());
    assert_eq!(nodes[from].completed(add), [Some(before)]);
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
    let (endpoint, target) = (nodes[1].endpoint, Arc::clone(&nodes[1].memory));
    // Puts start at odd addresses, after the word of the signals.
    let (mut at, mut sent) = (9, Vec::new());
    for (number, bytes) in [1, 64, 100 << 10, 5 << 20, 0].into_iter().enumerate() {
        let put = nodes[0].memory.put(at, bytes);
        sent.push(nodes[0].send(endpoint, at, put));
        at += bytes;
        sent.push(nodes[0].send(endpoint, 0, Operation::Signal(number as u64 + 1)));
        until(&mut nodes, |_| target.word(0) == number as u64 + 1);
        assert!(target.bytes(9, at - 9) == data[9..at], "{bytes}");
    }
    for number in sent {
        assert_eq!(nodes[0].completed(number), [None]);
    }
    assert!(target.bytes(at, 100) == [0; 100] && nodes[0].refused().is_empty());
}

#[test]
fn stores_adds_and_swaps_are_executed_in_order() {
    let mut nodes = pair(4096);
    let endpoint = nodes[1].endpoint;
    nodes[1].memory.write(0, &[0xee; 4096]);
    let mut model = vec![0xee; 4096];
    let data = Random(2).bytes(16);
    let words = data.as_chunks::<8>().0;
    let values = [0, 1].map(|at| u64::from_ne_bytes(words[at]));
    for slot in 0..64 {
        // Aligned and unaligned targets.
        let (bytes, at) = (slot % 16 + 1, 32 * slot + [0, 3, 4, 8][slot / 16]);
        nodes[0].send(endpoint, at, Operation::Store { values, bytes });
        model[at..at + bytes].copy_from_slice(&data[..bytes]);
    }
    let requests = [
        (Operation::Swap(1, 2), 0xeeee_eeee_eeee_eeee),
        (
            Operation::Swap(0xeeee_eeee_eeee_eeee, 7),
            0xeeee_eeee_eeee_eeee,
        ),
        (Operation::Add(u64::MAX), 7),
        (Operation::Swap(6, u64::MAX), 6),
        (Operation::Add(3), u64::MAX),
        (Operation::Add(0), 2),
    ];
    let sent = requests.map(|(operation, _)| nodes[0].send(endpoint, 4000, operation));
    let put = nodes[0].memory.put(0, 100);
    nodes[0].memory.write(0, &[5; 100]);
    nodes[0].send(endpoint, 3001, put);
    model[3001..3101].fill(5);
    model[4000..4008].copy_from_slice(&2u64.to_ne_bytes());
    let (get_memory, into) = open(&mut nodes[0].mesh, 4096);
    let get = nodes[0].post(get_memory, endpoint, 0, into.get(0, 4096));
    until(&mut nodes, |nodes| nodes[0].completed(get) == [None]);
    for (number, (operation, value)) in sent.into_iter().zip(requests) {
        assert_eq!(nodes[0].completed(number), [Some(value)], "{operation:?}");
    }
    assert!(into.all() == model && nodes[1].memory.all() == model);
}

#[test]
fn more_answers_than_the_limit_arrive() {
    const GETS: usize = 10_000;
    let mut nodes = pair(GETS * 1024);
    let data = Random(3).bytes(GETS * 1024);
    nodes[1].memory.write(0, &data);
    let endpoint = nodes[1].endpoint;
    // At first the requests wait for the connection, then for the socket.
    for bytes in [8, 1024] {
        nodes[0].events.clear();
        for at in (0..GETS).map(|get| 1024 * get) {
            let get = nodes[0].memory.get(at, bytes);
            nodes[0].send(endpoint, at, get);
        }
        // The receiver of the answers does not poll while the other side can make progress.
        let start = Instant::now();
        until(&mut nodes, |nodes| {
            while nodes[1].poll() && start.elapsed() < LIMIT {}
            nodes[0].events.len() == GETS
        });
        for at in (0..GETS).map(|get| 1024 * get) {
            assert!(nodes[0].memory.bytes(at, bytes) == data[at..at + bytes]);
        }
    }
    assert!(nodes[0].refused().is_empty());
}

#[test]
fn a_get_does_not_return_the_data_of_a_later_put() {
    let mut nodes = pair(64);
    exchange(&mut nodes, 0, 1);
    nodes[0].memory.write(0, &[9; 8]);
    let (endpoint, put) = (nodes[1].endpoint, nodes[0].memory.put(0, 8));
    let get = nodes[0].memory.get(16, 8);
    let get = nodes[0].send(endpoint, 0, get);
    nodes[0].send(endpoint, 0, put);
    until(&mut nodes, |nodes| nodes[0].completed(get) == [None]);
    exchange(&mut nodes, 0, 1);
    assert_eq!(nodes[1].memory.bytes(0, 8), [9; 8]);
    assert_eq!(nodes[0].memory.bytes(16, 8), [0; 8]);
}

#[test]
fn a_mesh_has_several_endpoints_and_is_its_own_peer() {
    let mut nodes = [Node::new(64)];
    let (other, memory) = open(&mut nodes[0].mesh, 64);
    nodes[0].memory.write(0, &[3; 5]);
    let put = nodes[0].memory.put(0, 5);
    nodes[0].send(other, 8, put);
    let own = nodes[0].endpoint;
    let get = nodes[0].post(other, own, 1, memory.get(32, 4));
    exchange(&mut nodes, 0, 0);
    assert_eq!(nodes[0].completed(get), [None]);
    assert_eq!(
        memory.bytes(0, 16),
        [[0; 8], [3, 3, 3, 3, 3, 0, 0, 0]].concat()
    );
    assert_eq!(memory.bytes(32, 5), [3, 3, 3, 3, 0]);
    assert_eq!(nodes[0].memory.bytes(0, 8), [3, 3, 3, 3, 3, 0, 0, 0]);
    assert!(nodes[0].mesh.is_connected(nodes[0].peer) && nodes[0].mesh.is_flushed());
}

#[test]
fn requests_outside_the_memory_are_refused() {
    let mut nodes = pair(64);
    let endpoint = nodes[1].endpoint;
    let data = Random(4).bytes(48);
    nodes[0].memory.write(0, &[1; 64]);
    nodes[1].memory.write(0, &data);
    let (put, get) = (nodes[0].memory.put(0, 8), nodes[0].memory.get(0, 8));
    let values = [u64::MAX; 2];
    let bad = [
        (57, put),
        (usize::MAX, put),
        (50, Operation::Store { values, bytes: 15 }),
        (4, Operation::Signal(1)),
        (64, Operation::Signal(1)),
        (60, get),
        (usize::MAX - 7, get),
        (12, Operation::Add(1)),
        (9, Operation::Swap(0, 1)),
    ];
    let mut refused = Vec::new();
    let (reader, into) = open(&mut nodes[0].mesh, 64);
    for (at, (address, operation)) in bad.into_iter().enumerate() {
        refused.push(nodes[0].send(endpoint, address, operation));
        nodes[0].post(reader, endpoint, at, into.get(at, 1));
    }
    exchange(&mut nodes, 0, 1);
    assert_eq!(nodes[0].refused(), refused);
    assert_eq!(into.bytes(0, bad.len()), data[..bad.len()]);
    assert_eq!(nodes[1].memory.bytes(0, 48), data);
    assert_eq!(nodes[0].memory.all(), [1; 64]);
    assert!(nodes[0].losses().is_empty());
}

#[test]
fn close_ends_transfers_and_keeps_the_connection() {
    const BYTES: usize = 50 << 20;
    for (is_put, is_source) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut nodes = pair(64);
        let (x, at_x) = open(&mut nodes[0].mesh, BYTES);
        let (y, at_y) = open(&mut nodes[1].mesh, BYTES);
        let operation = match is_put {
            true => at_x.put(0, BYTES),
            false => at_x.get(0, BYTES),
        };
        let (source, target) = if is_put { (at_x, at_y) } else { (at_y, at_x) };
        source.write(0, &vec![7; BYTES]);
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
            // The memory is unmapped, so an access fails.
            source.write(0, &vec![9; BYTES]);
            assert_eq!(Arc::strong_count(&source), 1);
            drop(source);
        } else {
            target.write(0, &vec![9; BYTES]);
        }
        exchange(&mut nodes, 0, 1);
        exchange(&mut nodes, 1, 0);
        let bytes = target.all();
        match is_source {
            true => {
                assert!(bytes.iter().all(|byte| [0, 7].contains(byte)) && bytes[BYTES - 1] == 0)
            }
            false => assert!(bytes.iter().all(|byte| *byte == 9)),
        }
        // The signal was not sent before the close, if the put was not.
        let is_dropped = is_put && closes_x;
        assert_eq!(nodes[1].memory.word(0), u64::from(!is_dropped));
        let notices = nodes[1].memory.notices.lock().unwrap();
        assert_eq!(*notices, [(x, b"left".to_vec(), u64::from(!is_dropped))]);
        assert!(nodes[0].refused().is_empty() && nodes[0].losses().is_empty());
    }
}

#[test]
fn forget_ends_the_accesses_to_one_range() {
    const BYTES: usize = 32 << 20;
    let mut nodes = pair(BYTES);
    let (endpoint, target) = (nodes[1].endpoint, Arc::clone(&nodes[1].memory));
    nodes[0].memory.write(0, &vec![7; BYTES]);
    let puts = [BYTES / 2, 1024].map(|bytes| nodes[0].memory.put(0, bytes));
    nodes[0].send(endpoint, 0, puts[0]);
    nodes[0].send(endpoint, BYTES / 2, puts[1]);
    until(&mut nodes, |_| target.word(1 << 20) != 0);
    assert_eq!(target.word(BYTES / 2 - 8), 0);
    target.first.store(BYTES as u64 / 2, Ordering::Relaxed);
    nodes[1]
        .mesh
        .forget(endpoint, &|address| address < BYTES as u64 / 2);
    target.write(0, &vec![9; BYTES / 2]);
    let refused = nodes[0].send(endpoint, 0, puts[1]);
    exchange(&mut nodes, 0, 1);
    assert!(target.bytes(0, BYTES / 2).iter().all(|byte| *byte == 9));
    assert_eq!(
        target.bytes(BYTES / 2, 1032),
        [vec![7; 1024], vec![0; 8]].concat()
    );
    assert_eq!(nodes[0].refused(), [refused]);
}

#[test]
fn requests_to_a_closed_endpoint_have_no_effect() {
    for is_open in [true, false] {
        let mut nodes = pair(64);
        let (endpoint, memory) = open(&mut nodes[1].mesh, 64);
        match is_open {
            true => memory.is_closed.store(true, Ordering::Relaxed),
            false => nodes[1].mesh.close(endpoint),
        }
        nodes[0].memory.write(0, &[1; 64]);
        let (put, get) = (nodes[0].memory.put(0, 8), nodes[0].memory.get(0, 8));
        let values = [1; 2];
        for operation in [
            put,
            Operation::Store { values, bytes: 9 },
            Operation::Signal(1),
        ] {
            // The second address is not in the memory.
            for address in [0, 64] {
                nodes[0].send(endpoint, address, operation);
            }
        }
        let answered = [get, Operation::Add(1), Operation::Swap(0, 1)];
        let refused = answered.map(|operation| nodes[0].send(endpoint, 0, operation));
        exchange(&mut nodes, 0, 1);
        assert_eq!(nodes[0].refused(), refused);
        assert_eq!(
            (memory.all(), nodes[0].memory.all()),
            (vec![0; 64], vec![1; 64])
        );
    }
}

#[test]
fn notices_are_delivered_after_the_earlier_requests() {
    let mut nodes = pair(64);
    let (peer, sender, endpoint) = (nodes[0].peer, nodes[0].endpoint, nodes[1].endpoint);
    let mut expected = Vec::new();
    for (number, bytes) in [0, 1, MAX_NOTICE, 0, 100].into_iter().enumerate() {
        let message = Random(number as u64 + 1).bytes(bytes);
        nodes[0].send(endpoint, 0, Operation::Signal(number as u64));
        nodes[0].mesh.notify(peer, sender, endpoint, &message);
        expected.push((sender, message, number as u64));
    }
    exchange(&mut nodes, 0, 1);
    assert_eq!(*nodes[1].memory.notices.lock().unwrap(), expected);
}
