//! Tests of the server with bytes that no correct client sends: random bytes, and valid requests
//! with a few bytes changed.

use std::fs;
use std::io::Write;
use std::net::TcpStream;

use super::secret::StoreSecret;
use super::session::{ServerState, Session};
use super::wire::{self, Dialect, Query, Writer};
use super::{Store, TcpStoreServer};

/// Random numbers from a seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit as u64) as usize
    }
}

/// Returns a few requests in one of the dialects, or random bytes.
fn conversation(random: &mut Random) -> Vec<u8> {
    let dialect = match random.below(5) {
        0 => {
            return (0..random.below(300))
                .map(|_| random.next() as u8)
                .collect();
        }
        1 => Dialect::Legacy,
        _ => Dialect::Current,
    };
    let mut writer = Writer::to(dialect);
    if dialect == Dialect::Current {
        writer = writer.then(Query::Validate).u32(wire::VALIDATION_MAGIC);
    }
    let keys: [&[u8]; 4] = [b"", b"/k", b"/n", b"init/"];
    for _ in 0..random.below(12) {
        let key = keys[random.below(4)];
        let value = vec![b'7'; random.below(40)];
        writer = match random.below(16) {
            0 => writer.then(Query::Set).vector(key).vector(&value),
            1 => writer.then(Query::Get).vector(b"/k"),
            2 => writer
                .then(Query::Add)
                .vector(b"/n")
                .i64(random.next() as i64),
            3 => writer.then(Query::Check).u64(2).vector(key).vector(b"/n"),
            4 => writer
                .then(Query::Wait)
                .u64(2)
                .vector(key)
                .vector(b"/never"),
            5 => writer
                .then(Query::CompareSet)
                .vector(key)
                .vector(b"")
                .vector(&value),
            6 => writer.then(Query::KeyCount),
            7 => writer.then(Query::DeleteKey).vector(key),
            8 => writer.then(Query::Append).vector(key).vector(&value),
            9 => writer.then(Query::MultiGet).u64(1).vector(b"/k"),
            10 => writer
                .then(Query::MultiSet)
                .u64(1)
                .vector(key)
                .vector(&value),
            11 => writer.then(Query::CancelWait),
            12 => writer.then(Query::ListKeys),
            13 => writer
                .then(Query::Barrier)
                .vector(key)
                .i64(random.below(3) as i64),
            14 => writer.then(Query::QueuePush).vector(key).vector(&value),
            _ => writer.then(Query::QueuePop).vector(key),
        };
    }
    writer.finish()
}

fn mutated(random: &mut Random) -> Vec<u8> {
    let mut bytes = conversation(random);
    for _ in 0..random.below(4) {
        if !bytes.is_empty() {
            let at = random.below(bytes.len());
            match random.below(3) {
                0 => bytes[at] = random.next() as u8,
                1 => drop(bytes.remove(at)),
                _ => bytes.truncate(at),
            }
        }
    }
    bytes
}

#[test]
fn sessions_bear_any_bytes_in_any_pieces() {
    let mut random = Random(0xF05E);
    let (mut closed, mut handled) = (0, 0);
    for round in 0..30_000u64 {
        let mut hub = ServerState::default();
        let secret = (round % 8 == 0).then(|| StoreSecret::new(b"secret").unwrap());
        let guarded = secret.is_some();
        let mut session = Session::new(round, secret);
        let bytes = mutated(&mut random);
        let mut fed = 0;
        while fed < bytes.len() {
            let piece = (1 + random.below(60)).min(bytes.len() - fed);
            session.receive(&bytes[fed..fed + piece]).unwrap();
            fed += piece;
            if session.handle_all(&mut hub).is_err() {
                closed += 1;
                break;
            }
            while let Some(wake) = hub.woken.pop() {
                assert_eq!(wake.token, round);
                session.wake(&mut hub, wake.offer);
            }
            // The buffers grow with the bytes that have arrived, not with the lengths that they
            // claim.
            assert!(session.memory() <= 2 * fed + 4096, "{round}");
        }
        session.leave(&mut hub);
        for wake in core::mem::take(&mut hub.woken) {
            if let Some(key) = wake.offer {
                hub.withdraw(&key);
            }
        }
        assert!(hub.has_no_waits_or_offers(), "{round}");
        assert!(!guarded || hub.requests == 0);
        handled += hub.requests;
    }
    // Fails if too few sessions were closed or too few requests were handled for a useful test.
    assert!(closed > 3_000 && handled > 30_000, "{closed} {handled}");
}

fn resident_bytes() -> usize {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn a_server_bears_any_bytes_and_claims_no_memory_for_them() {
    let server = TcpStoreServer::bind_with("127.0.0.1:0", None).unwrap();
    let connect = || TcpStream::connect(("127.0.0.1", server.port())).unwrap();
    let before = resident_bytes();
    // Each of these 200 clients announces a value of the maximum length, 12.5 GiB in total.
    let claims: Vec<_> = (0..200)
        .map(|_| {
            let mut peer = connect();
            let claim = Writer::default()
                .then(Query::Validate)
                .u32(wire::VALIDATION_MAGIC)
                .then(Query::Set)
                .vector(b"/claim")
                .u64(wire::MAX_VALUE_BYTES)
                .finish();
            peer.write_all(&claim).unwrap();
            peer
        })
        .collect();
    let mut random = Random(0x50C7);
    for _ in 0..400 {
        // The server may close the connection before all bytes are written.
        let _ = connect().write_all(&mutated(&mut random));
    }
    let store = super::TcpStore::connect_with(
        "127.0.0.1",
        server.port(),
        core::time::Duration::from_secs(20),
        super::StoreOptions::default(),
    )
    .unwrap();
    store.set("alive", b"yes").unwrap();
    assert!(store.check(&["alive"]).unwrap());
    assert!(server.traffic().connections >= 600);
    // Other tests of this process also allocate memory, but much less than 1 GiB.
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 1 << 30, "{grown}");
    drop(claims);
}
