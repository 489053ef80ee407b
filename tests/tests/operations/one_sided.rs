//! Tests `RING_PUT`, the library's put with signal in a ring. The kernel is launched like a user
//! kernel.

use core::time::Duration;

use fusewire::{DType, Options};
use fusewire_kernels::one_sided::RingPut;
use fusewire_tests::device::{run_threads, tensor};

#[test]
fn puts_go_round_a_ring_eager_and_replayed() {
    for (ranks, lanes) in [(1, 1), (2, 1), (3, 1), (5, 1), (2, 32), (3, 64)] {
        let mut options = Options::default();
        options.timeout = Duration::from_secs(20);
        options.lanes = lanes;
        // The kernel requires one block.
        options.blocks = 1;
        for result in run_threads(ranks, &options, |comm| {
            for (signal, count) in [(0u64, 0usize), (1, 1), (5, 333), (63, 5000)] {
                let source = comm.alloc(DType::U64, count)?;
                let target = comm.alloc(DType::U64, count)?;
                let launches = tensor(DType::U64, 1)?;
                let arguments = RingPut {
                    source: source.as_ptr().cast(),
                    count: count as u64,
                    // An empty tensor has no window address. The kernel then puts nothing.
                    target_at: if count == 0 {
                        0
                    } else {
                        comm.window_addr(&target)?.0
                    },
                    signal,
                    launches: launches.as_ptr().cast(),
                };
                let launch = || {
                    comm.kernel(arguments)
                        .keeping(&source)
                        .keeping(&target)
                        .keeping(&launches)
                };
                comm.stream().begin_capture()?;
                // SAFETY: the tensors have `count` elements, and the target is in the same window
                // on all ranks.
                let captured = unsafe { launch().enqueue_unchecked() };
                let graph = comm.stream().end_capture()?.instantiate()?;
                captured?;
                let from = |round: u64, rank: u32| -> Vec<u64> {
                    (0..count as u64)
                        .map(|i| i + (round << 32) + (u64::from(rank) << 56))
                        .collect()
                };
                let rounds = if lanes == 1 { 40 } else { 6 };
                for round in 0..rounds {
                    source.copy_from(&from(round, comm.rank()))?;
                    if round % 2 == 0 {
                        // SAFETY: the tensors have `count` elements, and the target is in the same
                        // window on all ranks.
                        unsafe { launch().launch_unchecked()? };
                    } else {
                        graph.run(comm.stream())?;
                    }
                    let previous = (comm.rank() + ranks - 1) % ranks;
                    assert_eq!(target.to_vec::<u64>()?, from(round, previous));
                }
                assert_eq!(launches.to_vec::<u64>()?, [rounds]);
            }
            Ok(())
        }) {
            result.expect("all ranks");
        }
    }
}

#[test]
fn a_put_outside_of_a_window_is_refused() {
    let mut options = Options::default();
    options.timeout = Duration::from_secs(20);
    for result in run_threads(2, &options, |comm| {
        let source = comm.alloc(DType::U64, 100)?;
        let launches = tensor(DType::U64, 1)?;
        let arguments = RingPut {
            source: source.as_ptr().cast(),
            count: 100,
            // One word past the correct address.
            target_at: comm.window_addr(&source)?.0 + 8,
            signal: 0,
            launches: launches.as_ptr().cast(),
        };
        // SAFETY: the kernel checks the target against the window before it writes.
        Ok(unsafe { comm.kernel(arguments).launch_unchecked() })
    }) {
        let error = result.expect("joined").expect_err("outside of the window");
        assert!(matches!(error, fusewire::Error::Failed(_)), "{error}");
        let text = error.to_string();
        assert!(text.contains("in kernel ring_put #1: rank "), "{text}");
        assert!(text.contains("cannot be reached"), "{text}");
    }
}
