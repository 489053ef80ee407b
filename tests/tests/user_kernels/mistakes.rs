//! Mistakes of a kernel's author: each is a failure of that launch, on all ranks, whose message
//! names the kernel and what was wrong. None is silent, and none hangs.

use core::time::Duration;

use fusewire::{Communicator, DType, Error, ReduceOp, Result, WindowOptions, run_threads};
use fusewire_device::arch::{RESERVED_BYTES, SHARED_BYTES};
use fusewire_device::net::SignalOp;
use fusewire_device::packet::Slots;
use fusewire_device::window::Compare;
use fusewire_device::{
    Aborted, Group, In, InOut, Machine, Out, Session, Team, Unvoted, Window, kernel,
};

use super::{
    LANES, SHORT, THIRD, assert_contains, await_failure, by_network, failing, fails, fails_with,
    is_short, keep_rank, options, tensor, zeros,
};

/// Reads element `index` on the last lane of rank 0, votes, and enters a barrier.
#[kernel]
fn reads_at(
    s: &mut Session<impl Machine>,
    before: u32,
    x: In<f32>,
    index: u64,
    y: Out<f32>,
) -> Result<(), Aborted> {
    let _ = before;
    let block = s.block();
    if s.rank() == 0 && block.rank() == block.size() - 1 {
        y.set(0, x.get(index as usize));
    }
    // Without the vote, rank 0 would signal before it fails, and rank 1 might succeed.
    s.vote(Unvoted::new(()))?;
    s.barrier()
}

#[test]
fn an_index_out_of_range_names_argument_index_and_length() {
    let run = |comm: &Communicator, index| {
        let (x, y) = (tensor(&[1.0f32; 8])?, zeros(DType::F32, 1)?);
        comm.kernel(ReadsAt {
            before: 0,
            x: (&x).into(),
            index,
            y: (&y).into(),
        })
        .launch()
    };
    let text = "rank 0 in kernel reads_at #1: argument x: element 8 of 8";
    fails(text, |comm| run(comm, 8));
    let text = "argument x: element 18446744073709551615 of 8";
    fails(text, |comm| run(comm, u64::MAX));
    // The control: the last element is no mistake.
    for result in run_threads(2, &options(1, 32), |comm| run(&comm, 7)) {
        result.expect("a kernel without a mistake");
    }
}

/// Writes out of range and returns without another collective call.
#[kernel]
fn writes_beyond(_s: &mut Session<impl Machine>, x: InOut<u32>, first: u64) -> Result<(), Aborted> {
    x.slice(first as usize, 3).set(2, 7);
    Ok(())
}

#[test]
fn a_write_or_slice_out_of_range_is_reported_at_the_end_of_the_kernel() {
    let run = |comm: &Communicator, first| {
        let x = tensor(&[0u32; 5])?;
        let result = comm
            .kernel(WritesBeyond {
                x: (&x).into(),
                first,
            })
            .launch();
        if first > 2 {
            assert_eq!(x.to_vec::<u32>()?, [0; 5], "nothing was written");
        }
        result
    };
    fails(
        "in kernel writes_beyond #1: argument x: element 5 of 5",
        |comm| run(comm, 3),
    );
    fails("in kernel writes_beyond #1: argument x: element ", |comm| {
        run(comm, u64::MAX)
    });
    for result in run_threads(2, &options(1, 1), |comm| run(&comm, 2)) {
        result.expect("a kernel without a mistake");
    }
}

/// Requires `count` elements, and then writes them by as many packets.
#[kernel]
fn requires(s: &mut Session<impl Machine>, x: InOut<u32>, count: u64) -> Result<(), Aborted> {
    let x = x.require(s, count as usize)?;
    let slots = Slots::open(s, 4 * x.len())?;
    slots.send_elements(s, x.as_in())?;
    for rank in (0..s.ranks()).filter(|rank| *rank != s.rank()) {
        let arrived = slots.receive_header(s, rank);
        s.vote(arrived)?;
    }
    for i in s.block().elements_of_block(x.len()) {
        x.set(i, 7);
    }
    slots.close(s);
    Ok(())
}

#[test]
fn a_buffer_without_the_required_elements_fails_on_all_ranks() {
    let run = |comm: &Communicator, len: usize| {
        let x = tensor(&vec![0u32; len])?;
        let result = comm
            .kernel(Requires {
                x: (&x).into(),
                count: 5,
            })
            .launch();
        let written = x
            .to_vec::<u32>()?
            .iter()
            .filter(|value| **value != 0)
            .count();
        assert_eq!(written, if result.is_ok() { 5 } else { 0 });
        result
    };
    // Only rank 0 has too few elements: rank 1 must not return before it knows.
    fails(
        "rank 0 in kernel requires #1: argument x: element 4 of 4",
        |comm| run(comm, 5 - usize::from(comm.rank() == 0)),
    );
    for (lanes, len) in [(1, 5), (32, 6), (1, 7)] {
        for result in run_threads(2, &options(1, lanes), |comm| run(&comm, len)) {
            result.expect("a kernel without a mistake");
        }
    }
}

const BAD_EXPERT: u32 = 7;

/// Fails on one lane of rank 1.
#[kernel(failures(BAD_EXPERT = "expert {a} of {b} experts"))]
fn checks_experts(
    s: &mut Session<impl Machine>,
    ids: In<u32>,
    experts: u32,
) -> Result<(), Aborted> {
    let block = s.block();
    let mut bad = None;
    for i in block.elements_of_block(ids.len()) {
        let id = ids.get(i);
        if id >= experts {
            bad = Some(id);
        }
    }
    let id = bad.unwrap_or(0);
    s.ensure(bad.is_none(), BAD_EXPERT, u64::from(id), u64::from(experts))?;
    s.barrier()
}

/// Records a failure without a text on one lane.
#[kernel]
fn faults(s: &mut Session<impl Machine>) -> Result<(), Aborted> {
    if s.block().rank() == s.block().size() - 1 && s.rank() == 1 {
        s.fault(3, 40, 50);
    }
    s.vote(Unvoted::new(()))?;
    s.barrier()
}

#[test]
fn a_failure_of_the_author_has_the_authors_text() {
    let run = |comm: &Communicator, id| {
        let mut ids = vec![0u32; 100];
        ids[77] = if comm.rank() == 1 { id } else { 0 };
        let ids = tensor(&ids)?;
        comm.kernel(ChecksExperts {
            ids: (&ids).into(),
            experts: 8,
        })
        .launch()
    };
    let text = "rank 1 in kernel checks_experts #1: expert 9 of 8 experts";
    fails(text, |comm| run(comm, 9));
    for result in run_threads(2, &options(1, 32), |comm| run(&comm, 7)) {
        result.expect("a kernel without a mistake");
    }
    let text = "rank 1 in kernel faults #1: the kernel recorded failure 3 (40, 50)";
    fails(text, |comm| comm.kernel(Faults {}).launch());
}

/// Settles a failure of rank 1 that no lane has recorded.
#[kernel]
fn settles(s: &mut Session<impl Machine>) -> Result<(), Aborted> {
    s.settle(s.rank() != 1)?;
    s.barrier()
}

#[test]
fn a_failure_without_a_reason_says_how_to_record_one() {
    let text = "rank 1 in kernel settles #1: the kernel recorded no reason; record one with \
                s.ensure or s.fault";
    fails(text, |comm| comm.kernel(Settles {}).launch());
}

/// Uses a window in the way that `mistake` says.
#[kernel]
fn misuses(
    s: &mut Session<impl Machine>,
    x: In<f32>,
    window: Window<f32>,
    mistake: u32,
) -> Result<(), Aborted> {
    let (block, me) = (s.block(), window.at(s.me()));
    let third = THIRD.get().copied().unwrap_or(s.me());
    match mistake {
        0 => _ = me.slice(9, 2),
        1 => _ = me.slice(9, 1).write(s, block, x),
        2 => me.raise(s, 6),
        3 => me.signal(s, 7, SignalOp::Set(1)),
        4 => _ = window.wait_value(s, 9, None, Compare::Equal, 0)?,
        5 => _ = window.barrier(s, 4)?,
        6 => _ = me.slice(1, 9).put(s, block, window.local(s)?.slice(0, 4)),
        7 => _ = me.slice(3, 3).put(s, block, window.local(s)?.slice(8, 3)),
        8 => _ = window.wait(s, 6, s.me())?,
        9 => me.store(s, 9, [1.0, 2.0]),
        10 => _ = window.at(s.me()).get(s, window.local(s)?),
        11 => window.count(s, 3)?,
        12 => _ = window.at(third).slice(0, 2).write(s, block, x),
        13 => window.at(third).raise(s, 0),
        14 => _ = window.wait(s, 0, third)?,
        _ => _ = window.wait_value(s, 0, Some(third), Compare::Equal, 0)?,
    }
    s.barrier()
}

#[test]
fn a_rank_range_or_number_that_does_not_exist_is_named() {
    keep_rank();
    for (mistake, text) in [
        (0, "argument window: element 10 of 10"),
        (1, "argument window: element 1 of 1"),
        (2, "argument window: number 6 of a signal"),
        (3, "argument window: number 7 of a signal"),
        (4, "argument window: number 9 of a signal"),
        (
            5,
            "number 4 of a signal, counter, barrier or cell, of which the window has 2",
        ),
        (
            6,
            "a copy of 16 bytes to an address 4 bytes from their source",
        ),
        (7, "argument window: element 10 of 10"),
        (
            8,
            "number 6 of a signal, counter, barrier or cell, of which the window has 6",
        ),
        (9, "argument window: element 10 of 10"),
        (
            10,
            "a copy of 40 bytes to an address 0 bytes from their source",
        ),
        (
            11,
            "number 3 of a signal, counter, barrier or cell, of which the window has 2",
        ),
        (12, "argument window: rank 2 cannot be reached"),
        (13, "argument window: rank 2 cannot be reached"),
        (14, "argument window: rank 2 of 2 ranks"),
        (15, "argument window: rank 2 of 2 ranks"),
    ] {
        fails(text, |comm| {
            let mut options = WindowOptions::default();
            options.signals = Some(6);
            options.barriers = 2;
            options.counters = Some(2);
            let window = comm.alloc_window(DType::F32, 10, options)?;
            let x = tensor(&[1.0f32, 2.0])?;
            comm.kernel(Misuses {
                x: (&x).into(),
                window: (&window).into(),
                mistake,
            })
            .launch()
        });
    }
}

/// Opens packet slots for `bytes` bytes and asks for word `index` of rank `source`.
#[kernel(blocks = 1)]
fn packets(
    s: &mut Session<impl Machine>,
    data: In<u64>,
    bytes: u64,
    source: u32,
    index: u64,
) -> Result<(), Aborted> {
    let slots = Slots::open(s, bytes as usize)?;
    slots.send_elements(s, data)?;
    let word = slots.receive_word(s, source, index as usize);
    s.vote(word)?;
    s.barrier()
}

#[test]
fn packets_beyond_a_slot_a_stream_or_the_ranks_are_refused() {
    let run = |comm: &Communicator, (bytes, source, index)| {
        let data = tensor(&[7u64; 4])?;
        comm.kernel(Packets {
            data: (&data).into(),
            bytes,
            source,
            index,
        })
        .launch()
    };
    for (call, text) in [
        (
            (200_000, 0, 0),
            "packets of 200000 bytes for each block and rank; a slot has room for ",
        ),
        (
            (100_000_000, 0, 0),
            "packets of 100000000 bytes for each block and rank",
        ),
        ((40, 0, 0), "argument data: element 4 of 4"),
        ((32, 0, 4), "word 4 of a packet stream of 4 words"),
        ((32, 2, 0), "rank 2 of 2 ranks"),
    ] {
        fails(text, |comm| run(comm, call));
    }
}

/// Waits for a signal that rank 1 never sends.
#[kernel]
fn waits_in_vain(s: &mut Session<impl Machine>, window: Window<u8>) -> Result<(), Aborted> {
    if s.rank() == 0 {
        for peer in s.peers(Team::World).take(1) {
            window.wait(s, 0, peer)?;
        }
    }
    s.barrier()
}

#[test]
fn a_forgotten_signal_names_kernel_and_sender() {
    let run = |comm: &Communicator, timeout| {
        let window = comm.alloc_window(DType::U8, 1, WindowOptions::default())?;
        // Only rank 0 waits for so short a time.
        let launch = comm.kernel(WaitsInVain {
            window: (&window).into(),
        });
        match comm.rank() {
            0 => launch.timeout(timeout).launch(),
            _ => launch.launch(),
        }
    };
    // On a busy machine rank 1 may enter late. Then that is what rank 0 reports, truthfully.
    let messages = [300, 3_000, 15_000]
        .map(Duration::from_millis)
        .into_iter()
        .map(|timeout| failing(&options(1, 1), |comm| run(comm, timeout)))
        .find(|messages| !messages[0].contains("its entry"))
        .expect("rank 1 enters within 15 s");
    for message in messages {
        let call = "rank 0 in kernel waits_in_vain #";
        let wait = "waiting for rank 1, its signal";
        assert_contains(&message, &[call, "timed out after", wait]);
    }
}

/// Enters a barrier.
#[kernel]
fn one_barrier(s: &mut Session<impl Machine>, #[agreed] x: In<u8>) -> Result<(), Aborted> {
    let _ = x;
    s.barrier()
}

/// Enters a barrier, too.
#[kernel]
fn other_barrier(s: &mut Session<impl Machine>, #[agreed] factor: f32) -> Result<(), Aborted> {
    let _ = factor;
    s.barrier()
}

#[test]
fn different_kernels_or_agreed_arguments_are_a_mismatch() {
    fails("called kernel other_barrier #1", |comm| {
        let x = tensor(&[0u8; 3])?;
        if comm.rank() == 0 {
            return comm.kernel(OneBarrier { x: (&x).into() }).launch();
        }
        comm.kernel(OtherBarrier { factor: 1.0 }).launch()
    });
    let text = "called kernel one_barrier #1 with other values of the agreed arguments than rank";
    fails(text, |comm| {
        let x = tensor(&vec![0u8; 3 + comm.rank() as usize])?;
        comm.kernel(OneBarrier { x: (&x).into() }).launch()
    });
    fails("kernel other_barrier #1 with other values", |comm| {
        let factor = 1.0 + comm.rank() as f32;
        comm.kernel(OtherBarrier { factor }).launch()
    });
}

#[test]
fn a_call_of_the_library_instead_of_a_kernel_is_a_mismatch() {
    for lanes in LANES {
        for (call, name) in [
            (0, "called barrier #1"),
            (1, "called all_reduce #1 (16 f32"),
        ] {
            for message in failing(&options(1, lanes), |comm| match (comm.rank(), call) {
                (0, 0) => comm.barrier(),
                (0, _) => comm.all_reduce(&mut [1f32; 16][..], ReduceOp::Sum),
                _ => comm.kernel(OtherBarrier { factor: 1.0 }).launch(),
            }) {
                assert_contains(&message, &["called kernel other_barrier #1", name]);
            }
        }
    }
}

#[test]
fn a_launch_that_a_rank_skips_is_named_with_its_last_call() {
    let texts = [
        "waiting for rank 1, its entry",
        "rank 1 never entered kernel other_barrier #2 (its last was barrier #1",
    ];
    let all = LANES.map(|lanes| options(1, lanes));
    for options in all.into_iter().chain([by_network(1)]) {
        for message in failing(&options, |comm| {
            comm.barrier()?;
            if comm.rank() == 1 {
                return await_failure(comm);
            }
            let launch = comm.kernel(OtherBarrier { factor: 1.0 });
            launch.timeout(SHORT).launch()
        }) {
            assert_contains(&message, &texts);
        }
    }
}

/// Returns early on the lanes above `last`; the others enter a barrier.
#[kernel]
fn returns_early(s: &mut Session<impl Machine>, last: u32) -> Result<(), Aborted> {
    if s.block().rank() > last {
        return Ok(());
    }
    s.block().sync();
    Ok(())
}

/// Lane 0 and the others enter barriers at different places.
#[kernel]
#[allow(clippy::if_same_then_else)] // the mistake
fn splits(s: &mut Session<impl Machine>) -> Result<(), Aborted> {
    if s.block().is_leader() {
        s.block().sync();
    } else {
        s.block().sync();
    }
    Ok(())
}

/// Puts to different ranks from the lanes of one block.
#[kernel]
fn puts_apart(s: &mut Session<impl Machine>, window: Window<u8>, x: In<u8>) -> Result<(), Aborted> {
    let lane = (s.block().rank() % s.ranks()) as usize;
    for peer in s.peers(Team::World).skip(lane).take(1) {
        window.at(peer).write(s, s.block(), x);
    }
    s.barrier()
}

#[test]
fn lanes_that_diverge_are_caught_and_their_places_named() {
    let own = |launch: &(dyn Fn(&Communicator) -> Result<()> + Sync), lanes| -> String {
        run_threads(1, &options(1, lanes), |comm| Ok(launch(&comm)))
            .pop()
            .expect("a rank")
            .expect("joined")
            .expect_err("lanes diverge")
            .to_string()
    };
    let place = |line: u32| format!("{}:{line}", file!());
    for lanes in [32, 64] {
        let early = own(
            &|comm| comm.kernel(ReturnsEarly { last: 3 }).launch(),
            lanes,
        );
        assert!(
            early.contains("lanes of a block have diverged: lane 0"),
            "{early}"
        );
        assert!(early.contains(file!()), "{early}");
        let split = own(&|comm| comm.kernel(Splits {}).launch(), lanes);
        let body = include_str!("mistakes.rs").lines();
        let marker = "if s.block().is_leader() {";
        let line = body.enumerate().find(|(_, line)| line.trim() == marker);
        let line = line.expect("the kernel above").0 as u32 + 2;
        assert!(
            split.contains(&place(line)),
            "{split} lacks {}",
            place(line)
        );
        assert!(split.contains(&place(line + 2)), "{split}");
        // The control: no lane is above the last one.
        for result in run_threads(1, &options(1, lanes), |comm| {
            comm.kernel(ReturnsEarly { last: 63 }).launch()
        }) {
            result.expect("lanes that stay together");
        }
    }
    for message in failing(&options(1, 32), |comm| {
        let window = comm.alloc_window(DType::U8, 4, WindowOptions::default())?;
        let x = tensor(&[1u8])?;
        let launched = comm
            .kernel(PutsApart {
                window: (&window).into(),
                x: (&x).into(),
            })
            .launch();
        assert!(launched.is_err());
        launched
    }) {
        // A rank that launches late gets only the failure of the other one.
        let named = message.contains("pass different arguments to the collective call at ");
        let refused = message.contains("the kernel did not run to its end on rank ");
        assert!(named || refused, "{message}");
    }
}

#[test]
fn after_a_failure_every_call_returns_it_until_a_new_communicator() {
    for result in run_threads(2, &options(1, 1), |comm| {
        let first = comm.kernel(Faults {}).launch().expect_err("a fault");
        let again = comm.kernel(OtherBarrier { factor: 1.0 }).launch();
        assert!(matches!(first, Error::Failed(_)), "{first}");
        let again = again.expect_err("the communicator has failed").to_string();
        assert!(again.contains("in kernel faults #1"), "{again}");
        Ok(())
    }) {
        result.expect("joined");
    }
}

/// Panics on rank 1; rank 0 enters a barrier.
#[kernel]
fn panics(s: &mut Session<impl Machine>, limit: u32) -> Result<(), Aborted> {
    assert!(s.rank() < limit, "a panic of the author");
    s.barrier()
}

#[test]
fn a_panic_stops_the_other_ranks_at_once() {
    for lanes in LANES {
        let mut patient = options(1, lanes);
        patient.timeout = Duration::from_secs(600);
        let launch = |comm: &Communicator| {
            let launched = comm.kernel(Panics { limit: 1 }).launch();
            launched.expect_err("rank 1 panics").to_string()
        };
        let messages: Vec<[String; 2]> = run_threads(2, &patient, |comm| {
            // The second launch finds the failure of the first.
            Ok([launch(&comm), launch(&comm)])
        })
        .into_iter()
        .map(|rank| rank.expect("joined"))
        .collect();
        let panicked = match lanes {
            1 => "kernel panics panicked: a panic of the author",
            _ => "kernel panics panicked in lane ",
        };
        assert_contains(&messages[1][0], &[panicked, "a panic of the author"]);
        let text = "the kernel did not run to its end on rank 1";
        assert_contains(&messages[0][0], &["rank 1 in kernel panics #", text]);
        assert_eq!(messages[0][1], messages[0][0]);
        assert_eq!(messages[1][1], messages[0][0]);
    }
}

/// Writes a byte at `offset` of the shared memory of the last block.
///
/// # Safety
/// `offset` must be within the shared memory.
#[kernel]
unsafe fn overruns(s: &mut Session<impl Machine>, offset: u64) -> Result<(), Aborted> {
    let block = s.block();
    if block.index() + 1 == block.count() && block.is_leader() {
        let at = block.shared().wrapping_add(offset as usize);
        // SAFETY: the precondition of this function. Where the test violates it, the byte is one of
        // the 4096 that the host allocates after the shared memory to find such writes.
        unsafe { at.write(7) };
    }
    Ok(())
}

#[test]
fn a_write_beyond_shared_memory_is_found() {
    let run = |blocks, lanes, offset| {
        run_threads(1, &options(blocks, lanes), |comm| {
            let launch = comm.kernel(Overruns { offset });
            // SAFETY: the host has allocated the byte, as the kernel says.
            Ok(unsafe { launch.launch_unchecked() })
        })
        .pop()
        .expect("a rank")
        .expect("joined")
    };
    let end = SHARED_BYTES as u64;
    for offset in [end, end + 4000] {
        for (blocks, lanes) in [(1, 32), (2, 64), (2, 1)] {
            let error = run(blocks, lanes, offset).expect_err("beyond the end");
            let last = blocks - 1;
            let text =
                format!("kernel overruns wrote beyond the end of its shared memory (block {last})");
            assert_contains(&error.to_string(), &[&text]);
        }
        // A single lane is checked in debug builds only.
        if cfg!(debug_assertions) {
            let error = run(1, 1, offset).expect_err("beyond the end");
            let text = "kernel overruns wrote beyond the end of its shared memory";
            assert_contains(&error.to_string(), &[text]);
        }
    }
    // The control: the last byte that a kernel may use.
    for (blocks, lanes) in [(1, 1), (1, 32), (2, 64)] {
        run(blocks, lanes, end - RESERVED_BYTES as u64 - 1).expect("a byte of the kernel");
    }
}

/// Opens rounds and never closes them. Sends the launch's number and adds what has come.
#[kernel]
fn open_rounds(s: &mut Session<impl Machine>, sum: Out<u64>) -> Result<(), Aborted> {
    let (block, number) = (s.block(), s.epoch());
    let mut total = 0;
    for round in 0..3 {
        s.ready(|peer| [number * 10 + round, u64::from(peer), 0, 0, 0, 0, 0])?;
        for rank in 0..s.ranks() {
            total += s.word(rank, 0) + 1000 * s.word(rank, 1);
        }
    }
    if block.is_leader() {
        sum.set(0, total);
    }
    Ok(())
}

#[test]
fn rounds_that_the_author_leaves_open_are_closed() {
    for lanes in LANES {
        for result in run_threads(3, &options(1, lanes), |comm| {
            let sum = zeros(DType::U64, 1)?;
            for launch in 1..if is_short(lanes) { 50 } else { 200 } {
                comm.kernel(OpenRounds { sum: (&sum).into() }).launch()?;
                let expected = 3 * (30 * launch + 3) + 9000 * u64::from(comm.rank());
                assert_eq!(sum.to_vec::<u64>()?, [expected]);
            }
            Ok(())
        }) {
            result.expect("rounds in step");
        }
    }
}

/// Records an error on rank 0, and ignores what every round and barrier returns.
#[kernel]
fn ignores_failures(
    s: &mut Session<impl Machine>,
    x: In<u32>,
    passed: Out<u32>,
) -> Result<(), Aborted> {
    let block = s.block();
    if s.rank() == 0 && block.is_leader() {
        let _ = x.get(x.len());
    }
    let mut results = 0;
    for round in 0..4 {
        results += u32::from(s.ready(|_| [round; 7]).is_ok());
    }
    results += u32::from(s.done().is_ok()) + u32::from(s.barrier().is_ok());
    if block.is_leader() {
        passed.set(0, results);
    }
    Ok(())
}

#[test]
fn a_failed_round_that_the_author_ignores_fails_the_launch() {
    for lanes in LANES {
        let results = run_threads(2, &options(1, lanes), |comm| {
            let (x, passed) = (tensor(&[1u32])?, tensor(&[99u32])?);
            let arguments = IgnoresFailures {
                x: (&x).into(),
                passed: (&passed).into(),
            };
            let error = comm.kernel(arguments).launch().expect_err("an error");
            let error = error.to_string();
            assert_contains(&error, &["ignores_failures"]);
            let passed = passed.to_vec::<u32>()?[0];
            // Rank 0 fails in its first round; rank 1 may see the signal of that round.
            assert!(passed <= comm.rank(), "{passed} passed: {error}");
            Ok(())
        });
        for result in results {
            result.expect("a rank that ran");
        }
    }
}

/// Reads words of a rank and of a number that do not exist, and one that does.
#[kernel]
fn reads_words(s: &mut Session<impl Machine>, words: Out<u64>) -> Result<(), Aborted> {
    s.ready(|_| [u64::MAX; 7])?;
    if s.block().is_leader() {
        words.set(0, s.word(s.ranks(), 0));
        words.set(1, s.word(u32::MAX, 0));
        words.set(2, s.word(0, 7));
        words.set(3, s.word(0, usize::MAX));
        words.set(4, s.word(s.ranks() - 1, 6));
    }
    Ok(())
}

#[test]
fn words_that_do_not_exist_are_zero() {
    for lanes in LANES {
        for result in run_threads(2, &options(1, lanes), |comm| {
            let words = tensor(&[1u64; 5])?;
            comm.kernel(ReadsWords {
                words: (&words).into(),
            })
            .launch()?;
            assert_eq!(words.to_vec::<u64>()?, [0, 0, 0, 0, u64::MAX]);
            Ok(())
        }) {
            result.expect("no failure");
        }
    }
}

#[test]
fn different_numbers_of_blocks_are_a_mismatch() {
    fails_with(
        &options(2, 1),
        "called kernel other_barrier #1 with other values",
        &|comm| {
            let launch = comm.kernel(OtherBarrier { factor: 1.0 });
            launch.blocks(1 + comm.rank()).launch()
        },
    );
}

/// Enters a barrier of a window.
#[kernel]
fn window_barrier(s: &mut Session<impl Machine>, window: Window<u8>) -> Result<(), Aborted> {
    window.barrier(s, 0)?;
    Ok(())
}

#[test]
fn a_replay_after_the_end_of_its_window_is_an_error() {
    for message in failing(&options(1, 1), |comm| {
        let mut options = WindowOptions::default();
        options.barriers = 1;
        let window = comm.alloc_window(DType::U8, 4, options)?;
        comm.stream().begin_capture()?;
        let window_of = (&window).into();
        comm.kernel(WindowBarrier { window: window_of }).enqueue()?;
        let graph = comm.stream().end_capture()?.instantiate()?;
        graph.run(comm.stream())?;
        comm.stream().synchronize()?;
        window.free()?;
        graph.run(comm.stream())?;
        comm.stream().synchronize()
    }) {
        let texts = ["in kernel window_barrier #", "or the window has been freed"];
        assert_contains(&message, &texts);
    }
}
