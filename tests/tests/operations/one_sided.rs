//! Tests `ring_put`, the library's put with signal in a ring.

use core::time::Duration;

use fusewire::{DType, Options, WindowOptions};
use fusewire_kernels::one_sided::RingPut;
use fusewire_tests::device::{run_threads, tensor};

#[test]
fn puts_go_round_a_ring_eager_and_replayed() {
    for (ranks, lanes) in [(1, 1), (2, 1), (3, 1), (5, 1), (2, 32), (3, 64)] {
        let mut options = Options::default();
        options.timeout = Duration::from_secs(20);
        options.testing.lanes = lanes;
        for result in run_threads(ranks, &options, |comm| {
            for count in [0usize, 1, 333, 5000] {
                let source = tensor(DType::U64, count)?;
                let target = comm.alloc_window(DType::U64, count, WindowOptions::default())?;
                let arguments = RingPut {
                    window: (&target).into(),
                    source: (&source).into(),
                };
                let launch = || comm.kernel(arguments).blocks(1);
                comm.stream().begin_capture()?;
                let captured = launch().enqueue();
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
                        launch().launch()?;
                    } else {
                        graph.run(comm.stream())?;
                        comm.stream().synchronize()?;
                    }
                    let previous = (comm.rank() + ranks - 1) % ranks;
                    assert_eq!(target.tensor().to_vec::<u64>()?, from(round, previous));
                }
                drop(graph);
                target.free()?;
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
        let source = tensor(DType::U64, 100)?;
        let target = comm.alloc_window(DType::U64, 99, WindowOptions::default())?;
        let arguments = RingPut {
            window: (&target).into(),
            source: (&source).into(),
        };
        Ok(comm.kernel(arguments).blocks(1).launch())
    }) {
        let error = result.expect("joined").expect_err("outside of the window");
        assert!(matches!(error, fusewire::Error::Failed(_)), "{error}");
        let text = error.to_string();
        for expected in [
            "in kernel ring_put #",
            ": argument window: element 99 of 99",
        ] {
            assert!(text.contains(expected), "{text}");
        }
    }
}
