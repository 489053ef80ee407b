//! Measures the transport between two processes of this host and compares it with a plain TCP
//! socket: latency of 8-byte writes and bandwidth of 64 MiB writes.
//!
//! ```text
//! cargo run --release -p fusewire-net --example transport
//! ```
//!
//! - `write`: acknowledged writes in sequence.
//! - `rdma`: only if this host has an RDMA device.
//! - `ping-pong`: half the time from a notified write to the peer's notified answer.
//! - plain TCP: the same measurements with `write_all` and `read_exact`; the receiver
//!   acknowledges with one byte.
//!
//! Times are medians of single operations.

use core::error::Error;
use core::time::Duration;
use std::env;
use std::io::{BufRead, BufReader, Read, Write, stdin, stdout};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::Instant;

use fusewire_net::{Memory, Notify, RemoteKey, SharedMemory, Tcp, Transport, Verbs};

type Result<T = ()> = core::result::Result<T, Box<dyn Error>>;

const LARGE: usize = 64 << 20;
const SMALL_ROUNDS: usize = 5_000;
const LARGE_ROUNDS: usize = 20;
const LONG: Duration = Duration::from_secs(30);

fn main() -> Result {
    match env::args().nth(1).as_deref() {
        None => table(),
        Some("plain") => plain_child(),
        Some(kind) => child(kind),
    }
}

fn transport(kind: &str) -> Transport {
    match kind {
        "tcp" => Transport::new(Tcp::local()),
        "rdma" => Transport::new(Verbs::new()),
        _ => Transport::new(SharedMemory),
    }
}

fn memory(kind: &str, bytes: usize) -> fusewire_net::Result<Memory> {
    match kind {
        // This memory is not in a shared segment, so peers access it through a Unix socket.
        "shm, foreign memory" => Memory::register(vec![0; bytes]),
        _ => Memory::allocate(bytes),
    }
}

fn table() -> Result {
    println!("                        8 B write   8 B ping-pong   64 MiB write");
    let show = |name: &str, [write, ping, large]: [Duration; 3]| {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        println!(
            "{name:<20} {:>9.2} us   {:>10.2} us   {:>7.2} GB/s",
            micros(write),
            micros(ping),
            LARGE as f64 / large.as_secs_f64() / 1e9
        );
    };
    show("plain TCP socket", plain()?);
    for kind in ["tcp", "shm", "shm, foreign memory", "rdma"] {
        if transport(kind).supported() {
            show(kind, measure(kind)?);
        }
    }
    Ok(())
}

fn median(rounds: usize, mut round: impl FnMut() -> Result) -> Result<Duration> {
    for _ in 0..rounds / 10 + 1 {
        round()?;
    }
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        let start = Instant::now();
        round()?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[rounds / 2])
}

fn measure(kind: &str) -> Result<[Duration; 3]> {
    let mut process = Command::new(env::current_exe()?)
        .arg(kind)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut lines = BufReader::new(process.stdout.take().ok_or("no output")?).lines();
    let mut line = || {
        lines
            .next()
            .ok_or("the child ended")?
            .map_err(Box::<dyn Error>::from)
    };
    let side = transport(kind);
    let (small, large) = (memory(kind, 8)?, memory(kind, LARGE)?);
    let input = process.stdin.as_mut().ok_or("no input")?;
    writeln!(input, "{}\n{}", side.bind()?, small.remote_key())?;
    side.connect(&line()?.parse()?, LONG)?;
    let small_key: RemoteKey = line()?.parse()?;
    let large_key: RemoteKey = line()?.parse()?;
    let write = |memory: &Memory, key: RemoteKey, notify| -> Result {
        let view = memory.view(..)?;
        Ok(side.write(view, key.whole(), notify, LONG)?.wait()?)
    };
    let alone = median(SMALL_ROUNDS, || write(&small, small_key, Notify::No))?;
    let ping = median(SMALL_ROUNDS, || {
        let view = small.view(..)?;
        let pending = side.write(view, small_key.whole(), Notify::Yes, LONG)?;
        side.wait_for_write(LONG)?;
        Ok(pending.wait()?)
    })?;
    let bulk = median(LARGE_ROUNDS, || write(&large, large_key, Notify::No))?;
    drop(side);
    process.wait()?;
    Ok([alone, ping / 2, bulk])
}

fn child(kind: &str) -> Result {
    let side = transport(kind);
    let (small, large) = (memory(kind, 8)?, memory(kind, LARGE)?);
    println!(
        "{}\n{}\n{}",
        side.bind()?,
        small.remote_key(),
        large.remote_key()
    );
    stdout().flush()?;
    let mut lines = stdin().lines();
    let mut line = || {
        lines
            .next()
            .ok_or("the parent ended")?
            .map_err(Box::<dyn Error>::from)
    };
    side.connect(&line()?.parse()?, LONG)?;
    let key: RemoteKey = line()?.parse()?;
    // Answers until the parent closes the connection.
    while side.wait_for_write(LONG).is_ok() {
        let pending = side.write(small.view(..)?, key.whole(), Notify::Yes, LONG)?;
        if pending.wait().is_err() {
            break;
        }
    }
    Ok(())
}

fn plain() -> Result<[Duration; 3]> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut process = Command::new(env::current_exe()?)
        .arg("plain")
        .stdin(Stdio::piped())
        .spawn()?;
    let input = process.stdin.as_mut().ok_or("no input")?;
    writeln!(input, "{}", listener.local_addr()?)?;
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut round = |bytes: usize, source: &[u8]| -> Result {
        // A length prefix, as in most protocols over TCP.
        stream.write_all(&(bytes as u64).to_le_bytes())?;
        stream.write_all(source)?;
        Ok(stream.read_exact(&mut [0; 1])?)
    };
    let source = vec![1; LARGE];
    let alone = median(SMALL_ROUNDS, || round(0, &[]))?;
    let bulk = median(LARGE_ROUNDS, || round(LARGE, &source))?;
    drop(stream);
    process.wait()?;
    // Plain TCP has no separate ping-pong. `alone` is a full round trip (8 bytes out, 1 byte back),
    // so half of `alone` is compared with the ping-pong time of the transport.
    Ok([alone, alone / 2, bulk])
}

fn plain_child() -> Result {
    let mut address = String::new();
    stdin().read_line(&mut address)?;
    let mut stream = TcpStream::connect(address.trim())?;
    stream.set_nodelay(true)?;
    let mut target = vec![0; LARGE];
    let mut head = [0; 8];
    while stream.read_exact(&mut head).is_ok() {
        let len = usize::try_from(u64::from_le_bytes(head))?;
        stream.read_exact(&mut target[..len])?;
        stream.write_all(&[1])?;
    }
    Ok(())
}
