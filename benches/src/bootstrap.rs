//! Measures the cost of a rendezvous: messages, bytes and seconds through one TCP store. Ranks are
//! threads that map no memory. They claim to be on several hosts.

use core::time::Duration;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use fusewire::store::{TcpStore, TcpStoreServer};
use fusewire::testing::bench_rendezvous;

/// Parameters of the measurement.
#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "64,256,1024,4096")]
    ranks: Vec<u32>,
    /// Ranks per simulated host.
    #[arg(long, value_delimiter = ',', default_value = "8,64")]
    per_host: Vec<u32>,
    /// Repetitions. The table shows the repetition with the median time.
    #[arg(long, default_value_t = 3)]
    repetitions: usize,
}

const TIMEOUT: Duration = Duration::from_secs(120);

/// Stack size of a rank's thread, in bytes.
const STACK: usize = 128 << 10;

/// Measurements of one rendezvous.
struct Row {
    connect: f64,
    rendezvous: f64,
    requests: f64,
    received: f64,
    sent: f64,
}

pub(crate) fn main(arguments: &Arguments) -> anyhow::Result<()> {
    raise_descriptors(arguments.ranks.iter().copied().max().unwrap_or(1))?;
    println!(
        "| ranks | per host | requests per rank | bytes to the store per rank | bytes from it per \
         rank | s to connect | s of rendezvous | rendezvous, \u{b5}s per rank |"
    );
    println!("|---:|---:|---:|---:|---:|---:|---:|---:|");
    for &ranks in &arguments.ranks {
        for &per_host in &arguments.per_host {
            let mut rows = (0..arguments.repetitions.max(1))
                .map(|_| measure(ranks, per_host.max(1)))
                .collect::<anyhow::Result<Vec<_>>>()?;
            rows.sort_by(|a, b| a.rendezvous.total_cmp(&b.rendezvous));
            let row = &rows[rows.len() / 2];
            println!(
                "| {ranks} | {per_host} | {:.2} | {:.0} | {:.0} | {:.3} | {:.3} | {:.1} |",
                row.requests,
                row.received,
                row.sent,
                row.connect,
                row.rendezvous,
                row.rendezvous / f64::from(ranks) * 1e6
            );
        }
    }
    Ok(())
}

fn measure(ranks: u32, per_host: u32) -> anyhow::Result<Row> {
    let server = TcpStoreServer::bind_with("127.0.0.1:0", None)?;
    let port = server.port();
    let start = Arc::new(Barrier::new(ranks as usize + 1));
    let connected = Arc::new(Barrier::new(ranks as usize + 1));
    let counted = Arc::new(Barrier::new(ranks as usize + 1));
    let threads = (0..ranks)
        .map(|rank| {
            let (start, connected, counted) = (
                Arc::clone(&start),
                Arc::clone(&connected),
                Arc::clone(&counted),
            );
            thread::Builder::new()
                .stack_size(STACK)
                .spawn(move || -> fusewire::Result<usize> {
                    start.wait();
                    let store = TcpStore::connect("127.0.0.1", port, TIMEOUT);
                    connected.wait();
                    counted.wait();
                    let host = format!("00000000-0000-0000-0000-{:012}", rank / per_host);
                    bench_rendezvous(&store?, "bench", (rank, ranks), &host, TIMEOUT)
                })
                .context("a thread")
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    start.wait();
    let began = Instant::now();
    connected.wait();
    let connect = began.elapsed().as_secs_f64();
    // The server updates its counters after it sends an answer, so the last updates may be late.
    thread::sleep(Duration::from_millis(20));
    let before = server.traffic();
    counted.wait();
    let began = Instant::now();
    for (rank, thread) in threads.into_iter().enumerate() {
        let Ok(found) = thread.join() else {
            bail!("rank {rank} panicked");
        };
        let first = rank as u32 / per_host * per_host;
        let expected = per_host.min(ranks - first) as usize;
        ensure!(
            found? == expected,
            "rank {rank} found other ranks than those of its host"
        );
    }
    let rendezvous = began.elapsed().as_secs_f64();
    thread::sleep(Duration::from_millis(20));
    let after = server.traffic();
    let each = |count: u64| count as f64 / f64::from(ranks);
    Ok(Row {
        connect,
        rendezvous,
        requests: each(after.requests - before.requests),
        received: each(after.received - before.received),
        sent: each(after.sent - before.sent),
    })
}

/// Raises the limit on open descriptors, because both ends of every connection are in this process.
fn raise_descriptors(ranks: u32) -> anyhow::Result<()> {
    let needed = u64::from(ranks) * 2 + 64;
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `limit` is a local variable, valid for writes.
    ensure!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } == 0);
    if limit.rlim_cur >= needed {
        return Ok(());
    }
    ensure!(
        limit.rlim_max >= needed,
        "{ranks} ranks need {needed} descriptors; the hard limit is {}",
        limit.rlim_max
    );
    limit.rlim_cur = needed;
    // SAFETY: `limit` is a local variable, valid for reads.
    ensure!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } == 0);
    Ok(())
}
