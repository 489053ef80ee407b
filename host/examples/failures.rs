//! Provokes failures between ranks and prints the resulting messages.
//!
//! ```console
//! $ cargo run --release --example failures
//! ```

use core::time::Duration;
use std::sync::Arc;

use fusewire::store::{MemoryStore, Store};
use fusewire::{
    Candidate, Communicator, Device, Error, Members, Options, ReconfigureOptions, ReduceOp, Result,
    run_threads,
};

fn options() -> Options {
    Options::new().timeout(Duration::from_millis(500))
}

/// Runs `body` on `ranks` ranks and prints the result of each.
fn show(title: &str, ranks: u32, body: impl Fn(&Communicator) -> Result<()> + Sync) {
    println!("\n## {title}");
    let results = run_threads(ranks, &options(), |comm| {
        comm.barrier()?;
        body(&comm)
    });
    for (rank, result) in results.into_iter().enumerate() {
        match result {
            Ok(()) => println!("rank {rank}: ok"),
            Err(error) => println!("rank {rank}: {error}"),
        }
    }
}

/// Waits without calling a collective until the communicator has failed.
fn absent(comm: &Communicator) -> Result<()> {
    while comm.failure().is_none() {
        std::thread::sleep(Duration::from_millis(1));
    }
    comm.failure().map_or(Ok(()), Err)
}

fn main() {
    show("a different count", 2, |comm| {
        let mut x = vec![1f32; 1000 + comm.rank() as usize];
        comm.all_reduce(&mut x, ReduceOp::Sum)
    });
    show("a different type of the same size", 2, |comm| {
        match comm.rank() {
            0 => comm.all_reduce(&mut [1f32; 16], ReduceOp::Sum),
            _ => comm.all_reduce(&mut [1i32; 16], ReduceOp::Sum),
        }
    });
    show("a different order", 2, |comm| match comm.rank() {
        0 => comm.barrier(),
        _ => comm.broadcast(&mut [0u8; 4], 0),
    });
    show("a rank that does not call", 3, |comm| match comm.rank() {
        2 => absent(comm),
        _ => comm.all_reduce(&mut [1f32; 16], ReduceOp::Sum),
    });
    show("an abort", 2, |comm| match comm.rank() {
        0 => {
            std::thread::sleep(Duration::from_millis(20));
            comm.abort();
            Ok(())
        }
        _ => comm.barrier(),
    });
    if let Err(error) = late_joiner() {
        println!("late joiner: {error}");
    }
}

/// Grows a communicator from two to three ranks. Clones of the old communicator then fail.
fn late_joiner() -> Result<()> {
    println!("\n## a late joiner");
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new());
    let join = |i: u32| -> Result<String> {
        let (store, wait) = (Arc::clone(&store), Duration::from_secs(10));
        let old = if i < 2 {
            let store = Arc::clone(&store);
            Some(Communicator::new(
                Device::Cpu,
                i,
                2,
                store,
                "world",
                options(),
            )?)
        } else {
            None
        };
        let candidate = Candidate::new(Device::Cpu, Arc::clone(&store), "world", options())?;
        let handle = match &old {
            Some(comm) => comm.init_handle()?,
            None => candidate.init_handle(),
        };
        store.set(&format!("handle/{i}"), handle.to_string().as_bytes())?;
        let handles = (0..3)
            .map(|i| String::from_utf8_lossy(&store.get(&format!("handle/{i}"), wait)?).parse())
            .collect::<Result<Vec<_>>>()?;
        let next = ReconfigureOptions::new(1, Members::Set(handles));
        let grown = match &old {
            Some(comm) => comm.reconfigure(&next)?,
            None => candidate.reconfigure(&next)?,
        };
        let mut x = [1u32];
        grown.all_reduce(&mut x, ReduceOp::Sum)?;
        let stale = match old.as_ref().and_then(Communicator::failure) {
            Some(Error::Communicator { name, detail }) => {
                format!("; the old one: \"{name}\": {detail}")
            }
            _ => String::new(),
        };
        Ok(format!(
            "rank {} of {}, sum of ones {}{stale}",
            grown.rank(),
            grown.size(),
            x[0]
        ))
    };
    let lines: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3)
            .map(|i| {
                let join = &join;
                scope.spawn(move || join(i))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join()).collect()
    });
    for line in lines {
        match line {
            Ok(Ok(line)) => println!("{line}"),
            Ok(Err(error)) => println!("{error}"),
            Err(_) => println!("a thread panicked"),
        }
    }
    Ok(())
}
