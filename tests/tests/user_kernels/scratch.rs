//! Temporary memory of launches.

use fusewire::{DType, WindowOptions};
use fusewire_device::{Aborted, Group, In, Machine, Out, Scratch, Session, Team, Window, kernel};

use super::{SHAPES, all, assert_contains, failing, on_both, options, tensor, zeros};

/// Puts the squares of `row` into row `rank` of every rank's window, and copies the rows that
/// arrive to `received`. Then gets this rank's row back from every rank, into `back`. Each block
/// writes its number to `marks` first and reads it last.
#[kernel(signals = 1)]
fn squares(
    s: &mut Session<impl Machine>,
    window: Window<u32>,
    row: In<u32>,
    received: Out<u32>,
    back: Out<u32>,
    marks: Scratch<u8>,
    own: Scratch<u32>,
    gathered: Scratch<u32>,
) -> Result<(), Aborted> {
    let (block, ranks, count) = (s.block(), s.ranks() as usize, row.len());
    let mark = block.index() as usize;
    if block.is_leader() {
        marks.set(mark, mark as u8 + 1);
    }
    let (first, last) = block.slice(count, 1);
    let len = last - first;
    for index in block.elements_of_block(len) {
        own.set(first + index, row.get(first + index).pow(2));
    }
    block.sync();
    let at = s.rank() as usize * count + first;
    for peer in s.peers(Team::World) {
        let target = window.at(peer).slice(at, len);
        target.put(s, block, own.slice(first, len)).raise(s, 0);
    }
    let rows = window.wait_all(s, 0, Team::World)?;
    for row in 0..ranks {
        for index in block.elements_of_block(len) {
            let index = row * count + first + index;
            received.set(index, rows.get(index));
        }
    }
    // Every rank has this rank's row: a get does not wait for puts.
    s.barrier()?;
    for peer in s.peers(Team::World) {
        let ticket = window
            .at(peer)
            .slice(at, len)
            .get(s, gathered.slice(first, len));
        let elements = ticket.wait(s)?;
        for index in block.elements_of_block(len) {
            back.set(
                peer.index() as usize * count + first + index,
                elements.get(index),
            );
        }
        block.sync();
    }
    s.ensure(
        usize::from(marks.get(mark)) == mark + 1,
        1,
        u64::from(marks.get(mark)),
        mark as u64,
    )
}

#[test]
fn puts_and_gets_use_temporary_memory() {
    for shape in SHAPES {
        on_both(shape, |comm| {
            let (rank, ranks, count) = (comm.rank(), comm.size() as usize, 37);
            let options = WindowOptions::default();
            let window = comm.alloc_window(DType::U32, ranks * count, options)?;
            let row: Vec<u32> = (0..count as u32).map(|i| 100 * rank + i).collect();
            let row = tensor(&row)?;
            let (received, back) = (
                zeros(DType::U32, ranks * count)?,
                zeros(DType::U32, ranks * count)?,
            );
            // The second launch finds the values of the first one.
            for _ in 0..2 {
                comm.kernel(Squares {
                    window: (&window).into(),
                    row: (&row).into(),
                    received: (&received).into(),
                    back: (&back).into(),
                    marks: 5,
                    own: count as u64,
                    gathered: count as u64,
                })
                .launch()?;
                let square = |rank: u32| {
                    (0..count as u32)
                        .map(move |i| (100 * rank + i).pow(2))
                        .collect::<Vec<_>>()
                };
                let all: Vec<u32> = (0..ranks as u32).flat_map(square).collect();
                assert_eq!(received.to_vec::<u32>()?, all);
                assert_eq!(back.to_vec::<u32>()?, square(rank).repeat(ranks));
            }
            Ok(())
        });
    }
}

/// Reads element `index` of temporary memory.
#[kernel]
fn read_temporary(
    s: &mut Session<impl Machine>,
    first: Scratch<u8>,
    second: Scratch<u64>,
    index: u64,
) -> Result<(), Aborted> {
    let _ = first.get(0).wrapping_add(second.get(index as usize) as u8);
    s.barrier()
}

#[test]
fn temporary_memory_beyond_the_staging_is_refused() {
    all((2, 1, 1), |comm| {
        let room = comm.options().staging_bytes;
        let arguments = |first, second| ReadTemporary {
            first,
            second,
            index: 0,
        };
        comm.kernel(arguments(16, (room - 16) / 8)).launch()?;
        comm.kernel(arguments(1, 1)).launch()?;
        for (first, second, text) in [
            (room + 1, 1, "argument first: 1048577 elements of 1 bytes"),
            (16, room / 8, "after 16 bytes of other arguments do not fit"),
            (1, u64::MAX / 4, "raise Options::staging_bytes"),
        ] {
            let error = comm.kernel(arguments(first, second)).launch();
            let message = error.expect_err("too long").to_string();
            assert_contains(&message, &[text]);
        }
        Ok(())
    });
}

#[test]
fn an_index_beyond_temporary_memory_is_reported() {
    for message in failing(&options(1, 1), |comm| {
        comm.kernel(ReadTemporary {
            first: 1,
            second: 8,
            index: 8,
        })
        .launch()
    }) {
        assert_contains(&message, &["read_temporary", "second", "element 8 of 8"]);
    }
}
