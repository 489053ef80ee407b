//! Several communicators in use at the same time. They share one store, have separate stores, or
//! use the store that the environment names.

use std::sync::Arc;

use crate::device::tensor;
use fusewire::store::{Store, TcpStore, TcpStoreServer};
use fusewire::{Communicator, DType, ReduceOp, Result, new_comm};

use super::{Grid, groups, warnings};

const GROUP: &str = "several communicators";

/// Stores over which the communicators rendezvous.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Stores {
    One,
    Separate,
    Environment,
}

pub(super) fn run(grid: &mut Grid) -> Result<()> {
    for stores in [Stores::One, Stores::Separate, Stores::Environment] {
        for count in [2, 3] {
            grid.doing = format!("{count} communicators, {stores:?}");
            if stores == Stores::Environment && std::env::var_os("MASTER_ADDR").is_none() {
                grid.tally.unsupported("communicators of the environment");
                continue;
            }
            several(grid, count, stores)?;
        }
    }
    Ok(())
}

fn several(grid: &mut Grid, count: usize, stores: Stores) -> Result<()> {
    let base = grid.comm.clone();
    let mut servers = Vec::new();
    let mut comms = Vec::new();
    for at in 0..count {
        let mut options = base.options().clone();
        options.rank_size = Some((base.rank(), base.size()));
        options.hints.insert("made_up".to_owned(), "1".to_owned());
        options.store = match stores {
            Stores::One => Some(Arc::clone(base.store())),
            Stores::Separate => Some(new_store(&base, &mut servers)?),
            Stores::Environment => None,
        };
        let name = format!("{stores:?}.{count}.{at}");
        let (comm, warned) =
            warnings::of(|| new_comm(base.backend(), base.device(), &name, options));
        let is_warned = warned
            .iter()
            .any(|line| line.contains("unknown hint \"made_up\""));
        grid.check(GROUP, is_warned, "no warning of an unknown hint");
        comms.push(comm?);
    }
    at_once(grid, &comms)?;
    for comm in &comms {
        groups::work_in(grid, comm.clone())?;
        comm.finalize()?;
    }
    base.barrier() // The servers must outlive the communicators of all ranks.
}

/// Creates a store that rank 0 serves.
fn new_store(base: &Communicator, servers: &mut Vec<TcpStoreServer>) -> Result<Arc<dyn Store>> {
    let mut port = Vec::new();
    if base.rank() == 0 {
        let server = TcpStoreServer::bind(("127.0.0.1", 0))?;
        port.push(server.port());
        servers.push(server);
    }
    base.broadcast_object_list(&mut port, 0)?;
    let store = TcpStore::connect("127.0.0.1", port[0], base.options().timeout)?;
    Ok(Arc::new(store))
}

/// Enqueues operations on all communicators in turn, then waits for all of them.
fn at_once(grid: &mut Grid, comms: &[Communicator]) -> Result<()> {
    const COUNT: usize = 1024;
    let size = grid.comm.size() as i32;
    let mut issued = Vec::new();
    for round in 0..6 {
        for (at, comm) in (0..).zip(comms) {
            let tensor = tensor(DType::I32, COUNT)?;
            let value = |rank: i32, i: i32| rank * 1000 + i + round * 7 + at * 31;
            let mine: Vec<i32> = (0..COUNT as i32)
                .map(|i| value(comm.rank() as i32, i))
                .collect();
            tensor.copy_from(&mine)?;
            let work = comm.all_reduce_async(&tensor, ReduceOp::Sum)?;
            let must: Vec<i32> = (0..COUNT as i32)
                .map(|i| (0..size).map(|rank| value(rank, i)).sum())
                .collect();
            issued.push((work, tensor, must));
        }
    }
    for (work, tensor, must) in issued {
        work.wait_blocking()?;
        grid.check(
            GROUP,
            tensor.to_vec::<i32>()? == must,
            "a sum on one of several communicators is wrong",
        );
    }
    Ok(())
}
