//! Tests of RDMA between two devices, whose network the tests disturb. They run in the virtual
//! machine of `.ci/rdma-vm`, which sets `FUSEWIRE_TEST_RDMA=rxe0:eth0,rxe1:eth1`.

use core::time::Duration;
use std::net::TcpStream;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Instant;

use super::processes::{BYTES, Peer};
use super::strangers::challenge;
use super::*;
use crate::verbs::QueueAddress;
use crate::wire::{Hello, Welcome};
use crate::{Nonce, Notify};

/// Two devices, each with the name of its network interface. Tests that disturb the network hold
/// the lock.
struct Network {
    devices: [(String, String); 2],
    _lock: MutexGuard<'static, ()>,
}

impl Network {
    /// Returns the network of the virtual machine, or `None` outside it.
    fn open() -> Option<Self> {
        static LOCK: Mutex<()> = Mutex::new(());
        let Ok(names) = env::var("FUSEWIRE_TEST_RDMA") else {
            eprintln!("skipped: FUSEWIRE_TEST_RDMA names no two RDMA devices; see .ci/rdma-vm");
            return None;
        };
        let mut devices = names.split(',').map(|pair| {
            let (device, interface) = pair.split_once(':').unwrap();
            (device.to_owned(), interface.to_owned())
        });
        Some(Self {
            devices: [devices.next().unwrap(), devices.next().unwrap()],
            _lock: LOCK.lock().unwrap_or_else(PoisonError::into_inner),
        })
    }

    fn transports(&self) -> [Transport; 2] {
        self.devices
            .each_ref()
            .map(|(device, _)| Transport::new(Verbs::new().device(device)))
    }

    fn pair(&self) -> [Transport; 2] {
        let transports = self.transports();
        join(&transports[0], &transports[1]);
        transports
    }

    /// Applies a rule of netem to the packets that both devices send, until the result is dropped.
    fn disturb(&self, rule: &str) -> Disturbance<'_> {
        for (_, interface) in &self.devices {
            tc(&format!("qdisc replace dev {interface} root netem {rule}"));
        }
        Disturbance(self)
    }
}

struct Disturbance<'a>(&'a Network);

impl Disturbance<'_> {
    /// Returns the number of packets that the rule has dropped so far.
    fn dropped(&self) -> u64 {
        let count = |interface: &String| {
            let text = tc(&format!("-s qdisc show dev {interface}"));
            let (_, rest) = text.split_once("(dropped ").unwrap();
            let (count, _) = rest.split_once(',').unwrap();
            count.parse::<u64>().unwrap()
        };
        self.0
            .devices
            .iter()
            .map(|(_, interface)| count(interface))
            .sum()
    }
}

impl Drop for Disturbance<'_> {
    fn drop(&mut self) {
        for (_, interface) in &self.0.devices {
            tc(&format!("qdisc del dev {interface} root"));
        }
    }
}

fn tc(arguments: &str) -> String {
    let output = Command::new("tc")
        .args(arguments.split(' '))
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "tc {arguments}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// Writes, notifies and reads at random positions in both directions, and compares all bits.
fn exchange(network: &Network, rounds: u64) {
    const SIZE: usize = 1 << 20;
    let sides = network.pair();
    thread::scope(|scope| {
        for (from, to) in [(0, 1), (1, 0)] {
            let (from, to) = (&sides[from], &sides[to]);
            scope.spawn(move || {
                let target = Memory::register(vec![0; SIZE]).unwrap();
                let mut expected = vec![0; SIZE];
                let back = Memory::register(vec![0; SIZE]).unwrap();
                for round in 0..rounds {
                    let sizes = [1, 64, 65, 4_095, 4_097, 70_000, 300_000];
                    let size = sizes[round as usize % sizes.len()];
                    let at = (round as usize * 37_021) % (SIZE - size);
                    let bytes = pattern(size, round + 1);
                    expected[at..at + size].copy_from_slice(&bytes);
                    let source = Memory::register(bytes).unwrap();
                    let remote = target.remote_key().range(at as u64, size as u64);
                    let view = source.view(..).unwrap();
                    let write = from.write(view, remote, Notify::Yes, LONG).unwrap();
                    let whole = target.remote_key().whole();
                    let read = from.read(back.view_mut(..).unwrap(), whole, LONG).unwrap();
                    to.wait_for_write(LONG).unwrap();
                    assert!(contents(&target) == expected, "round {round}");
                    write.wait().unwrap();
                    read.wait().unwrap();
                    assert!(contents(&back) == expected, "round {round}");
                }
            });
        }
    });
}

#[test]
fn lost_late_and_reordered_packets_change_no_bits() {
    let Some(network) = Network::open() else {
        return;
    };
    exchange(&network, 21);
    let rules = [
        "loss 1%",
        "delay 2ms reorder 98%",
        "loss 0.5% delay 1ms duplicate 1%",
    ];
    for rule in rules {
        let disturbance = network.disturb(rule);
        exchange(&network, 14);
        assert!(
            !rule.contains("loss") || disturbance.dropped() > 0,
            "{rule}"
        );
    }
}

#[test]
fn a_cut_cable_breaks_the_connection_in_time() {
    let Some(network) = Network::open() else {
        return;
    };
    for has_operation in [true, false] {
        let [a, b] = network.pair();
        let target = Memory::register(vec![0; 100_000]).unwrap();
        let source = Memory::register(vec![1; 100_000]).unwrap();
        let write = |timeout| {
            let view = source.view(..).unwrap();
            let write = a.write(view, target.remote_key().whole(), Notify::No, timeout);
            write.unwrap().wait()
        };
        write(LONG).unwrap();
        let cable = network.disturb("loss 100%");
        let start = Instant::now();
        if has_operation {
            assert_eq!(failure(write(LONG)), TransportFailure::Broken);
        } else {
            assert_eq!(failure(a.wait_for_write(LONG)), TransportFailure::Broken);
        }
        assert!(start.elapsed() < Duration::from_secs(20));
        assert_eq!(failure(b.wait_for_write(LONG)), TransportFailure::Broken);
        drop(cable);
        // Both sides are usable again.
        join(&a, &b);
        write(LONG).unwrap();
    }
}

#[test]
fn a_write_that_timed_out_on_a_cut_cable_does_not_land_later() {
    let Some(network) = Network::open() else {
        return;
    };
    let [a, _b] = network.pair();
    let target = Memory::register(vec![0; 100_000]).unwrap();
    let source = Memory::register(vec![1; 100_000]).unwrap();
    let write = |len: usize, timeout| {
        let view = source.view(..len).unwrap();
        let remote = target.remote_key().range(0, len as u64);
        a.write(view, remote, Notify::No, timeout).unwrap().wait()
    };
    write(8, LONG).unwrap();
    let cable = network.disturb("loss 100%");
    let start = Instant::now();
    let result = write(100_000, Duration::from_millis(100));
    assert_eq!(failure(result), TransportFailure::Timeout);
    assert!(start.elapsed() < soon());
    drop(cable);
    thread::sleep(Duration::from_millis(500));
    assert_eq!(contents(&target)[8..], [0; 99_992]);
}

#[test]
fn more_notifications_than_the_receive_queue_holds_wait_for_the_receiver() {
    if !kinds().contains(&Kind::Verbs) {
        return;
    }
    let side = transport(Kind::Verbs);
    let mut peer = Peer::join(Kind::Verbs, &side);
    let source = Memory::register(vec![0; BYTES]).unwrap();
    let write = |timeout| {
        let view = source.view(..8).unwrap();
        side.write(view, peer.keys[1].range(0, 8), Notify::Yes, timeout)
            .unwrap()
    };
    write(LONG).wait().unwrap();
    peer.signal(libc::SIGSTOP);
    let pending: Vec<_> = (0..600).map(|_| write(LONG)).collect();
    pending[0].wait().unwrap();
    assert!(!pending[599].is_done());
    peer.signal(libc::SIGCONT);
    for write in pending {
        write.wait().unwrap();
    }
    for _ in 0..601 {
        assert_eq!(peer.ask("wait"), "true");
    }
}

#[test]
fn a_suspended_peer_that_knows_dropped_memory_loses_its_connection() {
    if !kinds().contains(&Kind::Verbs) {
        return;
    }
    let side = transport(Kind::Verbs);
    let mut peer = Peer::join(Kind::Verbs, &side);
    let memory = Memory::register(vec![0; BYTES / 2]).unwrap();
    let command = format!("write {}", memory.remote_key());
    assert_eq!(peer.ask(&command), "true");
    side.wait_for_write(LONG).unwrap();
    peer.signal(libc::SIGSTOP);
    let start = Instant::now();
    drop(memory);
    let time = start.elapsed();
    assert!(time >= Duration::from_millis(900), "{time:?}");
    // The connection is destroyed, because the peer could still have posted requests.
    let error = side.wait_for_write(LONG).unwrap_err().to_string();
    assert!(error.contains("did not confirm"), "{error}");
    peer.signal(libc::SIGCONT);
    assert_eq!(peer.ask(&command), "false");
}

#[test]
fn retransmitted_writes_to_dropped_memory_do_not_land() {
    const SIZE: usize = 100_000;
    let Some(network) = Network::open() else {
        return;
    };
    let [a, b] = network.pair();
    let mut buffer = vec![0_u8; SIZE];
    // SAFETY: the buffer outlives the memory, and is accessed only after the memory was dropped.
    let target = unsafe { Memory::register_raw(buffer.as_mut_ptr(), SIZE) }.unwrap();
    let source = Memory::register(vec![1; SIZE]).unwrap();
    let key = target.remote_key();
    let write = |len: usize| {
        let view = source.view(..len).unwrap();
        a.write(view, key.range(0, len as u64), Notify::No, LONG)
            .unwrap()
    };
    write(8).wait().unwrap();
    let cable = network.disturb("loss 100%");
    let pending = write(SIZE);
    drop(target);
    drop(cable);
    // The device of `a` sends the packets again until `a` notices that `b` has ended the link.
    assert_eq!(failure(pending.wait()), TransportFailure::Broken);
    let error = b.wait_for_write(LONG).unwrap_err().to_string();
    assert!(error.contains("did not confirm"), "{error}");
    assert!(buffer[..8] == [1; 8] && buffer[8..].iter().all(|byte| *byte == 0));
}

#[test]
fn memory_that_cannot_be_registered_breaks_the_link() {
    if !kinds().contains(&Kind::Verbs) {
        return;
    }
    let (a, b) = pair(Kind::Verbs);
    let target = Memory::allocate(8_192).unwrap();
    // SAFETY: `mmap` creates a new mapping, which stays mapped. The device cannot register pages
    // without access, and the transport does not touch them.
    let pages = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        libc::mmap(core::ptr::null_mut(), 8_192, libc::PROT_NONE, flags, -1, 0)
    };
    // SAFETY: no operation reads the bytes, because their registration fails.
    let source = unsafe { Memory::register_raw(pages.cast(), 8_192) }.unwrap();
    let remote = target.remote_key();
    let write = a.write(source.view(..).unwrap(), remote.whole(), Notify::No, LONG);
    // The signal must not overtake the bytes that were not written.
    let signal = a.store(1, remote.range(0, 8), LONG);
    let error = write.unwrap().wait().unwrap_err().to_string();
    assert!(error.contains("ibv_reg_mr"), "{error}");
    assert_eq!(failure(signal.unwrap().wait()), TransportFailure::Broken);
    assert_eq!(failure(b.wait_for_write(LONG)), TransportFailure::Broken);
    assert_eq!(contents(&target), [0; 8_192]);
}

#[test]
fn peers_with_impossible_queue_pairs_are_rejected() {
    use std::io::{Read, Write};

    if !kinds().contains(&Kind::Verbs) {
        return;
    }
    let ports = crate::verbs_ports().unwrap();
    let plain = QueueAddress {
        gid: ports[0].gid(None).unwrap().bytes,
        number: 17,
        sequence: 0,
        lid: 0,
        mtu: 5,
        reads: 1,
    };
    // The first address is possible: the negative control.
    let addresses = [
        Some(plain),
        None,
        Some(QueueAddress {
            number: 1 << 24,
            ..plain
        }),
        Some(QueueAddress {
            sequence: u32::MAX,
            ..plain
        }),
        Some(QueueAddress { mtu: 0, ..plain }),
        Some(QueueAddress { mtu: 9, ..plain }),
        Some(QueueAddress { lid: 3, ..plain }),
    ];
    for queue in addresses {
        let a = transport(Kind::Verbs);
        let url = a.bind().unwrap();
        let mut stream = TcpStream::connect(url.address()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        let hello = Hello {
            from: Nonce::random().unwrap().peer_id(),
            challenge: [0; 16],
            queue,
        };
        let challenge = challenge(&mut stream);
        let bytes = hello.to_bytes(url.nonce(), &challenge);
        stream.write_all(&bytes).unwrap();
        let mut welcome = [0; Welcome::BYTES];
        let is_welcome = stream.read_exact(&mut welcome).is_ok();
        assert_eq!(is_welcome, queue == Some(plain), "{queue:?}");
        drop(stream);
        assert_eq!(failure(a.wait_for_write(LONG)), TransportFailure::Broken);
    }
}

#[test]
fn a_device_that_does_not_exist_is_named_with_those_that_do() {
    let provider = Verbs::new().device("mlx9_7").port(2).gid_index(3);
    let transport = Transport::new(provider);
    assert!(!transport.supported());
    let message = transport.bind().unwrap_err().to_string();
    let names_device = message
        .contains("mlx9_7, port 2, GID index 3: the system refused: no active")
        && message.contains("this host has ");
    assert!(
        names_device || message.contains("install libibverbs1"),
        "{message}"
    );
}
