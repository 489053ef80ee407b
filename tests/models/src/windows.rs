//! Kernels with windows, queues and the barrier of all blocks, and the agent of a network.

use fusewire_device::args::RawBuffer;
use fusewire_device::comm::WindowAddr;
use fusewire_device::layout::LaunchHeader;
use fusewire_device::mem::{self, Order, Scope};
use fusewire_device::net::{Action, Request, Requests, STAGING, SignalOp};
use fusewire_device::packet::Slots;
use fusewire_device::window::Compare;
use fusewire_device::{
    Aborted, Block, In, Machine, Queue, Rank, Session, Team, Unvoted, Window, kernel,
};

use crate::input::number;
use crate::memory_image::MemoryImage;

/// A kernel with a window. After a launch, the window of every rank contains the inputs of all
/// ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kernel {
    /// Signals and waits that count by themselves; entry by a barrier of the window.
    Rows,
    /// Two blocks add different values to one signal, and one block waits for the sum.
    Adders,
    /// One block sets a signal while the other adds to it.
    AddBesideSet,
    /// Signals without the barrier: a rank may overwrite what its peer has not read.
    NoBarrier,
    /// Rank 0 writes its row to rank 1, which waits for it. Rank 1 writes nothing. One launch.
    OneWay,
    /// Rank 0 sends its row to rank 1 in packets. Rank 1 sends nothing. One launch.
    OneWayPackets,
    /// Rank 0 sends batches through a queue to rank 1, as many as the count. One launch.
    Stream,
    /// Both ranks send a batch to each other through a queue. Its number of rows changes from
    /// launch to launch.
    Exchange,
    /// Every block writes words of this rank, and reads those of all blocks after a barrier of all
    /// blocks, twice.
    Grid,
    /// Every block writes words of this rank, and the last one to arrive reads those of all, twice.
    Last,
    /// Every block sends a word to every other block, and receives one from each.
    BlockWords,
    /// Does what [`Kernel::BlockWords`] does twice with the same words, which is wrong.
    BlockWordsTwice,
    /// Block 0 writes a word of this rank and counts, and the other blocks read the word after a
    /// wait for the counter.
    Counted,
    /// Both ranks add to a cell of rank 0. The second one reads what the first one wrote before.
    /// One launch.
    FetchAdd,
    /// Both ranks claim a cell of rank 0. The second one reads what the first one wrote before. One
    /// launch.
    CompareSwap,
    /// Rank 1 adds to a cell of rank 0, which reads the cell. One launch.
    ReadCell,
    /// Rank 0 updates a cell of rank 1 by requests to a network. Rank 1 does nothing. One launch.
    CellByNetwork,
}

/// Values of [`Kernel::AddBesideSet`].
const SET: u64 = 10;
const ADD: u64 = 5;

impl Kernel {
    /// Runs the kernel.
    ///
    /// # Safety
    /// The header must belong to the image, and `source` to the rank's input of `count` words.
    pub unsafe fn run<M: Machine>(
        self,
        block: Block<M>,
        header: LaunchHeader,
        image: &MemoryImage,
        source: *const u8,
        count: u64,
    ) {
        let window = image.device_window();
        let input = RawBuffer {
            at: source.cast_mut(),
            len: count,
        };
        // SAFETY: the caller's promise; the window belongs to the image.
        unsafe {
            match self {
                Self::Rows => rows__run(
                    block,
                    &RowsParams {
                        header,
                        window,
                        input,
                        barrier: 1,
                    },
                ),
                Self::NoBarrier => rows__run(
                    block,
                    &RowsParams {
                        header,
                        window,
                        input,
                        barrier: 0,
                    },
                ),
                Self::Adders => adders__run(
                    block,
                    &AddersParams {
                        header,
                        window,
                        input,
                    },
                ),
                Self::OneWay => one_way__run(
                    block,
                    &OneWayParams {
                        header,
                        window,
                        input,
                    },
                ),
                Self::OneWayPackets => {
                    one_way_packets__run(block, &OneWayPacketsParams { header, input })
                }
                Self::Stream => stream__run(
                    block,
                    &StreamParams {
                        header,
                        queue: window,
                        batches: count,
                    },
                ),
                Self::Grid => grid__run(block, &GridParams { header, window }),
                Self::Last => last__run(block, &LastParams { header, window }),
                Self::BlockWords | Self::BlockWordsTwice => block_words__run(
                    block,
                    &BlockWordsParams {
                        header,
                        times: 1 + u32::from(self == Self::BlockWordsTwice),
                    },
                ),
                Self::Counted => counted__run(block, &CountedParams { header, window }),
                Self::FetchAdd | Self::CompareSwap => cells__run(
                    block,
                    &CellsParams {
                        header,
                        window,
                        swap: u32::from(self == Self::CompareSwap),
                    },
                ),
                Self::ReadCell => read_cell__run(block, &ReadCellParams { header, window }),
                Self::CellByNetwork => {
                    cell_by_network__run(block, &CellByNetworkParams { header, window });
                }
                Self::Exchange => exchange__run(
                    block,
                    &ExchangeParams {
                        header,
                        queue: window,
                    },
                ),
                Self::AddBesideSet => add_beside_set__run(
                    block,
                    &AddBesideSetParams {
                        header,
                        window,
                        input,
                    },
                ),
            }
        }
    }

    /// Returns true if a launch leaves the inputs of all ranks in the window of every rank.
    pub fn gathers(self) -> bool {
        !matches!(
            self,
            Self::OneWay
                | Self::OneWayPackets
                | Self::Stream
                | Self::Exchange
                | Self::Grid
                | Self::Last
                | Self::BlockWords
                | Self::BlockWordsTwice
                | Self::Counted
                | Self::FetchAdd
                | Self::CompareSwap
                | Self::ReadCell
                | Self::CellByNetwork
        )
    }

    /// Checks the words of the window after a launch.
    ///
    /// # Panics
    /// Panics if the signal has a value that no order of the updates gives.
    pub fn verify(self, image: &MemoryImage, rank: u32) {
        if self != Self::AddBesideSet {
            return;
        }
        for sender in 0..image.config().ranks {
            let slots = (0..image.config().blocks).map(|block| {
                let slot = image.slot(rank, 1, sender, block);
                // SAFETY: a word of the image, which is only accessed atomically.
                unsafe { mem::load_u64(slot, Order::Acquire, Scope::System) }
            });
            let value: u64 = slots.fold(0, u64::wrapping_add);
            let possible = [SET, SET + ADD];
            assert!(possible.contains(&value), "signal 1 of {sender} is {value}");
        }
    }
}

/// Writes this rank's words to its row of every rank.
fn write_row(s: &Session<impl Machine>, window: Window<u64>, input: In<u64>) {
    let block = s.block();
    let (first, last) = block.slice(input.len(), 1);
    let part = input.slice(first, last - first);
    let at = s.rank() as usize * input.len() + first;
    for peer in s.peers(Team::World) {
        let row = window.at(peer).slice(at, part.len());
        row.write(s, block, part);
    }
}

#[kernel]
fn rows(
    s: &mut Session<impl Machine>,
    window: Window<u64>,
    input: In<u64>,
    barrier: u32,
) -> Result<(), Aborted> {
    if barrier == 1 {
        window.barrier(s, s.block().index())?;
    }
    write_row(s, window, input);
    window.raise_all(s, 0, Team::World);
    window.wait_all(s, 0, Team::World)?;
    Ok(())
}

#[kernel]
fn adders(
    s: &mut Session<impl Machine>,
    window: Window<u64>,
    input: In<u64>,
) -> Result<(), Aborted> {
    let (block, launch) = (s.block(), s.epoch());
    window.barrier(s, block.index())?;
    write_row(s, window, input);
    let value = SignalOp::Add(5 + u64::from(block.index()));
    window.signal_all(s, 0, value, Team::World);
    if block.index() == 0 {
        let blocks = u64::from(block.count());
        let sum = (0..blocks).map(|block| 5 + block).sum::<u64>();
        let all = sum * u64::from(s.ranks()) * launch;
        window.wait_value(s, 0, None, Compare::GreaterEqual, all)?;
    }
    Ok(())
}

#[kernel]
fn add_beside_set(
    s: &mut Session<impl Machine>,
    window: Window<u64>,
    input: In<u64>,
) -> Result<(), Aborted> {
    window.barrier(s, s.block().index())?;
    write_row(s, window, input);
    let op = match s.block().index() {
        0 => SignalOp::Set(SET),
        _ => SignalOp::Add(ADD),
    };
    window.signal_all(s, 1, op, Team::World);
    window.raise_all(s, 0, Team::World);
    window.wait_all(s, 0, Team::World)?;
    Ok(())
}

#[kernel]
fn one_way(
    s: &mut Session<impl Machine>,
    window: Window<u64>,
    input: In<u64>,
) -> Result<(), Aborted> {
    let block = s.block();
    let (first, last) = block.slice(input.len(), 1);
    match (s.rank(), s.peer(0), s.peer(1)) {
        (0, _, Some(target)) => {
            let part = input.slice(first, last - first);
            let row = window.at(target).slice(first, part.len());
            row.write(s, block, part).raise(s, 0);
        }
        (_, Some(source), _) => {
            let row = window.wait(s, 0, source)?;
            for index in first..last {
                let sent = number(0, 0, index);
                assert_eq!(row.get(index), sent, "element {index}");
            }
        }
        _ => {}
    }
    Ok(())
}

#[kernel]
fn one_way_packets(s: &mut Session<impl Machine>, input: In<u64>) -> Result<(), Aborted> {
    let slots = Slots::open(s, 8 * input.len())?;
    if s.rank() == 0 {
        return slots.send_elements(s, input);
    }
    let mut received = Unvoted::new(());
    for index in s.block().elements_of_block(input.len()) {
        let word = slots.receive_word(s, 0, index).map(|word| {
            assert_eq!(word, number(0, 0, index), "element {index}");
        });
        received = received.and(word);
    }
    s.vote(received)
}

/// Returns the number of rows of a batch: with two rows at most, the fifth batch does not fit
/// before the end of its ring.
fn row_count(batch: u64, most: usize) -> usize {
    [2, 1, 2, 2, 2, 0][batch as usize % 6].min(most)
}

/// Checks that the rows are those of `from`'s batch.
fn check(
    queue: &mut Queue<u64>,
    s: &Session<impl Machine>,
    from: u32,
    batch: u64,
) -> Result<(), Aborted> {
    let Some(rank) = s.peer(from) else {
        return Ok(());
    };
    let most = queue.batch();
    let received = queue.recv(s, rank)?;
    assert_eq!(received.len(), row_count(batch, most), "batch {batch}");
    for index in s.block().elements_of_block(received.len()) {
        let value = received.row(index).get(0);
        assert_eq!(value, number(from, batch, index), "row {index} of {batch}");
    }
    Ok(())
}

/// Sends a batch to rank `to`.
fn send(
    queue: &mut Queue<u64>,
    s: &Session<impl Machine>,
    to: u32,
    batch: u64,
) -> Result<(), Aborted> {
    let most = queue.batch();
    let open = queue.open(s, |rank| {
        (rank.index() == to).then(|| row_count(batch, most))
    })?;
    if let Some(rank) = s.peer(to) {
        let value = |index| number(s.rank(), batch, index);
        open.to(s, rank).write_with(s, s.block(), value);
    }
    open.publish(s)
}

#[kernel]
fn stream(
    s: &mut Session<impl Machine>,
    mut queue: Queue<u64>,
    batches: u64,
) -> Result<(), Aborted> {
    for batch in 0..batches {
        match s.rank() {
            0 => send(&mut queue, s, 1, batch)?,
            _ => check(&mut queue, s, 0, batch)?,
        }
    }
    Ok(())
}

#[kernel]
fn exchange(s: &mut Session<impl Machine>, mut queue: Queue<u64>) -> Result<(), Aborted> {
    let (batch, other) = (s.epoch() - 1, 1 - s.rank());
    send(&mut queue, s, other, batch)?;
    check(&mut queue, s, other, batch)
}

#[kernel(grid)]
fn grid(s: &mut Session<impl Machine>, window: Window<u64>) -> Result<(), Aborted> {
    let (block, words) = (s.block(), window.local(s)?.elements());
    let (index, blocks) = (block.index() as usize, block.count() as usize);
    for step in 0..2 {
        // A block that is ahead writes the words of the other step.
        let words = words.slice(step * blocks, blocks);
        let epoch = 2 * s.epoch() + step as u64;
        words.set(index, number(0, epoch, index));
        s.grid_barrier()?;
        for other in 0..blocks {
            assert_eq!(words.get(other), number(0, epoch, other), "step {step}");
        }
    }
    Ok(())
}

#[kernel]
fn last(s: &mut Session<impl Machine>, window: Window<u64>) -> Result<(), Aborted> {
    let (block, words) = (s.block(), window.local(s)?.elements());
    let (index, blocks) = (block.index() as usize, block.count() as usize);
    for step in 0..2 {
        let words = words.slice(step * blocks, blocks);
        let epoch = 2 * s.epoch() + step as u64;
        words.set(index, number(0, epoch, index));
        if s.last_block()? {
            for other in 0..blocks {
                assert_eq!(words.get(other), number(0, epoch, other), "step {step}");
            }
        }
    }
    Ok(())
}

#[kernel]
fn block_words(s: &mut Session<impl Machine>, times: u32) -> Result<(), Aborted> {
    let (index, blocks) = (s.block().index(), s.block().count());
    for time in 0..times {
        let epoch = 2 * s.epoch() + u64::from(time);
        let value = |block: u32| number(0, epoch, block as usize) as u32;
        for other in (0..blocks).filter(|other| *other != index) {
            // SAFETY: a block of this launch, and there are more words than blocks.
            unsafe { s.send_block_word(other, index as usize, value(index)) };
        }
        for other in (0..blocks).filter(|other| *other != index) {
            // SAFETY: as above.
            let received = unsafe { s.receive_block_word(other, other as usize) };
            assert_eq!(s.vote(received)?, value(other), "time {time}");
        }
    }
    Ok(())
}

#[kernel]
fn counted(s: &mut Session<impl Machine>, window: Window<u64>) -> Result<(), Aborted> {
    let (word, epoch) = (window.local(s)?.elements(), s.epoch());
    if s.block().index() == 0 {
        word.set(0, number(0, epoch, 0));
        return window.count(s, 0);
    }
    window.wait_counter(s, 0, Compare::GreaterEqual, epoch)?;
    assert_eq!(word.get(0), number(0, epoch, 0), "epoch {epoch}");
    Ok(())
}

/// Checks the word that `rank` has written before it updated a cell.
fn check_word(s: &Session<impl Machine>, window: Window<u64>, rank: Rank) -> Result<(), Aborted> {
    let word = window.at(rank).direct(s)?.get(0);
    assert_eq!(word, number(rank.index(), 0, 0), "the word of {rank:?}");
    Ok(())
}

#[kernel]
fn cells(s: &mut Session<impl Machine>, window: Window<u64>, swap: u32) -> Result<(), Aborted> {
    let (Some(owner), Some(other)) = (s.peer(0), s.peer(1 - s.rank())) else {
        return Ok(());
    };
    let own = window.local(s)?.elements();
    own.set(0, number(s.rank(), 0, 0));
    let ticket = match swap {
        0 => window.at(owner).fetch_add(s, 0, 1),
        _ => window.at(owner).compare_swap(s, 0, 0, 1),
    };
    let before = s.vote(ticket.wait(s))?;
    if before == 1 {
        check_word(s, window, other)?;
    }
    own.set(1, before);
    window.barrier(s, 0)?;
    let theirs = window.at(other).direct(s)?.get(1);
    assert_eq!(before + theirs, 1, "the values before are 0 and 1");
    if s.rank() == 0 {
        let value = s.vote(window.cell(s, 0))?;
        assert_eq!(value, if swap == 0 { 2 } else { 1 }, "the value after");
    }
    Ok(())
}

#[kernel]
fn read_cell(s: &mut Session<impl Machine>, window: Window<u64>) -> Result<(), Aborted> {
    let (Some(owner), Some(writer)) = (s.peer(0), s.peer(1)) else {
        return Ok(());
    };
    if s.rank() == 1 {
        let own = window.local(s)?.elements();
        own.set(0, number(1, 0, 0));
        s.vote(window.at(owner).fetch_add(s, 0, 1).wait(s))?;
    } else if s.vote(window.cell(s, 0))? == 1 {
        check_word(s, window, writer)?;
    }
    Ok(())
}

#[kernel]
fn cell_by_network(s: &mut Session<impl Machine>, window: Window<u64>) -> Result<(), Aborted> {
    if let (0, Some(owner)) = (s.rank(), s.peer(1)) {
        let cell = window.at(owner);
        for before in 0..2 {
            assert_eq!(s.vote(cell.fetch_add(s, 0, 1).wait(s))?, before);
        }
        assert_eq!(s.vote(cell.compare_swap(s, 0, 2, 7).wait(s))?, 2);
        assert_eq!(s.vote(cell.compare_swap(s, 0, 2, 8).wait(s))?, 7);
    }
    Ok(())
}

/// Carries out request `number` of `rank`, if it has been appended. Does not complete it.
///
/// # Panics
/// Panics if the request is not one that the kernels of this module make.
pub fn carry_out(image: &MemoryImage, rank: u32, number: u64) -> bool {
    let requests = image.requests(rank);
    let Some(request) = requests.take(number) else {
        return false;
    };
    let Request {
        action,
        peer,
        remote,
        local,
        value,
        bytes,
        ..
    } = request.expect("a request");
    let address = |addr: WindowAddr, rank| match addr.window() {
        STAGING => image.staging(rank).wrapping_add(addr.offset() as usize),
        _ => image.address(addr, rank),
    };
    let to = address(remote, peer).cast::<u64>();
    // SAFETY: the ranges lie in the image. The protocol orders these accesses with others, which
    // the model checker checks.
    unsafe {
        match action {
            Action::Put => {
                let from = address(local, rank).cast::<u64>();
                for word in 0..bytes as usize / 8 {
                    mem::write(to.add(word), mem::read(from.add(word)));
                }
            }
            Action::Signal => mem::store_u64(to, value[0], Order::Release, Scope::System),
            Action::Store if bytes.is_multiple_of(8) => {
                for (word, value) in value.iter().take(bytes as usize / 8).enumerate() {
                    mem::write(to.add(word), *value);
                }
            }
            Action::FetchAdd | Action::CompareSwap => {
                let before = mem::load_u64(to, Order::Acquire, Scope::System);
                let [first, second] = value;
                if action == Action::FetchAdd {
                    let sum = before.wrapping_add(first);
                    mem::store_u64(to, sum, Order::Release, Scope::System);
                } else if before == first {
                    mem::store_u64(to, second, Order::Release, Scope::System);
                }
                Requests::store_result(image.result(rank, local), number, before);
            }
            other => panic!("no kernel asks for {other:?}"),
        }
    }
    true
}
