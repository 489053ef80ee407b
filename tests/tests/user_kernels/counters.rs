//! Counters of windows, values of signals that kernels read, and multicast addresses of windows.

use fusewire::{DType, WindowOptions};
use fusewire_device::multimem::{self, Combine};
use fusewire_device::net::SignalOp;
use fusewire_device::window::Compare;
use fusewire_device::{Aborted, Group, InOut, Machine, Out, Session, Team, Window, kernel, mem};

use super::{
    LANES, all, assert_contains, failing, fails, launch_impatiently, on_both, options, tensor,
};

/// Block 0 puts three times and counts each put. The other blocks wait for the third put of launch
/// `launch`, overwrite the source and return the counter.
#[kernel]
fn count_puts(
    s: &mut Session<impl Machine>,
    window: Window<u64>,
    seen: Out<u64>,
    launch: u64,
) -> Result<(), Aborted> {
    let block = s.block();
    if block.index() == 0 {
        for next in s.peers(Team::World).take(1) {
            for put in 0..3 {
                let source = window.local(s)?.slice(put, 1);
                if block.is_leader() {
                    source.elements().set(0, 10 * launch + put as u64);
                }
                block.sync();
                window.at(next).slice(3 + put, 1).put(s, block, source);
                window.count(s, 0)?;
            }
            window.at(next).raise(s, 0);
        }
        let before = s.rank().checked_sub(1).unwrap_or(s.ranks() - 1);
        if let Some(before) = s.peer(before) {
            window.wait(s, 0, before)?;
        }
        return Ok(());
    }
    window.wait_counter(s, 0, Compare::GreaterEqual, 3 * launch)?;
    if block.is_leader() {
        window.local(s)?.elements().set(0, u64::MAX);
        seen.set(block.index() as usize, window.read_counter(s, 0));
    }
    Ok(())
}

/// Sets counter 0 to 0, and returns its value before and after.
#[kernel(blocks = 1)]
fn reset(
    s: &mut Session<impl Machine>,
    window: Window<u64>,
    seen: Out<u64>,
) -> Result<(), Aborted> {
    let before = window.read_counter(s, 0);
    window.reset_counter(s, 0);
    window.wait_counter(s, 0, Compare::Equal, 0)?;
    if s.block().is_leader() {
        seen.set(0, before);
        seen.set(1, window.read_counter(s, 0));
    }
    Ok(())
}

#[test]
fn blocks_wait_for_counted_puts() {
    for lanes in [1, 32] {
        on_both((2, 3, lanes), |comm| {
            let window = comm.alloc_window(DType::U64, 6, WindowOptions::default())?;
            let seen = tensor(&[0u64; 3])?;
            for launch in 1..6 {
                comm.kernel(CountPuts {
                    window: (&window).into(),
                    seen: (&seen).into(),
                    launch,
                })
                .blocks(3)
                .launch()?;
                assert_eq!(seen.to_vec::<u64>()?, [0, 3 * launch, 3 * launch]);
                assert_eq!(window.read_counter(0)?, 3 * launch);
                let received = window.tensor().to_vec::<u64>()?[3..].to_vec();
                assert_eq!(received, [0, 1, 2].map(|put| 10 * launch + put));
                comm.barrier()?;
            }
            comm.kernel(Reset {
                window: (&window).into(),
                seen: (&seen).into(),
            })
            .blocks(1)
            .launch()?;
            assert_eq!(seen.to_vec::<u64>()?[..2], [15, 0]);
            // After a reset by the host, too, the count begins at 0.
            for _ in 0..2 {
                comm.kernel(CountPuts {
                    window: (&window).into(),
                    seen: (&seen).into(),
                    launch: 1,
                })
                .blocks(3)
                .launch()?;
                assert_eq!(window.read_counter(0)?, 3);
                window.reset_counter(0)?;
                assert_eq!(window.read_counter(0)?, 0);
                comm.barrier()?;
            }
            let error = window.reset_counter(2).expect_err("of two").to_string();
            assert_contains(&error, &["reset_counter: counter 2 of 2"]);
            window.free()
        });
    }
}

/// Waits on rank 0 for a counter that no block raises.
#[kernel]
fn wait_in_vain(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    counter: u32,
) -> Result<(), Aborted> {
    if s.rank() == 0 {
        window.wait_counter(s, counter, Compare::GreaterEqual, 5)?;
    }
    s.barrier()
}

#[test]
fn a_wait_for_a_counter_is_bounded() {
    for lanes in LANES {
        for message in failing(&options(1, lanes), |comm| {
            let window = comm.alloc_window(DType::U8, 1, WindowOptions::default())?;
            let (window, counter) = ((&window).into(), 1);
            launch_impatiently(comm, WaitInVain { window, counter })
        }) {
            assert_contains(
                &message,
                &[
                    "rank 0 in kernel wait_in_vain #",
                    "waiting for a counter of its window (expected 5, saw 0)",
                    "only kernels of rank 0 raise",
                ],
            );
        }
    }
}

#[test]
fn counters_that_do_not_exist() {
    let text = "argument window: number 2 of a signal, counter, barrier or cell";
    fails(text, |comm| {
        let window = comm.alloc_window(DType::U8, 1, WindowOptions::default())?;
        let (window, counter) = ((&window).into(), 2);
        comm.kernel(WaitInVain { window, counter }).launch()
    });
}

/// Adds this rank's number + 1 to signal 0 of every rank, and reads its values after a barrier.
#[kernel(blocks = 1, signals = 1)]
fn read_values(
    s: &mut Session<impl Machine>,
    window: Window<u8>,
    values: Out<u64>,
) -> Result<(), Aborted> {
    let own = u64::from(s.rank()) + 1;
    window.signal_all(s, 0, SignalOp::Add(own), Team::World);
    s.barrier()?;
    if s.block().is_leader() {
        for peer in s.peers(Team::World) {
            let value = window.read_signal(s, 0, Some(peer));
            values.set(peer.index() as usize, value);
        }
        values.set(s.ranks() as usize, window.read_signal(s, 0, None));
    }
    s.barrier()
}

#[test]
fn kernels_read_signals() {
    for lanes in LANES {
        all((3, 1, lanes), |comm| {
            let window = comm.alloc_window(DType::U8, 1, WindowOptions::default())?;
            let values = tensor(&[0u64; 4])?;
            for launch in 1..4 {
                comm.kernel(ReadValues {
                    window: (&window).into(),
                    values: (&values).into(),
                })
                .launch()?;
                assert_eq!(
                    values.to_vec::<u64>()?,
                    [1, 2, 3, 6].map(|sum| sum * launch)
                );
            }
            window.free()
        });
    }
}

/// Adds the first four elements of all ranks by multicast, and stores the sums as the last four of
/// all ranks. Rank r handles pair r of four elements. `found` tells whether there is an address.
///
/// The barriers order the accesses: a rank loads after the first one, which follows the writes of
/// the inputs, and reads results after the second one, which follows the stores.
#[kernel(blocks = 1)]
fn sum_by_multicast(
    s: &mut Session<impl Machine>,
    window: Window<f32>,
    found: InOut<u32>,
    first: u64,
) -> Result<(), Aborted> {
    let address = window.multicast(s, first as usize, 8);
    s.barrier()?;
    multimem::fence();
    if s.block().is_leader() {
        found.set(0, u32::from(address.is_some()));
    }
    if let Some(address) = address
        && s.rank() == 0
        && s.block().is_leader()
    {
        // SAFETY: eight elements were asked for, which begin at a multiple of 16 bytes. Sums of f32
        // exist. The inputs are written before the barrier, and nothing else accesses the results
        // until the next one.
        unsafe {
            let sums = address.load_reduce::<f32>(0, Combine::Add);
            address.store(16, sums);
        }
    }
    multimem::fence();
    mem::fence(mem::Order::Release, mem::Scope::System);
    s.barrier()
}

#[test]
fn a_window_has_a_multicast_address() {
    for lanes in LANES {
        all((3, 1, lanes), |comm| {
            let window = comm.alloc_window(DType::F32, 12, WindowOptions::default())?;
            let found = tensor(&[7u32])?;
            window
                .tensor()
                .slice(4, 4)?
                .copy_from(&[comm.rank() as f32; 4])?;
            comm.barrier()?;
            comm.kernel(SumByMulticast {
                window: (&window).into(),
                found: (&found).into(),
                first: 4,
            })
            .launch()?;
            assert_eq!(found.to_vec::<u32>()?, [1]);
            let values = window.tensor().to_vec::<f32>()?;
            assert_eq!(values[8..], [3.0; 4]);
            assert_eq!(values[..4], [0.0; 4]);
            comm.barrier()?;
            window.free()
        });
    }
}

#[test]
fn a_multicast_address_beyond_the_window() {
    fails("argument window: element 12 of 12", |comm| {
        let window = comm.alloc_window(DType::F32, 12, WindowOptions::default())?;
        let found = tensor(&[7u32])?;
        comm.kernel(SumByMulticast {
            window: (&window).into(),
            found: (&found).into(),
            first: 5,
        })
        .launch()
    });
}
