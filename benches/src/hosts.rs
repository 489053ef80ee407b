//! Compares puts and signals between emulated hosts, which kernels send through the proxy, with the
//! same bytes on a bare TCP connection. Both use the loopback interface and two threads that poll.
//! The two alternate round by round.

use core::fmt::Write as _;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Args;
use fusewire::{Communicator, DType, Options, WindowOptions, run_threads};
use fusewire_device::{Aborted, Machine, Session, Window, kernel};

use crate::machine;

#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// Rounds of each measurement.
    #[arg(long, default_value_t = 21)]
    rounds: usize,
    /// Appends the table to this file.
    #[arg(long)]
    out: Option<PathBuf>,
}

/// One measurement: exchanges in which `there` bytes go to the peer and `back` bytes return.
#[derive(Clone, Copy, Debug)]
struct Exchange {
    name: &'static str,
    there: usize,
    back: usize,
    /// Exchanges in a round.
    count: u32,
}

const MEASURED: [Exchange; 4] = [
    Exchange {
        name: "8 B there and back",
        there: 8,
        back: 8,
        count: 2_000,
    },
    Exchange {
        name: "4 KiB there and back",
        there: 4 << 10,
        back: 4 << 10,
        count: 2_000,
    },
    Exchange {
        name: "1 MiB there, 8 B back",
        there: 1 << 20,
        back: 8,
        count: 40,
    },
    Exchange {
        name: "64 MiB there, 8 B back",
        there: 64 << 20,
        back: 8,
        count: 1,
    },
];

/// Exchanges `count` times with the other of two ranks: `there` elements of rank 0, then `back`
/// elements of rank 1. A signal follows each.
#[kernel(signals = 1)]
fn exchanges(
    s: &mut Session<impl Machine>,
    window: Window<u64>,
    there: u64,
    back: u64,
    count: u32,
) -> Result<(), Aborted> {
    let Some(peer) = s.peer(1 - s.rank()) else {
        return Ok(());
    };
    let is_first = s.rank() == 0;
    let own = window.local(s)?;
    let source = own.slice(0, if is_first { there } else { back } as usize);
    for _ in 0..count {
        if is_first {
            window.at(peer).put(s, s.block(), source).raise(s, 0);
        }
        window.wait(s, 0, peer)?;
        if !is_first {
            window.at(peer).put(s, s.block(), source).raise(s, 0);
        }
    }
    Ok(())
}

/// Sends and receives `bytes` bytes without sleeping.
fn send(stream: &mut TcpStream, mut bytes: &[u8]) -> Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(sent) => bytes = &bytes[sent..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => core::hint::spin_loop(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn receive(stream: &mut TcpStream, mut bytes: &mut [u8]) -> Result<()> {
    while !bytes.is_empty() {
        match stream.read(bytes) {
            Ok(count) => bytes = &mut bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => core::hint::spin_loop(),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Returns the time of an exchange on a bare connection, in microseconds.
fn bare(exchange: Exchange) -> Result<f64> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let mut first = TcpStream::connect(listener.local_addr()?)?;
    let (mut second, _) = listener.accept()?;
    for stream in [&first, &second] {
        stream.set_nodelay(true)?;
        stream.set_nonblocking(true)?;
    }
    let (there, back) = (vec![1u8; exchange.there], vec![1u8; exchange.back]);
    let (mut at_second, mut at_first) = (vec![0u8; exchange.there], vec![0u8; exchange.back]);
    thread::scope(|scope| {
        let peer = scope.spawn(move || -> Result<()> {
            // One exchange before the measured ones.
            for _ in 0..=exchange.count {
                receive(&mut second, &mut at_second)?;
                send(&mut second, &back)?;
            }
            Ok(())
        });
        let mut start = Instant::now();
        for number in 0..=exchange.count {
            if number == 1 {
                start = Instant::now();
            }
            send(&mut first, &there)?;
            receive(&mut first, &mut at_first)?;
        }
        let time = start.elapsed().as_secs_f64() * 1e6 / f64::from(exchange.count);
        peer.join().expect("the peer does not panic")?;
        Ok(time)
    })
}

/// Returns the times of an exchange by kernels, in microseconds.
fn by_kernels(comm: &Communicator, exchange: Exchange) -> fusewire::Result<f64> {
    let elements = exchange.there.max(exchange.back) / 8;
    let window = comm.alloc_window(DType::U64, elements, WindowOptions::default())?;
    let run = |count| {
        comm.kernel(Exchanges {
            window: (&window).into(),
            there: exchange.there as u64 / 8,
            back: exchange.back as u64 / 8,
            count,
        })
        .launch()
    };
    run(1)?;
    comm.barrier()?;
    let start = Instant::now();
    run(exchange.count)?;
    let time = start.elapsed().as_secs_f64() * 1e6 / f64::from(exchange.count);
    comm.barrier()?;
    window.free()?;
    Ok(time)
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

pub(crate) fn main(arguments: &Arguments) -> Result<()> {
    let mut options = Options::default();
    options.testing.ranks_per_host = Some(1);
    let mut table = format!(
        "{}, {}\n\n| exchange | bare TCP, us | kernels, us | ratio | difference, us |\n\
         |---|---|---|---|---|\n",
        machine::processor(),
        machine::kernel()
    );
    for exchange in MEASURED {
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..arguments.rounds {
            times[0].push(bare(exchange)?);
            let of_ranks = run_threads(2, &options, |comm| {
                let time = by_kernels(&comm, exchange)?;
                comm.finalize()?;
                Ok(time)
            });
            let of_ranks: fusewire::Result<Vec<f64>> = of_ranks.into_iter().collect();
            times[1].push(of_ranks?[0]);
        }
        let [bare, kernels] = times.map(|mut times| median(&mut times));
        writeln!(
            table,
            "| {} | {bare:.2} | {kernels:.2} | {:.2} | {:.2} |",
            exchange.name,
            kernels / bare,
            kernels - bare
        )?;
    }
    print!("{table}");
    if let Some(path) = &arguments.out {
        let mut file = fs::OpenOptions::new().create(true).append(true).open(path);
        let file = file.as_mut().ok().context("the file cannot be written")?;
        file.write_all(table.as_bytes())?;
    }
    Ok(())
}
