//! Object collectives, which transfer serialized Rust values.

use fusewire::Result;
use serde::{Deserialize, Serialize};

use super::Grid;

const GROUP: &str = "objects";

/// An object with several fields, whose size differs by rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct TestObject {
    rank: u32,
    names: Vec<String>,
    scale: Option<f64>,
}

fn test_object(rank: u32) -> TestObject {
    TestObject {
        rank,
        names: (0..rank * 7).map(|i| format!("name {i} \u{df}")).collect(),
        scale: rank.is_multiple_of(2).then_some(-0.5),
    }
}

pub(super) fn run(grid: &mut Grid) -> Result<()> {
    grid.doing = "objects".to_owned();
    let comm = grid.comm.clone();
    let (rank, size) = (comm.rank(), comm.size());
    let all: Vec<TestObject> = comm.ranks().map(test_object).collect();
    grid.check(
        GROUP,
        comm.all_gather_object(&test_object(rank))? == all,
        "all_gather_object",
    );
    for root in 0..size.min(3) {
        let at_root = rank == root;
        let gathered = comm.gather_object(&test_object(rank), root)?;
        grid.check(
            GROUP,
            gathered == at_root.then(|| all.clone()),
            "gather_object",
        );
        let mut list = if at_root { all.clone() } else { Vec::new() };
        let sent = list.clone();
        comm.broadcast_object_list(&mut list, root)?;
        grid.check(GROUP, list == all, "broadcast_object_list");
        let mine = comm.scatter_object_list(&sent, root)?;
        grid.check(GROUP, mine == test_object(rank), "scatter_object_list");
    }
    if size > 1 {
        let (next, before) = grid.adjacent_ranks();
        let mine = [test_object(rank), test_object(rank + 1)];
        let got = if rank.is_multiple_of(2) {
            comm.send_object_list(&mine, next)?;
            comm.recv_object_list::<TestObject>(before)?
        } else {
            let got = comm.recv_object_list::<TestObject>(before)?;
            comm.send_object_list(&mine, next)?;
            got
        };
        grid.check(
            GROUP,
            got == [test_object(before), test_object(before + 1)],
            "send_object_list",
        );
    }
    Ok(())
}
